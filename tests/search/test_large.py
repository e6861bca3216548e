"""`bier index` of an embeddings file that does not fit in memory: it is built, opened and searched by memory map."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bier.search import Index
from bier.search.embeddings import SHARD, EmbeddingsWriter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks of memory are those of Linux")
LIMITED = """
import resource, sys
limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.argv[:2] = ["bier"]
from bier.cli import main
try:
    main()
finally:
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmPeak")), file=sys.stderr)
"""


def blocks(count: int, dimension: int, size: int = SHARD) -> Iterator[np.ndarray]:
    """Unit vectors around 1,000 centres."""
    centres = np.random.default_rng(1).standard_normal((1_000, dimension), np.float32)
    for start in range(0, count, size):
        draw, rows = np.random.default_rng([2, start]), min(size, count - start)
        block = centres[draw.integers(1_000, size=rows)] + draw.standard_normal((rows, dimension), np.float32)
        yield block / np.linalg.norm(block, axis=1, keepdims=True)


def write_embeddings(out: Path, count: int, groups: list[int]) -> None:
    writer = EmbeddingsWriter(out, count, "x")
    writer.begin()
    for number, block in enumerate(blocks(count, sum(groups))):
        writer.write(number, block, block)
    paths = [f"photos/{row // 1_000}/{row}.jpg" for row in range(count)]
    labels = [f"class {row % 1_000}" for row in range(count)]
    writer.finish({"paths": paths, "labels": labels, "groups": groups, "weighting": "sqrt"})


def index_within(limit: int, file: Path, out: Path) -> int:
    """The peak of the address space in bytes, of `bier index` as a user runs it."""
    command = [sys.executable, "-c", LIMITED, limit, "index", file, "--out", out, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert json.loads(done.stdout)["images"] > 0
    return int(done.stderr.split()[-1]) * 1024


def check_answers(folder: Path, count: int, dimension: int) -> None:
    """The queries are among the vectors, so the best score is 1."""
    index = Index.load(folder)
    assert len(index) == count
    asked = next(blocks(count, dimension))[:20]
    best, scores = np.empty((20, 0), np.int64), np.empty((20, 0), np.float32)
    for number, block in enumerate(blocks(count, dimension)):
        best = np.concatenate([best, np.tile(np.arange(len(block)) + SHARD * number, (20, 1))], axis=1)
        scores = np.concatenate([scores, asked @ block.T], axis=1)
        kept = np.argsort(-scores, axis=1)[:, :10]
        best, scores = np.take_along_axis(best, kept, axis=1), np.take_along_axis(scores, kept, axis=1)
    found = index.search(asked, 10)
    assert found.ids[0, 0] == "photos/0/0.jpg"
    np.testing.assert_allclose(found.scores[:, 0], 1, atol=1e-5)
    assert np.mean([np.isin(a, b).mean() for a, b in zip(found.rows, best, strict=True)]) >= 0.95


def test_an_index_takes_the_address_space_of_its_vectors_once(tmp_path: Path) -> None:
    """The limit is that of few vectors, and the mapped vectors once; a copy of them would need it twice."""
    few, many, groups = 75_000, 112_500, [64, 192]  # both have bits, for which as many rows are sampled
    for count in (few, many):
        write_embeddings(tmp_path / f"{count}.safetensors", count, groups)
    small = index_within(0, tmp_path / f"{few}.safetensors", tmp_path / "small")
    bytes_of_vectors = (many - few) * 4 * sum(groups)
    entries = 400 * (many - few)  # Python's strings and the JSON that they are written to
    index_within(small + int(1.1 * bytes_of_vectors) + entries, tmp_path / f"{many}.safetensors", tmp_path / "large")
    check_answers(tmp_path / "large", many, sum(groups))


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_a_million_vectors_within_six_gigabytes(tmp_path: Path) -> None:
    count, groups = 1_000_000, [96, 160, 256]
    write_embeddings(tmp_path / "v.safetensors", count, groups)
    index_within(6 * 10**9, tmp_path / "v.safetensors", tmp_path / "index")
    start = time.thread_time()
    Index.load(tmp_path / "index")
    assert time.thread_time() - start < 1.5
    check_answers(tmp_path / "index", count, sum(groups))
