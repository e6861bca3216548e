"""The two diversity losses. Both train W alone unless told otherwise."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bier.distributed import gather
from bier.errors import ConfigError
from bier.method import defaults, equations
from bier.method.checks import check_choice, check_count, check_finite, check_number, check_rows, checked_groups
from bier.method.defaults import Reduction
from bier.method.ensemble import EmbeddingEnsemble


class DiversityParts(NamedTuple):
    """The loss and what it is made of; `total` is what a diversity loss returns."""

    total: Tensor  # scalar
    similarity: Tensor  # scalar, what the learners have in common: Eq. (11) or (14)
    weight: Tensor  # scalar, how far squared row norms are from 1: Eq. (12) or (15)


class _DiversityLoss(nn.Module):
    """What both losses share: the embedding that they see, the reduction, lambda_w."""

    def __init__(
        self,
        groups: Sequence[int],
        lambda_w: float = defaults.LAMBDA_W,
        reduction: Reduction = defaults.REDUCTION,
        through_backbone: bool = defaults.THROUGH_BACKBONE,
        scale_features: bool = defaults.SCALE_FEATURES,
        gather_distributed: bool = False,
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, get_args(Reduction))
        check_number("lambda_w", lambda_w, least=0)
        self.groups = checked_groups(groups)
        self.lambda_w = lambda_w
        self.reduction: Reduction = reduction
        self.through_backbone = through_backbone
        self.scale_features = scale_features
        self.gather_distributed = gather_distributed
        self._is_held = False

    def forward(self, ensemble: EmbeddingEnsemble, features: Tensor) -> Tensor:
        """The ensemble and features phi (B, h) -> scalar."""
        return self.parts(ensemble, features).total

    def parts(self, ensemble: EmbeddingEnsemble, features: Tensor) -> DiversityParts:
        """The ensemble and features phi (B, h) -> the loss and its parts."""
        raise NotImplementedError

    def _embed(self, ensemble: EmbeddingEnsemble, features: Tensor) -> tuple[Tensor, ...]:
        """phi (B, h) -> M raw embeddings (B, d_m), without bias."""
        if not isinstance(ensemble, EmbeddingEnsemble) or ensemble.groups != self.groups:
            raise ConfigError(
                f"The loss needs an EmbeddingEnsemble of the groups {self.groups}. "
                f"Got {getattr(ensemble, 'groups', type(ensemble).__name__)} instead."
            )
        check_rows(features, ensemble.in_features, "features", least=0 if self.gather_distributed else 1)
        if not self.through_backbone:
            features = features.detach()
        if self.gather_distributed:
            features = gather(features)
        check_finite(features, "features")
        if self.scale_features:
            mean_square = features.square().mean()
            features = features * mean_square.clamp_min(torch.finfo(features.dtype).tiny).rsqrt()
        return ensemble.split(ensemble.activations(features))

    def _weighted(self, weight: Tensor) -> Tensor:
        """lambda_w times the weight term; 0 for lambda_w = inf, where `hold_rows` takes the place of the term."""
        if self.lambda_w < math.inf:
            return self.lambda_w * weight
        if not self._is_held and torch.is_grad_enabled():
            self._is_held = True  # say it once
            warnings.warn(
                "With lambda_w=inf the rows of W must be held at length 1: call hold_rows(ensemble, optimizer) once.",
                RuntimeWarning,
                stacklevel=2,
            )
        return 0.0 * weight

    def hold_rows(self, ensemble: EmbeddingEnsemble, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Scale the rows to length 1 now and after each step of `optimizer`: the limit of a high lambda_w, Eq. (19).

        Call it once, before training. The handle that it returns removes the hook.
        """
        self.hold(ensemble)
        return optimizer.register_step_post_hook(lambda *_: self.hold(ensemble))

    @torch.no_grad()
    def hold(self, ensemble: EmbeddingEnsemble) -> None:
        """Scale every row in the weight term to length 1 once; `hold_rows` does it after each step of an optimizer."""
        self._is_held = True
        for rows in self._held(ensemble):
            rows.copy_(equations.unit_rows(rows))

    def _held(self, ensemble: EmbeddingEnsemble) -> list[Tensor]:
        return [ensemble.weight]

    def extra_repr(self) -> str:
        return f"groups={self.groups}, lambda_w={self.lambda_w}, reduction={self.reduction}"


