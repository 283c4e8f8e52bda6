"""The Hopper kernel of d_input without its last step: the sums over the classes of a device's shard, in float32.

Devices that divide the vocabulary add their sums, times rho, before the rows of d_input are rounded: MATH.md (54). The
work units and their matmuls are those of `hopper_gradients.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import hopper_common
from jax_pallas.hopper_common import as_roles, run_kernel
from jax_pallas.hopper_gradients import DInputKernel, d_input_warpgroup, load_d_input
from jax_pallas.hopper_split_head import head_memory, ring_memory, rings_of
from jax_pallas.input_grad import SumsIO, sum_of_parts_kernel
from jax_pallas.tile_config import D_BLOCK, STEP, SplitKSchedule, cdiv, choose_schedule


def d_input_sums_kernel(
    kernel: DInputKernel, e_ref: Any, w_ref: Any, count_ref: Any, sums_ref: Any, *rest: Any
) -> None:  # fmt: skip
    """Does what `d_input_kernel` does, but writes the sums of whole tiles, (columns, rows) of the tiles."""
    part_ref, rest = (rest[0], rest[1:]) if kernel.schedule.partial_tiles else (None, rest)
    ring, head, spare = rings_of(kernel, *rest)
    warpgroup = lax.axis_index("warpgroup")
    load = partial(load_d_input, kernel, ring, head, w_ref, e_ref, None)
    io = SumsIO(sums_ref, None if count_ref is None else count_ref[0])
    multiply_units = partial(d_input_warpgroup, kernel, ring, head, spare, warpgroup, io, part_ref)
    as_roles(warpgroup, load, multiply_units)


def _without_count(body: Callable[..., None], e_ref: Any, w_ref: Any, *rest: Any) -> None:
    body(e_ref, w_ref, None, *rest)


@partial(jax.jit, static_argnames=("rows", "classes", "vocab_axis", "most", "rounds", "interpret", "schedule"))
def d_input_sums(
    e: Array,
    w: Array,
    count: Array | None = None,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    most: int | None = None,
    rounds: bool = False,
    interpret: bool = False,
    schedule: SplitKSchedule | None = None,
) -> Array:
    """Returns the first rows of e @ w, (rows, D) float32, for devices that add those of their classes: a sum of (54).

    Args:
        e, w, classes, vocab_axis, most, interpret, schedule: of `store_d_input`.
        count: () int32, how many of the classes of w count; None: all.
        rows: of e.
        rounds: w is rounded to e's dtype if it is float32, and not split.
    """
    hidden = w.shape[1 - vocab_axis]
    schedule = schedule or choose_schedule(rows, hidden, classes, most, hopper_common.programs())
    kept = classes % STEP if classes < w.shape[vocab_axis] else 0
    float32 = w.dtype != e.dtype
    kernel = DInputKernel(schedule, cdiv(hidden, D_BLOCK), vocab_axis, kept, float32, interpret, rounds=rounds)
    # The accumulators are columns by rows. XLA transposes them where it multiplies them by rho.
    size = kernel.d_blocks * D_BLOCK, cdiv(rows, schedule.tile_rows) * schedule.tile_rows
    ref = jax.new_ref(lax.empty(size, jnp.float32))
    body, operands = partial(d_input_sums_kernel, kernel), (e, w, ref)
    if count is None:
        body = partial(_without_count, body)
    else:
        operands = e, w, count[None], ref
    parts = (schedule.partial_tiles, D_BLOCK, schedule.tile_rows)
    results = [jax.ShapeDtypeStruct(parts, jnp.float32)] if schedule.partial_tiles else []
    scratch, grid = [*ring_memory(kernel, e.dtype), *head_memory(kernel, e.dtype)], (hopper_common.programs(),)
    found = run_kernel(body, "d_input_sums", operands, results, scratch, grid, interpret)
    if found:
        body, grid = partial(sum_of_parts_kernel, kernel), (schedule.split_tiles, schedule.tile_rows // kernel.piece)
        run_kernel(body, "sum_of_parts", (*found, ref), [], [], grid, interpret, threads=2)
    return jax.freeze(ref)[:hidden, :rows].T
