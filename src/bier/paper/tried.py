"""What was tried beside the paper's settings, judged on training classes that are held out, never on test classes."""

from collections.abc import Mapping
from typing import Any

from bier.paper.experiment import Experiment, Row
from bier.paper.rows import A_BIER, ALPHA, BASELINE, CLASSIFIER, SQRT, varied

HELD_OUT = {"data.validation": 0.5}
Changes = Mapping[str, Mapping[str, Any]]  # what changes -> the settings that do it


def _rows(row: Row, title: str, changes: Changes) -> tuple[Row, ...]:
    """The row under each change; a change may bring its own rate."""
    return tuple(
        varied(row, f"{title}, {what}" if what else title, {**HELD_OUT, **change}) for what, change in changes.items()
    )


BOTH: Changes = {
    "": {},
    "cost of negative pairs 25": {"loss.cost": 25.0},
    "16 classes x 4 images": {"train.batch_classes": 16, "train.batch_images": 4},
    "4 classes x 16 images": {"train.batch_classes": 4, "train.batch_images": 16},
    "constant rate": {"train.schedule": "constant"},
    "embedding layer at the backbone's rate": {"train.embedding_factor": 1.0},
    "SGD at 1e-3": {"train.optimizer": "sgd", "train.learning_rate": 1e-3},
    "SGD at 1e-2": {"train.optimizer": "sgd", "train.learning_rate": 1e-2},
}
# As sums the terms are larger by the numbers of dimensions that a mean divides by, so lambda_div is smaller.
ENSEMBLE: Changes = {
    "no diversity loss": {"diversity.name": "none"},
    "lambda_div 1e-4": {"diversity.weight": 1e-4},
    "lambda_div 3e-3": {"diversity.weight": 3e-3},
    "sums, lambda_div 1e-6": {"diversity.reduction": "sum", "diversity.weight": 1e-6},
    "sums, lambda_div 1e-5": {"diversity.reduction": "sum", "diversity.weight": 1e-5},
    "lambda_w 10": {"diversity.norm_weight": 10.0},
    "lambda_w 1000": {"diversity.norm_weight": 1000.0},
    "features as they are": {"diversity.scale_features": False},
}
TRIED = Experiment(
    "tried",
    "What else was tried: R@1 on training classes that were held out",
    (*_rows(BASELINE, "Baseline", BOTH), *_rows(A_BIER, "A-BIER", {**BOTH, **ENSEMBLE})),
    (CLASSIFIER, ALPHA, SQRT),
)
