"""How a benchmark hands over its figures.

    report = Report("loss", packages=["pytorch-metric-learning"])
    report.figure("time of BoostedLoss", "of three ContrastiveLoss", 0.37, "x", at_most=0.5)
    report.table("memory", ["", "MB"], [["BoostedLoss", 10.0], ["ContrastiveLoss x 3", 13.9]])
    report.save()

Every call prints what it is given. `save` writes NAME.json into the folder that the environment variable
BIER_BENCHMARKS names, which `make bench` sets; a script that is started by hand only prints.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = "BIER_BENCHMARKS"
NOTE = "BIER_BENCHMARKS_NOTE"
CORES = "BIER_BENCHMARKS_CORES"


def cores() -> int:
    """The cores that this process may use; `taskset` can make them fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if CORES in os.environ:  # importing torch can undo `taskset`: back to what run.py was started with
    os.sched_setaffinity(0, map(int, os.environ[CORES].split(",")))


def clock() -> float:
    """Seconds by the clock; on a single core those of the processor, which other work on that core does not stretch."""
    return time.process_time() if cores() == 1 else time.perf_counter()


def memory(field: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1e3
    raise SystemExit(f"no {field} in /proc/self/status: this benchmark needs Linux")


def machine() -> str:
    """Processor, bfloat16 arithmetic, memory and cores, as far as the system tells."""
    info, memory_info = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    parts = [known.get("model name") or platform.processor() or platform.machine()]
    if known:
        parts.append("bfloat16" if {"avx512_bf16", "amx_bf16"} & set(known.get("flags", "").split()) else "no bfloat16")
    if memory_info.is_file():
        parts.append(f"{int(memory_info.read_text().split()[1]) / 1e6:.0f} GB")
    return ", ".join([*parts, f"{cores()} of {os.cpu_count()} cores"])


def cell(value: object) -> str:
    """A number with three digits that count, anything else as it is."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 or abs(value) < 0.001 else f"{value:.3g}"


class Report:
    """The figures of one benchmark, printed as they come."""

    def __init__(self, name: str, packages: Sequence[str] = (), seed: int = 0) -> None:
        """`packages`: the distributions besides torch whose version matters."""
        self.started = time.perf_counter()
        self.record: dict[str, Any] = {
            "benchmark": name,
            "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
            "date": str(date.today()),
            "machine": machine(),
            "load": round(os.getloadavg()[0], 1),
            "note": os.environ.get(NOTE, ""),
            "seed": seed,
            "versions": {one: version(one) for one in ("torch", *packages)},
            "figures": [],
            "tables": [],
            "growth": [],
        }
        versions = ", ".join(f"{one} {number}" for one, number in self.record["versions"].items())
        print(f"{self.record['command']}, {self.record['date']}, seed {seed}, {versions}")
        print(f"{self.record['machine']}, load {self.record['load']}", self.record["note"], sep="; ", flush=True)

    def figure(
        self,
        what: str,
        against: str,
        value: float,
        unit: str = "x",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """A figure and its goal. `against` says what it is compared with; the unit `x` marks a ratio."""
        sign, goal = ("<=", at_most) if at_most is not None else (">=", at_least)
        met = None if goal is None else value <= goal if sign == "<=" else value >= goal
        line = {"what": what, "against": against, "value": value, "unit": unit}
        self.record["figures"].append(line | ({} if goal is None else {"sign": sign, "goal": goal, "met": met}))
        wanted = "" if goal is None else f"   goal {sign} {goal:g}: {'met' if met else 'MISSED'}"
        print(f"{what}, {against}: {cell(float(value))} {unit}{wanted}", flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """The first column holds names, the others numbers."""
        self.record["tables"].append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})
        lines = [list(columns), *([cell(value) for value in row] for row in rows)]
        first, *others = (max(len(line[column]) for line in lines) for column in range(len(columns)))
        print(f"\n{title}")
        for name, *values in lines:
            print(f"  {name:{first}}" + "".join(f"  {one:>{width}}" for one, width in zip(values, others, strict=True)))
        print(flush=True)

    def growth(
        self, title: str, size: str, unit: str, sizes: Sequence[int], series: Mapping[str, Sequence[float]]
    ) -> None:
        """The same at growing sizes: `size` says what grows, `series` has one value for each of `sizes`."""
        self.record["growth"].append(
            {"title": title, "size": size, "unit": unit, "sizes": list(sizes)}
            | {"series": {name: list(values) for name, values in series.items()}}
        )
        columns = [f"{size}, {unit}", *(f"{one:,}" for one in sizes), "exponent"]
        rows = [[name, *map(cell, values), f"{exponent(sizes, values):.2f}"] for name, values in series.items()]
        print(f"\n{title}")
        for name, *others in (columns, *rows):
            print(f"  {name:34}" + "".join(f"{one:>12}" for one in others))
        print(flush=True)

    def save(self) -> None:
        self.record["seconds"] = round(time.perf_counter() - self.started)
        if folder := os.environ.get(FOLDER):
            file = Path(folder) / f"{self.record['benchmark']}.json"
            file.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """b of the curve a * size ** b nearest to the values (least squares of the logarithms)."""
    import numpy as np

    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
