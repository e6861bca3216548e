"""Seconds of a training step with EfficientNet-Lite0 at 224x224: A-BIER, the baseline, and pytorch-metric-learning.

    python benchmarks/step.py

A-BIER (3 learners) and the baseline (one) are built and stepped by the functions that `bier train` calls. The peer is
the loop of pytorch-metric-learning's README in plain float32: timm's model, a linear layer, ContrastiveLoss, Adam.
Pixels are random and in memory, so nothing but the step is measured. Each contender lives in a process of its own,
which keeps its memory and settings apart; they take turns, so that a busy moment of the machine hits them alike.

Where the processor has bfloat16, a second comparison takes the stages from blocks.3 forward and backward: in bfloat16
as torch does it, as `bier` does it (the gradients of depthwise convolutions in float32), and in float32 throughout.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import Report, clock, cores, memory

SEED = 0
SIDE = 224
EMBEDDING = 512
WARM_UP = 1
STAGE = "blocks.3"
PEER = "pytorch-metric-learning"
METHODS = ("a-bier", "baseline", PEER)
PRECISIONS = ("bfloat16, depthwise gradients in float32", "bfloat16 as torch does it", "float32 throughout")

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


def from_stage(precision: str, count: int) -> Step:
    """The trained stages alone, on the maps that the frozen ones hand over."""
    import torch

    from bier.models.backbone import autocast, folded
    from bier.models.backbones import build_backbone
    from bier.system import reuse_memory

    reuse_memory()
    torch.manual_seed(SEED)
    backbone = folded(build_backbone("efficientnet_lite0"))
    backbone.freeze_before(STAGE)
    trunk, rest = backbone.split(STAGE)
    rest.train()
    with torch.no_grad():
        maps = trunk(torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8)).clone()
    cpu = torch.device("cpu")

    def step() -> None:
        plain = torch.autocast("cpu", torch.bfloat16)
        with plain if precision == PRECISIONS[1] else autocast(precision.split()[0].rstrip(","), cpu):
            features = rest(maps)
        rest.zero_grad()
        features.float().square().mean().backward()

    return step


def contend(name: str, classes: int, images: int, threads: int) -> None:
    """One step for each line on standard input; answers with seconds and peak memory."""
    import torch

    torch.set_num_threads(threads)
    if name in PRECISIONS:
        step = from_stage(name, classes * images)
    else:
        step = theirs(classes, images) if name == PEER else ours(name, classes, images)
    for _ in sys.stdin:
        started = clock()
        step()
        print(json.dumps([clock() - started, memory("VmHWM")]), flush=True)


class Contender:
    """A process that takes a step when told to."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--contender", name]
        command += [f"--{key}={getattr(arguments, key)}" for key in ("classes", "images", "threads")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []
        self.peak = 0.0

    def step(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a contender died; its error is above")
        seconds, self.peak = json.loads(answer)
        self.seconds.append(seconds)

    def end(self) -> None:
        self.process.communicate()


def taken(names: tuple[str, ...], arguments: argparse.Namespace) -> dict[str, Contender]:
    contenders = {name: Contender(name, arguments) for name in names}
    for _ in range(WARM_UP + arguments.rounds):
        for contender in contenders.values():
            contender.step()
    for contender in contenders.values():
        contender.end()
        del contender.seconds[:WARM_UP]
    return contenders


def ratio(mine: Contender, other: Contender) -> float:
    """The median over rounds of how many times as long one takes as the other."""
    return statistics.median(a / b for a, b in zip(mine.seconds, other.seconds, strict=True))


def table(title: str, contenders: dict[str, Contender], count: int, report: Report) -> None:
    rows = [
        [name, statistics.median(one.seconds), 1e3 * statistics.median(one.seconds) / count, one.peak]
        for name, one in contenders.items()
    ]
    report.table(title, ["step", "median s", "ms per image", "peak MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--contender", choices=(*METHODS, *PRECISIONS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        contend(arguments.contender, arguments.classes, arguments.images, arguments.threads)
        return
    count = arguments.classes * arguments.images
    report = Report("step", ["timm", PEER], SEED)
    found = taken(METHODS, arguments)
    what = f"EfficientNet-Lite0, batch {count}, {SIDE}x{SIDE}"
    table(f"a training step: {what}", found, count, report)
    first, plain, peer = found.values()
    report.figure("time of a step of A-BIER", f"the baseline's, {what}", ratio(first, plain), at_most=1.05)
    report.figure("a step of A-BIER, times as fast", f"{PEER} in float32, {what}", ratio(peer, first), at_least=1.6)
    precisions(arguments, count, report)
    report.save()


def precisions(arguments: argparse.Namespace, count: int, report: Report) -> None:
    import torch

    from bier.models.backbone import resolve_precision

    if resolve_precision("auto", torch.device("cpu")) is torch.float32:
        print("this processor has no bfloat16: depthwise gradients were not measured")
        return
    found = taken(PRECISIONS, arguments)
    table(f"forward and backward from {STAGE}", found, count, report)
    ours, torchs, float32 = found.values()
    report.figure(f"forward and backward from {STAGE}, times as fast", PRECISIONS[1], ratio(torchs, ours), at_least=1.5)
    report.figure(f"forward and backward from {STAGE}, times as fast", PRECISIONS[2], ratio(float32, ours), at_least=1)


if __name__ == "__main__":
    main()
