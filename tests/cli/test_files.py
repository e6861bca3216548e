"""Files that a user names and that are no files, or are made to keep the reader busy."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def ten_seconds() -> Iterator[None]:
    """A command that waits for somebody to write into a pipe never ends."""

    def end(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_is_refused_wherever_a_file_is_read(cli: Cli, tmp_path: Path, pictures: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "index").mkdir()
    (tmp_path / "CUB_200_2011").mkdir()
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for name in ("index/manifest.json", "CUB_200_2011/images.txt", "table.csv", "v.safetensors", "photos/.bier.json"):
        (tmp_path / name).symlink_to(pipe)
    for arguments in (
        ("train", "--config", pipe, "--out", tmp_path / "run"),
        ("search", tmp_path / "index", pictures / "class 0" / "0.png"),
        ("index", tmp_path / "v.safetensors", "--out", tmp_path / "i"),
        ("data", "check", "--data", "cub", "--root", tmp_path),
        ("data", "check", "--data", "table", "--root", tmp_path / "table.csv"),
        ("data", "audit", "--data", "folder", "--root", pictures, "--out", tmp_path / "photos"),
        ("export", "--backbone", "conv4", "--to", "hub", "--results", pipe, "--out", tmp_path / "hub"),
    ):
        code, out, err = cli(*arguments)
        assert (code, out) == (2, ""), arguments
        assert err.count("\n") == 1, err


def test_a_key_of_many_parts_and_a_file_without_end(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    for text in ("a" + ".a" * 200_000 + " = 1\n", "[a" + ".a" * 200_000 + "]\n"):
        config.write_text(text)
        code, _, err = cli("train", "--config", config, "--out", tmp_path / "run")
        assert (code, "a key has too many parts" in err) == (2, True), err
    with config.open("wb") as file:
        file.truncate(2**40)  # sparse
    code, _, err = cli("train", "--config", config, "--out", tmp_path / "run")
    assert (code, "must have at most 4,194,304 bytes" in err) == (2, True), err
