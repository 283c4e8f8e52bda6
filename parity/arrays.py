"""The arrays of a case: the same ones every time, and of values that the case's dtypes hold exactly."""

import zlib

import numpy as np

from linear_ce.reference import reference_log_probs
from linear_ce.rounding import round_to, split_head
from parity.cases import POISONS, Case
from parity.token_losses import FORMS


def make_arrays(case: Case) -> dict[str, np.ndarray]:
    """Returns the arrays of a case, deterministic in its name.

    NumPy has no bfloat16: floating arrays are float32 arrays whose values are values of the case's dtype, and a
    backend casts them without rounding. The exception is a float32 head under a 16-bit input, whose values are
    float32's own: rounding them is the backend's work.

    Args:
        case: the description.

    Returns:
        A dict with input (..., D), linear_weight (V, D), target (...), the upstream gradients (d_loss, or d_log_prob,
        d_entropy and d_lse), and those of linear_bias, weight, token_weight and normalizer that the case has. A token
        loss also has the arrays of `Case.per_token`.

    Raises:
        ValueError: the case asks for an unknown poison.

    Example:
        >>> from parity.cases import cases
        >>> make_arrays(cases()[0])["input"].shape
        (123, 32)
    """
    unknown = set(case.poison) - set(POISONS)
    if unknown:
        raise ValueError(f"poison must be among {', '.join(POISONS)}, got {', '.join(sorted(unknown))}")
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    n, d, v, k = case.n, case.hidden, case.vocab, case.classes
    x = rng.standard_normal((n, d))
    w = rng.standard_normal((v, d)) * case.logit_std / np.sqrt(d)
    b = rng.standard_normal(v)
    # Targets with a power-law distribution, like words, fill few rows of d_weight with many terms.
    draws = rng.random(n) ** (4 if case.target == "skewed" else 1)
    if case.target == "one_class":
        draws[:] = rng.random()
    y = (k * draws).astype(np.int64)
    ignored = np.full(n, case.ignored == "all")
    if case.ignored == "some":
        ignored = rng.random(n) < 0.25
    t = {
        "": np.ones(n),
        "mask": (rng.random(n) < 0.7).astype(float),
        "signed": rng.standard_normal(n),
        "zero": np.zeros(n),
    }[case.token_weight]
    c = rng.uniform(0.25, 2.0, v)
    if case.has_class_weight == "zero":
        c[:] = 0
    if "target_range" in case.poison:
        outside = [k, v + 5, -1, 2**31 - 1]
        y[[3, 20, 21, 47]] = outside
    y[ignored] = case.spec.ignore_index
    _poison(case, x, w, b, y, t, ignored)

    arrays = {
        "input": round_to(x, case.dtype).reshape(*case.lead, d),
        "linear_weight": round_to(w, case.weight_dtype),
        "target": y.astype(case.target_dtype).reshape(case.lead),
    }
    if case.has_bias:
        arrays["linear_bias"] = round_to(b, case.dtype)
    if case.has_class_weight:
        arrays["weight"] = round_to(c, case.dtype)
    if case.token_weight:
        arrays["token_weight"] = t.astype(np.float32).reshape(case.lead)
    if case.normalizer is not None:
        arrays["normalizer"] = np.asarray(case.normalizer, np.float32)
    if case.per_token:
        arrays |= _per_token(case, arrays, rng)
    return arrays | _upstream(case, rng)


def _poison(
    case: Case, x: np.ndarray, w: np.ndarray, b: np.ndarray, y: np.ndarray, t: np.ndarray, ignored: np.ndarray
) -> None:
    """Puts the case's NaN and infinities in place."""
    k = case.classes
    for poison in case.poison:
        if poison in ("ignored_rows", "masked_rows"):
            rows = np.flatnonzero(ignored if poison == "ignored_rows" else t == 0)
            x[rows[0::3], 0] = np.nan
            x[rows[1::3], 1:] = np.inf
            x[rows[2::3]] = -np.inf
            if poison == "ignored_rows":
                t[rows] = np.nan
        elif poison == "padding":
            w[k:] = np.nan
            w[k + 1 :: 2] = np.inf
            b[k:] = np.inf
        elif poison in ("bias_neg_inf", "bias_neg_inf_target"):
            b[1:k:3] = -np.inf
            y[y % 3 == 1] -= 1
            if poison == "bias_neg_inf_target":
                y[[5, 9]] = 4
        elif poison == "bias_pos_inf":
            b[3] = np.inf
        elif poison == "input_nan":
            x[5, 2] = np.nan
        elif poison == "input_inf":
            x[5, 2] = np.inf


def _per_token(case: Case, arrays: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the arrays of a token loss: advantages, and log-probabilities of policies near the one of the case."""
    round_head = split_head if case.spec.splits_head else round_to
    b, w = arrays.get("linear_bias"), round_head(arrays["linear_weight"], case.dtype)
    log_prob = reference_log_probs(arrays["input"], w, arrays["target"], linear_bias=b, spec=case.spec).log_prob
    log_prob = np.where(np.isfinite(log_prob), log_prob, -5.0)  # no target, or one that is masked
    excluded = np.zeros(case.lead, bool)
    if "ignored_rows" in case.poison:
        excluded |= arrays["target"] == case.spec.ignore_index
    if "masked_rows" in case.poison:
        excluded |= arrays["token_weight"] == 0
    draws = {name: rng.standard_normal(case.lead) for name in case.per_token}
    values = {"advantage": draws["advantage"] + 0.5}  # of both signs, but their sum is not near 0
    if "old_log_prob" in draws:
        old = round_to(log_prob + 0.3 * draws["old_log_prob"], case.per_token_dtype)
        # If a ratio were near a bound of the clip, rounding errors would decide on which side it is.
        ratio, bounds = np.exp(log_prob - old), FORMS[case.token_loss].clip_bounds
        values["old_log_prob"] = np.where(np.any([abs(ratio - bound) < 0.01 for bound in bounds], axis=0), old - 1, old)
    if "ref_log_prob" in draws:
        values["ref_log_prob"] = log_prob + 0.3 * draws["ref_log_prob"]
    return {name: round_to(np.where(excluded, np.nan, value), case.per_token_dtype) for name, value in values.items()}


def _upstream(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the upstream gradients, under the case's loss scale."""
    per_token = case.function == "log_probs" or case.spec.reduction == "none"
    shape = case.lead if per_token else ()

    def draw() -> np.ndarray:
        value = rng.standard_normal(shape) if per_token else np.asarray(1.7)
        if case.upstream == "wide":
            value = np.copysign(10.0 ** rng.uniform(-6.0, 3.0, shape), value)
        elif case.upstream == "one":
            value = np.ones(shape)
        return np.asarray(case.loss_scale * value, np.float32)

    if case.function != "log_probs":
        return {"d_loss": draw()}
    drawn = {name: draw() for name in ("log_prob", "entropy", "lse")}
    return {f"d_{name}": 0 * value if name in case.unused else value for name, value in drawn.items()}
