"""The method, line by line: one pure function for each numbered line of its specification, in order.

Letters: B images in a batch, P pairs or triplets, h size of the last hidden layer, d embedding size,
M learners, d_m size of learner m, f_m = phi W_m its raw embedding, s a cosine similarity, y "same label".
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from bier.errors import ConfigError

Reduction: TypeAlias = Literal["sum", "mean"]
Weighting: TypeAlias = Literal["alpha", "sqrt"]
Boosting: TypeAlias = Literal["eta", "shrinkage"]

# Embedding size and number of groups -> the sizes that the paper lists.
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
    """(B, d) -> (B, d), each row of length 1. A zero row stays zero and gets a zero gradient, never NaN."""
    length = torch.linalg.vector_norm(f, dim=1, keepdim=True)
    tiny = torch.finfo(f.dtype).tiny ** 0.25  # its fourth power, which the gradient needs, is still a normal number
    return f * torch.where(length > tiny, length.clamp_min(tiny).reciprocal(), torch.zeros_like(length))


def cosine_similarity(f: Tensor, g: Tensor) -> Tensor:
    """Line 1. s = f·g / (|f| |g|) of every row with every row: (N, d), (K, d) -> (N, K), in [-1, 1].

    The similarity with a zero vector is 0.
    """
    return unit_rows(f) @ unit_rows(g).T


def binomial_deviance(s: Tensor, same: Tensor, beta1: float = 2.0, beta2: float = 0.5, cost: float = 25.0) -> Tensor:
    """Line 2. log(1 + exp(-(2y-1) b1 (s-b2) C_y)) with C_1 = 1, C_0 = `cost`: (P,), bool (P,) -> (P,)."""
    return F.softplus(_deviance_exponent(s, same, beta1, beta2, cost))


def binomial_deviance_weight(
    s: Tensor, same: Tensor, beta1: float = 2.0, beta2: float = 0.5, cost: float = 25.0
) -> Tensor:
    """|derivative| of line 2 without its constant b1 C_y, so that it lies in (0, 1): (P,) -> (P,)."""
    return torch.sigmoid(_deviance_exponent(s, same, beta1, beta2, cost))


def binomial_deviance_evidence(
    s: Tensor, same: Tensor, beta1: float = 2.0, beta2: float = 0.5, cost: float = 25.0
) -> Tensor:
    """The argument of line 2, (2y-1) b1 (s-b2) C_y: (P,) -> (P,)."""
    return -_deviance_exponent(s, same, beta1, beta2, cost)


def _deviance_exponent(s: Tensor, same: Tensor, beta1: float, beta2: float, cost: float) -> Tensor:
    # In place, and b1 C_y without torch.where, because this is the hot spot of training: a pass over memory less each.
    factor = same.to(s.dtype).mul_(-beta1 * (cost + 1)).add_(beta1 * cost)  # -b1 for a positive pair, else b1 C_0
    return (s - beta2).mul_(factor)


def contrastive(s: Tensor, same: Tensor, margin: float = 0.5) -> Tensor:
    """Line 3. (1-y) max(0, s-m) + y (s-1)^2: (P,), bool (P,) -> (P,)."""
    return torch.where(same, (s - 1).square(), F.relu(s - margin))


def contrastive_weight(s: Tensor, same: Tensor, margin: float = 0.5) -> Tensor:
    """|derivative| of line 3: 2 |s-1| for a positive pair, 1 or 0 for a negative one."""
    return torch.where(same, 2 * (s - 1).abs(), (s > margin).to(s.dtype))


def triplet(positive: Tensor, negative: Tensor, margin: float = 0.01) -> Tensor:
    """Line 4. max(0, s- - s+ + m): (P,), (P,) -> (P,)."""
    return F.relu(negative - positive + margin)


def triplet_weight(positive: Tensor, negative: Tensor, margin: float = 0.01) -> Tensor:
    """|derivative| of line 4 with respect to either score: 1 where the margin is violated, else 0."""
    return (negative - positive + margin > 0).to(positive.dtype)


def boosting_rates(learners: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Line 5. eta_m = 2/(m+1) and alpha_m = eta_m prod_{n>m} (1-eta_n), for m = 1..M. The alphas sum to 1."""
    if not isinstance(learners, int) or isinstance(learners, bool) or learners < 1:
        raise ConfigError(f"The number of learners must be a whole number of at least 1. Got {learners!r} instead.")
    eta = tuple(2 / (m + 1) for m in range(1, learners + 1))
    alpha = tuple(eta[m] * math.prod(1 - e for e in eta[m + 1 :]) for m in range(learners))
    return eta, alpha


def ensemble_score(scores: Tensor) -> Tensor:
    """Line 5. F = sum_m alpha_m s_m: (M, ...) -> (...)."""
    _, alpha = boosting_rates(len(scores))
    return torch.einsum("m,m...->...", scores.new_tensor(alpha), scores)


def running_score(previous: Tensor, score: Tensor, rate: float) -> Tensor:
    """Line 6. s^m = (1-eta_m) s^{m-1} + eta_m s_m, from s^0 = 0, so that s^M = F: (...), (...) -> (...)."""
    return torch.lerp(previous, score, rate)


def boosting_weight(derivative: Tensor) -> Tensor:
    """Line 7. w^1 = 1; w^{m+1} = |loss'(s^m)|: (...) -> (...), cut off from the gradient."""
    return derivative.detach().abs()


def shrinkage_activation(previous: Tensor, evidence: Tensor, shrinkage: float = 0.06) -> Tensor:
    """Line 7, the authors' gentler form. a^m = a^{m-1} + nu evidence, from a^0 = 0.5: (...), (...) -> (...).

    `evidence` is the argument of binomial deviance: b1 (s_m - b2) if positive, -C times that if negative.
    """
    return previous + shrinkage * evidence


