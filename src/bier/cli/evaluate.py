"""`bier evaluate`."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bier.cli.terminal import (
    Backbone,
    Cache,
    Fast,
    Json,
    Root,
    SkipBroken,
    console,
    counted_step,
    downloaded,
    emit,
    progress_bar,
    say,
    say_skipped,
    step,
    table_of_numbers,
    untrained,
)
from bier.errors import ConfigError, DataError, ModelError, WriteError
from bier.files import printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import Progress

    from bier.data import Dataset
    from bier.data.recorded import Changes
    from bier.evaluate.dataset import Assessment, Measured, StartingPoint
    from bier.evaluate.ensemble import EnsembleResult
    from bier.models.model import Untrained

SIZE_HELP = "The test set of vehicleid: small, medium or large. \\[default: the one of the run, or small]"
Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN_OR_MODEL... [PHOTOS]",
        help="Runs or models; then photographs, to measure on these. Photographs alone: the plain backbone.",
    ),
]
EmbeddingsFile = Annotated[
    Path | None, typer.Option("--embeddings", metavar="FILE", help="Measure a file that `bier embed` wrote.")
]
DataName = Annotated[
    str | None, typer.Option("--data", metavar="NAME", help="The data set. \\[default: the one of the run]")
]
PartName = Annotated[
    str | None,
    typer.Option("--part", metavar="NAME", help="Measure this part: train, validation, test or all the images."),
]
Rerank = Annotated[
    list[str] | None,
    typer.Option(
        "--rerank",
        metavar="NAME",
        help="Also re-rank the 100 nearest images: alpha-qe, dba or k-reciprocal; may be repeated.",
    ),
]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Where the report goes. \\[default: RUN/report]")
]


def evaluate(
    runs: Runs = None,
    embeddings: EmbeddingsFile = None,
    backbone: Backbone = None,
    data: DataName = None,
    root: Root = None,
    size: Annotated[str | None, typer.Option("--size", metavar="SIZE", help=SIZE_HELP)] = None,
    part: PartName = None,
    cache: Cache = None,
    fast: Fast = False,
    skip_broken: SkipBroken = False,
    rerank: Rerank = None,
    report: Report = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Numbers only.")] = False,
    no_untrained: Annotated[
        bool, typer.Option("--no-untrained", help="Leave out the backbone that the run started from; saves its time.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure recall, correlation and what each learner adds, and write a report to look at.

    A run is measured on the test part of the data set it was trained on, unless --data names another. A folder, table
    or feature file that the run was not trained on is measured whole, unless it names a test part itself. Several runs
    or models are compared in one table, with how sure their differences are. Recall counts ties against the query; a
    query never finds itself. The row `untrained` is the backbone that the run started from, with its features
    normalised: what training had to beat. The second table is about "same or not": the similarity above which 95% of
    the images that searches return are right.

    [bold]Examples[/bold]

    bier evaluate runs/shop

    bier evaluate runs/baseline runs/a-bier --json

    bier evaluate runs/shop/model --data folder --root other-photos --report report

    bier evaluate photos

    bier evaluate runs/shop other-photos

    bier evaluate runs/shop --rerank k-reciprocal --rerank alpha-qe

    bier evaluate --embeddings vectors.safetensors
    """
    _check_rerank(rerank or [])
    runs = runs or []
    if runs and data is None and root is None and embeddings is None and _are_images(runs[-1]):
        root, data, runs = str(runs[-1]), "table" if runs[-1].is_file() else "folder", runs[:-1]
        backbone = backbone if runs else backbone or "efficientnet_lite0"
    models: list[Path | Untrained] = [
        *([untrained(backbone)] if backbone is not None else []),
        *map(downloaded, runs),
    ]
    if bool(models) == (embeddings is not None):
        raise ConfigError("Name one or more runs or models to evaluate, or --embeddings FILE, and not both.")
    if report is not None:
        _check_report(report)
    if embeddings is not None:
        _show({str(embeddings): _measure_file(embeddings, rerank or [], report)}, as_json)
        return
    from bier.distributed import process_group, rank

    with process_group():
        found: dict[str, dict[str, Any]] = {}
        results: dict[str, EnsembleResult] = {}
        for run in models:
            place = report if run == models[-1] else None
            if report is None and isinstance(run, Path) and (run / "config.toml").is_file():
                place = run / "report"
                if not no_report and len(models) == 1:
                    _check_report(place)
            found[str(run)] = _measure(
                run,
                data,
                root,
                size,
                part,
                cache,
                skip_broken,
                None if no_report or (report is None and len(models) > 1) else place,
                rerank or [],
                not no_untrained,
                results,
                fast,
            )
        if rank() == 0:
            _show(found, as_json)


