"""Triton kernels that compute logits, for any GPU. Each kernel is above the function that launches it.

`hopper_logits.py` has the same functions for sm_90. `ampere_logits.py` has the exponentials of 16 bits for compute
capability 8.x and 12.x (`tile_config.kernel_capability`). The kernels without matmuls are in `row_kernels.py` and
`target_grad.py`.

All kernels here call `logits_tile`. They are persistent: a fixed grid of programs iterates over tiles of BLOCK_N rows x
BLOCK_V classes (`tile_of`). They read operands through tensor descriptors (TMA if the GPU has it), which return zeros
out of bounds. For 8.x and 12.x they read through pointers, and each matrix has a stride argument. Triton copies blocks
that are read through pointers asynchronously (cp.async) while it multiplies. It does not do so for descriptors there.
One program writes each output, without atomics on floats, so results repeat bit for bit. Equations: linear_ce/MATH.md.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from core_triton import row_math
from core_triton.first_chunk import Stores
from core_triton.launch import At, Blocks, cdiv, launch
from core_triton.problem import Problem, plan_of
from core_triton.repairs import flagged, store_no_classes
from linear_ce import statistics as bits

LOG2_E = tl.constexpr(1.4426950408889634)

NO_PROBABILITY = tl.constexpr(row_math.NO_PROBABILITY)

# Where a tile's sum of exponentials is past this, its reference exponents are too low: (30). 2**48 is 33 nats above the
# target logit; the sum of all tiles then stays below 2**64, whose reciprocal times a row weight times an input bfloat16
# holds.
SUM_LIMIT = tl.constexpr(2.0**48)

MAX, ARGMAX, ENTROPY = (tl.constexpr(one) for one in (bits.MAX, bits.ARGMAX, bits.ENTROPY))
LOGIT_SUM, SQUARES, SHIFTS = (tl.constexpr(one) for one in (bits.LOGIT_SUM, bits.SQUARES, bits.SHIFTS))

OF_MAX = tl.constexpr(bits.ARGMAX | bits.SQUARES)  # what is stored with the largest logits

NO_CLASS = tl.constexpr(row_math.NO_CLASS)

# Exponentials of float16 whose sum is not below 2**15 are divided by a power of two: (49).
LARGEST_EXPONENT = tl.constexpr(14.0)

# Of such a power. A sum is below SUM_LIMIT or is computed again, so more never occur in a row without NaN.
MOST_SHIFT = tl.constexpr(63.0)

TOP_EXPONENT = 13  # of the largest exponential of a row of float16 that is computed again

NOT_SPECIALIZED = [  # nothing is gained by a compilation for each
    *("first_class", "rows", "hidden", "classes", "group"),
    *("x_stride", "w_stride", "e_stride", "others_stride", "d_logits_stride"),
    *("piece", "piece_rows"),
]

# Of a chunk; its address is a multiple of 4.
PLACES = [
    *("target_ptr", "ref_exponent_ptr", "top_ptr", "flag_ptr", "ticket_ptr"),
    *("sum_ptr", "max_ptr", "target_logit_ptr"),
]

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # there, matmuls of bfloat16 come out wrong: upcast them


class Active(NamedTuple):
    """Which rows of a chunk are computed: those among the first `count` packed rows of the call, and at least
    `least`."""

    count: Tensor | At  # () int32, which the host does not read; a chunk's power of two may follow it
    start: int  # the chunk's first row
    least: int


def head_with_contiguous_rows(w: Tensor, block: tuple[int, int]) -> tuple[Tensor, tuple[int, int], bool]:
    """Returns a head (V, D) and a block of it, both transposed if the head is stored as (D, V), and whether it is not.

    The rows of the result are contiguous.
    """
    by_class = w.stride(1) == 1
    return (w, block, True) if by_class else (w.T, block[::-1], False)


class TileBlocks(NamedTuple):
    """The blocks, rows x columns, that a kernel of logits loads and stores, and its last constexprs."""

    x: tuple[int, int]
    w: tuple[int, int]
    result: tuple[int, int]
    constexprs: dict[str, Any]  # then num_warps, num_stages, maxnreg and arch
    gluon: bool = False
    pointers: bool = False
    programs: int | None = 1  # that a multiprocessor runs at the same time; None: each computes one tile

    def arguments(self, matrix: Tensor | None, block: tuple[int, int]) -> tuple[Any, ...]:
        """Returns a kernel's arguments for a matrix whose rows are contiguous: a descriptor, or pointer and stride."""
        if self.pointers and matrix is not None:
            return matrix, matrix.stride(0)
        described = None if matrix is None else Blocks(matrix, block, gluon=self.gluon)
        return (described,) if self.gluon else (described, None)


