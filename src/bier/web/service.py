"""The work behind requests: search and encoding in threads beside the event loop, decoding in processes."""

import os
import random
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import anyio.to_process
import anyio.to_thread
import numpy as np
from anyio import BrokenWorkerProcess, CapacityLimiter
from fastapi import UploadFile
from numpy.typing import NDArray

from bier.collection import Collection
from bier.errors import BierError, DataError
from bier.evaluate.thresholds import kept_threshold
from bier.files import is_url, name_text
from bier.search import Id
from bier.search.rerank import Match, search_one
from bier.search.store import spans
from bier.web.decoding import SIZES, Decoded, Refusal, Thumbnail, decode_upload, draw
from bier.web.guard import ApiError, Limits, too_large

UPLOAD = "upload:"
_THUMBNAILS = 64 * 2**20  # bytes
_PATIENCE = 5  # times the seconds of processor time that a picture may take; the machine may be busy

Floats = NDArray[np.float32]
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values used last, up to `most` bytes by `size`; the newest stays in any case. Safe in several threads.

    `functools.lru_cache` bounds the number of entries; this bounds their bytes.
    """

    def __init__(self, most: int, size: Callable[[V], int]) -> None:
        self._most, self._size, self._bytes = most, size, 0
        self._known: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def add(self, key: K, value: V) -> None:
        with self._lock:
            if key in self._known:
                return
            self._known[key] = value
            self._bytes += self._size(value)
            while self._bytes > self._most and len(self._known) > 1:
                self._bytes -= self._size(self._known.popitem(last=False)[1])


class Upload(NamedTuple):
    """A picture that was uploaded, as it is remembered: without its pixels."""

    vector: Floats
    thumbnails: dict[int, Thumbnail]

    @property
    def size(self) -> int:
        """In bytes, with a kilobyte for the objects themselves."""
        return 1024 + self.vector.nbytes + sum(len(one.data) for one in self.thumbnails.values())


class Query(NamedTuple):
    """A picture to search with, or several: `vector` is their mean, `others` are the further ones.

    `id` is set for an image of the collection, which must not find itself.
    """

    name: str
    vector: Floats
    id: Id | None = None
    label: str | None = None
    others: tuple["Query", ...] = ()


class Hit(NamedTuple):
    name: str
    label: str | None
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
    """Answers requests from a collection: encodes one upload at a time, and runs four searches at a time.

    Uploads and thumbnails are decoded in worker processes, two at a time of each. A file that takes too long, too much
    memory or crashes its decoder costs one worker, and nobody waits for it at the model.
    """

    def __init__(self, collection: Collection, limits: Limits, folders: Sequence[Path | str] | None = None) -> None:
        """`folders`: pictures of the collection are shown from below these alone; None: wherever they are."""
        self.collection, self.limits = collection, limits
        self._folders = None if folders is None else [_plain_path(folder) for folder in folders]
        self.store = collection.store
        self.groups = self.store.groups
        self.ids: Sequence[Id] = self.store.ids
        labels = (entry.label for entry in self.store.entries(self.ids))
        self.labels = [None if label is None else name_text(str(label)) for label in labels]
        self._row_of: dict[str, int] = {}  # by the name that the page uses
        self._name_of: dict[Id, str] = {}
        for row, one in enumerate(self.ids):
            name = name_text(str(one))
            while name in self._row_of:  # "1" and 1, or a name that looks like another one escaped
                name += "~"
            self._row_of[name], self._name_of[one] = row, name
        self._rows_of_label: dict[str, list[int]] = {}
        for row, label in enumerate(self.labels):
            if label is not None:
                self._rows_of_label.setdefault(label, []).append(row)
        self._thumbnails = Recent[tuple[str, int], Thumbnail](_THUMBNAILS, lambda made: len(made.data))
        self._uploads = Recent[str, Upload](limits.remembered, lambda upload: upload.size)
        self._encoding, self._searching = CapacityLimiter(1), CapacityLimiter(4)
        self._decoding, self._drawing, self._processes = CapacityLimiter(2), CapacityLimiter(2), CapacityLimiter(4)
        self._threads = ThreadPoolExecutor(4, "search")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def classes(self) -> int:
        return len(self._rows_of_label)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def take_over(self, other: "Service") -> None:
        """Remember the uploads of a service that this one replaces, if one model has encoded both collections."""
        ours, theirs = (one.store.about.get("model") for one in (self, other))
        if self.groups == other.groups and ours == theirs:
            self._uploads = other._uploads

    async def warm_up(self) -> None:
        """Encode one picture and start a worker, so that the first upload does not wait for either.

        A BierError where no worker can be started: such a server could show no picture.
        """
        white = np.full((64, 64, 3), 255, np.uint8)
        self.collection.model.encode([white], workers=0)
        try:
            made = await self._in_process(self._drawing, draw, white, None, 64)
            reason = "it ended or did not answer in time" if isinstance(made, str) else ""
        except ApiError as error:
            reason = str(error.__cause__)
        if reason:
            raise BierError(
                f"The server needs worker processes that decode pictures. One could not be started: {reason}; "
                "the memory or the number of processes may be limited."
            )

    def browse(self, count: int, seed: int, label: str = "") -> tuple[int, list[tuple[str, str | None]]]:
        """How many images have this text in their label, and some of them in an order that the seed fixes."""
        rows: Sequence[int] = range(len(self.ids))
        if label:
            wanted = label.casefold()
            rows = [row for name, some in self._rows_of_label.items() if wanted in name.casefold() for row in some]
        drawn = random.Random(seed).sample(rows, min(count, len(rows)))
        return len(rows), [(self._name_of[self.ids[row]], self.labels[row]) for row in drawn]

    async def find(self, names: Sequence[str]) -> Query:
        """The query of these names: ids of the collection as text, or recent uploads."""
        queries = []
        for name in dict.fromkeys(names):
            query = await _threaded(self._searching, self._find, name)
            if query is None and name.startswith(UPLOAD):
                raise ApiError(404, "forgotten", "That picture is no longer stored here. Send it again.")
            if query is None:
                raise ApiError(404, "unknown_id", f"The collection has no image {name[:200]!r}.")
            queries.append(query)
        first, *others = queries
        return first._replace(vector=self._mean([query.vector for query in queries]), others=tuple(others))

    def _mean(self, vectors: Sequence[Floats]) -> Floats:
        """The mean of vectors; each learner's part keeps the length that it has in all of them."""
        mean: Floats = np.mean(vectors, axis=0, dtype=np.float32)
        if len(vectors) > 1:
            for span in spans(self.groups):
                length = float(np.linalg.norm(mean[span]))
                mean[span] *= float(np.linalg.norm(vectors[0][span])) / length if length else 0.0
        return mean

    async def encode(self, upload: UploadFile) -> Query:
        """Encode an uploaded picture and remember it for a while."""
        if sum(one.statistics().tasks_waiting for one in (self._decoding, self._encoding)) >= self.limits.waiting:
            raise ApiError(503, "busy", "Many pictures are waiting to be encoded. Try again in a moment.")
        data = await upload.read()
        if len(data) > self.limits.upload_bytes:
            raise ApiError(413, "too_large", too_large(self.limits.upload_bytes))
        size = self.collection.model.backbone.resize
        decoded = await self._in_process(self._decoding, decode_upload, data, size, self.limits.upload_pixels)
        if isinstance(decoded, str):
            raise self._refused(decoded)
        return await _threaded(self._encoding, self._encode, decoded)

    async def search(
        self, query: Query, k: int, learners: int | None, each: bool, rerank: str | None = None
    ) -> list[ResultRow]:
        """The results of the first `learners` together and, with `each`, those of every learner alone.

        rerank: re-rank each row's nearest images by this method.
        """
        count = len(self.groups)
        chosen = count if learners is None else learners
        if chosen > count:
            raise ApiError(422, "invalid", f"The 'learners' parameter must lie between 1 and {count}. Got {chosen}.")
        return await _threaded(self._searching, self._search, query, k, chosen, each, rerank)

    async def thumbnail(self, name: str, size: int) -> Thumbnail:
        """The small picture of an id or an upload."""
        if (upload := self._uploads.get(name)) is not None:
            return upload.thumbnails[min(size, max(SIZES))]
        if name not in self._row_of:
            raise ApiError(404, "unknown_id", "The collection has no such image.")
        known = self._thumbnails.get((name, size))
        if known is not None:
            return known
        gone = ApiError(410, "gone", "The file of this image cannot be read any more.")
        try:
            source, box = await _threaded(self._searching, self.collection.picture, self.ids[self._row_of[name]])
        except DataError as error:
            raise gone from error
        if self._folders is not None and isinstance(source, Path | str):
            plain = _plain_path(source)
            source = plain if is_url(plain) else Path(plain)  # what is opened is what has been compared
            if not any(plain.startswith(os.path.join(folder, "")) for folder in self._folders):  # noqa: PTH118
                message = "The picture lies outside the collection's folder; bier serve --pictures FOLDER shows it."
                raise ApiError(403, "outside", message)
        made = await self._in_process(self._drawing, draw, source, box, size)
        if isinstance(made, str):
            raise gone
        if size in SIZES:
            self._thumbnails.add((name, size), made)
        return made

    async def _in_process(self, limiter: CapacityLimiter, work: Callable[..., T | Refusal], *given: Any) -> T | Refusal:
        """Run a function of `bier.web.decoding` in a worker process, which ends when it takes too long."""
        seconds = self.limits.decode_seconds
        async with limiter:
            try:
                # The worker counts its processor time; this ends one that waits, as for a file on a lost network drive.
                with anyio.fail_after(_PATIENCE * seconds):
                    job = partial(work, *given, seconds)
                    return await anyio.to_process.run_sync(job, cancellable=True, limiter=self._processes)
            except (TimeoutError, BrokenWorkerProcess):
                return "too_slow"
            except OSError as error:  # no process can be started
                raise ApiError(503, "busy", "No more pictures can be read now. Try again in a moment.") from error

    def _refused(self, why: Refusal) -> ApiError:
        if why == "too_many_pixels":
            most = self.limits.upload_pixels / 1e6
            return ApiError(413, why, f"The picture must have at most {most:.0f} megapixels.")
        if why == "not_a_picture":
            return ApiError(415, why, "This is not a picture in a known format such as JPEG, PNG or WebP.")
        if why == "too_slow":
            return ApiError(422, why, "The picture takes too long to decode. Save it again as a JPEG.")
        return ApiError(422, why, "The picture is broken: it could not be read completely.")

    def _find(self, name: str) -> Query | None:
        if (upload := self._uploads.get(name)) is not None:
            return Query(name, upload.vector)
        if name not in self._row_of:
            return None
        row = self._row_of[name]
        return Query(name, self.store.vectors([self.ids[row]])[0], self.ids[row], self.labels[row])

    def _encode(self, decoded: Decoded) -> Query:
        vector = self.collection.model.encode([decoded.square], workers=0)[0]
        name = UPLOAD + secrets.token_urlsafe(12)
        self._uploads.add(name, Upload(vector, decoded.thumbnails))
        return Query(name, vector)

    def _search(self, query: Query, k: int, learners: int, each: bool, rerank: str | None) -> list[ResultRow]:
        asked: list[tuple[bool, int]] = [(False, learners)]
        asked += [(True, number) for number in range(1, len(self.groups) + 1)] if each else []
        waiting = [self._threads.submit(self._row, query, k, alone, number, rerank) for alone, number in asked]
        return [one.result() for one in waiting]

    def _row(self, query: Query, k: int, alone: bool, learners: int, rerank: str | None) -> ResultRow:
        chosen = [learners] if alone else None if learners == len(self.groups) else learners
        own = {one.id for one in query.others if one.id is not None}
        wide = k + len(own)
        found = search_one(self.store, query.vector, wide, rerank=rerank, learners=chosen, without=query.id)
        matches = [match for match in found if match.id not in own][:k]
        threshold = kept_threshold(self.collection.model.metadata, learners, alone)
        hits = [self._hit(match, threshold) for match in matches if match.id in self._name_of]
        hits.sort(key=lambda hit: hit.same is False)  # re-ranking may put an image below the threshold first
        dimension = self.groups[learners - 1] if alone else sum(self.groups[:learners])
        return ResultRow(alone, learners, dimension, hits, threshold)

    def _hit(self, match: Match, threshold: float | None) -> Hit:
        same = None if threshold is None else match.similarity >= threshold
        name = self._name_of[match.id]
        return Hit(name, self.labels[self._row_of[name]], match.score, match.similarity, same)


def _plain_path(place: Path | str) -> str:
    """A path without "..", as text, so that links are followed; a URL as it is, or nothing where it has ".."."""
    if is_url(place):
        return str(place) if ".." not in str(place) else ""
    return os.path.abspath(place)  # noqa: PTH100


async def _threaded(limiter: CapacityLimiter, work: Callable[..., T], *arguments: Any) -> T:
    return await anyio.to_thread.run_sync(partial(work, *arguments), limiter=limiter)
