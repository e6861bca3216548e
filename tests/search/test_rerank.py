"""Re-ranking against naive implementations, written with loops and sets after the papers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from bier import Index
from bier.errors import SearchError
from bier.search import rerank as reranking
from bier.search.rerank import METHODS, rerank, search_one, search_reranked

Rows = NDArray[np.float64]


def shortlist(seed: int, count: int, size: int = 12) -> tuple[Rows, Rows]:
    """A query and its nearest images of a few classes, best first, one of them twice."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(5, size))
    vectors = centres[random.integers(0, 5, count)] + 0.6 * random.normal(size=(count, size))
    if count > 3:
        vectors[3] = vectors[2]
    query = centres[0] + 0.6 * random.normal(size=size)
    order = sorted(range(count), key=lambda row: -cosine(query, vectors[row]))
    return query, vectors[order]


def cosine(a: Rows, b: Rows) -> float:
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


def unit(a: Rows) -> Rows:
    length = np.linalg.norm(a)
    return a / length if length else a


def naive_expansion(query: Rows, vectors: Rows) -> list[float]:
    expanded = unit(query)
    for x in vectors[: reranking.EXPANDED]:  # they come best first
        expanded = expanded + max(cosine(query, x), 0.0) ** reranking.ALPHA * unit(x)
    return [cosine(expanded, x) for x in vectors]


def naive_augmentation(query: Rows, vectors: Rows) -> list[float]:
    scores = []
    for i, x in enumerate(vectors):
        others = sorted((j for j in range(len(vectors)) if j != i), key=lambda j: -round(cosine(x, vectors[j]), 9))
        augmented = unit(x)
        for j in others[: reranking.AUGMENTED]:
            augmented = augmented + max(cosine(x, vectors[j]), 0.0) ** reranking.ALPHA * unit(vectors[j])
        scores.append(cosine(query, augmented))
    return scores


def naive_k_reciprocal(query: Rows, vectors: Rows) -> list[float]:
    k1, k2, mixed = reranking.K1, reranking.K2, reranking.LAMBDA
    rows = [query, *vectors]
    every = range(len(rows))
    raw = [[0.0 if p == g else max(1 - cosine(rows[p], rows[g]), 0.0) for g in every] for p in every]
    distance = [[value / max(max(row), 1e-12) for value in row] for row in raw]

    def nearest(p: int, k: int) -> list[int]:
        """p itself and the k others that are nearest to it; equally near ones in their order."""
        return [p, *sorted((g for g in every if g != p), key=lambda g: round(raw[p][g], 6))[:k]]

    def mutual(p: int, k: int) -> set[int]:
        return {g for g in nearest(p, k) if p in nearest(g, k)}

    wide, narrow = ([mutual(p, k) for p in every] for k in (k1, round(k1 / 2)))
    described = []
    for p in every:
        reached = set(wide[p])
        for g in wide[p]:
            if len(wide[p] & narrow[g]) >= 2 / 3 * len(narrow[g]):
                reached |= narrow[g]
        values = [np.exp(-distance[p][g]) if g in reached else 0.0 for g in every]
        described.append([value / sum(values) for value in values])
    expanded = [np.mean([described[g] for g in nearest(p, k2 - 1)], axis=0) for p in every]
    scores = []
    for g in every[1:]:
        shared = sum(min(a, b) for a, b in zip(expanded[0], expanded[g], strict=True))
        either = sum(max(a, b) for a, b in zip(expanded[0], expanded[g], strict=True))
        scores.append(-((1 - mixed) * (1 - shared / either) + mixed * distance[0][g]))
    return scores


NAIVE = {"alpha-qe": naive_expansion, "dba": naive_augmentation, "k-reciprocal": naive_k_reciprocal}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("count", [2, 3, 9, 40, 70])
def test_scores_are_those_of_the_naive_implementation(name: str, count: int) -> None:
    for seed in range(3):
        query, vectors = shortlist(seed, count)
        np.testing.assert_allclose(rerank(name, query, vectors), NAIVE[name](query, vectors), atol=2e-5)


