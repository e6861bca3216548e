"""The web server's answers: milliseconds of /api/search by id over real HTTP, without encoding.

    python benchmarks/serve.py            200,000 images (the graph takes a minute or two to build)
    python benchmarks/serve.py --quick    20,000 images

The vectors are drawn at random around 2,000 centres, (96, 160, 256) to three learners, each part of the length that
the ensemble gives it; the index is HNSW. One request gives the ensemble's row and those of all learners.
"""

import argparse
import os
import threading
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as `bier serve` does, before numpy is imported

import httpx
import numpy as np
import uvicorn
from PIL import Image

from _report import Report, clock
from bier import EmbeddingEnsemble, Index, Model, boosting_rates
from bier.collection import Collection
from bier.models.backbones import build_backbone
from bier.web.app import create_app
from bier.web.guard import Limits

SEED = 0
GROUPS = (96, 160, 256)
GOAL = 100.0
REQUESTS = 60
QUESTIONS = {
    "ensemble and all learners": {},
    "first two learners, and all": {"learners": 2},
    "ensemble alone": {"rows": "ensemble"},
    "first two learners alone": {"rows": "ensemble", "learners": 2},
}


def vectors(count: int) -> np.ndarray:
    random = np.random.default_rng(SEED)
    centres = random.normal(size=(2_000, sum(GROUPS))).astype(np.float32)
    made = centres[random.integers(0, len(centres), count)]
    made += random.normal(scale=0.7, size=made.shape).astype(np.float32)
    _, alpha = boosting_rates(len(GROUPS))
    for part, weight in zip(np.split(made, np.cumsum(GROUPS)[:-1], axis=1), alpha, strict=True):
        part *= weight / np.linalg.norm(part, axis=1, keepdims=True)
    return made


def started(collection: Collection) -> tuple[uvicorn.Server, threading.Thread, str]:
    app = create_app(collection, Limits(rate=1e6, burst=1e6))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    return server, thread, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def measured(url: str, count: int) -> dict[str, list[float]]:
    """The questions take turns, so that a busy moment of the machine falls on all of them."""
    random = np.random.default_rng(SEED + 1)
    times: dict[str, list[float]] = {name: [] for name in QUESTIONS}
    with httpx.Client(base_url=url) as client:
        for number in range(REQUESTS + 5):
            one = str(int(random.integers(0, count)))
            for name, options in QUESTIONS.items():
                start = clock()
                client.get("/api/search", params={"id": one, "k": 10, **options}).raise_for_status()
                if number >= 5:
                    times[name].append(1e3 * (clock() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 images instead of 200,000")
    count = 20_000 if parser.parse_args().quick else 200_000
    report = Report("serve", ["numpy", "faiss-cpu"], SEED)
    start = clock()
    index = Index.build(vectors(count), groups=GROUPS, labels=np.arange(count) % 2_000)
    print(f"{count:,} vectors of {sum(GROUPS)} numbers, {index.method} built in {clock() - start:.0f} s")
    backbone = build_backbone("conv4")
    model = Model(backbone, EmbeddingEnsemble(backbone.features, GROUPS))
    server, thread, url = started(Collection(index, model, lambda one: (Image.new("RGB", (48, 48)), None)))
    try:
        times = measured(url, count)
    finally:
        server.should_exit = True
        thread.join()
    rows = [[name, *np.percentile(some, [50, 95]).tolist()] for name, some in times.items()]
    report.table(f"/api/search by id, {count:,} images, ms", ["", "median", "95th percentile"], rows)
    name, _, high = max(rows, key=lambda row: row[2])
    what = f"/api/search, {name} (the slowest of {len(rows)} questions), 95th percentile"
    report.figure(what, f"{count:,} images", high, "ms", at_most=GOAL)
    report.save()


if __name__ == "__main__":
    main()
