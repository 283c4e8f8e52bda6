"""Kernels for Hopper (sm_90) for logits that are computed again: their statistics, and d_logits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.hopper import padded
from jax_pallas.hopper_logits import (
    HALF,
    LOG2_E,
    NO_PROBABILITY,
    PIECE,
    _cap,
    _columnwise,
    _launch,
    _Place,
    _rowwise,
    _Tiles,
)


def statistics(
    x: Array,
    w: Array,
    bias: Array | None,
    class_weight: Array | None,
    start: Array | int,
    first_class: Array | int,
    skip: Array | int,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    weighted: bool,
    entropy: bool,
    interpret: bool = False,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Returns statistics of rows over a stretch of classes, the target's logit apart, (rows,) float32 each: (25).

    Args:
        x, w, bias, start, rows, vocab_axis, logit_scale, softcap, interpret: of `exponentials`; bias indexed as w.
        class_weight: (V,) float32, indexed as w is; None means ones.
        first_class, classes: the stretch is `first_class` to `first_class` + `classes` of w. Scalars, as `skip` is;
            where `vocab_axis` is 1 `first_class` is a multiple of 64.
        skip: how many classes at the stretch's start are left out.
        weighted: whether the sum of class_weight * logits is wanted.
        entropy: whether the sum of exp(logits - max) * (logits - max) is.

    Returns:
        The largest logit, the sum of exp(logits - max), and the two above or None.
    """
    tiles = _Tiles(rows, x.shape[1], classes, vocab_axis)
    weights = class_weight if weighted else None
    operands = {
        "bias": None if bias is None else tiles.columns(bias, first_class),
        "class_weight": None if weights is None else tiles.columns(weights, first_class),
    }
    names = ["tops", "sums", *["weighted_sums"] * weighted, *["sums_exp_log"] * entropy]

    def epilogue(place: _Place, raw: list[Array], refs: dict[str, Any], _: Callable[[int, Array], None]) -> None:
        top = total = weighted_sum = sum_exp_log = jnp.float32(0)
        pieces = []
        for piece, part in enumerate(raw):
            biases = place.of_columns(refs["bias"], piece) if bias is not None else None
            logits, _ = _cap(part, biases, logit_scale, softcap)  # pyright: ignore[reportAssignmentType]
            if weighted:
                times = logits
                if weights is not None:
                    times = logits * _columnwise(place.of_columns(refs["class_weight"], piece))
                if place.masked:
                    times = jnp.where(place.inside(piece), times, 0.0)
                weighted_sum = times.sum(1) if piece == 0 else weighted_sum + times.sum(1)
            if place.masked:
                logits = jnp.where(place.inside(piece), logits, -jnp.inf)
            top = logits.max(1) if piece == 0 else jnp.maximum(top, logits.max(1))
            pieces.append(logits)
        shift = _rowwise(jnp.where(top == -jnp.inf, jnp.zeros_like(top), top))  # all -inf: sums of 0, not NaN
        for piece, logits in enumerate(pieces):
            shifted = logits - shift
            values = jnp.exp2(shifted * LOG2_E)
            total = values.sum(1) if piece == 0 else total + values.sum(1)
            if entropy:
                times = (values * jnp.maximum(shifted, NO_PROBABILITY)).sum(1)
                sum_exp_log = times if piece == 0 else sum_exp_log + times
        place.put(refs["tops"], top)
        place.put(refs["sums"], total)
        if weighted:
            place.put(refs["weighted_sums"], weighted_sum)
        if entropy:
            place.put(refs["sums_exp_log"], sum_exp_log)

    results = dict.fromkeys(names, tiles.by_block)
    offsets = (start, first_class, skip)
    found = _launch("statistics", tiles, x, w, offsets, operands, results, epilogue, interpret=interpret)
    out = {key: value[:, :rows] for key, value in found.items()}
    tops = out["tops"]
    top = tops.max(0)  # (26), all blocks at once
    masked = tops == -jnp.inf
    shift = jnp.where(masked, 0.0, tops - top)
    scale = jnp.where(masked, 0.0, jnp.exp(shift))
    return (
        top,
        (scale * out["sums"]).sum(0),
        out["weighted_sums"].sum(0) if weighted else None,
        (scale * (out["sums_exp_log"] + shift * out["sums"])).sum(0) if entropy else None,
    )


def d_logits(
    x: Array,
    w: Array,
    bias: Array | None,
    class_weight: Array | None,
    target: Array,
    lse: Array,
    alpha: Array,
    tau: Array,
    beta: Array | None,
    sigma: Array | None,
    contributes: Array,
    start: Array | int,
    first_class: Array | int,
    skip: Array | int,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> Array:
    """Returns d_logits of rows and a stretch of classes, (rows, padded) of x's dtype: (23), (15).

    Args:
        x, w, bias, class_weight, start, first_class, skip, rows, classes, vocab_axis, logit_scale, softcap,
            interpret: of `statistics`.
        target: (rows,) int32, the class as w counts them.
        lse, alpha, tau, beta, sigma: (rows,) float32, the last two None where they are 0.
        contributes: (rows,) bool; the other rows are 0.
    """
    tiles = _Tiles(rows, x.shape[1], classes, vocab_axis)
    weights = None if sigma is None else class_weight
    by_row = {"lse": lse, "alpha": alpha, "tau": tau, "beta": beta, "sigma": sigma}
    operands = {key: None if value is None else tiles.padded_rows(value) for key, value in by_row.items()}
    operands["target"] = tiles.padded_rows(target.astype(jnp.int32) - first_class)  # the column
    operands["contributes"] = tiles.padded_rows(contributes.astype(jnp.int32))
    operands["bias"] = None if bias is None else tiles.columns(bias, first_class)
    operands["class_weight"] = None if weights is None else tiles.columns(weights, first_class)

    def epilogue(place: _Place, raw: list[Array], refs: dict[str, Any], store: Callable[[int, Array], None]) -> None:
        row = {key: place.of_rows(refs[key]) for key in (*by_row, "target", "contributes") if key in refs}
        contributing = _rowwise(row["contributes"]) != 0
        for piece, part in enumerate(raw):
            biases = place.of_columns(refs["bias"], piece) if bias is not None else None
            logits, ratio = _cap(part, biases, logit_scale, softcap)
            log_prob = logits - _rowwise(row["lse"])
            factor = _rowwise(row["alpha"])
            if beta is not None:
                log_prob = jnp.maximum(log_prob, NO_PROBABILITY)
                factor = factor + _rowwise(row["beta"]) * log_prob
            values = jnp.exp2(log_prob * LOG2_E) * factor
            if sigma is not None:
                smooth = _rowwise(row["sigma"])
                if weights is not None:
                    smooth = smooth * _columnwise(place.of_columns(refs["class_weight"], piece))
                values = values - smooth
            ids = plgpu.broadcasted_iota(jnp.int32, (HALF, PIECE), 1, layout=plgpu.Layout.WGMMA)
            here = ids == _rowwise(row["target"] - (place.column + piece * PIECE))
            values = jnp.where(here, values - _rowwise(row["tau"]), values)
            if ratio is not None:
                values = values * (1.0 - jnp.square(ratio))
            seen = contributing & place.inside(piece) if place.masked else contributing
            store(piece, jnp.where(seen, values, 0.0))

    results = {"out": jax.ShapeDtypeStruct((rows, padded(classes)), x.dtype)}
    offsets = (start, first_class, skip)
    return _launch("d_logits", tiles, x, w, offsets, operands, results, epilogue, stored=x.dtype, interpret=interpret)[
        "out"
    ]
