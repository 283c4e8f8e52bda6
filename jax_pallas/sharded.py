"""The public functions of `jax_pallas` on arrays of global shape whose parts are on the devices of a mesh.

A function of this module runs the function of the same name within `jax.shard_map`: each device computes the loss of
its tokens, of its classes, or both. So it is called under `jax.jit`, or outside of it, without writing `jax.shard_map`.
It names the axes of the mesh over which tokens and classes are divided:

    batch_axis_names  devices have different tokens. Those that share the head sum its gradient in float32.
    vocab_axis_name   devices have the same tokens and different classes of the head: tensor parallel.
    fsdp_axis_name    devices have different tokens and different classes of the head. They gather the tokens or the
                      head first: `gather`.

If the axes of the mesh have the type `jax.sharding.AxisType.Explicit`, the functions of `jax_pallas` read this from the
types of their arrays and run the functions of this module.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from jax_pallas import linear_ce
from jax_pallas.arguments import ARRAYS, as_number, check_are_arrays, check_per_token, signed_target
from jax_pallas.devices import axis_names, is_divided
from jax_pallas.elementwise import TracedLoss, trace_token_loss
from jax_pallas.linear_ce import LogProbs, LossStats
from jax_pallas.primitives import vary_over, varying
from jax_pallas.row_math import TokenStats
from jax_pallas.token_hook import takes_entropy
from linear_ce.spec import ArrayInfo, LossSpec, check_arrays, check_ignore_index

__all__ = [
    "linear_cross_entropy",
    "linear_cross_entropy_with_stats",
    "linear_log_probs",
    "linear_token_loss",
    "linear_token_loss_with_stats",
]

Gather = Literal["tokens", "head"]
BatchAxes = str | Sequence[str] | PartitionSpec | None


class Placement(NamedTuple):
    """Over which axes of a mesh the arrays of a call are divided."""

    mesh: Mesh | AbstractMesh | None  # None: that of the context
    axes: frozenset[str]  # of the mesh, which `jax.shard_map` maps
    rows: PartitionSpec  # of the axes of target
    vocab_axes: tuple[str, ...]  # of the vocabulary, whose devices have the same tokens
    fsdp_axes: tuple[str, ...]  # of the vocabulary and of the tokens
    gather: Gather | None

    @property
    def token_axes(self) -> tuple[str, ...]:
        return tuple(name for part in self.rows for name in _names_of(part))

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The axes of the vocabulary, as a part of a PartitionSpec."""
        return (*self.vocab_axes, *self.fsdp_axes) or None

    def size(self, part: Any) -> int:
        """Returns the number of devices of a part of a PartitionSpec."""
        mesh = get_abstract_mesh() if self.mesh is None else self.mesh
        return math.prod(mesh.shape[name] for name in _names_of(part))


def linear_cross_entropy(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis_names: BatchAxes = None,
    vocab_axis_name: str | None = None,
    fsdp_axis_name: str | None = None,
    gather: Gather | None = None,
    **options: Any,
) -> Any:
    """`jax_pallas.linear_cross_entropy` of arrays of global shape, divided over the axes of a mesh that are named.

    The loss and the gradients are those of one device, up to rounding: "mean" divides by the number of counted tokens
    of all devices. An array that is not yet divided like this is moved, so place the arrays as described, for example
    with `jax.device_put` or `jax.lax.with_sharding_constraint`.

    Args:
        input: (..., D). Its first axis is divided over batch_axis_names and fsdp_axis_name.
        linear_weight: (V, D), or (D, V) with vocab_axis 1. V is divided over vocab_axis_name and fsdp_axis_name,
            `PartitionSpec((vocab_axis_name, fsdp_axis_name))`, and so are linear_bias and grad_into. If the number of
            classes is no multiple of the number of these devices, pad the head and pass vocab_size. A head that is
            divided on D is moved once: its devices exchange 1/k of it.
        target: (...), divided as input, and so is token_weight. weight and an array normalizer are on all devices.
        mesh: None is the mesh of the context: `jax.set_mesh`.
        batch_axis_names: axes whose devices have different tokens: names that divide the first axis, or a PartitionSpec
            of the axes of target, such as P("data", "context").
        vocab_axis_name: an axis whose devices have the same tokens and different classes, as with tensor parallelism.
        fsdp_axis_name: an axis whose devices have different tokens and different classes, as with FSDP. It divides the
            first axis of input, after batch_axis_names, unless these have it too.
        gather: what the devices of fsdp_axis_name gather. "tokens": each computes the loss of the tokens of all for its
            classes. The kernels gather them chunk by chunk. "head": the head is gathered once, in its own dtype, and
            its gradient is reduce-scattered in float32. None: "tokens" where they have fewer tokens than the head has
            classes, otherwise "head".
        **options: the other arguments of `jax_pallas.linear_cross_entropy`, but replicated. With grad_into, the sum is
            grad_into plus the gradient of all tokens.

    Returns:
        As `jax_pallas.linear_cross_entropy`. A loss of reduction "none" is divided as target.

    Raises:
        TypeError, ValueError: as `jax_pallas.linear_cross_entropy`; there is no mesh, or it has no such axis; an axis
            is named twice; the devices do not divide an axis of target, or V.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_pallas import sharded
        >>> mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> axes = {"batch_axis_names": "data", "vocab_axis_name": "model"}
        >>> loss = lambda x, w, y: sharded.linear_cross_entropy(x, w, y, mesh=mesh, **axes)
        >>> d_x, d_w = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.ones((6, 16)), jnp.ones((100, 16)), jnp.arange(6))
        >>> d_x.shape, d_w.shape
        ((6, 16), (100, 16))
    """
    axes = mesh, batch_axis_names, vocab_axis_name, fsdp_axis_name, gather
    return _named(linear_ce.linear_cross_entropy, (input, linear_weight, target), options, *axes)


