"""Runs experiments: what is done stays done, what was killed goes on, and every run leaves one result."""

import hashlib
import json
import math
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor, nn

import bier
from bier import data
from bier.config import Config
from bier.data import Dataset
from bier.errors import ConfigError, DataError
from bier.evaluate.dataset import assess, assess_classifier
from bier.evaluate.pictures import choose_pictures, draw_picture
from bier.files import file_aside
from bier.images import Batches, PreparedImages, in_order
from bier.method.boosting import BoostedParts
from bier.models.backbone import autocast
from bier.models.model import load
from bier.paper.budgets import FASTER, Budget, config_of, kind_of, rates, settings_of, suited
from bier.paper.experiments import Experiment, Row
from bier.paper.results import Result, Results
from bier.training import Observer, train
from bier.training.run_folder import CHECKPOINTS, CONFIG, MODEL
from bier.training.setup import load_data

# Where things lie, how a run is written down and what it is called: none of it changes a number.
IRRELEVANT = frozenset(
    {
        *("seed", "method", "data.root", "data.cache", "data.workers", "model.weights"),
        *("train.log_every", "train.checkpoint_every", "train.keep_checkpoints"),
    }
)


@dataclass(frozen=True, eq=False)
class Job:
    """One run: the search for a rate tries `rate`; the final run, where it is None, takes the best of those."""

    row: Row
    budget: Budget
    seed: int
    rate: float | None = None

    @property
    def is_search(self) -> bool:
        return self.rate is not None

    @cached_property
    def key(self) -> str:
        """The name of its result: the digest of all that matters, and the seed."""
        digest = search_digest(self.row, self.budget, self.rate) if self.rate else row_digest(self.row, self.budget)
        return f"{digest}-{self.seed}"

    @property
    def label(self) -> str:
        where = f"{self.row.data}: {self.row.label}"
        return f"{where}, trying rate {self.rate:g}" if self.is_search else f"{where}, seed {self.seed}"

    @property
    def before(self) -> "Job | None":
        """The run whose network this one takes its features from."""
        return Job(self.row.features_of, self.budget, self.seed) if self.row.features_of else None

    @property
    def searches(self) -> list["Job"]:
        """The runs that choose the rate of this one."""
        return [] if self.is_search else searches(self.row, self.budget)

    @property
    def needs(self) -> list["Job"]:
        """The runs that must be done before this one."""
        return [*self.searches, *([self.before] if self.before else [])]


def plan(experiments: Iterable[Experiment], budget: Budget, seeds: int) -> list[Job]:
    """The runs that the experiments need, each once, in an order in which each finds what it needs; first all of the
    first seed, so that whole tables are there early."""
    jobs: dict[str, Job] = {}
    for seed in range(seeds):
        for row in (row for experiment in experiments for row in experiment.rows):
            for job in _with_needs(Job(row, budget, seed)):
                jobs.setdefault(job.key, job)
    return list(jobs.values())


def _with_needs(job: Job) -> Iterator[Job]:
    for need in job.needs:
        yield from _with_needs(need)
    yield job


def searches(row: Row, budget: Budget) -> list[Job]:
    """One run a rate of the grid; none where there is nothing to choose."""
    grid = rates(row, budget)
    return [Job(row.tuned_as or row, budget, 0, rate) for rate in grid] if len(grid) > 1 else []


def row_digest(row: Row, budget: Budget) -> str:
    """The digest of a row's final run: its settings before the search for a rate, and that search."""
    grid = rates(row, budget)
    settings = settings_of(row, budget, rate=grid[0] if grid else None)
    keys = [search.key for search in searches(row, budget)]
    return _digest({**_identity(row, budget, settings), "searches": keys, "fast": row.fast})


def search_digest(row: Row, budget: Budget, rate: float) -> str:
    return _digest({**_identity(row, budget, settings_of(row, budget, rate=rate, search=True)), "search": True})


def _identity(row: Row, budget: Budget, settings: Mapping[str, Any]) -> dict[str, Any]:
    before = row_digest(row.features_of, budget) if row.features_of else ""
    everything = {**_defaults(), **suited(row), **settings}
    if everything["model.groups"] in (1, (everything["model.embedding"],)):
        everything |= {"model.groups": 1, "loss.boost": False}  # there is nothing to boost
    return {"settings": relevant(everything), "budget": budget.name, "peer": row.peer, "features_of": before}


@cache
def _defaults() -> Mapping[str, Any]:
    return Config().flat()


