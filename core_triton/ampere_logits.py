"""The exponentials of `kernels.py` for compute capability 8.x and 16 bits, in Triton's Gluon dialect.

Triton's own pipelining copies the next steps of the matmul asynchronously (cp.async). But at each step it first waits
for a step's operands, then reads all of them from shared memory (ldmatrix), and only then multiplies, so the tensor
cores wait for the reads. Here the next 16 hidden units are read to registers while the current ones are multiplied,
also from one step to the next. A program computes one tile. A multiprocessor runs two programs of four warps, so that
one multiplies while the other is in its epilogue.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from core_triton.hopper_common import quarters
from core_triton.hopper_logits import Head, masked, to_logits
from core_triton.kernels import LOG2_E, NOT_SPECIALIZED, SUM_LIMIT, Active, TileBlocks, launch_tiles, slope, tile_of
from core_triton.launch import At
from core_triton.problem import Problem, plan_of

SLICE = gl.constexpr(16)  # hidden units of a matrix instruction (mma.sync)

UNIT = gl.constexpr(8)  # elements of a copy of 16 bytes

OUTSIDE = gl.constexpr(2**30)  # in place of a hidden unit: more than any, so that zeros are copied


class Operand(NamedTuple):
    """The steps of an operand of a tile's matmul in global memory: (rows, BLOCK_D), or (BLOCK_D, columns) of a head
    stored as (D, V)."""

    base: Any  # the pointer to the first element of the first step
    stride: Any  # elements from one hidden unit to the next
    offsets: Any  # of a step's elements
    hidden_ids: Any  # the hidden units of a step's elements; OUTSIDE for columns past the last


@gluon.jit
def rows_of(matrix, stride, first, rows, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr, layout: gl.constexpr):
    """Returns the operand of BLOCK rows from `first` on. In place of rows past the last, the last is read again."""
    row_ids = gl.minimum(gl.arange(0, BLOCK, gl.SliceLayout(1, layout)), rows - 1 - first)
    hidden_ids = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    row_stride = stride // UNIT * UNIT  # `kernels.block_pointers`
    offsets = gl.expand_dims(row_ids * row_stride, 1) + gl.expand_dims(hidden_ids, 0)
    return Operand(matrix + first.to(gl.int64) * row_stride, 1, offsets, gl.expand_dims(hidden_ids, 0))


@gluon.jit
def columns_of(matrix, stride, first, columns, BLOCK: gl.constexpr, BLOCK_D: gl.constexpr, layout: gl.constexpr):
    """Returns the operand of BLOCK columns from `first` on, with zeros past the last."""
    column_ids = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    hidden_ids = gl.arange(0, BLOCK_D, gl.SliceLayout(1, layout))
    row_stride = stride // UNIT * UNIT
    offsets = gl.expand_dims(hidden_ids * row_stride, 1) + gl.expand_dims(column_ids, 0)
    inside = gl.expand_dims(first + column_ids < gl.cdiv(columns, UNIT) * UNIT, 0)
    return Operand(
        matrix + first, row_stride.to(gl.int64), offsets, gl.where(inside, gl.expand_dims(hidden_ids, 1), OUTSIDE)
    )


@gluon.jit
def copy_operand(buffer, operand, k, end):
    """Starts to copy the step of an operand at hidden unit k. Hidden units from `end` on become zeros."""
    pointers = operand.base + k * operand.stride + operand.offsets
    async_copy.async_copy_global_to_shared(buffer, pointers, mask=k + operand.hidden_ids < end)


@gluon.jit
def read_slice(x_buffer, w_buffer, i: gl.constexpr, mma: gl.constexpr, W_BY_CLASS: gl.constexpr):
    """Reads the slice `i` of a step to registers: x (BLOCK_N, SLICE) and w (SLICE, BLOCK_V)."""
    a = x_buffer.slice(SLICE * i, SLICE, 1).load(gl.DotOperandLayout(0, mma, 2))
    if W_BY_CLASS:
        b = w_buffer.slice(SLICE * i, SLICE, 1).permute([1, 0]).load(gl.DotOperandLayout(1, mma, 2))
    else:
        b = w_buffer.slice(SLICE * i, SLICE, 0).load(gl.DotOperandLayout(1, mma, 2))
    return a, b


@gluon.jit
def multiply_tile(
    x, w, x_buffers, w_buffers, hidden, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr,
    mma: gl.constexpr, W_BY_CLASS: gl.constexpr,
):  # fmt: skip
    """Returns x @ w of a tile, (BLOCK_N, BLOCK_V) float32."""
    STAGES: gl.constexpr = x_buffers.shape[0]
    SLICES: gl.constexpr = BLOCK_D // SLICE
    end = gl.cdiv(hidden, UNIT) * UNIT  # of a row: rows start at multiples of 16 bytes, so these elements can be read
    w_end = end if W_BY_CLASS else hidden  # hidden units of a head stored as (D, V) are rows
    for stage in gl.static_range(STAGES):
        copy_operand(x_buffers.index(stage), x, stage * BLOCK_D, end)
        copy_operand(w_buffers.index(stage), w, stage * BLOCK_D, w_end)
        async_copy.commit_group()
    acc = gl.zeros([BLOCK_N, BLOCK_V], gl.float32, mma)
    async_copy.wait_group(STAGES - 1)
    a, b = read_slice(x_buffers.index(0), w_buffers.index(0), 0, mma, W_BY_CLASS)
    stage = 0
    for k in range(0, hidden, BLOCK_D):
        x_now, w_now = x_buffers.index(stage), w_buffers.index(stage)
        for i in gl.static_range(1, SLICES):
            next_a, next_b = read_slice(x_now, w_now, i, mma, W_BY_CLASS)
            acc = mma_v2(a, b, acc)
            a, b = next_a, next_b
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        # The next step has arrived, and all warps have read this step. The step that replaces it is copied before the
        # next slice is read: otherwise the compiler adds a barrier.
        async_copy.wait_group(STAGES - 2)
        copy_operand(x_now, x, k + STAGES * BLOCK_D, end)
        copy_operand(w_now, w, k + STAGES * BLOCK_D, w_end)
        async_copy.commit_group()
        next_a, next_b = read_slice(x_buffers.index(stage), w_buffers.index(stage), 0, mma, W_BY_CLASS)
        acc = mma_v2(a, b, acc)
        a, b = next_a, next_b
    async_copy.wait_group(0)  # the last copies write zeros to buffers whose memory is about to be reused
    return acc


class Switches(NamedTuple):
    has_bias: Any
    has_softcap: Any


class Sizes(NamedTuple):
    classes: Any


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def exponentials_kernel(
    x_matrix, x_stride, w_matrix, w_stride, e_matrix, e_stride, bias_ptr, target_ptr, ref_exponent_ptr, flag_ptr,
    sum_ptr, max_ptr, target_logit_ptr, first_class, rows, hidden, classes, group, scale, softcap,
    STORES: gl.constexpr, STATISTICS: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.exponentials_kernel` for one tile."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    by_tile: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [4, 1], [1, 0])
    # ldmatrix reads eight rows of 16 bytes at a time. The swizzle puts them in different banks.
    narrow: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // BLOCK_D, BLOCK_D // 8, [1, 0])
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    row_block, class_block = tile_of(gl.program_id(0), gl.cdiv(rows, BLOCK_N), gl.cdiv(classes, BLOCK_V), group)
    row, column = row_block * BLOCK_N, class_block * BLOCK_V
    dtype: gl.constexpr = x_matrix.dtype.element_ty
    x = rows_of(x_matrix, x_stride, row, rows, BLOCK_N, BLOCK_D, by_row)
    x_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], narrow)
    if W_BY_CLASS:
        w = rows_of(w_matrix, w_stride, column, classes, BLOCK_V, BLOCK_D, by_row)
        w_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_V, BLOCK_D], narrow)
    else:
        w = columns_of(w_matrix, w_stride, column, classes, BLOCK_V, BLOCK_D, by_tile)
        w_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_D, BLOCK_V], wide)
    raw = multiply_tile(x, w, x_buffers, w_buffers, hidden, BLOCK_N, BLOCK_V, BLOCK_D, mma, W_BY_CLASS)

    # The epilogue takes a quarter of the columns at a time: all at once would spill registers.
    WIDTH: gl.constexpr = BLOCK_V // 4
    by_quarter: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    switches: gl.constexpr = Switches(HAS_BIAS, HAS_SOFTCAP)
    head, sizes = Head(bias_ptr, scale, softcap), Sizes(classes)
    row_ids = row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
    inside = row_ids < rows
    ref_exponent = gl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
    target = gl.load(target_ptr + row_ids, mask=inside, other=-1) - first_class
    owns = (target >= column) & (target < gl.minimum(column + BLOCK_V, classes))
    place = gl.where(owns, target, -1).to(gl.int32)  # the range check needs int64; the comparison below is in int32
    any_target = gl.max(owns.to(gl.int32), 0) != 0
    total = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, mma))
    top = gl.full([BLOCK_N], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
    pieces = quarters(raw, mma)
    for i in gl.static_range(4):
        columns = column + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, mma))
        logits = to_logits(pieces[i], columns, head, sizes, switches)
        logits = masked(logits, columns, column, classes, BLOCK_V)
        if any_target:  # few tiles have any
            store_target_logits(target_logit_ptr, logits, row_ids, columns, place)
        if STATISTICS:
            top = gl.maximum(top, gl.max(logits, 1))
        exponentials = gl.exp2(logits * LOG2_E - gl.expand_dims(ref_exponent, 1))
        total += gl.sum(exponentials, 1)
        if STORES:
            if HAS_SOFTCAP:
                exponentials = gl.where(exponentials == 0, 0.0, exponentials * slope(logits, softcap))
            stored = gl.convert_layout(exponentials.to(dtype), by_quarter)
            store_tile(e_matrix, e_stride, stored, row, column + i * WIDTH, rows, classes)
    out = class_block.to(gl.int64) * rows + row_ids
    gl.store(sum_ptr + out, total, mask=inside)
    gl.store(flag_ptr + row_block + gl.zeros_like(row_ids), 1, mask=inside & ~(total < SUM_LIMIT))
    if STATISTICS:
        gl.store(max_ptr + out, top, mask=inside)


@gluon.jit
def store_target_logits(target_logit_ptr, logits, row_ids, columns, target):
    """Writes target_logit (rows,) for the rows whose target is among these columns: each by the thread that has it. A
    sum along the row would take more registers."""
    places = gl.expand_dims(row_ids, 1) + gl.expand_dims(gl.zeros_like(columns), 0)
    gl.store(target_logit_ptr + places, logits, mask=gl.expand_dims(columns, 0) == gl.expand_dims(target, 1))


@gluon.jit
def store_tile(matrix, stride, values, row, column, rows, columns):
    """Writes a tile of a matrix, 16 bytes at a time."""
    layout: gl.constexpr = values.type.layout
    row_ids = gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    column_ids = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    row_stride = stride // UNIT * UNIT
    start = matrix + row.to(gl.int64) * row_stride + column
    inside = gl.expand_dims(row_ids < rows - row, 1)
    inside &= gl.expand_dims(column + column_ids < gl.cdiv(columns, UNIT) * UNIT, 0)
    gl.store(start + (gl.expand_dims(row_ids * row_stride, 1) + gl.expand_dims(column_ids, 0)), values, mask=inside)


def exponentials(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    vocab_chunk: slice,
    active: Active,
    *,
    target: At,
    ref_exponent: At,
    flag: At,
    sums: At,
    tops: At | None,
    target_logit: At,
    e: Tensor | None,
) -> None:
    """Launches `exponentials_kernel`. It computes all rows, also those that are not active."""
    plan = plan_of(problem)
    tile = plan.ampere_tile
    assert tile is not None
    constexprs = {
        "BLOCK_N": tile.block_n,
        "BLOCK_V": tile.block_v,
        "BLOCK_D": tile.block_d,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        **({"arch": plan.arch} if plan.arch else {}),
    }
    n_by_v, n_by_d, v_by_d = (tile.block_n, tile.block_v), (tile.block_n, tile.block_d), (tile.block_v, tile.block_d)
    blocks = TileBlocks(n_by_d, v_by_d, n_by_v, constexprs, pointers=True, programs=None)
    pointers = target, ref_exponent, flag, sums, tops, target_logit
    switches = {"STORES": e is not None, "STATISTICS": tops is not None}
    launch_tiles(exponentials_kernel, problem, x, w, vocab_chunk, (e,), pointers, switches, blocks)
