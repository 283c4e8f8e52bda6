"""How a call runs on several devices: `Devices`, the checks of the axes that it names, and sums over these axes.

Axes are those of the mesh of the caller's `jax.shard_map`. With `token_axes` the devices have different tokens: the
denominator of "mean" and the loss are sums over them, and so are the gradients of what the devices share, in float32.
"""

from collections.abc import Container, Sequence
from typing import Any, NamedTuple, cast

from jax import Array, lax

from jax_pallas.primitives import varying
from linear_ce.spec import check_flag


class Devices(NamedTuple):
    """How a call runs on several devices."""

    replicated: bool = False  # where the program divides no arrays, each device may compute the whole call
    token_axes: tuple[str, ...] = ()  # over which the devices have different tokens

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the call names."""
        return self.token_axes

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


def devices_of(replicated: bool, token_axis_names: str | Sequence[str] | None = None) -> Devices:
    """Returns how a call runs on several devices, from the arguments of a public function.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: an axis is not one of a `jax.shard_map` around the call, or JAX does not track which arrays are the
            same on its devices.
    """
    names = (token_axis_names,) if isinstance(token_axis_names, str) else token_axis_names
    if names is not None and not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"token_axis_names must be a name of an axis, names or None, got {token_axis_names!r}")
    devices = Devices(check_flag("replicated", replicated), tuple(dict.fromkeys(names or ())))
    for name in devices.token_axes:
        check_axis("token_axis_names", name)
    return devices


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


def aligned(devices: Devices, arrays: Sequence[Array], shared: Container[int]) -> tuple[Array, ...]:
    """Makes arrays vary over the same axes of the mesh, except those at the places `shared`: the devices of the axes
    that a call names may share them."""
    every = frozenset[Any]().union(*map(varying, arrays))

    def made(index: int, array: Array) -> Array:
        axes = every - frozenset(devices.axes) if index in shared else every
        missing = tuple(sorted(axes - varying(array), key=str))
        return cast(Array, lax.pcast(array, missing, to="varying")) if missing else array

    return tuple(made(index, array) for index, array in enumerate(arrays))
