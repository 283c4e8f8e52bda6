"""The common parts of the two kernels of d_input, for Hopper (`hopper_gradients.py`) and for compute capability 8.x
(`ampere_gradients.py`).

    d_input = rho (E W) + theta w_target       (n, D), summed over classes: (32)

Persistent programs divide the tiles by a split-K schedule (`tile_config.SplitKSchedule`). A work unit of a program is a
whole tile or a part of one. One program finishes a tile. The others that compute parts of it store partial tiles,
float32, in slots in memory and count them (`count_partial_tile`). The program that finishes the tile waits for them
(`wait_for_partial_tiles`) and adds them in order. The number of active rows of a chunk is in device memory. The kernels
skip the rows after them.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from core_triton import tile_config
from core_triton.kernels import Active
from core_triton.launch import At, cdiv, launch
from core_triton.problem import Problem, plan_of
from core_triton.tile_config import ScaledExpConfig


class WorkUnit(NamedTuple):
    """The iterations of one tile that a program computes."""

    tile: Any
    first: Any  # iteration
    last: Any  # the iteration after the last
    slot: Any  # of the partial tile that the program stores; -1: the program finishes the tile
    split: Any  # the number of the tile among the split tiles
    others: Any  # partial tiles of other programs, where the program finishes the tile


@gluon.jit
def own_program():
    """Returns the number of the program in the schedule.

    Programs start in the order of their ids. One that waits has a higher id than those that it waits for, so they have
    started before it, even if other kernels leave room for only a part of the programs at a time.
    """
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def last_tails_of(schedule):
    """Returns how many tails the last wave of the tail programs has, and how many programs compute parts of each: 0
    where all tails are computed whole."""
    last_tails = schedule.split_tiles % gl.maximum(schedule.tail_programs, 1)
    return last_tails, gl.where(last_tails > 0, schedule.tail_programs // gl.maximum(last_tails, 1), 0)


@gluon.jit
def work_unit_of(index, schedule):
    """Returns a program's work unit number `index` of a `SplitKSchedule`.

    Programs first compute whole tiles in `full_waves` waves. The other `split_tiles` tiles are split along the classes.
    Their first `split_iters` iterations are split into `split_factor` equal parts. The other iterations of each are its
    tail. The `tail_programs` programs that have no part compute whole tails in waves, and an equal part of one of the
    last tails. The program with the first part of a tile finishes it. Programs of the same part or wave read the same
    classes at the same time and share what they read. Tiles are numbered with the blocks of D first: tiles that run
    together then have few rows of e, which are read from memory once.
    """
    program, programs = own_program(), gl.num_programs(0)
    tile = program + index * programs
    first, last, slot, split, others = 0, schedule.iters_per_tile, -1, 0, 0
    if index >= schedule.full_waves:
        parts = schedule.split_factor * schedule.split_tiles
        last_tails, tail_factor = last_tails_of(schedule)
        if program < parts:
            split = program % schedule.split_tiles
            part = program // schedule.split_tiles
            first = schedule.split_iters * part // schedule.split_factor
            last = schedule.split_iters * (part + 1) // schedule.split_factor
            if part > 0:
                slot = program - schedule.split_tiles
            else:
                others = schedule.split_factor - 1
                if schedule.tail_programs > 0:
                    others += gl.where(split < schedule.split_tiles - last_tails, 1, tail_factor)
        else:
            worker = program - parts
            split = worker + (index - schedule.full_waves) * schedule.tail_programs
            first = schedule.split_iters
            slot = parts - schedule.split_tiles + split
            if split >= schedule.split_tiles - last_tails:
                tail_iters = schedule.iters_per_tile - schedule.split_iters
                part = worker // last_tails
                split = schedule.split_tiles - last_tails + worker % last_tails
                last = first + tail_iters * (part + 1) // tail_factor
                first += tail_iters * part // tail_factor
        tile = schedule.full_waves * programs + split
    return WorkUnit(tile, first, last, slot, split, others)


@gluon.jit
def slot_of(other, split, schedule):
    """Returns the slot of the partial tile number `other` of a split tile: first those of its parts, then its tail."""
    parts = schedule.split_factor - 1
    last_tails, _ = last_tails_of(schedule)
    before = gl.minimum(other, parts) * schedule.split_tiles + gl.maximum(other - parts, 0) * last_tails
    return before + split


@gluon.jit
def num_work_units(schedule):
    """Returns how many work units a program has."""
    worker = own_program() - schedule.split_factor * schedule.split_tiles
    units = schedule.full_waves
    if worker < 0:
        units += 1
    elif worker < schedule.tail_programs:
        last_tails, tail_factor = last_tails_of(schedule)
        units += schedule.split_tiles // schedule.tail_programs
        units += gl.where(worker < tail_factor * last_tails, 1, 0)
    return units


@gluon.jit
def count_partial_tile(counter_ptr):
    """Counts a partial tile that all threads of the program, or of the warpgroup, have stored."""
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def wait_for_partial_tiles(counter_ptr, count):
    """Waits until `count` partial tiles are counted, and sets the counter to 0 for the next kernel. With a count of 0
    the counter may be that of another tile, and is left alone."""
    found = gl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    while found < count:
        found = gl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    gl.thread_barrier()
    gl.store(counter_ptr, 0, mask=count > 0)


class DInputIO(NamedTuple):
    """What a kernel of d_input reads and writes besides the matrices that it multiplies."""

    part_ptr: Any
    counter_ptr: Any
    rho_ptr: Any
    theta_ptr: Any
    target_ptr: Any
    row_ptr: Any
    weight_ptr: Any
    weight_stride: Any
    weight_stride_d: Any
    d_input_ptr: Any


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
    places = gl.expand_dims(out * hidden, 1) + gl.expand_dims(columns, 0)
    gl.store(io.d_input_ptr + places, result.to(io.d_input_ptr.dtype.element_ty), mask=keeps)


class DInputLaunch(NamedTuple):
    """What differs between the launches of the two kernels of d_input.

    Args:
        kernel: `hopper_gradients.d_input_kernel` or `ampere_gradients.d_input_kernel`.
        matrices: its arguments for the head and the exponentials.
        constexprs: its constexprs, then num_warps and other options of the compiler.
    """

    kernel: Any
    matrices: tuple[Any, ...]
    constexprs: dict[str, Any]


def store_d_input(
    made: DInputLaunch,
    problem: Problem,
    config: ScaledExpConfig,
    e: Tensor,
    active: Active,
    *,
    partial_sums: Tensor,
    counters: Tensor,
    rho: At,
    theta: At,
    target: At,
    order: At,
    d_input: Tensor,
) -> None:
    """Launches a kernel of d_input for the packed rows of a chunk.

    Args:
        made: the kernel.
        e: the exponentials of the chunk (n, K).
        active: its rows that are computed.
        partial_sums: float32, for the partial tiles of the schedule.
        counters: int32, `DInputTiling.counters` of them, all 0. They are 0 again after the kernel.
        rho, theta, target, order: of `row_kernels.finish_rows`, from the first row of the chunk on.
        d_input: (N, D), of which the rows `order` are written.
    """
    w, (n, classes), hidden, tiling = problem.linear_weight, e.shape, d_input.shape[1], plan_of(problem).d_input_tiling
    assert tiling is not None
    tile_rows, programs = config.d_input_rows, tiling.programs
    tiles, steps = cdiv(n, tile_rows) * cdiv(hidden, tile_config.D_BLOCK), cdiv(classes, tiling.step)
    schedule = tile_config.choose_schedule(tiles, steps, programs, splits_tiles=config.splits_tiles)
    pointers = partial_sums, counters, rho, theta, target, order, w, *w.stride(), d_input, active.count
    sizes = active.start, n, hidden, classes
    launch(made.kernel, (programs,), *made.matrices, *pointers, *sizes, *schedule, **made.constexprs)
