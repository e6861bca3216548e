"""Faults are found from vectors, labels and files; the vectors here are drawn, so that the right answer is known."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bier.data.records import Part
from bier.errors import DataError
from bier.evaluate import audit as audit_module
from bier.evaluate.audit import (
    ACROSS,
    AUDIT,
    FAR,
    INSIDE,
    LEAK,
    TINY,
    UNREADABLE,
    WRONG,
    Audit,
    audit,
    inspect_images,
)
from bier.folders import RECORD, own_folder

CLASSES, EACH = 6, 12


def noise(seed: int, side: int = 64) -> Image.Image:
    rough = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((side, side), Image.Resampling.BICUBIC)


def vectors_of(labels: np.ndarray) -> np.ndarray:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(CLASSES, 32))[labels] + 0.6 * random.normal(size=(len(labels), 32))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def part(tmp_path: Path) -> Part:
    """Classes of twelve images, no two of them alike."""
    labels = np.repeat(np.arange(CLASSES), EACH)
    paths = tuple(tmp_path / f"{number}.png" for number in range(len(labels)))
    for number, path in enumerate(paths):
        noise(number).save(path)
    return Part(paths, labels, tuple(f"kind {number}" for number in range(CLASSES)))


def split_of(part: Part) -> list[str]:
    return ["train" if label < CLASSES // 2 else "test" for label in part.labels]


def audited(part: Part, vectors: np.ndarray) -> Audit:
    inspection = inspect_images(part)
    return Audit(part, split_of(part), audit(vectors[inspection.readable], part, split_of(part), inspection))


def test_nothing_is_found_where_nothing_is_wrong(part: Part) -> None:
    assert audited(part, vectors_of(part.labels)).findings == []


def test_copies_are_named_by_where_they_lie(part: Part) -> None:
    vectors = vectors_of(part.labels)
    for source, target in ((0, 5), (1, EACH + 1), (2, 3 * EACH + 2)):  # the same class, another one, another part
        Path(part.images[target]).write_bytes(Path(part.images[source]).read_bytes())
        vectors[target] = vectors[source]
    noise(7).resize((50, 50)).save(part.images[8])
    noise(9).crop((4, 0, 64, 61)).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(part.images[4 * EACH])
    vectors[8], vectors[4 * EACH] = vectors[7], vectors[9]
    found = audited(part, vectors)
    pairs = {(one.name, one.row, one.other, one.detail) for one in found.findings}
    assert pairs == {
        (INSIDE, 0, 5, "same content"),
        (ACROSS, 1, EACH + 1, "same content"),
        (LEAK, 2, 3 * EACH + 2, "same content"),
        (INSIDE, 7, 8, "near"),
        (LEAK, 9, 4 * EACH, "mirrored"),
    }
    assert [one.score for one in found.of(LEAK)] == sorted((one.score for one in found.of(LEAK)), reverse=True)


def test_many_copies_of_one_file_are_as_many_findings(part: Part) -> None:
    """One for each superfluous file, not one for each pair."""
    for number in range(1, 10):
        Path(part.images[number]).write_bytes(Path(part.images[0]).read_bytes())
    vectors = vectors_of(part.labels)
    vectors[1:10] = vectors[0]
    found = audited(part, vectors).of(INSIDE)
    assert [(one.row, one.other) for one in found] == [(0, number) for number in range(1, 10)]


def test_wrong_labels_and_outliers(part: Part) -> None:
    vectors = vectors_of(part.labels)
    labels = part.labels.copy()
    labels[[3, 20, 40]] = [1, 5, 0]
    random = np.random.default_rng(1).normal(size=32)
    vectors[60] = random / np.linalg.norm(random)
    wrong = Part(part.images, labels, part.classes)
    found = audited(wrong, vectors)
    assert {one.row for one in found.of(WRONG)[:3]} == {3, 20, 40}
    assert 60 in {one.row for one in found.findings}
    for one in found.of(WRONG)[:3]:
        assert labels[one.other] == part.labels[one.row]
        shown = [labels[row] for row in one.shown]
        assert shown == [labels[one.row]] * 4 + [part.labels[one.row]] * 3


def test_a_copy_does_not_confirm_a_wrong_label(part: Part) -> None:
    vectors, labels = vectors_of(part.labels), part.labels.copy()
    for number in (1, 2, 3):
        Path(part.images[number]).write_bytes(Path(part.images[0]).read_bytes())
        vectors[number] = vectors[0]
    labels[:4] = 4
    found = audited(Part(part.images, labels, part.classes), vectors)
    assert [one.row for one in found.of(WRONG)] == [0]


def test_files_that_are_no_pictures_or_tiny(part: Part) -> None:
    Path(part.images[4]).write_bytes(b"no picture")
    Path(part.images[5]).unlink()
    noise(6, side=20).save(part.images[6])
    found = audited(part, vectors_of(part.labels))
    assert [(one.name, one.row) for one in found.findings] == [(TINY, 6), (UNREADABLE, 4), (UNREADABLE, 5)]
    assert found.of(TINY)[0].detail == "20 pixels"
    assert all(str(part.images[one.row]) in one.detail for one in found.of(UNREADABLE))


def test_blocks_do_not_change_the_outcome(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, labels = vectors_of(part.labels), part.labels.copy()
    labels[[3, 20]] = [1, 5]
    wrong = Part(part.images, labels, part.classes)
    expected = audited(wrong, vectors).findings
    monkeypatch.setattr(audit_module, "_ROWS", 7)
    found = audited(wrong, vectors).findings
    # A product in blocks of another size rounds differently.
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-5)
    assert [replace(one, score=0.0) for one in found] == [replace(one, score=0.0) for one in expected]
    assert len(expected) >= 2


def test_boxes_of_one_file_are_different_images(tmp_path: Path) -> None:
    noise(0, side=200).save(tmp_path / "shelf.png")
    boxes = np.array([[0, 0, 90, 90], [100, 100, 190, 190], [0, 0, 90, 90]], np.float32)
    part = Part((tmp_path / "shelf.png",) * 3, np.zeros(3, np.int64), ("shelf",), boxes)
    inspection = inspect_images(part)
    vectors = np.eye(3, 8, dtype=np.float32)
    found = audit(vectors, part, ["train"] * 3, inspection)
    assert [(one.name, one.row, one.other) for one in found] == [(INSIDE, 0, 2)]


def test_what_is_written(part: Part, tmp_path: Path) -> None:
    Path(part.images[1]).write_bytes(Path(part.images[0]).read_bytes())
    Path(part.images[4]).write_bytes(b"no picture")
    found = audited(part, vectors_of(part.labels))
    out = tmp_path / "out"
    with own_folder(out, AUDIT) as earlier:
        (earlier / f"{FAR}.png").touch()
    assert [path.name for path in found.write(out, tmp_path)] == ["findings.csv", f"{INSIDE}.png"]
    assert sorted(path.name for path in out.iterdir()) == [RECORD, f"{INSIDE}.png", "findings.csv"]
    with (out / "findings.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["finding"], first["path"], first["other_path"]) == (INSIDE, "0.png", "1.png")
    assert (first["class"], first["part"], first["score"]) == ("kind 0", "train", "1.0")
    assert (second["finding"], second["path"], second["other_path"]) == (UNREADABLE, "4.png", "")
    with Image.open(out / f"{INSIDE}.png") as sheet:
        assert sheet.width > 300


def test_vectors_must_fit(part: Part) -> None:
    with pytest.raises(DataError, match=r"72 readable images\. Got 3"):
        audit(np.eye(3, dtype=np.float32), part, split_of(part), inspect_images(part))
    features = Part(np.zeros((4, 8), np.float32), np.zeros(4, np.int64), ("one",))
    with pytest.raises(DataError, match="needs images"):
        inspect_images(features)
