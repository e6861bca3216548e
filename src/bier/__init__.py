"""Boosted embedding ensembles for image retrieval: the public names, and nothing else.

Names are imported when first used, so that `bier --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bier.config import Config as Config
    from bier.errors import BierError as BierError
    from bier.evaluate.correlation import classifier_correlation as classifier_correlation
    from bier.evaluate.correlation import feature_correlation as feature_correlation
    from bier.evaluate.recall import recall_at_k as recall_at_k
    from bier.method.boosting import BoostedLoss as BoostedLoss
    from bier.method.classifier import BoostedClassifier as BoostedClassifier
    from bier.method.diversity import ActivationLoss as ActivationLoss
    from bier.method.diversity import AdversarialLoss as AdversarialLoss
    from bier.method.ensemble import EmbeddingEnsemble as EmbeddingEnsemble
    from bier.method.equations import boosting_rates as boosting_rates
    from bier.method.equations import group_sizes as group_sizes
    from bier.method.initialise import initialise as initialise
    from bier.method.losses import BinomialDeviance as BinomialDeviance
    from bier.method.losses import Contrastive as Contrastive
    from bier.method.losses import MultiSimilarity as MultiSimilarity
    from bier.method.losses import Triplet as Triplet
    from bier.models.model import Model as Model
    from bier.models.model import load as load
    from bier.models.model import pretrained as pretrained
    from bier.search.index import Index as Index
    from bier.training.loop import train as train
    from bier.training.methods import resolve as resolve

__version__ = "0.2.0"

_HOME = {
    "ActivationLoss": "bier.method.diversity",
    "AdversarialLoss": "bier.method.diversity",
    "BierError": "bier.errors",
    "BinomialDeviance": "bier.method.losses",
    "BoostedClassifier": "bier.method.classifier",
    "BoostedLoss": "bier.method.boosting",
    "Config": "bier.config",
    "Contrastive": "bier.method.losses",
    "EmbeddingEnsemble": "bier.method.ensemble",
    "Index": "bier.search.index",
    "Model": "bier.models.model",
    "MultiSimilarity": "bier.method.losses",
    "Triplet": "bier.method.losses",
    "boosting_rates": "bier.method.equations",
    "classifier_correlation": "bier.evaluate.correlation",
    "feature_correlation": "bier.evaluate.correlation",
    "group_sizes": "bier.method.equations",
    "initialise": "bier.method.initialise",
    "load": "bier.models.model",
    "pretrained": "bier.models.model",
    "recall_at_k": "bier.evaluate.recall",
    "resolve": "bier.training.methods",
    "train": "bier.training.loop",
}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'bier' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
