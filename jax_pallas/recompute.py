"""The loss with Pallas kernels: plans A, B and C of `chunked.py` in fewer products and passes.

    plan A  `loss_and_gradients`  3 products: the logits' own stores exponentials instead of logits (MATH.md section 8),
                                  and the gradients are products of those. Serves bfloat16 without label smoothing and
                                  with a head of the same dtype; other calls compute logits twice, 4 products
    plan B  `losses`              1 product, whose tiles of logits never leave the multiprocessor; `statistics` finds
                                  what smoothing and the entropy want besides
    plan C  `gradients`           1 + 3 products: d_logits come from logits computed again, slab by slab

Plans B and C walk chunks and slabs as `chunked` does, with tiles made by kernels. Gradients are XLA's products where an
implementation has none of its own, and d_input is in plan C.
"""

import jax.numpy as jnp
from jax import Array

from jax_pallas import chunked, launch, tile_config
from jax_pallas.chunked import RowGradient, Tiles
from jax_pallas.pieces import Piece
from jax_pallas.problem import NO_GRADIENTS, Gradients, NeedsGrad, Problem, add_d_weight
from jax_pallas.rows import Coefficients, Partial, RowStatistics
from jax_pallas.scaled_exp import known, scaled_exp
from linear_ce.chunking import ChunkConfig


def check_budget(problem: Problem, memory_budget: int, needs_grad: NeedsGrad, *, entropy: bool = False) -> None:
    """Raises ValueError where `gradients` could not keep within the budget: known before the forward pass runs."""
    _recomputed_config(problem, memory_budget, needs_grad, entropy=entropy)


def losses(problem: Problem, memory_budget: int, *, statistics: bool) -> tuple[Array, RowStatistics]:
    """Plan B: each row's weighted loss (N,) and its statistics, no gradient.

    Without `statistics` the largest logits may be inf.
    """
    if problem.spec.label_smoothing or _converts(problem):
        config = _recomputed_config(problem, memory_budget, NO_GRADIENTS, entropy=False)
        return chunked.losses_by(KERNEL_TILES, problem, config)
    loss, found, _ = scaled_exp(problem, memory_budget, NO_GRADIENTS, statistics=statistics)
    return loss, found


def statistics(problem: Problem, memory_budget: int, *, entropy: bool = False) -> RowStatistics:
    """Plan B: statistics of every row, no loss."""
    config = _recomputed_config(problem, memory_budget, NO_GRADIENTS, entropy=entropy)
    return chunked.statistics_by(KERNEL_TILES, problem, config, entropy)


def loss_and_gradients(
    problem: Problem,
    memory_budget: int,
    needs_grad: NeedsGrad,
    scales: tuple[Array, Array] | None,
    *,
    statistics: bool,
) -> tuple[Array, RowStatistics, Gradients]:
    """Plan A: each row's weighted loss (N,), its statistics, and the gradients of their sum, times `scales`.

    Without `statistics` the largest logits are inf.
    """
    if _serves_exponentials(problem):
        return scaled_exp(problem, memory_budget, needs_grad, statistics=statistics)
    config = _recomputed_config(problem, memory_budget, needs_grad, entropy=False)
    return chunked.loss_and_gradients_by(KERNEL_TILES, problem, config, needs_grad, scales)


def gradients(
    problem: Problem, memory_budget: int, lse: Array, coefficients: Coefficients, needs_grad: NeedsGrad
) -> Gradients:
    """Plan C's backward pass: the gradients under any upstream gradient, from lse alone."""
    config = _recomputed_config(problem, memory_budget, needs_grad, entropy=coefficients.beta is not None)
    return chunked.gradients_by(KERNEL_TILES, problem, config, lse, coefficients, needs_grad)


def _converts(problem: Problem) -> bool:
    """Whether the head has another dtype than the input, and is converted slab by slab."""
    return problem.linear_weight.dtype != problem.input.dtype


def _multiplies(problem: Problem) -> bool:
    """Whether the implementation has kernels for the products of this call's gradients."""
    limits, vocab = launch.load(problem.implementation).gradient_limits, problem.linear_weight.shape[problem.vocab_axis]
    if limits is None or _converts(problem):
        return False
    return limits(problem.input.dtype, problem.input.shape[1], vocab) is None


def _serves_exponentials(problem: Problem) -> bool:
    """Whether plan A can be made of scaled exponentials."""
    if problem.input.dtype != jnp.bfloat16 or problem.spec.label_smoothing or _converts(problem):
        return False
    if launch.load(problem.implementation).gradient_limits is not None:
        return _multiplies(problem)
    vocab = problem.linear_weight.shape[problem.vocab_axis]
    return vocab == problem.classes == tile_config.padded(vocab)  # XLA's products take whole arrays: nothing is padded


