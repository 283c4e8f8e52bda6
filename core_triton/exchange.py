"""What the ranks exchange in a call with scaled exponentials, and the chunk of rows that they exchange it for.

`NoExchange` is for a rank that has the whole head, and it documents the methods that `scaled_exp.ScaledExpCall` calls.
The others replace some of them:

    `shard_rows.ShardExchange`     the ranks have shards of the vocabulary, and the same tokens
    `token_slices.TokenSlices`     the ranks have shards of the vocabulary, and different tokens
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from core_triton import row_kernels, target_grad
from core_triton.first_chunk import StoredExponentials
from core_triton.kernels import Active
from core_triton.launch import At
from core_triton.packed_rows import ChunkNumbers, PackedRows
from core_triton.problem import Problem
from core_triton.smoothing import Smoothing


@dataclass
class Chunk:
    """A chunk of rows, with what each step of `scaled_exp.ScaledExpCall` gives to the steps after it.

    Args:
        slice: its packed rows.
        first: whether it is the first chunk that is computed. What it adds to d_weight and d_bias overwrites them.
        sends: whether it sends d_weight in parts.
        d_input_first: whether d_input must be computed before d_weight, which overwrites the exponentials or, if it is
            sent, the head.
        rows: the packed rows of the call, with `order` and `count` of `NoExchange.begin`.
        x: (n, D or more), the packed rows of the input, later multiplied by rho.
        e: the exponentials, or None if no gradient is needed.
        active: the rows whose exponentials are computed.
        numbers: what the results of the rows are made from: at first of this rank's classes, later of all.
        row_weight: (n,), later that of the gradients, if a token loss is called.
        count: `Active.count` for d_weight, later with the power of two of float16.
        class_blocks: how many the exponentials have, once they are computed.
    """

    slice: slice
    first: bool
    sends: bool
    d_input_first: bool
    rows: PackedRows
    x: Tensor
    e: StoredExponentials | None
    active: Active
    numbers: ChunkNumbers
    row_weight: At
    count: Tensor | At
    class_blocks: int = 0

    @property
    def start(self) -> int:
        return self.slice.start

    @property
    def n(self) -> int:
        return self.slice.stop - self.slice.start


class NoExchange:
    """A rank has the whole head: nothing is exchanged. The methods are in the order in which a call runs them.

    Args:
        problem: of this rank's classes.
        rows: the packed rows of the call.
        d_input: (N, D), the result, or None if it is not needed.
    """

    # Whether `packed_rows.pick` writes the target logits and the reference exponents of rows. If not, they are there.
    picks_places = True
    # Whether d_input is a sum over the ranks. Then a chunk's part of it is computed before d_weight, to be summed
    # beside it.
    sums_d_input = False

    def __init__(self, problem: Problem, rows: PackedRows, d_input: Tensor | None) -> None:
        self.problem, self.rows, self.d_input = problem, rows, d_input

    @property
    def stored_classes(self) -> int:
        """For how many classes the exponentials of a chunk have memory."""
        return self.problem.classes

    def begin(self, chunk: slice) -> tuple[Problem, PackedRows]:
        """Returns a problem whose input has the rows of a chunk, and the packed rows with their place in that input,
        `order`, and with `count` of `kernels.Active`."""
        return self.problem, self.rows

    def merge(self, chunk: Chunk) -> ChunkNumbers:
        """Returns the numbers of a chunk of all classes, given those of this rank's."""
        return chunk.numbers

    def unit_numbers(self, numbers: ChunkNumbers) -> ChunkNumbers:
        """Returns the numbers of `merge` with which `row_kernels.finish_rows` writes a rho that is the same on all
        ranks, for `saved_kernels.scale_units`."""
        return numbers

    def refer_to_own(self, chunk: Chunk) -> None:
        """Makes rho of `unit_numbers` that of this rank's exponentials."""

    def add_smoothing(self, smoothing: Smoothing, chunk: Chunk) -> None:
        """Adds the terms of label smoothing of a chunk's rows to their losses, and to theta if there are gradients."""
        order, vectors = At(self.rows.order, chunk.start), self._of_smoothing(chunk)
        smoothing.add_to_rows(chunk.n, order=order, **vectors, loss_out=self.rows.loss_out)

    def _of_smoothing(self, chunk: Chunk) -> dict[str, Any]:
        theta = None if chunk.e is None else At(self.rows.theta, chunk.start)
        return {"target_logit": chunk.numbers.target_logit, "row_weight": chunk.row_weight, "theta": theta}

    def room_for_d_input(self, chunk: Chunk) -> tuple[Tensor, At]:
        """Returns where the rows of a chunk's d_input are written: a matrix, and the row of it for each of them (n,).
        With `sums_d_input` it may first wait for the sum of an earlier chunk."""
        assert self.d_input is not None
        return self.d_input, At(self.rows.order, chunk.start)

    def start_sum(self, chunk: Chunk) -> float:
        """Starts what the ranks exchange beside the matmul of d_weight: the sum of d_input of a chunk, if it is needed.
        Returns the bytes that this rank sends for it."""
        return 0.0

    def put_sum(self) -> None:
        """Writes the sum of d_input of the chunk to the result, or leaves it for a later call of `room_for_d_input` or
        `finish_sums`."""

    def finish_sums(self) -> None:
        """Writes the sum of the last chunk if it is not there yet, and frees the memory of the sums."""

    def add_targets(self, d_weight: Tensor | None, d_bias: Tensor | None, memory: Tensor) -> None:
        """Adds theta * input to the targets' rows of d_weight, theta to d_bias: (33). `memory`: that of the
        exponentials, which are not read any more."""
        rows, problem = self.rows, self.problem
        found = target_grad.sort_by_target(rows.target, rows.order, rows.theta, rows.count, problem.classes)
        target_grad.add_targets(problem.input, *found, rows.count, problem.classes, d_weight=d_weight, d_bias=d_bias)

    def contributing_first(self, shift: Tensor) -> Tensor:
        """Returns the shifts of float16 of all packed rows in an order in which those that contribute come first."""
        return shift

    def finish_call(self, row_weight: Tensor, loss: Tensor | None) -> Tensor | None:
        """Zeroes the rows of d_input whose row_weight (N,) is 0, and returns the sum () of loss (N,), if not None."""
        if self.d_input is None and loss is None:
            return None
        return row_kernels.finish_call(row_weight, self.d_input, loss)
