"""Every table and figure of the paper as data: rows to run, columns to read off them, and what the paper got."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bier.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Row:
    """One line of a table: what to train and on what, and the paper's numbers by the keys of columns.

    groups: the sizes of the learners; empty where `settings` say it.
    network: the name of a network of the budget, where it is not the budget's own.
    untrained: the pretrained backbone with its features normalised; nothing is trained.
    features_of: train the embedding alone, on the features of the network that this row left.
    tuned_as: take the settings that were found for this row, or for the one that it takes them from; where it is None
        they are searched for.
    fast: train at the higher rate that only runs with an auxiliary loss stand.
    size: which test set to read the numbers of, where a data set has several.
    paper_learners: the paper's R@1 of each learner alone.
    series, x: the place of the row in the figure.
    """

    label: str
    method: str
    data: str = "cub"
    groups: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)
    paper_learners: tuple[float, ...] = ()
    network: str = ""
    untrained: bool = False
    features_of: "Row | None" = None
    tuned_as: "Row | None" = None
    fast: bool = False
    size: str = ""
    series: str = ""
    x: float = 0.0

    @property
    def validated(self) -> bool:
        """Whether its settings hold training classes out, to be measured on in place of the test classes."""
        return "data.validation" in self.settings


@dataclass(frozen=True)
class Column:
    """A number of each row. `key` is what `bier.paper.tables.measured` knows."""

    key: str
    title: str
    digits: int = 2


@dataclass(frozen=True)
class Figure:
    """Rows with a `series` drawn as curves over `x`; or, without an `x_label`, one bar per row."""

    title: str
    x_label: str = ""
    logarithmic: bool = False


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. `partial` ones are run on whatever data is there."""

    name: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    figure: Figure | None = None
    learners: bool = False  # show each learner's own R@1
    pictures: bool = False
    partial: bool = False


RECALL = Column("recall", "R@1")
RECALLS = tuple(Column(f"recall@{k}", f"R@{k}") for k in (2, 4, 8, 16, 32))
BEST_RECALL = Column("best_recall", "R@1 at best length")
BEST_STEP = Column("best_step", "best length", 0)
CLASSIFIER = Column("classifier_correlation", "clf. corr.", 4)
FEATURE = Column("feature_correlation", "feature corr.", 4)
MEAN_LEARNER = Column("mean_learner", "mean R@1 of learners")
ACCURACY = Column("accuracy", "accuracy")


def varied(row: Row, label: str, settings: Mapping[str, Any], tuned_as: Row | None = None) -> Row:
    """The row with other settings, which the paper has no number for, at the rate found for it or another row."""
    return replace(row, label=label, settings=settings, tuned_as=tuned_as or row, paper={}, paper_learners=())


WHOLE = (512,)
THREE = (96, 160, 256)
EVEN = (170, 171, 171)

UNTRAINED = Row("GoogLeNet, not trained", "baseline", untrained=True)
BASELINE = Row(
    "Baseline-512", "baseline", groups=WHOLE, paper={"recall": 51.76, "feature_correlation": 0.1530}
)  # fmt: skip
INIT = Row(
    "Init-96-160-256",
    "init",
    groups=THREE,
    tuned_as=BASELINE,
    paper={"recall": 53.93, "classifier_correlation": 0.9008, "feature_correlation": 0.1197},
    paper_learners=(50.35, 52.60, 53.36),
)
INIT_EVEN = Row(
    "Init-170-171-171",
    "init",
    groups=EVEN,
    tuned_as=INIT,
    paper={"recall": 53.73, "classifier_correlation": 0.8362, "feature_correlation": 0.1005},
    paper_learners=(51.94, 51.99, 52.26),
)
BIER = Row(
    "BIER-96-160-256",
    "bier",
    groups=THREE,
    paper={
        "recall": 55.33,
        "classifier_correlation": 0.7768,
        "feature_correlation": 0.0934,
        "mean_learner": 52.29,
    },
    paper_learners=(49.95, 52.82, 54.09),
)
BIER_EVEN = Row(
    "BIER-170-171-171",
    "bier",
    groups=EVEN,
    tuned_as=BIER,
    paper={"recall": 54.76, "classifier_correlation": 0.7882, "feature_correlation": 0.0988},
    paper_learners=(51.47, 52.28, 52.38),
)
A_BIER = Row(
    "A-BIER-96-160-256",
    "a-bier",
    groups=THREE,
    paper={"recall": 57.5, "classifier_correlation": 0.6031, "feature_correlation": 0.0731},
    paper_learners=(51.1, 53.8, 55.3),
)
ACTIVATION = Row(
    "Activation BIER-96-160-256",
    "activation-bier",
    groups=THREE,
    tuned_as=A_BIER,
    paper={"recall": 56.5, "classifier_correlation": 0.7130, "feature_correlation": 0.0882},
    paper_learners=(51.3, 53.5, 55.2),
)


