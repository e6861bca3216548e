"""The defaults of the classes are those of `bier train`."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bier
from bier.config import Config
from bier.evaluate.ensemble import evaluate_ensemble
from bier.paper.budgets import PAPER

SETTINGS = {  # parameter of the method -> the setting that it is
    "beta1": "loss.beta1",
    "beta2": "loss.beta2",
    "cost": "loss.cost",
    "boost": "loss.boost",
    "boosting": "loss.boosting",
    "dropout": "loss.dropout",
    "start": "model.start",
    "bias": "model.bias",
    "weighting": "model.weighting",
    "lambda_w": "diversity.norm_weight",
    "reduction": "diversity.reduction",
    "hidden": "diversity.hidden",
    "scale_features": "diversity.scale_features",
    "through_backbone": "diversity.through_backbone",
    "precision": "train.precision",
}


def callables() -> Iterator[Callable[..., Any]]:
    """Every function, class and method of the method, and what else takes its parameters."""
    for path in (Path(bier.__file__).parent / "method").glob("[a-z]*.py"):
        module = importlib.import_module(f"bier.method.{path.stem}")
        for _, found in inspect.getmembers(module):
            if getattr(found, "__module__", None) != module.__name__ or not callable(found):
                continue
            yield found
            if inspect.isclass(found):
                yield from (method for _, method in inspect.getmembers(found, inspect.isfunction))
    yield from (bier.Model, evaluate_ensemble)


def shared() -> list[tuple[str, str, Any]]:
    found = set()
    for one in callables():
        for name, parameter in inspect.signature(one).parameters.items():
            if name in SETTINGS and parameter.default is not inspect.Parameter.empty:
                found.add((one.__qualname__, name, parameter.default))
    return sorted(found, key=str)


def test_every_shared_parameter_is_found() -> None:
    assert {name for _, name, _ in shared()} == SETTINGS.keys()
    owners = {owner for owner, _, _ in shared()}
    assert {"BinomialDeviance", "BoostedLoss", "BoostedClassifier", "EmbeddingEnsemble", "Model"} <= owners
    assert {"ActivationLoss", "AdversarialLoss", "EmbeddingEnsemble.vector", "evaluate_ensemble"} <= owners


@pytest.mark.parametrize(("owner", "name", "default"), shared())
def test_a_default_is_that_of_the_command(owner: str, name: str, default: Any) -> None:
    assert Config().flat()[SETTINGS[name]] == default, owner


def test_a_loss_on_its_own_is_what_the_command_trains_with() -> None:
    assert bier.BoostedLoss((2, 3)).loss == bier.BinomialDeviance(cost=10.0)


def test_the_defaults_themselves() -> None:
    flat = Config().flat()
    expected = {
        "loss.cost": 10.0,
        "model.weighting": "sqrt",
        "diversity.norm_weight": float("inf"),
        "diversity.scale_features": True,
        "diversity.reduction": "mean",
    }
    assert {key: flat[key] for key in expected} == expected


def test_the_papers_own_values_are_those_of_its_budget() -> None:
    assert PAPER.settings["retrieval"]["loss.cost"] == 25.0
    assert PAPER.settings["retrieval"]["model.weighting"] == "alpha"
