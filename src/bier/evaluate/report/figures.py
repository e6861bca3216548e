"""Figures of an evaluation and of a training run, as matplotlib Figures without any global state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter
from numpy.typing import NDArray

from bier.evaluate.correlation import Distribution
from bier.evaluate.thresholds import Verification

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
        _style(ax)
    return figure, axes


def _style(ax: Axes) -> None:
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


def roc_curve(same: Verification, others: Mapping[str, Verification] | None = None) -> Figure:
    """True over false accept rate, with the thresholds that were found or tested, and other runs to compare with."""
    figure, (ax,) = new_figure(6.4, 4.0)
    lowest = 10.0 ** np.floor(np.log10(max(100 / same.different, 1e-4)))
    for m, (name, other) in enumerate((others or {}).items()):
        line = ("--", ":", "-.")[m % 3]
        ax.plot(*_visible(other, lowest), line, color=GREY, linewidth=1.8, label=name)
    ax.plot(*_visible(same, lowest), color=INK, linewidth=2.2, label=f"equal error rate {same.eer:.1f} %")
    points = (("the model's threshold", same.tested, "o", VERMILLION), ("found on these images", same.found, "s", BLUE))
    for label, one, mark, colour in points:
        if one is not None:
            ax.plot([max(one.far, lowest)], [one.recall], mark, color=colour, markersize=7, label=label)
    ax.set_xscale("log")
    ax.set_xlim(lowest, 100)
    ax.set_ylim(0, 100)
    ax.set_xlabel("false accept rate (%)")
    ax.set_ylabel("true accept rate (%)")
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def _visible(same: Verification, lowest: float) -> NDArray[np.float64]:
    """The points of a ROC in percent; those without a false accept are drawn at the left edge."""
    points = 100 * same.roc
    points[0] = np.maximum(points[0], lowest)
    return points


def feature_heat_map(correlation: NDArray[np.float64], groups: Sequence[int]) -> Figure:
    """Absolute correlation between dimensions, lighter where it is lower, with lines between the learners."""
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
    """For each learner, the distribution of cosine scores of positive and of negative pairs."""
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


Rows = Sequence[Mapping[str, Any]]
COLOURS = (INK, BLUE, ORANGE, PURPLE, GREEN, VERMILLION)


class Curve(NamedTuple):
    """One line of a panel; `learner` is its number from 0 where it belongs to one learner."""

    name: str
    learner: int | None
    steps: list[float]
    values: list[float]


class Panel(NamedTuple):
    title: str
    wants: Callable[[str], bool]
    per_learner: bool
    log: bool


PANELS = (
    Panel("losses", lambda key: "loss" in key or key in ("metric", "diversity", "similarity"), False, False),
    Panel("loss of each learner", lambda key: "loss" in key, True, False),
    Panel("mean boosting weight", lambda key: "weight" in key, True, False),
    Panel("how far squared row norms are from 1", lambda key: "row_norm" in key, False, True),
    Panel("validation", lambda key: "validation" in key or "recall" in key, False, False),
)


def training_curves(rows: Rows) -> Figure | None:
    """Draw losses, boosting weights, row norms and validation over the steps; None if there is nothing to draw.

    A row holds `step` and any numbers, lists of one number per learner, or mappings of these. Which panel a key belongs
    to follows from its name, and rows need not all have the same keys.
    """
    curves = _collect(rows)
    panels = [(panel, [c for c in curves if _belongs(c, panel)]) for panel in PANELS]
    panels = [(panel, some) for panel, some in panels if some]
    if not panels:
        return None
    columns = min(2, len(panels))
    height = -(-len(panels) // columns)
    figure, axes = new_figure(4.7 * columns, 2.9 * height, columns, height)
    for (panel, some), ax in zip(panels, axes, strict=False):
        _draw(ax, panel, some)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    return figure


def _collect(rows: Rows) -> list[Curve]:
    curves: dict[tuple[str, int | None], Curve] = {}
    for row in rows:
        if not _is_number(row.get("step")):
            continue
        for name, learner, value in _numbers(row):
            curve = curves.setdefault((name, learner), Curve(name, learner, [], []))
            curve.steps.append(float(row["step"]))
            curve.values.append(value)
    return list(curves.values())


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | None, float]]:
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name} ")
        elif isinstance(value, list | tuple):
            yield from ((name, m, float(one)) for m, one in enumerate(value) if _is_number(one))
        elif key != "step" and _is_number(value):
            yield name, None, float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _belongs(curve: Curve, panel: Panel) -> bool:
    """A key such as validation_loss fits two panels; it goes to the last one, which is more specific."""
    fitting = [p for p in PANELS if p.per_learner == (curve.learner is not None) and p.wants(curve.name)]
    return bool(fitting) and fitting[-1] is panel


def _draw(ax: Axes, panel: Panel, curves: list[Curve]) -> None:
    for number, curve in enumerate(curves):
        label, colour, line = curve.name.replace("_", " "), COLOURS[number % len(COLOURS)], "-"
        if curve.learner is not None:
            negative = "negative" in curve.name
            colour, line = LEARNERS[curve.learner % len(LEARNERS)], "--" if negative else "-"
            kind = ", negative pairs" if negative else ", positive pairs" if "positive" in curve.name else ""
            label = f"learner {curve.learner + 1}{kind}"
        mark = "o" if len(curve.steps) < 12 else None
        ax.plot(curve.steps, curve.values, line, color=colour, marker=mark, markersize=3.5, linewidth=1.5, label=label)
    if panel.log and any(value > 0 for curve in curves for value in curve.values):
        ax.set_yscale("log")
    ax.set_title(panel.title, fontsize=10, color=INK)
    ax.set_xlabel("step", fontsize=9)
    if len(curves) > 1 or panel.title == "validation":
        ax.legend(frameon=False, fontsize=7.5)
