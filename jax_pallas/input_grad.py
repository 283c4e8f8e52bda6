"""How the programs of the Hopper kernel of d_input divide its tiles, the work units of a `SplitKSchedule`, and finish
its rows. The kernel is in `hopper_gradients.py`."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas import hopper_common
from jax_pallas.hopper_common import COLUMN, ROW, store_part_lines, views
from jax_pallas.tile_config import HALF, SplitKSchedule

if TYPE_CHECKING:
    from jax_pallas.hopper_gradients import DInputKernel


class WorkUnit(NamedTuple):
    """The iterations of one tile that a program computes."""

    tile: Any
    first: Any  # iteration
    length: Any  # iterations
    slot: Any  # of the partial tiles; -1: the unit is a whole tile


def work_unit_of(index: Any, schedule: SplitKSchedule) -> WorkUnit:
    """Returns a program's work unit number `index` of a `SplitKSchedule`.

    Programs first compute whole tiles in `full_waves` waves. The other `split_tiles` tiles are split along the classes.
    Their first `split_iters` iterations are split into `split_factor` equal parts. The other iterations of each are its
    tail. The `tail_programs` programs that have no part compute whole tails in waves, and an equal part of one of the
    last tails. Programs of the same part or wave read the same classes at the same time and share what they read. Tiles
    are numbered with the blocks of D first: tiles that run together then have few rows of e, which are read from memory
    once.
    """
    program, many = lax.axis_index("program"), hopper_common.programs()
    split_tiles, split_factor, split_iters = schedule.split_tiles, schedule.split_factor, schedule.split_iters
    found = program + index * many, jnp.int32(0), jnp.int32(schedule.iters_per_tile), jnp.int32(-1)
    if split_tiles:
        whole_tiles, parts = schedule.full_waves * many, split_factor * split_tiles
        part = lax.div(program, split_tiles)
        first, last = lax.div(split_iters * part, split_factor), lax.div(split_iters * (part + 1), split_factor)
        slot = jnp.where(last - first == schedule.iters_per_tile, -1, program)
        own = whole_tiles + lax.rem(program, split_tiles), first, last, slot
        if schedule.tail_programs:
            worker = program - parts
            piece = worker + (index - schedule.full_waves) * schedule.tail_programs
            tail = whole_tiles + piece, jnp.int32(split_iters), jnp.int32(schedule.iters_per_tile), parts + piece
            if schedule.tail_factor:
                tail_iters, whole_tails = schedule.iters_per_tile - split_iters, split_tiles - schedule.last_tails
                part = lax.div(worker, schedule.last_tails)
                first, last = (lax.div(tail_iters * edge, schedule.tail_factor) for edge in (part, part + 1))
                tile = whole_tiles + whole_tails + lax.rem(worker, schedule.last_tails)
                last_tail = tile, split_iters + first, split_iters + last, parts + piece
                tail = (jnp.where(piece < whole_tails, a, b) for a, b in zip(tail, last_tail, strict=True))
            own = (jnp.where(program < parts, a, b) for a, b in zip(own, tail, strict=True))
        found = (jnp.where(index < schedule.full_waves, a, b) for a, b in zip(found, own, strict=True))
    tile, first, last, slot = found
    return WorkUnit(tile, first, last - first, slot)


def num_work_units(schedule: SplitKSchedule) -> Any:
    """Returns how many work units a program has."""
    worker = lax.axis_index("program") - schedule.split_factor * schedule.split_tiles
    found = jnp.where(worker < 0, 1, 0)
    if schedule.tail_programs:
        tails = schedule.tail_waves + jnp.where(worker < schedule.tail_factor * schedule.last_tails, 1, 0)
        found = jnp.where((worker >= 0) & (worker < schedule.tail_programs), tails, found)
    return schedule.full_waves + found


class DInputIO(NamedTuple):
    """The memory that `finish` reads and writes."""

    start: Any  # the chunk's first row of held
    rho_ref: Any  # (rows of the tiles,)
    theta_ref: Any
    held_ref: Any  # (N, D)
    moved: Any  # a buffer for each warpgroup, (2, piece, HALF), as TMA takes it
    buffers: Any  # as registers do
    came: Any  # (2,): what was held is in the buffer
    low_ref: Any = None  # (n, D): what is added to the chunk's rows of held
    low_views: Any = None  # its buffers, as TMA and as registers take them
    smooth: Any = None  # (rows of the tiles,) and (columns of the tiles,): their product is added


class SumsIO(NamedTuple):
    """What `finish` writes in place of rows of `DInputIO`."""

    sums_ref: Any  # (columns of the tiles, rows of the tiles) float32
    count: Any = None  # of the classes that count; None: all


def finish(io: DInputIO | SumsIO, sums: Array, row: Any, d: Any) -> None:
    """Writes rho * sums + theta * held, of (64, rows) sums of columns of D and rows of the chunk from d and row on.

    The terms of label smoothing are added, if any. With `SumsIO` it writes the sums.
    """
    warpgroup, rows = lax.axis_index("warpgroup"), sums.shape[1]
    if isinstance(io, SumsIO):
        store_part_lines(io.sums_ref.at[pl.ds(d, HALF), pl.ds(row, rows)], sums)
        return
    moved, buffer = (view.at[warpgroup] for view in (io.moved, io.buffers))
    place = io.held_ref.at[pl.ds(io.start + row, rows), pl.ds(d, HALF)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.copy_gmem_to_smem(place, moved, io.came.at[warpgroup])
    if io.low_ref is not None:
        source = io.low_ref.at[pl.ds(row, rows), pl.ds(d, HALF)]
        plgpu.copy_gmem_to_smem(source, io.low_views[0].at[warpgroup], io.came.at[warpgroup])
    plgpu.barrier_wait(io.came.at[warpgroup])
    buffer = buffer.transpose((1, 0))
    total, held = jnp.zeros_like(sums), plgpu.load(buffer, layout=plgpu.Layout.WGMMA)
    if io.low_ref is not None:
        low = plgpu.load(io.low_views[1].at[warpgroup].transpose((1, 0)), layout=plgpu.Layout.WGMMA)
        held = held.astype(jnp.float32) + low.astype(jnp.float32)
    for ref, term in (io.rho_ref, sums), (io.theta_ref, held):
        factor = plgpu.load(ref.at[pl.ds(row, rows)], layout=COLUMN, optimized=False)
        factor = lax.broadcast_in_dim(factor, sums.shape, (1,))
        total += jnp.where(factor == 0, 0.0, factor * term.astype(jnp.float32))
    if io.smooth is not None:
        factor = plgpu.load(io.smooth[0].at[pl.ds(row, rows)], layout=COLUMN, optimized=False)
        mean_row = plgpu.load(io.smooth[1].at[pl.ds(d, HALF)], layout=ROW, optimized=False)
        factor = lax.broadcast_in_dim(factor, sums.shape, (1,))
        total += jnp.where(factor == 0, 0.0, factor * lax.broadcast_in_dim(mean_row, sums.shape, (0,)))
    plgpu.commit_smem()  # all have read it
    buffer[...] = total.astype(io.held_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(moved, place)


def d_input_sum_kernel(
    kernel: "DInputKernel", start_ref: Any, part_ref: Any, rho_ref: Any, theta_ref: Any, held_ref: Any, *rest: Any
) -> None:  # fmt: skip
    """The fix-up: adds the partial tiles of a piece of a split tile, in order, and finishes it."""
    smooth, rest = (rest[:2], rest[2:]) if kernel.smooths else (None, rest)
    low = ()
    if kernel.casts_head:
        low = rest[0], views(rest[-1], interpret=kernel.interpret)
        rest = rest[1:-1]
    buffers, came = rest
    place = added_parts(kernel, part_ref)
    moved, buffers = views(buffers, interpret=kernel.interpret)
    io = DInputIO(start_ref[0], rho_ref, theta_ref, held_ref, moved, buffers, came, *low, smooth=smooth)
    finish(io, *place)
    plgpu.wait_smem_to_gmem(0)


def sum_of_parts_kernel(kernel: "DInputKernel", part_ref: Any, sums_ref: Any) -> None:
    """Does what `d_input_sum_kernel` does, but writes the sums of `SumsIO`."""
    finish(SumsIO(sums_ref), *added_parts(kernel, part_ref))


def added_parts(kernel: "DInputKernel", part_ref: Any) -> tuple[Array, Any, Any]:
    """Returns the sum of the partial tiles of this program's piece of a split tile, in order, and where it is."""
    schedule, piece = kernel.schedule, kernel.piece
    warpgroup, index, i = lax.axis_index("warpgroup"), lax.axis_index("program"), lax.axis_index("piece")
    row, d = kernel.tile_at(schedule.full_waves * hopper_common.programs() + index)

    def part(slot: Any) -> Array:
        where = slot, pl.ds(warpgroup * HALF, HALF), pl.ds(i * piece, piece)
        return plgpu.load(part_ref.at[where], layout=plgpu.Layout.WGMMA, optimized=False)

    total = part(index)
    for k in range(1, schedule.split_factor):
        total += part(k * schedule.split_tiles + index)
    if schedule.tail_programs:
        first = schedule.split_factor * schedule.split_tiles + index
        total += part(first)
        if schedule.tail_factor > 1:

            def add(k: Any, total: Array) -> Array:
                return total + part(first + k * schedule.last_tails)

            split = index >= schedule.split_tiles - schedule.last_tails
            total = lax.fori_loop(1, jnp.where(split, schedule.tail_factor, 1), add, total)
    return total, row + i * piece, d + warpgroup * HALF
