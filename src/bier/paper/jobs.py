"""From experiments to runs. Rows of several tables that mean the same run become one, told by a digest of settings."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from bier.config import Config
from bier.paper.budgets import Budget, rates, settings_of, suited
from bier.paper.experiment import Experiment, Row

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
