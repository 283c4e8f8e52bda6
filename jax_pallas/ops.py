"""The differentiable operators behind the public functions: custom_vjp rules.

    `loss_and_gradients`        plan A: () loss of all rows; its forward rule computes the gradients, the backward rule
                                scales them (`scaling.py`)
    `row_losses`                plan B; differentiated, plan C: (N,) loss of each row; with a frozen head its forward
                                rule computes d_input instead, and the backward rule scales its rows
    `log_probs`                 plan C for log-probabilities

`token_ops.py` has those of token losses. `saved_ops.py` has other `row_losses` and `log_probs`, for calls with a
`saved_budget`. They run the rules of this file where no row is saved.

With grad_into plan A returns the sum after its other results, and the backward rules of plan C return it as the
gradient of grad_into.

If an operator is not differentiated, it runs plan B and computes no gradients. A rule computes only the gradients that
are needed: a custom_vjp with symbolic zeros receives which arguments are differentiated. `row_math.row_weights` folds
ignore_index, token weights, reductions and denominators into one vector before.

There are primitives outside and inside of each custom_vjp function (`primitives.py`). The outer one is for vmap:
`batching.py` has its rules. The inner one is around the loops over chunks. Without it, partial evaluation (in
`jax.checkpoint` for example) would hoist loop invariants, such as every vocabulary chunk of the head.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_pallas import chunked, launch, row_math, vocab_shard
from jax_pallas.batching import by_batch, operator_of_rows, unflattened
from jax_pallas.devices import Devices
from jax_pallas.gathering import (
    are_complete,
    of_all_rows,
    on_devices,
    own_gradients,
    own_rows,
    places_of_call,
    with_float32_sums,
)
from jax_pallas.launch import Lowering
from jax_pallas.options import Arrays, Options
from jax_pallas.plan import ExecutionPlan, PlanKey, Stage, make_plan
from jax_pallas.primitives import differentiable, opaque, vary_over, varying
from jax_pallas.problem import (
    NO_GRADIENTS,
    Gradients,
    NeedsGrad,
    Problem,
    is_one_chunk,
    layout_of,
    plan_of,
)
from jax_pallas.row_math import Coefficients
from jax_pallas.scaling import scaled, summed_over_devices
from jax_pallas.slicing import is_symbolic
from linear_ce.chunking import plan_passes
from linear_ce.statistics import ARGMAX, BY_ROW, D_ENTROPY, ENTROPY, LOGIT_SUM, SQUARES, planes

# The checkpoint_name of what a forward rule saves. A policy that saves it avoids running the forward pass again.
RESIDUAL = "linear_ce_residual"


def rule_of_arrays(function: Callable[..., Arrays]) -> Any:
    """Makes `function(options, *arrays)` a custom_vjp function of the arrays."""
    return jax.custom_vjp(function, nondiff_argnums=(0,))


@rule_of_arrays
def _loss_and_gradients(options: Options, *arrays: Array) -> Arrays:
    if options.has_grad_into:
        losses, statistics, gradients, _ = _plan_a((options, ONLY_D_WEIGHT), *arrays)
        return options.devices.sum(losses.sum()), *statistics, *totals_of(gradients)
    losses, *statistics = row_losses_rule(options, *arrays)
    return options.devices.sum(losses.sum()), *statistics


def _loss_and_gradients_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad, totals = options.needs_grad(primals), ()
    arrays = tuple(primal.value for primal in primals)
    losses, statistics, gradients, scales = _plan_a((options, needs_grad), *arrays)
    if options.has_grad_into:
        totals, gradients = totals_of(gradients), gradients._replace(d_weight=None)
    gradients, scales = summed_over_devices(options, gradients, scales, arrays)
    return (options.devices.sum(losses.sum()), *statistics, *totals), (jax.tree.map(as_residual, gradients), scales)


def _loss_and_gradients_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    gradients, scales = residuals
    d_loss = dense(cotangents[0])
    return options.cotangents(scaled(gradients, d_loss, scales))


ONLY_D_WEIGHT = NeedsGrad(False, True, False)


def totals_of(gradients: Gradients) -> Arrays:
    """Returns grad_into plus the gradient of the head, which a call with grad_into returns after its other results."""
    assert gradients.d_weight is not None
    return (gradients.d_weight,)


_loss_and_gradients.defvjp(_loss_and_gradients_fwd, _loss_and_gradients_bwd, symbolic_zeros=True)


@jax.custom_vjp
def no_rows(grad_into: Array | None) -> Array:
    """Returns the (0,) results of a call without tokens. The gradient of `grad_into` is `grad_into`."""
    return jnp.zeros(0, jnp.float32)


no_rows.defvjp(lambda grad_into: (no_rows(grad_into), grad_into), lambda grad_into, _: (grad_into,))


def as_results(
    devices: Devices, arrays: Sequence[Array], results: Any, total: Array | None = None
) -> tuple[Any, Array | None]:
    """Makes the results of a call without tokens vary over the axes of the mesh over which those of a call with tokens
    do, so that the same program differentiates both.

    Args:
        devices: of the call.
        arrays: all arrays of the call.
        results: a pytree of arrays that are (), or have an axis of tokens.
        total: the sum that the call returns with grad_into, or None.
    """
    every = frozenset[Any]().union(*map(varying, arrays))
    of_tokens = every - devices.shared_vocab_axes

    def made(result: Array) -> Array:
        return vary_over(result, of_tokens if result.ndim else of_tokens - frozenset(devices.token_axes))

    return jax.tree.map(made, results), None if total is None else vary_over(total, every)


@rule_of_arrays
def row_losses_rule(options: Options, *arrays: Array) -> Arrays:
    loss, found = losses_of_rows(options, *arrays)
    return loss, *present_statistics(found, options.statistics)


def present_statistics(found: row_math.RowStatistics, statistics: int) -> Arrays:
    """Returns lse, target_logit and max, and the others of the statistics in the order of their bits, as results of an
    operator."""
    others = (ARGMAX, found.argmax), (ENTROPY, found.entropy), (LOGIT_SUM, found.mean_logit)
    others += ((SQUARES, found.sum_squared_probs),)
    present = (array for bit, array in others if statistics & bit and array is not None)
    return found.lse, found.target_logit, found.max, *present


def row_statistics_of(results: Sequence[Any], statistics: int) -> row_math.RowStatistics:
    """Returns the statistics that `present_statistics` made."""
    lse, target_logit, top, *rest = results
    argmax, entropy, mean_logit, squares = (
        rest.pop(0) if statistics & bit else None for bit in (ARGMAX, ENTROPY, LOGIT_SUM, SQUARES)
    )
    return row_math.RowStatistics(lse, target_logit, None, top, None, entropy, argmax, mean_logit, squares)


def row_losses_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad, arrays = options.needs_grad(primals), tuple(primal.value for primal in primals)
    d_entropy = options.statistics & D_ENTROPY != 0
    # Then a row's d_input is its d_loss times what 1 gives.
    if not (needs_grad.d_weight or needs_grad.d_bias or d_entropy):
        losses, statistics, gradients, scales = _plan_a((options, needs_grad), *arrays)
        return (losses, *statistics), (
            None,
            (jax.tree.map(as_residual, gradients), scales, options.row_weight(arrays)),
        )
    # Refuses what one of the passes could not do.
    plan_passes(
        partial(planned_problem, "row_gradients", options, arrays, needs_grad, entropy=d_entropy),
        partial(forward_problem, options, arrays),
    )
    loss, *found = row_losses_rule(options, *arrays)
    of_rows = row_statistics_of(found, options.statistics)
    entropy = as_residual(of_rows.entropy) if d_entropy and of_rows.entropy is not None else None
    return (loss, *found), ((arrays, as_residual(of_rows.lse), entropy, needs_grad), None)


def row_losses_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    recomputed, made = residuals
    d_loss = dense(cotangents[0])
    if made is not None:
        gradients, scales, row_weight = made
        d_row = own_rows(options.devices, jnp.where(row_weight != 0, d_loss, 0.0))[:, None]
        gradients = scaled(gradients, d_row, scales)
        assert gradients.d_input is not None
        # A row of NaN whose upstream gradient is 0 has a zero gradient, as where it is computed here.
        d_input = jnp.where(d_row == 0, 0.0, gradients.d_input).astype(gradients.d_input.dtype)
        return options.cotangents(gradients._replace(d_input=d_input))
    arrays, lse, entropy, needs_grad = recomputed
    row_weight = options.row_weight(arrays)
    upstream = jnp.where(row_weight != 0, d_loss * row_weight, 0.0)
    d_entropy = row_statistics_of(cotangents[1:], options.statistics).entropy
    if entropy is None or d_entropy is None or isinstance(d_entropy, SymbolicZero):
        gradients = gradients_of_rows((options, needs_grad), arrays, lse, upstream)
    else:
        of_rows = -upstream, d_entropy, jnp.zeros_like(lse)  # the loss is -log_prob
        gradients = _log_prob_gradients((options, needs_grad), arrays, entropy, lse, of_rows)
    return options.cotangents(summed_over_devices(options, gradients, None, arrays)[0])


row_losses_rule.defvjp(row_losses_fwd, row_losses_bwd, symbolic_zeros=True)


@rule_of_arrays
def log_probs_rule(options: Options, *arrays: Array) -> Arrays:
    nll, found = losses_of_rows(options, *arrays)
    assert found.entropy is not None
    return 0.0 - nll, found.entropy, found.lse


def log_probs_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad, arrays = options.needs_grad(primals), tuple(primal.value for primal in primals)
    # Refuses what one of the passes could not do. With batch_invariant, or by kernels with a shard of the vocabulary,
    # it differentiates log_prob only.
    backward = partial(planned_problem, "gradients", options, arrays, needs_grad, entropy=True)
    if options.batch_invariant or options.devices.vocab_axes:
        backward = partial(planned_problem, "row_gradients", options, arrays, needs_grad)
    plan_passes(backward, partial(forward_problem, options, arrays))
    log_prob, entropy, lse = log_probs_rule(options, *arrays)
    return (log_prob, entropy, lse), (arrays, as_residual(entropy), as_residual(lse), needs_grad)


def log_probs_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    arrays, entropy, lse, needs_grad = residuals
    d_log_prob, *others = cotangents
    if all(isinstance(one, SymbolicZero) for one in others):
        row_weight = options.row_weight(arrays)
        upstream = jnp.where(row_weight != 0, -dense(d_log_prob), 0.0)  # of the negative log-likelihood
        gradients = gradients_of_rows((options, needs_grad), arrays, lse, upstream)
    else:
        of_rows = tuple(map(dense, cotangents))
        gradients = _log_prob_gradients((options, needs_grad), arrays, entropy, lse, of_rows)
    return options.cotangents(summed_over_devices(options, gradients, None, arrays)[0])


def _log_prob_gradients(
    static: tuple[Options, NeedsGrad], arrays: Arrays, entropy: Array, lse: Array, cotangents: Arrays
) -> Gradients:
    """Plan C's backward pass for the cotangents of log_prob, entropy and lse, (N,) each."""
    options, needs_grad = static
    used = jnp.stack([one != 0 for one in cotangents]).any(0)
    row_weight = jnp.where(used, options.row_weight(arrays), 0.0)
    arrays = options.replaced(arrays, row_weight=row_weight)
    problem = planned_problem("gradients", options, arrays, needs_grad, entropy=True)
    coefficients = row_math.log_prob_coefficients(
        entropy, problem.target, *cotangents, problem.row_weight, classes=options.classes
    )
    return _gradients((options, needs_grad), arrays, lse, coefficients)


