"""Evaluation of a trained model on a data set, by the protocol of the data set."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from bier import distributed, files
from bier.config import Config, DataConfig
from bier.data import Dataset
from bier.data.recorded import Changes, as_recorded
from bier.data.records import ALL, Part
from bier.errors import ConfigError, DataError, ModelError
from bier.evaluate.ensemble import EnsembleResult, evaluate_ensemble
from bier.evaluate.thresholds import LEAST_CLASSES, Gallery, kept_threshold, model_thresholds, no_threshold
from bier.images import Broken, ImageDataset
from bier.method import equations
from bier.method.classifier import BoostedClassifier
from bier.models.embed import FeatureRows, Images, inputs_for, inputs_in_order, run_network, to_array
from bier.models.maps import frozen_maps
from bier.models.model import Model, Untrained, starting_point
from bier.runs import Run

BATCH = 128
QUERY_GALLERY = "query and gallery"
SAME_IMAGES = 1_000  # queries, and as many others, with which the threshold of a model is found
SAME_CLASSES = 200  # that the queries are spread over
OWN_DATA = ("folder", "table", "features")
NEW = "new"  # the part of the classes that have joined a run's data since it was trained
REPEATS = 10  # random galleries of VehicleID's protocol, by convention
Progress = Callable[[int, int], None]
ImageOf = Callable[[int], NDArray[np.uint8]]


@dataclass(frozen=True)
class Measured:
    """Which images the numbers of an evaluation are about."""

    data: str
    part: str
    classes: int
    images: int
    root: str = ""
    look: str = ""  # of the model at a picture

    def __str__(self) -> str:
        part = {ALL: "whole", QUERY_GALLERY: QUERY_GALLERY}.get(self.part, f"{self.part} part")
        name = f"{self.data} {self.root}" if self.root else self.data
        look = f", each at {self.look}" if self.look else ""
        return f"{name}, {part}: {self.images:,} images of {self.classes:,} classes{look}"

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("root", "look") or value}


class StartingPoint(NamedTuple):
    """The backbone that a run started from, with its features normalised, measured on the same images."""

    backbone: str
    result: EnsembleResult


@dataclass(frozen=True)
class Assessment:
    """The result of an evaluation and what was measured.

    `images` gives the pixels of a query by its row, `gallery_images` those of the gallery. `untrained` is what training
    had to beat.
    """

    result: EnsembleResult
    measured: Measured
    images: ImageOf | None
    gallery_images: ImageOf | None
    broken: list[Broken]  # images that could not be read
    kept: dict[str, Any] | None = None  # what the model keeps about "same", see `find_same`
    untrained: StartingPoint | None = None
    new: "Assessment | None" = None  # of classes that have joined the data since training
    classes: tuple[str, ...] = ()  # the names of the measured classes, in the order of their numbers
    gone: tuple[str, ...] = ()  # classes that the run has recorded and the data set has no more

    def to_dict(self) -> dict[str, Any]:
        found = {**self.result.to_dict(), "measured": self.measured.to_dict()}
        if "same" in found and self.kept is not None:
            found["same"]["kept"] = self.kept
        if self.untrained is not None:
            plain = self.untrained.result.to_dict()
            found["recall"] |= {"untrained": plain["recall"]["ensemble"]}
            found["untrained"] = {"backbone": self.untrained.backbone, "map_at_r": plain["map_at_r"]}
        if self.new is not None:
            new = self.new.to_dict()
            names = ("recall", "map_at_r", "measured")
            found["new_classes"] = {"names": list(self.new.classes), **{name: new[name] for name in names}}
        if self.gone:
            found["gone_classes"] = list(self.gone)
        return found | ({"skipped": [one.named() for one in self.broken]} if self.broken else {})


def data_settings(
    run: Path | Untrained, data: str | None = None, root: Path | str | None = None, size: str | None = None
) -> tuple[DataConfig, bool]:
    """The settings of the data set that a run is measured on, and whether it is the one that it was trained on.

    Without `data` it is the data set of the run, at `root` if the images have moved. A user's own data that the run was
    trained on keeps the division of the run when it is named again. `size` chooses another test set of vehicleid.
    """
    settings, own = _named_settings(run, data, root)
    if size is None:
        return settings, own
    if settings.name != "vehicleid":
        raise ConfigError(f"--size chooses a test set of vehicleid. The data here is {settings.name}.")
    return Config(data=settings).with_settings({"data.size": size}).data, own


def as_trained(run: Path, dataset: Dataset, settings: DataConfig) -> tuple[Dataset, Changes]:
    """A user's own data divided as the run has recorded it, whatever has joined the folder since, and what differs.

    Classes that are new since are the part `NEW`. A run without a record divides the data anew.
    """
    images = Run(run).images
    if images is None or settings.name not in OWN_DATA:
        return dataset, Changes()
    dataset, changes = as_recorded(dataset, images, settings.root)
    if changes.new_images is not None:
        dataset = replace(dataset, parts={**dataset.parts, NEW: changes.new_images})
    return dataset, changes


def _named_settings(run: Path | Untrained, data: str | None, root: Path | str | None) -> tuple[DataConfig, bool]:
    config = None
    if isinstance(run, Path) and (run / "config.toml").is_file():
        config = Config.from_toml(run / "config.toml")
    if data is not None and (config is None or not _same_data(config.data, data, root)):
        named = {"data.name": data, "data.root": str(root or "")}
        return Config().with_settings(named).data, False
    if config is None:
        raise ConfigError(f"{run} is a model without a run's config.toml; name a data set with --data.")
    return (config if root is None else config.with_settings({"data.root": str(root)})).data, True


def _same_data(trained_on: DataConfig, data: str, root: Path | str | None) -> bool:
    """Whether `data` and `root` name a user's own data that the run was trained on and has divided."""
    if trained_on.name != data or data not in OWN_DATA or root is None:
        return False
    first, second = files.place_of(trained_on.root), files.place_of(root)
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return first.expanduser().resolve() == second.expanduser().resolve()


