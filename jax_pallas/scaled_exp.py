"""Plans A and B with scaled exponentials (MATH.md section 8).

Plan A is three products, whose operands are the exponentials that the logits' own product stores. It serves bfloat16
without label smoothing. A chunk of rows goes through, in this order,

    exponentials and their sums                           `_store_exponentials`
    loss, and the factors of rows; x becomes rho x        `_finish_rows`
    d_weight += E^T (rho x)                               `_add_d_weight`
    d_input = rho (E W) + theta w_target                  `_store_d_input`

Before them, for all rows, come the anchors (`_anchors`); after them the targets'
terms of d_weight (`_add_targets`). Plan B is the first two, with nothing stored but the sums, in 16 bits.

d_input's own memory holds the input's rows, zeros in those that do not contribute, until a chunk's rows of d_input
replace them: then a chunk takes its exponentials and little else.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import launch, tile_config
from jax_pallas.pieces import Piece, over_chunks
from jax_pallas.problem import Gradients, NeedsGrad, Problem, plan_of, product_of
from jax_pallas.rows import RowStatistics, nll_and_lse
from jax_pallas.tile_config import ScaledExpConfig

LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634

# A row's sum is done again where it leaves these: far inside float32's range, far outside of what anchors near the
# largest logit give.
LEAST_SUM, LARGEST_SUM = 2.0**-48, 2.0**48


class Carry(NamedTuple):
    """What chunks hand on; None where not asked for."""

    held: Array | None  # (N, D): input's rows, then d_input's
    d_weight: Array | None
    d_bias: Array | None  # (K,) float32


class Sums(NamedTuple):
    """What a pass over the logits leaves of rows, (n,) float32 each."""

    total: Array  # of exponentials
    anchor: Array
    top: Array  # the largest logit, inf if not wanted
    target_exp: Array  # the target's summand of total
    target_logit: Array  # of the same products; NaN where the target is no class


class Factors(NamedTuple):
    """What loss and gradients take of rows, (n,) float32 each, 0 where they do not contribute."""

    loss: Array
    nll: Array
    lse: Array
    rho: Array
    theta: Array


def scaled_exp(problem: Problem, needs_grad: NeedsGrad, *, statistics: bool) -> tuple[Array, RowStatistics, Gradients]:
    """Plan A, or plan B where no gradient is needed: each row's weighted loss (N,), its statistics, and the gradients
    of their sum; (29)-(33). Without `statistics` the largest logits are inf."""
    plan = plan_of(problem)
    kernels, config = launch.load(plan.implementation), plan.scaled_exp_config
    x, tokens = problem.input, problem.tokens
    whole = Piece(0, tokens, None)

    def kernel_rows(size: int) -> int:
        # TMA reads zeros past the last row and drops what is stored there.
        return config.kernel_rows(size, tokens) if plan.implementation == "mosaic" else size

    # What belongs to rows goes on as far as the kernels of the last chunk do: then chunks are cut from it alike.
    last = (tokens - 1) % config.rows + 1
    past = (0, kernel_rows(last) - last)
    by_row = replace(
        problem,
        target=jnp.pad(problem.target, past, constant_values=-1),
        row_weight=jnp.pad(problem.row_weight, past),
    )
    anchor = jnp.pad(_anchors(problem), past, constant_values=jnp.inf)  # no row: zeros

    def body(carry: Carry, chunk: Piece, *, first: bool) -> tuple[Carry, Sums]:
        rows = kernel_rows(chunk.size)
        kernel_chunk = Piece(chunk.start, rows, None)
        if carry.held is not None:
            rows_, start = carry.held, chunk.start
        elif any(needs_grad):
            rows_, start = jnp.pad(problem.rows(chunk), ((0, rows - chunk.size), (0, 0))), jnp.int32(0)
        else:  # what a row holds reaches no sum but its own
            rows_, start = x, chunk.start
        e, sums = _store_exponentials(
            by_row,
            kernels,
            kernel_chunk,
            rows_,
            start,
            kernel_chunk.of(anchor),
            stores=any(needs_grad),
            statistics=statistics,
        )
        if e is None:
            return carry, sums
        factors = _finish_rows(by_row, kernel_chunk, sums)
        return _add_gradients(by_row, kernels, config, chunk, e, rows_, start, factors, carry, first=first), sums

    held = problem.rows(whole) if needs_grad.d_input else None
    d_bias = jnp.zeros(problem.classes, jnp.float32) if needs_grad.d_bias else None
    carry = Carry(held, None, d_bias)
    if needs_grad.d_weight:  # overwritten by the first chunk
        carry = carry._replace(d_weight=lax.empty(problem.linear_weight.shape, x.dtype))
    carry, sums = over_chunks(body, carry, problem.tokens, config.rows, unrolls=needs_grad.d_input)
    sums = Sums(*(value[:tokens] for value in sums))
    factors = _finish_rows(problem, whole, sums)
    d_weight, d_bias = carry.d_weight, carry.d_bias
    if d_weight is not None or d_bias is not None:
        d_weight, d_bias = _add_targets(problem, kernels, factors.theta, d_weight, d_bias)
    if d_bias is not None and problem.linear_bias is not None:
        b = problem.linear_bias
        d_bias = jnp.zeros_like(b).at[: problem.classes].set(d_bias.astype(b.dtype))
    contributes = problem.row_weight != 0
    target_logit, top = (jnp.where(contributes, value, 0.0) for value in (sums.target_logit, sums.top))
    row_statistics = RowStatistics(factors.lse, target_logit, factors.nll, top, None, None)
    return factors.loss, row_statistics, Gradients(carry.held, d_weight, d_bias)


def target_rows(problem: Problem, column: Array) -> Array:
    """Returns the rows (n, D) of the head that `column` (n,) names, each within the head, in the input's dtype."""
    picked = jnp.take(problem.linear_weight, column, axis=problem.vocab_axis, mode="clip")
    return (picked if problem.vocab_axis == 0 else picked.T).astype(problem.input.dtype)


