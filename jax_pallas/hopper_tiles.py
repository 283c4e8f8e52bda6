"""The device code of the Hopper kernel of `hopper_logits.py`: it computes tiles of logits for an epilogue.

the tiles of a program              `Tiles`, `Walk`
the state of a program              `LogitsKernel`, `Program`; its epilogue gets a `Half`
one warpgroup loads                 `load_tiles`
two warpgroups multiply             `logits_warpgroup`, `multiply`
a piece of a tile is finished       `finish`, which calls the epilogue
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas import hopper_common
from jax_pallas.first_chunk import FirstChunk
from jax_pallas.hopper_common import (
    BLOCK_N,
    BLOCK_V,
    COLUMN,
    PIECE,
    PIECES,
    ROW,
    STAGES,
    Ring,
    arrive_at_all,
    either,
    in_pieces,
    over_steps,
    own_pauses,
    slot_of,
    wait_for_all,
    zero_piece,
)
from jax_pallas.tile_config import HALF, STEP, cdiv
from linear_ce.chunk_cost import GROUP_BYTES


@dataclass(frozen=True)
class Tiles:
    """The tiles of the logits of a call: `rows` rows and `classes` classes of a head (V, D), (D, V) for vocab_axis 1.

    A kernel computes all of them, or those of `part_blocks` class blocks that are next to each other.
    """

    ROWS: ClassVar[int] = BLOCK_N  # of a tile
    CLASSES: ClassVar[int] = BLOCK_V

    rows: int
    hidden: int
    classes: int
    vocab_axis: int
    part_blocks: int | None = None

    @property
    def steps(self) -> int:
        return cdiv(self.hidden, STEP)

    @property
    def row_blocks(self) -> int:
        return cdiv(self.rows, self.ROWS)

    @property
    def class_blocks(self) -> int:
        return cdiv(self.classes, self.CLASSES)

    @property
    def count(self) -> int:
        return self.row_blocks * self.kernel_blocks

    @property
    def kernel_blocks(self) -> int:
        """Class blocks of the tiles that a kernel computes."""
        return self.class_blocks if self.part_blocks is None else self.part_blocks

    @property
    def programs(self) -> int:
        return min(self.count, hopper_common.programs())

    @property
    def by_block(self) -> jax.ShapeDtypeStruct:
        """The shape of a result with a number for each row and class block."""
        return jax.ShapeDtypeStruct((self.class_blocks, self.row_blocks * self.ROWS), jnp.float32)

    @property
    def by_place(self) -> jax.ShapeDtypeStruct:
        """The shape of a result with a number for each row and place of its half row block."""
        return jax.ShapeDtypeStruct((HALF, self.row_blocks * self.ROWS), jnp.float32)

    def by_row(self, values: Array | None, other: float = 0) -> Array | None:
        """Returns an array (rows,) padded to the rows of all tiles with `other`."""
        if values is None:
            return None
        return jnp.pad(values, (0, self.row_blocks * self.ROWS - self.rows), constant_values=other)

    def by_column(self, values: Array | None, first_class: Array | int) -> Array | None:
        """Returns a float32 value for each column of the tiles, of an array indexed as the head is."""
        if values is None:
            return None
        if isinstance(first_class, int):
            values = values[first_class : first_class + self.classes]
        else:
            values = lax.dynamic_slice_in_dim(values, first_class, self.classes)
        return jnp.pad(values.astype(jnp.float32), (0, self.class_blocks * self.CLASSES - self.classes))


def tile_of(tiles: Tiles, tile: Array) -> tuple[Array, Array]:
    """Returns the row block of a tile, and its class block among those of the kernel: row blocks of up to `GROUP_BYTES`
    share a class block.

    The divisors are static, so the compiler multiplies instead. A division takes a hundred instructions.
    """
    most = max(1, GROUP_BYTES // (2 * tiles.ROWS * tiles.hidden))
    size = cdiv(tiles.row_blocks, cdiv(tiles.row_blocks, most))
    last, rest = divmod(tiles.row_blocks, size)
    number = lax.div(tile, size * tiles.kernel_blocks)
    within = tile - number * (size * tiles.kernel_blocks)
    class_block, here = lax.div(within, size), size
    if rest:
        class_block = jnp.where(number == last, lax.div(within, rest), class_block)
        here = jnp.where(number == last, rest, size)
    return number * size + within - class_block * here, class_block


class Walk(NamedTuple):
    """The tiles of a program: every `tiles.programs`-th tile, from the number of the program on."""

    tiles: Tiles
    program: Array
    count: Array


def walk_of(tiles: Tiles, program: Array) -> Walk:
    """Returns the walk of a program."""
    return Walk(tiles, program, lax.div(tiles.count - program + tiles.programs - 1, tiles.programs))


def over_tiles[T](walk: Walk, tile: Callable[[Array, Array, T], T], carry: T) -> T:
    """Calls `tile` for each tile, with the number of steps before it, its number and the result of the previous
    call."""
    steps = walk.tiles.steps

    def one(t: Array, carried: tuple[Array, T]) -> tuple[Array, T]:
        before, carry = carried
        return before + steps, tile(before, walk.program + t * walk.tiles.programs, carry)

    return lax.fori_loop(0, walk.count, one, (jnp.int32(0), carry))[1]


@dataclass(frozen=True)
class Half:
    """A warpgroup's half of a tile, the argument of its epilogue.

    Args:
        refs: the operands and results by name.
        by_row: operands that have a value for each row, (HALF,).
        row: its first row, as the call counts them; class_block: the tile's.
        first, last: the columns that count, of the call; None: all do, and `place` is None.
        place: the place, of `places`, for the values of the rows' targets. Below 0: no target is here. None: not
            computed.
    """

    refs: dict[str, Any]
    by_row: dict[str, Array]
    row: Array
    class_block: Array
    first: Array | None
    last: Array | int
    place: Array | None = None

    @property
    def column(self) -> Array:
        return self.class_block * BLOCK_V

    def of_rows(self, name: str) -> Array:
        """Returns a value of each row, broadcast to (HALF, PIECE)."""
        return lax.broadcast_in_dim(self.by_row[name], (HALF, PIECE), (0,))

    def of_columns(self, name: str, piece: int) -> Array:
        """Returns a value of each column, broadcast to (HALF, PIECE)."""
        columns = pl.ds(self.column + piece * PIECE, PIECE)
        values = plgpu.load(self.refs[name].at[columns], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(values, (HALF, PIECE), (1,))

    def columns(self, piece: int) -> Array:
        """Returns (HALF, PIECE) int32, the columns of the call."""
        ids = plgpu.broadcasted_iota(jnp.int32, (HALF, PIECE), 1, layout=plgpu.Layout.WGMMA)
        return ids + (self.column + piece * PIECE)

    def masked(self, values: Array, piece: int, other: float) -> Array:
        """Returns `values` (HALF, PIECE) with `other` in the columns that do not count."""
        if self.first is None:
            return values
        columns = self.columns(piece)
        return jnp.where((columns >= self.first) & (columns < self.last), values, other)

    def put_last(self, piece: int, values: dict[str, Array]) -> None:
        """Writes, with the last piece, the values (HALF,) of a result with a number for each row and class block."""
        if piece == PIECES - 1:
            for name, value in values.items():
                self.refs[name][self.class_block, pl.ds(self.row, HALF)] = value


class Done(NamedTuple):
    """A half tile that was multiplied: the tile's number, rows that its stores go too far, so that there are none, and
    its raw logits, PIECES of (HALF, PIECE) float32."""

    tile: Array
    shift: Array
    raw: tuple[Array, ...]


# (half tile, piece, raw logits of the piece (HALF, PIECE), what the piece before returned) -> that, piece of `out`.
# It is called for each program's first tile once more, before, with zeros, to no effect.
Epilogue = Callable[[Half, int, Array, Any], tuple[Any, Array | None]]


@dataclass(frozen=True)
class LogitsKernel:
    """The static arguments of a kernel over tiles of logits.

    Args:
        tiles: of the call.
        offsets: the first row of x, the first class of w, how many classes from there on are left out, and with
            `Tiles.part_blocks` the first of these class blocks, which is that of the first class of w. If there is one
            more, only so many classes count. None: the number follows the pauses in the kernel's scalars.
        names: of the operands after x, w and scalars, and of the results. With "places" (half row blocks, class
            blocks) int32, halves of tiles where these are not below 0 take the path of those of which not all columns
            count: `Half.place`.
        by_row: those that have a value for each row, which epilogues get loaded.
        epilogue: returns a piece of "out" (rows, padded) or None. With the last piece it writes the results of each
            row.
        stored: dtype of the result "out"; None: nothing is stored.
        interpret: whether it runs in Pallas' interpreter, on a CPU.
        first: of "out" and "others", which has the classes past `first.piece`; None: all are in "out".
    """

    tiles: Tiles
    offsets: tuple[int | None, ...]
    names: tuple[str, ...]
    by_row: tuple[str, ...]
    epilogue: Epilogue
    stored: Any
    interpret: bool
    first: FirstChunk | None = None


class Program(NamedTuple):
    """A program of a kernel: its tiles, and the references that a warpgroup reads and writes."""

    kernel: LogitsKernel
    walk: Walk
    warpgroup: Array
    scalar_ref: Any
    refs: dict[str, Any]
    ring: Ring
    buffers: Any  # two for each warpgroup, (2, 2, HALF, PIECE), as TMA and as registers take them; None: no "out"

    def offsets(self) -> list[Any]:
        """Returns the offsets. Static ones need no launch that writes them to memory."""
        places = iter(range(2 * PIECES, 2 * PIECES + self.kernel.offsets.count(None)))
        return [self.scalar_ref[next(places)] if one is None else jnp.int32(one) for one in self.kernel.offsets]


def load_tiles(own: Program, x_ref: Any, w_ref: Any) -> None:
    """The loading warpgroup: loads the steps of all tiles of this program into the ring."""
    tiles, ring = own.kernel.tiles, own.ring
    first_row, first_class, *_ = own.offsets()
    repeats = tiles.hidden != x_ref.shape[1]  # x, for the second half of a split head
    if tiles.vocab_axis and own.kernel.offsets[1] is None:
        first_class = pl.multiple_of(first_class, 64)

    def tile(before: Array, number: Array, _: tuple[()]) -> tuple[()]:
        row_block, class_block = tile_of(tiles, number)
        rows = pl.ds(first_row + row_block * BLOCK_N, BLOCK_N)
        classes = pl.ds(first_class + class_block * BLOCK_V, BLOCK_V)

        @pl.loop(0, tiles.steps)
        def _step(s: Array) -> None:
            slot = slot_of(before + s)
            k = pl.ds(s * STEP, STEP)
            plgpu.barrier_wait(ring.empty.at[slot])
            source = w_ref.at[k, classes] if tiles.vocab_axis else w_ref.at[classes, k]
            k_of_x = pl.ds(lax.rem(s * STEP, jnp.int32(x_ref.shape[1])), STEP) if repeats else k
            plgpu.copy_gmem_to_smem(x_ref.at[rows, k_of_x], ring.a_moved.at[slot], ring.full.at[slot])
            plgpu.copy_gmem_to_smem(source, ring.b_moved.at[slot], ring.full.at[slot])

        return ()

    over_tiles(own.walk, tile, ())
    wait_for_all(ring.empty, STAGES)  # a program must not end before all have arrived


def logits_warpgroup(own: Program) -> None:
    """A multiplying warpgroup: computes its halves of the program's tiles, and finishes each during the next matmul."""
    pauses = own_pauses(own.scalar_ref, own.warpgroup)
    arrive_at_all(own.ring.empty, STAGES)

    def tile(before: Array, number: Array, done: Done) -> Done:
        accumulator = plgpu.WGMMAAccumulatorRef((HALF, BLOCK_V), jnp.float32)
        raw = pl.run_scoped(lambda acc: multiply(acc, own, pauses, before, done), accumulator)
        return Done(number, jnp.int32(0), raw)

    zeros = zero_piece()
    nowhere = jnp.int32(own.kernel.tiles.row_blocks * BLOCK_N)
    none = Done(own.walk.program, nowhere, (zeros,) * PIECES)
    last, carried = finishing(own, over_tiles(own.walk, tile, none)), None
    for piece in range(PIECES):
        carried = finish(own, last, piece, carried)
    if own.buffers is not None:
        plgpu.wait_smem_to_gmem(0)


