"""Gradients of two processes that share a batch, beside those of one that has all of it. Run by test_distributed.py.

Prints a JSON object: for every case the largest difference between the two, relative to the largest gradient.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bier import distributed
from bier.method.boosting import BoostedLoss
from bier.method.classifier import BoostedClassifier
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.losses import BinomialDeviance, Contrastive, Triplet
from bier.training import objective
from bier.training.objective import Objective

GROUPS = (3, 4, 5)
METRICS = {
    "binomial deviance": lambda: BoostedLoss(GROUPS, BinomialDeviance()),
    "contrastive": lambda: BoostedLoss(GROUPS, Contrastive()),
    "triplet": lambda: BoostedLoss(GROUPS, Triplet()),
    "cross-entropy": lambda: BoostedClassifier(GROUPS, 4),
}
DIVERSITIES = {"activation": ActivationLoss, "adversarial": AdversarialLoss}


def cases() -> Iterator[tuple[str, str, str | None, dict[str, object]]]:
    for metric in METRICS:
        yield metric, metric, None, {}
    for name in DIVERSITIES:
        for reduction in ("sum", "mean"):
            for through in (False, True):
                settings = {"reduction": reduction, "through_backbone": through, "scale_features": True}
                yield f"{name} {reduction} {'through' if through else 'on W'}", "triplet", name, settings
    yield "apart", "binomial deviance", None, {}  # each process with its own pairs only: this must differ


def made(metric: str, diversity: str | None, settings: dict[str, object]) -> Objective:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    loss = DIVERSITIES[diversity](GROUPS, **settings) if diversity else None
    made = Objective(network, EmbeddingEnsemble(8, GROUPS), METRICS[metric](), loss, lambda_div=0.7)
    return made.double()


def batch() -> tuple[Tensor, Tensor]:
    """Sixteen rows of four classes; the halves hold other classes and lie at another scale."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 6, dtype=torch.float64, generator=generator)
    inputs[8:] *= 3
    return inputs, torch.tensor([0, 0, 1, 1, 0, 1, 0, 2, 2, 3, 3, 1, 2, 3, 2, 3])


def gradients(model: nn.Module, core: Objective, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model(inputs, labels).total.backward()
    return {name: p.grad.clone() for name, p in core.named_parameters() if p.grad is not None}


def one_of_two(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    inputs, labels = batch()
    mine = slice(8 * rank, 8 * rank + 8)
    with distributed.process_group():
        for case, metric, diversity, settings in cases():
            if case == "apart":
                objective.gather = lambda rows: rows
            core = made(metric, diversity, settings)
            found = gradients(DistributedDataParallel(core), core, inputs[mine], labels[mine])
            save_file(found, folder / f"{case}-{rank}.safetensors")


def main() -> None:
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
    for case, metric, diversity, settings in cases():
        core = made(metric, diversity, settings)
        alone = gradients(core, core, *batch())
        largest = max(float(value.abs().max()) for value in alone.values())
        shared = [load_file(folder / f"{case}-{rank}.safetensors") for rank in (0, 1)]
        assert all(ours.keys() == alone.keys() for ours in shared)
        differences[case] = max(
            float((ours[name] - value).abs().max()) / largest for ours in shared for name, value in alone.items()
        )
    print(json.dumps(differences))


if __name__ == "__main__":
    main()
