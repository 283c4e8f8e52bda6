"""The differentiable operators behind the public functions: custom_vjp rules, and batching rules for vmap.

    `loss_and_gradients`  plan A: () loss of all rows; its forward rule computes the gradients, the backward rule
                          scales them
    `row_losses`          plan B; differentiated, plan C: (N,) loss of each row; with a frozen head its forward rule
                          computes d_input instead, and the backward rule scales its rows
    `log_probs`           plan C for log-probabilities

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
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jax_pallas import chunked, launch, row_math
from jax_pallas.plan import ExecutionPlan, PlanKey, Stage, make_plan
from jax_pallas.primitives import Batched, differentiable, opaque
from jax_pallas.problem import NO_GRADIENTS, Gradients, NeedsGrad, Problem, layout_of, plan_of
from jax_pallas.row_math import Coefficients
from linear_ce.spec import LossSpec

# The checkpoint_name of what a forward rule saves. A policy that saves it avoids running the forward pass again.
RESIDUAL = "linear_ce_residual"

Arrays = tuple[Array, ...]  # input (N, D), linear_weight, target (N,), row_weight (N,), then linear_bias, class_weight


@dataclass(frozen=True)
class Options:
    """The static arguments of a call."""

    spec: LossSpec
    classes: int
    vocab_axis: int
    memory_budget: int
    implementation: str | None  # None: chosen where the call is lowered
    has_bias: bool
    has_class_weight: bool
    statistics: bool  # the largest logits are computed; without they may be inf

    def arrays(
        self, *, input: Any, linear_weight: Any, target: Any, row_weight: Any, linear_bias: Any, class_weight: Any
    ) -> Any:
        optional = ((linear_bias, self.has_bias), (class_weight, self.has_class_weight))
        return (input, linear_weight, target, row_weight, *(array for array, present in optional if present))

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The inverse of `arrays`."""
        rest = list(arrays[4:])
        linear_bias = rest.pop(0) if self.has_bias else None
        class_weight = rest.pop(0) if self.has_class_weight else None
        names = ("input", "linear_weight", "target", "row_weight")
        return {**dict(zip(names, arrays[:4], strict=True)), "linear_bias": linear_bias, "class_weight": class_weight}

    def needs_grad(self, primals: Sequence[Any]) -> NeedsGrad:
        """Returns which arguments are differentiated, from the primals of a forward rule."""
        named = self.named(primals)
        bias = named["linear_bias"]
        return NeedsGrad(
            named["input"].perturbed, named["linear_weight"].perturbed, bias is not None and bias.perturbed
        )

    def cotangents(self, gradients: Gradients) -> Any:
        """Returns the results of a backward rule. None means zero."""
        return self.arrays(
            input=gradients.d_input,
            linear_weight=gradients.d_weight,
            target=None,
            row_weight=None,
            linear_bias=gradients.d_bias,
            class_weight=None,
        )


def _rule(function: Callable[..., Arrays]) -> Any:
    """Makes `function(options, *arrays)` a custom_vjp function of the arrays."""
    return jax.custom_vjp(function, nondiff_argnums=(0,))


@_rule
def _loss_and_gradients(options: Options, *arrays: Array) -> Arrays:
    losses, *statistics = _row_losses(options, *arrays)
    return losses.sum(), *statistics


def _loss_and_gradients_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad = options.needs_grad(primals)
    losses, statistics, gradients, scales = _plan_a((options, needs_grad), *(primal.value for primal in primals))
    return (losses.sum(), *statistics), (jax.tree.map(_named, gradients), scales)


def _loss_and_gradients_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    gradients, scales = residuals
    d_loss = _dense(cotangents[0])
    return options.cotangents(_scaled(gradients, d_loss, d_loss, scales))


_loss_and_gradients.defvjp(_loss_and_gradients_fwd, _loss_and_gradients_bwd, symbolic_zeros=True)


@_rule
def _row_losses(options: Options, *arrays: Array) -> Arrays:
    loss, found = _losses(options, *arrays)
    return loss, found.lse, found.target_logit, found.max


def _row_losses_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad, arrays = options.needs_grad(primals), tuple(primal.value for primal in primals)
    if not (needs_grad.d_weight or needs_grad.d_bias):  # then a row's d_input is its d_loss times what 1 gives
        losses, statistics, gradients, scales = _plan_a((options, needs_grad), *arrays)
        return (losses, *statistics), (
            None,
            (jax.tree.map(_named, gradients), scales, options.named(arrays)["row_weight"]),
        )
    _problem("gradients", options, arrays, needs_grad)  # refuses what the backward pass could not do
    loss, lse, target_logit, top = _row_losses(options, *arrays)
    return (loss, lse, target_logit, top), ((arrays, _named(lse), needs_grad), None)


