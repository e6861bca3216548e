"""All measures of an ensemble, in one pass over its embeddings."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bier.errors import ConfigError
from bier.evaluate.correlation import feature_correlation, learner_correlation_matrix, mean_off_diagonal
from bier.evaluate.pairs import Progress, Scan, scan
from bier.evaluate.recall import (
    NO_POSITIVE,
    Labels,
    Ranking,
    Vectors,
    as_matrix,
    check_groups,
    check_ks,
    draw_galleries,
    encode_labels,
    recall_from_ranks,
    sides,
    unit_parts,
)
from bier.evaluate.thresholds import Verification, summarise
from bier.method.defaults import WEIGHTING, Weighting
from bier.method.equations import boosting_rates, ensemble_vector

WEIGHTINGS: tuple[Weighting, ...] = ("alpha", "sqrt")
DRAWS = 2_000  # of the classes, for the interval of a difference


class Evaluated(NamedTuple):
    """What was evaluated: raw embeddings, class numbers and each row's index in the caller's arrays."""

    z: torch.Tensor
    classes: torch.Tensor
    ids: NDArray[np.int64]
    gallery: torch.Tensor | None = None
    gallery_classes: torch.Tensor | None = None
    gallery_ids: NDArray[np.int64] | None = None

    @property
    def everything(self) -> torch.Tensor:
        return self.z if self.gallery is None else torch.cat([self.z, self.gallery])

    def compared(
        self, groups: Sequence[int], weighting: Weighting
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Test-time vectors and classes of the queries, and those of the gallery if there is one."""

        def vectors(z: torch.Tensor) -> torch.Tensor:
            return ensemble_vector(z.split(list(groups), dim=1), weighting)

        gallery = None if self.gallery is None else vectors(self.gallery)
        return vectors(self.z), self.classes, gallery, self.gallery_classes

    @property
    def all_classes(self) -> torch.Tensor:
        return self.classes if self.gallery_classes is None else torch.cat([self.classes, self.gallery_classes])


@dataclass(frozen=True, eq=False)
class EnsembleResult:
    """All numbers of one evaluation. Recall and shares are in percent; names are those of `evaluate_ensemble`."""

    groups: tuple[int, ...]
    weighting: Weighting
    recall: dict[str, dict[int, float]]
    spread: dict[str, dict[int, float]] | None  # over repeated galleries
    ranks: dict[str, NDArray[np.int64]] = field(repr=False)
    adds: tuple[float, ...]  # R@1 of prefix m minus that of prefix m-1; for the first learner its own R@1
    alone_right: tuple[float, ...]  # share of queries that this learner, and no other, gets right at rank 1
    feature_correlation: float
    learner_correlation: NDArray[np.float64] = field(repr=False)
    map_at_r: float | None
    r_precision: float | None
    queries: int
    gallery: int
    without_positive: int
    seconds: float
    test: Evaluated = field(repr=False)
    scan: Scan = field(repr=False)  # of the first gallery, where several are drawn
    same: Verification | None = None  # pairs of one class against pairs of two

    @property
    def classifier_correlation(self) -> float | None:
        """The mean over pairs of learners; None for one learner."""
        return mean_off_diagonal(self.learner_correlation)

    def to_dict(self) -> dict[str, Any]:
        """Return what `json.dump` takes."""
        result: dict[str, Any] = {
            "recall": {name: {str(k): v for k, v in row.items()} for name, row in self.recall.items()},
            "feature_correlation": self.feature_correlation,
            "classifier_correlation": self.classifier_correlation,
            "learner_correlation": self.learner_correlation.tolist(),
            "adds": list(self.adds),
            "alone_right": list(self.alone_right),
            "map_at_r": self.map_at_r,
            "r_precision": self.r_precision,
            "groups": list(self.groups),
            "weighting": self.weighting,
            "queries": self.queries,
            "gallery": self.gallery,
            "without_positive": self.without_positive,
            "seconds": self.seconds,
        }
        if self.same is not None:
            result["same"] = self.same.to_dict()
        if self.spread is not None:
            result["spread"] = {name: {str(k): v for k, v in row.items()} for name, row in self.spread.items()}
        return result


