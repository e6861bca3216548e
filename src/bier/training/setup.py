"""From a config to what is trained: data, backbone, embedding, losses, batches."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

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
from bier.images import ImageDataset
from bier.method.classifier import BoostedClassifier
from bier.method.defaults import Start, Weighting
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.equations import group_sizes, unit_rows
from bier.method.initialise import initialise
from bier.models.backbone import folded, reuse_memory
from bier.models.backbones import Backbone, build_backbone
from bier.models.inference import FeatureRows, Inputs, Progress, inputs_in_order, run_network, to_array
from bier.models.maps import TrunkCache
from bier.models.model import Model
from bier.training.objective import Objective, diversity_loss, metric_loss


def inputs_for(
    part: Part, backbone: Backbone, config: Config, progress: Progress | None = None, training: bool = True
) -> ImageDataset | FeatureRows:
    """The images of a part as the backbone takes them: augmented for training, else as they are at test time."""
    if isinstance(part.images, np.ndarray) and part.images.ndim == 2:
        return FeatureRows(part.images)
    data = config.data
    return ImageDataset(
        part.images,
        backbone.resize,
        part.boxes,
        cache=data.cache or None,
        skip_broken=data.skip_broken,
        workers=None if data.workers < 0 else data.workers,
        progress=progress,
        crop=backbone.crop,
        augment=data.augment if training else "none",
    )


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

    inputs: Inputs
    labels: NDArray[np.int64]  # of all images of the part
    weighting: Weighting

    @torch.no_grad()
    def measure(self, objective: Objective) -> list[float]:
        """R@1 (or accuracy, for a classifier) in percent: of the ensemble, then of each learner."""
        objective.eval()
        device = objective.ensemble.weight.device
        inputs = inputs_in_order(self.inputs, self.inputs.kept, VALIDATION_BATCH)
        z = torch.from_numpy(to_array(run_network(objective.embed, inputs, device))).to(device)
        labels = torch.from_numpy(self.labels[self.inputs.kept]).to(device)
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
    inputs: Inputs
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
    """The data set that a config names, divided as it says; an error where the settings of training do not suit it."""
    dataset = data.load_for(config.data)
    if (dataset.protocol == "accuracy") != (config.loss.name == "cross-entropy"):
        wanted = "cross-entropy" if dataset.protocol == "accuracy" else "binomial-deviance, contrastive or triplet"
        raise ConfigError(
            f"The data set '{config.data.name}' needs loss.name={wanted}. Got '{config.loss.name}' instead."
        )
    if config.train.patience and "validation" not in dataset.parts:
        raise ConfigError(
            f"'train.patience' = {config.train.patience} needs images to validate on; set data.validation=0.1."
        )
    return dataset


def build(config: Config, run: Path, progress: Preparing, metric: MetricBuilder | None = None) -> TrainingSetup:
    """Check, read and build everything, in the order in which it can fail."""
    reuse_memory()
    torch.manual_seed(config.seed)
    dataset = load_data(config)
    part = dataset["train"]
    backbone = backbone_for(config, part).to(distributed.device())
    groups = sizes(config)
    ensemble = EmbeddingEnsemble(backbone.features, groups, _drawn_start(config), config.model.bias)
    network, inputs = network_and_inputs(config, backbone, part, run, progress)
    objective = Objective(
        network,
        ensemble,
        metric(sum(groups), len(part.classes)) if metric else metric_loss(config, groups, len(part.classes)),
        diversity_loss(config, config.diversity.name, groups),
        config.diversity.weight,
        config.train.precision,
    )
    objective.to(distributed.device())
    _check_classes(config, dataset, part.labels[inputs.kept])
    sampler = BalancedBatches(
        part.labels[inputs.kept],
        config.train.batch_classes,
        config.train.batch_images,
        config.seed,
        distributed.rank(),
        distributed.world(),
        indices=inputs.kept,
    )
    return TrainingSetup(
        config,
        dataset,
        backbone,
        objective,
        inputs,
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


def network_and_inputs(
    config: Config, backbone: Backbone, part: Part, run: Path, progress: Preparing, training: bool = True
) -> tuple[nn.Module, Inputs]:
    """What is trained, and the images of a part as they enter it: pixels, features, or maps of the frozen stages.

    Maps are computed once, for several augmented views of each image (for validation: one view, that of test time).
    """
    settings, stage = config.model, config.model.trainable_from
    follow = lambda done, total: progress("reading images", done, total)  # noqa: E731
    images = inputs_for(part, backbone, config, follow, training)
    if not settings.trunk_views or not isinstance(images, ImageDataset):
        return backbone, images
    trunk, rest = backbone.split(backbone.stages[-1] if stage == EMBEDDING_ONLY else stage)
    home = Path(config.data.cache) if config.data.cache else run
    made_of = repr((config.data, settings.backbone, settings.resolution, stage, settings.trunk_views, training))
    # Under torchrun every process comes here at once: the lock of the cache lets one compute while the others wait.
    # A barrier would give up after its timeout, and the maps of a large data set take longer.
    maps = TrunkCache(
        trunk,
        images,
        home / f"trunk-{sha256(made_of.encode()).hexdigest()[:8]}",
        crop=images.crop,
        augment=images.augment,
        views=settings.trunk_views if training else 1,
        precision=config.train.precision,
        progress=lambda done, total: progress("maps of the frozen stages", done, total),
    )
    return rest, maps


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
    _, inputs = network_and_inputs(config, backbone, part, run, progress, training=False)
    return Validation(inputs, part.labels, config.model.weighting)


def solve_start(config: Config, setup: TrainingSetup, progress: Preparing) -> None:
    """The embedding layer before step 1, on features computed once: W solved for with a diversity loss, and the bias
    that centres the embedding, each where the config asks for it."""
    ensemble = setup.objective.ensemble
    loss = diversity_loss(config, config.model.start, ensemble.groups)
    if loss is None and not config.model.bias:
        return
    generator = np.random.default_rng(config.seed)
    most = MOST_FEATURES if loss is not None else FEATURES_FOR_MEAN
    chosen = np.sort(generator.permutation(setup.inputs.kept)[:most])
    features = _features(setup, chosen, progress)
    if loss is not None:
        _solve(config, ensemble, features, loss, progress)
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


def _features(setup: TrainingSetup, numbers: NDArray[np.int64], progress: Preparing) -> Tensor:
    """phi of one view of each image, by the pretrained network, on the device of the model."""
    objective = setup.objective.eval()
    inputs = inputs_in_order(setup.inputs, numbers, 64)
    follow = lambda done, total: progress("features for the start", done, total)  # noqa: E731
    outputs = run_network(objective.features, inputs, setup.device, progress=follow, total=len(numbers))
    return torch.from_numpy(to_array(outputs)).to(objective.ensemble.weight)
