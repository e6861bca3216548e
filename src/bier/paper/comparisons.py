"""The experiments that leave CUB-200-2011 or the method: other data, classification, pictures, other losses."""

from collections.abc import Mapping
from dataclasses import replace

from bier.paper.experiment import Experiment, Row
from bier.paper.rows import A_BIER, ACCURACY, BASELINE, BIER, CLASSIFIER, FEATURE, RECALL

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
    "Baseline, BIER and A-BIER on every data set that is there",
    tuple(
        _on(replace(row, label=f"{data} {size}".strip() + f", {title}", size=size, paper={"recall": recall}), data)
        for (data, size), recalls in ON_DATA.items()
        for row, title, recall in zip((BASELINE, BIER, A_BIER), ("Baseline", "BIER", "A-BIER"), recalls, strict=True)
    ),
    (CLASSIFIER, FEATURE, RECALL),
    partial=True,
)


def _cifar(
    title: str,
    network: Mapping[str, object],
    groups: int,
    accuracies: tuple[float, ...],
    tuned_as: tuple[Row | None, ...] = (None,) * 4,
    activation: Mapping[str, object] | None = None,
) -> tuple[Row, ...]:
    boosted = {**network, "model.groups": groups}
    rows = (
        ("Baseline", "baseline", network),
        ("Dropout", "baseline", {**network, "loss.dropout": 0.5}),
        ("Activation BIER", "activation-bier", {**boosted, **(activation or {})}),
        ("Adversarial BIER", "a-bier", boosted),
    )
    return tuple(
        Row(f"{title}, {label}", method, "cifar10", settings=settings, paper={"accuracy": accuracy}, tuned_as=other)
        for (label, method, settings), accuracy, other in zip(rows, accuracies, tuned_as, strict=True)
    )


QUICK = _cifar(
    "Quick", {"model.backbone": "cifar10-quick", "model.embedding": 64}, 2, (78.72, 80.62, 81.40, 81.72)
)  # fmt: skip
CIFAR10 = Experiment(
    "cifar10",
    "Classification: CIFAR-10 with two small networks",
    (
        *QUICK,
        *_cifar(
            "Quick-Wider",
            {"model.backbone": "cifar10-quick-wider", "model.embedding": 128},
            4,
            (80.67, 81.69, 83.10, 83.21),
            tuned_as=QUICK,
            activation={"diversity.weight": 20.0},  # better than 100 on validation images, for 6 pairs of learners
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

# The R@1 that the paper quotes on CUB; Margin is quoted on cropped images only.
PEER_LOSSES = {
    "ContrastiveLoss": ("Contrastive", 26.4),
    "TripletMarginLoss": ("Triplet", 36.1),
    "LiftedStructureLoss": ("LiftedStruct", 47.2),
    "NPairsLoss": ("N-Pair", 51.0),
    "ProxyNCALoss": ("Proxy-NCA", 49.2),
    "AngularLoss": ("Angular", 54.7),
    "MarginLoss": ("Margin", None),
}
PEERS = Experiment(
    "peers",
    "Losses of other authors on the same backbone",
    (
        *(
            replace(BASELINE, label=f"{title} (peer)", peer=loss, paper={} if recall is None else {"recall": recall})
            for loss, (title, recall) in PEER_LOSSES.items()
        ),
        BASELINE,
        BIER,
        A_BIER,
    ),
    (FEATURE, RECALL),
)
