"""Vectors with a byte or a bit per dimension against floats: `python benchmarks/quantized.py --data cub folder`.

The plain features of the untrained default backbone on the test images of a data set, each image searched among the
others: Recall@1 and @8 by label, recall@10 against the exact search (which of the true ten nearest are found), the
largest error of a similarity that is returned, bytes per vector and processor time per query. First `Model.encode` with
a precision, compared by the cosine and by the Hamming distance, then the precisions and kinds of `bier.Index`: the
bits of an index need a rotation besides, 4 d^2 bytes in all. `--vectors FOLDER` keeps the vectors for the next time.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy: every search below is one stream on one thread

import faiss
import numpy as np
from numpy.typing import NDArray

import bier
from _report import Report
from bier.config import Config
from bier.data import load
from bier.models.quantization import quantize_embeddings
from bier.search import Index

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
BACKBONE = "efficientnet_lite0"
TIMED = 200
WIDE = 11  # ten others, and the query itself
Search = Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]  # queries -> rows and similarities (Q, WIDE)


def encoded(name: str, root: Path, folder: Path | None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Vectors and labels of the test images."""
    kept = None if folder is None else folder / f"{name}.npz"
    if kept is not None and kept.is_file():
        with np.load(kept, allow_pickle=False) as arrays:
            return arrays["vectors"], arrays["labels"]
    settings = {"data.name": name, "data.root": str(root), "data.validation": 0.2}
    test = load(Config().with_settings(settings).data)["test"]
    vectors = bier.pretrained(BACKBONE).encode(list(test.images), progress=True)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(kept, vectors=vectors, labels=test.labels)
    return vectors, test.labels


def encoded_ways(vectors: NDArray[np.float32]) -> dict[str, tuple[Search, float]]:
    """{name: (search, bytes per vector)} of `encode`, with faiss's exhaustive searches."""
    groups = (vectors.shape[1],)
    small = quantize_embeddings(vectors, "int8", groups).astype(np.float32)
    small /= np.linalg.norm(small, axis=1, keepdims=True)
    bits = quantize_embeddings(vectors, "ubinary", groups)
    cosine, hamming = faiss.IndexFlatIP(vectors.shape[1]), faiss.IndexBinaryFlat(8 * bits.shape[1])
    cosine.add(small)
    hamming.add(bits)

    def by_cosine(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        scores, found = cosine.search(small[rows], WIDE)
        return found, scores

    def by_hamming(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        distances, found = hamming.search(bits[rows], WIDE)
        return found, np.full(distances.shape, np.nan)

    return {
        "encode int8, cosine": (by_cosine, small.shape[1]),
        "encode ubinary, Hamming": (by_hamming, bits.shape[1]),
    }


def index_ways(vectors: NDArray[np.float32], folder: Path) -> dict[str, tuple[Search, float]]:
    """{name: (search, bytes per vector, without ids and rotation)} of the index, opened from its folder."""
    choices = {
        "Index float32, flat": ("float32", "flat"),
        "Index float32, binary": ("float32", "binary"),
        "Index int8, flat": ("int8", "flat"),
        "Index int8, binary": ("int8", "binary"),
        "Index binary": ("binary", "auto"),
    }
    ways: dict[str, tuple[Search, float]] = {}
    for name, (precision, kind) in choices.items():
        place = folder / f"{precision}-{kind}"
        Index.build(vectors, kind=kind, precision=precision).save(place)
        index = Index.load(place)
        stored = sum(file.stat().st_size for file in place.rglob("*") if file.suffix in (".npy", ".faiss"))
        stored -= 4 * vectors.shape[1] ** 2 * any(place.rglob("binary.faiss"))

        def search(rows: NDArray[Any], index: Index = index) -> tuple[NDArray[Any], NDArray[Any]]:
            found = index.search(vectors[rows], WIDE)
            assert found.rows is not None
            return found.rows, found.scores

        ways[name] = search, stored / len(vectors)
    return ways


def without_itself(found: NDArray[Any]) -> NDArray[Any]:
    """(Q, 10) of the (Q, 11) rows found: without the query, or without the last where it was not found."""
    kept = found != np.arange(len(found))[:, None]
    kept[kept.all(axis=1), -1] = False
    return found[kept].reshape(len(found), -1)


def measure(
    search: Search, vectors: NDArray[np.float32], labels: NDArray[np.int64], exact: NDArray[Any]
) -> list[float]:
    """R@1, R@8, recall@10 against the exact rows, the largest error of a similarity, processor ms per query."""
    everything = np.arange(len(vectors))
    rows, scores = search(everything)
    error = float(np.abs(scores - np.einsum("qd,qkd->qk", vectors, vectors[rows])).max())
    found = without_itself(rows)
    right = labels[found] == labels[:, None]
    agreed = np.mean([np.isin(one, other).mean() for one, other in zip(found, exact, strict=True)])
    times = []
    for row in everything[:: max(1, len(everything) // TIMED)]:
        start = time.thread_time()
        search(everything[row : row + 1])
        times.append(time.thread_time() - start)
    recalls = [100 * right[:, :k].any(axis=1).mean() for k in (1, 8)]
    return [*recalls, float(agreed), error, 1e3 * float(np.median(times))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["cub", "folder"], help="data sets; `folder` is groceries")
    parser.add_argument("--root", type=Path, default=SHARED, help="the folder with CUB_200_2011 and grocery")
    parser.add_argument("--vectors", type=Path, metavar="FOLDER", help="keeps the vectors of the test images")
    arguments = parser.parse_args()

    faiss.omp_set_num_threads(1)
    report = Report("quantized", packages=["faiss-cpu", "numpy"])
    for name in arguments.data:
        root = arguments.root / "grocery" if name == "folder" else arguments.root
        vectors, labels = encoded(name, root, arguments.vectors)
        title = (
            f"{'groceries' if name == 'folder' else name}, untrained {BACKBONE}: {len(vectors):,} test images of "
            f"{len(np.unique(labels))} classes, {vectors.shape[1]} dimensions"
        )
        rows: list[list[object]] = []
        with tempfile.TemporaryDirectory(prefix="bier-quantized-") as folder:
            ways = index_ways(vectors, Path(folder)) | encoded_ways(vectors)
            exact = without_itself(ways["Index float32, flat"][0](np.arange(len(vectors)))[0])
            for way, (search, stored) in ways.items():
                first, eighth, agreed, error, milliseconds = measure(search, vectors, labels, exact)
                said = f"{error:.4f}" if np.isfinite(error) else ""
                rows.append([way, first, eighth, f"{agreed:.4f}", said, round(stored), milliseconds])
        columns = ["", "R@1", "R@8", "recall@10", "largest error", "bytes per vector", "CPU ms"]
        report.table(title, columns, rows)
    report.save()


if __name__ == "__main__":
    main()
