"""Triton kernels that add the targets' terms to the head's gradient: they sort rows by target, then sum equal targets.

There are no atomics: one program adds the terms of a row of d_weight, in a fixed order. Equations: linear_ce/MATH.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton.launch import At, cdiv, column_block, launch

FEW, MANY, SPLIT = 2, 32, 8  # of `target_rows_kernel`
PART_PROGRAMS = 1024  # positions at a time of `part_targets_kernel`, of which few have a target in a part

SEGMENT = 2**13  # rows that are sorted by comparing all pairs; the sorted segments are merged by bisection


@triton.jit
def keys_of(target_ptr, rows, count, classes):
    """Returns the sort keys of rows, int32: the target, or `classes` where the target is not a class."""
    target = tl.load(target_ptr + rows, mask=rows < count, other=-1)
    return tl.where((target >= 0) & (target < classes), target, classes).to(tl.int32)


@triton.jit
def sort_kernel(
    target_ptr,
    row_ptr,
    theta_ptr,
    count_ptr,
    sorted_target_ptr,
    sorted_row_ptr,
    sorted_theta_ptr,
    classes,
    SEGMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
):
    """Sorts each segment of SEGMENT packed rows by target. Rows with equal targets keep their order.

    The place of a row is the number of rows that come before it. The kernel compares every pair of rows of a segment,
    BLOCK_N rows x BLOCK_OTHER others at a time. That takes a few instructions for each pair, and one launch instead of
    the twenty of a radix sort. Reads target (N,) int64, row (N,) int64 and theta (N,) float32 of the first count ()
    rows. Writes them in sorted order, the target as int32.
    """
    count = tl.load(count_ptr)
    first = tl.program_id(0) * BLOCK_N
    if first < count:
        row_ids = first + tl.arange(0, BLOCK_N)
        key = keys_of(target_ptr, row_ids, count, classes)
        less = tl.zeros((BLOCK_N, BLOCK_OTHER), tl.int32)
        start = first // SEGMENT * SEGMENT
        end = tl.minimum(start + SEGMENT, count)
        for begin in range(start, end, BLOCK_OTHER):
            others = begin + tl.arange(0, BLOCK_OTHER)
            other = tl.where(others < end, keys_of(target_ptr, others, count, classes), classes + 1)
            bound = key + (begin + BLOCK_OTHER <= first).to(tl.int32)  # equal ones of earlier blocks come before
            less += (other[None, :] < bound[:, None]).to(tl.int32)
        others = first // BLOCK_OTHER * BLOCK_OTHER + tl.arange(0, BLOCK_OTHER)
        equal = key[:, None] == keys_of(target_ptr, others, count, classes)[None, :]
        less += (equal & (others[None, :] < row_ids[:, None])).to(tl.int32)
        place, mask = start + tl.sum(less, 1), row_ids < count
        tl.store(sorted_target_ptr + place, key, mask=mask)
        tl.store(sorted_row_ptr + place, tl.load(row_ptr + row_ids, mask=mask, other=0), mask=mask)
        tl.store(sorted_theta_ptr + place, tl.load(theta_ptr + row_ids, mask=mask, other=0.0), mask=mask)


@triton.jit
def merge_segments_kernel(
    target_ptr,
    row_ptr,
    theta_ptr,
    count_ptr,
    sorted_target_ptr,
    sorted_row_ptr,
    sorted_theta_ptr,
    SEGMENT: tl.constexpr,
    BISECTIONS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Merges the segments that `sort_kernel` sorted. Rows with equal targets keep their order.

    Each row finds its place in every other segment by bisection, in BISECTIONS steps, 2**BISECTIONS > SEGMENT. Reads
    and writes the same arrays as `sort_kernel` wrote.
    """
    count = tl.load(count_ptr)
    first = tl.program_id(0) * BLOCK_N
    if first < count:
        position = first + tl.arange(0, BLOCK_N)
        mask = position < count
        own = first // SEGMENT * SEGMENT
        key = tl.load(target_ptr + position, mask=mask, other=0)
        place = position - own
        for start in range(0, count, SEGMENT):
            # Rows of earlier segments with keys up to this one come before, and rows of later segments with lower keys.
            bound = key + (start < own).to(tl.int32)
            low, high = tl.zeros_like(position), tl.zeros_like(position)
            high += tl.where(start == own, 0, tl.minimum(SEGMENT, count - start))
            for _ in range(BISECTIONS):
                middle = (low + high) // 2
                below = tl.load(target_ptr + start + middle, mask=low < high, other=0) < bound
                low = tl.where((low < high) & below, middle + 1, low)
                high = tl.where((low < high) & ~below, middle, high)
            place += low
        tl.store(sorted_target_ptr + place, key, mask=mask)
        tl.store(sorted_row_ptr + place, tl.load(row_ptr + position, mask=mask, other=0), mask=mask)
        tl.store(sorted_theta_ptr + place, tl.load(theta_ptr + position, mask=mask, other=0.0), mask=mask)