def evaluate_ensemble(
    z: Vectors,
    groups: Sequence[int],
    labels: Labels,
    ks: Iterable[int],
    *,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    repeats: int | None = None,
    seed: int = 0,
    weighting: Weighting = WEIGHTING,
    ranking: bool = True,
    threshold: float | None = None,
    progress: Progress | None = None,
) -> EnsembleResult:
    """Measure an ensemble from its raw embeddings `z` (N, d), whose columns `groups` splits into learners.

    Names of the rows: `ensemble` (by `weighting`), `ensemble-alpha` and `ensemble-sqrt`, `learner-m`, and `prefix-m`,
    the first m learners as an ensemble of m by its own alphas, so that `prefix-M` is `ensemble`. One learner alone has
    `ensemble` and `learner-1` only. `repeats` asks for that many random galleries (VehicleID); the queries of all of
    them then count together. `threshold` is a similarity above which images count as the same, to be tested here.
    `ranking=False` leaves out mAP@R, R-Precision and the ROC.
    """
    started = time.perf_counter()
    if weighting not in WEIGHTINGS:
        raise ConfigError(f"The 'weighting' parameter must be one of {WEIGHTINGS}. Got {weighting!r} instead.")
    values = check_ks(ks)
    tests = _test_sets(z, labels, gallery, gallery_labels, repeats, seed)
    sizes = check_groups(groups, tests[0].z.shape[1])
    scans = _scans(tests, sizes, weighting, ranking, progress)
    ranks = _named_ranks(scans, len(sizes), weighting)
    recall = {name: recall_from_ranks(row, values) for name, row in ranks.items()}
    everything, rates = tests[0].everything, Ranking.of(*scans) if ranking else None
    return EnsembleResult(
        groups=sizes,
        weighting=weighting,
        recall=recall,
        spread=_spread(ranks, values, len(tests)) if repeats else None,
        ranks=ranks,
        adds=_adds(ranks, len(sizes)),
        alone_right=_alone_right(ranks, len(sizes)),
        feature_correlation=feature_correlation(everything),
        learner_correlation=learner_correlation_matrix(everything, sizes),
        map_at_r=None if rates is None else rates.map_at_r,
        r_precision=None if rates is None else rates.r_precision,
        queries=len(tests[0].z),
        gallery=len(tests[0].z if tests[0].gallery is None else tests[0].gallery),
        without_positive=int(np.sum(ranks["ensemble"][: len(tests[0].z)] == NO_POSITIVE)),
        same=summarise(scans[0], threshold=threshold) if ranking else None,
        scan=scans[0],
        seconds=time.perf_counter() - started,
        test=tests[0],
    )


def _test_sets(
    z: Vectors, labels: Labels, gallery: Vectors | None, gallery_labels: Labels | None, repeats: int | None, seed: int
) -> list[Evaluated]:
    matrix = as_matrix(z, "z")
    ids = np.arange(len(matrix), dtype=np.int64)
    if repeats is not None:
        if gallery is not None:
            raise ConfigError("The 'repeats' parameter draws the gallery itself. Got a 'gallery' as well.")
        codes, _ = encode_labels(labels, len(matrix))
        masks = draw_galleries(labels, len(matrix), repeats, seed)
        return [Evaluated(matrix[~g], codes[~g], ids[~g], matrix[g], codes[g], ids[g]) for g in masks]
    others = None if gallery is None else as_matrix(gallery, "gallery")
    codes, gallery_codes = encode_labels(labels, len(matrix), gallery_labels, 0 if others is None else len(others))
    return [
        Evaluated(
            matrix,
            codes,
            ids,
            others,
            gallery_codes,
            None if others is None else np.arange(len(others), dtype=np.int64),
        )
    ]


def _score_weights(learners: int, weighting: Weighting) -> list[float]:
    """What each learner's cosine weighs in the dot product of two test-time vectors."""
    _, alpha = boosting_rates(learners)
    return [a * a if weighting == "alpha" else a for a in alpha]


def _variants(learners: int, weighting: Weighting) -> dict[str, list[float]]:
    rows = {}
    if learners > 1:
        rows = {f"ensemble-{name}": _score_weights(learners, name) for name in WEIGHTINGS}
    rows |= {f"learner-{m + 1}": [float(m == n) for n in range(learners)] for m in range(learners)}
    for m in range(2, learners):
        rows[f"prefix-{m}"] = _score_weights(m, weighting) + [0.0] * (learners - m)
    return rows


