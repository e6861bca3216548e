"""Online gradient boosting of the learners: Algorithm 1 on pairs, Appendix B on triplets."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from bier.distributed import gather
from bier.errors import ConfigError, DataError
from bier.method import defaults, equations
from bier.method.checks import (
    check_choice,
    check_finite,
    check_labels,
    check_rows,
    check_same,
    checked_groups,
    looks_at_values,
)
from bier.method.equations import running_score
from bier.method.library import LibraryLoss, is_from_library
from bier.method.losses import BinomialDeviance, pair_weight, triplet_weight

BAND = 128  # rows of the batch whose pairs are worked on at once


class BoostedParts(NamedTuple):
    """The loss and what it is made of; `total` is what `BoostedLoss` returns."""

    total: Tensor  # scalar, the mean over learners
    learners: Tensor  # (M,) the weighted loss of each learner
    positive_weights: Tensor  # (M,) mean boosting weight of the positive pairs (or of all triplets)
    negative_weights: Tensor  # (M,) mean boosting weight of the negative pairs (or of all triplets)


class BoostedLoss(nn.Module):
    """The metric loss of an ensemble: each learner weighs the pairs by how wrong the learners before it are.

    Eq. (5) to (8), Section 3.1 and Appendix B of "Deep Metric Learning with BIER", https://arxiv.org/abs/1801.04815

    All pairs i<j of the batch are used, the positive and the negative ones averaged separately and added; or all
    triplets, averaged; or the whole matrix of similarities (`MultiSimilarity`), averaged over its rows. A kind that the
    batch does not have adds 0, so a batch without any such pair or triplet has loss 0 and gradient 0. No gradient flows
    through the boosting weights.

    Args:
        groups: the size of each learner. A single group gives the plain (baseline) loss.
        loss: a loss on pairs or triplets, by default `BinomialDeviance()`; see `bier.method.losses` for the interface.
            Or a loss of pytorch-metric-learning, such as `MultiSimilarityLoss()`; see `bier.method.library` for how it
            is boosted. Its proxies, if it has any, are of the size of the whole embedding.
        boost: False gives every pair the weight 1 for every learner.
        boosting: how pairs are weighted. `eta` is Algorithm 1 of the paper, Eq. (7): the derivative of the loss at the
            running score. `shrinkage` is the form in the authors' code, Eq. (7b), for binomial deviance only.
            `gradient` weights no pairs and trains learner m with the gradient of the loss at the running score, Eq.
            (7c). That is also how `eta` boosts what gives no value per pair: `MultiSimilarity` and the losses of
            pytorch-metric-learning without proxies.
        gather_distributed: compute the loss over the batches of all processes of the default process group, which may
            differ in size; inside DistributedDataParallel the gradients are then those of one process with the whole
            batch.
        shrinkage: nu of Eq. (7b).
        miner: a miner of pytorch-metric-learning, for a loss of that library.

    Returns:
        A scalar, the mean over learners. `parts` returns it as a `BoostedParts` with the loss and the mean weights of
        each learner, which are 1 where pairs are not weighted.

    Raises:
        ConfigError: a parameter is out of range, or `loss` does not give one value per similarity.
        DataError: embeddings or labels have a wrong shape or type, or embeddings are not finite.

    Example:
        >>> import bier, torch
        >>> groups = bier.group_sizes(48, 3)
        >>> boosted = bier.BoostedLoss(groups)
        >>> z, labels = torch.randn(8, 48, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        >>> boosted(z, labels).backward()
        >>> boosted.parts(z, labels).learners.shape
        torch.Size([3])
    """

    def __init__(
        self,
        groups: Sequence[int],
        loss: Callable[..., Tensor] | None = None,
        boost: bool = defaults.BOOST,
        boosting: defaults.Boosting = defaults.BOOSTING,
        gather_distributed: bool = False,
        shrinkage: float = 0.06,
        miner: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        self.groups = checked_groups(groups)
        self.loss: Any = BinomialDeviance() if loss is None else loss
        self.boost = boost
        check_choice("boosting", boosting, get_args(defaults.Boosting))
        _check_loss(self.loss)
        if boosting == "shrinkage" and not callable(getattr(self.loss, "evidence", None)):
            raise ConfigError(
                f"The 'boosting' parameter 'shrinkage' goes with BinomialDeviance. Got {_name(self.loss)} instead."
            )
        if is_from_library(loss):
            self.loss = LibraryLoss(self.groups, loss, miner, boost)
            if boosting == "gradient" and self.loss.has_proxies:
                raise ConfigError(
                    "The 'boosting' parameter 'gradient' goes with losses of pairs, of triplets or of the similarity "
                    f"matrix. Got {type(loss).__name__} instead."
                )
        elif miner is not None:
            raise ConfigError(
                f"The 'miner' parameter goes with a loss of pytorch-metric-learning. Got {_name(self.loss)} instead."
            )
        self.boosting: defaults.Boosting = boosting
        self.gather_distributed = gather_distributed
        self.shrinkage = shrinkage
        self.rates, _ = equations.boosting_rates(len(self.groups))

    def forward(
        self, z: Tensor, labels: Tensor | None = None, indices_tuple: Any = None, *, same: Tensor | None = None
    ) -> Tensor:
        """Raw embeddings z (B, d) and integer labels (B,) -> scalar.

        indices_tuple: what a miner of pytorch-metric-learning has chosen from z, as the trainers of the library pass
            it; for a loss of that library, in place of `miner`.
        same: in place of labels, which images belong together: a symmetric matrix (B, B) of bool, or of integers where
            1 is a positive pair, 0 a negative one and -1 a pair to be ignored.
        """
        return self.parts(z, labels, indices_tuple, same=same).total

    def parts(
        self, z: Tensor, labels: Tensor | None = None, indices_tuple: Any = None, *, same: Tensor | None = None
    ) -> BoostedParts:
        """As `forward`, -> the loss and its parts."""
        from_library = isinstance(self.loss, LibraryLoss)
        if indices_tuple is not None and (self.gather_distributed or not from_library):
            raise ConfigError(
                "The 'indices_tuple' parameter goes with a loss of pytorch-metric-learning and without "
                f"'gather_distributed'. Got {_name(self.loss)}, gather_distributed={self.gather_distributed} instead."
            )
        if same is not None and (self.gather_distributed or from_library):
            raise ConfigError(
                "The 'same' parameter goes with a loss of ours and without 'gather_distributed'. "
                f"Got {_name(self.loss)}, gather_distributed={self.gather_distributed} instead."
            )
        check_rows(z, sum(self.groups), least=0)
        if (labels is None) == (same is None):
            raise DataError(f"Expected either labels or same. Got {'neither' if same is None else 'both'}.")
        if same is not None:
            check_same(same, z)
        else:
            check_labels(labels, z)
        known: Tensor = labels if same is None else same  # type: ignore[assignment]
        if self.gather_distributed:
            z, known = gather(z), gather(known)
        if len(z) < 2:
            raise DataError(f"A batch needs at least 2 images to form a pair. Got {len(z)} instead.")
        check_finite(z)
        with _without_autocast(z.device.type):  # half precision would round the means over pairs
            parts = _at_least_float32(z).split(self.groups, dim=1)
            if from_library:  # its own distance scales embeddings, where it wants them scaled
                return _parts(self.loss(parts, known, indices_tuple))
            parts = [equations.unit_rows(f) for f in parts]
            over = {"triplets": self._over_triplets, "matrix": self._over_matrix}
            return over.get(getattr(self.loss, "over", "pairs"), self._over_pairs)(parts, known)

    def _over_pairs(self, parts: list[Tensor], known: Tensor) -> BoostedParts:
        """Algorithm 1, on a band of the batch's rows at a time and its pairs i<j only: it stays in the cache."""
        starts = range(0, len(known), BAND)
        kinds = [_kinds(known, start, start + BAND) for start in starts]
        # A pair i<j is right of the diagonal, which is (0, 0), (1, 1), ... in the band too; the rest has share 0.
        kinds = [(positive.triu_(1), negative.triu_(1)) for positive, negative in kinds]
        positives, negatives = (torch.stack([mask.sum() for mask in masks]).sum() for masks in zip(*kinds, strict=True))
        bands = [f.split(BAND) for f in parts]
        rows = []
        for b, (start, (positive, negative)) in enumerate(zip(starts, kinds, strict=True)):
            scores = [
                (band[b] @ f[start:].T).fill_diagonal_(0) for band, f in zip(bands, parts, strict=True)
            ]  # M times (band, B - start)
            shares = (_share(positive, positives, scores[0].dtype), _share(negative, negatives, scores[0].dtype))
            rows.append(self._boost_pairs(scores, positive, *shares))
        return _parts(torch.stack(rows).sum(dim=0))

    def _boost_pairs(self, scores: list[Tensor], same: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Scores (M times), labels and shares of some pairs -> (M, 3): loss, mean weights."""
        share = positive + negative
        weight, weighted = torch.ones_like(share), share
        shrunk = self.boosting == "shrinkage"
        gradient = self.boost and self.boosting == "gradient"
        running = torch.full_like(share, 0.5) if shrunk else torch.zeros_like(share)  # a^0, or s^0
        rows = []
        for m, (rate, score) in enumerate(zip(self.rates, scores, strict=True)):
            if m and self.boost and not gradient:
                weight = equations.shrinkage_weight(running, same) if shrunk else pair_weight(self.loss, running, same)
                weighted = weight * share
            at = running_score(running, score, rate) if gradient else score  # Eq. (7c), or s_m itself
            loss = _dot(self.loss(at, same), weighted)
            rows.append(torch.stack((loss, _dot(weight, positive), _dot(weight, negative))))
            if shrunk:
                running = running + self.shrinkage * self.loss.evidence(score.detach(), same)  # a^m, Eq. (7b)
            else:
                running = running_score(running, score.detach(), rate)  # s^m
        return torch.stack(rows)

    def _over_triplets(self, parts: list[Tensor], known: Tensor) -> BoostedParts:
        """Appendix B: a triplet is an ordered positive pair (anchor, other), of which there are A, and a negative."""
        positive, negative = _kinds(known)  # (B, B)
        anchor, other = _ordered_pairs(positive)  # (A,), (A,)
        valid = negative.index_select(0, anchor) & positive[anchor, other][:, None]  # (A, B)
        share = _share(valid, valid.sum(), parts[0].dtype)
        weight = torch.ones_like(share)
        gradient = self.boost and self.boosting == "gradient"
        running = (torch.zeros_like(share), torch.zeros_like(share))
        rows = []
        for m, (rate, f) in enumerate(zip(self.rates, parts, strict=True)):
            if m and self.boost and not gradient:
                weight = triplet_weight(self.loss, *running)
            score = (f @ f.T).fill_diagonal_(0)
            by_negative = score.index_select(0, anchor)  # (A, B)
            by_positive = score[anchor, other][:, None].expand_as(by_negative)  # (A, B)
            scores = (running_score(running[0], by_positive, rate), running_score(running[1], by_negative, rate))
            mean_weight = _dot(weight, share)
            loss = self.loss(*scores) if gradient else self.loss(by_positive, by_negative)
            rows.append(torch.stack((_dot(loss, weight * share), mean_weight, mean_weight)))
            running = (scores[0].detach(), scores[1].detach())
        return _parts(torch.stack(rows))

    def _over_matrix(self, parts: list[Tensor], known: Tensor) -> BoostedParts:
        """Eq. (7c) on the whole matrix of similarities: the loss at s^m, the learners before m held fixed."""
        positive, negative = _kinds(known)  # (B, B)
        losses: list[Tensor] = []
        score = torch.zeros_like(positive, dtype=parts[0].dtype)
        for rate, f in zip(self.rates, parts, strict=True):
            score = running_score(score.detach(), f @ f.T, rate) if self.boost and losses else f @ f.T
            losses.append(self.loss(score, positive, negative).mean())
        learners = torch.stack(losses)
        return BoostedParts(learners.mean(), learners, torch.ones_like(learners), torch.ones_like(learners))

    def extra_repr(self) -> str:
        loss = "" if isinstance(self.loss, LibraryLoss) else f"loss={self.loss}, "
        return f"groups={self.groups}, {loss}boost={self.boost}, boosting={self.boosting}"


def _check_loss(loss: Any) -> None:
    """ConfigError for what can be no loss on similarities."""
    wanted = "The 'loss' parameter must be a loss on similarities, such as bier.BinomialDeviance() or bier.Triplet()."
    if isinstance(loss, type):
        raise ConfigError(f"{wanted} Got the class {loss.__name__}, without the parentheses that make a loss of it.")
    if not callable(loss):
        raise ConfigError(f"{wanted} Got {loss!r} instead.")
    if isinstance(loss, torch.nn.modules.loss._Loss):
        raise ConfigError(f"{wanted} Got torch.nn.{type(loss).__name__}, which takes something else.")


def _name(loss: Any) -> str:
    """A module is shown by its name: its own text has many lines."""
    return f"the loss {type(loss).__name__ if isinstance(loss, nn.Module) else repr(loss)}"


def _kinds(known: Tensor, first: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
    """Whether pairs (i, j) are positive and whether negative, for first <= i < stop and j >= first; never for i = j.

    known: labels (B,), or the matrix `same` (B, B).
    """
    if known.ndim == 1:
        positive = known[first:stop, None] == known[None, first:]
        return positive.fill_diagonal_(False), known[first:stop, None] != known[None, first:]
    block = known[first:stop, first:]
    return (block == 1).fill_diagonal_(False), (block == 0).fill_diagonal_(False)


def _ordered_pairs(positive: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of a mask. Where nothing may wait for how many there are, those of all its entries."""
    if looks_at_values(positive):
        rows, columns = positive.nonzero(as_tuple=True)
        return rows, columns
    every = torch.arange(len(positive), device=positive.device)
    return every.repeat_interleave(len(every)), every.repeat(len(every))


def _share(chosen: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as weights that turn a sum into the mean over `count` chosen ones (and into 0 if there are none)."""
    return chosen.to(dtype).div_(count.clamp_min(1))


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _at_least_float32(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        raise ConfigError(
            "The 'loss' parameter of BoostedLoss must give one value for each similarity, "
            f"of shape {tuple(b.shape)} here. Got shape {tuple(a.shape)} instead."
        )
    return torch.dot(a.flatten(), b.flatten())


def _parts(rows: Tensor) -> BoostedParts:
    """(M, 3) -> the parts."""
    learners, positive, negative = rows.unbind(dim=1)
    return BoostedParts(learners.mean(), learners, positive.detach(), negative.detach())