def _row_losses_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    recomputed, made = residuals
    d_loss = _dense(cotangents[0])
    if made is not None:
        gradients, scales, row_weight = made
        d_row = jnp.where(row_weight != 0, d_loss, 0.0)[:, None]
        return options.cotangents(_scaled(gradients, d_row, None, scales))
    arrays, lse, needs_grad = recomputed
    problem = _problem("gradients", options, arrays, needs_grad)
    upstream = jnp.where(problem.row_weight != 0, d_loss * problem.row_weight, 0.0)
    coefficients = row_math.loss_coefficients(
        options.spec, lse, problem.target, upstream, problem.row_weight, problem.class_weight, options.classes
    )
    return options.cotangents(_gradients((options, needs_grad), arrays, lse, coefficients))


_row_losses.defvjp(_row_losses_fwd, _row_losses_bwd, symbolic_zeros=True)


@_rule
def _log_probs(options: Options, *arrays: Array) -> Arrays:
    statistics = _statistics(options, *arrays)
    assert statistics.entropy is not None
    assert statistics.nll is not None
    return 0.0 - statistics.nll, statistics.entropy, statistics.lse


def _log_probs_fwd(options: Options, *primals: Any) -> tuple[Arrays, Any]:
    needs_grad, arrays = options.needs_grad(primals), tuple(primal.value for primal in primals)
    _problem("gradients", options, arrays, needs_grad, entropy=True)  # refuses what the backward pass could not do
    log_prob, entropy, lse = _log_probs(options, *arrays)
    return (log_prob, entropy, lse), (arrays, _named(entropy), _named(lse), needs_grad)


def _log_probs_bwd(options: Options, residuals: Any, cotangents: Any) -> Any:
    arrays, entropy, lse, needs_grad = residuals
    problem = _problem("gradients", options, arrays, needs_grad, entropy=True)
    cotangents = tuple(map(_dense, cotangents))
    coefficients = row_math.log_prob_coefficients(
        entropy, problem.target, *cotangents, problem.row_weight, classes=options.classes
    )
    return options.cotangents(_gradients((options, needs_grad), arrays, lse, coefficients))


_log_probs.defvjp(_log_probs_fwd, _log_probs_bwd, symbolic_zeros=True)


def _scaled(gradients: Gradients, input_factor: Array, head_factor: Any, scales: Any) -> Gradients:
    """Returns gradients times what came from upstream, rounded once."""

    def scaled(gradient: Array | None, factor: Any, scale: Any) -> Array | None:
        if gradient is None:
            return None
        return (gradient * (factor if scale is None else factor / scale)).astype(gradient.dtype)

    input_scale, head_scale = (None, None) if scales is None else scales
    return Gradients(
        scaled(gradients.d_input, input_factor, input_scale),
        scaled(gradients.d_weight, head_factor, head_scale),
        scaled(gradients.d_bias, head_factor, head_scale),
    )


@opaque("linear_ce_losses")
def _losses(options: Options, *arrays: Array, platform: str | None = None) -> tuple[Array, row_math.RowStatistics]:
    """Plan B."""
    problem = _problem("losses", options, arrays, NO_GRADIENTS, platform, statistics=options.statistics)
    plan = plan_of(problem)
    if plan.path == "scaled_exp":
        from jax_pallas.scaled_exp import scaled_exp

        loss, found, _ = scaled_exp(problem, NO_GRADIENTS, statistics=options.statistics)
        return loss, found
    return chunked.losses(_tiles(plan), problem, plan.chunk_config)


@opaque("linear_ce_statistics")
def _statistics(options: Options, *arrays: Array, platform: str | None = None) -> row_math.RowStatistics:
    """Plan B, with the entropy."""
    problem = _problem("statistics", options, arrays, NO_GRADIENTS, platform, entropy=True)
    plan = plan_of(problem)
    return chunked.statistics(_tiles(plan), problem, plan.chunk_config, True)


@opaque("linear_ce_plan_a")
def _plan_a(
    static: tuple[Options, NeedsGrad], *arrays: Array, platform: str | None = None
) -> tuple[Array, Arrays, Gradients, Any]:
    """Returns (N,) losses, their statistics, the gradients of their sum, and the powers of two that these carry."""
    options, needs_grad = static
    statistics = options.statistics
    problem = _problem("loss_and_gradients", options, arrays, needs_grad, platform, statistics=statistics)
    plan = plan_of(problem)
    scales = row_math.saved_scales(problem.row_weight) if problem.input.dtype == jnp.float16 else None
    if plan.path == "scaled_exp":
        from jax_pallas.scaled_exp import scaled_exp

        losses, found, gradients = scaled_exp(problem, needs_grad, statistics=statistics)
    else:
        losses, found, gradients = chunked.loss_and_gradients(
            _tiles(plan), problem, plan.chunk_config, needs_grad, scales
        )
    return losses, (found.lse, found.target_logit, found.max), gradients, scales


