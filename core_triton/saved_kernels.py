"""Triton kernels for the rows that are saved for the backward pass: their entropies, and their factors once the
upstream gradients are known. Equations: linear_ce/MATH.md.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton.kernels import LOG2_E
from core_triton.launch import At, cdiv, column_block, launch
from core_triton.problem import SavedRows
from core_triton.row_kernels import BLOCKS_AT_ONCE, LN_2, SMALL_BLOCK, column_maxima, column_sums


@triton.jit
def entropies_kernel(
    sum_ptr,
    max_ptr,
    sum_exp_log_ptr,
    ref_exponent_ptr,
    row_weight_ptr,
    row_ptr,
    entropy_out_ptr,
    rows,
    class_blocks,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Writes the entropies of packed rows to entropy_out (N,) at the rows row (rows,) int64 of the call: (43). They are
    0 for rows of row_weight 0.

    Reads sum, max and sum_exp_log (class_blocks, rows) of `kernels.exponentials_kernel`. One program owns BLOCK_N rows.
    """
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    total = column_sums(sum_ptr, row_ids, rows, class_blocks, BLOCK_N, BLOCK_T)
    top = column_maxima(max_ptr, row_ids, rows, class_blocks, BLOCK_N, BLOCK_T)
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, class_blocks, BLOCK_T):
        blocks = start + tl.arange(0, BLOCK_T)
        mask = (blocks < class_blocks)[:, None] & inside[None, :]
        place = blocks.to(tl.int64)[:, None] * rows + row_ids[None, :]
        block_top = tl.load(max_ptr + place, mask=mask, other=float("-inf"))
        moved = tl.where(block_top == float("-inf"), 0.0, block_top - top[None, :])
        acc += tl.load(sum_exp_log_ptr + place, mask=mask, other=0.0)
        acc += moved * tl.load(sum_ptr + place, mask=mask, other=0.0)
    total = tl.where(total == float("inf"), float("nan"), total)  # an infinite logit: no probability is a number
    ref_exponent = tl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
    # The summand of the largest logit, to which the sum is relative here: neither term is of the size of the logits.
    summand = tl.exp2(top * LOG2_E - ref_exponent)
    entropy = tl.log2(total / summand) * LN_2 - tl.sum(acc, 0) / total
    contributes = tl.load(row_weight_ptr + row_ids, mask=inside, other=0.0) != 0
    out = tl.load(row_ptr + row_ids, mask=inside, other=0)
    tl.store(entropy_out_ptr + out, tl.where(contributes, entropy, 0.0), mask=inside)


def entropies(
    n: int,
    class_blocks: int,
    *,
    sums: At,
    tops: At,
    sums_exp_log: At,
    ref_exponent: At,
    row_weight: At,
    order: At,
    entropy_out: Tensor,
) -> None:
    """Launches `entropies_kernel` for n packed rows."""
    pointers = sums, tops, sums_exp_log, ref_exponent, row_weight, order, entropy_out
    sizes = {"BLOCK_N": SMALL_BLOCK, "BLOCK_T": BLOCKS_AT_ONCE}
    launch(entropies_kernel, (cdiv(n, SMALL_BLOCK),), *pointers, n, class_blocks, **sizes, num_warps=4)


@triton.jit
def clear_kernel(e_ptr, rho_ptr, classes, stride, BLOCK: tl.constexpr):
    """Sets the rows of e (rows, V) to 0 whose rho (rows,) is NaN: such a row must have a zero gradient if its upstream
    gradient is 0. One program owns a row."""
    row = tl.program_id(0).to(tl.int64)
    rho = tl.load(rho_ptr + row)
    if rho != rho:
        for start in range(0, classes, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), tl.float32).to(e_ptr.dtype.element_ty)
            tl.store(e_ptr + row * stride + columns, zeros, mask=columns < classes)


def clear(e: Tensor, rho: At) -> None:
    """Launches `clear_kernel` on e (n, V)."""
    n, classes = e.shape
    launch(clear_kernel, (n,), e, rho, classes, e.stride(0), BLOCK=1024, num_warps=4)


class Multiplied(NamedTuple):
    """The numbers of packed rows times their upstream gradients, (S,) each."""

    rho: Tensor
    theta: Tensor
    target: Tensor  # int64, -1 where theta is 0


@triton.jit
def multiply_rows_kernel(
    rho_ptr,
    theta_ptr,
    target_ptr,
    row_ptr,
    factor_ptr,
    rho_out_ptr,
    theta_out_ptr,
    target_out_ptr,
    rows,
    BLOCK: tl.constexpr,
):
    """Writes rho and theta of packed rows times factor (N,) at the rows row (rows,) int64 of the call: (42).

    They are 0 where the factor is 0, also if they are NaN. Writes target (rows,) int64, -1 where theta becomes 0. One
    program owns BLOCK rows.
    """
    row_ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row_ids < rows
    picked = tl.load(row_ptr + row_ids, mask=inside, other=0)
    factor = tl.load(factor_ptr + picked, mask=inside, other=0.0)
    rho = tl.load(rho_ptr + row_ids, mask=inside, other=0.0)
    theta = tl.load(theta_ptr + row_ids, mask=inside, other=0.0)
    theta = tl.where(factor == 0, 0.0, theta * factor)
    tl.store(rho_out_ptr + row_ids, tl.where(factor == 0, 0.0, rho * factor), mask=inside)
    tl.store(theta_out_ptr + row_ids, theta, mask=inside)
    target = tl.load(target_ptr + row_ids, mask=inside, other=-1)
    tl.store(target_out_ptr + row_ids, tl.where(theta == 0, -1, target), mask=inside)


def multiply_rows(saved: SavedRows, factor: Tensor) -> Multiplied:
    """Launches `multiply_rows_kernel` for saved rows. factor (S,) is in the order of the call."""
    rho, theta, target = saved.rho, saved.theta, saved.packed_target
    assert rho is not None
    assert target is not None
    results = Multiplied(torch.empty_like(rho), torch.empty_like(rho), torch.empty_like(target))
    arrays = rho, theta, target, saved.order, factor, *results
    launch(multiply_rows_kernel, (cdiv(len(rho), 256),), *arrays, len(rho), BLOCK=256, num_warps=4)
    return results


@triton.jit
def pick_rows_kernel(
    input_ptr,
    row_ptr,
    factor_ptr,
    result_ptr,
    hidden,
    input_stride,
    input_stride_d,
    result_stride,
    BLOCK_D: tl.constexpr,
):
    """Writes the rows row (rows,) int64 of input (N, D) times factor (rows,) to result (rows, D), rounded once. Rows of
    factor 0 become 0, because they may hold any values. One program owns a row."""
    row = tl.program_id(0).to(tl.int64)
    picked = tl.load(row_ptr + row)
    factor = tl.load(factor_ptr + row) + tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, hidden, BLOCK_D):
        columns = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        mask = (columns < hidden) & (factor != 0)
        x = tl.load(input_ptr + picked * input_stride + columns * input_stride_d, mask=mask, other=0.0).to(tl.float32)
        place = result_ptr + row * result_stride + columns
        tl.store(place, tl.where(factor == 0, 0.0, x * factor).to(result_ptr.dtype.element_ty), mask=columns < hidden)


def pick_rows(x: Tensor, result: Tensor, *, order: At, factor: At) -> None:
    """Launches `pick_rows_kernel` for as many rows as result (n, >= D) has."""
    sizes = x.shape[1], *x.stride(), result.stride(0)
    block = column_block(x.shape[1])
    launch(pick_rows_kernel, (len(result),), x, order, factor, result, *sizes, BLOCK_D=block, num_warps=4)
