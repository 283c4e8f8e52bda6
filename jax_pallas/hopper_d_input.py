"""d_input of plan A with scaled exponentials for Hopper (sm_90), in Pallas' Mosaic dialect.

    d_input = rho (E W) + theta w_target        (n, D), summed over classes

A program sums a whole tile, or its share of one (`item_of`), float32, into a slot in memory: `d_input_kernel`. The
shares of a tile are then added in order: `d_input_sum_kernel`.
"""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_pallas.hopper import (
    COLUMN,
    HALF,
    STAGES,
    STEP,
    Ring,
    arrive_at_all,
    as_roles,
    cdiv,
    make_ring,
    padded,
    programs,
    ring_barriers,
    run_kernel,
    slot_of,
    two_views,
    views,
    wait_for_all,
)
from jax_pallas.hopper_gradients import D_BLOCK, in_order


@dataclass(frozen=True)
class Shares:
    """How a GPU's programs share d_input's few tiles, whose sums run over all classes: `item_of`.

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

        A step costs 16 rows more than its own: narrow tiles read more for each matmul. Tails are read out of step
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


class Item(NamedTuple):
    """A program's item of work."""

    tile: Any
    first: Any  # step
    length: Any  # steps
    slot: Any  # of the partial sums; -1: the whole tile


def tails(turn: Any, shares: Shares) -> Any:
    """Returns where the part of a spare program begins, in the tails of all cut tiles laid end to end."""
    return lax.div((shares.steps - shares.head) * shares.rest * turn, max(shares.spare, 1))


def item_of(index: Any, shares: Shares) -> Item:
    """Returns an item of a program's work.

    Programs first take whole tiles in `rounds` full rounds. The `rest` tiles are cut along the classes: the first
    `head` steps into `cuts` equal parts, so that programs march through the classes together and share what they read;
    the last steps of all of them, end to end, are divided among the `spare` programs. Tiles are numbered with the
    blocks of D first: those that run together share few rows of e, which they then read from memory once, however many
    rows there are.
    """
    program, many = lax.axis_index("program"), programs()
    rest, cuts, head, tail = shares.rest, shares.cuts, shares.head, shares.steps - shares.head
    found = program + index * many, jnp.int32(0), jnp.int32(shares.steps), jnp.int32(-1)
    if rest:
        part = lax.div(program, rest)
        first, last = lax.div(head * part, cuts), lax.div(head * (part + 1), cuts)
        slot = jnp.where(last - first == shares.steps, -1, program)
        own = shares.rounds * many + lax.rem(program, rest), first, last, slot
        if shares.spare:
            turn = program - cuts * rest
            begin, end = tails(turn, shares), tails(turn + 1, shares)
            piece = lax.div(begin, tail) + index - shares.rounds
            first, last = (head + jnp.clip(edge - piece * tail, 0, tail) for edge in (begin, end))
            other = shares.rounds * many + piece, first, last, cuts * rest + turn + piece
            own = (jnp.where(program < cuts * rest, a, b) for a, b in zip(own, other, strict=True))
        found = (jnp.where(index < shares.rounds, a, b) for a, b in zip(found, own, strict=True))
    tile, first, last, slot = found
    return Item(tile, first, last - first, slot)


def items_of(shares: Shares) -> Any:
    """Returns the number of a program's items of work."""
    turn = lax.axis_index("program") - shares.cuts * shares.rest
    found = jnp.where(turn < 0, 1, 0)
    if shares.spare:
        tail = shares.steps - shares.head
        parts = lax.div(tails(turn + 1, shares) - 1, tail) - lax.div(tails(turn, shares), tail) + 1
        found = jnp.where((turn >= 0) & (turn < shares.spare), parts, found)
    return shares.rounds + found


@dataclass(frozen=True)
class DInputKernel:
    """`d_input_kernel` and `d_input_sum_kernel` as they are known when the call is traced.

    Args:
        shares: how programs share the tiles.
        d_blocks: blocks of D.
        vocab_axis: of w.
        kept: classes of the last step, where w goes on after them; 0: all.
        interpret: whether they run in Pallas' interpreter, on a CPU.
    """

    shares: Shares
    d_blocks: int
    vocab_axis: int
    kept: int
    interpret: bool

    @property
    def piece(self) -> int:
        """Rows that are stored at a time."""
        return math.gcd(self.shares.tile_rows, HALF)

    def tile_at(self, tile: Any) -> tuple[Any, Any]:
        """Returns the first row and column of D of a tile."""
        return lax.div(tile, self.d_blocks) * self.shares.tile_rows, lax.rem(tile, self.d_blocks) * D_BLOCK


