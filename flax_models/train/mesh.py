"""The mesh of a run: its sizes, what they must divide, and where the training state and the batches are.

`flax_models.model.sharding` has the table of the parameters. An array of the optimizer that has the name and the shape
of a parameter is divided like it; all others, such as Adafactor's averages over rows and columns, are on every device.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_pallas
from flax_models.errors import RunError
from flax_models.model.config import ModelConfig
from flax_models.model.decoder import Decoder
from flax_models.model.parameters import name_of
from flax_models.model.sharding import AXES, CLASSES, ROWS, parameter_specs, row_axes
from jax_pallas import sharded


def mesh_sizes(text: str) -> dict[str, int]:
    """Returns the size of each axis of a mesh, 1 for those that the text does not name.

    Raises:
        ValueError: an axis is unknown or named twice, or a size is no positive integer.

    Example:
        >>> mesh_sizes("data=2,fsdp=4")
        {'data': 2, 'fsdp': 4, 'tensor': 1}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or name not in AXES or name in sizes or not size.isascii() or not size.isdigit() or not int(size):
            raise ValueError(
                f"--mesh must give each of the axes {', '.join(AXES)} at most one positive size, "
                f"such as data=2,fsdp=4, got {text!r}"
            )
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in AXES}


def make_mesh(text: str) -> Mesh:
    """Returns the mesh of all devices with the sizes of `mesh_sizes`.

    Raises:
        RunError: the text is invalid, or the sizes do not multiply to the number of devices.
    """
    try:
        sizes = mesh_sizes(text)
    except ValueError as error:
        raise RunError(str(error)) from None
    devices = jax.devices()
    count = math.prod(sizes.values())
    if count != len(devices):
        raise RunError(
            f"the sizes of --mesh must multiply to {len(devices)}, the number of {devices[0].platform} devices, "
            f"got {text!r} with {count}"
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_sizes(mesh: Mesh, config: ModelConfig, rows: int, option: str) -> None:
    """Raises RunError, which names the size, unless the axes of a mesh divide a model and its batches.

    Args:
        mesh: the mesh.
        config: the model's config; its vocabulary is left to `check_vocabulary`.
        rows: rows of a batch, or of a micro-batch.
        option: what decides their number.
    """
    for name, size, axes in (
        (f"the rows of a batch ({option})", rows, ROWS),
        ("the model's hidden_size", config.hidden_size, ("fsdp",)),
        ("the model's num_heads", config.num_heads, ("tensor",)),
        ("the model's num_kv_heads", config.num_kv_heads, ("tensor",)),
        ("the model's intermediate_size", config.intermediate_size, ("tensor",)),
    ):
        _check_divides(mesh, name, size, axes)


def check_vocabulary(mesh: Mesh, config: ModelConfig, option: str) -> None:
    """Raises RunError, which names the option that decides it, unless the axes of a mesh divide the vocabulary."""
    _check_divides(mesh, f"the vocabulary's size ({option})", config.vocab_size, CLASSES)


def check_mesh(mesh: Mesh) -> None:
    """Raises ValueError, which names the argument, unless a mesh has the axes of the table, and these are automatic."""
    if mesh.axis_names != AXES or any(kind != AxisType.Auto for kind in mesh.axis_types):
        kinds = ", ".join(f"{name} ({kind})" for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise ValueError(f"mesh must have the axes {', '.join(AXES)}, in this order, with AxisType.Auto, got {kinds}")


def _check_divides(mesh: Mesh, name: str, size: int, axes: tuple[str, ...]) -> None:
    count = math.prod(mesh.shape[axis] for axis in axes)
    if size % count:
        sizes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
        raise RunError(f"{name} must be a multiple of {count} with this --mesh ({sizes}), got {size}")


def made_on(mesh: Mesh | None, make: Callable[[], Decoder]) -> Decoder:
    """Returns the decoder that a function makes, with each parameter created where the table says.

    Args:
        mesh: the mesh; None: the default device.
        make: returns a decoder; it is traced if there is a mesh.
    """
    if mesh is None:
        return make()
    graph, shapes = nnx.split(nnx.eval_shape(make))
    made = jax.jit(lambda: nnx.split(make())[1], out_shardings=_placed(mesh, parameter_specs(shapes)))
    return nnx.merge(graph, made())


def context_of(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Returns the context in which a model is divided over a mesh, if there is one."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def loss_on(
    mesh: Mesh | None,
    name: Literal["linear_cross_entropy", "linear_log_probs", "linear_token_loss"] = "linear_cross_entropy",
) -> Callable[..., Any]:
    """Returns a function of `jax_pallas`, or that of `jax_pallas.sharded` for a mesh.

    Args:
        mesh: the mesh; None: one device.
        name: name of the function.
    """
    return getattr(jax_pallas, name) if mesh is None else partial(getattr(sharded, name), **loss_axes(mesh))


def state_placements(mesh: Mesh | None, state: Any) -> Any:
    """Returns the sharding of each array of a training state.

    Args:
        mesh: the mesh; None: the result is None too.
        state: a tree of arrays or shapes, such as `flax_models.train.step.TrainState`, with parameters in `params`.
    """
    if mesh is None:
        return None
    specs = jax.tree.leaves(parameter_specs(state.params), is_leaf=lambda spec: isinstance(spec, P))
    leaves = jax.tree_util.tree_flatten_with_path(state.params)[0]
    found = {name_of(path): (leaf.shape, spec) for (path, leaf), spec in zip(leaves, specs, strict=True)}

    def spec_at(path: tuple[Any, ...], leaf: Any) -> P:
        words = name_of(path).split(".")
        for first in range(len(words)):
            shape, spec = found.get(".".join(words[first:]), (None, P()))
            if shape == leaf.shape:
                return spec
        return P()

    # The names of the parameters are among those of the state, so one rule is enough.
    return _placed(mesh, jax.tree_util.tree_map_with_path(spec_at, state))


def with_placements(shapes: Any, placements: Any) -> Any:
    """Returns the shapes of arrays with their shardings."""
    return jax.tree.map(
        lambda leaf, placed: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), shapes, placements
    )


def _placed(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))


