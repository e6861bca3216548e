"""Sampled pairs are of the kind they claim and equally likely."""

import numpy as np
import pytest

from bier.errors import DataError
from bier.evaluate.correlation import _negative_pairs, _positive_pairs, similarity_distribution


@pytest.mark.parametrize(("sampler", "same"), [(_positive_pairs, True), (_negative_pairs, False)])
def test_every_pair_of_its_kind_is_equally_likely(sampler, same):
    codes = np.array([0, 2, 1, 0, 2, 2, 2, 3])
    first, second = sampler(codes, 60_000, np.random.default_rng(0))
    pairs, counts = np.unique(np.stack([first, second]), axis=1, return_counts=True)
    expected = {(i, j) for i in range(8) for j in range(8) if i != j and (codes[i] == codes[j]) == same}
    assert {tuple(pair) for pair in pairs.T.tolist()} == expected
    assert counts.min() > 0.85 * 60_000 / len(expected)
    assert counts.max() < 1.15 * 60_000 / len(expected)


def test_scores_are_the_cosines_of_the_learners():
    z = np.array([[2, 0, 1, 0], [3, 0, 0, 5], [0, 1, 1, 0]], dtype=np.float32)
    found = similarity_distribution(z, (2, 2), [0, 0, 1], pairs=100)
    assert (found.positive[0] == 1).all()
    assert (found.positive[1] == 0).all()
    assert (found.negative[0] == 0).all()
    assert set(found.negative[1].tolist()) == {0.0, 1.0}


def test_a_kind_that_does_not_exist_is_empty():
    assert similarity_distribution(np.eye(3), [3], [0, 1, 2], pairs=10).positive.shape == (1, 0)
    assert similarity_distribution(np.eye(3), [3], [4, 4, 4], pairs=10).negative.shape == (1, 0)
    with pytest.raises(DataError, match="pairs"):
        similarity_distribution(np.eye(3), [3], [0, 1, 2], pairs=0)


def test_the_seed_decides():
    rng = np.random.default_rng(1)
    z, labels = rng.standard_normal((50, 6)), np.arange(50) % 10
    one, two, three = (similarity_distribution(z, (2, 4), labels, pairs=50, seed=s).negative for s in (1, 1, 2))
    assert (one == two).all()
    assert (one != three).any()
