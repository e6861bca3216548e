"""From a batch to the loss: backbone, embedding, boosted loss and diversity loss in one module."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from bier.config import LOSSES, Config
from bier.distributed import gather
from bier.errors import ConfigError
from bier.method.boosting import BoostedLoss, BoostedParts
from bier.method.classifier import BoostedClassifier
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.library import build_loss, build_miner
from bier.method.losses import BinomialDeviance, Contrastive, MultiSimilarity, Triplet
from bier.models.backbone import autocast


class ObjectiveParts(NamedTuple):
    """The loss of a batch and what it is made of."""

    total: Tensor
    metric: BoostedParts
    diversity: Tensor  # scalar, before lambda_div; 0 where there is none
    similarity: Tensor  # scalar, what learners have in common by the diversity loss


class FirstBroken:
    """The first value of each kind that was not finite. Noting a value does not wait for the device; asking does."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[Tensor, Tensor]] = {}  # its step, 0 where all were finite, and the value

    def note(self, step: int, name: str, value: Tensor) -> None:
        value = value.detach()
        nothing = (torch.zeros_like(value, dtype=torch.int64), torch.zeros_like(value))
        first_step, first_value = self._first.get(name, nothing)
        is_first = (first_step == 0) & ~torch.isfinite(value)
        self._first[name] = (torch.where(is_first, step, first_step), torch.where(is_first, value, first_value))

    def ask(self) -> tuple[int, str] | None:
        """The step and what was wrong then; None where all values were finite."""
        broken = [(int(step), name, value) for name, (step, value) in self._first.items() if int(step)]
        if not broken:
            return None
        step, name, value = min(broken, key=lambda entry: entry[0])
        return step, f"The {name} is {value.item()}."


class Objective(nn.Module):
    """Everything that has weights to train. `forward` is Eq. (18), Section 3.3.2 of the paper.

    `network` maps the inputs (pixels, maps of a frozen trunk, or features) to features (B, h). `metric` has a
    method `parts(z, labels)` that returns `BoostedParts`. Under DistributedDataParallel each process brings its share
    of the batch; features are gathered once, here, for all losses, so that any `metric` sees the whole batch.
    """

    def __init__(
        self,
        network: nn.Module,
        ensemble: EmbeddingEnsemble,
        metric: nn.Module,
        diversity: ActivationLoss | AdversarialLoss | None,
        lambda_div: float,
        precision: str = "float32",
    ) -> None:
        super().__init__()
        self.network = network
        self.ensemble = ensemble
        self.metric = metric
        self.diversity = diversity
        self.lambda_div = lambda_div
        self.precision = precision
        self.holds_network = False

    def hold_network(self, hold: bool) -> None:
        """Keep the network as it is, without gradients and in eval mode, and train what follows it."""
        if hold != self.holds_network:
            self.holds_network = hold
            self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.holds_network:
            self.network.eval()
        return self

    def features(self, inputs: Tensor) -> Tensor:
        """phi (B, h), computed in the precision of the run and handed on in that of W."""
        gradients = torch.is_grad_enabled() and not self.holds_network
        with autocast(self.precision, inputs.device), torch.set_grad_enabled(gradients):
            features: Tensor = self.network(inputs)
        return features.to(self.ensemble.weight.dtype)

    @torch.no_grad()
    def embed(self, inputs: Tensor) -> Tensor:
        """The raw embedding z (B, d) of the inputs, on the device of W."""
        z: Tensor = self.ensemble(self.features(inputs.to(self.ensemble.weight.device)))
        return z

    def forward(self, inputs: Tensor, labels: Tensor) -> ObjectiveParts:
        features = gather(self.features(inputs))
        metric: BoostedParts = self.metric.parts(self.ensemble(features), gather(labels))  # type: ignore[operator]
        if self.diversity is None:
            nothing = metric.total.new_zeros(())
            return ObjectiveParts(metric.total, metric, nothing, nothing)
        diversity = self.diversity.parts(self.ensemble, features)
        total = metric.total + self.lambda_div * diversity.total
        return ObjectiveParts(total, metric, diversity.total, diversity.similarity)

    def hold_rows(self, optimizer: torch.optim.Optimizer) -> None:
        """With lambda_w = inf, keep the rows of W at length 1 from now on."""
        if self.diversity is not None and self.diversity.lambda_w == math.inf:
            self.diversity.hold_rows(self.ensemble, optimizer)


def metric_loss(config: Config, groups: tuple[int, ...], classes: int) -> BoostedLoss | BoostedClassifier:
    """What `config.loss` names."""
    loss = config.loss
    if loss.name == "cross-entropy":
        return BoostedClassifier(groups, classes, loss.boost, loss.dropout, boosting=loss.boosting)
    if loss.name not in LOSSES:
        miner = build_miner(loss.miner, loss.miner_settings) if loss.miner else None
        theirs = build_loss(loss.name, loss.settings, sum(groups), classes)
        return BoostedLoss(groups, theirs, loss.boost, loss.boosting, miner=miner)
    if loss.name == "multi-similarity":
        return BoostedLoss(groups, _multi_similarity(loss.settings), loss.boost, loss.boosting)
    given = {} if loss.margin < 0 else {"margin": loss.margin}
    if loss.name == "contrastive":
        return BoostedLoss(groups, Contrastive(**given), loss.boost, loss.boosting)
    if loss.name == "triplet":
        return BoostedLoss(groups, Triplet(**given), loss.boost, loss.boosting)
    deviance = BinomialDeviance(loss.beta1, loss.beta2, loss.cost)
    return BoostedLoss(groups, deviance, loss.boost, loss.boosting)


def _multi_similarity(settings: Mapping[str, Any]) -> MultiSimilarity:
    known = [field.name for field in fields(MultiSimilarity)]
    for key in settings:
        if key not in known:
            raise ConfigError(f"'loss.settings' of multi-similarity are {', '.join(known)}. Got {key!r} instead.")
    return MultiSimilarity(**settings)


def diversity_loss(config: Config, name: str, groups: tuple[int, ...]) -> ActivationLoss | AdversarialLoss | None:
    """The diversity loss called `name`, with the settings of `config.diversity`."""
    settings = config.diversity
    shared = (settings.norm_weight, settings.reduction, settings.through_backbone, settings.scale_features)
    if name == "activation":
        return ActivationLoss(groups, *shared)
    if name == "adversarial":
        return AdversarialLoss(groups, settings.hidden, *shared)
    return None
