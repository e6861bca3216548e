"""The figures of the reliability suite: every family of cases says how many it tried, survived and lost data in.

`make test` runs a short form of each family, `make soak` (BIER_SOAK=1) the long one:

    def test_truncations(tally, soak):
        for length in range(0, size, 1 if soak else 97):
            tally.case("truncated models", survived=refused_in_one_line(length), lost=False)

The test that used `tally` fails at its end if a case did not survive or lost data; `note` tells which.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

SOAK = os.environ.get("BIER_SOAK", "") not in ("", "0")
COLUMNS = ("tried", "survived", "data lost")
figures: dict[str, Counter[str]] = {}
remarks: list[str] = []


class Tally:
    """Counts the cases of one test."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def case(self, name: str, survived: bool = True, lost: bool = False, note: str = "") -> None:
        """One case of the family `name`. survived: it ended as promised; lost: data was lost or silently wrong."""
        figures.setdefault(name, Counter()).update(
            {"tried": 1, "survived": int(survived and not lost), "data lost": int(lost)}
        )
        if lost or not survived:
            self.failures.append(f"{name}: {'data lost' if lost else 'not survived'} {note}".rstrip())

    def remark(self, text: str) -> None:
        """A measured figure to print below the table, such as a percentile or a peak of memory."""
        remarks.append(text)


@pytest.fixture
def tally() -> Iterator[Tally]:
    counts = Tally()
    yield counts
    if counts.failures:
        shown = "\n".join(counts.failures[:20])
        pytest.fail(f"{len(counts.failures)} cases failed:\n{shown}", pytrace=False)


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether this is the long form."""
    return SOAK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not figures and not remarks:
        return
    width = max([len(name) for name in figures] + [len("all")])
    terminalreporter.section("reliability, long form" if SOAK else "reliability, short form")
    terminalreporter.write_line(" ".join(["cases".ljust(width), *(column.rjust(10) for column in COLUMNS)]))
    total: Counter[str] = Counter()
    for counts in figures.values():
        total.update(counts)
    for name, counts in [*sorted(figures.items()), ("all", total)]:
        numbers = (f"{counts[column]:10,}" for column in COLUMNS)
        terminalreporter.write_line(" ".join([name.ljust(width), *numbers]))
    for text in remarks:
        terminalreporter.write_line(text)