def relevant(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a difference, as JSON can hold them."""
    return {key: _plain(value) for key, value in settings.items() if key not in IRRELEVANT}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return list(value) if isinstance(value, tuple) else value


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class PeerLoss(nn.Module):
    """A loss of pytorch-metric-learning in the place of `BoostedLoss`: one learner, every pair of weight 1.

    Its own parameters, such as the proxies of Proxy-NCA, are trained at the rate of the embedding layer.
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, z: Tensor, labels: Tensor) -> BoostedParts:
        """z (B, d) and labels (B,) -> the loss as that of a single learner."""
        total: Tensor = self.loss(z, labels)
        ones = z.new_ones(1)
        return BoostedParts(total, total.reshape(1), ones, ones)


def peer(name: str) -> Callable[[int, int], nn.Module]:
    """A builder of the loss called `name`, for `bier.training.train(metric=...)`; settings are the library's own."""
    try:
        from pytorch_metric_learning import losses
    except ImportError:
        raise ConfigError(
            "The losses of other authors need pytorch-metric-learning; install it with: pip install 'bier-ml[peers]'."
        ) from None
    kind = getattr(losses, name, None)
    if kind is None:
        raise ConfigError(f"pytorch-metric-learning has no loss '{name}'.")

    def build(dimension: int, classes: int) -> nn.Module:
        settings: dict[str, Any] = {}
        if name == "ProxyNCALoss":
            settings = {"num_classes": classes, "embedding_size": dimension}
        elif name == "MarginLoss":
            settings = {"learn_beta": True}  # as its authors do
        return PeerLoss(kind(**settings))

    return build


BATCH = 64


@torch.no_grad()
def write_features(run: Path, dataset: Dataset, file: Path, cache: Path | None) -> Path:
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
        source = PreparedImages(part.images, backbone.resize, part.boxes, cache)
        for pixels, _ in Batches(source, in_order(source.kept, BATCH), backbone.crop):
            with autocast(model.precision, pixels.device):
                tensors["features"].append(backbone(pixels).float())
        labels = part.labels[source.kept]
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


class Watch(Protocol):
    """Whoever watches many runs; the command line draws bars."""

    def begin(self, number: int, total: int, job: Job, config: Config) -> Observer:
        """Run `number` of `total` begins; what is returned watches its training."""

    def measuring(self, done: int, total: int) -> None:
        """Called while test images are embedded."""

    def missing(self, name: str, reason: str) -> None:
        """A data set is not there; its rows are left out."""