def linear_cross_entropy_with_stats(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis_names: BatchAxes = None,
    vocab_axis_name: str | None = None,
    fsdp_axis_name: str | None = None,
    gather: Gather | None = None,
    **options: Any,
) -> tuple[Any, LossStats]:
    """`jax_pallas.linear_cross_entropy_with_stats` of arrays of global shape: see `linear_cross_entropy`.

    Args:
        input: as all other arguments, see `linear_cross_entropy`.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_pallas import sharded
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> x, w = jnp.ones((6, 16)), jnp.ones((100, 16))
        >>> _, stats = sharded.linear_cross_entropy_with_stats(
        ...     x, w, jnp.arange(6), mesh=mesh, batch_axis_names="data"
        ... )
        >>> int(stats.n_valid)
        6
    """
    axes = mesh, batch_axis_names, vocab_axis_name, fsdp_axis_name, gather
    return _named(linear_ce.linear_cross_entropy_with_stats, (input, linear_weight, target), options, *axes)


def linear_log_probs(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis_names: BatchAxes = None,
    vocab_axis_name: str | None = None,
    fsdp_axis_name: str | None = None,
    gather: Gather | None = None,
    **options: Any,
) -> LogProbs:
    """`jax_pallas.linear_log_probs` of arrays of global shape: see `linear_cross_entropy`.

    Args:
        input: as all other arguments, see `linear_cross_entropy`.

    Returns:
        As `jax_pallas.linear_log_probs`, divided as target.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_pallas import sharded
        >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> x, w = jnp.ones((6, 16)), jnp.ones((100, 16))
        >>> sharded.linear_log_probs(x, w, jnp.arange(6), mesh=mesh, fsdp_axis_name="fsdp").entropy.shape
        (6,)
    """
    axes = mesh, batch_axis_names, vocab_axis_name, fsdp_axis_name, gather
    return _named(linear_ce.linear_log_probs, (input, linear_weight, target), options, *axes)


def linear_token_loss(
    input: Array,
    linear_weight: Array,
    target: Array,
    token_loss: Callable[..., Array],
    *per_token: Array,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis_names: BatchAxes = None,
    vocab_axis_name: str | None = None,
    fsdp_axis_name: str | None = None,
    gather: Gather | None = None,
    **options: Any,
) -> Any:
    """`jax_pallas.linear_token_loss` of arrays of global shape: see `linear_cross_entropy`.

    Args:
        token_loss: as for `jax_pallas.linear_token_loss`. What it closes over is on all devices.
        per_token: (...), divided as target.
        input: as all other arguments, see `linear_cross_entropy`.

    Raises:
        TypeError, ValueError, RuntimeError: as `jax_pallas.linear_token_loss` and `linear_cross_entropy`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_pallas import sharded, token_losses
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> x, w, advantage = jnp.ones((6, 16)), jnp.ones((100, 16)), jnp.ones(6)
        >>> arguments = x, w, jnp.arange(6), token_losses.reinforce(), advantage
        >>> sharded.linear_token_loss(*arguments, mesh=mesh, batch_axis_names="data").shape
        ()
    """
    axes = mesh, batch_axis_names, vocab_axis_name, fsdp_axis_name, gather
    arguments = input, linear_weight, target, token_loss, *per_token
    return _named(linear_ce.linear_token_loss, arguments, options, *axes)


