"""How a call runs on several devices: `Devices`, the checks of the axes that it names, and sums over these axes.

Axes are those of the mesh of the caller's `jax.shard_map`. With `token_axes` the devices have different tokens: the
denominator of "mean" and the loss are sums over them, and so are the gradients of what the devices share, in float32.
With `vocab_axis` the devices have the same tokens and different classes of the head: `vocab_shard.py`.
"""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jax_pallas.primitives import varying
from linear_ce.spec import check_choice, check_flag


class Devices(NamedTuple):
    """How a call runs on several devices."""

    replicated: bool = False  # where the program divides no arrays, each device may compute the whole call
    token_axes: tuple[str, ...] = ()  # over which the devices have different tokens
    vocab_axis: str | None = None  # over which the devices have different classes of the head
    shards: int = 1  # devices of `vocab_axis`
    reduce_dtype: str = "float32"  # of the sums of d_input over the shards

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the call names."""
        return self.token_axes if self.vocab_axis is None else (*self.token_axes, self.vocab_axis)

    def sum(self, array: Array) -> Array:
        """Returns the sum over the devices that have different tokens."""
        return lax.psum(array, self.token_axes) if self.token_axes else array

    def max(self, array: Array) -> Array:
        """Returns the maximum over the devices that have different tokens."""
        return lax.pmax(array, self.token_axes) if self.token_axes else array

    def sum_of_shared(self, array: Array, shared: Array) -> Array:
        """Returns the sum of a gradient by an array over the devices that share this array."""
        axes = tuple(axis for axis in self.token_axes if axis not in varying(shared))
        return lax.psum(array, axes) if axes else array


ONE_DEVICE = Devices()


REDUCE_DTYPES = ("float32", "bfloat16")


def devices_of(
    replicated: bool, token_axis_names: str | Sequence[str] | None, vocab_axis_name: str | None, reduce_dtype: DTypeLike
) -> Devices:
    """Returns how a call runs on several devices, from the arguments of a public function.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: an axis is not one of a `jax.shard_map` around the call, or JAX does not track which arrays are the
            same on its devices.
    """
    names = (token_axis_names,) if isinstance(token_axis_names, str) else token_axis_names
    if names is not None and not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"token_axis_names must be a name of an axis, names or None, got {token_axis_names!r}")
    if not (vocab_axis_name is None or isinstance(vocab_axis_name, str)):
        raise TypeError(f"vocab_axis_name must be a name of an axis or None, got {vocab_axis_name!r}")
    devices = Devices(check_flag("replicated", replicated), tuple(dict.fromkeys(names or ())))
    for name in devices.token_axes:
        check_axis("token_axis_names", name)
    dtype = check_choice("reduce_dtype", jnp.dtype(reduce_dtype).name, REDUCE_DTYPES)
    if vocab_axis_name is None:
        if dtype != "float32":
            raise ValueError(f"reduce_dtype must be float32 without vocab_axis_name, got {dtype}")
        return devices
    check_axis("vocab_axis_name", vocab_axis_name)
    if vocab_axis_name in devices.token_axes:
        raise ValueError(f"vocab_axis_name must not be one of token_axis_names, got {vocab_axis_name!r}")
    return devices._replace(vocab_axis=vocab_axis_name, shards=lax.axis_size(vocab_axis_name), reduce_dtype=dtype)


USUAL_SHARDS = 8  # devices of a host


def shards_of(vocab_axis_name: str) -> int:
    """Returns among how many devices an axis divides the vocabulary, or USUAL_SHARDS where no `jax.shard_map` is around
    the call."""
    try:
        return lax.axis_size(vocab_axis_name)
    except NameError:
        return USUAL_SHARDS


def check_axis(argument: str, name: str) -> None:
    """Raises ValueError if `name` is no axis that a `jax.shard_map` around the call maps, with check_vma=True."""
    try:
        index = lax.axis_index(name)
    except NameError:
        raise ValueError(
            f"{argument} must name axes of the mesh of a jax.shard_map around the call, got {name!r}, which is none"
        ) from None
    if name not in varying(index):
        raise ValueError(
            f"{argument} needs jax.shard_map with check_vma=True, its default: otherwise JAX does not know which "
            f"arrays the devices of the axis {name!r} share, and sums gradients twice or not at all"
        )


def check_tokens(devices: Devices, named: dict[str, Any]) -> None:
    """Raises ValueError if devices that should have different tokens share them, or do not share the normalizer."""
    for name in devices.token_axes:
        if name not in varying(named["input"]):
            raise ValueError(
                f"input must vary over the axis {name!r} of token_axis_names: the devices of this axis have the same "
                "tokens, which would count several times"
            )
        if named["normalizer"] is not None and name in varying(named["normalizer"]):
            raise ValueError(
                f"normalizer must not vary over the axis {name!r} of token_axis_names: it is the denominator of all "
                "devices, for example jax.lax.psum of their counts"
            )


def check_shards(devices: Devices, named: dict[str, Any]) -> None:
    """Raises ValueError if the devices that divide the vocabulary share an array of the head, or do not share
    another."""
    axis = devices.vocab_axis
    for name, array in named.items():
        if array is None or axis is None:
            continue
        if name in OF_HEAD and axis not in varying(array):
            raise ValueError(
                f"{name} must vary over the axis {axis!r} of vocab_axis_name: each device passes its own shard"
            )
        if name not in OF_HEAD and axis in varying(array):
            raise ValueError(
                f"{name} must not vary over the axis {axis!r} of vocab_axis_name, but be the same on all its devices"
            )


OF_HEAD = ("linear_weight", "linear_bias", "grad_into")  # the arrays that each device has for its classes


def aligned(
    devices: Devices, arrays: Sequence[Array], shared: Container[int], of_head: Container[int]
) -> tuple[Array, ...]:
    """Makes arrays vary over the same axes of the mesh. The devices of `token_axes` may share those at the places
    `shared`. Only those at the places `of_head` vary over `vocab_axis`."""
    every = frozenset[Any]().union(*map(varying, arrays))

    def made(index: int, array: Array) -> Array:
        axes = every - frozenset(devices.token_axes) if index in shared else every
        axes = axes if index in of_head else axes - {devices.vocab_axis}
        missing = tuple(sorted(axes - varying(array), key=str))
        return cast(Array, lax.pcast(array, missing, to="varying")) if missing else array

    return tuple(made(index, array) for index, array in enumerate(arrays))