def dotted_logits(problem: Problem, x: Array, column: Array) -> Array:
    """Returns the logits (n,) of x (n, D) against the rows `column` (n,) of the head: those of a kernel's products, but
    for rounding. Good enough for an anchor."""
    logit, spec = (x.astype(jnp.float32) * target_rows(problem, column).astype(jnp.float32)).sum(1), problem.spec
    if problem.linear_bias is not None:
        logit += problem.linear_bias[column].astype(jnp.float32)
    logit *= spec.logit_scale
    return logit if spec.softcap is None else spec.softcap * jnp.tanh(logit / spec.softcap)


def known(problem: Problem, rows: int, classes: int) -> dict[str, Any]:
    """Returns what kernels of tiles of logits know when a call is traced."""
    return {
        "rows": rows,
        "classes": classes,
        "vocab_axis": problem.vocab_axis,
        "logit_scale": problem.spec.logit_scale,
        "softcap": problem.spec.softcap,
    }


def _is_class(problem: Problem, target: Array) -> Array:
    return (target >= 0) & (target < problem.classes)


def _column(problem: Problem, target: Array) -> Array:
    """Returns the targets, and some class for those that are none."""
    return target.clip(0, problem.classes - 1)


def _anchors(problem: Problem) -> Array:
    """Returns the integer anchors (N,) that the target logits give, 0 where they give none: (29)."""
    target = problem.target
    logit = dotted_logits(problem, problem.rows(Piece(0, problem.tokens, None)), _column(problem, target))
    usable = _is_class(problem, target) & jnp.isfinite(logit)
    return jnp.where(usable, jnp.floor(jnp.where(usable, logit, 0.0) * LOG2_E + 0.5), 0.0)


