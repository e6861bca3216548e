"""Test-time vectors with a byte or a bit per dimension, for programs that store them so.

The names are those of sentence-transformers. Unlike there, nothing is learned from a sample: each vector is rounded by
itself, so that an image has the same vector in every batch. (`bier.Index` takes floats and has precisions of its own,
which learn from the collection and find more.)
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from bier.errors import ConfigError

VectorPrecision: TypeAlias = Literal["float32", "int8", "binary", "ubinary"]


def check_precision(precision: str) -> None:
    known = get_args(VectorPrecision)
    if precision not in known:
        raise ConfigError(f"The 'precision' parameter must be one of {', '.join(known)}. Got {precision!r} instead.")


def quantize_embeddings(
    vectors: NDArray[np.float32], precision: VectorPrecision, groups: Sequence[int]
) -> NDArray[Any]:
    """Vectors (N, d) of learners of these sizes in another precision.

    Returns:
        `int8`: (N, d), each vector scaled so that its largest number is 127; compare by the cosine, which is right to
        about 0.003. `ubinary`: uint8 (N, ceil(d / 8)), eight dimensions per byte, the first in the highest bit;
        compare by the Hamming distance. A bit says whether a number is above the mean of its learner's part: above 0
        would say nothing about plain features, which are never negative. `binary`: the same as int8, less 128.
    """
    check_precision(precision)
    if precision == "float32":
        return vectors
    if precision == "int8":
        largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0)
        return np.rint(vectors * (127 / np.where(largest > 0, largest, 1))).astype(np.int8)
    parts = np.split(vectors, np.cumsum(groups)[:-1], axis=1)
    bits = np.packbits(np.concatenate([part > part.mean(axis=1, keepdims=True) for part in parts], axis=1), axis=1)
    return bits if precision == "ubinary" else (bits ^ 128).view(np.int8)
