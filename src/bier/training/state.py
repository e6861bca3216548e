"""How far a run is, what it has found so far, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bier.config import TrainConfig
from bier.images import Broken
from bier.training.setup import Scores, Validation

TIE = 0.25  # points of MAP@R that a few validation classes cannot tell apart; see docs/training.md


class TrainingResult(NamedTuple):
    """How a run ended. `interrupted`: it was asked to stop, saved a checkpoint and can be resumed.

    best_step, best_validation: the step whose model is kept and its R@1 (or accuracy) on the validation classes. Step 0
    is the untrained backbone: no step was better, and the model is its plain normalised features.
    best, untrained: all scores of that step and of the untrained backbone, where they were measured.
    queries, distractors: validation images, and training images that they were searched among besides.
    skipped: the images that `data.skip_broken` has left out.
    choice: which loss a run that was to choose one took, and why: `loss`, `why` and, where losses were tried, `map`.
    validation_share: the share of the time of the steps that validation took.
    """

    folder: Path
    step: int
    best_step: int | None
    best_validation: float | None
    interrupted: bool
    best: Scores | None = None
    untrained: Scores | None = None
    queries: int = 0
    distractors: int = 0
    skipped: tuple[Broken, ...] = ()
    choice: Mapping[str, Any] | None = None
    validation_share: float = 0.0


@dataclass
class TrainerState:
    """The current step and the best validation so far."""

    step: int = 0
    best_step: int | None = None
    best_value: float | None = None  # the highest so far; that of the best step, or up to TIE above it
    stale: int = 0  # validations since the best
    best: dict[str, float] = field(default_factory=dict)  # all scores of the best step; absent in older checkpoints
    untrained: dict[str, float] = field(default_factory=dict)  # those of step 0

    def record_validation(self, scores: Scores) -> None:
        """The best by MAP@R, the latest within TIE of it; by R@1, the first of equals, where MAP@R was not asked for.

        No tie with the untrained backbone: what is kept in its place must be better, or as good.
        """
        by_map = scores.map_at_r is not None
        value = scores.map_at_r if scores.map_at_r is not None else scores.recall
        better = self.best_value is None or value > self.best_value
        if self.step == 0:
            self.untrained = scores.named()
        self.stale = 0 if better else self.stale + 1
        if better:
            self.best_value = value
        tie = by_map and value >= (self.best_value or 0.0) - (TIE if self.best_step else 0.0)
        if better or tie:
            self.best_step, self.best = self.step, scores.named()

    def summary(self) -> dict[str, Any]:
        """What the model keeps about its validation."""
        if self.best_step is None:
            return {}
        best: Mapping[str, Any] = self.best or {"recall": self.best_value}
        measured: dict[str, Any] = {"validation": {"step": self.best_step, **best}}
        return measured | ({"untrained": self.untrained} if self.untrained else {})

    def result(self, folder: Path, interrupted: bool, validation: Validation | None) -> TrainingResult:
        best = Scores(self.best["recall"], self.best.get("map")) if self.best else None
        untrained = Scores(self.untrained["recall"], self.untrained.get("map")) if self.untrained else None
        value = best.recall if best else self.best_value
        images = (validation.count, validation.distractors) if validation else (0, 0)
        return TrainingResult(folder, self.step, self.best_step, value, interrupted, best, untrained, *images)

    def done(self, config: TrainConfig) -> bool:
        return self.step >= config.steps or 0 < config.patience <= self.stale
