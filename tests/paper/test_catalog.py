"""The experiments as data: the paper's numbers, and which rows are one run."""

import pytest

from bier.errors import ConfigError
from bier.paper.budgets import BUDGETS, DEEP, FULL, SMALL, SMOKE, budget_of, config_of
from bier.paper.experiments import EXPERIMENTS, Row, experiment
from bier.paper.runner import plan, row_digest, searches

ROWS = [(one.name, row) for one in EXPERIMENTS.values() for row in one.rows]


def named(name: str, label: str) -> Row:
    (row,) = [row for row in experiment(name).rows if row.label == label]
    return row


def test_every_experiment_is_there() -> None:
    assert list(EXPERIMENTS) == [
        *("strength", "losses", "groups", "embedding-size", "initialisation", "auxiliary", "lambda", "summary"),
        *("length", "end-to-end", "datasets", "cifar10", "pictures", "peers", "tried"),
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
        ("summary", "Activation Loss initialisation", "recall", 53.73),
        ("end-to-end", "Stagewise: features fixed", "recall", 52.0),
        ("datasets", "vehicleid large, A-BIER", "recall", 81.9),
        ("cifar10", "Quick-Wider, Adversarial BIER", "accuracy", 83.21),
        ("peers", "Proxy-NCA (peer)", "recall", 49.2),
    ],
)
def test_what_the_paper_got(name: str, label: str, key: str, expected: float) -> None:
    assert named(name, label).paper[key] == expected


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_every_row_is_a_config(budget: object) -> None:
    for name, row in ROWS:
        config = config_of(row, budget, seed=3)  # type: ignore[arg-type]
        assert config.seed == 3
        assert config.data.validation == (0.5 if name == "tried" else 0)


@pytest.mark.parametrize("budget", [SMALL, FULL], ids=["small", "full"])
def test_tables_share_their_runs(budget: object) -> None:
    def key(name: str, label: str) -> str:
        return row_digest(named(name, label), budget)  # type: ignore[arg-type]

    baseline = key("strength", "Baseline-512")
    for name, label in [("losses", "Binomial-Deviance-512"), ("groups", "Baseline-512"), ("summary", "Baseline")]:
        assert key(name, label) == baseline
    assert key("datasets", "cub, Baseline") == key("peers", "Baseline-512") == baseline
    bier = key("strength", "BIER-96-160-256")
    assert key("initialisation", "Activation Loss") == key("embedding-size", "BIER-96-160-256") == bier
    assert key("lambda", "Adversarial Loss, lambda_div 0.001") == key("datasets", "cub, A-BIER")
    assert key("datasets", "vehicleid small, BIER") == key("datasets", "vehicleid large, BIER")
    assert len({baseline, bier, key("peers", "Triplet (peer)"), key("losses", "Triplet-512")}) == 4
    assert key("auxiliary", "No auxiliary loss, ten times the rate") != bier
    partial = key("end-to-end", "All layers, BIER") != bier
    assert partial == (budget is SMALL)  # the paper's own setting trains all layers anyway


def test_length_is_in_steps_of_the_budget() -> None:
    assert [config_of(row, DEEP).train.steps for row in experiment("length").rows] == [300, 600, 1200] * 2
    once, twice = named("length", "A-BIER, 1 x the steps"), named("length", "A-BIER, 2 x the steps")
    assert row_digest(once, DEEP) == row_digest(named("summary", "Boosting, auxiliary Adversarial Loss"), DEEP)
    assert row_digest(twice, DEEP) != row_digest(once, DEEP)
    assert [job.key for job in searches(twice, DEEP)] == [job.key for job in searches(once, DEEP)]


def test_a_plan_has_each_run_once_and_its_needs_first() -> None:
    jobs = plan(EXPERIMENTS.values(), SMALL, 2)
    keys = [job.key for job in jobs]
    assert len(keys) == len(set(keys)) < sum(len(plan([one], SMALL, 2)) for one in EXPERIMENTS.values())
    for place, job in enumerate(jobs):
        assert {search.key for search in job.searches} <= set(keys[:place])
        if job.row.features_of:
            assert f"{row_digest(job.row.features_of, SMALL)}-{job.seed}" in keys[:place]


def test_the_paper_s_own_setting() -> None:
    plain, auxiliary = (config_of(named("auxiliary", label), FULL) for label in NAMES)
    assert (plain.model.backbone, plain.train.steps, plain.train.learning_rate) == ("googlenet-bvlc", 50_000, 1e-6)
    assert (auxiliary.train.steps, auxiliary.train.learning_rate) == (15_000, 1e-5)
    assert plain.model.groups == auxiliary.model.groups == (96, 160, 256)


NAMES = ("No auxiliary loss (BIER)", "Adversarial Loss (A-BIER)")


def test_a_search_holds_out_training_classes() -> None:
    row = named("strength", "Baseline-512")
    config = config_of(row, SMALL, rate=6e-5, search=True)
    assert (config.data.validation, config.train.steps, config.train.learning_rate) == (0.2, 100, 6e-5)
    assert config_of(row, SMOKE).model.embedding == 64


def test_names_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'strength'"):
        experiment("strenght")
    with pytest.raises(ConfigError, match=r"smoke, small, deep, full\. Got 'smal' instead\. Did you mean 'small'"):
        budget_of("smal")
