"""The figures of method.md: python docs/figures.py OUT

Writes OUT/method.svg, how the parts belong together, and OUT/weights.svg, the boosting weights of equation (7).
"""

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

import bier
from bier.method.losses import pair_weight

INK, SOFT, COLOURS = "#1f2328", "#57606a", ("#56b4e9", "#0072b2", "#009e73")


def main(out: str) -> None:
    matplotlib.rcParams |= {"svg.hashsalt": "bier", "font.size": 10, "text.color": INK}
    for name, draw, size in (("method", parts, (8, 3.3)), ("weights", weights, (6, 2.8))):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        draw(axes)
        figure.savefig(Path(out) / f"{name}.svg", metadata={"Date": None})


def parts(axes: Axes) -> None:
    """From the image to the boosted learners, and the diversity loss between them."""
    groups = bier.group_sizes(512, 3)
    axes.set(xlim=(0, 10), ylim=(0, 4.2))
    axes.axis("off")
    box(axes, 0.1, 1.7, 1.2, 0.9, "images")
    box(axes, 2.0, 1.7, 1.4, 0.9, "backbone\n$\\phi(x)$")
    for number, (size, colour, y) in enumerate(zip(groups, COLOURS, (3.2, 1.75, 0.3), strict=True), 1):
        box(axes, 4.4, y, 1.8, 0.8, f"learner {number}\n$f_{number}$: {size} dimensions", colour)
        box(axes, 7.6, y, 2.2, 0.8, f"loss of learner {number}\n$w^{number}\\,\\ell(s_{number}, y)$")
        arrow(axes, (3.4, 2.15), (4.4, y + 0.4))
        arrow(axes, (6.2, y + 0.4), (7.6, y + 0.4))
    arrow(axes, (1.3, 2.15), (2.0, 2.15))
    for y in (3.2, 1.75):
        arrow(axes, (8.7, y), (8.7, y - 0.65), COLOURS[1])
        axes.text(8.8, y - 0.33, "weights of the pairs", va="center", color=COLOURS[1], fontsize=8)
        arrow(axes, (5.3, y), (5.3, y - 0.65), "#d55e00", "<->")
        axes.text(5.4, y - 0.33, "diversity loss", va="center", color="#d55e00", fontsize=8)


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str = SOFT) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc="white", ec=colour, lw=1.6))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = SOFT, style: str = "->"
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": colour, "lw": 1.3})


def weights(axes: Axes) -> None:
    """Weight of a pair for the next learner, over its score by the learners so far."""
    score = torch.linspace(-1, 1, 400)
    loss = bier.BinomialDeviance()
    for same, colour, name in ((True, COLOURS[1], "two images of one class"), (False, "#d55e00", "of two classes")):
        axes.plot(
            score, pair_weight(loss, score, torch.full_like(score, same, dtype=torch.bool)), color=colour, label=name
        )
    axes.set(xlabel="score of the learners so far, $s^m$", ylabel="weight $w^{m+1}$", xlim=(-1, 1), ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left")


if __name__ == "__main__":
    main(*sys.argv[1:])
