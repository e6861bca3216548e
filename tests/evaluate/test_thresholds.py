"""ROC, equal error rate and thresholds against a naive count of every pair."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bier.errors import DataError
from bier.evaluate.pairs import Scan, scan
from bier.evaluate.recall import as_matrix, sides
from bier.evaluate.thresholds import (
    LEAST_CLASSES,
    Gallery,
    kept_threshold,
    match_threshold,
    model_thresholds,
    operating_point,
    summarise,
    verify,
    why_none,
)
from bier.method.equations import unit_rows

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


def counted(vectors: NDArray[np.float32], labels: NDArray[np.int64]) -> Scan:
    queries, _ = sides([unit_rows(as_matrix(vectors))], labels)
    return scan(queries, None, torch.ones(1, 1, dtype=torch.float64), count_pairs=True)


@pytest.mark.parametrize("seed", range(4))
def test_rates_and_thresholds_are_those_of_a_naive_search(seed: int) -> None:
    vectors, labels = signs(seed)
    pairs = naive_pairs(vectors, labels)
    scores = sorted({score for score, _ in pairs})
    found = verify(vectors, labels, precision=90)
    assert found is not None
    assert found.same + found.different == 2 * len(pairs) == 60 * 59
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
    pairs = counted(vectors, labels)
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


def drawn_classes(seed: int, classes: int, noise: float = 0.5) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Ten images of each class; how far they scatter differs from class to class."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), 10)
    scatter = noise * random.uniform(0.5, 1.5, classes)[labels, None]
    vectors = random.normal(size=(classes, 24))[labels] + scatter * random.normal(size=(len(labels), 24))
    return vectors.astype(np.float32), labels


def precision_with_unknown(vectors: NDArray[np.float32], labels: NDArray[np.int64], threshold: float) -> float:
    """Search with every image, once in the whole collection and once in one without its class."""
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = unit @ unit.T
    np.fill_diagonal(scores, -np.inf)
    right = wrong = 0
    for i, row in enumerate(scores):
        above, alike = row >= threshold, labels == labels[i]
        right += (above & alike).sum()
        wrong += 2 * (above & ~alike).sum()
    return 100 * right / (right + wrong)


def test_the_promise_is_kept_on_other_classes() -> None:
    """Found on 40 classes, tested on 40 others: the share of right answers is at least what was promised."""
    kept = 0
    for seed in range(20):
        vectors, labels = drawn_classes(seed, 80, noise=1.0)
        first = labels < 40
        found = match_threshold(torch.from_numpy(vectors[first]), torch.from_numpy(labels[first]), precision=90)
        assert found is not None
        assert found.low >= 90
        assert found.low <= found.precision <= found.high
        measured = precision_with_unknown(vectors[first], labels[first], found.threshold)
        assert measured == pytest.approx(found.precision, abs=0.1)  # a pair at the threshold
        kept += precision_with_unknown(vectors[~first], labels[~first], found.threshold) >= 90 - 3
    assert kept >= 18


def test_little_evidence_gives_no_threshold() -> None:
    vectors, labels = drawn_classes(0, LEAST_CLASSES, noise=0.2)
    enough = match_threshold(torch.from_numpy(vectors), torch.from_numpy(labels))
    assert enough is not None
    fewer = labels < LEAST_CLASSES - 1
    assert match_threshold(torch.from_numpy(vectors[fewer]), torch.from_numpy(labels[fewer])) is None
    alone = np.where(labels == 0, 100 + np.arange(len(labels)), labels)  # a class whose images have nobody
    assert match_threshold(torch.from_numpy(vectors), torch.from_numpy(alone)) is None
    noise = np.random.default_rng(0).normal(size=vectors.shape).astype(np.float32)
    assert match_threshold(torch.from_numpy(noise), torch.from_numpy(labels)) is None
    record = model_thresholds(vectors[fewer], labels[fewer], None, (24,), "sqrt", part="validation")
    assert record is not None
    assert (record["threshold"], record["prefixes"], record["expected"]) == (None, [None], None)
    assert "takes 20 validation classes, and it was trained with 19" in why_none(record)


def test_images_beside_the_queries_count_for_as_many_as_they_stand_for() -> None:
    vectors, labels = drawn_classes(3, 60, noise=0.7)
    queries = labels < 30
    ours, theirs = torch.from_numpy(vectors[queries]), torch.from_numpy(vectors[~queries])
    codes = torch.from_numpy(labels)
    found = [
        match_threshold(ours, codes[queries], (theirs, codes[~queries], weight), precision=90) for weight in (1, 4)
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].threshold < found[1].threshold  # the larger collection has more that looks alike


def test_the_thresholds_of_a_model_are_those_of_its_vectors() -> None:
    """Every prefix and every learner has its own."""
    z, labels = drawn_classes(5, 40)
    groups, others = (4, 8, 12), labels >= 30
    kept = model_thresholds(
        z[~others], labels[~others], Gallery(z[others], labels[others], 3), groups, "sqrt", part="validation"
    )
    assert kept is not None
    json.dumps(kept, allow_nan=False)
    assert (kept["part"], kept["classes"], kept["queries"], kept["images"]) == ("validation", 30, 300, 600)
    assert kept["threshold"] == kept["prefixes"][-1] == kept_threshold({"same": kept})
    assert kept["prefixes"][0] == kept["learners"][0]
    alphas = {2: [1 / 3, 2 / 3], 3: [1 / 6, 2 / 6, 3 / 6]}
    parts = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in np.split(z, [4, 12], axis=1)]
    for learners in (2, 3):
        vectors = np.hstack([a**0.5 * part for a, part in zip(alphas[learners], parts, strict=False)])
        beside = (torch.from_numpy(vectors[others]), torch.from_numpy(labels[others]), 3)
        expected = match_threshold(torch.from_numpy(vectors[~others]), torch.from_numpy(labels[~others]), beside)
        value = kept_threshold({"same": kept}, learners)
        assert value == (None if expected is None else pytest.approx(expected.threshold, abs=1e-6))
    assert kept["threshold"] is not None
    assert kept_threshold({"same": kept}, 3, alone=True) == kept["learners"][2]
    assert kept_threshold({}) is None
    assert model_thresholds(z, np.arange(400), None, groups, "sqrt", part="train") is None
    json.dumps(summarise(counted(z, labels)).to_dict())  # type: ignore[union-attr]


@pytest.mark.slow
def test_on_real_groceries_a_missing_class_gives_an_empty_answer(shared_data: Path) -> None:
    """Real photographs: found on training and validation classes; each query's class is taken out of the test part."""
    import bier
    from bier.config import Config
    from bier.data import load
    from bier.evaluate.dataset import find_same

    settings = {"data.name": "folder", "data.root": str(shared_data / "grocery"), "data.validation": 0.5}
    dataset = load(Config().with_settings(settings).data)
    model = bier.pretrained("efficientnet_lite0")
    kept = find_same(model, dataset)
    assert kept is not None
    test = dataset["test"]
    vectors = model.encode(list(test.images))
    found = operating_point(counted(vectors, test.labels), kept["threshold"])
    assert found.empty >= 80
    assert found.precision_with_unknown is not None
    assert found.precision_with_unknown >= 92
