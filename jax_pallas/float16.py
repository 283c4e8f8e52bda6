"""What plan A with scaled exponentials needs for float16, whose range is 40 powers of two: MATH.md section 16.

bfloat16 has the range of float32, so the target's logit is a good enough reference. For float16:

    reference exponents from an estimate of lse       `place`: a sample of the classes, and the target; chunk by chunk
                                                      where tokens are gathered (`token_slices.py`)
    exponentials that are too large are shifted       `row_kernels.shift_of`, in the kernels of the exponentials
    a row with a shift gets one shift for all classes `fit`
    rho x in float16                                  `fit`: one power of two for a chunk, a factor of E^T x
    gradients for an unknown upstream gradient        `fit`: (34)
    the same of saved rows                            `unit_scale`: (52); `times_rho`: (50)

A row that is shifted is read and written once more. Nothing is multiplied again. Equations: linear_ce/MATH.md.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas import kernels
from jax_pallas.first_chunk import FirstChunk
from jax_pallas.problem import Problem, plan_of
from jax_pallas.row_kernels import (
    FINISHED_COLUMNS,
    FIRST_FLAG,
    FIRST_OF_X,
    FIRST_ROW,
    IN_A_NUMBER,
    LOG2_E,
    SMALL_BLOCK,
    CallRows,
    Exponentials,
)
from jax_pallas.row_math import power_of_two
from jax_pallas.slicing import Slice
from jax_pallas.tile_config import CLASS_BLOCK, ROW_BLOCK, TRITON_CLASS_BLOCK
from jax_pallas.triton_launch import arange, load, run, store

# Where the estimate of a row's lse is placed. A probability of 2**-26 is a normal float16 number there, and one of
# 2**-36 the smallest. The estimate may be 3 powers of two too low before a row is shifted.
PLACE = 12.0

# A chunk's largest |rho x| is placed here: below the largest float16 number, and most numbers of other rows are normal.
LARGEST_X = 14

MEASURED_AT_ONCE = 256  # class blocks whose shifts a program of `measure_kernel` reads at a time

LEAST_POWER, MOST_POWER = -110, 126  # so that the factors are normal float32 numbers


class Pieces(NamedTuple):
    """How the kernels of the exponentials divide classes by shift.

    Args:
        block: classes of a class block.
        piece: classes that have one shift.
    """

    block: int
    piece: int


OF_HOPPER, OF_TRITON = Pieces(CLASS_BLOCK, 32), Pieces(TRITON_CLASS_BLOCK, TRITON_CLASS_BLOCK)


def place(problem: Problem, rows: CallRows, x: Array, part: Slice) -> CallRows:
    """Returns the rows of the call with reference exponents from estimates of the lse: (48), and with the largest
    magnitude in each, for the rows x (n, D) of `part`: all rows, or those of a chunk that is gathered.

    The sample has the classes of a class block, at equal distances. The logits of its classes are a small matmul. Of a
    shard of the vocabulary, whose `rows` have the targets' exponents of all shards, the estimate is that of the shard's
    classes and the target: `ShardExchange.merge` takes exponents that differ between devices.
    """
    spec, plan = problem.spec, plan_of(problem)
    of_kernels = kernels
    if plan.hopper:
        from jax_pallas import hopper_logits as of_kernels
    assert plan.tile is not None
    size = min(problem.classes, plan.tile.block_v)
    w, bias, share = _sample(problem, size)
    top, total, *_ = of_kernels.statistics(
        x,
        w,
        None if bias is None else bias.astype(jnp.float32),
        None,
        0,
        0,
        0,
        rows=part.size,
        classes=size,
        vocab_axis=0,
        logit_scale=spec.logit_scale,
        softcap=spec.softcap,
        weighted=False,
        statistics=0,
    )
    assert top is not None
    assert total is not None
    target = part.of(rows.ref_exponent)  # of the target's logit, so far
    top = jnp.where(jnp.abs(top) < jnp.inf, top * LOG2_E, -jnp.inf)
    shift = jnp.maximum(top, target)
    others = 1.0 + share * (total - 1.0)
    sample = jnp.where(top > -jnp.inf, jnp.exp2(top - shift) * others, 0.0)
    lse = shift + jnp.log2(jnp.exp2(target - shift) + sample)
    placed = jnp.where(part.of(rows.row_weight) != 0, jnp.floor(lse + 0.5) - PLACE, target)
    largest_x = jnp.abs(x).max(1).astype(jnp.float32)
    if rows.largest_x is not None:
        largest_x = part.put(rows.largest_x, largest_x)
    return rows._replace(ref_exponent=part.put(rows.ref_exponent, placed), largest_x=largest_x)


def _sample(problem: Problem, size: int) -> tuple[Array, Array | None, Array | float]:
    """Returns `size` rows of the head (size, D), at equal distances; their bias (size,); and how many classes each of
    them stands for. Of fewer classes, which only the device knows, some are there more than once."""
    w, b, axis, count = problem.linear_weight, problem.linear_bias, problem.vocab_axis, problem.class_count
    if count is None:
        step = problem.classes // size
        sampled = slice(0, step * size, step)
        w = w[sampled] if axis == 0 else w[:, sampled].T
        return w, None if b is None else b[sampled], problem.classes / size
    column = jnp.arange(size) * count // size
    w = jnp.take(w, column, axis=axis, mode="clip")
    w = w if axis == 0 else w.T
    return w, None if b is None else jnp.take(b, column, mode="clip"), count.astype(jnp.float32) / size


class Fitted(NamedTuple):
    """The results of `fit`."""

    rows: CallRows
    e: Array
    others: Array | None  # of `Exponentials`
    x: Array | None
    rho: Array  # (rows,)
    power: Array  # () float32, the factor of e^T x


def measure_kernel(
    _options: None, place_ref: Any, flag_ref: Any, rho_ref: Any, scale_ref: Any, low_ref: Any, high_ref: Any,
    largest_x_ref: Any, _: Any, theta_ref: Any, shift_ref: Any, scaled_rho_ref: Any, largest_ref: Any,
) -> None:  # fmt: skip
    """Writes, (rows,) float32 each, the largest shift of a row, 0 if it does not contribute or was computed again, rho
    times that power of two and times scale (), and the magnitude of that factor times largest_x (N,), 0 if it is not
    finite. Multiplies the rows' theta, at their places in the call, by scale.

    low and high (class blocks, rows or more) hold the shifts of the pieces of a class block; high may be None. One
    program owns SMALL_BLOCK rows.
    """
    first = pl.program_id(0) * SMALL_BLOCK
    row, block = arange(first, SMALL_BLOCK), lax.div(first, jnp.int32(ROW_BLOCK))
    inside, at = row < rho_ref.shape[0], place_ref[FIRST_ROW] + row
    rho, again = load(rho_ref, row, mask=inside), flag_ref[place_ref[FIRST_FLAG] + 1 + block] != 0

    def step(index: Any, most: Array) -> Array:
        block = arange(index * MEASURED_AT_ONCE, MEASURED_AT_ONCE)
        mask = (block < low_ref.shape[0])[:, None] & inside[None, :]
        for ref in (low_ref, high_ref) if high_ref is not None else (low_ref,):
            packed = load(ref, block[:, None], row[None, :], mask=mask).astype(jnp.int32)
            for i in range(IN_A_NUMBER):
                most = jnp.maximum(most, (packed >> (8 * i)) & 255)
        return most

    none, steps = jnp.zeros((MEASURED_AT_ONCE, SMALL_BLOCK), jnp.int32), pl.cdiv(low_ref.shape[0], MEASURED_AT_ONCE)
    most = lax.fori_loop(0, steps, step, none).max(0).astype(jnp.float32)
    shift, scale = jnp.where(again | (rho == 0), 0.0, most), scale_ref[0]
    rho *= jnp.exp2(shift) * scale
    largest = jnp.abs(rho) * load(largest_x_ref, at, mask=inside & (at < largest_x_ref.shape[0]))
    of_row = (shift_ref, shift), (scaled_rho_ref, rho), (largest_ref, jnp.where(largest < jnp.inf, largest, 0.0))
    for ref, values in of_row:
        store(ref, row, values=values, mask=inside)
    store(theta_ref, at, values=load(theta_ref, at, mask=inside) * scale, mask=inside)


def align_kernel(
    pieces: Pieces, place_ref: Any, factor_ref: Any, shift_ref: Any, low_ref: Any, high_ref: Any, *rest: Any
) -> None:
    """Divides a row of e (rows, padded) by powers of two, so that its shift is shift (rows,) float32 for all classes,
    and multiplies its row of x (N, D) by factor (rows,): (49), (50). x may be None. With `others` of `Exponentials`, e
    has the first classes.

    A row of e without a shift is not read. Rows of x whose factor is 0 become 0. low and high (class blocks, rows) hold
    the shifts of the pieces of a class block; high may be None. One program owns a row.
    """
    e_ref, others_ref, x_ref = rest[len(rest) // 2 :]
    row, piece_end = pl.program_id(0), e_ref.shape[1]
    factor, shift = factor_ref[row], shift_ref[row]

    def align(ref: Any, place: tuple[Any, Any], column: Array, mask: Array) -> None:
        block = lax.min(lax.div(column, jnp.int32(pieces.block)), jnp.int32(low_ref.shape[0] - 1))
        piece = lax.div(lax.rem(column, jnp.int32(pieces.block)), jnp.int32(pieces.piece))
        packed = load(low_ref, block, jnp.zeros_like(block) + row, mask=mask)
        if high_ref is not None:
            high = load(high_ref, block, jnp.zeros_like(block) + row, mask=mask)
            packed = jnp.where(piece < IN_A_NUMBER, packed, high)
        packed = packed.astype(jnp.int32)
        own = (packed >> (8 * lax.rem(piece, jnp.int32(IN_A_NUMBER)))) & 255
        values = load(ref, *place, mask=mask).astype(jnp.float32)
        store(ref, *place, values=values * jnp.exp2(own.astype(jnp.float32) - shift), mask=mask)

    def e_step(index: Any, _: None) -> None:
        column = arange(index * FINISHED_COLUMNS, FINISHED_COLUMNS)
        align(e_ref, (row, column), column, column < piece_end)

    def others_step(index: Any, _: None) -> None:
        column = arange(piece_end + index * FINISHED_COLUMNS, FINISHED_COLUMNS)
        start, within = FirstChunk.of(piece_end, shift_ref.shape[0], others_ref.shape[1]).place(column)
        align(others_ref, (start + row, within), column, column < end)

    steps = jnp.where(shift > 0, jnp.int32(pl.cdiv(piece_end, FINISHED_COLUMNS)), jnp.int32(0))
    lax.fori_loop(jnp.int32(0), steps, e_step, None)
    if others_ref is not None:
        end = low_ref.shape[0] * pieces.block
        steps = jnp.where(shift > 0, jnp.int32(pl.cdiv(end - piece_end, FINISHED_COLUMNS)), jnp.int32(0))
        lax.fori_loop(jnp.int32(0), steps, others_step, None)
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
    place: Array,
    size: int,
    found: Exponentials,
    e: Array,
    x: Array,
    rho: Array,
    *,
    scales_x: bool,
    scales: tuple[Array, Array] | None,
) -> Fitted:
    """Prepares a chunk of `size` rows for the matmuls of the gradients, after `row_kernels.finish_rows`, whose rho is
    `rho`, and e and `found.others` its exponentials. Its rows start at row place[FIRST_OF_X] of x (N, D).

    Args:
        scales: powers of two of d_input and of the head's gradients.
        scales_x: x is an operand of d_weight.
    """
    assert found.shifts is not None
    assert rows.theta is not None
    assert rows.largest_x is not None
    scale = head = jnp.float32(1.0)
    if scales is not None:
        scale, head = scales[0], scales[1] / scales[0]
    shifts = found.shifts, found.shifts_high
    operands = place, rows.flag, rho, scale[None], *shifts, rows.largest_x, rows.theta
    of_row = jax.ShapeDtypeStruct((size,), jnp.float32)
    results, grid = (rows.theta, of_row, of_row, of_row), (pl.cdiv(size, SMALL_BLOCK),)
    theta, shift, rho, largest = run(measure_kernel, None, operands, results, grid, in_place=1, warps=8, stages=1)
    rows, exponent = rows._replace(theta=theta), chunk_exponent(largest)
    operands = place, rho * power_of_two(-exponent), shift, *shifts
    of_x = x if scales_x else None
    written = e, found.others, of_x
    e, others, of_x = run(
        align_kernel,
        OF_TRITON if found.shifts_high is None else OF_HOPPER,
        (*operands, *written),
        written,
        (size,),
        in_place=sum(array is not None for array in written),
        warps=4,
        stages=1,
    )
    return Fitted(rows, e, others, of_x, rho, power_of_two(exponent) * head)


def chunk_exponent(largest: Array) -> Array:
    """Returns the exponent of a chunk's power of two, () int32, from the largest magnitudes of rho x in its rows,
    (rows,) float32: (50)."""
    most = largest.max()
    return jnp.where(most > 0, jnp.frexp(most)[1] - 1 - LARGEST_X, 0).clip(LEAST_POWER, MOST_POWER)


def times_rho(x: Array, rho: Array) -> tuple[Array, Array]:
    """Returns rho x of a chunk's rows x (rows, D), divided by a power of two, and that power, () float32: (50)."""
    largest = jnp.abs(rho) * jnp.abs(x).max(1).astype(jnp.float32)
    exponent = chunk_exponent(jnp.where(largest < jnp.inf, largest, 0.0))
    factor = (rho * power_of_two(-exponent))[:, None]
    return jnp.where(factor == 0, 0.0, x.astype(jnp.float32) * factor).astype(x.dtype), power_of_two(exponent)


