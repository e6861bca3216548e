"""Losses on similarities: the paper's three and Multi-Similarity, and the boosting weights that any such loss gives.

A loss on pairs is any elementwise function of (similarity, same), the second bool and of the same shape. A loss on
triplets has the attribute `over = "triplets"` and is an elementwise function of (positive similarity, negative
similarity). If either also has a method `weight` with the same arguments, that gives the boosting weights in closed
form; else they come from automatic differentiation. A loss with `over = "matrix"` is a function of (similarity,
positive, negative), all (B, B), that gives one value per row; it is boosted by its gradient, Eq. (7c).
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from bier.method import defaults
from bier.method.checks import check_number

Over: TypeAlias = Literal["pairs", "triplets", "matrix"]


class _Checked:
    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # only dataclasses derive from this
            check_number(field.name, getattr(self, field.name))


@dataclass(frozen=True)
class BinomialDeviance(_Checked):
    """Eq. (2), Section 3: log(1 + exp(-(2y-1) b1 (s-b2) C_y)) with C_1 = 1, C_0 = `cost`.

    It is smooth, so that boosting weights take all values between 0 and 1. The paper's best loss, with cost 25.

    Args:
        beta1: b1, the slope.
        beta2: b2, the threshold.
        cost: cost of negative pairs.

    Returns:
        The loss of each pair, from its similarity (any shape) and whether its images are of the same class (bool, of
        the same shape). `BoostedLoss` weights and averages them.

    Raises:
        ConfigError: a parameter is not finite.

    Example:
        >>> import bier, torch
        >>> bier.BinomialDeviance()(torch.tensor([0.5, 0.5]), torch.tensor([True, False]))
        tensor([0.6931, 0.6931])
    """

    over: ClassVar[Over] = "pairs"
    beta1: float = defaults.BETA1
    beta2: float = defaults.BETA2
    cost: float = defaults.COST

    def __call__(self, similarity: Tensor, same: Tensor) -> Tensor:
        return F.softplus(self._exponent(similarity, same))

    def weight(self, similarity: Tensor, same: Tensor) -> Tensor:
        """|derivative| of the loss without its constant b1 C_y, so that it lies in (0, 1)."""
        return torch.sigmoid(self._exponent(similarity, same))

    def evidence(self, similarity: Tensor, same: Tensor) -> Tensor:
        """(2y-1) b1 (s-b2) C_y, by which the activation of Eq. (7b) grows."""
        return -self._exponent(similarity, same)

    def _exponent(self, similarity: Tensor, same: Tensor) -> Tensor:
        # In place, and b1 C_y without torch.where, because this is the hot spot of training: it saves two passes over
        # memory. The factor is -b1 for a positive pair, b1 C_0 for a negative one.
        factor = same.to(similarity.dtype).mul_(-self.beta1 * (self.cost + 1)).add_(self.beta1 * self.cost)
        return (similarity - self.beta2).mul_(factor)


@dataclass(frozen=True)
class Contrastive(_Checked):
    """Eq. (3), Section 3: (1-y) max(0, s-m) + y (s-1)^2 with the margin m.

    Args:
        margin: m; negative pairs below it have no loss.

    Returns:
        The loss of each pair, as `BinomialDeviance`.

    Raises:
        ConfigError: the margin is not finite.

    Example:
        >>> import bier, torch
        >>> bier.Contrastive()(torch.tensor([0.5, 0.75]), torch.tensor([True, False]))
        tensor([0.2500, 0.2500])
    """

    over: ClassVar[Over] = "pairs"
    margin: float = 0.5

    def __call__(self, similarity: Tensor, same: Tensor) -> Tensor:
        return torch.where(same, (similarity - 1).square(), F.relu(similarity - self.margin))

    def weight(self, similarity: Tensor, same: Tensor) -> Tensor:
        """|derivative| of the loss: 2 |s-1| for a positive pair, 1 or 0 for a negative one."""
        return torch.where(same, 2 * (similarity - 1).abs(), (similarity > self.margin).to(similarity.dtype))


@dataclass(frozen=True)
class Triplet(_Checked):
    """Eq. (4), Section 3: max(0, s- - s+ + m) with the margin m.

    Args:
        margin: m, by which the positive pair must be more similar than the negative one.

    Returns:
        The loss of each triplet, from the similarity of its positive and of its negative pair (of the same shape).

    Raises:
        ConfigError: the margin is not finite.

    Example:
        >>> import bier, torch
        >>> bier.Triplet(margin=0.25)(torch.tensor([0.5]), torch.tensor([0.5]))
        tensor([0.2500])
    """

    over: ClassVar[Over] = "triplets"
    margin: float = 0.01

    def __call__(self, positive: Tensor, negative: Tensor) -> Tensor:
        return F.relu(negative - positive + self.margin)

    def weight(self, positive: Tensor, negative: Tensor) -> Tensor:
        """|derivative| with respect to either score: 1 where the margin is violated, else 0."""
        return (negative - positive + self.margin > 0).to(positive.dtype)


@dataclass(frozen=True)
class MultiSimilarity(_Checked):
    """Multi-Similarity with its mining: for each image, a soft maximum over its positive and over its negative pairs.

    log(1 + sum_p exp(-alpha (s_p - base))) / alpha + log(1 + sum_n exp(beta (s_n - base))) / beta. Only pairs that are
    hard for the image take part: positive ones less than `epsilon` above its most similar negative, negative ones less
    than `epsilon` below its least similar positive.

    "Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning", https://arxiv.org/abs/1904.06627

    Args:
        alpha: slope for positive pairs.
        beta: slope for negative pairs.
        base: the threshold.
        epsilon: of the mining; `math.inf` uses all pairs.

    Returns:
        The loss of each row of a matrix of similarities (B, B), given which pairs are positive and which are negative
        (bool, of the same shape).

    Raises:
        ConfigError: a parameter is out of range.

    Example:
        >>> import bier, torch
        >>> boosted = bier.BoostedLoss((4, 8), bier.MultiSimilarity())
        >>> boosted(torch.randn(6, 12, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2])).backward()
    """

    over: ClassVar[Over] = "matrix"
    alpha: float = 2.0
    beta: float = 50.0
    base: float = 0.5
    epsilon: float = 0.1

    def __post_init__(self) -> None:
        check_number("base", self.base)
        check_number("epsilon", self.epsilon, least=0)
        for name in ("alpha", "beta"):  # both are divided by
            check_number(name, getattr(self, name), least=0.01, below=1e6)
        largest = max(self.alpha * (1 + self.base), self.beta * (1 - self.base))
        check_number("largest exponent, max(alpha (1 + base), beta (1 - base)),", largest, below=80)  # e^88 is infinite

    def __call__(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        with torch.no_grad():
            nothing = torch.finfo(similarity.dtype).max
            hardest_positive = similarity.where(positive, nothing).amin(dim=1, keepdim=True)
            hardest_negative = similarity.where(negative, -nothing).amax(dim=1, keepdim=True)
            pulled = positive & (similarity < hardest_negative.add_(self.epsilon))
            pushed = negative & (similarity > hardest_positive.sub_(self.epsilon))
            # -alpha for a positive pair, beta for a negative one, as in BinomialDeviance
            factor = positive.to(similarity.dtype).mul_(-self.alpha - self.beta).add_(self.beta)
        terms = (similarity - self.base).mul_(factor).exp_()
        pull = terms.where(pulled, 0).sum(dim=1).log1p() / self.alpha
        return pull + terms.where(pushed, 0).sum(dim=1).log1p() / self.beta


def pair_weight(loss: Any, running: Tensor, same: Tensor) -> Tensor:
    """Eq. (7), Section 3.1. w^{m+1} = |loss'(s^m)| at the running score s^m: (...) -> (...), without gradient."""
    if callable(getattr(loss, "weight", None)):
        closed_form: Tensor = loss.weight(running, same).detach().abs()
        return closed_form
    return _derivatives(loss, running, same)[0].abs()


def triplet_weight(loss: Any, positive: Tensor, negative: Tensor) -> Tensor:
    """Eq. (8), Appendix B. w^{m+1} = |loss'(s^{m+}, s^{m-})|: (...), (...) -> (...), without gradient.

    For a loss of the difference s- - s+ both derivatives have the same size; for any other it is their mean.
    """
    if callable(getattr(loss, "weight", None)):
        closed_form: Tensor = loss.weight(positive, negative).detach().abs()
        return closed_form
    by_positive, by_negative = _derivatives(loss, positive, negative)
    return (by_positive.abs() + by_negative.abs()) / 2


def _derivatives(loss: Any, *arguments: Tensor) -> list[Tensor]:
    """The derivative of an elementwise loss with respect to each of its scores, without touching the graph."""
    with torch.inference_mode(False), torch.enable_grad():
        # Copies, because a tensor made in inference mode can never be differentiated. Labels are no scores.
        copies = [argument.detach().clone() for argument in arguments]
        leaves = [copy.requires_grad_() for copy in copies if copy.is_floating_point()]
        values = loss(*copies)
        if not values.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves]
        gradients = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient.detach()
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
