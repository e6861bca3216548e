"""What may be wrong with a data set, found before any training: copies, leaks, wrong labels, outliers, bad files.

Copies (re-saved, resized, brightened, mirrored or cropped by up to a fifth of a side) are looked for among the nearest
neighbours by the features of a network, and decided on small grey thumbnails laid on each other: by features, a copy of
half the size may be less similar than another photograph of the same thing. The similarity of an image to a class is
the mean similarity to its nearest images of that class; a label is suspect where another class is much nearer than the
own one, compared with what is usual in this data set. Memory grows with the number of images, never with its square.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bier import files
from bier.data import Dataset
from bier.data.records import ALL, Part
from bier.data.sheet import SheetRow, draw_rows
from bier.errors import DataError
from bier.evaluate.recall import nearest
from bier.files import printable
from bier.folders import own_folder
from bier.images import default_workers, open_image
from bier.images.dataset import run_in_threads
from bier.images.decode import box_of
from bier.models.embed import inputs_for
from bier.models.model import Model

SIDE = 32  # pixels of a thumbnail
COPY = 0.95  # likeness from which two pictures are taken for copies; docs/audit.md says what it was chosen on
# Two comparisons, the second only of pairs that reached a likeness in the first: (this likeness, cells per side whose
# means are compared, shares of a side that may be cut off at its ends, pairs at once).
_ROUNDS = (
    (-1.0, 8, (0.0, 0.05, 0.1, 0.15, 0.2), 512),
    (0.88, 16, (0.0, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2), 16),
)
AUDIT = "audit"  # the kind of the folder that is written
TINY_SIDE = 32  # pixels of the longer side; smaller images are reported
CLOSE = 3  # images of a class whose mean similarity says how near the class is
LEAK, ACROSS, INSIDE = "leak", "duplicate-across-classes", "duplicate-in-class"
WRONG, FAR, TINY, UNREADABLE = "wrong-label", "far-from-class", "tiny", "unreadable"
FINDINGS = {
    LEAK: "the same picture in two parts of the split",
    ACROSS: "the same picture in two classes of one part",
    INSIDE: "the same picture twice in a class",
    WRONG: "much nearer to another class than to its own",
    FAR: "far from its class, and not near another",
    TINY: f"longer side below {TINY_SIDE} pixels",
    UNREADABLE: "cannot be read",
}
_LEGENDS = {
    WRONG: f"the image, the nearest {CLOSE} of its class, the nearest {CLOSE} of the other",
    FAR: f"the image, the nearest {CLOSE} of its class",
}

NEIGHBOURS = 50  # of each image, among which classes are compared
CANDIDATES = 10  # of these, the nearest ones are compared as possible copies
WRONG_DEVIATIONS, FAR_DEVIATIONS = 2.5, 5.0  # robust standard deviations from the usual that make a finding
_FEW = 5  # the median of a class with fewer images means little; that of the whole set is taken
_ROWS = 1024  # whose neighbours are looked up at once
ON_A_SHEET = 40  # findings, the worst
COLUMNS = ("finding", "path", "class", "part", "other_path", "other_class", "other_part", "score", "detail")

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Finding:
    """An image to look at, by its row, and the image that it is compared with, if any.

    score: the likeness of copies (1: the same content); by how much another class is nearer; deviations from the class.
    shown: the rows of a picture that lets a person judge.
    """

    name: str
    row: int
    other: int | None = None
    score: float | None = None
    detail: str = ""
    shown: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Inspection:
    """What the files themselves say. Rows of images that cannot be read have a `reason` and no meaning elsewhere.

    digests: of content and box, equal for equal pictures. longest: the longer side in pixels, exact where it is small.
    thumbnails: uint8 (N, SIDE, SIDE).
    """

    digests: tuple[str, ...]
    longest: Rows
    thumbnails: NDArray[np.uint8]
    reasons: tuple[str, ...]

    @property
    def readable(self) -> Rows:
        return np.array([row for row, reason in enumerate(self.reasons) if not reason], np.int64)


@dataclass(frozen=True, eq=False)
class Audit:
    """The findings about the images of a data set, which are the rows of `part`; `split` names the part of each."""

    part: Part
    split: Sequence[str]
    findings: Sequence[Finding]

    def of(self, name: str) -> list[Finding]:
        """The findings of this name, the worst first."""
        return [one for one in self.findings if one.name == name]

    def described(self, one: Finding, root: Path | None = None) -> dict[str, Any]:
        """A finding under the names of `COLUMNS`; paths start from `root` where they lie below it."""
        row: dict[str, Any] = {"finding": one.name, **self._image(one.row, root)}
        if one.other is not None:
            row |= {f"other_{key}": value for key, value in self._image(one.other, root).items()}
        else:
            row |= dict.fromkeys(("other_path", "other_class", "other_part"))
        return row | {"score": None if one.score is None else round(one.score, 4), "detail": one.detail}

    def _image(self, row: int, root: Path | None) -> dict[str, str]:
        image = self.part.images[row]
        path = f"image {row}"
        if isinstance(image, Path):
            path = printable(image.relative_to(root) if root is not None and image.is_relative_to(root) else image)
        return {"path": path, "class": printable(self.part.classes[self.part.labels[row]]), "part": self.split[row]}

    def write(self, folder: Path, root: Path | None = None) -> list[Path]:
        """`findings.csv` and a sheet of pictures for each finding that can be shown; their paths."""
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, COLUMNS)
        table.writeheader()
        table.writerows(self.described(one, root) for one in self.findings)
        with own_folder(folder, AUDIT) as aside:
            written = [aside / "findings.csv"]
            written[0].write_bytes(text.getvalue().encode())
            for name in FINDINGS:
                shown = [one for one in self.of(name) if one.shown]
                if shown:
                    written.append(aside / f"{name}.png")
                    self._sheet(name, shown).save(written[-1])
        return [folder / file.name for file in written]

    def _sheet(self, name: str, findings: Sequence[Finding]) -> Any:
        some = findings[:ON_A_SHEET]
        title = f"{FINDINGS[name]}: {len(findings):,}"
        if len(some) < len(findings):
            title += f", the worst {len(some)}"
        if name in _LEGENDS:
            title += f" ({_LEGENDS[name]})"
        rows = []
        for one in some:
            rows_of_pair = [one.row] if one.other is None else [one.row, one.other]
            classes = list(dict.fromkeys(self.part.classes[self.part.labels[row]] for row in rows_of_pair))
            score = "" if one.score is None else f"{one.score:.3f}"
            rows.append(SheetRow(" / ".join(classes), " ".join(filter(None, (one.detail, score))), one.shown))
        return draw_rows(self.part, title, rows, max(4, *(len(row.images) for row in rows)))


def audit_dataset(
    model: Model,
    dataset: Dataset,
    cache: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Look for faults in the images of all parts of a data set, with a model that was not trained on them."""
    part = dataset[ALL]
    split = [name for name, one in dataset.parts.items() for _ in range(len(one))]
    inspection = inspect_images(part, workers, progress)
    kept = part.select(inspection.readable)
    if not len(kept):
        raise DataError(f"At least one of the {len(part):,} images must be readable. Found none.")
    images = inputs_for(kept, model.backbone, cache=cache, workers=workers)
    encoding = progress and partial(progress, "encoding images")
    vectors = model.encode(images, workers=workers, progress=encoding)
    return Audit(part, split, audit(vectors, part, split, inspection, progress))


