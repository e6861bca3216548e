"""BoostedLoss against Algorithm 1 and Appendix B written out as loops, and its gradient with the weights held."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bier.method import boosting
from bier.method.boosting import BoostedLoss, BoostedParts
from bier.method.defaults import Boosting
from bier.method.losses import BinomialDeviance, Contrastive, Triplet, pair_weight, triplet_weight

GROUPINGS = [(5,), (2, 3), (2, 3, 4), (1, 2, 3, 4)]
PairLoss = Callable[[Tensor, Tensor], Tensor]


def batch(groups: tuple[int, ...], count: int = 9, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(count, sum(groups), dtype=torch.float64, generator=generator)
    labels = torch.arange(count) % classes
    return z.requires_grad_(), labels


def cosine(f: Tensor, g: Tensor) -> Tensor:
    dot = sum((f[k] * g[k] for k in range(len(f))), start=torch.zeros((), dtype=f.dtype))
    return dot / (sum(v * v for v in f).sqrt() * sum(v * v for v in g).sqrt())  # type: ignore[union-attr]


def naive_weight(loss: object, y: bool, s: float) -> float:
    if isinstance(loss, BinomialDeviance):
        exponent = -2 * (s - 0.5) if y else 2 * loss.cost * (s - 0.5)
        return 1 / (1 + math.exp(-exponent))
    if isinstance(loss, Contrastive):
        return 2 * abs(s - 1) if y else float(s > 0.5)
    raise TypeError(loss)


def naive_loss(loss: object, y: bool, s: Tensor) -> Tensor:
    if isinstance(loss, BinomialDeviance):
        return torch.log(1 + torch.exp(-2 * (s - 0.5) if y else 2 * loss.cost * (s - 0.5)))
    return (s - 1) ** 2 if y else torch.clamp(s - 0.5, min=0)


def naive_pairs(
    z: Tensor, labels: Tensor, groups: tuple[int, ...], loss: object, boost: bool, boosting: str = "eta"
) -> BoostedParts:
    """Algorithm 1 pair by pair; weights are Python numbers, so no gradient can pass through them."""
    starts = [sum(groups[:m]) for m in range(len(groups))]
    terms: dict[bool, list[list[Tensor]]] = {True: [], False: []}
    weights: dict[bool, list[list[float]]] = {True: [], False: []}
    for i, j in itertools.combinations(range(len(z)), 2):
        y = labels[i].item() == labels[j].item()
        w, running, activation = 1.0, 0.0, 0.5
        pair_terms, pair_weights = [], []
        for m, (start, size) in enumerate(zip(starts, groups, strict=True), start=1):
            s = cosine(z[i, start : start + size], z[j, start : start + size])
            pair_terms.append(w * naive_loss(loss, y, s))
            pair_weights.append(w)
            running = (1 - 2 / (m + 1)) * running + 2 / (m + 1) * s.item()
            if boosting == "shrinkage":
                assert isinstance(loss, BinomialDeviance)
                activation += 0.06 * 2 * (s.item() - 0.5) * (1 if y else -loss.cost)
                w = (1 if y else 2) / (1 + math.exp(activation))
            else:
                w = naive_weight(loss, y, running)
            w = w if boost else 1.0
        terms[y].append(pair_terms)
        weights[y].append(pair_weights)
    learners = []
    for m in range(len(groups)):
        means = [sum(pair[m] for pair in kind) / len(kind) for kind in terms.values() if kind]
        learners.append(sum(means, start=torch.zeros((), dtype=z.dtype)))
    mean_weights = [
        torch.tensor([sum(pair[m] for pair in kind) / max(len(kind), 1) for m in range(len(groups))], dtype=z.dtype)
        for kind in (weights[True], weights[False])
    ]
    stacked = torch.stack(learners)
    return BoostedParts(stacked.sum() / len(groups), stacked, *mean_weights)


def naive_triplets(
    z: Tensor, labels: Tensor, groups: tuple[int, ...], boost: bool
) -> tuple[Tensor, Tensor, list[float]]:
    """Appendix B triplet by triplet: the total, the loss of each learner, its mean weight."""
    starts = [sum(groups[:m]) for m in range(len(groups))]
    losses = [torch.zeros((), dtype=z.dtype) for _ in groups]
    weights = [0.0] * len(groups)
    y = labels.tolist()
    triplets = [
        (a, p, n) for a, p, n in itertools.product(range(len(z)), repeat=3) if a != p and y[a] == y[p] and y[a] != y[n]
    ]
    for a, p, n in triplets:
        w, plus, minus = 1.0, 0.0, 0.0
        for m, (start, size) in enumerate(zip(starts, groups, strict=True)):
            part = slice(start, start + size)
            s_plus, s_minus = cosine(z[a, part], z[p, part]), cosine(z[a, part], z[n, part])
            losses[m] = losses[m] + w * torch.clamp(s_minus - s_plus + 0.01, min=0) / len(triplets)
            weights[m] += w / len(triplets)
            eta = 2 / (m + 2)
            plus, minus = (1 - eta) * plus + eta * s_plus.item(), (1 - eta) * minus + eta * s_minus.item()
            w = float(minus - plus + 0.01 > 0) if boost else 1.0
    stacked = torch.stack(losses)
    return stacked.mean(), stacked, weights


def gradient(total: Tensor, z: Tensor) -> Tensor:
    return torch.autograd.grad(total, z)[0]


@pytest.mark.parametrize("band", [128, 4])
@pytest.mark.parametrize("boost", [True, False])
@pytest.mark.parametrize(
    ("loss", "reweighting"),
    [
        (BinomialDeviance(), "eta"),
        (BinomialDeviance(cost=25.0), "eta"),
        (Contrastive(), "eta"),
        (BinomialDeviance(), "shrinkage"),
        (BinomialDeviance(cost=25.0), "shrinkage"),
    ],
)
@pytest.mark.parametrize("groups", GROUPINGS)
def test_algorithm_1(
    groups: tuple[int, ...],
    loss: PairLoss,
    reweighting: Boosting,
    boost: bool,
    band: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boosting, "BAND", band)  # 9 images: within one band, and over three of them
    z, labels = batch(groups)
    boosted = BoostedLoss(groups, loss, boost, reweighting)
    parts, naive = boosted.parts(z, labels), naive_pairs(z, labels, groups, loss, boost, reweighting)
    assert torch.equal(boosted(z, labels), parts.total)
    atol = 1e-9 if reweighting == "shrinkage" else 1e-10  # torch's softplus is linear above 20, 2e-9 off
    for ours, expected in zip(parts, naive, strict=True):
        assert torch.allclose(ours, expected, rtol=0, atol=atol)
    assert torch.allclose(gradient(parts.total, z), gradient(naive.total, z), rtol=0, atol=atol)


@pytest.mark.parametrize("boost", [True, False])
@pytest.mark.parametrize("groups", GROUPINGS)
def test_appendix_b(groups: tuple[int, ...], boost: bool) -> None:
    z, labels = batch(groups, count=7)
    parts = BoostedLoss(groups, Triplet(), boost).parts(z, labels)
    total, learners, weights = naive_triplets(z, labels, groups, boost)
    assert torch.allclose(parts.total, total, rtol=0, atol=1e-10)
    assert torch.allclose(parts.learners, learners, rtol=0, atol=1e-10)
    assert parts.positive_weights.tolist() == pytest.approx(weights, abs=1e-10)
    assert torch.equal(parts.positive_weights, parts.negative_weights)
    assert torch.allclose(gradient(parts.total, z), gradient(total, z), rtol=0, atol=1e-10)


def test_embeddings_at_known_angles() -> None:
    """Two images 60 degrees apart for learner 1 and 90 for learner 2, of one class; a third opposite the first."""
    degrees = [(0, 0), (60, 90), (180, 180)]
    rows = [[f(math.radians(a)) for a in pair for f in (math.cos, math.sin)] for pair in degrees]
    z = torch.tensor(rows, dtype=torch.float64)
    parts = BoostedLoss((2, 2), Contrastive()).parts(z, torch.tensor([7, 7, 8]))
    # positive: s = 0.5 then 0; negatives: cos 180 and cos 120, then cos 180 and cos 90, all below the margin
    assert parts.learners.tolist() == pytest.approx([0.25, 2 * 0.5 * 1.0], abs=1e-12)
    assert parts.total.item() == pytest.approx(0.625, abs=1e-12)
    assert parts.positive_weights.tolist() == pytest.approx([1.0, 1.0], abs=1e-12)
    assert parts.negative_weights.tolist() == pytest.approx([1.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("loss", [BinomialDeviance(), Contrastive(), Triplet()])
@pytest.mark.parametrize(("groups", "boost"), [((4,), True), ((2, 3), False)])
def test_gradcheck_where_weights_are_constant(loss: PairLoss, groups: tuple[int, ...], boost: bool) -> None:
    z, labels = batch(groups, count=6)
    boosted = BoostedLoss(groups, loss, boost)
    assert torch.autograd.gradcheck(lambda x: boosted(x, labels), z)


def test_boosting_lowers_the_weight_of_what_is_solved() -> None:
    z = torch.tensor([[1.0, 0, 1, 0], [1, 0, 1, 0], [-1, 0, -1, 0], [-1, 0, -1, 0]])
    parts = BoostedLoss((2, 2)).parts(z, torch.tensor([0, 0, 1, 1]))
    assert parts.negative_weights[1] < 1e-6
    wrong = BoostedLoss((2, 2)).parts(z, torch.tensor([0, 1, 0, 1]))
    assert wrong.negative_weights[1] > 0.3
    assert wrong.positive_weights[1] > parts.positive_weights[1]


@pytest.mark.parametrize(
    ("loss", "reweighting"), [(BinomialDeviance(), "eta"), (Contrastive(), "eta"), (BinomialDeviance(), "shrinkage")]
)
def test_no_gradient_through_the_weights(loss: PairLoss, reweighting: Boosting) -> None:
    """Learner 1 has the gradient that it has alone, whatever the learners after it do with its scores."""
    z, labels = batch((2, 3, 4))
    alone = z.detach()[:, :2].requires_grad_()
    expected = gradient(BoostedLoss((2,), loss)(alone, labels), alone) / 3
    boosted = BoostedLoss((2, 3, 4), loss, boosting=reweighting)
    assert torch.allclose(gradient(boosted(z, labels), z)[:, :2], expected, atol=1e-12)
    assert not boosted.parts(z, labels).positive_weights.requires_grad


def test_shrinkage_weighs_solved_negative_pairs_more_than_eta_does() -> None:
    z = torch.tensor([[1.0, 0, 1, 0], [1, 0, 1, 0], [-1, 0, -1, 0], [-1, 0, -1, 0]])
    labels = torch.tensor([0, 0, 1, 1])
    by_eta, by_shrinkage = (BoostedLoss((2, 2), boosting=one).parts(z, labels) for one in ("eta", "shrinkage"))
    assert by_eta.negative_weights[1] < 1e-6
    # a^1 = 0.5 + 0.06 * 2 * 1.5 * 10 for a negative pair at s = -1, 0.5 + 0.06 * 2 * 0.5 for a positive one at s = 1
    assert by_shrinkage.negative_weights[1].item() == pytest.approx(2 / (1 + math.exp(2.3)), rel=1e-5)
    assert by_shrinkage.positive_weights[1].item() == pytest.approx(1 / (1 + math.exp(0.56)), rel=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(9)), st.sampled_from([BinomialDeviance(), Contrastive(), Triplet()]))
def test_order_of_the_batch_does_not_matter(order: list[int], loss: PairLoss) -> None:
    z, labels = batch((2, 3, 4))
    boosted = BoostedLoss((2, 3, 4), loss)
    parts, shuffled = boosted.parts(z, labels), boosted.parts(z[order], labels[order])
    for ours, other in zip(parts, shuffled, strict=True):
        assert torch.allclose(ours, other, atol=1e-12)
    assert torch.allclose(gradient(shuffled.total, z), gradient(parts.total, z), atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.01, 100), min_size=27, max_size=27), st.lists(st.booleans(), min_size=3, max_size=3))
def test_length_and_sign_of_a_learner_do_not_matter(lengths: list[float], negate: list[bool]) -> None:
    """Each image may have its own length for each learner; a learner may turn the sign of all its vectors."""
    z, labels = batch((2, 3, 4))
    scale = torch.tensor(lengths, dtype=torch.float64).reshape(9, 3) * torch.tensor(
        [-1.0 if n else 1.0 for n in negate]
    )
    changed = z.detach() * scale.repeat_interleave(torch.tensor([2, 3, 4]), dim=1)
    expected = BoostedLoss((2, 3, 4)).parts(z, labels)
    assert torch.allclose(BoostedLoss((2, 3, 4)).parts(changed, labels).learners, expected.learners, atol=1e-10)


def logistic(similarity: Tensor, same: Tensor) -> Tensor:
    """A user's own loss, with the derivative -exp(-s) for a positive pair and 3 s^2 for a negative one."""
    return torch.where(same, torch.exp(-similarity), similarity**3)


