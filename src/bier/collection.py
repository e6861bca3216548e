"""From a model and images to a collection that can be searched: what `bier embed`, `index`, `search` and `serve` share.

images -> `ImageSource` (a model computes their vectors) -> an embeddings file, an index or a store
a run, a folder, an index or a store -> `Collection`, which `bier serve` shows
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bier import distributed, files
from bier.config import DataConfig
from bier.data import Dataset, Part, list_images, load_for
from bier.data.part import ALL
from bier.errors import BierError, DataError, ModelError, SearchError
from bier.evaluate.dataset import REPEATS
from bier.evaluate.ensemble import evaluate_ensemble
from bier.evaluate.verification import kept_threshold
from bier.images import Box, Broken, ImageDataset
from bier.images import Source as Picture
from bier.images.decode import box_of
from bier.method.defaults import Weighting
from bier.models.backends import Backend, check_backend
from bier.models.model import Model, Untrained, description_file, load
from bier.search import Entry, Id, Index, Label, Store, is_store_uri, open_store
from bier.search.embeddings import EmbeddingsWriter
from bier.search.sources import Progress, Source, Stream, build_index
from bier.search.storage import locked
from bier.search.store import checked_model, without_secrets
from bier.search.stores import FORMS

Floats = NDArray[np.float32]
PictureOf = Callable[[Id], tuple[Picture, Box | None]]  # what `open_image` takes

KS = (1, 2, 4, 8)
BATCH = 4_096  # images that are encoded and added to a store at once; what an interruption may cost
_EVERY_IMAGE = 20_000  # recall of a collection: up to this size, every image is a query
_QUERIES = 2_000  # beyond that, this many that are drawn at random
_MOST = 500_000  # beyond that, recall is not measured: it would take too long at the start of the server
_MOST_IN_STORE = 20_000  # the same for an external store, which would have to send all of its vectors


def model_folder(path: Path) -> Path:
    """The folder with model.json: the given one, or `model` inside a run."""
    for folder in (path / "model", path):
        if description_file(folder).is_file():
            return folder
    raise ModelError(f"A model must be a folder with model.json, or a run that has one. Found none at {path}.")


def about_model(path: Path | Untrained) -> dict[str, str]:
    """Where a model is, and the checksum of its description, which contains that of the weights.

    Of an untrained backbone: its name, the file of its weights if it was given, and a digest of these weights.
    """
    if isinstance(path, Untrained):
        file = {} if path.weights is None else {"weights": str(path.weights.resolve())}
        return {"backbone": path.backbone, **file, "fingerprint": _untrained_fingerprint(path)}
    return {"path": str(path.resolve()), "fingerprint": files.checksum(description_file(model_folder(path)))}


_untrained_fingerprint = lru_cache(Untrained.fingerprint)  # it builds the network


def fingerprint(model: Mapping[str, str], part: Part, backend: Backend = "torch") -> str:
    """A digest of all that vectors and what is stored with them depend on: model, images, boxes, ids and labels."""
    # model.json, whose checksum `about_model` gives, has the checksum of the weights and the size of prepared images.
    known = [model["fingerprint"], None if part.ids is None else list(part.ids), part.label_names()]
    known += [backend] if backend != "torch" else []  # so that one file holds the vectors of one engine
    return files.digest_of(part.images, part.boxes, [json.dumps(known).encode()])


def no_image_readable(count: int) -> DataError:
    return DataError(f"At least one of the {count} images must be readable. Found none.")


def root_text(part: Part) -> str | None:
    """Where the paths of a part start from, as it is kept beside vectors."""
    return files.name_text(part.root.resolve()) if isinstance(part.root, Path) else part.root


# From images to vectors


class ImageSource:
    """Images and the model that computes their vectors. Images that cannot be read are left out with `skip_broken`.

    Args:
        run: a run, the folder of a model or an untrained backbone.
        part: the images, as `list_images` returns them or as a part of a data set.
        cache: a folder for prepared images.
        backend: what runs the network, see `Model.encode`.
    """

    def __init__(
        self,
        run: Path | Untrained,
        part: Part,
        *,
        cache: Path | None = None,
        skip_broken: bool = False,
        workers: int | None = None,
        progress: Progress | None = None,
        backend: Backend = "torch",
    ) -> None:
        about = about_model(run)
        self.model: Model = load(run, device=distributed.device())
        check_backend(backend, self.model.device)
        self.backend: Backend = backend
        size, reading = self.model.backbone.resize, progress and partial(progress, "reading images")
        self._prepared = ImageDataset(part.images, size, part.boxes, cache, skip_broken, workers, reading, shared=True)
        self._workers = workers
        self.part = part.select(self._prepared.kept)
        if not len(self.part):
            raise no_image_readable(len(part))
        self.ids: Sequence[Id] = self._prepared.kept.tolist() if self.part.ids is None else self.part.ids
        self.labels: Sequence[Label] | None = self.part.label_names()
        self.groups = self.model.groups
        self.about: Mapping[str, Any] = {
            "model": about,
            "root": root_text(part),
        }

    @property
    def skipped(self) -> list[Broken]:
        """The images that cannot be read."""
        return self._prepared.broken

    def raw(self, rows: Sequence[int], batch_size: int = 64, progress: Progress | None = None) -> Floats:
        """The raw embeddings (n, d) of some rows."""
        some = self._prepared.only(self._prepared.kept[list(rows)])
        follow = progress and partial(progress, "encoding images")
        return self.model.embed_raw(some, batch_size, self._workers, follow, backend=self.backend)

    def vectors(self, rows: Sequence[int], progress: Progress | None = None) -> Floats:
        """The test-time vectors (n, d) of some rows."""
        return self.model.vectors(self.raw(rows, progress=progress))

    def stream(self, blocks: Iterable[Sequence[int]]) -> Iterator[tuple[Sequence[int], Floats]]:
        """The vectors of one block of rows after the other."""
        return ((rows, self.vectors(rows)) for rows in blocks)


def write_embeddings(source: ImageSource, out: Path, batch_size: int = 64, progress: Progress | None = None) -> int:
    """Write an embeddings file; the number of images that an interrupted pass had done before.

    Under torchrun each process computes its share of the shards.
    """
    rank, world = distributed.rank(), distributed.world()
    made_from = fingerprint(source.about["model"], source.part, source.backend)
    writer = EmbeddingsWriter(out, len(source.ids), made_from)
    with writer.locked() if rank == 0 else nullcontext():
        resumed = writer.begin() if rank == 0 else 0
        distributed.barrier()
        mine = list(writer.share(rank, world))
        done, total = 0, sum(len(rows) for _, rows, _ in mine)
        for number, rows, is_done in mine:
            if not is_done:
                raw = source.raw(rows, batch_size, _shifted(progress, done, total))
                writer.write(number, source.model.vectors(raw), raw)
            done += len(rows)
            if progress is not None:
                progress("encoding images", done, total)
        distributed.barrier()
        if rank == 0:
            known = {"groups": list(source.groups), "weighting": source.model.weighting}
            writer.finish({**source.about, "paths": list(source.ids), "labels": source.labels, **known})
    return resumed


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    return None if progress is None else lambda step, done, _: progress(step, before + done, total)


def fill_store(source: Stream, uri: str, rebuild: bool = False, progress: Progress | None = None) -> tuple[int, int]:
    """Add what an external store does not have yet, batch by batch; (images in the store, images that were added)."""
    if not is_store_uri(uri):
        raise SearchError(f"The '--store' option must be {FORMS}. Got {without_secrets(uri)!r} instead.")
    with closing(open_store(uri, source.groups, source.about, rebuild)) as store:
        added = _add_missing(source, store, progress)
        return len(store), added


def add_to_collection(source: Source, target: str, progress: Progress | None = None) -> tuple[int, int]:
    """Add what an existing index or store does not have yet; (images in it, images that were added)."""
    folder = None if is_store_uri(target) else _index_folder(target)
    # Until it is saved: of two that add at once, the second would save an index without what the first has added.
    with locked(folder) if folder else nullcontext(), closing(open_collection(target)) as store:
        name = without_secrets(target)
        if tuple(source.groups) != store.groups:
            raise SearchError(f"{name} holds vectors of groups {store.groups}. Got {tuple(source.groups)} instead.")
        checked_model(store.about, source.about, name)
        added = _add_missing(source, store, progress)
        if folder is not None and isinstance(store, Index) and added:
            store.save_locked(folder)
        return len(store), added


def _add_missing(source: Stream, store: Store, progress: Progress | None) -> int:
    there, added, ids = 0, 0, _ids_in(store, source)

    def missing() -> Iterator[list[int]]:
        nonlocal there
        for start in range(0, len(ids), BATCH):
            rows = range(start, min(start + BATCH, len(ids)))
            known = set(store.known([ids[row] for row in rows]))
            new = [row for row in rows if ids[row] not in known]
            there += len(rows) - len(new)
            if new:
                yield new
            elif progress is not None:
                progress("adding images", there + added, len(ids))

    for rows, vectors in source.stream(missing()):
        labels = None if source.labels is None else [source.labels[row] for row in rows]
        store.add(vectors, [ids[row] for row in rows], labels, replace=True)
        added += len(rows)
        if progress is not None:
            progress("adding images", there + added, len(ids))
    store.optimize()
    return added


def _ids_in(store: Store, source: Stream) -> Sequence[Id]:
    """The ids of a source in a store. Paths that start from another folder are stored as whole paths."""
    root = source.about.get("root")
    if root is None or root == store.about.get("root"):
        return source.ids
    return [str(Path(root) / one) if isinstance(one, str) else one for one in source.ids]


# From what is stored back to models and images


def open_collection(target: str) -> Store:
    """A store's URI, the folder of an index, or a run whose folder `index` is one."""
    return open_store(target) if is_store_uri(target) else Index.load(_index_folder(target))


