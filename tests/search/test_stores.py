"""One suite of behaviours for every store: the embedded index, PostgreSQL, Qdrant's local mode and Milvus Lite.

A Qdrant server and a Milvus server are not reached by any test here.
"""

import importlib
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bier.collection import add_to_collection, fill_store
from bier.collection import stored as collections
from bier.errors import MissingExtraError, SearchError
from bier.search import Entry, Index, Store, is_store_uri, open_store, stores
from bier.search.sources import StoredSource
from bier.search.store import checked_where
from bier.search.stores import milvus, postgres, qdrant
from bier.search.stores.engine import EngineStore

GROUPS = (8, 16, 24)
COUNT = 300
STRANGE = ["it's", 'say "cheese"', "back\\slash", "{braces}", "Blåmes", "50%", "tab\tand\nline"]
MODEL = {"model": {"fingerprint": "abc"}, "root": None}
ENGINES = ["postgres", "qdrant", "milvus"]
NUMBER = itertools.count()


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
    {"path": f"/photos/{row}.jpg", "year": 2020 + row % 3, "good": row % 2 == 0, "size": 0.5 * (row % 4)}
    if row % 13
    else None
    for row in range(COUNT)
]
SOURCE = StoredSource(IDS, LABELS, GROUPS, MODEL, VECTORS)


def address(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URI of a collection that does not exist yet."""
    if kind == "postgres":
        return f"{request.getfixturevalue('postgres_server').uri}#birds_{next(NUMBER)}"
    pytest.importorskip({"qdrant": "qdrant_client", "milvus": "milvus_lite"}[kind])
    return f"qdrant:{folder}/qdrant" if kind == "qdrant" else f"milvus:{folder}/shop.db"


@pytest.fixture(scope="module", autouse=True)
def graphs_of_small_tables() -> Iterator[None]:
    """PostgreSQL builds its graphs for the few rows of these tests too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres.PostgresStore, "GRAPH_ROWS", 1)
        yield


@pytest.fixture(scope="module", params=ENGINES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Index]]:
    """A store and an index with the same 300 rows."""
    store = open_store(address(request.param, request, tmp_path_factory.mktemp("store")), GROUPS, MODEL)
    store.add(VECTORS[:100], IDS[:100], LABELS[:100], METADATA[:100])
    store.add(VECTORS, IDS, LABELS, METADATA, replace=True)
    store.optimize()
    yield store, Index.build(VECTORS, IDS, GROUPS, LABELS, METADATA)
    store.close()


@pytest.fixture(params=ENGINES)
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return address(request.param, request, tmp_path)


