"""Full and read-only disks: at every write of a command, what was there before stays whole, and one line says why.

Two ways: the N-th operation that writes is refused inside this process (opening a file to write, creating or renaming,
flushing, reserving), and a real file system of a few kilobytes, which also fails in the middle of a write.
"""

import errno
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import bier
import bier.cli
from bier.collection import ImageSource
from bier.data import list_images
from bier.errors import BierError
from bier.files import checksum
from bier.folders import RECORD
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.paper.tiny import draw_tiny_data
from bier.runs import Run
from bier.search import Index, embeddings, read_embeddings
from bier.search.sources import build_index
from bier.training import resolve
from bier.training.checkpoints import read_checkpoint

Cli = Callable[..., tuple[int, str, str]]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND


class Refusal:
    """Refuses the operation number `at` that writes below `folder`; counts them in `seen`."""

    folder: Path | None = None
    at = 0
    seen = 0
    error = errno.ENOSPC

    def count(self, path: object) -> None:
        if self.folder is None or not str(path).startswith(str(self.folder)):
            return
        self.seen += 1
        if self.seen == self.at:
            raise OSError(self.error, os.strerror(self.error), str(path))


refusal = Refusal()


def audited(event: str, arguments: tuple[Any, ...]) -> None:
    if refusal.folder is None:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
        refusal.count(arguments[0])
    elif event in ("os.rename", "os.mkdir"):
        refusal.count(arguments[1] if event == "os.rename" else arguments[0])


@pytest.fixture(scope="module", autouse=True)
def hooked() -> None:
    sys.addaudithook(audited)  # for the rest of the process; without a folder it does nothing


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, folder: Path, at: int, error: int) -> Iterator[Refusal]:
    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(handle: int, *rest: Any) -> Any:
            refusal.count(Path(f"/proc/self/fd/{handle}").readlink())
            return real(handle, *rest)

        return call

    refusal.folder, refusal.at, refusal.seen, refusal.error = folder, at, 0, error
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched(os.fsync))
        patch.setattr(os, "posix_fallocate", watched(os.posix_fallocate))
        try:
            yield refusal
        finally:
            refusal.folder = None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, features_file: Path) -> Path:
    """Models, pictures, and what the commands have written before."""
    root = tmp_path_factory.mktemp("disk")
    random = np.random.default_rng(0)
    for number in range(8):
        path = root / "photos" / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(0)
    for name in ("first", "second"):
        Model(build_backbone("conv4"), EmbeddingEnsemble(512, (4, 8))).save(root / name)
    settings = {"data.root": str(features_file), "model.embedding": 6, "diversity.hidden": 4, "train.steps": 4}
    settings |= {"train.batch_classes": 3, "train.batch_images": 3, "train.checkpoint_every": 2, "train.log_every": 1}
    settings["data.validation"] = 0.0  # whose results are lines of progress
    config = resolve("a-bier", "features", settings)
    bier.train(config, root / "whole")
    shutil.copytree(root / "whole", root / "half")
    build_index(ImageSource(root / "first", list_images(root / "photos"))).save(root / "index")
    draw_tiny_data(root / "tiny")
    for left in ("checkpoints/step-4", "model"):
        shutil.rmtree(root / "half" / left)
    return root


def tree(folder: Path) -> dict[str, str]:
    """Checksums of all files but locks, events and what is being written."""
    files = (path for path in folder.rglob("*") if path.is_file() and "tfevents" not in path.name)
    return {str(path.relative_to(folder)): checksum(path) for path in files if not path.name.startswith(".")}


class Case:
    """A command that writes into `folder`, where an older result of it lies if it `replaces` one.

    alike: whether the older and the newer result are the same.
    """

    replaces, alike = True, False

    def __init__(self, place: Path, folder: Path) -> None:
        self.place, self.folder = place, folder

    def begin(self) -> None: ...

    def arguments(self) -> tuple[object, ...]:
        raise NotImplementedError

    def read(self) -> object:
        """What is there, by the reader of the command that comes next; an error where it is not whole."""
        raise NotImplementedError


class Embed(Case):
    def begin(self, model: str = "first") -> None:
        self.folder.mkdir()

    def arguments(self, model: str = "second") -> tuple[object, ...]:
        out = self.folder / "v.safetensors"
        return ("embed", self.place / model, self.place / "photos", "--out", out, "--json")

    def read(self) -> object:
        known = read_embeddings(self.folder / "v.safetensors", raw=True)
        return known.vectors.tobytes(), known.paths, known.labels, known.model["fingerprint"]


class EmbedWithCache(Embed):
    def arguments(self, model: str = "second") -> tuple[object, ...]:
        return (*super().arguments(model), "--cache", self.folder / "cache", "--workers", 0)


class MakeIndex(Case):
    def begin(self) -> None:
        self.folder.mkdir()

    def arguments(self, model: str = "second") -> tuple[object, ...]:
        return ("index", self.place / model, self.place / "photos", "--out", self.folder / "index", "--json")

    def read(self) -> object:
        index = Index.load(self.folder / "index")
        return index.vectors(index.ids).tobytes(), index.ids, index.about["model"]["fingerprint"]


