"""Online gradient boosting of the learners: Algorithm 1 on pairs, Appendix B on triplets."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bier.errors import DataError
from bier.method import equations
from bier.method.ensemble import checked_groups
from bier.method.losses import BinomialDeviance, pair_derivative, triplet_derivatives


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
        self,
        groups: Sequence[int],
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        boost: bool = True,
    ) -> None:
        super().__init__()
        self.groups = checked_groups(groups)
        self.loss: Any = BinomialDeviance() if loss is None else loss
        self.boost = boost
        self.rates, _ = equations.boosting_rates(len(self.groups))

    def forward(self, z: Tensor, labels: Tensor) -> BoostedParts:
        _check_batch(z, labels, sum(self.groups))
        parts = [equations.unit_rows(f) for f in z.split(self.groups, dim=1)]
        # Gathering the pairs i<j costs far more than working on the whole symmetric matrix without its diagonal,
        # which holds each of them twice and so has the same means.
        similarities = [(f @ f.T).fill_diagonal_(0) for f in parts]  # M times (B, B)
        same = labels[:, None] == labels[None, :]  # (B, B)
        if getattr(self.loss, "over", "pairs") == "triplets":
            return self._over_triplets(similarities, same)
        return self._over_pairs(similarities, same)

    def _over_pairs(self, similarities: list[Tensor], same: Tensor) -> BoostedParts:
        """Algorithm 1."""
        positive, negative = _share(same.clone().fill_diagonal_(False), similarities[0]), _share(~same, similarities[0])
        weight = torch.ones_like(positive)
        running = torch.zeros_like(positive)
        rows = []
        for m, (rate, score) in enumerate(zip(self.rates, similarities, strict=True)):
            if m and self.boost:
                weight = equations.boosting_weight(pair_derivative(self.loss, running, same))
            loss = _dot(self.loss(score, same), weight * (positive + negative))
            rows.append((loss, _dot(weight, positive), _dot(weight, negative)))
            running = equations.running_score(running, score.detach(), rate)
        return _parts(rows)

    def _over_triplets(self, similarities: list[Tensor], same: Tensor) -> BoostedParts:
        """Appendix B: a triplet is an ordered positive pair (anchor, other), of which there are A, and a negative."""
        anchor, other = same.clone().fill_diagonal_(False).nonzero(as_tuple=True)  # (A,), (A,)
        share = _share(~same.index_select(0, anchor), similarities[0])  # (A, B)
        weight = torch.ones_like(share)
        running = (torch.zeros_like(share), torch.zeros_like(share))
        rows = []
        for m, (rate, score) in enumerate(zip(self.rates, similarities, strict=True)):
            if m and self.boost:
                weight = equations.triplet_boosting_weight(*triplet_derivatives(self.loss, *running))
            negative = score.index_select(0, anchor)  # (A, B)
            positive = score[anchor, other][:, None].expand_as(negative)  # (A, B)
            mean_weight = _dot(weight, share)
            rows.append((_dot(self.loss(positive, negative), weight * share), mean_weight, mean_weight))
            running = (
                equations.running_score(running[0], positive.detach(), rate),
                equations.running_score(running[1], negative.detach(), rate),
            )
        return _parts(rows)

    def extra_repr(self) -> str:
        return f"groups={self.groups}, loss={self.loss}, boost={self.boost}"


def _share(chosen: Tensor, like: Tensor) -> Tensor:
    """A bool mask as weights that turn a sum into the mean over what is chosen (and into 0 if nothing is)."""
    return chosen.to(like.dtype) / chosen.sum().clamp_min(1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten())


def _parts(rows: list[tuple[Tensor, Tensor, Tensor]]) -> BoostedParts:
    learners, positive, negative = (torch.stack(column) for column in zip(*rows, strict=True))
    return BoostedParts(learners.mean(), learners, positive, negative)


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
