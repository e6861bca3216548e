"""Stanford Online Products: Ebay_train.txt and Ebay_test.txt say which product is in which part."""

from pathlib import Path

from bier.data.layout import Benchmark, Layout, official, part, rows
from bier.data.records import Dataset, Part

LAYOUT = Layout(
    title="Stanford Online Products",
    folders=("Stanford_Online_Products",),
    shape="Stanford_Online_Products/{Ebay_train.txt, Ebay_test.txt, bicycle_final/*.JPG, cabinet_final/*.JPG, ...}",
)
EXPECTED = {"train": {"images": 59551, "classes": 11318}, "test": {"images": 60502, "classes": 11316}}
KS = (1, 10, 100, 1000)


def _read(root: Path, _: str) -> Dataset:
    home, _marker = LAYOUT.locate(root, "Ebay_train.txt", "Ebay_test.txt")
    return official("sop", {"train": _part(home, "Ebay_train.txt"), "test": _part(home, "Ebay_test.txt")}, KS)


def _part(home: Path, name: str) -> Part:
    """The first line is a heading; then image, class, super class and path."""
    listing = rows(LAYOUT.need(home / name), 4, skip=1)
    return part([home / path for *_, path in listing], [product for _, product, *_ in listing])


SOP = Benchmark(_read, {"": EXPECTED})
