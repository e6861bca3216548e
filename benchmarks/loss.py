"""BoostedLoss beside pytorch-metric-learning's ContrastiveLoss (cosine), forward and backward: time and peak memory.

    python benchmarks/loss.py

The peer runs on the same batch three times over, once for each of our three learners. Contenders take turns, so that a
busy moment of the machine hits them alike; memory is the peak above what the process held before, each in a process
of its own.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

BATCH = 512
GROUPS = (96, 160, 256)
IMAGES_PER_CLASS = 8
SEED = 0
GOAL = 0.5
PEER = "ContrastiveLoss x 3"

Step = Callable[[Tensor, Tensor], None]


def make_batch() -> tuple[Tensor, Tensor]:
    """A balanced batch whose classes are scattered about as after a little training."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.arange(BATCH) // IMAGES_PER_CLASS
    centres = torch.randn(BATCH // IMAGES_PER_CLASS, sum(GROUPS), generator=generator)
    z = centres[labels] + 1.5 * torch.randn(BATCH, sum(GROUPS), generator=generator)
    return z.requires_grad_(), labels


def ours(loss_name: str, boost: bool) -> Step:
    import bier

    losses = {"deviance": bier.BinomialDeviance(), "contrastive": bier.Contrastive()}
    boosted = bier.BoostedLoss(GROUPS, losses[loss_name], boost)

    def step(z: Tensor, labels: Tensor) -> None:
        boosted(z, labels).backward()

    return step


def theirs(by_learner: bool) -> Step:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.losses import ContrastiveLoss

    contrastive = ContrastiveLoss(pos_margin=1, neg_margin=0.5, distance=CosineSimilarity())

    def step(z: Tensor, labels: Tensor) -> None:
        parts = z.split(GROUPS, dim=1) if by_learner else (z,) * len(GROUPS)
        for part in parts:
            contrastive(part, labels).backward()

    return step


CONTENDERS: dict[str, Callable[[], Step]] = {
    "BoostedLoss": lambda: ours("deviance", True),
    "BoostedLoss, boost=False": lambda: ours("deviance", False),
    "BoostedLoss, Contrastive": lambda: ours("contrastive", True),
    PEER: lambda: theirs(False),
    "ContrastiveLoss on each learner": lambda: theirs(True),
}


def memory(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1e3
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def measure_memory(name: str) -> None:
    """Print the peak of one step above what the process held before it."""
    step = CONTENDERS[name]()
    z, labels = make_batch()
    step(z[:16].detach().requires_grad_(), labels[:16])  # imports and first calls are no part of it
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = memory("VmRSS")
    step(z, labels)
    print(json.dumps(memory("VmHWM") - before))


def peak_memory(name: str) -> float:
    command = [sys.executable, "-W", "ignore", __file__, "--memory", name]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(json.loads(output.splitlines()[-1]))


def measure_time(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step, the contenders taking turns."""
    z, labels = make_batch()
    steps = {name: make() for name, make in CONTENDERS.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            z.grad = None
            started = time.perf_counter()
            step(z, labels)
            if turn >= 3:  # the first rounds warm up
                taken[name].append(1e3 * (time.perf_counter() - started))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        measure_memory(arguments.memory)
        return
    machine = f"{platform.machine()}, {arguments.threads} thread(s), load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, {datetime.date.today()}, seed {SEED}, torch {torch.__version__}")
    print(f"batch {BATCH}, d {sum(GROUPS)}, groups {GROUPS}, forward and backward, {arguments.rounds} rounds\n")
    taken = measure_time(arguments.rounds)
    print(f"{'':34}{'median ms':>10}{'best ms':>10}{'peak MB':>10}")
    for name, times in taken.items():
        print(f"{name:34}{statistics.median(times):10.1f}{min(times):10.1f}{peak_memory(name):10.1f}")
    by_round = [mine / peer for mine, peer in zip(taken["BoostedLoss"], taken[PEER], strict=True)]
    best = min(taken["BoostedLoss"]) / min(taken[PEER])
    ratio = statistics.median(by_round)
    met = "met" if ratio <= GOAL else "MISSED"
    print(f"\n{ratio:.2f} of the peer's time (median over rounds; best of each {best:.2f})   goal <= {GOAL}   {met}")


if __name__ == "__main__":
    main()
