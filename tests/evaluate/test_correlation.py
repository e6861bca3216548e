"""Correlations against numpy over pairs that are really visited."""

import numpy as np
import pytest

from bier.errors import DataError
from bier.evaluate.correlation import (
    classifier_correlation,
    feature_correlation,
    feature_correlation_matrix,
    learner_correlation_matrix,
)


def mixed(seed, count=90, dimension=12):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, 5)) @ rng.standard_normal((5, dimension)) + 0.7).astype(np.float32)


def naive_learner_correlation(z, groups):
    scores = []
    for part in np.split(z.astype(np.float64), np.cumsum(groups)[:-1], axis=1):
        pairs = []
        for i in range(len(z)):
            for j in range(i):
                length = np.linalg.norm(part[i]) * np.linalg.norm(part[j])
                pairs.append(part[i] @ part[j] / length if length else 0.0)
        scores.append(pairs)
    return np.corrcoef(scores)


def test_feature_correlation_is_the_mean_over_distinct_dimensions():
    z = mixed(0)
    expected = np.corrcoef(z.T.astype(np.float64))
    assert np.allclose(feature_correlation_matrix(z), expected, atol=1e-10)
    off = [abs(expected[k, n]) for k in range(12) for n in range(12) if k != n]
    assert feature_correlation(z) == pytest.approx(np.mean(off), abs=1e-10)


def test_feature_correlation_knows_its_extremes():
    rng = np.random.default_rng(1)
    column = rng.standard_normal((50, 1))
    assert feature_correlation(np.concatenate([column, -2 * column], axis=1)) == pytest.approx(1)
    signs = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    assert feature_correlation(signs) == pytest.approx(0)
    assert feature_correlation(column) == 0


def test_constant_dimensions_correlate_with_nothing():
    z = mixed(2, count=5000)
    z[:, 3] = 0.1
    matrix = feature_correlation_matrix(z)
    assert (matrix[3, [0, 1, 2, 4]] == 0).all()
    assert matrix[3, 3] == 1
    without = np.delete(z, 3, axis=1)
    assert feature_correlation(z) == pytest.approx(feature_correlation(without) * (11 * 10) / (12 * 11))


@pytest.mark.parametrize("groups", [(2, 4, 6), (6, 6), (1, 1, 4, 6)])
def test_learner_correlation_without_visiting_pairs_is_that_over_pairs(groups):
    z = mixed(3)
    z[7] = 0  # a zero vector scores 0 with everything
    matrix = learner_correlation_matrix(z, groups)
    assert np.allclose(matrix, naive_learner_correlation(z, groups), atol=1e-6)
    above = [matrix[a, b] for a in range(len(groups)) for b in range(a + 1, len(groups))]
    assert classifier_correlation(z, groups) == pytest.approx(np.mean(above))


def test_learners_that_say_the_same_correlate_fully():
    z = mixed(4)[:, :6]
    assert classifier_correlation(np.concatenate([z, 3 * z], axis=1), (6, 6)) == pytest.approx(1)


def test_independent_learners_hardly_correlate():
    z = np.random.default_rng(5).standard_normal((3000, 16))
    assert abs(classifier_correlation(z, (8, 8))) < 0.01


def test_a_learner_that_never_changes_correlates_with_nothing():
    z = mixed(6)
    z[:, :4] = [0.1, 0.2, -0.3, 0.4]
    matrix = learner_correlation_matrix(z, (4, 4, 4))
    assert (matrix[0, 1:] == 0).all()
    assert matrix[1, 2] != 0


def test_one_learner_has_no_classifier_correlation():
    assert classifier_correlation(mixed(7), [12]) is None


@pytest.mark.parametrize("groups", [(), (6, 5), (12, 0), (-1, 13)])
def test_groups_must_cut_the_embedding(groups):
    with pytest.raises(DataError, match="sum to the embedding's 12"):
        classifier_correlation(mixed(8), groups)


def test_two_vectors_at_least():
    with pytest.raises(DataError, match="at least 2"):
        feature_correlation(np.ones((1, 3)))
