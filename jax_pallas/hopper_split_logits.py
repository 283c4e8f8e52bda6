"""The Hopper kernel of scaled exponentials for a float32 head, which it reads in place and splits: MATH.md (39).

In Pallas' Mosaic dialect, for sm_90. A tile is transposed: CLASSES classes of the head, the first operand, which a
warpgroup splits in registers (`hopper_registers.add_split`), by up to ROWS rows of x, the second. So no half of the
head is ever in memory. One warpgroup loads, and two multiply, 64 classes of a tile each, and then compute exponentials
of 64 rows at a time. They share no sums: a class block of the results is the 64 classes of a warpgroup.

The registers hold no second tile, so that no epilogue runs during the matmul of the same warpgroup. The other
warpgroup may multiply meanwhile, up to STAGES steps ahead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.first_chunk import FirstChunk
from jax_pallas.hopper_common import (
    COLUMN,
    ROW,
    arrive_at_all,
    as_roles,
    either,
    run_kernel,
    transforms,
    two_views,
    views,
    wait_for_all,
    when,
)
from jax_pallas.hopper_logits import (
    OF_TARGETS,
    STATIC,
    ExponentialsSwitches,
    exponentials_types,
    to_exponentials,
    to_logits,
)
from jax_pallas.hopper_registers import ACCUMULATOR, add_split, load_columns, put_columns, store_columns
from jax_pallas.hopper_tiles import Tiles, tile_of
from jax_pallas.row_kernels import LOG2_E, Exponentials
from jax_pallas.row_math import NO_PROBABILITY
from jax_pallas.tile_config import CLASS_BLOCK, HALF, SPLIT_CLASSES, SPLIT_ROWS, STEP, cdiv
from linear_ce.statistics import ARGMAX, ENTROPY, LOGIT_SUM, MAX, OF_BLOCKS, SQUARES

STAGES = 3  # steps that are loaded ahead: 196,608 bytes

PIECES = SPLIT_ROWS // HALF  # of a tile's rows, which an epilogue processes one after the other


@dataclass(frozen=True, kw_only=True)
class SplitTiles(Tiles):
    """The tiles of the logits of a call, transposed. Exponentials of `stored` classes are stored, zeros past the last
    class."""

    ROWS = SPLIT_ROWS
    CLASSES = SPLIT_CLASSES

    stored: int

    @property
    def class_blocks(self) -> int:
        """Tiles beside each other. A tile has two class blocks of the results."""
        return cdiv(self.stored, self.CLASSES)

    @property
    def by_block(self) -> jax.ShapeDtypeStruct:
        """The shape of a result with a number for each row and HALF classes."""
        return jax.ShapeDtypeStruct((cdiv(self.classes, HALF), self.row_blocks * self.ROWS), jnp.float32)

    def place_of(self, tile: Any) -> tuple[Any, Any]:
        """Returns the first row and class of a tile."""
        row_block, class_block = tile_of(self, tile)
        return row_block * self.ROWS, class_block * self.CLASSES


@dataclass(frozen=True)
class SplitKernel:
    """The static arguments of `split_exponentials_kernel`.

    Args:
        tiles: of the call.
        names: of the operands after x, w and scalars, and of the results.
        switches: of the epilogue.
        first: of "out" and "others", which has the classes past `first.piece`; None: all are in "out".
        interpret: whether it runs in Pallas' interpreter, on a CPU.
    """

    tiles: SplitTiles
    names: tuple[str, ...]
    switches: ExponentialsSwitches
    first: FirstChunk | None
    interpret: bool

    @property
    def kinds(self) -> dict[str, str]:
        """The results with a number for each row and class block, and how they are joined over classes; those
        of "first" also have the class of the largest."""
        bits = self.switches.statistics
        found = {"tops": "first" if bits & ARGMAX else "max"} if bits & MAX else {}
        sums = {"logit_sums": LOGIT_SUM, "exp_logs": ENTROPY, "squares": SQUARES}
        return found | {name: "sum" for name, bit in sums.items() if bits & bit} | {"sums": "sum"}

    @property
    def slots(self) -> int:
        """Numbers of a row that are joined."""
        return len(self.kinds) + ("first" in self.kinds.values())

    @property
    def buffers(self) -> int:
        """Buffers of a warpgroup, if the shared memory has room."""
        return 2 if self.slots == 1 else 1


class SplitRing(NamedTuple):
    """The stages of loaded steps: x as TMA writes and as wgmma reads it, w, and their barriers."""

    x_moved: Any  # (STAGES, SPLIT_ROWS, STEP)
    x: Any
    w: Any  # (STAGES, 2, ...): one for each warpgroup
    full: Any
    empty: Any


class SplitProgram(NamedTuple):
    """A program of the kernel, and the references that a warpgroup reads and writes."""

    kernel: SplitKernel
    program: Any
    warpgroup: Any
    steps: Any
    start: Any  # the first row of x
    refs: dict[str, Any]
    ring: SplitRing
    scratch: Any  # (slots, 4, HALF) float32, of a warpgroup
    buffer: Any  # (buffers, HALF, HALF), of a warpgroup, as TMA and as registers take them; None: no "out"

    def over_tiles(self, tile: Callable[[Any, Any], None]) -> None:
        """Calls a function for each tile of this program, with its number and that of steps before it."""
        tiles = self.kernel.tiles
        count = lax.div(tiles.count - self.program + tiles.programs - 1, tiles.programs)

        @pl.loop(0, count)
        def _tile(t: Any) -> None:
            tile(self.program + t * tiles.programs, t * self.steps)


def slot_of(number: Any) -> Any:
    return lax.rem(number, jnp.int32(STAGES))


def load_split_tiles(own: SplitProgram, x_ref: Any, w_ref: Any) -> None:
    """The loading warpgroup."""
    ring, tiles = own.ring, own.kernel.tiles

    def tile(number: Any, before: Any) -> None:
        row, first_class = tiles.place_of(number)

        @pl.loop(0, own.steps)
        def _step(s: Any) -> None:
            slot, k = slot_of(before + s), pl.ds(s * STEP, STEP)
            plgpu.barrier_wait(ring.empty.at[slot])
            plgpu.copy_gmem_to_smem(
                x_ref.at[pl.ds(own.start + row, SPLIT_ROWS), k], ring.x_moved.at[slot], ring.full.at[slot]
            )
            for i in range(2):
                classes = pl.ds(first_class + i * HALF, HALF)
                source = w_ref.at[k, classes] if tiles.vocab_axis else w_ref.at[classes, k]
                plgpu.copy_gmem_to_smem(source, ring.w.at[slot, i], ring.full.at[slot])

    own.over_tiles(tile)
    wait_for_all(ring.empty, STAGES)  # a program must not end before all have arrived


class Block(NamedTuple):
    """HALF rows of a warpgroup's classes of a tile."""

    refs: dict[str, Any]
    classes: int
    row: Any  # the first, as the call counts them
    first_class: Any

    def of_columns(self, name: str, _: int) -> Array:
        """Returns a value of each class, broadcast to (HALF, HALF)."""
        values = plgpu.load(self.refs[name].at[pl.ds(self.first_class, HALF)], layout=ROW, optimized=False)
        return lax.broadcast_in_dim(values, (HALF, HALF), (0,))

    def of_rows(self, name: str) -> Array:
        """Returns a value of each row, (HALF,)."""
        return plgpu.load(self.refs[name].at[pl.ds(self.row, HALF)], layout=COLUMN, optimized=False)

    def ids(self) -> Array:
        """Returns (HALF, HALF) int32, the numbers of the classes in the block."""
        return plgpu.broadcasted_iota(jnp.int32, (HALF, HALF), 0, layout=plgpu.Layout.WGMMA)

    def masked(self, values: Array, other: float) -> Array:
        """Returns `values` (HALF, HALF) with `other` in those of no class."""
        return jnp.where(self.ids() < self.classes - self.first_class, values, other)


