"""The gradients of plan A with scaled exponentials for Hopper (sm_90), in Pallas' Mosaic dialect.

    d_weight = E^T (rho x)                      (V, D), summed over rows
    d_input = rho (E W) + theta w_target        (n, D), summed over classes

Both compute transposed tiles, 128 columns of D by up to 256 of the other axis, because D of some models is a multiple
of 128 and not of 256. As in `hopper_logits.py` one warpgroup loads and two multiply, 64 columns of D each.

`d_input_kernel` follows a split-K schedule (`tile_config.SplitKSchedule`). A work unit of a program is a whole tile,
or a part of one, whose partial tile, float32, goes to a slot in memory (`work_unit_of`). The fix-up,
`d_input_sum_kernel`, adds the partial tiles of a tile in order. Both finish rows in `input_grad.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.first_chunk import FirstChunk, memory_of
from jax_pallas.hopper_common import (
    BLOCK_V,
    PIECE,
    PIECES,
    STAGES,
    PairRing,
    Ring,
    arrive_at_all,
    as_roles,
    clear_after,
    either,
    in_pieces,
    make_ring,
    over_steps,
    own_pauses,
    pauses,
    programs,
    ring_barriers,
    run_kernel,
    slot_of,
    transforms,
    two_views,
    views,
    wait_for_all,
    when,
    zero_piece,
)
from jax_pallas.hopper_split_head import (
    HEAD_STAGES,
    head_memory,
    head_slot,
    in_accumulator,
    multiply_head_unit,
    ring_memory,
    rings_of,
)
from jax_pallas.input_grad import (
    DInputIO,
    SumsIO,
    WorkUnit,
    d_input_sum_kernel,
    finish,
    num_work_units,
    work_unit_of,
)
from jax_pallas.tile_config import D_BLOCK, HALF, STEP, SplitKSchedule, cdiv, choose_schedule, padded
from linear_ce.collectives import AT_ONCE, LateStart, late_start
from linear_ce.cost_coefficients import COEFFICIENTS


def in_order(first: Any, second: Any, vocab_axis: int) -> tuple[Any, Any]:
    """Returns the indices of classes and of columns of D in the order of an array with this vocab_axis."""
    return (first, second) if vocab_axis == 0 else (second, first)


class OfShards(NamedTuple):
    """Which classes the rows of a d_weight have that is a part of that of several shards: `d_weight_parts.py`.

    The part has as many rows of each shard, from a class of it on that is a multiple of 64. A shard begins at the
    multiple of 64 at or before its first class: TMA reads e from there.
    """

    shard_rows: int  # classes of a shard
    part_rows: int  # rows of d_weight of each shard, whole tiles

    def class_of(self, row: Any, first: Any) -> Any:
        """Returns the class of a row of d_weight. first: of each shard."""
        shard = lax.div(row, self.part_rows)
        return lax.div(shard * self.shard_rows, STEP) * STEP + first + lax.rem(row, self.part_rows)


OLD_STAGES = 4  # pieces of old tiles that are loaded ahead, a power of two

OLD_AHEAD = 1  # how many pieces before they are needed


@dataclass(frozen=True)
class DWeightKernel:
    """The static arguments of `d_weight_kernel`, from the arguments of `add_d_weight`.

    Args:
        steps: of STEP rows of x and e. None: the scalars have them, and a sum may start: `DWeightProgram.starts`.
        hidden: D.
        vocab: V.
        classes: K, of e.
        vocab_axis: of d_weight.
        adds: to an old d_weight; otherwise classes past K get zeros.
        loaded: pieces of each old tile that are loaded and added in registers. TMA adds the other pieces in L2.
        has_first_class: the class of e's first column is in the scalars.
        float32: d_weight is float32, and not of 16 bits.
        has_power: e^T x is multiplied by a number in memory, the power of two of a chunk of float16.
        interpret: whether it runs in Pallas' interpreter, on a CPU.
        first: some of e is in d_weight. A piece of d_weight is written, and the scalars have its number of tiles. A
            float32 d_weight (V, D) is an array (V, 2D) of e's dtype, two of which are the bits of one number.
        late: programs that begin late, and without how many tiles.
        of_shards: d_weight is a part of that of several shards, and the scalars have the part's first class of each.
    """

    steps: int | None
    hidden: int
    vocab: int
    classes: int
    vocab_axis: int
    adds: bool
    loaded: int
    has_first_class: bool
    float32: bool
    has_power: bool
    interpret: bool
    first: FirstChunk | None = None
    late: LateStart = AT_ONCE
    of_shards: OfShards | None = None

    @property
    def one_view(self) -> bool:
        """Whether TMA and registers take the same view of a piece: rows of 256 bytes are tiled for TMA too."""
        return self.interpret or (self.float32 and self.vocab_axis == 0)

    @property
    def in_pairs(self) -> int:
        """Columns of d_weight's array for one of D."""
        return 1 + (self.float32 and self.first is not None)

    @property
    def d_blocks(self) -> int:
        return cdiv(self.hidden, D_BLOCK)

    @property
    def tiles(self) -> int:
        return self.d_blocks * cdiv(self.classes if self.adds and self.of_shards is None else self.vocab, BLOCK_V)

    @property
    def programs(self) -> int:
        return min(self.tiles, programs())

    @property
    def outside(self) -> int:
        """A class past d_weight: the tiles from there on are outside of it."""
        return cdiv(self.vocab, BLOCK_V) * BLOCK_V

    @property
    def piece_shape(self) -> tuple[int, int]:
        return in_order(PIECE, HALF, self.vocab_axis)


