"""The experiments as data: the paper's numbers, and which rows are one run."""

import pytest

from bier.errors import ConfigError
from bier.paper.budgets import BUDGETS, FULL, MAIN, SHORT, SMOKE, Budget, budget_of, choices, config_of
from bier.paper.experiments import EXPERIMENTS, Row, experiment
from bier.paper.results import Job, plan

ROWS = [(one.name, row) for one in EXPERIMENTS.values() for row in one.rows]


def named(name: str, label: str) -> Row:
    (row,) = [row for row in experiment(name).rows if row.label == label]
    return row


def test_every_experiment_is_there() -> None:
    assert list(EXPERIMENTS) == [
        *("strength", "losses", "groups", "embedding-size", "initialisation", "auxiliary", "lambda", "summary"),
        *("end-to-end", "datasets", "cifar10", "pictures", "peers", "tried"),
    ]


@pytest.mark.parametrize(
    ("name", "label", "key", "expected"),
    [
        ("strength", "Init-170-171-171", "classifier_correlation", 0.8362),
        ("strength", "BIER-96-160-256", "recall", 55.33),
        ("losses", "Triplet-96-160-256", "recall", 53.31),
        ("groups", "BIER-34-68-102-138-170", "classifier_correlation", 0.6250),
        ("embedding-size", "BIER-50-96-148-196-242-292", "recall", 55.99),
        ("initialisation", "Orthogonal", "recall", 54.58),
        ("auxiliary", "No auxiliary loss, ten times the rate", "recall", 52.3),
        ("lambda", "Adversarial Loss, lambda_div 0.001", "recall", 57.5),
        ("summary", "Activation Loss initialisation", "recall", 53.93),
        ("end-to-end", "Stagewise: features fixed", "recall", 52.0),
        ("datasets", "vehicleid large, A-BIER", "recall", 81.9),
        ("cifar10", "Quick-Wider, Adversarial BIER", "accuracy", 83.21),
        ("peers", "Proxy-NCA-512", "recall", 49.2),
    ],
)
def test_what_the_paper_got(name: str, label: str, key: str, expected: float) -> None:
    assert named(name, label).paper[key] == expected


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_every_row_is_a_config(budget: object) -> None:
    for name, row in ROWS:
        config = config_of(row, budget, seed=3)  # type: ignore[arg-type]
        assert config.seed == 3
        assert config.data.validation == (0.4 if name == "tried" else 0)
        assert config.data.validation_order == ("last" if name == "tried" else "random")


@pytest.mark.parametrize("budget", [MAIN, FULL], ids=["main", "full"])
def test_tables_share_their_runs(budget: Budget) -> None:
    def key(name: str, label: str) -> str:
        return Job(named(name, label), budget, 0).key

    baseline = key("strength", "Baseline-512")
    for name, label in [("losses", "Binomial-Deviance-512"), ("groups", "Baseline-512"), ("summary", "Baseline")]:
        assert key(name, label) == baseline
    assert key("datasets", "cub, Baseline") == key("peers", "Binomial-Deviance-512") == baseline
    bier = key("strength", "BIER-96-160-256")
    assert key("initialisation", "Activation Loss") == key("embedding-size", "BIER-96-160-256") == bier
    assert key("lambda", "Adversarial Loss, lambda_div 0.001") == key("datasets", "cub, A-BIER")
    assert key("datasets", "vehicleid small, BIER") == key("datasets", "vehicleid large, BIER")
    assert len({baseline, bier, key("peers", "Triplet-512"), key("losses", "Triplet-512")}) == 4
    assert key("auxiliary", "No auxiliary loss, ten times the rate") != bier
    partial = key("end-to-end", "All layers, BIER") != bier
    assert partial == (budget is MAIN)  # the paper's own setting trains all layers anyway


def test_peers_alone_and_boosted() -> None:
    """Ten losses, each with both embeddings and a search of its own for the rate, as binomial deviance has it."""
    rows = [row for row in experiment("peers").rows if "loss.name" in row.settings]
    configs = [config_of(row, MAIN) for row in rows]
    assert len({config.loss.name for config in configs}) == len(configs) // 2 == 10
    assert [config.loss.boost for config in configs] == [False, True] * 10
    assert [config.model.groups for config in configs] == [(512,), (96, 160, 256)] * 10
    assert all(len(Job(row, MAIN, 0).searches) == 2 for row in rows)
    (margin,) = {(one.loss.miner, tuple(one.loss.settings)) for one in configs if one.loss.name == "MarginLoss"}
    assert margin == ("DistanceWeightedMiner", ("learn_beta",))


