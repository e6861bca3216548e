"""`Collection`: a store together with the model and the pictures that it was made from."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bier import files
from bier.collection.encoding import STAMP, about_model, is_same_file
from bier.data import Part, list_images
from bier.data.records import UNLABELLED
from bier.errors import DataError, ModelError, SearchError
from bier.evaluate.thresholds import kept_threshold, why_none
from bier.images import Box
from bier.images import Source as Picture
from bier.models.embed import inputs_for
from bier.models.model import Model, Untrained, load
from bier.search import Entry, Id, Index, Label, Store, is_store_uri, open_store
from bier.search.engines import FORMS
from bier.search.files import locked
from bier.search.rerank import Match, search_one
from bier.search.sources import Progress, Source
from bier.search.store import Floats, checked_ids, checked_model, without_secrets

VOTERS = 5  # of the nearest images, on the name of an image
BATCH = 4_096  # images that are encoded and added to a store at once; what an interruption may cost
OURS = ("_path", "_box", STAMP)  # keys of the metadata that are no columns of a user's table


class Changes(NamedTuple):
    """What `Collection.add` has found: images of the source that are new, changed and unchanged, and others.

    gone: images of the collection whose files are no longer where the source was listed, or cannot be read; pruned:
    whether they were removed. outside: how many images lie outside of the collection's folder, and have their whole
    path as an id. moved: where the collection's folder was before.
    """

    new: int
    changed: int
    unchanged: int
    gone: int
    pruned: bool = False
    outside: int = 0
    moved: str | None = None


class Name(NamedTuple):
    """What `Collection.label` calls an image, and why.

    answer: "same" where images of the collection reach the model's threshold, "unknown" where none does, "similar"
        where the model keeps no threshold: then the name is that of similar images, which may be of another kind.
    label: None where it is unknown.
    confidence: the share of the vote for this label, from 0 to 1.
    similarity, decided_by: of the nearest image with this label; where it is unknown, of the nearest image.
    """

    image: str
    answer: str
    label: str | None
    confidence: float
    similarity: float | None
    decided_by: Id | None


class Collection:
    """Images that can be searched: a store, the model that encodes queries, and where the pictures are.

    Args:
        store: the vectors, with ids, labels and metadata.
        model: encodes queries; it must have the learners of the store. None: the one that the store names.
        picture: where the picture of an id is, and its box; None: as id and metadata say.
        title: the name that the page shows.
        recall: recall figures for the page, or None.
        notes: what a person should know, such as images that were left out.
    """

    def __init__(
        self,
        store: Store,
        model: Model | Path | Untrained | None = None,
        picture: Callable[[Id], tuple[Picture, Box | None]] | None = None,
        title: str = "",
        recall: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.store, self._reference = store, model
        self.picture = picture or self._picture
        self.title, self.recall, self.notes = title, recall, tuple(notes)
        self._model: Model | None = None
        self.changed = False
        if isinstance(model, Model):
            self._model = self._checked(model)

    @classmethod
    def open(cls, target: str | Path, model: Path | Untrained | None = None) -> "Collection":
        """The collection of an index, of a run that has one, or of a store's URI."""
        text = str(target)
        store = open_store(text) if is_store_uri(text) else Index.load(_index_folder(text))
        return cls(store, model, title=files.name_text(Path(without_secrets(text)).name))

    @property
    def model(self) -> Model:
        """The model, loaded when it is first needed: its fingerprint must be the one that the store names."""
        if self._model is None:
            assert not isinstance(self._reference, Model)
            self._model = self._checked(_load_model(self.store, self._reference))
        return self._model

    def _checked(self, model: Model) -> Model:
        if tuple(model.groups) != tuple(self.store.groups):
            raise ModelError(
                f"The model must have the learners of the collection, {tuple(self.store.groups)}. "
                f"Got {tuple(model.groups)} instead."
            )
        return model

    def close(self) -> None:
        self.store.close()

    @property
    def root(self) -> Path | str | None:
        """The folder or the URL that ids start from."""
        root = self.store.about.get("root")
        if not isinstance(root, str) or not root:
            return None
        place = files.place_of(root)
        return files.file_named(place) if isinstance(place, Path) else place

    def path(self, entry: Entry) -> Path | str:
        """The file of an entry, as its metadata or its id say; text is a URL."""
        metadata = entry.metadata or {}
        name = str(metadata.get("_path", metadata.get("path", entry.id)))
        if files.is_url(name):
            return files.place_of(name)
        root = self.root
        if isinstance(root, str):
            return f"{root}/{name}"
        return files.file_named((root or Path()) / name)

    def _picture(self, one: Id) -> tuple[Picture, Box | None]:
        entry = self.store.entries([one])[0]
        box = (entry.metadata or {}).get("_box")
        return self.path(entry), None if box is None else tuple(box)

    def find(self, file: Path) -> Entry | None:
        """The entry of a file that is itself in the collection, or None."""
        names = [str(file), os.path.abspath(file), str(file.resolve())]  # noqa: PTH100 - with links as they are
        if isinstance(self.root, Path):
            names += [Path(name).relative_to(root).as_posix() for name in names for root in _parents(name, self.root)]
        ids = self.store.known([*dict.fromkeys(map(files.name_text, names))])
        for entry in self.store.entries(ids):
            path = self.path(entry)
            if isinstance(path, Path) and path.exists() and path.samefile(file):
                return entry
        return None

    def is_current(self, entry: Entry) -> bool:
        """Whether the vector of an entry is that of its whole file as it is now, as far as can be known."""
        metadata = entry.metadata or {}
        return "_box" not in metadata and is_same_file(metadata.get(STAMP), self.path(entry))

    def add(
        self, source: Source, prune: bool = False, skip_broken: bool = False, progress: Progress | None = None
    ) -> Changes:
        """Encode what is new or has changed since it was added, and find what is gone. An index must be saved then.

        prune: remove what is gone. skip_broken: leave out images that cannot be read; what is unchanged is not read.
        """
        checked_model(self.store.about, source.about, "The collection")
        if tuple(source.groups) != self.store.groups:
            raise SearchError(
                f"The collection holds vectors of groups {self.store.groups}. Got {tuple(source.groups)} instead."
            )
        rows = _Rows(self, source)
        counts = {"new": 0, "changed": 0, "unchanged": 0}
        broken: list[Id] = []  # of the collection, which have been replaced by what cannot be read
        for block in rows.blocks():
            needed = [row for row, state in block if state != "unchanged"]
            if needed and skip_broken:
                needed = source.readable(needed, progress)
            kept = set(needed)
            for row, state in block:
                counts[state] += state == "unchanged" or row in kept
                if state == "changed" and row not in kept:
                    broken.append(rows.ids[row])
            if needed:
                vectors = source.vectors(needed, progress)
                described = zip(needed, source.described(needed), strict=True)
                metadata = [rows.metadata(row, told) for row, told in described]
                labels = [rows.labels[row] for row in needed]
                self.store.add(vectors, [rows.ids[row] for row in needed], labels, metadata, replace=True)
            if progress is not None:
                progress("adding images", sum(counts.values()), len(rows.ids))
        gone = [*rows.gone(), *broken]
        if gone and prune:
            self.store.remove(gone)
        self.store.optimize()
        self.changed = bool(counts["new"] or counts["changed"] or (gone and prune) or rows.moved)
        return Changes(**counts, gone=len(gone), pruned=prune, outside=rows.outside, moved=rows.moved)

    def label(
        self,
        images: Path | str | Part | Sequence[Path],
        k: int = VOTERS,
        learners: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Name]:
        """Name images by a vote of the k nearest that reach the model's threshold, each weighted by its similarity.

        images: a folder, a table or files. An image that is itself in the collection does not vote on its own name.
        """
        if isinstance(images, Path | str):
            images = list_images(images)
        if not isinstance(images, Part):
            images = Part(tuple(images), np.full(len(images), UNLABELLED), ())
        if not len(images):
            return []
        inputs = inputs_for(images, self.model.backbone)
        vectors = self.model.encode(inputs, learners=learners, progress=progress)
        threshold = kept_threshold(self.model.metadata, learners)
        return [
            self._name(image, vector, k, learners, threshold)
            for image, vector in zip(images.images, vectors, strict=True)
        ]

    def _name(self, image: Any, vector: Floats, k: int, learners: int | None, threshold: float | None) -> Name:
        own = self.find(image) if isinstance(image, Path) else None
        matches = search_one(self.store, vector, k, learners=learners, without=own and own.id)
        entries = self.store.entries([match.id for match in matches])
        votes: dict[str, float] = {}
        decided: dict[str, Match] = {}  # the nearest of each label
        for match, entry in zip(matches, entries, strict=True):
            if entry.label is not None and (threshold is None or match.similarity >= threshold):
                label = str(entry.label)
                votes[label] = votes.get(label, 0.0) + max(match.similarity, 1e-6)
                decided.setdefault(label, match)
        if not votes:
            nearest = matches[0] if matches else None
            return Name(str(image), "unknown", None, 0.0, nearest and nearest.similarity, nearest and nearest.id)
        winner = max(votes, key=votes.__getitem__)
        share, match = votes[winner] / sum(votes.values()), decided[winner]
        return Name(str(image), "similar" if threshold is None else "same", winner, share, match.similarity, match.id)

    def threshold(self, learners: int | None = None) -> float:
        """The similarity from which the model counts two images as the same; an error where it keeps none."""
        threshold = kept_threshold(self.model.metadata, learners)
        if threshold is not None:
            return threshold
        raise SearchError(
            f"The model must keep a threshold for --same. It has none: {self.why_no_threshold()}. Give one with "
            "--threshold; bier evaluate shows what each reaches."
        )

    def why_no_threshold(self) -> str:
        """Why the model keeps no threshold, and what would give one."""
        record = self.model.metadata.get("same")
        return why_none(record) if record else "it was not found when the model was made"


