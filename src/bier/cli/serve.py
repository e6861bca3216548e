"""`bier serve`: look into a collection with a browser."""

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bier.cli.terminal import Json, Root, emit, progress_bar, say
from bier.errors import ConfigError, needs

if TYPE_CHECKING:
    from fastapi import FastAPI

    from bier.web.service import Collection

_LAST_ANSWERS = 3  # seconds that requests under way get when the server is told to stop


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run or a model.")],
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME", help="Show this data set. \\[default: the one of the run]")
    ] = None,
    root: Root = None,
    images: Annotated[Path | None, typer.Option("--images", metavar="FOLDER", help="Show these images.")] = None,
    index: Annotated[Path | None, typer.Option("--index", metavar="FOLDER", help="Show what this index has.")] = None,
    store: Annotated[str | None, typer.Option("--store", metavar="URI", help="Show what this store has.")] = None,
    host: Annotated[
        str, typer.Option("--host", help="Where to listen. 0.0.0.0 lets other machines in; there is no password.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any that is free.")] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Answer for this name too, as behind a proxy; repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Show a page that finds the nearest images to one you pick or drop, learner by learner.

    The test images of the run's data set are encoded once and kept below RUN/serve, so that the next start is quick.
    With --json, one object that says where the page is comes when it is ready. Ctrl-C stops the server.

    [bold]Examples[/bold]

    bier serve runs/birds

    bier serve runs/birds --images photos --port 9000

    bier serve runs/birds --store milvus:http://milvus.example:19530
    """
    # Before numpy is imported: searches already run side by side, and OpenBLAS's own threads spin in each other's way
    # (ten times slower on a busy machine).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for module in ("fastapi", "uvicorn", "python_multipart"):
        needs(module, "serve")
    from bier.cli.gallery import open_gallery

    listening = _listen(host, port)
    with listening:
        with progress_bar() as bar:
            collection = open_gallery(run, data, root, images, index, store, bar)
        app = _application(run, collection, host, allow_host or [])
        shown = "localhost" if host in ("0.0.0.0", "::") else host
        url = f"http://{f'[{shown}]' if ':' in shown else shown}:{listening.getsockname()[1]}"
        if json:
            emit({"url": url, "images": len(collection), "groups": list(collection.groups), "title": collection.title})
        say(f"{len(collection):,} images at {url} (Ctrl-C stops)")
        if not _is_loopback(host):
            say("Anyone who can reach this machine can search here and send pictures; there is no password.")
        _run(app, listening)


def _listen(host: str, port: int) -> socket.socket:
    """Take the port first: to learn that it is taken only after minutes of encoding would be a pity."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen at {host} port {port}: {error.strerror or error}. Choose another with --host or --port."
        ) from error


def _is_loopback(host: str) -> bool:
    from bier.web.guard import LOOPBACK

    return host in LOOPBACK or host.startswith("127.")


def _application(run: Path, collection: "Collection", host: str, allowed: list[str]) -> "FastAPI":
    from bier.web.app import create_app
    from bier.web.guard import LOOPBACK

    collection.warm_up()
    folder = run.parent if run.name == "model" else run
    names = {*LOOPBACK, host, *(name.lower() for name in allowed)} if _is_loopback(host) or allowed else None
    return create_app(collection, report=folder / "report", hosts=names, version=secrets.token_hex(4))


def _run(app: "FastAPI", listening: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # or anyone could say to be someone else, and have a rate limit of one's own
        timeout_graceful_shutdown=_LAST_ANSWERS,
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        say("Stopped. The same command starts it again.")
        sys.stderr.flush()
        raise typer.Exit(130) from None
