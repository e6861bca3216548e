"""A user's own DistributedDataParallel loop on two processes, beside one process with the whole batch.

Run by test_gather_distributed.py. It uses the losses only, nothing of bier.training. Prints a JSON object: for every
case the largest difference between the gradients of the two, relative to the largest gradient.
"""

import json
import multiprocessing
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from pytorch_metric_learning import losses
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import bier

GROUPS = (3, 4, 5)
METRICS: dict[str, Callable[[bool], nn.Module]] = {
    "eta": lambda gather: bier.BoostedLoss(GROUPS, gather_distributed=gather),
    "shrinkage": lambda gather: bier.BoostedLoss(GROUPS, boosting="shrinkage", gather_distributed=gather),
    "contrastive": lambda gather: bier.BoostedLoss(GROUPS, bier.Contrastive(), gather_distributed=gather),
    "triplet": lambda gather: bier.BoostedLoss(GROUPS, bier.Triplet(), gather_distributed=gather),
    "multi-similarity": lambda gather: bier.BoostedLoss(
        GROUPS, losses.MultiSimilarityLoss(), gather_distributed=gather
    ),
    "proxy-anchor": lambda gather: bier.BoostedLoss(
        GROUPS, losses.ProxyAnchorLoss(num_classes=4, embedding_size=12), gather_distributed=gather
    ),
    "cross-entropy": lambda gather: bier.BoostedClassifier(GROUPS, 4, gather_distributed=gather),
}
DIVERSITIES: dict[str, Callable[[bool], nn.Module]] = {
    "none": lambda _: nn.Identity(),
    "activation": lambda gather: bier.ActivationLoss(GROUPS, gather_distributed=gather),
    "adversarial": lambda gather: bier.AdversarialLoss(GROUPS, hidden=6, gather_distributed=gather),
    "activation through": lambda gather: bier.ActivationLoss(GROUPS, through_backbone=True, gather_distributed=gather),
    "adversarial through": lambda gather: bier.AdversarialLoss(
        GROUPS, hidden=6, through_backbone=True, gather_distributed=gather
    ),
}
CASES = {  # metric, diversity, gather, rows of the first process
    **{f"{metric} + none": (metric, "none", True, 8) for metric in METRICS},
    **{f"eta + {diversity}": ("eta", diversity, True, 8) for diversity in DIVERSITIES},
    # A loader without `drop_last` gives the processes batches of different sizes at the end of an epoch.
    **{f"{metric} + none, unequal": (metric, "none", True, 10) for metric in METRICS},
    **{f"eta + {diversity}, unequal": ("eta", diversity, True, 5) for diversity in DIVERSITIES},
    # Without gathering each process sees its own pairs and features only: these must differ.
    "eta + none, apart": ("eta", "none", False, 8),
    "eta + activation, apart": ("eta", "activation", False, 8),
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.ensemble = bier.EmbeddingEnsemble(8, GROUPS, bias=True)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(inputs)
        return features, self.ensemble(features)


class WithLoss(nn.Module):
    """The network and its losses in one module, whose forward is the loss."""

    def __init__(self, metric: str, diversity: str, gather: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = Network()
        self.metric, self.diversity = METRICS[metric](gather), DIVERSITIES[diversity](gather)
        self.double()

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.loss(*self.network(inputs), labels)

    def loss(self, features: Tensor, z: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.metric(z, labels)
        if isinstance(self.diversity, nn.Identity):
            return loss
        return loss + 0.7 * self.diversity(self.network.ensemble, features)


def batch() -> tuple[Tensor, Tensor]:
    """Sixteen rows of four classes; the halves hold other classes and lie at another scale."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 6, dtype=torch.float64, generator=generator)
    inputs[8:] *= 3
    return inputs, torch.tensor([0, 0, 1, 1, 0, 1, 0, 2, 2, 3, 3, 1, 2, 3, 2, 3])


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def one_of_two(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for case, (metric, diversity, gather, first) in CASES.items():
        inputs, labels = (rows[first:] if rank else rows[:first] for rows in batch())
        inside = WithLoss(metric, diversity, gather)
        wrapped = DistributedDataParallel(inside)
        wrapped(inputs, labels).backward()
        save_file(gradients(inside), folder / f"{case}, inside-{rank}")
        outside = WithLoss(metric, diversity, gather)  # only the network is wrapped, the losses stand beside it
        wrapped = DistributedDataParallel(outside.network)
        outside.loss(*wrapped(inputs), labels).backward()
        save_file(gradients(outside), folder / f"{case}, outside-{rank}")
    distributed.destroy_process_group()


def main() -> None:
    warnings.filterwarnings("ignore", ".*hold_rows")
    folder = Path(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=one_of_two, args=(rank, port, folder)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    differences = {}
    for case, (metric, diversity, gather, _) in CASES.items():
        alone = WithLoss(metric, diversity, gather)
        alone(*batch()).backward()
        expected = gradients(alone)
        largest = max(float(value.abs().max()) for value in expected.values())
        for place in ("inside", "outside"):
            shared = [load_file(folder / f"{case}, {place}-{rank}") for rank in (0, 1)]
            assert all(ours.keys() == expected.keys() for ours in shared)
            differences[f"{case}, {place}"] = max(
                float((ours[name] - value).abs().max()) / largest for ours in shared for name, value in expected.items()
            )
    print(json.dumps(differences))


if __name__ == "__main__":
    main()
