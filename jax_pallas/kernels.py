"""Kernels of Pallas' Triton backend that compute logits, for any GPU from Ampere on.

They are the implementation "pallas_triton". The Hopper implementation uses `repair_kernel`, which recomputes rows whose
exponentials left the range. `triton_launch.py` launches the kernels. core_triton/kernels.py has the same kernels in
Triton. One program owns a tile and writes its outputs, so results repeat bit for bit. `row_kernels.py` or XLA reduces
the sums of tiles. Operands are not sliced, padded or copied before. Lowered for a CPU, a kernel runs in Pallas'
interpreter. Equations: linear_ce/MATH.md.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas.problem import Problem
from jax_pallas.row_kernels import (
    FIRST_FLAG,
    FIRST_OF_X,
    FIRST_ROW,
    LN_2,
    LOG2_E,
    CallRows,
    Exponentials,
    Repaired,
    leaves_range,
    put_exponentials,
    repaired_ref_exponent,
    shift_of,
    top_exponent_of,
)
from jax_pallas.row_math import NO_PROBABILITY, first_of_largest
from jax_pallas.tile_config import REPAIR_STAGES, REPAIR_TILE, ROW_BLOCK, TritonTile, padded, triton_tile, unaligned
from jax_pallas.triton_launch import arange, load, raise_to, run, store
from linear_ce.statistics import ARGMAX, BY_ROW, ENTROPY, LOGIT_SUM, MAX, SHIFTS, SQUARES

GROUP = 8  # neighboring row blocks that share a block of classes
REPAIR_PROGRAMS = 256  # of a repair, which seldom has work: two for each multiprocessor of a large GPU
ALIGNED = 16  # classes: 32 bytes of 16 bits, which is what the compiler takes for granted of an array's address


class Matmul(NamedTuple):
    """The matmul of a kernel, rows of x by classes of w, and the options that turn it into logits."""

    rows: int
    classes: int
    vocab_axis: int
    logit_scale: float
    softcap: float | None
    tile: TritonTile
    ranged: bool = True  # of w only some classes: the device knows the first, and how many after it are left out
    counted: bool = False  # the last scalar is how many of the classes count
    head_parts: int = 2  # matrices of x's dtype that a float32 head is the sum of; 1: it is rounded

    @property
    def class_blocks(self) -> int:
        return pl.cdiv(self.classes + (ALIGNED - 1 if self.ranged and self.vocab_axis == 1 else 0), self.tile.block_v)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.rows, ROW_BLOCK) * self.class_blocks

    def run(
        self, kernel: Callable[..., None], scalars: Any, operands: Any, results: Any, programs: int, **in_place: Any
    ) -> Any:
        """Runs a kernel on int32 scalars, which it gets as one array, and operands."""
        operands = (jnp.stack([jnp.asarray(scalar, jnp.int32) for scalar in scalars]), *operands)
        return run(kernel, self, operands, results, (programs,), warps=self.tile.num_warps, **in_place)


class LogitsTile(NamedTuple):
    """A tile of logits, (block_n, block_v) float32, and where it is."""

    logits: Array
    row: Array  # (block_n,)
    inside: Array  # (block_n,) bool: the row exists
    column: Array  # (block_v,) of w
    place: Array  # (block_v,) within the chunk of classes
    first: Array  # the first of it
    seen: Array | None  # (1, block_v) bool: these classes count; None: all
    by_block: tuple[Array, Array]  # where a value for each row goes in (class blocks, rows)

    def only_seen(self, values: Array, other: float = 0.0) -> Array:
        return values if self.seen is None else jnp.where(self.seen, values, other)


def blocks_of(matmul: Matmul, tile: Any) -> tuple[Array, Array]:
    """Returns the row block and the class block of a tile: GROUP row blocks of a class block, then the next class
    block."""
    group = lax.div(tile, GROUP * matmul.class_blocks)
    within = tile - group * (GROUP * matmul.class_blocks)
    size = lax.min(pl.cdiv(matmul.rows, ROW_BLOCK) - group * GROUP, jnp.int32(GROUP))
    return group * GROUP + lax.rem(within, size), lax.div(within, size)


def logits_tile(
    matmul: Matmul, blocks: tuple[Array, Array], scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, *,
    ends: bool = False,
) -> LogitsTile:  # fmt: skip
    """Computes a tile of logits: (1), (2). Rows past the last repeat it. Columns that are not `seen` are undefined. A
    head of another dtype than x is split, or rounded: (39). With `ends`, x may end before the rows of the tile do."""
    tile, axis, hidden, end = matmul.tile, matmul.vocab_axis, x_ref.shape[1], w_ref.shape[matmul.vocab_axis]
    row = arange(blocks[0] * ROW_BLOCK, ROW_BLOCK)
    first_place = blocks[1] * tile.block_v
    column = place = arange(first_place, tile.block_v)
    seen = (place < matmul.classes)[None, :] if matmul.classes % tile.block_v else None
    if matmul.counted:
        seen = (place < scalars_ref[scalars_ref.shape[0] - 1])[None, :]
    if matmul.ranged:
        first, skip = scalars_ref[1], scalars_ref[2]
        if axis == 1:  # from a multiple of ALIGNED on, otherwise each column would be loaded separately
            before = lax.rem(first, jnp.int32(ALIGNED))
            place, first_place = place - before, first_place - before
            first = pl.multiple_of(first - before, ALIGNED)
        column = first + column
        seen = ((place >= skip) & (place < matmul.classes))[None, :]
    x_row = (scalars_ref[0] + lax.min(row, jnp.int32(matmul.rows - 1)))[:, None]
    if ends:
        x_row = lax.min(x_row, jnp.int32(x_ref.shape[0] - 1))

    def step(index: Any, raw: Array) -> Array:
        depth = arange(index * tile.block_d, tile.block_d)
        within = depth < hidden if hidden % tile.block_d else None
        by_row = None if within is None else within[None, :]
        x = load(x_ref, x_row, depth[None, :], mask=by_row)
        if axis == 0:  # clamped rather than masked, which saves a comparison: neighbours in memory are along depth
            w = load(w_ref, lax.min(column, jnp.int32(end - 1))[:, None], depth[None, :], mask=by_row)
        else:
            mask = (column < end)[None, :]  # `<`, from which the compiler sees that 8 columns go together
            w = load(w_ref, depth[:, None], column[None, :], mask=mask if within is None else mask & within[:, None])
        contract = (((1,), (1 - axis,)), ((), ()))
        parts = [w]
        if w.dtype != x.dtype:
            parts = halves_of(w) if matmul.head_parts == 2 else [rounded_in_kernel(w)]
        for part in parts:
            raw = raw + lax.dot_general(x, part, contract, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        return raw

    logits = lax.fori_loop(0, pl.cdiv(hidden, tile.block_d), step, jnp.zeros((ROW_BLOCK, tile.block_v), jnp.float32))
    if bias_ref is not None:
        logits = logits + load(bias_ref, column, mask=column < bias_ref.shape[0])[None, :]
    if matmul.logit_scale != 1.0:
        logits = logits * matmul.logit_scale
    if matmul.softcap is not None:  # by way of tanh(t) = 1 - 2 / (1 + exp(2 t)): one number a logit, no branch
        root = lax.rsqrt(1.0 + jnp.exp2(logits * (2.0 * LOG2_E / matmul.softcap)))
        logits = matmul.softcap - (2.0 * matmul.softcap) * (root * root)
    return LogitsTile(logits, row, row < matmul.rows, column, place, first_place, seen, (blocks[1], row))


def halves_of(w: Array) -> tuple[Array, Array]:
    """Returns a float32 matrix as the sum of two bfloat16 matrices: (39). `problem.halves` does the same outside of
    kernels.

    The bits are rounded, to even. XLA, which runs kernels on a CPU, would remove a conversion to bfloat16 and back. Of
    NaN the first matrix may have another number, and the second one has NaN.
    """
    bits = lax.bitcast_convert_type(w, jnp.int32)
    bits = bits + 0x7FFF + (lax.shift_right_logical(bits, jnp.full_like(bits, 16)) & 1)
    high = lax.bitcast_convert_type(bits & jnp.int32(-0x10000), jnp.float32)
    return high.astype(jnp.bfloat16), (w - high).astype(jnp.bfloat16)


def rounded_in_kernel(w: Array) -> Array:
    """Returns a float32 matrix in bfloat16, rounded as `problem.rounded` does outside of kernels. NaN is kept:
    `halves_of` rounds that of NVIDIA GPUs, 0x7FFFFFFF, to -0."""
    return jnp.where(w == w, halves_of(w)[0], jnp.bfloat16(jnp.nan))


def slope(logits: Array, softcap: float) -> Array:
    """Returns the derivative of the cap at capped logits: (15)."""
    return 1.0 - lax.square(logits * (1.0 / softcap))


def at_targets(part: LogitsTile, target: Array, values: Array, put: Callable[[Array, Array], None]) -> None:
    """Calls put(found, owns), (block_n,) each, if the tile holds targets: of values (block_n, block_v), what each row's
    target has, and whether it is in this tile. Most tiles hold none; and behind the branch registers suffice."""
    owns = part.inside & (target >= 0) & (target >= part.first) & (target < part.first + part.place.shape[0])

    @pl.when(owns.astype(jnp.int32).max() != 0)
    def _found() -> None:
        put(jnp.where(part.place[None, :] == target[:, None], values, 0.0).sum(1), owns)


class ExponentialsIO(NamedTuple):
    """What `store_exponentials` reads besides the logits, and what it writes; None if not computed."""

    target_ref: Any  # (rows,), or those of the call
    e_ref: Any  # (rows, padded)
    sum_ref: Any  # (class blocks, rows)
    top_ref: Any  # (class blocks, rows)
    target_exp_ref: Any  # (1, rows)
    target_logit_ref: Any  # (1, rows)
    column_ref: Any  # (class blocks, rows), as the next four
    exp_log_ref: Any
    logit_sum_ref: Any
    square_ref: Any
    shift_ref: Any = None  # the exponents of `shift_of`, by which the exponentials in e are divided
    others_ref: Any = None  # of `Exponentials`


def exponential(logits: Array, reference: Array) -> Array:
    """Returns exp(logits - reference).

    The subtraction comes first. Triton under XLA does not fuse a multiplication with a subtraction, and the rounded
    product of a large logit and LOG2_E has lost its distance to the reference.
    """
    return jnp.exp2((logits - reference) * LOG2_E)


def store_exponentials(
    matmul: Matmul, part: LogitsTile, ref_exponent: Array, io: ExponentialsIO, first_row: Any = 0
) -> None:
    """Writes the results of `ExponentialsIO` for a tile of logits and its reference exponents (block_n,)."""
    reference = ref_exponent * LN_2

    def put_target(logit: Array, owns: Array) -> None:
        for ref, value in ((io.target_exp_ref, exponential(logit, reference)), (io.target_logit_ref, logit)):
            store(ref, jnp.zeros_like(part.row), part.row, values=value, mask=owns)

    # One look at the tile for both, or registers would spill.
    at_targets(part, load(io.target_ref, first_row + part.row, mask=part.inside), part.logits, put_target)
    exponentials = part.only_seen(exponential(part.logits, reference[:, None]))
    if io.exp_log_ref is not None:  # first, or registers would spill
        terms = jnp.where(exponentials == 0, 0.0, exponentials * (part.logits - reference[:, None]))
        store(io.exp_log_ref, *part.by_block, values=terms.sum(1), mask=part.inside)
    total = exponentials.sum(1)
    store(io.sum_ref, *part.by_block, values=total, mask=part.inside)
    if io.square_ref is not None:
        store(io.square_ref, *part.by_block, values=lax.square(exponentials).sum(1), mask=part.inside)
    if io.shift_ref is not None:
        shift = shift_of(total)
        store(io.shift_ref, *part.by_block, values=shift, mask=part.inside)
        exponentials = exponentials * jnp.exp2(-shift)[:, None]
    if io.e_ref is not None:
        store_e(matmul, part, exponentials, io.e_ref, io.others_ref)


def store_e(matmul: Matmul, part: LogitsTile, exponentials: Array, e_ref: Any, others_ref: Any) -> None:
    """Writes the exponentials of a tile, times the cap's slope: (31)."""
    if matmul.softcap is not None:
        exponentials = part.only_seen(exponentials * slope(part.logits, matmul.softcap))
    end = e_ref.shape[1] if others_ref is None else matmul.classes
    mask = part.inside[:, None] & (part.place < end)[None, :]
    put_exponentials(e_ref, others_ref, matmul.rows, part.row[:, None], part.place[None, :], exponentials, mask)