class DWeightProgram(NamedTuple):
    """A program of `d_weight_kernel`: its tiles, and the memory that its warpgroups share."""

    kernel: DWeightKernel
    program: Array
    first_round: Any  # of its tiles: 0, or `kernel.late.rounds`
    count: Array  # of its tiles, one in each round
    warpgroup: Array
    scalar_ref: Any  # the pauses, the first row of x, and those of the next three that are not static
    first_class: Any
    steps: Any
    starts: Any  # where the scalars say it: 1 if d_weight is written, 0 if it is added to
    d_weight_ref: Any
    power_ref: Any  # (1,) float32; None: 1
    ring: Ring  # x (STAGES, 2, STEP, HALF), e (STAGES, STEP, BLOCK_V)
    buffers: tuple[Any, Any]  # two for each warpgroup, (2, 2, ...), as TMA and as registers take them
    old: PairRing | None

    def tile_at(self, index: Any) -> tuple[Any, Any]:
        """Returns the first column of D and class; the blocks of D come first, so that e is read once and x stays in
        L2."""
        late, number = self.kernel.late, self.first_round + index
        tile = self.program + number * self.kernel.programs
        if late.rounds:
            tile -= late.programs * jnp.minimum(number, late.rounds)
        return lax.rem(tile, self.kernel.d_blocks) * D_BLOCK, lax.div(tile, self.kernel.d_blocks) * BLOCK_V

    def old_slot(self, index: Any, piece: int) -> Any:
        return (index * self.kernel.loaded + piece) & (OLD_STAGES - 1)

    def piece_at(self, d: Any, v: Any) -> Any:
        """Returns the piece of d_weight from a column of D and a class on."""
        columns = pl.ds(d, HALF) if self.kernel.in_pairs == 1 else pl.ds(2 * d, 2 * HALF)
        first_class = self.first_class if self.kernel.of_shards is None else 0
        place = in_order(pl.ds(first_class + v, PIECE), columns, self.kernel.vocab_axis)
        return self.d_weight_ref.at[place]


def load_d_weight(own: DWeightProgram, e_ref: Any, x_ref: Any) -> None:
    """The loading warpgroup."""
    steps, ring = own.steps, own.ring
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
            load_exponentials(
                own,
                e_ref,
                s * STEP,
                v,
                partial(plgpu.copy_gmem_to_smem, dst=ring.b_moved.at[slot], barrier=ring.full.at[slot]),
            )

        for piece in over_steps(steps, own_pauses(own.scalar_ref, 0), step, begin=0):
            load_old(own, index, piece + OLD_AHEAD)

    for piece in range(OLD_AHEAD, PIECES):
        load_old(own, own.count, piece)
    if own.old is not None:
        wait_for_all(own.old.empty, OLD_STAGES)
    wait_for_all(ring.empty, STAGES)  # in the interpreter each phase of a barrier must be waited for