class Values(NamedTuple):
    """Numbers (classes, rows) of a block."""

    joined: dict[str, Callable[[], tuple[Array, ...]]]  # what is joined over the classes, by name, in this order
    stored: Callable[[], Array]  # the exponentials that are stored


def values_of(
    switches: ExponentialsSwitches, block: Block, raw: Array, ref_exponent: Array, *, is_partial: bool
) -> Values:
    """Returns the numbers of a block: (29), (31). Only the functions that are called compute."""

    def masked(values: Array, other: float) -> Array:
        return block.masked(values, other) if is_partial else values

    def capped() -> tuple[Array, Array | None]:
        return to_logits(block, raw, 0, switches.logit_scale, switches.softcap)

    def exponents() -> Array:
        return capped()[0] * LOG2_E - lax.broadcast_in_dim(ref_exponent, raw.shape, (1,))

    def values() -> Array:
        # Masked afterwards, so that full and partial tiles round alike: each logit and its reference exponent once.
        return masked(jnp.exp2(exponents()), 0.0)

    def stored() -> Array:
        ratio = capped()[1]
        return values() if ratio is None else masked(values() * (1.0 - jnp.square(ratio)), 0.0)

    ids = (block.ids().astype(jnp.float32),) if switches.statistics & ARGMAX else ()
    joined: dict[str, Callable[[], tuple[Array, ...]]] = {
        "tops": lambda: (masked(capped()[0], -jnp.inf), *ids),
        "logit_sums": lambda: (masked(capped()[0], 0.0),),
        "exp_logs": lambda: (values() * masked(jnp.maximum(exponents(), NO_PROBABILITY), 0.0),),
        "squares": lambda: (jnp.square(values()),),
        "sums": lambda: (values(),),
    }
    return Values(joined, stored)


