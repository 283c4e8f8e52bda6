"""Matmuls of float32 operands on tensor cores, with the precision of float32.

A float32 number has 24 bits. It is the sum of three bfloat16 numbers of 8 bits each, its parts. There are two
exceptions: numbers below 2**-110 lose bits, and numbers of 3.39e38 or more become infinite. So a matmul of two float32
matrices is the sum of nine matmuls of parts. The kernel computes six. The numbers of the other three are less than
2**-25 of the result, and float32 rounds to 2**-24. Tensor cores add up one step of the inner dimension. The steps are
added in float32. Triton's compiler splits the operands.

Method: Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations (2019).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton import problem
from core_triton.launch import cdiv, launch
from linear_ce import float32_tiles

# TF32 parts are faster, but GPUs read them only along rows that are contiguous, and results must not depend on strides.
INPUT_PRECISION = "bf16x6"


@triton.jit
def float32_matmul_kernel(
    a_ptr,
    b_ptr,
    total_ptr,
    rows,
    columns,
    inner,
    a_row,
    a_inner,
    b_inner,
    b_column,
    total_row,
    total_column,
    total_part,
    part_inner,
    ADDS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Writes a tile of a @ b, or adds it, (rows, columns) float32, for `part_inner` numbers of the inner dimension.

    Reads a (rows, inner) and b (inner, columns), float32, at these strides. Programs of axis 1 have other parts of the
    inner dimension, and write matrices that are `total_part` numbers apart. EVEN: BLOCK_K divides `inner`.
    """
    row_blocks = tl.cdiv(rows, BLOCK_M)
    group = tl.program_id(0) // (GROUP * tl.cdiv(columns, BLOCK_N))
    within = tl.program_id(0) % (GROUP * tl.cdiv(columns, BLOCK_N))
    height = min(row_blocks - group * GROUP, GROUP)
    m = (group * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * part_inner
    k = tl.arange(0, BLOCK_K)
    a_ptr += first.to(tl.int64) * a_inner + m.to(tl.int64)[:, None] * a_row + k.to(tl.int64)[None, :] * a_inner
    b_ptr += first.to(tl.int64) * b_inner + k.to(tl.int64)[:, None] * b_inner + n.to(tl.int64)[None, :] * b_column
    m_inside, n_inside = m < rows, n < columns
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, min(first + part_inner, inner), BLOCK_K):
        if EVEN:
            a = tl.load(a_ptr, mask=m_inside[:, None], other=0.0)
            b = tl.load(b_ptr, mask=n_inside[None, :], other=0.0)
        else:
            k_inside = start + k < inner
            a = tl.load(a_ptr, mask=m_inside[:, None] & k_inside[None, :], other=0.0)
            b = tl.load(b_ptr, mask=k_inside[:, None] & n_inside[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=INPUT_PRECISION)
        a_ptr += BLOCK_K * tl.cast(a_inner, tl.int64)
        b_ptr += BLOCK_K * tl.cast(b_inner, tl.int64)
    inside = m_inside[:, None] & n_inside[None, :]
    total_ptr += tl.program_id(1).to(tl.int64) * total_part
    total_ptr += m.to(tl.int64)[:, None] * total_row + n.to(tl.int64)[None, :] * total_column
    if ADDS:
        total += tl.load(total_ptr, mask=inside, other=0.0)
    tl.store(total_ptr, total, mask=inside)


def add_matmul(total: Tensor, a: Tensor, b: Tensor, *, first: bool, programs: int, waves: int) -> None:
    """Adds a @ b to `total`, or overwrites it if `first`: `problem.add_matmul` for float32 operands.

    Args:
        programs: `ExecutionPlan.float32_programs`.
        waves: `ExecutionPlan.float32_waves`.
    """
    parts = 0
    if programs and total.numel() and a.numel():
        parts = float32_tiles.parts_of(len(a), b.shape[1], a.shape[1], programs, waves)
    if not parts:
        problem.add_matmul(total, a, b, first=first)
    else:
        _launch(total, a, b, parts, first=first)


def _launch(total: Tensor, a: Tensor, b: Tensor, parts: int, *, first: bool) -> None:
    (rows, inner), columns = a.shape, b.shape[1]
    written = total if parts == 1 else total.new_empty((parts, rows, columns))
    launch(
        float32_matmul_kernel,
        (float32_tiles.tiles_of(rows, columns), parts),
        a,
        b,
        written,
        rows,
        columns,
        inner,
        *a.stride(),
        *b.stride(),
        *written.stride()[-2:],
        rows * columns,
        cdiv(cdiv(inner, float32_tiles.BLOCK_K), parts) * float32_tiles.BLOCK_K,
        ADDS=parts == 1 and not first,
        EVEN=inner % float32_tiles.BLOCK_K == 0,
        BLOCK_M=float32_tiles.BLOCK,
        BLOCK_N=float32_tiles.BLOCK,
        BLOCK_K=float32_tiles.BLOCK_K,
        GROUP=float32_tiles.GROUP,
        INPUT_PRECISION=INPUT_PRECISION if a.is_cuda else "ieee",  # the interpreter multiplies in float32
        num_warps=8,
        num_stages=3,
    )
    if parts > 1:
        if not first:
            written[0] += total
        torch.sum(written, 0, out=total)
