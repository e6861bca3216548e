"""Correlation between dimensions and between learners, and the distribution of similarities of pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bier.errors import DataError
from bier.evaluate.recall import Labels, Vectors, as_matrix, check_groups, encode_labels, unit_parts

ROWS = 4096  # rows held in float64 at once


def feature_correlation(z: Vectors) -> float:
    """The mean absolute Pearson correlation between distinct dimensions of the embedding.

    Args:
        z: raw embeddings (N, d), N at least 2.

    Returns:
        A number from 0 to 1. A dimension that never changes counts as uncorrelated, and d = 1 gives 0.

    Raises:
        DataError: `z` is not a finite matrix of at least two rows.

    Example:
        >>> import bier, numpy as np
        >>> bier.feature_correlation(np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]))
        1.0
    """
    matrix = feature_correlation_matrix(z)
    size = len(matrix)
    return float((np.abs(matrix).sum() - np.abs(np.diag(matrix)).sum()) / max(size * (size - 1), 1))


def feature_correlation_matrix(z: Vectors) -> NDArray[np.float64]:
    """Return the Pearson correlations (d, d) between dimensions; rows of constant dimensions are 0 off the diagonal."""
    matrix = _at_least_two(as_matrix(z, "z"))
    mean = matrix.mean(0, dtype=torch.float64)
    moments = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for rows in matrix.split(ROWS):
        centred = rows.double() - mean
        moments += centred.T @ centred
    # float32 cannot hold a change of less than 6e-8 of the value; what is far below is the mean's own rounding
    constant = (moments.diagonal() / len(matrix)).sqrt() <= 1e-10 * matrix.abs().amax(0)
    return _to_correlation(moments, constant)


def classifier_correlation(z: Vectors, groups: Sequence[int]) -> float | None:
    """The mean Pearson correlation between the learners' cosine scores over all pairs of distinct images.

    Args:
        z: raw embeddings (N, d), N at least 2.
        groups: the size of each learner, summing to d.

    Returns:
        A number from -1 to 1; None for a single learner.

    Raises:
        DataError: `z` is not a finite matrix of at least two rows, or the groups do not sum to d.

    Example:
        >>> import bier, numpy as np
        >>> z = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> round(bier.classifier_correlation(np.hstack([z, z]), (2, 2)), 6)
        1.0
    """
    return mean_off_diagonal(learner_correlation_matrix(z, groups))


def mean_off_diagonal(correlation: NDArray[np.float64]) -> float | None:
    """The mean over pairs of learners; None for one learner."""
    if len(correlation) == 1:
        return None
    return float(correlation[np.triu_indices(len(correlation), 1)].mean())


def learner_correlation_matrix(z: Vectors, groups: Sequence[int]) -> NDArray[np.float64]:
    """Return the Pearson correlations (M, M) between the learners' scores over all pairs of distinct images.

    No pair is visited. With U_a (N, d_a) the unit vectors of learner a, the sums over all ordered pairs are
    sum_ij s_a(i, j) = |sum_i u_i|^2 and sum_ij s_a(i, j) s_b(i, j) = |U_a^T U_b|^2 (Frobenius); pairs of an image with
    itself are then taken off. A learner whose score is the same for every pair correlates with nothing: it counts as 0.
    """
    matrix = _at_least_two(as_matrix(z, "z"))
    sizes = check_groups(groups, matrix.shape[1])
    total = torch.zeros(matrix.shape[1], dtype=torch.float64)
    products = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64)
    own = torch.zeros(len(sizes), dtype=torch.float64)
    own_products = torch.zeros(len(sizes), len(sizes), dtype=torch.float64)
    for rows in matrix.split(ROWS):
        parts = [part.double() for part in unit_parts(rows, sizes)]
        unit = torch.cat(parts, dim=1)
        squares = torch.stack([part.square().sum(1) for part in parts], dim=1)  # (n, M): 1, or 0 for zero vectors
        total += unit.sum(0)
        products += unit.T @ unit
        own += squares.sum(0)
        own_products += squares.T @ squares
    pairs = len(matrix) * (len(matrix) - 1)
    mean = (torch.stack([part.square().sum() for part in total.split(list(sizes))]) - own) / pairs
    blocks = [band.square().sum(0).split(list(sizes)) for band in products.split(list(sizes))]
    squares = torch.stack([torch.stack([block.sum() for block in row]) for row in blocks])
    second = (squares - own_products) / pairs
    covariance = second - torch.outer(mean, mean)
    # unit vectors that are all alike still differ by float32's rounding, which moves their scores by about 1e-7
    return _to_correlation(covariance, covariance.diagonal() <= 1e-13)


def _to_correlation(covariance: torch.Tensor, constant: torch.Tensor) -> NDArray[np.float64]:
    scale = torch.where(constant, torch.inf, covariance.diagonal().clamp_min(0).sqrt())
    correlation = (covariance / scale[:, None] / scale[None, :]).clamp(-1, 1)
    return correlation.fill_diagonal_(1.0).numpy()


def _at_least_two(matrix: torch.Tensor) -> torch.Tensor:
    if len(matrix) < 2:
        raise DataError(f"The 'z' parameter must hold at least 2 vectors to correlate. Got {len(matrix)} instead.")
    return matrix


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
    """Every negative pair is equally likely: an image by its number of negatives, then one of them."""
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
