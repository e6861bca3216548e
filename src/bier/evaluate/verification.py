"""Same or not: how well a threshold on the similarity separates pairs of one class from pairs of two classes.

A pair is a query and another image of the collection. Its similarity is the cosine of the two vectors. Pairs are
counted in a histogram with 2^19 steps per unit of similarity, tile by tile, so that memory does not grow with the
number of pairs; at every multiple of 2^-19 the counts are exact, and only such thresholds are considered.

At a threshold t:

    TAR (true accept rate, recall): of the pairs of one class, the share with similarity >= t
    FAR (false accept rate): of the pairs of two classes, the share with similarity >= t
    precision: of all pairs with similarity >= t, the share of one class

So precision is what a person sees who searches with every query in turn: of all images returned, how many are right.
It depends on the collection: with ten times as many images of other classes, ten times as many of them lie above the
same threshold. TAR and FAR do not depend on that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bier import distributed
from bier.errors import DataError
from bier.evaluate.recall import Labels, Vectors, as_matrix, check_groups, sides, unit_parts
from bier.method.defaults import Weighting
from bier.method.equations import ensemble_vector, unit_rows

PRECISION = 95.0  # percent: what the threshold of a model aims at
RATES = (1e-2, 1e-3, 1e-4)  # false accept rates at which the true accept rate is reported
STEPS = 2**19  # thresholds per unit of similarity, 1.9e-6 apart: about the rounding of a float32 product
TILE = 2048  # images on each side of a tile: 16 MB of similarities
CURVE = 200  # points of a ROC that is drawn


class Pairs(NamedTuple):
    """Pairs by similarity: element i of `same` and `different` counts those in [i / STEPS - 1, (i + 1) / STEPS - 1).

    Without a gallery both orders of a pair are one pair. `best_same` and `best_different` (N,) are each query's highest
    similarity with its own and with another class, -inf where there is none.
    """

    same: NDArray[np.int64]
    different: NDArray[np.int64]
    best_same: NDArray[np.float32]
    best_different: NDArray[np.float32]


class OperatingPoint(NamedTuple):
    """What searches return at one threshold, in percent.

    precision: of all images returned, the share of the query's class; None if nothing is returned.
    recall: of the images of the query's class, the share that is returned (the true accept rate).
    far: the false accept rate. answered: queries that get any image.
    empty: queries whose answer would be empty if the collection had no image of their class, as it should be then.
    """

    threshold: float
    precision: float | None
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


def verify(
    vectors: Vectors,
    labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    *,
    precision: float = PRECISION,
    threshold: float | None = None,
    shared: bool = False,
) -> Verification | None:
    """Measure ROC, equal error rate and thresholds of vectors (N, d), compared by cosine.

    Without a gallery each image is searched among the others. `precision` is the target in percent; `threshold` is one
    found on other images, to be tested on these. None if all pairs are of one class, or of two.
    """
    if not 0 < precision <= 100:
        raise DataError(f"The 'precision' parameter must lie above 0 and up to 100 percent. Got {precision} instead.")
    return summarise(count_pairs(vectors, labels, gallery, gallery_labels, shared), precision, threshold)


def summarise(pairs: Pairs, precision: float = PRECISION, threshold: float | None = None) -> Verification | None:
    """As `verify`, from counted pairs."""
    same, different = int(pairs.same.sum()), int(pairs.different.sum())
    if not same or not different:
        return None
    tar, far = _above(pairs.same) / same, _above(pairs.different) / different
    middle = int(np.argmin(np.abs(far - (1 - tar))))
    best = find_threshold(pairs, precision)
    return Verification(
        same=same,
        different=different,
        precision=precision,
        eer=50 * float(far[middle] + 1 - tar[middle]),
        # FAR falls with the threshold, so that the first threshold that is strict enough has the highest TAR
        tar={rate: 100 * float(tar[np.argmax(far <= rate)]) for rate in RATES},
        found=None if best is None else operating_point(pairs, best),
        tested=None if threshold is None else operating_point(pairs, threshold),
        roc=_curve(far, tar),
    )


@torch.no_grad()
def count_pairs(
    vectors: Vectors,
    labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    shared: bool = False,
) -> Pairs:
    """Count all pairs by similarity. No image meets itself. `shared` is as in `count_ahead`."""
    others = None if gallery is None else [unit_rows(as_matrix(gallery, "gallery"))]
    queries, target = sides([unit_rows(as_matrix(vectors))], labels, others, gallery_labels)
    other = queries if target is None else target
    total, same = (torch.zeros(2 * STEPS + 1, dtype=torch.int64) for _ in range(2))
    best = torch.full((2, len(queries.classes)), -torch.inf)  # of the own class, of another
    ours, theirs = (torch.arange(len(side.classes)).split(TILE) for side in (queries, other))
    # Without a gallery each tile also stands for the one with rows and columns exchanged.
    tiles = [(rows, columns) for rows in ours for columns in theirs if target is not None or columns[0] >= rows[0]]
    for rows, columns in distributed.share(tiles, shared):
        scores = queries.parts[0][rows] @ other.parts[0][columns].T
        alike = queries.classes[rows][:, None] == other.classes[columns]
        once = None
        if target is None and rows[0] == columns[0]:
            scores.fill_diagonal_(-torch.inf)
            once = torch.ones_like(alike).triu_(1)
        _count(total, scores if once is None else scores[once])
        _count(same, scores[alike if once is None else alike & once])
        _update(best, rows, scores, alike)
        if target is None and once is None:
            _update(best, columns, scores.T, alike.T)
    for counted in (total, same):
        distributed.sum_shares(counted, shared)
    distributed.highest_of_shares(best, shared)
    ordered = torch.empty_like(best)
    ordered[:, queries.order] = best
    return Pairs(same.numpy(), (total - same).numpy(), *ordered.numpy())


def _count(histogram: torch.Tensor, scores: torch.Tensor) -> None:
    # The product with a power of two and its floor are exact in float32; rounding may take a cosine just beyond 1.
    bins = torch.floor(scores.flatten() * STEPS).to(torch.int64).add_(STEPS).clamp_(0, 2 * STEPS)
    if len(bins):
        histogram += torch.bincount(bins, minlength=len(histogram))


def _update(best: torch.Tensor, rows: torch.Tensor, scores: torch.Tensor, alike: torch.Tensor) -> None:
    for place, hidden in enumerate((~alike, alike)):
        best[place, rows] = torch.maximum(best[place, rows], scores.masked_fill(hidden, -torch.inf).amax(1))


def _above(histogram: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pairs at least as similar as each threshold; the last threshold, above 1, is never reached."""
    counts: NDArray[np.int64] = np.append(np.cumsum(histogram[::-1])[::-1], 0)
    return counts


