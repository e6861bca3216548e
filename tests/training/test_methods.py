"""Methods are sets of settings, and nothing more."""

import pytest

import bier
from bier.config import Config
from bier.errors import ConfigError
from bier.training.methods import BOTH, METHODS, SUITED, resolve


def test_the_five_methods() -> None:
    assert list(METHODS) == ["baseline", "init", "bier", "activation-bier", "a-bier"]
    configs = {name: resolve(name, "glyphs") for name in METHODS}
    assert configs["baseline"].model.groups == 1
    assert {name: config.loss.boost for name, config in configs.items()} == {
        "baseline": False,
        "init": False,
        "bier": True,
        "activation-bier": True,
        "a-bier": True,
    }
    assert [configs[name].model.start for name in ("init", "bier")] == ["activation", "activation"]
    assert [configs[name].diversity.name for name in METHODS] == ["none", "none", "none", "activation", "adversarial"]
    assert all(config.method == name for name, config in configs.items())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", ["glyphs", "folder", "cub", "cifar10", "features", "vehicleid"])
def test_a_method_is_the_data_sets_config_with_its_own_values(method: str, data: str) -> None:
    together = BOTH.get((data, method), {})
    by_hand = {**SUITED.get(data, {}), **METHODS[method], **together, "method": method, "data.name": data}
    if data in (
        "folder",
        "cub",
        "vehicleid",
    ):  # pictures for a pretrained network
        by_hand |= {"model.test_resolution": 320, "model.mirror": True}
    assert resolve(method, data) == Config().with_settings(by_hand)


def test_the_order_is_defaults_data_method_caller() -> None:
    assert resolve("a-bier", "glyphs").model.backbone == "conv4"  # the data set's, not the default
    assert resolve("baseline", "cifar10").model.groups == 1  # the method's, not the data set's
    assert resolve("a-bier", "cifar10").diversity.weight == 3e-2  # what both need, not the method's
    chosen = resolve("baseline", "glyphs", {"model.groups": 2, "loss.boost": True, "train.steps": 3})
    assert (chosen.model.groups, chosen.loss.boost, chosen.train.steps) == (2, True, 3)


def test_an_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("abier", "glyphs")
    assert "baseline, init, bier, activation-bier, a-bier" in str(caught.value)
    assert "Got 'abier' instead. Did you mean 'a-bier'?" in str(caught.value)


def test_it_is_a_public_name() -> None:
    assert bier.resolve is resolve
