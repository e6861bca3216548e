"""Figures of an evaluation and of a training run, as matplotlib Figures without any global state."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter
from numpy.typing import NDArray

from bier.evaluate.distribution import Distribution

# Okabe and Ito's palette, which colour-blind people can tell apart
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, INK, GREY = "#CC79A7", "#56B4E9", "#1F2328", "#8C959F"
LEARNERS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, "#B8A800")
MARKS = ("o", "s", "^", "D", "v", "P", "X")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, sharp on dense screens."""
    figure.savefig(path, dpi=160, facecolor="white", format="png")


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.06))
    FigureCanvasAgg(figure)
    axes = list(np.ravel(figure.subplots(rows, columns)))
    for ax in axes:
        _dress(ax)
    return figure, axes


def _dress(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(colors=INK, labelsize=9, length=3)
    ax.grid(True, axis="y", color="#E6E8EB", linewidth=0.8)
    ax.set_axisbelow(True)


def recall_curve(
    recall: Mapping[str, Mapping[int, float]], others: Mapping[str, Mapping[int, float]] | None = None
) -> Figure:
    """Recall over K: the ensemble, each learner and, dashed, other runs to compare with."""
    figure, (ax,) = new_figure(6.4, 4.0)
    learners = [name for name in recall if name.startswith("learner-")] if len(recall) > 2 else []
    for m, name in enumerate(learners):
        label, mark, colour = name.replace("-", " "), MARKS[m % len(MARKS)], LEARNERS[m % len(LEARNERS)]
        ks, values = list(recall[name]), list(recall[name].values())
        ax.plot(ks, values, label=label, linewidth=1.4, markersize=4.5, marker=mark, color=colour)
    for m, (name, row) in enumerate((others or {}).items()):
        line = ("--", ":", "-.")[m % 3]
        ax.plot(list(row), list(row.values()), line, color=GREY, linewidth=1.8, label=name)
    whole = recall["ensemble"]
    name = "ensemble" if learners else "embedding"
    ax.plot(list(whole), list(whole.values()), "o-", color=INK, linewidth=2.4, markersize=5.5, label=name)
    ax.set_xscale("log")
    ax.set_xticks(list(whole))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("K")
    ax.set_ylabel("Recall@K (%)")
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def feature_heat_map(correlation: NDArray[np.float64], groups: Sequence[int]) -> Figure:
    """Absolute correlation between dimensions, lighter the less, with the learners' borders drawn."""
    figure, (ax,) = new_figure(5.6, 4.9)
    ax.grid(False)
    strength = np.abs(correlation)
    off = strength[~np.eye(len(strength), dtype=bool)]
    top = max(0.1, float(np.quantile(off, 0.995))) if off.size else 1.0
    image = ax.imshow(strength, cmap="magma_r", vmin=0, vmax=min(1.0, top), interpolation="nearest")
    edges = np.cumsum([0, *groups]) - 0.5
    for edge in edges[1:-1]:
        ax.axhline(edge, color=BLUE, linewidth=1.6)
        ax.axvline(edge, color=BLUE, linewidth=1.6)
    centres = (edges[:-1] + edges[1:]) / 2
    if len(groups) > 1:
        ax.set_xticks(centres, [f"{m + 1}\n({size})" for m, size in enumerate(groups)])
        ax.set_yticks(centres, [f"{m + 1} ({size})" for m, size in enumerate(groups)])
    ax.spines[:].set_visible(False)
    ax.set_xlabel("learner (dimensions)" if len(groups) > 1 else "dimension")
    figure.colorbar(image, ax=ax, shrink=0.9, extend="max" if top < 1 else "neither", label="|correlation|")
    return figure


def learner_heat_map(correlation: NDArray[np.float64]) -> Figure:
    """Correlation between the learners' scores, with the numbers written in."""
    size = len(correlation)
    figure, (ax,) = new_figure(max(5.6, 1.2 + 0.7 * size), max(4.9, 0.9 + 0.65 * size))
    ax.grid(False)
    image = ax.imshow(correlation, cmap="Blues", vmin=0, vmax=1)
    for (row, col), value in np.ndenumerate(correlation):
        ax.text(col, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else INK)
    ax.set_xticks(range(size), [str(m + 1) for m in range(size)])
    ax.set_yticks(range(size), [str(m + 1) for m in range(size)])
    ax.set_xlabel("learner")
    ax.set_ylabel("learner")
    ax.spines[:].set_visible(False)
    figure.colorbar(image, ax=ax, shrink=0.9, label="correlation of scores")
    return figure


def similarity_histograms(distribution: Distribution) -> Figure:
    """For each learner, how the cosine scores of positive and of negative pairs spread."""
    count = len(distribution.positive)
    columns = min(count, 3)
    rows = -(-count // columns)
    width, height = (3.3 * columns + 0.4, 2.7 * rows + 0.3) if count > 1 else (5.6, 4.9)
    figure, axes = new_figure(width, height, columns, rows)
    both = np.concatenate([distribution.positive.ravel(), distribution.negative.ravel(), [0.0, 1.0]])
    bins = np.linspace(both.min(), max(1.0, both.max()), 61).tolist()
    for m, ax in enumerate(axes):
        if m >= count:
            ax.set_visible(False)
            continue
        for scores, colour, style, label in (
            (distribution.negative[m], VERMILLION, "--", "different class"),
            (distribution.positive[m], GREEN, "-", "same class"),
        ):
            if len(scores):
                ax.hist(scores, bins, density=True, histtype="stepfilled", color=colour, alpha=0.28)
                ax.hist(scores, bins, density=True, histtype="step", color=colour, linestyle=style, label=label)
        ax.set_title(f"learner {m + 1}" if count > 1 else "embedding", fontsize=10, color=INK)
        ax.set_yticks([])
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.grid(False)
        ax.spines["left"].set_visible(False)
        ax.set_xlabel("cosine similarity", fontsize=9)
    axes[0].legend(frameon=False, fontsize=8, loc="upper right")
    return figure
