"""Configs, settings and options of any value: settings that fit, or one line that says which does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

from bier.config import Config, parse_settings
from bier.errors import ConfigError

Attack = Callable[..., Any]
KEYS = sorted(Config().flat())
SECTIONS = sorted({key.partition(".")[0] for key in KEYS})
NAMES = st.sampled_from(sorted({key.rpartition(".")[2] for key in KEYS}))
NUMBERS = st.one_of(st.integers(), st.sampled_from([2**63 - 1, 2**63, 2**64, -(2**63), 10**30]), st.floats())
VALUES = st.recursive(
    st.one_of(NUMBERS, st.booleans(), st.text(max_size=20), st.dates(), st.datetimes(), st.times()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=6,
)
DEEP = ("[" * 100_000, '{"a":' * 50_000, "[1," * 900 + "1" + "]" * 900)
LONG = ("9" * 5000, "0x" + "f" * 5000, "x" * 10_000, "1-" * 3000 + "1")
VALUES_ON_THE_COMMAND_LINE = (
    *(*DEEP, *LONG, "²-1", "²", "0-0", "-", "3-", str(2**63), str(2**64), "9" * 30, "-1", "nan", "inf", "1e400"),
    *("1979-05-27", "{a=1}", "''", '"\\u0000"', "[1,[2]]", "true", "", "\ud800", "[red]", "'''", "\x1b[31m"),
)


TOML = st.dictionaries(
    st.one_of(st.sampled_from(SECTIONS), st.text(max_size=8)),
    st.one_of(VALUES, st.dictionaries(st.one_of(NAMES, st.text(max_size=8)), VALUES, max_size=5)),
    max_size=5,
)


def test_any_toml_is_a_config_or_refused(tmp_path: Path, tally: Any, drawn: Callable[[int, int], Any]) -> None:
    path = tmp_path / "config.toml"

    @drawn(150, 3000)
    @given(TOML)
    def holds(content: dict[str, Any]) -> None:
        path.write_bytes(tomli_w.dumps(content).encode("utf-8", "surrogatepass"))
        try:
            config = Config.from_toml(path)
        except ConfigError:
            tally.case("any TOML")
            return  # any other exception would be a traceback
        path.write_text(config.to_toml())
        tally.case("any TOML", Config.from_toml(path) == config, note=repr(content))

    holds()


def test_any_file_is_a_config_or_refused(tmp_path: Path, tally: Any, drawn: Callable[[int, int], Any]) -> None:
    path = tmp_path / "config.toml"

    @drawn(60, 1000)
    @given(st.one_of(st.text(max_size=200), st.binary(max_size=200)))
    def holds(content: str | bytes) -> None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        try:
            config = Config.from_toml(path)
        except ConfigError:
            tally.case("any file as a config")
            return
        tally.case("any file as a config", config == Config(), note=repr(content))  # nothing but comments

    holds()


def test_any_value_of_any_setting(tally: Any) -> None:
    for key in (*KEYS, "nothing", "seed.more", "model", "data.", "x" * 5000, "."):
        for value in VALUES_ON_THE_COMMAND_LINE:
            try:
                Config().with_settings(parse_settings([f"{key}={value}"])).to_toml()
                good = True
            except ConfigError as error:
                good = bool(str(error))
            except Exception as error:
                good = False
                value = f"{value[:40]} {type(error).__name__}"
            tally.case("values of settings", good, note=f"{key[:40]}={value[:80]}")


def test_the_commands_refuse_them_too(attack: Attack, tally: Any, tmp_path: Path) -> None:
    for key in ("seed", "data.seed", "train.steps", "train.learning_rate", "model.groups", "model.embedding"):
        for value in (*DEEP, *LONG, "²-1", str(2**64), "-1", "nan"):
            ended = attack("train", "--set", f"{key}={value}", "--out", tmp_path / "run", limit=20)
            tally.case("settings through train", ended.refused, note=f"{key}={value[:30]}: {ended}")
    config = tmp_path / "config.toml"
    for text in (*DEEP, *LONG, "\0", "[train]\nsteps = 1\nsteps = 2", "seed = " + "9" * 5000, "train = 3", "[[train]]"):
        for content in (text, f"seed = {text}"):
            config.write_text(content)
            ended = attack("train", "--config", config, "--out", tmp_path / "run", limit=20)
            tally.case("configs through train", ended.refused, note=f"{content[:30]}: {ended}")
    assert not (tmp_path / "run").exists()


def test_options_of_any_size(attack: Attack, tally: Any, small_run: Path, photos: Path, tmp_path: Path) -> None:
    query = photos / "class 0" / "0.png"
    index, out = tmp_path / "index", ("--out", tmp_path / "v.safetensors")
    assert attack("index", small_run, photos, "--out", index).done
    plain = attack("search", index, query, "--json").out.count('"rank"')
    for number in ("0", "-1", str(10**18), str(2**64), "9" * 5000, "²", "1e3", "nan"):
        for command in (
            ("embed", small_run, photos, *out, "--batch-size", number),
            ("embed", small_run, photos, *out, "--workers", number),
            ("search", index, query, "-k", number),
            ("search", index, query, "--learners", number),
            ("export", small_run, "--out", tmp_path / "m.onnx", "--learners", number),
            ("data", "check", "--data", "folder", "--root", photos, "--test-share", number),
            ("data", "show", "--data", "folder", "--root", photos, "--out", tmp_path / "s.png", "--classes", number),
            ("serve", small_run, "--images", tmp_path / "nothing", "--port", number),
        ):
            ended = attack(*command, limit=30)
            # Large numbers may mean all there is.
            tally.case("numbers of options", ended.refused or ended.done, note=f"{command[0]} {command[-2:]}: {ended}")
    for text in (*DEEP, *LONG[:2], "[/x]", "\x1b[31m"):
        for option in (("--where", f"x={text}"), ("--where", f"label={text}"), ("--label", text), ("--rerank", text)):
            ended = attack("search", index, query, *option, limit=30)
            tally.case("texts of options", ended.refused or ended.done, note=f"{option[0]} {text[:30]}: {ended}")
        for command in (
            ("settings", text),
            ("train", "--data", text),
            ("train", "--method", text),
            ("paper", "run", text),
        ):
            ended = attack(*command, limit=30)
            tally.case("texts of options", ended.refused, note=f"{command[0]} {text[:30]}: {ended}")
    assert attack("search", index, query, "--json").out.count('"rank"') == plain == 10


@pytest.mark.parametrize("learners", [0, 3, -1])
def test_export_of_learners_that_are_not_there(attack: Attack, small_run: Path, tmp_path: Path, learners: int) -> None:
    ended = attack("export", small_run, "--out", tmp_path / "m.onnx", "--learners", learners)
    assert ended.refused, ended.said
    assert "must lie between 1 and 2" in ended.said


def test_hosts_and_stores_that_cannot_be(attack: Attack, tally: Any, small_run: Path, photos: Path) -> None:
    for host in ("x" * 300, ".", "a..b", "[", "256.256.256.256", "\u2028", "é" * 80):
        ended = attack("serve", small_run, "--images", photos, "--host", host, limit=30)
        tally.case("hosts and stores", ended.refused, note=f"{host[:20]}: {ended}")
    milvus = ("milvus:", "milvus:http://[", "milvus:http://h:x", "milvus:http://", "milvus:x.txt")
    others = ("qdrant:", "qdrant:http://[", "qdrant:http://h:x", "postgresql://h:x", "postgresql://%", "postgres:#é")
    for store in ("", *milvus, *others, "redis:x"):
        ended = attack("index", small_run, photos, "--store", store, limit=30)
        tally.case("hosts and stores", ended.refused, note=f"{store}: {ended}")


@pytest.mark.parametrize("kind", ["python", "torch", "thread", "library", "rust", "deep"])
def test_memory_and_nesting_end_with_one_line(
    attack: Attack, small_run: Path, photos: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: Any, **__: Any) -> Any:
        if kind == "python":
            return bytearray(2**62)
        if kind == "torch":
            return torch.empty(2**55)
        if kind == "thread":
            raise RuntimeError("can't start new thread")
        if kind == "library":
            raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
        if kind == "rust":
            raise type("PanicException", (BaseException,), {})("PyObject pointer is null")
        return run_out()

    monkeypatch.setattr("bier.collection.encoding.load", run_out)
    ended = attack("embed", small_run, photos, "--out", tmp_path / "v.safetensors")
    assert ended.refused, ended.said
    assert ("nested too deeply" if kind == "deep" else "Memory ran out") in ended.said


def test_an_empty_argument_is_not_this_folder(attack: Attack, small_run: Path, photos: Path) -> None:
    for command in (
        ("embed", small_run, "", "--out", "v.safetensors"),
        ("embed", small_run, photos, "--out", ""),
        ("export", small_run, "--out", ""),
        ("evaluate", "--embeddings", ""),
        ("", "x"),
    ):
        ended = attack(*command)
        assert ended.refused, (command, ended)
        assert "must not be empty" in ended.said
