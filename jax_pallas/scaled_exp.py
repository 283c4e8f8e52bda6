"""Plans A and B with scaled exponentials: the exponentials of each row relative to a per-row reference.

The reference of a row is 2**k, and the integer k is its reference exponent. The kernels store
2**(logit * log2(e) - k) (MATH.md section 8). The scale changes no mantissa, so the results do not depend on k as long
as the exponentials stay within the range of bfloat16. At first k comes from the target's logit. Row blocks that leave
the range are computed again with k from the largest logit. float16 has a smaller range: `float16.py`.

Plan A is three matmuls. The first computes the logits and stores their exponentials. The gradients are matmuls of the
exponentials. Plan A with scaled exponentials is for bfloat16 and float16, with label smoothing where its terms are of
rank one (`smoothing.py`). The backward pass of plan C runs it too, with the upstream gradients as row weights.
`row_kernels.pick` first computes the reference exponents of all rows and copies the rows of the input that
contribute. The steps for each chunk of rows:

    exponentials and their sums                           `_store_exponentials`
    loss, and the factors of rows; x becomes rho x        `_finish_rows`, for float16 `_fit_in_float16`
    d_weight += E^T (rho x)                               `_add_d_weight`
    d_input = rho (E W) + theta w_target                  `_store_d_input`

`ScaledExpCall` is one call: its method `run` has the steps of the call, and `_chunk` those of a chunk. A token loss is
called between the first two steps (`_call_token_loss`). The weights of (35) take the place of the row weights in the
steps after it.

At the end the targets' terms of d_weight are added for all rows (`_finish_head`). Plan B is the first two steps, in any
dtype. It stores only the sums.

A float32 head may be split in two matrices of the input's dtype: (39). Kernels split it as they read it, in registers.
Copies of both halves of a vocabulary chunk are taken by XLA's matmuls of d_input, and by the Hopper kernel of the
logits for shards and for heads whose rows TMA cannot read (`ExecutionPlan.splits_in_place`). d_weight is float32 then.
Shards of a float32 head may also be rounded, to one such matrix.

A first chunk may be larger than the others, with most of its exponentials in the memory of d_weight, which is not
written yet (`first_chunk.py`). Its d_input is computed before its d_weight.

The memory of d_input holds the rows of the input, with zeros in rows that do not contribute, until a chunk's rows of
d_input replace them. So a chunk takes little memory besides its exponentials.

Where devices gathered the head, d_weight is added up in parts, and the last chunk sends them: `d_weight_parts.py`.

Where devices have shards of the vocabulary (`shard_rows.py`), the problem is that of the device's own classes, and
between the first two steps the devices exchange the numbers of the rows. d_input is then a sum over the devices, in
float32 of one chunk. It is computed before d_weight, beside which it is summed. Devices that divide the tokens too
gather the rows of a chunk while they compute the one before: `token_slices.py`. `exchange.py` has the methods that a
call needs of either, and those of a device with the whole head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from jax_pallas import (
    float16,
    kernels,
    row_kernels,
    saved_kernels,
    shard_rows,
    target_grad,
    tile_config,
    token_slices,
    vocab_shard,
)
from jax_pallas.d_weight_parts import DWeightParts, Sums
from jax_pallas.exchange import Chunk, NoExchange
from jax_pallas.first_chunk import FirstChunk, float32_of, memory_of
from jax_pallas.head_rows import target_rows, times_head
from jax_pallas.problem import Gradients, NeedsGrad, Problem, SavedRows, halves, plan_of
from jax_pallas.row_kernels import CallRows, ChunkNumbers
from jax_pallas.row_math import RowStatistics
from jax_pallas.row_statistics import finish_statistics
from jax_pallas.shard_rows import ShardExchange
from jax_pallas.slicing import Slice, over_chunks, over_slices
from jax_pallas.smoothing import Smoothing
from jax_pallas.tile_config import ROW_BLOCK
from jax_pallas.token_hook import TokenHook, TokenRows
from jax_pallas.token_slices import TokenSlices
from linear_ce.gpus import share_added_in_l2
from linear_ce.statistics import BY_ROW, MAX, OF_BLOCKS, OF_LOGITS, SHIFTS

Scales = tuple[Array, Array] | None


class SavedChunk(NamedTuple):
    """What `save_rows` saves of a chunk, or of all; None if not needed."""

    e: Any  # (rows or more, padded), zeros in rows whose rho is NaN; those of all chunks in a tuple
    rho: Array | None  # (rows,)
    unit_scale: Array | None  # (rows,), of float16


class OfTokens(NamedTuple):
    """What a call knows of the tokens of a chunk, or of all; None if not computed."""

    rows: TokenRows | None  # the results of a token loss
    statistics: RowStatistics | None
    saved: SavedChunk | None = None


class Carry(NamedTuple):
    """The values that each chunk passes to the next; None if not computed."""

    rows: CallRows
    held: Array | None  # (N, D): input's rows, then d_input's; with `TokenSlices` d_input's rows of this device
    d_weight: Array | None
    d_bias: Array | None  # (K,) float32
    exchanged: Any = None  # what has begun and not ended yet, of the methods of `NoExchange`
    parts: Sums | None = None  # of d_weight, in its place, of `DWeightParts`


def scaled_exp(
    problem: Problem, needs_grad: NeedsGrad, *, statistics: int, scales: Scales = None
) -> tuple[Array, RowStatistics, Gradients]:
    """Runs plan A, or plan B if no gradient is needed: (29)-(33).

    Args:
        scales: powers of two that d_input and the gradients of the head are multiplied by, for float16. d_weight has
            none with `Problem.grad_into`.

    Returns:
        The weighted loss of each row (N,); the statistics of the rows, those of the logits only if they are in
        `statistics` (the largest ones are inf otherwise); and the gradients of the sum.
    """
    call = ScaledExpCall(problem, needs_grad, statistics=statistics, scales=scales)
    rows, gradients, found = call.run()
    loss, of_call = rows.loss[: problem.tokens], _statistics_of_call(problem, rows, found)
    if call.smoothing is not None:
        loss = call.smoothing.losses(loss, of_call.target_logit)
    return loss, of_call, gradients


def _statistics_of_call(problem: Problem, rows: CallRows, found: OfTokens) -> RowStatistics:
    if found.statistics is not None:
        return found.statistics
    lse, target_logit = rows.lse[: problem.tokens], rows.target_logit[: problem.tokens]
    largest = jnp.full_like(lse, jnp.inf) if rows.largest is None else rows.largest[: problem.tokens]
    return RowStatistics(lse, target_logit, None, largest, None, None)


def save_rows(problem: Problem, needs_grad: NeedsGrad, *, statistics: int) -> tuple[Array, RowStatistics, SavedRows]:
    """Runs plan A for upstream gradients of 1, without the gradients of the head and without label smoothing.

    Returns:
        The weighted loss of each row (N,), the statistics, and what `saved_gradients` needs.
    """
    head = needs_grad.d_weight or needs_grad.d_bias
    needs_grad = NeedsGrad(needs_grad.d_input, False, False)
    statistics, units = statistics & ~BY_ROW, needs_grad.d_input and plan_of(problem).fits_float16
    rows, gradients, found = ScaledExpCall(problem, needs_grad, statistics=statistics, saves=head, units=units).run()
    saved = SavedRows(None, gradients.d_input, None, None)
    if found.saved is not None:
        saved = saved._replace(**found.saved._asdict())
    if head:
        assert rows.theta is not None
        saved = saved._replace(theta=rows.theta[: problem.tokens])
    return rows.loss[: problem.tokens], _statistics_of_call(problem, rows, found), saved


def saved_gradients(
    problem: Problem, saved: SavedRows, factor: Array, needs_grad: NeedsGrad, others: Gradients
) -> Gradients:
    """Returns the gradients of the head by saved rows, added to those by other rows: (42).

    Args:
        problem: that of `save_rows`.
        factor: (N,) the upstream gradients times `unit_scale`, if not None; 0 in rows that do not contribute.
    """
    if saved.e is None or saved.rho is None or saved.theta is None:
        return others
    if problem.devices.vocab_axes:
        problem = shard_rows.of_own_classes(problem)
    config, b = plan_of(problem).scaled_exp_config, problem.linear_bias
    rho, theta = (jnp.where(factor == 0, 0.0, factor * array) for array in (saved.rho, saved.theta))
    _, d_weight, d_bias = others
    if needs_grad.d_weight and d_weight is None:  # overwritten by the first chunk
        dtype = problem.input.dtype if problem.grad_into is None else jnp.float32  # to be summed over devices
        d_weight = lax.empty(problem.linear_weight.shape, dtype)
    if needs_grad.d_bias:
        d_bias = jnp.zeros(problem.classes) if d_bias is None else d_bias[: problem.classes].astype(jnp.float32)
    for start, e in zip(range(0, problem.tokens, config.rows), saved.e, strict=True):
        chunk = Slice(start, min(config.rows, problem.tokens - start), None)
        of_rows = chunk.of(rho)[:, None]
        if d_bias is not None:
            of_bias = jnp.where(of_rows == 0, 0.0, e[: chunk.size, : problem.classes].astype(jnp.float32) * of_rows)
            d_bias = d_bias + of_bias.sum(0)
        if d_weight is not None:
            x, power = chunk.of(problem.input), None
            if plan_of(problem).fits_float16:
                x, power = float16.times_rho(x, of_rows[:, 0])
            else:
                x = jnp.where(of_rows == 0, 0.0, x.astype(jnp.float32) * of_rows).astype(x.dtype)
            past = config.kernel_rows(chunk.size) - chunk.size
            x = jnp.pad(x, ((0, past), (0, 0)))
            first = start == 0 and others.d_weight is None
            d_weight, x = lax.optimization_barrier((d_weight, x))  # chunks one after the other
            d_weight = _add_d_weight(problem, chunk, e, x, 0, d_weight, power, first=first)
    target = jnp.where((problem.target >= 0) & (problem.target < problem.classes), problem.target, -1)
    d_weight, d_bias = target_grad.add_to_head(problem, target.astype(jnp.int32), theta, theta, d_weight, d_bias)
    if d_weight is not None:
        d_weight = shard_rows.clear_padding(problem, d_weight, problem.vocab_axis)
    if d_bias is not None and b is not None:
        d_bias = shard_rows.clear_padding(problem, d_bias, 0)
        d_bias = jnp.zeros_like(b).at[: problem.classes].set(d_bias.astype(b.dtype))
    return Gradients(None, d_weight, d_bias)


def token_loss_and_gradients(
    problem: Problem, needs_grad: NeedsGrad, hook: TokenHook, statistics: int, scales: Scales = None
) -> tuple[TokenRows, Array | None, RowStatistics | None, Gradients]:
    """Runs plan A with a token loss: (29)-(33), (35).

    Returns:
        The results of all rows; their log-probabilities and statistics if there are `statistics`; and the gradients of
        the sum of their losses.
    """
    call = ScaledExpCall(problem, needs_grad, statistics=statistics, hook=hook, scales=scales)
    _, gradients, (rows, found, _) = call.run()
    assert rows is not None
    rows = rows._replace(d_closure=jax.tree.map(lambda chunks: chunks.sum(0), rows.d_closure))
    nll = None if found is None else found.nll
    return rows, None if nll is None else 0.0 - nll, found, gradients


class ScaledExpCall:
    """One call of plan A, or of plan B if no gradient is needed. `run` computes it.

    Args:
        problem: of all classes.
        hook: a token loss in place of the cross-entropy, for plan A without class weights and z-loss.
        scales: those of `scaled_exp`.
        saves: the exponentials are saved, and the gradients of the head are not computed.
        units: d_input, rho and theta have the scales of `float16.unit_scale`.
    """

    def __init__(
        self,
        problem: Problem,
        needs_grad: NeedsGrad,
        *,
        statistics: int,
        hook: TokenHook | None = None,
        scales: Scales = None,
        saves: bool = False,
        units: bool = False,
    ) -> None:
        self.needs_grad, self.statistics, self.saves, self.units = needs_grad, statistics, saves, units
        self.gradients, self.by_row = any(needs_grad) or saves, statistics & BY_ROW != 0
        self.smoothing = Smoothing.of(problem, scales)
        if self.smoothing is not None:
            problem = self.smoothing.problem
        self.scales, self.bias_scale = scales, None
        if scales is not None and problem.grad_into is not None:
            self.scales, self.bias_scale = (scales[0], jnp.float32(1.0)), scales[1]
        self.exchange, self.hook = _exchange_of(problem, hook)
        self.problem = self.exchange.problem  # of the classes of this device
        plan = plan_of(problem)
        self.config, self.fits = plan.scaled_exp_config, plan.fits_float16 and self.gradients
        # In float16 the terms of label smoothing are in d_weight before those of the first chunk.
        self.starts_smooth = self.smoothing is not None and plan.fits_float16
        self.last_start = self.config.last_start(problem.tokens)
        self.chunks = self.last_start // self.config.rows + 1
        self.rows, self.held = self._pick_rows()
        self.places = row_kernels.call_places(self.problem, self.exchange.target, self.chunks)
        self.parts = None
        if needs_grad.d_weight:
            options = self.smoothing, self.scales
            self.parts = DWeightParts.of(self.problem, problem.devices, *options, chunks=self.chunks)

    def _pick_rows(self) -> tuple[CallRows, Array | None]:
        """Returns the rows of the call, and the memory of d_input if it is needed."""
        config, row_weight = self.config, self.exchange.row_weight
        if self.hook is not None:  # until `_call_token_loss` replaces them
            row_weight = (row_weight != 0).astype(jnp.float32)
        flags = (self.chunks - 1) * row_kernels.chunk_flags(config.rows)
        flags += row_kernels.chunk_flags(config.first_rows or config.rows)
        options: dict[str, Any] = {"flags": flags, "largest": self.statistics & MAX != 0, "gradients": self.gradients}
        return self.exchange.pick(row_weight, holds=self.needs_grad.d_input, **options)

    def run(self) -> tuple[CallRows, Gradients, OfTokens]:
        """Returns the rows of the call, the gradients and what is known of the tokens. In the results of a token loss,
        the gradients of the closure (chunks, ...) are those of each chunk."""
        carry = self._start()
        carry, found = self._over_saved_chunks(carry) if self.saves else self._over_chunks(carry)
        carry = self._finish_head(carry)
        return self._results(carry, found)

    def _start(self) -> Carry:
        """Returns what the first chunk takes."""
        problem = self.problem
        d_bias = jnp.zeros(problem.classes, jnp.float32) if self.needs_grad.d_bias else None
        carry = Carry(self.rows, self.held, None, d_bias, self.exchange.start(self.rows))
        if self.parts is not None:
            return carry._replace(parts=self.parts.empty())
        if not self.needs_grad.d_weight:
            return carry
        sums = problem.grad_into
        if self.smoothing is not None and self.starts_smooth:
            sums = self.smoothing.start_head(sums)
        elif sums is None:  # overwritten by the first chunk
            dtype = jnp.float32 if problem.casts_head else problem.input.dtype
            sums = lax.empty(problem.linear_weight.shape, dtype)
        return carry._replace(d_weight=sums)

    def _over_chunks(self, carry: Carry) -> tuple[Carry, OfTokens]:
        """Runs all chunks."""
        problem, separate = self.problem, self.parts is not None
        # XLA's GEMM adds to d_weight in place only inside a loop. A loop of vocabulary chunks copies a float32 head.
        plan = plan_of(problem)
        unrolls = self.needs_grad.d_input and plan.d_input_kernel
        unrolls &= plan.splits_in_place or not problem.casts_head
        over: dict[str, Any] = {"full": self.last_start, "unrolls": unrolls, "separate_end": separate}
        return over_chunks(self._chunk, carry, problem.tokens, self.config.rows, **over)

    def _over_saved_chunks(self, carry: Carry) -> tuple[Carry, OfTokens]:
        """Runs all chunks, whose exponentials stay where they are written."""
        chunks, tokens = [], self.problem.tokens
        for start in range(0, tokens, self.config.rows):
            rows = Slice(start, min(self.config.rows, tokens - start), None)
            carry, one = self._chunk(carry, rows, first=start == 0)
            exchanged = carry.exchanged
            carry, one = lax.optimization_barrier((carry._replace(exchanged=None), one))
            carry = carry._replace(exchanged=exchanged)
            chunks.append(one)
        carry = carry._replace(held=self.exchange.end_sum(carry.held, carry.exchanged), exchanged=None)
        e = tuple(one.saved.e for one in chunks if one.saved is not None)
        without_e = (one._replace(saved=one.saved and one.saved._replace(e=None)) for one in chunks)
        found = jax.tree.map(lambda *of_chunks: jnp.concatenate(of_chunks), *without_e)
        return carry, found._replace(saved=found.saved._replace(e=e))

    def _chunk(self, carry: Carry, rows: Slice, *, first: bool) -> tuple[Carry, OfTokens]:
        """Computes one chunk of rows. Returns the carry and what is known of its tokens."""
        chunk, found = self._rows_of_input(carry, rows, first=first), OfTokens(None, None)
        self._store_exponentials(chunk)
        self.exchange.merge(chunk, by_row=self.by_row)
        if self.hook is not None:
            found = self._call_token_loss(self.hook, chunk)
        self._finish_rows(chunk)
        if self.smoothing is not None and self.gradients:
            self._add_smoothing(self.smoothing, chunk)
        if self.units:
            self._scale_units(chunk)
        if self.fits:
            self._fit_in_float16(chunk)
        if self.hook is None and self.statistics & OF_LOGITS & ~MAX:
            found = found._replace(statistics=finish_statistics(chunk.numbers, chunk.rows, chunk.slice))
        if self.saves or self.units:
            found = found._replace(saved=self._save(chunk))
        carry = carry._replace(rows=chunk.rows, exchanged=chunk.exchanged)
        if not self.gradients:
            return carry, found
        if chunk.others is not None:
            return self._first_gradients(carry, chunk), found
        return self._add_gradients(carry, chunk), found

    def _rows_of_input(self, carry: Carry, rows: Slice, *, first: bool) -> Chunk:
        """Returns a chunk with its rows of the input."""
        problem, config = self.problem, self.config
        size, in_d_weight = config.kernel_rows(rows.size), None
        if first and config.first_rows:
            assert carry.d_weight is not None
            in_d_weight = memory_of(carry.d_weight, problem.input.dtype)
        of_call, gathered, exchanged = self.exchange.begin(carry.rows, rows, carry.exchanged, first=first)
        start = 0
        if gathered is not None:
            x = gathered
        elif carry.held is not None and in_d_weight is not None:  # its d_input is written before its d_weight
            x = rows.of(carry.held)
        elif carry.held is not None:
            x, start = carry.held, rows.start
        elif self.gradients:
            x = jnp.pad(problem.rows(rows), ((0, size - rows.size), (0, 0)))
        else:  # a row reaches no sum but its own, so rows that do not contribute may stay
            x, start = problem.input, rows.start
        first_flag = rows.start // config.rows * row_kernels.chunk_flags(config.rows)
        numbers = rows.start, first_flag, start, size  # FIRST_ROW, FIRST_FLAG, FIRST_OF_X, SIZE
        place = jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers])
        return Chunk(rows, size, first, place, of_call, x, start, exchanged, in_d_weight)

    def _store_exponentials(self, chunk: Chunk) -> None:
        """Stores a chunk's exponentials e (n, padded(K)), if there are gradients, and makes the numbers of its rows:
        their sums, and the targets' logits and summands.

        With `in_d_weight` e has the first classes only, and the others are there: `first_chunk.py`.

        The rows of the chunk start at row `start` of x. The chunk may end after the last row of the call: the reference
        exponent there is inf, so the exponentials are zeros. The Hopper kernels may add more rows of zeros to e.

        Row blocks whose sums leave the range are computed again with reference exponents from their largest logits. The
        host does not know which blocks these are, so the repair kernel is always launched. If there are none, it has
        nothing to do.
        """
        problem, plan, rows, size = self.problem, plan_of(self.problem), chunk.rows, chunk.size
        of_shard, statistics = self.exchange.of_shard, self.statistics
        places = row_kernels.target_places(problem, rows.target, chunk.slice, size, self.places)
        bias = None if problem.linear_bias is None else problem.linear_bias.astype(jnp.float32)
        of_rows = chunk.tiles.of(rows.ref_exponent), chunk.tiles.of(rows.target)
        arrays = chunk.x, problem.linear_weight, bias, *of_rows
        options = {
            **static_args(problem, size, problem.classes),
            "stores": self.gradients,
            "statistics": statistics & (OF_BLOCKS | BY_ROW) | SHIFTS * self.fits,
        }
        if problem.class_count is not None:
            options["count"] = problem.class_count
        if places is None:  # these kernels split or round the head themselves
            options["head_parts"] = 1 + problem.spec.splits_head
            found = kernels.exponentials(*arrays, chunk.place[row_kernels.FIRST_OF_X], **options)
        else:
            from jax_pallas import hopper_logits, hopper_split_logits

            in_chunk = lax.dynamic_index_in_dim(places.places, places.index, keepdims=False)
            in_chunk = in_chunk[: 2 * tile_config.cdiv(size, ROW_BLOCK)]
            arrays = *arrays, in_chunk, chunk.place[row_kernels.FIRST_OF_X]
            others = chunk.in_d_weight
            if others is not None:
                options["piece"] = self.config.piece
            if plan.splits_in_place:
                found = hopper_split_logits.split_exponentials(*arrays, others, **options)
            elif problem.casts_head:
                found = hopper_logits.exponentials_of_float32_head(problem, arrays, others, options, of_shard=of_shard)
            else:
                found = hopper_logits.exponentials(*arrays, others, **options)
        rows, joined = row_kernels.join_blocks(rows, chunk.place, size, found.sums, found.tops, of_shard=of_shard)
        total = joined.total if plan.batch_invariant else None
        chunk.rows, found, repaired = kernels.repair(
            problem, chunk.x, rows, chunk.place, size, found, total, statistics, of_shard=of_shard
        )
        chunk.numbers = ChunkNumbers(problem, found, places, joined, repaired, plan.class_block)

    def _call_token_loss(self, hook: TokenHook, chunk: Chunk) -> OfTokens:
        """Puts the weights of (35) in place of a chunk's row weights. Returns the results of the chunk.

        `row_kernels.finish_rows` runs as in plan B. With row weights of 1 its losses are the negative log-likelihoods.
        """
        numbers, rows, part, theta = chunk.numbers, chunk.rows._replace(theta=None), chunk.slice, chunk.rows.theta
        without_e = numbers._replace(found=numbers.found._replace(e=None, others=None))
        rows, *_ = row_kernels.finish_rows(without_e, rows, chunk.place, chunk.size, None, by_row=True)
        statistics = finish_statistics(numbers, rows, part) if self.statistics & ~BY_ROW else None
        log_prob = 0.0 - part.of(rows.loss)  # -loss could be -0.0
        found = hook.of_chunk(part, log_prob, part.of(self.problem.row_weight))
        chunk.rows = rows._replace(row_weight=part.put(rows.row_weight, found.gradient_weight), theta=theta)
        d_closure = jax.tree.map(lambda gradient: gradient[None], found.d_closure)
        return OfTokens(found._replace(d_closure=d_closure), statistics)

    def _finish_rows(self, chunk: Chunk) -> None:
        """Computes the results of a chunk's rows; with gradients the factors rho and theta too, and x times rho if it
        is an operand of d_weight, unless `_fit_in_float16` does this."""
        by_row = self.by_row and (plan_of(self.problem).batch_invariant or not self.gradients)
        x = chunk.x if self.needs_grad.d_weight and not self.fits else None
        arrays = chunk.numbers, chunk.rows, chunk.place, chunk.size, x
        chunk.rows, found, x, rho = row_kernels.finish_rows(*arrays, by_row=by_row)
        if x is not None:
            chunk.x = x
        if found.e is not None and rho is not None:
            chunk.e, chunk.others, chunk.rho = found.e, found.others, rho

    def _add_smoothing(self, smoothing: Smoothing, chunk: Chunk) -> None:
        """Adds the terms of label smoothing to theta; of float16 also makes those of d_input."""
        part, rows = chunk.slice, chunk.rows
        assert rows.theta is not None
        row_weight = part.of(rows.row_weight)
        if self.exchange.of_shard:  # the target's term is the target's device's
            row_weight = jnp.where(part.of(rows.target) >= 0, row_weight, 0.0)
        theta = smoothing.add_to_theta(part.of(rows.theta), row_weight)
        chunk.rows = rows._replace(theta=part.put(rows.theta, theta))
        if self.fits:
            chunk.smooth = smoothing.of_input(chunk.tiles.of(rows.row_weight))

    def _scale_units(self, chunk: Chunk) -> None:
        """Divides the factors of a chunk's rows by the scales of `float16.unit_scale`."""
        part, rows = chunk.slice, chunk.rows
        assert rows.theta is not None
        whole, target = self.exchange.classes_of(rows)
        scale = float16.unit_scale(whole, rows, target, part)
        chunk.rows = rows._replace(theta=part.put(rows.theta, part.of(rows.theta) / scale))
        chunk.rho = chunk.rho / jnp.pad(scale, (0, chunk.size - part.size), constant_values=1.0)
        chunk.unit_scale = scale

    def _fit_in_float16(self, chunk: Chunk) -> None:
        """Makes what the matmuls of a chunk's gradients take fit the range of float16."""
        found = chunk.numbers.found._replace(e=chunk.e, others=chunk.others)
        arrays = chunk.rows, chunk.place, chunk.size, found, chunk.e, chunk.x, chunk.rho
        fitted = float16.fit(*arrays, scales_x=self.needs_grad.d_weight, scales=self.scales)
        chunk.rows, chunk.e, chunk.others, x, chunk.rho, chunk.power = fitted
        if x is not None:
            chunk.x = x

    def _save(self, chunk: Chunk) -> SavedChunk:
        """Returns what is saved of a chunk."""
        if not self.saves:
            return SavedChunk(None, None, chunk.unit_scale)
        chunk.e = saved_kernels.clear(chunk.e, chunk.rho)
        return SavedChunk(chunk.e, chunk.rho[: chunk.slice.size], chunk.unit_scale)

    def _add_gradients(self, carry: Carry, chunk: Chunk) -> Carry:
        """Adds a chunk to the gradients: (32), (33), but for the targets' terms of the head's. d_input is summed over
        the devices beside the matmul of d_weight, or if rows are saved beside the logits of the next chunk."""
        d_bias, total, sent = self._add_d_bias(carry.d_bias, chunk), None, 0.0
        if carry.held is not None and self.exchange.of_shard:
            part = _part_of_d_input(self.problem, chunk.rows, chunk.slice, chunk.e, chunk.rho)
            # Before d_weight, beside which it is summed.
            part, chunk.e, chunk.x = lax.optimization_barrier((part, chunk.e, chunk.x))
            total, sent = self.exchange.start_sum(part)
            if self.saves:
                held, exchanged = self.exchange.wait_with_sum(chunk, total)
                return carry._replace(held=held, exchanged=exchanged)
            chunk.e = vocab_shard.after_begin(chunk.e)
        parts, d_weight, held = carry.parts, carry.d_weight, carry.held
        if self.parts is not None and parts is not None:
            parts = self.parts.add(chunk, parts, sent=sent)
        if d_weight is not None:
            d_weight = self._add_d_weight(chunk, d_weight, sent)
        if held is not None and not self.exchange.gathers_rows:
            # The rows of d_input, and before them the targets' rows of the head, replace those of x after it was read.
            chunk.x, d_weight, target = lax.optimization_barrier((chunk.x, d_weight, chunk.rows.target))
            chunk.rows = chunk.rows._replace(target=target)
        if held is not None and total is not None:
            held = self.exchange.put_sum(held, chunk, total)
        elif held is not None:
            arrays = chunk.rows, chunk.slice, chunk.e, chunk.x, chunk.rho
            held = _store_d_input(self.problem, *arrays, smooth=chunk.smooth)
        return Carry(chunk.rows, held, d_weight, d_bias, chunk.exchanged, parts)

    def _add_d_bias(self, d_bias: Array | None, chunk: Chunk) -> Array | None:
        """Adds the sums of a chunk's exponentials times rho to d_bias, if not None."""
        if d_bias is None:
            return None
        n = chunk.slice.size
        of_rows = chunk.e[:n, : self.problem.classes].astype(jnp.float32) * chunk.rho[:n, None]
        return d_bias + of_rows.sum(0)

    def _add_d_weight(self, chunk: Chunk, d_weight: Array, sent: float) -> Array:
        """Adds a chunk to d_weight, while this GPU sends so many bytes."""
        started = chunk.smooth is not None or self.problem.grad_into is not None
        beside = {"first": chunk.first, "started": started, "sent": sent}
        arrays = chunk.slice, chunk.e, chunk.x, chunk.start, d_weight, chunk.power
        d_weight = _add_d_weight(self.problem, *arrays, **beside)
        if chunk.power is not None and not plan_of(self.problem).d_weight_kernel:
            # XLA would compute the matmul of d_input before, so that the sums of both are in memory at the same time.
            d_weight, chunk.e = lax.optimization_barrier((d_weight, chunk.e))
        return d_weight

    def _first_gradients(self, carry: Carry, chunk: Chunk) -> Carry:
        """Returns the gradients of a first chunk with exponentials in the memory of d_weight, `others`, but for the
        targets' terms. d_weight is written last."""
        from jax_pallas import hopper_gradients

        problem, e, x, rho, n = self.problem, chunk.e, chunk.x, chunk.rho, chunk.slice.size
        rows, held, d_weight, d_bias = chunk.rows, carry.held, chunk.others, carry.d_bias
        assert d_weight is not None
        if d_bias is not None:
            first = FirstChunk.of(e.shape[1], n, d_weight.shape[1])
            d_bias = d_bias + first.class_sums(e, d_weight, rho, problem.classes)
        if held is not None:
            # The targets' rows of the head replace those of x in `held` after they were copied.
            x, d_weight, target = lax.optimization_barrier((x, d_weight, rows.target))
            rows = rows._replace(target=target)
            held = _store_d_input(problem, rows, chunk.slice, e, held, rho, d_weight)
        d_weight, held, d_bias = lax.optimization_barrier((d_weight, held, d_bias))
        options = {"classes": problem.classes, "rows": n, "power": chunk.power}
        d_weight = hopper_gradients.write_d_weight(e, x, 0, d_weight, **options)
        if problem.spec.splits_head:
            d_weight = float32_of(d_weight)
        return carry._replace(rows=rows, held=held, d_weight=d_weight, d_bias=d_bias)

    def _finish_head(self, carry: Carry) -> Carry:
        """Adds the targets' terms and those of label smoothing to the gradients of the head."""
        problem, scales, smoothing = self.problem, self.scales, self.smoothing
        if self.exchange.of_shard and not self.saves and (smoothing is not None or plan_of(problem).fits_float16):
            # Or the last sum of d_input would begin beside what follows. With saved rows d_weight follows, as it
            # should.
            carry = lax.optimization_barrier(carry)
        rows, d_weight, d_bias = carry.rows, carry.d_weight, carry.d_bias
        if scales is not None and rows.theta is not None:  # so far they are scaled as d_input is
            rows = rows._replace(theta=rows.theta * (scales[1] / scales[0]))
            d_bias = None if d_bias is None else d_bias * (scales[1] / scales[0])
        if d_weight is not None or d_bias is not None:
            d_weight, d_bias = self.exchange.add_targets(rows, d_weight, d_bias)
            if smoothing is not None:
                d_weight, d_bias = smoothing.add_to_head(d_weight, d_bias)
        if d_weight is not None and problem.grad_into is None:
            d_weight = shard_rows.clear_padding(problem, d_weight, problem.vocab_axis)
        if d_bias is not None:
            d_bias = shard_rows.clear_padding(problem, d_bias, 0)
        if self.parts is not None and carry.parts is not None:
            d_weight = self.parts.own_rows(carry.parts)
        if d_bias is not None and self.bias_scale is not None:
            d_bias = d_bias * self.bias_scale
        if d_bias is not None and problem.linear_bias is not None:
            b = problem.linear_bias
            d_bias = jnp.zeros_like(b).at[: problem.classes].set(d_bias.astype(b.dtype))
        return carry._replace(rows=rows, d_weight=d_weight, d_bias=d_bias)

    def _results(self, carry: Carry, found: OfTokens) -> tuple[CallRows, Gradients, OfTokens]:
        """Returns the results of `run`."""
        d_input = carry.held
        if d_input is not None and self.smoothing is not None and not self.starts_smooth:
            d_input = self.smoothing.add_to_input(d_input)
        rows, of_hook, statistics = self.exchange.finish_call(carry.rows, found.rows, found.statistics)
        gradients = Gradients(d_input, carry.d_weight, carry.d_bias)
        return rows, gradients, found._replace(rows=of_hook, statistics=statistics)


