"""How time grows with size: recall, the boosted loss, building an index and one query, each at four sizes.

    python benchmarks/growth.py
    python benchmarks/growth.py --quick     sizes an eighth as large

Vectors are drawn in 32 dimensions around class centres and turned into 512: like real ones, and unlike noise, they are
near to few others. The slope of a line in the picture is the exponent of its growth.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import faiss
import numpy as np
import torch

import bier
from _report import Report, clock, cores
from bier.evaluate.recall import recall_at_k

SEED = 0
GROUPS = (96, 160, 256)
DRAWN = 32
QUERIES = 60


def vectors(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors, five images to a class as in Stanford Online Products."""
    random = np.random.default_rng(SEED)
    labels = np.arange(count) % max(count // 5, 1)
    drawn = random.standard_normal((labels.max() + 1, DRAWN), np.float32)[labels]
    drawn += random.standard_normal(drawn.shape, np.float32)
    made = drawn @ random.standard_normal((DRAWN, sum(GROUPS)), np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True), labels


def seconds(run: Callable[[], object]) -> float:
    started = clock()
    run()
    return clock() - started


def flat_search(made: np.ndarray) -> None:
    index = faiss.IndexFlatIP(made.shape[1])
    index.add(made)
    index.search(made, 101)


def recall(sizes: Sequence[int], report: Report) -> None:
    taken: dict[str, list[float]] = {"bier": [], "faiss IndexFlatIP": []}
    for size in sizes:
        made, labels = vectors(size)

        taken["bier"].append(seconds(partial(recall_at_k, made, labels, (1, 10, 100))))
        taken["faiss IndexFlatIP"].append(seconds(partial(flat_search, made)))
    report.growth("Recall@1, 10, 100 of all against all", "images", "s", sizes, taken)


def loss_steps(one: torch.nn.Module, made: torch.Tensor, labels: torch.Tensor, times: int) -> None:
    for _ in range(times):
        one(made, labels).backward()


def loss(sizes: Sequence[int], rounds: int, report: Report) -> None:
    from pytorch_metric_learning.losses import ContrastiveLoss, MultiSimilarityLoss

    contenders: dict[str, torch.nn.Module] = {
        "BoostedLoss": bier.BoostedLoss(GROUPS),
        "BoostedLoss, Multi-Similarity": bier.BoostedLoss(GROUPS, MultiSimilarityLoss()),
        "pytorch-metric-learning's ContrastiveLoss x 3": ContrastiveLoss(),
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for size in sizes:
        made, labels = torch.from_numpy(vectors(size)[0]).requires_grad_(), torch.arange(size) // 8
        for name, one in contenders.items():
            run = partial(loss_steps, one, made, labels, 3 if "x 3" in name else 1)
            run()
            taken[name].append(1e3 * statistics.median(seconds(run) for _ in range(rounds)))
    report.growth("boosted loss, forward and backward", "images in a batch", "ms", sizes, taken)


def index(sizes: Sequence[int], report: Report) -> None:
    """Building and asking, ours and faiss's exact search."""
    build: dict[str, list[float]] = {"bier": []}
    query: dict[str, list[float]] = {"bier": [], "faiss IndexFlatIP": []}
    for size in sizes:
        made, _ = vectors(size + QUERIES)
        asked, stored = made[size:], made[:size]
        started = clock()
        ours = bier.Index.build(stored, groups=GROUPS)
        build["bier"].append(clock() - started)
        exact = faiss.IndexFlatIP(stored.shape[1])
        exact.add(stored)
        searches: dict[str, Callable[[np.ndarray], object]] = {
            "bier": lambda one, index=ours: index.search(one, 10),
            "faiss IndexFlatIP": lambda one, index=exact: index.search(one[None], 10),
        }
        for name, search in searches.items():
            search(asked[0])
            query[name].append(1e3 * statistics.median(seconds(lambda q=q, s=search: s(q)) for q in asked))
    report.growth("index build", "images", "s", sizes, build)
    report.growth("one query, the 10 nearest", "images", "ms", sizes, query)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sizes an eighth as large")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each loss")
    arguments = parser.parse_args()
    torch.set_num_threads(cores())
    faiss.omp_set_num_threads(cores())
    report = Report("growth", ["faiss-cpu", "pytorch-metric-learning", "numpy"], SEED)
    share = 8 if arguments.quick else 1
    recall([size // share for size in (2_500, 5_000, 10_000, 20_000)], report)
    loss([size // share for size in (128, 256, 512, 1_024)], arguments.rounds, report)
    index([size // share for size in (3_000, 6_000, 12_000, 24_000)], report)
    report.save()


if __name__ == "__main__":
    main()
