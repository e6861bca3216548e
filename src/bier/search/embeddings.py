"""Reading the file that `bier embed` writes: vectors, and beside them where each came from."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from bier.errors import SearchError
from bier.search.store import Floats, Id, Label, checked_groups, checked_ids, checked_labels, checked_vectors


class Embeddings(NamedTuple):
    """Test-time vectors (N, d), the path of each image, its label if known, and the learners' sizes.

    `model` is what the file says of the model that made them (path and fingerprint), or empty; `root` is the folder
    that the paths start from, or None.
    """

    vectors: Floats
    paths: list[Id]
    labels: list[Label] | None
    groups: tuple[int, ...]
    model: dict[str, Any]
    root: str | None


def read_embeddings(path: str | Path) -> Embeddings:
    """A safetensors file with the tensor `vectors`, and a JSON file of the same name with paths, labels and groups."""
    from safetensors import SafetensorError, safe_open

    file, beside = Path(path), Path(path).with_suffix(".json")
    for one in (file, beside):
        if not one.is_file():
            raise SearchError(
                f"Embeddings must be a file of `bier embed` with a JSON file beside it. {one} is missing."
            )
    try:
        with safe_open(file, framework="np") as tensors:
            vectors = checked_vectors(tensors.get_tensor("vectors"))
        known = json.loads(beside.read_bytes())
        paths, labels, groups = known["paths"], known.get("labels"), known.get("groups")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SearchError(f"The embeddings {file} are damaged or not of `bier embed`: {error}.") from error
    some_labels = None if labels is None else checked_labels(labels, len(vectors))
    sizes = checked_groups(groups, vectors.shape[1])
    ids = checked_ids(paths, len(vectors))
    return Embeddings(vectors, ids, some_labels, sizes, dict(known.get("model") or {}), known.get("root"))
