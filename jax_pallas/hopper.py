"""What the Mosaic kernels for Hopper share: layouts of shared memory and registers, the size of the card, and
`over_tiles`, which computes tiles of logits for the epilogues of `hopper_logits.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROW = plgpu.Layout.WGMMA.reduce(1)  # one value for each row of a product's accumulator
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one for each column

MULTIPROCESSORS = 132  # of an H100 SXM and an H200: what is compiled for where there is no card to ask


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def padded(classes: int) -> int:
    """Returns how many columns an (n, classes) array of 16 bits gets, so that TMA can cut it into tiles."""
    return cdiv(classes, 64) * 64


def transforms(columns: int, itemsize: int = 2) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Returns the layout in shared memory of an array whose minor axis has so many columns, as TMA and wgmma want."""
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def two_views(shape: tuple[int, ...], dtype: Any, *, interpret: bool) -> Any:
    """Returns shared memory (..., columns) of 32 or 64 columns of 16 bits, as TMA moves it and as wgmma wants it.

    The same bytes, one swizzled row after the other; but TMA refuses to cut an array into the tiles of 8 rows that
    wgmma names where they do not divide it, or where a copy starts elsewhere than at a multiple of 8. So there are two
    views of them, which `views` returns. The interpreter knows neither such a limit nor two views of the same memory.
    """
    tiling, swizzle = transforms(shape[-1])
    tiled = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
    return tiled if interpret else plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=(swizzle,)), tiled)


def views(ref: Any, *, interpret: bool) -> tuple[Any, Any]:
    """Returns what TMA and what wgmma and registers take of `two_views`."""
    return (ref, ref) if interpret else tuple(ref)


def programs() -> int:
    """Returns how many persistent programs fill the card."""
    try:
        return jax.local_devices(backend="gpu")[0].core_count
    except RuntimeError:
        return MULTIPROCESSORS


HALF = 64  # rows of a warpgroup: the least that wgmma takes

BLOCK_N = 2 * HALF  # rows of a tile of logits

BLOCK_V = 256  # and its classes: the most that wgmma takes

PIECE = 64  # classes that an epilogue takes at a time: 128 bytes of 16 bits, the widest swizzle

PIECES = BLOCK_V // PIECE

# Registers of a thread, of 65,536: one that multiplies holds 128 sums and, packed, half as many finished numbers.
LOAD_REGISTERS, MULTIPLY_REGISTERS = 24, 240


class Ring(NamedTuple):
    """How tiles are loaded.

    Args:
        step: units of the hidden size that are multiplied at a time; stages: steps that are loaded ahead.
        lag: steps of each tile that the second warpgroup lets the first go ahead.
        group: row blocks that share a block of classes before the next comes: its weights come from L2.
    """

    step: int
    stages: int
    lag: int
    group: int


# 196,608 bytes, which leave room for the buffers of what is stored. A stage's number is a mask: powers of two.
STORING, READING = Ring(64, 4, 0, 16), Ring(32, 8, 6, 8)


@dataclass(frozen=True)
class Tiles:
    """How the logits of a call are cut: `rows` rows and `classes` classes of a head (V, D), (D, V) for vocab_axis 1."""

    rows: int
    hidden: int
    classes: int
    vocab_axis: int

    @property
    def row_blocks(self) -> int:
        return cdiv(self.rows, BLOCK_N)

    @property
    def class_blocks(self) -> int:
        return cdiv(self.classes, BLOCK_V)

    def place(self, tile: Array, group: int) -> tuple[Array, Array]:
        """Returns the row and class block of a tile: up to `group` row blocks share a class block before the next.

        Divisors are known to the compiler, which then multiplies: a division takes a hundred instructions.
        """
        size = cdiv(self.row_blocks, cdiv(self.row_blocks, group))
        last, rest = divmod(self.row_blocks, size)
        number = lax.div(tile, size * self.class_blocks)
        within = tile - number * (size * self.class_blocks)
        class_block, here = lax.div(within, size), size
        if rest:
            class_block = jnp.where(number == last, lax.div(within, rest), class_block)
            here = jnp.where(number == last, rest, size)
        return number * size + within - class_block * here, class_block

    @property
    def by_block(self) -> jax.ShapeDtypeStruct:
        """What holds a number for each row and block of classes."""
        return jax.ShapeDtypeStruct((self.class_blocks, self.row_blocks * BLOCK_N), jnp.float32)

    def by_row(self, values: Array | None, other: float = 0) -> Array | None:
        """Returns a value for each row of the tiles, of (rows,); `other` for those that are none."""
        if values is None:
            return None
        return jnp.pad(values, (0, self.row_blocks * BLOCK_N - self.rows), constant_values=other)

    def by_column(self, values: Array | None, first_class: Array | int) -> Array | None:
        """Returns a float32 value for each column of the tiles, of an array indexed as the head is."""
        if values is None:
            return None
        if isinstance(first_class, int):
            values = values[first_class : first_class + self.classes]
        else:
            values = lax.dynamic_slice_in_dim(values, first_class, self.classes)
        return jnp.pad(values.astype(jnp.float32), (0, self.class_blocks * BLOCK_V - self.classes))


