"""Runs the work of requests in threads, so that the event loop stays free to answer others."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Response, UploadFile

from bier.errors import DataError
from bier.web.collection import UPLOAD, Answer, Collection, Query
from bier.web.guard import too_large
from bier.web.limits import Limits
from bier.web.problems import Problem, refused_picture

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
