"""The words and tables of the report, as HTML."""

from collections.abc import Iterable, Mapping
from html import escape

import bier
from bier.evaluate.ensemble import EnsembleResult


def figure(file: str, alt: str, caption: str, width: int = 62) -> str:
    """A picture on white paper, in both colour schemes, with its caption; a click opens the PNG itself."""
    least = width / 2 if width > 50 else 0  # on a phone a wide picture scrolls rather than shrinks to nothing
    image = f'<img src="{file}" alt="{escape(alt)}" style="width: {width}rem; min-width: {least:g}rem">'
    picture = f'<a class="sheet" href="{file}">{image}</a>'
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def lead(result: EnsembleResult, measured: str = "") -> str:
    """One sentence on what was measured."""
    sizes = "-".join(map(str, result.groups))
    what = f"An ensemble of {len(result.groups)} learners ({sizes})" if len(result.groups) > 1 else "One embedding"
    text = f"{what}, {sum(result.groups)} numbers an image. {result.queries:,} queries"
    text += (
        " searched among each other." if result.test.gallery is None else f" searched among {result.gallery:,} images."
    )
    if measured:
        text = f"Measured on {escape(measured)}. {text}"
    if result.spread is not None:
        text += " Recall is the mean over several random galleries, ± its standard deviation."
    if result.without_positive:
        text += f" {result.without_positive:,} queries have no image of their class to find and count as misses."
    return text


def tiles(result: EnsembleResult, comparison: Mapping[str, EnsembleResult]) -> str:
    """The few numbers to see first."""
    whole = result.recall["ensemble"]
    first = min(whole)
    note = "the nearest image is right" if first == 1 else f"a right image among {first}"
    for name, other in comparison.items():
        if first in other.recall["ensemble"]:
            note = f"{whole[first] - other.recall['ensemble'][first]:+.1f} against {escape(name)}"
            break
    rows = [(f"Recall@{first}", f"{whole[first]:.1f} %", note)]
    if len(result.groups) > 1:
        best = max(result.recall[f"learner-{m + 1}"][first] for m in range(len(result.groups)))
        rows.append(("Ensemble's gain", f"{whole[first] - best:+.1f}", "over its best learner"))
    if result.map_at_r is not None:
        rows.append(("mAP@R", f"{result.map_at_r:.1f} %", f"R-Precision {result.r_precision:.1f} %"))
    if result.classifier_correlation is not None:
        rows.append(("Classifier correlation", f"{result.classifier_correlation:.3f}", "between learners' scores"))
    rows.append(("Feature correlation", f"{result.feature_correlation:.3f}", "between dimensions"))
    cells = "".join(f"<div><dt>{a}</dt><dd>{b}<small>{c}</small></dd></div>" for a, b, c in rows)
    return f'<dl class="tiles">{cells}</dl>'


def recall_table(result: EnsembleResult, comparison: Mapping[str, EnsembleResult]) -> str:
    """Recalls of the ensemble, its learners, its prefixes and of other runs."""
    ks = sorted(result.recall["ensemble"])
    head = "<tr><th></th>" + "".join(f'<th scope="col">R@{k}</th>' for k in ks) + "</tr>"
    several = len(result.groups) > 1
    body = [_recall_row("Ensemble" if several else "Embedding", "ensemble", result, ks, "main")]
    for name, rival in comparison.items():
        body.append(_recall_row(escape(name.capitalize()), "ensemble", rival, ks))
        body.append(_difference_row(result, rival, ks))
    if several:
        other, label = ("sqrt", "√α weights") if result.weighting == "alpha" else ("alpha", "α weights")
        body.append(_recall_row(f"Ensemble, {label}", f"ensemble-{other}", result, ks))
        body.append(_group_row("Each learner alone", len(ks)))
        for m, size in enumerate(result.groups, start=1):
            body.append(_recall_row(f"Learner {m} <span class=soft>({size})</span>", f"learner-{m}", result, ks))
        if len(result.groups) > 2:
            body.append(_group_row("The first learners together", len(ks)))
            body += [_recall_row(f"First {m}", f"prefix-{m}", result, ks) for m in range(2, len(result.groups))]
    return _table(head, body)


def learner_table(result: EnsembleResult) -> str:
    """What each learner is worth to the ensemble."""
    head = (
        '<tr><th></th><th scope="col">dimensions</th><th scope="col">adds to R@1</th>'
        '<th scope="col">only it is right</th></tr>'
    )
    body = []
    for m, (size, adds, alone) in enumerate(zip(result.groups, result.adds, result.alone_right, strict=True), start=1):
        added = f"{adds:.2f}" if m == 1 else f"{adds:+.2f}"
        body.append(f'<tr><th scope="row">Learner {m}</th><td>{size}</td><td>{added}</td><td>{alone:.2f} %</td></tr>')
    text = (
        "What each learner brings: how far Recall@1 moves when it joins those before it, and how often it, "
        "and no other learner, has the right nearest image."
    )
    return f"<p>{text}</p>{_table(head, body)}"


def footer(result: EnsembleResult) -> str:
    """How the numbers were made."""
    return (
        f"Made by bier {bier.__version__} in {result.seconds:.1f} s. A query never finds itself; ties count "
        "against it. Feature correlation is the mean absolute Pearson correlation between distinct dimensions, "
        "classifier correlation the mean Pearson correlation between learners' scores over all pairs of images."
    )


def _table(head: str, body: Iterable[str]) -> str:
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(body)}</tbody></table></div>'


def _group_row(label: str, columns: int) -> str:
    return f'<tr class="group"><th scope="rowgroup" colspan="{columns + 1}">{label}</th></tr>'


def _recall_row(label: str, name: str, result: EnsembleResult, ks: list[int], kind: str = "") -> str:
    cells = []
    for k in ks:
        value = result.recall[name].get(k)
        text = "–" if value is None else f"{value:.2f}"
        if value is not None and result.spread is not None:
            text += f" ± {result.spread[name][k]:.2f}"
        cells.append(f"<td>{text}</td>")
    return f'<tr class="{kind}"><th scope="row">{label}</th>{"".join(cells)}</tr>'


def _difference_row(result: EnsembleResult, other: EnsembleResult, ks: list[int]) -> str:
    mine, theirs = result.recall["ensemble"], other.recall["ensemble"]
    cells = "".join(f"<td>{mine[k] - theirs[k]:+.2f}</td>" if k in theirs else "<td>–</td>" for k in ks)
    return f'<tr><th scope="row" class="soft">difference</th>{cells}</tr>'
