"""mAP@R and R-Precision against pytorch-metric-learning, and neighbours against a full sort."""

import numpy as np
import pytest
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from bier.evaluate import recall
from bier.evaluate.recall import nearest, rank_r


def clustered(seed, count, classes, dimension=16, noise=1.0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % classes)
    vectors = rng.standard_normal((classes, dimension))[labels] + noise * rng.standard_normal((count, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


def referee(vectors, labels, gallery=None, gallery_labels=None):
    import torch

    calculator = AccuracyCalculator(include=("mean_average_precision_at_r", "r_precision"), device=torch.device("cpu"))
    arrays = [torch.from_numpy(a) for a in (vectors, labels, gallery, gallery_labels) if a is not None]
    result = calculator.get_accuracy(*arrays)
    return 100 * result["mean_average_precision_at_r"], 100 * result["r_precision"]


@pytest.mark.parametrize(("count", "classes"), [(400, 40), (300, 7), (90, 45)])
def test_same_as_pytorch_metric_learning(count, classes, monkeypatch):
    vectors, labels = clustered(0, count, classes)
    monkeypatch.setattr(recall, "BLOCK", 13 * count)
    found = rank_r(vectors, labels)
    assert found == pytest.approx(referee(vectors, labels), abs=1e-4)  # percent: 1e-6 of the measure
    assert 5 < found.map_at_r <= found.r_precision < 95


def test_same_as_pytorch_metric_learning_with_a_gallery():
    vectors, labels = clustered(1, 500, 30)
    queries, gallery = slice(0, 200), slice(200, 500)
    arguments = (vectors[queries], labels[queries], vectors[gallery], labels[gallery])
    assert rank_r(*arguments) == pytest.approx(referee(*arguments), abs=1e-4)


def test_by_hand():
    # Seen from 0°: 10° (positive), 20° (negative), 30° (positive). R = 2: the answers are right, wrong.
    angles = np.deg2rad([0, 10, 20, 30])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    labels = [5, 5, 9, 5]
    queries, gallery = vectors[:1], vectors[1:]
    assert rank_r(queries, labels[:1], gallery, labels[1:]) == pytest.approx((50.0, 50.0))
    assert rank_r(vectors[:1], [1], gallery, labels[1:]) == (0, 0)


def test_ties_count_against_the_query():
    vectors = np.array([[1, 0], [1, 0], [1, 0]], dtype=np.float32)
    assert rank_r(vectors, [0, 0, 1]) == (0, 0)


def test_a_query_without_a_positive_scores_nothing():
    vectors, labels = clustered(2, 60, 10)
    alone = np.concatenate([labels, [99]])
    whole = rank_r(np.concatenate([vectors, -vectors[:1]]), alone)
    assert whole.r_precision == pytest.approx(rank_r(vectors, labels).r_precision * 60 / 61, rel=0.05)
    assert rank_r(vectors, np.arange(60)) == (0, 0)


def test_progress_reaches_its_total(monkeypatch):
    vectors, labels = clustered(3, 100, 10)
    monkeypatch.setattr(recall, "BLOCK", 3000)
    seen = []
    rank_r(vectors, labels, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(30, 100), (60, 100), (90, 100), (100, 100)]


def test_nearest_is_a_full_sort_without_the_query(monkeypatch):
    vectors, _ = clustered(4, 70, 10)
    monkeypatch.setattr(recall, "BLOCK", 200)
    queries = np.array([3, 69, 0, 12])
    found = nearest(vectors, queries, 5)
    for row, query in enumerate(queries):
        scores = vectors @ vectors[query]
        scores[query] = -9
        assert found.indices[row].tolist() == np.argsort(-scores)[:5].tolist()
    assert nearest(vectors, queries, 500).indices.shape == (4, 69)
    assert nearest(vectors, queries, 3, gallery=vectors).indices[:, 0].tolist() == queries.tolist()
    assert nearest(vectors, np.array([], dtype=np.int64), 3).indices.shape == (0, 3)