def exponentials_kernel(
    matmul: Matmul, scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, ref_exponent_ref: Any, target_ref: Any,
    *results: Any,
) -> None:  # fmt: skip
    """Writes the results of `ExponentialsIO`: (29), (31). One program owns a tile."""
    blocks, io = blocks_of(matmul, pl.program_id(0)), ExponentialsIO(target_ref, *results)
    part = logits_tile(matmul, blocks, scalars_ref, x_ref, w_ref, bias_ref)
    if io.top_ref is not None:
        top = part.only_seen(part.logits, -jnp.inf).max(1)
        store(io.top_ref, *part.by_block, values=top, mask=part.inside)
        if io.column_ref is not None:
            column = (part.place - part.first).astype(jnp.float32)
            here = part.only_seen(jnp.where(part.logits == top[:, None], -column[None, :], -jnp.inf), -jnp.inf)
            store(io.column_ref, *part.by_block, values=-here.max(1), mask=part.inside)
    if io.logit_sum_ref is not None:
        store(io.logit_sum_ref, *part.by_block, values=part.only_seen(part.logits).sum(1), mask=part.inside)
    store_exponentials(matmul, part, load(ref_exponent_ref, part.row, mask=part.inside), io)


def rows_of_sums(rows: int, statistics: int) -> int:
    """Returns the length of a row of sums (class blocks, rows or more).

    The compiler divides a block of them among threads by the alignment of its rows, and so decides in which order they
    are added. With BY_ROW it is the same for any number of rows.
    """
    return pl.cdiv(rows, ROW_BLOCK) * ROW_BLOCK if statistics & BY_ROW else rows


