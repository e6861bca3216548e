"""`bier demo`: the whole story on drawn characters, in a few minutes and without a download."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from bier.cli.terminal import Json, console, emit, progress_bar, say
from bier.cli.train import Watcher

if TYPE_CHECKING:
    from bier.config import Config
    from bier.evaluate.dataset import Assessment

METHODS = ("baseline", "a-bier")
KS = ("1", "2", "4", "8")

HELP = """Train a plain embedding and A-BIER on drawn characters, compare them, write a report.

Needs no data, no GPU and no network. Both get the same network, steps, batches and seeds; the characters they are
measured on come from alphabets that neither has seen. Runs that are already there are not trained again.

Examples:

  bier demo

  bier demo --seeds 3 --json
"""


def register(app: typer.Typer) -> None:
    app.command("demo", help=HELP)(demo)


def demo(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Train each method so often; mean and spread.")] = 1,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs go.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of training, to look around faster.")
    ] = None,
    as_json: Json = False,
) -> None:
    from bier.data import load as load_data
    from bier.evaluate.report import write_report
    from bier.training import resolve
    from bier.training.run_folder import read_metrics

    changed = {} if steps is None else {"train.steps": steps}
    glyphs = load_data("glyphs")
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    first: dict[str, Assessment] = {}
    for seed in range(seeds):
        for method in METHODS:
            config = resolve(method, "glyphs", {"seed": seed, **changed})
            run = out / f"{method}-{seed}"
            seconds = _train(config, run)
            found = _assess(run, glyphs)
            first.setdefault(method, found)
            results[method].append({**found.to_dict(), "training_seconds": seconds})
    main = out / "a-bier-0"
    page = write_report(
        main / "report",
        first["a-bier"].result,
        measured=str(first["a-bier"].measured),
        metrics=read_metrics(main),
        images=first["a-bier"].images,
        title="A-BIER on glyphs",
        comparison={"baseline": first["baseline"].result},
    )
    summary = {method: _summary(rows) for method, rows in results.items()}
    gain = _mean_recall(results["a-bier"]) - _mean_recall(results["baseline"])
    if as_json:
        emit({"methods": summary, "gain": gain, "seeds": seeds, "report": str(page), "runs": results})
        return
    console.print(_table(summary, seeds))
    say(f"A-BIER finds the right character first {abs(gain):.2f} points {'more' if gain >= 0 else 'less'} often.")
    say("")
    say("Next:")
    say(f"  open the report      {shlex.quote(str(page))}")
    say(f"  look at the curves   tensorboard --logdir {shlex.quote(str(out))}")
    say(f"  search in a browser  bier serve {shlex.quote(str(main))}")
    say("  train on your own    bier train --data folder --root YOUR_PHOTOS --out runs/mine")
    say("  then measure it      bier evaluate runs/mine")


def _train(config: "Config", run: Path) -> float | None:
    """Train, go on with what an earlier demo left unfinished, or leave a finished run as it is."""
    from bier.training import train
    from bier.training.run_folder import CONFIG, check_same_config

    exists = (run / CONFIG).is_file()
    if (run / "model" / "model.json").is_file() and exists:
        check_same_config(run, config)
        say(f"{run} is already trained; remove it to train it again.")
        return None
    with progress_bar() as bar:
        watcher = Watcher(bar, config, label=run.name)
        done = train(config, run, resume=exists, observer=watcher)
    if done.interrupted:
        say("Stopped; a checkpoint is saved. Go on with: bier demo")
        raise typer.Exit(130)
    return watcher.seconds


def _assess(run: Path, dataset: Any) -> "Assessment":
    from bier.evaluate.dataset import assess
    from bier.models.model import load

    with progress_bar() as bar:
        task = bar.add_task(f"measuring {run.name}", total=None, status="")
        return assess(load(run), dataset, progress=lambda done, total: bar.update(task, completed=done, total=total))


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


def _table(summary: Mapping[str, Mapping[str, Any]], seeds: int) -> Table:
    names = {
        **{f"R@{k}": (f"R@{k}", 2) for k in KS},
        "feature_correlation": ("feature corr.", 3),
        "classifier_correlation": ("classifier corr.", 3),
        "training_seconds": ("seconds", 0),
    }
    table = Table("", *(title for title, _ in names.values()), title=f"Characters of unseen alphabets, {seeds} seed(s)")
    for method, row in summary.items():
        table.add_row(method, *(_cell(row[key], digits, seeds) for key, (_, digits) in names.items()))
    cells = []
    for key, (_, digits) in names.items():
        one, other = summary["a-bier"][key], summary["baseline"][key]
        cells.append("-" if one is None or other is None else f"{one['mean'] - other['mean']:+.{digits}f}")
    table.add_row("difference", *cells, style="bold")
    return table


def _cell(value: Mapping[str, float] | None, digits: int, seeds: int) -> str:
    if value is None:
        return "-"
    spread = f" ± {value['spread']:.{digits}f}" if seeds > 1 else ""
    return f"{value['mean']:.{digits}f}{spread}"
