"""d_weight of plan A with anchored exponentials for Hopper (sm_90), and what d_input's kernels share with it.

    d_weight = E^T (rho x)                      (V, D), summed over rows

In Pallas' Mosaic dialect. Both gradients compute transposed tiles, 128 columns of D by up to 256 of the other axis: D
of real models has multiples of 128 where it has none of 256. As in `hopper_logits.py` one warpgroup loads and two
multiply, 64 columns of D each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.hopper import (
    HALF,
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    cdiv,
    padded,
    programs,
    transforms,
    two_views,
    views,
)

D_BLOCK = 2 * HALF  # columns of D of a tile

CLASS_BLOCK = 256  # classes of a tile of d_weight: the widest that one matrix instruction takes

# Steps of the inner products and stages of the ring that they are loaded into, 192 KiB beside the epilogue's buffers.
# Steps of 32 with 8 stages, whose rows are 64 bytes wide, were as fast or up to 7% slower.
STEP, STAGES = 64, 4


def limits(dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns a sentence that names what keeps these kernels from serving a call, or None."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the Hopper kernels of gradients multiply bfloat16, not {jnp.dtype(dtype).name}"
    if not 0 < hidden < 2**25 or not 0 < vocab < 2**25:  # d_input multiplies steps by programs and tiles, in int32
        return f"the Hopper kernels of gradients need sizes from 1 to 2**25 - 1, got {hidden} hidden, {vocab} classes"
    if hidden % 64:
        return f"the Hopper kernels of gradients need a hidden size that is a multiple of 64, got {hidden}"
    if vocab_axis not in (0, 1):
        return f"the Hopper kernels need vocab_axis 0 or 1, got {vocab_axis}"
    if vocab_axis == 1 and vocab % 64:
        return f"with vocab_axis 1 the Hopper kernels need a multiple of 64 classes, got {vocab}"
    return None


def run_kernel(
    body: Callable[..., None], name: str, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any], grid: tuple[int, ...], interpret: bool, threads: int = 3,
) -> Any:  # fmt: skip
    """Runs a kernel of so many warpgroups; references among the operands are updated in place."""
    return plgpu.kernel(
        body,
        out_type=tuple(results),
        scratch_types=list(scratch),
        grid=grid,
        grid_names=("program", "piece")[: len(grid)],
        num_threads=threads,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*operands)


def barriers(copies: int) -> list[Any]:
    """Returns the types of the ring's barriers: a stage is full after so many copies, empty after two warpgroups."""
    return [plgpu.Barrier(num_arrivals=count, num_barriers=STAGES) for count in (copies, 2)]


