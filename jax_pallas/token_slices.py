"""Tokens of which each device of a vocabulary has its own, whose rows of the input are gathered chunk by chunk.

Chunk c has slice c of the rows of each device, as many of each, one after the other. In the program of `scaled_exp.py`
all numbers of the tokens are in this order, and in that of the devices before and after it. So no device has all rows
of the input or of d_input. What the devices exchange, besides what they do for a vocabulary with the same tokens
(`shard_rows.py`):

    beside the logits of a chunk     the rows of the input of the next one, (n, D)
    with its numbers                 the reference exponents of these rows, by the targets' logits
    beside its matmul of d_weight    d_input of the chunk: each device gets the sum of its own rows
    at the end                       the rows of the input once more, for the targets' terms of d_weight, as many at a
                                     time as the memory of the exponentials holds

Those exponents are the same on all devices. Of float16, each device then places the rows of a chunk by an estimate of
the lse of its own classes (`float16.place`), before it gathers those of the next chunk.

If the targets' terms were added with each chunk, they would make d_weight large before other chunks are added, and each
of these would round it: eight chunks of bfloat16 double the error of d_weight.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import float16, row_kernels, target_grad, vocab_shard
from jax_pallas.devices import Devices
from jax_pallas.exchange import Chunk
from jax_pallas.problem import Problem, plan_of
from jax_pallas.row_kernels import CallRows
from jax_pallas.row_math import RowStatistics
from jax_pallas.shard_rows import ShardExchange
from jax_pallas.slicing import Slice, over_slices
from jax_pallas.tile_config import cdiv, padded
from jax_pallas.token_hook import TokenHook, TokenRows


class GatheredChunk(NamedTuple):
    """What is known of a chunk before it is computed."""

    x: Array  # (n, D), its rows of the input, zeros where they do not contribute
    ref_exponent: Array  # (rows that the kernels compute,) float32, by the targets' logits of all shards


class NextChunk(NamedTuple):
    """The chunk after one, whose rows of the input are gathered beside the logits of this one."""

    chunk: Slice
    x: Array  # (n, D)


class TokenSlices(ShardExchange):
    """The slices of one call.

    Args:
        whole: the problem of all classes, with the numbers of the tokens in the order of this file, and this device's
            rows of the input.
    """

    gathers_rows = True

    @property
    def devices(self) -> Devices:
        return self.whole.devices

    @property
    def parts(self) -> int:
        return self.devices.token_parts

    def pick(self, row_weight: Array, *, holds: bool, **options: Any) -> tuple[CallRows, Array | None]:
        """Returns the rows of the call, and with `holds` the memory of d_input of this device's tokens. No row has a
        reference exponent yet."""
        x = self.problem.input
        rows = row_kernels.no_rows_yet(self.problem, self.target, row_weight, **options)
        return rows, lax.empty(x.shape, x.dtype) if holds else None

    def start(self, rows: CallRows) -> GatheredChunk:
        """Returns the chunk that is computed first: the last one."""
        tokens = self.problem.tokens
        last = plan_of(self.problem).scaled_exp_config.last_start(tokens)
        chunk = Slice(last, tokens - last, None)
        x = self._gather(chunk)
        return GatheredChunk(x, vocab_shard.all_sum(self.devices, self._place(rows, chunk, x)))

    def begin(
        self, rows: CallRows, chunk: Slice, exchanged: GatheredChunk, *, first: bool
    ) -> tuple[CallRows, Array, NextChunk | None]:
        assert len(exchanged.x) == chunk.size
        x, of_chunk = exchanged.x, Slice(chunk.start, len(exchanged.ref_exponent), None)
        rows = rows._replace(ref_exponent=of_chunk.put(rows.ref_exponent, exchanged.ref_exponent))
        if plan_of(self.problem).fits_float16:
            # Before the next gather, beside which only larger matmuls run.
            x, rows = lax.optimization_barrier((x, float16.place(self.problem, rows, x, chunk)))
        following = self._next(chunk, first=first)
        if following is None:
            return rows, x, None
        following_x, x = self._gather_next(following, x)
        return rows, x, NextChunk(following, following_x)

    def end_beside_logits(self, chunk: Chunk) -> None:
        """Ends the gather of the next chunk, whose rows must be there when the logits of a chunk are. Its exponents are
        exchanged with the numbers of this chunk."""
        if chunk.exchanged is None:
            return
        following = chunk.exchanged
        assert isinstance(following, NextChunk)
        x, rows = lax.optimization_barrier((following.x, chunk.rows))
        own, chunk.rows = lax.optimization_barrier((self._place(rows, following.chunk, x), rows))
        chunk.exchanged = GatheredChunk(x, vocab_shard.all_sum(self.devices, own))

    def start_sum(self, part: Array) -> tuple[Array, float]:
        """Returns the sum of this device's rows."""
        total = vocab_shard.own_sum_of_d_input(self.devices, part, ordered=plan_of(self.problem).batch_invariant)
        return total, self.sent(part, of_own=True)

    def put_sum(self, held: Array, chunk: Chunk, total: Array) -> Array:
        return self._own(chunk.slice).put(held, total)

    def add_targets(
        self, rows: CallRows, d_weight: Array | None, d_bias: Array | None
    ) -> tuple[Array | None, Array | None]:
        problem, parts, classes = self.problem, self.parts, self.problem.classes
        assert rows.theta is not None
        if d_bias is not None:
            of_rows = rows.target, rows.row_weight, rows.theta
            target, _, theta = target_grad.sort_by_target(*of_rows, problem.tokens, classes)
            d_bias = target_grad.add_target_sums(d_bias, target, theta)
        if d_weight is None:
            return None, d_bias
        whole, (own_rows, hidden) = replace(problem, devices=self.devices), problem.input.shape
        of_devices = [
            _to_tokens(whole, one).reshape(parts, own_rows) for one in (rows.target, rows.row_weight, rows.theta)
        ]

        def body(d_weight: Array, piece: Slice) -> tuple[Array, None]:
            own, d_weight = lax.optimization_barrier((piece.of(problem.input), d_weight))
            target, row_weight, theta = (piece.of(one, 1) for one in of_devices)
            if piece.fresh is not None:
                row_weight = jnp.where(piece.fresh, row_weight, 0.0)
            target, row_weight, theta = (one.reshape(-1) for one in (target, row_weight, theta))
            of_piece = target_grad.sort_by_target(target, row_weight, theta, parts * piece.size, classes)
            x = vocab_shard.rows_of_all(self.devices, own)
            return target_grad.add_targets(d_weight, x, *of_piece, classes=classes, vocab_axis=problem.vocab_axis), None

        # As equal pieces as possible: the last one may overlap the one before.
        most = max(1, plan_of(problem).scaled_exp_config.rows * padded(classes) // (parts * hidden))
        pieces = cdiv(own_rows, most)
        return over_slices(body, d_weight, own_rows, cdiv(own_rows, pieces))[0], d_bias

    def finish_call(
        self, rows: CallRows, of_hook: TokenRows | None, statistics: RowStatistics | None
    ) -> tuple[CallRows, TokenRows | None, RowStatistics | None]:
        return in_order_of_tokens(self.whole, rows, of_hook, statistics)

    def _next(self, chunk: Slice, *, first: bool) -> Slice | None:
        """Returns the chunk after this one, or None after the last. In a loop, whose chunks all do the same, the last
        one is also after the last one: its rows are gathered for nothing."""
        config, tokens = plan_of(self.problem).scaled_exp_config, self.problem.tokens
        full, start = config.last_start(tokens), 0 if first else chunk.start + config.rows
        if isinstance(start, int):
            return Slice(start, config.rows, None) if start < full else None
        return Slice(jnp.minimum(start, full - config.rows), config.rows, None)

    def _gather_next(self, chunk: Slice, x: Array) -> tuple[Array, Array]:
        """Returns the rows of the input of a chunk, which are gathered when those of the chunk before are there, x; and
        x."""
        own, x = lax.optimization_barrier((self._own_rows(chunk), x))
        return vocab_shard.rows_of_all(self.devices, own), vocab_shard.after_begin(x)

    def _own(self, chunk: Slice) -> Slice:
        start, parts = chunk.start, self.parts
        start = start // parts if isinstance(start, int) else lax.div(start, jnp.int32(parts))
        return Slice(start, chunk.size // parts, None)

    def _own_rows(self, chunk: Slice) -> Array:
        """Returns the rows of the input of this device's slice, (n / parts, D), zeros where they do not contribute."""
        own = self._own(chunk)
        first = chunk.start + lax.axis_index(self.devices.gather_axes) * own.size
        row_weight = Slice(first, own.size, None).of(self.problem.row_weight)
        return jnp.where((row_weight != 0)[:, None], own.of(self.problem.input), 0)

    def _gather(self, chunk: Slice) -> Array:
        return vocab_shard.rows_of_all(self.devices, self._own_rows(chunk))

    def _place(self, rows: CallRows, chunk: Slice, x: Array) -> Array:
        """Returns the reference exponents of a chunk, 0 for targets that are not in this shard."""
        of_chunk = Slice(chunk.start, plan_of(self.problem).scaled_exp_config.kernel_rows(chunk.size), None)
        target, row_weight = of_chunk.of(rows.target), of_chunk.of(rows.row_weight)
        options = {"flags": 1, "holds": False, "largest": False, "gradients": False}
        return row_kernels.pick(replace(self.problem, input=x), target, row_weight, **options)[0].ref_exponent


def in_order_of_chunks(problem: Problem, hook: TokenHook | None) -> tuple[Problem, TokenHook | None]:
    """Returns a problem and its token loss with the numbers of the tokens in the order of this file."""
    target, row_weight = (_to_chunks(problem, one) for one in (problem.target, problem.row_weight))
    if hook is not None:
        hook = hook._replace(per_token=tuple(_to_chunks(problem, one) for one in hook.per_token))
    return replace(problem, target=target, row_weight=row_weight), hook


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Returns the devices, the rows of a device in a chunk, and those before the last chunk."""
    config, parts = plan_of(problem).scaled_exp_config, problem.devices.token_parts
    return parts, config.rows // parts, config.last_start(problem.tokens) // parts


def _to_chunks(problem: Problem, numbers: Array) -> Array:
    """Returns numbers (N,) of the tokens of one device after the other in the order of this file."""
    parts, rows, full = _sizes(problem)
    of_devices = numbers.reshape(parts, -1)
    chunks = of_devices[:, :full].reshape(parts, full // rows, rows).swapaxes(0, 1)
    return jnp.concatenate([chunks.reshape(-1), of_devices[:, full:].reshape(-1)])


def in_order_of_tokens(
    problem: Problem, rows: CallRows, of_hook: TokenRows | None, statistics: RowStatistics | None
) -> tuple[CallRows, TokenRows | None, RowStatistics | None]:
    """Returns results with the numbers of the tokens in the order of the devices."""

    def ordered(results: Any) -> Any:
        return jax.tree.map(lambda numbers: _to_tokens(problem, numbers), results)

    names = ("loss", "lse", "target_logit", "largest")
    rows = rows._replace(**{name: ordered(getattr(rows, name)) for name in names})
    if of_hook is not None:
        of_hook = ordered(of_hook._replace(d_closure=()))._replace(d_closure=of_hook.d_closure)
    return rows, of_hook, ordered(statistics)


def _to_tokens(problem: Problem, numbers: Array) -> Array:
    """The inverse of `_to_chunks`, of the first N numbers."""
    parts, rows, full = _sizes(problem)
    chunks = numbers[: parts * full].reshape(full // rows, parts, rows).swapaxes(0, 1)
    last = numbers[parts * full : problem.tokens].reshape(parts, -1)
    return jnp.concatenate([chunks.reshape(parts, full), last], 1).reshape(-1)
