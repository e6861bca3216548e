"""`bier embed`: the vectors of a folder or a table of images, in one file."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import (
    Backbone,
    Backend,
    Cache,
    Fast,
    Json,
    MoreImages,
    SkipBroken,
    emit,
    follow_steps,
    model_and_images,
    progress_bar,
    say,
    say_skipped,
    step,
)
from bier.errors import ConfigError

if TYPE_CHECKING:
    from bier.collection.encoding import ModelSource


ModelPath = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run, or the folder of a model; with --backbone the images.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write; it ends in .safetensors.")]
BatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", help="Images per batch.")]
Workers = Annotated[int | None, typer.Option("--workers", metavar="N", help="Threads that decode images.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Encode on the Ray cluster at this address: auto, HOST:PORT or ray://HOST:PORT; `local` starts one here.",
    ),
]


def embed(
    model: ModelPath,
    out: Out,
    images: MoreImages = None,
    backbone: Backbone = None,
    backend: Backend = "torch",
    batch_size: BatchSize = 64,
    workers: Workers = None,
    cache: Cache = None,
    fast: Fast = False,
    skip_broken: SkipBroken = False,
    ray: RayAddress = None,
    json: Json = False,
) -> None:
    """Encode every image and write the vectors, with paths and labels beside them.

    FILE holds the tensors `vectors` (which `bier index` searches) and `raw` (which `bier evaluate --embeddings`
    measures), and paths, labels, groups and the model, under one checksum; the JSON file of the same name repeats
    these for other programs. An interrupted command
    continues where it stopped when it is run again; images, boxes or models that have changed are encoded again.
    With --ray the processes of a cluster encode blocks of images; the blocks of one that dies are done again by others.

    [bold]Examples[/bold]

    bier embed runs/birds photos --out vectors.safetensors

    bier embed runs/birds shop.csv --out shop.safetensors --skip-broken

    bier embed photos --backbone efficientnet_lite0 --out plain.safetensors

    bier embed runs/birds photos --out vectors.safetensors --backend openvino

    bier embed runs/birds s3://bucket/photos.parquet --out vectors.safetensors --ray auto

    bier embed runs/birds photos --out vectors.safetensors --ray local
    """
    if out.suffix != ".safetensors":
        raise ConfigError(f"The '--out' option must be a file that ends in .safetensors. Got {str(out)!r} instead.")
    if ray is not None and cache is not None:
        raise ConfigError(
            "--cache keeps images on this machine, where the processes of --ray may not be; leave out one."
        )
    start = time.perf_counter()
    used, listed = model_and_images(model, images, backbone)
    options: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "fast": fast}
    options |= {"skip_broken": skip_broken, "backend": backend}
    with progress_bar() as bar:
        from bier.collection import ImageSource, about_model, write_embeddings
        from bier.data import list_images

        progress = follow_steps(bar)
        if ray is None:
            part = list_images(listed)
            about_model(used)  # an error about the model comes before the images are read
            source: ModelSource = ImageSource(used, part, progress=progress, cache=cache, **options)
            written, resumed = write_embeddings(source, out, progress)
        else:
            from bier.collection.ray import RaySource, check_installed, cluster

            check_installed()
            source = RaySource(used, list_images(listed), **options)
            with ExitStack() as stack:
                with step(bar, "starting Ray" if ray == "local" else f"joining Ray at {ray}"):
                    stack.enter_context(cluster(ray))
                written, resumed = write_embeddings(source, out, progress)
    groups, skipped = list(source.groups), [one.named() for one in source.skipped]
    seconds = round(time.perf_counter() - start, 3)
    if json:
        result = {"out": str(out), "images": written, "resumed": resumed, "dimension": sum(groups), "groups": groups}
        emit({**result, "skipped": skipped, "seconds": seconds})
        return
    say_skipped(skipped)
    say(f"{written:,} images in {out} ({sum(groups)} dimensions, {seconds:.1f} s)")
