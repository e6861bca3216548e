"""`bier serve` and `bier try`: search a collection in a browser."""

import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from bier import files
from bier.cli.terminal import (
    Backbone,
    Fast,
    Json,
    Root,
    check_place,
    command,
    console,
    emit,
    follow_steps,
    model_or_backbone,
    progress_bar,
    say,
    step,
)
from bier.errors import ConfigError, needs

if TYPE_CHECKING:
    from fastapi import FastAPI

    from bier.collection import Collection
    from bier.models.model import Untrained
    from bier.search.sources import Progress
    from bier.web.guard import Access

_EVERY_ADDRESS = ("0.0.0.0", "::")
_LEAST_TOKEN = 8  # characters
PORT = 8000


RunPath = Annotated[Path | None, typer.Argument(metavar="RUN", help="A run, a model or an index.")]
DataName = Annotated[
    str | None,
    typer.Option("--data", metavar="NAME", help="Show this data set. \\[default: the data set of the run]"),
]
Images = Annotated[
    str | None, typer.Option("--images", metavar="PATH", help="Show the images of this folder or table.")
]
IndexFolder = Annotated[Path | None, typer.Option("--index", metavar="FOLDER", help="Show this index.")]
StoreUri = Annotated[str | None, typer.Option("--store", metavar="URI", help="Show this store.")]
Host = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="The address to listen on. 0.0.0.0 admits other machines, which need the token.",
    ),
]
Port = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="The port; 0 chooses a free one.")]
Pictures = Annotated[
    list[Path] | None,
    typer.Option("--pictures", metavar="FOLDER", help="Show an index's pictures in this folder too; may be repeated."),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="Accept this host name too, as behind a proxy; may be repeated."),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TEXT",
        envvar="BIER_TOKEN",
        help="Ask for this token. \\[default: a new one if other machines are admitted, else none]",
    ),
]


