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
    loss, and the factors of rows; x becomes rho x        `row_kernels.finish_rows`, for float16 `float16.fit`
    d_weight += E^T (rho x)                               `_add_d_weight`
    d_input = rho (E W) + theta w_target                  `_store_d_input`

A token loss is called between the first two steps (`_call_token_loss`). The weights of (35) take the place of the row
weights in the steps after it.

At the end the targets' terms of d_weight are added for all rows (`_add_targets`). Plan B is the first two steps, in any
dtype. It stores only the sums.

A float32 head may be split in two matrices of the input's dtype: (39). The Hopper kernel of the logits, and XLA's
matmuls of d_input, take both halves of a vocabulary chunk, a copy. The other kernels split the head as they read it.
d_weight is float32 then. Shards of a float32 head may also be rounded, to one such matrix.

A first chunk may be larger than the others, with most of its exponentials in the memory of d_weight, which is not
written yet (`first_chunk.py`). Its d_input is computed before its d_weight.

The memory of d_input holds the rows of the input, with zeros in rows that do not contribute, until a chunk's rows of
d_input replace them. So a chunk takes little memory besides its exponentials.

Where devices gathered the head, d_weight is added up in parts, and the last chunk sends them: `d_weight_parts.py`.

Where devices have shards of the vocabulary (`shard_rows.py`), `_run` has the problem of the device's own classes, and
between the first two steps the devices exchange the numbers of the rows. d_input is then a sum over the devices, in
float32 of one chunk. It is computed before d_weight, beside which it is summed. Devices that divide the tokens too
gather the rows of a chunk while they compute the one before: `token_slices.py`.
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
from jax_pallas.first_chunk import FirstChunk, float32_of, memory_of
from jax_pallas.head_rows import target_rows, times_head
from jax_pallas.problem import Gradients, NeedsGrad, Problem, SavedRows, halves, plan_of
from jax_pallas.row_kernels import CallRows, ChunkNumbers, TargetPlaces
from jax_pallas.row_math import RowStatistics
from jax_pallas.row_statistics import finish_statistics
from jax_pallas.shard_rows import ShardRows
from jax_pallas.slicing import Slice, over_chunks, over_slices
from jax_pallas.smoothing import Smoothing
from jax_pallas.tile_config import ROW_BLOCK
from jax_pallas.token_hook import TokenHook, TokenRows
from jax_pallas.token_slices import GatheredChunk, TokenSlices
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
    ahead: GatheredChunk | None = None  # the next chunk, of `TokenSlices`
    parts: Sums | None = None  # of d_weight, in its place, of `DWeightParts`
    # With shards and saved exponentials: a chunk and its rows of d_input, whose sum ends beside the logits of the next.
    waiting: tuple[Slice, Array] | None = None


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
    smoothing = Smoothing.of(problem, scales)
    whole = problem if smoothing is None else smoothing.problem
    rows, gradients, found = _run(whole, needs_grad, None, smoothing, statistics=statistics, scales=scales)
    loss, of_call = rows.loss[: problem.tokens], _statistics_of_call(problem, rows, found)
    if smoothing is not None:
        loss = smoothing.losses(loss, of_call.target_logit)
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
    rows, gradients, found = _run(problem, needs_grad, None, None, statistics=statistics, saves=head, units=units)
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
    d_weight, d_bias = _add_targets(problem, target.astype(jnp.int32), theta, theta, d_weight, d_bias)
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
    _, gradients, (rows, found, _) = _run(problem, needs_grad, hook, None, statistics=statistics, scales=scales)
    assert rows is not None
    rows = rows._replace(d_closure=jax.tree.map(lambda chunks: chunks.sum(0), rows.d_closure))
    nll = None if found is None else found.nll
    return rows, None if nll is None else 0.0 - nll, found, gradients


