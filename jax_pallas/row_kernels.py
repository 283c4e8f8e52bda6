"""Kernels of Pallas' Triton backend without matmuls: the work on rows between the matmuls of `scaled_exp.py`.

Both families of matmul kernels use them. They read and write each number once or a few times, and sum in a fixed order.
The values of the call's rows are in arrays (P,), padded to the end of the last chunk's tiles. Equations:
linear_ce/MATH.md.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas.first_chunk import FirstChunk
from jax_pallas.problem import Problem, plan_of
from jax_pallas.row_math import nll_and_lse
from jax_pallas.slicing import Slice
from jax_pallas.tile_config import CALL_PLACES, CLASS_BLOCK, ROW_BLOCK
from jax_pallas.triton_launch import arange, load, raise_to, run, store

LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634

# A row is computed again if its sum is outside of these limits. They are far inside float32's range, and far outside of
# the sums that reference exponents near the largest logit give.
LEAST_SUM, LARGEST_SUM = 2.0**-48, 2.0**48

SMALL_BLOCK = 16  # rows of a program that sums over class blocks: enough programs to fill a GPU

BLOCKS_AT_ONCE = 64  # class blocks that such a program reads at a time

FINISHED_ROWS = 8  # of a program: enough programs to fill a GPU

FINISHED_COLUMNS = 512  # of the input that it scales at a time


class CallRows(NamedTuple):
    """The values of the rows of a call, (P,) float32 unless noted."""

    target: Array  # int32, -1 where it is not a class or there is no row
    row_weight: Array  # 0 where there is no row
    ref_exponent: Array  # inf where there is no row: its exponentials are zeros
    top: Array  # the largest logit of rows whose reference exponent is too low, -inf before it is found
    # (chunks * (1 + row blocks),) int32: of each chunk, whether any reference exponent is too low, and in which blocks.
    flag: Array
    loss: Array
    lse: Array
    target_logit: Array  # NaN where the target is not a class
    largest: Array | None  # logit
    theta: Array | None
    largest_x: Array | None = None  # (N,), of float16: the largest magnitude in a row of the input


class Exponentials(NamedTuple):
    """The results of a chunk's logits, from the kernels of either family.

    Args:
        e: (rows or more, padded) of 16 bits, times the cap's slope, 0 past the last class; None if not stored.
        sums: of the exponentials before they are rounded, (class blocks, rows or more) float32.
        tops: the rows' largest logits, (class blocks, rows or more) float32; None if not computed.
        target_exp: the targets' exponentials, before they are rounded, (places, rows or more) float32, undefined where
            there is no target.
        target_logit: the targets' logits, likewise.
        columns, exp_logs, logit_sums, squares: the column of the largest logit in its class block, the lowest of
            equals, and the sums of exponentials times their logarithms, of logits and of squared exponentials, as
            `tops`.
        shifts, shifts_high: of the first and the last three pieces of a class block, as `tops`: `shift_of`. The Triton
            kernels have one piece, and shifts_high is None.
        others: the memory of d_weight with the exponentials that e has not, as `FirstChunk` says; None: e has all.
    """

    e: Array | None
    sums: Array
    tops: Array | None
    target_exp: Array
    target_logit: Array
    columns: Array | None = None
    exp_logs: Array | None = None
    logit_sums: Array | None = None
    squares: Array | None = None
    shifts: Array | None = None
    shifts_high: Array | None = None
    others: Array | None = None


class TargetPlaces(NamedTuple):
    """Where the Hopper kernel has what belongs to the targets of a chunk: which of the places of `Exponentials`."""

    places: Array  # (chunks, halves of row blocks, class blocks) int32; (1, ...) where each chunk finds its own
    index: Array  # () int32, of the chunk in `places`


# The indices of `place`, an int32 array that says where a chunk is: its first row of the call, its first flag, its
# first row of x, its number of rows and, where there are `TargetPlaces`, its index in them.
FIRST_ROW, FIRST_FLAG, FIRST_OF_X, SIZE, CHUNK = range(5)

HALF_ROWS = ROW_BLOCK // 2  # that share a row of `TargetPlaces.places`


class Joined(NamedTuple):
    """The sums of a chunk's rows over all class blocks, (rows,) float32."""

    total: Array  # of exponentials
    largest: Array | None  # logit