class ActivationLoss(_DiversityLoss):
    """The Activation Loss: for each image a single learner should be active, all others close to zero.

    Eq. (11) to (13), Section 3.2.1 of "Deep Metric Learning with BIER", https://arxiv.org/abs/1801.04815

    Args:
        groups: the size of each learner.
        lambda_w: weight of the row-norm term. The paper wants it high enough that squared row norms stay within
            1 ± 1e-3. `inf` is that limit: the term drops out of the loss, and `hold_rows` keeps the rows at length 1.
        reduction: `sum`, as the paper writes it, or `mean` over dimensions and rows, as its authors ran it.
        through_backbone: let the gradient reach the features too. The paper does so for classification only, because
            a backbone of zeros is a trivial solution.
        scale_features: divide the features by their root mean square, so that lambda_div means the same for every
            backbone (the loss grows with the fourth power of their scale), and so that a backbone which the gradient
            reaches cannot lower the loss by shrinking all features.
        gather_distributed: as in `BoostedLoss`: compute the loss over the features of all processes.

    Returns:
        A scalar, to be multiplied by lambda_div and added to the metric loss, Eq. (18). `parts` returns it as a
        `DiversityParts` with the similarity of the learners and the weight term.

    Raises:
        ConfigError: a parameter is out of range, or the ensemble has other groups.
        DataError: the features have a wrong shape or are not finite.

    Example:
        >>> import bier, torch
        >>> ensemble, diverse = bier.EmbeddingEnsemble(128, (16, 32)), bier.ActivationLoss((16, 32))
        >>> optimizer = torch.optim.Adam(ensemble.parameters())
        >>> handle = diverse.hold_rows(ensemble, optimizer)  # once: rows of W have length 1 from now on
        >>> diverse(ensemble, torch.randn(8, 128)).backward()
        >>> optimizer.step()
        >>> bool((ensemble.weight.norm(dim=1) - 1).abs().max() < 1e-6)
        True
    """

    def parts(self, ensemble: EmbeddingEnsemble, features: Tensor) -> DiversityParts:
        parts = self._embed(ensemble, features)
        similarity = equations.sum_over_pairs(
            parts, lambda i, j: equations.suppression_loss(parts[i], parts[j], self.reduction)
        )
        weight = equations.weight_term(ensemble.weight, self.reduction)
        return DiversityParts(similarity + self._weighted(weight), similarity, weight)


class AdversarialLoss(_DiversityLoss):
    """The Adversarial Loss: regressors try to predict learner i's embedding from learner j's; the learners prevent it.

    Eq. (14) to (16), Section 3.2.2 of "Deep Metric Learning with BIER", https://arxiv.org/abs/1801.04815

    For each pair i<j a regressor of two layers maps f_j to the space of f_i. Its own gradient raises the similarity;
    a gradient reversal between it and the embeddings lowers it. Regressors are parameters of the loss, to be trained
    by the same optimizer, and are discarded after training.

    Args:
        groups: the size of each learner.
        hidden: size of the regressors' hidden layer.
        lambda_w, reduction, through_backbone, scale_features: as in `ActivationLoss`.
        gather_distributed: as in `BoostedLoss`. Every process then computes the same gradient for the regressors, so
            they stay equal if they start equal: seed all processes alike, or put the loss inside the module that
            DistributedDataParallel wraps.

    Returns:
        A scalar, to be multiplied by lambda_div and added to the metric loss, Eq. (18). `parts` returns it as a
        `DiversityParts` with the similarity of the learners and the weight term.

    Raises:
        ConfigError: a parameter is out of range, or the ensemble has other groups.
        DataError: the features have a wrong shape or are not finite.

    Example:
        >>> import bier, torch
        >>> ensemble, diverse = bier.EmbeddingEnsemble(128, (16, 32)), bier.AdversarialLoss((16, 32), hidden=64)
        >>> optimizer = torch.optim.Adam([*ensemble.parameters(), *diverse.parameters()])
        >>> handle = diverse.hold_rows(ensemble, optimizer)  # once: rows of W have length 1 from now on
        >>> diverse(ensemble, torch.randn(8, 128)).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        groups: Sequence[int],
        hidden: int = defaults.HIDDEN,
        lambda_w: float = defaults.LAMBDA_W,
        reduction: Reduction = defaults.REDUCTION,
        through_backbone: bool = defaults.THROUGH_BACKBONE,
        scale_features: bool = defaults.SCALE_FEATURES,
        gather_distributed: bool = False,
    ) -> None:
        super().__init__(groups, lambda_w, reduction, through_backbone, scale_features, gather_distributed)
        check_count("hidden", hidden)
        self.regressors = nn.ModuleDict(
            {
                _pair_name(i, j): nn.Sequential(
                    nn.Linear(self.groups[j], hidden), nn.ReLU(), nn.Linear(hidden, self.groups[i])
                )
                for i in range(len(self.groups))
                for j in range(i + 1, len(self.groups))
            }
        )

    def parts(self, ensemble: EmbeddingEnsemble, features: Tensor) -> DiversityParts:
        parts = [reverse_gradient(f) for f in self._embed(ensemble, features)]

        def similarity_of(i: int, j: int) -> Tensor:
            guess = self.regressors[_pair_name(i, j)](parts[j])
            return equations.adversarial_similarity(parts[i], guess, self.groups[j], self.reduction)

        similarity = equations.sum_over_pairs(parts, similarity_of)
        layers = [(layer.weight, layer.bias) for layer in self._layers()]
        weight = equations.adversarial_weight_term(layers, ensemble.weight, self.reduction)
        return DiversityParts(self._weighted(weight) - similarity, similarity, weight)

    def _layers(self) -> list[nn.Linear]:
        return [layer for layer in self.regressors.modules() if isinstance(layer, nn.Linear)]

    @torch.no_grad()
    def hold(self, ensemble: EmbeddingEnsemble) -> None:
        super().hold(ensemble)
        for layer in self._layers():
            # Just below 1: rounding must not activate the one-sided term, whose gradient starts at 2 lambda_w |b|.
            layer.bias.div_(((1 + 1e-6) * layer.bias.norm()).clamp_min(1))

    def _held(self, ensemble: EmbeddingEnsemble) -> list[Tensor]:
        return [ensemble.weight, *(layer.weight for layer in self._layers())]


def _pair_name(i: int, j: int) -> str:
    return f"{j + 1}-to-{i + 1}"


def reverse_gradient(x: Tensor) -> Tensor:
    """The identity in the forward pass; the negative gradient in the backward pass. Section 3.2.2."""
    reversed_x: Tensor = _ReverseGradient.apply(x)
    return reversed_x


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient
