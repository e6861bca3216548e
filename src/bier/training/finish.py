"""Measuring while training, and the model that a run leaves behind."""

from pathlib import Path

import torch
from torch import Tensor

from bier.config import Config
from bier.evaluate.recall import recall_at_k
from bier.method.classifier import BoostedClassifier
from bier.models.model import Model
from bier.training import record
from bier.training.setup import Workbench

BATCH = 128


@torch.no_grad()
def measure(bench: Workbench) -> float:
    """R@1 of the ensemble on the validation classes, or accuracy on the validation images; in percent."""
    if bench.validation is None:
        raise RuntimeError("this run has no validation part")
    feed, labels = bench.validation
    objective = bench.objective
    objective.eval()
    z = torch.cat([bench.embed(inputs) for inputs in feed.in_order(feed.kept, BATCH)])
    objective.train()
    chosen = torch.from_numpy(labels[feed.kept])
    if isinstance(objective.metric, BoostedClassifier):
        return accuracy(objective.metric, z, chosen)
    return recall_at_k(objective.ensemble.vector(z, bench.config.model.weighting), chosen, [1])[1]


@torch.no_grad()
def accuracy(classifier: BoostedClassifier, z: Tensor, labels: Tensor) -> float:
    """Share of images whose own class has the highest ensemble score, in percent."""
    right = classifier.eval().logits(z).argmax(dim=1) == labels
    classifier.train()
    return 100 * float(right.double().mean())


def save_model(run: Path, config: Config, bench: Workbench) -> Path:
    """runs/NAME/model: the backbone and the embedding, without anything that only training needed."""
    bench.objective.eval()
    metadata = {"data": config.data.name, "method": config.method, "seed": config.seed}
    model = Model(bench.backbone, bench.objective.ensemble, config.model.weighting, config.train.precision, metadata)
    folder = run / record.MODEL
    model.save(folder)
    return folder
