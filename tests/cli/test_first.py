"""The first minute: `bier try`, photographs as an argument, names for pictures, and what is said at once."""

import csv
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import bier
from bier import EmbeddingEnsemble, Model
from bier.collection import image_collection, summarise
from bier.collection.summary import training_outlook
from bier.config import Config
from bier.models.backbones import build_backbone
from bier.models.model import Untrained

Cli = Callable[..., tuple[int, str, str]]
CONV4 = ["--set", "model.backbone=conv4", "--set", "model.embedding=24", "--set", "train.batch_classes=2"]


def tried(photos: Path) -> tuple[dict[str, Any], str]:
    """What `bier try` prints, until Ctrl-C; the page must answer."""
    command = [sys.executable, "-m", "bier", "try", str(photos), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line == "}\n":
                    break
            assert lines, process.stderr.read()
            page = json.loads("".join(lines))
            assert httpx.get(f"{page['url']}/api/status", timeout=60).json()["images"] == page["images"]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            return page, process.stderr.read()
        finally:
            process.kill()


def test_try_goes_from_photographs_to_the_page(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIER_CACHE", str(tmp_path / "cache"))
    photos = tmp_path / "photos"
    shutil.copytree(pictures, photos)
    shutil.copy(photos / "class 0" / "0.png", photos / "class 0" / "copy.png")
    (photos / "class 1" / "broken.jpg").write_bytes(b"no picture")
    before = sorted(photos.rglob("*"))
    page, said = tried(photos)
    summary = page["summary"]
    assert page["images"] == summary["images"] == 65
    assert (summary["classes"], summary["unreadable"], summary["duplicates"], summary["leaks"]) == (8, 1, 1, None)
    assert summary["queries"] == 64
    assert 0 <= summary["nearest_right"] <= 100
    assert "65 images, 8 classes (one per folder), 1 unreadable, 1 duplicates" in said
    assert f"{summary['nearest_right']:.0f}% of the time" in said
    assert f"{page['url']} (Ctrl-C stops)" in said
    assert "bier train" in said
    assert sorted(photos.rglob("*")) == before
    [kept] = (tmp_path / "cache").glob("photos-*/index/manifest.json")
    written = kept.stat().st_mtime_ns
    again, _ = tried(photos)
    assert again["summary"] == summary
    assert kept.stat().st_mtime_ns == written  # nothing was encoded again


def test_leaks_are_of_a_divided_folder_and_unlabelled_photographs_have_no_figures(
    pictures: Path, tmp_path: Path
) -> None:
    for part in ("train", "test"):
        shutil.copytree(pictures / "class 2", tmp_path / "divided" / part / "pots")
    shutil.copytree(pictures / "class 3", tmp_path / "divided" / "test" / "pans")
    plain = Untrained("efficientnet_lite0")
    divided = summarise(image_collection(plain, tmp_path / "divided"), tmp_path / "divided")
    assert (divided.images, divided.leaks, divided.duplicates) == (24, 8, 8)
    flat = summarise(image_collection(plain, pictures / "class 2"), pictures / "class 2")
    assert (flat.classes, flat.nearest_right, flat.training) == (0, None, None)
    assert list(flat.lines()) == ["8 images, no classes, 0 unreadable, 0 duplicates"]


@pytest.mark.parametrize(
    ("right", "classes", "images", "expected"),
    [(99.0, 40, 10, "already"), (80.0, 8, 10, "20 classes or more"), (80.0, 40, 2, "no more than 2")],
)
def test_the_summary_says_why_training_will_hardly_help(right: float, classes: int, images: int, expected: str) -> None:
    said = training_outlook(right, dict.fromkeys(map(str, range(classes)), images))
    assert said.startswith("Training will hardly help, because")
    assert expected in said
    assert training_outlook(80.0, dict.fromkeys("abcdefghijklmnopqrst", 10)).startswith(
        "Training may help, because 20%"
    )


@pytest.fixture(scope="module")
def collection(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float | None], Path]:
    """An index of six of eight classes, by a model with or without a threshold."""

    def made(threshold: float | None) -> Path:
        folder = tmp_path_factory.mktemp("named")
        for name in range(6):
            shutil.copytree(pictures / f"class {name}", folder / "shop" / f"class {name}")
        torch.manual_seed(0)
        backbone = build_backbone("conv4")
        row = [threshold, threshold]
        record = {"threshold": threshold, "prefixes": row, "learners": row, "precision": 95.0, "part": "validation"}
        record |= {"classes": 8, "queries": 0, "images": 0, "expected": None}
        ensemble = EmbeddingEnsemble(backbone.features, (8, 16))
        Model(backbone, ensemble, weighting="sqrt", precision="float32", metadata={"same": record}).save(
            folder / "model"
        )
        return folder

    return made


def named(cli: Cli, folder: Path, photos: Path) -> tuple[dict[str, dict[str, str]], str]:
    code, _, said = cli("index", folder / "model", folder / "shop", "--out", folder / "shop.index")
    assert code == 0, said
    code, _, said = cli("label", photos, "--with", folder / "shop.index", "--out", folder / "labels.csv")
    assert code == 0, said
    with (folder / "labels.csv").open(newline="") as file:
        return {Path(row["image"]).name: row for row in csv.DictReader(file)}, said


def test_label_names_pictures_and_sets_unknown_ones_apart(
    cli: Cli, collection: Callable[[float | None], Path], pictures: Path, tmp_path: Path
) -> None:
    folder, photos = collection(0.99999), tmp_path / "new"
    photos.mkdir()
    shutil.copy(pictures / "class 7" / "0.png", photos / "a-stranger.png")
    shutil.copy(pictures / "class 4" / "3.png", photos / "known.png")
    rows, said = named(cli, folder, photos)
    assert list(rows) == ["known.png", "a-stranger.png"]
    known = rows["known.png"]
    assert (known["answer"], known["label"], known["decided_by"]) == ("same", "class 4", "class 4/3.png")
    assert (float(known["confidence"]), float(known["similarity"])) == (1.0, pytest.approx(1.0, abs=1e-3))
    assert (rows["a-stranger.png"]["answer"], rows["a-stranger.png"]["label"]) == ("unknown", "")
    assert "1 named, 1 unknown" in said
    # A picture of the collection does not vote on its own name.
    rows, said = named(cli, folder, folder / "shop" / "class 4")
    assert {row["answer"] for row in rows.values()} == {"unknown"}
    (folder / "labels.csv").write_text("name,price\n")
    code, _, said = cli("label", photos, "--with", folder / "shop.index", "--out", folder / "labels.csv")
    assert (code, (folder / "labels.csv").read_text()) == (2, "name,price\n")
    assert "not a table of `bier label`" in said


def test_label_without_a_threshold_says_similar_and_what_is_needed(
    cli: Cli, collection: Callable[[float | None], Path], pictures: Path
) -> None:
    rows, said = named(cli, collection(None), pictures / "class 7")
    assert {row["answer"] for row in rows.values()} == {"similar"}
    assert all(row["label"].startswith("class ") for row in rows.values())
    assert "the model keeps no threshold (that takes 20 validation classes" in said


def test_a_folder_of_photographs_is_an_argument(cli: Cli, pictures: Path, tmp_path: Path) -> None:
    code, _, said = cli("train", pictures, *CONV4, "--steps", 1, "--out", tmp_path / "run")
    assert code == 0, said
    data = Config.from_toml(tmp_path / "run" / "config.toml").data
    assert (data.name, data.root) == ("folder", str(pictures))
    code, out, said = cli("evaluate", tmp_path / "run", pictures, "--no-report", "--no-untrained", "--json")
    assert code == 0, said
    assert json.loads(out)["queries"] == 32  # the half that the run was not trained on
    code, out, said = cli("data", "check", pictures, "--quick", "--json")
    assert (code, json.loads(out)["test"]["classes"]) == (0, 4), said


def test_photographs_alone_are_measured_with_the_plain_backbone(cli: Cli, pictures: Path) -> None:
    code, out, said = cli("evaluate", pictures, "--no-report", "--json")
    assert code == 0, said
    assert json.loads(out)["queries"] == 64


def test_train_without_anything_explains_itself(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = cli("train")
    assert code == 2
    assert "Give a folder of photographs with one folder per class" in said
    assert "train photos" in said
    assert list(tmp_path.iterdir()) == []


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"bier {bier.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "photos", "--out", "run"], "run already holds a run"),
        (["train", "nowhere"], "There is no folder or file 'nowhere'"),
        (["try", "nowhere"], "There is no folder or file 'nowhere'"),
        (["label", "nowhere", "--with", "shop.index", "--out", "labels.csv"], "There is no folder or file 'nowhere'"),
    ],
)
def test_mistakes_are_told_before_torch_is_imported(arguments: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("seed = 0\n")
    code = "import sys\nfrom bier.__main__ import main\ntry:\n    main()\nfinally:\n    print('torch' in sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert expected in done.stderr


def test_ctrl_c_in_the_first_moment_is_one_line() -> None:
    code = (
        "import sys\nfrom bier.__main__ import main\n"
        "class CtrlC:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'bier.cli':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "bier: interrupted\n")
