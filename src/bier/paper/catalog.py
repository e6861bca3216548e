"""Every table and figure of the paper by its name."""

import difflib
from collections.abc import Mapping

from bier.errors import ConfigError
from bier.paper.ablations import (
    AUXILIARY,
    EMBEDDING_SIZE,
    END_TO_END,
    GROUPS,
    INITIALISATION,
    LAMBDA,
    LENGTH,
    LOSSES,
    STRENGTH,
    SUMMARY,
)
from bier.paper.comparisons import CIFAR10, DATASETS, PEERS, PICTURES
from bier.paper.experiment import Experiment
from bier.paper.tried import TRIED

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *(STRENGTH, LOSSES, GROUPS, EMBEDDING_SIZE, INITIALISATION, AUXILIARY, LAMBDA),
        *(SUMMARY, LENGTH, END_TO_END, DATASETS, CIFAR10, PICTURES, PEERS, TRIED),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        known = ", ".join(EXPERIMENTS)
        raise ConfigError(f"The experiment must be one of {known}. Got '{name}' instead.{hint}")
    return EXPERIMENTS[name]
