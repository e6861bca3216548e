"""`bier data check` and `bier data show`, run as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bier.cli.terminal import Data
from bier.data import NAMES


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat", "dog", "emu", "fox"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.full((30, 20, 3), 80 * i, np.uint8)).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def test_check_prints_one_json_object_and_nothing_else(cli, photos: Path) -> None:
    code, out, _ = cli("data", "check", "--data", "folder", "--root", str(photos), "--json")
    assert code == 0
    assert json.loads(out) == {"train": {"images": 6, "classes": 2}, "test": {"images": 6, "classes": 2}}


def test_check_prints_a_table_for_people(cli, photos: Path) -> None:
    code, out, err = cli("data", "check", "--data", "folder", "--root", str(photos), "--validation", "0.5")
    assert code == 0
    assert out == ""
    for word in ("train", "validation", "test", "images", "classes", "All images can be read."):
        assert word in err
    _, _, err = cli("data", "check", "--data", "folder", "--root", str(photos), "--quick")
    assert "All files are there." in err


def test_check_reads_every_image_and_lists_what_cannot_be_read(cli, photos: Path) -> None:
    whole = (photos / "cat" / "0.png").read_bytes()
    (photos / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    (photos / "emu" / "1.png").write_bytes(b"")
    arguments = ("data", "check", "--data", "folder", "--root", str(photos))
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    listed, ended = err.splitlines()[-3:-1], err.splitlines()[-1]
    assert sorted(Path(line.split(": ")[0]).name for line in listed) == ["0.png", "1.png"]
    assert "2 of the 12 images of 'folder' cannot be read; the first is" in ended
    code, out, _ = cli(*arguments, "--json")
    assert code == 2
    assert sorted(Path(one["path"]).name for one in json.loads(out)["unreadable"]) == ["0.png", "1.png"]
    assert cli(*arguments, "--quick")[0] == 0


def test_check_compares_count_by_count(cli, tmp_path: Path) -> None:
    heading = "image_id class_id super_class_id path\n"
    (tmp_path / "Ebay_train.txt").write_text(heading + "1 1 1 a/1.JPG\n")
    (tmp_path / "Ebay_test.txt").write_text(heading + "2 2 1 a/2.JPG\n")
    (tmp_path / "a").mkdir()
    code, out, err = cli("data", "check", "--data", "sop", "--root", str(tmp_path), "--json")
    assert code == 2
    assert json.loads(out)["test"] == {"images": 1, "classes": 1}
    assert "2 of the 2 images of 'sop' are missing" in err
    for name in ("1", "2"):
        (tmp_path / "a" / f"{name}.JPG").touch()
    code, out, err = cli("data", "check", "--data", "sop", "--root", str(tmp_path), "--quick")
    assert code == 2
    assert "differs" in err
    assert "train has 1 images, expected 59,551" in err
    assert "test has 1 classes, expected 11,316" in err


def test_check_on_the_real_cub(cli, shared_data: Path) -> None:
    code, out, _ = cli(
        "data", "check", "--data", "cub", "--root", str(shared_data / "CUB_200_2011"), "--quick", "--json"
    )
    assert code == 0
    assert json.loads(out) == {
        "train": {"images": 5864, "classes": 100},
        "test": {"images": 5924, "classes": 100},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "cbu"), "Did you mean 'cub'?"),
        (("--data", "cub"), "'cub' needs a root"),
        (("--data", "cub", "--root", "/nowhere"), "The official layout is CUB_200_2011/"),
        (("--data", "glyphs", "--validation", "2"), "'data.validation'"),
        (("--data", "glyphs", "--split", "random"), "split"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cli("data", "check", *arguments, "--json")
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_show_writes_a_picture(cli, photos: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    arguments = ("--data", "folder", "--root", str(photos), "--part", "test", "--classes", "2", "--images", "3")
    code, out, _ = cli("data", "show", *arguments, "--out", str(sheet), "--json")
    assert code == 0
    with Image.open(sheet) as picture:
        assert json.loads(out) == {"file": str(sheet), "width": picture.width, "height": picture.height}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["sheet.png"]


def test_show_refuses_what_it_cannot_write_or_find(cli, photos: Path, tmp_path: Path) -> None:
    source = ("--data", "folder", "--root", str(photos))
    for out in (tmp_path / "sheet.nonsense", tmp_path / "absent" / "sheet.png"):
        code, _, err = cli("data", "show", *source, "--out", str(out))
        assert code == 2
        assert "Got" in err
    code, _, err = cli("data", "show", *source, "--part", "query", "--out", str(tmp_path / "s.png"))
    assert code == 2
    assert "has the parts train, test, all. Got 'query'" in err


def test_help_names_every_data_set_and_shows_examples(cli) -> None:
    code, out, _ = cli("data", "check", "--help")
    assert code == 0
    assert "bier data check --data cub --root" in out
    option = Data.__metadata__[0]  # type: ignore[attr-defined]
    for name in NAMES:
        assert name in option.help


def test_asking_for_help_does_not_load_torch_or_numpy() -> None:
    heavy = "{'torch', 'numpy', 'PIL', 'matplotlib'}"
    code = f"import sys; import bier.cli.data, bier.cli.terminal; sys.exit(len({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", [["train"], ["data", "check"], ["data", "show", "--out", "a.png"], ["data", "audit"]])
def test_a_root_without_data_is_a_folder_of_images(words: list[str], tmp_path: Path, cli) -> None:
    """It was passed over in silence once, and drawn characters were trained on."""
    code, _, err = cli(*words, "--root", str(tmp_path))
    assert code == 2
    assert "It holds none" in err
    code, _, err = cli(*words)
    assert code == 2
    assert "Give a folder of photographs" in err
