"""Plans A and B with scaled exponentials: the exponentials of each row relative to a per-row reference.

The reference of a row is 2**k, and the integer k is its reference exponent. The kernels store
2**(logit * log2(e) - k) (MATH.md section 8). The scale changes no mantissa, so the results do not depend on k as long
as the exponentials stay within the range of bfloat16. At first k comes from the target's logit. Row blocks that leave
the range are computed again with k from the largest logit. `ranges.py` counts them. float16 has a smaller range:
`float16.py`.

Plan A is three matmuls. The first computes the logits and stores their exponentials. The gradients are matmuls of the
exponentials. Plan A with scaled exponentials is for 16 bits, with label smoothing where its terms are of rank one
(`smoothing.py`). The backward pass of plan C runs it too, with the upstream gradients as row weights. The steps for
each chunk of rows:

    rows of the input that contribute, packed         `packed_rows.py`
    exponentials and their sums                       `_store_exponentials`
    loss, and the factors of rows; x becomes rho x    `row_kernels.finish_rows`, for float16 `float16.finish`
    d_weight += E^T (rho x)                           `_add_d_weight`
    d_input = rho (E W) + theta w_target              `_store_d_input`

A first chunk may be larger than the others, with most of its exponentials in the memory of d_weight, which is not
written yet (`StoredExponentials`). Its d_input is computed before its d_weight.

At the end the targets' terms of d_weight are added for all rows (`_add_targets`). Plan B is the first three steps, for
bfloat16 and float16. It stores only the sums.

Where ranks gathered the head, the last chunk's d_weight is sent to them in parts: `d_weight_parts.py`.

Where the ranks of a process group have shards of the vocabulary, they exchange the sums before a chunk's factors, and
their parts of d_input after its matmul: `shard_rows.py`. If they have different tokens, they gather them a chunk ahead:
`token_slices.py`.

A token loss needs the log-probabilities of a chunk before the factors of its rows. For it, `row_kernels.finish_rows`
runs twice (`_weights_of_token_loss`).
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
from core_triton.smoothing import Smoothing
from core_triton.tile_config import ScaledExpConfig
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
    with on_device(problem.input.device):
        return _run(
            problem,
            needs_grad,
            statistics=statistics,
            reduce=reduce,
            hook=hook,
            d_input=d_input,
            scales=scales,
            scatter=scatter,
        )[1:]


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
        rows, loss, found, gradients = _run(problem, only_input, statistics=statistics, **options)
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


def _run(
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
) -> tuple[PackedRows, Tensor, RowStatistics, Gradients]:
    """Runs `scaled_exp`. The exponentials of all rows go to `saved_e` (N, padded K) if that is not None. Then, or with
    `unit_scale` (N,), which gets the powers of two that d_input of float16 is divided by, rows are saved."""
    plan = plan_of(problem)
    config = plan.scaled_exp_config
    smoothing = Smoothing.of(problem, config.head_rows, scales)
    if smoothing is not None:
        problem = smoothing.problem
    whole, shard = problem, problem.shard  # of all classes; below, `problem` has those of this rank
    if shard is not None:
        problem = shard_rows.of_own_classes(problem)
    x, w, b = problem.input, problem.linear_weight, problem.linear_bias
    tokens, hidden, classes = len(problem.target), x.shape[1], problem.classes
    if needs_grad.d_input and d_input is None:
        d_input = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_weight = ClassSum(w, classes, float32_sum=False, into=problem.grad_into) if needs_grad.d_weight else None
    d_bias = problem.row_weight.new_empty(classes) if needs_grad.d_bias else None
    if d_bias is not None and not tokens:
        d_bias.zero_()
    fits = plan.fits_float16 and (any(needs_grad) or saved_e is not None)
    if fits:
        statistics |= SHIFTS
    if smoothing is not None and d_weight is not None and plan.fits_float16:
        smoothing.start_head(d_weight)
    rows = pack_rows(problem, statistics=statistics, scales=scales)
    of_shard = slices = None
    if shard is not None and shard.tokens:
        slices = TokenSlices(problem, rows, config, d_input=d_input is not None)
        of_shard = shard_rows.with_targets(rows, whole)
    elif shard is not None:
        of_shard = shard_rows.start(problem, rows, whole)
    smooth = None  # where d_input gets the terms of label smoothing before it is rounded
    if smoothing is not None and d_input is not None and plan.fits_float16:
        smooth = smoothing.of_input(rows.row_weight)
    stored = saved_e
    if stored is None and any(needs_grad):
        most = classes if slices is None else slices.shard.rows  # the same on all ranks
        stored = x.new_empty((config.rows, tile_config.padded(most)))
    scratch = problem.row_weight.new_empty(config.scratch)
    part = in_part = None  # this shard's part of d_input of a chunk, and its rows of a chunk that is not gathered
    if shard is not None and d_input is not None:
        part = x.new_empty((config.most_rows, hidden), dtype=shard.dtype)
        if slices is None:
            in_part = torch.arange(config.most_rows, device=x.device)
    # The packed rows of the input, with zeros in rows that do not contribute, later multiplied by rho. They are in the
    # memory of d_input, or in a buffer of one chunk, as those of a first chunk in pieces always are.
    if plan.holds_rows:
        assert d_input is not None
        held, others = d_input, tokens - config.first_rows
        if others or not tokens:
            packed_rows.pick(problem, rows, 0, others, held[:others], places=shard is None)
    else:
        width = hidden * (1 + problem.spec.splits_head)
        padded_hidden = tile_config.padded_hidden(width, x.itemsize)
        held = (x.new_empty if padded_hidden == width else x.new_zeros)((config.most_rows, padded_hidden))
    gradient_rows = rows  # where the results go that are computed with the row weights of the gradients
    if hook is not None and statistics & ~BY_ROW:
        unused = torch.empty_like(rows.loss_out)
        gradient_rows = rows._replace(loss_out=unused, lse_out=unused, target_logit_out=unused, top_out=None)
    waiting = None  # the sum of d_input of a chunk, without d_weight: it ends beside the logits of the next one
    chunks = config.chunks(tokens)
    if d_weight is None or not d_weight_parts.can_send(scatter, problem, tokens):
        scatter = None
    for chunk in reversed(chunks):
        n, start, first = chunk.stop - chunk.start, chunk.start, chunk is chunks[-1]
        sends = scatter is not None and chunk is chunks[0]
        gathered = None if slices is None else slices.next(chunk)
        of_input, source = (problem, rows) if gathered is None else gathered[:2]
        in_pieces = config.first_rows > 0 and first
        d_input_first = in_pieces or sends
        chunk_x = held[chunk] if plan.holds_rows else held[:n]
        if plan.holds_rows and d_input_first:
            chunk_x = x.new_empty((n, hidden))
        if not plan.holds_rows or d_input_first:
            packed_rows.pick(of_input, source, start, n, chunk_x[:, :hidden], places=shard is None)
        if problem.spec.splits_head:  # a row again for the second half of the head
            chunk_x[:, hidden : 2 * hidden] = chunk_x[:, :hidden]
        e = None
        if stored is not None and in_pieces:
            assert d_weight is not None
            e = StoredExponentials.in_d_weight(stored, d_weight.total, n, config.piece, classes)
        elif stored is not None:
            e = StoredExponentials(stored[:n, :classes] if saved_e is None else stored[chunk, :classes])
        # cuBLAS's GEMM adds all rows of the chunk to d_weight, so none of them may be NaN.
        least = int(first or sends or saved_e is not None)
        if (d_weight is not None or saved_e is not None) and not plan.d_weight_kernel:
            least = n
        active = Active(source.count, start, least)
        blocks = _store_exponentials(problem, config, rows, chunk, chunk_x, e, scratch, active, statistics)
        numbers = ChunkNumbers(
            problem,
            config.blocks,
            _block_width(problem, config),
            statistics & OF_BLOCKS,
            At(scratch, 0),
            At(scratch, config.blocks * n),
            At(rows.ref_exponent, start),
            At(rows.target_logit, start),
            At(rows.target, start),
        )
        if of_shard is not None:
            numbers = shard_rows.merge(numbers, blocks, rows, of_shard, chunk)
        row_weight = At(rows.row_weight, start)
        if hook is not None:
            row_weight = _weights_of_token_loss(numbers, rows, chunk, hook)
        scaled_x = None if d_weight is None or plan.fits_float16 else chunk_x
        by_row = statistics & BY_ROW != 0
        options = {"row_weight": row_weight, "e": e, "x": scaled_x, "by_row": by_row}
        finished = numbers if unit_scale is None or shard is None else shard_rows.of_merged_references(numbers)
        _finish_rows(finished, gradient_rows, chunk, **options)
        if hook is None:
            _finish_statistics(numbers, rows, chunk)
        if saved_e is not None and e is not None:
            saved_kernels.clear(e.first, At(rows.rho, start))
        if unit_scale is not None:
            factors = {"rho": At(rows.rho, start), "theta": At(rows.theta, start)}
            saved_kernels.scale_units(numbers, n, order=At(rows.order, start), **factors, scale_out=unit_scale)
            if shard is not None:
                shard_rows.refer_to_own(rows, numbers, chunk)
        if smoothing is not None:
            terms: dict[str, Any] = {"target_logit": numbers.target_logit, "row_weight": row_weight}
            terms |= {"theta": None if e is None else At(rows.theta, start), "loss_out": rows.loss_out}
            if slices is not None and gathered is not None:
                slices.add_smoothing(smoothing, gathered, **terms)
            else:
                smoothing.add_to_rows(n, order=At(rows.order, start), **terms)
        if e is None:
            continue
        count: Tensor | At = source.count
        if plan.fits_float16:
            count = _fit_in_float16(
                problem, config, blocks, source, chunk, scratch, e, chunk_x, statistics, d_weight is not None
            )
        if d_bias is not None:
            for vocab_chunk in e.pieces(classes):
                of_piece = e.of(vocab_chunk)
                row_kernels.add_class_sums(d_bias[vocab_chunk], of_piece, At(rows.rho, start), first=first)
        reduced = None
        if d_input is not None and of_shard is not None:
            assert part is not None
            if waiting is not None:
                shard_rows.put_sum(*waiting, d_input)
                waiting = None
            if slices is not None:
                place = At(slices.slot, start)
            else:
                assert in_part is not None
                place = At(in_part, 0)
            _store_d_input(problem, config, source, chunk, e, scratch, part[:n], place, smooth)
            start_sum = partial(shard_rows.start_sum, of_shard) if slices is None else slices.start_sum
            reduced = start_sum(part[:n])
        elif d_input is not None and d_input_first:
            _store_d_input(problem, config, rows, chunk, e, scratch, d_input, At(rows.order, start), smooth)
        if slices is not None and gathered is not None:
            slices.place_after(gathered)
        if d_weight is not None and scatter is not None and sends:
            active, old = Active(count, start, 1), None if first else d_weight.sum
            add = partial(_add_d_weight, problem, scratch=scratch, active=active, x=chunk_x, first=first)
            last = d_weight_parts.LastChunk(e.first, chunk_x, active, old, add)
            d_weight_parts.send(scatter, problem, rows, last, smoothing)
            d_weight = None
        elif d_weight is not None:
            active, sent = Active(count, start, int(first)), 0.0 if reduced is None else reduced.sent
            for vocab_chunk in reversed(e.pieces(classes)):
                arrays = e.of(vocab_chunk), chunk_x, scratch, active, d_weight
                _add_d_weight(problem, *arrays, vocab_chunk, first=first, sent=sent)
        if d_input is not None and reduced is not None and slices is not None:
            slices.put_sum(reduced, chunk, d_input)
        elif d_input is not None and reduced is not None:
            waiting = reduced, At(rows.order, start), At(rows.row_weight, start)
            if d_weight is not None:
                shard_rows.put_sum(*waiting, d_input)
                waiting = None
        elif d_input is not None and not d_input_first:
            _store_d_input(problem, config, rows, chunk, e, scratch, d_input, At(rows.order, start), smooth)
        del e, reduced
    if waiting is not None:
        assert d_input is not None
        shard_rows.put_sum(*waiting, d_input)
    memory = stored
    del stored, held, scratch, part, in_part, waiting
    if rows.float16 is not None and tokens and any(needs_grad):
        float16.scale_head(rows.float16, rows.theta, d_bias)
    if tokens and (d_weight is not None or d_bias is not None):
        total = None if d_weight is None else d_weight.sum
        if slices is not None and memory is not None:
            slices.add_targets(memory, total, d_bias)
        else:
            _add_targets(problem, rows, total, d_bias)
        if smoothing is not None:
            smoothing.add_to_head(d_weight, d_bias)
    if smoothing is not None and d_input is not None and smooth is None and tokens:
        smoothing.add_to_input(d_input)
    made_d_weight = None if d_weight is None or d_weight.adds else d_weight.total
    if shard is not None and not whole.local_classes:  # no class of this shard has a gradient
        w, b, classes = whole.linear_weight, whole.linear_bias, 0
        _, made_d_weight, d_bias = _no_gradients(whole, needs_grad)
    if made_d_weight is not None and not tokens:
        made_d_weight.zero_()
    elif made_d_weight is not None and classes < len(w):
        row_kernels.zero(made_d_weight[classes:])
    if d_bias is not None:
        assert b is not None
        same = (d_bias.shape, d_bias.dtype) == (b.shape, b.dtype)
        d_bias = d_bias if same else row_kernels.class_gradient(d_bias, b)
    gradients = Gradients(d_input, made_d_weight, d_bias)
    report = ranges.current()
    if report is not None:
        shift = rows.float16.shift if rows.float16 is not None and fits else None
        flag = rows.flag
        if slices is not None and shift is not None:  # those of rows that contribute first
            shift = torch.where(rows.row_weight != 0, shift, 0.0).sort(descending=True).values
        if config.first_rows:  # the other chunks have fewer row blocks
            assert plan.tile is not None
            flag = torch.cat([flag[:-1, : cdiv(config.rows, plan.tile.block_n)].flatten(), flag[-1]])
        report.add(flag, shift, rows.count)
    loss, row_weight = rows.loss_out, problem.row_weight
    if hook is not None:
        assert hook.gradient_weight is not None
        loss, row_weight = hook.loss, hook.gradient_weight
    if slices is not None and d_input is not None:
        row_kernels.finish_call(row_weight[problem.own_tokens], d_input, None)
    if reduce or (slices is None and d_input is not None):
        total = row_kernels.finish_call(row_weight, d_input if slices is None else None, loss if reduce else None)
        loss = loss if total is None else total
    found = RowStatistics(rows.lse_out, rows.target_logit_out, None, rows.top_out, None, None)
    if rows.statistics_out is not None:
        found = found._replace(**rows.statistics_out._asdict())
    return rows, loss, found, gradients


def _no_gradients(problem: Problem, needs_grad: NeedsGrad) -> Gradients:
    """Returns the gradients of the head, of a shard without classes."""
    w, b = problem.linear_weight, problem.linear_bias
    d_weight = torch.zeros_like(w) if needs_grad.d_weight and problem.grad_into is None else None
    return Gradients(None, d_weight, torch.zeros_like(b) if needs_grad.d_bias and b is not None else None)


def _store_exponentials(
    problem: Problem,
    config: ScaledExpConfig,
    rows: PackedRows,
    chunk: slice,
    x: Tensor,
    e: StoredExponentials | None,
    scratch: Tensor,
    active: Active,
    statistics: int,
) -> int:
    """Writes a chunk's exponentials e, if not None, their sums over each class block, and the targets' logits. Returns
    the number of class blocks.

    The sums (blocks, n) are at the start of `scratch`. The statistics of each class block follow. Row blocks whose sums
    leave the range are computed again with reference exponents from their largest logits. The host does not know which
    blocks these are, so the repair kernel is always launched. If there are none, it has nothing to do. Rows after the
    active ones may be left unchanged.
    """
    plan, n, start = plan_of(problem), len(x), chunk.start
    assert plan.tile is not None
    number = start // config.rows
    of_logits, by_row = statistics & OF_BLOCKS, statistics & BY_ROW != 0

    def options_of(vocab_chunk: slice, first_block: int) -> tuple[slice, dict[str, Any]]:
        place = first_block * n
        return vocab_chunk, {
            "target": At(rows.target, start),
            "ref_exponent": At(rows.ref_exponent, start),
            "flag": At(rows.flag, number),
            "sums": At(scratch, place),
            "statistics": of_logits,
            "of_logits": At(scratch, config.blocks * n + planes(statistics) * place) if of_logits else None,
            "target_logit": At(rows.target_logit, start),
            "e": Stores(None) if e is None else e.stores(vocab_chunk),
        }

    vocab_chunks, block_v = problem.vocab_chunks(config.head_rows), plan.tile.block_v
    blocks = [cdiv(vocab_chunk.stop - vocab_chunk.start, block_v) for vocab_chunk in vocab_chunks]
    parts = list(map(options_of, vocab_chunks, accumulate(blocks, initial=0)))
    for vocab_chunk, options in parts:
        # The head's chunk may be a copy: it is freed before the next one is made.
        if plan.hopper:
            place = number * half_tiles(problem, config.rows)
            hit = None if rows.hit is None else At(rows.hit.view(torch.int8), place)
            hopper_logits.exponentials(
                problem, x, head_of(problem, vocab_chunk), vocab_chunk, active, **options, hit=hit
            )
        else:
            module = ampere_logits if plan.ampere_tile is not None else kernels
            module.exponentials(problem, x, head_of(problem, vocab_chunk), vocab_chunk, active, **options)
    if by_row:
        row_statistics.keep_rows(n, sum(blocks), sums=At(scratch, 0), top=At(rows.top, start))
    whole_blocks = config.head_rows >= problem.classes or config.head_rows % block_v == 0
    reads = plan.reads_split_head and whole_blocks  # no copies, so no vocabulary chunks
    if reads:
        parts = [options_of(slice(0, problem.classes), 0)]
    # The new reference exponents need the largest logits of all vocabulary chunks.
    for finds, redoes in [(True, True)] if len(parts) == 1 else [(True, False), (False, True)]:
        for vocab_chunk, options in parts:
            kernels.repair(
                problem,
                x,
                problem.linear_weight[vocab_chunk] if reads else head_of(problem, vocab_chunk, options["flag"]),
                vocab_chunk,
                **options,
                top=At(rows.top, start),
                ticket=At(rows.ticket, number),
                finds=finds,
                redoes=redoes,
                by_row=by_row,
            )
    return sum(blocks)


def _finish_rows(
    numbers: ChunkNumbers,
    rows: PackedRows,
    chunk: slice,
    *,
    row_weight: At,
    e: StoredExponentials | None,
    x: Tensor | None,
    by_row: bool,
) -> None:
    """Writes the results of a chunk's packed rows for the row weights that are given (n,). With e and x (n, D),
    prepares both for the matmuls of the gradients."""
    n, start = chunk.stop - chunk.start, chunk.start
    row_kernels.finish_rows(
        numbers.problem,
        n,
        numbers.class_blocks,
        sums=numbers.sums,
        tops=None if rows.top_out is None else numbers.of_logits,
        ref_exponent=numbers.ref_exponent,
        target_logit=numbers.target_logit,
        target=numbers.target,
        row_weight=row_weight,
        order=At(rows.order, start),
        e=None if e is None else e.first,
        other_e=None if e is None else e.others,
        x=x,
        rho=At(rows.rho, start),
        theta=At(rows.theta, start),
        loss_out=rows.loss_out,
        lse_out=rows.lse_out,
        target_logit_out=rows.target_logit_out,
        top_out=rows.top_out,
        by_row=by_row,
        of_shard=numbers.of_shard,
    )


def _finish_statistics(numbers: ChunkNumbers, rows: PackedRows, chunk: slice) -> None:
    """Writes the statistics of a chunk's packed rows."""
    if rows.statistics_out is None:
        return
    row_statistics.finish_statistics(
        numbers.problem,
        chunk.stop - chunk.start,
        numbers.class_blocks,
        numbers.block_width,
        numbers.statistics,
        sums=numbers.sums,
        of_logits=numbers.of_logits,
        row_weight=At(rows.row_weight, chunk.start),
        order=At(rows.order, chunk.start),
        results=rows.statistics_out,
    )


