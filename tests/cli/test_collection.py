"""The ordinary days of a collection: pictures are added, replaced, deleted and moved, and other folders are named."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bier import EmbeddingEnsemble, Index, Model, load
from bier.collection import Collection, image_collection
from bier.models.backbones import build_backbone
from bier.search.files import locked

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    backbone = build_backbone("conv4")
    folder = tmp_path_factory.mktemp("run")
    Model(backbone, EmbeddingEnsemble(backbone.features, (8, 16)), precision="float32").save(folder / "model")
    return folder


@pytest.fixture
def photos(tmp_path: Path, pictures: Path) -> Path:
    """Two classes of four pictures."""
    for name in ("class 0", "class 1"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            shutil.copyfile(pictures / name / f"{number}.png", tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def index(cli: Cli, model: Path, photos: Path, tmp_path: Path) -> Path:
    code, _, err = cli("index", model, photos, "--out", tmp_path / "shop.index")
    assert code == 0, err
    return tmp_path / "shop.index"


def answer(printed: tuple[int, str, str]) -> Any:
    code, out, err = printed
    assert code == 0, err
    return json.loads(out)


def counts(found: Any) -> tuple[int, ...]:
    return tuple(found[name] for name in ("images", "new", "changed", "gone", "unchanged"))


def assert_fresh(index: Path, model: Path, photos: Path) -> None:
    """Every vector is that of its file as it is now."""
    made = Index.load(index)
    files = [photos / str(one) for one in made.ids]
    np.testing.assert_allclose(made.vectors(made.ids), load(model).encode(files), atol=1e-5)


def test_a_file_is_searched_for_and_not_the_id_of_its_name(
    cli: Cli, index: Path, photos: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other" / "class 0").mkdir(parents=True)
    shutil.copyfile(photos / "class 1" / "3.png", tmp_path / "other" / "class 0" / "2.png")
    monkeypatch.chdir(tmp_path / "other")
    best = answer(cli("search", "../shop.index", "class 0/2.png", "-k", 1, "--json"))["results"][0]
    assert (best["id"], round(best["similarity"], 4)) == ("class 1/3.png", 1)
    found = answer(cli("search", "../shop.index", "class 0/2.png", "--id", "--json"))
    assert found["label"] == "class 0"
    assert "class 0/2.png" not in [one["id"] for one in found["results"]]
    code, _, err = cli("search", "../shop.index", "class 0/3.png")
    assert (code, "The collection has an image of this id; add --id" in err) == (2, True)
    monkeypatch.chdir(photos)
    for query in ("class 0/2.png", photos / "class 0" / "2.png", "../photos/class 0/2.png"):  # the file itself
        assert len(answer(cli("search", "../shop.index", query, "--json"))["results"]) == 7
    shutil.copyfile(pictures / "class 5" / "0.png", photos / "class 0" / "2.png")  # its vector is of the old picture
    results = answer(cli("search", "../shop.index", "class 0/2.png", "--json"))["results"]
    assert len(results) == 7
    assert results[0]["similarity"] < 0.9999


@pytest.mark.parametrize("again", ["folder", "class folder"])
def test_changed_and_deleted_pictures(
    cli: Cli, index: Path, model: Path, photos: Path, pictures: Path, again: str
) -> None:
    shutil.copyfile(pictures / "class 5" / "5.png", photos / "class 0" / "2.png")
    (photos / "class 0" / "3.png").unlink()
    shutil.copyfile(pictures / "class 0" / "7.png", photos / "class 0" / "7.png")
    os.utime(photos / "class 0" / "0.png")  # another time, the same content
    named, same = (photos, 6) if again == "folder" else (photos / "class 0", 2)
    found = answer(cli("index", model, named, "--add", index, "--json"))
    assert counts(found) == (9, 1, 1, 1, same)
    code, _, err = cli("index", model, named, "--add", index)
    assert code == 0
    assert "1 images are gone; --prune removes them" in err
    assert f"0 new, 0 changed, 1 gone, {same + 2} unchanged" in err
    assert counts(answer(cli("index", model, named, "--add", index, "--prune", "--json"))) == (8, 0, 0, 1, same + 2)
    assert_fresh(index, model, photos)
    made = Index.load(index)
    assert {str(entry.label) for entry in made.entries(made.ids)} == {"class 0", "class 1"}


def test_a_change_that_keeps_size_and_time(cli: Cli, index: Path, model: Path, photos: Path) -> None:
    file, other = photos / "class 0" / "9.bmp", photos / "class 0" / ".new"
    Image.new("RGB", (40, 40), "red").save(file)
    assert counts(answer(cli("index", model, photos, "--add", index, "--json"))) == (9, 1, 0, 0, 8)
    before = file.stat()
    for colour, changed in (("red", 0), ("blue", 1)):  # the second may even have the inode that the first one had
        Image.new("RGB", (40, 40), colour).save(other, "BMP")
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(file)  # as `rsync -t` does
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        found = answer(cli("index", model, photos, "--add", index, "--json"))
        assert counts(found) == (9, 0, changed, 0, 9 - changed)
    assert_fresh(index, model, photos)


def test_the_same_files_by_another_folder(
    cli: Cli, index: Path, model: Path, photos: Path, pictures: Path, tmp_path: Path
) -> None:
    ids = Index.load(index).ids
    (tmp_path / "link").symlink_to(photos)
    for named in (photos / "class 0", tmp_path / "link", tmp_path / "link" / "class 1"):
        found = answer(cli("index", model, named, "--add", index, "--json"))
        assert (found["images"], found["new"], found["changed"], found["gone"]) == (8, 0, 0, 0), named
    assert Index.load(index).ids == ids
    above = tmp_path / "all"
    above.mkdir()
    photos.rename(above / "photos")
    code, _, err = cli("index", model, above / "photos", "--add", index)
    assert code == 0
    assert "the folder of the collection has moved, it was" in err
    assert "0 new, 0 changed, 0 gone, 8 unchanged" in err
    (above / "more").mkdir()
    shutil.copyfile(pictures / "class 3" / "3.png", above / "more" / "3.png")
    code, out, err = cli("index", model, above, "--add", index, "--json")
    found = json.loads(out)
    assert (counts(found), found["outside"]) == ((9, 1, 0, 0, 8), 1)
    made = Index.load(index)
    assert made.known([str(above / "more" / "3.png")])
    assert [entry.label for entry in made.entries(["class 0/1.png", str(above / "more" / "3.png")])] == [
        "class 0",
        "more",
    ]
    assert_fresh(index, model, above / "photos")


def test_a_report_and_the_index_itself_are_no_pictures(
    cli: Cli, model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "runs" / "mine" / "report").mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl"):
        (photos / "runs" / "mine" / name).touch()
    shutil.copyfile(photos / "class 0" / "0.png", photos / "runs" / "mine" / "report" / "worst.png")
    monkeypatch.chdir(photos)
    code, out, err = cli("index", model, ".", "--out", tmp_path / "i", "--json")
    assert (code, json.loads(out)["images"]) == (0, 8)
    assert "as bier has written it: runs/mine (run)" in err


def test_an_index_that_cannot_be_written_is_refused_before_anything_is_encoded(
    cli: Cli, model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any, **__: Any) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(Model, "embed_raw", encode)
    code, _, err = cli("index", model, photos, "--out", photos)
    assert (code, "must be new, empty or an index" in err) == (2, True)
    with locked(tmp_path / "busy"):
        answers: list[tuple[int, str, str]] = []
        thread = threading.Thread(
            target=lambda: answers.append(cli("index", model, photos, "--out", tmp_path / "busy"))
        )
        thread.start()
        thread.join()
    assert answers[0][0] == 2
    assert "Another process is saving the index" in answers[0][2]


TABLE = """path,label,year,x1,y1,x2,y2
class 0/0.png,left,2023,0,0,24,48

