"""What is printed beside results: next steps that can be pasted, and progress with and without a terminal."""

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bier.cli import terminal
from bier.cli.terminal import command, progress_bar


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def no_program_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_program_that_the_shell_does_not_find_is_printed_with_its_path(
    no_program_on_the_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(no_program_on_the_path / ".venv" / "bin" / "bier")
    monkeypatch.setattr(sys, "argv", [".venv/bin/bier", "demo"])
    assert command("serve", Path("runs/my demo")) == ".venv/bin/bier serve 'runs/my demo'"


def test_a_program_that_the_shell_finds_is_printed_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = executable(tmp_path / "bin" / "bier")
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    assert command("serve", "runs/demo") == "bier serve runs/demo"
    other = executable(tmp_path / "other" / "bier")  # the shell would start the first
    monkeypatch.setattr(sys, "argv", [str(other), "demo"])
    assert command("serve") == f"{other} serve"


def test_a_module_is_printed_as_a_module(no_program_on_the_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bier/__main__.py", "train"])
    assert command("evaluate", "run") == f"{sys.executable} -m bier evaluate run"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert command("evaluate", "run") == f"{sys.executable} -m bier evaluate run"
    expected = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 -m bier train --resume run"
    assert command("train", "--resume", "run", processes=True) == expected


def test_python_of_an_active_environment_is_printed_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bier/__main__.py", "train"])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    assert shutil.which(Path(sys.executable).name) == sys.executable
    assert command("evaluate") == f"{Path(sys.executable).name} -m bier evaluate"


def test_without_a_terminal_progress_is_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.2)
    with progress_bar() as bar:
        time.sleep(0.3)  # nothing is known yet
        whole = bar.add_task("runs", total=None, status="")
        bar.update(whole, completed=2, total=4)
        task = bar.add_task("training", total=None, status="")
        for step in (10, 20, 30):
            bar.update(task, completed=step, total=600, status="loss 0.512")
            time.sleep(0.1)
        bar.update(task, completed=600)
        bar.update(whole, completed=4)
        bar.add_task("measuring recall", total=None, status="")
        time.sleep(0.3)
    out, said = capsys.readouterr()
    assert out == ""
    lines = said.splitlines()
    assert lines[0].startswith("working, ")
    assert any(line.startswith("runs: 2 of 4; training: ") and "of 600, 0:0" in line for line in lines), lines
    assert any(line.endswith("left, loss 0.512") for line in lines), lines
    assert lines[-1].startswith("measuring recall, ")
    assert "\x1b" not in said
    time.sleep(0.3)
    assert capsys.readouterr().err == ""  # it ends with the work


def test_of_several_processes_one_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setenv("RANK", "1")
    with progress_bar():
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_the_password_of_a_url_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say("skipped: https://me:s3cret@host/a.jpg and ftp://s3cret@host; http://localhost:8000/?token=abc a@b/c")
    said = capsys.readouterr().err
    assert said == "skipped: https://***@host/a.jpg and ftp://***@host; http://localhost:8000/?token=abc a@b/c\n"


@pytest.mark.parametrize(
    ("shell", "code", "told"),
    [
        ("bier settings >&-", 0, ""),
        ("bier settings --no-such-option >&-", 2, "No such option"),
        ("RANK=abc bier settings", 2, "variable RANK must be a whole number"),
        ("mkdir gone && cd gone && rmdir ../gone && bier settings", 2, "started in is gone"),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 bier evaluate ./\U0001f34e", 2, ""),
    ],
)
def test_odd_surroundings_are_one_line(shell: str, code: int, told: str, tmp_path: Path) -> None:
    command = shell.replace("bier ", f"{sys.executable} -m bier ")
    ended = subprocess.run(["sh", "-c", command], capture_output=True, cwd=tmp_path, timeout=120, check=False)
    text = ended.stderr.decode()
    assert (ended.returncode, told in text, "Traceback" in text) == (code, True, False), text
    assert len(text.splitlines()) == bool(code)
