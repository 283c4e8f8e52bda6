"""How a decoder's parameters and activations are divided over the devices of a mesh: one table, and where it applies.

A mesh has three axes. `data` and `fsdp` divide the rows of a batch, `fsdp` and `tensor` the parameters:

    fsdp      the hidden size of each matrix. A device gathers the matrices of one block at a time, for that block.
    tensor    the heads and the width of the feed-forward layer: each device computes its part of a block.
    both      the vocabulary, of the embedding and of the head. A device looks up the rows of the embedding that it has,
              for the tokens of all devices, or gathers the embedding if these tokens are not fewer than its rows. The
              loss takes the head as it is.

The functions of this module apply to the mesh of the context, `jax.set_mesh`, if that has these three axes. Without it
they return their arguments, and a program is that of one device. `AxisType.Auto` is used instead of explicit axes,
which would need a sharding for every operation of the model in which axes of both operands meet.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from flax_models.model.parameters import is_stacked, name_of

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")  # the axes that divide the rows of a batch
CLASSES = ("tensor", "fsdp")  # the axes that divide the vocabulary, in the order of `jax_pallas.sharded`

# The axes of a parameter's dimensions, without that of the layers, by the end of its name. All other parameters, the
# norms, are on every device.
TABLE: dict[str, tuple[Any, ...]] = {
    "embedding": (CLASSES, None),
    "head": (CLASSES, None),
    **{
        f"{projection}.{name}": axes
        for projection in ("query", "key", "value", "gate", "up")
        for name, axes in {
            "kernel": ("fsdp", "tensor"),
            "bias": ("tensor",),
            "lora_a": ("fsdp", None),
            "lora_b": (None, "tensor"),
            "lora_magnitude": ("tensor",),
        }.items()
    },
    **{
        f"{projection}.{name}": axes
        for projection in ("out", "down")
        for name, axes in {"kernel": ("tensor", "fsdp"), "lora_a": ("tensor", None), "lora_b": (None, "fsdp")}.items()
    },
}


def spec_of(name: str, *, stacked: bool) -> P:
    """Returns how a parameter is divided.

    Args:
        name: name of the parameter, such as "blocks.attention.query.kernel".
        stacked: whether its first axis is that of the layers.

    Example:
        >>> spec_of("blocks.attention.query.kernel", stacked=True)
        PartitionSpec(None, 'fsdp', 'tensor')
    """
    axes = TABLE.get(".".join(name.split(".")[-2:]), ())
    return P(*(None,) * (stacked and bool(axes)), *axes)


def parameter_specs(params: Any) -> Any:
    """Returns how each parameter of a tree of a decoder's parameters is divided."""
    return jax.tree_util.tree_map_with_path(lambda path, _: spec_of(name_of(path), stacked=is_stacked(path)), params)


def created_like(name: str, make: Callable[..., jax.Array], *arrays: jax.Array, other: jax.Array) -> jax.Array:
    """Returns make(*arrays), a new parameter of all layers, created on the devices of another parameter.

    Args:
        name: name of the new parameter. If the other one is divided over a mesh, the table says how it is divided.
        make: returns its values.
        arrays: arguments of `make`.
        other: the other parameter.
    """
    placed = None if isinstance(other, Tracer) else other.sharding
    if not isinstance(placed, NamedSharding) or placed.mesh.axis_names != AXES:
        return make(*arrays)
    return jax.jit(make, out_shardings=NamedSharding(placed.mesh, spec_of(name, stacked=True)))(*arrays)


def _mesh() -> AbstractMesh | None:
    """Returns the mesh of the context; None if it has other axes, or explicit ones, or a `jax.shard_map` maps them."""
    mesh = get_abstract_mesh()
    return mesh if mesh.axis_names == AXES and {*mesh.axis_types} == {AxisType.Auto} else None


def row_axes(mesh: Mesh | AbstractMesh, rows: int) -> tuple[str, ...] | None:
    """Returns the axes that divide the rows of a batch; None if these do not, as with the one row of a sample."""
    return None if rows % math.prod(mesh.shape[name] for name in ROWS) else ROWS


def by_rows(x: jax.Array, *, axis: int = 0) -> jax.Array:
    """Divides an array by its rows, the axis of a batch, and by nothing else."""
    mesh = _mesh()
    if mesh is None:
        return x
    return lax.with_sharding_constraint(x, P(*(None,) * axis, row_axes(mesh, x.shape[axis])))


