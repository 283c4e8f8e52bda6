"""The common parts of the two kernels of d_input, for Hopper (`hopper_gradients.py`) and for compute capability 8.x and
12.x (`ampere_gradients.py`).

    d_input = rho (E W) + theta w_target       (n, D), summed over classes: (32)

Persistent programs divide the tiles by a split-K schedule (`tile_config.SplitKSchedule`). A work unit of a program is a
whole tile, which it finishes, or a part of one. The partial tile of a part, float32, goes to a slot in memory, and
`d_input_sum_kernel` sums and finishes the split tiles. The number of active rows of a chunk is in device memory. The
kernels skip the rows after them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from core_triton import tile_config
from core_triton.hopper_common import NOT_SPECIALIZED
from core_triton.kernels import Active
from core_triton.launch import At, cdiv, launch
from core_triton.problem import Problem, plan_of
from core_triton.tile_config import ScaledExpConfig


class WorkUnit(NamedTuple):
    """The iterations of one tile that a program computes."""

    tile: Any
    first: Any  # iteration
    last: Any  # the iteration after the last
    slot: Any  # of the partial tiles; -1: the unit is a whole tile


@gluon.jit
def last_tails_of(schedule):
    """Returns how many tails the last wave of the tail programs has, and how many programs compute parts of each: 0
    where all tails are computed whole."""
    last_tails = schedule.split_tiles % schedule.tail_programs
    return last_tails, gl.where(last_tails > 0, schedule.tail_programs // gl.maximum(last_tails, 1), 0)


@gluon.jit
def work_unit_of(index, schedule):
    """Returns a program's work unit number `index` of a `SplitKSchedule`.

    Programs first compute whole tiles in `full_waves` waves. The other `split_tiles` tiles are split along the classes.
    Their first `split_iters` iterations are split into `split_factor` equal parts. The other iterations of each are its
    tail. The `tail_programs` programs that have no part compute whole tails in waves, and an equal part of one of the
    last tails. Programs of the same part or wave read the same classes at the same time and share what they read. Tiles
    are numbered with the blocks of D first: tiles that run together then have few rows of e, which are read from memory
    once.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    tile = program + index * programs
    first, last, slot = 0, schedule.iters_per_tile, -1
    if index >= schedule.full_waves:
        parts = schedule.split_factor * schedule.split_tiles
        if program < parts:
            piece = program % schedule.split_tiles
            part = program // schedule.split_tiles
            first = schedule.split_iters * part // schedule.split_factor
            last = schedule.split_iters * (part + 1) // schedule.split_factor
            slot = gl.where(last - first == schedule.iters_per_tile, -1, program)
        else:
            last_tails, tail_factor = last_tails_of(schedule)
            worker = program - parts
            piece = worker + (index - schedule.full_waves) * schedule.tail_programs
            first = schedule.split_iters
            slot = parts + piece
            if piece >= schedule.split_tiles - last_tails:
                tail_iters = schedule.iters_per_tile - schedule.split_iters
                part = worker // last_tails
                piece = schedule.split_tiles - last_tails + worker % last_tails
                last = first + tail_iters * (part + 1) // tail_factor
                first += tail_iters * part // tail_factor
        tile = schedule.full_waves * programs + piece
    return WorkUnit(tile, first, last, slot)


@gluon.jit
def num_work_units(schedule):
    """Returns how many work units a program has."""
    worker = gl.program_id(0) - schedule.split_factor * schedule.split_tiles
    units = schedule.full_waves
    if worker < 0:
        units += 1
    elif worker < schedule.tail_programs:
        last_tails, tail_factor = last_tails_of(schedule)
        units += schedule.split_tiles // schedule.tail_programs
        units += gl.where(worker < tail_factor * last_tails, 1, 0)
    return units


class DInputIO(NamedTuple):
    """What a kernel of d_input reads and writes besides the matrices that it multiplies."""

    part_ptr: Any
    rho_ptr: Any
    theta_ptr: Any
    target_ptr: Any
    row_ptr: Any
    weight_ptr: Any
    weight_stride: Any
    weight_stride_d: Any
    d_input_ptr: Any
    smooth: Any  # () or (factor_ptr, mean_row_ptr): factor * mean_row is added to a row, the term of label smoothing


