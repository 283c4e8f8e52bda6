"""The exponentials of 16 bits of `kernels.py` for compute capability 8.x and 12.x, in Triton's Gluon dialect.

A program computes one tile, with the matmul of `ampere_common.py`.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from core_triton.ampere_common import MMA, Steps, multiply_tile, store_tile
from core_triton.first_chunk import Stores
from core_triton.gluon_common import (
    add_exponentials,
    add_logits,
    fit_in_float16,
    no_statistics,
    quarters,
    store_statistics,
    to_rows,
)
from core_triton.hopper_logits import Head, masked, to_logits
from core_triton.kernels import (
    ENTROPY,
    LOG2_E,
    LOGIT_SUM,
    MAX,
    NOT_SPECIALIZED,
    SHIFTS,
    SUM_LIMIT,
    Active,
    TileBlocks,
    launch_tiles,
    piece_start,
    slope,
    tile_of,
    whole_tiles,
)
from core_triton.launch import At
from core_triton.problem import Problem, plan_of


class Switches(NamedTuple):
    has_bias: Any
    has_softcap: Any


class Sizes(NamedTuple):
    classes: Any


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def exponentials_kernel(
    x_matrix, x_stride, w_matrix, w_stride, e_matrix, e_stride, others_matrix, others_stride, bias_ptr, target_ptr,
    ref_exponent_ptr, flag_ptr, sum_ptr, max_ptr, target_logit_ptr, piece, piece_rows,
    first_class, rows, hidden, classes, group, scale, softcap,
    STORES: gl.constexpr, STATISTICS: gl.constexpr, W_BY_CLASS: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`kernels.exponentials_kernel` for one tile."""
    row_block, class_block = tile_of(gl.program_id(0), gl.cdiv(rows, BLOCK_N), gl.cdiv(classes, BLOCK_V), group)
    row, column = row_block * BLOCK_N, class_block * BLOCK_V
    raw = multiply_tile(
        x_matrix, x_stride, (), row, rows, w_matrix, w_stride, column, classes, Steps(0, hidden), (),
        BLOCK_N, BLOCK_V, BLOCK_D, STAGES, W_BY_CLASS,
    )  # fmt: skip

    # The epilogue takes a quarter of the columns at a time: all at once would spill registers.
    WIDTH: gl.constexpr = BLOCK_V // 4
    dtype: gl.constexpr = x_matrix.dtype.element_ty
    by_quarter: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    switches: gl.constexpr = Switches(HAS_BIAS, HAS_SOFTCAP)
    head, sizes = Head(bias_ptr, scale, softcap), Sizes(classes)
    # A thread has eight rows of the matmul's layout. With more statistics than the largest logit, or than the entropy
    # without a softcap, their numbers would spill up to 392 bytes of registers, so a thread then has those of one row.
    # The targets and references are read again in each quarter.
    CROWDED: gl.constexpr = (STATISTICS & ~(MAX | SHIFTS)) != 0 and (HAS_SOFTCAP or (STATISTICS & ~SHIFTS) != ENTROPY)
    by_row: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0]) if CROWDED else gl.SliceLayout(1, MMA)
    row_ids = row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
    inside = row_ids < rows
    ref_exponent = gl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
    place, owns = targets_of(target_ptr, row_ids, inside, first_class, column, classes, BLOCK_V)
    any_target = gl.max(owns.to(gl.int32), 0) != 0
    total = gl.zeros([BLOCK_N], gl.float32, by_row)
    found = no_statistics(total)
    pieces = quarters(raw, MMA)
    for i in gl.static_range(4):
        columns = column + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, MMA))
        logits = to_logits(pieces[i], columns, head, sizes, switches)
        logits = masked(logits, columns, column, classes, BLOCK_V)
        if any_target:  # few tiles have any
            if CROWDED:
                place, _ = targets_of(target_ptr, row_ids, inside, first_class, column, classes, BLOCK_V)
            store_target_logits(target_logit_ptr, logits, row_ids, columns, place)
        logit_sum = total
        if LOGIT_SUM & STATISTICS:
            logit_sum = gl.sum(gl.where(gl.expand_dims(columns < classes, 0), logits, 0.0), 1)
        found = add_logits(found, logits, logit_sum, columns, column, STATISTICS, i * WIDTH)
        if CROWDED:
            ref_exponent = gl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0)
        exponentials = gl.exp2(logits * LOG2_E - gl.expand_dims(ref_exponent, 1))
        total += to_rows(gl.sum(exponentials, 1), found)
        found = add_exponentials(found, logits, exponentials, ref_exponent, STATISTICS)
        if STORES:
            if HAS_SOFTCAP:
                exponentials = gl.where(exponentials == 0, 0.0, exponentials * slope(logits, softcap))
            if SHIFTS & STATISTICS:
                found, exponentials = fit_in_float16(found, exponentials, total, i)
            stored = gl.convert_layout(exponentials.to(dtype), by_quarter)
            if others_matrix is None:
                store_tile(e_matrix, e_stride, stored, row, column + i * WIDTH, rows, classes)
            else:
                first = whole_tiles(first_class, BLOCK_V)
                start = piece_start(e_matrix, others_matrix, e_stride, piece, piece_rows, first + column)
                store_tile(start, e_stride, stored, row, first + column + i * WIDTH, rows, first + classes)
    if CROWDED:
        row_ids = row + gl.arange(0, BLOCK_N, by_row)
        inside = row_ids < rows
    out = class_block.to(gl.int64) * rows + row_ids
    gl.store(sum_ptr + out, total, mask=inside)
    gl.store(flag_ptr + row_block + gl.zeros_like(row_ids), 1, mask=inside & ~(total < SUM_LIMIT))
    if STATISTICS:
        store_statistics(max_ptr, found, class_block, row_ids, rows, inside, STATISTICS)


@gluon.jit
def targets_of(target_ptr, row_ids, inside, first_class, column, classes, BLOCK_V: gl.constexpr):
    """Returns each row's target as a class of the vocabulary chunk, -1 outside of the tile that begins at `column`, and
    whether it is in the tile."""
    target = gl.load(target_ptr + row_ids, mask=inside, other=-1) - first_class
    owns = (target >= column) & (target < gl.minimum(column + BLOCK_V, classes))
    return gl.where(owns, target, -1).to(gl.int32), owns  # 64 bits decide, 32 are compared


@gluon.jit
def store_target_logits(target_logit_ptr, logits, row_ids, columns, target):
    """Writes target_logit (rows,) for the rows whose target is among these columns: each by the thread that has it. A
    sum along the row would take more registers."""
    places = gl.expand_dims(row_ids, 1) + gl.expand_dims(gl.zeros_like(columns), 0)
    gl.store(target_logit_ptr + places, logits, mask=gl.expand_dims(columns, 0) == gl.expand_dims(target, 1))


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
    first, others, *place = e
    pointers = target, ref_exponent, flag, sums, of_logits, target_logit, *place
    switches = {"STORES": first is not None, "STATISTICS": statistics}
    launch_tiles(exponentials_kernel, problem, x, w, vocab_chunk, (first, others), pointers, switches, blocks)