@pytest.fixture(params=["index", *ENGINES])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A new store without rows."""
    if request.param == "index":
        yield Index.build(np.empty((0, 48), np.float32), [], GROUPS, about=MODEL)
        return
    store = open_store(address(request.param, request, tmp_path), GROUPS, MODEL)
    yield store
    store.close()


def same(store: Store, index: Store, **question: Any) -> None:
    theirs, ours = store.search(**question), index.search(**question)
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
        {"where": {"label": "it's"}},
        {"where": {"label": STRANGE[1:4]}},
        {"where": {"label": "nobody"}},
        {"where": {"label": "None"}},
        {"where": {"year": 2021}},
        {"where": {"year": [2020, 2022], "good": True, "label": STRANGE}},
        {"where": {"size": [0.5, 1.5]}},
        {"where": {"path": "/photos/7.jpg"}},
        {"where": {"no such.key[0]": 1}},
        {"where": {"year": []}},
        {"learners": 1},
        {"learners": 2},
        {"learners": [3]},
        {"learners": [1, 3], "where": {"year": 2020}},
        {"learners": 2, "queries": 2 * QUERIES[:, :24]},
    ],
    ids=str,
)
def test_every_answer_is_that_of_the_index(loaded: tuple[Store, Index], question: dict) -> None:
    same(*loaded, **{"queries": QUERIES, "k": 5, **question})


def test_the_collection_is_that_of_the_index(loaded: tuple[Store, Index]) -> None:
    store, index = loaded
    assert len(store) == len(index) == COUNT
    assert sorted(map(str, store.ids)) == sorted(map(str, index.ids))
    assert (store.groups, store.dimension, store.about) == (index.groups, index.dimension, MODEL)
    some = [IDS[row] for row in (200, 3, 13, 0)]
    assert store.entries(some) == index.entries(some)
    np.testing.assert_array_equal(store.vectors(some), index.vectors(some))
    assert store.known([*some, "unknown", 7]) == some


def test_mistakes_are_those_of_the_index(loaded: tuple[Store, Index]) -> None:
    for store in loaded:
        for question, message in (
            ({"queries": QUERIES[:, :40]}, "must have 48 dimensions"),
            ({"queries": QUERIES, "k": 0}, "'k' parameter"),
            ({"queries": QUERIES, "learners": 4}, "'learners' parameter"),
        ):
            with pytest.raises(SearchError, match=message):
                store.search(**question)  # type: ignore[arg-type]
        with pytest.raises(SearchError, match="must have 48 dimensions"):
            store.add(VECTORS[:1, :40], ["new"])
        with pytest.raises(SearchError, match="must hold new ids"):
            store.add(VECTORS[:1], IDS[:1])
        with pytest.raises(SearchError, match="It has no 'unknown'"):
            store.remove([IDS[0], "unknown"])
        assert len(store) == COUNT
    for ids in (["new", 5], [5, 6]):
        with pytest.raises(SearchError, match="all strings or all whole numbers"):
            loaded[0].add(VECTORS[:2], ids)


def test_rows_can_be_read_by_others(loaded: tuple[Store, Index]) -> None:
    """By the engine's own client: label and path, and the first learner's vector."""
    store, _ = loaded
    if isinstance(store, postgres.PostgresStore):
        statement = (
            "SELECT label, path, learner_1 FROM {table} JOIN (VALUES (%s, 9.99)) AS prices (id, price) USING (id)"
        )
        [(label, path, first)] = store._query(statement, [IDS[4]])
        first = first.to_numpy()
    elif isinstance(store, qdrant.QdrantStore):
        [point] = store._client.retrieve("bier", [qdrant.point_id(IDS[4])], with_payload=True, with_vectors=True)
        label, path, first = point.payload["label"], point.payload["path"], point.vector["learner_1"]
    else:
        assert isinstance(store, milvus.MilvusStore)
        [row] = store._query(f"id == {milvus.literal(IDS[4])}", ["label", "path", "learner_1"])
        label, path, first = row["label"], row["path"], row["learner_1"]
    assert (label, path) == (LABELS[4], "/photos/4.jpg")
    np.testing.assert_allclose(np.float32(first), VECTORS[4, :8], atol=1e-3)


def test_the_funnel_is_one_request(loaded: tuple[Store, Index], monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = loaded
    asked: list[Any] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: asked.append(given) or call(*given, **named)

    if isinstance(store, postgres.PostgresStore):
        monkeypatch.setattr(store, "_run", counted(store._run))
    elif isinstance(store, qdrant.QdrantStore):
        monkeypatch.setattr(store._client, "query_points", counted(store._client.query_points))
    else:
        assert isinstance(store, milvus.MilvusStore)
        monkeypatch.setattr(store._client, "search", counted(store._client.search))
    store.search(QUERIES[0], 5)
    assert len(asked) == (2 if isinstance(store, milvus.MilvusStore) else 1)


def test_rows_are_added_replaced_and_removed(empty: Store) -> None:
    assert (len(empty), empty.ids, empty.known([1])) == (0, [], [])
    assert empty.search(QUERIES, 3).ids.shape == (6, 0)
    index = Index.build(VECTORS, groups=GROUPS, labels=np.arange(COUNT) % 4)
    empty.add(VECTORS, np.arange(COUNT), labels=np.arange(COUNT) % 4)
    empty.optimize()
    for one in (empty, index):
        one.remove(list(range(0, COUNT, 3)))
        one.add(embeddings(5, 9), range(1_000, 1_005), labels=[7] * 5)  # type: ignore[arg-type]
        one.add(embeddings(2, 8), [1, 1_001], labels=[8, 8], replace=True)
    assert len(empty) == len(index) == 205
    assert empty.entries([1, 1_000]) == [Entry(1, 8), Entry(1_000, 7)]
    same(empty, index, queries=QUERIES, k=20)
    same(empty, index, queries=QUERIES, k=20, where={"label": [7, 8, "3"]})
    same(empty, index, queries=QUERIES, k=20)


def test_a_filter_costs_no_recall(empty: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One percent of the rows passes; PostgreSQL scans these, or where they are many goes on in its graph."""
    vectors = embeddings(2_000, 3)
    labels = ["rare" if row % 100 == 0 else "common" for row in range(2_000)]
    empty.add(vectors, np.arange(2_000), labels)
    empty.optimize()
    rare = np.arange(0, 2_000, 100)
    best = rare[np.argsort(-(QUERIES @ vectors[rare].T), axis=1)[:, :10]].tolist()
    assert empty.search(QUERIES, 10, where={"label": "rare"}).ids.tolist() == best
    monkeypatch.setattr(postgres, "SCAN_ROWS", 5)
    assert empty.search(QUERIES, 10, where={"label": "rare"}).ids.tolist() == best


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Milvus Lite leaves its log open
def test_ten_clients_at_once(request: pytest.FixtureRequest, empty: Store) -> None:
    """Of a server each has its own connection; a local file has one store with ten threads."""
    uri = None
    if isinstance(empty, Index):  # its changes must run alone
        empty.add(embeddings(200, 4), np.arange(200))
    if isinstance(empty, postgres.PostgresStore):
        uri = f"{request.getfixturevalue('postgres_server').uri}#{empty.collection}"
    vectors = embeddings(200, 4)

    def work(client: int) -> list[int]:
        store = empty if uri is None else open_store(uri, GROUPS, MODEL)
        mine = np.arange(20 * client, 20 * client + 20)
        if not isinstance(store, Index):
            store.add(vectors[mine], mine, replace=True)
            store.add(vectors[:5], np.arange(5), replace=True)  # rows that all clients write
        found = [int(store.search(vectors[row], 1).ids[0]) for row in mine]
        if uri is not None:
            store.close()
        return found

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(work, range(10)))
    assert len(empty) == 200
    assert [one for some in answers for one in some] == list(range(200))


