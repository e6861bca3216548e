"""Runs experiments: what is done stays done, what was killed goes on, and every run leaves one result."""

import platform
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file

import bier
from bier import data
from bier.config import Config
from bier.data import Dataset
from bier.errors import ConfigError, DataError
from bier.evaluate.dataset import assess, assess_classifier
from bier.evaluate.report.pictures import choose_pictures, draw_picture
from bier.files import file_aside
from bier.models.embed import Progress, inputs_for, inputs_in_order, run_network, to_array
from bier.models.model import Model, load, pretrained
from bier.paper.budgets import GOOGLENET, Budget, config_of, kind_of, snapshots_of
from bier.paper.experiments import Experiment
from bier.paper.results import Job, Result, Results, canonical, plan
from bier.runs import Run
from bier.training import Observer, train

BATCH = 64


@torch.no_grad()
def write_features(
    run: Path, dataset: Dataset, file: Path, cache: Path | None, progress: Progress | None = None
) -> Path:
    """Write phi of the training and test images, by the network of a run, as a data set of the kind `features`.

    What is there is kept; it is written aside and renamed, so it is complete.
    """
    if file.is_file():
        return file
    model = load(run)
    backbone = model.backbone.eval()
    tensors: dict[str, list[torch.Tensor]] = {"features": [], "labels": [], "split": []}
    classes = 0
    for number, name in enumerate(("train", "test")):
        part = dataset[name]
        source = inputs_for(part, backbone, cache=cache)
        pixels, total = inputs_in_order(source, BATCH), len(source)
        features = to_array(run_network(backbone, pixels, model.device, model.precision, progress, total))
        tensors["features"].append(torch.from_numpy(features))
        labels = part.labels
        tensors["labels"].append(torch.from_numpy(labels + classes))  # classes of the two parts stay apart
        tensors["split"].append(torch.full((len(labels),), number))
        classes += int(np.max(labels)) + 1
    file.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(file) as aside:
        save_file({key: torch.cat(rows) for key, rows in tensors.items()}, aside)
    return file


KINDS = ("learners", "typical", "hard", "failed")


def draw_pictures(run: Path, dataset: Dataset, folder: Path, key: str, cache: Path | None) -> list[Path]:
    """Draw what a run retrieves into `folder/KEY-KIND.png`, unless it is there. A rule without a query draws none."""
    if pictures_of(folder, key):
        return pictures_of(folder, key)
    found = assess(load(run), dataset, cache=cache)
    if found.images is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for picture in choose_pictures(found.result):
        path = folder / f"{key}-{picture.name}.png"
        with file_aside(path) as aside:
            draw_picture(picture, found.images, found.gallery_images).save(aside, format="png")
    return pictures_of(folder, key)


def pictures_of(folder: Path, key: str) -> list[Path]:
    """The pictures of a run that are there, in the paper's order."""
    return [path for kind in KINDS if (path := folder / f"{key}-{kind}.png").is_file()]


PATIENCE = 2.0  # seconds between two looks at what other processes have done
SIZES = ("small", "medium", "large")  # the test sets of VehicleID
WEIGHTS = "bvlc_googlenet.caffemodel"  # looked for beside the data sets


class Watch(Protocol):
    """Whoever watches many runs; the command line draws bars."""

    def begin(self, number: int, total: int, job: Job, config: Config) -> Observer:
        """Run `number` of `total` begins; what is returned watches its training."""

    def measuring(self, done: int, total: int) -> None:
        """Called while the images of a part are embedded."""

    def missing(self, name: str, reason: str) -> None:
        """A data set is not there; its rows are left out."""


@dataclass(frozen=True)
class Places:
    """Where data is (the folder that holds the data sets), where everything goes, and weights of GoogLeNet."""

    root: Path
    out: Path
    weights: Path | None = None

    def config(self, job: Job, config: Config) -> Config:
        """The config with the paths of this machine."""
        if job.row.features_of is not None:
            return config.with_settings({"data.root": str(self.features(job.before))})
        settings = {"data.root": str(self.root), "data.cache": str(self.cache)}
        if config.model.backbone == GOOGLENET:
            weights = self.weights or self.root / WEIGHTS
            if not weights.is_file():
                raise ConfigError(f"There are no weights of GoogLeNet at {weights}. Name them with --weights FILE.")
            settings["model.weights"] = str(weights)
        return config.with_settings(settings)

    @property
    def cache(self) -> Path:
        return self.out / "cache"

    def features(self, job: Job | None) -> Path:
        """The features of the network that a job left, for a run that is trained on them."""
        assert job is not None
        return self.out / "features" / f"{job.name}.safetensors"

    def run(self, job: Job) -> Path:
        return self.out / "runs" / job.name