STRENGTH = Experiment(
    "strength",
    "Strength of the learners and correlation between them",
    (UNTRAINED, BASELINE, INIT_EVEN, INIT, BIER_EVEN, BIER),
    (CLASSIFIER, FEATURE, RECALL),
    learners=True,
)


def _with_loss(
    name: str, title: str, library: str, plain: tuple[float, float], boosted: tuple[float, float]
) -> tuple[Row, Row]:
    """The loss alone and boosted, both at the rate that was found for the same loss of pytorch-metric-learning alone,
    which is a row of `peers`."""

    def paper(numbers: tuple[float, float]) -> dict[str, float]:
        return {"feature_correlation": numbers[0], "recall": numbers[1]}

    settings, theirs = {"loss.name": name}, replace(BASELINE, settings={"loss.name": library})
    return (
        replace(varied(BASELINE, f"{title}-512", settings, theirs), paper=paper(plain)),
        replace(varied(BIER, f"{title}-96-160-256", settings, theirs), paper=paper(boosted)),
    )


LOSSES = Experiment(
    "losses",
    "Loss functions, plain and boosted",
    (
        UNTRAINED,
        *_with_loss("triplet", "Triplet", "TripletMarginLoss", (0.2122, 50.12), (0.1158, 53.31)),
        *_with_loss("contrastive", "Contrastive", "ContrastiveLoss", (0.1639, 50.62), (0.1246, 53.8)),
        replace(BASELINE, label="Binomial-Deviance-512"),
        replace(BIER, label="Binomial-Deviance-96-160-256"),
    ),
    (FEATURE, RECALL),
)


def _bier(size: int, groups: tuple[int, ...], **paper: float) -> Row:
    series = f"{size} dimensions"  # the paper's 52-102-152-204 adds up to 510
    name = "BIER-" + "-".join(map(str, groups))
    return Row(name, "bier", groups=groups, paper=paper, tuned_as=BIER, series=series, x=len(groups))


def _plain(size: int, **paper: float) -> Row:
    name, series = f"Baseline-{size}", f"{size} dimensions"
    return Row(name, "baseline", groups=(size,), paper=paper, tuned_as=BASELINE, series=series, x=1)


GROUPS_512 = (
    _plain(512, recall=51.76, feature_correlation=0.1530),
    _bier(512, (170, 342), recall=54.66, classifier_correlation=0.8252, mean_learner=53.06),
    replace(BIER, series="512 dimensions", x=3),
    _bier(512, (52, 102, 152, 204), recall=55.62, classifier_correlation=0.7091, mean_learner=50.67),
    _bier(512, (34, 68, 102, 138, 170), recall=54.9, classifier_correlation=0.6250, mean_learner=48.5),
)
GROUPS = Experiment(
    "groups",
    "Number of groups of a 512-dimensional embedding",
    GROUPS_512,
    (CLASSIFIER, MEAN_LEARNER, RECALL),
    figure=Figure("Number of groups", "groups"),
)
EMBEDDING_SIZE = Experiment(
    "embedding-size",
    "Size of the embedding and number of groups",
    (
        _plain(384, recall=51.57, feature_correlation=0.1453),
        _bier(384, (64, 128, 192), recall=54.66, feature_correlation=0.0939),
        *GROUPS_512,
        _plain(1024, recall=52.89, feature_correlation=0.1480),
        _bier(1024, (170, 342, 512)),
        _bier(1024, (102, 204, 308, 410)),
        _bier(1024, (68, 136, 204, 274, 342)),
        _bier(1024, (50, 96, 148, 196, 242, 292), recall=55.99, feature_correlation=0.0951),
        _bier(1024, (36, 74, 110, 148, 182, 218, 256)),
    ),
    (FEATURE, RECALL),
    figure=Figure("Size of the embedding and number of groups", "groups"),
)


