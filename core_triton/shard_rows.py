"""Scaled exponentials where each rank of a process group has a shard of the vocabulary: (53), (54).

All ranks have the same rows, and a rank computes the exponentials of its own classes. The ranks exchange three times:

    before the first chunk     one number a row, the target's logit, so that all ranks begin with the same reference
                               exponents
    for each chunk             three numbers a row: the sum of the exponentials, the reference exponent, which a repair
                               may have changed, and the target's logit; and the statistics of its logits. All ranks
                               add them in the same order, so they have the same results, bit for bit.
    for each chunk             the sum of d_input over the ranks, while each adds to its own d_weight; or without
                               d_weight, and if the ranks have the same tokens, computes the logits of the next chunk
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton import packed_rows, vocab_shard
from core_triton.exchange import Chunk, NoExchange
from core_triton.kernels import ARGMAX, ENTROPY, LOG2_E, LOGIT_SUM, MAX, SQUARES, planes
from core_triton.launch import At, cdiv, column_block, launch
from core_triton.packed_rows import ChunkNumbers, PackedRows
from core_triton.problem import Problem, plan_of
from core_triton.row_kernels import BLOCKS_AT_ONCE, FINISHED_ROWS, column_maxima, column_sums
from core_triton.row_statistics import first_of_largest
from linear_ce import statistics as bits
from linear_ce.statistics import OF_LOGITS
from linear_ce.statistics import planes as planes_of

OF_LARGEST = tl.constexpr(bits.MAX | bits.ARGMAX)
SUMS = tl.constexpr(bits.ENTROPY | bits.LOGIT_SUM | bits.SQUARES)  # the statistics that are sums over classes

NUMBERS = tl.constexpr(3)  # of a row that the ranks exchange for each chunk besides its statistics


class ReducedRows(NamedTuple):
    """Rows of d_input whose sum over the ranks is on its way."""

    part: Tensor  # (n, D)
    work: Any  # what `torch.distributed` returns, or None: the sum is there
    sent: float  # bytes that each rank sends


def of_own_classes(problem: Problem) -> Problem:
    """Returns the problem of this rank's classes alone. Targets in other shards are -1.

    A shard without classes has one whose weight is 0, and `merge` leaves it out.
    """
    own = problem.target - problem.vocab_offset
    own.masked_fill_((own < 0) | (own >= problem.local_classes) | (problem.target >= problem.classes), -1)
    made = replace(problem, target=own, classes=problem.local_classes, vocab_offset=0)
    if problem.local_classes:
        return made
    w, b = problem.linear_weight, problem.linear_bias
    bias = None if b is None else b.new_zeros(1)
    return replace(made, linear_weight=w.new_zeros(1, w.shape[1]), linear_bias=bias, classes=1, grad_into=None)


def own_target_logits(rows: PackedRows, chunk: slice) -> Tensor:
    """Returns the target logits (n,) of packed rows whose targets are classes of this shard, and 0 for the others."""
    return torch.where(rows.target[chunk] >= 0, rows.target_logit[chunk], 0.0)


def place(rows: PackedRows, chunk: slice, logit: Tensor) -> None:
    """Writes the reference exponents of packed rows, by their target logits of all shards (n,)."""
    exponent = (logit * LOG2_E.value).add_(0.5).floor_()
    rows.ref_exponent[chunk] = exponent.masked_fill_(~(logit.abs() < torch.inf), 0.0)
    rows.target_logit[chunk] = logit  # for the estimates of `float16.place`


# With specialization the number of rows would decide the order of the sums, as in `row_kernels.finish_rows_kernel`.
@triton.jit(do_not_specialize=["rows", "stride"])
def own_numbers_kernel(
    sum_ptr, statistic_ptr, ref_exponent_ptr, target_logit_ptr, own_target_ptr, target_ptr, number_ptr, rows, stride,
    class_blocks, block_width, classes, STATISTICS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Writes number (3 + statistics, rows) float32, what this rank gives to the others: the sum of each row's
    exponentials, sum (class blocks, rows); its reference exponent; its target logit where own_target (rows,) int64 is a
    class of this shard, NaN where target (rows,) int64 is none of `classes`, and otherwise 0; and its statistics, those
    of `kernels.store_statistics`, over class blocks of `stride` elements. One program owns BLOCK_N rows.
    """
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    number = number_ptr + row_ids
    tl.store(number, column_sums(sum_ptr, row_ids, rows, rows, class_blocks, BLOCK_N, BLOCK_T), mask=inside)
    tl.store(number + rows, tl.load(ref_exponent_ptr + row_ids, mask=inside, other=0.0), mask=inside)
    owned = tl.load(own_target_ptr + row_ids, mask=inside, other=-1) >= 0
    target = tl.load(target_ptr + row_ids, mask=inside, other=0)
    logit = tl.load(target_logit_ptr + row_ids, mask=inside, other=0.0)
    elsewhere = tl.where((target >= 0) & (target < classes), 0.0, float("nan"))
    tl.store(number + 2 * rows, tl.where(owned, logit, elsewhere), mask=inside)
    number += NUMBERS * rows
    at = statistic_ptr
    if MAX & STATISTICS:
        top = column_maxima(at, row_ids, rows, stride, class_blocks, BLOCK_N, BLOCK_T)
        tl.store(number, top, mask=inside)
        if ARGMAX & STATISTICS:
            column = first_of_largest(at, top, row_ids, rows, stride, class_blocks, block_width, BLOCK_N, BLOCK_T)
            tl.store(number + rows, column.to(tl.float32), mask=inside)
            number += rows
            at += rows
        number += rows
        at += rows
    for _ in range(planes(SUMS & STATISTICS)):
        tl.store(number, column_sums(at, row_ids, rows, stride, class_blocks, BLOCK_N, BLOCK_T), mask=inside)
        number += rows
        at += rows


