"""`bier train`."""

import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier import system
from bier.cli.terminal import (
    Cache,
    Data,
    Json,
    Photos,
    Root,
    Settings,
    Size,
    SkipBroken,
    command,
    data_and_root,
    emit,
    is_first_process,
    progress_bar,
    say,
    say_skipped,
)
from bier.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from bier.config import Config
    from bier.training import TrainingResult
    from bier.training.plan import Plan

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

Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", metavar="N", min=1, help="Train for this many steps, without a plan; with --resume, up to this step."
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        metavar="N",
        min=0.5,
        help="Plan a run, with `bier evaluate` after it, that takes this long: how deep to train and for how many "
        "steps. For pictures and a pretrained backbone. \\[default: 30 without a GPU]",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="NAME", help="Also log to tensorboard, mlflow or wandb; may be repeated."),
]

DEFAULT_MINUTES = 30.0
LITTLE = 1.0  # points of MAP@R over the untrained backbone
NAMED = (
    "photos",
    "data",
    "root",
    "method",
    "size",
    "skip_broken",
    "cache",
    "steps",
    "minutes",
)  # options that stand for settings
RESUMED = ("steps", "skip_broken")  # that may change when a run is resumed


def train(
    context: typer.Context,
    photos: Photos = None,
    data: Data = None,
    root: Root = None,
    method: Method = "a-bier",
    out: Out = None,
    resume: Resume = None,
    config: ConfigFile = None,
    settings: Settings = None,
    size: Size = "small",
    skip_broken: SkipBroken = False,
    cache: Cache = None,
    steps: Steps = None,
    minutes: Minutes = None,
    log: Log = None,
    json: Json = False,
) -> None:
    """Train an embedding ensemble and leave a run folder: config, metrics, checkpoints, model.

    On a machine without a GPU the fine-tuning of a pretrained backbone is planned for 30 minutes; --minutes changes
    that, --steps trains without a plan. `bier settings` lists what --set takes. Processes that torchrun starts again
    after a failure (--max-restarts) go on from the newest checkpoint.

    [bold]Examples[/bold]

    bier train photos --out runs/shop

    bier train photos --minutes 120 --out runs/shop

    bier train --data cub --root CUB_200_2011 --method bier --set train.steps=15000

    bier train --data glyphs --out runs/characters

    bier train --resume runs/shop

    torchrun --nproc-per-node 2 --max-restarts 3 -m bier train --data glyphs
    """
    from bier.config import Config, parse_settings
    from bier.data import check_name
    from bier.runs import Run
    from bier.training import resolve

    chosen = parse_settings(settings or [])
    if steps is not None:
        chosen["train.steps"] = steps
    if resume is not None:
        _refuse(context, "--resume", ("out", "config", *(name for name in NAMED if name not in RESUMED)))
        if skip_broken:
            chosen["data.skip_broken"] = True
        resolved = Run(resume).config.with_settings(chosen)
    elif config is not None:
        _refuse(context, "--config", NAMED)
        resolved = Config.from_toml(config).with_settings(chosen)
    else:
        data, root = data_and_root(photos, data, root, "train")
        named = {
            "data.root": str(root) if root else "",
            "data.size": size,
            "data.skip_broken": skip_broken,
            "data.cache": str(cache) if cache else "",
        }
        resolved = resolve(method, data, {**named, **chosen})
    check_name(resolved.data.name)
    if resume is None and out is not None and "TORCHELASTIC_RUN_ID" not in os.environ:
        Run(out).check_absent()  # before torch is imported; torchrun may start the run again
    _check_minutes(minutes, chosen)
    with progress_bar() as bar, _warnings_as_lines():
        watcher = ProgressObserver(bar, resolved)
        plan = None
        planned = resume is None and config is None and "train.steps" not in chosen
        choosing = resume is None and config is None and _chooses_loss(resolved, chosen)
        begun = None if resume is not None else _begun_before(out, resolved)
        if begun is not None and planned:
            resolved = Run(begun).config.with_settings(chosen)
        elif planned:
            resolved, plan = _planned(resolved, out, minutes, chosen, watcher, choosing)
        from bier.training import train as run_training
        from bier.training.loop import default_folder
        from bier.training.observers import CombinedObserver, logger

        place = resume or begun
        folder = place or out or default_folder(resolved)
        with ExitStack() as loggers:
            observer = None
            if is_first_process():
                also = [loggers.enter_context(closing(logger(name, resolved, folder))) for name in log or []]
                observer = CombinedObserver(watcher, *also)
            run = run_training(
                resolved, folder, resume=place is not None, observer=observer, choose_loss=choosing and begun is None
            )
    if is_first_process():
        _report(run, resolved, watcher.seconds, plan, json)


def _begun_before(out: Path | None, config: "Config") -> Path | None:
    """The run to go on with where torchrun has started this process again after a failure; None for a new run.

    `train` compares the settings of this command with those of the run.
    """
    from bier.runs import Run
    from bier.training.checkpoints import begun_by_this_job
    from bier.training.loop import default_folder

    run = out or default_folder(config)
    if not begun_by_this_job(Run(run)):
        return None
    if is_first_process():
        say(f"Started again by torchrun: going on with {run} from its newest checkpoint.")
    return run


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Warnings without the place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"bier: {message}")
        yield


def _check_minutes(minutes: float | None, chosen: Mapping[str, Any]) -> None:
    if minutes is not None and "train.steps" in chosen:
        raise ConfigError("--minutes chooses the number of steps; leave out --steps and train.steps.")
    if minutes is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--minutes plans a run of one process; use --steps with torchrun.")


