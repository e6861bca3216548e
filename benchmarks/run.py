"""Runs the benchmarks, each in a process of its own, and writes docs/benchmarks.md: `make bench`.

    python benchmarks/run.py                     all of them; the expected time is printed first
    python benchmarks/run.py --only loss step    some of them
    python benchmarks/run.py --page              write the page again from the results that are there

The figures of a benchmark are kept as docs/results/benchmarks/NAME.json, what it printed as NAME.txt. One that fails is
reported at the end, the others go on, and its earlier results stay.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from _report import CORES, FOLDER, NOTE

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results" / "benchmarks"
# Studies that train or compare for an hour to choose settings and defaults; their results are in the guides.
ON_REQUEST = ("demo_settings", "engines", "validation")


def benchmarks(folder: Path = HERE) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_") and path.stem != "run")


def expected(names: list[str], results: Path) -> str:
    """How long it took the last time, so that nobody has to keep a list."""
    files = [results / f"{name}.json" for name in names]
    known = [json.loads(file.read_text(encoding="utf-8"))["seconds"] for file in files if file.is_file()]
    unknown = f", and {len(files) - len(known)} whose time is not known yet" if len(known) < len(files) else ""
    return f"about {sum(known) / 60:.0f} minutes{unknown}, by the times of the last run"


def run(name: str, folder: Path, results: Path, arguments: list[str], environment: dict[str, str]) -> int:
    """Show what the benchmark prints and keep it where it ends well; its exit code."""
    command = [sys.executable, "-W", "ignore", str(folder / f"{name}.py"), *arguments]
    printed: list[str] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    if process.returncode == 0:
        (results / f"{name}.txt").write_text("".join(printed), encoding="utf-8")
    return process.returncode


def run_all(names: list[str], folder: Path, results: Path, arguments: list[str], note: str) -> list[str]:
    """The names of those that failed."""
    results.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {FOLDER: str(results), NOTE: note, "PYTHONUNBUFFERED": "1"}
    if hasattr(os, "sched_getaffinity"):
        environment[CORES] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    print(f"{len(names)} benchmarks, {expected(names, results)}", flush=True)
    failed = []
    for number, name in enumerate(names, start=1):
        print(f"\n== {name} ({number} of {len(names)})", flush=True)
        started = time.perf_counter()
        code = run(name, folder, results, arguments, environment)
        print(f"== {name}: {'done' if code == 0 else f'FAILED with exit code {code}'}, ", end="")
        print(f"{time.perf_counter() - started:.0f} s", flush=True)
        failed += [name] if code else []
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=benchmarks(), metavar="NAME", help=", ".join(benchmarks()))
    parser.add_argument("--note", default="", help="what else the machine was doing; printed beside the results")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("arguments", nargs="*", metavar="-- OPTIONS", help="for the benchmark, with --only")
    options = parser.parse_args()
    failed: list[str] = []
    if not options.page:
        names = options.only or [name for name in benchmarks() if name not in ON_REQUEST]
        failed = run_all(names, HERE, RESULTS, options.arguments, options.note)
    from _page import write_page  # it imports torch, which the benchmarks are not to share their memory with

    write_page(RESULTS)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; their earlier results were kept")


if __name__ == "__main__":
    main()
