"""Solving for W before training, so that learners have little in common from the start (line 17)."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from bier.errors import ConfigError, DataError
from bier.method import equations
from bier.method.diversity import ActivationLoss, AdversarialLoss
from bier.method.ensemble import EmbeddingEnsemble

TOLERANCE = 1e-3  # of squared row norms, from the paper
WINDOW = 20  # steps whose mean loss is compared with that of the steps before
FLAT = 5e-3  # change between two windows that counts as none, relative to the largest loss seen


class LossCurve(list[float]):
    """The loss at each step, and how the solver ended."""

    converged: bool = False
    row_norm_deviation: float = float("nan")


def initialise(
    ensemble: EmbeddingEnsemble,
    features: Tensor,
    loss: ActivationLoss | AdversarialLoss,
    *,
    steps: int = 600,
    batch_size: int = 512,
    reach: float = 0.1,
    momentum: float = 0.9,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LossCurve:
    """Minimise a diversity loss over W (and its regressors) by SGD with momentum, on features computed once.

    Args:
        features: phi (N, h) of the training images.
        reach: how far a gradient may move the fastest row in one step. Rows have length 1, so this sets the learning
            rate whatever the scale of the features or the reduction of the loss; it falls where gradients grow.

    Rows are put back to length 1 after each step (the limit of a high lambda_w). The solver stops when squared row
    norms are within 1 ± 1e-3 and the loss is flat; if that does not happen within `steps`, a RuntimeWarning says so.
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"The '{name}' parameter of initialise must be at least 1. Got {value!r} instead.")
    if features.ndim != 2 or features.shape[1] != ensemble.in_features or len(features) < 1:
        raise DataError(f"Expected features of shape (N, {ensemble.in_features}). Got {tuple(features.shape)} instead.")
    if not torch.isfinite(features).all():
        raise DataError("The features contain NaN or infinite values.")
    features = features.detach().to(ensemble.weight)
    parameters = [ensemble.weight, *loss.parameters()]
    velocities = [torch.zeros_like(p) for p in parameters]
    generator = torch.Generator().manual_seed(seed)
    curve = LossCurve()
    rate = float("inf")
    loss.hold(ensemble)
    for step in range(steps):
        batch = features[torch.randint(len(features), (min(batch_size, len(features)),), generator=generator)]
        value = loss(ensemble, batch).total
        gradients = torch.autograd.grad(value, parameters)
        steepest = max(float(g.norm(dim=1).max()) for g in gradients if g.ndim == 2)
        rate = min(rate, reach / steepest) if steepest > 0 else rate
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
                moved, velocities[i] = equations.momentum_step(p, velocities[i], g, rate, momentum)
                p.copy_(moved)
        loss.hold(ensemble)
        curve.append(float(value.detach()))
        if progress:
            progress(step + 1, steps)
        curve.converged = _flat(curve)
        if curve.converged:
            break
    curve.row_norm_deviation = float(equations.row_norm_deviation(ensemble.weight))
    curve.converged = curve.converged and curve.row_norm_deviation <= TOLERANCE
    if not curve.converged:
        warnings.warn(
            f"initialise stopped after {len(curve)} steps before the loss was flat "
            f"(last {curve[-1]:.4g}, largest deviation of squared row norms {curve.row_norm_deviation:.1e}).",
            RuntimeWarning,
            stacklevel=2,
        )
    return curve


def _flat(curve: list[float]) -> bool:
    if len(curve) < 2 * WINDOW:
        return False
    before, now = sum(curve[-2 * WINDOW : -WINDOW]) / WINDOW, sum(curve[-WINDOW:]) / WINDOW
    return abs(before - now) <= FLAT * max(map(abs, curve))
