"""The loss in chunks of XLA operators: the path for devices without kernels, and the baseline for the kernels.

The rows are processed in chunks. Within a chunk of rows the vocabulary is processed in vocabulary chunks, so only one
tile of the logits exists at a time:

    plan A  `loss_and_gradients`  gradients in the forward pass: 3 matmuls where the budget holds a chunk's logits in
                                  float32 between the passes, 4 where the second pass recomputes them
    plan B  `row_statistics`      no gradient: 1 matmul, a tile of logits at a time
    plan C  `gradients`           any upstream gradient: the logits are recomputed once lse is computed: 1 + 3 matmuls

All plans use the same two passes over a chunk, `chunk_statistics` and `chunk_gradients`. They process the classes from
`vocab_offset` on. Devices that divide the vocabulary exchange the results of each pass (`vocab_shard.py`). `Tiles`
computes a tile of a chunk of rows and a vocabulary chunk: with XLA here, with kernels in `recompute.py`, and for
float32 on a GPU in `stored_logits.py`, whose tiles have all classes.

The logits are float32, also for a 16-bit input. Rounding them to bfloat16 would change a probability by |logit| * 2**-8
of its value. At the logits of a trained model that is several times the error of everything else.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import row_math, vocab_shard
from jax_pallas.problem import Gradients, HeadSums, NeedsGrad, Problem, SavedRows, add_d_weight, float32_matmul
from jax_pallas.row_math import NO_PROBABILITY, Coefficients, Partial, RowStatistics
from jax_pallas.slicing import Slice, over_slices
from jax_pallas.token_hook import TokenHook, TokenRows
from linear_ce.chunking import ChunkConfig
from linear_ce.statistics import ARGMAX, BY_ROW, D_ENTROPY, ENTROPY, LOGIT_SUM, SQUARES

FLOAT16_HEADROOM = 14  # without its row's power of two |d_logits| < 3, and 3 * 2**14 < 65504


def logits_tile(problem: Problem, x: Array, w: Array, vocab_chunk: Slice) -> Array:
    """Returns the logits of rows `x` against the vocabulary chunk `w`, (n, v) float32, scaled and capped: MATH.md (1),
    (2)."""
    return finished_logits(problem, float32_matmul(x, w, (1, 1 - problem.vocab_axis)), vocab_chunk)


def finished_logits(problem: Problem, logits: Array, vocab_chunk: Slice) -> Array:
    """Returns the logits of a vocabulary chunk from the matmul (n, v): with the bias, scaled and capped."""
    if problem.linear_bias is not None:
        logits = logits + vocab_chunk.of(problem.linear_bias).astype(jnp.float32)
    if problem.spec.logit_scale != 1.0:
        logits = logits * problem.spec.logit_scale
    if problem.spec.softcap is not None:
        logits = jnp.tanh(logits / problem.spec.softcap) * problem.spec.softcap
    return logits


def tile_partial(problem: Problem, logits: Array, target: Array, vocab_chunk: Slice, statistics: int) -> Partial:
    """Returns the statistics of one tile of logits: MATH.md (25), (43)."""
    argmax = logit_sum = sum_squared = sum_exp_log = None
    if statistics & LOGIT_SUM:
        logit_sum = (logits if vocab_chunk.fresh is None else jnp.where(vocab_chunk.fresh, logits, 0.0)).sum(1)
    if vocab_chunk.fresh is not None:
        logits = jnp.where(vocab_chunk.fresh, logits, -jnp.inf)
    top = logits.max(1)
    if statistics & ARGMAX:
        argmax = problem.vocab_offset + vocab_chunk.start + logits.argmax(1).astype(jnp.int32)  # the first of equals
    shift = jnp.where(top == -jnp.inf, 0.0, top)  # all -inf: sums of 0, not NaN
    column, hit = problem.target_column(target, vocab_chunk)
    target_logit = jnp.take_along_axis(logits, column[:, None], 1)[:, 0]
    target_exp = jnp.where(hit, jnp.exp(target_logit - shift), 0.0)
    target_logit = jnp.where(hit, target_logit, 0.0)
    weighted_sum = None
    if problem.spec.label_smoothing:
        class_weight = problem.class_weight_of(vocab_chunk)
        weighted = logits if class_weight is None else logits * class_weight
        weighted_sum = (weighted if vocab_chunk.fresh is None else jnp.where(vocab_chunk.fresh, weighted, 0.0)).sum(1)
    shifted = logits - shift[:, None]
    sum_exp = jnp.exp(shifted).sum(1)
    if statistics & SQUARES:
        sum_squared = jnp.square(jnp.exp(shifted)).sum(1)
    if statistics & ENTROPY:
        shifted = jnp.maximum(shifted, NO_PROBABILITY)
        sum_exp_log = (jnp.exp(shifted) * shifted).sum(1)
    return Partial(top, sum_exp, target_exp, target_logit, weighted_sum, sum_exp_log, argmax, logit_sum, sum_squared)


def _partial(problem: Problem, x: Array, target: Array, vocab_chunk: Slice, statistics: int) -> tuple[Partial, Array]:
    logits = logits_tile(problem, x, problem.weight_of(vocab_chunk), vocab_chunk)
    if problem.spec.logit_scale != 1.0 or problem.spec.softcap is not None:
        # XLA would scale again in each loop that reads them, and round the multiplication and the subtraction of the
        # maximum once: then the target's summand is not the one of the sum.
        logits = lax.optimization_barrier(logits)
    return tile_partial(problem, logits, target, vocab_chunk, statistics), logits


def _d_logits(
    problem: Problem, x: Array, target: Array, vocab_chunk: Slice, row: "RowGradient", logits: Array | None
) -> tuple[Array, Array | None]:
    if logits is None:
        logits = logits_tile(problem, x, problem.weight_of(vocab_chunk), vocab_chunk)
    d_logits, summed = tile_d_logits(problem, logits, target, row, vocab_chunk), None
    if row.bias:
        summed = (d_logits if row.bias_scale is None else d_logits * row.bias_scale[:, None]).sum(0)
    return d_logits.astype(problem.input.dtype), summed


class Tiles(NamedTuple):
    """The functions that compute a tile: a chunk's rows x (n, D) and targets (n,) against a vocabulary chunk.

    Args:
        partial: returns the statistics of the tile and its logits (n, v), None if it does not store them.
        d_logits: returns the tile's d_logits (n, v) in input's dtype, perhaps with more rows and columns of zeros, and
            their sum over rows for d_bias, (v,) float32, if needed. It takes the tile's logits, or None to compute
            them.
        add_d_weight: `problem.add_d_weight` for these d_logits.
    """

    partial: Callable[..., tuple[Partial, Array | None]]
    d_logits: Callable[..., tuple[Array, Array | None]]
    add_d_weight: Callable[..., Array]


XLA_TILES = Tiles(_partial, _d_logits, add_d_weight)


class RowGradient(NamedTuple):
    """The values of a chunk's rows that its second pass needs, (n,) each.

    Args:
        lse: log-sum-exp over the whole vocabulary.
        coefficients: those of (23), times the logit scale.
        contributes: bool; the d_logits of other rows are 0.
        bias: whether d_bias is computed.
        bias_scale: factors of the rows' d_logits in d_bias; None is 1.
    """

    lse: Array
    coefficients: Coefficients
    contributes: Array
    bias: bool
    bias_scale: Array | None

    def of(self, rows: Slice) -> "RowGradient":
        """Returns the values of some of the rows."""
        coefficients = self.coefficients.map(rows.of)
        scale = None if self.bias_scale is None else rows.of(self.bias_scale)
        return RowGradient(rows.of(self.lse), coefficients, rows.of(self.contributes), self.bias, scale)


def chunk_statistics(
    problem: Problem,
    chunk: Slice,
    vocab_chunk_size: int,
    *,
    statistics: int = 0,
    keep: bool = False,
    tiles: Tiles = XLA_TILES,
) -> tuple[Partial, Array | None]:
    """First pass over a chunk: returns the statistics of its rows over all classes of the problem, also those of other
    devices, and the logits (n, K) of the classes of this one if `keep`."""
    x, target = problem.beside_head(problem.rows(chunk)), chunk.of(problem.target)
    empty = row_math.empty_partial(target, problem.spec, statistics)
    classes = problem.local_classes
    if not classes:
        return empty, jnp.zeros((chunk.size, 0), jnp.float32) if keep else None

    def body(carry: tuple[Partial, Array | None], vocab_chunk: Slice) -> tuple[tuple[Partial, Array | None], None]:
        merged, kept = carry
        vocab_chunk = problem.classes_of(vocab_chunk)
        partial, logits = tiles.partial(problem, x, target, vocab_chunk, statistics)
        if kept is not None and logits is not None:
            kept = vocab_chunk.put(kept, logits, axis=1)
        return (row_math.merge(merged, partial), kept), None

    kept = jnp.zeros((chunk.size, classes), jnp.float32) if keep else None
    (partial, kept), _ = over_slices(body, (empty, kept), classes, vocab_chunk_size)
    return vocab_shard.merged(problem.devices, partial), kept


def tile_d_logits(
    problem: Problem,
    logits: Array,
    target: Array,
    row: "RowGradient",
    vocab_chunk: Slice,
) -> Array:
    """Returns d_logits of a tile, the cap's slope included, the scale not: MATH.md (23), (15)."""
    lse, coefficients, contributes = row.lse, row.coefficients, row.contributes
    log_prob = jnp.maximum(logits - lse[:, None], NO_PROBABILITY)
    factor = coefficients.alpha[:, None]
    if coefficients.beta is not None:
        factor = factor + coefficients.beta[:, None] * log_prob
    d_logits = jnp.exp(log_prob) * factor
    if coefficients.sigma is not None:
        class_weight = problem.class_weight_of(vocab_chunk)
        d_logits = d_logits - coefficients.sigma[:, None] * (1.0 if class_weight is None else class_weight)
    d_logits = d_logits - jnp.where(_at_target(problem, target, vocab_chunk), coefficients.tau[:, None], 0.0)
    if problem.spec.softcap is not None:  # d tanh = 1 - tanh**2
        d_logits = d_logits * (1.0 - jnp.square(logits / problem.spec.softcap))
    seen = contributes[:, None] if vocab_chunk.fresh is None else contributes[:, None] & vocab_chunk.fresh
    return jnp.where(seen, d_logits, 0.0)


