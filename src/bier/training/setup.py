"""From a config to what is trained: data, backbone, embedding, losses, batches."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bier import data, distributed
from bier.config import Config
from bier.data import Dataset, Part
from bier.data.sampler import BalancedBatches
from bier.errors import ConfigError, DataError
from bier.evaluate.dataset import accuracies
from bier.evaluate.recall import recall_at_k
from bier.images import Batches, PreparedImages, in_order
from bier.images.dataset import Progress
from bier.method.classifier import BoostedClassifier
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble, Start
from bier.method.equations import Weighting, group_sizes, unit_rows
from bier.method.initialise import initialise
from bier.models.backbone import folded, reuse_memory
from bier.models.backbones import Backbone, build_backbone
from bier.models.maps import TrunkCache
from bier.models.model import Model
from bier.training.objective import Objective, diversity_loss, metric_loss

Plan = Iterable[Sequence[tuple[int, int]]]


class Feed(Protocol):
    """Inputs of a part's images. `kept` are the numbers of those that can be read."""

    kept: NDArray[np.int64]

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs (B, ...), image numbers (B,)) for each batch of a plan, augmented for training."""
        ...

    def in_order(self, numbers: NDArray[np.int64], batch_size: int) -> Iterator[Tensor]:
        """Inputs of these images as they are at test time, for the same network."""
        ...


class PixelFeed:
    """Pixels (B, 3, crop, crop), uint8."""

    def __init__(self, part: Part, backbone: Backbone, config: Config, progress: Progress | None = None) -> None:
        data = config.data
        cache = Path(data.cache) if data.cache else None
        workers = None if data.workers < 0 else data.workers
        self.source = PreparedImages(
            part.images, backbone.resize, part.boxes, cache, data.skip_broken, workers, progress=progress
        )
        self.kept = self.source.kept
        self.crop = backbone.crop
        self.augment = data.augment

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(Batches(self.source, plan, self.crop, self.augment))

    def in_order(self, numbers: NDArray[np.int64], batch_size: int) -> Iterator[Tensor]:
        for pixels, _ in Batches(self.source, in_order(numbers, batch_size), self.crop):
            yield pixels


class FeatureFeed:
    """Pre-computed features (B, h); nothing is augmented."""

    def __init__(self, part: Part) -> None:
        self.rows = torch.from_numpy(np.ascontiguousarray(part.images, dtype=np.float32))
        self.kept = np.arange(len(part), dtype=np.int64)

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in plan:
            numbers = torch.tensor([number for number, _ in batch])
            yield self.rows[numbers], numbers

    def in_order(self, numbers: NDArray[np.int64], batch_size: int) -> Iterator[Tensor]:
        yield from self.rows[torch.from_numpy(numbers)].split(batch_size)


class TrunkFeed:
    """Maps (B, C, H, W) of the frozen stages, computed once for several augmented views of each image.

    With `training=False` it is one view, the one of test time.
    """

    def __init__(
        self,
        pixels: PixelFeed,
        trunk: nn.Module,
        folder: Path,
        config: Config,
        progress: Progress,
        training: bool = True,
    ) -> None:
        self.kept = pixels.kept
        self.training = training
        views, augment = (config.model.trunk_views, config.data.augment) if training else (1, "none")
        with distributed.first_process_first():
            self.cache = TrunkCache(
                trunk,
                pixels.source,
                folder,
                crop=pixels.crop,
                augment=augment,
                views=views,
                precision=config.train.precision,
                progress=progress,
            )

    def batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        return self.cache.batches(plan)

    def in_order(self, numbers: NDArray[np.int64], batch_size: int) -> Iterator[Tensor]:
        if self.training:
            raise RuntimeError("these maps are of augmented views")
        return (maps for maps, _ in self.cache.batches(in_order(numbers, batch_size)))


def feed_for(part: Part, backbone: Backbone, config: Config, progress: Progress | None = None) -> Feed:
    """The feed that suits a part's images."""
    if isinstance(part.images, np.ndarray) and part.images.ndim == 2:
        return FeatureFeed(part)
    return PixelFeed(part, backbone, config, progress)


VALIDATION_BATCH = 128
EMBEDDING_ONLY = "embedding"
MOST_FEATURES = 10_000  # images from which a solved start is computed
FEATURES_FOR_MEAN = 1_000  # images whose mean feature the bias takes away
# The first steps take the learners apart (classifier correlation 0.74 to 0.34 on CUB) and cost no recall; the rest of
# the way to the minimum turns W towards directions in which the images hardly differ. See docs/results.md.
START_STEPS = 20
Preparing = Callable[[str, int, int], None]  # what is being prepared, how much is done, of how much
MetricBuilder = Callable[[int, int], nn.Module]  # (size of the embedding, number of classes) -> a loss