def multiply(acc: Any, own: Program, pauses: list[Any], before: Array, done: Done) -> tuple[Array, ...]:
    """Returns the raw logits of a half tile, PIECES of (HALF, PIECE) float32, and finishes `done` meanwhile."""
    ring, steps = own.ring, own.kernel.tiles.steps

    def step(s: Array | int, *, releases: bool = True) -> None:
        slot = slot_of(before + s)
        plgpu.barrier_wait(ring.full.at[slot])
        w = ring.b.at[slot]
        if not own.kernel.tiles.vocab_axis:
            w = w.transpose((1, 0))
        plgpu.wgmma(acc, ring.a.at[slot, pl.ds(own.warpgroup * HALF, HALF)], w)
        plgpu.wgmma_wait(1)  # this matmul stays in flight; the one before is done with its stage
        if releases:
            plgpu.barrier_arrive(ring.empty.at[slot_of(before + s - 1)])

    step(0, releases=False)
    half, carried = finishing(own, done), None
    for piece in over_steps(steps, pauses, step):
        carried = finish(own, half, piece, carried)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ring.empty.at[slot_of(before + steps - 1)])
    return in_pieces(acc)


class Finishing(NamedTuple):
    """A half tile whose epilogue runs in pieces."""

    done: Done
    row: Array
    whole: Half  # the argument of the epilogue if all columns count
    masked: Half  # where not
    is_partial: Array  # () bool: not all columns count