def exponentials(
    x: Array, w: Array, bias: Array | None, ref_exponent: Array, target: Array, start: Array | int, *, rows: int,
    classes: int, vocab_axis: int, logit_scale: float, softcap: float | None, stores: bool, statistics: int,
    count: Array | None = None, head_parts: int = 2,
) -> Exponentials:  # fmt: skip
    """Returns scaled exponentials of rows' logits, by block of classes: (29), (31).

    Args:
        x: (N, D), of which rows `start` to `start` + `rows` count.
        w: (V, D), or (D, V) where `vocab_axis` is 1, of x's dtype or float32; the first `classes` are classes.
        bias, ref_exponent: at least (classes,) float32, or None; (rows,) float32 integers.
        target: (rows,) int32 classes, -1 for none. Each target's summand and logit are returned, in one place.
        start: a number, or an int32 scalar of the device; the arguments after it are static.
        stores: whether the exponentials are computed.
        statistics: of `linear_ce.statistics`, which are computed.
        count: () int32, how many of the first `classes` rows of w are classes; None: all.
        head_parts: of `Matmul`.
    """
    # Token losses and log-probabilities have the same warps, which add in the same order, unless there are statistics
    # that would spill registers.
    crowded = softcap is not None and (stores or statistics & BY_ROW != 0)
    crowded |= statistics & (ARGMAX | LOGIT_SUM | SQUARES) != 0 or unaligned(w.shape[1], vocab_axis)
    crowded |= stores and statistics & (ENTROPY | BY_ROW) == ENTROPY  # rows that are saved
    tile = triton_tile(w.dtype.itemsize, crowded=crowded)
    counted, scalars = count is not None, (start,) if count is None else (start, count)
    of_head = {"ranged": False, "counted": counted, "head_parts": head_parts}
    matmul = Matmul(rows, classes, vocab_axis, logit_scale, softcap, tile, **of_head)
    by_block = jax.ShapeDtypeStruct((matmul.class_blocks, rows_of_sums(rows, statistics)), jnp.float32)
    e_dtype = x.dtype if statistics & SHIFTS else jnp.bfloat16  # float16 only holds exponentials that are shifted
    stored = jax.ShapeDtypeStruct((rows, padded(classes)), e_dtype) if stores else None
    of_target = jax.ShapeDtypeStruct((1, rows), jnp.float32)
    bits = MAX, ARGMAX, ENTROPY, LOGIT_SUM, SQUARES, SHIFTS
    top, *others = (by_block if statistics & bit else None for bit in bits)
    results = stored, by_block, top, of_target, of_target, *others
    return Exponentials(
        *matmul.run(exponentials_kernel, scalars, (x, w, bias, ref_exponent, target), results, matmul.tiles)
    )


