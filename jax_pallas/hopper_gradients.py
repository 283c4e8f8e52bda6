"""d_weight of plan A with scaled exponentials for Hopper (sm_90), and what d_input's kernels share with it.

    d_weight = E^T (rho x)                      (V, D), summed over rows

In Pallas' Mosaic dialect. Both gradients compute transposed tiles, 128 columns of D by up to 256 of the other axis: D
of real models has multiples of 128 where it has none of 256. As in `hopper_tiles.py` one warpgroup loads and two
multiply, 64 columns of D each.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.hopper import (
    BLOCK_V,
    HALF,
    PIECE,
    PIECES,
    STAGES,
    STEP,
    Ring,
    arrive_at_all,
    as_roles,
    cdiv,
    in_pieces,
    make_ring,
    over_steps,
    own_pauses,
    padded,
    pauses,
    programs,
    ring_barriers,
    run_kernel,
    slot_of,
    transforms,
    two_views,
    views,
    wait_for_all,
    zero_piece,
)

D_BLOCK = 2 * HALF  # columns of D of a tile

OLD_STAGES = 4  # pieces of old tiles that are loaded ahead, a power of two

OLD_AHEAD = 1  # how many pieces before they are wanted


def limits(dtype: Any, hidden: int, vocab: int) -> str | None:
    """Returns a sentence that names what keeps these kernels from a call that those of logits serve, or None."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the Hopper kernels of gradients multiply bfloat16, not {jnp.dtype(dtype).name}"
    if not 0 < hidden < 2**25 or not 0 < vocab < 2**25:  # d_input multiplies steps by programs and tiles, in int32
        return f"the Hopper kernels of gradients need sizes from 1 to 2**25 - 1, got {hidden} hidden, {vocab} classes"
    if hidden % 64:
        return f"the Hopper kernels of gradients need a hidden size that is a multiple of 64, got {hidden}"
    return None


def in_order(first: Any, second: Any, vocab_axis: int) -> tuple[Any, Any]:
    """Returns the index of classes and of columns of D as an array with this vocab_axis has them."""
    return (first, second) if vocab_axis == 0 else (second, first)


OLD_STAGES = 4  # pieces of old tiles that are loaded ahead, a power of two

OLD_AHEAD = 1  # how many pieces before they are wanted


@dataclass(frozen=True)
class DWeightKernel:
    """`d_weight_kernel` as it is known when the call is traced: arguments of `add_d_weight`.

    Args:
        rows: of x and e, summed.
        hidden: D.
        vocab: V.
        classes: K, of e.
        vocab_axis: of d_weight.
        adds: to an old d_weight; otherwise classes past K get zeros.
        has_first_class: the class of e's first column is in the scalars.
        interpret: whether it runs in Pallas' interpreter, on a CPU.
    """

    rows: int
    hidden: int
    vocab: int
    classes: int
    vocab_axis: int
    adds: bool
    has_first_class: bool
    interpret: bool

    @property
    def steps(self) -> int:
        return cdiv(self.rows, STEP)

    @property
    def d_blocks(self) -> int:
        return cdiv(self.hidden, D_BLOCK)

    @property
    def tiles(self) -> int:
        return self.d_blocks * cdiv(self.classes if self.adds else self.vocab, BLOCK_V)

    @property
    def programs(self) -> int:
        return min(self.tiles, programs())

    @property
    def piece_shape(self) -> tuple[int, int]:
        return in_order(PIECE, HALF, self.vocab_axis)


class OldRing(NamedTuple):
    """The pieces of old tiles in shared memory, as `Ring`: (OLD_STAGES, 2, ...), one for each warpgroup."""

    moved: Any
    pieces: Any
    full: Any
    empty: Any


class DWeightProgram(NamedTuple):
    """A program of `d_weight_kernel`: its tiles, and what its warpgroups share."""

    kernel: DWeightKernel
    program: Array
    count: Array  # of its tiles: every `kernel.programs`-th, from number `program` on
    warpgroup: Array
    scalar_ref: Any  # the pauses, the first row of x, and, if known to the device alone, the first class
    first_class: Any
    d_weight_ref: Any
    ring: Ring  # x (STAGES, 2, STEP, HALF), e (STAGES, STEP, BLOCK_V)
    buffers: tuple[Any, Any]  # two for each warpgroup, (2, 2, ...), as TMA and as registers take them
    old: OldRing | None

    def tile_at(self, index: Any) -> tuple[Any, Any]:
        """Returns the first column of D and class; the blocks of D come first: e is read once, x stays in L2."""
        tile = self.program + index * self.kernel.programs
        return lax.rem(tile, self.kernel.d_blocks) * D_BLOCK, lax.div(tile, self.kernel.d_blocks) * BLOCK_V

    def piece_at(self, d: Any, v: Any) -> Any:
        """Returns the piece of d_weight from a column of D and a class on."""
        place = in_order(pl.ds(self.first_class + v, PIECE), pl.ds(d, HALF), self.kernel.vocab_axis)
        return self.d_weight_ref.at[place]