def _store_exponentials(
    problem: Problem,
    kernels: launch.Kernels,
    chunk: Piece,
    x: Array,
    start: Array | int,
    anchor: Array,
    *,
    stores: bool,
    statistics: bool,
) -> tuple[Array | None, Sums]:
    """Returns a chunk's exponentials e (n, padded(K)), if stored, and their sums; x holds its rows from `start` on.

    The chunk may go on past the last row: exponentials under an anchor of inf are zeros. An implementation that has the
    gradients' products too may add further rows of zeros to e.

    Row blocks whose sums leave the range are done again under anchors made of their largest logits. The host does not
    know which: the launches that see to it find nothing to do where none is. A block's other rows keep their anchors,
    sums and targets' summands.
    """
    bias = None if problem.linear_bias is None else problem.linear_bias.astype(jnp.float32)
    shared = {**known(problem, chunk.size, problem.classes), "stores": stores}

    def exponentials(anchor: Array, **options: Any) -> tuple[Array | None, ...]:
        return kernels.exponentials(x, problem.linear_weight, bias, anchor, start, **shared, **options)

    target = chunk.of(problem.target)
    is_class = _is_class(problem, target)
    known_target = jnp.where(is_class, target, -1)
    e, sums, top, target_exp, target_logit = exponentials(anchor, target=known_target, largest=statistics)
    assert sums is not None
    sums = lax.optimization_barrier(sums)  # XLA would sum up all rows again, 26 us, for each flag
    leaves = (chunk.of(problem.row_weight) != 0) & ~((sums > LEAST_SUM) & (sums < LARGEST_SUM))
    redo = _flags(leaves)
    e, _, largest, *_ = exponentials(anchor, largest=True, redo=redo, e=e)
    assert largest is not None
    repaired = jnp.where(jnp.isfinite(largest), jnp.floor(largest * LOG2_E), 0.0)
    anchor = jnp.where(leaves, repaired, anchor)
    e, new_sums, *_ = exponentials(anchor, largest=False, redo=redo, e=e)
    assert new_sums is not None
    assert target_exp is not None
    assert target_logit is not None
    total = jnp.where(leaves, new_sums, sums)
    # Of a row that leaves the range, whose target is far below the largest logit, computed here: its loss is large.
    target_exp = jnp.where(leaves, jnp.exp2(target_logit * LOG2_E - anchor), target_exp)
    target_logit = jnp.where(is_class, target_logit, jnp.nan)
    return e, Sums(total, anchor, jnp.full_like(total, jnp.inf) if top is None else top, target_exp, target_logit)