def exponentials_of(of: Callable[..., Values], *, is_partial: bool) -> tuple[Array, Array]:
    """Returns the exponentials of a block, before and after they are multiplied by the slope of the cap."""
    found = of(is_partial=is_partial)
    [values] = found.joined["sums"]()
    return values, found.stored()


class Loaded(NamedTuple):
    """What an epilogue takes that is loaded before the matmul of its tile, behind which the loads are hidden."""

    blocks: list[Block]
    class_block: Any
    places: list[Any]  # of each block; below 0: no target is there
    ref_exponent: Array  # of the first block


def load_numbers(own: SplitProgram, row: Any, first_class: Any) -> Loaded:
    tiles, places = own.kernel.tiles, own.refs["places"]
    blocks = [Block(own.refs, tiles.classes, row + i * HALF, first_class) for i in range(PIECES)]
    class_block = lax.div(first_class, HALF)
    inside = jnp.minimum(class_block, places.shape[1] - 1)
    of_blocks = [places[jnp.minimum(lax.div(block.row, HALF), places.shape[0] - 1), inside] for block in blocks]
    of_blocks = [jnp.where(class_block == inside, place, -1) for place in of_blocks]  # -1: past the last class
    return Loaded(blocks, class_block, of_blocks, blocks[0].of_rows("ref_exponent"))


def finish(own: SplitProgram, raw: Array, loaded: Loaded) -> None:
    """Writes the results of a warpgroup's classes of a tile, of raw logits (HALF, SPLIT_ROWS)."""
    switches, (blocks, class_block, places, ref_exponent) = own.kernel.switches, loaded
    is_partial = blocks[0].first_class + HALF > own.kernel.tiles.classes
    for i, block in enumerate(blocks):
        next_exponent = blocks[i + 1].of_rows("ref_exponent") if i + 1 < PIECES else None
        part = raw[:, i * HALF : (i + 1) * HALF]
        of = partial(values_of, switches, block, part, ref_exponent)
        if switches.statistics:  # one after the other, or registers would spill
            found = of(is_partial=True)
        else:
            found = either(
                is_partial,
                partial(exponentials_of, of, is_partial=True),
                partial(exponentials_of, of, is_partial=False),
            )
            found = Values({"sums": lambda found=found: found[:1]}, lambda found=found: found[1])
        # The store of the block before has read its buffer, and all threads have read its numbers.
        if own.buffer is not None:
            plgpu.wait_smem_to_gmem(own.kernel.buffers - 1, wait_read_only=True)
        else:
            plgpu.commit_smem()
        join(own, found.joined, class_block, block.row, partial(store_values, own, found.stored, block, i))
        when(places[i] >= 0)(partial(store_targets, own, block, part, ref_exponent, places[i]))
        if next_exponent is not None:
            ref_exponent = next_exponent