class Train(Case):
    replaces, alike = False, True

    def begin(self) -> None:
        shutil.copytree(self.place / "half", self.folder)

    def arguments(self, model: str = "second") -> tuple[object, ...]:
        return ("train", "--resume", self.folder, "--json")

    def read(self) -> object:
        """A run that has failed is what it becomes when it is resumed."""
        read_checkpoint(Run(self.folder).complete()[-1])
        bier.train(bier.Config.from_toml(self.folder / "config.toml"), self.folder, resume=True)
        return tree(self.folder)


class Evaluate(Case):
    alike = True

    def begin(self) -> None:
        self.folder.mkdir()

    def arguments(self, model: str = "second") -> tuple[object, ...]:
        data = ("--data", "folder", "--root", self.place / "photos", "--report", self.folder / "report")
        return ("evaluate", self.place / model, *data, "--json")

    def read(self) -> object:
        page = (self.folder / "report" / "index.html").read_text()
        return page.count("</html>"), sorted(tree(self.folder / "report"))


class AddToIndex(MakeIndex):
    def arguments(self, model: str = "second") -> tuple[object, ...]:
        index, photos = self.folder / "index", self.place / "photos"
        if model == "first":
            return ("index", self.place / "first", photos / "class 0", "--out", index, "--json")
        return ("index", self.place / "first", photos, "--add", index, "--json")


class Show(Case):
    alike = True

    def begin(self) -> None:
        self.folder.mkdir()

    def arguments(self, model: str = "second") -> tuple[object, ...]:
        return ("data", "show", "--data", "folder", "--root", self.place / "photos", "--out", self.folder / "sheet.png")

    def read(self) -> object:
        with Image.open(self.folder / "sheet.png") as image:
            return image.tobytes()


class Picture(Show):
    def arguments(self, model: str = "second") -> tuple[object, ...]:
        query, picture = self.place / "photos" / "class 0" / "0.png", self.folder / "sheet.png"
        return ("search", self.place / "index", query, "--picture", picture, "--json")


class Hub(Case):
    """A folder that must be new."""

    replaces = False

    def begin(self) -> None:
        self.folder.mkdir()

    def arguments(self, model: str = "second") -> tuple[object, ...]:
        return ("export", self.place / model, "--to", "hub", "--out", self.folder / "hub", "--json")

    def read(self) -> object:
        return sorted(tree(bier.load(self.folder / "hub") and self.folder)) if any(self.folder.iterdir()) else None


class Paper(Case):
    """A run that has failed is what it becomes when the command is given again."""

    replaces, alike = False, True

    def begin(self) -> None:
        self.folder.mkdir()

    def arguments(self, model: str = "second") -> tuple[object, ...]:
        options = (
            "--row",
            "Baseline",
            "--budget",
            "smoke",
            "--root",
            self.place / "tiny",
            "--out",
            self.folder / "out",
        )
        return ("paper", "run", "summary", *options, "--json")

    def read(self) -> object:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            patch.setattr(sys, "argv", ["bier", *map(str, self.arguments())])
            with pytest.raises(SystemExit) as ended:
                bier.cli.main()
        changing = ("seconds", "date", "resumed", "measured_seconds")
        rows = [json.loads(line) for line in (self.folder / "out" / "cub.jsonl").read_text().splitlines()]
        return ended.value.code, [{key: value for key, value in row.items() if key not in changing} for row in rows]


CASES: dict[str, tuple[type[Case], int]] = {  # with the operations that the short form leaves out between two
    "embed": (Embed, 4),
    "embed --cache": (EmbedWithCache, 6),
    "index": (MakeIndex, 4),
    "train": (Train, 7),
    "evaluate --report": (Evaluate, 8),
    "index --add": (AddToIndex, 4),
    "data show": (Show, 1),
    "search --picture": (Picture, 1),
    "export --to hub": (Hub, 3),
    "paper": (Paper, 8),
}
SLOW = ("evaluate --report", "paper")


def outcome(case: Case, older: object, newer: object, done: tuple[int, str, str]) -> tuple[bool, bool, str]:
    """(survived, lost, note)."""
    code, out, said = done
    lines = said.splitlines()
    one_line = code == 2 and out == "" and [line for line in lines if line.startswith("bier: ")] == lines[-1:]
    one_line &= len(lines) == 1 or isinstance(case, Paper)  # which says what it runs
    try:
        found = case.read()
    except (BierError, OSError) as error:
        return False, True, f"{said} {error!r}"
    lost = found != newer if code == 0 else found not in (older, newer)
    left = [path.name for path in case.folder.rglob(".*") if path.name not in ("lock", RECORD)]
    return (one_line or code == 0) and not left, lost, f"exit code {code}: {said} left: {left}"