def assess(
    model: Model,
    dataset: Dataset,
    *,
    part: str | None = None,
    cache: Path | None = None,
    frozen_before: str = "",
    workers: int | None = None,
    progress: Progress | None = None,
    keep: Path | None = None,
) -> Assessment:
    """Embed the test images and measure recall, correlation and the rest.

    part: measure this part instead of the test part, each image against the others: "validation" to tune on, "all" for
    the images of all parts. Without it the protocol of the data set is followed.
    frozen_before: the first stage that was trained; the maps that enter it are kept in `cache`, in bfloat16 as training
    has them, for the next model with the same frozen stages.
    keep: a folder where the embeddings of this model are kept; those of the same images are read from there.
    Under torchrun all processes call this; each embeds and compares its share, and all of them get the result.
    """
    reader = _Reader(model, cache, workers, progress, frozen_before, keep)
    kept, threshold = model.metadata.get("same"), kept_threshold(model.metadata)
    if part is None and dataset.protocol == "query-gallery":
        test, gallery = reader.read(dataset, "query"), reader.read(dataset, "gallery")
        name, labels = QUERY_GALLERY, np.concatenate([test.labels, gallery.labels])
    else:
        test, gallery = reader.read(dataset, part or "test"), None
        name, labels = part or "test", test.labels
    result = evaluate_ensemble(
        test.z,
        model.groups,
        test.labels,
        dataset.ks,
        gallery=None if gallery is None else gallery.z,
        gallery_labels=None if gallery is None else gallery.labels,
        repeats=REPEATS if part is None and dataset.protocol == "repeated-gallery" else None,
        weighting=model.weighting,
        threshold=threshold,
    )
    measured = Measured(dataset.name, name, len(np.unique(labels)), len(labels))
    part_names = dataset[part or ("test" if gallery is None else "query")].classes
    return Assessment(
        result,
        measured,
        test.image,
        None if gallery is None else gallery.image,
        list(dataset.broken),
        kept,
        classes=tuple(part_names[label] for label in np.unique(labels)),
    )


