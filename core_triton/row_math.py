"""The math of single rows between the two passes over the logits: O(N) work, the same for every implementation.

The first pass computes `Partial` statistics of each row for each vocabulary chunk. `merge` combines the statistics of
two vocabulary chunks, which may be chunks on one device or shards on several devices. `finish` turns the statistics of
the whole vocabulary into `RowStatistics`. The second pass needs only the `Coefficients` of a row's loss:

    d_logits_ij = p_ij * (alpha_i + beta_i * log p_ij) - tau_i * [j = target_i] - sigma_i * class_weight_j  MATH.md (23)
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linear_ce.spec import LossSpec
from linear_ce.statistics import ARGMAX, ENTROPY, LOGIT_SUM, SQUARES

MAX_EXPONENT = 126  # of a normal float32

NO_PROBABILITY = -1e4  # a log-probability whose exp is 0 in float32, finite so that 0 times it is 0

NO_CLASS = 2**31 - 1  # above all classes

LEAST_SUMMAND = 2.0**-64  # of a target, relative to the reference of its row's sum; below it the ratio may overflow


class Partial(NamedTuple):
    """Statistics of n rows over a vocabulary chunk, (n,) float32, MATH.md (25); None if not computed."""

    max: Tensor
    sum_exp: Tensor  # of exp(logits - max)
    target_logit: Tensor  # 0 where the target lies elsewhere
    weighted_sum: Tensor | None  # of class_weight * logits, for label smoothing
    sum_exp_log: Tensor | None  # of exp(logits - max) * (logits - max), for the entropy
    argmax: Tensor | None = None  # int64, the class of the largest logit, the lowest of equals
    logit_sum: Tensor | None = None
    sum_squared: Tensor | None = None  # of exp(logits - max) ** 2


class RowStatistics(NamedTuple):
    """Statistics of n rows over the whole vocabulary, all (n,) float32; 0 for rows that do not contribute, None if
    not computed."""

    lse: Tensor
    target_logit: Tensor  # NaN where the target is not a class
    nll: Tensor | None  # lse - target_logit, never below 0; NaN where the target is not a class
    max: Tensor | None
    weighted_sum: Tensor | None
    entropy: Tensor | None
    argmax: Tensor | None = None  # int64, -1 where lse is not finite
    mean_logit: Tensor | None = None
    sum_squared_probs: Tensor | None = None


class TokenStats(NamedTuple):
    """Statistics of the distribution of each token that `linear_token_loss_with_stats` returns besides the loss, (...)
    float32 unless noted; None for those that were not requested. None of it has a gradient.

    Rows that do not contribute (ignored, or with token_weight 0) have 0.
    """

    log_prob: Tensor | None  # of the target, what token_loss gets; NaN for a target that is not a class
    entropy: Tensor | None
    lse: Tensor | None  # log-sum-exp of the logits
    argmax: Tensor | None  # int64, the class of the largest logit, the lowest of equals; -1 where lse is not finite
    is_top1: Tensor | None  # bool, whether the target has the largest logit; ties count, as in `LossStats.accuracy`
    mean_logit: Tensor | None
    sum_squared_probs: Tensor | None  # of the squared probabilities of all classes


class Coefficients(NamedTuple):
    """The coefficients of a row's loss in d_logits (23), all (n,) float32; None means zero."""

    alpha: Tensor
    tau: Tensor
    beta: Tensor | None = None
    sigma: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Coefficients":
        return Coefficients(
            alpha=function(self.alpha),
            tau=function(self.tau),
            beta=None if self.beta is None else function(self.beta),
            sigma=None if self.sigma is None else function(self.sigma),
        )


