"""The measures of re-ranking against a naive computation, query by query."""

import numpy as np
import pytest

from bier.evaluate.recall import rank_r, recall_at_k
from bier.evaluate.reranking import evaluate_reranking
from bier.search.rerank import METHODS, rerank


def test_rows_are_those_of_every_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bier.evaluate.reranking._AT_ONCE", 17)
    random = np.random.default_rng(0)
    labels = random.integers(0, 8, 90)
    vectors = (random.normal(size=(8, 16))[labels] + 1.2 * random.normal(size=(90, 16))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = evaluate_reranking(vectors, labels, (1, 4), list(METHODS), depth=30)
    assert list(found) == ["plain", *METHODS]
    assert found["plain"].recall == pytest.approx(recall_at_k(vectors, labels, (1, 4)))
    assert found["plain"].map_at_r == pytest.approx(rank_r(vectors, labels).map_at_r)  # no class has more than 30
    for name in METHODS:
        first, average = [], []
        for i in range(90):
            near = [j for j in np.argsort(-(vectors @ vectors[i]), kind="stable") if j != i][:30]
            order = np.argsort(-rerank(name, vectors[i], vectors[near]), kind="stable")
            right = [labels[near[place]] == labels[i] for place in order]
            count = int((labels == labels[i]).sum()) - 1
            first.append(right[0])
            average.append(sum(np.mean(right[: n + 1]) for n in range(count) if right[n]) / count)
        assert found[name].recall[1] == pytest.approx(100 * np.mean(first))
        assert found[name].map_at_r == pytest.approx(100 * np.mean(average))
        assert found[name].milliseconds > found["plain"].milliseconds


def test_a_gallery_and_a_query_without_a_match() -> None:
    random = np.random.default_rng(1)
    vectors = random.normal(size=(40, 8)).astype(np.float32)
    labels = np.arange(40) % 5
    labels[0] = 99
    found = evaluate_reranking(vectors[:10], labels[:10], [1], ["dba"], vectors[10:], labels[10:], depth=40)
    expected = recall_at_k(vectors[:10], labels[:10], [1], vectors[10:], labels[10:])
    assert found["plain"].recall == pytest.approx(expected)
    assert 0 < found["dba"].map_at_r < 100
