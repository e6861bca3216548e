"""Balanced batches: P classes with K images each, in an order that can be saved and resumed."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler

from bier import distributed
from bier.errors import ConfigError, DataError

Indices = NDArray[np.int64]


class BalancedBatches(BatchSampler):
    """An endless batch sampler: each batch is a list of (index, seed), the image and the seed of its augmentation.

    With an `ImageDataset` it goes into a plain `DataLoader(dataset, batch_sampler=BalancedBatches(...))`. For a data
    set of your own, `seeds=False` gives plain indices.

    - A batch holds `classes` different classes with `images` images each, class after class.
    - An epoch visits every class once, in a shuffled order. Where the number of classes is no multiple of
      `classes`, the last batch of an epoch is not short: it is filled with the first classes of the next
      epoch, which is shuffled so that they are others than those already in the batch.
    - Fewer classes than `classes`: every batch holds all of them and is that much smaller (`batch_size`).
    - The images of a class are taken in a shuffled order, which is shuffled again when all were taken, so that
      over time all are seen equally often, never one twice in a batch. A class with fewer than `images` images
      repeats them, each as often as the others or once more; repetitions have seeds, and so augmentations,
      of their own.
    - Rank `rank` of `world`, by default those of the default process group, gets its share of the one global batch:
      `batch_size / world` entries in a row. The shares of all ranks one after the other are exactly the batch of
      `world=1`. A batch that cannot be shared out equally is a ConfigError.

    `indices` (N,) are the image numbers that `labels` (N,) belong to; by default 0 to N - 1. `sampler` is not used:
    Lightning passes one to each batch sampler that is made in a `train_dataloader`.

    The batches depend on the labels, `classes`, `images` and `seed` alone. `state_dict()` is a handful of
    integers, fit for JSON; after `load_state_dict` the next batch is the one that would have come next. Rank and
    world may differ from those of the run that saved it. A loader that reads ahead pulls batches before they
    are used: `state_dict(batches=n)` gives the state after the first n batches, wherever the iterator is by now.
    """

    def __init__(
        self,
        labels: ArrayLike,
        classes: int,
        images: int,
        seed: int,
        rank: int | None = None,
        world: int | None = None,
        indices: ArrayLike | None = None,
        seeds: bool = True,
        sampler: object = None,
    ) -> None:
        _check_at_least_two("classes", classes)
        _check_at_least_two("images", images)
        if seed < 0:
            raise ConfigError(f"The 'seed' of BalancedBatches must be 0 or greater. Got {seed} instead.")
        self._members = _members(labels, indices)
        self.seed, self.classes, self.images = int(seed), int(classes), int(images)
        self.batch_size = min(self.classes, len(self._members)) * self.images
        self._rank, self._world, self._seeds = rank, world, seeds
        self._own_share()
        self._fingerprint = zlib.crc32(b"".join(member.tobytes() + b"/" for member in self._members))
        self._start(0)

    def __iter__(self) -> "BalancedBatches":
        return self

    __len__ = None  # type: ignore[assignment]  # endless: a loader of it has no length either

    def __bool__(self) -> bool:
        return True

    def __next__(self) -> list[Any]:
        chosen = self._order.group(self._batches)
        drawn, share = np.concatenate([self._draw(position) for position in chosen.tolist()]), self._own_share()
        seeds = np.random.default_rng([self.seed, 2, self._batches]).integers(0, 2**63, len(drawn))
        self._batches += 1
        if not self._seeds:
            return list(drawn[share].tolist())
        return list(zip(drawn[share].tolist(), seeds[share].tolist(), strict=True))

    def _own_share(self) -> slice:
        """Asked for each batch: a process group may be joined after the sampler was made."""
        rank = distributed.rank() if self._rank is None else self._rank
        world = distributed.world() if self._world is None else self._world
        return _share(self.batch_size, rank, world)

    @property
    def batches(self) -> int:
        """How many batches have been given out since the very beginning."""
        return self._batches

    @property
    def epoch(self) -> float:
        """How often, so far, every class has been visited."""
        return self._batches * (self.batch_size // self.images) / len(self._members)

    def state_dict(self, batches: int | None = None) -> dict[str, int]:
        """What `load_state_dict` needs to go on after the batches given out so far, or after the first `batches`."""
        return {
            "batches": self._batches if batches is None else int(batches),
            "seed": self.seed,
            "classes": self.classes,
            "images": self.images,
            "labels": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where the state was taken. A state of other labels or settings is a ConfigError."""
        mine = self.state_dict()
        for name, value in mine.items():
            if name not in state or (name != "batches" and int(state[name]) != value):
                raise ConfigError(
                    f"The sampler's state does not fit: its {name!r} must be {value}. Got {state.get(name)} instead."
                )
        if state["batches"] < 0:
            raise ConfigError(f"The sampler's 'batches' must be 0 or greater. Got {state['batches']} instead.")
        self._start(int(state["batches"]))

    def _start(self, batches: int) -> None:
        self._batches = batches
        everyone = np.arange(len(self._members), dtype=np.int64)
        self._order = _Shuffled(everyone, min(self.classes, len(everyone)), [self.seed, 0])
        self._orders: dict[int, _Shuffled] = {}

    def _draw(self, position: int) -> Indices:
        """The images of a class on its next visit; it is visited once per epoch, so the epoch counts its visits."""
        members = self._members[position]
        rounds, rest = divmod(self.images, len(members))
        if position not in self._orders:
            self._orders[position] = _Shuffled(members, rest, [self.seed, 1, position])
        visit = self._order.round_of(position)
        return np.concatenate([*[members] * rounds, self._orders[position].group(visit)])


