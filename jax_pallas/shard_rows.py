"""Scaled exponentials where each device of a mesh axis has a shard of the vocabulary: MATH.md (53), (54).

All devices have the same rows, and a device computes the exponentials of its own classes. The devices exchange three
times:

    before the first chunk     one number a row, its reference exponent by the target's logit, 0 from devices that do
                               not have the target. So all begin with the same reference exponents
    for each chunk             four numbers a row: the sum of the exponentials, the reference exponent, which repairs
                               may have changed, the target's summand and logit; and the statistics of its logits. All
                               devices add them in the same order, so they have the same results, bit for bit
    for each chunk             the sum of d_input over the devices, while each adds to its own d_weight
"""

from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas import row_kernels, vocab_shard
from jax_pallas.devices import ONE_DEVICE
from jax_pallas.exchange import Chunk, NoExchange
from jax_pallas.problem import Problem, plan_of
from jax_pallas.row_kernels import (
    FINISHED_ROWS,
    FIRST_ROW,
    LN_2,
    SIZE,
    CallRows,
    ChunkNumbers,
    Exponentials,
    Joined,
    NumberRefs,
    OfShard,
    column_sums,
    is_flagged,
    numbers_of,
    repaired_ref_exponent,
    top_exponent_of,
)
from jax_pallas.row_math import first_of_largest, power_of_two
from jax_pallas.slicing import Slice
from jax_pallas.triton_launch import arange, load, run, store

LEAST_SHIFT = -1000.0  # below the exponents of float32


def of_own_classes(problem: Problem) -> Problem:
    """Returns the problem of this device's classes alone. Targets in other shards are -1. All rows of the shard are
    `classes`; how many of them are classes has a value only when the program runs, unless no shard is padded."""
    rows, count = problem.linear_weight.shape[problem.vocab_axis], None
    if problem.masks_classes:
        count = jnp.clip(problem.classes - problem.vocab_offset, 0, rows).astype(jnp.int32)
    own = problem.target - problem.vocab_offset
    own = jnp.where((own >= 0) & (own < rows) & (problem.target < problem.classes), own, -1)
    return replace(problem, target=own, classes=rows, vocab_offset=0, devices=ONE_DEVICE, class_count=count)


def clear_padding(problem: Problem, gradient: Array, axis: int) -> Array:
    """Returns a gradient of the shard's head with zeros for rows that are no classes. Their exponentials are zeros, but
    rows of NaN are not."""
    if problem.class_count is None:
        return gradient
    is_class = jnp.arange(gradient.shape[axis]) < problem.class_count
    return jnp.where(is_class.reshape([-1 if i == axis else 1 for i in range(gradient.ndim)]), gradient, 0)


class OwnNumbers(NamedTuple):
    """The static arguments of `own_numbers_kernel`: those of `row_kernels.numbers_of`, and whether rows of a block that
    was computed again kept their exponentials."""

    by_row: bool
    top_exponent: int
    keeps_rows: bool


def own_numbers_kernel(
    static_args: OwnNumbers, place_ref: Any, total_ref: Any, target_exp_ref: Any, target_logit_ref: Any,
    target_places_ref: Any, repaired_sum_ref: Any, repaired_exp_ref: Any, repaired_logit_ref: Any, target_ref: Any,
    ref_exponent_ref: Any, top_ref: Any, flag_ref: Any, number_ref: Any,
) -> None:  # fmt: skip
    """Writes number (6, rows) float32 of a chunk's rows and of the classes of this shard: the sum of the exponentials,
    the reference exponent, the target's summand and logit, 0 where the target is not in the shard, whether the row was
    computed again, and the reference exponent of the exponentials that are stored. With `by_row` that is another where
    all rows of a block were stored again. One program owns FINISHED_ROWS rows."""
    row = arange(pl.program_id(0) * FINISHED_ROWS, FINISHED_ROWS)
    inside, at = row < place_ref[SIZE], place_ref[FIRST_ROW] + row
    flagged = is_flagged(place_ref, flag_ref)
    new_total = column_sums(repaired_sum_ref, row, flagged)
    target = load(target_ref, at, mask=inside)
    refs = NumberRefs(
        place_ref, total_ref, target_exp_ref, target_logit_ref, target_places_ref, repaired_exp_ref,
        repaired_logit_ref, ref_exponent_ref, top_ref,
    )  # fmt: skip
    owned = inside & (target >= 0)
    by_row, top_exponent, keeps_rows = static_args
    options = {"by_row": by_row, "top_exponent": top_exponent, "of_shard": True}
    found = numbers_of(refs, row, at, inside, target, owned, flagged, new_total, **options)
    stored = found.ref_exponent
    if not keeps_rows:
        ref_exponent, again = load(ref_exponent_ref, at, mask=inside), inside & flagged
        new_ref_exponent = repaired_ref_exponent(load(top_ref, at, mask=again), top_exponent)
        stored = jnp.where(again, new_ref_exponent, ref_exponent)
    for index, values in enumerate((*found, stored)):
        store(number_ref, jnp.full_like(row, index), row, values=values, mask=inside)


