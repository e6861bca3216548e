"""One suite of behaviours for every store: the embedded index, PostgreSQL, Qdrant's local mode and Milvus Lite.

A Qdrant server and a Milvus server are not reached by any test here.
"""

import importlib
import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bier.collection import Collection, changing
from bier.collection import collection as collections
from bier.errors import MissingExtraError, SearchError
from bier.search import Entry, Index, Store, engines, is_store_uri, open_store
from bier.search.engines import milvus, postgres, qdrant
from bier.search.sources import StoredSource

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


def fill_store(source: StoredSource, uri: str, rebuild: bool = False) -> tuple[int, int]:
    """(images in the store, images that were new), as `bier index --store` loads them."""
    with changing(uri, source, rebuild) as collection:
        new = collection.add(source).new
        return len(collection.store), new


def add_to_collection(source: StoredSource, target: str) -> tuple[int, int]:
    """As `bier index --add` adds."""
    with changing(target) as collection:
        new = collection.add(source).new
        return len(collection.store), new


def address(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URI of a collection that does not exist yet."""
    if kind == "postgres":
        return f"{request.getfixturevalue('postgres_server').uri}#birds_{next(NUMBER)}"
    pytest.importorskip({"qdrant": "qdrant_client", "milvus": "milvus_lite"}[kind])
    return f"qdrant:{folder}/qdrant" if kind == "qdrant" else f"milvus:{folder}/shop.db"


@pytest.fixture(scope="module", autouse=True)
def graphs_of_small_tables() -> Iterator[None]:
    """PostgreSQL builds its graph for the few rows of these tests too."""
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


def test_the_collection_is_that_of_the_index(loaded: tuple[Store, Index], monkeypatch: pytest.MonkeyPatch) -> None:
    store, index = loaded
    assert len(store) == len(index) == COUNT
    with monkeypatch.context() as patch:
        patch.setattr(milvus.MilvusStore, "BATCH", 7)  # pages that end at every kind of id
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
    """By the engine's own client: label, path and vector."""
    store, _ = loaded
    if isinstance(store, postgres.PostgresStore):
        statement = "SELECT label, path, vector FROM {table} JOIN (VALUES (%s, 9.99)) AS prices (id, price) USING (id)"
        [(label, path, vector)] = store._query(statement, [IDS[4]])
        vector = vector.to_numpy()
    elif isinstance(store, qdrant.QdrantStore):
        [point] = store._client.retrieve("bier", [qdrant.point_id(IDS[4])], with_payload=True, with_vectors=True)
        label, path, vector = point.payload["label"], point.payload["path"], point.vector["vector"]
    else:
        assert isinstance(store, milvus.MilvusStore)
        [row] = store._query(f"id == {milvus.literal(IDS[4])}", ["label", "path", "vector"])
        label, path, vector = row["label"], row["path"], row["vector"]
    assert (label, path) == (LABELS[4], "/photos/4.jpg")
    np.testing.assert_array_equal(np.float32(vector), VECTORS[4])


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
    assert Collection(store).path(store.entries(["/more/3.jpg"])[0]) == Path("/more/3.jpg")
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
    open_store(f"qdrant:{tmp_path}/a", GROUPS).close()


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


def test_engines_are_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are also known to a source tree that is not installed; others are found by their scheme."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][engines.GROUP] == engines.BUILT_IN
    theirs = EntryPoint("redis", f"{__name__}:redis_store", engines.GROUP)
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or type(sys)(__name__))
    monkeypatch.setattr(sys.modules[__name__], "redis_store", lambda *given: given, raising=False)
    monkeypatch.setattr(engines, "entry_points", lambda group: [theirs])
    engines._others.cache_clear()
    try:
        assert is_store_uri("redis:x")
        assert open_store("redis:x", GROUPS) == ("redis:x", GROUPS, None, False)
    finally:
        engines._others.cache_clear()


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


# What is not ours


