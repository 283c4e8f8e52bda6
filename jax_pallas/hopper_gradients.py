"""The two gradient products of plan A with anchored exponentials for Hopper (sm_90), in Pallas' Mosaic GPU dialect.

    d_weight = E^T (rho x)                      (V, D), summed over rows    `d_weight`
    d_input  = rho (E W) + theta w_target       (n, D), summed over classes `d_input`

Both compute transposed tiles, 128 columns of D by up to 256 of the other axis: D of real models has multiples of 128
where it has none of 256. Programs stay on the card and take tile after tile; in each, one warpgroup loads and two
multiply, 64 columns of D each.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jax_pallas.hopper import cdiv, padded, programs, transforms

D_BLOCK = 128  # columns of D of a tile: two warpgroups of 64

CLASS_BLOCK = 256  # classes of a tile of d_weight: the widest that one matrix instruction takes

STEP, STAGES = 64, 4

# Registers of a thread: a warpgroup that multiplies holds 128 sums and, packed, half as many finished ones.
MULTIPLY_REGISTERS, LOAD_REGISTERS = 240, 24

SQUARE = 64  # rows and columns of what is stored at a time: one swizzle of 128 bytes wide

Ref = Any


def limits(dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns what keeps the kernels from an input of this dtype and a head of this size: a sentence, or None."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the gradients' kernels take bfloat16, not {jnp.dtype(dtype)}"
    if hidden % 64:
        return f"the gradients' kernels take a hidden size in multiples of 64, not {hidden}"
    if vocab_axis == 1 and vocab % 64:
        return f"with vocab_axis=1 the gradients' kernels take a vocabulary in multiples of 64, not {vocab}"
    return None


def squares(shape: tuple[int, ...], plain: bool, width: int = SQUARE) -> list[Any]:
    """Returns the types of squares (..., rows, 64) in shared memory: as TMA moves them, and as the tensor cores do.

    The same bytes, a column of tiles of 8 x 64; but TMA refuses to cut into such tiles an array whose number of rows is
    no multiple of 8. Where that is so (`plain`) there are two views of them, else one.
    """
    tiled = plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms(width))
    return [plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms(SQUARE)[1:]), tiled] if plain else [tiled]


def union(types: list[Any]) -> Any:
    return plgpu.RefUnion(*types) if len(types) > 1 else types[0]


def views(ref: Ref, count: int) -> list[Ref]:
    """Returns the views of a union of so many."""
    return list(ref) if count > 1 else [ref]


def scalar(start: int | jax.Array) -> jax.Array:
    return jnp.asarray(start, jnp.int32)


def items(tiles: int, of: int) -> Any:
    """Returns how many of the tiles the program of `of` takes."""
    return lax.div(tiles - lax.axis_index("program") + of - 1, of)


def drain(empty: Ref, stages: int) -> None:
    """Waits until what was loaded last has been read: no barrier may be left in a phase that nothing waited for."""
    for i in range(stages):
        plgpu.barrier_wait(empty.at[i])


def d_weight(
    e: jax.Array,
    x: jax.Array,
    start: int | jax.Array,
    *,
    vocab: int,
    classes: int,
    vocab_axis: int,
    old: jax.Array | None = None,
    step: int = STEP,
    stages: int = STAGES,
) -> jax.Array:
    """Returns e^T @ x[start : start + n], or that added to `old` in place, rounded once: (33).

    Only the addition itself stops the tensor cores: the old tile is read into registers, packed, under the products,
    and the finished one waits there, packed, to be stored under those of the next.

    Args:
        e: (n, padded(classes)) bfloat16, zeros past the classes.
        x: (N, D) bfloat16, already times rho. Rows past N count as zeros; those past start + n, up to the next
            multiple of `step`, are multiplied by zeros: they must be numbers.
        start: () int32.
        vocab: V.
        classes: K.
        vocab_axis: of the result: (V, D) for 0, (D, V) for 1.
        old: what is added to, of the result's shape; its own memory takes the result. Without it classes past K get
            zeros.
    """
    (n, columns), (tokens, hidden) = e.shape, x.shape
    if columns != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {columns}")
    shape = (vocab, hidden) if vocab_axis == 0 else (hidden, vocab)
    adds = old is not None
    d_blocks, steps = cdiv(hidden, D_BLOCK), cdiv(n, step)
    tiles = d_blocks * cdiv(classes if adds else vocab, CLASS_BLOCK)
    many = min(tiles, programs())
    parts = 5  # of a tile's steps: after each but the last a quarter of the tile before leaves
    share = steps // parts
    together = step * CLASS_BLOCK // (2 * SQUARE**2)  # quarters of the old tile that come in a stage
    fetches = [adds and part % together == together - 1 for part in range(parts - 1)] + [False]
    uses = steps + sum(fetches)  # of stages, for a tile
    split_x, plain = tokens % 8 != 0, vocab_axis == 0 and vocab % 8 != 0
    x_types = squares((stages, 2, step, SQUARE), split_x, step)
    e_types = [plgpu.SMEM((stages, step, CLASS_BLOCK), jnp.bfloat16, transforms=transforms(step))]
    # The same bytes, of tiles of 8 x 64: where n is no multiple of 8 they are copied one by one.
    small = (step // 8, CLASS_BLOCK // SQUARE) if n % 8 else ()
    if small:
        e_types += squares((stages, *small, 8, SQUARE), True)[:1]
    copies = 2 + math.prod(small)  # of a stage
    if adds:
        block = (together * SQUARE, SQUARE) if vocab_axis == 0 else (SQUARE, together * SQUARE)
        e_types += squares((stages, 2, *block), plain)
    out_types = squares((2, 2, SQUARE, SQUARE), plain)

    def body(start_ref: Ref, e_ref: Ref, x_ref: Ref, out_ref: Ref, x_all: Ref, e_all: Ref, out_all: Ref, full: Ref,
             empty: Ref) -> None:  # fmt: skip
        x_moved, *_, x_ring = views(x_all, len(x_types)) * 2
        e_ring, *others = views(e_all, len(e_types))
        old_moved, *_, old_tiled = (others[bool(small) :] or others or [e_ring]) * 2
        moved, *_, tiled = views(out_all, len(out_types)) * 2
        wg = lax.axis_index("wg")

        def place(t: Any) -> tuple[Any, Any]:
            tile = lax.axis_index("program") + t * many
            return lax.rem(tile, d_blocks) * D_BLOCK, lax.div(tile, d_blocks) * CLASS_BLOCK

        def at(d: Any, v: Any, classes: int) -> tuple[Any, Any]:
            where = pl.ds(v, classes), pl.ds(d, SQUARE)
            return where if vocab_axis == 0 else where[::-1]  # pyright: ignore[reportReturnType]

        @pl.when(wg == 2)
        def _load() -> None:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            start, share_ = pl.multiple_of(start_ref[0], 8), start_ref[1]

            @pl.loop(0, items(tiles, many))
            def _tile(t: Any) -> None:
                d, v = place(t)
                count = t * uses
                for part in range(parts):
                    end = steps if part == parts - 1 else (part + 1) * share_

                    @pl.loop(part * share_, end)
                    def _step(s: Any, count: Any = count) -> None:
                        slot = lax.rem(count + s, stages)
                        plgpu.barrier_wait(empty.at[slot])
                        for i in range(2):
                            rows = pl.ds(start + s * step, step), pl.ds(d + i * SQUARE, SQUARE)
                            plgpu.copy_gmem_to_smem(x_ref.at[rows], x_moved.at[slot, i], full.at[slot])
                        if small:
                            for i, j in itertools.product(*map(range, small)):
                                cells = pl.ds(s * step + i * 8, 8), pl.ds(v + j * SQUARE, SQUARE)
                                plgpu.copy_gmem_to_smem(e_ref.at[cells], others[0].at[slot, i, j], full.at[slot])
                        else:
                            cells = pl.ds(s * step, step), pl.ds(v, CLASS_BLOCK)
                            plgpu.copy_gmem_to_smem(e_ref.at[cells], e_ring.at[slot], full.at[slot])

                    if fetches[part]:
                        slot = lax.rem(count + end, stages)
                        plgpu.barrier_wait(empty.at[slot])
                        first = v + (part + 1 - together) * SQUARE
                        for i in range(2):
                            source = out_ref.at[at(d + i * SQUARE, first, together * SQUARE)]
                            plgpu.copy_gmem_to_smem(source, old_moved.at[slot, i], full.at[slot])
                        for _ in range(copies - 2):
                            plgpu.barrier_arrive(full.at[slot])
                        count += 1

            drain(empty, stages)

        @pl.when(wg < 2)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            share_ = start_ref[1]
            for i in range(stages):
                plgpu.barrier_arrive(empty.at[i])

            def store(quarter: jax.Array, d: Any, v: Any, i: int) -> None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
                buffer = tiled.at[wg, i % 2]
                if vocab_axis == 0:
                    buffer = buffer.transpose((1, 0))
                buffer[...] = quarter
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(moved.at[wg, i % 2], out_ref.at[at(d, v + i * SQUARE, SQUARE)])

            def tile(t: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                done_d, done_v, *done = carry
                done_d, done_v = pl.multiple_of(done_d, SQUARE), pl.multiple_of(done_v, CLASS_BLOCK)

                def multiplied(acc: Ref) -> tuple[Any, ...]:
                    found = []
                    count = t * uses
                    for part in range(parts):
                        begin, end = part * share_, steps if part == parts - 1 else (part + 1) * share_

                        def multiply(s: Any, before: int, count: Any = count) -> None:
                            slot = lax.rem(count + s, stages)
                            plgpu.barrier_wait(full.at[slot])
                            plgpu.wgmma(acc, x_ring.at[slot, wg].transpose((1, 0)), e_ring.at[slot])
                            plgpu.wgmma_wait(1)
                            if before:
                                plgpu.barrier_arrive(empty.at[lax.rem(count + s + stages - before, stages)])

                        if share or part == parts - 1:
                            first = not part or not share
                            multiply(begin, 0 if first else 1 + fetches[part - 1])

                            @pl.loop(begin + 1, end)
                            def _step(s: Any, multiply: Callable[..., None] = multiply) -> None:
                                multiply(s, 1)

                        if part < parts - 1:
                            store(done[part], done_d, done_v, part)
                        if fetches[part]:
                            slot = lax.rem(count + end, stages)
                            plgpu.barrier_wait(full.at[slot])
                            for i in range(together):
                                piece = old_tiled.at[slot, wg]
                                if vocab_axis == 0:
                                    piece = piece.at[i * SQUARE : (i + 1) * SQUARE].transpose((1, 0))
                                else:
                                    piece = piece.at[:, i * SQUARE : (i + 1) * SQUARE]
                                found.append(plgpu.load(piece, layout=plgpu.Layout.WGMMA))
                            plgpu.barrier_arrive(empty.at[slot])
                            count += 1
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[lax.rem(count + steps + stages - 1, stages)])
                    return acc[...], *found

                acc, *found = pl.run_scoped(multiplied, plgpu.ACC((SQUARE, CLASS_BLOCK), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
                sums = [acc[:, i * SQUARE : (i + 1) * SQUARE] for i in range(4)]
                if adds:
                    sums = [part + before.astype(jnp.float32) for part, before in zip(sums, found, strict=True)]
                d, v = place(t)
                return d + wg * SQUARE, v, *(part.astype(jnp.bfloat16) for part in sums)

            zero = plgpu.layout_cast(jnp.zeros((SQUARE, SQUARE), jnp.bfloat16), plgpu.Layout.WGMMA)
            outside = jnp.int32(cdiv(vocab, CLASS_BLOCK) * CLASS_BLOCK)  # the first stores are dropped
            done_d, done_v, *done = lax.fori_loop(0, items(tiles, many), tile, (jnp.int32(0), outside, *[zero] * 4))
            done_d, done_v = pl.multiple_of(done_d, SQUARE), pl.multiple_of(done_v, CLASS_BLOCK)
            for i in range(4):
                store(done[i], done_d, done_v, i)
            plgpu.wait_smem_to_gmem(0)

    out = jax.new_ref(old) if adds else None
    found = plgpu.kernel(
        body,
        out_type=() if adds else (jax.ShapeDtypeStruct(shape, jnp.bfloat16),),
        scratch_types=[
            union(x_types),
            union(e_types),
            union(out_types),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        grid=(many,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="d_weight_kernel",
    )(jnp.stack([scalar(start), jnp.int32(share)]), e, x, *([out] if adds else []))
    return jax.freeze(out) if adds else found[0]  # pyright: ignore[reportArgumentType]