def chunk_gradients(
    problem: Problem,
    chunk: Slice,
    vocab_chunk_size: int,
    lse: Array,
    coefficients: Coefficients,
    sums: HeadSums,
    *,
    d_input: bool,
    kept: Array | None = None,
    scales: tuple[Array, Array] | None = None,
    saves: bool = False,
    tiles: Tiles = XLA_TILES,
) -> tuple[Array | None, HeadSums]:
    """Second pass over a chunk: returns its rows of d_input, (n, D) float32, and the head's sums with it added.

    Args:
        lse: (n,) log-sum-exp over the whole vocabulary.
        coefficients: (n,) each, times the upstream gradient.
        d_input: whether d_input is computed.
        kept: (n, K) logits of the first pass; None computes them again.
        scales: () factors of d_input and of the gradients of the head. d_weight has none with `Problem.grad_into`.
        saves: the powers of two that float16 needs are not factors of d_input, but of `SavedRows.rho`.
    """
    dtype, x, target = problem.input.dtype, problem.rows(chunk), chunk.of(problem.target)
    contributes = problem.chunk_row_weight(chunk) != 0
    coefficients = coefficients.map(lambda c: c * problem.spec.logit_scale)
    x_head = x  # the operand of d_weight
    input_scale = head_scale = bias_scale = None  # the factors that are applied after the matmuls of float16
    if dtype == jnp.float16:
        coefficients, exponent = row_math.split_exponents(coefficients, problem.class_weight)
        coefficients = coefficients.map(lambda c: c * 2.0**FLOAT16_HEADROOM)
        top = exponent.max()
        x_head = (x * row_math.power_of_two(exponent - top)[:, None]).astype(dtype)
        input_scale = bias_scale = row_math.power_of_two(exponent - FLOAT16_HEADROOM)
        head_scale = row_math.power_of_two(top - FLOAT16_HEADROOM)
        if saves:
            input_scale = jnp.full_like(lse, 2.0**-FLOAT16_HEADROOM)
        if scales is not None:
            input_scale, head_scale, bias_scale = (
                input_scale * scales[0],
                head_scale if problem.grad_into is not None else head_scale * scales[1],
                bias_scale * scales[1],
            )
    x = problem.beside_head(x)
    row = RowGradient(lse, coefficients, contributes, sums.d_bias is not None, bias_scale)

    def body(carry: tuple[Array | None, HeadSums], vocab_chunk: Slice) -> tuple[tuple[Array | None, HeadSums], None]:
        d_rows, (d_weight, d_bias) = carry
        vocab_chunk = problem.classes_of(vocab_chunk)
        logits = None if kept is None else vocab_chunk.of(kept, axis=1)
        d_logits, summed = tiles.d_logits(problem, x, target, vocab_chunk, row, logits)
        if d_bias is not None and summed is not None:
            d_bias = vocab_chunk.put(d_bias, vocab_chunk.of(d_bias) + summed)
        if d_rows is not None:
            own = d_logits[: chunk.size, : vocab_chunk.size]
            w, programs = problem.weight_of(vocab_chunk), problem.float32_programs
            d_rows = float32_matmul(own, w, (1, problem.vocab_axis), total=d_rows, programs=programs)
        if d_weight is not None:
            d_weight = tiles.add_d_weight(problem, d_logits, x_head, vocab_chunk, head_scale, d_weight)
        return (d_rows, HeadSums(d_weight, d_bias)), None

    zero = lax.optimization_barrier(jnp.float32(0))  # XLA would keep zeros for the last line, as large as the sum
    d_rows = jnp.full(x.shape, zero) if d_input else None
    if problem.local_classes:
        (d_rows, sums), _ = over_slices(body, (d_rows, sums), problem.local_classes, vocab_chunk_size)
    if d_rows is not None:
        if input_scale is not None:
            d_rows = d_rows * input_scale[:, None]
        if problem.spec.splits_head:  # the matmul with each half
            d_rows = d_rows.reshape(len(d_rows), 2, -1).sum(1)
        d_rows = vocab_shard.sum_of_d_input(problem.devices, d_rows)
        d_rows = jnp.where(contributes[:, None], d_rows, 0.0)
    return d_rows, sums