def load_exponentials(own: DWeightProgram, e_ref: Any, row: Any, v: Any, load: Callable[[Any], None]) -> None:
    """Loads rows of e from a class of the kernel on, past the last class zeros."""
    first, of_shards = own.kernel.first, own.kernel.of_shards
    if of_shards is not None:
        v = pl.multiple_of(of_shards.class_of(v, own.first_class), STEP)
    if first is None:
        load(e_ref.at[pl.ds(row, STEP), pl.ds(v, BLOCK_V)])
        return
    v = pl.multiple_of(own.first_class + v, BLOCK_V)

    def later() -> None:
        start, within = first.place(v)
        start, within = pl.multiple_of(start + row, STEP), pl.multiple_of(within, BLOCK_V)
        load(own.d_weight_ref.at[pl.ds(start, STEP), pl.ds(within, BLOCK_V)])

    # TMA reads zeros past the last class of e.
    either(
        (v < first.piece) | (v >= own.kernel.classes),
        lambda: load(e_ref.at[pl.ds(row, STEP), pl.ds(v, BLOCK_V)]),
        later,
    )


def load_old(own: DWeightProgram, index: Any, piece: int) -> None:
    """Loads a piece of the old tile that is needed while tile `index` is multiplied, if there is any."""
    index, piece = index + piece // PIECES, piece % PIECES
    if own.old is None or piece >= own.kernel.loaded:
        return
    d, v = own.tile_at(jnp.maximum(index - 1, 0))
    slot = own.old_slot(index, piece)
    plgpu.barrier_wait(own.old.empty.at[slot])
    outside = own.starts * own.kernel.outside  # TMA reads zeros there
    for i in range(2):
        source = own.piece_at(d + i * HALF, v + piece * PIECE + outside)
        plgpu.copy_gmem_to_smem(source, own.old.moved.at[slot, i], own.old.full.at[slot])


def store_d_weight(own: DWeightProgram, sums: Array, index: Any, d: Any, v: Any, piece: int) -> None:
    """Adds a piece of a tile to d_weight, or overwrites it, while tile `index` is multiplied."""
    moved, buffers = own.buffers
    if own.power_ref is not None:
        sums = sums * own.power_ref[0]
    loaded = own.old is not None and piece < own.kernel.loaded
    if own.old is not None and loaded:
        slot = own.old_slot(index, piece)
        plgpu.barrier_wait(own.old.full.at[slot])
        old = own.old.pieces.at[slot, own.warpgroup]
        old = old.transpose((1, 0)) if own.kernel.vocab_axis == 0 else old
        sums += plgpu.load(old, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
    buffer = buffers.at[own.warpgroup, piece % 2]
    buffer = buffer.transpose((1, 0)) if own.kernel.vocab_axis == 0 else buffer
    if own.kernel.float32 and own.kernel.vocab_axis == 0:  # only 16-bit registers are transposed as they are stored
        sums = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED)
    if own.kernel.in_pairs == 1:
        buffer[...] = sums.astype(own.d_weight_ref.dtype)
    elif own.kernel.interpret:
        moved[own.warpgroup, piece % 2] = memory_of(sums.T, own.d_weight_ref.dtype)
    else:
        buffer[...] = sums
    plgpu.commit_smem()
    if own.old is not None and loaded:
        # Only here: the assembler does not wait for a load before an arrival that follows it. The next old piece would
        # sometimes take the place of this one before it is read.
        plgpu.barrier_arrive(own.old.empty.at[slot])
    write = partial(plgpu.copy_smem_to_gmem, moved.at[own.warpgroup, piece % 2], own.piece_at(d, v + piece * PIECE))
    add = partial(write, reduction_op="add")
    if loaded or not own.kernel.adds:
        write()
    elif own.kernel.steps is None:
        either(own.starts != 0, write, add)
    else:
        add()


def d_weight_warpgroup(own: DWeightProgram) -> None:
    """A multiplying warpgroup: computes its halves of the program's tiles, and stores each during the next matmul."""
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
    outside = jnp.int32(own.kernel.outside)  # the first stores are dropped
    d, v, *done = lax.fori_loop(0, own.count, tile, (jnp.int32(0), outside, *[zeros] * PIECES))
    for piece, sums in enumerate(done):
        store_d_weight(own, sums, own.count, d, v, piece)
    plgpu.wait_smem_to_gmem(0)


def multiply(acc: Any, own: DWeightProgram, pauses: list[Any], index: Any, carry: tuple[Any, ...]) -> tuple[Array, ...]:
    """Returns the sums of a half tile, PIECES of (HALF, PIECE) float32, and stores those of the one before meanwhile:
    `carry`, its first column of D and class, and its sums."""
    (d, v, *done), steps, ring = carry, own.steps, own.ring

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


