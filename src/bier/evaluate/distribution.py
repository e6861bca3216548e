"""How the similarities of positive and of negative pairs spread, learner by learner."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bier.errors import DataError
from bier.evaluate.checks import Labels, Vectors, as_matrix, check_groups, encode_labels, unit_parts


class Distribution(NamedTuple):
    """Cosine scores of sampled pairs: float32 (M, P) for positive and (M, Q) for negative pairs; P or Q may be 0."""

    positive: NDArray[np.float32]
    negative: NDArray[np.float32]


def similarity_distribution(
    z: Vectors, groups: Sequence[int], labels: Labels, pairs: int = 100_000, seed: int = 0
) -> Distribution:
    """Score `pairs` random positive and as many random negative pairs of distinct images; the seed decides which."""
    matrix = as_matrix(z, "z")
    sizes = check_groups(groups, matrix.shape[1])
    codes = encode_labels(labels, len(matrix))[0].numpy()
    if pairs < 1:
        raise DataError(f"The 'pairs' parameter must be 1 or more. Got {pairs} instead.")
    rng = np.random.default_rng(seed)
    parts = unit_parts(matrix, sizes)
    return Distribution(
        _scores(parts, *_positive_pairs(codes, pairs, rng)), _scores(parts, *_negative_pairs(codes, pairs, rng))
    )


Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


def _positive_pairs(codes: NDArray[np.int64], pairs: int, rng: np.random.Generator) -> Pairs:
    """Every positive pair is equally likely: a class by its number of pairs, then two of its images."""
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    weights = counts * (counts - 1.0)
    if not weights.any():
        return np.empty(0, np.int64), np.empty(0, np.int64)
    chosen = rng.choice(len(counts), size=pairs, p=weights / weights.sum())
    first = rng.integers(0, counts[chosen])
    second = (first + rng.integers(1, counts[chosen])) % counts[chosen]
    start = (np.cumsum(counts) - counts)[chosen]
    return order[start + first], order[start + second]


def _negative_pairs(codes: NDArray[np.int64], pairs: int, rng: np.random.Generator) -> Pairs:
    """Every negative pair is equally likely: an image by its number of strangers, then one of those."""
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    strangers = len(codes) - counts[codes[order]]
    if not strangers.any():
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = rng.choice(len(codes), size=pairs, p=strangers / strangers.sum())
    own = codes[order[first]]
    after_own_class = np.cumsum(counts)[own]
    second = (after_own_class + rng.integers(0, len(codes) - counts[own])) % len(codes)
    return order[first], order[second]


def _scores(
    parts: Sequence[torch.Tensor], first: NDArray[np.int64], second: NDArray[np.int64], rows: int = 8192
) -> NDArray[np.float32]:
    result = np.empty((len(parts), len(first)), np.float32)
    for top in range(0, len(first), rows):
        some = slice(top, top + rows)
        a, b = torch.from_numpy(first[some]), torch.from_numpy(second[some])
        for m, part in enumerate(parts):
            result[m, some] = (part[a] * part[b]).sum(1).numpy()
    return result
