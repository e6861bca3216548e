"""Every setting, its default, range and meaning. A run's config.toml holds all of them and alone suffices to repeat it.

The settings are frozen pydantic models, which check types, choices and ranges. What is added here: one line per error,
in the words of a user (`_explained`), the nearest name for an unknown key, and dotted keys such as `train.steps`.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from bier import files
from bier.errors import ConfigError, did_you_mean
from bier.method import defaults

LARGEST_FILE = 2**22  # bytes
MOST_DOTS = 1_000  # of a key
RECORDS = ("made_by", "split", "choice")  # sections that describe how a run was made and are not settings
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# Ours; all others are the library's.
LOSSES = ("binomial-deviance", "contrastive", "triplet", "multi-similarity", "cross-entropy")
LIMITS = (("at least", "ge"), ("at most", "le"))
GROUPS = "a number of groups or sizes like 96-160-256"
LARGEST = 2**63 - 1  # TOML's largest whole number, and torch's largest seed
WIDEST, LARGEST_BATCH, LARGEST_PICTURE, MOST_WORKERS = 2**16, 2**16, 8192, 1024  # memory runs out beyond these
LOSS = f"one of {', '.join(LOSSES)}, or the name of a loss class of pytorch-metric-learning"
TABLE = "a table such as {alpha=2, base=0.5}"


def setting(
    default: Any,
    about: str,
    *,
    least: float | None = None,
    most: float | None = None,
    infinite: bool | None = None,
) -> Any:
    """A field with its default, what it is for, and the range in which it must lie."""
    return Field(default, description=about, ge=least, le=most, allow_inf_nan=infinite)


def _group_sizes(value: Any) -> Any:
    """A number of groups, or their sizes as a list or as 96-160-256."""
    if isinstance(value, str) and all(part.isdecimal() for part in value.split("-")):
        value = [int(part) for part in value.split("-")]
    value = tuple(value) if isinstance(value, list) else value
    sizes = value if isinstance(value, tuple) else (value,)
    if not sizes or any(type(size) is not int or not 1 <= size <= WIDEST for size in sizes):
        raise ValueError
    return value


def _loss_name(value: Any) -> Any:
    """One of ours, or what looks like the name of a class. Whether there is such a class, the library knows."""
    if value in LOSSES or (isinstance(value, str) and value.isidentifier() and value[0].isupper()):
        return value
    raise ValueError


Groups = Annotated[int | tuple[int, ...], BeforeValidator(_group_sizes)]
LossName = Annotated[str, BeforeValidator(_loss_name)]
Table = dict[str, bool | int | float | str]


class Section(BaseModel):
    """Settings that stand together under one name. Made by hand or from a file, they are checked in the same way."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    section: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explained(type(self), error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        """Whole numbers that a TOML file can hold."""
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError
        return value


class DataConfig(Section):
    section = "data"
    name: str = setting("glyphs", "the data set; see `bier data check --help`")
    root: str = setting("", "its folder or file")
    size: Literal["small", "medium", "large"] = setting("small", "the test set of vehicleid")
    seed: int = setting(0, "fixes how the data is divided, and the pixels of glyphs", least=0)
    split: Literal["classes", "inside"] = setting("classes", "test classes unseen in training, or a part of each class")
    test_share: float = setting(0.5, "share of the classes that are for testing", least=0.01, most=0.99)
    validation: float = setting(0.0, "share of the training classes held out to validate on", least=0, most=0.9)
    validation_classes: int = setting(
        0,
        "hold out at least this many classes, or a quarter of them where there are fewer than four times as many; "
        "0 for the share alone",
        least=0,
    )
    validation_order: Literal["random", "last"] = setting(
        "random", "which classes validation holds out: drawn at random, or the last ones, as a test split often does"
    )
    train_classes: int = setting(0, "train on so many classes only, spread evenly over all; 0 for all", least=0)
    train_images: int = setting(0, "train on so many images of each class only, spread evenly; 0 for all", least=0)
    augment: Literal["none", "paper", "shift", "strong"] = setting("paper", "random changes of training images")
    skip_broken: bool = setting(False, "leave out images that cannot be read")
    cache: str = setting("", "folder of the cache of prepared images; empty for none")
    workers: int = setting(-1, "processes that decode images; -1 chooses", least=-1, most=MOST_WORKERS)


class ModelConfig(Section):
    section = "model"
    backbone: str = setting("efficientnet_lite0", "a name that bier or timm knows")
    weights: str = setting("", "file of pretrained weights; empty for those that come with the name")
    resolution: int = setting(
        0, "side of the pictures in training; 0 for the backbone's own", least=0, most=LARGEST_PICTURE
    )
    test_resolution: int = setting(
        0, "side of the pictures when they are encoded; 0 for that of training", least=0, most=LARGEST_PICTURE
    )
    mirror: bool = setting(False, "encode a picture and its mirror image, and take the mean")
    pool: Literal["", "token", "avg", "max", "avgmax"] = setting(
        "", "how maps or tokens become features, 'token' for the class token; empty for the backbone's own way"
    )
    pretrained: bool = setting(True, "start from pretrained weights where there are any")
    embedding: int = setting(512, "dimensions of the embedding", least=1, most=WIDEST)
    groups: Groups = setting(3, "number of learners, or the size of each as 96-160-256")
    start: Literal["glorot", "orthogonal", "activation", "adversarial"] = setting(
        defaults.START, "the embedding layer before training: drawn, or solved for with a diversity loss"
    )
    bias: bool = setting(defaults.BIAS, "a bias in the embedding layer, which starts by taking the features' mean away")
    weighting: Literal["alpha", "sqrt"] = setting(defaults.WEIGHTING, "weights of the learners in the test-time vector")
    trainable_from: str = setting("", "first stage that is trained; empty for all, 'embedding' for the last layer only")
    adapt: Literal["none", "lora"] = setting(
        "none", "train small matrices beside the attention layers instead of the backbone's own weights"
    )
    lora_rank: int = setting(8, "rank of these matrices", least=1)
    trunk_views: int = setting(0, "augmented views of the frozen stages' maps to compute once; 0 for none", least=0)


class LossConfig(Section):
    section = "loss"
    name: LossName = setting(
        "binomial-deviance",
        "the loss, ours or a class of pytorch-metric-learning such as MultiSimilarityLoss; cross-entropy is for "
        "classification",
    )
    settings: Table = setting(
        {}, "arguments of multi-similarity or of a loss of pytorch-metric-learning; a distance or reducer by its name"
    )
    miner: str = setting("", "a miner of pytorch-metric-learning, such as DistanceWeightedMiner, for one of its losses")
    miner_settings: Table = setting({}, "arguments of the miner")
    boost: bool = setting(defaults.BOOST, "weight pairs for each learner by how wrong the ensemble so far is")
    boosting: Literal["eta", "shrinkage", "gradient"] = setting(
        defaults.BOOSTING,
        "weight pairs by the loss's derivative (Algorithm 1) or in the authors' gentler form, or train each learner "
        "with the gradient of the loss at the ensemble so far",
    )
    beta1: float = setting(defaults.BETA1, "slope of binomial deviance")
    beta2: float = setting(defaults.BETA2, "threshold of binomial deviance")
    cost: float = setting(defaults.COST, "cost of negative pairs in binomial deviance; the paper's is 25")
    margin: float = setting(-1.0, "margin of contrastive or triplet loss; -1 for the paper's")
    dropout: float = setting(defaults.DROPOUT, "dropout before the classifiers", least=0, most=0.95)


class DiversityConfig(Section):
    section = "diversity"
    name: Literal["none", "activation", "adversarial"] = setting("none", "the auxiliary loss during training")
    weight: float = setting(1e-3, "lambda_div", least=0)
    norm_weight: float = setting(
        defaults.LAMBDA_W, "lambda_w; inf holds the rows of W at length 1 exactly", least=0, infinite=True
    )
    reduction: Literal["sum", "mean"] = setting(
        defaults.REDUCTION, "sums as in the paper, or means as its authors ran it"
    )
    hidden: int = setting(defaults.HIDDEN, "size of the regressors' hidden layer", least=1, most=WIDEST)
    scale_features: bool = setting(
        defaults.SCALE_FEATURES, "divide features by their root mean square before the diversity loss"
    )
    through_backbone: bool = setting(
        defaults.THROUGH_BACKBONE, "let the gradient of the diversity loss reach the backbone"
    )
    factor: float = setting(
        0.0,
        "times the learning rate for the regressors of the adversarial loss; 0 for train.embedding_factor",
        least=0,
        most=1e6,
    )


class TrainConfig(Section):
    section = "train"
    steps: int = setting(1000, "steps of training", least=1)
    batch_classes: int = setting(8, "classes in a batch", least=2, most=LARGEST_BATCH)
    batch_images: int = setting(8, "images of each class in a batch", least=2, most=LARGEST_BATCH)
    optimizer: Literal["adam", "adamw", "sgd"] = setting(
        "adam", "ADAM, ADAM with decoupled weight decay, or SGD with momentum 0.9"
    )
    learning_rate: float = setting(3e-5, "of the backbone", least=0, most=1e6)
    embedding_factor: float = setting(10.0, "times the learning rate for the embedding layer", least=0, most=1e6)
    embedding_warmup: int = setting(0, "steps at the start in which only what follows the backbone is trained", least=0)
    layer_decay: float = setting(
        1.0, "learning rate of each stage of the backbone as a share of that of the stage after it", least=0, most=1
    )
    weight_decay: float = setting(2e-4, "decay of all weights", least=0)
    clip: float = setting(0.0, "largest norm of the gradient, longer ones are scaled down; 0 for no limit", least=0)
    ema: float = setting(
        0.0,
        "decay of a moving average of the weights, which is then validated and saved; 0 for none",
        least=0,
        most=0.999999,
    )
    schedule: Literal["constant", "cosine"] = setting("constant", "the learning rate over time")
    warmup: int = setting(0, "steps over which the learning rate rises from 0", least=0)
    precision: Literal["auto", "float32", "bfloat16"] = setting("auto", "arithmetic of the backbone")
    log_every: int = setting(10, "steps between two lines of metrics.jsonl", least=1)
    checkpoint_every: int = setting(100, "steps between two checkpoints", least=1)
    keep_checkpoints: int = setting(2, "newest checkpoints that are kept", least=1)
    validate_every: int = setting(100, "steps between two measurements on validation classes", least=1)
    validate_by: Literal["recall", "map"] = setting(
        "recall",
        "what decides which step is kept: R@1 of the trained steps, or MAP@R, with the untrained backbone as step 0",
    )
    patience: int = setting(0, "validations without improvement before the run ends; 0 never ends early", least=0)


def _parsed(path: Path) -> dict[str, Any]:
    text = files.read_file(path, LARGEST_FILE).decode("utf-8")
    # The parser takes minutes for a key of many parts: its time grows with the square of their number.
    if any(line.partition("=")[0].count(".") > MOST_DOTS for line in text.splitlines()):
        raise ValueError("a key has too many parts")
    return tomllib.loads(text)


class Config(Section):
    """All settings of a run. Sections and keys are those of its config.toml; `bier settings` lists them.

    Args:
        seed: fixes batches, augmentation and initial weights.
        method: the name under which the other settings were chosen; `bier.resolve` chooses them by it.
        data, model, loss, diversity, train: the sections, such as `TrainConfig(steps=500)`.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range or in conflict with another.

    Example:
        >>> import bier
        >>> config = bier.Config().with_settings({"train.steps": 500, "model.groups": 4})
        >>> config.train.steps, config.flat()["model.groups"]
        (500, 4)
    """

    seed: int = setting(0, "fixes batches, augmentation and initial weights", least=0)
    method: str = setting("a-bier", "the name under which the settings below were chosen")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    diversity: DiversityConfig = DiversityConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _fit_together(self) -> "Config":
        _check_together(self)
        return self

    def flat(self) -> dict[str, Any]:
        """Every setting under its dotted key, such as `train.steps`."""
        rows: dict[str, Any] = {}
        for name, value in self:
            rows |= {f"{name}.{key}": one for key, one in value} if isinstance(value, Section) else {name: value}
        return rows

    def with_settings(self, settings: Mapping[str, Any]) -> "Config":
        """The config with these dotted keys changed. An unknown key is an error that suggests the nearest one."""
        known = self.flat()
        top = dict(self)
        sections: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            if key not in known:
                raise ConfigError(_unknown(key, known))
            section, _, name = key.rpartition(".")
            (sections.setdefault(section, {}) if section else top)[name] = value
        for name, values in sections.items():
            top[name] = type(top[name])(**{**dict(top[name]), **values})
        return Config(**top)

    def to_toml(self, records: Mapping[str, Mapping[str, Any]] | None = None) -> str:
        """As a file: every setting, and the records of a run."""
        return tomli_w.dumps({**self.model_dump(), **(records or {})})

    @classmethod
    def from_toml(cls, path: Path) -> "Config":
        """Read a file, such as the config.toml of a run."""
        return read_config(path)[0]

    def differing(self, other: "Config") -> list[str]:
        """Keys whose values differ, as `key: this / other`."""
        mine, theirs = self.flat(), other.flat()
        return [f"{key}: {mine[key]!r} / {theirs[key]!r}" for key in mine if mine[key] != theirs[key]]


def read_config(path: Path) -> tuple[Config, dict[str, dict[str, Any]]]:
    """The settings in a file, and its records, which are no settings."""
    try:
        content = _parsed(path)
    except FileNotFoundError:
        raise ConfigError(f"There is no config at {path}.") from None
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and numbers of 4,300 digits
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read the config {path}: {error.strerror or error}.") from None
    if not content:
        raise ConfigError(f"{path} is empty.")
    records = {name: content.pop(name) for name in RECORDS if isinstance(content.get(name), dict)}
    settings: dict[str, Any] = {}
    for name, value in content.items():
        settings |= (
            {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
        )
    return Config().with_settings(settings), records


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """`section.key=value` strings, the values read as TOML where they can be, else as plain text."""
    settings, fields = {}, _fields()
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"A setting must look like section.key=value. Got {pair!r} instead.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            value = text.strip()
        known = fields.get(key.strip())
        if known is not None and known.annotation is str and not isinstance(value, str):
            value = text.strip()  # a folder may be called 2024.10
        # TOML takes sizes like 1000-12-10 for a day
        settings[key.strip()] = value if isinstance(value, bool | int | float | str | list | dict) else text.strip()
    return settings


class Described(NamedTuple):
    """A setting as `bier settings` lists it."""

    default: Any
    allowed: str
    about: str


def described() -> dict[str, Described]:
    """Every setting under its dotted key."""
    return {key: Described(field.default, _allowed(field), field.description or "") for key, field in _fields().items()}


def _fields() -> dict[str, FieldInfo]:
    rows: dict[str, FieldInfo] = {}
    for name, field in Config.model_fields.items():
        inner = type(field.default).model_fields if isinstance(field.default, Section) else None
        rows |= {name: field} if inner is None else {f"{name}.{key}": setting for key, setting in inner.items()}
    return rows


def _allowed(field: FieldInfo) -> str:
    """The values that a setting takes, in a few words."""
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(one or '(empty)' for one in get_args(field.annotation))}"
    words = [(word, limit) for one in field.metadata for word, name in LIMITS for limit in [getattr(one, name, None)]]
    limits = " and ".join(f"{word} {limit}" for word, limit in words if limit is not None)
    if any(getattr(one, "func", None) is _loss_name for one in field.metadata):
        return LOSS
    kind = TABLE if field.annotation == Table else KINDS.get(field.annotation, GROUPS)  # type: ignore[arg-type]
    return ", ".join(filter(None, [kind, limits]))


def _explained(section: type[Section], error: ValidationError) -> str:
    """The first problem that pydantic found, as one line: which setting, what it must be, what it was."""
    first = error.errors()[0]
    if not first["loc"]:  # settings that do not fit together
        return str(first["ctx"]["error"])
    name, value = str(first["loc"][0]), first["input"]
    prefix = f"{section.section}." if section.section else ""
    if name not in section.model_fields:
        return _unknown(prefix + name, [prefix + known for known in section.model_fields])
    wanted = _allowed(section.model_fields[name])
    if isinstance(value, float) and not math.isfinite(value):
        wanted = "a finite number"
    elif isinstance(value, int) and value > LARGEST:
        wanted = "a number below 2^63"
    return f"The setting '{prefix}{name}' must be {wanted}. Got {_shown(value)} instead."


def _shown(value: Any) -> str:
    """A value as Python writes it, unless that takes a page or more than Python does (4,300 digits, 1,000 levels)."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a value too long to show"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_together(config: Config) -> None:
    groups = config.model.groups
    count = len(groups) if isinstance(groups, tuple) else groups
    if isinstance(groups, tuple) and sum(groups) != config.model.embedding:
        raise ValueError(
            f"The sizes in 'model.groups' must add up to 'model.embedding' = {config.model.embedding}. "
            f"Got {'-'.join(map(str, groups))} = {sum(groups)} instead."
        )
    if count > config.model.embedding:
        raise ValueError(f"'model.embedding' = {config.model.embedding} cannot be cut into {count} groups.")
    if config.diversity.name != "none" and count < 2:
        raise ValueError("A diversity loss needs at least 2 groups; set model.groups=3 or diversity.name=none.")
    if config.model.start in ("activation", "adversarial") and count < 2:
        raise ValueError("A solved start of the embedding layer needs at least 2 groups; set model.start=glorot.")
    _check_loss(config.loss)
    if config.model.trunk_views and not config.model.trainable_from:
        raise ValueError("'model.trunk_views' caches what 'model.trainable_from' freezes; set that stage too.")
    for name in ("warmup", "embedding_warmup"):
        if (length := getattr(config.train, name)) > config.train.steps:
            raise ValueError(f"'train.{name}' = {length} is longer than 'train.steps' = {config.train.steps}.")


def _check_loss(loss: LossConfig) -> None:
    if loss.boosting == "shrinkage" and loss.name != "binomial-deviance":
        raise ValueError(
            f"'loss.boosting' = shrinkage goes with loss.name=binomial-deviance. Got '{loss.name}' instead."
        )
    given = [key for key in ("settings", "miner", "miner_settings") if getattr(loss, key)]
    if given and loss.name in LOSSES and (loss.name, given) != ("multi-similarity", ["settings"]):
        raise ValueError(
            f"'loss.{given[0]}' goes with a loss of pytorch-metric-learning. Got loss.name={loss.name} instead."
        )
    if loss.miner_settings and not loss.miner:
        raise ValueError("'loss.miner_settings' are the arguments of 'loss.miner'; set that too.")


def _unknown(key: str, known: Iterable[str]) -> str:
    return f"There is no setting '{key}'.{did_you_mean(key, known, cutoff=0.5)}"
