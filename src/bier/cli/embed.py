"""`bier embed`: the vectors of a folder or a table of images, in one file."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bier.cli.collection import about_model, find_images
from bier.cli.terminal import Cache, Json, SkipBroken, emit, progress_bar, say
from bier.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class _Listing(NamedTuple):
    root: Path
    paths: list[str]
    labels: list[Any]
    boxes: "NDArray[np.float32] | None"


def register(app: typer.Typer) -> None:
    app.command("embed")(embed)


def embed(
    model: Annotated[Path, typer.Argument(help="A run, or the folder of a model.")],
    images: Annotated[Path, typer.Argument(help="A folder of images, or a table: CSV or Parquet with path and label.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the vectors go, as .safetensors.")],
    batch_size: Annotated[int, typer.Option("--batch-size", help="Images that pass the network at once.")] = 64,
    workers: Annotated[int | None, typer.Option("--workers", help="Threads that decode images.")] = None,
    cache: Cache = None,
    skip_broken: SkipBroken = False,
    json: Json = False,
) -> None:
    """Encode every image and write the vectors, with paths and labels beside them.

    FILE holds the tensors `vectors` (what `bier index` searches) and `raw` (what `bier evaluate --embeddings`
    measures); the JSON file of the same name holds paths, labels, groups and the model. An interrupted pass goes on
    where it was.
    Under torchrun every process takes its share of the images, on one machine or on several that share a disk.

    [bold]Examples[/bold]

    bier embed runs/birds photos --out vectors.safetensors

    bier embed runs/birds shop.csv --out shop.safetensors --skip-broken

    torchrun --nproc-per-node 8 --no-python bier embed runs/birds photos --out vectors.safetensors
    """
    if out.suffix != ".safetensors":
        raise ConfigError(f"The '--out' option must be a file that ends in .safetensors. Got {str(out)!r} instead.")
    start = time.perf_counter()
    listing = _folder(images) if images.is_dir() else _table(images)
    about = about_model(model)
    from bier.images import ImageDataset
    from bier.models.embedding_file import EmbeddingFile
    from bier.models.model import load

    with _processes() as (rank, world, wait), progress_bar() as bar:
        loaded = load(model)
        files = [listing.root / path for path in listing.paths]
        source = ImageDataset(
            files, loaded.backbone.resize, listing.boxes, cache=cache, skip_broken=skip_broken, workers=workers
        )
        kept = source.kept.tolist()
        labels = [listing.labels[index] for index in kept]
        description = {
            "root": str(listing.root.resolve()),
            "paths": [listing.paths[index] for index in kept],
            "labels": labels if any(label is not None for label in labels) else None,
            "model": about,
        }
        file = EmbeddingFile(loaded, source, out, description)
        resumed = file.begin() if rank == 0 else 0
        wait()
        task = bar.add_task("images", total=None, status="", visible=rank == 0)
        file.fill(rank, world, batch_size, workers, lambda done, total: bar.update(task, completed=done, total=total))
        wait()
        if rank:
            return
        file.finish()
    _report(json, out, source, loaded.groups, resumed, time.perf_counter() - start)


def _report(json: bool, out: Path, source: Any, groups: tuple[int, ...], resumed: int, seconds: float) -> None:
    skipped = [{"path": broken.path, "reason": broken.reason} for broken in source.broken]
    result = {
        "out": str(out),
        "images": len(source.kept),
        "dimension": sum(groups),
        "groups": list(groups),
        "resumed": resumed,
        "skipped": skipped,
        "seconds": round(seconds, 3),
    }
    if json:
        emit(result)
        return
    for one in skipped:
        say(f"skipped: {one['reason']}")
    say(f"{len(source.kept):,} images in {out} ({sum(groups)} dimensions, {seconds:.1f} s)")


@contextmanager
def _processes() -> Iterator[tuple[int, int, Any]]:
    """(rank, world, wait for the others): alone, or as one of torchrun's processes."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1, lambda: None
        return
    import torch
    from torch import distributed

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The others may be at it for long after the first has finished.
    distributed.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield distributed.get_rank(), world, distributed.barrier
    finally:
        distributed.destroy_process_group()


def _folder(folder: Path) -> _Listing:
    paths, labels = find_images(folder)
    return _Listing(folder, paths, list(labels), None)


def _table(file: Path) -> _Listing:
    """Every row of a table, whatever its split: `path`, and `label` and the box x1, y1, x2, y2 where it has them."""
    if not file.is_file() or file.suffix.lower() not in (".csv", ".parquet"):
        raise DataError(
            f"Images must be a folder, or a table that ends in .csv or .parquet. Got {str(file)!r} instead."
        )
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        table = csv.read_csv(file) if file.suffix.lower() == ".csv" else parquet.read_table(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"The table {str(file)!r} cannot be read: {error}.") from error
    columns = table.column_names
    if "path" not in columns:
        raise DataError(f"The table {str(file)!r} must have a column 'path'. It has {', '.join(columns)}.")
    paths = [str(path) for path in table["path"].to_pylist()]
    labels = (
        [None if label is None else str(label) for label in table["label"].to_pylist()] if "label" in columns else []
    )
    corners = [name for name in ("x1", "y1", "x2", "y2") if name in columns]
    boxes = None
    if len(corners) == 4:
        boxes = np.array([table[name].to_pylist() for name in corners], np.float32).T  # an empty cell becomes NaN
    return _Listing(file.parent, paths, labels or [None] * len(paths), boxes)
