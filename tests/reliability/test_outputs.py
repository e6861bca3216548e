"""Results that cannot be written: one line, exit code 2, and what was there before is still whole."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest

Attack = Callable[..., Any]
Command = tuple[Any, ...]


@contextmanager
def full_disk(largest: int) -> Iterator[None]:
    """No file may grow beyond so many bytes; Python ignores the signal and gets an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def commands(run: Path, photos: Path, place: Path) -> dict[Path, Command]:
    """Commands that write, by the file or folder that they write."""
    data = ("--data", "folder", "--root", photos)
    return {
        place / "report": ("evaluate", run / "model", *data, "--report", place / "report"),
        place / "sheet.png": ("data", "show", *data, "--out", place / "sheet.png"),
        place / "v.safetensors": ("embed", run, photos, "--out", place / "v.safetensors"),
        place / "index": ("index", run, photos, "--out", place / "index"),
        place / "m.onnx": ("export", run, "--out", place / "m.onnx"),
        place / "paper": ("paper", "run", "strength", "--budget", "smoke", "--row", "none", "--out", place / "paper"),
        place / "run": ("train", *data, "--steps", 1, "--set", "model.backbone=conv4", "--out", place / "run"),
    }


def test_places_that_cannot_be(attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path) -> None:
    file = photos / "class 0" / "0.png"
    for place in (Path("/proc/nothing"), Path("/dev/full"), file, tmp_path / ("x" * 300), Path("a/" * 2500)):
        for out, command in commands(small_run, photos, place).items():
            ended = attack(*command)
            tally.case("places that cannot be written", ended.refused, note=f"{str(out)[:60]}: {ended}")
    for command in (("export", small_run), ("data", "show")):
        for out in (".", "..", "/", str(tmp_path)):
            ended = attack(*command, "--out", out, *(() if command[0] == "export" else ("--data", "folder")))
            tally.case("places that cannot be written", ended.refused, note=f"{command[0]} {out}: {ended}")
    assert file.is_file()


def test_a_full_disk_leaves_what_was_there(
    attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = onnx.ModelProto(doc_string=10_000 * "x")  # torch takes seconds to make a real one
    for step in ("_network_graph", "_with_preparation"):
        monkeypatch.setattr(f"bier.models.export.{step}", lambda *_: graph)
    data = ("--data", "folder", "--root", photos)
    for name, command in {
        "report": ("evaluate", small_run / "model", *data, "--report", tmp_path / "report"),
        "sheet.png": ("data", "show", *data, "--out", tmp_path / "sheet.png"),
        "m.onnx": ("export", small_run, "--out", tmp_path / "m.onnx"),
    }.items():
        assert attack(*command).done
        before = content(tmp_path)
        with full_disk(2_000):
            ended = attack(*command)
        good = ended.refused and any(words in ended.said for words in ("disk is full", "File too large"))
        tally.case("full disk", good, lost=content(tmp_path) != before, note=f"{name}: {ended}")


def test_what_is_not_ours_is_not_replaced(
    attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path
) -> None:
    """`embed --out run/model/model.safetensors` once took the place of the weights; so did others with pictures."""
    run, picture = tmp_path / "run", photos / "class 0" / "0.png"
    shutil.copytree(small_run, run)
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "more.parts").mkdir()
    (tmp_path / "more.parts" / "1.jpg").write_bytes(picture.read_bytes())
    data = ("--data", "folder", "--root", photos)
    before = content(tmp_path)
    for command in (
        ("embed", run, photos, "--out", run / "model" / "model.safetensors"),
        ("embed", run, photos, "--out", tmp_path / "other.safetensors"),
        ("embed", run, photos, "--out", tmp_path / "more.safetensors"),
        ("export", run, "--out", picture),
        ("export", run, "--to", "hub", "--out", photos),
        ("index", run, photos, "--out", photos),
        ("evaluate", run / "model", *data, "--report", photos),
        ("evaluate", run / "model", *data, "--report", run),
        ("train", *data, "--steps", 1, "--set", "model.backbone=conv4", "--out", run),
    ):
        ended = attack(*command)
        lost = any(path.read_bytes() != known for path, known in before.items())
        tally.case("what is not ours", ended.refused, lost, note=f"{command}: {ended}")
    assert set(content(tmp_path)) == set(before)


@pytest.mark.parametrize("there", [False, True])
def test_links_are_followed(
    attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path, there: bool
) -> None:
    """A link may lead to a disk with more room: what is written lands there, and the link stays."""
    far = tmp_path / "far"
    far.mkdir()
    data = ("--data", "folder", "--root", photos)
    for name, command in {
        "v.safetensors": ("embed", small_run, photos),
        "sheet.png": ("data", "show", *data),
        "report": ("evaluate", small_run / "model", *data),
        "index": ("index", small_run, photos),
    }.items():
        link, target = tmp_path / name, far / name
        link.symlink_to(target)
        option = "--report" if name == "report" else "--out"
        if there or name == "index":  # a folder that is locked must be there
            _ = target.mkdir() if target.suffix == "" else target.write_bytes(b"")
        ended = attack(*command, option, link)
        kept = link.is_symlink() and (target.is_dir() if target.suffix == "" else target.stat().st_size > 0)
        left = [path.name for path in (*tmp_path.glob(".*"), *far.glob(".*"))]
        tally.case("links to write through", ended.done and kept and not left, note=f"{name}: {ended} {left}")


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_standard_output_that_is_full(tmp_path: Path, tally: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: Python writes what is left at its very end. None of these commands imports torch."""
    for command in (["settings", "--json"], ["settings"], ["--help"], ["train", "--help"]):
        for target in ("/dev/full", "closed pipe"):
            line = [sys.executable, "-m", "bier", *command]
            with open("/dev/full", "w") as full:  # noqa: PTH123
                if target == "closed pipe":
                    ended = subprocess.run(["sh", "-c", '"$0" "$@" | true', *line], capture_output=True, check=False)
                    good = b"Traceback" not in ended.stderr and b"Exception ignored" not in ended.stderr
                else:
                    ended = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, check=False)
                    said = ended.stderr.decode()
                    good = ended.returncode == 2 and said.startswith("bier: Cannot") and len(said.splitlines()) == 1
                    good = good and "No space left on device" in said
            tally.case("standard output that is full", good, note=f"{command} {target}: {ended}")


def test_json_that_cannot_be_written(
    attack: Attack, small_run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        ended = attack("embed", small_run, photos, "--out", tmp_path / "v.safetensors", "--json")
    assert (ended.code, ended.said) == (
        2,
        "bier: Cannot write the result to standard output: No space left on device.\n",
    )
