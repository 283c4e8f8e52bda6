"""The math of single rows between the two passes over the logits: O(N) work, the same for every implementation.

The first pass computes `Partial` statistics of each row for each vocabulary chunk. `merge` combines the statistics of
two vocabulary chunks, which may be chunks on one device or shards on several devices. `finish` turns the statistics of
the whole vocabulary into `RowStatistics`. The second pass needs only the `Coefficients` of a row's loss:

    d_logits_ij = p_ij * (alpha_i + beta_i * log p_ij) - tau_i * [j = target_i] - sigma_i * class_weight_j  MATH.md (23)
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_pallas.devices import ONE_DEVICE, Devices
from linear_ce.spec import LossSpec
from linear_ce.statistics import ARGMAX, ENTROPY, LOGIT_SUM, SQUARES

MAX_EXPONENT = 126  # of a normal float32

NO_PROBABILITY = -1e4  # a log-probability whose exp is 0 in float32, finite so that 0 times it is 0

NO_CLASS = 2**31 - 1  # above all classes

# The least summand of a target that its row's loss is made from: where it is smaller, or 0, log space is as accurate.
LEAST_SUMMAND = 2.0**-64


class Partial(NamedTuple):
    """Statistics of n rows over a vocabulary chunk, (n,) float32, MATH.md (25); None if not computed."""

    max: Array
    sum_exp: Array  # of exp(logits - max)
    target_exp: Array  # the target's summand of sum_exp, 0 where the target lies elsewhere
    target_logit: Array  # 0 where the target lies elsewhere
    weighted_sum: Array | None  # of class_weight * logits, for label smoothing
    sum_exp_log: Array | None  # of exp(logits - max) * (logits - max), for the entropy
    argmax: Array | None = None  # int32, the class of the largest logit, the lowest of equals
    logit_sum: Array | None = None
    sum_squared: Array | None = None  # of exp(logits - max) ** 2


class RowStatistics(NamedTuple):
    """Statistics of n rows over the whole vocabulary, all (n,) float32; 0 for rows that do not contribute, None if not
    computed."""

    lse: Array
    target_logit: Array  # NaN where the target is not a class
    nll: Array | None  # lse - target_logit, never below 0; NaN where the target is not a class; None if not computed
    max: Array
    weighted_sum: Array | None
    entropy: Array | None
    argmax: Array | None = None  # int32, -1 where lse is not finite
    mean_logit: Array | None = None
    sum_squared_probs: Array | None = None


class TokenStats(NamedTuple):
    """Statistics of the distribution of each token that `linear_token_loss_with_stats` returns besides the loss, (...,)
    float32 unless noted; None for those that were not requested. None of it has a gradient.

    Rows that do not contribute (ignored, or with token_weight 0) have 0.
    """

    log_prob: Array | None  # of the target, what token_loss gets; NaN for a target that is not a class
    entropy: Array | None
    lse: Array | None  # log-sum-exp of the logits
    argmax: Array | None  # int32, the class of the largest logit, the lowest of equals; -1 where lse is not finite
    is_top1: Array | None  # bool, whether the target has the largest logit; ties count, as in `LossStats.accuracy`
    mean_logit: Array | None
    sum_squared_probs: Array | None  # of the squared probabilities of all classes


class Coefficients(NamedTuple):
    """The coefficients of a row's loss in d_logits (23), all (n,) float32; None means zero."""

    alpha: Array
    tau: Array
    beta: Array | None = None
    sigma: Array | None = None

    def map(self, function: Callable[[Array], Array]) -> "Coefficients":
        return Coefficients(
            alpha=function(self.alpha),
            tau=function(self.tau),
            beta=None if self.beta is None else function(self.beta),
            sigma=None if self.sigma is None else function(self.sigma),
        )


def empty_partial(target: Array, spec: LossSpec, statistics: int) -> Partial:
    """Returns the statistics of a vocabulary chunk without classes (a shard of padding), `merge`'s identity element."""
    zero = jnp.zeros(target.shape, jnp.float32)
    return Partial(
        max=jnp.full_like(zero, -jnp.inf),
        sum_exp=zero,
        target_exp=zero,
        target_logit=zero,
        weighted_sum=zero if spec.label_smoothing else None,
        sum_exp_log=zero if statistics & ENTROPY else None,
        argmax=jnp.full(target.shape, NO_CLASS, jnp.int32) if statistics & ARGMAX else None,
        logit_sum=zero if statistics & LOGIT_SUM else None,
        sum_squared=zero if statistics & SQUARES else None,
    )


