"""Tokens of which each rank of a vocabulary has its own, gathered chunk by chunk.

The rows of every rank are packed, first those that contribute. Chunk c has slice c of the packed rows of each rank,
m rows or fewer. So the number of chunks follows from the tokens of a rank, and the host needs no counts. In a chunk the
rows that contribute come first again, in the order of the ranks, so that kernels can stop after the last of them. What
the ranks exchange, besides what they do for a vocabulary with the same tokens (`shard_rows.py`):

    during the chunk before    the rows of the input of a chunk, (ranks m, D), in one of two buffers, and then the
                               targets' logits of these rows
    during d_weight            d_input of a chunk, (ranks m, D): each rank gets the sum of its own rows, (m, D)
    at the end                 the rows of the input of all but two chunks once more, for the targets' terms of
                               d_weight, in the memory of the exponentials

Chunks run from the last to the first. If the targets' terms were added with each chunk, they would make d_weight large
before the other chunks are added, and each of these would round it: with five chunks of float16 that doubled the error
of a test.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core_triton import packed_rows, row_kernels, saved_kernels, shard_rows, target_grad, vocab_shard
from core_triton.exchange import Chunk
from core_triton.launch import At, cdiv, launch
from core_triton.packed_rows import PackedRows
from core_triton.problem import Problem, plan_of
from core_triton.row_kernels import PACKED_ROWS, PASSED_ROWS
from core_triton.shard_rows import ReducedRows, ShardExchange
from core_triton.smoothing import Smoothing


@triton.jit
def counted_rows(row_weight_ptr, tokens, BLOCK: tl.constexpr):
    """Returns how many of row_weight (tokens,) are not 0."""
    count = tl.zeros((), tl.int32)
    for start in range(0, tokens, BLOCK):
        row = start + tl.arange(0, BLOCK)
        count += tl.sum((tl.load(row_weight_ptr + row, mask=row < tokens, other=0.0) != 0).to(tl.int32), 0)
    return count


@triton.jit
def pack_slices_kernel(
    target_ptr, row_weight_ptr, order_ptr, packed_target_ptr, packed_weight_ptr, slot_ptr, place_ptr, count_ptr,
    own_order_ptr, own_counts_ptr, tokens, ranks, own_rank, slice_rows, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Packs the rows of all ranks, target and row_weight (ranks * tokens,), in the order of this file.

    Writes for each packed row its row of the call, order (int64), its target (int64) and row_weight (float32), and its
    row in the gathered rows of its chunk, slot (int64), and its place among the packed rows of its rank, place (int64).
    Writes for each chunk to count (chunks, 4) int32, in its first
    column, the packed row after the last that contributes. Writes for the packed rows of `own_rank` alone their
    row, own_order (tokens,) int64, and whether they contribute, own_counts (tokens,) float32. One program owns BLOCK_N
    rows of a rank, and counts the contributing rows of all ranks.
    """
    rank, first = tl.program_id(1), tl.program_id(0) * BLOCK_N
    weight_ptr = row_weight_ptr + rank.to(tl.int64) * tokens
    of_rank = counted_rows(weight_ptr, tokens, BLOCK)
    row = first + tl.arange(0, BLOCK_N)
    inside = row < tokens
    weight = tl.load(weight_ptr + row, mask=inside, other=0.0)
    contributes = weight != 0
    counts = contributes.to(tl.int32)
    before = counted_rows(weight_ptr, first, BLOCK) + tl.cumsum(counts, 0) - counts
    place = tl.where(contributes, before, of_rank + row - before)  # among the packed rows of the rank
    chunk, within = place // slice_rows, place % slice_rows
    begin = chunk * slice_rows
    size = tl.minimum(slice_rows, tokens - begin)
    count, earlier = tl.zeros((BLOCK_N,), tl.int32), tl.zeros((BLOCK_N,), tl.int32)
    own = tl.minimum(tl.maximum(of_rank - begin, 0), size)
    for other in range(ranks):
        of_other = counted_rows(row_weight_ptr + tl.cast(other, tl.int64) * tokens, tokens, BLOCK)
        of_other = tl.minimum(tl.maximum(of_other - begin, 0), size)
        count += of_other
        earlier += tl.where(other < rank, of_other, 0)
    packed = ranks * begin + tl.where(contributes, earlier + within, count + rank * size - earlier + within - own)
    in_call = rank.to(tl.int64) * tokens + row
    tl.store(order_ptr + packed, in_call, mask=inside)
    tl.store(packed_target_ptr + packed, tl.load(target_ptr + in_call, mask=inside, other=0), mask=inside)
    tl.store(packed_weight_ptr + packed, weight, mask=inside)
    tl.store(slot_ptr + packed, (rank * size + within).to(tl.int64), mask=inside)
    tl.store(place_ptr + packed, place.to(tl.int64), mask=inside)
    is_first = inside & (within == 0) & (rank == 0)  # one row of each chunk
    tl.store(count_ptr + 4 * chunk, ranks * begin + count, mask=is_first)
    is_own = inside & (rank == own_rank)
    tl.store(own_order_ptr + place, row.to(tl.int64), mask=is_own)
    tl.store(own_counts_ptr + place, counts.to(tl.float32), mask=is_own)