def _exchange_of(problem: Problem, hook: TokenHook | None) -> tuple[NoExchange, TokenHook | None]:
    """Returns what the devices of a call exchange, and its token loss for the tokens in the order of that."""
    if problem.devices.token_parts > 1:
        problem, hook = token_slices.in_order_of_chunks(problem, hook)
        return TokenSlices(problem), hook
    return (ShardExchange if problem.devices.vocab_axes else NoExchange)(problem), hook


def static_args(problem: Problem, rows: int, classes: int) -> dict[str, Any]:
    """Returns the static arguments of the kernels that compute tiles of logits."""
    return {
        "rows": rows,
        "classes": classes,
        "vocab_axis": problem.vocab_axis,
        "logit_scale": problem.spec.logit_scale,
        "softcap": problem.spec.softcap,
    }


def _add_d_weight(
    problem: Problem,
    chunk: Slice,
    e: Array,
    x: Array,
    start: Array | int,
    d_weight: Array,
    power: Array | None = None,
    *,
    first: bool,
    started: bool = False,
    sent: float = 0.0,
) -> Array:
    """Adds e^T x to d_weight, of rows of x already times rho: (33) without the targets' terms. The first chunk
    overwrites it unless it has `started`. `sent`: bytes that this GPU sends meanwhile."""
    axis = problem.vocab_axis
    plan = plan_of(problem)
    if plan.d_weight_kernel:
        from jax_pallas import hopper_gradients

        return hopper_gradients.add_d_weight(
            e,
            x,
            start,
            vocab=problem.linear_weight.shape[axis],
            classes=problem.classes,
            vocab_axis=axis,
            in_l2=share_added_in_l2(chunk.size, plan.gpu) * (not (first and started)),
            rows=chunk.size,
            old=None if first and not plan.d_weight_starts and not started else d_weight,
            starts=first if plan.d_weight_starts else None,
            power=power,
            float32=d_weight.dtype == jnp.float32,
            sent=sent,
            gpu=plan.gpu,
        )
    scaled, adds = Slice(start, chunk.size, None).of(x), started or not first

    def matmul(of_e: Array, dtype: Any) -> Array:
        pair = (of_e, scaled) if axis == 0 else (scaled, of_e)
        return lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=dtype)

    if power is None:
        update = matmul(e, d_weight.dtype)
        return d_weight + update if adds else update

    # float16 does not hold the sum before it is multiplied by the power of two. It is in float32, of a few classes.
    def body(total: Array, part: Slice) -> tuple[Array, None]:
        update = matmul(part.of(e, 1), jnp.float32) * power
        if adds:
            if part.fresh is not None:
                update = jnp.where(jnp.expand_dims(part.fresh, 1 - axis), update, 0.0)
            update = update + part.of(total, axis)
        return part.put(total, update, axis), None

    return over_slices(body, d_weight, d_weight.shape[axis], plan.scaled_exp_config.head_rows)[0]