def empty_partial(target: Tensor, spec: LossSpec, statistics: int) -> Partial:
    """Returns the statistics of a vocabulary chunk without classes (a shard of padding), `merge`'s identity element."""
    zero = torch.zeros_like(target, dtype=torch.float32)
    return Partial(
        max=torch.full_like(zero, -torch.inf),
        sum_exp=zero,
        target_logit=zero,
        weighted_sum=zero if spec.label_smoothing else None,
        sum_exp_log=zero if statistics & ENTROPY else None,
        argmax=torch.full_like(target, NO_CLASS) if statistics & ARGMAX else None,
        logit_sum=zero if statistics & LOGIT_SUM else None,
        sum_squared=zero if statistics & SQUARES else None,
    )


def merge(a: Partial, b: Partial) -> Partial:
    """Joins the statistics of two vocabulary chunks: (26)."""
    top = torch.maximum(a.max, b.max)

    def shifted(part: Partial) -> tuple[Tensor, Tensor]:
        masked = part.max == -torch.inf  # all logits of the chunk are -inf: its sums are 0
        shift = torch.where(masked, 0.0, part.max - top)
        return torch.where(masked, 0.0, torch.exp(shift)), shift

    scale_a, shift_a = shifted(a)
    scale_b, shift_b = shifted(b)
    weighted_sum = sum_exp_log = None
    if a.weighted_sum is not None and b.weighted_sum is not None:
        weighted_sum = a.weighted_sum + b.weighted_sum
    if a.sum_exp_log is not None and b.sum_exp_log is not None:
        sum_exp_log = scale_a * (a.sum_exp_log + shift_a * a.sum_exp) + scale_b * (b.sum_exp_log + shift_b * b.sum_exp)
    argmax = logit_sum = sum_squared = None
    if a.argmax is not None and b.argmax is not None:
        argmax = torch.where(a.max > b.max, a.argmax, torch.where(b.max > a.max, b.argmax, a.argmax.minimum(b.argmax)))
    if a.logit_sum is not None and b.logit_sum is not None:
        logit_sum = a.logit_sum + b.logit_sum
    if a.sum_squared is not None and b.sum_squared is not None:
        sum_squared = scale_a.square() * a.sum_squared + scale_b.square() * b.sum_squared
    return Partial(
        max=top,
        sum_exp=scale_a * a.sum_exp + scale_b * b.sum_exp,
        target_logit=a.target_logit + b.target_logit,
        weighted_sum=weighted_sum,
        sum_exp_log=sum_exp_log,
        argmax=argmax,
        logit_sum=logit_sum,
        sum_squared=sum_squared,
    )


def finish(partial: Partial, target: Tensor, row_weight: Tensor, classes: int) -> RowStatistics:
    """Returns the statistics that a loss is computed from, given those of the whole vocabulary: (27)."""
    contributes, is_class = row_weight != 0, _is_class(target, classes)
    log_sum = torch.log(partial.sum_exp)
    # The target's summand is one of those that were added, so the rest is not negative, and a confident token's
    # negative log-likelihood is accurate where the difference of two logits would cancel.
    summand = torch.exp(partial.target_logit - partial.max)
    usable = is_class & (summand > LEAST_SUMMAND)
    rest = torch.where(usable, (partial.sum_exp - summand).clamp(min=0.0) / summand, 0.0)
    target_logit = torch.where(is_class, partial.target_logit, torch.nan)
    lse = partial.max + log_sum
    nll = torch.where(usable, torch.log1p(rest), lse - target_logit)
    lse = torch.where(usable, target_logit + nll, lse)

    def selected(values: Tensor) -> Tensor:
        return torch.where(contributes, values, 0)

    entropy = argmax = mean_logit = sum_squared_probs = None
    if partial.sum_exp_log is not None:
        entropy = selected(log_sum - partial.sum_exp_log / partial.sum_exp)
    if partial.argmax is not None:
        argmax = selected(torch.where(lse.isfinite(), partial.argmax, -1))
    if partial.logit_sum is not None:
        mean_logit = selected(partial.logit_sum / classes)
    if partial.sum_squared is not None:
        sum_squared_probs = selected(partial.sum_squared / partial.sum_exp / partial.sum_exp)
    return RowStatistics(
        lse=selected(lse),
        target_logit=selected(target_logit),
        nll=selected(nll),
        max=selected(partial.max),
        weighted_sum=partial.weighted_sum,
        entropy=entropy,
        argmax=argmax,
        mean_logit=mean_logit,
        sum_squared_probs=sum_squared_probs,
    )