FINDS, REDOES = 1, 2  # steps of a repair. Not 0: XLA launches a kernel to write scalars that are all 0


class Repair(NamedTuple):
    """The static arguments of `repair_kernel`: the matmul, and how many programs divide its tiles."""

    matmul: Matmul
    programs: int
    top_exponent: int


def repair_kernel(
    repair: Repair, scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, target_ref: Any, flag_ref: Any,
    total_ref: Any, ref_exponent_ref: Any, *rest: Any,
) -> None:  # fmt: skip
    """Recomputes the flagged row blocks of a chunk with reference exponents from their largest logits: (30).

    The scalars are the first row of x, that of the call, the chunk's first flag, and the step of this launch (and the
    number of classes, if `Matmul.counted`). The FINDS
    step raises top (P,), initially -inf, to the largest logits. The REDOES step recomputes the logits and writes what
    `exponentials_kernel` writes. Both launches are one kernel, which is compiled once. Programs take turns at the
    tiles. Most chunks have no flag, and then there is nothing to do.

    If the rows' sums total (rows,) are there, rows whose sum does not leave the range keep their e. So it does not
    depend on the other rows of the block. The reference exponents (P,) are those of `row_kernels.leaves_range`.
    """
    matmul, (top_ref, e_ref, others_ref, *results) = repair.matmul, rest[-8:]
    first_row, first_flag, launch_step = scalars_ref[1], scalars_ref[2], scalars_ref[3]
    program = pl.program_id(0)

    def tile(blocks: tuple[Array, Array]) -> None:
        # The last chunk may have more rows than the call: `ScaledExpConfig.kernel_rows`.
        ends = x_ref.shape[0] % matmul.rows != 0
        part = logits_tile(matmul, blocks, scalars_ref, x_ref, w_ref, bias_ref, ends=ends)
        at = first_row + part.row

        @pl.when(launch_step == FINDS)
        def _find() -> None:
            top = part.only_seen(part.logits, -jnp.inf).max(1)
            raise_to(top_ref, at, jnp.where(part.inside, top, -jnp.inf))

        @pl.when(launch_step == REDOES)
        def _redo() -> None:
            ref_exponent = repaired_ref_exponent(load(top_ref, at, mask=part.inside), repair.top_exponent)
            sum_ref, target_exp_ref, target_logit_ref, exp_log_ref, square_ref = results
            of_targets = target_exp_ref, target_logit_ref
            all_rows = e_ref if total_ref is None else None
            statistics = None, exp_log_ref, None, square_ref
            io = ExponentialsIO(target_ref, all_rows, sum_ref, None, *of_targets, *statistics, others_ref=others_ref)
            store_exponentials(matmul, part, ref_exponent, io, first_row)

        if total_ref is None or e_ref is None:
            return

        # A branch of its own, or registers would spill.
        @pl.when(launch_step > FINDS)
        def _redo_rows() -> None:
            of_row = None if ref_exponent_ref is None else load(ref_exponent_ref, at, mask=part.inside)
            lost = part.inside & leaves_range(load(total_ref, part.row, mask=part.inside), of_row)
            reference = repaired_ref_exponent(load(top_ref, at, mask=lost), repair.top_exponent) * LN_2
            exponentials = part.only_seen(exponential(part.logits, reference[:, None]))
            store_e(matmul, part._replace(inside=lost), exponentials, e_ref, others_ref)

    def step(index: Any, _: None) -> None:
        number = program + index * repair.programs
        blocks = blocks_of(matmul, lax.min(number, jnp.int32(matmul.tiles - 1)))
        needed = (number < matmul.tiles) & (flag_ref[first_flag + 1 + blocks[0]] != 0)
        pl.when(needed)(lambda: tile(blocks))

    steps = jnp.where(flag_ref[first_flag] != 0, jnp.int32(pl.cdiv(matmul.tiles, repair.programs)), jnp.int32(0))
    lax.fori_loop(jnp.int32(0), steps, step, None)


