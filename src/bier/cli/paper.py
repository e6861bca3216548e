"""`bier paper list`, `run` and `show`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import Json, command, console, emit, progress_bar, say, table_of_numbers
from bier.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from bier.config import Config
    from bier.paper.budgets import Budget
    from bier.paper.experiments import Experiment
    from bier.paper.results import Job
    from bier.paper.tables import Table
    from bier.training import Observer

ALL = "all"

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Experiments of `bier paper list`, or all.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where runs, results and tables go.")]


app = typer.Typer(
    help="The paper's tables and figures: list them, run them, show ours beside the paper's.", no_args_is_help=True
)


@app.command("list")
def list_experiments(as_json: Json = False) -> None:
    """List the experiments, and how many runs each budget needs.

    [bold]Examples[/bold]

    bier paper list
    """
    from bier.paper.budgets import BUDGETS
    from bier.paper.experiments import EXPERIMENTS
    from bier.paper.results import plan

    def runs(experiments: Sequence["Experiment"]) -> dict[str, int]:
        return {name: len(plan(experiments, budget, budget.seeds)) for name, budget in BUDGETS.items()}

    listed = {
        name: {"title": one.title, "rows": [row.label for row in one.rows], "runs": runs([one])}
        for name, one in EXPERIMENTS.items()
    }
    together = runs(list(EXPERIMENTS.values()))
    if as_json:
        budgets = {name: {"about": budget.about, "seeds": budget.seeds} for name, budget in BUDGETS.items()}
        emit({"experiments": listed, "all": together, "budgets": budgets})
        return
    from rich.table import Column
    from rich.table import Table as Drawn

    table = Drawn(Column("name", no_wrap=True), "what it compares", "rows", f"runs: {', '.join(BUDGETS)}")
    for name, one in listed.items():
        table.add_row(name, str(one["title"]), str(len(one["rows"])), _runs(one["runs"]))  # type: ignore[arg-type]
    table.add_row(ALL, "all of them; runs that tables share are made once", "", _runs(together))
    console.print(table)
    for budget in BUDGETS.values():
        say(f"{budget.name}: {budget.about}; {budget.seeds} seed(s)")


def _runs(counts: dict[str, int]) -> str:
    return ", ".join(map(str, counts.values()))


@app.command()
def run(
    names: Names,
    root: Annotated[
        Path | None, typer.Option("--root", metavar="PATH", help="The folder that holds the data sets.")
    ] = None,
    budget: Annotated[str, typer.Option("--budget", metavar="NAME", help="smoke, main, third or paper.")] = "main",
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=1, help="Seeds of each row. \\[default: the budget's]")
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="TEXT", help="Only rows whose name contains this; may be repeated."),
    ] = None,
    out: Out = Path("runs/paper"),
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="FILE",
            help="Weights of GoogLeNet. \\[default: bvlc_googlenet.caffemodel below --root]",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run experiments, or all. What is done stays done; a stopped or killed run goes on.

    Start the command several times to use several cores or machines: they share the work through --out.

    [bold]Examples[/bold]

    bier paper run strength --root data --budget main

    bier paper run groups cifar10 --root data --budget main --seeds 3 --json

    bier paper run all --budget smoke        (draws its own data)

    bier paper run auxiliary --root data --budget paper --weights bvlc_googlenet.caffemodel
    """
    from bier.paper.budgets import budget_of

    chosen = budget_of(budget)
    experiments = [_only(one, row) for one in _experiments(names)]
    if root is None and chosen.name != "smoke":
        raise ConfigError(f"The budget '{chosen.name}' needs --root, the folder that holds the data sets.")
    with progress_bar() as bar:
        from bier.paper.runner import Places
        from bier.paper.runner import run as run_all
        from bier.paper.tiny import draw_tiny_data

        root = root or draw_tiny_data(out / "tiny-data")
        watch = Bars(bar)
        try:
            outcome = run_all(experiments, chosen, Places(root, out, weights), watch, seeds)
        except KeyboardInterrupt:
            outcome = None
    if outcome is None or outcome.interrupted:
        say(f"Stopped; finished runs are kept. Go on with: {command(*sys.argv[1:])}")
        raise typer.Exit(130)
    drawn = {one.name: _draw(one, chosen, out) for one in _experiments(names)}
    if as_json:
        emit(
            {
                "budget": chosen.name,
                "made": outcome.made,
                "found": outcome.found,
                "missing": outcome.missing,
                "experiments": {name: _described(*one) for name, one in drawn.items()},
            }
        )
        return
    for table, files in drawn.values():
        _print(table, files)
    say(f"{len(outcome.made)} run(s) made, {len(outcome.found)} were already there.")


