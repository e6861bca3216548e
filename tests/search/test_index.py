"""The index against naive loops: exact, graph, funnel, filters, additions and removals."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bier.errors import SearchError
from bier.search import Entry, Index
from bier.search import index as index_module

GROUPS = (8, 16, 24)


def embeddings(count: int, seed: int = 0) -> np.ndarray:
    """Clustered vectors whose parts have the lengths 1/6, 2/6 and 3/6, as three learners' have."""
    rng = np.random.default_rng(seed)
    classes = rng.normal(size=(40, 12))
    hidden = classes[rng.integers(40, size=count)] + 0.5 * rng.normal(size=(count, 12))
    raw = hidden @ np.random.default_rng(99).normal(size=(12, sum(GROUPS)))
    parts = np.split(raw, np.cumsum(GROUPS)[:-1], axis=1)
    unit = [
        alpha * part / np.linalg.norm(part, axis=1, keepdims=True) for alpha, part in zip((1, 2, 3), parts, strict=True)
    ]
    return (np.concatenate(unit, axis=1) / 6).astype(np.float32)


def naive(vectors: np.ndarray, query: np.ndarray, k: int, allowed: list[int] | None = None) -> list[int]:
    rows = range(len(vectors)) if allowed is None else allowed
    return sorted(rows, key=lambda row: (-float(np.dot(vectors[row], query)), row))[:k]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return embeddings(6_000)


@pytest.fixture(scope="module")
def graph_index(vectors: np.ndarray) -> Index:
    return Index.build(vectors, groups=GROUPS, labels=np.arange(6_000) % 3, kind="hnsw")


def test_flat_search_is_what_loops_give(vectors: np.ndarray) -> None:
    some = vectors[:500]
    index = Index.build(some, [f"image-{row}" for row in range(500)], groups=GROUPS)
    found = index.search(vectors[500:520], k=7)
    assert index.method == "flat"
    assert found.scores.dtype == np.float32
    for number, query in enumerate(vectors[500:520]):
        rows = naive(some, query, 7)
        assert found.rows[number].tolist() == rows
        assert found.ids[number].tolist() == [f"image-{row}" for row in rows]
        np.testing.assert_allclose(found.scores[number], some[rows] @ query, rtol=1e-5)


@given(
    rows=st.integers(1, 60),
    queries=st.integers(1, 9),
    k=st.integers(1, 70),
    chunks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_chunks_and_sizes_do_not_matter(rows: int, queries: int, k: int, chunks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-3, 4, size=(rows * chunks, sum(GROUPS))).astype(np.float32)  # whole numbers: many ties
    index = Index.build(vectors[:rows], list(range(rows)), groups=GROUPS)
    for start in range(rows, len(vectors), rows):
        index.add(vectors[start : start + rows], list(range(start, start + rows)))
    wanted = rng.integers(-3, 4, size=(queries, sum(GROUPS))).astype(np.float32)
    found = index.search(wanted, k)
    k = min(k, len(vectors))
    assert found.ids.shape == (queries, k)
    exact = -np.sort(-(wanted @ vectors.T), axis=1)[:, :k]
    np.testing.assert_array_equal(found.scores, exact)
    np.testing.assert_array_equal(found.scores, np.einsum("qd,qkd->qk", wanted, vectors[found.ids]))
    assert all(len(set(row)) == k for row in found.ids.tolist())


def test_many_queries_are_searched_in_blocks(vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index.build(vectors, groups=GROUPS, kind="flat")
    whole = index.search(vectors[:600], k=5)
    monkeypatch.setattr("bier.search.vectors._SCORES_AT_ONCE", 256 * 1_000)
    pieces = index.search(vectors[:600], k=5)
    np.testing.assert_allclose(pieces.scores, whole.scores, atol=1e-6)
    assert (pieces.ids == whole.ids).mean() > 0.999


def test_the_graph_finds_nearly_all_and_scores_exactly(vectors: np.ndarray, graph_index: Index) -> None:
    queries = embeddings(100, seed=5)
    found, exact = graph_index.search(queries, 10), graph_index._vectors.nearest(queries, 10)
    assert graph_index.method == "hnsw"
    assert recall(found.ids, exact[0]) >= 0.99
    np.testing.assert_allclose(found.scores, np.einsum("qd,qkd->qk", queries, vectors[found.rows]), rtol=1e-5)


def test_the_bits_find_nearly_all_and_the_floats_score_exactly(vectors: np.ndarray) -> None:
    index, queries = Index.build(vectors, groups=GROUPS, kind="binary"), embeddings(100, seed=5)
    found, exact = index.search(queries, 10), index._vectors.nearest(queries, 10)
    assert index.method == "binary"
    assert recall(found.ids, exact[0]) >= 0.99
    np.testing.assert_allclose(found.scores, np.einsum("qd,qkd->qk", queries, vectors[found.rows]), rtol=1e-5)


def recall(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]))


