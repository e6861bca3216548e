"""Search on real embeddings: time a query, recall@10, build time and bytes of the index beside faiss's exact search.

    python benchmarks/search.py                        CUB-200-2011 test images, frozen features
    python benchmarks/search.py --model runs/birds     the same images through a trained model
    python benchmarks/search.py --embeddings FILE      vectors of `bier embed`
    python benchmarks/search.py --quick                small sizes, under a minute
    python benchmarks/search.py --large 1000000        `bier index` of so many images within 6 GB

The collection is the real images; larger sizes add distractors. `drawn` ones come from a normal distribution with the
mean and covariance of the real vectors: other images of the same kind of collection. `mixed` ones are means of two real
vectors with random weights, which crowd the very neighbourhoods that are asked for. Both are scaled back to the
learners' lengths. The queries are 200 real images that are not in the collection.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy: every search below is one stream on one thread

import faiss
import numpy as np

from _report import Report, cores
from bier.search import Index, read_embeddings
from bier.search.embeddings import SHARD, EmbeddingsWriter

SEED = 0
QUERIES = 200
ROUNDS, PER_ROUND = 5, 20
SIZES = (20_000, 50_000, 200_000)  # the first two are searched exactly
GROUPS = (96, 160, 256)
FAISS = "faiss IndexFlatIP"
CUB = Path(__file__).parents[1].parent / "shared" / "data" / "CUB_200_2011"
CACHE = Path(tempfile.gettempdir()) / "bier-benchmarks"


def embedded(arguments: argparse.Namespace) -> tuple[np.ndarray, tuple[int, ...], str]:
    """Test-time vectors of real images, the learners' sizes, and a line that says where they come from."""
    if arguments.embeddings:
        known = read_embeddings(arguments.embeddings)
        return known.vectors, known.groups, f"vectors of {arguments.embeddings.name}"
    if not arguments.root.is_dir():
        raise SystemExit(f"no CUB-200-2011 at {arguments.root}: give --root or --embeddings")
    cached = CACHE / "cub-test-frozen-lite0.npz"
    made_by = arguments.model.name if arguments.model else "frozen EfficientNet-Lite0 and a random (Glorot) projection"
    source = f"CUB test images, {made_by}"
    if arguments.model:
        return *encoded(arguments), source
    if not cached.is_file():
        vectors, groups = encoded(arguments)
        CACHE.mkdir(parents=True, exist_ok=True)
        np.savez(cached, vectors=vectors, groups=groups)
    with np.load(cached, allow_pickle=False) as arrays:
        return arrays["vectors"], tuple(arrays["groups"].tolist()), source


def encoded(arguments: argparse.Namespace) -> tuple[np.ndarray, tuple[int, ...]]:
    import torch

    from bier import EmbeddingEnsemble, Model, load
    from bier.models.backbones import build_backbone

    torch.manual_seed(SEED)
    if arguments.model:
        model = load(arguments.model)
    else:
        backbone = build_backbone("efficientnet_lite0")
        model = Model(backbone, EmbeddingEnsemble(backbone.features, GROUPS), "alpha")
    labels = dict(line.split() for line in (arguments.root / "image_class_labels.txt").read_text().splitlines())
    images = [line.split() for line in (arguments.root / "images.txt").read_text().splitlines()]
    paths = [arguments.root / "images" / path for number, path in images if int(labels[number]) > 100]
    return model.encode(paths), tuple(model.groups)


def with_distractors(vectors: np.ndarray, groups: tuple[int, ...], size: int, kind: str) -> np.ndarray:
    """The vectors, or the first of them, or them and distractors."""
    if size <= len(vectors):
        return vectors[:size]
    rng = np.random.default_rng(SEED)
    count = size - len(vectors)
    if kind == "drawn":
        values, directions = np.linalg.eigh(np.cov(vectors, rowvar=False))
        spread = (directions * np.sqrt(values.clip(0))).T.astype(np.float32)
        made = rng.standard_normal((count, vectors.shape[1]), np.float32) @ spread + vectors.mean(axis=0)
    else:
        share = rng.uniform(0.3, 0.7, size=(count, 1)).astype(np.float32)
        made = share * vectors[rng.integers(len(vectors), size=count)]
        made += (1 - share) * vectors[rng.integers(len(vectors), size=count)]
    start = 0
    for width in groups:
        part, length = made[:, start : start + width], np.linalg.norm(vectors[0, start : start + width])
        part *= length / np.linalg.norm(part, axis=1, keepdims=True)
        start += width
    return np.concatenate([vectors, made])


LIMIT = 6 * 10**9
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
sys.argv[:2] = ["bier"]
from bier.cli import main
try:
    main()
finally:
    known = dict(line.split(":") for line in open("/proc/self/status"))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(known["VmPeak"].split()[0], known["VmHWM"].split()[0], used.ru_utime + used.ru_stime, file=sys.stderr)
