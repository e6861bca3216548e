"""The web server: a page, and the JSON API that it uses."""

import time
from collections.abc import AsyncIterator
from collections.abc import Collection as Names
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response, UploadFile
from fastapi.responses import FileResponse, RedirectResponse
from starlette.staticfiles import StaticFiles

from bier.images.decode import MAX_PIXELS
from bier.web import schema
from bier.web.guard import LOOPBACK, Guard, Limits, add_errors
from bier.web.service import Answer, Collection, Desk
from bier.web.service import Query as Asked

STATIC = Path(str(files("bier.web") / "static"))
_YEAR = "private, max-age=31536000, immutable"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Error} for status in (403, 404, 413, 415, 421, 422, 429, 503)
}


def create_app(
    collection: Collection,
    limits: Limits | None = None,
    report: Path | None = None,
    hosts: Names[str] | None = LOOPBACK,
    version: str = "0",
) -> FastAPI:
    """The application.

    Args:
        report: the folder of the run's report, shown below /report/ if it is there.
        hosts: names that the server answers for; None for any.
        version: a text that changes with every start, so that browsers keep no picture of another collection.
    """
    bounds = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        collection.close()

    # FastAPI's own pages of documentation load scripts from elsewhere; /openapi.json is there for any viewer.
    app = FastAPI(title="bier", docs_url=None, redoc_url=None, lifespan=lifespan, responses=_ERRORS)
    has_report = report is not None and (report / "index.html").is_file()
    _add_api(app, Desk(collection, bounds), bounds, _status(collection, bounds, has_report, version))
    add_errors(app)
    if has_report and report is not None:
        app.mount("/report", StaticFiles(directory=report, html=True))
        app.add_api_route("/report", lambda: RedirectResponse("/report/"), include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_api_route("/", lambda: FileResponse(STATIC / "index.html"), include_in_schema=False)
    app.add_middleware(Guard, hosts=hosts, limits=bounds)
    return app


def _add_api(app: FastAPI, desk: Desk, limits: Limits, status: schema.Status) -> None:
    count = Annotated[int, Query(ge=1, le=limits.results, description="Results in a row.")]
    first = Annotated[int | None, Query(ge=1, description="Use the first so many learners. All by default.")]
    funnel = Annotated[
        int | None, Query(ge=1, le=limits.shortlist, description="Funnel: the first learner names so many.")
    ]
    wanted = Annotated[
        Literal["all", "ensemble"], Query(description="'all': a row of every learner beneath the ensemble's.")
    ]

    @app.get("/api/status")
    async def read_status() -> schema.Status:
        """The collection: its size, its learners, and how well each beginning of the ensemble does."""
        return status

    @app.get("/api/browse")
    async def browse(
        count: Annotated[int, Query(ge=1, le=limits.browsed)] = 24,
        seed: Annotated[int, Query(ge=0, le=2**31, description="Another seed shows other images.")] = 0,
        label: Annotated[str, Query(max_length=200, description="Only labels with this text in them.")] = "",
    ) -> schema.Browsed:
        """Some images of the collection, to pick one from."""
        matching, some = desk.collection.browse(count, seed, label)
        return schema.Browsed(matching=matching, images=[_thing(one, name) for one, name in some])

    @app.get("/api/image/{name:path}", response_class=Response)
    async def image(name: str, size: Literal["256", "640"] = "256", v: str = "") -> Response:
        """A small picture of an image of the collection, or of an upload."""
        response = await desk.thumbnail(name, int(size))
        response.headers["cache-control"] = _YEAR if v else "no-cache"
        return response

    @app.get("/api/search")
    async def search_by_id(
        id: Annotated[str, Query(max_length=4096)],  # noqa: A002 - the name that clients write
        k: count = 10,
        learners: first = None,
        shortlist: funnel = None,
        rows: wanted = "all",
    ) -> schema.Answer:
        """The images nearest to one of the collection, or to an earlier upload by the id it was given."""
        asked = await desk.find(id)
        return await _searched(desk, asked, 0.0, k, learners, shortlist, rows == "all")

    @app.post("/api/search")
    async def search_by_image(
        image: UploadFile,
        k: count = 10,
        learners: first = None,
        shortlist: funnel = None,
        rows: wanted = "all",
    ) -> schema.Answer:
        """The images nearest to a picture that is sent along; its id can be searched for again for a while."""
        started = time.perf_counter()
        asked = await desk.encode(image)
        return await _searched(desk, asked, time.perf_counter() - started, k, learners, shortlist, rows == "all")


async def _searched(
    desk: Desk, asked: Asked, encoding: float, k: int, learners: int | None, shortlist: int | None, each: bool
) -> schema.Answer:
    started = time.perf_counter()
    answers = await desk.search(asked, k, learners, shortlist, each)
    seconds = {"encode": encoding, "search": time.perf_counter() - started}
    return schema.Answer(
        query=_thing(asked.name, asked.label),
        rows=[_row(answer, asked) for answer in answers],
        milliseconds={name: round(1e3 * value, 2) for name, value in seconds.items()},
    )


def _thing(one: object, label: object) -> schema.Thing:
    return schema.Thing(id=str(one), label=None if label is None else str(label))


def _row(answer: Answer, asked: Asked) -> schema.Row:
    hits = [
        schema.Hit(
            id=str(hit.id),
            label=None if hit.label is None else str(hit.label),
            score=hit.score,
            similarity=hit.similarity,
            right=None if hit.label is None or asked.label is None else str(hit.label) == str(asked.label),
        )
        for hit in answer.hits
    ]
    learners = [answer.learners] if answer.alone else list(range(1, answer.learners + 1))
    name = f"learner-{answer.learners}" if answer.alone else "ensemble"
    return schema.Row(name=name, learners=learners, dimension=answer.dimension, results=hits)


def _status(collection: Collection, limits: Limits, report: bool, version: str) -> schema.Status:
    groups, known = collection.groups, collection.quality
    prefixes, learners = (known["prefixes"], known["learners"]) if known else ([None] * len(groups),) * 2
    ends = [sum(groups[: m + 1]) for m in range(len(groups))]
    return schema.Status(
        title=collection.title,
        images=len(collection),
        classes=collection.classes,
        groups=list(groups),
        dimension=ends[-1],
        prefixes=[
            schema.Prefix(learners=m + 1, dimension=end, bytes=4 * end, recall=prefixes[m])
            for m, end in enumerate(ends)
        ],
        learners=[schema.Learner(learner=m + 1, dimension=size, recall=learners[m]) for m, size in enumerate(groups)],
        queries=known["queries"] if known else None,
        backbone=collection.model.backbone.name,
        upload=schema.UploadLimits(bytes=limits.upload_bytes, pixels=MAX_PIXELS),
        report=report,
        version=version,
    )