def gathered(params: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """Gathers the parameters of one layer over fsdp, matrices in the dtype of the computation.

    The gradient is divided as the parameter again, so its sum over devices is a reduce-scatter.
    """
    if _mesh() is None:
        return params

    def gather(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        spec = spec_of(name_of(path), stacked=False)
        if "fsdp" not in spec:
            return leaf
        return _gather(spec, P(*(None if axis == "fsdp" else axis for axis in spec)), leaf.astype(dtype))

    return jax.tree_util.tree_map_with_path(gather, params)


def _constrain(divided: P, whole: P, leaf: jax.Array) -> jax.Array:
    # The first constraint makes XLA gather what was cast, and not cast what was gathered.
    return lax.with_sharding_constraint(lax.with_sharding_constraint(leaf, divided), whole)


_gather = jax.custom_vjp(_constrain, nondiff_argnums=(0, 1))
_gather.defvjp(
    # Not by _gather, whose result a policy of jax.checkpoint would see as that of a custom_vjp_call.
    lambda divided, whole, leaf: (_constrain(divided, whole, leaf), None),
    lambda divided, whole, _, gradient: (lax.with_sharding_constraint(gradient, divided),),
)


def saves_all_but_gathered(primitive: Any, *avals: Any, **parameters: Any) -> bool:
    """Policy of jax.checkpoint for a loop over layers: the backward pass casts and gathers the parameters again.

    Casts of activations are repeated too. If casts were saved, XLA would save those of parameters as they are gathered.

    It is not for layers that are compiled separately. There XLA would use what the forward pass has gathered, unless
    barriers hide the saved results. With barriers it writes every one of them, which takes twice the memory.
    """
    return str(primitive) not in ("sharding_constraint", "convert_element_type")


def gathers() -> bool:
    """Returns whether `gathered` gathers anything."""
    mesh = _mesh()
    return mesh is not None and mesh.shape["fsdp"] > 1


def look_up(embedding: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the rows (B, T, D) of an embedding (V, D) for tokens (B, T), in `dtype`; NaN for tokens of V or more.

    On a mesh, the devices along fsdp gather the smaller of two, as the loss does: their tokens, if these are fewer than
    V, or their rows of the embedding. A device then looks up what is among its rows. Exactly one device has the row of
    a token, so the sum of what they found is exact in any dtype. The gradient is summed in the dtype of the embedding.
    """
    mesh = _mesh()
    if mesh is None:
        return jnp.take(embedding, tokens, axis=0).astype(dtype)
    axes, classes = row_axes(mesh, tokens.shape[0]), embedding.shape[0]
    gathers_rows = axes is not None and tokens.size // mesh.shape["data"] >= classes
    gathers_tokens = axes is not None and not gathers_rows

    def of_device(rows: jax.Array, tokens: jax.Array) -> jax.Array:
        count = rows.shape[0] * (mesh.shape["fsdp"] if gathers_rows else 1)
        if gathers_tokens:
            tokens = lax.all_gather(tokens, "fsdp", tiled=True)
        index = tokens - lax.axis_index("tensor" if gathers_rows else CLASSES) * count
        here = (index >= 0) & (index < count)
        index = jnp.where(here, index, 0)
        if gathers_rows:  # varying over data too, so that the gradient is summed over it
            found: Any = _gathered_rows(lax.pcast(rows, "data", to="varying"), index, dtype)
        else:
            found = jnp.take(rows, index, axis=0).astype(dtype)
        found = lax.psum(jnp.where(here[..., None], found, 0), CLASSES if axes is None else "tensor")
        return lax.psum_scatter(found, "fsdp", scatter_dimension=0, tiled=True) if gathers_tokens else found

    found = jax.shard_map(of_device, in_specs=(P(CLASSES), P(axes)), out_specs=P(axes))(embedding, tokens)
    return jnp.where((tokens < classes)[..., None], found, jnp.nan)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gathered_rows(rows: jax.Array, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the rows of an embedding whose parts the devices along fsdp gather, in `dtype`."""
    return jnp.take(lax.all_gather(rows.astype(dtype), "fsdp", tiled=True), index, axis=0)


def _gathered_rows_backward(
    dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], d_found: jax.Array
) -> tuple[jax.Array, None]:
    index, none = saved
    shape = none.shape[0] * lax.axis_size("fsdp"), d_found.shape[-1]
    d_rows = jnp.zeros(shape, none.dtype).at[index].add(d_found.astype(none.dtype))
    return lax.psum_scatter(d_rows, "fsdp", scatter_dimension=0, tiled=True), None


_gathered_rows.defvjp(
    # Of the rows, only their number and dtype are saved.
    lambda rows, index, dtype: (_gathered_rows(rows, index, dtype), (index, rows[:, :0])),
    _gathered_rows_backward,
)


def by_heads(function: Callable[..., jax.Array], *heads: jax.Array, rows: Any, shared: Any) -> jax.Array:
    """Returns function(*heads, rows, shared), of which each device computes its rows and heads.

    Args:
        function: returns an array (B, T, heads, H).
        heads: (B, T, heads, H) each.
        rows: a tree of arrays (B, ...).
        shared: a tree of arrays that are on all devices, without gradients.
    """
    mesh = _mesh()
    if mesh is None:
        return function(*heads, rows, shared)
    axes = row_axes(mesh, heads[0].shape[0])
    divided = P(axes, None, "tensor")
    mapped = jax.shard_map(
        function,
        in_specs=(*(divided,) * len(heads), P(axes), P()),
        out_specs=divided,
        check_vma=False,  # kernels of attention have no types of varying axes
    )
    return mapped(*heads, rows, shared)