def _flags(leaves: Array) -> Array:
    """Returns (1 + row blocks,) int32: whether any row (n,) leaves the range, and for each block whether one does.

    A single reduction, where each flag looks at all rows: the first flag of the others would be a launch more.
    """
    blocks = jnp.arange(-(-len(leaves) // tile_config.ROW_BLOCK) + 1)[:, None] - 1
    looks_at = (blocks == -1) | (blocks == jnp.arange(len(leaves)) // tile_config.ROW_BLOCK)
    return (looks_at & leaves).astype(jnp.int32).max(1)


def _finish_rows(problem: Problem, chunk: Piece, sums: Sums) -> Factors:
    """Returns what a chunk's rows weigh: (6), (10), (27), (29), (31); rho and theta times the scale."""
    spec, target, row_weight = problem.spec, chunk.of(problem.target), chunk.of(problem.row_weight)
    total = jnp.where(sums.total == jnp.inf, jnp.nan, sums.total)  # an infinite logit: no probability is a number
    nll, lse = nll_and_lse(total, sums.target_exp, sums.target_logit, sums.anchor * LN_2, jnp.log(total))
    kept = jnp.where(_is_class(problem, target), row_weight, jnp.nan)  # no class: the whole row is NaN
    if problem.class_weight is not None:
        kept *= problem.class_weight[_column(problem, target)]
    loss = kept * nll + spec.z_loss_weight * row_weight * jnp.square(lse)
    z_loss = 2.0 * spec.z_loss_weight * row_weight * lse
    upstream = kept + z_loss
    theta = z_loss * jnp.exp(-nll) + kept * jnp.expm1(-nll)  # upstream * p - kept, of a confident token too
    if spec.softcap is not None:
        theta *= 1.0 - jnp.square(sums.target_logit / spec.softcap)
    values = loss, nll, lse, spec.logit_scale * upstream / total, spec.logit_scale * theta
    return Factors(*(jnp.where(row_weight != 0, value, 0.0) for value in values))


def _add_gradients(
    problem: Problem,
    kernels: launch.Kernels,
    config: ScaledExpConfig,
    chunk: Piece,
    e: Array,
    x: Array,
    start: Array | int,
    factors: Factors,
    carry: Carry,
    *,
    first: bool,
) -> Carry:
    """Adds a chunk to the gradients: (32), (33), but for the targets' terms of the head's."""
    held, d_weight, d_bias = carry
    target, rho = chunk.of(problem.target), factors.rho[: chunk.size, None]
    columns = jnp.where(_is_class(problem, target), target, e.shape[1])
    e = e.at[jnp.arange(chunk.size), columns].set(0, mode="drop", unique_indices=True)
    if d_bias is not None:
        d_bias = d_bias + (e[: chunk.size, : problem.classes].astype(jnp.float32) * rho).sum(0)
    if d_weight is not None:
        part = Piece(start, chunk.size, None)
        scaled = jnp.where(rho == 0, 0.0, part.of(x) * rho).astype(x.dtype)
        x = part.put(x, scaled)
        d_weight = _add_d_weight(problem, kernels, chunk, e, x, start, scaled, d_weight, first=first)
    if held is not None:
        x, d_weight = lax.optimization_barrier((x, d_weight))  # x's place is taken after it was read
        w_target = target_rows(problem, _column(problem, target))
        held = _store_d_input(problem, kernels, config, chunk, e, x, w_target, factors)
    return Carry(held, d_weight, d_bias)


def _add_d_weight(
    problem: Problem,
    kernels: launch.Kernels,
    chunk: Piece,
    e: Array,
    x: Array,
    start: Array | int,
    scaled: Array,
    d_weight: Array,
    *,
    first: bool,
) -> Array:
    """Adds e^T (rho x) to d_weight: (33) without the targets' terms."""
    axis = problem.vocab_axis
    if kernels.d_weight is not None and plan_of(problem).d_weight_kernel:
        vocab = problem.linear_weight.shape[axis]
        shared = {"vocab": vocab, "classes": problem.classes, "vocab_axis": axis, "rows": chunk.size}
        return kernels.d_weight(e, x, start, **shared, old=None if first else d_weight)
    pair = (e, scaled) if axis == 0 else (scaled, e)
    product = lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=d_weight.dtype)
    return product if first else d_weight + product


def _store_d_input(
    problem: Problem,
    kernels: launch.Kernels,
    config: ScaledExpConfig,
    chunk: Piece,
    e: Array,
    held: Array,
    w_target: Array,
    factors: Factors,
) -> Array:
    """Writes the rows of d_input of a chunk: (32)."""
    w, rho, theta = problem.linear_weight, factors.rho, factors.theta
    if kernels.d_input is not None and plan_of(problem).d_input_kernel:
        held = chunk.put(held, w_target)
        shared = {"classes": problem.classes, "vocab_axis": problem.vocab_axis, "most": config.product_bytes}
        return kernels.d_input(e, w, held, rho, theta, jnp.int32(chunk.start), **shared)
    product = rho[:, None] * product_of(e, w, (1, problem.vocab_axis)) + theta[:, None] * w_target.astype(jnp.float32)
    return chunk.put(held, jnp.where((rho != 0)[:, None] | (theta != 0)[:, None], product, 0.0))


def _add_targets(
    problem: Problem, kernels: launch.Kernels, theta: Array, d_weight: Array | None, d_bias: Array | None
) -> tuple[Array | None, Array | None]:
    """Adds theta * input to the targets' rows of d_weight, theta to d_bias: (33)."""
    counts = _is_class(problem, problem.target) & (problem.row_weight != 0)
    key = jnp.where(counts, problem.target, problem.classes).astype(jnp.int32)
    target, row = lax.sort((key, jnp.arange(problem.tokens, dtype=jnp.int32)), num_keys=2)
    theta = theta[row]
    if d_weight is not None:
        d_weight = kernels.add_target_rows(d_weight, problem.input, target, row, theta, vocab_axis=problem.vocab_axis)
    if d_bias is not None:
        d_bias = d_bias.at[_lasts(target, problem.classes)].add(
            _sums_of_runs(target, theta), mode="drop", unique_indices=True
        )
    return d_weight, d_bias


def _lasts(target: Array, classes: int) -> Array:
    """Returns sorted targets where a run of equals ends, places outside the classes elsewhere, all different."""
    ends = jnp.concatenate([target[1:] != target[:-1], jnp.ones(1, bool)]) & (target < classes)
    return jnp.where(ends, target, classes + jnp.arange(len(target)))


def _sums_of_runs(target: Array, values: Array) -> Array:
    """Returns, for each place, the sum of the values from the start of its run of equal targets, in a fixed order."""

    def joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (target_a, sum_a), (target_b, sum_b) = a, b
        return target_b, sum_b + jnp.where(target_a == target_b, sum_a, 0.0)

    return lax.associative_scan(joined, (target, values))[1]
