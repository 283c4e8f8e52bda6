"""Kernels for Hopper (sm_90) whose epilogues take tiles of logits: exponentials, statistics and d_logits.

In Pallas' Mosaic dialect; core_triton/hopper_logits.py is the same in Triton's. A tile is 128 rows x 256 classes, and
each multiprocessor runs one program that takes one tile after the other. In it one warpgroup loads (`_load_tiles`), and
two multiply (`_multiply`), each half of a tile's rows and all of its columns, then turn the float32 sums in their
registers into what the kernel writes: its `epilogue`. The ring of loaded tiles lets the first warpgroup run ahead of
the second, so that while one is in its epilogue the other has the tensor cores to itself.

What belongs to a row leaves a kernel as one number for each block of classes, (class blocks, rows), and XLA joins the
blocks: nothing is added in an order that could change. Equations: parity/MATH.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.hopper import COLUMN, ROW, cdiv, padded, programs, rows_of_64, transforms, views

LOG2_E = 1.4426950408889634

NO_PROBABILITY = -1e4  # a log-probability whose exp is 0 in float32, finite so that 0 times it is 0

HALF = 64  # rows of a warpgroup: the least that wgmma takes

BLOCK_N = 2 * HALF

BLOCK_V = 256  # the most that wgmma takes

PIECE = 64  # classes that an epilogue takes at a time: 128 bytes of 16 bits, the widest swizzle

GROUP = 8  # row blocks that share a block of classes before the next comes: its weights come from L2

BLOCK_D, STAGES = 64, 4  # 196,608 bytes in flight; with the 32,768 of what is stored that fits 232,448

LOAD_REGISTERS, MULTIPLY_REGISTERS = 40, 232  # of a thread: 3 warpgroups have 65,536 between them


def limits(x_dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns a sentence that names what keeps these kernels from serving a call, or None."""
    if jnp.dtype(x_dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the Hopper kernels multiply bfloat16 or float16, not {jnp.dtype(x_dtype).name}"
    if not 0 < hidden < 2**30 or not 0 < vocab < 2**30:  # indices are int32 and run a tile past the end
        return f"the Hopper kernels need sizes from 1 to 2**30 - 1, got a hidden size of {hidden} and {vocab} classes"
    if hidden % 8:  # TMA wants rows that start at multiples of 16 bytes
        return f"the Hopper kernels need a hidden size that is a multiple of 8, got {hidden}"
    if vocab_axis not in (0, 1):
        return f"the Hopper kernels need vocab_axis 0 or 1, got {vocab_axis}"
    if vocab_axis == 1 and vocab % 64:
        return f"with vocab_axis 1 the Hopper kernels need a multiple of 64 classes, got {vocab}"
    return None


@dataclass(frozen=True)
class _Tiles:
    """How the logits of a call are cut."""

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

    @property
    def count(self) -> int:
        return self.row_blocks * self.class_blocks

    @property
    def steps(self) -> int:
        return cdiv(self.hidden, BLOCK_D)

    @property
    def by_block(self) -> jax.ShapeDtypeStruct:
        """What holds a number for each row and block of classes."""
        return jax.ShapeDtypeStruct((self.class_blocks, self.row_blocks * BLOCK_N), jnp.float32)

    def padded_rows(self, values: Array) -> Array:
        return jnp.pad(values, (0, self.row_blocks * BLOCK_N - self.rows))

    def columns(self, values: Array, first_class: Array | int) -> Array:
        """Returns a value for each column of the tiles, of an array indexed as the head is."""
        if isinstance(first_class, int) and not first_class:
            values = values[: self.classes]
        else:
            values = lax.dynamic_slice_in_dim(values, first_class, self.classes)
        return jnp.pad(values.astype(jnp.float32), (0, self.class_blocks * BLOCK_V - self.classes))


@dataclass(frozen=True)
class _Place:
    """Where a warpgroup's half of a tile lies among the rows and classes of a call.

    Args:
        row, column: the first of them; class_block: the tile's.
        masked: whether some columns are no class, or to be left out.
        inside: returns (HALF, PIECE) bool, true where the columns of a piece count.
    """

    row: Array
    column: Array
    class_block: Array
    masked: bool
    inside: Callable[[int], Array]

    def of_rows(self, ref: Any) -> Array:
        """Returns (HALF,) of what there is one of for each row."""
        return plgpu.load(ref.at[pl.ds(self.row, HALF)], layout=ROW, optimized=False)

    def of_columns(self, ref: Any, piece: int) -> Array:
        """Returns (PIECE,) of what there is one of for each column."""
        return plgpu.load(ref.at[pl.ds(self.column + piece * PIECE, PIECE)], layout=COLUMN, optimized=False)

    def put(self, ref: Any, values: Array) -> None:
        """Writes (HALF,) of what there is one of for each row and block of classes."""
        ref[self.class_block, pl.ds(self.row, HALF)] = values


def _rowwise(values: Array) -> Array:
    return lax.broadcast_in_dim(values, (HALF, PIECE), (0,))


def _columnwise(values: Array) -> Array:
    return lax.broadcast_in_dim(values, (HALF, PIECE), (1,))


def _cap(raw: Array, bias: Array | None, logit_scale: float, softcap: float | None) -> tuple[Array, Array | None]:
    """Returns logits of raw products, and their ratio to the cap: MATH.md (1), (2)."""
    if bias is not None:
        raw = raw + _columnwise(bias)
    logits = raw * logit_scale if logit_scale != 1.0 else raw
    if softcap is None:
        return logits, None
    ratio = logits * (1.0 / softcap)
    small = jnp.exp2(-2.0 * LOG2_E * jnp.abs(ratio))
    magnitude = (1.0 - small) * jnp.square(lax.rsqrt(1.0 + small))  # a division takes ten instructions
    ratio = jnp.where(ratio < 0.0, -magnitude, magnitude)
    return softcap * ratio, ratio


def _launch(
    name: str,
    tiles: _Tiles,
    x: Array,
    w: Array,
    offsets: tuple[Array | int, Array | int, Array | int],
    operands: dict[str, Array | None],
    results: dict[str, jax.ShapeDtypeStruct],
    epilogue: Callable[[_Place, list[Array], dict[str, Any], Callable[[int, Array], None]], None],
    *,
    stored: Any = None,
    updates: str | None = None,
    redo: Array | None = None,
    interpret: bool,
) -> dict[str, Array]:
    """Runs a kernel over all tiles, or over those of flagged row blocks.

    Args:
        x, w: (N, D), (V, D) or (D, V).
        offsets: the first row of x, the first class of w, how many classes from there on are left out.
        operands: what the epilogue reads, or writes in place.
        results: what it writes, besides.
        epilogue: takes a place, its raw products by pieces (HALF, PIECE), the operands and results, and a function
            that stores a piece of `out`.
        stored: dtype of the operand or result `out` (rows, padded), which is stored by pieces, or None.
        updates: the operand that is written in place, or None.
        redo: flags of row blocks, as in `exponentials`.
        interpret: whether it runs in Pallas' interpreter, on a CPU.
    """
    skip = offsets[2]
    skips = not (isinstance(skip, int) and skip == 0)
    edges = skips or tiles.classes % BLOCK_V != 0
    present = {key: value for key, value in {**operands, "redo": redo}.items() if value is not None}
    scalars = jnp.stack([jnp.asarray(offset, jnp.int32) for offset in offsets])
    count = min(tiles.count, programs())
    steps = tiles.steps

    def body(x_ref: Any, w_ref: Any, scalar_ref: Any, *rest: Any) -> None:
        named = dict(zip((*present, *results), rest, strict=False))
        x_all, w_all, full, empty, *buffers = rest[len(named) :]
        x_moved, x_ring = views(x_all, interpreted=interpret)
        w_moved, w_ring = views(w_all, interpreted=interpret or tiles.vocab_axis == 1)
        warpgroup = lax.axis_index("warpgroup")
        program = lax.axis_index("program")
        mine = lax.div(tiles.count - program + count - 1, count)
        if redo is not None:
            mine = jnp.where(named["redo"][0] == 0, 0, mine)

        def over_tiles(tile: Callable[[Array, Array, Array], None]) -> None:
            """Calls `tile` with its number in this program's order, row block and class block."""

            @pl.loop(0, mine, init_carry=jnp.int32(0))
            def _step(t: Array, done: Array) -> Array:
                row_block, class_block = plgpu.planar_snake(
                    program + t * count, (tiles.row_blocks, tiles.class_blocks), 0, GROUP
                )
                if redo is None:
                    tile(done, row_block, class_block)
                    return done + 1
                flagged = named["redo"][1 + row_block] != 0
                pl.when(flagged)(lambda: tile(done, row_block, class_block))
                return done + flagged.astype(jnp.int32)

        @pl.when(warpgroup == 2)
        def _load_tiles() -> None:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            first_row, first_column = scalar_ref[0], scalar_ref[1]
            if tiles.vocab_axis:
                first_column = pl.multiple_of(first_column, 64)

            def tile(done: Array, row_block: Array, class_block: Array) -> None:
                row = pl.ds(first_row + row_block * BLOCK_N, BLOCK_N)
                column = pl.ds(first_column + class_block * BLOCK_V, BLOCK_V)

                @pl.loop(0, steps)
                def _step(s: Array) -> None:
                    slot = lax.rem(done * steps + s, STAGES)
                    k = pl.ds(s * BLOCK_D, BLOCK_D)
                    plgpu.barrier_wait(empty.at[slot])
                    plgpu.copy_gmem_to_smem(x_ref.at[row, k], x_moved.at[slot], full.at[slot])
                    at = w_ref.at[k, column] if tiles.vocab_axis else w_ref.at[column, k]
                    plgpu.copy_gmem_to_smem(at, w_moved.at[slot], full.at[slot])

            over_tiles(tile)
            for slot in range(STAGES):  # a barrier must not go while another waits for it, nor be left unseen
                plgpu.barrier_wait(empty.at[slot])

        @pl.when(warpgroup < 2)
        def _multiply_tiles() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            for slot in range(STAGES):
                plgpu.barrier_arrive(empty.at[slot])

            def store(place: _Place, piece: int, values: Array) -> None:
                moved, buffer = (view.at[warpgroup, piece % 2] for view in views(buffers[0], interpreted=interpret))
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read this buffer
                buffer[...] = values.astype(stored)
                plgpu.commit_smem()
                at = (pl.ds(place.row, HALF), pl.ds(place.column + piece * PIECE, PIECE))
                plgpu.copy_smem_to_gmem(moved, named["out"].at[at])

            def tile(done: Array, row_block: Array, class_block: Array) -> None:
                row = row_block * BLOCK_N + warpgroup * HALF
                column = class_block * BLOCK_V

                def multiply(acc: Any) -> Array:
                    def step(s: Array | int, *, releases: bool) -> None:
                        number = done * steps + s
                        slot = lax.rem(number, STAGES)
                        plgpu.barrier_wait(full.at[slot])
                        right = w_ring.at[slot]
                        if not tiles.vocab_axis:
                            right = right.transpose((1, 0))
                        plgpu.wgmma(acc, x_ring.at[slot].at[pl.ds(warpgroup * HALF, HALF)], right)
                        plgpu.wgmma_wait(1)  # this product stays in flight; the one before is done with its stage
                        if releases:
                            plgpu.barrier_arrive(empty.at[lax.rem(number + STAGES - 1, STAGES)])

                    step(0, releases=False)
                    pl.loop(1, steps)(lambda s: step(s, releases=True))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[lax.rem(done * steps + steps - 1, STAGES)])
                    return acc[...]

                acc = pl.run_scoped(multiply, plgpu.ACC((HALF, BLOCK_V), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
                raw = [acc[:, i : i + PIECE] for i in range(0, BLOCK_V, PIECE)]
                left_out = scalar_ref[2] if skips else jnp.int32(0)

                def finish(*, masked: bool) -> None:
                    def inside(piece: int) -> Array:
                        ids = plgpu.broadcasted_iota(jnp.int32, (HALF, PIECE), 1, layout=plgpu.Layout.WGMMA)
                        ids = ids + (column + piece * PIECE)
                        return (ids >= left_out) & (ids < tiles.classes)

                    place = _Place(row, column, class_block, masked, inside)
                    epilogue(place, raw, named, lambda piece, values: store(place, piece, values))

                if not edges:
                    finish(masked=False)
                else:
                    edge = (column < left_out) | (column + BLOCK_V > tiles.classes)
                    pl.when(edge)(lambda: finish(masked=True))
                    pl.when(jnp.logical_not(edge))(lambda: finish(masked=False))

            over_tiles(tile)
            if stored is not None:
                plgpu.wait_smem_to_gmem(0)

    if tiles.vocab_axis:
        w_ring = plgpu.SMEM((STAGES, BLOCK_D, BLOCK_V), x.dtype, transforms=transforms(BLOCK_D))
    else:
        w_ring = rows_of_64((STAGES, BLOCK_V), x.dtype, interpreted=interpret)
    scratch = [
        rows_of_64((STAGES, BLOCK_N), x.dtype, interpreted=interpret),
        w_ring,
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    ]
    if stored is not None:
        scratch.append(rows_of_64((2, 2, HALF), stored, interpreted=interpret))
    if updates is not None:
        present[updates] = jax.new_ref(present[updates])  # pyright: ignore[reportArgumentType]
    found = plgpu.kernel(
        body,
        out_type=list(results.values()),
        scratch_types=scratch,
        grid=(count,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
    )(x, w, scalars, *present.values())
    out = dict(zip(results, found, strict=True))
    if updates is not None:
        out[updates] = jax.freeze(present[updates])  # pyright: ignore[reportArgumentType]
    return out


def exponentials(
    x: Array,
    w: Array,
    bias: Array | None,
    anchor: Array,
    start: Array | int,
    *,
    rows: int,
    classes: int,
    vocab_axis: int,
    logit_scale: float,
    softcap: float | None,
    stores: bool,
    largest: bool,
    redo: Array | None = None,
    e: Array | None = None,
    interpret: bool = False,
) -> tuple[Array | None, Array, Array | None]:
    """Returns anchored exponentials of rows' logits, their sums and the rows' largest logits: (29), (31).

    Args:
        x: (N, D), of which rows `start` to `start` + `rows` count.
        w: (V, D), or (D, V) where `vocab_axis` is 1; its first `classes` are classes.
        bias: at least (classes,), or None.
        anchor: (rows,) float32 integers.
        start: a number of rows, or such a scalar on the device.
        rows, classes, vocab_axis, logit_scale, softcap: as known when the call is traced.
        stores: whether the exponentials are wanted.
        largest: whether the largest logits are.
        redo: (1 + rows / 128 rounded up,) int32. If its first is 0 nothing is done, else what belongs to the blocks of
            128 rows whose flags, which follow, are not 0.
        e: with `redo` and `stores`, the exponentials, brought up to date in place.
        interpret: whether the kernel runs in Pallas' interpreter, on a CPU.

    Returns:
        e (rows, padded) bfloat16, times the cap's slope, 0 past the last class, or None.
        sums (rows,) float32 of the exponentials before they are rounded; with `redo`, of the flagged rows only.
        tops (rows,) float32, likewise, or None.
    """
    tiles = _Tiles(rows, x.shape[1], classes, vocab_axis)
    operands = {"bias": None if bias is None else tiles.columns(bias, 0), "anchor": tiles.padded_rows(anchor)}
    results = {"sums": tiles.by_block}
    if largest:
        results["tops"] = tiles.by_block
    updates = stores and redo is not None
    if updates:
        operands["out"] = e
    elif stores:
        results["out"] = jax.ShapeDtypeStruct((rows, padded(classes)), jnp.bfloat16)

    def epilogue(place: _Place, raw: list[Array], refs: dict[str, Any], store: Callable[[int, Array], None]) -> None:
        anchors = place.of_rows(refs["anchor"])
        total = top = None
        for piece, part in enumerate(raw):
            biases = place.of_columns(refs["bias"], piece) if bias is not None else None
            logits, ratio = _cap(part, biases, logit_scale, softcap)
            if place.masked:
                inside = place.inside(piece)
                logits = jnp.where(inside, logits, -jnp.inf)
            values = jnp.exp2(logits * LOG2_E - _rowwise(anchors))
            summed = values.sum(1)
            total = summed if total is None else total + summed
            if largest:
                highest = logits.max(1)
                top = highest if top is None else jnp.maximum(top, highest)
            if stores:
                if ratio is not None:
                    values = values * (1.0 - jnp.square(ratio))
                    if place.masked:
                        values = jnp.where(inside, values, 0.0)
                store(piece, values)
        place.put(refs["sums"], total)  # pyright: ignore[reportArgumentType]
        if largest:
            place.put(refs["tops"], top)  # pyright: ignore[reportArgumentType]

    stored = jnp.bfloat16 if stores else None
    name = "exponentials" if redo is None else "exponentials_again"
    out = _launch(
        name, tiles, x, w, (start, 0, 0), operands, results, epilogue,
        stored=stored, updates="out" if updates else None, redo=redo, interpret=interpret,
    )  # fmt: skip
    sums = out["sums"].sum(0)[:rows]
    return out.get("out"), sums, out["tops"].max(0)[:rows] if largest else None