def merge(a: Partial, b: Partial) -> Partial:
    """Joins the statistics of two vocabulary chunks: (26)."""
    top = jnp.maximum(a.max, b.max)

    def shifted(part: Partial) -> tuple[Array, Array]:
        masked = part.max == -jnp.inf  # all logits of the chunk are -inf: its sums are 0
        shift = jnp.where(masked, 0.0, part.max - top)
        return jnp.where(masked, 0.0, jnp.exp(shift)), shift

    scale_a, shift_a = shifted(a)
    scale_b, shift_b = shifted(b)
    weighted_sum = sum_exp_log = None
    if a.weighted_sum is not None and b.weighted_sum is not None:
        weighted_sum = a.weighted_sum + b.weighted_sum
    if a.sum_exp_log is not None and b.sum_exp_log is not None:
        sum_exp_log = scale_a * (a.sum_exp_log + shift_a * a.sum_exp) + scale_b * (b.sum_exp_log + shift_b * b.sum_exp)
    argmax = logit_sum = sum_squared = None
    if a.argmax is not None and b.argmax is not None:
        equal = jnp.minimum(a.argmax, b.argmax)
        argmax = jnp.where(a.max > b.max, a.argmax, jnp.where(b.max > a.max, b.argmax, equal))
    if a.logit_sum is not None and b.logit_sum is not None:
        logit_sum = a.logit_sum + b.logit_sum
    if a.sum_squared is not None and b.sum_squared is not None:
        sum_squared = jnp.square(scale_a) * a.sum_squared + jnp.square(scale_b) * b.sum_squared
    return Partial(
        max=top,
        sum_exp=scale_a * a.sum_exp + scale_b * b.sum_exp,
        target_exp=scale_a * a.target_exp + scale_b * b.target_exp,
        target_logit=a.target_logit + b.target_logit,
        weighted_sum=weighted_sum,
        sum_exp_log=sum_exp_log,
        argmax=argmax,
        logit_sum=logit_sum,
        sum_squared=sum_squared,
    )


def finish(partial: Partial, target: Array, row_weight: Array, classes: int) -> RowStatistics:
    """Returns the statistics that a loss is computed from, given those of the whole vocabulary: (27)."""
    contributes = row_weight != 0
    log_sum = jnp.log(partial.sum_exp)

    def selected(values: Array) -> Array:
        return jnp.where(contributes, values, jnp.zeros((), values.dtype))

    is_class = _is_class(target, classes)
    nll, lse = nll_and_lse(partial.sum_exp, partial.target_exp, partial.target_logit, partial.max, log_sum)
    entropy = argmax = mean_logit = sum_squared_probs = None
    if partial.sum_exp_log is not None:
        entropy = selected(log_sum - partial.sum_exp_log / partial.sum_exp)
    if partial.argmax is not None:
        argmax = selected(jnp.where(jnp.isfinite(lse), partial.argmax, -1))
    if partial.logit_sum is not None:
        mean_logit = selected(partial.logit_sum / classes)
    if partial.sum_squared is not None:
        sum_squared_probs = selected(partial.sum_squared / partial.sum_exp / partial.sum_exp)
    return RowStatistics(
        lse=selected(lse),
        target_logit=selected(jnp.where(is_class, partial.target_logit, jnp.nan)),
        nll=selected(jnp.where(is_class, nll, jnp.nan)),
        max=selected(partial.max),
        weighted_sum=partial.weighted_sum,
        entropy=entropy,
        argmax=argmax,
        mean_logit=mean_logit,
        sum_squared_probs=sum_squared_probs,
    )


def first_of_largest(tops: Array, columns: Array, top: Array, width: int) -> Array:
    """Returns where each row's largest logit `top` is, the first of equals, (n,) int32, from those of class blocks of
    `width` classes: the largest logits and their columns, (class blocks, n)."""
    place = jnp.arange(len(tops), dtype=jnp.int32)[:, None] * width + columns.astype(jnp.int32)
    return jnp.where(tops == top, place, NO_CLASS).min(0)


def is_top1(row_weight: Array, target_logit: Array, top: Array) -> Array:
    """Returns whether a row contributes and its target has the largest logit, `top`, (N,) bool; ties count: (12)."""
    # XLA may round the two differently: fused into different loops, they are not the same instructions.
    slack = 4 * jnp.finfo(jnp.float32).eps * jnp.abs(top)  # infinite where the top is, and then of no use
    return (row_weight != 0) & ((target_logit >= top) | (target_logit >= top - slack))


