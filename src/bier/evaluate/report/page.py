"""The page of a report: its tables and the files of its figures, which open without a server or a network."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure as Chart

import bier
from bier.evaluate.correlation import feature_correlation_matrix, similarity_distribution
from bier.evaluate.ensemble import Difference, EnsembleResult, difference
from bier.evaluate.report.figures import (
    Rows,
    feature_heat_map,
    learner_heat_map,
    recall_curve,
    roc_curve,
    save,
    similarity_histograms,
    training_curves,
)
from bier.evaluate.report.pictures import ImageOf, Picture, choose_pictures, draw_picture
from bier.evaluate.thresholds import found_on
from bier.folders import own_folder

PAGE = "index.html"
REPORT = "report"  # the kind of its folder
MISSING = "–"


class Figure(NamedTuple):
    """A PNG file of the page; `width` is the largest one, in rem."""

    file: str
    alt: str
    caption: str
    width: int = 62

    @property
    def min_width(self) -> str:
        """On a phone a wide figure scrolls instead of becoming too small to read."""
        return f"{self.width / 2 if self.width > 50 else 0:g}"


class Tile(NamedTuple):
    """One of the numbers at the top of the page."""

    name: str
    value: str
    note: str


class Row(NamedTuple):
    """A row of the table of recalls; one of kind "group" is a heading for the rows below it."""

    label: str
    cells: tuple[str, ...] = ()
    note: str = ""
    kind: str = ""


def write_report(
    folder: Path,
    result: EnsembleResult,
    *,
    measured: str = "",
    metrics: Rows = (),
    images: ImageOf | None = None,
    gallery_images: ImageOf | None = None,
    title: str = "Evaluation",
    comparison: Mapping[str, EnsembleResult] | None = None,
    kept: Mapping[str, Any] | None = None,
    reranked: Mapping[str, Any] | None = None,
    verdict: Sequence[str] = (),
) -> Path:
    """Write `folder`/index.html and its PNG files, and return the path of the page.

    `measured` says what was measured: data set, part, images, classes. `metrics` are the rows of `metrics.jsonl`.
    `images` gives a query's picture by its row (`gallery_images` those of the gallery, by default the same).
    `comparison` names other results to set beside this one. `kept` is what the model keeps about its threshold,
    `reranked` what `bier evaluate --json` says about re-ranking, `verdict` the sentences at the top. What is not
    given is left out. An earlier
    report in the folder is replaced, anything else is not, see `own_folder`.
    """
    folder = Path(folder)
    others = comparison or {}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    with own_folder(folder, REPORT) as aside:
        html = template.render(
            title=title,
            version=bier.__version__,
            result=result,
            measured=measured,
            tiles=_tiles(result, others),
            ks=sorted(result.recall["ensemble"]),
            recall_rows=_recall_rows(result, others),
            differences=_differences(result, others),
            figures=_figures(aside, result, others),
            pictures=_pictures(aside, result, images, gallery_images),
            training=_training(aside, metrics),
            same_rows=_same_rows(result, kept),
            reranked=reranked,
            verdict=verdict,
        )
        (aside / PAGE).write_text(html, encoding="utf-8")
    return folder / PAGE


def _tiles(result: EnsembleResult, comparison: Mapping[str, EnsembleResult]) -> list[Tile]:
    """The few numbers to see first."""
    whole = result.recall["ensemble"]
    first = min(whole)
    note = "the nearest image is right" if first == 1 else f"a right image among {first}"
    for name, other in comparison.items():
        if first in other.recall["ensemble"]:
            note = f"{whole[first] - other.recall['ensemble'][first]:+.1f} against {name}"
            break
    tiles = [Tile(f"Recall@{first}", f"{whole[first]:.1f} %", note)]
    if len(result.groups) > 1:
        best = max(result.recall[f"learner-{m + 1}"][first] for m in range(len(result.groups)))
        tiles.append(Tile("Ensemble's gain", f"{whole[first] - best:+.1f}", "over its best learner"))
    if result.map_at_r is not None:
        tiles.append(Tile("mAP@R", f"{result.map_at_r:.1f} %", f"R-Precision {result.r_precision:.1f} %"))
    if result.classifier_correlation is not None:
        tiles.append(Tile("Classifier correlation", f"{result.classifier_correlation:.3f}", "between learners' scores"))
    return [*tiles, Tile("Feature correlation", f"{result.feature_correlation:.3f}", "between dimensions")]


def _recall_rows(result: EnsembleResult, comparison: Mapping[str, EnsembleResult]) -> list[Row]:
    """Recalls of the ensemble, of other runs, of each learner and of the first learners together."""
    several = len(result.groups) > 1
    ks = sorted(result.recall["ensemble"])
    rows = [Row("Ensemble" if several else "Embedding", _recalls(result, "ensemble", ks), kind="main")]
    for name, other in comparison.items():
        mine, theirs = result.recall["ensemble"], other.recall["ensemble"]
        rows.append(Row(name.capitalize(), _recalls(other, "ensemble", ks)))
        differences = tuple(f"{mine[k] - theirs[k]:+.2f}" if k in theirs else MISSING for k in ks)
        rows.append(Row("difference", differences, kind="soft"))
    if not several:
        return rows
    name, label = ("sqrt", "√α weights") if result.weighting == "alpha" else ("alpha", "α weights")
    rows.append(Row(f"Ensemble, {label}", _recalls(result, f"ensemble-{name}", ks)))
    rows.append(Row("Each learner alone", kind="group"))
    for m, size in enumerate(result.groups, start=1):
        rows.append(Row(f"Learner {m}", _recalls(result, f"learner-{m}", ks), f"({size})"))
    if len(result.groups) > 2:
        rows.append(Row("The first learners together", kind="group"))
        rows += [Row(f"First {m}", _recalls(result, f"prefix-{m}", ks)) for m in range(2, len(result.groups))]
    return rows


def _differences(result: EnsembleResult, comparison: Mapping[str, EnsembleResult]) -> dict[str, Difference]:
    """From the other results that are about the same queries."""
    found = {name: difference(result, other) for name, other in comparison.items()}
    return {name: value for name, value in found.items() if value is not None}


def _same_rows(result: EnsembleResult, kept: Mapping[str, Any] | None) -> list[Row]:
    """Thresholds and what searches return above them; a row's cells are those of the table in page.html."""
    if result.same is None:
        return []
    known = []
    if kept and result.same.tested:
        known.append((f"Kept in the model, found on {found_on(kept)}", result.same.tested, "main"))
    if result.same.found:
        known.append((f"For {result.same.precision:g} % precision, found on these images", result.same.found, ""))
    return [
        Row(
            name,
            (
                f"{one.threshold:.4f}",
                MISSING if one.precision is None else f"{one.precision:.1f} %",
                MISSING if one.precision_with_unknown is None else f"{one.precision_with_unknown:.1f} %",
                *(f"{value:.1f} %" for value in (one.recall, one.answered, one.empty)),
            ),
            kind=kind,
        )
        for name, one, kind in known
    ]


