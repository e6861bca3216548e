"""Eq. (17): solving for W on features computed once."""

import warnings

import pytest
import torch
from torch import Tensor

from bier.errors import ConfigError, DataError
from bier.evaluate.correlation import classifier_correlation
from bier.method import equations
from bier.method.defaults import Reduction
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.initialise import LossCurve, initialise

GROUPS = (8, 16, 24)
Kind = type[ActivationLoss | AdversarialLoss]


def make_features(seed: int = 0, scale: float = 1.0) -> Tensor:
    """As after a ReLU: no value below 0, dimensions that go together."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(64, 64, generator=generator)
    return scale * (torch.randn(500, 64, generator=generator) @ mix / 8 + 0.3).relu()


def make_loss(make: Kind, reduction: Reduction = "mean", lambda_w: float = 1000.0) -> ActivationLoss | AdversarialLoss:
    size = {"hidden": 16} if make is AdversarialLoss else {}
    return make(GROUPS, reduction=reduction, lambda_w=lambda_w, **size)


def solve(make: Kind, reduction: Reduction, seed: int = 0, scale: float = 1.0) -> tuple[EmbeddingEnsemble, LossCurve]:
    torch.manual_seed(seed)
    ensemble = EmbeddingEnsemble(64, GROUPS)
    return ensemble, initialise(ensemble, make_features(scale=scale), make_loss(make, reduction), seed=seed)


@pytest.mark.parametrize("make", [ActivationLoss, AdversarialLoss])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_converges_with_rows_of_length_1(make: Kind, reduction: Reduction, scale: float) -> None:
    ensemble, curve = solve(make, reduction, scale=scale)  # a warning would be an error here
    assert curve.converged
    assert 40 <= len(curve) <= 600
    assert curve.row_norm_deviation <= 1e-3
    assert (ensemble.weight.square().sum(dim=1) - 1).abs().max() <= 1e-3
    assert all(abs(value) < float("inf") for value in curve)


def suppression(ensemble: EmbeddingEnsemble) -> float:
    loss = ActivationLoss(GROUPS)
    loss.hold(ensemble)
    return loss.parts(ensemble, make_features()).similarity.item()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_activation_suppresses_more_than_glorot(reduction: Reduction) -> None:
    torch.manual_seed(0)
    glorot = EmbeddingEnsemble(64, GROUPS)
    solved, _ = solve(ActivationLoss, reduction)
    assert suppression(solved) < 0.2 * suppression(glorot)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_adversarial_learners_agree_less_than_by_glorot(reduction: Reduction) -> None:
    """Over five seeds: a single end of an adversarial game says little."""
    before, after = [], []
    for seed in range(5):
        torch.manual_seed(seed)
        glorot = EmbeddingEnsemble(64, GROUPS)
        solved, _ = solve(AdversarialLoss, reduction, seed)
        with torch.no_grad():
            before.append(classifier_correlation(glorot(make_features()), GROUPS) or 0.0)
            after.append(classifier_correlation(solved(make_features()), GROUPS) or 0.0)
    assert sum(after) < 0.75 * sum(before)


def test_activation_lowers_its_own_loss_step_by_step() -> None:
    _, curve = solve(ActivationLoss, "mean")
    assert sum(curve[-20:]) < 0.2 * sum(curve[:20])


@pytest.mark.parametrize("make", [ActivationLoss, AdversarialLoss])
def test_the_same_seed_gives_the_same_w(make: Kind) -> None:
    first, curve = solve(make, "mean", seed=3)
    second, again = solve(make, "mean", seed=3)
    other, _ = solve(make, "mean", seed=4)
    assert torch.equal(first.weight, second.weight)
    assert curve == again
    assert not torch.equal(first.weight, other.weight)


def test_adversary_is_not_thrown_about_by_its_biases() -> None:
    """Biases reach length 1 and stay there; rounding must not turn the one-sided term into a kick of 2 lambda_w."""
    curves = []
    for lambda_w in (1000.0, float("inf")):
        torch.manual_seed(0)
        ensemble, loss = EmbeddingEnsemble(64, GROUPS), make_loss(AdversarialLoss, lambda_w=lambda_w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            curves.append(initialise(ensemble, make_features(), loss, steps=30))
        assert max(p.detach().norm().item() for name, p in loss.named_parameters() if name.endswith("bias")) > 0.99
    assert curves[0] == pytest.approx(curves[1], rel=0.02, abs=1e-3)


def test_warns_if_it_could_not() -> None:
    ensemble = EmbeddingEnsemble(64, GROUPS)
    with pytest.warns(RuntimeWarning, match=r"stopped after 25 steps before the loss was flat"):
        curve = initialise(ensemble, make_features(), ActivationLoss(GROUPS), steps=25)
    assert not curve.converged
    assert len(curve) == 25
    assert curve.row_norm_deviation <= 1e-3


def test_progress_and_small_data() -> None:
    seen: list[tuple[int, int]] = []
    ensemble = EmbeddingEnsemble(64, GROUPS)
    with pytest.warns(RuntimeWarning, match=r"stopped after 5 steps"):
        initialise(ensemble, make_features()[:1], ActivationLoss(GROUPS), steps=5, progress=lambda *at: seen.append(at))
    assert seen == [(n, 5) for n in range(1, 6)]


def test_features_of_zero_leave_w_finite() -> None:
    ensemble = EmbeddingEnsemble(64, GROUPS)
    initialise(ensemble, torch.zeros(20, 64), ActivationLoss(GROUPS))
    assert torch.isfinite(ensemble.weight).all()
    assert equations.row_norm_deviation(ensemble.weight) < 1e-3


def test_features_keep_no_gradient_and_w_keeps_its_own() -> None:
    features = make_features().requires_grad_()
    ensemble = EmbeddingEnsemble(64, GROUPS)
    with pytest.warns(RuntimeWarning, match=r"stopped"):
        initialise(ensemble, features, ActivationLoss(GROUPS), steps=3)
    assert features.grad is None
    assert ensemble.weight.requires_grad
    assert ensemble.weight.grad is None


@pytest.mark.parametrize("features", [torch.zeros(5, 63), torch.zeros(64), torch.zeros(0, 64)])
def test_bad_features(features: Tensor) -> None:
    with pytest.raises(DataError, match=r"features of shape \(B, 64\). Got"):
        initialise(EmbeddingEnsemble(64, GROUPS), features, ActivationLoss(GROUPS))


def test_other_errors() -> None:
    ensemble = EmbeddingEnsemble(64, GROUPS)
    with pytest.raises(DataError, match=r"NaN or infinite"):
        initialise(ensemble, torch.full((5, 64), float("nan")), ActivationLoss(GROUPS))
    with pytest.raises(ConfigError, match=r"'steps' parameter must be a whole number of at least 1. Got 0"):
        initialise(ensemble, make_features(), ActivationLoss(GROUPS), steps=0)
    with pytest.raises(ConfigError, match=r"'batch_size' parameter must be a whole number of at least 1. Got -1"):
        initialise(ensemble, make_features(), ActivationLoss(GROUPS), batch_size=-1)
    with pytest.raises(ConfigError, match=r"EmbeddingEnsemble of the groups"):
        initialise(ensemble, make_features(), ActivationLoss((24, 24)))