@triton.jit
def merge_shards_kernel(
    number_ptr, sum_ptr, statistic_ptr, ref_exponent_ptr, target_logit_ptr, rows, ranks, STATISTICS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes the numbers of `packed_rows.ChunkNumbers` from number (ranks, 3 + statistics, rows), which
    `own_numbers_kernel` writes: (53). One program owns BLOCK_N rows."""
    row_ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row_ids < rows
    stride = (NUMBERS + planes(STATISTICS)) * rows
    largest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for rank in range(ranks):
        largest = tl.maximum(largest, tl.load(number_ptr + rank * stride + rows + row_ids, mask=inside, other=0.0))
    logit = tl.zeros((BLOCK_N,), tl.float32)
    for rank in range(ranks):
        number = number_ptr + rank * stride + row_ids
        shift = tl.load(number + rows, mask=inside, other=0.0) - largest
        factor = tl.exp2(shift)
        total = tl.load(number, mask=inside, other=0.0)
        tl.store(sum_ptr + rank * rows + row_ids, total * factor, mask=inside)
        logit += tl.load(number + 2 * rows, mask=inside, other=0.0)
        number += NUMBERS * rows
        at = statistic_ptr + rank * planes(STATISTICS) * rows + row_ids
        for _ in range(planes(OF_LARGEST & STATISTICS)):
            tl.store(at, tl.load(number, mask=inside, other=0.0), mask=inside)
            number += rows
            at += rows
        if ENTROPY & STATISTICS:  # the exponents change with the reference, and so do the terms 2**t * t
            exp_log = tl.load(number, mask=inside, other=0.0)
            tl.store(at, tl.where(factor == 0, 0.0, (exp_log + shift * total) * factor), mask=inside)
            number += rows
            at += rows
        if LOGIT_SUM & STATISTICS:
            tl.store(at, tl.load(number, mask=inside, other=0.0), mask=inside)
            number += rows
            at += rows
        if SQUARES & STATISTICS:
            squares = tl.load(number, mask=inside, other=0.0)
            tl.store(at, tl.where(factor == 0, 0.0, squares * factor * factor), mask=inside)
    tl.store(ref_exponent_ptr + row_ids, largest, mask=inside)
    tl.store(target_logit_ptr + row_ids, logit, mask=inside)


@triton.jit
def put_rows_kernel(part_ptr, row_ptr, row_weight_ptr, d_input_ptr, hidden, BLOCK_D: tl.constexpr):
    """Writes part (n, D) to the rows row (n,) int64 of d_input (N, D), rounded once, where row_weight (n,) is not 0.
    One program owns BLOCK_D columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    if tl.load(row_weight_ptr + row) != 0:
        found = tl.load(part_ptr + row * hidden + columns, mask=columns < hidden, other=0.0)
        place = d_input_ptr + tl.load(row_ptr + row) * hidden + columns
        tl.store(place, found.to(d_input_ptr.dtype.element_ty), mask=columns < hidden)


def put_sum(reduced: ReducedRows, order: At, row_weight: At, d_input: Tensor) -> None:
    """Waits for the sum of rows of d_input, and writes it to the rows `order` (n,) of it."""
    if reduced.work is not None:
        reduced.work.wait()
    n, hidden = reduced.part.shape
    block = column_block(hidden)
    arrays = reduced.part, order, row_weight, d_input
    launch(put_rows_kernel, (n, cdiv(hidden, block)), *arrays, hidden, BLOCK_D=block, num_warps=4)


class PartialSums:
    """The sums over the ranks of their parts of d_input, a chunk at a time.

    Args:
        d_input: (N, D), this rank's rows of the result.
        most_rows: of a chunk.
        dtype: of the parts.
    """

    def __init__(self, d_input: Tensor, most_rows: int, dtype: torch.dtype) -> None:
        self.d_input = d_input
        self.part = d_input.new_empty((most_rows, d_input.shape[1]), dtype=dtype)
        # The sum of a chunk that is on its way, the rows of d_input that it is for, and their row weights.
        self.waiting: tuple[ReducedRows, At, At] | None = None

    def room(self, n: int) -> Tensor:
        """Returns the memory of the parts (n, D) of a chunk, after the sum of the chunk before."""
        self.put()
        return self.part[:n]

    def put(self) -> None:
        """Waits for the sum that is on its way, if there is one, and writes it to its rows of d_input."""
        if self.waiting is not None:
            put_sum(*self.waiting, self.d_input)
            self.waiting = None


class ShardExchange(NoExchange):
    """What ranks with shards of the vocabulary and the same tokens exchange.

    Args:
        problem: of this rank's classes: `of_own_classes`.
        rows, d_input: of `NoExchange`.
        whole: the problem of the classes of all shards.
        waits: whether the sum of d_input of a chunk may end beside the logits of the next chunk.
    """

    picks_places = False
    sums_d_input = True

    def __init__(
        self, problem: Problem, rows: PackedRows, d_input: Tensor | None, whole: Problem, *, waits: bool
    ) -> None:
        super().__init__(problem, rows, d_input)
        assert whole.shard is not None
        self.whole, self.shard, self.waits = whole, whole.shard, waits
        self.most_rows = plan_of(problem).scaled_exp_config.most_rows
        self.in_part: Tensor | None = None  # the rows of a chunk in order
        self.target = self._start()  # (N,) int64, the class; `rows.target` is its place in this shard, or -1
        self.sums = None if d_input is None else PartialSums(d_input, self.most_rows, self.shard.dtype)

    def _start(self) -> Tensor:
        """Writes the target logits of this shard, and the reference exponents of all rows, by the targets' logits of
        all shards. Returns `target`."""
        tokens = len(self.rows.order)
        if tokens:
            packed_rows.pick(self.problem, self.rows, 0, tokens, None)
        logit = own_target_logits(self.rows, slice(0, tokens))
        vocab_shard.all_sum(logit, self.shard.group)
        place(self.rows, slice(0, tokens), logit)
        target = self.whole.target[self.rows.order]
        if self.d_input is not None:
            self.in_part = torch.arange(self.most_rows, device=target.device)
        return target

    def merge(self, chunk: Chunk) -> ChunkNumbers:
        n, whole, numbers = chunk.n, self.whole, chunk.numbers
        statistics = numbers.statistics & OF_LOGITS
        ranks, count = self.shard.ranks, planes_of(statistics)
        grid, target = (cdiv(n, FINISHED_ROWS),), At(self.target, chunk.start)
        own = self.rows.rho.new_empty(NUMBERS.value + count, n)
        launch(
            own_numbers_kernel,
            grid,
            numbers.sums,
            numbers.of_logits,
            numbers.ref_exponent,
            numbers.target_logit,
            numbers.target,
            target,
            own,
            n,
            planes_of(numbers.statistics) * n,
            chunk.class_blocks,
            numbers.block_width,
            whole.classes,
            STATISTICS=statistics,
            BLOCK_N=FINISHED_ROWS,
            BLOCK_T=BLOCKS_AT_ONCE,
            num_warps=4,
        )
        if not whole.local_classes:
            own[0] = 0.0
            own[NUMBERS.value :] = 0.0
            if statistics & bits.MAX:
                own[NUMBERS.value] = -torch.inf
        gathered = vocab_shard.gather(own, ranks, self.shard.group)
        sizes = (ranks, n), (ranks, count, n), (n,), (n,)
        sums, of_logits, exponent, logit = (At(own.new_empty(size), 0) for size in sizes)
        options: dict[str, Any] = {"STATISTICS": statistics, "BLOCK_N": FINISHED_ROWS, "num_warps": 4}
        launch(merge_shards_kernel, grid, gathered, sums, of_logits, exponent, logit, n, ranks, **options)
        of_shard = numbers.target, numbers.ref_exponent
        return ChunkNumbers(
            whole, ranks, self.shard.rows, statistics, sums, of_logits, exponent, logit, target, of_shard
        )

    def unit_numbers(self, numbers: ChunkNumbers) -> ChunkNumbers:
        assert numbers.of_shard is not None
        return numbers._replace(of_shard=(numbers.of_shard[0], numbers.ref_exponent))

    def refer_to_own(self, chunk: Chunk) -> None:
        own = self.rows.ref_exponent[chunk.slice]
        self.rows.rho[chunk.slice] *= torch.exp2(own - chunk.numbers.ref_exponent.tensor)  # (53)

    def room_for_d_input(self, chunk: Chunk) -> tuple[Tensor, At]:
        assert self.sums is not None
        assert self.in_part is not None
        return self.sums.room(chunk.n), At(self.in_part, 0)

    def start_sum(self, chunk: Chunk) -> float:
        """With batch_invariant the sum also ends here."""
        if self.sums is None:
            return 0.0
        part, ranks, group = self.sums.part[: chunk.n], self.shard.ranks, self.shard.group
        if plan_of(self.problem).batch_invariant:
            reduced = ReducedRows(vocab_shard.ordered_sum(part, ranks, group), None, 0.0)
        else:
            sent = vocab_shard.sent_by_sum(ranks, part.nbytes, of_own=False)
            reduced = ReducedRows(part, vocab_shard.start_all_sum(part, group), sent)
        self.sums.waiting = reduced, At(self.rows.order, chunk.start), At(self.rows.row_weight, chunk.start)
        return reduced.sent

    def put_sum(self) -> None:
        if self.sums is not None and not self.waits:
            self.sums.put()

    def finish_sums(self) -> None:
        if self.sums is not None:
            self.sums.put()
        self.sums = self.in_part = None
