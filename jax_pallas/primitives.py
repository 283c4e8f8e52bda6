"""Two ways of making a JAX primitive of a function: to keep transformations out, and to give it its own vmap.

Both take `function(static, *arguments)`, the first argument hashable, the others pytrees of arrays.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Function = Callable[..., Any]
Batched = Callable[[Any, int, Sequence[Any], Sequence[Any]], Any]  # (static, size, arrays, axes) -> results or None


@lru_cache(maxsize=1024)
def _result_shapes(function: Function, static: Any, tree: Any, shapes: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """Returns the results of a call as flat shapes and their tree."""
    arguments = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes])
    return jax.tree.flatten(jax.eval_shape(partial(function, static), *arguments))


def _primitive(name: str, function: Function) -> tuple[Primitive, Function, Function]:
    """Returns a primitive that runs `function`, the call that binds it, and `function` of flat leaves."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    def shapes_of(leaves: Sequence[Any], static: Any, tree: Any) -> tuple[list[Any], Any]:
        return _result_shapes(function, static, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    def bound(static: Any, *arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        results = primitive.bind(*leaves, static=static, tree=tree)
        return jax.tree.unflatten(shapes_of(leaves, static, tree)[1], results)

    def flat(*leaves: Any, static: Any, tree: Any) -> list[Any]:
        return jax.tree.leaves(function(static, *jax.tree.unflatten(tree, leaves)))

    def abstract(*avals: Any, static: Any, tree: Any) -> list[Any]:
        return [jax.core.ShapedArray(result.shape, result.dtype) for result in shapes_of(avals, static, tree)[0]]

    primitive.def_impl(jax.jit(flat, static_argnames=("static", "tree")))
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(flat, multiple_results=True))
    return primitive, bound, flat


def opaque(name: str) -> Callable[[Function], Function]:
    """Makes a function a primitive that is differentiated by nothing and partially evaluated as a whole."""

    def decorate(function: Function) -> Function:
        primitive, bound, flat = _primitive(name, function)

        def batch(leaves: Sequence[Any], axes: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
            results = jax.vmap(partial(flat, **parameters), in_axes=tuple(axes))(*leaves)
            return results, [0] * len(results)

        def jvp(*_: Any, **__: Any) -> Any:
            raise NotImplementedError("linear_cross_entropy and linear_log_probs have no second derivative")

        ad.primitive_jvps[primitive] = jvp
        batching.primitive_batchers[primitive] = batch
        return bound

    return decorate


def differentiable(name: str, function: Function, batched: Batched) -> Function:
    """Makes a custom_vjp function a primitive whose vmap is `batched`, or the function's own where that gives None."""
    primitive, bound, flat = _primitive(name, function)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
        perturbed = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def of_perturbed(*values: Any) -> list[Any]:
            leaves = list(primals)
            for index, value in zip(perturbed, values, strict=True):
                leaves[index] = value
            return flat(*leaves, **parameters)

        return jax.jvp(of_perturbed, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])

    def batch(arrays: Sequence[Any], axes: Sequence[Any], *, static: Any, tree: Any) -> tuple[Any, Any]:
        size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
        results = batched(static, size, arrays, axes)
        if results is None:
            results = jax.vmap(partial(flat, static=static, tree=tree), in_axes=tuple(axes))(*arrays)
        return results, [0] * len(results)

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return bound
