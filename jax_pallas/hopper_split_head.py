"""The matmul of the Hopper kernel of d_input with a float32 head, which is multiplied as two matrices: MATH.md (39).

The kernel is in `hopper_gradients.py`.
"""

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
    return barriers + [plgpu.SMEM((2, 2, HALF, STEP), dtype, transforms=transforms(STEP))] * kernel.interpret


def rings_of(
    kernel: "DInputKernel", w_all: Any, e_all: Any, full: Any, empty: Any, *of_head: Any
) -> tuple[Ring, PairRing | None, Any]:
    """Returns the ring of a kernel with the references of `ring_memory` and `head_memory`. For a float32 head, also
    that of the head, and memory in place of registers, (2, 2, HALF, STEP), for the interpreter, which multiplies only
    what is in memory."""
    e_views = views(e_all, interpret=kernel.interpret)
    if not kernel.casts_head:
        return make_ring(views(w_all, interpret=kernel.interpret), e_views, full, empty), None, None
    w_full, w_empty, *spares = of_head
    ring, head = make_ring((None, None), e_views, full, empty), PairRing(w_all, w_all, w_full, w_empty)
    return ring, head, spares[0] if spares else None


def multiply_split_unit(
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
    """Returns what `multiply_unit` returns, of a float32 head: (39). spare: of `rings_of`.

    A step has two matmuls. Their first operand is in registers: the head rounded, and what is left rounded. While one
    is computed the registers of the other get the next step, so that the tensor cores need not wait. A head that is
    rounded has one matmul a step, and its registers get the next step when it is done. Meanwhile the tensor cores have
    the matmul of the other warpgroup.
    """
    # A thread loads two numbers that are next to each other in memory, and exchanges one with another if need be.
    layout = plgpu.Layout.WGMMA if kernel.vocab_axis else plgpu.Layout.WGMMA_TRANSPOSED

    def operand(part: Array, index: int) -> Any:
        if spare is None:
            return part
        spare[warpgroup, index] = part
        return spare.at[warpgroup, index]

    def step(s: Any, *, releases: bool = True) -> None:
        slot, of_head = slot_of(count + s), head_slot(count + s)
        e = ring.b.at[slot].transpose((1, 0))
        w = head.pieces.at[of_head, warpgroup]
        w = w.transpose((1, 0)) if kernel.vocab_axis == 0 else w
        plgpu.barrier_wait(head.full.at[of_head])
        if kernel.kept:
            last = unit.first + s == kernel.schedule.iters_per_tile - 1
            when(last)(lambda: clear_after(w, kernel.kept, layout))
        if classes is not None:
            kept = classes - (unit.first + s) * STEP
            when(kept < STEP)(lambda: clear_after(w, kept, layout))
        whole = plgpu.layout_cast(plgpu.load(w, layout=layout), plgpu.Layout.WGMMA)
        plgpu.wgmma_wait(1 - kernel.rounds)  # the first matmul of the step before is done
        if kernel.rounds and releases:
            plgpu.barrier_arrive(ring.empty.at[slot_of(count + s - 1)])
        high = whole.astype(jnp.bfloat16)
        plgpu.barrier_wait(ring.full.at[slot])
        plgpu.wgmma(acc, operand(high, 0), e)
        if not kernel.rounds:
            plgpu.wgmma_wait(1)  # so is the second
            if releases:
                plgpu.barrier_arrive(ring.empty.at[slot_of(count + s - 1)])
            # Rounded again: 16-bit registers of both uses would take the place of others, which would be spilled.
            whole = lax.optimization_barrier(whole)
            low = (whole - whole.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16)
            plgpu.wgmma(acc, operand(low, 1), e)
        # Only here, where all numbers are in use: the assembler does not wait for a load before an arrival.
        plgpu.barrier_arrive(head.empty.at[of_head])

    step(0, releases=False)
    pl.loop(1, unit.length)(step)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ring.empty.at[slot_of(count + unit.length - 1)])
    return acc[...]
