"""`same`: which images belong together, given as a matrix in place of labels."""

from typing import Any

import pytest
import torch
from torch import Tensor

import bier
from bier.errors import BierError
from bier.method import boosting

GROUPS = (3, 4, 5)
LOSSES: list[Any] = [bier.BinomialDeviance(), bier.Contrastive(), bier.Triplet(margin=0.4), bier.MultiSimilarity()]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(9, sum(GROUPS), generator=generator, dtype=torch.float64)
    return z.requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 3])


@pytest.mark.parametrize("band", [128, 4])
@pytest.mark.parametrize("kind", [torch.bool, torch.int8, torch.int64])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_as_the_labels_say(loss: Any, kind: torch.dtype, band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boosting, "BAND", band)
    z, labels = batch()
    boosted = bier.BoostedLoss(GROUPS, loss)
    for one, other in zip(
        boosted.parts(z, labels), boosted.parts(z, same=(labels[:, None] == labels).to(kind)), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_images_of_ignored_pairs_are_as_if_absent(loss: Any) -> None:
    """Where all pairs of an image are ignored, the others have the loss that they have without it."""
    z, labels = batch()
    same = (labels[:, None] == labels).long()
    same[4, :] = same[:, 4] = -1
    rest = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    boosted = bier.BoostedLoss(GROUPS, loss)
    with_it, without = boosted(z, same=same), boosted(z[rest], labels[rest])
    scale = len(rest) / len(z) if isinstance(loss, bier.MultiSimilarity) else 1  # its mean is over all rows
    assert with_it.item() == pytest.approx(without.item() * scale, rel=1e-9)
    (gradient,) = torch.autograd.grad(with_it, z)
    assert not gradient[4].any()
    assert gradient[rest].any()


def test_images_with_several_labels() -> None:
    """What labels cannot say: image 1 belongs to image 0 and to image 2, which do not belong together."""
    z = torch.eye(3, dtype=torch.float64)
    same = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    at_zero = [
        bier.BinomialDeviance()(torch.zeros(1, dtype=torch.float64), torch.tensor([y])).item() for y in (True, False)
    ]
    assert bier.BoostedLoss((3,))(z, same=same).item() == pytest.approx(sum(at_zero))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Expected either labels or same. Got neither"),
        ({"labels": torch.zeros(9, dtype=torch.long), "same": torch.ones(9, 9) > 0}, "Got both"),
        ({"same": torch.ones(9, 9)}, r"bool or integer tensor of shape \(9, 9\). Got torch.float32 of shape \(9, 9\)"),
        ({"same": torch.ones(8, 9) > 0}, r"Got torch.bool of shape \(8, 9\)"),
        ({"same": [[True]]}, "Got list"),
        ({"same": (torch.ones(9, 9) > 0).to("meta")}, "must be on cpu, as the embeddings are. Got meta"),
        ({"same": (torch.ones(9, 9) > 0).triu()}, "'same' must be symmetric"),
        ({"same": torch.full((9, 9), 2)}, "must hold 1, 0 and -1. Got values from 2 to 2"),
    ],
)
def test_wrong_use_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BierError, match=message) as caught:
        bier.BoostedLoss(GROUPS)(batch()[0], **given)
    assert "\n" not in str(caught.value)


def test_not_over_several_processes() -> None:
    with pytest.raises(BierError, match="'same' parameter goes with a loss of ours and without 'gather_distributed'"):
        bier.BoostedLoss(GROUPS, gather_distributed=True)(batch()[0], same=torch.ones(9, 9) > 0)