@dataclass(frozen=True)
class Half:
    """A warpgroup's half of a tile, as its epilogue sees it.

    Args:
        refs: the operands and results by name.
        row, column: its first row and class, as the call counts them; class_block: the tile's.
        first, last: the columns that count, of the call; None: all do.
    """

    refs: dict[str, Any]
    row: Array
    column: Array
    class_block: Array
    first: Array | None
    last: int

    def of_rows(self, name: str) -> Array:
        """Returns (HALF, PIECE), what there is one of for each row."""
        values = plgpu.load(self.refs[name].at[pl.ds(self.row, HALF)], layout=ROW, optimized=False)
        return lax.broadcast_in_dim(values, (HALF, PIECE), (0,))

    def of_columns(self, name: str, piece: int) -> Array:
        """Returns (HALF, PIECE), what there is one of for each column."""
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

    def put(self, name: str, values: Array) -> None:
        """Writes (HALF,) of what there is one of for each row and block of classes."""
        self.refs[name][self.class_block, pl.ds(self.row, HALF)] = values


def over_tiles(
    name: str,
    tiles: Tiles,
    x: Array,
    w: Array,
    offsets: tuple[Array | int, Array | int, Array | int],
    operands: dict[str, Array | None],
    results: dict[str, jax.ShapeDtypeStruct],
    epilogue: Callable[[Half, list[Array]], list[Array]],
    *,
    stored: Any = None,
    updates: bool = False,
    redo: Array | None = None,
    interpret: bool,
) -> dict[str, Array]:
    """Runs an epilogue on every tile of x @ w, or on those of flagged row blocks.

    Each multiprocessor runs one program, which takes one tile after the other. In it one warpgroup loads, and two
    multiply, each half of a tile's rows and all of its columns, then turn the float32 sums in their registers into what
    `epilogue` makes of them. The ring of loaded tiles lets one warpgroup run ahead of the other. What is stored waits
    in registers, packed, and leaves in pieces under the products of the next tile: a warpgroup that waits for stores
    does not multiply.

    Args:
        x, w: (N, D), (V, D) or (D, V).
        offsets: the first row of x, the first class of w, how many classes from there on are left out.
        operands: what the epilogue reads, None where there is none.
        results: what it writes.
        epilogue: takes its half tile and raw products (HALF, PIECE) of each piece; writes what there is one of for each
            row, and returns the pieces of `out` (rows, padded).
        stored: dtype of `out`, an operand or a result, or None: nothing is stored.
        updates: the operand `out` is written in place.
        redo: (1 + row blocks,) int32. If the first is 0 nothing is done, else the row blocks whose flags are not 0.
        interpret: whether it runs in Pallas' interpreter, on a CPU.
    """
    ring = STORING if stored is not None else READING
    stages, steps = ring.stages, cdiv(tiles.hidden, ring.step)
    lag = ring.lag if steps > stages else 0  # in fewer steps the first warpgroup could be two tiles ahead
    skips = not (isinstance(offsets[2], int) and offsets[2] == 0)
    edges = skips or tiles.classes % BLOCK_V != 0
    traced = [jnp.asarray(number, jnp.int32) for number in offsets if not isinstance(number, int)]
    scalars = jnp.stack(traced or [jnp.int32(0)])
    present = {key: value for key, value in {**operands, "redo": redo}.items() if value is not None}
    count = tiles.row_blocks * tiles.class_blocks
    many = min(count, programs())

    def slot_of(number: Any) -> Any:
        return number & (stages - 1)

    def numbers(scalar_ref: Any) -> list[Any]:
        """Returns the offsets: what was known when the call was traced costs no launch that would write it."""
        places = iter(range(len(traced)))
        return [jnp.int32(known) if isinstance(known, int) else scalar_ref[next(places)] for known in offsets]

    def body(x_ref: Any, w_ref: Any, scalar_ref: Any, *rest: Any) -> None:
        refs = dict(zip((*present, *results), rest, strict=False))
        x_all, w_all, full, empty, turn, *buffers = rest[len(refs) :]
        x_moved, x_ring = views(x_all, interpret=interpret)
        w_moved, w_ring = views(w_all, interpret=interpret or tiles.vocab_axis == 1)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        mine = lax.div(count - program + many - 1, many)
        if redo is not None:
            mine = jnp.where(refs["redo"][0] == 0, 0, mine)

        def each[T](tile: Callable[[Array, Array, Array, T], T], carry: T) -> T:
            """Calls `tile` with the number of steps before it, its row block and its class block."""

            def step(t: Array, carried: tuple[Array, T]) -> tuple[Array, T]:
                before, carry = carried
                place = tiles.place(program + t * many, ring.group)
                if redo is None:
                    return before + steps, tile(before, *place, carry)
                flagged = refs["redo"][1 + place[0]] != 0
                carry = lax.cond(flagged, lambda carry: tile(before, *place, carry), lambda carry: carry, carry)
                return before + jnp.where(flagged, steps, 0), carry

            return lax.fori_loop(0, mine, step, (jnp.int32(0), carry))[1]

        @pl.when(warpgroup == 2)
        def _load() -> None:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            first_row, first_class, _ = numbers(scalar_ref)
            if tiles.vocab_axis and not isinstance(offsets[1], int):
                first_class = pl.multiple_of(first_class, 64)

            def tile(before: Array, row_block: Array, class_block: Array, _: tuple[()]) -> tuple[()]:
                rows = pl.ds(first_row + row_block * BLOCK_N, BLOCK_N)
                classes = pl.ds(first_class + class_block * BLOCK_V, BLOCK_V)

                @pl.loop(0, steps)
                def _step(s: Array) -> None:
                    slot = slot_of(before + s)
                    k = pl.ds(s * ring.step, ring.step)
                    plgpu.barrier_wait(empty.at[slot])
                    plgpu.copy_gmem_to_smem(x_ref.at[rows, k], x_moved.at[slot], full.at[slot])
                    source = w_ref.at[k, classes] if tiles.vocab_axis else w_ref.at[classes, k]
                    plgpu.copy_gmem_to_smem(source, w_moved.at[slot], full.at[slot])

                return ()

            each(tile, ())
            for slot in range(stages):  # a program must not end before all have arrived
                plgpu.barrier_wait(empty.at[slot])

        @pl.when(warpgroup < 2)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            nothing = (
                scalar_ref[0] >> 31
            )  # 0: loops of a length that the compiler knows it unrolls, and spills registers
            for slot in range(stages):
                plgpu.barrier_arrive(empty.at[slot])

            def store(values: Array, row: Array, column: Array, piece: int) -> None:
                moved, buffer = views(buffers[0], interpret=interpret)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
                buffer[warpgroup, piece % 2] = values
                plgpu.commit_smem()
                at = (pl.ds(row, HALF), pl.ds(column + piece * PIECE, PIECE))
                plgpu.copy_smem_to_gmem(moved.at[warpgroup, piece % 2], refs["out"].at[at])

            def multiply(acc: Any, before: Array, done: tuple[Array, ...]) -> Array:
                """Returns the half tile's raw products, (HALF, BLOCK_V) float32; stores what is `done` meanwhile."""

                def step(s: Array | int, *, releases: bool = True, awaits: bool = True) -> None:
                    """Takes a step. What it waits for and releases is that of others, so that between the end of the
                    step before and the start of the next there is nothing to do."""
                    number = before + s
                    slot = slot_of(number)
                    right = w_ring.at[slot]
                    if not tiles.vocab_axis:
                        right = right.transpose((1, 0))
                    plgpu.wgmma(acc, x_ring.at[slot, pl.ds(warpgroup * HALF, HALF)], right)
                    if releases:
                        plgpu.barrier_arrive(empty.at[slot_of(number - 2)])
                    if awaits:
                        plgpu.barrier_wait(full.at[slot_of(number + 1)])
                    plgpu.wgmma_wait(1)  # this product stays in flight; the one before is done with its stage

                def take(begin: int, end: int) -> None:
                    pl.loop(begin, end + nothing)(step)

                plgpu.barrier_wait(full.at[slot_of(before)])
                for s in range(min(steps, 2)):
                    step(s, releases=False, awaits=s + 1 < steps)
                begin, last = 2, max(steps - 1, 2)
                if lag:
                    take(begin, lag)
                    pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(turn))
                    begin = lag
                for piece, values in enumerate(done[2:]):
                    store(values, done[0], done[1], piece)
                    end = begin + (last - begin) // (PIECES + 1 - piece)
                    take(begin, end)
                    begin = end
                take(begin, last)
                if steps > 2:
                    step(steps - 1, awaits=False)
                plgpu.wgmma_wait(0)
                for s in range(max(steps - 2, 0), steps):
                    plgpu.barrier_arrive(empty.at[slot_of(before + s)])
                return acc[...]

            def tile(before: Array, row_block: Array, class_block: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
                if lag:
                    pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(turn))
                accumulator = plgpu.WGMMAAccumulatorRef((HALF, BLOCK_V), jnp.float32)
                raw = pl.run_scoped(lambda acc: multiply(acc, before, done), accumulator)
                pieces = [raw[:, i * PIECE : (i + 1) * PIECE] for i in range(PIECES)]
                row, column = row_block * BLOCK_N + warpgroup * HALF, class_block * BLOCK_V
                left_out = numbers(scalar_ref)[2]

                def finish(first: Array | None) -> list[Array]:
                    half = Half(refs, row, column, class_block, first, tiles.classes)
                    return [values.astype(stored) for values in epilogue(half, pieces)]

                if edges:
                    edge = (column < left_out) | (column + BLOCK_V > tiles.classes)
                    found = lax.cond(edge, lambda: finish(left_out), lambda: finish(None))
                else:
                    found = finish(None)
                return (row, column, *found) if buffers else ()

            done = ()
            if buffers:
                zeros = plgpu.layout_cast(jnp.zeros((HALF, PIECE), stored), plgpu.Layout.WGMMA)
                outside = jnp.int32(tiles.row_blocks * BLOCK_N)  # the first stores are dropped
                done = (outside, jnp.int32(0), *[zeros] * PIECES)
            done = each(tile, done)
            if buffers:
                for piece in range(PIECES):
                    store(done[2 + piece], done[0], done[1], piece)
                plgpu.wait_smem_to_gmem(0)

    if tiles.vocab_axis:
        w_type = plgpu.SMEM((stages, ring.step, BLOCK_V), x.dtype, transforms=transforms(ring.step))
    else:
        w_type = two_views((stages, BLOCK_V, ring.step), x.dtype, interpret=interpret)
    scratch = [
        two_views((stages, BLOCK_N, ring.step), x.dtype, interpret=interpret),
        w_type,
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=1),
    ]
    if stored is not None:
        scratch.append(two_views((2, 2, HALF, PIECE), stored, interpret=interpret))
    kernel = plgpu.kernel(
        body,
        out_type=list(results.values()),
        scratch_types=scratch,
        grid=(many,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
    )
    out = jax.new_ref(present["out"]) if updates else None
    found = kernel(x, w, scalars, *(out if key == "out" else value for key, value in present.items()))
    written = dict(zip(results, found, strict=True))
    return written if out is None else {**written, "out": jax.freeze(out)}
