"""The loss that suits the data: a run begins with each of two and goes on with the better one from where it stands.

What is tried and what was found is the record `choice` of config.toml. While it names no loss, the run folder holds the
common start (a checkpoint of step 0), and `candidates/NAME` a run of each loss up to the step of comparison; these are
removed when one of them has become the run.
"""

import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bier import files
from bier.config import Config
from bier.data import Dataset
from bier.errors import ConfigError
from bier.runs import Run, step_of
from bier.training import checkpoints
from bier.training.objective import metric_loss
from bier.training.setup import TrainingSetup, sizes, with_fewer_validated
from bier.training.state import TIE

if TYPE_CHECKING:
    from bier.training.loop import Advanced, Observer

# The gentle one first: it is the loss where nothing can be tried, and of a tie. Where data is soon learned it forgets
# less; where the way is long the other is ahead. See docs/training.md.
CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "binomial-deviance": {},
    "multi-similarity": {"loss.name": "multi-similarity", "loss.boosting": "gradient"},
}
LEAST_STEPS = 500  # a shorter run tries nothing
PARTS = 8  # each loss is tried for one of so many parts of the steps
LEAST_CLASSES = 20  # held out; fewer cannot tell losses apart
FOLDER = "candidates"

Record = dict[str, Any]


class Trying:
    """Shows the steps of a candidate as preparation of the run."""

    def __init__(self, observer: "Observer", name: str, steps: int) -> None:
        self.observer, self.what, self.steps = observer, f"trying {name}", steps

    def prepare(self, what: str, done: int, total: int) -> None:
        self.observer.prepare(what, done, total)

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        self.observer.prepare(self.what, step, self.steps)


def steps_each(steps: int) -> int:
    """For how many of the steps of a run each loss is tried; 0 where the run is too short."""
    return -(-steps // PARTS) if steps >= LEAST_STEPS else 0


def classes_to_tell(config: Config, dataset: Dataset) -> int:
    """Classes whose images say by their MAP@R which loss is better: those that are measured while a run trains."""
    by_map = config.train.validate_by == "map" and dataset.protocol != "accuracy"
    return with_fewer_validated(dataset)["validation"].present if by_map and "validation" in dataset.parts else 0


def planned(config: Config, dataset: Dataset) -> Record:
    """The record of a run that is asked to choose: what it is going to try, or which loss it takes and why."""
    first, steps, classes = next(iter(CANDIDATES)), config.train.steps, classes_to_tell(config, dataset)
    if classes < LEAST_CLASSES:
        why = f"to choose by validation takes {LEAST_CLASSES} held-out classes, and there are {classes}"
    elif not steps_each(steps):
        why = f"to try others takes {LEAST_STEPS} steps, and there are {steps}"
    else:
        return {"steps": steps_each(steps), "candidates": list(CANDIDATES), "classes": classes}
    return {"loss": first, "why": f"Loss: {first}, the gentle one: {why}."}


def is_open(record: Mapping[str, Any]) -> bool:
    """Whether losses are still to be tried."""
    return bool(record) and "loss" not in record


def choose(
    run: Run,
    setup: TrainingSetup,
    record: Mapping[str, Any],
    observer: "Observer",
    advance: "Callable[..., Advanced]",
) -> "Advanced | None":
    """Train with each loss from the common start, and make the best the run; where that was interrupted, how.

    advance: trains in a folder up to the step `until`, from its newest checkpoint or from the start.
    """
    advance(run, setup, observer, until=0)  # the start of all: W, the untrained backbone, the first random numbers
    given, found = setup.config, dict[str, float]()
    for name in record["candidates"]:
        config = given.with_settings(CANDIDATES[name])
        candidate = _begun(run, name, config)
        watcher = Trying(observer, name, record["steps"])
        reached = advance(candidate, with_loss(setup, config), watcher, until=record["steps"])
        if reached.interrupted:
            return reached
        found[name] = next(row["validation_map"] for row in reversed(candidate.metrics()) if "validation_map" in row)
    first, best = next(iter(found)), max(found, key=lambda name: found[name])
    near = best != first and found[best] <= found[first] + TIE
    chosen = first if near else best
    values = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    why = (
        f"Loss: {chosen}, by MAP@R on {record['classes']} validation classes after {record['steps']} steps with each "
        f"({values}{'; too near to tell, so the gentle one' if near else ''})."
    )
    _become(run, _candidate(run, chosen), {**record, "loss": chosen, "why": why, "map": found})
    with_loss(setup, run.config)
    for row in run.metrics():
        if row["step"] > 0:
            observer.step(row["step"], given.train.steps, row)
    observer.step(record["steps"], given.train.steps, {"choice": why})
    return None


def with_loss(setup: TrainingSetup, config: Config) -> TrainingSetup:
    """The set-up with another loss: everything else that is built is the same."""
    setup.config = config
    classes = len(setup.dataset["train"].classes)
    setup.objective.metric = metric_loss(config, sizes(config), classes).to(setup.device)
    return setup


def remove_candidates(run: Run) -> None:
    shutil.rmtree(run.path / FOLDER, ignore_errors=True)


def _candidate(run: Run, name: str) -> Run:
    return Run(run.path / FOLDER / name)


def _begun(run: Run, name: str, config: Config) -> Run:
    """The folder of a candidate, which begins as a copy of the common start."""
    candidate = _candidate(run, name)
    with checkpoints.writing(candidate.path, run):
        candidate.path.mkdir(parents=True, exist_ok=True)
        candidate.write_config(config, run.records)
        if candidate.newest() is None:
            files.write(candidate.metrics_file, run.metrics_file.read_bytes())
            checkpoints.write_checkpoint(candidate, 0, checkpoints.read_checkpoint(run.checkpoint(0)))
    return candidate


def _become(run: Run, candidate: Run, record: Record) -> None:
    """What the candidate has reached, in the run folder. config.toml says so last: until then this is done again."""
    for path in candidate.complete():
        checkpoints.write_checkpoint(run, step_of(path), checkpoints.read_checkpoint(path))
    with checkpoints.writing(run.config_file, run):
        files.write(run.metrics_file, candidate.metrics_file.read_bytes())
        run.write_config(candidate.config, {**run.records, "choice": record})
    remove_candidates(run)


def check(snapshots: bool, metric: bool, processes: int) -> None:
    """A ConfigError where a run that chooses its loss cannot do what else it is asked for."""
    if snapshots or metric:
        raise ConfigError("A run that chooses its loss takes no 'snapshots' and no 'metric'; name a loss.")
    if processes > 1:
        raise ConfigError("A run chooses its loss in one process. Start it without torchrun, or name a loss.")
