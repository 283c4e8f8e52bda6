"""Two ways to turn a function into a JAX primitive: `opaque` keeps transformations out, `differentiable` sets its vmap.

Both take `function(static, *arguments)`. The first argument is hashable, the others are pytrees of arrays.

Under `jax.shard_map` all arguments of a primitive are made to vary over the same mesh axes, as the arguments of JAX's
primitives are. Then an array that was the same on all devices gets the sum of their gradients. The program of an opaque
primitive has no mesh.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, cast

import jax
import jax.core
from jax import Array
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, get_abstract_mesh, use_abstract_mesh

from jax_pallas.launch import Lowering

Function = Callable[..., Any]
OF_SHARD = re.compile(r"\.(d_weight|d_bias|e|unit_d_input|rho|theta|unit_scale)\b")  # paths, also of `SavedRows`
Batched = Callable[[Any, int, Sequence[Any], Sequence[Any]], Any]  # (static, size, arrays, axes) -> results or None


def usual_promotion[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function promote dtypes and ranks as JAX does by default, whatever the caller's
    `jax_numpy_dtype_promotion` and `jax_numpy_rank_promotion` are."""

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*arguments, **options)

    return call


@lru_cache(maxsize=1024)
def _result_shapes(
    function: Function, static: Any, tree: Any, shapes: tuple[Any, ...]
) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the results of a call as flat shapes with their paths in the results, and their tree."""
    arguments = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes])
    with one_device():
        found, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(partial(function, static), *arguments))
    return [(jax.tree_util.keystr(path), result) for path, result in found], tree


def _vocab_axes(static: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the axes over which a call divides the vocabulary, from the static arguments of an operator, and those of
    them whose devices have the same rows of the input."""
    options = static[0] if isinstance(static, tuple) else static
    if not hasattr(options, "devices"):
        return frozenset(), frozenset()
    return frozenset(options.devices.vocab_axes), options.devices.shared_vocab_axes


def one_device() -> Any:
    """Returns a context without a mesh, but for what it says of its devices."""
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=get_abstract_mesh().abstract_device))


def varying(leaf: Any) -> frozenset[Any]:
    """Returns the axes of the mesh of `jax.shard_map` over which an array varies."""
    return jax.typeof(leaf).manual_axis_type.varying


def vary_over(array: Array, axes: Iterable[Any]) -> Array:
    """Makes an array vary over these axes of the mesh of `jax.shard_map` too."""
    missing = tuple(sorted(frozenset(axes) - varying(array), key=str))
    return cast(Array, jax.lax.pcast(array, missing, to="varying")) if missing else array


def _primitive(name: str, function: Function, *, returns_tuple: bool) -> tuple[Primitive, Function, Function]:
    """Returns a primitive of `function`, the call that binds it, and `function` of flat leaves.

    Where `returns_tuple`, `function` returns a tuple of arrays. Other results are put together as a trace of `function`
    shows them. If the call divides the vocabulary among devices, all results but d_weight and d_bias are the same on
    these devices (`vocab_shard.py`), and d_input on those that have the same rows of the input. What a call saves of
    its rows counts as different on each device.
    """
    primitive, function = Primitive(name), usual_promotion(function)
    primitive.multiple_results = True

    def shapes_of(leaves: Sequence[Any], static: Any, tree: Any) -> tuple[list[tuple[str, Any]], Any]:
        return _result_shapes(function, static, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    def bound(static: Any, *arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        axes = frozenset[Any]().union(*map(varying, leaves))
        results = primitive.bind(*(vary_over(leaf, axes) for leaf in leaves), static=static, tree=tree)
        return tuple(results) if returns_tuple else jax.tree.unflatten(shapes_of(leaves, static, tree)[1], results)

    def flat(*leaves: Any, static: Any, tree: Any, **static_args: Any) -> list[Any]:
        return jax.tree.leaves(function(static, *jax.tree.unflatten(tree, leaves), **static_args))

    def abstract(*avals: Any, static: Any, tree: Any) -> list[Any]:
        mesh, axes = avals[0].sharding.mesh, avals[0].manual_axis_type

        shared, of_input = (axes.update(varying=axes.varying - names) for names in _vocab_axes(static))

        def typed(path: str, array: Any) -> jax.core.ShapedArray:
            sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(array.shape)))
            kind = axes if OF_SHARD.search(path) else shared
            kind = of_input if path.endswith(".d_input") else kind
            return jax.core.ShapedArray(array.shape, array.dtype, sharding=sharding, manual_axis_type=kind)

        return [typed(*result) for result in shapes_of(avals, static, tree)[0]]

    primitive.def_impl(compiled(primitive, flat, "static", "tree"))
    primitive.def_abstract_eval(abstract)
    return primitive, bound, flat


