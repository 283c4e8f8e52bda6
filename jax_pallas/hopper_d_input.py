"""d_input of plan A with anchored exponentials for Hopper (sm_90), in Pallas' Mosaic dialect.

d_input = rho (E W) + theta w_target        (n, D), summed over classes
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.hopper import COLUMN, HALF, STAGES, STEP, cdiv, padded, programs, slot_of, two_views, views
from jax_pallas.hopper_gradients import D_BLOCK, as_roles, barriers, in_order, run_kernel


@dataclass(frozen=True)
class Shares:
    """How a card's programs share d_input's few tiles, whose sums run over all classes: `share_of`.

    Args:
        tile_rows: rows of a tile, of 128 columns of D.
        rounds: whole tiles that each program takes first.
        rest: tiles left, which are cut along the classes.
        cuts: programs that take an equal part of each of them.
        head: steps that those parts cover.
        steps: of a whole tile.
        spare: programs that divide the steps after the head of all cut tiles.
    """

    tile_rows: int
    rounds: int
    rest: int
    cuts: int
    head: int
    steps: int
    spare: int

    @property
    def slots(self) -> int:
        """Partial tiles that wait in memory for their sum: none where no tile is cut."""
        if self.cuts * self.rest == self.rest and self.head == self.steps:
            return 0
        return self.cuts * self.rest + (self.spare + self.rest if self.spare else 0)

    @property
    def bytes(self) -> int:
        return 4 * self.slots * D_BLOCK * self.tile_rows

    @property
    def cost(self) -> float:
        """An estimate of the time, in steps of one row of a tile, that orders what was measured on an H200.

        A step costs 16 rows more than its own: narrow tiles read more for each product. Tails are read out of step
        with the heads; and partial tiles are written and read.
        """
        tail = self.steps - self.head
        part = max(cdiv(self.head, max(self.cuts, 1)), cdiv(tail * self.rest, max(self.spare, 1)))
        longest = (self.tile_rows + 16) * (self.rounds * self.steps + (part if self.rest else 0))
        return longest * (1 + 0.1 * tail / self.steps) + self.bytes / 6000


LEAST_SPARE = 16  # fewer idle programs cost less than the many short parts that they would take

TILE_ROWS = range(256, 120, -8)


def cut(rows: int, hidden: int, classes: int, tile_rows: int, cuts_tiles: bool, many: int) -> Shares:
    """Returns how `many` programs share tiles of so many rows; without `cuts_tiles` in whole ones."""
    steps = cdiv(classes, STEP)
    rounds, rest = divmod(cdiv(rows, tile_rows) * cdiv(hidden, D_BLOCK), many)
    if not (rest and cuts_tiles):
        return Shares(tile_rows, rounds, rest, int(rest > 0), steps, steps, 0)
    cuts = min(many // rest, steps)
    spare, head = many - cuts * rest, steps
    if spare >= LEAST_SPARE:
        head = max(cuts, round(steps * cuts * rest / many))
    return Shares(tile_rows, rounds, rest, cuts, head, steps, min(spare, (steps - head) * rest))


def choose_shares(rows: int, hidden: int, classes: int, most: int | None, many: int) -> Shares:
    """Returns how `many` programs share the tiles of d_input, in at most `most` bytes of partial tiles."""
    choices = [cut(rows, hidden, classes, *choice, many) for choice in itertools.product(TILE_ROWS, (False, True))]
    return min((shares for shares in choices if most is None or shares.bytes <= most), key=lambda shares: shares.cost)


def d_input_scratch(rows: int, hidden: int, classes: int, most: int | None, many: int) -> int:
    """Returns the bytes that `d_input` takes beside its arguments, by `many` programs; `most` is its argument of that
    name."""
    return choose_shares(rows, hidden, classes, most, many).bytes


def tails(turn: Any, shares: Shares) -> Any:
    """Returns where the part of a spare program begins, in the tails of all cut tiles laid end to end."""
    return lax.div((shares.steps - shares.head) * shares.rest * turn, max(shares.spare, 1))


def share_of(item: Any, shares: Shares) -> tuple[Any, Any, Any, Any]:
    """Returns tile, first step, number of steps, and slot of a program's item of work; slot -1: the whole tile.

    Programs first take whole tiles in `rounds` full rounds. The `rest` tiles are cut along the classes: the first
    `head` steps into `cuts` equal parts, so that programs march through the classes together and share what they read;
    the last steps of all of them, end to end, are divided among the `spare` programs. Tiles are numbered with the
    blocks of D first: those that run together share few rows of e, which they then read from memory once, however many
    rows there are.
    """
    program, many = lax.axis_index("program"), programs()
    rest, cuts, head, tail = shares.rest, shares.cuts, shares.head, shares.steps - shares.head
    found = program + item * many, jnp.int32(0), jnp.int32(shares.steps), jnp.int32(-1)
    if rest:
        part = lax.div(program, rest)
        first, last = lax.div(head * part, cuts), lax.div(head * (part + 1), cuts)
        slot = jnp.where(last - first == shares.steps, -1, program)
        own = shares.rounds * many + lax.rem(program, rest), first, last, slot
        if shares.spare:
            turn = program - cuts * rest
            begin, end = tails(turn, shares), tails(turn + 1, shares)
            index = lax.div(begin, tail) + item - shares.rounds
            first, last = (head + jnp.clip(edge - index * tail, 0, tail) for edge in (begin, end))
            other = shares.rounds * many + index, first, last, cuts * rest + turn + index
            own = (jnp.where(program < cuts * rest, a, b) for a, b in zip(own, other, strict=True))
        found = (jnp.where(item < shares.rounds, a, b) for a, b in zip(found, own, strict=True))
    tile, first, last, slot = found
    return tile, first, last - first, slot


def items_of(shares: Shares) -> Any:
    """Returns the number of a program's items of work."""
    turn = lax.axis_index("program") - shares.cuts * shares.rest
    found = jnp.where(turn < 0, 1, 0)
    if shares.spare:
        tail = shares.steps - shares.head
        parts = lax.div(tails(turn + 1, shares) - 1, tail) - lax.div(tails(turn, shares), tail) + 1
        found = jnp.where((turn >= 0) & (turn < shares.spare), parts, found)
    return shares.rounds + found


