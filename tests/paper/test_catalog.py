"""The experiments as data: the paper's numbers, and which rows are one run."""

import pytest

from bier.errors import ConfigError
from bier.paper.budgets import BUDGETS, MAIN, PAPER, SMOKE, THIRD, Budget, budget_of, config_of, snapshots_of
from bier.paper.experiments import DATASETS, EXPERIMENTS, ON_DATA, Row, experiment
from bier.paper.results import Job, plan

ROWS = [(one.name, row) for one in EXPERIMENTS.values() for row in one.rows]


def named(name: str, label: str) -> Row:
    (row,) = [row for row in experiment(name).rows if row.label == label]
    return row


def test_every_experiment_is_there() -> None:
    assert list(EXPERIMENTS) == [
        *("strength", "losses", "groups", "embedding-size", "initialisation", "auxiliary", "lambda", "summary"),
        *("end-to-end", "cub", "cub-cropped", "cars", "cars-cropped", "sop", "inshop", "vehicleid"),
        *("cifar10", "pictures", "peers"),
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
        ("strength", "Init-96-160-256", "recall", 53.93),
        ("vehicleid", "A-BIER, large", "recall", 81.9),
        ("vehicleid", "BIER, learner 3, large", "recall@5", 86.0),
        ("cub", "A-BIER, learner 3", "recall", 55.3),
        ("cub", "Baseline", "recall@32", 94.8),
        ("cars", "BIER, learner 3", "recall@8", 94.9),
        ("cars-cropped", "A-BIER", "recall@2", 94.1),
        ("cub-cropped", "BIER", "recall@16", 93.8),
        ("sop", "A-BIER", "recall@1000", 97.8),
        ("inshop", "A-BIER, learner 3", "recall@50", 98.0),
        ("cifar10", "Quick-Wider, Adversarial BIER (7c)", "accuracy", 83.21),
        ("peers", "Proxy-NCA-512", "recall", 49.2),
    ],
)
def test_what_the_paper_got(name: str, label: str, key: str, expected: float) -> None:
    assert named(name, label).paper[key] == expected


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_every_row_is_a_config(budget: object) -> None:
    for _, row in ROWS:
        config = config_of(row, budget, seed=3)  # type: ignore[arg-type]
        assert (config.seed, config.data.validation) == (3, 0)


def test_a_table_per_data_set_has_the_paper_s_rows_and_columns() -> None:
    ks = {one.name: [column.title for column in one.columns if column.title.startswith("R@")] for one in DATASETS}
    assert ks["cub"] == ks["cars-cropped"] == ["R@1", "R@2", "R@4", "R@8", "R@16", "R@32"]
    assert (ks["sop"], ks["vehicleid"]) == (["R@1", "R@10", "R@100", "R@1000"], ["R@1", "R@5"])
    assert ks["inshop"] == ["R@1", "R@10", "R@20", "R@30", "R@40", "R@50"]
    labels = [row.label for row in experiment("cub").rows]
    assert labels == ["not trained", "Baseline", "BIER, learner 3", "BIER", "A-BIER, learner 3", "A-BIER"]
    assert len(experiment("vehicleid").rows) == 3 * len(labels)


def test_pictures_of_every_data_set() -> None:
    assert {row.data for row in experiment("pictures").rows} == set(ON_DATA)


@pytest.mark.parametrize("budget", [MAIN, PAPER], ids=["main", "paper"])
def test_tables_share_their_runs(budget: Budget) -> None:
    def key(name: str, label: str) -> str:
        return Job(named(name, label), budget, 0).name

    baseline = key("strength", "Baseline-512")
    for name, label in [("losses", "Binomial-Deviance-512"), ("groups", "Baseline-512"), ("summary", "Baseline")]:
        assert key(name, label) == baseline
    assert (
        key("cub", "Baseline") == key("peers", "Binomial-Deviance-512") == baseline == f"cub-{budget.name}-baseline-0"
    )
    bier = key("strength", "BIER-96-160-256")
    assert key("initialisation", "Activation Loss") == key("embedding-size", "BIER-96-160-256") == bier
    searched = {"main": 0.001, "paper": 0.01}[budget.name]
    assert key("lambda", f"Adversarial Loss, lambda_div {searched}") == key("cub", "A-BIER")
    assert key("cub", "A-BIER") == key("cub", "A-BIER, learner 3") == f"cub-{budget.name}-a-bier-0"
    assert key("vehicleid", "BIER, small") == key("vehicleid", "BIER, large") == key("pictures", "BIER, vehicleid")
    assert len({baseline, bier, key("peers", "Triplet-512"), key("losses", "Triplet-512")}) == 4
    assert key("auxiliary", "No auxiliary loss, ten times the rate") != bier


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_different_runs_have_different_folders(budget: Budget) -> None:
    jobs = plan(EXPERIMENTS.values(), budget, 2)
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() and " " not in name for name in names)