def _are_images(path: Path) -> bool:
    """Whether an argument is a table or a folder of photographs in place of a run or a model."""
    if path.is_file():
        return path.suffix.lower() in (".csv", ".parquet")
    if not path.is_dir() or any((path / name).exists() for name in ("config.toml", "model.json", "model")):
        return False
    from bier.data.listing import IMAGE_ENDINGS

    return any(file.suffix.lower() in IMAGE_ENDINGS for file in chain(path.glob("*/*"), path.glob("*/*/*")))


def _measure_file(file: Path, rerank: Sequence[str], report: Path | None) -> dict[str, Any]:
    with progress_bar() as bar, step(bar, f"measuring {file}"):
        from bier.data.records import ALL
        from bier.evaluate.dataset import Measured
        from bier.evaluate.report.verdict import verdict

        result = _from_file(file)
        measured = Measured(str(file), ALL, len(result.test.classes.unique()), result.queries)
        reranked = _reranked(result, rerank) if rerank else {}
        sentences, page = verdict(result), {}
        if report is not None:
            page = {"report": str(_write(report, result, measured, str(file), reranked=reranked, sentences=sentences))}
    return {**result.to_dict(), "measured": measured.to_dict(), **reranked, "verdict": sentences, **page}


def _measure(
    run: "Path | Untrained",
    data: str | None,
    root: str | None,
    size: str | None,
    part: str | None,
    cache: Path | None,
    skip_broken: bool,
    report: Path | None,
    rerank: Sequence[str],
    with_untrained: bool,
    results: "dict[str, EnsembleResult]",
    fast: bool,
) -> dict[str, Any]:
    """results: those of the runs before, which this one is compared with; its own is added."""
    with progress_bar() as bar:
        from bier.data import load as load_data
        from bier.data import readable
        from bier.data.records import ALL
        from bier.distributed import rank
        from bier.evaluate.dataset import NEW, as_trained, assess, assess_classifier, data_settings
        from bier.evaluate.ensemble import difference
        from bier.evaluate.report.verdict import verdict
        from bier.models.model import load

        model = load(run, fast=fast)
        settings, own = data_settings(run, data, root, size)
        dataset = load_data(settings)
        changes = None
        if own and isinstance(run, Path):
            dataset, changes = as_trained(run, dataset, settings)
            _say_changes(changes)
        if part is None and not own and dataset.divided:
            part = ALL
        root = root or settings.root or None
        cache = cache or (Path(settings.cache) if settings.cache else None)
        options: dict[str, Any] = {"part": part, "cache": cache}
        if skip_broken or settings.skip_broken:
            measured = {None: ("test", "query", "gallery", NEW), ALL: ()}.get(part, (part or "",))
            with counted_step(bar, "reading images") as progress:
                dataset = readable(dataset, measured, cache=cache, progress=progress)
        with counted_step(bar, f"embedding for {run}") as progress:
            if dataset.protocol == "accuracy" and isinstance(run, Path):
                return assess_classifier(run, model, dataset, part or "test", progress)
            done = assess(model, dataset, **options, progress=progress)
            if part is None and changes and changes.new_images is not None and len(changes.new_images) > 1:
                new = assess(model, dataset, part=NEW, cache=cache, progress=progress)
                done = replace(done, new=new)
        done = replace(done, gone=changes.gone_classes if changes else ())
        if with_untrained and isinstance(run, Path):
            done = replace(done, untrained=_untrained(bar, run, dataset, {**options, "fast": fast}))
        look = model.look if fast or not model.is_fast else ""
        done = replace(done, measured=replace(done.measured, root=str(root or ""), look=look))
        unseen = isinstance(run, Path) and own and part in (None, "test")
        if isinstance(run, Path) and rank() == 0 and (unseen or not own) and not fast:
            done = _keep_tested(run, done)
        reranked: dict[str, Any] = {}
        if rerank:
            with counted_step(bar, "re-ranking") as progress:
                reranked = _reranked(done.result, rerank, progress)
        untrained = done.untrained.result if done.untrained else None
        comparison = {**({"untrained backbone": untrained} if untrained else {}), **results}
        differences = {name: difference(done.result, other) for name, other in comparison.items()}
        results[str(run)] = done.result
        sentences = verdict(done.result, done.classes, unseen=unseen, untrained=untrained)
        page = {}
        if report is not None and rank() == 0:
            with step(bar, "writing the report"):
                folder = run if isinstance(run, Path) else None
                written = _write(
                    report, done.result, done.measured, str(run), folder, done, reranked, sentences, comparison
                )
                page = {"report": str(written)}
    against = {name: found.to_dict() for name, found in differences.items() if found is not None}
    return {**done.to_dict(), **reranked, "difference": against, "verdict": sentences, **page}


