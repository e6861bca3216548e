"""What re-ranking of the 100 nearest images gains and costs: `python benchmarks/rerank.py --data cub --root DATA`.

The untrained EfficientNet-Lite0, or a model, on the test part of a data set: each method against the plain order, once
as it is and once with a single image of the query's class in the gallery, which is where re-ranking hurts. Last, the
threshold of "same or not": found on validation classes, tested on test classes. `--vectors FILE` keeps the vectors for
the next time.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import bier
from _report import Report
from bier.config import Config
from bier.data import Dataset, load_for
from bier.evaluate.dataset import find_same
from bier.evaluate.reranking import Reranked, evaluate_reranking
from bier.evaluate.verification import count_pairs, operate
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


def show_same(model: bier.Model, dataset: Dataset, vectors: Vectors, labels: NDArray[np.int64]) -> None:
    kept = find_same(model, dataset)
    if kept is None or kept["threshold"] is None:
        print("\nno threshold reaches 95% precision")
        return
    found = operate(count_pairs(vectors, labels), kept["threshold"])
    print(
        f"\nsame from {found.threshold:.4f}, found on {kept['classes']} {kept['part']} classes for "
        f"{kept['precision']:g}%; on test classes: precision {found.precision or 0:.1f}, recall {found.recall:.2f}, "
        f"answered {found.answered:.1f}, empty if the query's class is removed {found.empty:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cub")
    parser.add_argument("--root", type=Path, default=SHARED, help="where the data set is")
    parser.add_argument("--model", type=Path, help="a run or model folder; the untrained backbone where not given")
    parser.add_argument("--vectors", type=Path, help="a .npy file that keeps the vectors of the test images")
    arguments = parser.parse_args()

    settings = {"data.name": arguments.data, "data.root": str(arguments.root), "data.validation": 0.2}
    dataset = load_for(Config().with_settings(settings).data)
    model = bier.load(arguments.model) if arguments.model else bier.pretrained("efficientnet_lite0")
    vectors, labels = encoded(model, dataset, arguments.vectors), dataset["test"].labels
    source = str(arguments.model or "untrained efficientnet_lite0")
    report = Report("rerank", ["numpy"])
    print(f"{arguments.data}, {source}: {len(vectors):,} test images of {len(np.unique(labels))} classes")
    nearest = evaluate_reranking(vectors, labels, [1], list(METHODS))
    show(f"{arguments.data}: the {DEPTH} nearest of all other images", nearest, report)
    few = few_images(vectors, labels)
    show(f"{arguments.data}: one image of each class in the gallery, mean of {DRAWS} draws", few, report)
    show_same(model, dataset, vectors, labels)
    report.save()


if __name__ == "__main__":
    main()
