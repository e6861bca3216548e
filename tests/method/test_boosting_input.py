"""Batches that lack something, and input that is wrong: a defined result or one clear line, and never NaN."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bier.errors import ConfigError, DataError
from bier.method.boosting import BoostedLoss
from bier.method.losses import BinomialDeviance, Contrastive, Triplet

GROUPS = (2, 3)
LOSSES = [BinomialDeviance(), Contrastive(), Triplet()]
PairLoss = Callable[[Tensor, Tensor], Tensor]


def some(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_no_positive_pair_leaves_the_negative_ones() -> None:
    z = some()
    parts = BoostedLoss(GROUPS).parts(z, torch.arange(4))
    parts.total.backward()
    assert parts.total > 0
    assert parts.positive_weights.tolist() == [0, 0]
    assert parts.negative_weights[0] == 1
    assert z.grad is not None
    assert z.grad.abs().sum() > 0


def test_no_negative_pair_leaves_the_positive_ones() -> None:
    z = some()
    parts = BoostedLoss(GROUPS).parts(z, torch.zeros(4, dtype=torch.int64))
    parts.total.backward()
    assert parts.total > 0
    assert parts.positive_weights[0] == 1
    assert parts.negative_weights.tolist() == [0, 0]
    assert z.grad is not None
    assert z.grad.abs().sum() > 0


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 0, 0, 0]])
def test_no_triplet_has_loss_and_gradient_0(labels: list[int]) -> None:
    z = some()
    parts = BoostedLoss(GROUPS, Triplet()).parts(z, torch.tensor(labels))
    parts.total.backward()
    assert parts.total == 0
    assert parts.positive_weights.tolist() == [0, 0]
    assert z.grad is not None
    assert not z.grad.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_zero_embedding_has_similarity_0_and_no_nan(loss: PairLoss) -> None:
    z = some().detach()
    z[0] = 0
    z[1, :2] = 0  # the first learner of another image
    z.requires_grad_()
    parts = BoostedLoss(GROUPS, loss).parts(z, torch.tensor([0, 0, 1, 1]))
    parts.total.backward()
    assert torch.isfinite(parts.learners).all()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()
    assert not z.grad[0].any()
    pair = BoostedLoss(GROUPS, Contrastive()).parts(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
    assert pair.learners.tolist() == [1, 2]  # (0 - 1)^2, then with the weight 2 |0 - 1|


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scale", [1e-12, 1e-8, 1e8, 1e15, 1e25])
def test_no_nan_gradient_at_any_scale_nor_between_equal_images(loss: PairLoss, scale: float) -> None:
    z = some().detach()
    z[1] = z[0]
    z[2] = -z[0]
    z = (z * scale).requires_grad_()
    BoostedLoss(GROUPS, loss)(z, torch.tensor([0, 0, 1, 1])).backward()
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(value: float) -> None:
    z = some().detach()
    z[2, 3] = value
    with pytest.raises(DataError, match=r"NaN or infinite"):
        BoostedLoss(GROUPS)(z, torch.tensor([0, 0, 1, 1]))


def test_a_sum_that_overflows_is_no_error() -> None:
    z = torch.full((4, 5), 2e38)
    assert torch.isfinite(BoostedLoss(GROUPS)(z, torch.tensor([0, 0, 1, 1])))


def test_a_batch_of_one_or_none() -> None:
    for count in (0, 1):
        with pytest.raises(DataError, match=rf"at least 2 images to form a pair. Got {count}"):
            BoostedLoss(GROUPS)(torch.zeros(count, 5), torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize(
    "labels", [torch.zeros(3).long(), torch.zeros(4, 1).long(), torch.zeros(4), torch.zeros(()).long()]
)
def test_labels_of_wrong_shape_or_type(labels: Tensor) -> None:
    with pytest.raises(DataError, match=r"one integer label for each of the 4 embeddings. Got torch"):
        BoostedLoss(GROUPS)(some(), labels)


def test_what_is_no_tensor() -> None:
    with pytest.raises(DataError, match=r"labels must be a tensor. Got list"):
        BoostedLoss(GROUPS)(some(), [0, 0, 1, 1])


@pytest.mark.parametrize("z", [torch.zeros(4, 6), torch.zeros(4), torch.zeros(4, 5).long(), torch.zeros(2, 2, 5)])
def test_embeddings_of_wrong_shape_or_type(z: Tensor) -> None:
    with pytest.raises(DataError, match=r"float embeddings of shape \(B, 5\). Got"):
        BoostedLoss(GROUPS)(z, torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_any_whole_number_is_a_label(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 0, 1, 1])
    assert torch.equal(BoostedLoss(GROUPS)(some(), labels), BoostedLoss(GROUPS)(some(), labels.to(dtype)))


def test_a_loss_must_give_a_value_for_each_pair() -> None:
    with pytest.raises(ConfigError, match=r"one value for each similarity, of shape \(4, 4\) here. Got shape \(\)"):
        BoostedLoss(GROUPS, lambda s, same: s.mean())(some(), torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("loss", [Contrastive(), Triplet(), lambda s, same: s])
def test_shrinkage_is_for_binomial_deviance_only(loss: PairLoss) -> None:
    with pytest.raises(ConfigError, match=r"'shrinkage' goes with BinomialDeviance. Got the loss"):
        BoostedLoss(GROUPS, loss, boosting="shrinkage")


def test_a_reweighting_that_does_not_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"'boosting' parameter must be one of eta, shrinkage, gradient. Got 'gentle'"
    ):
        BoostedLoss(GROUPS, boosting="gentle")  # type: ignore[arg-type]


def test_bad_groups() -> None:
    with pytest.raises(ConfigError, match=r"'groups' parameter"):
        BoostedLoss(())


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_is_widened(loss: PairLoss) -> None:
    z, labels = some(8).detach(), torch.arange(8) % 2
    rounded = z.bfloat16()
    expected = BoostedLoss(GROUPS, loss)(rounded.float(), labels)
    assert torch.equal(BoostedLoss(GROUPS, loss)(rounded, labels), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(BoostedLoss(GROUPS, loss)(rounded.float(), labels), expected)


def cubic(similarity: Tensor, same: Tensor) -> Tensor:
    return torch.where(same, (1 - similarity) ** 3, similarity**3)


@pytest.mark.parametrize("loss", [*LOSSES, cubic])
def test_the_value_is_the_same_without_gradients(loss: PairLoss) -> None:
    z, labels = some(8).detach(), torch.arange(8) % 2
    expected = BoostedLoss(GROUPS, loss).parts(z.clone().requires_grad_(), labels)
    with torch.no_grad():
        silent = BoostedLoss(GROUPS, loss).parts(z, labels)
    with torch.inference_mode():
        quiet = BoostedLoss(GROUPS, loss).parts(z.clone(), labels.clone())
    for ours, other, another in zip(expected, silent, quiet, strict=True):
        assert torch.equal(ours, other)
        assert torch.equal(ours, another)


def test_a_loss_that_ignores_the_similarity_weighs_nothing() -> None:
    parts = BoostedLoss(GROUPS, lambda s, same: torch.ones_like(s)).parts(some(), torch.tensor([0, 0, 1, 1]))
    assert parts.positive_weights.tolist() == [1, 0]


def test_a_learnable_loss_with_an_attribute_called_weight() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, similarity: Tensor, same: Tensor) -> Tensor:
            return self.weight * cubic(similarity, same)

    boosted = BoostedLoss(GROUPS, Scaled())
    boosted(some(), torch.tensor([0, 0, 1, 1])).backward()
    (scale,) = boosted.parameters()
    assert scale.grad is not None
    assert scale.grad != 0
