"""Counts, for every query, the gallery images of other classes that score at least as high as its best positive.

This one number gives Recall@K for every K. It is found tile by tile, so that memory does not grow with the square of
the set:

1. The best positive of each query comes from its own class alone, in float64.
2. Tiles of scores are multiplied in float32 and compared with two thresholds, just below and just above the best
   positive by more than float32's rounding. Where the two counts agree, rounding cannot matter.
3. The few scores between the two thresholds are computed again in float64, and scores that agree to about 1e-12 tie.

So the outcome is that of a float64 evaluation, whatever the tile size, the threads and the matrix library, at the
price of float32. A score may be a weighted sum of several learners' scores; each learner's tile is multiplied once and
serves every such sum.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from bier import distributed

TILE = 768  # 2.4 MB of scores: the comparisons stay inside the processor's cache
CHUNK = 1 << 22  # numbers held at once while the best positives are looked for
ROUNDING = 2.0**-24  # float32: half a unit in the last place of 1

Progress = Callable[[int, int], None]


class Side(NamedTuple):
    """Queries or gallery, in the order of their classes. `parts`: M float32 matrices (N, d_m); `classes`: (N,)."""

    parts: list[torch.Tensor]
    classes: torch.Tensor
    order: torch.Tensor


def sort_by_class(parts: Sequence[torch.Tensor], classes: torch.Tensor) -> Side:
    """Bring images of one class together, so that positives lie in few tiles."""
    order = torch.argsort(classes, stable=True)
    return Side([part[order] for part in parts], classes[order], order)


class Thresholds(NamedTuple):
    """Per score and query, all (V, N): the best positive and how far float32 may be off when compared with it."""

    best: torch.Tensor  # float64, +inf where there is no positive
    band: torch.Tensor  # float64
    low: torch.Tensor  # float32: best - band
    high: torch.Tensor  # float32: best + band


@torch.no_grad()
def count_ahead(
    queries: Side,
    gallery: Side | None,
    mix: torch.Tensor,
    tile: int = TILE,
    progress: Progress | None = None,
    shared: bool = False,
) -> torch.Tensor:
    """Count the negatives ahead of each query's best positive.

    `mix` (V, M) holds non-negative weights: score v of a pair is sum_m mix[v, m] <a_m, b_m>. Without a gallery the
    queries are their own gallery, each pair is multiplied once and no image meets itself. Returns int64 (V, N) in the
    queries' original order; -1 where the gallery holds no positive. `shared`: all processes call this with the same
    arguments, each counts a share of the tiles, and all get the whole.
    """
    other = queries if gallery is None else gallery
    bar = _thresholds(queries, other, gallery is None, mix)
    ahead = torch.zeros(len(mix), len(queries.classes), dtype=torch.int64)
    everything = list(_tile_pairs(len(queries.classes), len(other.classes), tile, triangle=gallery is None))
    pairs = distributed.share(everything, shared)
    work = _Tiles(queries, other, mix, bar, tile, both_sides=gallery is None)
    for done, (rows, cols, by_row, by_col) in enumerate(_in_threads(work, pairs), start=1):
        ahead[:, rows] += by_row
        if by_col is not None:
            ahead[:, cols] += by_col
        if progress is not None:
            progress(done, len(pairs))
    distributed.sum_shares(ahead, shared)
    ahead[torch.isinf(bar.best)] = -1
    result = torch.empty_like(ahead)
    result[:, queries.order] = ahead
    return result


TilePair = tuple[slice, slice]
TileCount = tuple[slice, slice, torch.Tensor, torch.Tensor | None]


def _tile_pairs(rows: int, cols: int, tile: int, *, triangle: bool) -> Iterator[TilePair]:
    for top in range(0, rows, tile):
        for left in range(top if triangle else 0, cols, tile):
            yield slice(top, min(top + tile, rows)), slice(left, min(left + tile, cols))


def _in_threads(count: Callable[[TilePair], TileCount], pairs: Sequence[TilePair]) -> Iterator[TileCount]:
    """Count each tile in one thread. Threads that share a tile would synchronise a dozen times per tile."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        some = 64 * threads  # a bound on queued tiles, so that an interruption takes effect soon
        for start in range(0, len(pairs), some):
            yield from pool.map(count, pairs[start : start + some])
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # threads that start later must not inherit the workers' setting


