"""`bier embed`: the vectors of a folder or a table of images, in one file."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from bier.cli.terminal import (
    Backbone,
    Backend,
    Cache,
    Json,
    SkipBroken,
    emit,
    follow_steps,
    model_and_images,
    progress_bar,
    say,
    say_skipped,
)
from bier.errors import ConfigError


def embed(
    model: Annotated[Path, typer.Argument(help="A run, or the folder of a model; with --backbone the images.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write; it ends in .safetensors.")],
    images: Annotated[
        Path | None,
        typer.Argument(help="A folder of images, or a table (CSV or Parquet) with the columns path and label."),
    ] = None,
    backbone: Backbone = None,
    backend: Backend = "torch",
    batch_size: Annotated[int, typer.Option("--batch-size", help="Images per batch.")] = 64,
    workers: Annotated[int | None, typer.Option("--workers", help="Threads that decode images.")] = None,
    cache: Cache = None,
    skip_broken: SkipBroken = False,
    json: Json = False,
) -> None:
    """Encode every image and write the vectors, with paths and labels beside them.

    FILE holds the tensors `vectors` (which `bier index` searches) and `raw` (which `bier evaluate --embeddings`
    measures), and paths, labels, groups and the model, under one checksum; the JSON file of the same name repeats
    these for other programs. An interrupted command
    continues where it stopped when it is run again; images, boxes or models that have changed are encoded again.
    Under torchrun every process encodes its share of the images, on one machine or on several that share a disk.

    [bold]Examples[/bold]

    bier embed runs/birds photos --out vectors.safetensors

    bier embed runs/birds shop.csv --out shop.safetensors --skip-broken

    bier embed photos --backbone efficientnet_lite0 --out plain.safetensors

    bier embed runs/birds photos --out vectors.safetensors --backend openvino

    torchrun --nproc-per-node 8 --no-python bier embed runs/birds photos --out vectors.safetensors
    """
    if out.suffix != ".safetensors":
        raise ConfigError(f"The '--out' option must be a file that ends in .safetensors. Got {str(out)!r} instead.")
    from bier import distributed
    from bier.collection import ImageSource, about_model, write_embeddings
    from bier.data import list_images

    start = time.perf_counter()
    used, listed = model_and_images(model, images, backbone)
    part = list_images(listed)
    about_model(used)  # before other processes are waited for
    # One process may finish days before another.
    with distributed.process_group("gloo", timedelta(days=7)), progress_bar() as bar:
        progress = follow_steps(bar) if distributed.rank() == 0 else None
        source = ImageSource(
            used, part, cache=cache, skip_broken=skip_broken, workers=workers, progress=progress, backend=backend
        )
        resumed = write_embeddings(source, out, batch_size, progress)
        if distributed.rank():
            return
    result: dict[str, Any] = {
        "out": str(out),
        "images": len(source.ids),
        "dimension": sum(source.groups),
        "groups": list(source.groups),
        "resumed": resumed,
        "skipped": [broken.named() for broken in source.skipped],
        "seconds": round(time.perf_counter() - start, 3),
    }
    if json:
        emit(result)
        return
    say_skipped(result["skipped"])
    say(f"{len(source.ids):,} images in {out} ({sum(source.groups)} dimensions, {result['seconds']:.1f} s)")