class SquaredTriplet:
    over = "triplets"

    def __call__(self, positive: Tensor, negative: Tensor) -> Tensor:
        return (1 - positive) ** 2 + torch.relu(negative) ** 2


def test_a_users_own_losses_get_their_weights_by_differentiation() -> None:
    s = torch.linspace(-1, 1, 11, dtype=torch.float64)
    same = torch.arange(11) % 2 == 0
    weight = pair_weight(logistic, s.requires_grad_(), same)
    assert torch.allclose(weight, torch.where(same, torch.exp(-s), 3 * s**2), atol=1e-12)
    assert not weight.requires_grad
    weight = triplet_weight(SquaredTriplet(), s, s.flip(0))
    assert torch.allclose(weight, (2 * (1 - s) + 2 * s.flip(0).clamp_min(0)) / 2, atol=1e-12)
    assert not weight.requires_grad


def test_a_closed_form_of_either_sign_gives_a_weight_without_gradient() -> None:
    class Signed:
        def weight(self, first: Tensor, second: Tensor) -> Tensor:
            return -first * 2

    s = torch.tensor([0.5, -0.25], requires_grad=True)
    for weight in (pair_weight(Signed(), s, s > 0), triplet_weight(Signed(), s, s)):
        assert weight.tolist() == [1.0, 0.5]
        assert not weight.requires_grad


