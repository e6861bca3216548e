"""`bier search`: the images nearest to a picture, as a table or as a picture."""

import json as json_text
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

from bier.cli.terminal import Json, console, emit, say
from bier.errors import SearchError

if TYPE_CHECKING:
    import numpy as np

    from bier.search import Id, Label, Store


class _Query(NamedTuple):
    """A picture to search with: its vector, its file, and its id and label if it is in the collection."""

    vector: "np.ndarray[Any, Any]"
    path: Path
    known_as: "Id | None"
    label: "Label"


def search(
    collection: Annotated[str, typer.Argument(help="An index, a store's URI, or a run that has an index.")],
    query: Annotated[str, typer.Argument(help="An image file, or the id of an image in the collection.")],
    k: Annotated[int, typer.Option("-k", help="How many images to show.")] = 10,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="RUN", help="The model, if it has moved since the collection was created."),
    ] = None,
    shortlist: Annotated[
        int | None,
        typer.Option(
            "--shortlist",
            metavar="N",
            help="Funnel search: the first learner selects N images, all learners rank them.",
        ),
    ] = None,
    learners: Annotated[
        int | None, typer.Option("--learners", metavar="M", help="Compare the first M learners only.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", metavar="KEY=VALUE", help="Search only among these, like label=Heron; may be repeated."
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", help="The label of the query, to mark right and wrong results in the picture."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw the query and its results to this file, like row.png."),
    ] = None,
    json: Json = False,
) -> None:
    """Find the images nearest to one. A query that is itself in the collection does not find itself.

    [bold]Examples[/bold]

    bier search birds.index heron.jpg -k 5 --picture heron-row.png

    bier search runs/birds heron.jpg --where label=Heron --where label=Gull

    bier search milvus:birds.db heron.jpg --shortlist 400 --json
    """
    from bier.collection import open_collection
    from bier.search.store import checked_count

    k = checked_count(k, "-k")
    store = open_collection(collection)
    asked = _read_query(store, query, model, learners, label)
    start = time.perf_counter()
    found = store.search(
        asked.vector, k + (asked.known_as is not None), shortlist=shortlist, where=_filter(where), learners=learners
    )
    seconds = time.perf_counter() - start
    pairs = [(one, float(score)) for one, score in zip(found.ids.tolist(), found.scores, strict=True)]
    results = _described(store, [pair for pair in pairs if pair[0] != asked.known_as][:k])
    if picture is not None:
        _draw(store, asked, results, picture)
    if json:
        emit({"query": query, "label": asked.label, "results": results, "seconds": round(seconds, 6)})
        return
    _tabulate(results)
    say(
        f"{len(results)} of {len(store):,} images, {1e3 * seconds:.1f} ms"
        + (f"; drawn in {picture}" if picture else "")
    )


def _read_query(store: "Store", query: str, model: Path | None, learners: int | None, label: str | None) -> _Query:
    from bier.collection import id_of_file, image_path, model_of

    file = Path(query)
    known_as = id_of_file(store, file) if file.is_file() else _as_id(store, query)
    if known_as is None and not file.is_file():
        raise SearchError(f"The query must be an image file or an id of the collection. Found neither at {query!r}.")
    known = store.entries([known_as])[0].label if known_as is not None else None
    if known_as is not None:
        return _Query(store.vectors([known_as])[0], image_path(store, known_as), known_as, label or known)
    vector = model_of(store, model).encode([file], learners=learners)[0]
    return _Query(vector, file, None, label)


def _as_id(store: "Store", query: str) -> "Id | None":
    """The query as an id: the text itself, or the number that it spells."""
    known = store.known([query])
    if not known and query.isdecimal():
        known = store.known([int(query)])
    return known[0] if known else None


def _filter(where: list[str] | None) -> dict[str, list[Any]] | None:
    """Filters like `label=Heron`. Values are read as JSON if they are (2024, true), except for labels."""
    chosen: dict[str, list[Any]] = {}
    for text in where or []:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise SearchError(f"The '--where' option must be KEY=VALUE. Got {text!r} instead.")
        chosen.setdefault(key, []).append(value if key == "label" else _value(value))
    return chosen or None


def _value(text: str) -> Any:
    try:
        return json_text.loads(text)
    except ValueError:
        return text


def _described(store: "Store", pairs: list[tuple["Id", float]]) -> list[dict[str, Any]]:
    from bier.collection import image_path

    entries = store.entries([one for one, _ in pairs])
    return [
        {
            "rank": rank,
            "id": entry.id,
            "score": score,
            "label": entry.label,
            "path": str(image_path(store, entry.id)),
            "metadata": entry.metadata,
        }
        for rank, (entry, (_, score)) in enumerate(zip(entries, pairs, strict=True), 1)
    ]


def _tabulate(results: list[dict[str, Any]]) -> None:
    table = Table(box=None)
    for name in ("", "score"):
        table.add_column(name, justify="right")
    table.add_column("label")
    table.add_column("path", overflow="fold")
    for one in results:
        table.add_row(
            str(one["rank"]), f"{one['score']:.4f}", "" if one["label"] is None else str(one["label"]), one["path"]
        )
    console.print(table)


def _draw(store: "Store", asked: _Query, results: list[dict[str, Any]], out: Path) -> None:
    from bier.cli.picture import Tile, draw_row

    def right(one: dict[str, Any]) -> bool | None:
        return None if asked.label is None or one["label"] is None else str(one["label"]) == str(asked.label)

    tiles = [Tile(asked.path, "query", "" if asked.label is None else str(asked.label), None)]
    for one in results:
        name = Path(one["path"]).name if one["label"] is None else str(one["label"])
        tiles.append(Tile(Path(one["path"]), f"{one['score']:.3f}", name, right(one)))
    draw_row(tiles, out)
