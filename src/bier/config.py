"""Every setting, its default and its check. A run's config.toml holds all of them and alone suffices to repeat it."""

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import tomli_w

from bier.errors import ConfigError

RECORDS = ("made_by", "split")  # sections that tell how a run came about and are not settings
MAY_BE_INFINITE = ("diversity.norm_weight",)


def setting(default: Any, about: str, *, least: float | None = None, most: float | None = None) -> Any:
    """A field with its default, what it is for, and the range in which it must lie."""
    return field(default=default, metadata={"about": about, "least": least, "most": most})


@dataclass(frozen=True)
class DataConfig:
    name: str = setting("glyphs", "the data set; see `bier data check --help`")
    root: str = setting("", "its folder or file")
    size: Literal["small", "medium", "large"] = setting("small", "the test set of vehicleid")
    seed: int = setting(0, "fixes how the data is divided, and the pixels of glyphs", least=0)
    split: Literal["classes", "inside"] = setting("classes", "test classes unseen in training, or a part of each class")
    test_share: float = setting(0.5, "share of the classes that are for testing", least=0, most=1)
    validation: float = setting(0.0, "share of the training classes held out to validate on", least=0, most=0.9)
    validation_order: Literal["random", "last"] = setting(
        "random", "which classes validation holds out: drawn at random, or the last ones, as a test split often does"
    )
    train_classes: int = setting(0, "train on so many classes only, spread evenly over all; 0 for all", least=0)
    train_images: int = setting(0, "train on so many images of each class only, spread evenly; 0 for all", least=0)
    augment: Literal["none", "paper", "shift", "strong"] = setting("paper", "random changes of training images")
    skip_broken: bool = setting(False, "leave out images that cannot be read")
    cache: str = setting("", "folder of the cache of prepared images; empty for none")
    workers: int = setting(-1, "processes that decode images; -1 chooses", least=-1)


@dataclass(frozen=True)
class ModelConfig:
    backbone: str = setting("efficientnet_lite0", "a name that bier or timm knows")
    weights: str = setting("", "file of pretrained weights; empty for those that come with the name")
    resolution: int = setting(0, "side of the pictures that the network sees; 0 for the backbone's own", least=0)
    pretrained: bool = setting(True, "start from pretrained weights where there are any")
    embedding: int = setting(512, "dimensions of the embedding", least=1)
    groups: int | tuple[int, ...] = setting(3, "number of learners, or the size of each as 96-160-256")
    start: Literal["glorot", "orthogonal", "activation", "adversarial"] = setting(
        "glorot", "the embedding layer before training: drawn, or solved for with a diversity loss"
    )
    bias: bool = setting(False, "a bias in the embedding layer, which starts by taking the features' mean away")
    weighting: Literal["alpha", "sqrt"] = setting("sqrt", "weights of the learners in the test-time vector")
    trainable_from: str = setting("", "first stage that is trained; empty for all, 'embedding' for the last layer only")
    trunk_views: int = setting(0, "augmented views of the frozen stages' maps to compute once; 0 for none", least=0)


@dataclass(frozen=True)
class LossConfig:
    name: Literal["binomial-deviance", "contrastive", "triplet", "cross-entropy"] = setting(
        "binomial-deviance", "the loss; cross-entropy is for classification"
    )
    boost: bool = setting(True, "weigh pairs for each learner by how wrong the ensemble so far is")
    boosting: Literal["eta", "shrinkage"] = setting(
        "eta", "how pairs are weighed: by the loss's derivative (Algorithm 1), or the authors' gentler form"
    )
    beta1: float = setting(2.0, "slope of binomial deviance")
    beta2: float = setting(0.5, "threshold of binomial deviance")
    cost: float = setting(10.0, "cost of negative pairs in binomial deviance; the paper's is 25")
    margin: float = setting(-1.0, "margin of contrastive or triplet loss; -1 for the paper's")
    dropout: float = setting(0.0, "dropout before the classifiers", least=0, most=0.95)


