"""The equations of the method that are pure functions. Eq. (n) is the number in docs/method.md.

Letters: B images in a batch, P pairs, h size of the last hidden layer, d embedding size, M learners, d_m size of
learner m, f_m = phi W_m its raw embedding, s a cosine similarity.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bier.errors import ConfigError
from bier.method.checks import check_count
from bier.method.defaults import REDUCTION, WEIGHTING, Reduction, Weighting

# (embedding size, number of groups) -> the sizes in Appendix C of the paper, where they sum to the embedding size.
PAPER_GROUPS: dict[tuple[int, int], tuple[int, ...]] = {
    (384, 3): (64, 128, 192),
    (512, 2): (170, 342),
    (512, 3): (96, 160, 256),
    (512, 5): (34, 68, 102, 138, 170),
    (1024, 3): (170, 342, 512),
    (1024, 4): (102, 204, 308, 410),
    (1024, 5): (68, 136, 204, 274, 342),
    (1024, 6): (50, 96, 148, 196, 242, 292),
    (1024, 7): (36, 74, 110, 148, 182, 218, 256),
}


def unit_rows(f: Tensor) -> Tensor:
    """Scale each row to length 1, so that a product of rows is the cosine of Eq. (1), Section 3: (B, d) -> (B, d).

    A zero row stays zero and gets a zero gradient, never NaN: its similarity with any vector is 0. A row whose length
    is beyond the largest number is first divided by its largest entry.
    """
    with torch.no_grad():
        endless = torch.linalg.vector_norm(f, dim=1, keepdim=True) > torch.finfo(f.dtype).max
        scale = torch.where(endless, f.abs().amax(dim=1, keepdim=True), torch.ones_like(f[:, :1]))
    f = f / scale
    length = torch.linalg.vector_norm(f, dim=1, keepdim=True)
    tiny = torch.finfo(f.dtype).tiny ** 0.25  # its fourth power, which the gradient needs, is still a normal number
    return f * torch.where(length > tiny, length.clamp_min(tiny).reciprocal(), torch.zeros_like(length))


def boosting_rates(learners: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Eq. (5), Section 3.1. eta_m = 2/(m+1) and alpha_m = eta_m prod_{n>m} (1-eta_n), for m = 1..M.

    Args:
        learners: M, the number of learners.

    Returns:
        (eta, alpha), two tuples of length M: the rates of boosting, and the weights of the learners, which sum to 1.

    Raises:
        ConfigError: `learners` is not a whole number of at least 1.

    Example:
        >>> import bier
        >>> eta, alpha = bier.boosting_rates(2)
        >>> [round(value, 3) for value in alpha]
        [0.333, 0.667]
    """
    check_count("learners", learners)
    eta = tuple(2 / (m + 1) for m in range(1, learners + 1))
    alpha = tuple(eta[m] * math.prod(1 - e for e in eta[m + 1 :]) for m in range(learners))
    return eta, alpha


def ensemble_score(scores: Tensor) -> Tensor:
    """Eq. (5), Section 3.1. F = sum_m alpha_m s_m: (M, ...) -> (...)."""
    _, alpha = boosting_rates(len(scores))
    return torch.einsum("m,m...->...", scores.new_tensor(alpha), scores)


def running_score(before: Tensor, score: Tensor, rate: float) -> Tensor:
    """Eq. (6), Section 3.1. s^m = (1 - eta_m) s^{m-1} + eta_m s_m with rate = eta_m: (...), (...) -> (...)."""
    return torch.lerp(before, score, rate)


def shrinkage_weight(activation: Tensor, same: Tensor) -> Tensor:
    """Eq. (7b). w^{m+1} = sigmoid(-a^m), doubled for negative pairs: (...) -> (...), without gradient."""
    weight = torch.sigmoid(-activation.detach())
    return torch.where(same, weight, 2 * weight)