class Repaired(NamedTuple):
    """The results of `kernels.repair` for the flagged blocks of a chunk's rows, float32."""

    sums: Any  # (class blocks, rows)
    target_exp: Any  # (1, rows)
    target_logit: Any  # (1, rows)
    exp_logs: Any = None  # (class blocks, rows), of `Exponentials`; None if not computed
    squares: Any = None


class OfShard(NamedTuple):
    """What the rows of a chunk have where a device has a shard of the vocabulary. `CallRows.target` is the place of the
    target in the shard, or -1."""

    target: Array  # (P,) int32, of all classes, -1 where it is none
    ref_exponent: Array  # (rows,) float32, what the exponentials that the device stores are relative to


class ChunkNumbers(NamedTuple):
    """What the results of a chunk's rows are made from. Where devices have shards of the vocabulary, a shard takes the
    place of a class block in the sums and statistics."""

    problem: Problem  # of all classes
    found: Exponentials
    places: TargetPlaces | None
    joined: Joined
    repaired: Repaired | None  # None: the other numbers include what was repaired
    block_width: int  # classes of a class block
    of_shard: OfShard | None = None


def chunk_flags(chunk_rows: int) -> int:
    """Returns how many flags a chunk has in `CallRows.flag`."""
    return 1 + pl.cdiv(chunk_rows, ROW_BLOCK)


