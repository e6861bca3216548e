"""A training step that is not logged never waits for the device, nor does a loss. No GPU is needed.

Under FakeTensorMode a tensor of the device "cuda" has a shape and no values: whatever asks for one fails, and so does
an operation on tensors of two devices. Only the backward pass needs a real device, for its streams; it runs on "meta",
another device without values. What may wait is said at `bier.training.loop._step`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import bier
from bier.config import Config
from bier.models.backbones import build_backbone
from bier.models.embed import run_network
from bier.training import loop, resolve
from bier.training.objective import FirstBroken, Objective, diversity_loss, metric_loss
from bier.training.optimizer import build_optimizer

GROUPS = (4, 6, 8)
METRIC: dict[str, Callable[[], nn.Module]] = {
    "eta": lambda: bier.BoostedLoss(GROUPS),
    "shrinkage": lambda: bier.BoostedLoss(GROUPS, boosting="shrinkage"),
    "gradient": lambda: bier.BoostedLoss(GROUPS, boosting="gradient"),
    "contrastive": lambda: bier.BoostedLoss(GROUPS, bier.Contrastive()),
    "triplets": lambda: bier.BoostedLoss(GROUPS, bier.Triplet()),
    "triplets by gradient": lambda: bier.BoostedLoss(GROUPS, bier.Triplet(), boosting="gradient"),
    "multi-similarity": lambda: bier.BoostedLoss(GROUPS, bier.MultiSimilarity()),
    "classifier": lambda: bier.BoostedClassifier(GROUPS, classes=5),
}


@pytest.fixture
def fake_gpu() -> Iterator[None]:
    with FakeTensorMode():
        yield


def moved(module: nn.Module, device: str) -> None:
    """Tensors without values in place of those of the module (`.to` cannot swap real ones for fake ones)."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for inner in module.modules():
        for name, value in inner._parameters.items():
            if value is not None:
                inner._parameters[name] = nn.Parameter(empty(value), value.requires_grad)
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                inner._buffers[name] = empty(buffer)


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("given", ["labels", "same"])
@pytest.mark.parametrize("name", METRIC)
def test_losses(name: str, given: str) -> None:
    loss = METRIC[name]()
    z = torch.empty(12, sum(GROUPS), device="cuda", requires_grad=True)
    labels = torch.empty(12, dtype=torch.long, device="cuda")
    moved(loss, "cuda")
    by_pairs = given == "same" and name != "classifier"
    total = loss(z, same=labels[:, None] == labels) if by_pairs else loss(z, labels)
    assert total.device.type == "cuda"


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("kind", [bier.ActivationLoss, bier.AdversarialLoss])
def test_diversity_losses(kind: Any) -> None:
    ensemble, loss = bier.EmbeddingEnsemble(16, GROUPS), kind(GROUPS)
    moved(ensemble, "cuda")
    moved(loss, "cuda")
    loss.hold(ensemble)
    assert loss(ensemble, torch.empty(12, 16, device="cuda")).device.type == "cuda"


@pytest.mark.usefixtures("fake_gpu")
def test_what_waits_or_is_elsewhere_fails_here() -> None:
    """The tests of this file can fail."""

    class Waiting:
        def __call__(self, similarity: Tensor, same: Tensor) -> Tensor:
            return similarity * float(similarity.mean())

    class Elsewhere:
        def __call__(self, similarity: Tensor, same: Tensor) -> Tensor:
            return similarity * torch.ones(similarity.shape)

    z, labels = torch.empty(12, sum(GROUPS), device="cuda"), torch.empty(12, dtype=torch.long, device="cuda")
    with pytest.raises(DataDependentOutputException):
        bier.BoostedLoss(GROUPS, Waiting(), boost=False)(z, labels)
    with pytest.raises(RuntimeError, match="cpu"):
        bier.BoostedLoss(GROUPS, Elsewhere(), boost=False)(z, labels)


def settings(backbone: str) -> Config:
    given = {"model.backbone": backbone, "model.pretrained": False, "model.groups": "96-160-256", "train.clip": 1.0}
    return resolve("a-bier", "glyphs", {**given, "train.log_every": 100, "train.steps": 1000})


def objective_of(config: Config) -> Objective:
    groups = (96, 160, 256)
    backbone = build_backbone(config.model.backbone, pretrained=False)
    ensemble = bier.EmbeddingEnsemble(backbone.features, groups)
    diversity = diversity_loss(config, config.diversity.name, groups)
    return Objective(backbone, ensemble, metric_loss(config, groups, 8), diversity, 1e-3, "float32")


def steps(config: Config, objective: Objective, device: str) -> None:
    """Steps 1 and 2 of training, which are not logged."""
    moved(objective, device)
    optimizer = build_optimizer(config, objective)
    objective.hold_rows(optimizer)
    objective.train()
    side, broken = objective.network.crop, FirstBroken()  # type: ignore[union-attr]
    setup: Any = SimpleNamespace(config=config, device=torch.device(device), objective=objective)
    for step in (1, 2):
        pixels = torch.zeros(16, 3, int(side), int(side), dtype=torch.uint8)  # type: ignore[arg-type]
        assert loop._step(setup, objective, optimizer, pixels, torch.zeros(16).long(), step, Path(), broken) == {}
    for parameter in objective.parameters():
        assert parameter.grad is not None
        assert parameter.grad.device.type == device


NETWORKS = ["efficientnet_lite0", "vit_tiny_patch16_224"]


@pytest.mark.parametrize("backbone", NETWORKS)
def test_a_training_step_on_a_gpu(backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the backward pass, which leaves a gradient for each weight."""
    pytest.importorskip("timm")
    config = settings(backbone)
    objective = objective_of(config)

    def backward(_: Tensor) -> None:
        for parameter in objective.parameters():
            parameter.grad = torch.empty_like(parameter)

    monkeypatch.setattr(Tensor, "backward", backward)
    with FakeTensorMode():
        steps(config, objective, "cuda")


@pytest.mark.parametrize("backbone", NETWORKS)
def test_a_training_step_with_its_backward_pass(backbone: str) -> None:
    pytest.importorskip("timm")
    config = settings(backbone)
    steps(config, objective_of(config), "meta")


@pytest.mark.parametrize("backbone", NETWORKS)
def test_encoding_and_validation(backbone: str) -> None:
    """Outputs stay on the device; what takes them from there waits."""
    pytest.importorskip("timm")
    objective = objective_of(settings(backbone)).eval()
    side = int(objective.network.crop)  # type: ignore[arg-type]
    with FakeTensorMode():
        moved(objective, "cuda")
        batches = [torch.zeros(4, 3, side, side, dtype=torch.uint8)] * 2
        for network in (objective.embed, objective.network, lambda pixels: objective.features(pixels.to("cuda"))):
            outputs = list(run_network(network, batches, torch.device("cuda")))
            assert {output.device.type for output in outputs} == {"cuda"}
        z = objective.embed(batches[0])
        assert objective.ensemble.vector(z).device.type == "cuda"


def test_the_first_value_that_is_not_finite_is_found_later() -> None:
    broken = FirstBroken()
    for step in range(1, 5):
        broken.note(step, "metric loss", torch.tensor(float("nan") if step == 3 else 1.0))
        broken.note(step, "diversity loss", torch.tensor(float("inf") if step in (2, 4) else 1.0))
        broken.note(step, "norm of the gradient", torch.tensor(1.0))
    assert broken.ask() == (2, "The diversity loss is inf.")
    assert FirstBroken().ask() is None