def _index_folder(target: str) -> Path:
    folder = Path(target)
    if (folder / "manifest.json").is_file():
        return folder
    run = run_folder(folder)
    if not (run / "index" / "manifest.json").is_file():
        shown = without_secrets(target)
        raise SearchError(
            f"{shown} must be an index, a store's URI or a run with an index. Found none; "
            f"create one with: bier index {shown} IMAGES --out {Path(without_secrets(str(run))) / 'index'}"
        )
    return run / "index"


def run_folder(path: Path) -> Path:
    """The run of a model folder; any other folder is the run itself."""
    return path.parent if path.name == "model" else path


def model_of(store: Store, model: Path | Untrained | None) -> Model:
    """The model that computed a collection's vectors, or the one given instead; the fingerprint must be the same."""
    known: Mapping[str, Any] = store.about.get("model") or {}
    path = model or _recorded_model(known)
    if path is None:
        raise SearchError("The collection does not say which model computed it. Give it with --model.")
    if isinstance(path, Path) and not path.exists():
        raise SearchError(f"The collection's model must be at {path}. It is no longer there; give it with --model.")
    if known.get("fingerprint") and about_model(path)["fingerprint"] != known["fingerprint"]:
        raise SearchError(
            f"The model {path} must be the one that computed the collection. It has other weights; index again."
        )
    return load(path)