def _run(
    problem: Problem,
    needs_grad: NeedsGrad,
    hook: TokenHook | None,
    smoothing: Smoothing | None,
    *,
    statistics: int,
    saves: bool = False,
    units: bool = False,
    scales: Scales = None,
) -> tuple[CallRows, Gradients, OfTokens]:
    """Returns the rows of the call, the gradients and what is known of the tokens. In the results of a token loss, the
    gradients of the closure (chunks, ...) are those of each chunk. With `saves` the exponentials are saved. With
    `units` d_input, rho and theta have the scales of `float16.unit_scale`."""
    config, tokens, bias_scale = plan_of(problem).scaled_exp_config, problem.tokens, None
    if scales is not None and problem.grad_into is not None:
        scales, bias_scale = (scales[0], jnp.float32(1.0)), scales[1]
    slices, token_parts = None, problem.devices.token_parts
    if token_parts > 1:
        problem, hook = token_slices.in_order_of_chunks(problem, hook)
    whole, (target, row_weight) = problem, row_kernels.call_rows(problem)
    whole_target, shards = target, bool(problem.devices.vocab_axes)
    if shards:  # below, `problem` has the classes of this device
        problem = shard_rows.of_own_classes(problem)
        target, _ = row_kernels.call_rows(problem)
    if hook is not None:  # until `_call_token_loss` replaces them
        row_weight = (row_weight != 0).astype(jnp.float32)
    last_start, gradients = config.last_start(tokens), any(needs_grad) or saves
    others = last_start // config.rows  # chunks, besides the last
    flags = others * row_kernels.chunk_flags(config.rows) + row_kernels.chunk_flags(config.first_rows or config.rows)
    options: dict[str, Any] = {"flags": flags, "largest": statistics & MAX != 0, "gradients": gradients}
    if token_parts == 1:
        rows, held = row_kernels.pick(problem, target, row_weight, holds=needs_grad.d_input, **options)
    else:
        slices = TokenSlices(problem, whole.devices)
        rows = row_kernels.no_rows_yet(problem, target, row_weight, **options)
        held = lax.empty(problem.input.shape, problem.input.dtype) if needs_grad.d_input else None
    of_shard = None
    if slices is not None:
        of_shard = ShardRows(whole, whole_target)
    elif shards:
        rows, of_shard = shard_rows.start(rows, whole_target, whole)
    if slices is None and plan_of(problem).fits_float16:
        rows = float16.place(problem, rows, problem.input if held is None else held, Slice(0, tokens, None))
    places = row_kernels.call_places(problem, target, others + 1)
    parts = None
    if needs_grad.d_weight:
        parts = DWeightParts.of(problem, whole.devices, smoothing, scales, chunks=others + 1)

    def body(carry: Carry, chunk: Slice, *, first: bool) -> tuple[Carry, OfTokens]:
        shared = of_shard, slices, hook, smoothing, scales, statistics, parts
        options = {"first": first, "gradients": gradients, "saves": saves, "units": units}
        return _chunk(problem, carry, chunk, places, *shared, **options)

    carry = Carry(rows, held, None, jnp.zeros(problem.classes, jnp.float32) if needs_grad.d_bias else None)
    if slices is not None:
        carry = carry._replace(ahead=slices.start(rows))
    starts = smoothing is not None and plan_of(problem).fits_float16
    if parts is not None:
        carry = carry._replace(parts=parts.empty())
    elif needs_grad.d_weight:
        sums = problem.grad_into
        if smoothing is not None and starts:
            sums = smoothing.start_head(sums)
        elif sums is None:  # overwritten by the first chunk
            dtype = jnp.float32 if problem.casts_head else problem.input.dtype
            sums = lax.empty(problem.linear_weight.shape, dtype)
        carry = carry._replace(d_weight=sums)
    # XLA's GEMM adds to d_weight in place only inside a loop. A loop of vocabulary chunks copies a float32 head.
    unrolls = needs_grad.d_input and plan_of(problem).d_input_kernel and not problem.casts_head
    if not saves:
        over: dict[str, Any] = {"full": last_start, "unrolls": unrolls, "separate_end": parts is not None}
        carry, found = over_chunks(body, carry, tokens, config.rows, **over)
    else:  # the chunks' exponentials stay where they are written
        chunks = []
        for start in range(0, tokens, config.rows):
            carry, one = body(carry, Slice(start, min(config.rows, tokens - start), None), first=start == 0)
            waiting = carry.waiting
            carry, one = lax.optimization_barrier((carry._replace(waiting=None), one))
            carry = carry._replace(waiting=waiting)
            chunks.append(one)
        if carry.waiting is not None:
            assert carry.held is not None
            chunk, total = carry.waiting
            carry = carry._replace(held=chunk.put(carry.held, total))
        e = tuple(one.saved.e for one in chunks if one.saved is not None)
        without_e = (one._replace(saved=one.saved and one.saved._replace(e=None)) for one in chunks)
        found = jax.tree.map(lambda *of_chunks: jnp.concatenate(of_chunks), *without_e)
        found = found._replace(saved=found.saved._replace(e=e))
    if shards and not saves and (smoothing is not None or plan_of(problem).fits_float16):
        # Or the last sum of d_input would begin beside what follows. With saved rows d_weight follows, as it should.
        carry = lax.optimization_barrier(carry)
    rows, d_weight, d_bias = carry.rows, carry.d_weight, carry.d_bias
    if scales is not None and rows.theta is not None:  # so far they are scaled as d_input is
        rows = rows._replace(theta=rows.theta * (scales[1] / scales[0]))
        d_bias = None if d_bias is None else d_bias * (scales[1] / scales[0])
    if d_weight is not None or d_bias is not None:
        assert rows.theta is not None
        if slices is None:
            d_weight, d_bias = _add_targets(problem, rows.target, rows.row_weight, rows.theta, d_weight, d_bias)
        else:
            d_weight, d_bias = slices.add_targets(rows, d_weight, d_bias)
        if smoothing is not None:
            d_weight, d_bias = smoothing.add_to_head(d_weight, d_bias)
        if d_weight is not None and problem.grad_into is None:
            d_weight = shard_rows.clear_padding(problem, d_weight, problem.vocab_axis)
        if d_bias is not None:
            d_bias = shard_rows.clear_padding(problem, d_bias, 0)
    if parts is not None and carry.parts is not None:
        d_weight = parts.own_rows(carry.parts)
    if d_bias is not None and bias_scale is not None:
        d_bias = d_bias * bias_scale
    if d_bias is not None and problem.linear_bias is not None:
        b = problem.linear_bias
        d_bias = jnp.zeros_like(b).at[: problem.classes].set(d_bias.astype(b.dtype))
    d_input = carry.held
    if d_input is not None and smoothing is not None and not starts:
        d_input = smoothing.add_to_input(d_input)
    if slices is not None:
        rows, of_hook, of_rows = token_slices.in_order_of_tokens(whole, rows, found.rows, found.statistics)
        found = OfTokens(of_hook, of_rows)
    return rows, Gradients(d_input, d_weight, d_bias), found


