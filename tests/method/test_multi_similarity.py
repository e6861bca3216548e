"""MultiSimilarity with its mining: against the library's loss and miner, and boosted, against loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import bier
from bier.errors import ConfigError

GROUPS = (3, 4, 5)


def batch(seed: int, sizes: tuple[int, ...] = (4, 4, 4, 4)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centres = torch.randn(len(sizes), sum(GROUPS), generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), sum(GROUPS), generator=generator, dtype=torch.float64)
    return (centres[labels] + noise).requires_grad_(), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("arguments", [(2.0, 50.0, 0.5, 0.1), (1.0, 20.0, 0.2, 0.5), (5.0, 100.0, 0.3, math.inf)])
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (1, 2, 9), (1, 1, 1, 1), (5, 1)])
def test_the_loss_of_the_library(sizes: tuple[int, ...], arguments: tuple[float, ...], dtype: torch.dtype) -> None:
    losses, miners = (pytest.importorskip(f"pytorch_metric_learning.{name}") for name in ("losses", "miners"))
    alpha, beta, base, epsilon = arguments
    z, labels = batch(0, sizes)
    z = z.detach().to(dtype).requires_grad_()
    miner = miners.MultiSimilarityMiner(epsilon) if epsilon < math.inf else lambda *_: None
    expected = losses.MultiSimilarityLoss(alpha, beta, base)(z, labels, miner(z, labels))
    ours = bier.BoostedLoss((sum(GROUPS),), bier.MultiSimilarity(alpha, beta, base, epsilon))(z, labels)
    assert ours.item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(*(torch.autograd.grad(total, z)[0] for total in (ours, expected)), rtol=0, atol=1e-6)


def log_sum(values: list[Tensor]) -> Tensor:
    return torch.log(1 + sum((value.exp() for value in values), start=torch.zeros((), dtype=torch.float64)))


@pytest.mark.parametrize("epsilon", [0.1, 0.6])
@pytest.mark.parametrize("boost", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_boosted_by_its_gradient(seed: int, boost: bool, epsilon: float) -> None:
    """Eq. (7c), mining at the score of the ensemble so far, written out image by image."""
    z, labels = batch(seed, (3, 4, 2, 1))
    before, expected, used = torch.zeros(len(z), len(z), dtype=z.dtype), [], 0
    for m, f in enumerate(z.split(GROUPS, dim=1), start=1):
        unit = f / f.norm(dim=1, keepdim=True)
        rate = 2 / (m + 1) if boost else 1.0
        s = (1 - rate) * before + rate * (unit @ unit.T)
        before = s.detach()
        values = []
        for i in range(len(z)):
            others = [j for j in range(len(z)) if j != i]
            positive = [j for j in others if labels[i] == labels[j]]
            negative = [j for j in others if labels[i] != labels[j]]
            hard = [j for j in positive if any(s[i, j] - epsilon < s[i, k] for k in negative)]
            close = [j for j in negative if any(s[i, j] + epsilon > s[i, k] for k in positive)]
            used += len(hard) + len(close)
            pull, push = log_sum([-2 * (s[i, j] - 0.5) for j in hard]), log_sum([50 * (s[i, j] - 0.5) for j in close])
            values.append(pull / 2 + push / 50)
        expected.append(sum(values) / len(values))
    assert 0 < used < 3 * len(z) * (len(z) - 1)  # mining leaves something, and leaves something out
    parts = bier.BoostedLoss(GROUPS, bier.MultiSimilarity(epsilon=epsilon), boost).parts(z, labels)
    wanted = torch.stack(expected)  # type: ignore[arg-type]
    assert torch.allclose(parts.learners, wanted, rtol=0, atol=1e-8)
    assert torch.allclose(*(torch.autograd.grad(v, z)[0] for v in (parts.total, wanted.mean())), rtol=0, atol=1e-8)
    assert parts.positive_weights.tolist() == parts.negative_weights.tolist() == [1.0, 1.0, 1.0]


def test_what_is_wrong_is_said_in_one_line() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"alpha": 0.0}, "'alpha' parameter must be a number of at least 0.01"),
        ({"beta": math.inf}, "'beta' .* Got inf"),
        ({"base": math.nan}, "'base' .* finite"),
        ({"epsilon": -0.1}, "'epsilon' .* at least 0"),
        ({"beta": 200.0}, r"largest exponent, .*beta \(1 - base\).* below 80. Got 100.0"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ConfigError, match=message):
            bier.MultiSimilarity(**arguments)
    with pytest.raises(ConfigError, match="'shrinkage' goes with BinomialDeviance"):
        bier.BoostedLoss(GROUPS, bier.MultiSimilarity(), boosting="shrinkage")
