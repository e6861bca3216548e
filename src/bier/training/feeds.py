"""What the network is fed: pixels of images, rows of features, or maps of a frozen trunk, all by image number."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bier.config import Config
from bier.data import Part
from bier.images import Batches, PreparedImages, in_order
from bier.images.loader import Progress
from bier.models.backbones import Backbone
from bier.models.trunk import TrunkCache
from bier.training import distributed

Plan = Iterable[Sequence[tuple[int, int]]]


class Feed(Protocol):
    """Inputs of a part's images. `kept` are the numbers of those that can be read."""

    kept: NDArray[np.int64]

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs (B, ...), image numbers (B,)) for each batch of a plan, augmented for training."""
        ...

    def in_order(self, numbers: NDArray[np.int64], batch_size: int) -> Iterator[Tensor]:
        """Inputs of these images as they are at test time, for the same network."""
        ...


class PixelFeed:
    """Pixels (B, 3, crop, crop), uint8."""

    def __init__(self, part: Part, backbone: Backbone, config: Config, progress: Progress | None = None) -> None:
        data = config.data
        cache = Path(data.cache) if data.cache else None
        workers = None if data.workers < 0 else data.workers
        self.source = PreparedImages(
            part.images, backbone.resize, part.boxes, cache, data.skip_broken, workers, progress=progress
        )
        self.kept = self.source.kept
        self.crop = backbone.crop
        self.augment = data.augment

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(Batches(self.source, plan, self.crop, self.augment))

    def in_order(self, numbers: NDArray[np.int64], batch_size: int) -> Iterator[Tensor]:
        for pixels, _ in Batches(self.source, in_order(numbers, batch_size), self.crop):
            yield pixels


class FeatureFeed:
    """Pre-computed features (B, h); nothing is augmented."""

    def __init__(self, part: Part) -> None:
        self.rows = torch.from_numpy(np.ascontiguousarray(part.images, dtype=np.float32))
        self.kept = np.arange(len(part), dtype=np.int64)

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in plan:
            numbers = torch.tensor([number for number, _ in batch])
            yield self.rows[numbers], numbers

    def in_order(self, numbers: NDArray[np.int64], batch_size: int) -> Iterator[Tensor]:
        yield from self.rows[torch.from_numpy(numbers)].split(batch_size)


class TrunkFeed:
    """Maps (B, C, H, W) of the frozen stages, computed once for several augmented views of each image.

    With `training=False` it is one view, the one of test time.
    """

    def __init__(
        self,
        pixels: PixelFeed,
        trunk: nn.Module,
        folder: Path,
        config: Config,
        progress: Progress,
        training: bool = True,
    ) -> None:
        self.kept = pixels.kept
        self.training = training
        views, augment = (config.model.trunk_views, config.data.augment) if training else (1, "none")
        with distributed.first_process_first():
            self.cache = TrunkCache(
                trunk,
                pixels.source,
                folder,
                crop=pixels.crop,
                augment=augment,
                views=views,
                precision=config.train.precision,
                progress=progress,
            )

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        return self.cache.batches(plan)

    def in_order(self, numbers: NDArray[np.int64], batch_size: int) -> Iterator[Tensor]:
        if self.training:
            raise RuntimeError("these maps are of augmented views")
        return (maps for maps, _ in self.cache.batches(in_order(numbers, batch_size)))


def feed_for(part: Part, backbone: Backbone, config: Config, progress: Progress | None = None) -> Feed:
    """The feed that suits a part's images."""
    if isinstance(part.images, np.ndarray) and part.images.ndim == 2:
        return FeatureFeed(part)
    return PixelFeed(part, backbone, config, progress)
