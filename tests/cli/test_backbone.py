"""Search without training: `--backbone NAME` in place of a model, through every command that takes one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from PIL import Image

import bier
from bier.collection import Collection, image_collection, stored_collection
from bier.errors import ModelError
from bier.images import open_image
from bier.models.model import Untrained
from bier.search import read_embeddings

Cli = Callable[..., tuple[int, str, str]]
NAME = "efficientnet_lite0"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of four pictures, coarse, fine and finest patterns."""
    folder, random = tmp_path_factory.mktemp("plain") / "photos", np.random.default_rng(0)
    for cells in (4, 16, 64):
        (folder / f"cells {cells}").mkdir(parents=True)
        for number in range(4):
            pattern = Image.fromarray(random.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            pattern.resize((128, 128), Image.Resampling.NEAREST).save(folder / f"cells {cells}" / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def query(photos: Path) -> Path:
    random = np.random.default_rng(9)
    pattern = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pattern.resize((128, 128), Image.Resampling.NEAREST).save(photos.parent / "query.png")
    return photos.parent / "query.png"


def test_index_and_search_without_a_model(cli: Cli, photos: Path, query: Path, tmp_path: Path) -> None:
    code, out, err = cli("index", photos, "--backbone", NAME, "--out", tmp_path / "shop.index", "--json")
    assert code == 0, err
    assert (json.loads(out)["images"], json.loads(out)["dimension"]) == (12, 1280)
    code, out, err = cli("search", tmp_path / "shop.index", query, "-k", 4, "--json")
    assert code == 0, err
    results = json.loads(out)["results"]
    assert [one["label"] for one in results] == ["cells 16"] * 4
    plain = bier.pretrained(NAME)
    expected = plain.encode(results[0]["path"]) @ plain.encode(query).T
    assert results[0]["score"] == pytest.approx(float(expected[0, 0]), abs=1e-4)


def test_an_index_keeps_the_look_that_it_was_made_with(cli: Cli, photos: Path, query: Path, tmp_path: Path) -> None:
    quick, closer = tmp_path / "quick.index", tmp_path / "closer.index"
    assert cli("index", photos, "--backbone", NAME, "--fast", "--out", quick)[0] == 0
    assert cli("index", photos, "--backbone", NAME, "--out", closer)[0] == 0
    model = bier.pretrained(NAME)
    for index, fast in ((quick, True), (closer, False)):
        collection = Collection.open(index)
        assert collection.model.is_fast == fast
        one = collection.store.ids[0]
        np.testing.assert_allclose(
            collection.store.vectors([one])[0], model.encode(photos / str(one), fast=fast)[0], atol=1e-4
        )
        results = json.loads(cli("search", index, query, "-k", 1, "--json")[1])["results"]
        expected = model.encode(results[0]["path"], fast=fast) @ model.encode(query, fast=fast).T
        assert results[0]["score"] == pytest.approx(float(expected[0, 0]), abs=1e-4)
    code, _, err = cli("index", photos, "--backbone", NAME, "--add", quick)
    assert code == 2
    assert "another look (--fast)" in err
    code, _, err = cli("index", photos, "--backbone", NAME, "--fast", "--add", quick)
    assert code == 0, err
    code, _, err = cli("serve", "--index", quick, "--fast")
    assert code == 2
    assert "keeps the look" in err


def test_an_index_of_an_embeddings_file_remembers_the_backbone(cli: Cli, photos: Path, tmp_path: Path) -> None:
    code, out, err = cli("embed", photos, "--backbone", NAME, "--out", tmp_path / "v.safetensors", "--json")
    assert code == 0, err
    assert (json.loads(out)["images"], json.loads(out)["groups"]) == (12, [1280])
    known = read_embeddings(tmp_path / "v.safetensors")
    assert (known.model["backbone"], len(known.model["fingerprint"])) == (NAME, 64)
    code, _, err = cli("index", tmp_path / "v.safetensors", "--out", tmp_path / "i")
    assert code == 0, err
    assert Collection.open(tmp_path / "i").model.metadata == {"method": "untrained"}
    other = Collection.open(tmp_path / "i")
    other.store.about["model"]["fingerprint"] = "0" * 64
    with pytest.raises(bier.BierError, match="other weights"):
        _ = other.model


def test_evaluate_measures_the_backbone(cli: Cli, photos: Path, tmp_path: Path) -> None:
    data = ("--data", "folder", "--root", photos)
    code, out, err = cli("evaluate", "--backbone", NAME, *data, "--report", tmp_path / "report", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["queries"], result["measured"]["part"]) == (12, "all")
    assert result["recall"]["ensemble"]["1"] == 100.0
    assert (tmp_path / "report" / "index.html").is_file()
    code, _, err = cli("evaluate", "--backbone", NAME)
    assert code == 2
    assert "--data" in err


def test_pages_show_the_backbone(cli: Cli, photos: Path, tmp_path: Path) -> None:
    shown = image_collection(Untrained(NAME), photos)
    assert (len(shown.store), shown.model.groups) == (12, (1280,))
    source, box = shown.picture(shown.store.ids[0])
    assert open_image(source, box=box).size == (128, 128)
    assert cli("index", photos, "--backbone", NAME, "--out", tmp_path / "shop.index")[0] == 0
    assert len(stored_collection(None, str(tmp_path / "shop.index")).store) == 12


def test_export(cli: Cli, photos: Path, tmp_path: Path) -> None:
    code, out, err = cli("export", "--backbone", NAME, "--out", tmp_path / "plain.onnx", "--json")
    assert code == 0, err
    assert json.loads(out)["dimension"] == 1280
    session = onnxruntime.InferenceSession(tmp_path / "plain.onnx", providers=["CPUExecutionProvider"])
    [vector] = session.run(None, {"image": np.asarray(Image.open(next(photos.rglob("*.png"))))})
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_weights_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.safetensors"):
        bier.load(Untrained(NAME, tmp_path / "nothing.safetensors"))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="has no pretrained weights"):
        Untrained("conv4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("index", "model", "photos", "--backbone", NAME, "--out", "x"), "the images alone. Got 2 paths"),
        (("embed", "photos", "--out", "x.safetensors"), "Got 1 path instead"),
        (("export", "runs/a", "--backbone", NAME, "--out", "x.onnx"), "either a run or model, or --backbone"),
        (("export", "--out", "x.onnx"), "either a run or model, or --backbone"),
        (("serve", "--port", "0"), "either a run or model, or --backbone"),
        (("serve", "--backbone", NAME, "--port", "0"), "--images"),
        (("index", "photos", "--backbone", "nonsense", "--out", "x"), "photos"),
    ],
)
def test_bad_input(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
