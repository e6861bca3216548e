"""From which similarity on two images count as the same: the separation of pairs, and the threshold of a model.

A pair is a query and another image of the collection. Its similarity is the cosine of the two vectors. At a threshold:

    TAR (true accept rate, recall): of the pairs of one class, the share with similarity >= t
    FAR (false accept rate): of the pairs of two classes, the share with similarity >= t
    precision: of all pairs with similarity >= t, the share of one class

So precision is what a person sees who searches with every query in turn: of all images returned, how many are right.
It depends on the collection: with ten times as many images of other classes, ten times as many of them lie above the
same threshold; and with queries of which the collection has no image at all, all that is returned is wrong. TAR and
FAR do not depend on that.

The threshold that a model keeps is an estimate from the images of some classes, to be used on others. It promises a
precision where half of the queries have no counterpart in the collection, and it is chosen by the lower bound of that
precision when the classes are drawn anew (a bootstrap over classes). Too few classes give no threshold.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bier import files
from bier.errors import DataError
from bier.evaluate.pairs import Pairs, Scan, bin_edges, scan
from bier.evaluate.recall import Labels, Vectors, as_matrix, check_groups, encode_labels, sides, unit_parts
from bier.method.defaults import Weighting
from bier.method.equations import ensemble_vector, unit_rows
from bier.models.folder import description_file, read_folder

PRECISION = 95.0  # percent: what the threshold of a model promises
LEAST_CLASSES = 20  # with matches, below which there is no threshold
RATES = (1e-2, 1e-3, 1e-4)  # false accept rates at which the true accept rate is reported
CURVE = 200  # points of a ROC that is drawn
DRAWS = 400  # of classes, with repetition
CONFIDENCE = 95.0  # percent of the draws that lie above a lower bound
LEVELS = 100  # thresholds that are tried, by the share of the right pairs that they let through


class OperatingPoint(NamedTuple):
    """What searches return at one threshold, in percent.

    precision: of all images returned, the share of the query's class; None if nothing is returned.
    precision_with_unknown: the same where as many queries again have no image of their class in the collection.
    recall: of the images of the query's class, the share that is returned (the true accept rate).
    far: the false accept rate. answered: queries that get any image.
    empty: queries whose answer would be empty if the collection had no image of their class, as it should be then.
    """

    threshold: float
    precision: float | None
    precision_with_unknown: float | None
    recall: float
    far: float
    answered: float
    empty: float


@dataclass(frozen=True, eq=False)
class Verification:
    """The separation of same and different pairs; rates in percent.

    eer: the equal error rate, where FAR and 1 - TAR are equal; their mean at the threshold where they are closest.
    tar: {FAR: the highest TAR at a FAR no higher}. Where there are fewer than 1/FAR different pairs, none is accepted.
    found: the lowest threshold whose precision on these images is at least `precision`; None if there is none.
    tested: the same figures at a threshold that was found elsewhere, or None.
    roc: (2, n) FAR and TAR, at most `CURVE` points.
    """

    same: int
    different: int
    precision: float
    eer: float
    tar: dict[float, float]
    found: OperatingPoint | None
    tested: OperatingPoint | None
    roc: NDArray[np.float64] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return what `json.dump` takes."""
        return {
            "pairs": {"same": self.same, "different": self.different},
            "eer": self.eer,
            "tar": {f"{rate:g}": value for rate, value in self.tar.items()},
            "target_precision": self.precision,
            "found": None if self.found is None else self.found._asdict(),
            "tested": None if self.tested is None else self.tested._asdict(),
        }


class _Steps(NamedTuple):
    """The distances at which a threshold lets another pair through, and how many pairs it then lets through."""

    edges: NDArray[np.float64]
    same: NDArray[np.int64]
    different: NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Pairs) -> "_Steps":
        bins = np.flatnonzero(pairs.same + pairs.different)
        return cls(bin_edges(bins), np.cumsum(pairs.same[bins]), np.cumsum(pairs.different[bins]))


def verify(
    vectors: Vectors,
    labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    *,
    precision: float = PRECISION,
    threshold: float | None = None,
) -> Verification | None:
    """Measure ROC, equal error rate and thresholds of vectors (N, d), compared by cosine.

    Without a gallery each image is searched among the others. `precision` is the target in percent; `threshold` is one
    found on other images, to be tested on these. None if all pairs are of one class, or of two.
    """
    others = None if gallery is None else [unit_rows(as_matrix(gallery, "gallery"))]
    queries, target = sides([unit_rows(as_matrix(vectors))], labels, others, gallery_labels)
    found = scan(queries, target, torch.ones(1, 1, dtype=torch.float64), count_pairs=True)
    return summarise(found, precision, threshold)