def repair(
    problem: Problem, x: Array, rows: CallRows, place: Array, size: int, found: Exponentials, total: Array | None,
    statistics: int, *, of_shard: bool = False,
) -> tuple[CallRows, Exponentials, Repaired]:  # fmt: skip
    """Launches `repair_kernel` twice, for a chunk of `size` rows at place (4,) of `row_kernels.join_blocks`. With the
    rows' sums `total` (rows,), of a shard of the vocabulary or not, it repairs by row. Returns the rows and the
    exponentials with what is repaired."""
    spec, bias = problem.spec, problem.linear_bias
    options = problem.vocab_axis, spec.logit_scale, spec.softcap, REPAIR_TILE
    count = () if problem.class_count is None else (problem.class_count,)
    of_head = {"ranged": False, "counted": bool(count), "head_parts": 1 + spec.splits_head}
    matmul = Matmul(size, problem.classes, *options, **of_head)
    static_args = Repair(matmul, min(matmul.tiles, REPAIR_PROGRAMS), top_exponent_of(problem))
    bias = None if bias is None else bias.astype(jnp.float32)
    of_target = jax.ShapeDtypeStruct((1, size), jnp.float32)
    by_block = jax.ShapeDtypeStruct((matmul.class_blocks, rows_of_sums(size, statistics)), jnp.float32)
    by_row = total, rows.ref_exponent if of_shard and total is not None else None
    others = (by_block if statistics & bit else None for bit in (ENTROPY, SQUARES))  # those of the exponentials
    made, e, others = (by_block, of_target, of_target, *others), found.e, found.others
    for step in (FINDS, REDOES):
        scalars = jnp.stack([place[FIRST_OF_X], place[FIRST_ROW], place[FIRST_FLAG], jnp.int32(step), *count])
        operands = scalars, x, problem.linear_weight, bias, rows.target, rows.flag, *by_row, rows.top, e, others
        results, in_place = (rows.top, e, others, *made), 1 + (e is not None) + (others is not None)
        top, e, others, *repaired = run(
            repair_kernel,
            static_args,
            operands,
            results,
            (static_args.programs,),
            in_place=in_place,
            stages=REPAIR_STAGES,
        )
        rows = rows._replace(top=top)
    return rows, found._replace(e=e, others=others), Repaired(*repaired)