def _block_width(problem: Problem, config: ScaledExpConfig) -> int:
    """Returns the classes of a class block: a vocabulary chunk has fewer classes than a tile, or whole tiles."""
    tile = plan_of(problem).tile
    assert tile is not None
    return min(config.head_rows, tile.block_v)


def _fit_in_float16(
    problem: Problem,
    config: ScaledExpConfig,
    class_blocks: int,
    rows: PackedRows,
    chunk: slice,
    scratch: Tensor,
    e: StoredExponentials,
    x: Tensor,
    statistics: int,
    scales_x: bool,
) -> At:
    """Prepares a chunk of float16 for the matmuls of the gradients; returns what `Active.count` is for d_weight."""
    assert rows.float16 is not None
    n = chunk.stop - chunk.start
    return float16.finish(
        problem,
        rows.float16,
        chunk.start // config.rows,
        chunk.start,
        n,
        class_blocks,
        _block_width(problem, config),
        planes(statistics),
        of_logits=At(scratch, config.blocks * n),
        rho=rows.rho,
        theta=rows.theta,
        count=rows.count,
        e=e,
        x=x if scales_x else None,
    )


def _weights_of_token_loss(numbers: ChunkNumbers, rows: PackedRows, chunk: slice, hook: TokenHook) -> At:
    """Calls the token loss on a chunk's packed rows; returns their row weights in the gradients (n,): (35)."""
    # With row weights of 1, and without z-loss and class weights, the loss is the negative log-likelihood.
    ones = token_kernels.contributes(rows.row_weight[chunk])
    _finish_rows(numbers, rows, chunk, row_weight=At(ones, 0), e=None, x=None, by_row=True)
    _finish_statistics(numbers, rows, chunk)
    weight = hook.process(rows.order[chunk], rows.loss_out, of_call=True)
    assert weight is not None
    return At(weight, 0)


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


