"""BoostedLoss beside losses of pytorch-metric-learning, forward and backward: time and peak memory.

    python benchmarks/loss.py

Two comparisons: our binomial deviance with ContrastiveLoss (cosine), and a boosted MultiSimilarityLoss with the plain
one. The library's loss runs on the same batch three times over, once for each of our three learners. Contenders take
turns, so that a busy moment of the machine hits them alike; memory is the peak above what the process held before, each
in a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from _report import Report, clock, memory

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
            "pytorch-metric-learning's ContrastiveLoss x 3": lambda: theirs("ContrastiveLoss", False),
            "BoostedLoss, boost=False": lambda: ours("deviance", False),
            "BoostedLoss, Contrastive": lambda: ours("contrastive", True),
            "ContrastiveLoss on each learner": lambda: theirs("ContrastiveLoss", True),
        },
    ),
    Comparison(
        256,
        1.5,
        {
            "boosted MultiSimilarityLoss": lambda: multi_similarity(True),
            "pytorch-metric-learning's MultiSimilarityLoss x 3": lambda: theirs("MultiSimilarityLoss", False),
            "MultiSimilarityLoss, boost=False": lambda: multi_similarity(False),
            "MultiSimilarityLoss on each learner": lambda: theirs("MultiSimilarityLoss", True),
        },
    ),
)


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
            started = clock()
            step(z, labels)
            if turn >= 3:  # the first rounds warm up
                taken[name].append(1e3 * (clock() - started))
    return taken


def compare(comparison: Comparison, rounds: int, report: Report) -> None:
    taken = measure_time(comparison, rounds)
    rows = [[name, statistics.median(times), min(times), peak_memory(name)] for name, times in taken.items()]
    what = f"batch {comparison.batch}, d {sum(GROUPS)}, three learners, forward and backward"
    report.table(what, ["loss", "median ms", "best ms", "peak MB"], rows)
    first, second, *_ = taken
    ratio = statistics.median(one / other for one, other in zip(taken[first], taken[second], strict=True))
    report.figure(f"time of {first}, {what}", second, ratio, at_most=comparison.goal)


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
    report = Report("loss", ["pytorch-metric-learning"], SEED)
    for comparison in COMPARISONS:
        compare(comparison, arguments.rounds, report)
    report.save()


if __name__ == "__main__":
    main()