def load_d_weight(own: DWeightProgram, e_ref: Any, x_ref: Any) -> None:
    """The loading warpgroup."""
    steps, ring = own.kernel.steps, own.ring
    start = own.scalar_ref[2 * PIECES]
    for piece in range(OLD_AHEAD):
        load_old(own, 0, piece)

    @pl.loop(0, own.count)
    def _tile(index: Any) -> None:
        d, v = own.tile_at(index)

        def step(s: Any) -> None:
            slot = slot_of(index * steps + s)
            plgpu.barrier_wait(ring.empty.at[slot])
            for i in range(2):
                source = x_ref.at[pl.ds(start + s * STEP, STEP), pl.ds(d + i * HALF, HALF)]
                plgpu.copy_gmem_to_smem(source, ring.a_moved.at[slot, i], ring.full.at[slot])
            source = e_ref.at[pl.ds(s * STEP, STEP), pl.ds(v, BLOCK_V)]
            plgpu.copy_gmem_to_smem(source, ring.b_moved.at[slot], ring.full.at[slot])

        for piece in over_steps(steps, own_pauses(own.scalar_ref, 0), step, begin=0):
            load_old(own, index, piece + OLD_AHEAD)

    for piece in range(OLD_AHEAD, PIECES):
        load_old(own, own.count, piece)
    if own.old is not None:
        wait_for_all(own.old.empty, OLD_STAGES)
    wait_for_all(ring.empty, STAGES)  # the interpreter wants no phase of a barrier left unseen


def load_old(own: DWeightProgram, index: Any, piece: int) -> None:
    """Loads a piece of the old tile that is wanted while tile `index` is multiplied, if there is any."""
    if own.old is None:
        return
    index, piece = index + piece // PIECES, piece % PIECES
    d, v = own.tile_at(jnp.maximum(index - 1, 0))
    slot = old_slot_of(index, piece)
    plgpu.barrier_wait(own.old.empty.at[slot])
    for i in range(2):
        source = own.piece_at(d + i * HALF, v + piece * PIECE)
        plgpu.copy_gmem_to_smem(source, own.old.moved.at[slot, i], own.old.full.at[slot])


def old_slot_of(index: Any, piece: int) -> Any:
    return (index * PIECES + piece) & (OLD_STAGES - 1)