def d_weight_kernel(kernel: DWeightKernel, scalar_ref: Any, e_ref: Any, x_ref: Any, *rest: Any) -> None:
    """Writes e^T x, or adds it to d_weight.

    A tile's sums stay in registers. During the matmul of the next tile they are rounded and stored in pieces
    (`hopper_common.over_steps`). The first `loaded` pieces are added to the old ones before they are rounded. TMA adds
    the other pieces in L2. There the chunk's sums are rounded, and so are the totals. Each element is added to once in
    a launch, by one program, so results repeat bit for bit.
    """
    power_ref, d_weight_ref, *scratch = rest if kernel.has_power else (None, *rest)
    x_all, e_ring, buffers, full, empty, *of_old = scratch
    ring = make_ring(views(x_all, interpret=kernel.interpret), (e_ring, e_ring), full, empty)
    old = PairRing(*views(of_old[0], interpret=kernel.interpret), *of_old[1:]) if of_old else None
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    tiles = kernel.tiles if kernel.first is None else scalar_ref[2 * PIECES + 2]
    late, first_round = kernel.late, 0
    if late.rounds:
        tiles += late.programs * late.rounds
        first_round = jnp.where(program < kernel.programs - late.programs, 0, late.rounds)
    count = lax.div(tiles - program + kernel.programs - 1, kernel.programs) - first_round
    own = DWeightProgram(
        kernel,
        program,
        first_round,
        count,
        warpgroup,
        scalar_ref,
        scalar_ref[2 * PIECES + 1] if kernel.has_first_class else 0,
        scalar_ref[2 * PIECES + 1] if kernel.steps is None else kernel.steps,
        scalar_ref[2 * PIECES + 2] if kernel.steps is None else 0,
        d_weight_ref,
        power_ref,
        ring,
        views(buffers, interpret=kernel.interpret if kernel.in_pairs > 1 else kernel.one_view),
        old,
    )
    load, multiply_tiles = partial(load_d_weight, own, e_ref, x_ref), partial(d_weight_warpgroup, own)
    # The index is read again here: with one read the machine code is not the one that was measured.
    as_roles(lax.axis_index("warpgroup"), load, multiply_tiles)


def add_d_weight(
    e: Array,
    x: Array,
    start: int | Array,
    *,
    vocab: int,
    classes: int,
    vocab_axis: int,
    in_l2: float,
    rows: int | None = None,
    old: Array | None = None,
    starts: bool | None = None,
    first_class: Array | None = None,
    power: Array | None = None,
    float32: bool = False,
    of_shards: OfShards | None = None,
    sent: float = 0,
    gpu: str = "h100",
    interpret: bool = False,
) -> Array:
    """Returns e^T @ x[start : start + n], or that added to `old` or a range of its classes: (33).

    The sum of both is rounded once. In the share of each tile that is added in L2, e^T @ x is rounded too. The classes
    of the last tile past the end of a range are also added to, by matmuls with zeros.

    Args:
        e: (n or more, padded(classes)) of 16 bits, zeros past the classes, and past n up to the next multiple of 64.
        x: (N, D) of e's dtype, already times rho. Rows past N count as zeros; those from start + n up to the next
            multiple of 64 are multiplied by zeros, so they must be numbers.
        start: () int32.
        vocab: V.
        classes: K, of e.
        vocab_axis: of the result: (V, D) for 0, (D, V) for 1.
        in_l2: share of each tile that is added to `old` in L2: `gpus.share_added_in_l2`.
        rows: n; None: all rows of e, a multiple of 8.
        old: what is added to, of the result's shape and dtype. The result takes its place. Without it classes past K
            get zeros.
        starts: with `old` only. True: the result takes the place of `old`, whose values are ignored. True or False: one
            kernel both starts a sum and adds to it, for any n; its tiles are those of K classes. None: it only adds.
        first_class: () int32, with `old` and without `starts` only: the class of e's first column; None is 0. Where
            `vocab_axis` is 1 it is a multiple of 8: TMA ends in an illegal instruction where a row is not entered at a
            multiple of 16 bytes.
        power: () float32, a factor of e^T @ x before it is rounded; None is 1.
        float32: the result is float32, and not of e's dtype. Then V is a multiple of 8 unless `vocab_axis` is 1, and
            all of each tile is added to `old` in L2.
        of_shards: the result is a part of a d_weight of several shards, and `first_class` that of each shard. V is the
            number of its rows, `vocab_axis` 0, and `old` may be None. Rows past a shard have classes of the next one.
        sent: bytes that this GPU sends meanwhile.
        gpu: with `sent` only: its name in `GPUS`.
        interpret: whether the kernel runs in Pallas' interpreter, on a CPU.
    """
    if e.shape[1] != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {e.shape[1]}")
    steps = cdiv(rows or len(e), STEP)
    static_steps, adds = None if starts is not None else steps, old is not None
    assert old is None or old.dtype == (jnp.float32 if float32 else e.dtype)
    loaded = round(PIECES * (1 - in_l2)) if adds and not float32 else 0  # shared memory has no room for its pieces
    kernel = DWeightKernel(
        static_steps, x.shape[1], vocab, classes, vocab_axis, adds, loaded, first_class is not None, float32,
        power is not None, interpret, of_shards=of_shards,
    )  # fmt: skip
    of_gpu = {"programs": kernel.programs, "coefficients": COEFFICIENTS[gpu, "jax"]}
    kernel = replace(kernel, late=late_start(sent, rows or len(e), kernel.tiles, classes=BLOCK_V, **of_gpu))
    offsets = [start] if first_class is None else [start, first_class]
    if starts is not None:
        offsets += [steps, int(starts)]
    scalars = jnp.concatenate([pauses(steps), jnp.array(offsets, jnp.int32)])
    return _run_d_weight(scalars, e, x, None if power is None else power[None], old, kernel=kernel)


