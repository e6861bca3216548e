"""Tables and figures from results alone: ours beside the paper's, mean and spread over seeds."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bier import files
from bier.errors import DataError
from bier.evaluate.report.figures import GREY, LEARNERS, MARKS, new_figure, save
from bier.files import file_aside
from bier.paper.budgets import Budget, about
from bier.paper.experiments import Column, Experiment, Figure, Row
from bier.paper.results import Result, Results

NOTHING = "-"


class Spread(NamedTuple):
    """Mean and standard deviation over seeds; the deviation is None for a single one."""

    mean: float
    deviation: float | None

    def text(self, digits: int) -> str:
        more = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        return f"{self.mean:.{digits}f}{more}"


@dataclass(frozen=True)
class Line:
    """A row of a table: ours and the paper's by the keys of columns. `learner` is 0 for the ensemble."""

    label: str
    learner: int
    seeds: int
    rate: tuple[float, ...]
    ours: Mapping[str, Spread]
    paper: Mapping[str, float]
    row: Row
    curve: tuple[tuple[float, float], ...] = ()  # passes through the training images, R@1: of the first seed


@dataclass(frozen=True)
class Table:
    """An experiment with what has been measured of it."""

    experiment: Experiment
    budget: Budget
    lines: tuple[Line, ...]
    images: tuple[int, int] | None = None  # training and test images of the results

    @property
    def seeds(self) -> str:
        """How many seeds the rows have, such as 3 or 1 to 3."""
        counts = sorted({line.seeds for line in self.lines if line.seeds})
        if not counts:
            return "0"
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    @property
    def complete(self) -> bool:
        return all(line.seeds for line in self.lines)

    @property
    def note(self) -> str:
        """What made the table."""
        unfinished = sum(not line.seeds for line in self.lines if not line.learner)
        rest = f"; {unfinished} row(s) not run yet" if unfinished else ""
        work = "; ".join(dict.fromkeys(about(row, self.budget) for row in self.experiment.rows))
        return f"Budget {self.budget.name} ({work}), {self.seeds} seed(s){self._counts()}{rest}"

    def _counts(self) -> str:
        """How many images the results are about, where that belongs to the table."""
        if self.images is None or self.experiment.images is None:
            return ""
        ours, paper = (
            f"{train:,} training and {test:,} test images" for train, test in (self.images, self.experiment.images)
        )
        return f"; {ours}" + ("" if ours == paper else f" (the paper: {paper})")

    @property
    def head(self) -> list[str]:
        titles = [""]
        for column in self.experiment.columns:
            titles += [column.title, *(["paper"] if self._has_paper(column) else [])]
        return [*titles, "rate", "seeds"]

    def cells(self, line: Line) -> list[str]:
        """The texts of a line, in the order of `head`."""
        cells = [f"  learner {line.learner} ({line.label})" if line.learner else line.label]
        for column in self.experiment.columns:
            ours, paper = line.ours.get(column.key), line.paper.get(column.key)
            cells.append(NOTHING if ours is None else ours.text(column.digits))
            if self._has_paper(column):
                cells.append(NOTHING if paper is None else f"{paper:.{column.digits}f}")
        rates = "" if line.learner else ", ".join(f"{rate:g}" for rate in line.rate) or NOTHING
        return [*cells, rates, "" if line.learner else str(line.seeds)]

    def _has_paper(self, column: Column) -> bool:
        return any(column.key in line.paper for line in self.lines)

    def markdown(self) -> str:
        return f"# {self.experiment.title}\n\n{self.rows()}\n\n{self.note}.\n"

    def rows(self) -> str:
        """The table alone, in Markdown."""
        body = [self.head, ["---"] * len(self.head), *(self.cells(line) for line in self.lines)]
        return "\n".join(
            "| " + " | ".join(cell.replace("  learner", "&nbsp; learner") for cell in row) + " |" for row in body
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.experiment.name,
            "title": self.experiment.title,
            "budget": self.budget.name,
            "seeds": self.seeds,
            "complete": self.complete,
            "rows": [
                {
                    "label": line.label,
                    "learner": line.learner or None,
                    "seeds": line.seeds,
                    "learning_rates": list(line.rate),
                    "ours": {key: {"mean": one.mean, "deviation": one.deviation} for key, one in line.ours.items()},
                    "paper": dict(line.paper),
                }
                for line in self.lines
            ],
        }