def statistics_kernel(
    matmul: Matmul, scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, class_weight_ref: Any, target_ref: Any,
    top_ref: Any, sum_ref: Any, weighted_sum_ref: Any, sum_exp_log_ref: Any, target_logit_ref: Any, column_ref: Any,
    square_ref: Any,
) -> None:  # fmt: skip
    """Writes the statistics of a tile's rows over its classes, (class blocks, rows) each, and the logits of the targets
    in it, (rows,): (25)."""
    part = logits_tile(matmul, blocks_of(matmul, pl.program_id(0)), scalars_ref, x_ref, w_ref, bias_ref)
    put = partial(store, mask=part.inside)
    if weighted_sum_ref is not None:
        weighted = part.logits
        if class_weight_ref is not None:
            weighted = weighted * load(class_weight_ref, part.column, mask=part.column < class_weight_ref.shape[0])
        put(weighted_sum_ref, *part.by_block, values=part.only_seen(weighted).sum(1))
    logits = part.only_seen(part.logits, -jnp.inf)

    def put_target(logit: Array, owns: Array) -> None:
        store(target_logit_ref, part.row, values=logit, mask=owns)

    if target_ref is not None:
        at_targets(part, load(target_ref, part.row, mask=part.inside), part.logits, put_target)
    top = logits.max(1)
    put(top_ref, *part.by_block, values=top)
    shifted = logits - jnp.where(top == -jnp.inf, 0.0, top)[:, None]  # all -inf: sums of 0, not NaN
    exponentials = jnp.exp2(shifted * LOG2_E)
    put(sum_ref, *part.by_block, values=exponentials.sum(1))
    if column_ref is not None:
        column = (part.place - part.first).astype(jnp.float32)
        put(column_ref, *part.by_block, values=-jnp.where(logits == top[:, None], -column[None, :], -jnp.inf).max(1))
    if square_ref is not None:
        put(square_ref, *part.by_block, values=lax.square(exponentials).sum(1))
    if sum_exp_log_ref is not None:
        shifted = jnp.where(shifted < NO_PROBABILITY, NO_PROBABILITY, shifted)
        put(sum_exp_log_ref, *part.by_block, values=(exponentials * shifted).sum(1))