def _store_d_input(
    problem: Problem,
    rows: CallRows,
    chunk: Slice,
    e: Array,
    held: Array,
    rho: Array,
    others: Array | None = None,
    smooth: tuple[Array, Array] | None = None,
) -> Array:
    """Writes the rows of d_input of a chunk: (32). `others` are of `Exponentials`. Adds the terms `smooth` of
    `Smoothing.of_input`."""
    plan, w, part = plan_of(problem), problem.linear_weight, Slice(chunk.start, len(rho), None)
    assert rows.theta is not None
    theta = part.of(rows.theta)
    if plan.d_input_kernel:
        from jax_pallas import hopper_gradients

        held, low = _put_target_rows(problem, rows, chunk, held)
        shared: dict[str, Any] = {"classes": problem.classes, "vocab_axis": problem.vocab_axis, "low": low}
        shared |= {} if others is None else {"others": others}
        shared |= {} if smooth is None else {"smooth": smooth}
        shared |= {"most": plan.scaled_exp_config.d_input_bytes, "batch_invariant": plan.batch_invariant}
        return hopper_gradients.store_d_input(e, w, held, rho, theta, jnp.int32(chunk.start), **shared)
    w_target = target_rows(problem, part.of(rows.target).clip(0))
    d_input = rho[:, None] * times_head(problem, e, len(rho)) + theta[:, None] * w_target.astype(jnp.float32)
    if smooth is not None:
        d_input = d_input + smooth[0][:, None] * smooth[1]
    return chunk.put(held, jnp.where((rho != 0)[:, None] | (theta != 0)[:, None], d_input, 0.0)[: chunk.size])