def serve(
    run: RunPath = None,
    backbone: Backbone = None,
    data: DataName = None,
    root: Root = None,
    images: Images = None,
    index: IndexFolder = None,
    store: StoreUri = None,
    pictures: Pictures = None,
    fast: Fast = False,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    allow_host: AllowedHosts = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show a page that finds the images nearest to one that you choose or upload, learner by learner.

    By default the page shows the test images of the run's data set. They are encoded once and kept below RUN/serve, so
    that the next start is quick. With --json, an object with the address is printed when the page is ready. Ctrl-C
    stops the server.

    Only this machine can open the page. With another --host, every request must have a token: it is part of the
    address that is printed, and programs send it as the header Authorization: Bearer TOKEN.

    [bold]Examples[/bold]

    bier serve runs/birds

    bier serve runs/birds --images photos --port 9000

    bier serve --backbone efficientnet_lite0 --images photos

    bier serve --store "postgresql://db.example/shop#birds"

    bier serve runs/birds --host 0.0.0.0
    """
    _check_packages()
    access = _access(host, allow_host or [], token)
    listening = _listen(host, port)
    with listening:
        with progress_bar() as bar:
            recorded = run is None and backbone is None and (store or index)  # a collection names its model
            used = None if recorded else model_or_backbone(run, backbone)
            target = _target(used, data, images, index, store)
            collection = _collection(used, data, root, images, target, follow_steps(bar), fast)
        for note in collection.notes:
            say(note)
        app = _application(used, collection, access, target, pictures or [])
        url = _address(host, listening)
        _run(app, listening, partial(_announce, collection, url, access, _is_loopback(host), json))


def try_photos(
    photos: Annotated[
        str,
        typer.Argument(
            metavar="PHOTOS", help="A folder of photographs, with or without one folder per class; or a table."
        ),
    ],
    backbone: Backbone = "efficientnet_lite0",
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="N", min=0, max=65535, help="The port. \\[default: 8000, or a free one]"),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address of the page.")] = False,
    json: Json = False,
) -> None:
    """Search in your photographs on a page in the browser, without any training.

    Photographs are compared by a pretrained network. Where they lie in one folder per class, the summary before the
    page says how often the nearest photograph is of the same class, and whether training may help. Vectors are kept in
    the cache folder of the system (or in the folder of the variable BIER_CACHE), so that the next start is quick;
    nothing is written among the photographs. Ctrl-C stops the server.

    [bold]Examples[/bold]

    bier try photos

    bier try photos --no-browser --port 9000
    """
    check_place(photos)
    _check_packages()
    access, host = _access("127.0.0.1", [], None), "127.0.0.1"
    with _listen_anywhere(host) if port is None else _listen(host, port) as listening:
        with progress_bar() as bar, step(bar, "starting"):
            from bier.collection import image_collection, summarise

            used = model_or_backbone(None, backbone)
            collection = image_collection(used, photos, follow_steps(bar))
            summary = summarise(collection, photos)
        for line in summary.lines():
            say(line)
        if summary.classes > 1:
            say(f"To train: {command('train', photos)}")
        app, url = _application(used, collection, access, None, []), _address(host, listening)

        def ready() -> None:
            _announce(collection, url, access, True, json, {"summary": summary.to_dict()})
            if console.is_terminal and not no_browser:
                _open_browser(url)

        _run(app, listening, ready)


def _check_packages() -> None:
    # Before numpy is imported: searches run in parallel already, and OpenBLAS's own threads would compete with them
    # (ten times slower on a busy machine).
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for package in ("fastapi", "uvicorn", "starlette", "anyio", "python_multipart"):
        needs(package, "serve")


def _listen_anywhere(host: str) -> socket.socket:
    """The usual port, or a free one where it is in use."""
    try:
        return _listen(host, PORT)
    except ConfigError:
        return _listen(host, 0)


def _address(host: str, listening: socket.socket) -> str:
    shown = "localhost" if host in _EVERY_ADDRESS else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listening.getsockname()[1]}"


def _open_browser(url: str) -> None:
    """In a thread, as some wait until the browser ends. Without a screen it would be one that takes the terminal."""
    if sys.platform in ("win32", "darwin") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _target(
    run: "Path | Untrained | None", data: str | None, images: str | None, index: Path | None, store: str | None
) -> str | None:
    """The index or the store that the options name, or that the run is or has; None where images are to be encoded."""
    from bier.collection import run_folder

    named = {"--data": data, "--images": images, "--index": index, "--store": store}
    chosen = [name for name, value in named.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"Give at most one collection to show. Got {' and '.join(chosen)} instead.")
    if store is not None or index is not None:
        return store or str(index)
    if chosen:
        return None
    if not isinstance(run, Path):
        raise ConfigError("--backbone has no data set of its own; say what to show with --data, --images or --index.")
    if (run / "config.toml").is_file():
        return None
    if not (run / "manifest.json").is_file() and not (run_folder(run) / "index").exists():
        raise ConfigError(
            f"{run} must be a run, an index, or a model together with --data, --images or --index. "
            f"Found {'no model' if not (run / 'model.json').is_file() else 'a model alone'}."
        )
    return str(run)


def _collection(
    run: "Path | Untrained | None",
    data: str | None,
    root: str | None,
    images: str | None,
    target: str | None,
    progress: "Progress",
    fast: bool,
) -> "Collection":
    """The collection that the options name; without any, the data set that the run was trained on."""
    from bier.collection import data_collection, image_collection
    from bier.evaluate.dataset import data_settings

    if fast and target is not None:
        raise ConfigError("--fast is for images that are encoded; a collection keeps the look that it was made with.")
    if target is not None:
        return _stored(run, target, progress)
    assert run is not None
    if images is not None:
        return image_collection(run, images, progress, fast)
    settings, own = data_settings(run, data, root)
    return data_collection(run, settings, own, progress, fast)


def _stored(run: "Path | Untrained | None", target: str, progress: "Progress | None" = None) -> "Collection":
    from bier.collection import stored_collection

    is_index = isinstance(run, Path) and (run / "manifest.json").is_file()
    return stored_collection(None if is_index else run, target, progress)


def _follow_index(run: "Path | Untrained | None", target: str) -> "Callable[[], Collection | None]":
    """Opens the index anew where another process has replaced it."""
    folder = next(one for one in (Path(target), Path(target) / "index") if (one / "manifest.json").is_file())
    before = files.stamp(folder / "manifest.json")

    def reopen() -> "Collection | None":
        nonlocal before
        now = files.stamp(folder / "manifest.json")
        if now in (before, (0, 0)):  # (0, 0): it is just being replaced
            return None
        collection, before = _stored(run, target), now
        return collection

    return reopen


def _listen(host: str, port: int) -> socket.socket:
    """Bind the port before anything else, so that a port in use is reported before minutes of encoding."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # a name that is too long for the encoding of host names is the latter
        reason = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise ConfigError(
            f"Cannot listen at {host} port {port}: {reason or error}. Choose another with --host or --port."
        ) from error


def _is_loopback(host: str) -> bool:
    from bier.web.guard import LOOPBACK

    return host in LOOPBACK or host.startswith("127.")


def _access(host: str, allowed: list[str], token: str | None) -> "Access":
    """Host names that requests may be addressed to, and the token: one is made where other machines are admitted."""
    from bier.web.guard import LOOPBACK, Access

    if token is not None and (len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable()):
        raise ConfigError(
            f"The '--token' option must be at least {_LEAST_TOKEN} printable ASCII characters. "
            f"Got {len(token)} characters instead."
        )
    if _is_loopback(host):
        return Access((*LOOPBACK, host, *allowed), token=token)
    own = socket.gethostname()
    names = (*LOOPBACK, host, own, f"{own}.local", *allowed)
    return Access(names, any_address=host in _EVERY_ADDRESS, token=token or secrets.token_urlsafe(18))


def _application(
    run: "Path | Untrained | None",
    collection: "Collection",
    access: "Access",
    target: str | None,
    pictures: list[Path],
) -> "FastAPI":
    from bier.collection import run_folder
    from bier.search import is_store_uri
    from bier.web.app import create_app

    report = run_folder(run) / "report" if isinstance(run, Path) else None
    folders = reopen = None
    if target is not None:  # others may have written what names the pictures
        folders = [collection.root or Path(), *pictures]
        reopen = None if is_store_uri(target) else _follow_index(run, target)
    version = secrets.token_hex(4)
    return create_app(collection, report=report, access=access, version=version, folders=folders, reopen=reopen)


def _announce(
    collection: "Collection",
    url: str,
    access: "Access",
    loopback: bool,
    as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Say where the page is."""
    if as_json:
        groups = list(collection.store.groups)
        said = {"url": url, "images": len(collection.store), "groups": groups, "title": collection.title}
        emit({**said, "token": access.token, **(more or {})})
    entrance = url if access.token is None else f"{url}/?{urlencode({'token': access.token})}"
    say(f"{len(collection.store):,} images at {entrance} (Ctrl-C stops)")
    if not loopback:
        say("Other machines can open this address. It has the token; the connection is not encrypted.")


def _run(app: "FastAPI", listening: socket.socket, ready: Callable[[], None]) -> None:
    from bier.system import return_memory
    from bier.web.server import create_server

    return_memory()  # encoding the collection has let the process keep what it frees
    try:
        create_server(app, ready=ready).run(sockets=[listening])
    except KeyboardInterrupt:
        say("Stopped. The same command starts it again.")
        sys.stderr.flush()
        raise typer.Exit(130) from None
