"""The tiles of `chunked.py` for float32: the logits are stored, and kernels make two passes over them.

A float32 matmul takes about ten times as long as one in bfloat16, so what counts is the number and the speed of the
matmuls: `float32_matmuls.py` on Hopper, cuBLAS's elsewhere. The passes over stored logits take little of the time. Plan
A stores the logits of a chunk of rows: the first pass (`statistics_kernel`) reads them, and the second one
(`d_logits_kernel`) replaces them by d_logits. So it is three matmuls. Only where the budget cannot hold the logits of
enough rows does it compute them twice (`chunk_config.choose_stored`).
"""

import triton
import triton.language as tl
from torch import Tensor

from core_triton import float32_matmuls, kernels, row_kernels, tile_config
from core_triton.chunked import RowGradient, Tiles
from core_triton.kernels import LOG2_E, NO_CLASS, d_logits_of, tanh
from core_triton.launch import At, cdiv, launch
from core_triton.problem import Problem
from core_triton.row_math import Partial
from linear_ce.statistics import ARGMAX, ENTROPY, LOGIT_SUM, SQUARES


@triton.jit
def read_logits(
    logits_ptr, bias_ptr, columns, inside, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Returns a row's logits at these columns: (1), (2). They are 0 where `inside` is False."""
    raw = tl.load(logits_ptr + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    logits = raw * scale
    if HAS_SOFTCAP:
        logits = softcap * tanh(logits * (1.0 / softcap))
    return logits


@triton.jit
def statistics_kernel(
    logits_ptr,
    bias_ptr,
    class_weight_ptr,
    target_ptr,
    max_ptr,
    sum_ptr,
    weighted_sum_ptr,
    sum_exp_log_ptr,
    target_logit_ptr,
    argmax_ptr,
    sum_squared_ptr,
    first_class,
    stride,
    classes,
    scale,
    softcap,
    WEIGHTED: tl.constexpr,
    STATISTICS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the statistics of one row of x @ w.T, (rows, V) float32, over these classes: (25), (43).

    Reads target (rows,) int64. Writes max, sum, weighted_sum, sum_exp_log, target_logit and sum_squared (rows,) float32
    and argmax (rows,) int64, those of them that are in STATISTICS, an int of `linear_ce.statistics`. target_logit is 0
    where the target minus `first_class` is not among these classes.
    """
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    target = tl.load(target_ptr + row) - first_class
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted_sum = tl.zeros((), tl.float32)
    sum_exp_log = tl.zeros((), tl.float32)
    target_logit = tl.zeros((), tl.float32)
    sum_squared = tl.zeros((), tl.float32)
    argmax = tl.zeros((), tl.int32)
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < classes
        logits = read_logits(logits_ptr, bias_ptr, columns, inside, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        target_logit += tl.sum(tl.where(inside & (columns == target), logits, 0.0), 0)
        if WEIGHTED:
            class_weight = tl.load(class_weight_ptr + columns, mask=inside, other=0.0)
            weighted_sum += tl.sum(logits * class_weight, 0)
        logits = tl.where(inside, logits, float("-inf"))
        before = top  # blocks are merged as vocabulary chunks are: (26)
        top = tl.maximum(top, tl.max(logits, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        moved = tl.where(before == float("-inf"), 0.0, before - shift)
        factor = tl.exp2(moved * LOG2_E)
        exponentials = tl.exp2((logits - shift) * LOG2_E)
        if kernels.ARGMAX & STATISTICS:
            here = tl.min(tl.where(inside & (logits == top), columns, NO_CLASS), 0)
            argmax = tl.where(top > before, here, argmax)
        if kernels.SQUARES & STATISTICS:
            sum_squared = factor * factor * sum_squared + tl.sum(exponentials * exponentials, 0)
        if kernels.ENTROPY & STATISTICS:
            shifted = tl.where(exponentials == 0, 0.0, logits - shift)
            sum_exp_log = factor * (sum_exp_log + moved * total) + tl.sum(exponentials * shifted, 0)
        total = factor * total + tl.sum(exponentials, 0)
    tl.store(max_ptr + row, top)
    tl.store(sum_ptr + row, total)
    tl.store(target_logit_ptr + row, target_logit)
    if WEIGHTED:
        tl.store(weighted_sum_ptr + row, weighted_sum)
    if kernels.ENTROPY & STATISTICS:
        tl.store(sum_exp_log_ptr + row, sum_exp_log)
    if kernels.ARGMAX & STATISTICS:
        tl.store(argmax_ptr + row, (first_class + argmax).to(tl.int64))
    if kernels.SQUARES & STATISTICS:
        tl.store(sum_squared_ptr + row, sum_squared)


def _partial(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    target: Tensor,
    vocab_chunk: slice,
    kept: list[Tensor] | None,
    statistics: int,
) -> Partial:
    logits, spec = _matmul(problem, x, w), problem.spec
    if kept is not None:
        kept.append(logits)
    # The sum of the logits is weighted by ones, and token losses have no label smoothing.
    weighted, entropy = spec.label_smoothing != 0 or statistics & LOGIT_SUM != 0, statistics & ENTROPY != 0
    squares = statistics & SQUARES != 0
    part = logits.new_empty((3 + weighted + entropy + squares, len(x)))
    top, sum_exp, target_logit = part[:3]
    weighted_sum = part[3] if weighted else None
    sum_exp_log = part[3 + weighted] if entropy else None
    sum_squared = part[-1] if squares else None
    argmax = target.new_empty(len(x)) if statistics & ARGMAX else None
    launch(
        statistics_kernel,
        (len(x),),
        logits,
        _bias(problem, vocab_chunk),
        problem.class_weight_or_ones(vocab_chunk) if weighted else None,
        target,
        top,
        sum_exp,
        weighted_sum,
        sum_exp_log,
        target_logit,
        argmax,
        sum_squared,
        problem.vocab_offset + vocab_chunk.start,
        logits.stride(0),
        logits.shape[1],
        spec.logit_scale,
        spec.softcap or 1.0,
        WEIGHTED=weighted,
        STATISTICS=statistics & (ARGMAX | ENTROPY | SQUARES),
        HAS_BIAS=problem.linear_bias is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK=_block(logits),
        num_warps=8,
    )
    smoothed, logit_sum = (weighted_sum if one else None for one in (spec.label_smoothing, statistics & LOGIT_SUM))
    return Partial(top, sum_exp, target_logit, smoothed, sum_exp_log, argmax, logit_sum, sum_squared)


@triton.jit
def d_logits_kernel(
    logits_ptr,
    bias_ptr,
    class_weight_ptr,
    target_ptr,
    row_weight_ptr,
    lse_ptr,
    alpha_ptr,
    tau_ptr,
    beta_ptr,
    sigma_ptr,
    first_class,
    stride,
    classes,
    scale,
    softcap,
    HAS_BETA: tl.constexpr,
    HAS_SIGMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replaces BLOCK columns of a row of x @ w.T, (rows, V) float32, by d_logits: (23), (15); by zeros in rows of
    row_weight 0. Reads what `kernels.d_logits_kernel` reads."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < classes
    logits_ptr += row.to(tl.int64) * stride
    logits = read_logits(logits_ptr, bias_ptr, columns, inside, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    class_weight = None
    if HAS_SIGMA:
        class_weight = tl.load(class_weight_ptr + columns, mask=inside, other=0.0)
    d_logits = d_logits_of(
        logits,
        tl.load(lse_ptr + row),
        tl.load(alpha_ptr + row),
        tl.load(tau_ptr + row),
        tl.load(beta_ptr + row) if HAS_BETA else None,
        tl.load(sigma_ptr + row) if HAS_SIGMA else None,
        class_weight,
        columns == tl.load(target_ptr + row) - first_class,
        softcap,
        HAS_BETA,
        HAS_SIGMA,
        HAS_SOFTCAP,
    )
    contributes = tl.load(row_weight_ptr + row) != 0
    tl.store(logits_ptr + columns, tl.where(contributes, d_logits, 0.0), mask=inside)


def _d_logits(
    problem: Problem,
    x: Tensor,
    w: Tensor,
    chunk: slice,
    vocab_chunk: slice,
    row: RowGradient,
    kept: list[Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    logits, spec, coefficients = _matmul(problem, x, w) if kept is None else kept.pop(0), problem.spec, row.coefficients
    n, classes = logits.shape
    block = _block(logits)
    launch(
        d_logits_kernel,
        (n, cdiv(classes, block)),
        logits,
        _bias(problem, vocab_chunk),
        None if coefficients.sigma is None else problem.class_weight_or_ones(vocab_chunk),
        At(problem.target, chunk.start),
        At(problem.row_weight, chunk.start),
        row.lse,
        coefficients.alpha,
        coefficients.tau,
        coefficients.beta,
        coefficients.sigma,
        problem.vocab_offset + vocab_chunk.start,
        logits.stride(0),
        classes,
        spec.logit_scale,
        spec.softcap or 1.0,
        HAS_BETA=coefficients.beta is not None,
        HAS_SIGMA=coefficients.sigma is not None,
        HAS_BIAS=problem.linear_bias is not None,
        HAS_SOFTCAP=spec.softcap is not None,
        BLOCK=block,
        num_warps=8,
    )
    return logits, row_kernels.class_sums(logits, row.bias_scale) if row.bias else None


def _add_matmul(problem: Problem, total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    programs, waves = (0, 0) if problem.plan is None else (problem.plan.float32_programs, problem.plan.float32_waves)
    float32_matmuls.add_matmul(total, a, b, first=first, programs=programs, waves=waves)


STORED_TILES = Tiles(_partial, _d_logits, _add_matmul)


def _matmul(problem: Problem, x: Tensor, w: Tensor) -> Tensor:
    """Returns x @ w.T, (n, v) float32, in rows that start at multiples of 256 bytes."""
    n, classes = len(x), len(w)
    result = x.new_empty((n, tile_config.padded(classes)))[:, :classes]
    _add_matmul(problem, result, x, w.T, first=True)
    return result


def _bias(problem: Problem, vocab_chunk: slice) -> At | None:
    return None if problem.linear_bias is None else At(problem.linear_bias, vocab_chunk.start)


def _block(logits: Tensor) -> int:
    """Returns the columns that a program processes at a time."""
    return min(4096, max(16, 1 << (logits.shape[1] - 1).bit_length()))
