"""Memory: embed, index and evaluate at ten times the data, in the address space that docs/scale.md says they need.

With less they end in one line. The short form runs `index` alone, at a tenth of the data.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bier.search import Index, read_embeddings

SCRIPT = Path(__file__).with_name("limited_commands.py")
SIZES = {"embed": (200, 2_000), "index": (3_000, 30_000), "evaluate": (1_500, 15_000)}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("command", SIZES)
def test_ten_times_the_data(
    tally: Any, soak: bool, how_many: Callable[[int, int], int], tmp_path: Path, command: str
) -> None:
    if not soak and command != "index":
        pytest.skip("takes a minute; `make soak` runs it")
    few, many = SIZES[command] if soak else (300, 3_000)
    arguments = [sys.executable, SCRIPT, tmp_path, command, few, many, how_many(4, 24)]
    # Two heaps of malloc rather than one per thread, each of which reserves 64 MB.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for number, case in enumerate(found["cases"]):
        enough = number < 2
        refused = case["code"] == 2 and case["said"].startswith("bier: ") and len(case["said"].splitlines()) == 1
        note = f"{_told(case)}: exit code {case['code']} {case['said'][-300:]}"
        name = f"memory: {command}{'' if enough else ' with too little'}"
        tally.case(name, case["code"] == 0 or (refused and not enough), note=note)
    first, tenfold = found["cases"][:2]
    assert tenfold["address"] > 0.3 * tenfold["more"], "the documented need is far above what is needed"
    imports = {name: f"{value / 2**20:,.0f} MB" for name, value in found["imports"].items()}
    tally.remark(
        f"memory: {command}: {_told(first)}; {_told(tenfold)}; "
        f"imports: {imports['resident']}, {imports['address']} of addresses"
    )
    # What the first run has written is there after the last ones, which had too little memory.
    if command == "embed":
        assert len(read_embeddings(tmp_path / str(few) / "v.safetensors").paths) == few
    if command == "index":
        assert len(Index.load(tmp_path / str(few) / "index")) == few


def _told(case: dict[str, Any]) -> str:
    took, allowed = (case[key] / 2**20 for key in ("address", "more"))
    return f"{case['count']:,} images took {took:.0f} of {allowed:.0f} MB"


def test_faiss_in_little_memory(tally: Any) -> None:
    """Its OpenBLAS ends the process with a segmentation fault, and without a word, where it gets no memory."""
    script = """
import resource, sys
import bier.search.vectors as vectors
size = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]) * 2**20,) * 2)
try:
    vectors._faiss()
except MemoryError as error:
    assert "address space" in str(error)
"""
    for more in (10, 110, 150, 190, 230, 600):
        done = subprocess.run([sys.executable, "-c", script, str(more)], capture_output=True, text=True, check=False)
        tally.case("memory: faiss", done.returncode == 0, note=f"{more} MB: {done.returncode} {done.stderr[-200:]}")


def test_a_server_returns_what_it_freed(tally: Any) -> None:
    """Encoding the collection lets the process keep what it frees. As long as that held, a server kept its peak."""
    script = """
import sys
from bier.system import return_memory, reuse_memory

def resident():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

def freed():
    blocks = [bytes([1]) * 2**16 for _ in range(2000)]
    del blocks
    return resident()

before = resident()
if not reuse_memory():
    sys.exit(77)
print(freed() - before)
return_memory()
print(resident() - before, freed() - before, reuse_memory())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("only glibc can be told")
    kept, now, later, again = done.stdout.split()
    assert float(kept) > 100
    survived = float(now) < 50 and float(later) < 50 and again == "False"
    tally.case("memory: returned by a server", survived, note=done.stdout)
