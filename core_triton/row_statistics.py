"""Triton kernels that merge what the tiles of logits say about their rows: statistics, and which rows are kept.

They sum over class blocks in a fixed order. Equations: linear_ce/MATH.md.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from core_triton.kernels import (
    ARGMAX,
    ENTROPY,
    LOG2_E,
    LOGIT_SUM,
    MAX,
    NO_CLASS,
    OF_MAX,
    SQUARES,
    SUM_LIMIT,
    planes,
)
from core_triton.launch import At, cdiv, launch
from core_triton.problem import Problem
from core_triton.row_kernels import BLOCKS_AT_ONCE, FINISHED_ROWS, LN_2, SMALL_BLOCK, column_maxima, column_sums
from linear_ce import statistics as bits


@triton.jit
def keep_rows_kernel(sum_ptr, top_ptr, rows, class_blocks, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Sets top (rows,) to inf where no sum (class blocks, rows) is too large, so that `kernels.repair_kernel` keeps the
    row. One program owns BLOCK_N rows."""
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lost = tl.zeros((BLOCK_T, BLOCK_N), tl.int32)
    for start in range(0, class_blocks, BLOCK_T):
        blocks = start + tl.arange(0, BLOCK_T)
        mask = (blocks < class_blocks)[:, None] & (row_ids < rows)[None, :]
        place = blocks.to(tl.int64)[:, None] * rows + row_ids[None, :]
        lost |= (~(tl.load(sum_ptr + place, mask=mask, other=0.0) < SUM_LIMIT)).to(tl.int32)
    tl.store(top_ptr + row_ids, float("inf"), mask=(row_ids < rows) & (tl.max(lost, 0) == 0))


def keep_rows(n: int, class_blocks: int, *, sums: At, top: At) -> None:
    """Launches `keep_rows_kernel` for n packed rows."""
    blocks = {"BLOCK_N": SMALL_BLOCK, "BLOCK_T": BLOCKS_AT_ONCE}
    launch(keep_rows_kernel, (cdiv(n, SMALL_BLOCK),), sums, top, n, class_blocks, **blocks, num_warps=4)


