"""`bier serve`, run as a user runs it: in a process of its own, asked over HTTP, ended with Ctrl-C."""

import gc
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bier import EmbeddingEnsemble, Index, Model
from bier.collection import data_collection, image_collection
from bier.config import Config
from bier.evaluate.dataset import data_settings
from bier.models.backbones import build_backbone
from bier.training.setup import load_data

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """A run on a folder of pictures, as `bier train` leaves it."""
    torch.manual_seed(0)
    backbone = build_backbone("conv4")
    folder = tmp_path_factory.mktemp("run")
    ensemble = EmbeddingEnsemble(backbone.features, (8, 16))
    Model(backbone, ensemble, weighting="sqrt", precision="float32").save(folder / "model")
    (folder / "config.toml").write_text(
        Config().with_settings({"data.name": "folder", "data.root": str(pictures)}).to_toml()
    )
    return folder


@contextmanager
def served(*arguments: str | Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "bier", "serve", *map(str, arguments), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "}\n":
                break
        assert lines, process.communicate()[1]
        yield json.loads("".join(lines)), process
    finally:
        process.kill()
        process.communicate()


def test_a_run_shows_the_test_images_of_its_data_set(run: Path, pictures: Path) -> None:
    with served(run) as (said, process):
        status = httpx.get(f"{said['url']}/api/status").json()
        assert (said["images"], status["images"], status["classes"]) == (32, 32, 4)
        assert status["queries"] == 32
        one = httpx.get(f"{said['url']}/api/browse").json()["images"][0]["id"]
        rows = httpx.get(f"{said['url']}/api/search", params={"id": one}).json()["rows"]
        assert [len(row["results"]) for row in rows] == [10, 10, 10]
        assert httpx.get(f"{said['url']}/api/image/{one}").headers["content-type"] == "image/png"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        assert "Stopped." in process.stderr.read()
    [kept] = (run / "serve").glob("folder-*/index")
    before = (kept / "manifest.json").stat().st_mtime_ns
    assert len(Index.load(kept)) == 32
    with served(run) as (said, _):  # the vectors of the first start serve again
        assert said["images"] == 32
    assert (kept / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("settings", [{"seed": 1}, {"data.seed": 3}, {"data.test_share": 0.25}])
def test_the_data_is_divided_as_training_divides_it(
    run: Path, pictures: Path, tmp_path: Path, settings: dict[str, Any], cli: Cli
) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    config = Config().with_settings({"data.name": "folder", "data.root": str(pictures), **settings})
    (tmp_path / "config.toml").write_text(config.to_toml())
    test = load_data(config)["test"]
    shown = data_collection(tmp_path, config.data)
    labels = [str(entry.label) for entry in shown.store.entries(shown.store.ids)]
    assert labels == [test.classes[label] for label in test.labels]
    code, out, err = cli("evaluate", tmp_path, "--no-report", "--json")
    assert code == 0, err
    recall = json.loads(out)["recall"]
    assert shown.recall is not None
    assert shown.recall["queries"] == len(test)
    for found, name in zip(shown.recall["prefixes"], ("learner-1", "ensemble"), strict=True):
        assert found == {k: round(recall[name][k], 3) for k in ("1", "2", "4", "8")}


def test_changed_images_are_encoded_again(run: Path, pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    shutil.copytree(pictures, tmp_path / "photos")
    first = image_collection(tmp_path, tmp_path / "photos").store
    before = first.vectors(["class 0/0.png", "class 0/1.png"])
    shutil.copy(pictures / "class 5" / "5.png", tmp_path / "photos" / "class 0" / "0.png")
    after = image_collection(tmp_path, tmp_path / "photos").store.vectors(["class 0/0.png", "class 0/1.png"])
    assert np.abs(after - before).max(axis=1)[0] > 1e-3
    np.testing.assert_allclose(after[1], before[1], atol=1e-5)


def test_query_and_gallery_are_measured_by_their_protocol(run: Path, pictures: Path, tmp_path: Path, cli: Cli) -> None:
    """The page shows the gallery; its recall is that of the queries, as in the report."""
    shutil.copytree(run / "model", tmp_path / "model")
    lines = ["path,label,split,is_query,is_gallery"]
    for number in range(64):
        kind, image = divmod(number, 8)
        role = "train,," if kind < 4 else f"test,{image < 3},{image >= 3}"
        lines.append(f"class {kind}/{image}.png,kind {kind},{role}")
    shutil.copytree(pictures, tmp_path / "data")
    (tmp_path / "data" / "table.csv").write_text("\n".join(lines) + "\n")
    settings = {"data.name": "table", "data.root": str(tmp_path / "data" / "table.csv")}
    (tmp_path / "config.toml").write_text(Config().with_settings(settings).to_toml())
    shown = data_collection(tmp_path, Config().with_settings(settings).data)
    assert (len(shown.store), shown.recall and shown.recall["queries"]) == (20, 12)
    code, out, err = cli("evaluate", tmp_path, "--no-report", "--json")
    assert code == 0, err
    assert shown.recall is not None
    assert shown.recall["prefixes"][1]["1"] == round(json.loads(out)["recall"]["ensemble"]["1"], 3)


def test_other_data_is_shown_whole(run: Path, pictures: Path) -> None:
    settings, own = data_settings(run, "folder", pictures)
    assert own  # the folder that it was trained on, named again
    other, own = data_settings(run / "model", "folder", pictures)
    assert not own
    assert len(data_collection(run, other, own).store) == 64
    assert len(data_collection(run, settings).store) == 32


def test_a_folder_of_images_with_a_broken_one(run: Path, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in ("0.png", "1.png"):
        (tmp_path / "photos" / name).write_bytes((pictures / "class 1" / name).read_bytes())
    (tmp_path / "photos" / "broken.png").write_bytes(b"no picture")
    with served(run, "--images", tmp_path / "photos") as (said, _):
        status = httpx.get(f"{said['url']}/api/status").json()
        assert (status["images"], status["classes"], status["queries"]) == (2, 0, None)
        with (pictures / "class 1" / "0.png").open("rb") as file:
            found = httpx.post(f"{said['url']}/api/search", files={"image": file}).json()
        assert found["rows"][0]["results"][0]["id"] == "0.png"
        assert httpx.get(f"{said['url']}/api/image/broken.png").status_code == 404


def test_an_index(run: Path, pictures: Path, tmp_path: Path, cli: Cli) -> None:
    code, _, err = cli("index", run, pictures, "--out", tmp_path / "index")
    assert code == 0, err
    with served(run, "--index", tmp_path / "index") as (said, _):
        assert said["images"] == 64
        assert httpx.get(f"{said['url']}/api/image/class 1/0.png").status_code == 200
        assert httpx.get(f"{said['url']}/api/status", headers={"host": "evil.example"}).status_code == 400


def test_other_machines_need_the_token(run: Path, pictures: Path) -> None:
    with served(run, "--images", pictures, "--host", "0.0.0.0") as (said, process):
        url = f"http://127.0.0.1:{said['url'].rpartition(':')[2]}"
        assert len(said["token"]) >= 24
        assert httpx.get(f"{url}/api/status").status_code == 401
        asked = {"authorization": f"Bearer {said['token']}"}
        assert httpx.get(f"{url}/api/status", headers=asked).json()["images"] == 64
        assert httpx.get(f"{url}/api/status", headers={**asked, "host": "evil.example"}).status_code == 400
        assert httpx.get(f"{url}/api/status", headers={**asked, "host": "192.0.2.7:8000"}).status_code == 200
        page = httpx.get(f"{url}/", params={"token": said["token"]}, follow_redirects=True)
        assert (page.status_code, page.url.query) == (200, b"")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        told = process.stderr.read()
        assert f"/?token={said['token']}" in told
        assert "not encrypted" in told


def test_mistakes_end_with_one_line(run: Path, tmp_path: Path, features_file: Path, cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, message in (
            ((run, "--images", tmp_path, "--index", tmp_path), "at most one collection"),
            ((run / "model",), "together with --data, --images or --index. Found a model alone."),
            (
                (tmp_path,),
                "must be a run, an index, or a model together with --data, --images or --index. Found no model.",
            ),
            ((tmp_path, "--images", tmp_path), "must be a folder with model"),
            ((run, "--images", tmp_path / "none"), "Images must be a folder, or a table"),
            ((run, "--data", "features", "--root", features_file), "no pictures"),
            ((run, "--port", taken.getsockname()[1]), "Choose another with --host or --port"),
            ((run, "--token", "short"), "The '--token' option must be at least 8"),
        ):
            code, out, err = cli("serve", "--port", "0", *arguments)
            assert (code, out) == (2, ""), arguments
            assert message in err
            assert len(err.strip().splitlines()) == 1


# anyio kills a worker that does not answer and leaves its pipes to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_a_worker_that_does_not_start(
    run: Path, pictures: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """The server ends before it gives its address, in one line."""
    monkeypatch.setattr(sys, "executable", program)
    code, out, err = cli("serve", run, "--images", pictures, "--port", "0", "--json")
    assert (code, out) == (2, ""), err
    assert "needs worker processes that decode pictures" in err.strip().splitlines()[-1]  # after lines of progress
    assert "Traceback" not in err
    gc.collect()  # here, where it is expected
