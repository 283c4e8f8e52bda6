"""What the Mosaic kernels for Hopper share: layouts of shared memory and registers, the size of the card, and
`over_tiles`, which computes tiles of logits for the epilogues of `hopper_logits.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
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


# Mosaic works out layouts for itself otherwise: the same machine code, lowered in more than twice the time.
COMPILER = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)

HALF = 64  # rows of a warpgroup: the least that wgmma takes

BLOCK_N = 2 * HALF  # rows of a tile of logits

# And its classes. A thread holds 96 sums of them, as many of the tile before, and what it computes with: for 256, the
# most that wgmma takes, there would be no room.
BLOCK_V = 192

# Classes that an epilogue takes at a time: more, and the tensor cores run out of work meanwhile.
PIECE = 32

PIECES = BLOCK_V // PIECE

# Registers of a thread, of 65,536 for all three warpgroups.
LOAD_REGISTERS, MULTIPLY_REGISTERS = 24, 240

# Units of the hidden size that are multiplied at a time, and how many such steps are loaded ahead: 163,840 bytes. A
# stage's number is a mask, so a power of two.
STEP, STAGES = 64, 4

GROUP_BYTES = 2**24  # of rows that share a block of classes before the next comes: both come from L2 then


def slot_of(number: Any) -> Any:
    return number & (STAGES - 1)


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

    def place(self, tile: Array) -> tuple[Array, Array]:
        """Returns the row and class block of a tile: row blocks of up to `GROUP_BYTES` share a class block.

        Divisors are known to the compiler, which then multiplies: a division takes a hundred instructions.
        """
        most = max(1, GROUP_BYTES // (2 * BLOCK_N * self.hidden))
        size = cdiv(self.row_blocks, cdiv(self.row_blocks, most))
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

    @property
    def by_place(self) -> jax.ShapeDtypeStruct:
        """What holds a number for each row and place of its half row block."""
        return jax.ShapeDtypeStruct((HALF, self.row_blocks * BLOCK_N), jnp.float32)

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
        by_row: operands that have a value for each row, (HALF,).
        row: its first row, as the call counts them; class_block: the tile's.
        first, last: the columns that count, of the call; None: all do, and `place` is None.
        place: of `places`, where what the rows' targets have goes; below 0: none of them is here. None: not asked for.
    """

    refs: dict[str, Any]
    by_row: dict[str, Array]
    row: Array
    class_block: Array
    first: Array | None
    last: int
    place: Array | None = None

    @property
    def column(self) -> Array:
        return self.class_block * BLOCK_V

    def of_rows(self, name: str) -> Array:
        """Returns (HALF, PIECE), what there is one of for each row."""
        return lax.broadcast_in_dim(self.by_row[name], (HALF, PIECE), (0,))

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

    def put_last(self, piece: int, values: dict[str, Array]) -> None:
        """Writes, with the last piece, (HALF,) of what there is one of for each row and block of classes."""
        if piece == PIECES - 1:
            for name, value in values.items():
                self.refs[name][self.class_block, pl.ds(self.row, HALF)] = value


