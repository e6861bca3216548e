"""Settings: what is refused and how, and that a file holds all of them."""

from pathlib import Path
from typing import Any

import pytest

from bier.config import Config, DiversityConfig, ModelConfig, TrainConfig, parse_settings, read_config
from bier.errors import ConfigError


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config().with_settings(settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.step", "train.steps"),
        ("train.learningrate", "train.learning_rate"),
        ("steps", "train.steps"),
        ("model.backbon", "model.backbone"),
        ("sed", "seed"),
        ("diversty.weight", "diversity.weight"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key: str, nearest: str) -> None:
    assert refused({key: 1}) == f"There is no setting '{key}'. Did you mean '{nearest}'?"


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    assert refused({"xyzzy": 1}) == "There is no setting 'xyzzy'."


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.steps", 10.5, "a whole number"),
        ("train.steps", "ten", "a whole number"),
        ("train.steps", True, "a whole number"),
        ("train.learning_rate", "fast", "a number"),
        ("train.learning_rate", False, "a number"),
        ("model.pretrained", 1, "true or false"),
        ("data.root", True, "text"),
        (
            "loss.name",
            "hinge",
            "binomial-deviance, contrastive, triplet, multi-similarity, cross-entropy, or the name of a loss class",
        ),
        ("loss.settings", [2], "a table such as {alpha=2, base=0.5}"),
        ("loss.name", ["triplet"], "binomial-deviance"),
        ("train.optimizer", "lion", "adam, adamw, sgd"),
        ("model.groups", "three", "96-160-256"),
        ("model.groups", 2.0, "96-160-256"),
        ("model.groups", [256, "256"], "96-160-256"),
        ("model.groups", [], "96-160-256"),
        ("model.groups", True, "96-160-256"),
    ],
)
def test_wrong_types(key: str, value: Any, expected: str) -> None:
    message = refused({key: value})
    assert f"'{key}'" in message
    assert expected in message
    assert f"Got {value!r} instead." in message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("seed", -1, "at least 0"),
        ("train.steps", 0, "at least 1"),
        ("train.batch_classes", 1, "at least 2"),
        ("train.batch_images", 1, "at least 2"),
        ("train.learning_rate", -0.1, "at least 0"),
        ("train.learning_rate", 1e30, "at most 1000000.0"),
        ("train.learning_rate", float("nan"), "finite"),
        ("train.learning_rate", float("inf"), "finite"),
        ("loss.beta1", float("nan"), "finite"),
        ("diversity.norm_weight", float("nan"), "finite"),
        ("diversity.norm_weight", -1.0, "at least 0"),
        ("data.validation", 0.95, "at most 0.9"),
        ("data.workers", -2, "at least -1"),
        ("model.groups", 0, "96-160-256"),
        ("model.groups", [0, 512], "96-160-256"),
    ],
)
def test_ranges(key: str, value: Any, expected: str) -> None:
    message = refused({key: value})
    assert f"'{key}'" in message
    assert expected in message
    assert str(value).strip("[]") in message


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"model.groups": "96-160-255"}, ["'model.groups'", "96-160-255 = 511", "'model.embedding' = 512"]),
        ({"model.groups": 600}, ["'model.embedding' = 512", "600 groups"]),
        ({"model.groups": 1, "diversity.name": "activation"}, ["at least 2 groups", "diversity.name=none"]),
        ({"model.groups": 1, "model.start": "adversarial"}, ["at least 2 groups", "model.start=glorot"]),
        ({"model.trunk_views": 2}, ["'model.trunk_views'", "'model.trainable_from'"]),
        ({"train.warmup": 2000, "train.steps": 1000}, ["'train.warmup' = 2000", "'train.steps' = 1000"]),
    ],
)
def test_impossible_combinations(settings: dict[str, Any], shown: list[str]) -> None:
    message = refused(settings)
    for part in shown:
        assert part in message


def test_checks_also_hold_for_sections_made_by_hand() -> None:
    with pytest.raises(ConfigError, match=r"There is no setting 'train\.step'. Did you mean 'train\.steps'"):
        TrainConfig(step=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"train\.steps"):
        Config(train=TrainConfig(steps=-5))
    with pytest.raises(ConfigError, match="at least 2 groups"):
        Config(model=ModelConfig(groups=1), diversity=DiversityConfig(name="activation"))