@triton.jit
def first_of_largest(
    max_ptr, top, row_ids, rows, stride, class_blocks, block_width, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Returns the lowest class with the largest logit, top (BLOCK_N,), int32. Reads the largest logits of class blocks
    of block_width classes and, `rows` elements behind each, the column in its class block. `stride` is from one class
    block to the next."""
    inside = row_ids < rows
    first = tl.full((BLOCK_T, BLOCK_N), NO_CLASS, tl.int32)
    for start in range(0, class_blocks, BLOCK_T):
        blocks = start + tl.arange(0, BLOCK_T)
        mask = (blocks < class_blocks)[:, None] & inside[None, :]
        place = max_ptr + blocks.to(tl.int64)[:, None] * stride + row_ids[None, :]
        here = mask & (tl.load(place, mask=mask, other=0.0) == top[None, :])
        column = tl.load(place + rows, mask=here, other=0.0).to(tl.int32)
        first = tl.minimum(first, tl.where(here, blocks[:, None] * block_width + column, NO_CLASS))
    return tl.min(first, 0)


@triton.jit
def finish_statistics_kernel(
    sum_ptr,
    statistic_ptr,
    row_weight_ptr,
    row_ptr,
    max_out_ptr,
    argmax_out_ptr,
    entropy_out_ptr,
    mean_logit_out_ptr,
    sum_squared_probs_out_ptr,
    rows,
    class_blocks,
    block_width,
    classes,
    STATISTICS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Writes the statistics of packed rows, (N,) each, at the rows row (rows,) int64 of the call: (43), (44).

    Reads sum (class blocks, rows), and what `kernels.store_statistics` writes, (class blocks, statistics, rows). Class
    blocks have block_width classes. The results are 0 for rows of row_weight 0. One program owns BLOCK_N rows.
    """
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    stride = planes(STATISTICS) * rows
    total = column_sums(sum_ptr, row_ids, rows, rows, class_blocks, BLOCK_N, BLOCK_T)
    total = tl.where(total == float("inf"), float("nan"), total)
    contributes = tl.load(row_weight_ptr + row_ids, mask=inside, other=0.0) != 0
    out = tl.load(row_ptr + row_ids, mask=inside, other=0)
    at = statistic_ptr
    if MAX & STATISTICS:
        top = column_maxima(at, row_ids, rows, stride, class_blocks, BLOCK_N, BLOCK_T)
        tl.store(max_out_ptr + out, tl.where(contributes, top, 0.0), mask=inside)
        if ARGMAX & STATISTICS:
            first = first_of_largest(at, top, row_ids, rows, stride, class_blocks, block_width, BLOCK_N, BLOCK_T)
            argmax = tl.where((total > 0) & (total < float("inf")), first, -1)
            tl.store(argmax_out_ptr + out, tl.where(contributes, argmax, 0).to(tl.int64), mask=inside)
            at += rows
        at += rows
    if ENTROPY & STATISTICS:
        # An integer near log2(total) is subtracted first. Otherwise both terms are as large as the negative
        # log-likelihood of the target.
        shift = tl.minimum(tl.maximum(tl.floor(tl.log2(total)), -64.0), 64.0)
        exp_log = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for start in range(0, class_blocks, BLOCK_T):
            blocks = start + tl.arange(0, BLOCK_T)
            mask = (blocks < class_blocks)[:, None] & inside[None, :]
            block = blocks.to(tl.int64)[:, None]
            part = tl.load(sum_ptr + block * rows + row_ids[None, :], mask=mask, other=0.0)
            exp_log += tl.load(at + block * stride + row_ids[None, :], mask=mask, other=0.0) - shift[None, :] * part
        entropy = (tl.log2(total * tl.exp2(-shift)) - tl.sum(exp_log, 0) / total) * LN_2
        tl.store(entropy_out_ptr + out, tl.where(contributes, entropy, 0.0), mask=inside)
        at += rows
    if LOGIT_SUM & STATISTICS:
        mean = column_sums(at, row_ids, rows, stride, class_blocks, BLOCK_N, BLOCK_T) / classes
        tl.store(mean_logit_out_ptr + out, tl.where(contributes, mean, 0.0), mask=inside)
        at += rows
    if SQUARES & STATISTICS:
        squares = column_sums(at, row_ids, rows, stride, class_blocks, BLOCK_N, BLOCK_T)
        squares = squares / total / total  # the square of the total may be infinite
        tl.store(sum_squared_probs_out_ptr + out, tl.where(contributes, squares, 0.0), mask=inside)


class LogitStatistics(NamedTuple):
    """Statistics of the rows of a call, (N,) float32, argmax int64; None if not computed."""

    max: Tensor | None
    argmax: Tensor | None
    entropy: Tensor | None
    mean_logit: Tensor | None
    sum_squared_probs: Tensor | None


def finish_statistics(
    problem: Problem,
    n: int,
    class_blocks: int,
    block_width: int,
    statistics: int,
    *,
    sums: At,
    of_logits: At,
    row_weight: At,
    order: At,
    results: LogitStatistics,
) -> None:
    """Launches `finish_statistics_kernel` for n packed rows."""
    launch(
        finish_statistics_kernel,
        (cdiv(n, FINISHED_ROWS),),
        sums,
        of_logits,
        row_weight,
        order,
        *results,
        n,
        class_blocks,
        block_width,
        problem.classes,
        STATISTICS=statistics,
        BLOCK_N=FINISHED_ROWS,
        BLOCK_T=BLOCKS_AT_ONCE,
        num_warps=4,
    )


@triton.jit
def merge_kernel(
    max_ptr,
    sum_ptr,
    weighted_sum_ptr,
    sum_exp_log_ptr,
    argmax_ptr,
    sum_squared_ptr,
    rows,
    class_blocks,
    block_width,
    WEIGHTED: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Merges what `kernels.statistics_kernel` writes over class blocks of block_width classes into the first row of
    each array: (26), (43). Writes argmax (rows,) int64 and sum_squared (rows,) if they are in STATISTICS. One program
    owns BLOCK_N rows."""
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    stride = planes(MAX | OF_MAX & STATISTICS) * rows
    top = column_maxima(max_ptr, row_ids, rows, stride, class_blocks, BLOCK_N, BLOCK_T)
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    weighted = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    logs = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    first = tl.full((BLOCK_T, BLOCK_N), NO_CLASS, tl.int32)
    for start in range(0, class_blocks, BLOCK_T):
        blocks = start + tl.arange(0, BLOCK_T)
        mask = (blocks < class_blocks)[:, None] & inside[None, :]
        place = blocks.to(tl.int64)[:, None] * rows + row_ids[None, :]
        at = max_ptr + blocks.to(tl.int64)[:, None] * stride + row_ids[None, :]
        part_top = tl.load(at, mask=mask, other=float("-inf"))
        masked = part_top == float("-inf")  # all logits of the block are -inf: its sums are 0
        shift = tl.where(masked, 0.0, part_top - top[None, :])
        factor = tl.where(masked, 0.0, tl.exp2(shift * LOG2_E))
        part = tl.load(sum_ptr + place, mask=mask, other=0.0)
        total += factor * part
        if ARGMAX & STATISTICS:
            at += rows
            here = mask & (part_top == top[None, :])
            column = tl.load(at, mask=here, other=0.0).to(tl.int32)
            first = tl.minimum(first, tl.where(here, blocks[:, None] * block_width + column, NO_CLASS))
        if SQUARES & STATISTICS:
            squares += factor * factor * tl.load(at + rows, mask=mask, other=0.0)
        if ENTROPY & STATISTICS:
            logs += factor * (tl.load(sum_exp_log_ptr + place, mask=mask, other=0.0) + shift * part)
        if WEIGHTED:
            weighted += tl.load(weighted_sum_ptr + place, mask=mask, other=0.0)
    tl.store(sum_ptr + row_ids, tl.sum(total, 0), mask=inside)
    if ENTROPY & STATISTICS:
        tl.store(sum_exp_log_ptr + row_ids, tl.sum(logs, 0), mask=inside)
    if ARGMAX & STATISTICS:
        tl.store(argmax_ptr + row_ids, tl.min(first, 0).to(tl.int64), mask=inside)
    if SQUARES & STATISTICS:
        tl.store(sum_squared_ptr + row_ids, tl.sum(squares, 0), mask=inside)
    if WEIGHTED:
        tl.store(weighted_sum_ptr + row_ids, tl.sum(weighted, 0), mask=inside)
    tl.store(max_ptr + row_ids, top, mask=inside)


merge_kernel_by_row = triton.jit(do_not_specialize=["rows"])(merge_kernel.fn)  # `finish_rows_kernel_by_row` says why


def merge(
    tops: Tensor,
    sums: Tensor,
    weighted_sums: Tensor | None,
    sums_exp_log: Tensor | None,
    argmax: Tensor | None,
    sum_squared: Tensor | None,
    statistics: int,
    class_blocks: int,
    block_width: int,
    n: int,
) -> None:
    """Launches `merge_kernel`: merges statistics (class blocks, n) over class blocks into their first row."""
    launch(
        merge_kernel_by_row if statistics & bits.BY_ROW else merge_kernel,
        (cdiv(n, SMALL_BLOCK),),
        tops,
        sums,
        weighted_sums,
        sums_exp_log,
        argmax,
        sum_squared,
        n,
        class_blocks,
        block_width,
        WEIGHTED=weighted_sums is not None,
        STATISTICS=statistics & ~bits.BY_ROW,
        BLOCK_N=SMALL_BLOCK,
        BLOCK_T=BLOCKS_AT_ONCE,
        num_warps=4,
    )
