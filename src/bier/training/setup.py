"""From a config to what is trained: data, backbone, embedding, losses, batches."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bier import data, distributed
from bier.config import LOSSES, Config
from bier.data import Dataset, Part
from bier.data.recorded import as_recorded
from bier.data.records import concatenated
from bier.data.sampler import BalancedBatches
from bier.errors import ConfigError, DataError
from bier.evaluate.dataset import accuracies
from bier.evaluate.recall import rank_r, ranks, recall_from_ranks
from bier.images import Broken, ImageDataset
from bier.memory import reuse_memory
from bier.method.classifier import BoostedClassifier
from bier.method.defaults import Start, Weighting
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.equations import group_sizes, unit_rows
from bier.method.initialise import initialise
from bier.models.backbone import Backbone, folded, resolve_precision
from bier.models.backbones import build_backbone
from bier.models.inference import FeatureRows, Inputs, Progress, inputs_in_order, run_network, to_array
from bier.models.lora import adapt, merged
from bier.models.maps import TrunkCache, fingerprint_of, gigabytes, is_complete
from bier.models.model import Model, starting_point
from bier.runs import Run
from bier.training.objective import Objective, diversity_loss, metric_loss


def inputs_for(
    part: Part, backbone: Backbone, config: Config, progress: Progress | None = None, training: bool = True
) -> ImageDataset | FeatureRows:
    """The images of a part as the backbone takes them: augmented for training, else as they are at test time."""
    if part.width is not None:
        return FeatureRows(np.asarray(part.images))
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

    @property
    def distractors(self) -> int:
        return len(self.labels) - self.count

    @torch.no_grad()
    def measure(self, objective: Objective) -> Scores:
        """The model as it is now."""
        z = self._run(objective, objective.embed)
        labels = torch.from_numpy(self.labels[self.inputs.kept])
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
        return self._scores(unit_rows(features.cpu()), torch.from_numpy(self.labels[self.inputs.kept]))

    def _run(self, objective: Objective, network: Callable[[Tensor], Tensor]) -> Tensor:
        objective.eval()
        device = objective.ensemble.weight.device
        inputs = inputs_in_order(self.inputs, self.inputs.kept, VALIDATION_BATCH)
        rows = torch.from_numpy(to_array(run_network(network, inputs, device))).to(device)
        objective.train()
        return rows

    def _scores(self, vectors: Tensor, labels: Tensor) -> Scores:
        recall = self._recall(vectors, labels)
        if not self.by_map:
            return Scores(recall)
        # Distractors have no match and add nothing to the sum: only the number of queries is to be corrected.
        return Scores(recall, rank_r(vectors, labels).map_at_r * len(labels) / self._queries)

    def _recall(self, vectors: Tensor, labels: Tensor) -> float:
        return recall_from_ranks(ranks(vectors, labels)[: self._queries], [1])[1]

    @property
    def _queries(self) -> int:
        return int(np.searchsorted(self.inputs.kept, self.count))


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

    @property
    def skipped(self) -> tuple[Broken, ...]:
        """The images that `data.skip_broken` has left out, each once."""
        inputs = [self.inputs, *([self.validation.inputs] if self.validation else [])]
        images = [one.source if isinstance(one, TrunkCache) else one for one in inputs]
        broken = (one for some in images if isinstance(some, ImageDataset) for one in some.broken)
        return tuple({one.path: one for one in broken}.values())

    def model(self, found: Mapping[str, Any] | None = None) -> Model:
        """The backbone and the embedding with their present weights, without anything that only training needs.

        found: what validation has found, kept with the model.
        """
        config = self.config
        metadata = {"data": config.data.name, "method": config.method, "seed": config.seed, **(found or {})}
        backbone = merged(self.backbone)
        return Model(backbone, self.objective.ensemble, config.model.weighting, config.train.precision, metadata)

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


def build(config: Config, run: Path, progress: Preparing, metric: MetricBuilder | None = None) -> TrainingSetup:
    """Check, read and build everything, in the order in which it can fail."""
    reuse_memory()
    torch.manual_seed(config.seed)
    dataset = _as_begun(load_data(config), Run(run), config)
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
    run: Path,
    progress: Preparing,
    training: bool = True,
) -> tuple[nn.Module, Inputs]:
    """What is trained, and the images of a part as they enter it: pixels, features, or maps of the frozen stages.

    Maps are computed once, for several augmented views of each image (for validation: one view, that of test time).
    """
    settings, stage = config.model, config.model.trainable_from
    images = inputs_for(part, backbone, config, partial(progress, "reading images"), training)
    if not settings.trunk_views or not isinstance(images, ImageDataset):
        return backbone, images
    stage = backbone.stages[-1] if stage == EMBEDDING_ONLY else stage
    home = Path(config.data.cache) if config.data.cache else run
    # Under torchrun every process comes here at once: the lock of the cache lets one compute while the others wait.
    # A barrier would give up after its timeout, and the maps of a large data set take longer.
    maps = _frozen_maps(config, backbone, stage, images, home, progress, training)
    return backbone.split(stage)[1], maps


def _frozen_maps(
    config: Config,
    backbone: Backbone,
    stage: str,
    images: ImageDataset,
    home: Path,
    progress: Preparing,
    training: bool,
) -> TrunkCache:
    """The maps before `stage`: those that are there, or computed from earlier ones that are there, or from pixels.

    A folder is named after what its maps depend on. The views of training images follow the seed of the run.
    """
    views, seed = (config.model.trunk_views, config.seed) if training else (1, 0)
    settings = {"crop": images.crop, "augment": images.augment, "views": views, "seed": seed}

    def folder(trunk: nn.Module) -> Path:
        return home / f"trunk-{fingerprint_of(trunk, images, **settings)[:12]}"  # type: ignore[arg-type]

    precision, rows = config.train.precision, views * len(images.kept)
    trunk, _ = backbone.split(stage)
    there, earlier = folder(trunk), None
    if not is_complete(there, rows) and resolve_precision(precision, distributed.device()) is torch.bfloat16:
        for name in reversed(backbone.stages[1 : backbone.stages.index(stage)]):
            first, following = backbone.split(name)
            if is_complete(before := folder(first), rows):
                between = following.part(0, backbone.stages.index(stage) - backbone.stages.index(name))  # type: ignore[operator]
                earlier = TrunkCache(first, images, before, **settings), between  # type: ignore[arg-type]
                break
    title = f"maps of the frozen stages, {gigabytes(trunk, images.crop, rows):.1f} GB"
    return TrunkCache(
        trunk,
        images,
        there,
        **settings,  # type: ignore[arg-type]
        precision=precision,
        earlier=earlier,
        progress=partial(progress, title),
    )


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
    part, by_map = dataset["validation"], config.train.validate_by == "map" and dataset.protocol != "accuracy"
    others = distractors_of(dataset) if by_map else np.empty(0, np.int64)
    everything = _with_distractors(part, dataset["train"].select(others)) if len(others) else part
    _, inputs = network_and_inputs(config, backbone, everything, run, progress, training=False)
    return Validation(inputs, everything.labels, config.model.weighting, len(part), by_map)


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
            progress=partial(progress, "solving for W"),
        )


def _features(setup: TrainingSetup, numbers: NDArray[np.int64], progress: Preparing) -> Tensor:
    """phi of one view of each image, by the pretrained network, on the device of the model."""
    objective = setup.objective.eval()
    inputs = inputs_in_order(setup.inputs, numbers, 64)
    follow = partial(progress, "features for the start")
    outputs = run_network(objective.features, inputs, setup.device, progress=follow, total=len(numbers))
    return torch.from_numpy(to_array(outputs)).to(objective.ensemble.weight)
