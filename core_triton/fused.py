"""The loss with the Triton kernels: plans A, B and C of `chunked.py` in fewer products and passes.

    plan A  `loss_and_gradients`  3 products: the logits' own stores exponentials instead of logits (MATH.md section 8),
                                  and the gradients are products of those. Serves bfloat16 without label smoothing;
                                  other calls compute logits twice, 4 products
    plan B  `losses`              1 product, whose tiles of logits never leave the multiprocessor; `statistics` finds
                                  what smoothing and the entropy want besides
    plan C  `gradients`           1 + 3 products: d_logits come from logits computed again, slab by slab

Plans B and C walk chunks and slabs as `chunked` does, with tiles made by kernels. Their gradients are products of the
library (cuBLAS), and so are plan A's where the Hopper kernels do not serve.
"""

import torch
from torch import Tensor

from core_triton import chunked, fused_tiles
from core_triton.anchored import anchored
from core_triton.chunked import RowGradient, Tiles
from core_triton.launch import (
    add_class_sums,
    cdiv,
    class_weight,
    converts,
    describable,
    launch_tiles,
    merge,
    on_device,
    padded_hidden,
    tile_of_call,
)
from core_triton.problem import NO_GRADIENTS, Gradients, NeedsGrad, Problem, operand
from core_triton.rows import Coefficients, Partial, RowStatistics
from linear_ce.chunking import ChunkConfig


def check_budget(problem: Problem, memory_budget: int, needs_grad: NeedsGrad, *, entropy: bool = False) -> None:
    """Raises ValueError where `gradients` could not keep within the budget: known before the forward pass runs."""
    _recomputed_config(problem, memory_budget, needs_grad, entropy=entropy)


def losses(problem: Problem, memory_budget: int, *, statistics: bool) -> tuple[Tensor, RowStatistics]:
    """Plan B: each row's weighted loss (N,) and its statistics, no gradient.

    Without `statistics` the largest logits may be inf.
    """
    with on_device(problem):
        if problem.spec.label_smoothing:
            config = _recomputed_config(problem, memory_budget, NO_GRADIENTS, entropy=False)
            return chunked.losses_by(KERNEL_TILES, problem, config)
        loss, found, _ = anchored(problem, memory_budget, NO_GRADIENTS, statistics=statistics)
        return loss, found


def statistics(problem: Problem, memory_budget: int, *, entropy: bool = False) -> RowStatistics:
    """Plan B: statistics of every row, no loss."""
    config = _recomputed_config(problem, memory_budget, NO_GRADIENTS, entropy=entropy)
    with on_device(problem):
        return chunked.statistics_by(KERNEL_TILES, problem, config, entropy)


def loss_and_gradients(
    problem: Problem,
    memory_budget: int,
    needs_grad: NeedsGrad,
    scales: tuple[Tensor, Tensor] | None,
    *,
    statistics: bool,
) -> tuple[Tensor, RowStatistics, Gradients]:
    """Plan A: each row's weighted loss (N,), its statistics, and the gradients of their sum, times `scales`.

    Without `statistics` the largest logits are inf.
    """
    with on_device(problem):
        if problem.input.dtype == torch.bfloat16 and not problem.spec.label_smoothing:
            return anchored(problem, memory_budget, needs_grad, statistics=statistics)
        config = _recomputed_config(problem, memory_budget, needs_grad, entropy=False)
        return chunked.loss_and_gradients_by(KERNEL_TILES, problem, config, needs_grad, scales)


def gradients(
    problem: Problem, memory_budget: int, lse: Tensor, coefficients: Coefficients, needs_grad: NeedsGrad
) -> Gradients:
    """Plan C's backward pass: the gradients under any upstream gradient, from lse alone."""
    config = _recomputed_config(problem, memory_budget, needs_grad, entropy=coefficients.beta is not None)
    with on_device(problem):
        return chunked.gradients_by(KERNEL_TILES, problem, config, lse, coefficients, needs_grad)


def _partial(
    problem: Problem, x: Tensor, w: Tensor, target: Tensor, slab: slice, kept: None, *, entropy: bool
) -> Partial:
    n, blocks = x.shape[0], cdiv(slab.stop - slab.start, tile_of_call(problem).block_v)
    weighted = problem.spec.label_smoothing != 0
    part = x.new_empty((2 + weighted + entropy, blocks, n), dtype=torch.float32)
    top, sum_exp = part[0], part[1]
    weighted_sum = part[2] if weighted else None
    sum_exp_log = part[2 + weighted] if entropy else None
    target_logit = top.new_zeros(n)
    arguments = {
        "class_weight_ptr": class_weight(problem, slab) if weighted else None,
        "target_ptr": target - (problem.vocab_offset + slab.start),
        "max_ptr": top,
        "sum_ptr": sum_exp,
        "weighted_sum_ptr": weighted_sum,
        "sum_exp_log_ptr": sum_exp_log,
        "target_logit_ptr": target_logit,
    }
    launch_tiles("statistics_kernel", problem, x, w, slab, arguments, WEIGHTED=weighted, ENTROPY=entropy)
    merge(top, sum_exp, weighted_sum, sum_exp_log)
    return Partial(
        top[0],
        sum_exp[0],
        target_logit,
        None if weighted_sum is None else weighted_sum[0].clone(),  # or all of `part` would live as long
        None if sum_exp_log is None else sum_exp_log[0],
    )


def _d_logits(
    problem: Problem, x: Tensor, w: Tensor, chunk: slice, slab: slice, row: RowGradient, kept: None
) -> tuple[Tensor, Tensor | None]:
    n, classes, coefficients = x.shape[0], slab.stop - slab.start, row.coefficients
    d_logits = x.new_empty((n, fused_tiles.padded(classes)), dtype=problem.input.dtype)[:, :classes]
    arguments = {
        "class_weight_ptr": None if coefficients.sigma is None else class_weight(problem, slab),
        "target_ptr": problem.target[chunk] - (problem.vocab_offset + slab.start),
        "row_weight_ptr": problem.row_weight[chunk],
        "lse_ptr": row.lse,
        "alpha_ptr": coefficients.alpha,
        "tau_ptr": coefficients.tau,
        "beta_ptr": coefficients.beta,
        "sigma_ptr": coefficients.sigma,
    }
    switches = {"HAS_BETA": coefficients.beta is not None, "HAS_SIGMA": coefficients.sigma is not None}
    launch_tiles("d_logits_kernel", problem, x, w, slab, arguments, result=("d_logits_desc", d_logits), **switches)
    summed = None
    if row.bias:
        summed = row.lse.new_empty(classes)
        factor = torch.ones_like(row.lse) if row.bias_scale is None else row.bias_scale
        add_class_sums(summed, d_logits, factor, first=True)
    return operand(d_logits, d_logits.dtype), summed


KERNEL_TILES = Tiles(_partial, _d_logits)


def _recomputed_config(problem: Problem, memory_budget: int, needs_grad: NeedsGrad, *, entropy: bool) -> ChunkConfig:
    tokens, hidden = problem.input.shape
    return fused_tiles.choose_recomputed(
        tokens=tokens,
        hidden=padded_hidden(hidden, problem.input.itemsize),
        classes=problem.classes,
        itemsize=problem.input.itemsize,
        block_v=tile_of_call(problem).block_v,
        statistics=2 + (problem.spec.label_smoothing != 0) + entropy,
        float16=problem.input.dtype == torch.float16,
        d_input=needs_grad.d_input,
        d_weight=needs_grad.d_weight,
        converts=converts(problem),
        converts_rows=not describable(problem.input, by_row=True),
        budget=memory_budget,
    )