def group_sizes(dimensions: int, groups: int) -> tuple[int, ...]:
    """Eq. (9), Section 3.1 and Appendix C. Sizes of the learners, which always sum to `dimensions`.

    The paper's list where it has one, else proportional to alpha and at least 1 each: what rounding down leaves goes
    to the groups with the largest remainders, later ones first. The paper's list for 512 dimensions in 4 groups,
    52-102-152-204, sums to 510 and is not used.

    Args:
        dimensions: d, the size of the embedding.
        groups: M, the number of learners.

    Returns:
        The size of each learner, smallest first.

    Raises:
        ConfigError: a number is not whole or below 1, or there are more groups than dimensions.

    Example:
        >>> import bier
        >>> bier.group_sizes(512, 3)
        (96, 160, 256)
    """
    check_count("groups", groups)
    _, alpha = boosting_rates(groups)
    check_count("dimensions", dimensions)
    if groups > dimensions:
        raise ConfigError(
            f"An embedding of {dimensions} dimensions cannot be cut into {groups} groups; "
            "every group needs at least 1 dimension."
        )
    if (dimensions, groups) in PAPER_GROUPS:
        return PAPER_GROUPS[dimensions, groups]
    shares = [dimensions * a for a in alpha]
    sizes = [math.floor(share + 1e-9) for share in shares]
    by_remainder = sorted(range(groups), key=lambda m: (shares[m] - sizes[m], m), reverse=True)
    for m in by_remainder[: dimensions - sum(sizes)]:
        sizes[m] += 1
    while 0 in sizes:  # many groups in few dimensions: the largest gives one away
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return tuple(sizes)


def ensemble_vector(parts: Sequence[Tensor], weighting: Weighting = WEIGHTING) -> Tensor:
    """Eq. (10), Section 3.1. Each f_m scaled to length 1, weighted, concatenated: M times (B, d_m) -> (B, d).

    `sqrt` weights by sqrt(alpha_m), so that the dot product of two vectors is exactly F of Eq. (5). `alpha` weights by
    alpha_m, as the paper does, and gives sum alpha_m^2 s_m.
    """
    _, alpha = boosting_rates(len(parts))
    factors = alpha if weighting == "alpha" else tuple(map(math.sqrt, alpha))
    return torch.cat([factor * unit_rows(f) for factor, f in zip(factors, parts, strict=True)], dim=1)


def suppression_loss(f_i: Tensor, f_j: Tensor, reduction: Reduction = REDUCTION) -> Tensor:
    """Eq. (11), Section 3.2.1. sum_{k,l} (f_i[k] f_j[l])^2: (B, d_i), (B, d_j) -> (B,). `mean` divides by d_i d_j.

    The sum factorises into |f_i|^2 |f_j|^2, which needs O(B d) memory.
    """
    loss = f_i.square().sum(dim=1) * f_j.square().sum(dim=1)
    return loss if reduction == "sum" else loss / (f_i.shape[1] * f_j.shape[1])


def weight_term(rows: Tensor, reduction: Reduction = REDUCTION) -> Tensor:
    """Eq. (12), Section 3.2.1. sum_i (w_i·w_i - 1)^2 over rows: (d, h) -> scalar. `mean` divides by d."""
    deviation = (rows.square().sum(dim=1) - 1).square()
    return deviation.sum() if reduction == "sum" else deviation.mean()


def sum_over_pairs(parts: Sequence[Tensor], term: Callable[[int, int], Tensor]) -> Tensor:
    """The mean over images in Eq. (13) and (16): of sum_{i<j} term(i, j), each (B,) -> scalar; 0 for one learner."""
    pairs = [(i, j) for i in range(len(parts)) for j in range(i + 1, len(parts))]
    if not pairs:
        return parts[0].sum() * 0
    return torch.stack([term(i, j) for i, j in pairs]).sum(dim=0).mean()


def adversarial_similarity(f_i: Tensor, guess: Tensor, d_j: int, reduction: Reduction = REDUCTION) -> Tensor:
    """Eq. (14), Section 3.2.2. (1/d_j) sum (f_i ⊙ g(f_j))^2 with guess = g(f_j): (B, d_i), (B, d_i) -> (B,).

    `mean` divides by d_i instead.
    """
    product = (f_i * guess).square()
    return product.sum(dim=1) / d_j if reduction == "sum" else product.mean(dim=1)


def adversarial_weight_term(
    layers: Sequence[tuple[Tensor, Tensor]], weight: Tensor, reduction: Reduction = REDUCTION
) -> Tensor:
    """Eq. (15), Section 3.2.2. max(0, b·b - 1) + (12) of each regressor layer (rows, b), + (12) of W: -> scalar."""
    term = weight_term(weight, reduction)
    for rows, bias in layers:
        term = term + F.relu(bias.square().sum() - 1) + weight_term(rows, reduction)
    return term


def own_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """The softmax at the label of each image: (B, classes), (B,) -> (B,)."""
    return logits.softmax(dim=1).gather(1, labels[:, None]).squeeze(1)


def row_norm_deviation(weight: Tensor) -> Tensor:
    """Eq. (19), Section 3.2.1. max_i |w_i·w_i - 1|: (d, h) -> scalar, which the paper keeps below 1e-3."""
    return (weight.detach().square().sum(dim=1) - 1).abs().max()
