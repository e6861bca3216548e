"""Balanced batches: balance, evenness, exact resumption, and shares that add up."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bier.data.sampler import BalancedBatches
from bier.errors import ConfigError, DataError
from bier.images import ImageDataset

COUNTS = st.lists(st.integers(1, 12), min_size=2, max_size=14)
SIZES = st.integers(2, 6)


def labels_of(counts: list[int], seed: int = 0) -> np.ndarray:
    labels = np.repeat(np.arange(len(counts)) * 3 + 5, counts)
    return np.random.default_rng(seed).permutation(labels)


def take(sampler: BalancedBatches, count: int) -> list[list[tuple[int, int]]]:
    return [next(sampler) for _ in range(count)]


@given(counts=COUNTS, classes=SIZES, images=SIZES, seed=st.integers(0, 2**40))
@settings(max_examples=80, deadline=None)
def test_every_batch_is_balanced(counts: list[int], classes: int, images: int, seed: int) -> None:
    labels = labels_of(counts)
    sampler = BalancedBatches(labels, classes, images, seed)
    for batch in take(sampler, 12):
        indices = np.array([index for index, _ in batch])
        assert len(batch) == sampler.batch_size
        per_class = Counter(labels[indices].tolist())
        assert len(per_class) == min(classes, len(counts))
        assert set(per_class.values()) == {images}
        for start in range(0, len(batch), images):  # class after class
            assert len(set(labels[indices[start : start + images]].tolist())) == 1
        per_image = Counter(indices.tolist())
        sizes = Counter(labels.tolist())
        for index, times in per_image.items():
            members = sizes[int(labels[index])]
            assert images // members <= times <= -(-images // members)


@given(counts=COUNTS, classes=SIZES, images=SIZES, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_an_epoch_visits_every_class_once_and_all_images_evenly(
    counts: list[int], classes: int, images: int, seed: int
) -> None:
    labels = labels_of(counts)
    sampler = BalancedBatches(labels, classes, images, seed)
    visited = []
    seen: Counter[int] = Counter()
    for batch in take(sampler, 3 * len(counts)):
        visited += [int(labels[index]) for index, _ in batch[::images]]
        seen.update(index for index, _ in batch)
    for start in range(0, len(visited) - len(counts) + 1, len(counts)):
        assert len(set(visited[start : start + len(counts)])) == len(counts)
    for label in set(labels.tolist()):
        times = [seen[index] for index in np.flatnonzero(labels == label).tolist()]
        assert max(times) - min(times) <= 1


@given(counts=COUNTS, classes=SIZES, images=SIZES, seed=st.integers(0, 9), done=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_state_goes_on_exactly(counts: list[int], classes: int, images: int, seed: int, done: int) -> None:
    labels = labels_of(counts)
    sampler = BalancedBatches(labels, classes, images, seed)
    take(sampler, done)
    state = json.loads(json.dumps(sampler.state_dict()))
    expected = take(sampler, 15)
    for used in (0, 3, 50):
        other = BalancedBatches(labels, classes, images, seed)
        take(other, used)
        other.load_state_dict(state)
        assert other.batches == done
        assert take(other, 15) == expected


def test_a_state_after_fewer_batches_than_were_read_ahead() -> None:
    labels = labels_of([5] * 10)
    sampler = BalancedBatches(labels, 4, 3, 1)
    batches = take(sampler, 9)
    other = BalancedBatches(labels, 4, 3, 1)
    other.load_state_dict(sampler.state_dict(batches=6))
    assert take(other, 3) == batches[6:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_data_loader_runs_it_and_resumes_exactly(workers: int) -> None:
    """Workers read ahead of the loop; the state after the batches that were used gives the rest of them."""
    labels = labels_of([5] * 6)
    pixels = np.random.default_rng(0).integers(0, 256, (30, 12, 12, 3), dtype=np.uint8)
    dataset = ImageDataset(pixels, 12, crop=8, augment="paper", labels=labels)

    def loaded(sampler: BalancedBatches, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(islice(DataLoader(dataset, batch_sampler=sampler, num_workers=workers), count))  # type: ignore[arg-type]

    sampler = BalancedBatches(labels, 3, 2, 7)
    whole = loaded(sampler, 6)
    other = BalancedBatches(labels, 3, 2, 7)
    other.load_state_dict(sampler.state_dict(batches=2))
    for (one, its_labels), (same, same_labels) in zip(whole[2:], loaded(other, 4), strict=True):
        assert one.shape == (6, 3, 8, 8)
        assert torch.equal(one, same)
        assert torch.equal(its_labels, same_labels)
        assert its_labels.unique(return_counts=True)[1].tolist() == [2, 2, 2]


@given(
    counts=COUNTS,
    classes=st.sampled_from([2, 4, 6]),
    images=st.sampled_from([2, 4, 6]),
    world=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_shares_of_all_ranks_make_the_global_batch(counts: list[int], classes: int, images: int, world: int) -> None:
    labels = labels_of(counts)
    whole = BalancedBatches(labels, classes, images, 7)
    if whole.batch_size % world:
        with pytest.raises(ConfigError, match=f"{whole.batch_size} images cannot be shared equally by {world}"):
            BalancedBatches(labels, classes, images, 7, rank=0, world=world)
        return
    ranks = [BalancedBatches(labels, classes, images, 7, rank, world) for rank in range(world)]
    for _ in range(6):
        shares = [next(rank) for rank in ranks]
        assert len({len(share) for share in shares}) == 1
        assert [entry for share in shares for entry in share] == next(whole)


def test_a_state_moves_between_numbers_of_ranks() -> None:
    labels = labels_of([6] * 9)
    pair = [BalancedBatches(labels, 4, 4, 0, rank, 2) for rank in range(2)]
    for rank in pair:
        take(rank, 5)
    alone = BalancedBatches(labels, 4, 4, 0)
    alone.load_state_dict(pair[1].state_dict())
    assert next(alone) == next(pair[0]) + next(pair[1])


def test_seeds_of_images_are_their_own() -> None:
    sampler = BalancedBatches([0, 1, 1], 2, 4, 0)
    seeds = [seed for batch in take(sampler, 50) for _, seed in batch]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_and_order_matter() -> None:
    labels = labels_of([8] * 8)
    first = take(BalancedBatches(labels, 4, 4, 0), 5)
    assert first == take(BalancedBatches(labels, 4, 4, 0), 5)
    assert first != take(BalancedBatches(labels, 4, 4, 1), 5)


def test_indices_stand_in_for_positions() -> None:
    labels, numbers = [0, 0, 1, 1], [10, 20, 30, 40]
    batch = next(BalancedBatches(labels, 2, 2, 0, indices=numbers))
    assert {index for index, _ in batch[:2]} in ({10, 20}, {30, 40})
    assert {index for index, _ in batch} == set(numbers)


def test_epoch_counts_visits() -> None:
    sampler = BalancedBatches(labels_of([2] * 10), 4, 2, 0)
    take(sampler, 5)
    assert sampler.epoch == 2.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"classes": 1}, ConfigError, "'classes' .* at least 2.* Got 1 instead"),
        ({"images": 1}, ConfigError, "'images' .* at least 2.* Got 1 instead"),
        ({"seed": -1}, ConfigError, "'seed' .* Got -1 instead"),
        ({"labels": [3, 3, 3]}, DataError, "at least 2 classes. Got 1 instead"),
        ({"labels": []}, DataError, "at least 2 classes. Got 0 instead"),
        ({"labels": [[1, 2]]}, DataError, "one number per image"),
        ({"indices": [1]}, DataError, r"shapes \(4,\) and \(1,\)"),
        ({"rank": 2, "world": 2}, ConfigError, "'rank' .* Got 2 instead"),
        ({"world": 3}, ConfigError, "4 images cannot be shared equally by 3"),
    ],
)
def test_bad_input(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    settings = {"labels": [0, 0, 1, 1], "classes": 2, "images": 2, "seed": 0} | arguments
    with pytest.raises(error, match=message):
        BalancedBatches(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"seed": 9}, {"images": 3}, {"labels": 1}, {"batches": -1}])
def test_a_state_that_does_not_fit(change: dict[str, int]) -> None:
    sampler = BalancedBatches([0, 0, 1, 1], 2, 2, 0)
    with pytest.raises(ConfigError, match=f"{next(iter(change))}.* Got {next(iter(change.values()))} instead"):
        sampler.load_state_dict(sampler.state_dict() | change)
    with pytest.raises(ConfigError, match=r"'batches' .* Got None instead"):
        sampler.load_state_dict({"seed": 0})


def test_resuming_late_is_quick() -> None:
    sampler = BalancedBatches(labels_of([59] * 100), 8, 8, 0)
    sampler.load_state_dict(sampler.state_dict(batches=20_000))
    assert len(next(sampler)) == 64
