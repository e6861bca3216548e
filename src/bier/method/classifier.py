"""Boosting for classification: the last fully connected layer is split into groups, each with its own classifier."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bier.distributed import gather
from bier.errors import DataError
from bier.method import defaults, equations
from bier.method.boosting import BoostedParts
from bier.method.checks import (
    check_choice,
    check_count,
    check_finite,
    check_labels,
    check_number,
    check_rows,
    checked_groups,
    looks_at_values,
)


class BoostedClassifier(nn.Module):
    """Boosting for classification: a linear classifier on each group of the last hidden layer, with cross-entropy.

    Eq. (5) to (7) on logits, Appendix F of "Deep Metric Learning with BIER", https://arxiv.org/abs/1801.04815

    The weight of an image for learner m+1 is the size of the derivative of the cross-entropy at s^m with respect to
    the logit of its own class: 1 - p(own class), in (0, 1). A learner's loss is the weighted mean, sum(w loss) /
    sum(w): weights fall during training, most of all those of the last learners, whose losses would otherwise become
    small beside a diversity loss.

    Args:
        groups: the size of each learner. One group gives the plain network.
        classes: the number of classes.
        boost: False trains every classifier with weight 1 for every image.
        boosting: `eta` weights images, Eq. (7). `gradient` weights none and trains learner m with the gradient of the
            cross-entropy at the running score, Eq. (7c).
        dropout: probability of dropping an input of the classifiers.
        gather_distributed: as in `BoostedLoss`.

    Returns:
        A scalar, the mean over learners; `parts` returns it as a `BoostedParts`, whose two mean weights are both those
        of all images. `logits` is the prediction of the ensemble.

    Raises:
        ConfigError: a parameter is out of range.
        DataError: embeddings or labels have a wrong shape, type or range.

    Example:
        >>> import bier, torch
        >>> classifier = bier.BoostedClassifier((4, 8), classes=3)
        >>> z = torch.randn(5, 12)
        >>> classifier(z, torch.tensor([0, 1, 2, 0, 1])).backward()
        >>> classifier.logits(z).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        groups: Sequence[int],
        classes: int,
        boost: bool = defaults.BOOST,
        dropout: float = defaults.DROPOUT,
        gather_distributed: bool = False,
        boosting: defaults.Boosting = defaults.BOOSTING,
    ) -> None:
        super().__init__()
        check_count("classes", classes, least=2)
        self.groups = checked_groups(groups)
        check_number("dropout", dropout, least=0, below=1)
        check_choice("boosting", boosting, ("eta", "gradient"))
        self.classes = classes
        self.boost = boost
        self.boosting = boosting
        self.gather_distributed = gather_distributed
        self.dropout = nn.Dropout(dropout)
        self.heads = nn.ModuleList(nn.Linear(size, classes) for size in self.groups)
        self.rates, _ = equations.boosting_rates(len(self.groups))

    def learner_logits(self, z: Tensor) -> list[Tensor]:
        """z (B, d) -> M times (B, classes)."""
        parts = self.dropout(z).split(self.groups, dim=1)
        return [head(f) for head, f in zip(self.heads, parts, strict=True)]

    def logits(self, z: Tensor) -> Tensor:
        """Eq. (5): F = sum_m alpha_m logits_m, z (B, d) -> (B, classes)."""
        return equations.ensemble_score(torch.stack(self.learner_logits(z)))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """Raw embeddings z (B, d) and labels (B,) from 0 to classes - 1 -> scalar."""
        return self.parts(z, labels).total

    def parts(self, z: Tensor, labels: Tensor) -> BoostedParts:
        """Raw embeddings z (B, d) and labels (B,) -> the loss and its parts."""
        check_rows(z, sum(self.groups), least=0 if self.gather_distributed else 1)
        check_labels(labels, z)
        if self.gather_distributed:
            z, labels = gather(z), gather(labels)
        check_finite(z)
        self._check_classes(labels)
        labels = labels.long()
        all_logits = self.learner_logits(z)
        weight = torch.ones(len(z), dtype=z.dtype, device=z.device)
        running = torch.zeros_like(all_logits[0])
        losses, means = [], []
        gradient = self.boost and self.boosting == "gradient"
        for m, (rate, logits) in enumerate(zip(self.rates, all_logits, strict=True)):
            if m and self.boost and not gradient:
                weight = 1 - equations.own_probability(running, labels)  # Eq. (7)
            total_weight = weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)  # 0 where every image is certain
            at = equations.running_score(running, logits, rate) if gradient else logits  # Eq. (7c), or s_m itself
            losses.append((weight * F.cross_entropy(at, labels, reduction="none")).sum() / total_weight)
            means.append(weight.mean())
            running = equations.running_score(running, logits.detach(), rate)
        learners, mean_weights = torch.stack(losses), torch.stack(means)
        return BoostedParts(learners.mean(), learners, mean_weights, mean_weights)

    def _check_classes(self, labels: Tensor) -> None:
        if not looks_at_values(labels):
            return
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or highest >= self.classes:
            raise DataError(
                f"Expected labels from 0 to {self.classes - 1}. Got labels from {lowest} to {highest} instead."
            )
