"""What the evaluation accepts: finite float matrices and one label a row, from numpy or torch."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bier.errors import DataError
from bier.method.equations import unit_rows

Vectors = NDArray[np.floating] | torch.Tensor
Labels = ArrayLike | torch.Tensor


def as_matrix(vectors: Vectors, name: str = "vectors") -> torch.Tensor:
    """Return a float32 CPU matrix (N, d), without a copy where it already is one."""
    if isinstance(vectors, torch.Tensor):
        matrix = vectors.detach().to("cpu", torch.float32)
    else:
        array = np.asarray(vectors)
        if not np.issubdtype(array.dtype, np.number) or np.issubdtype(array.dtype, np.complexfloating):
            raise DataError(
                f"The '{name}' parameter must be an array of real numbers. Got dtype {array.dtype} instead."
            )
        array = np.asarray(array, dtype=np.float32)
        # torch cannot hold read-only or byte-swapped memory; such arrays are copied once
        matrix = torch.from_numpy(array if array.flags.writeable else array.copy())
    if matrix.ndim != 2 or matrix.shape[0] == 0 or matrix.shape[1] == 0:
        raise DataError(
            f"The '{name}' parameter must be a matrix of one vector a row (N, d). "
            f"Got shape {tuple(matrix.shape)} instead."
        )
    _check_finite(matrix, name)
    return matrix


def _check_finite(matrix: torch.Tensor, name: str) -> None:
    # A sum is not finite if any entry is not; looking for the row is left to the bad case.
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
    """Number the labels 0..C-1 alike on both sides; any integers or strings will do."""
    queries = _flat(labels, count, "labels")
    if gallery_labels is None:
        return torch.from_numpy(np.unique(queries, return_inverse=True)[1].reshape(-1).astype(np.int64)), None
    gallery = _flat(gallery_labels, gallery_count, "gallery_labels")
    if (queries.dtype.kind in "US") != (gallery.dtype.kind in "US"):
        raise DataError(
            f"The 'labels' and 'gallery_labels' parameters must be of one kind. "
            f"Got {queries.dtype} and {gallery.dtype} instead."
        )
    codes = np.unique(np.concatenate([queries, gallery]), return_inverse=True)[1].reshape(-1).astype(np.int64)
    return torch.from_numpy(codes[:count].copy()), torch.from_numpy(codes[count:].copy())


def _flat(labels: Labels, count: int, name: str) -> NDArray[np.generic]:
    array = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if array.shape != (count,):
        raise DataError(
            f"The '{name}' parameter must give one label a vector, {count} in all. Got shape {array.shape} instead."
        )
    if array.dtype.kind not in "iubUS":
        raise DataError(f"The '{name}' parameter must hold integers or strings. Got dtype {array.dtype} instead.")
    return array


def check_ks(ks: Iterable[int]) -> tuple[int, ...]:
    """Return the distinct K in growing order."""
    values = sorted({int(k) for k in ks})
    if not values or values[0] < 1:
        raise DataError(f"The 'ks' parameter must hold at least one K, each 1 or more. Got {values} instead.")
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
