"""Online gradient boosting of the learners: Algorithm 1 on pairs, Appendix B on triplets."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bier.errors import DataError
from bier.method import equations
from bier.method.ensemble import checked_groups
from bier.method.losses import BinomialDeviance, pair_weight, triplet_weight


class BoostedParts(NamedTuple):
    """What `BoostedLoss` returns; `total` is the one to call backward on."""

    total: Tensor  # scalar, the mean over learners
    learners: Tensor  # (M,) the weighted loss of each learner
    positive_weights: Tensor  # (M,) mean boosting weight of the positive pairs (or of all triplets)
    negative_weights: Tensor  # (M,) mean boosting weight of the negative pairs (or of all triplets)


class BoostedLoss(nn.Module):
    """The metric loss of an ensemble: each next learner weighs the pairs by how wrong the ensemble so far is.

    Args:
        groups: the size of each learner. A single group gives the plain (baseline) loss.
        loss: a loss on pairs or triplets; see `bier.method.losses` for what may stand here.
        boost: False weighs every pair the same for every learner.

    Called with the raw embedding z (B, d) and integer labels (B,). All pairs i<j of the batch are used, the positive
    and the negative ones averaged separately and added; or all triplets, averaged. A kind that the batch does not
    have adds 0, so a batch without any pair or triplet of use has loss 0 and gradient 0. No gradient flows through
    the boosting weights.
    """

    def __init__(
        self, groups: Sequence[int], loss: Callable[[Tensor, Tensor], Tensor] | None = None, boost: bool = True
    ) -> None:
        super().__init__()
        self.groups = checked_groups(groups)
        self.loss: Any = BinomialDeviance() if loss is None else loss
        self.boost = boost

    def forward(self, z: Tensor, labels: Tensor) -> BoostedParts:
        _check_batch(z, labels, sum(self.groups))
        parts = [equations.unit_rows(f) for f in z.split(self.groups, dim=1)]
        similarities = torch.stack([f @ f.T for f in parts])  # (M, B, B)
        if getattr(self.loss, "over", "pairs") == "triplets":
            return self._over_triplets(similarities, labels)
        return self._over_pairs(similarities, labels)

    def _over_pairs(self, similarities: Tensor, labels: Tensor) -> BoostedParts:
        pairs, positives = _pairs(labels)
        scores = similarities.flatten(start_dim=1)[:, pairs]  # (M, P), positive pairs first
        same = torch.arange(len(pairs), device=pairs.device) < positives
        weights = torch.ones_like(scores)
        if self.boost:
            weights = equations.boosting_weights(scores, lambda s: pair_weight(self.loss, s, same))
        losses = weights * torch.stack([self.loss(s, same) for s in scores])
        learners = _mean(losses[:, :positives]) + _mean(losses[:, positives:])
        return BoostedParts(learners.mean(), learners, _mean(weights[:, :positives]), _mean(weights[:, positives:]))

    def _over_triplets(self, similarities: Tensor, labels: Tensor) -> BoostedParts:
        anchor, other, valid = _triplets(labels)
        positive = similarities[:, anchor, other][:, :, None].expand(-1, -1, len(labels))[:, valid]  # (M, P)
        negative = similarities[:, anchor][:, valid]  # (M, P)
        weights = torch.ones_like(positive)
        if self.boost:
            weights = equations.triplet_boosting_weights(
                positive, negative, lambda p, n: triplet_weight(self.loss, p, n)
            )
        losses = weights * torch.stack([self.loss(p, n) for p, n in zip(positive, negative, strict=True)])
        learners = _mean(losses)
        return BoostedParts(learners.mean(), learners, _mean(weights), _mean(weights))

    def extra_repr(self) -> str:
        return f"groups={self.groups}, loss={self.loss}, boost={self.boost}"


def _mean(values: Tensor) -> Tensor:
    """(M, P) -> (M,), 0 where P = 0."""
    return values.sum(dim=1) / max(values.shape[1], 1)


def _pairs(labels: Tensor) -> tuple[Tensor, int]:
    """Positions i * B + j of all pairs i<j in the flat (B, B) matrix, positive ones first, and their number."""
    same = labels[:, None] == labels[None, :]
    upper = torch.ones_like(same).triu(diagonal=1)
    positive = (same & upper).flatten().nonzero().squeeze(1)
    negative = (~same & upper).flatten().nonzero().squeeze(1)
    return torch.cat([positive, negative]), len(positive)


def _triplets(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ordered positive pairs (anchor, other), both (A,), and which images (A, B) are negatives of the anchor."""
    same = labels[:, None] == labels[None, :]
    anchor, other = (same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)).nonzero(as_tuple=True)
    return anchor, other, ~same[anchor]


def _check_batch(z: Tensor, labels: Tensor, dimension: int) -> None:
    if z.ndim != 2 or z.shape[1] != dimension or not z.is_floating_point():
        raise DataError(
            f"Expected float embeddings of shape (B, {dimension}). Got {z.dtype} of shape {tuple(z.shape)} instead."
        )
    if labels.ndim != 1 or len(labels) != len(z) or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"Expected one integer label for each of the {len(z)} embeddings. "
            f"Got {labels.dtype} of shape {tuple(labels.shape)} instead."
        )
    if len(z) < 2:
        raise DataError(f"A batch needs at least 2 images to form a pair. Got {len(z)} instead.")
    if not torch.isfinite(z).all():
        raise DataError("The embeddings of this batch contain NaN or infinite values.")
