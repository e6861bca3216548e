"""All pairs of queries and gallery, in one scan: ranks for Recall@K, MAP@R, pairs by similarity, the nearest strangers.

A block of queries at a time is compared with the whole gallery, so that memory does not grow with the square of the
set. There is one rule for all numbers: scores are those of float64, and scores that agree to about 1e-12 tie.

Small sets are multiplied in float64. For large ones that would take too long:

1. The scores with a query's own class are computed in float64. They decide what there is to count.
2. Tiles of scores are multiplied fast, in 8-bit integers where the processor has instructions for them and in float32
   elsewhere, and compared with two thresholds, just below and just above the score that decides, by more than the error
   of the product. Where the two counts agree, rounding cannot matter.
3. The few scores between the two thresholds are computed again in float64.

A score may be a weighted sum of several learners' scores; each learner's tile is multiplied once for all of them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DENSE = 1 << 22  # pairs up to which all of them are multiplied in float64
COUNTED = 1 << 26  # pairs that are counted by similarity; of larger sets, those of random queries
BLOCK = 1 << 21  # float64 scores held at once
ROWS, TILE = 512, 2048  # queries and gallery images of a tile: 4 MB of scores
SAMPLE = 2048  # gallery images that bound what can be among a query's first R
ROUNDING = 2.0**-24  # float32: half a unit in the last place of 1
OCTAVES, STEPS = 34, 1 << 17  # of the distance 1 - similarity, from 2^-32 to 4: each is cut into STEPS bins

Progress = Callable[[int, int], None]


class Side(NamedTuple):
    """Queries or gallery, in the order of their classes. `parts`: M float32 matrices (N, d_m); `classes`: (N,)."""

    parts: list[Tensor]
    classes: Tensor
    order: Tensor


def sort_by_class(parts: Sequence[Tensor], classes: Tensor) -> Side:
    """Bring images of one class together, so that the positives of a block of queries lie side by side."""
    order = torch.argsort(classes, stable=True)
    return Side([part[order] for part in parts], classes[order], order)


class Pairs(NamedTuple):
    """Pairs by similarity: `same` and `different` count those of one class and of two in bins of the distance.

    Without a gallery both orders of a pair count. `queries` says how many queries were counted, each against the whole
    gallery; all of them in a set of up to `COUNTED` pairs.
    """

    same: NDArray[np.int64]
    different: NDArray[np.int64]
    queries: int


class Scan(NamedTuple):
    """What one scan finds; all rows are in the original order of the queries.

    ranks: (V, N) negatives ahead of each query's best positive: 0 is a hit at K = 1; -1 where there is no positive.
    average_precision, r_precision: (N,) from 0 to 1, or None. best_same: (N,) the highest similarity with the own
    class, rival_score that with another one, -inf where there is none, and `rival` that image's index.
    """

    ranks: Tensor
    average_precision: Tensor | None
    r_precision: Tensor | None
    best_same: Tensor
    rival: Tensor
    rival_score: Tensor
    pairs: Pairs | None


@torch.no_grad()
def scan(
    queries: Side,
    gallery: Side | None,
    weights: Tensor,
    *,
    main: int = 0,
    ranking: bool = False,
    count_pairs: bool = False,
    progress: Progress | None = None,
) -> Scan:
    """Compare every query with every gallery image; without a gallery the queries with one another, none with itself.

    `weights` (V, M) are not negative: score v of a pair is sum_m weights[v, m] <a_m, b_m>. Everything but the ranks is
    measured with the score `main`: MAP@R and R-Precision with `ranking`, the pairs by similarity with `count_pairs`.
    """
    work = _Work(queries, gallery, weights, main, ranking, count_pairs)
    count, blocks = len(queries.classes), work.blocks()
    found = _Block(
        torch.full((len(weights), count), -1, dtype=torch.int64),
        torch.zeros(count, dtype=torch.float64),
        torch.zeros(count, dtype=torch.float64),
        torch.full((count,), -torch.inf, dtype=torch.float64),
        torch.full((count,), -1, dtype=torch.int64),
        torch.full((count,), -torch.inf, dtype=torch.float64),
        None,
    )
    histograms, counted = torch.zeros(2, OCTAVES * STEPS if count_pairs else 0, dtype=torch.int64), 0
    for done, (rows, block) in enumerate(_in_threads(work, blocks), start=1):
        for whole, part in zip(found[:-1], block[:-1], strict=True):
            assert whole is not None
            whole[..., rows] = part
        if block.histograms is not None:
            counted += rows.stop - rows.start
            for histogram, (first, counts) in zip(histograms, block.histograms, strict=True):
                histogram[first : first + len(counts)] += counts
        if progress is not None:
            progress(done, len(blocks))
    order = queries.order if gallery is None else gallery.order
    found = found._replace(rival=torch.where(found.rival < 0, -1, order[found.rival]))
    ordered = [torch.empty_like(whole).index_copy_(-1, queries.order, whole) for whole in found[:-1]]
    ranks, average, precision, best_same, rival, rival_score = ordered
    pairs = Pairs(histograms[0].numpy(), histograms[1].numpy(), counted) if count_pairs else None
    if not ranking:
        return Scan(ranks, None, None, best_same, rival, rival_score, pairs)
    return Scan(ranks, average, precision, best_same, rival, rival_score, pairs)


def bin_edges(bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """The largest distance in each bin; a pair belongs to the first bin whose edge its distance does not exceed."""
    octave, step = np.divmod(bins, STEPS)
    edges: NDArray[np.float64] = np.ldexp(1 + step / STEPS, octave - OCTAVES + 2)
    return edges


def _bins(similarity: Tensor) -> Tensor:
    """The bin of each similarity. The bits of a float grow with its value, so that they number the bins."""
    shift = 23 - (STEPS.bit_length() - 1)  # float32 has 23 bits behind the point
    distance = (1 - similarity).clamp_(2.0 ** (2 - OCTAVES), 3.9).float()
    bits = distance.view(torch.int32).add_((1 << shift) - 1).bitwise_right_shift_(shift)
    return bits.sub_((127 + 2 - OCTAVES) * STEPS)


class _Block(NamedTuple):
    """The rows of one block of queries, as in `Scan`, but in the order of classes; histograms start at a bin."""

    ranks: Tensor
    average_precision: Tensor
    r_precision: Tensor
    best_same: Tensor
    rival: Tensor
    rival_score: Tensor
    histograms: list[tuple[int, Tensor]] | None


Task = tuple[slice, bool]


def _in_threads(compare: Callable[[Task], _Block], tasks: Sequence[Task]) -> Iterator[tuple[slice, _Block]]:
    """Compare each block in one thread. Threads that share a product would synchronise a dozen times per tile."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        some = 8 * threads  # a bound on queued blocks, so that an interruption takes effect soon
        for start in range(0, len(tasks), some):
            chunk = tasks[start : start + some]
            yield from zip((rows for rows, _ in chunk), pool.map(compare, chunk), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # threads that start later must not inherit the workers' setting


class _Positives(NamedTuple):
    """A block's float64 scores with the columns [start, stop) that hold its classes, and which are of the own class."""

    scores: Tensor  # (V, n, columns), -inf where the classes differ and for the query itself
    start: int
    stop: int
    same: Tensor  # (n, columns): of one class, the query itself included
    relevant: Tensor  # (n,)


class _Work:
    """Compares blocks of queries; called from several threads."""

    def __init__(
        self,
        queries: Side,
        gallery: Side | None,
        weights: Tensor,
        main: int,
        ranking: bool,
        count_pairs: bool,
    ) -> None:
        self.queries, self.gallery, self.alone = queries, queries if gallery is None else gallery, gallery is None
        self.terms = [[(m, float(w)) for m, w in enumerate(row) if w > 0] for row in weights]
        self.main, self.ranking, self.count_pairs = main, ranking, count_pairs
        self.own = threading.local()
        ends = torch.searchsorted(self.gallery.classes, queries.classes, right=True)
        self.ends = torch.stack([torch.searchsorted(self.gallery.classes, queries.classes), ends])
        # Scores that differ by less are ties: 1e-6 of what float32 could tell apart.
        longest = [part.norm(dim=1).double() for part in queries.parts]
        largest = [float(part.norm(dim=1).max()) for part in self.gallery.parts]
        roots = [part.shape[1] ** 0.5 + len(queries.parts) + 1 for part in queries.parts]
        terms = [a * b * root for a, b, root in zip(longest, largest, roots, strict=True)]
        self.float_error = 2 * ROUNDING * torch.stack(terms)  # (M, N): ten times the usual error of a float32 product
        self.ties = 1e-6 * (weights @ self.float_error)

    def blocks(self) -> list[Task]:
        """Rows of queries, and whether they are multiplied in float64."""
        count, width = len(self.queries.classes), len(self.gallery.classes)
        small = max(1, BLOCK // width)
        dense = count * width <= (COUNTED if self.count_pairs else DENSE)
        if dense:
            return [(slice(top, min(top + small, count)), True) for top in range(0, count, small)]
        rows = [slice(top, min(top + ROWS, count)) for top in range(0, count, ROWS)]
        chosen: set[int] = set()
        if self.count_pairs:
            most = max(1, COUNTED // (ROWS * width))
            chosen = set(np.random.default_rng(0).permutation(len(rows))[:most].tolist())
        tasks: list[Task] = []
        for number, some in enumerate(rows):
            if number in chosen:
                tops = range(some.start, some.stop, small)
                tasks += [(slice(top, min(top + small, some.stop)), True) for top in tops]
            else:
                tasks.append((some, False))
        return tasks

    def __call__(self, task: Task) -> _Block:
        rows, dense = task
        return self._dense(rows) if dense else self._filtered(rows)

    @cached_property
    def lengths(self) -> list[Tensor]:
        """Of the vectors that the main score compares: queries, gallery; 1 for zero vectors."""
        sides = []
        for side in (self.queries, self.gallery):
            squares = sum(w * side.parts[m].double().square().sum(1) for m, w in self.terms[self.main])
            length = torch.as_tensor(squares).sqrt()
            sides.append(torch.where(length > 0, length, 1.0))
        return sides

    def exact(self, rows: slice, columns: slice) -> list[Tensor]:
        """Each learner's float64 products."""
        return [
            a[rows].double() @ b[columns].double().T
            for a, b in zip(self.queries.parts, self.gallery.parts, strict=True)
        ]

    def exact_at(self, v: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Float64 scores of single pairs."""
        result = torch.zeros(len(rows), dtype=torch.float64)
        step = 1 << 14
        for top in range(0, len(rows), step):
            i, j = rows[top : top + step], columns[top : top + step]
            for m, w in self.terms[v]:
                a, b = self.queries.parts[m][i].double(), self.gallery.parts[m][j].double()
                result[top : top + step] += w * torch.linalg.vecdot(a, b)
        return result

    def mixed(self, v: int, products: list[Tensor], out: Tensor | None = None) -> Tensor:
        (first, weight), *rest = self.terms[v]
        total = torch.mul(products[first], weight, out=out)
        for m, w in rest:
            total.add_(products[m], alpha=w)
        return total

    def hide_itself(self, scores: Tensor, rows: slice, start: int) -> None:
        """No query meets itself."""
        if self.alone:
            place = torch.arange(rows.start, rows.stop)
            inside = ((place >= start) & (place < start + scores.shape[-1])).nonzero().flatten()
            scores[..., inside, place[inside] - start] = -torch.inf

    def positives(self, rows: slice, products: list[Tensor] | None = None) -> _Positives:
        start, stop = int(self.ends[0, rows].min()), int(self.ends[1, rows].max())
        columns = slice(start, max(start, stop))
        near = self.exact(rows, columns) if products is None else [product[:, columns] for product in products]
        scores = torch.stack([self.mixed(v, near) for v in range(len(self.terms))])
        same = self.queries.classes[rows][:, None] == self.gallery.classes[columns]
        scores.masked_fill_(~same, -torch.inf)
        self.hide_itself(scores, rows, start)
        relevant = (scores[0] > -torch.inf).sum(1)
        return _Positives(scores, start, columns.stop, same, relevant)

    def _dense(self, rows: slice) -> _Block:
        products = self.exact(rows, slice(None))
        near = self.positives(rows, products)
        columns, best = slice(near.start, near.stop), _highest(near.scores)
        ranks = torch.empty(best.shape, dtype=torch.int64)
        total = torch.empty_like(products[0])
        main = torch.empty_like(total)
        for v in range(len(self.terms)):
            out = self.mixed(v, products, main if v == self.main else total)
            out[:, columns].masked_fill_(near.same, -torch.inf)
            self.hide_itself(out, rows, 0)
            ranks[v] = (out >= (best[v] - self.ties[v, rows])[:, None]).sum(1)
        ranks[best == -torch.inf] = -1
        rival_score, rival = main.max(1)
        average = precision = torch.zeros(len(main), dtype=torch.float64)
        if self.ranking:
            most = int(near.relevant.max()) if len(near.relevant) else 0
            negatives = main.topk(min(most, main.shape[1]), dim=1).values
            average, precision = _precisions(
                near.scores[self.main], negatives, near.relevant, self.ties[self.main, rows]
            )
        histograms = self._histograms(rows, near, main) if self.count_pairs else None
        return _Block(ranks, average, precision, *self._nearest(rows, near, rival, rival_score), histograms)

    def _nearest(
        self, rows: slice, near: _Positives, rival: Tensor, rival_score: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best similarity with the own class, the rival and the similarity with it."""
        ours, theirs = self.lengths
        best = _highest(near.scores[self.main] / theirs[near.start : near.stop]) / ours[rows]
        rival = torch.where(rival_score > -torch.inf, rival, -1)
        return best, rival, rival_score.double() / ours[rows] / theirs[rival]

    def _histograms(self, rows: slice, near: _Positives, negatives: Tensor) -> list[tuple[int, Tensor]]:
        ours, theirs = self.lengths
        columns = slice(near.start, near.stop)
        positives = near.scores[self.main] / ours[rows, None] / theirs[columns]
        negatives.div_(ours[rows, None]).div_(theirs)
        result = []
        for similarity in (positives, negatives):
            bins = _bins(similarity[similarity > -torch.inf])
            first = int(bins.min()) if len(bins) else 0
            result.append((first, torch.bincount(bins - first)))
        return result

    def _filtered(self, rows: slice) -> _Block:
        near, fast, error = self.positives(rows), self.fast, self.fast.error[:, rows]
        best = _highest(near.scores)
        decides = torch.where(best > -torch.inf, best, torch.inf)
        low, high = (decides - error).float(), (decides + error).float()
        low, high = torch.nextafter(low, low.new_tensor(-torch.inf)), torch.nextafter(high, high.new_tensor(torch.inf))
        count = rows.stop - rows.start
        ranks = torch.zeros(best.shape, dtype=torch.int64)
        rival_score, rival = torch.full((count,), -torch.inf), torch.zeros(count, dtype=torch.int64)
        cut = self._cut(rows, near, error[self.main]) if self.ranking else None
        candidates: list[Tensor] = []
        ours = fast.rows(rows)
        buffers = self._buffers()
        for left in range(0, len(self.gallery.classes), TILE):
            columns = slice(left, min(left + TILE, len(self.gallery.classes)))
            products = fast.products(ours, columns)
            hidden = slice(max(near.start, left), max(near.start, min(near.stop, columns.stop)))
            for v in range(len(self.terms)):
                total = self.mixed(v, products, buffers[: count * products[0].shape[1]].view(products[0].shape))
                if hidden.stop > hidden.start:  # a query is of its own class, so that this hides it as well
                    part = total[:, hidden.start - left : hidden.stop - left]
                    part.masked_fill_(near.same[:, hidden.start - near.start : hidden.stop - near.start], -torch.inf)
                top = total.amax(1)
                if v == self.main:
                    better = (top > rival_score).nonzero().flatten()
                    if len(better):
                        rival_score[better] = top[better]
                        rival[better] = left + total[better].argmax(1)
                    if cut is not None:
                        candidates.append(_reaching(total, top, cut, left))
                self._count(v, rows, columns, total, top, low[v], high[v], decides[v], ranks[v])
        ranks[best == -torch.inf] = -1
        average = precision = torch.zeros(count, dtype=torch.float64)
        if cut is not None:
            negatives = self._gathered(rows, torch.cat(candidates, dim=1))
            average, precision = _precisions(
                near.scores[self.main], negatives, near.relevant, self.ties[self.main, rows]
            )
        return _Block(ranks, average, precision, *self._nearest(rows, near, rival, rival_score), None)

    def _buffers(self) -> Tensor:
        if not hasattr(self.own, "total"):
            self.own.total = torch.empty(ROWS * TILE)
        total: Tensor = self.own.total
        return total

    def _count(
        self,
        v: int,
        rows: slice,
        columns: slice,
        scores: Tensor,
        top: Tensor,
        low: Tensor,
        high: Tensor,
        decides: Tensor,
        ranks: Tensor,
    ) -> None:
        """Add what is ahead of each query's best positive in this tile."""
        some = (top >= low).nonzero().flatten()
        if not len(some):
            return
        scores = scores if len(some) == len(scores) else scores[some]
        # Comparing into floats is several times faster than into booleans; sums of up to 2^24 ones are exact.
        possible = torch.ge(scores, low[some, None], out=torch.empty_like(scores)).sum(1)
        certain = torch.gt(scores, high[some, None], out=torch.empty_like(scores)).sum(1)
        ranks[some] += certain.long()
        unsure = (possible > certain).nonzero().flatten()
        if not len(unsure):
            return
        bar = (decides - self.ties[v, rows])[some[unsure]]
        between = (scores[unsure] >= low[some[unsure], None]) & (scores[unsure] <= high[some[unsure], None])
        row, column = between.nonzero(as_tuple=True)
        i = some[unsure][row] + rows.start
        if len(row) * 8 < between.numel():
            exact = self.exact_at(v, i, column + columns.start)
        else:  # embeddings that are nearly alike: most scores are too close for the fast product
            which = some[unsure] + rows.start
            products = [
                a[which].double() @ b[columns].double().T
                for a, b in zip(self.queries.parts, self.gallery.parts, strict=True)
            ]
            exact = self.mixed(v, products)[row, column]
        ahead = exact >= bar[row]
        ranks.index_add_(0, some[unsure], torch.bincount(row[ahead], minlength=len(unsure)))

    def _cut(self, rows: slice, near: _Positives, error: Tensor) -> Tensor:
        """Per query a score that the first R images reach for certain: what lies below need not be looked at.

        R images reach it among the positives and some gallery images drawn at random. Positives behind place R do not
        count either, so the lowest positive is a bound as well.
        """
        generator = torch.Generator().manual_seed(0)
        width = len(self.gallery.classes)
        drawn = torch.randperm(width, generator=generator)[:SAMPLE].sort().values
        scores = self.mixed(self.main, self.fast.products(self.fast.rows(rows), drawn)).double() - error[:, None]
        scores.masked_fill_(self.queries.classes[rows][:, None] == self.gallery.classes[drawn], -torch.inf)
        positives = near.scores[self.main]
        most = int(near.relevant.max()) if positives.shape[1] else 0
        if most == 0:
            return torch.full((len(scores),), torch.inf)
        ordered = torch.cat([positives, scores], dim=1).topk(most, dim=1).values
        place = (near.relevant - 1).clamp_min(0)[:, None]
        lowest = positives.masked_fill(positives == -torch.inf, torch.inf).amin(1)
        cut = torch.maximum(ordered.gather(1, place)[:, 0], lowest) - error
        cut = torch.where(near.relevant > 0, cut, torch.inf).float()
        return torch.nextafter(cut, cut.new_tensor(-torch.inf))

    def _gathered(self, rows: slice, candidates: Tensor) -> Tensor:
        """The exact scores of candidates (2, n), a row per query, filled up with -inf."""
        row, column = candidates
        count = rows.stop - rows.start
        if len(row) * 16 > count * len(self.gallery.classes):
            exact = torch.empty(len(row), dtype=torch.float64)
            step = max(1, BLOCK // len(self.gallery.classes))
            for top in range(0, count, step):
                inside = ((row >= top) & (row < top + step)).nonzero().flatten()
                some = slice(rows.start + top, min(rows.start + top + step, rows.stop))
                scores = self.mixed(self.main, self.exact(some, slice(None)))
                exact[inside] = scores[row[inside] - top, column[inside]]
        else:
            exact = self.exact_at(self.main, row + rows.start, column)
        order = torch.argsort(row, stable=True)
        row, exact = row[order], exact[order]
        counts = torch.bincount(row, minlength=count)
        place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        result = torch.full((count, max(1, int(counts.max()))), -torch.inf, dtype=torch.float64)
        result[row, place] = exact
        return result.sort(dim=1, descending=True).values

    @cached_property
    def fast(self) -> "_Bytes | _Floats":
        weights = torch.zeros(len(self.terms), len(self.queries.parts), dtype=torch.float64)
        for v, terms in enumerate(self.terms):
            for m, w in terms:
                weights[v, m] = w
        kind = _Bytes if has_byte_products() and max(p.shape[1] for p in self.queries.parts) <= 2**16 else _Floats
        return kind(self.queries, self.gallery, weights, self.float_error)


def _highest(scores: Tensor) -> Tensor:
    """Of each row; -inf for rows without columns."""
    return scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)


def _reaching(scores: Tensor, top: Tensor, cut: Tensor, left: int) -> Tensor:
    """(row, column) of the scores that reach the cut."""
    some = (top >= cut).nonzero().flatten()
    row, column = (scores[some] >= cut[some, None]).nonzero(as_tuple=True)
    return torch.stack([some[row], column + left])


def _precisions(positives: Tensor, negatives: Tensor, relevant: Tensor, ties: Tensor) -> tuple[Tensor, Tensor]:
    """Average precision at R and R-Precision, (n,). The i-th positive has rank i + the negatives that reach it.

    `negatives` (n, k) are in falling order; those behind the first R may be absent.
    """
    most = int(relevant.max()) if positives.shape[1] else 0
    if most == 0:
        zeros = torch.zeros(len(relevant), dtype=torch.float64)
        return zeros, zeros
    ordered = positives.topk(most, dim=1).values
    ahead = torch.searchsorted(-negatives.contiguous(), ties[:, None] - ordered, right=True)
    place = torch.arange(1, most + 1)
    rank = place + ahead
    share = ((place <= relevant[:, None]) & (rank <= relevant[:, None])).double() / relevant.clamp_min(1)[:, None]
    return (share * place / rank).sum(1), share.sum(1)


def has_byte_products() -> bool:
    """Whether the processor multiplies 8-bit integers in vectors of 512 bits (AVX-512 VNNI)."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_vnni_supported()


class _Floats:
    """Products in float32. `error` (V, N): how far a score of each query may be off."""

    def __init__(self, queries: Side, gallery: Side, weights: Tensor, float_error: Tensor) -> None:
        self.queries, self.gallery = queries, gallery
        self.error = weights @ float_error

    def rows(self, rows: slice) -> list[Tensor]:
        return [part[rows] for part in self.queries.parts]

    def products(self, rows: list[Tensor], columns: slice | Tensor) -> list[Tensor]:
        return [a @ b[columns].T for a, b in zip(rows, self.gallery.parts, strict=True)]


class _Bytes:
    """Products of vectors that are cut into two bytes per number: a = s (first + second / 256) + rest.

    Of the four products that of two second bytes is left out. What it and the rests can amount to is bounded by the
    lengths of these vectors (Cauchy-Schwarz); that bound, and the rounding of float32, is the `error` (V, N).
    """

    def __init__(self, queries: Side, gallery: Side, weights: Tensor, float_error: Tensor) -> None:
        self.ours: list[Tensor] = []
        self.theirs: list[tuple[Tensor, Tensor]] = []
        self.scales: list[float] = []
        errors = []
        for a, b in zip(queries.parts, gallery.parts, strict=True):
            largest = max(float(part.abs().max()) for part in (a, b))
            scale = (largest or 1.0) / 127
            first_a, second_a, *ours = _two_bytes(a, scale)
            first_b, second_b, *theirs = (first_a, second_a, *ours) if b is a else _two_bytes(b, scale)
            self.ours.append(torch.cat([first_a, second_a], dim=1))
            self.theirs.append((first_b, torch.cat([second_b, first_b], dim=1)))
            self.scales.append(scale)
            (length, small, rest), (lengths, smalls, rests) = ours, [float(value.max()) for value in theirs]
            errors.append(small * smalls + rest * (lengths + rests) + length * rests)
        self.error = weights @ (torch.stack(errors) * 1.001 + float_error)

    def rows(self, rows: slice) -> list[Tensor]:
        return [ours[rows] for ours in self.ours]

    def products(self, rows: list[Tensor], columns: slice | Tensor) -> list[Tensor]:
        result = []
        for both, (first, swapped), scale in zip(rows, self.theirs, self.scales, strict=True):
            size = first.shape[1]
            product = torch._int_mm(both[:, :size], first[columns].T).float()
            cross = torch._int_mm(both, swapped[columns].T).float()
            result.append(product.add_(cross, alpha=1 / 256).mul_(scale * scale))
        return result


def _two_bytes(vectors: Tensor, scale: float) -> tuple[Tensor, ...]:
    """First and second bytes, and the lengths of the vectors, of the second bytes' share and of the rest."""
    scaled = vectors.double() / scale
    first = scaled.round()
    second = ((scaled - first) * 256).round().clamp_(-127, 127)
    rest = (scaled - first - second / 256).norm(dim=1) * scale
    small = second.norm(dim=1) * (scale / 256)
    return first.to(torch.int8), second.to(torch.int8), vectors.double().norm(dim=1), small, rest
