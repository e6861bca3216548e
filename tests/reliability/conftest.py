"""The figures of the reliability suite: every family of cases says how many it tried, survived and lost data in.

`make test` runs a short form of each family, `make soak` (BIER_SOAK=1) the long one, whose figures are written to the
file BIER_SOAK_OUT. `make soak SHARE=0.1` (BIER_SOAK=0.1) tries a tenth of the cases of the long form, and never fewer
than the short one:

    def test_truncations(tally, how_many):
        for length in random.sample(range(size), how_many(short=40, long=4096)):
            tally.case("truncated models", survived=refused_in_one_line(length), lost=False)

The test that used `tally` fails at its end if a case did not survive or lost data; `note` tells which.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from PIL import Image

from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # its scripts are no package
machine = importlib.import_module("_report").machine

SHARE = float(os.environ.get("BIER_SOAK") or 0)  # of the cases of the long form; 0: the short form
SOAK = SHARE > 0
COLUMNS = ("tried", "survived", "data lost")
STARTED = time.time()
figures: dict[tuple[str, str], Counter[str]] = {}  # by the test file and the name of the family
remarks: list[str] = []


class Tally:
    """Counts the cases of one test in this file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.failures: list[str] = []

    def case(self, name: str, survived: bool = True, lost: bool = False, note: str = "") -> None:
        """One case of the family `name`. survived: it ended as promised; lost: data was lost or silently wrong."""
        figures.setdefault((self.file, name), Counter()).update(
            {"tried": 1, "survived": int(survived and not lost), "data lost": int(lost)}
        )
        if lost or not survived:
            self.failures.append(f"{name}: {'data lost' if lost else 'not survived'} {note}".rstrip())

    def remark(self, text: str) -> None:
        """A measured figure to print below the table, such as a percentile or a peak of memory."""
        remarks.append(text)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    counts = Tally(request.path.stem)
    yield counts
    if counts.failures:
        shown = "\n".join(counts.failures[:20])
        pytest.fail(f"{len(counts.failures)} cases failed:\n{shown}", pytrace=False)


class Ended(NamedTuple):
    """How a command ended: its exit code, what it printed, and how long it took."""

    code: int
    out: str
    said: str
    seconds: float

    @property
    def refused(self) -> bool:
        """One line, nothing on standard output, exit code 2."""
        one_line = self.said.startswith("bier: ") and len(self.said.splitlines()) == 1
        return self.code == 2 and self.out == "" and one_line and self.said.strip().isprintable()

    @property
    def done(self) -> bool:
        return self.code == 0 and "Traceback" not in self.said


class _TooSlow(BaseException):  # an Exception would be caught as damage of a file
    pass


@pytest.fixture
def attack(cli: Callable[..., tuple[int, str, str]]) -> Callable[..., Ended]:
    """`attack("embed", ...)` runs a command. A hang (more than `limit` seconds) and a traceback have the code -1."""

    def stop(*_: Any) -> None:
        raise _TooSlow

    def run(*arguments: object, limit: float = 60) -> Ended:
        handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, limit)
        began = time.perf_counter()
        try:
            code, out, said = cli(*arguments)
        except _TooSlow:
            code, out, said = -1, "", f"no end within {limit} s"
        except Exception as error:
            code, out, said = -1, "", f"Traceback: {type(error).__name__}: {error}"[:300]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if timer[0]:  # that of pytest-timeout
                signal.setitimer(signal.ITIMER_REAL, max(1.0, timer[0] - (time.perf_counter() - began)))
        return Ended(code, out, said, time.perf_counter() - began)

    return run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a small untrained model."""
    torch.manual_seed(0)
    run = tmp_path_factory.mktemp("model") / "run"
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16))).save(run / "model")
    return run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four classes of three pictures."""
    random = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "photos" / f"class {number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether this is the long form."""
    return SOAK


@pytest.fixture(scope="session")
def how_many() -> Callable[[int, int], int]:
    """`how_many(short, long)`: the number of cases to try."""
    return lambda short, long: max(short, round(SHARE * long))


@pytest.fixture(scope="session")
def drawn(how_many: Callable[[int, int], int]) -> Callable[[int, int], settings]:
    """`drawn(short, long)`: hypothesis draws so many examples."""
    health = list(HealthCheck)
    return lambda short, long: settings(
        max_examples=how_many(short, long), deadline=None, database=None, suppress_health_check=health
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not figures and not remarks:
        return
    names: dict[str, Counter[str]] = {}
    for (_, name), counts in figures.items():
        names.setdefault(name, Counter()).update(counts)
    width = max([len(name) for name in names] + [len("all")])
    share = "" if SHARE in (0, 1) else f", {SHARE:.0%} of the cases"
    terminalreporter.section(f"reliability, {'long' if SOAK else 'short'} form{share}")
    terminalreporter.write_line(" ".join(["cases".ljust(width), *(column.rjust(10) for column in COLUMNS)]))
    total: Counter[str] = Counter()
    for counts in names.values():
        total.update(counts)
    for name, counts in [*sorted(names.items()), ("all", total)]:
        numbers = (f"{counts[column]:10,}" for column in COLUMNS)
        terminalreporter.write_line(" ".join([name.ljust(width), *numbers]))
    for text in remarks:
        terminalreporter.write_line(text)
    if os.environ.get("BIER_SOAK_OUT"):
        ended = {how: len(terminalreporter.stats.get(how, ())) for how in ("passed", "failed", "error", "skipped")}
        write_figures(Path(os.environ["BIER_SOAK_OUT"]), ended)


def write_figures(out: Path, tests: dict[str, int]) -> None:
    """All that is printed, for `security_page.py`."""
    families: dict[str, dict[str, dict[str, int]]] = {}
    for (file, name), counts in sorted(figures.items()):
        families.setdefault(file, {})[name] = {column: counts[column] for column in COLUMNS}
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    record = {
        "date": time.strftime("%Y-%m-%d", time.gmtime(STARTED)),
        "commit": done.stdout.strip(),
        "share": SHARE,
        "minutes": round((time.time() - STARTED) / 60, 1),
        "machine": machine(),
        "tests": tests,
        "families": families,
        "remarks": remarks,
    }
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