def test_a_users_own_loss_is_boosted_as_its_closed_form() -> None:
    class Closed:
        def __call__(self, similarity: Tensor, same: Tensor) -> Tensor:
            return logistic(similarity, same)

        def weight(self, similarity: Tensor, same: Tensor) -> Tensor:
            return torch.where(same, torch.exp(-similarity), 3 * similarity**2)

    z, labels = batch((2, 3, 4))
    for ours, expected in zip(
        BoostedLoss((2, 3, 4), logistic).parts(z, labels),
        BoostedLoss((2, 3, 4), Closed()).parts(z, labels),
        strict=True,
    ):
        assert torch.allclose(ours, expected, atol=1e-12)


def test_a_users_own_triplet_loss_by_loops() -> None:
    z, labels = batch((2, 3), count=6)
    parts = BoostedLoss((2, 3), SquaredTriplet()).parts(z, labels)
    loss, y, terms, weights = SquaredTriplet(), labels.tolist(), [], []
    for a, p, n in itertools.product(range(6), repeat=3):
        if a != p and y[a] == y[p] and y[a] != y[n]:
            first = cosine(z[a, :2], z[p, :2]).item(), cosine(z[a, :2], z[n, :2]).item()
            weights.append((2 * (1 - first[0]) + 2 * max(first[1], 0)) / 2)
            terms.append(weights[-1] * loss(cosine(z[a, 2:], z[p, 2:]), cosine(z[a, 2:], z[n, 2:])).item())
    assert parts.learners[1].item() == pytest.approx(sum(terms) / len(terms), abs=1e-10)
    assert parts.positive_weights[1].item() == pytest.approx(sum(weights) / len(weights), abs=1e-10)


