"""The common parts of the kernels of 16 bits for compute capability 8.x and 12.x: the matmul of a tile, and its store.

They are in Triton's Gluon dialect. Triton's own pipelining copies the next steps of the matmul asynchronously
(cp.async). But at each step it first waits for a step's operands, then reads all of them from shared memory (ldmatrix),
and only then multiplies, so the tensor cores wait for the reads. Here the next 16 elements of the inner dimension are
read to registers while the current ones are multiplied, also from one step to the next. A multiprocessor runs two
programs of four warps, so that one multiplies while the other is in its epilogue. The kernels are in
`ampere_logits.py` and `ampere_gradients.py`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from core_triton.gluon_common import copy_to_shared
from core_triton.kernels import piece_start

SLICE = gl.constexpr(16)  # elements of the inner dimension of a matrix instruction (mma.sync)

UNIT = gl.constexpr(8)  # elements of a copy of 16 bytes

OUTSIDE = gl.constexpr(2**30)  # in place of an inner index: more than any, so that zeros are copied

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))  # of a tile's sums: four warps


class Operand(NamedTuple):
    """The steps of an operand of a tile's matmul in global memory: (rows, BLOCK_K), or (BLOCK_K, columns)."""

    base: Any  # the pointer to the first element of the first step
    stride: Any  # elements from one inner index to the next
    offsets: Any  # of a step's elements
    inner_ids: Any  # the inner indices of a step's elements; OUTSIDE for columns past the last
    pieces: Any  # () or (others, stride, piece, piece_rows): the step of another piece has another base


class Steps(NamedTuple):
    """The part of the inner dimension that a matmul adds up."""

    first: Any  # inner index, a multiple of BLOCK_K
    last: Any  # the inner index after the last


@gluon.jit
def rows_of(matrix, stride, pieces, first, rows, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr):
    """Returns the operand of BLOCK rows from `first` on, which are contiguous along the inner dimension. In place of
    rows past the last, the last is read again. With `pieces`, (others, piece, piece_rows), the matrix has the first
    piece: `first_chunk.Stores`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    row_ids = gl.minimum(gl.arange(0, BLOCK, gl.SliceLayout(1, layout)), rows - 1 - first)
    inner_ids = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    row_stride = stride // UNIT * UNIT  # `kernels.block_pointers`
    offsets = gl.expand_dims(row_ids * row_stride, 1) + gl.expand_dims(inner_ids, 0)
    start = first.to(gl.int64) * row_stride
    if len(pieces) > 0:
        others, piece, piece_rows = pieces
        pieces = (others + start, stride, piece, piece_rows)
    return Operand(matrix + start, 1, offsets, gl.expand_dims(inner_ids, 0), pieces)


@gluon.jit
def columns_of(matrix, stride, first, columns, BLOCK: gl.constexpr, BLOCK_K: gl.constexpr):
    """Returns the operand of BLOCK columns from `first` on, with zeros past the last."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [4, 1], [1, 0])
    column_ids = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    inner_ids = gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
    row_stride = stride // UNIT * UNIT
    offsets = gl.expand_dims(inner_ids * row_stride, 1) + gl.expand_dims(column_ids, 0)
    inside = gl.expand_dims(first + column_ids < gl.cdiv(columns, UNIT) * UNIT, 0)
    return Operand(
        matrix + first, row_stride.to(gl.int64), offsets, gl.where(inside, gl.expand_dims(inner_ids, 1), OUTSIDE), ()
    )


@gluon.jit
def copy_operand(buffer, operand, k, end):
    """Starts to copy the step of an operand at the inner index k. Elements from `end` on become zeros."""
    base = operand.base
    if len(operand.pieces) > 0:
        others, stride, piece, piece_rows = operand.pieces
        base = piece_start(base, others, stride, piece, piece_rows, k)
    pointers = base + k * operand.stride + operand.offsets
    copy_to_shared(buffer, pointers, mask=k + operand.inner_ids < end)


@gluon.jit
def read_slice(a_buffer, b_buffer, i: gl.constexpr, A_BY_COLUMN: gl.constexpr, B_BY_COLUMN: gl.constexpr):
    """Reads the slice `i` of a step to registers: a (BLOCK_N, SLICE) and b (SLICE, BLOCK_V)."""
    if A_BY_COLUMN:
        a = a_buffer.slice(SLICE * i, SLICE, 0).permute([1, 0]).load(gl.DotOperandLayout(0, MMA, 2))
    else:
        a = a_buffer.slice(SLICE * i, SLICE, 1).load(gl.DotOperandLayout(0, MMA, 2))
    if B_BY_COLUMN:
        b = b_buffer.slice(SLICE * i, SLICE, 1).permute([1, 0]).load(gl.DotOperandLayout(1, MMA, 2))
    else:
        b = b_buffer.slice(SLICE * i, SLICE, 0).load(gl.DotOperandLayout(1, MMA, 2))
    return a, b


