"""Vectors into indexes and stores, and from what is stored back to models and images."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from bier import files
from bier.collection.encoding import about_model
from bier.errors import SearchError
from bier.evaluate.verification import kept_threshold
from bier.models.model import Model, Untrained, load
from bier.search import Entry, Id, Index, Store, is_store_uri, open_store
from bier.search.engines import FORMS
from bier.search.files import locked
from bier.search.sources import Progress, Source, Stream
from bier.search.store import checked_model, without_secrets

BATCH = 4_096  # images that are encoded and added to a store at once; what an interruption may cost


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