def pauses(steps: int) -> Array:
    """Returns (2 * PIECES,) int32: after which steps of a tile each warpgroup turns to the pieces of the one before.

    Evenly among the steps, those of one warpgroup between those of the other. Kernels read them from memory: loops
    whose lengths the compiler knows it unrolls, and spills registers.
    """
    parts = 2 * PIECES + 1
    return jnp.array([1 + (steps - 1) * (2 * i + j) // parts for j in (1, 2) for i in range(PIECES)], jnp.int32)


def over_steps(
    steps: int, pauses: list[Any], step: Callable[[Any], None], piece: Callable[[int], None], *, begin: int = 1
) -> None:
    """Takes the steps of a tile from `begin` on, and deals with a piece of the one before at each of the pauses."""
    at: Any = begin
    for i, pause in enumerate(pauses):
        pl.loop(at, pause)(step)
        piece(i)
        at = pause
    pl.loop(at, steps)(step)


class Done(NamedTuple):
    """A half tile that was multiplied: the tile's number, rows that its stores go too far, so that there are none, and
    its products, PIECES of (HALF, PIECE) float32."""

    tile: Array
    shift: Array
    raw: tuple[Array, ...]


# (half tile, piece, raw products of the piece (HALF, PIECE), what the piece before returned) -> that, piece of `out`
Epilogue = Callable[[Half, int, Array, Any], tuple[Any, Array | None]]


def over_tiles(
    name: str,
    tiles: Tiles,
    x: Array,
    w: Array,
    offsets: tuple[Array | int, Array | int, Array | int],
    by_row: dict[str, Array | None],
    operands: dict[str, Array | None],
    results: dict[str, jax.ShapeDtypeStruct],
    epilogue: Epilogue,
    *,
    stored: Any = None,
    updates: bool = False,
    redo: Array | None = None,
    interpret: bool,
) -> dict[str, Array]:
    """Runs an epilogue on every tile of x @ w, or on those of flagged row blocks.

    Each multiprocessor runs one program, which takes one tile after the other. In it one warpgroup loads, and two
    multiply, each half of a tile's rows and all of its columns. The float32 sums then wait in registers, and `epilogue`
    takes them a piece at a time, under the products of the next tile: the two warpgroups end their tiles at the same
    time, and the tensor cores would stand idle for as long as an epilogue takes.

    Args:
        x, w: (N, D), (V, D) or (D, V).
        offsets: the first row of x, the first class of w, how many classes from there on are left out.
        by_row: what the epilogue reads of rows: `Tiles.by_row`; None where there is none.
        operands: what else it reads. With `places` (half row blocks, class blocks) int32, halves of tiles where these
            are not below 0 take the path of those of which not all columns count: `Half.place`.
        results: what it writes.
        epilogue: returns a piece of `out` (rows, padded) or None, and after the last piece has written what there is
            one of for each row. It is called for each program's first tile once more, before, with zeros, to no effect.
        stored: dtype of `out`, an operand or a result, or None: nothing is stored.
        updates: the operand `out` is written in place.
        redo: (1 + row blocks,) int32. If the first is 0 nothing is done, else the row blocks whose flags are not 0.
        interpret: whether it runs in Pallas' interpreter, on a CPU.
    """
    steps = cdiv(tiles.hidden, STEP)
    traced = [jnp.asarray(number, jnp.int32) for number in offsets if not isinstance(number, int)]
    scalars = jnp.concatenate([pauses(steps), *(number[None] for number in traced)])
    present = {key: value for key, value in {**by_row, **operands, "redo": redo}.items() if value is not None}
    count = tiles.row_blocks * tiles.class_blocks
    many = min(count, programs())

    def numbers(scalar_ref: Any) -> list[Any]:
        """Returns the offsets: what was known when the call was traced costs no launch that would write it."""
        places = iter(range(2 * PIECES, 2 * PIECES + len(traced)))
        return [jnp.int32(known) if isinstance(known, int) else scalar_ref[next(places)] for known in offsets]

    def body(x_ref: Any, w_ref: Any, scalar_ref: Any, *rest: Any) -> None:
        refs = dict(zip((*present, *results), rest, strict=False))
        x_all, w_all, full, empty, *buffers = rest[len(refs) :]
        x_moved, x_ring = views(x_all, interpret=interpret)
        w_moved, w_ring = views(w_all, interpret=interpret or tiles.vocab_axis == 1)
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        mine = lax.div(count - program + many - 1, many)
        if redo is not None:
            mine = jnp.where(refs["redo"][0] == 0, 0, mine)

        def each[T](tile: Callable[[Array, Array, T], T], carry: T) -> T:
            """Calls `tile` with the number of steps before it and its own number."""

            def step(t: Array, carried: tuple[Array, T]) -> tuple[Array, T]:
                before, carry = carried
                number = program + t * many
                if redo is None:
                    return before + steps, tile(before, number, carry)
                flagged = refs["redo"][1 + tiles.place(number)[0]] != 0
                carry = lax.cond(flagged, lambda carry: tile(before, number, carry), lambda carry: carry, carry)
                return before + jnp.where(flagged, steps, 0), carry

            return lax.fori_loop(0, mine, step, (jnp.int32(0), carry))[1]

        @pl.when(warpgroup == 2)
        def _load() -> None:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            first_row, first_class, _ = numbers(scalar_ref)
            if tiles.vocab_axis and not isinstance(offsets[1], int):
                first_class = pl.multiple_of(first_class, 64)

            def tile(before: Array, number: Array, _: tuple[()]) -> tuple[()]:
                row_block, class_block = tiles.place(number)
                rows = pl.ds(first_row + row_block * BLOCK_N, BLOCK_N)
                classes = pl.ds(first_class + class_block * BLOCK_V, BLOCK_V)

                @pl.loop(0, steps)
                def _step(s: Array) -> None:
                    slot = slot_of(before + s)
                    k = pl.ds(s * STEP, STEP)
                    plgpu.barrier_wait(empty.at[slot])
                    source = w_ref.at[k, classes] if tiles.vocab_axis else w_ref.at[classes, k]
                    plgpu.copy_gmem_to_smem(x_ref.at[rows, k], x_moved.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(source, w_moved.at[slot], full.at[slot])

                return ()

            each(tile, ())
            for slot in range(STAGES):  # a program must not end before all have arrived
                plgpu.barrier_wait(empty.at[slot])

        @pl.when(warpgroup < 2)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            own_pauses = [scalar_ref[warpgroup * PIECES + i] for i in range(PIECES)]
            for slot in range(STAGES):
                plgpu.barrier_arrive(empty.at[slot])

            def store(values: Array, row: Array, column: Array, piece: int) -> None:
                moved, buffer = views(buffers[0], interpret=interpret)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
                buffer[warpgroup, piece % 2] = values
                plgpu.commit_smem()
                at = (pl.ds(row, HALF), pl.ds(column, PIECE))
                plgpu.copy_smem_to_gmem(moved.at[warpgroup, piece % 2], refs["out"].at[at])

            def finishing(done: Done) -> Callable[[int], None]:
                """Returns what runs the epilogue of a piece of a tile that was multiplied."""
                row_block, class_block = tiles.place(done.tile)
                row = row_block * BLOCK_N + warpgroup * HALF
                rows = {
                    key: plgpu.load(refs[key].at[pl.ds(row, HALF)], layout=ROW, optimized=False)
                    for key, values in by_row.items()
                    if values is not None
                }
                whole = Half(refs, rows, row, class_block, None, tiles.classes)
                left_out = numbers(scalar_ref)[2]
                masked = replace(whole, first=left_out)
                cut = (whole.column < left_out) | (whole.column + BLOCK_V > tiles.classes)
                if "places" in refs:
                    place = refs["places"][2 * row_block + warpgroup, class_block]
                    masked, cut = replace(masked, place=place), cut | (place >= 0)
                carried = None

                def finish(piece: int) -> None:
                    nonlocal carried

                    def of(half: Half) -> Any:
                        found, values = epilogue(half, piece, done.raw[piece], carried)
                        return found, None if values is None else values.astype(stored)

                    # Where no tile is cut too: without the branch ptxas waits for every product, C7514.
                    carried, values = lax.cond(cut, lambda: of(masked), lambda: of(whole))
                    if values is not None:
                        store(values, row + done.shift, whole.column + piece * PIECE, piece)

                return finish

            def multiply(acc: Any, before: Array, done: Done) -> tuple[Array, ...]:
                """Returns the half tile's raw products, PIECES of (HALF, PIECE) float32; finishes what is `done`."""

                def step(s: Array | int, *, releases: bool = True) -> None:
                    slot = slot_of(before + s)
                    plgpu.barrier_wait(full.at[slot])
                    right = w_ring.at[slot]
                    if not tiles.vocab_axis:
                        right = right.transpose((1, 0))
                    plgpu.wgmma(acc, x_ring.at[slot, pl.ds(warpgroup * HALF, HALF)], right)
                    plgpu.wgmma_wait(1)  # this product stays in flight; the one before is done with its stage
                    if releases:
                        plgpu.barrier_arrive(empty.at[slot_of(before + s - 1)])

                step(0, releases=False)
                over_steps(steps, own_pauses, step, finishing(done))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[slot_of(before + steps - 1)])
                raw = acc[...]
                return tuple(raw[:, i : i + PIECE] for i in range(0, BLOCK_V, PIECE))

            def tile(before: Array, number: Array, done: Done) -> Done:
                accumulator = plgpu.WGMMAAccumulatorRef((HALF, BLOCK_V), jnp.float32)
                raw = pl.run_scoped(lambda acc: multiply(acc, before, done), accumulator)
                return Done(number, jnp.int32(0), raw)

            zeros = plgpu.layout_cast(jnp.zeros((HALF, PIECE), jnp.float32), plgpu.Layout.WGMMA)
            nowhere = jnp.int32(tiles.row_blocks * BLOCK_N)
            none = Done(program, nowhere, (zeros,) * PIECES)
            finish = finishing(each(tile, none))
            for piece in range(PIECES):
                finish(piece)
            if buffers:
                plgpu.wait_smem_to_gmem(0)

    if tiles.vocab_axis:
        w_type = plgpu.SMEM((STAGES, STEP, BLOCK_V), x.dtype, transforms=transforms(STEP))
    else:
        w_type = two_views((STAGES, BLOCK_V, STEP), x.dtype, interpret=interpret)
    scratch = [
        two_views((STAGES, BLOCK_N, STEP), x.dtype, interpret=interpret),
        w_type,
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
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
        compiler_params=replace(COMPILER, approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
    )
    out = jax.new_ref(present["out"]) if updates else None
    found = kernel(x, w, scalars, *(out if key == "out" else value for key, value in present.items()))
    written = dict(zip(results, found, strict=True))
    return written if out is None else {**written, "out": jax.freeze(out)}