def static_args(problem: Problem, rows: int, classes: int) -> dict[str, Any]:
    """Returns the static arguments of the kernels that compute tiles of logits."""
    return {
        "rows": rows,
        "classes": classes,
        "vocab_axis": problem.vocab_axis,
        "logit_scale": problem.spec.logit_scale,
        "softcap": problem.spec.softcap,
    }


def _chunk(
    problem: Problem,
    carry: Carry,
    chunk: Slice,
    places: Array | None,
    of_shard: ShardRows | None,
    slices: TokenSlices | None,
    hook: TokenHook | None,
    smoothing: Smoothing | None,
    scales: Scales,
    statistics: int,
    parts: DWeightParts | None,
    *,
    first: bool,
    gradients: bool,
    saves: bool,
    units: bool,
) -> tuple[Carry, OfTokens]:
    """Computes one chunk of rows. Returns the carry and what is known of its tokens."""
    config, rows = plan_of(problem).scaled_exp_config, carry.rows
    size, in_d_weight = config.kernel_rows(chunk.size), None  # what holds some of the exponentials
    if first and config.first_rows:
        assert carry.d_weight is not None
        in_d_weight = memory_of(carry.d_weight, problem.input.dtype)
    following = following_x = None
    if slices is not None:
        assert carry.ahead is not None
        (x, rows), start, following = slices.begin(rows, chunk, carry.ahead), 0, slices.next(chunk, first=first)
        if following is not None:
            following_x, x = slices.gather(following, x)
    elif carry.held is not None and in_d_weight is not None:  # its d_input is written before its d_weight
        x, start = chunk.of(carry.held), 0
    elif carry.held is not None:
        x, start = carry.held, chunk.start
    elif gradients:
        x, start = jnp.pad(problem.rows(chunk), ((0, size - chunk.size), (0, 0))), 0
    else:  # a row reaches no sum but its own, so rows that do not contribute may stay
        x, start = problem.input, chunk.start
    first_flag = chunk.start // config.rows * row_kernels.chunk_flags(config.rows)
    numbers = chunk.start, first_flag, start, size  # FIRST_ROW, FIRST_FLAG, FIRST_OF_X, SIZE
    place = jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers])
    chunk_places = row_kernels.target_places(problem, rows.target, chunk, size, places)
    options: dict[str, Any] = {"stores": gradients, "of_shard": of_shard is not None}
    rows, numbers = _store_exponentials(
        problem, rows, chunk, size, place, x, chunk_places, statistics, in_d_weight, **options
    )
    if carry.waiting is not None:
        earlier, total = carry.waiting
        # The rows replace those of x after it was read. Their sum ends before that of the numbers begins: XLA runs one
        # collective at a time, and would begin it after that of the numbers, beside no matmul.
        found, x, total = lax.optimization_barrier((numbers.found, x, total))
        numbers, x = numbers._replace(found=found), earlier.put(x, total)
        carry = carry._replace(held=x, waiting=None)
    scales_x, by_row, ahead = carry.d_weight is not None, statistics & BY_ROW != 0, None
    scales_x |= parts is not None
    if slices is not None and following is not None and following_x is not None:
        ahead, rows = slices.place(rows, following, following_x)
    if of_shard is not None:
        rows, numbers = shard_rows.merge(numbers, rows, of_shard, chunk, place, size, by_row=by_row)
    by_row &= plan_of(problem).batch_invariant or not gradients
    of_tokens = OfTokens(None, None)
    if hook is not None:
        rows, of_tokens = _call_token_loss(problem, hook, rows, numbers, chunk, place, size, statistics)
    fits = plan_of(problem).fits_float16
    of_x = x if scales_x and not fits else None
    rows, found, scaled, rho = row_kernels.finish_rows(numbers, rows, place, size, of_x, by_row=by_row)
    e, power = found.e, None
    smooth = None  # the terms of d_input, if they are added before it is rounded
    if smoothing is not None and rows.theta is not None:
        row_weight = chunk.of(rows.row_weight)
        if of_shard is not None:  # the target's term is the target's device's
            row_weight = jnp.where(chunk.of(rows.target) >= 0, row_weight, 0.0)
        theta = smoothing.add_to_theta(chunk.of(rows.theta), row_weight)
        rows = rows._replace(theta=chunk.put(rows.theta, theta))
        if fits:
            smooth = smoothing.of_input(Slice(chunk.start, size, None).of(rows.row_weight))
    unit_scale = None
    if units and rho is not None and rows.theta is not None:
        whole, target = (problem, rows.target) if of_shard is None else of_shard
        unit_scale = float16.unit_scale(whole, rows, target, chunk)
        rows = rows._replace(theta=chunk.put(rows.theta, chunk.of(rows.theta) / unit_scale))
        rho = rho / jnp.pad(unit_scale, (0, size - chunk.size), constant_values=1.0)
    if fits and e is not None and rho is not None:
        rows, e, others, scaled, rho, power = float16.fit(
            rows, place, size, found, e, x, rho, scales_x=scales_x, scales=scales
        )
        found = found._replace(others=others)
    if hook is None and statistics & OF_LOGITS & ~MAX:
        of_tokens = OfTokens(None, finish_statistics(numbers, rows, chunk))
    carry = carry._replace(rows=rows, ahead=ahead)
    if saves:
        assert e is not None
        assert rho is not None
        e = saved_kernels.clear(e, rho)
        of_tokens = of_tokens._replace(saved=SavedChunk(e, rho[: chunk.size], unit_scale))
    elif unit_scale is not None:
        of_tokens = of_tokens._replace(saved=SavedChunk(None, None, unit_scale))
    if e is None or rho is None:
        return carry, of_tokens
    x = x if scaled is None else scaled
    if found.others is not None:
        return _first_gradients(problem, carry._replace(d_weight=found.others), chunk, e, x, rho, power), of_tokens
    options = {"waits": saves, "first": first}
    carry = _add_gradients(problem, carry, chunk, e, x, start, rho, of_shard, slices, parts, power, smooth, **options)
    return carry, of_tokens


