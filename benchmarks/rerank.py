"""What re-ranking of the 100 nearest images gains and costs: `python benchmarks/rerank.py --data cub folder`.

The untrained EfficientNet-Lite0, or a model, on the test part of a data set: each method against the plain order, once
as it is and once with a single image of the query's class in the gallery, which is where re-ranking hurts.
`--vectors FOLDER` keeps the vectors for the next time.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import bier
from _report import Report
from bier.config import Config
from bier.data import Dataset, load
from bier.evaluate.reranking import Reranked, evaluate_reranking
from bier.search.rerank import DEPTH, METHODS

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
DRAWS = 10
Vectors = NDArray[np.float32]


def encoded(model: bier.Model, dataset: Dataset, file: Path | None) -> Vectors:
    if file is not None and file.is_file():
        vectors: Vectors = np.load(file)
        return vectors
    vectors = model.encode(list(dataset["test"].images), progress=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, vectors)
    return vectors


def few_images(vectors: Vectors, labels: NDArray[np.int64]) -> dict[str, Reranked]:
    """One random image of each class is the gallery, another one of it the query; the mean over several draws."""
    found = []
    for seed in range(DRAWS):
        random = np.random.default_rng(seed)
        rows = [random.permutation(np.flatnonzero(labels == label))[:2] for label in np.unique(labels)]
        queries, gallery = np.array([row for row in rows if len(row) == 2]).T
        asked, stored = (vectors[queries], labels[queries]), (vectors[gallery], labels[gallery])
        found.append(evaluate_reranking(*asked, [1], list(METHODS), *stored))
    return {
        name: Reranked(
            {1: float(np.mean([one[name].recall[1] for one in found]))},
            float(np.mean([one[name].map_at_r for one in found])),
            float(np.mean([one[name].milliseconds for one in found])),
        )
        for name in found[0]
    }


def show(title: str, rows: dict[str, Reranked], report: Report) -> None:
    plain = rows["plain"]
    lines = [
        [name, row.recall[1], row.recall[1] - plain.recall[1], row.map_at_r, row.map_at_r - plain.map_at_r]
        for name, row in rows.items()
    ]
    lines = [[*line, row.milliseconds] for line, row in zip(lines, rows.values(), strict=True)]
    report.table(title, ["", "R@1", "gain", "mAP@R", "gain of mAP@R", "ms per query"], lines)


def measure(name: str, arguments: argparse.Namespace, report: Report) -> None:
    root = arguments.root / "grocery" if name == "folder" else arguments.root
    settings = {"data.name": name, "data.root": str(root), "data.validation": 0.2}
    dataset = load(Config().with_settings(settings).data)
    model = bier.load(arguments.model) if arguments.model else bier.pretrained("efficientnet_lite0")
    kept = arguments.vectors and arguments.vectors / f"{name}.npy"
    vectors, labels = encoded(model, dataset, kept), dataset["test"].labels
    shown, source = "groceries" if name == "folder" else name, arguments.model or "untrained efficientnet_lite0"
    print(f"\n{shown}, {source}: {len(vectors):,} test images of {len(np.unique(labels))} classes")
    nearest = evaluate_reranking(vectors, labels, [1], list(METHODS))
    show(f"{shown}: the {DEPTH} nearest of all other images", nearest, report)
    few = few_images(vectors, labels)
    show(f"{shown}: one image of each class in the gallery, mean of {DRAWS} draws", few, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["cub", "folder"], help="data sets; `folder` is groceries")
    parser.add_argument("--root", type=Path, default=SHARED, help="the folder with CUB_200_2011 and grocery")
    parser.add_argument("--model", type=Path, help="a run or model folder; the untrained backbone where not given")
    parser.add_argument("--vectors", type=Path, metavar="FOLDER", help="keeps the vectors of the test images")
    arguments = parser.parse_args()
    report = Report("rerank", ["numpy"])
    for name in arguments.data:
        measure(name, arguments, report)
    report.save()


if __name__ == "__main__":
    main()
