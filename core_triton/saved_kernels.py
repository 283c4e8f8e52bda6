"""Triton kernels for the rows that are saved for the backward pass: zeros in place of NaN, powers of two of float16,
and the factors of rows once the upstream gradients are known. Equations: linear_ce/MATH.md.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton.float16 import exponent_of, power_of_two
from core_triton.kernels import LOG2_E
from core_triton.launch import At, cdiv, column_block, launch
from core_triton.packed_rows import ChunkNumbers
from core_triton.problem import SavedRows
from core_triton.row_kernels import BLOCKS_AT_ONCE, SMALL_BLOCK, column_sums


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


@triton.jit
def scale_units_kernel(
    sum_ptr, ref_exponent_ptr, target_logit_ptr, row_ptr, rho_ptr, theta_ptr, scale_out_ptr, rows, class_blocks,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Divides rho and theta (rows,) by a power of two, so that the larger of |theta| and |rho| times the sum of the
    other exponentials is between 1/2 and 1: (52). Writes it to scale_out (N,) at the rows row (rows,) int64 of the
    call. It is 1 where the factors are 0 or not finite.

    Reads sum (class_blocks, rows), and ref_exponent and target_logit (rows,). One program owns BLOCK_N rows.
    """
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    total = column_sums(sum_ptr, row_ids, rows, rows, class_blocks, BLOCK_N, BLOCK_T)
    ref_exponent = tl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
    target_logit = tl.load(target_logit_ptr + row_ids, mask=inside, other=0.0)
    rho = tl.load(rho_ptr + row_ids, mask=inside, other=0.0)
    theta = tl.load(theta_ptr + row_ids, mask=inside, other=0.0)
    # Where the target has all of the sum in float32, the others have less than its last bit.
    rest = tl.maximum(total - tl.exp2(target_logit * LOG2_E - ref_exponent), total * 2.0**-24)
    magnitude = tl.maximum(tl.abs(rho) * rest, tl.abs(theta))
    usable = (magnitude > 0) & (magnitude < float("inf")) & (rho != 0)
    exponent = tl.minimum(tl.maximum(exponent_of(tl.where(usable, magnitude, 0.5)) + 1, -126), 126)
    tl.store(rho_ptr + row_ids, rho * power_of_two(-exponent), mask=inside)
    tl.store(theta_ptr + row_ids, theta * power_of_two(-exponent), mask=inside)
    row = tl.load(row_ptr + row_ids, mask=inside, other=0)
    tl.store(scale_out_ptr + row, power_of_two(exponent), mask=inside)


def scale_units(numbers: ChunkNumbers, n: int, *, order: At, rho: At, theta: At, scale_out: Tensor) -> None:
    """Launches `scale_units_kernel` for n packed rows, after `row_kernels.finish_rows`. rho is relative to the
    reference exponents of `numbers`."""
    arrays = numbers.sums, numbers.ref_exponent, numbers.target_logit, order, rho, theta, scale_out
    blocks = {"BLOCK_N": SMALL_BLOCK, "BLOCK_T": BLOCKS_AT_ONCE}
    launch(scale_units_kernel, (cdiv(n, SMALL_BLOCK),), *arrays, n, numbers.class_blocks, **blocks, num_warps=4)


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
