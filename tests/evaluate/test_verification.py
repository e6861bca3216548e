"""ROC, equal error rate and thresholds against a naive count of every pair."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bier.errors import DataError
from bier.evaluate import verification
from bier.evaluate.verification import (
    STEPS,
    Gallery,
    Pairs,
    count_pairs,
    find_threshold,
    kept_threshold,
    model_thresholds,
    operating_point,
    summarise,
    verify,
)

Scored = list[tuple[float, bool]]


def cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


def some(
    seed: int, count: int = 60, classes: int = 6, noise: float = 0.9, size: int = 8
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count)
    vectors = random.normal(size=(classes, size))[labels] + noise * random.normal(size=(count, size))
    return vectors.astype(np.float32), labels


def signs(seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Vectors of 64 signs: every cosine is a multiple of 1/32, exactly, and many are equal."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 6, 60)
    flipped = random.random((60, 64)) < 0.2
    return np.where(flipped, -1, 1).astype(np.float32) * random.choice([-1, 1], (6, 64))[labels].astype(
        np.float32
    ), labels


def naive_pairs(vectors: NDArray[np.float32], labels: NDArray[np.int64]) -> Scored:
    rows = vectors.astype(np.float64)
    return [(cosine(rows[i], rows[j]), bool(labels[i] == labels[j])) for i, j in combinations(range(len(rows)), 2)]


def rates(pairs: Scored, threshold: float) -> tuple[float, float, float]:
    """(TAR, FAR, precision) of a threshold, one pair after the other."""
    right = sum(same and score >= threshold for score, same in pairs)
    wrong = sum(not same and score >= threshold for score, same in pairs)
    same_pairs = sum(same for _, same in pairs)
    return right / same_pairs, wrong / (len(pairs) - same_pairs), right / max(1, right + wrong)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tile", [7, 2048])
def test_counts_are_those_of_every_pair(seed: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "TILE", tile)
    vectors, labels = some(seed)
    vectors[5] = 0  # scores 0 with everything
    pairs = count_pairs(vectors, labels)
    for same, histogram in ((True, pairs.same), (False, pairs.different)):
        places = [
            int(np.floor(score * STEPS)) + STEPS for score, alike in naive_pairs(vectors, labels) if alike == same
        ]
        assert histogram.sum() == len(places)
        # a float32 product may fall into the next step
        assert np.abs(np.sort(np.repeat(np.arange(len(histogram)), histogram)) - np.sort(places)).max() <= 1
    rows = vectors.astype(np.float64)
    for i in range(len(rows)):
        others = [(cosine(rows[i], rows[j]), labels[i] == labels[j]) for j in range(len(rows)) if j != i]
        assert pairs.best_same[i] == pytest.approx(max(score for score, same in others if same), abs=1e-6)
        assert pairs.best_different[i] == pytest.approx(max(score for score, same in others if not same), abs=1e-6)


@pytest.mark.parametrize("tile", [11, 2048])
def test_a_gallery(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "TILE", tile)
    vectors, labels = some(3, 50)
    pairs = count_pairs(vectors[:20], labels[:20], vectors[20:], labels[20:])
    rows = vectors.astype(np.float64)
    scores = np.array([[cosine(a, b) for b in rows[20:]] for a in rows[:20]])
    alike = labels[:20, None] == labels[None, 20:]
    assert (pairs.same.sum(), pairs.different.sum()) == (alike.sum(), (~alike).sum())
    np.testing.assert_allclose(pairs.best_different, np.where(alike, -np.inf, scores).max(1), atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_rates_and_thresholds_are_those_of_a_naive_search(seed: int) -> None:
    vectors, labels = signs(seed)
    pairs = naive_pairs(vectors, labels)
    scores = sorted({score for score, _ in pairs})
    found = verify(vectors, labels, precision=90)
    assert found is not None
    assert found.same + found.different == len(pairs) == 60 * 59 // 2
    table = [(score, *rates(pairs, score)) for score in scores]  # every threshold that changes anything is a score
    closest = min(table, key=lambda row: abs(row[2] - (1 - row[1])))
    assert found.eer == pytest.approx(50 * (closest[2] + 1 - closest[1]), abs=1e-9)
    for rate, value in found.tar.items():
        allowed = [row[1] for row in table if row[2] <= rate]
        assert value == pytest.approx(100 * max(allowed, default=0.0))
    lowest = next(row for row in table if row[3] >= 0.9)
    assert found.found is not None
    assert found.found.precision == pytest.approx(100 * lowest[3])
    assert found.found.recall == pytest.approx(100 * lowest[1])
    assert found.found.far == pytest.approx(100 * lowest[2])
    below = max((score for score in scores if score < found.found.threshold), default=-1.0)
    assert below < found.found.threshold <= lowest[0]
    for far, tar in found.roc.T:
        assert any(tar == pytest.approx(row[1]) and far == pytest.approx(row[2]) for row in [*table, (0, 0, 0, 0)])


def test_the_area_under_the_roc_is_that_of_the_ranks() -> None:
    vectors, labels = some(7, 80)
    pairs = naive_pairs(vectors, labels)
    same, different = ([score for score, alike in pairs if alike == kind] for kind in (True, False))
    wins = np.mean([a > b for a in same for b in different])
    found = verify(vectors, labels)
    assert found is not None
    assert np.trapezoid(found.roc[1], found.roc[0]) == pytest.approx(wins, abs=0.01)


def test_what_a_search_returns_at_a_threshold() -> None:
    vectors, labels = some(2)
    pairs = count_pairs(vectors, labels)
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = unit @ unit.T
    np.fill_diagonal(scores, -2)
    for threshold in (-1.0, 0.2, 0.7, 1.01):
        returned, right, answered, empty, alike = 0, 0, 0, 0, 0
        for i, row in enumerate(scores):  # search with every image in turn
            above = row >= threshold
            returned += above.sum()
            right += (above & (labels == labels[i])).sum()
            alike += (labels == labels[i]).sum() - 1
            answered += bool(above.any())
            empty += not (above & (labels != labels[i])).any()  # had the collection no image of its class
        found = operating_point(pairs, threshold)
        assert found.precision == (pytest.approx(100 * right / returned) if returned else None)
        assert found.recall == pytest.approx(100 * right / alike)
        assert (found.answered, found.empty) == (pytest.approx(100 * answered / 60), pytest.approx(100 * empty / 60))


def test_corner_cases() -> None:
    vectors, labels = some(0)
    assert verify(vectors, np.zeros(60, int)) is None  # no pair of two classes
    assert verify(vectors, np.arange(60)) is None  # no pair of one class
    with pytest.raises(DataError, match="'precision' parameter must lie above 0"):
        verify(vectors, labels, precision=0)
    # an identical image of another class is above every threshold: 95% cannot be reached
    twins = verify(np.repeat(vectors[:2], 2, axis=0), ["a", "b", "a", "b"])
    assert twins is not None
    assert twins.found is None
    json.dumps(twins.to_dict(), allow_nan=False)


def test_a_gallery_ten_times_as_large_needs_a_higher_threshold() -> None:
    vectors, labels = some(1, 60, noise=0.7)
    pairs = count_pairs(vectors, labels)
    larger = Pairs(pairs.same, 10 * pairs.different, pairs.best_same, pairs.best_different)
    low, high = find_threshold(pairs, 90), find_threshold(larger, 90)
    assert low is not None
    assert high is not None
    assert high > low
    assert operating_point(larger, high).far <= operating_point(pairs, low).far


def test_the_thresholds_of_a_model_are_those_of_its_vectors() -> None:
    """Every prefix and every learner has its own; queries are searched among each other and the others."""
    z, labels = some(5, 90, size=16)
    groups = (4, 4, 8)
    kept = model_thresholds(
        z[:50], labels[:50], Gallery(z[50:], labels[50:], 3), groups, "sqrt", part="validation", precision=80
    )
    assert kept is not None
    json.dumps(kept, allow_nan=False)
    assert (kept["part"], kept["queries"], kept["images"], kept["precision"]) == ("validation", 50, 50 + 3 * 40, 80)
    alphas = {1: [1.0], 2: [1 / 3, 2 / 3], 3: [1 / 6, 2 / 6, 3 / 6]}
    parts = [part.astype(np.float64) for part in np.split(z, [4, 8], axis=1)]
    cosines = [np.array([[cosine(a, b) for b in part] for a in part]) for part in parts]
    pairs = [(i, j) for i in range(50) for j in range(90) if i != j]
    alike = np.array([labels[i] == labels[j] for i, j in pairs])
    counts = np.array([3 if j >= 50 else 1 for _, j in pairs])

    def naive(learners: list[int]) -> float | None:
        mixed = sum(weight * cosines[m] for m, weight in zip(learners, alphas[len(learners)], strict=True))
        scores = np.array([mixed[i, j] for i, j in pairs])
        for threshold in sorted(set(scores)):
            above = scores >= threshold
            if (counts * (above & alike)).sum() >= 0.8 * (counts * above).sum():
                return float(threshold)
        return None

    for row, sets in ((kept["prefixes"], ([0], [0, 1], [0, 1, 2])), (kept["learners"], ([0], [1], [2]))):
        for value, learners in zip(row, sets, strict=True):
            expected = naive(learners)
            assert value is not None
            assert expected is not None
            assert expected - 0.02 < value < expected + 1e-5  # at most one score below the naive one
    assert kept["threshold"] == kept["prefixes"][-1] == kept_threshold({"same": kept})
    assert kept_threshold({"same": kept}, 2) == kept["prefixes"][1]
    assert kept_threshold({"same": kept}, 2, alone=True) == kept["learners"][1]
    assert kept_threshold({}) is None
    assert model_thresholds(z, np.arange(90), None, groups, "sqrt", part="train") is None
    json.dumps(summarise(count_pairs(z, labels)).to_dict())  # type: ignore[union-attr]


@pytest.mark.slow
def test_on_real_groceries_a_missing_class_gives_an_empty_answer(shared_data: Path) -> None:
    """Real photographs: found on training and validation classes; each query's class is taken out of the test part."""
    import bier
    from bier.config import Config
    from bier.data import load
    from bier.evaluate.dataset import find_same

    settings = {"data.name": "folder", "data.root": str(shared_data / "grocery"), "data.validation": 0.2}
    dataset = load(Config().with_settings(settings).data)
    model = bier.pretrained("efficientnet_lite0")
    kept = find_same(model, dataset)
    assert kept is not None
    test = dataset["test"]
    vectors = model.encode(list(test.images))
    found = operating_point(count_pairs(vectors, test.labels), kept["threshold"])
    assert found.empty >= 80
    assert found.precision is not None
    assert found.precision >= 75
    assert found.answered >= 40