def _chooses_loss(config: "Config", chosen: Mapping[str, Any]) -> bool:
    """Whether the run is to choose its loss: A-BIER on pictures and a pretrained backbone, and no loss was named."""
    from bier.training.plan import can_plan

    named = any(key.startswith("loss.") for key in chosen)
    one_process = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return (
        not named
        and config.method == "a-bier"
        and config.train.validate_by == "map"
        and one_process
        and can_plan(config)
    )


def _planned(
    config: "Config",
    out: Path | None,
    minutes: float | None,
    chosen: Mapping[str, Any],
    watcher: "ProgressObserver",
    choosing: bool,
) -> "tuple[Config, Plan | None]":
    """The config with the number of steps and the depth that fit into the time; as it is where nothing is planned."""
    from bier.runs import Run
    from bier.training.checkpoints import check_new
    from bier.training.loop import default_folder
    from bier.training.plan import can_plan, explained, plan_run

    automatic = can_plan(config) and system.device().type == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) == 1
    if minutes is None and not automatic:
        return config, None
    run = out or default_folder(config)
    check_new(Run(run))
    allowed = minutes or DEFAULT_MINUTES
    plan = plan_run(config, allowed, run, chosen, watcher.prepare, watcher.begun, choosing)
    for line in explained(plan, config, allowed):
        say(line)
    say("--minutes N plans another time, --steps N trains without a plan.")
    return config.with_settings({**plan.settings(), **chosen}), plan


def _report(run: "TrainingResult", config: "Config", seconds: float, plan: "Plan | None", json: bool) -> None:
    from bier.runs import Run

    if run.interrupted:
        again = command("train", "--resume", run.folder, processes=True)
        say(f"Stopped at step {run.step}; a checkpoint is saved. Go on with: {again}")
        raise typer.Exit(130)
    skipped = [broken.named() for broken in run.skipped]
    if json:
        emit(
            {
                "run": str(run.folder),
                "model": str(Run(run.folder).model()),
                "steps": run.step,
                "best_step": run.best_step,
                "best_validation": run.best_validation,
                "validation": run.best.named() if run.best else None,
                "untrained": run.untrained.named() if run.untrained else None,
                "choice": run.choice,
                "skipped": skipped,
                "seconds": seconds,
                "validation_share": run.validation_share,
                "planned_seconds": plan.expected - plan.seconds["evaluation"] if plan else None,
            }
        )
        return
    say_skipped(skipped)
    for line in outcome(run, config):
        say(line)
    share = f", {run.validation_share:.0%} of it validation" if run.validation_share else ""
    say(f"Trained {run.step} steps in {seconds:.0f} s{share}. Next: {command('evaluate', run.folder)}")


def measured_by(config: "Config") -> str:
    return "accuracy" if config.loss.name == "cross-entropy" else "R@1"


def outcome(run: "TrainingResult", config: "Config") -> Iterator[str]:
    """What validation says about the model that is kept, whether training has paid, and what to try if it has not."""
    if run.best_validation is None:
        return
    kept = f"Kept: step {run.best_step}, validation {measured_by(config)} {run.best_validation:.2f}"
    if run.untrained is None or run.best is None:
        yield f"{kept}."
        return
    among = f"{run.queries:,} validation images" + (
        f", searched among each other and {run.distractors:,} training images" if run.distractors else ""
    )
    yield (
        f"{kept} (MAP@R {run.best.map_at_r:.2f}), untrained backbone {run.untrained.recall:.2f} "
        f"({run.untrained.map_at_r:.2f}); {among}."
    )
    rate = f"--set train.learning_rate={config.train.learning_rate / 3:.1g}"
    if run.best_step == 0:
        yield (
            "Training gained nothing: no step was better than the untrained backbone, so the model is the untrained "
            f"backbone with its features normalised. Try a lower rate ({rate}), or more images per class."
        )
        return
    before = run.untrained.map_at_r or 0.0
    gain = (run.best.map_at_r or 0.0) - before
    if before > 100 - LITTLE:
        yield (
            "The untrained backbone already ranks nearly all validation images right, so they cannot show what "
            "training gains. More classes, or classes that look more alike, would."
        )
    elif gain < LITTLE and run.best_step == run.step:
        longer = f"--steps {2 * config.train.steps}"
        yield f"Training gained little (MAP@R {gain:+.2f}) and was still improving. Try more --minutes, or {longer}."
    elif gain < LITTLE:
        yield f"Training gained little (MAP@R {gain:+.2f}), and later steps were worse. Try a lower rate ({rate})."


def _refuse(context: typer.Context, option: str, names: Iterable[str]) -> None:
    """An option that would be ignored is an error."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            given = "PHOTOS" if name == "photos" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} takes all settings from its run; leave out {given}.")


class ProgressObserver:
    """Shows a run as progress (losses of all learners, images per second, time left) and its validations as lines."""

    def __init__(self, bar: "Progress", config: "Config", label: str = "training", validations: bool = True) -> None:
        self.bar, self.label, self.validations = bar, label, validations
        self.measure = measured_by(config)
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
        if "choice" in row:
            say(row["choice"])
        if "validation" in row and self.validations:
            ranked = f", MAP@R {row['validation_map']:.2f}" if "validation_map" in row else ""
            what = f"step {step}" if step else "untrained backbone"
            say(f"{what}: validation {self.measure} {row['validation']:.2f}{ranked}")
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