def linear_token_loss_with_stats(
    input: Array,
    linear_weight: Array,
    target: Array,
    token_loss: Callable[..., Array],
    *per_token: Array,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis_names: BatchAxes = None,
    vocab_axis_name: str | None = None,
    fsdp_axis_name: str | None = None,
    gather: Gather | None = None,
    **options: Any,
) -> tuple[Any, TokenStats]:
    """`jax_pallas.linear_token_loss_with_stats` of arrays of global shape: see `linear_token_loss`.

    Args:
        input: as all other arguments, see `linear_token_loss`.

    Raises:
        TypeError, ValueError, RuntimeError: as `linear_token_loss`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_pallas import sharded, token_losses
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> x, w, advantage = jnp.ones((6, 16)), jnp.ones((100, 16)), jnp.ones(6)
        >>> arguments = x, w, jnp.arange(6), token_losses.reinforce(), advantage
        >>> _, stats = sharded.linear_token_loss_with_stats(*arguments, mesh=mesh, batch_axis_names="data")
        >>> stats.entropy.shape
        (6,)
    """
    axes = mesh, batch_axis_names, vocab_axis_name, fsdp_axis_name, gather
    arguments = input, linear_weight, target, token_loss, *per_token
    return _named(linear_ce.linear_token_loss_with_stats, arguments, options, *axes)


def _named(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    mesh: Mesh | AbstractMesh | None,
    batch_axis_names: BatchAxes,
    vocab_axis_name: str | None,
    fsdp_axis_name: str | None,
    gather: Gather | None,
) -> Any:
    """Runs a public function of `linear_ce` over the axes that a public function of this module was given."""
    refused = sorted({"token_axis_names", "replicated"} & {*options})
    if refused:
        raise TypeError(f"jax_pallas.sharded.{function.__name__} has no argument {refused[0]}")
    if not isinstance(mesh, (Mesh, AbstractMesh, type(None))):
        raise TypeError(f"mesh must be a Mesh, an AbstractMesh or None, got {type(mesh).__name__}")
    context = get_abstract_mesh() if mesh is None else mesh
    if not context.axis_names:
        raise ValueError("mesh must be given where no jax.set_mesh sets one")
    rows = batch_axis_names
    if not isinstance(rows, PartitionSpec):
        names = axis_names("batch_axis_names", rows)
        rows = PartitionSpec(*[names] if names else ())
    vocab, fsdp = (
        axis_names(argument, name)
        for argument, name in (("vocab_axis_name", vocab_axis_name), ("fsdp_axis_name", fsdp_axis_name))
    )
    missing = tuple(name for name in fsdp if name not in [one for part in rows for one in _names_of(part)])
    if missing:
        first, *others = rows or (None,)
        rows = PartitionSpec((*_names_of(first), *missing), *others)
    mapped = {
        name for name, kind in zip(context.axis_names, context.axis_types, strict=True) if kind != AxisType.Manual
    }
    where = Placement(mesh, frozenset(mapped), rows, vocab, fsdp, gather)
    used = (*where.token_axes, *where.vocab_axes)
    for name in used:
        if name not in mapped:
            raise ValueError(
                f"batch_axis_names, vocab_axis_name and fsdp_axis_name must name axes of the mesh, "
                f"{tuple(context.axis_names)}, which no jax.shard_map around the call maps, got {name!r}"
            )
    if len({*used}) < len(used):
        raise ValueError(f"batch_axis_names, vocab_axis_name and fsdp_axis_name must name different axes, got {used}")
    if gather is not None and not fsdp:
        raise ValueError(f"gather must be None without fsdp_axis_name, got {gather!r}")
    bound = inspect.signature(function).bind(*arguments, **options)
    return _divided(function, where, dict(bound.arguments))


