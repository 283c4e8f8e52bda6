"""The tiles of `chunked.py`, computed by kernels, for calls that recompute the logits for the gradients: 1 + 3 matmuls.

Plan A uses them for float32, for label smoothing that is not of rank one (`plan.smoothing_is_linear`), for a head of
another dtype that is not split, and for sizes that the kernels of gradients do not take. Plan C uses them where its
backward pass cannot be plan A again (`plan.make_plan`). The chunks of rows and vocabulary chunks are those of
`chunked`. In the first pass the logits stay within a multiprocessor. The second pass writes d_logits once, and the
gradients are XLA GEMMs of d_logits. If the implementation has a kernel for d_weight, that kernel computes d_weight.
"""

from types import ModuleType

import jax.numpy as jnp
from jax import Array

from jax_pallas import kernels
from jax_pallas.chunked import RowGradient, Tiles
from jax_pallas.problem import Problem, add_d_weight, plan_of
from jax_pallas.row_math import Partial
from jax_pallas.scaled_exp import static_args
from jax_pallas.slicing import Slice
from linear_ce.gpus import share_added_in_l2
from linear_ce.statistics import ARGMAX, ENTROPY, LOGIT_SUM, SQUARES


def _partial(problem: Problem, x: Array, target: Array, vocab_chunk: Slice, statistics: int) -> tuple[Partial, None]:
    w, bias, class_weight, first, skip = _vocab_chunk(problem, vocab_chunk)
    smoothed = problem.spec.label_smoothing != 0
    weighted = smoothed or statistics & LOGIT_SUM != 0  # by ones: token losses have no label smoothing
    column, hit = problem.target_column(target, vocab_chunk)
    top, sum_exp, weighted_sum, sum_exp_log, target_exp, target_logit, argmax, sum_squared = _launcher(
        problem
    ).statistics(
        x,
        w,
        bias,
        class_weight if smoothed else None,
        0,
        first,
        skip,
        target=jnp.where(hit, column, -1),
        **static_args(problem, len(x), vocab_chunk.size),
        weighted=weighted,
        statistics=statistics & (ENTROPY | ARGMAX | SQUARES),
    )
    if argmax is not None:
        argmax += problem.vocab_offset + vocab_chunk.start
    weighted_sum, logit_sum = (weighted_sum if one else None for one in (smoothed, statistics & LOGIT_SUM))
    sums = weighted_sum, sum_exp_log, argmax, logit_sum, sum_squared
    return Partial(top, sum_exp, target_exp, target_logit, *sums), None


def _d_logits(
    problem: Problem, x: Array, target: Array, vocab_chunk: Slice, row: RowGradient, logits: None
) -> tuple[Array, Array | None]:
    w, bias, class_weight, first, skip = _vocab_chunk(problem, vocab_chunk)
    coefficients = row.coefficients
    d_logits = _launcher(problem).d_logits(
        x,
        w,
        bias,
        class_weight if coefficients.sigma is not None else None,
        target - (problem.vocab_offset + vocab_chunk.start) + first,
        row.lse,
        coefficients.alpha,
        coefficients.tau,
        coefficients.beta,
        coefficients.sigma,
        row.contributes,
        0,
        first,
        skip,
        **static_args(problem, len(x), vocab_chunk.size),
    )
    if not row.bias:
        return d_logits, None
    scale = 1.0 if row.bias_scale is None else row.bias_scale[:, None]
    return d_logits, (d_logits[: len(x), : vocab_chunk.size].astype(jnp.float32) * scale).sum(0)


def _add_d_weight(
    problem: Problem, d_logits: Array, x: Array, vocab_chunk: Slice, scale: Array | None, d_weight: Array
) -> Array:
    plan = plan_of(problem)
    if not plan.d_weight_kernel:
        return add_d_weight(problem, d_logits[: len(x), : vocab_chunk.size], x, vocab_chunk, scale, d_weight)
    from jax_pallas import hopper_gradients

    axis = problem.vocab_axis
    return hopper_gradients.add_d_weight(
        d_logits,
        x,
        0,
        vocab=d_weight.shape[axis],
        classes=vocab_chunk.size,
        vocab_axis=axis,
        in_l2=share_added_in_l2(len(d_logits), plan.gpu),
        old=d_weight,
        first_class=jnp.int32(vocab_chunk.start),
    )


KERNEL_TILES = Tiles(_partial, _d_logits, _add_d_weight)


def _launcher(problem: Problem) -> ModuleType:
    """Returns the module with the plan's kernels. Mosaic is imported only if the plan uses it."""
    if not plan_of(problem).hopper:
        return kernels
    from jax_pallas import hopper_logits

    return hopper_logits


def _vocab_chunk(
    problem: Problem, vocab_chunk: Slice
) -> tuple[Array, Array | None, Array | None, Array | int, Array | int]:
    """Returns a head that contains the vocabulary chunk, its bias and class weights in float32, the row of the chunk's
    first class in them, and how many of the chunk's classes are also in an earlier chunk."""
    skip = 0 if vocab_chunk.fresh is None else vocab_chunk.size - vocab_chunk.fresh.sum()
    w, bias, first = problem.linear_weight, problem.linear_bias, vocab_chunk.start
    plan = plan_of(problem)
    copied = plan.casts_head or not (vocab_chunk.fresh is None or plan.vocab_chunks_in_place)
    if copied:
        w, first = problem.weight_of(vocab_chunk), 0
        bias = None if bias is None else vocab_chunk.of(bias)
    class_weight = problem.class_weight_of(vocab_chunk)
    if problem.class_weight is not None and not copied:  # numbered as the head's rows are
        class_weight = jnp.zeros(w.shape[problem.vocab_axis], jnp.float32)
        size = min(problem.local_classes, len(class_weight))
        class_weight = class_weight.at[:size].set(problem.class_weight[problem.vocab_offset :][:size])
    return w, None if bias is None else bias.astype(jnp.float32), class_weight, first, skip