def losses(tiles: Tiles, problem: Problem, config: ChunkConfig, statistics: int) -> tuple[Array, RowStatistics]:
    """Plan B: returns the weighted loss (N,) and the statistics of each row, without gradients."""
    found = row_statistics(tiles, problem, config, statistics)
    target, row_weight, class_weight = problem.target, problem.row_weight, problem.class_weight
    return row_math.row_loss(problem.spec, found, target, row_weight, class_weight, problem.classes), found


def row_statistics(tiles: Tiles, problem: Problem, config: ChunkConfig, statistics: int) -> RowStatistics:
    """Plan B without the loss: returns the statistics of each row."""

    def body(carry: None, chunk: Slice) -> tuple[None, RowStatistics]:
        partial, _ = chunk_statistics(problem, chunk, config.first_vocab_chunk, statistics=statistics, tiles=tiles)
        row_weight = problem.chunk_row_weight(chunk)
        return carry, row_math.finish(partial, chunk.of(problem.target), row_weight, problem.classes)

    return over_slices(body, None, problem.tokens, config.rows)[1]


class ChunkRows(NamedTuple):
    """The rows of a chunk between its two passes."""

    chunk: Slice
    target: Array  # (n,)
    row_weight: Array  # (n,), 0 for rows that an earlier chunk has seen


