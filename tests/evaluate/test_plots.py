"""Plots show the numbers they are given, hold no global state and survive sparse input."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bier.evaluate.correlation import Distribution
from bier.evaluate.report import figures
from bier.evaluate.report.figures import (
    feature_heat_map,
    learner_heat_map,
    recall_curve,
    save,
    similarity_histograms,
    training_curves,
)

RECALL = {
    "ensemble": {1: 50.0, 10: 80.0},
    "ensemble-alpha": {1: 50.0, 10: 80.0},
    "learner-1": {1: 30.0, 10: 60.0},
    "learner-2": {1: 40.0, 10: 70.0},
}


def lines(ax):
    return {line.get_label(): list(line.get_ydata()) for line in ax.lines}


def test_recall_curve():
    figure = recall_curve(RECALL, {"baseline": {1: 20.0, 10: 45.0}})
    assert lines(figure.axes[0]) == {
        "learner 1": [30, 60],
        "learner 2": [40, 70],
        "baseline": [20, 45],
        "ensemble": [50, 80],
    }
    only = recall_curve({"ensemble": {1: 5.0}, "learner-1": {1: 5.0}})
    assert lines(only.axes[0]) == {"embedding": [5]}


def test_group_borders_are_drawn_between_the_learners():
    figure = feature_heat_map(np.eye(12), (2, 4, 6))
    borders = sorted(line.get_xdata()[0] for line in figure.axes[0].lines if line.get_xdata()[0] == line.get_xdata()[1])
    assert borders == [1.5, 5.5]
    assert len(feature_heat_map(np.eye(1), (1,)).axes[0].lines) == 0


def test_learner_matrix_is_written_out():
    figure = learner_heat_map(np.array([[1.0, 0.25], [0.25, 1.0]]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["1.00", "0.25", "0.25", "1.00"]


@pytest.mark.parametrize("learners", [1, 3, 5])
def test_one_histogram_a_learner(learners, tmp_path):
    rng = np.random.default_rng(0)
    scores = rng.uniform(-1, 1, (learners, 100)).astype(np.float32)
    figure = similarity_histograms(Distribution(scores, scores[:, :0]))
    assert sum(ax.get_visible() for ax in figure.axes) == learners
    save(figure, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        assert image.size[0] > 300


def test_training_curves_sort_keys_into_panels():
    rows = [
        {"step": 0, "loss": 2.0, "learner_losses": [3.0, 1.0], "row_norm_deviation": 1e-3, "learning_rate": 0.1},
        {"step": 5, "loss": 1.0, "learner_losses": [2.0, 0.5], "weights": {"positive": [1, 0.5], "negative": [1, 0.1]}},
        {"step": 9, "diversity": 0.3, "validation": {"recall@1": 40.0}, "note": "text", "done": True},
        {"loss": 7.0},
    ]
    panels = {ax.get_title(): lines(ax) for ax in training_curves(rows).axes if ax.get_visible()}
    assert panels == {
        "losses": {"loss": [2, 1], "diversity": [0.3]},
        "loss of each learner": {"learner 1": [3, 2], "learner 2": [1, 0.5]},
        "mean boosting weight": {
            "learner 1, positive pairs": [1],
            "learner 2, positive pairs": [0.5],
            "learner 1, negative pairs": [1],
            "learner 2, negative pairs": [0.1],
        },
        "how far squared row norms are from 1": {"row norm deviation": [1e-3]},
        "validation": {"validation recall@1": [40]},
    }


@pytest.mark.parametrize("rows", [[], [{"loss": 1.0}], [{"step": 3, "note": "x"}]])
def test_nothing_to_draw(rows):
    assert training_curves(rows) is None


def test_no_global_state_of_pyplot():
    assert "pyplot" not in Path(figures.__file__).read_text()
