"""A memory-mapped cache of prepared images, safe against interruption, changed files and other processes."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from bier import files
from bier.errors import DataError
from bier.files import printable

# Part of the key: raise it whenever `read_prepared` gives other pixels for the same file.
_VERSION = 1


class PixelCache:
    """Rows of uint8 (size, size, 3), one per image, in `folder/KEY/pixels`.

    KEY is a digest of the size and of every path and box, in order. Beside the pixels lie `stamps`, the
    length, modification time in nanoseconds and inode (3 x int64) of the file that each row was made from, where zeros
    mean that the row holds nothing.

    - A row is served only while its stamp is the file's own. Before a row is written its stamp is cleared,
      and it is set only when the pixels are on the disk: a build that is killed loses the chunks that were
      in the making, and the next goes on from there.
    - Builders hold a lock, so of several processes one builds and the others wait and find the work done.
    - Readers look at the stamp before and after they copy a row, so a row that another process rewrites
      at that moment is never served; the caller then reads the file.
    - Reading is through a memory map: the cache may be larger than memory.
    """

    def __init__(
        self,
        folder: Path,
        paths: Sequence[str | os.PathLike[str]],
        boxes: NDArray[np.float32] | None,
        size: int,
    ) -> None:
        self.count = len(paths)
        self.size = size
        self.folder = folder / _key(paths, boxes, size)
        self._wanted = np.array([files.stamp(path) for path in paths], np.int64).reshape(self.count, 3)
        self._maps: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None

    @property
    def _row_bytes(self) -> int:
        return self.size * self.size * 3

    def row(self, index: int) -> NDArray[np.uint8] | None:
        """A copy of row `index`, or None where the cache does not hold the file as it was on opening."""
        pixels, stamps = self._mapped()
        wanted = self._wanted[index]
        if not wanted.any() or not np.array_equal(stamps[index], wanted):
            return None
        row = np.array(pixels[index])
        return row if np.array_equal(stamps[index], wanted) else None

    @contextmanager
    def building(self) -> Iterator[list[int]]:
        """Hold the lock; gives the rows that are missing or out of date, for `store`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / "lock"):
                self._lay_out()
                _, stamps = self._mapped()
                current = (stamps == self._wanted).all(axis=1) & self._wanted.any(axis=1)
                stale: list[int] = np.flatnonzero(~current).tolist()
                yield stale
        except OSError as error:
            raise DataError(
                f"Cannot write the image cache in {printable(self.folder)}: {files.reason(error)}."
            ) from error

    def store(self, rows: Mapping[int, NDArray[np.uint8]]) -> None:
        """Write rows; only inside `building`. Each step reaches the disk before the next begins."""
        self._write("stamps", {i: np.zeros(3, np.int64) for i in rows if self._mapped()[1][i].any()})
        self._write("pixels", rows)
        self._write("stamps", {i: self._wanted[i] for i in rows})

    def _write(self, name: str, rows: Mapping[int, NDArray[Any]]) -> None:
        # Through the file and not through the map: a full disk is then an error and not a signal that kills.
        if not rows:
            return
        with (self.folder / name).open("r+b") as file:
            for index, row in rows.items():
                file.seek(index * row.nbytes)
                file.write(np.ascontiguousarray(row).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _lay_out(self) -> None:
        """Files of the right length, on blocks that are theirs: a map of a file with holes kills where a disk is full.

        Pixels of another length are no pixels of ours: their stamps go first.
        """
        pixels, stamps = (self.folder / name for name in ("pixels", "stamps"))
        lengths = {stamps: self.count * 24, pixels: self.count * self._row_bytes}
        if not all(path.is_file() and path.stat().st_size == length for path, length in lengths.items()):
            for path in (stamps, pixels):
                path.unlink(missing_ok=True)
            about = {"version": _VERSION, "images": self.count, "size": self.size}
            files.write(self.folder / "about.json", json.dumps(about).encode() + b"\n")
        self._check_space()
        for path, length in lengths.items():
            files.reserve(path, length)
        self._maps = None

    def _check_space(self) -> None:
        free = shutil.disk_usage(self.folder).free
        # Blocks that a former build has filled already are not needed again.
        file = self.folder / "pixels"
        filled = getattr(file.stat(), "st_blocks", 0) * 512 if file.is_file() else 0
        needed = self.count * self._row_bytes - filled
        if needed > free:
            raise DataError(
                f"The image cache in {printable(self.folder)} needs {needed / 1e9:.1f} GB more and its disk has "
                f"{free / 1e9:.1f} GB left; name a folder on a larger disk."
            )

    def _mapped(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        if self._maps is None:
            shape = (self.count, self.size, self.size, 3)
            pixels = np.memmap(self.folder / "pixels", np.uint8, "r", shape=shape)
            stamps = np.memmap(self.folder / "stamps", np.int64, "r", shape=(self.count, 3))
            self._maps = np.asarray(pixels), np.asarray(stamps)
        return self._maps

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": None}  # a pickled map would carry all the pixels


def _key(paths: Sequence[str | os.PathLike[str]], boxes: NDArray[np.float32] | None, size: int) -> str:
    """Names the folder of these rows. Stamps of files are not part of it: a changed file makes one row out of date."""
    digest = hashlib.sha256(f"{_VERSION} {size} {len(paths)} {boxes is not None}\n".encode())
    for path in paths:
        digest.update(os.fsencode(os.path.abspath(path)) + b"\0")  # noqa: PTH100 - speed
    if boxes is not None:
        digest.update(np.ascontiguousarray(boxes).tobytes())
    return digest.hexdigest()[:20]
