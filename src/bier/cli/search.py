"""`bier search` and `bier label`: the images nearest to a picture, and the names that they give to pictures."""

import csv
import json as json_text
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

from bier.cli.terminal import (
    Json,
    SkipBroken,
    check_place,
    console,
    counted_step,
    emit,
    progress_bar,
    say,
    say_skipped,
)
from bier.errors import SearchError, did_you_mean
from bier.files import printable, write, writing

if TYPE_CHECKING:
    import numpy as np

    from bier.collection import Collection
    from bier.images import Box, Broken
    from bier.images import Source as Picture
    from bier.search import Id, Label, Store
    from bier.search.rerank import Match


class _Query(NamedTuple):
    """A picture to search with: its vector, its file, and its id and label if it is in the collection."""

    vector: "np.ndarray[Any, Any]"
    picture: "tuple[Picture, Box | None]"
    known_as: "Id | None"
    label: "Label"


CollectionName = Annotated[
    str, typer.Argument(metavar="COLLECTION", help="An index, a store's URI, or a run that has an index.")
]
QueryName = Annotated[
    str, typer.Argument(metavar="QUERY", help="An image file; with --id the id of an image in the collection.")
]
IsId = Annotated[bool, typer.Option("--id", help="QUERY is the id of an image in the collection, and not a file.")]
Count = Annotated[int, typer.Option("-k", metavar="N", help="How many images to show.")]
ModelPath = Annotated[
    Path | None,
    typer.Option("--model", metavar="RUN", help="The model, if it has moved since the collection was created."),
]
Learners = Annotated[int | None, typer.Option("--learners", metavar="M", help="Compare the first M learners only.")]
Filters = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="KEY=VALUE", help="Search only among these, like label=Heron; may be repeated."),
]
QueryLabel = Annotated[
    str | None,
    typer.Option(
        "--label", metavar="TEXT", help="The label of the query, to mark right and wrong results in the picture."
    ),
]
Same = Annotated[
    bool,
    typer.Option("--same", help="Only images from the model's threshold on, which are the same with 95% precision."),
]
Threshold = Annotated[
    float | None,
    typer.Option("--threshold", metavar="X", help="As --same, from this similarity (a cosine, -1 to 1) on."),
]
Rerank = Annotated[
    str | None,
    typer.Option(
        "--rerank",
        metavar="NAME",
        help="Re-rank the 100 nearest images: alpha-qe, dba or k-reciprocal.",
    ),
]
PictureFile = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE", help="Draw the query and its results to this file, like row.png."),
]


def search(
    collection: CollectionName,
    query: QueryName,
    is_id: IsId = False,
    k: Count = 10,
    model: ModelPath = None,
    learners: Learners = None,
    where: Filters = None,
    label: QueryLabel = None,
    same: Same = False,
    threshold: Threshold = None,
    rerank: Rerank = None,
    picture: PictureFile = None,
    json: Json = False,
) -> None:
    """Find the images nearest to a given one. A query that is itself in the collection does not find itself.

    With --same the answer may be empty: then the collection has no image of the same kind.

    [bold]Examples[/bold]

    bier search birds.index heron.jpg -k 5 --picture heron-row.png

    bier search runs/birds heron.jpg --where label=Heron --where label=Gull

    bier search birds.index Heron/7.jpg --id --where year=2024

    bier search birds.index heron.jpg --same --rerank k-reciprocal

    bier search "postgresql://db.example/shop#birds" heron.jpg --json
    """
    from bier.collection import Collection
    from bier.search import Index
    from bier.search.rerank import search_one
    from bier.search.store import checked_count

    k = checked_count(k, "-k")
    if threshold is not None and not -1 <= threshold <= 1:
        raise SearchError(f"The '--threshold' option must be a cosine from -1 to 1. Got {threshold:g} instead.")
    with closing(Collection.open(collection, model)) as opened:
        store = opened.store
        if same and threshold is None:
            threshold = opened.threshold(learners)
        asked = _read_query(opened, query, is_id, learners, label)
        wanted = _filter(where)
        start = time.perf_counter()
        matches = search_one(
            store,
            asked.vector,
            k,
            rerank=rerank,
            where=wanted,
            learners=learners,
            without=asked.known_as,
        )
        seconds = time.perf_counter() - start
        nearest = max((match.similarity for match in matches), default=None)
        if wanted and (isinstance(store, Index) or not matches):
            _check_filter(store, wanted)
        results = _described(opened, [one for one in matches if threshold is None or one.similarity >= threshold])
        images = len(store)
        if picture is not None:
            _draw(opened, asked, results, picture)
    if json:
        about = {} if threshold is None else {"threshold": threshold, "nearest": nearest}
        emit({"query": query, "label": asked.label, "results": results, "seconds": round(seconds, 6), **about})
        return
    if results or threshold is None:
        _tabulate(results)
    say(_summary(results, images, seconds, threshold, nearest) + (f"; drawn in {picture}" if picture else ""))


