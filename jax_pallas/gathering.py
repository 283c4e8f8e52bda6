"""What devices gather that have different tokens and different classes of the head, as those of FSDP: the tokens of
all, or the rows of the head of all.

    "tokens"  each device computes the loss of the tokens of all devices for its classes (`vocab_shard.py`), and takes
              the results of its own tokens. d_weight stays where it is. Targets and other numbers of the tokens are
              gathered before the rule. The plan decides how rows of the input are: `scaled_exp` gathers those of a
              chunk at a time (`token_slices.py`). All other plans gather all of them (`of_all_rows`).
    "head"    each device computes the loss of its tokens for the whole head, which is gathered in its own dtype before
              the forward rule. The rule sums d_weight over the devices in float32, and each keeps the rows of its
              shard: a reduce-scatter (`own_gradients`), or several beside the last matmuls (`head_scatter.py`). The
              backward rule scales the shard.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal

from jax_pallas import vocab_shard
from jax_pallas.devices import Devices, aligned
from jax_pallas.options import Arrays, Options, TokenOptions
from jax_pallas.primitives import vary_over
from jax_pallas.problem import Gradients, NeedsGrad, Problem

Static = Options | TokenOptions


def whole_head(devices: Devices, linear_weight: Array, vocab_axis: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the head that a device computes with: its own shard, or the gathered head."""
    shape = list(linear_weight.shape)
    if devices.gather == "head":
        shape[vocab_axis] *= devices.parts // devices.shards
    return jax.ShapeDtypeStruct(tuple(shape), linear_weight.dtype)


def on_devices(
    operator: Callable[..., Arrays], rule: Any, places: Callable[[Any, int], tuple[Container[int], Container[int]]]
) -> Any:
    """Makes calls that name axes of a mesh run `rule` in place of the operator, whose arguments would all vary over
    these axes, after devices have gathered what they need.

    Args:
        places: `places(static, count)` says which of `count` arrays devices with different tokens may share, and which
            are different where devices divide the vocabulary.
    """
    compiled, compiled_with_gather = _compiled(rule), _compiled(with_whole_head(rule))

    def call(static: Any, *arrays: Array) -> Arrays:
        if not static.devices.axes:
            return operator(static, *arrays)
        shared, of_head = places(static, len(arrays))
        arrays = aligned(static.devices, arrays, shared, of_head)
        gather = static.devices.gather if of_head else None
        if gather == "tokens":
            return over_all_tokens(compiled, static, arrays)
        return (compiled_with_gather if gather == "head" else compiled)(static, *arrays)

    return call


def _compiled(rule: Any) -> Any:
    """Returns a custom_vjp function under jit: outside of jit, jax.shard_map runs none with symbolic zeros.

    Each call has a jit function of its own. JAX 0.11 would keep the jaxpr of a common one, and what it remembers of the
    residuals is that of its last use. After a use with other gradients, a gradient of the first one would fail.
    """
    return lambda static, *arrays: jax.jit(partial(rule, static))(*arrays)


