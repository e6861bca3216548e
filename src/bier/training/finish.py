"""Measuring while training, and the model that a run leaves behind."""

from pathlib import Path

import torch
from safetensors.torch import save

from bier import files
from bier.config import Config
from bier.evaluate.dataset import CLASSIFIER, accuracies
from bier.evaluate.recall import recall_at_k
from bier.method import equations
from bier.method.classifier import BoostedClassifier
from bier.models.model import Model
from bier.training import run_folder
from bier.training.run_folder import writing
from bier.training.setup import Workbench

BATCH = 128


@torch.no_grad()
def measure(bench: Workbench) -> list[float]:
    """R@1 on the validation classes, or accuracy on the validation images, of the ensemble and of each learner; in
    percent."""
    if bench.validation is None:
        raise RuntimeError("this run has no validation part")
    feed, labels = bench.validation
    objective = bench.objective
    objective.eval()
    z = torch.cat([bench.embed(inputs) for inputs in feed.in_order(feed.kept, BATCH)])
    chosen = torch.from_numpy(labels[feed.kept]).to(z.device)
    if isinstance(objective.metric, BoostedClassifier):
        right = accuracies(objective.metric, z, chosen)
        objective.train()
        return [value for name, value in right.items() if not name.startswith("prefix-")]
    objective.train()
    z, chosen = z.cpu(), chosen.cpu()
    vectors = [
        objective.ensemble.vector(z, bench.config.model.weighting),
        *map(equations.unit_rows, objective.ensemble.split(z)),
    ]
    return [recall_at_k(one, chosen, [1])[1] for one in vectors]


def save_model(run: Path, config: Config, bench: Workbench) -> Path:
    """runs/NAME/model: the backbone and the embedding, without anything that only training needed.

    A run that classifies leaves its classifiers beside it.
    """
    objective = bench.objective.eval()
    metadata = {"data": config.data.name, "method": config.method, "seed": config.seed}
    model = Model(bench.backbone, objective.ensemble, config.model.weighting, config.train.precision, metadata)
    folder = run / run_folder.MODEL
    with writing(folder, run / run_folder.CHECKPOINTS):
        if isinstance(objective.metric, BoostedClassifier):
            files.write(run / CLASSIFIER, save(objective.metric.state_dict()))
        model.save(folder)
    return folder