def sort_by_target(
    target: Tensor, order: Tensor, theta: Tensor, count: Tensor, classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns target (N,) int32, row (N,) int64 and theta (N,) of the first `count` packed rows, sorted by target."""

    def arrays() -> tuple[Tensor, Tensor, Tensor]:
        return count.new_empty(tokens), torch.empty_like(order), torch.empty_like(theta)

    tokens = len(order)
    found = arrays()
    sizes = {"SEGMENT": SEGMENT, "BLOCK_N": 32, "BLOCK_OTHER": 256}
    launch(sort_kernel, (cdiv(tokens, 32),), target, order, theta, count, *found, classes, **sizes, num_warps=8)
    if tokens > SEGMENT:
        merged = arrays()
        sizes = {"SEGMENT": SEGMENT, "BISECTIONS": SEGMENT.bit_length(), "BLOCK_N": 128}
        launch(merge_segments_kernel, (cdiv(tokens, 128),), *found, count, *merged, **sizes, num_warps=4)
        return merged
    return found


@triton.jit
def add_target_rows(
    target_ptr, row_ptr, theta_ptr, input_ptr, d_weight_ptr, d_bias_ptr, first, count, target, column, hidden,
    input_stride, input_stride_d, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums BLOCK_D columns of the run of equal targets that begins at `first`, BLOCK_R rows at a time."""
    columns = column + tl.arange(0, BLOCK_D)
    inside = columns < hidden
    if HAS_WEIGHT:
        place = d_weight_ptr + target.to(tl.int64) * hidden + columns
        old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    acc_bias = tl.zeros((BLOCK_R,), dtype=tl.float32)
    position = first
    while position < count:
        positions = position + tl.arange(0, BLOCK_R)
        within = positions < count
        member = tl.load(target_ptr + positions, mask=within, other=-1) == target
        row = tl.load(row_ptr + positions, mask=within, other=0)
        theta = tl.where(member, tl.load(theta_ptr + positions, mask=within, other=0.0), 0.0)
        if HAS_WEIGHT:
            source = input_ptr + row[:, None] * input_stride + columns.to(tl.int64)[None, :] * input_stride_d
            acc += theta[:, None] * tl.load(source, mask=member[:, None] & inside[None, :], other=0.0).to(tl.float32)
        acc_bias += theta
        position = tl.where(tl.min(member.to(tl.int32), 0) == 0, count, position + BLOCK_R)
    if HAS_WEIGHT:
        tl.store(place, (old + tl.sum(acc, 0)).to(d_weight_ptr.dtype.element_ty), mask=inside)
    if HAS_BIAS and column == 0:
        tl.store(d_bias_ptr + target, tl.load(d_bias_ptr + target) + tl.sum(acc_bias, 0))


@triton.jit
def add_run(
    target_ptr, row_ptr, theta_ptr, count, input_ptr, d_weight_ptr, d_bias_ptr, position, column, hidden, classes,
    input_stride, input_stride_d, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, FEW: tl.constexpr,
    MANY: tl.constexpr, SPLIT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Does what the program at `position` does for BLOCK_D columns: `target_rows_kernel`."""
    target = tl.load(target_ptr + position)
    before = position - 1 - tl.arange(0, SPLIT)
    equal = tl.load(target_ptr + before, mask=before >= 0, other=-1) == target
    offset = tl.sum(equal.to(tl.int32), 0)  # within the run, as far as SPLIT
    if (target < classes) & (offset < SPLIT):
        first = position - offset
        last = first + MANY - 1
        if tl.load(target_ptr + last, mask=last < count, other=-1) == target:
            add_target_rows(
                target_ptr, row_ptr, theta_ptr, input_ptr, d_weight_ptr, d_bias_ptr, first, count, target,
                column + offset * (BLOCK_D // SPLIT), hidden, input_stride, input_stride_d, HAS_WEIGHT, HAS_BIAS,
                MANY, BLOCK_D // SPLIT,
            )  # fmt: skip
        elif offset == 0:
            add_target_rows(
                target_ptr, row_ptr, theta_ptr, input_ptr, d_weight_ptr, d_bias_ptr, first, count, target,
                column, hidden, input_stride, input_stride_d, HAS_WEIGHT, HAS_BIAS, FEW, BLOCK_D,
            )  # fmt: skip


@triton.jit
def target_rows_kernel(
    target_ptr,
    row_ptr,
    theta_ptr,
    count_ptr,
    input_ptr,
    d_weight_ptr,
    d_bias_ptr,
    hidden,
    classes,
    input_stride,
    input_stride_d,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds the targets' terms, theta * input, to their rows of d_weight and d_bias: (33).

    Reads the sorted rows and input (N, D). Adds to d_weight (V, D) and d_bias (V,) float32. The rows of a run of equal
    targets are summed in float32, in order, and rounded once. A program owns a position and BLOCK_D columns. Most runs
    are short: the program at the first position of the run sums it, FEW rows at a time. A few runs contain a tenth of
    all rows. In runs of MANY rows or more, the programs at the first SPLIT positions divide the columns.
    """
    position, column = tl.program_id(0), tl.program_id(1) * BLOCK_D
    count = tl.load(count_ptr)
    if position < count:
        add_run(
            target_ptr, row_ptr, theta_ptr, count, input_ptr, d_weight_ptr, d_bias_ptr, position, column, hidden,
            classes, input_stride, input_stride_d, HAS_WEIGHT, HAS_BIAS, FEW, MANY, SPLIT, BLOCK_D,
        )  # fmt: skip


@triton.jit
def part_targets_kernel(
    place_ptr,
    row_ptr,
    theta_ptr,
    bound_ptr,
    input_ptr,
    sum_ptr,
    first,
    hidden,
    input_stride,
    input_stride_d,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds theta * input to the targets' places of a part, sum (ranks * n, D) float32, which are `first` and more.

    Reads rows sorted by place, of which this part has those from bound (2,) int32 to the next one, and input (N, D).
    `target_rows_kernel` says how a run of equal places is summed. A program owns positions, and BLOCK_D columns.
    """
    column, last = tl.program_id(1) * BLOCK_D, tl.load(bound_ptr + 1)
    start_ptr = sum_ptr - tl.cast(first, tl.int64) * hidden
    for position in range(tl.load(bound_ptr) + tl.program_id(0), last, tl.num_programs(0)):
        add_run(
            place_ptr, row_ptr, theta_ptr, last, input_ptr, start_ptr, None, position, column, hidden, 2147483647,
            input_stride, input_stride_d, True, False, FEW, MANY, SPLIT, BLOCK_D,
        )  # fmt: skip


def add_targets(
    x: Tensor,
    target: Tensor,
    row: Tensor,
    theta: Tensor,
    count: Tensor,
    classes: int,
    *,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """Launches `target_rows_kernel` on rows that `sort_by_target` sorted. x has all rows that are classes; without
    d_weight it is not read, and may have fewer."""
    hidden = x.shape[1]
    block = column_block(hidden)
    launch(
        target_rows_kernel,
        (len(target), 1) if d_weight is None else (len(x), cdiv(hidden, block)),
        target,
        row,
        theta,
        count,
        x,
        d_weight,
        d_bias,
        hidden,
        classes,
        *x.stride(),
        HAS_WEIGHT=d_weight is not None,
        HAS_BIAS=d_bias is not None,
        FEW=FEW,
        MANY=MANY,
        SPLIT=SPLIT,
        BLOCK_D=block,
        num_warps=4,
    )


def add_targets_of_part(
    d_weight: Tensor, x: Tensor, target: Tensor, row: Tensor, theta: Tensor, bounds: At, *, first: int
) -> None:
    """Launches `part_targets_kernel` on a part of d_weight (..., D), whose first class is `first`, and rows that
    `sort_by_target` sorted, of which `bounds` has the first one of this part and of the next."""
    (tokens, hidden), block = x.shape, column_block(x.shape[1])
    launch(
        part_targets_kernel,
        (min(tokens, PART_PROGRAMS), cdiv(hidden, block)),
        target,
        row,
        theta,
        bounds,
        x,
        d_weight,
        first,
        hidden,
        *x.stride(),
        FEW=FEW,
        MANY=MANY,
        SPLIT=SPLIT,
        BLOCK_D=block,
        num_warps=4,
    )