HEADING = ("image", "answer", "label", "confidence", "similarity", "decided_by")


def label(
    images: Annotated[str, typer.Argument(metavar="PHOTOS", help="A folder or a table of images to be named.")],
    collection: Annotated[
        str,
        typer.Option(
            "--with", metavar="COLLECTION", help="Images with labels: an index, a store's URI, or a run with an index."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The table to write, like labels.csv.")],
    k: Annotated[int, typer.Option("-k", metavar="N", help="How many of the nearest images vote.")] = 5,
    model: ModelPath = None,
    learners: Learners = None,
    skip_broken: SkipBroken = False,
    json: Json = False,
) -> None:
    """Name pictures by the images of a collection that are the same, or say that there is none.

    The nearest images that reach the model's threshold vote. For each picture the table has the answer (same, similar
    or unknown), the label, the share of the vote for it, and the image that decided, with its similarity. Unknown
    pictures come last. A model without a threshold cannot say what is unknown: then every answer is "similar".

    [bold]Examples[/bold]

    bier label new-photos --with shop.index --out labels.csv
    """
    check_place(images)
    from bier.collection import Collection
    from bier.data import list_images
    from bier.search.store import checked_count

    k = checked_count(k, "-k")
    _check_table(out)
    with closing(Collection.open(collection, model)) as opened, progress_bar() as bar:
        part, broken = list_images(images), list["Broken"]()
        if skip_broken:
            with counted_step(bar, "reading images") as progress:
                part, broken = part.readable(progress=progress)
        with counted_step(bar, "encoding images") as progress:
            names = opened.label(part, k, learners, progress)
        names.sort(key=lambda name: name.answer == "unknown")
        reason = opened.why_no_threshold() if any(name.answer == "similar" for name in names) else None
    text = StringIO()
    rows = [
        [*name[:3], f"{name.confidence:.4f}", "" if name.similarity is None else f"{name.similarity:.4f}", name[5]]
        for name in names
    ]
    csv.writer(text, lineterminator="\n").writerows([HEADING, *rows])
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write(out, text.getvalue().encode(errors="surrogateescape"))
    counts = {answer: sum(name.answer == answer for name in names) for answer in ("same", "similar", "unknown")}
    skipped = [image.named() for image in broken]
    if json:
        emit({"out": str(out), "images": [name._asdict() for name in names], "counts": counts, "skipped": skipped})
        return
    say_skipped(skipped)
    if reason is not None:
        say(
            "The names are those of similar images, which may be of another kind: "
            f"the model keeps no threshold ({reason})."
        )
    say(f"{len(names) - counts['unknown']:,} named, {counts['unknown']:,} unknown: {out}")


def _check_table(out: Path) -> None:
    """Before anything is encoded: only a table of ours is replaced."""
    if out.suffix.lower() != ".csv":
        raise SearchError(f"The '--out' option must be a file that ends in .csv. Got {str(out)!r} instead.")
    if out.is_file():
        with out.open("rb") as file:
            if file.readline().strip() != ",".join(HEADING).encode():
                raise SearchError(f"{out} is not a table of `bier label`. Move it, or choose another --out.")


def _summary(
    results: list[dict[str, Any]], images: int, seconds: float, threshold: float | None, nearest: float | None
) -> str:
    if threshold is None or results:
        above = "" if threshold is None else f" with a similarity of {threshold:.4f} or more"
        return f"{len(results)} of {images:,} images{above}, {1e3 * seconds:.1f} ms"
    best = "it is empty" if nearest is None else f"the nearest has {nearest:.4f}"
    return f"The collection has no image with a similarity of {threshold:.4f} or more: {best}."


def _read_query(collection: "Collection", query: str, is_id: bool, learners: int | None, label: str | None) -> _Query:
    """A file is read, also where an id has the same name: the stored vector is used only for that very file."""
    store, file = collection.store, Path(query)
    if not is_id and not file.is_file():
        known = " The collection has an image of this id; add --id to search for it." * bool(_as_id(store, query))
        raise SearchError(f"The query must be an image file. There is none at {query!r}.{known}")
    if not is_id:
        entry = collection.find(file)
        if entry is None or not collection.is_current(entry):
            vector = collection.model.encode([file], learners=learners)[0]
            return _Query(vector, (file, None), entry and entry.id, label or (entry and entry.label))
    else:
        one = _as_id(store, query)
        if one is None:
            raise SearchError(f"The query must be an id of the collection. It has no {query!r}.")
        entry = store.entries([one])[0]
    vector = store.vectors([entry.id])[0]
    return _Query(vector, collection.picture(entry.id), entry.id, label or entry.label)


def _as_id(store: "Store", query: str) -> "Id | None":
    """The query as an id: the text itself, or the number that it spells."""
    known = store.known([query])
    if not known and query.isdecimal():
        known = store.known([int(query)])
    return known[0] if known else None


def _filter(where: list[str] | None) -> dict[str, list[Any]] | None:
    """Filters like `label=Heron`. A value such as 2024 or true matches both the number or truth and the text."""
    chosen: dict[str, list[Any]] = {}
    for text in where or []:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise SearchError(f"The '--where' option must be KEY=VALUE. Got {text!r} instead.")
        chosen.setdefault(key, []).append(value)
        if key != "label":
            with suppress(ValueError, RecursionError):  # plain text, numbers of 4,300 digits, a thousand brackets
                plain = json_text.loads(value)
                chosen[key] += [plain] if isinstance(plain, bool | int | float) else []
    return chosen or None


def _check_filter(store: "Store", where: "Mapping[str, list[Any]]") -> None:
    """A key or a label that no image has is most likely a mistake; it would find nothing, in silence."""
    entries = store.entries(store.ids)
    from bier.collection import columns

    keys = {"label": None} | {key: None for entry in entries for key in columns(entry.metadata)}
    for key in where:
        if key not in keys:
            raise SearchError(
                f"The '--where' option must name label or a column of the collection. No image has {key!r}; the keys "
                f"are {', '.join(keys)}.{did_you_mean(key, keys)}"
            )
    labels = {str(entry.label) for entry in entries if entry.label is not None}
    for label in where.get("label", []):
        if label not in labels:
            raise SearchError(f"No image of the collection has the label {label!r}.{did_you_mean(label, labels)}")


def _described(collection: "Collection", matches: "list[Match]") -> list[dict[str, Any]]:
    from bier.collection import columns

    entries = collection.store.entries([match.id for match in matches])
    return [
        {
            "rank": rank,
            "id": entry.id,
            "score": match.score,
            "similarity": match.similarity,
            "label": entry.label,
            "path": str(collection.path(entry)),
            "metadata": columns(entry.metadata) or None,
        }
        for rank, (entry, match) in enumerate(zip(entries, matches, strict=True), 1)
    ]


def _tabulate(results: list[dict[str, Any]]) -> None:
    """With the cosine, which thresholds are about; the dot product is another number with alpha weights."""
    table = Table(box=None)
    for name in ("", "similarity"):
        table.add_column(name, justify="right")
    table.add_column("label")
    table.add_column("path", overflow="fold")
    for one in results:
        label = "" if one["label"] is None else printable(str(one["label"]))
        table.add_row(str(one["rank"]), f"{one['similarity']:.4f}", label, printable(one["path"]))
    console.print(table)


def _draw(collection: "Collection", asked: _Query, results: list[dict[str, Any]], out: Path) -> None:
    from bier.cli.picture import Tile, draw_row

    def right(one: dict[str, Any]) -> bool | None:
        return None if asked.label is None or one["label"] is None else str(one["label"]) == str(asked.label)

    tiles = [Tile(asked.picture, "query", "" if asked.label is None else str(asked.label), None)]
    for one in results:
        name = Path(one["path"]).name if one["label"] is None else str(one["label"])
        tiles.append(Tile(collection.picture(one["id"]), f"{one['similarity']:.3f}", name, right(one)))
    draw_row(tiles, out)