def _partial(problem: Problem, x: Array, target: Array, slab: Piece, *, entropy: bool) -> tuple[Partial, None]:
    w, bias, class_weight, first, skip = _slab(problem, slab)
    weighted = problem.spec.label_smoothing != 0
    column, hit = problem.target_column(target, slab)
    top, sum_exp, weighted_sum, sum_exp_log, target_exp, target_logit = launch.load(problem.implementation).statistics(
        x,
        w,
        bias,
        class_weight if weighted else None,
        0,
        first,
        skip,
        target=jnp.where(hit, column, -1),
        **known(problem, len(x), slab.size),
        weighted=weighted,
        entropy=entropy,
    )
    return Partial(top, sum_exp, target_exp, target_logit, weighted_sum, sum_exp_log), None


def _d_logits(
    problem: Problem, x: Array, target: Array, slab: Piece, row: RowGradient, logits: None
) -> tuple[Array, Array | None]:
    w, bias, class_weight, first, skip = _slab(problem, slab)
    coefficients = row.coefficients
    d_logits = launch.load(problem.implementation).d_logits(
        x,
        w,
        bias,
        class_weight if coefficients.sigma is not None else None,
        target - (problem.vocab_offset + slab.start) + first,
        row.lse,
        coefficients.alpha,
        coefficients.tau,
        coefficients.beta,
        coefficients.sigma,
        row.contributes,
        0,
        first,
        skip,
        **known(problem, len(x), slab.size),
    )
    if not row.bias:
        return d_logits, None
    scale = 1.0 if row.bias_scale is None else row.bias_scale[:, None]
    return d_logits, (d_logits[: len(x), : slab.size].astype(jnp.float32) * scale).sum(0)


def _add_d_weight(
    problem: Problem, d_logits: Array, x: Array, slab: Piece, scale: Array | None, d_weight: Array
) -> Array:
    kernel = launch.load(problem.implementation).d_weight
    if kernel is None or not _multiplies_slabs(problem) or d_weight.dtype != x.dtype:
        return add_d_weight(problem, d_logits[: len(x), : slab.size], x, slab, scale, d_weight)
    axis = problem.vocab_axis
    sizes = {"vocab": d_weight.shape[axis], "classes": slab.size, "vocab_axis": axis}
    return kernel(d_logits, x, 0, **sizes, old=d_weight, first_class=jnp.int32(slab.start))


KERNEL_TILES = Tiles(_partial, _d_logits, _add_d_weight)


def _slab(problem: Problem, slab: Piece) -> tuple[Array, Array | None, Array | None, Array | int, Array | int]:
    """Returns a head that has the slab, its bias and class weights in float32, the slab's first class in them, and how
    many of its classes an earlier slab has seen."""
    skip = 0 if slab.fresh is None else slab.size - slab.fresh.sum()
    w, bias, first = problem.linear_weight, problem.linear_bias, slab.start
    copied = _converts(problem) or not (slab.fresh is None or _aligned(problem))
    if copied:
        w, first = problem.slab_weight(slab), 0
        bias = None if bias is None else slab.of(bias)
    class_weight = problem.slab_class_weight(slab)
    if problem.class_weight is not None and not copied:  # in the head's own numbering
        class_weight = jnp.zeros(w.shape[problem.vocab_axis], jnp.float32)
        size = min(problem.local_classes, len(class_weight))
        class_weight = class_weight.at[:size].set(problem.class_weight[problem.vocab_offset :][:size])
    return w, None if bias is None else bias.astype(jnp.float32), class_weight, first, skip


def _aligned(problem: Problem) -> bool:
    """Whether slabs, of multiples of 64 classes, begin where TMA can in a (D, V) head's rows: at such multiples."""
    return problem.vocab_axis == 0 or problem.local_classes % 64 == 0


def _multiplies_slabs(problem: Problem) -> bool:
    """Whether the kernel of d_weight adds to the slabs of this call."""
    return _multiplies(problem) and _aligned(problem)


def _recomputed_config(problem: Problem, memory_budget: int, needs_grad: NeedsGrad, *, entropy: bool) -> ChunkConfig:
    tokens, hidden = problem.input.shape
    return tile_config.choose_recomputed(
        tokens=tokens,
        hidden=hidden,
        classes=problem.classes,
        itemsize=problem.input.dtype.itemsize,
        statistics=2 + (problem.spec.label_smoothing != 0) + entropy,
        float16=problem.input.dtype == jnp.float16,
        d_input=needs_grad.d_input,
        d_weight=needs_grad.d_weight,
        converts=_converts(problem),
        in_place=_multiplies_slabs(problem),
        budget=memory_budget,
    )