@dataclass(frozen=True)
class DiversityConfig:
    name: Literal["none", "activation", "adversarial"] = setting("none", "the auxiliary loss during training")
    weight: float = setting(1e-3, "lambda_div", least=0)
    norm_weight: float = setting(float("inf"), "lambda_w; inf holds the rows of W at length 1 exactly", least=0)
    reduction: Literal["sum", "mean"] = setting("mean", "sums as in the paper, or means as its authors ran it")
    hidden: int = setting(512, "size of the regressors' hidden layer", least=1)
    scale_features: bool = setting(True, "divide features by their root mean square before the diversity loss")
    through_backbone: bool = setting(False, "let the gradient of the diversity loss reach the backbone")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = setting(1000, "steps of training", least=1)
    batch_classes: int = setting(8, "classes in a batch", least=2)
    batch_images: int = setting(8, "images of each class in a batch", least=2)
    optimizer: Literal["adam", "sgd"] = setting("adam", "ADAM, or SGD with momentum 0.9")
    learning_rate: float = setting(3e-5, "of the backbone", least=0, most=1e6)
    embedding_factor: float = setting(10.0, "times the learning rate for the embedding layer", least=0, most=1e6)
    weight_decay: float = setting(2e-4, "decay of all weights", least=0)
    schedule: Literal["constant", "cosine"] = setting("constant", "the learning rate over time")
    warmup: int = setting(0, "steps over which the learning rate rises from 0", least=0)
    precision: Literal["auto", "float32", "bfloat16"] = setting("auto", "arithmetic of the backbone")
    log_every: int = setting(10, "steps between two lines of metrics.jsonl", least=1)
    checkpoint_every: int = setting(100, "steps between two checkpoints", least=1)
    keep_checkpoints: int = setting(2, "newest checkpoints that are kept", least=1)
    validate_every: int = setting(100, "steps between two measurements on validation classes", least=1)
    patience: int = setting(0, "validations without improvement before the run ends; 0 never ends early", least=0)


@dataclass(frozen=True)
class Config:
    """All settings of a run. Sections and keys are those of its config.toml."""

    seed: int = setting(0, "fixes batches, augmentation and initial weights", least=0)
    method: str = setting("a-bier", "the name under which the settings below were chosen")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    diversity: DiversityConfig = field(default_factory=DiversityConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        for key, value in self.flat().items():
            _check(key, value, _field(key).metadata, _hint(key))
        _check_together(self)

    def flat(self) -> dict[str, Any]:
        """Every setting under its dotted key, such as `train.steps`."""
        rows: dict[str, Any] = {}
        for top in fields(self):
            value = getattr(self, top.name)
            if is_dataclass(value):
                rows |= {f"{top.name}.{one.name}": getattr(value, one.name) for one in fields(value)}
            else:
                rows[top.name] = value
        return rows

    def with_settings(self, settings: Mapping[str, Any]) -> "Config":
        """The config with these dotted keys changed. An unknown key is an error that suggests the nearest one."""
        sections: dict[str, dict[str, Any]] = {}
        top: dict[str, Any] = {}
        for key, value in settings.items():
            if key not in self.flat():
                raise ConfigError(_unknown(key, self.flat()))
            section, _, name = key.rpartition(".")
            (sections.setdefault(section, {}) if section else top)[name] = _cast(value, _hint(key))
        changed = {name: replace(getattr(self, name), **values) for name, values in sections.items()}
        return replace(self, **changed, **top)

    @property
    def sizes(self) -> int | tuple[int, ...]:
        """`model.groups` as it was given."""
        return self.model.groups

    def to_toml(self, records: Mapping[str, Mapping[str, Any]] | None = None) -> str:
        return tomli_w.dumps({**asdict(self), **(records or {})})

    @classmethod
    def from_toml(cls, path: Path) -> "Config":
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"There is no config at {path}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.") from None
        except OSError as error:
            raise ConfigError(f"Cannot read the config {path}: {error.strerror}.") from None
        flat: dict[str, Any] = {}
        for name, value in content.items():
            if isinstance(value, dict) and name not in RECORDS:
                flat |= {f"{name}.{key}": one for key, one in value.items()}
            elif name not in RECORDS:
                flat[name] = value
        return cls().with_settings(flat)

    def differing(self, other: "Config") -> list[str]:
        """Keys whose values differ, as `key: this / other`."""
        mine, theirs = self.flat(), other.flat()
        return [f"{key}: {mine[key]!r} / {theirs[key]!r}" for key in mine if mine[key] != theirs[key]]


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """`section.key=value` strings, the values read as TOML where they can be, else as plain text."""
    settings = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"A setting must look like section.key=value. Got {pair!r} instead.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        # TOML takes sizes like 1000-12-10 for a day
        settings[key.strip()] = value if isinstance(value, bool | int | float | str | list) else text.strip()
    return settings


