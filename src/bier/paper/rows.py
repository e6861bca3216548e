"""Columns, and the rows that several tables share: the same row is the same run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bier.paper.experiment import Column, Row

RECALL = Column("recall", "R@1")
ALPHA = Column("ensemble-alpha", "R@1, alpha")
SQRT = Column("ensemble-sqrt", "R@1, sqrt")
CLASSIFIER = Column("classifier_correlation", "clf. corr.", 4)
FEATURE = Column("feature_correlation", "feature corr.", 4)
MEAN_LEARNER = Column("mean_learner", "mean R@1 of learners")
ACCURACY = Column("accuracy", "accuracy")


def varied(row: Row, label: str, settings: Mapping[str, Any]) -> Row:
    """The row with other settings, which the paper has no number for, at the rate found for the row itself."""
    return replace(row, label=label, settings=settings, tuned_as=row, paper={})


WHOLE = (512,)
THREE = (96, 160, 256)
EVEN = (170, 171, 171)

BASELINE = Row(
    "Baseline-512", "baseline", groups=WHOLE, paper={"recall": 51.76, "feature_correlation": 0.1530}
)  # fmt: skip
INIT = Row(
    "Init-96-160-256",
    "init",
    groups=THREE,
    paper={"recall": 53.93, "classifier_correlation": 0.9008, "feature_correlation": 0.1197},
    paper_learners=(50.35, 52.60, 53.36),
)
INIT_EVEN = Row(
    "Init-170-171-171",
    "init",
    groups=EVEN,
    tuned_as=INIT,
    paper={"recall": 53.73, "classifier_correlation": 0.8362, "feature_correlation": 0.1005},
    paper_learners=(51.94, 51.99, 52.26),
)
BIER = Row(
    "BIER-96-160-256",
    "bier",
    groups=THREE,
    paper={
        "recall": 55.33,
        "classifier_correlation": 0.7768,
        "feature_correlation": 0.0934,
        "mean_learner": 52.29,
    },
    paper_learners=(49.95, 52.82, 54.09),
)
BIER_EVEN = Row(
    "BIER-170-171-171",
    "bier",
    groups=EVEN,
    tuned_as=BIER,
    paper={"recall": 54.76, "classifier_correlation": 0.7882, "feature_correlation": 0.0988},
    paper_learners=(51.47, 52.28, 52.38),
)
ACTIVATION = Row(
    "Activation BIER-96-160-256",
    "activation-bier",
    groups=THREE,
    paper={"recall": 56.5, "classifier_correlation": 0.7130, "feature_correlation": 0.0882},
    paper_learners=(51.3, 53.5, 55.2),
)
A_BIER = Row(
    "A-BIER-96-160-256",
    "a-bier",
    groups=THREE,
    paper={"recall": 57.5, "classifier_correlation": 0.6031, "feature_correlation": 0.0731},
    paper_learners=(51.1, 53.8, 55.3),
)
