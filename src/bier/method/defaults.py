"""Default values of the method, the same for its classes and for `bier train` (`bier.config` reads them from here).

This module imports no torch, so that reading a config stays fast.
"""

from typing import Literal, TypeAlias

Boosting: TypeAlias = Literal["eta", "shrinkage", "gradient"]
Reduction: TypeAlias = Literal["sum", "mean"]
Start: TypeAlias = Literal["glorot", "orthogonal"]
Weighting: TypeAlias = Literal["alpha", "sqrt"]

# The metric loss
BETA1 = 2.0
BETA2 = 0.5
COST = 10.0  # the paper's is 25; see (2) in docs/method.md
BOOST = True
BOOSTING: Boosting = "eta"
DROPOUT = 0.0

# The embedding layer
START: Start = "glorot"
BIAS = False
WEIGHTING: Weighting = "sqrt"  # the paper's is alpha

# The diversity losses
LAMBDA_W = float("inf")  # rows of W are held at length 1 exactly
REDUCTION: Reduction = "mean"  # the paper writes sums
HIDDEN = 512
SCALE_FEATURES = True
THROUGH_BACKBONE = False

# Encoding. A convolutional network that was trained at 224 pixels tells more at 320; see docs/training.md.
SIDES = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}


def encoding_look(backbone: str, resolution: int = 0) -> tuple[int, bool]:
    """The side at which pictures are encoded, and whether with their mirror image: EfficientNet-Lite at 10/7 of the
    side of training, a multiple of 32, and with it; (0, False), one look at that of training, for all others.

    resolution: the side of training; 0 for the backbone's own.
    """
    if backbone not in SIDES:
        return 0, False
    side = resolution or SIDES[backbone]
    return max(side, 32 * round(side * 10 / 7 / 32)), True
