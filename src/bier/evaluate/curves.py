"""The curves of a training run, from the rows of its `metrics.jsonl`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bier.evaluate.plots import BLUE, GREEN, INK, LEARNERS, ORANGE, PURPLE, VERMILLION, new_figure

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

    A row holds `step` and any numbers, lists of one number a learner, or mappings of these. Which panel a key belongs
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
    """A key such as validation_loss fits two panels; the last, more special one, has it."""
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
