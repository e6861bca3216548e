"""How much work a run may be: network, steps, rates and seeds, from a minute to the paper's own length."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bier.config import Config
from bier.errors import ConfigError, did_you_mean
from bier.paper.experiments import Row
from bier.training import methods, resolve

Kind = Literal["retrieval", "classification", "features"]
GOOGLENET = "googlenet-bvlc"
VALIDATION = {"train.validate_by": "recall", "data.validation_classes": 0}  # of trained steps, by R@1, as in the paper
LOOK = {"model.test_resolution": 0, "model.mirror": False}  # one look at each picture, at the resolution of training


@dataclass(frozen=True)
class Budget:
    """Settings by the kind of a run, before those of the row.

    methods: what each method changes, its learning rate above all; `stagewise` is boosting on fixed features.
    networks: the settings of networks that rows name, other than the budget's own.
    snapshots: how often a run is measured before its last step, at equal distances, for a curve over passes.
    shrink: divides the sizes of groups, regressors and so the embedding.
    """

    name: str
    about: str
    seeds: int
    settings: Mapping[Kind, Mapping[str, Any]]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    snapshots: int = 0
    shrink: int = 1


def _budget(
    name: str, about: str, retrieval: Mapping[str, Any], classification: Mapping[str, Any], **more: Any
) -> Budget:
    """The embedding alone on fixed features is trained as the whole network is: same steps, batches and rates."""
    training = {key: value for key, value in retrieval.items() if key.startswith("train.")}
    features = {"train.embedding_factor": 10.0, "train.weight_decay": 2e-4, "train.schedule": "constant"}
    features |= {**training, "data.validation": 0.0}
    settings = {"retrieval": retrieval, "classification": classification, "features": features}
    return Budget(name, about, settings=settings, **more)  # type: ignore[arg-type]


def _rates(**rates: float) -> dict[str, dict[str, Any]]:
    return {method.replace("_", "-"): {"train.learning_rate": rate} for method, rate in rates.items()}


_TINY = {"train.log_every": 1, "train.checkpoint_every": 2, "data.workers": 0, "diversity.hidden": 16}
SMOKE = _budget(
    "smoke",
    "a few steps of a tiny network: shows that everything runs, its numbers mean nothing",
    {
        **_TINY,
        "model.backbone": "conv4",
        "train.steps": 3,
        "train.batch_classes": 3,
        "train.batch_images": 3,
        "train.learning_rate": 1e-3,
        "train.embedding_factor": 1.0,
    },
    {**_TINY, "train.steps": 3, "train.batch_images": 2, "train.validate_every": 1},
    seeds=1,
    snapshots=2,
    shrink=8,
)
_GOOGLENET = {
    "model.backbone": GOOGLENET,
    "model.trainable_from": "inception_4a",
    "train.batch_classes": 8,
    "train.batch_images": 8,
    "train.checkpoint_every": 100,
    "train.keep_checkpoints": 1,
}
_CIFAR10 = {
    "train.steps": 16_000,
    "train.checkpoint_every": 1000,
    "train.validate_every": 1000,
    "train.keep_checkpoints": 1,
}
_NETWORKS = {
    # the defaults of `bier train`, chosen on the same held-out classes
    "lite": {
        "model.backbone": "efficientnet_lite0",
        "model.trainable_from": "blocks.2",
        "train.learning_rate": 3e-5,
        "train.embedding_factor": 10.0,
    },
    "wider": {"train.steps": 8000},  # a step takes four times as long as one of the smaller network
}
MAIN = _budget(
    "main",
    "GoogLeNet at 224 pixels, trained from inception_4a on, 500 steps of 64 images: 15 minutes per run on one core",
    {
        **_GOOGLENET,
        "model.trunk_views": 3,
        "loss.cost": 10.0,
        "train.steps": 500,
        "train.schedule": "cosine",
        "train.embedding_factor": 2.0,  # better than 10 at 1e-4, for baseline and A-BIER alike
    },
    _CIFAR10,
    seeds=3,
    # each the better of 3e-5 and 1e-4 on held-out training classes
    methods=_rates(baseline=1e-4, init=1e-4, bier=3e-5, activation_bier=1e-4, a_bier=1e-4, stagewise=1e-4),
    networks=_NETWORKS,
)
PAPER = _budget(
    "paper",
    "GoogLeNet at 224 pixels, trained from inception_4a on, 7,500 steps of 64 images, 82 passes as the paper's A-BIER",
    {
        **_GOOGLENET,
        "model.trunk_views": 8,
        "model.weighting": "alpha",
        "loss.cost": 25.0,
        "diversity.factor": 1.0,
        "train.steps": 7500,
        "train.schedule": "constant",
        "train.embedding_factor": 10.0,
    },
    _CIFAR10,
    seeds=1,
    # Steps times rate as in the paper: 50,000 x 1e-6, and 15,000 x 1e-5 with a diversity loss. The gradients of the
    # adversarial loss on W are to those of the metric loss as the authors' are, 0.01 to 0.4, from lambda_div = 1e-2 on.
    methods={
        **_rates(baseline=6.7e-6, init=6.7e-6, bier=6.7e-6, stagewise=6.7e-6, activation_bier=2e-5),
        "a-bier": {"train.learning_rate": 2e-5, "diversity.weight": 1e-2},
    },
    networks=_NETWORKS,
    snapshots=8,
)
# The rate is constant, so that a third of a run is its first third.
THIRD = replace(
    PAPER,
    name="third",
    about="the first third of `paper`: 2,500 steps of 64 images",
    settings={**PAPER.settings, "retrieval": {**PAPER.settings["retrieval"], "train.steps": 2500}},
    snapshots=2,
)
BUDGETS: Mapping[str, Budget] = {budget.name: budget for budget in (SMOKE, MAIN, THIRD, PAPER)}


def budget_of(name: str) -> Budget:
    """The budget of this name."""
    if name not in BUDGETS:
        hint = did_you_mean(name, BUDGETS)
        raise ConfigError(f"The budget must be one of {', '.join(BUDGETS)}. Got '{name}' instead.{hint}")
    return BUDGETS[name]


def kind_of(row: Row) -> Kind:
    if row.features_of is not None:
        return "features"
    return "classification" if row.data == "cifar10" else "retrieval"


def about(row: Row, budget: Budget) -> str:
    """What the budget means for a row: classification trains other networks than retrieval, for other steps."""
    if kind_of(row) != "classification":
        return budget.about
    config = config_of(row, budget)
    images = f"{config.data.train_images} training images of each class" if config.data.train_images else "all images"
    steps, batch = config.train.steps, config.train.batch_classes * config.train.batch_images
    return f"{config.model.backbone}: {steps:,} steps of {batch} images, {images}"


def config_of(row: Row, budget: Budget, seed: int = 0) -> Config:
    """The config of a row under a budget, without paths."""
    return resolve(row.method, _data(row), {**settings_of(row, budget), "seed": seed})


def settings_of(row: Row, budget: Budget) -> dict[str, Any]:
    """What the budget and the row set, over what suits the data and the method."""
    kind = kind_of(row)
    name = "stagewise" if kind == "features" else row.method
    method = {**budget.methods.get(name, {}), **_rate(budget.methods.get(row.rate_of or name, {}), row.times_rate)}
    if kind == "classification":
        method = {}
    network = budget.networks.get(row.network, {})
    return {**VALIDATION, **LOOK, **budget.settings[kind], **_groups(row, budget), **method, **network, **row.settings}


def _rate(method: Mapping[str, Any], times: float) -> dict[str, float]:
    """The learning rate of a method so many times, without the last bits of the product."""
    key = "train.learning_rate"
    return {key: float(f"{method[key] * times:.3g}")} if key in method else {}


def snapshots_of(row: Row, budget: Budget) -> list[int]:
    """The steps before the last at which a run is measured."""
    if kind_of(row) != "retrieval" or row.untrained:
        return []
    steps, parts = config_of(row, budget).train.steps, budget.snapshots + 1
    return sorted({round(steps * number / parts) for number in range(1, parts)} - {0, steps})


def suited(row: Row) -> dict[str, Any]:
    """What a row begins with, as `bier.training.resolve` has it."""
    return methods.suited(row.method, _data(row))


def _data(row: Row) -> str:
    return "features" if row.features_of is not None else row.data


def _groups(row: Row, budget: Budget) -> dict[str, Any]:
    """The sizes of the learners, made smaller where the budget says so."""
    if not row.groups:
        return {}
    sizes = tuple(max(1, size // budget.shrink) for size in row.groups)
    return {"model.groups": sizes, "model.embedding": sum(sizes)}
