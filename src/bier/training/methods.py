"""Methods and defaults for each data set, as named sets of settings. Every setting can be overridden."""

from collections.abc import Mapping
from typing import Any

from bier.config import Config
from bier.errors import ConfigError, did_you_mean
from bier.method.defaults import encoding_look

METHODS: Mapping[str, Mapping[str, Any]] = {
    # one plain embedding
    "baseline": {"model.groups": 1, "loss.boost": False},
    # learners that start different and are then trained alike
    "init": {"loss.boost": False, "model.start": "activation"},
    # boosted learners that start different
    "bier": {"model.start": "activation"},
    # boosted learners that are kept different while they train, with the paper's lambda_div
    "activation-bier": {"diversity.name": "activation", "diversity.weight": 1e-2},
    "a-bier": {"diversity.name": "adversarial", "diversity.weight": 1e-3},
}

_FROM_SCRATCH = {
    "train.learning_rate": 1e-3,
    "train.embedding_factor": 1.0,
    "train.weight_decay": 0.0,
    "train.schedule": "cosine",
}
_KEPT_BY_MAP = {"train.validate_by": "map"}
_OWN_PICTURES = {**_KEPT_BY_MAP, "data.validation": 0.1, "data.validation_classes": 20}

SUITED: Mapping[str, Mapping[str, Any]] = {
    "glyphs": {
        **_FROM_SCRATCH,
        "model.backbone": "conv4",
        "data.augment": "shift",
        "train.batch_classes": 16,
        "train.batch_images": 5,
        "train.steps": 600,
        # Few classes, so that a plain embedding over-fits within minutes, as it does on photographs within hours. This
        # and the cost of negative pairs were chosen on validation alphabets; see docs/demo.md.
        "data.train_classes": 40,
        "loss.cost": 5.0,
    },
    "cifar10": {
        **_FROM_SCRATCH,
        "model.backbone": "cifar10-quick",
        "model.embedding": 64,
        "model.groups": 2,
        "loss.name": "cross-entropy",
        "diversity.through_backbone": True,
        "diversity.scale_features": False,  # better on validation images; see docs/results-appendix.md
        "data.augment": "none",  # the paper names none, and compares with a baseline that has weight decay only
        "train.batch_classes": 10,
        "train.batch_images": 10,
        "train.steps": 8000,
        "train.weight_decay": 1e-3,
    },
    "features": {
        **_FROM_SCRATCH,
        **_OWN_PICTURES,
        "model.backbone": "features",
        "data.augment": "none",
    },
    "folder": _OWN_PICTURES,
    "table": _OWN_PICTURES,
    **dict.fromkeys(("cub", "cub-cropped", "cars", "cars-cropped", "sop", "inshop", "vehicleid"), _KEPT_BY_MAP),
}

# Chosen on validation images (docs/results-appendix.md). Means over dimensions: 100 is 0.1 for the sum over 21 x 43
# products.
BOTH: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("cifar10", "activation-bier"): {"diversity.weight": 100.0},
    ("cifar10", "a-bier"): {"diversity.weight": 3e-2, "loss.boosting": "gradient"},
}


def suited(method: str, data: str) -> dict[str, Any]:
    """What suits the data set, what the method is, and what the two need together."""
    return {**SUITED.get(data, {}), **METHODS[method], **BOTH.get((data, method), {}), "data.name": data}


def resolve(method: str, data: str, settings: Mapping[str, Any] | None = None) -> Config:
    """The config of a run: defaults, then what suits the data set, then the method, then the caller's settings.

    Args:
        method: `baseline`, `init`, `bier`, `activation-bier` or `a-bier`.
        data: the name of the data set, such as `folder`.
        settings: values by dotted key; they come before all others.

    Returns:
        The config, for `bier.train`.

    Raises:
        ConfigError: the method or a setting is unknown, or a value is out of range.

    Example:
        >>> import bier
        >>> config = bier.resolve("a-bier", "folder", {"data.root": "photos", "train.steps": 500})
        >>> config.diversity.name, config.train.steps
        ('adversarial', 500)
    """
    if method not in METHODS:
        hint = did_you_mean(method, METHODS)
        raise ConfigError(f"The method must be one of {', '.join(METHODS)}. Got '{method}' instead.{hint}")
    layers = {**suited(method, data), "method": method, **(settings or {})}
    if "data.validation" in (settings or {}) and "data.validation_classes" not in (settings or {}):
        layers["data.validation_classes"] = 0  # a share that was asked for is taken as it is
    config = Config().with_settings(layers)
    return config.with_settings({key: value for key, value in _look(config).items() if key not in layers})


def _look(config: Config) -> dict[str, Any]:
    """How pictures are encoded where the settings do not say so, with pretrained backbones that gain from it."""
    started = config.model.pretrained or config.model.weights
    if config.data.name in ("glyphs", "cifar10", "features") or not started:
        return {}
    side, mirror = encoding_look(config.model.backbone, config.model.resolution)
    return {"model.test_resolution": side, "model.mirror": mirror and config.data.augment != "shift"}
