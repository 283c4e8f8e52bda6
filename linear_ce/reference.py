"""The loss and the log-probabilities in NumPy, with materialized logits and analytic gradients.

In float64 (`EXACT`) this is the reference for every backend. The same code in float32, with d_logits and the gradients
rounded to the storage dtype (`unfused`), gives the error of an unfused computation of that dtype, and all tolerances
are multiples of that error. Token losses are there too. Equation numbers are those of MATH.md.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from linear_ce.rounding import round_to
from linear_ce.spec import LossSpec


class Arithmetic(NamedTuple):
    """The dtypes of a computation: `real` for all arithmetic, the others for what is stored."""

    real: type[np.floating]
    input_dtype: str  # of d_logits ahead of the matmuls, and of d_input
    head_dtype: str  # of d_weight and d_bias


DEFAULT_SPEC = LossSpec()
EXACT = Arithmetic(np.float64, "float64", "float64")


def unfused(dtype: str, head_dtype: str | None = None) -> Arithmetic:
    """Returns the arithmetic of the unfused computation with float32 logits of arrays stored in `dtype`."""
    return Arithmetic(np.float32, dtype, head_dtype or dtype)


class LossResult(NamedTuple):
    """The loss, its gradients and its statistics; `...` is target's shape."""

    loss: np.ndarray  # (), or (...) for reduction "none"
    d_input: np.ndarray  # (..., D)
    d_weight: np.ndarray  # (V, D)
    d_bias: np.ndarray | None  # (V,)
    lse: np.ndarray  # (...)
    target_logit: np.ndarray  # (...)
    z_loss: np.ndarray  # the loss's shape
    accuracy: float
    n_valid: int


class LogProbsResult(NamedTuple):
    """Log-probability, entropy and lse of every token, and the gradients; `...` is target's shape."""

    log_prob: np.ndarray  # (...)
    entropy: np.ndarray  # (...)
    lse: np.ndarray  # (...)
    d_input: np.ndarray  # (..., D)
    d_weight: np.ndarray  # (V, D)
    d_bias: np.ndarray | None  # (V,)


class TokenStatsResult(NamedTuple):
    """Statistics of the distribution of every token, (...) each, target's shape; 0 where it does not contribute."""

    log_prob: np.ndarray
    entropy: np.ndarray
    lse: np.ndarray
    argmax: np.ndarray  # int64, -1 where lse is not finite
    is_top1: np.ndarray  # bool
    mean_logit: np.ndarray
    sum_squared_probs: np.ndarray
    mean_abs_logit: np.ndarray  # what errors of mean_logit are relative to


class TokenLossResult(NamedTuple):
    """A token loss, its gradients and its statistics; `...` is target's shape."""

    loss: np.ndarray  # (), or (...) for reduction "none"
    d_input: np.ndarray  # (..., D)
    d_weight: np.ndarray  # (V, D)
    d_bias: np.ndarray | None  # (V,)
    d_per_token: tuple[np.ndarray, ...]  # (...) each
    stats: TokenStatsResult


# (log_prob, *per_token) or (log_prob, entropy, *per_token) -> the loss, and its derivatives by each of them, all (N,).
ValueAndDerivatives = Callable[..., tuple[np.ndarray, tuple[np.ndarray, ...]]]


class _Problem(NamedTuple):
    """One flattened problem, with zeros in rows that do not contribute and without the padding of the vocabulary."""

    x: np.ndarray  # (N, D)
    w: np.ndarray  # (K, D)
    logits: np.ndarray  # (N, K)
    target: np.ndarray  # (N,)
    in_range: np.ndarray  # (N,) bool
    lse: np.ndarray  # (N,)
    probs: np.ndarray  # (N, K)
    target_logit: np.ndarray  # (N,), NaN where the target is out of range


