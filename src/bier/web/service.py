"""The work behind requests: a collection with its model and pictures, run in threads."""

import io
import random
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio.to_thread
import numpy as np
from anyio import CapacityLimiter
from fastapi import Response, UploadFile
from numpy.typing import NDArray
from PIL import Image

from bier.errors import DataError, ModelError
from bier.images import open_image
from bier.models.model import Model
from bier.search import Id, Index, Label, Store
from bier.web.guard import Limits, Problem, refused_picture, too_large

SIZES = (256, 640)  # longest side in pixels: a tile, and the query
_SMALL = 128  # pictures no larger are sent without loss
_MEMORY = 64 * 2**20


class Thumbnail(NamedTuple):
    data: bytes
    media_type: str


def thumbnail(image: Image.Image, size: int) -> Thumbnail:
    """An RGB picture scaled down to `size` (never up), as a file that every browser shows."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    if max(small.size) <= _SMALL:
        small.save(file, "PNG", optimize=True)
        return Thumbnail(file.getvalue(), "image/png")
    small.save(file, "JPEG", quality=85)
    return Thumbnail(file.getvalue(), "image/jpeg")


class Memory:
    """The thumbnails used last, up to 64 MB of them. Safe to use from several threads."""

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


Floats = NDArray[np.float32]
UPLOAD = "upload:"


class Query(NamedTuple):
    """A picture to search with. `id` is set for one of the collection, which must not find itself."""

    name: str
    vector: Floats
    id: Id | None = None
    label: Label = None


class Hit(NamedTuple):
    id: Id
    label: Label
    score: float  # the dot product, as `Index.search` gives it
    similarity: float  # the cosine: 1 for the same picture


class Answer(NamedTuple):
    """One row of results: of the first `learners` together, or of learner `learners` alone."""

    alone: bool
    learners: int
    dimension: int
    hits: list[Hit]


class Collection:
    """Searches by learner, the catalogue, thumbnails and recent uploads. Its methods may run in several threads.

    Args:
        store: the vectors, with ids and labels.
        model: encodes uploads; its learners must be those of the store.
        picture: the picture of an id. It is only ever asked for ids that the store holds.
        title: what the page calls it.
        quality: what `bier.web.quality.measure` gave, or None.
        uploads: how many uploads are remembered.
    """

    def __init__(
        self,
        store: Store,
        model: Model,
        picture: Callable[[Id], Image.Image],
        title: str = "",
        quality: Mapping[str, Any] | None = None,
        uploads: int = 256,
    ) -> None:
        if tuple(model.groups) != tuple(store.groups):
            raise ModelError(
                f"The model must have the learners of the collection, {tuple(store.groups)}. "
                f"Got {tuple(model.groups)} instead."
            )
        self.store, self.model, self.title, self.quality = store, model, title, quality
        self.groups = tuple(store.groups)
        self.ids: Sequence[Id] = store.ids
        self.labels: list[Label] = [entry.label for entry in store.entries(self.ids)]
        self._names = {str(one): row for row, one in enumerate(self.ids)}
        self._rows_of: dict[str, list[int]] = {}
        for row, label in enumerate(self.labels):
            if label is not None:
                self._rows_of.setdefault(str(label), []).append(row)
        self._picture = picture
        self._thumbnails = Memory()
        self._uploads: OrderedDict[str, tuple[Floats, dict[int, Thumbnail]]] = OrderedDict()
        self._most_uploads = uploads
        self._lock = threading.Lock()
        # An index may be searched from several threads; of other stores that is not known.
        self._threads = ThreadPoolExecutor(4, "search") if isinstance(store, Index) else ThreadPoolExecutor(1)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def classes(self) -> int:
        return len(self._rows_of)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def warm_up(self) -> None:
        """Let the model see a picture, so that the first visitor does not wait for it to get ready."""
        self.model.encode([Image.new("RGB", (64, 64), "white")], workers=0)

    def find(self, name: str) -> Query | None:
        """The query of this name: an id of the collection as text, or an upload that is still remembered."""
        with self._lock:
            known = self._uploads.get(name)
            if known is not None:
                self._uploads.move_to_end(name)
                return Query(name, known[0])
        if name not in self._names:
            return None
        row = self._names[name]
        return Query(name, self.store.vectors([self.ids[row]])[0], self.ids[row], self.labels[row])

    def upload(self, data: bytes) -> Query:
        """Encode the bytes of a picture and remember it; DataError where they are none."""
        image = open_image(data, at_least=max(SIZES))
        vector = self.model.encode([image], workers=0)[0]
        shown = {size: thumbnail(image, size) for size in SIZES}
        name = UPLOAD + secrets.token_urlsafe(12)
        with self._lock:
            self._uploads[name] = (vector, shown)
            while len(self._uploads) > self._most_uploads:
                self._uploads.popitem(last=False)
        return Query(name, vector)

    def thumbnail(self, name: str, size: int) -> Thumbnail | None:
        """The small picture of an id or an upload; None where there is neither."""
        with self._lock:
            if name in self._uploads:
                return self._uploads[name][1][size]
        if name not in self._names:
            return None
        one = self.ids[self._names[name]]
        return self._thumbnails.get(name, size, lambda: thumbnail(self._picture(one), size))

    def browse(self, count: int, seed: int, label: str = "") -> tuple[int, list[tuple[Id, Label]]]:
        """How many images have this text in their label, and some of them in an order that the seed fixes."""
        rows: Sequence[int] = range(len(self.ids))
        if label:
            wanted = label.casefold()
            rows = [row for name, some in self._rows_of.items() if wanted in name.casefold() for row in some]
        drawn = random.Random(seed).sample(rows, min(count, len(rows)))
        return len(rows), [(self.ids[row], self.labels[row]) for row in drawn]

    def search(self, query: Query, k: int, learners: int, shortlist: int | None, each: bool) -> list[Answer]:
        """The row of the first `learners` together and, with `each`, one of every learner alone beneath it."""
        whole = learners == len(self.groups)
        asked: list[tuple[bool, int]] = [(False, learners)]
        asked += [(True, number) for number in range(1, len(self.groups) + 1)] if each else []
        waiting = [
            self._threads.submit(self._answer, query, k, alone, number, shortlist if whole and not alone else None)
            for alone, number in asked
        ]
        return [one.result() for one in waiting]

    def _answer(self, query: Query, k: int, alone: bool, learners: int, shortlist: int | None) -> Answer:
        ends = np.cumsum((0, *self.groups))
        span = slice(int(ends[learners - 1]) if alone else 0, int(ends[learners]))
        chosen = [learners] if alone else None if learners == len(self.groups) else learners
        own = query.id is not None
        shortlist = None if shortlist is None else max(shortlist, k + own)
        found = self.store.search(query.vector, k + own, shortlist=shortlist, learners=chosen)
        # All vectors of a model have the same length in the same learners' part.
        unit = float(np.square(query.vector[span]).sum()) or 1.0
        hits = [
            Hit(one, self.labels[self._names[str(one)]], float(score), float(np.clip(score / unit, -1, 1)))
            for one, score in zip(found.ids.tolist(), found.scores, strict=True)
            if one != query.id and np.isfinite(score) and str(one) in self._names
        ]
        return Answer(alone, learners, span.stop - span.start, hits[:k])


T = TypeVar("T")


class Desk:
    """The model works for one request at a time, searches and thumbnails for four."""

    def __init__(self, collection: Collection, limits: Limits) -> None:
        self.collection, self.limits = collection, limits
        self._encoding, self._searching, self._drawing = (CapacityLimiter(n) for n in (1, 4, 4))

    async def find(self, name: str) -> Query:
        found = await _threaded(self._searching, self.collection.find, name)
        if found is None and name.startswith(UPLOAD):
            raise Problem(404, "forgotten", "That picture is no longer remembered here. Send it again.")
        if found is None:
            raise Problem(404, "unknown_id", f"The collection has no image {name[:200]!r}.")
        return found

    async def encode(self, upload: UploadFile) -> Query:
        if self._encoding.statistics().tasks_waiting >= self.limits.waiting:
            raise Problem(503, "busy", "Many pictures are waiting for the model just now. Try again in a moment.")
        data = await upload.read()
        if len(data) > self.limits.upload_bytes:
            raise Problem(413, "too_large", too_large(self.limits.upload_bytes))
        try:
            return await _threaded(self._encoding, self.collection.upload, data)
        except DataError as error:
            raise refused_picture(error) from error

    async def search(
        self, asked: Query, k: int, learners: int | None, shortlist: int | None, each: bool
    ) -> list[Answer]:
        count = len(self.collection.groups)
        chosen = count if learners is None else learners
        if chosen > count:
            raise Problem(422, "invalid", f"The 'learners' parameter must lie between 1 and {count}. Got {chosen}.")
        if shortlist is not None and shortlist < k:
            raise Problem(422, "invalid", f"The 'shortlist' parameter must be at least k, {k}. Got {shortlist}.")
        return await _threaded(self._searching, self.collection.search, asked, k, chosen, shortlist, each)

    async def thumbnail(self, name: str, size: int) -> Response:
        try:
            made = await _threaded(self._drawing, self.collection.thumbnail, name, size)
        except DataError as error:
            raise Problem(410, "gone", "The file of this image cannot be read any more.") from error
        if made is None:
            raise Problem(404, "unknown_id", "The collection has no such image.")
        return Response(made.data, media_type=made.media_type)


async def _threaded(limiter: CapacityLimiter, work: Callable[..., T], *arguments: Any) -> T:
    return await anyio.to_thread.run_sync(partial(work, *arguments), limiter=limiter)
