"""Training on separable synthetic features: boosting makes learners differ, and each diversity loss more so."""

from collections.abc import Callable
from statistics import mean

import torch
from torch import Tensor

import bier

GROUPS = (8, 12, 20)
SEEDS = range(5)
Diversity = bier.ActivationLoss | bier.AdversarialLoss


def make_features(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(20, 32, generator=generator)
    labels = torch.arange(400) % 20
    return (centres[labels] + 0.5 * torch.randn(400, 32, generator=generator)).relu(), labels


def train(seed: int, boost: bool, make: Callable[[], Diversity] | None = None) -> tuple[float, float]:
    """Classifier correlation and R@1 after a short training of W."""
    torch.manual_seed(seed)
    features, labels = make_features(seed)
    ensemble, metric = bier.EmbeddingEnsemble(32, GROUPS), bier.BoostedLoss(GROUPS, boost=boost)
    diversity = make() if make else None
    optimizer = torch.optim.Adam([ensemble.weight, *(diversity.parameters() if diversity else ())], lr=0.02)
    for _ in range(60):
        batch = torch.randint(len(features), (60,))
        loss = metric(ensemble(features[batch]), labels[batch])
        if diversity:
            loss = loss + 0.1 * diversity(ensemble, features[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        z = ensemble(features)
    correlation = bier.classifier_correlation(z, GROUPS)
    assert correlation is not None
    return correlation, bier.recall_at_k(ensemble.vector(z), labels, (1,))[1]


def test_correlation_falls_with_boosting_and_again_with_each_diversity_loss() -> None:
    runs = {
        "plain": [train(seed, boost=False) for seed in SEEDS],
        "boosted": [train(seed, boost=True) for seed in SEEDS],
        "activation": [train(seed, True, lambda: bier.ActivationLoss(GROUPS, lambda_w=1.0)) for seed in SEEDS],
        "adversarial": [
            train(seed, True, lambda: bier.AdversarialLoss(GROUPS, hidden=16, lambda_w=1.0)) for seed in SEEDS
        ],
    }
    correlation = {name: mean(c for c, _ in results) for name, results in runs.items()}
    assert correlation["boosted"] < correlation["plain"] - 0.05
    assert correlation["activation"] < correlation["boosted"] - 0.03
    assert correlation["adversarial"] < correlation["boosted"] - 0.03
    for name, results in runs.items():
        assert mean(recall for _, recall in results) > 98, name