@dataclass
class Outcome:
    """How it went: keys of the runs made now, of those that were already there, data sets that are missing."""

    made: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


def run(
    experiments: Sequence[Experiment], budget: Budget, places: Places, watch: Watch, seeds: int | None = None
) -> Outcome:
    """Run what the experiments need and what no earlier call has run. Rows whose data is missing are an error, unless
    several experiments or a partial one are asked for: then they are left out.

    Several processes may share `places.out`, one per core or machine: each takes runs that no other is at.
    """
    outcome = Outcome()
    datasets, outcome.missing = _present(experiments, places.root)
    for name, reason in outcome.missing.items():
        watch.missing(name, reason)
    jobs = [job for job in plan(experiments, budget, seeds or budget.seeds) if job.row.data in datasets]
    runner = _Runner(places, datasets, watch, jobs)
    waiting = deque(enumerate(jobs, start=1))
    put_off = 0  # in a row: when it is all of them, there is nothing to do but wait
    while waiting:
        number, job = waiting.popleft()
        if (known := runner.done(job)) is not None:
            _check_same_data(known, datasets[job.row.data], runner.results)
            outcome.found.append(job.name)
            continue
        with runner.claimed(job) as mine:
            if not mine:
                waiting.append((number, job))
                put_off += 1
            elif runner.execute(job, number, len(jobs)):
                outcome.made.append(job.name)
                put_off = 0
            else:
                outcome.interrupted = True
                return outcome
        if waiting and put_off >= len(waiting):
            time.sleep(PATIENCE)
    for experiment in experiments:
        if experiment.pictures:
            runner.draw(experiment, budget)
    return outcome


def _present(experiments: Sequence[Experiment], root: Path) -> tuple[dict[str, Dataset], dict[str, str]]:
    """The data sets that are there, and why the others are not."""
    found: dict[str, Dataset] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(row.data for experiment in experiments for row in experiment.rows):
        try:
            found[name] = data.load(name, root)
        except DataError as error:
            missing[name] = str(error)
    may_lack = len(experiments) > 1 or any(experiment.partial for experiment in experiments)
    if missing and not (found and may_lack):
        name, reason = next(iter(missing.items()))
        names = ", ".join(f"'{one}'" for one in missing)
        raise DataError(f"Missing below {root}: {names}. {reason}" if len(missing) > 1 else f"'{name}': {reason}")
    return found, missing


def _check_same_data(known: Result, dataset: Dataset, results: Results) -> None:
    """Results of other pictures under the same name must not pass for ours."""
    counts = _counts(dataset)
    if known["images"] != counts:
        raise ConfigError(
            f"{results.path(dataset.name)} was measured on other data ({known['images']} images, here {counts}); "
            "choose another --out."
        )


def _counts(dataset: Dataset) -> dict[str, int]:
    return {name: len(part) for name, part in dataset.parts.items()}