def nll_and_lse(
    sum_exp: Array, target_exp: Array, target_logit: Array, reference: Array, log_sum: Array
) -> tuple[Array, Array]:
    """Returns each row's negative log-likelihood, never below 0, and its lse, (n,) each: (27).

    The difference of two float32 numbers as large as the logits can be below 0, and is inaccurate for a confident
    token. The ratio of a sum to one of its summands is at least 1.

    Args:
        sum_exp: sums of exponentials of logits, less each row's `reference`.
        target_exp: the target's summand, as it was added; not above `LEAST_SUMMAND`, or NaN, where the target is none.
        target_logit: the target's logit, of the same matmuls as its summand.
        reference, log_sum: of logits; the logarithm of sum_exp. Both results are computed from them, and not from a
            ratio, where target_exp is too small to divide by.
    """
    divides = target_exp > LEAST_SUMMAND
    rest = jnp.maximum(sum_exp - target_exp, 0.0)
    nll = jnp.log1p(jnp.where(divides, rest, 0.0) / jnp.where(divides, target_exp, 1.0))
    nll = jnp.where(divides, nll, jnp.maximum((reference - target_logit) + log_sum, 0.0))
    return nll, jnp.where(divides, target_logit + nll, reference + log_sum)


# What runs outside of the operators is compiled whole: `jax.debug_nans` looks at what each program returns, and these
# hold NaN in rows that are excluded before they return.


@partial(jax.jit, static_argnames=("spec", "classes", "devices"))
def row_weights(
    spec: LossSpec,
    target: Array,
    class_weight: Array | None,
    token_weight: Array | None,
    normalizer: Array | None,
    classes: int,
    devices: Devices = ONE_DEVICE,
) -> tuple[Array, Array]:
    """Returns what each row's loss is multiplied by, (N,) float32, and n_valid, (): MATH.md (5), (8), (9).

    The row weights contain ignore_index, token_weight, the reduction and its denominator. Later steps exclude the rows
    whose weight is 0. Devices with different tokens have the same denominator and n_valid.
    """
    valid = target != spec.ignore_index
    n_valid = devices.sum(valid.sum())
    row_weight = valid.astype(jnp.float32)
    if token_weight is not None:
        row_weight = jnp.where(valid, token_weight.astype(jnp.float32), 0.0)
    if spec.reduction == "mean":
        if normalizer is not None:
            denominator = normalizer.astype(jnp.float32)
            denominator = jnp.where((denominator >= 0) & (denominator < math.inf), denominator, math.nan)
        elif class_weight is not None:
            denominator = jnp.where(valid, target_class_weight(target, class_weight, classes), 0.0).sum()
            denominator = devices.sum(denominator)
        else:
            # If no token is counted, all weights are 0.
            return row_weight / jnp.maximum(n_valid, 1).astype(jnp.float32), n_valid
        counts = (row_weight != 0) & (denominator != 0)
        row_weight = jnp.where(counts, row_weight / denominator, 0.0)
    return row_weight, n_valid


def row_loss(
    spec: LossSpec,
    statistics: RowStatistics,
    target: Array,
    row_weight: Array,
    class_weight: Array | None,
    classes: int,
) -> Array:
    """Returns row_weight * loss of each row, (N,) float32, 0 for rows that do not contribute: (6), (7), (10)."""
    loss = statistics.nll
    assert loss is not None
    if class_weight is not None:
        loss = target_class_weight(target, class_weight, classes) * loss
    if spec.label_smoothing:
        assert statistics.weighted_sum is not None
        total = classes if class_weight is None else class_weight.sum()
        smooth = (total * statistics.lse - statistics.weighted_sum) / classes
        loss = (1.0 - spec.label_smoothing) * loss + spec.label_smoothing * smooth
    if spec.z_loss_weight:
        loss = loss + spec.z_loss_weight * jnp.square(statistics.lse)
    return jnp.where(row_weight != 0, row_weight * loss, 0.0)


@partial(jax.jit, static_argnames=("spec", "classes"))
def loss_coefficients(
    spec: LossSpec,
    lse: Array,
    target: Array,
    upstream: Array,
    row_weight: Array,
    class_weight: Array | None,
    classes: int,
) -> Coefficients:
    """Returns the coefficients of the loss; `upstream` (N,) is row_weight times the loss's cotangent: (13)."""
    kept, contributes = upstream * (1.0 - spec.label_smoothing), row_weight != 0
    alpha = tau = kept
    if class_weight is not None:
        alpha = tau = jnp.where(contributes, kept * target_class_weight(target, class_weight, classes), 0.0)
    sigma = None
    if spec.label_smoothing:
        sigma = upstream * (spec.label_smoothing / classes)
        alpha = alpha + sigma * (classes if class_weight is None else class_weight.sum())
    if spec.z_loss_weight:
        alpha = alpha + upstream * (2.0 * spec.z_loss_weight) * lse
    return Coefficients(alpha=_poison(alpha, contributes, target, classes), tau=tau, sigma=sigma)


