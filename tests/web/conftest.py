"""A small collection of drawn pictures, and the server that shows it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from numpy.typing import NDArray

from bier import EmbeddingEnsemble, Index, Model
from bier.collection import Collection
from bier.collection.served import recall_figures
from bier.models.backbones import build_backbone
from bier.web.app import create_app
from bier.web.guard import Access, Limits
from bier.web.server import create_server

GROUPS = (8, 16, 24)
Serve = Callable[..., str]


@pytest.fixture(scope="session")
def pixels() -> NDArray[np.uint8]:
    """Six kinds of patterns, eight noisy pictures (48, 48, 3) of each."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 256, (6, 6, 6, 3)).repeat(8, axis=1).repeat(8, axis=2)
    noisy = patterns.repeat(8, axis=0) + random.normal(scale=60, size=(48, 48, 48, 3))
    return noisy.clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def model() -> Model:
    torch.manual_seed(0)
    backbone = build_backbone("conv4")
    return Model(backbone, EmbeddingEnsemble(backbone.features, GROUPS), weighting="sqrt", precision="float32")


@pytest.fixture(scope="session")
def index(pixels: NDArray[np.uint8], model: Model) -> Index:
    names = [f"kind {row // 8}/{row % 8}.png" for row in range(len(pixels))]
    return Index.build(model.encode(pixels), names, GROUPS, [f"kind {row // 8}" for row in range(len(pixels))])


@pytest.fixture(scope="session")
def collection(index: Index, model: Model, pixels: NDArray[np.uint8]) -> Collection:
    row_of = {one: row for row, one in enumerate(index.ids)}

    labels = np.arange(len(index.ids)) // 8
    figures = recall_figures(index.vectors(index.ids), index.groups, labels, model.weighting, None)
    recall = {**figures, "on": "48 patterns"}
    return Collection(index, model, lambda one: (pixels[row_of[one]], None), "patterns", recall)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "report"
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html><title>Report</title><h1>The report of the run</h1>")
    (folder.parent / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """Starts a server for a collection and returns its address; all are stopped at the end."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(
        collection: Collection,
        report: Path | None = None,
        limits: Limits | None = None,
        token: str | None = None,
        **options: Any,
    ) -> str:
        app = create_app(
            collection, limits or Limits(rate=1000, burst=10_000), report, Access(token=token), "1", **options
        )
        server = create_server(app)
        listening = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        started.append((server, thread))
        until = time.monotonic() + 30
        while not server.started and time.monotonic() < until:
            time.sleep(0.02)
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join(10)
