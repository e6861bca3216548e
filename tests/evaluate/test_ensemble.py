"""The one pass over an ensemble against one evaluation at a time."""

import json

import numpy as np
import pytest
import torch

from bier.errors import BierError
from bier.evaluate.ensemble import difference, evaluate_ensemble
from bier.evaluate.recall import draw_galleries, rank_r, ranks, recall_at_k
from bier.method.ensemble import EmbeddingEnsemble

GROUPS = (4, 6, 10)
KS = (1, 2, 4)


@pytest.fixture(scope="module")
def embeddings():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(240) % 40)
    z = rng.standard_normal((40, 20))[labels] + 1.3 * rng.standard_normal((240, 20))
    return z.astype(np.float32), labels


@pytest.fixture(scope="module")
def result(embeddings):
    return evaluate_ensemble(embeddings[0], GROUPS, embeddings[1], KS)


def vector(z, weighting="sqrt", learners=None):
    with torch.no_grad():
        return EmbeddingEnsemble(3, GROUPS).vector(torch.from_numpy(z), weighting, learners)


def learner(z, m):
    part = np.split(z, np.cumsum(GROUPS)[:-1], axis=1)[m]
    return part / np.linalg.norm(part, axis=1, keepdims=True)


def test_every_row_is_the_recall_of_its_own_vectors(embeddings, result):
    z, labels = embeddings
    expected = {
        "ensemble": vector(z),
        "ensemble-alpha": vector(z, "alpha"),
        "ensemble-sqrt": vector(z),
        "learner-1": learner(z, 0),
        "learner-2": learner(z, 1),
        "learner-3": learner(z, 2),
        "prefix-2": vector(z, learners=2),
        "prefix-3": vector(z),
    }
    assert list(result.recall) == list(expected)
    for name, vectors in expected.items():
        assert (result.ranks[name] == ranks(vectors, labels)).all(), name
        assert result.recall[name] == recall_at_k(vectors, labels, KS), name
    assert len({tuple(row.values()) for row in result.recall.values()}) > 4  # they really differ


def test_alpha_weighting_moves_the_ensemble_and_the_prefixes(embeddings):
    z, labels = embeddings
    found = evaluate_ensemble(z, GROUPS, labels, KS, weighting="alpha")
    assert found.recall["ensemble"] == found.recall["ensemble-alpha"] == found.recall["prefix-3"]
    assert (found.ranks["prefix-2"] == ranks(vector(z, "alpha", 2), labels)).all()


def test_measures_of_the_ensemble(embeddings, result):
    z, labels = embeddings
    assert (result.map_at_r, result.r_precision) == pytest.approx(rank_r(vector(z), labels))
    assert (result.queries, result.gallery, result.without_positive) == (240, 240, 0)
    assert result.classifier_correlation == pytest.approx(result.learner_correlation[np.triu_indices(3, 1)].mean())


def test_what_each_learner_adds(result):
    r1 = [result.recall[name][1] for name in ("learner-1", "prefix-2", "prefix-3")]
    assert result.adds == pytest.approx([r1[0], r1[1] - r1[0], r1[2] - r1[1]])
    right = [result.ranks[f"learner-{m}"] == 0 for m in (1, 2, 3)]
    only_second = sum(not a and b and not c for a, b, c in zip(*right, strict=True))
    assert result.alone_right[1] == pytest.approx(100 * only_second / 240)
    assert only_second > 0


def test_one_learner_is_the_baseline(embeddings):
    z, labels = embeddings
    found = evaluate_ensemble(z, [20], labels, KS)
    assert list(found.recall) == ["ensemble", "learner-1"]
    assert found.recall["ensemble"] == recall_at_k(z / np.linalg.norm(z, axis=1, keepdims=True), labels, KS)
    assert found.to_dict()["classifier_correlation"] is None
    assert found.adds == (found.recall["ensemble"][1],)


def test_json_has_the_promised_shape(result):
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert set(found["recall"]["ensemble"]) == {"1", "2", "4"}
    assert {"feature_correlation", "classifier_correlation", "queries", "gallery", "seconds"} <= set(found)
    assert "spread" not in found


