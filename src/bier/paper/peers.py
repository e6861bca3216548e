"""Losses of other authors, as pytorch-metric-learning has them, trained like ours: same data, batches and backbone."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bier.errors import ConfigError
from bier.method.boosting import BoostedParts


class PeerLoss(nn.Module):
    """A loss of pytorch-metric-learning in the place of `BoostedLoss`: one learner, every pair of weight 1.

    Its own parameters, such as the proxies of Proxy-NCA, are trained at the rate of the embedding layer.
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, z: Tensor, labels: Tensor) -> BoostedParts:
        """z (B, d) and labels (B,) -> the loss as that of a single learner."""
        total: Tensor = self.loss(z, labels)
        ones = z.new_ones(1)
        return BoostedParts(total, total.reshape(1), ones, ones)


def peer(name: str) -> Callable[[int, int], nn.Module]:
    """A builder of the loss called `name`, for `bier.training.train(metric=...)`; settings are the library's own."""
    try:
        from pytorch_metric_learning import losses
    except ImportError:
        raise ConfigError(
            "The losses of other authors need pytorch-metric-learning; install it with: pip install 'bier-ml[peers]'."
        ) from None
    kind = getattr(losses, name, None)
    if kind is None:
        raise ConfigError(f"pytorch-metric-learning has no loss '{name}'.")

    def build(dimension: int, classes: int) -> nn.Module:
        settings: dict[str, Any] = {}
        if name == "ProxyNCALoss":
            settings = {"num_classes": classes, "embedding_size": dimension}
        elif name == "MarginLoss":
            settings = {"learn_beta": True}  # as its authors do
        return PeerLoss(kind(**settings))

    return build