def loss_and_gradients(
    tiles: Tiles,
    problem: Problem,
    config: ChunkConfig,
    needs_grad: NeedsGrad,
    scales: tuple[Array, Array] | None,
    statistics: int,
) -> tuple[Array, RowStatistics, Gradients]:
    """Plan A: each row's weighted loss (N,), its statistics, and the gradients of their sum, times `scales`."""
    classes = problem.classes

    def middle(
        rows: ChunkRows, part: RowStatistics, nothing: None
    ) -> tuple[tuple[Array, RowStatistics], Coefficients, None]:
        target, row_weight = rows.target, rows.row_weight
        loss = row_math.row_loss(problem.spec, part, target, row_weight, problem.class_weight, classes)
        coefficients = row_math.loss_coefficients(
            problem.spec, part.lse, target, row_weight, row_weight, problem.class_weight, classes
        )
        return (loss, part), coefficients, nothing

    (loss, parts), gradients, _ = _plan_a(tiles, problem, config, needs_grad, scales, middle, None, statistics)
    return loss, parts, gradients


def token_loss_and_gradients(
    tiles: Tiles,
    problem: Problem,
    config: ChunkConfig,
    needs_grad: NeedsGrad,
    scales: tuple[Array, Array] | None,
    hook: TokenHook,
    statistics: int,
) -> tuple[TokenRows, RowStatistics | None, Gradients]:
    """Plan A with a token loss: the results of all rows, their statistics if there are `statistics`, and the gradients
    of the sum of their losses, times `scales`.

    `scales` does not apply to the gradients in `TokenRows`.
    """

    def middle(
        rows: ChunkRows, part: RowStatistics, d_closure: tuple[Array | None, ...]
    ) -> tuple[tuple[TokenRows, RowStatistics | None], Coefficients, tuple[Array | None, ...]]:
        assert part.nll is not None
        entropy = part.entropy if statistics & D_ENTROPY else None
        found = hook.of_chunk(rows.chunk, 0.0 - part.nll, rows.row_weight, entropy)  # -nll could be -0.0
        d_closure = jax.tree.map(jnp.add, d_closure, found.d_closure)
        of_rows = found._replace(d_closure=(), d_entropy=None), part if statistics & ~BY_ROW else None
        return of_rows, token_coefficients(problem, found, rows, part), d_closure

    (rows, parts), gradients, d_closure = _plan_a(
        tiles, problem, config, needs_grad, scales, middle, hook.zeros_of_closure(), statistics
    )
    return rows._replace(d_closure=d_closure), parts, gradients


