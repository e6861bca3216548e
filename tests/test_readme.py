"""The README's code runs as it stands there."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import bier

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