def summarise(found: Scan, precision: float = PRECISION, threshold: float | None = None) -> Verification | None:
    """As `verify`, from a scan that has counted pairs."""
    if not 0 < precision <= 100:
        raise DataError(f"The 'precision' parameter must lie above 0 and up to 100 percent. Got {precision} instead.")
    assert found.pairs is not None
    same, different = int(found.pairs.same.sum()), int(found.pairs.different.sum())
    if not same or not different:
        return None
    steps = _Steps.of(found.pairs)
    tar, far = steps.same / same, steps.different / different
    closest = int(np.argmin(np.abs(far - (1 - tar))))
    good = np.flatnonzero((steps.same > 0) & (100 * steps.same >= precision * (steps.same + steps.different)))
    best = 1 - steps.edges[good[-1]] if len(good) else None
    return Verification(
        same=same,
        different=different,
        precision=precision,
        eer=50 * float(far[closest] + 1 - tar[closest]),
        tar={rate: 100 * float(tar[far <= rate].max(initial=0.0)) for rate in RATES},
        found=None if best is None else operating_point(found, float(best)),
        tested=None if threshold is None else operating_point(found, threshold),
        roc=_curve(far, tar),
    )


def operating_point(found: Scan, threshold: float) -> OperatingPoint:
    """What searches return at a threshold, to the bins in which the pairs were counted."""
    assert found.pairs is not None
    steps = _Steps.of(found.pairs)
    # a threshold is 1 - edge, and 1 - (1 - edge) may differ from the edge in its last digit
    place = int(np.searchsorted(steps.edges, (1 - threshold) * (1 + 1e-9) + 1e-15, side="right"))
    right, wrong = (int(row[place - 1]) if place else 0 for row in (steps.same, steps.different))
    best, rival = found.best_same.numpy(), found.rival_score.numpy()
    return OperatingPoint(
        threshold=threshold,
        precision=100 * right / (right + wrong) if right + wrong else None,
        precision_with_unknown=100 * right / (right + 2 * wrong) if right + wrong else None,
        recall=100 * right / max(1, int(steps.same[-1])),
        far=100 * wrong / max(1, int(steps.different[-1])),
        answered=100 * float((np.maximum(best, rival) >= threshold - 1e-9).mean()),
        empty=100 * float((rival < threshold - 1e-9).mean()),
    )