def write_d_weight(
    e: Array,
    x: Array,
    start: int | Array,
    d_weight: Array,
    *,
    classes: int,
    rows: int,
    power: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Returns e^T @ x[start : start + n], the d_weight of a first chunk, in the place of `d_weight`: (33).

    Args:
        e: (n or more, piece), the exponentials of the first `piece` classes. The others are in d_weight, as
            `FirstChunk` says.
        x, start: of `add_d_weight`.
        d_weight: (V, D) of e's dtype, or (V, 2D): the memory of a float32 d_weight, which is written then. V is a
            multiple of 8.
        classes: K. Classes past K get zeros.
        rows: n.
        power: of `add_d_weight`.
        interpret: whether the kernel runs in Pallas' interpreter, on a CPU.
    """
    (vocab, columns), hidden, steps = d_weight.shape, x.shape[1], cdiv(rows, STEP)
    first = FirstChunk.of(e.shape[1], rows, columns)
    kernel = DWeightKernel(
        steps, hidden, vocab, classes, vocab_axis=0, adds=False, loaded=0, has_first_class=True,
        float32=columns != hidden, has_power=power is not None, interpret=interpret, first=first,
    )  # fmt: skip
    for start_class, end in first.pieces(classes):
        tiles = kernel.d_blocks * cdiv((vocab if end == classes else end) - start_class, BLOCK_V)
        scalars = jnp.concatenate([pauses(steps), jnp.array([start, start_class, tiles], jnp.int32)])
        d_weight = _run_d_weight(scalars, e, x, None if power is None else power[None], d_weight, kernel=kernel)
    return d_weight


def _d_weight_buffers(kernel: DWeightKernel, dtype: Any, memory_dtype: Any) -> Any:
    """Returns the shared memory of `DWeightProgram.buffers`, of d_weight's dtype."""
    if kernel.in_pairs == 1:
        return two_views((2, 2, *kernel.piece_shape), dtype, interpret=kernel.one_view)
    rows, columns = kernel.piece_shape
    pairs = plgpu.SMEM((2, 2, rows, 2 * columns), memory_dtype, transforms=transforms(2 * columns))
    # The same bytes: rows of 256, in two swizzled tiles of 128.
    numbers = plgpu.SMEM((2, 2, rows, columns), dtype, transforms=transforms(columns, jnp.dtype(dtype).itemsize))
    return pairs if kernel.interpret else plgpu.RefUnion(pairs, numbers)


@partial(jax.jit, static_argnames="kernel")  # equal kernels are lowered once
def _run_d_weight(
    scalars: Array, e: Array, x: Array, power: Array | None, old: Array | None, *, kernel: DWeightKernel
) -> Array:
    """Launches `d_weight_kernel`."""
    dtype = jnp.float32 if kernel.float32 else e.dtype
    scratch = [
        two_views((STAGES, 2, STEP, 64), e.dtype, interpret=kernel.interpret),
        plgpu.SMEM((STAGES, STEP, BLOCK_V), e.dtype, transforms=transforms(STEP)),
        _d_weight_buffers(kernel, dtype, e.dtype),
        *ring_barriers(3),
    ]
    if kernel.loaded:
        scratch.append(two_views((OLD_STAGES, 2, *kernel.piece_shape), e.dtype, interpret=kernel.interpret))
        scratch += [plgpu.Barrier(num_arrivals=2, num_barriers=OLD_STAGES) for _ in range(2)]
    body, grid = partial(d_weight_kernel, kernel), (kernel.programs,)
    operands = (scalars, e, x) if power is None else (scalars, e, x, power)
    if old is None:
        result = jax.ShapeDtypeStruct(in_order(kernel.vocab, kernel.hidden, kernel.vocab_axis), dtype)
        return run_kernel(body, "d_weight", operands, [result], scratch, grid, kernel.interpret)[0]
    ref = jax.new_ref(old)
    run_kernel(body, "d_weight", (*operands, ref), [], scratch, grid, kernel.interpret)
    return jax.freeze(ref)


# d_input.


@dataclass(frozen=True)
class DInputKernel:
    """The static arguments of `d_input_kernel` and `d_input_sum_kernel`.

    Args:
        schedule: how programs divide the tiles.
        d_blocks: blocks of D.
        vocab_axis: of w.
        kept: classes of the last step, where w goes on after them; 0: all.
        casts_head: w is float32, and multiplied as the sum of two matrices of e's dtype: (39).
        interpret: whether they run in Pallas' interpreter, on a CPU.
        first: some of e is in the memory of d_weight.
        smooths: the terms of label smoothing are added.
        rounds: with `casts_head`, w is rounded to one matrix.
    """

    schedule: SplitKSchedule
    d_blocks: int
    vocab_axis: int
    kept: int
    casts_head: bool
    interpret: bool
    first: FirstChunk | None = None
    smooths: bool = False
    rounds: bool = False

    @property
    def piece(self) -> int:
        """Rows that are stored at a time: fewer where two numbers are held of each, so that no registers spill."""
        return math.gcd(self.schedule.tile_rows, HALF // (1 + self.casts_head))

    def tile_at(self, tile: Any) -> tuple[Any, Any]:
        """Returns the first row and column of D of a tile."""
        return lax.div(tile, self.d_blocks) * self.schedule.tile_rows, lax.rem(tile, self.d_blocks) * D_BLOCK


def load_d_input(
    kernel: DInputKernel, ring: Ring, head: PairRing | None, w_ref: Any, e_ref: Any, others_ref: Any
) -> None:
    """The loading warpgroup."""
    schedule, first = kernel.schedule, kernel.first

    def load_w(taken: Any, d: Any, into: Any, full: Any) -> None:
        for i in range(2):
            source = w_ref.at[in_order(taken, pl.ds(d + i * HALF, HALF), kernel.vocab_axis)]
            plgpu.copy_gmem_to_smem(source, into.at[i], full)

    def load_e(row: Any, column: Any, into: Any, full: Any) -> None:
        def load(ref: Any, row: Any, column: Any) -> None:
            plgpu.copy_gmem_to_smem(ref.at[pl.ds(row, schedule.tile_rows), pl.ds(column, STEP)], into, full)

        def later() -> None:
            assert first is not None
            start, within = first.place(column)
            load(others_ref, start + row, within)

        if first is None:
            load(e_ref, row, column)
        else:
            either(column < first.piece, lambda: load(e_ref, row, column), later)

    def one_unit(index: Any, count: Any) -> Any:
        unit = work_unit_of(index, schedule)
        row, d = kernel.tile_at(unit.tile)

        @pl.loop(0, unit.length)
        def _step(step: Any) -> None:
            slot, column = slot_of(count + step), (unit.first + step) * STEP
            taken = pl.ds(column, STEP)
            plgpu.barrier_wait(ring.empty.at[slot])
            if head is None:
                load_w(taken, d, ring.a_moved.at[slot], ring.full.at[slot])
            load_e(row, column, ring.b_moved.at[slot], ring.full.at[slot])
            if head is not None:
                of_head = head_slot(count + step)
                plgpu.barrier_wait(head.empty.at[of_head])
                load_w(taken, d, head.moved.at[of_head], head.full.at[of_head])

        return count + unit.length

    lax.fori_loop(0, num_work_units(schedule), one_unit, jnp.int32(0))
    if head is not None:
        wait_for_all(head.empty, HEAD_STAGES)
    wait_for_all(ring.empty, STAGES)  # in the interpreter each phase of a barrier must be waited for


def d_input_warpgroup(
    kernel: DInputKernel, ring: Ring, head: PairRing | None, spare: Any, warpgroup: Array, io: DInputIO | SumsIO,
    part_ref: Any,
) -> None:  # fmt: skip
    """A multiplying warpgroup: computes its halves of all work units of this program."""
    arrive_at_all(ring.empty, STAGES)
    count = io.count if isinstance(io, SumsIO) else None
    shared: dict[str, Any] = {"kernel": kernel, "ring": ring, "warpgroup": warpgroup, "classes": count}
    multiplies = partial(in_accumulator, kernel, partial(multiply_unit, **shared))
    if head is not None:
        arrive_at_all(head.empty, HEAD_STAGES)
        multiplies = partial(multiply_head_unit, **shared, head=head, spare=spare)

    def one_unit(index: Any, count: Any) -> Any:
        unit = work_unit_of(index, kernel.schedule)
        row, d = kernel.tile_at(unit.tile)
        sums = multiplies(unit=unit, count=count)

        @when(unit.slot < 0)
        def _whole() -> None:
            for i in range(0, kernel.schedule.tile_rows, kernel.piece):
                finish(io, sums[:, i : i + kernel.piece], row + i, d + warpgroup * HALF)

        if part_ref is not None:

            @when(unit.slot >= 0)
            def _part() -> None:
                part_ref[unit.slot, pl.ds(warpgroup * HALF, HALF), :] = sums

        return count + unit.length

    lax.fori_loop(0, num_work_units(kernel.schedule), one_unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def multiply_unit(
    acc: Any, kernel: DInputKernel, ring: Ring, warpgroup: Array, unit: WorkUnit, count: Any, classes: Any = None
) -> Array:
    """Returns the sums of a warpgroup's half of a work unit, (HALF, tile_rows) float32; `count` iterations came before
    it. classes: those of w that count, where only the device knows it."""

    def step(s: Any, *, releases: bool = True) -> None:
        slot = slot_of(count + s)
        plgpu.barrier_wait(ring.full.at[slot])
        w = ring.a.at[slot, warpgroup]
        w = w.transpose((1, 0)) if kernel.vocab_axis == 0 else w
        if kernel.kept:
            when(unit.first + s == kernel.schedule.iters_per_tile - 1)(lambda: clear_after(w, kernel.kept))
        if classes is not None:
            kept = classes - (unit.first + s) * STEP
            when(kept < STEP)(lambda: clear_after(w, kept))
        plgpu.wgmma(acc, w, ring.b.at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(1)
        if releases:
            plgpu.barrier_arrive(ring.empty.at[slot_of(count + s - 1)])

    step(0, releases=False)
    pl.loop(1, unit.length)(step)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ring.empty.at[slot_of(count + unit.length - 1)])
    return acc[...]


def d_input_kernel(
    kernel: DInputKernel, start_ref: Any, e_ref: Any, w_ref: Any, rho_ref: Any, theta_ref: Any, held_ref: Any,
    *rest: Any,
) -> None:  # fmt: skip
    """Writes the rows of whole tiles, and the partial tiles of the others, (partial tiles, D_BLOCK, tile_rows)."""
    smooth, rest = (rest[:2], rest[2:]) if kernel.smooths else (None, rest)
    low_ref, rest = (rest[0], rest[1:]) if kernel.casts_head else (None, rest)
    others_ref, rest = (rest[0], rest[1:]) if kernel.first is not None else (None, rest)
    part_ref, rest = (rest[0], rest[1:]) if kernel.schedule.partial_tiles else (None, rest)
    w_all, e_all, full, empty, buffers, came, *of_head = rest
    low = ()
    if kernel.casts_head:
        low_buffers, *of_head = of_head
        low = low_ref, views(low_buffers, interpret=kernel.interpret)
    ring, head, spare = rings_of(kernel, w_all, e_all, full, empty, *of_head)
    warpgroup, start = lax.axis_index("warpgroup"), start_ref[0]
    io = DInputIO(
        start, rho_ref, theta_ref, held_ref, *views(buffers, interpret=kernel.interpret), came, *low, smooth=smooth
    )
    load = partial(load_d_input, kernel, ring, head, w_ref, e_ref, others_ref)
    multiply_units = partial(d_input_warpgroup, kernel, ring, head, spare, warpgroup, io, part_ref)
    # The index is read again here: with one read the machine code is not the one that was measured.
    as_roles(lax.axis_index("warpgroup"), load, multiply_units)


@partial(jax.jit, static_argnames=("classes", "vocab_axis", "most", "interpret", "schedule", "batch_invariant"))
def store_d_input(
    e: Array,
    w: Array,
    held: Array,
    rho: Array,
    theta: Array,
    start: int | Array,
    *,
    classes: int,
    vocab_axis: int,
    low: Array | None = None,
    others: Array | None = None,
    smooth: tuple[Array, Array] | None = None,
    most: int | None = None,
    interpret: bool = False,
    schedule: SplitKSchedule | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Returns `held` with rows start : start + n become rho * (e @ w) + theta * held, in place and rounded once: (32).

    A float32 head is the sum of two matrices, rounded to e's dtype one after the other: (39). `held` and `low` are
    those of the targets' rows then.

    Args:
        e: (n or more, padded(classes)) of 16 bits, zeros past the classes.
        w: (V, D) of e's dtype, or float32, for vocab_axis 0, (D, V) for 1. Classes past K may hold anything. In float32
            V is a multiple of 8, and of 32 for vocab_axis 1: TMA copies such a head in tiles of 8 rows and 32 columns.
        held: (N, D) of e's dtype; rows start : start + n of it hold the targets' rows of w.
        rho, theta: (n,) float32. Where one is 0 its term is left out, even if the other factor is NaN.
        start: () int32.
        classes: K.
        vocab_axis: of w.
        low: (n, D) of e's dtype, which is added to the rows of `held` where w is float32.
        others: (V, D or 2D) of e's dtype, the memory of d_weight with the exponentials that e (n or more, piece) has
            not, as `FirstChunk` says; or None.
        smooth: (n,) and (D,) float32, whose outer product is added; or None.
        most: bytes that partial tiles may take: `d_input_scratch`.
        interpret: whether the kernels run in Pallas' interpreter, on a CPU.
        schedule: how programs divide the tiles, if not as `choose_schedule` says.
        batch_invariant: of `choose_schedule`.
    """
    if others is None and e.shape[1] != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {e.shape[1]}")
    n, hidden = len(rho), held.shape[1]
    first = None if others is None else FirstChunk.of(e.shape[1], n, others.shape[1])
    sizes = n, hidden, classes, most, programs()
    schedule = schedule or choose_schedule(*sizes, batch_invariant=batch_invariant)
    kept = classes % STEP if classes < w.shape[vocab_axis] else 0
    casts_head = w.dtype != e.dtype
    flags = casts_head, interpret, first, smooth is not None
    kernel = DInputKernel(schedule, cdiv(hidden, D_BLOCK), vocab_axis, kept, *flags)
    # Rows of the last tile that are not in the chunk stay unchanged: 0 * sum + 1 * held.
    after = cdiv(n, schedule.tile_rows) * schedule.tile_rows - n
    factors = jnp.pad(rho, (0, after)), jnp.pad(theta, (0, after), constant_values=1.0)
    ref, start = jax.new_ref(held), jnp.asarray(start, jnp.int32)[None]
    buffers = two_views((2, kernel.piece, 64), e.dtype, interpret=interpret)
    finishing = [buffers, plgpu.Barrier(num_arrivals=1 + casts_head, num_barriers=2), *[buffers] * casts_head]
    scratch = [*ring_memory(kernel, e.dtype), *finishing, *head_memory(kernel, e.dtype)]
    rows_held: list[Any] = [ref]
    if smooth is not None:  # 0 in rows that are not in the chunk
        rows_held += [jnp.pad(smooth[0], (0, after)), jnp.pad(smooth[1], (0, -hidden % D_BLOCK))]
    if low is not None:
        rows_held.append(low)
    results = (
        [jax.ShapeDtypeStruct((schedule.partial_tiles, D_BLOCK, schedule.tile_rows), jnp.float32)]
        if schedule.partial_tiles
        else []
    )
    body, operands = partial(d_input_kernel, kernel), (start, e, w, *factors, *rows_held)
    if others is not None:
        operands = *operands, others
    parts = run_kernel(body, "d_input", operands, results, scratch, (programs(),), interpret)
    if parts:
        body, grid = partial(d_input_sum_kernel, kernel), (schedule.split_tiles, schedule.tile_rows // kernel.piece)
        run_kernel(
            body, "d_input_sum", (start, *parts, *factors, *rows_held), [], finishing, grid, interpret, threads=2
        )
    return jax.freeze(ref)