@dataclass(frozen=True)
class Places:
    """Where data is (the folder that holds the data sets), where everything goes, and weights of the backbone."""

    root: Path
    out: Path
    weights: Path | None = None

    def settings(self, job: Job) -> dict[str, Any]:
        # Runs that hold classes out train on fewer images: maps of the frozen stages must not replace each other.
        trained_on = "search" if job.is_search else "part" if job.row.validated else "all"
        home = self.out / "cache" / trained_on
        chosen = {"data.root": str(self.root), "data.cache": str(home)}
        if job.row.features_of is not None:
            chosen = {"data.root": str(self.features(job))}
        elif self.weights is not None and kind_of(job.row) == "retrieval":
            chosen["model.weights"] = str(self.weights)
        return chosen

    def features(self, job: Job) -> Path:
        assert job.row.features_of is not None
        return self.out / "features" / f"{row_digest(job.row.features_of, job.budget)}-{job.seed}.safetensors"

    def run(self, key: str) -> Path:
        return self.out / "runs" / key


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

    Several processes may share `places.out`, one a core or a machine: each takes runs that no other is at.
    """
    outcome = Outcome()
    datasets, outcome.missing = _present(experiments, places.root)
    for name, reason in outcome.missing.items():
        watch.missing(name, reason)
    jobs = [job for job in plan(experiments, budget, seeds or budget.seeds) if job.row.data in datasets]
    runner = _Runner(places, datasets, watch)
    waiting = deque(enumerate(jobs, start=1))
    put_off = 0  # in a row: when it is all of them, there is nothing to do but wait
    while waiting:
        number, job = waiting.popleft()
        if (known := runner.results.read(job.key)) is not None:
            _check_same_data(known, job, datasets[job.row.data], runner.results)
            outcome.found.append(job.key)
            continue
        with runner.claimed(job) as mine:
            if not mine:
                waiting.append((number, job))
                put_off += 1
            elif runner.execute(job, number, len(jobs)):
                outcome.made.append(job.key)
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


def _check_same_data(known: Result, job: Job, dataset: Dataset, results: Results) -> None:
    """Results of other pictures under the same name must not pass for ours."""
    counts = _counts(dataset)
    if not job.is_search and known["images"] != counts:
        raise ConfigError(
            f"{results.path(job.key)} was measured on other data ({known['images']} images, here {counts}); "
            "choose another --out."
        )


def _counts(dataset: Dataset) -> dict[str, int]:
    return {name: len(part) for name, part in dataset.parts.items()}


class _Runner:
    """Executes jobs one by one."""

    def __init__(self, places: Places, datasets: Mapping[str, Dataset], watch: Watch) -> None:
        self.places, self.datasets, self.watch = places, datasets, watch
        self.results = Results(places.out)

    @contextmanager
    def claimed(self, job: Job) -> Iterator[bool]:
        """Whether this process may run the job: no other is at it or has just done it, and what it needs is there."""
        lock = FileLock(self.places.out / "locks" / job.key, timeout=0)
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            with lock:
                known = [self.results.path(need.key).is_file() for need in job.needs]
                yield all(known) and not self.results.path(job.key).is_file()
        except Timeout:
            yield False

    def execute(self, job: Job, number: int, total: int) -> bool:
        """Train and measure; False if it was asked to stop (and can go on)."""
        searched = [self.results.read(search.key) for search in job.searches]
        config = self._config(job, [one for one in searched if one is not None])
        if job.row.features_of is not None:
            self._write_features(job)
        folder = self.places.run(job.key)
        started = time.perf_counter()
        observer = self.watch.begin(number, total, job, config)
        resumed = (folder / CONFIG).is_file()
        metric = peer(job.row.peer) if job.row.peer else None
        run = train(config, folder, resume=resumed, observer=observer, metric=metric)
        if run.interrupted:
            return False
        trained = time.perf_counter()
        measured = {"validation": run.best_validation} if job.is_search else self._measure(job, config, folder)
        self.results.write(
            {
                "key": job.key,
                "kind": "search" if job.is_search else "final",
                "label": job.row.label,
                "method": job.row.method,
                "peer": job.row.peer or None,
                "data": job.row.data,
                "budget": job.budget.name,
                "seed": job.seed,
                "learning_rate": config.train.learning_rate,
                "searched": [{key: one[key] for key in ("learning_rate", "validation")} for one in searched if one],
                "settings": {"seed": job.seed, **relevant(config.flat())},
                **measured,
                "images": _counts(self.datasets[job.row.data]),  # after a classifier's own count, of its test images
                "seconds": {"training": trained - started, "measuring": time.perf_counter() - trained},
                "resumed": resumed,  # then the seconds are those since
                "versions": {
                    "bier": bier.__version__,
                    "torch": str(torch.__version__),
                    "python": platform.python_version(),
                },
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )
        shutil.rmtree(folder if job.is_search else folder / CHECKPOINTS, ignore_errors=True)
        return True

    def _config(self, job: Job, searched: Iterable[Result]) -> Config:
        """The config of a job, with the rate that did best on validation classes; the lower one of equals."""
        grid = rates(job.row, job.budget)
        best = max(searched, key=lambda one: (one["validation"], -one["learning_rate"]), default=None)
        rate = job.rate or (best["learning_rate"] if best else grid[0] if grid else None)
        if rate is not None and job.row.fast:
            rate *= FASTER
        config = config_of(job.row, job.budget, job.seed, rate=rate, search=job.is_search)
        return config.with_settings(self.places.settings(job))

    def _write_features(self, job: Job) -> None:
        before = job.before
        assert before is not None
        cache = Path(self.places.settings(before)["data.cache"])
        write_features(self.places.run(before.key), self.datasets[job.row.data], self.places.features(job), cache)

    def _measure(self, job: Job, config: Config, folder: Path) -> dict[str, Any]:
        model = load(folder)
        follow = self.watch.measuring
        if kind_of(job.row) == "classification":
            return assess_classifier(folder, model, self.datasets[job.row.data], progress=follow)
        if job.row.features_of is not None:
            return assess(model, data.load("features", self.places.features(job)), progress=follow).to_dict()
        cache = Path(self.places.settings(job)["data.cache"])
        if job.row.validated:
            return assess(model, load_data(config), part="validation", cache=cache, progress=follow).to_dict()
        frozen = config.model.trainable_from if config.model.trunk_views else ""
        measured = assess(
            model, self.datasets[job.row.data], cache=cache, frozen_before=frozen, progress=follow
        ).to_dict()
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
            cache = Path(self.places.settings(job)["data.cache"])
            model = self.places.run(job.key)
            if (model / MODEL).is_dir():
                draw_pictures(model, self.datasets[row.data], self.places.out / "pictures", job.key, cache)
