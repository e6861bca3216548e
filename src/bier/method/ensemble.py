"""The embedding layer, split into learners."""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from bier.errors import ConfigError
from bier.method import defaults, equations
from bier.method.checks import check_choice, check_count, check_rows, checked_groups
from bier.method.defaults import Start, Weighting


class EmbeddingEnsemble(nn.Module):
    """The embedding layer: a matrix W between the last hidden layer (h) and the embedding (d), split into M learners.

    Section 3 of "Deep Metric Learning with BIER", https://arxiv.org/abs/1801.04815. Eq. (20): nothing but W is added
    to the network at test time.

    Args:
        in_features: h.
        groups: the size of each learner, such as (96, 160, 256); see `bier.group_sizes`.
        start: `glorot` (uniform) or `orthogonal`; `bier.initialise` solves for W instead.
        bias: add a bias to the embedding, f_m(x) = phi(x)^T W_m + b_m. It starts at 0; `centre` sets it so that it
            subtracts the mean of the features. The diversity losses see phi(x)^T W_m without it.

    Returns:
        The raw embedding z (B, d) of features (B, h). `split` gives each learner's part, `vector` the test-time vector.

    Raises:
        ConfigError: a parameter is out of range.

    Example:
        >>> import bier, torch
        >>> ensemble = bier.EmbeddingEnsemble(128, (16, 32))
        >>> z = ensemble(torch.randn(4, 128))
        >>> [part.shape[1] for part in ensemble.split(z)]
        [16, 32]
        >>> ensemble.vector(z).shape, ensemble.vector(z, learners=1).shape
        (torch.Size([4, 48]), torch.Size([4, 16]))
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        groups: Sequence[int],
        start: Start = defaults.START,
        bias: bool = defaults.BIAS,
    ) -> None:
        super().__init__()
        check_count("in_features", in_features)
        self.in_features = in_features
        self.groups = checked_groups(groups)
        self.weight = nn.Parameter(torch.empty(sum(self.groups), in_features))  # (d, h)
        self.register_parameter("bias", nn.Parameter(torch.zeros(sum(self.groups))) if bias else None)
        self.restart(start)

    def restart(self, start: Start) -> None:
        """Draw W anew."""
        check_choice("start", start, get_args(Start))
        draw = nn.init.xavier_uniform_ if start == "glorot" else nn.init.orthogonal_
        draw(self.weight)

    @property
    def dimension(self) -> int:
        return sum(self.groups)

    def forward(self, features: Tensor) -> Tensor:
        """phi (B, h) -> raw embedding z (B, d)."""
        return nn.functional.linear(features, self.weight, self.bias)

    def activations(self, features: Tensor) -> Tensor:
        """phi (B, h) -> phi^T W (B, d), without the bias: what the diversity losses see."""
        return nn.functional.linear(features, self.weight)

    @torch.no_grad()
    def centre(self, features: Tensor) -> None:
        """Set the bias to -W mean(phi), so that embeddings of these features (N, h) have mean 0."""
        if self.bias is None:
            raise ConfigError("'centre' needs an ensemble with a bias; make it with bias=True.")
        self.bias.copy_(-self.activations(features.to(self.weight).mean(dim=0, keepdim=True))[0])

    def split(self, z: Tensor) -> tuple[Tensor, ...]:
        """z (B, d) -> M tensors (B, d_m)."""
        check_rows(z, self.dimension, least=0)
        parts: tuple[Tensor, ...] = z.split(self.groups, dim=1)
        return parts

    def vector(self, z: Tensor, weighting: Weighting = defaults.WEIGHTING, learners: int | None = None) -> Tensor:
        """Eq. (10), Section 3.1: z (B, d) -> the test-time vector; the dot product of two of them is their similarity.

        `learners=m` keeps the first m learners only, weighted as an ensemble of m by its own alphas.
        """
        check_choice("weighting", weighting, get_args(Weighting))
        count = len(self.groups) if learners is None else learners
        if not isinstance(count, int) or not 1 <= count <= len(self.groups):
            raise ConfigError(
                f"The 'learners' parameter must lie between 1 and {len(self.groups)}. Got {learners!r} instead."
            )
        return equations.ensemble_vector(self.split(z)[:count], weighting)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, groups={self.groups}, bias={self.bias is not None}"
