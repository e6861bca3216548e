"""With gather_distributed=True the losses are right in a DistributedDataParallel loop of the user's own."""

import json
from pathlib import Path
from typing import Any


def test_gradients_of_two_processes_are_those_of_one(forked: Any, tmp_path: Path) -> None:
    script = Path(__file__).with_name("ddp_loop.py")
    differences = json.loads(forked.finished(forked.start(tmp_path, script=script)))
    apart = {case: differences.pop(case) for case in list(differences) if "apart" in case}
    assert len(apart) == 4
    assert min(apart.values()) > 1e-3
    assert len(differences) == 44
    assert {case: value for case, value in differences.items() if not value <= 1e-9} == {}
