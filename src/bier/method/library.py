"""Losses of pytorch-metric-learning, boosted by their functional gradient, Eq. (7c).

Proxy and classifier losses have proxies per learner instead, and images are reweighted, as in `BoostedClassifier`.

The library is an optional extra, `peers`, and is imported where a loss or a miner is built by its name.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bier.errors import ConfigError, did_you_mean, needs
from bier.method import equations

Mine: TypeAlias = Callable[[Tensor, Tensor], Any]  # embeddings, labels -> chosen pairs or triplets, or None for all

_BASE = "it is a base class and computes nothing"
NOT_BOOSTED: Mapping[str, str] = {
    "BaseLossWrapper": _BASE,
    "BaseMetricLossFunction": _BASE,
    "EmbeddingRegularizerMixin": _BASE,
    "GenericPairLoss": _BASE,
    "WeightRegularizerMixin": _BASE,
    "DynamicSoftMarginLoss": "its histogram holds on to the graph of the batch before, so that step 2 fails",
    "ManifoldLoss": "it draws classes at random and takes no labels",
    "MultipleLosses": "it is a sum of losses; make a BoostedLoss for each of them and add these",
    "P2SGradLoss": "it returns the mean over images only, so that no image can be weighted",
    "SelfSupervisedLoss": "it takes two views of each image and no labels",
    "VICRegLoss": "it takes two views of each image and no labels",
}
# `get_logits` of these is a similarity; times this attribute it is what the softmax of the loss sees.
_SCALES = {"ProxyAnchorLoss": "alpha", "ProxyNCALoss": "softmax_scale", "SoftTripleLoss": "la"}
_CLASS_ARGUMENTS = ("num_classes", "embedding_size")


def is_from_library(loss: Any) -> bool:
    """Whether this is a loss of pytorch-metric-learning, or derived from one, without importing the library."""
    losses = sys.modules.get("pytorch_metric_learning.losses")
    kinds = ("BaseMetricLossFunction", "BaseLossWrapper", "MultipleLosses")
    return losses is not None and isinstance(loss, tuple(getattr(losses, kind) for kind in kinds))


def _has_proxies(loss: Any) -> bool:
    """Whether each class has weights of its own; an error where the loss cannot be boosted."""
    name = type(loss).__name__
    if name in NOT_BOOSTED:
        raise ConfigError(f"The loss {name} cannot be boosted: {NOT_BOOSTED[name]}.")
    if all(p.ndim < 2 for p in loss.parameters()):
        return False
    if not callable(getattr(loss, "get_logits", None)):
        raise ConfigError(f"The loss {name} cannot be boosted: it has proxies and no method 'get_logits'.")
    return True


class LibraryLoss(nn.Module):
    """What `BoostedLoss` makes of a loss of pytorch-metric-learning: one loss per learner, with proxies of its own.

    Args:
        groups: the size of each learner.
        loss: its proxies, if it has any, are of the size of the whole embedding; each learner gets its columns.
        miner: chooses pairs or triplets, for each learner anew.
        boost: False calls the loss on each learner alone, and so does a single group.
    """

    def __init__(self, groups: Sequence[int], loss: Any, miner: Any, boost: bool) -> None:
        super().__init__()
        self.has_proxies = _has_proxies(loss)
        self.boost = boost and len(groups) > 1
        starts = [sum(groups[:m]) for m in range(len(groups))]
        self.learners = nn.ModuleList(
            _for_learner(loss, start, size, sum(groups)) for start, size in zip(starts, groups, strict=True)
        )
        self.miner = miner
        memories: list[Any] = [learner for learner in self.learners if type(learner).__name__ == "CrossBatchMemory"]
        if memories:
            for m, memory in enumerate(memories):  # it sees the vector of the first learners, or of one alone
                memory.embedding_size = sum(groups[: m + 1]) if self.boost else groups[m]
                memory.reset_queue()
            self.positions = _Positions(memories)
        self.rates, _ = equations.boosting_rates(len(groups))

    def forward(self, parts: Sequence[Tensor], labels: Tensor, mined: Any = None) -> Tensor:
        """M embeddings (B, d_m) and labels (B,) -> (M, 3): loss, mean weights of positive and of negative pairs.

        mined: pairs or triplets that were chosen already, for all learners.
        """
        labels = labels.long()
        mine = self._mine if mined is None else lambda *_: mined
        if not self.boost:
            totals = [loss(f, labels, mine(f, labels)) for loss, f in zip(self.learners, parts, strict=True)]
            return torch.stack([_row(total) for total in totals])
        boosted = self._with_proxies if self.has_proxies else self._by_gradient
        return torch.stack(boosted(parts, labels, mine))

    def _mine(self, f: Tensor, labels: Tensor) -> Any:
        return None if self.miner is None else self.miner(f, labels)

    def _by_gradient(self, parts: Sequence[Tensor], labels: Tensor, mine: Mine) -> list[Tensor]:
        """Eq. (7c): the loss at s^m, the learners before m held fixed."""
        rows, before = [], list[Tensor]()
        for loss, f in zip(self.learners, parts, strict=True):
            # The vector of the first m learners: the dot product of two of them is s^m of Eq. (6).
            vector = equations.ensemble_vector([*before, f], "sqrt")
            rows.append(_row(loss(vector, labels, mine(vector, labels))))
            before.append(f.detach())
        return rows

    def _with_proxies(self, parts: Sequence[Tensor], labels: Tensor, mine: Mine) -> list[Tensor]:
        """The weight of an image is 1 - p of its own class by the ensemble so far; weights are scaled to mean 1."""
        rows = []
        weight, running = torch.ones_like(labels, dtype=parts[0].dtype), torch.empty(0)
        for m, (rate, loss, f) in enumerate(zip(self.rates, self.learners, parts, strict=True)):
            if m:
                weight = 1 - equations.own_probability(running, labels)
            with _weighing_images(loss, weight / weight.mean().clamp_min(torch.finfo(weight.dtype).tiny)):
                total = loss(f, labels, mine(f, labels))
            rows.append(_row(total, weight.mean(), weight.mean()))
            with torch.no_grad():
                logits = _class_logits(loss, f)
                running = equations.running_score(running, logits, rate) if m else logits
        return rows


class _Positions(nn.Module):
    """How far each CrossBatchMemory is filled; the library saves what is in them, and not this."""

    def __init__(self, memories: Sequence[Any]) -> None:
        super().__init__()
        self.memories = list(memories)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([[memory.queue_idx, memory.has_been_filled] for memory in self.memories])

    def set_extra_state(self, state: Tensor) -> None:
        for memory, (position, filled) in zip(self.memories, state.tolist(), strict=True):
            memory.queue_idx, memory.has_been_filled = position, bool(filled)


def _row(total: Tensor, positive: Tensor | float = 1.0, negative: Tensor | float = 1.0) -> Tensor:
    total = total.reshape(())
    return torch.stack([total, torch.as_tensor(positive).to(total), torch.as_tensor(negative).to(total)])


def _for_learner(loss: Any, start: int, size: int, dimension: int) -> Any:
    """A copy of the loss whose proxies are the columns `start` to `start + size` of the given ones."""
    mine = copy.deepcopy(loss)
    for module in mine.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p.ndim < 2:
                continue
            sides = [side for side, length in enumerate(p.shape) if length == dimension]
            if not sides:
                raise ConfigError(
                    f"The parameter '{name}' of {type(loss).__name__} must have {dimension} rows or columns, one per "
                    f"dimension of the embedding. Got shape {tuple(p.shape)} instead."
                )
            # As many classes as dimensions: of the library's parameters only `proxies` has one row per class.
            side = sides[-1] if name == "proxies" else sides[0]
            cut = p.detach().narrow(side, start, size).clone()
            setattr(module, name, nn.Parameter(cut, requires_grad=p.requires_grad))
    return mine


@contextmanager
def _hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _weighing_images(loss: Any, weight: Tensor) -> Any:
    """While this lasts, images have these weights (B,)."""
    from pytorch_metric_learning.losses import ProxyAnchorLoss

    if isinstance(loss, ProxyAnchorLoss):  # it has a value per proxy and none per image: gradients are weighted instead
        scale: Callable[..., Tensor] = lambda _, __, scores: _ScaledGradient.apply(scores, weight[:, None])  # noqa: E731
        return _hooked(loss.distance.register_forward_hook(scale))

    def weigh(_: Any, arguments: tuple[Any, ...]) -> None:
        for term in arguments[0].values():
            if term["reduction_type"] == "element":
                term["losses"] = term["losses"] * weight[term["indices"]]

    return _hooked(loss.reducer.register_forward_pre_hook(weigh))


class _ScaledGradient(torch.autograd.Function):
    """The scores as they are; their gradient is multiplied by weights."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient * weight, None