def inspect_images(part: Part, workers: int | None = None, progress: Progress | None = None) -> Inspection:
    """Read every image of a part once."""
    if part.width is not None:
        raise DataError("An audit needs images. These are vectors that were computed before.")
    count = len(part)
    digests, reasons = [""] * count, [""] * count
    longest, thumbnails = np.zeros(count, np.int64), np.zeros((count, SIDE, SIDE), np.uint8)

    def read(row: int) -> None:
        image, box = part.images[row], box_of(part.boxes, row)
        try:
            opened = open_image(image, at_least=2 * SIDE, box=box)  # which refuses what is no file, as a pipe
            data = files.read_url(image) if isinstance(image, str) else image
            content = files.checksum(data if isinstance(data, Path | bytes) else data.tobytes())
        except (DataError, OSError) as error:
            reasons[row] = str(error)
            return
        digests[row] = f"{content} {box or ''}"
        longest[row], thumbnails[row] = max(opened.size), thumbnail(opened)

    chosen = default_workers() if workers is None else workers
    for done, _ in enumerate(run_in_threads(read, range(count), chosen), start=1):
        if progress is not None:
            progress("reading images", done, count)
    return Inspection(tuple(digests), longest, thumbnails, tuple(reasons))


def audit(
    vectors: Floats,
    part: Part,
    split: Sequence[str],
    inspection: Inspection,
    progress: Progress | None = None,
) -> list[Finding]:
    """Everything found, in the order of `FINDINGS`, the worst of each first.

    Args:
        vectors: (R, d) of length 1, of the readable images in their order, from a network that has not seen them.
        part: all N images.
        split: the name of the part of the split that each of the N images belongs to.
        inspection: of the N images.
        progress: called with (step, done, total).
    """
    readable = inspection.readable
    if len(vectors) != len(readable):
        raise DataError(f"An audit needs a vector for each of {len(readable)} readable images. Got {len(vectors)}.")
    found = [Finding(UNREADABLE, row, detail=reason) for row, reason in enumerate(inspection.reasons) if reason]
    small = readable[inspection.longest[readable] < TINY_SIDE]
    found += [
        Finding(TINY, int(row), score=float(size), detail=f"{size} pixels", shown=(int(row),))
        for row, size in zip(small, inspection.longest[small], strict=True)
    ]
    copies, kept = _same_content(inspection, readable, part.labels, split)
    if len(kept) > 1:
        compared = _Compared(vectors[np.searchsorted(readable, kept)], kept, part.labels[kept], progress)
        copies += _near_copies(compared, inspection, part.labels, split, progress)
        in_two_classes = {row for one in copies if one.name != INSIDE for row in (one.row, one.other)}
        found += _misplaced(compared, in_two_classes)
    found += copies
    order = list(FINDINGS)
    return sorted(found, key=lambda one: (order.index(one.name), _goodness(one), one.row))


