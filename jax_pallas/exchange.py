"""What devices exchange in a call with scaled exponentials, and the chunk of rows that they exchange it for.

`NoExchange` is for a device that has the whole head, and it documents the methods that `scaled_exp.ScaledExpCall`
calls. The others replace some of them:

    `shard_rows.ShardExchange`     the devices have shards of the vocabulary, and the same rows
    `token_slices.TokenSlices`     the devices have shards of the vocabulary, and their own rows of the input
"""

from dataclasses import dataclass, field
from typing import Any

from jax import Array

from jax_pallas import float16, row_kernels, target_grad
from jax_pallas.problem import Problem, plan_of
from jax_pallas.row_kernels import CallRows, ChunkNumbers
from jax_pallas.row_math import RowStatistics
from jax_pallas.slicing import Slice
from jax_pallas.token_hook import TokenRows


@dataclass
class Chunk:
    """A chunk of rows, with what each step of `ScaledExpCall` gives to the steps after it.

    Args:
        slice: its rows of the call.
        size: the rows that the kernels compute, from the first one of `slice` on.
        first: it is computed before all others.
        place: (4,) int32, of `row_kernels.join_blocks`.
        rows: those of the call.
        x: (n, D), which has the rows of the input from its row `start` on; multiplied by rho after `_finish_rows` or
            `_fit_in_float16`, if it is an operand of d_weight.
        exchanged: what the exchange passes from one of its methods to the next, and from a chunk to the next; None: it
            is not exchanging anything.
        in_d_weight: the memory of d_weight, if it will have some of the exponentials: `first_chunk.py`.
        numbers: what the results of the rows are made from.
        e: the exponentials, if there are gradients.
        others: of `Exponentials`.
        rho: (size,) float32, if there are gradients.
        power: () float32, the factor of E^T x, of float16: (50); None: 1.
        smooth: the terms of `Smoothing.of_input` that d_input gets before it is rounded, or None.
        unit_scale: (rows,) of `float16.unit_scale`, or None.
    """

    slice: Slice
    size: int
    first: bool
    place: Array
    rows: CallRows
    x: Array
    start: Array | int
    exchanged: Any
    in_d_weight: Array | None
    numbers: ChunkNumbers = field(init=False)
    e: Array = field(init=False)
    others: Array | None = None
    rho: Array = field(init=False)
    power: Array | None = None
    smooth: tuple[Array, Array] | None = None
    unit_scale: Array | None = None

    @property
    def tiles(self) -> Slice:
        """The rows that the kernels compute, of arrays (P,) of the call."""
        return Slice(self.slice.start, self.size, None)


class NoExchange:
    """One device has the whole head: nothing is exchanged.

    The methods are in the order in which a call runs them. `exchanged`, which some take and return, is what has begun
    and not ended yet.

    Args:
        problem: of the classes of this device. `target` and `row_weight` are those of `row_kernels.call_rows`.
    """

    of_shard = False  # whether the device has a shard of the vocabulary
    gathers_rows = False  # whether the rows of the input are gathered chunk by chunk

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.target, self.row_weight = row_kernels.call_rows(problem)

    def pick(self, row_weight: Array, *, holds: bool, **options: Any) -> tuple[CallRows, Array | None]:
        """Returns the rows of the call with reference exponents, and with `holds` the memory of d_input, which has the
        rows of the input (N, D), zeros in those that do not contribute. row_weight (P,). options: of
        `row_kernels.pick`."""
        rows, held = row_kernels.pick(self.problem, self.target, row_weight, holds=holds, **options)
        rows = self.with_exponents_of_all(rows)
        if plan_of(self.problem).fits_float16:
            every = Slice(0, self.problem.tokens, None)
            rows = float16.place(self.problem, rows, self.problem.input if held is None else held, every)
        return rows, held

    def with_exponents_of_all(self, rows: CallRows) -> CallRows:
        """Returns the rows with the reference exponents by the targets' logits of all shards."""
        return rows

    def start(self, rows: CallRows) -> Any:
        """Returns what is exchanged before the first chunk."""
        return None

    def begin(self, rows: CallRows, chunk: Slice, exchanged: Any, *, first: bool) -> tuple[CallRows, Array | None, Any]:
        """Begins a chunk. Returns the rows of the call; the rows of the input (n, D), if they were gathered; and what
        is exchanged beside the logits of the chunk."""
        return rows, None, exchanged

    def merge(self, chunk: Chunk, *, by_row: bool) -> None:
        """Merges the numbers of a chunk's rows, and its reference exponents, with those of the other devices, after
        what was exchanged beside its logits has ended. by_row: of `row_kernels.finish_rows`."""

    def classes_of(self, rows: CallRows) -> tuple[Problem, Array]:
        """Returns the problem of all classes, and the targets (P,) as its classes."""
        return self.problem, rows.target

    def start_sum(self, part: Array) -> tuple[Array, float]:
        """Returns the sum over the devices of their parts (n, D) of a chunk's rows of d_input, and the bytes that this
        device sends for it. Only with `of_shard`."""
        raise NotImplementedError

    def put_sum(self, held: Array, chunk: Chunk, total: Array) -> Array:
        """Returns the memory of d_input, held, with the sum of a chunk's rows in it. Only with `of_shard`."""
        raise NotImplementedError

    def wait_with_sum(self, chunk: Chunk, total: Array) -> tuple[Array, Any]:
        """Returns the memory of d_input, and what is exchanged after a chunk whose sum is put to its place after the
        logits of the next one. Only with `of_shard`."""
        raise NotImplementedError

    def end_sum(self, held: Array | None, exchanged: Any) -> Array | None:
        """Returns the memory of d_input after the last chunk."""
        return held

    def add_targets(
        self, rows: CallRows, d_weight: Array | None, d_bias: Array | None
    ) -> tuple[Array | None, Array | None]:
        """Adds the targets' terms of all rows to the gradients of the head: (33)."""
        assert rows.theta is not None
        return target_grad.add_to_head(self.problem, rows.target, rows.row_weight, rows.theta, d_weight, d_bias)

    def finish_call(
        self, rows: CallRows, of_hook: TokenRows | None, statistics: RowStatistics | None
    ) -> tuple[CallRows, TokenRows | None, RowStatistics | None]:
        """Returns the results of all rows in the order of the tokens."""
        return rows, of_hook, statistics
