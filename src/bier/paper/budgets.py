"""How much work a run may be: network, steps, seeds and what is searched, from a minute to the paper's own setting."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bier.config import Config
from bier.errors import ConfigError, did_you_mean
from bier.paper.experiments import Row
from bier.training import methods, resolve

Kind = Literal["retrieval", "classification", "features"]
Choice = Mapping[str, Any]  # settings that a search tries together
FASTER = 10.0  # the paper trains at 1e-6, and at 1e-5 with an auxiliary loss
GOOGLENET = "googlenet-bvlc"
VALIDATION = {"train.validate_by": "recall", "data.validation_classes": 0}  # of trained steps, by R@1, as in the paper


@dataclass(frozen=True)
class Budget:
    """Settings by the kind of a run, before those of the row.

    with_auxiliary: what a diversity loss during training changes, as in the paper.
    all_layers: what changes where a row trains every layer and others do not.
    networks: the settings of networks that rows name, other than the budget's own.
    grid: the settings that a search chooses from, on held-out training classes; none for those above.
    search: what a run of the search changes: it holds classes out and validates while it trains, so that it chooses the
        length too. A classifier has validation images anyway: the best run of its search is that of the first seed.
    shrink: divides the sizes of groups, regressors and so the embedding.
    """

    name: str
    about: str
    seeds: int
    settings: Mapping[Kind, Mapping[str, Any]]
    with_auxiliary: Mapping[str, Any] = field(default_factory=dict)
    all_layers: Mapping[str, Any] = field(default_factory=dict)
    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grid: Mapping[Kind, tuple[Choice, ...]] = field(default_factory=dict)
    search: Mapping[Kind, Mapping[str, Any]] = field(default_factory=dict)
    shrink: int = 1


def _rates(*rates: float) -> tuple[Choice, ...]:
    return tuple({"train.learning_rate": rate} for rate in rates)


def _budget(
    name: str, about: str, retrieval: Mapping[str, Any], classification: Mapping[str, Any], **more: Any
) -> Budget:
    """The embedding alone on fixed features is trained as the whole network is: same steps, batches and rates."""
    training = {key: value for key, value in retrieval.items() if key.startswith("train.")}
    features = {"train.embedding_factor": 10.0, "train.weight_decay": 2e-4, "train.schedule": "constant"}
    features |= {**training, "data.validation": 0.0}
    for key in ("grid", "search"):
        if "retrieval" in more.get(key, {}):
            more[key] = {**more[key], "features": more[key]["retrieval"]}
    settings = {"retrieval": retrieval, "classification": classification, "features": features}
    return Budget(name, about, settings=settings, **more)  # type: ignore[arg-type]


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
    grid={"classification": _rates(1e-4, 1e-3)},
    search={"retrieval": {"data.validation": 0.25, "train.validate_every": 1}},
    shrink=8,
)
_GOOGLENET = {
    "model.backbone": GOOGLENET,
    "model.trunk_views": 3,
    "train.batch_classes": 8,
    "train.batch_images": 8,
    "train.schedule": "cosine",
    "train.embedding_factor": 2.0,  # better than 10 at 1e-4, for baseline and A-BIER alike; see docs/results.md
    "train.checkpoint_every": 100,
    "train.keep_checkpoints": 1,
    "train.validate_every": 50,
}
_LITE = {  # the defaults of `bier train`, chosen on the same classes; see docs/results.md
    "model.backbone": "efficientnet_lite0",
    "train.learning_rate": 3e-5,
    "train.embedding_factor": 10.0,
}
_CIFAR10 = {
    "train.steps": 16_000,
    "train.checkpoint_every": 1000,
    "train.validate_every": 1000,
    "train.keep_checkpoints": 1,
}
_WIDER = {"train.steps": 8000}  # a step takes four times as long as one of the smaller network
_CIFAR10_GRID = tuple({"train.learning_rate": 1e-3, "train.weight_decay": decay} for decay in (3e-4, 1e-3, 4e-3))
_CIFAR10_SEARCH = {"train.steps": 8000}
MAIN = _budget(
    "main",
    "GoogLeNet at 224 pixels, trained from inception_4a on, 500 steps of 64 images: 15 minutes per run on one core",
    {**_GOOGLENET, "model.trainable_from": "inception_4a", "train.steps": 500},
    _CIFAR10,
    seeds=3,
    networks={"lite": {"model.trainable_from": "blocks.2", **_LITE}, "wider": _WIDER},
    grid={"retrieval": _rates(3e-5, 1e-4), "classification": _CIFAR10_GRID},
    # The last classes, as the test split takes them too: random ones have siblings among the others and are too easy.
    search={
        "retrieval": {"data.validation": 0.4, "data.validation_order": "last"},
        "classification": _CIFAR10_SEARCH,
    },
)
LONG = _budget(
    "long",
    "as main for 1,500 steps at 3e-5, the embedding layer at ten times that: 45 minutes per run on one core",
    {
        **_GOOGLENET,
        "model.trainable_from": "inception_4a",
        "train.steps": 1500,
        "train.learning_rate": 3e-5,
        "train.embedding_factor": 10.0,
    },
    _CIFAR10,
    seeds=1,
    networks=MAIN.networks,
)
SHORT = _budget(
    "short",
    "GoogLeNet at 224 pixels, trained from inception_4c on, 300 steps of 32 images: 4 minutes per run on one core",
    {**_GOOGLENET, "model.trainable_from": "inception_4c", "train.steps": 300, "train.batch_images": 4},
    _CIFAR10,
    seeds=1,
    networks={"lite": {"model.trainable_from": "blocks.5", **_LITE}, "wider": _WIDER},
    all_layers={"train.steps": 200},
    grid=MAIN.grid,
    search={
        "retrieval": {**MAIN.search["retrieval"], "train.steps": 150, "train.validate_every": 75},
        "classification": _CIFAR10_SEARCH,
    },
)
FULL = _budget(
    "full",
    "the paper's own: GoogLeNet, all layers, 50,000 steps at 1e-6 or 15,000 at 1e-5 with an auxiliary loss",
    {
        "model.backbone": "googlenet-bvlc",
        "model.weighting": "alpha",
        "loss.cost": 25.0,
        "train.steps": 50_000,
        "train.learning_rate": 1e-6,
        "train.batch_classes": 8,
        "train.batch_images": 8,
        "train.checkpoint_every": 1000,
    },
    {"train.steps": 20_000, "train.checkpoint_every": 1000, "train.validate_every": 1000},
    seeds=3,
    with_auxiliary={"train.steps": 15_000, "train.learning_rate": 1e-5},
)
BUDGETS: Mapping[str, Budget] = {budget.name: budget for budget in (SMOKE, SHORT, MAIN, LONG, FULL)}


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


def choices(row: Row, budget: Budget) -> tuple[Choice, ...]:
    """What a search for this row tries; nothing where the row is not trained or its rate is set."""
    if row.untrained or "train.learning_rate" in {**budget.networks.get(row.network, {}), **row.settings}:
        return ()
    return budget.grid.get(kind_of(row), ())


def config_of(row: Row, budget: Budget, seed: int = 0, *, choice: Choice | None = None, search: bool = False) -> Config:
    """The config of a row under a budget, without paths.

    choice: what a search found, or tries. search: the run of the search, which holds training classes out.
    """
    settings = settings_of(row, budget, choice=choice, search=search)
    return resolve(row.method, _data(row), {**settings, "seed": seed})


def settings_of(row: Row, budget: Budget, *, choice: Choice | None = None, search: bool = False) -> dict[str, Any]:
    """What the budget and the row set, over what suits the data and the method."""
    kind = kind_of(row)
    settings: dict[str, Any] = {**VALIDATION, **budget.settings[kind], **_groups(row, budget)}
    if kind == "retrieval" and (row.fast or "diversity.name" in suited(row)):
        settings |= budget.with_auxiliary
    if row.settings.get("model.trainable_from") == "":
        settings |= budget.all_layers
    settings |= {**budget.networks.get(row.network, {}), **row.settings}
    if search:
        settings |= budget.search.get(kind, {})
    settings |= choice or {}
    if row.fast and "train.learning_rate" in (choice or {}):
        settings["train.learning_rate"] *= FASTER
    return settings


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