def _plan_a(
    tiles: Tiles,
    problem: Problem,
    config: ChunkConfig,
    needs_grad: NeedsGrad,
    scales: tuple[Array, Array] | None,
    middle: Callable[["ChunkRows", RowStatistics, Any], tuple[Any, Coefficients, Any]],
    summed: Any,
    statistics: int = 0,
) -> tuple[Any, Gradients, Any]:
    """Runs both passes over each chunk, with `middle` between them.

    Args:
        middle: takes a chunk's rows, their statistics and sums over the chunks before. Returns results of the rows,
            (n,) each, the coefficients of their gradients, and the sums.
        summed: the sums before the first chunk.

    Returns:
        The results of all rows, the gradients, and the sums.
    """
    classes = problem.classes

    def body(carry: tuple[Array | None, HeadSums, Any], chunk: Slice) -> tuple[tuple[Array | None, HeadSums, Any], Any]:
        d_input, sums, summed = carry
        target, row_weight = chunk.of(problem.target), problem.chunk_row_weight(chunk)
        partial, kept = chunk_statistics(
            problem, chunk, config.first_vocab_chunk, statistics=statistics, keep=config.keeps_logits, tiles=tiles
        )
        part = row_math.finish(partial, target, row_weight, classes)
        found, coefficients, summed = middle(ChunkRows(chunk, target, row_weight), part, summed)
        d_rows, sums = chunk_gradients(
            problem,
            chunk,
            config.vocab_chunk,
            part.lse,
            coefficients,
            sums,
            d_input=needs_grad.d_input,
            kept=kept,
            scales=scales,
            tiles=tiles,
        )
        return (chunk.put_fresh(d_input, d_rows), sums, summed), found

    d_input = jnp.zeros_like(problem.input) if needs_grad.d_input else None
    start = (d_input, HeadSums.zeros(problem, needs_grad, float32_sum=config.float32_sum), summed)
    (d_input, sums, summed), found = over_slices(body, start, problem.tokens, config.rows)
    return found, Gradients(d_input, *sums.result(problem)), summed