def store_d_weight(own: DWeightProgram, sums: Array, index: Any, d: Any, v: Any, piece: int) -> None:
    """Adds what is old to a piece of a tile, and stores it while tile `index` is multiplied."""
    moved, buffers = own.buffers
    if own.old is not None:
        slot = old_slot_of(index, piece)
        plgpu.barrier_wait(own.old.full.at[slot])
        old = own.old.pieces.at[slot, own.warpgroup]
        old = old.transpose((1, 0)) if own.kernel.vocab_axis == 0 else old
        sums += plgpu.load(old, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        plgpu.barrier_arrive(own.old.empty.at[slot])
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
    buffer = buffers.at[own.warpgroup, piece % 2]
    buffer = buffer.transpose((1, 0)) if own.kernel.vocab_axis == 0 else buffer
    buffer[...] = sums.astype(own.d_weight_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(moved.at[own.warpgroup, piece % 2], own.piece_at(d, v + piece * PIECE))


def d_weight_warpgroup(own: DWeightProgram) -> None:
    """A multiplying warpgroup: its halves of all tiles of this program, each stored under the next."""
    arrive_at_all(own.ring.empty, STAGES)
    pauses = own_pauses(own.scalar_ref, own.warpgroup)
    if own.old is not None:
        arrive_at_all(own.old.empty, OLD_STAGES)

    def tile(index: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        accumulator = plgpu.WGMMAAccumulatorRef((HALF, BLOCK_V), jnp.float32)
        found = pl.run_scoped(lambda acc: multiply(acc, own, pauses, index, carry), accumulator)
        d, v = own.tile_at(index)
        return d + own.warpgroup * HALF, v, *found

    zeros = zero_piece()
    outside = jnp.int32(cdiv(own.kernel.vocab, BLOCK_V) * BLOCK_V)  # the first stores are dropped
    d, v, *done = lax.fori_loop(0, own.count, tile, (jnp.int32(0), outside, *[zeros] * PIECES))
    for piece, sums in enumerate(done):
        store_d_weight(own, sums, own.count, d, v, piece)
    plgpu.wait_smem_to_gmem(0)


def multiply(acc: Any, own: DWeightProgram, pauses: list[Any], index: Any, carry: tuple[Any, ...]) -> tuple[Array, ...]:
    """Returns the sums of a half tile, PIECES of (HALF, PIECE) float32, and stores those of the one before meanwhile:
    `carry`, its first column of D and class, and its sums."""
    (d, v, *done), steps, ring = carry, own.kernel.steps, own.ring

    def step(s: Any, *, releases: bool = True) -> None:
        slot = slot_of(index * steps + s)
        plgpu.barrier_wait(ring.full.at[slot])
        plgpu.wgmma(acc, ring.a.at[slot, own.warpgroup].transpose((1, 0)), ring.b.at[slot])
        plgpu.wgmma_wait(1)
        if releases:
            plgpu.barrier_arrive(ring.empty.at[slot_of(index * steps + s - 1)])

    step(0, releases=False)
    for piece in over_steps(steps, pauses, step):
        store_d_weight(own, done[piece], index, d, v, piece)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ring.empty.at[slot_of(index * steps + steps - 1)])
    return in_pieces(acc)


def d_weight_kernel(
    kernel: DWeightKernel, scalar_ref: Any, e_ref: Any, x_ref: Any, d_weight_ref: Any, *scratch: Any
) -> None:
    """Writes e^T x, or adds it to what is there.

    A tile's sums wait in registers, to be added to the old tile's, rounded and stored a piece at a time under the
    matmul of the next tile (`hopper.over_steps`).
    """
    x_all, e_ring, buffers, full, empty, *of_old = scratch
    ring = make_ring(views(x_all, interpret=kernel.interpret), (e_ring, e_ring), full, empty)
    old = OldRing(*views(of_old[0], interpret=kernel.interpret), *of_old[1:]) if of_old else None
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    count = lax.div(kernel.tiles - program + kernel.programs - 1, kernel.programs)
    own = DWeightProgram(
        kernel,
        program,
        count,
        warpgroup,
        scalar_ref,
        scalar_ref[2 * PIECES + 1] if kernel.has_first_class else 0,
        d_weight_ref,
        ring,
        views(buffers, interpret=kernel.interpret),
        old,
    )
    load, multiply_tiles = partial(load_d_weight, own, e_ref, x_ref), partial(d_weight_warpgroup, own)
    # The index is read again here: with one read the machine code is not the one that was measured.
    as_roles(lax.axis_index("warpgroup"), load, multiply_tiles)


@partial(
    jax.jit, static_argnames=("vocab", "classes", "vocab_axis", "rows", "interpret")
)  # chunks of one size are lowered once
def add_d_weight(
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
    """Returns e^T @ x[start : start + n], or that added to `old` or a range of its classes, rounded once: (33).

    What the last tile of a range has past its end is added to too, by matmuls with zeros.

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
    if e.shape[1] != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {e.shape[1]}")
    sizes = (rows or len(e), x.shape[1], vocab, classes, vocab_axis)
    kernel = DWeightKernel(*sizes, old is not None, first_class is not None, interpret)
    offsets = [start] if first_class is None else [start, first_class]
    scalars = jnp.concatenate([pauses(kernel.steps), jnp.array(offsets, jnp.int32)])
    scratch = [
        two_views((STAGES, 2, STEP, 64), e.dtype, interpret=interpret),
        plgpu.SMEM((STAGES, STEP, BLOCK_V), e.dtype, transforms=transforms(STEP)),
        two_views((2, 2, *kernel.piece_shape), e.dtype, interpret=interpret),
        *ring_barriers(3),
    ]
    if kernel.adds:
        scratch.append(two_views((OLD_STAGES, 2, *kernel.piece_shape), e.dtype, interpret=interpret))
        scratch += [plgpu.Barrier(num_arrivals=2, num_barriers=OLD_STAGES) for _ in range(2)]
    body, grid = partial(d_weight_kernel, kernel), (kernel.programs,)
    if old is None:
        result = jax.ShapeDtypeStruct(in_order(vocab, kernel.hidden, vocab_axis), e.dtype)
        return run_kernel(body, "d_weight", (scalars, e, x), [result], scratch, grid, interpret)[0]
    ref = jax.new_ref(old)
    run_kernel(body, "d_weight", (scalars, e, x, ref), [], scratch, grid, interpret)
    return jax.freeze(ref)
