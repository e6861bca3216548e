"""Every loss compiles into one graph, once, and gives the value and the gradient that it gives without."""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import bier
from bier.method import boosting

GROUPS = (4, 6, 8)
LOSSES: dict[str, Callable[[], nn.Module]] = {
    **{f"binomial deviance by {kind}": lambda kind=kind: bier.BoostedLoss(GROUPS, boosting=kind) for kind in
       ("eta", "shrinkage", "gradient")},
    "contrastive": lambda: bier.BoostedLoss(GROUPS, bier.Contrastive()),
    "not boosted": lambda: bier.BoostedLoss(GROUPS, boost=False),
    "triplets": lambda: bier.BoostedLoss(GROUPS, bier.Triplet(margin=0.3)),
    "triplets by gradient": lambda: bier.BoostedLoss(GROUPS, bier.Triplet(margin=0.3), boosting="gradient"),
    "multi-similarity": lambda: bier.BoostedLoss(GROUPS, bier.MultiSimilarity()),
    "classifier": lambda: bier.BoostedClassifier(GROUPS, classes=4),
}  # fmt: skip
DIVERSITY: dict[str, Callable[[], bier.ActivationLoss | bier.AdversarialLoss]] = {
    "activation": lambda: bier.ActivationLoss(GROUPS),
    "activation with a weight term": lambda: bier.ActivationLoss(GROUPS, lambda_w=0.1, through_backbone=True),
    "adversarial": lambda: bier.AdversarialLoss(GROUPS, hidden=8),
}


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch._dynamo.reset()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(16, sum(GROUPS)).requires_grad_(), torch.randint(4, (16,))


def assert_equal(eager: Tensor, compiled: Tensor, leaves: list[Tensor]) -> None:
    assert compiled.item() == pytest.approx(eager.item(), abs=1e-6)
    gradients = [torch.autograd.grad(total, leaves, retain_graph=True) for total in (eager, compiled)]
    assert any(bool(gradient.any()) for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, counter = LOSSES[name](), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for seed in range(3):
        z, labels = batch(seed)
        assert_equal(loss(z, labels), compiled(z, labels), [z, *loss.parameters()])
    assert counter.frame_count == 1


def test_several_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boosting, "BAND", 5)
    test_losses("binomial deviance by eta")


def test_a_matrix_in_place_of_labels() -> None:
    loss, counter = bier.BoostedLoss(GROUPS), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for seed in range(2):
        z, labels = batch(seed)
        same = labels[:, None] == labels
        assert_equal(loss(z, same=same), compiled(z, same=same), [z])
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", DIVERSITY)
def test_diversity_losses(name: str) -> None:
    torch.manual_seed(0)
    ensemble, loss = bier.EmbeddingEnsemble(12, GROUPS), DIVERSITY[name]()
    counter = CompileCounterWithBackend("aot_eager")
    loss.hold(ensemble)
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for _ in range(3):
        features = torch.randn(16, 12)
        assert_equal(
            loss(ensemble, features), compiled(ensemble, features), [*ensemble.parameters(), *loss.parameters()]
        )
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
def test_machine_code() -> None:
    """The default backend, on the losses that most people train with."""
    loss = bier.BoostedLoss(GROUPS)
    compiled = torch.compile(loss, fullgraph=True)
    z, labels = batch(0)
    assert_equal(loss(z, labels), compiled(z, labels), [z])