class GatheredChunk(NamedTuple):
    """A chunk whose rows of the input are gathered."""

    problem: Problem  # input (n, D) has these rows
    rows: PackedRows  # `order` is the row of that input for each packed row, and `count` that of `kernels.Active`
    chunk: slice


class TokenSlices(ShardExchange):
    """The slices of one call, and what ranks with different tokens exchange. The arguments are those of
    `ShardExchange`, but for `waits`: each sum of d_input ends with its chunk."""

    def __init__(self, problem: Problem, rows: PackedRows, d_input: Tensor | None, whole: Problem) -> None:
        super().__init__(problem, rows, d_input, whole, waits=False)

    def _start(self) -> Tensor:
        """Packs the rows in the order of this file in place of that of `packed_rows`, and starts the first gather.
        Returns `target`."""
        problem, rows, shard, x = self.problem, self.rows, self.shard, self.problem.input
        config = plan_of(problem).scaled_exp_config
        assert config.rows % shard.ranks == 0
        self.slice_rows = config.rows // shard.ranks
        self.chunks = config.chunks(len(problem.target))
        self.left = len(self.chunks)  # the chunks that have not begun
        self.slot, self.place = torch.empty_like(rows.order), torch.empty_like(rows.order)
        self.counts = rows.count.new_empty((len(self.chunks), 4))  # each at a multiple of 16 bytes
        self.own_order, self.own_counts = rows.order.new_empty(shard.tokens), rows.row_weight.new_empty(shard.tokens)
        launch(
            pack_slices_kernel,
            (cdiv(shard.tokens, PACKED_ROWS), shard.ranks),
            problem.target,
            problem.row_weight,
            rows.order,
            rows.target,
            rows.row_weight,
            self.slot,
            self.place,
            self.counts,
            self.own_order,
            self.own_counts,
            shard.tokens,
            shard.ranks,
            shard.rank,
            self.slice_rows,
            BLOCK=PASSED_ROWS,
            BLOCK_N=PACKED_ROWS,
            num_warps=8,
        )
        self.buffers = x.new_empty((self.chunks[:2][-1].stop, x.shape[1]))  # one after the other
        own_rows = 0 if self.d_input is None else self.slice_rows
        self.own_part = x.new_empty((own_rows, x.shape[1]), dtype=shard.dtype)
        self.target_logits: tuple[Tensor, Any] | None = None  # those of a chunk, whose sums are on their way
        self.gather = self._start_gather(len(self.chunks) - 1)
        return self.whole.target[rows.order]

    @property
    def stored_classes(self) -> int:
        """Those of the largest shard: on all ranks the memory holds as many rows in `add_targets`."""
        return self.shard.rows

    def _start_gather(self, number: int) -> Any:
        """Starts to gather the rows of a chunk."""
        return self._start_gather_of(self._of(number).problem.input, number * self.slice_rows)

    def _start_gather_of(self, result: Tensor, first: int) -> Any:
        """Starts to gather the packed rows of each rank from `first` on to result (n, D), n / ranks of each."""
        size = len(result) // self.shard.ranks
        own = result[size * self.shard.rank :][:size]
        places = {"order": At(self.own_order, first), "factor": At(self.own_counts, first)}
        saved_kernels.pick_rows(self.problem.input, own, **places)
        return vocab_shard.start_gather(result, own, self.shard.group)

    def _of(self, number: int) -> GatheredChunk:
        chunk = self.chunks[number]
        first = number % 2 * self.chunks[0].stop
        problem = replace(self.problem, input=self.buffers[first : first + chunk.stop - chunk.start])
        rows = self.rows._replace(order=self.slot, count=self.counts[number, 0])
        return GatheredChunk(problem, rows, chunk)

    def begin(self, chunk: slice) -> tuple[Problem, PackedRows]:
        """Also starts to gather the rows of the chunk after it."""
        number = self.chunks.index(chunk)
        assert number == self.left - 1, "chunks run from the last to the first"
        self.left = number
        if self.target_logits is None:
            self._start_target_logits(number)
        assert self.target_logits is not None
        logit, work = self.target_logits
        work.wait()
        shard_rows.place(self.rows, chunk, logit)
        if number:
            self.gather = self._start_gather(number - 1)
        return self._of(number)[:2]

    def _start_target_logits(self, number: int) -> None:
        """Starts the sum of the target logits of a chunk, whose rows must have arrived."""
        self.gather.wait()
        problem, rows, chunk = self._of(number)
        packed_rows.pick(problem, rows, chunk.start, chunk.stop - chunk.start, None)
        logit = shard_rows.own_target_logits(rows, chunk)
        self.target_logits = logit, vocab_shard.start_all_sum(logit, self.shard.group)

    def add_smoothing(self, smoothing: Smoothing, chunk: Chunk) -> None:
        x = self._of(self.chunks.index(chunk.slice)).problem.input
        loss = torch.zeros(len(x), dtype=torch.float32, device=x.device)  # of each row of x
        of_chunk = replace(smoothing, problem=replace(smoothing.problem, input=x))
        order, vectors = At(self.slot, chunk.start), self._of_smoothing(chunk)
        of_chunk.add_to_rows(len(x), order=order, **vectors, loss_out=loss)
        self.rows.loss_out[self.rows.order[chunk.slice]] += loss[self.slot[chunk.slice]]

    def room_for_d_input(self, chunk: Chunk) -> tuple[Tensor, At]:
        assert self.sums is not None
        return self.sums.room(chunk.n), At(self.slot, chunk.start)

    def start_sum(self, chunk: Chunk) -> float:
        """The sum over the ranks is that of the rows of this rank. Also starts the sum of the target logits of the
        chunk after this one."""
        sent = 0.0
        if self.sums is not None:
            assert self.sums.waiting is None  # so that nothing reads `own_part` any more
            part, ranks = self.sums.part[: chunk.n], self.shard.ranks
            own, start = self.own_part[: chunk.n // ranks], chunk.start // ranks
            sent = vocab_shard.sent_by_sum(ranks, part.nbytes, of_own=True)
            reduced = ReducedRows(own, vocab_shard.start_own_sum(own, part, self.shard.group), sent)
            self.sums.waiting = reduced, At(self.own_order, start), At(self.own_counts, start)
        number = self.chunks.index(chunk.slice)
        if number:
            self._start_target_logits(number - 1)
        return sent

    def add_targets(self, d_weight: Tensor | None, d_bias: Tensor | None, memory: Tensor) -> None:
        """The buffers still have the rows of the input of the first two chunks. The others are gathered once more, as
        many at a time as `memory` holds, or else a buffer."""
        assert self.left == 0
        rows, ranks, tokens = self.rows, self.shard.ranks, self.shard.tokens
        hidden, size = self.problem.input.shape[1], self.chunks[0].stop
        count, classes = rows.count.new_full((), len(rows.order)), self.problem.classes
        held = min(2 * self.slice_rows, tokens) if d_weight is not None else tokens
        memory = max(memory, self.buffers, key=Tensor.numel).view(-1)

        def add(x: Tensor, row: Tensor, first: int, last: int) -> None:
            here = (rows.row_weight != 0) & (self.place >= first) & (self.place < last)
            sorted_rows = target_grad.sort_by_target(
                torch.where(here, rows.target, -1), row, rows.theta, count, classes
            )
            target_grad.add_targets(x, *sorted_rows, count, classes, d_weight=d_weight, d_bias=d_bias)

        add(self.buffers, self.slot + size * (self.place >= self.slice_rows), 0, held)
        most = memory.numel() // (ranks * hidden)
        for first in range(held, tokens, most):
            n = min(most, tokens - first)
            x = memory[: ranks * n * hidden].view(ranks * n, hidden)
            self._start_gather_of(x, first).wait()
            add(x, rows.order // tokens * n + self.place - first, first, first + n)

    def contributing_first(self, shift: Tensor) -> Tensor:
        return torch.where(self.rows.row_weight != 0, shift, 0.0).sort(descending=True).values

    def finish_call(self, row_weight: Tensor, loss: Tensor | None) -> Tensor | None:
        if self.d_input is not None:
            row_kernels.finish_call(row_weight[self.problem.own_tokens], self.d_input, None)
        return None if loss is None else row_kernels.finish_call(row_weight, None, loss)
