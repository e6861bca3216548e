"""The index against naive loops: exact and by bits, with filters, learners, additions, removals and equal scores."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

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


def recall(found: np.ndarray, exact: list[list[int]]) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), exact, strict=True)]))


@contextmanager
def exact_up_to(rows: int) -> Iterator[None]:
    """Larger indexes select candidates by bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "EXACT_ROWS", rows)
        patch.setattr(index_module, "SCAN_ROWS", min(rows, index_module.SCAN_ROWS))
        yield


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return embeddings(6_000)


@pytest.fixture(scope="module")
def index(vectors: np.ndarray) -> Index:
    return Index.build(vectors, groups=GROUPS, labels=np.arange(6_000) % 3)


LEARNERS = [(None, slice(0, 48)), (1, slice(0, 8)), (2, slice(0, 24)), ([2], slice(8, 24)), ([2, 3], slice(8, 48))]


@given(
    draw=st.integers(0, 2**32),
    additions=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    removed=st.floats(0, 0.6),
    k=st.integers(1, 60),
    learners=st.sampled_from(LEARNERS),
    labels=st.none() | st.lists(st.sampled_from("abc"), max_size=2),
    most=st.sampled_from([0, 50_000]),
)
@settings(max_examples=150, deadline=None)
def test_any_index_answers_as_loops_do(
    draw: int, additions: list[int], removed: float, k: int, learners: Any, labels: list[str] | None, most: int
) -> None:
    """Whole numbers from -1 to 1 make many ties, which come by row, through additions, removals and filters."""
    rng = np.random.default_rng(draw)
    vectors = rng.integers(-1, 2, size=(sum(additions), sum(GROUPS))).astype(np.float32)
    vectors[:, 6:] *= rng.integers(2)
    names = rng.choice(list("abc"), len(vectors))
    ends = np.cumsum(additions)
    with exact_up_to(most):
        index = Index.build(vectors[: ends[0]], groups=GROUPS, labels=names[: ends[0]])
        for start, end in pairwise(ends):
            index.add(vectors[start:end], range(start, end), names[start:end])
        index.remove(np.flatnonzero(rng.random(len(vectors)) < removed))
        queries = rng.integers(-1, 2, size=(3, sum(GROUPS))).astype(np.float32)
        found = index.search(queries, k, where=None if labels is None else {"label": labels}, learners=learners[0])
    allowed = [row for row in index.ids if labels is None or names[row] in labels]
    span = learners[1]
    for number, query in enumerate(queries):
        rows = naive(vectors[:, span], query[span], k, allowed)
        assert found.ids[number].tolist() == rows
        assert found.scores[number].tolist() == [float(vectors[row, span] @ query[span]) for row in rows]


@pytest.mark.parametrize("most", [0, 50_000])
@pytest.mark.parametrize("count", [10, 33, 1_001])
def test_equal_vectors_come_by_row_at_the_cut_too(count: int, most: int) -> None:
    """Ten equal rows and k=3 gave 7, 8, 9; a library's sums differ by the place of a row in its blocks."""
    equal = np.repeat(embeddings(1, seed=2), count, axis=0)
    with exact_up_to(most):
        index = Index.build(equal, groups=GROUPS)
        for queries in (equal[0], equal[:5], embeddings(40, seed=3)):
            assert (index.search(queries, 3).ids == [0, 1, 2]).all()
        index.add(2 * equal[:1], ["better"])
        assert index.search(equal[0], 3).ids.tolist() == ["better", 0, 1]


def test_rows_that_differ_in_the_last_digit_are_in_their_order() -> None:
    """The scores that select are rounded; what is within their error is scored again, row by row."""
    rng = np.random.default_rng(0)
    vectors = np.repeat(rng.normal(size=(1, 512)), 3_000, axis=0)
    vectors = np.float32(vectors / np.linalg.norm(vectors[0]) * (1 + 3e-7 * rng.random((3_000, 1))))
    index = Index.build(vectors)
    for queries in (vectors[:1], vectors[:40]):
        exact = (queries.astype(np.float64) @ vectors.T.astype(np.float64)).astype(np.float32)
        order = np.argsort(-exact, axis=1, kind="stable")[:, :20]
        np.testing.assert_array_equal(index.search(queries, 20).ids, order)


def test_many_queries_are_searched_in_blocks(
    vectors: np.ndarray, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = index.search(vectors[:600], k=5)
    monkeypatch.setattr("bier.search.vectors._SCORES_AT_ONCE", 7 * 6_000)
    monkeypatch.setattr("bier.search.vectors._PAIRS_AT_ONCE", 11)
    pieces = index.search(vectors[:600], k=5)
    np.testing.assert_array_equal(pieces.ids, whole.ids)
    np.testing.assert_array_equal(pieces.scores, whole.scores)


@given(draw=st.integers(0, 2**32), share=st.sampled_from([1.0, 0.5, 0.2, 0.05]), k=st.sampled_from([1, 10, 200]))
@settings(max_examples=12, deadline=None)
def test_bits_find_nearly_all_whatever_the_filter(draw: int, share: float, k: int) -> None:
    rng = np.random.default_rng(draw)
    vectors, queries = embeddings(6_000), embeddings(20, seed=draw)
    passes = rng.random(6_000) < share
    with exact_up_to(200):
        index = Index.build(vectors, groups=GROUPS, labels=passes.astype(int))
        assert index.method == "bits"
        found = index.search(queries, k, where={"label": 1})
    allowed = np.flatnonzero(passes)
    exact = [allowed[np.argsort(-(vectors[allowed] @ query), kind="stable")[:k]].tolist() for query in queries]
    assert recall(found.ids, exact) >= (0.99 if k <= 10 else 0.98)  # of 200 in 300 that pass, the last ones nearly tie
    assert passes[found.ids].all()
    scores = np.einsum("qd,qkd->qk", queries, vectors[found.rows])
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-6)