@cache
def _field(key: str) -> Any:
    owner: Any = Config
    *sections, name = key.split(".")
    for section in sections:
        owner = get_type_hints(owner)[section]
    return next(one for one in fields(owner) if one.name == name)


@cache
def _hint(key: str) -> Any:
    owner: Any = Config
    *sections, name = key.split(".")
    for section in sections:
        owner = get_type_hints(owner)[section]
    return get_type_hints(owner)[name]


def _cast(value: Any, hint: Any) -> Any:
    """What TOML or the command line cannot say exactly: whole numbers for floats, lists for tuples, 96-160-256."""
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if tuple[int, ...] in get_args(hint):
        if isinstance(value, str) and all(part.isdigit() for part in value.split("-")):
            value = [int(part) for part in value.split("-")]
        if isinstance(value, list):
            return tuple(value)
    return value


def _check(key: str, value: Any, limits: Mapping[str, Any], hint: Any) -> None:
    choices = get_args(hint) if getattr(hint, "__origin__", None) is Literal else ()
    if choices:
        if value not in choices:
            raise ConfigError(f"The setting '{key}' must be one of {', '.join(choices)}. Got {value!r} instead.")
        return
    if tuple[int, ...] in get_args(hint):
        sizes = value if isinstance(value, tuple) else (value,)
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError(
                f"The setting '{key}' must be a number of groups or sizes like 96-160-256. Got {value!r}."
            )
        return
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(f"The setting '{key}' must be {names[hint]}. Got {value!r} instead.")
    if hint in (int, float):
        _check_range(key, value, limits)


def _check_range(key: str, value: float, limits: Mapping[str, Any]) -> None:
    least, most = limits.get("least"), limits.get("most")
    if math.isnan(value) or (math.isinf(value) and key not in MAY_BE_INFINITE):
        raise ConfigError(f"The setting '{key}' must be a finite number. Got {value!r} instead.")
    if least is not None and value < least:
        raise ConfigError(f"The setting '{key}' must be at least {least}. Got {value!r} instead.")
    if most is not None and value > most:
        raise ConfigError(f"The setting '{key}' must be at most {most}. Got {value!r} instead.")


def _check_together(config: Config) -> None:
    groups = config.model.groups
    count = len(groups) if isinstance(groups, tuple) else groups
    if isinstance(groups, tuple) and sum(groups) != config.model.embedding:
        raise ConfigError(
            f"The sizes in 'model.groups' must add up to 'model.embedding' = {config.model.embedding}. "
            f"Got {'-'.join(map(str, groups))} = {sum(groups)} instead."
        )
    if count > config.model.embedding:
        raise ConfigError(f"'model.embedding' = {config.model.embedding} cannot be cut into {count} groups.")
    if config.diversity.name != "none" and count < 2:
        raise ConfigError("A diversity loss needs at least 2 groups; set model.groups=3 or diversity.name=none.")
    if config.model.start in ("activation", "adversarial") and count < 2:
        raise ConfigError("A solved start of the embedding layer needs at least 2 groups; set model.start=glorot.")
    if config.loss.boosting == "shrinkage" and config.loss.name != "binomial-deviance":
        raise ConfigError(
            f"'loss.boosting' = shrinkage goes with loss.name=binomial-deviance. Got '{config.loss.name}' instead."
        )
    if config.model.trunk_views and not config.model.trainable_from:
        raise ConfigError("'model.trunk_views' caches what 'model.trainable_from' freezes; set that stage too.")
    if config.train.warmup > config.train.steps:
        raise ConfigError(
            f"'train.warmup' = {config.train.warmup} is longer than 'train.steps' = {config.train.steps}."
        )


def _unknown(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f"There is no setting '{key}'." + (f" Did you mean '{near[0]}'?" if near else "")
