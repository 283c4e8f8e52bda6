"""The differentiable operators behind the public functions: custom_vjp rules, and batching rules for vmap.

    `loss_and_gradients`        plan A: () loss of all rows; its forward rule computes the gradients, the backward rule
                                scales them
    `row_losses`                plan B; differentiated, plan C: (N,) loss of each row; with a frozen head its forward
                                rule computes d_input instead, and the backward rule scales its rows
    `log_probs`                 plan C for log-probabilities
    `token_loss_and_gradients`  `loss_and_gradients` with a token loss in place of the negative log-likelihood
    `token_losses`              `row_losses`, and then `token_rows`: (N,) token loss of each row

`saved_ops.py` has other `row_losses` and `log_probs`, for calls with a `saved_budget`. They run the rules of this file
where no row is saved.

With grad_into plan A returns the sum after its other results, and the backward rules of plan C return it as the
gradient of grad_into.

If an operator is not differentiated, it runs plan B and computes no gradients. A rule computes only the gradients that
are needed: a custom_vjp with symbolic zeros receives which arguments are differentiated. `row_math.row_weights` folds
ignore_index, token weights, reductions and denominators into one vector before.

There are primitives outside and inside of each custom_vjp function (`primitives.py`). The outer one is for vmap:
batching a custom_vjp would keep one d_weight for each batch element until they are summed. Its batching rule flattens
the batch into rows, and plan C takes a cotangent for each row. The inner one is around the loops over chunks. Without
it, partial evaluation (in `jax.checkpoint` for example) would hoist loop invariants, such as every vocabulary chunk of
the head.
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
from jax_pallas.gathering import are_complete, of_all_rows, on_devices, own_gradients, own_rows, with_float32_sums
from jax_pallas.launch import Lowering
from jax_pallas.options import Arrays, Options, TokenOptions
from jax_pallas.plan import ExecutionPlan, PlanKey, Stage, make_plan
from jax_pallas.primitives import Batched, differentiable, opaque
from jax_pallas.problem import (
    NO_GRADIENTS,
    NOTHING_COMPUTED,
    Gradients,
    NeedsGrad,
    Problem,
    is_one_chunk,
    layout_of,
    plan_of,
)
from jax_pallas.row_math import Coefficients
from jax_pallas.slicing import Slice
from jax_pallas.token_hook import (
    TokenFunction,
    TokenHook,
    TokenNeedsGrad,
    TokenRows,
    row_token_gradients,
    row_token_losses,
)
from linear_ce.chunking import plan_passes
from linear_ce.statistics import ARGMAX, BY_ROW, D_ENTROPY, ENTROPY, LOGIT_SUM, MAX, SQUARES, planes

# The checkpoint_name of what a forward rule saves. A policy that saves it avoids running the forward pass again.
RESIDUAL = "linear_ce_residual"

# The gradient of an array that a token loss closes over takes at most this many float32 numbers for each token of a
# chunk. That is less than a token's hidden states.
MOST_OF_CLOSURE = 64


def rule_of_arrays(function: Callable[..., Arrays]) -> Any:
    """Makes `function(options, *arrays)` a custom_vjp function of the arrays."""
    return jax.custom_vjp(function, nondiff_argnums=(0,))


@rule_of_arrays
def _loss_and_gradients(options: Options, *arrays: Array) -> Arrays:
    if options.has_grad_into:
        losses, statistics, gradients, _ = _plan_a((options, _ONLY_D_WEIGHT), *arrays)
        return options.devices.sum(losses.sum()), *statistics, *_totals(gradients)
    losses, *statistics = row_losses_rule(options, *arrays)
    return options.devices.sum(losses.sum()), *statistics


def _loss_and_gradients_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad, totals = options.needs_grad(primals), ()
    arrays = tuple(primal.value for primal in primals)
    losses, statistics, gradients, scales = _plan_a((options, needs_grad), *arrays)
    if options.has_grad_into:
        totals, gradients = _totals(gradients), gradients._replace(d_weight=None)
    gradients, scales = summed_over_devices(options, gradients, scales, arrays)
    return (options.devices.sum(losses.sum()), *statistics, *totals), (jax.tree.map(as_residual, gradients), scales)


def _loss_and_gradients_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    gradients, scales = residuals
    d_loss = dense(cotangents[0])
    return options.cotangents(_scaled(gradients, d_loss, scales))


_ONLY_D_WEIGHT = NeedsGrad(False, True, False)


def _totals(gradients: Gradients) -> Arrays:
    """Returns grad_into plus the gradient of the head, which a call with grad_into returns after its other results."""
    assert gradients.d_weight is not None
    return (gradients.d_weight,)


_loss_and_gradients.defvjp(_loss_and_gradients_fwd, _loss_and_gradients_bwd, symbolic_zeros=True)


@jax.custom_vjp
def no_rows(grad_into: Array | None) -> Array:
    """Returns the (0,) results of a call without tokens. The gradient of `grad_into` is `grad_into`."""
    return jnp.zeros(0, jnp.float32)


no_rows.defvjp(lambda grad_into: (no_rows(grad_into), grad_into), lambda grad_into, _: (grad_into,))


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


def _row_statistics_of(results: Sequence[Any], statistics: int) -> row_math.RowStatistics:
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
        partial(make_problem, "row_gradients", options, arrays, needs_grad, entropy=d_entropy),
        partial(forward_problem, options, arrays),
    )
    loss, *found = row_losses_rule(options, *arrays)
    of_rows = _row_statistics_of(found, options.statistics)
    entropy = as_residual(of_rows.entropy) if d_entropy and of_rows.entropy is not None else None
    return (loss, *found), ((arrays, as_residual(of_rows.lse), entropy, needs_grad), None)


def row_losses_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    recomputed, made = residuals
    d_loss = dense(cotangents[0])
    if made is not None:
        gradients, scales, row_weight = made
        d_row = own_rows(options.devices, jnp.where(row_weight != 0, d_loss, 0.0))[:, None]
        scaled = _scaled(gradients, d_row, scales)
        assert scaled.d_input is not None
        # A row of NaN whose upstream gradient is 0 has a zero gradient, as where it is computed here.
        d_input = jnp.where(d_row == 0, 0.0, scaled.d_input).astype(scaled.d_input.dtype)
        return options.cotangents(scaled._replace(d_input=d_input))
    arrays, lse, entropy, needs_grad = recomputed
    row_weight = options.row_weight(arrays)
    upstream = jnp.where(row_weight != 0, d_loss * row_weight, 0.0)
    d_entropy = _row_statistics_of(cotangents[1:], options.statistics).entropy
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
    backward = partial(make_problem, "gradients", options, arrays, needs_grad, entropy=True)
    if options.batch_invariant or options.devices.vocab_axes:
        backward = partial(make_problem, "row_gradients", options, arrays, needs_grad)
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
    problem = make_problem("gradients", options, arrays, needs_grad, entropy=True)
    coefficients = row_math.log_prob_coefficients(
        entropy, problem.target, *cotangents, problem.row_weight, classes=options.classes
    )
    return _gradients((options, needs_grad), arrays, lse, coefficients)


log_probs_rule.defvjp(log_probs_fwd, log_probs_bwd, symbolic_zeros=True)


@rule_of_arrays
def _token_loss(token: TokenOptions, *arrays: Array) -> Arrays:
    of_call, per_token, closure = token.split(arrays)
    if token.options.has_grad_into:
        nothing = TokenNeedsGrad((False,) * len(per_token), (False,) * len(closure))
        rows, stats, gradients, _ = _token_plan_a((token, _ONLY_D_WEIGHT, nothing), *arrays)
        return token.devices.sum(rows.loss.sum()), *stats, *_totals(gradients)
    nll, found = losses_of_rows(token.options, *_unweighted(token.options, of_call))
    row_weight = token.options.row_weight(of_call)
    values = token.values(per_token, found.entropy)
    loss = _token_values(token.function, 0.0 - nll, row_weight, values, closure).sum()
    return token.devices.sum(loss), *_stats(token, 0.0 - nll, row_weight, found)


def _stats(token: TokenOptions, log_prob: Array, row_weight: Array, found: row_math.RowStatistics | None) -> Arrays:
    """Returns the fields of `TokenStats` that a call asked for, in their order."""
    if found is None:
        return ()
    top1 = row_math.is_top1(row_weight, found.target_logit, found.max) if token.options.statistics & MAX else None
    made = log_prob, found.entropy, found.lse, found.argmax, top1, found.mean_logit, found.sum_squared_probs
    return tuple(one for one, wanted in zip(made, token.stats, strict=True) if wanted and one is not None)


def _token_loss_fwd(token: TokenOptions, *primals: Any) -> tuple[Arrays, Any]:
    options, arrays = token.options, tuple(primal.value for primal in primals)
    of_call, per_token, closure = token.split(primals)
    needs_grad, token_needs_grad = options.needs_grad(of_call), _token_needs_grad(per_token, closure)
    totals = ()
    if any(needs_grad):
        rows, stats, gradients, scales = _token_plan_a((token, needs_grad, token_needs_grad), *arrays)
        if options.has_grad_into:
            totals, gradients = _totals(gradients), gradients._replace(d_weight=None)
        gradients, scales = summed_over_devices(options, gradients, scales, token.split(arrays)[0])
    else:
        of_call, per_token, closure = token.split(arrays)
        nll, found = losses_of_rows(options, *_unweighted(options, of_call))
        row_weight = options.row_weight(of_call)
        needs = token_needs_grad.per_token
        static = (token.function, token_needs_grad._replace(per_token=(False,) * token.with_entropy + needs))
        values = token.values(per_token, found.entropy)
        rows = _token_derivatives(static, 0.0 - nll, row_weight, values, closure)
        rows = rows._replace(d_per_token=rows.d_per_token[token.with_entropy :])
        stats = _stats(token, 0.0 - nll, row_weight, found)
        gradients, scales = NOTHING_COMPUTED, None
    of_tokens = (*rows.d_per_token, *_summed_closure(token, rows.d_closure, token.split(arrays)[2]))
    # The gradient of an array is rounded to its dtype after it is scaled. An empty array holds the dtype.
    like = zip(of_tokens, arrays[len(of_call) :], strict=True)
    dtypes = tuple(None if gradient is None else jnp.zeros(0, array.dtype) for gradient, array in like)
    return (token.devices.sum(rows.loss.sum()), *stats, *totals), (
        jax.tree.map(as_residual, (gradients, of_tokens)),
        scales,
        dtypes,
    )


def _token_loss_bwd(token: TokenOptions, residuals: Any, cotangents: Any) -> Any:
    (gradients, of_tokens), scales, dtypes = residuals
    d_loss = dense(cotangents[0])
    scaled = (
        None if gradient is None else (gradient * d_loss).astype(like.dtype)
        for gradient, like in zip(of_tokens, dtypes, strict=True)
    )
    return (*token.options.cotangents(_scaled(gradients, d_loss, scales)), *scaled)


_token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)


@rule_of_arrays
def _token_rows(token: TokenOptions, log_prob: Array, row_weight: Array, *arrays: Array) -> Arrays:
    per_token, closure = arrays[: token.per_token], arrays[token.per_token :]
    return (_token_values(token.function, log_prob, row_weight, per_token, closure),)


def _token_rows_fwd(token: TokenOptions, *primals: Any) -> tuple[Arrays, Any]:
    of_tokens = primals[2:]
    needs_grad = _token_needs_grad(of_tokens[: token.per_token], of_tokens[token.per_token :])
    arrays = tuple(primal.value for primal in primals)
    return _token_rows(token, *arrays), (arrays, needs_grad)


def _token_rows_bwd(token: TokenOptions, residuals: Any, cotangents: Any) -> Any:
    (log_prob, row_weight, *arrays), needs_grad = residuals
    upstream = jnp.where(row_weight != 0, row_weight * dense(cotangents[0]), 0.0)
    per_token, closure = tuple(arrays[: token.per_token]), tuple(arrays[token.per_token :])
    rows = _token_derivatives((token.function, needs_grad), log_prob, upstream, per_token, closure)
    found = (*rows.d_per_token, *_summed_closure(token, rows.d_closure, closure))
    typed = (None if d is None else d.astype(array.dtype) for d, array in zip(found, arrays, strict=True))
    return (0.0 - rows.gradient_weight, None, *typed)


_token_rows.defvjp(_token_rows_fwd, _token_rows_bwd, symbolic_zeros=True)


def _token_needs_grad(per_token: Sequence[Any], closure: Sequence[Any]) -> TokenNeedsGrad:
    """Returns which arrays of a token loss are differentiated, from the primals of a forward rule."""
    for primal in closure:  # `elementwise` leaves single numbers, but for arrays that are arguments of such functions
        if primal.perturbed and primal.value.size > MOST_OF_CLOSURE:
            raise ValueError(
                f"token_loss must not differentiate an array of shape {primal.value.shape} in jax.checkpoint, in a "
                "branch or in a function with a custom_jvp or custom_vjp rule: its gradient would be computed for each "
                "token. Compute the number that the loss needs outside, for example b[3] or b.mean(), and close over it"
            )
    return TokenNeedsGrad(*(tuple(primal.perturbed for primal in primals) for primals in (per_token, closure)))


def _unweighted(options: Options, arrays: Sequence[Array]) -> Any:
    """Returns the arrays of a call with row weights 1 in the rows that contribute: losses are then negative
    log-likelihoods."""
    return options.replaced(arrays, row_weight=(options.row_weight(arrays) != 0).astype(jnp.float32))


def token_losses(token: TokenOptions, *arrays: Array) -> Arrays:
    """Returns the (N,) weighted losses of a token loss, for any upstream gradient: plan C, or B without gradients; and
    the fields of `TokenStats` that the call asked for."""
    of_call, per_token, closure = token.split(arrays)
    nll, *rest = row_losses(token.options, *_unweighted(token.options, of_call))
    row_weight, found = token.options.row_weight(of_call), _row_statistics_of(rest, token.options.statistics)
    values = token.values(per_token, found.entropy)
    of_rows = replace(token, per_token=len(values))
    loss = token_rows(of_rows, 0.0 - nll, row_weight, *values, *closure)[0]
    return loss, *_stats(token, jax.lax.stop_gradient(0.0 - nll), row_weight, found)


def summed_over_devices(options: Options, gradients: Gradients, scales: Any, arrays: Arrays) -> tuple[Gradients, Any]:
    """Returns gradients whose parts of linear_weight and linear_bias are sums over the devices that have different
    tokens, rounded to their dtypes afterwards, and the powers of two that all gradients carry.

    The gradients of each device are those of `make_problem`: float32, and that of linear_weight carries no power. If
    the head was gathered, that of linear_weight is a sum over the devices that gathered it, with the rows of this one.
    """
    devices, named = options.devices, options.named(arrays)
    if not devices.sums_in_float32 or are_complete(devices, named["input"]):
        return gradients, scales
    head_scale = None
    if scales is not None:
        head_scale = row_math.saved_scales(named["row_weight"], devices)[1]

    def summed(gradient: Array | None, name: str, scale: Array | None) -> Array | None:
        if gradient is None or (name == "linear_weight" and options.has_grad_into):
            return gradient
        sums = devices.sum_of_shared if name == "linear_weight" else devices.sum_of_bias
        total = sums(gradient if scale is None else gradient / scale, named[name])
        return (total if head_scale is None else total * head_scale).astype(named[name].dtype)

    d_weight = summed(gradients.d_weight, "linear_weight", None)
    d_bias = summed(gradients.d_bias, "linear_bias", None if scales is None else scales[1])
    return Gradients(gradients.d_input, d_weight, d_bias), None if scales is None else (scales[0], head_scale)


def _summed_closure(token: TokenOptions, d_closure: Sequence[Array | None], closure: Arrays) -> Sequence[Array | None]:
    """Returns the gradients of a closure as sums over the devices that have different tokens."""
    pairs = zip(d_closure, closure, strict=True)
    return tuple(None if d is None else token.devices.sum_of_shared(d, array) for d, array in pairs)


def _scaled(gradients: Gradients, factor: Array, scales: Any) -> Gradients:
    """Returns gradients times what came from upstream, rounded once."""

    def scaled(gradient: Array | None, scale: Any) -> Array | None:
        if gradient is None:
            return None
        return (gradient * (factor if scale is None else factor / scale)).astype(gradient.dtype)

    input_scale, head_scale = (None, None) if scales is None else scales
    return Gradients(
        scaled(gradients.d_input, input_scale),
        scaled(gradients.d_weight, head_scale),
        scaled(gradients.d_bias, head_scale),
    )


@opaque("linear_ce_losses")
def losses_of_rows(
    options: Options, *arrays: Array, lowering: Lowering | None = None
) -> tuple[Array, row_math.RowStatistics]:
    return _plan_b(options, arrays, lowering)


def _plan_b(options: Options, arrays: Arrays, lowering: Lowering | None) -> tuple[Array, row_math.RowStatistics]:
    """Returns the (N,) losses and the statistics of the rows."""
    problem = forward_problem(options, arrays, lowering)
    plan = plan_of(problem)
    if plan.path == "scaled_exp":
        from jax_pallas.scaled_exp import scaled_exp

        loss, found, _ = scaled_exp(problem, NO_GRADIENTS, statistics=options.statistics)
        return loss, found
    return chunked.losses(tiles_of(plan), problem, plan.chunk_config, options.statistics)


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


@opaque("linear_ce_token_plan_a")
def _token_plan_a(
    static: tuple[TokenOptions, NeedsGrad, TokenNeedsGrad], *arrays: Array, lowering: Lowering | None = None
) -> tuple[TokenRows, Arrays, Gradients, Any]:
    """Returns the results of all rows, their statistics, the gradients of the sum of their losses, and the powers of
    two that these carry.

    A loss of the entropies is called, where kernels store exponentials of 16 bits or nothing between the passes,
    between plan B and the backward pass of plan C.
    """
    token, needs_grad, token_needs_grad = static
    of_call, per_token, closure = token.split(arrays)
    statistics = token.options.statistics
    stage: Stage = "entropy_loss_and_gradients" if token.with_entropy else "loss_and_gradients"
    problem = make_problem(stage, token.options, of_call, needs_grad, lowering, statistics=statistics)
    plan, token_loss = plan_of(problem), TokenHook(token.function, token_needs_grad, per_token, closure)
    scales = row_math.saved_scales(problem.row_weight) if problem.input.dtype == jnp.float16 else None
    if token.with_entropy and plan.path == "recompute":
        nll, found = _plan_b(token.options, _unweighted(token.options, of_call), lowering)
        log_prob = 0.0 - nll
        every = chunked.ChunkRows(Slice(0, problem.tokens, None), problem.target, problem.row_weight)
        rows = token_loss.of_chunk(every.chunk, log_prob, problem.row_weight, found.entropy)
        coefficients = chunked.token_coefficients(problem, rows, every, found)
        gradients = chunked.gradients(
            tiles_of(plan), problem, plan.chunk_config, found.lse, coefficients, needs_grad, scales
        )
        rows = rows._replace(d_entropy=None)
    elif plan.path == "scaled_exp":
        from jax_pallas.scaled_exp import token_loss_and_gradients

        rows, log_prob, found, gradients = token_loss_and_gradients(problem, needs_grad, token_loss, statistics, scales)
    else:
        rows, found, gradients = chunked.token_loss_and_gradients(
            tiles_of(plan), problem, plan.chunk_config, needs_grad, scales, token_loss, statistics
        )
        log_prob = None if found is None or found.nll is None else 0.0 - found.nll
    stats = () if log_prob is None else _stats(token, log_prob, problem.row_weight, found)
    return rows, stats, own_gradients(token.options, of_call, problem, gradients, scales), scales


@opaque("linear_ce_token_values")
def _token_values(
    function: TokenFunction,
    log_prob: Array,
    row_weight: Array,
    per_token: Arrays,
    closure: Arrays,
    lowering: Lowering | None = None,
) -> Array:
    """Returns the (N,) weighted losses of a token loss."""
    return row_token_losses(function, log_prob, row_weight, per_token, closure)


@opaque("linear_ce_token_derivatives")
def _token_derivatives(
    static: tuple[TokenFunction, TokenNeedsGrad],
    log_prob: Array,
    row_weight: Array,
    per_token: Arrays,
    closure: Arrays,
    lowering: Lowering | None = None,
) -> TokenRows:
    """Returns the weighted losses of a token loss and their gradients."""
    return row_token_gradients(*static, log_prob, row_weight, per_token, closure)


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
    """Returns the problem of plan B. Where the backward pass adds to grad_into, plan B is that of a call without it."""
    if options.adds_in_backward:
        arrays = options.replaced(arrays, grad_into=None)
    stage: Stage = "statistics" if options.statistics & BY_ROW else "losses"
    return make_problem(stage, options, arrays, NO_GRADIENTS, lowering, statistics=options.statistics)


def implementation_of(options: Options, arrays: Sequence[Array], lowering: Lowering | None) -> str:
    """Returns the implementation that a call runs that is lowered, or traced where `lowering` is None."""
    named, axis = options.named(arrays), options.vocab_axis
    x, w = named["input"], named["linear_weight"]
    platform = None if lowering is None else lowering.platform
    return launch.resolve(options.implementation, platform, x.dtype, x.shape[1], w.shape[axis], axis)


def make_problem(
    stage: Stage,
    options: Options,
    arrays: Sequence[Array],
    needs_grad: NeedsGrad,
    lowering: Lowering | None = None,
    *,
    statistics: int = 0,
    entropy: bool = False,
) -> Problem:
    """Returns the problem, with its plan, of a call that is lowered, or traced where `lowering` is None. If devices
    divide the tokens, the rows of the input are those of all, unless the plan gathers them chunk by chunk.

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
    plan = plan_of(problem)
    if lowering is not None and not (options.devices.replicated or is_one_chunk(problem)):
        launch.check_devices(plan.implementation, lowering.devices)
    return problem if plan.path == "scaled_exp" else of_all_rows(problem)


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


