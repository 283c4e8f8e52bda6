"""Kernels for Hopper (sm_90) whose epilogues take tiles of logits: exponentials, statistics and d_logits.

In Pallas' Mosaic dialect; core_triton/hopper_logits.py is the same in Triton's. A tile is 128 rows x 256 classes
(`hopper.over_tiles`). Its exponentials take 2048 cycles, whatever the hidden size, and its products 16 per unit of it.

What belongs to a row leaves a kernel as one number for each block of classes, (class blocks, rows), and XLA joins the
blocks: nothing is added in an order that could change. Equations: parity/MATH.md.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_pallas.hopper import Half, Tiles, cdiv, over_tiles, padded

LOG2_E = 1.4426950408889634

NO_PROBABILITY = -1e4  # a log-probability whose exp is 0 in float32, finite so that 0 times it is 0


def limits(x_dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns a sentence that names what keeps these kernels from serving a call, or None."""
    if jnp.dtype(x_dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the Hopper kernels multiply bfloat16 or float16, not {jnp.dtype(x_dtype).name}"
    if not 0 < hidden < 2**30 or not 0 < vocab < 2**30:  # indices are int32 and run a tile past the end
        return f"the Hopper kernels need sizes from 1 to 2**30 - 1, got a hidden size of {hidden} and {vocab} classes"
    if hidden % 8:  # TMA wants rows that start at multiples of 16 bytes
        return f"the Hopper kernels need a hidden size that is a multiple of 8, got {hidden}"
    if vocab_axis not in (0, 1):
        return f"the Hopper kernels need vocab_axis 0 or 1, got {vocab_axis}"
    if vocab_axis == 1 and vocab % 64:
        return f"with vocab_axis 1 the Hopper kernels need a multiple of 64 classes, got {vocab}"
    return None


def _cap(half: Half, raw: Array, piece: int, logit_scale: float, softcap: float | None) -> tuple[Array, Array | None]:
    """Returns logits of raw products, and their ratio to the cap: MATH.md (1), (2)."""
    if "bias" in half.refs:
        raw = raw + half.of_columns("bias", piece)
    logits = raw * logit_scale if logit_scale != 1.0 else raw
    if softcap is None:
        return logits, None
    ratio = logits * (1.0 / softcap)
    small = jnp.exp2(-2.0 * LOG2_E * jnp.abs(ratio))
    magnitude = (1.0 - small) * jnp.square(lax.rsqrt(1.0 + small))  # a division takes ten instructions
    ratio = jnp.where(ratio < 0.0, -magnitude, magnitude)
    return softcap * ratio, ratio


def _sum(parts: list[Array]) -> Array:
    return sum(parts[1:], parts[0])


def exponentials(
    x: Array,
    w: Array,
    bias: Array | None,
    anchor: Array,
    start: Array | int,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    stores: bool,
    largest: bool,
    redo: Array | None = None,
    e: Array | None = None,
    interpret: bool = False,
) -> tuple[Array | None, Array, Array | None]:
    """Returns anchored exponentials of rows' logits, their sums and the rows' largest logits: (29), (31).

    Args:
        x: (N, D), of which rows `start` to `start` + `rows` count.
        w: (V, D), or (D, V) where `vocab_axis` is 1; its first `classes` are classes.
        bias: at least (classes,), or None.
        anchor: (rows,) float32 integers.
        start: a number of rows, or such a scalar on the device.
        rows, classes, vocab_axis, logit_scale, softcap: as known when the call is traced.
        stores: whether the exponentials are wanted.
        largest: whether the largest logits are.
        redo: (1 + rows / 128 rounded up,) int32. If its first is 0 nothing is done, else what belongs to the blocks of
            128 rows whose flags, which follow, are not 0.
        e: with `redo` and `stores`, the exponentials, brought up to date in place.
        interpret: whether the kernel runs in Pallas' interpreter, on a CPU.

    Returns:
        e (rows or up to 7 more, padded) bfloat16, times the cap's slope, 0 past the last row and class, or None.
        sums (rows,) float32 of the exponentials before they are rounded; with `redo`, of the flagged rows only.
        tops (rows,) float32, likewise, or None.
    """
    tiles = Tiles(rows, x.shape[1], classes, vocab_axis)
    operands = {"bias": tiles.by_column(bias, 0), "anchor": tiles.by_row(anchor, jnp.inf)}  # no row: zeros
    results = {"sums": tiles.by_block}
    if largest:
        results["tops"] = tiles.by_block
    updates = stores and redo is not None
    if updates:
        operands["out"] = e
    elif stores:
        results["out"] = jax.ShapeDtypeStruct((cdiv(rows, 8) * 8, padded(classes)), jnp.bfloat16)

    def epilogue(half: Half, raw: list[Array]) -> list[Array]:
        anchors = half.of_rows("anchor")
        sums, tops, out = [], [], []
        for piece, part in enumerate(raw):
            capped, ratio = _cap(half, part, piece, logit_scale, softcap)
            capped = half.masked(capped, piece, -jnp.inf)
            values = jnp.exp2(capped * LOG2_E - anchors)
            sums.append(values.sum(1))
            if largest:
                tops.append(capped.max(1))
            if stores:
                out.append(values if ratio is None else half.masked(values * (1.0 - jnp.square(ratio)), piece, 0.0))
        half.put("sums", _sum(sums))
        if largest:
            half.put("tops", reduce(jnp.maximum, tops))
        return out

    found = over_tiles(
        "exponentials" if redo is None else "exponentials_again",
        tiles,
        x,
        w,
        (start, 0, 0),
        operands,
        results,
        epilogue,
        stored=jnp.bfloat16 if stores else None,
        updates=updates,
        redo=redo,
        interpret=interpret,
    )
    sums = found["sums"].sum(0)[:rows]
    return found.get("out"), sums, found["tops"].max(0)[:rows] if largest else None


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
        x, w, bias, start, rows, vocab_axis, logit_scale, softcap, interpret: of `exponentials`; bias is indexed as w.
        class_weight: (V,) float32, indexed as w is; None means ones.
        first_class, classes: the stretch is `first_class` to `first_class` + `classes` of w. Scalars, as `skip` is;
            where `vocab_axis` is 1 `first_class` is a multiple of 64.
        skip: how many classes at the stretch's start are left out.
        weighted: whether the sum of class_weight * logits is wanted.
        entropy: whether the sum of exp(logits - max) * (logits - max) is.

    Returns:
        The largest logit, the sum of exp(logits - max), and the two above or None.
    """
    tiles = Tiles(rows, x.shape[1], classes, vocab_axis)
    weights = class_weight if weighted else None
    operands = {"bias": tiles.by_column(bias, first_class), "class_weight": tiles.by_column(weights, first_class)}
    names = ["tops", "sums", *["weighted_sums"] * weighted, *["sums_exp_log"] * entropy]

    def epilogue(half: Half, raw: list[Array]) -> list[Array]:
        capped = [_cap(half, part, piece, logit_scale, softcap)[0] for piece, part in enumerate(raw)]
        if weighted:
            products = capped
            if weights is not None:
                products = [part * half.of_columns("class_weight", piece) for piece, part in enumerate(capped)]
            half.put("weighted_sums", _sum([half.masked(part, i, 0.0).sum(1) for i, part in enumerate(products)]))
        logits = [half.masked(part, piece, -jnp.inf) for piece, part in enumerate(capped)]
        top = reduce(jnp.maximum, [part.max(1) for part in logits])
        shift = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)  # all -inf: sums of 0, not NaN
        shifted = [part - lax.broadcast_in_dim(shift, part.shape, (0,)) for part in logits]
        exponentials = [jnp.exp2(part * LOG2_E) for part in shifted]
        half.put("tops", top)
        half.put("sums", _sum([part.sum(1) for part in exponentials]))
        if entropy:
            finite = [jnp.maximum(part, NO_PROBABILITY) for part in shifted]
            products = [a * b for a, b in zip(exponentials, finite, strict=True)]
            half.put("sums_exp_log", _sum([part.sum(1) for part in products]))
        return []

    results = dict.fromkeys(names, tiles.by_block)
    offsets = (start, first_class, skip)
    found = over_tiles("statistics", tiles, x, w, offsets, operands, results, epilogue, interpret=interpret)
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
    tiles = Tiles(rows, x.shape[1], classes, vocab_axis)
    weights = None if sigma is None else class_weight
    by_row = {
        "target": target.astype(jnp.int32) - first_class,  # its column
        "lse": lse,
        "alpha": alpha,
        "tau": tau,
        "beta": beta,
        "sigma": sigma,
        "contributes": contributes.astype(jnp.int32),
    }
    operands = {key: tiles.by_row(value) for key, value in by_row.items()}
    operands["bias"] = tiles.by_column(bias, first_class)
    operands["class_weight"] = tiles.by_column(weights, first_class)

    def epilogue(half: Half, raw: list[Array]) -> list[Array]:
        row = {key: half.of_rows(key) for key, value in by_row.items() if value is not None}
        out = []
        for piece, part in enumerate(raw):
            logits, ratio = _cap(half, part, piece, logit_scale, softcap)
            log_prob = logits - row["lse"]
            factor = row["alpha"]
            if beta is not None:
                log_prob = jnp.maximum(log_prob, NO_PROBABILITY)
                factor = factor + row["beta"] * log_prob
            values = jnp.exp2(log_prob * LOG2_E) * factor
            if sigma is not None:
                smooth = row["sigma"] if weights is None else row["sigma"] * half.of_columns("class_weight", piece)
                values = values - smooth
            values = jnp.where(half.columns(piece) == row["target"], values - row["tau"], values)
            if ratio is not None:
                values = values * (1.0 - jnp.square(ratio))
            values = jnp.where(row["contributes"] != 0, values, 0.0)
            out.append(half.masked(values, piece, 0.0))
        return out

    results = {"out": jax.ShapeDtypeStruct((rows, padded(classes)), x.dtype)}
    offsets = (start, first_class, skip)
    found = over_tiles(
        "d_logits", tiles, x, w, offsets, operands, results, epilogue, stored=x.dtype, interpret=interpret
    )
    return found["out"]