def find_same(model: Model, dataset: Dataset, *, workers: int | None = None) -> dict[str, Any] | None:
    """The similarity from which two images count as the same, as `model_thresholds` describes it, to keep in a model.

    Queries are up to 1,000 validation images, spread over up to `SAME_CLASSES` classes. They are searched among each
    other and up to 1,000 others of the training and validation parts, drawn at random and counted for as many as there
    are; those that cannot be read are left out. Without enough validation classes there is no threshold, and nothing is
    embedded: training classes lie further apart than others. None for a classifier.
    """
    if dataset.protocol == "accuracy":
        return None
    if "validation" not in dataset.parts or dataset["validation"].present < LEAST_CLASSES:
        name = "validation" if "validation" in dataset.parts else "train"
        return no_threshold(model.groups, name, dataset[name].present if name == "validation" else 0)
    generator = np.random.default_rng(0)
    validation, train = dataset["validation"], dataset["train"]
    chosen = _spread_over_classes(validation.labels, generator)
    rest = [validation.select(~chosen), train]
    weight = max(1, -(-sum(map(len, rest)) // SAME_IMAGES))
    drawn = [part.select(np.sort(generator.permutation(len(part))[: len(part) // weight])) for part in rest]

    broken: list[Broken] = []

    def embedded(part: Part) -> tuple[NDArray[np.float32], NDArray[np.str_]]:
        part, unreadable = part.readable(workers=workers)
        broken.extend(unreadable)
        names = np.array(part.classes)[part.labels]
        return model.embed_raw(inputs_for(part, model.backbone, workers=workers)), names

    found = [embedded(part) for part in drawn if len(part)]
    others = None
    if found:
        others = Gallery(np.concatenate([z for z, _ in found]), np.concatenate([names for _, names in found]), weight)
    queries, labels = embedded(validation.select(chosen))
    if broken:
        warnings.warn(
            f"The match threshold leaves out {len(broken)} image{'s' * (len(broken) > 1)} that cannot be read. "
            f"The first: {broken[0].reason}",
            stacklevel=2,
        )
    return model_thresholds(queries, labels, others, model.groups, model.weighting, part="validation")


def _spread_over_classes(labels: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.bool_]:
    """Up to `SAME_IMAGES` images: equally many of each of up to `SAME_CLASSES` classes, drawn at random."""
    classes = generator.permutation(np.unique(labels))[:SAME_CLASSES]
    each, chosen = SAME_IMAGES // len(classes), np.zeros(len(labels), bool)
    for label in classes:
        chosen[generator.permutation(np.flatnonzero(labels == label))[:each]] = True
    return chosen


def assess_untrained(
    run: Path,
    dataset: Dataset,
    *,
    part: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    fast: bool = False,
) -> StartingPoint | None:
    """Measure the backbone that a run started from, as `assess` measures the run. Its vectors are kept in the run.

    fast: with one look at each picture, as the run was measured.

    None for a network trained from scratch, and for a model without a run's config.toml.
    """
    if not (run / "config.toml").is_file():
        return None
    config = Config.from_toml(run / "config.toml")
    width = next(iter(dataset.parts.values())).width
    model = starting_point(config.model, width, config.train.precision)
    if model is None or (width is not None) != (config.model.backbone == "features"):
        return None
    model = model.fast() if fast else model
    found = assess(model, dataset, part=part, cache=cache, progress=progress, keep=run / "untrained")
    return StartingPoint(config.model.backbone, found.result)


def classifier_file(model: Path) -> Path:
    """The file with the classifier of a model folder: `classifier.safetensors` for `model`, and so on for snapshots."""
    return model.with_name(f"{model.name.replace('model', 'classifier', 1)}.safetensors")


def assess_classifier(
    run: Path, model: Model, dataset: Dataset, part: str = "test", progress: Progress | None = None
) -> dict[str, Any]:
    """Accuracy of the ensemble, of each learner and of each prefix on a part of a classification data set."""
    file = classifier_file(run / "model" if (run / "model").is_dir() else run)
    if not file.is_file():
        raise ModelError(f"{run} was not trained to classify: it has no {file.name}.")
    try:
        weights = {name: torch.from_numpy(value) for name, value in files.read_tensors(file)[0].items()}
        classifier = BoostedClassifier(model.groups, len(weights["heads.0.bias"]))
        classifier.load_state_dict(weights)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"The classifier {file} is damaged: {' '.join(str(error).split())[:300]}.") from error
    embedded = _Reader(model, None, None, progress).read(dataset, part)
    found = accuracies(classifier, torch.from_numpy(embedded.z), torch.from_numpy(embedded.labels))
    measured = Measured(dataset.name, part, len(np.unique(embedded.labels)), len(embedded.z))
    return {"accuracy": found, "images": len(embedded.z), "measured": measured.to_dict()}


@dataclass(frozen=True)
class _Embedded:
    z: NDArray[np.float32]
    labels: NDArray[np.int64]
    image: ImageOf | None


class _Reader:
    """Embeds parts of a data set with one model, and records which images could not be read."""

    def __init__(
        self,
        model: Model,
        cache: Path | None,
        workers: int | None,
        progress: Progress | None,
        frozen_before: str = "",
        keep: Path | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.workers, self.progress, self.frozen_before, self.keep = workers, progress, frozen_before, keep

    def read(self, dataset: Dataset, name: str) -> _Embedded:
        part = dataset[name]
        if not len(part):  # all of them are gone since the run recorded them
            raise DataError(f"The part '{name}' of the data must have images to measure. None of them is left.")
        source = inputs_for(part, self.model.backbone, cache=self.cache, workers=self.workers)
        if isinstance(source, FeatureRows):
            return _Embedded(self.model.embed_raw(source, progress=self.progress), part.labels, None)
        return _Embedded(self._embed(source), part.labels, source.prepared)

    def _embed(self, source: ImageDataset) -> NDArray[np.float32]:
        if distributed.world() > 1:
            everything = np.arange(len(source))
            return distributed.sharded(everything, lambda rows: self._embed_rows(Subset(source, rows.tolist())))
        if self.keep is not None:
            return self._kept(source, self.keep)
        if not self.frozen_before or self.cache is None or self.model.mirror:
            return self._embed_rows(source)
        rest, maps = frozen_maps(
            self.model.backbone, self.frozen_before, source, self.cache, progress=self._follow_maps
        )
        outputs = run_network(self.model.embedding_of(rest), inputs_in_order(maps, BATCH), self.model.device)
        return to_array(outputs, self.model.dimension)

    def _embed_rows(self, images: Images) -> NDArray[np.float32]:
        return self.model.embed_raw(images, progress=self.progress)

    def _follow_maps(self, _: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def _kept(self, source: ImageDataset, folder: Path) -> NDArray[np.float32]:
        """The embeddings in a file of this model and these images, which is written where there is none."""
        file = folder / f"{self._digest(source)}.safetensors"
        try:
            z: NDArray[np.float32] = files.read_tensors(file, ["z"])[0]["z"]
            return z
        except (OSError, ValueError):
            z = self._embed_rows(source)
        with suppress(OSError):  # somebody else's run, or a full disk: the next evaluation computes them again
            folder.mkdir(exist_ok=True)
            files.write_tensors(file, {"z": z})
        return z

    def _digest(self, source: ImageDataset) -> str:
        def about() -> Iterator[bytes]:
            seen = (self.model.backbone.name, self.model.backbone.crop, self.model.precision, source.size)
            yield f"{seen}{' mirrored' * self.model.mirror}".encode()
            for tensor in self.model.state_dict().values():
                yield tensor.detach().cpu().float().numpy().tobytes()

        return files.digest_of(source.images, source.boxes, about())[:16]


@torch.no_grad()
def accuracies(classifier: BoostedClassifier, z: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy in percent of the ensemble, of each learner and of each prefix (the first m learners)."""
    classifier.eval()
    logits = torch.stack(classifier.learner_logits(z))  # (M, N, classes)
    rows = {"ensemble": equations.ensemble_score(logits)}
    rows |= {f"learner-{m}": one for m, one in enumerate(logits, start=1)}
    rows |= {f"prefix-{m}": equations.ensemble_score(logits[:m]) for m in range(2, len(logits) + 1)}
    return {name: 100 * float((scores.argmax(dim=1) == labels).double().mean()) for name, scores in rows.items()}
