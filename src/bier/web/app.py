"""The web server: the page, and the JSON API that it uses."""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Response, UploadFile
from fastapi import Query as QueryParameter
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.routing import APIRoute
from pydantic import StringConstraints
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles

import bier
from bier.collection import Collection
from bier.errors import BierError
from bier.web import schema
from bier.web.decoding import FULL
from bier.web.guard import Access, Guard, Limits, add_error_handlers
from bier.web.service import Query, ResultRow, Service

STATIC = Path(str(files("bier.web") / "static"))
_LOOK_SECONDS = 2.0  # between looks whether the collection was replaced
_Id = Annotated[str, StringConstraints(max_length=4096)]
_YEAR = "private, max-age=31536000, immutable"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Error} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 503)
}


class _AnyText(PathConvertor):
    """A path of an image, which may have line breaks in it; Starlette's `path` stops at the first one."""

    regex = "(?s:.*)"


register_url_convertor("text", _AnyText())


class _OneFileRequest(Request):
    """A form with more than one file is refused: each of up to 1,000 could take a temporary file."""

    def form(self, **_: Any) -> Any:
        return super().form(max_files=1, max_fields=8)


class _OneFileRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            return await handle(_OneFileRequest(request.scope, request.receive))

        return limited


def create_app(
    collection: Collection,
    limits: Limits | None = None,
    report: Path | None = None,
    access: Access | None = None,
    version: str = "0",
    folders: Sequence[Path | str] | None = None,
    reopen: Callable[[], Collection | None] | None = None,
) -> FastAPI:
    """The application.

    Args:
        report: the folder of the run's report, shown below /report/ if it is there.
        access: the host names and the token that requests must have; by default this machine alone, without a token.
        version: a text that changes with every start, so that browsers do not show cached pictures of another
            collection.
        folders: pictures of the collection are shown from below these folders and URLs alone, or from anywhere.
        reopen: returns the collection anew where it was replaced since, and None where it was not.
    """
    bounds = limits or Limits()
    has_report = report is not None and (report / "index.html").is_file()
    service = Service(collection, bounds, folders)
    shown = _Shown(service, _status(service, bounds, has_report, version))

    async def follow(look: Callable[[], Collection | None]) -> None:
        told = ""
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            try:
                replaced = await anyio.to_thread.run_sync(look)
                if replaced is not None:
                    newer = await anyio.to_thread.run_sync(Service, replaced, bounds, folders)
                    newer.take_over(shown.service)
                    status = _status(newer, bounds, has_report, secrets.token_hex(4))
                    shown.service, shown.status, told = newer, status, ""
            except BierError as error:
                if str(error) != told:
                    told = str(error)
                    logging.getLogger("uvicorn.error").error("The collection was replaced: %s", " ".join(told.split()))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            if reopen is not None:
                tasks.start_soon(follow, reopen)
            yield
            tasks.cancel_scope.cancel()
        shown.service.close()

    # FastAPI's own documentation pages load scripts from other servers; /openapi.json works with any viewer.
    app = FastAPI(
        title="bier",
        version=bier.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=_ERRORS,
    )
    app.router.route_class = _OneFileRoute
    app.state.warm_up = service.warm_up  # for `create_server`, which can report an error in one line
    _add_api(app, shown, bounds)
    add_error_handlers(app)
    if has_report and report is not None:
        app.mount("/report", StaticFiles(directory=report, html=True))
        app.add_api_route("/report", lambda: RedirectResponse("/report/"), include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_api_route("/", lambda: FileResponse(STATIC / "index.html"), include_in_schema=False)
    app.add_middleware(GZipMiddleware)
    # Added last, so that it comes first and sees every response.
    app.add_middleware(Guard, limits=bounds, access=access or Access())
    return app


@dataclass
class _Shown:
    """What requests are answered from; it is exchanged where the collection is replaced."""

    service: Service
    status: schema.Status


def _add_api(app: FastAPI, shown: _Shown, limits: Limits) -> None:
    count = Annotated[int, QueryParameter(ge=1, le=limits.results, description="Results per row.")]
    first = Annotated[
        int | None, QueryParameter(ge=1, description="Use this many learners, the first ones. All by default.")
    ]
    second_look = Annotated[
        Literal["alpha-qe", "dba", "k-reciprocal"] | None,
        QueryParameter(description="Re-rank the nearest images (100) by this method."),
    ]
    wanted = Annotated[
        Literal["all", "ensemble"], QueryParameter(description="'all': the ensemble and each learner alone.")
    ]

    @app.get("/api/status")
    async def read_status() -> schema.Status:
        """The collection: its size, its learners, and the recall of each learner and of each prefix of the ensemble."""
        return shown.status

    @app.get("/api/browse")
    async def browse(
        count: Annotated[int, QueryParameter(ge=1, le=limits.browsed)] = 24,
        seed: Annotated[int, QueryParameter(ge=0, le=2**31, description="Chooses the images.")] = 0,
        label: Annotated[str, QueryParameter(max_length=200, description="Only labels with this text in them.")] = "",
    ) -> schema.Browsed:
        """Some images of the collection, to choose one from."""
        matching, some = shown.service.browse(count, seed, label)
        return schema.Browsed(matching=matching, images=[schema.ImageRef(id=one, label=name) for one, name in some])

    @app.get("/api/image/{name:text}", response_class=Response)
    async def image(name: str, size: Literal["256", "640", "full"] = "256", v: str = "") -> Response:
        """A small picture of an image of the collection, or of an upload; "full": of up to 4,096 pixels."""
        made = await shown.service.thumbnail(name, FULL if size == "full" else int(size))
        return Response(made.data, media_type=made.media_type, headers={"cache-control": _YEAR if v else "no-cache"})

    @app.get("/api/search")
    async def search_by_id(
        id: Annotated[list[_Id], QueryParameter(min_length=1, max_length=8)],  # noqa: A002 - the name that clients write
        k: count = 10,
        learners: first = None,
        rows: wanted = "all",
        rerank: second_look = None,
    ) -> schema.Answer:
        """The images nearest to one of the collection, or to an earlier upload, by its id; to the mean of several."""
        service = shown.service
        query = await service.find(id)
        return await _searched(service, query, 0.0, k, learners, rows == "all", rerank)

    @app.post("/api/search")
    async def search_by_image(
        image: UploadFile,
        k: count = 10,
        learners: first = None,
        rows: wanted = "all",
        rerank: second_look = None,
    ) -> schema.Answer:
        """The images nearest to an uploaded picture; its id can be searched for again for a while."""
        started, service = time.perf_counter(), shown.service
        query = await service.encode(image)
        encoding = time.perf_counter() - started
        return await _searched(service, query, encoding, k, learners, rows == "all", rerank)


async def _searched(
    service: Service,
    query: Query,
    encoding: float,
    k: int,
    learners: int | None,
    each: bool,
    rerank: str | None,
) -> schema.Answer:
    started = time.perf_counter()
    rows = await service.search(query, k, learners, each, rerank)
    seconds = {"encode": encoding, "search": time.perf_counter() - started}
    return schema.Answer(
        query=schema.ImageRef(id=query.name, label=query.label),
        others=[schema.ImageRef(id=one.name, label=one.label) for one in query.others],
        rows=[_row(row, query) for row in rows],
        milliseconds={name: round(1e3 * value, 2) for name, value in seconds.items()},
    )


def _row(row: ResultRow, query: Query) -> schema.Row:
    hits = [
        schema.Hit(
            id=hit.name,
            label=hit.label,
            score=hit.score,
            similarity=hit.similarity,
            same=hit.same,
            right=None if hit.label is None or query.label is None else hit.label == query.label,
        )
        for hit in row.hits
    ]
    learners = [row.learners] if row.alone else list(range(1, row.learners + 1))
    name = f"learner-{row.learners}" if row.alone else "ensemble"
    return schema.Row(name=name, learners=learners, dimension=row.dimension, threshold=row.threshold, results=hits)


def _status(service: Service, limits: Limits, report: bool, version: str) -> schema.Status:
    collection, groups = service.collection, service.groups
    # Of images whose classes may have been trained on, recall would promise too much.
    known = collection.recall if collection.recall and collection.recall.get("on") else None
    prefixes, learners = (known["prefixes"], known["learners"]) if known else ([None] * len(groups),) * 2
    ends = [sum(groups[: m + 1]) for m in range(len(groups))]
    return schema.Status(
        title=collection.title,
        images=len(service),
        classes=service.classes,
        groups=list(groups),
        dimension=ends[-1],
        prefixes=[
            schema.Prefix(learners=m + 1, dimension=end, bytes=4 * end, recall=prefixes[m])
            for m, end in enumerate(ends)
        ],
        learners=[schema.Learner(learner=m + 1, dimension=size, recall=learners[m]) for m, size in enumerate(groups)],
        queries=known["queries"] if known else None,
        measured_on=known["on"] if known else None,
        backbone=collection.model.backbone.name,
        upload=schema.UploadLimits(bytes=limits.upload_bytes, pixels=limits.upload_pixels),
        report=report,
        version=version,
    )
