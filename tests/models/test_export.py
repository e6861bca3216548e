"""The exported graph gives our vectors: of a decoded picture of any size, and of any number of crops."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from bier.errors import MissingExtraError
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.export import export_onnx
from bier.models.model import Model


def exported(model: Model, path: Path, learners: int | None = None, takes: Any = "image") -> Any:
    export_onnx(model, path, learners, takes=takes)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def cosines(ours: Any, theirs: Any) -> Any:
    assert ours.shape == theirs.shape
    return (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)


def drawn(height: int, width: int) -> NDArray[np.uint8]:
    """Noise with structure at the scale of a tenth of the picture, as photographs have."""
    random = np.random.default_rng(height * width)
    coarse = random.integers(0, 256, (min(10, height), min(10, width), 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def test_crops_in_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16, 24)), precision="float32")
    session = exported(model, tmp_path / "model.onnx", 2, "crops")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    random = np.random.default_rng(0)
    for count in (1, 5):
        pixels = random.integers(0, 256, (count, 48, 48, 3), dtype=np.uint8)
        (vectors,) = session.run(["vectors"], {"pixels": pixels})
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, model.encode(pixels, learners=2), atol=1e-4)


@pytest.mark.parametrize("resize", [48, 61, 37])  # the crop itself, cut from more, widened from less
def test_one_picture_of_any_size(resize: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16, 24)), precision="float32")
    model.backbone.resize = resize
    session = exported(model, tmp_path / "model.onnx", 2)
    sizes = [(48, 48), (375, 500), (500, 333), (61, 61), (100, 37), (1, 1), (400, 3), (37, 20), (30, 111), (900, 700)]
    pictures = [drawn(*size) for size in sizes]
    vectors = [session.run(["vector"], {"image": picture})[0] for picture in pictures]
    assert {(vector.shape, vector.dtype) for vector in vectors} == {((24,), np.dtype(np.float32))}
    ours = model.encode(pictures, learners=2)
    assert cosines(ours, np.stack(vectors)).min() > 0.9999
    assert cosines(ours[1:], ours[:-1]).max() < 0.999  # the pictures can be told apart


@pytest.mark.parametrize("takes", ["image", "crops"])
def test_the_mirror_image_counts_in_the_graph_too(takes: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16, 24), bias=True), precision="float32")
    pictures = np.random.default_rng(0).integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
    plain = model.encode(pictures)
    model.mirror = True
    session = exported(model, tmp_path / "model.onnx", takes=takes)
    if takes == "image":
        vectors = np.stack([session.run(["vector"], {"image": picture})[0] for picture in pictures])
    else:
        (vectors,) = session.run(["vectors"], {"pixels": pictures})
    np.testing.assert_allclose(vectors, model.encode(pictures), atol=1e-4)
    assert np.abs(vectors - plain).max() > 1e-3  # one look gives other vectors


def test_real_photographs(shared_data: Path, tmp_path: Path) -> None:
    """Groceries and birds of many shapes; some are also enlarged, because all are 256 pixels long."""
    groceries, birds = (sorted((shared_data / name).rglob("*.jpg")) for name in ("grocery", "CUB_200_2011"))
    files = [*groceries[::400], *birds[::600]]
    for side, file in zip((700, 1500, 2600), files[::5], strict=False):
        files.append(tmp_path / f"{side}.jpg")
        photograph = Image.open(file).convert("RGB")
        scale = side / max(photograph.size)
        size = [round(length * scale) for length in photograph.size]
        photograph.resize(size, Image.Resampling.LANCZOS).save(files[-1], quality=95)
    backbone = build_backbone("efficientnet_lite0", resolution=160)  # so that none has the right size already
    torch.manual_seed(0)
    model = Model(backbone, EmbeddingEnsemble(backbone.features, (8, 16, 24)), precision="float32")
    session = exported(model, tmp_path / "model.onnx")
    pixels = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    assert len({picture.shape for picture in pixels}) > 10
    vectors = np.stack([session.run(None, {"image": picture})[0] for picture in pixels])
    same_pixels = cosines(model.encode(pixels), vectors)
    assert same_pixels[:-2].min() > 0.9999
    assert same_pixels.min() > 0.999  # Pillow shrinks the last two, more than six times too long, in two steps
    assert cosines(model.encode(files), vectors).min() > 0.995  # and their files are decoded at a smaller size


def test_the_example_of_the_documentation(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    model = Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16)), precision="float32")
    export_onnx(model, tmp_path / "shop.onnx")
    (tmp_path / "photos" / "mugs").mkdir(parents=True)
    files = [tmp_path / "photos" / "mugs" / f"{number}.jpg" for number in (1, 2)]
    for file, source in zip(files, pictures.rglob("0.png"), strict=False):
        Image.open(source).resize((90, 70)).save(file)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/models.md", "exec"), {})
    first, second = model.encode(files)
    assert float(capsys.readouterr().out) == pytest.approx(float(first @ second), abs=1e-3)
    assert first @ second < 0.99


def test_features_are_exported_too(tmp_path: Path) -> None:
    model = Model(build_backbone("features", features=6), EmbeddingEnsemble(6, (2, 3)))
    export_onnx(model, tmp_path / "deep" / "model.onnx")
    rows = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "deep" / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"features": rows})[0], model.encode(rows), atol=1e-5)


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    model = Model(build_backbone("features", features=6), EmbeddingEnsemble(6, (2, 3)))
    with pytest.raises(MissingExtraError, match=r"needs the package 'onnxscript'.* pip install 'bier-ml\[onnx\]'"):
        export_onnx(model, tmp_path / "model.onnx")