class _Shuffled:
    """Elements taken `count` at a time from one shuffled order after another; no group holds an element twice.

    A group that goes over the end of an order takes its last elements and the first of the next order that are not
    among them: those that are move back behind the group. Groups are numbered; to reach one, the orders before it are
    shuffled through, which is cheap, and so a number is all the state there is.
    """

    def __init__(self, elements: Indices, count: int, seed: list[int]) -> None:
        self._elements, self._count = elements, count
        self._generator = np.random.default_rng(seed)
        self._round = -1  # number of the current order
        self._order = elements[:0]
        self._rounds: dict[int, int] = {}

    def group(self, number: int) -> Indices:
        """Group `number`; numbers must not fall."""
        if self._count == 0:
            return self._elements[:0]
        first, end = number * self._count, (number + 1) * self._count
        parts: list[Indices] = []
        self._rounds = {}
        for round_ in range(first // len(self._elements), (end - 1) // len(self._elements) + 1):
            self._shuffle_to(round_)
            begin = round_ * len(self._elements)
            part = self._order[max(first - begin, 0) : end - begin]
            self._rounds |= dict.fromkeys(part.tolist(), round_)
            parts.append(part)
        return np.concatenate(parts)

    def round_of(self, element: int) -> int:
        """The number of the order from which the last group took this element."""
        return self._rounds[element]

    def _shuffle_to(self, round_: int) -> None:
        while self._round < round_:
            self._round += 1
            # How many elements the group that goes over the end took from the order before.
            taken = self._round * len(self._elements) % self._count
            held = self._order[len(self._order) - taken :]
            order = self._generator.permutation(self._elements)
            clash = np.isin(order, held)
            front = order[~clash][: self._count - taken] if taken else order[:0]
            behind = order[~np.isin(order, front)]
            self._order = np.concatenate([front, behind])


def _check_at_least_two(name: str, value: int) -> None:
    if value < 2:
        raise ConfigError(
            f"The '{name}' parameter of BalancedBatches must be at least 2, or there are no pairs to compare. "
            f"Got {value} instead."
        )


def _members(labels: ArrayLike, indices: ArrayLike | None) -> list[Indices]:
    """For every class in the order of its label, the numbers of its images."""
    classes = np.asarray(labels, np.int64)
    numbers = np.arange(classes.size, dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
    if classes.ndim != 1 or classes.shape != numbers.shape:
        raise DataError(
            "The 'labels' of BalancedBatches must be one number per image, as many as 'indices'. "
            f"Got shapes {classes.shape} and {numbers.shape} instead."
        )
    order = np.argsort(classes, kind="stable")
    names, starts = np.unique(classes[order], return_index=True)
    if len(names) < 2:
        raise DataError(f"Balanced batches need images of at least 2 classes. Got {len(names)} instead.")
    return np.split(numbers[order], starts[1:])


def _share(batch_size: int, rank: int, world: int) -> slice:
    if not 0 <= rank < world:
        raise ConfigError(
            f"The 'rank' of BalancedBatches must be from 0 to world - 1 = {world - 1}. Got {rank} instead."
        )
    if batch_size % world:
        raise ConfigError(
            f"A batch of {batch_size} images cannot be shared equally by {world} processes; change the number of "
            "classes or images in a batch, or the number of processes."
        )
    length = batch_size // world
    return slice(rank * length, (rank + 1) * length)
