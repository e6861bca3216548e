"""`bier index`: vectors or a folder of images in, a collection to search out."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import Backbone, Backend, Json, command, emit, follow_steps, model_and_images, progress_bar, say
from bier.errors import SearchError

if TYPE_CHECKING:
    from bier.search.sources import Source


SourcePath = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A file of `bier embed`; or a run or a model that encodes images; with --backbone the images.",
    ),
]
Images = Annotated[
    Path | None,
    typer.Argument(metavar="IMAGES", help="With a model: a folder of images, or a table (CSV or Parquet) of them."),
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
    typer.Option("--add", metavar="COLLECTION", help="Add to an index or a store's URI what it does not have yet."),
]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="With --store: empty the collection first.")]


def index(
    source: SourcePath,
    images: Images = None,
    out: Out = None,
    store: StoreUri = None,
    add: Add = None,
    backbone: Backbone = None,
    backend: Backend = "torch",
    rebuild: Rebuild = False,
    json: Json = False,
) -> None:
    """Create a collection for `bier search` and `bier serve`.

    With --backbone no training is needed: images are compared by the plain features of a pretrained network.

    An index that exists at --out is replaced in one step. Loading into a store continues where it stopped: images
    that are already there are not encoded again. The password of a database is better given by the variable
    PGPASSWORD or a password file than in the URI.

    [bold]Examples[/bold]

    bier index vectors.safetensors --out birds.index

    bier index runs/birds photos --out runs/birds/index

    bier index photos --backbone efficientnet_lite0 --out shop.index

    bier index runs/birds more-photos --add runs/birds/index

    bier index vectors.safetensors --store "postgresql://db.example/shop#birds"

    bier index vectors.safetensors --store qdrant:birds-qdrant

    bier index vectors.safetensors --store "milvus:http://milvus.example:19530#birds"
    """
    if sum(option is not None for option in (out, store, add)) != 1:
        raise SearchError("Give one of --out FOLDER, --store URI and --add COLLECTION.")
    from bier.search.sources import build_index
    from bier.search.store import without_secrets

    start = time.perf_counter()
    with progress_bar() as bar:
        progress = follow_steps(bar)
        given = _source(source, images, backbone, backend)
        result: dict[str, Any]
        if out is not None:
            made = build_index(given, progress)
            made.save(out)
            result = {"index": str(out), "images": len(made), "method": made.method}
        elif store is not None:
            from bier.collection import fill_store

            total, added = fill_store(given, store, rebuild, progress)
            method = store.partition(":")[0]
            result = {"store": without_secrets(store), "images": total, "added": added, "method": method}
        else:
            assert add is not None
            from bier.collection import add_to_collection

            total, added = add_to_collection(given, add, progress)
            result = {"collection": without_secrets(add), "images": total, "added": added, "method": "add"}
    result |= {"dimension": sum(given.groups), "groups": list(given.groups)}
    result["seconds"] = round(time.perf_counter() - start, 3)
    if json:
        emit(result)
    else:
        where = out or without_secrets(store or add or "")
        say(f"{result['images']:,} images in {where} ({result['method']}, {result['seconds']:.1f} s)")
        if out is not None:
            say(f"Next: {command('search', out, 'IMAGE.jpg')}")


def _source(source: Path, images: Path | None, backbone: str | None, backend: Any) -> "Source":
    if backbone is None and (source.is_file() or source.suffix == ".safetensors"):
        from bier.search.sources import StoredSource

        return StoredSource.read(source)
    from bier.collection import ImageSource
    from bier.data import list_images

    if backbone is not None:
        model, listed = model_and_images(source, images, backbone)
        return ImageSource(model, list_images(listed), backend=backend)
    if images is None:
        raise SearchError(
            f"{source} must be a file of `bier embed`, a model followed by images, or images with --backbone."
        )
    return ImageSource(source, list_images(images), backend=backend)