def reference_loss(
    input: np.ndarray,
    linear_weight: np.ndarray,
    target: np.ndarray,
    *,
    linear_bias: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    token_weight: np.ndarray | None = None,
    normalizer: float | np.ndarray | None = None,
    spec: LossSpec = DEFAULT_SPEC,
    d_loss: float | np.ndarray | None = None,
    arithmetic: Arithmetic = EXACT,
) -> LossResult:
    """Returns the loss of MATH.md (1)-(12), its gradients (13)-(18) and its statistics.

    Args:
        input: (..., D), float32 or float64.
        linear_weight: (V, D).
        target: (...), integer.
        linear_bias: (V,) or None.
        weight: (V,) class weights or None.
        token_weight: (...) or None.
        normalizer: the denominator of "mean", or None for the counted tokens.
        spec: the options.
        d_loss: upstream gradient of the loss's shape; None: ones.
        arithmetic: EXACT, or `unfused(dtype)` for the error of that dtype.

    Returns:
        A `LossResult` of `arithmetic`'s dtypes.

    Raises:
        ValueError: `spec.vocab_size` exceeds V.

    Example:
        >>> result = reference_loss(np.ones((2, 3)), np.eye(4, 3), np.array([0, 3]))
        >>> result.d_input.shape
        (2, 3)
    """
    real, rows = arithmetic.real, linear_weight.shape[0]
    shape = target.shape
    classes = spec.classes(rows)
    y = target.reshape(-1).astype(np.int64)
    valid = y != spec.ignore_index
    in_range = (y >= 0) & (y < classes)
    column = np.where(in_range, y, 0)
    c = np.ones(classes, real) if weight is None else weight[:classes].astype(real)
    # Without class weights an out-of-range target still counts as one token.
    c_target = c[column] if weight is None else np.where(in_range, c[column], real(np.nan))
    t = np.ones(y.shape, real) if token_weight is None else token_weight.reshape(-1).astype(real)
    with np.errstate(all="ignore"):
        denominator = _denominator(c_target[valid], normalizer, spec, real)
        row_weight = np.where(valid & (t != 0) & (denominator != 0), t / denominator, real(0))  # (9)
        contributes = row_weight != 0
        p = _problem(input, linear_weight, y, contributes, linear_bias, spec, real)

        smoothing, zeta = real(spec.label_smoothing), real(spec.z_loss_weight)
        row_loss = (1 - smoothing) * c_target * (p.lse - p.target_logit)  # (6)
        if spec.label_smoothing:
            row_loss = row_loss + smoothing / classes * np.sum(c * (p.lse[:, None] - p.logits), axis=1)
        row_z_loss = zeta * p.lse**2
        if spec.z_loss_weight:
            row_loss = row_loss + row_z_loss

        # (13): a_i, alpha_i, tau_i, sigma_i.
        upstream = np.ones((), real) if d_loss is None else np.asarray(d_loss, real).reshape(-1)
        a = np.where(contributes, upstream * row_weight, real(0))
        alpha = (1 - smoothing) * c_target
        if spec.label_smoothing:
            alpha = alpha + smoothing / classes * np.sum(c, dtype=real)
        if spec.z_loss_weight:
            alpha = alpha + 2 * zeta * p.lse
        d_logits = p.probs * (a * alpha)[:, None]  # (14)
        if spec.label_smoothing:
            d_logits = d_logits - (a * smoothing / classes)[:, None] * c
        d_logits[np.arange(y.size), column] -= a * (1 - smoothing) * c_target
        d_logits[~in_range] = np.nan
        differentiated = contributes & (upstream != 0) if spec.reduction == "none" else contributes
        d_logits[~differentiated] = 0
        d_input, d_weight, d_bias = _gradients(
            d_logits, differentiated, p, rows, linear_bias is not None, spec, arithmetic
        )

        def reduce(per_row: np.ndarray) -> np.ndarray:
            weighted = np.where(contributes, t * per_row, real(0))
            return weighted.reshape(shape) if spec.reduction == "none" else _total(weighted, contributes, denominator)

        hits = contributes & (p.target_logit >= np.max(p.logits, axis=1))
        return LossResult(
            loss=reduce(row_loss),
            d_input=d_input.reshape(input.shape),
            d_weight=d_weight,
            d_bias=d_bias,
            lse=np.where(contributes, p.lse, real(0)).reshape(shape),
            target_logit=np.where(contributes, p.target_logit, real(0)).reshape(shape),
            z_loss=reduce(row_z_loss),
            accuracy=float(np.sum(hits) / max(np.sum(contributes), 1)),
            n_valid=int(np.sum(valid)),
        )


