"""How well each learner and each beginning of the ensemble finds images of the same label in a collection."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bier.evaluate.ensemble import evaluate_ensemble
from bier.search import Id, Index, Label, Store

KS = (1, 2, 4, 8)
_EVERY_IMAGE = 20_000  # up to so many, every image is a query
_QUERIES = 2_000  # beyond that, so many drawn at random
_MOST = 500_000  # beyond that nothing is measured: it would take longer than a person waits
_MOST_IN_STORE = 20_000  # of an engine elsewhere, which would have to send all of its vectors


def measure(store: Store, ids: Sequence[Id], labels: Sequence[Label]) -> dict[str, Any] | None:
    """Recall in percent of every prefix and every learner, each image being searched among the others.

    {"queries": 5924, "prefixes": [{"1": 40.1, ...}, ...], "learners": [{"1": 40.1, ...}, ...]}: the first prefix is
    the first learner, the last one the whole ensemble. None where no two images share a label, or there are too many.
    Images without a label are left out. A large collection is measured by a random 2,000 of its images.
    """
    kept = [row for row, label in enumerate(labels) if label is not None]
    names = np.array([str(labels[row]) for row in kept], dtype=np.str_)
    most = _MOST if isinstance(store, Index) else _MOST_IN_STORE
    if len(np.unique(names)) in (0, len(names)) or len(names) > most:
        return None
    vectors = store.vectors([ids[row] for row in kept])
    if len(kept) <= _EVERY_IMAGE:
        queries = len(kept)
        result = evaluate_ensemble(vectors, store.groups, names, KS, ranking=False)
    else:
        queries = _QUERIES
        drawn = np.zeros(len(kept), np.bool_)
        drawn[np.random.default_rng(0).choice(len(kept), _QUERIES, replace=False)] = True
        result = evaluate_ensemble(
            vectors[drawn],
            store.groups,
            names[drawn],
            KS,
            gallery=vectors[~drawn],
            gallery_labels=names[~drawn],
            ranking=False,
        )
    learners = [_row(result.recall[f"learner-{m + 1}"]) for m in range(len(store.groups))]
    prefixes = [learners[0]] + [_row(result.recall[f"prefix-{m}"]) for m in range(2, len(store.groups) + 1)]
    return {"queries": queries, "prefixes": prefixes, "learners": learners}


def _row(recall: dict[int, float]) -> dict[str, float]:
    return {str(k): round(float(value), 3) for k, value in recall.items()}