def token_coefficients(problem: Problem, found: TokenRows, rows: ChunkRows, part: RowStatistics) -> Coefficients:
    """Returns the coefficients of rows, given the results of their token losses and their statistics."""
    coefficients = row_math.loss_coefficients(
        problem.spec, part.lse, rows.target, found.gradient_weight, rows.row_weight, None, problem.classes
    )
    if found.d_entropy is None or part.entropy is None:
        return coefficients
    return row_math.with_entropy(coefficients, found.d_entropy, part.entropy)


def gradients(
    tiles: Tiles,
    problem: Problem,
    config: ChunkConfig,
    lse: Array,
    coefficients: Coefficients,
    needs_grad: NeedsGrad,
    scales: tuple[Array, Array] | None = None,
) -> Gradients:
    """Plan C's backward pass: the gradients for any upstream gradient, given lse, times `scales`."""

    def body(carry: tuple[Array | None, HeadSums], chunk: Slice) -> tuple[tuple[Array | None, HeadSums], None]:
        d_input, sums = carry
        part = coefficients.map(chunk.of)
        d_rows, sums = chunk_gradients(
            problem,
            chunk,
            config.vocab_chunk,
            chunk.of(lse),
            part,
            sums,
            d_input=needs_grad.d_input,
            scales=scales,
            tiles=tiles,
        )
        return (chunk.put_fresh(d_input, d_rows), sums), None

    d_input = jnp.zeros_like(problem.input) if needs_grad.d_input else None
    start = (d_input, HeadSums.zeros(problem, needs_grad, float32_sum=config.float32_sum))
    (d_input, sums), _ = over_slices(body, start, problem.tokens, config.rows)
    return Gradients(d_input, *sums.result(problem))


def save_rows(
    tiles: Tiles, problem: Problem, config: ChunkConfig, needs_grad: NeedsGrad, statistics: int
) -> tuple[Array, RowStatistics, SavedRows]:
    """Plan A without the gradients of the head, for an upstream gradient of 1: each row's weighted loss (N,), its
    statistics, and what `saved_gradients` needs."""
    classes, dtype, spec = problem.classes, problem.input.dtype, problem.spec
    own_classes = problem.local_classes
    head = needs_grad.d_weight or needs_grad.d_bias

    def stored(problem: Problem, d_logits: Array, x: Array, vocab_chunk: Slice, scale: Array | None, e: Array) -> Array:
        if vocab_chunk.fresh is not None:
            d_logits = jnp.where(vocab_chunk.fresh, d_logits, vocab_chunk.of(e, axis=1))
        return vocab_chunk.put(e, d_logits, axis=1)

    def body(carry: tuple[Array | None, Array | None, Array], chunk: Slice) -> tuple[Any, Any]:
        e, d_input, seen_weight = carry
        target, row_weight = chunk.of(problem.target), problem.chunk_row_weight(chunk)
        partial, kept = chunk_statistics(
            problem, chunk, config.first_vocab_chunk, statistics=statistics, keep=config.keeps_logits, tiles=tiles
        )
        part = row_math.finish(partial, target, row_weight, classes)
        loss = row_math.row_loss(spec, part, target, row_weight, problem.class_weight, classes)
        coefficients = row_math.loss_coefficients(
            spec, part.lse, target, row_weight, row_weight, problem.class_weight, classes
        )
        # A row of NaN must have a zero gradient if its upstream gradient is 0: its zeros are saved, and rho is NaN.
        lost = (row_weight != 0) & ~row_math.finite(part.lse, coefficients)
        rho = jnp.where(lost, jnp.nan, 1.0)
        if dtype == jnp.float16:
            scaled = coefficients.map(lambda c: c * spec.logit_scale)
            rho = rho * row_math.power_of_two(row_math.split_exponents(scaled, problem.class_weight)[1])
        seen_weight = chunk.put(seen_weight, jnp.where(lost, 0.0, row_weight))
        seen = replace(problem, row_weight=seen_weight)
        d_rows, (of_chunk, _) = chunk_gradients(
            seen,
            chunk,
            config.vocab_chunk,
            part.lse,
            coefficients,
            HeadSums(jnp.zeros((chunk.size, own_classes), dtype) if head else None, None),
            d_input=needs_grad.d_input,
            kept=kept,
            saves=True,
            tiles=tiles._replace(add_d_weight=stored),
        )
        return (chunk.put_fresh(e, of_chunk), chunk.put_fresh(d_input, d_rows), seen_weight), (loss, part, rho)

    e = jnp.zeros((problem.tokens, own_classes), dtype) if head else None
    d_input = jnp.zeros_like(problem.input) if needs_grad.d_input else None
    start = e, d_input, problem.row_weight
    (e, d_input, _), (loss, parts, rho) = over_slices(body, start, problem.tokens, config.rows)
    return loss, parts, SavedRows(e, d_input, rho, None)


