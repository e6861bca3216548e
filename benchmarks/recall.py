"""Recall@1, 10, 100, 1000 on a set of the size of Stanford Online Products' test set: ours and others, time and memory.

    python benchmarks/recall.py            60,502 vectors x 512, 11,316 classes
    python benchmarks/recall.py --quick    a sixth of that

Every contender runs in a process of its own, one after the other with the same threads; memory is the peak above what
the process held before, with the embeddings loaded. Open-metric-learning runs where its environment is (`make bench`
creates .venv/peers). Sentence-transformers keeps a dictionary for each answer, which for all queries at once are 14 GB:
it is asked for an eighth of the queries.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _report import Report, clock, cores, memory

KS = (1, 10, 100, 1000)
GROUPS = (96, 160, 256)
SEED = 0
SOP = (60_502, 11_316)  # images and classes of its test set

Recall = dict[int, float]


def make_embeddings(count: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes of about equal size whose images scatter so that R@1 is about that of a trained model."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = torch.randn(classes, sum(GROUPS), generator=generator)
    return centres[labels] + 2.2 * torch.randn(count, sum(GROUPS), generator=generator), labels


def multiply(vectors: torch.Tensor, labels: torch.Tensor) -> Recall:
    """The full N x N product alone, a band at a time: what no exact method that scores every ordered pair can beat."""
    band = torch.empty(1024, len(vectors))
    for rows in vectors.split(1024):
        torch.mm(rows, vectors.T, out=band[: len(rows)])
    return {}


def ours(vectors: torch.Tensor, labels: torch.Tensor) -> Recall:
    from bier.evaluate.recall import recall_at_k

    return recall_at_k(vectors, labels, KS)


def everything(z: torch.Tensor, labels: torch.Tensor) -> Recall:
    from bier.evaluate.ensemble import evaluate_ensemble

    return evaluate_ensemble(z, GROUPS, labels, KS, ranking=False).recall["ensemble"]


def faiss_flat(vectors: torch.Tensor, labels: torch.Tensor) -> Recall:
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors.numpy())
    _, found = index.search(vectors.numpy(), max(KS) + 1)
    hits = labels.numpy()[found] == labels.numpy()[:, None]
    hits[found == np.arange(len(found))[:, None]] = False
    # K others: the query itself takes one of the K + 1 places
    return {k: 100.0 * float(hits[:, : k + 1].any(1).mean()) for k in KS}


def accuracy_calculator(vectors: torch.Tensor, labels: torch.Tensor) -> Recall:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    def hits_within(k: int) -> Callable[..., float]:
        def measure(self: object, knn_labels: torch.Tensor, query_labels: torch.Tensor, **_: object) -> float:
            return float((knn_labels[:, :k] == query_labels[:, None]).any(1).float().mean())

        return measure

    measures = {f"calculate_recall_at_{k}": hits_within(k) for k in KS}
    measures["requires_knn"] = lambda self: [*AccuracyCalculator.requires_knn(self), *(f"recall_at_{k}" for k in KS)]
    names = tuple(f"recall_at_{k}" for k in KS)
    calculator = type("RecallCalculator", (AccuracyCalculator,), measures)(
        include=names, k=max(KS), device=torch.device("cpu")
    )
    result = calculator.get_accuracy(vectors, labels)
    return {k: 100.0 * result[f"recall_at_{k}"] for k in KS}


def open_metric_learning(vectors: torch.Tensor, labels: torch.Tensor) -> Recall:
    """RetrievalResults and calc_retrieval_metrics_rr, without the data set of images that they are documented with."""
    from oml.functional.knn import batched_knn
    from oml.metrics.embeddings import calc_retrieval_metrics_rr
    from oml.retrieval.retrieval_results import RetrievalResults

    everything = torch.arange(len(vectors))
    distances, found, relevant = batched_knn(vectors, everything, everything, max(KS), labels_gt=labels)
    results = RetrievalResults(distances, found, relevant)
    metrics = calc_retrieval_metrics_rr(results, None, KS, (), (), verbose=False)
    return {k: 100.0 * float(metrics["cmc"][k]) for k in KS}


def sentence_transformers(vectors: torch.Tensor, labels: torch.Tensor) -> Recall:
    from sentence_transformers.util import dot_score, semantic_search

    queries = range(0, len(vectors), SHARE)
    found = semantic_search(vectors[queries], vectors, top_k=max(KS) + 1, score_function=dot_score)
    order = np.array([[one["corpus_id"] for one in row] for row in found])
    hits = labels.numpy()[order] == labels.numpy()[queries][:, None]
    hits[order == np.array(queries)[:, None]] = False
    return {k: 100.0 * float(hits[:, : k + 1].any(1).mean()) for k in KS}


SHARE = 8
CONTENDERS = {
    "full multiply": multiply,
    "bier": ours,
    "bier, learners and prefixes": everything,
    f"sentence-transformers semantic_search, 1/{SHARE} of the queries": sentence_transformers,
    "open-metric-learning RetrievalResults": open_metric_learning,
    "faiss IndexFlatIP": faiss_flat,
    "pytorch-metric-learning AccuracyCalculator": accuracy_calculator,
}
PEERS = Path(sys.prefix) / "peers" / "bin" / "python"  # of open-metric-learning, which needs an older numpy


def run_here(name: str, folder: Path) -> None:
    """Time one contender in this process and print a line of JSON."""
    from bier.method.defaults import WEIGHTING
    from bier.method.equations import ensemble_vector

    z = torch.from_numpy(np.load(folder / "z.npy"))
    labels = torch.from_numpy(np.load(folder / "labels.npy"))
    data = z if CONTENDERS[name] is everything else ensemble_vector(z.split(GROUPS, dim=1), WEIGHTING)
    CONTENDERS[name](data[:3000], labels[:3000] % 300)  # imports and first calls are no part of the time
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before, started = memory("VmRSS"), clock()
    recall = CONTENDERS[name](data, labels)
    print(json.dumps({"seconds": clock() - started, "extra": memory("VmHWM") - before, "recall": recall}))


def run_apart(name: str, folder: Path, threads: int) -> dict[str, Any]:
    environment = os.environ | {key: str(threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    python = PEERS if CONTENDERS[name] is open_metric_learning else sys.executable
    command = [str(python), "-W", "ignore", __file__, "--worker", name, "--folder", str(folder)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def show(best: dict[str, dict[str, Any]], count: int, report: Report) -> None:
    """The table of all contenders, then the ratios."""
    rows = [
        [name, row["seconds"], row["extra"] / 1e3, *(f"{value:.2f}" for value in row["recall"].values())]
        for name, row in best.items()
    ]
    rows = [[*row, *[""] * (len(KS) + 3 - len(row))] for row in rows]  # the multiplication finds nothing
    size = "the size of Stanford Online Products" if count == SOP[0] else f"{count:,} vectors"
    report.table(size, ["", "seconds", "extra GB", *(f"R@{k}" for k in KS)], rows)
    seconds = {CONTENDERS[name]: row["seconds"] for name, row in best.items()}
    seconds[sentence_transformers] = SHARE * seconds.get(sentence_transformers, 0)
    mine, what = seconds[ours], f"recall of {count:,} x {sum(GROUPS)}"
    goals = {faiss_flat: 3.0, accuracy_calculator: 4.5, open_metric_learning: None, sentence_transformers: None}
    for peer, goal in goals.items():
        name = next(name for name, function in CONTENDERS.items() if function is peer)
        if name in best:
            report.figure(f"{what}, times as fast", name, seconds[peer] / mine, at_least=goal)
            report.figure(f"{what}, its extra memory", f"ours, {name}", best[name]["extra"] / best["bier"]["extra"])
    report.figure(f"{what}, time", "the full multiplication alone", mine / seconds[multiply], at_most=0.75)
    report.figure(f"{what}, extra memory", "the embeddings", best["bier"]["extra"] / 1e3, "GB", at_most=1.0)
    report.figure(
        f"{what}, time with every learner and prefix", "of the ensemble alone", seconds[everything] / mine, at_most=2.5
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixth of the set")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all contenders; the fastest of each counts")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_here(arguments.worker, arguments.folder)
        return
    count, classes = (10_000, 1_870) if arguments.quick else SOP
    packages = ["faiss-cpu", "pytorch-metric-learning", "sentence-transformers"]
    report = Report("recall", packages, SEED)
    if PEERS.is_file():
        ask = "from importlib.metadata import version; print(version('open-metric-learning'))"
        report.record["versions"]["open-metric-learning"] = subprocess.check_output(
            [PEERS, "-c", ask], text=True
        ).strip()
    else:
        print(f"open-metric-learning is left out: there is no {PEERS}")
    print(f"{count} vectors x {sum(GROUPS)}, {classes} classes, {arguments.threads} threads")
    best: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        z, labels = make_embeddings(count, classes, SEED)
        np.save(folder / "z.npy", z.numpy())
        np.save(folder / "labels.npy", labels.numpy())
        del z
        names = [name for name, one in CONTENDERS.items() if one is not open_metric_learning or PEERS.is_file()]
        for name in names * arguments.repeats:
            try:
                row = run_apart(name, folder, arguments.threads)
            except subprocess.CalledProcessError as error:
                if CONTENDERS[name] in (ours, everything, multiply):
                    raise
                print(f"{name} is left out: it ended with exit code {error.returncode}", flush=True)
                continue
            print(f"{name}: {row['seconds']:.1f} s", flush=True)
            if name not in best or row["seconds"] < best[name]["seconds"]:
                best[name] = row
    show(best, count, report)
    report.save()


if __name__ == "__main__":
    main()
