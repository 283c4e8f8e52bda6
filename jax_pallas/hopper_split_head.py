"""The matmul of the Hopper kernel of d_input with a float32 head, which is split in two matrices or rounded to one.

Equations: MATH.md (39). The kernel is in `hopper_gradients.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.hopper_common import (
    STAGES,
    PairRing,
    Ring,
    clear_after,
    make_ring,
    ring_barriers,
    slot_of,
    transforms,
    two_views,
    views,
    when,
)
from jax_pallas.hopper_registers import ACCUMULATOR, add_split
from jax_pallas.tile_config import HALF, STEP

if TYPE_CHECKING:
    from jax_pallas.hopper_gradients import DInputKernel
    from jax_pallas.input_grad import WorkUnit

# Steps of a float32 head that are loaded ahead, a power of two. They are free again as soon as their halves are in
# registers, so fewer are enough than of e.
HEAD_STAGES = 2


def head_slot(number: Any) -> Any:
    return number & (HEAD_STAGES - 1)


def ring_memory(kernel: "DInputKernel", dtype: Any) -> list[Any]:
    """Returns the types of the shared memory of a kernel of d_input: steps of w and of e (of `dtype`) that are loaded
    ahead, and their barriers."""
    rings = [
        two_views((STAGES, *shape, 64), dtype, interpret=kernel.interpret)
        for shape in ((2, STEP), (kernel.schedule.tile_rows,))
    ]
    if kernel.casts_head:  # rows of 256 bytes are tiled for TMA too
        rings[0] = plgpu.SMEM((HEAD_STAGES, 2, STEP, HALF), jnp.float32, transforms=transforms(HALF, 4))
    return [*rings, *ring_barriers(1 if kernel.casts_head else 3)]


def head_memory(kernel: "DInputKernel", dtype: Any) -> list[Any]:
    """Returns the types of what a float32 head takes beside `ring_memory`; nothing for another head."""
    if not kernel.casts_head:
        return []
    barriers = [plgpu.Barrier(num_arrivals=2, num_barriers=HEAD_STAGES) for _ in range(2)]
    in_memory = kernel.interpret and kernel.rounds
    return barriers + [plgpu.SMEM((2, HALF, STEP), dtype, transforms=transforms(STEP))] * in_memory


def rings_of(
    kernel: "DInputKernel", w_all: Any, e_all: Any, full: Any, empty: Any, *of_head: Any
) -> tuple[Ring, PairRing | None, Any]:
    """Returns the ring of a kernel with the references of `ring_memory` and `head_memory`. For a float32 head, also
    that of the head; and if it is rounded, memory in place of registers, (2, HALF, STEP), for the interpreter, whose
    `plgpu.wgmma` multiplies only what is in memory."""
    e_views = views(e_all, interpret=kernel.interpret)
    if not kernel.casts_head:
        return make_ring(views(w_all, interpret=kernel.interpret), e_views, full, empty), None, None
    w_full, w_empty, *spares = of_head
    ring, head = make_ring((None, None), e_views, full, empty), PairRing(w_all, w_all, w_full, w_empty)
    return ring, head, spares[0] if spares else None


def loaded_step(
    kernel: "DInputKernel", head: PairRing, warpgroup: Array, unit: "WorkUnit", s: Any, of_head: Any, classes: Any
) -> Any:
    """Waits for step s of a float32 head, in slot `of_head`, sets what is no class to 0 and returns the reference,
    (HALF, STEP)."""
    # A thread loads two numbers that are next to each other in memory, and exchanges one with another if need be.
    layout = plgpu.Layout.WGMMA if kernel.vocab_axis else plgpu.Layout.WGMMA_TRANSPOSED
    w = head.pieces.at[of_head, warpgroup]
    w = w.transpose((1, 0)) if kernel.vocab_axis == 0 else w
    plgpu.barrier_wait(head.full.at[of_head])
    if kernel.kept:
        last = unit.first + s == kernel.schedule.iters_per_tile - 1
        when(last)(lambda: clear_after(w, kernel.kept, layout))
    if classes is not None:
        kept = classes - (unit.first + s) * STEP
        when(kept < STEP)(lambda: clear_after(w, kept, layout))
    return w


def in_accumulator(kernel: "DInputKernel", multiply: Callable[..., Array], **arguments: Any) -> Array:
    """Returns the result of a function whose first argument is an accumulator of wgmma."""
    accumulator = plgpu.WGMMAAccumulatorRef((HALF, kernel.schedule.tile_rows), jnp.float32)
    return pl.run_scoped(lambda acc: multiply(acc, **arguments), accumulator)


def multiply_head_unit(kernel: "DInputKernel", spare: Any, **arguments: Any) -> Array:
    """Returns what `multiply_unit` returns, of a float32 head, which is split or rounded. spare: of `rings_of`."""
    if kernel.rounds:
        return in_accumulator(kernel, partial(multiply_rounded_unit, kernel=kernel, spare=spare), **arguments)
    return multiply_split_unit(kernel, **arguments)


def multiply_split_unit(
    kernel: "DInputKernel",
    ring: Ring,
    head: PairRing,
    warpgroup: Array,
    unit: "WorkUnit",
    count: Any,
    classes: Any = None,
) -> Array:
    """Returns what `multiply_unit` returns, of a float32 head that is split in registers: (39)."""
    options: dict[str, Any] = {"transposed": kernel.vocab_axis == 0, "interpret": kernel.interpret}

    def step(s: Any, acc: Array) -> Array:
        slot, of_head = slot_of(count + s), head_slot(count + s)
        loaded_step(kernel, head, warpgroup, unit, s, of_head, classes)
        plgpu.barrier_wait(ring.full.at[slot])
        acc = add_split(acc, head.pieces.at[of_head, warpgroup], ring.b.at[slot], **options)
        plgpu.barrier_arrive(head.empty.at[of_head])  # all of it was in registers when the last matmul was issued
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(ring.empty.at[slot])
        return acc

    zeros = plgpu.layout_cast(jnp.zeros((HALF, kernel.schedule.tile_rows), jnp.float32), ACCUMULATOR)
    return plgpu.layout_cast(lax.fori_loop(0, unit.length, step, zeros), plgpu.Layout.WGMMA)


def multiply_rounded_unit(
    acc: Any,
    kernel: "DInputKernel",
    ring: Ring,
    head: PairRing,
    spare: Any,
    warpgroup: Array,
    unit: "WorkUnit",
    count: Any,
    classes: Any = None,
) -> Array:
    """Returns what `multiply_unit` returns, of a float32 head that is rounded to bfloat16. spare: of `rings_of`.

    A step has one matmul, whose first operand is in registers. They get the next step when it is done. Meanwhile the
    tensor cores have the matmul of the other warpgroup.
    """

    def operand(part: Array) -> Any:
        if spare is None:
            return part
        spare[warpgroup] = part
        return spare.at[warpgroup]

    def step(s: Any, *, releases: bool = True) -> None:
        slot, of_head = slot_of(count + s), head_slot(count + s)
        e = ring.b.at[slot].transpose((1, 0))
        w = loaded_step(kernel, head, warpgroup, unit, s, of_head, classes)
        layout = plgpu.Layout.WGMMA if kernel.vocab_axis else plgpu.Layout.WGMMA_TRANSPOSED
        whole = plgpu.layout_cast(plgpu.load(w, layout=layout), plgpu.Layout.WGMMA)
        plgpu.wgmma_wait(0)  # the matmul of the step before is done
        if releases:
            plgpu.barrier_arrive(ring.empty.at[slot_of(count + s - 1)])
        high = whole.astype(jnp.bfloat16)
        plgpu.barrier_wait(ring.full.at[slot])
        plgpu.wgmma(acc, operand(high), e)
        # Only here, where all numbers are in use: the assembler does not wait for a load before an arrival.
        plgpu.barrier_arrive(head.empty.at[of_head])

    step(0, releases=False)
    pl.loop(1, unit.length)(step)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ring.empty.at[slot_of(count + unit.length - 1)])
    return acc[...]