def _start(label: str, start: str, recall: float) -> Row:
    return Row(label, "bier", groups=THREE, settings={"model.start": start}, paper={"recall": recall}, tuned_as=BIER)


GLOROT = _start("Glorot", "glorot", 54.41)
INITIALISATION = Experiment(
    "initialisation",
    "The embedding layer before training",
    (
        UNTRAINED,
        GLOROT,
        _start("Orthogonal", "orthogonal", 54.58),
        replace(BIER, label="Activation Loss"),
        _start("Adversarial Loss", "adversarial", 55.04),
    ),
    (CLASSIFIER, FEATURE, RECALL),
)
AUXILIARY = Experiment(
    "auxiliary",
    "Diversity losses during training",
    (
        UNTRAINED,
        replace(BIER, label="No auxiliary loss (BIER)"),
        replace(
            BIER,
            label="No auxiliary loss, ten times the rate",
            fast=True,
            tuned_as=BIER,
            paper={"recall": 52.3},
            paper_learners=(),
        ),
        replace(ACTIVATION, label="Activation Loss"),
        replace(A_BIER, label="Adversarial Loss (A-BIER)"),
    ),
    (CLASSIFIER, FEATURE, RECALL),
    learners=True,
)

LAMBDAS = (1e-3, 1e-2, 1e-1)
PEAKS = {("activation-bier", 1e-2): 56.5, ("a-bier", 1e-3): 57.5}


def _lambda(row: Row, title: str, weight: float) -> Row:
    peak = PEAKS.get((row.method, weight))
    return replace(
        row,
        label=f"{title}, lambda_div {weight:g}",
        settings={"diversity.weight": weight},
        paper={} if peak is None else {"recall": peak},
        tuned_as=row,
        series=title,
        x=weight,
    )


LAMBDA = Experiment(
    "lambda",
    "The weight of the diversity losses",
    tuple(
        _lambda(row, title, weight)
        for row, title in ((ACTIVATION, "Activation Loss"), (A_BIER, "Adversarial Loss"))
        for weight in LAMBDAS
    ),
    (CLASSIFIER, FEATURE, RECALL),
    figure=Figure("The weight of the diversity losses", "lambda_div", logarithmic=True),
)


def _lite(row: Row, title: str) -> Row:
    """The row with the default backbone of `bier train`, which the paper does not have."""
    return replace(row, label=f"EfficientNet-Lite0, {title}", network="lite", paper={}, paper_learners=())


SUMMARY = Experiment(
    "summary",
    "What each part of the method adds",
    (
        UNTRAINED,
        replace(BASELINE, label="Baseline"),
        replace(INIT, label="Activation Loss initialisation"),
        replace(GLOROT, label="Boosting, random initialisation"),
        replace(BIER, label="Boosting, Activation Loss initialisation (BIER)"),
        replace(ACTIVATION, label="Boosting, auxiliary Activation Loss"),
        replace(A_BIER, label="Boosting, auxiliary Adversarial Loss (A-BIER)"),
        _lite(UNTRAINED, "not trained"),
        _lite(BASELINE, "baseline"),
        _lite(A_BIER, "A-BIER"),
    ),
    (RECALL, BEST_RECALL, BEST_STEP, CLASSIFIER, FEATURE, *RECALLS),
    figure=Figure("What each part of the method adds"),
    learners=True,
)

ALL_LAYERS = {"model.trainable_from": "", "model.trunk_views": 0}


END_TO_END = Experiment(
    "end-to-end",
    "Boosting on fixed features, and through the network",
    (
        UNTRAINED,
        replace(BIER, label="Stagewise: features fixed", features_of=BASELINE, paper={"recall": 52.0}),
        replace(BIER, label="Layers as the budget says (BIER)", paper={"recall": 55.3}),
        varied(BASELINE, "All layers, Baseline", ALL_LAYERS),
        varied(BIER, "All layers, BIER", ALL_LAYERS),
        varied(A_BIER, "All layers, A-BIER", ALL_LAYERS),
    ),
    (CLASSIFIER, FEATURE, RECALL),
)