"""


def mixed_blocks(vectors: np.ndarray, groups: tuple[int, ...], size: int) -> Iterator[np.ndarray]:
    """The vectors, then means of two of them with random weights, in blocks of a shard each."""
    ends = np.cumsum(groups)
    lengths = [np.linalg.norm(part[0]) for part in np.split(vectors, ends[:-1], axis=1)]
    for start in range(0, size, SHARD):
        rng, count = np.random.default_rng([SEED, start]), min(SHARD, size - start)
        share = rng.uniform(0.3, 0.7, size=(count, 1)).astype(np.float32)
        first, second = (vectors[rng.integers(len(vectors), size=count)] for _ in range(2))
        block = share * first + (1 - share) * second
        for part, length in zip(np.split(block, ends[:-1], axis=1), lengths, strict=True):
            part *= length / np.linalg.norm(part, axis=1, keepdims=True)
        block[: max(0, len(vectors) - start)] = vectors[start : start + count]
        yield block


def write_large(out: Path, vectors: np.ndarray, groups: tuple[int, ...], size: int) -> None:
    writer = EmbeddingsWriter(out, size, "benchmark")
    writer.begin()
    for number, block in enumerate(mixed_blocks(vectors, groups, size)):
        writer.write(number, block, block)
    paths = [f"images/{row:09d}.jpg" for row in range(size)]
    labels = [f"class {row % 10_000}" for row in range(size)]
    writer.finish({"paths": paths, "labels": labels, "groups": list(groups), "weighting": "alpha"})


def nearest_of_blocks(queries: np.ndarray, blocks: Iterator[np.ndarray], k: int = 10) -> np.ndarray:
    """The k best rows of each query, by comparing with all of them."""
    rows, scores, start = np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0), np.float32), 0
    for block in blocks:
        here = queries @ block.T
        best = np.argpartition(-here, min(k, len(block) - 1), axis=1)[:, :k]
        rows = np.concatenate([rows, best + start], axis=1)
        scores = np.concatenate([scores, np.take_along_axis(here, best, axis=1)], axis=1)
        kept = np.argsort(-scores, axis=1)[:, :k]
        rows, scores = np.take_along_axis(rows, kept, axis=1), np.take_along_axis(scores, kept, axis=1)
        start += len(block)
    return rows


def large(vectors: np.ndarray, groups: tuple[int, ...], queries: np.ndarray, size: int) -> None:
    """Print what `bier index` takes for an embeddings file of this size under the limit, and how its index answers."""
    with tempfile.TemporaryDirectory(prefix="bier-large-") as name:
        folder = Path(name)
        start = time.perf_counter()
        write_large(folder / "v.safetensors", vectors, groups, size)
        print(
            f"\n{size:,} images, {len(vectors):,} real and the rest mixed (means of two real vectors); embeddings file "
            f"{(folder / 'v.safetensors').stat().st_size / 1e9:.2f} GB, written in {time.perf_counter() - start:.0f} s"
        )
        exact = nearest_of_blocks(queries, mixed_blocks(vectors, groups, size))
        print(
            f"`bier index` within {LIMIT / 1e9:.0f} GB of address space, 1 thread; {len(queries)} queries, 1 at a time"
        )
        print(
            f"{'build s':>9s}{'CPU s':>8s}{'peak GB':>9s}{'RAM GB':>8s}{'bytes/image':>13s}"
            f"{'open s':>8s}{'CPU s':>7s}{'first ms':>10s}{'ms':>8s}{'CPU ms':>8s}{'recall@10':>11s}"
        )
        large_row(folder, queries, exact, size)


def large_row(folder: Path, queries: np.ndarray, exact: np.ndarray, size: int) -> None:
    command = [
        sys.executable,
        "-c",
        LIMITED,
        LIMIT,
        "index",
        folder / "v.safetensors",
        "--out",
        folder / "index",
        "--json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {done.stderr.strip().splitlines()[0]}")
    address, memory, processor = (float(word) for word in done.stderr.split()[-3:])
    seconds = json.loads(done.stdout)["seconds"]
    start = time.perf_counter(), time.thread_time()
    index = Index.load(folder / "index")
    opened = time.perf_counter() - start[0], time.thread_time() - start[1]
    start = time.perf_counter(), time.thread_time()
    index.search(queries[0], 10)
    first = time.perf_counter() - start[0]
    times, found = [], []
    for query in queries:
        start = time.perf_counter(), time.thread_time()
        found.append(index.search(query, 10).rows)
        times.append((time.perf_counter() - start[0], time.thread_time() - start[1]))
    clock, own = 1e3 * np.median(times, axis=0)
    recall = np.mean([np.isin(one, other).mean() for one, other in zip(found, exact, strict=True)])
    stored = sum(path.stat().st_size for path in (folder / "index").rglob("*") if path.is_file())
    print(
        f"{seconds:9.0f}{processor:8.0f}{address * 1024 / 1e9:9.2f}{memory * 1024 / 1e9:8.2f}"
        f"{stored / size:13.0f}{opened[0]:8.2f}{opened[1]:7.2f}{1e3 * first:10.0f}{clock:8.2f}{own:8.2f}{recall:11.4f}",
        flush=True,
    )


def built(vectors: np.ndarray, groups: tuple[int, ...], folder: Path) -> tuple[Index, float, int, int]:
    """A saved and loaded index, the seconds it took to build, the bytes of its vectors and those besides."""
    faiss.omp_set_num_threads(cores())
    start = time.perf_counter()
    index = Index.build(vectors, [f"images/{row:09d}.jpg" for row in range(len(vectors))], groups)
    seconds = time.perf_counter() - start
    index.save(folder)
    faiss.omp_set_num_threads(1)
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return Index.load(folder), seconds, sizes["vectors.f32"], sum(sizes.values()) - sizes["vectors.f32"]


def measured(
    ways: dict[str, Callable[[np.ndarray], np.ndarray]], queries: np.ndarray
) -> dict[str, tuple[float, float, float]]:
    """Milliseconds a query by the clock and of the processor (medians; the ways take turns), and recall@10."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        for name, search in ways.items():
            for query in queries[turn * PER_ROUND : (turn + 1) * PER_ROUND]:
                start = time.perf_counter(), time.thread_time()
                search(query)
                times[name].append((time.perf_counter() - start[0], time.thread_time() - start[1]))
    found = {name: [set(search(query).tolist()) for query in queries] for name, search in ways.items()}
    return {
        name: (
            *(1e3 * np.median(times[name], axis=0)).tolist(),
            float(np.mean([len(a & b) / len(b) for a, b in zip(found[name], found[FAISS], strict=True)])),
        )
        for name in ways
    }