def statistics(
    x: Array, w: Array, bias: Array | None, class_weight: Array | None, start: Array | int, first_class: Array | int,
    skip: Array | int, *, rows: int, classes: int, vocab_axis: int, logit_scale: float, softcap: float | None,
    weighted: bool, statistics: int, target: Array | None = None,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Returns statistics of rows over a chunk of the classes, (rows,) float32 each: (25).

    Args:
        x, w, bias, start, rows, vocab_axis, logit_scale, softcap: of `exponentials`; bias is indexed as w is.
        class_weight: (V,) float32, indexed as w is, or None, which means ones.
        first_class, classes: the chunk, from class `first_class` of w on. A number or a scalar, as `skip` is.
        skip: how many classes at its start are skipped.
        weighted: whether the third result is computed.
        statistics: of `linear_ce.statistics`: whether the fourth and the last two results are computed.
        target: (rows,) int32, columns of the chunk that are not skipped, -1 for a target outside; or None.

    Returns:
        The largest logit and sums of exp(logits - max), class_weight * logits, exp(logits - max) * (logits - max); the
        target's summand of the first sum, and its logit, 0 where there is none; the column of the largest logit, int32,
        and the sum of exp(logits - max) ** 2. Results that are not computed are None.
    """
    crowded = softcap is not None or weighted or unaligned(w.shape[1], vocab_axis)
    tile = triton_tile(x.dtype.itemsize, crowded=crowded)
    matmul = Matmul(rows, classes, vocab_axis, logit_scale, softcap, tile)
    by_block = jax.ShapeDtypeStruct((matmul.class_blocks, rows), jnp.float32)
    operands = (x, w, bias, class_weight if weighted else None, target)
    of_target = None if target is None else jax.ShapeDtypeStruct((rows,), jnp.float32)
    sum_exp_log, columns, squares = (by_block if statistics & bit else None for bit in (ENTROPY, ARGMAX, SQUARES))
    results = (by_block, by_block, by_block if weighted else None, sum_exp_log, of_target, columns, squares)
    found = matmul.run(statistics_kernel, (start, first_class, skip), operands, results, matmul.tiles)
    tops, sums, weighted_sums, sums_exp_log, target_logit, columns, squares = found
    top = tops.max(0)  # (26), all blocks at once
    shift = jnp.where(tops == -jnp.inf, NO_PROBABILITY, tops - top)
    scale = jnp.exp(shift)
    sum_exp_log = None if sums_exp_log is None else (scale * (sums_exp_log + shift * sums)).sum(0)
    target_exp = None
    if target is not None:
        target_logit = jnp.where(target >= 0, target_logit, 0.0)
        # 1, the summand bit for bit, where the target's is the largest logit; else it is at most half of the sum.
        target_exp = jnp.where(target >= 0, jnp.exp(target_logit - top), 0.0)
    weighted_sum = None if weighted_sums is None else weighted_sums.sum(0)
    argmax = None
    if columns is not None:
        before = first_class % ALIGNED if vocab_axis == 1 else 0  # columns of the first block before the chunk
        argmax = first_of_largest(tops, columns, top, tile.block_v) - before
    sum_squared = None if squares is None else (lax.square(scale) * squares).sum(0)
    return top, (scale * sums).sum(0), weighted_sum, sum_exp_log, target_exp, target_logit, argmax, sum_squared


def d_logits_kernel(
    matmul: Matmul, scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, class_weight_ref: Any, target_ref: Any,
    lse_ref: Any, alpha_ref: Any, tau_ref: Any, beta_ref: Any, sigma_ref: Any, contributes_ref: Any, d_logits_ref: Any,
) -> None:  # fmt: skip
    """Writes a tile of d_logits (rows, padded): (23), (15)."""
    part = logits_tile(matmul, blocks_of(matmul, pl.program_id(0)), scalars_ref, x_ref, w_ref, bias_ref)

    def of_row(ref: Any) -> Array:
        return load(ref, part.row, mask=part.inside)[:, None]

    log_prob = part.logits - of_row(lse_ref)
    factor = of_row(alpha_ref)
    if beta_ref is not None:
        factor = factor + of_row(beta_ref) * jnp.where(log_prob < NO_PROBABILITY, NO_PROBABILITY, log_prob)
    d_logits = jnp.exp2(log_prob * LOG2_E) * factor
    if sigma_ref is not None:
        sigma = of_row(sigma_ref)
        if class_weight_ref is not None:
            sigma = sigma * load(class_weight_ref, part.column, mask=part.column < class_weight_ref.shape[0])
        d_logits = d_logits - sigma
    d_logits = jnp.where(part.column[None, :] == of_row(target_ref), d_logits - of_row(tau_ref), d_logits)
    if matmul.softcap is not None:
        d_logits = d_logits * slope(part.logits, matmul.softcap)
    d_logits = part.only_seen(jnp.where(of_row(contributes_ref) != 0, d_logits, 0.0))
    mask = part.inside[:, None] & ((part.place >= 0) & (part.place < d_logits_ref.shape[1]))[None, :]
    store(d_logits_ref, part.row[:, None], part.place[None, :], values=d_logits, mask=mask)


def d_logits(
    x: Array, w: Array, bias: Array | None, class_weight: Array | None, target: Array, lse: Array, alpha: Array,
    tau: Array, beta: Array | None, sigma: Array | None, contributes: Array, start: Array | int,
    first_class: Array | int, skip: Array | int, *, rows: int, classes: int, vocab_axis: int, logit_scale: float,
    softcap: float | None,
) -> Array:  # fmt: skip
    """Returns d_logits of rows and a chunk of the classes, (rows, padded) of x's dtype: (23), (15).

    Args:
        x, w, bias, class_weight, start, first_class, skip, rows, classes, vocab_axis, logit_scale, softcap: of
            `statistics`; what is skipped and what is past the last class is 0.
        target: (rows,) int32, classes as w counts them.
        lse, alpha, tau, beta, sigma: (rows,) float32; the last two may be None, which means zeros.
        contributes: (rows,) bool; the other rows are 0.
    """
    matmul = Matmul(rows, classes, vocab_axis, logit_scale, softcap, triton_tile(x.dtype.itemsize, crowded=True))
    of_rows = (target, lse, alpha, tau, beta, sigma, contributes.astype(jnp.int32))
    operands = (x, w, bias, None if sigma is None else class_weight, *of_rows)
    result = jax.ShapeDtypeStruct((rows, padded(classes)), x.dtype)
    return matmul.run(d_logits_kernel, (start, first_class, skip), operands, (result,), matmul.tiles)[0]