def _call_token_loss(
    problem: Problem,
    hook: TokenHook,
    rows: CallRows,
    numbers: ChunkNumbers,
    chunk: Slice,
    place: Array,
    size: int,
    statistics: int,
) -> tuple[CallRows, OfTokens]:
    """Returns the rows with the weights of (35) in place of a chunk's row weights, and the results of the chunk.

    `row_kernels.finish_rows` runs as in plan B. With row weights of 1 its losses are the negative log-likelihoods.
    """
    of_call = rows._replace(theta=None)
    without_e = numbers._replace(found=numbers.found._replace(e=None, others=None))
    of_call, *_ = row_kernels.finish_rows(without_e, of_call, place, size, None, by_row=True)
    stats = finish_statistics(numbers, of_call, chunk) if statistics & ~BY_ROW else None
    log_prob = 0.0 - chunk.of(of_call.loss)  # -loss could be -0.0
    of_tokens = hook.of_chunk(chunk, log_prob, chunk.of(problem.row_weight))
    rows = of_call._replace(row_weight=chunk.put(of_call.row_weight, of_tokens.gradient_weight), theta=rows.theta)
    d_closure = jax.tree.map(lambda gradient: gradient[None], of_tokens.d_closure)
    return rows, OfTokens(of_tokens._replace(d_closure=d_closure), stats)