def _curve(far: NDArray[np.float64], tar: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points of the ROC, closer together at low false accept rates, as it is drawn on a logarithmic axis."""
    shown = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, CURVE - 1)])
    places = np.searchsorted(far, shown, side="right")  # so many steps have no higher FAR
    points = np.stack([np.append(0.0, far)[places], np.append(0.0, tar)[places]])
    return np.unique(points, axis=1)


# The thresholds that a model keeps


class Gallery(NamedTuple):
    """Images of the collection that are no queries: raw embeddings (N, d), labels, and how many each one stands for."""

    z: Vectors
    labels: Labels
    weight: int = 1


class MatchThreshold(NamedTuple):
    """A threshold and its precision in percent where half of the queries are of classes that the collection lacks.

    precision: on the images that it was chosen on; low and high: the bounds of 90% of the draws of their classes.
    """

    threshold: float
    precision: float
    low: float
    high: float


def model_thresholds(
    z: Vectors,
    labels: Labels,
    others: Gallery | None,
    groups: Sequence[int],
    weighting: Weighting,
    *,
    part: str,
    precision: float = PRECISION,
) -> dict[str, Any] | None:
    """What a model keeps about "same", from raw embeddings `z` (N, d) of queries: a small dictionary for JSON.

    The queries are searched among each other and the `others`: a threshold that is found among few classes lets through
    too much in a larger collection. `part` names the part of the data set that the queries are from. Searches compare
    the whole vector, the first learners or one learner, each with similarities of its own, so each has a threshold:
    `prefixes` (the last one is that of the whole vector, also under `threshold`) and `learners`; None where none
    keeps the promise. `expected` has the figures of the whole vector's threshold. None instead of the dictionary if no
    two images share a class.
    """
    matrix = as_matrix(z, "z")
    sizes = check_groups(groups, matrix.shape[1])
    other_z = None if others is None else as_matrix(others.z, "z")
    codes, other_codes = encode_labels(
        labels, len(matrix), None if others is None else others.labels, 0 if other_z is None else len(other_z)
    )
    if len(torch.unique(codes)) == len(codes):
        return None

    def chosen(learners: slice) -> MatchThreshold | None:
        def vectors(raw: torch.Tensor) -> torch.Tensor:
            return ensemble_vector(unit_parts(raw, sizes)[learners], weighting)

        beside = None if other_z is None or others is None else (vectors(other_z), other_codes, others.weight)
        return match_threshold(vectors(matrix), codes, beside, precision)

    count = len(sizes)
    whole = chosen(slice(None))
    learners = [chosen(slice(m, m + 1)) for m in range(count)] if count > 1 else [whole]
    prefixes = [learners[0], *(chosen(slice(m)) for m in range(2, count)), whole][-count:]
    return {
        "threshold": None if whole is None else whole.threshold,
        "prefixes": [None if value is None else value.threshold for value in prefixes],
        "learners": [None if value is None else value.threshold for value in learners],
        "precision": precision,
        "part": part,
        "classes": len(torch.unique(codes)),
        "queries": len(matrix),
        "images": len(matrix) + (0 if others is None or other_z is None else others.weight * len(other_z)),
        "expected": None if whole is None else whole._asdict(),
    }


def match_threshold(
    vectors: torch.Tensor,
    classes: torch.Tensor,
    others: tuple[torch.Tensor, torch.Tensor | None, int] | None = None,
    precision: float = PRECISION,
    seed: int = 0,
) -> MatchThreshold | None:
    """The lowest threshold whose precision keeps the promise in 95% of the draws of classes; None without evidence.

    A draw takes the classes of the queries with repetition; a pair of two classes counts as often as both are drawn.
    Queries (N, d) are searched among each other and the `others` (vectors, classes, how many each stands for). Every
    query is asked a second time as one whose class the collection lacks, so that wrong answers count twice. One more
    wrong answer than was seen is counted, and matches above the threshold must come from `LEAST_CLASSES` classes.
    """
    names, codes = torch.unique(classes, return_inverse=True)
    if len(names) < LEAST_CLASSES:
        return None
    unit = unit_rows(vectors.double())
    similar = unit @ unit.T
    alike = codes[:, None] == codes[None]
    alike.fill_diagonal_(fill_value=False)
    positive = similar[alike]
    beside = None
    if others is not None and len(others[0]):
        other_vectors, other_classes, weight = others
        assert other_classes is not None
        beside = unit @ unit_rows(other_vectors.double()).T
        known = classes[:, None] == other_classes[None]
        positive = torch.cat([positive, beside[known]])
    levels = torch.linspace(0, 1, LEVELS + 1, dtype=torch.float64)
    ordered = positive.sort().values
    thresholds = ordered[(levels * (len(ordered) - 1)).round().long()].unique()
    member = torch.nn.functional.one_hot(codes).double()
    drawn = torch.from_numpy(
        np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), DRAWS)
    ).double()
    wrong_pair = (~alike).fill_diagonal_(fill_value=False)
    for threshold in thresholds.tolist():
        above = similar >= threshold - 1e-12
        right = member.T @ (above & alike).double().sum(1)
        between = member.T @ (above & wrong_pair).double() @ member
        aside = torch.zeros(len(names), dtype=torch.float64)
        if beside is not None:
            far_above = beside >= threshold - 1e-12
            right = right + weight * (member.T @ (far_above & known).double().sum(1))
            aside = weight * (member.T @ (far_above & ~known).double().sum(1))
        if int((right > 0).sum()) < LEAST_CLASSES:
            return None  # and at no higher one
        rights = drawn @ right
        wrongs = ((drawn @ between) * drawn).sum(1) + drawn @ aside
        shares = (100 * rights / (rights + 2 * (wrongs + 1))).numpy()
        low, high = np.percentile(shares, [100 - CONFIDENCE, CONFIDENCE])
        if low >= precision:
            total = float(right.sum())
            share = 100 * total / (total + 2 * float(between.sum() + aside.sum()))
            return MatchThreshold(threshold, share, float(low), float(high))
    return None


def no_threshold(groups: Sequence[int], part: str, classes: int, precision: float = PRECISION) -> dict[str, Any]:
    """What a model keeps where no images can show from which similarity on they are the same."""
    none = [None] * len(groups)
    record = {"threshold": None, "prefixes": none, "learners": none, "precision": precision}
    return record | {"part": part, "classes": classes, "queries": 0, "images": 0, "expected": None}


def kept_threshold(metadata: Mapping[str, Any], learners: int | None = None, alone: bool = False) -> float | None:
    """The threshold in a model's metadata: of the whole vector, of the first learners, or of one learner alone."""
    record = metadata.get("same")
    if not record:
        return None
    row = record["learners" if alone else "prefixes"]
    value = row[-1 if learners is None else learners - 1]
    return None if value is None else float(value)


def tested_on(point: OperatingPoint, data: str, classes: int) -> dict[str, Any] | None:
    """What a model keeps about a test of its threshold; None where it returns nothing, or there are few classes."""
    if classes < LEAST_CLASSES or point.precision_with_unknown is None:
        return None
    return {"data": data, "classes": classes, "precision": point.precision_with_unknown, "recall": point.recall}


def keep_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write what a model or run folder keeps about "same"; its weights stay as they are."""
    _, description = read_folder(path)
    description = {**description, "metadata": {**description["metadata"], "same": record}}
    folder = path / "model" if description_file(path / "model").is_file() else path
    files.write(description_file(folder), f"{json.dumps(files.with_checksum(description), indent=2)}\n".encode())


def found_on(record: Mapping[str, Any]) -> str:
    """The images that the threshold of a model was found on, for people: "validation images (20 classes)"."""
    count = record["classes"]
    part = "training" if record["part"] == "train" else record["part"]
    return f"{part} images ({count} class{'es' if count > 1 else ''})"


def why_none(record: Mapping[str, Any]) -> str:
    """Why a model keeps no threshold, and what would give one."""
    few = record["part"] != "validation" or record["classes"] < LEAST_CLASSES
    if few and not any(record["prefixes"]):
        count = record["classes"] if record["part"] == "validation" else 0
        return f"that takes {LEAST_CLASSES} validation classes, and it was trained with {count}; see data.validation"
    return f"none reached a precision of {record['precision']:g}% on {found_on(record)}"