def _say_changes(changes: "Changes") -> None:
    """What has become of the data since the run was trained."""
    known = sum(changes.added.values()) - (0 if changes.new_images is None else len(changes.new_images))
    for names, what in (
        (changes.new_classes, "new since training and measured as a part of their own"),
        (changes.gone_classes, "gone since training"),
    ):
        if names:
            shown = ", ".join(map(printable, names[:10])) + (", ..." if len(names) > 10 else "")
            say(f"{len(names):,} class{'es' * (len(names) > 1)} {what}: {shown}")
    if known:
        say(f"{known:,} image{'s' * (known > 1)} added to known classes since training: not measured")
    if changes.changed:
        say(f"{len(changes.changed):,} images have changed since training; the first is {changes.changed[0].path}")


def _keep_tested(run: Path, done: "Assessment") -> "Assessment":
    """Write the precision of the model's threshold on these images, which it was not trained on, into the model."""
    from contextlib import suppress

    from bier.evaluate.thresholds import keep_record, tested_on

    point = done.result.same.tested if done.result.same else None
    tested = point and tested_on(point, done.measured.data, done.measured.classes)
    if tested is None or done.kept is None or done.kept.get("tested") == tested:
        return done
    kept = {**done.kept, "tested": tested}
    with suppress(WriteError):  # somebody else's model
        keep_record(run, kept)
    return replace(done, kept=kept)


def _untrained(bar: "Progress", run: Path, dataset: "Dataset", options: Mapping[str, Any]) -> "StartingPoint | None":
    from bier.evaluate.dataset import assess_untrained

    with counted_step(bar, "embedding with the untrained backbone") as progress:
        try:
            return assess_untrained(run, dataset, **options, progress=progress)
        except ModelError as error:  # its weights are a file that may have been removed
            say(f"Without the untrained backbone: {error}")
            return None


def _check_report(folder: Path) -> None:
    """Before minutes of encoding."""
    from bier.folders import check_own_folder

    check_own_folder(folder, "report")


def _check_rerank(names: Sequence[str]) -> None:
    """Before minutes of encoding."""
    from bier.search.rerank import checked_method

    for name in names:
        checked_method(name)


def _reranked(
    result: "EnsembleResult", names: Sequence[str], progress: "Callable[[int, int], None] | None" = None
) -> dict[str, Any]:
    """{"rerank": {"shortlist": 100, "plain": {...}, name: {...}}}."""
    from bier.evaluate.reranking import evaluate_reranking
    from bier.search.rerank import DEPTH

    vectors, classes, gallery, gallery_classes = result.test.compared(result.groups, result.weighting)
    ks = sorted(result.recall["ensemble"])
    rows = evaluate_reranking(vectors, classes, ks, names, gallery, gallery_classes, progress=progress)
    return {"rerank": {"shortlist": DEPTH, **{name: row.to_dict() for name, row in rows.items()}}}


def _from_file(path: Path) -> "EnsembleResult":
    from bier.evaluate.ensemble import evaluate_ensemble
    from bier.search import read_embeddings

    known = read_embeddings(path, raw=True)
    if known.labels is None or None in known.labels:
        raise DataError(f"{path} has no label for some images, so that recall cannot be measured.")
    assert known.raw is not None
    assert known.weighting is not None
    labels = [str(label) for label in known.labels]
    return evaluate_ensemble(known.raw, known.groups, labels, (1, 2, 4, 8, 16, 32), weighting=known.weighting)


