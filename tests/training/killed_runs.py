"""Trains one config twice: in one go, and killed again and again. Run by test_resume.py in a process of its own.

    python killed_runs.py CONFIG FOLDER KILLS SEED LONGEST

Every attempt is a fork of this process, which has imported everything and computed nothing yet: a start costs no time,
and SIGKILL is as real as ever. It prints a JSON object that says at which steps the run was taken up again.
"""

import json
import multiprocessing
import random
import signal
import sys
import time
from pathlib import Path

import torch

from bier.config import Config
from bier.runs import Run, step_of
from bier.training import train

Fork = multiprocessing.get_context("fork")


def attempt(config: Config, folder: Path) -> None:
    torch.set_num_threads(1)
    train(config, folder, resume=(folder / "config.toml").exists())


def start(config: Config, folder: Path) -> multiprocessing.Process:
    process = Fork.Process(target=attempt, args=(config, folder))
    process.start()
    return process


def reached(folder: Path) -> int:
    found = Run(folder).newest()
    return 0 if found is None else step_of(found)


def main() -> None:
    config, folder = Config.from_toml(Path(sys.argv[1])), Path(sys.argv[2])
    kills, longest = int(sys.argv[3]), float(sys.argv[5])
    draw = random.Random(int(sys.argv[4]))
    whole = start(config, folder / "whole")
    whole.join()
    assert whole.exitcode == 0
    resumed_at: list[int] = []
    broken = folder / "broken"
    while len(set(resumed_at) - {0}) < kills:
        begun_at = reached(broken)
        process = start(config, broken)
        # Mostly a random moment after some progress, so that the run comes to its end; now and then one before it.
        early = draw.random() < 0.2
        while process.is_alive() and not early and reached(broken) == begun_at:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, longest))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            sys.exit(f"ended by itself ({process.exitcode}) after {len(resumed_at)} kills, at step {reached(broken)}")
        resumed_at.append(reached(broken))
    last = start(config, broken)
    last.join()
    assert last.exitcode == 0
    print(json.dumps(resumed_at))


if __name__ == "__main__":
    main()