@dataclass
class Validation:
    """The validation part of the data set, measured while the run trains."""

    feed: Feed
    labels: NDArray[np.int64]  # of all images of the part
    weighting: Weighting

    @torch.no_grad()
    def measure(self, objective: Objective) -> list[float]:
        """R@1 (or accuracy, for a classifier) in percent: of the ensemble, then of each learner."""
        objective.eval()
        z = torch.cat([objective.embed(inputs) for inputs in self.feed.in_order(self.feed.kept, VALIDATION_BATCH)])
        labels = torch.from_numpy(self.labels[self.feed.kept]).to(z.device)
        if isinstance(objective.metric, BoostedClassifier):
            right = accuracies(objective.metric, z, labels)
            values = [value for name, value in right.items() if not name.startswith("prefix-")]
        else:
            z, labels, ensemble = z.cpu(), labels.cpu(), objective.ensemble
            vectors = [ensemble.vector(z, self.weighting), *map(unit_rows, ensemble.split(z))]
            values = [recall_at_k(one, labels, [1])[1] for one in vectors]
        objective.train()
        return values


@dataclass
class TrainingSetup:
    """What a config describes, built: data, networks, losses, batches."""

    config: Config
    dataset: Dataset
    backbone: Backbone
    objective: Objective
    feed: Feed
    labels: Tensor  # (N,) of the training images
    sampler: BalancedBatches
    validation: Validation | None

    @property
    def device(self) -> torch.device:
        return self.objective.ensemble.weight.device

    def model(self) -> Model:
        """The backbone and the embedding with their present weights, without anything that only training needs."""
        config = self.config
        metadata = {"data": config.data.name, "method": config.method, "seed": config.seed}
        return Model(self.backbone, self.objective.ensemble, config.model.weighting, config.train.precision, metadata)


def load_data(config: Config) -> Dataset:
    """The data set that a config names, divided as it says."""
    settings = config.data
    dataset = data.load(
        settings.name,
        settings.root or None,
        seed=settings.seed,
        validation=settings.validation,
        split=settings.split,
        test_share=settings.test_share,
        size=settings.size,
        validation_order=settings.validation_order,
    )
    if (dataset.protocol == "accuracy") != (config.loss.name == "cross-entropy"):
        wanted = "cross-entropy" if dataset.protocol == "accuracy" else "binomial-deviance, contrastive or triplet"
        raise ConfigError(f"The data set '{settings.name}' needs loss.name={wanted}. Got '{config.loss.name}' instead.")
    if config.train.patience and "validation" not in dataset.parts:
        raise ConfigError(
            f"'train.patience' = {config.train.patience} needs images to validate on; set data.validation=0.1."
        )
    if settings.train_classes:
        dataset = _fewer_classes(dataset, settings.train_classes)
    return _fewer_images(dataset, settings.train_images) if settings.train_images else dataset


def _fewer_images(dataset: Dataset, count: int) -> Dataset:
    """The data set with `count` training images of each class (or all it has), spread evenly over them."""
    part = dataset["train"]
    chosen = np.zeros(len(part), bool)
    for label in np.unique(part.labels):
        members = np.flatnonzero(part.labels == label)
        chosen[_spread(members, min(count, len(members)))] = True
    fewer = part.select(chosen)
    return replace(dataset, parts={**dataset.parts, "train": fewer}, split={**dataset.split, "train_images": count})


def _fewer_classes(dataset: Dataset, count: int) -> Dataset:
    """The data set with `count` of its training classes, spread evenly over all of them."""
    part = dataset["train"]
    present = np.unique(part.labels)
    if count > len(present):
        raise ConfigError(f"'data.train_classes' = {count} asks for more than the {len(present)} classes there are.")
    chosen = _spread(present, count)
    fewer = part.select(np.isin(part.labels, chosen)).only_present()
    return replace(dataset, parts={**dataset.parts, "train": fewer}, split={**dataset.split, "train_classes": count})