@opaque("linear_ce_gradients")
def _gradients(
    static: tuple[Options, NeedsGrad],
    arrays: Arrays,
    lse: Array,
    coefficients: Coefficients,
    platform: str | None = None,
) -> Gradients:
    """Plan C's backward pass."""
    options, needs_grad = static
    entropy = coefficients.beta is not None
    problem = _problem("gradients", options, arrays, needs_grad, platform, entropy=entropy)
    plan = plan_of(problem)
    return chunked.gradients(_tiles(plan), problem, plan.chunk_config, lse, coefficients, needs_grad)


def _problem(
    stage: Stage,
    options: Options,
    arrays: Sequence[Array],
    needs_grad: NeedsGrad,
    platform: str | None = None,
    *,
    statistics: bool = False,
    entropy: bool = False,
) -> Problem:
    """Returns the problem, with its plan, of a call that is lowered for `platform`, or traced."""
    shared = {"spec": options.spec, "classes": options.classes, "vocab_axis": options.vocab_axis}
    problem = Problem(**options.named(arrays), **shared)
    w = problem.linear_weight
    shape = (problem.input.dtype, problem.input.shape[1], w.shape[options.vocab_axis], options.vocab_axis)
    implementation = launch.resolve(options.implementation, platform, *shape)
    plan = plan_for(
        problem,
        stage,
        options.memory_budget,
        implementation,
        needs_grad,
        launch.device_info(implementation, launch.traced_platform() if platform is None else platform),
        statistics=statistics,
        entropy=entropy,
    )
    return replace(problem, plan=plan)


def plan_for(
    problem: Problem,
    stage: Stage,
    memory_budget: int,
    implementation: str,
    needs_grad: NeedsGrad,
    device: launch.DeviceInfo,
    *,
    statistics: bool = False,
    entropy: bool = False,
) -> ExecutionPlan:
    """Returns the plan of a problem: `plan.make_plan` of the properties of its arrays."""
    key = PlanKey(
        stage=stage,
        input=layout_of(problem.input),
        linear_weight=layout_of(problem.linear_weight),
        vocab_axis=problem.vocab_axis,
        classes=problem.local_classes,
        label_smoothing=problem.spec.label_smoothing != 0,
        softcap=problem.spec.softcap is not None,
        entropy=entropy,
        d_input=needs_grad.d_input,
        d_weight=needs_grad.d_weight,
        d_bias=needs_grad.d_bias,
        statistics=statistics,
        memory_budget=memory_budget,
        implementation=implementation,
        device=device,
    )
    return make_plan(key)


def _tiles(plan: ExecutionPlan) -> chunked.Tiles:
    """Returns the functions that compute the tiles of a plan of `chunked`. Pallas is imported only for its kernels."""
    if plan.path == "chunked":
        return chunked.XLA_TILES
    from jax_pallas.recompute import KERNEL_TILES

    return KERNEL_TILES


def _named(array: Array) -> Array:
    return checkpoint_name(array, RESIDUAL)


def _dense(cotangent: Any) -> Any:
    symbolic = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, jnp.float32) if symbolic else cotangent


def _unflattened(results: Arrays, batch: int) -> Arrays:
    return tuple(result.reshape(batch, -1) for result in results)


def _row_losses_of_batch(options: Options, arrays: Arrays, batch: int) -> Arrays:
    return _unflattened(row_losses(options, *arrays), batch)


def _log_probs_of_batch(options: Options, arrays: Arrays, batch: int) -> Arrays:
    return _unflattened(log_probs(options, *arrays), batch)


def _by_batch(flattened: Callable[[Options, Arrays, int], Arrays]) -> Batched:
    """Makes a batching rule of `flattened(options, arrays, batch)`, which takes the batch as rows and gives it back."""

    def rule(options: Options, size: int, arrays: Sequence[Any], axes: Sequence[Any]) -> Arrays | None:
        axis_of, named = options.named(axes), options.named(arrays)
        if any(axis_of[name] is not None for name in ("linear_weight", "linear_bias", "class_weight")):
            return None  # a head for each batch element: nothing to share
        for name in ("input", "target", "row_weight"):
            array, axis = named[name], axis_of[name]
            array = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
            named[name] = array.reshape(-1, *array.shape[2:])
        return flattened(options, options.arrays(**named), size)

    return rule


def _loss_of_batch(options: Options, arrays: Arrays, batch: int) -> Arrays:
    losses, *statistics = _unflattened(row_losses(options, *arrays), batch)
    return losses.sum(1), *statistics


loss_and_gradients = differentiable("linear_ce_loss_and_gradients", _loss_and_gradients, _by_batch(_loss_of_batch))
row_losses = differentiable("linear_ce_row_losses", _row_losses, _by_batch(_row_losses_of_batch))
log_probs = differentiable("linear_ce_log_probs", _log_probs, _by_batch(_log_probs_of_batch))
