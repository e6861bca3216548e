"""The README's commands and the code of docs/from-python.md run; commands in documents and help texts are accepted."""

import inspect
import re
import shlex
import socket
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

import bier
from bier.cli import app

if TYPE_CHECKING:
    from fastapi import FastAPI

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
TUTORIAL = (README.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
FROM_PYTHON = (README.parent / "docs" / "from-python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", FROM_PYTHON, flags=re.DOTALL)
LINES = [line.split("  #")[0].strip() for line in TEXT.splitlines() if line.startswith("    ")]
SMALL = {
    "model.backbone": "conv4",
    "model.embedding": 24,
    "train.steps": 2,
    "train.batch_classes": 2,
    "train.batch_images": 2,
    "data.validation": 0.0,
}


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """photos/ with a few classes, in the current folder."""
    generator = np.random.default_rng(0)
    for name in ("mugs", "bowls", "jugs", "cans"):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(4):
            pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def a_shop(photos: None) -> None:
    """runs/shop, trained on them for a moment."""
    bier.train(bier.resolve("a-bier", "folder", {"data.root": "photos", **SMALL}), "runs/shop")


def test_the_install_command_and_the_list_of_extras() -> None:
    """tests/test_project.py installs the wheel itself."""
    project = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert LINES[2] == 'pip install ".[serve]"'
    told = re.search(r"The\sextras are (.*?); a command", TUTORIAL, flags=re.DOTALL)
    assert told is not None
    assert set(re.findall("`([a-z]+)`", told[1])) == extras - {"all", "dev", "docs"}


def test_the_commands_try_train_and_search(photos: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are written, but with a small network and two steps, and with a client in place of the server."""
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    found = []

    def ask(page: "FastAPI", *_: object) -> None:
        with TestClient(page, base_url="http://127.0.0.1") as client:
            shown = client.get("/api/status").json()
            some = client.get("/api/browse").json()["images"][0]["id"]
            answer = client.get("/api/search", params={"id": some, "k": 3})
            found.append((shown["images"], answer.status_code))

    monkeypatch.setattr("bier.cli.serve._run", ask)
    monkeypatch.setattr("bier.cli.serve._listen", lambda *_: socket.create_server(("127.0.0.1", 0)))
    small = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    for line in LINES[3:6]:
        name, *words = shlex.split(line)
        assert name == "bier"
        result = CliRunner().invoke(app, [*words, *(small if words[0] == "train" else [])])
        assert result.exit_code == 0, result.output
    assert found == [(16, 200), (16, 200)]  # `try` and `serve`


def test_the_make_targets_exist() -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "docs"):
        assert f"`make {target}`" in TEXT or f"make {target}" in LINES
        assert f"\n{target}:" in makefile


def test_the_code_runs(a_shop: None) -> None:
    assert BLOCKS
    for code in BLOCKS:
        exec(compile(code, "from-python.md", "exec"), {})


def commands() -> dict[str, str]:
    """Lines such as `bier train --data glyphs`, in documents and in the examples of `--help`, and where they are."""
    found: dict[str, str] = {}
    texts = {str(path.relative_to(README.parent)): path.read_text(encoding="utf-8") for path in DOCUMENTS}
    registered = [*app.registered_commands]
    for group in app.registered_groups:
        registered += group.typer_instance.registered_commands
    for one in registered:
        texts[one.callback.__name__] = one.help or inspect.getdoc(one.callback) or ""
    for place, broken in texts.items():
        text = re.sub(r"\\\n *", "", broken)
        for line in re.findall(r"^ *(?:torchrun .*-m )?(bier [a-z].*)$", text, flags=re.MULTILINE):
            command = re.split(" {2,}", line)[0]  # what follows is an explanation
            if "…" not in command and "..." not in command:
                found.setdefault(command, place)
    return found


DOCUMENTS = [README, *sorted((README.parent / "docs").glob("*.md"))]


def test_commands_are_accepted() -> None:
    """Names, options and types; nothing is run."""
    assert len(commands()) > 30
    command = typer.main.get_command(app)
    for line, place in commands().items():
        try:
            parse(command, shlex.split(line, comments=True)[1:])
        except Exception as error:
            pytest.fail(f"{place}: {line}: {error}")


def parse(command: Any, words: list[str]) -> None:
    context = command.make_context("bier", words[:1])
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, words if not hasattr(command, "resolve_command") else words[:1])


def test_the_environment_is_activated_before_the_first_command() -> None:
    lines = [line.strip() for line in TUTORIAL.splitlines() if line.startswith("    ")]
    first = next(number for number, line in enumerate(lines) if line.startswith("bier "))
    assert lines[1:first].index("source .venv/bin/activate") < lines[1:first].index(LINES[2])
