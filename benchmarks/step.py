"""Seconds of a training step with EfficientNet-Lite0 at 224x224: A-BIER, the baseline, and pytorch-metric-learning.

    python benchmarks/step.py

A-BIER (3 learners) and the baseline (one) are built and stepped by the functions that `bier train` calls. The peer is
the loop of pytorch-metric-learning's README in plain float32: timm's model, a linear layer, ContrastiveLoss, Adam.
Pixels are random and in memory, so nothing but the step is measured. Each contender lives in a process of its own,
which keeps its memory and settings apart; they take turns, so that a busy moment of the machine hits them alike.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 0
SIDE = 224
EMBEDDING = 512
WARM_UP = 2
MOST_OF_BASELINE = 1.05
LEAST_OVER_PEER = 1.6
CONTENDERS = ("a-bier", "baseline", "pytorch-metric-learning")

Step = Callable[[], None]


def ours(method: str, classes: int, images: int) -> Step:
    import numpy as np
    import torch
    from PIL import Image

    from bier.training import resolve
    from bier.training.loop import _step
    from bier.training.optimizer import build_optimizer
    from bier.training.setup import build

    settings: dict[str, Any] = {
        "train.batch_classes": classes,
        "train.batch_images": images,
        "train.steps": 1_000_000,
        "train.log_every": 1_000_000,
        "model.embedding": EMBEDDING,
        "data.validation": 0.0,
        "seed": SEED,
    }
    with tempfile.TemporaryDirectory() as folder:  # files only because a run needs a data set; none of them is read
        for number in range(4):
            (Path(folder) / f"{number}").mkdir()
            for name in "ab":
                Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(Path(folder) / f"{number}" / f"{name}.png")
        config = resolve(method, "folder", {**settings, "data.root": folder})
        bench = build(config, Path(folder) / "run", lambda *_: None)
    optimizer = build_optimizer(config, bench.objective)
    bench.objective.hold_rows(optimizer)
    bench.objective.train()
    pixels = torch.randint(0, 256, (classes * images, SIDE, SIDE, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    labels = torch.arange(classes).repeat_interleave(images)

    def step() -> None:
        _step(config, bench, bench.objective, optimizer, pixels, labels, 1, Path())

    return step


def theirs(classes: int, images: int) -> Step:
    import timm
    import torch
    from pytorch_metric_learning import losses
    from torch import nn

    torch.manual_seed(SEED)
    body = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0)
    model = nn.Sequential(body, nn.Linear(body.num_features, EMBEDDING))
    loss_func = losses.ContrastiveLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)
    data = torch.randn(classes * images, 3, SIDE, SIDE)
    labels = torch.arange(classes).repeat_interleave(images)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        embeddings = model(data)
        loss = loss_func(embeddings, labels)
        loss.backward()
        optimizer.step()

    return step


def peak_memory() -> float:
    """The most that this process has held so far, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1e3
    raise RuntimeError("no VmHWM in /proc/self/status: this benchmark needs Linux")


def contend(name: str, classes: int, images: int, threads: int) -> None:
    """One step for each line on standard input; answers with seconds, processor seconds and peak memory."""
    import torch

    torch.set_num_threads(threads)
    step = theirs(classes, images) if name == CONTENDERS[2] else ours(name, classes, images)
    for _ in sys.stdin:
        started, processor = time.perf_counter(), time.process_time()
        step()
        taken = time.perf_counter() - started, time.process_time() - processor
        print(json.dumps([*taken, peak_memory()]), flush=True)


class Contender:
    """A process that takes a step when told to."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--contender", name]
        command += [f"--{key}={getattr(arguments, key)}" for key in ("classes", "images", "threads")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []
        self.processor: list[float] = []  # what it computed for, whoever else was on the machine
        self.peak = 0.0

    def step(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a contender died; its error is above")
        seconds, processor, self.peak = json.loads(answer)
        self.seconds.append(seconds)
        self.processor.append(processor)

    def end(self) -> None:
        self.process.communicate()


def ratio(mine: list[float], theirs: list[float]) -> float:
    """The median over rounds of how many times as long one takes as the other."""
    return statistics.median(a / b for a, b in zip(mine[WARM_UP:], theirs[WARM_UP:], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        contend(arguments.contender, arguments.classes, arguments.images, arguments.threads)
        return
    contenders = {name: Contender(name, arguments) for name in CONTENDERS}
    for _ in range(WARM_UP + arguments.rounds):
        for contender in contenders.values():
            contender.step()
    for contender in contenders.values():
        contender.end()
    report(arguments, contenders)


def report(arguments: argparse.Namespace, contenders: dict[str, Contender]) -> None:
    import torch

    from bier.models.backbone import resolve_precision

    auto = str(resolve_precision("auto", torch.device("cpu"))).removeprefix("torch.")
    machine = f"{platform.machine()}, {arguments.threads} thread(s), load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, {datetime.date.today()}, seed {SEED}, torch {torch.__version__}, precision auto = {auto}")
    print(f"batch {arguments.classes * arguments.images}, {SIDE}x{SIDE}, d {EMBEDDING}, {arguments.rounds} rounds\n")
    print(f"{'':26}{'median s':>10}{'best s':>10}{'processor s':>13}{'peak MB':>10}")
    for name, one in contenders.items():
        seconds, processor = one.seconds[WARM_UP:], one.processor[WARM_UP:]
        columns = f"{statistics.median(seconds):10.3f}{min(seconds):10.3f}{statistics.median(processor):13.3f}"
        print(f"{name:26}{columns}{one.peak:10.0f}")
    first, plain, peer = contenders.values()
    cost, gain = ratio(first.seconds, plain.seconds), ratio(peer.seconds, first.seconds)
    print(
        f"\na-bier / baseline {cost:6.2f} (of processor time {ratio(first.processor, plain.processor):.2f})"
        f"   goal <= {MOST_OF_BASELINE}   {'met' if cost <= MOST_OF_BASELINE else 'MISSED'}"
    )
    print(
        f"peer / a-bier     {gain:6.2f} (of processor time {ratio(peer.processor, first.processor):.2f})"
        f"   goal >= {LEAST_OVER_PEER}    {'met' if gain >= LEAST_OVER_PEER else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
