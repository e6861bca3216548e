"""Dividing classes, and images inside classes."""

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from bier.config import DataConfig
from bier.data import Part
from bier.data.records import divide
from bier.errors import ConfigError, DataError


def everything(sizes: list[int]) -> Part:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = tuple(Path(f"{label}-{i}.jpg") for i, label in enumerate(labels))
    return Part(images, labels, tuple(f"class {i}" for i in range(len(sizes))))


def names(part: Part) -> set[str]:
    return {part.classes[label] for label in part.labels}


sizes_of_classes = st.lists(st.integers(1, 6), min_size=4, max_size=20)


@given(sizes_of_classes, st.integers(0, 5), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_a_split_by_classes_shares_no_class_and_loses_no_image(
    sizes: list[int], seed: int, test_share: float, validation: float
) -> None:
    part = everything(sizes)
    settings = DataConfig(seed=seed, test_share=min(test_share, 0.5), validation=min(validation, 0.9))
    parts = divide("mine", part, settings, (1,)).parts
    assert set(parts) == {"train", "validation", "test"}
    groups = [names(some) for some in parts.values()]
    assert sum(map(len, groups)) == len(set.union(*groups)) == len(sizes)
    assert sorted(path for some in parts.values() for path in some.images) == sorted(part.images)
    for some in parts.values():
        for image, label in zip(some.images, some.labels, strict=True):
            assert f"class {image.name.split('-')[0]}" == some.classes[label]


@given(sizes_of_classes, st.integers(0, 5), st.floats(0.01, 0.99))
def test_a_split_inside_classes_leaves_every_class_in_training(sizes: list[int], seed: int, share: float) -> None:
    part = everything([*sizes, 2])
    parts = divide("mine", part, DataConfig(split="inside", seed=seed, test_share=share), (1,)).parts
    assert names(parts["train"]) == set(part.classes)
    assert sorted([*parts["train"].images, *parts["test"].images]) == sorted(part.images)
    for label, size in enumerate([*sizes, 2]):
        drawn = int((parts["test"].labels == label).sum())
        expected = 0 if size == 1 else min(max(round(size * share), 1), size - 1)
        assert drawn == expected
    assert parts["train"].classes == parts["test"].classes


def test_the_share_is_kept() -> None:
    parts = divide("mine", everything([3] * 40), DataConfig(test_share=0.25, validation=0.1), (1,)).parts
    assert [some.present for some in parts.values()] == [27, 3, 10]


def test_the_seed_fixes_the_split_for_ever() -> None:
    """Pinned, so that a run's config divides the same folder the same way on any machine in any year."""
    parts = divide("mine", everything([2] * 8), DataConfig(seed=3), (1,)).parts
    assert sorted(names(parts["test"])) == ["class 0", "class 4", "class 5", "class 6"]
    again = divide("mine", everything([2] * 8), DataConfig(seed=3), (1,)).parts
    assert again["test"].images == parts["test"].images
    others = {
        tuple(sorted(names(divide("m", everything([2] * 8), DataConfig(seed=s), (1,))["test"]))) for s in range(9)
    }
    assert len(others) > 3


def test_validation_does_not_move_the_test_classes() -> None:
    without, with_share = (
        divide("mine", everything([2] * 20), DataConfig(validation=v), (1,))["test"].images for v in (0.0, 0.3)
    )
    assert without == with_share


def test_the_description_is_plain_and_tells_splits_apart() -> None:
    few = divide("mine", everything([1] * 10), DataConfig(validation=0.2, seed=4), (1,))
    assert few.split["kind"] == "classes"
    assert few.split["seed"] == 4
    assert set(few.split["parts"]) == {"train", "validation", "test"}  # type: ignore[call-overload]
    assert json.loads(json.dumps(few.split)) == few.split
    assert tomli_w.dumps(dict(few.split))
    many = [divide("mine", everything([1] * 900), DataConfig(seed=s), (1,)) for s in (1, 1, 2)]
    assert many[0].split["parts"] == many[1].split["parts"] != many[2].split["parts"]
    assert "sha256" in many[0].split["parts"]["test"]  # type: ignore[index]


def test_names_that_are_not_utf8_can_be_written_down() -> None:
    part = Part((Path("a"), Path("b")), np.array([0, 1]), ("ok", "caf\udce9"))
    split = divide("mine", part, DataConfig(), (1,)).split
    assert "caf\\xe9" in tomli_w.dumps(dict(split)).replace("\\\\", "\\")


def test_what_cannot_be_divided_says_why() -> None:
    with pytest.raises(DataError, match="at least two classes"):
        divide("mine", everything([5]), DataConfig(), (1,))
    with pytest.raises(DataError, match="class with two images"):
        divide("mine", everything([1, 1, 1]), DataConfig(split="inside"), (1,))


@pytest.mark.parametrize(
    "wrong", [{"test_share": 0.0}, {"test_share": 1.0}, {"validation": 1.0}, {"validation": -0.1}, {"split": "random"}]
)
def test_impossible_shares_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="Got"):
        DataConfig(**wrong)  # type: ignore[arg-type]
