"""`bier index`: vectors or a folder of images in, a collection to search out."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from bier.cli.collection import about_model, find_images
from bier.cli.terminal import Json, emit, progress_bar, say
from bier.errors import SearchError

if TYPE_CHECKING:
    from bier.search import Id, Label
    from bier.search.store import Floats
    from bier.search.vectors import Progress

_BATCH = 4_096  # images that are encoded and stored before the next; what an interruption may cost


class _Source(NamedTuple):
    """Images to be stored: what is known of each, and how to get the vectors of some of them."""

    ids: Sequence["Id"]
    labels: Sequence["Label"] | None
    groups: tuple[int, ...]
    about: Mapping[str, Any]
    vectors: Callable[[Sequence[int], "Progress"], "Floats"]


def register(app: typer.Typer) -> None:
    app.command("index")(index)


def index(
    source: Annotated[Path, typer.Argument(help="A file of `bier embed`, or a model or run to encode images with.")],
    images: Annotated[Path | None, typer.Argument(help="With a model: the folder of images to encode.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Write an index to this folder.")] = None,
    store: Annotated[
        str | None, typer.Option("--store", metavar="URI", help="Load into milvus:NAME.db or milvus:http://HOST:PORT.")
    ] = None,
    kind: Annotated[
        Literal["auto", "flat", "hnsw", "funnel"],
        typer.Option("--kind", help="auto: exact up to 20,000 images, a graph beyond. funnel: small graph, shortlist."),
    ] = "auto",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="With --store: empty the collection first.")] = False,
    json: Json = False,
) -> None:
    """Make a collection that `bier search` and `bier serve` answer from.

    An index that is already at --out is replaced in one step. Loading into a store goes on where it stopped: images
    that are there are passed over.

    [bold]Examples[/bold]

    bier index vectors.safetensors --out birds.index

    bier index runs/birds photos --out runs/birds/index

    bier index vectors.safetensors --store milvus:birds.db

    bier index vectors.safetensors --store "milvus:http://milvus.example:19530#birds"
    """
    if (out is None) == (store is None):
        raise SearchError("Give either --out FOLDER or --store URI, not both and not neither.")
    start = time.perf_counter()
    given = _from_file(source) if source.is_file() or source.suffix == ".safetensors" else _from_model(source, images)
    if out is not None:
        result = _to_folder(given, out, kind)
    else:
        assert store is not None
        result = _to_store(given, store, rebuild)
    result |= {"dimension": sum(given.groups), "groups": list(given.groups)}
    result["seconds"] = round(time.perf_counter() - start, 3)
    if json:
        emit(result)
    else:
        say(f"{result['images']:,} images in {out or store} ({result['method']}, {result['seconds']:.1f} s)")


def _from_file(file: Path) -> _Source:
    from bier.search import read_embeddings

    known = read_embeddings(file)
    about = {"model": known.model, "root": known.root}
    return _Source(known.paths, known.labels, known.groups, about, lambda rows, _: known.vectors[list(rows)])


def _from_model(path: Path, images: Path | None) -> _Source:
    if images is None:
        raise SearchError(f"{path} must be a file of `bier embed`, or a model followed by a folder of images.")
    paths, labels = find_images(images)
    about = {"model": about_model(path), "root": str(images.resolve())}
    from bier.models.model import load

    model = load(path)

    def encoded(rows: Sequence[int], progress: "Progress") -> "Floats":
        return model.encode([images / paths[row] for row in rows], progress=progress)

    return _Source(paths, labels if any(labels) else None, tuple(model.groups), about, encoded)


def _batches(count: int) -> Iterator[range]:
    return (range(start, min(start + _BATCH, count)) for start in range(0, count, _BATCH))


def _to_folder(given: _Source, out: Path, kind: Literal["auto", "flat", "hnsw", "funnel"]) -> dict[str, Any]:
    from bier.search import Index

    count = len(given.ids)
    with progress_bar() as bar:
        task = bar.add_task("vectors", total=count, status="")
        vectors = given.vectors(range(count), lambda done, _: bar.update(task, completed=done))
        linking = bar.add_task("index", total=count, status="")
        made = Index.build(
            vectors,
            list(given.ids),
            given.groups,
            given.labels,
            kind=kind,
            about=given.about,
            progress=lambda done, _: bar.update(linking, completed=done),
        )
        made.save(out)
    return {"index": str(out), "images": len(made), "method": made.method}


def _to_store(given: _Source, uri: str, rebuild: bool) -> dict[str, Any]:
    from bier.search import is_store_uri, open_store
    from bier.search.milvus import MilvusStore

    if not is_store_uri(uri):
        raise SearchError(
            f"The '--store' option must be milvus:NAME.db or milvus:http://HOST:PORT. Got {uri!r} instead."
        )
    store = open_store(uri, given.groups, given.about)
    assert isinstance(store, MilvusStore)
    if rebuild:
        store.drop()
        store.close()
        store = MilvusStore(uri, given.groups, given.about)
    theirs, ours = (about.get("model", {}).get("fingerprint") for about in (store.about, given.about))
    if theirs != ours:
        store.close()
        raise SearchError(
            f"The store {uri} must hold vectors of one model. It holds another's; empty it with --rebuild."
        )
    added = 0
    with progress_bar() as bar:
        task = bar.add_task("images", total=len(given.ids), status="")
        for rows in _batches(len(given.ids)):
            there = set(store.known([given.ids[row] for row in rows]))
            new = [row for row in rows if given.ids[row] not in there]
            if new:
                labels = None if given.labels is None else [given.labels[row] for row in new]
                store.add(given.vectors(new, None), [given.ids[row] for row in new], labels, replace=True)
                added += len(new)
            bar.advance(task, len(rows))
    result = {"store": uri, "images": len(store), "added": added, "method": "milvus"}
    store.close()
    return result
