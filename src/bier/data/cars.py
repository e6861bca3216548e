"""Cars-196: the first 98 classes train, the last 98 test, whatever the official train and test folders say.

Two layouts are read: the official devkit (`cars_annos.mat` and `car_ims/`), which has bounding boxes, and the
one-folder-a-class layout (`train/NAME/*.jpg`, `test/NAME/*.jpg`), which has none; there the two folders are
merged and the classes sorted by name, which is the devkit's order.
"""

from pathlib import Path

import numpy as np

from bier.data.folder import class_folders, images_below
from bier.data.layout import Benchmark, Layout, official, part
from bier.data.records import Dataset
from bier.errors import DataError

LAYOUT = Layout(
    title="Cars-196",
    folders=("cars196", "cars", "stanford_cars", "car_data", "car_data/car_data"),
    shape="cars_annos.mat beside car_ims/*.jpg, or train/NAME/*.jpg and test/NAME/*.jpg with one folder a class",
)
EXPECTED = {"train": {"images": 8054, "classes": 98}, "test": {"images": 8131, "classes": 98}}
KS = (1, 2, 4, 8, 16, 32)
TRAINING_CLASSES = 98
ANNOTATIONS = ("cars_annos.mat", "devkit/cars_annos.mat")
Record = tuple[Path, str, tuple[float, ...]]


def _read(root: Path, cropped: bool) -> Dataset:
    home, marker = LAYOUT.locate(root, *ANNOTATIONS, "train")
    if marker.name == "cars_annos.mat":
        train, test = _from_devkit(home, marker)
    elif cropped:
        raise DataError(
            f"The data set 'cars-cropped' needs the bounding boxes of cars_annos.mat. {home} is the layout with one "
            "folder a class, which has no boxes: use 'cars', or the official devkit."
        )
    else:
        train, test = _from_folders(home)
    parts = {
        which: part([r[0] for r in some], [r[1] for r in some], [r[2] for r in some] if cropped else None)
        for which, some in (("train", train), ("test", test))
    }
    return official("cars-cropped" if cropped else "cars", parts, KS)


def _from_devkit(home: Path, path: Path) -> tuple[list[Record], list[Record]]:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    LAYOUT.need(home / "car_ims")
    try:
        content = loadmat(path, squeeze_me=True)
        annotations, names = np.atleast_1d(content["annotations"]), np.atleast_1d(content["class_names"])
        columns = [annotations[f"bbox_{corner}"] for corner in ("x1", "y1", "x2", "y2")]
        files, numbers = annotations["relative_im_path"], annotations["class"]
    except (KeyError, ValueError, TypeError, MatReadError) as error:
        raise DataError(f"{path} must be Cars-196's file of annotations and class names. Got: {error}.") from error
    train: list[Record] = []
    test: list[Record] = []
    for file, number, *corners in zip(files, numbers, *columns, strict=True):
        if not 1 <= int(number) <= len(names):
            raise DataError(f"{path}: the class of {file} must be from 1 to {len(names)}. Got {number} instead.")
        x1, y1, x2, y2 = map(float, corners)
        # Matlab counts pixels from 1 and includes the last one.
        record = (home / str(file), str(names[int(number) - 1]), (x1 - 1, y1 - 1, x2, y2))
        (train if int(number) <= TRAINING_CLASSES else test).append(record)
    return train, test


def _from_folders(home: Path) -> tuple[list[Record], list[Record]]:
    halves = [class_folders(LAYOUT.need(home / half)) for half in ("train", "test")]
    names = sorted({folder.name for half in halves for folder in half})
    records: dict[str, list[Record]] = {name: [] for name in names}
    for half in halves:
        for folder in half:
            records[folder.name] += [(path, folder.name, ()) for path in images_below(folder)]
    train = [record for name in names[:TRAINING_CLASSES] for record in records[name]]
    return train, [record for name in names[TRAINING_CLASSES:] for record in records[name]]


CARS = Benchmark(lambda root, _: _read(root, cropped=False), {"": EXPECTED})
CARS_CROPPED = Benchmark(lambda root, _: _read(root, cropped=True), {"": EXPECTED})