def run_bier(*arguments: object) -> tuple[int, str]:
    """(exit code, standard error) of a command."""
    command = [sys.executable, "-m", "bier", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stderr


@pytest.fixture
def vectors_file(tmp_path: Path) -> Path:
    """What `bier index V --store` takes: embeddings with ids."""
    file = tmp_path / "vectors.safetensors"
    save_file({"vectors": VECTORS}, file)
    known = {"paths": IDS, "labels": LABELS, "groups": GROUPS, "model": MODEL["model"]}
    file.with_suffix(".json").write_text(json.dumps(known))
    return file


def test_a_table_of_others_is_refused_and_stays(postgres_server: Any, vectors_file: Path) -> None:
    """Also a view, an index or a sequence of that name."""
    server = postgres_server.uri
    with closing(importlib.import_module("psycopg").connect(server, autocommit=True)) as connection:
        connection.execute("CREATE TABLE customers (id bigint PRIMARY KEY, name text)")
        connection.execute("INSERT INTO customers SELECT n, 'name ' || n FROM generate_series(1, 1000) AS n")
        connection.execute('COMMENT ON TABLE customers IS \'{"owner": "sales"}\'')
        connection.execute("CREATE VIEW view_of_customers AS SELECT * FROM customers")
        tables = "SELECT relname FROM pg_class WHERE relkind IN ('r', 'v', 'i') ORDER BY 1"
        before = connection.execute(tables).fetchall()
        for name in ("customers", "view_of_customers", "customers_pkey"):
            for options in ([], ["--rebuild"]):
                code, told = run_bier("index", vectors_file, "--store", f"{server}#{name}", *options)
                assert (code, f"Something else has the name '{name}'" in told) == (2, True), told
            with pytest.raises(SearchError, match="Something else has the name"):
                open_store(f"{server}#{name}")
        assert connection.execute("SELECT count(*) FROM customers").fetchone() == (1000,)
        assert connection.execute(tables).fetchall() == before  # no record either


@pytest.mark.parametrize("kind", ["qdrant", "milvus"])
def test_a_collection_of_others_is_refused_and_stays(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, vectors_file: Path
) -> None:
    uri = address(kind, request, tmp_path)
    with closing(open_store(uri, GROUPS)) as store:
        if isinstance(store, qdrant.QdrantStore):
            store._client.create_collection("theirs", vectors_config={})
            store._client.create_collection("noted", vectors_config={}, metadata={"bier": '{"groups": [8]}'})
        else:
            assert isinstance(store, milvus.MilvusStore)
            for name in ("theirs", "noted"):
                store._client.create_collection(name, dimension=4)
    for name in ("theirs", "noted"):
        for options in ([], ["--rebuild"]):
            code, told = run_bier("index", vectors_file, "--store", f"{uri}#{name}", *options)
            assert (code, f"Something else has the name '{name}'" in told) == (2, True), told
    assert run_bier("index", vectors_file, "--store", f"{uri}#ours")[0] == 0
    with closing(open_store(f"{uri}#ours")) as store:
        client = store._client  # type: ignore[attr-defined]
        names = (
            client.list_collections()
            if kind == "milvus"
            else [one.name for one in client.get_collections().collections]
        )
        assert sorted(names) == ["noted", "ours", "theirs"]


def test_files_of_others_inside_a_local_store_stay(tmp_path: Path, vectors_file: Path) -> None:
    """Qdrant's local mode and Milvus Lite delete a collection's folder with all that is in it."""
    for module in ("qdrant_client", "milvus_lite"):
        pytest.importorskip(module)
    for uri, folder in ((f"qdrant:{tmp_path}/Q", "Q/collection"), (f"milvus:{tmp_path}/M.db", "M.db/collections")):
        assert run_bier("index", vectors_file, "--store", f"{uri}#other")[0] == 0
        mine = tmp_path / folder / "birds" / "mine.txt"
        mine.parent.mkdir()
        mine.write_text("mine")
        for options in ([], ["--rebuild"], ["--rebuild"]):
            code, told = run_bier("index", vectors_file, "--store", f"{uri}#birds", *options)
            assert (code, "Something else has the name 'birds'" in told) == (2, True), told
        assert mine.read_text() == "mine"
    note = tmp_path / "Q/collection/other/notes.txt"
    note.write_text("mine")
    code, told = run_bier("index", vectors_file, "--store", f"qdrant:{tmp_path}/Q#other", "--rebuild")
    assert (code, "It has 'notes.txt' too" in told, note.read_text()) == (2, True, "mine")


@pytest.mark.parametrize("uri", ["qdrant:photos", "milvus:photos.db"])
def test_a_folder_of_others_is_no_local_store(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("qdrant_client", "milvus_lite"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    folder = Path(uri.partition(":")[2])
    with pytest.raises(SearchError, match="has no collection 'bier'"):
        open_store(uri)
    assert not folder.exists()
    folder.mkdir()
    (folder / "1.jpg").write_bytes(b"a picture")
    with pytest.raises(SearchError, match="must be a new or empty folder, or an earlier one"):
        open_store(uri, GROUPS)
    assert [file.name for file in folder.iterdir()] == ["1.jpg"]


@pytest.mark.parametrize("text", ["[]", "{}", "x", '{"collections": {"b": 3}, "aliases": {}}', '{"collections": []}'])
def test_a_foreign_meta_json_is_one_line(text: str, tmp_path: Path) -> None:
    pytest.importorskip("qdrant_client")
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(SearchError, match=r"Its meta\.json is another file, or damaged"):
        open_store(f"qdrant:{tmp_path}", GROUPS)
    assert (tmp_path / "meta.json").read_text() == text


@pytest.mark.parametrize("name", ["../../photos", "a b", 'a"b', "x" * 41, "1st", "birds.x"])
def test_names_of_collections(name: str, uri: str) -> None:
    with pytest.raises(SearchError, match="must be up to 40 letters, digits and underscores"):
        open_store(f"{uri.partition('#')[0]}#{name}", GROUPS)


def test_no_name_is_reserved(uri: str) -> None:
    """The record lies with its collection: no other name can hide it, and no load of another model passes it."""
    base = uri.partition("#")[0]
    names = ["birds", "birds_about", "birds_label", "bier_stores"]
    for number, name in enumerate(names):
        with closing(open_store(f"{base}#{name}", GROUPS, {"model": {"fingerprint": name}}, rebuild=True)) as store:
            store.add(VECTORS[number : number + 1], IDS[number : number + 1])
            store.optimize()
    for number, name in enumerate(names):
        with closing(open_store(f"{base}#{name}", GROUPS, {"model": {"fingerprint": name}})) as store:
            assert store.ids == [IDS[number]]
        with pytest.raises(SearchError, match="another model's"):
            open_store(f"{base}#{name}", GROUPS, {"model": {"fingerprint": "another"}})


def test_a_load_that_is_refused_leaves_nothing_behind(uri: str) -> None:
    """Nothing is written before the first rows are."""
    with closing(open_store(uri, GROUPS, {"model": {"fingerprint": "a"}})) as store:
        assert (len(store), store.ids) == (0, [])
        with pytest.raises(SearchError, match="Got both"):
            store.add(VECTORS[:2], [1, "x"])
    with pytest.raises(SearchError, match="has no collection"):
        open_store(uri)
    with closing(open_store(uri, GROUPS, {"model": {"fingerprint": "b"}})) as store:
        store.add(VECTORS[:2], IDS[:2])


@pytest.mark.parametrize("kind", ["postgres"])
def test_another_client_that_was_faster_with_another_model(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    uri = address(kind, request, tmp_path)
    with closing(open_store(uri, GROUPS, MODEL)) as slow:
        with closing(open_store(uri, GROUPS, {"model": {"fingerprint": "def"}})) as fast:
            fast.add(VECTORS[:2], IDS[:2])
        with pytest.raises(SearchError, match="another model's"):
            slow.add(VECTORS, IDS)
        with closing(open_store(uri, GROUPS, MODEL, rebuild=True)) as third:
            third.add(VECTORS, IDS)
        slow.add(VECTORS[:1], ["new"])
        assert len(slow) == COUNT + 1


def test_what_no_engine_can_store_is_one_line(uri: str) -> None:
    with closing(open_store(uri, GROUPS)) as store:
        store.add(VECTORS[:1], ["a"], metadata=[{"list": [1, {"a": None}], "large": np.int64(2**53)}])
        for name in ("\ud800", "a\0b", 2**64, -(2**63) - 1):
            with pytest.raises(SearchError, match="'ids' parameter"):
                store.add(VECTORS[:1], [name])
            assert store.known([name]) == []
        for label in ("\ud800", "a\0b"):
            with pytest.raises(SearchError, match="must be JSON"):
                store.add(VECTORS[:1], ["b"], labels=[label])
            assert store.search(QUERIES, where={"label": label}).ids.size == 0
        for value in ({1, 2}, float("nan"), b"bytes", "\ud800", {"a": "\0"}, object()):
            with pytest.raises(SearchError, match="must be JSON"):
                store.add(VECTORS[:1], ["b"], metadata=[{"key": value}])
        assert store.ids == ["a"]
        assert store.entries(["a"]) == [Entry("a", None, {"list": [1, {"a": None}], "large": 2**53})]
