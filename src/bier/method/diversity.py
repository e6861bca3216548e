"""The two losses that make learners disagree. Both act on W alone unless told otherwise."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from bier.errors import ConfigError, DataError
from bier.method import equations
from bier.method.ensemble import EmbeddingEnsemble, checked_groups
from bier.method.equations import Reduction


class DiversityParts(NamedTuple):
    """What a diversity loss returns; `total` is the one to add to the metric loss, times lambda_div."""

    total: Tensor  # scalar
    similarity: Tensor  # scalar, what the learners have in common: line 11 or 14
    weight: Tensor  # scalar, how far squared row norms are from 1: line 12 or 15


class _DiversityLoss(nn.Module):
    """What both losses share: the embedding that they see, the reduction, lambda_w.

    Args:
        groups: the size of each learner.
        lambda_w: weight of the row-norm term. The paper wants it high enough that squared row norms stay within
            1 ± 1e-3. `float("inf")` is that limit: the term drops out of the loss, and whoever calls `hold` after each
            step of the optimizer puts the rows back to length 1.
        reduction: `sum`, as the paper writes it, or `mean` over dimensions and rows, as its authors ran it.
        through_backbone: let the gradient reach the features too (classification does; else W = 0 has company).
        scale_features: divide the features by their root mean square, so that lambda_div means the same for every
            backbone (the loss grows with the second to fourth power of their scale), and so that a backbone which the
            gradient reaches cannot lower the loss by shrinking them all to 0.
    """

    def __init__(
        self,
        groups: Sequence[int],
        lambda_w: float = 1000.0,
        reduction: Reduction = "mean",
        through_backbone: bool = False,
        scale_features: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in get_args(Reduction):
            raise ConfigError(f"The 'reduction' parameter must be 'sum' or 'mean'. Got {reduction!r} instead.")
        if not lambda_w >= 0:
            raise ConfigError(f"The 'lambda_w' parameter must be at least 0. Got {lambda_w!r} instead.")
        self.groups = checked_groups(groups)
        self.lambda_w = lambda_w
        self.reduction: Reduction = reduction
        self.through_backbone = through_backbone
        self.scale_features = scale_features

    def _embed(self, ensemble: EmbeddingEnsemble, features: Tensor) -> tuple[Tensor, ...]:
        """phi (B, h) -> M raw embeddings (B, d_m)."""
        if ensemble.groups != self.groups:
            raise ConfigError(
                f"The loss was made for groups {self.groups}. Got an ensemble of {ensemble.groups} instead."
            )
        if features.ndim != 2 or features.shape[1] != ensemble.in_features or not len(features):
            raise DataError(
                f"Expected features of shape (B, {ensemble.in_features}). Got {tuple(features.shape)} instead."
            )
        if not torch.isfinite(features).all():
            raise DataError("The features of this batch contain NaN or infinite values.")
        if not self.through_backbone:
            features = features.detach()
        if self.scale_features:
            mean_square = features.square().mean()
            features = features * mean_square.clamp_min(torch.finfo(features.dtype).tiny).rsqrt()
        return ensemble.split(ensemble.activations(features))

    def _finish(
        self, combine: Callable[[Tensor, Tensor, float], Tensor], similarity: Tensor, weight: Tensor
    ) -> DiversityParts:
        """lambda_w = inf leaves the weight term to `hold`."""
        total = combine(similarity, weight, 0.0 if self.lambda_w == float("inf") else self.lambda_w)
        return DiversityParts(total, similarity, weight)

    @torch.no_grad()
    def hold(self, ensemble: EmbeddingEnsemble) -> None:
        """Put every row that the weight term speaks of back to length 1: the limit of a high lambda_w."""
        for rows in self._held(ensemble):
            rows.copy_(equations.unit_rows(rows))

    def _held(self, ensemble: EmbeddingEnsemble) -> list[Tensor]:
        return [ensemble.weight]

    def extra_repr(self) -> str:
        return f"groups={self.groups}, lambda_w={self.lambda_w}, reduction={self.reduction}"


class ActivationLoss(_DiversityLoss):
    """Line 13: for each image a single learner should be active, all others close to zero."""

    def forward(self, ensemble: EmbeddingEnsemble, features: Tensor) -> DiversityParts:
        """phi (B, h) -> the loss and its parts."""
        parts = self._embed(ensemble, features)
        similarity = equations.sum_over_pairs(
            parts, lambda i, j: equations.suppression_loss(parts[i], parts[j], self.reduction)
        )
        weight = equations.weight_term(ensemble.weight, self.reduction)
        return self._finish(equations.activation_loss, similarity, weight)


class AdversarialLoss(_DiversityLoss):
    """Line 16: regressors try to turn learner j's embedding into learner i's; the learners try to prevent it.

    For each pair i<j a regressor of two layers maps f_j to the space of f_i. Its own gradient raises the similarity;
    a reversal between it and the embeddings lowers it. Regressors are not part of the model and are left behind
    after training. `hidden` is the size of their hidden layer; other arguments as in `ActivationLoss`.
    """

    def __init__(self, groups: Sequence[int], hidden: int = 512, **settings: Any) -> None:
        super().__init__(groups, **settings)
        if hidden < 1:
            raise ConfigError(f"The 'hidden' parameter must be at least 1. Got {hidden!r} instead.")
        self.regressors = nn.ModuleDict(
            {
                _pair_name(i, j): nn.Sequential(
                    nn.Linear(self.groups[j], hidden), nn.ReLU(), nn.Linear(hidden, self.groups[i])
                )
                for i in range(len(self.groups))
                for j in range(i + 1, len(self.groups))
            }
        )

    def forward(self, ensemble: EmbeddingEnsemble, features: Tensor) -> DiversityParts:
        """phi (B, h) -> the loss and its parts."""
        parts = [reverse_gradient(f) for f in self._embed(ensemble, features)]

        def similarity_of(i: int, j: int) -> Tensor:
            guess = self.regressors[_pair_name(i, j)](parts[j])
            return equations.adversarial_similarity(parts[i], guess, self.groups[j], self.reduction)

        similarity = equations.sum_over_pairs(parts, similarity_of)
        layers = [(layer.weight, layer.bias) for layer in self._layers()]
        weight = equations.adversarial_weight_term(layers, ensemble.weight, self.reduction)
        return self._finish(equations.adversarial_loss, similarity, weight)

    def _layers(self) -> list[nn.Linear]:
        return [layer for layer in self.regressors.modules() if isinstance(layer, nn.Linear)]

    @torch.no_grad()
    def hold(self, ensemble: EmbeddingEnsemble) -> None:
        super().hold(ensemble)
        for layer in self._layers():
            # A hair below 1: rounding must not wake the one-sided term, whose gradient starts at 2 lambda_w |b|.
            layer.bias.div_(((1 + 1e-6) * layer.bias.norm()).clamp_min(1))

    def _held(self, ensemble: EmbeddingEnsemble) -> list[Tensor]:
        return [ensemble.weight, *(layer.weight for layer in self._layers())]


def _pair_name(i: int, j: int) -> str:
    return f"{j + 1}-to-{i + 1}"


def reverse_gradient(x: Tensor) -> Tensor:
    """x itself on the way forward; the negative gradient on the way back."""
    reversed_x: Tensor = _ReverseGradient.apply(x)
    return reversed_x


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient
