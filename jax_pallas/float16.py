"""What plan A with scaled exponentials needs for float16, whose range is 40 powers of two: MATH.md section 16.

bfloat16 has the range of float32, so the target's logit is a good enough reference. For float16:

    reference exponents from an estimate of lse       `place`: a sample of the classes, and the target
    exponentials that are too large are shifted       `row_kernels.shift_of`, in the kernel of the exponentials
    a row with a shift gets one shift for all classes `fit`
    rho x in float16                                  `fit`: one power of two for a chunk, a factor of E^T x
    gradients for an unknown upstream gradient        `fit`: (34)

A row that is shifted is read and written once more. Nothing is multiplied again. Only the Hopper kernels use this file.
Equations: linear_ce/MATH.md.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas.problem import Problem
from jax_pallas.row_kernels import (
    FINISHED_COLUMNS,
    FIRST_FLAG,
    FIRST_OF_X,
    IN_A_NUMBER,
    LOG2_E,
    CallRows,
    Exponentials,
)
from jax_pallas.row_math import power_of_two
from jax_pallas.slicing import Slice
from jax_pallas.tile_config import CLASS_BLOCK, ROW_BLOCK, cdiv
from jax_pallas.triton_launch import arange, load, run, store

# Where the estimate of a row's lse is placed. A probability of 2**-26 is a normal float16 number there, and one of
# 2**-36 the smallest. The estimate may be 3 powers of two too low before a row is shifted.
PLACE = 12.0

# A chunk's largest |rho x| is placed here: below the largest float16 number, and most numbers of other rows are normal.
LARGEST_X = 14

LEAST_POWER, MOST_POWER = -110, 126  # so that the factors are normal float32 numbers

PIECE = 32  # classes that have one shift


def place(problem: Problem, rows: CallRows, chunk: Slice, x: Array, start: Array | int) -> CallRows:
    """Returns the rows of the call, with reference exponents from estimates of the lse in a chunk: (48). Its rows are
    those of x (N, D) from `start` on.

    The sample has the classes of a class block, at equal distances. The logits of its classes are a small matmul.
    """
    from jax_pallas import hopper_logits

    classes, spec = problem.classes, problem.spec
    size = min(classes, CLASS_BLOCK)
    sampled, bias = slice(0, classes // size * size, classes // size), problem.linear_bias
    w = problem.linear_weight[sampled] if problem.vocab_axis == 0 else problem.linear_weight[:, sampled].T
    top, total, *_ = hopper_logits.statistics(
        x,
        w,
        None if bias is None else bias[sampled].astype(jnp.float32),
        None,
        start,
        0,
        0,
        rows=chunk.size,
        classes=size,
        vocab_axis=0,
        logit_scale=spec.logit_scale,
        softcap=spec.softcap,
        weighted=False,
        statistics=0,
    )
    assert top is not None
    assert total is not None
    target = chunk.of(rows.ref_exponent)  # of the target's logit, so far
    top = jnp.where(jnp.abs(top) < jnp.inf, top * LOG2_E, -jnp.inf)
    shift = jnp.maximum(top, target)
    others = 1.0 + classes / size * (total - 1.0)
    sample = jnp.where(top > -jnp.inf, jnp.exp2(top - shift) * others, 0.0)
    lse = shift + jnp.log2(jnp.exp2(target - shift) + sample)
    placed = jnp.where(target < jnp.inf, jnp.floor(lse + 0.5) - PLACE, jnp.inf)  # inf: there is no row
    return rows._replace(ref_exponent=chunk.put(rows.ref_exponent, placed))


class Fitted(NamedTuple):
    """The results of `fit`."""

    rows: CallRows
    e: Array
    x: Array | None
    rho: Array  # (rows,)
    power: Array  # () float32, the factor of e^T x


def align_kernel(
    _options: None, place_ref: Any, factor_ref: Any, shift_ref: Any, low_ref: Any, high_ref: Any, *rest: Any
) -> None:
    """Divides a row of e (rows, padded) by powers of two, so that its shift is shift (rows,) float32 for all classes,
    and multiplies its row of x (N, D) by factor (rows,): (49), (50). x may be None.

    A row of e without a shift is not read. Rows of x whose factor is 0 become 0. low and high (class blocks, rows) hold
    the shifts of the pieces of a class block. One program owns a row.
    """
    e_ref, x_ref = rest[len(rest) // 2 :]
    row = pl.program_id(0)
    factor, shift = factor_ref[row], shift_ref[row]

    def e_step(index: Any, _: None) -> None:
        column = arange(index * FINISHED_COLUMNS, FINISHED_COLUMNS)
        mask = column < e_ref.shape[1]
        block = lax.min(lax.div(column, jnp.int32(CLASS_BLOCK)), jnp.int32(low_ref.shape[0] - 1))
        piece = lax.div(lax.rem(column, jnp.int32(CLASS_BLOCK)), jnp.int32(PIECE))
        pair = (load(ref, block, jnp.zeros_like(block) + row, mask=mask) for ref in (low_ref, high_ref))
        packed = jnp.where(piece < IN_A_NUMBER, *pair).astype(jnp.int32)
        own = (packed >> (8 * lax.rem(piece, jnp.int32(IN_A_NUMBER)))) & 255
        values = load(e_ref, row, column, mask=mask).astype(jnp.float32)
        store(e_ref, row, column, values=values * jnp.exp2(own.astype(jnp.float32) - shift), mask=mask)

    steps = jnp.where(shift > 0, jnp.int32(pl.cdiv(e_ref.shape[1], FINISHED_COLUMNS)), jnp.int32(0))
    lax.fori_loop(jnp.int32(0), steps, e_step, None)
    if x_ref is None:
        return
    hidden, place = x_ref.shape[1], place_ref[FIRST_OF_X] + row

    def x_step(index: Any, _: None) -> None:
        column = arange(index * FINISHED_COLUMNS, FINISHED_COLUMNS)
        mask = (column < hidden) & (place < x_ref.shape[0])
        x = load(x_ref, place, column, mask=mask).astype(jnp.float32)
        store(x_ref, place, column, values=jnp.where(factor == 0, 0.0, x * factor), mask=mask)

    lax.fori_loop(0, pl.cdiv(hidden, FINISHED_COLUMNS), x_step, None)


def fit(
    rows: CallRows,
    chunk: Slice,
    place: Array,
    size: int,
    found: Exponentials,
    e: Array,
    x: Array,
    start: Array | int,
    rho: Array,
    *,
    scales_x: bool,
    scales: tuple[Array, Array] | None,
) -> Fitted:
    """Prepares a chunk of `size` rows for the matmuls of the gradients, after `row_kernels.finish_rows`, whose rho is
    `rho`. The rows are those of x (N, D) from `start` on.

    Args:
        scales: powers of two of d_input and of the head's gradients.
        scales_x: x is an operand of d_weight.
    """
    assert found.shifts is not None
    assert found.shifts_high is not None
    assert rows.theta is not None
    blocks = cdiv(size, ROW_BLOCK)
    flags = lax.dynamic_slice(rows.flag, (place[FIRST_FLAG] + 1,), (blocks,))
    again = jnp.repeat(flags != 0, ROW_BLOCK)[:size]  # computed again: not shifted
    packed = [shifts[:, :size].astype(jnp.int32) for shifts in (found.shifts, found.shifts_high)]
    most = jnp.stack([(number >> (8 * i)) & 255 for number in packed for i in range(IN_A_NUMBER)]).max((0, 1))
    shift = jnp.where(again | (rho == 0), 0, most)
    rho = rho * power_of_two(shift)
    head = jnp.float32(1.0)
    if scales is not None:
        rho, head = rho * scales[0], scales[1] / scales[0]
        rows = rows._replace(theta=chunk.put(rows.theta, chunk.of(rows.theta) * scales[0]))
    of_chunk = Slice(start, chunk.size, None).of(x)
    largest = jnp.abs(rho[: chunk.size]) * jnp.abs(of_chunk).max(1).astype(jnp.float32)
    largest = jnp.where(largest < jnp.inf, largest, 0.0).max()
    exponent = jnp.where(largest > 0, jnp.frexp(largest)[1] - 1 - LARGEST_X, 0).clip(LEAST_POWER, MOST_POWER)
    operands = place, rho * power_of_two(-exponent), shift.astype(jnp.float32), found.shifts, found.shifts_high
    of_x = x if scales_x else None
    e, of_x = run(
        align_kernel,
        None,
        (*operands, e, of_x),
        (e, of_x),
        (size,),
        in_place=1 + scales_x,
        warps=4,
        stages=1,
    )
    return Fitted(rows, e, of_x, rho, power_of_two(exponent) * head)
