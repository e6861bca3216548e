"""Cases are chosen by their rule, and what is drawn says whether it is right by colour and by mark."""

import numpy as np
import pytest
from PIL import Image

from bier.evaluate.ensemble import evaluate_ensemble
from bier.evaluate.recall import nearest
from bier.evaluate.report.pictures import RIGHT, SCALE, WRONG, Cell, Picture, choose_pictures, draw_picture

GROUPS = (4, 6, 10)


def embeddings(noise=1.3, count=240, classes=40):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(count) % classes)
    z = rng.standard_normal((classes, 20))[labels] + noise * rng.standard_normal((count, 20))
    return z.astype(np.float32), labels


@pytest.fixture(scope="module")
def chosen():
    z, labels = embeddings()
    result = evaluate_ensemble(z, GROUPS, labels, [1])
    return result, labels, {picture.name: picture for picture in choose_pictures(result)}


def queries(picture):
    return [row[0].image for row in picture.rows]


def test_every_picture_shows_right_and_wrong_as_the_labels_say(chosen):
    _, labels, pictures = chosen
    assert list(pictures) == ["learners", "typical", "hard", "failed"]
    for picture in pictures.values():
        assert len(picture.rows) == 4
        assert len({labels[q] for q in queries(picture)}) == 4
        for query, *found in picture.rows:
            assert query.right is None
            assert all(cell.right == (labels[cell.image] == labels[query.image]) for cell in found)
            assert all(cell.image != query.image for cell in found)
            assert all(-1 <= cell.score <= 1 for cell in found)
            assert len(found) == len(picture.columns) - 1


def test_learners_disagree_where_it_says_so(chosen):
    result, _, pictures = chosen
    for row in pictures["learners"].rows:
        right = [cell.right for cell in row[1:]]
        assert right == [bool(result.ranks[f"learner-{m}"][row[0].image] == 0) for m in (1, 2, 3)]
        assert any(right)
        assert not all(right)


def test_hard_cases_are_right_by_the_ensemble_and_the_fewest_learners(chosen):
    result, _, pictures = chosen
    votes = sum((result.ranks[f"learner-{m}"] == 0).astype(int) for m in (1, 2, 3))
    saved = result.ranks["ensemble"] == 0
    assert all(saved[q] for q in queries(pictures["hard"]))
    assert votes[queries(pictures["hard"])[0]] == votes[saved].min()


def test_failed_cases_are_wrong_and_the_surest_first(chosen):
    result, _, pictures = chosen
    assert all(result.ranks["ensemble"][q] > 0 for q in queries(pictures["failed"]))
    scores = [row[1].score for row in pictures["failed"].rows]
    assert scores == sorted(scores, reverse=True)
    assert not any(row[1].right for row in pictures["failed"].rows)
    failed = np.flatnonzero(result.ranks["ensemble"] > 0)
    z = embeddings()[0]
    parts = [p / np.linalg.norm(p, axis=1, keepdims=True) for p in np.split(z, [4, 10], axis=1)]
    weights = np.sqrt(np.array([1, 2, 3]) / 6)  # square roots of alpha, the default
    best = nearest(np.concatenate([w * p for w, p in zip(weights, parts, strict=True)], axis=1), failed, 1).scores
    assert scores[0] == pytest.approx(best.max(), abs=1e-6)


def test_one_learner_has_no_learners_picture_and_success_has_no_failures():
    z, labels = embeddings(noise=0.01)
    names = [picture.name for picture in choose_pictures(evaluate_ensemble(z, [20], labels, [1]))]
    assert names == ["typical"]


def test_gallery_images_are_named_by_their_place_in_the_gallery():
    z, labels = embeddings()
    result = evaluate_ensemble(z[:100], GROUPS, labels[:100], [1], gallery=z[100:], gallery_labels=labels[100:])
    for picture in choose_pictures(result):
        for query, *found in picture.rows:
            assert all(cell.right == (labels[100 + cell.image] == labels[query.image]) for cell in found)


def test_repeated_galleries_name_images_by_their_place_in_the_whole():
    z, labels = embeddings()
    result = evaluate_ensemble(z, GROUPS, labels, [1], repeats=2)
    for picture in choose_pictures(result):
        for query, *found in picture.rows:
            assert all(cell.right == (labels[cell.image] == labels[query.image]) for cell in found)


def test_frames_and_marks_are_drawn_in_both_colours():
    asked = []

    def image(index):
        asked.append(index)
        return Image.new("RGB", (90, 40), "black") if index else np.zeros((10, 30), np.uint8)

    picture = Picture("x", "y", ("query", "1", "2"), ((Cell(0, None, None), Cell(5, True, 0.5), Cell(6, False, 0.25)),))
    sheet = np.asarray(draw_picture(picture, image))
    assert sorted(asked) == [0, 5, 6]
    columns = {}
    for colour in (RIGHT, WRONG):
        places = np.argwhere((sheet == colour).all(-1))
        columns[colour] = places[:, 1]
        below = places[places[:, 0] > sheet.shape[0] - 40 * SCALE]
        assert len(below) > 50  # the mark under the image
    assert columns[RIGHT].max() < columns[WRONG].min()


def test_a_gallery_has_its_own_images():
    picture = Picture("x", "y", ("query", "1"), ((Cell(0, None, None), Cell(0, True, 1.0)),))
    sheet = draw_picture(
        picture, lambda i: Image.new("RGB", (9, 9), (1, 2, 3)), lambda i: Image.new("RGB", (9, 9), (7, 8, 9))
    )
    colours = {colour for _, colour in sheet.getcolors(1 << 20)}
    assert {(1, 2, 3), (7, 8, 9)} <= colours