@pytest.mark.parametrize("name", METHODS)
def test_lengths_do_not_matter_and_zero_vectors_do_no_harm(name: str) -> None:
    query, vectors = shortlist(1, 30)
    lengths = np.random.default_rng(0).uniform(0.1, 9, (30, 1))
    np.testing.assert_allclose(rerank(name, 5 * query, lengths * vectors), rerank(name, query, vectors), atol=2e-5)
    vectors[20] = 0
    assert np.isfinite(rerank(name, query, vectors)).all()
    assert np.isfinite(rerank(name, 0 * query, vectors)).all()


@pytest.mark.parametrize("name", METHODS)
def test_it_helps_where_a_class_has_many_images(name: str) -> None:
    """Classes that are chains: the far end of the query's chain is nearer to its neighbours than to the query."""
    gain = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        centres = random.normal(size=(4, 32))
        labels = np.repeat(np.arange(4), 10)
        vectors = centres[labels] + 1.5 * random.normal(size=(40, 32))
        query = centres[0] + 1.5 * random.normal(size=32)
        order = np.argsort([-cosine(query, x) for x in vectors], kind="stable")
        again = order[np.argsort(-rerank(name, query, vectors[order]), kind="stable")]
        gain.append((labels[again[:10]] == 0).mean() - (labels[order[:10]] == 0).mean())
    assert np.mean(gain) > 0.02


def test_short_and_wrong_shortlists() -> None:
    query, vectors = shortlist(0, 4)
    assert rerank("dba", query, vectors[:0]).shape == (0,)
    assert rerank("k-reciprocal", query, vectors[:1]).tolist() == [0]
    with pytest.raises(SearchError, match="'rerank' parameter must be one of alpha-qe, dba, k-reciprocal"):
        rerank("x", query, vectors)
    with pytest.raises(SearchError, match="must have one dimension"):
        rerank("dba", query[:3], vectors)
    with pytest.raises(SearchError, match="at most 2,000 images"):
        rerank("dba", query, np.ones((2001, 12)))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("learners", "span"), [(None, slice(0, 12)), (1, slice(0, 4)), ([2], slice(4, 12))])
def test_a_search_re_ranks_what_the_index_finds(name: str, learners: int | list[int] | None, span: slice) -> None:
    random = np.random.default_rng(3)
    vectors = random.normal(size=(300, 12)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = Index.build(vectors, groups=(4, 8))
    found = search_reranked(index, vectors[7], 5, name, depth=40, learners=learners, without=7)
    plain = index.search(vectors[7], 41, learners=learners)
    kept = [one for one in plain.ids.tolist() if one != 7]
    order = np.argsort(-rerank(name, vectors[7, span], vectors[kept][:, span]), kind="stable")[:5]
    assert found.ids.tolist() == [kept[place] for place in order]
    np.testing.assert_allclose(found.scores, [vectors[7, span] @ vectors[one, span] for one in found.ids], atol=1e-6)
    everything = search_reranked(index, vectors[7], 400, name, where={"label": "none"})
    assert everything.ids.shape == (0,)


@pytest.mark.parametrize("name", [None, "alpha-qe"])
@pytest.mark.parametrize(("learners", "span"), [(None, slice(12)), (1, slice(4)), ([2], slice(4, 12))])
def test_a_query_of_the_collection_does_not_find_itself(
    name: str | None, learners: int | list[int] | None, span: slice
) -> None:
    vectors = np.random.default_rng(5).normal(size=(30, 12)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = Index.build(vectors, groups=(4, 8))
    found = search_one(index, vectors[3], 10, rerank=name, learners=learners, without=3)
    assert len(found) == 10
    assert 3 not in [match.id for match in found]
    length = float(np.square(vectors[3, span]).sum())
    for match in found:
        score = float(vectors[3, span] @ vectors[match.id, span])
        assert match.score == pytest.approx(score, abs=1e-6)
        assert match.similarity == pytest.approx(np.clip(score / length, -1, 1), abs=1e-5)
