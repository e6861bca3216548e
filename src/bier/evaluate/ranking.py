"""Nearest neighbours for some queries, and the two measures that look at the first R answers."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bier.evaluate.checks import Labels, Vectors, as_matrix
from bier.evaluate.counting import Progress
from bier.evaluate.recall import sides

BLOCK = 1 << 23  # scores held at once: 32 MB


class Ranking(NamedTuple):
    """Both in percent, the mean over all queries."""

    map_at_r: float
    r_precision: float


class Neighbours(NamedTuple):
    """The k nearest gallery images of each query, nearest first: int64 and float32 (Q, k)."""

    indices: NDArray[np.int64]
    scores: NDArray[np.float32]


@torch.no_grad()
def rank_r(
    vectors: Vectors,
    labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Return mAP@R and R-Precision, where R is the number of the query's positives in the gallery.

    R-Precision is the share of positives among the first R answers; mAP@R is 1/R sum_{i<=R} precision(i) [answer i is
    positive]. Scores are float32 dot products, a query never meets itself, ties count against the query, and a query
    without a positive scores 0. Memory is bounded: a block of queries at a time.
    """
    others = None if gallery is None else [as_matrix(gallery, "gallery")]
    queries, sorted_gallery = sides([as_matrix(vectors)], labels, others, gallery_labels)
    target = queries if sorted_gallery is None else sorted_gallery
    step = max(1, BLOCK // len(target.classes))
    sums = torch.zeros(2, dtype=torch.float64)
    count = len(queries.classes)
    for top in range(0, count, step):
        rows = slice(top, min(top + step, count))
        scores = queries.parts[0][rows] @ target.parts[0].T
        if sorted_gallery is None:  # not its own answer
            scores[torch.arange(len(scores)), torch.arange(rows.start, rows.stop)] = -torch.inf
        sums += _block_sums(scores, queries.classes[rows], target.classes)
        if progress is not None:
            progress(rows.stop, count)
    average, precision = (100 * sums / count).tolist()
    return Ranking(average, precision)


def _block_sums(scores: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Sum mAP@R and R-Precision over a block. The i-th positive has rank i + the negatives at least as high as it."""
    # both sides are sorted by class, so that all positives lie in one range of columns
    ends = slice(int(torch.searchsorted(theirs, ours[0])), int(torch.searchsorted(theirs, ours[-1], right=True)))
    near = scores[:, ends]
    same = (ours[:, None] == theirs[None, ends]) & (near > -torch.inf)
    relevant = same.sum(1)
    most = int(relevant.max()) if near.shape[1] else 0
    if most == 0:
        return torch.zeros(2, dtype=torch.float64)
    positives = near.masked_fill(~same, -torch.inf).topk(most, dim=1).values
    near.masked_fill_(same, -torch.inf)
    negatives = scores.topk(most, dim=1).values
    # both are sorted: a binary search over the negatives in rising order finds those below the positive
    ahead = negatives.shape[1] - torch.searchsorted(negatives.flip(1).contiguous(), positives.contiguous())
    place = torch.arange(1, most + 1)
    rank = place + ahead
    found = (place <= relevant[:, None]) & (rank <= relevant[:, None])
    share = found.double() / relevant.clamp_min(1)[:, None]
    return torch.stack([(share * place / rank).sum(), share.sum()])


@torch.no_grad()
def nearest(vectors: Vectors, queries: NDArray[np.int64], k: int, gallery: Vectors | None = None) -> Neighbours:
    """Return the k nearest gallery images of the chosen rows of `vectors`; without a gallery never the row itself."""
    matrix = as_matrix(vectors)
    others = matrix if gallery is None else as_matrix(gallery, "gallery")
    k = min(k, len(others) - int(gallery is None))
    indices, best = [np.empty((0, k), np.int64)], [np.empty((0, k), np.float32)]
    for some in torch.as_tensor(queries, dtype=torch.int64).split(max(1, BLOCK // len(others))):
        scores = matrix[some] @ others.T
        if gallery is None:
            scores[torch.arange(len(some)), some] = -torch.inf
        top = scores.topk(k, dim=1)
        indices.append(top.indices.numpy())
        best.append(top.values.numpy())
    return Neighbours(np.concatenate(indices), np.concatenate(best))