def finish(
    sums: Array, row: Any, d: Any, start: Any, rho_ref: Any, theta_ref: Any, held_ref: Any, buffers: Any, came: Any,
    *, interpret: bool,
) -> None:  # fmt: skip
    """Writes rho * sums + theta * held, of (64, rows) sums of columns of D and rows of the chunk from d and row on."""
    warpgroup, rows = lax.axis_index("warpgroup"), sums.shape[1]
    moved, buffer = (view.at[warpgroup] for view in views(buffers, interpret=interpret))
    place = held_ref.at[pl.ds(start + row, rows), pl.ds(d, HALF)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.copy_gmem_to_smem(place, moved, came.at[warpgroup])
    plgpu.barrier_wait(came.at[warpgroup])
    buffer = buffer.transpose((1, 0))
    total = jnp.zeros_like(sums)
    for ref, term in (rho_ref, sums), (theta_ref, plgpu.load(buffer, layout=plgpu.Layout.WGMMA)):
        factor = plgpu.load(ref.at[pl.ds(row, rows)], layout=COLUMN, optimized=False)
        factor = lax.broadcast_in_dim(factor, sums.shape, (1,))
        total += jnp.where(factor == 0, 0.0, factor * term.astype(jnp.float32))
    plgpu.commit_smem()  # all have read it
    buffer[...] = total.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(moved, place)


@partial(jax.jit, static_argnames=("classes", "vocab_axis", "most", "interpret", "shares"))
def d_input(
    e: Array,
    w: Array,
    held: Array,
    rho: Array,
    theta: Array,
    start: int | Array,
    *,
    classes: int,
    vocab_axis: int,
    most: int | None = None,
    interpret: bool = False,
    shares: Shares | None = None,
) -> Array:
    """Returns `held` with rows start : start + n become rho * (e @ w) + theta * held, in place and rounded once: (32).

    A program sums a whole tile, or its share of one, float32, into a slot in memory: `share_of`. The shares of a tile
    are then added in order.

    Args:
        e: (n or more, padded(classes)) bfloat16, zeros past the classes.
        w: (V, D) bfloat16 for vocab_axis 0, (D, V) for 1. Classes past K may hold anything.
        held: (N, D) bfloat16; rows start : start + n of it hold the targets' rows of w.
        rho, theta: (n,) float32. Where one is 0 its term is left out, whatever it would be a multiple of.
        start: () int32.
        classes: K.
        vocab_axis: of w.
        most: bytes that partial tiles may take: `d_input_scratch`.
        interpret: whether the kernels run in Pallas' interpreter, on a CPU.
        shares: how to cut, if not as `choose_shares` says.
    """
    (_, columns), n, hidden = e.shape, len(rho), held.shape[1]
    if columns != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {columns}")
    shares = shares or choose_shares(n, hidden, classes, most, programs())
    tile_rows, steps, d_blocks, many = shares.tile_rows, shares.steps, cdiv(hidden, D_BLOCK), programs()
    piece = math.gcd(tile_rows, HALF)  # rows that are stored at a time
    # Rows of the last tile that are not the chunk's stay as they are: 0 * sum + 1 * held.
    after = cdiv(n, tile_rows) * tile_rows - n
    factors = jnp.pad(rho, (0, after)), jnp.pad(theta, (0, after), constant_values=1.0)
    # The last step's classes, where w goes on after them.
    kept = classes % STEP if classes < w.shape[vocab_axis] else 0

    def place(tile: Any) -> tuple[Any, Any]:
        return lax.div(tile, d_blocks) * tile_rows, lax.rem(tile, d_blocks) * D_BLOCK

    def body(start_ref: Any, e_ref: Any, w_ref: Any, rho_ref: Any, theta_ref: Any, held_ref: Any, *rest: Any) -> None:
        *part_ref, w_all, e_all, full, empty, buffers, came = rest
        (w_moved, w_ring), (e_moved, e_ring) = (views(ref, interpret=interpret) for ref in (w_all, e_all))
        warpgroup, start = lax.axis_index("warpgroup"), start_ref[0]

        def load() -> None:
            def one_item(item: Any, count: Any) -> Any:
                tile, first, length, _ = share_of(item, shares)
                row, d = place(tile)

                @pl.loop(0, length)
                def _step(step: Any) -> None:
                    slot, taken = slot_of(count + step), pl.ds((first + step) * STEP, STEP)
                    plgpu.barrier_wait(empty.at[slot])
                    for i in range(2):
                        source = w_ref.at[in_order(taken, pl.ds(d + i * HALF, HALF), vocab_axis)]
                        plgpu.copy_gmem_to_smem(source, w_moved.at[slot, i], full.at[slot])
                    plgpu.copy_gmem_to_smem(e_ref.at[pl.ds(row, tile_rows), taken], e_moved.at[slot], full.at[slot])

                return count + length

            lax.fori_loop(0, items_of(shares), one_item, jnp.int32(0))

        def multiply() -> None:
            def one_item(item: Any, count: Any) -> Any:
                tile, first, length, slot_of_part = share_of(item, shares)
                row, d = place(tile)

                def products(acc: Any) -> Array:
                    def one(step: Any, frees: bool) -> None:
                        slot = slot_of(count + step)
                        plgpu.barrier_wait(full.at[slot])
                        own = w_ring.at[slot, warpgroup]
                        own = own.transpose((1, 0)) if vocab_axis == 0 else own
                        if kept:

                            @pl.when(first + step == steps - 1)
                            def _clear() -> None:
                                layout = plgpu.Layout.WGMMA
                                value = plgpu.load(own, layout=layout)
                                index = plgpu.broadcasted_iota(jnp.int32, (HALF, STEP), 1, layout=layout)
                                own[...] = jnp.where(index < kept, value, jnp.zeros_like(value))
                                plgpu.commit_smem()

                        plgpu.wgmma(acc, own, e_ring.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(1)
                        if frees:
                            plgpu.barrier_arrive(empty.at[slot_of(count + step - 1)])

                    one(0, False)
                    pl.loop(1, length)(lambda step: one(step, True))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot_of(count + length - 1)])
                    return acc[...]

                acc = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((HALF, tile_rows), jnp.float32))

                @pl.when(slot_of_part < 0)
                def _whole() -> None:
                    for i in range(0, tile_rows, piece):
                        refs = rho_ref, theta_ref, held_ref, buffers, came
                        sums, column = acc[:, i : i + piece], d + warpgroup * HALF
                        finish(sums, row + i, column, start, *refs, interpret=interpret)

                if part_ref:

                    @pl.when(slot_of_part >= 0)
                    def _part() -> None:
                        part_ref[0][slot_of_part, pl.ds(warpgroup * HALF, HALF), :] = acc

                return count + length

            lax.fori_loop(0, items_of(shares), one_item, jnp.int32(0))

        as_roles(empty, load, multiply)

    def sum_body(start_ref: Any, part_ref: Any, *finishing: Any) -> None:
        """Adds the shares of a piece of a cut tile, in order, and finishes it."""
        warpgroup, index, i = lax.axis_index("warpgroup"), lax.axis_index("program"), lax.axis_index("piece")
        row, d = place(shares.rounds * many + index)

        def part(slot: Any) -> Array:
            where = slot, pl.ds(warpgroup * HALF, HALF), pl.ds(i * piece, piece)
            return plgpu.load(part_ref.at[where], layout=plgpu.Layout.WGMMA, optimized=False)

        total = part(index)
        for k in range(1, shares.cuts):
            total += part(k * shares.rest + index)
        if shares.spare:
            # Spare programs divide the tails evenly: those at this tile's place have a part of it, give or take one.
            tail, at = shares.steps - shares.head, shares.spare * index
            low = jnp.maximum(lax.div(at, shares.rest) - 1, 0)
            high = jnp.minimum(lax.div(at + shares.spare, shares.rest) + 2, shares.spare)

            def add(turn: Any, total: Array) -> Array:
                has = (tails(turn, shares) < (index + 1) * tail) & (tails(turn + 1, shares) > index * tail)
                value = part(jnp.minimum(shares.cuts * shares.rest + turn + index, shares.slots - 1))
                return jnp.where(jnp.full(total.shape, has), total + value, total)

            total = lax.fori_loop(low, high, add, total)
        finish(total, row + i * piece, d + warpgroup * HALF, start_ref[0], *finishing, interpret=interpret)
        plgpu.wait_smem_to_gmem(0)

    ref, start = jax.new_ref(held), jnp.asarray(start, jnp.int32)[None]
    finishing = [two_views((2, piece, 64), e.dtype, interpret=interpret), plgpu.Barrier(num_arrivals=1, num_barriers=2)]
    rings = [two_views((STAGES, *shape, 64), e.dtype, interpret=interpret) for shape in ((2, STEP), (tile_rows,))]
    scratch = [*rings, *barriers(3), *finishing]
    results = [jax.ShapeDtypeStruct((shares.slots, D_BLOCK, tile_rows), jnp.float32)] if shares.slots else []
    parts = run_kernel(body, "d_input", (start, e, w, *factors, ref), results, scratch, (many,), interpret)
    if parts:
        operands, grid = (start, *parts, *factors, ref), (shares.rest, tile_rows // piece)
        run_kernel(sum_body, "d_input_sum", operands, [], finishing, grid, interpret, threads=2)
    return jax.freeze(ref)
