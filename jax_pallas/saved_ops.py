"""Losses of rows and log-probabilities that keep something for the backward pass: 3 matmuls in place of 4.

The upstream gradients of the rows are unknown in the forward pass, so `ops.row_losses` and `ops.log_probs` compute the
logits again in the backward pass. But an upstream gradient is a factor of its row: MATH.md (41), (42). So the forward
pass can compute the gradients for upstream gradients of 1 up to this factor, for as many rows as `saved_budget` holds:

    forward rule    loss and d_input of the first S rows; keeps their exponentials  2 matmuls  `_saved_losses`
                    loss of the other rows                                          1 matmul
    backward rule   d_input times the upstream gradients; d_weight of these S rows  1 matmul   `_saved_gradients`
                    d_input and d_weight of the other rows, from logits again       3 matmuls

The implementation determines the shapes of what is saved, so it is chosen where the call is traced
(`Options.saved_as`).

If a gradient of the entropy or of lse arrives, what was kept is not used. The backward pass is then that of
`ops.log_probs`.

Where devices divide the vocabulary, each keeps the exponentials of its own classes and the whole d_input, whose parts
are added in the forward pass. In the backward pass of the saved rows they exchange nothing. Devices with different
tokens add their gradients of the head in the backward pass. Tokens that devices gather are gathered at once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jax_pallas import chunked, ops
from jax_pallas.batching import operator_of_rows
from jax_pallas.gathering import own_part
from jax_pallas.launch import DeviceInfo, Lowering
from jax_pallas.options import Arrays, Options
from jax_pallas.plan import ExecutionPlan, Stage, why_unsaved
from jax_pallas.primitives import opaque
from jax_pallas.problem import (
    NO_GRADIENTS,
    NOTHING_COMPUTED,
    Gradients,
    NeedsGrad,
    Problem,
    SavedRows,
    layout_of,
    plan_of,
)
from jax_pallas.row_math import RowStatistics
from jax_pallas.scaling import summed_over_devices
from jax_pallas.slicing import is_symbolic
from linear_ce.chunking import SavedRowCount, choose_saved_rows, plan_passes


def saved_rows(options: Options, arrays: Arrays, needs_grad: NeedsGrad) -> SavedRowCount:
    """Returns which rows of a call are saved: the first ones."""
    problem = _unplanned(options, arrays)
    return _count(problem.input, problem.most_classes, needs_grad, options.saved_budget)


def _unplanned(options: Options, arrays: Arrays) -> Problem:
    """Returns the problem of a call without its plan."""
    return Problem(**options.named(arrays), **options.of_problem())


def _count(x: Array, classes: int, needs_grad: NeedsGrad, budget: int) -> SavedRowCount:
    tokens, hidden = x.shape
    if is_symbolic(tokens):
        raise ValueError(f"saved_budget must be 0 where the number of tokens is symbolic, got {budget}")
    return choose_saved_rows(
        tokens=tokens,
        hidden=hidden,
        classes=classes,
        itemsize=x.dtype.itemsize,
        d_input=needs_grad.d_input,
        d_head=needs_grad.d_weight or needs_grad.d_bias,
        budget=budget if any(needs_grad) else 0,
    )


def explained_plan(
    problem: Problem,
    memory_budget: int,
    saved_budget: int,
    implementation: str,
    needs_grad: NeedsGrad,
    device: DeviceInfo,
) -> ExecutionPlan:
    """Returns the plan of the rows that are saved, with that of the other rows, or that of the backward pass if no row
    is saved."""
    x = problem.input
    check_saves(problem, implementation)

    def plan_of_rows(count: int, stage: Stage, needs_grad: NeedsGrad) -> Callable[[], ExecutionPlan]:
        of_rows: Any = jax.ShapeDtypeStruct((count, x.shape[1]), x.dtype)
        options = memory_budget, implementation, needs_grad, device
        return partial(ops.plan_for, replace(problem, input=of_rows), stage, *options)

    saved = _count(x, problem.most_classes, needs_grad, saved_budget)
    rest, passes = saved.tokens - saved.rows, []
    if rest or not saved.tokens:
        passes += [plan_of_rows(rest, "row_gradients", needs_grad), plan_of_rows(rest, "losses", NO_GRADIENTS)]
    if saved.rows:
        passes.append(plan_of_rows(saved.rows, "saved_rows", needs_grad))
        if implementation == "chunked":
            passes.append(plan_of_rows(saved.rows, "gradients", needs_grad._replace(d_input=False)))
    plan = plan_passes(*passes)
    if 0 < saved.rows < saved.tokens:
        return replace(passes[2](), saved=saved, others=plan)
    return replace(plan, saved=saved)


def check_saves(problem: Problem, implementation: str) -> None:
    """Raises ValueError for a call with which kernels save no rows, however many rows there are."""
    x, w, smoothing = layout_of(problem.input), layout_of(problem.linear_weight), problem.spec.label_smoothing
    into = problem.grad_into is not None or problem.devices.sums_in_float32
    why = why_unsaved(implementation, x, w, problem.vocab_axis, problem.most_classes, smoothing, grad_into=into)
    if why is not None:
        raise ValueError(why)


def _checked_rows(options: Options, arrays: Arrays, needs_grad: NeedsGrad) -> int:
    """Returns how many rows are saved. Raises ValueError for a call with which kernels save no rows."""
    assert options.saved_as is not None
    check_saves(_unplanned(options, arrays), options.saved_as)
    return saved_rows(options, arrays, needs_grad).rows


def _check_passes(
    options: Options, arrays: Arrays, needs_grad: NeedsGrad, rows: int, *others: Callable[[], Any]
) -> None:
    """Refuses what one of the passes of a call that saves rows could not do. `others` make further plans."""
    named = options.named(arrays)

    def of_rows(count: int) -> Arrays:
        shapes = {
            name: jax.ShapeDtypeStruct((count, *named[name].shape[1:]), named[name].dtype)
            for name in ("input", "target", "row_weight")
        }
        return options.replaced(arrays, **shapes)

    first, rest = of_rows(rows), of_rows(len(named["target"]) - rows)
    passes: list[Callable[[], Any]] = [partial(_saved_problem, options, first, needs_grad, None)]
    if options.saved_as == "chunked":
        passes.append(partial(_head_problem, options, first, needs_grad, None))
    if rows < len(named["target"]):
        passes.append(partial(ops.planned_problem, "row_gradients", options, rest, needs_grad))
        passes.append(partial(ops.forward_problem, options, rest))
    plan_passes(*passes, *others)


@ops.rule_of_arrays
def _row_losses(options: Options, *arrays: Array) -> Arrays:
    return ops.row_losses_rule(options, *arrays)


def _row_losses_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad, arrays = options.needs_grad(primals), tuple(primal.value for primal in primals)
    rows = _checked_rows(options, arrays, needs_grad)
    if not rows or not (needs_grad.d_weight or needs_grad.d_bias):
        results, residuals = ops.row_losses_fwd(options, *primals)
        return results, (residuals, None)
    _check_passes(options, arrays, needs_grad, rows)
    loss, found, saved = _saved_losses((options, needs_grad), *arrays)
    results = loss, *ops.present_statistics(found, options.statistics)
    return results, (None, _residuals(arrays, found, saved, needs_grad))


def _row_losses_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    recomputed, kept = residuals
    if kept is None:
        return ops.row_losses_bwd(options, recomputed, cotangents)
    return _of_upstream(options, kept, ops.dense(cotangents[0]))


_row_losses.defvjp(_row_losses_fwd, _row_losses_bwd, symbolic_zeros=True)


@ops.rule_of_arrays
def _log_probs(options: Options, *arrays: Array) -> Arrays:
    return ops.log_probs_rule(options, *arrays)


def _log_probs_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad, arrays = options.needs_grad(primals), tuple(primal.value for primal in primals)
    rows = _checked_rows(options, arrays, needs_grad)
    if not rows:
        results, residuals = ops.log_probs_fwd(options, *primals)
        return results, (residuals, None)
    of_entropy = partial(ops.planned_problem, "gradients", options, arrays, needs_grad, entropy=True)
    # Kernels with a shard of the vocabulary differentiate log_prob only.
    others = () if options.devices.vocab_axes else (of_entropy,)
    _check_passes(options, arrays, needs_grad, rows, *others)
    loss, found, saved = _saved_losses((options, needs_grad), *arrays)
    assert found.entropy is not None
    return (0.0 - loss, found.entropy, found.lse), (None, _residuals(arrays, found, saved, needs_grad))


def _log_probs_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    recomputed, kept = residuals
    if kept is None:
        return ops.log_probs_bwd(options, recomputed, cotangents)
    d_log_prob, *others = cotangents
    if all(isinstance(one, SymbolicZero) for one in others):
        return _of_upstream(options, kept, -ops.dense(d_log_prob))
    arrays, entropy, lse, _, needs_grad = kept
    return ops.log_probs_bwd(options, (arrays, entropy, lse, needs_grad), cotangents)


_log_probs.defvjp(_log_probs_fwd, _log_probs_bwd, symbolic_zeros=True)


def _residuals(arrays: Arrays, found: RowStatistics, saved: SavedRows, needs_grad: NeedsGrad) -> Any:
    entropy = None if found.entropy is None else ops.as_residual(found.entropy)
    return arrays, entropy, ops.as_residual(found.lse), jax.tree.map(ops.as_residual, saved), needs_grad


def _of_upstream(options: Options, kept: Any, d_loss: Array) -> Any:
    """Returns the results of a backward rule for upstream gradients (N,) of the losses."""
    arrays, _, lse, saved, needs_grad = kept
    factor = jnp.where(options.row_weight(arrays) != 0, d_loss, 0.0)
    gradients = _saved_gradients((options, needs_grad), arrays, factor, lse, saved)
    return options.cotangents(summed_over_devices(options, gradients, None, arrays)[0])


@opaque("linear_ce_saved_losses")
def _saved_losses(
    static: tuple[Options, NeedsGrad], *arrays: Array, lowering: Lowering | None = None
) -> tuple[Array, RowStatistics, SavedRows]:
    """The forward pass: returns the weighted loss of each row (N,), the statistics, and what is kept of the first
    rows."""
    options, needs_grad = static
    rows = saved_rows(options, arrays, needs_grad).rows
    first, others = _of_rows(options, arrays, slice(0, rows)), _of_rows(options, arrays, slice(rows, None))
    problem = _saved_problem(options, first, needs_grad, lowering)
    plan = plan_of(problem)
    if plan.path == "scaled_exp":
        from jax_pallas.scaled_exp import save_rows

        loss, found, saved = save_rows(problem, needs_grad, statistics=options.statistics)
    else:
        loss, found, saved = chunked.save_rows(
            ops.tiles_of(plan), problem, plan.chunk_config, needs_grad, options.statistics
        )
    if rows < len(options.named(arrays)["target"]):
        other_loss, other = ops.losses_of_rows(options, *others)
        loss = jnp.concatenate([loss, other_loss])
        found = _joined(found, other)
    return loss, found._replace(nll=None, weighted_sum=None), saved


def _of_rows(options: Options, arrays: Arrays, rows: slice) -> Arrays:
    named = options.named(arrays)
    return options.replaced(arrays, **{name: named[name][rows] for name in ("input", "target", "row_weight")})


def _saved_problem(options: Options, arrays: Arrays, needs_grad: NeedsGrad, lowering: Lowering | None) -> Problem:
    options = _as_traced(options, arrays, lowering)
    return ops.make_problem("saved_rows", options, arrays, needs_grad, lowering, statistics=options.statistics)


def _head_problem(options: Options, arrays: Arrays, needs_grad: NeedsGrad, lowering: Lowering | None) -> Problem:
    """Returns the problem of "chunked" for the gradients of the head by saved rows."""
    options = _as_traced(options, arrays, lowering)
    return ops.make_problem("gradients", options, arrays, needs_grad._replace(d_input=False), lowering)


def _as_traced(options: Options, arrays: Arrays, lowering: Lowering | None) -> Options:
    """Returns the options with the implementation that was chosen where the call was traced. Raises ValueError if the
    platform that it is lowered for has another one."""
    lowered_as = options.saved_as if lowering is None else ops.implementation_of(options, arrays, lowering)
    if lowered_as != options.saved_as:
        raise ValueError(
            f"saved_budget must be 0 where a call is traced for {options.saved_as!r} and lowered for a "
            f"{lowering and lowering.platform} device, which runs {lowered_as!r}: each saves other arrays. Name the "
            "implementation, or lower the program for one kind of device, which is the default device or that of the "
            "mesh"
        )
    return replace(options, implementation=options.saved_as)


def _joined(first: RowStatistics, others: RowStatistics) -> RowStatistics:
    """Returns the statistics of the first rows and of the others that both have."""
    pairs = zip(first, others, strict=True)
    return RowStatistics(*(None if a is None or b is None else jnp.concatenate([a, b]) for a, b in pairs))  # pyright: ignore[reportArgumentType]


@opaque("linear_ce_saved_gradients")
def _saved_gradients(
    static: tuple[Options, NeedsGrad],
    arrays: Arrays,
    factor: Array,
    lse: Array,
    saved: SavedRows,
    lowering: Lowering | None = None,
) -> Gradients:
    """The backward pass: the gradients of the sum of the rows' losses, each multiplied by `factor` (N,), which is 0 in
    rows that do not contribute.

    The gradients of the head by the rows that were not saved come first. Those by the saved rows are added to them.
    """
    options, needs_grad = static
    rows, tokens, sends = saved_rows(options, arrays, needs_grad).rows, len(factor), options.devices.gather == "head"
    d_head, d_others = NOTHING_COMPUTED, None
    if rows < tokens:
        others = _of_rows(options, arrays, slice(rows, None))
        row_weight, of_others = options.row_weight(others), factor[rows:]
        upstream = jnp.where(of_others != 0, of_others * row_weight, 0.0)
        # The sum of all rows is sent if the head was gathered.
        unsent = replace(options, devices=options.devices._replace(gather=None)) if sends else options
        d_others, *rest = ops.gradients_of_rows((unsent, needs_grad), others, lse[rows:], upstream)
        d_head = Gradients(None, *rest)
    first, factor = _of_rows(options, arrays, slice(0, rows)), factor[:rows]
    problem = _saved_problem(options, first, needs_grad, lowering)
    if plan_of(problem).path == "scaled_exp":
        from jax_pallas.scaled_exp import saved_gradients

        input_factor = factor if saved.unit_scale is None else factor * saved.unit_scale
        d_head = saved_gradients(problem, saved, input_factor, needs_grad, d_head)
    else:
        assert saved.rho is not None
        input_factor = jnp.where(factor == 0, 0.0, factor * saved.rho)
        first = options.replaced(first, row_weight=input_factor)
        problem = _head_problem(options, first, needs_grad, lowering)
        d_head = chunked.saved_gradients(problem, plan_of(problem).chunk_config, saved, needs_grad, d_head)
    d_input = None
    if saved.unit_d_input is not None:
        scaled = saved.unit_d_input.astype(jnp.float32) * input_factor[:, None]
        # A row of NaN whose upstream gradient is 0 has a zero gradient, as where it is computed here.
        d_input = jnp.where(input_factor[:, None] == 0, 0.0, scaled).astype(saved.unit_d_input.dtype)
        d_input = d_input if d_others is None else jnp.concatenate([d_input, d_others])
    return d_head._replace(d_input=d_input, d_weight=own_part(options, problem, d_head.d_weight))


row_losses = operator_of_rows("linear_ce_saved_row_losses", _row_losses)
log_probs = operator_of_rows("linear_ce_saved_log_probs", _log_probs)
