"""CUB-200-2011: the first 100 classes train, the last 100 test; `cub-cropped` cuts out the bounding boxes."""

from pathlib import Path

from bier.data.layout import Benchmark, Layout, official, part, rows, whole
from bier.data.records import Dataset
from bier.errors import DataError

LAYOUT = Layout(
    title="CUB-200-2011",
    folders=("CUB_200_2011",),
    shape="CUB_200_2011/{images.txt, image_class_labels.txt, classes.txt, bounding_boxes.txt, images/NAME/*.jpg}",
)
EXPECTED = {"train": {"images": 5864, "classes": 100}, "test": {"images": 5924, "classes": 100}}
KS = (1, 2, 4, 8, 16, 32)
LAST_TRAINING_CLASS = 100


def _read(root: Path, cropped: bool) -> Dataset:
    home, listing = LAYOUT.locate(root, "images.txt")
    labels, classes, boxes = (
        LAYOUT.need(home / name) for name in ("image_class_labels.txt", "classes.txt", "bounding_boxes.txt")
    )
    LAYOUT.need(home / "images")
    class_of = dict(rows(labels, 2))
    name_of = dict(rows(classes, 2))
    box_of = {key: _box(corners, boxes) for key, *corners in rows(boxes, 5)}
    found: dict[str, list[tuple[Path, str, tuple[float, ...]]]] = {"train": [], "test": []}
    for key, path in rows(listing, 2):
        if key not in class_of or class_of[key] not in name_of or key not in box_of:
            raise DataError(f"{listing}: image {key} must be in {labels.name}, {classes.name} and {boxes.name}.")
        number = whole(class_of[key], labels, "class")
        record = (home / "images" / path, name_of[class_of[key]], box_of[key])
        found["train" if number <= LAST_TRAINING_CLASS else "test"].append(record)
    parts = {
        which: part([r[0] for r in some], [r[1] for r in some], [r[2] for r in some] if cropped else None)
        for which, some in found.items()
    }
    return official("cub-cropped" if cropped else "cub", parts, KS)


def _box(corners: list[str], path: Path) -> tuple[float, float, float, float]:
    """x, y, width, height become x1, y1, x2, y2."""
    try:
        x, y, width, height = map(float, corners)
    except ValueError:
        raise DataError(f"{path}: a box must be four numbers. Got '{' '.join(corners)}' instead.") from None
    return x, y, x + width, y + height


CUB = Benchmark(lambda root, _: _read(root, cropped=False), {"": EXPECTED})
CUB_CROPPED = Benchmark(lambda root, _: _read(root, cropped=True), {"": EXPECTED})