def _store_exponentials(
    problem: Problem,
    rows: CallRows,
    chunk: Slice,
    size: int,
    place: Array,
    x: Array,
    places: TargetPlaces | None,
    statistics: int,
    in_d_weight: Array | None,
    *,
    stores: bool,
    of_shard: bool,
) -> tuple[CallRows, ChunkNumbers]:
    """Returns a chunk's exponentials e (n, padded(K)), if stored, their sums, and the targets' logits and summands.

    With `in_d_weight` e has the first classes only, and the others are there: `first_chunk.py`.

    The rows of the chunk start at row place[FIRST_OF_X] of x. The chunk may end after the last row of the call: the
    reference exponent there is inf, so the exponentials are zeros. The Hopper kernels may add more rows of zeros to e.

    Row blocks whose sums leave the range are computed again with reference exponents from their largest logits. The
    host does not know which blocks these are, so the repair kernel is always launched. If there are none, it has
    nothing to do.
    """
    bias = None if problem.linear_bias is None else problem.linear_bias.astype(jnp.float32)
    part = Slice(chunk.start, size, None)
    arrays = x, problem.linear_weight, bias, part.of(rows.ref_exponent), part.of(rows.target)
    options = {
        **static_args(problem, size, problem.classes),
        "stores": stores,
        "statistics": statistics & (OF_BLOCKS | BY_ROW) | SHIFTS * (stores and plan_of(problem).fits_float16),
    }
    if problem.class_count is not None:
        options["count"] = problem.class_count
    if places is None:  # these kernels split or round the head themselves
        options["head_parts"] = 1 + problem.spec.splits_head
        found = kernels.exponentials(*arrays, place[row_kernels.FIRST_OF_X], **options)
    else:
        from jax_pallas import hopper_logits

        in_chunk = lax.dynamic_index_in_dim(places.places, places.index, keepdims=False)
        in_chunk = in_chunk[: 2 * tile_config.cdiv(size, ROW_BLOCK)]
        arrays = *arrays, in_chunk, place[row_kernels.FIRST_OF_X]
        if in_d_weight is not None:
            options["piece"] = plan_of(problem).scaled_exp_config.piece
        if problem.casts_head:
            found = hopper_logits.exponentials_of_float32_head(problem, arrays, in_d_weight, options, of_shard=of_shard)
        else:
            found = hopper_logits.exponentials(*arrays, in_d_weight, **options)
    rows, joined = row_kernels.join_blocks(rows, place, size, found.sums, found.tops, of_shard=of_shard)
    total = joined.total if plan_of(problem).batch_invariant else None
    rows, found, repaired = kernels.repair(problem, x, rows, place, size, found, total, statistics, of_shard=of_shard)
    tile = plan_of(problem).tile
    assert tile is not None
    return rows, ChunkNumbers(problem, found, places, joined, repaired, tile.block_v)


