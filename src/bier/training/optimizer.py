"""How weights are updated: parameter groups and their rates, the schedule, and the moving average of the weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bier.config import Config, TrainConfig
from bier.models.backbone import Backbone, Stages
from bier.system import has_fused_optimizers
from bier.training.objective import Objective

PROXY_FACTOR = 100.0  # times the learning rate, as the authors of Proxy-Anchor train theirs


def build_optimizer(config: Config, objective: Objective) -> torch.optim.Optimizer:
    """The optimizer that `config.train` names. The `factor` of a parameter group times the learning rate is its rate.

    With the default settings there are two groups, the backbone and everything behind it, as in older checkpoints.
    Proxies have a rate of their own: they start at random and would hardly move at the rate of pretrained weights.
    """
    train, regressors, proxies = config.train, list[nn.Parameter](), list[nn.Parameter]()
    if getattr(getattr(objective.metric, "loss", None), "has_proxies", False):
        proxies = [parameter for parameter in objective.metric.parameters() if parameter.ndim > 1]
    if config.diversity.factor and objective.diversity is not None:
        regressors = list(objective.diversity.parameters())
    apart = {id(parameter) for parameter in [*regressors, *proxies]}
    named = ((name, p) for name, p in objective.named_parameters() if not name.startswith("network."))
    behind = [parameter for _, parameter in named if id(parameter) not in apart]
    groups = [
        *_network_groups(objective.network, train.layer_decay),
        {"params": behind, "factor": train.embedding_factor},
        {"params": regressors, "factor": config.diversity.factor},
        {"params": proxies, "factor": PROXY_FACTOR},
    ]
    groups = [group for group in groups if group["params"]]
    rate, decay = train.learning_rate, train.weight_decay
    fused = has_fused_optimizers(objective.ensemble.weight.device) or None
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=0.9, weight_decay=decay, fused=fused)
    kind = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=rate, weight_decay=decay, fused=fused)


def _network_groups(network: nn.Module, decay: float) -> list[dict[str, Any]]:
    """One group, or one per stage, the last stage first.

    timm's `param_groups_layer_decay` takes models of timm only, neither our networks nor the stages after cached maps.
    """
    body = network.body if isinstance(network, Backbone) else network
    stages: Sequence[nn.Module] = [network]
    if decay != 1 and isinstance(body, Stages):
        stages = list(reversed(body.layers))
    return [
        {"params": [p for p in stage.parameters() if p.requires_grad], "factor": decay**behind}
        for behind, stage in enumerate(stages)
    ]


def learning_rate(settings: TrainConfig, step: int) -> float:
    """The rate of the backbone's last stage at a step, counted from 1."""
    if step <= settings.warmup:
        return settings.learning_rate * step / settings.warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    share = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
    return settings.learning_rate * 0.5 * (1 + math.cos(share * math.pi))


class WeightAverage:
    """An exponential moving average of all weights and statistics of an objective; nothing where `decay` is 0.

    The decay of update n = 0, 1, ... is min(decay, (1 + n) / (10 + n)), so that the average of a short run is not
    mostly its start. With lambda_w = inf the rows of W have length 1 in the average too.
    """

    def __init__(self, objective: Objective, decay: float) -> None:
        def update(averaged: Any, current: Any, count: Tensor | int) -> None:
            number = int(count)
            get_ema_multi_avg_fn(min(decay, (1 + number) / (10 + number)))(averaged, current, number)

        self.objective = objective
        self.averaged = AveragedModel(objective, multi_avg_fn=update, use_buffers=True) if decay else None

    def update(self) -> None:
        """Called after each step of the optimizer."""
        if self.averaged is None:
            return
        self.averaged.update_parameters(self.objective)
        copy = self.averaged.module
        assert isinstance(copy, Objective)
        if copy.diversity is not None and copy.diversity.lambda_w == math.inf:
            copy.diversity.hold(copy.ensemble)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the objective has the averaged weights; afterwards its own again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def keep(self) -> None:
        """The objective has the averaged weights from now on."""
        if self.averaged is not None:
            self.objective.load_state_dict(self.averaged.module.state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        return self.averaged.state_dict() if self.averaged is not None else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.averaged is not None:
            self.averaged.load_state_dict(state)

    def _swap(self) -> None:
        if self.averaged is None:
            return
        mine, theirs = (chain(one.parameters(), one.buffers()) for one in (self.averaged.module, self.objective))
        for averaged, current in zip(mine, theirs, strict=True):
            averaged.data, current.data = current.data, averaged.data
