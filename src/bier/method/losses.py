"""The three losses of the paper on similarities, with its parameters as defaults.

A loss on pairs is any elementwise function of (similarity, same), the second bool and of the same shape. A loss on
triplets has the attribute `over = "triplets"` and is an elementwise function of (positive similarity, negative
similarity). One that also has a method `weight` with the same arguments gives the boosting weights in closed form;
for any other they come from automatic differentiation.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from bier.errors import ConfigError
from bier.method import equations

Over: TypeAlias = Literal["pairs", "triplets"]


class _Checked:
    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # only dataclasses derive from this
            value = getattr(self, field.name)
            if not math.isfinite(value):
                raise ConfigError(
                    f"The '{field.name}' parameter of {type(self).__name__} must be a finite number. "
                    f"Got {value!r} instead."
                )


@dataclass(frozen=True)
class BinomialDeviance(_Checked):
    """Line 2: smooth, so that boosting weights carry more than right or wrong. The paper's best."""

    over: ClassVar[Over] = "pairs"
    beta1: float = 2.0
    beta2: float = 0.5
    cost: float = 25.0

    def __call__(self, similarity: Tensor, same: Tensor) -> Tensor:
        return equations.binomial_deviance(similarity, same, self.beta1, self.beta2, self.cost)

    def weight(self, similarity: Tensor, same: Tensor) -> Tensor:
        return equations.binomial_deviance_weight(similarity, same, self.beta1, self.beta2, self.cost)

    def evidence(self, similarity: Tensor, same: Tensor) -> Tensor:
        """The argument of the loss: how far a pair lies on its right side of the threshold, times its slope."""
        return equations.binomial_deviance_evidence(similarity, same, self.beta1, self.beta2, self.cost)


@dataclass(frozen=True)
class Contrastive(_Checked):
    """Line 3."""

    over: ClassVar[Over] = "pairs"
    margin: float = 0.5

    def __call__(self, similarity: Tensor, same: Tensor) -> Tensor:
        return equations.contrastive(similarity, same, self.margin)

    def weight(self, similarity: Tensor, same: Tensor) -> Tensor:
        return equations.contrastive_weight(similarity, same, self.margin)


@dataclass(frozen=True)
class Triplet(_Checked):
    """Line 4."""

    over: ClassVar[Over] = "triplets"
    margin: float = 0.01

    def __call__(self, positive: Tensor, negative: Tensor) -> Tensor:
        return equations.triplet(positive, negative, self.margin)

    def weight(self, positive: Tensor, negative: Tensor) -> Tensor:
        return equations.triplet_weight(positive, negative, self.margin)


def pair_derivative(loss: Any, similarity: Tensor, same: Tensor) -> Tensor:
    """d loss / d similarity up to its sign: in closed form where the loss has one, else by differentiation."""
    if callable(getattr(loss, "weight", None)):
        closed_form: Tensor = loss.weight(similarity, same)
        return closed_form
    return _differentiate(loss, similarity, same)[0]


def triplet_derivatives(loss: Any, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """d loss / d s+ and d loss / d s- up to their signs."""
    if callable(getattr(loss, "weight", None)):
        closed_form: Tensor = loss.weight(positive, negative)
        return closed_form, closed_form
    by_positive, by_negative = _differentiate(loss, positive, negative)
    return by_positive, by_negative


def _differentiate(loss: Any, *arguments: Tensor) -> list[Tensor]:
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
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
