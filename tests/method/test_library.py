"""Every loss of pytorch-metric-learning: boosted, or listed as not boostable; each way against loops or our losses."""

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import bier
from bier.errors import ConfigError, MissingExtraError
from bier.method.library import NOT_BOOSTED, build_loss, build_miner

losses = pytest.importorskip("pytorch_metric_learning.losses")
from pytorch_metric_learning import distances, miners, reducers  # noqa: E402

GROUPS = (3, 4, 5)
CLASSES = 4
NAMES = sorted(name for name, kind in vars(losses).items() if inspect.isclass(kind))
REQUIRED: dict[str, dict[str, Any]] = {  # they have no default
    "RankedListLoss": {"margin": 0.4, "Tn": 1.0},
    "CrossBatchMemory": {"loss": "MultiSimilarityLoss", "memory_size": 64},
}
WITH_PROXIES = {
    *("ArcFaceLoss", "CosFaceLoss", "LargeMarginSoftmaxLoss", "NormalizedSoftmaxLoss", "ProxyAnchorLoss"),
    *("ProxyNCALoss", "SoftTripleLoss", "SphereFaceLoss", "SubCenterArcFaceLoss"),
}


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(4 * CLASSES, sum(GROUPS), generator=generator, dtype=torch.float64).requires_grad_()
    return z, torch.arange(CLASSES).repeat_interleave(4)


def built(name: str) -> Any:
    torch.manual_seed(0)
    return build_loss(name, REQUIRED.get(name, {}), sum(GROUPS), CLASSES).double()


def test_the_list_names_classes_that_the_library_has() -> None:
    assert set(NOT_BOOSTED) <= set(NAMES)
    assert len(set(NAMES) - set(NOT_BOOSTED)) >= 29


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # SphereFaceLoss, with NumPy 2
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # HistogramLoss
@pytest.mark.parametrize("name", NAMES)
def test_every_loss_of_the_library(name: str) -> None:
    if name in NOT_BOOSTED:
        with pytest.raises(
            ConfigError, match=rf"^The setting 'loss.name' = {name} cannot be boosted: {NOT_BOOSTED[name]}"
        ):
            build_loss(name, {}, sum(GROUPS), CLASSES)
        return
    z, labels = batch()
    plain = built(name)
    single = bier.BoostedLoss((sum(GROUPS),), loss=plain)
    assert single(z, labels).item() == pytest.approx(plain(z, labels).item(), abs=1e-5)
    boosted = bier.BoostedLoss(GROUPS, loss=plain)
    assert boosted.loss.has_proxies == (name in WITH_PROXIES)
    parts = boosted.parts(z, labels)
    assert parts.learners.shape == parts.positive_weights.shape == parts.negative_weights.shape == (3,)
    assert parts.total.item() == pytest.approx(parts.learners.mean().item())
    parts.total.backward()
    assert z.grad is not None
    assert all(float(part.norm()) > 1e-4 for part in z.grad.split(GROUPS, dim=1))
    assert all(p.grad is not None and float(p.grad.norm()) > 1e-4 for p in boosted.parameters())
    # A learner's loss reaches the learners before it in no way, and neither do its weights.
    last = torch.autograd.grad(boosted.parts(z, labels).learners[2], z)[0].split(GROUPS, dim=1)
    assert [bool(part.any()) for part in last] == [False, False, True]
    # Boosting changes what the later learners are trained with, and only that.
    alone = torch.autograd.grad(bier.BoostedLoss(GROUPS, loss=plain, boost=False)(z, labels), z)[0]
    if name != "AngularLoss":  # with one learner it sees the lengths of embeddings, as in the library
        assert torch.allclose(alone[:, :3], z.grad[:, :3], atol=1e-8)
    assert not torch.allclose(alone[:, 3:7], z.grad[:, 3:7], atol=1e-4)


class PairMargin:
    """ContrastiveLoss with cosine similarity and plain means, as a loss of ours."""

    def __call__(self, similarity: Tensor, same: Tensor) -> Tensor:
        return torch.where(same, F.relu(0.8 - similarity), F.relu(similarity - 0.1))


class SmoothTriplet:
    over = "triplets"

    def __call__(self, positive: Tensor, negative: Tensor) -> Tensor:
        return F.softplus(negative - positive + 0.2)


