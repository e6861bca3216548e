"""Runs embed, index and evaluate in a limited address space; run by test_memory.py.

    python limited_commands.py FOLDER COMMAND FEW MANY STEPS

Every command is a fork of this process, which has imported all that the commands need: what it may take is counted from
there. Prints a JSON object: `imports`, the memory of the imports, and `cases`, one per run of the command.
"""

import contextlib
import importlib
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import bier.cli
import bier.cli.terminal
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.search import embeddings

DIMENSION = 128
BYTES = 4 * DIMENSION  # of a vector
MB = 2**20
# What docs/scale.md says that a command needs besides its imports: (MB, vectors per image, further bytes per image).
NEED = {"embed": (192, 2, 1_000), "index": (160, 2, 1_000), "evaluate": (256, 8, 1_000)}


def need(command: str, count: int) -> int:
    fixed, vectors, further = NEED[command]
    return fixed * MB + count * (vectors * BYTES + further)


def memory() -> dict[str, int]:
    """Address space and resident memory, now and at their peaks, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = (line.partition(":") for line in lines if line.startswith("Vm"))
    return {name: int(value.split()[0]) * 1024 for name, _, value in values}


def arguments_of(command: str, folder: Path) -> list[object]:
    file = folder / "v.safetensors"
    if command == "embed":
        return ["embed", folder / "model", folder / "photos", "--out", file, "--json"]
    if command == "index":
        return ["index", file, "--out", folder / "index", "--json"]
    return ["evaluate", "--embeddings", file, "--json"]


def prepare(folder: Path, command: str, count: int) -> None:
    """The data of `count` images."""
    folder.mkdir()
    if command == "embed":
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8))
        (folder / "photos").mkdir()
        for number in range(count):
            picture.save(folder / "photos" / f"{number}.jpg")
        torch.manual_seed(0)
        Model(build_backbone("conv4"), EmbeddingEnsemble(512, (32, 96))).save(folder / "model")
        return
    draw = np.random.default_rng(0)
    writer = embeddings.EmbeddingsWriter(folder / "v.safetensors", count, "x")
    writer.begin()
    for number, rows in enumerate(writer.shards):
        vectors = draw.normal(size=(len(rows), DIMENSION)).astype(np.float32)
        writer.write(number, vectors, vectors)
    labels = [str(number % 97) for number in range(count)]
    writer.finish({"paths": list(range(count)), "labels": labels, "groups": [32, 96], "weighting": "sqrt"})


def run(folder: Path, arguments: list[object], more: int | None) -> dict[str, Any]:
    """The command with `more` bytes of address space: how it ended, what it said, and what it took at most."""
    said, told = folder / "said", folder / "told"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _limited(said, told, arguments, more)
    _, status = os.waitpid(child, 0)
    known = json.loads(told.read_text()) if told.exists() else {"address": 0, "resident": 0}
    return {"code": os.waitstatus_to_exitcode(status), "more": more, "said": said.read_text()[-2000:], **known}


def _limited(said: Path, told: Path, arguments: list[object], more: int | None) -> None:
    """In the fork; does not return."""
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    bier.cli.terminal.SECONDS_BETWEEN_LINES = 1e6  # no progress, so that an error is all that is said
    before, code = memory(), 70
    if more is not None:
        resource.setrlimit(resource.RLIMIT_AS, (before["VmSize"] + more,) * 2)
    sys.argv = ["bier", *map(str, arguments)]
    try:
        bier.cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
    after = memory()
    peaks = {"address": after["VmPeak"] - before["VmSize"], "resident": after["VmHWM"] - before["VmRSS"]}
    told.write_text(json.dumps(peaks))
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    folder, command = Path(sys.argv[1]), sys.argv[2]
    few, many, steps = map(int, sys.argv[3:])
    for name in ("faiss", "bier.collection", "bier.evaluate.ensemble", "bier.data"):
        importlib.import_module(name)
    for count in (few, many):
        child = os.fork()
        if child == 0:  # so that this process stays as it is
            prepare(folder / str(count), command, count)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    limits = [(few, need(command, few)), (many, need(command, many))]
    limits += [(few, need(command, few) * step // steps) for step in reversed(range(steps))]
    cases = []
    for count, more in limits:
        cases.append({"count": count, **run(folder, arguments_of(command, folder / str(count)), more)})
    before = memory()
    print(json.dumps({"imports": {"address": before["VmSize"], "resident": before["VmRSS"]}, "cases": cases}))


if __name__ == "__main__":
    main()