class _Rows:
    """The rows of a source as they are called in a collection."""

    def __init__(self, collection: Collection, source: Source) -> None:
        self.collection, self.store, self.source = collection, collection.store, source
        self.moved: str | None = None
        self.outside = 0
        self.labels: list[Label] = [None] * len(source.ids) if source.labels is None else list(source.labels)
        self.root = files.place_of(source.about["root"]) if source.about.get("root") else None
        self.ids: list[Id] = checked_ids(self._translated())

    def _translated(self) -> list[Id]:
        """Paths below the collection's folder start from there. Others are whole paths."""
        here, there = self.collection.root, self.root
        if there is None or there == here:
            return list(self.source.ids)
        if isinstance(here, Path) and _is_moved(here, there) and self.store.known(self.source.ids[:BATCH]):
            if not isinstance(self.store, Index):
                raise SearchError(
                    f"The folder of the collection, {here}, is no longer there. If it is {there} now, load it again "
                    "with --rebuild."
                )
            self.moved, self.store.about["root"] = str(here), self.source.about["root"]
            return list(self.source.ids)
        return [self._translate(one) for one in self.source.ids] if isinstance(here, str) else self._below(here)

    def _translate(self, one: Id) -> Id:
        if not isinstance(one, str) or files.is_url(one):
            return one
        if isinstance(self.root, str):
            return f"{self.root}/{one}"
        assert self.root is not None
        return files.name_text(os.path.normpath(self.root / one))

    def _below(self, here: Path | None) -> list[Id]:
        place = self.source.place if isinstance(self.root, Path) and self.source.place else None
        roots = [] if here is None else [files.name_text(here) + os.sep]
        ids: list[Id] = []
        for one in self.source.ids:
            path = self._translate(one)
            tried = [path]
            if place is not None and isinstance(one, str):
                tried.insert(0, files.name_text(os.path.normpath(place / one)))  # a link inside the collection's folder
            inside = [str(name)[len(root) :] for name in tried for root in roots if str(name).startswith(root)]
            self.outside += not inside
            ids.append(inside[0].replace(os.sep, "/") if inside else path)
        if here is not None and self.source.by_folder and self.outside < len(ids):
            self._label_as(here, ids)
        return ids

    def _label_as(self, here: Path, ids: list[Id]) -> None:
        """The labels that the images have in a listing of the collection's folder."""
        try:
            part = list_images(here)
        except DataError:
            return
        names = part.label_names() or [None] * len(part)
        known = dict(zip(part.ids or (), names, strict=True))
        for row, one in enumerate(ids):
            if one in known:
                self.labels[row] = known[str(one)]

    def metadata(self, row: int, told: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """What is stored with a row; the path of a file that has several boxes is translated as its id."""
        if told and "_path" in told:
            return {**told, "_path": str(self.ids[row]).rpartition("#")[0]}
        return told

    def blocks(self) -> Iterator[list[tuple[int, str]]]:
        """Rows in blocks, each with "new", "changed" or "unchanged"."""
        for start in range(0, len(self.ids), BATCH):
            rows = range(start, min(start + BATCH, len(self.ids)))
            known = self.store.known([self.ids[row] for row in rows])
            entries = {entry.id: entry for entry in self.store.entries(known)}
            yield [(row, self._state(row, entries.get(self.ids[row]))) for row in rows]

    def _state(self, row: int, entry: Entry | None) -> str:
        if entry is None:
            return "new"
        label = self.labels[row]
        if (None if label is None else str(label)) != (None if entry.label is None else str(entry.label)):
            return "changed"
        metadata, told = entry.metadata or {}, (self.source.metadata[row] if self.source.metadata else None) or {}
        if columns(metadata) != columns(told) or metadata.get("_box") != told.get("_box"):
            return "changed"
        return "unchanged" if self.source.is_unchanged(row, metadata.get(STAMP)) else "changed"

    def gone(self) -> list[Id]:
        """Ids in the place that was listed whose files are not there any more, or have other boxes now."""
        place = self.source.place
        if place is None:
            return []
        listed = set(self.ids)
        files_of = {str(one).rpartition("#")[0] for one in self.ids if "#" in str(one)} | set(map(str, self.ids))
        gone: list[Id] = []
        for one in self.store.ids:
            if one in listed or not isinstance(one, str):
                continue
            name = one if one in files_of or "#" not in one else one.rpartition("#")[0]
            path = self.collection.path(Entry(name))
            if not isinstance(path, Path) or not _is_below(path, place):
                continue
            if (name in files_of and not self.source.by_folder) or (
                name not in files_of and (self.source.by_folder or not path.exists())
            ):
                gone.append(one)
        return gone


def columns(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns of a user's table in the metadata of an image."""
    return {key: value for key, value in (metadata or {}).items() if key not in OURS}


def _parents(name: str, root: Path) -> list[Path]:
    return [folder for folder in {root, root.resolve()} if Path(name).is_relative_to(folder)]


def _is_moved(here: Path, there: Path | str) -> bool:
    return not here.is_dir() and isinstance(there, Path) and there.is_dir()


def _is_below(path: Path, place: Path) -> bool:
    return path.is_relative_to(place) or path.is_relative_to(place.resolve())


@contextmanager
def changing(target: str, create: Source | None = None, rebuild: bool = False) -> Iterator[Collection]:
    """A collection to be changed: an index is locked from the start, and saved at the end.

    create: create a store that is missing for the vectors of this source. rebuild: empty it first.
    """
    if create is not None and not is_store_uri(target):
        raise SearchError(f"The '--store' option must be {FORMS}. Got {without_secrets(target)!r} instead.")
    if is_store_uri(target):
        opened = open_store(target, create.groups, create.about, rebuild) if create else open_store(target)
        with closing(Collection(opened)) as collection:
            yield collection
        return
    folder = _index_folder(target)
    # Until it is saved: of two that add at once, the second would save an index without what the first has added.
    with locked(folder), closing(Collection(Index.load(folder))) as collection:
        assert isinstance(collection.store, Index)
        yield collection
        if collection.changed:
            collection.store.save_locked(folder)


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


def _load_model(store: Store, model: Path | Untrained | None) -> Model:
    """The model that computed a collection's vectors, or the one given instead; the fingerprint must be the same."""
    record = store.about.get("model") or {}
    if not isinstance(record, Mapping) or not all(isinstance(value, str) for value in record.values()):
        raise SearchError("The collection's record of its model must be texts. It is damaged; give it with --model.")
    path = model or _recorded_model(record)
    if path is None:
        raise SearchError("The collection does not say which model computed it. Give it with --model.")
    if isinstance(path, Path) and not path.exists():
        raise SearchError(f"The collection's model must be at {path}. It is no longer there; give it with --model.")
    for fast in (False, True):  # queries are encoded by the look of the collection
        if record.get("fingerprint", "") in ("", about_model(path, fast)["fingerprint"]):
            return load(path, fast=fast)
    raise SearchError(
        f"The model {path} must be the one that computed the collection. It has other weights; index again."
    )


def _recorded_model(record: Mapping[str, str]) -> Path | Untrained | None:
    """The model that `about_model` has described."""
    if record.get("backbone"):
        return Untrained(record["backbone"], Path(record["weights"]) if record.get("weights") else None)
    return Path(record["path"]) if record.get("path") else None