def _scans(
    tests: list[Evaluated], sizes: tuple[int, ...], weighting: Weighting, ranking: bool, progress: Progress | None
) -> list[Scan]:
    """One for each gallery; MAP@R and the pairs are those of the ensemble."""
    variants = _variants(len(sizes), weighting)
    main = list(variants).index("learner-1" if len(sizes) == 1 else f"ensemble-{weighting}")
    weights = torch.tensor(list(variants.values()), dtype=torch.float64)
    scans = []
    for number, test in enumerate(tests):
        others = None if test.gallery is None else unit_parts(test.gallery, sizes)
        queries, gallery = sides(unit_parts(test.z, sizes), test.classes, others, test.gallery_classes)
        scans.append(
            scan(
                queries,
                gallery,
                weights,
                main=main,
                ranking=ranking,
                count_pairs=ranking and number == 0,
                progress=_share(progress, number, len(tests)),
            )
        )
    return scans


def _named_ranks(scans: list[Scan], learners: int, weighting: Weighting) -> dict[str, NDArray[np.int64]]:
    counted = torch.cat([found.ranks for found in scans], dim=1).numpy()
    ranks = dict(zip(_variants(learners, weighting), counted, strict=True))
    if learners == 1:
        return {"ensemble": ranks["learner-1"], **ranks}
    ensemble = ranks[f"ensemble-{weighting}"]
    return {"ensemble": ensemble, **ranks, f"prefix-{learners}": ensemble}


def _share(progress: Progress | None, number: int, count: int) -> Progress | None:
    if progress is None or count == 1:
        return progress
    return lambda done, total: progress(number * total + done, count * total)


def _spread(found: dict[str, NDArray[np.int64]], ks: Sequence[int], repeats: int) -> dict[str, dict[int, float]]:
    result = {}
    for name, row in found.items():
        runs = [recall_from_ranks(part, ks) for part in np.split(row, repeats)]
        result[name] = {k: float(np.std([run[k] for run in runs])) for k in ks}
    return result


def _adds(found: dict[str, NDArray[np.int64]], learners: int) -> tuple[float, ...]:
    names = ["learner-1"] + [f"prefix-{m}" for m in range(2, learners + 1)]
    first = [recall_from_ranks(found[name], [1])[1] for name in names]
    return tuple(np.diff(first, prepend=0.0).tolist())


def _alone_right(found: dict[str, NDArray[np.int64]], learners: int) -> tuple[float, ...]:
    right = np.stack([found[f"learner-{m + 1}"] == 0 for m in range(learners)])
    alone = right & (right.sum(0) == 1)
    return tuple((100.0 * alone.mean(axis=1)).tolist())


class Interval(NamedTuple):
    """A difference in points, and where it lies for 95% of the draws of the classes."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


class Difference(NamedTuple):
    """How much better one result is than another on the same queries; R@1 and MAP@R in points."""

    recall: Interval
    map_at_r: Interval | None

    def to_dict(self) -> dict[str, Any]:
        return {name: value and value._asdict() for name, value in self._asdict().items()}


def difference(result: EnsembleResult, other: EnsembleResult) -> Difference | None:
    """`result` minus `other` by a paired bootstrap over classes; None where their queries are not the same ones.

    Both are measured on the same drawn classes each time, so that what is hard for both does not blur the difference.
    Classes are drawn and not images, because those of one class are right or wrong together.
    """
    classes, ranks = result.test.classes, [one.ranks["ensemble"] for one in (result, other)]
    if not torch.equal(classes, other.test.classes) or any(len(row) != len(classes) for row in ranks):
        return None  # other images, or several galleries
    _, codes = np.unique(classes.numpy(), return_inverse=True)
    images = np.bincount(codes)
    if len(images) < 2:
        return None

    def interval(points: NDArray[np.float64]) -> Interval:
        sums, generator = np.bincount(codes, points), np.random.default_rng(0)
        drawn = np.empty(DRAWS)
        for draw in range(DRAWS):
            chosen = generator.integers(len(images), size=len(images))
            drawn[draw] = sums[chosen].sum() / images[chosen].sum()
        return Interval(float(points.mean()), *np.quantile(drawn, (0.025, 0.975)).tolist())

    recall = interval(100.0 * (ranks[0] == 0) - 100.0 * (ranks[1] == 0))
    precisions = [one.scan.average_precision for one in (result, other)]
    if precisions[0] is None or precisions[1] is None:
        return Difference(recall, None)
    return Difference(recall, interval(100.0 * (precisions[0] - precisions[1]).numpy()))
