"""What an experiment is: rows to run, columns to read off them, and what the paper got."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of a table: what to train and on what, and the paper's numbers by the keys of columns.

    groups: the sizes of the learners; empty where `settings` say it.
    peer: train with this loss of pytorch-metric-learning in place of ours.
    features_of: train the embedding alone, on the features of the network that this row left.
    tuned_as: take the learning rate that was found for this row; its own is searched for otherwise.
    length: train for so many times the steps of the budget.
    fast: train at the higher rate that only runs with an auxiliary loss stand.
    size: which test set to read the numbers of, where a data set has several.
    paper_learners: the paper's R@1 of each learner alone.
    series, x: the place of the row in the figure.
    """

    label: str
    method: str
    data: str = "cub"
    groups: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)
    paper_learners: tuple[float, ...] = ()
    peer: str = ""
    features_of: "Row | None" = None
    tuned_as: "Row | None" = None
    length: float = 1.0
    fast: bool = False
    size: str = ""
    series: str = ""
    x: float = 0.0

    @property
    def validated(self) -> bool:
        """Whether its settings hold training classes out, to be measured on in place of the test classes."""
        return "data.validation" in self.settings


@dataclass(frozen=True)
class Column:
    """A number of each row. `key` is what `bier.paper.tables.measured` knows."""

    key: str
    title: str
    digits: int = 2


@dataclass(frozen=True)
class Figure:
    """Rows with a `series` drawn as curves over `x`."""

    title: str
    x_label: str
    logarithmic: bool = False


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. `partial` ones are run on whatever data is there."""

    name: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    figure: Figure | None = None
    learners: bool = False  # show each learner's own R@1
    pictures: bool = False
    partial: bool = False
