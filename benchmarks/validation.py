"""Does validation keep a good model? `python benchmarks/validation.py --data folder --root photos --out RUN`.

Trains one run, keeps its model at every validation, measures each of them on the test classes, and compares the one
that `bier train` keeps with the best of them. `--set NAME=VALUE` changes settings, as in `bier train`; results of a run
that was interrupted are completed. Goal: the kept model is at most 0.5 points of R@1 below the best checkpoint.
"""

import argparse
import json
import os
import platform
import tempfile
from datetime import date
from pathlib import Path

import torch

import bier
from bier.config import parse_settings
from bier.data import load
from bier.evaluate.dataset import assess, assess_untrained
from bier.runs import Run
from bier.training import resolve, train

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
MOST_BELOW = 0.5


def measured(run: Path, steps: list[int], cache: Path | None) -> dict[int, tuple[float, float]]:
    """R@1 and MAP@R on the test classes at each step; 0 is the untrained backbone."""
    config = Run(run).config
    dataset, file = load(config.data), run / "test.json"
    known = {int(step): tuple(row) for step, row in json.loads(file.read_text()).items()} if file.is_file() else {}
    for step in (step for step in steps if step not in known):
        if step:
            result = assess(bier.load(Run(run).model(step)), dataset, cache=cache).result
        else:
            found = assess_untrained(run, dataset, cache=cache)
            assert found is not None
            result = found.result
        known[step] = (result.recall["ensemble"][1], result.map_at_r)
        file.write_text(json.dumps(known))
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="folder")
    parser.add_argument("--root", type=Path, default=SHARED / "grocery")
    parser.add_argument("--method", default="a-bier")
    parser.add_argument("--out", type=Path, help="the run folder, which is then kept")
    parser.add_argument("--cache", type=Path, help="where decoded pixels and maps are kept")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    if not options.root.exists():
        print(f"There are no pictures at {options.root}: nothing was measured. Name a folder with --root.")
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(options, options.out or Path(folder) / "run")


def measure(options: argparse.Namespace, out: Path) -> None:
    settings = parse_settings(options.set) | {"data.root": str(options.root), "data.cache": str(options.cache or "")}
    config = resolve(options.method, options.data, settings)
    every = config.train.validate_every
    steps = [*range(every, config.train.steps, every), config.train.steps]
    done = train(config, out, resume=Run(out).exists, snapshots=steps)
    validation = {row["step"]: row for row in Run(out).metrics() if "validation" in row}
    test = measured(out, [0, *steps], options.cache)

    print(f"{options.data}, {config.model.backbone}, {options.method}, seed {config.seed}, {config.train.steps} steps")
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {date.today()}")
    print(f"{'step':>6s}{'validation R@1':>16s}{'MAP@R':>8s}{'test R@1':>10s}{'MAP@R':>8s}")
    for step in [0, *steps]:
        row, (recall, precision) = validation.get(step, {}), test[step]
        seen = [row.get("validation", float("nan")), row.get("validation_map", float("nan"))]
        mark = "  kept" if step == done.best_step else ""
        print(f"{step:6d}{seen[0]:16.2f}{seen[1]:8.2f}{recall:10.2f}{precision:8.2f}{mark}")
    kept, best = test[done.best_step or config.train.steps][0], max(row[0] for row in test.values())
    print(f"kept {kept:.2f}, best {best:.2f}, last {test[steps[-1]][0]:.2f}: {best - kept:.2f} below the best", end=" ")
    print(f"(goal: at most {MOST_BELOW})")


if __name__ == "__main__":
    main()
