"""Runs and their results. A result is found by the settings that made it, so it outlives names and file layouts."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from bier import files
from bier.config import Config
from bier.errors import DataError
from bier.paper.budgets import BUDGETS, Budget, settings_of, suited
from bier.paper.experiments import DATASETS, EXPERIMENTS, Experiment, Row

Result = Mapping[str, Any]
# Where things lie, how a run is written down and what it is called: none of it changes a number.
IRRELEVANT = frozenset(
    {
        *("seed", "method", "data.root", "data.cache", "data.workers", "model.weights"),
        *("train.log_every", "train.checkpoint_every", "train.keep_checkpoints", "train.validate_every"),
        *("train.validate_by", "data.validation_classes"),  # the same in all of them, see `settings_of`
    }
)
UNTRAINED = "untrained"
OF_UNTRAINED = ("data.", "model.backbone", "model.resolution", "model.pool")


# Settings that are gone, and what they were in all runs that count as those of today.
RETIRED: Mapping[str, Any] = {"model.bias": False, "loss.boosting": "eta", "diversity.factor": 0.0}


@dataclass(frozen=True, eq=False)
class Job:
    """One run."""

    row: Row
    budget: Budget
    seed: int

    @property
    def label(self) -> str:
        return f"{self.row.data}: {self.row.label}, seed {self.seed}"

    @property
    def before(self) -> "Job | None":
        """The run whose network this one takes its features from; it must be done before."""
        return Job(self.row.features_of, self.budget, self.seed) if self.row.features_of else None

    @property
    def name(self) -> str:
        """The name of its run folder and its lock, after the first row that is the same run."""
        label = _labels(self.budget.name).get(_text(self.identity(), 0, self.row.data), self.row.label)
        words = f"{self.row.data} {self.budget.name} {label} {self.seed}".lower()
        return re.sub(r"[^a-z0-9.]+", "-", words)

    def identity(self) -> dict[str, Any]:
        """All that makes a difference to the numbers of this run, but for data and seed."""
        kind = UNTRAINED if self.row.untrained else "final"
        settings = canonical({**suited(self.row), **settings_of(self.row, self.budget)})
        features_of = self.row.features_of.label if self.row.features_of else None
        return {"kind": kind, "settings": _relevant(kind, settings), "features_of": features_of}


@cache
def _labels(budget: str) -> Mapping[str, str]:
    """The label of each run of a budget, the shorter ones of the tables per data set first; with settings if taken."""
    labels: dict[str, str] = {}
    names: set[tuple[str, str]] = set()
    rows = (row for experiment in (*DATASETS, *EXPERIMENTS.values()) for row in experiment.rows if not row.learner)
    for row in rows if budget in BUDGETS else ():
        run = _text(Job(row, BUDGETS[budget], 0).identity(), 0, row.data)
        if run not in labels:
            taken = (row.data, row.label) in names
            labels[run] = " ".join(map(str, [row.label, *row.settings.values()])) if taken else row.label
            names.add((row.data, row.label))
    return labels


def plan(experiments: Iterable[Experiment], budget: Budget, seeds: int) -> list[Job]:
    """The runs that the experiments need, each once, in an order in which each finds what it needs; first all of the
    first seed, so that whole tables are there early."""
    jobs: dict[str, Job] = {}
    for seed in range(seeds):
        for row in (row for experiment in experiments for row in experiment.rows):
            if row.untrained and seed:
                continue
            job = Job(row, budget, seed)
            for needed in (job.before, job):
                if needed is not None:
                    jobs.setdefault(_text(needed.identity(), seed, needed.row.data), needed)
    return list(jobs.values())


def canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting that matters, defaults included, as JSON holds it. Settings that are newer than a result have the
    default there: a new setting must begin as what was done before. Those that are gone have what they always were."""
    everything = {**RETIRED, **_defaults(), **settings}
    if everything["model.groups"] in (1, (everything["model.embedding"],), [everything["model.embedding"]]):
        everything |= {"model.groups": 1, "loss.boost": False, "loss.boosting": "eta"}  # there is nothing to boost
    return {key: _plain(value) for key, value in everything.items() if key not in IRRELEVANT}


def _relevant(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a result depends on: an untrained network is the same under every budget."""
    return {key: value for key, value in settings.items() if kind != UNTRAINED or key.startswith(OF_UNTRAINED)}


@cache
def _defaults() -> Mapping[str, Any]:
    return Config().flat()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return list(value) if isinstance(value, tuple) else value


class Results:
    """OUT/DATA.jsonl: one line per run, sorted, complete or absent. Tables and plots are drawn from these alone."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._read: dict[Path, tuple[int, list[Result]]] = {}

    def of(self, job: Job) -> Result | None:
        """The result of a job, or None where there is none yet."""
        wanted = _text(job.identity(), job.seed, job.row.data)
        return next((line for line in self._lines(job.row.data) if _key(line) == wanted), None)

    def seeds(self, row: Row, budget: Budget) -> list[Result]:
        """The results of one row, by seed."""
        seeds = sorted({int(line["seed"]) for line in self._lines(row.data)})
        return [result for seed in seeds if (result := self.of(Job(row, budget, seed))) is not None]

    def add(self, result: Result) -> None:
        """Write the line of a run, in place of an earlier one of the same run. Several processes may do so at once."""
        path = self.path(result["data"])
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                lines = [one for one in self._lines(result["data"]) if _key(one) != _key(result)]
                lines = sorted([*lines, result], key=lambda one: (one["kind"], one["label"], one["seed"], _key(one)))
                text = "".join(json.dumps(dict(one), allow_nan=False) + "\n" for one in lines)
                files.write(path, text.encode())
        except OSError as error:
            raise DataError(f"Cannot write {path}: {error.strerror or error}.") from error

    def path(self, data: str) -> Path:
        return self.out / f"{data}.jsonl"

    def _lines(self, data: str) -> list[Result]:
        path = self.path(data)
        if not path.is_file():
            return []
        changed = path.stat().st_mtime_ns
        if path not in self._read or self._read[path][0] != changed:
            try:
                lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                [_key(one) for one in lines]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} must hold results of `bier paper run`, one per line: {error!r}.") from error
            self._read[path] = (changed, lines)
        return self._read[path][1]


def _key(result: Result) -> str:
    identity = {key: result[key] for key in ("kind", "features_of")}
    identity |= {"peer": result["peer"]} if result.get("peer") else {}  # before losses of other authors were settings
    settings = _relevant(result["kind"], canonical(result["settings"]))
    return _text({**identity, "settings": settings}, result["seed"], result["data"])


def _text(identity: Mapping[str, Any], seed: int, data: str) -> str:
    return json.dumps({**identity, "seed": seed, "data": data}, sort_keys=True)