def as_roles(empty: Any, load: Callable[[], None], multiply: Callable[[], None]) -> None:
    """Has the last warpgroup load and the first two multiply."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 2)
    def _load() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        load()
        for i in range(STAGES):  # the interpreter wants no phase of a barrier left unseen
            plgpu.barrier_wait(empty.at[i])

    @pl.when(warpgroup < 2)
    def _multiply() -> None:
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
        for i in range(STAGES):
            plgpu.barrier_arrive(empty.at[i])
        multiply()
        plgpu.wait_smem_to_gmem(0)


def slot_of(count: Any) -> Any:
    return count & (STAGES - 1)


def in_order(first: Any, second: Any, vocab_axis: int) -> tuple[Any, Any]:
    """Returns the index of classes and of columns of D as an array with this vocab_axis has them."""
    return (first, second) if vocab_axis == 0 else (second, first)


PARTS = 5  # a tile's steps are cut in so many: after each but the last a quarter of the tile before leaves

FETCHES = (1, 3)  # and after these, two quarters of the old one have come in a stage


def d_weight(
    e: Array,
    x: Array,
    start: int | Array,
    *,
    vocab: int,
    classes: int,
    vocab_axis: int,
    old: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Returns e^T @ x[start : start + n], or that added to `old`, rounded once: (33).

    Only the addition itself stops the tensor cores: the old tile is read into registers, packed, under the products,
    and the finished one waits there, packed, to be stored under those of the next.

    Args:
        e: (n, padded(classes)) bfloat16, zeros past the classes; n is a multiple of 8.
        x: (N, D) bfloat16, already times rho. Rows past N count as zeros; those from start + n up to the next multiple
            of 64 are multiplied by zeros, so they must be numbers.
        start: () int32.
        vocab: V.
        classes: K.
        vocab_axis: of the result: (V, D) for 0, (D, V) for 1.
        old: what is added to, of the result's shape; the result takes its place. Without it classes past K get zeros.
        interpret: whether the kernel runs in Pallas' interpreter, on a CPU.
    """
    (n, columns), hidden, adds = e.shape, x.shape[1], old is not None
    if columns != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {columns}")
    d_blocks, steps = cdiv(hidden, D_BLOCK), cdiv(n, STEP)
    tiles = d_blocks * cdiv(classes if adds else vocab, CLASS_BLOCK)
    many = min(tiles, programs())
    fetches = [adds and part in FETCHES for part in range(PARTS)]
    uses = steps + sum(fetches)  # of stages, for a tile
    copies = 3  # of a stage
    e_types: dict[str, Any] = {"e": plgpu.SMEM((STAGES, STEP, CLASS_BLOCK), e.dtype, transforms=transforms(STEP))}
    if adds and vocab_axis == 0:
        found = two_views((STAGES, 2, 2 * HALF, 64), e.dtype, interpret=interpret)
        e_types |= {"old": found} if interpret else dict(zip(("moved", "old"), found.refs, strict=True))
    elif adds:
        e_types["old"] = plgpu.SMEM((STAGES, 2, HALF, 2 * HALF), e.dtype, transforms=transforms(64))

    def body(start_ref: Any, share_ref: Any, e_ref: Any, x_ref: Any, d_weight_ref: Any, *scratch: Any) -> None:
        x_all, e_all, buffers, full, empty = scratch
        (x_moved, x_ring), (moved, buffer) = (views(ref, interpret=interpret) for ref in (x_all, buffers))
        e_views = dict(zip(e_types, e_all if len(e_types) > 1 else [e_all], strict=True))
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        mine = lax.div(tiles - program + many - 1, many)

        def place(index: Any) -> tuple[Any, Any]:
            """Returns the first column of D and class; the blocks of D come first: e is read once, x stays in L2."""
            tile = program + index * many
            return lax.rem(tile, d_blocks) * D_BLOCK, lax.div(tile, d_blocks) * CLASS_BLOCK

        def at(d: Any, v: Any, count: int) -> tuple[Any, Any]:
            return in_order(pl.ds(v, count), pl.ds(d, HALF), vocab_axis)

        def begin_of(part: int) -> Any:
            return steps if part == PARTS else part * share_ref[0] if part else 0

        def load() -> None:
            start = start_ref[0]

            @pl.loop(0, mine)
            def _tile(index: Any) -> None:
                d, v = place(index)
                count = index * uses
                for part in range(PARTS):

                    @pl.loop(begin_of(part), begin_of(part + 1))
                    def _step(step: Any, count: Any = count) -> None:
                        slot = slot_of(count + step)
                        plgpu.barrier_wait(empty.at[slot])
                        for i in range(2):
                            source = x_ref.at[pl.ds(start + step * STEP, STEP), pl.ds(d + i * HALF, HALF)]
                            plgpu.copy_gmem_to_smem(source, x_moved.at[slot, i], full.at[slot])
                        source = e_ref.at[pl.ds(step * STEP, STEP), pl.ds(v, CLASS_BLOCK)]
                        plgpu.copy_gmem_to_smem(source, e_views["e"].at[slot], full.at[slot])

                    if fetches[part]:
                        slot = slot_of(count + begin_of(part + 1))
                        plgpu.barrier_wait(empty.at[slot])
                        old = e_views.get("moved", e_views["old"])
                        for i in range(2):
                            source = d_weight_ref.at[at(d + i * HALF, v + (part - 1) * HALF, 2 * HALF)]
                            plgpu.copy_gmem_to_smem(source, old.at[slot, i], full.at[slot])
                        plgpu.barrier_arrive(full.at[slot])  # for the third copy
                        count += 1

        def multiply() -> None:
            def store(quarter: Array, d: Any, v: Any, i: int) -> None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
                target = buffer.at[warpgroup, i % 2]
                target = target.transpose((1, 0)) if vocab_axis == 0 else target
                target[...] = quarter
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(moved.at[warpgroup, i % 2], d_weight_ref.at[at(d, v + i * HALF, HALF)])

            def tile(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                done_d, done_v, *done = carry

                def products(acc: Any) -> tuple[Any, ...]:
                    old_quarters, count = [], index * uses
                    for part in range(PARTS):

                        def one(step: Any, before: int, count: Any = count) -> None:
                            """Takes a step, and frees the stage of the one before it, so many stages ago."""
                            slot = slot_of(count + step)
                            plgpu.barrier_wait(full.at[slot])
                            plgpu.wgmma(acc, x_ring.at[slot, warpgroup].transpose((1, 0)), e_views["e"].at[slot])
                            plgpu.wgmma_wait(1)
                            if before:
                                plgpu.barrier_arrive(empty.at[slot_of(count + step - before)])

                        if steps >= PARTS or part == PARTS - 1:
                            one(begin_of(part), 1 + fetches[part - 1] if part and steps >= PARTS else 0)
                            pl.loop(begin_of(part) + 1, begin_of(part + 1))(lambda step, one=one: one(step, 1))
                        if part < PARTS - 1:
                            store(done[part], done_d, done_v, part)
                        if fetches[part]:
                            slot = slot_of(count + begin_of(part + 1))
                            plgpu.barrier_wait(full.at[slot])
                            for i in range(2):
                                piece = in_order(pl.ds(i * HALF, HALF), slice(None), vocab_axis)
                                quarter = e_views["old"].at[slot, warpgroup].at[piece]
                                quarter = quarter.transpose((1, 0)) if vocab_axis == 0 else quarter
                                old_quarters.append(plgpu.load(quarter, layout=plgpu.Layout.WGMMA))
                            plgpu.barrier_arrive(empty.at[slot])
                            count += 1
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot_of(count + steps - 1)])
                    return acc[...], *old_quarters

                acc, *found = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((HALF, CLASS_BLOCK), jnp.float32))
                quarters = [acc[:, i : i + HALF] for i in range(0, CLASS_BLOCK, HALF)]
                if adds:
                    quarters = [a + b.astype(jnp.float32) for a, b in zip(quarters, found, strict=True)]
                d, v = place(index)
                return d + warpgroup * HALF, v, *(quarter.astype(e.dtype) for quarter in quarters)

            zeros = plgpu.layout_cast(jnp.zeros((HALF, HALF), e.dtype), plgpu.Layout.WGMMA)
            outside = jnp.int32(cdiv(vocab, CLASS_BLOCK) * CLASS_BLOCK)  # the first stores are dropped
            done_d, done_v, *done = lax.fori_loop(0, mine, tile, (jnp.int32(0), outside, *[zeros] * 4))
            for i, quarter in enumerate(done):
                store(quarter, done_d, done_v, i)

        as_roles(empty, load, multiply)

    # Loops whose length the compiler knows it unrolls, and spills registers.
    numbers = jnp.asarray(start, jnp.int32)[None], jnp.array([steps // PARTS], jnp.int32)
    scratch = [
        two_views((STAGES, 2, STEP, 64), e.dtype, interpret=interpret),
        plgpu.RefUnion(*e_types.values()) if len(e_types) > 1 else e_types["e"],
        two_views((2, 2, HALF, 64), e.dtype, interpret=interpret),
        *barriers(copies),
    ]
    if old is None:
        result = jax.ShapeDtypeStruct(in_order(vocab, hidden, vocab_axis), e.dtype)
        return run_kernel(body, "d_weight", (*numbers, e, x), [result], scratch, (many,), interpret)[0]
    ref = jax.new_ref(old)
    run_kernel(body, "d_weight", (*numbers, e, x, ref), [], scratch, (many,), interpret)
    return jax.freeze(ref)