def table_of(experiment: Experiment, budget: Budget, results: Results) -> Table:
    """The table of an experiment from the result files that are there.

    A partial one leaves out rows without any, and data sets that nothing was trained on under this budget.
    """
    rows = [(row, results.seeds(row, budget)) for row in experiment.rows]
    if experiment.partial:
        rows = [(row, found) for row, found in rows if found]
        trained = {row.data for row, _ in rows if not row.untrained}
        rows = [(row, found) for row, found in rows if row.data in trained] or rows
    lines = [line for row, found in rows for line in _lines(row, experiment, found)]
    counts: Mapping[str, int] = next(
        (result["images"] for _, found in rows for result in found if "images" in result), {}
    )
    images = (counts["train"], counts["test"]) if {"train", "test"} <= set(counts) else None
    return Table(experiment, budget, tuple(lines), images)


def _lines(row: Row, experiment: Experiment, found: Sequence[Result]) -> list[Line]:
    rates = tuple(sorted({one["settings"]["train.learning_rate"] for one in found if not row.untrained}))
    results = [_of_learner(_of_size(result, row.size), row.learner) for result in found]
    ours = {c.key: s for c in experiment.columns if (s := _spread(results, lambda one, k=c.key: measured(one, k)))}  # type: ignore[misc]
    curve = (
        tuple((point["passes"], _recall_of(point, row.learner)) for point in found[0].get("curve", ())) if found else ()
    )
    lines = [Line(row.label, 0, len(found), rates, ours, row.paper, row, curve)]
    count = len(results[0]["groups"]) if results and experiment.learners else 0
    for m in range(1, count + 1 if count > 1 else 0):
        alone = _spread(results, lambda one, m=m: one["recall"][f"learner-{m}"]["1"])  # type: ignore[misc]
        paper = {"recall": row.paper_learners[m - 1]} if len(row.paper_learners) == count else {}
        size = str(results[0]["groups"][m - 1])
        lines.append(Line(size, m, len(found), (), {"recall": alone} if alone else {}, paper, row))
    return lines


def measured(result: Result, key: str) -> float | None:
    """The number of a result that a column shows; None where it has none."""
    if key == "recall":
        value: float = result["recall"]["ensemble"]["1"]
        return value
    if key.startswith("recall@"):
        return float(result["recall"]["ensemble"][key.removeprefix("recall@")])
    if key.startswith("ensemble-"):
        recall = result["recall"]
        return float(recall.get(key, recall["ensemble"])["1"])  # one learner has no weights to choose
    if key == "accuracy":
        return float(result["accuracy"]["ensemble"])
    if key == "mean_learner":
        alone = [row["1"] for name, row in result["recall"].items() if name.startswith("learner-")]
        return statistics.fmean(alone) if len(alone) > 1 else None
    found: float | None = result[key]
    return found


def _of_size(result: Result, size: str) -> Result:
    chosen: Result = result["sizes"][size] if size and "sizes" in result else result
    return chosen


def _of_learner(result: Result, learner: int) -> Result:
    """The result of one learner alone, which has no correlation between features or learners of its own."""
    if not learner:
        return result
    alone = {"ensemble": result["recall"][f"learner-{learner}"]}
    return {**result, "recall": alone, "feature_correlation": None, "classifier_correlation": None}


def _recall_of(point: Mapping[str, Any], learner: int) -> float:
    return float(point["recall"][f"learner-{learner}" if learner else "ensemble"])


def _spread(results: Sequence[Result], value: Callable[[Result], float | None]) -> Spread | None:
    values = [number for one in results if (number := value(one)) is not None]
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def table_path(table: Table, out: Path, ending: str) -> Path:
    """Where the table or its figure is written."""
    return out / "tables" / f"{table.experiment.name}-{table.budget.name}.{ending}"


def write_table(table: Table, out: Path) -> Path:
    """OUT/tables/NAME-BUDGET.md."""
    path = table_path(table, out, "md")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, table.markdown().encode())
    return path


