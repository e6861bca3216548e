"""The README's code runs as it is written there, and the commands of README, docs and help texts are accepted."""

import inspect
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image

import bier
from bier.cli import app
from bier.cli.embed import with_ray_address

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def a_shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """photos/ with a few classes, and runs/shop trained on them for a moment."""
    generator = np.random.default_rng(0)
    for name in ("mugs", "bowls", "jugs", "cans"):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(4):
            pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)
    settings = {
        "data.root": "photos",
        "model.backbone": "conv4",
        "model.embedding": 24,
        "train.steps": 2,
        "train.batch_classes": 2,
        "train.batch_images": 2,
        "data.validation": 0.0,
    }
    bier.train(bier.resolve("a-bier", "folder", settings), "runs/shop")
    return tmp_path


def test_there_is_code() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("code", BLOCKS)
def test_code_of_the_readme_runs(code: str, a_shop: Path) -> None:
    exec(compile(code, "README.md", "exec"), {})


def commands() -> dict[str, str]:
    """Lines such as `bier train --data glyphs`, in documents and in the examples of `--help`, and where they are."""
    found: dict[str, str] = {}
    texts = {str(path.relative_to(README.parent)): path.read_text(encoding="utf-8") for path in DOCUMENTS}
    registered = [*app.registered_commands]
    for group in app.registered_groups:
        registered += group.typer_instance.registered_commands
    for one in registered:
        texts[one.callback.__name__] = one.help or inspect.getdoc(one.callback) or ""
    for place, text in texts.items():
        for line in re.findall(r"^ *(?:torchrun .*-m )?(bier [a-z].*)$", text, flags=re.MULTILINE):
            command = re.split(" {2,}", line)[0]  # what follows is an explanation
            if "…" not in command and "..." not in command:
                found.setdefault(command, place)
    return found


DOCUMENTS = [README, *sorted((README.parent / "docs").glob("*.md"))]


def test_there_are_commands() -> None:
    assert len(commands()) > 30


@pytest.mark.parametrize("line", commands())
def test_commands_are_accepted(line: str) -> None:
    """Names, options and types; nothing is run."""
    words = with_ray_address(shlex.split(line, comments=True)[1:])
    command = typer.main.get_command(app)
    context = command.make_context("bier", words[:1])
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, words if not hasattr(command, "resolve_command") else words[:1])


def test_the_environment_is_activated_before_the_first_command() -> None:
    lines = [line.strip() for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("    ")]
    first = next(number for number, line in enumerate(lines) if line.startswith("bier "))
    assert "source .venv/bin/activate" in lines[:first]