def _unflattened(results: Arrays, batch: int) -> Arrays:
    return tuple(result.reshape(batch, -1) for result in results)


def _by_batch(flattened: Callable[[Options, Arrays, int], Arrays]) -> Batched:
    """Makes a batching rule of `flattened(options, arrays, batch)`, which takes the batch as rows and gives it back."""

    def rule(options: Options, size: int, arrays: Sequence[Any], axes: Sequence[Any]) -> Arrays | None:
        axis_of, named = options.named(axes), options.named(arrays)
        if (options.has_grad_into and not options.adds_in_backward) or axis_of["grad_into"] is not None:
            return None  # a sum for each batch element
        if any(axis_of[name] is not None for name in ("linear_weight", "linear_bias", "class_weight")):
            if options.has_grad_into:
                raise ValueError(
                    "grad_into must have a jax.vmap axis where linear_weight, linear_bias or weight has one"
                )
            return None  # a head for each batch element: nothing to share
        names = ("input", "target", "row_weight")
        rows = _as_rows([named[name] for name in names], [axis_of[name] for name in names], size)
        named.update(zip(names, rows, strict=True))
        return flattened(options, options.arrays(**named), size)

    return rule


def operator_of_rows(name: str, rule: Any) -> Callable[..., Arrays]:
    """Makes an operator of a rule whose results have a number for each row."""

    def flattened(options: Options, arrays: Arrays, batch: int) -> Arrays:
        # A call that saves rows saves as many of each batch element.
        options = replace(options, saved_budget=batch * options.saved_budget)
        return _unflattened(operator(options, *arrays), batch)

    operator = differentiable(name, rule, _by_batch(flattened))
    return on_devices(operator, rule, _places)