def of_types(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Runs a public function of `linear_ce` over the explicit axes of a mesh that the types of its arrays name.

    Args:
        arguments: the arguments of the function by name, with "per_token" those that it takes as *per_token.
    """
    x, w, axis = arguments["input"], arguments["linear_weight"], arguments.get("vocab_axis", 0)
    check_are_arrays({"input": x, "linear_weight": w, "target": arguments["target"]})
    of_input, of_head = (jax.typeof(array).sharding.spec for array in (x, w))
    named = {name: one for name, one in arguments.items() if name != "per_token"}
    named |= {f"per_token[{index}]": one for index, one in enumerate(arguments.get("per_token", ()))}
    (first, divided), *others = ((name, one) for name, one in named.items() if is_divided(one))
    mesh = jax.typeof(divided).sharding.mesh
    for name, one in others:
        if jax.typeof(one).sharding.mesh != mesh:
            raise ValueError(
                f"{name} must be on the mesh of {first}, {mesh}, got an array on {jax.typeof(one).sharding.mesh}"
            )
    rows = PartitionSpec(*of_input[:-1])
    tokens = {name for part in rows for name in _names_of(part)}
    # A head that is divided on D is divided on V instead.
    head = [name for part in (of_head[axis], of_head[1 - axis]) for name in _names_of(part)]
    vocab = tuple(name for name in head if name not in tokens)
    fsdp = tuple(name for name in head if name in tokens)
    explicit = frozenset(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    )
    placed = getattr(divided, "sharding", None)
    if isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh):
        mesh = placed.mesh  # of an array that has values; jax.set_mesh may not have been called
    gather, *_ = (arguments.pop(name, None) for name in ("gather", "token_axis_names", "vocab_axis_name"))
    where = Placement(mesh, explicit, rows, vocab, fsdp, gather)
    if w.shape[axis] % where.size(where.classes):  # gathered, because no device has whole rows
        where = where._replace(vocab_axes=(), fsdp_axes=())
    return _divided(function, where, arguments)


def _divided(function: Callable[..., Any], where: Placement, arguments: dict[str, Any]) -> Any:
    """Runs a public function of `linear_ce` within `jax.shard_map`."""
    rows, head, everywhere = *_specs(function, where, arguments), PartitionSpec()
    of_bias = PartitionSpec(where.classes)
    specs = {"input": PartitionSpec(*rows, None), "linear_weight": head, "target": rows, "linear_bias": of_bias}
    specs |= {"weight": everywhere, "token_weight": rows, "normalizer": everywhere, "grad_into": head}
    arguments = dict(arguments)
    per_token = arguments.pop("per_token", ())
    # JAX would wrap a target of 64 bits to 32 bits, and a number becomes an array whose value is not known.
    if isinstance(arguments["target"], np.ndarray):
        of_targets = signed_target(arguments["target"], check_ignore_index(arguments.get("ignore_index", -100)))
        arguments["target"], arguments["ignore_index"] = of_targets
    if "normalizer" in arguments:
        arguments["normalizer"] = as_number(arguments["normalizer"])
    operands = {name: value for name in specs if _is_array(value := arguments.get(name))}
    others = {name: value for name, value in arguments.items() if name not in operands}
    token_loss, closure = others.pop("token_loss", None), ()
    if token_loss is not None:
        check_per_token(token_loss, per_token, arguments["target"].shape, "target's")
        with_entropy = takes_entropy(token_loss, others.get("with_entropy", False))
        number = with_entropy + len(per_token)
        traced, values_of_closure = trace_token_loss(token_loss, math.prod(arguments["target"].shape), number)
        closure, others["with_entropy"] = tuple(values_of_closure()), with_entropy
    reduction = others.get("reduction", "mean")
    scalar = function is not linear_ce.linear_log_probs and reduction != "none"
    into_axes = tuple(axis for axis in where.token_axes if axis not in where.fsdp_axes)

    def body(operands: dict[str, Array], per_token: tuple[Array, ...], closure: tuple[Array, ...]) -> Any:
        operands, into = dict(operands), operands.get("grad_into")
        if into is not None and into_axes:
            operands["grad_into"] = _zeros_beside(into_axes, into)
        first = [operands.pop(name) for name in ("input", "linear_weight", "target")]
        if token_loss is not None:
            first += [TracedLoss(traced, closure), *per_token]
        found = function(
            *first,
            **operands,
            **others,
            token_axis_names=where.token_axes,
            vocab_axis_name=where.classes,
            gather=where.gather,
        )
        if into is None or not into_axes or not scalar:
            return found
        (loss, total), *stats = found if isinstance(found[0], tuple) else (found,)
        summed = loss, into + lax.psum(total, into_axes)
        return (summed, *stats) if stats else summed

    of_loss: Any = everywhere if scalar else rows
    if "grad_into" in operands and scalar:
        of_loss = (of_loss, head)
    of_stats: Any = rows, rows, everywhere if scalar else rows, everywhere, everywhere
    results: dict[Any, Any] = {
        linear_ce.linear_cross_entropy: of_loss,
        linear_ce.linear_cross_entropy_with_stats: (of_loss, LossStats(*of_stats)),
        linear_ce.linear_log_probs: rows,
        linear_ce.linear_token_loss: of_loss,
        linear_ce.linear_token_loss_with_stats: (of_loss, rows),
    }
    in_specs = {name: specs[name] for name in operands}, (rows,) * len(per_token), (everywhere,) * len(closure)
    placed = jax.tree.map(partial(_placed, where), (operands, tuple(per_token), closure), in_specs)
    mapped = jax.shard_map(body, mesh=where.mesh, in_specs=in_specs, out_specs=results[function], axis_names=where.axes)
    return mapped(*placed)


def _specs(
    function: Callable[..., Any], where: Placement, arguments: dict[str, Any]
) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns how target and linear_weight are divided.

    Raises:
        TypeError, ValueError: an array has the wrong type, dtype or shape, or the devices do not divide it.
    """
    named = {name: arguments.get(name) for name in ARRAYS}
    check_are_arrays(named)
    options = {field.name: arguments[field.name] for field in fields(LossSpec) if field.name in arguments}
    if function is linear_ce.linear_log_probs:
        options["reduction"] = "none"
    axis = arguments.get("vocab_axis", 0)
    infos: dict[str, Any] = {
        name: ArrayInfo(tuple(a.shape), str(a.dtype)) for name, a in named.items() if a is not None
    }
    check_arrays(spec=LossSpec(**options), vocab_axis=axis, **infos)
    leading, classes = arguments["target"].shape, arguments["linear_weight"].shape[axis]
    if len(where.rows) > len(leading):
        raise ValueError(f"batch_axis_names and fsdp_axis_name must divide axes of target, {leading}, got {where.rows}")
    for length, part in zip(leading, where.rows, strict=False):
        if not isinstance(length, int) or length % where.size(part):
            raise ValueError(
                f"target, {leading}, must be divisible by the {where.size(part)} devices of the axes "
                f"{_names_of(part)}: pad it with ignore_index, and input with any values"
            )
    if classes % where.size(where.classes):
        raise ValueError(
            f"linear_weight's {classes} classes must be divisible by the {where.size(where.classes)} devices of the "
            f"axes {where.classes}: pad it with any rows, and pass vocab_size={arguments.get('vocab_size') or classes}"
        )
    rows = PartitionSpec(*where.rows, *[None] * (len(leading) - len(where.rows)))
    return rows, PartitionSpec(*(where.classes if index == axis else None for index in range(2)))


def _placed(where: Placement, array: Any, spec: PartitionSpec) -> Array:
    """Returns an array that is divided over the explicit axes of the mesh as a PartitionSpec says. `jax.shard_map`
    divides it over the others."""
    array = jnp.asarray(array)
    mesh = get_abstract_mesh() if where.mesh is None else where.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return array

    def explicit(part: Any) -> tuple[str, ...] | None:
        return tuple(name for name in _names_of(part) if kinds[name] == AxisType.Explicit) or None

    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*map(explicit, spec))))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _zeros_beside(axes: tuple[str, ...], into: Array) -> Array:
    """Returns zeros for each device of the axes in place of a grad_into that they share. Its gradient is
    grad_into plus the sum of what the devices added to theirs."""
    return vary_over(jnp.zeros_like(into), {*axes} | varying(into))


_zeros_beside.defvjp(
    lambda axes, into: (_zeros_beside(axes, into), into),
    lambda axes, into, of_devices: (into + lax.psum(of_devices, axes),),
)


def _names_of(part: Any) -> tuple[str, ...]:
    """Returns the names of a part of a PartitionSpec: a name, names or None."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def _is_array(value: Any) -> bool:
    return isinstance(value, (Array, np.ndarray))
