"""PostgreSQL with the extension pgvector: a table that can be joined with a team's own ones."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from bier.errors import SearchError, needs
from bier.search.engines import Conditions, EngineStore, Hits, Row, split_name
from bier.search.store import SCAN_ROWS, Floats, Id

T = TypeVar("T")

EFFORT = 200  # hnsw.ef_search: candidates that the graph keeps; more results raise it
_MOST_EFFORT = 1_000
_LONGEST_HALF = 4_000  # dimensions that pgvector can index as halfvec
_NEEDED = (0, 8)  # the version of pgvector that can go on searching where a filter excludes candidates
_MEMORY = 2**31  # bytes that building a graph may take in the server


class PostgresStore(EngineStore):
    """A table with the columns id, label, path, entry (jsonb), terms (text[]) and vector (float32).

    Its comment is our note.

    `optimize` builds an HNSW graph over half precision from GRAPH_ROWS rows on; its candidates are ranked by the
    float32 vector, in the same statement. Credentials come from the URI or from what libpq reads: the PG variables, a
    password file, a service.
    """

    BATCH = 65_536  # one transaction
    GRAPH_ROWS = 5_000  # up to here a scan is as fast
    HINTS = {  # noqa: RUF012
        "not available": "Install pgvector on the server.",
        "onnection": "Run the command again when the server is back; a load continues where it stopped.",
    }

    def _connect(self, uri: str, new: bool) -> None:
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._psycopg = needs("psycopg", "postgres")
        needs("pgvector", "postgres")
        self._pgvector = needs("pgvector.psycopg", "postgres")
        self._json = needs("psycopg.types.json", "postgres").Jsonb
        self.failures = (self._psycopg.Error,)
        address, self.collection = split_name(uri)
        try:
            given = needs("psycopg.conninfo", "postgres").conninfo_to_dict(address)
        except self._psycopg.ProgrammingError:  # its message may contain the password
            raise SearchError(
                f"A PostgreSQL store must be postgresql://HOST/DATABASE#TABLE. Got {self.shown!r} instead."
            ) from None
        self._given = {"connect_timeout": 10, **given}
        with self._connection():
            pass

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    # Connections. Those of psycopg_pool wait for 30 s and then do not say why there is no server.

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection of this thread alone, for a while."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._new_connection()
        try:
            if not connection.bier_types:  # another client may have created the extension since
                self._register(connection)
            yield connection
        finally:
            if not connection.closed:
                with self._lock:
                    self._idle.append(connection)

    def _new_connection(self) -> Any:
        connection = self._psycopg.connect(**self._given, autocommit=True)
        try:
            # The planner ignores the cost of reading vectors, which are stored apart from their rows.
            connection.execute("SET enable_seqscan = off")
            connection.bier_types, connection.bier_effort = False, 0
            self._register(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _register(self, connection: Any) -> None:
        """Teach a connection the types of pgvector, as soon as the database has them."""
        found = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
        if found is None:
            return
        if tuple(int(part) for part in found[0].split(".")[:2]) < _NEEDED:
            raise SearchError(f"The store {self.shown} needs pgvector 0.8 or newer. Found {found[0]}.")
        self._pgvector.register_vector(connection)
        connection.execute("SET hnsw.iterative_scan = relaxed_order")
        connection.execute("SET hnsw.max_scan_tuples = 2147483647")
        connection.execute("SET hnsw.scan_mem_multiplier = 64")
        connection.bier_types = True

    def _run(self, work: Callable[[Any], T]) -> T:
        """Do some work with a connection. If the server has closed it meanwhile, once again with a new one."""
        connection = None
        try:
            with self._connection() as connection:
                return work(connection)
        except self._psycopg.OperationalError:
            if connection is None or not connection.closed:
                raise
        self.close()  # the others are lost too
        with self._connection() as connection:
            return work(connection)

    def _query(self, statement: str, values: Sequence[Any] = (), **names: str) -> list[tuple[Any, ...]]:
        """The rows of a statement. `{table}` is the collection's table; other names are those given."""
        text = self._composed(statement, **names)
        rows: list[tuple[Any, ...]] = self._run(
            lambda connection: connection.execute(text, values, binary=True).fetchall()
        )
        return rows

    def _composed(self, statement: str, **names: str) -> str:
        """A statement with its names in quotation marks; `split_name` refuses names that have such marks themselves.

        psycopg.sql would do the same, but anew for each query, in about the time that the rest of this adapter takes.
        """
        return statement.format(**{key: f'"{name}"' for key, name in {"table": self.collection, **names}.items()})

    # The table

    def _read_note(self) -> str | None:
        statement = "SELECT obj_description(c.oid, 'pg_class') FROM pg_class c WHERE c.oid = to_regclass(%s)"
        rows = self._query(statement, [f'"{self.collection}"'])
        return rows[0][0] or "" if rows else None

    @contextmanager
    def _alone(self, connection: Any, work: str = "") -> Iterator[None]:
        """A transaction of one client at a time: IF NOT EXISTS fails when two do the same at once."""
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [f"bier {work}"])
            yield

    def _create(self, note: str, whole_numbers: bool) -> None:
        columns = (
            f"id {'bigint' if whole_numbers else 'text'} PRIMARY KEY, label text, path text NOT NULL, entry jsonb "
            f"NOT NULL, terms text[] NOT NULL, vector vector({self.dimension}) NOT NULL"
        )
        quoted = needs("psycopg.sql", "postgres").Literal(note)  # a comment takes no parameters

        def work(connection: Any) -> None:
            with self._alone(connection):
                if not connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone():
                    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
                if connection.execute("SELECT to_regclass(%s)", [f'"{self.collection}"']).fetchone()[0] is not None:
                    return  # another client was faster
                connection.execute(self._composed(f"CREATE TABLE {{table}} ({columns})"))
                connection.execute(f"{self._composed('COMMENT ON TABLE {table} IS')} {quoted.as_string(connection)}")
                self._index(connection, "terms", "USING gin (terms)")

        self._run(work)

    def _index(self, connection: Any, field: str, definition: str) -> None:
        """An index whose name has a space, so that no collection can have the same."""
        statement = self._composed(
            f"CREATE INDEX IF NOT EXISTS {{name}} ON {{table}} {definition}", name=f"{self.collection} {field}"
        )
        connection.execute(statement)

    def optimize(self) -> None:
        """Build the graph of a collection that has none, which is faster after a load than during it."""
        with self._asking():
            if self._there() and self._count() >= self.GRAPH_ROWS:
                self._run(self._build_graph)

    def _build_graph(self, connection: Any) -> None:
        with self._alone(connection, f"graph {self.collection}"):
            room = self._count() * (2 * self.dimension + 400)
            connection.execute(f"SET LOCAL maintenance_work_mem = '{min(max(room, 2**26), _MEMORY) // 1024}kB'")
            if self.dimension <= _LONGEST_HALF:
                self._index(connection, "vector", f"USING hnsw (({self._half_vector}) halfvec_ip_ops) {_SETTINGS}")
        connection.execute(self._composed("ANALYZE {table}"))

    @property
    def _half_vector(self) -> str:
        """The vector as the graph compares it."""
        return f"vector::halfvec({self.dimension})"

    def _drop(self) -> None:
        self._run(lambda connection: connection.execute(self._composed("DROP TABLE IF EXISTS {table}")))

    # Rows

    def _put(self, rows: Sequence[Row], vectors: Floats) -> None:
        columns = "id, label, path, entry, terms, vector"
        changes = ", ".join(f"{name} = excluded.{name}" for name in columns.split(", ")[1:])

        def work(connection: Any) -> None:
            with connection.transaction(), connection.cursor() as cursor:
                cursor.execute(self._composed("CREATE TEMP TABLE new_rows (LIKE {table}) ON COMMIT DROP"))
                with cursor.copy(f"COPY new_rows ({columns}) FROM STDIN WITH (FORMAT binary)") as copy:
                    number = "int8" if isinstance(rows[0].id, int) else "text"
                    copy.set_types([number, "text", "text", "jsonb", "text[]", "vector"])
                    for row, vector in zip(rows, vectors, strict=True):
                        copy.write_row((row.id, row.label, row.path, self._json(row.entry), row.terms, vector))
                # in one order, so that two clients cannot wait for each other
                cursor.execute(
                    self._composed(
                        f"INSERT INTO {{table}} ({columns}) SELECT {columns} FROM new_rows ORDER BY id "
                        f"ON CONFLICT (id) DO UPDATE SET {changes}"
                    )
                )

        self._run(work)

    def _delete(self, ids: Sequence[Id]) -> None:
        self._run(lambda one: one.execute(self._composed("DELETE FROM {table} WHERE id = ANY(%s)"), [list(ids)]))

    def _read(self, ids: Sequence[Id], field: str) -> dict[Id, Any]:
        rows = self._query(f"SELECT id, {field} FROM {{table}} WHERE id = ANY(%s)", [list(ids)])
        return {one: value.to_numpy() if field == "vector" else value for one, value in rows}

    def _every_id(self) -> list[Id]:
        return [one for (one,) in self._query("SELECT id FROM {table}")]

    def _any_vector(self) -> Floats | None:
        rows = self._query("SELECT vector FROM {table} LIMIT 1")
        return np.asarray(rows[0][0].to_numpy(), np.float32) if rows else None

    def _count(self) -> int:
        return int(self._query("SELECT count(*) FROM {table}")[0][0])

    # Searches

    def _nearest(self, queries: Floats, k: int, wanted: Conditions, exact: bool) -> Hits:
        """One statement per query: the graph selects 2 k candidates, the float32 vector ranks them.

        A filter costs no recall: if few rows pass, they are all compared; otherwise the graph goes on until it has
        found as many that pass.
        """
        condition, values = " AND ".join(["true", *["terms && %s::text[]"] * len(wanted)]), wanted
        if wanted and not exact and 2 * k < SCAN_ROWS:
            some = f"SELECT 1 FROM {{table}} WHERE {condition} LIMIT {SCAN_ROWS + 1}"
            exact = self._query(f"SELECT count(*) FROM ({some}) AS few", values)[0][0] <= SCAN_ROWS
        hits = self._ask(queries, k, condition, values, exact)
        if wanted and not exact and any(len(some) < k for some in hits):
            hits = self._ask(queries, k, condition, values, True)
        return hits

    def _ask(self, queries: Floats, k: int, condition: str, values: Conditions, exact: bool) -> Hits:
        reach = 2 * k
        near = "" if exact else f"ORDER BY {self._half_vector} <#> %s::halfvec({self.dimension}) LIMIT {reach}"
        statement = self._composed(
            f"SELECT id, -(vector <#> %s) AS score FROM "
            f"(SELECT id, vector FROM {{table}} WHERE {condition} {near}) AS near ORDER BY score DESC LIMIT {k}"
        )
        effort = min(max(EFFORT, reach), _MOST_EFFORT)

        def work(connection: Any) -> Hits:
            if connection.bier_effort != effort:
                connection.execute(f"SET hnsw.ef_search = {effort}")
                connection.bier_effort = effort
            return [
                connection.execute(statement, [query, *values, *([] if exact else [query])], binary=True).fetchall()
                for query in queries
            ]

        return self._run(work)


_SETTINGS = "WITH (m = 16, ef_construction = 100)"
