"""What torch.compile gains for a network: `python benchmarks/compile.py efficientnet_lite0 encode` (or `step`)."""

import sys
import time
from collections.abc import Callable

import torch

import bier
from bier.models.backbones import build_backbone
from bier.system import reuse_memory
from bier.training.objective import Objective

GROUPS, BATCH, TIMED = (96, 160, 256), 16, 4


def fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TIMED):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def main(name: str, what: str) -> None:
    reuse_memory()
    torch.manual_seed(0)
    backbone = build_backbone(name)
    pixels = torch.randint(0, 256, (BATCH, 3, backbone.crop, backbone.crop), dtype=torch.uint8)
    labels = torch.arange(BATCH) // 4
    ensemble = bier.EmbeddingEnsemble(backbone.features, GROUPS)
    diversity = bier.AdversarialLoss(GROUPS, lambda_w=1.0)
    objective = Objective(backbone, ensemble, bier.BoostedLoss(GROUPS), diversity, 1e-3).train(what == "step")
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        objective(pixels, labels).total.backward()
        optimizer.step()

    def encode() -> None:
        with torch.inference_mode():
            objective.embed(pixels)

    work = step if what == "step" else encode
    work()
    eager = fastest(work)
    objective.network = torch.compile(backbone)
    begun = time.perf_counter()
    work()
    compiling = time.perf_counter() - begun
    work()
    compiled = fastest(work)
    print(f"{name} {what}: {eager:.3f} s, compiled {compiled:.3f} s after {compiling:.0f} s of compiling")


if __name__ == "__main__":
    main(*sys.argv[1:])