def _loss_of_batch(options: Options, arrays: Arrays, batch: int) -> Arrays:
    losses, *statistics = _unflattened(row_losses(options, *arrays), batch)
    return losses.sum(1), *statistics


def _token_loss_of_batch(token: TokenOptions, size: int, arrays: Sequence[Any], axes: Sequence[Any]) -> Any:
    """The batching rule of `_token_loss`."""
    of_call, per_token, closure = token.split(arrays)
    axes_of_call, token_axes, closure_axes = token.split(axes)
    if any(axis is not None for axis in closure_axes):
        return None

    def flattened(options: Options, of_call: Arrays, batch: int) -> Arrays:
        rows = _as_rows(per_token, token_axes, batch)
        losses, *stats = token_losses(token, *of_call, *rows, *closure)
        return losses.reshape(batch, -1).sum(1), *_unflattened(tuple(stats), batch)

    return _by_batch(flattened)(token.options, size, of_call, axes_of_call)


def _token_rows_of_batch(token: TokenOptions, size: int, arrays: Sequence[Any], axes: Sequence[Any]) -> Any:
    """The batching rule of `_token_rows`."""
    of_rows = 2 + token.per_token
    if any(axis is not None for axis in axes[of_rows:]):
        return None
    rows = _as_rows(arrays[:of_rows], axes[:of_rows], size)
    return _unflattened(token_rows(token, *rows, *arrays[of_rows:]), size)


