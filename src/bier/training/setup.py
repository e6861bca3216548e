"""From a config to what is trained: data, backbone, embedding, losses, batches."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bier import data, distributed, system
from bier.config import LOSSES, Config
from bier.data import Dataset, Part
from bier.data.recorded import as_recorded
from bier.data.records import concatenated
from bier.data.sampler import BalancedBatches
from bier.errors import ConfigError, DataError
from bier.evaluate.dataset import accuracies
from bier.evaluate.recall import rank_r, ranks, recall_from_ranks
from bier.method.classifier import BoostedClassifier
from bier.method.defaults import Start, Weighting
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.equations import group_sizes, unit_rows
from bier.method.initialise import initialise
from bier.models.backbone import Backbone, folded
from bier.models.backbones import build_backbone
from bier.models.embed import FeatureRows, Inputs, inputs_for, inputs_in_order, run_network, to_array
from bier.models.lora import adapt, merged
from bier.models.maps import frozen_maps
from bier.models.model import Model, starting_point
from bier.runs import Run
from bier.system import reuse_memory
from bier.training.checkpoints import begin
from bier.training.objective import Objective, diversity_loss, metric_loss

VALIDATION_BATCH = 128
MOST_VALIDATED = 5_000  # images that are measured while a run trains
FEW_CLASSES, MOST_DISTRACTORS = 50, 1_000  # fewer validation classes than this are searched for among training images
EMBEDDING_ONLY = "embedding"
MOST_FEATURES = 10_000  # images from which a solved start is computed
FEATURES_FOR_MEAN = 1_000  # images whose mean feature the bias takes away
# The first steps take the learners apart (classifier correlation 0.74 to 0.34 on CUB) and cost no recall; the rest of
# the way to the minimum turns W towards directions in which the images hardly differ. See (17) in docs/method.md.
START_STEPS = 20
Preparing = Callable[[str, int, int], None]  # what is being prepared, how much is done, of how much
MetricBuilder = Callable[[int, int], nn.Module]  # (size of the embedding, number of classes) -> a loss


class Scores(NamedTuple):
    """What one validation has found, in percent: R@1 (accuracy, for a classifier), of each learner too, and MAP@R."""

    recall: float
    map_at_r: float | None = None
    learners: tuple[float, ...] = ()

    def named(self) -> dict[str, float]:
        """As `model.json` and `--json` have them."""
        return {"recall": self.recall} | ({} if self.map_at_r is None else {"map": self.map_at_r})


@dataclass
class Validation:
    """The validation part of the data set, measured while the run trains.

    Images behind the first `count` are distractors: training images that are searched among, and are no queries.
    """

    inputs: Inputs
    labels: NDArray[np.int64]  # of all images; each distractor has a label of its own
    weighting: Weighting
    count: int
    by_map: bool
    part: Part  # the same images
    progress: Preparing

    @property
    def distractors(self) -> int:
        return len(self.labels) - self.count

    @torch.no_grad()
    def measure(self, objective: Objective) -> Scores:
        """The model as it is now."""
        z = self._run(objective, objective.embed)
        labels = torch.from_numpy(self.labels)
        if isinstance(objective.metric, BoostedClassifier):
            right = accuracies(objective.metric, z, labels.to(z.device))
            objective.train()  # measuring has switched the classifier's dropout off
            accuracy, *learners = (value for name, value in right.items() if not name.startswith("prefix-"))
            return Scores(accuracy, None, tuple(learners))
        z, ensemble = z.cpu(), objective.ensemble
        whole = self._scores(ensemble.vector(z, self.weighting), labels)
        return whole._replace(learners=tuple(self._recall(unit_rows(part), labels) for part in ensemble.split(z)))

    @torch.no_grad()
    def measure_untrained(self, objective: Objective) -> Scores:
        """The plain normalised features, before the first step."""
        features = self._run(objective, lambda inputs: objective.features(inputs.to(objective.ensemble.weight.device)))
        return self._scores(unit_rows(features.cpu()), torch.from_numpy(self.labels))

    def measure_encoded(self, model: Model) -> Scores:
        """A finished model, as it encodes pictures; training looks at them once and at its own resolution."""
        follow = partial(self.progress, f"validation of the {model.metadata['method']} model")
        z = torch.from_numpy(model.embed_raw(inputs_for(self.part, model.backbone), VALIDATION_BATCH, progress=follow))
        return self._scores(model.ensemble.vector(z, model.weighting), torch.from_numpy(self.labels))

    def _run(self, objective: Objective, network: Callable[[Tensor], Tensor]) -> Tensor:
        objective.eval()
        device = objective.ensemble.weight.device
        inputs = inputs_in_order(self.inputs, VALIDATION_BATCH)
        rows = torch.from_numpy(to_array(run_network(network, inputs, device))).to(device)
        objective.train()
        return rows

    def _scores(self, vectors: Tensor, labels: Tensor) -> Scores:
        recall = self._recall(vectors, labels)
        if not self.by_map:
            return Scores(recall)
        # Distractors have no match and add nothing to the sum: only the number of queries is to be corrected.
        return Scores(recall, rank_r(vectors, labels).map_at_r * len(labels) / self.count)

    def _recall(self, vectors: Tensor, labels: Tensor) -> float:
        return recall_from_ranks(ranks(vectors, labels)[: self.count], [1])[1]


@dataclass
class TrainingSetup:
    """What a config describes, built: data, networks, losses, batches."""

    config: Config
    everything: Dataset  # as it is divided, with images that cannot be read
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

    def model(self, found: Mapping[str, Any] | None = None) -> Model:
        """The backbone and the embedding with their present weights, without anything that only training needs.

        found: what validation has found, kept with the model.
        """
        config = self.config
        metadata = {"data": config.data.name, "method": config.method, "seed": config.seed, **(found or {})}
        backbone, settings = merged(self.backbone), config.model
        return Model(
            backbone.seen_at(settings.test_resolution),
            self.objective.ensemble,
            settings.weighting,
            config.train.precision,
            metadata,
            settings.mirror,
            backbone.crop,
        )

    def untrained_model(self, found: Mapping[str, Any]) -> Model:
        """The backbone that the run has started from, with its features normalised."""
        model = starting_point(self.config.model, self.backbone.features, self.config.train.precision)
        assert model is not None  # a network from scratch has no step 0
        model.metadata |= {"data": self.config.data.name, "seed": self.config.seed, **found}
        return model


def load_data(config: Config) -> Dataset:
    """The data set that a config names, divided as it says; an error where the settings of training do not suit it."""
    if (
        config.loss.name not in LOSSES or config.loss.settings
    ):  # whether there is such a loss is known before images are read
        metric_loss(config, sizes(config), classes=2)
    dataset = data.load(config.data)
    if (dataset.protocol == "accuracy") != (config.loss.name == "cross-entropy"):
        others = "binomial-deviance, contrastive, triplet, multi-similarity or a loss of pytorch-metric-learning"
        wanted = "cross-entropy" if dataset.protocol == "accuracy" else others
        raise ConfigError(
            f"The data set '{config.data.name}' needs loss.name={wanted}. Got '{config.loss.name}' instead."
        )
    if config.train.patience and "validation" not in dataset.parts:
        raise ConfigError(
            f"'train.patience' = {config.train.patience} needs images to validate on; set data.validation=0.1."
        )
    return dataset


def without_broken(dataset: Dataset, config: Config, progress: Preparing) -> Dataset:
    """The data set without the images of training and validation that cannot be read, if `data.skip_broken` says so."""
    if not config.data.skip_broken:
        return dataset
    return data.readable(
        dataset,
        ("train", "validation"),
        cache=config.data.cache or None,
        workers=None if config.data.workers < 0 else config.data.workers,
        progress=partial(progress, "reading images"),
    )


def build(config: Config, run: Run, progress: Preparing, metric: MetricBuilder | None = None) -> TrainingSetup:
    """Check, read and build everything, in the order in which it can fail."""
    reuse_memory()
    torch.manual_seed(config.seed)
    everything = _as_begun(load_data(config), run, config)
    dataset = without_broken(everything, config, progress)
    part = dataset["train"]
    backbone = backbone_for(config, part).to(system.device())
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
    objective.to(system.device())
    _check_classes(config, dataset, part.labels)
    sampler = BalancedBatches(
        part.labels,
        config.train.batch_classes,
        config.train.batch_images,
        config.seed,
        distributed.rank(),
        distributed.world(),
    )
    return TrainingSetup(
        config,
        everything,
        dataset,
        backbone,
        objective,
        inputs,
        torch.from_numpy(part.labels),
        sampler,
        _validation(config, dataset, backbone, run, progress),
    )


def _as_begun(dataset: Dataset, run: Run, config: Config) -> Dataset:
    """The data set divided as it was when the run began; says in one line what differs."""
    if not run.exists or run.images is None:
        return dataset
    dataset, changes = as_recorded(dataset, run.images, config.data.root)
    lost, others = changes.lost(), changes.others()
    begun = f"The data set is not what it was when {run} began"
    if changes.gone_classes:
        raise DataError(f"{begun}: {', '.join(filter(None, [lost, others]))}. Put it back, or begin a new run.")
    if distributed.rank() == 0 and (lost or others):
        new = "; what is new is not used" if changes.added else ""
        warnings.warn(f"{begun}: {', '.join(filter(None, [lost, others]))}. The run goes on{new}.", stacklevel=2)
    return dataset


def _check_classes(config: Config, dataset: Dataset, labels: NDArray[np.int64]) -> None:
    if (classes := len(np.unique(labels))) < 2:
        raise DataError(
            f"Training needs at least 2 classes. Got {classes} in the training part of '{dataset.name}', "
            f"with data.test_share={config.data.test_share} and data.validation={config.data.validation} held out; "
            "set data.validation=0 or data.split=inside."
        )


def backbone_for(config: Config, part: Part) -> Backbone:
    """The backbone that a config names, frozen before `model.trainable_from`, ready to be trained."""
    settings = config.model
    if (part.width is not None) != (settings.backbone == "features"):
        raise ConfigError(
            "The backbone 'features' goes with pre-computed features and with nothing else. "
            f"Got the backbone '{settings.backbone}' with the data set '{config.data.name}'."
        )
    weights = Path(settings.weights) if settings.weights else None
    backbone = build_backbone(
        settings.backbone,
        pretrained=settings.pretrained,
        weights=weights,
        features=part.width,
        resolution=settings.resolution,
        pool=settings.pool,
    )
    backbone.seen_at(settings.test_resolution)  # an error where it cannot look at such pictures, before it is trained
    if backbone.body.frozen_norm:
        backbone = folded(backbone)  # statistics that never change are part of the convolution, and cheaper there
    if settings.trainable_from == EMBEDDING_ONLY:
        backbone.requires_grad_(False).train(False)
    else:
        backbone.freeze_before(settings.trainable_from or None)
    if settings.adapt == "lora":
        adapt(backbone, settings.lora_rank)
    return backbone


def network_and_inputs(
    config: Config,
    backbone: Backbone,
    part: Part,
    run: Run,
    progress: Preparing,
    training: bool = True,
) -> tuple[nn.Module, Inputs]:
    """What is trained, and the images of a part as they enter it: pixels, features, or maps of the frozen stages.

    Maps are computed once, for several augmented views of each image (for validation: one view, that of test time).
    """
    data, settings, stage = config.data, config.model, config.model.trainable_from
    images = inputs_for(
        part,
        backbone,
        cache=data.cache or None,
        workers=None if data.workers < 0 else data.workers,
        augment=data.augment if training else "none",
        progress=partial(progress, "reading images"),
    )
    if not settings.trunk_views or isinstance(images, FeatureRows):
        return backbone, images
    if not data.cache:
        begin(run)
    # Under torchrun every process comes here at once: the lock of the cache lets one compute while the others wait.
    # A barrier would give up after its timeout, and the maps of a large data set take longer.
    return frozen_maps(
        backbone,
        backbone.stages[-1] if stage == EMBEDDING_ONLY else stage,
        images,
        Path(data.cache) if data.cache else run.path,
        views=settings.trunk_views if training else 1,
        seed=config.seed if training else 0,
        precision=config.train.precision,
        progress=progress,
    )


def sizes(config: Config) -> tuple[int, ...]:
    """The size of each learner."""
    groups = config.model.groups
    return groups if isinstance(groups, tuple) else group_sizes(config.model.embedding, groups)


def _drawn_start(config: Config) -> Start:
    return "orthogonal" if config.model.start == "orthogonal" else "glorot"


def _validation(
    config: Config, dataset: Dataset, backbone: Backbone, run: Run, progress: Preparing
) -> Validation | None:
    if "validation" not in dataset.parts:
        return None
    dataset = with_fewer_validated(dataset)
    part, by_map = dataset["validation"], config.train.validate_by == "map" and dataset.protocol != "accuracy"
    others = distractors_of(dataset) if by_map else np.empty(0, np.int64)
    everything = _with_distractors(part, dataset["train"].select(others)) if len(others) else part
    _, inputs = network_and_inputs(config, backbone, everything, run, progress, training=False)
    return Validation(inputs, everything.labels, config.model.weighting, len(part), by_map, everything, progress)


def with_fewer_validated(dataset: Dataset) -> Dataset:
    """The data set with at most `MOST_VALIDATED` validation images, the same ones each time.

    Whole classes, at least two, drawn at random: only so is a query searched for among all images of its class. A
    classifier is measured on images spread over all classes, and so are two classes that are too many alone.
    """
    if "validation" not in dataset.parts or len(part := dataset["validation"]) <= MOST_VALIDATED:
        return dataset
    if dataset.protocol != "accuracy":
        classes, sizes = np.unique(part.labels, return_counts=True)
        order = np.random.default_rng(0).permutation(len(classes))
        count = max(2, int(np.searchsorted(np.cumsum(sizes[order]), MOST_VALIDATED, side="right")))
        part = part.select(np.isin(part.labels, classes[order[:count]]))
    if len(part) > MOST_VALIDATED:
        by_class = np.argsort(part.labels, kind="stable")
        part = part.select(np.sort(by_class[np.linspace(0, len(part) - 1, MOST_VALIDATED).round().astype(np.int64)]))
    return replace(dataset, parts={**dataset.parts, "validation": part})


def distractors_of(dataset: Dataset) -> NDArray[np.int64]:
    """The training images that validation queries are searched among, spread evenly; none where classes are many.

    A few classes are told apart by any network, and then every step looks alike. Training images of the query's own
    class would be matches: none are taken where the two parts share classes.
    """
    train, validation = dataset["train"], dataset["validation"]
    shared = set(train.classes) & set(validation.classes)
    if validation.present >= FEW_CLASSES or shared:
        return np.empty(0, np.int64)
    return np.linspace(0, len(train) - 1, min(len(train), MOST_DISTRACTORS)).round().astype(np.int64)


def _with_distractors(part: Part, distractors: Part) -> Part:
    """The images of both parts; each distractor is a class of its own, so that nothing is its match."""
    images, boxes = concatenated((part, distractors))
    numbers = len(part.classes) + np.arange(len(distractors), dtype=np.int64)
    names = (f"distractor {number}" for number in range(len(distractors)))
    return Part(images, np.concatenate([part.labels, numbers]), (*part.classes, *names), boxes)


def solve_start(setup: TrainingSetup, progress: Preparing) -> None:
    """The embedding layer before step 1, on features computed once: W solved for with a diversity loss, and the bias
    that centres the embedding, each where the config asks for it."""
    config, ensemble = setup.config, setup.objective.ensemble
    loss = diversity_loss(config, config.model.start, ensemble.groups)
    if loss is None and not config.model.bias:
        return
    generator = np.random.default_rng(config.seed)
    most = MOST_FEATURES if loss is not None else FEATURES_FOR_MEAN
    chosen = np.sort(generator.permutation(len(setup.inputs))[:most])
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
            progress=partial(progress, "solving for W"),
        )


def _features(setup: TrainingSetup, numbers: NDArray[np.int64], progress: Preparing) -> Tensor:
    """phi of one view of each image, by the pretrained network, on the device of the model."""
    objective = setup.objective.eval()
    inputs = inputs_in_order(setup.inputs, 64, numbers)
    follow = partial(progress, "features for the start")
    outputs = run_network(objective.features, inputs, setup.device, progress=follow, total=len(numbers))
    return torch.from_numpy(to_array(outputs)).to(objective.ensemble.weight)