class _Tiles:
    """Multiplies and compares one tile at a time, in buffers that belong to each thread."""

    def __init__(
        self, queries: Side, gallery: Side, mix: torch.Tensor, bar: Thresholds, tile: int, *, both_sides: bool
    ) -> None:
        self.queries, self.gallery, self.bar, self.both_sides = queries, gallery, bar, both_sides
        self.mix = [[(m, float(w)) for m, w in enumerate(row) if w > 0] for row in mix]
        self.area = min(tile, len(queries.classes)) * min(tile, len(gallery.classes))
        self.own = threading.local()

    def __call__(self, pair: TilePair) -> TileCount:
        """Count by row, and by column where a tile off the diagonal stands for both orders of its pairs."""
        rows, cols = pair
        by_row, by_col = [], []
        for v, scores in enumerate(self.scores(rows, cols)):
            by_row.append(self.count(v, scores, rows, cols))
            if self.both_sides and rows != cols:
                by_col.append(self.count(v, scores.T, cols, rows))
        return rows, cols, torch.stack(by_row), torch.stack(by_col) if by_col else None

    def buffers(self) -> list[torch.Tensor]:
        """One for each learner's products, one for their sum, one for the outcome of comparisons."""
        if not hasattr(self.own, "buffers"):
            self.own.buffers = [torch.empty(self.area) for _ in range(len(self.queries.parts) + 2)]
        buffers: list[torch.Tensor] = self.own.buffers
        return buffers

    def scores(self, rows: slice, cols: slice) -> Iterator[torch.Tensor]:
        shape = (rows.stop - rows.start, cols.stop - cols.start)
        *products, total, _ = (flat[: shape[0] * shape[1]].view(shape) for flat in self.buffers())
        for a, b, product in zip(self.queries.parts, self.gallery.parts, products, strict=True):
            torch.mm(a[rows], b[cols].T, out=product)
        self._hide_positives(products, rows, cols)
        for terms in self.mix:
            yield _weighted_sum(products, terms, total)

    def _hide_positives(self, products: list[torch.Tensor], rows: slice, cols: slice) -> None:
        ours, theirs = self.queries.classes[rows], self.gallery.classes[cols]
        if ours[0] > theirs[-1] or theirs[0] > ours[-1]:
            return  # sorted by class: this tile has none
        same = ours[:, None] == theirs[None, :]
        for product in products:
            product.masked_fill_(same, -torch.inf)

    def count(self, v: int, scores: torch.Tensor, rows: slice, cols: slice) -> torch.Tensor:
        """Count per row of `scores` what is at least the best positive. Transposed tiles swap `rows` and `cols`."""
        outcome = self.buffers()[-1][: scores.numel()]
        outcome = outcome.view(scores.shape) if scores.is_contiguous() else outcome.view(scores.T.shape).T
        low, high = self.bar.low[v, rows, None], self.bar.high[v, rows, None]
        # Comparing into floats is several times faster than into booleans; sums of up to 2^24 ones are exact.
        possible = torch.ge(scores, low, out=outcome).sum(1)
        certain = torch.gt(scores, high, out=outcome).sum(1)
        count = certain.to(torch.int64)
        unsure = (possible != certain).nonzero().flatten()
        if len(unsure):
            near = (scores[unsure] >= low[unsure]) & (scores[unsure] <= high[unsure])
            columns = near.any(0).nonzero().flatten()
            exact = self._exact(v, unsure + rows.start, columns + cols.start)
            bar = self.bar.best[v, rows][unsure] - 1e-6 * self.bar.band[v, rows][unsure]
            count[unsure] += ((exact >= bar[:, None]) & near[:, columns]).sum(1)
        return count

    def _exact(self, v: int, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        # Rows are queries and columns gallery images, or both are the same set: the score is symmetric.
        return sum(
            (
                w * (self.queries.parts[m][rows].double() @ self.gallery.parts[m][cols].double().T)
                for m, w in self.mix[v]
            ),
            start=torch.zeros(()),
        )


def _weighted_sum(products: list[torch.Tensor], terms: list[tuple[int, float]], total: torch.Tensor) -> torch.Tensor:
    (first, weight), *rest = terms
    if not rest and weight == 1.0:
        return products[first]
    torch.mul(products[first], weight, out=total)
    for m, w in rest:
        total.add_(products[m], alpha=w)
    return total


def _thresholds(queries: Side, gallery: Side, same: bool, mix: torch.Tensor) -> Thresholds:
    best = torch.full((len(mix), len(queries.classes)), torch.inf, dtype=torch.float64)
    for rows, scores in _positive_scores(queries, gallery, same, mix):
        best[:, rows.flatten()] = scores.amax(-1).flatten(1)
    # Ten times the usual error of a float32 product of length d: 2 sqrt(d) roundings of |a| |b|; a sum adds one more.
    band = torch.zeros_like(best)
    for m, (a, b) in enumerate(zip(queries.parts, gallery.parts, strict=True)):
        size = a.norm(dim=1).double() * float(b.norm(dim=1).max())
        band += mix[:, m, None] * size * 2 * ROUNDING * (a.shape[1] ** 0.5 + mix.shape[1] + 1)
    return Thresholds(best, band, (best - band).float(), (best + band).float())


def _positive_scores(
    queries: Side, gallery: Side, same: bool, mix: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (rows (n, r), float64 scores (V, n, r, g)): classes with equally many images are multiplied together."""
    classes = 1 + int(max(queries.classes[-1], gallery.classes[-1]))
    ours, theirs = (torch.bincount(side.classes, minlength=classes) for side in (queries, gallery))
    our_start, their_start = ours.cumsum(0) - ours, theirs.cumsum(0) - theirs
    shapes = torch.stack([ours, theirs], dim=1)
    depth = sum(part.shape[1] for part in queries.parts)
    for height, width in torch.unique(shapes, dim=0).tolist():
        if height == 0 or width <= int(same):
            continue
        members = ((ours == height) & (theirs == width)).nonzero().flatten()
        together = max(1, CHUNK // (height * width * (len(mix) + 1) + (height + width) * depth))
        step = max(1, min(height, CHUNK // (width * (len(mix) + 1))))
        columns = torch.arange(width)
        for some in members.split(together):
            cols = their_start[some, None] + columns
            for top in range(0, height, step):
                offsets = torch.arange(top, min(top + step, height))
                rows = our_start[some, None] + offsets
                scores = _mixed_scores(queries, gallery, rows, cols, mix)
                if same:
                    scores[..., offsets - top, offsets] = -torch.inf
                yield rows, scores


def _mixed_scores(
    queries: Side, gallery: Side, rows: torch.Tensor, cols: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    scores = torch.zeros(len(mix), *rows.shape, cols.shape[1], dtype=torch.float64)
    for m, (a, b) in enumerate(zip(queries.parts, gallery.parts, strict=True)):
        product = a[rows].double() @ b[cols].double().mT
        for v, weight in enumerate(mix[:, m].tolist()):
            if weight:
                scores[v].add_(product, alpha=weight)
    return scores
