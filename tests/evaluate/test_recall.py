"""Recall@K against naive loops in float64, and every corner case by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bier.errors import DataError
from bier.evaluate.ensemble import evaluate_ensemble
from bier.evaluate.recall import draw_galleries, ranks, recall_at_k


def naive_ranks(vectors, labels, gallery=None, gallery_labels=None):
    """One query at a time, in float64, as the definition says."""
    same = gallery is None
    gallery, gallery_labels = (vectors, labels) if same else (gallery, gallery_labels)
    result = []
    for i, (vector, label) in enumerate(zip(vectors, labels, strict=True)):
        positives, negatives = [], []
        for j, (other, other_label) in enumerate(zip(gallery, gallery_labels, strict=True)):
            if same and i == j:
                continue
            score = float(np.dot(vector.astype(np.float64), other.astype(np.float64)))
            (positives if label == other_label else negatives).append(score)
        result.append(sum(n >= max(positives) - 1e-12 for n in negatives) if positives else -1)
    return np.array(result)


def unit(rng, count, dimension):
    vectors = rng.standard_normal((count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@given(
    seed=st.integers(0, 2**16),
    count=st.integers(2, 40),
    classes=st.integers(1, 12),
    dimension=st.integers(1, 6),
    levels=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_many_ties_duplicates_and_zero_vectors(seed, count, classes, dimension, levels):
    """Small integers make most scores tie; the counts must still be those of the loop."""
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-levels, levels + 1, (count, dimension)).astype(np.float32)
    labels = rng.integers(0, classes, count)
    assert (ranks(vectors, labels) == naive_ranks(vectors, labels)).all()
    gallery, gallery_labels = vectors[: count // 2 + 1], labels[: count // 2 + 1]
    assert (
        ranks(vectors, labels, gallery, gallery_labels) == naive_ranks(vectors, labels, gallery, gallery_labels)
    ).all()


def test_query_and_gallery_with_different_classes():
    rng = np.random.default_rng(1)
    queries, gallery = unit(rng, 60, 5), unit(rng, 90, 5)
    labels, gallery_labels = rng.integers(0, 20, 60), rng.integers(5, 30, 90)
    found = ranks(queries, labels, gallery, gallery_labels)
    assert (found == naive_ranks(queries, labels, gallery, gallery_labels)).all()
    assert (found[~np.isin(labels, gallery_labels)] == -1).all()


def test_recall_by_hand():
    # 0 and 1 are one class with a stranger between them; 2 and 3 are each other's nearest.
    angles = np.deg2rad([0, 40, 25, 26])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert ranks(vectors, [0, 0, 1, 1]).tolist() == [2, 2, 0, 0]
    assert recall_at_k(vectors, [0, 0, 1, 1], [1, 2, 3, 50]) == {1: 50.0, 2: 50.0, 3: 100.0, 50: 100.0}


def test_a_tie_counts_against_the_query():
    vectors = np.array([[1, 0], [0.6, 0.8], [0.6, 0.8], [-1, 0]], dtype=np.float32)
    assert ranks(vectors, [0, 0, 1, 1])[0] == 1
    assert recall_at_k(vectors, [0, 0, 1, 1], [1, 2]) == {1: 0.0, 2: 75.0}


def test_duplicates_of_another_class_tie_at_every_position_and_size():
    rng = np.random.default_rng(2)
    base = unit(rng, 700, 131)
    vectors = np.concatenate([base, base, base])
    labels = np.concatenate([np.arange(700) % 350, np.arange(700) % 350, 1000 + np.arange(700) // 2])
    found = ranks(vectors, labels)
    # Each image of the first two thirds has its twin in its class, and that twin's twin in a strange class.
    assert (found[:1400] == 1).all()


def test_a_duplicate_of_the_query_itself_is_a_hit_for_its_class():
    vectors = np.array([[1, 0], [1, 0], [0, 1]], dtype=np.float32)
    assert ranks(vectors, ["a", "a", "b"]).tolist() == [0, 0, -1]


def test_zero_vectors_score_zero_with_everything():
    vectors = np.array([[0, 0], [1, 0], [0, 1], [-1, 0]], dtype=np.float32)
    # The zero query ties with all; (1, 0) scores 0 with its zero positive and with (0, 1).
    assert ranks(vectors, [0, 0, 1, 1]).tolist() == [2, 1, 2, 1]


def test_collapsed_embeddings_are_all_ties():
    vectors = np.full((3000, 16), 0.25, dtype=np.float32)
    assert (ranks(vectors, np.arange(3000) % 1500) == 2998).all()


def test_near_ties_below_float32_rounding_are_told_apart():
    rng = np.random.default_rng(3)
    vectors = 1 + 1e-4 * rng.standard_normal((400, 64)).astype(np.float32)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    labels = np.arange(400) % 100
    assert (ranks(vectors, labels) == naive_ranks(vectors, labels)).all()


def test_scale_of_the_vectors_does_not_matter():
    rng = np.random.default_rng(4)
    vectors, labels = unit(rng, 300, 12), np.arange(300) % 60
    assert (ranks(vectors, labels) == ranks(vectors * 1024, labels)).all()
    assert (ranks(vectors, labels) == ranks(vectors / 1024, labels)).all()


def test_lists_of_kinds_of_input_agree():
    rng = np.random.default_rng(5)
    vectors, labels = unit(rng, 80, 6), np.arange(80) % 20
    expected = recall_at_k(vectors, labels, [1, 4])
    assert recall_at_k(torch.from_numpy(vectors), torch.from_numpy(labels), [1, 4]) == expected
    assert recall_at_k(torch.from_numpy(vectors).requires_grad_(), [str(x) for x in labels], (4, 1)) == expected
    read_only = vectors.copy()
    read_only.flags.writeable = False
    assert recall_at_k(read_only, labels - 7, [1, 4]) == expected
    assert recall_at_k(vectors, labels, 4) == recall_at_k(vectors, labels, np.int64(4)) == {4: expected[4]}
    assert recall_at_k(vectors, [str(x).encode() for x in labels], [1, 4]) == expected


def test_labels_that_numpy_would_merge_are_two_classes():
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [0.1, 1]], dtype=np.float32)
    for one, other in (("a", "a\0"), (2**63, 2**63 + 1), (2**53, 2**53 + 1)):
        assert recall_at_k(vectors, [one, other, one, other], 1) == {1: 0.0}
        assert recall_at_k(vectors, [one, one, other, other], 1) == {1: 100.0}
    signed, unsigned = np.array([2**53 + 1], dtype=np.int64), np.array([2**53], dtype=np.uint64)
    assert recall_at_k(vectors[:1], signed, 1, vectors[1:2], unsigned) == {1: 0.0}


def test_progress_reaches_its_total():
    seen = []
    rng = np.random.default_rng(6)
    ranks(unit(rng, 2500, 4), np.arange(2500) % 500, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 5) for i in range(1, 6)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.array([[np.nan, 0.0]]), [0], [1]), "row 0"),
        ((np.zeros(3), [0, 0, 0], [1]), r"shape \(3,\)"),
        ((np.zeros((0, 3)), [], [1]), "shape"),
        ((np.zeros((3, 2)), [0, 0], [1]), "one label per vector, 3"),
        ((np.zeros((2, 2)), [0.5, 0.5], [1]), "integers or strings"),
        ((np.zeros((2, 2)), [0, 0], [0]), "1 or more"),
        ((np.zeros((2, 2)), [0, 0], []), "at least one K"),
        ((np.zeros((2, 2)), [0, 0], "12"), "at least one K"),
        ((np.zeros((2, 2)), [0, 0], [1.5]), "at least one K"),
        ((np.zeros((2, 2)), [0, 0], None), "at least one K"),
        ((np.zeros((2, 2)), ["a", b"b\xff"], [1]), "bytes and strings"),
        ((np.zeros((2, 2)), ["a", 1], [1]), "integers and strings"),
        ((np.zeros((2, 2)), [None, "a"], [1]), "NoneType and strings"),
        ((np.zeros((2, 2)), [0, 0], [1], np.zeros((2, 2)), [b"a", b"b"]), "integers and bytes"),
        ((np.zeros((2, 2)), ["a", "b"], [1], np.zeros((2, 2)), [b"a", b"b"]), "strings and bytes"),
        ((torch.zeros(2, 2, dtype=torch.complex64), [0, 0], [1]), "dtype complex64"),
        ((torch.zeros(2, 2).to_sparse(), [0, 0], [1]), "sparse tensor"),
        ((np.zeros((2, 2)), [0, 0], [1], np.zeros((2, 3)), [0, 0]), "size 2. Got 3"),
        ((np.zeros((2, 2)), [0, 0], [1], np.zeros((2, 2))), "together"),
        ((np.zeros((2, 2)), [0, 0], [1], np.zeros((2, 2)), ["a", "b"]), "one kind"),
        ((np.array([["a", "b"]]), [0], [1]), "real numbers"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message):
    with pytest.raises(DataError, match=message) as caught:
        recall_at_k(*arguments)
    assert "\n" not in str(caught.value)


def test_repeated_galleries_hold_one_image_of_each_class():
    labels = np.array(["x", "y", "x", "z", "y", "x"])
    masks = draw_galleries(labels, 6, repeats=40, seed=1)
    for mask in masks:
        assert sorted(labels[mask.numpy()]) == ["x", "y", "z"]
    assert len({tuple(mask.tolist()) for mask in masks}) == 6  # 3 x 2 x 1 ways to draw
    again = draw_galleries(labels, 6, repeats=40, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(masks, again, strict=True))


def test_repeated_gallery_recall_is_the_mean_of_its_draws():
    rng = np.random.default_rng(7)
    vectors, labels = unit(rng, 120, 4), np.arange(120) % 30
    result = evaluate_ensemble(vectors, (4,), labels, [1, 5], repeats=5, seed=3)
    expected = []
    for mask in draw_galleries(labels, 120, 5, 3):
        g = mask.numpy()
        found = naive_ranks(vectors[~g], labels[~g], vectors[g], labels[g])
        expected.append([100 * np.mean(found < 1), 100 * np.mean(found < 5)])
    assert np.allclose(list(result.recall["ensemble"].values()), np.mean(expected, axis=0))
    assert np.allclose(list(result.spread["ensemble"].values()), np.std(expected, axis=0))
    assert result.spread["ensemble"][1] > 0


def test_repeated_galleries_need_a_query():
    with pytest.raises(DataError, match="no query"):
        evaluate_ensemble(np.eye(3), (3,), [0, 1, 2], [1], repeats=10)
    with pytest.raises(DataError, match="repeats"):
        evaluate_ensemble(np.eye(3), (3,), [0, 0, 2], [1], repeats=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing_and_are_given_back(threads):
    rng = np.random.default_rng(8)
    vectors, labels = unit(rng, 1800, 16), np.arange(1800) % 300
    before = torch.get_num_threads()
    expected = ranks(vectors, labels)
    try:
        torch.set_num_threads(threads)
        assert (ranks(vectors, labels) == expected).all()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_progress_that_raises_ends_the_work_and_gives_the_threads_back():
    def interrupt(done, total):
        raise KeyboardInterrupt

    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        ranks(np.eye(2000, dtype=np.float32), np.arange(2000) // 2, progress=interrupt)
    assert torch.get_num_threads() == before