def _as_rows(arrays: Sequence[Any], axes: Sequence[Any], size: int) -> Arrays:
    """Returns arrays whose batch axis is part of their first axis."""

    def flat(array: Any, axis: int | None) -> Array:
        array = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
        return array.reshape(-1, *array.shape[2:])

    return tuple(flat(array, axis) for array, axis in zip(arrays, axes, strict=True))


def _places(options: Options, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The `places` of the arrays of a call."""
    shared = (1, 4) if options.has_bias else (1,)
    return shared, (*shared, options.count - 1) if options.has_grad_into else shared


def _places_of_token_loss(token: TokenOptions, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shared, of_head = _places(token.options, count)
    return (*shared, *range(token.options.count + token.per_token, count)), of_head


loss_and_gradients = on_devices(
    differentiable("linear_ce_loss_and_gradients", _loss_and_gradients, _by_batch(_loss_of_batch)),
    _loss_and_gradients,
    _places,
)
row_losses = operator_of_rows("linear_ce_row_losses", row_losses_rule)
log_probs = operator_of_rows("linear_ce_log_probs", log_probs_rule)
token_loss_and_gradients = on_devices(
    differentiable("linear_ce_token_loss", _token_loss, _token_loss_of_batch), _token_loss, _places_of_token_loss
)
token_rows = on_devices(
    differentiable("linear_ce_token_rows", _token_rows, _token_rows_of_batch),
    _token_rows,
    lambda token, count: (range(2 + token.per_token, count), ()),
)
