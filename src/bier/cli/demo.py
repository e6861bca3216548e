"""`bier demo`: train, compare and report on drawn characters, in a few minutes and without a download."""

import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import (
    Json,
    command,
    console,
    counted_step,
    emit,
    progress_bar,
    say,
    step,
    table_of_numbers,
)
from bier.cli.train import ProgressObserver

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import Progress

    from bier.config import Config
    from bier.evaluate.dataset import Assessment

METHODS = ("baseline", "a-bier")
KS = ("1", "2", "4", "8")


def demo(
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", min=1, help="Train each method with this many seeds.")
    ] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs go.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help="Fewer steps of training, for a quick look.")
    ] = None,
    json: Json = False,
) -> None:
    """Train a plain embedding and A-BIER on drawn characters, compare them, write a report.

    Needs no data, no GPU and no network. Both get the same network, steps, batches and seeds; the characters they are
    measured on come from alphabets that neither has seen. Runs that are already there are not trained again.

    [bold]Examples[/bold]

    bier demo

    bier demo --seeds 3 --json
    """
    say(f"Training {' and '.join(METHODS)} on drawn characters: about 2 minutes each on two cores.")
    changed = {} if steps is None else {"train.steps": steps}
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    first: dict[str, Assessment] = {}
    main = out / "a-bier-0"
    with progress_bar() as bar:
        from bier.data import load as load_data
        from bier.training import resolve

        with step(bar, "drawing the characters"):
            glyphs = load_data("glyphs")
        for seed in range(seeds):
            for method in METHODS:
                run = out / f"{method}-{seed}"
                seconds = _train(bar, resolve(method, "glyphs", {"seed": seed, **changed}), run)
                found = _assess(bar, run, glyphs)
                first.setdefault(method, found)
                results[method].append({**found.to_dict(), "training_seconds": seconds})
        with step(bar, "writing the report"):
            page = _report(main, first)
    summary = {method: _summary(rows) for method, rows in results.items()}
    gain = _mean_recall(results["a-bier"]) - _mean_recall(results["baseline"])
    if json:
        emit({"methods": summary, "gain": gain, "seeds": seeds, "report": str(page), "runs": results})
        return
    console.print(comparison(summary, seeds))
    say(f"A-BIER finds the right character first {abs(gain):.2f} points {'more' if gain >= 0 else 'less'} often.")
    say("")
    say("Next:")
    say(f"  open the report      {shlex.quote(str(page))}")
    say(f"  search in a browser  {command('serve', main)}")
    say(f"  train on your own    {command('train', '--data', 'folder', '--root', 'YOUR_PHOTOS', '--out', 'runs/mine')}")
    say(f"  then measure it      {command('evaluate', 'runs/mine')}")


def _report(run: Path, found: "Mapping[str, Assessment]") -> Path:
    from bier.evaluate.report import write_report
    from bier.runs import Run

    return write_report(
        Run(run).report,
        found["a-bier"].result,
        measured=str(found["a-bier"].measured),
        metrics=Run(run).metrics(),
        images=found["a-bier"].images,
        title="A-BIER on glyphs",
        comparison={"baseline": found["baseline"].result},
    )


def _train(bar: "Progress", config: "Config", run: Path) -> float | None:
    """Train, continue what an earlier demo left unfinished, or leave a finished run as it is."""
    from bier.runs import Run
    from bier.training import train
    from bier.training.checkpoints import check_same_config

    exists = Run(run).exists
    if exists:
        check_same_config(Run(run), config)
    if exists and (Run(run).model() / "model.json").is_file() and Run(run).config.train.steps == config.train.steps:
        say(f"{run} is already trained; remove it to train it again.")
        return None
    watcher = ProgressObserver(bar, config, label=run.name)
    done = train(config, run, resume=exists, observer=watcher)
    watcher.close()
    if done.interrupted:
        say(f"Stopped; a checkpoint is saved. Go on with: {command(*sys.argv[1:])}")
        raise typer.Exit(130)
    return watcher.seconds


def _assess(bar: "Progress", run: Path, dataset: Any) -> "Assessment":
    from bier.evaluate.dataset import assess
    from bier.models.model import load

    with counted_step(bar, f"measuring {run.name}") as progress:
        return assess(load(run), dataset, progress=progress)


def _mean_recall(rows: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(row["recall"]["ensemble"]["1"] for row in rows)


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float] | None]:
    """Mean and spread (standard deviation) over seeds."""
    columns: dict[str, list[float | None]] = {f"R@{k}": [row["recall"]["ensemble"][k] for row in rows] for k in KS}
    for name in ("feature_correlation", "classifier_correlation", "training_seconds"):
        columns[name] = [row[name] for row in rows]
    summary: dict[str, dict[str, float] | None] = {}
    for name, values in columns.items():
        known = [value for value in values if value is not None]
        spread = statistics.stdev(known) if len(known) > 1 else 0.0
        summary[name] = {"mean": statistics.fmean(known), "spread": spread} if known else None
    return summary


def comparison(summary: Mapping[str, Mapping[str, Any]], seeds: int) -> "Group":
    """One row per measure, one column per method, and their difference."""
    rows = {
        **{f"R@{k}": (f"R@{k}", 2) for k in KS},
        "feature_correlation": ("feature correlation", 3),
        "classifier_correlation": ("classifier correlation", 3),
        "training_seconds": ("seconds of training", 0),
    }
    cells = []
    for key, (name, digits) in rows.items():
        plain, ours = (summary[method][key] for method in METHODS)
        difference = "-" if plain is None or ours is None else f"{ours['mean'] - plain['mean']:+.{digits}f}"
        cells.append((name, _cell(plain, digits, seeds), _cell(ours, digits, seeds), difference))
    title = f"Characters of unseen alphabets, {seeds} seed{'s' if seeds > 1 else ''}"
    return table_of_numbers(("", *METHODS, "difference"), cells, title=title)


def _cell(value: Mapping[str, float] | None, digits: int, seeds: int) -> str:
    if value is None:
        return "-"
    spread = f" ± {value['spread']:.{digits}f}" if seeds > 1 else ""
    return f"{value['mean']:.{digits}f}{spread}"
