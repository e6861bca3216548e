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
