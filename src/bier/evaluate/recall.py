"""Recall@K: the share of queries with an image of their own class among their K nearest gallery images."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bier.errors import DataError
from bier.evaluate.checks import Labels, Vectors, as_matrix, check_ks, encode_labels
from bier.evaluate.counting import Progress, Side, count_ahead, sort_by_class

NO_POSITIVE = -1


class RepeatedRecall(NamedTuple):
    """Recall over several random galleries, in percent: its mean and its standard deviation by K."""

    mean: dict[int, float]
    spread: dict[int, float]


def recall_at_k(
    vectors: Vectors,
    labels: Labels,
    ks: Iterable[int],
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
) -> dict[int, float]:
    """Return {K: Recall@K in percent}, exactly, for every K in one pass and in bounded memory.

    `vectors` (N, d) are compared by dot product, which is the similarity of the test-time vector. Without `gallery`
    every other vector of the set is the gallery. Corner cases:

    - A query never retrieves itself; it is left out by its index, so its duplicates do count.
    - Ties count against the query: a negative with exactly the best positive's score is ranked before it.
    - A query without a positive in the gallery is a miss at every K (`ranks` marks such queries with -1).
    - A zero vector scores 0 with everything. K may exceed the size of the gallery.
    """
    return recall_from_ranks(ranks(vectors, labels, gallery, gallery_labels), ks)


def ranks(
    vectors: Vectors,
    labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    progress: Progress | None = None,
) -> NDArray[np.int64]:
    """Return per query how many negatives are ahead of its best positive: 0 is a hit at K = 1, -1 is "no positive"."""
    queries, others = sides([as_matrix(vectors)], labels, _gallery_parts(gallery), gallery_labels)
    return count_ahead(queries, others, torch.ones(1, 1, dtype=torch.float64), progress=progress)[0].numpy()


def recall_from_ranks(ranks: NDArray[np.int64], ks: Iterable[int]) -> dict[int, float]:
    """Return {K: percent} from what `ranks` gives."""
    return {k: 100.0 * float(np.mean((ranks != NO_POSITIVE) & (ranks < k))) for k in check_ks(ks)}


def _gallery_parts(gallery: Vectors | None) -> list[torch.Tensor] | None:
    return None if gallery is None else [as_matrix(gallery, "gallery")]


def sides(
    parts: list[torch.Tensor],
    labels: Labels,
    gallery_parts: list[torch.Tensor] | None = None,
    gallery_labels: Labels | None = None,
) -> tuple[Side, Side | None]:
    """Check that queries and gallery fit each other and bring both into the order of their classes."""
    if (gallery_parts is None) != (gallery_labels is None):
        raise DataError("The 'gallery' and 'gallery_labels' parameters must be given together. Got only one of them.")
    if gallery_parts is None:
        codes, _ = encode_labels(labels, len(parts[0]))
        return sort_by_class(parts, codes), None
    if [part.shape[1] for part in parts] != [part.shape[1] for part in gallery_parts]:
        raise DataError(
            f"The 'gallery' parameter must have vectors of the queries' size {sum(part.shape[1] for part in parts)}. "
            f"Got {sum(part.shape[1] for part in gallery_parts)} instead."
        )
    codes, gallery_codes = encode_labels(labels, len(parts[0]), gallery_labels, len(gallery_parts[0]))
    assert gallery_codes is not None
    return sort_by_class(parts, codes), sort_by_class(gallery_parts, gallery_codes)


def repeated_gallery_recall(
    vectors: Vectors, labels: Labels, ks: Iterable[int], repeats: int = 10, seed: int = 0
) -> RepeatedRecall:
    """Draw one random image of each class into the gallery, let the rest be queries; repeat: VehicleID's protocol."""
    matrix = as_matrix(vectors)
    values = check_ks(ks)
    codes = encode_labels(labels, len(matrix))[0]
    runs = []
    for gallery in draw_galleries(labels, len(matrix), repeats, seed):
        keep = ~gallery
        runs.append(recall_at_k(matrix[keep], codes[keep], values, matrix[gallery], codes[gallery]))
    table = np.array([[run[k] for k in values] for run in runs])
    return RepeatedRecall(
        dict(zip(values, table.mean(0).tolist(), strict=True)), dict(zip(values, table.std(0).tolist(), strict=True))
    )


def draw_galleries(labels: Labels, count: int, repeats: int, seed: int) -> list[torch.Tensor]:
    """Return `repeats` masks (N,), each true for one random image of every class; the seed alone decides which."""
    codes = encode_labels(labels, count)[0].numpy()
    if repeats < 1:
        raise DataError(f"The 'repeats' parameter must be 1 or more. Got {repeats} instead.")
    if len(np.unique(codes)) == count:
        raise DataError(
            "The 'labels' parameter must repeat some class, or no query is left. Got one image of each class."
        )
    masks = []
    for child in np.random.default_rng(seed).spawn(repeats):
        shuffled = child.permutation(count)
        mask = torch.zeros(count, dtype=torch.bool)
        mask[torch.from_numpy(shuffled[np.unique(codes[shuffled], return_index=True)[1]])] = True
        masks.append(mask)
    return masks
