"""`bier index`: vectors or a folder of images in, a collection to search out."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from bier.cli.terminal import (
    Backbone,
    Backend,
    Fast,
    Json,
    MoreImages,
    SkipBroken,
    command,
    emit,
    follow_steps,
    model_and_images,
    progress_bar,
    say,
    say_skipped,
)
from bier.errors import SearchError

if TYPE_CHECKING:
    from bier.search.sources import Progress, Source

_Arguments: TypeAlias = tuple[str, str | None, str | None, Any, bool, bool]  # what `_source` reads

SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A file of `bier embed`; or a run or a model that encodes images; with --backbone the images.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Write an index to this folder.")]
StoreUri = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URI",
        help="Load into an engine: postgresql://HOST/DATABASE, qdrant:FOLDER, qdrant:http://HOST:PORT, "
        "milvus:NAME.db or milvus:http://HOST:PORT; #NAME chooses the collection.",
    ),
]
Add = Annotated[
    str | None,
    typer.Option("--add", metavar="COLLECTION", help="Add what is new or has changed to an index or a store's URI."),
]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="With --store: empty the collection first.")]
Prune = Annotated[
    bool,
    typer.Option("--prune", help="With --add and --store: remove images from the collection whose files are gone."),
]


def index(
    source: SourcePath,
    images: MoreImages = None,
    out: Out = None,
    store: StoreUri = None,
    add: Add = None,
    backbone: Backbone = None,
    backend: Backend = "torch",
    rebuild: Rebuild = False,
    prune: Prune = False,
    fast: Fast = False,
    skip_broken: SkipBroken = False,
    json: Json = False,
) -> None:
    """Create a collection for `bier search` and `bier serve`.

    With --backbone no training is needed: images are compared by the plain features of a pretrained network.

    An index that exists at --out is replaced in one step. With --add and --store, images are encoded that are new or
    have changed since (by size, time and content of their files); loading into a store continues where it stopped.
    A collection remembers with which look it was made (--fast), and queries are encoded with the same.
    Images of the collection's folder keep the ids that they have there, whichever folder inside it is named.
    The password of a database is better given by the variable
    PGPASSWORD or a password file than in the URI.

    [bold]Examples[/bold]

    bier index vectors.safetensors --out birds.index

    bier index runs/birds photos --out runs/birds/index

    bier index photos --backbone efficientnet_lite0 --out shop.index

    bier index runs/birds photos --add runs/birds/index --prune

    bier index vectors.safetensors --store "postgresql://db.example/shop#birds"

    bier index vectors.safetensors --store qdrant:birds-qdrant

    bier index vectors.safetensors --store "milvus:http://milvus.example:19530#birds"
    """
    if sum(option is not None for option in (out, store, add)) != 1:
        raise SearchError("Give one of --out FOLDER, --store URI and --add COLLECTION.")
    if prune and out is not None:
        raise SearchError("--prune removes images from a collection; give --add or --store with it.")
    start = time.perf_counter()
    with progress_bar() as bar:
        arguments = (source, images, backbone, backend, fast, skip_broken)
        if out is not None:
            result = _created(out, arguments, follow_steps(bar))
        else:
            result = _added(store, add, arguments, rebuild, prune, follow_steps(bar))
    result["seconds"] = round(time.perf_counter() - start, 3)
    if json:
        emit(result)
        return

    say_skipped(result["skipped"])
    where, seconds = out or result["collection"], f"{result['seconds']:.1f} s"
    if out is not None:
        say(f"{result['images']:,} images in {where} ({result['method']}, {seconds})")
        say(f"Next: {command('search', out, 'IMAGE.jpg')}")
        return
    for note in _notes(result, prune):
        say(note)
    counts = ", ".join(f"{result[name]:,} {name}" for name in ("new", "changed", "gone", "unchanged"))
    say(f"{result['images']:,} images in {where} ({counts}; {seconds})")


def _created(out: Path, arguments: "_Arguments", progress: "Progress") -> dict[str, Any]:
    from bier.search.files import locked
    from bier.search.sources import build_index

    with locked(out):  # before anything is encoded
        source = _source(*arguments, progress)
        made = build_index(source, progress)
        made.save_locked(out)
    result = {"index": str(out), "images": len(made), "method": made.method}
    return result | _described(source)


def _added(
    store: str | None, add: str | None, arguments: "_Arguments", rebuild: bool, prune: bool, progress: "Progress"
) -> dict[str, Any]:
    from bier.collection import changing
    from bier.search.store import without_secrets

    target = store or add
    assert target is not None
    skip_broken = arguments[-1]
    arguments = (*arguments[:-1], False)  # only what is new or has changed is read
    if store is None:
        with changing(target) as collection:
            source = _source(*arguments, progress)
            changes, images = collection.add(source, prune, skip_broken, progress), len(collection.store)
    else:
        source = _source(*arguments, progress)
        with changing(store, source, rebuild) as collection:
            changes, images = collection.add(source, prune, skip_broken, progress), len(collection.store)
    return {"collection": without_secrets(target), "images": images} | changes._asdict() | _described(source)


def _described(source: "Source") -> dict[str, Any]:
    skipped = [one.named() for one in getattr(source, "skipped", ())]
    return {"dimension": sum(source.groups), "groups": list(source.groups), "skipped": skipped}


def _notes(result: dict[str, Any], prune: bool) -> Iterator[str]:
    if result["moved"]:
        yield f"the folder of the collection has moved, it was {result['moved']}"
    if result["outside"]:
        yield f"{result['outside']:,} images lie outside of the folder of the collection; their ids are whole paths"
    if result["gone"]:
        yield f"{result['gone']:,} images are gone" + (", removed" if prune else "; --prune removes them")


def _source(
    source: str,
    images: str | None,
    backbone: str | None,
    backend: Any,
    fast: bool,
    skip_broken: bool,
    progress: "Progress",
) -> "Source":
    if backbone is None and (Path(source).is_file() or source.endswith(".safetensors")):
        if fast:
            raise SearchError(f"--fast is for images that are encoded. {source} has vectors; give it to bier embed.")
        from bier.search.sources import StoredSource

        return StoredSource.read(Path(source))
    from bier.collection import ImageSource
    from bier.data import list_images

    if backbone is None and images is None:
        raise SearchError(
            f"{source} must be a file of `bier embed`, a model followed by images, or images with --backbone."
        )
    model, listed = model_and_images(source, images, backbone)
    options: dict[str, Any] = {"backend": backend, "fast": fast, "skip_broken": skip_broken}
    return ImageSource(model, list_images(listed), **options, progress=progress)
