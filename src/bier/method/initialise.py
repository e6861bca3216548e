"""Solving for W before training, so that learners have little in common from the start."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from bier.errors import ConfigError, DataError
from bier.method import equations
from bier.method.checks import check_count, check_rows
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

    Eq. (17), Section 3.3.1 of "Deep Metric Learning with BIER", https://arxiv.org/abs/1801.04815

    Rows are scaled to length 1 after each step (the limit of a high lambda_w). The solver stops when squared row norms
    are within 1 ± 1e-3 and the loss is flat.

    Args:
        ensemble: the embedding layer; its W is changed in place, its bias is not.
        features: phi (N, h) of the training images.
        loss: the diversity loss; its regressors are changed too.
        steps: the largest number of steps.
        batch_size: features per step, drawn at random.
        reach: how far a gradient may move the fastest row in one step. Rows have length 1, so this sets the learning
            rate whatever the scale of the features or the reduction of the loss; it falls where gradients grow.
        momentum: of SGD.
        seed: fixes the batches.
        progress: called with (steps done, steps in all).

    Returns:
        The loss at each step, with `converged` and `row_norm_deviation`.

    Raises:
        ConfigError: a parameter is out of range.
        DataError: the features have a wrong shape or are not finite.

    Example:
        >>> import bier, torch
        >>> ensemble, features = bier.EmbeddingEnsemble(32, (4, 8)), torch.randn(200, 32)
        >>> curve = bier.initialise(ensemble, features, bier.ActivationLoss((4, 8)))
        >>> curve.converged
        True
    """
    check_count("steps", steps)
    check_count("batch_size", batch_size)
    if not isinstance(loss, ActivationLoss | AdversarialLoss):
        raise ConfigError(f"The 'loss' parameter must be an ActivationLoss or AdversarialLoss. Got {loss!r} instead.")
    check_rows(features, ensemble.in_features, "features")
    if not torch.isfinite(features).all():
        raise DataError("The features contain NaN or infinite values.")
    features = features.detach().to(ensemble.weight)
    parameters = [ensemble.weight, *loss.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=momentum)
    rate = float("inf")
    loss.hold_rows(ensemble, optimizer)
    generator = torch.Generator().manual_seed(seed)
    curve = LossCurve()
    for step in range(steps):
        batch = features[torch.randint(len(features), (min(batch_size, len(features)),), generator=generator)]
        optimizer.zero_grad()
        objective = loss(ensemble, batch)
        objective.backward()
        steepest = max(float(p.grad.norm(dim=1).max()) for p in parameters if p.grad is not None and p.ndim == 2)
        rate = min(rate, reach / steepest) if steepest > 0 else rate
        optimizer.param_groups[0]["lr"] = rate if steepest > 0 else 0.0
        optimizer.step()
        curve.append(float(objective.detach()))
        if progress:
            progress(step + 1, steps)
        curve.converged = _flat(curve)
        if curve.converged:
            break
    optimizer.zero_grad()
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
    """Whether the mean loss of the last steps is that of the steps before them."""
    if len(curve) < 2 * WINDOW:
        return False
    before, now = sum(curve[-2 * WINDOW : -WINDOW]) / WINDOW, sum(curve[-WINDOW:]) / WINDOW
    return abs(before - now) <= FLAT * max(map(abs, curve))