def join(
    own: SplitProgram, joined: dict[str, Callable[[], tuple[Array, ...]]], class_block: Any, row: Any,
    store: Callable[[], None],
) -> None:  # fmt: skip
    """Writes the numbers of a block's rows, and calls `store` where what is in shared memory for them is committed."""
    kinds, place, slot, refs = own.kernel.kinds, (class_block, pl.ds(row, HALF)), 0, []
    arrays = dict[str, tuple[Array, ...]]()
    for name, kind in kinds.items():
        arrays[name] = joined[name]()
        refs += [own.refs[each].at[place] for each in (name, "columns")[: len(arrays[name])]]
        if not own.kernel.interpret:
            put_columns(kind, arrays[name], own.scratch, slot)
        slot = len(refs)
    store()

    @when(class_block < own.kernel.tiles.by_block.shape[0])
    def _store() -> None:
        if own.kernel.interpret:
            for name, kind in kinds.items():
                values, *ids = arrays[name]
                joined = own.refs[name][place] = values.sum(0) if kind == "sum" else values.max(0)
                if ids:
                    here = values == lax.broadcast_in_dim(joined, values.shape, (1,))
                    own.refs["columns"][place] = jnp.where(here, ids[0], jnp.inf).min(0)
        else:
            store_columns(list(kinds.values()), own.scratch, refs)


def store_values(own: SplitProgram, values: Callable[[], Array], block: Block, number: int) -> None:
    """Commits what the warpgroup wrote to shared memory, and stores exponentials (classes, rows) of a block."""
    if own.buffer is None:
        plgpu.commit_smem()
        return
    moved, buffer = (view.at[number % own.kernel.buffers] for view in own.buffer)
    buffer.transpose((1, 0))[...] = values().astype(jnp.bfloat16)
    plgpu.commit_smem()
    row, column, first = block.row, block.first_class, own.kernel.first
    out = own.refs["out"].at[pl.ds(row, HALF), pl.ds(column, HALF)]
    if first is None:
        plgpu.copy_smem_to_gmem(moved, out)
        return

    def later() -> None:
        start, within = first.place(column)
        plgpu.copy_smem_to_gmem(moved, own.refs["others"].at[pl.ds(start + row, HALF), pl.ds(within, HALF)])

    # Rows past a group are those of another. They are none of the chunk's, and outside of "out" too.
    either((column < first.piece) | (row >= first.rows), lambda: plgpu.copy_smem_to_gmem(moved, out), later)


def store_targets(own: SplitProgram, block: Block, raw: Array, ref_exponent: Array, place: Any) -> None:
    """Writes the logits and summands of the targets in a block to their place."""
    switches = own.kernel.switches
    capped, _ = to_logits(block, raw, 0, switches.logit_scale, switches.softcap)
    target = lax.broadcast_in_dim(block.of_rows("target"), capped.shape, (1,))
    here = jnp.where(block.ids() + block.first_class == target, capped, 0.0)
    if own.kernel.interpret:
        logits = here.sum(0)
    else:
        plgpu.commit_smem()  # all have read the sums
        put_columns("sum", (here,), own.scratch, 0)
        plgpu.commit_smem()
        logits = load_columns(own.scratch)
    for name, value in zip(OF_TARGETS, (jnp.exp2(logits * LOG2_E - ref_exponent), logits), strict=True):
        own.refs[name][place, pl.ds(block.row, HALF)] = value


def split_exponentials_warpgroup(own: SplitProgram) -> None:
    """A multiplying warpgroup: computes its classes of the program's tiles."""
    ring, tiles = own.ring, own.kernel.tiles
    arrive_at_all(ring.empty, STAGES)
    options: dict[str, Any] = {"transposed": tiles.vocab_axis == 1, "interpret": own.kernel.interpret}

    def tile(number: Any, before: Any) -> None:
        row, first_class = tiles.place_of(number)
        first_class = first_class + own.warpgroup * HALF
        loaded = load_numbers(own, row, first_class)

        def step(s: Any, acc: Array) -> Array:
            slot = slot_of(before + s)
            plgpu.barrier_wait(ring.full.at[slot])
            acc = add_split(acc, ring.w.at[slot, own.warpgroup], ring.x.at[slot], **options)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(ring.empty.at[slot])
            return acc

        zeros = plgpu.layout_cast(jnp.zeros((HALF, SPLIT_ROWS), jnp.float32), ACCUMULATOR)
        raw = plgpu.layout_cast(lax.fori_loop(0, own.steps, step, zeros), plgpu.Layout.WGMMA)

        @when(first_class < tiles.stored)
        def _finish() -> None:
            finish(own, raw, loaded)

    own.over_tiles(tile)
    if own.buffer is not None:
        plgpu.wait_smem_to_gmem(0)


