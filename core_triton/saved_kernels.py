"""Triton kernels for the rows that are saved for the backward pass: their factors, once the upstream gradients are
known. Equations: linear_ce/MATH.md.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton.launch import At, cdiv, column_block, launch
from core_triton.problem import SavedRows


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
