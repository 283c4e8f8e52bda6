"""The losses of `token_losses.py`, without an entropy bonus, and their derivatives in one kernel.

PyTorch computes and differentiates such a formula in many small kernels, 27 for GRPO, in each chunk of rows
(benchmarks/experiments.md has the time). A function of the caller's own still takes these.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton.launch import cdiv, launch, on_device
from core_triton.token_losses import Named

BLOCK = 256  # rows of a program


@triton.jit
def expm1(t):
    """Returns exp(t) - 1. Near 0 the difference would cancel; the series is exact to 2**-24 there."""
    series = 1.0 + t / 8 * (1.0 + t / 9)
    for divisor in tl.static_range(7, 1, -1):
        series = 1.0 + t / divisor * series
    return tl.where(tl.abs(t) < 0.5, t * series, tl.exp(t) - 1.0)


@triton.jit
def clipped(ratio, low, high):
    """Returns the ratio within bounds, and NaN as it is."""
    return tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))


@triton.jit
def kl_of(difference, KL: tl.constexpr):
    """Returns an estimate of the KL divergence from log_prob - ref_log_prob, and its derivative."""
    if KL == "k1":
        return difference, tl.zeros_like(difference) + 1.0
    elif KL == "k2":
        return 0.5 * difference * difference, difference
    else:
        rest = expm1(-difference)
        return rest + difference, -rest


@triton.jit
def load_rows(ptr, row, stride, inside):
    """Returns values of rows as float32."""
    return tl.load(ptr + row.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(ptr, row, value, factor, inside):
    """Writes factor * value to rows, 0 where the factor is 0, whatever the value; nothing if the pointer is None."""
    if ptr is not None:
        tl.store(ptr + row, tl.where(factor == 0, 0.0, factor * value), mask=inside)


@triton.jit(do_not_specialize=["start"])
def token_loss_kernel(
    nll_ptr, order_ptr, row_weight_ptr, first_ptr, second_ptr, ref_ptr, loss_ptr, gradient_weight_ptr, log_prob_ptr,
    found_ptr, d_first_ptr, d_second_ptr, d_ref_ptr, start, rows, first_stride, second_stride, ref_stride, low, high,
    beta, OF_CALL: tl.constexpr, NAME: tl.constexpr, KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the results of `TokenHook.process` for a named loss: MATH.md (35), (36).

    Reads nll (rows,), or (N,) of the call with `OF_CALL`, the rows of the call order (rows,) int64 or, if None, those
    from `start` on, row_weight (N,), and the per-token arrays (N,) that the loss takes: weight or advantage,
    old_log_prob, ref_log_prob. Writes loss, gradient_weight, log_prob and the derivatives of the per-token arrays to
    the rows of the call, (N,) float32, and the weights in the gradients also in the order of the rows, found (rows,).
    Pointers to results may be None.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < rows
    if order_ptr is not None:
        row = tl.load(order_ptr + index, mask=inside, other=0)
    else:
        row = start + index
    row_weight = tl.load(row_weight_ptr + row, mask=inside, other=0.0)
    log_prob = 0.0 - tl.load(nll_ptr + (row if OF_CALL else index), mask=inside, other=0.0)
    # A row whose log-probability is NaN has NaN everywhere, also where the formula replaces NaN.
    factor = tl.where((log_prob == log_prob) | (row_weight == 0), row_weight, float("nan"))
    first = load_rows(first_ptr, row, first_stride, inside)
    if NAME == "weighted_nll" or NAME == "reinforce":
        loss, slope, d_first = -first * log_prob, -first, -log_prob
    else:
        ratio = tl.exp(log_prob - load_rows(second_ptr, row, second_stride, inside))
        bound = clipped(ratio, low, high)
        if NAME == "cispo":
            loss, slope, d_first = -bound * first * log_prob, -bound * first, -bound * log_prob
            d_second = tl.zeros_like(ratio)
        else:
            clips = bound * first < ratio * first
            d_first = -tl.where(clips, bound, ratio)
            d_second = tl.where(clips, 0.0, ratio * first)
            loss, slope = d_first * first, -d_second
        store_rows(d_second_ptr, row, d_second, factor, inside)
    if ref_ptr is not None:
        kl, d_kl = kl_of(log_prob - load_rows(ref_ptr, row, ref_stride, inside), KL)
        loss += beta * kl
        slope += beta * d_kl
        store_rows(d_ref_ptr, row, -beta * d_kl, factor, inside)
    store_rows(loss_ptr, row, loss, factor, inside)
    store_rows(d_first_ptr, row, d_first, factor, inside)
    store_rows(gradient_weight_ptr, row, -slope, factor, inside)  # that of nll = -log_prob
    store_rows(found_ptr, index, -slope, factor, inside)
    if log_prob_ptr is not None:
        tl.store(log_prob_ptr + row, tl.where(row_weight == 0, 0.0, log_prob), mask=inside)


@triton.jit
def contributes_kernel(row_weight_ptr, found_ptr, rows, BLOCK: tl.constexpr):
    """Writes 1 for each row of row_weight (rows,) whose weight is not 0, and 0 for the others, found (rows,)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < rows
    row_weight = tl.load(row_weight_ptr + index, mask=inside, other=0.0)
    tl.store(found_ptr + index, tl.where(row_weight == 0, 0.0, 1.0), mask=inside)


def token_loss(
    function: Named,
    rows: slice | Tensor,
    nll: Tensor,
    row_weight: Tensor,
    per_token: Sequence[Tensor],
    *,
    of_call: bool,
    loss: Tensor,
    gradient_weight: Tensor | None,
    log_prob: Tensor | None,
    d_per_token: Sequence[Tensor | None],
) -> Tensor | None:
    """Launches `token_loss_kernel` for rows of the call: those of a slice, or (n,) int64. nll is (n,), or (N,) with
    `of_call`. Returns the weights of the rows in the gradients (n,), or None if `gradient_weight` is None."""
    by_name = dict(zip(function.per_token, zip(per_token, d_per_token, strict=True), strict=True))
    ref, d_ref = by_name.pop("ref_log_prob", (None, None))
    (first, d_first), (second, d_second) = (*by_name.values(), (None, None))[:2]
    low, high = 1.0, 1.0
    if second is not None:
        low, high = 1.0 - function.parameters[0], 1.0 + function.parameters[1]
    order, start = (None, rows.start or 0) if isinstance(rows, slice) else (rows, 0)
    n = len(nll) if order is None else len(order)
    found = None if gradient_weight is None else nll.new_empty(n)
    with on_device(nll.device):
        if n:
            launch(
                token_loss_kernel,
                (cdiv(n, BLOCK),),
                nll.contiguous(),
                order,
                row_weight,
                *(first, second, ref),
                *(loss, gradient_weight, log_prob, found),
                *(d_first, d_second, d_ref),
                start,
                n,
                *(0 if one is None else one.stride(0) for one in (first, second, ref)),
                low,
                high,
                float(function.parameters[-1]) if ref is not None else 0.0,
                OF_CALL=of_call,
                NAME=function.name,
                KL=function.kl,
                BLOCK=BLOCK,
            )
    return found


def contributes(row_weight: Tensor) -> Tensor:
    """Returns 1 for each row whose weight is not 0, and 0 for the others, (n,) float32."""
    found = torch.empty_like(row_weight)
    with on_device(row_weight.device):
        if len(found):
            launch(contributes_kernel, (cdiv(len(found), BLOCK),), row_weight, found, len(found), BLOCK=BLOCK)
    return found
