"""What re-ranking of the shortlist gains, and what it costs."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bier.evaluate.pairs import Progress
from bier.evaluate.recall import Labels, Vectors, as_matrix, check_ks, encode_labels, nearest
from bier.search.rerank import DEPTH, checked_method, rerank

PLAIN = "plain"
_AT_ONCE = 256  # queries whose shortlists are held at once


class Reranked(NamedTuple):
    """Recall@K and mAP@R in percent, and the milliseconds of a query: the search, and on top of it the re-ranking."""

    recall: dict[int, float]
    map_at_r: float
    milliseconds: float

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "recall": {str(k): value for k, value in self.recall.items()}}


def evaluate_reranking(
    vectors: Vectors,
    labels: Labels,
    ks: Iterable[int],
    names: Sequence[str],
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    depth: int = DEPTH,
    progress: Progress | None = None,
) -> dict[str, Reranked]:
    """{"plain": ..., name: ...}: the nearest `depth` images of each query in their order, and in each new order.

    Rows are compared on the shortlist alone: mAP@R is 1/R sum_{i <= min(R, depth)} precision(i) [image i is right], R
    being the number of images of the query's class in the whole gallery. A query without any counts as a miss.
    Milliseconds are those of one thread or more of this process, whatever else the machine does.
    """
    for name in names:
        checked_method(name)
    matrix = as_matrix(vectors)
    others = matrix if gallery is None else as_matrix(gallery, "gallery")
    codes, other_codes = encode_labels(labels, len(matrix), gallery_labels, len(others))
    ours, theirs = codes.numpy(), (codes if other_codes is None else other_codes).numpy()
    relevant = np.bincount(theirs, minlength=int(max(ours.max(), theirs.max())) + 1)[ours] - (gallery is None)
    found: dict[str, list[NDArray[np.bool_]]] = {PLAIN: [], **{name: [] for name in names}}
    seconds = dict.fromkeys(found, 0.0)
    rows, stored = matrix.numpy(), others.numpy()
    for start in range(0, len(matrix), _AT_ONCE):
        some = np.arange(start, min(start + _AT_ONCE, len(matrix)))
        begun = time.perf_counter()
        shortlist = nearest(matrix, some, depth, None if gallery is None else others).indices
        seconds[PLAIN] += time.perf_counter() - begun
        right = theirs[shortlist] == ours[some, None]
        found[PLAIN].append(right)
        for name in names:
            begun = time.perf_counter()
            scores = [rerank(name, rows[query], stored[near]) for query, near in zip(some, shortlist, strict=True)]
            order = np.argsort(-np.stack(scores), axis=1, kind="stable")
            seconds[name] += time.perf_counter() - begun
            found[name].append(np.take_along_axis(right, order, axis=1))
        if progress is not None:
            progress(int(some[-1]) + 1, len(matrix))
    values = check_ks(ks)
    return {
        name: _measured(
            np.concatenate(some), relevant, values, seconds[PLAIN] + (seconds[name] if name != PLAIN else 0)
        )
        for name, some in found.items()
    }


def _measured(right: NDArray[np.bool_], relevant: NDArray[np.int64], ks: Sequence[int], seconds: float) -> Reranked:
    place = np.arange(1, right.shape[1] + 1)
    precision = np.cumsum(right, axis=1) / place
    counted = right & (place <= relevant[:, None])
    average = (precision * counted).sum(axis=1) / np.maximum(relevant, 1)
    return Reranked(
        {k: 100 * float(right[:, :k].any(axis=1).mean()) for k in ks},
        100 * float(average.mean()),
        1e3 * seconds / len(right),
    )
