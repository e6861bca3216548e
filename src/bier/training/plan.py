"""A run that fits into a given time: how deep to train, on cached maps or not, and for how many steps.

`time_network` measures a few batches on this machine; `choose` is a pure function from these timings to a plan.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bier import system
from bier.config import Config
from bier.data import Dataset
from bier.errors import ConfigError
from bier.evaluate.dataset import SAME_IMAGES
from bier.images.dataset import usable_cores
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbone import Backbone, autocast
from bier.models.embed import inputs_for
from bier.models.model import is_pretrained
from bier.system import reuse_memory
from bier.training import choice
from bier.training.objective import Objective, diversity_loss, metric_loss
from bier.training.setup import (
    EMBEDDING_ONLY,
    FEATURES_FOR_MEAN,
    MOST_FEATURES,
    backbone_for,
    distractors_of,
    load_data,
    sizes,
    with_fewer_validated,
    without_broken,
)

# The recipe: the earliest stage from which LEAST_STEPS fit into the time, and more steps where there is time for them.
# On held-out classes of CUB-200-2011 all stages of EfficientNet-Lite0 were no better than blocks.2 and what follows at
# equal length, and R@1 rose until step 250 to 300 of 300; see docs/training.md.
LEAST_STEPS, MOST_STEPS = 500, 1_000
VIEWS = 3  # of each image, where maps of the frozen stages are cached; 1 where there is no time for more
VALIDATIONS = 8  # over the run
SCHEDULE = "cosine"

FEWEST_STEPS = 20  # a plan with fewer is refused
MARGIN = 0.95  # share of the time that is planned, the rest is for what was not measured
VALIDATION_SHARE, EVALUATION_SHARE = 0.15, 0.35  # of the time, at most; an evaluation that takes longer is left out
MOST_BYTES = 16 * 2**30  # of cached maps
WRITING, READING = 300e6, 1e9  # bytes per second of cached maps, to the disk and from memory
STARTING, SAVING, REPORT, SOLVING = 10.0, 0.5, 25.0, 15.0  # seconds: imports, a checkpoint, a report, solving for W
PAIRS = 5e9  # products per second while pairs of test images are ranked


@dataclass(frozen=True)
class Timings:
    """Seconds on this machine. All but `head` are per image; lists have one entry per stage."""

    stages: tuple[str, ...]
    forward: tuple[float, ...]  # without gradients
    training: tuple[float, ...]  # forward and backward
    decode: float  # read and augment
    head: float  # per step: the embedding layer, the losses and the optimizer
    map_bytes: tuple[int, ...]  # of what enters the stage, in bfloat16
    looks: float = 1.0  # what encoding a picture takes, in passes at the resolution of training


@dataclass(frozen=True)
class Work:
    """How many images there are to be trained on and measured."""

    batch: int
    train: int
    validation: int = 0  # with distractors
    test: int = 0
    start: int = 0  # whose features the start of the embedding layer needs
    solved: bool = False  # whether that start is solved for
    features: int = 1280  # that are compared, of the untrained backbone
    choosing: bool = False  # whether losses are tried first, where there are steps enough


@dataclass(frozen=True)
class Plan:
    """Settings of a run and the seconds that each part of it should take."""

    trainable_from: str
    views: int
    steps: int
    validate_every: int
    seconds: Mapping[str, float]
    evaluated: bool  # whether `bier evaluate` is among them

    @property
    def expected(self) -> float:
        return sum(self.seconds.values())

    def settings(self) -> dict[str, Any]:
        return {
            "model.trainable_from": self.trainable_from,
            "model.trunk_views": self.views,
            "train.steps": self.steps,
            "train.validate_every": self.validate_every,
            "train.checkpoint_every": self.validate_every,
            "train.schedule": SCHEDULE,
        }


def can_plan(config: Config) -> bool:
    """Whether a run is of the kind that is planned: a pretrained backbone and pictures to fine-tune it on."""
    named = config.data.name not in ("glyphs", "features", "cifar10")
    return named and config.model.backbone != "features" and is_pretrained(config.model)


def choose(
    timings: Timings, work: Work, seconds: float, *, space: float = MOST_BYTES, given: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a run that takes `seconds`, with `bier evaluate` after it.

    space: bytes that cached maps may take. given: settings that are fixed already, such as `model.trainable_from`.
    """
    given = given or {}
    plans = _plans(timings, work, seconds, space, given)
    if max((plan.steps for plan in plans), default=0) < FEWEST_STEPS:  # the time is for training first
        plans = _plans(timings, work, seconds, space, given, evaluate=False)
    wanted = [plan for plan in plans if plan.steps >= LEAST_STEPS and plan.views != 1]
    if wanted:
        first = wanted[0].trainable_from  # the earliest stage; of its plans the one with most steps
        return max((plan for plan in wanted if plan.trainable_from == first), key=lambda plan: plan.steps)
    best = max(plans, key=lambda plan: plan.steps, default=None)
    if best is None or best.steps < FEWEST_STEPS:
        raise ConfigError(
            f"After timing the network {seconds / 60:.3g} minutes are left, too few to train on {work.train:,} images; "
            "give --minutes more, or set data.train_images, a smaller model.resolution or train.steps."
        )
    return best


