"""What XLA computes with the head in calls with scaled exponentials: its matmul with the exponentials, and the targets'
rows of it. Our kernels read the head themselves.
"""

import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import tile_config
from jax_pallas.problem import Problem, float32_matmul, plan_of
from jax_pallas.slicing import Slice, over_slices


def times_head(problem: Problem, e: Array, rows: int) -> Array:
    """Returns the matmul of the exponentials of so many rows and the head, (rows, D) float32. A float32 head is
    multiplied one vocabulary chunk at a time, both halves if it is split; so is a head of which the device knows how
    many are classes."""
    axis, count = problem.vocab_axis, problem.class_count
    if not problem.casts_head and count is None:
        return float32_matmul(e, problem.linear_weight, (1, axis))

    def body(total: Array, vocab_chunk: Slice) -> tuple[Array, None]:
        part = vocab_chunk.of(e[:rows], axis=1)
        if vocab_chunk.fresh is not None:
            part = jnp.where(vocab_chunk.fresh, part, 0)
        w = problem.weight_of(vocab_chunk)
        if count is not None:  # the padding may hold NaN
            is_class = jnp.expand_dims(vocab_chunk.start + jnp.arange(vocab_chunk.size) < count, 1 - axis)
            total, w, part = lax.optimization_barrier((total, jnp.where(is_class, w, 0), part))
        if not problem.spec.splits_head:
            return total + float32_matmul(part, w, (1, axis)), None
        high, low = jnp.split(w, 2, 1 - axis)
        total = total + float32_matmul(part, high, (1, axis))
        # One after the other: XLA would join the matmuls, whose result would be twice as large.
        total, part = lax.optimization_barrier((total, part))
        return total + float32_matmul(part, low, (1, axis)), None

    zero = lax.optimization_barrier(jnp.float32(0))  # XLA would keep zeros for the first sum
    start = jnp.full((rows, problem.input.shape[1]), zero)
    config = plan_of(problem).scaled_exp_config
    size = config.head_rows if problem.casts_head else min(problem.classes, tile_config.COUNTED_CLASSES)
    return over_slices(body, start, problem.classes, size)[0]


def target_rows(problem: Problem, column: Array) -> Array:
    """Returns the rows (n, D) of the head that `column` (n,) names, each within the head, in the input's dtype, or
    float32 if the head is split."""
    picked = jnp.take(problem.linear_weight, column, axis=problem.vocab_axis, mode="clip")
    picked = picked if problem.vocab_axis == 0 else picked.T
    picked = problem.as_multiplied(picked)
    return picked if problem.spec.splits_head else picked.astype(problem.input.dtype)