log_probs_rule.defvjp(log_probs_fwd, log_probs_bwd, symbolic_zeros=True)


@opaque("linear_ce_losses")
def losses_of_rows(
    options: Options, *arrays: Array, lowering: Lowering | None = None
) -> tuple[Array, row_math.RowStatistics]:
    return plan_b(options, arrays, lowering)


def plan_b(options: Options, arrays: Arrays, lowering: Lowering | None) -> tuple[Array, row_math.RowStatistics]:
    """Returns the (N,) losses and the statistics of the rows."""
    problem = forward_problem(options, arrays, lowering)
    plan = plan_of(problem)
    if plan.path == "scaled_exp":
        from jax_pallas.scaled_exp import scaled_exp

        loss, found, _ = scaled_exp(problem, NO_GRADIENTS, statistics=options.statistics)
        return loss, found
    return chunked.losses(tiles_of(plan), of_all_rows(problem), plan.chunk_config, options.statistics)


@opaque("linear_ce_plan_a")
def _plan_a(
    static: tuple[Options, NeedsGrad], *arrays: Array, lowering: Lowering | None = None
) -> tuple[Array, Arrays, Gradients, Any]:
    """Returns (N,) losses, their statistics, the gradients of their sum, and the powers of two that these carry."""
    options, needs_grad = static
    statistics = options.statistics
    problem = make_problem("loss_and_gradients", options, arrays, needs_grad, lowering, statistics=statistics)
    plan = plan_of(problem)
    scales = row_math.saved_scales(problem.row_weight) if problem.input.dtype == jnp.float16 else None
    if plan.path == "scaled_exp":
        from jax_pallas.scaled_exp import scaled_exp

        losses, found, gradients = scaled_exp(problem, needs_grad, statistics=statistics, scales=scales)
    else:
        losses, found, gradients = chunked.loss_and_gradients(
            tiles_of(plan), problem, plan.chunk_config, needs_grad, scales, statistics
        )
    gradients = own_gradients(options, arrays, problem, gradients, scales)
    return losses, present_statistics(found, options.statistics), gradients, scales


