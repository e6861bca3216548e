"""Models on the Hugging Face Hub: the files of `hf:owner/name`, and the model card."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from bier.errors import ModelError

PREFIX = "hf:"
_PAPER = "https://arxiv.org/abs/1801.04815"


def is_on_hub(name: object) -> bool:
    return str(name).startswith(PREFIX)


def fetch(name: str, files: tuple[str, ...], **options: Any) -> Path:
    """The folder with the files of `hf:owner/name` or `hf:owner/name@revision`, downloaded if they are not here yet.

    options: those of `huggingface_hub.snapshot_download`.
    """
    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    options = {"revision": revision or None, **options}
    try:
        return Path(snapshot_download(repository, allow_patterns=list(files), **options))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"The model {PREFIX}{repository} cannot be had from the hub: {reason}") from error


def model_card(
    description: Mapping[str, Any],
    *,
    licence: str | None = None,
    settings: str | None = None,
    results: Mapping[str, Any] | None = None,
    picture: str | None = None,
) -> ModelCard:
    """The card of a model, from what its config.json holds.

    licence: of the weights, as the hub spells it (`apache-2.0`); left open where it is not given, because it depends on
    the images and on the backbone's own weights.
    settings: the config.toml of the run. results: what `bier evaluate --json` prints. picture: a file beside the card.
    """
    metadata = description["metadata"]
    data = metadata.get("data", "images of its own")
    tags = ["image-retrieval", "metric-learning", "bier"]
    head = ModelCardData(license=licence, library_name="bier", pipeline_tag="image-feature-extraction", tags=tags)
    parts = [
        f"# {description['backbone']} trained on {data}",
        "Images in, vectors out: the dot product of two vectors is the similarity of two images. Made with `bier`,"
        f" which implements [Deep Metric Learning with BIER]({_PAPER}).",
        '```python\nimport bier\n\nmodel = bier.load("hf:OWNER/NAME")\n'
        'vectors = model.encode(["one.jpg", "other.jpg"])\nprint(vectors @ vectors.T)\n```',
        "## Model",
        _table(("", ""), _facts(description, settings)),
        *([f"![Queries and what was found]({picture})"] if picture else []),
        *_recall(description, results),
        *_thresholds(metadata.get("same")),
        "## Licence",
        licence or "Not stated. It depends on the training images and on the weights of the backbone.",
        *(["## Settings", f"```toml\n{settings.strip()}\n```"] if settings else []),
    ]
    return ModelCard(f"---\n{head.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def _facts(description: Mapping[str, Any], settings: str | None) -> list[tuple[str, ...]]:
    groups, metadata = description["groups"], description["metadata"]
    split = tomllib.loads(settings or "").get("split", {}).get("parts", {}).get("train")
    counts = f", {split['images']:,} images of {split['classes']:,} classes" if split else ""
    known = {
        "backbone": description["backbone"],
        "input": _input(description),
        "vector": f"{sum(groups)} dimensions, float32",
        "learners": f"{len(groups)}, of {', '.join(map(str, groups))} dimensions; the first alone are a shorter vector",
        "training data": str(metadata.get("data", "not stated")) + counts,
        "method": str(metadata.get("method", "not stated")),
    }
    return list(known.items())


def _input(description: Mapping[str, Any]) -> str:
    crop, trained_at = description["crop"], description.get("trained_at")
    mirrored = " and their mirror image" * description.get("mirror", False)
    trained = f"; {trained_at}x{trained_at} in training" if trained_at not in (None, 0, crop) else ""
    return f"{crop}x{crop} pixels, RGB{mirrored}{trained}" if crop else "features"


def _recall(description: Mapping[str, Any], results: Mapping[str, Any] | None) -> list[str]:
    """The table of `bier evaluate`, or what training has measured on its validation classes."""
    metadata = description["metadata"]
    if results is not None:
        same = (f"ensemble-{description['weighting']}", f"prefix-{len(description['groups'])}")  # the ensemble again
        rows = {name: row for name, row in results["recall"].items() if name not in same}
        ks = list(rows["ensemble"])
        cells = [(name, *(f"{row[k]:.1f}" for k in ks)) for name, row in rows.items()]
        counts = f"{results['queries']:,} queries, {results['gallery']:,} images to find."
        return ["## Recall on classes not seen in training", _table(("", *(f"R@{k}" for k in ks)), cells), counts]
    scores = {"this model": metadata.get("validation"), "untrained backbone": metadata.get("untrained")}
    cells = [
        (name, f"{row['recall']:.1f}", f"{row['map']:.1f}" if row.get("map") is not None else "-")
        for name, row in scores.items()
        if row
    ]
    return ["## Validation", _table(("", "R@1", "MAP@R"), cells)] if cells else []


def _thresholds(same: Mapping[str, Any] | None) -> list[str]:
    if not same or same["prefixes"][-1] is None:
        return []
    tested = same.get("tested")
    return [
        "## Same or not",
        f"Two images count as the same from a similarity of {same['prefixes'][-1]:.3f} on, which was found on"
        f" {same['classes']} class{'es' * (same['classes'] != 1)} of the part '{same['part']}'."
        + (
            f" On {tested['classes']} other classes {tested['precision']:.0f}% of such answers were right, where half"
            " of the queries had no image of their class to find."
            if tested
            else ""
        ),
    ]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
