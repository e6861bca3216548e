"""Batch norm with frozen statistics is a scale and a shift: both fit into the convolution before it."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from bier.models.backbone import Backbone


def fold_batch_norm(module: nn.Module) -> int:
    """Replace every convolution and the batch norm behind it by one convolution with a bias, in place; how many it was.

    The result computes what the module computed in eval mode, and can be trained on: there are no statistics left. Only
    neighbours among the children of one module are folded.
    """
    folded = 0
    for parent in list(module.modules()):
        convolution: nn.Conv2d | None = None
        for child_name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                convolution = child
            elif isinstance(child, nn.BatchNorm2d) and convolution is not None and child.running_var is not None:
                _fold_into(convolution, child)
                setattr(parent, child_name, getattr(child, "act", nn.Identity()))  # timm's norms carry an activation
                convolution = None
                folded += 1
            elif not isinstance(child, nn.Identity):
                convolution = None
    return folded


def _fold_into(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.no_grad():
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight,
            convolution.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
    trained = norm.weight.requires_grad if norm.affine else convolution.weight.requires_grad
    convolution.weight.requires_grad_(trained)
    convolution.bias.requires_grad_(trained)


@torch.no_grad()
def folded(backbone: Backbone) -> Backbone:
    """A copy in eval mode with the batch norms folded; a plain copy where folding would change the features.

    A model of timm may call its parts in another order than it lists them. One random picture tells.
    """
    copy = deepcopy(backbone).eval()
    if backbone.folded or not fold_batch_norm(copy):
        return copy
    copy.folded = True
    picture = torch.randint(0, 256, (2, 3, backbone.crop, backbone.crop), generator=torch.Generator().manual_seed(0))
    picture = picture.to(next(backbone.parameters()).device, torch.uint8)
    was_training = backbone.training
    expected = backbone.eval()(picture)
    backbone.train(was_training)
    if torch.allclose(copy(picture), expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())):
        return copy
    return deepcopy(backbone).eval()
