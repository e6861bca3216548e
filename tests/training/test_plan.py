"""Planning a run for a given time: from made-up timings, and once with a real network."""

from dataclasses import replace
from pathlib import Path

import pytest

from bier.errors import ConfigError, ModelError
from bier.training import resolve
from bier.training.plan import (
    LEAST_STEPS,
    MOST_STEPS,
    VIEWS,
    Timings,
    Work,
    can_plan,
    choose,
    explained,
    plan_run,
    time_network,
    work_of,
)
from bier.training.setup import load_data

# Two cores and a small network: 10 ms per image in each of four stages, three times that with gradients.
SLOW = Timings(
    ("stem", "middle", "late", "head"), (0.010,) * 4, (0.030,) * 4, decode=0.002, head=0.05, map_bytes=(50_000,) * 4
)
BIRDS = Work(batch=64, train=4700, validation=2200, test=5900)


def fast(factor: float) -> Timings:
    return replace(
        SLOW,
        forward=tuple(one / factor for one in SLOW.forward),
        training=tuple(one / factor for one in SLOW.training),
        head=SLOW.head / factor,
        decode=SLOW.decode / factor,
    )


def test_more_time_trains_deeper() -> None:
    depths = [
        choose(SLOW, Work(batch=64, train=1000, test=500), 60.0 * minutes).trainable_from
        for minutes in (10, 20, 60, 240)
    ]
    order = ["", *SLOW.stages[1:], "embedding"]
    assert depths == sorted(depths, key=order.index, reverse=True)
    assert depths[-1] == ""
    assert len(set(depths)) >= 3


@pytest.mark.parametrize("minutes", [15, 30, 60, 600])
@pytest.mark.parametrize("factor", [1, 4, 40])
def test_the_parts_add_up_to_the_time(minutes: int, factor: float) -> None:
    plan = choose(fast(factor), BIRDS, 60.0 * minutes)
    assert plan.expected <= 60 * minutes
    if plan.steps < MOST_STEPS:
        assert plan.expected >= 0.9 * 60 * minutes
    else:
        assert plan.steps == MOST_STEPS
    assert min(plan.seconds.values()) >= 0
    settings = plan.settings()
    assert settings["train.schedule"] == "cosine"
    assert settings["train.checkpoint_every"] == settings["train.validate_every"] == plan.validate_every
    resolve("a-bier", "folder", settings)  # they fit together


@pytest.mark.parametrize("minutes", range(5, 120, 5))
def test_trying_losses_is_part_of_the_time(minutes: int) -> None:
    plan = choose(fast(4), replace(BIRDS, choosing=True), 60.0 * minutes)
    without = choose(fast(4), BIRDS, 60.0 * minutes)
    assert plan.expected <= 60 * minutes
    tried = plan.seconds["choice of the loss"]
    assert (tried > 0) == (plan.steps >= 500)  # `train` tries losses in these runs and in no others
    if plan.steps >= 500:
        assert tried > plan.seconds["training"] / 8
    assert without.seconds["choice of the loss"] == 0


def test_the_earliest_stage_that_leaves_enough_steps() -> None:
    plan = choose(fast(4), BIRDS, 1800.0)
    assert plan.steps >= LEAST_STEPS
    stages = ["", *SLOW.stages[1:]]
    for earlier in stages[: stages.index(plan.trainable_from)]:
        other = choose(fast(4), BIRDS, 1800.0, given={"model.trainable_from": earlier})
        assert other.steps < LEAST_STEPS


def test_maps_are_cached_where_that_gives_more_steps() -> None:
    few = choose(fast(4), BIRDS, 1800.0, given={"model.trainable_from": "late"})
    assert few.views == VIEWS
    assert few.seconds["maps"] > 0
    many = choose(fast(4), replace(BIRDS, train=60_000), 1800.0, given={"model.trainable_from": "late"})
    assert (many.views, many.seconds["maps"]) == (0, 0)  # each image is seen once at most, so that maps are a waste
    full = choose(fast(4), BIRDS, 1800.0, given={"model.trainable_from": "late"}, space=1e6)
    assert full.views == 0