def shrinkage_weight(activation: Tensor, same: Tensor) -> Tensor:
    """Line 7, the authors' gentler form. w^{m+1} = sigmoid(-a^m), doubled for negative pairs: (...) -> (...)."""
    weight = torch.sigmoid(-activation.detach())
    return torch.where(same, weight, 2 * weight)


def triplet_boosting_weight(by_positive: Tensor, by_negative: Tensor) -> Tensor:
    """Line 8. w^{m+1} = |loss'(s^{m+}, s^{m-})|: (...), (...) -> (...), cut off from the gradient.

    s+ and s- run separately. For a loss of their difference both derivatives have the same size; else their mean.
    """
    return (by_positive.detach().abs() + by_negative.detach().abs()) / 2


def group_sizes(dimensions: int, groups: int) -> tuple[int, ...]:
    """Line 9. The paper's list where it has one, else proportional to alpha; at least 1 each, summing exactly.

    What rounding down leaves over goes to the groups with the largest remainders, later ones first. The paper's list
    for 512 dimensions in 4 groups, 52-102-152-204, is two short of 512 and not used here.
    """
    _, alpha = boosting_rates(groups)
    if not isinstance(dimensions, int) or isinstance(dimensions, bool):
        raise ConfigError(f"The number of dimensions must be a whole number. Got {dimensions!r} instead.")
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


def ensemble_vector(parts: Sequence[Tensor], weighting: Weighting = "alpha") -> Tensor:
    """Line 10. Each f_m to length 1, times alpha_m (or its root), side by side: M times (B, d_m) -> (B, d).

    With `sqrt` the dot product of two vectors is exactly F of line 5; with `alpha` it is sum alpha_m^2 s_m.
    """
    _, alpha = boosting_rates(len(parts))
    factors = alpha if weighting == "alpha" else tuple(map(math.sqrt, alpha))
    return torch.cat([factor * unit_rows(f) for factor, f in zip(factors, parts, strict=True)], dim=1)


def suppression_loss(f_i: Tensor, f_j: Tensor, reduction: Reduction = "sum") -> Tensor:
    """Line 11. sum_{k,l} (f_i[k] f_j[l])^2 = |f_i|^2 |f_j|^2: (B, d_i), (B, d_j) -> (B,), in O(B d) memory.

    `mean` divides by d_i d_j.
    """
    loss = f_i.square().sum(dim=1) * f_j.square().sum(dim=1)
    return loss if reduction == "sum" else loss / (f_i.shape[1] * f_j.shape[1])


def weight_term(rows: Tensor, reduction: Reduction = "sum") -> Tensor:
    """Line 12. sum_i (w_i·w_i - 1)^2 over rows: (d, h) -> scalar. `mean` divides by d."""
    deviation = (rows.square().sum(dim=1) - 1).square()
    return deviation.sum() if reduction == "sum" else deviation.mean()


def sum_over_pairs(parts: Sequence[Tensor], term: Callable[[int, int], Tensor]) -> Tensor:
    """Lines 13 and 16. Mean over samples of sum_{i<j} term(i, j), each (B,) -> scalar; 0 for one learner."""
    pairs = [(i, j) for i in range(len(parts)) for j in range(i + 1, len(parts))]
    if not pairs:
        return parts[0].sum() * 0
    return torch.stack([term(i, j) for i, j in pairs]).sum(dim=0).mean()


def activation_loss(similarity: Tensor, weight: Tensor, lambda_w: float) -> Tensor:
    """Line 13. similarity + lambda_w weight, from (11) summed over pairs i<j and from (12): scalars."""
    return similarity + lambda_w * weight


def adversarial_similarity(f_i: Tensor, guess: Tensor, d_j: int, reduction: Reduction = "sum") -> Tensor:
    """Line 14. (1/d_j) sum (f_i ⊙ g(f_j))^2, guess = g(f_j): (B, d_i), (B, d_i) -> (B,). `mean`: over d_i."""
    product = (f_i * guess).square()
    return product.sum(dim=1) / d_j if reduction == "sum" else product.mean(dim=1)


def adversarial_weight_term(
    layers: Sequence[tuple[Tensor, Tensor]], weight: Tensor, reduction: Reduction = "sum"
) -> Tensor:
    """Line 15. max(0, b·b - 1) + (12) of each regressor layer (rows, b), + (12) of W: -> scalar."""
    term = weight_term(weight, reduction)
    for rows, bias in layers:
        term = term + F.relu(bias.square().sum() - 1) + weight_term(rows, reduction)
    return term


def adversarial_loss(similarity: Tensor, weight: Tensor, lambda_w: float) -> Tensor:
    """Line 16. -similarity + lambda_w weight, from (14) summed over pairs i<j and from (15): scalars."""
    return lambda_w * weight - similarity


def momentum_step(w: Tensor, velocity: Tensor, gradient: Tensor, rate: float, momentum: float) -> tuple[Tensor, Tensor]:
    """Line 17. One step of SGD with momentum, the solver of the initialisation: -> (w, velocity)."""
    velocity = momentum * velocity - rate * gradient
    return w + velocity, velocity


def training_loss(metric: Tensor, diversity: Tensor, lambda_div: float) -> Tensor:
    """Line 18. L = L_metric + lambda_div L_div: scalars."""
    return metric + lambda_div * diversity


def row_norm_deviation(weight: Tensor) -> Tensor:
    """Line 19. max_i |w_i·w_i - 1|: (d, h) -> scalar, to be held below 1e-3."""
    return (weight.detach().square().sum(dim=1) - 1).abs().max()
