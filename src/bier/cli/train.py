"""`bier train`."""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import Cache, Data, Json, Root, Settings, Size, SkipBroken, command, emit, progress_bar, say
from bier.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from bier.config import Config
    from bier.training import Run

Method = Annotated[
    str, typer.Option("--method", metavar="NAME", help="baseline, init, bier, activation-bier or a-bier.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The run folder. \\[default: runs/DATA-METHOD-SEED]")
]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Continue this run from its newest checkpoint.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Repeat a run from its config.toml; --set still applies."),
]

NAMED = ("data", "root", "method", "size", "skip_broken", "cache")  # options that stand for settings


def train(
    context: typer.Context,
    data: Data = "glyphs",
    root: Root = None,
    method: Method = "a-bier",
    out: Out = None,
    resume: Resume = None,
    config: ConfigFile = None,
    settings: Settings = None,
    size: Size = "small",
    skip_broken: SkipBroken = False,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Train an embedding ensemble and leave a run folder: config, metrics, checkpoints, model.

    `bier settings` lists what --set takes.

    [bold]Examples[/bold]

    bier train --data glyphs --out runs/first

    bier train --data folder --root photos --method a-bier --out runs/shop

    bier train --data cub --root CUB_200_2011 --method bier --set train.steps=15000

    bier train --resume runs/shop

    torchrun --nproc-per-node 2 -m bier train --data glyphs
    """
    from bier.config import Config, parse_settings
    from bier.data.catalog import check_name
    from bier.training import resolve

    chosen = parse_settings(settings or [])
    if resume is not None:
        _refuse(context, "--resume", ("out", "config", *NAMED))
        resolved = Config.from_toml(resume / "config.toml").with_settings(chosen)
    elif config is not None:
        _refuse(context, "--config", NAMED)
        resolved = Config.from_toml(config).with_settings(chosen)
    else:
        named = {
            "data.root": str(root) if root else "",
            "data.size": size,
            "data.skip_broken": skip_broken,
            "data.cache": str(cache) if cache else "",
        }
        resolved = resolve(method, data, {**named, **chosen})
    check_name(resolved.data.name)
    first = os.environ.get("RANK", "0") == "0"  # of several processes one prints
    with progress_bar() as bar:
        from bier.training import train as run_training

        watcher = Watcher(bar, resolved)
        run = run_training(resolved, resume or out, resume=resume is not None, observer=watcher if first else None)
    if first:
        _report(run, watcher.seconds, json)


def _report(run: "Run", seconds: float, json: bool) -> None:
    if run.interrupted:
        again = command("train", "--resume", run.folder, processes=True)
        say(f"Stopped at step {run.step}; a checkpoint is saved. Go on with: {again}")
        raise typer.Exit(130)
    if json:
        emit(
            {
                "run": str(run.folder),
                "model": str(run.folder / "model"),
                "steps": run.step,
                "best_step": run.best_step,
                "best_validation": run.best_validation,
                "seconds": seconds,
            }
        )
        return
    best = "" if run.best_validation is None else f", best validation {run.best_validation:.2f} at step {run.best_step}"
    say(f"Trained {run.step} steps in {seconds:.0f} s{best}.")
    say(f"Next: {command('evaluate', run.folder)}")


def _refuse(context: typer.Context, option: str, names: Iterable[str]) -> None:
    """An option that would be ignored is an error."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"{option} takes all settings from its run; leave out --{name.replace('_', '-')}, or use --set."
            )


class Watcher:
    """Shows a run as progress: loss, each learner's loss, images per second, time left."""

    def __init__(self, bar: "Progress", config: "Config", label: str = "training") -> None:
        self.bar = bar
        self.label = label
        self.batch = config.train.batch_classes * config.train.batch_images
        self.tasks: dict[str, TaskID] = {}
        self.status = ""
        self.started: float | None = None
        self.first_step = 0
        self.begun = time.perf_counter()
        self._task(label)  # shown while the run is prepared

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def prepare(self, what: str, done: int, total: int) -> None:
        self.bar.update(self._task(what), completed=done, total=total, visible=done < total)

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        if self.started is None:
            self.started, self.first_step = time.perf_counter(), step
        if "loss" in row:
            learners = " ".join(f"{loss:.3f}" for loss in row["learner_losses"])
            self.status = f"loss {row['loss']:.3f} ({learners})"
        if "validation" in row:
            say(f"step {step}: validation {row['validation']:.2f}")
        elapsed = time.perf_counter() - self.started
        speed = f"{self.batch * (step - self.first_step) / elapsed:.0f} images/s" if step > self.first_step else ""
        status = " ".join(filter(None, [self.status, speed]))
        self.bar.update(self._task(self.label), completed=step, total=total, status=status)

    def close(self) -> None:
        """Take the run off the display."""
        for task in self.tasks.values():
            self.bar.remove_task(task)
        self.tasks.clear()

    def _task(self, what: str) -> "TaskID":
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what, total=None, status="")
        return self.tasks[what]
