"""PKU VehicleID: three test sets; one image of each vehicle is drawn into the gallery, again and again."""

from pathlib import Path

from bier.data.layout import Benchmark, Layout, official, part, rows
from bier.data.records import Dataset, Part
from bier.errors import DataError

LAYOUT = Layout(
    title="VehicleID",
    folders=("VehicleID_V1.0", "VehicleID", "PKU-VehicleID"),
    shape="VehicleID_V1.0/{image/*.jpg, train_test_split/{train_list.txt, test_list_800.txt, test_list_1600.txt, "
    "test_list_2400.txt}}",
)
VEHICLES = {"small": 800, "medium": 1600, "large": 2400}
# The paper states how many vehicles a test set has, not how many images.
EXPECTED = {
    size: {"train": {"images": 110178, "classes": 13134}, "test": {"classes": vehicles}}
    for size, vehicles in VEHICLES.items()
}
KS = (1, 5)


def _read(root: Path, size: str) -> Dataset:
    if size not in VEHICLES:
        raise DataError(f"The 'size' of VehicleID must be small, medium or large. Got '{size}' instead.")
    home, _marker = LAYOUT.locate(root, "train_test_split")
    LAYOUT.need(home / "image")
    test = f"test_list_{VEHICLES[size]}.txt"
    parts = {"train": _part(home, "train_list.txt"), "test": _part(home, test)}
    checked = official("vehicleid", parts, KS, size=size)
    return Dataset(checked.name, parts, KS, "repeated-gallery", checked.split)


def _part(home: Path, name: str) -> Part:
    listing = rows(LAYOUT.need(home / "train_test_split" / name), 2)
    return part([home / "image" / f"{image}.jpg" for image, _ in listing], [vehicle for _, vehicle in listing])


VEHICLEID = Benchmark(
    _read,
    EXPECTED,
    note="The train_list.txt that is in circulation names 13,164 vehicles, 30 more than the paper counts.",
)