@gluon.jit
def finish_rows(total, row_ids, columns, io, active, hidden, classes):
    """Writes rows of d_input from total = e @ w (rows, columns): (32), rounded once. A thread should hold neighboring
    columns."""
    inside = row_ids < active
    rho = gl.load(io.rho_ptr + row_ids, mask=inside, other=0.0)
    theta = gl.load(io.theta_ptr + row_ids, mask=inside, other=0.0)
    target = gl.load(io.target_ptr + row_ids, mask=inside, other=-1)
    out = gl.load(io.row_ptr + row_ids, mask=inside, other=0)
    is_class = (target >= 0) & (target < classes)
    keeps = gl.expand_dims(inside, 1) & gl.expand_dims(columns < hidden, 0)
    places = gl.expand_dims(target * io.weight_stride, 1)
    places += gl.expand_dims(columns.to(gl.int64) * io.weight_stride_d, 0)
    own = gl.load(io.weight_ptr + places, mask=keeps & gl.expand_dims(is_class, 1), other=0.0)
    theta = gl.where(is_class, theta, 0.0)
    result = total * gl.expand_dims(rho, 1) + own.to(gl.float32) * gl.expand_dims(theta, 1)
    if len(io.smooth) > 0:
        factor = gl.load(io.smooth[0] + row_ids, mask=inside, other=0.0)
        mean_row = gl.load(io.smooth[1] + columns, mask=columns < hidden, other=0.0)
        result += gl.expand_dims(factor, 1) * gl.expand_dims(mean_row, 0)
    places = gl.expand_dims(out * hidden, 1) + gl.expand_dims(columns, 0)
    gl.store(io.d_input_ptr + places, result.to(io.d_input_ptr.dtype.element_ty), mask=keeps)


