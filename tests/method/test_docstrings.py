"""The examples in the docstrings run as they stand, and every public name has one, with its arguments and errors."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest
import torch

import bier

METHOD = {f"bier.method.{path.stem}" for path in (Path(bier.__file__).parent / "method").glob("[!_]*.py")}


@pytest.mark.parametrize("name", sorted(METHOD | set(bier._HOME.values())))
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("name", sorted(set(bier.__all__) - {"BierError"}))
def test_arguments_results_errors_and_an_example_are_described(name: str) -> None:
    thing = getattr(bier, name)
    described = inspect.getdoc(thing) or ""
    if name == "Index":  # which is made by a method
        described += inspect.getdoc(thing.build) or ""
    sections = ["Args:", "Raises:", "Example:", *(["Returns:"] if name != "Config" else [])]
    assert [section for section in sections if f"\n{section}\n" not in described] == []
    assert ">>> " in described
