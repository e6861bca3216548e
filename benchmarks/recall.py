"""Recall@1, 10, 100, 1000 on a set of the size of Stanford Online Products' test set: ours and others, time and memory.

    python benchmarks/recall.py            60,502 vectors x 512, 11,316 classes
    python benchmarks/recall.py --quick    a sixth of that

Every contender runs in a process of its own, one after the other with the same threads; memory is the peak above what
the process held before, with the embeddings loaded.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

KS = (1, 10, 100, 1000)
GROUPS = (96, 160, 256)
SEED = 0

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


CONTENDERS = {
    "full multiply": multiply,
    "bier": ours,
    "bier, learners and prefixes": everything,
    "faiss IndexFlatIP": faiss_flat,
    "AccuracyCalculator": accuracy_calculator,
}


def memory(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process, in GB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1e6
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def run_here(name: str, folder: Path) -> None:
    """Time one contender in this process and print a line of JSON."""
    from bier.method.equations import ensemble_vector

    z = torch.from_numpy(np.load(folder / "z.npy"))
    labels = torch.from_numpy(np.load(folder / "labels.npy"))
    data = z if CONTENDERS[name] is everything else ensemble_vector(z.split(GROUPS, dim=1), "alpha")
    CONTENDERS[name](data[:3000], labels[:3000] % 300)  # imports and first calls are no part of the time
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = memory("VmRSS")
    started, cpu = time.perf_counter(), time.process_time()
    recall = CONTENDERS[name](data, labels)
    seconds = time.perf_counter() - started
    cpu = time.process_time() - cpu  # of all threads: steadier than seconds while the machine has other work
    print(json.dumps({"seconds": seconds, "cpu": cpu, "extra": memory("VmHWM") - before, "recall": recall}))


def run_apart(name: str, folder: Path, threads: int) -> dict[str, float]:
    environment = os.environ | {key: str(threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-W", "ignore", __file__, "--worker", name, "--folder", str(folder)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def report(best: dict[str, dict[str, float]]) -> None:
    print(f"\n{'':30}{'seconds':>9}{'cpu s':>9}{'extra GB':>10}   " + "".join(f"{'R@' + str(k):>8}" for k in KS))
    for name, row in best.items():
        recall = "".join(f"{value:8.2f}" for value in row["recall"].values())
        print(f"{name:30}{row['seconds']:9.2f}{row['cpu']:9.2f}{row['extra']:10.2f}   {recall}")
    time_of = {name: row["seconds"] for name, row in best.items()}
    mine = time_of["bier"]
    goals = [
        ("times faster than faiss", time_of["faiss IndexFlatIP"] / mine, ">=", 3.0),
        ("times faster than AccuracyCalculator", time_of["AccuracyCalculator"] / mine, ">=", 4.5),
        ("of the full multiply", mine / time_of["full multiply"], "<=", 0.75),
        ("GB extra", best["bier"]["extra"], "<=", 1.0),
        ("times the ensemble for learners and prefixes", time_of["bier, learners and prefixes"] / mine, "<=", 2.5),
    ]
    print()
    for what, value, sign, goal in goals:
        met = value >= goal if sign == ">=" else value <= goal
        print(f"{value:8.2f} {what:46} goal {sign} {goal:<5} {'met' if met else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixth of the set")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all contenders; the fastest of each counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_here(arguments.worker, arguments.folder)
        return
    count, classes = (10_000, 1_870) if arguments.quick else (60_502, 11_316)
    machine = f"{platform.machine()}, {arguments.threads} threads"
    print(f"{machine}, {datetime.date.today()}, seed {SEED}, torch {torch.__version__}")
    print(f"{count} vectors x {sum(GROUPS)}, {classes} classes, load {os.getloadavg()[0]:.1f}")
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        z, labels = make_embeddings(count, classes, SEED)
        np.save(folder / "z.npy", z.numpy())
        np.save(folder / "labels.npy", labels.numpy())
        del z
        for _ in range(arguments.repeats):
            for contender in CONTENDERS:
                row = run_apart(contender, folder, arguments.threads)
                if contender not in best or row["seconds"] < best[contender]["seconds"]:
                    best[contender] = row
    report(best)


if __name__ == "__main__":
    main()
