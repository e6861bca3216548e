"""Re-ranking of a shortlist: the nearest images in a new order, by their similarities to each other.

Each method takes a query (d,) and the vectors (n, d) of its nearest images, best first, and returns new scores (n,), of
which higher is better. Nothing outside the shortlist is read, so that memory is bounded by n x n numbers, whatever the
size of the collection. All similarities are cosines.

- `alpha-qe`, alpha query expansion (Radenovic, Tolias and Chum, TPAMI 2018): the query becomes the weighted mean of
  itself and its nearest images, each weighted by its similarity to the power of alpha.
- `dba`, database-side augmentation (Arandjelovic and Zisserman, CVPR 2012), with the same weights: each image of the
  shortlist becomes the weighted mean of itself and the images of the shortlist that are nearest to it.
- `k-reciprocal` (Zhong, Zheng, Cao and Li, CVPR 2017): images count as near if they are among each other's nearest, and
  two images are compared by the neighbours that they share (a Jaccard distance).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bier.errors import SearchError
from bier.search.store import (
    Floats,
    Id,
    Learners,
    Neighbours,
    Store,
    Where,
    checked_count,
    checked_queries,
    chosen_learners,
    spans,
)

DEPTH = 100  # images of the shortlist
MOST = 2_000  # the longest shortlist: four million similarities

# Chosen on training classes (CUB-200-2011, groceries): more images raise mAP@R a little and cost Recall@1.
EXPANDED = 5  # images that join the query, of `alpha-qe`
AUGMENTED = 3  # images that join each image of the shortlist, of `dba`
ALPHA = 3.0
K1, K2, LAMBDA = 20, 6, 0.3  # of `k-reciprocal`, as the paper has them


def alpha_query_expansion(query: Floats, vectors: Floats, count: int = EXPANDED, alpha: float = ALPHA) -> Floats:
    """Scores of the expanded query q + sum_i max(<q, x_i>, 0)^alpha x_i over the `count` nearest images x_i."""
    own, others = _unit(query[None])[0], _unit(vectors)
    nearest = _order(own @ others.T)[:count]
    weights = np.maximum(others[nearest] @ own, 0) ** np.float32(alpha)
    expanded: Floats = own + weights @ others[nearest]
    scores: Floats = others @ _unit(expanded[None])[0]
    return scores


def database_augmentation(query: Floats, vectors: Floats, count: int = AUGMENTED, alpha: float = ALPHA) -> Floats:
    """Scores of the query with x_i + sum_j max(<x_i, x_j>, 0)^alpha x_j over the `count` images x_j nearest to x_i."""
    own, others = _unit(query[None])[0], _unit(vectors)
    similarity = others @ others.T
    np.fill_diagonal(similarity, -np.inf)
    weights = np.zeros(similarity.shape, np.float32)
    count = min(count, len(others) - 1)
    nearest = _order(similarity)[:, :count]
    powers = np.maximum(np.take_along_axis(similarity, nearest, axis=1), 0) ** np.float32(alpha)
    np.put_along_axis(weights, nearest, powers, axis=1)
    augmented: Floats = others + weights @ others
    scores: Floats = _unit(augmented) @ own
    return scores


def k_reciprocal(query: Floats, vectors: Floats, k1: int = K1, k2: int = K2, mixed: float = LAMBDA) -> Floats:
    """Scores -((1 - mixed) Jaccard distance + mixed d), over the set of the query and its shortlist.

    d(p, g) = (1 - cosine) divided by its largest value for p. N(p, k) are p and the k images nearest to it, R(p, k)
    those g of N(p, k) with p in N(g, k). R*(p) is R(p, k1) joined with every R(g, k1/2), g in R(p, k1), of which at
    least two thirds lie in R(p, k1). An image is described by V_p(g) = exp(-d(p, g)) for g in R*(p) and 0 elsewhere,
    scaled to sum 1, then averaged over N(p, k2 - 1).
    """
    everything = _unit(np.concatenate([query[None], vectors]))
    distance = np.maximum(1 - everything @ everything.T, 0)
    np.fill_diagonal(distance, -1)  # an image comes first among its own neighbours, also before its duplicates
    order = _order(-distance)
    np.fill_diagonal(distance, 0)
    distance /= np.maximum(distance.max(axis=1, keepdims=True), np.float32(1e-12))

    mutual, half = _mutual(order, k1), _mutual(order, round(k1 / 2))
    inside = mutual @ half.T  # how many of R(g, k1/2) lie in R(p, k1)
    joined = mutual * (3 * inside >= 2 * half.sum(axis=1))
    reached = (mutual + joined @ half) > 0
    described = np.where(reached, np.exp(-distance), np.float32(0))
    described /= described.sum(axis=1, keepdims=True)
    described = described[order[:, :k2]].mean(axis=1)

    shared = np.minimum(described[0], described[1:]).sum(axis=1)
    jaccard = 1 - shared / np.maximum(described[0], described[1:]).sum(axis=1)
    scores: Floats = -((1 - mixed) * jaccard + mixed * distance[0, 1:]).astype(np.float32)
    return scores


def _mutual(order: NDArray[np.int64], k: int) -> Floats:
    """R(p, k) as rows of 0 and 1."""
    near = np.zeros(order.shape, np.float32)
    np.put_along_axis(near, order[:, : k + 1], 1, axis=1)
    return near * near.T


def _unit(vectors: Floats) -> Floats:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1)).astype(np.float32, copy=False)


def _order(scores: Floats) -> NDArray[np.int64]:
    """Positions from the highest score to the lowest; equal scores stay in their order."""
    order: NDArray[np.int64] = np.argsort(-scores, axis=-1, kind="stable")
    return order


METHODS: dict[str, Callable[[Floats, Floats], Floats]] = {
    "alpha-qe": alpha_query_expansion,
    "dba": database_augmentation,
    "k-reciprocal": k_reciprocal,
}


def checked_method(name: str) -> str:
    if name not in METHODS:
        raise SearchError(f"The 'rerank' parameter must be one of {', '.join(METHODS)}. Got {name!r} instead.")
    return name


def rerank(name: str, query: ArrayLike, vectors: ArrayLike) -> Floats:
    """New scores (n,) of a shortlist (n, d), which must be sorted by its similarity to the query (d,)."""
    method = METHODS[checked_method(name)]
    own, others = np.asarray(query, np.float32), np.asarray(vectors, np.float32)
    if others.ndim != 2 or own.shape != others.shape[1:]:
        raise SearchError(
            f"A query (d,) and a shortlist (n, d) must have one dimension. Got {own.shape} and {others.shape} instead."
        )
    if len(others) > MOST:
        raise SearchError(f"A shortlist that is re-ranked must have at most {MOST:,} images. Got {len(others):,}.")
    return method(own, others) if len(others) > 1 else np.zeros(len(others), np.float32)


def search_reranked(
    store: Store,
    query: ArrayLike,
    k: int,
    name: str,
    *,
    depth: int = DEPTH,
    where: Where | None = None,
    learners: Learners = None,
    without: Id | None = None,
) -> Neighbours:
    """As `Store.search` for one query (d,), with the nearest images re-ranked; scores stay the dot products.

    `depth` images are looked at twice. `without` is the query's own id in the collection, which takes no part.
    """
    checked_method(name)
    depth = max(k, checked_count(depth, "depth"))
    nearest = store.search(query, depth + (without is not None), where=where, learners=learners)
    others = [place for place, image in enumerate(nearest.ids.tolist()) if image != without][:depth]
    ids, scores = nearest.ids[others], nearest.scores[others]
    rows = None if nearest.rows is None else nearest.rows[others]
    # the same part of stored vectors as of the query: zeros outside the chosen learners do not count
    asked = checked_queries(query, store.groups, learners, None)[0]
    stored = store.vectors(ids.tolist()) if len(ids) else np.empty((0, len(asked)), np.float32)
    if learners is not None:
        stored = checked_queries(stored, store.groups, learners, None) if len(stored) else stored
    order = _order(rerank(name, asked, stored))[:k]
    return Neighbours(ids[order], scores[order], None if rows is None else rows[order])


class Match(NamedTuple):
    """An image that a search has found: the dot product with the query, and the cosine, which is 1 for the same."""

    id: Id
    score: float
    similarity: float


def search_one(
    store: Store,
    query: Floats,
    k: int,
    *,
    rerank: str | None = None,
    where: Where | None = None,
    learners: Learners = None,
    without: Id | None = None,
) -> list[Match]:
    """The k images nearest to one query (d,), best first, re-ranked if a method is named.

    The other parameters are those of `search_reranked`; `learners` must be next to each other.
    """
    if rerank is None:
        nearest = store.search(query, k + (without is not None), where=where, learners=learners)
    else:
        nearest = search_reranked(store, query, k, rerank, where=where, learners=learners, without=without)
    # All vectors of a model have the same length in the same learners' part.
    parts = [spans(store.groups)[learner] for learner in chosen_learners(learners, len(store.groups))]
    length = float(np.square(query[parts[0].start : parts[-1].stop]).sum()) or 1.0
    scored = zip(nearest.ids.tolist(), nearest.scores.tolist(), strict=True)
    matches = [Match(image, score, float(np.clip(score / length, -1, 1))) for image, score in scored]
    return [match for match in matches if match.id != without][:k]
