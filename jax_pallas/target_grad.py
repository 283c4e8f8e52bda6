"""Kernels of Pallas' Triton backend that add the targets' terms to the head's gradient: they sort rows by target, then
sum equal targets.

There are no atomics: one program adds the terms of a row of d_weight, in a fixed order. Equations: linear_ce/MATH.md.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas.problem import Problem
from jax_pallas.triton_launch import arange, load, run, store

SEGMENT = 2**13  # rows that are sorted by comparing all pairs; the sorted segments are merged by bisection

SORTED_ROWS, OTHER_ROWS, MERGED_ROWS = (
    32,
    256,
    128,
)  # rows of a program, rows it compares with at a time, rows of a merging program

FEW, MANY, SPLIT = 4, 32, 4  # rows at a time of short runs, of long runs; programs of a long run

PART_PROGRAMS = 1024  # positions at a time of `part_targets_kernel`, of which few have a target in a part


class Sort(NamedTuple):
    """The static arguments of the kernels that sort."""

    count: int  # of rows
    classes: int
    segment: int


def keys_of(sort: Sort, target_ref: Any, row_weight_ref: Any, row: Array) -> Array:
    """Returns the sort keys of rows, int32: the target, or `classes` where it is not a class or does not contribute."""
    inside = row < sort.count
    target, weight = load(target_ref, row, mask=inside), load(row_weight_ref, row, mask=inside)
    return jnp.where((target >= 0) & (weight != 0), target, sort.classes).astype(jnp.int32)


def sort_kernel(
    sort: Sort, target_ref: Any, row_weight_ref: Any, theta_ref: Any, sorted_target_ref: Any, sorted_row_ref: Any,
    sorted_theta_ref: Any,
) -> None:  # fmt: skip
    """Sorts the rows of each segment by target. Rows with equal targets keep their order.

    The place of a row is the number of rows that come before it. The kernel compares every pair of rows of a segment,
    SORTED_ROWS x OTHER_ROWS at a time. That is a few instructions for each pair, and one launch instead of those of a
    general sort.
    """
    first = pl.program_id(0) * SORTED_ROWS
    row = arange(first, SORTED_ROWS)
    key = keys_of(sort, target_ref, row_weight_ref, row)
    start = lax.div(first, jnp.int32(sort.segment)) * sort.segment
    end = lax.min(start + sort.segment, jnp.int32(sort.count))

    def step(index: Any, before: Array) -> Array:
        other = arange(start + index * OTHER_ROWS, OTHER_ROWS)
        other_key = jnp.where(other < end, keys_of(sort, target_ref, row_weight_ref, other), sort.classes + 1)
        equal = (other_key[None, :] == key[:, None]) & (other[None, :] < row[:, None])
        return before + ((other_key[None, :] < key[:, None]) | equal).astype(jnp.int32)

    steps = lax.div(end - start + OTHER_ROWS - 1, jnp.int32(OTHER_ROWS))
    before = lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((SORTED_ROWS, OTHER_ROWS), jnp.int32))
    place, inside = start + before.sum(1), row < sort.count
    values = key, row, load(theta_ref, row, mask=inside)
    for ref, value in zip((sorted_target_ref, sorted_row_ref, sorted_theta_ref), values, strict=True):
        store(ref, place, values=value, mask=inside)


def merge_segments_kernel(
    sort: Sort, target_ref: Any, row_ref: Any, theta_ref: Any, sorted_target_ref: Any, sorted_row_ref: Any,
    sorted_theta_ref: Any,
) -> None:  # fmt: skip
    """Merges the segments that `sort_kernel` sorted. Rows with equal targets keep their order.

    Each row finds its place in every other segment by bisection.
    """
    first = pl.program_id(0) * MERGED_ROWS
    position = arange(first, MERGED_ROWS)
    inside = position < sort.count
    own = lax.div(first, jnp.int32(sort.segment)) * sort.segment
    key = load(target_ref, position, mask=inside)

    def segment(index: Any, place: Array) -> Array:
        start = index * sort.segment
        # In an earlier segment those up to and with the key come before, in a later one those below it.
        bound = key + (start < own).astype(jnp.int32)
        length = jnp.where(start == own, 0, lax.min(jnp.int32(sort.segment), sort.count - start))

        def halve(_: Any, edges: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = edges
            middle, open_ = lax.div(low + high, jnp.int32(2)), low < high
            below = load(target_ref, start + middle, mask=open_) < bound
            return jnp.where(open_ & below, middle + 1, low), jnp.where(open_ & ~below, middle, high)

        edges = jnp.zeros_like(position), jnp.zeros_like(position) + length
        return place + lax.fori_loop(0, sort.segment.bit_length(), halve, edges)[0]

    place = lax.fori_loop(0, pl.cdiv(sort.count, sort.segment), segment, position - own)
    values = key, load(row_ref, position, mask=inside), load(theta_ref, position, mask=inside)
    for ref, value in zip((sorted_target_ref, sorted_row_ref, sorted_theta_ref), values, strict=True):
        store(ref, place, values=value, mask=inside)


def sort_by_target(
    target: Array, row_weight: Array, theta: Array, count: int, classes: int
) -> tuple[Array, Array, Array]:
    """Returns the targets (N,) int32 of the first `count` rows in ascending order, their rows (N,) int32, and their
    theta. Targets below 0 and targets of rows of row_weight 0 come last, as `classes`."""
    sort = Sort(count, classes, SEGMENT)
    results = tuple(jax.ShapeDtypeStruct((count,), dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32))
    operands, grid = (target, row_weight, theta), (pl.cdiv(count, SORTED_ROWS),)
    found = run(sort_kernel, sort, operands, results, grid, warps=8, stages=1)
    if count > SEGMENT:
        grid = (pl.cdiv(count, MERGED_ROWS),)
        found = run(merge_segments_kernel, sort, tuple(found), results, grid, warps=4, stages=1)
    return tuple(found)


class TargetRows(NamedTuple):
    """The static arguments and the arrays of `target_rows_kernel` and `part_targets_kernel`."""

    vocab_axis: int  # of d_weight
    width: int  # columns of a program
    classes: int  # K
    target_ref: Any  # (N,), sorted
    row_ref: Any  # (N,)
    theta_ref: Any  # (N,)
    x_ref: Any  # (rows, D)
    d_weight_ref: Any  # (V, D) or (D, V)
    first_class: Any = None  # of d_weight; None: 0


def add_target_rows(io: TargetRows, target: Array, first: Array, column: Array, columns: int, size: int) -> None:
    """Adds the terms of the run of a target that begins at `first` to some columns, `size` rows at a time."""
    count, depth = io.target_ref.shape[0], arange(column, columns)
    inside = depth < io.x_ref.shape[1]

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        position, total = carry
        positions = arange(position, size)
        member = positions < count
        member = member & (load(io.target_ref, positions, mask=member) == target)
        theta, row = (load(ref, positions, mask=member)[:, None] for ref in (io.theta_ref, io.row_ref))
        x = load(io.x_ref, row, depth[None, :], mask=(theta != 0) & inside[None, :])
        ended = member.astype(jnp.int32).min() == 0
        return jnp.where(ended, count, position + size), total + theta * x.astype(jnp.float32)

    start = (first, jnp.zeros((size, columns), jnp.float32))
    total = lax.while_loop(lambda carry: carry[0] < count, step, start)[1]
    if io.first_class is not None:
        target = target - io.first_class
    place = (target, depth) if io.vocab_axis == 0 else (depth, target)
    old = load(io.d_weight_ref, *place, mask=inside).astype(jnp.float32)
    store(io.d_weight_ref, *place, values=old + total.sum(0), mask=inside)


def add_run(io: TargetRows, position: Array, column: Array) -> None:
    """Adds the terms of the run of equal targets at a position to some columns.

    Most runs are short: the program at the first position of the run sums it. A few runs contain a tenth of all rows.
    In runs of MANY rows or more, the programs at the first SPLIT positions divide the columns.
    """
    count, width, target_ref = io.target_ref.shape[0], io.width, io.target_ref
    target = target_ref[position]
    before = position - 1 - jnp.arange(SPLIT, dtype=jnp.int32)
    equal = (before >= 0) & (load(target_ref, before, mask=before >= 0) == target)
    offset = equal.astype(jnp.int32).sum()  # within the run, as far as SPLIT
    first = position - offset
    last = first + MANY - 1
    long = (last < count) & (target_ref[lax.min(last, jnp.int32(count - 1))] == target)
    is_class = (target >= 0) & (target < io.classes)
    part = width // SPLIT
    pl.when(is_class & long & (offset < SPLIT))(
        lambda: add_target_rows(io, target, first, column + offset * part, part, MANY)
    )
    pl.when(is_class & ~long & (offset == 0))(lambda: add_target_rows(io, target, first, column, width, FEW))


def target_rows_kernel(
    options: tuple[int, int, int], target_ref: Any, row_ref: Any, theta_ref: Any, x_ref: Any, _: Any, d_weight_ref: Any
) -> None:
    """Adds the targets' terms, theta * x, to their rows of d_weight: (33).

    A program owns a position and some columns.
    """
    io = TargetRows(*options, target_ref, row_ref, theta_ref, x_ref, d_weight_ref)
    add_run(io, pl.program_id(0), pl.program_id(1) * io.width)


def part_targets_kernel(
    options: tuple[int, int, int], target_ref: Any, row_ref: Any, theta_ref: Any, part_ref: Any, bound_ref: Any,
    x_ref: Any, _: Any, d_weight_ref: Any,
) -> None:  # fmt: skip
    """Adds the targets' terms of a part of d_weight, given the number of the part and its first class, part (2,) int32,
    and which positions the targets of each part begin at, bound (parts + 1,) int32.

    A program owns some positions, and some columns.
    """
    io = TargetRows(*options, target_ref, row_ref, theta_ref, x_ref, d_weight_ref, part_ref[1])
    first, last = bound_ref[part_ref[0]] + pl.program_id(0), bound_ref[part_ref[0] + 1]
    column = pl.program_id(1) * io.width

    def step(position: Array) -> Array:
        add_run(io, position, column)
        return position + PART_PROGRAMS

    lax.while_loop(lambda position: position < last, step, first)


def add_targets(
    d_weight: Array, x: Array, target: Array, row: Array, theta: Array, *, classes: int, vocab_axis: int
) -> Array:
    """Returns d_weight, in its place, with the terms of each class, theta * x, added to its row, rounded once: (33).

    Args:
        d_weight: (V, D), or (D, V) where `vocab_axis` is 1.
        x: (rows, D).
        target: (N,) int32 in ascending order; those that are not below `classes` are skipped.
        row: (N,) int32, whose row of x it is.
        theta: (N,) float32; where it is 0 nothing is added, even if x is NaN.
    """
    if not target.size:
        return d_weight
    width = min(512, max(64, pl.next_power_of_2(x.shape[1])))
    operands, result = (target, row, theta, x, d_weight), jax.ShapeDtypeStruct(d_weight.shape, d_weight.dtype)
    launch = {"grid": (target.size, pl.cdiv(x.shape[1], width)), "warps": 4, "stages": 1}
    return run(target_rows_kernel, (vocab_axis, width, classes), operands, (result,), in_place=1, **launch)[0]


def add_targets_of_part(
    d_weight: Array, x: Array, target: Array, row: Array, theta: Array, bounds: Array, *, part: int, first: int
) -> Array:
    """Returns a part of d_weight, (K, D) float32, in its place, with the terms of its classes.

    Args:
        x, target, row, theta: of `add_targets`.
        bounds: (parts + 1,) int32, how many targets come before each part, and before the end of the last.
        part, first: its number and its first class.
    """
    if not target.size:
        return d_weight
    width = min(512, max(64, pl.next_power_of_2(x.shape[1])))
    operands = target, row, theta, jnp.array([part, first], jnp.int32), bounds, x, d_weight
    # `bounds` leave out targets that are no classes. With their number each part would have another kernel.
    result, options = jax.ShapeDtypeStruct(d_weight.shape, d_weight.dtype), (0, width, 2**31 - 1)
    launch = {"grid": (min(target.size, PART_PROGRAMS), pl.cdiv(x.shape[1], width)), "warps": 4, "stages": 1}
    return run(part_targets_kernel, options, operands, (result,), in_place=1, **launch)[0]


def add_target_sums(d_bias: Array, target: Array, theta: Array) -> Array:
    """Returns d_bias (K,) float32 with the sum of theta added for each class: (33). The arguments are those of
    `add_targets`."""
    sums = _sums_of_runs(target, theta)
    return d_bias.at[_lasts(target, len(d_bias))].add(sums, mode="drop", unique_indices=True)


def add_to_head(
    problem: Problem,
    target: Array,
    row_weight: Array,
    theta: Array,
    d_weight: Array | None,
    d_bias: Array | None,
) -> tuple[Array | None, Array | None]:
    """Adds theta * input to the targets' rows of d_weight, theta to d_bias, if not None: (33)."""
    target, row, theta = sort_by_target(target, row_weight, theta, problem.tokens, problem.classes)
    if d_weight is not None:
        d_weight = add_targets(
            d_weight, problem.input, target, row, theta, classes=problem.classes, vocab_axis=problem.vocab_axis
        )
    if d_bias is not None:
        d_bias = add_target_sums(d_bias, target, theta)
    return d_weight, d_bias


def _lasts(target: Array, classes: int) -> Array:
    """Returns sorted targets where a run of equals ends, places outside the classes elsewhere, all different."""
    ends = jnp.concatenate([target[1:] != target[:-1], jnp.ones(1, bool)]) & (target < classes)
    return jnp.where(ends, target, classes + jnp.arange(len(target)))


def _sums_of_runs(target: Array, values: Array) -> Array:
    """Returns, for each place, the sum of the values from the start of its run of equal targets, in a fixed order."""

    def joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (target_a, sum_a), (target_b, sum_b) = a, b
        return target_b, sum_b + jnp.where(target_a == target_b, sum_a, 0.0)

    return lax.associative_scan(joined, (target, values))[1]
