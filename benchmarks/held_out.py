"""Comparisons of settings on training images that are held out: the last 40 of the 100 training classes of CUB, or the
fifth batch of CIFAR-10. Test images are never looked at.

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

CUB: Mapping[str, Any] = {
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
CIFAR10: Mapping[str, Any] = {
    "model.backbone": "cifar10-quick",
    "train.steps": 8000,
    "train.validate_every": 1000,
    "train.checkpoint_every": 1000,
    "train.keep_checkpoints": 1,
}
SHARED = {"cub": CUB, "cifar10": CIFAR10}
RATES = {"baseline": 1e-4, "bier": 3e-5, "a-bier": 1e-4}  # found on the same classes with smaller pictures
METHODS = tuple(RATES)
STEPS = {"start_steps": setup.START_STEPS}
Trial = tuple[str, str, Mapping[str, Any]]  # data, method, what is set; `start_steps` are those of the solved start
GRID = [(rate, factor) for rate in (3e-5, 1e-4) for factor in (10.0, 2.0)]


def _grid(method: str, rate: float, factor: float, **more: float) -> Trial:
    """A point of the grid, at the paper's cost and with regressors at the backbone's rate, as the authors have them."""
    regressors = {"diversity.factor": 1.0} if method == "a-bier" else {}
    point = {"train.learning_rate": rate, "train.embedding_factor": factor}
    return "cub", method, {"loss.cost": 25.0, **point, **regressors, **more}


def _quick(method: str, **more: float) -> list[Trial]:
    """A row of CIFAR-10-Quick with both solvers at their usual rates and two decays, the same for every row."""
    solvers = [
        {"train.optimizer": "adam", "train.learning_rate": 1e-3},
        {"train.optimizer": "sgd", "train.learning_rate": 1e-2},
    ]
    return [
        ("cifar10", method, {**solver, "train.weight_decay": decay, **more})
        for solver in solvers
        for decay in (1e-3, 4e-3)
    ]


COMPARISONS: Mapping[str, Sequence[Trial]] = {
    "start": [("cub", "bier", {"start_steps": steps, "loss.cost": 10.0}) for steps in (20, 600)],
    **{
        "cost" if method == "bier" else f"cost-{method}": [
            ("cub", method, {"loss.cost": cost}) for cost in (10.0, 25.0)
        ]
        for method in METHODS
    },
    "lambda": [_grid("a-bier", 3e-5, 10.0, **{"diversity.weight": weight}) for weight in (1e-2, 1e-1, 1e-3)],
    "grid": [_grid(method, *point) for point in GRID for method in METHODS],
    "cifar10": [
        *_quick("baseline"),
        *(trial for rate in (0.3, 0.5) for trial in _quick("baseline", **{"loss.dropout": rate})),
        *(trial for weight in (30.0, 100.0) for trial in _quick("activation-bier", **{"diversity.weight": weight})),
        *(trial for weight in (1e-2, 3e-2) for trial in _quick("a-bier", **{"diversity.weight": weight})),
    ],
}


def run(trial: Trial, seed: int, options: argparse.Namespace) -> None:
    data, method, changes = trial
    changes = {**STEPS, **({"train.learning_rate": RATES[method]} if data == "cub" else {}), **changes}
    steps = int(changes["start_steps"])
    settings = {key: value for key, value in changes.items() if key not in STEPS}
    config = resolve(method, data, {**SHARED[data], **settings, "seed": seed})
    flat = {key: value for key, value in config.flat().items() if key != "data.root"}
    flat = json.loads(json.dumps(flat).replace("Infinity", '"inf"'))
    if any((line["start_steps"], line["settings"]) == (steps, flat) for line in lines(options.out)):
        return
    paths = {"data.root": str(options.root), "data.cache": str(options.cache)}
    if data == "cub":
        paths["model.weights"] = str(options.root / "bvlc_googlenet.caffemodel")
    folder = options.cache / "runs" / name_of((data, method, changes), seed)
    setup.START_STEPS = steps
    began, used = time.perf_counter(), time.process_time()
    resume = (folder / "config.toml").exists()
    done = bier.train(config.with_settings(paths), folder, resume=resume, same=False)
    if done.interrupted:
        raise SystemExit(130)
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [[row["step"], row["validation"], *row["validation_learners"]] for row in curve if "validation" in row]
    seconds = {"seconds": round(time.perf_counter() - began), "processor": round(time.process_time() - used)}
    line = {"data": data, "method": method, "start_steps": steps, "seed": seed}
    line |= {"best": max(row[1] for row in curve), "last": curve[-1][1], "curve": curve, **seconds}
    line |= {"resumed": resume, "settings": flat}
    with FileLock(f"{options.out}.lock"):
        text = "".join(json.dumps(line) + "\n" for line in [*lines(options.out), line])
        files.write(options.out, text.encode())


def name_of(trial: Trial, seed: int) -> str:
    data, method, changes = trial
    return "-".join([data, method, *(f"{key.rpartition('.')[2]}={value}" for key, value in changes.items()), str(seed)])


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
        for trial in (trial for name in options.comparisons for trial in COMPARISONS[name]):
            try:
                with FileLock(options.cache / "locks" / name_of(trial, seed), timeout=0):
                    run(trial, seed, options)
            except Timeout:
                continue


if __name__ == "__main__":
    main()