def test_bits_begin_above_the_size_that_is_scanned(vectors: np.ndarray) -> None:
    assert index_module.EXACT_ROWS == 50_000
    with exact_up_to(1_000):
        index = Index.build(vectors[:1_000], groups=GROUPS)
        assert index.method == "exact"
        index.add(vectors[1_000:1_500], range(1_000, 1_500))
        assert index.method == "bits"
        assert index.search(vectors[1_400], 1).ids.tolist() == [1_400]
        index.remove(range(600))
        assert index.method == "exact"
        assert index.search(vectors[1_400], 1).ids.tolist() == [1_400]


def test_an_image_that_is_no_vector_is_never_an_answer(vectors: np.ndarray) -> None:
    for most in (0, 50_000):
        with exact_up_to(most):
            index = Index.build(vectors[:500], groups=GROUPS)
            index._vectors._chunks[0][7, 3] = np.nan  # as a file that another program wrote
            for queries in (vectors[0], vectors[:4]):
                with pytest.raises(SearchError, match="It has NaN or infinity; build it again"):
                    index.search(queries, 490)


def test_replacing_an_id(vectors: np.ndarray) -> None:
    index = Index.build(vectors[:50], groups=GROUPS, labels=["old"] * 50)
    with pytest.raises(SearchError, match=r"must hold new ids. 3 is already there"):
        index.add(vectors[60:62], [99, 3])
    assert len(index) == 50, "nothing was added"
    index.add(vectors[60:62], [99, 3], labels=["new", "new"], replace=True)
    assert len(index) == 51
    np.testing.assert_array_equal(index.vectors([3])[0], vectors[61])
    assert index.entries([3, 4]) == [Entry(3, "new"), Entry(4, "old")]


def test_a_few_removals_leave_tombstones_and_many_rebuild(vectors: np.ndarray) -> None:
    index = Index.build(vectors[:2_000], groups=GROUPS)
    gone = index.search(vectors[7], 50).ids.tolist()
    index.remove(gone)
    assert (len(index), index._entries.rows) == (1_950, 2_000)
    index.remove(index.ids[:500])
    assert index._entries.rows == len(index) == 1_450
    left = index.ids
    assert index.search(vectors[left[3]], 1).ids.tolist() == [left[3]]
    np.testing.assert_array_equal(index.vectors([left[3]])[0], vectors[left[3]])


def test_the_shorter_vector_is_a_query_too(vectors: np.ndarray, index: Index) -> None:
    short = 2.0 * vectors[:, :24]  # the first two of three learners, weighted 1/3 and 2/3 instead of 1/6 and 2/6
    found = index.search(short[:5], 6, learners=2)
    for number in range(5):
        assert found.ids[number].tolist() == naive(short, short[number], 6)
        np.testing.assert_allclose(found.scores[number], short[found.ids[number]] @ short[number], rtol=1e-4)


def test_one_query_has_no_leading_dimension(vectors: np.ndarray, index: Index) -> None:
    one, many = index.search(vectors[3], 4), index.search(vectors[3:4], 4)
    assert one.ids.shape == (4,)
    np.testing.assert_array_equal(one.ids, many.ids[0])
    assert index.search(np.empty((0, 48)), 4).ids.shape == (0, 4)


def test_an_empty_index_has_no_answers() -> None:
    index = Index.build(np.empty((0, 48)), [], groups=GROUPS)
    assert len(index) == 0
    assert index.search(np.zeros((3, 48)), 5).ids.shape == (3, 0)
    index.add(embeddings(3), ["a", "b", "c"])
    assert index.search(embeddings(1)[0], 5).ids.tolist()[0] == "a"
    assert index.search(np.zeros(48), 2).ids.tolist() == ["a", "b"]
    index.remove(["a", "b", "c"])
    assert index.search(np.zeros((3, 48)), 5).ids.shape == (3, 0)


def test_any_layout_of_floats_will_do(vectors: np.ndarray) -> None:
    index = Index.build(np.asfortranarray(vectors[:200].astype(np.float64)), groups=GROUPS)
    doubled = np.repeat(vectors[:5], 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(index.search(doubled.astype(np.float64), 1).ids.ravel(), range(5))


def test_the_array_that_was_given_may_change_afterwards() -> None:
    given_vectors = np.eye(3, dtype=np.float32)
    index = Index.build(given_vectors)
    given_vectors[:] = 0
    assert index.search(np.eye(3)[1], 1).ids.tolist() == [1]


def test_searches_may_run_side_by_side(vectors: np.ndarray, index: Index) -> None:
    expected = index.search(vectors[:40], 5, where={"label": 1}).ids
    answers: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        answers[number] = index.search(vectors[:40], 5, where={"label": 1}).ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((answers[number] == expected).all() for number in range(4))


def test_another_library_may_replace_the_search_of_faiss(vectors: np.ndarray) -> None:
    import faiss.contrib.torch_utils  # noqa: F401  # pytorch-metric-learning imports this

    with exact_up_to(100):
        index = Index.build(vectors[:500])
        assert index.search(vectors[7], k=1, where={"label": None}).rows.tolist() == [7]