def test_what_was_chosen_is_kept() -> None:
    given = {"model.trainable_from": "head", "model.trunk_views": 2, "train.validate_every": 7}
    plan = choose(fast(4), BIRDS, 1800.0, given=given)
    assert (plan.trainable_from, plan.views, plan.validate_every) == ("head", 2, 7)
    assert plan.expected <= 1800
    for first in ("", "stem"):
        everything = choose(fast(40), BIRDS, 1800.0, given={"model.trainable_from": first})
        assert (everything.trainable_from, everything.views) == ("", 0)


def test_validation_and_evaluation_are_bounded() -> None:
    plan = choose(fast(4), replace(BIRDS, validation=20_000), 1800.0)
    assert plan.seconds["validation"] <= 0.35 * 1800
    assert 1 <= -(-plan.steps // plan.validate_every) < 8
    large = choose(fast(4), replace(BIRDS, test=100_000), 1800.0)
    assert not large.evaluated
    assert large.seconds["evaluation"] == 0
    assert "not included" in list(explained(large, resolve("a-bier", "folder"), 30))[1]


def test_the_evaluation_is_left_out_before_training_is() -> None:
    work = Work(batch=64, train=100, test=1400)
    with_it, without = (choose(SLOW, work, seconds) for seconds in (600.0, 180.0))
    assert with_it.evaluated
    assert not without.evaluated
    assert without.steps >= 20


def test_too_short() -> None:
    with pytest.raises(ConfigError, match=r"0\.5 minutes are left, too few to train on 4,700 images"):
        choose(SLOW, BIRDS, 30.0)


def test_a_network_in_one_piece() -> None:
    whole = Timings(("all",), (0.040,), (0.120,), decode=0.002, head=0.05, map_bytes=(300_000,))
    plan = choose(whole, Work(batch=64, train=1000), 1800.0)
    assert (plan.trainable_from, plan.views) == ("embedding", 0)
    assert choose(whole, Work(batch=64, train=1000), 18_000.0).trainable_from == ""


def test_what_is_planned() -> None:
    assert can_plan(resolve("a-bier", "folder"))
    assert can_plan(resolve("baseline", "cub"))
    for data in ("glyphs", "features", "cifar10"):
        assert not can_plan(resolve("a-bier", data))
    assert not can_plan(resolve("a-bier", "folder", {"model.backbone": "conv4"}))
    assert not can_plan(resolve("a-bier", "folder", {"model.pretrained": False}))


SMALL = {"model.resolution": 64, "train.batch_classes": 2, "train.batch_images": 4, "data.validation": 0.5}


def test_a_real_network_is_timed(pictures: Path, tmp_path: Path) -> None:
    config = resolve("a-bier", "folder", {**SMALL, "data.root": str(pictures)})
    dataset = load_data(config)
    timings = time_network(config, dataset, lambda *_: None)
    assert timings.stages[0] == "stem"
    assert timings.stages[-1] == "head"
    assert len(timings.forward) == len(timings.training) == len(timings.map_bytes) == len(timings.stages)
    assert min(timings.forward) > 0
    assert sum(timings.training) > sum(timings.forward)
    assert timings.map_bytes[:2] == (2 * 3 * 64 * 64, 2 * 32 * 32 * 32)
    assert work_of(config, dataset) == Work(batch=8, train=16, validation=16 + 16, test=32)
    plan = plan_run(config, 30, tmp_path / "run", {}, lambda *_: None)
    assert (plan.trainable_from, plan.views, plan.steps) == ("", 0, MOST_STEPS)
    assert not (tmp_path / "run").exists()
    wrong = config.with_settings({"model.trainable_from": "blocks"})
    with pytest.raises(ModelError, match="must be one of stem"):
        plan_run(wrong, 30, tmp_path / "run", {"model.trainable_from": "blocks"}, lambda *_: None)


def test_a_closer_look_is_in_the_plan() -> None:
    work = Work(batch=64, train=1000, validation=300, test=300)
    once, closer = (choose(replace(fast(4), looks=looks), work, 3600.0) for looks in (1.0, 4.0))
    assert once.seconds["final validation"] == 0.0
    assert closer.seconds["threshold"] == pytest.approx(1300 * (0.0005 + 4 * 0.010), rel=1e-6)
    assert closer.seconds["final validation"] == pytest.approx(600 * (0.0005 + 4 * 0.010), rel=1e-6)
    assert closer.seconds["evaluation"] - once.seconds["evaluation"] == pytest.approx(600 * 3 * 0.010, rel=1e-6)
    assert closer.steps <= once.steps