def _goodness(one: Finding) -> float:
    return 0.0 if one.score is None else one.score if one.name == TINY else -one.score


def _pair(first: int, second: int, score: float, detail: str, labels: Rows, split: Sequence[str]) -> Finding:
    """A pair of copies, under the gravest of the three names."""
    name = LEAK if split[first] != split[second] else ACROSS if labels[first] != labels[second] else INSIDE
    return Finding(name, first, second, score, detail, (first, second))


def _same_content(
    inspection: Inspection, readable: Rows, labels: Rows, split: Sequence[str]
) -> tuple[list[Finding], Rows]:
    """Images with the same content, each paired with the first of them; and the rows without copies in their class.

    A copy in the same class must not confirm a label.
    """
    first: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    found, kept = [], []
    for row in readable.tolist():
        digest = inspection.digests[row]
        if digest in first:
            found.append(_pair(first[digest], row, 1.0, "same content", labels, split))
        if (digest, int(labels[row])) not in seen:
            kept.append(row)
        first.setdefault(digest, row)
        seen.add((digest, int(labels[row])))
    return found, np.array(kept, np.int64)


class _Compared:
    """Images with their neighbours: `rows` are theirs in the whole set, `near` and `scores` (n, k), nearest first."""

    def __init__(self, vectors: Floats, rows: Rows, labels: Rows, progress: Progress | None) -> None:
        self.vectors, self.rows, self.labels = vectors, rows, labels
        blocks = []
        for some in _blocks(len(rows)):
            blocks.append(nearest(vectors, some, NEIGHBOURS))
            if progress is not None:
                progress("comparing images", int(some[-1]) + 1, len(rows))
        self.near = np.concatenate([block.indices for block in blocks])
        self.scores = np.concatenate([block.scores for block in blocks])