def is_top1(row_weight: Tensor, target_logit: Tensor, top: Tensor) -> Tensor:
    """Returns whether a row contributes and its target has the largest logit, `top`, (N,) bool; ties count: (12)."""
    return (row_weight != 0) & (target_logit >= top)


def row_weights(
    spec: LossSpec,
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    classes: int,
) -> Tensor:
    """Returns what each row's loss is multiplied by, (N,) float32: MATH.md (5), (8), (9).

    The row weights contain ignore_index, token_weight, the reduction and its denominator. Later steps exclude the rows
    whose weight is 0.
    """
    valid = target != spec.ignore_index
    row_weight = valid.float() if token_weight is None else torch.where(valid, token_weight.float(), 0.0)
    if spec.reduction == "mean":
        if normalizer is not None:
            denominator = normalizer.float()
            denominator = torch.where((denominator >= 0) & (denominator < math.inf), denominator, math.nan)
        elif class_weight is not None:
            denominator = torch.where(valid, target_class_weight(target, class_weight, classes), 0.0).sum()
        else:
            # If no token is counted, all weights are 0.
            return row_weight / valid.sum().clamp(min=1)
        counts = (row_weight != 0) & (denominator != 0)
        row_weight = torch.where(counts, row_weight / denominator, 0.0)
    return row_weight


def row_loss(
    spec: LossSpec,
    statistics: RowStatistics,
    target: Tensor,
    row_weight: Tensor,
    class_weight: Tensor | None,
    classes: int,
) -> Tensor:
    """Returns row_weight * loss of each row, (N,) float32, 0 for rows that do not contribute: (6), (7), (10)."""
    assert statistics.nll is not None
    loss = statistics.nll
    if class_weight is not None:
        loss = target_class_weight(target, class_weight, classes) * loss
    if spec.label_smoothing:
        assert statistics.weighted_sum is not None
        total = classes if class_weight is None else class_weight.sum()
        smooth = (total * statistics.lse - statistics.weighted_sum) / classes
        loss = (1.0 - spec.label_smoothing) * loss + spec.label_smoothing * smooth
    if spec.z_loss_weight:
        loss = loss + spec.z_loss_weight * statistics.lse.square()
    return torch.where(row_weight != 0, row_weight * loss, 0.0)


def loss_coefficients(
    spec: LossSpec, lse: Tensor, target: Tensor, upstream: Tensor, class_weight: Tensor | None, classes: int
) -> Coefficients:
    """Returns the coefficients of the loss; `upstream` (N,) is row_weight times the loss's cotangent: (13)."""
    kept = upstream * (1.0 - spec.label_smoothing)
    alpha = tau = kept if class_weight is None else kept * target_class_weight(target, class_weight, classes)
    sigma = None
    if spec.label_smoothing:
        sigma = upstream * (spec.label_smoothing / classes)
        alpha = alpha + sigma * (classes if class_weight is None else class_weight.sum())
    if spec.z_loss_weight:
        alpha = alpha + upstream * (2.0 * spec.z_loss_weight) * lse
    return Coefficients(alpha=_poison(alpha, target, classes), tau=tau, sigma=sigma)


def log_prob_coefficients(
    entropy: Tensor, target: Tensor, d_log_prob: Tensor, d_entropy: Tensor, d_lse: Tensor, classes: int
) -> Coefficients:
    """Returns the coefficients of log_prob, entropy and lse under their cotangents, all (N,): (23)."""
    alpha = d_lse - d_log_prob - d_entropy * entropy
    return Coefficients(alpha=_poison(alpha, target, classes), tau=-d_log_prob, beta=-d_entropy)