@gluon.jit
def prefetch_tile(matrix, stride, row, column, rows, columns, BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr):
    """Starts to read a tile of a matrix from device memory to L2, a line of 128 bytes at a time."""
    LINE: gl.constexpr = 1024 // matrix.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = BLOCK_COLUMNS // LINE
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [4, 1], [1, 0])
    row_ids = gl.minimum(row + gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, layout)), rows - 1)
    column_ids = gl.minimum(column + LINE * gl.arange(0, LINES, gl.SliceLayout(0, layout)), columns - 1)
    lines = matrix + (gl.expand_dims(row_ids.to(gl.int64) * stride, 1) + gl.expand_dims(column_ids, 0))
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def multiply_tile(
    a_matrix, a_stride, a_pieces, row, rows, b_matrix, b_stride, column, columns, steps, read_later,
    BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    B_BY_COLUMN: gl.constexpr, A_BY_COLUMN: gl.constexpr = False,
):  # fmt: skip
    """Returns the tile of a @ b at (row, column), (BLOCK_N, BLOCK_V) float32 in the layout MMA.

    a is stored as (inner, rows) if A_BY_COLUMN, otherwise as (rows, inner), and b as (columns, inner) if B_BY_COLUMN,
    otherwise as (inner, columns). Matrices that are contiguous along the inner dimension are read up to the next
    multiple of UNIT after `steps.last`: these elements of one of them must be zeros, and those of the other finite.
    With a_pieces, a is stored as (rows, inner), in pieces of whole steps of the inner dimension: `rows_of`.
    `read_later` is () or the arguments of `prefetch_tile` for a tile that the epilogue reads.
    """
    # ldmatrix reads eight rows of 16 bytes at a time. The swizzle puts them in different banks.
    narrow: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // BLOCK_K, BLOCK_K // 8, [1, 0])
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = a_matrix.dtype.element_ty
    if A_BY_COLUMN:
        a_step = columns_of(a_matrix, a_stride, row, rows, BLOCK_N, BLOCK_K)
        a_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], wide)
    else:
        a_step = rows_of(a_matrix, a_stride, a_pieces, row, rows, BLOCK_N, BLOCK_K)
        a_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], narrow)
    if B_BY_COLUMN:
        b_step = rows_of(b_matrix, b_stride, (), column, columns, BLOCK_V, BLOCK_K)
        b_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_V, BLOCK_K], narrow)
    else:
        b_step = columns_of(b_matrix, b_stride, column, columns, BLOCK_V, BLOCK_K)
        b_buffers = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_V], wide)

    SLICES: gl.constexpr = BLOCK_K // SLICE
    end = gl.cdiv(steps.last, UNIT) * UNIT  # rows start at multiples of 16 bytes, so these elements can be read
    a_end = steps.last if A_BY_COLUMN else end
    b_end = end if B_BY_COLUMN else steps.last
    for stage in gl.static_range(STAGES):
        copy_operand(a_buffers.index(stage), a_step, steps.first + stage * BLOCK_K, a_end)
        copy_operand(b_buffers.index(stage), b_step, steps.first + stage * BLOCK_K, b_end)
        async_copy.commit_group()
    if len(read_later) > 0:
        prefetch_tile(*read_later, BLOCK_N, BLOCK_V)
    acc = gl.zeros([BLOCK_N, BLOCK_V], gl.float32, MMA)
    async_copy.wait_group(STAGES - 1)
    a, b = read_slice(a_buffers.index(0), b_buffers.index(0), 0, A_BY_COLUMN, B_BY_COLUMN)
    stage = 0
    for k in range(steps.first, steps.last, BLOCK_K):
        a_now, b_now = a_buffers.index(stage), b_buffers.index(stage)
        for i in gl.static_range(1, SLICES):
            next_a, next_b = read_slice(a_now, b_now, i, A_BY_COLUMN, B_BY_COLUMN)
            acc = mma_v2(a, b, acc)
            a, b = next_a, next_b
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        # The next step has arrived, and all warps have read this step. The step that replaces it is copied before the
        # next slice is read: otherwise the compiler adds a barrier.
        async_copy.wait_group(STAGES - 2)
        copy_operand(a_now, a_step, k + STAGES * BLOCK_K, a_end)
        copy_operand(b_now, b_step, k + STAGES * BLOCK_K, b_end)
        async_copy.commit_group()
        next_a, next_b = read_slice(a_buffers.index(stage), b_buffers.index(stage), 0, A_BY_COLUMN, B_BY_COLUMN)
        acc = mma_v2(a, b, acc)
        a, b = next_a, next_b
    async_copy.wait_group(0)  # the last copies write zeros to buffers whose memory is about to be reused
    return acc


@gluon.jit
def tile_pointers(
    matrix, stride, row, column, rows, columns, BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Returns pointers to a tile of a matrix (rows, columns), in a layout, and which of them are inside.

    Columns count as inside up to the next multiple of UNIT: `kernels.block_pointers`.
    """
    row_ids = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(1, layout))
    column_ids = gl.arange(0, BLOCK_COLUMNS, gl.SliceLayout(0, layout))
    row_stride = stride // UNIT * UNIT
    start = matrix + row.to(gl.int64) * row_stride + column
    inside = gl.expand_dims(row_ids < rows - row, 1)
    inside &= gl.expand_dims(column + column_ids < gl.cdiv(columns, UNIT) * UNIT, 0)
    return start + (gl.expand_dims(row_ids * row_stride, 1) + gl.expand_dims(column_ids, 0)), inside


@gluon.jit
def store_tile(matrix, stride, values, row, column, rows, columns):
    """Writes a tile of a matrix, 16 bytes at a time."""
    layout: gl.constexpr = values.type.layout
    pointers, inside = tile_pointers(
        matrix, stride, row, column, rows, columns, values.shape[0], values.shape[1], layout
    )
    gl.store(pointers, values, mask=inside)