def _blocks(problem: Problem, *, repair: bool = False, splits: bool = False, crowded: bool = False) -> TileBlocks:
    """Returns the blocks and constexprs of the kernels of this file.

    With `repair` tiles have half the rows, because they are halves of the tiles of the sm_90 kernels. A program may
    then use all registers: otherwise ptxas spills a few to fit a second program on a multiprocessor. With `splits` it
    reads a float32 head, whose tiles take twice the memory and whose parts take more registers. A kernel is `crowded`
    if its options make the registers of four warps spill for compute capability 8.x. It then has eight warps. As a
    multiprocessor runs one such program only, there is memory for four stages, which `statistics` uses.
    """
    plan = plan_of(problem)
    tile = plan.tile
    assert tile is not None
    block_n = tile.block_n // 2 if repair else tile.block_n
    block_d = tile.block_d // 2 if splits else tile.block_d
    num_warps = 8 if crowded and plan.pointers else tile.num_warps
    constexprs = {
        "BLOCK_N": block_n,
        "BLOCK_V": tile.block_v,
        "BLOCK_D": block_d,
        "num_warps": num_warps,
        "num_stages": tile.num_stages,
        **({"SPLITS": True} if splits else {}),
        **({"CLASS_BLOCK": plan.class_block} if plan.splits_in_place else {}),
        **({"maxnreg": 255} if repair else {}),
        **({"arch": plan.arch} if plan.arch else {}),
    }
    return TileBlocks(
        (block_n, block_d),
        (tile.block_v, block_d),
        (block_n, tile.block_v),
        constexprs,
        pointers=plan.pointers,
        programs=8 // num_warps if plan.pointers else 1,  # 8 warps of up to 255 registers fit
    )


def launch_tiles(
    kernel: Any,
    problem: Problem,
    x: Tensor,
    w: Tensor,
    vocab_chunk: slice,
    result: tuple[Tensor | None, ...],
    pointers: tuple[Any, ...],
    switches: dict[str, bool],
    blocks: TileBlocks,
) -> None:
    """Launches a kernel of logits, of this file or another, on the rows x (n, D) and the vocabulary chunk w (v, D) of
    the head.

    Args:
        result: the matrices that the kernel writes, if any: (n, v), or as `first_chunk.Stores` has them.
        pointers: the kernel's arguments between the bias and the sizes.
        switches: the kernel's first constexprs.
    """
    plan, spec = plan_of(problem), problem.spec
    tile = plan.tile
    assert tile is not None
    # One of x and w may have padding that the other does not have.
    n, hidden, classes = x.shape[0], min(x.shape[1], w.shape[1]), vocab_chunk.stop - vocab_chunk.start
    w, w_block, by_class = head_with_contiguous_rows(w, blocks.w)
    row_blocks = cdiv(n, tile.block_n)
    tiles = row_blocks * cdiv(classes, tile.block_v)
    launch(
        kernel,
        (tiles if blocks.programs is None else min(tiles, plan.programs * blocks.programs),),
        *blocks.arguments(x, blocks.x),
        *blocks.arguments(w, w_block),
        *(argument for matrix in result for argument in blocks.arguments(matrix, blocks.result)),
        None if problem.linear_bias is None else At(problem.linear_bias, vocab_chunk.start),
        *pointers,
        problem.vocab_offset + vocab_chunk.start,
        n,
        hidden,
        classes,
        min(tile.group, row_blocks),
        None if blocks.gluon and spec.logit_scale == 1.0 else spec.logit_scale,  # `hopper_logits.Head`
        spec.softcap or 1.0,
        **switches,
        W_BY_CLASS=by_class,
        HAS_BIAS=problem.linear_bias is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        **blocks.constexprs,
    )


@triton.jit
def tile_of(tile, row_blocks, class_blocks, group):
    """Returns the row block and class block of a tile: `group` row blocks of a class block, then the next class block.

    Programs that run at the same time then use few class blocks and read their rows of the head from L2.
    """
    first = tile // (group * class_blocks) * group
    size = min(row_blocks - first, group)
    within = tile - first * class_blocks
    return first + within % size, within // size


