"""The report is complete, stands alone, and never takes away what it did not write."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from bier.errors import DataError, WriteError
from bier.evaluate.ensemble import evaluate_ensemble
from bier.evaluate.report import write_report
from bier.folders import RECORD

GROUPS = (4, 6, 10)


def evaluated(groups=GROUPS, **options):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(120) % 20)
    z = rng.standard_normal((20, 20))[labels] + 1.3 * rng.standard_normal((120, 20))
    return evaluate_ensemble(z, groups, labels, (1, 2, 4), **options)


def picture(index):
    return Image.new("RGB", (30, 20), (index, 0, 255 - index))


class Page(HTMLParser):
    """What the page refers to, and whether its tags close."""

    def __init__(self, text):
        super().__init__()
        self.images, self.links, self.open = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "img":
            self.images[given["src"]] = given["alt"]
        if "href" in given:
            self.links.append(given["href"])
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "report"
    metrics = [{"step": s, "loss": 1 / (s + 1), "validation_recall": 10.0 + s} for s in range(5)]
    baseline = evaluated([20])
    page = write_report(
        folder,
        evaluated(),
        measured="folder <i>, test part: 120 images of 20 classes",
        metrics=metrics,
        images=picture,
        title="<Glyphs> & more",
        comparison={"<b>baseline": baseline},
    )
    return page, page.read_text(encoding="utf-8")


def test_every_picture_is_a_file_with_an_alternative_text(report):
    page, text = report
    parsed = Page(text)
    assert parsed.open == []
    names = {path.name for path in page.parent.iterdir()}
    assert names == {"index.html", RECORD, *parsed.images}
    assert set(parsed.links) == set(parsed.images)
    assert all(len(alt) > 20 for alt in parsed.images.values())
    assert {"recall", "training", "feature-correlation", "learner-correlation", "similarities", "learners"} <= {
        name.removesuffix(".png") for name in names
    }
    for name in parsed.images:
        Image.open(page.parent / name).verify()


def test_it_needs_no_network_and_escapes_what_it_is_given(report):
    _, text = report
    assert not re.search(r"https?:|//|@import|<script", text)
    assert "<h1>&lt;Glyphs&gt; &amp; more</h1>" in text
    assert "Measured on folder &lt;i&gt;, test part: 120 images of 20 classes." in text
    assert "against &lt;b&gt;baseline" in text
    assert '<th scope="row">&lt;b&gt;baseline</th>' in text
    assert not re.search("<[bi]>", text)


def test_the_table_holds_every_recall(report):
    _, text = report
    result = evaluated()
    for name in ("ensemble", "ensemble-sqrt", "learner-1", "learner-2", "learner-3", "prefix-2"):
        cells = "".join(f"<td>{value:.2f}</td>" for value in result.recall[name].values())
        assert cells in text, name
    assert "difference" in text


def test_an_earlier_report_is_replaced_whole(tmp_path):
    folder = tmp_path / "report"
    write_report(folder, evaluated(), images=picture)
    assert (folder / "learners.png").exists()
    page = write_report(folder, evaluated([20]), title="second")
    assert "second" in page.read_text(encoding="utf-8")
    assert not (folder / "learners.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert folder.stat().st_mode & 0o777 == 0o755


def test_other_peoples_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(WriteError, match=r"It holds 'thesis\.txt'"):
        write_report(tmp_path, evaluated([20]))
    with pytest.raises(WriteError, match="is a file"):
        write_report(tmp_path / "thesis.txt", evaluated([20]))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failure_leaves_the_old_report_and_nothing_aside(tmp_path):
    folder = tmp_path / "report"
    write_report(folder, evaluated([20]), title="first")

    def broken(index):
        raise DataError("no such image")

    with pytest.raises(DataError, match="no such image"):
        write_report(folder, evaluated([20]), images=broken)
    assert "first" in (folder / "index.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_spread_and_queries_without_a_positive_are_told(tmp_path):
    page = write_report(tmp_path / "a", evaluated(repeats=3))
    assert " ± " in page.read_text(encoding="utf-8")
    rng = np.random.default_rng(1)
    z = rng.standard_normal((30, 20))
    result = evaluate_ensemble(z, GROUPS, [*range(10), *range(10), *range(100, 110)], [1, 5])
    assert "10 queries have no image" in write_report(tmp_path / "b", result).read_text(encoding="utf-8")
