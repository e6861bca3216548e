"""How much work a run may be: network, steps, seeds and learning rates, from a minute to the paper's own setting."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bier.config import Config
from bier.errors import ConfigError
from bier.paper.experiments import Row
from bier.training import methods, resolve

Kind = Literal["retrieval", "classification", "features"]
FASTER = 10.0  # the paper trains at 1e-6, and at 1e-5 with an auxiliary loss


@dataclass(frozen=True)
class Budget:
    """Settings by the kind of a run, before those of the row.

    with_auxiliary: what a diversity loss during training changes, as in the paper.
    all_layers: what changes where a row trains every layer and others do not.
    grid: learning rates to choose from on validation classes; empty for the one in the settings.
    search_steps: steps of each run that is measured on training classes held out; `validation` is their share where it
        chooses a rate.
    shrink: divides the sizes of groups, regressors and so the embedding.
    """

    name: str
    about: str
    seeds: int
    settings: Mapping[Kind, Mapping[str, Any]]
    with_auxiliary: Mapping[str, Any] = field(default_factory=dict)
    all_layers: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    search_steps: Mapping[Kind, int] = field(default_factory=dict)
    validation: float = 0.2
    shrink: int = 1


def _budget(
    name: str, about: str, retrieval: Mapping[str, Any], classification: Mapping[str, Any], **more: Any
) -> Budget:
    """The embedding alone on fixed features is trained as the whole network is: same steps, batches and rates."""
    training = {key: value for key, value in retrieval.items() if key.startswith("train.")}
    constant = {"train.embedding_factor": 10.0, "train.weight_decay": 2e-4, "train.schedule": "constant"}
    features = {"loss.cost": 25.0, **constant, **training, "data.validation": 0.0}
    for key in ("grid", "search_steps"):
        if key in more:
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
    {**_TINY, "train.steps": 3, "train.batch_images": 2, "train.validate_every": 3},
    seeds=1,
    grid={"retrieval": (1e-3,), "classification": (1e-4, 1e-3)},
    search_steps={"retrieval": 1, "classification": 1},
    validation=0.25,
    shrink=8,
)
SMALL = _budget(
    "small",
    "EfficientNet-Lite0 on 160 x 160 pixels, its last block and head trained on cached maps: an evening on two cores",
    {
        "model.backbone": "efficientnet_lite0",
        "model.resolution": 160,
        "model.trainable_from": "blocks.6",
        "model.trunk_views": 4,
        "train.steps": 200,
        "train.batch_classes": 8,
        "train.batch_images": 8,
        "train.schedule": "cosine",
        "train.checkpoint_every": 100,
        "train.keep_checkpoints": 1,
    },
    {
        "data.train_images": 300,  # of each class, so that the plain network over-fits within the budget
        "train.steps": 1800,
        "train.batch_images": 6,
        "train.checkpoint_every": 600,
        "train.validate_every": 1800,
        "train.keep_checkpoints": 1,
    },
    seeds=3,
    all_layers={"train.steps": 50, "train.checkpoint_every": 25},
    grid={"retrieval": (2e-5, 4e-5, 8e-5), "classification": (5e-4, 1e-3)},
    search_steps={"retrieval": 100, "classification": 900},
)
DEEP = replace(
    SMALL,
    name="deep",
    about="as small, but half of the network trained (from blocks.4 on) for 600 steps: ten minutes a run on one core",
    settings={
        **SMALL.settings,
        "retrieval": {**SMALL.settings["retrieval"], "model.trainable_from": "blocks.4", "train.steps": 600},
    },
    search_steps={**SMALL.search_steps, "retrieval": 150},
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
BUDGETS: Mapping[str, Budget] = {budget.name: budget for budget in (SMOKE, SMALL, DEEP, FULL)}


def budget_of(name: str) -> Budget:
    """The budget of this name."""
    if name not in BUDGETS:
        near = difflib.get_close_matches(name, BUDGETS, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
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
    return f"{config.train.steps:,} steps of {config.train.batch_classes * config.train.batch_images} images, {images}"


def rates(row: Row, budget: Budget) -> tuple[float, ...]:
    """The learning rates to choose from; none where the row sets its own or the budget has only one."""
    return () if "train.learning_rate" in row.settings else budget.grid.get(kind_of(row), ())


def config_of(row: Row, budget: Budget, seed: int = 0, *, rate: float | None = None, search: bool = False) -> Config:
    """The config of a row under a budget, without paths.

    rate: the learning rate, if not the budget's own. search: the shorter run on fewer classes that only chooses it.
    """
    settings = settings_of(row, budget, rate=rate, search=search)
    return resolve(row.method, _data(row), {**settings, "seed": seed})


def settings_of(row: Row, budget: Budget, *, rate: float | None = None, search: bool = False) -> dict[str, Any]:
    """What the budget and the row set, over what suits the data and the method."""
    kind = kind_of(row)
    settings: dict[str, Any] = {**budget.settings[kind], **_groups(row, budget)}
    if kind == "retrieval" and (row.fast or "diversity.name" in suited(row)):
        settings |= budget.with_auxiliary
    if row.settings.get("model.trainable_from") == "":
        settings |= budget.all_layers
    settings |= row.settings
    settings["train.steps"] = round(settings["train.steps"] * row.length)
    if search or row.validated:
        steps = budget.search_steps.get(kind, settings["train.steps"])
        settings |= {"train.steps": steps, "train.validate_every": steps}
    if search:
        settings["data.validation"] = budget.validation
    if rate is not None:
        settings["train.learning_rate"] = rate
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