def _store_d_input(
    problem: Problem,
    config: ScaledExpConfig,
    rows: PackedRows,
    chunk: slice,
    stored: StoredExponentials,
    scratch: Tensor,
    d_input: Tensor,
    order: At,
    smooth: tuple[Tensor, Tensor] | None,
) -> None:
    """Writes a chunk to the rows `order` (n,) of d_input: (32). Adds the terms `smooth` of `Smoothing.of_input`."""
    plan, e = plan_of(problem), stored.first

    def smooth_from(start: int) -> tuple[At, Tensor] | None:
        return None if smooth is None else (At(smooth[0], start), smooth[1])

    if plan.d_input_tiling is not None:
        module = hopper_gradients if plan.hopper else ampere_gradients
        made = module.d_input_launch(problem, config, stored, smooth=smooth is not None)
        input_grad.store_d_input(
            made,
            problem,
            config,
            chunk.stop - chunk.start,
            Active(rows.count, chunk.start, 0),
            partial_sums=scratch,
            rho=At(rows.rho, chunk.start),
            theta=At(rows.theta, chunk.start),
            target=At(rows.target, chunk.start),
            order=order,
            d_input=d_input,
            smooth=smooth_from(chunk.start),
        )
        return
    hidden = d_input.shape[1]
    for start in range(chunk.start, chunk.stop, config.d_input_rows):
        piece = slice(start, min(start + config.d_input_rows, chunk.stop))
        within = slice(piece.start - chunk.start, piece.stop - chunk.start)
        n = within.stop - within.start
        e_w = scratch[: n * hidden].view(n, hidden)
        for vocab_chunk in stored.pieces(problem.classes, config.head_rows):
            casts = problem.linear_weight.dtype != e.dtype
            w = operand(head_of(problem, vocab_chunk), e.dtype) if casts else problem.operand_of(vocab_chunk)
            e_chunk = operand(stored.of(vocab_chunk)[within], e.dtype)
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
            smooth=smooth_from(start),
        )


def _add_targets(problem: Problem, rows: PackedRows, d_weight: Tensor | None, d_bias: Tensor | None) -> None:
    """Adds theta * input to the targets' rows of d_weight, theta to d_bias: (33)."""
    found = target_grad.sort_by_target(rows.target, rows.order, rows.theta, rows.count, problem.classes)
    target_grad.add_targets(problem.input, *found, rows.count, problem.classes, d_weight=d_weight, d_bias=d_bias)
