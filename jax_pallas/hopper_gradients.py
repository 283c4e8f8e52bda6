"""d_weight of plan A with anchored exponentials for Hopper (sm_90), and what d_input's kernels share with it.

    d_weight = E^T (rho x)                      (V, D), summed over rows

In Pallas' Mosaic dialect. Both gradients compute transposed tiles, 128 columns of D by up to 256 of the other axis: D
of real models has multiples of 128 where it has none of 256. As in `hopper_logits.py` one warpgroup loads and two
multiply, 64 columns of D each.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.hopper import (
    BLOCK_V,
    COMPILER,
    HALF,
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    PIECE,
    PIECES,
    STAGES,
    STEP,
    cdiv,
    over_steps,
    padded,
    pauses,
    programs,
    slot_of,
    transforms,
    two_views,
    views,
)

D_BLOCK = 2 * HALF  # columns of D of a tile


def limits(dtype: Any, hidden: int, vocab: int) -> str | None:
    """Returns a sentence that names what keeps these kernels from a call that those of logits serve, or None."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the Hopper kernels of gradients multiply bfloat16, not {jnp.dtype(dtype).name}"
    if not 0 < hidden < 2**25 or not 0 < vocab < 2**25:  # d_input multiplies steps by programs and tiles, in int32
        return f"the Hopper kernels of gradients need sizes from 1 to 2**25 - 1, got {hidden} hidden, {vocab} classes"
    if hidden % 64:
        return f"the Hopper kernels of gradients need a hidden size that is a multiple of 64, got {hidden}"
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
        compiler_params=COMPILER,
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


def in_order(first: Any, second: Any, vocab_axis: int) -> tuple[Any, Any]:
    """Returns the index of classes and of columns of D as an array with this vocab_axis has them."""
    return (first, second) if vocab_axis == 0 else (second, first)


OLD_STAGES = 4  # pieces of old tiles that are loaded ahead, a power of two

OLD_AHEAD = 1  # how many pieces before they are wanted


