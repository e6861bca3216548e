"""Runs train, embed, index and paper undisturbed and then killed again and again; run by test_kills.py.

    python killed_commands.py FOLDER KILLS SEED COMMAND...

Every attempt is a fork of this process, which has imported everything and computed nothing yet: a start costs no time,
and SIGKILL is as real as ever. A round begins with an older result in place, and its attempts are killed until one
comes to its end. After each kill the older result or the new one must be there, whole; the end of a round must be what
the undisturbed command has written, to the bit. Prints a JSON object: a list of [survived, lost, note] per command.
"""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss  # noqa: F401 - imported here once, rather than in every fork
import numpy as np
import torch
from PIL import Image

import bier
import bier.cli
from bier.collection import Collection
from bier.errors import BierError
from bier.files import checksum
from bier.folders import RECORD
from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.paper.tiny import draw_tiny_data
from bier.search import embeddings, read_embeddings
from bier.training import resolve

Fork = multiprocessing.get_context("fork")
Content = dict[str, str] | None


def bier_command(*arguments: object) -> None:
    sys.argv = ["bier", *map(str, arguments)]
    bier.cli.main()


class Command:
    """Something that writes to a folder. `data` is what all commands read."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def begin(self, folder: Path) -> None:
        """Put an older result in place."""

    def run(self, folder: Path) -> None:
        raise NotImplementedError

    def content(self, folder: Path) -> Content:
        """Checksums of the result; None where there is none. A result that cannot be read is a BierError."""
        raise NotImplementedError


class Train(Command):
    def run(self, folder: Path) -> None:
        settings = {"data.root": str(self.data / "features.safetensors"), "model.embedding": 12, "train.steps": 60}
        settings |= {"train.batch_classes": 3, "train.batch_images": 4, "diversity.hidden": 8, "train.log_every": 1}
        settings |= {"train.checkpoint_every": 5, "train.keep_checkpoints": 1, "train.validate_every": 20}
        bier.train(
            resolve("a-bier", "features", settings), folder / "run", resume=(folder / "run/config.toml").exists()
        )

    def content(self, folder: Path) -> Content:
        if not (folder / "run" / "model").exists():
            return None
        bier.load(folder / "run")
        names = ("metrics.jsonl", "config.toml", "model/model.json", "model/model.safetensors")
        return {name: checksum(folder / "run" / name) for name in names}


class Embed(Command):
    def begin(self, folder: Path) -> None:
        for name in ("v.safetensors", "v.json"):
            shutil.copy(self.data / "older" / name, folder / name)

    def run(self, folder: Path) -> None:
        embeddings.SHARD = 8
        bier_command("embed", self.data / "model", self.data / "photos", "--out", folder / "v.safetensors", "--json")

    def content(self, folder: Path) -> Content:
        known = read_embeddings(folder / "v.safetensors", raw=True)
        return {"v": checksum(folder / "v.safetensors"), "labels": repr(known.labels)}


class MakeIndex(Command):
    def begin(self, folder: Path) -> None:
        shutil.copytree(self.data / "older" / "index", folder / "index")

    def run(self, folder: Path) -> None:
        file = self.data / "many.safetensors"
        bier_command("index", file, "--out", folder / "index", "--json")

    def content(self, folder: Path) -> Content:
        index = Collection.open(folder / "index").store
        data = folder / "index" / json.loads((folder / "index" / "manifest.json").read_text())["data"]
        files = (file for file in data.iterdir() if file.name != "bier-index.json")  # it names its folder
        return {file.name: checksum(file) for file in files} | {"rows": str(len(index))}


class Paper(Command):
    def run(self, folder: Path) -> None:
        options = ("--row", "Baseline", "--budget", "smoke", "--root", self.data / "tiny", "--out", folder / "out")
        bier_command("paper", "run", "summary", *options, "--json")

    def content(self, folder: Path) -> Content:
        file = folder / "out" / "cub.jsonl"
        if not file.exists():
            return None
        changing = ("seconds", "date", "resumed", "measured_seconds")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return {"rows": json.dumps([{k: v for k, v in row.items() if k not in changing} for row in rows])}


COMMANDS: dict[str, type[Command]] = {"train": Train, "embed": Embed, "index": MakeIndex, "paper": Paper}


def prepare(data: Path) -> None:
    """Pictures, a model, vectors, and older results in the places of those that will be made."""
    draw = np.random.default_rng(0)
    for number in range(64):
        path = data / "photos" / f"class {number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(0)
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16))).save(data / "model")
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16))).save(data / "old-model")
    (data / "older").mkdir()
    vectors = draw.normal(size=(3000, 16)).astype(np.float32)
    for file, count in ((data / "many.safetensors", 3000), (data / "older" / "many.safetensors", 1000)):
        writer = embeddings.EmbeddingsWriter(file, count, "x")
        writer.begin()
        for number, rows in enumerate(writer.shards):
            writer.write(number, vectors[rows], vectors[rows])
        writer.finish({"paths": list(range(count)), "labels": None, "groups": [4, 12], "weighting": "sqrt"})
    labels = np.repeat(np.arange(12), 12)
    features = (draw.normal(size=(12, 24))[labels] + 0.9 * draw.normal(size=(144, 24))).astype(np.float32)
    from safetensors.numpy import save_file

    save_file({"features": features, "labels": labels}, data / "features.safetensors")
    draw_tiny_data(data / "tiny")


def older(data: Path, number: int) -> None:
    if number == 0:
        out = data / "older" / "v.safetensors"
        bier_command("embed", data / "old-model", data / "photos", "--out", out, "--json")
    else:
        bier_command("index", data / "older" / "many.safetensors", "--out", data / "older" / "index", "--json")


def quietly(task: Callable[..., None], log: Path, *arguments: Any) -> None:
    torch.set_num_threads(1)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    task(*arguments)


def forked(log: Path, task: Callable[..., None], *arguments: Any) -> multiprocessing.Process:
    process: Any = Fork.Process(target=quietly, args=(task, log, *arguments))
    process.start()
    return process  # type: ignore[no-any-return]


def finished(log: Path, task: Callable[..., None], *arguments: Any) -> float:
    started = time.perf_counter()
    process = forked(log, task, *arguments)
    process.join()
    assert process.exitcode == 0, log.read_text()
    return time.perf_counter() - started


def attacked(command: Command, folder: Path, kills: int, draw: random.Random) -> list[tuple[bool, bool, str]]:
    log, cases = folder / "log", []
    for name in ("whole", "none"):
        (folder / name).mkdir(parents=True)
        command.begin(folder / name)
    with contextlib.suppress(BierError):
        before = command.content(folder / "none")
    seconds = finished(log, command.run, folder / "whole")
    whole = command.content(folder / "whole")
    assert whole is not None
    numbers = iter(range(10_000))
    place: Path | None = None
    while len(cases) < kills or place is not None:
        if place is None:
            place = folder / f"round-{next(numbers)}"
            place.mkdir()
            command.begin(place)
        process = forked(log, command.run, place)
        if len(cases) < kills:
            time.sleep(draw.uniform(0, seconds))
            process.kill()
        process.join()
        ended = process.exitcode != -signal.SIGKILL
        try:
            found = command.content(place)
            kept = found == whole or (not ended and found == before)
            note = "" if kept else f"other content: {found}"
        except BierError as error:
            kept, note = False, str(error)
        survived = process.exitcode in (0, -signal.SIGKILL)
        ours = (".lock", RECORD)
        left = [path.name for path in place.rglob(".*") if ended and not path.name.startswith(ours)]
        if left:
            survived, note = False, f"left: {left}"
        cases.append((survived, not kept, note or ("" if survived else log.read_text()[-500:])))
        if ended:
            shutil.rmtree(place)
            place = None
    return cases


def main() -> None:
    folder, kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    data = folder / "data"
    data.mkdir()
    finished(folder / "log", prepare, data)
    for number in range(2):
        finished(folder / "log", older, data, number)
    found = {name: attacked(COMMANDS[name](data), folder / name, kills, draw) for name in sys.argv[4:]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
