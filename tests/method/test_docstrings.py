"""The examples in the docstrings run as they stand, and every public class of the method has one."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

import bier

MODULES = sorted(
    f"bier.method.{path.stem}" for path in (Path(bier.__file__).parent / "method").glob("*.py") if path.stem[0] != "_"
)


@pytest.mark.parametrize("name", [*MODULES, "bier.models.model"])
def test_examples_run(name: str) -> None:
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize(
    "name",
    [
        "ActivationLoss",
        "AdversarialLoss",
        "BinomialDeviance",
        "BoostedClassifier",
        "BoostedLoss",
        "Contrastive",
        "EmbeddingEnsemble",
        "Model",
        "Triplet",
        "boosting_rates",
        "group_sizes",
        "initialise",
    ],
)
def test_there_is_an_example(name: str) -> None:
    assert ">>> " in (getattr(bier, name).__doc__ or "")