class Interrupted(StoredSource):
    """A source that fails at a row, as an encoder or a machine does."""

    def vectors(self, rows: Any, progress: Any = None) -> Any:
        if max(rows) >= 120:
            raise KeyboardInterrupt
        return super().vectors(rows, progress)


def test_a_load_is_resumed_and_repeated_without_doubling(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collections, "BATCH", 50)
    with pytest.raises(KeyboardInterrupt):
        fill_store(Interrupted(IDS, LABELS, GROUPS, MODEL, VECTORS), uri)
    assert fill_store(SOURCE, uri) == (COUNT, COUNT - 100)
    assert fill_store(SOURCE, uri) == (COUNT, 0)
    store = open_store(uri)
    same(store, Index.build(VECTORS, IDS, GROUPS), queries=QUERIES, k=5)
    store.close()


def test_another_model_or_dimension_is_refused(uri: str) -> None:
    with pytest.raises(SearchError, match=r"has no collection '\w+'. Load it first"):
        open_store(uri)
    fill_store(SOURCE, uri)
    other = {"model": {"fingerprint": "def"}, "root": None}
    with pytest.raises(SearchError, match=r"must hold vectors of one model\. It holds another model's"):
        fill_store(replace(SOURCE, about=other), uri)
    with pytest.raises(SearchError, match="another model's"):
        add_to_collection(replace(SOURCE, about=other), uri)
    with pytest.raises(SearchError, match=r"holds vectors of groups \(8, 16, 24\). Got \(24, 24\) instead"):
        fill_store(replace(SOURCE, groups=(24, 24)), uri)
    with pytest.raises(SearchError, match=r"holds vectors of groups \(8, 16, 24\). Got \(24, 24\) instead"):
        add_to_collection(replace(SOURCE, groups=(24, 24)), uri)
    assert fill_store(replace(SOURCE, about=other), uri, rebuild=True) == (COUNT, COUNT)