def _recorded_model(known: Mapping[str, Any]) -> Path | Untrained | None:
    """The model that `about_model` has described."""
    if known.get("backbone"):
        return Untrained(known["backbone"], Path(known["weights"]) if known.get("weights") else None)
    return Path(known["path"]) if known.get("path") else None


def threshold_of(model: Model, learners: int | None = None) -> float:
    """The similarity from which a model counts two images as the same; an error where it keeps none."""
    threshold = kept_threshold(model.metadata, learners)
    if threshold is not None:
        return threshold
    if model.metadata.get("same"):
        reason = f"none reached a precision of {model.metadata['same']['precision']:g}% when it was trained"
    else:
        reason = "it was not found when the model was made"
    raise SearchError(
        f"The model must keep a threshold for --same. It has none: {reason}. Give one with --threshold; "
        "bier evaluate shows what each reaches."
    )


def image_path(store: Store, one: Id) -> Path:
    """The file of an id: as its metadata or its id say, relative to the folder that was indexed."""
    return entry_path(store, store.entries([one])[0])


def entry_path(store: Store, entry: Entry) -> Path:
    """As `image_path`, of an entry that has been read already."""
    path = Path(str((entry.metadata or {}).get("path", entry.id)))
    return files.file_named(path if path.is_absolute() else Path(str(store.about.get("root") or ".")) / path)


