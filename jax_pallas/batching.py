"""The rules of the operators for vmap: the batch becomes rows of one call.

Batching a custom_vjp would keep one d_weight for each batch element until they are summed. So the primitive outside of
each custom_vjp function has a rule (`primitives.py`). It flattens the batch into rows, and plan C takes a cotangent for
each row.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_pallas.gathering import on_devices, places_of_call
from jax_pallas.options import Arrays, Options
from jax_pallas.primitives import Batched, differentiable


def by_batch(flattened: Callable[[Options, Arrays, int], Arrays]) -> Batched:
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
        rows = as_rows([named[name] for name in names], [axis_of[name] for name in names], size)
        named.update(zip(names, rows, strict=True))
        return flattened(options, options.arrays(**named), size)

    return rule


def operator_of_rows(name: str, rule: Any) -> Callable[..., Arrays]:
    """Makes an operator of a rule whose results have a number for each row."""

    def flattened(options: Options, arrays: Arrays, batch: int) -> Arrays:
        # A call that saves rows saves as many of each batch element.
        options = replace(options, saved_budget=batch * options.saved_budget)
        return unflattened(operator(options, *arrays), batch)

    operator = differentiable(name, rule, by_batch(flattened))
    return on_devices(operator, rule, places_of_call)


def as_rows(arrays: Sequence[Any], axes: Sequence[Any], size: int) -> Arrays:
    """Returns arrays whose batch axis is part of their first axis."""

    def flat(array: Any, axis: int | None) -> Array:
        array = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
        return array.reshape(-1, *array.shape[2:])

    return tuple(flat(array, axis) for array, axis in zip(arrays, axes, strict=True))


def unflattened(results: Arrays, batch: int) -> Arrays:
    return tuple(result.reshape(batch, -1) for result in results)
