"""Pallas kernels for any GPU from Ampere on, through Pallas' Triton backend: the implementation "pallas_triton".

How they are launched is in `triton_launch.py`; core_triton/kernels.py and target_kernels.py are the same in Triton. A
program owns a tile and writes each output alone, so results repeat bit for bit; what is summed over tiles is reduced by
XLA. Nothing is sliced, padded or copied before. Lowered for a CPU, a kernel runs in Pallas' interpreter. Equations:
linear_ce/MATH.md.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jax_pallas.triton_launch import arange, load, run, store

LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634
NO_PROBABILITY = -1e4  # a log-probability whose exp is 0, finite so that 0 times it is 0
BLOCK_N, GROUP = 128, 8  # rows of a tile, and of a flag of `redo`; row blocks beside each other on a block of classes
REDO_PROGRAMS = 256  # of a repair, which seldom has work: two for each multiprocessor of a large GPU
ALIGNED = 16  # classes: 32 bytes of 16 bits, which is what the compiler takes for granted of an array's address
FEW, MANY, SHARES = 4, 32, 4  # rows at a time of a run of equal targets, of a long one, and who shares its columns


class Tile(NamedTuple):
    """BLOCK_N rows x block_v classes of logits, summed over block_d columns of x at a time."""

    block_v: int
    block_d: int


def tile_of(dtype: Any, *, sloped: bool) -> Tile:
    """Returns the tile for operands of a dtype; `sloped` where a slope or a gradient is kept beside each logit.

    A thread holds 128 float32 sums in its 255 registers, 64 where each has company; and 64 for float32, which no matrix
    unit multiplies: operands take registers too. All fit an A100's shared memory; none spills there or on a Hopper.
    """
    if jnp.dtype(dtype).itemsize == 4:
        return Tile(128, 32)
    return Tile(128 if sloped else 256, 64)


def limits(dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns a sentence that names what keeps these kernels from serving a call, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"pallas_triton multiplies bfloat16, float16 or float32, not {jnp.dtype(dtype).name}"
    if not 0 < hidden < 2**30 or not 0 < vocab < 2**30:  # indices are int32 and run a tile past the end
        return f"pallas_triton needs sizes from 1 to 2**30 - 1, got a hidden size of {hidden} and {vocab} classes"
    return None if vocab_axis in (0, 1) else f"pallas_triton needs vocab_axis 0 or 1, got {vocab_axis}"


def padded(classes: int) -> int:  # columns of a matrix of so many, here as in the Hopper kernels
    return pl.cdiv(classes, 64) * 64


class Matmul(NamedTuple):
    """The matmul that a kernel makes of rows of x and classes of w, and what makes logits of it."""

    rows: int
    classes: int
    vocab_axis: int
    logit_scale: float
    softcap: float | None
    tile: Tile
    ranged: bool = True  # of w only some classes: the device knows the first, and how many after it are left out

    @property
    def class_blocks(self) -> int:
        return pl.cdiv(self.classes + (ALIGNED - 1 if self.ranged and self.vocab_axis == 1 else 0), self.tile.block_v)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.rows, BLOCK_N) * self.class_blocks

    def run(
        self, kernel: Callable[..., None], scalars: Any, operands: Any, results: Any, programs: int, **in_place: Any
    ) -> Any:
        """Runs a kernel on int32 scalars, which it gets as one array, and operands."""
        operands = (jnp.stack([jnp.asarray(scalar, jnp.int32) for scalar in scalars]), *operands)
        return run(kernel, self, operands, results, (programs,), **in_place)


class LogitsTile(NamedTuple):
    """A tile of logits, (block_n, block_v) float32, and where it is."""

    logits: Array
    row: Array  # (block_n,)
    inside: Array  # (block_n,) bool: these rows are there
    column: Array  # (block_v,) of w
    place: Array  # (block_v,) within the chunk of classes
    first: Array  # the first of it
    seen: Array | None  # (1, block_v) bool: these classes count; None: all
    by_block: tuple[Array, Array]  # where a value for each row goes in (class blocks, rows)

    def only_seen(self, values: Array, other: float = 0.0) -> Array:
        return values if self.seen is None else jnp.where(self.seen, values, other)


def blocks_of(matmul: Matmul, tile: Any) -> tuple[Array, Array]:
    """Returns the row block and the class block of a tile: GROUP row blocks first, then the next class block."""
    group = lax.div(tile, GROUP * matmul.class_blocks)
    within = tile - group * (GROUP * matmul.class_blocks)
    size = lax.min(pl.cdiv(matmul.rows, BLOCK_N) - group * GROUP, jnp.int32(GROUP))
    return group * GROUP + lax.rem(within, size), lax.div(within, size)


def logits_tile(
    matmul: Matmul, blocks: tuple[Array, Array], scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any
) -> LogitsTile:
    """Computes a tile of logits: (1), (2). Past the last row it repeats it; columns not seen hold anything."""
    tile, axis, hidden, end = matmul.tile, matmul.vocab_axis, x_ref.shape[1], w_ref.shape[matmul.vocab_axis]
    row = arange(blocks[0] * BLOCK_N, BLOCK_N)
    first_place = blocks[1] * tile.block_v
    column = place = arange(first_place, tile.block_v)
    seen = (place < matmul.classes)[None, :] if matmul.classes % tile.block_v else None
    if matmul.ranged:
        first, skip = scalars_ref[1], scalars_ref[2]
        if axis == 1:  # from a multiple of ALIGNED on, or else each column would be loaded by itself
            before = lax.rem(first, jnp.int32(ALIGNED))
            place, first_place = place - before, first_place - before
            first = pl.multiple_of(first - before, ALIGNED)
        column = first + column
        seen = ((place >= skip) & (place < matmul.classes))[None, :]
    x_row = (scalars_ref[0] + lax.min(row, jnp.int32(matmul.rows - 1)))[:, None]

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
        return raw + lax.dot_general(x, w, contract, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    logits = lax.fori_loop(0, pl.cdiv(hidden, tile.block_d), step, jnp.zeros((BLOCK_N, tile.block_v), jnp.float32))
    if bias_ref is not None:
        logits = logits + load(bias_ref, column, mask=column < bias_ref.shape[0])[None, :]
    if matmul.logit_scale != 1.0:
        logits = logits * matmul.logit_scale
    if matmul.softcap is not None:  # by way of tanh(t) = 1 - 2 / (1 + exp(2 t)): one number a logit, no branch
        root = lax.rsqrt(1.0 + jnp.exp2(logits * (2.0 * LOG2_E / matmul.softcap)))
        logits = matmul.softcap - (2.0 * matmul.softcap) * (root * root)
    return LogitsTile(logits, row, row < matmul.rows, column, place, first_place, seen, (blocks[1], row))


def slope(logits: Array, softcap: float) -> Array:
    """Returns the derivative of the cap at capped logits: (15)."""
    return 1.0 - lax.square(logits * (1.0 / softcap))


def at_targets(part: LogitsTile, target_ref: Any, values: Array, put: Callable[[Array, Array], None]) -> None:
    """Calls put(found, owns), (block_n,) each, if the tile holds targets: of values (block_n, block_v), what each row's
    target has, and whether it is in this tile. Most tiles hold none; and behind the branch registers suffice."""
    target = load(target_ref, part.row, mask=part.inside)
    owns = part.inside & (target >= 0) & (target >= part.first) & (target < part.first + part.place.shape[0])

    @pl.when(owns.astype(jnp.int32).max() != 0)
    def _found() -> None:
        put(jnp.where(part.place[None, :] == target[:, None], values, 0.0).sum(1), owns)


class ExponentialsIO(NamedTuple):
    """What `exponentials_kernel` reads beside the operands of the logits, and writes: None where not asked for."""

    anchor_ref: Any  # (rows,)
    target_ref: Any  # (rows,)
    e_ref: Any  # (rows, padded)
    sum_ref: Any  # (class blocks, rows)
    top_ref: Any  # (class blocks, rows)
    target_exp_ref: Any  # (rows,)
    target_logit_ref: Any  # (rows,)


def exponential(logits: Array, reference: Array) -> Array:
    """Returns exp(logits - reference).

    Subtracted first: Triton under XLA fuses no multiplication with a subtraction, and a large logit times LOG2_E, once
    rounded, says little of its distance to the reference.
    """
    return jnp.exp2((logits - reference) * LOG2_E)


def exponentials_tile(
    matmul: Matmul, blocks: tuple[Array, Array], scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any,
    io: ExponentialsIO,
) -> None:  # fmt: skip
    """Does a tile of `exponentials_kernel`."""
    part = logits_tile(matmul, blocks, scalars_ref, x_ref, w_ref, bias_ref)
    if io.top_ref is not None:
        store(io.top_ref, *part.by_block, values=part.only_seen(part.logits, -jnp.inf).max(1), mask=part.inside)
    reference = load(io.anchor_ref, part.row, mask=part.inside) * LN_2

    def put_target(logit: Array, owns: Array) -> None:
        store(io.target_exp_ref, part.row, values=exponential(logit, reference), mask=owns)
        store(io.target_logit_ref, part.row, values=logit, mask=owns)

    if io.target_ref is not None:  # one look at the tile for both, or registers would spill
        at_targets(part, io.target_ref, part.logits, put_target)
    exponentials = part.only_seen(exponential(part.logits, reference[:, None]))
    if io.sum_ref is not None:
        store(io.sum_ref, *part.by_block, values=exponentials.sum(1), mask=part.inside)
    if io.e_ref is not None:
        if matmul.softcap is not None:
            exponentials = part.only_seen(exponentials * slope(part.logits, matmul.softcap))
        mask = part.inside[:, None] & (part.place < io.e_ref.shape[1])[None, :]
        store(io.e_ref, part.row[:, None], part.place[None, :], values=exponentials, mask=mask)


def exponentials_kernel(
    matmul: Matmul, scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, anchor_ref: Any, target_ref: Any,
    redo_ref: Any, _: Any, *results: Any,
) -> None:  # fmt: skip
    """Writes what is asked for of `ExponentialsIO`: (29), (31).

    A program owns a tile; with redo, every REDO_PROGRAMS-th tile, of which it does those of flagged rows.
    """
    io, operands, program = ExponentialsIO(anchor_ref, target_ref, *results), (x_ref, w_ref, bias_ref), pl.program_id(0)
    if redo_ref is None:
        return exponentials_tile(matmul, blocks_of(matmul, program), scalars_ref, *operands, io)

    def step(index: Any, _: None) -> None:
        tile = program + index * REDO_PROGRAMS
        blocks = blocks_of(matmul, lax.min(tile, jnp.int32(matmul.tiles - 1)))
        wanted = (tile < matmul.tiles) & (redo_ref[1 + blocks[0]] != 0)
        pl.when(wanted)(lambda: exponentials_tile(matmul, blocks, scalars_ref, *operands, io))

    steps = jnp.where(redo_ref[0] != 0, jnp.int32(pl.cdiv(matmul.tiles, REDO_PROGRAMS)), jnp.int32(0))
    lax.fori_loop(jnp.int32(0), steps, step, None)


def exponentials(
    x: Array, w: Array, bias: Array | None, anchor: Array, start: Array | int, *, rows: int, classes: int,
    vocab_axis: int, logit_scale: float, softcap: float | None, stores: bool, largest: bool,
    target: Array | None = None, redo: Array | None = None, e: Array | None = None,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Returns scaled exponentials of rows' logits, their sums and the rows' largest logits: (29), (31).

    Args:
        x: (N, D), of which rows `start` to `start` + `rows` count.
        w: (V, D), or (D, V) where `vocab_axis` is 1; the first `classes` are classes.
        bias, anchor: at least (classes,) float32, or None; (rows,) float32 integers.
        start: a number, or an int32 scalar of the device; what follows it is known when the call is traced.
        stores, largest: whether the exponentials, the largest logits are wanted.
        target: (rows,) int32 classes, -1 for none, or None; of a target comes back what its sum was made of.
        redo: (1 + rows / 128 rounded up,) int32, or None: everything. If its first is 0 nothing is done, else the
            blocks of 128 rows whose flags, which follow, are not 0: the largest logits instead of sums, if wanted.
        e: where `redo` is given and `stores`: the exponentials, of which those blocks are written, in place.

    Returns:
        e (rows, padded) bfloat16, times the cap's slope, 0 past the last class, or None.
        sums of the exponentials before they are rounded, and tops; (rows,) float32 or None, anything in rows not done.
        the targets' exponentials, before they are rounded, and logits; (rows,) float32, 0 without a target, or None.
    """
    tile = tile_of(x.dtype, sloped=stores and softcap is not None)
    if redo is not None:
        tile = tile._replace(block_d=32)  # the loop over tiles takes registers
    matmul = Matmul(rows, classes, vocab_axis, logit_scale, softcap, tile, ranged=False)
    by_block = jax.ShapeDtypeStruct((matmul.class_blocks, rows), jnp.float32)
    stored = jax.ShapeDtypeStruct((rows, padded(classes)), jnp.bfloat16) if stores else None
    wanted = redo is None or not largest, largest
    of_target = None if target is None else jax.ShapeDtypeStruct((rows,), jnp.float32)
    operands = (x, w, bias, anchor, target, redo, e)
    results = (stored, *(by_block if one else None for one in wanted), of_target, of_target)
    programs = matmul.tiles if redo is None else min(matmul.tiles, REDO_PROGRAMS)
    found = matmul.run(exponentials_kernel, (start,), operands, results, programs, in_place=e is not None)
    e, sums, tops, *of_target = found
    sums, tops = None if sums is None else sums.sum(0), None if tops is None else tops.max(0)
    return e, sums, tops, *(None if target is None else jnp.where(target >= 0, value, 0.0) for value in of_target)


