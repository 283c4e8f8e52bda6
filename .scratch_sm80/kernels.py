"""Variants of the exponentials kernel for compute capability 8.x. Throw-away code."""

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from core_triton.kernels import LOG2_E, SUM_LIMIT, tile_of


# ---- Triton: one tile per program, rows clamped instead of masked, no masks along D where it is even.


@triton.jit
def rows_clamped(matrix, stride, first, rows, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to columns 0, 1, ... BLOCK_D of BLOCK rows. Rows past the end repeat the last row."""
    row_ids = tl.minimum(tl.arange(0, BLOCK), rows - 1 - first)
    row_stride = stride // 8 * 8
    return matrix + first.to(tl.int64) * row_stride, row_ids[:, None] * row_stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def tile_kernel(
    x_matrix, x_stride, w_matrix, w_stride, e_matrix, e_stride, target_ptr, ref_exponent_ptr, flag_ptr, sum_ptr,
    target_logit_ptr, first_class, rows, hidden, classes, scale,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    row_blocks, class_blocks = tl.cdiv(rows, BLOCK_N), tl.cdiv(classes, BLOCK_V)
    row_block, class_block = tile_of(tl.program_id(0), row_blocks, class_blocks, GROUP)
    row, column = row_block * BLOCK_N, class_block * BLOCK_V
    x_base, x_offsets = rows_clamped(x_matrix, x_stride, row, rows, BLOCK_N, BLOCK_D)
    w_base, w_offsets = rows_clamped(w_matrix, w_stride, column, classes, BLOCK_V, BLOCK_D)
    raw = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for k in range(0, hidden, BLOCK_D):
        if EVEN_D:
            x = tl.load(x_base + x_offsets)
            w = tl.load(w_base + w_offsets)
        else:
            inside = (tl.arange(0, BLOCK_D) < tl.cdiv(hidden - k, 8) * 8)[None, :]
            x = tl.load(x_base + x_offsets, mask=inside, other=0.0)
            w = tl.load(w_base + w_offsets, mask=inside, other=0.0)
        raw = tl.dot(x, w.T, raw)
        x_base += BLOCK_D
        w_base += BLOCK_D
    logits = raw * scale
    row_ids = row + tl.arange(0, BLOCK_N)
    columns = column + tl.arange(0, BLOCK_V)
    inside = row_ids < rows
    ref_exponent = tl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
    if column + BLOCK_V > classes:
        logits = tl.where((columns < classes)[None, :], logits, float("-inf"))
    target = tl.load(target_ptr + row_ids, mask=inside, other=-1) - first_class
    owns = inside & (target >= column) & (target < min(column + BLOCK_V, classes))
    if tl.max(owns.to(tl.int32), 0) != 0:
        place = tl.where(owns, target - column, -1).to(tl.int32)
        here = tl.arange(0, BLOCK_V)[None, :] == place[:, None]
        tl.store(target_logit_ptr + row_ids, tl.sum(tl.where(here, logits, 0.0), 1), mask=owns)
    exponentials = tl.exp2(logits * LOG2_E - ref_exponent[:, None])
    total = tl.sum(exponentials, 1)
    tl.store(sum_ptr + class_block.to(tl.int64) * rows + row_ids, total, mask=inside)
    tl.store(flag_ptr + row_block + tl.zeros_like(row_ids), 1, mask=inside & ~(total < SUM_LIMIT))
    e_row_stride = e_stride // 8 * 8
    e_start = e_matrix + row.to(tl.int64) * e_row_stride + column
    e_inside = inside[:, None] & (columns < tl.cdiv(classes, 8) * 8)[None, :]
    e_offsets = tl.arange(0, BLOCK_N)[:, None] * e_row_stride + tl.arange(0, BLOCK_V)[None, :]
    tl.store(e_start + e_offsets, exponentials.to(tl.bfloat16), mask=e_inside)


# ---- Gluon: operands of the next 16 hidden units are read to registers while the current ones are multiplied.


@gluon.jit
def copy_step(x_s, w_s, x_base, x_offsets, w_base, w_offsets, k, hidden, x_column, w_column, EVEN_D: gl.constexpr):
    if EVEN_D:
        x_inside = (k + x_column * 0) < hidden
        w_inside = (k + w_column * 0) < hidden
    else:
        end = gl.cdiv(hidden, 8) * 8
        x_inside = (k + x_column) < end
        w_inside = (k + w_column) < end
    async_copy.async_copy_global_to_shared(x_s, x_base + k + x_offsets, mask=gl.expand_dims(x_inside, 0))
    async_copy.async_copy_global_to_shared(w_s, w_base + k + w_offsets, mask=gl.expand_dims(w_inside, 0))
    async_copy.commit_group()


@gluon.jit
def gluon_kernel(
    x_matrix, x_stride, w_matrix, w_stride, e_matrix, e_stride, target_ptr, ref_exponent_ptr, flag_ptr, sum_ptr,
    target_logit_ptr, first_class, rows, hidden, classes, scale,
    BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr, GROUP: gl.constexpr, EVEN_D: gl.constexpr,
    STAGES: gl.constexpr, WARPS_N: gl.constexpr, WARPS_V: gl.constexpr, BRANCH: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = WARPS_N * WARPS_V
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_N, WARPS_V], [16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    per_row: gl.constexpr = BLOCK_D // 8
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // per_row, per_row], [warps, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2 if BLOCK_D == 32 else 1, 4 if BLOCK_D == 32 else 8, [1, 0])
    SLICES: gl.constexpr = BLOCK_D // 16

    row_blocks, class_blocks = gl.cdiv(rows, BLOCK_N), gl.cdiv(classes, BLOCK_V)
    row_block, class_block = tile_of(gl.program_id(0), row_blocks, class_blocks, GROUP)
    row, column = row_block * BLOCK_N, class_block * BLOCK_V
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_D], shared)
    w_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_V, BLOCK_D], shared)
    column_ids = gl.arange(0, BLOCK_D, gl.SliceLayout(0, load_layout))
    x_ids = gl.minimum(gl.arange(0, BLOCK_N, gl.SliceLayout(1, load_layout)), rows - 1 - row)
    w_ids = gl.minimum(gl.arange(0, BLOCK_V, gl.SliceLayout(1, load_layout)), classes - 1 - column)
    x_row_stride, w_row_stride = x_stride // 8 * 8, w_stride // 8 * 8
    x_offsets = gl.expand_dims(x_ids * x_row_stride, 1) + gl.expand_dims(column_ids, 0)
    w_offsets = gl.expand_dims(w_ids * w_row_stride, 1) + gl.expand_dims(column_ids, 0)
    x_base = x_matrix + row.to(gl.int64) * x_row_stride
    w_base = w_matrix + column.to(gl.int64) * w_row_stride
    for s in gl.static_range(STAGES):
        copy_step(
            x_s.index(s), w_s.index(s), x_base, x_offsets, w_base, w_offsets, s * BLOCK_D, hidden, column_ids,
            column_ids, EVEN_D,
        )  # fmt: skip
    acc = gl.zeros([BLOCK_N, BLOCK_V], gl.float32, mma)
    async_copy.wait_group(STAGES - 1)
    a = x_s.index(0).slice(0, 16, 1).load(a_layout)
    b = w_s.index(0).slice(0, 16, 1).permute([1, 0]).load(b_layout)
    stage = 0
    for k in range(0, hidden, BLOCK_D):
        x_now, w_now = x_s.index(stage), w_s.index(stage)
        for j in gl.static_range(SLICES - 1):
            next_a = x_now.slice(16 * (j + 1), 16, 1).load(a_layout)
            next_b = w_now.slice(16 * (j + 1), 16, 1).permute([1, 0]).load(b_layout)
            acc = mma_v2(a, b, acc)
            a, b = next_a, next_b
        after = gl.where(stage == STAGES - 1, 0, stage + 1)
        # Step k + 1 is loaded, and all warps have read step k: its memory is free.
        async_copy.wait_group(STAGES - 2)
        copy_step(
            x_now, w_now, x_base, x_offsets, w_base, w_offsets, k + STAGES * BLOCK_D, hidden, column_ids,
            column_ids, EVEN_D,
        )  # fmt: skip
        next_a = x_s.index(after).slice(0, 16, 1).load(a_layout)
        next_b = w_s.index(after).slice(0, 16, 1).permute([1, 0]).load(b_layout)
        acc = mma_v2(a, b, acc)
        a, b = next_a, next_b
        stage = after
    async_copy.wait_group(0)

    logits = acc * scale
    row_ids = row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
    columns = column + gl.arange(0, BLOCK_V, gl.SliceLayout(0, mma))
    inside = row_ids < rows
    ref_exponent = gl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
    if column + BLOCK_V > classes:
        logits = gl.where(gl.expand_dims(columns < classes, 0), logits, float("-inf"))
    target = gl.load(target_ptr + row_ids, mask=inside, other=-1) - first_class
    place = gl.where(target < classes, target, -1).to(gl.int32) - column
    here = gl.expand_dims(columns - column, 0) == gl.expand_dims(place, 1)
    if BRANCH:
        owns = (place >= 0) & (place < BLOCK_V)
        if gl.max(owns.to(gl.int32), 0) != 0:
            gl.store(target_logit_ptr + gl.expand_dims(row_ids, 1) + gl.expand_dims(columns * 0, 0), logits, mask=here)
    else:
        gl.store(target_logit_ptr + gl.expand_dims(row_ids, 1) + gl.expand_dims(columns * 0, 0), logits, mask=here)
    power = logits * LOG2_E - gl.expand_dims(ref_exponent, 1)
    exponentials = gl.exp2(power)
    total = gl.sum(exponentials, 1)
    gl.store(sum_ptr + class_block.to(gl.int64) * rows + row_ids, total, mask=inside)
    gl.store(flag_ptr + row_block + row_ids * 0, 1, mask=inside & ~(total < SUM_LIMIT))
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    result = gl.convert_layout(exponentials.to(gl.bfloat16), store_layout)
    e_rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, store_layout))
    e_columns = gl.arange(0, BLOCK_V, gl.SliceLayout(0, store_layout))
    e_row_stride = e_stride // 8 * 8
    e_start = e_matrix + row.to(gl.int64) * e_row_stride + column
    e_inside = gl.expand_dims(e_rows < rows - row, 1) & gl.expand_dims(column + e_columns < gl.cdiv(classes, 8) * 8, 0)
    gl.store(
        e_start + (gl.expand_dims(e_rows * e_row_stride, 1) + gl.expand_dims(e_columns, 0)), result, mask=e_inside
    )