@pytest.mark.parametrize("groups", [4, [100, 412], "96-160-256", (512,)])
@pytest.mark.parametrize("norm_weight", [float("inf"), 12.5, 1000])
def test_a_file_holds_everything(tmp_path: Path, groups: Any, norm_weight: float) -> None:
    settings = {
        "seed": 7,
        "method": "bier",
        "data.root": 'a "quoted" \\ pâth',
        "data.skip_broken": True,
        "model.groups": groups,
        "diversity.norm_weight": norm_weight,
        "train.learning_rate": 1e-7,
    }
    config = Config().with_settings(settings)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml({"made_by": {"bier": "0"}, "split": {"seed": 3, "parts": {}}}), encoding="utf-8")
    again = Config.from_toml(path)
    assert again == config
    assert again.differing(config) == []
    assert again.flat().keys() == Config().flat().keys()
    assert isinstance(again.model.groups, int if groups == 4 else tuple)


def test_the_config_of_a_run_may_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    config = Config().with_settings({"train.learning_rate": 0.0001})
    path.write_text(config.to_toml({"made_by": {"bier": "0"}, "split": {"seed": 3}}).replace("0.0001", "0.0003"))
    assert Config.from_toml(path).train.learning_rate == 0.0003
    assert read_config(path)[1] == {"made_by": {"bier": "0"}, "split": {"seed": 3}}


def test_a_file_with_mistakes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(ConfigError, match="There is no config at"):
        Config.from_toml(path)
    with pytest.raises(ConfigError, match=r"Cannot read the config .*: Is a directory"):
        Config.from_toml(tmp_path)
    path.write_text("seed = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.from_toml(path)
    path.write_bytes(b"seed = 3 # \xff")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.from_toml(path)
    path.write_text("[train]\nstep = 3\n")
    with pytest.raises(ConfigError, match=r"Did you mean 'train\.steps'"):
        Config.from_toml(path)
    path.write_text("seed = 3\n[train]\nsteps = 5\n")  # what it leaves out has its default
    assert Config.from_toml(path) == Config().with_settings({"seed": 3, "train.steps": 5})


def test_settings_on_the_command_line() -> None:
    pairs = [
        "train.steps=500",
        "train.learning_rate = 1e-3",
        "model.groups=96-160-256",
        "model.backbone=conv4",
        "data.skip_broken=true",
        "data.root=",
        "diversity.norm_weight=inf",
        'loss.name="triplet"',
        "data.cache=a=b",
    ]
    assert parse_settings(["loss.settings={alpha=2, distance='LpDistance'}"]) == {
        "loss.settings": {"alpha": 2, "distance": "LpDistance"}
    }
    parsed = parse_settings(pairs)
    assert parsed == {
        "train.steps": 500,
        "train.learning_rate": 1e-3,
        "model.groups": "96-160-256",
        "model.backbone": "conv4",
        "data.skip_broken": True,
        "data.root": "",
        "diversity.norm_weight": float("inf"),
        "loss.name": "triplet",
        "data.cache": "a=b",
    }
    config = Config().with_settings(parsed)
    assert config.model.groups == (96, 160, 256)
    assert config.data.root == ""


def test_sizes_that_look_like_a_day() -> None:
    settings = parse_settings(["model.groups=1000-12-10", "model.embedding=1022"])
    assert Config().with_settings(settings).model.groups == (1000, 12, 10)


def test_numbers_become_what_the_setting_is() -> None:
    config = Config().with_settings(
        parse_settings(["train.learning_rate=1", "data.root=2026", "model.groups=[500,12]"])
    )
    assert type(config.train.learning_rate) is float
    assert config.data.root == "2026"
    assert config.model.groups == (500, 12)


@pytest.mark.parametrize("pair", ["train.steps", "=3", "", " = 3"])
def test_what_is_no_setting(pair: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings([pair])
    assert "section.key=value" in str(caught.value)
    assert repr(pair) in str(caught.value)


def test_differing_names_the_keys_and_both_values() -> None:
    here = Config().with_settings({"train.steps": 5, "model.groups": [256, 256]})
    there = Config().with_settings({"train.steps": 6, "seed": 1})
    assert here.differing(there) == [
        "seed: 0 / 1",
        "model.groups: (256, 256) / 3",
        "train.steps: 5 / 6",
    ]
    assert here.differing(here) == []
