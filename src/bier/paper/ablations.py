"""The experiments on CUB-200-2011 that take the method apart."""

from dataclasses import replace

from bier.paper.experiment import Experiment, Figure, Row
from bier.paper.rows import (
    A_BIER,
    ACTIVATION,
    BASELINE,
    BIER,
    BIER_EVEN,
    CLASSIFIER,
    FEATURE,
    INIT,
    INIT_EVEN,
    MEAN_LEARNER,
    RECALL,
    THREE,
    WHOLE,
    varied,
)

STRENGTH = Experiment(
    "strength",
    "Strength of the learners and correlation between them",
    (BASELINE, INIT_EVEN, INIT, BIER_EVEN, BIER),
    (CLASSIFIER, FEATURE, RECALL),
    learners=True,
)


def _with_loss(name: str, title: str, plain: tuple[float, float], boosted: tuple[float, float]) -> tuple[Row, Row]:
    def paper(numbers: tuple[float, float]) -> dict[str, float]:
        return {"feature_correlation": numbers[0], "recall": numbers[1]}

    return (
        Row(f"{title}-512", "baseline", groups=WHOLE, settings={"loss.name": name}, paper=paper(plain)),
        Row(f"{title}-96-160-256", "bier", groups=THREE, settings={"loss.name": name}, paper=paper(boosted)),
    )


LOSSES = Experiment(
    "losses",
    "Loss functions, plain and boosted",
    (
        *_with_loss("triplet", "Triplet", (0.2122, 50.12), (0.1158, 53.31)),
        *_with_loss("contrastive", "Contrastive", (0.1639, 50.62), (0.1246, 53.8)),
        *_with_loss("binomial-deviance", "Binomial-Deviance", (0.1530, 51.76), (0.0934, 55.33)),
    ),
    (FEATURE, RECALL),
)


def _bier(size: int, groups: tuple[int, ...], **paper: float) -> Row:
    series = f"{size} dimensions"  # the paper's 52-102-152-204 adds up to 510
    name = "BIER-" + "-".join(map(str, groups))
    return Row(name, "bier", groups=groups, paper=paper, tuned_as=BIER, series=series, x=len(groups))


def _plain(size: int, **paper: float) -> Row:
    return Row(f"Baseline-{size}", "baseline", groups=(size,), paper=paper, series=f"{size} dimensions", x=1)


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
SUMMARY = Experiment(
    "summary",
    "What each part of the method adds",
    (
        replace(BASELINE, label="Baseline"),
        replace(INIT_EVEN, label="Activation Loss initialisation"),
        replace(GLOROT, label="Boosting, random initialisation"),
        replace(BIER, label="Boosting, Activation Loss initialisation"),
        replace(ACTIVATION, label="Boosting, auxiliary Activation Loss"),
        replace(A_BIER, label="Boosting, auxiliary Adversarial Loss"),
    ),
    (RECALL,),
)


def _length(row: Row, title: str, length: float) -> Row:
    label = f"{title}, {length:g} x the steps"
    return replace(varied(row, label, row.settings), length=length, series=title, x=length)


LENGTH = Experiment(
    "length",
    "How long to train",
    tuple(
        _length(row, title, length)
        for row, title in ((BASELINE, "Baseline"), (A_BIER, "A-BIER"))
        for length in (0.5, 1.0, 2.0)
    ),
    (CLASSIFIER, FEATURE, RECALL),
    figure=Figure("How long to train", "times the steps of the budget"),
)

ALL_LAYERS = {"model.trainable_from": "", "model.trunk_views": 0}


END_TO_END = Experiment(
    "end-to-end",
    "Boosting on fixed features, and through the network",
    (
        replace(BIER, label="Stagewise: features fixed", features_of=BASELINE, paper={"recall": 52.0}),
        replace(BIER, label="Layers as the budget says (BIER)", paper={"recall": 55.3}),
        varied(BASELINE, "All layers, Baseline", ALL_LAYERS),
        varied(BIER, "All layers, BIER", ALL_LAYERS),
        varied(A_BIER, "All layers, A-BIER", ALL_LAYERS),
    ),
    (CLASSIFIER, FEATURE, RECALL),
)
