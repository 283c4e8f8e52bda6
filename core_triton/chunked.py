"""The loss with PyTorch's matmuls: the path for devices without kernels, and the baseline for the kernels.

The rows are processed in chunks. Within a chunk of rows the vocabulary is processed in vocabulary chunks, so only one
tile of the logits exists at a time:

    plan A  `loss_and_gradients`  gradients in the forward pass: 3 matmuls where the budget holds a chunk's logits in
                                  float32 between the passes, 4 where the second pass recomputes them
    plan B  `row_statistics`      no gradient: 1 matmul, a tile of logits at a time
    plan C  `gradients`           any upstream gradient: the logits are recomputed once lse is computed: 1 + 3 matmuls

All plans use the same two passes over a chunk, `chunk_statistics` and `chunk_gradients`. They process the classes from
`vocab_offset` on, and the first pass returns partial statistics, so the shards of a vocabulary, on the ranks of a
process group, are merged by the same code (`vocab_shard.py`).

The logits are float32, also for a 16-bit input. Rounding them to bfloat16 would change a probability by |logit| * 2**-8
of its value. At the logits of a trained model that is several times the error of everything else.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from core_triton import row_math, vocab_shard
from core_triton.problem import (
    NOTHING_SAVED,
    Gradients,
    GradientSums,
    NeedsGrad,
    Problem,
    SavedRows,
    add_matmul,
    float32_matmul,
    operand,
)
from core_triton.row_math import NO_PROBABILITY, Coefficients, Partial, RowStatistics
from core_triton.token_hook import TokenHook
from linear_ce.chunking import ChunkConfig
from linear_ce.statistics import ARGMAX, ENTROPY, LOGIT_SUM, SQUARES

FLOAT16_HEADROOM = 14  # without its row's power of two |d_logits| < 3, and 3 * 2**14 < 65504


def logits_tile(problem: Problem, x: Tensor, w: Tensor, vocab_chunk: slice) -> Tensor:
    """Returns the logits of rows `x` against the vocabulary chunk `w`, (n, v) float32, scaled and capped: MATH.md (1),
    (2)."""
    logits = float32_matmul(x, w.T)
    if problem.linear_bias is not None:
        logits += problem.linear_bias[vocab_chunk]
    if problem.spec.logit_scale != 1.0:
        logits *= problem.spec.logit_scale
    if problem.spec.softcap is not None:
        logits = logits.div_(problem.spec.softcap).tanh_().mul_(problem.spec.softcap)
    return logits


def tile_partial(problem: Problem, logits: Tensor, target: Tensor, vocab_chunk: slice, statistics: int) -> Partial:
    """Returns the statistics of one tile of logits: MATH.md (25)."""
    argmax = logit_sum = sum_squared = sum_exp_log = None
    if statistics & ARGMAX:
        top, argmax = logits.max(1)  # the first of equals
        argmax += problem.vocab_offset + vocab_chunk.start
    else:
        top = logits.amax(1)
    if statistics & LOGIT_SUM:
        logit_sum = logits.sum(1)
    shift = torch.where(top == -torch.inf, 0.0, top)  # all -inf: sums of 0, not NaN
    local, inside = _local_target(problem, target, vocab_chunk)
    target_logit = torch.where(inside, logits.gather(1, local[:, None])[:, 0], 0.0)
    weighted_sum = None
    if problem.spec.label_smoothing:
        class_weight = problem.class_weight_of(vocab_chunk)
        weighted_sum = logits.sum(1) if class_weight is None else logits @ class_weight
    shifted = logits - shift[:, None]
    if statistics & ENTROPY:
        exponentials = shifted.clamp_(min=NO_PROBABILITY).exp()
        sum_exp = exponentials.sum(1)
        sum_exp_log = shifted.mul_(exponentials).sum(1)
    else:
        exponentials = shifted.exp_()
        sum_exp = exponentials.sum(1)
    if statistics & SQUARES:
        sum_squared = exponentials.square_().sum(1)
    return Partial(top, sum_exp, target_logit, weighted_sum, sum_exp_log, argmax, logit_sum, sum_squared)


def _partial(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    target: Tensor,
    vocab_chunk: slice,
    kept: list[Tensor] | None,
    statistics: int,
) -> Partial:
    logits = logits_tile(problem, x, w, vocab_chunk)
    if kept is not None:
        kept.append(logits)
    return tile_partial(problem, logits, target, vocab_chunk, statistics)


def _d_logits(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    chunk: slice,
    vocab_chunk: slice,
    row: "RowGradient",
    kept: list[Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    logits = logits_tile(problem, x, w, vocab_chunk) if kept is None else kept.pop(0)
    d_logits = tile_d_logits(problem, logits, problem.target[chunk], row, problem.contributes(chunk), vocab_chunk)
    del logits  # d_logits is the same memory: gone when that is
    summed = None
    if row.bias:
        summed = d_logits.sum(0) if row.bias_scale is None else row.bias_scale @ d_logits
    return operand(d_logits, problem.input.dtype), summed


def _add_matmul(problem: Problem, total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    del problem
    add_matmul(total, a, b, first=first)


class Tiles(NamedTuple):
    """The functions that compute a tile: a chunk of rows against a vocabulary chunk.

    Args:
        partial: returns the statistics of the tile, and appends its logits to the list `kept` if that is not None.
        d_logits: returns the tile's d_logits, (n, v), as an operand of matmuls, and their sum over rows for d_bias,
            (v,), if needed. It takes the logits from the list `kept`, or computes them if that is None.
        add_matmul: computes a matmul of the gradients, as `problem.add_matmul` does.
    """

    partial: Callable[..., Partial]
    d_logits: Callable[..., tuple[Tensor, Tensor | None]]
    add_matmul: Callable[..., None] = _add_matmul


TORCH_TILES = Tiles(_partial, _d_logits)


class RowGradient(NamedTuple):
    """The values of a chunk's rows that its second pass needs, (n,) float32 each.

    Args:
        lse: log-sum-exp over the whole vocabulary.
        coefficients: those of (23), times the logit scale.
        bias: whether d_bias is computed.
        bias_scale: factors of the rows' d_logits in d_bias; None is 1.
    """

    lse: Tensor
    coefficients: Coefficients
    bias: bool
    bias_scale: Tensor | None


def chunk_statistics(
    problem: Problem,
    chunk: slice,
    vocab_chunk_size: int,
    *,
    statistics: int = 0,
    kept: list[Tensor] | None = None,
    tiles: Tiles = TORCH_TILES,
) -> Partial:
    """First pass over a chunk: returns the statistics of its rows over all classes: those of this rank's shard merged
    with those of the other ranks. Appends its tiles of logits to `kept`."""
    # Rows that do not contribute may hold any values: rows are independent here, and `row_math.finish` excludes them.
    x, target = operand(problem.beside_head(problem.input[chunk]), problem.input.dtype), problem.target[chunk]
    merged = None
    for vocab_chunk in problem.vocab_chunks(vocab_chunk_size):
        w = problem.operand_of(vocab_chunk)
        partial = tiles.partial(problem, x, w, target, vocab_chunk, kept, statistics)
        merged = partial if merged is None else row_math.merge(merged, partial)
        del w  # else it stays alive until the next chunk's exists
    if merged is None:
        merged = row_math.empty_partial(target, problem.spec, statistics)
    return merged if problem.shard is None else vocab_shard.merged(problem.shard, merged)


def tile_d_logits(
    problem: Problem, logits: Tensor, target: Tensor, row: RowGradient, contributes: Tensor, vocab_chunk: slice
) -> Tensor:
    """Overwrites a tile of logits with d_logits, the cap's slope included, the scale not: MATH.md (23), (15)."""
    lse, coefficients = row.lse, row.coefficients
    slope = None
    if problem.spec.softcap is not None:  # d tanh = 1 - tanh**2
        slope = (logits / problem.spec.softcap).square_().neg_().add_(1.0)
    log_prob = logits.sub_(lse[:, None])
    if coefficients.beta is None:
        d_logits = log_prob.exp_().mul_(coefficients.alpha[:, None])
    else:
        factor = log_prob.clamp_(min=NO_PROBABILITY).mul(coefficients.beta[:, None]).add_(coefficients.alpha[:, None])
        d_logits = log_prob.exp_().mul_(factor)
    if coefficients.sigma is not None:
        class_weight = problem.class_weight_of(vocab_chunk)
        if class_weight is None:
            d_logits -= coefficients.sigma[:, None]
        else:
            d_logits.addr_(coefficients.sigma, class_weight, alpha=-1)
    local, inside = _local_target(problem, target, vocab_chunk)
    at_target = d_logits.gather(1, local[:, None]) - torch.where(inside, coefficients.tau, 0.0)[:, None]
    d_logits.scatter_(1, local[:, None], at_target)
    if slope is not None:
        d_logits *= slope
    return d_logits.masked_fill_(~contributes[:, None], 0.0)