def saved_gradients(
    problem: Problem, config: ChunkConfig, saved: SavedRows, needs_grad: NeedsGrad, others: Gradients
) -> Gradients:
    """Returns the gradients of the head by saved rows, added to those by other rows: (42). The row weights of the
    problem are the upstream gradients times rho."""
    if saved.e is None:
        return others
    dtype, factor, rows_of_e = problem.input.dtype, problem.row_weight, saved.e
    start = HeadSums.zeros(problem, needs_grad, float32_sum=config.float32_sum)
    d_weight, d_bias = (
        zeros if zeros is None or other is None else other.astype(zeros.dtype)
        for zeros, other in zip(start, others[1:], strict=True)
    )
    scale, of_x = None, factor
    if dtype == jnp.float16:  # the largest factor becomes a number below 1
        exponent = row_math.exponent_of(factor)
        of_x, scale = factor * row_math.power_of_two(-exponent), row_math.power_of_two(exponent - FLOAT16_HEADROOM)

    def of_rows(sums: HeadSums, chunk: Slice) -> tuple[HeadSums, None]:
        x = (problem.rows(chunk) * chunk.of(of_x)[:, None]).astype(dtype)
        weights = problem.chunk_row_weight(chunk) * (1.0 if scale is None else 2.0**-FLOAT16_HEADROOM)
        e_rows = chunk.of(rows_of_e)

        def of_tile(sums: HeadSums, vocab_chunk: Slice) -> tuple[HeadSums, None]:
            d_weight, d_bias = sums
            e = vocab_chunk.of(e_rows, axis=1)
            if vocab_chunk.fresh is not None:
                e = jnp.where(vocab_chunk.fresh, e, 0)
            if d_bias is not None:
                summed = (e.astype(jnp.float32) * weights[:, None]).sum(0)
                d_bias = vocab_chunk.put(d_bias, vocab_chunk.of(d_bias) + summed)
            if d_weight is not None:
                d_weight = add_d_weight(problem, e, x, vocab_chunk, scale, d_weight)
            return HeadSums(d_weight, d_bias), None

        return over_slices(of_tile, sums, problem.local_classes, config.vocab_chunk)

    sums, _ = over_slices(of_rows, HeadSums(d_weight, d_bias), problem.tokens, config.rows)
    return Gradients(None, *sums.result(problem))


def _at_target(problem: Problem, target: Array, vocab_chunk: Slice) -> Array:
    """Returns (n, v) bool, true at each row's target; in one vocabulary chunk only, the one that is fresh there."""
    columns = problem.vocab_offset + vocab_chunk.start + jnp.arange(vocab_chunk.size)
    hit = target[:, None] == columns
    return hit if vocab_chunk.fresh is None else hit & vocab_chunk.fresh