# R@1 of baseline, BIER and A-BIER
ON_DATA = {
    ("cub", ""): (51.8, 55.3, 57.5),
    ("cub-cropped", ""): (58.9, 63.7, 65.5),
    ("cars", ""): (73.6, 78.0, 82.0),
    ("cars-cropped", ""): (82.6, 87.2, 90.3),
    ("sop", ""): (66.2, 72.7, 74.2),
    ("inshop", ""): (70.6, 76.9, 83.1),
    ("vehicleid", "small"): (78.0, 82.6, 86.3),
    ("vehicleid", "medium"): (73.0, 79.3, 83.3),
    ("vehicleid", "large"): (67.9, 76.0, 81.9),
}


def _on(row: Row, data: str) -> Row:
    """The row on other data; cropped images take the rate that was found for whole ones."""
    whole = data.removesuffix("-cropped")
    return replace(row, data=data, tuned_as=None if whole == data else replace(row, data=whole))


DATASETS = Experiment(
    "datasets",
    "The network as it came, baseline, BIER and A-BIER on every data set that is there",
    tuple(
        _on(replace(row, label=f"{data} {size}".strip() + f", {title}", size=size, paper=paper), data)
        for (data, size), recalls in ON_DATA.items()
        for row, title, paper in (
            (UNTRAINED, "not trained", {}),
            (BASELINE, "Baseline", {"recall": recalls[0]}),
            (BIER, "BIER", {"recall": recalls[1]}),
            (A_BIER, "A-BIER", {"recall": recalls[2]}),
        )
    ),
    (RECALL, CLASSIFIER, FEATURE),
    figure=Figure("The network as it came, baseline, BIER and A-BIER"),
    partial=True,
)


QUICK = {"model.backbone": "cifar10-quick", "model.embedding": 64}
QUICK_BASELINE = Row("Quick, Baseline", "baseline", "cifar10", settings=QUICK)


def _cifar(
    title: str,
    network: Mapping[str, object],
    groups: int,
    accuracies: tuple[float, ...],
    activation: Mapping[str, object] | None = None,
    name: str = "",
) -> tuple[Row, ...]:
    """All rows of both networks take the weight decay that was found for the plain small one.

    activation: what the row with the Activation Loss changes. name: the network's name in the budgets.
    """
    boosted = {**network, "model.groups": groups}
    rows = (
        ("Baseline", "baseline", network),
        ("Dropout", "baseline", {**network, "loss.dropout": 0.5}),
        ("Activation BIER", "activation-bier", {**boosted, **(activation or {})}),
        ("Adversarial BIER", "a-bier", boosted),
    )
    return tuple(
        Row(
            f"{title}, {label}",
            method,
            "cifar10",
            settings=settings,
            paper={"accuracy": accuracy},
            network=name,
            tuned_as=QUICK_BASELINE,
        )
        for (label, method, settings), accuracy in zip(rows, accuracies, strict=True)
    )


CIFAR10 = Experiment(
    "cifar10",
    "Classification: CIFAR-10 with two small networks",
    (
        *_cifar("Quick", QUICK, 2, (78.72, 80.62, 81.40, 81.72)),
        *_cifar(
            "Quick-Wider",
            {"model.backbone": "cifar10-quick-wider", "model.embedding": 128},
            4,
            (80.67, 81.69, 83.10, 83.21),
            activation={"diversity.weight": 20.0},  # better than 100 on validation images, for 6 pairs of learners
            name="wider",
        ),
    ),
    (ACCURACY,),
)
PICTURES = Experiment(
    "pictures",
    "Nearest images by each learner, and the five nearest by the ensemble",
    (replace(BIER, label="BIER"), replace(A_BIER, label="A-BIER")),
    (RECALL,),
    pictures=True,
)

# Losses of other authors, by their names in pytorch-metric-learning and with its defaults, and the R@1 that the paper
# quotes for them on CUB. It quotes Margin on cropped images only; the last two are younger than the paper.
PEER_LOSSES: Mapping[str, tuple[Mapping[str, Any], float | None]] = {
    "Contrastive": ({"loss.name": "ContrastiveLoss"}, 26.4),
    "Triplet": ({"loss.name": "TripletMarginLoss"}, 36.1),
    "LiftedStruct": ({"loss.name": "LiftedStructureLoss"}, 47.2),
    "Histogram": ({"loss.name": "HistogramLoss"}, 50.3),
    "N-Pair": ({"loss.name": "NPairsLoss"}, 51.0),
    "Proxy-NCA": ({"loss.name": "ProxyNCALoss"}, 49.2),
    "Angular": ({"loss.name": "AngularLoss"}, 54.7),
    "Margin": (
        {"loss.name": "MarginLoss", "loss.settings": {"learn_beta": True}, "loss.miner": "DistanceWeightedMiner"},
        None,
    ),
    "Proxy-Anchor": ({"loss.name": "ProxyAnchorLoss"}, None),
    "Multi-Similarity": ({"loss.name": "MultiSimilarityLoss"}, None),
}


