"""The exported graph gives our vectors, for any number of pictures."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from bier.errors import MissingExtraError
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.export import export_onnx
from bier.models.model import Model


@pytest.mark.parametrize(("backbone", "learners"), [("conv4", 2), ("efficientnet_lite0", None)])
def test_onnxruntime_gives_our_vectors(backbone: str, learners: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    built = build_backbone(backbone)
    model = Model(built, EmbeddingEnsemble(built.features, (8, 16, 24)), precision="float32")
    export_onnx(model, tmp_path / "model.onnx", learners)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    for count in (1, 5):
        pixels = random.integers(0, 256, (count, built.crop, built.crop, 3), dtype=np.uint8)
        (vectors,) = session.run(["vectors"], {"pixels": pixels})
        assert vectors.dtype == np.float32
        with torch.no_grad():
            z = model.network()(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        ours = model.ensemble.vector(z, model.weighting, learners).detach().numpy()
        np.testing.assert_allclose(vectors, ours, atol=1e-4)
        if built.crop == built.resize:
            np.testing.assert_allclose(vectors, model.encode(pixels, learners=learners), atol=1e-4)


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