def reference_log_probs(
    input: np.ndarray,
    linear_weight: np.ndarray,
    target: np.ndarray,
    *,
    linear_bias: np.ndarray | None = None,
    spec: LossSpec = DEFAULT_SPEC,
    d_log_prob: np.ndarray | None = None,
    d_entropy: np.ndarray | None = None,
    d_lse: np.ndarray | None = None,
    arithmetic: Arithmetic = EXACT,
) -> LogProbsResult:
    """Returns log-probability, entropy and lse per token, MATH.md (19), (20), (3), and their gradients (22).

    Args:
        input: (..., D), float32 or float64.
        linear_weight: (V, D).
        target: (...), integer.
        linear_bias: (V,) or None.
        spec: softcap, logit_scale, vocab_size and ignore_index are read.
        d_log_prob: (...), upstream gradient; None: zeros.
        d_entropy: (...), upstream gradient; None: zeros.
        d_lse: (...), upstream gradient; None: zeros.
        arithmetic: EXACT, or `unfused(dtype)` for the error of that dtype.

    Returns:
        A `LogProbsResult` of `arithmetic`'s dtypes.

    Raises:
        ValueError: `spec.vocab_size` exceeds V.

    Example:
        >>> result = reference_log_probs(np.ones((2, 3)), np.eye(4, 3), np.array([0, 3]), d_lse=np.ones(2))
        >>> result.log_prob.shape
        (2,)
    """
    real, rows = arithmetic.real, linear_weight.shape[0]
    shape = target.shape
    spec.classes(rows)
    y = target.reshape(-1).astype(np.int64)
    valid = y != spec.ignore_index

    def upstream(value: np.ndarray | None) -> np.ndarray:
        return np.zeros(y.shape, real) if value is None else np.asarray(value, real).reshape(-1)

    with np.errstate(all="ignore"):
        p = _problem(input, linear_weight, y, valid, linear_bias, spec, real)
        shifted = p.logits - p.lse[:, None]  # log p
        # (20): terms with p = 0 count 0, so that log p = -inf does no harm. NaN is not 0 and stays.
        surprise = np.where(p.probs == 0, real(0), p.probs * shifted)
        entropy = -np.sum(surprise, axis=1)
        d_lp, d_ent, d_lse_rows = upstream(d_log_prob), upstream(d_entropy), upstream(d_lse)
        d_logits = p.probs * (d_lse_rows - d_lp)[:, None]  # (22)
        d_logits = d_logits - d_ent[:, None] * (surprise + p.probs * entropy[:, None])
        d_logits[np.arange(y.size), np.where(p.in_range, y, 0)] += d_lp
        d_logits[~p.in_range] = np.nan
        differentiated = valid & ((d_lp != 0) | (d_ent != 0) | (d_lse_rows != 0))
        d_logits[~differentiated] = 0
        d_input, d_weight, d_bias = _gradients(
            d_logits, differentiated, p, rows, linear_bias is not None, spec, arithmetic
        )

        def select(per_row: np.ndarray) -> np.ndarray:
            return np.where(valid, per_row, real(0)).reshape(shape)

        return LogProbsResult(
            log_prob=select(p.target_logit - p.lse),
            entropy=select(entropy),
            lse=select(p.lse),
            d_input=d_input.reshape(input.shape),
            d_weight=d_weight,
            d_bias=d_bias,
        )


