"""Vectors that an index keeps with a byte or a bit per dimension, against the floats."""

from pathlib import Path

import numpy as np
import pytest

from bier.errors import SearchError
from bier.search import Index
from bier.search.rerank import search_reranked

GROUPS = (16, 48)
ROWS = 2_000


def draw(count: int, seed: int) -> np.ndarray:
    """Clustered vectors of length 1, whose learners have the lengths 0.6 and 0.8."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(30, sum(GROUPS)))
    raw = centres[rng.integers(30, size=count)] + 0.7 * rng.normal(size=(count, sum(GROUPS)))
    parts = np.split(raw, [GROUPS[0]], axis=1)
    unit = [
        length * part / np.linalg.norm(part, axis=1, keepdims=True)
        for length, part in zip((0.6, 0.8), parts, strict=True)
    ]
    return np.concatenate(unit, axis=1).astype(np.float32)


VECTORS, QUERIES = draw(ROWS, 0), draw(50, 1)
EXACT = QUERIES @ VECTORS.T


def build(precision: str, kind: str = "auto") -> Index:
    return Index.build(VECTORS, groups=GROUPS, labels=np.arange(ROWS) % 4, kind=kind, precision=precision)


def recall(found: np.ndarray, scores: np.ndarray = EXACT) -> float:
    exact = np.argsort(-scores, axis=1)[:, : found.shape[1]]
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(found, exact, strict=True)]))


@pytest.mark.parametrize("kind", ["flat", "binary", "hnsw"])
def test_a_byte_per_dimension_scores_almost_as_the_floats(kind: str) -> None:
    index = build("int8", kind)
    found = index.search(QUERIES, 10)
    assert recall(found.ids) >= 0.97
    np.testing.assert_allclose(found.scores, np.take_along_axis(EXACT, found.rows, axis=1), atol=0.004)
    np.testing.assert_allclose(index.vectors([3, 1_999]), VECTORS[[3, 1_999]], atol=0.01)


def test_what_needs_vectors_works_with_bytes() -> None:
    index = build("int8")
    assert recall(index.search(QUERIES, 10).ids) >= 0.97
    first = QUERIES[:, :16] @ VECTORS[:, :16].T
    assert recall(index.search(QUERIES, 10, learners=1).ids, first) >= 0.95
    short = QUERIES[:, :16] / 0.6  # the vector of the first learner alone has length 1
    np.testing.assert_allclose(
        index.search(short, 10, learners=1).scores.max(axis=1), first.max(axis=1) / 0.36, atol=0.02
    )
    allowed = np.arange(ROWS) % 4 == 2
    found = index.search(QUERIES, 10, where={"label": 2})
    assert (found.ids % 4 == 2).all()
    assert recall(found.ids, np.where(allowed, EXACT, -9)) >= 0.97
    again = search_reranked(index, QUERIES[0], 5, "k-reciprocal")
    assert np.isin(again.ids, np.argsort(-EXACT[0])[:100]).all()


def test_bits_alone_estimate() -> None:
    index = build("binary")
    assert (index.method, index.precision) == ("binary", "binary")
    found = index.search(QUERIES, 10)
    assert recall(found.ids) >= 0.4  # by chance 0.005
    estimated = np.corrcoef(found.scores.ravel(), np.take_along_axis(EXACT, found.rows, axis=1).ravel())[0, 1]
    assert estimated > 0.5
    found = index.search(QUERIES, 10, where={"label": 2})
    assert (found.ids % 4 == 2).all()


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"learners": 1}, "compare some learners only"),
    ],
)
def test_bits_refuse_what_needs_vectors(question: dict, message: str) -> None:
    index = build("binary")
    with pytest.raises(SearchError, match=f"must keep vectors to {message}. This one keeps a bit per dimension"):
        index.search(QUERIES, 10, **question)
    with pytest.raises(SearchError, match="must keep vectors to return vectors"):
        index.vectors([3])
    with pytest.raises(SearchError, match="must keep vectors"):
        search_reranked(index, QUERIES[0], 5, "k-reciprocal")


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    ("precision", "kind", "expected"),
    [
        ("int8", "flat", {"int8.faiss"}),
        ("int8", "binary", {"int8.faiss", "binary.faiss"}),
        ("int8", "hnsw", {"int8.faiss", "graph.faiss"}),
        ("binary", "auto", {"binary.faiss"}),
    ],
)
def test_saved_removed_and_added_to(tmp_path: Path, precision: str, kind: str, expected: set, mmap: bool) -> None:
    index = build(precision, kind)
    index.save(tmp_path / "index")
    assert {file.name for file in tmp_path.rglob("*.*") if file.suffix in (".faiss", ".npy")} == expected
    loaded = Index.load(tmp_path / "index", mmap=mmap)
    assert (loaded.precision, loaded.kind, loaded.method, loaded.groups) == (precision, kind, index.method, GROUPS)
    before, after = index.search(QUERIES, 10), loaded.search(QUERIES, 10)
    np.testing.assert_array_equal(before.ids, after.ids)
    np.testing.assert_array_equal(before.scores, after.scores)
    loaded.save(tmp_path / "index")  # the files that it is mapped from go away
    loaded.add(-VECTORS[:1], [ROWS])
    assert loaded.search(-VECTORS[:1], 1).ids.tolist() == [[ROWS]]
    loaded.remove(range(0, ROWS, 2))  # so many that they are dropped
    assert loaded._entries.rows == ROWS // 2 + 1
    found = loaded.search(QUERIES, 10)
    assert (found.ids % 2 + (found.ids == ROWS) == 1).all()
    odd = np.where(np.arange(ROWS) % 2 == 1, EXACT, -9)
    assert recall(found.ids, odd) >= (0.97 if precision == "int8" else 0.4)
    with pytest.raises(SearchError, match=r"must have 64 dimensions, as the index has. Got 63"):
        loaded.search(QUERIES[:, 1:], 1)
    loaded.remove([*range(1, ROWS, 2), ROWS])
    assert loaded.search(QUERIES, 3).ids.shape == (50, 0)


def test_an_index_without_its_bits_is_damaged(tmp_path: Path) -> None:
    build("binary").save(tmp_path / "index")
    next(tmp_path.rglob("binary.faiss")).unlink()
    with pytest.raises(SearchError, match=r"binary.faiss is missing"):
        Index.load(tmp_path / "index")