def id_of_file(store: Store, file: Path) -> Id | None:
    """The id of a file that is itself in the collection, or None."""
    names = [str(file), str(file.resolve())]
    root = files.file_named(Path(store.about["root"])).resolve() if store.about.get("root") else None
    if root is not None and file.resolve().is_relative_to(root):
        names.append(file.resolve().relative_to(root).as_posix())
    known = store.known([*names, *map(files.name_text, names)])  # indexes of earlier versions have names as they are
    return known[0] if known else None


# What `bier serve` shows


@dataclass(frozen=True)
class Collection:
    """A collection with its model and pictures.

    store: the vectors, with ids and labels. model: encodes uploads; it must have the learners of the store.
    picture: where the picture of an id is, and its box. title: the name that the page shows.
    recall: what `recall_of` returned, or None. notes: what a person should know, such as images that were left out.
    """

    store: Store
    model: Model
    picture: PictureOf
    title: str = ""
    recall: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if tuple(self.model.groups) != tuple(self.store.groups):
            raise ModelError(
                f"The model must have the learners of the collection, {tuple(self.store.groups)}. "
                f"Got {tuple(self.model.groups)} instead."
            )


def stored_collection(run: Path | Untrained | None, target: str, progress: Progress | None = None) -> Collection:
    """The collection in an index or a store, with the model that it names or the one given instead."""
    store = open_collection(target)
    if store.precision == "binary":
        raise SearchError(
            f"The collection {without_secrets(target)} must keep vectors to be shown learner by learner. It keeps one "
            "bit per dimension; index it with --precision int8 or float32."
        )
    model = model_of(store, run)
    recall, title = recall_of(store, model.weighting, progress), files.name_text(Path(without_secrets(target)).name)
    return Collection(store, model, lambda one: (image_path(store, one), None), title, recall)


def image_collection(run: Path | Untrained, images: Path, progress: Progress | None = None) -> Collection:
    """The images of a folder or a table, encoded once and kept below RUN/serve. Broken ones are left out."""
    about_model(run)  # an error about the model comes first
    part, place = list_images(images), images.resolve()

    def encoded() -> tuple[Index, ImageSource]:
        source = ImageSource(run, part, skip_broken=True, progress=progress)
        made = build_index(source, progress=progress)
        made.about["recall"] = recall_of(made, source.model.weighting, progress)
        return made, source

    return _kept(run, part, place.name, {"folder": str(place)}, encoded)