@opaque("linear_ce_row_gradients")
def gradients_of_rows(
    static: tuple[Options, NeedsGrad], arrays: Arrays, lse: Array, upstream: Array, lowering: Lowering | None = None
) -> Gradients:
    """Plan C's backward pass for losses of rows: the gradients of their sum, each multiplied by `upstream`.

    Where plan A with scaled exponentials can run, it runs again, with `upstream` as the row weights: it computes the
    logits once and stores exponentials in place of d_logits.
    """
    options, needs_grad = static
    arrays = options.replaced(arrays, row_weight=upstream)
    problem = make_problem("row_gradients", options, arrays, needs_grad, lowering)
    plan = plan_of(problem)
    if plan.path == "scaled_exp":
        from jax_pallas.scaled_exp import scaled_exp

        gradients = scaled_exp(problem, needs_grad, statistics=BY_ROW if options.batch_invariant else 0)[2]
    else:
        coefficients = row_math.loss_coefficients(
            options.spec, lse, problem.target, upstream, upstream, problem.class_weight, options.classes
        )
        gradients = chunked.gradients(tiles_of(plan), problem, plan.chunk_config, lse, coefficients, needs_grad)
    return own_gradients(options, arrays, problem, gradients)


@opaque("linear_ce_gradients")
def _gradients(
    static: tuple[Options, NeedsGrad],
    arrays: Arrays,
    lse: Array,
    coefficients: Coefficients,
    lowering: Lowering | None = None,
) -> Gradients:
    """Plan C's backward pass for any coefficients."""
    options, needs_grad = static
    entropy = coefficients.beta is not None
    problem = make_problem("gradients", options, arrays, needs_grad, lowering, entropy=entropy)
    plan = plan_of(problem)
    gradients = chunked.gradients(tiles_of(plan), problem, plan.chunk_config, lse, coefficients, needs_grad)
    return own_gradients(options, arrays, problem, gradients)


