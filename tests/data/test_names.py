"""Data sets by name."""

from pathlib import Path

import pytest

from bier.data import NAMES, expected, load
from bier.errors import ConfigError, DataError


def test_the_names_are_those_of_the_manual() -> None:
    own = ["glyphs", "folder", "table", "features"]
    official = ["cub", "cub-cropped", "cars", "cars-cropped", "sop", "inshop", "vehicleid", "cifar10"]
    assert list(NAMES) == own + official


@pytest.mark.parametrize(("wrong", "right"), [("cubs", "cub"), ("glyph", "glyphs"), ("in-shop", "inshop")])
def test_an_unknown_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(DataError, match=rf"Got '{wrong}' instead\. Did you mean '{right}'\?"):
        load(wrong)
    with pytest.raises(DataError, match=r"Got 'zzz' instead\.$"):
        load("zzz")


@pytest.mark.parametrize("root", [None, ""])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "glyphs"])
def test_a_missing_root_is_said(name: str, root: str | None) -> None:
    with pytest.raises(DataError, match=f"'{name}' needs a root"):
        load(name, root)


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").mkdir()
    with pytest.raises(DataError, match=r"Cannot read .*data_batch_1\.bin"):
        load("cifar10", tmp_path)


def test_impossible_shares_are_refused_for_every_data_set() -> None:
    with pytest.raises(ConfigError, match=r"'data\.validation'"):
        load("glyphs", validation=1.5)


def test_the_papers_counts() -> None:
    def total(name: str) -> int:
        return sum(part["images"] for part in expected(name).values())

    assert total("cub") == total("cub-cropped") == 11788
    assert total("cars") == total("cars-cropped") == 16185
    assert total("sop") == 120053
    assert total("inshop") == 52712
    assert total("cifar10") == 60000
    assert expected("vehicleid", "large")["test"] == {"classes": 2400}
    assert expected("folder") == {}
