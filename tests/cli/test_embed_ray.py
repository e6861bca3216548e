"""`bier embed --ray` on a real cluster of two workers: the same file as one process writes, whatever dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bier.method.ensemble import EmbeddingEnsemble
from bier.models.backbones import build_backbone
from bier.models.model import Model
from bier.search import embeddings, read_embeddings

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1_200)]  # Ray leaves files open

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and 40 pictures in three classes, one of them broken."""
    root = tmp_path_factory.mktemp("ray")
    torch.manual_seed(0)
    Model(build_backbone("conv4"), EmbeddingEnsemble(512, (8, 16)), precision="float32").save(root / "run" / "model")
    random = np.random.default_rng(0)
    for number in range(40):
        folder = root / "photos" / f"class {number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        patch.setenv("RAY_worker_niceness", "0")  # by default 15: on a busy machine they would hardly run
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "SHARD", 5)


def assert_same_file(one: Path, other: Path) -> None:
    mine, theirs = (read_embeddings(path, raw=True) for path in (one, other))
    np.testing.assert_allclose(mine.vectors, theirs.vectors, atol=1e-6)
    np.testing.assert_allclose(mine.raw, theirs.raw, atol=1e-6, rtol=1e-6)
    assert mine._replace(vectors=[], raw=[]) == theirs._replace(vectors=[], raw=[])
    assert json.loads(one.with_suffix(".json").read_text()) == json.loads(other.with_suffix(".json").read_text())


def write_table(place: Path, count: int = 40) -> Path:
    """Boxes, a file that is no picture, and a path that is a URL."""
    (place / "broken.jpg").write_bytes(b"no picture")
    paths = [f"photos/class {number % 3}/{number}.png" for number in range(count)]
    paths[3], paths[17] = f"file://{place / paths[3]}", "broken.jpg"
    rows = [f"{path},label {number % 4},0,0,{20 + number % 9},30" for number, path in enumerate(paths)]
    (place / "table.csv").write_text("\n".join(["path,label,x1,y1,x2,y2", *rows]) + "\n")
    return place / "table.csv"


def test_ray_writes_what_one_process_does(cli: Cli, cluster: None, place: Path) -> None:
    table, results = write_table(place), []
    for name, options in (("one", ()), ("two", ("--ray", "local"))):
        arguments = ("embed", *options, place / "run", table, "--out", place / f"{name}.safetensors")
        code, output, errors = cli(*arguments, "--skip-broken", "--json")
        assert code == 0, errors
        results.append({key: value for key, value in json.loads(output).items() if key not in ("out", "seconds")})
    assert results[0] == results[1]
    assert [Path(one["path"]).name for one in results[1]["skipped"]] == ["broken.jpg"]
    assert results[1]["images"] == 39
    assert_same_file(place / "one.safetensors", place / "two.safetensors")
    assert not (place / "two.parts").exists()


@pytest.mark.slow
def test_a_broken_image_is_the_same_line(cli: Cli, cluster: None, place: Path) -> None:
    table, said = write_table(place), []
    for options in ((), ("--ray", "local")):
        code, output, errors = cli("embed", place / "run", table, "--out", place / "b.safetensors", *options)
        assert (code, output) == (2, "")
        said.append(errors)
    assert said[0] == said[1]
    assert "broken.jpg" in said[0]


def actors(driver: int) -> list[int]:
    """The processes of a driver's cluster that hold the model."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(b"ray::MapWorker"):
                found += [int(folder.name)] if driver in ancestors(int(folder.name)) else []
    return found


def ancestors(process: int) -> list[int]:
    found = []
    while process > 1:
        process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
        found.append(process)
    return found


@pytest.fixture(scope="module")
def slow_photos(place: Path) -> Path:
    """120 pictures that take a moment to decode each."""
    folder = place / "large"
    folder.mkdir()
    noise = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for number in range(4):
        Image.fromarray(np.roll(noise, number, axis=0)).resize((1600, 1200)).save(folder / f"first {number}.png")
    for number in range(116):
        os.link(folder / f"first {number % 4}.png", folder / f"more {number:03d}.png")
    return folder


@pytest.mark.slow
def test_a_killed_worker_is_replaced(cli: Cli, cluster: None, place: Path, slow_photos: Path) -> None:
    out, killed = place / "killed.safetensors", []

    def kill() -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not killed:
            if len(list((place / "killed.parts").glob("shard-*"))) >= 2 and (found := actors(os.getpid())):
                os.kill(found[0], signal.SIGKILL)
                killed.append(found[0])
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    started = time.perf_counter()
    code, _, errors = cli("embed", place / "run", slow_photos, "--out", out, "--ray", "local", "--json")
    seconds = time.perf_counter() - started
    killer.join()
    assert code == 0, errors
    assert killed
    assert not Path(f"/proc/{killed[0]}").exists()
    started = time.perf_counter()
    assert cli("embed", place / "run", slow_photos, "--out", place / "whole.safetensors")[0] == 0
    alone = time.perf_counter() - started
    assert_same_file(place / "whole.safetensors", out)
    print(f"{120 / alone:.1f} images/s alone, {120 / seconds:.1f} on two workers, one killed, with their start")


@pytest.mark.slow
def test_a_killed_driver_resumes(cli: Cli, cluster: None, place: Path, slow_photos: Path) -> None:
    """The command starts a cluster of its own, which ends with it."""
    out = place / "driver.safetensors"
    words = ["bier", "embed", str(place / "run"), str(slow_photos), "--out", str(out), "--ray", "local", "--json"]
    program = f"import sys; from bier.search import embeddings; embeddings.SHARD = 5; sys.argv = {words!r}; "
    command = [sys.executable, "-c", program + "from bier.cli import main; main()"]
    with (place / "driver.log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log)
        while len(list((place / "driver.parts").glob("shard-*"))) < 3:
            assert driver.poll() is None, (place / "driver.log").read_text()
            time.sleep(0.02)
        below = actors(driver.pid)
        driver.kill()
        driver.wait()
    done = len(list((place / "driver.parts").glob("shard-*")))
    assert 3 <= done < 24
    code, output, errors = cli(*words[1:])
    assert code == 0, errors
    assert json.loads(output)["resumed"] == 5 * done
    assert cli("embed", place / "run", slow_photos, "--out", place / "alone.safetensors")[0] == 0
    assert_same_file(place / "alone.safetensors", out)
    assert below
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(Path(f"/proc/{one}").exists() for one in below):
        time.sleep(0.2)
    assert [one for one in below if Path(f"/proc/{one}").exists()] == []
