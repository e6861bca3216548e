"""The stream of integers behind splits and glyphs."""

import numpy as np

from bier.data.records import RandomStream


def test_the_stream_never_changes() -> None:
    """Pinned: were these to change, every split and every glyph of every earlier run would."""
    assert RandomStream(0).words(2).tolist() == [9441442522235856127, 17532960557476522086]
    assert RandomStream(0).between(-5, 5, 8).tolist() == [0, 5, -4, 5, -2, -1, 4, -1]
    assert RandomStream(7, 3).order(6).tolist() == [0, 5, 1, 2, 3, 4]


def test_between_reaches_both_ends_evenly() -> None:
    drawn = RandomStream(1).between(-2, 2, 50_000)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [-2, -1, 0, 1, 2]
    assert abs(counts / 50_000 - 0.2).max() < 0.01


def test_order_is_a_permutation() -> None:
    order = RandomStream(5).order(1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert order.tolist() != list(range(1000))


def test_bytes_have_the_shape_asked_for() -> None:
    drawn = RandomStream(2).bytes((3, 5, 7))
    assert drawn.shape == (3, 5, 7)
    assert drawn.dtype == np.uint8
    assert 100 < RandomStream(2).bytes((10_000,)).mean() < 155


def test_streams_differ_by_every_part_of_their_key() -> None:
    streams = [RandomStream(*key).words(4).tolist() for key in ((0,), (1,), (-1,), (0, 1), (1, 1), (1, 0))]
    assert len({tuple(stream) for stream in streams}) == 6