def compiled(primitive: Primitive, function: Function, *static: str) -> Function:
    """Returns the implementation of a primitive outside of a trace: a separate jitted program.

    When `jax.debug_nans` finds a NaN, it calls the program again without `jax.jit`. `jax.disable_jit` does that for all
    calls. A program that binds the primitive would then call itself endlessly, so they run `function`, operation by
    operation.
    """

    def call(*leaves: Any, **parameters: Any) -> Any:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return (primitive.bind if traced else function)(*leaves, **parameters)

    return jax.jit(call, static_argnames=static)


def collective(name: str, function: Function, shape: Callable[[tuple[int, ...], int], tuple[int, ...]]) -> Function:
    """Returns `function(array, axes)`, a collective operation of JAX over axes of a mesh, for the program of an opaque
    primitive, whose arrays do not have the types that it needs. They get these types where it is lowered.

    Args:
        shape: (shape of the array, number of devices) -> shape of the result.
    """
    primitive = Primitive(name)

    def abstract(array: Any, *, axes: tuple[str, ...]) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(shape(array.shape, jax.lax.axis_size(axes)), array.dtype)

    def lower(context: mlir.LoweringRuleContext, array: Any, *, axes: tuple[str, ...]) -> Any:
        of_module: Any = context.module_context.axis_context
        sizes, manual = of_module.mesh.shape, of_module.manual_axes
        kinds = tuple(AxisType.Manual if name in manual else AxisType.Auto for name in sizes)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), kinds)
        untyped: Any = context.avals_in[0]
        kind = untyped.manual_axis_type.update(varying=frozenset(axes))
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(untyped.shape)))
        typed = jax.core.ShapedArray(untyped.shape, untyped.dtype, sharding=sharding, manual_axis_type=kind)
        with use_abstract_mesh(mesh):
            lowered = mlir.lower_fun(partial(function, axes=axes), multiple_results=False)
            return lowered(context.replace(avals_in=[typed]), array)

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, lower)
    return lambda array, axes: primitive.bind(array, axes=axes)


def _partitioned(context: Any) -> int:
    """Returns among how many devices XLA divides the part of a program that is lowered in this axis context: those of
    the axes of a mesh that no `jax.shard_map` around it maps. 1 where it divides nothing."""
    if isinstance(context, mlir.SPMDAxisContext):
        return math.prod(size for name, size in context.mesh.shape.items() if name not in context.manual_axes)
    return context.num_devices


def opaque(name: str) -> Callable[[Function], Function]:
    """Turns a function into a primitive that is not differentiable and that partial evaluation does not split.

    The function takes the `lowering`: what it is lowered for. Without it, it is traced for the shapes of its results.
    When it is lowered it is traced again, for one platform only, which `jax.lax.platform_dependent` would not do. Under
    vmap it runs for one element after the other, because each one may take the whole memory budget.
    """

    def decorate(function: Function) -> Function:
        primitive, bound, flat = _primitive(name, function, returns_tuple=False)

        def lower(context: mlir.LoweringRuleContext, *leaves: Any, **parameters: Any) -> Any:
            platforms = context.platforms or context.module_context.platforms
            lowering = Lowering(platforms[0], _partitioned(context.module_context.axis_context))
            types: Sequence[Any] = context.avals_in
            context = context.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in types])
            with one_device():
                return mlir.lower_fun(partial(flat, lowering=lowering))(context, *leaves, **parameters)

        def batch(leaves: Sequence[Any], axes: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
            one = sequential_vmap(lambda *leaves: primitive.bind(*leaves, **parameters))
            results = jax.vmap(one, in_axes=tuple(axes))(*leaves)
            return results, [0] * len(results)

        def jvp(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(
                "linear_cross_entropy, linear_log_probs and linear_token_loss have no second derivative"
            )

        ad.primitive_jvps[primitive] = jvp
        batching.primitive_batchers[primitive] = batch
        mlir.register_lowering(primitive, lower)
        mlir.register_lowering(primitive, lower, platform="cuda")  # separately, for programs of several platforms
        return bound

    return decorate


def differentiable(name: str, function: Function, batched: Batched) -> Function:
    """Turns a custom_vjp function of a tuple of arrays into a primitive. Its vmap is `batched`, or the vmap of the
    function if `batched` returns None.

    A call that is differentiated does not trace the version without gradients.
    """
    # A trace of the tuple's tree took 0.2 s of a train call's compilation.
    primitive, bound, flat = _primitive(name, function, returns_tuple=True)

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
    mlir.register_lowering(primitive, mlir.lower_fun(flat))
    return bound