def _recalls(result: EnsembleResult, name: str, ks: list[int]) -> tuple[str, ...]:
    recall = result.recall[name]
    if result.spread is None:
        return tuple(f"{recall[k]:.2f}" if k in recall else MISSING for k in ks)
    spread = result.spread[name]
    return tuple(f"{recall[k]:.2f} ± {spread[k]:.2f}" if k in recall else MISSING for k in ks)


def _save(aside: Path, chart: Chart, figure: Figure) -> Figure:
    save(chart, aside / figure.file)
    return figure


def _figures(aside: Path, result: EnsembleResult, comparison: Mapping[str, EnsembleResult]) -> dict[str, Figure]:
    """The figures of the sections on recall and on the learners."""
    several = len(result.groups) > 1
    everything = result.test.everything
    figures = {
        "recall": _save(
            aside,
            recall_curve(result.recall, {name: other.recall["ensemble"] for name, other in comparison.items()}),
            Figure(
                "recall.png",
                "Line chart of Recall@K over K.",
                "How often an image of the right class is among the K nearest: the higher and the earlier, the better.",
                width=44,
            ),
        ),
        "features": _save(
            aside,
            feature_heat_map(feature_correlation_matrix(everything), result.groups),
            Figure(
                "feature-correlation.png",
                f"Heat map of the correlation between embedding dimensions, mean {result.feature_correlation:.3f}.",
                "How much two dimensions of the embedding move together"
                f"{'; blue lines separate the learners' if several else ''}. "
                "Pale is good: each dimension then carries information of its own.",
                width=34,
            ),
        ),
        "similarities": _save(
            aside,
            similarity_histograms(similarity_distribution(everything, result.groups, result.test.all_classes)),
            Figure(
                "similarities.png",
                "Histograms of the similarities of pairs of the same and of different classes.",
                f"How similar {'each learner' if several else 'it'} finds pairs of the same class (solid, green) and "
                "of different classes (dashed, orange): the less the two overlap, the better it separates classes.",
                width=min(62, 31 * len(result.groups)),
            ),
        ),
    }
    if result.same is not None:
        figures["roc"] = _save(
            aside,
            roc_curve(result.same, {name: one.same for name, one in comparison.items() if one.same is not None}),
            Figure(
                "roc.png",
                f"ROC of pairs of images, equal error rate {result.same.eer:.1f} percent.",
                "Of the pairs of one class, the share that lies above a threshold, over the share of the pairs of two "
                "classes that does: the higher and the further left, the better. Points: the thresholds of the table.",
                width=44,
            ),
        )
    if several:
        figures["learners"] = _save(
            aside,
            learner_heat_map(result.learner_correlation),
            Figure(
                "learner-correlation.png",
                f"Matrix of the correlation between learners' scores, mean {result.classifier_correlation:.3f}.",
                "How much two learners agree on which pairs are similar. An ensemble gains most from learners that "
                "are good and yet differ, so lower is better.",
                width=34,
            ),
        )
    return figures


def _pictures(
    aside: Path, result: EnsembleResult, images: ImageOf | None, gallery_images: ImageOf | None
) -> list[Figure]:
    if images is None:
        return []
    figures = []
    for picture in choose_pictures(result):
        file = f"{picture.name}.png"
        draw_picture(picture, images, gallery_images).save(aside / file)
        figures.append(Figure(file, _alt(picture), picture.caption, 10 * len(picture.columns)))
    return figures


def _alt(picture: Picture) -> str:
    found = [cell.right for row in picture.rows for cell in row[1:]]
    right = sum(map(bool, found))
    return f"{len(picture.rows)} queries with the images found for them: {right} of {len(found)} are right."


def _training(aside: Path, metrics: Rows) -> Figure | None:
    chart = training_curves(metrics)
    if chart is None:
        return None
    figure = Figure(
        "training.png",
        "Line charts of the training run over its steps.",
        "What was measured while training: losses should fall and level off, boosting weights show how much is left "
        "for later learners to correct (solid: pairs of one class, dashed: of different classes), and validation "
        "should rise.",
    )
    return _save(aside, chart, figure)
