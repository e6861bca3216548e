"""BoostedLoss beside losses of pytorch-metric-learning, forward and backward: time and peak memory.

    python benchmarks/loss.py

Two comparisons: our binomial deviance with ContrastiveLoss (cosine), and a boosted MultiSimilarityLoss with the plain
one. The library's loss runs on the same batch three times over, once for each of our three learners. Contenders take
turns, so that a busy moment of the machine hits them alike; memory is the peak above what the process held before, each
in a process of its own.
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
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

GROUPS = (96, 160, 256)
IMAGES_PER_CLASS = 8
SEED = 0

Step = Callable[[Tensor, Tensor], None]


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """A balanced batch whose classes are scattered about as after a little training."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.arange(size) // IMAGES_PER_CLASS
    centres = torch.randn(size // IMAGES_PER_CLASS, sum(GROUPS), generator=generator)
    z = centres[labels] + 1.5 * torch.randn(size, sum(GROUPS), generator=generator)
    return z.requires_grad_(), labels


def ours(loss_name: str, boost: bool) -> Step:
    import bier

    losses = {"deviance": bier.BinomialDeviance(), "contrastive": bier.Contrastive()}
    boosted = bier.BoostedLoss(GROUPS, losses[loss_name], boost)

    def step(z: Tensor, labels: Tensor) -> None:
        boosted(z, labels).backward()

    return step


def multi_similarity(boost: bool) -> Step:
    from pytorch_metric_learning.losses import MultiSimilarityLoss

    import bier

    boosted = bier.BoostedLoss(GROUPS, MultiSimilarityLoss(), boost)

    def step(z: Tensor, labels: Tensor) -> None:
        boosted(z, labels).backward()

    return step


def theirs(name: str, by_learner: bool) -> Step:
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.distances import CosineSimilarity

    settings = {"pos_margin": 1, "neg_margin": 0.5} if name == "ContrastiveLoss" else {}
    loss = getattr(losses, name)(distance=CosineSimilarity(), **settings)

    def step(z: Tensor, labels: Tensor) -> None:
        parts = z.split(GROUPS, dim=1) if by_learner else (z,) * len(GROUPS)
        for part in parts:
            loss(part, labels).backward()

    return step


@dataclass(frozen=True)
class Comparison:
    """The first contender may take `goal` times as long as the second."""

    batch: int
    goal: float
    contenders: dict[str, Callable[[], Step]]


COMPARISONS = (
    Comparison(
        512,
        0.5,
        {
            "BoostedLoss": lambda: ours("deviance", True),
            "ContrastiveLoss x 3": lambda: theirs("ContrastiveLoss", False),
            "BoostedLoss, boost=False": lambda: ours("deviance", False),
            "BoostedLoss, Contrastive": lambda: ours("contrastive", True),
            "ContrastiveLoss on each learner": lambda: theirs("ContrastiveLoss", True),
        },
    ),
    Comparison(
        256,
        1.5,
        {
            "MultiSimilarityLoss, boosted": lambda: multi_similarity(True),
            "MultiSimilarityLoss x 3": lambda: theirs("MultiSimilarityLoss", False),
            "MultiSimilarityLoss, boost=False": lambda: multi_similarity(False),
            "MultiSimilarityLoss on each learner": lambda: theirs("MultiSimilarityLoss", True),
        },
    ),
)


def memory(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1e3
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def measure_memory(comparison: Comparison, name: str) -> None:
    """Print the peak of one step above what the process held before it."""
    step = comparison.contenders[name]()
    z, labels = make_batch(comparison.batch)
    step(z[:16].detach().requires_grad_(), labels[:16])  # imports and first calls are no part of it
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = memory("VmRSS")
    step(z, labels)
    print(json.dumps(memory("VmHWM") - before))


def peak_memory(name: str) -> float:
    command = [sys.executable, "-W", "ignore", __file__, "--memory", name]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(json.loads(output.splitlines()[-1]))


def measure_time(comparison: Comparison, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step, the contenders taking turns."""
    z, labels = make_batch(comparison.batch)
    steps = {name: make() for name, make in comparison.contenders.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            z.grad = None
            started = time.perf_counter()
            step(z, labels)
            if turn >= 3:  # the first rounds warm up
                taken[name].append(1e3 * (time.perf_counter() - started))
    return taken


def compare(comparison: Comparison, rounds: int) -> None:
    print(f"\nbatch {comparison.batch}, d {sum(GROUPS)}, groups {GROUPS}, forward and backward, {rounds} rounds\n")
    taken = measure_time(comparison, rounds)
    print(f"{'':36}{'median ms':>10}{'best ms':>10}{'peak MB':>10}")
    for name, times in taken.items():
        print(f"{name:36}{statistics.median(times):10.1f}{min(times):10.1f}{peak_memory(name):10.1f}")
    mine, peer, *_ = taken.values()
    ratio = statistics.median(one / other for one, other in zip(mine, peer, strict=True))
    met = "met" if ratio <= comparison.goal else "MISSED"
    print(
        f"\nfirst / second: {ratio:.2f} (median over rounds; best of each {min(mine) / min(peer):.2f})"
        f"   goal <= {comparison.goal}   {met}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        measure_memory(next(one for one in COMPARISONS if arguments.memory in one.contenders), arguments.memory)
        return
    machine = f"{platform.machine()}, {arguments.threads} thread(s), load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, {datetime.date.today()}, seed {SEED}, torch {torch.__version__}")
    for comparison in COMPARISONS:
        compare(comparison, arguments.rounds)


if __name__ == "__main__":
    main()
