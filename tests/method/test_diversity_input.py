"""What the diversity losses cost, and what they refuse."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bier.errors import ConfigError, DataError
from bier.method import equations
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble

# Losses are called here without training, so nothing has to hold the rows.
pytestmark = pytest.mark.filterwarnings("ignore:.*hold_rows:RuntimeWarning")

GROUPS = (2, 3, 4)
KINDS = [ActivationLoss, AdversarialLoss]
Kind = type[ActivationLoss | AdversarialLoss]


def test_suppression_needs_memory_of_the_batch_times_d_only() -> None:
    """The products of all neurons of two groups would take 128 x 512 x 512 numbers, 134 MB."""
    f_i, f_j = torch.randn(128, 512, requires_grad=True), torch.randn(128, 512, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        equations.suppression_loss(f_i, f_j, "sum").sum().backward()
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in record.events())
    assert 0 < allocated < 12 * 128 * 1024 * 4  # all that was ever allocated, freed or not


@pytest.mark.parametrize("make", KINDS)
def test_one_learner_has_nothing_in_common_with_others(make: Kind) -> None:
    ensemble = EmbeddingEnsemble(6, (4,))
    parts = make((4,), lambda_w=2.0).parts(ensemble, torch.randn(3, 6))
    assert parts.similarity == 0
    assert torch.allclose(parts.total, 2 * parts.weight)
    parts.total.backward()
    assert ensemble.weight.grad is not None


@pytest.mark.parametrize("make", KINDS)
def test_bad_settings(make: Kind) -> None:
    with pytest.raises(ConfigError, match=r"'reduction' parameter must be one of sum, mean. Got 'max'"):
        make(GROUPS, reduction="max")  # type: ignore[arg-type]
    for lambda_w in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=rf"'lambda_w' parameter must be a number of at least 0. Got {lambda_w}"):
            make(GROUPS, lambda_w=lambda_w)
    with pytest.raises(ConfigError, match=r"'groups' parameter"):
        make((2, 0))


def test_bad_hidden_size() -> None:
    with pytest.raises(ConfigError, match=r"'hidden' parameter must be a whole number of at least 1. Got 0"):
        AdversarialLoss(GROUPS, hidden=0)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("features", [torch.zeros(3, 5), torch.zeros(6), torch.zeros(0, 6)])
def test_bad_features(make: Kind, features: Tensor) -> None:
    with pytest.raises(DataError, match=r"features of shape \(B, 6\). Got"):
        make(GROUPS)(EmbeddingEnsemble(6, GROUPS), features)


@pytest.mark.parametrize("make", KINDS)
def test_features_that_are_not_finite(make: Kind) -> None:
    features = torch.zeros(3, 6)
    features[1, 2] = float("nan")
    with pytest.raises(DataError, match=r"NaN or infinite"):
        make(GROUPS)(EmbeddingEnsemble(6, GROUPS), features)


@pytest.mark.parametrize("make", KINDS)
def test_an_ensemble_of_other_groups(make: Kind) -> None:
    with pytest.raises(ConfigError, match=r"EmbeddingEnsemble of the groups \(2, 3, 4\). Got \(4, 5\)"):
        make(GROUPS)(EmbeddingEnsemble(6, (4, 5)), torch.zeros(3, 6))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e4])
def test_no_nan_gradient(make: Kind, scale: float) -> None:
    ensemble, loss = EmbeddingEnsemble(6, GROUPS), make(GROUPS)
    loss(ensemble, scale * torch.randn(3, 6)).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in (ensemble.weight, *loss.parameters()))
