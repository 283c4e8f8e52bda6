"""Plans A and B with scaled exponentials: the exponentials of each row relative to a per-row reference.

The reference of a row is 2**k, and the integer k is its reference exponent. The kernels store
2**(logit * log2(e) - k) (MATH.md section 8). The scale changes no mantissa, so the results do not depend on k as long
as the exponentials stay within the range of bfloat16. At first k comes from the target's logit. Row blocks that leave
the range are computed again with k from the largest logit. `ranges.py` counts them. float16 has a smaller range:
`float16.py`.

Plan A is three matmuls. The first computes the logits and stores their exponentials. The gradients are matmuls of the
exponentials. Plan A with scaled exponentials is for 16 bits, with label smoothing where its terms are of rank one
(`smoothing.py`). The backward pass of plan C runs it too, with the upstream gradients as row weights. The steps of
`ScaledExpCall` for each chunk of rows:

    rows of the input that contribute, packed         `_begin`
    exponentials and their sums                       `_store_exponentials`
    loss, and the factors of rows; x becomes rho x    `_finish_rows`, for float16 `_fit_in_float16`
    d_weight += E^T (rho x)                           `_add_to_d_weight`
    d_input = rho (E W) + theta w_target              `_store_d_input`

A first chunk may be larger than the others, with most of its exponentials in the memory of d_weight, which is not
written yet (`StoredExponentials`). Its d_input is computed before its d_weight.

At the end the targets' terms of d_weight are added for all rows (`_finish_head`). Plan B is the first three steps, for
bfloat16 and float16. It stores only the sums.

Where ranks gathered the head, the last chunk's d_weight is sent to them in parts: `d_weight_parts.py`.

Where the ranks of a process group have shards of the vocabulary, they exchange the sums before a chunk's factors, and
their parts of d_input after its matmul: `shard_rows.py`. If they have different tokens, they gather them a chunk ahead:
`token_slices.py`. The steps call both through the interface of `exchange.py`.

A token loss needs the log-probabilities of a chunk before the factors of its rows. For it, `row_kernels.finish_rows`
runs twice (`_call_token_loss`).
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from core_triton import (
    ampere_gradients,
    ampere_logits,
    d_weight_parts,
    float16,
    hopper_gradients,
    hopper_logits,
    hopper_split_logits,
    input_grad,
    kernels,
    packed_rows,
    ranges,
    row_kernels,
    row_statistics,
    saved_kernels,
    shard_rows,
    target_grad,
    tile_config,
    token_kernels,
)
from core_triton.exchange import Chunk, NoExchange
from core_triton.first_chunk import StoredExponentials, Stores
from core_triton.head_copy import head_of
from core_triton.head_scatter import HeadScatter
from core_triton.kernels import Active
from core_triton.launch import At, cdiv, on_device
from core_triton.packed_rows import ChunkNumbers, PackedRows, half_tiles, pack_rows
from core_triton.problem import (
    NOTHING_COMPUTED,
    NOTHING_SAVED,
    ClassSum,
    Gradients,
    NeedsGrad,
    Problem,
    SavedRows,
    add_matmul,
    operand,
    plan_of,
)
from core_triton.row_math import RowStatistics
from core_triton.shard_rows import ShardExchange
from core_triton.smoothing import Smoothing
from core_triton.token_hook import TokenHook
from core_triton.token_slices import TokenSlices
from linear_ce.statistics import BY_ROW, OF_BLOCKS, SHIFTS, planes


def scaled_exp(
    problem: Problem,
    needs_grad: NeedsGrad,
    *,
    statistics: int,
    reduce: bool = False,
    hook: TokenHook | None = None,
    d_input: Tensor | None = None,
    scales: Tensor | None = None,
    scatter: HeadScatter | None = None,
) -> tuple[Tensor, RowStatistics, Gradients]:
    """Runs plan A, or plan B if no gradient is needed: (29)-(33).

    The rows that contribute are packed first, so that kernels can stop after the last of them. The host does not know
    their number. A packed row never comes from an earlier row than its own position, and chunks run from the last to
    the first. So the memory of d_input can hold the packed rows of the input until each chunk's gradient replaces them.

    Args:
        statistics: of `linear_ce.statistics`.
        hook: a token loss in place of the cross-entropy, for plan A without class weights and z-loss.
        d_input: where d_input is written, if not to a new tensor.
        scales: (2,) powers of two that d_input and the gradients of the head are multiplied by, for float16.
        scatter: sends d_weight in parts, if it can. Then there is no d_weight, and the head is overwritten.

    Returns:
        The weighted loss of each row (N,), or their sum () with `reduce`; the statistics of the rows, with those of
        the logits only if they are in `statistics`; and the gradients of the sum. With a hook and without `statistics`,
        lse and the target logit are 0 in rows whose gradients are 0.
    """
    options: dict[str, Any] = {"reduce": reduce, "hook": hook, "d_input": d_input, "scales": scales, "scatter": scatter}
    with on_device(problem.input.device):
        return ScaledExpCall(problem, needs_grad, statistics=statistics, **options).run()


def save_rows(problem: Problem, needs_grad: NeedsGrad, *, statistics: int) -> tuple[Tensor, RowStatistics, SavedRows]:
    """Runs plan A for upstream gradients of 1, without the gradients of the head and without label smoothing.

    Returns:
        The weighted loss of each row (N,), the statistics, and what `saved_gradients` needs.
    """
    x, e = problem.input, None
    if needs_grad.d_weight or needs_grad.d_bias:
        e = x.new_empty((len(x), tile_config.padded(problem.most_classes)))
    only_input, unit_scale = NeedsGrad(needs_grad.d_input, False, False), None
    if needs_grad.d_input and plan_of(problem).fits_float16:
        unit_scale = torch.empty_like(problem.row_weight)
    with on_device(x.device):
        options: dict[str, Any] = {"saved_e": e, "unit_scale": unit_scale}
        call = ScaledExpCall(problem, only_input, statistics=statistics, **options)
        loss, found, gradients = call.run()
    rows = call.rows
    saved = NOTHING_SAVED._replace(e=e, unit_d_input=gradients.d_input, unit_scale=unit_scale)
    if e is not None:
        saved = saved._replace(
            rho=rows.rho, theta=rows.theta, packed_target=rows.target, order=rows.order, count=rows.count
        )
    if e is not None and rows.float16 is not None:
        saved = saved._replace(largest_x=rows.float16.largest_x)
    return loss, found, saved


def saved_gradients(
    problem: Problem, saved: SavedRows, factor: Tensor, needs_grad: NeedsGrad, others: Gradients
) -> Gradients:
    """Returns the gradients of the head by saved rows, added to those by other rows: (42).

    Args:
        problem: that of `save_rows`.
        factor: (N,) the upstream gradients times `unit_scale`, if not None; 0 in rows that do not contribute.
    """
    if saved.e is None or not (needs_grad.d_weight or needs_grad.d_bias):
        return others
    if problem.shard is not None and not problem.local_classes:
        return _no_gradients(problem, needs_grad) if others is NOTHING_COMPUTED else others
    if problem.shard is not None:
        problem = shard_rows.of_own_classes(problem)
    assert saved.order is not None
    assert saved.count is not None
    plan, x, b, classes = plan_of(problem), problem.input, problem.linear_bias, problem.classes
    config, first = plan.scaled_exp_config, others.d_weight is None and others.d_bias is None
    d_weight, d_bias = None, None
    if needs_grad.d_weight:
        d_weight = ClassSum(problem.linear_weight, classes, float32_sum=False, total=others.d_weight)
    if needs_grad.d_bias:
        d_bias = problem.row_weight.new_empty(classes) if others.d_bias is None else others.d_bias[:classes].float()
    with on_device(x.device):
        rows = saved_kernels.multiply_rows(saved, factor)
        hidden = tile_config.padded_hidden(x.shape[1], x.itemsize)
        scaled = (x.new_empty if hidden == x.shape[1] else x.new_zeros)((config.rows, hidden))
        factor, fitted, scratch = rows.rho, None, scaled
        if d_weight is not None and plan.fits_float16:  # the chunks' powers of two depend on all upstream gradients
            assert saved.largest_x is not None
            factor = (rows.rho != 0).float()
            if not plan.d_weight_kernel:
                scratch = rows.rho.new_empty(config.scratch)
            of_chunks = torch.zeros(len(config.chunks(len(x))), dtype=torch.int32, device=x.device)
            fitted = float16.make_rows(rows.rho, of_chunks, None)._replace(largest_x=saved.largest_x)
        for chunk in problem.chunks(config.rows):
            n, starts = chunk.stop - chunk.start, first and chunk.start == 0
            e, chunk_x = saved.e[chunk, :classes], scaled[:n]
            rho = At(rows.rho, chunk.start)
            if d_weight is not None:
                saved_kernels.pick_rows(x, chunk_x, order=At(saved.order, chunk.start), factor=At(factor, chunk.start))
                count: Tensor | At = saved.count
                if fitted is not None:
                    of_rows: dict[str, Any] = {"rho": rows.rho, "theta": rows.theta, "count": saved.count}
                    of_rows |= {"e": StoredExponentials(e), "x": chunk_x}
                    number = chunk.start // config.rows
                    count = float16.finish(problem, fitted, number, chunk.start, n, 0, 1, 1, of_logits=rho, **of_rows)
                active = Active(count, chunk.start, int(starts))
                _add_d_weight(problem, e, chunk_x, scratch, active, d_weight, slice(0, classes), first=starts)
            if d_bias is not None:
                row_kernels.add_class_sums(d_bias, e, rho, first=starts)
        total = None if d_weight is None else d_weight.sum
        found = target_grad.sort_by_target(rows.target, saved.order, rows.theta, saved.count, classes)
        target_grad.add_targets(x, *found, saved.count, classes, d_weight=total, d_bias=d_bias)
        if d_weight is not None and first and classes < len(d_weight.total):
            row_kernels.zero(d_weight.total[classes:])
        if d_bias is not None:
            assert b is not None
            d_bias = row_kernels.class_gradient(d_bias, b)
    return Gradients(None, None if d_weight is None else d_weight.total, d_bias)


class ScaledExpCall:
    """One call. It decides and allocates what it needs; `run` has the steps in order.

    Args:
        problem, needs_grad, statistics, reduce, hook, d_input, scales, scatter: those of `scaled_exp`.
        saved_e: (N, padded K), to which the exponentials of all rows are written, if rows are saved.
        unit_scale: (N,), to which the powers of two are written that d_input of float16 is divided by, if rows are
            saved.
    """

    def __init__(
        self,
        problem: Problem,
        needs_grad: NeedsGrad,
        *,
        statistics: int,
        reduce: bool = False,
        hook: TokenHook | None = None,
        d_input: Tensor | None = None,
        saved_e: Tensor | None = None,
        unit_scale: Tensor | None = None,
        scales: Tensor | None = None,
        scatter: HeadScatter | None = None,
    ) -> None:
        plan = plan_of(problem)
        assert plan.tile is not None
        self.plan, self.config, self.needs_grad = plan, plan.scaled_exp_config, needs_grad
        self.reduce, self.hook, self.saved_e, self.unit_scale = reduce, hook, saved_e, unit_scale
        # Once for each half of the head, which are side by side in a copy.
        self.takes_rows_twice = problem.spec.splits_head and not plan.splits_in_place
        self.smoothing = Smoothing.of(problem, self.config.head_rows, scales)
        self.whole = problem if self.smoothing is None else self.smoothing.problem  # of all classes
        # Of the classes of this rank, as all that follows.
        self.problem = self.whole if self.whole.shard is None else shard_rows.of_own_classes(self.whole)
        self.tokens, self.classes = len(problem.target), self.problem.classes
        self.chunks = self.config.chunks(self.tokens)
        self.fits_float16 = plan.fits_float16 and (any(needs_grad) or saved_e is not None)
        self.statistics = statistics | SHIFTS if self.fits_float16 else statistics
        self.by_row = statistics & BY_ROW != 0
        # The classes of a class block: a vocabulary chunk has fewer classes than a tile, or whole tiles.
        self.block_width = min(self.config.head_rows, plan.class_block)
        self._make_gradients(d_input)
        self.rows = pack_rows(self.problem, statistics=self.statistics, scales=scales)
        self.exchange = self._make_exchange()
        self.smooth = None  # where d_input gets the terms of label smoothing before it is rounded
        if self.smoothing is not None and self.d_input is not None and plan.fits_float16:
            self.smooth = self.smoothing.of_input(self.rows.row_weight)
        self.stored = saved_e
        if saved_e is None and any(needs_grad):
            width = tile_config.padded(self.exchange.stored_classes)
            self.stored = problem.input.new_empty((self.config.rows, width))
        self.scratch = problem.row_weight.new_empty(self.config.scratch)
        self.held = self._hold_rows()
        self.gradient_rows = self.rows  # where the results go that are computed with the row weights of the gradients
        if hook is not None and self.statistics & ~BY_ROW:
            unused = torch.empty_like(self.rows.loss_out)
            others = {"lse_out": unused, "target_logit_out": unused, "top_out": None}
            self.gradient_rows = self.rows._replace(loss_out=unused, **others)
        sends = self.d_weight is not None and d_weight_parts.can_send(scatter, self.problem, self.tokens)
        self.scatter = scatter if sends else None

    def _make_gradients(self, d_input: Tensor | None) -> None:
        """Allocates the gradients that are needed, d_weight when it is first used."""
        x, w, needs_grad = self.problem.input, self.problem.linear_weight, self.needs_grad
        self.d_input, self.d_weight, self.d_bias = d_input, None, None
        if needs_grad.d_input and d_input is None:
            self.d_input = torch.empty_like(x, memory_format=torch.contiguous_format)
        if needs_grad.d_weight:
            self.d_weight = ClassSum(w, self.classes, float32_sum=False, into=self.problem.grad_into)
        if needs_grad.d_bias:
            self.d_bias = self.problem.row_weight.new_empty(self.classes)
            if not self.tokens:
                self.d_bias.zero_()
        if self.smoothing is not None and self.d_weight is not None and self.plan.fits_float16:
            self.smoothing.start_head(self.d_weight)

    def _make_exchange(self) -> NoExchange:
        """Returns how the ranks exchange what they computed."""
        own, shard = (self.problem, self.rows, self.d_input), self.whole.shard
        if shard is None:
            return NoExchange(*own)
        if shard.tokens:
            return TokenSlices(*own, self.whole)
        return ShardExchange(*own, self.whole, waits=self.d_weight is None)

    def _hold_rows(self) -> Tensor:
        """Returns the memory of the packed rows of the input, which have zeros in rows that do not contribute.

        It is that of d_input, which has the rows of all chunks, or a buffer of one chunk. The rows of a first chunk in
        pieces are always in a buffer.
        """
        x = self.problem.input
        if self.plan.holds_rows:
            assert self.d_input is not None
            held, others = self.d_input, self.tokens - self.config.first_rows
            if others or not self.tokens:
                places = self.exchange.picks_places
                packed_rows.pick(self.problem, self.rows, 0, others, held[:others], places=places)
            return held
        width = x.shape[1] * (1 + self.takes_rows_twice)
        padded_hidden = tile_config.padded_hidden(width, x.itemsize)
        return (x.new_empty if padded_hidden == width else x.new_zeros)((self.config.most_rows, padded_hidden))

    def run(self) -> tuple[Tensor, RowStatistics, Gradients]:
        """Runs the call: its chunks from the last to the first, and then what is done once. Returns the results of
        `scaled_exp`."""
        for place in reversed(self.chunks):
            self._chunk(place)
        self.exchange.finish_sums()
        del self.held, self.scratch
        self._finish_head()
        if self.smoothing is not None and self.d_input is not None and self.smooth is None and self.tokens:
            self.smoothing.add_to_input(self.d_input)
        gradients = Gradients(self.d_input, *self._results_of_head())
        self._report_ranges()
        return *self._results_of_rows(), gradients

    def _chunk(self, place: slice) -> None:
        """Computes a chunk: the results of its rows, and its part of the gradients."""
        chunk = self._begin(place)
        self._store_exponentials(chunk)
        chunk.numbers = self.exchange.merge(chunk)
        if self.hook is not None:
            self._call_token_loss(chunk, self.hook)
        self._finish_rows(chunk)
        if self.saved_e is not None and chunk.e is not None:
            saved_kernels.clear(chunk.e.first, At(self.rows.rho, chunk.start))
        if self.unit_scale is not None:
            self._scale_units(chunk, self.unit_scale)
        if self.smoothing is not None:
            self.exchange.add_smoothing(self.smoothing, chunk)
        if chunk.e is None:
            return
        if self.plan.fits_float16:
            self._fit_in_float16(chunk, chunk.e)
        if self.d_bias is not None:
            self._add_d_bias(chunk, chunk.e, self.d_bias)
        d_input_first = chunk.d_input_first or self.exchange.sums_d_input
        if self.d_input is not None and d_input_first:
            self._store_d_input(chunk, chunk.e)
        sent = self.exchange.start_sum(chunk)
        if chunk.sends:
            self._send_d_weight(chunk, chunk.e)
        elif self.d_weight is not None:
            self._add_to_d_weight(chunk, chunk.e, self.d_weight, sent)
        if self.d_input is not None and not d_input_first:
            self._store_d_input(chunk, chunk.e)
        self.exchange.put_sum()

    def _begin(self, place: slice) -> Chunk:
        """Returns a chunk with its rows of the input and the memory of its exponentials."""
        n, start, first = place.stop - place.start, place.start, place is self.chunks[-1]
        sends = self.scatter is not None and place is self.chunks[0]
        of_input, rows = self.exchange.begin(place)
        in_pieces = self.config.first_rows > 0 and first
        d_input_first = in_pieces or sends
        x, e = self._rows_of_input(of_input, rows, place, d_input_first=d_input_first), None
        if self.stored is not None and in_pieces:
            assert self.d_weight is not None
            memory, piece = self.d_weight.total, self.config.piece
            e = StoredExponentials.in_d_weight(self.stored, memory, n, piece, self.classes)
        elif self.stored is not None:
            e = StoredExponentials(self.stored[slice(0, n) if self.saved_e is None else place, : self.classes])
        # cuBLAS's GEMM adds all rows of the chunk to d_weight, so none of them may be NaN.
        least = int(first or sends or self.saved_e is not None)
        if (self.d_weight is not None or self.saved_e is not None) and not self.plan.d_weight_kernel:
            least = n
        active, row_weight = Active(rows.count, start, least), At(self.rows.row_weight, start)
        return Chunk(
            place, first, sends, d_input_first, rows, x, e, active, self._own_numbers(place), row_weight, rows.count
        )

    def _rows_of_input(self, of_input: Problem, rows: PackedRows, place: slice, *, d_input_first: bool) -> Tensor:
        """Returns the packed rows of the input of a chunk, (n, D or more), which are in the input of `of_input`."""
        n, hidden = place.stop - place.start, self.problem.input.shape[1]
        x = self.held[place] if self.plan.holds_rows else self.held[:n]
        if self.plan.holds_rows and d_input_first:
            x = self.problem.input.new_empty((n, hidden))
        if not self.plan.holds_rows or d_input_first:
            packed_rows.pick(of_input, rows, place.start, n, x[:, :hidden], places=self.exchange.picks_places)
        if self.takes_rows_twice:
            x[:, hidden : 2 * hidden] = x[:, :hidden]
        return x

    def _own_numbers(self, place: slice) -> ChunkNumbers:
        """Returns the numbers of a chunk's rows of this rank's classes, which `_store_exponentials` writes."""
        rows, blocks, start = self.rows, self.config.blocks, place.start
        return ChunkNumbers(
            self.problem,
            blocks,
            self.block_width,
            self.statistics & OF_BLOCKS,
            At(self.scratch, 0),
            At(self.scratch, blocks * (place.stop - start)),
            At(rows.ref_exponent, start),
            At(rows.target_logit, start),
            At(rows.target, start),
        )

    def _store_exponentials(self, chunk: Chunk) -> None:
        """Writes a chunk's exponentials, if they are stored, their sums over each class block, and the targets' logits.

        The sums (blocks, n) are at the start of `scratch`. The statistics of each class block follow. Row blocks whose
        sums leave the range are computed again with reference exponents from their largest logits. The host does not
        know which blocks these are, so the repair kernel is always launched. If there are none, it has nothing to do.
        Rows after the active ones may be left unchanged.
        """
        problem, plan, config, rows = self.problem, self.plan, self.config, self.rows
        n, start = chunk.n, chunk.start
        assert plan.tile is not None
        number, of_logits = start // config.rows, self.statistics & OF_BLOCKS

        def options_of(vocab_chunk: slice, first_block: int) -> tuple[slice, dict[str, Any]]:
            place = first_block * n
            statistics = At(self.scratch, config.blocks * n + planes(self.statistics) * place)
            return vocab_chunk, {
                "target": At(rows.target, start),
                "ref_exponent": At(rows.ref_exponent, start),
                "flag": At(rows.flag, number),
                "sums": At(self.scratch, place),
                "statistics": of_logits,
                "of_logits": statistics if of_logits else None,
                "target_logit": At(rows.target_logit, start),
                "e": Stores(None) if chunk.e is None else chunk.e.stores(vocab_chunk),
            }

        vocab_chunks = problem.vocab_chunks(config.head_rows)
        blocks = [cdiv(vocab_chunk.stop - vocab_chunk.start, plan.class_block) for vocab_chunk in vocab_chunks]
        parts = list(map(options_of, vocab_chunks, accumulate(blocks, initial=0)))
        chunk.class_blocks = sum(blocks)
        for vocab_chunk, options in parts:
            # The head's chunk may be a copy: it is freed before the next one is made.
            if plan.hopper:
                place = number * half_tiles(problem, config.rows)
                hit = None if rows.hit is None else At(rows.hit.view(torch.int8), place)
                head = head_of(problem, vocab_chunk)
                split, whole = hopper_split_logits.split_exponentials, hopper_logits.exponentials
                run = split if plan.splits_in_place else whole
                run(problem, chunk.x, head, vocab_chunk, chunk.active, **options, hit=hit)
            else:
                module = ampere_logits if plan.ampere_tile is not None else kernels
                head = head_of(problem, vocab_chunk)
                module.exponentials(problem, chunk.x, head, vocab_chunk, chunk.active, **options)
            del head
        if self.by_row:
            row_statistics.keep_rows(n, chunk.class_blocks, sums=At(self.scratch, 0), top=At(rows.top, start))
        whole_blocks = config.head_rows >= problem.classes or config.head_rows % plan.class_block == 0
        reads = plan.reads_split_head and whole_blocks  # no copies, so no vocabulary chunks
        self._repair(chunk, [options_of(slice(0, problem.classes), 0)] if reads else parts, reads=reads)

    def _repair(self, chunk: Chunk, parts: list[tuple[slice, dict[str, Any]]], *, reads: bool) -> None:
        """Computes the exponentials of flagged row blocks again. `parts`: each vocabulary chunk with its options.
        `reads`: whether the kernel reads the head in place, and not copies of it."""
        problem, rows, number = self.problem, self.rows, chunk.start // self.config.rows
        # The new reference exponents need the largest logits of all vocabulary chunks.
        for finds, redoes in [(True, True)] if len(parts) == 1 else [(True, False), (False, True)]:
            for vocab_chunk, options in parts:
                kernels.repair(
                    problem,
                    chunk.x,
                    problem.linear_weight[vocab_chunk] if reads else head_of(problem, vocab_chunk, options["flag"]),
                    vocab_chunk,
                    **options,
                    top=At(rows.top, chunk.start),
                    ticket=At(rows.ticket, number),
                    finds=finds,
                    redoes=redoes,
                    by_row=self.by_row,
                )

    def _call_token_loss(self, chunk: Chunk, hook: TokenHook) -> None:
        """Calls the token loss on the rows. Their row weights become those of the gradients: (35)."""
        rows = self.rows
        # With row weights of 1, and without z-loss and class weights, the loss is the negative log-likelihood.
        ones = token_kernels.contributes(rows.row_weight[chunk.slice])
        packed_rows.finish(chunk.numbers, rows, chunk.slice, row_weight=At(ones, 0), e=None, x=None, by_row=True)
        packed_rows.finish_statistics(chunk.numbers, rows, chunk.slice)
        weight = hook.process(rows.order[chunk.slice], rows.loss_out, of_call=True)
        assert weight is not None
        chunk.row_weight = At(weight, 0)

    def _finish_rows(self, chunk: Chunk) -> None:
        """Writes the results of the rows. Prepares e and x for the matmuls of the gradients, but for float16."""
        numbers = chunk.numbers if self.unit_scale is None else self.exchange.unit_numbers(chunk.numbers)
        x = None if self.d_weight is None or self.plan.fits_float16 else chunk.x
        options: dict[str, Any] = {"row_weight": chunk.row_weight, "e": chunk.e, "x": x, "by_row": self.by_row}
        packed_rows.finish(numbers, self.gradient_rows, chunk.slice, **options)
        if self.hook is None:
            packed_rows.finish_statistics(chunk.numbers, self.rows, chunk.slice)

    def _scale_units(self, chunk: Chunk, unit_scale: Tensor) -> None:
        """Divides rho and theta of saved rows of float16 by powers of two: (52)."""
        order, rho, theta = (At(one, chunk.start) for one in (self.rows.order, self.rows.rho, self.rows.theta))
        saved_kernels.scale_units(chunk.numbers, chunk.n, order=order, rho=rho, theta=theta, scale_out=unit_scale)
        self.exchange.refer_to_own(chunk)

    def _fit_in_float16(self, chunk: Chunk, e: StoredExponentials) -> None:
        """Prepares the exponentials of float16, and x, for the matmuls of the gradients."""
        rows, config = chunk.rows, self.config
        assert rows.float16 is not None
        chunk.count = float16.finish(
            self.problem,
            rows.float16,
            chunk.start // config.rows,
            chunk.start,
            chunk.n,
            chunk.class_blocks,
            self.block_width,
            planes(self.statistics),
            of_logits=At(self.scratch, config.blocks * chunk.n),
            rho=rows.rho,
            theta=rows.theta,
            count=rows.count,
            e=e,
            x=None if self.d_weight is None else chunk.x,
        )

    def _add_d_bias(self, chunk: Chunk, e: StoredExponentials, d_bias: Tensor) -> None:
        """Adds the rows to d_bias, without the targets' terms."""
        for vocab_chunk in e.pieces(self.classes):
            rho = At(self.rows.rho, chunk.start)
            row_kernels.add_class_sums(d_bias[vocab_chunk], e.of(vocab_chunk), rho, first=chunk.first)

    def _store_d_input(self, chunk: Chunk, e: StoredExponentials) -> None:
        """Writes d_input of the rows, or this rank's part of it: (32)."""
        d_input, order = self.exchange.room_for_d_input(chunk)
        if self.plan.d_input_tiling is None:
            self._store_d_input_by_cublas(chunk, e, d_input, order)
            return
        rows = chunk.rows
        module = hopper_gradients if self.plan.hopper else ampere_gradients
        made = module.d_input_launch(self.problem, self.config, e, smooth=self.smooth is not None)
        input_grad.store_d_input(
            made,
            self.problem,
            self.config,
            chunk.n,
            Active(rows.count, chunk.start, 0),
            partial_sums=self.scratch,
            rho=At(rows.rho, chunk.start),
            theta=At(rows.theta, chunk.start),
            target=At(rows.target, chunk.start),
            order=order,
            d_input=d_input,
            smooth=self._smooth_from(chunk.start),
        )

    def _store_d_input_by_cublas(self, chunk: Chunk, e: StoredExponentials, d_input: Tensor, order: At) -> None:
        """Writes the rows to the rows `order` (n,) of d_input: a matmul in float32, and a pass over its result."""
        problem, config, rows, hidden = self.problem, self.config, chunk.rows, d_input.shape[1]
        dtype = e.first.dtype
        for start in range(chunk.slice.start, chunk.slice.stop, config.d_input_rows):
            n = min(config.d_input_rows, chunk.slice.stop - start)
            within = slice(start - chunk.start, start - chunk.start + n)
            e_w = self.scratch[: n * hidden].view(n, hidden)
            for vocab_chunk in e.pieces(self.classes, config.head_rows):
                casts = problem.linear_weight.dtype != dtype
                w = operand(head_of(problem, vocab_chunk), dtype) if casts else problem.operand_of(vocab_chunk)
                e_chunk = operand(e.of(vocab_chunk)[within], dtype)
                for first in range(0, hidden * (1 + problem.spec.splits_head), hidden):
                    half = w[:, first : first + hidden]  # of a split head, or all of another
                    add_matmul(e_w, e_chunk, half, first=vocab_chunk.start == first == 0)
                del w, half  # else the chunk of the head stays alive until the next one exists
            row_kernels.finish_d_input(
                problem,
                e_w,
                rho=At(rows.rho, start),
                theta=At(rows.theta, start),
                target=At(rows.target, start),
                row_weight=At(rows.row_weight, start),
                order=At(order.tensor, order.start + within.start),
                d_input=d_input,
                smooth=self._smooth_from(start),
            )

    def _smooth_from(self, start: int) -> tuple[At, Tensor] | None:
        """Returns the terms of `Smoothing.of_input` for packed rows from `start` on."""
        return None if self.smooth is None else (At(self.smooth[0], start), self.smooth[1])

    def _add_to_d_weight(self, chunk: Chunk, e: StoredExponentials, d_weight: ClassSum, sent: float) -> None:
        """Adds the rows to d_weight, without the targets' terms. `sent`: bytes that this GPU sends meanwhile."""
        active, first = Active(chunk.count, chunk.start, int(chunk.first)), chunk.first
        for vocab_chunk in reversed(e.pieces(self.classes)):
            arrays = e.of(vocab_chunk), chunk.x, self.scratch, active, d_weight
            _add_d_weight(self.problem, *arrays, vocab_chunk, first=first, sent=sent)

    def _send_d_weight(self, chunk: Chunk, e: StoredExponentials) -> None:
        """Sends d_weight of all rows, so that it is no result of the call."""
        d_weight, scatter, first = self.d_weight, self.scatter, chunk.first
        assert d_weight is not None
        assert scatter is not None
        active, old = Active(chunk.count, chunk.start, 1), None if first else d_weight.sum
        add = partial(_add_d_weight, self.problem, scratch=self.scratch, active=active, x=chunk.x, first=first)
        last = d_weight_parts.LastChunk(e.first, chunk.x, active, old, add)
        d_weight_parts.send(scatter, self.problem, self.rows, last, self.smoothing)
        self.d_weight = None

    def _finish_head(self) -> None:
        """Adds what all rows add at once to the gradients of the head: the terms of the targets and of label
        smoothing."""
        if not self.tokens:
            return
        if self.rows.float16 is not None and any(self.needs_grad):
            float16.scale_head(self.rows.float16, self.rows.theta, self.d_bias)
        if self.d_weight is None and self.d_bias is None:
            return
        assert self.stored is not None
        self.exchange.add_targets(None if self.d_weight is None else self.d_weight.sum, self.d_bias, self.stored)
        if self.smoothing is not None:
            self.smoothing.add_to_head(self.d_weight, self.d_bias)

    def _results_of_head(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns d_weight and d_bias, with zeros in padding, in the dtypes of their arguments."""
        w, b, classes = self.problem.linear_weight, self.problem.linear_bias, self.classes
        d_weight = None if self.d_weight is None or self.d_weight.adds else self.d_weight.total
        d_bias, self.d_bias = self.d_bias, None  # its sum is freed
        if self.whole.shard is not None and not self.whole.local_classes:  # no class of this shard has a gradient
            w, b, classes = self.whole.linear_weight, self.whole.linear_bias, 0
            _, d_weight, d_bias = _no_gradients(self.whole, self.needs_grad)
        if d_weight is not None and not self.tokens:
            d_weight.zero_()
        elif d_weight is not None and classes < len(w):
            row_kernels.zero(d_weight[classes:])
        if d_bias is not None:
            assert b is not None
            same = (d_bias.shape, d_bias.dtype) == (b.shape, b.dtype)
            d_bias = d_bias if same else row_kernels.class_gradient(d_bias, b)
        return d_weight, d_bias

    def _report_ranges(self) -> None:
        """Adds the rows that left their range to the report, if one is being made."""
        report, rows = ranges.current(), self.rows
        if report is None:
            return
        shift, flag = None, rows.flag
        if rows.float16 is not None and self.fits_float16:
            shift = self.exchange.contributing_first(rows.float16.shift)
        if self.config.first_rows:  # the other chunks have fewer row blocks
            assert self.plan.tile is not None
            flag = torch.cat([flag[:-1, : cdiv(self.config.rows, self.plan.tile.block_n)].flatten(), flag[-1]])
        report.add(flag, shift, rows.count)

    def _results_of_rows(self) -> tuple[Tensor, RowStatistics]:
        """Returns the losses, or their sum with `reduce`, and the statistics. Zeroes d_input of rows that do not
        contribute."""
        rows, loss, row_weight = self.rows, self.rows.loss_out, self.problem.row_weight
        if self.hook is not None:
            assert self.hook.gradient_weight is not None
            loss, row_weight = self.hook.loss, self.hook.gradient_weight
        total = self.exchange.finish_call(row_weight, loss if self.reduce else None)
        found = RowStatistics(rows.lse_out, rows.target_logit_out, None, rows.top_out, None, None)
        if rows.statistics_out is not None:
            found = found._replace(**rows.statistics_out._asdict())
        return loss if total is None else total, found


def _no_gradients(problem: Problem, needs_grad: NeedsGrad) -> Gradients:
    """Returns the gradients of the head, of a shard without classes."""
    w, b = problem.linear_weight, problem.linear_bias
    d_weight = torch.zeros_like(w) if needs_grad.d_weight and problem.grad_into is None else None
    return Gradients(None, d_weight, torch.zeros_like(b) if needs_grad.d_bias and b is not None else None)


def _add_d_weight(
    problem: Problem,
    e: Tensor,
    x: Tensor,
    scratch: Tensor,
    active: Active,
    d_weight: ClassSum,
    vocab_chunk: slice,
    *,
    first: bool,
    sent: float = 0.0,
) -> None:
    """Adds e^T @ x to the vocabulary chunk of d_weight: (33) without the targets' terms. x (n, >= D) is already
    multiplied by rho. `sent`: bytes that this GPU sends meanwhile."""
    if plan_of(problem).d_weight_kernel:
        arrays, overwrites = (e, x, active, d_weight.sum[vocab_chunk]), first and not d_weight.started
        if plan_of(problem).hopper:
            hopper_gradients.add_d_weight(problem, *arrays, first=overwrites, in_l2=not first, sent=sent)
        else:
            ampere_gradients.add_d_weight(problem, *arrays, first=overwrites)
        return
    hidden = problem.input.shape[1]
    rows_of_x, of_e = operand(x[:, :hidden], x.dtype), operand(e, e.dtype).T
    if not plan_of(problem).fits_float16:
        d_weight.put_matmul(vocab_chunk, of_e, rows_of_x, None, first=first)
        return
    assert isinstance(active.count, At)
    _, exponent = active.count.tensor[active.count.start].unbind()
    power, step = torch.ldexp(scratch.new_ones(()), exponent), len(scratch) // hidden
    for start in range(0, len(of_e), step):
        piece = slice(start, min(start + step, len(of_e)))
        product = scratch[: (piece.stop - start) * hidden].view(-1, hidden)
        add_matmul(product, of_e[piece], rows_of_x, first=True)
        place = slice(vocab_chunk.start + start, vocab_chunk.start + piece.stop)
        d_weight.put(place, product.mul_(power), first=first)
