"""The differentiable operators of token losses, beside those of `ops.py`.

`token_loss_and_gradients`  `ops.loss_and_gradients` with a token loss in place of the negative log-likelihood
`token_losses`              `ops.row_losses`, and then `token_rows`: (N,) token loss of each row
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_pallas import chunked, row_math
from jax_pallas.batching import as_rows, by_batch, unflattened
from jax_pallas.gathering import on_devices, own_gradients, places_of_call
from jax_pallas.launch import Lowering
from jax_pallas.ops import (
    ONLY_D_WEIGHT,
    as_residual,
    dense,
    losses_of_rows,
    make_problem,
    plan_b,
    row_losses,
    row_statistics_of,
    rule_of_arrays,
    tiles_of,
    totals_of,
)
from jax_pallas.options import Arrays, Options, TokenOptions
from jax_pallas.plan import Stage
from jax_pallas.primitives import differentiable, opaque
from jax_pallas.problem import NOTHING_COMPUTED, Gradients, NeedsGrad, plan_of
from jax_pallas.scaling import scaled, summed_over_devices
from jax_pallas.slicing import Slice
from jax_pallas.token_hook import (
    TokenFunction,
    TokenHook,
    TokenNeedsGrad,
    TokenRows,
    row_token_gradients,
    row_token_losses,
)
from linear_ce.statistics import MAX

# The gradient of an array that a token loss closes over takes at most this many float32 numbers for each token of a
# chunk. That is less than a token's hidden states.
MOST_OF_CLOSURE = 64


@rule_of_arrays
def _token_loss(token: TokenOptions, *arrays: Array) -> Arrays:
    of_call, per_token, closure = token.split(arrays)
    if token.options.has_grad_into:
        nothing = TokenNeedsGrad((False,) * len(per_token), (False,) * len(closure))
        rows, stats, gradients, _ = _token_plan_a((token, ONLY_D_WEIGHT, nothing), *arrays)
        return token.devices.sum(rows.loss.sum()), *stats, *totals_of(gradients)
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
            totals, gradients = totals_of(gradients), gradients._replace(d_weight=None)
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
    d_tokens = (
        None if gradient is None else (gradient * d_loss).astype(like.dtype)
        for gradient, like in zip(of_tokens, dtypes, strict=True)
    )
    return (*token.options.cotangents(scaled(gradients, d_loss, scales)), *d_tokens)


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
    row_weight, found = token.options.row_weight(of_call), row_statistics_of(rest, token.options.statistics)
    values = token.values(per_token, found.entropy)
    of_rows = replace(token, per_token=len(values))
    loss = token_rows(of_rows, 0.0 - nll, row_weight, *values, *closure)[0]
    return loss, *_stats(token, jax.lax.stop_gradient(0.0 - nll), row_weight, found)


def _summed_closure(token: TokenOptions, d_closure: Sequence[Array | None], closure: Arrays) -> Sequence[Array | None]:
    """Returns the gradients of a closure as sums over the devices that have different tokens."""
    pairs = zip(d_closure, closure, strict=True)
    return tuple(None if d is None else token.devices.sum_of_shared(d, array) for d, array in pairs)


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
        nll, found = plan_b(token.options, _unweighted(token.options, of_call), lowering)
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


def _token_loss_of_batch(token: TokenOptions, size: int, arrays: Sequence[Any], axes: Sequence[Any]) -> Any:
    """The batching rule of `_token_loss`."""
    of_call, per_token, closure = token.split(arrays)
    axes_of_call, token_axes, closure_axes = token.split(axes)
    if any(axis is not None for axis in closure_axes):
        return None

    def flattened(options: Options, of_call: Arrays, batch: int) -> Arrays:
        rows = as_rows(per_token, token_axes, batch)
        losses, *stats = token_losses(token, *of_call, *rows, *closure)
        return losses.reshape(batch, -1).sum(1), *unflattened(tuple(stats), batch)

    return by_batch(flattened)(token.options, size, of_call, axes_of_call)


def _token_rows_of_batch(token: TokenOptions, size: int, arrays: Sequence[Any], axes: Sequence[Any]) -> Any:
    """The batching rule of `_token_rows`."""
    of_rows = 2 + token.per_token
    if any(axis is not None for axis in axes[of_rows:]):
        return None
    rows = as_rows(arrays[:of_rows], axes[:of_rows], size)
    return unflattened(token_rows(token, *rows, *arrays[of_rows:]), size)


def _places_of_token_loss(token: TokenOptions, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shared, of_head = places_of_call(token.options, count)
    return (*shared, *range(token.options.count + token.per_token, count)), of_head


token_loss_and_gradients = on_devices(
    differentiable("linear_ce_token_loss", _token_loss, _token_loss_of_batch), _token_loss, _places_of_token_loss
)
token_rows = on_devices(
    differentiable("linear_ce_token_rows", _token_rows, _token_rows_of_batch),
    _token_rows,
    lambda token, count: (range(2 + token.per_token, count), ()),
)
