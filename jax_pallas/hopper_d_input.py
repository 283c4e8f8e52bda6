"""d_input of plan A with anchored exponentials for Hopper (sm_90), in Pallas' Mosaic GPU dialect.

d_input = rho (E W) + theta w_target        (n, D), summed over classes
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jax_pallas.hopper import COLUMN, cdiv, padded, programs
from jax_pallas.hopper_gradients import (
    D_BLOCK,
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    SQUARE,
    STAGES,
    STEP,
    Ref,
    drain,
    scalar,
    squares,
    union,
    views,
)


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
    def longest(self) -> int:
        """Steps of the program that has most, for each column of a tile."""
        part = max(cdiv(self.head, max(self.cuts, 1)), cdiv((self.steps - self.head) * self.rest, max(self.spare, 1)))
        return (self.tile_rows + 16) * (self.rounds * self.steps + (part if self.rest else 0))


LEAST_SPARE = 16  # fewer idle programs cost less than the many short parts that they would take

TILE_ROWS = tuple(range(256, 120, -8))  # narrower tiles are slower for each product than their padding costs


def cut(rows: int, hidden: int, classes: int, tile_rows: int, cuts_tiles: bool) -> Shares:
    """Returns how the card's programs share tiles of so many rows; without `cuts_tiles` in whole ones."""
    steps, many = cdiv(classes, STEP), programs()
    rounds, rest = divmod(cdiv(rows, tile_rows) * cdiv(hidden, D_BLOCK), many)
    if not (rest and cuts_tiles):
        return Shares(tile_rows, rounds, rest, int(rest > 0), steps, steps, 0)
    cuts = min(many // rest, steps)
    spare, head = many - cuts * rest, steps
    if spare >= LEAST_SPARE:
        head = max(cuts, round(steps * cuts * rest / many))
    spare = min(spare, (steps - head) * rest)
    return Shares(tile_rows, rounds, rest, cuts, head, steps, spare)


def choose_shares(rows: int, hidden: int, classes: int, most: int | None = None) -> Shares:
    """Returns how the card's programs share the tiles of d_input, in at most `most` bytes of partial tiles."""
    choices = [cut(rows, hidden, classes, *choice) for choice in itertools.product(TILE_ROWS, (False, True))]
    fitting = [shares for shares in choices if most is None or shares.bytes <= most]
    return min(fitting, key=lambda shares: shares.longest)  # the first, and wider, of equals


def d_input_scratch(rows: int, hidden: int, classes: int, most: int | None = None) -> int:
    """Returns the bytes that `d_input` takes beside its arguments; `most`: as its argument of that name."""
    return choose_shares(rows, hidden, classes, most).bytes


def share_of(item: Any, shares: Shares) -> tuple[Any, Any, Any, Any]:
    """Returns tile, first and last step, and slot of a program's item of work; slot -1: the whole tile.

    Programs first take whole tiles in `rounds` full rounds. The `rest` tiles are cut along the classes: the first
    `head` steps into `cuts` equal parts, so that programs march through the classes together and share what they read;
    the last steps of all of them, end to end, are divided among the `spare` programs. Tiles are numbered with the
    blocks of D first: those that run together share few rows of e, which they then read from memory once, however many
    rows there are.
    """
    program, many = lax.axis_index("program"), programs()
    rounds, rest, cuts, head, steps = shares.rounds, shares.rest, shares.cuts, shares.head, shares.steps
    tail = steps - head
    found = program + item * many, jnp.int32(0), jnp.int32(steps), jnp.int32(-1)
    if rest:
        part = lax.div(program, rest)
        first, last = lax.div(head * part, cuts), lax.div(head * (part + 1), cuts)
        slot = jnp.where(last - first == steps, -1, program)
        own = rounds * many + lax.rem(program, rest), first, last, slot
        if shares.spare:
            turn = program - cuts * rest
            begin, end = (lax.div(tail * rest * (turn + i), shares.spare) for i in (0, 1))
            index = lax.div(begin, tail) + item - rounds
            first = head + jnp.maximum(begin - index * tail, 0)
            last = head + jnp.minimum(end - index * tail, tail)
            others = rounds * many + index, first, last, cuts * rest + turn + index
            own = [jnp.where(program < cuts * rest, a, b) for a, b in zip(own, others, strict=True)]
        found = [jnp.where(item < rounds, a, b) for a, b in zip(found, own, strict=True)]
    tile, first, last, slot = found
    return tile, first, last, slot


def items_of(shares: Shares) -> Any:
    """Returns the number of a program's items of work."""
    program, tail = lax.axis_index("program"), shares.steps - shares.head
    found = jnp.where(program < shares.cuts * shares.rest, 1, 0)
    if shares.spare:
        turn = program - shares.cuts * shares.rest
        begin, end = (lax.div(tail * shares.rest * (turn + i), shares.spare) for i in (0, 1))
        parts = lax.div(end - 1, tail) - lax.div(begin, tail) + 1
        found = jnp.where((turn >= 0) & (turn < shares.spare), parts, found)
    return shares.rounds + found


def d_input(
    e: jax.Array,
    w: jax.Array,
    held: jax.Array,
    rho: jax.Array,
    theta: jax.Array,
    start: int | jax.Array,
    *,
    classes: int,
    vocab_axis: int,
    most: int | None = None,
    shares: Shares | None = None,
) -> jax.Array:
    """Returns `held` with rows start : start + n replaced, in place, by rho * (e @ w) + theta * held, rounded once.

    A program sums a whole tile, or its share of one, float32, to a slot in memory: `share_of`. Then the shares of each
    tile are summed in order.

    Args:
        e: (n, padded(classes)) bfloat16, zeros past the classes.
        w: (V, D) bfloat16 for vocab_axis 0, (D, V) for 1, of which the first `classes` are read.
        held: (N, D) bfloat16: in rows start : start + n the targets' rows of w. Other rows stay.
        rho, theta: (n,) float32. Where one is 0 its term is left out, whatever the other factor holds.
        start: () int32; a multiple of 8, as n is if start + n < N.
        classes: K.
        vocab_axis: of w.
        most: bytes that partial tiles may take.
        shares: how to cut, if not as `choose_shares` has it.
    """
    (n, columns), (tokens, hidden) = e.shape, held.shape
    if columns != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {columns}")
    shares = shares or choose_shares(n, hidden, classes, most)
    tile_rows, steps = shares.tile_rows, shares.steps
    many, d_blocks = programs(), cdiv(hidden, D_BLOCK)
    rows_padded = cdiv(n, tile_rows) * tile_rows
    piece = math.gcd(tile_rows, SQUARE)  # rows that are stored at a time
    # Rows of a tile that are not this chunk's stay as they are: 0 * sum + 1 * held.
    rho = jnp.pad(rho, (0, rows_padded - n))
    theta = jnp.pad(theta, (0, rows_padded - n), constant_values=1)
    w_types = squares((STAGES, 2, STEP, SQUARE), vocab_axis == 0 and w.shape[0] % 8 != 0)
    e_types = squares((STAGES, tile_rows, STEP), n % 8 != 0)
    held_types = squares((2, piece, SQUARE), tokens % 8 != 0)
    # Classes past the last share a step with it: the weight's rows there are no zeros.
    extra = classes % STEP if classes < w.shape[vocab_axis] else 0

    def finish(held_ref: Ref, views_: tuple[Ref, Ref], wg: Any, sums: jax.Array, factors: tuple[jax.Array, jax.Array],
               row: Any, d: Any, old_full: Ref) -> None:  # fmt: skip
        """Finishes (64, piece) sums of columns of D and rows, and stores them."""
        moved, tiled = (view.at[wg] for view in views_)
        where = held_ref.at[pl.ds(row, piece), pl.ds(d, SQUARE)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.copy_gmem_to_smem(where, moved, old_full.at[wg])
        plgpu.barrier_wait(old_full.at[wg])
        own = plgpu.load(tiled.transpose((1, 0)), layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        scale, share = (lax.broadcast_in_dim(factor, sums.shape, [1]) for factor in factors)
        zeros = jnp.zeros_like(sums)
        result = jnp.where(scale == 0, zeros, scale * sums) + jnp.where(share == 0, zeros, share * own)
        plgpu.commit_smem()
        tiled.transpose((1, 0))[...] = result.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(moved, where)

    def body(start_ref: Ref, e_ref: Ref, w_ref: Ref, rho_ref: Ref, theta_ref: Ref, held_ref: Ref, *rest: Ref) -> None:
        *part_ref, w_all, e_all, held_all, full, empty, old_full = rest
        w_moved, *_, w_ring = views(w_all, len(w_types)) * 2
        e_moved, *_, e_ring = views(e_all, len(e_types)) * 2
        moved, *_, tiled = views(held_all, len(held_types)) * 2
        wg = lax.axis_index("wg")
        start = pl.multiple_of(start_ref[0], 8)

        def place(tile: Any) -> tuple[Any, Any]:
            return lax.div(tile, d_blocks) * tile_rows, lax.rem(tile, d_blocks) * D_BLOCK

        @pl.when(wg == 2)
        def _load() -> None:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

            def load(item: Any, count: Any) -> Any:
                tile, first, last, _ = share_of(item, shares)
                row, d = place(tile)

                @pl.loop(0, last - first)
                def _step(s: Any) -> None:
                    slot = lax.rem(count + s, STAGES)
                    taken = pl.ds((first + s) * STEP, STEP)
                    plgpu.barrier_wait(empty.at[slot])
                    for i in range(2):
                        where = taken, pl.ds(d + i * SQUARE, SQUARE)
                        where = where if vocab_axis == 0 else where[::-1]
                        plgpu.copy_gmem_to_smem(w_ref.at[where], w_moved.at[slot, i], full.at[slot])
                    plgpu.copy_gmem_to_smem(e_ref.at[pl.ds(row, tile_rows), taken], e_moved.at[slot], full.at[slot])

                return count + last - first

            lax.fori_loop(0, items_of(shares), load, jnp.int32(0))
            drain(empty, STAGES)

        @pl.when(wg < 2)
        def _multiply() -> None:
            plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
            for i in range(STAGES):
                plgpu.barrier_arrive(empty.at[i])

            def tile_of(item: Any, count: Any) -> Any:
                tile, first, last, slot_of_part = share_of(item, shares)
                row, d = place(tile)
                d += wg * SQUARE

                def multiplied(acc: Ref) -> jax.Array:
                    def multiply(s: Any, before: int) -> None:
                        slot = lax.rem(count + s, STAGES)
                        plgpu.barrier_wait(full.at[slot])
                        own = w_ring.at[slot, wg]
                        own = own.transpose((1, 0)) if vocab_axis == 0 else own
                        if extra:

                            @pl.when(first + s == steps - 1)
                            def _clear() -> None:
                                value = plgpu.load(own, layout=plgpu.Layout.WGMMA)
                                index = plgpu.broadcasted_iota(jnp.int32, (SQUARE, STEP), 1, layout=plgpu.Layout.WGMMA)
                                own[...] = jnp.where(index < extra, value, jnp.zeros_like(value))
                                plgpu.commit_smem()

                        plgpu.wgmma(acc, own, e_ring.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(1)
                        if before:
                            plgpu.barrier_arrive(empty.at[lax.rem(count + s + STAGES - 1, STAGES)])

                    multiply(0, 0)

                    @pl.loop(1, last - first)
                    def _step(s: Any) -> None:
                        multiply(s, 1)

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[lax.rem(count + last - first + STAGES - 1, STAGES)])
                    return acc[...]

                acc = pl.run_scoped(multiplied, plgpu.ACC((SQUARE, tile_rows), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]

                def whole() -> None:
                    for i in range(0, tile_rows, piece):
                        factors = tuple(
                            plgpu.load(ref.at[pl.ds(row + i, piece)], layout=COLUMN, optimized=False)
                            for ref in (rho_ref, theta_ref)
                        )
                        finish(
                            held_ref,
                            (moved, tiled),
                            wg,
                            acc[:, i : i + piece],
                            factors,  # pyright: ignore[reportArgumentType]
                            start + row + i,
                            d,
                            old_full,  # pyright: ignore[reportArgumentType]
                        )

                if shares.slots:
                    pl.when(slot_of_part < 0)(whole)

                    @pl.when(slot_of_part >= 0)
                    def _part() -> None:
                        part_ref[0][slot_of_part, pl.ds(wg * SQUARE, SQUARE), :] = acc
                else:
                    whole()
                return count + last - first

            lax.fori_loop(0, items_of(shares), tile_of, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    ref = jax.new_ref(held)
    parts = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((shares.slots, D_BLOCK, tile_rows), jnp.float32),) if shares.slots else (),
        scratch_types=[
            union(w_types),
            union(e_types),
            union(held_types),
            plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
        ],
        grid=(many,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="d_input_kernel",
    )(scalar(start)[None], e, w, rho, theta, ref)
    if not shares.slots:
        return jax.freeze(ref)

    def sum_body(start_ref: Ref, part_ref: Ref, rho_ref: Ref, theta_ref: Ref, held_ref: Ref, held_all: Ref,
                 old_full: Ref) -> None:  # fmt: skip
        moved, *_, tiled = views(held_all, len(held_types)) * 2
        start = pl.multiple_of(start_ref[0], 8)
        wg, index, i = lax.axis_index("wg"), lax.axis_index("program"), lax.axis_index("piece")
        tile = shares.rounds * many + index
        row, d = lax.div(tile, d_blocks) * tile_rows + i * piece, lax.rem(tile, d_blocks) * D_BLOCK + wg * SQUARE

        def load(slot: Any) -> jax.Array:
            where = part_ref.at[slot, pl.ds(wg * SQUARE, SQUARE), pl.ds(i * piece, piece)]
            return plgpu.load(where, layout=plgpu.Layout.WGMMA, optimized=False)

        total = load(index)
        for part in range(1, shares.cuts):
            total += load(part * shares.rest + index)
        if shares.spare:  # they divide the tails evenly
            tail, cut, spare = shares.steps - shares.head, shares.rest, shares.spare
            first = lax.div(index * spare, cut)
            begins = lambda turn: lax.div(tail * cut * turn, spare)  # noqa: E731

            def add(turn: Any, total: jax.Array) -> jax.Array:
                inside = (begins(turn) < (index + 1) * tail) & (begins(turn + 1) > index * tail)
                slot = jnp.clip(shares.cuts * cut + turn + index, 0, shares.slots - 1)
                value = load(slot)
                return jnp.where(jnp.full(total.shape, inside), total + value, total)

            low, high = jnp.maximum(first - 1, 0), jnp.minimum(lax.div((index + 1) * spare, cut) + 2, spare)
            total = lax.fori_loop(low, high, add, total)
        factors = tuple(
            plgpu.load(ref.at[pl.ds(row, piece)], layout=COLUMN, optimized=False) for ref in (rho_ref, theta_ref)
        )
        finish(held_ref, (moved, tiled), wg, total, factors, start + row, d, old_full)  # pyright: ignore[reportArgumentType]
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        sum_body,
        out_type=(),
        scratch_types=[union(held_types), plgpu.Barrier(num_arrivals=1, num_barriers=2)],
        grid=(shares.rest, tile_rows // piece),
        grid_names=("program", "piece"),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="d_input_sum_kernel",
    )(scalar(start)[None], parts[0], rho, theta, ref)
    return jax.freeze(ref)
