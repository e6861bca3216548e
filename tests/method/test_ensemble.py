"""The embedding layer: raw embeddings, learners, and the test-time vector (Eq. (10))."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bier.errors import ConfigError, DataError
from bier.method import equations
from bier.method.defaults import Weighting
from bier.method.ensemble import EmbeddingEnsemble

GROUPS = (2, 3, 4)


def raw(count: int = 6, seed: int = 0, groups: tuple[int, ...] = GROUPS) -> Tensor:
    return torch.randn(count, sum(groups), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive_vector(row: list[float], groups: tuple[int, ...], weighting: str) -> list[float]:
    """Eq. (10) for one image, dimension by dimension."""
    M = len(groups)
    vector, start = [], 0
    for m, size in enumerate(groups, start=1):
        alpha = 2 * m / (M * (M + 1))
        part = row[start : start + size]
        length = math.sqrt(sum(v * v for v in part))
        vector += [(alpha if weighting == "alpha" else math.sqrt(alpha)) * v / length for v in part]
        start += size
    return vector


@pytest.mark.parametrize("weighting", ["alpha", "sqrt"])
@pytest.mark.parametrize("learners", [None, 1, 2, 3])
def test_vector_and_its_prefixes_by_loops(weighting: Weighting, learners: int | None) -> None:
    z = raw()
    vector = EmbeddingEnsemble(5, GROUPS).vector(z, weighting, learners)
    kept = GROUPS[:learners]
    assert vector.shape == (6, sum(kept))
    for i in range(6):
        assert vector[i].tolist() == pytest.approx(naive_vector(z[i].tolist(), kept, weighting), abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple), st.integers(0, 1000))
def test_sqrt_vectors_dot_is_exactly_the_ensemble_score(groups: tuple[int, ...], seed: int) -> None:
    z = raw(5, seed, groups)
    ensemble = EmbeddingEnsemble(3, groups)
    scores = torch.stack([equations.unit_rows(f) @ equations.unit_rows(f).T for f in ensemble.split(z)])
    _, alpha = equations.boosting_rates(len(groups))
    vector = ensemble.vector(z, "sqrt")
    assert torch.allclose(vector @ vector.T, equations.ensemble_score(scores), atol=1e-12)
    squared = torch.tensor(alpha, dtype=torch.float64).square()
    vector = ensemble.vector(z, "alpha")
    assert torch.allclose(vector @ vector.T, torch.einsum("m,mij->ij", squared, scores), atol=1e-12)


def test_vector_ignores_the_scale_of_each_learner() -> None:
    ensemble, z = EmbeddingEnsemble(5, GROUPS), raw()
    scaled = torch.cat([f * factor for f, factor in zip(ensemble.split(z), (0.1, 7.0, 300.0), strict=True)], dim=1)
    assert torch.allclose(ensemble.vector(z), ensemble.vector(scaled), atol=1e-12)


def test_a_zero_learner_gives_a_zero_part() -> None:
    z = raw()
    z[0, :2] = 0
    vector = EmbeddingEnsemble(5, GROUPS).vector(z)
    assert torch.isfinite(vector).all()
    assert vector[0, :2].tolist() == [0, 0]


def test_embedding_is_the_product_without_bias() -> None:
    ensemble = EmbeddingEnsemble(5, GROUPS).double()
    features = torch.randn(4, 5, dtype=torch.float64)
    z = ensemble(features)
    for n in range(4):
        for k in range(9):
            expected = sum(features[n, c].item() * ensemble.weight[k, c].item() for c in range(5))
            assert z[n, k].item() == pytest.approx(expected, abs=1e-12)
    assert [f.shape[1] for f in ensemble.split(z)] == [2, 3, 4]
    assert torch.equal(torch.cat(ensemble.split(z), dim=1), z)
    assert [name for name, _ in ensemble.named_parameters()] == ["weight"]  # nothing beyond the plain embedding
    assert ensemble.dimension == 9


def test_bias_is_added_and_starts_at_0() -> None:
    ensemble = EmbeddingEnsemble(5, GROUPS, bias=True).double()
    features = torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(ensemble(features), ensemble.activations(features))
    with torch.no_grad():
        ensemble.bias.copy_(torch.arange(9))  # type: ignore[union-attr]
    z = ensemble(features)
    for n in range(4):
        for k in range(9):
            expected = sum(features[n, c].item() * ensemble.weight[k, c].item() for c in range(5))
            assert ensemble.activations(features)[n, k].item() == pytest.approx(expected, abs=1e-12)
            assert z[n, k].item() == pytest.approx(expected + k, abs=1e-12)
    assert [name for name, _ in ensemble.named_parameters()] == ["weight", "bias"]


def test_centre_subtracts_the_mean_of_the_features() -> None:
    torch.manual_seed(0)
    ensemble = EmbeddingEnsemble(5, GROUPS, bias=True).double()
    features = 7 + torch.randn(30, 5, dtype=torch.float64)
    ensemble.centre(features)
    for k in range(9):
        mean = [sum(features[n, c].item() for n in range(30)) / 30 for c in range(5)]
        expected = -sum(mean[c] * ensemble.weight[k, c].item() for c in range(5))
        assert ensemble.bias[k].item() == pytest.approx(expected, abs=1e-12)  # type: ignore[index]
    assert ensemble(features).mean(dim=0).abs().max() < 1e-12
    ensemble.centre(features.float())  # of another precision than W
    with pytest.raises(ConfigError, match=r"needs an ensemble with a bias"):
        EmbeddingEnsemble(5, GROUPS).centre(features)


def test_starts() -> None:
    glorot = EmbeddingEnsemble(200, (40, 60))
    bound = math.sqrt(6 / 300)
    assert glorot.weight.abs().max() <= bound
    assert glorot.weight.abs().max() > 0.95 * bound
    orthogonal = EmbeddingEnsemble(200, (40, 60), start="orthogonal")
    assert torch.allclose(orthogonal.weight @ orthogonal.weight.T, torch.eye(100), atol=1e-5)
    with pytest.raises(ConfigError, match=r"'start' parameter .* Got 'zero'"):
        EmbeddingEnsemble(4, (2,), start="zero")  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [(), (0, 3), (2, -1), (2.0, 3), "ab", 5, (True, 2), None])
def test_bad_groups(groups: object) -> None:
    with pytest.raises(ConfigError, match=r"'groups' parameter must be a list of whole numbers above 0. Got"):
        EmbeddingEnsemble(4, groups)  # type: ignore[arg-type]


def test_other_errors() -> None:
    ensemble = EmbeddingEnsemble(5, GROUPS)
    with pytest.raises(ConfigError, match=r"'in_features' parameter must be a whole number of at least 1. Got 0"):
        EmbeddingEnsemble(0, GROUPS)
    with pytest.raises(ConfigError, match=r"'weighting' parameter .* Got 'beta'"):
        ensemble.vector(raw(), "beta")  # type: ignore[arg-type]
    for learners in (0, 4, -1, 1.5):
        with pytest.raises(ConfigError, match=f"between 1 and 3. Got {learners}"):
            ensemble.vector(raw(), learners=learners)  # type: ignore[arg-type]
    for z in (torch.zeros(3, 8), torch.zeros(9)):
        with pytest.raises(DataError, match=r"shape \(B, 9\). Got"):
            ensemble.split(z)