def _write(
    folder: Path,
    result: "EnsembleResult",
    measured: "Measured",
    title: str,
    run: Path | None = None,
    done: "Assessment | None" = None,
    reranked: Mapping[str, Any] | None = None,
    sentences: Sequence[str] = (),
    comparison: "Mapping[str, EnsembleResult] | None" = None,
) -> Path:
    from bier.evaluate.report import write_report
    from bier.runs import Run

    return write_report(
        folder,
        result,
        measured=str(measured),
        metrics=Run(run).metrics() if run is not None else (),
        images=done.images if done else None,
        gallery_images=done.gallery_images if done else None,
        title=title,
        comparison=comparison,
        kept=done.kept if done else None,
        reranked=(reranked or {}).get("rerank"),
        verdict=sentences,
    )


def _show(found: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        emit(next(iter(found.values())) if len(found) == 1 else {"runs": dict(found)})
        _say_verdicts(found)
        return
    if len(found) == 1:
        name, row = next(iter(found.items()))
        console.print(single_table(name, row))
        if "same" in row:
            console.print(same_table(row["same"]))
        if "new_classes" in row:
            console.print(new_classes_table(row["new_classes"]))
    else:  # networks that classify have other numbers than those that search
        for kind in ("recall", "accuracy"):
            rows = {name: row for name, row in found.items() if kind in row}
            if rows:
                console.print(comparison_table(rows))
    if any(row.get("difference") for row in found.values()):
        console.print(difference_table(found))
    for name, row in found.items():
        say_skipped(row.get("skipped", ()))
        if "rerank" in row:
            console.print(rerank_table(name, row["rerank"]))
    _say_verdicts(found)


def _say_verdicts(found: Mapping[str, Mapping[str, Any]]) -> None:
    """The last words, after the tables: what the numbers say, and where the report is."""
    for name, row in found.items():
        if row.get("verdict"):
            say(" ".join([*([f"{name}:"] if len(found) > 1 else []), *row["verdict"]]))
        if "report" in row:
            say(f"Report: {shlex.quote(row['report'])}")


def _percent(value: float) -> str:
    return f"{value:.2f}"


def _measured(row: Mapping[str, Any]) -> str:
    """What the numbers of an evaluation are about."""
    from bier.evaluate.dataset import Measured

    return str(Measured(**row["measured"]))


def single_table(name: str, row: Mapping[str, Any]) -> "Group":
    """All rows of one evaluation: ensemble, learners, prefixes."""
    if "accuracy" in row:
        cells = [(one, _percent(value)) for one, value in row["accuracy"].items()]
        return table_of_numbers(("", "accuracy"), cells, title=name, caption=_measured(row))
    ks = list(row["recall"]["ensemble"])
    clf = row["classifier_correlation"]
    same = (f"ensemble-{row['weighting']}", f"prefix-{len(row['groups'])}")  # other names for the ensemble
    names = [one for one in row["recall"] if one not in same]
    return table_of_numbers(
        ("", *(f"R@{k}" for k in ks)),
        [(one, *(_percent(row["recall"][one][k]) for k in ks)) for one in names],
        title=name,
        caption=(
            f"{_measured(row)}; {row['queries']:,} queries, {row['gallery']:,} in the gallery, "
            f"{row['without_positive']} without a match; feature correlation {row['feature_correlation']:.4f}, "
            f"classifier correlation {'-' if clf is None else format(clf, '.4f')}; {row['seconds']:.1f} s"
        ),
        style=lambda number: "bold" if names[number] == "ensemble" else None,
    )


def new_classes_table(new: Mapping[str, Any]) -> "Group":
    """Classes that have joined the data since the run was trained: neither trained on nor part of the run's test."""
    recall = new["recall"]["ensemble"]
    cells = [("new classes", *map(_percent, recall.values()))]
    return table_of_numbers(("", *(f"R@{k}" for k in recall)), cells, caption=_measured(new))


def same_table(same: Mapping[str, Any]) -> "Group":
    """What searches return above a threshold: the one that the model keeps, and the one found on these images."""
    from bier.evaluate.thresholds import found_on, why_none

    rows, kept = [], same.get("kept")
    target = f"{same['target_precision']:g}%"
    if kept and same["tested"]:
        rows.append((f"the model's, found on {found_on(kept)}", same["tested"]))
    if same["found"]:
        rows.append((f"for {target}, found on these images", same["found"]))
    cells = [
        (
            name,
            f"{one['threshold']:.4f}",
            "-" if one["precision"] is None else _percent(one["precision"]),
            "-" if one["precision_with_unknown"] is None else _percent(one["precision_with_unknown"]),
            *(_percent(one[key]) for key in ("recall", "answered", "empty")),
        )
        for name, one in rows
    ]
    tars = ", ".join(f"{value:.2f} at FAR {rate}" for rate, value in same["tar"].items())
    none = "" if same["found"] else f"; no threshold reaches a precision of {target} on these images"
    if kept and not same["tested"]:
        none += f"; the model keeps no threshold: {why_none(kept)}"
    return table_of_numbers(
        ("same from a similarity of", "", "precision", "half unknown", "recall", "answered", "empty without a match"),
        cells,
        caption=f"pairs of images: EER {_percent(same['eer'])}; TAR {tars}{none}",
    )


def difference_table(found: Mapping[str, Mapping[str, Any]]) -> "Group":
    """What each run is better by than the backbone it started from, and than the runs before it."""
    from bier.evaluate.ensemble import Interval

    cells = []
    for name, row in found.items():
        for other, measured in row.get("difference", {}).items():
            values = (measured["recall"], measured["map_at_r"])
            cells.append((f"{name} - {other}", *("-" if value is None else str(Interval(**value)) for value in values)))
    caption = (
        "in brackets 95% of the draws when classes are drawn anew; without 0 in it, it is not the choice of classes"
    )
    return table_of_numbers(("difference", "R@1", "mAP@R"), cells, caption=caption)


def rerank_table(name: str, rerank: Mapping[str, Any]) -> "Group":
    """The nearest images as they are, and re-ranked by each method."""
    rows = {one: row for one, row in rerank.items() if one != "shortlist"}
    plain = rows["plain"]
    cells = []
    for one, row in rows.items():
        values = (row["recall"]["1"], row["map_at_r"]) if "1" in row["recall"] else (None, row["map_at_r"])
        before = (plain["recall"].get("1"), plain["map_at_r"])
        gains = [
            "-" if value is None or old is None else f"{value - old:+.2f}" if one != "plain" else ""
            for value, old in zip(values, before, strict=True)
        ]
        shown = ["-" if value is None else _percent(value) for value in values]
        cells.append((one, shown[0], gains[0], shown[1], gains[1], f"{row['milliseconds']:.2f}"))
    return table_of_numbers(
        ("", "R@1", "gain", "mAP@R", "gain", "ms per query"),
        cells,
        title=name,
        caption=f"re-ranking of the {rerank['shortlist']} nearest images",
    )


def comparison_table(found: Mapping[str, Mapping[str, Any]]) -> "Group":
    """One row per run."""
    first = next(iter(found.values()))
    about = list(dict.fromkeys(map(_measured, found.values())))
    caption = about[0] if len(about) == 1 else "\n".join(f"{name}: {_measured(row)}" for name, row in found.items())
    if "accuracy" in first:
        cells = [(name, _percent(row["accuracy"]["ensemble"])) for name, row in found.items()]
        return table_of_numbers(("run", "accuracy"), cells, caption=caption)
    ks = list(first["recall"]["ensemble"])
    head = ("run", *(f"R@{k}" for k in ks), "mAP@R", "feature corr.", "classifier corr.")
    rows = [_compared(name, row, ks) for name, row in found.items()]
    return table_of_numbers(head, [*rows, *_untrained_rows(found.values(), ks)], caption=caption)


def _untrained_rows(found: Iterable[Mapping[str, Any]], ks: Sequence[str]) -> list[tuple[str, ...]]:
    """The backbones that the runs started from, each once."""
    rows: dict[tuple[str, ...], None] = {}
    for row in found:
        if "untrained" in row:
            recall, ranked = row["recall"]["untrained"], row["untrained"]["map_at_r"]
            recalls = (_percent(recall[k]) if k in recall else "-" for k in ks)
            name = f"untrained {row['untrained']['backbone']}"
            rows[(name, *recalls, "-" if ranked is None else _percent(ranked), "-", "-")] = None
    return list(rows)


def _compared(name: str, row: Mapping[str, Any], ks: Sequence[str]) -> tuple[str, ...]:
    clf, recall = row["classifier_correlation"], row["recall"]["ensemble"]
    ranked = "-" if row["map_at_r"] is None else _percent(row["map_at_r"])
    recalls = (_percent(recall[k]) if k in recall else "-" for k in ks)
    return (name, *recalls, ranked, f"{row['feature_correlation']:.4f}", "-" if clf is None else f"{clf:.4f}")
