"""`bier embed` and `bier export` as a user runs them."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file

from bier.images import ImageDataset
from bier.method.ensemble import EmbeddingEnsemble
from bier.models import embedding_file
from bier.models.backbones import build_backbone
from bier.models.embedding_file import EmbeddingFile
from bier.models.model import Model, load
from bier.search import read_embeddings

Cli = Callable[..., tuple[int, str, str]]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and twelve pictures in three classes."""
    root = tmp_path_factory.mktemp("embed")
    torch.manual_seed(0)
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16))).save(root / "run" / "model")
    random = np.random.default_rng(0)
    for number in range(12):
        folder = root / "photos" / f"class {number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return root


def test_a_folder(cli: Cli, place: Path) -> None:
    code, output, errors = cli("embed", place / "run", place / "photos", "--out", place / "a.safetensors", "--json")
    assert code == 0, errors
    result = json.loads(output)
    assert (result["images"], result["dimension"], result["groups"]) == (12, 24, [8, 16])
    found = read_embeddings(place / "a.safetensors")
    assert list(found.labels or []) == ["class 0"] * 4 + ["class 1"] * 4 + ["class 2"] * 4
    model = load(place / "run")
    files = [place / "photos" / str(path) for path in found.paths]
    tensors = load_file(place / "a.safetensors")
    np.testing.assert_allclose(tensors["vectors"], model.encode(files), atol=1e-5)
    np.testing.assert_allclose(tensors["raw"], model.embed_raw(files), rtol=1e-3, atol=1e-4)
    with safe_open(place / "a.safetensors", framework="np") as file:
        assert file.metadata() == {"groups": "[8, 16]", "weighting": '"sqrt"'}
    assert sorted(path.name for path in place.glob("*a.*")) == ["a.json", "a.safetensors"]


def test_a_table_with_boxes_and_a_broken_file(cli: Cli, place: Path) -> None:
    (place / "broken.jpg").write_bytes(b"no picture")
    rows = [(f"photos/class {n % 3}/{n}.png", f"label {n}", 0, 0, 20 + n, 30) for n in range(4)]
    with (place / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "x1", "y1", "x2", "y2"), *rows, ("broken.jpg", "x", 0, 0, 5, 5)])
    arguments = ("embed", place / "run", place / "table.csv", "--out", place / "t.safetensors", "--json")
    code, output, errors = cli(*arguments)
    assert (code, output) == (2, "")
    assert "broken.jpg" in errors
    code, output, errors = cli(*arguments, "--skip-broken")
    assert code == 0, errors
    assert [Path(one["path"]).name for one in json.loads(output)["skipped"]] == ["broken.jpg"]
    boxes = [row[2:] for row in rows]
    expected = load(place / "run").encode(ImageDataset([place / row[0] for row in rows], 48, boxes))
    np.testing.assert_allclose(load_file(place / "t.safetensors")["vectors"], expected, atol=1e-5)
    assert json.loads((place / "t.json").read_text())["labels"] == [row[1] for row in rows]


def test_an_interrupted_pass_goes_on_and_ranks_share(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_file, "SHARD", 5)
    model = load(place / "run")
    source = ImageDataset(sorted((place / "photos").rglob("*.png")), 48)

    def again(about: str = "first") -> EmbeddingFile:
        return EmbeddingFile(model, source, place / "r.safetensors", {"about": about})

    first = again()
    assert first.begin() == 0
    seen: list[tuple[int, int]] = []
    first.fill(rank=1, world=2, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (5, 5)  # the second of the shards 5, 5, 2
    assert again().begin() == 5
    assert again("other").begin() == 0  # other images or another model: nothing of the old is used
    assert again().begin() == 0
    for rank in (0, 1):
        again().fill(rank, 2)
    monkeypatch.setattr(model, "embed_raw", lambda *_: pytest.fail("everything was there already"))
    again().fill()
    again().finish()
    np.testing.assert_allclose(
        load_file(place / "r.safetensors")["raw"], load(place / "run").embed_raw(source), atol=1e-4
    )
    assert not (place / "r.parts").exists()


def test_torchrun(place: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bier"]
    arguments = ["embed", str(place / "run"), str(place / "photos"), "--out", str(place / "two.safetensors"), "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=QUIET, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"] == 12
    files = sorted((place / "photos").rglob("*.png"), key=lambda path: path.relative_to(place).as_posix())
    np.testing.assert_allclose(
        load_file(place / "two.safetensors")["vectors"], load(place / "run").encode(files), atol=1e-5
    )


def test_bad_input_is_one_line(cli: Cli, place: Path) -> None:
    for arguments, expected in (
        ((place / "photos", place / "photos", "--out", place / "x.safetensors"), "model.json"),
        ((place / "run", place / "nowhere", "--out", place / "x.safetensors"), "folder, or a table"),
        ((place / "run", place / "photos", "--out", place / "x.npy"), ".safetensors"),
    ):
        code, output, errors = cli("embed", *arguments)
        assert (code, output) == (2, "")
        assert expected in errors
        assert errors.count("\n") == 1


def test_export(cli: Cli, place: Path) -> None:
    arguments = ("--to", "onnx", "--out", place / "model.onnx", "--json")
    code, output, errors = cli("export", place / "run", *arguments)
    assert code == 0, errors
    assert json.loads(output) == {"out": str(place / "model.onnx"), "format": "onnx", "crop": 48, "dimension": 24}
    pixels = np.random.default_rng(3).integers(0, 256, (3, 48, 48, 3), dtype=np.uint8)
    session = onnxruntime.InferenceSession(place / "model.onnx", providers=["CPUExecutionProvider"])
    exact = load(place / "run", precision="float32")  # as the export, whatever this machine's own precision is
    np.testing.assert_allclose(session.run(None, {"pixels": pixels})[0], exact.encode(pixels), atol=1e-4)
