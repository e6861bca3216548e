"""`bier embed` and `bier export` as a user runs them."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file

from bier.errors import SearchError
from bier.images import ImageDataset
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model, load
from bier.search import Index, embeddings, read_embeddings

Cli = Callable[..., tuple[int, str, str]]


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
    assert isinstance(found.vectors.base, np.memmap), "a file may be larger than memory"
    model = load(place / "run")
    files = [place / "photos" / str(path) for path in found.paths]
    tensors = load_file(place / "a.safetensors")
    np.testing.assert_allclose(tensors["vectors"], model.encode(files), atol=1e-5)
    np.testing.assert_allclose(tensors["raw"], model.embed_raw(files), rtol=1e-3, atol=1e-4)
    with safe_open(place / "a.safetensors", framework="np") as file:
        metadata = file.metadata()
    assert len(metadata.pop("sha256")) == 64
    assert metadata == {"groups": "[8, 16]", "weighting": '"sqrt"'}
    assert tensors["about"].tobytes() == (place / "a.json").read_bytes()
    assert sorted(path.name for path in place.glob("*a.*")) == ["a.json", "a.safetensors"]


def test_another_engine(cli: Cli, place: Path, interrupted: Cli, tmp_path: Path) -> None:
    """Its vectors differ a little, so it does not continue what torch has begun."""
    pytest.importorskip("openvino")
    given = (place / "run", place / "photos", "--out", tmp_path / "v.safetensors")
    assert interrupted(*given)[0] == 130
    code, output, errors = cli("embed", *given, "--backend", "openvino", "--json")
    assert code == 0, errors
    assert json.loads(output)["resumed"] == 0
    found = read_embeddings(tmp_path / "v.safetensors")
    files = [place / "photos" / str(path) for path in found.paths]
    exact = load(place / "run", precision="float32").encode(files)
    assert (exact * found.vectors).sum(1).min() > 0.999
    code, _, errors = cli("index", *given[:2], "--out", tmp_path / "index", "--backend", "openvino")
    assert code == 0, errors
    np.testing.assert_allclose(Index.load(tmp_path / "index").vectors(found.paths), found.vectors, atol=1e-2)


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


@pytest.fixture
def interrupted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`bier embed`, with shards of five images and Ctrl-C after the first two of them."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(embeddings, "SHARD", 5)
        whole, calls = Model.embed_raw, iter(range(99))

        def embed_raw(self: Model, *arguments: Any, **options: Any) -> Any:
            if next(calls) == 2:
                raise KeyboardInterrupt
            return whole(self, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Model, "embed_raw", embed_raw)
            return cli("embed", *arguments)

    return run


def test_an_interrupted_pass_goes_on(cli: Cli, interrupted: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (place / "run", place / "photos", "--out", place / "r.safetensors", "--json")
    assert interrupted(*arguments)[0] == 130
    whole, encoded = Model.embed_raw, []

    def embed_raw(self: Model, images: ImageDataset, *arguments: Any, **options: Any) -> Any:
        encoded.extend(images.indices)
        return whole(self, images, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Model, "embed_raw", embed_raw)
        code, output, errors = cli("embed", *arguments)
    assert code == 0, errors
    assert (json.loads(output)["resumed"], encoded) == (10, [10, 11])
    found = read_embeddings(place / "r.safetensors", raw=True)
    expected = load(place / "run").embed_raw([place / "photos" / str(path) for path in found.paths])
    np.testing.assert_allclose(found.raw, expected, atol=1e-4)
    assert not (place / "r.parts").exists()


def write_table(file: Path, width: int, **labels: str) -> None:
    rows = [(f"photos/class {n % 3}/{n}.png", labels.get("label", "x"), 0, 0, width, 30) for n in range(12)]
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([("path", "label", "x1", "y1", "x2", "y2"), *rows])


@pytest.mark.parametrize("change", ["boxes", "labels", "model", "image"])
def test_what_has_changed_is_encoded_again(
    cli: Cli, interrupted: Cli, place: Path, tmp_path: Path, change: str
) -> None:
    for folder in ("run", "photos"):
        shutil.copytree(place / folder, tmp_path / folder)
    arguments = (tmp_path / "run", tmp_path / "table.csv", "--out", tmp_path / "t.safetensors", "--json")
    write_table(tmp_path / "table.csv", width=20)
    assert interrupted(*arguments)[0] == 130
    assert len(list((tmp_path / "t.parts").glob("shard-*"))) == 2
    if change == "boxes":
        write_table(tmp_path / "table.csv", width=50)
    elif change == "labels":
        write_table(tmp_path / "table.csv", width=20, label="y")
    elif change == "model":
        torch.manual_seed(9)
        Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16))).save(tmp_path / "run" / "model")
    else:
        Image.new("RGB", (60, 40), "red").save(tmp_path / "photos" / "class 0" / "0.png")
    code, output, errors = cli("embed", *arguments)
    assert code == 0, errors
    assert json.loads(output)["resumed"] == 0
    found = read_embeddings(tmp_path / "t.safetensors")
    boxes = [(0, 0, 50 if change == "boxes" else 20, 30)] * 12
    files = [tmp_path / str(path) for path in found.paths]
    np.testing.assert_allclose(found.vectors, load(tmp_path / "run").encode(ImageDataset(files, 48, boxes)), atol=1e-5)
    assert set(found.labels or ()) == {"y" if change == "labels" else "x"}


def test_shards_are_written_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "SHARD", 5)
    vectors, raw = np.random.default_rng(0).normal(size=(2, 12, 6)).astype(np.float32)

    def writer(fingerprint: str = "first") -> embeddings.EmbeddingsWriter:
        return embeddings.EmbeddingsWriter(tmp_path / "r.safetensors", 12, fingerprint)

    assert writer().begin() == 0
    assert [list(rows) for _, rows in writer().missing()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    writer().write(1, vectors[5:10], raw[5:10])
    assert writer().begin() == 5
    for number, rows in writer().missing():
        writer().write(number, vectors[rows], raw[rows])
    assert writer().begin() == 12
    about = {"paths": [f"{n}.jpg" for n in range(12)], "groups": [2, 4], "weighting": "sqrt"}
    writer().finish(about)
    found = read_embeddings(tmp_path / "r.safetensors", raw=True)
    np.testing.assert_array_equal(found.vectors, vectors)
    np.testing.assert_array_equal(found.raw, raw)
    assert (found.weighting, found.groups) == ("sqrt", (2, 4))
    writer().begin()
    with pytest.raises(SearchError, match="must all be there"):
        writer().finish(about)


def test_texts_of_a_table_stay_as_they_are(cli: Cli, place: Path, tmp_path: Path) -> None:
    """A reader that guesses types makes 7 of the label 007, and 1 of the path 0001."""
    for name in ("0001", "0002"):
        shutil.copy(place / "photos" / "class 0" / "0.png", tmp_path / name)
    (tmp_path / "table.csv").write_text("path,label\n0001,007\n0002,1e3\n")
    code, _, errors = cli("embed", place / "run", tmp_path / "table.csv", "--out", tmp_path / "t.safetensors")
    assert code == 0, errors
    found = read_embeddings(tmp_path / "t.safetensors")
    assert (found.paths, found.labels) == (["0001", "0002"], ["007", "1e3"])


def test_every_image_that_training_takes(cli: Cli, place: Path, tmp_path: Path) -> None:
    """The endings of training, and the first folder as the class; through `embed` and `index`."""
    picture = Image.open(place / "photos" / "class 0" / "0.png")
    for name in ("mugs/blue/1.avif", "mugs/2.JFIF", "cups/3.jpg", "4.png"):
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / "all" / name, "JPEG" if name.endswith("JFIF") else None)
    (tmp_path / "elsewhere").mkdir()
    picture.save(tmp_path / "elsewhere" / "5.png")
    (tmp_path / "all" / "cups" / "linked").symlink_to(tmp_path / "elsewhere")
    expected = {
        "mugs/blue/1.avif": "mugs",
        "mugs/2.JFIF": "mugs",
        "cups/3.jpg": "cups",
        "cups/linked/5.png": "cups",
        "4.png": None,
    }
    assert cli("embed", place / "run", tmp_path / "all", "--out", tmp_path / "a.safetensors")[0] == 0
    found = read_embeddings(tmp_path / "a.safetensors")
    assert dict(zip(found.paths, found.labels or (), strict=True)) == expected
    assert cli("index", place / "run", tmp_path / "all", "--out", tmp_path / "index")[0] == 0
    index = Index.load(tmp_path / "index")
    assert {entry.id: entry.label for entry in index.entries(index.ids)} == expected


@pytest.mark.parametrize("source", ["photos", "table.csv"])
def test_urls(cli: Cli, place: Path, tmp_path: Path, source: str) -> None:
    """The folder, the table and the pictures may be anything that fsspec opens."""
    remote = fsspec.filesystem("memory")
    for file in (place / "photos").rglob("*.png"):
        remote.pipe(f"/shop/photos/{file.relative_to(place / 'photos').as_posix()}", file.read_bytes())
    remote.pipe("/shop/photos/.hidden/1.png", b"")
    paths = [f"photos/class {number % 3}/{number}.png" for number in range(12)]
    shutil.copytree(place / "photos", tmp_path / "photos")
    table = "\n".join(["path,label", *(f"{path},{number % 2}" for number, path in enumerate(paths))])
    (tmp_path / "table.csv").write_text(table)
    remote.pipe("/shop/table.csv", table.replace("photos/class 1/4", "memory://shop/photos/class 1/4").encode())
    found = []
    for place_of, name in ((tmp_path, "here"), ("memory://shop", "there")):
        out = tmp_path / f"{name}.safetensors"
        code, _, errors = cli("embed", place / "run", f"{place_of}/{source}", "--out", out)
        assert code == 0, errors
        found.append(read_embeddings(out))
    here, there = found
    np.testing.assert_array_equal(here.vectors, there.vectors)
    assert [str(path).removeprefix("memory://shop/") for path in there.paths] == here.paths
    assert here.labels == there.labels
    assert there.root == ("memory://shop/photos" if source == "photos" else "memory://shop")
    out = tmp_path / "none.safetensors"
    for missing, reason in (("memory://nowhere/t.csv", "t.csv"), ("never://x/photos", "Protocol not known: never")):
        code, _, errors = cli("embed", place / "run", missing, "--out", out)
        assert (code, errors.count("\n")) == (2, 1)
        assert reason in errors


def test_bad_input_is_one_line(cli: Cli, place: Path) -> None:
    for arguments, expected in (
        ((place / "photos", place / "photos", "--out", place / "x.safetensors"), "model.json"),
        ((place / "run", place / "nowhere", "--out", place / "x.safetensors"), "folder, or a table"),
        ((place / "run", place / "photos", "--out", place / "x.npy"), ".safetensors"),
        ((place / "run", place / "photos"), "Missing option '--out'"),
        (
            (place / "run", place / "photos", "--out", place / "x.safetensors", "--ray", "local", "--cache", place),
            "--cache",
        ),
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
    expected = load(place / "run", precision="float32").encode(pixels)  # `auto` may compute in bfloat16
    np.testing.assert_allclose(session.run(None, {"image": pixels[1]})[0], expected[1], atol=1e-4)
    code, _, errors = cli("export", place / "run", "--out", place / "crops.onnx", "--input", "crops")
    assert (code, errors) == (0, f"{place / 'crops.onnx'}: 48x48 pixels to 24 dimensions (onnx)\n")
    session = onnxruntime.InferenceSession(place / "crops.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"pixels": pixels})[0], expected, atol=1e-4)
    code, _, errors = cli("export", place / "run", "--to", "hub", "--out", place / "hub", "--input", "crops")
    assert (code, errors) == (2, "bier: --input is for --to onnx.\n")