def forward_problem(options: Options, arrays: Sequence[Array], lowering: Lowering | None = None) -> Problem:
    """Returns the problem of plan B, with this device's rows of the input. Where the backward pass adds to grad_into,
    plan B is that of a call without it."""
    if options.adds_in_backward:
        arrays = options.replaced(arrays, grad_into=None)
    stage: Stage = "statistics" if options.statistics & BY_ROW else "losses"
    return planned_problem(stage, options, arrays, NO_GRADIENTS, lowering, statistics=options.statistics)


def implementation_of(options: Options, arrays: Sequence[Array], lowering: Lowering | None) -> str:
    """Returns the implementation that a call runs that is lowered, or traced where `lowering` is None."""
    named, axis = options.named(arrays), options.vocab_axis
    x, w = named["input"], named["linear_weight"]
    platform = None if lowering is None else lowering.platform
    return launch.resolve(options.implementation, platform, x.dtype, x.shape[1], w.shape[axis], axis)


def make_problem(*arguments: Any, **options: Any) -> Problem:
    """Returns the problem of `planned_problem`, with the arguments of that function. If devices divide the tokens, it
    has the rows of the input of all devices, unless the plan gathers them chunk by chunk. Only the function of a
    primitive may gather rows: outside of it, vmap has no rule for the collective operation."""
    problem = planned_problem(*arguments, **options)
    return problem if plan_of(problem).path == "scaled_exp" else of_all_rows(problem)


