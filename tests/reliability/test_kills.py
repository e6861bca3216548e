"""SIGKILL at random moments of train, embed, index and paper runs; and two processes on one place."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.search.embeddings import EmbeddingsWriter

Cli = Callable[..., tuple[int, str, str]]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.timeout(7200)
def test_killed_commands_end_as_if_nothing_had_happened(
    tally: Any, how_many: Callable[[int, int], int], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("killed_commands.py")
    kills = how_many(4, 50)
    arguments = [sys.executable, script, tmp_path, kills, 0, "train", "embed", "index", "paper"]
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, env=QUIET, check=False)
    assert done.returncode == 0, done.stderr
    for name, cases in json.loads(done.stdout).items():
        assert len(cases) >= kills
        for survived, lost, note in cases:
            tally.case(f"kills: {name}", survived, lost, note)


def test_two_processes_on_one_file(tally: Any, tmp_path: Path, cli: Cli) -> None:
    """The second one says so in one line; what the first has written so far stays."""
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(3):
        picture = random.integers(0, 256, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / "photos" / f"{number}.png")
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (4, 8))).save(tmp_path / "model")
    arguments = ("embed", tmp_path / "model", tmp_path / "photos", "--out", tmp_path / "v.safetensors")
    writer = EmbeddingsWriter(tmp_path / "v.safetensors", 3, "another process")
    with writer.locked():
        writer.begin()
        code, out, said = cli(*arguments)
        one_line = (code, out, len(said.splitlines())) == (2, "", 1) and "Another process is writing" in said
        lost = (tmp_path / "v.parts" / "pass.json").read_text() != "another process"
        tally.case("two processes: embed", one_line, lost, said)
    code, _, said = cli(*arguments)
    tally.case("two processes: embed", code == 0 and not (tmp_path / "v.parts").exists(), note=said)