def unit_scale(problem: Problem, rows: CallRows, target: Array, chunk: Slice) -> Array:
    """Returns the powers of two by which rho, theta and d_input of a chunk are divided, if they are saved for unknown
    upstream gradients, (chunk rows,) float32: (52). They are 1 where the factors are 0 or not finite. target (P,) are
    classes of the problem, which is that of all classes."""
    spec, row_weight, lse = problem.spec, chunk.of(rows.row_weight), chunk.of(rows.lse)
    kept = row_weight
    if problem.class_weight is not None:
        kept = kept * problem.class_weight[chunk.of(target).clip(0)]
    z_loss, target_logit = 2.0 * spec.z_loss_weight * row_weight * lse, chunk.of(rows.target_logit)
    upstream = spec.logit_scale * (kept + z_loss)
    # Where the target has all of the sum in float32, the others have less than its last bit.
    rest = jnp.maximum(-jnp.expm1(target_logit - lse), 2.0**-24)
    # As `finish_rows_kernel` has it, but for all rows: that of a target in another shard is 0 there, and the scale must
    # be the same on all devices.
    theta = spec.logit_scale * (z_loss * jnp.exp(target_logit - lse) + kept * jnp.expm1(target_logit - lse))
    if spec.softcap is not None:
        theta = theta * (1.0 - jnp.square(target_logit / spec.softcap))
    magnitude = jnp.maximum(jnp.abs(upstream) * rest, jnp.abs(theta))
    usable = (magnitude > 0) & (magnitude < jnp.inf)
    return power_of_two(jnp.where(usable, jnp.frexp(magnitude)[1], 0).clip(-126, 126))
