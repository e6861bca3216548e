"""Writes docs/benchmarks.md from the JSON files of the benchmarks: the text stays, the marked tables are replaced."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import cell, exponent
from bier.paper.tables import fill

Record = dict[str, Any]


def read(results: Path) -> list[Record]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*.json"))]


def rows(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    return "\n".join([head, *(f"| {' | '.join(map(cell, line))} |" for line in lines)])


def ratios(records: Sequence[Record]) -> str:
    """Every figure that has a goal."""
    lines, met = [], []
    for record in records:
        for one in record["figures"]:
            if "goal" not in one:
                continue
            goal = f"{ {'<=': '≤', '>=': '≥'}[one['sign']] } {one['goal']:g}"
            value = f"{cell(float(one['value']))} {one['unit']}".strip()
            reached = "met" if one["met"] else "**missed**"
            lines.append((f"`{record['benchmark']}`", one["what"], one["against"], value, goal, reached))
            met.append(one["met"])
    table = rows(("benchmark", "what", "compared with", "measured", "goal", ""), lines)
    return f"{sum(met)} of {len(met)} goals are met.\n\n{table}"


def runs(records: Sequence[Record]) -> str:
    """Where and when each benchmark was run, and for how long."""
    lines = []
    for record in records:
        name, versions = record["benchmark"], record["versions"].items()
        output = f"[{name}](results/benchmarks/{name}.txt)"
        told = ", ".join(f"{package} {number}" for package, number in versions)
        where = record["machine"] + (f"; {record['note']}" if record["note"] else "")
        lines.append((output, record["date"], f"{record['seconds'] / 60:.1f}", record["load"], told, where))
    return rows(("output", "date", "minutes", "load", "versions", "machine"), lines)


def growths(records: Sequence[Record]) -> list[Record]:
    return [one for record in records for one in record["growth"]]


def exponents(records: Sequence[Record]) -> str:
    lines = []
    for one in growths(records):
        span = f"{one['sizes'][0]:,} to {one['sizes'][-1]:,} {one['size']}"
        for name, values in one["series"].items():
            ends = f"{cell(float(values[0]))} to {cell(float(values[-1]))} {one['unit']}"
            lines.append((one["title"], name, span, ends, f"{exponent(one['sizes'], values):.2f}"))
    return rows(("what", "", "size", "time", "exponent"), lines)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def blocks(records: Sequence[Record]) -> dict[str, str]:
    """What the page can show, by the name that marks its place: `<!-- table NAME -->`."""
    found = {"ratios": ratios(records), "growth": exponents(records), "runs": runs(records)}
    for record in records:
        for table in record["tables"]:
            found[f"{record['benchmark']}-{slug(table['title'])}"] = rows(table["columns"], table["rows"])
    return found


def page_of(text: str, records: Sequence[Record]) -> str:
    """The page with its marked places filled. A benchmark that has not been run yet says how to."""
    known = blocks(records)
    for name in re.findall("<!-- table (.*?) -->", text):
        unknown = f"Not measured on this machine yet: `make bench ONLY={name.partition('-')[0]}`."
        text = fill(text, name, known.get(name, unknown)) or text
    return text


def digest(records: Sequence[Record]) -> str:
    """Of the numbers in the plots; the picture carries it, and a test compares."""
    return hashlib.sha256(json.dumps(growths(records), sort_keys=True).encode()).hexdigest()


def plot(records: Sequence[Record], file: Path) -> None:
    """One panel for each growth, both axes logarithmic: the slope of a line is its exponent."""
    from matplotlib.figure import Figure

    panels = growths(records)
    figure = Figure(figsize=(9, 3.4 * ((len(panels) + 1) // 2)), layout="constrained")
    for number, one in enumerate(panels, start=1):
        axes = figure.add_subplot((len(panels) + 1) // 2, 2, number)
        for (name, values), mark in zip(one["series"].items(), "osD^vPX*", strict=False):
            label = f"{name}: {exponent(one['sizes'], values):.2f}"
            axes.loglog(one["sizes"], values, marker=mark, markersize=4, label=label)
        axes.set_title(one["title"], fontsize=10)
        axes.set_xticks(one["sizes"], [f"{size:,}" for size in one["sizes"]], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel(one["size"], fontsize=8)
        axes.set_ylabel(one["unit"], fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        axes.grid(alpha=0.3)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.5)  # room for the legend
        axes.legend(loc="upper left", fontsize=7, frameon=False, title="exponent", title_fontsize=7)
    figure.savefig(file, dpi=100, metadata={"Description": digest(records), "Software": None})


def write_page(results: Path) -> None:
    """docs/benchmarks.md and docs/images/growth.png from docs/results/benchmarks."""
    docs = results.parents[1]
    records = read(results)
    page = docs / "benchmarks.md"
    page.write_text(page_of(page.read_text(encoding="utf-8"), records), encoding="utf-8")
    if growths(records):
        plot(records, docs / "images" / "growth.png")
