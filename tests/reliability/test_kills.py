"""SIGKILL at random moments of train, embed, index and paper runs; and two processes on one place."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bier.collection import Changes, Collection
from bier.search import Index
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


@pytest.fixture
def model(small_run: Path) -> Path:
    return small_run / "model"


def one_line(done: tuple[int, str, str], words: str) -> bool:
    code, out, said = done
    return (code, out, len(said.splitlines())) == (2, "", 1) and words in said


def test_two_processes_on_one_file(tally: Any, model: Path, photos: Path, tmp_path: Path, cli: Cli) -> None:
    """The second one says so in one line; what the first has written so far stays."""
    arguments = ("embed", model, photos, "--out", tmp_path / "v.safetensors")
    writer = EmbeddingsWriter(tmp_path / "v.safetensors", 3, "another process")
    with writer.locked():
        writer.begin()
        done = cli(*arguments)
        lost = (tmp_path / "v.parts" / "pass.json").read_text() != "another process"
        tally.case("two processes: embed", one_line(done, "Another process is writing"), lost, done[2])
    code, _, said = cli(*arguments)
    tally.case("two processes: embed", code == 0 and not (tmp_path / "v.parts").exists(), note=said)


def test_two_processes_that_change_one_index(
    tally: Any, model: Path, photos: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that added at once, the later one saved an index without what the other had added, and both said so."""
    index, adding = tmp_path / "index", Collection.add
    assert cli("index", model, photos / "class 0", "--out", index)[0] == 0
    seen: list[tuple[int, str, str]] = []

    def add_beside_others(*arguments: Any) -> Changes:
        monkeypatch.setattr(Collection, "add", adding)
        seen.append(cli("index", model, photos / "class 2", "--add", index))
        seen.append(cli("index", model, photos / "class 2", "--out", index))
        return adding(*arguments)

    monkeypatch.setattr(Collection, "add", add_beside_others)
    code, _, said = cli("index", model, photos / "class 1", "--add", index)
    for done in seen:
        tally.case("two processes: index", one_line(done, "Another process is saving the index"), note=done[2])
    ids = Index.load(index).ids
    tally.case("two processes: index", code == 0 and len(seen) == 2, lost=len(ids) != 6, note=f"{said} {ids}")
    assert cli("index", model, photos / "class 2", "--add", index)[0] == 0
    assert len(Index.load(index)) == 9