def _own_numbers(own: ChunkNumbers, rows: CallRows, place: Array, size: int, *, by_row: bool) -> Array:
    """Launches `own_numbers_kernel`."""
    of_targets = None
    if own.places is not None:
        of_targets, place = own.places.places, jnp.concatenate([place, own.places.index[None]])
    assert own.repaired is not None
    of_chunk = own.joined.total, own.found.target_exp, own.found.target_logit, of_targets, *own.repaired[:3]
    operands = place, *of_chunk, rows.target, rows.ref_exponent, rows.top, rows.flag
    static_args = OwnNumbers(by_row, top_exponent_of(own.problem), plan_of(own.problem).batch_invariant)
    results, grid = (jax.ShapeDtypeStruct((6, size), jnp.float32),), (pl.cdiv(size, FINISHED_ROWS),)
    return run(own_numbers_kernel, static_args, operands, results, grid, stages=1)[0]


def _own_statistics(own: ChunkNumbers, again: Array, size: int) -> dict[str, Array | None]:
    """Returns the statistics of rows over the classes of this shard, (size,) float32 each, by their names in
    `Exponentials`. `again` (size,): they were computed again."""
    found, repaired, column = own.found, own.repaired, None
    assert repaired is not None

    def summed(values: Array | None, values_again: Array | None) -> Array | None:
        if values is None:
            return None
        total = values[:, :size].sum(0)
        return total if values_again is None else jnp.where(again, values_again[:, :size].sum(0), total)

    if found.columns is not None:
        assert found.tops is not None
        assert own.joined.largest is not None
        column = first_of_largest(found.tops[:, :size], found.columns[:, :size], own.joined.largest, own.block_width)
        column = column.clip(0, own.problem.classes - 1).astype(jnp.float32)
    return {
        "tops": own.joined.largest,
        "columns": column,
        "exp_logs": summed(found.exp_logs, repaired.exp_logs),
        "logit_sums": summed(found.logit_sums, None),
        "squares": summed(found.squares, repaired.squares),
    }


class WaitingSum(NamedTuple):
    """The sum of a chunk's rows of d_input that is put to its place after the logits of the next chunk."""

    chunk: Slice
    total: Array  # (n, D) float32