class 0/0.png,right,2024,24,0,48,48
class 1/1.png,whole,2024,,,,
class 1/2.png,whole,,,,,
"""


def test_boxes_and_columns_of_a_table(cli: Cli, model: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "shop.csv").write_text(TABLE)
    index, vectors = tmp_path / "t.index", tmp_path / "t.safetensors"
    code, _, err = cli("index", model, photos / "shop.csv", "--out", index)
    assert code == 0, err
    assert cli("embed", model, photos / "shop.csv", "--out", vectors)[0] == 0
    assert cli("index", vectors, "--out", tmp_path / "v.index")[0] == 0
    assert json.loads(vectors.with_suffix(".json").read_text())["paths"][:2] == ["class 0/0.png"] * 2
    boxes = ["class 0/0.png#0,0,24,48", "class 0/0.png#24,0,48,48"]
    for made in (index, tmp_path / "v.index"):
        assert Index.load(made).ids == [*boxes, "class 1/1.png", "class 1/2.png"]
        found = answer(cli("search", made, photos / "class 1" / "3.png", "--where", "year=2024", "--json"))
        assert {one["id"] for one in found["results"]} == {boxes[1], "class 1/1.png"}
        assert found["results"][0]["metadata"] == {"year": 2024}
        assert {one["path"] for one in found["results"]} == {
            str(photos / n) for n in ("class 0/0.png", "class 1/1.png")
        }
    assert Collection.open(index).picture(boxes[1]) == (photos / "class 0" / "0.png", (24, 0, 48, 48))
    code, _, err = cli("search", index, boxes[0], "--id", "--picture", tmp_path / "row.png")
    assert code == 0, err
    (photos / "shop.csv").write_text(TABLE.replace("24,0,48,48", "25,0,48,48").replace("whole,2024", "whole,2022"))
    assert counts(answer(cli("index", model, photos / "shop.csv", "--add", index, "--prune", "--json"))) == (
        4,
        1,
        1,
        1,
        2,
    )


def test_a_filter_that_no_image_can_pass_is_one_line(cli: Cli, model: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "shop.csv").write_text(TABLE)
    assert cli("index", model, photos / "shop.csv", "--out", tmp_path / "i")[0] == 0
    query = photos / "class 1" / "3.png"
    for where, message in (
        ("yaer=2024", "No image has 'yaer'; the keys are label, year. Did you mean 'year'?"),
        ("label=lfet", "No image of the collection has the label 'lfet'. Did you mean 'left'?"),
    ):
        code, _, err = cli("search", tmp_path / "i", query, "--where", where)
        assert (code, message in err, err.count("\n")) == (2, True, 1), err


def test_a_collection_of_a_file_url_shows_its_pictures(cli: Cli, model: Path, photos: Path, tmp_path: Path) -> None:
    code, _, err = cli("embed", model, f"file://{photos}", "--out", tmp_path / "v.safetensors")
    assert code == 0, err
    assert cli("index", tmp_path / "v.safetensors", "--out", tmp_path / "i")[0] == 0
    query = photos / "class 1" / "3.png"
    code, _, err = cli("search", tmp_path / "i", query, "--picture", tmp_path / "row.png")
    assert code == 0, err
    assert Collection.open(tmp_path / "i").picture("class 1/3.png") == (query, None)
    assert cli("index", model, f"file://{photos}", "--add", tmp_path / "i", "--json")[0] == 0


@pytest.mark.parametrize("model_record", ["x", {"path": 7}, {"backbone": ["a"]}, 3])
def test_a_record_of_another_shape_is_one_line(
    cli: Cli, index: Path, photos: Path, tmp_path: Path, model_record: Any
) -> None:
    made = Index.load(index)
    made.about.update(model=model_record, root=7)
    made.save(index)
    code, out, err = cli("search", index, photos / "class 1" / "3.png")
    assert (code, out, err.count("\n")) == (2, "", 1), err


def test_serve_encodes_what_is_new_at_its_next_start(
    model: Path, photos: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(model, run)
    encoded, whole = [], Model.embed_raw

    def embed_raw(self: Model, images: Any, *arguments: Any, **options: Any) -> Any:
        encoded.append(len(images))
        return whole(self, images, *arguments, **options)

    monkeypatch.setattr(Model, "embed_raw", embed_raw)
    assert len(image_collection(run, photos).store) == 8
    shutil.copyfile(pictures / "class 2" / "0.png", photos / "class 0" / "new.png")
    shutil.copyfile(pictures / "class 2" / "1.png", photos / "class 0" / "0.png")
    (photos / "class 1" / "3.png").write_bytes(b"broken")
    (photos / "class 1" / "2.png").unlink()
    shown = image_collection(run, photos)
    assert encoded == [8, 2]
    assert sorted(map(str, shown.store.ids)) == sorted(
        [f"class 0/{name}.png" for name in (0, 1, 2, 3, "new")] + [f"class 1/{number}.png" for number in (0, 1)]
    )
    assert [note.count("3.png") for note in shown.notes] == [1]
    assert shown.picture("class 0/new.png") == (photos / "class 0" / "new.png", None)
    image_collection(run, photos)
    assert encoded == [8, 2]


def test_broken_pictures_are_left_out_of_what_is_added(
    cli: Cli, index: Path, model: Path, photos: Path, pictures: Path
) -> None:
    (photos / "class 0" / "broken.png").write_bytes(b"no picture")
    shutil.copyfile(pictures / "class 0" / "7.png", photos / "class 0" / "7.png")
    code, _, err = cli("index", model, photos, "--add", index)
    assert (code, "broken.png" in err) == (2, True)
    code, out, err = cli("index", model, photos, "--add", index, "--skip-broken", "--json")
    found = answer((code, out, err))
    assert counts(found) == (9, 1, 0, 0, 8)
    assert [Path(one["path"]).name for one in found["skipped"]] == ["broken.png"]
