"""Sharing models: a folder as a hub holds it, the hub's real client without a network, and the card."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard, constants

import bier
from bier.cli.export import export
from bier.errors import ConfigError, ModelError
from bier.models.backbones import build_backbone
from bier.models.model import Model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    same = {"prefixes": [0.5, 0.625], "learners": [0.5, 0.6], "classes": 20, "part": "validation", "precision": 95.0}
    metadata = {
        "data": "folder",
        "method": "a-bier",
        "validation": {"step": 5, "recall": 81.25, "map": 40.0},
        "untrained": {"recall": 70.0, "map": 30.0},
        "same": same,
    }
    return Model(build_backbone("conv4"), bier.EmbeddingEnsemble(512, (8, 16)), "alpha", "float32", metadata)


@pytest.fixture
def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, 48, 48, 3), dtype=np.uint8)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Model, str], Path]:
    """The client in its offline mode, with a cache of its own in which a model is stored as a download would be."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def store(model: Model, name: str) -> Path:
        repository = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        model.save_pretrained(repository / "snapshots" / COMMIT)
        return repository / "snapshots" / COMMIT

    return store


def test_a_local_folder(model: Model, pictures: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "birds"
    model.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    expected = model.encode(pictures)
    for again in (bier.load(folder), Model.from_pretrained(folder), Model.from_pretrained(str(folder))):
        np.testing.assert_array_equal(again.encode(pictures), expected)
        assert (again.metadata, again.weighting, again.precision) == (model.metadata, "alpha", "float32")
    assert Model.from_pretrained(folder, precision="bfloat16").precision == "bfloat16"
    bier.load(folder).save(tmp_path / "own")
    assert json.loads((tmp_path / "own/model.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_damage_is_found(model: Model, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "m")
    text = (tmp_path / "m/config.json").read_text()
    (tmp_path / "m/config.json").write_text(text.replace('"resize": 48', '"resize": 49'))
    with pytest.raises(ModelError, match="checksum"):
        bier.load(tmp_path / "m")


def test_from_the_hub(model: Model, pictures: np.ndarray, offline: Callable[[Model, str], Path]) -> None:
    offline(model, "museum/birds")
    expected = model.encode(pictures)
    for again in (
        bier.load("hf:museum/birds"),
        bier.load(f"hf:museum/birds@{COMMIT}"),
        Model.from_pretrained("museum/birds"),
    ):
        np.testing.assert_array_equal(again.encode(pictures), expected)
    for name in ("hf:museum/fish", "hf:museum/birds@v9", "hf:not a name"):
        with pytest.raises(ModelError, match="cannot be had from the hub") as caught:
            bier.load(name)
        assert "\n" not in str(caught.value)


def test_the_card(model: Model, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "plain")
    card = ModelCard.load(tmp_path / "plain" / "README.md")
    assert (card.data.library_name, card.data.license) == ("bier", None)
    for text in (
        "| this model | 81.2 | 40.0 |",
        "| untrained backbone | 70.0 | 30.0 |",
        "0.625",
        "of 8, 16 dimensions",
    ):
        assert text in card.text
    whole, first = {"1": 57.5, "2": 68.0}, {"1": 50.0, "2": 61.0}
    rows = {"ensemble": whole, "ensemble-alpha": whole, "learner-1": first, "prefix-2": whole}
    results = {"recall": rows, "queries": 5924, "gallery": 5924}
    settings = "seed = 3\n[split.parts.train]\nimages = 1600\nclasses = 40"
    known = {"results": results, "licence": "apache-2.0", "settings": settings}
    model.save_pretrained(tmp_path / "full", model_card_kwargs=known)
    card = ModelCard.load(tmp_path / "full" / "README.md")
    assert card.data.license == "apache-2.0"
    for text in ("| ensemble | 57.5 | 68.0 |", "| learner-1 | 50.0 | 61.0 |", "5,924 queries", "seed = 3"):
        assert text in card.text
    assert card.text.count("| 57.5 |") == 1  # not under its other names too
    assert "| training data | folder, 1,600 images of 40 classes |" in card.text


def test_the_command_writes_a_folder_without_paths_of_this_machine(model: Model, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    model.save(run / "model")
    (run / "config.toml").write_text('seed = 7\n[data]\nname = "folder"\nroot = "/home/someone/photos"\n')
    (run / "report").mkdir()
    (run / "report" / "typical.png").write_bytes(b"a picture")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match="bier evaluate --json"):
        export(out, run, to="hub", results=tmp_path / "results.json")
    export(out, run, to="hub")
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "typical.png",
    ]
    card = (out / "README.md").read_text()
    assert "seed = 7" in card
    assert "typical.png" in card
    assert "someone" not in card
    with pytest.raises(ConfigError, match="new or empty"):
        export(out, run, to="hub")


def test_the_real_client_pushes_and_fetches(model: Model, pictures: np.ndarray, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    np.save(tmp_path / "pictures.npy", pictures)
    script = Path(__file__).with_name("hub_stand_in.py")
    command = [sys.executable, script, tmp_path / "model", tmp_path / "pictures.npy", tmp_path / "client"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() >= {"README.md", "config.json", "model.safetensors"}
