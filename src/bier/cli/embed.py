"""`bier embed`: the vectors of a folder or a table of images, in one file."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    step,
)
from bier.errors import ConfigError
from bier.files import is_url

if TYPE_CHECKING:
    from rich.progress import Progress

    from bier.collection.encoding import ModelSource
    from bier.models.model import Untrained


ModelPath = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run, or the folder of a model; with --backbone the images.")
]
Images = Annotated[
    str | None,
    typer.Argument(
        metavar="IMAGES",
        help="A folder of images, or a table (CSV or Parquet) with the columns path and label; or the URL of one.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file to write; it ends in .safetensors.")]
StoreUri = Annotated[
    str | None, typer.Option("--store", metavar="URI", help="Add the vectors to this store, as `bier index` does.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", help="Images per batch.")]
Workers = Annotated[int | None, typer.Option("--workers", metavar="N", help="Threads that decode images.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Encode on the Ray cluster at this address (auto, HOST:PORT or ray://HOST:PORT). Without an address "
        "one is started on this machine.",
    ),
]


def embed(
    model: ModelPath,
    images: Images = None,
    out: Out = None,
    store: StoreUri = None,
    backbone: Backbone = None,
    backend: Backend = "torch",
    batch_size: BatchSize = 64,
    workers: Workers = None,
    cache: Cache = None,
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
    Under torchrun every process encodes its share of the images, on one machine or on several that share a disk.

    [bold]Examples[/bold]

    bier embed runs/birds photos --out vectors.safetensors

    bier embed runs/birds shop.csv --out shop.safetensors --skip-broken

    bier embed photos --backbone efficientnet_lite0 --out plain.safetensors

    bier embed runs/birds photos --out vectors.safetensors --backend openvino

    bier embed runs/birds s3://bucket/photos.parquet --out vectors.safetensors --ray auto

    bier embed runs/birds photos --store "postgresql://db.example/shop#birds" --ray

    torchrun --nproc-per-node 8 --no-python bier embed runs/birds photos --out vectors.safetensors
    """
    if (out is None) == (store is None):
        raise ConfigError("Give either --out FILE or --store URI.")
    if out is not None and out.suffix != ".safetensors":
        raise ConfigError(f"The '--out' option must be a file that ends in .safetensors. Got {str(out)!r} instead.")
    if ray is not None and cache is not None:
        raise ConfigError(
            "--cache keeps images on this machine, where the processes of --ray may not be; leave out one."
        )
    start = time.perf_counter()
    given = [Path(one) for one in (model, images) if one is not None]
    used, _ = model_and_images(given[0], given[1] if len(given) > 1 else None, backbone)
    last = model if images is None else images
    listed = last if is_url(last) else Path(last)
    options: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    options |= {"skip_broken": skip_broken, "backend": backend}
    with progress_bar() as bar:
        if ray is None:
            found = _in_this_process(used, listed, out, store, {"cache": cache, **options}, bar)
        else:
            found = _on_ray(ray, used, listed, out, store, options, bar)
    if found is None:  # only the first of several processes prints
        return
    result = {**found, "seconds": round(time.perf_counter() - start, 3)}
    if json:
        emit(result)
        return
    say_skipped(result["skipped"])
    where = result.get("out") or result["store"]
    say(f"{result['images']:,} images in {where} ({result['dimension']} dimensions, {result['seconds']:.1f} s)")


def _in_this_process(
    used: "Path | Untrained",
    images: str | Path,
    out: Path | None,
    store: str | None,
    options: Mapping[str, Any],
    bar: "Progress",
) -> dict[str, Any] | None:
    """Encode all images, or under torchrun a share; None on all processes but the first."""
    from bier import distributed
    from bier.collection import ImageSource, about_model
    from bier.data import list_images

    part = list_images(images)
    about_model(used)  # before other processes are waited for
    # One process may finish days before another.
    with distributed.process_group("gloo", timedelta(days=7)):
        if store is not None and distributed.world() > 1:
            raise ConfigError("--store takes the vectors of one process. Leave out torchrun, or encode with --ray.")
        progress = follow_steps(bar) if distributed.rank() == 0 else None
        found = _encoded(ImageSource(used, part, progress=progress, **options), out, store, progress)
        return found if distributed.rank() == 0 else None


def _on_ray(
    address: str,
    used: "Path | Untrained",
    images: str | Path,
    out: Path | None,
    store: str | None,
    options: Mapping[str, Any],
    bar: "Progress",
) -> dict[str, Any]:
    from bier.collection.ray import RaySource, check_installed, cluster
    from bier.data import list_images

    check_installed()
    source = RaySource(used, list_images(images), **options)
    with ExitStack() as stack:
        with step(bar, "starting Ray" if address == "local" else f"joining Ray at {address}"):
            stack.enter_context(cluster(address))
        return _encoded(source, out, store, follow_steps(bar))


def _encoded(
    source: "ModelSource", out: Path | None, store: str | None, progress: "Callable[[str, int, int], None] | None"
) -> dict[str, Any]:
    """Write the vectors to the file or the store; what `--json` says about them."""
    from bier.collection import fill_store, write_embeddings
    from bier.search.store import without_secrets

    if store is not None:
        images, added = fill_store(source, store, progress=progress)
        written = {"store": without_secrets(store), "images": images, "added": added}
    else:
        assert out is not None
        images, resumed = write_embeddings(source, out, progress)
        written = {"out": str(out), "images": images, "resumed": resumed}
    groups = list(source.groups)
    return {**written, "dimension": sum(groups), "groups": groups, "skipped": [one.named() for one in source.skipped]}


_ADDRESS = re.compile(r"auto|local|ray://.+|[^/\\\s]+:[0-9]+")


def with_ray_address(arguments: Sequence[str]) -> list[str]:
    """`--ray` without an address as `--ray local`, which typer cannot express; what follows it may be a model."""
    found: list[str] = []
    for number, word in enumerate(arguments):
        found.append(word)
        if word == "--ray" and not _ADDRESS.fullmatch("".join(arguments[number + 1 : number + 2])):
            found.append("local")
    return found
