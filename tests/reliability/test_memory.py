"""Memory: evaluate, embed and index at ten times the data, under a limit of what they need; only in `make soak`.

The limit is the address space of the command on the small data plus, for what is added, the bytes that must be held:
`embed` the vectors and raw embeddings three times (shards, merged, file), `index` and `evaluate` the vectors eight
times. Pictures, shards and tiles of scores must not add to it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.search import embeddings

LIMITED = """
import atexit, resource, sys
place, limit = sys.argv[1], int(sys.argv[2])
def tell():
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmPeak"))
    open(place, "w").write(peak.split()[1])
atexit.register(tell)
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.argv = ["bier", *sys.argv[3:]]
from bier.cli import main
main()
"""
MARGIN = 64 * 2**20  # stacks of threads and what malloc keeps
DIMENSION = 64


def run(folder: Path, limit: int, *arguments: object) -> tuple[int, int, str]:
    """(exit code, peak of the address space in bytes, standard error)."""
    command = [sys.executable, "-c", LIMITED, folder / "peak", limit, *arguments, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, check=False)
    told = (folder / "peak").read_text() if (folder / "peak").exists() else "0"  # none: it was ended from outside
    (folder / "peak").unlink(missing_ok=True)
    return done.returncode, int(told) * 1024, done.stderr


def write_vectors(out: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    writer = embeddings.EmbeddingsWriter(out, count, "x")
    writer.begin()
    for number, rows in enumerate(writer.shards):
        vectors = draw.normal(size=(len(rows), DIMENSION)).astype(np.float32)
        writer.write(number, vectors, vectors)
    labels = [str(number % 97) for number in range(count)]
    writer.finish({"paths": list(range(count)), "labels": labels, "groups": [16, 48], "weighting": "sqrt"})


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", ["embed", "index", "evaluate"])
def test_ten_times_the_data(tally: Any, soak: bool, tmp_path: Path, command: str) -> None:
    if not soak:
        pytest.skip("takes minutes; `make soak` runs it")
    few, many = {"embed": (300, 3_000), "index": (3_000, 30_000), "evaluate": (1_000, 10_000)}[command]
    arguments: dict[int, tuple[object, ...]] = {}
    for count in (few, many):
        place = tmp_path / str(count)
        place.mkdir()
        if command == "embed":
            picture = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
            (place / "photos").mkdir()
            for number in range(count):
                Image.fromarray(picture).save(place / "photos" / f"{number}.jpg")
            torch.manual_seed(0)
            Model(build_backbone("conv4"), EmbeddingEnsemble(512, (16, 48))).save(place / "model")
            arguments[count] = ("embed", place / "model", place / "photos", "--out", place / "v.safetensors")
        else:
            write_vectors(place / "v.safetensors", count)
            options = ("--out", place / "index", "--kind", "hnsw") if command == "index" else ()
            first = ("index",) if command == "index" else ("evaluate", "--embeddings")
            arguments[count] = (*first, place / "v.safetensors", *options)
    code, small, said = run(tmp_path, 0, *arguments[few])
    assert code == 0, said
    held = 2 * 3 if command == "embed" else 8
    limit = small + MARGIN + held * (many - few) * DIMENSION * 4
    code, large, said = run(tmp_path, limit, *arguments[many])
    tally.case(f"memory: {command}", code == 0, note=f"limit {limit / 1e6:.0f} MB: exit code {code} {said[-300:]}")
    tally.remark(
        f"{command}: {json.dumps({few: round(small / 1e6), many: round(large / 1e6)})} MB of address space, "
        f"limit {limit / 1e6:.0f} MB"
    )
