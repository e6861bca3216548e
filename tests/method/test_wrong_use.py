"""What users of the losses get wrong in Python is one line of ours, never an error from inside torch."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bier
from bier.errors import BierError

GROUPS = (4, 8)
LABELS = torch.tensor([0, 0, 1, 1])
WRONG: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, bier.EmbeddingEnsemble], object], str]] = {
    "a class": (lambda z, f, e: bier.BoostedLoss(GROUPS, bier.Triplet), "Got the class Triplet, without the parenth"),  # type: ignore[arg-type]
    "text": (lambda z, f, e: bier.BoostedLoss(GROUPS, "triplet"), "loss on similarities.*Got 'triplet'"),  # type: ignore[arg-type]
    "cross-entropy": (lambda z, f, e: bier.BoostedLoss(GROUPS, nn.CrossEntropyLoss()), "Got torch.nn.CrossEntropyLoss"),
    "torch's triplets": (lambda z, f, e: bier.BoostedLoss(GROUPS, nn.TripletMarginLoss()), "torch.nn.TripletMarginLo"),
    "sparse z": (lambda z, f, e: bier.BoostedLoss(GROUPS)(z.to_sparse(), LABELS), r"float32 \(torch.sparse_coo\)"),
    "sparse labels": (lambda z, f, e: bier.BoostedLoss(GROUPS)(z, LABELS.to_sparse()), "one integer label"),
    "complex z": (lambda z, f, e: bier.BoostedLoss(GROUPS)(z + 0j, LABELS), "Got torch.complex64"),
    "labels elsewhere": (lambda z, f, e: bier.BoostedLoss(GROUPS)(z, LABELS.to("meta")), "must be on cpu.*Got meta"),
    "slope": (lambda z, f, e: bier.BinomialDeviance("2"), "'beta1' parameter must be a finite number. Got '2'"),  # type: ignore[arg-type]
    "no slope": (lambda z, f, e: bier.BinomialDeviance(None), "Got None"),  # type: ignore[arg-type]
    "width": (lambda z, f, e: bier.EmbeddingEnsemble("16", GROUPS), "'in_features' .* whole number"),  # type: ignore[arg-type]
    "array": (lambda z, f, e: e.vector(z.numpy()), "The embeddings must be a tensor. Got ndarray"),  # type: ignore[arg-type]
    "features": (lambda z, f, e: bier.ActivationLoss(GROUPS)(e, f.numpy()), "features must be a tensor. Got ndarray"),
    "int features": (lambda z, f, e: bier.AdversarialLoss(GROUPS)(e, f.long()), "float features.*Got torch.int64"),
    "order": (lambda z, f, e: bier.ActivationLoss(GROUPS)(f, e), "needs an EmbeddingEnsemble"),
    "lambda": (lambda z, f, e: bier.ActivationLoss(GROUPS, "x"), "'lambda_w' parameter must be a number of at least 0"),  # type: ignore[arg-type]
    "nan lambda": (lambda z, f, e: bier.ActivationLoss(GROUPS, float("nan")), "Got nan"),
    "hidden": (lambda z, f, e: bier.AdversarialLoss(GROUPS, hidden=2.5), "'hidden' .* Got 2.5"),  # type: ignore[arg-type]
    "classes": (lambda z, f, e: bier.BoostedClassifier(GROUPS, "3"), "'classes' .* Got '3'"),  # type: ignore[arg-type]
    "dropout": (lambda z, f, e: bier.BoostedClassifier(GROUPS, 3, dropout=1.0), "at least 0 and below 1. Got 1.0"),
    "list": (lambda z, f, e: bier.BoostedClassifier(GROUPS, 3)(z, [0, 0, 1, 1]), "labels must be a tensor. Got list"),
    "loss class": (lambda z, f, e: bier.initialise(e, f, bier.ActivationLoss), "must be an ActivationLoss or"),  # type: ignore[arg-type]
    "groups": (lambda z, f, e: bier.group_sizes("x", 3), "'dimensions' .* Got 'x'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_line(case: str) -> None:
    call, message = WRONG[case]
    generator = torch.Generator().manual_seed(0)
    z, features = torch.randn(4, 12, generator=generator), torch.randn(4, 16, generator=generator)
    with pytest.raises(BierError, match=message) as caught:
        call(z, features, bier.EmbeddingEnsemble(16, GROUPS))
    assert "\n" not in str(caught.value)