def _blocks(count: int) -> Iterator[Rows]:
    return (np.arange(start, min(start + _ROWS, count)) for start in range(0, count, _ROWS))


def _near_copies(
    compared: _Compared, inspection: Inspection, labels: Rows, split: Sequence[str], progress: Progress | None
) -> list[Finding]:
    """Pairs of neighbours that are copies by their thumbnails, though their content differs."""
    near = compared.rows[compared.near[:, :CANDIDATES]]
    pairs = np.stack([np.repeat(compared.rows, near.shape[1]), near.ravel()], axis=1)
    pairs = np.unique(np.sort(pairs, axis=1), axis=0)
    found = []
    for start in range(0, len(pairs), _ROWS):
        some = pairs[start : start + _ROWS]
        alike, mirrored = likeness(inspection.thumbnails[some[:, 0]], inspection.thumbnails[some[:, 1]])
        for which in np.flatnonzero(alike >= COPY):
            one, other = some[which].tolist()
            if inspection.digests[one] != inspection.digests[other]:
                detail = "mirrored" if mirrored[which] else "near"
                score = min(float(alike[which]), 1.0)
                found.append(_pair(one, other, score, detail, labels, split))
        if progress is not None:
            progress("comparing pairs", start + len(some), len(pairs))
    return found


def _misplaced(compared: _Compared, in_two_classes: set[int | None]) -> list[Finding]:
    """Images much nearer to another class than others are, and images far from their class that are near no other.

    An image with a copy in another class is left out: it is a finding already, and says nothing more here.
    """
    own, own_near = _own_class(compared)
    rival, rival_near = _other_class(compared)
    known = np.isfinite(own)
    if not known.any():
        return []
    margin = np.where(known & np.isfinite(rival), rival - own, -np.inf)
    bar = max(0.0, _usual(margin, WRONG_DEVIATIONS))
    far = _class_medians(own, compared.labels) - own
    spread = _deviation(far[known])
    found = []
    for at in np.flatnonzero(known).tolist():
        row, mine = int(compared.rows[at]), compared.rows[own_near[at][own_near[at] >= 0]].tolist()
        if row in in_two_classes:
            continue
        if margin[at] > bar:
            theirs = compared.rows[rival_near[at][rival_near[at] >= 0]].tolist()
            found.append(Finding(WRONG, row, theirs[0], float(margin[at]), "", (row, *mine, *theirs)))
        elif spread > 0 and far[at] > FAR_DEVIATIONS * spread:
            found.append(Finding(FAR, row, mine[0], float(far[at] / spread), "", (row, *mine)))
    return found


