"""The collection that `bier serve` shows: an index, a store, a folder of images, or the test images of a run."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress as Bar

from bier.cli.collection import about_model, find_images, image_path, model_of, open_collection
from bier.cli.terminal import say
from bier.errors import BierError, ConfigError, DataError, SearchError
from bier.files import file_aside

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from bier.config import Config
    from bier.data import Part
    from bier.models.model import Model
    from bier.search import Id, Index, Label, Store
    from bier.web.service import Collection

    PictureOf = Callable[[Id], Image]


@dataclass(frozen=True)
class _Source:
    """Images that are not encoded yet. `images` are paths or pixels; `known` fixes them, together with the model."""

    title: str
    known: Mapping[str, Any]
    ids: Sequence["Id"]
    labels: Sequence["Label"] | None
    images: "Sequence[Path] | np.ndarray[Any, Any]"
    boxes: "np.ndarray[Any, Any] | None" = None
    skip_broken: bool = False


def open_gallery(
    run: Path,
    data: str | None,
    root: Path | None,
    images: Path | None,
    index: Path | None,
    store: str | None,
    bar: Bar,
) -> "Collection":
    """Open or make what the options name; without any, the data set that the run was trained on, or its index."""
    named = {"--data": data, "--images": images, "--index": index, "--store": store}
    chosen = [name for name, value in named.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"Name one collection to show. Got {' and '.join(chosen)}.")
    has_config = (run / "config.toml").is_file()
    if store is not None or index is not None or not (chosen or has_config):
        return _of_store(run, store or str(index or run), bar)
    from bier.models.model import load

    model = load(run)
    if images is not None:
        return _encoded(run, model, _folder_source(images), bar)
    return _of_data(run, model, data, root, bar)


def _of_store(run: Path, target: str, bar: Bar) -> "Collection":
    from bier.images import open_image

    try:
        opened = open_collection(target)
    except SearchError as error:
        if target == str(run) and not (run / "index").exists():
            raise ConfigError(
                f"{run} is a model without a run's config.toml; say what to show with --data, --images or --index."
            ) from error
        raise
    model = model_of(opened, run)
    return _collection(opened, model, lambda one: open_image(image_path(opened, one)), Path(target).name, bar)


def _of_data(run: Path, model: "Model", data: str | None, root: Path | None, bar: Bar) -> "Collection":
    from bier.config import Config

    if data is not None:
        config = Config().with_settings({"data.name": data, "data.root": str(root or "")})
    else:
        config = Config.from_toml(run / "config.toml")
        if root is not None:
            config = config.with_settings({"data.root": str(root)})
    settings = config.data
    if settings.name != "glyphs":
        return _encoded(run, model, _data_source(config), bar)
    # Glyphs take long to draw and depend on nothing outside, so the drawn ones are kept beside their vectors.
    known = {"data": "glyphs", "validation": settings.validation}
    kept = _cache_folder(run, known)
    drawn = _read_pixels(kept / "pixels.npy")
    made = None if drawn is None else _read_index(kept / "index", run, known)
    if drawn is not None and made is not None and len(made) == len(drawn):
        return _collection(made, model, _row_picture(drawn, None), "glyphs", bar)
    bar.add_task("drawing glyphs", total=None, status="")
    part = _shown_part(config)
    _keep(kept / "pixels.npy", part.images)
    return _encoded(run, model, _part_source("glyphs", known, part, False), bar)


def _data_source(config: "Config") -> _Source:
    settings, part = config.data, _shown_part(config)
    digest = hashlib.sha256(part.labels.tobytes())
    for image in part.images if isinstance(part.images, tuple) else ():
        status = image.stat() if image.exists() else None
        digest.update(f"{image} {status.st_size} {status.st_mtime_ns}\n".encode() if status else b"missing\n")
    if not isinstance(part.images, tuple):
        digest.update(part.images.tobytes())
    if part.boxes is not None:
        digest.update(part.boxes.tobytes())
    known = {"data": settings.name, "root": settings.root, "images": digest.hexdigest()}
    return _part_source(settings.name, known, part, settings.skip_broken)


def _shown_part(config: "Config") -> "Part":
    from bier import data as datasets

    settings = config.data
    dataset = datasets.load(
        settings.name,
        settings.root or None,
        seed=config.seed if settings.name != "glyphs" else 0,
        validation=settings.validation,
        split=settings.split,
        test_share=settings.test_share,
        size=settings.size,
    )
    part = dataset["gallery" if "gallery" in dataset.parts else "test"]
    if not isinstance(part.images, tuple) and part.images.ndim == 2:
        raise DataError(f"The data set '{settings.name}' has vectors and no pictures, so there is nothing to show.")
    return part


def _part_source(title: str, known: Mapping[str, Any], part: "Part", skip_broken: bool) -> _Source:
    labels = [part.classes[label] for label in part.labels.tolist()]
    return _Source(title, known, range(len(part)), labels, part.images, part.boxes, skip_broken)


def _folder_source(folder: Path) -> _Source:
    paths, labels = find_images(folder)
    files = [folder / path for path in paths]
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    known = {"folder": str(folder.resolve()), "images": digest.hexdigest()}
    return _Source(folder.resolve().name, known, paths, labels if any(labels) else None, files, skip_broken=True)


def _encoded(run: Path, model: "Model", source: _Source, bar: Bar) -> "Collection":
    kept = _cache_folder(run, source.known) / "index"
    made = _read_index(kept, run, source.known)
    if made is None:
        made = _encode(model, source, bar)
        made.about |= {"model": about_model(run), "source": dict(source.known), "quality": _quality(made, bar)}
        _save(made, kept)
    picture = _row_picture(source.images, source.boxes)
    row_of = {one: row for row, one in enumerate(source.ids)}
    return _collection(made, model, lambda one: picture(row_of[one]), source.title, bar)


def _encode(model: "Model", source: _Source, bar: Bar) -> "Index":
    from bier.images import ImageDataset
    from bier.search import Index

    task = bar.add_task("encoding images", total=len(source.images), status="")

    def follow(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    images = ImageDataset(
        source.images, model.backbone.resize, source.boxes, skip_broken=source.skip_broken, progress=follow
    )
    for broken in images.broken:
        say(f"left out: {broken.reason}")
    rows = images.kept.tolist()
    if not rows:
        raise DataError(f"None of the {len(source.images)} images of '{source.title}' could be read.")
    return Index.build(
        model.encode(images, progress=follow),
        [source.ids[row] for row in rows],
        model.groups,
        None if source.labels is None else [source.labels[row] for row in rows],
        progress=lambda done, total: bar.update(task, description="linking", completed=done, total=total),
    )


def _collection(store: "Store", model: "Model", picture: "PictureOf", title: str, bar: Bar) -> "Collection":
    from bier.web.service import Collection

    quality = store.about["quality"] if "quality" in store.about else _quality(store, bar)
    return Collection(store, model, picture, title, quality)


def _quality(store: "Store", bar: Bar) -> dict[str, Any] | None:
    from bier.web.quality import measure

    bar.add_task("measuring recall", total=None, status="")
    ids = store.ids
    return measure(store, ids, [entry.label for entry in store.entries(ids)])


def _row_picture(images: Any, boxes: Any) -> "PictureOf":
    import numpy as np

    from bier.images import open_image

    def picture(row: "Id") -> "Image":
        box = None if boxes is None or np.isnan(boxes[row]).all() else tuple(boxes[row].tolist())
        return open_image(images[row], box=box)

    return picture


def _cache_folder(run: Path, known: Mapping[str, Any]) -> Path:
    """RUN/serve/NAME: one for each data set or folder that was shown."""
    name = str(known.get("data") or Path(known["folder"]).name)
    where = json.dumps({key: value for key, value in known.items() if key != "images"}, sort_keys=True)
    folder = run.parent if run.name == "model" else run
    return folder / "serve" / f"{name}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def _read_index(folder: Path, run: Path, known: Mapping[str, Any]) -> "Index | None":
    """The index of an earlier start, if it is whole and of the same images and model."""
    from bier.search import Index

    if not folder.is_dir():
        return None
    try:
        made = Index.load(folder)
    except BierError:
        return None
    same = made.about.get("source") == dict(known)
    return made if same and made.about["model"]["fingerprint"] == about_model(run)["fingerprint"] else None


def _save(index: "Index", folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        index.save(folder)
    except (OSError, BierError) as error:
        say(f"The vectors could not be kept for the next start: {error}")


def _read_pixels(file: Path) -> "np.ndarray[Any, Any] | None":
    import numpy as np

    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def _keep(file: Path, pixels: Any) -> None:
    import numpy as np

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file_aside(file) as aside, aside.open("wb") as out:
            np.save(out, pixels, allow_pickle=False)
    except OSError as error:
        say(f"The drawn glyphs could not be kept for the next start: {error}")