def _peer(title: str, settings: Mapping[str, Any], recall: float | None) -> tuple[Row, Row]:
    """The loss alone, as the paper quotes it, and boosted at the rate that was found for it alone."""
    paper = {} if recall is None else {"recall": recall}
    alone = replace(BASELINE, label=f"{title}-512", settings=settings, paper=paper)
    return alone, varied(BIER, f"{title}-96-160-256", settings, tuned_as=alone)


PEERS = Experiment(
    "peers",
    "Losses of other authors on the same backbone, alone and boosted",
    (
        UNTRAINED,
        *(row for title, peer in PEER_LOSSES.items() for row in _peer(title, *peer)),
        replace(BASELINE, label="Binomial-Deviance-512"),
        replace(BIER, label="Binomial-Deviance-96-160-256"),
        A_BIER,
    ),
    (FEATURE, RECALL),
)


HELD_OUT = {"data.validation": 0.4, "data.validation_order": "last"}
Changes = Mapping[str, Mapping[str, Any]]  # what changes -> the settings that do it


def _tried(row: Row, title: str, changes: Changes) -> tuple[Row, ...]:
    """The row under each change, measured on training classes that are held out."""
    return tuple(
        varied(row, f"{title}, {what}" if what else title, {**HELD_OUT, **change}) for what, change in changes.items()
    )


BOTH: Changes = {
    "": {},
    "bias that centres the embedding": {"model.bias": True},
    "cost of negative pairs 25": {"loss.cost": 25.0},
    "16 classes x 4 images": {"train.batch_classes": 16, "train.batch_images": 4},
    "6 classes x 5 images": {"train.batch_classes": 6, "train.batch_images": 5},
    "embedding layer at the backbone's rate": {"train.embedding_factor": 1.0},
    "strong augmentation": {"data.augment": "strong"},
}
BOOSTED: Changes = {
    "shrinkage": {"loss.boosting": "shrinkage"},
    "no diversity loss": {"diversity.name": "none"},
    "no diversity loss, shrinkage": {"diversity.name": "none", "loss.boosting": "shrinkage"},
    "lambda_div 1e-4": {"diversity.weight": 1e-4},
    "lambda_div 1e-2": {"diversity.weight": 1e-2},
    "lambda_div 1e-1": {"diversity.weight": 1e-1},
    "gradient": {"loss.boosting": "gradient"},
    "shrinkage, lambda_div 1e-4": {"loss.boosting": "shrinkage", "diversity.weight": 1e-4},
}
WITHOUT_DIVERSITY: Changes = {  # at BIER's own rate, which is lower, and at that of the other two
    "": {},
    "rate 1e-4": {"train.learning_rate": 1e-4},
    "gradient": {"loss.boosting": "gradient"},
    "gradient, rate 1e-4": {"loss.boosting": "gradient", "train.learning_rate": 1e-4},
    "shrinkage": {"loss.boosting": "shrinkage"},
    "shrinkage, rate 1e-4": {"loss.boosting": "shrinkage", "train.learning_rate": 1e-4},
}
TRIED = Experiment(
    "tried",
    "What was tried: R@1 on training classes that were held out",
    (
        varied(UNTRAINED, "GoogLeNet, not trained", HELD_OUT),
        *_tried(BASELINE, "Baseline", BOTH),
        *_tried(BIER, "BIER", WITHOUT_DIVERSITY),
        *_tried(A_BIER, "A-BIER", {**BOTH, **BOOSTED}),
    ),
    (CLASSIFIER, FEATURE, RECALL),
    learners=True,
)

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *(STRENGTH, LOSSES, GROUPS, EMBEDDING_SIZE, INITIALISATION, AUXILIARY, LAMBDA),
        *(SUMMARY, END_TO_END, DATASETS, CIFAR10, PICTURES, PEERS, TRIED),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        known, hint = ", ".join(EXPERIMENTS), did_you_mean(name, EXPERIMENTS)
        raise ConfigError(f"The experiment must be one of {known}. Got '{name}' instead.{hint}")
    return EXPERIMENTS[name]