@triton.jit
def block_pointers(matrix, stride, row, column, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Returns the pointers to a block of a matrix, and which of them are inside.

    Rows start at multiples of 16 bytes. So if one element of 16 bytes is inside, all of them can be accessed. The
    divisions tell both to the compiler, which then copies 16 bytes at a time. Offsets within a block are int32, because
    int64 ones spill registers: `MatrixLayout.tma_compatible` bounds the stride.
    """
    UNIT: tl.constexpr = 128 // matrix.dtype.element_ty.primitive_bitwidth
    row_ids, column_ids = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    row_stride = stride // UNIT * UNIT
    start = matrix + row * row_stride.to(tl.int64) + column
    inside = (row_ids < rows - row)[:, None] & (column + column_ids < tl.cdiv(columns, UNIT) * UNIT)[None, :]
    return start + (row_ids[:, None] * row_stride + column_ids[None, :]), inside


@triton.jit
def load_block(matrix, stride, row, column, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Returns the block at (row, column) of a matrix, with zeros outside of it."""
    if stride is None:
        block = matrix.load([row, column])
    else:
        pointers, inside = block_pointers(matrix, stride, row, column, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
        block = tl.load(pointers, mask=inside, other=0.0)
    return block


@triton.jit
def store_block(matrix, stride, values, row, column, rows, columns):
    """Writes the block at (row, column) of a matrix, rounded to its dtype."""
    if stride is None:
        matrix.store([row, column], values.to(matrix.dtype))
    else:
        pointers, inside = block_pointers(matrix, stride, row, column, rows, columns, values.shape[0], values.shape[1])
        tl.store(pointers, values.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(matrix, stride, values, stored, row, column, rows, columns):
    """`store_block` of the rows where `stored` is True. The others keep their bits. A descriptor stores whole blocks,
    so they are loaded first."""
    if stride is None:
        before = matrix.load([row, column])
        matrix.store([row, column], tl.where(stored[:, None], values.to(matrix.dtype), before))
    else:
        pointers, inside = block_pointers(matrix, stride, row, column, rows, columns, values.shape[0], values.shape[1])
        tl.store(pointers, values.to(matrix.dtype.element_ty), mask=inside & stored[:, None])


@triton.jit
def logits_tile(
    x_matrix, x_stride, w_matrix, w_stride, bias_ptr, row, column, rows, hidden, classes, scale, softcap,
    W_BY_CLASS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr = False,
):  # fmt: skip
    """Returns the tile of logits at (row, column), (BLOCK_N, BLOCK_V) float32: (1), (2).

    Columns past `classes` are 0 if w is stored by class and x is finite. Otherwise they are undefined. With SPLITS w is
    float32 and the sum of two matrices of x's dtype: (39).
    """
    raw = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for k in range(0, hidden, BLOCK_D):
        x = load_block(x_matrix, x_stride, row, k, rows, hidden, BLOCK_N, BLOCK_D)
        if W_BY_CLASS:
            w = load_block(w_matrix, w_stride, column, k, classes, hidden, BLOCK_V, BLOCK_D).T  # (BLOCK_D, BLOCK_V)
        else:
            w = load_block(w_matrix, w_stride, k, column, hidden, classes, BLOCK_D, BLOCK_V)
        if SPLITS:
            exact = w
            w = exact.to(x.dtype)
            low = (exact - w.to(tl.float32)).to(x.dtype)
        if INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        raw = tl.dot(x, w, raw, input_precision="ieee")  # for the interpreter, whose operands are float32
        if SPLITS:
            raw = tl.dot(x, low.to(x.dtype), raw, input_precision="ieee")
    if HAS_BIAS:
        columns = column + tl.arange(0, BLOCK_V)
        raw += tl.load(bias_ptr + columns, mask=columns < classes, other=0.0).to(tl.float32)[None, :]
    logits = raw * scale
    if HAS_SOFTCAP:
        logits = softcap * tanh(logits * (1.0 / softcap))
    return logits


@triton.jit
def tanh(t):
    small = tl.exp2(-2.0 * LOG2_E * tl.abs(t))
    magnitude = (1.0 - small) / (1.0 + small)
    return tl.where(t < 0, -magnitude, magnitude)


@triton.jit
def slope(logits, softcap):
    """Returns the derivative of the cap at capped logits: (15)."""
    ratio = logits * (1.0 / softcap)
    return 1.0 - ratio * ratio


@triton.jit
def store_target_logit(
    target_logit_ptr, target_ptr, first_class, logits, row_ids, column, inside, classes, BLOCK_V: tl.constexpr
):
    """Writes target_logit (rows,) for the rows whose target is among the classes of this tile.

    Few tiles have such rows, but Triton 3.6 does not compile a branch in a flattened loop.
    """
    target = tl.load(target_ptr + row_ids, mask=inside, other=-1) - first_class
    owns = inside & (target >= column) & (target < min(column + BLOCK_V, classes))
    here = (column + tl.arange(0, BLOCK_V))[None, :] == target[:, None]
    tl.store(target_logit_ptr + row_ids, tl.sum(tl.where(here, logits, 0.0), 1), mask=owns)


@triton.jit
def planes(STATISTICS: tl.constexpr):
    """Returns how many numbers for each row and class block these statistics are."""
    few = (STATISTICS & 1) + (STATISTICS >> 1 & 1) + (STATISTICS >> 2 & 1) + (STATISTICS >> 3 & 1)
    return few + (STATISTICS >> 4 & 1) + (STATISTICS >> 7 & 1)


@triton.jit
def store_statistics(
    at, rows, logits, exponentials, ref_exponent, inside, column, classes, STATISTICS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes the `linear_ce.statistics` of a tile's rows, one after the other, each `rows` elements after the one
    before: (25), (43). `at` is where the first goes. The class of the largest logit is its column in the tile."""
    # In this order no register of a repair on Hopper spills with Triton 3.6.
    if ENTROPY & STATISTICS:
        terms = tl.where(exponentials == 0, 0.0, exponentials * (logits * LOG2_E - ref_exponent[:, None]))
        tl.store(at + planes((ENTROPY - 1) & STATISTICS) * rows, tl.sum(terms, 1), mask=inside)
    if SQUARES & STATISTICS:
        squares = tl.sum(exponentials * exponentials, 1)
        tl.store(at + planes((SQUARES - 1) & STATISTICS) * rows, squares, mask=inside)
    if MAX & STATISTICS:
        top = tl.max(logits, 1)
        tl.store(at, top, mask=inside)
        if ARGMAX & STATISTICS:
            here = tl.where(logits == top[:, None], tl.arange(0, BLOCK_V)[None, :], BLOCK_V)
            tl.store(at + rows, tl.min(here, 1).to(tl.float32), mask=inside)
    if LOGIT_SUM & STATISTICS:
        here = (column + tl.arange(0, BLOCK_V) < classes)[None, :]
        logit_sum = tl.sum(tl.where(here, logits, 0.0), 1)
        tl.store(at + planes((LOGIT_SUM - 1) & STATISTICS) * rows, logit_sum, mask=inside)


@triton.jit
def fit_in_float16(at, rows, exponentials, total, inside, STATISTICS: tl.constexpr):
    """Returns a tile's exponentials, each row divided by a power of two so that float16 holds them: (49). `total` is
    their sum. Writes the exponent as the last statistic, 6 bits for each quarter of the tile."""
    shift = tl.minimum(tl.maximum(tl.floor(tl.log2(total)) - LARGEST_EXPONENT, 0.0), MOST_SHIFT)
    every_quarter: tl.constexpr = 1.0 + 64.0 + 64.0**2 + 64.0**3
    tl.store(at + (planes(STATISTICS) - 1) * rows, shift * every_quarter, mask=inside)
    return exponentials * tl.exp2(-shift)[:, None]


@triton.jit
def piece_start(matrix, others_matrix, stride, piece, piece_rows, column):
    """Returns the pointer from which (row, column) of the exponentials is row * stride + column elements away. It
    depends on the column's piece: `first_chunk.Stores`."""
    UNIT: tl.constexpr = 128 // matrix.dtype.element_ty.primitive_bitwidth  # `block_pointers`
    number = column // piece
    # Piece 1 has the first rows of others, and its columns begin at `piece`, which is the stride.
    first = (number - 1) * piece_rows - number
    row_stride = stride // UNIT * UNIT
    return tl.where(number == 0, matrix, others_matrix + first.to(tl.int64) * row_stride)


@triton.jit
def whole_tiles(first_class, BLOCK_V: tl.constexpr):
    """Returns the first class of a vocabulary chunk where exponentials are in pieces, in a call with all classes. It is
    a multiple of a tile's classes. Without the division the compiler would not know, and would store a few bytes at a
    time."""
    return first_class // BLOCK_V * BLOCK_V


@triton.jit
def store_e(
    e_matrix, e_stride, others_matrix, others_stride, piece, piece_rows, first_class, values, stored, row, column,
    rows, columns, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Writes the tile of exponentials at (row, column) of a vocabulary chunk to where `Stores` says. With BY_ROW only
    the rows where `stored` is True."""
    if others_matrix is None:
        store_tile(e_matrix, e_stride, values, stored, row, column, rows, columns, BY_ROW)
    elif e_stride is not None:  # others has the same stride; branches around stores would spill registers
        first = whole_tiles(first_class, values.shape[1])
        start = piece_start(e_matrix, others_matrix, e_stride, piece, piece_rows, first + column)
        store_tile(start, e_stride, values, stored, row, first + column, rows, first + columns, BY_ROW)
    else:
        column += first_class
        if column < piece:
            store_tile(e_matrix, e_stride, values, stored, row, column, rows, piece, BY_ROW)
        else:
            first = (column // piece - 1) * piece_rows
            store_tile(
                others_matrix, others_stride, values, stored, first + row, column % piece, first + rows, piece, BY_ROW
            )


@triton.jit
def store_tile(matrix, stride, values, stored, row, column, rows, columns, BY_ROW: tl.constexpr):
    """`store_block`, or with BY_ROW `store_rows`."""
    if BY_ROW:
        store_rows(matrix, stride, values, stored, row, column, rows, columns)
    else:
        store_block(matrix, stride, values, row, column, rows, columns)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def exponentials_kernel(
    x_matrix, x_stride, w_matrix, w_stride, e_matrix, e_stride, others_matrix, others_stride, bias_ptr, target_ptr,
    ref_exponent_ptr, flag_ptr, sum_ptr, max_ptr, target_logit_ptr, piece, piece_rows,
    first_class, rows, hidden, classes, group, scale, softcap,
    STORES: tl.constexpr, STATISTICS: tl.constexpr, W_BY_CLASS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes scaled exponentials and their float32 sums over the classes of each tile: (29).

    Reads x (rows, D), w (V, D) or (D, V), ref_exponent (rows,) float32 and target (rows,) int64. Writes sum (class
    blocks, rows), and target_logit (rows,) of rows whose target minus `first_class` is among these classes. With STORES
    writes e (rows, V), or where `first_chunk.Stores` says, times the cap's slope: (31). With STATISTICS, which is an
    int of `linear_ce.statistics`, writes these to max (class blocks, statistics, rows). Sets flag (row blocks,) int32
    where a sum is not below SUM_LIMIT: the reference exponent is too low.
    """
    row_blocks, class_blocks = tl.cdiv(rows, BLOCK_N), tl.cdiv(classes, BLOCK_V)
    for tile in tl.range(tl.program_id(0), row_blocks * class_blocks, tl.num_programs(0), flatten=True):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, group)
        row, column = row_block * BLOCK_N, class_block * BLOCK_V
        logits = logits_tile(
            x_matrix, x_stride, w_matrix, w_stride, bias_ptr, row, column, rows, hidden, classes, scale, softcap,
            W_BY_CLASS, HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        row_ids = row + tl.arange(0, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_V)
        inside = row_ids < rows
        ref_exponent = tl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
        if column + BLOCK_V > classes:
            logits = tl.where((columns < classes)[None, :], logits, float("-inf"))
        exponentials = tl.exp2(logits * LOG2_E - ref_exponent[:, None])
        out = class_block.to(tl.int64) * rows + row_ids
        total = tl.sum(exponentials, 1)
        tl.store(sum_ptr + out, total, mask=inside)
        tl.store(flag_ptr + row_block + tl.zeros_like(row_ids), 1, mask=inside & ~(total < SUM_LIMIT))
        if STATISTICS:
            at = max_ptr + class_block.to(tl.int64) * planes(STATISTICS) * rows + row_ids
            store_statistics(at, rows, logits, exponentials, ref_exponent, inside, column, classes, STATISTICS, BLOCK_V)
        # The target's logit must be one of the logits that are summed. Then the loss is the logarithm of a ratio that
        # is never below 1.
        store_target_logit(target_logit_ptr, target_ptr, first_class, logits, row_ids, column, inside, classes, BLOCK_V)
        if STORES:
            if HAS_SOFTCAP:
                exponentials = tl.where(exponentials == 0, 0.0, exponentials * slope(logits, softcap))
            if SHIFTS & STATISTICS:
                exponentials = fit_in_float16(at, rows, exponentials, total, inside, STATISTICS)
            store_e(
                e_matrix, e_stride, others_matrix, others_stride, piece, piece_rows, first_class, exponentials,
                inside, row, column, rows, classes, False,
            )  # fmt: skip


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
    statistics: int,
    of_logits: At | None,
    target_logit: At,
    e: Stores,
) -> None:
    """Launches `exponentials_kernel`. It computes all rows, also those that are not active."""
    first, others, *place = e
    pointers = target, ref_exponent, flag, sums, of_logits, target_logit, *place
    switches = {"STORES": first is not None, "STATISTICS": statistics}
    launch_tiles(exponentials_kernel, problem, x, w, vocab_chunk, (first, others), pointers, switches, _blocks(problem))


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=PLACES)
def repair_kernel(
    x_matrix, x_stride, w_matrix, w_stride, e_matrix, e_stride, others_matrix, others_stride, bias_ptr, target_ptr,
    ref_exponent_ptr, top_ptr, flag_ptr, ticket_ptr, sum_ptr, max_ptr, target_logit_ptr, piece, piece_rows,
    first_class, rows, hidden, classes, group, scale, softcap,
    FINDS: tl.constexpr, REDOES: tl.constexpr, STORES: tl.constexpr, STATISTICS: tl.constexpr,
    BY_ROW: tl.constexpr, W_BY_CLASS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, TOP_EXPONENT: tl.constexpr = 0,
    SPLITS: tl.constexpr = False, CLASS_BLOCK: tl.constexpr = None,
):  # fmt: skip
    """Recomputes the flagged row blocks, in halves, with reference exponents from their largest logits: (30).

    The FINDS step computes their logits and raises top (rows,), initially -inf, to the largest. The REDOES step
    recomputes the logits and writes what `exponentials_kernel` writes (e, sum, max and target_logit) and the new
    ref_exponent (rows,). One launch does both steps. Programs take tile numbers from ticket (2,) int32, initially 0, so
    all tiles of the first step are taken before the first tile of the second step. A program with a tile of the second
    step waits until the first step is complete. It never waits for a program that has not started. Most chunks have no
    flag, and then there is nothing to do.

    The largest exponential becomes 2**TOP_EXPONENT or up to twice that.

    With CLASS_BLOCK a tile has several class blocks. The first gets the sums of the tile, the others those of no class.

    With BY_ROW, top is inf for the rows of which no sum is too large (`row_statistics.keep_rows`). They keep their
    reference exponents and the results of `exponentials_kernel`, e too, whose last bits other instructions computed. So
    these do not depend on the other rows of the block.
    """
    row_blocks, class_blocks = tl.cdiv(rows, BLOCK_N), tl.cdiv(classes, BLOCK_V)
    tiles, found = row_blocks * class_blocks, flagged(flag_ptr, row_blocks) * class_blocks
    draws: tl.constexpr = FINDS and REDOES
    end = tl.where(found != 0, (2 if draws else 1) * tiles, 0)
    number = tl.program_id(0)
    if draws and end != 0:
        number = tl.atomic_add(ticket_ptr, 1)
    while number < end:
        redoes = REDOES and number >= end - tiles
        row_block, class_block = number % tiles // class_blocks, number % tiles % class_blocks
        if tl.load(flag_ptr + row_block // 2) != 0:
            if draws and redoes:
                while tl.atomic_add(ticket_ptr + 1, 0) < found:
                    pass
            row, column = row_block * BLOCK_N, class_block * BLOCK_V
            logits = logits_tile(
                x_matrix, x_stride, w_matrix, w_stride, bias_ptr, row, column, rows, hidden, classes, scale, softcap,
                W_BY_CLASS, HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D, SPLITS,
            )  # fmt: skip
            row_ids = row + tl.arange(0, BLOCK_N)
            columns = column + tl.arange(0, BLOCK_V)
            inside = row_ids < rows
            if column + BLOCK_V > classes:
                logits = tl.where((columns < classes)[None, :], logits, float("-inf"))
            if redoes:
                redone = inside
                if BY_ROW:
                    redone = tl.load(top_ptr + row_ids, mask=inside, other=float("inf"), cache_modifier=".cg") < float(
                        "inf"
                    )
                block = class_block if CLASS_BLOCK is None else column // CLASS_BLOCK
                out = block.to(tl.int64) * rows + row_ids
                store_target_logit(
                    target_logit_ptr, target_ptr, first_class, logits, row_ids, column, redone, classes, BLOCK_V
                )
                # Read from L2, because other multiprocessors have just raised it.
                top = tl.load(top_ptr + row_ids, mask=inside, other=0.0, cache_modifier=".cg")
                ref_exponent = tl.where(tl.abs(top) < float("inf"), tl.floor(top * LOG2_E), 0.0)
                if TOP_EXPONENT != 0:
                    ref_exponent -= TOP_EXPONENT
                if BY_ROW:
                    kept = tl.load(ref_exponent_ptr + row_ids, mask=inside & ~redone, other=0.0)
                    ref_exponent = tl.where(redone, ref_exponent, kept)
                tl.store(ref_exponent_ptr + row_ids, ref_exponent, mask=redone)
                exponentials = tl.exp2(logits * LOG2_E - ref_exponent[:, None])
                tl.store(sum_ptr + out, tl.sum(exponentials, 1), mask=redone)
                if STATISTICS:
                    at = max_ptr + block.to(tl.int64) * planes(STATISTICS) * rows + row_ids
                    store_statistics(
                        at, rows, logits, exponentials, ref_exponent, redone, column, classes, STATISTICS, BLOCK_V
                    )
                if STORES:
                    if SHIFTS & STATISTICS:
                        total = tl.sum(exponentials, 1)
                        exponentials = fit_in_float16(at, rows, exponentials, total, redone, STATISTICS)
                    if HAS_SOFTCAP:
                        exponentials = tl.where(exponentials == 0, 0.0, exponentials * slope(logits, softcap))
                    store_e(
                        e_matrix, e_stride, others_matrix, others_stride, piece, piece_rows, first_class,
                        exponentials, redone, row, column, rows, classes, BY_ROW,
                    )  # fmt: skip
            else:
                if CLASS_BLOCK is not None:
                    redone = inside  # as in the second step, which keeps the sums of a row with an infinite logit
                    if BY_ROW:
                        redone &= tl.load(top_ptr + row_ids, mask=inside, other=float("inf")) < float("inf")
                        redone &= tl.max(logits, 1) < float("inf")
                    store_no_classes(
                        sum_ptr, max_ptr, row_ids, rows, redone, column, classes, planes(STATISTICS),
                        (MAX & STATISTICS) != 0, BLOCK_V, CLASS_BLOCK,
                    )  # fmt: skip
                tl.atomic_max(top_ptr + row_ids, tl.max(logits, 1), mask=inside, sem="relaxed")
                if draws:
                    tl.debug_barrier()  # every thread has raised its rows
                    tl.atomic_add(ticket_ptr + 1, 1)
        if draws:
            number = tl.atomic_add(ticket_ptr, 1)
        else:
            number += tl.num_programs(0)


def repair(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    vocab_chunk: slice,
    *,
    target: At,
    ref_exponent: At,
    top: At,
    flag: At,
    ticket: At,
    sums: At,
    statistics: int,
    of_logits: At | None,
    target_logit: At,
    e: Stores,
    finds: bool,
    redoes: bool,
    by_row: bool,
) -> None:
    """Launches `repair_kernel`. w is a vocabulary chunk of the head in x's dtype, or of one that is split. With by_row
    its number of warps does not depend on `statistics`, so that the sums of a row have the same bits."""
    first, others, *place = e
    pointers = target, ref_exponent, top, flag, ticket, sums, of_logits, target_logit, *place
    stores = first is not None
    switches = {"FINDS": finds, "REDOES": redoes, "STORES": stores, "STATISTICS": statistics, "BY_ROW": by_row}
    splits = w.dtype != x.dtype
    blocks = _blocks(problem, repair=True, splits=splits, crowded=by_row)
    if plan_of(problem).fits_float16:
        blocks.constexprs["TOP_EXPONENT"] = TOP_EXPONENT
    x = x[:, : w.shape[1]] if splits else x  # once, without the copy beside it
    launch_tiles(repair_kernel, problem, x, w, vocab_chunk, (first, others), pointers, switches, blocks)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def statistics_kernel(
    x_matrix, x_stride, w_matrix, w_stride, bias_ptr, class_weight_ptr, target_ptr, max_ptr, sum_ptr, weighted_sum_ptr,
    sum_exp_log_ptr, target_logit_ptr, first_class, rows, hidden, classes, group, scale, softcap,
    WEIGHTED: tl.constexpr, STATISTICS: tl.constexpr, W_BY_CLASS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of each tile's rows over its classes, (class blocks, rows) float32 each: (25), (43).

    max is (class blocks, 1 to 3, rows): the column of the largest logit in the tile and the sum of the squared
    exponentials follow the largest logit if they are in STATISTICS, an int of `linear_ce.statistics`.

    Reads x (rows, D), w (V, D) or (D, V), and target (rows,) int64. Writes target_logit (rows,) of rows whose target
    minus `first_class` is among the classes of w. The logits are not stored.
    """
    row_blocks, class_blocks = tl.cdiv(rows, BLOCK_N), tl.cdiv(classes, BLOCK_V)
    for tile in tl.range(tl.program_id(0), row_blocks * class_blocks, tl.num_programs(0), flatten=True):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, group)
        row, column = row_block * BLOCK_N, class_block * BLOCK_V
        logits = logits_tile(
            x_matrix, x_stride, w_matrix, w_stride, bias_ptr, row, column, rows, hidden, classes, scale, softcap,
            W_BY_CLASS, HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        row_ids = row + tl.arange(0, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_V)
        inside = row_ids < rows
        out = class_block.to(tl.int64) * rows + row_ids
        if x_stride is not None:  # here, so that fewer numbers are in registers at the same time
            store_target_logit(
                target_logit_ptr, target_ptr, first_class, logits, row_ids, column, inside, classes, BLOCK_V
            )
        if WEIGHTED:
            class_weight = tl.load(class_weight_ptr + columns, mask=columns < classes, other=0.0)
            if x_stride is not None:  # past the last class, logits may be NaN
                logits = tl.where((columns < classes)[None, :], logits, 0.0)
            tl.store(weighted_sum_ptr + out, tl.sum(logits * class_weight[None, :], 1), mask=inside)
        if column + BLOCK_V > classes:
            logits = tl.where((columns < classes)[None, :], logits, float("-inf"))
        top = tl.max(logits, 1)
        at = max_ptr + class_block.to(tl.int64) * planes(MAX | OF_MAX & STATISTICS) * rows + row_ids
        tl.store(at, top, mask=inside)
        shift = tl.where(top == float("-inf"), 0.0, top)
        exponentials = tl.exp2((logits - shift[:, None]) * LOG2_E)
        tl.store(sum_ptr + out, tl.sum(exponentials, 1), mask=inside)
        if ARGMAX & STATISTICS:
            at += rows
            here = tl.where(logits == top[:, None], tl.arange(0, BLOCK_V)[None, :], BLOCK_V)
            tl.store(at, tl.min(here, 1).to(tl.float32), mask=inside)
        if SQUARES & STATISTICS:
            tl.store(at + rows, tl.sum(exponentials * exponentials, 1), mask=inside)
        if ENTROPY & STATISTICS:
            shifted = tl.where(exponentials == 0, 0.0, logits - shift[:, None])
            tl.store(sum_exp_log_ptr + out, tl.sum(exponentials * shifted, 1), mask=inside)
        if x_stride is None:
            store_target_logit(
                target_logit_ptr, target_ptr, first_class, logits, row_ids, column, inside, classes, BLOCK_V
            )


def statistics(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    vocab_chunk: slice,
    *,
    statistics: int,
    class_weight: Tensor | None,
    target: Tensor,
    tops: Tensor,
    sums: Tensor,
    weighted_sums: Tensor | None,
    sums_exp_log: Tensor | None,
    target_logit: Tensor,
) -> None:
    """Launches `statistics_kernel`. With BY_ROW it has the same warps whatever else it computes, because they divide
    the sums."""
    pointers = class_weight, target, tops, sums, weighted_sums, sums_exp_log, target_logit
    switches = {"WEIGHTED": weighted_sums is not None, "STATISTICS": statistics & ~bits.BY_ROW}
    blocks = _blocks(problem, crowded=weighted_sums is not None or statistics != 0)
    if blocks.pointers and all(one is not None for one in (weighted_sums, problem.spec.softcap, problem.linear_bias)):
        blocks.constexprs["num_stages"] = 4  # with the three stages of 8.6 and 8.9, 16 bytes of registers spill
    launch_tiles(statistics_kernel, problem, x, w, vocab_chunk, (), pointers, switches, blocks)


@triton.jit
def d_logits_of(
    logits, lse, alpha, tau, beta, sigma, class_weight, at_target, softcap,
    HAS_BETA: tl.constexpr, HAS_SIGMA: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Returns d_logits, the cap's slope included, the scale not: (23), (15). The shapes broadcast. beta, sigma and
    class_weight are None if they are 0."""
    log_prob = logits - lse
    factor = alpha
    if HAS_BETA:
        factor += beta * tl.where(log_prob < NO_PROBABILITY, NO_PROBABILITY, log_prob)
    d_logits = tl.exp2(log_prob * LOG2_E) * factor
    if HAS_SIGMA:
        d_logits -= sigma * class_weight
    d_logits = tl.where(at_target, d_logits - tau, d_logits)
    if HAS_SOFTCAP:
        d_logits *= slope(logits, softcap)
    return d_logits


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def d_logits_kernel(
    x_matrix, x_stride, w_matrix, w_stride, d_logits_matrix, d_logits_stride, bias_ptr, class_weight_ptr, target_ptr,
    row_weight_ptr, lse_ptr, alpha_ptr, tau_ptr, beta_ptr, sigma_ptr,
    first_class, rows, hidden, classes, group, scale, softcap,
    HAS_BETA: tl.constexpr, HAS_SIGMA: tl.constexpr, W_BY_CLASS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes d_logits of a vocabulary chunk from recomputed logits: (23), (15); zeros in rows of row_weight 0.

    Reads x (rows, D), w (V, D) or (D, V) of the vocabulary chunk, target (rows,) int64, lse and the coefficients
    (rows,) float32, and class_weight (V,). The target's column is target - first_class. Writes d_logits (rows, V),
    rounded once.
    """
    row_blocks, class_blocks = tl.cdiv(rows, BLOCK_N), tl.cdiv(classes, BLOCK_V)
    for tile in tl.range(tl.program_id(0), row_blocks * class_blocks, tl.num_programs(0), flatten=True):
        row_block, class_block = tile_of(tile, row_blocks, class_blocks, group)
        row, column = row_block * BLOCK_N, class_block * BLOCK_V
        logits = logits_tile(
            x_matrix, x_stride, w_matrix, w_stride, bias_ptr, row, column, rows, hidden, classes, scale, softcap,
            W_BY_CLASS, HAS_BIAS, HAS_SOFTCAP, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        row_ids = row + tl.arange(0, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_V)
        inside = row_ids < rows
        lse = tl.load(lse_ptr + row_ids, mask=inside, other=0.0)
        alpha = tl.load(alpha_ptr + row_ids, mask=inside, other=0.0)
        tau = tl.load(tau_ptr + row_ids, mask=inside, other=0.0)
        target = tl.load(target_ptr + row_ids, mask=inside, other=-1) - first_class
        contributes = tl.load(row_weight_ptr + row_ids, mask=inside, other=0.0) != 0
        beta, sigma, class_weight = None, None, None
        if HAS_BETA:
            beta = tl.load(beta_ptr + row_ids, mask=inside, other=0.0)[:, None]
        if HAS_SIGMA:
            sigma = tl.load(sigma_ptr + row_ids, mask=inside, other=0.0)[:, None]
            class_weight = tl.load(class_weight_ptr + columns, mask=columns < classes, other=0.0)[None, :]
        d_logits = d_logits_of(
            logits, lse[:, None], alpha[:, None], tau[:, None], beta, sigma, class_weight,
            columns[None, :] == target[:, None], softcap, HAS_BETA, HAS_SIGMA, HAS_SOFTCAP,
        )  # fmt: skip
        d_logits = tl.where(contributes[:, None], d_logits, 0.0)
        store_block(d_logits_matrix, d_logits_stride, d_logits, row, column, rows, classes)


def d_logits(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    vocab_chunk: slice,
    *,
    result: Tensor,
    class_weight: Tensor | None,
    target: At,
    row_weight: At,
    lse: Tensor,
    alpha: Tensor,
    tau: Tensor,
    beta: Tensor | None,
    sigma: Tensor | None,
) -> None:
    """Launches `d_logits_kernel`."""
    pointers = class_weight, target, row_weight, lse, alpha, tau, beta, sigma
    switches = {"HAS_BETA": beta is not None, "HAS_SIGMA": sigma is not None}
    crowded = any(one is not None for one in (beta, sigma, problem.spec.softcap, problem.linear_bias))
    blocks = _blocks(problem, crowded=crowded)
    launch_tiles(d_logits_kernel, problem, x, w, vocab_chunk, (result,), pointers, switches, blocks)