def test_auto_follows_the_size(vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    assert index_module.EXACT_ROWS == 20_000
    assert index_module.SCANNED_ROWS == 2_000_000
    monkeypatch.setattr(index_module, "EXACT_ROWS", 1_000)
    monkeypatch.setattr(index_module, "SCANNED_ROWS", 2_000)
    index = Index.build(vectors[:1_000], groups=GROUPS)
    assert index.method == "flat"
    index.add(vectors[1_000:1_500], list(range(1_000, 1_500)))
    assert index.method == "binary"
    assert index.search(vectors[1_400], 1).ids.tolist() == [1_400]
    assert Index.build(vectors[:2_001], groups=GROUPS).method == "hnsw"


@pytest.mark.parametrize("kind", ["flat", "binary", "hnsw"])
def test_removed_images_never_come_back(vectors: np.ndarray, kind: str) -> None:
    index = Index.build(vectors[:2_000], groups=GROUPS, kind=kind)
    gone = index.search(vectors[7], 50).ids.tolist()
    index.remove(gone)
    assert len(index) == 1_950
    assert index._entries.rows == 2_000, "a few removals leave tombstones"
    kept = [row for row in range(2_000) if row not in gone]
    assert recall(index.search(vectors[7], 10).ids[None], np.array([naive(vectors, vectors[7], 10, kept)])) >= 0.9
    index.remove(kept[:500])
    assert index._entries.rows == len(index) == 1_450, "many removals rebuild the index"
    left = kept[500:]
    assert index.ids == left
    best = index.search(vectors[left[3]], 1)
    assert best.ids.tolist() == [left[3]]
    np.testing.assert_array_equal(index.vectors([left[3]])[0], vectors[left[3]])


def test_a_mapped_graph_can_grow(vectors: np.ndarray, tmp_path) -> None:
    Index.build(vectors[:500], groups=GROUPS, kind="hnsw").save(tmp_path / "index")
    index = Index.load(tmp_path / "index")
    index.save(tmp_path / "index")  # the file that it is mapped from goes away
    index.add(vectors[500:600], list(range(500, 600)))
    assert index.search(vectors[555], 1).ids.tolist() == [555]
    assert index.search(vectors[55], 1).ids.tolist() == [55]


def test_replacing_an_id(vectors: np.ndarray) -> None:
    index = Index.build(vectors[:50], groups=GROUPS, labels=["old"] * 50)
    with pytest.raises(SearchError, match=r"must hold new ids. 3 is already there"):
        index.add(vectors[60:62], [99, 3])
    assert len(index) == 50, "nothing was added"
    index.add(vectors[60:62], [99, 3], labels=["new", "new"], replace=True)
    assert len(index) == 51
    np.testing.assert_array_equal(index.vectors([3])[0], vectors[61])
    assert index.entries([3, 4]) == [Entry(3, "new"), Entry(4, "old")]


def test_learners_search_their_own_parts(vectors: np.ndarray, graph_index: Index) -> None:
    queries = embeddings(5, seed=4)
    for learners, columns in ((1, slice(0, 8)), (2, slice(0, 24)), ([2], slice(8, 24)), ([2, 3], slice(8, 48))):
        found = graph_index.search(queries, 6, learners=learners)
        for number, query in enumerate(queries):
            assert found.ids[number].tolist() == naive(vectors[:, columns], query[columns], 6)


def test_the_shorter_vector_is_a_query_too(vectors: np.ndarray, graph_index: Index) -> None:
    short = 2.0 * vectors[:, :24]  # the first two of three learners, weighted 1/3 and 2/3 instead of 1/6 and 2/6
    found = graph_index.search(short[:5], 6, learners=2)
    for number in range(5):
        assert found.ids[number].tolist() == naive(short, short[number], 6)
        np.testing.assert_allclose(found.scores[number], short[found.ids[number]] @ short[number], rtol=1e-4)


def test_one_query_has_no_leading_dimension(vectors: np.ndarray, graph_index: Index) -> None:
    one, many = graph_index.search(vectors[3], 4), graph_index.search(vectors[3:4], 4)
    assert one.ids.shape == (4,)
    np.testing.assert_array_equal(one.ids, many.ids[0])
    assert graph_index.search(np.empty((0, 48)), 4).ids.shape == (0, 4)


def test_an_empty_index_has_no_answers() -> None:
    index = Index.build(np.empty((0, 48)), [], groups=GROUPS, kind="hnsw")
    assert len(index) == 0
    assert index.search(np.zeros((3, 48)), 5).ids.shape == (3, 0)
    index.add(embeddings(3), ["a", "b", "c"])
    assert index.search(embeddings(1)[0], 5).ids.tolist()[0] == "a"
    index.remove(["a", "b", "c"])
    assert index.search(np.zeros((3, 48)), 5).ids.shape == (3, 0)


def test_any_layout_of_floats_will_do(vectors: np.ndarray) -> None:
    index = Index.build(np.asfortranarray(vectors[:200].astype(np.float64)), groups=GROUPS)
    doubled = np.repeat(vectors[:5], 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(index.search(doubled.astype(np.float64), 1).ids.ravel(), range(5))


def test_searches_may_run_side_by_side(vectors: np.ndarray, graph_index: Index) -> None:
    wanted = graph_index.search(vectors[:40], 5, where={"label": 1}).ids
    answers: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        answers[number] = graph_index.search(vectors[:40], 5, where={"label": 1}).ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((answers[number] == wanted).all() for number in range(4))