class DInputIO(NamedTuple):
    """What `finish` reads and writes."""

    start: Any  # the chunk's first row of held
    rho_ref: Any  # (rows of the tiles,)
    theta_ref: Any
    held_ref: Any  # (N, D)
    moved: Any  # a buffer for each warpgroup, (2, piece, HALF), as TMA takes it
    buffers: Any  # as registers do
    came: Any  # (2,): what was held is in the buffer


def load_d_input(kernel: DInputKernel, ring: Ring, w_ref: Any, e_ref: Any) -> None:
    """The loading warpgroup."""
    shares = kernel.shares

    def one_item(index: Any, count: Any) -> Any:
        item = item_of(index, shares)
        row, d = kernel.tile_at(item.tile)

        @pl.loop(0, item.length)
        def _step(step: Any) -> None:
            slot, taken = slot_of(count + step), pl.ds((item.first + step) * STEP, STEP)
            plgpu.barrier_wait(ring.empty.at[slot])
            for i in range(2):
                source = w_ref.at[in_order(taken, pl.ds(d + i * HALF, HALF), kernel.vocab_axis)]
                plgpu.copy_gmem_to_smem(source, ring.a_moved.at[slot, i], ring.full.at[slot])
            source = e_ref.at[pl.ds(row, shares.tile_rows), taken]
            plgpu.copy_gmem_to_smem(source, ring.b_moved.at[slot], ring.full.at[slot])

        return count + item.length

    lax.fori_loop(0, items_of(shares), one_item, jnp.int32(0))
    wait_for_all(ring.empty, STAGES)  # the interpreter wants no phase of a barrier left unseen


