"""Trains on the first 60 training classes of CUB and measures on the last 40: comparisons of settings.

    python benchmarks/held_out.py --root DATA --cache CACHE --out docs/results/held-out-full.jsonl start cost

Each comparison is a list of runs, all alike but for what is compared. A run whose line is there is not made again; one
that was stopped goes on from its checkpoint. The runs of several processes with the same OUT are shared among them.
"""

import argparse
import json
import time
from collections.abc import Mapping
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
# What each comparison runs: method, steps of the solved start, cost of negative pairs.
COMPARISONS: Mapping[str, list[tuple[str, int, float]]] = {
    "start": [("bier", 20, 10.0), ("bier", 600, 10.0)],
    "cost": [("bier", 20, 10.0), ("bier", 20, 25.0)],
    "cost-a-bier": [("a-bier", 20, 10.0), ("a-bier", 20, 25.0)],
    "cost-baseline": [("baseline", 20, 10.0), ("baseline", 20, 25.0)],
}


def run(method: str, start: int, cost: float, seed: int, options: argparse.Namespace) -> None:
    what = {"method": method, "start_steps": start, "cost": cost, "seed": seed}
    if what in [{key: line[key] for key in what} for line in lines(options.out)]:
        return
    config = resolve(method, "cub", {**SHARED, "loss.cost": cost, "train.learning_rate": RATES[method], "seed": seed})
    paths = {"data.root": str(options.root), "data.cache": str(options.cache)}
    paths["model.weights"] = str(options.root / "bvlc_googlenet.caffemodel")
    folder = options.cache / "runs" / "-".join(map(str, what.values()))
    setup.START_STEPS = start
    began, used = time.perf_counter(), time.process_time()
    resume = (folder / "config.toml").exists()
    done = bier.train(config.with_settings(paths), folder, resume=resume, same=False)
    if done.interrupted:
        raise SystemExit(130)
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [[row["step"], row["validation"], *row["validation_learners"]] for row in curve if "validation" in row]
    seconds = {"seconds": round(time.perf_counter() - began), "processor": round(time.process_time() - used)}
    settings = {key: value for key, value in config.flat().items() if not key.startswith("data.root")}
    line = {**what, "best": max(row[1] for row in curve), "last": curve[-1][1], "curve": curve, **seconds}
    line |= {"resumed": resume, "settings": json.loads(json.dumps(settings).replace("Infinity", '"inf"'))}
    with FileLock(f"{options.out}.lock"):
        text = "".join(json.dumps(one) + "\n" for one in [*lines(options.out), line])
        files.write(options.out, text.encode())


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
        for method, start, cost in dict.fromkeys(row for name in options.comparisons for row in COMPARISONS[name]):
            try:
                with FileLock(options.cache / "locks" / f"{method}-{start}-{cost}-{seed}", timeout=0):
                    run(method, start, cost, seed, options)
            except Timeout:
                continue


if __name__ == "__main__":
    main()
