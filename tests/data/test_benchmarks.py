"""The official benchmarks, as small trees in their official layouts, and CUB itself where it is present."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from bier.data import Dataset, expected, load
from bier.errors import ConfigError, DataError


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def shown(dataset: Dataset, part: str, root: Path) -> list[tuple[str, str]]:
    """(path below the root, class) of every image of a part."""
    some = dataset[part]
    return [
        (Path(image).relative_to(root).as_posix(), some.classes[label])
        for image, label in zip(some.images, some.labels, strict=True)
    ]


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    """Classes 1, 2, 100 and 101, 200, ids not in order of class."""
    home = tmp_path / "CUB_200_2011"
    classes = {1: "001.Albatross", 2: "002.Auk", 100: "100.Pelican", 101: "101.White_Pelican", 200: "200.Wren"}
    images = [(7, 1), (8, 2), (9, 200), (10, 101), (11, 100), (12, 101)]
    write(home / "images.txt", *(f"{i} {classes[c]}/bird {i}.jpg" for i, c in images))
    write(home / "image_class_labels.txt", *(f"{i} {c}" for i, c in images))
    write(home / "classes.txt", *(f"{c} {name}" for c, name in classes.items()))
    write(home / "bounding_boxes.txt", *(f"{i} {i}.0 2.0 10.0 20.5" for i, _ in images))
    (home / "images").mkdir()
    return home


def test_cub_divides_at_class_100(cub: Path) -> None:
    for root in (cub, cub.parent):
        dataset = load("cub", root)
        assert shown(dataset, "train", cub / "images") == [
            ("001.Albatross/bird 7.jpg", "001.Albatross"),
            ("002.Auk/bird 8.jpg", "002.Auk"),
            ("100.Pelican/bird 11.jpg", "100.Pelican"),
        ]
        assert [name for _, name in shown(dataset, "test", cub)] == [
            "200.Wren",
            "101.White_Pelican",
            "101.White_Pelican",
        ]
        assert dataset["train"].boxes is None
        assert dataset.protocol == "self"
        assert dataset.ks == (1, 2, 4, 8, 16, 32)
        assert dataset.split == {"kind": "official"}


def test_cub_cropped_turns_width_and_height_into_corners(cub: Path) -> None:
    boxes = load("cub-cropped", cub)["train"].boxes
    assert boxes is not None
    assert boxes.tolist() == [[7, 2, 17, 22.5], [8, 2, 18, 22.5], [11, 2, 21, 22.5]]


@pytest.mark.parametrize("name", ["classes.txt", "bounding_boxes.txt", "image_class_labels.txt", "images"])
def test_what_is_missing_of_cub_is_named_and_the_layout_shown(cub: Path, name: str) -> None:
    path = cub / name
    path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(DataError, match=rf"no .*{name}\. The official layout is CUB_200_2011/\{{images.txt"):
        load("cub", cub)


def test_broken_lists_of_cub_are_named(cub: Path) -> None:
    (cub / "bounding_boxes.txt").write_text("7 1 2 3\n")
    with pytest.raises(DataError, match=r"bounding_boxes.txt, line 1: expected 5 columns\. Got '7 1 2 3'"):
        load("cub", cub)
    write(cub / "bounding_boxes.txt", "7 1 2 3 four")
    with pytest.raises(DataError, match="must be four numbers"):
        load("cub", cub)
    write(cub / "bounding_boxes.txt", "7 1 2 3 4")
    with pytest.raises(DataError, match="image 8 must be in"):
        load("cub", cub)


def test_the_real_cub_has_the_papers_counts(shared_data: Path) -> None:
    for name, root in (("cub", shared_data), ("cub-cropped", shared_data / "CUB_200_2011")):
        dataset = load(name, root)
        assert dataset.counts() == expected(name)
        assert dataset.counts()["train"] == {"images": 5864, "classes": 100}
        assert dataset.counts()["test"] == {"images": 5924, "classes": 100}
        assert not set(dataset["train"].classes) & set(dataset["test"].classes)
        assert all(Path(image).is_file() for image in dataset["test"].images[::500])


def test_validation_comes_out_of_the_training_classes_only(shared_data: Path) -> None:
    whole, part = load("cub", shared_data), load("cub", shared_data, validation=0.2, seed=1)
    assert part["test"].images == whole["test"].images
    assert part["validation"].present == 20
    assert part["train"].present == 80
    assert len(part["train"]) + len(part["validation"]) == 5864
    assert part.split["validation"] == 0.2


@pytest.fixture
def devkit(tmp_path: Path) -> Path:
    """Cars-196 as the devkit has it, with images of classes 1, 98, 99 and 196."""
    kinds = [
        ("car_ims/000001.jpg", 1),
        ("car_ims/000002.jpg", 98),
        ("car_ims/000003.jpg", 99),
        ("car_ims/000004.jpg", 196),
    ]
    fields = ["relative_im_path", "bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test"]
    annotations = np.empty((1, len(kinds)), dtype=[(field, object) for field in fields])
    for i, (path, number) in enumerate(kinds):
        annotations[0, i] = (path, 11 + i, 21, 110, 120, number, i % 2)
    names = np.array([f"Car {i}" for i in range(1, 197)], dtype=object).reshape(1, -1)
    savemat(tmp_path / "cars_annos.mat", {"annotations": annotations, "class_names": names})
    (tmp_path / "car_ims").mkdir()
    return tmp_path


def test_the_devkit_of_cars_divides_at_class_98_and_has_boxes(devkit: Path) -> None:
    dataset = load("cars-cropped", devkit)
    assert shown(dataset, "train", devkit) == [("car_ims/000001.jpg", "Car 1"), ("car_ims/000002.jpg", "Car 98")]
    assert shown(dataset, "test", devkit) == [("car_ims/000003.jpg", "Car 99"), ("car_ims/000004.jpg", "Car 196")]
    boxes = dataset["train"].boxes
    assert boxes is not None
    assert boxes.tolist() == [[10, 20, 110, 120], [11, 20, 110, 120]]
    assert load("cars", devkit)["train"].boxes is None


def test_a_file_that_is_not_the_devkits_is_refused(devkit: Path) -> None:
    savemat(devkit / "cars_annos.mat", {"something": 1})
    with pytest.raises(DataError, match=r"cars_annos\.mat must be"):
        load("cars", devkit)
    (devkit / "cars_annos.mat").write_bytes(b"not matlab")
    with pytest.raises(DataError, match=r"cars_annos\.mat must be"):
        load("cars", devkit)


def test_cars_in_folders_merges_train_and_test_and_sorts_by_name(tmp_path: Path) -> None:
    for i in range(196):
        touch(tmp_path / "train" / f"Car {i:03}" / "a.jpg")
        touch(tmp_path / "test" / f"Car {i:03}" / "b.jpg")
    dataset = load("cars", tmp_path)
    assert dataset.counts() == {"train": {"images": 196, "classes": 98}, "test": {"images": 196, "classes": 98}}
    assert dataset["train"].classes[-1] == "Car 097"
    assert shown(dataset, "test", tmp_path)[:2] == [
        ("train/Car 098/a.jpg", "Car 098"),
        ("test/Car 098/b.jpg", "Car 098"),
    ]
    with pytest.raises(DataError, match="no boxes"):
        load("cars-cropped", tmp_path)


def test_stanford_online_products(tmp_path: Path) -> None:
    home = tmp_path / "Stanford_Online_Products"
    heading = "image_id class_id super_class_id path"
    write(
        home / "Ebay_train.txt",
        heading,
        "1 1 1 bicycle_final/1_0.JPG",
        "2 1 1 bicycle_final/1_1.JPG",
        "3 2 1 chair_final/2_0.JPG",
    )
    write(home / "Ebay_test.txt", heading, "4 11319 2 mug_final/9_0.JPG")
    dataset = load("sop", tmp_path)
    assert shown(dataset, "train", home) == [
        ("bicycle_final/1_0.JPG", "1"),
        ("bicycle_final/1_1.JPG", "1"),
        ("chair_final/2_0.JPG", "2"),
    ]
    assert shown(dataset, "test", home) == [("mug_final/9_0.JPG", "11319")]
    assert dataset.ks == (1, 10, 100, 1000)
    (home / "Ebay_test.txt").unlink()
    with pytest.raises(DataError, match=r"no .*Ebay_test\.txt"):
        load("sop", tmp_path)


@pytest.mark.parametrize(("listing", "images"), [("", ""), ("Eval/", "Img/"), ("Eval/", ""), ("", "Img/")])
def test_in_shop_gives_query_and_gallery_with_shared_classes(tmp_path: Path, listing: str, images: str) -> None:
    write(
        tmp_path / f"{listing}list_eval_partition.txt",
        "5",
        "image_name item_id evaluation_status",
        "img/WOMEN/Dresses/id_1/01_1_front.jpg id_1 train",
        "img/WOMEN/Dresses/id_2/01_1_front.jpg   id_2   query",
        "img/WOMEN/Dresses/id_3/01_1_front.jpg id_3 gallery",
        "img/WOMEN/Dresses/id_2/01_2_side.jpg id_2 gallery",
        "img/WOMEN/Dresses/id_3/01_2_side.jpg id_3 query",
    )
    (tmp_path / images / "img").mkdir(parents=True)
    dataset = load("inshop", tmp_path)
    assert dataset.protocol == "query-gallery"
    assert list(dataset.parts) == ["train", "query", "gallery"]
    assert dataset["query"].classes == dataset["gallery"].classes == ("id_2", "id_3")
    assert dataset["query"].labels.tolist() == [0, 1]
    assert dataset["gallery"].labels.tolist() == [1, 0]
    assert shown(dataset, "query", tmp_path)[0] == (f"{images}img/WOMEN/Dresses/id_2/01_1_front.jpg", "id_2")


def test_vehicleid_has_three_test_sizes(tmp_path: Path) -> None:
    home = tmp_path / "VehicleID_V1.0"
    (home / "image").mkdir(parents=True)
    write(home / "train_test_split" / "train_list.txt", "0000001 5", "0000002 5", "0000003 6")
    for count, size in ((800, "small"), (1600, "medium"), (2400, "large")):
        write(home / "train_test_split" / f"test_list_{count}.txt", f"{count} 7", "0000009 7")
        dataset = load("vehicleid", tmp_path, size=size)
        assert shown(dataset, "test", home) == [(f"image/{count}.jpg", "7"), ("image/0000009.jpg", "7")]
        assert dataset.protocol == "repeated-gallery"
        assert dataset.split == {"kind": "official", "size": size}
        assert dataset.counts()["train"] == {"images": 3, "classes": 2}
        assert expected("vehicleid", size)["test"] == {"classes": count}
    with pytest.raises(ConfigError, match=r"small, medium, large\. Got 'huge'"):
        load("vehicleid", tmp_path, size="huge")


@pytest.mark.parametrize("name", ["cub", "cars", "sop", "inshop", "vehicleid", "cifar10"])
def test_an_empty_or_absent_folder_shows_the_official_layout(tmp_path: Path, name: str) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match="The official layout is") as caught:
            load(name, root)
        assert str(root) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_benchmark_without_test_images_is_refused(tmp_path: Path) -> None:
    heading = "image_id class_id super_class_id path"
    write(tmp_path / "Ebay_train.txt", heading, "1 1 1 bicycle_final/1_0.JPG")
    write(tmp_path / "Ebay_test.txt", heading)
    with pytest.raises(DataError, match="part 'test'"):
        load("sop", tmp_path)