def reference_token_loss(
    input: np.ndarray,
    linear_weight: np.ndarray,
    target: np.ndarray,
    token_loss: ValueAndDerivatives,
    *per_token: np.ndarray,
    with_entropy: bool = False,
    linear_bias: np.ndarray | None = None,
    token_weight: np.ndarray | None = None,
    normalizer: float | np.ndarray | None = None,
    spec: LossSpec = DEFAULT_SPEC,
    d_loss: float | np.ndarray | None = None,
    arithmetic: Arithmetic = EXACT,
) -> TokenLossResult:
    """Returns the loss of a function of the log-probabilities, its gradients and its statistics: MATH.md (10), (35),
    (36), (43)-(46).

    Args:
        input: (..., D), float32 or float64.
        linear_weight: (V, D).
        target: (...), integer.
        token_loss: the function with its derivatives.
        per_token: (...) each, its arguments besides the log-probabilities and the entropies.
        with_entropy: whether the function takes the entropies.
        linear_bias: (V,) or None.
        token_weight: (...) or None.
        normalizer: the denominator of "mean", or None for the counted tokens.
        spec: the options. Label smoothing and z-loss are not read.
        d_loss: upstream gradient of the loss's shape; None: ones.
        arithmetic: EXACT, or `unfused(dtype)` for the error of that dtype.

    Returns:
        A `TokenLossResult` of `arithmetic`'s dtypes.

    Raises:
        ValueError: `spec.vocab_size` exceeds V.

    Example:
        >>> def nll(log_prob):
        ...     return -log_prob, (-np.ones_like(log_prob),)
        >>> reference_token_loss(np.ones((2, 3)), np.eye(4, 3), np.array([0, 3]), nll).d_input.shape
        (2, 3)
    """
    real, shape, classes = arithmetic.real, target.shape, spec.classes(linear_weight.shape[0])
    y = target.reshape(-1).astype(np.int64)
    valid = y != spec.ignore_index
    t = np.ones(y.shape, real) if token_weight is None else token_weight.reshape(-1).astype(real)
    with np.errstate(all="ignore"):
        denominator = _denominator(np.ones(np.sum(valid), real), normalizer, spec, real)
        row_weight = np.where(valid & (t != 0) & (denominator != 0), t / denominator, real(0))  # (9)
        contributes = row_weight != 0
        ignored = np.where(contributes, y, spec.ignore_index).reshape(shape)

        def log_probs(d_log_prob: np.ndarray | None, d_entropy: np.ndarray | None = None) -> LogProbsResult:
            return reference_log_probs(
                input,
                linear_weight,
                ignored,
                linear_bias=linear_bias,
                spec=spec,
                d_log_prob=d_log_prob,
                d_entropy=d_entropy,
                arithmetic=arithmetic,
            )

        values = [np.where(contributes, one.reshape(-1).astype(real), real(0)) for one in per_token]
        rows = log_probs(None)
        if with_entropy:
            values.insert(0, rows.entropy.reshape(-1))
        row_loss, (d_log_prob, *d_values) = token_loss(rows.log_prob.reshape(-1), *values)
        d_entropy = d_values.pop(0) if with_entropy else real(0)
        upstream = np.ones((), real) if d_loss is None else np.asarray(d_loss, real).reshape(-1)
        factor = np.where((y >= 0) & (y < classes), row_weight, real(np.nan))

        def select(per_row: np.ndarray) -> np.ndarray:
            return np.where(contributes, per_row, real(0)).reshape(shape)

        found = log_probs(select(upstream * factor * d_log_prob), select(upstream * factor * d_entropy))
        loss = select(factor * row_loss)
        return TokenLossResult(
            loss=loss if spec.reduction == "none" else np.asarray(np.sum(loss, dtype=real)),
            d_input=found.d_input,
            d_weight=found.d_weight,
            d_bias=found.d_bias,
            d_per_token=tuple(select(upstream * factor * one) for one in d_values),
            stats=_token_stats(input, linear_weight, y, contributes, linear_bias, spec, real, shape),
        )


def _token_stats(
    input: np.ndarray,
    linear_weight: np.ndarray,
    y: np.ndarray,
    contributes: np.ndarray,
    linear_bias: np.ndarray | None,
    spec: LossSpec,
    real: type[np.floating],
    shape: tuple[int, ...],
) -> TokenStatsResult:
    p = _problem(input, linear_weight, y, contributes, linear_bias, spec, real)
    log_prob = p.logits - p.lse[:, None]
    stats = TokenStatsResult(
        log_prob=p.target_logit - p.lse,
        entropy=-np.sum(np.where(p.probs == 0, real(0), p.probs * log_prob), axis=1),  # (20)
        lse=p.lse,
        argmax=np.where(np.isfinite(p.lse), np.argmax(p.logits, axis=1), -1),
        is_top1=p.target_logit >= np.max(p.logits, axis=1),
        mean_logit=np.mean(p.logits, axis=1),  # (43)
        sum_squared_probs=np.sum(p.probs**2, axis=1),  # (44)
        mean_abs_logit=np.mean(np.abs(p.logits), axis=1),
    )
    return TokenStatsResult(*(np.where(contributes, one, one.dtype.type(0)).reshape(shape) for one in stats))


