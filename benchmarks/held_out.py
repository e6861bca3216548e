"""Trains on the first 60 training classes of CUB and measures on the last 40: comparisons of settings.

    python benchmarks/held_out.py --root DATA --cache CACHE --out docs/results/held-out-full.jsonl start cost

Each comparison is a list of runs, all alike but for what is compared. A run whose line is there is not made again; one
that was stopped goes on from its checkpoint. The runs of several processes with the same OUT are shared among them.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import bier
from bier import files
from bier.training import resolve, setup

SHARED: Mapping[str, Any] = {
    "data.validation": 0.4,
    "data.validation_order": "last",
    "model.backbone": "googlenet-bvlc",
    "model.trainable_from": "inception_4c",
    "model.trunk_views": 8,
    "train.steps": 500,
    "train.schedule": "cosine",
    "train.embedding_factor": 2.0,
    "train.validate_by": "recall",
    "train.validate_every": 50,
    "train.checkpoint_every": 50,
    "train.keep_checkpoints": 1,
}
RATES = {"baseline": 1e-4, "bier": 3e-5, "a-bier": 1e-4}  # found on the same classes with smaller pictures
METHODS = tuple(RATES)
STEPS = {"start_steps": setup.START_STEPS}
GRID = [(rate, factor) for rate in (3e-5, 1e-4) for factor in (10.0, 2.0)]


def _grid(method: str, rate: float, factor: float, **more: float) -> tuple[str, Mapping[str, float]]:
    """A point of the grid, at the paper's cost and with regressors at the backbone's rate, as the authors have them."""
    regressors = {"diversity.factor": 1.0} if method == "a-bier" else {}
    point = {"train.learning_rate": rate, "train.embedding_factor": factor}
    return method, {"loss.cost": 25.0, **point, **regressors, **more}


# What each comparison runs: the method and what is set. `start_steps` are those of the solved start.
COMPARISONS: Mapping[str, Sequence[tuple[str, Mapping[str, float]]]] = {
    "start": [("bier", {"start_steps": steps, "loss.cost": 10.0}) for steps in (20, 600)],
    **{
        "cost" if method == "bier" else f"cost-{method}": [(method, {"loss.cost": cost}) for cost in (10.0, 25.0)]
        for method in METHODS
    },
    "lambda": [_grid("a-bier", 3e-5, 10.0, **{"diversity.weight": weight}) for weight in (1e-2, 1e-1, 1e-3)],
    "grid": [_grid(method, *point) for point in GRID for method in METHODS],
}


def run(method: str, changes: Mapping[str, float], seed: int, options: argparse.Namespace) -> None:
    changes = {**STEPS, "train.learning_rate": RATES[method], **changes}
    steps = int(changes["start_steps"])
    settings = {key: value for key, value in changes.items() if key not in STEPS}
    config = resolve(method, "cub", {**SHARED, **settings, "seed": seed})
    flat = {key: value for key, value in config.flat().items() if key != "data.root"}
    flat = json.loads(json.dumps(flat).replace("Infinity", '"inf"'))
    if any((line["start_steps"], line["settings"]) == (steps, flat) for line in lines(options.out)):
        return
    paths = {"data.root": str(options.root), "data.cache": str(options.cache)}
    paths["model.weights"] = str(options.root / "bvlc_googlenet.caffemodel")
    folder = options.cache / "runs" / name_of(method, changes, seed)
    setup.START_STEPS = steps
    began, used = time.perf_counter(), time.process_time()
    resume = (folder / "config.toml").exists()
    done = bier.train(config.with_settings(paths), folder, resume=resume, same=False)
    if done.interrupted:
        raise SystemExit(130)
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [[row["step"], row["validation"], *row["validation_learners"]] for row in curve if "validation" in row]
    seconds = {"seconds": round(time.perf_counter() - began), "processor": round(time.process_time() - used)}
    line = {"method": method, "start_steps": steps, "cost": config.loss.cost, "seed": seed}
    line |= {"best": max(row[1] for row in curve), "last": curve[-1][1], "curve": curve, **seconds}
    line |= {"resumed": resume, "settings": flat}
    with FileLock(f"{options.out}.lock"):
        text = "".join(json.dumps(line) + "\n" for line in [*lines(options.out), line])
        files.write(options.out, text.encode())


def name_of(method: str, changes: Mapping[str, float], seed: int) -> str:
    return "-".join([method, *(f"{key.rpartition('.')[2]}={value:g}" for key, value in changes.items()), str(seed)])


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", nargs="+", choices=COMPARISONS)
    for name in ("--root", "--cache", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    (options.cache / "locks").mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for method, changes in (row for name in options.comparisons for row in COMPARISONS[name]):
            try:
                with FileLock(options.cache / "locks" / name_of(method, changes, seed), timeout=0):
                    run(method, changes, seed, options)
            except Timeout:
                continue


if __name__ == "__main__":
    main()