def places_of_call(options: Options, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The `places` of the arrays of a call."""
    shared = (1, 4) if options.has_bias else (1,)
    return shared, (*shared, options.count - 1) if options.has_grad_into else shared


def over_all_tokens(operator: Any, static: Static, arrays: Arrays) -> Arrays:
    """Runs an operator on the tokens of all devices of `gather_axes`, of which it gathers the rows of the input itself,
    unless it saves rows. Returns the results of this device's tokens."""
    devices = static.devices
    axes = devices.gather_axes
    others = tuple(axis for axis in devices.token_axes if axis not in axes)
    options, rows = replace(_options(static), devices=devices._replace(token_axes=others)), [2, 3]
    if options.saved_budget:
        options, rows = replace(options, devices=options.devices._replace(gather=None, gather_axes=())), [0, 2, 3]
    if isinstance(static, TokenOptions):
        rows += range(options.count, options.count + static.per_token)
    inner: Static = replace(static, options=options) if isinstance(static, TokenOptions) else options

    def gathered(index: int, array: Array) -> Array:
        return cast(Array, lax.all_gather(array, axes, tiled=True, to="invarying")) if index in rows else array

    def own(rows: Array) -> Array:
        # The rows of the only device do not vary yet, as those of one of several do.
        return vary_over(own_rows(devices, rows), axes)

    results = operator(inner, *(gathered(index, array) for index, array in enumerate(arrays)))
    # Not a loss, or a sum of grad_into.
    return tuple(own(result) if result.ndim == 1 else result for result in results)


def own_rows(devices: Devices, rows: Array) -> Array:
    """Returns this device's part of rows of all devices that divide the tokens, which have the same."""
    if devices.token_parts == 1:
        return rows
    size = rows.shape[0] // devices.token_parts
    return lax.dynamic_slice_in_dim(rows, lax.axis_index(devices.gather_axes) * size, size)


def of_all_rows(problem: Problem) -> Problem:
    """Returns a problem whose input has the rows of all devices, which are gathered if it has those of one."""
    if problem.devices.token_parts == 1:
        return problem
    x = vocab_shard.rows_of_all(problem.devices, problem.input)
    return replace(problem, input=x, devices=problem.devices._replace(gather_axes=()))


def are_complete(devices: Devices, input: Array) -> bool:
    """Returns whether the gradients of the head of a call whose tokens are gathered are complete on each device when
    they are computed, and are rounded then."""
    return devices.token_parts > 1 and not devices.token_axes and input.dtype.itemsize == 2


def with_float32_sums(problem: Problem, needs_grad: NeedsGrad) -> Problem:
    """Returns a problem whose gradients of the head are summed in float32 before they are rounded, where devices have
    different tokens."""
    if not problem.devices.sums_in_float32:
        return problem
    b, w, into = problem.linear_bias, problem.linear_weight, problem.grad_into
    sends_head = problem.devices.gather == "head" and into is None
    if needs_grad.d_weight and into is None:
        into = jnp.zeros(w.shape, jnp.float32)
    bias = None if b is None else b.astype(jnp.float32)
    return replace(problem, linear_bias=bias, grad_into=into, sends_head=sends_head and needs_grad.d_weight)


def own_gradients(
    options: Options, arrays: Arrays, problem: Problem, gradients: Gradients, scales: Any = None
) -> Gradients:
    """Returns the gradients of this device, where it gathered the input (`of_all_rows`) or the head. scales: of
    float16, the powers of two of the gradients. A d_weight that was summed in float32 gets its own before it is
    rounded."""
    devices, named = options.devices, options.named(arrays)
    d_input, d_weight, d_bias = gradients
    if d_input is not None and problem.devices.token_parts != devices.token_parts:
        d_input = own_rows(devices, d_input)
    d_weight = own_part(options, problem, d_weight)
    if are_complete(devices, problem.input):
        if d_weight is not None and not options.has_grad_into:
            if scales is not None and problem.grad_into is not None:
                d_weight = d_weight * scales[1]
            d_weight = d_weight.astype(named["linear_weight"].dtype)
        d_bias = None if d_bias is None else d_bias.astype(named["linear_bias"].dtype)
    return Gradients(d_input, d_weight, d_bias)


def own_part(options: Options, problem: Problem, d_weight: Array | None) -> Array | None:
    """Returns the sum of d_weight over the devices that gathered the head, for the shard of this device, unless it is
    that already."""
    if d_weight is None or not problem.sends_head or d_weight.shape != problem.linear_weight.shape:
        return d_weight
    return vocab_shard.own_part_of_sum(d_weight, options.devices.gather_axes, options.vocab_axis)


def with_whole_head(rule: Any) -> Any:
    """Returns a custom_vjp function of `rule_of_arrays` that takes shards of the head where `rule` takes the head, if
    the call gathers it."""

    def gathered(static: Static, arrays: Arrays) -> Arrays:
        options, axes = _options(static), static.devices.gather_axes
        named = options.named(arrays[: options.count])

        def whole(name: str, axis: int) -> Any:
            array = named[name]
            return None if array is None else lax.all_gather(array, axes, axis=axis, tiled=True)

        weight = whole("linear_weight", options.vocab_axis)
        # The sum of all devices is added to each device's own rows when it is complete.
        into = None if named["grad_into"] is None else jnp.zeros(weight.shape, jnp.float32)
        named |= {"linear_weight": weight, "linear_bias": whole("linear_bias", 0), "grad_into": into}
        return (*options.arrays(**named), *arrays[options.count :])

    def total(static: Static, of_all: Array, grad_into: Array) -> Array:
        """Returns grad_into plus the rows of this device of a gradient."""
        devices, axis = static.devices, _options(static).vocab_axis
        return grad_into + lax.psum_scatter(of_all, devices.gather_axes, scatter_dimension=axis, tiled=True)

    def results_of(static: Static, results: Arrays, arrays: Arrays) -> Arrays:
        options = _options(static)
        if not options.has_grad_into or options.adds_in_backward:
            return results
        return (*results[:-1], total(static, results[-1], arrays[options.count - 1]))

    def primal(static: Static, *arrays: Array) -> Arrays:
        return results_of(static, rule(static, *gathered(static, arrays)), arrays)

    def forward(static: Static, *primals: Any) -> tuple[Arrays, Any]:
        arrays = tuple(one.value for one in primals)
        of_head = gathered(static, arrays)
        inner = (CustomVJPPrimal(value, one.perturbed) for value, one in zip(of_head, primals, strict=True))
        results, residuals = rule.fwd(static, *inner)
        options = _options(static)
        into = arrays[options.count - 1] if options.adds_in_backward else None
        return results_of(static, results, arrays), (residuals, into)

    def backward(static: Static, residuals: Any, cotangents: Any) -> Any:
        of_rule, into = residuals
        found = list(rule.bwd(static, of_rule, cotangents))
        if into is not None:
            place = _options(static).count - 1
            found[place] = total(static, found[place], into)
        return tuple(found)

    gathering = jax.custom_vjp(primal, nondiff_argnums=(0,))
    gathering.defvjp(forward, backward, symbolic_zeros=True)
    return gathering


def _options(static: Static) -> Options:
    return static.options if isinstance(static, TokenOptions) else static
