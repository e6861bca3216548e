"""Partial fine-tuning: the maps of the frozen early stages, computed once and read from the disk afterwards."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor, nn

from bier import files
from bier.errors import ConfigError, ModelError
from bier.images import ImageDataset
from bier.images.dataset import Item
from bier.models.backbone import Backbone, resolve_precision
from bier.models.embed import device_of, run_network
from bier.runs import MAPS

_VERSION = 1


class TrunkCache:
    """The output maps of `trunk` for several augmented views of every image, in bfloat16, memory-mapped on disk.

    FOLDER/maps.bin     one row per view of an image
    FOLDER/maps.json    the fingerprint of what the rows were made from, and how many are done

    Args:
        trunk: the frozen stages, `backbone.split(stage)[0]`; it is used in eval mode.
        source: the images.
        folder: where the maps lie. What is there is used again if weights, images and settings are the same ones
            (a fingerprint tells), completed if an earlier pass was interrupted, and replaced otherwise.
        crop: the side of the trunk's input.
        augment, views, seed: each image is augmented in `views` ways, drawn from `seed`.
        earlier: complete maps of the first stages of `trunk`, with the same views, and the stages between: the maps are
            computed from those. In bfloat16, in which maps are kept, this gives the same bits.
        progress: called with (views done, views in all), first before anything is written.

    `batches(plan)` serves them: view `seed % views` of image `index` for every (index, seed) of the plan.
    """

    def __init__(
        self,
        trunk: nn.Module,
        source: ImageDataset,
        folder: str | Path,
        *,
        crop: int,
        augment: str = "paper",
        views: int = 3,
        seed: int = 0,
        batch_size: int = 64,
        workers: int | None = None,
        precision: str = "auto",
        earlier: tuple["TrunkCache", nn.Module] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if views < 1:
            raise ConfigError(f"The 'views' parameter must be at least 1. Got {views} instead.")
        self.source, self.views, self.count = source, views, len(source)
        self._folder, self._batch_size = Path(folder), batch_size
        self._folder.mkdir(parents=True, exist_ok=True)
        self._state = self._folder / "maps.json"
        self._fingerprint = fingerprint_of(trunk, source, crop=crop, augment=augment, views=views, seed=seed)
        self.shape = _shape(trunk, crop)  # (H, W, C), channels last, or (tokens, C)
        self._rows = rows = range(views * self.count)
        with FileLock(self._folder / "lock"):  # of several processes one computes; the others wait, however long
            done = self._done()
            self._maps = self._mapped(fresh=done is None)
            missing = [list(rows[start : start + batch_size]) for start in range(done or 0, len(rows), batch_size)]
            if missing and progress is not None:
                progress(done or 0, len(rows))
            if earlier is None:
                plan = [[(row % self.count, _view_seed(seed, row)) for row in batch] for batch in missing]
                batches = (batch for batch, _ in source.view(crop, augment).batches(plan, workers))
            else:
                maps, trunk = earlier
                batches = (maps.maps(*zip(*(divmod(row, self.count)[::-1] for row in b), strict=True)) for b in missing)
            self._fill(trunk.eval(), batches, done or 0, precision, progress)

    def __len__(self) -> int:
        return self.count

    def batches(self, plan: Iterable[Sequence[Item]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of float32 maps (B, C, H, W), channels-last, or tokens (B, N, C), and int64 indices (B,), in order.

        Without a DataLoader: a batch is one copy out of the memory map, which workers would only copy once more.
        """
        for batch in plan:
            indices, seeds = zip(*(item if isinstance(item, tuple) else (item, 0) for item in batch), strict=True)
            yield self.maps(indices, seeds), torch.tensor(indices)

    def maps(self, indices: Sequence[int], seeds: Sequence[int]) -> Tensor:
        """float32 (B, C, H, W) or (B, N, C): view `seed % views` of each image."""
        rows = [seed % self.views * self.count + index for index, seed in zip(indices, seeds, strict=True)]
        stored = self._maps[rows]  # (B, H, W, C) or (B, N, C)
        maps = torch.from_numpy(stored).view(torch.bfloat16).float()
        return maps.permute(0, 3, 1, 2) if maps.ndim == 4 else maps

    def _done(self) -> int | None:
        """How many rows an earlier pass with the same fingerprint has finished; None if there was none."""
        try:
            state = json.loads(self._state.read_bytes())
            files.check_record(state)
            whole = (self._folder / "maps.bin").stat().st_size == self._bytes()
            matches = state["fingerprint"] == self._fingerprint and whole
            return min(max(0, int(state["done"])), len(self._rows)) if matches else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def _bytes(self) -> int:
        return self.views * self.count * int(np.prod(self.shape)) * 2

    def _mapped(self, *, fresh: bool) -> NDArray[np.int16]:
        if self._bytes() == 0:
            return np.empty((0, *self.shape), np.int16)
        if fresh:
            self._state.unlink(missing_ok=True)  # first, so that no record describes the new rows as complete
        path, shape = self._folder / "maps.bin", (self.views * self.count, *self.shape)
        try:
            if fresh:
                path.unlink(missing_ok=True)
            files.reserve(path, self._bytes())
            return np.memmap(path, np.int16, "r+", shape=shape)
        except OSError as error:
            needed = self._bytes() / 2**30
            raise ModelError(
                f"The maps need {needed:.1f} GiB at {str(self._folder)!r}, which failed: {error}."
            ) from error

    def _fill(
        self,
        trunk: nn.Module,
        batches: Iterator[Tensor],
        done: int,
        precision: str,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        for maps in run_network(trunk, batches, device_of(trunk), precision):
            maps = maps.permute(0, 2, 3, 1) if maps.ndim == 4 else maps
            stored = maps.to(torch.bfloat16).contiguous().cpu().view(torch.int16)
            rows = self._rows[done : done + len(maps)]
            self._maps[rows] = stored.numpy()
            done += len(maps)
            self._record(done)
            if progress is not None:
                progress(done, len(self._rows))

    def _record(self, done: int) -> None:
        """Flush the maps, then write how many rows are complete."""
        if isinstance(self._maps, np.memmap):
            self._maps.flush()
        state = {"fingerprint": self._fingerprint, "done": done, "shape": self.shape}
        files.write(self._state, json.dumps(files.with_checksum(state)).encode())


def _view_seed(seed: int, row: int) -> int:
    return (seed << 40) + row


def _is_complete(folder: Path, rows: int) -> bool:
    """Whether a folder holds the maps of so many views."""
    try:
        return bool(json.loads((folder / "maps.json").read_bytes())["done"] == rows)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _gigabytes(trunk: nn.Module, crop: int, rows: int) -> float:
    """What the maps of so many views take on the disk."""
    return rows * int(np.prod(_shape(trunk, crop))) * 2 / 1e9


@torch.no_grad()
def _shape(trunk: nn.Module, crop: int) -> tuple[int, ...]:
    maps = trunk.eval()(torch.zeros(1, 3, crop, crop, device=device_of(trunk)))
    if maps.ndim not in (3, 4):
        raise ModelError(
            "The trunk must give maps (B, C, H, W) or tokens (B, N, C). "
            f"Got the shape {tuple(maps.shape)}: cut it earlier."
        )
    _, *shape = maps.shape
    return tuple(shape) if len(shape) == 2 else (*shape[1:], shape[0])


def fingerprint_of(trunk: nn.Module, source: ImageDataset, *, crop: int, augment: str, views: int, seed: int) -> str:
    """A digest of what maps depend on: the weights, the views, and every image with its box."""
    settings = {"crop": crop, "augment": augment, "views": views, "seed": seed, "version": _VERSION}

    def about() -> Iterator[bytes]:
        yield json.dumps(settings, sort_keys=True).encode()
        for name, value in (*trunk.named_parameters(), *trunk.named_buffers()):
            yield f"{name}{tuple(value.shape)}{value.dtype}".encode()
            yield value.detach().float().cpu().numpy().tobytes()
        yield f"{source.size} {len(source)}".encode()

    return files.digest_of(source.images, source.boxes, about())


def frozen_maps(
    backbone: Backbone,
    stage: str,
    images: ImageDataset,
    home: Path,
    *,
    views: int = 1,
    seed: int = 0,
    precision: str = "auto",
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[nn.Module, TrunkCache]:
    """What follows the frozen stages before `stage`, and their maps: those that are there, or computed.

    They are computed from earlier maps where those are there, else from pixels. A folder in `home` is named after what
    its maps depend on. progress: called with (what is computed, views done, views in all).
    """
    settings: dict[str, Any] = {"crop": images.crop, "augment": images.augment, "views": views, "seed": seed}

    def folder(trunk: nn.Module) -> Path:
        return home / f"{MAPS}-{fingerprint_of(trunk, images, **settings)[:12]}"

    rows = views * len(images)
    trunk, rest = backbone.split(stage)
    there, earlier = folder(trunk), None
    if not _is_complete(there, rows) and resolve_precision(precision, device_of(trunk)) is torch.bfloat16:
        for name in reversed(backbone.stages[1 : backbone.stages.index(stage)]):
            first, following = backbone.split(name)
            if _is_complete(before := folder(first), rows):
                between = following.part(0, backbone.stages.index(stage) - backbone.stages.index(name))  # type: ignore[operator]
                earlier = TrunkCache(first, images, before, **settings), between
                break
    title = f"maps of the frozen stages, {_gigabytes(trunk, images.crop, rows):.1f} GB"
    follow = progress and partial(progress, title)
    return rest, TrunkCache(trunk, images, there, **settings, precision=precision, earlier=earlier, progress=follow)