def write_plot(table: Table, out: Path) -> Path | None:
    """OUT/tables/NAME-BUDGET.png, where the experiment has a figure and results to draw."""
    figure_of = table.experiment.figure
    if figure_of is None:
        return None
    lines = [line for line in table.lines if not line.learner and "recall" in line.ours]
    if figure_of.x_label:
        lines = [line for line in table.lines if line.row.series and not line.learner]
    if not any("recall" in line.ours for line in lines):
        return None
    draw = _curves if figure_of.x_label else _bars
    if figure_of.passes and any(line.curve for line in lines):
        draw = _over_passes
    figure = draw(table, figure_of, lines)
    path = table_path(table, out, "png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(path) as aside:
        save(figure, aside)
    return path


def _title(table: Table, figure_of: Figure) -> str:
    return f"{figure_of.title}\nbudget {table.budget.name}, {table.seeds} seed(s)"


def _bars(table: Table, figure_of: Figure, lines: Sequence[Line]) -> Any:
    """R@1 of each row as a bar, and the paper's as a mark on it."""
    figure, (ax,) = new_figure(7.2, 1.2 + 0.42 * len(lines))
    places = range(len(lines))
    means = [line.ours["recall"].mean for line in lines]
    ax.barh(places, means, color=LEARNERS[0], height=0.62, label="ours")
    for place, line in zip(places, lines, strict=True):
        if line.ours["recall"].deviation is not None:
            ax.errorbar(line.ours["recall"].mean, place, xerr=line.ours["recall"].deviation, color="black", capsize=3)
    known = [(place, line.paper["recall"]) for place, line in zip(places, lines, strict=True) if "recall" in line.paper]
    if known:
        ax.plot([r for _, r in known], [p for p, _ in known], "D", color=LEARNERS[1], label="paper", markersize=7)
        ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for place, mean in zip(places, means, strict=True):
        ax.text(1, place, f"{mean:.1f}", va="center", color="white", fontsize=8)
    ax.set_yticks(list(places), [line.label for line in lines], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("Recall@1 (%)")
    ax.set_title(_title(table, figure_of), fontsize=10, color=GREY)
    return figure


def _over_passes(table: Table, figure_of: Figure, lines: Sequence[Line]) -> Any:
    """R@1 of each row over the passes of its first seed, from the untrained network on; the paper's is dashed."""
    figure, (ax,) = new_figure(6.4, 4.2)
    untrained = next((line.ours["recall"].mean for line in lines if line.row.untrained), None)
    drawn = [line for line in lines if line.curve and not line.row.learner]
    for number, line in enumerate(drawn):
        colour, mark = LEARNERS[number % len(LEARNERS)], MARKS[number % len(MARKS)]
        points = [*([(0.0, untrained)] if untrained is not None else []), *line.curve]
        ax.plot(*zip(*points, strict=True), color=colour, marker=mark, markersize=5, label=line.label)
        if "recall" in line.paper:
            ax.axhline(line.paper["recall"], color=colour, linestyle="--", linewidth=1, label=f"{line.label}, paper")
    ax.set_xlabel("passes through the training images")
    ax.set_ylabel("Recall@1 (%)")
    ax.set_title(_title(table, figure_of), fontsize=10, color=GREY)
    ax.legend(frameon=False, fontsize=8)
    return figure


def _curves(table: Table, figure_of: Figure, lines: Sequence[Line]) -> Any:
    """R@1 over groups or lambda_div: ours solid, the paper's dashed."""
    figure, (ax,) = new_figure(6.4, 4.2)
    for number, series in enumerate(dict.fromkeys(line.row.series for line in lines)):
        mine = sorted((line for line in lines if line.row.series == series), key=lambda line: line.row.x)
        colour, mark = LEARNERS[number % len(LEARNERS)], MARKS[number % len(MARKS)]
        ours = [line for line in mine if "recall" in line.ours]
        ax.errorbar(
            [line.row.x for line in ours],
            [line.ours["recall"].mean for line in ours],
            yerr=[line.ours["recall"].deviation or 0.0 for line in ours],
            color=colour,
            marker=mark,
            capsize=3,
            label=series,
        )
        paper = [line for line in mine if "recall" in line.paper]
        if paper:
            x, y = [line.row.x for line in paper], [line.paper["recall"] for line in paper]
            label = f"{series}, paper"
            ax.plot(x, y, "--", color=colour, marker=mark, markerfacecolor="white", linewidth=1, label=label)
    if figure_of.logarithmic:
        ax.set_xscale("log")
    else:
        ax.set_xticks(sorted({line.row.x for line in lines}))
    ax.set_xlabel(figure_of.x_label)
    ax.set_ylabel("Recall@1 (%)")
    ax.set_title(_title(table, figure_of), fontsize=10, color=GREY)
    ax.legend(frameon=False, fontsize=8)
    return figure


def fill(text: str, name: str, content: str) -> str | None:
    """A Markdown text with `content` between `<!-- table NAME -->` and `<!-- end -->`; None if it has no such place."""
    begin, end = f"<!-- table {name} -->", "<!-- end -->"
    if begin not in text:
        return None
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise DataError(f"The page must have {end} behind {begin}.")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def refresh(page: Path, tables: Iterable[Table]) -> list[str]:
    """Put tables into a Markdown page, where `fill` finds their places; the names of those that have one."""
    text = page.read_text(encoding="utf-8")
    done = []
    for table in tables:
        name = f"{table.experiment.name}-{table.budget.name}"
        filled = fill(text, name, f"{table.rows()}\n\n{table.note}.")
        if filled is not None:
            text = filled
            done.append(name)
    files.write(page, text.encode())
    return done