def _add_gradients(
    problem: Problem,
    carry: Carry,
    chunk: Slice,
    e: Array,
    x: Array,
    start: Array | int,
    rho: Array,
    of_shard: ShardRows | None,
    slices: TokenSlices | None,
    parts: DWeightParts | None,
    power: Array | None,
    smooth: tuple[Array, Array] | None,
    *,
    waits: bool,
    first: bool,
) -> Carry:
    """Adds a chunk to the gradients: (32), (33), but for the targets' terms of the head's. power: (50). With the terms
    `smooth` of `Smoothing.of_input`, d_weight has begun with its own. With `waits` the sum of d_input over devices, for
    which no matmul of d_weight waits, is not put to its place yet."""
    rows, held, d_weight, d_bias, ahead, sums, _ = carry
    if d_bias is not None:
        of_rows = e[: chunk.size, : problem.classes].astype(jnp.float32) * rho[: chunk.size, None]
        d_bias = d_bias + of_rows.sum(0)
    total, sent = None, 0.0  # of d_input's rows over the devices that divide the vocabulary
    if held is not None and of_shard is not None:
        part = _part_of_d_input(problem, rows, chunk, e, rho)
        part, e, x = lax.optimization_barrier((part, e, x))  # before d_weight, beside which it is summed
        of_shards = vocab_shard.sum_of_d_input if slices is None else vocab_shard.own_sum_of_d_input
        devices = of_shard.problem.devices
        total = of_shards(devices, part, ordered=plan_of(problem).batch_invariant)
        if waits:
            return carry._replace(held=vocab_shard.after_begin(x), waiting=(chunk, total))
        size = part.size * jnp.dtype(devices.reduce_dtype).itemsize
        sent = vocab_shard.sent_by_sum(devices.shards, size, of_own=slices is not None)
        e = vocab_shard.after_begin(e)
    if parts is not None and sums is not None:
        sums, e, x = parts.add(rows, chunk, e, x, start, sums, power, first=first, sent=sent)
    if d_weight is not None:
        started = smooth is not None or problem.grad_into is not None
        beside = {"first": first, "started": started, "sent": sent}
        d_weight = _add_d_weight(problem, chunk, e, x, start, d_weight, power, **beside)
        if power is not None and not plan_of(problem).d_weight_kernel:
            # XLA would compute the matmul of d_input before, so that the sums of both are in memory at the same time.
            d_weight, e = lax.optimization_barrier((d_weight, e))
    if held is not None and slices is not None:
        assert total is not None
        held = slices.put(held, chunk, total)
    elif held is not None:
        # The rows of d_input, and before them the targets' rows of the head, replace those of x after it was read.
        x, d_weight, target = lax.optimization_barrier((x, d_weight, rows.target))
        rows = rows._replace(target=target)
        if total is None:
            held = _store_d_input(problem, rows, chunk, e, x, rho, smooth=smooth)
        else:
            held = chunk.put(x, total)
    return Carry(rows, held, d_weight, d_bias, ahead, sums)


def _first_gradients(
    problem: Problem, carry: Carry, chunk: Slice, e: Array, x: Array, rho: Array, power: Array | None
) -> Carry:
    """Returns the gradients of a first chunk with exponentials in the memory of d_weight, but for the targets' terms.
    d_weight is written last. In the carry it is that memory: `memory_of`. power: (50)."""
    from jax_pallas import hopper_gradients

    rows, held, d_weight, d_bias, *_ = carry
    assert d_weight is not None
    if d_bias is not None:
        first = FirstChunk.of(e.shape[1], chunk.size, d_weight.shape[1])
        d_bias = d_bias + first.class_sums(e, d_weight, rho, problem.classes)
    if held is not None:
        # The targets' rows of the head replace those of x in `held` after they were copied.
        x, d_weight, target = lax.optimization_barrier((x, d_weight, rows.target))
        rows = rows._replace(target=target)
        held = _store_d_input(problem, rows, chunk, e, held, rho, d_weight)
    d_weight, held, d_bias = lax.optimization_barrier((d_weight, held, d_bias))
    d_weight = hopper_gradients.write_d_weight(e, x, 0, d_weight, classes=problem.classes, rows=chunk.size, power=power)
    if problem.spec.splits_head:
        d_weight = float32_of(d_weight)
    return Carry(rows, held, d_weight, d_bias)


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


def _add_targets(
    problem: Problem,
    target: Array,
    row_weight: Array,
    theta: Array,
    d_weight: Array | None,
    d_bias: Array | None,
) -> tuple[Array | None, Array | None]:
    """Adds theta * input to the targets' rows of d_weight, theta to d_bias: (33)."""
    target, row, theta = target_grad.sort_by_target(target, row_weight, theta, problem.tokens, problem.classes)
    if d_weight is not None:
        d_weight = target_grad.add_targets(
            d_weight, problem.input, target, row, theta, classes=problem.classes, vocab_axis=problem.vocab_axis
        )
    if d_bias is not None:
        d_bias = target_grad.add_target_sums(d_bias, target, theta)
    return d_weight, d_bias
