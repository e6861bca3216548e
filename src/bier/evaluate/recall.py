"""Recall@K, mAP@R and R-Precision, from vectors and labels."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bier.errors import DataError
from bier.evaluate.pairs import Progress, Scan, Side, scan, sort_by_class
from bier.method.equations import unit_rows

Vectors = NDArray[np.floating] | torch.Tensor
Labels = ArrayLike | torch.Tensor


def as_matrix(vectors: Vectors, name: str = "vectors") -> torch.Tensor:
    """Return a float32 CPU matrix (N, d), without a copy where it already is one of ordinary size."""
    if isinstance(vectors, torch.Tensor):
        if vectors.layout != torch.strided or vectors.is_complex() or vectors.is_quantized:
            kind = f"{vectors.dtype}".removeprefix("torch.")
            raise DataError(
                f"The '{name}' parameter must be a dense matrix of real numbers. "
                f"Got a {'dense' if vectors.layout == torch.strided else 'sparse'} tensor of dtype {kind} instead."
            )
        matrix = vectors.detach().to("cpu")
    else:
        array = np.asarray(vectors)
        if not np.issubdtype(array.dtype, np.number) or np.issubdtype(array.dtype, np.complexfloating):
            raise DataError(
                f"The '{name}' parameter must be an array of real numbers. Got dtype {array.dtype} instead."
            )
        if array.dtype not in (np.float32, np.float64):
            array = np.asarray(array, dtype=np.float32)
        # torch cannot hold read-only or byte-swapped memory; such arrays are copied once
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        matrix = torch.from_numpy(array if array.flags.writeable else array.copy())
    if matrix.ndim != 2 or matrix.shape[0] == 0 or matrix.shape[1] == 0:
        raise DataError(
            f"The '{name}' parameter must be a matrix with one vector per row (N, d). "
            f"Got shape {tuple(matrix.shape)} instead."
        )
    _check_finite(matrix, name)
    return _in_range(matrix).to(torch.float32)


def _in_range(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a power of two of it where products of its rows would not be numbers of float32.

    Ranks and unit vectors stay the same: the factor is one for all rows.
    """
    largest = max(abs(float(end)) for end in torch.aminmax(matrix))
    if largest == 0 or 2.0**-40 < largest < 2.0**40:
        return matrix
    _, exponent = math.frexp(largest)
    first = -exponent // 2  # in two steps: the whole factor may itself be out of range
    return matrix.double().mul_(2.0**first).mul_(2.0 ** (-exponent - first))


def _check_finite(matrix: torch.Tensor, name: str) -> None:
    # A sum is not finite if any entry is not; the row is looked for only then.
    if bool(torch.isfinite(matrix.sum(dtype=torch.float64))):
        return
    bad = (~torch.isfinite(matrix)).any(dim=1).nonzero().flatten()
    if len(bad):
        raise DataError(
            f"The '{name}' parameter must hold finite numbers. "
            f"Got NaN or infinity in {len(bad)} rows, first in row {int(bad[0])}."
        )


