"""Trains a run that chooses its loss, and kills it at a moment. Run by test_choice.py in a process of its own.

    python killed_choice.py CONFIG FOLDER MOMENT

MOMENT is what the observer is told, such as `trying multi-similarity 3`; or `becoming`, before config.toml names the
loss; or `never`.
"""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bier.config import Config
from bier.runs import Run
from bier.training import choice, train
from bier.training.loop import NullObserver

choice.LEAST_STEPS = 40


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killing(NullObserver):
    def __init__(self, moment: str) -> None:
        self.moment = moment

    def prepare(self, what: str, done: int, total: int) -> None:
        if f"{what} {done}" == self.moment:
            kill()


class KilledRun(Run):
    def write_config(self, config: Config, records: Mapping[str, Mapping[str, Any]]) -> None:
        if "loss" in records["choice"]:
            kill()
        super().write_config(config, records)


def main() -> None:
    config, folder, moment = Config.from_toml(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if moment == "becoming":
        from bier.training import loop

        loop.Run = KilledRun  # type: ignore[misc]
    train(config, folder, resume=(folder / "config.toml").exists(), observer=Killing(moment), choose_loss=True)


if __name__ == "__main__":
    main()
