"""Milvus gives the answers of the embedded index; on Milvus Lite, and on a server where MILVUS_TEST_URI names one."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bier.errors import MissingExtraError, SearchError
from bier.search import Entry, Index, Store, is_store_uri, open_store
from bier.search.milvus import Address, MilvusStore, expression, literal, parse_uri

pytest.importorskip("pymilvus", reason="needs pip install 'bier-ml[milvus]'")
pytest.importorskip("milvus_lite", reason="needs pip install 'bier-ml[milvus]'")

GROUPS = (8, 16, 24)
COUNT = 300
STRANGE = ["it's", 'say "cheese"', "back\\slash", "{braces}", "Blåmes", "50%", "tab\tand\nline"]


def embeddings(count: int, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).normal(size=(count, sum(GROUPS)))
    parts = np.split(raw, np.cumsum(GROUPS)[:-1], axis=1)
    unit = [
        alpha * part / np.linalg.norm(part, axis=1, keepdims=True) for alpha, part in zip((1, 2, 3), parts, strict=True)
    ]
    return (np.concatenate(unit, axis=1) / 6).astype(np.float32)


VECTORS, QUERIES = embeddings(COUNT, 0), embeddings(6, 1)
IDS = [f"{STRANGE[row % 7]}/{row}.jpg" for row in range(COUNT)]
LABELS = [STRANGE[row % 5] if row % 11 else None for row in range(COUNT)]
METADATA = [
    {"path": f"/photos/{row}.jpg", "year": 2020 + row % 3, "good": row % 2 == 0} if row % 13 else None
    for row in range(COUNT)
]


def uris(tmp_path: Path) -> list[str]:
    server = os.environ.get("MILVUS_TEST_URI")
    return [f"milvus:{tmp_path}/shop.db"] + ([f"milvus:{server}#bier_{secrets.token_hex(4)}"] if server else [])


@pytest.fixture(scope="module", params=["lite", "server"])
def stores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[MilvusStore, Index]]:
    places = uris(tmp_path_factory.mktemp("milvus"))
    if request.param == "server" and len(places) == 1:
        pytest.skip("MILVUS_TEST_URI names no Milvus server")
    store = open_store(places[0 if request.param == "lite" else 1], GROUPS, about={"model": {"path": "runs/birds"}})
    assert isinstance(store, MilvusStore)
    index = Index.build(VECTORS, IDS, GROUPS, LABELS, METADATA)
    store.add(VECTORS[:100], IDS[:100], LABELS[:100], METADATA[:100])
    store.add(VECTORS, IDS, LABELS, METADATA, replace=True)
    yield store, index
    store.drop()
    store.close()


def same(store: Store, index: Store, **question: object) -> None:
    theirs, ours = store.search(**question), index.search(**question)  # type: ignore[arg-type]
    assert theirs.ids.tolist() == ours.ids.tolist()
    assert theirs.scores.dtype == np.float32
    np.testing.assert_allclose(theirs.scores, ours.scores, atol=1e-6)


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"k": 1},
        {"k": 1_000},
        {"queries": QUERIES[0]},
        {"queries": np.empty((0, 48))},
        {"shortlist": 40},
        {"shortlist": 40, "where": {"label": "it's"}},
        {"where": {"label": STRANGE[1:4]}},
        {"where": {"label": "nobody"}},
        {"where": {"year": 2021}},
        {"where": {"year": [2020, 2022], "good": True, "label": STRANGE}},
        {"where": {"path": "/photos/7.jpg"}},
        {"where": {"no such key": 1}},
        {"where": {"year": []}},
        {"learners": 1},
        {"learners": 2},
        {"learners": [3]},
        {"learners": [1, 3], "where": {"year": 2020}},
        {"learners": 2, "queries": 2 * QUERIES[:, :24]},
    ],
    ids=str,
)
def test_every_answer_is_that_of_the_index(stores: tuple[MilvusStore, Index], question: dict) -> None:
    same(*stores, **{"queries": QUERIES, "k": 5, **question})


def test_the_collection_is_that_of_the_index(stores: tuple[MilvusStore, Index]) -> None:
    store, index = stores
    assert len(store) == len(index) == COUNT
    assert sorted(map(str, store.ids)) == sorted(map(str, index.ids))
    assert (store.groups, store.dimension) == (index.groups, index.dimension)
    some = [IDS[row] for row in (200, 3, 13, 0)]
    assert store.entries(some) == index.entries(some)
    np.testing.assert_array_equal(store.vectors(some), index.vectors(some))
    assert set(store.known([*some, "unknown"])) == set(some)


def test_fields_can_be_read_by_others(stores: tuple[MilvusStore, Index]) -> None:
    store, _ = stores
    [row] = store._query(f"id == {literal(IDS[4])}", ["label", "path", "learner_1"])
    assert (row["label"], row["path"]) == (LABELS[4], "/photos/4.jpg")
    np.testing.assert_array_equal(np.float32(row["learner_1"]), VECTORS[4, :8])


def test_mistakes_are_those_of_the_index(stores: tuple[MilvusStore, Index]) -> None:
    for store in stores:
        for question, message in (
            ({"queries": QUERIES[:, :40]}, "must have 48 dimensions"),
            ({"queries": QUERIES, "k": 0}, "'k' parameter"),
            ({"queries": QUERIES, "k": 9, "shortlist": 8}, "'shortlist' parameter"),
            ({"queries": QUERIES, "learners": 4}, "'learners' parameter"),
        ):
            with pytest.raises(SearchError, match=message):
                store.search(**question)
        with pytest.raises(SearchError, match="must hold new ids"):
            store.add(VECTORS[:1], IDS[:1])
        with pytest.raises(SearchError, match="It has no 'unknown'"):
            store.remove([IDS[0], "unknown"])
        assert len(store) == COUNT
    with pytest.raises(SearchError, match="must be a mapping for Milvus"):
        stores[0].search(QUERIES, where=lambda entry: True)
    with pytest.raises(SearchError, match="all strings or all whole numbers"):
        stores[0].add(VECTORS[:2], ["new", 5])


def test_a_file_is_kept_grown_and_cut(tmp_path: Path) -> None:
    uri = f"milvus:{tmp_path}/shop.db#birds"
    store = open_store(uri, GROUPS, about={"model": "x"})
    assert isinstance(store, MilvusStore)
    assert (len(store), store.ids, store.known([1])) == (0, [], [])
    assert store.search(QUERIES, 3).ids.shape == (6, 0)
    store.add(VECTORS, np.arange(COUNT), labels=np.arange(COUNT) % 4)
    store.close()

    store = open_store(uri)
    assert isinstance(store, MilvusStore)
    index = Index.build(VECTORS, groups=GROUPS, labels=np.arange(COUNT) % 4)
    assert store.about == {"model": "x"}
    for one in (store, index):
        one.remove(list(range(0, COUNT, 3)))
        one.add(embeddings(5, 9), range(1_000, 1_005), labels=[7] * 5)  # type: ignore[arg-type]
        one.add(embeddings(2, 8), [1, 1_001], labels=[8, 8], replace=True)
    assert len(store) == len(index) == 205
    assert store.entries([1, 1_000]) == [Entry(1, 8), Entry(1_000, 7)]
    same(store, index, queries=QUERIES, k=20)
    same(store, index, queries=QUERIES, k=20, where={"label": [7, 8, "3"]})
    same(store, index, queries=QUERIES, k=20, shortlist=50)
    with pytest.raises(SearchError, match=r"holds vectors of groups \(8, 16, 24\). Got \(24, 24\)"):
        open_store(uri, (24, 24))
    store.close()
    with pytest.raises(SearchError, match="has no collection 'bier'"):
        open_store(f"milvus:{tmp_path}/shop.db")


def test_addresses() -> None:
    assert parse_uri("milvus:shop.db") == Address("shop.db", "bier", "FLAT", True)
    assert parse_uri("milvus:http://h:19530?index=diskann#birds") == Address(
        "http://h:19530", "birds", "DISKANN", False
    )
    assert is_store_uri("milvus:shop.db")
    assert not is_store_uri("milvus")
    assert not is_store_uri("runs/birds")
    for wrong in ("milvus:", "milvus:folder", "milvus:x.db?colour=red"):
        with pytest.raises(SearchError, match="Milvus store"):
            parse_uri(wrong)
    with pytest.raises(SearchError, match="must be an index folder or start with"):
        open_store("http://host:19530")


def test_filters_as_text() -> None:
    assert expression({"label": 3}) == 'label in ["3"]'
    assert expression({"size": [1, 2.5], 'a"b': True}) == (
        '(entry["metadata"]["size"] == 1 or entry["metadata"]["size"] == 2.5) and (entry["metadata"]["a\\"b"] == true)'
    )


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(SearchError, match=r"http://127.0.0.1:1 could not do what was asked"):
        open_store("milvus:http://127.0.0.1:1", GROUPS)


def test_a_file_that_another_process_holds(tmp_path: Path) -> None:
    hold = (
        "import sys; from bier.search import open_store; open_store(sys.argv[1], (2,)); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", hold, f"milvus:{tmp_path}/a.db"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SearchError, match="Is another process using the file"):
            open_store(f"milvus:{tmp_path}/a.db")
        other.kill()


@pytest.mark.parametrize("missing", ["pymilvus", "milvus_lite"])
def test_missing_parts_are_named(tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bier-ml\[milvus\]'"):
        open_store(f"milvus:{tmp_path}/shop.db", GROUPS)
