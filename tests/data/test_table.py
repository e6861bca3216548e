"""Tables of images, as CSV and as Parquet."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bier.data import list_images, load
from bier.errors import DataError


def table(folder: Path, text: str) -> Path:
    path = folder / "images.csv"
    path.write_text(text)
    return path


def test_path_and_label_alone_are_divided_by_classes(tmp_path: Path) -> None:
    path = table(tmp_path, "path,label\n" + "".join(f"img/{i}.jpg,{'abcd'[i % 4]}\n" for i in range(12)))
    for root in (path, tmp_path):
        dataset = load("table", root, seed=1)
        assert {name: len(part) for name, part in dataset.parts.items()} == {"train": 6, "test": 6}
        assert sorted(dataset["train"].classes + dataset["test"].classes) == ["a", "b", "c", "d"]
        for part in dataset.parts.values():
            for image, label in zip(part.images, part.labels, strict=True):
                assert image.parent == tmp_path / "img"
                assert part.classes[label] == "abcd"[int(image.stem) % 4]


def test_the_listing_keeps_the_text_of_paths_and_labels(tmp_path: Path) -> None:
    """ "007" is no number, and neither is a file called 0001; rows of every split are listed, with boxes."""
    text = "path,label,split,x1,y1,x2,y2\n0001,007,train,,,,\n./b//2.jpg,7,test,0,1,2,3\n/abs/3.jpg,,train,,,,\n"
    part = list_images(table(tmp_path, text))
    assert part.ids == ("0001", "./b//2.jpg", "/abs/3.jpg")
    assert part.images == (tmp_path / "0001", tmp_path / "b" / "2.jpg", Path("/abs/3.jpg"))
    assert part.label_names() == ["007", "7", None]
    assert part.root == tmp_path
    assert part.boxes is not None
    assert part.boxes[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="line 4: the column 'label' must not be empty"):
        load("table", tmp_path)


def test_a_table_of_paths_alone_has_no_labels(tmp_path: Path) -> None:
    assert list_images(table(tmp_path, "path\n1.jpg\n2.jpg\n")).label_names() is None
    pq.write_table(pa.table({"path": ["01", "2"], "label": ["007", None]}), tmp_path / "t.parquet")
    listed = list_images(tmp_path / "t.parquet")
    assert (listed.ids, listed.label_names()) == (("01", "2"), ["007", None])


def test_absolute_paths_stay_absolute_and_quotes_work(tmp_path: Path) -> None:
    path = table(tmp_path, '\ufeffpath,label\n/data/x.jpg,"a, first"\n"sub dir/y, z.jpg",b\n')
    dataset = load("table", path)
    images = {image for part in dataset.parts.values() for image in part.images}
    assert images == {Path("/data/x.jpg"), tmp_path / "sub dir" / "y, z.jpg"}


def test_the_split_column_is_followed(tmp_path: Path) -> None:
    path = table(tmp_path, "label,split,path\na,train,1.jpg\nb,test,2.jpg\nc,validation,3.jpg\na,train,4.jpg\n")
    dataset = load("table", path)
    assert {name: [i.name for i in part.images] for name, part in dataset.parts.items()} == {
        "train": ["1.jpg", "4.jpg"],
        "validation": ["3.jpg"],
        "test": ["2.jpg"],
    }
    assert dataset.protocol == "self"
    assert dataset.split["kind"] == "given"


@pytest.mark.parametrize("split", [True, False])
def test_query_and_gallery_columns(tmp_path: Path, split: bool) -> None:
    rows = [("1", "a", "train", "", ""), ("2", "b", "test", "True", "False"), ("3", "b", "test", "no", "yes")]
    rows += [("4", "c", "test", "0", "1"), ("5", "a", "train", "", "")]
    keep = [0, 1, 2, 3, 4] if split else [0, 1, 3, 4]
    heading = ("path", "label", "split", "is_query", "is_gallery")
    path = table(tmp_path, "\n".join(",".join(row[i] for i in keep) for row in (heading, *rows)))
    dataset = load("table", path)
    assert dataset.protocol == "query-gallery"
    assert [i.name for i in dataset["query"].images] == ["2"]
    assert [i.name for i in dataset["gallery"].images] == ["3", "4"]
    assert [i.name for i in dataset["train"].images] == ["1", "5"]
    assert dataset["query"].classes == dataset["gallery"].classes == ("b", "c")


def test_all_rows_query_and_gallery_at_once_search_among_themselves(tmp_path: Path) -> None:
    text = "path,label,split,is_query,is_gallery\n1,a,train,,\n2,b,test,1,1\n3,b,test,1,1\n"
    dataset = load("table", table(tmp_path, text))
    assert dataset.protocol == "self"
    assert len(dataset["test"]) == 2


def test_boxes(tmp_path: Path) -> None:
    text = "path,label,x1,y1,x2,y2\n1,a,1,2,3.5,4\n2,b,,,,\n"
    dataset = load("table", table(tmp_path, text))
    boxes = {part.classes[0]: part.boxes for part in dataset.parts.values()}
    assert boxes["a"] is not None
    assert boxes["a"].tolist() == [[1, 2, 3.5, 4]]
    assert boxes["b"] is not None
    assert np.isnan(boxes["b"]).all()


def test_parquet_gives_the_same_as_csv(tmp_path: Path) -> None:
    columns = {
        "path": ["1.jpg", "2.jpg", "3.jpg"],
        "label": [7, 8, 8],
        "split": ["train", "test", "test"],
        "is_query": [None, True, False],
        "is_gallery": [None, False, True],
        "x1": [0.0, 1.0, None],
        "y1": [0.0, 1.0, None],
        "x2": [5.0, 5.0, None],
        "y2": [5.0, 5.0, None],
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    dataset = load("table", tmp_path / "t.parquet")
    assert dataset["query"].images == (tmp_path / "2.jpg",)
    assert dataset["gallery"].classes == ("8",)
    assert dataset["query"].boxes is not None
    assert dataset["query"].boxes.tolist() == [[1, 1, 5, 5]]
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="must be a Parquet file"):
        load("table", tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "It is empty"),
        ("path,label\n", "It has none"),
        ("path,label\n" + "x" * 200_000 + ",a\n", "must be a CSV file"),
        ("file,label\n1,a\n", r"column 'path'\. It has file, label"),
        ("path,class\n1,a\n", "column 'label'"),
        ("path,label\n1,a\n2\n", "line 3: expected 2 columns"),
        ("path,label\n1,a\n2,\n", "line 3: the column 'label' must not be empty"),
        ("path,label,split\n1,a,train\n2,b,dev\n", "line 3: the column 'split'.*Got 'dev'"),
        ("path,label,split\n1,a,train\n2,b,train\n", "none for test"),
        ("path,label,is_query\n1,a,perhaps\n", "line 2: the column 'is_query'.*Got 'perhaps'"),
        ("path,label,split,is_query,is_gallery\n1,a,train,,\n2,b,test,1,0\n3,b,test,1,1\n", "line 4: .* both"),
        ("path,label,split,is_query,is_gallery\n1,a,train,,\n2,b,test,1,0\n3,b,test,,\n", "line 4: .* neither"),
        ("path,label,split,is_query\n1,a,train,\n2,b,test,1\n3,b,test,1\n", "none for gallery"),
        ("path,label,x1,y1\n1,a,0,0\n", "It lacks x2, y2"),
        ("path,label,x1,y1,x2,y2\n1,a,0,0,five,5\n", "line 2: the column 'x2' must be a number. Got 'five'"),
        ("path,label,x1,y1,x2,y2\n1,a,0,0,5,5\n2,a,9,0,5,5\n", "line 3: the box"),
        ("path,label,x1,y1,x2,y2\n1,a,0,0,5,\n", "line 2: the box"),
    ],
)
def test_what_is_wrong_is_named_by_column_and_row(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("table", table(tmp_path, text))


def test_a_root_without_one_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 0 such files"):
        load("table", tmp_path)
    for name in ("a.csv", "b.parquet"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="holds 2 such files"):
        load("table", tmp_path)


def test_rows_are_named_by_their_line_also_below_blank_lines_and_cells_of_several(tmp_path: Path) -> None:
    text = 'path,label\n1,a\n\n\n"2","b\nc"\n3,\n'
    with pytest.raises(DataError, match=r"images\.csv, line 7: the column 'label' must not be empty"):
        load("table", table(tmp_path, text))


def test_other_columns_become_metadata(tmp_path: Path) -> None:
    text = "path,label,year,shop,article,,sold\n1,a,2024,north,007,x,true\n2,b,,,,,1e400\n"
    part = list_images(table(tmp_path, text))
    assert part.metadata == (
        {"year": 2024, "shop": "north", "article": "007", "sold": True},
        {"sold": "1e400"},
    )
    assert part.select([1]).metadata == ({"sold": "1e400"},)
    columns = {"path": ["1"], "year": [2024], "bytes": [b"x"], "list": [[1]], "code": ["007"], "share": [float("nan")]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert list_images(tmp_path / "t.parquet").metadata == ({"year": 2024, "code": "007"},)
    with pytest.raises(DataError, match="must not have a column '_stamp'"):
        list_images(table(tmp_path, "path,_stamp\n1,2\n"))


def test_two_boxes_in_one_picture_have_ids_of_their_own(tmp_path: Path) -> None:
    text = "path,label,x1,y1,x2,y2\na,x,0,0,5,5\na,y,5,0,10.5,5\nb,x,0,0,5,5\na,x,,,,\n"
    part = list_images(table(tmp_path, text))
    assert part.ids == ("a#0,0,5,5", "a#5,0,10.5,5", "b", "a")
    assert part.images == (tmp_path / "a", tmp_path / "a", tmp_path / "b", tmp_path / "a")
    assert part.metadata is not None
    assert part.metadata[1] == {"_box": [5, 0, 10.5, 5], "_path": "a"}
    assert part.metadata[2:] == ({"_box": [0, 0, 5, 5]}, {})
