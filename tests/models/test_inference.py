"""One loop runs every network: on its device, in order, without gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bier.data import Dataset, Part
from bier.images import ImageDataset
from bier.method.ensemble import EmbeddingEnsemble
from bier.models import maps
from bier.models.backbones import build_backbone
from bier.models.embed import FeatureRows, device_of, inputs_in_order, run_network, to_array
from bier.models.maps import TrunkCache
from bier.models.model import Model
from bier.paper import runner


class Elsewhere(nn.Module):
    """Has its weights on the meta device, as a stand-in for a GPU, and notes where its inputs are."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, device="meta"))
        self.width = width
        self.devices: list[str] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.devices.append(inputs.device.type)
        return torch.ones(len(inputs), self.width)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (10, 48, 48, 3), dtype=np.uint8)


def test_inputs_go_to_the_device_of_the_network(pixels: np.ndarray) -> None:
    network, dataset = Elsewhere(), ImageDataset(pixels, 48)
    done: list[tuple[int, int]] = []
    batches = inputs_in_order(dataset, 4)
    outputs = run_network(network, batches, device_of(network), progress=lambda *step: done.append(step), total=10)
    assert to_array(outputs).shape == (10, 4)
    assert network.devices == ["meta"] * 3
    assert done == [(4, 10), (8, 10), (10, 10)]


def test_maps_and_stagewise_features_are_computed_where_the_model_is(
    pixels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trunk(Elsewhere):
        def forward(self, inputs: Tensor) -> Tensor:
            super().forward(inputs)
            return torch.ones(len(inputs), 2, 3, 3)

    trunk = Trunk()
    monkeypatch.setattr(maps, "fingerprint_of", lambda *_, **__: "weights on the meta device cannot be read")
    TrunkCache(trunk, ImageDataset(pixels, 48), tmp_path / "maps", crop=48, views=1)
    assert set(trunk.devices) == {"meta"}

    model = Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16)))
    body = Elsewhere(512)
    monkeypatch.setattr(model.backbone, "forward", lambda inputs: body(inputs))
    monkeypatch.setattr(runner, "load", lambda run: model)
    monkeypatch.setattr(Model, "device", property(lambda self: torch.device("meta")))
    part = Part(pixels, np.arange(10) % 2, ("a", "b"))
    dataset = Dataset("mine", {"train": part, "test": part}, (1,))
    runner.write_features(tmp_path, dataset, tmp_path / "features.safetensors", None)
    assert body.devices == ["meta", "meta"]


def test_outputs_come_in_order_without_gradients() -> None:
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    layer = nn.Linear(2, 2)
    inputs = FeatureRows(rows)
    outputs = list(run_network(layer, inputs_in_order(inputs, 2, np.array([3, 1, 2])), torch.device("cpu")))
    assert not any(output.requires_grad for output in outputs)
    np.testing.assert_allclose(to_array(outputs), layer(torch.from_numpy(rows[[3, 1, 2]])).detach().numpy(), rtol=1e-6)
    assert to_array([], 7).shape == (0, 7)