def split_exponentials_kernel(kernel: SplitKernel, x_ref: Any, w_ref: Any, scalar_ref: Any, *rest: Any) -> None:
    """Computes tiles of logits of a float32 head and writes scaled exponentials and the numbers of their rows."""
    refs = dict(zip(kernel.names, rest, strict=False))
    x_all, w_all, full, empty, scratch, *buffers = rest[len(refs) :]
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    ring = SplitRing(*views(x_all, interpret=kernel.interpret), w_all, full, empty)
    own_warpgroup = jnp.minimum(warpgroup, 1)
    buffer = None
    if buffers:
        buffer = tuple(view.at[own_warpgroup] for view in views(buffers[0], interpret=kernel.interpret))
    own = SplitProgram(
        kernel, program, warpgroup, scalar_ref[0], scalar_ref[1], refs, ring, scratch.at[own_warpgroup], buffer
    )
    as_roles(
        lax.axis_index("warpgroup"),
        partial(load_split_tiles, own, x_ref, w_ref),
        partial(split_exponentials_warpgroup, own),
    )


@partial(jax.jit, static_argnames=(*STATIC, "stores", "statistics", "piece"))
def split_exponentials(
    x: Array,
    w: Array,
    bias: Array | None,
    ref_exponent: Array,
    target: Array,
    places: Array,
    start: Array | int,
    others: Array | None = None,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    stores: bool,
    statistics: int,
    piece: int = 0,
    interpret: bool = False,
) -> Exponentials:
    """Returns what `hopper_logits.exponentials` returns, for a float32 head that is split. A class block has HALF
    classes.

    Args:
        w: (V, D) float32 with V a multiple of 8, or (D, V) with V a multiple of 32 where `vocab_axis` is 1. D is a
            multiple of 64.
        places: of `hopper_logits.places_of` for these rows, for class blocks of HALF classes.
        x, bias, ref_exponent, target, start, others, rows, classes, vocab_axis, logit_scale, softcap, stores,
            statistics, piece, interpret: of `hopper_logits.exponentials`.
    """
    # A first chunk's matmul of d_weight reads zeros past the last class.
    stored = classes if others is None else cdiv(classes, CLASS_BLOCK) * CLASS_BLOCK
    tiles = SplitTiles(rows, x.shape[1], classes, vocab_axis, stored=stored)
    switches = ExponentialsSwitches(logit_scale, softcap, stores, statistics & OF_BLOCKS)
    scalars = jnp.stack([jnp.int32(tiles.steps), jnp.asarray(start, jnp.int32)])
    operands = {
        "ref_exponent": tiles.by_row(ref_exponent, jnp.inf),  # no row: zeros
        "bias": tiles.by_column(bias, 0),
        "places": places,
        "target": tiles.by_row(target, -1),
    }
    present = {name: value for name, value in operands.items() if value is not None}
    first, refs = None, {}
    if others is not None:
        first, refs = FirstChunk.of(piece, rows, others.shape[1]), {"others": jax.new_ref(others)}
    types = exponentials_types(
        tiles, x.dtype, stores=stores, statistics=switches.statistics, piece=first and first.piece
    )
    kernel = SplitKernel(tiles, (*present, *refs, *types), switches, first, interpret)
    scratch = [
        two_views((STAGES, SPLIT_ROWS, STEP), x.dtype, interpret=interpret),
        plgpu.SMEM((STAGES, 2, HALF, STEP), jnp.float32, transforms=transforms(STEP, 4)),
        plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.SMEM((2, kernel.slots, 4, HALF), jnp.float32),
    ]
    if stores:
        scratch.append(two_views((2, kernel.buffers, HALF, HALF), x.dtype, interpret=interpret))
    arrays = (x, w, scalars, *present.values(), *refs.values())
    body = partial(split_exponentials_kernel, kernel)
    made = run_kernel(
        body, "exponentials", arrays, list(types.values()), scratch, (tiles.programs,), interpret, approximate=True
    )
    found = dict(zip(types, made, strict=True)) | {name: jax.freeze(ref) for name, ref in refs.items()}
    return to_exponentials(found)
