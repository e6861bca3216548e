"""Stagewise training: the features of a trained network, fixed, with only the embedding left to train."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from bier.data import Dataset
from bier.durable import file_aside
from bier.images import Batches, PreparedImages, in_order
from bier.models.model import load
from bier.models.precision import autocast

BATCH = 64


@torch.no_grad()
def write_features(run: Path, dataset: Dataset, file: Path, cache: Path | None) -> Path:
    """Write phi of the training and test images, by the network of a run, as a data set of the kind `features`.

    What is there is kept; it is written aside and renamed, so it is complete.
    """
    if file.is_file():
        return file
    model = load(run)
    backbone = model.backbone.eval()
    tensors: dict[str, list[torch.Tensor]] = {"features": [], "labels": [], "split": []}
    classes = 0
    for number, name in enumerate(("train", "test")):
        part = dataset[name]
        source = PreparedImages(part.images, backbone.resize, part.boxes, cache)
        for pixels, _ in Batches(source, in_order(source.kept, BATCH), backbone.crop):
            with autocast(model.precision, pixels.device):
                tensors["features"].append(backbone(pixels).float())
        labels = part.labels[source.kept]
        tensors["labels"].append(torch.from_numpy(labels + classes))  # classes of the two parts stay apart
        tensors["split"].append(torch.full((len(labels),), number))
        classes += int(np.max(labels)) + 1
    file.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(file) as aside:
        save_file({key: torch.cat(rows) for key, rows in tensors.items()}, aside)
    return file
