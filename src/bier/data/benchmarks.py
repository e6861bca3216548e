"""The official benchmarks as their authors lay them out, and what to say where a file is missing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bier.data.listing import list_images
from bier.data.records import Dataset, Part, Protocol
from bier.errors import DataError, needs
from bier.files import read_file

LARGEST_LIST = 2**30  # bytes
Counts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Benchmark:
    """An official data set: how to read it, and how many images and classes its protocol expects.

    read: (root, size) -> Dataset. `size` names the test set where there are several (VehicleID), else is ignored.
    expected: by size, or under "" where there is one; a count that the protocol does not state is left out.
    note: what a person should know whose counts differ.
    """

    read: Callable[[Path, str], Dataset]
    expected: Mapping[str, Counts]
    note: str = ""

    def counts(self, size: str) -> Counts:
        """What the protocol expects for this size."""
        return self.expected.get(size, self.expected.get("", {}))


@dataclass(frozen=True)
class Layout:
    """The official layout of a benchmark. Its folder may be given itself, or the folder that contains it.

    title: its name for people. folders: the usual names of its folder. shape: the layout in a few words.
    """

    title: str
    folders: tuple[str, ...]
    shape: str

    def locate(self, root: Path, *markers: str) -> tuple[Path, Path]:
        """The folder of the data set and the first marker found in it; an error names what was looked for."""
        if not root.is_dir():
            raise DataError(f"The root of {self.title} must be a folder. There is no folder {root}. {self.expects}")
        for folder in (root, *(root / name for name in self.folders)):
            for marker in markers:
                if (folder / marker).exists():
                    return folder, folder / marker
        raise DataError(f"There is no {' or '.join(markers)} in {root} or in {root / self.folders[0]}. {self.expects}")

    def need(self, path: Path) -> Path:
        """The path, if it exists; else an error that names it."""
        if not path.exists():
            raise DataError(f"{self.title} is incomplete: there is no {path}. {self.expects}")
        return path

    @property
    def expects(self) -> str:
        """The sentence that shows the official layout."""
        return f"The official layout is {self.shape}."


def rows(path: Path, columns: int, skip: int = 0) -> list[list[str]]:
    """The lines of a list separated by spaces, without the first `skip`; the last column may contain spaces.

    File names of any encoding survive: bytes that are not UTF-8 become what `os.fsencode` turns back.
    """
    lines = read_file(path, LARGEST_LIST).decode("utf-8", "surrogateescape").splitlines()
    found = []
    for number, line in enumerate(lines[skip:], start=skip + 1):
        fields = line.split(maxsplit=columns - 1)
        if not fields:
            continue
        if len(fields) != columns:
            raise DataError(f"{path}, line {number}: expected {columns} columns. Got '{line.strip()}' instead.")
        found.append([*fields[:-1], fields[-1].rstrip()])
    return found


def whole(text: str, path: Path, what: str) -> int:
    """A whole number read from a list."""
    try:
        return int(text)
    except ValueError:
        raise DataError(f"{path}: the {what} must be a whole number. Got '{text}' instead.") from None


Record = tuple[Path, str, tuple[float, ...]]  # an image, the name of its class and its box


def part(images: Sequence[Path], names: Sequence[str], boxes: Sequence[Sequence[float]] | None = None) -> Part:
    """A part whose classes are the distinct names in their order of appearance."""
    numbers: dict[str, int] = {}
    labels = [numbers.setdefault(name, len(numbers)) for name in names]
    cut = None if boxes is None else np.array(boxes, dtype=np.float32).reshape(-1, 4)
    return Part(tuple(images), np.array(labels, dtype=np.int64), tuple(numbers), cut)


def part_of(records: Sequence[Record], cropped: bool) -> Part:
    """The part of these records, cropped to their boxes or not."""
    boxes = [box for _, _, box in records] if cropped else None
    return part([path for path, _, _ in records], [name for _, name, _ in records], boxes)


def official(
    name: str, parts: Mapping[str, Part], ks: tuple[int, ...], protocol: Protocol = "self", **more: object
) -> Dataset:
    """A data set as its authors divide it; no part may be empty."""
    for which, some in parts.items():
        if not len(some):
            raise DataError(f"The data set '{name}' must have images in its part '{which}'. Its lists name none.")
    return Dataset(name, parts, ks, protocol, {"kind": "official", **more})


CUB_LAYOUT = Layout(
    title="CUB-200-2011",
    folders=("CUB_200_2011",),
    shape="CUB_200_2011/{images.txt, image_class_labels.txt, classes.txt, bounding_boxes.txt, images/NAME/*.jpg}",
)
CUB_EXPECTED = {"train": {"images": 5864, "classes": 100}, "test": {"images": 5924, "classes": 100}}
CUB_KS = (1, 2, 4, 8, 16, 32)
LAST_TRAINING_CLASS = 100


def _read_cub(root: Path, cropped: bool) -> Dataset:
    home, listing = CUB_LAYOUT.locate(root, "images.txt")
    labels, classes, boxes = (
        CUB_LAYOUT.need(home / name) for name in ("image_class_labels.txt", "classes.txt", "bounding_boxes.txt")
    )
    CUB_LAYOUT.need(home / "images")
    class_of = dict(rows(labels, 2))
    name_of = dict(rows(classes, 2))
    box_of = {key: _box(corners, boxes) for key, *corners in rows(boxes, 5)}
    found: dict[str, list[Record]] = {"train": [], "test": []}
    for key, path in rows(listing, 2):
        if key not in class_of or class_of[key] not in name_of or key not in box_of:
            raise DataError(f"{listing}: image {key} must be in {labels.name}, {classes.name} and {boxes.name}.")
        number = whole(class_of[key], labels, "class")
        record = (home / "images" / path, name_of[class_of[key]], box_of[key])
        found["train" if number <= LAST_TRAINING_CLASS else "test"].append(record)
    parts = {which: part_of(records, cropped) for which, records in found.items()}
    return official("cub-cropped" if cropped else "cub", parts, CUB_KS)


def _box(corners: list[str], path: Path) -> tuple[float, float, float, float]:
    """x, y, width, height become x1, y1, x2, y2."""
    try:
        x, y, width, height = map(float, corners)
    except ValueError:
        raise DataError(f"{path}: a box must be four numbers. Got '{' '.join(corners)}' instead.") from None
    return x, y, x + width, y + height


CUB = Benchmark(lambda root, _: _read_cub(root, cropped=False), {"": CUB_EXPECTED})
CUB_CROPPED = Benchmark(lambda root, _: _read_cub(root, cropped=True), {"": CUB_EXPECTED})


CARS_LAYOUT = Layout(
    title="Cars-196",
    folders=("cars196", "cars", "stanford_cars", "car_data", "car_data/car_data"),
    shape="cars_annos.mat beside car_ims/*.jpg, or train/NAME/*.jpg and test/NAME/*.jpg with one folder per class",
)
CARS_EXPECTED = {"train": {"images": 8054, "classes": 98}, "test": {"images": 8131, "classes": 98}}
CARS_KS = (1, 2, 4, 8, 16, 32)
TRAINING_CLASSES = 98
ANNOTATIONS = ("cars_annos.mat", "devkit/cars_annos.mat")


def _read_cars(root: Path, cropped: bool) -> Dataset:
    home, marker = CARS_LAYOUT.locate(root, *ANNOTATIONS, "train")
    if marker.name == "cars_annos.mat":
        train, test = _from_devkit(home, marker)
    elif cropped:
        raise DataError(
            f"The data set 'cars-cropped' needs the bounding boxes of cars_annos.mat. {home} is the layout with one "
            "folder per class, which has no boxes: use 'cars', or the official devkit."
        )
    else:
        train, test = _from_folders(home)
    parts = {"train": part_of(train, cropped), "test": part_of(test, cropped)}
    return official("cars-cropped" if cropped else "cars", parts, CARS_KS)


def _from_devkit(home: Path, path: Path) -> tuple[list[Record], list[Record]]:
    needs("scipy", "matlab")  # Cars-196 ships its labels as a Matlab file
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    CARS_LAYOUT.need(home / "car_ims")
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
    halves = [list_images(CARS_LAYOUT.need(home / half)) for half in ("train", "test")]
    names = sorted({name for half in halves for name in half.classes})
    records: dict[str, list[Record]] = {name: [] for name in names}
    for half in halves:
        for path, name in zip(half.images, half.label_names() or [], strict=False):
            if name is not None:
                records[name].append((path, name, ()))
    train = [record for name in names[:TRAINING_CLASSES] for record in records[name]]
    return train, [record for name in names[TRAINING_CLASSES:] for record in records[name]]


CARS = Benchmark(lambda root, _: _read_cars(root, cropped=False), {"": CARS_EXPECTED})
CARS_CROPPED = Benchmark(lambda root, _: _read_cars(root, cropped=True), {"": CARS_EXPECTED})


SOP_LAYOUT = Layout(
    title="Stanford Online Products",
    folders=("Stanford_Online_Products",),
    shape="Stanford_Online_Products/{Ebay_train.txt, Ebay_test.txt, bicycle_final/*.JPG, cabinet_final/*.JPG, ...}",
)
SOP_EXPECTED = {"train": {"images": 59551, "classes": 11318}, "test": {"images": 60502, "classes": 11316}}
SOP_KS = (1, 10, 100, 1000)


def _read_sop(root: Path, _: str) -> Dataset:
    home, _marker = SOP_LAYOUT.locate(root, "Ebay_train.txt", "Ebay_test.txt")
    return official(
        "sop", {"train": _part_sop(home, "Ebay_train.txt"), "test": _part_sop(home, "Ebay_test.txt")}, SOP_KS
    )


def _part_sop(home: Path, name: str) -> Part:
    """The first line is a heading; then image, class, super class and path."""
    listing = rows(SOP_LAYOUT.need(home / name), 4, skip=1)
    return part([home / path for *_, path in listing], [product for _, product, *_ in listing])


SOP = Benchmark(_read_sop, {"": SOP_EXPECTED})


INSHOP_LAYOUT = Layout(
    title="In-Shop Clothes",
    folders=("In-shop Clothes Retrieval Benchmark", "In-shop", "inshop"),
    shape="{Eval/list_eval_partition.txt or list_eval_partition.txt, img/WOMEN/... or Img/img/WOMEN/...}",
)
INSHOP_EXPECTED = {
    "train": {"images": 25882, "classes": 3997},
    "query": {"images": 14218, "classes": 3985},
    "gallery": {"images": 12612, "classes": 3985},
}
INSHOP_KS = (1, 10, 20, 30, 40, 50)
LISTS = tuple(f"{folder}list_eval_partition.txt" for folder in ("", "Eval/", "Anno/", "Evaluation/"))


def _read_inshop(root: Path, _: str) -> Dataset:
    home, listing = INSHOP_LAYOUT.locate(root, *LISTS)
    images = home / "Img" if (home / "Img" / "img").is_dir() else home
    INSHOP_LAYOUT.need(images / "img")
    found: dict[str, list[Record]] = {"train": [], "query": [], "gallery": []}
    for path, item, which in rows(listing, 3, skip=2):
        if which not in found:
            raise DataError(f"{listing}: the status of {path} must be train, query or gallery. Got '{which}' instead.")
        found[which].append((images / path, item, ()))
    test = part_of(found["query"] + found["gallery"], cropped=False)  # the two share their class numbers
    is_query = np.arange(len(test)) < len(found["query"])
    parts = {
        "train": part_of(found["train"], cropped=False),
        "query": test.select(is_query),
        "gallery": test.select(~is_query),
    }
    return official("inshop", parts, INSHOP_KS, "query-gallery")


INSHOP = Benchmark(_read_inshop, {"": INSHOP_EXPECTED})


VEHICLEID_LAYOUT = Layout(
    title="VehicleID",
    folders=("VehicleID_V1.0", "VehicleID", "PKU-VehicleID"),
    shape="VehicleID_V1.0/{image/*.jpg, train_test_split/{train_list.txt, test_list_800.txt, test_list_1600.txt, "
    "test_list_2400.txt}}",
)
VEHICLES = {"small": 800, "medium": 1600, "large": 2400}
# The paper states how many vehicles a test set has, not how many images.
VEHICLEID_EXPECTED = {
    size: {"train": {"images": 110178, "classes": 13134}, "test": {"classes": vehicles}}
    for size, vehicles in VEHICLES.items()
}
VEHICLEID_KS = (1, 5)


def _read_vehicleid(root: Path, size: str) -> Dataset:
    home, _marker = VEHICLEID_LAYOUT.locate(root, "train_test_split")
    VEHICLEID_LAYOUT.need(home / "image")
    test = f"test_list_{VEHICLES[size]}.txt"
    parts = {"train": _part_vehicleid(home, "train_list.txt"), "test": _part_vehicleid(home, test)}
    return official("vehicleid", parts, VEHICLEID_KS, "repeated-gallery", size=size)


def _part_vehicleid(home: Path, name: str) -> Part:
    listing = rows(VEHICLEID_LAYOUT.need(home / "train_test_split" / name), 2)
    return part([home / "image" / f"{image}.jpg" for image, _ in listing], [vehicle for _, vehicle in listing])


VEHICLEID = Benchmark(
    _read_vehicleid,
    VEHICLEID_EXPECTED,
    note="The train_list.txt that is in circulation names 13,164 vehicles, 30 more than the paper counts.",
)


CIFAR_LAYOUT = Layout(
    title="CIFAR-10",
    folders=("cifar-10-batches-bin",),
    shape="the binary version, cifar-10-batches-bin/{data_batch_1.bin ... data_batch_5.bin, test_batch.bin}",
)
CIFAR_EXPECTED = {
    "train": {"images": 40000, "classes": 10},
    "validation": {"images": 10000, "classes": 10},
    "test": {"images": 10000, "classes": 10},
}
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_FILES = {
    "train": tuple(f"data_batch_{i}.bin" for i in (1, 2, 3, 4)),
    "validation": ("data_batch_5.bin",),
    "test": ("test_batch.bin",),
}
CIFAR_PIXELS = 3 * 32 * 32


def _read_cifar10(root: Path, _: str) -> Dataset:
    """For classification: batches 1 to 4 train, batch 5 is validation, the test batch is test."""
    home, _marker = CIFAR_LAYOUT.locate(root, "data_batch_1.bin")
    parts = {}
    for which, names in CIFAR_FILES.items():
        records = np.concatenate([_cifar_records(CIFAR_LAYOUT.need(home / name)) for name in names])
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        parts[which] = Part(np.ascontiguousarray(pixels), records[:, 0].astype(np.int64), CIFAR_CLASSES)
    return Dataset("cifar10", parts, (1,), "accuracy", {"kind": "official", "validation": "data_batch_5"})


def _cifar_records(path: Path) -> NDArray[np.uint8]:
    """One byte of label, then 3,072 bytes of pixels (all red, all green, all blue), again and again."""
    content = np.frombuffer(read_file(path, LARGEST_LIST), dtype=np.uint8)
    if not len(content) or len(content) % (1 + CIFAR_PIXELS):
        raise DataError(f"{path} must be records of {1 + CIFAR_PIXELS} bytes. Got {len(content)} bytes instead.")
    records = content.reshape(-1, 1 + CIFAR_PIXELS)
    if records[:, 0].max() > 9:
        raise DataError(f"{path}: a label must be from 0 to 9. Got {records[:, 0].max()} instead.")
    return records


CIFAR10 = Benchmark(_read_cifar10, {"": CIFAR_EXPECTED})