def _class_logits(loss: Any, f: Tensor) -> Tensor:
    """(B, d_m) -> (B, classes), whose softmax is the probability of each class."""
    logits: Tensor = loss.get_logits(f)
    for kind in type(loss).__mro__:
        if kind.__name__ in _SCALES:
            sign = 1 if loss.distance.is_inverted else -1  # the library calls a similarity an inverted distance
            logits = logits * sign * getattr(loss, _SCALES[kind.__name__])
    return logits


def build_loss(name: str, settings: Mapping[str, Any], dimension: int, classes: int) -> Any:
    """The loss called `name`, with the arguments of `loss.settings`, of which some are objects, given by their names.

    A loss that needs the number of classes and the size of the embedding gets them.
    """
    needs("pytorch_metric_learning", "peers")
    from pytorch_metric_learning import distances, losses, miners, reducers

    kind = _class(losses, name, "loss.name", ("Loss", "Memory"))
    if name in NOT_BOOSTED:
        raise ConfigError(f"The setting 'loss.name' = {name} cannot be boosted: {NOT_BOOSTED[name]}.")
    arguments = dict(settings)
    objects = {"distance": distances, "reducer": reducers}
    if name == "CrossBatchMemory":
        objects |= {"loss": losses, "miner": miners}
    for key, module in objects.items():
        if key in arguments:
            arguments[key] = _class(module, arguments[key], f"loss.settings.{key}", "")()
    required = {
        parameter.name
        for base in kind.__mro__
        for parameter in inspect.signature(base.__init__).parameters.values()
        if parameter.default is inspect.Parameter.empty
    }
    sizes = dict(zip(_CLASS_ARGUMENTS, (classes, dimension), strict=True))
    return _built(kind, {**{key: sizes[key] for key in sizes if key in required}, **arguments}, "loss.settings")


