"""Images per second of one training step: forward, loss, backward and Adam on 64 pictures of 224x224.

Every contender lives in a process of its own (what one does to its memory must not help another) and they take
turns, step by step; the best of the rounds counts. Run: python benchmarks/finetune.py
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn

from _report import Report
from _turns import take_turns
from bier import BoostedLoss, EmbeddingEnsemble
from bier.images import ImageDataset
from bier.models.backbone import autocast, folded, resolve_precision
from bier.models.backbones import build_backbone
from bier.models.maps import TrunkCache
from bier.system import reuse_memory

BATCH, SIZE, SEED, STAGE = 64, 224, 0, "blocks.4"
GROUPS = (96, 160, 256)
CPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pictures() -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, 256, (BATCH, SIZE, SIZE, 3), dtype=np.uint8)


def step(
    network: nn.Module, ensemble: EmbeddingEnsemble, batch: Callable[[], Tensor], precision: str
) -> Callable[[], None]:
    loss, labels = BoostedLoss(GROUPS), torch.arange(BATCH, device=CPU) // 8
    network, ensemble = network.to(CPU), ensemble.to(CPU)
    weights = [p for p in (*network.parameters(), *ensemble.parameters()) if p.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=1e-6, fused=precision == "auto")

    def run() -> None:
        with autocast(precision, CPU):
            features = network(batch().to(CPU))
        value = loss(ensemble(features.float()), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return run


def plain() -> Callable[[], None]:
    """What a short script does: a timm model, float32, channels first, batch norm in training."""
    network = timm.create_model("tf_efficientnet_lite0", num_classes=0).train()
    ready = (torch.from_numpy(pictures()).permute(0, 3, 1, 2).float() - 127) / 128
    ready = ready.contiguous()
    return step(network, EmbeddingEnsemble(1280, GROUPS), lambda: ready, "float32")


def ours() -> Callable[[], None]:
    """Folded batch norm, channels-last, memory that is kept, bfloat16 where the hardware has it."""
    reuse_memory()
    network = folded(build_backbone("efficientnet_lite0")).train()
    pixels = torch.from_numpy(pictures()).permute(0, 3, 1, 2)
    return step(network, EmbeddingEnsemble(1280, GROUPS), lambda: pixels, "auto")


def cached() -> Callable[[], None]:
    """As `ours`, and the stages before STAGE are frozen, their maps read from the disk."""
    reuse_memory()
    backbone = folded(build_backbone("efficientnet_lite0"))
    backbone.freeze_before(STAGE)
    trunk, rest = backbone.split(STAGE)
    folder = Path(tempfile.mkdtemp())
    cache = TrunkCache(trunk, ImageDataset(pictures(), SIZE), folder, crop=SIZE, augment="none", views=1)
    everything = list(range(BATCH))
    return step(rest.train(), EmbeddingEnsemble(1280, GROUPS), lambda: cache.maps(everything, [0] * BATCH), "auto")


CONTENDERS = {"plain float32 loop": plain, "ours, everything trained": ours, f"ours, cached to {STAGE}": cached}
GOALS = {"ours, everything trained": 3.0, f"ours, cached to {STAGE}": 6.0}


def prepare(name: str) -> Callable[[], None]:
    torch.manual_seed(SEED)
    return CONTENDERS[name]()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = arguments.parse_args()
    report = Report("finetune", ["timm"], SEED)
    seconds = take_turns(prepare, CONTENDERS, chosen.rounds, chosen.threads)
    precision = str(resolve_precision("auto", CPU)).removeprefix("torch.")
    base, what = min(seconds["plain float32 loop"]), f"{precision} on {CPU}, batch {BATCH} of {SIZE}x{SIZE}"
    rows = [[name, BATCH / min(times), base / min(times)] for name, times in seconds.items()]
    report.table(f"training EfficientNet-Lite0: {what}", ["", "images/s", "x plain"], rows)
    for name, goal in GOALS.items():
        report.figure(
            f"a step, {name}, times as fast", f"plain float32 loop, {what}", base / min(seconds[name]), at_least=goal
        )
    report.save()


if __name__ == "__main__":
    main()
