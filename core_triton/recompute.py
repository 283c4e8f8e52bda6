"""The tiles of `chunked.py`, computed by kernels, for calls that recompute the logits for the gradients: 1 + 3 matmuls.

Plan A uses them for label smoothing that is not of rank one (`plan.smoothing_is_linear`), for the gradients of token
losses of the entropies and, on compute capability 8.x and 12.x, for 2**24 classes or more. Plan C uses them where its
backward pass cannot be plan A again (`plan.make_plan`). float32 has `stored_logits.py`. The chunks of rows and
vocabulary chunks are those of `chunked`. In the first pass the logits stay within a multiprocessor. The second pass
writes d_logits once, and the gradients are cuBLAS GEMMs of d_logits.
"""

import torch
from torch import Tensor

from core_triton import hopper_logits, kernels, row_kernels, row_statistics, tile_config
from core_triton.chunked import RowGradient, Tiles
from core_triton.launch import At, cdiv
from core_triton.problem import Problem, layout_of, operand, plan_of
from core_triton.row_math import Partial
from linear_ce.statistics import ARGMAX, BY_ROW, ENTROPY, LOGIT_SUM, MAX, SQUARES, planes


def _partial(
    problem: Problem, x: Tensor, w: Tensor, target: Tensor, vocab_chunk: slice, kept: None, statistics: int
) -> Partial:
    plan = plan_of(problem)
    assert plan.tile is not None
    n, blocks = x.shape[0], cdiv(vocab_chunk.stop - vocab_chunk.start, plan.tile.block_v)
    # The sum of the logits is weighted by ones, and token losses have no label smoothing.
    weighted, entropy = problem.spec.label_smoothing != 0 or statistics & LOGIT_SUM != 0, statistics & ENTROPY != 0
    with_top = planes(statistics & (ARGMAX | SQUARES) | MAX)
    part = x.new_empty((1 + with_top + weighted + entropy, blocks, n), dtype=torch.float32)
    top, sum_exp = part[:with_top].view(blocks, with_top, n), part[with_top]
    weighted_sum = part[1 + with_top] if weighted else None
    sum_exp_log = part[1 + with_top + weighted] if entropy else None
    target_logit = sum_exp.new_zeros(n)
    argmax = target.new_empty(n) if statistics & ARGMAX else None
    sum_squared = sum_exp.new_empty(n) if statistics & SQUARES else None
    launcher = hopper_logits if plan.hopper else kernels
    launcher.statistics(
        problem,
        tma_compatible(x, by_row=True, pointers=plan.pointers),
        tma_compatible(w, pointers=plan.pointers),
        vocab_chunk,
        statistics=statistics & (ARGMAX | ENTROPY | SQUARES | BY_ROW),
        class_weight=problem.class_weight_or_ones(vocab_chunk) if weighted else None,
        target=target,
        tops=top,
        sums=sum_exp,
        weighted_sums=weighted_sum,
        sums_exp_log=sum_exp_log,
        target_logit=target_logit,
    )
    row_statistics.merge(
        top,
        sum_exp,
        weighted_sum,
        sum_exp_log,
        argmax,
        sum_squared,
        statistics & (ARGMAX | ENTROPY | SQUARES | BY_ROW),
        blocks,
        plan.tile.block_v,
        n,
    )
    if argmax is not None:
        argmax += problem.vocab_offset + vocab_chunk.start
    weighted_sum = None if weighted_sum is None else weighted_sum[0].clone()  # a clone, so that `part` can be freed
    return Partial(
        top[0, 0],
        sum_exp[0],
        target_logit,
        weighted_sum if problem.spec.label_smoothing else None,
        None if sum_exp_log is None else sum_exp_log[0],
        argmax,
        weighted_sum if statistics & LOGIT_SUM else None,
        sum_squared,
    )


def _d_logits(
    problem: Problem, x: Tensor, w: Tensor, chunk: slice, vocab_chunk: slice, row: RowGradient, kept: None
) -> tuple[Tensor, Tensor | None]:
    plan = plan_of(problem)
    n, classes, coefficients = x.shape[0], vocab_chunk.stop - vocab_chunk.start, row.coefficients
    d_logits = x.new_empty((n, tile_config.padded(classes)), dtype=problem.input.dtype)[:, :classes]
    launcher = hopper_logits if plan.hopper else kernels
    launcher.d_logits(
        problem,
        tma_compatible(x, by_row=True, pointers=plan.pointers),
        tma_compatible(w, pointers=plan.pointers),
        vocab_chunk,
        result=d_logits,
        class_weight=None if coefficients.sigma is None else problem.class_weight_or_ones(vocab_chunk),
        target=At(problem.target, chunk.start),
        row_weight=At(problem.row_weight, chunk.start),
        lse=row.lse,
        alpha=coefficients.alpha,
        tau=coefficients.tau,
        beta=coefficients.beta,
        sigma=coefficients.sigma,
    )
    return operand(d_logits, d_logits.dtype), row_kernels.class_sums(d_logits, row.bias_scale) if row.bias else None


KERNEL_TILES = Tiles(_partial, _d_logits)


def tma_compatible(matrix: Tensor, *, by_row: bool = False, pointers: bool = False) -> Tensor:
    """Returns the matrix if kernels can read it (`MatrixLayout.tma_compatible`), otherwise a copy whose rows are padded
    with zeros."""
    if layout_of(matrix).tma_compatible(by_row=by_row, pointers=pointers):
        return matrix
    n, columns = matrix.shape
    copy = matrix.new_zeros((n, tile_config.padded_hidden(columns, matrix.itemsize)))
    copy[:, :columns] = matrix
    return copy