@partial(
    jax.jit, static_argnames=("vocab", "classes", "vocab_axis", "rows", "interpret")
)  # chunks of one size are lowered once
def d_weight(
    e: Array,
    x: Array,
    start: int | Array,
    *,
    vocab: int,
    classes: int,
    vocab_axis: int,
    rows: int | None = None,
    old: Array | None = None,
    first_class: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Returns e^T @ x[start : start + n], or that added to `old` or a stretch of it, rounded once: (33).

    A tile's sums wait in registers, to be added to the old tile's, rounded and stored a piece at a time under the
    products of the next tile (`hopper.over_steps`). What the last tile of a stretch has past its end is added to too,
    by products with zeros.

    Args:
        e: (n or more, padded(classes)) bfloat16, zeros past the classes, and past n up to the next multiple of 64.
        x: (N, D) bfloat16, already times rho. Rows past N count as zeros; those from start + n up to the next multiple
            of 64 are multiplied by zeros, so they must be numbers.
        start: () int32.
        vocab: V.
        classes: K, of e.
        vocab_axis: of the result: (V, D) for 0, (D, V) for 1.
        rows: n; None: as many as e has, a multiple of 8.
        old: what is added to, of the result's shape; the result takes its place. Without it classes past K get zeros.
        first_class: () int32, with `old` only: the class of e's first column; None is 0. Where `vocab_axis` is 1 it is
            a multiple of 8: TMA ends in an illegal instruction where a row is not entered at a multiple of 16 bytes.
        interpret: whether the kernel runs in Pallas' interpreter, on a CPU.
    """
    (n, columns), hidden, adds = (rows or len(e), e.shape[1]), x.shape[1], old is not None
    if columns != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {columns}")
    d_blocks, steps = cdiv(hidden, D_BLOCK), cdiv(n, STEP)
    tiles = d_blocks * cdiv(classes if adds else vocab, BLOCK_V)
    many = min(tiles, programs())
    piece_shape = in_order(PIECE, HALF, vocab_axis)

    def body(scalar_ref: Any, e_ref: Any, x_ref: Any, d_weight_ref: Any, *scratch: Any) -> None:
        x_all, e_ring, buffers, full, empty, *of_old = scratch
        (x_moved, x_ring), (moved, buffer) = (views(ref, interpret=interpret) for ref in (x_all, buffers))
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        mine = lax.div(tiles - program + many - 1, many)
        first = 0 if first_class is None else scalar_ref[2 * PIECES + 1]

        def place(index: Any) -> tuple[Any, Any]:
            """Returns the first column of D and class; the blocks of D come first: e is read once, x stays in L2."""
            tile = program + index * many
            return lax.rem(tile, d_blocks) * D_BLOCK, lax.div(tile, d_blocks) * BLOCK_V

        def at(d: Any, v: Any) -> tuple[Any, Any]:
            return in_order(pl.ds(first + v, PIECE), pl.ds(d, HALF), vocab_axis)

        def load() -> None:
            start = scalar_ref[2 * PIECES]

            def fetch(index: Any, piece: int) -> None:
                """Loads a piece of the old tile that is wanted while tile `index` is multiplied."""
                if not adds:
                    return
                index, piece = index + piece // PIECES, piece % PIECES
                (old_moved, _), old_full, old_empty = views(of_old[0], interpret=interpret), *of_old[1:]
                d, v = place(jnp.maximum(index - 1, 0))
                slot = (index * PIECES + piece) & (OLD_STAGES - 1)
                plgpu.barrier_wait(old_empty.at[slot])
                for i in range(2):
                    source = d_weight_ref.at[at(d + i * HALF, v + piece * PIECE)]
                    plgpu.copy_gmem_to_smem(source, old_moved.at[slot, i], old_full.at[slot])

            for piece in range(OLD_AHEAD):
                fetch(0, piece)

            @pl.loop(0, mine)
            def _tile(index: Any) -> None:
                d, v = place(index)

                def step(s: Any) -> None:
                    slot = slot_of(index * steps + s)
                    plgpu.barrier_wait(empty.at[slot])
                    for i in range(2):
                        source = x_ref.at[pl.ds(start + s * STEP, STEP), pl.ds(d + i * HALF, HALF)]
                        plgpu.copy_gmem_to_smem(source, x_moved.at[slot, i], full.at[slot])
                    source = e_ref.at[pl.ds(s * STEP, STEP), pl.ds(v, BLOCK_V)]
                    plgpu.copy_gmem_to_smem(source, e_ring.at[slot], full.at[slot])

                first_pauses = [scalar_ref[i] for i in range(PIECES)]
                over_steps(steps, first_pauses, step, lambda i: fetch(index, i + OLD_AHEAD), begin=0)

            for piece in range(OLD_AHEAD, PIECES):
                fetch(mine, piece)
            for slot in range(OLD_STAGES * adds):
                plgpu.barrier_wait(of_old[2].at[slot])

        def multiply() -> None:
            own_pauses = [scalar_ref[warpgroup * PIECES + i] for i in range(PIECES)]
            for slot in range(OLD_STAGES * adds):
                plgpu.barrier_arrive(of_old[2].at[slot])

            def finish(sums: Array, index: Any, d: Any, v: Any, i: int) -> None:
                """Adds what is old to a piece of a tile, and stores it while tile `index` is multiplied."""
                if adds:
                    (_, old), old_full, old_empty = views(of_old[0], interpret=interpret), *of_old[1:]
                    slot = (index * PIECES + i) & (OLD_STAGES - 1)
                    plgpu.barrier_wait(old_full.at[slot])
                    piece = old.at[slot, warpgroup]
                    piece = piece.transpose((1, 0)) if vocab_axis == 0 else piece
                    sums += plgpu.load(piece, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                    plgpu.barrier_arrive(old_empty.at[slot])
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
                target = buffer.at[warpgroup, i % 2]
                target = target.transpose((1, 0)) if vocab_axis == 0 else target
                target[...] = sums.astype(e.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(moved.at[warpgroup, i % 2], d_weight_ref.at[at(d, v + i * PIECE)])

            def tile(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                d, v, *done = carry

                def products(acc: Any) -> tuple[Any, ...]:
                    def step(s: Any, *, releases: bool = True) -> None:
                        slot = slot_of(index * steps + s)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, x_ring.at[slot, warpgroup].transpose((1, 0)), e_ring.at[slot])
                        plgpu.wgmma_wait(1)
                        if releases:
                            plgpu.barrier_arrive(empty.at[slot_of(index * steps + s - 1)])

                    step(0, releases=False)
                    over_steps(steps, own_pauses, step, lambda i: finish(done[i], index, d, v, i))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot_of(index * steps + steps - 1)])
                    sums = acc[...]
                    return tuple(sums[:, i : i + PIECE] for i in range(0, BLOCK_V, PIECE))

                found = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((HALF, BLOCK_V), jnp.float32))
                new_d, new_v = place(index)
                return new_d + warpgroup * HALF, new_v, *found

            zeros = plgpu.layout_cast(jnp.zeros((HALF, PIECE), jnp.float32), plgpu.Layout.WGMMA)
            outside = jnp.int32(cdiv(vocab, BLOCK_V) * BLOCK_V)  # the first stores are dropped
            d, v, *done = lax.fori_loop(0, mine, tile, (jnp.int32(0), outside, *[zeros] * PIECES))
            for i, sums in enumerate(done):
                finish(sums, mine, d, v, i)

        as_roles(empty, load, multiply)

    offsets = [start] if first_class is None else [start, first_class]
    scalars = jnp.concatenate([pauses(steps), jnp.array(offsets, jnp.int32)])
    scratch = [
        two_views((STAGES, 2, STEP, 64), e.dtype, interpret=interpret),
        plgpu.SMEM((STAGES, STEP, BLOCK_V), e.dtype, transforms=transforms(STEP)),
        two_views((2, 2, *piece_shape), e.dtype, interpret=interpret),
        *barriers(3),
    ]
    if adds:
        scratch.append(two_views((OLD_STAGES, 2, *piece_shape), e.dtype, interpret=interpret))
        scratch += [plgpu.Barrier(num_arrivals=2, num_barriers=OLD_STAGES) for _ in range(2)]
    if old is None:
        result = jax.ShapeDtypeStruct(in_order(vocab, hidden, vocab_axis), e.dtype)
        return run_kernel(body, "d_weight", (scalars, e, x), [result], scratch, (many,), interpret)[0]
    ref = jax.new_ref(old)
    run_kernel(body, "d_weight", (scalars, e, x, ref), [], scratch, (many,), interpret)
    return jax.freeze(ref)