@triton.jit(
    do_not_specialize=[
        *NOT_SPECIALIZED,
        "first_tile",
        "split_tiles",
        "split_factor",
        "tail_programs",
    ]
)
def d_input_sum_kernel(
    part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr,
    count_ptr, start, rows, hidden, classes,
    first_tile, split_tiles, split_factor, tail_programs,
    TILE_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, factor_ptr=None, mean_row_ptr=None,
):  # fmt: skip
    """The fix-up of the split tiles: sums their partial tiles in order and finishes them as `d_input_kernel` does whole
    tiles.

    One program owns BLOCK_N rows x BLOCK_D columns of one tile.
    """
    index = tl.program_id(0)
    tile, d_blocks = first_tile + index, tl.cdiv(hidden, 128)
    active = tl.minimum(tl.load(count_ptr) - start, rows)
    d_within = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n_within = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ids = (tile // d_blocks) * TILE_N + n_within
    if (tile // d_blocks) * TILE_N < active:
        within = d_within[:, None] * TILE_N + n_within[None, :]
        total = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
        for part in range(split_factor):
            slot = part * split_tiles + index
            total += tl.load(part_ptr + slot * (128 * TILE_N) + within)
        if tail_programs > 0:
            last_tails = split_tiles % tail_programs
            tail_factor = tl.where(index < split_tiles - last_tails, 1, tail_programs // tl.maximum(last_tails, 1))
            for part in range(tail_factor):
                slot = split_factor * split_tiles + part * last_tails + index
                total += tl.load(part_ptr + slot * (128 * TILE_N) + within)
        columns = (tile % d_blocks) * 128 + d_within
        inside = row_ids < active
        rho = tl.load(rho_ptr + row_ids, mask=inside, other=0.0)
        theta = tl.load(theta_ptr + row_ids, mask=inside, other=0.0)
        target = tl.load(target_ptr + row_ids, mask=inside, other=-1)
        is_class = (target >= 0) & (target < classes)
        keeps = inside[:, None] & (columns < hidden)[None, :]
        w_places = (target * weight_stride)[:, None] + columns.to(tl.int64)[None, :] * weight_stride_d
        own = tl.load(weight_ptr + w_places, mask=keeps & is_class[:, None], other=0.0).to(tl.float32)
        result = tl.trans(total) * rho[:, None] + own * tl.where(is_class, theta, 0.0)[:, None]
        if mean_row_ptr is not None:
            factor = tl.load(factor_ptr + row_ids, mask=inside, other=0.0)
            mean_row = tl.load(mean_row_ptr + columns, mask=columns < hidden, other=0.0)
            result += factor[:, None] * mean_row[None, :]
        out = tl.load(row_ptr + row_ids, mask=inside, other=0)
        places = (out * hidden)[:, None] + columns[None, :]
        tl.store(d_input_ptr + places, result.to(d_input_ptr.dtype.element_ty), mask=keeps)


@triton.jit(
    do_not_specialize=[
        *NOT_SPECIALIZED,
        "first_tile",
        "split_tiles",
        "split_factor",
        "tail_programs",
    ]
)
def smooth_d_input_sum_kernel(
    part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr,
    count_ptr, start, rows, hidden, classes,
    first_tile, split_tiles, split_factor, tail_programs, factor_ptr, mean_row_ptr,
    TILE_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`d_input_sum_kernel` with label smoothing, another kernel for the reasons of
    `row_kernels.finish_rows_of_pieces_kernel`."""
    d_input_sum_kernel(
        part_ptr, rho_ptr, theta_ptr, target_ptr, row_ptr, weight_ptr, weight_stride, weight_stride_d, d_input_ptr,
        count_ptr, start, rows, hidden, classes,
        first_tile, split_tiles, split_factor, tail_programs, TILE_N, BLOCK_D, BLOCK_N, factor_ptr, mean_row_ptr,
    )  # fmt: skip


class DInputLaunch(NamedTuple):
    """What differs between the launches of the kernels of d_input.

    Args:
        kernel: `d_input_kernel`, `d_input_of_pieces_kernel` or `smooth_d_input_kernel`, of `hopper_gradients` or of
            `ampere_gradients`.
        matrices: its arguments for the head and the exponentials.
        sizes: its arguments after those that all kernels have, but for those of label smoothing.
        constexprs: its constexprs, then num_warps and other options of the compiler.
    """

    kernel: Any
    matrices: tuple[Any, ...]
    sizes: tuple[int, ...]
    constexprs: dict[str, Any]


def store_d_input(
    made: DInputLaunch,
    problem: Problem,
    config: ScaledExpConfig,
    n: int,
    active: Active,
    *,
    partial_sums: Tensor,
    rho: At,
    theta: At,
    target: At,
    order: At,
    d_input: Tensor,
    smooth: tuple[At, Tensor] | None,
) -> None:
    """Launches a kernel of d_input, and `d_input_sum_kernel` where tiles are split, for the n packed rows of a chunk.
    `smooth`: see `DInputIO`; then `made` has a kernel that takes it."""
    w, hidden, tiling = problem.linear_weight, d_input.shape[1], plan_of(problem).d_input_tiling
    classes = problem.classes
    assert tiling is not None
    tile_rows, programs = config.d_input_rows, tiling.programs
    tiles, steps = cdiv(n, tile_rows) * cdiv(hidden, tile_config.D_BLOCK), cdiv(classes, tiling.step)
    schedule = tile_config.choose_schedule(tiles, steps, programs, splits_tiles=config.splits_tiles)
    pointers = partial_sums, rho, theta, target, order, w, *w.stride(), d_input, active.count
    sizes = active.start, n, hidden, classes
    terms = smooth or ()
    arguments = *made.matrices, *pointers, *sizes, *schedule, *made.sizes, *terms
    launch(made.kernel, (programs,), *arguments, **made.constexprs)
    if schedule.partial_tiles:
        launch(
            smooth_d_input_sum_kernel if smooth else d_input_sum_kernel,
            (schedule.split_tiles, tile_config.D_BLOCK // 32, tile_rows // 64),
            *pointers,
            *sizes,
            schedule.full_waves * programs,
            schedule.split_tiles,
            schedule.split_factor,
            schedule.tail_programs,
            *terms,
            TILE_N=tile_rows,
            BLOCK_D=32,
            BLOCK_N=64,
            num_warps=4,
        )
