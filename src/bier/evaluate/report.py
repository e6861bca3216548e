"""The report of an evaluation: one folder with a page and its pictures, which opens without a server or a network."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from matplotlib.figure import Figure

from bier.errors import DataError
from bier.evaluate import tables
from bier.evaluate.correlation import feature_correlation_matrix, similarity_distribution
from bier.evaluate.ensemble import EnsembleResult
from bier.evaluate.figures import (
    Rows,
    feature_heat_map,
    learner_heat_map,
    recall_curve,
    save,
    similarity_histograms,
    training_curves,
)
from bier.evaluate.pictures import ImageOf, Picture, choose_pictures, draw_picture
from bier.files import folder_aside

PAGE = "index.html"


class _Figure(NamedTuple):
    name: str  # of the PNG file
    figure: Figure
    alt: str
    caption: str
    width: int = 62  # in rem, at most


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
) -> Path:
    """Write `folder`/index.html and its PNG files, and return the path of the page.

    `measured` says what was measured: data set, part, images, classes. `metrics` are the rows of `metrics.jsonl`.
    `images` gives a query's picture by its row (`gallery_images` those of the gallery, by default the same).
    `comparison` names other results to set beside this one. What is not given is left out. The folder is written aside
    and renamed, so that it is complete or absent; an earlier report there is replaced, anything else is not.
    """
    folder = Path(folder)
    _check_replaceable(folder)
    with folder_aside(folder) as aside:
        sections = [
            _recall_section(aside, result, comparison or {}),
            _learner_section(aside, result),
            _picture_section(aside, result, images, gallery_images),
            _training_section(aside, metrics),
        ]
        page = Template(files("bier.evaluate").joinpath("report.html").read_text(encoding="utf-8"))
        html = page.substitute(
            title=escape(title),
            lead=tables.lead(result, measured),
            tiles=tables.tiles(result, comparison or {}),
            sections="\n".join(sections),
            footer=tables.footer(result),
        )
        (aside / PAGE).write_text(html, encoding="utf-8")
    return folder / PAGE


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"The report's folder must be a folder. Got {folder}, which is a file.")
    page = folder / PAGE
    ours = page.is_file() and '<meta name="generator" content="bier">' in page.read_text(encoding="utf-8")
    if not ours and any(folder.iterdir()):
        raise DataError(f"The report's folder must be new, empty or an earlier report. Got {folder} with other files.")


def _show(aside: Path, figure: _Figure) -> str:
    save(figure.figure, aside / f"{figure.name}.png")
    return tables.figure(f"{figure.name}.png", figure.alt, figure.caption, figure.width)


def _recall_section(aside: Path, result: EnsembleResult, comparison: Mapping[str, EnsembleResult]) -> str:
    others = {name: other.recall["ensemble"] for name, other in comparison.items()}
    curve = _Figure(
        "recall",
        recall_curve(result.recall, others),
        "Line chart of Recall@K over K.",
        "How often an image of the right class is among the K nearest: the higher and the earlier, the better.",
        width=44,
    )
    text = "Recall@K is the share of queries, in percent, that find an image of their own class among their K nearest."
    table = tables.recall_table(result, comparison)
    return f"<section><h2>Recall</h2><p>{text}</p>{table}{_show(aside, curve)}</section>"


def _learner_section(aside: Path, result: EnsembleResult) -> str:
    several = len(result.groups) > 1
    everything = result.test.everything
    heat = _Figure(
        "feature-correlation",
        feature_heat_map(feature_correlation_matrix(everything), result.groups),
        f"Heat map of the correlation between embedding dimensions, on average {result.feature_correlation:.3f}.",
        f"How much two dimensions of the embedding move together{'; blue lines part the learners' if several else ''}. "
        "Pale is good: each dimension then says something of its own.",
        width=34,
    )
    spread = _Figure(
        "similarities",
        similarity_histograms(similarity_distribution(everything, result.groups, result.test.all_classes)),
        "Histograms of the similarities of pairs of the same and of different classes.",
        f"How similar {'each learner' if several else 'it'} finds pairs of the same class (solid, green) and of "
        "different classes (dashed, orange): the less the two overlap, the better it tells classes apart.",
        width=min(62, 31 * len(result.groups)),
    )
    if not several:
        pair = f'<div class="pair">{_show(aside, heat)}{_show(aside, spread)}</div>'
        return f"<section><h2>The embedding</h2>{pair}</section>"
    learners = _Figure(
        "learner-correlation",
        learner_heat_map(result.learner_correlation),
        f"Matrix of the correlation between learners' scores, on average {result.classifier_correlation:.3f}.",
        "How much two learners agree on which pairs are similar. An ensemble gains most from learners that are good "
        "and yet differ, so lower is better.",
        width=34,
    )
    pair = f'<div class="pair">{_show(aside, heat)}{_show(aside, learners)}</div>'
    return f"<section><h2>The learners</h2>{tables.learner_table(result)}{pair}{_show(aside, spread)}</section>"


def _picture_section(
    aside: Path, result: EnsembleResult, images: ImageOf | None, gallery_images: ImageOf | None
) -> str:
    if images is None:
        return ""
    shown = []
    for picture in choose_pictures(result):
        draw_picture(picture, images, gallery_images).save(aside / f"{picture.name}.png")
        shown.append(
            tables.figure(f"{picture.name}.png", _alt(picture), escape(picture.caption), 10 * len(picture.columns))
        )
    text = (
        "Each row starts with a query. Found images with a green frame and a tick are of the query's class, those with "
        "an orange frame and a cross are not; the number is the similarity."
    )
    return f"<section><h2>What it finds</h2><p>{text}</p>{''.join(shown)}</section>" if shown else ""


def _alt(picture: Picture) -> str:
    found = [cell.right for row in picture.rows for cell in row[1:]]
    right = sum(map(bool, found))
    return f"{len(picture.rows)} queries with the images found for them: {right} of {len(found)} are right."


def _training_section(aside: Path, metrics: Rows) -> str:
    figure = training_curves(metrics)
    if figure is None:
        return ""
    curves = _Figure(
        "training",
        figure,
        "Line charts of the training run over its steps.",
        "What was measured while training: losses should fall and level off, boosting weights show how much is left "
        "for later learners to mend (solid: pairs of one class, dashed: of different classes), and validation should "
        "rise.",
    )
    return f"<section><h2>Training</h2>{_show(aside, curves)}</section>"
