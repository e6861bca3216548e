"""Eq. (11) to (16) and (19) of docs/method.md neuron by neuron, and the direction of the adversarial gradients."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from bier.method import equations
from bier.method.defaults import Reduction
from bier.method.diversity import ActivationLoss, AdversarialLoss, reverse_gradient
from bier.method.ensemble import EmbeddingEnsemble

# Losses are called here without training, so nothing has to hold the rows.
pytestmark = pytest.mark.filterwarnings("ignore:.*hold_rows:RuntimeWarning")

GROUPS = (2, 3, 4)
REDUCTIONS: list[Reduction] = ["sum", "mean"]


def setting(seed: int = 0) -> tuple[EmbeddingEnsemble, Tensor]:
    torch.manual_seed(seed)
    return EmbeddingEnsemble(6, GROUPS).double(), torch.randn(5, 6, dtype=torch.float64)


def adversary(reduction: Reduction = "mean", **settings: float) -> AdversarialLoss:
    torch.manual_seed(1)
    return AdversarialLoss(GROUPS, hidden=7, reduction=reduction, scale_features=False, **settings).double()


def by_group(row: Tensor) -> list[list[float]]:
    return [part.tolist() for part in row.split(GROUPS)]


def row_term(rows: Tensor, reduction: Reduction) -> float:
    terms = [(sum(v * v for v in row) - 1) ** 2 for row in rows.tolist()]
    return sum(terms) / (len(terms) if reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_eqs_11_to_13_neuron_by_neuron(reduction: Reduction) -> None:
    ensemble, features = setting()
    parts = ActivationLoss(GROUPS, lambda_w=3.0, reduction=reduction, scale_features=False).parts(ensemble, features)
    similarity = 0.0
    for row in ensemble(features):
        f = by_group(row)
        for i, j in itertools.combinations(range(3), 2):
            total = sum((a * b) ** 2 for a in f[i] for b in f[j])
            similarity += total / (len(f[i]) * len(f[j]) if reduction == "mean" else 1) / len(features)
    weight = row_term(ensemble.weight, reduction)
    assert parts.similarity.item() == pytest.approx(similarity, rel=1e-10)
    assert parts.weight.item() == pytest.approx(weight, rel=1e-10)
    assert parts.total.item() == pytest.approx(similarity + 3 * weight, rel=1e-10)


def test_suppression_by_hand() -> None:
    f_i = torch.tensor([[math.cos(math.radians(a)) * 2, math.sin(math.radians(a)) * 2] for a in (0, 45, 200)])
    f_j = torch.tensor([[3.0], [0.0], [0.5]])
    assert equations.suppression_loss(f_i, f_j, "sum").tolist() == pytest.approx([36, 0, 1], rel=1e-5)
    assert equations.suppression_loss(f_i, f_j, "mean").tolist() == pytest.approx([18, 0, 0.5], rel=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_eqs_14_to_16_neuron_by_neuron(reduction: Reduction) -> None:
    ensemble, features = setting()
    loss = adversary(reduction, lambda_w=3.0)
    with torch.no_grad():
        for layer in loss.regressors.modules():
            if isinstance(layer, nn.Linear):
                layer.bias.mul_(3)  # some longer than 1
    parts = loss.parts(ensemble, features)
    similarity, weight = 0.0, row_term(ensemble.weight, reduction)
    for i, j in itertools.combinations(range(3), 2):
        first, _, second = loss.regressors[f"{j + 1}-to-{i + 1}"]
        for row in ensemble(features):
            f = by_group(row)
            hidden = [
                max(0.0, sum(w * v for w, v in zip(rows, f[j], strict=True)) + b)
                for rows, b in zip(first.weight.tolist(), first.bias.tolist(), strict=True)
            ]
            guess = [
                sum(w * v for w, v in zip(rows, hidden, strict=True)) + b
                for rows, b in zip(second.weight.tolist(), second.bias.tolist(), strict=True)
            ]
            total = sum((a * g) ** 2 for a, g in zip(f[i], guess, strict=True))
            similarity += total / (len(f[i]) if reduction == "mean" else len(f[j])) / len(features)
        for layer in (first, second):
            weight += max(0.0, sum(b * b for b in layer.bias.tolist()) - 1) + row_term(layer.weight, reduction)
    assert parts.similarity.item() == pytest.approx(similarity, rel=1e-10)
    assert parts.weight.item() == pytest.approx(weight, rel=1e-10)
    assert parts.total.item() == pytest.approx(-similarity + 3 * weight, rel=1e-10)


def test_eq_19() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.1]])
    assert equations.row_norm_deviation(rows).item() == pytest.approx(0.21, abs=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(reduction: Reduction) -> None:
    """Activation as it is; the adversarial similarity without its reversal, and its regressors with it."""
    ensemble, features = setting()
    activation = ActivationLoss(GROUPS, lambda_w=2.0, reduction=reduction)
    assert torch.autograd.gradcheck(lambda _: activation(ensemble, features), ensemble.weight)
    f_i, guess = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: equations.adversarial_similarity(a, b, 5, reduction), (f_i, guess))
    loss = adversary(reduction)
    assert torch.autograd.gradcheck(lambda *_: loss(ensemble, features), tuple(loss.parameters()))


def test_reversal_turns_the_gradient_and_nothing_else() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert torch.equal(reverse_gradient(x), x)
    (reverse_gradient(x) * torch.tensor([1.0, -2.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[-1.0, 2.0]] * 3


def test_embedding_gets_the_turned_gradient_of_the_similarity() -> None:
    """d total / d W must be + d similarity / d W (so that descent lowers it), computed here without any reversal."""
    ensemble, features = setting()
    loss = adversary(lambda_w=0.0)
    (ours,) = torch.autograd.grad(loss(ensemble, features), ensemble.weight)
    f = ensemble.split(ensemble(features))
    similarity = sum(
        equations.adversarial_similarity(f[i], loss.regressors[f"{j + 1}-to-{i + 1}"](f[j]), GROUPS[j], "mean").mean()
        for i, j in itertools.combinations(range(3), 2)
    )
    (plain,) = torch.autograd.grad(similarity, ensemble.weight)
    assert torch.allclose(ours, plain, atol=1e-12)


def play(
    ensemble: EmbeddingEnsemble, loss: AdversarialLoss, features: Tensor, players: list[nn.Parameter]
) -> list[float]:
    """Train only `players`, every other parameter fixed; the similarity along the way."""
    optimizer = torch.optim.SGD(players, lr=0.01)
    curve = []
    for _ in range(100):
        parts = loss.parts(ensemble, features)
        curve.append(parts.similarity.item())
        gradients = torch.autograd.grad(parts.total, players)
        for player, gradient in zip(players, gradients, strict=True):
            player.grad = gradient
        optimizer.step()
        loss.hold(ensemble)
    return curve


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_regressors_alone_raise_the_similarity(reduction: Reduction) -> None:
    ensemble, features = setting()
    loss = adversary(reduction, lambda_w=math.inf)
    loss.hold(ensemble)
    before = ensemble.weight.detach().clone()
    curve = play(ensemble, loss, features, list(loss.parameters()))
    assert curve[-1] > 1.5 * curve[0]
    assert torch.allclose(ensemble.weight, before, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_embedding_alone_lowers_the_similarity(reduction: Reduction) -> None:
    ensemble, features = setting()
    loss = adversary(reduction, lambda_w=math.inf)
    loss.hold(ensemble)
    before = [p.detach().clone() for p in loss.parameters()]
    curve = play(ensemble, loss, features, [ensemble.weight])
    assert curve[-1] < 0.7 * curve[0]
    assert all(torch.allclose(p, b, atol=1e-12) for p, b in zip(loss.parameters(), before, strict=True))


@pytest.mark.parametrize("make", [ActivationLoss, AdversarialLoss])
@pytest.mark.parametrize("through", [False, True])
def test_gradients_reach_w_and_the_backbone_only_if_asked(
    make: type[ActivationLoss | AdversarialLoss], through: bool
) -> None:
    torch.manual_seed(0)
    backbone, ensemble = nn.Linear(4, 6), EmbeddingEnsemble(6, GROUPS)
    loss = make(GROUPS, through_backbone=through)
    loss(ensemble, backbone(torch.randn(5, 4))).backward()
    assert ensemble.weight.grad is not None
    assert ensemble.weight.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in loss.parameters())
    assert (backbone.weight.grad is not None) == through


@pytest.mark.parametrize("make", [ActivationLoss, AdversarialLoss])
def test_hold_puts_rows_to_length_1(make: type[ActivationLoss | AdversarialLoss]) -> None:
    ensemble = EmbeddingEnsemble(6, GROUPS)
    loss = make(GROUPS, reduction="sum")
    with torch.no_grad():
        for p in loss.parameters():
            p.add_(3)
        direction = equations.unit_rows(ensemble.weight)
    loss.hold(ensemble)
    assert torch.allclose(ensemble.weight, direction)
    assert equations.row_norm_deviation(ensemble.weight) < 1e-6
    assert loss.parts(ensemble, torch.zeros(2, 6)).weight < 1e-9
    for name, p in loss.named_parameters():
        if name.endswith("bias"):
            assert 0.999 < p.square().sum() < 1  # below, or the one-sided term would push with its full gradient


KINDS = [ActivationLoss, AdversarialLoss]
Kind = type[ActivationLoss | AdversarialLoss]


def train_a_step(
    ensemble: EmbeddingEnsemble, loss: ActivationLoss | AdversarialLoss, optimizer: torch.optim.Optimizer
) -> float:
    loss(ensemble, torch.randn(5, 6)).backward()
    optimizer.step()
    return float(equations.row_norm_deviation(ensemble.weight))


@pytest.mark.parametrize("make", KINDS)
def test_hold_rows_keeps_the_rows_at_length_1_after_every_step(make: Kind) -> None:
    torch.manual_seed(0)
    ensemble, loss = EmbeddingEnsemble(6, GROUPS, bias=True), make(GROUPS)
    optimizer = torch.optim.Adam([*ensemble.parameters(), *loss.parameters()], lr=0.1)
    handle = loss.hold_rows(ensemble, optimizer)
    assert equations.row_norm_deviation(ensemble.weight) < 1e-6  # from the start
    before = ensemble.weight.detach().clone()
    assert all(train_a_step(ensemble, loss, optimizer) < 1e-6 for _ in range(3))
    assert not torch.allclose(ensemble.weight, before, atol=1e-2)
    handle.remove()
    assert train_a_step(ensemble, loss, optimizer) > 1e-3


@pytest.mark.parametrize("make", KINDS)
def test_the_hook_is_the_manual_call(make: Kind) -> None:
    """Step by step the same bits, so that a run that goes on from a checkpoint stays exact."""
    weights = []
    for hooked in (True, False):
        torch.manual_seed(0)
        ensemble, loss = EmbeddingEnsemble(6, GROUPS), make(GROUPS)
        optimizer = torch.optim.Adam([*ensemble.parameters(), *loss.parameters()], lr=0.1)
        loss.hold_rows(ensemble, optimizer) if hooked else loss.hold(ensemble)
        for _ in range(3):
            train_a_step(ensemble, loss, optimizer)
            if not hooked:
                loss.hold(ensemble)
        weights.append(torch.cat([p.detach().flatten() for p in (ensemble.weight, *loss.parameters())]))
    assert torch.equal(*weights)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", KINDS)
def test_rows_that_nothing_holds_are_a_warning_once(make: Kind) -> None:
    ensemble, features = setting()
    loss = make(GROUPS).double()
    with pytest.warns(RuntimeWarning, match=r"call hold_rows\(ensemble, optimizer\) once"):
        loss(ensemble, features)
    loss(ensemble, features)
    make(GROUPS, lambda_w=1000.0).double()(ensemble, features)
    held = make(GROUPS).double()
    held.hold_rows(ensemble, torch.optim.SGD([ensemble.weight], lr=0.1))
    held(ensemble, features)


@pytest.mark.parametrize("make", KINDS)
def test_the_bias_of_the_embedding_does_not_matter(make: Kind) -> None:
    torch.manual_seed(0)
    plain, biased, features = EmbeddingEnsemble(6, GROUPS), EmbeddingEnsemble(6, GROUPS, bias=True), torch.randn(5, 6)
    with torch.no_grad():
        biased.weight.copy_(plain.weight)
        biased.bias.fill_(3.0)  # type: ignore[union-attr]
    loss = make(GROUPS)
    for ours, expected in zip(loss.parts(biased, features), loss.parts(plain, features), strict=True):
        assert torch.equal(ours, expected)
    loss(biased, features).backward()
    assert biased.weight.grad is not None
    assert biased.bias.grad is None  # type: ignore[union-attr]


def test_hold_leaves_short_biases_and_zero_rows() -> None:
    ensemble, loss = EmbeddingEnsemble(6, GROUPS), AdversarialLoss(GROUPS, hidden=4)
    with torch.no_grad():
        ensemble.weight[0] = 0
        for name, p in loss.named_parameters():
            if name.endswith("bias"):
                p.fill_(0.1)
    loss.hold(ensemble)
    assert not ensemble.weight[0].any()
    assert all((p == 0.1).all() for name, p in loss.named_parameters() if name.endswith("bias"))


def test_w_of_0_is_a_trivial_solution_that_the_weight_term_forbids() -> None:
    ensemble, features = setting()
    with torch.no_grad():
        ensemble.weight.zero_()
    parts = ActivationLoss(GROUPS, lambda_w=1.0, reduction="sum").parts(ensemble, features)
    assert parts.similarity == 0
    assert parts.total == sum(GROUPS)
    with torch.no_grad():
        ensemble.weight.copy_(0.01 * torch.randn(9, 6))
    loss = ActivationLoss(GROUPS, lambda_w=1000.0)
    optimizer = torch.optim.SGD([ensemble.weight], lr=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        loss(ensemble, features).backward()
        optimizer.step()
    assert ensemble.weight.square().sum(dim=1).min() > 0.9


def test_scaled_features_make_the_loss_independent_of_their_scale() -> None:
    ensemble, features = setting()
    loss = ActivationLoss(GROUPS, scale_features=True)
    assert loss(ensemble, features).item() == pytest.approx(loss(ensemble, 100 * features).item())
    assert loss.parts(ensemble, torch.zeros_like(features)).similarity == 0


@pytest.mark.parametrize("make", [ActivationLoss, AdversarialLoss])
def test_scaled_features_cannot_lower_the_loss_by_shrinking(make: type[ActivationLoss | AdversarialLoss]) -> None:
    ensemble, features = setting()
    features.requires_grad_()
    loss = make(GROUPS, scale_features=True, through_backbone=True).double()
    loss(ensemble, features).backward()
    assert features.grad is not None
    size = features.grad.norm() * features.norm()
    assert size > 0
    assert abs((features.grad * features).sum()) < 1e-5 * size  # no pull along the features themselves

    dead = torch.zeros_like(features, requires_grad=True)
    loss(ensemble, dead).backward()
    assert dead.grad is not None
    assert dead.grad.isfinite().all()
