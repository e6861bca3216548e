"""Validation while training: the untrained backbone as step 0, MAP@R, distractors, and what is kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bier
from bier.config import Config, DataConfig
from bier.data.records import Dataset, Part, divide
from bier.evaluate.recall import rank_r
from bier.runs import Run
from bier.training import resolve
from bier.training.setup import MOST_DISTRACTORS, Scores, build, distractors_of, load_data, with_fewer_validated
from bier.training.state import TrainerState

SMALL = {
    "model.embedding": 12,
    "diversity.hidden": 8,
    "train.steps": 8,
    "train.precision": "float32",
    "train.batch_classes": 3,
    "train.batch_images": 4,
    "train.validate_every": 4,
    "data.validation": 0.4,
}


def config(root: Path, **settings: Any) -> Config:
    given = {**SMALL, "data.root": str(root)}
    return resolve("a-bier", "features", given | {key.replace("__", "."): value for key, value in settings.items()})


def test_the_untrained_backbone_is_the_first_point(features_file: Path, tmp_path: Path) -> None:
    chosen = config(features_file)
    run = bier.train(chosen, tmp_path / "run")
    rows = [row for row in Run(run.folder).metrics() if "validation" in row]
    assert [row["step"] for row in rows] == [0, 4, 8]
    dataset = load_data(chosen)
    validation, others = dataset["validation"], dataset["train"]
    rows_of = torch.nn.functional.normalize(torch.from_numpy(np.concatenate([validation.images, others.images])))
    labels = [*validation.labels, *(1000 + np.arange(len(others)))]
    hits = total = 0.0
    scores = rows_of @ rows_of.T
    for query in range(len(validation)):  # by hand: queries are the validation images, searched among all
        order = [other for other in scores[query].argsort(descending=True).tolist() if other != query]
        right = [labels[other] == labels[query] for other in order]
        found = sum(right)
        hits += right[0]
        total += sum(sum(right[: n + 1]) / (n + 1) for n in range(found) if right[n]) / found
    assert run.untrained is not None
    assert run.untrained.recall == pytest.approx(100 * hits / len(validation))
    assert run.untrained.map_at_r == pytest.approx(100 * total / len(validation))
    assert rows[0] == {"step": 0, "validation": run.untrained.recall, "validation_map": run.untrained.map_at_r}
    assert (run.queries, run.distractors) == (len(validation), len(others))
    assert run.untrained.map_at_r != pytest.approx(rank_r(rows_of[: len(validation)], validation.labels).map_at_r)

    best = max(rows, key=lambda row: (row["validation_map"], row["step"]))
    assert (run.best_step, run.best_validation) == (best["step"], best["validation"])
    found = json.loads((run.folder / "model" / "model.json").read_text())["metadata"]
    assert found["untrained"] == {"recall": run.untrained.recall, "map": run.untrained.map_at_r}
    assert found["validation"] == {"step": best["step"], "recall": best["validation"], "map": best["validation_map"]}


def test_where_training_does_not_pay_the_untrained_backbone_is_kept(features_file: Path, tmp_path: Path) -> None:
    chosen = config(features_file, train__learning_rate=3.0, train__schedule="constant", train__optimizer="sgd")
    run = bier.train(chosen, tmp_path / "run")
    assert run.best_step == 0
    assert run.best == run.untrained
    model = bier.load(run.folder)
    assert model.metadata["method"] == "untrained"
    features = load_data(chosen)["test"].images
    expected = features / np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(model.encode(features), expected, atol=1e-6)
    again = bier.train(chosen, run.folder, resume=True)  # the end is the same after a resume
    assert again[:-1] == run[:-1]  # but for the share of the time


def test_a_network_from_scratch_has_no_step_0(pictures: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "data.root": str(pictures), "model.backbone": "conv4", "train.batch_classes": 2}
    run = bier.train(resolve("a-bier", "folder", settings), tmp_path / "run")
    assert run.untrained is None
    assert [row["step"] for row in Run(run.folder).metrics() if "validation" in row] == [4, 8]


def test_ties_go_to_the_later_step_and_count_for_patience() -> None:
    state = TrainerState()
    for step, value in [(0, 40.0), (3, 50.0), (6, 50.0), (9, 45.0)]:
        state.step = step
        state.record_validation(Scores(60.0 + step, value))
    assert (state.best_step, state.best_value, state.stale) == (6, 50.0, 2)
    assert state.summary() == {
        "validation": {"step": 6, "recall": 66.0, "map": 50.0},
        "untrained": {"recall": 60.0, "map": 40.0},
    }
    near = TrainerState()
    for step, value in [(0, 50.0), (3, 49.9), (6, 50.1), (9, 49.9), (12, 49.7)]:  # each near the one before
        near.step = step
        near.record_validation(Scores(60.0, value))
        assert near.best_step == {0: 0, 3: 0, 6: 6, 9: 9, 12: 9}[step]
    assert (near.best_value, near.stale) == (50.1, 2)
    first = TrainerState()
    for step in (3, 6):
        first.step = step
        first.record_validation(Scores(100.0))
    assert (first.best_step, first.stale) == (3, 1)  # by R@1, as earlier versions


def test_a_run_of_an_earlier_version_validates_as_it_did(features_file: Path, tmp_path: Path) -> None:
    """Its config.toml has none of the newer settings."""
    file = tmp_path / "config.toml"
    kept = [line for line in config(features_file).to_toml().splitlines() if "validat" not in line]
    file.write_text("\n".join(kept))
    old = Config.from_toml(file).with_settings({"data.validation": 0.4})
    assert (old.train.validate_by, old.data.validation_classes) == ("recall", 0)
    run = bier.train(old, tmp_path / "run")
    assert (run.untrained, run.distractors) == (None, 0)
    assert all("validation_map" not in row for row in Run(run.folder).metrics())


@pytest.mark.parametrize(("classes", "expected"), [(8, 2), (41, 10), (79, 19), (80, 20), (150, 20), (300, 30), (3, 1)])
def test_how_many_classes_are_held_out(classes: int, expected: int) -> None:
    everything = Part(
        np.zeros((8 * classes, 4), np.float32),
        np.repeat(np.arange(2 * classes), 4),
        tuple(map(str, range(2 * classes))),
    )
    plan = DataConfig(validation=0.1, validation_classes=20)
    dataset = divide("mine", everything, plan, (1,))
    assert dataset["validation"].present == expected
    assert dataset["train"].present == classes - expected
    assert dataset.split["validation_classes"] == 20


def test_a_share_that_was_asked_for_is_taken_as_it_is() -> None:
    assert resolve("bier", "folder").data.validation_classes == 20
    assert resolve("bier", "folder", {"data.validation": 0.1}).data.validation_classes == 0
    assert (
        resolve("bier", "folder", {"data.validation": 0.1, "data.validation_classes": 5}).data.validation_classes == 5
    )


def parts(train: int, validation: int, shared: bool = False) -> Dataset:
    def part(prefix: str, classes: int) -> Part:
        names = tuple(f"{'' if shared else prefix}{number}" for number in range(classes))
        return Part(np.zeros((40 * classes, 4), np.float32), np.repeat(np.arange(classes), 40), names)

    return Dataset("mine", {"train": part("t", train), "validation": part("v", validation)}, (1,))


def test_distractors_are_bounded_and_never_of_a_query_s_class() -> None:
    few = distractors_of(parts(10, 5))
    assert few.tolist() == list(range(400))
    many = distractors_of(parts(100, 20))
    assert len(many) == len(set(many.tolist())) == MOST_DISTRACTORS
    assert len(set((many // 40).tolist())) == 100  # of every class
    assert not len(distractors_of(parts(100, 50)))
    assert not len(distractors_of(parts(10, 5, shared=True)))


def test_distractors_of_pictures(pictures: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "data.root": str(pictures), "model.backbone": "conv4", "data.validation": 0.5}
    setup = build(resolve("a-bier", "folder", settings), Run(tmp_path / "run"), lambda *_: None)
    validation = setup.validation
    assert validation is not None
    assert (validation.count, validation.distractors, len(validation.inputs)) == (16, 16, 32)
    assert 0 <= validation.measure(setup.objective).recall <= 100


@pytest.mark.parametrize(
    ("sizes", "protocol", "classes", "images"),
    [
        ([10] * 2_000, "self", 500, 5_000),
        ([10] * 400, "self", 400, 4_000),  # few enough
        ([4_000, 4_000, 4_000], "self", 2, 5_000),
        ([1_000] * 10, "accuracy", 10, 5_000),
    ],
)
def test_validation_has_a_cap(sizes: list[int], protocol: Any, classes: int, images: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    names = tuple(map(str, range(len(sizes))))
    part = Part(np.arange(2 * len(labels), dtype=np.float32).reshape(-1, 2), labels, names)
    dataset = Dataset("many", {"train": part, "validation": part}, (1,), protocol)
    fewer, again = (with_fewer_validated(dataset)["validation"] for _ in range(2))
    assert (fewer.present, len(fewer)) == (classes, images)
    assert np.array_equal(fewer.images, again.images)
    if classes not in (2, 10):
        whole = np.bincount(labels)
        assert all(np.bincount(fewer.labels)[label] == whole[label] for label in np.unique(fewer.labels))


def test_a_run_measures_so_many(
    cli: Callable[..., tuple[int, str, str]], features_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the command line; the run says how many, and which share of the time it took."""
    monkeypatch.setattr("bier.training.setup.MOST_VALIDATED", 30)
    options = ["--set", "data.validation=0.5", "--set", "train.batch_classes=2", "--set", "train.validate_every=2"]
    command = [
        "train",
        "--data",
        "features",
        "--root",
        features_file,
        *options,
        "--steps",
        4,
        "--out",
        tmp_path / "run",
    ]
    code, _, said = cli(*command, "--set", "data.test_share=0.2", "--out", tmp_path / "run")
    assert code == 0, said
    assert "; 24 validation images, searched among each other and" in said  # two classes of 12
    assert "% of it validation. Next: bier evaluate" in said.splitlines()[-1]