AS_OURS = {"distance": distances.CosineSimilarity(), "reducer": reducers.MeanReducer()}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (losses.ContrastiveLoss(pos_margin=0.8, neg_margin=0.1, **AS_OURS), PairMargin()),
        (losses.TripletMarginLoss(margin=0.2, smooth_loss=True, **AS_OURS), SmoothTriplet()),
    ],
    ids=["pairs", "triplets"],
)
def test_pairs_and_triplets_as_our_own_losses(theirs: Any, ours: Any) -> None:
    z, labels = batch()
    mine = bier.BoostedLoss(GROUPS, ours, boosting="gradient").parts(z, labels)
    other = bier.BoostedLoss(GROUPS, theirs).parts(z, labels)
    assert torch.allclose(mine.learners, other.learners, atol=1e-12)
    assert torch.allclose(mine.positive_weights, other.positive_weights, atol=1e-12)
    assert torch.allclose(mine.negative_weights, other.negative_weights, atol=1e-12)
    gradients = [torch.autograd.grad(parts.total, z)[0] for parts in (mine, other)]
    assert torch.allclose(*gradients, atol=1e-12)


def running_scores(z: Tensor) -> list[Tensor]:
    """s^1, s^2, s^3 of Eq. (6), the learners before the last one of each without a gradient."""
    scores, running = [], torch.zeros(len(z), len(z), dtype=z.dtype)
    for m, part in enumerate(z.split(GROUPS, dim=1), start=1):
        f = part / part.norm(dim=1, keepdim=True)
        running = (1 - 2 / (m + 1)) * running.detach() + 2 / (m + 1) * (f @ f.T)
        scores.append(running)
    return scores


def test_functional_gradient_of_a_loss_of_the_similarity_matrix() -> None:
    """Eq. (7c) for Multi-Similarity, written out."""
    z, labels = batch()
    boosted = bier.BoostedLoss(GROUPS, losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5))
    expected = torch.zeros((), dtype=z.dtype)
    for scores in running_scores(z):
        for i in range(len(z)):
            positive = sum(
                torch.exp(-2 * (scores[i, j] - 0.5)) for j in range(len(z)) if j != i and labels[i] == labels[j]
            )
            negative = sum(torch.exp(50 * (scores[i, j] - 0.5)) for j in range(len(z)) if labels[i] != labels[j])
            expected = expected + (torch.log(1 + positive) / 2 + torch.log(1 + negative) / 50) / len(z) / 3
    total = boosted(z, labels)
    assert total.item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.allclose(*(torch.autograd.grad(one, z)[0] for one in (total, expected)), atol=1e-10)


def test_proxies_are_split_and_images_are_weighted() -> None:
    """NormalizedSoftmaxLoss by loops: the weight of an image is 1 - p of its class, divided by the mean weight."""
    z, labels = batch()
    plain = built("NormalizedSoftmaxLoss")
    boosted = bier.BoostedLoss(GROUPS, plain)
    assert [tuple(p.shape) for p in boosted.parameters()] == [(3, 4), (4, 4), (5, 4)]
    assert torch.equal(torch.cat(list(boosted.parameters())), plain.W)
    running = torch.zeros(len(z), CLASSES, dtype=z.dtype)
    learners, weights = [], []
    for m, (part, proxies) in enumerate(zip(z.split(GROUPS, dim=1), plain.W.split(GROUPS), strict=True), start=1):
        weight = 1 - running.softmax(dim=1)[torch.arange(len(z)), labels] if m > 1 else torch.ones(len(z))
        logits = F.normalize(part, dim=1) @ F.normalize(proxies, dim=0) / 0.05
        values = [weight[i] * F.cross_entropy(logits[i], labels[i]) for i in range(len(z))]
        learners.append((sum(values) / weight.sum()).item())
        weights.append(weight.mean().item())
        running = (1 - 2 / (m + 1)) * running + 2 / (m + 1) * logits.detach()
    parts = boosted.parts(z, labels)
    assert parts.learners.tolist() == pytest.approx(learners, rel=1e-9)
    assert parts.positive_weights.tolist() == parts.negative_weights.tolist() == pytest.approx(weights, rel=1e-9)


def test_proxy_anchor_weights_the_gradient_of_each_image() -> None:
    """It has no value per image: values are the library's own, gradients are those times the weight."""
    z, labels = batch()
    boosted, alone = (bier.BoostedLoss(GROUPS, built("ProxyAnchorLoss"), boost) for boost in (True, False))
    assert torch.allclose(boosted.parts(z, labels).learners, alone.parts(z, labels).learners)
    weighted, plain = (torch.autograd.grad(one.parts(z, labels).learners[1], z)[0] for one in (boosted, alone))
    logits = 32 * F.normalize(z[:, :3], dim=1) @ F.normalize(next(alone.parameters()), dim=1).T
    weight = 1 - logits.softmax(dim=1)[torch.arange(len(z)), labels]
    assert torch.allclose(weighted, plain * (weight / weight.mean())[:, None], atol=1e-10)


