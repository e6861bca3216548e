"""In-Shop Clothes Retrieval: queries are searched in a gallery of other images of the same items."""

from pathlib import Path

import numpy as np

from bier.data.layout import Benchmark, Layout, official, part, rows
from bier.data.records import Dataset, Part
from bier.errors import DataError

LAYOUT = Layout(
    title="In-Shop Clothes",
    folders=("In-shop Clothes Retrieval Benchmark", "In-shop", "inshop"),
    shape="{Eval/list_eval_partition.txt or list_eval_partition.txt, img/WOMEN/... or Img/img/WOMEN/...}",
)
EXPECTED = {
    "train": {"images": 25882, "classes": 3997},
    "query": {"images": 14218, "classes": 3985},
    "gallery": {"images": 12612, "classes": 3985},
}
KS = (1, 10, 20, 30, 40, 50)
LISTS = tuple(f"{folder}list_eval_partition.txt" for folder in ("", "Eval/", "Anno/", "Evaluation/"))


def _read(root: Path, _: str) -> Dataset:
    home, listing = LAYOUT.locate(root, *LISTS)
    images = home / "Img" if (home / "Img" / "img").is_dir() else home
    LAYOUT.need(images / "img")
    found: dict[str, list[tuple[Path, str]]] = {"train": [], "query": [], "gallery": []}
    for path, item, which in rows(listing, 3, skip=2):
        if which not in found:
            raise DataError(f"{listing}: the status of {path} must be train, query or gallery. Got '{which}' instead.")
        found[which].append((images / path, item))
    shown = found["query"] + found["gallery"]
    test = part([path for path, _ in shown], [item for _, item in shown])
    asked = np.arange(len(test)) < len(found["query"])
    parts: dict[str, Part] = {
        "train": part([path for path, _ in found["train"]], [item for _, item in found["train"]]),
        "query": test.select(asked),
        "gallery": test.select(~asked),
    }
    checked = official("inshop", parts, KS)
    return Dataset(checked.name, parts, KS, "query-gallery", checked.split)


INSHOP = Benchmark(_read, {"": EXPECTED})