def batch_placement(mesh: Mesh, rows: int) -> NamedSharding:
    """Returns the sharding of the arrays of a batch."""
    return NamedSharding(mesh, P(row_axes(mesh, rows)))


def put_batch[T](mesh: Mesh | None, batch: T) -> T:
    """Puts a batch on the devices. Every process has the whole batch, and each device gets its rows.

    Args:
        mesh: the mesh; None: the default device.
        batch: a tree of NumPy arrays with the same number of rows, such as `flax_models.data.batches.Batch`.
    """
    if mesh is None:
        return jax.device_put(batch)

    def put(array: np.ndarray) -> Any:
        sharding = batch_placement(mesh, len(array))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, batch)


def parameter_shards(mesh: Mesh | None) -> int:
    """Returns the number of devices over which the matrices of a model are divided."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in CLASSES)


def loss_axes(mesh: Mesh) -> dict[str, Any]:
    """Returns the arguments of `jax_pallas.sharded` for a mesh. An axis of one device divides no classes."""
    vocab, fsdp = (name if mesh.shape[name] > 1 else None for name in CLASSES)
    return {"mesh": mesh, "batch_axis_names": ROWS, "vocab_axis_name": vocab, "fsdp_axis_name": fsdp}


def loss_of_device(mesh: Mesh, tokens: int, classes: int) -> tuple[int, int, tuple[str, ...] | None]:
    """Returns the shapes of the loss that a device computes, for `jax_pallas.explain`.

    Args:
        mesh: the mesh.
        tokens: of a micro-batch.
        classes: V.

    Returns:
        (tokens, classes, the axes that divide the classes or None). If the tokens of all devices along fsdp are not
        fewer than the classes, these devices gather the head.
    """
    of_device = tokens // math.prod(mesh.shape[name] for name in ROWS)
    fsdp = mesh.shape["fsdp"]
    divided = ("tensor",) if of_device * fsdp >= classes else CLASSES
    axes = tuple(name for name in divided if mesh.shape[name] > 1)
    return of_device, classes // math.prod(mesh.shape[name] for name in axes), axes or None
