"""How the demo's settings were chosen: R@1 on validation alphabets, which are held out of the training alphabets.

    python benchmarks/demo_settings.py             every row, one seed (about 15 minutes on two cores)
    python benchmarks/demo_settings.py --seeds 3

The test alphabets play no part. Runs are kept under --out and not trained again.
"""

import argparse
import platform
import statistics
from datetime import date
from pathlib import Path

import torch

from bier.evaluate.dataset import assess
from bier.models.model import load
from bier.training import resolve, train
from bier.training.setup import load_data

ALL = {"data.train_classes": 0}
ROWS: list[tuple[str, str, dict[str, float | int]]] = [
    ("baseline, cost 5", "baseline", {}),
    ("baseline, cost 10", "baseline", {"loss.cost": 10.0}),
    ("baseline, cost 25", "baseline", {"loss.cost": 25.0}),
    ("baseline, cost 10, learning rate 3e-3", "baseline", {"loss.cost": 10.0, "train.learning_rate": 3e-3}),
    ("boosting alone, cost 5", "a-bier", {"diversity.weight": 0.0, "diversity.norm_weight": 0.0}),
    ("boosting, rows of W held, lambda_div 0", "a-bier", {"diversity.weight": 0.0}),
    ("A-BIER, cost 5, lambda_div 1e-3", "a-bier", {}),
    ("A-BIER, cost 10, lambda_div 3e-4", "a-bier", {"loss.cost": 10.0, "diversity.weight": 3e-4}),
    ("A-BIER, cost 10, lambda_div 1e-3", "a-bier", {"loss.cost": 10.0}),
    ("A-BIER, cost 10, lambda_div 3e-3", "a-bier", {"loss.cost": 10.0, "diversity.weight": 3e-3}),
    ("Activation BIER, cost 10, lambda_div 0.1", "activation-bier", {"loss.cost": 10.0, "diversity.weight": 0.1}),
    ("all classes: baseline, cost 25", "baseline", {**ALL, "loss.cost": 25.0}),
    ("all classes: A-BIER, cost 25", "a-bier", {**ALL, "loss.cost": 25.0}),
]


def recall(name: str, method: str, settings: dict[str, float | int], seed: int, out: Path) -> tuple[float, str]:
    config = resolve(
        method, "glyphs", {"data.validation": 0.2, "train.validate_every": 10_000, "seed": seed, **settings}
    )
    run = out / f"{name.replace(' ', '-').replace(',', '')}-{seed}"
    if not (run / "model").is_dir():
        train(config, run, resume=(run / "config.toml").is_file())
    result = assess(load(run), load_data(config), part="validation").result
    correlation = result.classifier_correlation
    return result.recall["ensemble"][1], "-" if correlation is None else f"{correlation:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-settings"))
    options = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}, {platform.machine()}, seeds 0 to {options.seeds - 1}")
    print(f"{'R@1 on validation alphabets':45} {'mean':>7} {'spread':>7}  classifier correlation")
    for name, method, settings in ROWS:
        found = [recall(name, method, settings, seed, options.out) for seed in range(options.seeds)]
        values = [value for value, _ in found]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name:45} {statistics.fmean(values):7.2f} {spread:7.2f}  {found[0][1]}", flush=True)


if __name__ == "__main__":
    main()
