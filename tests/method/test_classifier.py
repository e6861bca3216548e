"""The boosted classification ensemble, image by image."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bier.errors import ConfigError, DataError
from bier.method.classifier import BoostedClassifier
from bier.method.defaults import Boosting

GROUPS = (2, 3, 4)


def setting(
    groups: tuple[int, ...] = GROUPS, boost: bool = True, boosting: Boosting = "eta"
) -> tuple[BoostedClassifier, Tensor, Tensor]:
    torch.manual_seed(0)
    classifier = BoostedClassifier(groups, classes=3, boost=boost, boosting=boosting).double()
    z = torch.randn(7, sum(groups), dtype=torch.float64, requires_grad=True)
    return classifier, z, torch.arange(7) % 3


def cross_entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(v) for v in logits)) - logits[label]


@pytest.mark.parametrize("boost", [True, False])
@pytest.mark.parametrize("groups", [(5,), (2, 3), GROUPS])
def test_image_by_image(groups: tuple[int, ...], boost: bool) -> None:
    classifier, z, labels = setting(groups, boost)
    losses, weights = [0.0] * len(groups), [0.0] * len(groups)
    for row, label in zip(z, labels.tolist(), strict=True):
        w, running = 1.0, [0.0] * 3
        for m, (head, f) in enumerate(zip(classifier.heads, row.split(groups), strict=True)):
            logits = [
                sum(a * b for a, b in zip(rows, f.tolist(), strict=True)) + bias
                for rows, bias in zip(head.weight.tolist(), head.bias.tolist(), strict=True)
            ]
            losses[m] += w * cross_entropy(logits, label)
            weights[m] += w
            eta = 2 / (m + 2)
            running = [(1 - eta) * r + eta * v for r, v in zip(running, logits, strict=True)]
            w = 1 - math.exp(-cross_entropy(running, label)) if boost else 1.0
    parts = classifier.parts(z, labels)
    means = [loss / weight for loss, weight in zip(losses, weights, strict=True)]
    assert parts.learners.tolist() == pytest.approx(means, abs=1e-12)
    assert parts.total.item() == pytest.approx(sum(means) / len(groups), abs=1e-12)
    assert parts.positive_weights.tolist() == pytest.approx([weight / len(z) for weight in weights], abs=1e-12)


def test_gradient_at_the_running_prediction() -> None:
    """Learner m is trained with the loss of the first m learners together, in which those before it are constant."""
    classifier, z, labels = setting(boosting="gradient")
    first, second, third = classifier.learner_logits(z)
    scores = (first, first / 3 + 2 / 3 * second, first / 6 + second / 3 + third / 2)
    wanted = [
        sum(cross_entropy(row, label) for row, label in zip(score.tolist(), labels.tolist(), strict=True)) / len(z)
        for score in scores
    ]
    parts = classifier.parts(z, labels)
    assert parts.learners.tolist() == pytest.approx(wanted, abs=1e-12)
    assert parts.positive_weights.tolist() == [1.0, 1.0, 1.0]
    (gradient,) = torch.autograd.grad(parts.learners[2], z, retain_graph=True)
    assert not gradient[:, :5].any()
    (alone,) = torch.autograd.grad(F.cross_entropy(scores[2], labels), z)
    assert torch.allclose(gradient[:, 5:], alone[:, 5:], atol=1e-12)


def test_logits_are_the_running_prediction_of_all_learners() -> None:
    classifier, z, _ = setting()
    first, second, third = classifier.learner_logits(z)
    assert torch.allclose(classifier.logits(z), first / 6 + second / 3 + third / 2, atol=1e-12)


def test_weights_are_the_derivative_of_the_cross_entropy_at_the_running_logits() -> None:
    classifier, z, labels = setting((2, 3))
    running = classifier.learner_logits(z)[0].detach().requires_grad_()
    (derivative,) = torch.autograd.grad(F.cross_entropy(running, labels, reduction="sum"), running)
    weight = -derivative[torch.arange(7), labels]
    assert ((weight > 0) & (weight < 1)).all()
    parts = classifier.parts(z, labels)
    losses = F.cross_entropy(classifier.learner_logits(z)[1], labels, reduction="none")
    assert torch.allclose(parts.learners[1], (weight * losses).sum() / weight.sum(), atol=1e-12)


def test_no_gradient_through_the_weights() -> None:
    classifier, z, labels = setting()
    (together,) = torch.autograd.grad(classifier(z, labels), z)
    (alone,) = torch.autograd.grad(F.cross_entropy(classifier.learner_logits(z)[0], labels) / 3, z)
    assert torch.allclose(together[:, :2], alone[:, :2], atol=1e-12)
    assert not classifier.parts(z, labels).positive_weights.requires_grad


@pytest.mark.parametrize(("groups", "boost"), [((5,), True), (GROUPS, False)])
def test_gradcheck_where_weights_are_constant(groups: tuple[int, ...], boost: bool) -> None:
    classifier, z, labels = setting(groups, boost)
    assert torch.autograd.gradcheck(lambda x: classifier(x, labels), z)


def test_one_group_is_plain_cross_entropy() -> None:
    classifier, z, labels = setting((5,))
    assert torch.allclose(classifier(z, labels), F.cross_entropy(classifier.logits(z), labels), atol=1e-12)


def test_dropout_only_while_training() -> None:
    torch.manual_seed(0)
    classifier, z = BoostedClassifier(GROUPS, 3, dropout=0.5), torch.randn(7, 9)
    assert not torch.equal(classifier.logits(z), classifier.logits(z))
    classifier.eval()
    assert torch.equal(classifier.logits(z), classifier.logits(z))


def test_certain_predictions_have_finite_gradients() -> None:
    classifier, z, labels = setting()
    (gradient,) = torch.autograd.grad(classifier(z * 1e6, labels), z)
    assert torch.isfinite(gradient).all()


def test_nothing_left_to_learn_is_a_loss_of_zero() -> None:
    classifier, z, labels = setting()
    for head in classifier.heads:
        torch.nn.init.zeros_(head.weight)
        head.bias.data = torch.tensor([1e6, 0.0, 0.0], dtype=torch.float64)
    parts = classifier.parts(z, torch.zeros_like(labels))
    assert parts.positive_weights.tolist() == [1, 0, 0]
    assert parts.learners.tolist() == [0, 0, 0]


def test_any_whole_number_is_a_label() -> None:
    classifier, z, labels = setting()
    assert torch.equal(classifier(z, labels.int()), classifier(z, labels))


@pytest.mark.parametrize("labels", [torch.zeros(6).long(), torch.zeros(7), torch.zeros(7, 1).long()])
def test_labels_of_wrong_shape_or_type(labels: Tensor) -> None:
    classifier, z, _ = setting()
    with pytest.raises(DataError, match=r"one integer label for each of the 7 embeddings. Got torch"):
        classifier(z, labels)


def test_other_errors() -> None:
    classifier, z, labels = setting()
    with pytest.raises(DataError, match=r"labels from 0 to 2. Got labels from 0 to 3"):
        classifier(z, (labels == 1) * 3)
    with pytest.raises(DataError, match=r"labels from 0 to 2. Got labels from -1"):
        classifier(z, labels - 1)
    for wrong in (z[:, :8], z[0], z[:0]):
        with pytest.raises(DataError, match=r"shape \(B, 9\). Got"):
            classifier(wrong, labels[: len(wrong)])
    with pytest.raises(DataError, match=r"NaN or infinite"):
        classifier(z.detach() * float("nan"), labels)
    with pytest.raises(ConfigError, match=r"'classes' parameter must be a whole number of at least 2. Got 1"):
        BoostedClassifier(GROUPS, 1)
    with pytest.raises(ConfigError, match=r"'groups' parameter"):
        BoostedClassifier((), 3)
    with pytest.raises(ConfigError, match=r"'dropout' parameter must be a number of at least 0 and below 1. Got 1.5"):
        BoostedClassifier(GROUPS, 3, dropout=1.5)
    with pytest.raises(ConfigError, match=r"'boosting' parameter must be one of eta, gradient. Got 'shrinkage'"):
        BoostedClassifier(GROUPS, 3, boosting="shrinkage")
