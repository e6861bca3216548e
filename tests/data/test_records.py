"""Parts and data sets."""

from pathlib import Path

import numpy as np
import pytest

from bier.data import Dataset, Part
from bier.errors import DataError


def paths(count: int) -> tuple[Path, ...]:
    return tuple(Path(f"{i}.jpg") for i in range(count))


def test_select_keeps_labels_classes_and_boxes_together() -> None:
    boxes = np.arange(16, dtype=np.float32).reshape(4, 4)
    part = Part(paths(4), np.array([0, 1, 0, 1]), ("a", "b"), boxes)
    chosen = part.select([3, 0])
    assert chosen.images == (Path("3.jpg"), Path("0.jpg"))
    assert chosen.labels.tolist() == [1, 0]
    assert chosen.boxes is not None
    assert chosen.boxes[0].tolist() == [12, 13, 14, 15]
    assert part.select(np.array([False, True, False, False])).images == (Path("1.jpg"),)


def test_select_works_on_pixels() -> None:
    pixels = np.arange(3 * 2 * 2 * 3, dtype=np.uint8).reshape(3, 2, 2, 3)
    chosen = Part(pixels, np.array([0, 1, 2]), ("a", "b", "c")).select([2])
    assert isinstance(chosen.images, np.ndarray)
    assert (chosen.images[0] == pixels[2]).all()


def test_images_without_a_label_stay_so() -> None:
    part = Part(paths(3), np.array([2, -1, 0]), ("a", "b", "c"), root=Path("r"), ids=("x", "y", "z"))
    assert part.present == 2
    assert part.label_names() == ["c", None, "a"]
    fewer = part.select([1, 0]).only_present()
    assert (fewer.ids, fewer.root, fewer.classes) == (("y", "x"), Path("r"), ("c",))
    assert fewer.label_names() == [None, "c"]
    assert part.select([1]).only_present().label_names() is None
    with pytest.raises(DataError, match="ids of a part must be one per image"):
        Part(paths(2), np.array([0, 0]), ("a",), ids=("x",))


def test_only_present_renumbers_in_order() -> None:
    part = Part(paths(4), np.array([3, 1, 3, 1]), ("a", "b", "c", "d")).only_present()
    assert part.classes == ("b", "d")
    assert part.labels.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("labels", "boxes", "message"),
    [
        ([0], None, "one per image"),
        ([0, 2], None, "from 0 to 1"),
        ([0, -2], None, "from 0 to 1, one per class, or -1 for none"),
        ([0, 1], np.zeros((1, 4), np.float32), "shape"),
    ],
)
def test_a_part_that_does_not_fit_together_is_refused(
    labels: list[int], boxes: np.ndarray | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Part(paths(2), np.array(labels), ("a", "b"), boxes)


def test_all_parts_together() -> None:
    boxes = np.arange(8, dtype=np.float32).reshape(2, 4)
    train = Part(paths(3), np.array([0, 1, 0]), ("b", "c"))
    test = Part((Path("x.jpg"), Path("y.jpg")), np.array([0, 2]), ("a", "unused", "b"), boxes)
    everything = Dataset("mine", {"train": train, "test": test}, (1,))["all"]
    assert everything.images == (*paths(3), Path("x.jpg"), Path("y.jpg"))
    assert [everything.classes[label] for label in everything.labels] == ["b", "c", "b", "a", "b"]
    assert everything.classes == ("a", "b", "c")
    assert everything.boxes is not None
    assert np.isnan(everything.boxes[:3]).all()
    assert everything.boxes[3:].tolist() == boxes.tolist()


def test_an_unknown_part_names_those_there_are() -> None:
    part = Part(paths(2), np.array([0, 0]), ("a", "unused"))
    dataset = Dataset("mine", {"train": part, "test": part}, (1,))
    assert dataset.counts() == {"train": {"images": 2, "classes": 1}, "test": {"images": 2, "classes": 1}}
    with pytest.raises(DataError, match=r"train, test, all\. Got 'query'"):
        dataset["query"]