def data_collection(
    run: Path | Untrained, settings: DataConfig, own: bool = True, progress: Progress | None = None
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
        return ImageSource(run, one, cache=cache, skip_broken=settings.skip_broken, progress=progress)

    def encoded() -> tuple[Index, ImageSource]:
        source = source_of(part)
        made = build_index(source, progress=progress)
        queries = source_of(dataset["query"]) if dataset.protocol == "query-gallery" else None
        made.about["recall"] = _recall_by_protocol(dataset, made, source, queries, progress)
        return made, source

    return _kept(run, part, settings.name, {"data": settings.name, "root": settings.root}, encoded)


def _dataset(run: Path | Untrained, settings: DataConfig) -> Dataset:
    """The data set of the settings. The test part of glyphs is kept: drawing takes seconds and depends on nothing."""
    if settings.name != "glyphs" or isinstance(run, Untrained):
        return load_for(settings)
    file = run_folder(run) / "serve" / f"glyphs-{settings.seed}-{settings.validation:g}.safetensors"
    try:
        kept, words = files.read_tensors(file)
        part = Part(kept["images"], kept["labels"], tuple(json.loads(words["classes"])))
        return Dataset("glyphs", {"test": part}, KS)
    except (OSError, ValueError, KeyError):
        dataset = load_for(settings)
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
) -> Collection:
    """The index of an earlier start if it is of the same images and model; otherwise a new one, which is kept.

    An untrained backbone has no folder to keep it in.
    """
    key = {**place, "images": fingerprint(about_model(run), part)}
    where = hashlib.sha256(json.dumps(dict(place), sort_keys=True).encode()).hexdigest()[:8]
    folder = run_folder(run) / "serve" / f"{name}-{where}" / "index" if isinstance(run, Path) else None
    index = None if folder is None else _read_index(folder, key)
    notes: list[str] = []
    if index is not None:
        model = load(run)
    else:
        index, source = encoded()
        model, notes = source.model, [f"left out: {broken.reason}" for broken in source.skipped]
        index.about["source"] = key
        try:
            if folder is not None:
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


def _read_index(folder: Path, key: Mapping[str, str]) -> Index | None:
    """The index in a folder, if it is complete and was built from what the key says."""
    if not folder.is_dir():
        return None
    with suppress(BierError):
        made = Index.load(folder)
        if made.about.get("source") == key and "recall" in made.about:
            return made
    return None


# Recall figures of the page


def recall_of(store: Store, weighting: Weighting, progress: Progress | None = None) -> dict[str, Any] | None:
    """Recall in percent of every prefix and every learner, each image being searched among the others.

    {"queries": 5924, "prefixes": [{"1": 40.1, ...}, ...], "learners": [{"1": 40.1, ...}, ...]}: the first prefix is
    the first learner, the last one the whole ensemble. None if no two images share a label, or if there are too many.
    Images without a label are left out. A large collection is measured with 2,000 queries drawn at random.
    """
    embedded = isinstance(store, Index)
    most = _MOST if embedded else _MOST_IN_STORE
    if not embedded and len(store) > most:  # not even the labels of a large store are fetched
        return None
    entries = [entry for entry in store.entries(store.ids) if entry.label is not None]
    names = np.array([str(entry.label) for entry in entries], dtype=np.str_)
    if len(np.unique(names)) in (0, len(names)) or len(names) > most:
        return None
    vectors = store.vectors([entry.id for entry in entries])
    drawn = np.ones(len(names), np.bool_)
    gallery: dict[str, Any] = {}
    if len(names) > _EVERY_IMAGE:
        drawn[:] = False
        drawn[np.random.default_rng(0).choice(len(names), _QUERIES, replace=False)] = True
        gallery = {"gallery": vectors[~drawn], "gallery_labels": names[~drawn]}
    return _figures(vectors[drawn], store.groups, names[drawn], weighting, progress, **gallery)


def _recall_by_protocol(
    dataset: Dataset, index: Index, source: ImageSource, queries: ImageSource | None, progress: Progress | None
) -> dict[str, Any] | None:
    """As `recall_of`, by the protocol of the data set: the numbers of `bier evaluate` and its report."""
    vectors, labels = index.vectors(index.ids), source.part.labels
    weighting = source.model.weighting
    if queries is not None:
        asked = queries.vectors(range(len(queries.ids)), progress)
        gallery = {"gallery": vectors, "gallery_labels": labels}
        return _figures(asked, index.groups, queries.part.labels, weighting, progress, **gallery)
    if len(np.unique(labels)) == len(labels):
        return None
    repeats = REPEATS if dataset.protocol == "repeated-gallery" else None
    return _figures(vectors, index.groups, labels, weighting, progress, repeats=repeats)


def _figures(
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
