"""Queries against some of the learners only. A stored vector is cut by learner, so a query may be as well."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from bier.errors import SearchError
from bier.search.answers import Floats, checked_vectors

Learners: TypeAlias = int | Sequence[int] | None


def spans(groups: Sequence[int]) -> list[slice]:
    """Where each learner's part lies in the whole vector."""
    ends = list(accumulate(groups))
    return [slice(end - size, end) for end, size in zip(ends, groups, strict=True)]


def chosen_learners(learners: Learners, count: int) -> tuple[int, ...]:
    """Numbers from 0 of the learners to compare: all, the first m (an int), or those listed (numbered from 1)."""
    if learners is None:
        return tuple(range(count))
    if isinstance(learners, int | np.integer):
        if isinstance(learners, bool) or not 1 <= learners <= count:
            raise SearchError(f"The 'learners' parameter must lie between 1 and {count}. Got {learners!r} instead.")
        return tuple(range(int(learners)))
    numbers = sorted({int(number) for number in learners})
    if not numbers or numbers[0] < 1 or numbers[-1] > count:
        raise SearchError(f"The 'learners' parameter must name learners 1 to {count}. Got {list(learners)!r} instead.")
    return tuple(number - 1 for number in numbers)


def checked_queries(queries: ArrayLike, groups: Sequence[int], learners: Learners, lengths: Floats | None) -> Floats:
    """Queries (Q, d) or (d,) -> (Q, d), zero outside the chosen learners' parts.

    The first m learners of an ensemble of M keep the proportions among their alphas, so the stored vector's
    beginning ranks just as the shorter vector of `learners=m` would. A query may therefore be the whole
    vector or that shorter one; the shorter one is scaled by the ratio of lengths, so that its scores
    are those of two shorter vectors. `lengths` are the lengths of the learners' parts in the stored vectors.
    """
    array = np.atleast_2d(np.asarray(queries))
    chosen = chosen_learners(learners, len(groups))
    width = sum(groups[: len(chosen)])
    if isinstance(learners, int | np.integer) and array.ndim == 2 and array.shape[1] == width < sum(groups):
        short = checked_vectors(array, width, "queries")
        stored = np.float32(0 if lengths is None else np.sqrt(np.square(lengths[: len(chosen)]).sum()))
        ratio = np.linalg.norm(short, axis=1, keepdims=True) / stored if stored > 0 else np.float32(1)
        return np.pad(short * ratio, ((0, 0), (0, sum(groups) - width)))
    whole = checked_vectors(array, sum(groups), "queries")
    if len(chosen) == len(groups):
        return whole
    kept = np.zeros_like(whole)
    for learner in chosen:
        part = spans(groups)[learner]
        kept[:, part] = whole[:, part]
    return kept
