"""What an index refuses: collections and questions that cannot be meant, each with a line that says why."""

import numpy as np
import pytest

from bier.errors import SearchError
from bier.search import Index

GROUPS = (8, 16, 24)
VECTORS = np.random.default_rng(0).normal(size=(9, sum(GROUPS))).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": np.full((5, 48), np.nan)}, "Row 0 has NaN"),
        ({"vectors": np.full((5, 48), 1e300)}, "Row 0 has NaN or infinity"),
        ({"vectors": np.zeros(48)}, "shape \\(N, d\\)"),
        ({"vectors": np.full((5, 48), "x")}, "must be numbers"),
        ({"groups": (8, 16)}, "sum to 48"),
        ({"groups": (48, 0)}, "above 0"),
        ({"ids": ["a"] * 5}, "Got 'a' more than once"),
        ({"ids": ["a"]}, "one id per vector, 5"),
        ({"ids": [1.5, 2, 3, 4, 5]}, "strings or whole numbers. Got 1.5"),
        ({"labels": ["a"]}, "one label per vector, 5"),
        ({"labels": [[]] * 5}, "strings or whole numbers"),
        ({"metadata": [1] * 5}, "mappings or None"),
        ({"vectors": np.zeros((5, 48), np.int8)}, "must be floats. Got int8"),
        ({"about": {"root": 7}}, "must have a text under 'root'. Got 7"),
        ({"about": {"model": "x"}}, "must have a mapping under 'model'. Got 'x'"),
    ],
)
def test_bad_collections_are_refused(change: dict, message: str) -> None:
    good = {"vectors": VECTORS[:5], "ids": list("abcde"), "groups": GROUPS}
    with pytest.raises(SearchError, match=message):
        Index.build(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": np.zeros((2, 47))}, "must have 48 dimensions, as the index has. Got 47"),
        ({"queries": np.full((2, 48), np.inf)}, "Row 0 has NaN"),
        ({"k": 0}, "'k' parameter must be a whole number of at least 1. Got 0"),
        ({"k": 2.5}, "Got 2.5"),
        ({"learners": 4}, "between 1 and 3. Got 4"),
        ({"learners": [0]}, "must name learners 1 to 3"),
    ],
)
def test_bad_questions_are_refused(change: dict, message: str) -> None:
    index = Index.build(VECTORS, groups=GROUPS)
    with pytest.raises(SearchError, match=message):
        index.search(**{"queries": np.zeros((2, 48)), "k": 5, **change})


def test_unknown_ids_are_refused() -> None:
    index = Index.build(VECTORS, list("abcdefghi"), groups=GROUPS)
    for ask in (index.remove, index.entries, index.vectors):
        with pytest.raises(SearchError, match="It has no 'z'"):
            ask(["a", "z"])
    assert len(index) == 9
    assert index.known(["a", "z"]) == ["a"]
