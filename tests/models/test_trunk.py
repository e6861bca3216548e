"""The maps on disk are the maps of the trunk, are computed once, and are computed anew when anything has changed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bier.errors import ConfigError, ModelError
from bier.images import ImageDataset, augment
from bier.models.backbones import build_backbone
from bier.models.maps import TrunkCache, _view_seed


class Counted(nn.Module):
    """Counts the images that pass, and breaks off after `limit` of them."""

    def __init__(self, trunk: nn.Module, limit: int = 10**9) -> None:
        super().__init__()
        self.trunk, self.limit, self.images = trunk, limit, 0

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:  # the one blank picture that asks for the shape does not count
            self.images += len(x)
        if self.images > self.limit:
            raise KeyboardInterrupt
        maps: Tensor = self.trunk(x)
        return maps


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (10, 52, 52, 3), dtype=np.uint8)


@pytest.fixture
def trunk() -> nn.Module:
    torch.manual_seed(0)
    return build_backbone("conv4").eval().split("conv3")[0]


def test_maps_of_every_view(images: np.ndarray, trunk: nn.Module, tmp_path: Path) -> None:
    settings = {
        "crop": 48,
        "views": 2,
        "seed": 5,
        "batch_size": 4,
        "precision": "float32",
    }  # bfloat16 is too coarse here
    cache = TrunkCache(trunk, ImageDataset(images, 52), tmp_path, **settings)  # type: ignore[arg-type]
    assert cache.shape == (12, 12, 48)
    batch = [(3, 0), (7, 1), (3, 12), (0, 7)]
    [(maps, indices)] = cache.batches([batch])
    assert indices.tolist() == [3, 7, 3, 0]
    assert maps.is_contiguous(memory_format=torch.channels_last)
    for row, (index, seed) in zip(maps, batch, strict=True):
        pixels = augment(images[index], 48, "paper", _view_seed(5, seed % 2 * 10 + index))
        with torch.no_grad():
            expected = trunk(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None])[0]
        torch.testing.assert_close(row, expected.bfloat16().float(), rtol=2e-2, atol=1e-3)
    assert not torch.equal(maps[0], cache.maps([3], [1])[0])


def test_the_rest_trains_on_cached_maps(images: np.ndarray, tmp_path: Path) -> None:
    backbone = build_backbone("conv4")
    backbone.freeze_before("conv3")
    trunk, rest = backbone.split("conv3")
    cache = TrunkCache(trunk, ImageDataset(images, 52), tmp_path, crop=48, augment="none", views=1)
    rest.train()
    rest(cache.maps(range(4), [0] * 4)).sum().backward()
    assert all(p.grad is not None for p in rest.parameters())
    backbone.eval()
    with torch.no_grad():
        pixels = torch.from_numpy(images[:4, 2:50, 2:50].copy()).permute(0, 3, 1, 2)
        torch.testing.assert_close(rest.eval()(cache.maps(range(4), [0] * 4)), backbone(pixels), rtol=5e-2, atol=2e-2)


def test_computed_once_and_resumed(images: np.ndarray, trunk: nn.Module, tmp_path: Path) -> None:
    source = ImageDataset(images, 52)
    settings = {"crop": 48, "views": 3, "batch_size": 4}
    with pytest.raises(KeyboardInterrupt):
        TrunkCache(Counted(trunk, limit=17), source, tmp_path / "a", **settings)  # type: ignore[arg-type]
    second = Counted(trunk)
    resumed = TrunkCache(second, source, tmp_path / "a", **settings)  # type: ignore[arg-type]
    assert second.images == 30 - 16
    third = Counted(trunk)
    TrunkCache(third, source, tmp_path / "a", **settings)  # type: ignore[arg-type]
    assert third.images == 0
    whole = TrunkCache(Counted(trunk), source, tmp_path / "b", **settings)  # type: ignore[arg-type]
    for view in range(3):
        assert torch.equal(resumed.maps(range(10), [view] * 10), whole.maps(range(10), [view] * 10))


def test_computed_anew_when_anything_changed(images: np.ndarray, trunk: nn.Module, tmp_path: Path) -> None:
    def computed(pixels: np.ndarray = images, **changes: object) -> int:
        counted = Counted(trunk)
        settings = {"crop": 48, "views": 1, "augment": "paper", "seed": 0} | changes
        TrunkCache(counted, ImageDataset(pixels, 52), tmp_path, **settings)  # type: ignore[arg-type]
        return counted.images

    assert computed() == 10
    assert computed() == 0
    assert computed(seed=1) == 10
    assert computed(seed=1, augment="strong") == 10
    changed = images.copy()
    changed[4, 0, 0, 0] ^= 1
    assert computed(changed) == 10
    with torch.no_grad():
        next(trunk.parameters())[0, 0, 0, 0] += 0.01
    assert computed(changed) == 10
    with (tmp_path / "maps.bin").open("r+b") as file:
        file.truncate(100)
    assert computed(changed) == 10


def test_bad_cuts_and_settings(images: np.ndarray, trunk: nn.Module, tmp_path: Path) -> None:
    source = ImageDataset(images, 52)
    with pytest.raises(ConfigError, match="views"):
        TrunkCache(trunk, source, tmp_path, crop=48, views=0)
    with pytest.raises(ModelError, match="cut it earlier"):
        TrunkCache(build_backbone("conv4"), source, tmp_path, crop=48)


def test_later_maps_come_from_earlier_ones_to_the_bit(images: np.ndarray, tmp_path: Path) -> None:
    backbone = build_backbone("conv4").eval()
    source, settings = ImageDataset(images, 52), {"crop": 48, "views": 3, "seed": 4, "batch_size": 4}
    settings |= {"precision": "bfloat16"}
    first, following = backbone.split("conv2")
    before = TrunkCache(first, source, tmp_path / "conv2", **settings)  # type: ignore[arg-type]
    trunk, _ = backbone.split("conv4")
    counted = Counted(trunk)
    from_pixels = TrunkCache(counted, source, tmp_path / "conv4", **settings)  # type: ignore[arg-type]
    assert counted.images == 30
    between, counted = following.part(0, 2), Counted(trunk)  # type: ignore[operator]
    from_maps = TrunkCache(counted, source, tmp_path / "again", earlier=(before, between), **settings)  # type: ignore[arg-type]
    assert counted.images == 0
    assert (tmp_path / "conv4" / "maps.bin").read_bytes() == (tmp_path / "again" / "maps.bin").read_bytes()
    assert torch.equal(from_pixels.maps([3, 9], [2, 1]), from_maps.maps([3, 9], [2, 1]))
