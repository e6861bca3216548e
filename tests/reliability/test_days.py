"""Days: sequences of ordinary commands over a small folder of pictures, drawn by hypothesis.

A user trains, adds, replaces, deletes and renames, resumes, evaluates, indexes, searches, and keeps files of his own
beside ours. After every command: his files are there, byte for byte; what was measured was not trained on, or is listed
as a part of its own; every answer is that of brute force over the contents that were indexed; and a command has done
its work or says in one line why not, as it should.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from PIL import Image

import bier
from bier.data import Part
from bier.evaluate.dataset import NEW
from bier.runs import Run

SMALL = (
    *("model.backbone=conv4", "model.pretrained=false", "model.embedding=6", "diversity.hidden=4"),
    *("train.batch_classes=2", "train.batch_images=2", "train.log_every=1", "train.precision=float32"),
    *("train.optimizer=sgd", "data.validation=0"),
)
NOTES = ("bier: left out of ", " since training", "bier: The data set is not what it was")  # lines before the last
CLOSE = 2e-4
PICK = st.integers(0, 10**6)  # chooses among what there is at that moment
SELDOM = st.integers(0, 9).map(lambda number: number == 9)


@dataclass
class Seen:
    """What the commands have really read: the training part, and each measured part with its raw embeddings."""

    trained: list[Part] = field(default_factory=list)
    measured: dict[str, tuple[Part, NDArray[np.float32]]] = field(default_factory=dict)
    commands: Counter[str] = field(default_factory=Counter)


@dataclass
class TrainedRun:
    """A run as it must be: the pictures of each part when it began, and its steps."""

    train: set[str]
    test: set[str]
    steps: int = 2

    @property
    def classes(self) -> set[str]:
        return set(map(class_of, self.train | self.test))


@dataclass
class Indexed:
    """An index as it must be: its model and the content of each row when it was encoded."""

    run: Path
    weights: str
    rows: dict[str, bytes]


def class_of(name: str) -> str:
    return name.split("/")[0]


def by_class(names: set[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(class_of(name), set()).add(name)
    return found


class Days(RuleBasedStateMachine):
    def __init__(self, attack: Callable[..., Any], seen: Seen, tmp_path: Path, tally: Any) -> None:
        super().__init__()
        self.attack, self.seen, self.tally = attack, seen, tally
        self.place = Path(tempfile.mkdtemp(dir=tmp_path))
        self.photos, self.contents = self.place / "photos", self.place / "contents"
        self.contents.mkdir()
        self.theirs: dict[Path, bytes] = {}  # every file of the user's
        self.runs: dict[Path, TrainedRun] = {}
        self.indexes: dict[Path, Indexed] = {}
        self.vectors: dict[tuple[str, bytes], NDArray[np.float32]] = {}
        self.drawn = self.names = 0
        self.held = True

    def teardown(self) -> None:
        """Every day ends with an evaluation, an addition and a search."""
        try:
            if self.held and self.runs:
                self.evaluate(pick=self.drawn, report=False, cached=True)
                if not self.indexes:
                    self.index(pick=self.drawn, other=0, anew=True, inside=True)
                self.add(pick=self.drawn, part=self.drawn, whole=self.drawn % 2 > 0, prune=self.drawn % 3 > 0)
                self.search(pick=self.drawn, file=self.drawn, k=100)
                self.held = True
        finally:
            self.tally.case("days: sequences", self.held)
            shutil.rmtree(self.place)

    @invariant()
    def ended_well(self) -> None:
        """Only after a rule whose checks have all held."""
        self.held = True

    # What the user does to his files

    def write(self, path: Path, in_place: bool = False, keep_time: bool = False, content: bytes | None = None) -> None:
        """A picture that was never there before; all have the same number of bytes."""
        before = path.stat() if path.exists() else None
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path if in_place else path.with_name(".new")
        if content is None:
            self.drawn += 1
            pixels = np.random.default_rng(self.drawn).integers(0, 256, (16, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(target, "BMP")
        else:
            target.write_bytes(content)
        if keep_time and before is not None:
            os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        target.replace(path)
        self.theirs[path] = path.read_bytes()

    def fresh(self) -> str:
        self.names += 1
        return f"class {self.names}"

    @property
    def pictures(self) -> dict[str, bytes]:
        """The pictures that a listing must have, by their paths; those within a folder of ours are none."""
        ours = (*self.runs, *self.indexes)
        return {
            path.relative_to(self.photos).as_posix(): content
            for path, content in self.theirs.items()
            if path.suffix == ".bmp" and path.is_relative_to(self.photos)
            if not any(path.is_relative_to(folder) for folder in ours)
        }

    @property
    def labelled(self) -> set[str]:
        return {name for name in self.pictures if "/" in name}

    def picked(self, names: Any, number: int) -> Any:
        names = sorted(names)
        return names[number % len(names)]

    @initialize(inside=st.booleans())
    def begin(self, inside: bool) -> None:
        for _ in range(5):
            name = self.fresh()
            for number in range(2):
                self.write(self.photos / name / f"{number}.bmp")
        self.train(method="baseline", inside=inside)

    @rule(count=st.integers(1, 3))
    def add_class(self, count: int) -> None:
        name = self.fresh()
        for number in range(count):
            self.write(self.photos / name / f"{number}.bmp")

    @rule(pick=PICK, loose=SELDOM)
    def add_picture(self, pick: int, loose: bool) -> None:
        folder = self.photos if loose else self.photos / self.picked(by_class(self.labelled), pick)
        self.names += 1
        self.write(folder / f"added {self.names}.bmp")

    @rule(pick=PICK, in_place=st.booleans(), keep_time=st.booleans())
    def replace_picture(self, pick: int, in_place: bool, keep_time: bool) -> None:
        self.write(self.photos / self.picked(self.pictures, pick), in_place, keep_time)

    @rule(pick=PICK)
    def touch_picture(self, pick: int) -> None:
        (self.photos / self.picked(self.pictures, pick)).touch()

    @precondition(lambda self: len(self.labelled) > 6)
    @rule(pick=PICK)
    def delete_picture(self, pick: int) -> None:
        path = self.photos / self.picked(self.pictures, pick)
        path.unlink()
        del self.theirs[path]

    @precondition(lambda self: len(by_class(self.labelled)) > 4)
    @rule(pick=PICK)
    def delete_class(self, pick: int) -> None:
        folder = self.photos / self.picked(by_class(self.labelled), pick)
        shutil.rmtree(folder)
        self.theirs = {path: content for path, content in self.theirs.items() if not path.is_relative_to(folder)}

    @rule(pick=PICK, back=st.booleans())
    def rename_class(self, pick: int, back: bool) -> None:
        """To a new name, or to the first one that no class has any more."""
        old = self.photos / self.picked(by_class(self.labelled), pick)
        free = [name for number in range(self.names) if not (self.photos / (name := f"class {number}")).exists()]
        new = self.photos / (free[-1] if back and free else self.fresh())
        old.rename(new)
        self.theirs = {
            new / path.relative_to(old) if path.is_relative_to(old) else path: content
            for path, content in self.theirs.items()
        }

    @rule(
        pick=PICK,
        inside=st.sampled_from(("", "model", "checkpoints", "report", "data-2023")),
        name=st.sampled_from(("notes.txt", "mine.bmp", "mine/1.bmp")),
    )
    def put_beside_ours(self, pick: int, inside: str, name: str) -> None:
        folder = self.picked((*self.runs, *self.indexes), pick) / inside
        self.names += 1
        self.write(folder / name, content=None if name.endswith(".bmp") else f"note {self.names}".encode())

    # Commands

    def run(self, *arguments: object, works: bool | None = True) -> Any:
        """What the command printed, None if it was refused. works: whether it must do its work; None: either."""
        self.held = False
        self.seen.commands[str(arguments[0])] += 1
        self.seen.trained.clear()
        self.seen.measured.clear()
        ended = self.attack(*arguments, "--json", limit=300)
        *before, last = ended.said.splitlines() or [""]
        told = f"{' '.join(map(str, arguments))} ended with {ended.code}: {ended.said}"
        for path, content in self.theirs.items():
            if not path.is_file() or path.read_bytes() != content:
                self.tally.case("days: files", lost=True, note=str(path))
                raise AssertionError(f"{path} is not what the user has written. {told}")
        assert ended.code in ((0, 2) if works is None else (0,) if works else (2,)), told
        assert "Traceback" not in ended.said, told
        if ended.code == 0:
            return json.loads(ended.out)
        assert all(any(note in line for note in NOTES) for line in before), told
        assert last.startswith("bier: "), told
        assert ended.out == "", told
        return None

    def refused(self, *arguments: object) -> None:
        self.run(*arguments, works=False)

    @rule(method=st.sampled_from(("baseline", "bier")), inside=st.booleans())
    def train(self, method: str, inside: bool) -> None:
        self.names += 1
        out = (self.photos if inside else self.place) / "runs" / f"run-{self.names}"
        chosen = [word for one in (*SMALL, f"seed={self.names}") for word in ("--set", one)]
        data = ("--data", "folder", "--root", self.photos, "--method", method)
        self.run("train", *data, "--out", out, "--steps", 2, *chosen)
        trained = self.just_trained()
        record = Run(out).images
        assert record is not None
        divided = {split: {one.path for one in record if one.split == split} for split in ("train", "test")}
        assert divided["train"] == trained
        assert divided["train"] | divided["test"] == self.labelled
        assert not {*map(class_of, trained)} & {*map(class_of, divided["test"])}
        self.runs[out] = TrainedRun(trained, divided["test"])

    def just_trained(self) -> set[str]:
        (part,) = self.seen.trained
        return {Path(str(path)).relative_to(self.photos).as_posix() for path in part.images}

    @rule(pick=PICK)
    def train_into_a_folder_that_is_taken(self, pick: int) -> None:
        theirs = [path.parent for path in self.theirs]
        out = self.picked({*theirs, *self.runs, *self.indexes, self.photos}, pick)
        self.refused("train", "--data", "folder", "--root", self.photos, "--out", out, "--steps", 2)

    @rule(pick=PICK, further=st.integers(0, 2))
    def resume(self, pick: int, further: int) -> None:
        path = self.picked(self.runs, pick)
        run, there = self.runs[path], self.labelled
        complete = run.classes <= set(map(class_of, (run.train | run.test) & there))
        if self.run("train", "--resume", path, "--steps", run.steps + further, works=complete) is not None:
            run.steps += further
            if self.seen.trained:
                assert self.just_trained() == run.train & there

    @rule(pick=PICK, report=SELDOM, cached=st.booleans())
    def evaluate(self, pick: int, report: bool, cached: bool) -> None:
        path = self.picked(self.runs, pick)
        run, there = self.runs[path], self.labelled
        expected, new = run.test & there, {name for name in there if class_of(name) not in run.classes}
        options = [*(() if report else ("--no-report",)), *(("--cache", self.place / "cache") if cached else ())]
        can = len(expected) > 1 and any(len(names) > 1 for names in by_class(expected).values())
        told = self.run("evaluate", path, *options, works=None if report or not can else True)
        if told is None:
            return
        self.check_measured(path, "test", expected)
        assert not set(map(class_of, expected)) & set(map(class_of, run.train))
        assert (told["measured"]["images"], told["queries"]) == (len(expected), len(expected))
        if len(new) > 1:
            self.check_measured(path, NEW, new)
            assert sorted(told["new_classes"]["names"]) == sorted(by_class(new))
        assert ("new_classes" in told) == (len(new) > 1)
        left = set(map(class_of, (run.train | run.test) & there))
        assert set(told.get("gone_classes", ())) == run.classes - left

    def check_measured(self, run: Path, name: str, expected: set[str]) -> None:
        """The pictures are these, as they are now."""
        part, raw = self.seen.measured[name]
        names = [Path(str(path)).relative_to(self.photos).as_posix() for path in part.images]
        assert sorted(names) == sorted(expected)
        assert [part.classes[label] for label in part.labels] == list(map(class_of, names))
        vectors = self.encoded(run, [self.pictures[name] for name in names])
        np.testing.assert_allclose(bier.load(run).vectors(raw), vectors, atol=CLOSE)

    def weights(self, run: Path) -> str:
        return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()

    def encoded(self, run: Path, contents: list[bytes]) -> NDArray[np.float32]:
        """The vectors of pictures, each encoded from a file that no command has seen."""
        weights = self.weights(run)
        if new := [content for content in dict.fromkeys(contents) if (weights, content) not in self.vectors]:
            paths = [self.contents / f"{hashlib.sha256(content).hexdigest()}.bmp" for content in new]
            for path, content in zip(paths, new, strict=True):
                path.write_bytes(content)
            made = bier.load(run).encode(paths)
            self.vectors |= {(weights, content): vector for content, vector in zip(new, made, strict=True)}
        return np.stack([self.vectors[weights, content] for content in contents])

    @rule(pick=PICK, other=PICK, anew=st.booleans(), inside=st.booleans())
    def index(self, pick: int, other: int, anew: bool, inside: bool) -> None:
        run = self.picked(self.runs, pick)
        self.names += 1
        out = (self.photos if inside else self.place) / f"{self.names}.index"
        if self.indexes and not anew:
            out = self.picked(self.indexes, other)
        told = self.run("index", run, self.photos, "--out", out)
        self.indexes[out] = Indexed(run, self.weights(run), {})
        self.indexes[out].rows = self.pictures
        assert told["images"] == len(self.pictures)
        self.encoded(run, list(self.pictures.values()))

    @rule(pick=PICK)
    def index_into_a_folder_of_the_users(self, pick: int) -> None:
        run = self.picked(self.runs, 0)
        folders = {path.parent for path in self.theirs} - {*self.runs, *self.indexes}
        self.refused("index", run, self.photos, "--out", self.picked({*folders, self.photos}, pick))

    @precondition(lambda self: self.indexes)
    @rule(pick=PICK, part=PICK, whole=st.booleans(), prune=st.booleans())
    def add(self, pick: int, part: int, whole: bool, prune: bool) -> None:
        path = self.picked(self.indexes, pick)
        index = self.indexes[path]
        start = "" if whole else f"{self.picked(by_class(self.labelled), part)}/"
        listed = {name: content for name, content in self.pictures.items() if name.startswith(start)}
        same = self.weights(index.run) == index.weights
        options = ("--prune",) if prune else ()
        told = self.run("index", index.run, self.photos / start, "--add", path, *options, works=same)
        if told is None:
            return
        gone = {name for name in index.rows if name.startswith(start) and name not in listed}
        unchanged = sum(index.rows.get(name) == content for name, content in listed.items())
        new = len(set(listed) - set(index.rows))
        index.rows = {name: content for name, content in index.rows.items() if not (prune and name in gone)} | listed
        counts = tuple(told[name] for name in ("new", "changed", "gone", "unchanged", "images"))
        assert counts == (new, len(listed) - new - unchanged, len(gone), unchanged, len(index.rows))
        self.encoded(index.run, list(listed.values()))

    @precondition(lambda self: self.indexes)
    @rule(pick=PICK, other=PICK)
    def add_with_another_model(self, pick: int, other: int) -> None:
        path, run = self.picked(self.indexes, pick), self.picked(self.runs, other)
        if self.weights(run) != self.indexes[path].weights:
            self.refused("index", run, self.photos, "--add", path)

    @precondition(lambda self: self.indexes)
    @rule(pick=PICK, file=PICK, k=st.sampled_from((1, 3, 100)))
    def search(self, pick: int, file: int, k: int) -> None:
        path = self.picked(self.indexes, pick)
        index, name = self.indexes[path], self.picked(self.pictures, file)
        same = self.weights(index.run) == index.weights
        told = self.run("search", path, self.photos / name, "-k", k, works=same)
        if told is None:
            return
        rows = {one: content for one, content in index.rows.items() if one != name}  # it does not find itself
        results = {one["id"]: one["similarity"] for one in told["results"]}
        assert len(results) == len(told["results"]) == min(k, len(rows))
        if not rows:
            return
        query = self.encoded(index.run, [self.pictures[name]])[0]
        expected = dict(zip(rows, self.encoded(index.run, list(rows.values())) @ query, strict=True))
        shown = [expected[one] for one in results]
        np.testing.assert_allclose(list(results.values()), shown, atol=CLOSE)
        assert list(results.values()) == sorted(results.values(), reverse=True)
        assert min(shown) >= max([-1.0, *(value for one, value in expected.items() if one not in results)]) - CLOSE
        labels = {one["id"]: one["label"] for one in told["results"]}
        assert labels == {one: class_of(one) if "/" in one else None for one in results}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Looks at what training and evaluation read, and changes nothing."""
    from bier.evaluate.dataset import _Reader
    from bier.training import setup

    looked, inputs, read = Seen(), setup.network_and_inputs, _Reader.read

    def inputs_seen(config: Any, backbone: Any, part: Part, *rest: Any) -> Any:
        looked.trained.append(part)
        return inputs(config, backbone, part, *rest)

    def read_seen(reader: Any, dataset: Any, name: str) -> Any:
        embedded = read(reader, dataset, name)
        looked.measured[name] = (dataset[name], embedded.z)
        return embedded

    monkeypatch.setattr(setup, "network_and_inputs", inputs_seen)
    monkeypatch.setattr(_Reader, "read", read_seen)
    return looked


@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("always::UserWarning")  # the command prints them as lines
def test_days(
    tally: Any, drawn: Callable[[int, int], settings], attack: Callable[..., Any], seen: Seen, tmp_path: Path
) -> None:
    rules = settings(drawn(25, 400), stateful_step_count=16)
    run_state_machine_as_test(lambda: Days(attack, seen, tmp_path, tally), settings=rules)  # type: ignore[arg-type]
    shown = ", ".join(f"{count:,} {name}" for name, count in sorted(seen.commands.items()))
    tally.remark(f"days: {sum(seen.commands.values()):,} commands: {shown}")