@pytest.mark.parametrize("kind", ["index", "qdrant"])
def test_more_images_are_added_to_a_collection(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Those of another folder by their whole path, although they have the names of others."""
    first = replace(SOURCE, about={**MODEL, "root": "/photos"}, ids=[f"{row}.jpg" for row in range(COUNT)])
    if kind == "index":
        target = str(tmp_path / "index")
        Index.build(VECTORS[:250], list(first.ids[:250]), GROUPS, LABELS[:250], about=first.about).save(target)
    else:
        target = address(kind, request, tmp_path)
        fill_store(replace(first, ids=first.ids[:250]), target)
    assert add_to_collection(first, target) == (300, 50)
    assert add_to_collection(first, target) == (300, 0)
    assert add_to_collection(replace(first, about={**MODEL, "root": "/more"}, ids=first.ids[:9]), target) == (309, 9)
    store = open_store(target)
    assert store.known(["/more/3.jpg", "299.jpg", "/photos/3.jpg"]) == ["/more/3.jpg", "299.jpg"]
    assert collections.image_path(store, "/more/3.jpg") == Path("/more/3.jpg")
    store.close()


def test_a_server_that_goes_away_and_comes_back(
    postgres_server: Any, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = address("postgres", request, tmp_path)
    monkeypatch.setattr(collections, "BATCH", 100)
    store = open_store(uri, GROUPS, MODEL)
    store.add(VECTORS[:10], IDS[:10])

    class Stopping(StoredSource):
        def vectors(self, rows: Any, progress: Any = None) -> Any:
            if max(rows) >= 200:
                postgres_server.stop()
            return super().vectors(rows, progress)

    try:
        with pytest.raises(SearchError, match="a load continues where it stopped") as caught:
            fill_store(Stopping(IDS, LABELS, GROUPS, MODEL, VECTORS), uri)
        assert len(str(caught.value).splitlines()) == 1
        with pytest.raises(SearchError, match="could not do what was asked"):
            store.search(QUERIES)
    finally:
        postgres_server.start()
    assert len(store) == 200
    assert fill_store(SOURCE, uri) == (COUNT, 100)
    same(store, Index.build(VECTORS, IDS, GROUPS), queries=QUERIES, k=5)
    store.close()


def test_the_first_learner_alone_uses_its_graph_in_postgres(loaded: tuple[Store, Index]) -> None:
    store, _ = loaded
    if not isinstance(store, postgres.PostgresStore):
        return
    said: list[Any] = []
    run = store._run

    def explained(work: Callable[[Any], Any]) -> Any:
        class Spy:
            bier_effort = 0

            def execute(self, statement: Any, values: Any = (), **named: Any) -> Any:
                if values:
                    with store._connection() as connection:
                        rows = connection.execute(f"EXPLAIN {statement}", values).fetchall()
                    said.extend(line for (line,) in rows)
                return run(lambda connection: connection.execute(statement, values, **named))

        return work(Spy())

    store._run = explained  # type: ignore[method-assign]
    store.search(QUERIES[0], 5, learners=1)
    store._run = run  # type: ignore[method-assign]
    assert any(f"{store.collection}_learner_1" in line for line in said), said


SECRET = "s3cr%25t"


@pytest.mark.parametrize(
    "wrong",
    [
        f"postgresql://me:{SECRET}@127.0.0.1:1/shop",
        f"postgresql://127.0.0.1:1/shop?user=me&password={SECRET}",
        f"postgresql://me:{SECRET}%@127.0.0.1:1/shop",  # not a percent-encoding
        f"postgresql://me:{SECRET}#x@127.0.0.1:1/shop",  # a # that begins the table's name
        f"postgres://me:{SECRET}@127.0.0.1:port/shop",
        f"qdrant:http://me:{SECRET}@127.0.0.1:1",
        f"qdrant:http://me:{SECRET}@127.0.0.1:port",
        f"milvus:http://me:{SECRET}@127.0.0.1:1",
        f"milvus:http://me:{SECRET}@127.0.0.1:port",
        f"mysql://me:{SECRET}@127.0.0.1/shop",
        f"postgresql://me:x {SECRET}@127.0.0.1:1/shop",
        f"postgresql://me:x\n{SECRET}@127.0.0.1:1/shop",
        f"postgresql:me:{SECRET}@127.0.0.1/shop",
        f"postgresql:host=127.0.0.1 port=1 password='x {SECRET}'",
        f"qdrant:http://127.0.0.1:1?api-key={SECRET}",
    ],
)
def test_a_server_that_is_not_there_is_one_line_without_the_password(wrong: str) -> None:
    for module in ("psycopg", "qdrant_client", "pymilvus"):
        pytest.importorskip(module)
    with pytest.raises(SearchError) as caught:
        open_store(wrong, GROUPS)
    assert len(str(caught.value).splitlines()) == 1
    assert "s3cr" not in str(caught.value)


def test_an_address_may_be_left_to_the_variables_of_postgresql(
    postgres_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = importlib.import_module("psycopg.conninfo").conninfo_to_dict(postgres_server.uri)
    for key in ("host", "port", "user", "dbname"):
        if key in given:
            monkeypatch.setenv(f"PG{'DATABASE' if key == 'dbname' else key.upper()}", str(given[key]))
    with closing(open_store("postgresql://#from_variables", GROUPS)) as store:
        store.add(VECTORS[:9], IDS[:9])
    with closing(open_store(f"{postgres_server.uri}#from_variables")) as store:
        assert store.known(IDS[:10]) == IDS[:9]


def test_a_new_database_gets_the_extension(postgres_server: Any) -> None:
    """Two clients are connected before the types of pgvector exist."""
    with open_store(f"{postgres_server.uri}#x", GROUPS)._connection() as connection:  # type: ignore[attr-defined]
        connection.execute("CREATE DATABASE fresh")
    uri = postgres_server.uri.replace("/postgres?", "/fresh?")
    with closing(open_store(uri, GROUPS)) as first, closing(open_store(uri, GROUPS)) as second:
        first.add(VECTORS[:9], IDS[:9])
        second.add(VECTORS[9:], IDS[9:])
        first.optimize()
        same(second, Index.build(VECTORS, IDS, GROUPS), queries=QUERIES, k=5)


def test_an_old_pgvector_is_named(postgres_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"{postgres_server.uri}#old"
    store = open_store(uri, GROUPS, rebuild=True)
    store.add(VECTORS[:1], [1])
    store.close()
    monkeypatch.setattr(postgres, "_NEEDED", (9, 0))
    with pytest.raises(SearchError, match=r"needs pgvector 0.8 or newer. Found 0\.\d"):
        open_store(uri)


def test_a_folder_that_another_client_holds(tmp_path: Path) -> None:
    pytest.importorskip("qdrant_client")
    store = open_store(f"qdrant:{tmp_path}/a", GROUPS)
    with pytest.warns(ResourceWarning), pytest.raises(SearchError, match="Is another process using the folder"):
        open_store(f"qdrant:{tmp_path}/a")  # the client does not close its lock file
    store.close()
    open_store(f"qdrant:{tmp_path}/a").close()


PAGE = (Path(__file__).parents[2] / "docs" / "stores.md").read_text(encoding="utf-8")


def test_code_of_the_page_runs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python block in a folder of Qdrant, the SQL block on the same rows in PostgreSQL."""
    pytest.importorskip("qdrant_client")
    [code], [statement] = (re.findall(rf"```{name}\n(.*?)```", PAGE, flags=re.DOTALL) for name in ("python", "sql"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "stores.md", "exec"), names)
    assert names["found"].ids.tolist()[0] == "0.jpg"
    server = request.getfixturevalue("postgres_server").uri
    store = open_store(f"{server}#birds", (96, 160, 256), rebuild=True)
    assert isinstance(store, postgres.PostgresStore)
    rows = [f"{row}.jpg" for row in range(100)]
    store.add(names["vectors"][:100], rows, labels=["Heron", "Gull"] * 50)
    prices = "CREATE TABLE IF NOT EXISTS prices AS SELECT id, 9.99 AS price FROM birds"
    store._run(lambda connection: connection.execute(prices))
    assert [str(price) for _, price in store._query(statement)] == ["9.99"] * 10
    assert store._query(statement)[0][0] == "0.jpg"
    store.close()


def test_addresses() -> None:
    assert milvus.parse_uri("milvus:shop.db") == milvus.Address("shop.db", "bier", "FLAT", True)
    assert milvus.parse_uri("milvus:http://h:19530?index=diskann#birds") == milvus.Address(
        "http://h:19530", "birds", "DISKANN", False
    )
    assert qdrant.parse_uri("qdrant:http://h:6333#birds") == ("http://h:6333", "birds", False)
    assert qdrant.parse_uri("qdrant:some/folder") == ("some/folder", "bier", True)
    for text in ("milvus:shop.db", "postgres://h/x", "postgresql:///x", "qdrant:x"):
        assert is_store_uri(text)
    assert not is_store_uri("milvus")
    assert not is_store_uri("runs/birds")
    for wrong in ("milvus:", "milvus:folder", "milvus:x.db?colour=red", "qdrant:", "qdrant:http://"):
        with pytest.raises(SearchError, match=r"A (Milvus|Qdrant) store"):
            open_store(wrong)
    with pytest.raises(SearchError, match=r"must be an index folder or milvus:NAME\.db"):
        open_store("http://host:19530")


def test_filters_of_milvus_as_text() -> None:
    assert milvus.expression(checked_where({"label": 3})) == 'label in ["3"]'
    assert milvus.expression(checked_where({"size": [1, 2.5], 'a"b': True})) == (
        '(entry["metadata"]["size"] == 1 or entry["metadata"]["size"] == 2.5) and (entry["metadata"]["a\\"b"] == true)'
    )


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They did not say of which type the ids are."""
    pytest.importorskip("milvus_lite")
    store = open_store(f"milvus:{tmp_path}/shop.db", GROUPS, MODEL)
    assert isinstance(store, EngineStore)
    store.add(VECTORS[:9], IDS[:9])
    store._write_record({"groups": list(GROUPS), "about": MODEL})
    store.close()
    store = open_store(f"milvus:{tmp_path}/shop.db")
    assert (store.known(IDS[:9]), store.groups) == (IDS[:9], GROUPS)
    store.close()


def test_stores_are_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are also known to a source tree that is not installed; others are found by their scheme."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][stores.GROUP] == stores.BUILT_IN
    theirs = EntryPoint("redis", f"{__name__}:redis_store", stores.GROUP)
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or type(sys)(__name__))
    monkeypatch.setattr(sys.modules[__name__], "redis_store", lambda *given: given, raising=False)
    monkeypatch.setattr(stores, "entry_points", lambda group: [theirs])
    stores._others.cache_clear()
    try:
        assert is_store_uri("redis:x")
        assert open_store("redis:x", GROUPS) == ("redis:x", GROUPS, None, False)
    finally:
        stores._others.cache_clear()


@pytest.mark.parametrize(
    ("missing", "extra", "uri"),
    [
        ("pymilvus", "milvus", "milvus:shop.db"),
        ("milvus_lite", "milvus", "milvus:shop.db"),
        ("psycopg", "postgres", "postgresql://h/x"),
        ("pgvector", "postgres", "postgresql://h/x"),
        ("qdrant_client", "qdrant", "qdrant:x"),
    ],
)
def test_missing_parts_are_named(missing: str, extra: str, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'bier-ml\[{extra}\]'"):
        open_store(uri, GROUPS)
