"""Whether two pictures are copies: re-saved, resized, brightened, mirrored or cropped by up to a fifth of a side.

Features of a network find candidates but cannot decide: a copy of half the size may be less similar to its original
than another photograph of the same thing. Small grey thumbnails, laid on each other, can.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

SIDE = 32  # pixels of a thumbnail
COPY = 0.95  # likeness from which two pictures are taken for copies; docs/audit.md says what it was chosen on
# Two comparisons, the second only of pairs that reached a likeness in the first: (this likeness, cells per side whose
# means are compared, shares of a side that may be cut off at its ends, pairs at once).
_ROUNDS = (
    (-1.0, 8, (0.0, 0.05, 0.1, 0.15, 0.2), 512),
    (0.88, 16, (0.0, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2), 16),
)


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