def older_and_newer(case: Case, cli: Cli) -> tuple[object, object]:
    case.begin()
    if case.replaces:
        assert cli(*case.arguments("first"))[0] == 0
    shutil.copytree(case.folder, case.folder.with_name("kept"))
    older = case.read()
    code, _, said = cli(*case.arguments())
    assert code == 0, said
    newer = case.read()
    assert newer != older or case.alike
    return older, newer


def put_back(case: Case) -> None:
    shutil.rmtree(case.folder)
    shutil.copytree(case.folder.with_name("kept"), case.folder)


@pytest.mark.parametrize("name", CASES)
def test_every_write_of_a_command(
    tally: Any,
    soak: bool,
    how_many: Callable[[int, int], int],
    place: Path,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    if name in SLOW and not soak:
        pytest.skip("takes seconds; `make soak` refuses each of its writes")
    monkeypatch.setattr(embeddings, "SHARD", 5)
    kind, between = CASES[name]
    case = kind(place, tmp_path / "out")
    older, newer = older_and_newer(case, cli)
    at, errors = 1, (errno.ENOSPC, errno.EROFS, errno.EACCES)
    while True:
        put_back(case)
        with refusing(monkeypatch, case.folder, at, errors[at % 3]) as seen:
            done = cli(*case.arguments())
        if seen.seen < at:
            break
        survived, lost, note = outcome(case, older, newer, done)
        tally.case(f"refused writes: {name}", survived, lost, f"{at}: {note}")
        at += max(1, between // how_many(1, between))
    assert done[0] == 0, done
    assert at > between
    assert case.read() == newer


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many kilobytes, or gives it this size."""
    mounted = tmp_path / "disk"
    mounted.mkdir()

    def size(kilobytes: int, how: str = "remount,") -> Path:
        option = f"{how}size={kilobytes}k"
        subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", mounted], check=True, capture_output=True)
        return mounted

    try:
        size(20_000, "")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs needs root")
    yield size
    subprocess.run(["umount", "-l", str(mounted)], check=True)


@pytest.mark.parametrize("name", ["embed", "index", "train"])
def test_a_disk_that_fills_up_in_the_middle(
    tally: Any,
    soak: bool,
    place: Path,
    disk: Callable[[int], Path],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(embeddings, "SHARD", 5)
    case = CASES[name][0](place, disk(20_000) / "out")
    older, newer = older_and_newer(case, cli)
    failures = 0
    for free in range(0, 80, 4 if soak else 16):
        disk(20_000)
        put_back(case)
        state = os.statvfs(case.folder)
        used = (state.f_blocks - state.f_bfree) * state.f_frsize // 1024
        disk(used + free + 1)
        done = cli(*case.arguments())
        disk(20_000)
        survived, lost, note = outcome(case, older, newer, done)
        tally.case(f"full disk: {name}", survived, lost, f"{free} kB free: {note}")
        failures += done[0] == 2
    disk(20_000)
    put_back(case)
    assert cli(*case.arguments())[0] == 0
    assert case.read() == newer
    assert failures


CACHE = """
import os, subprocess, sys
from pathlib import Path
from bier.errors import DataError
from bier.images import ImageDataset
disk = Path(sys.argv[2])
for kilobytes in sys.argv[3:]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"remount,size={kilobytes}k", "tmpfs", disk], check=True)
    child = os.fork()
    if not child:
        try:
            ImageDataset(sorted(Path(sys.argv[1]).rglob("*.png")), 48, workers=0).cached(disk / kilobytes)
        except DataError as error:
            os._exit(2 if str(error).count(chr(10)) == 0 else 3)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    subprocess.run(["rm", "-rf", disk / kilobytes], check=True)
"""


def test_a_cache_on_a_tiny_disk_is_one_line(tally: Any, place: Path, disk: Callable[[int], Path]) -> None:
    """In a process of its own: reading a hole in a map of a file on a full disk once ended it with a bus error."""
    sizes = ("4", "8", "12", "16", "20", "24", "40")  # eight pictures take 56 kB
    command = [sys.executable, "-c", CACHE, str(place / "photos"), str(disk(20_000)), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for size, code in zip(sizes, done.stdout.split(), strict=True):
        tally.case("full disk: --cache", code == "2", note=f"{size} kB: exit code {code} {done.stderr}")


def test_a_file_that_may_not_grow(tally: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the process is told apart from nothing: faiss writes the bits in C++, beyond Python's reach."""
    vectors = np.random.default_rng(0).normal(size=(600, 16)).astype(np.float32)
    monkeypatch.setattr("bier.search.index.EXACT_ROWS", 100)
    Index.build(vectors[:300]).save(tmp_path / "index")
    size = max(path.stat().st_size for path in (tmp_path / "index").rglob("*.f32"))
    before = tree(tmp_path / "index")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for limit in (size // 2, size, size + 1000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        survived = False
        try:
            Index.build(vectors).save(tmp_path / "index")
        except BierError as error:
            survived = "\n" not in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        tally.case("full disk: index bits", survived, tree(tmp_path / "index") != before)