def with_entropy(coefficients: Coefficients, d_entropy: Tensor, entropy: Tensor) -> Coefficients:
    """Returns the coefficients of a loss of log-probabilities, with the entropy's cotangent (n,) added: (46)."""
    return coefficients._replace(alpha=coefficients.alpha - d_entropy * entropy, beta=-d_entropy)


def saved_scales(row_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns () powers of two for float16 gradients computed before the upstream gradient exists: of d_input, and of
    d_weight.

    The first power scales the largest row weight (1/N for a mean) to [1, 2), so that d_input neither underflows nor
    overflows for any N. A gradient of the head is a sum of up to N rows, so the second power has half the exponent: the
    gradient is then equally far from both ends of float16's range.
    """
    largest = row_weight.abs().amax() if row_weight.numel() else row_weight.new_zeros(())
    exponent = torch.where(torch.isfinite(largest) & (largest > 0), torch.frexp(largest).exponent - 1, 0).clamp(
        -MAX_EXPONENT, MAX_EXPONENT
    )
    one = torch.ones_like(largest)
    return torch.ldexp(one, -exponent), torch.ldexp(one, -torch.div(exponent, 2, rounding_mode="trunc"))


def split_exponents(coefficients: Coefficients, class_weight: Tensor | None) -> tuple[Coefficients, Tensor]:
    """Splits coefficients into ones of magnitude below 1 and the row's power of two, (n,) int32: (34).

    float16 cannot hold 1/N of a mean times a small probability, nor a loss scale times a probability near 1. It holds
    both if the power of two is removed from d_logits and applied after the matmuls. This adds no rounding. Rows of
    zeros get the smallest exponent.
    """
    magnitudes = [coefficients.alpha.abs(), coefficients.tau.abs()]
    if coefficients.beta is not None:
        magnitudes.append(coefficients.beta.abs())
    if coefficients.sigma is not None:
        magnitudes.append(coefficients.sigma.abs() * (1.0 if class_weight is None else class_weight.abs().max()))
    magnitude = torch.stack(magnitudes).amax(0)
    usable = torch.isfinite(magnitude) & (magnitude > 0)
    exponent = torch.where(usable, torch.frexp(magnitude).exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT), -MAX_EXPONENT)
    return coefficients.map(lambda c: torch.ldexp(c, -exponent)), exponent


def exponent_of(factor: Tensor) -> Tensor:
    """Returns the exponent of the largest magnitude in `factor` (n,), () int32: with it removed, all are below 1."""
    magnitude = torch.where(factor.isfinite(), factor.abs(), 0.0).amax()
    return torch.where(magnitude > 0, torch.frexp(magnitude).exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT), 0)


def finite(lse: Tensor, coefficients: Coefficients) -> Tensor:
    """Returns for which rows (n,) all numbers of (23) are finite."""
    numbers = lse, coefficients.alpha, coefficients.tau, coefficients.sigma
    return torch.stack([number.isfinite() for number in numbers if number is not None]).all(0)


def _is_class(target: Tensor, classes: int) -> Tensor:
    return (target >= 0) & (target < classes)


def _poison(alpha: Tensor, target: Tensor, classes: int) -> Tensor:
    """Returns alpha, NaN where the target is not a class: then its row of d_logits is NaN. Later passes exclude ignored
    rows."""
    return torch.where(_is_class(target, classes), alpha, torch.nan)


def target_class_weight(target: Tensor, class_weight: Tensor, classes: int) -> Tensor:
    """Returns class_weight[target], (N,) float32; NaN where the target is not a class. It reads no class out of
    range."""
    picked = class_weight[target.clamp(0, classes - 1)].float()
    return torch.where(_is_class(target, classes), picked, torch.nan)
