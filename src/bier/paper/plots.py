"""The paper's figures from result files: curves over groups or lambda_div, ours solid, the paper's dashed."""

from pathlib import Path

from bier.durable import file_aside
from bier.evaluate.plots import GREY, LEARNERS, MARKS, new_figure, save
from bier.paper.tables import Table, table_path


def write_plot(table: Table, out: Path) -> Path | None:
    """OUT/tables/NAME-BUDGET.png, where the experiment has a figure and results to draw."""
    figure_of = table.experiment.figure
    lines = [line for line in table.lines if line.row.series and not line.learner]
    if figure_of is None or not any("recall" in line.ours for line in lines):
        return None
    figure, (ax,) = new_figure(6.4, 4.2)
    for number, series in enumerate(dict.fromkeys(line.row.series for line in lines)):
        mine = sorted((line for line in lines if line.row.series == series), key=lambda line: line.row.x)
        colour, mark = LEARNERS[number % len(LEARNERS)], MARKS[number % len(MARKS)]
        ours = [line for line in mine if "recall" in line.ours]
        ax.errorbar(
            [line.row.x for line in ours],
            [line.ours["recall"].mean for line in ours],
            yerr=[line.ours["recall"].deviation or 0.0 for line in ours],
            color=colour,
            marker=mark,
            capsize=3,
            label=series,
        )
        paper = [line for line in mine if "recall" in line.paper]
        if paper:
            x, y = [line.row.x for line in paper], [line.paper["recall"] for line in paper]
            label = f"{series}, paper"
            ax.plot(x, y, "--", color=colour, marker=mark, markerfacecolor="white", linewidth=1, label=label)
    if figure_of.logarithmic:
        ax.set_xscale("log")
    else:
        ax.set_xticks(sorted({line.row.x for line in lines}))
    ax.set_xlabel(figure_of.x_label)
    ax.set_ylabel("Recall@1 (%)")
    ax.set_title(f"{figure_of.title}\nbudget {table.budget.name}, {table.seeds} seed(s)", fontsize=10, color=GREY)
    ax.legend(frameon=False, fontsize=8)
    path = table_path(table, out, "png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_aside(path) as aside:
        save(figure, aside)
    return path
