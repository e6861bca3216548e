"""With gather_distributed=True the losses are right in a DistributedDataParallel loop of the user's own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ddp_loop.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout)
    apart = {case: differences.pop(case) for case in list(differences) if "apart" in case}
    assert len(apart) == 4
    assert min(apart.values()) > 1e-3
    assert len(differences) == 44
    assert {case: value for case, value in differences.items() if not value <= 1e-9} == {}