@partial(jax.jit, static_argnames="classes")
def log_prob_coefficients(
    entropy: Array,
    target: Array,
    d_log_prob: Array,
    d_entropy: Array,
    d_lse: Array,
    row_weight: Array,
    classes: int,
) -> Coefficients:
    """Returns the coefficients of log_prob, entropy and lse under their cotangents, all (N,): (23)."""
    alpha = d_lse - d_log_prob - d_entropy * entropy
    return Coefficients(alpha=_poison(alpha, row_weight != 0, target, classes), tau=-d_log_prob, beta=-d_entropy)


def with_entropy(coefficients: Coefficients, d_entropy: Array, entropy: Array) -> Coefficients:
    """Returns the coefficients of a loss of log-probabilities, with the entropy's cotangent (n,) added: (46)."""
    return coefficients._replace(alpha=coefficients.alpha - d_entropy * entropy, beta=-d_entropy)


def saved_scales(row_weight: Array, devices: Devices = ONE_DEVICE) -> tuple[Array, Array]:
    """Returns () powers of two for float16 gradients computed before the upstream gradient exists: of d_input, and
    of d_weight.

    The first power scales the largest row weight (1/N for a mean) to [1, 2), so that d_input neither underflows nor
    overflows for any N. A gradient of the head is a sum of up to N rows, so the second power has half the exponent: the
    gradient is then equally far from both ends of float16's range.

    `devices` with different tokens have the same powers.
    """
    largest = devices.max(jnp.abs(row_weight).max(initial=0.0))
    usable = jnp.isfinite(largest) & (largest > 0)
    exponent = jnp.where(usable, jnp.frexp(largest)[1] - 1, 0).clip(-MAX_EXPONENT, MAX_EXPONENT)
    half = jnp.sign(exponent) * (jnp.abs(exponent) // 2)
    return power_of_two(-exponent), power_of_two(-half)


def split_exponents(coefficients: Coefficients, class_weight: Array | None) -> tuple[Coefficients, Array]:
    """Splits coefficients into ones of magnitude below 1 and the row's power of two, (n,) int32: (34).

    float16 cannot hold 1/N of a mean times a small probability, nor a loss scale times a probability near 1. It holds
    both if the power of two is removed from d_logits and applied after the matmuls. This adds no rounding. Rows of
    zeros get the smallest exponent.
    """
    magnitude = jnp.maximum(jnp.abs(coefficients.alpha), jnp.abs(coefficients.tau))
    if coefficients.beta is not None:
        magnitude = jnp.maximum(magnitude, jnp.abs(coefficients.beta))
    if coefficients.sigma is not None:
        largest = 1.0 if class_weight is None else jnp.abs(class_weight).max()
        magnitude = jnp.maximum(magnitude, jnp.abs(coefficients.sigma) * largest)
    usable = jnp.isfinite(magnitude) & (magnitude > 0)
    exponent = jnp.where(usable, jnp.frexp(magnitude)[1].clip(-MAX_EXPONENT, MAX_EXPONENT), -MAX_EXPONENT)
    factor = power_of_two(-exponent)
    return coefficients.map(lambda c: c * factor), exponent


def exponent_of(factor: Array) -> Array:
    """Returns the exponent of the largest magnitude in `factor` (n,), () int32: with it removed, all are below 1."""
    magnitude = jnp.where(jnp.isfinite(factor), jnp.abs(factor), 0.0).max()
    return jnp.where(magnitude > 0, jnp.frexp(magnitude)[1].clip(-MAX_EXPONENT, MAX_EXPONENT), 0)


def finite(lse: Array, coefficients: Coefficients) -> Array:
    """Returns for which rows (n,) all numbers of (23) are finite."""
    numbers = lse, coefficients.alpha, coefficients.tau, coefficients.sigma
    return jnp.stack([jnp.isfinite(number) for number in numbers if number is not None]).all(0)


def power_of_two(exponent: Array) -> Array:
    """Returns 2**exponent in float32, exactly; 0 below the normal range."""
    return jnp.ldexp(jnp.float32(1.0), exponent)


def _is_class(target: Array, classes: int) -> Array:
    return (target >= 0) & (target < classes)


def _poison(alpha: Array, contributes: Array, target: Array, classes: int) -> Array:
    """Returns alpha, NaN where the target of a contributing row is not a class: then its row of d_logits is NaN."""
    return jnp.where(contributes & ~_is_class(target, classes), jnp.nan, alpha)


def target_class_weight(target: Array, class_weight: Array, classes: int) -> Array:
    """Returns class_weight[target], (N,) float32; NaN where the target is not a class. It reads no class out of
    range."""
    picked = class_weight[target.clip(0, classes - 1)].astype(jnp.float32)
    return jnp.where(_is_class(target, classes), picked, jnp.nan)