def chunk_gradients(
    problem: Problem,
    chunk: slice,
    vocab_chunk_size: int,
    lse: Tensor,
    coefficients: Coefficients,
    sums: GradientSums,
    *,
    kept: list[Tensor] | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    saved: SavedRows | None = None,
    tiles: Tiles = TORCH_TILES,
) -> None:
    """Second pass over a chunk: writes its rows of d_input and adds to d_weight and d_bias.

    Args:
        lse: (n,) log-sum-exp over the whole vocabulary.
        coefficients: (n,) each, times the upstream gradient.
        kept: the tiles of logits of the first pass, which are removed from the list; None: they are recomputed.
        scales: () factors of d_input and of the gradients of the head.
        saved: where its d_logits are written. Then a power of two that float16 needs is not a factor of d_input, but of
            `saved.rho`.
    """
    dtype, x, contributes = problem.input.dtype, problem.rows(chunk), problem.contributes(chunk)
    coefficients = coefficients.map(lambda c: c * problem.spec.logit_scale)
    x_head = x  # the operand of d_weight
    input_scale = head_scale = bias_scale = None  # the factors that are applied after the matmuls of float16
    if dtype == torch.float16:
        coefficients, exponent = row_math.split_exponents(coefficients, problem.class_weight)
        coefficients = coefficients.map(lambda c: c * 2.0**FLOAT16_HEADROOM)
        top = exponent.max()
        if sums.d_weight is not None:
            x_head = (x * torch.ldexp(torch.ones_like(lse), exponent - top)[:, None]).to(dtype)
        input_scale = torch.ldexp(torch.ones_like(lse), exponent - FLOAT16_HEADROOM)
        head_scale = torch.ldexp(torch.ones_like(lse[0]), top - FLOAT16_HEADROOM)
        bias_scale = input_scale
        if saved is not None and saved.rho is not None:
            saved.rho[chunk] *= torch.ldexp(torch.ones_like(lse), exponent)
            input_scale = torch.full_like(lse, 2.0**-FLOAT16_HEADROOM)
        if scales is not None:
            input_scale, head_scale, bias_scale = (
                input_scale * scales[0],
                head_scale * scales[1],
                bias_scale * scales[1],
            )
    row = RowGradient(lse, coefficients, sums.d_bias is not None, bias_scale)
    x, x_head = operand(problem.beside_head(x), dtype), operand(x_head, dtype)
    d_input, first = None, chunk.start == 0
    for vocab_chunk in problem.vocab_chunks(vocab_chunk_size):
        w = problem.operand_of(vocab_chunk)
        d_logits, summed = tiles.d_logits(problem, x, w, chunk, vocab_chunk, row, kept)
        if saved is not None and saved.e is not None:
            saved.e[chunk, vocab_chunk] = d_logits
        if sums.d_bias is not None and summed is not None:
            sums.d_bias.put(vocab_chunk, summed, first=first)
        if sums.d_input is not None:
            starts = d_input is None
            d_input = lse.new_empty((len(x), w.shape[1])) if d_input is None else d_input
            tiles.add_matmul(problem, d_input, d_logits, w, first=starts)
        if sums.d_weight is not None:
            add = partial(tiles.add_matmul, problem)
            sums.d_weight.put_matmul(vocab_chunk, d_logits.T, x_head, head_scale, first=first, add=add)
        del w, d_logits  # otherwise they stay alive until those of the next chunk exist
    if sums.d_input is not None and d_input is None and problem.shard is None:  # a shard that is all padding
        sums.d_input[chunk] = 0
    elif sums.d_input is not None:
        if d_input is None:
            d_input = lse.new_zeros(x.shape)
        if input_scale is not None:
            d_input *= input_scale[:, None]
        if problem.spec.splits_head:  # the matmul with each half
            d_input = d_input[:, : problem.input.shape[1]] + d_input[:, problem.input.shape[1] :]
        if problem.shard is not None:
            d_input = vocab_shard.sum_of_d_input(problem.shard, d_input)
        sums.d_input[chunk] = d_input.masked_fill_(~contributes[:, None], 0.0)


