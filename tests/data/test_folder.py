"""Any folder of images: one folder per class."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from bier.data import Part, list_images, load
from bier.errors import DataError
from bier.files import file_named
from bier.folders import own_folder


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_images_at_any_depth_and_nothing_else(tmp_path: Path) -> None:
    touch(
        tmp_path / "cat" / "1.jpg",
        tmp_path / "cat" / "deep" / "er" / "2.PNG",
        tmp_path / "cat" / "notes.txt",
        tmp_path / "cat" / ".hidden.jpg",
        tmp_path / "cat" / ".thumbs" / "3.jpg",
        tmp_path / "dog" / "1.webp",
        tmp_path / "empty" / "readme.md",
        tmp_path / ".git" / "x.jpg",
        tmp_path / "stray.jpg",
    )
    dataset = load("folder", tmp_path)
    found = {
        part.classes[label]: [Path(i).relative_to(tmp_path).as_posix() for i in part.images]
        for part in dataset.parts.values()
        for label in part.labels
    }
    assert found == {"cat": ["cat/1.jpg", "cat/deep/er/2.PNG"], "dog": ["dog/1.webp"]}
    assert dataset.protocol == "self"


def test_split_and_seed_reach_the_folder(tmp_path: Path) -> None:
    touch(*(tmp_path / f"class {c}" / f"{i}.jpg" for c in range(20) for i in range(4)))
    dataset = load("folder", tmp_path, test_share=0.25, validation=0.2, seed=3)
    assert {name: part.present for name, part in dataset.parts.items()} == {"train": 12, "validation": 3, "test": 5}
    assert dataset["test"].images != load("folder", tmp_path, test_share=0.25, seed=4)["test"].images
    inside = load("folder", tmp_path, split="inside", test_share=0.25)
    assert {name: len(part) for name, part in inside.parts.items()} == {"train": 60, "test": 20}
    assert inside["train"].present == inside["test"].present == 20
    assert inside.split["kind"] == "inside"


def test_train_and_test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    touch(*(tmp_path / "train" / c / "1.jpg" for c in "abc"), tmp_path / "test" / "x" / "1.jpg")
    dataset = load("folder", tmp_path)
    assert dataset["train"].classes == ("a", "b", "c")
    assert dataset["test"].classes == ("x",)
    assert dataset.split["kind"] == "given"
    held = load("folder", tmp_path, validation=0.34)
    assert {name: part.present for name, part in held.parts.items()} == {"train": 2, "validation": 1, "test": 1}
    touch(tmp_path / "validation" / "v" / "1.jpg")
    assert load("folder", tmp_path)["validation"].classes == ("v",)


def test_query_and_gallery_folders_share_their_classes(tmp_path: Path) -> None:
    touch(tmp_path / "train" / "a" / "1.jpg", tmp_path / "query" / "x" / "1.jpg")
    touch(tmp_path / "gallery" / "b" / "1.jpg", tmp_path / "gallery" / "x" / "2.jpg")
    dataset = load("folder", tmp_path)
    assert dataset.protocol == "query-gallery"
    assert dataset["query"].classes == dataset["gallery"].classes == ("b", "x")
    assert dataset["query"].labels.tolist() == [1]
    assert dataset["gallery"].labels.tolist() == [0, 1]


def test_classes_that_happen_to_be_called_train_and_test(tmp_path: Path) -> None:
    """Without class folders inside, these are classes like any other."""
    touch(tmp_path / "train" / "1.jpg", tmp_path / "test" / "1.jpg")
    dataset = load("folder", tmp_path)
    assert sorted(dataset["train"].classes + dataset["test"].classes) == ["test", "train"]


def test_names_of_any_encoding(tmp_path: Path) -> None:
    for name in (b"caf\xe9", "日本".encode(), "naïve".encode()):
        touch(tmp_path / os.fsdecode(name) / os.fsdecode(b"\xff\xfe 1.jpg"))
    dataset = load("folder", tmp_path)
    assert {name for part in dataset.parts.values() for name in part.classes} == {r"caf\xe9", "日本", "naïve"}
    assert all(Path(image).is_file() for part in dataset.parts.values() for image in part.images)
    ids = list_images(tmp_path).ids or ()
    assert set(ids) == {rf"{name}/\xff\xfe 1.jpg" for name in (r"caf\xe9", "日本", "naïve")}
    assert all("\n".join(ids).encode() and file_named(tmp_path / one).is_file() for one in ids)


def listed(part: Part) -> dict[str, str | None]:
    assert part.ids is not None
    return dict(zip(part.ids, part.label_names() or [None] * len(part), strict=True))


def test_the_listing_of_every_command_is_that_of_training(tmp_path: Path) -> None:
    """All endings that training takes, the first folder as the class, ids from the root; stray images have no label."""
    touch(
        tmp_path / "mugs" / "blue" / "1.jpg",
        tmp_path / "mugs" / "2.AVIF",
        tmp_path / "cups" / "3.jfif",
        tmp_path / "cups" / "notes.txt",
        tmp_path / "stray.png",
    )
    part = list_images(tmp_path)
    assert part.root == tmp_path
    assert part.classes == ("cups", "mugs")
    assert listed(part) == {
        "cups/3.jfif": "cups",
        "mugs/2.AVIF": "mugs",
        "mugs/blue/1.jpg": "mugs",
        "stray.png": None,
    }
    assert part.images == tuple(tmp_path / one for one in part.ids or ())
    trained = load("folder", tmp_path)
    both = {
        image: name
        for one in trained.parts.values()
        for image, name in zip(one.images, one.label_names() or [], strict=True)
    }
    assert both == {tmp_path / one: name for one, name in listed(part).items() if name is not None}


def test_a_flat_folder_is_listed_without_labels_and_cannot_be_trained_on(tmp_path: Path) -> None:
    touch(tmp_path / "2.jpg", tmp_path / "1.jpg")
    part = list_images(tmp_path)
    assert part.ids == ("1.jpg", "2.jpg")
    assert part.label_names() is None
    assert part.present == 0
    with pytest.raises(DataError, match=r"one folder per class.*2 images lie outside"):
        load("folder", tmp_path)


def test_a_divided_folder_is_listed_with_the_classes_of_training(tmp_path: Path) -> None:
    touch(tmp_path / "train" / "a" / "1.jpg", tmp_path / "test" / "b" / "deep" / "1.jpg", tmp_path / "test" / "2.jpg")
    assert listed(list_images(tmp_path)) == {"train/a/1.jpg": "a", "test/b/deep/1.jpg": "b", "test/2.jpg": None}
    assert load("folder", tmp_path)["test"].classes == ("b",)


def test_links_are_followed_by_everybody_and_never_twice_into_one_folder(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    touch(elsewhere / "dogs" / "1.jpg", elsewhere / "one.jpg", root / "zebras" / "2.jpg")
    (root / "dogs").symlink_to(elsewhere / "dogs")
    (root / "zebras" / "linked.jpg").symlink_to(elsewhere / "one.jpg")
    (root / "zebras" / "loop").symlink_to(root)
    (root / "a second name").symlink_to(root / "zebras")  # sorts before the folder itself, whose own name wins
    assert listed(list_images(root)) == {"dogs/1.jpg": "dogs", "zebras/2.jpg": "zebras", "zebras/linked.jpg": "zebras"}
    trained = load("folder", root)
    assert sorted(trained["train"].classes + trained["test"].classes) == ["dogs", "zebras"]


def test_what_is_no_source_of_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold images \(.*\.avif.*It holds none"):
        list_images(tmp_path)
    touch(tmp_path / "x.jpg")
    for path in (tmp_path / "x.jpg", tmp_path / "absent"):
        with pytest.raises(DataError, match=f"a folder, or a table .* Got '{path}'"):
            list_images(path)


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must hold images"):
        load("folder", tmp_path)
    with pytest.raises(DataError, match="There is no folder"):
        load("folder", tmp_path / "absent")
    touch(tmp_path / "a" / "x.txt")
    with pytest.raises(DataError, match="must hold images"):
        load("folder", tmp_path)
    touch(tmp_path / "a" / "x.jpg")
    with pytest.raises(DataError, match="at least two classes"):
        load("folder", tmp_path)


def test_what_bier_has_written_is_no_class(
    tmp_path: Path, pictures: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """With `--root .` and the default `--out`, pictures of reports were read, test pictures among them."""
    shutil.copytree(pictures, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl", "curve.png"):
        (tmp_path / "runs" / "mine" / name).touch()
    with own_folder(tmp_path / "audit", "audit") as folder:
        shutil.copyfile(pictures / "class 0" / "0.png", folder / "worst.png")
    (tmp_path / "shop.index").mkdir()
    (tmp_path / "shop.index" / "manifest.json").write_text('{"format": "bier-index"}')
    touch(tmp_path / "shop.index" / "x.png")
    code, out, err = cli("data", "check", "--data", "folder", "--root", tmp_path, "--json")
    assert code == 0, err
    counts = json.loads(out)
    assert sum(counts[part]["images"] for part in ("train", "test")) == 64
    for told in ("audit (audit)", "runs/mine (run)", "shop.index (index)"):
        assert told in err
    assert len(list_images(tmp_path / "audit")) == 1  # unless it is asked for


def test_a_url_divides_as_the_folder_does(pictures: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    remote = fsspec.filesystem("memory")
    for path in pictures.rglob("*.png"):
        remote.pipe(f"/divided/{path.relative_to(pictures).as_posix()}", path.read_bytes())
    here = load("folder", pictures, seed=2)
    for url in (f"file://{pictures}", "memory://divided"):
        there = load("folder", url, seed=2)
        assert there.split == here.split
        assert there["test"].ids == here["test"].ids
        code, _, err = cli("data", "check", "--data", "folder", "--root", url)
        assert code == 0, err
    with pytest.raises(DataError, match="only folder and table take a URL"):
        load("cub", "memory://shop")


def test_training_and_evaluation_from_a_url(
    pictures: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    remote = fsspec.filesystem("memory")
    for path in pictures.rglob("*.png"):
        remote.pipe(f"/trained/{path.relative_to(pictures).as_posix()}", path.read_bytes())
    quick = [word for one in ("model.backbone=conv4", "train.steps=1", "data.workers=0") for word in ("--set", one)]
    for number, url in enumerate((f"file://{pictures}", "memory://trained")):
        run = tmp_path / f"run{number}"
        code, _, err = cli("train", "--data", "folder", "--root", url, "--out", run, *quick)
        assert code == 0, err
        code, out, err = cli("evaluate", run, "--json", "--no-report")
        assert (code, json.loads(out)["queries"]) == (0, 32), err