def _plans(
    timings: Timings, work: Work, seconds: float, space: float, given: Mapping[str, Any], evaluate: bool = True
) -> list[Plan]:
    """What can be done, the earliest stages first."""
    depth = given.get("model.trainable_from")
    return [
        plan
        for position, stage in enumerate((*timings.stages, EMBEDDING_ONLY))
        if depth in (None, stage) or (depth == "" and position == 0)
        for views in _views(given, first=position == 0)
        if (plan := _plan(timings, work, seconds, position, views, space, given, evaluate)) is not None
    ]


def _views(given: Mapping[str, Any], first: bool) -> tuple[int, ...]:
    """0: the frozen stages run in every step."""
    if "model.trunk_views" in given:
        return (given["model.trunk_views"],)
    return (0,) if first else (VIEWS, 0, 1)


def _plan(
    timings: Timings,
    work: Work,
    seconds: float,
    position: int,
    views: int,
    space: float,
    given: Mapping[str, Any],
    evaluate: bool,
) -> Plan | None:
    """The plan that trains from the stage at `position` on (behind the last one: only the embedding layer)."""
    only_embedding = position == len(timings.stages)
    cut = position - 1 if only_embedding else position  # maps are those that enter the last stage
    if only_embedding and views and cut == 0:
        return None  # a network in one piece: its maps would be the pictures
    if views and timings.map_bytes[cut] * (views * work.train + work.validation) > space:
        return None
    cost = _costs(timings, work, cut, views, only_embedding)
    one = work.validation * cost.embedding + work.validation**2 * work.features / PAIRS
    evaluation = REPORT + 2 * work.test * cost.encoding + 3 * work.test**2 * work.features / PAIRS
    evaluated = evaluate and evaluation <= EVALUATION_SHARE * seconds
    parts = {
        "start": STARTING + work.start * cost.embedding + (SOLVING if work.solved else 0.0),
        "maps": cost.maps,
        "threshold": min(2 * SAME_IMAGES, work.train + work.validation) * cost.encoding,  # that `find_same` embeds
        # the model and the untrained backbone, as they encode
        "final validation": 2 * work.validation * cost.encoding if timings.looks > 1 else 0.0,
        "evaluation": evaluation if evaluated else 0.0,
    }
    left = MARGIN * seconds - sum(parts.values())
    most = min(VALIDATIONS, max(1, int(VALIDATION_SHARE * seconds / one))) if one else VALIDATIONS
    every = given.get("train.validate_every")
    trying = 2 * one + 4 * SAVING  # that and more steps, before one loss is chosen

    def fitting(left: float, share: float) -> int:
        if every is not None:
            return int(max(0.0, left - one) / (cost.step * (1 + share) + (one + SAVING) / every))
        return int(max(0.0, left - (most + 1) * one - most * SAVING) / (cost.step * (1 + share)))

    steps = fitting(left, 0.0)
    if work.choosing and choice.steps_each(steps):  # too few with the choice: no run that would make one
        with_choice = fitting(left - trying - cost.step, 1 / choice.PARTS)
        steps = with_choice if choice.steps_each(with_choice) else choice.LEAST_STEPS - 1
    steps = min(steps, MOST_STEPS)
    tried = choice.steps_each(steps) if work.choosing else 0
    every = every or max(1, -(-steps // most))
    measured = -(-steps // every) if work.validation else 0
    parts |= {
        "choice of the loss": tried * cost.step + trying if tried else 0.0,
        "training": steps * cost.step,
        "validation": (measured + bool(measured)) * one + -(-steps // every) * SAVING,
    }
    stage = "" if position == 0 else EMBEDDING_ONLY if only_embedding else timings.stages[position]
    return Plan(stage, views, steps, every, parts, evaluated)


class _Costs(NamedTuple):
    """Seconds: of all cached maps, of a training step, of embedding an image in training, and of encoding one."""

    maps: float
    step: float
    embedding: float
    encoding: float


def _costs(timings: Timings, work: Work, cut: int, views: int, only_embedding: bool) -> _Costs:
    """The costs of a run whose stages before `cut` are frozen, on `views` cached maps of each image or on none."""
    frozen, rest = sum(timings.forward[:cut]), sum(timings.forward[cut:])
    trained = rest if only_embedding else sum(timings.training[cut:])
    encoding = timings.decode + timings.looks * (frozen + rest)
    if not views:
        whole = timings.decode + frozen + rest
        return _Costs(0.0, work.batch * (timings.decode + frozen + trained) + timings.head, whole, encoding)
    stored = timings.map_bytes[cut]
    return _Costs(
        (views * work.train + work.validation) * (timings.decode + frozen + stored / WRITING),
        work.batch * (trained + stored / READING) + timings.head,
        rest + stored / READING,
        encoding,
    )


def plan_run(
    config: Config,
    minutes: float,
    run: Path,
    given: Mapping[str, Any],
    progress: Callable[[str, int, int], None],
    started: float | None = None,
    choose_loss: bool = False,
) -> Plan:
    """Time the network of a config on its own images and plan a run of so many minutes.

    choose_loss: whether the run is asked to choose its loss.
    given: settings that the caller has chosen. started: when the minutes began, by `time.perf_counter`.
    """
    if not can_plan(config):
        raise ConfigError(
            "--minutes plans the fine-tuning of a pretrained backbone on pictures. "
            f"Got {config.model.backbone} on {config.data.name} instead; use --steps."
        )
    started = time.perf_counter() if started is None else started
    dataset = without_broken(load_data(config), config, progress)
    timings = time_network(config, dataset, progress)
    spent = time.perf_counter() - started
    home = Path(config.data.cache) if config.data.cache else run
    while not home.is_dir():
        home = home.parent
    space = min(MOST_BYTES, shutil.disk_usage(home).free / 2)
    work = work_of(config, dataset)
    choosing = choose_loss and choice.classes_to_tell(config, dataset) >= choice.LEAST_CLASSES
    work = replace(work, choosing=choosing)
    plan = choose(timings, work, 60 * minutes - spent, space=space, given=given)
    return replace(plan, seconds={"planning": spent, **plan.seconds})


def work_of(config: Config, dataset: Dataset) -> Work:
    dataset, validation = with_fewer_validated(dataset), 0
    if "validation" in dataset.parts:
        others = distractors_of(dataset) if config.train.validate_by == "map" else ()
        validation = len(dataset["validation"]) + len(others)
    solved = config.model.start in ("activation", "adversarial")
    train = len(dataset["train"])
    return Work(
        batch=config.train.batch_classes * config.train.batch_images,
        train=train,
        validation=validation,
        test=sum(len(part) for name, part in dataset.parts.items() if name in ("test", "query", "gallery")),
        start=min(train, MOST_FEATURES) if solved else min(train, FEATURES_FOR_MEAN) if config.model.bias else 0,
        solved=solved,
    )


TIMED_PASSES, TIMED_SECONDS = 2, 6.0
FIRST_IMAGES = 8  # tell how many images a timed pass may have
StageTimes = tuple[list[float], list[float], list[int]]


def time_network(config: Config, dataset: Dataset, progress: Callable[[str, int, int], None]) -> Timings:
    """Run a few batches of training images through the network, forwards and backwards, stage by stage."""
    reuse_memory()
    part = dataset["train"]
    device = system.device()
    whole = config.with_settings({"model.trainable_from": "", "model.trunk_views": 0})
    backbone = backbone_for(whole, part).to(device).train()
    if config.model.trainable_from not in ("", EMBEDDING_ONLY):
        backbone.split(config.model.trainable_from)  # an error where there is no such stage
    size = min(config.train.batch_classes * config.train.batch_images, len(part))
    chosen = part.select(np.linspace(0, len(part) - 1, size).round().astype(np.int64))
    images = inputs_for(chosen, backbone, workers=0, augment=config.data.augment)
    began = time.perf_counter()
    pixels = next(images.batches([[(index, index) for index in range(len(images))]]))[0].to(device)
    decode = (time.perf_counter() - began) / len(pixels)
    progress("timing the network", 0, TIMED_PASSES + 2)
    began = time.perf_counter()
    _one_pass(backbone, pixels[:FIRST_IMAGES], config.train.precision)
    each = (time.perf_counter() - began) / min(FIRST_IMAGES, len(pixels))
    pixels = pixels[: max(FIRST_IMAGES, int(TIMED_SECONDS / TIMED_PASSES / each))]  # a slow machine times fewer images
    passes: list[StageTimes] = []
    for number in range(TIMED_PASSES + 1):
        progress("timing the network", number + 1, TIMED_PASSES + 2)
        passes.append(_one_pass(backbone, pixels, config.train.precision))
    progress("timing the network", 1, 1)
    # the first pass of its size asks for memory that later ones find in place
    forward, training = (np.mean([one[which] for one in passes[1:]], axis=0) / len(pixels) for which in (0, 1))
    return Timings(
        backbone.stages,
        tuple(forward.tolist()),
        tuple(training.tolist()),
        decode / (1 if config.data.workers == 0 else usable_cores()),
        _head(config, backbone, len(part.classes)),
        tuple(passes[0][2]),
        (1 + config.model.mirror) * ((config.model.test_resolution or backbone.crop) / backbone.crop) ** 2,
    )


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _one_pass(backbone: Backbone, pixels: Tensor, precision: str) -> StageTimes:
    """Seconds of each stage without gradients and with them, for the whole batch; bytes per image that enter it."""
    device = pixels.device
    forward: list[float] = []
    stored: list[int] = []
    with torch.no_grad(), autocast(precision, device):
        x = backbone.scale(pixels)
        for layer in backbone.body.layers:
            stored.append(2 * x[0].numel())
            began = _now(device)
            x = layer(x)
            forward.append(_now(device) - began)
    training = [0.0] * len(forward)
    reached: dict[int, float] = {}  # when the gradient of each stage's output was there
    with autocast(precision, device):
        x = backbone.scale(pixels)
        for number, layer in enumerate(backbone.body.layers):
            began = _now(device)
            x = layer(x)
            training[number] = _now(device) - began
            if x.requires_grad:
                x.register_hook(lambda _, number=number: reached.__setitem__(number, _now(device)))
    x.float().square().mean().backward()
    reached[-1] = _now(device)
    last = reached[-1]
    for number in range(len(training)):
        training[number] += max(0.0, last - reached.get(number, last))
        last = min(last, reached.get(number, last))
    backbone.zero_grad(set_to_none=True)
    return forward, training, stored


def _head(config: Config, backbone: Backbone, classes: int) -> float:
    """Seconds per step of the embedding layer and the losses, and of the optimizer for all weights."""
    batch = config.train.batch_classes * config.train.batch_images
    groups, device = sizes(config), next(backbone.parameters()).device
    objective = Objective(
        nn.Identity(),
        EmbeddingEnsemble(backbone.features, groups),
        metric_loss(config, groups, classes),
        diversity_loss(config, config.diversity.name, groups),
        config.diversity.weight,
    ).to(device)
    features = torch.randn(batch, backbone.features, device=device)
    labels = torch.arange(config.train.batch_classes, device=device).repeat_interleave(config.train.batch_images)
    parameters = [*objective.parameters(), *backbone.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.0)
    objective.hold_rows(optimizer)
    seconds = []
    for _ in range(3):
        began = _now(device)
        optimizer.zero_grad()
        objective(features, labels).total.backward()
        for parameter in backbone.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        seconds.append(_now(device) - began)
    return float(np.mean(seconds[1:]))


def explained(plan: Plan, config: Config, minutes: float) -> Iterator[str]:
    """The plan in a few lines, for people."""
    batch = config.train.batch_classes * config.train.batch_images
    depth = {"": "all stages", EMBEDDING_ONLY: "the embedding layer alone"}.get(
        plan.trainable_from, f"{plan.trainable_from} and what follows it"
    )
    maps = f", on cached maps of {plan.views} view{'s' * (plan.views > 1)} per image" if plan.views else ""
    yield (
        f"Plan for {minutes:g} minutes: train {depth} of {config.model.backbone}, "
        f"{plan.steps} steps of {batch} images{maps}."
    )
    parts = ", ".join(f"{name} {_minutes(seconds)}" for name, seconds in plan.seconds.items() if seconds >= 1)
    rest = "" if plan.evaluated else " `bier evaluate` is not included."
    yield f"Expected: {_minutes(plan.expected)} minutes in all ({parts}).{rest}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"
