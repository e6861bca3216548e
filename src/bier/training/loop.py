"""The training loop, from top to bottom."""

import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bier import distributed, files, system
from bier.config import Config, TrainConfig
from bier.data.recorded import record
from bier.errors import BierError, ConfigError, DataError, TrainingError
from bier.evaluate.dataset import find_same
from bier.method import equations
from bier.models.model import Model, is_pretrained
from bier.runs import Run, step_of
from bier.system import stop_requests
from bier.training import checkpoints, choice
from bier.training.checkpoints import Checkpoint
from bier.training.objective import FirstBroken, Objective, ObjectiveParts
from bier.training.optimizer import WeightAverage, build_optimizer, learning_rate
from bier.training.setup import MetricBuilder, Scores, TrainingSetup, Validation, build, solve_start
from bier.training.state import TrainerState, TrainingResult


class Observer(Protocol):
    """Receives the progress of a run; the command line shows it as a progress bar."""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Called before training, while images are read or W is solved for."""

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None:
        """Called after each step, with the row of metrics.jsonl where the step wrote one."""


class NullObserver:
    """An observer that ignores everything."""

    def prepare(self, what: str, done: int, total: int) -> None: ...

    def step(self, step: int, total: int, row: Mapping[str, Any]) -> None: ...


def train(
    config: Config,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    metric: MetricBuilder | None = None,
    snapshots: Collection[int] = (),
    same: bool = True,
    choose_loss: bool = False,
    device: str | None = None,
) -> TrainingResult:
    """Train a model as `config` describes and write a run folder: config, metrics, checkpoints, model.

    Args:
        config: all settings, as `bier.resolve` returns them.
        out: the run folder, by default runs/DATA-METHOD-SEED. It must be new, unless `resume` is set.
        resume: go on from the newest checkpoint of the run, and end with exactly the weights and metrics of an
            uninterrupted run.
        observer: is told about the progress of the run.
        metric: builds a loss of your own, from the embedding's size and the number of classes, in place of
            `config.loss`: a module whose `parts` takes (z (B, d), labels (B,)) and returns `BoostedParts`. Its
            parameters are trained too.
        snapshots: steps whose model is also saved, as RUN/model-step-N, and kept.
        same: find the similarity from which two images are called the same and keep it with the model.
        choose_loss: begin with binomial deviance and with Multi-Similarity, an eighth of the steps each, and go on with
            the loss that has the higher validation MAP@R; with binomial deviance where steps or classes are too few.
        device: where to compute, as torch names it (`cpu`, `cuda:1`, `mps`); by default the accelerator that is there.

    Returns:
        A `TrainingResult`: the folder, the last step, the step whose model is kept and its validation, and whether the
        run was interrupted.

    Raises:
        ConfigError: settings do not fit together, or the folder holds a run already.
        DataError: the data set cannot be read.
        ModelError: the backbone or its weights are missing.
        TrainingError: a loss is not finite, a checkpoint is damaged or cannot be written.

    Example:
        >>> import bier
        >>> config = bier.resolve("a-bier", "glyphs", {"train.steps": 2})  # drawn characters: needs no images
        >>> run = bier.train(config, "runs/first", same=False)
        >>> run.step, bier.load(run.folder).groups
        (2, (96, 160, 256))
    """
    run = Run(out if out is not None else default_folder(config))
    observer = observer or NullObserver()
    if resume and choose_loss and run.exists and "loss" in (chosen := run.records.get("choice", {})):
        config = config.with_settings(choice.CANDIDATES[chosen["loss"]])
    _check_folder(run, config, resume)
    with system.computing_on(device), distributed.process_group(), _only_process(run):
        _check_folder(run, config, resume)  # again: another process may have begun a run in it meanwhile
        _check_snapshots(run, config, snapshots)
        distributed.barrier()  # no process writes before all have checked the folder
        setup = build(config, run, observer.prepare, metric)
        if resume and distributed.rank() == 0:
            checkpoints.change_settings(run, config)
        chosen = run.records.get("choice", {}) if run.exists else {}
        if choose_loss and not run.exists:
            chosen = choice.planned(config, setup.dataset)
        clock = _Clock()
        advance = partial(_advance, clock=clock, chosen=chosen)
        end = None
        if choice.is_open(chosen):
            choice.check(bool(snapshots), metric is not None, distributed.world())
            end = choice.choose(run, setup, chosen, observer, advance)
        elif chosen:
            choice.remove_candidates(run)  # which a kill may have left
        state, average, interrupted = end or advance(run, setup, observer, snapshots=snapshots)
        if not interrupted and distributed.rank() == 0:
            _save_best(run, setup, average, state, same)
            checkpoints.remove_maps(run)
        result = state.result(run.path, interrupted, setup.validation)
        return result._replace(
            skipped=tuple({image.path: image for image in setup.dataset.broken}.values()),
            choice=run.records.get("choice"),
            validation_share=clock.share,
        )


class Advanced(NamedTuple):
    """Where a run stands. `interrupted`: it was asked to stop and has saved a checkpoint."""

    state: TrainerState
    average: WeightAverage
    interrupted: bool


def _advance(
    run: Run,
    setup: TrainingSetup,
    observer: Observer,
    *,
    clock: "_Clock",
    chosen: Mapping[str, Any],
    snapshots: Collection[int] = (),
    until: int | None = None,
) -> Advanced:
    """Train from the newest checkpoint, or from the start, to the end of the run or to the step `until`.

    chosen: what config.toml says about the choice of the loss, where there is one.
    """
    config = setup.config
    optimizer = build_optimizer(config, setup.objective)
    setup.objective.hold_rows(optimizer)
    average = WeightAverage(setup.objective, config.train.ema)
    fresh = run.newest() is None
    state = _start_or_restore(run, setup, optimizer, average, observer, chosen)

    def over() -> bool:
        return state.done(config.train) or (until is not None and state.step >= until)

    interrupted = False
    # At step -1: a run that was killed before its first checkpoint measures the untrained backbone again.
    metrics = checkpoints.Metrics(run, resume_at=-1 if fresh else state.step, writes=distributed.rank() == 0)
    with closing(metrics), stop_requests() as stopping:
        if fresh:
            with clock.validating():
                _measure_untrained(setup, state, metrics, observer)
            if until == 0:
                _save(run, setup, optimizer, average, state, metrics)
        model = _in_parallel(setup.objective, config.train)
        batches = iter(setup.inputs.batches(setup.sampler))
        setup.objective.train()
        broken = FirstBroken()

        while not over() and not interrupted:
            with _losing_no_step(run, setup, optimizer, average, state, metrics, whole=until is None):
                inputs, numbers = next(batches)
            state.step += 1
            row = _step(setup, model, optimizer, inputs, setup.labels[numbers], state.step, run, broken)
            average.update()
            if setup.validation and (
                _due(state.step, config.train.validate_every, config.train) or state.step == until
            ):
                _check_finite(broken, run)
                saving = _losing_no_step(run, setup, optimizer, average, state, metrics, whole=until is None)
                with clock.validating(), saving:
                    measured = _validate(setup.validation, setup.objective, average, state)
                row = {"step": state.step, **row, **measured}
            if row:
                metrics.write(row)
            observer.step(state.step, config.train.steps, row)

            ending = over()
            interrupted = distributed.any_process(bool(stopping)) and not (ending and until is None)
            due = _due(state.step, config.train.checkpoint_every, config.train)
            saving_now = due or ending or interrupted or state.best_step == state.step
            if saving_now or state.step in snapshots:
                _check_finite(broken, run)
            if state.step in snapshots:  # before the checkpoint: a run that resumes from it has the snapshot
                _save_snapshot(run, setup, average, state.step)
            if saving_now:
                _save(run, setup, optimizer, average, state, metrics)
    return Advanced(state, average, interrupted)


class _Clock:
    """The share of the time of the steps that validation takes."""

    def __init__(self) -> None:
        self.started, self.seconds = time.perf_counter(), 0.0

    @contextmanager
    def validating(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    @property
    def share(self) -> float:
        return self.seconds / max(time.perf_counter() - self.started, 1e-9)


def _check_folder(run: Run, config: Config, resume: bool) -> None:
    if not resume:
        checkpoints.check_new(run)
        return
    if not run.exists:
        raise ConfigError(f"There is no run to resume at {run}: it has no {run.config_file.name}.")
    checkpoints.check_same_config(run, config)
    if config.train.steps < run.step:
        raise ConfigError(
            f"The run {run} has reached step {run.step}; 'train.steps' must be at least that. "
            f"Got {config.train.steps} instead."
        )


def default_folder(config: Config) -> Path:
    return Path("runs") / f"{config.data.name}-{config.method}-{config.seed}"


def _only_process(run: Run) -> AbstractContextManager[None]:
    """The lock of the run folder, held by the first of several processes."""
    return files.locked(run.path, "training in") if distributed.rank() == 0 else nullcontext()


def _check_snapshots(run: Run, config: Config, snapshots: Collection[int]) -> None:
    for step in sorted(snapshots):
        if not 1 <= step <= config.train.steps:
            raise ConfigError(
                f"The 'snapshots' parameter must hold steps from 1 to {config.train.steps}. Got {step} instead."
            )
        if step <= run.step and not run.model(step).is_dir():
            raise ConfigError(
                f"The run {run} has reached step {run.step} without a snapshot of step {step}. Name it from the start."
            )


def _start_or_restore(
    run: Run,
    setup: TrainingSetup,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage,
    observer: Observer,
    chosen: Mapping[str, Any],
) -> TrainerState:
    """Start a new run, or restore the newest checkpoint of an existing one."""
    newest = run.newest()
    if newest is None:
        if distributed.rank() == 0:
            if not run.exists:
                checkpoints.begin(run)
                with checkpoints.writing(run.data_file, run):
                    run.write_images(record(setup.everything, setup.config.data.root))
                checkpoints.write_config(run, setup.config, setup.dataset.split, chosen)
            if "why" in chosen:
                observer.step(0, setup.config.train.steps, {"choice": chosen["why"]})
            solve_start(setup, observer.prepare)
        torch.manual_seed(setup.config.seed + distributed.rank())
        return TrainerState()
    saved = checkpoints.read_checkpoint(newest)
    _warn_of_device(run, setup.device)
    try:
        return _restored(saved, step_of(newest), setup, optimizer, average)
    except BierError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise checkpoints.damaged_checkpoint(newest, error) from error


def _restored(
    saved: Checkpoint, step: int, setup: TrainingSetup, optimizer: torch.optim.Optimizer, average: WeightAverage
) -> TrainerState:
    setup.objective.load_state_dict(saved.objective)
    average.load_state_dict(saved.average)
    optimizer.load_state_dict(dict(saved.optimizer))
    # The images were compared with the record of the run, and what differs was said.
    setup.sampler.load_state_dict({**saved.sampler, "labels": setup.sampler.state_dict()["labels"]})
    state = TrainerState(**saved.trainer)
    if state.step != step:
        raise ValueError(f"it is of step {state.step!r}")
    if (processes := len(saved.random["cpu"])) != distributed.world():
        _warn_of_processes(processes, step)
        torch.manual_seed(setup.config.seed + distributed.rank() + step)
        return state
    # A copy of each row, because torch reads a row of a matrix from the start of the matrix.
    random = {kind: rows[distributed.rank()].clone() for kind, rows in saved.random.items()}
    checkpoints.set_random_state(setup.device, random)
    return state


def _warn_of_device(run: Run, device: torch.device) -> None:
    """The device that the run began on is in its config.toml, in those of earlier versions not."""
    before = run.records.get("made_by", {}).get("device", str(device))
    if before != str(device) and distributed.rank() == 0:
        warnings.warn(
            f"The run began on {before} and goes on with {device}, where sums are rounded differently.", stacklevel=2
        )


def _warn_of_processes(before: int, step: int) -> None:
    """A cluster that has lost a machine goes on with fewer processes; the loss still spans the whole batch."""
    if distributed.rank() == 0:
        warnings.warn(
            f"Up to step {step} the run had {before} process{'es' * (before != 1)}, now it has {distributed.world()}. "
            "Batches and the learning rate stay the same; sums are rounded differently, dropout draws other numbers "
            "and batch norm that is trained sees other shares of a batch, so the weights will differ from those of an "
            "undisturbed run.",
            stacklevel=2,
        )


def _measure_untrained(
    setup: TrainingSetup, state: TrainerState, metrics: checkpoints.Metrics, observer: Observer
) -> None:
    """Step 0: the plain features of the pretrained backbone, which training has to beat."""
    validation = setup.validation
    if state.step or validation is None or not validation.by_map or not is_pretrained(setup.config.model):
        return
    observer.prepare("validation of the untrained backbone", 0, 1)
    scores = distributed.from_first(lambda: validation.measure_untrained(setup.objective))
    observer.prepare("validation of the untrained backbone", 1, 1)
    state.record_validation(scores)
    row = {"step": 0, **_validation_row(scores)}
    metrics.write(row)
    observer.step(0, setup.config.train.steps, row)


def _in_parallel(objective: Objective, settings: TrainConfig) -> torch.nn.Module:
    """The objective, wrapped where several processes train it."""
    if distributed.world() == 1:
        return objective
    # While only what follows the backbone is trained, the weights of the backbone take no part in the loss.
    return DistributedDataParallel(objective, find_unused_parameters=settings.embedding_warmup > 0)


def _step(
    setup: TrainingSetup,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    labels: Tensor,
    step: int,
    run: Run,
    broken: FirstBroken,
) -> dict[str, Any]:
    """One training step. Returns its line of metrics.jsonl, empty at steps that are not logged.

    Off the CPU nothing here waits for the device unless the step is logged. What else may wait: validation, snapshots
    and checkpoints, of which each asks first whether all values so far were finite.
    """
    settings = setup.config.train
    for group in optimizer.param_groups:
        group["lr"] = group["factor"] * learning_rate(settings, step)
    setup.objective.hold_network(step <= settings.embedding_warmup)
    parts = _forward(model, inputs.to(setup.device), labels.to(setup.device), step, run)
    broken.note(step, "metric loss", parts.metric.total)
    broken.note(step, "diversity loss", parts.diversity)
    logging = _due(step, settings.log_every, settings)
    asking = logging or setup.device.type == "cpu"  # where it costs nothing, a broken run ends at once
    if asking:
        _check_finite(broken, run)
    row = _row(step, parts, setup.objective, optimizer) if logging else {}
    optimizer.zero_grad()
    parts.total.backward()
    if logging or settings.clip:
        norm = _gradient_norm(setup.objective, settings.clip)
        broken.note(step, "norm of the gradient", norm)
        if asking:
            _check_finite(broken, run)
        row |= {"gradient_norm": float(norm)} if logging else {}
    optimizer.step()
    if logging:
        row["row_norm_deviation"] = float(equations.row_norm_deviation(setup.objective.ensemble.weight))
    return row


def _forward(model: torch.nn.Module, inputs: Tensor, labels: Tensor, step: int, run: Run) -> ObjectiveParts:
    """The loss of a batch, or an error that names the step and the last checkpoint."""
    try:
        parts: ObjectiveParts = model(inputs, labels)
    except DataError as error:
        raise _broken(step, str(error), run) from error
    return parts


def _check_finite(broken: FirstBroken, run: Run) -> None:
    """An error that names the first value that was not finite, its step and the last checkpoint."""
    if first := broken.ask():
        raise _broken(*first, run)


def _broken(step: int, what: str, run: Run) -> TrainingError:
    good = run.newest()
    advice = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
    return TrainingError(f"Step {step}: {what} Try a lower train.learning_rate; {advice}.")


def _row(step: int, parts: ObjectiveParts, objective: Objective, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    metric = parts.metric
    row = {
        "step": step,
        "loss": parts.total.item(),
        "metric_loss": metric.total.item(),
        "learner_losses": metric.learners.tolist(),
        "positive_weights": metric.positive_weights.tolist(),
        "negative_weights": metric.negative_weights.tolist(),
        "learning_rate": optimizer.param_groups[0]["lr"],
        "metric_gradient_on_w": _gradient_on_w(metric.total, objective),
    }
    if objective.diversity is not None:
        row["diversity_loss"] = parts.diversity.item()
        row["similarity"] = parts.similarity.item()
        row["diversity_gradient_on_w"] = objective.lambda_div * _gradient_on_w(parts.diversity, objective)
    return row


def _gradient_on_w(loss: Tensor, objective: Objective) -> float:
    """The gradient norm of one term of the loss with respect to W: compare the terms when choosing lambda_div."""
    (gradient,) = torch.autograd.grad(loss, [objective.ensemble.weight], retain_graph=True)
    return float(gradient.norm())


def _gradient_norm(objective: Objective, clip: float) -> Tensor:
    """The norm of the gradient, which is then scaled down to `clip` where that is not 0 and smaller."""
    parameters = [p for p in objective.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return norm


def _validate(
    validation: Validation, objective: Objective, average: WeightAverage, state: TrainerState
) -> dict[str, Any]:
    """Measure the averaged weights on the validation part. Returns what the line of metrics.jsonl says about it."""
    with average.applied():
        scores = distributed.from_first(lambda: validation.measure(objective))
    state.record_validation(scores)
    return _validation_row(scores)


def _validation_row(scores: Scores) -> dict[str, Any]:
    """What a line of metrics.jsonl says about a validation; step 0 has no learners."""
    row: dict[str, Any] = {"validation": scores.recall}
    if scores.map_at_r is not None:
        row["validation_map"] = scores.map_at_r
    return row | ({"validation_learners": list(scores.learners)} if scores.learners else {})


def _due(step: int, every: int, settings: TrainConfig) -> bool:
    return step % every == 0 or step == settings.steps


def _save_snapshot(run: Run, setup: TrainingSetup, average: WeightAverage, step: int) -> None:
    if distributed.rank() == 0 and not run.model(step).is_dir():
        with average.applied():
            weights = setup.objective.state_dict()
            if name := next((name for name, value in weights.items() if not torch.isfinite(value).all()), None):
                raise _broken(step, f"weights/{name} contains NaN or infinite values.", run)
            checkpoints.save_model(run, setup.model(), setup.objective.metric, step)


def _save(
    run: Run,
    setup: TrainingSetup,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage,
    state: TrainerState,
    metrics: checkpoints.Metrics,
) -> None:
    """Flush the metrics, write a checkpoint and remove old ones."""
    generators = checkpoints.random_state(setup.device)
    random = {kind: distributed.gather(row[None]) for kind, row in generators.items()}  # a row for each process
    if distributed.rank() != 0:
        return
    sampler = setup.sampler.state_dict(batches=state.step)
    objective = setup.objective.state_dict()
    checkpoint = Checkpoint(objective, optimizer.state_dict(), sampler, asdict(state), random, average.state_dict())
    if broken := checkpoint.not_finite():  # a loss may be finite and its gradient not
        raise _broken(state.step, f"{broken} contains NaN or infinite values.", run)
    metrics.flush()
    checkpoints.write_checkpoint(run, state.step, checkpoint)
    checkpoints.prune(run, setup.config.train.keep_checkpoints, state.best_step)


@contextmanager
def _losing_no_step(
    run: Run,
    setup: TrainingSetup,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage,
    state: TrainerState,
    metrics: checkpoints.Metrics,
    *,
    whole: bool,
) -> Iterator[None]:
    """A checkpoint where an image that cannot be read ends the run, and a model if it is a whole one."""
    try:
        yield
    except DataError:
        if distributed.world() == 1 and state.step > 0:  # other processes would know of no error
            _save(run, setup, optimizer, average, state, metrics)
            if whole:
                _save_best(run, setup, average, state, same=False)
                warnings.warn(
                    f"The model of step {state.step} is in {run.model()}. Go on with --resume {run} when the image is "
                    "repaired or deleted, or with --skip-broken as well.",
                    stacklevel=2,
                )
        raise


def _save_best(run: Run, setup: TrainingSetup, average: WeightAverage, state: TrainerState, same: bool) -> None:
    """The model of the best step, or of the last one where nothing was validated; then what needs the images again."""
    if state.best_step is not None and (best := run.checkpoint(state.best_step)).is_dir():
        saved = checkpoints.read_checkpoint(best)
        setup.objective.load_state_dict(saved.objective)
        average.load_state_dict(saved.average)
    average.keep()
    summary = state.summary()
    if chosen := run.records.get("choice"):
        summary["choice"] = chosen
    model = setup.untrained_model(summary) if state.best_step == 0 else setup.model(summary)
    checkpoints.save_model(run, model, setup.objective.metric)
    searches = setup.dataset.protocol != "accuracy"
    if setup.validation is not None and searches and not model.is_fast and state.done(setup.config.train):
        model = _measured_as_encoded(model, setup, setup.validation, state)
        checkpoints.save_model(run, model, setup.objective.metric)
    if same:
        model.metadata["same"] = _match_threshold(model, setup)
        checkpoints.save_model(run, model, setup.objective.metric)


def _measured_as_encoded(model: Model, setup: TrainingSetup, validation: Validation, state: TrainerState) -> Model:
    """The model with its final figures, of pictures as it encodes them. Steps were compared by a quicker look: where
    the untrained backbone is better by these, it is the model."""
    try:
        scores = validation.measure_encoded(model)
        if state.untrained:
            plain = setup.untrained_model({key: model.metadata[key] for key in ("choice",) if key in model.metadata})
            untrained = validation.measure_encoded(plain) if state.best_step else scores
            if (untrained.map_at_r or 0.0) > (scores.map_at_r or 0.0):
                model, scores, state.best_step = plain, untrained, 0
            state.untrained = untrained.named()
    except DataError as error:
        warnings.warn(f"The figures of the model are those of training's own look at pictures. {error}", stacklevel=2)
        return model
    state.best = scores.named()
    model.metadata |= state.summary()
    return model


def _match_threshold(model: Model, setup: TrainingSetup) -> dict[str, Any] | None:
    """The similarity from which two images are called the same; without it a model is as good for searching."""
    try:
        return find_same(model, setup.dataset)
    except DataError as error:
        warnings.warn(f"The model has no match threshold. {error}", stacklevel=2)
        return None
