"""Whether the threshold of "same or not" keeps its promise on other classes: `python benchmarks/thresholds.py`.

Frozen EfficientNet-Lite0 features of CUB, Cars and the groceries. A threshold that promises 95%, 80% or 60% is chosen
on half of the classes and tested on the others: one half of them is a collection that is searched with every image in
turn, the rest are as many queries whose class the collection does not have. Five seeds decide which classes.
`--vectors FOLDER` keeps the vectors for the next time.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import bier
from _report import Report
from bier.config import Config
from bier.data import load
from bier.evaluate.thresholds import PRECISION, match_threshold

EACH = {"cub": 12, "cars": 12, "folder": 20}  # images of each class
SEEDS = range(5)
PROMISES = (PRECISION, 80.0, 60.0)  # percent; untrained features reach the first one on few data sets
Vectors = NDArray[np.float64]


def encoded(data: str, root: Path, file: Path | None) -> tuple[Vectors, NDArray[np.str_]]:
    """Vectors of length 1 and labels, of the first images of each class."""
    if file is None or not file.is_file():
        dataset = load(Config().with_settings({"data.name": data, "data.root": str(root)}).data)
        images, labels = [], []
        for part in dataset.parts.values():
            for label in np.unique(part.labels):
                rows = np.flatnonzero(part.labels == label)[: EACH[data]]
                images += [part.images[row] for row in rows]
                labels += [part.classes[label]] * len(rows)
        vectors = bier.pretrained("efficientnet_lite0").encode(images, progress=True)
        if file is None:
            return vectors, np.array(labels)
        np.savez(file, v=vectors, y=np.array(labels))
    saved = np.load(file)
    vectors = saved["v"].astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), saved["y"]


def draw(
    vectors: Vectors, labels: NDArray[np.str_], seed: int, promise: float
) -> tuple[float, float, float, float] | None:
    """(threshold, lower bound, measured precision, share of the right images that are found); None: no threshold."""
    classes = np.random.default_rng(seed).permutation(np.unique(labels))
    half, quarter = len(classes) // 2, len(classes) // 4
    chosen, stored, unknown = (
        np.isin(labels, some) for some in (classes[:half], classes[half : half + quarter], classes[half + quarter :])
    )
    codes = torch.from_numpy(np.unique(labels, return_inverse=True)[1])
    found = match_threshold(torch.from_numpy(vectors[chosen]), codes[torch.from_numpy(chosen)], None, promise)
    if found is None:
        return None
    among = vectors[stored] @ vectors[stored].T
    np.fill_diagonal(among, -np.inf)
    alike = labels[stored][:, None] == labels[stored]
    above = among >= found.threshold
    right, wrong = (above & alike).sum(), (above & ~alike).sum()
    strangers = (vectors[unknown] @ vectors[stored].T >= found.threshold).sum() * stored.sum() / unknown.sum()
    precision = 100 * right / max(1, right + wrong + strangers)
    return found.threshold, found.low, float(precision), 100 * right / (alike.sum() - stored.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cub", type=Path, help="CUB_200_2011")
    parser.add_argument("--cars", type=Path, help="the folder of Cars196")
    parser.add_argument("--groceries", type=Path, help="a folder of photographs, one folder per class")
    parser.add_argument("--vectors", type=Path, help="where the vectors are kept")
    arguments = parser.parse_args()
    report = Report("thresholds", [], 0)
    lines, kept, draws = [], 0, 0
    for name, data in (("cub", "cub"), ("cars", "cars"), ("groceries", "folder")):
        root = getattr(arguments, name)
        if root is None:
            continue
        vectors, labels = encoded(data, root, arguments.vectors and arguments.vectors / f"{name}.npz")
        for promise, seed in ((promise, seed) for promise in PROMISES for seed in SEEDS):
            row = draw(vectors, labels, seed, promise)
            draws += row is not None
            kept += row is not None and row[2] >= promise - 3
            cells = ["none"] * 4 if row is None else [f"{row[0]:.3f}", *(f"{value:.1f}" for value in row[1:])]
            lines.append([name, f"{promise:g}%", str(seed), *cells])
    head = ["", "promise", "seed", "threshold", "lower bound", "precision on other classes", "recall"]
    report.table("A threshold and its promise", head, lines)
    report.figure("draws whose precision is within 3 points or above", f"of {draws}", float(kept), at_least=0.9 * draws)
    report.save()


if __name__ == "__main__":
    main()