def _spread(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` of the values, evenly spread over them."""
    return values[np.linspace(0, len(values) - 1, count).round().astype(np.int64)]


def build(config: Config, run: Path, progress: Preparing, metric: MetricBuilder | None = None) -> TrainingSetup:
    """Check, read and build everything, in the order in which it can fail."""
    reuse_memory()
    torch.manual_seed(config.seed)
    dataset = load_data(config)
    part = dataset["train"]
    backbone = backbone_for(config, part).to(distributed.device())
    groups = sizes(config)
    ensemble = EmbeddingEnsemble(backbone.features, groups, _drawn_start(config), config.model.bias)
    network, feed = feed_and_network(config, backbone, part, run, progress)
    objective = Objective(
        network,
        ensemble,
        metric(sum(groups), len(part.classes)) if metric else metric_loss(config, groups, len(part.classes)),
        diversity_loss(config, config.diversity.name, groups),
        config.diversity.weight,
        config.train.precision,
    )
    objective.to(distributed.device())
    _check_classes(config, dataset, part.labels[feed.kept])
    sampler = BalancedBatches(
        part.labels[feed.kept],
        config.train.batch_classes,
        config.train.batch_images,
        config.seed,
        distributed.rank(),
        distributed.world(),
        indices=feed.kept,
    )
    return TrainingSetup(
        config,
        dataset,
        backbone,
        objective,
        feed,
        torch.from_numpy(part.labels),
        sampler,
        _validation(config, dataset, backbone, run, progress),
    )


def _check_classes(config: Config, dataset: Dataset, labels: NDArray[np.int64]) -> None:
    if not len(labels):
        raise DataError(f"None of the {len(dataset['train'])} training images of '{dataset.name}' can be read.")
    if (classes := len(np.unique(labels))) < 2:
        raise DataError(
            f"Training needs at least 2 classes. Got {classes} in the training part of '{dataset.name}', "
            f"with data.test_share={config.data.test_share} and data.validation={config.data.validation} held out; "
            "set data.validation=0 or data.split=inside."
        )


def backbone_for(config: Config, part: Part) -> Backbone:
    """The backbone that a config names, frozen before `model.trainable_from`, ready to be trained."""
    images = part.images
    width = images.shape[1] if isinstance(images, np.ndarray) and images.ndim == 2 else None
    settings = config.model
    if (width is not None) != (settings.backbone == "features"):
        raise ConfigError(
            "The backbone 'features' goes with pre-computed features and with nothing else. "
            f"Got the backbone '{settings.backbone}' with the data set '{config.data.name}'."
        )
    weights = Path(settings.weights) if settings.weights else None
    backbone = build_backbone(settings.backbone, pretrained=settings.pretrained, weights=weights, features=width)
    if settings.resolution:
        backbone.look_at(settings.resolution)
    if backbone.body.frozen_norm:
        backbone = folded(backbone)  # statistics that never change are part of the convolution, and cheaper there
    if settings.trainable_from == EMBEDDING_ONLY:
        backbone.requires_grad_(False).train(False)
    else:
        backbone.freeze_before(settings.trainable_from or None)
    return backbone


def feed_and_network(
    config: Config, backbone: Backbone, part: Part, run: Path, progress: Preparing, training: bool = True
) -> tuple[nn.Module, Feed]:
    """Training images (or those to validate on) as they enter what is trained, and the network that takes them."""
    feed = feed_for(part, backbone, config, lambda done, total: progress("reading images", done, total))
    if not config.model.trunk_views or not isinstance(feed, PixelFeed):
        return backbone, feed
    stage = config.model.trainable_from
    trunk, rest = backbone.split(backbone.stages[-1] if stage == EMBEDDING_ONLY else stage)
    home = Path(config.data.cache) if config.data.cache else run
    made_of = repr(
        (config.data, config.model.backbone, config.model.resolution, stage, config.model.trunk_views, training)
    )
    folder = home / f"trunk-{sha256(made_of.encode()).hexdigest()[:8]}"
    follow = lambda done, total: progress("maps of the frozen stages", done, total)  # noqa: E731
    return rest, TrunkFeed(feed, trunk, folder, config, follow, training)


def sizes(config: Config) -> tuple[int, ...]:
    """The size of each learner."""
    groups = config.model.groups
    return groups if isinstance(groups, tuple) else group_sizes(config.model.embedding, groups)


def _drawn_start(config: Config) -> Start:
    return "orthogonal" if config.model.start == "orthogonal" else "glorot"


def _validation(
    config: Config, dataset: Dataset, backbone: Backbone, run: Path, progress: Preparing
) -> Validation | None:
    if "validation" not in dataset.parts:
        return None
    part = dataset["validation"]
    _, feed = feed_and_network(config, backbone, part, run, progress, training=False)
    return Validation(feed, part.labels, config.model.weighting)


def solve_start(config: Config, setup: TrainingSetup, progress: Preparing) -> None:
    """The embedding layer before step 1, on features computed once: W solved for with a diversity loss, rows held at
    length 1, and the bias that centres the embedding, each where the config asks for it."""
    ensemble = setup.objective.ensemble
    loss = diversity_loss(config, config.model.start, ensemble.groups)
    if loss is None and not config.model.bias:
        setup.objective.after_step()
        return
    generator = np.random.default_rng(config.seed)
    most = MOST_FEATURES if loss is not None else FEATURES_FOR_MEAN
    chosen = np.sort(generator.permutation(setup.feed.kept)[:most])
    features = torch.cat(_features(setup, chosen, progress))
    if loss is not None:
        _solve(config, ensemble, features, loss, progress)
    setup.objective.after_step()
    if config.model.bias:
        ensemble.centre(features)


def _solve(
    config: Config,
    ensemble: EmbeddingEnsemble,
    features: Tensor,
    loss: ActivationLoss | AdversarialLoss,
    progress: Preparing,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a start that is not fully flat is still a start
        initialise(
            ensemble,
            features,
            loss,
            steps=START_STEPS,
            seed=config.seed,
            progress=lambda done, total: progress("solving for W", done, total),
        )


@torch.no_grad()
def _features(setup: TrainingSetup, numbers: NDArray[np.int64], progress: Preparing) -> list[Tensor]:
    """phi of one view of each image, by the pretrained network."""
    setup.objective.eval()
    rows: list[Tensor] = []
    for inputs, _ in setup.feed.batches(in_order(numbers, 64)):
        rows.append(setup.objective.features(inputs.to(setup.device)))
        progress("features for the start", sum(map(len, rows)), len(numbers))
    return rows