@pytest.mark.parametrize("groups", GROUPINGS)
@pytest.mark.parametrize("kind", [BinomialDeviance(cost=5.0), Contrastive(), Triplet(margin=0.3)], ids=repr)
def test_functional_gradient(groups: tuple[int, ...], kind: PairLoss) -> None:
    """Eq. (7c) pair by pair and triplet by triplet: the earlier learners enter as Python numbers."""
    z, labels = batch(groups)
    starts = [sum(groups[:m]) for m in range(len(groups))]

    def running(i: int, j: int) -> list[Tensor]:
        scores, before = [], 0.0
        for m, (start, size) in enumerate(zip(starts, groups, strict=True), start=1):
            own = cosine(z[i, start : start + size], z[j, start : start + size])
            scores.append((1 - 2 / (m + 1)) * before + 2 / (m + 1) * own)
            before = scores[-1].item()
        return scores

    scores = {(i, j): running(i, j) for i in range(len(z)) for j in range(len(z)) if i != j}
    same = {(i, j): bool(labels[i] == labels[j]) for i, j in scores}
    learners = []
    for m in range(len(groups)):
        if isinstance(kind, Triplet):
            triplets = [
                torch.clamp(scores[a, n][m] - scores[a, p][m] + 0.3, min=0)
                for a, p in scores
                for n in range(len(z))
                if same[a, p] and n != a and not same[a, n]
            ]
            learners.append(torch.stack(triplets).mean())
        else:
            kinds = [
                [naive_loss(kind, y, scores[i, j][m]) for i, j in scores if same[i, j] == y] for y in (True, False)
            ]
            learners.append(sum(torch.stack(values).mean() for values in kinds))
    expected = torch.stack(learners)
    parts = BoostedLoss(groups, kind, boosting="gradient").parts(z, labels)
    assert torch.allclose(parts.learners, expected, atol=1e-12)
    assert parts.positive_weights.tolist() == pytest.approx([1.0] * len(groups))
    gradients = [torch.autograd.grad(one, z)[0] for one in (parts.total, expected.mean())]
    assert torch.allclose(*gradients, atol=1e-10)