def planned_problem(
    stage: Stage,
    options: Options,
    arrays: Sequence[Array],
    needs_grad: NeedsGrad,
    lowering: Lowering | None = None,
    *,
    statistics: int = 0,
    entropy: bool = False,
) -> Problem:
    """Returns the problem, with its plan, of a call that is lowered, or traced where `lowering` is None.

    Raises:
        ValueError: the call is lowered for several devices, to which XLA cannot distribute it.
    """
    problem = Problem(**options.named(arrays), **options.of_problem())
    offset = vocab_shard.first_class(options.devices, problem.linear_weight.shape[options.vocab_axis])
    problem = replace(problem, vocab_offset=offset)
    implementation = implementation_of(options, arrays, lowering)
    device = launch.device_info(implementation, launch.traced_platform() if lowering is None else lowering.platform)

    def planned(problem: Problem) -> Problem:
        plan = plan_for(
            problem,
            stage,
            options.memory_budget,
            implementation,
            needs_grad,
            device,
            statistics=statistics,
            entropy=entropy,
            # Where no implementation is named, it is known only when the call is lowered.
            batch_invariant=options.batch_invariant and (options.implementation, lowering) != (None, None),
        )
        plan.check_named(options.implementation)
        return replace(problem, plan=plan)

    complete = are_complete(options.devices, problem.input)
    if complete:
        problem = planned(problem)
    if not complete or plan_of(problem).path != "scaled_exp":
        problem = planned(with_float32_sums(problem, needs_grad))
    if lowering is not None and not (options.devices.replicated or is_one_chunk(problem)):
        launch.check_devices(plan_of(problem).implementation, lowering.devices)
    return problem


def plan_for(
    problem: Problem,
    stage: Stage,
    memory_budget: int,
    implementation: str,
    needs_grad: NeedsGrad,
    device: launch.DeviceInfo,
    *,
    statistics: int = 0,
    entropy: bool = False,
    batch_invariant: bool = False,
) -> ExecutionPlan:
    """Returns the plan of a problem: `plan.make_plan` of the properties of its arrays."""
    x = layout_of(problem.input)
    parts = problem.devices.token_parts
    key = PlanKey(
        stage=stage,
        input=x._replace(shape=(parts * x.shape[0], x.shape[1])),
        linear_weight=layout_of(problem.linear_weight),
        vocab_axis=problem.vocab_axis,
        classes=problem.local_classes,
        label_smoothing=problem.spec.label_smoothing,
        softcap=problem.spec.softcap is not None,
        entropy=entropy or statistics & ENTROPY != 0,
        d_input=needs_grad.d_input,
        d_weight=needs_grad.d_weight,
        d_bias=needs_grad.d_bias,
        statistics=planes(statistics),
        memory_budget=memory_budget,
        implementation=implementation,
        device=device,
        grad_into=problem.grad_into is not None,
        splits_head=problem.spec.splits_head,
        batch_invariant=batch_invariant,
        shards=problem.devices.shards if problem.devices.vocab_axes else 0,
        pads_shards=problem.masks_classes,
        token_parts=parts,
        float32_kernel=jax.config.jax_default_matmul_precision is None and not is_symbolic(problem.input.shape[0]),
    )
    return make_plan(key)


def tiles_of(plan: ExecutionPlan) -> chunked.Tiles:
    """Returns the functions that compute the tiles of a plan of `chunked`. Pallas is imported only for its kernels."""
    if plan.path == "chunked":
        return chunked.XLA_TILES
    if plan.path == "stored_logits":
        from jax_pallas.stored_logits import STORED_TILES

        return STORED_TILES
    from jax_pallas.recompute import KERNEL_TILES

    return KERNEL_TILES


def as_residual(array: Array) -> Array:
    return checkpoint_name(array, RESIDUAL)


def dense(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, jnp.float32) if isinstance(cotangent, SymbolicZero) else cotangent


def _loss_of_batch(options: Options, arrays: Arrays, batch: int) -> Arrays:
    losses, *statistics = unflattened(row_losses(options, *arrays), batch)
    return losses.sum(1), *statistics


loss_and_gradients = on_devices(
    differentiable("linear_ce_loss_and_gradients", _loss_and_gradients, by_batch(_loss_of_batch)),
    _loss_and_gradients,
    places_of_call,
)
row_losses = operator_of_rows("linear_ce_row_losses", row_losses_rule)
log_probs = operator_of_rows("linear_ce_log_probs", log_probs_rule)