def _denominator(
    counted: np.ndarray, normalizer: float | np.ndarray | None, spec: LossSpec, real: type[np.floating]
) -> np.floating:
    """Returns the denominator of (8), 1 unless the reduction is "mean". `counted`: what the valid tokens count."""
    if spec.reduction != "mean":
        return real(1)
    if normalizer is None:
        return np.sum(counted, dtype=real)
    denominator = real(np.asarray(normalizer))
    return denominator if 0 <= denominator < np.inf else real(np.nan)


def _problem(
    input: np.ndarray,
    linear_weight: np.ndarray,
    y: np.ndarray,
    contributes: np.ndarray,
    linear_bias: np.ndarray | None,
    spec: LossSpec,
    real: type[np.floating],
) -> _Problem:
    """Returns logits, lse and probabilities, (1)-(4)."""
    classes = spec.classes(linear_weight.shape[0])
    x = input.reshape(-1, input.shape[-1]).astype(real)
    x[~contributes] = 0  # excluded: NaN or inf in such a row must not reach a matmul
    w = linear_weight[:classes].astype(real)
    raw_logits = x @ w.T
    if linear_bias is not None:
        raw_logits = raw_logits + linear_bias[:classes].astype(real)
    raw_logits = real(spec.logit_scale) * raw_logits
    logits = raw_logits if spec.softcap is None else real(spec.softcap) * np.tanh(raw_logits / real(spec.softcap))
    row_max = np.max(logits, axis=1, keepdims=True)
    # A row of all -inf, or one with +inf, gives NaN here, as torch.nn.functional.cross_entropy does.
    lse = (row_max + np.log(np.sum(np.exp(logits - row_max), axis=1, keepdims=True)))[:, 0]
    in_range = (y >= 0) & (y < classes)
    target_logit = np.where(in_range, logits[np.arange(y.size), np.where(in_range, y, 0)], real(np.nan))
    return _Problem(x, w, logits, y, in_range, lse, np.exp(logits - lse[:, None]), target_logit)


def _gradients(
    d_logits: np.ndarray,
    contributes: np.ndarray,
    p: _Problem,
    rows: int,
    has_bias: bool,
    spec: LossSpec,
    arithmetic: Arithmetic,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns d_input (N, D), d_weight (V, D) and d_bias (V,) of d_logits (N, K), (15)-(18).

    The scale is applied before d_logits are rounded: autograd rounds the gradient of the matmul's result.
    """
    real = arithmetic.real
    d_raw = d_logits if spec.softcap is None else d_logits * (1 - (p.logits / real(spec.softcap)) ** 2)
    d_raw = round_to(real(spec.logit_scale) * d_raw, arithmetic.input_dtype)
    d_raw = np.where(contributes[:, None], d_raw, real(0))
    # A row of zeros times a head that holds inf would be NaN: such rows are excluded again.
    d_input = np.where(contributes[:, None], d_raw @ p.w, real(0))
    d_weight = np.zeros((rows, p.w.shape[1]), real)
    d_weight[: len(p.w)] = d_raw.T @ p.x
    d_bias = None
    if has_bias:
        d_bias = np.zeros(rows, real)
        d_bias[: len(p.w)] = np.sum(d_raw, axis=0, dtype=real)
        d_bias = round_to(d_bias, arithmetic.head_dtype)
    return round_to(d_input, arithmetic.input_dtype), round_to(d_weight, arithmetic.head_dtype), d_bias


def _total(weighted: np.ndarray, contributes: np.ndarray, denominator: np.floating) -> np.ndarray:
    """Returns sum / denominator, 0 where no row contributes: then the denominator may be 0 or NaN."""
    if not np.any(contributes):
        return np.zeros((), weighted.dtype)
    return np.asarray(np.sum(weighted, dtype=weighted.dtype) / denominator)
