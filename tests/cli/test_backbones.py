"""`bier backbones`: what it says about size, cost and weights, and what it measures."""

import json
from collections.abc import Callable

import pytest
import timm

from bier.models import listing
from bier.models.backbones import NAMES, build_backbone

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two families, so that the list is short; one of the weights is on this machine."""
    monkeypatch.setattr(listing, "_FAMILY_OF", {"resnet18.a1_in1k": "ResNet", "test_vit.r160_in1k": "ViT"})
    monkeypatch.setattr(listing, "is_cached", lambda name: name == "resnet18.a1_in1k")


def test_every_first_choice_is_in_timm_and_named_backbones_are_listed() -> None:
    first = [name for names in listing.FAMILIES.values() for name in names]
    assert set(first) <= set(timm.list_pretrained())
    assert set(listing.OWN) == set(NAMES) - {"features"}
    assert listing.names() == [*listing.OWN, *first]
    assert len(listing.FAMILIES) >= 10
    assert None not in [listing.licence(name) for name in first]


@pytest.mark.usefixtures("few")
def test_the_list(cli: Cli) -> None:
    code, out, _ = cli("backbones", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)["backbones"]}
    assert list(rows) == [*listing.OWN, "resnet18.a1_in1k", "test_vit.r160_in1k"]
    weights = {name: row["weights"] for name, row in rows.items()}
    assert (weights["resnet18.a1_in1k"], weights["test_vit.r160_in1k"]) == ("here", "hub")
    assert (weights["efficientnet_lite0"], weights["conv4"], weights["googlenet-bvlc"]) == ("here", "none", "file")
    resnet = rows["resnet18.a1_in1k"]
    assert resnet["parameters"] == 11_176_512  # without the classifier
    assert resnet["gflops"] == pytest.approx(1.82, abs=0.01)  # as its model card says
    assert (resnet["resolution"], resnet["features"], resnet["licence"]) == (224, 512, "apache-2.0")
    vit = rows["test_vit.r160_in1k"]
    assert vit["stages"] == ["patch_embed", *(f"blocks.{number}" for number in range(6)), "head"]
    real = build_backbone("conv4")
    assert rows["conv4"]["parameters"] == sum(parameter.numel() for parameter in real.parameters())
    assert "frozen_images_per_second" not in vit


@pytest.mark.usefixtures("few")
def test_a_table_for_people(cli: Cli) -> None:
    code, out, said = cli("backbones")
    assert (code, out) == (0, "")
    assert "efficientnet_lite0" in said
    assert "11.2 M" in said


def test_a_pattern_and_times(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "TIMED_BATCH", 2)
    monkeypatch.setattr(listing.images_per_second, "__defaults__", (0, 0.05, None))
    code, out, _ = cli("backbones", "test_vit", "--resolution", "64", "--time", "--json")
    assert code == 0
    rows = json.loads(out)["backbones"]
    assert [row["name"] for row in rows] == timm.list_pretrained("test_vit*")
    for row in rows:
        assert row["resolution"] == 64
        assert row["frozen_images_per_second"] > 0
        assert row["trained_images_per_second"] > 0


def test_less_work_at_a_lower_resolution() -> None:
    own, lower = (listing.describe("vit_small_patch14_dinov2.lvd142m", side) for side in (0, 224))
    assert (own.resolution, lower.resolution) == (518, 224)
    assert lower.gflops < own.gflops / 7


def test_no_such_backbone(cli: Cli) -> None:
    code, out, said = cli("backbones", "resnet18.nonsense")
    assert (code, out) == (2, "")
    assert said == (
        "bier: No backbone with weights has a name like 'resnet18.nonsense'. "
        "Try a pattern such as '*dinov2*' or 'resnet*'.\n"
    )
    code, out, said = cli("backbones", "test_vit.r160_in1k", "--resolution", 8)
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert "'test_vit.r160_in1k' cannot look at 8 x 8 pixels" in said