class _Runner:
    """Executes jobs one by one."""

    def __init__(self, places: Places, datasets: Mapping[str, Dataset], watch: Watch, jobs: Sequence[Job] = ()) -> None:
        self.places, self.datasets, self.watch = places, datasets, watch
        self.results = Results(places.out)
        # Runs whose networks give the features of runs that are still to be made.
        self.needed = {job.before.name for job in jobs if job.before and self.results.of(job) is None}

    def done(self, job: Job) -> Result | None:
        """The result of a job. None where there is none, or where its network is needed and only the result is there,
        as with results that were copied from elsewhere."""
        result = self.results.of(job)
        left = self.places.features(job).is_file() or Run(self.places.run(job)).model().is_dir()
        return result if left or job.name not in self.needed else None

    @contextmanager
    def claimed(self, job: Job) -> Iterator[bool]:
        """Whether this process may run the job: no other is at it or has just done it, and what it needs is there."""
        lock = FileLock(self.places.out / "locks" / job.name, timeout=0)
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            with lock:
                yield (job.before is None or self.done(job.before) is not None) and self.done(job) is None
        except Timeout:
            yield False

    def execute(self, job: Job, number: int, total: int) -> bool:
        """Train and measure; False if it was asked to stop (and can go on)."""
        config = self.places.config(job, config_of(job.row, job.budget, job.seed))
        started = time.perf_counter()
        observer = self.watch.begin(number, total, job, config)
        measured = self._untrained(job, config) if job.row.untrained else self._trained(job, config, observer)
        if measured is None:
            return False
        identity = job.identity()
        self.results.add(
            {
                **identity,
                "settings": {**canonical(config.flat()), **identity["settings"]},
                "label": job.row.label,
                "method": "untrained" if job.row.untrained else job.row.method,
                "data": job.row.data,
                "budget": job.budget.name,
                "seed": job.seed,
                **measured,
                "images": _counts(self.datasets[job.row.data]),  # after a classifier's own count, of its test images
                "seconds": time.perf_counter() - started,
                "versions": {
                    "bier": bier.__version__,
                    "torch": str(torch.__version__),
                    "python": platform.python_version(),
                },
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )
        shutil.rmtree(Run(self.places.run(job)).checkpoints, ignore_errors=True)
        return True

    def _untrained(self, job: Job, config: Config) -> dict[str, Any]:
        weights = Path(config.model.weights) if config.model.weights else None
        model = pretrained(config.model.backbone, weights, test_resolution=0, mirror=False)
        return self._measure(job, config, model)

    def _trained(self, job: Job, config: Config, observer: Observer) -> dict[str, Any] | None:
        if job.row.features_of is not None:
            self._write_features(job)
        folder = self.places.run(job)
        resumed = Run(folder).exists
        snapshots = snapshots_of(job.row, job.budget)
        done = train(config, folder, resume=resumed, observer=observer, snapshots=snapshots, same=False)
        if done.interrupted:
            return None
        measured = {**self._measure(job, config, folder), "resumed": resumed}
        if snapshots:
            models = [(step, Run(folder).model(step)) for step in snapshots]
            curve = [(step, self._measure(job, config, model)) for step, model in models]
            measured["curve"] = [self._point(job, config, *point) for point in [*curve, (done.step, measured)]]
        return measured

    def _point(self, job: Job, config: Config, step: int, measured: Mapping[str, Any]) -> dict[str, Any]:
        """What is kept of a measurement on the way: R@1 of the ensemble and of each learner, and both correlations."""
        recall = {name: values["1"] for name, values in measured["recall"].items()}
        passes = (
            step * config.train.batch_classes * config.train.batch_images / len(self.datasets[job.row.data]["train"])
        )
        correlations = {key: measured[key] for key in ("feature_correlation", "classifier_correlation")}
        return {"step": step, "passes": round(passes, 2), "recall": recall, **correlations}

    def _write_features(self, job: Job) -> None:
        before, places = job.before, self.places
        assert before is not None
        dataset, file = self.datasets[job.row.data], places.features(before)
        write_features(places.run(before), dataset, file, places.cache, self.watch.measuring)

    def _measure(self, job: Job, config: Config, model: Model | Path) -> dict[str, Any]:
        follow, cache = self.watch.measuring, self.places.cache
        dataset = self.datasets[job.row.data]
        if kind_of(job.row) == "classification":
            assert isinstance(model, Path)
            return assess_classifier(model, load(model), dataset, progress=follow)
        model = load(model) if isinstance(model, Path) else model
        if job.row.features_of is not None:
            return assess(model, data.load("features", self.places.features(job.before)), progress=follow).to_dict()
        frozen = config.model.trainable_from if config.model.trunk_views and not job.row.untrained else ""
        measured = assess(model, dataset, cache=cache, frozen_before=frozen, progress=follow).to_dict()
        if job.row.data == "vehicleid":
            sizes = {"small": measured}
            for size in SIZES[1:]:
                other = data.load("vehicleid", self.places.root, size=size)
                sizes[size] = assess(model, other, cache=cache, progress=follow).to_dict()
            measured = {**measured, "sizes": sizes}
        return measured

    def draw(self, experiment: Experiment, budget: Budget) -> None:
        """The retrieval pictures of the first seed of each row, unless they are there."""
        for row in experiment.rows:
            job = Job(row, budget, 0)
            model = self.places.run(job)
            if Run(model).model().is_dir() and row.data in self.datasets:
                draw_pictures(model, self.datasets[row.data], self.places.out / "pictures", job.name, self.places.cache)