def test_queries_and_gallery(embeddings):
    z, labels = embeddings
    found = evaluate_ensemble(z[:100], GROUPS, labels[:100], KS, gallery=z[100:150], gallery_labels=labels[100:150])
    full = vector(z)
    expected = ranks(full[:100], labels[:100], full[100:150], labels[100:150])
    assert (found.ranks["ensemble"] == expected).all()
    assert (found.queries, found.gallery) == (100, 50)
    assert found.without_positive == (expected == -1).sum() > 0
    assert found.feature_correlation == pytest.approx(
        evaluate_ensemble(z[:150], GROUPS, labels[:150], KS).feature_correlation
    )


def test_repeated_galleries(embeddings):
    z, labels = embeddings
    seen = []
    found = evaluate_ensemble(
        z, GROUPS, labels, KS, repeats=4, seed=5, progress=lambda done, total: seen.append((done, total))
    )
    vectors, classes = vector(z), torch.from_numpy(labels)
    runs = [
        recall_at_k(vectors[~gallery], classes[~gallery], KS, vectors[gallery], classes[gallery])
        for gallery in draw_galleries(labels, len(labels), 4, 5)
    ]
    assert found.recall["ensemble"] == pytest.approx({k: np.mean([run[k] for run in runs]) for k in KS})
    assert found.spread is not None
    assert found.spread["ensemble"] == pytest.approx({k: np.std([run[k] for run in runs]) for k in KS})
    assert (found.queries, found.gallery) == (200, 40)
    assert seen[-1][0] == seen[-1][1]
    assert "spread" in found.to_dict()


def test_zero_parts_and_duplicates_are_defined():
    rng = np.random.default_rng(1)
    z = rng.standard_normal((40, 20)).astype(np.float32)
    z[:5] = 0
    z[5:10, :4] = 0
    z[10] = z[11]
    found = evaluate_ensemble(z, GROUPS, np.arange(40) % 8, KS)
    json.dumps(found.to_dict(), allow_nan=False)
    assert (found.ranks["ensemble"] == ranks(vector(z), np.arange(40) % 8)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": (4, 6)}, "sum to the embedding's 20"),
        ({"weighting": "best"}, "weighting"),
        ({"repeats": 2, "gallery": np.ones((3, 20)), "gallery_labels": [0, 1, 2]}, "draws the gallery itself"),
        ({"gallery": np.ones((3, 20))}, "together"),
        ({"z": np.full((240, 20), np.inf)}, "finite"),
    ],
)
def test_bad_input_is_refused(embeddings, change, message):
    arguments = {"z": embeddings[0], "groups": GROUPS, "labels": embeddings[1], "ks": KS} | change
    with pytest.raises(BierError, match=message):
        evaluate_ensemble(**arguments)


def test_a_difference_between_two_results_of_the_same_classes() -> None:
    """Drawn by hand: each class as often as numpy draws it, both results on the same draw."""
    generator = np.random.default_rng(3)
    labels = np.repeat(np.arange(12), 5)
    centres = generator.normal(size=(12, 6))[labels]
    good, poor = (
        evaluate_ensemble(centres + noise * generator.normal(size=(60, 6)), (6,), labels, (1,)) for noise in (0.3, 3.0)
    )
    found = difference(good, poor)
    assert found is not None
    hits = [100.0 * (one.ranks["ensemble"] == 0) for one in (good, poor)]
    draws = np.random.default_rng(0).integers(12, size=(2000, 12))
    means = [np.concatenate([(hits[0] - hits[1])[labels == label] for label in draw]).mean() for draw in draws]
    assert found.recall == pytest.approx(((hits[0] - hits[1]).mean(), *np.quantile(means, (0.025, 0.975))))
    assert found.recall.low > 0
    assert difference(good, good).recall == (0.0, 0.0, 0.0)  # type: ignore[union-attr]
    others = evaluate_ensemble(centres[5:], (6,), labels[5:], (1,))
    assert difference(good, others) is None