def test_peers_alone_and_boosted() -> None:
    """Ten losses, each with both embeddings at one rate."""
    rows = [row for row in experiment("peers").rows if "loss.name" in row.settings]
    configs = [config_of(row, MAIN) for row in rows]
    assert len({config.loss.name for config in configs}) == len(configs) // 2 == 10
    assert [config.loss.boost for config in configs] == [False, True] * 10
    assert [config.model.groups for config in configs] == [(512,), (96, 160, 256)] * 10
    rates = [config.train.learning_rate for config in configs]
    assert rates[::2] == rates[1::2]
    assert {rate: rates.count(rate) for rate in rates} == {1e-4: 12, 3e-5: 8}
    (margin,) = {(one.loss.miner, tuple(one.loss.settings)) for one in configs if one.loss.name == "MarginLoss"}
    assert margin == ("DistanceWeightedMiner", ("learn_beta",))


def test_a_plan_has_each_run_once_and_its_needs_first() -> None:
    jobs = plan(EXPERIMENTS.values(), MAIN, 2)
    names = [job.name for job in jobs]
    assert len(names) == len(set(names)) < sum(len(plan([one], MAIN, 2)) for one in EXPERIMENTS.values())
    for place, job in enumerate(jobs):
        assert job.before is None or job.before.name in names[:place]
    untrained = [(job.row.data, job.row.network) for job in jobs if job.row.untrained]
    assert untrained[:2] == [("cub", ""), ("cub", "lite")]
    assert len(untrained) == len(set(untrained)) == 8


def test_the_default_backbone_is_a_block_of_the_main_table() -> None:
    googlenet, lite = (
        config_of(named("summary", label), MAIN) for label in ("Baseline", "EfficientNet-Lite0, baseline")
    )
    assert (googlenet.model.backbone, googlenet.model.trainable_from) == ("googlenet-bvlc", "inception_4a")
    assert (lite.model.backbone, lite.model.trainable_from) == ("efficientnet_lite0", "blocks.2")
    assert (lite.train.learning_rate, lite.train.embedding_factor) == (3e-5, 10.0)


def test_the_rates_of_main() -> None:
    labels = ("Baseline", "Boosting, random initialisation", "Boosting, auxiliary Adversarial Loss (A-BIER)")
    rates = [config_of(named("summary", label), MAIN).train.learning_rate for label in labels]
    assert rates == [1e-4, 3e-5, 1e-4]
    fast = config_of(named("auxiliary", "No auxiliary loss, ten times the rate"), MAIN)
    assert fast.train.learning_rate == 3e-4


def test_the_paper_s_length_and_rates() -> None:
    """82 passes, and the paper's steps times rate: 50,000 x 1e-6, or 15,000 x 1e-5 with a diversity loss."""
    configs = [config_of(row, PAPER) for row in experiment("cub").rows if not row.untrained]
    for config in configs:
        train = config.train
        assert train.steps * train.batch_classes * train.batch_images / 5864 == pytest.approx(82, abs=0.2)
        assert (train.schedule, train.embedding_factor, config.loss.cost, config.model.weighting) == (
            *("constant", 10.0, 25.0, "alpha"),
        )
        moved = 0.15 if config.diversity.name == "adversarial" else 0.05
        assert train.steps * train.learning_rate == pytest.approx(moved, rel=0.01)
    assert {config.diversity.name for config in configs} == {"none", "adversarial"}


def test_a_third_is_the_beginning_of_a_run() -> None:
    row = named("cub", "A-BIER")
    whole, third = config_of(row, PAPER), config_of(row, THIRD)
    assert third.differing(whole) == ["train.steps: 2500 / 7500"]
    assert (len(snapshots_of(row, PAPER)), snapshots_of(row, THIRD)) == (8, [833, 1667])
    assert {*snapshots_of(row, THIRD), 2500} < set(snapshots_of(row, PAPER))
    assert (
        snapshots_of(named("cub", "not trained"), PAPER)
        == snapshots_of(named("cifar10", "Quick, Dropout"), PAPER)
        == []
    )
    assert config_of(row, SMOKE).model.embedding == 64


def test_names_that_there_are_not() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'strength'"):
        experiment("strenght")
    with pytest.raises(ConfigError, match=r"smoke, main, third, paper\. Got 'mian' instead\. Did you mean 'main'"):
        budget_of("mian")