def _deviation(values: NDArray[np.floating]) -> float:
    """The standard deviation of values that are normal but for some outliers."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _usual(values: NDArray[np.floating], deviations: float) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) + deviations * _deviation(finite) if len(finite) else 0.0


def _class_medians(own: Floats, labels: Rows) -> Floats:
    medians = np.full(len(own), np.median(own[np.isfinite(own)]), np.float32)
    for label in np.unique(labels):
        members = np.flatnonzero((labels == label) & np.isfinite(own))
        if len(members) >= _FEW:
            medians[members] = np.median(own[members])
    return medians


def _own_class(compared: _Compared) -> tuple[Floats, Rows]:
    """The mean similarity to the nearest images of the own class, -inf in a class of one; and these images, or -1."""
    count = len(compared.rows)
    own, near = np.full(count, -np.inf, np.float32), np.full((count, CLOSE), -1, np.int64)
    order = np.argsort(compared.labels, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(compared.labels[order])) + 1):
        if len(members) > 1:
            found = nearest(compared.vectors[members], np.arange(len(members)), CLOSE)
            own[members] = found.scores.mean(1)
            near[members, : found.indices.shape[1]] = members[found.indices]
    return own, near


def _other_class(compared: _Compared) -> tuple[Floats, Rows]:
    """As `_own_class` for the nearest other class; -inf where no other class is among the neighbours often enough."""
    count = len(compared.rows)
    best, near = np.full(count, -np.inf, np.float32), np.full((count, CLOSE), -1, np.int64)
    sizes = np.bincount(compared.labels)
    for rows in _blocks(count):
        labels, scores = compared.labels[compared.near[rows]], compared.scores[rows]
        needed = np.minimum(CLOSE, sizes[labels])  # a class of two has no third image
        # same[i, j, l]: neighbour l is of the class of neighbour j, and not farther
        same = np.tril(labels[:, :, None] == labels[:, None, :])
        complete = (same.sum(2) == needed) & (labels != compared.labels[rows][:, None])
        means = np.where(complete, np.einsum("ijl,il->ij", same, scores) / needed, -np.inf)
        chosen = means.argmax(1)
        best[rows] = means[np.arange(len(rows)), chosen]
        for row, at in zip(rows, chosen, strict=True):
            if np.isfinite(best[row]):
                members = np.flatnonzero(same[row - rows[0], at])
                near[row, : len(members)] = compared.near[row][members]
    return best, near


# Copies


def thumbnail(image: Image.Image) -> NDArray[np.uint8]:
    """Grey, uint8 (SIDE, SIDE), stretched to a square."""
    return np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def likeness(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """(correlation in -1..1, whether the mirrored picture fits better) of thumbnails (P, SIDE, SIDE) pair by pair.

    Each picture is compared with the windows that cutting up to a fifth off the other one would leave, coarsely first,
    and precisely where they are alike.
    """
    pairs = torch.from_numpy(np.stack([first, second]))
    best, mirrored = torch.zeros(len(first)), torch.zeros(len(first), dtype=torch.bool)
    for floor, cells, cuts, at_once in _ROUNDS:
        for some in torch.nonzero(best >= floor).flatten().split(at_once):
            best[some], mirrored[some] = _compare(pairs[:, some].float(), _shrinking(cells, cuts))
    return best.numpy(), mirrored.numpy()


def _compare(pairs: Tensor, shrink: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (_windows(side, shrink) for side in pairs)  # the first window is the whole picture
    plain, turned = (
        torch.stack([_best(first, _flip(second, flip)[:, 0]), _best(second, _flip(first, flip)[:, 0])]).amax(0)
        for flip in (False, True)
    )
    return torch.maximum(plain, turned), turned > plain + 0.01  # symmetric pictures count as not mirrored


def _best(windows: Tensor, whole: Tensor) -> Tensor:
    scores: Tensor = (_normalised(windows) @ _normalised(whole)[:, :, None]).amax((1, 2))
    return scores


def _flip(windows: Tensor, flip: bool) -> Tensor:
    return windows.flip(-1) if flip else windows


def _windows(thumbnails: Tensor, shrink: Tensor) -> Tensor:
    """(B, SIDE, SIDE) -> (B, windows, cells, cells)."""
    return torch.einsum("kip,bpq,ljq->bklij", shrink, thumbnails, shrink).flatten(1, 2)


def _normalised(windows: Tensor) -> Tensor:
    rows = windows.flatten(-2)
    rows = rows - rows.mean(-1, keepdim=True)
    length: Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / length.clamp_min(1.0)  # a picture of one colour correlates with nothing


@cache
def _shrinking(cells: int, cuts: tuple[float, ...]) -> Tensor:
    """(windows, cells, SIDE): the means over the cells of each window of one side, by the shares cut off its ends."""
    matrices = []
    for start in cuts:
        for end in cuts:
            if start + end <= max(cuts) + 1e-9:
                edges = torch.linspace(start * SIDE, (1 - end) * SIDE, cells + 1)[:, None]
                covered = (torch.arange(SIDE + 1) - edges).clamp(min=0).diff(dim=1)  # of each pixel, right of the edge
                covered = covered.diff(dim=0).neg()
                matrices.append(covered / covered.sum(1, keepdim=True))
    return torch.stack(matrices)
