"""A data set is divided again as a run has recorded it, whatever was added, removed or renamed since."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from bier import data
from bier.data.recorded import as_recorded, image_ids, record
from bier.errors import DataError
from bier.runs import Run


def copied(pictures: Path, place: Path) -> Path:
    return Path(shutil.copytree(pictures, place))


@pytest.mark.parametrize("split", ["classes", "inside"])
def test_new_images_move_nothing(pictures: Path, tmp_path: Path, split: str) -> None:
    root = copied(pictures, tmp_path / "photos")
    before = data.load("folder", root, validation=0.3, split=split)
    run = Run(tmp_path)
    run.write_images(record(before))
    assert run.classes is not None
    assert set(run.classes["train"]) == set(before["train"].classes)
    for name in ("a new class", "another"):
        shutil.copytree(root / "class 0", root / name)
    shutil.copy(root / "class 1" / "0.png", root / "class 1" / "more.png")
    drawn = data.load("folder", root, validation=0.3, split=split)
    assert [image_ids(drawn[name]) for name in before.parts] != [image_ids(part) for part in before.parts.values()]
    assert run.images is not None
    after, changes = as_recorded(drawn, run.images)
    for name, part in before.parts.items():
        assert image_ids(after[name]) == image_ids(part)
        assert after[name].images == part.images
        assert after[name].classes == part.classes
        assert np.array_equal(after[name].labels, part.labels)
    assert changes.new_classes == ("a new class", "another")
    assert changes.new_images is not None
    assert changes.new_images.present == 2
    assert changes.added == {"a new class": 8, "another": 8, "class 1": 1}
    assert (changes.lost(), changes.others()) == ("", "17 images added, 2 classes new ('a new class', 'another')")


def test_what_is_gone_keeps_the_numbers_of_the_others(pictures: Path, tmp_path: Path) -> None:
    root = copied(pictures, tmp_path / "photos")
    before = data.load("folder", root)
    run = Run(tmp_path)
    run.write_images(record(before))
    names = before["train"].classes
    (root / names[0] / "0.png").unlink()
    (root / names[2]).rename(root / "renamed")
    (root / names[1] / "3.png").write_bytes(b"other content")
    (root / names[1] / "4.png").touch()
    assert run.images is not None
    after, changes = as_recorded(data.load("folder", root), run.images)
    assert changes.gone_classes == (names[2],)
    assert changes.lost() == (
        f"9 images gone (the first is {names[0]}/0.png), 1 image changed (the first is {names[1]}/3.png), "
        f"1 class gone or renamed ('{names[2]}')"
    )
    assert changes.others().startswith(f"1 image of another time, with equal sizes (the first is {names[1]}/4.png), 8 ")
    assert changes.new_classes == ("renamed",)
    assert [after["train"].classes[label] for label in after["train"].labels] == [
        path.split("/")[0] for path in image_ids(after["train"])
    ]
    assert after["train"].classes == names


@pytest.mark.parametrize("name", ["glyphs", "features"])
def test_rows_that_are_no_files_are_known_by_their_content(name: str, features_file: Path, tmp_path: Path) -> None:
    dataset = data.load(name, features_file)
    run = Run(tmp_path)
    run.write_images(record(dataset))
    assert run.images is not None
    assert as_recorded(dataset, run.images)[0] is dataset


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    Run(tmp_path).data_file.write_text("path,label\n1,2\n")
    with pytest.raises(DataError, match=r"data\.csv, the record of the images of the run, cannot be read: its heading"):
        _ = Run(tmp_path).images
    assert Run(tmp_path / "no").images is None