def d_input_warpgroup(kernel: DInputKernel, ring: Ring, warpgroup: Array, io: DInputIO, part_ref: Any) -> None:
    """A multiplying warpgroup: its halves of all items of this program."""
    arrive_at_all(ring.empty, STAGES)

    def one_item(index: Any, count: Any) -> Any:
        item = item_of(index, kernel.shares)
        row, d = kernel.tile_at(item.tile)
        accumulator = plgpu.WGMMAAccumulatorRef((HALF, kernel.shares.tile_rows), jnp.float32)
        sums = pl.run_scoped(lambda acc: multiply(acc, kernel, ring, warpgroup, item, count), accumulator)

        @pl.when(item.slot < 0)
        def _whole() -> None:
            for i in range(0, kernel.shares.tile_rows, kernel.piece):
                finish(io, sums[:, i : i + kernel.piece], row + i, d + warpgroup * HALF)

        if part_ref is not None:

            @pl.when(item.slot >= 0)
            def _part() -> None:
                part_ref[item.slot, pl.ds(warpgroup * HALF, HALF), :] = sums

        return count + item.length

    lax.fori_loop(0, items_of(kernel.shares), one_item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def multiply(acc: Any, kernel: DInputKernel, ring: Ring, warpgroup: Array, item: Item, count: Any) -> Array:
    """Returns the sums of a warpgroup's half of an item, (HALF, tile_rows) float32; `count` steps came before it."""

    def step(s: Any, *, releases: bool = True) -> None:
        slot = slot_of(count + s)
        plgpu.barrier_wait(ring.full.at[slot])
        w = ring.a.at[slot, warpgroup]
        w = w.transpose((1, 0)) if kernel.vocab_axis == 0 else w
        if kernel.kept:
            pl.when(item.first + s == kernel.shares.steps - 1)(lambda: clear_after(w, kernel.kept))
        plgpu.wgmma(acc, w, ring.b.at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(1)
        if releases:
            plgpu.barrier_arrive(ring.empty.at[slot_of(count + s - 1)])

    step(0, releases=False)
    pl.loop(1, item.length)(step)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(ring.empty.at[slot_of(count + item.length - 1)])
    return acc[...]


def clear_after(w: Any, kept: int) -> None:
    """Makes the classes after the first `kept` of a step, (HALF, STEP), zeros."""
    layout = plgpu.Layout.WGMMA
    value = plgpu.load(w, layout=layout)
    index = plgpu.broadcasted_iota(jnp.int32, (HALF, STEP), 1, layout=layout)
    w[...] = jnp.where(index < kept, value, jnp.zeros_like(value))
    plgpu.commit_smem()


def finish(io: DInputIO, sums: Array, row: Any, d: Any) -> None:
    """Writes rho * sums + theta * held, of (64, rows) sums of columns of D and rows of the chunk from d and row on."""
    warpgroup, rows = lax.axis_index("warpgroup"), sums.shape[1]
    moved, buffer = (view.at[warpgroup] for view in (io.moved, io.buffers))
    place = io.held_ref.at[pl.ds(io.start + row, rows), pl.ds(d, HALF)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.copy_gmem_to_smem(place, moved, io.came.at[warpgroup])
    plgpu.barrier_wait(io.came.at[warpgroup])
    buffer = buffer.transpose((1, 0))
    total = jnp.zeros_like(sums)
    for ref, term in (io.rho_ref, sums), (io.theta_ref, plgpu.load(buffer, layout=plgpu.Layout.WGMMA)):
        factor = plgpu.load(ref.at[pl.ds(row, rows)], layout=COLUMN, optimized=False)
        factor = lax.broadcast_in_dim(factor, sums.shape, (1,))
        total += jnp.where(factor == 0, 0.0, factor * term.astype(jnp.float32))
    plgpu.commit_smem()  # all have read it
    buffer[...] = total.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(moved, place)


def d_input_kernel(
    kernel: DInputKernel, start_ref: Any, e_ref: Any, w_ref: Any, rho_ref: Any, theta_ref: Any, held_ref: Any,
    *rest: Any,
) -> None:  # fmt: skip
    """Writes the rows of whole tiles, and the sums of shares of the others, (slots, D_BLOCK, tile_rows)."""
    *part_ref, w_all, e_all, full, empty, buffers, came = rest
    w_views, e_views = (views(ref, interpret=kernel.interpret) for ref in (w_all, e_all))
    ring = make_ring(w_views, e_views, full, empty)
    warpgroup, start = lax.axis_index("warpgroup"), start_ref[0]
    io = DInputIO(start, rho_ref, theta_ref, held_ref, *views(buffers, interpret=kernel.interpret), came)
    load = partial(load_d_input, kernel, ring, w_ref, e_ref)
    multiply_items = partial(d_input_warpgroup, kernel, ring, warpgroup, io, part_ref[0] if part_ref else None)
    # The index is read again here: with one read the machine code is not the one that was measured.
    as_roles(lax.axis_index("warpgroup"), load, multiply_items)


def d_input_sum_kernel(
    kernel: DInputKernel, start_ref: Any, part_ref: Any, rho_ref: Any, theta_ref: Any, held_ref: Any, buffers: Any,
    came: Any,
) -> None:  # fmt: skip
    """Adds the shares of a piece of a cut tile, in order, and finishes it."""
    shares, piece = kernel.shares, kernel.piece
    warpgroup, index, i = lax.axis_index("warpgroup"), lax.axis_index("program"), lax.axis_index("piece")
    row, d = kernel.tile_at(shares.rounds * programs() + index)

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
    row, d = row + i * piece, d + warpgroup * HALF
    moved, buffers = views(buffers, interpret=kernel.interpret)
    finish(DInputIO(start_ref[0], rho_ref, theta_ref, held_ref, moved, buffers, came), total, row, d)
    plgpu.wait_smem_to_gmem(0)


@partial(jax.jit, static_argnames=("classes", "vocab_axis", "most", "interpret", "shares"))
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
    most: int | None = None,
    interpret: bool = False,
    shares: Shares | None = None,
) -> Array:
    """Returns `held` with rows start : start + n become rho * (e @ w) + theta * held, in place and rounded once: (32).

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
    if e.shape[1] != padded(classes):
        raise ValueError(f"e must have {padded(classes)} columns for {classes} classes, got {e.shape[1]}")
    n, hidden = len(rho), held.shape[1]
    shares = shares or choose_shares(n, hidden, classes, most, programs())
    kept = classes % STEP if classes < w.shape[vocab_axis] else 0
    kernel = DInputKernel(shares, cdiv(hidden, D_BLOCK), vocab_axis, kept, interpret)
    # Rows of the last tile that are not the chunk's stay as they are: 0 * sum + 1 * held.
    after = cdiv(n, shares.tile_rows) * shares.tile_rows - n
    factors = jnp.pad(rho, (0, after)), jnp.pad(theta, (0, after), constant_values=1.0)
    ref, start = jax.new_ref(held), jnp.asarray(start, jnp.int32)[None]
    buffers = two_views((2, kernel.piece, 64), e.dtype, interpret=interpret)
    finishing = [buffers, plgpu.Barrier(num_arrivals=1, num_barriers=2)]
    tiles = (2, STEP), (shares.tile_rows,)
    rings = [two_views((STAGES, *shape, 64), e.dtype, interpret=interpret) for shape in tiles]
    scratch = [*rings, *ring_barriers(3), *finishing]
    results = [jax.ShapeDtypeStruct((shares.slots, D_BLOCK, shares.tile_rows), jnp.float32)] if shares.slots else []
    body, operands = partial(d_input_kernel, kernel), (start, e, w, *factors, ref)
    parts = run_kernel(body, "d_input", operands, results, scratch, (programs(),), interpret)
    if parts:
        body, grid = partial(d_input_sum_kernel, kernel), (shares.rest, shares.tile_rows // kernel.piece)
        run_kernel(body, "d_input_sum", (start, *parts, *factors, ref), [], finishing, grid, interpret, threads=2)
    return jax.freeze(ref)
