"""What `where` means: the table in `bier.search.store`, row by row and store by store, against a naive rule."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bier.errors import SearchError
from bier.search import Entry, Index, Store, open_store

ENTRIES = [
    Entry("0", "a", {"f": True}),
    Entry("1", "b", {"f": 1}),
    Entry("2", 3, {"f": 1.0}),
    Entry("3", "3", {"f": "1"}),
    Entry("4", None, {"f": None}),
    Entry("5", "None", {"f": ""}),
    Entry("6", "", {"f": ["x", 1]}),
    Entry("7", "True", {"f": {"x": 1}}),
    Entry("8", "ä", {"g": 0.5, "f": False}),
    Entry("9", "A", {"f": 0}),
    Entry("10", "a ", {"f": "x", "g": -7}),
    Entry("11", 2**53 + 1, {"f": 2**53 + 1}),
    Entry("12", 2**53, {"f": 2**53}),
    Entry("13", "x", None),
    Entry("14", "y", {"f": 3000 * "l", 'it\'s "a".key[0]': "}{", "label": "a"}),
]

# A filter, as a function where it can be used once only, and the ids that pass.
CASES: list[tuple[Any, str]] = [
    ({}, "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14"),
    ({"label": "a"}, "0"),
    ({"label": 3}, "2 3"),
    ({"label": "3"}, "2 3"),
    ({"label": np.int64(3)}, "2 3"),
    ({"label": None}, "4"),
    ({"label": [None, "None"]}, "4 5"),
    ({"label": "None"}, "5"),
    ({"label": ""}, "6"),
    ({"label": []}, ""),
    ({"label": ["a", "b", "nobody"]}, "0 1"),
    ({"label": {"a", "ä"}}, "0 8"),
    ({"label": np.array(["a", "b"])}, "0 1"),
    (lambda: {"label": (name for name in "ab")}, "0 1"),
    ({"label": 2**53 + 1}, "11"),
    ({"label": np.array([2**53], np.uint64)}, "12"),
    ({"f": True}, "0"),
    ({"f": np.True_}, "0"),
    ({"f": False}, "8"),
    ({"f": 1}, "1 2"),
    ({"f": 1.0}, "1 2"),
    ({"f": np.float32(1)}, "1 2"),
    ({"f": 0}, "9"),
    ({"f": "1"}, "3"),
    ({"f": None}, "4"),
    ({"f": [None, ""]}, "4 5"),
    ({"f": "x"}, "10"),
    ({"f": 2**53}, "12"),
    ({"f": 2**53 + 1}, "11"),
    ({"g": [0.5, -7]}, "8 10"),
    (lambda: {"g": iter([0.5])}, "8"),
    ({"g": None}, ""),
    ({"f": "x", "g": -7, "label": "a "}, "10"),
    ({"f": "x", "g": 7}, ""),
    ({"nothing": None}, ""),
    ({"f": 3000 * "l"}, "14"),
    ({"f": 2999 * "l"}, ""),
    ({'it\'s "a".key[0]': ["}{", 1]}, "14"),
]
REFUSED = [
    ["a"], "label=a", lambda entry: True, np.ones(15, np.bool_), {1: "a"}, {"label": b"a"}, {"label": True},
    {"label": 1.0}, {"label": [["a"]]}, {"f": b"a"}, {"f": float("nan")}, {"f": [float("inf")]}, {"f": 2**63},
    {"f": {"x": 1}}, {"f": [[1]]}, {"f": 1j}, {"f": object()},
]  # fmt: skip


@pytest.fixture(scope="module", params=["index", "saved index", "postgres", "qdrant", "milvus"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A collection of the entries above."""
    vectors, folder = np.ones((len(ENTRIES), 4), np.float32), tmp_path_factory.mktemp("store")
    columns = [list(column) for column in zip(*ENTRIES, strict=True)]
    if "index" in request.param:
        index = Index.build(vectors, *columns[:1], labels=columns[1], metadata=columns[2])
        index.save(folder / "index")
        yield index if request.param == "index" else Index.load(folder / "index")
        return
    made = open_store(_address(request, folder), (4,))
    made.add(vectors, *columns)
    yield made
    made.close()


def _address(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "postgres":
        return f"{request.getfixturevalue('postgres_server').uri}#filters"
    pytest.importorskip({"qdrant": "qdrant_client", "milvus": "milvus_lite"}[request.param])
    return f"qdrant:{folder}/qdrant" if request.param == "qdrant" else f"milvus:{folder}/shop.db"


@pytest.mark.parametrize(("where", "ids"), CASES, ids=lambda case: str(case)[:40])
def test_every_store_follows_the_table(store: Store, where: Any, ids: str) -> None:
    found = store.search(np.ones(4), 20, where=where() if isinstance(where, Callable) else where)
    assert sorted(found.ids.tolist(), key=int) == ids.split()


def test_what_cannot_be_meant_is_one_line(store: Store) -> None:
    for where in REFUSED:
        with pytest.raises(SearchError, match=r"(the|The) 'where' parameter must") as caught:
            store.search(np.ones(4), 20, where=where)
        assert "\n" not in str(caught.value)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=2) | st.sampled_from(
    ["a", "a\0", "1", "None", "True"]
)
SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1.0, -0.0, 2**53, 2**53 + 1]) | TEXTS
LABELS = st.none() | st.integers(-1, 3) | TEXTS


@given(
    labels=st.lists(LABELS, min_size=1, max_size=12),
    stored=st.lists(SCALARS, min_size=12, max_size=12),
    names=st.none() | st.lists(LABELS, max_size=3),
    values=st.none() | st.lists(SCALARS, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_a_filter_is_the_naive_rule(labels: list, stored: list, names: list | None, values: list | None) -> None:
    rows = range(len(labels))
    index = Index.build(np.ones((len(labels), 2)), labels=labels, metadata=[{"f": stored[row]} for row in rows])
    where = {key: given for key, given in (("label", names), ("f", values)) if given is not None}

    def passes(row: int) -> bool:
        by_label = names is None or any(_text(name) == _text(labels[row]) for name in names)
        return by_label and (values is None or any(_same(value, stored[row]) for value in values))

    assert index.search(np.ones(2), 12, where=where).rows.tolist() == [row for row in rows if passes(row)]


def _text(label: Any) -> str | None:
    return None if label is None else str(label)


def _same(one: Any, other: Any) -> bool:
    """As JSON has them: its numbers by value, everything else by its text."""
    if type(one) in (int, float) and type(other) in (int, float):
        return one == other
    return type(one) is type(other) and json.dumps(one) == json.dumps(other)