def compare(
    report: Report, title: str, vectors: np.ndarray, groups: tuple[int, ...], queries: np.ndarray
) -> list[list[Any]]:
    """The table of one size, ours in the first row."""
    with tempfile.TemporaryDirectory(prefix="bier-search-") as folder:
        rows = table(vectors, groups, queries, Path(folder))
    columns = ["", "ms", "CPU ms", "x faiss", "recall@10", "build s", "MB besides", "of vectors"]
    report.table(f"{len(vectors):,} images, {title}", columns, rows)
    return rows


def table(vectors: np.ndarray, groups: tuple[int, ...], queries: np.ndarray, folder: Path) -> list[list[Any]]:
    index, seconds, floats, besides = built(vectors, groups, folder / "index")
    theirs = faiss.IndexFlatIP(vectors.shape[1])
    theirs.add(vectors)
    times = measured(
        {
            f"bier.Index, {index.method}": lambda query: index.search(query, 10).rows,
            FAISS: lambda query: theirs.search(query[None], 10)[1][0],
        },
        queries,
    )
    rows = []
    for name, (wall, processor, recall) in times.items():
        faster = times[FAISS][1] / processor
        extra = [seconds, besides / 1e6, besides / floats] if name != FAISS else ["", "", ""]
        rows.append([name, wall, processor, faster, f"{recall:.4f}", *extra])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a run or model folder; frozen features where not given")
    parser.add_argument("--embeddings", type=Path, help="a file of `bier embed` to use instead")
    parser.add_argument("--root", type=Path, default=CUB, help="the folder CUB_200_2011")
    parser.add_argument("--quick", action="store_true", help="up to 20,000 images only")
    parser.add_argument("--large", type=int, metavar="N", help="measure `bier index` of N images instead")
    arguments = parser.parse_args()

    vectors, groups, source = embedded(arguments)
    order = np.random.default_rng(SEED).permutation(len(vectors))
    queries, real = vectors[order[:QUERIES]], vectors[order[QUERIES:]]
    report = Report("search", ["faiss-cpu", "numpy"], SEED)
    print(f"{source}; {len(real):,} real images, the rest distractors; groups {'-'.join(map(str, groups))}", flush=True)
    if arguments.large:
        faiss.omp_set_num_threads(1)
        large(real, groups, queries[: QUERIES // 2], arguments.large)
        return
    print(
        f"one stream of single queries on 1 thread, medians of {ROUNDS * PER_ROUND}; x faiss is of processor "
        f"time, which other work on the machine stretches less; built on {cores()} threads"
    )
    compare(report, "real images only", real, groups, queries)
    for kind in ("drawn", "mixed"):
        for size in SIZES[:1] if arguments.quick else SIZES if kind == "drawn" else SIZES[-1:]:
            everything = with_distractors(real, groups, size, kind)
            rows = compare(report, f"{kind} distractors", everything, groups, queries)
            conclude(report, rows, f"{size:,} images, {kind} distractors")
    report.save()


def conclude(report: Report, rows: list[list[Any]], what: str) -> None:
    """The figures beside the goals: exact at least as fast as faiss, and bits at least ten times."""
    name, recall, faster = rows[0][0], float(rows[0][4]), rows[0][3]
    goal, least = (1.0, 1.0) if name.endswith("exact") else (10.0, 0.99)
    report.figure(f"{name}, times as fast", f"{FAISS}, {what}", faster, at_least=goal)
    report.figure(f"recall@10 of {name}", f"{FAISS}, {what}", recall, "", at_least=least)


if __name__ == "__main__":
    main()
