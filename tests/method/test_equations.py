"""Eq. (1) to (10) of docs/method.md against naive loops, on embeddings at known angles and on random ones."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bier.errors import ConfigError
from bier.method import equations
from bier.method.losses import BinomialDeviance, Contrastive, Triplet

ANGLES = (0.0, 30.0, 90.0, 180.0, 225.0, 359.0)


def at_angles(degrees: tuple[float, ...] = ANGLES, length: float = 3.0) -> Tensor:
    rows = [[length * math.cos(math.radians(a)), length * math.sin(math.radians(a))] for a in degrees]
    return torch.tensor(rows, dtype=torch.float64)


def random_scores(count: int = 200, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator) * 2 - 1


def cosine_similarity(f: Tensor, g: Tensor) -> Tensor:
    return equations.unit_rows(f) @ equations.unit_rows(g).T


def test_eq_1_by_angle() -> None:
    s = cosine_similarity(at_angles(), at_angles(length=0.5))
    for i, a in enumerate(ANGLES):
        for j, b in enumerate(ANGLES):
            assert s[i, j].item() == pytest.approx(math.cos(math.radians(a - b)), abs=1e-12)


def test_eq_1_by_loops() -> None:
    f, g = torch.randn(5, 7, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)
    s = cosine_similarity(f, g)
    for i in range(5):
        for j in range(4):
            dot = sum(f[i, k].item() * g[j, k].item() for k in range(7))
            lengths = math.sqrt(sum(v**2 for v in f[i].tolist())) * math.sqrt(sum(v**2 for v in g[j].tolist()))
            assert s[i, j].item() == pytest.approx(dot / lengths, abs=1e-12)
            assert -1 <= s[i, j].item() <= 1


def test_unit_rows_of_zero_tiny_and_huge() -> None:
    f = torch.tensor([[0.0, 0.0], [1e-30, 1e-30], [1e-8, 0.0], [3e18, 4e18], [3.0, 4.0]], requires_grad=True)
    unit = equations.unit_rows(f)
    expected = [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.6, 0.8]]
    assert torch.allclose(unit.detach(), torch.tensor(expected), atol=1e-6)
    unit[:, 0].sum().backward()
    assert f.grad is not None
    assert torch.isfinite(f.grad).all()
    assert not f.grad[:2].any()


def test_unit_rows_gradcheck() -> None:
    f = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(equations.unit_rows, f)


@pytest.mark.parametrize("s", [-1.0, -0.3, 0.0, 0.5, 0.51, 1.0, *random_scores(20).tolist()])
def test_eqs_2_and_3_by_formula(s: float) -> None:
    score = torch.tensor([s, s], dtype=torch.float64)
    same = torch.tensor([True, False])
    for y, deviance, contrastive in zip(
        (1, 0), BinomialDeviance(cost=25.0)(score, same), Contrastive()(score, same), strict=True
    ):
        cost = 1 if y else 25
        expected = math.log1p(math.exp(-(2 * y - 1) * 2.0 * (s - 0.5) * cost))
        assert deviance.item() == pytest.approx(expected, rel=1e-8, abs=1e-15)
        assert contrastive.item() == pytest.approx((1 - y) * max(0, s - 0.5) + y * (s - 1) ** 2, abs=1e-12)


def test_eq_4_by_formula() -> None:
    positive, negative = random_scores(seed=1), random_scores(seed=2)
    values = Triplet()(positive, negative)
    for value, p, n in zip(values.tolist(), positive.tolist(), negative.tolist(), strict=True):
        assert value == pytest.approx(max(0.0, n - p + 0.01), abs=1e-12)


@pytest.mark.parametrize(
    ("loss", "constants"),
    [(BinomialDeviance(), (2.0, 20.0)), (BinomialDeviance(cost=25.0), (2.0, 50.0)), (Contrastive(), (1.0, 1.0))],
)
def test_closed_form_pair_weights_are_the_derivative(
    loss: BinomialDeviance | Contrastive, constants: tuple[float, float]
) -> None:
    s = random_scores().requires_grad_()
    same = torch.arange(len(s)) % 2 == 0
    (derivative,) = torch.autograd.grad(loss(s, same).sum(), s)
    constant = torch.where(same, constants[0], constants[1]).double()
    assert torch.allclose(loss.weight(s.detach(), same) * constant, derivative.abs(), atol=1e-12)


def test_closed_form_triplet_weights_are_the_derivative() -> None:
    positive, negative = random_scores(seed=1).requires_grad_(), random_scores(seed=2).requires_grad_()
    by_positive, by_negative = torch.autograd.grad(Triplet()(positive, negative).sum(), (positive, negative))
    closed = Triplet().weight(positive.detach(), negative.detach())
    assert torch.equal(closed, -by_positive)
    assert torch.equal(closed, by_negative)
    assert 0 < closed.mean() < 1


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.booleans())
def test_binomial_deviance_weights_lie_between_0_and_1(scores: list[float], same: bool) -> None:
    s = torch.tensor(scores, dtype=torch.float64)
    weight = BinomialDeviance(cost=25.0).weight(s, torch.full_like(s, same, dtype=torch.bool))
    assert ((weight > 0) & (weight < 1)).all()


@pytest.mark.parametrize("make", [BinomialDeviance, Contrastive, Triplet])
def test_loss_parameters_must_be_finite(make: type) -> None:
    name = "beta1" if make is BinomialDeviance else "margin"
    with pytest.raises(ConfigError, match=f"'{name}' parameter .* Got nan"):
        make(**{name: float("nan")})


@given(st.integers(1, 60))
def test_eq_5_alphas(learners: int) -> None:
    eta, alpha = equations.boosting_rates(learners)
    assert len(eta) == len(alpha) == learners
    assert sum(alpha) == pytest.approx(1, abs=1e-12)
    assert eta[0] == 1
    for m in range(1, learners + 1):
        assert eta[m - 1] == 2 / (m + 1)
        product = 1.0
        for n in range(m + 1, learners + 1):
            product *= 1 - 2 / (n + 1)
        assert alpha[m - 1] == pytest.approx(2 / (m + 1) * product, rel=1e-12)
        assert alpha[m - 1] == pytest.approx(2 * m / (learners * (learners + 1)), rel=1e-9)  # what it comes to


@pytest.mark.parametrize("learners", [0, -1, 2.0, "3", True, None])
def test_eq_5_refuses_a_bad_number_of_learners(learners: object) -> None:
    with pytest.raises(ConfigError, match=r"at least 1"):
        equations.boosting_rates(learners)  # type: ignore[arg-type]


def test_eqs_5_and_6_agree_and_match_loops() -> None:
    scores = torch.stack([random_scores(9, seed) for seed in range(4)])  # (M, P)
    eta, alpha = equations.boosting_rates(4)
    running = torch.zeros(9, dtype=torch.float64)
    for m in range(4):
        expected = [(1 - eta[m]) * running[p].item() + eta[m] * scores[m, p].item() for p in range(9)]
        running = equations.running_score(running, scores[m], eta[m])
        assert running.tolist() == pytest.approx(expected, abs=1e-12)
    ensemble = [sum(alpha[m] * scores[m, p].item() for m in range(4)) for p in range(9)]
    assert equations.ensemble_score(scores).tolist() == pytest.approx(ensemble, abs=1e-12)
    assert running.tolist() == pytest.approx(ensemble, abs=1e-12)


PAPER = {
    512: ["170-342", "96-160-256", "34-68-102-138-170"],
    384: ["64-128-192"],
    1024: [
        "170-342-512",
        "102-204-308-410",
        "68-136-204-274-342",
        "50-96-148-196-242-292",
        "36-74-110-148-182-218-256",
    ],
}


@pytest.mark.parametrize(("dimensions", "listed"), [(d, listed) for d, lists in PAPER.items() for listed in lists])
def test_eq_9_is_the_papers_list(dimensions: int, listed: str) -> None:
    sizes = tuple(map(int, listed.split("-")))
    assert equations.group_sizes(dimensions, len(sizes)) == sizes
    assert sum(sizes) == dimensions


def test_eq_9_does_not_follow_the_paper_where_it_adds_up_to_something_else() -> None:
    assert sum((52, 102, 152, 204)) == 510
    assert equations.group_sizes(512, 4) == (51, 102, 154, 205)


@example((4, 512))
@given(st.integers(1, 40).flatmap(lambda m: st.tuples(st.just(m), st.integers(m, 3000))))
def test_eq_9_sums_exactly_and_grows(request: tuple[int, int]) -> None:
    groups, dimensions = request
    sizes = equations.group_sizes(dimensions, groups)
    _, alpha = equations.boosting_rates(groups)
    assert len(sizes) == groups
    assert sum(sizes) == dimensions
    assert min(sizes) >= 1
    assert list(sizes) == sorted(sizes)
    if dimensions * alpha[0] >= 1 and (dimensions, groups) not in equations.PAPER_GROUPS:
        assert all(abs(size - dimensions * a) < 1 for size, a in zip(sizes, alpha, strict=True))


def test_eq_9_known_cases() -> None:
    assert equations.group_sizes(7, 1) == (7,)
    assert equations.group_sizes(3, 3) == (1, 1, 1)
    assert equations.group_sizes(60, 3) == (10, 20, 30)
    assert equations.group_sizes(64, 2) == (21, 43)


def test_eq_9_refuses_the_impossible() -> None:
    with pytest.raises(ConfigError, match=r"3 dimensions cannot be cut into 4 groups"):
        equations.group_sizes(3, 4)
    with pytest.raises(ConfigError, match=r"'dimensions' parameter must be a whole number of at least 1. Got 0"):
        equations.group_sizes(0, 1)
    with pytest.raises(ConfigError, match=r"whole number of at least 1\. Got 10\.5"):
        equations.group_sizes(10.5, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"at least 1. Got 0"):
        equations.group_sizes(512, 0)
