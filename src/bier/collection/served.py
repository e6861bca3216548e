"""What `bier serve` shows: a collection with its model, its pictures and its recall figures."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bier import files
from bier.collection.collection import Collection, run_folder
from bier.collection.encoding import ImageSource, about_model, fingerprint, no_image_readable
from bier.config import DataConfig
from bier.data import Dataset, Part, list_images
from bier.data import load as load_data
from bier.data.records import ALL
from bier.errors import BierError, DataError
from bier.evaluate.dataset import REPEATS
from bier.evaluate.ensemble import evaluate_ensemble
from bier.images import Box
from bier.images import Source as Picture
from bier.images.decode import box_of
from bier.method.defaults import Weighting
from bier.models.model import Untrained, load
from bier.search import Id, Index
from bier.search.files import locked
from bier.search.sources import Progress, build_index
from bier.search.store import Floats

PictureOf = Callable[[Id], tuple[Picture, Box | None]]  # what `open_image` takes

KS = (1, 2, 4, 8)


def stored_collection(run: Path | Untrained | None, target: str, progress: Progress | None = None) -> Collection:
    """The collection in an index or a store, with the model that it names or the one given instead."""
    collection = Collection.open(target, run)
    _ = collection.model  # an error about the model comes now, not with the first request
    return collection


def image_collection(
    run: Path | Untrained, images: Path | str, progress: Progress | None = None, fast: bool = False
) -> Collection:
    """The images of a folder or a table. Broken ones are left out.

    They are kept as an index, below RUN/serve or for a plain backbone below `cache_folder`; what is new or has changed
    is encoded at the next start.
    """
    about_model(run)  # an error about the model comes first
    place = files.place_of(images)
    source = ImageSource(run, list_images(place), fast=fast)
    text = str(place.resolve() if isinstance(place, Path) else place)
    folder: Path | None = _kept_folder(run, Path(place).name, {"folder": text})
    notes: list[str] = []
    with ExitStack() as stack:
        try:
            if folder is not None:
                stack.enter_context(locked(folder))
        except BierError as error:
            folder = None
            notes.append(f"The vectors could not be kept for the next start: {error}")
        collection = _added(_read_index(folder), source, progress)
        if collection is None:
            collection = _added(None, source, progress)
        assert collection is not None
        store = collection.store
        assert isinstance(store, Index)
        if not len(store):
            raise no_image_readable(len(source.ids))
        if collection.changed:
            try:
                if folder is not None:
                    store.save_locked(folder)
            except (OSError, BierError) as error:
                notes.append(f"The vectors could not be kept for the next start: {error}")
    collection.title = files.name_text(Path(place).name)
    collection.notes = (*(f"left out: {broken.reason}" for broken in source.skipped), *notes)
    return collection


def _added(index: Index | None, source: ImageSource, progress: Progress | None) -> Collection | None:
    """The index, or a new one, with the images of a source; None where it is of another model."""
    if index is None:
        nothing = np.empty((0, sum(source.groups)), np.float32)
        index = Index.build(nothing, [], source.groups, about=source.about)
    elif index.about.get("model") != source.about["model"] or index.about.get("root") != source.about["root"]:
        return None
    collection = Collection(index, source.model)
    collection.add(source, prune=True, skip_broken=True, progress=progress)
    return collection


def data_collection(
    run: Path | Untrained,
    settings: DataConfig,
    own: bool = True,
    progress: Progress | None = None,
    fast: bool = False,
) -> Collection:
    """The test images of a data set, divided as training divides it, with the recall figures of the report.

    own: whether the run was trained on this data. Other data that has no test part of its own is shown whole.
    """
    if progress is not None:
        progress("reading the data set", 0, 0)
    dataset = _dataset(run, settings)
    if dataset.divided and not own:
        dataset = Dataset(dataset.name, {"test": dataset[ALL]}, dataset.ks)
    part = dataset["gallery" if dataset.protocol == "query-gallery" else "test"]
    if part.width is not None:
        raise DataError(f"The data set '{settings.name}' has vectors and no pictures, so there is nothing to show.")
    part = replace(part, ids=None)  # by number: a table may have several rows for one file

    def source_of(one: Part) -> ImageSource:
        cache = Path(settings.cache) if settings.cache else None
        return ImageSource(run, one, fast=fast, cache=cache, skip_broken=settings.skip_broken, progress=progress)

    def encoded() -> tuple[Index, ImageSource]:
        source = source_of(part)
        made = build_index(source, progress=progress)
        queries = source_of(dataset["query"]) if dataset.protocol == "query-gallery" else None
        recall = _recall_by_protocol(dataset, made, source, queries, progress) if own else None
        images = f"{len(part):,} test images of {files.name_text(settings.name)}, whose classes were not trained on"
        made.about["recall"] = recall and {**recall, "on": images}
        return made, source

    return _kept(run, part, settings.name, {"data": settings.name, "root": settings.root}, encoded, fast)


def _dataset(run: Path | Untrained, settings: DataConfig) -> Dataset:
    """The data set of the settings. The test part of glyphs is kept: drawing takes seconds and depends on nothing."""
    if settings.name != "glyphs" or isinstance(run, Untrained):
        return load_data(settings)
    file = run_folder(run) / "serve" / f"glyphs-{settings.seed}-{settings.validation:g}.safetensors"
    try:
        kept, words = files.read_tensors(file)
        part = Part(kept["images"], kept["labels"], tuple(json.loads(words["classes"])))
        return Dataset("glyphs", {"test": part}, KS)
    except (OSError, ValueError, KeyError):
        dataset = load_data(settings)
    part = dataset["test"]
    with suppress(OSError):  # where nothing can be written, they are drawn at the next start again
        file.parent.mkdir(parents=True, exist_ok=True)
        words = {"classes": json.dumps(part.classes)}
        files.write_tensors(file, {"images": np.asarray(part.images), "labels": part.labels}, words)
    return dataset


def _kept(
    run: Path | Untrained,
    part: Part,
    name: str,
    place: Mapping[str, str],
    encoded: Callable[[], tuple[Index, ImageSource]],
    fast: bool,
) -> Collection:
    """The index of an earlier start if it is of the same images and model; otherwise a new one, which is kept."""
    key = {**place, "images": fingerprint(about_model(run, fast), part)}
    folder = _kept_folder(run, name, place)
    index = _read_index(folder)
    if index is not None and (index.about.get("source") != key or "recall" not in index.about):
        index = None
    notes: list[str] = []
    if index is not None:
        model = load(run, fast=fast)
    else:
        index, source = encoded()
        model, notes = source.model, [f"left out: {broken.reason}" for broken in source.skipped]
        index.about["source"] = key
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            index.save(folder)
        except (OSError, BierError) as error:
            notes.append(f"The vectors could not be kept for the next start: {error}")
    return Collection(index, model, _picture_of(part), files.name_text(name), index.about["recall"], tuple(notes))


def _picture_of(part: Part) -> PictureOf:
    row_of = {one: row for row, one in enumerate(range(len(part)) if part.ids is None else part.ids)}

    def picture(one: Id) -> tuple[Picture, Box | None]:
        return part.images[row_of[one]], box_of(part.boxes, row_of[one])

    return picture


def cache_folder() -> Path:
    """Where indexes of plain backbones are kept: BIER_CACHE, else the folder that the platform has for caches."""
    if given := os.environ.get("BIER_CACHE"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bier"
    local = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(local) if local else Path.home() / ".cache") / "bier"


def _kept_folder(run: Path | Untrained, name: str, place: Mapping[str, str]) -> Path:
    if isinstance(run, Untrained):
        place = {**place, "backbone": run.backbone, "weights": str(run.weights and run.weights.resolve())}
    where = hashlib.sha256(json.dumps(dict(place), sort_keys=True).encode()).hexdigest()[:8]
    folder = cache_folder() if isinstance(run, Untrained) else run_folder(run) / "serve"
    return folder / f"{name}-{where}" / "index"


def _read_index(folder: Path | None) -> Index | None:
    """The index in a folder, if it is complete."""
    if folder is None or not folder.is_dir():
        return None
    with suppress(BierError):
        return Index.load(folder)
    return None


# Recall figures of the page


def _recall_by_protocol(
    dataset: Dataset, index: Index, source: ImageSource, queries: ImageSource | None, progress: Progress | None
) -> dict[str, Any] | None:
    """Recall in percent by the protocol of the data set: the numbers of `bier evaluate` and its report.

    {"queries": 5924, "prefixes": [{"1": 40.1, ...}, ...], "learners": [{"1": 40.1, ...}, ...]}: the first prefix is
    the first learner, the last one the whole ensemble. None if no two images share a label.
    """
    vectors, labels = index.vectors(index.ids), source.part.labels
    weighting = source.model.weighting
    if queries is not None:
        asked = queries.vectors(range(len(queries.ids)), progress)
        gallery = {"gallery": vectors, "gallery_labels": labels}
        return recall_figures(asked, index.groups, queries.part.labels, weighting, progress, **gallery)
    if len(np.unique(labels)) == len(labels):
        return None
    repeats = REPEATS if dataset.protocol == "repeated-gallery" else None
    return recall_figures(vectors, index.groups, labels, weighting, progress, repeats=repeats)


def recall_figures(
    vectors: Floats,
    groups: tuple[int, ...],
    labels: NDArray[Any],
    weighting: Weighting,
    progress: Progress | None,
    **options: Any,
) -> dict[str, Any]:
    # Test-time vectors do as well as raw embeddings: the learners' parts are brought to length 1 and weighed again.
    measuring = progress and partial(progress, "measuring recall")
    result = evaluate_ensemble(
        vectors, groups, labels, KS, weighting=weighting, ranking=False, progress=measuring, **options
    )

    def row(name: str) -> dict[str, float]:
        return {str(k): round(float(value), 3) for k, value in result.recall[name].items()}

    learners = [row(f"learner-{m + 1}") for m in range(len(groups))]
    prefixes = [learners[0], *(row(f"prefix-{m}") for m in range(2, len(groups) + 1))]
    return {"queries": result.queries, "prefixes": prefixes, "learners": learners}