class ShardExchange(NoExchange):
    """The exchange of devices that have shards of the vocabulary.

    Args:
        whole: the problem of all classes. `problem` is that of this device's classes.
    """

    of_shard = True

    def __init__(self, whole: Problem) -> None:
        super().__init__(whole)
        self.whole, self.whole_target = whole, self.target
        self.problem = of_own_classes(whole)
        self.target, _ = row_kernels.call_rows(self.problem)

    def with_exponents_of_all(self, rows: CallRows) -> CallRows:
        # Rows past the last one have inf on all devices.
        return rows._replace(ref_exponent=vocab_shard.all_sum(self.whole.devices, rows.ref_exponent))

    def merge(self, chunk: Chunk, *, by_row: bool) -> None:
        """Merges the numbers of a chunk, of this shard, with those of the other devices: (53)."""
        self.end_beside_logits(chunk)
        whole, own, rows, size = self.whole, chunk.numbers, chunk.rows, chunk.size
        found = own.found
        exact = _own_numbers(own, rows, chunk.place, size, by_row=by_row)
        statistics = _own_statistics(own, exact[4] != 0, size)
        present = {name: numbers for name, numbers in statistics.items() if numbers is not None}
        gathered = vocab_shard.gather(whole.devices, jnp.concatenate([exact[:4], *(n[None] for n in present.values())]))
        totals, exponents, target_exps, target_logits, *others = gathered  # (devices, size) each
        merged = dict(zip(present, others, strict=True))
        # Of a shard without classes the exponent says nothing.
        largest = jnp.where(totals == 0, -jnp.inf, exponents).max(0)
        largest = jnp.where(largest == -jnp.inf, 0.0, largest)
        shift = exponents - largest
        factor = power_of_two(jnp.clip(shift, LEAST_SHIFT, 0.0).astype(jnp.int32))  # exactly, as exp2 may not be
        if "exp_logs" in merged:  # the exponents change with the reference, and so do the terms 2**t * t
            terms = (merged["exp_logs"] + shift * LN_2 * totals) * factor
            merged["exp_logs"] = jnp.where(factor == 0, 0.0, terms)
        if "squares" in merged:
            merged["squares"] = jnp.where(factor == 0, 0.0, merged["squares"] * factor * factor)
        stored = jnp.where(exact[0] == 0, jnp.minimum(exact[5], largest), exact[5])  # or 0 would be multiplied by inf
        sums = totals * factor
        of_targets = (reduce(add, numbers)[None] for numbers in (target_exps * factor, target_logits))
        tops = merged.get("tops")
        joined = Joined(reduce(add, sums), None if tops is None else tops.max(0))
        chunk.numbers = ChunkNumbers(
            whole,
            Exponentials(
                found.e,
                sums,
                tops,
                *of_targets,
                **{k: v for k, v in merged.items() if k != "tops"},
                shifts=found.shifts,
                shifts_high=found.shifts_high,
            ),
            places=None,
            joined=joined,
            repaired=None,
            block_width=whole.linear_weight.shape[whole.vocab_axis],
            of_shard=OfShard(self.whole_target, stored),
        )
        chunk.rows = rows._replace(ref_exponent=chunk.tiles.put(rows.ref_exponent, largest))

    def end_beside_logits(self, chunk: Chunk) -> None:
        """Ends what was exchanged beside the logits of a chunk: the sum of the chunk before, if it waits."""
        if chunk.exchanged is None:
            return
        waiting = chunk.exchanged
        assert isinstance(waiting, WaitingSum)
        # The rows replace those of x after it was read. Their sum ends before that of the numbers begins: XLA runs one
        # collective at a time, and would begin it after that of the numbers, beside no matmul.
        found, x, total = lax.optimization_barrier((chunk.numbers.found, chunk.x, waiting.total))
        chunk.numbers, chunk.x = chunk.numbers._replace(found=found), waiting.chunk.put(x, total)
        chunk.exchanged = None

    def classes_of(self, rows: CallRows) -> tuple[Problem, Array]:
        return self.whole, self.whole_target

    def start_sum(self, part: Array) -> tuple[Array, float]:
        devices = self.whole.devices
        total = vocab_shard.sum_of_d_input(devices, part, ordered=plan_of(self.problem).batch_invariant)
        return total, self.sent(part, of_own=False)

    def sent(self, part: Array, *, of_own: bool) -> float:
        """Returns the bytes that each device sends for the sum of their parts of rows of d_input."""
        devices = self.whole.devices
        size = part.size * jnp.dtype(devices.reduce_dtype).itemsize
        return vocab_shard.sent_by_sum(devices.shards, size, of_own=of_own)

    def put_sum(self, held: Array, chunk: Chunk, total: Array) -> Array:
        return chunk.slice.put(chunk.x, total)

    def wait_with_sum(self, chunk: Chunk, total: Array) -> tuple[Array, WaitingSum]:
        return vocab_shard.after_begin(chunk.x), WaitingSum(chunk.slice, total)

    def end_sum(self, held: Array | None, exchanged: WaitingSum | None) -> Array | None:
        return held if held is None or exchanged is None else exchanged.chunk.put(held, exchanged.total)
