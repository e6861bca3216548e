"""The one scan against naive loops in float64 and pytorch-metric-learning, and neighbours against a full sort."""

import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from bier.evaluate import pairs, recall
from bier.evaluate.pairs import Scan, bin_edges, scan
from bier.evaluate.recall import as_matrix, nearest, rank_r, sides


@pytest.fixture(params=["float64", "bytes", "float32"])
def way(request, monkeypatch):
    """Small sets are multiplied in float64; here also as large ones are, with tiles that fit nothing."""
    if request.param != "float64":
        if request.param == "bytes" and not pairs.has_byte_products():
            pytest.skip("this processor has no products of 8-bit integers")
        for name, value in {
            "DENSE": 0,
            "COUNTED": 20_000,
            "ROWS": 64,
            "TILE": 100,
            "SAMPLE": 50,
            "BLOCK": 9999,
        }.items():
            monkeypatch.setattr(pairs, name, value)
        monkeypatch.setattr(pairs, "has_byte_products", lambda: request.param == "bytes")
    return request.param


def scanned(vectors, labels, gallery=None, gallery_labels=None, **options) -> Scan:
    others = None if gallery is None else [as_matrix(gallery)]
    queries, target = sides([as_matrix(vectors)], labels, others, gallery_labels)
    return scan(queries, target, torch.ones(1, 1, dtype=torch.float64), ranking=True, **options)


def naive(vectors, labels, gallery=None, gallery_labels=None):
    """(rank, average precision, R-Precision) of each query, one after the other in float64, as the definitions say."""
    alone, rows = gallery is None, []
    tie = 2e-6 * pairs.ROUNDING * (vectors.shape[1] ** 0.5 + 2)  # about 1e-12
    gallery, gallery_labels = (vectors, labels) if alone else (gallery, gallery_labels)
    scores = vectors.astype(np.float64) @ gallery.astype(np.float64).T
    for i, row in enumerate(scores):
        others = np.arange(len(row)) != i if alone else np.ones(len(row), bool)
        positives = np.sort(row[others & (gallery_labels == labels[i])])[::-1]
        negatives = row[gallery_labels != labels[i]]
        places = np.array([k + (negatives >= value - tie).sum() for k, value in enumerate(positives, start=1)])
        right = places <= len(positives)
        count = max(1, len(positives))
        average = (right * np.arange(1, len(positives) + 1) / np.maximum(places, 1)).sum() / count
        rows.append((places[0] - 1 if len(positives) else -1, average, right.sum() / count))
    return np.array(rows)


@pytest.mark.parametrize("classes", [150, 40, 3, 600])
@pytest.mark.parametrize("kind", ["ordinary", "alike", "many ties"])
@pytest.mark.parametrize("galleries", [False, True])
def test_ranks_and_precisions_are_those_of_a_naive_loop(way, classes, kind, galleries):
    rng = np.random.default_rng(classes)
    labels = rng.integers(0, classes, 600)
    vectors = 0.7 * rng.standard_normal((classes, 24))[labels] + rng.standard_normal((600, 24))
    if kind == "many ties":
        vectors = np.round(vectors)
    else:
        if kind == "alike":  # mean cosine 0.999999
            vectors = 1 + 1e-3 * vectors
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors.astype(np.float32)
    arguments = (vectors[:200], labels[:200], vectors[200:], labels[200:]) if galleries else (vectors, labels)
    found, expected = scanned(*arguments), naive(*arguments)
    assert (found.ranks[0].numpy() == expected[:, 0]).all()
    np.testing.assert_allclose(found.average_precision, expected[:, 1], atol=1e-12)
    np.testing.assert_allclose(found.r_precision, expected[:, 2], atol=1e-12)


def test_embeddings_that_are_all_alike_are_told_apart(way):
    """Mean cosine 0.9999999: differences that float32 products cannot hold, but the vectors do."""
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 60
    vectors = (1 + 2e-3 * (rng.standard_normal((60, 64))[labels] + 0.05 * rng.standard_normal((300, 64)))).astype(
        np.float32
    )
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    expected = naive(vectors, labels)
    assert expected[:, 1].mean() > 0.95
    assert rank_r(vectors, labels) == pytest.approx(tuple(100 * expected[:, 1:].mean(0)))


def test_pairs_rivals_and_best_matches_are_those_of_a_naive_loop(way):
    vectors, labels = clustered(3, 400, 20)
    found = scanned(vectors, labels, count_pairs=True)
    scores = vectors.astype(np.float64)
    scores /= np.linalg.norm(scores, axis=1, keepdims=True)
    scores = scores @ scores.T
    np.fill_diagonal(scores, -np.inf)
    alike = labels[:, None] == labels
    assert found.pairs is not None
    np.testing.assert_allclose(found.best_same, np.where(alike, scores, -np.inf).max(1), atol=1e-6)
    strangers = np.where(alike, -np.inf, scores)
    np.testing.assert_allclose(found.rival_score, strangers.max(1), atol=1e-4)
    assert (found.rival.numpy() == strangers.argmax(1)).mean() > 0.99  # nearly equal ones may change places
    if way == "float64":
        assert found.pairs.queries == 400
        rows = np.arange(400)
    else:
        assert found.pairs.queries < 400  # some of the queries, each against all images
        assert found.pairs.same.sum() + found.pairs.different.sum() == 399 * found.pairs.queries
        return
    for histogram, kind in ((found.pairs.same, alike), (found.pairs.different, ~alike)):
        distances = np.sort(1 - scores[rows][kind[rows] & np.isfinite(scores)])
        bins = np.flatnonzero(histogram)
        edges = np.repeat(bin_edges(bins), histogram[bins])
        assert (distances <= edges * (1 + 1e-6)).all()
        assert (distances >= edges * (1 - 2**-16)).all()


def clustered(seed, count, classes, dimension=16, noise=1.0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % classes)
    vectors = rng.standard_normal((classes, dimension))[labels] + noise * rng.standard_normal((count, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


def referee(vectors, labels, gallery=None, gallery_labels=None):
    calculator = AccuracyCalculator(include=("mean_average_precision_at_r", "r_precision"), device=torch.device("cpu"))
    arrays = [torch.from_numpy(a) for a in (vectors, labels, gallery, gallery_labels) if a is not None]
    result = calculator.get_accuracy(*arrays)
    return 100 * result["mean_average_precision_at_r"], 100 * result["r_precision"]


@pytest.mark.parametrize(("count", "classes"), [(400, 40), (300, 7), (90, 45)])
def test_same_as_pytorch_metric_learning(way, count, classes):
    vectors, labels = clustered(0, count, classes)
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
    monkeypatch.setattr(pairs, "BLOCK", 3000)
    seen = []
    rank_r(vectors, labels, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


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