def statistics_kernel(
    matmul: Matmul, scalars_ref: Any, x_ref: Any, w_ref: Any, bias_ref: Any, class_weight_ref: Any, target_ref: Any,
    top_ref: Any, sum_ref: Any, weighted_sum_ref: Any, sum_exp_log_ref: Any, target_logit_ref: Any,
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
        at_targets(part, target_ref, part.logits, put_target)
    top = logits.max(1)
    put(top_ref, *part.by_block, values=top)
    shifted = logits - jnp.where(top == -jnp.inf, 0.0, top)[:, None]  # all -inf: sums of 0, not NaN
    exponentials = jnp.exp2(shifted * LOG2_E)
    put(sum_ref, *part.by_block, values=exponentials.sum(1))
    if sum_exp_log_ref is not None:
        shifted = jnp.where(shifted < NO_PROBABILITY, NO_PROBABILITY, shifted)
        put(sum_exp_log_ref, *part.by_block, values=(exponentials * shifted).sum(1))


def statistics(
    x: Array, w: Array, bias: Array | None, class_weight: Array | None, start: Array | int, first_class: Array | int,
    skip: Array | int, *, rows: int, classes: int, vocab_axis: int, logit_scale: float, softcap: float | None,
    weighted: bool, entropy: bool, target: Array | None = None,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Returns statistics of rows over a chunk of the classes, (rows,) float32 each: (25).

    Args:
        x, w, bias, start, rows, vocab_axis, logit_scale, softcap: of `exponentials`; bias is indexed as w is.
        class_weight: (V,) float32, indexed as w is, or None, which means ones.
        first_class, classes: the chunk, from class `first_class` of w on. A number or a scalar, as `skip` is.
        skip: how many classes at its start are left out.
        weighted, entropy: whether the third, the fourth are wanted.
        target: (rows,) int32, places in the chunk, none of which is left out, -1 for none; or None.

    Returns:
        The largest logit and sums of exp(logits - max), class_weight * logits, exp(logits - max) * (logits - max); the
        target's summand of the first sum, and its logit, 0 where there is none. None what is not wanted.
    """
    matmul = Matmul(rows, classes, vocab_axis, logit_scale, softcap, tile_of(x.dtype, sloped=softcap is not None))
    by_block = jax.ShapeDtypeStruct((matmul.class_blocks, rows), jnp.float32)
    operands = (x, w, bias, class_weight if weighted else None, target)
    of_target = None if target is None else jax.ShapeDtypeStruct((rows,), jnp.float32)
    results = (by_block, by_block, by_block if weighted else None, by_block if entropy else None, of_target)
    found = matmul.run(statistics_kernel, (start, first_class, skip), operands, results, matmul.tiles)
    tops, sums, weighted_sums, sums_exp_log, target_logit = found
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
    return top, (scale * sums).sum(0), weighted_sum, sum_exp_log, target_exp, target_logit


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
    matmul = Matmul(rows, classes, vocab_axis, logit_scale, softcap, tile_of(x.dtype, sloped=True))
    of_rows = (target, lse, alpha, tau, beta, sigma, contributes.astype(jnp.int32))
    operands = (x, w, bias, None if sigma is None else class_weight, *of_rows)
    result = jax.ShapeDtypeStruct((rows, padded(classes)), x.dtype)
    return matmul.run(d_logits_kernel, (start, first_class, skip), operands, (result,), matmul.tiles)[0]


class TargetRows(NamedTuple):
    """What `target_rows_kernel` knows when the call is traced, and reads and writes."""

    vocab_axis: int  # of d_weight
    width: int  # columns of a program
    target_ref: Any  # (N,), sorted
    row_ref: Any  # (N,)
    theta_ref: Any  # (N,)
    x_ref: Any  # (rows, D)
    d_weight_ref: Any  # (V, D) or (D, V)


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
    place = (target, depth) if io.vocab_axis == 0 else (depth, target)
    old = load(io.d_weight_ref, *place, mask=inside).astype(jnp.float32)
    store(io.d_weight_ref, *place, values=old + total.sum(0), mask=inside)


def target_rows_kernel(
    options: tuple[int, int], target_ref: Any, row_ref: Any, theta_ref: Any, x_ref: Any, _: Any, d_weight_ref: Any
) -> None:
    """Adds the targets' terms, theta * x, to their rows of d_weight: (33).

    A program has a position and some columns. Most runs are short: the program at a run's first position sums it. A few
    run through a tenth of the rows: the programs at the first SHARES positions share the columns of those of MANY rows.
    """
    io = TargetRows(*options, target_ref, row_ref, theta_ref, x_ref, d_weight_ref)
    count, width = target_ref.shape[0], io.width
    position, column = pl.program_id(0), pl.program_id(1) * width
    target = target_ref[position]
    before = position - 1 - jnp.arange(SHARES, dtype=jnp.int32)
    equal = (before >= 0) & (load(target_ref, before, mask=before >= 0) == target)
    offset = equal.astype(jnp.int32).sum()  # within the run, as far as SHARES
    first = position - offset
    last = first + MANY - 1
    long = (last < count) & (target_ref[lax.min(last, jnp.int32(count - 1))] == target)
    is_class = (target >= 0) & (target < d_weight_ref.shape[io.vocab_axis])
    part = width // SHARES
    pl.when(is_class & long & (offset < SHARES))(
        lambda: add_target_rows(io, target, first, column + offset * part, part, MANY)
    )
    pl.when(is_class & ~long & (offset == 0))(lambda: add_target_rows(io, target, first, column, width, FEW))


def add_targets(d_weight: Array, x: Array, target: Array, row: Array, theta: Array, *, vocab_axis: int) -> Array:
    """Returns d_weight, in its place, with the terms of each class, theta * x, added to its row, rounded once: (33).

    Args:
        d_weight: (V, D), or (D, V) where `vocab_axis` is 1.
        x: (rows, D).
        target: (N,) int32 in ascending order; those that are no class are skipped.
        row: (N,) int32, whose row of x it is.
        theta: (N,) float32; where it is 0 nothing is added, whatever x holds.
    """
    if not target.size:
        return d_weight
    width = min(512, max(64, pl.next_power_of_2(x.shape[1])))
    operands, result = (target, row, theta, x, d_weight), jax.ShapeDtypeStruct(d_weight.shape, d_weight.dtype)
    launch = {"grid": (target.size, pl.cdiv(x.shape[1], width)), "warps": 4, "stages": 1}
    return run(target_rows_kernel, (vocab_axis, width), operands, (result,), in_place=True, **launch)[0]