def losses(tiles: Tiles, problem: Problem, config: ChunkConfig, statistics: int) -> tuple[Tensor, RowStatistics]:
    """Plan B: returns the weighted loss (N,) and the statistics of each row, without gradients."""
    found = row_statistics(tiles, problem, config, statistics)
    target, row_weight, class_weight = problem.target, problem.row_weight, problem.class_weight
    return row_math.row_loss(problem.spec, found, target, row_weight, class_weight, problem.classes), found


def row_statistics(tiles: Tiles, problem: Problem, config: ChunkConfig, statistics: int) -> RowStatistics:
    """Plan B without the loss: returns the statistics of each row."""
    parts = [
        row_math.finish(
            chunk_statistics(problem, chunk, config.first_vocab_chunk, statistics=statistics, tiles=tiles),
            problem.target[chunk],
            problem.row_weight[chunk],
            problem.classes,
        )
        for chunk in problem.chunks(config.rows)
    ]
    return _concatenate(parts, problem, statistics)


def loss_and_gradients(
    tiles: Tiles,
    problem: Problem,
    config: ChunkConfig,
    needs_grad: NeedsGrad,
    scales: tuple[Tensor, Tensor] | None,
    statistics: int,
    hook: TokenHook | None = None,
) -> tuple[Tensor, RowStatistics, Gradients]:
    """Plan A: each row's weighted loss (N,), its statistics, and the gradients of their sum, times `scales`. A hook is
    a token loss in place of the cross-entropy, without class weights, label smoothing and z-loss. If it takes the
    entropies, they are in `statistics`."""
    sums, classes = _sums(problem, needs_grad, config), problem.classes
    losses, parts, differentiated = [], [], problem
    if hook is not None:
        assert hook.contributes is not None
        differentiated = replace(problem, row_weight=hook.contributes)  # the hook fills it in chunk by chunk: (35)
    for chunk in problem.chunks(config.rows):
        target, row_weight = problem.target[chunk], problem.row_weight[chunk]
        kept: list[Tensor] | None = [] if config.keeps_logits else None
        partial = chunk_statistics(
            problem, chunk, config.first_vocab_chunk, statistics=statistics, kept=kept, tiles=tiles
        )
        part = row_math.finish(partial, target, row_weight, classes)
        if hook is None:
            losses.append(row_math.row_loss(problem.spec, part, target, row_weight, problem.class_weight, classes))
            coefficients = row_math.loss_coefficients(
                problem.spec, part.lse, target, row_weight, problem.class_weight, classes
            )
        else:
            assert part.nll is not None
            hook.process(chunk, part.nll, part.entropy if hook.with_entropy else None)
            coefficients = token_coefficients(problem, hook, chunk, part.lse, part.entropy)
        chunk_gradients(
            differentiated,
            chunk,
            config.vocab_chunk,
            part.lse,
            coefficients,
            sums,
            kept=kept,
            scales=scales,
            tiles=tiles,
        )
        parts.append(part)
    if hook is not None:
        loss = hook.loss
    else:
        loss = torch.cat(losses) if losses else problem.row_weight.new_zeros(0)
    return loss, _concatenate(parts, problem, statistics), sums.result(empty=not parts)