def finishing(own: Program, done: Done) -> Finishing:
    """Returns the arguments of `finish` for a half tile that was multiplied."""
    tiles, refs = own.kernel.tiles, own.refs
    row_block, class_block = tile_of(tiles, done.tile)
    if tiles.part_blocks is not None:
        class_block += own.offsets()[3]
    row = row_block * BLOCK_N + own.warpgroup * HALF
    rows = {
        name: plgpu.load(refs[name].at[pl.ds(row, HALF)], layout=ROW, optimized=False) for name in own.kernel.by_row
    }
    whole = Half(refs, rows, row, class_block, None, tiles.classes)
    left_out, *more = own.offsets()[2:]
    masked = replace(whole, first=left_out, last=more[1] if len(more) > 1 else tiles.classes)
    is_partial = (whole.column < left_out) | (whole.column + BLOCK_V > masked.last)
    if "places" in refs:
        place = refs["places"][2 * row_block + own.warpgroup, class_block]
        masked, is_partial = replace(masked, place=place), is_partial | (place >= 0)
    return Finishing(done, row, whole, masked, is_partial)


def finish(own: Program, found: Finishing, piece: int, carried: Any) -> Any:
    """Runs the epilogue of a piece of a half tile. Returns the values that the next piece takes."""
    kernel, done = own.kernel, found.done

    def of(half: Half) -> Any:
        new, values = kernel.epilogue(half, piece, done.raw[piece], carried)
        return new, None if values is None else values.astype(kernel.stored)

    # The branch is also there if all tiles are full: without it ptxas waits for every matmul, C7514.
    carried, values = either(found.is_partial, lambda: of(found.masked), lambda: of(found.whole))
    if values is not None:
        store_piece(own, values, found.row + done.shift, found.whole.column + piece * PIECE, piece)
    return carried


def store_piece(own: Program, values: Array, row: Array, column: Array, piece: int) -> None:
    """Stores a piece of "out" through one of the warpgroup's two buffers; values outside of it are not stored."""
    moved, buffer = own.buffers
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
    buffer[own.warpgroup, piece % 2] = values
    plgpu.commit_smem()
    at, first = (pl.ds(row, HALF), pl.ds(column, PIECE)), own.kernel.first
    store = partial(plgpu.copy_smem_to_gmem, moved.at[own.warpgroup, piece % 2])
    if first is None:
        store(own.refs["out"].at[at])
        return

    def later() -> None:
        start, within = first.place(column)
        store(own.refs["others"].at[pl.ds(start + row, HALF), pl.ds(within, PIECE)])

    # Rows past a group are those of another. They are none of the chunk's, and outside of "out" too.
    either((column < first.piece) | (row >= first.rows), lambda: store(own.refs["out"].at[at]), later)