def call_rows(problem: Problem) -> tuple[Array, Array]:
    """Returns the targets, int32, -1 where they are not a class, and the row weights, (P,) each, padded to the end of
    the last chunk's tiles."""
    config, target = plan_of(problem).scaled_exp_config, problem.target
    last = config.last_start(problem.tokens)
    end = last + -(-config.kernel_rows(problem.tokens - last) // ROW_BLOCK) * ROW_BLOCK
    past = (0, end - problem.tokens)
    target = jnp.where((target >= 0) & (target < problem.classes), target, -1).astype(jnp.int32)
    return jnp.pad(target, past, constant_values=-1), jnp.pad(problem.row_weight, past)


def call_places(problem: Problem, target: Array, chunks: int) -> Array | None:
    """Returns the places where the Hopper kernel writes the targets' logits and summands, for all chunks.

    It is None for the other kernels, which have one place, and for many chunks or a larger first one, where each chunk
    computes its own.
    """
    plan = plan_of(problem)
    config = plan.scaled_exp_config
    if not plan.hopper or chunks > CALL_PLACES or config.first_rows:
        return None
    from jax_pallas import hopper_logits

    return hopper_logits.chunk_places(target, problem.classes, config.rows, chunks, plan.class_block)


def target_places(
    problem: Problem, target: Array, chunk: Slice, size: int, call_places: Array | None
) -> TargetPlaces | None:
    """Returns the places of a chunk of `size` rows, from `call_places` if not None."""
    plan = plan_of(problem)
    if not plan.hopper:
        return None
    rows = max(size, plan.scaled_exp_config.rows)
    if call_places is not None:
        return TargetPlaces(call_places, jnp.int32(chunk.start // rows))
    from jax_pallas import hopper_logits

    of_chunk = Slice(chunk.start, size, None).of(target)
    places = hopper_logits.chunk_places(of_chunk, problem.classes, rows, 1, plan.class_block)
    return TargetPlaces(places, jnp.int32(0))


class Pick(NamedTuple):
    """The static arguments of `pick_kernel`."""

    classes: int
    vocab_axis: int
    logit_scale: float
    softcap: float | None
    block_d: int


def pick_kernel(
    pick: Pick, target_ref: Any, row_weight_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, ref_exponent_ref: Any,
    top_ref: Any, flag_ref: Any, held_ref: Any, *_: Any,
) -> None:  # fmt: skip
    """Writes a row of held, zeros if the row does not contribute, because it may then hold any values.

    Also writes the reference exponent from the target's logit, 0 if there is none: (29). Writes -inf to top and 0 to
    flag. One program owns a row. The other results are only allocated here: `finish_rows_kernel` writes them.
    """
    row, (tokens, hidden) = pl.program_id(0), x_ref.shape
    target, contributes = target_ref[row], row_weight_ref[row] != 0
    x_row, y = lax.min(row, jnp.int32(tokens - 1)), lax.max(target, jnp.int32(0))

    def step(index: Any, total: Array) -> Array:
        column = arange(index * pick.block_d, pick.block_d)
        mask = (column < hidden) & contributes
        x = load(x_ref, x_row, column, mask=mask)
        w = load(w_ref, *((y, column) if pick.vocab_axis == 0 else (column, y)), mask=mask)
        if held_ref is not None:
            store(held_ref, x_row, column, values=x, mask=(column < hidden) & (row < tokens))
        return total + x.astype(jnp.float32) * w.astype(jnp.float32)

    steps = pl.cdiv(hidden, pick.block_d)
    logit = lax.fori_loop(0, steps, step, jnp.zeros(pick.block_d, jnp.float32)).sum()
    if bias_ref is not None:
        logit = logit + bias_ref[y].astype(jnp.float32)
    logit = logit * pick.logit_scale
    if pick.softcap is not None:
        logit = pick.softcap * jnp.tanh(logit / pick.softcap)
    usable = (target >= 0) & (jnp.abs(logit) < jnp.inf)
    ref_exponent = jnp.where(usable, jnp.floor(jnp.where(usable, logit, 0.0) * LOG2_E + 0.5), 0.0)
    place = arange(row, 1)
    store(ref_exponent_ref, place, values=jnp.full(1, jnp.where(row < tokens, ref_exponent, jnp.inf)), mask=place >= 0)
    store(top_ref, place, values=jnp.full(1, -jnp.inf, jnp.float32), mask=place >= 0)
    store(flag_ref, place, values=jnp.zeros(1, jnp.int32), mask=place < flag_ref.shape[0])


def pick(
    problem: Problem, target: Array, row_weight: Array, *, flags: int, holds: bool, largest: bool, gradients: bool,
) -> tuple[CallRows, Array | None]:  # fmt: skip
    """Launches `pick_kernel`; returns the rows of the call with so many flags, and with `holds` held (N, D)."""
    x, spec, size = problem.input, problem.spec, len(target)
    of_row = jax.ShapeDtypeStruct((size,), jnp.float32)
    held = jax.ShapeDtypeStruct(x.shape, x.dtype) if holds else None
    flag = jax.ShapeDtypeStruct((flags,), jnp.int32)
    assert flag.size <= size
    block_d = min(1024, pl.next_power_of_2(x.shape[1]))
    static_args = Pick(problem.classes, problem.vocab_axis, spec.logit_scale, spec.softcap, block_d)
    operands = target, row_weight, x, problem.linear_weight, problem.linear_bias
    made = *(of_row for _ in range(3)), of_row if largest else None, of_row if gradients else None
    results = of_row, of_row, flag, held, *made
    ref_exponent, top, flag, held, *made = run(pick_kernel, static_args, operands, results, (size,), warps=4, stages=1)
    return CallRows(target, row_weight, ref_exponent, top, flag, *made), held


def no_rows_yet(
    problem: Problem, target: Array, row_weight: Array, *, flags: int, largest: bool, gradients: bool,
) -> CallRows:  # fmt: skip
    """Returns the rows of a call as `pick` does, without reference exponents; of float16, with room for what
    `float16.place` measures."""
    size = target.shape
    ref_exponent, top = jnp.full(size, jnp.inf), jnp.full(size, -jnp.inf)
    made: Any = (lax.empty(size, jnp.float32) if needed else None for needed in (True, True, True, largest, gradients))
    largest_x = lax.empty((problem.tokens,), jnp.float32) if plan_of(problem).fits_float16 else None
    return CallRows(target, row_weight, ref_exponent, top, jnp.zeros(flags, jnp.int32), *made, largest_x=largest_x)


def column_sums(ref: Any, row: Array, needed: Any = True) -> Array:
    """Returns the sum over class blocks of ref (class blocks, rows), one for each of `row`, in a fixed order; zeros
    where it is not needed."""

    def step(index: Any, total: Array) -> Array:
        block = arange(index * BLOCKS_AT_ONCE, BLOCKS_AT_ONCE)
        mask = (block < ref.shape[0])[:, None] & (row < ref.shape[1])[None, :]
        return total + load(ref, block[:, None], row[None, :], mask=mask)

    steps = jnp.where(needed, jnp.int32(pl.cdiv(ref.shape[0], BLOCKS_AT_ONCE)), jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((BLOCKS_AT_ONCE, len(row)), jnp.float32)).sum(0)


def column_maxima(ref: Any, row: Array) -> Array:
    """Returns the largest over class blocks of ref (class blocks, rows), one for each of `row`."""

    def step(index: Any, top: Array) -> Array:
        block = arange(index * BLOCKS_AT_ONCE, BLOCKS_AT_ONCE)
        inside = (block < ref.shape[0])[:, None] & (row < ref.shape[1])[None, :]
        return lax.max(top, jnp.where(inside, load(ref, block[:, None], row[None, :], mask=inside), -jnp.inf))

    start = jnp.full((BLOCKS_AT_ONCE, len(row)), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, pl.cdiv(ref.shape[0], BLOCKS_AT_ONCE), step, start).max(0)


def join_blocks_kernel(
    _options: None, place_ref: Any, sum_ref: Any, top_ref: Any, row_weight_ref: Any, ref_exponent_ref: Any, _: Any,
    flag_ref: Any, total_ref: Any, largest_ref: Any,
) -> None:  # fmt: skip
    """Writes the sums of a chunk's rows, total (rows,), and, if there, their largest logits. Sets the flags of the row
    blocks with a sum that leaves the range: (30). One program owns SMALL_BLOCK rows. Flags are only set to 1, so the
    order of the programs does not matter. The reference exponents are those of `leaves_range`."""
    first, first_flag = pl.program_id(0) * SMALL_BLOCK, place_ref[FIRST_FLAG]
    row, block = arange(first, SMALL_BLOCK), lax.div(first, jnp.int32(ROW_BLOCK))
    inside = row < place_ref[SIZE]
    total = column_sums(sum_ref, row)
    store(total_ref, row, values=total, mask=inside)
    if largest_ref is not None:
        store(largest_ref, row, values=column_maxima(top_ref, row), mask=inside)
    contributes = load(row_weight_ref, place_ref[FIRST_ROW] + row, mask=inside) != 0
    ref_exponent = None
    if ref_exponent_ref is not None:
        ref_exponent = load(ref_exponent_ref, place_ref[FIRST_ROW] + row, mask=inside)
    leaves = inside & contributes & leaves_range(total, ref_exponent)

    @pl.when(leaves.astype(jnp.int32).max() != 0)
    def _raise() -> None:
        for flag in (first_flag, first_flag + 1 + block):
            raise_to(flag_ref, flag, jnp.int32(1))


def join_blocks(
    rows: CallRows, place: Array, size: int, sums: Array, tops: Array | None, *, of_shard: bool = False
) -> tuple[CallRows, Joined]:
    """Launches `join_blocks_kernel` for a chunk of `size` rows at place (4,), from `FIRST_ROW` to `SIZE`. `of_shard`:
    the sums are of a shard of the vocabulary."""
    of_row = jax.ShapeDtypeStruct((size,), jnp.float32)
    operands = place, sums, tops, rows.row_weight, rows.ref_exponent if of_shard else None, rows.flag
    results = rows.flag, of_row, None if tops is None else of_row
    grid = (pl.cdiv(size, SMALL_BLOCK),)
    flag, total, largest = run(join_blocks_kernel, None, operands, results, grid, in_place=1, warps=4, stages=1)
    return rows._replace(flag=flag), Joined(total, largest)


class FinishRows(NamedTuple):
    """The static arguments of `finish_rows_kernel`: options of the loss."""

    z_loss_weight: float
    logit_scale: float
    softcap: float | None
    by_row: bool
    top_exponent: int  # of the largest exponential of a row that was computed again
    class_block: int  # classes of a class block of `TargetPlaces`


def leaves_range(total: Array, ref_exponent: Array | None = None) -> Array:
    """Returns whether the sum of a row's exponentials leaves the range, so that it is computed again: (30).

    With a reference exponent the sum is that of a shard of the vocabulary. It may then be small, as the sum of all
    shards is not: the exponent is that of the target's logit, or 0 where there is none that is finite.
    """
    least: Any = LEAST_SUM
    if ref_exponent is not None:
        least = jnp.where(ref_exponent == 0, LEAST_SUM, -1.0)
    return ~((total > least) & (total < LARGEST_SUM))


class RowNumbers(NamedTuple):
    """The numbers of rows after `kernels.repair`, float32."""

    total: Array  # of exponentials
    ref_exponent: Array
    target_exp: Array
    target_logit: Array  # undefined where there is no target
    repaired: Array  # bool


class NumberRefs(NamedTuple):
    """The memory that `numbers_of` reads."""

    place: Any
    total: Any
    target_exp: Any
    target_logit: Any
    target_places: Any
    repaired_exp: Any
    repaired_logit: Any
    ref_exponent: Any
    top: Any


def is_flagged(place_ref: Any, flag_ref: Any) -> Array:
    """Returns whether the row block of a program's FINISHED_ROWS rows was computed again."""
    block = lax.div(pl.program_id(0) * FINISHED_ROWS, jnp.int32(ROW_BLOCK))
    return flag_ref[place_ref[FIRST_FLAG] + 1 + block] != 0


def numbers_of(
    refs: NumberRefs, row: Array, at: Array, inside: Array, target: Array, is_class: Array, flagged: Array,
    new_total: Array, *, by_row: bool, of_shard: bool, top_exponent: int, class_block: int = CLASS_BLOCK,
) -> RowNumbers:  # fmt: skip
    """Returns the numbers of a chunk's rows, `at` of the call. Where they are `flagged`, they were computed again, with
    the sums new_total. With `by_row` this counts only for rows whose own sums leave the range."""
    place = jnp.zeros_like(row)
    if refs.target_places is not None:
        half = lax.div(row, jnp.int32(HALF_ROWS))
        block = lax.div(lax.max(target, jnp.int32(0)), jnp.int32(class_block))
        place = lax.max(load(refs.target_places, refs.place[CHUNK], half, block, mask=is_class), jnp.int32(0))
    repaired = inside & flagged
    total = load(refs.total, row, mask=inside)
    if by_row:
        of_row = load(refs.ref_exponent, at, mask=inside) if of_shard else None
        repaired = repaired & leaves_range(total, of_row)
    target_exp, target_logit = (load(ref, place, row, mask=is_class) for ref in (refs.target_exp, refs.target_logit))
    ref_exponent = load(refs.ref_exponent, at, mask=inside)
    new_ref_exponent = repaired_ref_exponent(load(refs.top, at, mask=repaired), top_exponent)
    first, has = jnp.zeros_like(row), repaired & is_class
    new_exp, new_logit = (load(ref, first, row, mask=has) for ref in (refs.repaired_exp, refs.repaired_logit))
    total, ref_exponent = jnp.where(repaired, new_total, total), jnp.where(repaired, new_ref_exponent, ref_exponent)
    target_exp = jnp.where(repaired, new_exp, target_exp)
    return RowNumbers(total, ref_exponent, target_exp, jnp.where(repaired, new_logit, target_logit), repaired)


def finish_rows_kernel(
    static_args: FinishRows, place_ref: Any, total_ref: Any, chunk_largest_ref: Any, target_exp_ref: Any,
    target_logit_ref: Any, target_places_ref: Any, repaired_sum_ref: Any, repaired_exp_ref: Any,
    repaired_logit_ref: Any, target_ref: Any, row_weight_ref: Any, ref_exponent_ref: Any, top_ref: Any, flag_ref: Any,
    class_weight_ref: Any, own_target_ref: Any, own_exponent_ref: Any, *rest: Any,
) -> None:  # fmt: skip
    """Writes the results of a chunk's rows: (6), (10), (27), (29).

    Writes loss, lse, target_logit and, if there, the largest logit. They are 0 for rows of row_weight 0. With gradients
    also writes rho (rows,), and theta at its place in the call, both times the scale: (31). It sets the target's column
    of e (rows, padded) to 0, because theta is its term. If x is given, multiplies its rows by rho, rounded once, with
    zeros where rho is 0. One program owns FINISHED_ROWS rows.

    The sums of `Repaired` count for the row blocks that were computed again; with `by_row`, only for those rows of them
    whose own sums leave the range. So the results do not depend on the other rows of the block. None: no block was.

    With own_target (P,) and own_exponent (rows,), those of `OfShard`, e has the classes of one shard of the vocabulary
    and is relative to 2**own_exponent. Where the target is in another shard, theta is 0: (53), (54).
    """
    loss_ref, lse_ref, logit_ref, largest_ref, theta_ref, e_ref, others_ref, x_ref, rho_ref = rest[len(rest) // 2 :]
    row = arange(pl.program_id(0) * FINISHED_ROWS, FINISHED_ROWS)
    inside, at = row < place_ref[SIZE], place_ref[FIRST_ROW] + row
    repairs = repaired_sum_ref is not None
    if repairs:
        flagged = is_flagged(place_ref, flag_ref)
        new_total = column_sums(repaired_sum_ref, row, flagged)
    target, row_weight = load(target_ref, at, mask=inside), load(row_weight_ref, at, mask=inside)
    is_class, contributes = inside & (target >= 0), row_weight != 0

    if repairs:
        refs = NumberRefs(
            place_ref, total_ref, target_exp_ref, target_logit_ref, target_places_ref, repaired_exp_ref,
            repaired_logit_ref, ref_exponent_ref, top_ref,
        )  # fmt: skip
        options = {"by_row": static_args.by_row, "of_shard": False, "top_exponent": static_args.top_exponent}
        options["class_block"] = static_args.class_block
        total, ref_exponent, target_exp, target_logit, _ = numbers_of(
            refs, row, at, inside, target, is_class, flagged, new_total, **options
        )
    else:
        first = jnp.zeros_like(row)
        total, ref_exponent = load(total_ref, row, mask=inside), load(ref_exponent_ref, at, mask=inside)
        target_exp, target_logit = (load(ref, first, row, mask=is_class) for ref in (target_exp_ref, target_logit_ref))
    target_logit = jnp.where(is_class, target_logit, jnp.nan)

    has_nan = total != total
    total = jnp.where(total == jnp.inf, jnp.nan, total)  # an infinite logit: no probability is a number
    nll, lse = nll_and_lse(total, target_exp, target_logit, ref_exponent * LN_2, jnp.log(total))
    nll, lse = (jnp.where(total == total, value, jnp.nan) for value in (nll, lse))  # maxima hide NaN on a GPU
    kept = jnp.where(is_class, row_weight, jnp.nan)  # no class: the whole row is NaN
    if class_weight_ref is not None:
        kept = kept * load(class_weight_ref, target, mask=is_class)
    z_loss = 2.0 * static_args.z_loss_weight * row_weight * lse
    loss = kept * nll + static_args.z_loss_weight * row_weight * lax.square(lse)
    results = (loss_ref, loss), (lse_ref, lse), (logit_ref, target_logit)
    for ref, value in results:
        store(ref, at, values=jnp.where(contributes, value, 0.0), mask=inside)
    if largest_ref is not None:
        largest = jnp.where(has_nan, jnp.nan, load(chunk_largest_ref, row, mask=inside))
        largest = jnp.where(contributes, largest, 0.0)
        store(largest_ref, at, values=largest, mask=inside)
    if theta_ref is None:
        return
    theta = z_loss * jnp.exp(-nll) + kept * jnp.expm1(-nll)  # upstream * p - kept, of a confident token too
    if static_args.softcap is not None:
        theta = theta * (1.0 - lax.square(target_logit / static_args.softcap))
    rho = static_args.logit_scale * (kept + z_loss) / total
    if own_target_ref is not None:
        rho = rho * jnp.exp2(load(own_exponent_ref, row, mask=inside) - ref_exponent)
        target = load(own_target_ref, at, mask=inside)
        is_class = inside & (target >= 0)
        theta = jnp.where(is_class, theta, 0.0)
    rho = jnp.where(contributes, rho, 0.0)
    store(rho_ref, row, values=rho, mask=inside)
    store(theta_ref, at, values=jnp.where(contributes, static_args.logit_scale * theta, 0.0), mask=inside)
    zeros = jnp.zeros_like(rho)
    put_exponentials(e_ref, others_ref, rho_ref.shape[0], row, lax.max(target, jnp.int32(0)), zeros, is_class)
    if x_ref is not None:
        scale_rows(x_ref, place_ref[FIRST_OF_X] + row, rho, inside)


def put_exponentials(
    e_ref: Any, others_ref: Any, rows: int, row: Array, column: Array, values: Array, mask: Array
) -> None:
    """Writes exponentials of a chunk of so many rows where `Exponentials` has them. The classes are within e's columns,
    or past them where `others_ref` is not None."""
    if others_ref is None:
        store(e_ref, row, column, values=values, mask=mask)
        return
    first = FirstChunk.of(e_ref.shape[1], rows, others_ref.shape[1])
    start, within = first.place(column)
    store(e_ref, row, column, values=values, mask=mask & (column < first.piece))
    store(others_ref, start + row, within, values=values, mask=mask & (column >= first.piece))


def scale_rows(x_ref: Any, row: Array, rho: Array, inside: Array) -> None:
    """Multiplies rows of x (rows, D) by rho, rounded once; zeros where rho is 0."""
    hidden = x_ref.shape[1]
    inside = (inside & (row < x_ref.shape[0]))[:, None]

    def step(index: Any, _: None) -> None:
        column = arange(index * FINISHED_COLUMNS, FINISHED_COLUMNS)[None, :]
        mask = inside & (column < hidden)
        x = load(x_ref, row[:, None], column, mask=mask).astype(jnp.float32)
        store(x_ref, row[:, None], column, values=jnp.where(rho[:, None] == 0, 0.0, x * rho[:, None]), mask=mask)

    lax.fori_loop(0, pl.cdiv(hidden, FINISHED_COLUMNS), step, None)


LARGEST_EXPONENT, MOST_SHIFT = 14.0, 63.0  # of a sum that needs no shift; of a shift
IN_A_NUMBER = 3  # shifts of 8 bits, in a float32


def shift_of(total: Array) -> Array:
    """Returns the exponents, 0 to MOST_SHIFT, of the powers of two by which exponentials are divided whose sum is
    `total`, so that float16 holds them: (49)."""
    exponent = (lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127  # of a positive number; of 0 it is -127
    return jnp.minimum(jnp.maximum(exponent.astype(jnp.float32) - LARGEST_EXPONENT, 0.0), MOST_SHIFT)


FLOAT16_TOP = 13  # of the largest exponential of a row of float16 that is computed again


def top_exponent_of(problem: Problem) -> int:
    """Returns where the largest exponential of a row is placed that is computed again, as a power of two."""
    return FLOAT16_TOP if problem.plan is not None and problem.plan.fits_float16 else 0


def repaired_ref_exponent(top: Array, top_exponent: int) -> Array:
    """Returns the reference exponents of repaired rows, from their largest logits: (30)."""
    finite, found = jnp.abs(top) < jnp.inf, jnp.floor(top * LOG2_E)
    return jnp.where(finite, found - top_exponent if top_exponent else found, 0.0)


def finish_rows(
    numbers: ChunkNumbers, rows: CallRows, place: Array, size: int, x: Array | None, *, by_row: bool,
) -> tuple[CallRows, Exponentials, Array | None, Array | None]:  # fmt: skip
    """Launches `finish_rows_kernel` for a chunk of `size` rows at place (4,) of `join_blocks`. Returns the rows of the
    call, the exponentials, x times rho and rho, the last two None if not computed."""
    problem, found, places, joined, repaired, block_width, of_shard = numbers
    spec, of_targets = problem.spec, None
    if places is not None:
        of_targets, place = places.places, jnp.concatenate([place, places.index[None]])
    options = by_row, top_exponent_of(problem), CLASS_BLOCK if places is None else block_width
    static_args = FinishRows(spec.z_loss_weight, spec.logit_scale, spec.softcap, *options)
    of_repair = (None, None, None) if repaired is None else repaired[:3]
    of_chunk = *joined, found.target_exp, found.target_logit, of_targets, *of_repair
    target, own = rows.target, (None, None)
    if of_shard is not None:
        target, own = of_shard.target, (rows.target, of_shard.ref_exponent)
    of_call = target, rows.row_weight, rows.ref_exponent, rows.top, rows.flag, problem.class_weight, *own
    written = rows.loss, rows.lse, rows.target_logit, rows.largest, rows.theta, found.e, found.others, x
    rho = None if found.e is None else jax.ShapeDtypeStruct((size,), jnp.float32)
    results, in_place = (*written, rho), sum(array is not None for array in written)
    operands, grid = (place, *of_chunk, *of_call, *written), (pl.cdiv(size, FINISHED_ROWS),)
    (loss, lse, target_logit, largest, theta, e, others, x, rho) = run(
        finish_rows_kernel, static_args, operands, results, grid, in_place=in_place, stages=1
    )
    rows = rows._replace(loss=loss, lse=lse, target_logit=target_logit, largest=largest, theta=theta)
    return rows, found._replace(e=e, others=others), x, rho
