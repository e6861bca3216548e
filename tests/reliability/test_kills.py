"""SIGKILL at random moments of train, embed, index and paper runs; and two processes on one place."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.timeout(7200)
def test_killed_commands_end_as_if_nothing_had_happened(tally: Any, soak: bool, tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_commands.py")
    kills = 50 if soak else 4
    arguments = [sys.executable, script, tmp_path, kills, 0, "train", "embed", "index", "paper"]
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, env=QUIET, check=False)
    assert done.returncode == 0, done.stderr
    for name, cases in json.loads(done.stdout).items():
        assert len(cases) >= kills
        for survived, lost, note in cases:
            tally.case(f"kills: {name}", survived, lost, note)
