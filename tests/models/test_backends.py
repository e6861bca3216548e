"""ONNX Runtime and OpenVINO give torch's vectors, from files and from arrays, and follow the weights."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bier.errors import ConfigError, MissingExtraError
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model

ENGINES = {"onnx": "onnxruntime", "openvino": "openvino"}


def small_model(precision: str = "float32") -> Model:
    torch.manual_seed(0)
    return Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16)), precision=precision).eval()


@pytest.mark.parametrize("backend", ENGINES)
def test_the_vectors_are_those_of_torch(backend: str, pictures: Path) -> None:
    pytest.importorskip(ENGINES[backend])
    model, files = small_model(), sorted(pictures.rglob("*.png"))[:20]
    calls: list[tuple[int, int]] = []
    encoded = model.encode(files, 8, progress=lambda *call: calls.append(call), backend=backend)
    assert calls == [(8, 20), (16, 20), (20, 20)]
    assert encoded.dtype == np.float32
    np.testing.assert_allclose(encoded, model.encode(files), atol=1e-5)
    np.testing.assert_allclose(model.encode(files, 8, 1, backend=backend), model.encode(files, learners=1), atol=1e-5)
    one = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    np.testing.assert_allclose(model.embed_raw(one, backend=backend), model.embed_raw(one), rtol=1e-3, atol=1e-4)
    assert model.encode([], backend=backend).shape == (0, 24)
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(copied.encode(files), encoded, atol=1e-5)

    before = model._network_in(backend)
    assert model._network_in(backend) is before  # compiled once
    with torch.no_grad():
        next(model.backbone.parameters()).mul_(-1)
    changed = model.encode(files, backend=backend)
    assert np.abs(changed - encoded).max() > 0.01
    np.testing.assert_allclose(changed, model.encode(files), atol=1e-5)


def test_bfloat16_is_openvinos_too(pictures: Path) -> None:
    pytest.importorskip("openvino")
    files = sorted(pictures.rglob("*.png"))[:8]
    exact = small_model().encode(files)
    rounded = small_model("bfloat16").encode(files, backend="openvino")
    assert (exact * rounded).sum(1).min() > 0.99
    if torch.cpu._is_avx512_bf16_supported():  # elsewhere OpenVINO may compute in float32 all the same
        assert np.abs(exact - rounded).max() > 1e-4


def test_features_need_no_engine() -> None:
    pytest.importorskip("openvino")
    model = Model(build_backbone("features", features=6), EmbeddingEnsemble(6, (2, 3)))
    rows = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    np.testing.assert_array_equal(model.encode(rows, backend="openvino"), model.encode(rows))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = small_model(), np.zeros((48, 48, 3), np.uint8)
    with pytest.raises(ConfigError, match=r"'backend' parameter must be one of torch, onnx, openvino. Got 'tensorrt'"):
        model.encode(image, backend="tensorrt")  # type: ignore[arg-type]
    for backend, package in ENGINES.items():
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtraError, match=rf"'{package}'.* pip install 'bier-ml\[{backend}\]'"):
                model.encode(image, backend=backend)
    with pytest.raises(ConfigError, match=r"computes on the CPU, and the model is on meta"):
        model.to("meta").encode(image, backend="onnx")