def test_cifar10_takes_the_weight_decay_of_the_small_baseline() -> None:
    """One search, with shorter runs, for all rows of both networks."""
    rows = experiment("cifar10").rows
    (found,) = {tuple(search.key for search in Job(row, MAIN, 2).searches) for row in rows}
    searches = Job(rows[0], MAIN, 0).searches
    assert found == tuple(search.key for search in searches)
    configs = [config_of(one.row, MAIN, choice=one.choice, search=True) for one in searches]
    assert [config.train.weight_decay for config in configs] == [3e-4, 1e-3, 4e-3]
    assert {config.train.steps for config in configs} == {config_of(rows[0], MAIN).train.steps // 2}
    assert {(config.method, config.model.backbone) for config in configs} == {("baseline", "cifar10-quick")}


def test_a_plan_has_each_run_once_and_its_needs_first() -> None:
    jobs = plan(EXPERIMENTS.values(), MAIN, 2)
    keys = [job.key for job in jobs]
    assert len(keys) == len(set(keys)) < sum(len(plan([one], MAIN, 2)) for one in EXPERIMENTS.values())
    for place, job in enumerate(jobs):
        assert {need.key for need in job.needs} <= set(keys[:place])
    untrained = [(job.row.data, job.row.network, job.seed) for job in jobs if job.row.untrained]
    assert untrained[:2] == [("cub", "", 0), ("cub", "lite", 0)]
    assert len(untrained) == len(set(untrained)) + 1 == 9  # on classes held out too


def test_the_default_backbone_is_a_block_of_the_main_table() -> None:
    googlenet, lite = (
        config_of(named("summary", label), MAIN) for label in ("Baseline", "EfficientNet-Lite0, baseline")
    )
    assert (googlenet.model.backbone, googlenet.model.trainable_from) == ("googlenet-bvlc", "inception_4a")
    assert (lite.model.backbone, lite.model.trainable_from) == ("efficientnet_lite0", "blocks.2")
    assert (lite.train.learning_rate, lite.train.embedding_factor) == (3e-5, 10.0)
    assert choices(named("summary", "EfficientNet-Lite0, A-BIER"), MAIN) == ()
    assert len(choices(named("summary", "Baseline"), MAIN)) == 2
    assert config_of(named("summary", "Baseline"), SHORT).model.trainable_from == "inception_4c"


def test_the_paper_s_own_setting() -> None:
    plain, auxiliary = (config_of(named("auxiliary", label), FULL) for label in NAMES)
    assert (plain.model.backbone, plain.train.steps, plain.train.learning_rate) == ("googlenet-bvlc", 50_000, 1e-6)
    assert (auxiliary.train.steps, auxiliary.train.learning_rate) == (15_000, 1e-5)
    assert plain.model.groups == auxiliary.model.groups == (96, 160, 256)


NAMES = ("No auxiliary loss (BIER)", "Adversarial Loss (A-BIER)")


def test_a_search_holds_out_the_last_training_classes() -> None:
    row = named("strength", "Baseline-512")
    searches = Job(row, MAIN, 2).searches
    assert [job.choice for job in searches] == list(choices(row, MAIN))
    assert [job.seed for job in searches] == [0] * len(searches)
    config = config_of(row, MAIN, choice=searches[0].choice, search=True)
    assert (config.data.validation, config.data.validation_order) == (0.4, "last")
    assert config.train.steps == config_of(row, MAIN).train.steps  # so that it chooses the length too
    assert config.train.learning_rate == searches[0].choice["train.learning_rate"]  # type: ignore[index]
    assert config_of(row, SMOKE).model.embedding == 64
    assert Job(named("summary", "GoogLeNet, not trained"), MAIN, 0).searches == []


def test_a_rate_that_a_row_names_is_not_searched_for() -> None:
    row = named("tried", "BIER, shrinkage, rate 1e-4")
    job = Job(row, MAIN, 0)
    assert job.searches == []
    assert job.identity(None)["settings"]["train.learning_rate"] == 1e-4


def test_names_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'strength'"):
        experiment("strenght")
    with pytest.raises(ConfigError, match=r"smoke, short, main, long, full\. Got 'mian' instead\. Did you mean 'main'"):
        budget_of("mian")
