"""Numbers: three precisions agree within stated bounds, and no finite input gives NaN."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import bier
from bier.collection import KS
from bier.errors import BierError
from bier.evaluate.ensemble import evaluate_ensemble
from bier.method.ensemble import EmbeddingEnsemble
from bier.method.equations import unit_rows
from bier.models.backbones import build_backbone
from bier.models.model import Model

GROUPS = (8, 16)
# How far a loss, relative to its size, and an entry of a unit vector may be from float64. bfloat16 has 8 bits.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
LOSSES = {"binomial": bier.BinomialDeviance, "contrastive": bier.Contrastive, "triplet": bier.Triplet}


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(6).repeat_interleave(4)
    centres = torch.randn(6, 24, generator=draw, dtype=torch.float64)
    return centres[labels] + 0.7 * torch.randn(24, 24, generator=draw, dtype=torch.float64), labels


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", BOUNDS, ids=str)
def test_losses_agree(tally: Any, name: str, kind: torch.dtype) -> None:
    for seed in range(5):
        z, labels = batch(seed)
        loss = bier.BoostedLoss(GROUPS, loss=LOSSES[name]())
        exact, found = float(loss(z, labels)), float(loss(z.to(kind), labels))
        close = math.isclose(found, exact, rel_tol=BOUNDS[kind], abs_tol=BOUNDS[kind])
        tally.case(f"numbers: loss in {kind}", close, note=f"{name}: {found}, expected {exact}")


def test_vectors_agree(tally: Any) -> None:
    torch.manual_seed(0)
    model = Model(build_backbone("conv4"), EmbeddingEnsemble(512, GROUPS), precision="float32").eval()
    pictures = np.random.default_rng(0).integers(0, 256, (6, 48, 48, 3), dtype=np.uint8)
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    vectors = {torch.float32: model.encode(pictures)}
    model.precision = "bfloat16"
    vectors[torch.bfloat16] = model.encode(pictures)
    model.precision = "float32"
    with torch.no_grad():
        exact = model.double()(pixels).numpy()
    for kind, found in vectors.items():
        error = float(np.abs(found - exact).max())
        tally.case(f"numbers: vector in {kind}", error < BOUNDS[kind], note=f"off by {error:g}")


def test_recall_agrees(tally: Any) -> None:
    """Recall is exact: rounding the vectors to float32 moves no rank here, and to bfloat16 few."""
    labels = np.repeat(np.arange(40), 5)
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(40, 24))[labels] + draw.normal(size=(200, 24))
    exact = bier.recall_at_k(vectors, labels, (1, 4))
    for kind, bound in ((torch.float32, 0.0), (torch.bfloat16, 2.0)):
        found = bier.recall_at_k(torch.from_numpy(vectors).to(kind), labels, (1, 4))
        close = all(abs(found[k] - exact[k]) <= bound for k in exact)
        tally.case(f"numbers: recall in {kind}", close, note=f"{found}, expected {exact}")


STRANGE: dict[str, torch.Tensor] = {
    "zeros": torch.zeros(24, 24),
    "constant": torch.ones(24, 24),
    "one vector, repeated": torch.randn(1, 24, generator=torch.Generator().manual_seed(0)).repeat(24, 1),
    "pairs of duplicates": torch.randn(12, 24, generator=torch.Generator().manual_seed(0)).repeat(2, 1),
    "huge": 1e20 * batch()[0].float(),
    "largest": torch.full((24, 24), 3e38),
    "tiny": 1e-30 * batch()[0].float(),
    "huge and tiny": batch()[0].float() * torch.logspace(-30, 30, 24)[:, None],
    "opposite": torch.cat([torch.ones(12, 24), -torch.ones(12, 24)]),
}


@pytest.mark.parametrize("name", STRANGE)
def test_no_input_gives_nan(tally: Any, name: str) -> None:
    labels = batch()[1]
    for kind, make in LOSSES.items():
        z = STRANGE[name].clone().requires_grad_()
        loss = bier.BoostedLoss(GROUPS, loss=make())(z, labels)
        loss.backward()
        finite = bool(torch.isfinite(loss)) and bool(torch.isfinite(z.grad).all())
        tally.case("numbers: strange input, loss", finite, note=f"{name}, {kind}: {loss}")
    z = STRANGE[name]
    unit = unit_rows(z)
    lengths = unit.norm(dim=1)
    whole = bool(((lengths - 1).abs() < 1e-5).logical_or(lengths == 0).all())
    tally.case("numbers: strange input, unit rows", whole, note=f"{name}: {lengths}")
    result = evaluate_ensemble(z.numpy(), GROUPS, labels.numpy(), (1, 4))
    values = [value for row in result.recall.values() for value in row.values()]
    measured = [value for value in (result.feature_correlation, result.classifier_correlation) if value is not None]
    finite = all(math.isfinite(value) and 0 <= value <= 100 for value in values) and all(map(math.isfinite, measured))
    tally.case("numbers: strange input, recall", finite, note=f"{name}: {values} {measured}")
    try:
        scores = bier.Index.build(z.numpy(), groups=GROUPS).search(z.numpy(), 3).scores
        tally.case("numbers: strange input, search", bool(np.isfinite(scores).all()), note=name)
    except BierError as error:
        tally.case("numbers: strange input, search", "\n" not in str(error), note=f"{name}: {error}")


@pytest.mark.parametrize("scale", [1e20, 1e-20, 1e38, 1e-30])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_recall_of_long_and_short_vectors(tally: Any, scale: float, kind: type[Any]) -> None:
    """Scores that overflow or underflow in float32 once made every query a miss."""
    labels = np.repeat(np.arange(6), 8)
    vectors = np.random.default_rng(0).normal(size=(6, 16))[labels] + np.random.default_rng(1).normal(size=(48, 16))
    vectors /= np.abs(vectors).max()
    expected = bier.recall_at_k(vectors, labels, KS)
    found = bier.recall_at_k((vectors * scale).astype(kind), labels, KS)
    tally.case("recall of scaled vectors", found == expected, note=f"{scale:g}: {found}, expected {expected}")
    others = bier.recall_at_k((vectors * scale).astype(kind), labels, KS, vectors, labels)
    expected = bier.recall_at_k(vectors, labels, KS, vectors, labels)
    tally.case("recall of scaled vectors", others == expected, note=f"{scale:g} with a gallery: {others}")