def _part_of_d_input(problem: Problem, rows: CallRows, chunk: Slice, e: Array, rho: Array) -> Array:
    """Returns the part (n, D) float32 of a chunk's rows of d_input by the classes of this shard: a term of (54)."""
    plan, w, part = plan_of(problem), problem.linear_weight, Slice(chunk.start, len(rho), None)
    if plan.d_input_kernel:
        from jax_pallas import hopper_input_sums

        most = plan.scaled_exp_config.d_input_bytes
        shared: dict[str, Any] = {"classes": problem.classes, "vocab_axis": problem.vocab_axis, "most": most}
        shared["rounds"] = problem.casts_head and not problem.spec.splits_head
        sums = hopper_input_sums.d_input_sums(e, w, problem.class_count, rows=len(rho), **shared)
    else:
        sums = times_head(problem, e, len(rho))
    assert rows.theta is not None
    w_target = target_rows(problem, part.of(rows.target).clip(0)).astype(jnp.float32)
    terms = zip((rho, part.of(rows.theta)), (sums, w_target), strict=True)
    by_rho, by_theta = (jnp.where(factor[:, None] == 0, 0.0, factor[:, None] * term) for factor, term in terms)
    # Row by row: the kernel wrote columns. In their order, rows of the head and of d_input would be slow to reach.
    return with_layout_constraint((by_rho + by_theta)[: chunk.size], Layout((0, 1)))


def _put_target_rows(problem: Problem, rows: CallRows, chunk: Slice, held: Array) -> tuple[Array, Array | None]:
    """Returns held with the targets' rows of the head in the place of a chunk's rows. Those of a split head are the
    high halves, and the low halves (n, D) are returned beside them."""
    if isinstance(chunk.start, int):  # an operand, because each chunk would compile another kernel for a constant
        chunk = chunk._replace(start=lax.optimization_barrier(jnp.int32(chunk.start)))
    picked, low = target_rows(problem, chunk.of(rows.target).clip(0)), None
    if problem.spec.splits_head:
        picked, low = jnp.split(halves(picked, held.dtype, 1), 2, 1)
    return chunk.put(held, picked), low
