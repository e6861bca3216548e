"""The work behind requests: search, encoding of uploads and thumbnails, in threads beside the event loop."""

import io
import random
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio.to_thread
import numpy as np
from anyio import CapacityLimiter
from fastapi import UploadFile
from numpy.typing import NDArray
from PIL import Image

from bier.collection import Collection
from bier.errors import DataError
from bier.evaluate.verification import kept_threshold
from bier.images import open_image
from bier.search import Id, Index, Label
from bier.search.rerank import MOST, search_reranked
from bier.web.guard import ApiError, Limits, refused_picture, too_large

SIZES = (256, 640)  # longest side in pixels: of a tile, and of the query
UPLOAD = "upload:"
_LOSSLESS = 128  # pictures no larger are sent as PNG
_MEMORY = 64 * 2**20

Floats = NDArray[np.float32]
T = TypeVar("T")


class Thumbnail(NamedTuple):
    data: bytes
    media_type: str


def thumbnail(image: Image.Image, size: int) -> Thumbnail:
    """An RGB picture scaled down to `size` (never up), in a format that every browser shows."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    if max(small.size) <= _LOSSLESS:
        small.save(file, "PNG", optimize=True)
        return Thumbnail(file.getvalue(), "image/png")
    small.save(file, "JPEG", quality=85)
    return Thumbnail(file.getvalue(), "image/jpeg")


class ThumbnailCache:
    """The thumbnails used last, up to 64 MB. Safe to use from several threads.

    `functools.lru_cache` bounds the number of entries; this bounds their bytes.
    """

    def __init__(self, most: int = _MEMORY) -> None:
        self._most, self._bytes = most, 0
        self._known: OrderedDict[tuple[str, int], Thumbnail] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, size: int, make: Callable[[], Thumbnail]) -> Thumbnail:
        key = (name, size)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        made = make()
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self._bytes += len(made.data)
            while self._bytes > self._most and self._known:
                self._bytes -= len(self._known.popitem(last=False)[1].data)
        return made


class Query(NamedTuple):
    """A picture to search with. `id` is set for an image of the collection, which must not find itself."""

    name: str
    vector: Floats
    id: Id | None = None
    label: Label = None


class Hit(NamedTuple):
    id: Id
    label: Label
    score: float  # the dot product, as `Index.search` returns it
    similarity: float  # the cosine: 1 for the same picture
    same: bool | None  # whether it lies above the row's threshold; None without one


class ResultRow(NamedTuple):
    """The results of the first `learners` together, or of learner `learners` alone.

    threshold: the similarity from which the model counts images as the same. Those above it come first.
    """

    alone: bool
    learners: int
    dimension: int
    hits: list[Hit]
    threshold: float | None


class Service:
    """Answers requests from a collection: encodes one upload at a time, runs four searches or thumbnails at a time."""

    def __init__(self, collection: Collection, limits: Limits) -> None:
        self.collection, self.limits = collection, limits
        self.store = collection.store
        self.groups = self.store.groups
        self.ids: Sequence[Id] = self.store.ids
        self.labels: list[Label] = [entry.label for entry in self.store.entries(self.ids)]
        self._row_of = {str(one): row for row, one in enumerate(self.ids)}
        self._rows_of_label: dict[str, list[int]] = {}
        for row, label in enumerate(self.labels):
            if label is not None:
                self._rows_of_label.setdefault(str(label), []).append(row)
        self._thumbnails = ThumbnailCache()
        self._uploads: OrderedDict[str, tuple[Floats, dict[int, Thumbnail]]] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding, self._searching, self._drawing = (CapacityLimiter(n) for n in (1, 4, 4))
        # An index may be searched from several threads at once; an external store may not support that.
        self._threads = ThreadPoolExecutor(4 if isinstance(self.store, Index) else 1, "search")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def classes(self) -> int:
        return len(self._rows_of_label)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def warm_up(self) -> None:
        """Encode one picture, so that the first upload does not wait for the model to be prepared."""
        self.collection.model.encode([Image.new("RGB", (64, 64), "white")], workers=0)

    def browse(self, count: int, seed: int, label: str = "") -> tuple[int, list[tuple[Id, Label]]]:
        """How many images have this text in their label, and some of them in an order that the seed fixes."""
        rows: Sequence[int] = range(len(self.ids))
        if label:
            wanted = label.casefold()
            rows = [row for name, some in self._rows_of_label.items() if wanted in name.casefold() for row in some]
        drawn = random.Random(seed).sample(rows, min(count, len(rows)))
        return len(rows), [(self.ids[row], self.labels[row]) for row in drawn]

    async def find(self, name: str) -> Query:
        """The query of this name: an id of the collection as text, or a recent upload."""
        found = await _threaded(self._searching, self._find, name)
        if found is None and name.startswith(UPLOAD):
            raise ApiError(404, "forgotten", "That picture is no longer stored here. Send it again.")
        if found is None:
            raise ApiError(404, "unknown_id", f"The collection has no image {name[:200]!r}.")
        return found

    async def encode(self, upload: UploadFile) -> Query:
        """Encode an uploaded picture and remember it for a while."""
        if self._encoding.statistics().tasks_waiting >= self.limits.waiting:
            raise ApiError(503, "busy", "Many pictures are waiting to be encoded. Try again in a moment.")
        data = await upload.read()
        if len(data) > self.limits.upload_bytes:
            raise ApiError(413, "too_large", too_large(self.limits.upload_bytes))
        try:
            return await _threaded(self._encoding, self._encode, data)
        except DataError as error:
            raise refused_picture(error) from error

    async def search(
        self, query: Query, k: int, learners: int | None, shortlist: int | None, each: bool, rerank: str | None = None
    ) -> list[ResultRow]:
        """The results of the first `learners` together and, with `each`, those of every learner alone.

        rerank: re-rank each row's nearest images by this method.
        """
        count = len(self.groups)
        chosen = count if learners is None else learners
        if chosen > count:
            raise ApiError(422, "invalid", f"The 'learners' parameter must lie between 1 and {count}. Got {chosen}.")
        if shortlist is not None and shortlist < k:
            raise ApiError(422, "invalid", f"The 'shortlist' parameter must be at least k, {k}. Got {shortlist}.")
        if rerank is not None and shortlist is not None and shortlist > MOST:
            raise ApiError(422, "invalid", f"With 'rerank', 'shortlist' must be at most {MOST}. Got {shortlist}.")
        return await _threaded(self._searching, self._search, query, k, chosen, shortlist, each, rerank)

    async def thumbnail(self, name: str, size: int) -> Thumbnail:
        """The small picture of an id or an upload."""
        try:
            made = await _threaded(self._drawing, self._thumbnail, name, size)
        except DataError as error:
            raise ApiError(410, "gone", "The file of this image cannot be read any more.") from error
        if made is None:
            raise ApiError(404, "unknown_id", "The collection has no such image.")
        return made

    def _find(self, name: str) -> Query | None:
        with self._lock:
            known = self._uploads.get(name)
            if known is not None:
                self._uploads.move_to_end(name)
                return Query(name, known[0])
        if name not in self._row_of:
            return None
        row = self._row_of[name]
        return Query(name, self.store.vectors([self.ids[row]])[0], self.ids[row], self.labels[row])

    def _encode(self, data: bytes) -> Query:
        image = open_image(data, at_least=max(SIZES))
        vector = self.collection.model.encode([image], workers=0)[0]
        shown = {size: thumbnail(image, size) for size in SIZES}
        name = UPLOAD + secrets.token_urlsafe(12)
        with self._lock:
            self._uploads[name] = (vector, shown)
            while len(self._uploads) > self.limits.uploads:
                self._uploads.popitem(last=False)
        return Query(name, vector)

    def _thumbnail(self, name: str, size: int) -> Thumbnail | None:
        with self._lock:
            if name in self._uploads:
                return self._uploads[name][1][size]
        if name not in self._row_of:
            return None
        one = self.ids[self._row_of[name]]
        return self._thumbnails.get(name, size, lambda: thumbnail(self.collection.picture(one), size))

    def _search(
        self, query: Query, k: int, learners: int, shortlist: int | None, each: bool, rerank: str | None
    ) -> list[ResultRow]:
        whole = learners == len(self.groups)
        asked: list[tuple[bool, int]] = [(False, learners)]
        asked += [(True, number) for number in range(1, len(self.groups) + 1)] if each else []
        waiting = [
            self._threads.submit(self._row, query, k, alone, number, shortlist if whole and not alone else None, rerank)
            for alone, number in asked
        ]
        return [one.result() for one in waiting]

    def _row(
        self, query: Query, k: int, alone: bool, learners: int, shortlist: int | None, rerank: str | None
    ) -> ResultRow:
        ends = np.cumsum((0, *self.groups))
        span = slice(int(ends[learners - 1]) if alone else 0, int(ends[learners]))
        chosen = [learners] if alone else None if learners == len(self.groups) else learners
        own = query.id is not None
        if rerank is None:
            wide = None if shortlist is None else max(shortlist, k + own)
            found = self.store.search(query.vector, k + own, shortlist=wide, learners=chosen)
        else:
            found = search_reranked(
                self.store, query.vector, k, rerank, shortlist=shortlist, learners=chosen, without=query.id
            )
        # All vectors of a model have the same length in the same learners' part.
        unit = float(np.square(query.vector[span]).sum()) or 1.0
        threshold = kept_threshold(self.collection.model.metadata, learners, alone)
        hits = [
            self._hit(one, float(score), float(np.clip(score / unit, -1, 1)), threshold)
            for one, score in zip(found.ids.tolist(), found.scores, strict=True)
            if one != query.id and np.isfinite(score) and str(one) in self._row_of
        ]
        hits.sort(key=lambda hit: hit.same is False)  # re-ranking may put an image below the threshold first
        return ResultRow(alone, learners, span.stop - span.start, hits[:k], threshold)

    def _hit(self, one: Id, score: float, similarity: float, threshold: float | None) -> Hit:
        same = None if threshold is None else similarity >= threshold
        return Hit(one, self.labels[self._row_of[str(one)]], score, similarity, same)


async def _threaded(limiter: CapacityLimiter, work: Callable[..., T], *arguments: Any) -> T:
    return await anyio.to_thread.run_sync(partial(work, *arguments), limiter=limiter)