@app.command()
def show(
    names: Names,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="NAME", help="smoke, main, third, paper; else the largest with results."),
    ] = None,
    out: Out = Path("runs/paper"),
    page: Annotated[
        Path | None,
        typer.Option(
            "--page", metavar="FILE", help="Put the tables into this Markdown page, where it marks their places."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw the table of an experiment (and its plot) from the result files that are there.

    [bold]Examples[/bold]

    bier paper show strength

    bier paper show lambda --budget main --json
    """
    from bier.paper.budgets import BUDGETS, budget_of
    from bier.paper.results import Results
    from bier.paper.tables import refresh, table_of

    drawn = {}
    for one in _experiments(names):
        budgets = [budget_of(budget)] if budget else list(BUDGETS.values())[::-1]
        tables = [table_of(one, some, Results(out)) for some in budgets]
        # An untrained network is the same under every budget: it says nothing about which one was run.
        trained = [table for table in tables if any(line.seeds and not line.row.untrained for line in table.lines)]
        found = trained or [table for table in tables if any(line.seeds for line in table.lines)]
        if found:
            drawn[one.name] = _draw(one, found[0].budget, out)
    if not drawn:
        name = " ".join(names)
        raise ConfigError(
            f"There are no results of '{name}'{f' with the budget {budget}' if budget else ''} in {out}. "
            f"Run it first: {command('paper', 'run', *names, '--root', 'PATH', '--out', out)}"
        )
    if page is not None:
        refresh(page, [table for table, _ in drawn.values()])
    if as_json:
        emit({"experiments": {name: _described(*one) for name, one in drawn.items()}})
        return
    for table, files in drawn.values():
        _print(table, files)


def _experiments(names: Sequence[str]) -> list["Experiment"]:
    from bier.paper.experiments import EXPERIMENTS, experiment

    return list(EXPERIMENTS.values()) if ALL in names else [experiment(name) for name in dict.fromkeys(names)]


def _only(one: "Experiment", texts: Sequence[str] | None) -> "Experiment":
    """The experiment with the rows whose label contains one of the texts."""
    if not texts:
        return one
    rows = tuple(row for row in one.rows if any(text.lower() in row.label.lower() for text in texts))
    if not rows:
        labels = ", ".join(f"'{row.label}'" for row in one.rows)
        raise ConfigError(f"No row of '{one.name}' contains {' or '.join(map(repr, texts))}. Its rows are {labels}.")
    return replace(one, rows=rows)


def _draw(one: "Experiment", budget: "Budget", out: Path) -> tuple["Table", list[Path]]:
    """Write the table and the plot; the files, with the pictures that a run has left."""
    from bier.paper.results import Job, Results
    from bier.paper.runner import pictures_of
    from bier.paper.tables import table_of, write_plot, write_table

    table = table_of(one, budget, Results(out))
    files = [write_table(table, out)]
    plot = write_plot(table, out)
    pictures = [
        path for row in one.rows if one.pictures for path in pictures_of(out / "pictures", Job(row, budget, 0).name)
    ]
    return table, [*files, *([plot] if plot else []), *pictures]


def _described(table: "Table", files: Sequence[Path]) -> dict[str, Any]:
    return {**table.to_dict(), "files": [str(path) for path in files]}


def _print(table: "Table", files: Sequence[Path]) -> None:
    drawn = table_of_numbers(
        table.head,
        [table.cells(line) for line in table.lines],
        title=table.experiment.title,
        caption=table.note,
        style=lambda row: "dim" if table.lines[row].learner else None,
    )
    console.print(drawn)
    for path in files:
        say(f"  {path}")


class Bars:
    """Draws many runs: which of how many, and the bar of the one that is running."""

    def __init__(self, bar: "Progress") -> None:
        self.bar = bar
        self.whole = bar.add_task("runs", total=None, status="")
        self.tasks: list[Any] = []
        self.test: Any = None

    def begin(self, number: int, total: int, job: "Job", config: "Config") -> "Observer":
        from bier.cli.train import ProgressObserver

        for task in self.bar.task_ids:
            if task != self.whole:
                self.bar.remove_task(task)
        self.test = None
        say(f"run {number} of {total}: {job.label}")
        self.bar.update(self.whole, completed=number - 1, total=total)
        return ProgressObserver(self.bar, config, validations=False)  # they go to the result files

    def measuring(self, done: int, total: int) -> None:
        if self.test is None:
            self.test = self.bar.add_task("measuring", total=None, status="")
        self.bar.update(self.test, completed=done, total=total)

    def missing(self, name: str, reason: str) -> None:
        say(f"left out: {name}. {reason.partition('. ')[0]}.")