def encode_labels(
    labels: Labels, count: int, gallery_labels: Labels | None = None, gallery_count: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Number the labels 0..C-1 alike on both sides; labels are integers or strings."""
    queries = _flat(labels, count, "labels")
    if gallery_labels is None:
        return _codes(queries), None
    gallery = _flat(gallery_labels, gallery_count, "gallery_labels")
    kinds = [_kind_of(array) for array in (queries, gallery)]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"The 'labels' and 'gallery_labels' parameters must be of one kind. Got {kinds[0]} and {kinds[1]} instead."
        )
    if queries.dtype != gallery.dtype:  # numpy would round int64 beside uint64
        queries, gallery = queries.astype(object), gallery.astype(object)
    codes = _codes(np.concatenate([queries, gallery]))
    return codes[:count].clone(), codes[count:].clone()


def _codes(labels: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64))


def _flat(labels: Labels, count: int, name: str) -> NDArray[Any]:
    """One label per vector. What is no array stays Python's: numpy would round large integers and cut a final NUL."""
    if isinstance(labels, torch.Tensor):
        array: NDArray[Any] = labels.detach().to_dense().cpu().numpy()
    else:
        array = labels if isinstance(labels, np.ndarray) else np.asarray(labels, dtype=object)
    if array.shape != (count,):
        raise DataError(
            f"The '{name}' parameter must give one label per vector, {count} in all. Got shape {array.shape} instead."
        )
    kind = _kind_of(array)
    if kind not in ("integers", "strings", "bytes"):
        raise DataError(f"The '{name}' parameter must hold integers or strings, not both. Got {kind} instead.")
    return array


def _kind_of(labels: NDArray[Any]) -> str:
    if labels.dtype != object:
        return {"U": "strings", "S": "bytes"}.get(labels.dtype.kind) or (
            "integers" if labels.dtype.kind in "iub" else f"dtype {labels.dtype}"
        )
    types = sorted({_type_of(label) for label in labels})
    return " and ".join(types)


def _type_of(label: object) -> str:
    for types, name in (((str,), "strings"), ((bytes,), "bytes"), ((int, np.integer, np.bool_), "integers")):
        if isinstance(label, types):
            return name
    return type(label).__name__


def check_ks(ks: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return the distinct K in growing order; an integer is a list of one."""
    try:
        values = sorted({operator.index(k) for k in ([ks] if isinstance(ks, SupportsIndex) else ks)})
    except TypeError:
        values = []
    if not values or values[0] < 1:
        raise DataError(f"The 'ks' parameter must hold at least one K, each an integer of 1 or more. Got {ks} instead.")
    return tuple(values)


def check_groups(groups: Sequence[int], dimension: int) -> tuple[int, ...]:
    """Return the learners' sizes, which must cut the embedding exactly."""
    sizes = tuple(int(size) for size in groups)
    if not sizes or min(sizes) < 1 or sum(sizes) != dimension:
        raise DataError(
            f"The 'groups' parameter must be sizes of 1 or more that sum to the embedding's {dimension}. "
            f"Got {list(sizes)} instead."
        )
    return sizes


def unit_parts(z: torch.Tensor, groups: Sequence[int]) -> list[torch.Tensor]:
    """Cut the raw embedding (N, d) into its learners and scale each row to length 1; zero rows stay zero."""
    return [unit_rows(part) for part in z.split(list(groups), dim=1)]


NO_POSITIVE = -1


def recall_at_k(
    vectors: Vectors,
    labels: Labels,
    ks: SupportsIndex | Iterable[SupportsIndex],
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
) -> dict[int, float]:
    """Recall@K: the share of queries with an image of their class among the K nearest, for every K in one pass.

    The result is exact, and memory does not grow with the square of N. Corner cases:

    - A query never retrieves itself; it is left out by its index, so its duplicates do count.
    - Ties count against the query: a negative with exactly the best positive's score is ranked before it.
    - A query without a positive in the gallery is a miss at every K (`ranks` marks such queries with -1).
    - A zero vector scores 0 with everything. K may exceed the size of the gallery.
    - Vectors of any length do: very long or short ones are scaled by one factor for all, which changes no rank.

    Args:
        vectors: the queries (N, d), compared by dot product, which is the similarity of two test-time vectors.
        labels: the class of each query, integers or strings.
        ks: the values of K, or one of them.
        gallery: the vectors (G, d) that are searched; by default the queries, each among the others.
        gallery_labels: their classes.

    Returns:
        {K: percent}.

    Raises:
        DataError: shapes do not fit, or vectors are not finite.

    Example:
        >>> import bier, numpy as np
        >>> vectors = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
        >>> bier.recall_at_k(vectors, ["gull", "gull", "swan", "swan"], [1, 2])
        {1: 50.0, 2: 100.0}
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
    return _scan_vectors(vectors, labels, gallery, gallery_labels, progress=progress).ranks[0].numpy()


def _scan_vectors(
    vectors: Vectors,
    labels: Labels,
    gallery: Vectors | None,
    gallery_labels: Labels | None,
    *,
    ranking: bool = False,
    progress: Progress | None = None,
) -> Scan:
    others = None if gallery is None else [as_matrix(gallery, "gallery")]
    queries, target = sides([as_matrix(vectors)], labels, others, gallery_labels)
    return scan(queries, target, torch.ones(1, 1, dtype=torch.float64), ranking=ranking, progress=progress)


def recall_from_ranks(ranks: NDArray[np.int64], ks: SupportsIndex | Iterable[SupportsIndex]) -> dict[int, float]:
    """Return {K: percent} from what `ranks` gives."""
    return {k: 100.0 * float(np.mean((ranks != NO_POSITIVE) & (ranks < k))) for k in check_ks(ks)}


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


def draw_galleries(labels: Labels, count: int, repeats: int, seed: int) -> list[torch.Tensor]:
    """Galleries of VehicleID's protocol: masks (N,), each true for one random image of every class, by the seed alone.

    The other images are the queries, and recall is the mean over the galleries.
    """
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


BLOCK = 1 << 23  # scores held at once: 32 MB


class Ranking(NamedTuple):
    """Both in percent, the mean over all queries."""

    map_at_r: float
    r_precision: float

    @classmethod
    def of(cls, *scans: Scan) -> "Ranking":
        """The mean over the queries of all scans."""
        shares = [(s.average_precision, s.r_precision) for s in scans]
        average, precision = (torch.cat([row for row in rows if row is not None]) for rows in zip(*shares, strict=True))
        return cls(100 * float(average.mean()), 100 * float(precision.mean()))


class Neighbours(NamedTuple):
    """The k nearest gallery images of each query, nearest first: int64 and float32 (Q, k)."""

    indices: NDArray[np.int64]
    scores: NDArray[np.float32]


def rank_r(
    vectors: Vectors,
    labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """Return mAP@R and R-Precision, where R is the number of the query's positives in the gallery.

    R-Precision is the share of positives among the first R answers; mAP@R is 1/R sum_{i<=R} precision(i) [answer i is
    positive]. Corner cases are those of `recall_at_k`; a query without a positive scores 0.
    """
    return Ranking.of(_scan_vectors(vectors, labels, gallery, gallery_labels, ranking=True, progress=progress))


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
