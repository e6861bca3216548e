"""Runs and their results. A result is found by the settings that made it, so it outlives names and file layouts."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from bier import files
from bier.config import Config
from bier.errors import DataError
from bier.paper.budgets import Budget, Choice, choices, settings_of, suited
from bier.paper.experiments import Experiment, Row

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


@dataclass(frozen=True, eq=False)
class Job:
    """One run: a search tries a `choice` of settings; the final run, where it is None, takes the best of those."""

    row: Row
    budget: Budget
    seed: int
    choice: Choice | None = None

    @property
    def is_search(self) -> bool:
        return self.choice is not None

    @property
    def label(self) -> str:
        tried = ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in (self.choice or {}).items())
        return f"{self.row.data}: {self.row.label}, " + (f"trying {tried}" if self.is_search else f"seed {self.seed}")

    @property
    def before(self) -> "Job | None":
        """The run whose network this one takes its features from."""
        return Job(self.row.features_of, self.budget, self.seed) if self.row.features_of else None

    @property
    def searches(self) -> list["Job"]:
        """The runs that choose the settings and the length of this one; none where there is nothing to choose."""
        if self.is_search or not choices(self.row, self.budget):
            return []
        row = self.row
        while row.tuned_as is not None:
            row = row.tuned_as
        return [Job(row, self.budget, 0, choice) for choice in choices(row, self.budget)]

    @property
    def needs(self) -> list["Job"]:
        """The runs that must be done before this one."""
        return [*self.searches, *([self.before] if self.before else [])]

    @cached_property
    def key(self) -> str:
        """The name of its run folder and its lock. Equal runs of several tables have the same."""
        content = {"run": self.identity(self.choice), "fast": self.row.fast, "needs": [need.key for need in self.needs]}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        return f"{digest}-{self.seed}"

    def identity(self, choice: Choice | None) -> dict[str, Any]:
        """All that makes a difference to the numbers of this run under a choice of settings, but for the seed."""
        settings = settings_of(self.row, self.budget, choice=choice, search=self.is_search)
        kind = "search" if self.is_search else UNTRAINED if self.row.untrained else "final"
        return {
            "kind": kind,
            "settings": _relevant(kind, canonical({**suited(self.row), **settings})),
            "features_of": self.row.features_of.label if self.row.features_of else None,
        }


def plan(experiments: Iterable[Experiment], budget: Budget, seeds: int) -> list[Job]:
    """The runs that the experiments need, each once, in an order in which each finds what it needs; first all of the
    first seed, so that whole tables are there early."""
    jobs: dict[str, Job] = {}
    for seed in range(seeds):
        for row in (row for experiment in experiments for row in experiment.rows):
            if not (row.untrained and seed):
                for job in _with_needs(Job(row, budget, seed)):
                    jobs.setdefault(job.key, job)
    return list(jobs.values())


def _with_needs(job: Job) -> Iterator[Job]:
    for need in job.needs:
        yield from _with_needs(need)
    yield job


def canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting that matters, defaults included, as JSON holds it. Settings that are newer than a result have the
    default there: a new setting must begin as what was done before."""
    everything = {**_defaults(), **settings}
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
        choice = job.choice if job.is_search else self.chosen(job)
        if choice is None and job.searches:
            return None
        return self._find(job.row.data, job.identity(choice), job.seed)

    def seeds(self, row: Row, budget: Budget) -> list[Result]:
        """The results of one row, by seed."""
        job = Job(row, budget, 0)
        choice = self.chosen(job)
        if choice is None and job.searches:
            return []
        identity = job.identity(choice)
        seeds = sorted({int(one["seed"]) for one in self._lines(row.data)})
        return [found for seed in seeds if (found := self._find(row.data, identity, seed)) is not None]

    def winner(self, job: Job) -> Job | None:
        """The search that did best on validation classes at any step, the first of equals, once all are done."""
        found = [(one["validation"], search) for search in job.searches if (one := self.of(search)) is not None]
        done = bool(found) and len(found) == len(job.searches)
        return max(found, key=lambda one: one[0])[1] if done else None

    def chosen(self, job: Job) -> Choice | None:
        """The settings that the search found."""
        winner = self.winner(job)
        return winner.choice if winner else None

    def best_step(self, job: Job) -> int | None:
        """The step at which the best run of the search was best. None where that run was shorter than this one is: its
        schedule was another."""
        winner = self.winner(job)
        found = self.of(winner) if winner else None
        if winner is None or found is None or _steps(winner) < _steps(job):
            return None
        return int(found["best_step"])

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

    def _find(self, data: str, identity: Mapping[str, Any], seed: int) -> Result | None:
        wanted = _text(identity, seed)
        return next((one for one in self._lines(data) if _key(one) == wanted), None)

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


def _steps(job: Job) -> int:
    return int(job.identity(job.choice)["settings"]["train.steps"])


def _key(result: Result) -> str:
    known = {key: result[key] for key in ("kind", "features_of")}
    known |= {"peer": result["peer"]} if result.get("peer") else {}  # before losses of other authors were settings
    return _text({**known, "settings": _relevant(result["kind"], canonical(result["settings"]))}, result["seed"])


def _text(identity: Mapping[str, Any], seed: int) -> str:
    return json.dumps({**identity, "seed": seed}, sort_keys=True)