def find_threshold(pairs: Pairs, precision: float = PRECISION) -> float | None:
    """The lowest threshold at which precision is at least the target in percent; None if there is none."""
    right, wrong = _above(pairs.same), _above(pairs.different)
    good = (right > 0) & (100 * right >= precision * (right + wrong))
    return float(np.argmax(good) / STEPS - 1) if good.any() else None


def operating_point(pairs: Pairs, threshold: float) -> OperatingPoint:
    """What searches return at a threshold; one between two multiples of 2^-19 counts as the higher of the two."""
    place = int(np.clip(np.ceil((threshold + 1) * STEPS), 0, 2 * STEPS + 1))
    right, wrong = int(pairs.same[place:].sum()), int(pairs.different[place:].sum())
    edge = place / STEPS - 1
    answered = np.maximum(pairs.best_same, pairs.best_different) >= edge
    return OperatingPoint(
        threshold=threshold,
        precision=100 * right / (right + wrong) if right + wrong else None,
        recall=100 * right / max(1, int(pairs.same.sum())),
        far=100 * wrong / max(1, int(pairs.different.sum())),
        answered=100 * float(answered.mean()),
        empty=100 * float((pairs.best_different < edge).mean()),
    )


def _curve(far: NDArray[np.float64], tar: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points of the ROC, closer together at low false accept rates, as it is drawn on a logarithmic axis."""
    wanted = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, CURVE - 1)])
    # the first threshold, so the highest TAR, whose FAR does not exceed the wanted one
    places = len(far) - np.searchsorted(far[::-1], wanted, side="right")
    points = np.stack([far[places], tar[places]])
    return np.unique(points, axis=1)


# The thresholds that a model keeps


class Gallery(NamedTuple):
    """Images of the collection that are no queries: raw embeddings (N, d), labels, and how many each one stands for."""

    z: Vectors
    labels: Labels
    weight: int = 1


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
    reaches the target. None instead of the dictionary if no two images share a class.
    """
    matrix = as_matrix(z, "z")
    sizes = check_groups(groups, matrix.shape[1])

    def counted(learners: slice) -> Pairs:
        def vectors(raw: Vectors) -> torch.Tensor:
            return ensemble_vector(unit_parts(as_matrix(raw, "z"), sizes)[learners], weighting)

        among = count_pairs(vectors(matrix), labels)
        if others is None:
            return among
        return _joined(among, count_pairs(vectors(matrix), labels, vectors(others.z), others.labels), others.weight)

    whole = summarise(counted(slice(None)), precision)
    if whole is None:
        return None
    count = len(sizes)
    learners = [find_threshold(counted(slice(m, m + 1)), precision) for m in range(count)] if count > 1 else []
    between = [find_threshold(counted(slice(m)), precision) for m in range(2, count)]
    threshold = None if whole.found is None else whole.found.threshold
    return {
        "threshold": threshold,
        "prefixes": [*learners[:1], *between, threshold],
        "learners": learners or [threshold],
        "precision": precision,
        "part": part,
        "classes": len(np.unique(np.asarray(labels))),
        "queries": len(matrix),
        "images": len(matrix) + (0 if others is None else others.weight * len(as_matrix(others.z, "z"))),
        "measured": whole.to_dict(),
    }


def _joined(among: Pairs, beside: Pairs, weight: int) -> Pairs:
    """Pairs among the queries, which were counted once for both orders, and pairs of a query and another image."""
    return Pairs(
        2 * among.same + weight * beside.same,
        2 * among.different + weight * beside.different,
        np.maximum(among.best_same, beside.best_same),
        np.maximum(among.best_different, beside.best_different),
    )


def kept_threshold(metadata: Mapping[str, Any], learners: int | None = None, alone: bool = False) -> float | None:
    """The threshold in a model's metadata: of the whole vector, of the first learners, or of one learner alone."""
    known = metadata.get("same")
    if not known:
        return None
    row = known["learners" if alone else "prefixes"]
    value = row[-1 if learners is None else learners - 1]
    return None if value is None else float(value)


def found_on(kept: Mapping[str, Any]) -> str:
    """The images that the threshold of a model was found on, for people: "validation images (20 classes)"."""
    count = kept["classes"]
    part = "training" if kept["part"] == "train" else kept["part"]
    return f"{part} images ({count} class{'es' if count > 1 else ''})"
