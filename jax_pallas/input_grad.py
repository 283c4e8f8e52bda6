"""How the programs of the Hopper kernel of d_input divide its tiles: the work units of a `SplitKSchedule`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_pallas import hopper_common
from jax_pallas.tile_config import SplitKSchedule


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