def token_coefficients(
    problem: Problem, hook: TokenHook, chunk: slice, lse: Tensor, entropy: Tensor | None
) -> Coefficients:
    """Returns the coefficients of rows whose token losses the hook has processed, given their lse and entropy (n,)."""
    assert hook.gradient_weight is not None
    coefficients = row_math.loss_coefficients(
        problem.spec, lse, problem.target[chunk], hook.gradient_weight[chunk], None, problem.classes
    )
    if hook.d_entropy is None or entropy is None:
        return coefficients
    return row_math.with_entropy(coefficients, hook.d_entropy[chunk], entropy)


def gradients(
    tiles: Tiles,
    problem: Problem,
    config: ChunkConfig,
    lse: Tensor,
    coefficients: Coefficients,
    needs_grad: NeedsGrad,
    d_input: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """Plan C's backward pass: the gradients for any upstream gradient, given lse, times `scales`. Writes d_input to
    `d_input`, if there is one."""
    sums = _sums(problem, needs_grad, config, d_input)
    for chunk in problem.chunks(config.rows):
        part = coefficients.map(lambda c, chunk=chunk: c[chunk])
        chunk_gradients(problem, chunk, config.vocab_chunk, lse[chunk], part, sums, scales=scales, tiles=tiles)
    return sums.result(empty=problem.input.shape[0] == 0)


def save_rows(
    tiles: Tiles, problem: Problem, config: ChunkConfig, needs_grad: NeedsGrad, statistics: int
) -> tuple[Tensor, RowStatistics, SavedRows]:
    """Plan A without the gradients of the head, for an upstream gradient of 1: each row's weighted loss (N,), its
    statistics, and what `saved_gradients` needs."""
    e, classes = None, problem.classes
    if needs_grad.d_weight or needs_grad.d_bias:
        e = problem.input.new_empty((problem.input.shape[0], problem.most_classes))
    sums = _sums(problem, NeedsGrad(needs_grad.d_input, False, False), config)
    saved = NOTHING_SAVED._replace(e=e, unit_d_input=sums.d_input, rho=torch.ones_like(problem.row_weight))
    losses, parts, seen = [], [], replace(problem, row_weight=problem.row_weight.clone())
    for chunk in problem.chunks(config.rows):
        target, row_weight = problem.target[chunk], problem.row_weight[chunk]
        kept: list[Tensor] | None = [] if config.keeps_logits else None
        partial = chunk_statistics(
            problem, chunk, config.first_vocab_chunk, statistics=statistics, kept=kept, tiles=tiles
        )
        part = row_math.finish(partial, target, row_weight, classes)
        losses.append(row_math.row_loss(problem.spec, part, target, row_weight, problem.class_weight, classes))
        coefficients = row_math.loss_coefficients(
            problem.spec, part.lse, target, row_weight, problem.class_weight, classes
        )
        # A row of NaN must have a zero gradient if its upstream gradient is 0: its zeros are saved, and rho is NaN.
        lost = (row_weight != 0) & ~row_math.finite(part.lse, coefficients)
        assert saved.rho is not None
        saved.rho[chunk] = torch.where(lost, torch.nan, 1.0)
        seen.row_weight[chunk] = torch.where(lost, 0.0, row_weight)
        chunk_gradients(
            seen, chunk, config.vocab_chunk, part.lse, coefficients, sums, kept=kept, saved=saved, tiles=tiles
        )
        parts.append(part)
    return torch.cat(losses), _concatenate(parts, problem, statistics), saved


def saved_gradients(
    tiles: Tiles, problem: Problem, config: ChunkConfig, saved: SavedRows, needs_grad: NeedsGrad, others: Gradients
) -> Gradients:
    """Returns the gradients of the head by saved rows, added to those by other rows: (42). The row weights of the
    problem are the upstream gradients times rho."""
    if saved.e is None or not (needs_grad.d_weight or needs_grad.d_bias):
        return others
    needs_grad, dtype, factor = needs_grad._replace(d_input=False), problem.input.dtype, problem.row_weight
    arrays = problem.input, problem.linear_weight, problem.linear_bias
    sums = GradientSums(*arrays, problem.local_classes, needs_grad, float32_sum=config.float32_sum, others=others)
    started = others.d_weight is not None or others.d_bias is not None
    add = partial(tiles.add_matmul, problem)
    scale, of_x = None, factor
    if dtype == torch.float16:  # the largest factor becomes a number below 1
        exponent = row_math.exponent_of(factor)
        of_x = torch.ldexp(factor, -exponent)
        scale = torch.ldexp(torch.ones_like(factor[0]), exponent - FLOAT16_HEADROOM)
    for chunk in problem.chunks(config.rows):
        first, of_rows = chunk.start == 0 and not started, factor[chunk]
        x = None
        if sums.d_weight is not None:
            x = operand(problem.rows(chunk).mul_(of_x[chunk, None]), dtype)  # in place: a product would be float32
        for vocab_chunk in problem.vocab_chunks(config.vocab_chunk):
            e = operand(saved.e[chunk, vocab_chunk], dtype)
            if sums.d_weight is not None and x is not None:
                sums.d_weight.put_matmul(vocab_chunk, e.T, x, scale, first=first, add=add)
            if sums.d_bias is not None:
                summed = of_rows @ e.float()
                if scale is not None:
                    summed *= 2.0**-FLOAT16_HEADROOM
                sums.d_bias.put(vocab_chunk, summed, first=first)
            del e  # otherwise it stays alive until that of the next chunk exists
    return sums.result(empty=False)


def _sums(problem: Problem, needs_grad: NeedsGrad, config: ChunkConfig, d_input: Tensor | None = None) -> GradientSums:
    options = {"float32_sum": config.float32_sum, "d_input": d_input, "grad_into": problem.grad_into}
    arrays = problem.input, problem.linear_weight, problem.linear_bias
    return GradientSums(*arrays, problem.local_classes, needs_grad, **options)


def _local_target(problem: Problem, target: Tensor, vocab_chunk: slice) -> tuple[Tensor, Tensor]:
    """Returns each row's target as a column of the vocabulary chunk, within bounds, and whether it lies in the
    vocabulary chunk."""
    local = target - (problem.vocab_offset + vocab_chunk.start)
    width = vocab_chunk.stop - vocab_chunk.start
    return local.clamp(0, width - 1), (local >= 0) & (local < width)


def _concatenate(parts: list[RowStatistics], problem: Problem, statistics: int) -> RowStatistics:
    if len(parts) == 1:
        return parts[0]

    def joined(field: str, needed: int = 1) -> Tensor | None:
        if not needed:
            return None
        empty = problem.row_weight.new_empty(0, dtype=torch.int64 if field == "argmax" else torch.float32)
        return torch.cat([empty, *(getattr(part, field) for part in parts)])

    return RowStatistics(
        lse=joined("lse"),  # pyright: ignore[reportArgumentType]
        target_logit=joined("target_logit"),  # pyright: ignore[reportArgumentType]
        nll=joined("nll"),
        max=joined("max"),
        weighted_sum=joined("weighted_sum", problem.spec.label_smoothing != 0),
        entropy=joined("entropy", statistics & ENTROPY),
        argmax=joined("argmax", statistics & ARGMAX),
        mean_logit=joined("mean_logit", statistics & LOGIT_SUM),
        sum_squared_probs=joined("sum_squared_probs", statistics & SQUARES),
    )