def build_miner(name: str, settings: Mapping[str, Any]) -> Any:
    """The miner called `name`, with the arguments of `loss.miner_settings`."""
    needs("pytorch_metric_learning", "peers")
    from pytorch_metric_learning import distances, miners

    kind = _class(miners, name, "loss.miner", "Miner")
    arguments = dict(settings)
    if "distance" in arguments:
        arguments["distance"] = _class(distances, arguments["distance"], "loss.miner_settings.distance", "")()
    return _built(kind, arguments, "loss.miner_settings")


def _class(module: ModuleType, name: Any, key: str, endings: str | tuple[str, ...]) -> Any:
    known = sorted(one for one, value in vars(module).items() if inspect.isclass(value) and one.endswith(endings))
    if isinstance(name, str) and name in known + list(NOT_BOOSTED):
        return getattr(module, name)
    hint = did_you_mean(name, known) or f" It has {', '.join(known)}."
    raise ConfigError(
        f"The setting '{key}' must name a class of {module.__name__.replace('_', '-', 2)}. Got {name!r} instead.{hint}"
    )


def _built(kind: Any, arguments: Mapping[str, Any], key: str) -> Any:
    try:
        return kind(**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"The setting '{key}' must hold arguments of {kind.__name__}. Got {dict(arguments)!r} instead: {reason}."
        ) from None