def test_as_many_classes_as_dimensions() -> None:
    proxies, columns = losses.ProxyAnchorLoss(12, 12), losses.NormalizedSoftmaxLoss(12, 12)
    assert [tuple(p.shape) for p in bier.BoostedLoss(GROUPS, proxies).parameters()] == [(12, 3), (12, 4), (12, 5)]
    assert [tuple(p.shape) for p in bier.BoostedLoss(GROUPS, columns).parameters()] == [(3, 12), (4, 12), (5, 12)]


def test_a_miner_chooses_for_each_learner() -> None:
    z, labels = batch()
    miner = miners.DistanceWeightedMiner(cutoff=0.5, nonzero_loss_cutoff=1.9)
    seen: list[int] = []
    miner.register_forward_hook(lambda _, arguments, __: seen.append(arguments[0].shape[1]))
    torch.manual_seed(0)
    total = bier.BoostedLoss(GROUPS, losses.MarginLoss(learn_beta=True), miner=miner)(z, labels)
    assert seen == [3, 7, 12]  # the vector of the learners so far
    assert total.item() != pytest.approx(bier.BoostedLoss(GROUPS, losses.MarginLoss(learn_beta=True))(z, labels).item())
    bier.BoostedLoss(GROUPS, losses.MultiSimilarityLoss(), miner=miners.MultiSimilarityMiner())(z, labels).backward()


def test_a_batch_without_pairs_has_no_loss() -> None:
    z, _ = batch()
    for name in ("ContrastiveLoss", "TripletMarginLoss", "MarginLoss", "MultiSimilarityLoss", "NTXentLoss"):
        total = bier.BoostedLoss(GROUPS, built(name))(z, torch.zeros(len(z), dtype=torch.long))
        total.backward()
        assert torch.isfinite(total)


def test_the_graph_that_dynamic_soft_margin_holds() -> None:
    """Why it is not boosted: without this failure it belongs to the losses that are."""
    z, labels = batch()
    loss = losses.DynamicSoftMarginLoss().double()
    loss(z, labels).backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss(z, labels).backward()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("MultiSimilarity", {}, r"'loss.name' must name a class .* Got 'MultiSimilarity' .* 'MultiSimilarityLoss'\?"),
        (
            "MultiSimilarityLoss",
            {"gamma": 1},
            r"'loss.settings' must hold arguments of MultiSim.* Got .*gamma",
        ),
        ("RankedListLoss", {}, r"'loss.settings' must hold arguments of RankedListLoss. Got \{\} instead: .*margin"),
        ("CircleLoss", {"distance": "Cosine"}, r"'loss.settings.distance' must name a class .*CosineSimilarity"),
        ("CircleLoss", {"distance": "LpDistance"}, r"'loss.settings' must hold arguments of CircleLoss"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_loss(name, settings, 12, 4)
    assert "\n" not in str(caught.value)


def test_other_errors() -> None:
    with pytest.raises(ConfigError, match=r"'loss\.miner' must name a class"):
        build_miner("HardMiner", {})
    with pytest.raises(ConfigError, match=r"parameter 'proxies' of ProxyAnchorLoss must have 12 .* \(4, 16\)"):
        bier.BoostedLoss(GROUPS, losses.ProxyAnchorLoss(4, 16))
    with pytest.raises(ConfigError, match=r"'gradient' goes with losses of pairs.* ProxyAnchorLoss"):
        bier.BoostedLoss(GROUPS, losses.ProxyAnchorLoss(4, 12), boosting="gradient")
    with pytest.raises(ConfigError, match=r"'shrinkage' goes with BinomialDeviance\. Got the loss CircleLoss instead"):
        bier.BoostedLoss(GROUPS, losses.CircleLoss(), boosting="shrinkage")
    with pytest.raises(ConfigError, match="'miner' parameter goes with a loss of pytorch-metric-learning"):
        bier.BoostedLoss(GROUPS, miner=miners.BatchHardMiner())
    with pytest.raises(ConfigError, match="VICRegLoss cannot be boosted: it takes two views"):
        bier.BoostedLoss(GROUPS, losses.VICRegLoss())


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bier-ml\[peers\]'"):
        build_loss("ContrastiveLoss", {}, 12, 4)
