"""Random integers that are the same on every machine and in every version of NumPy.

NumPy promises that the raw 64-bit stream of a bit generator never changes, but not what its distributions make
of it. So everything random about data sets (splits, glyphs) is derived here from raw words by integer arithmetic.
"""

import numpy as np
from numpy.typing import NDArray


class Draws:
    """A stream of random integers, fixed by a tuple of whole numbers (a seed and whatever names the stream)."""

    def __init__(self, *key: int) -> None:
        # The length is part of the key because NumPy ignores zeros at the end; negative seeds are taken modulo 2^64.
        words = [len(key), *(part % 2**64 for part in key)]
        self._bits = np.random.PCG64(np.random.SeedSequence(words))

    def words(self, count: int) -> NDArray[np.uint64]:
        """`count` raw 64-bit words."""
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64).reshape(count)

    def between(self, low: int, high: int, count: int) -> NDArray[np.int64]:
        """`count` integers from `low` to `high`, both included; ranges up to 2^32 wide."""
        width = np.uint64(high - low + 1)
        return ((self.words(count) >> np.uint64(32)) * width >> np.uint64(32)).astype(np.int64) + low

    def bytes(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Random bytes of this shape."""
        count = int(np.prod(shape))
        return self.words(-(-count // 8)).astype("<u8").view(np.uint8)[:count].reshape(shape)

    def order(self, count: int) -> NDArray[np.int64]:
        """A random permutation of 0 .. count - 1."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64)
