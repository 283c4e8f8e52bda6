"""How a call runs on several devices: `Devices`, the checks of the axes that it names, and sums over these axes.

Axes are those of the mesh of the caller's `jax.shard_map`. With `token_axes` the devices have different tokens: the
denominator of "mean" and the loss are sums over them, and so are the gradients of what the devices share, in float32.
With `vocab_axes` the devices have the same tokens and different classes of the head: `vocab_shard.py`. Devices that
have different tokens and different classes gather one or the other first: `gathering.py`.
"""

import functools
import inspect
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jax_pallas.primitives import usual_promotion, vary_over, varying
from jax_pallas.slicing import is_symbolic
from linear_ce.spec import check_choice, check_flag


class Devices(NamedTuple):
    """How a call runs on several devices."""

    replicated: bool = False  # where the program divides no arrays, each device may compute the whole call
    token_axes: tuple[str, ...] = ()  # over which the devices have different tokens
    vocab_axes: tuple[str, ...] = ()  # over which the devices have different classes of the head, in order
    shards: int = 1  # devices of `vocab_axes`
    reduce_dtype: str = "float32"  # of the sums of d_input over the shards
    gather: str | None = None  # what is gathered over `gather_axes`: "tokens" or "head"
    # The axes of `token_axes` whose devices also have different classes. With "tokens" they are in `vocab_axes` too,
    # and with "head" not. `token_axes` has them no longer where all numbers of the tokens but input are gathered.
    gather_axes: tuple[str, ...] = ()
    parts: int = 1  # of the head on all devices, also those that are gathered

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the call names."""
        return tuple(dict.fromkeys((*self.token_axes, *self.vocab_axes)))

    @property
    def token_parts(self) -> int:
        """Among how many devices the rows of input are divided, of which all have the other numbers of the tokens."""
        return lax.axis_size(self.gather_axes) if self.gather == "tokens" and self.gather_axes else 1

    @property
    def sums_in_float32(self) -> bool:
        """Whether the gradients of the head are sums over devices, or over the tokens of several devices. They are
        rounded when they are complete."""
        return bool(self.token_axes) or self.gather == "tokens"

    @property
    def shared_vocab_axes(self) -> frozenset[str]:
        """The axes over which the devices have different classes and the same tokens."""
        return frozenset(self.vocab_axes) - frozenset(self.gather_axes)

    def sum(self, array: Array) -> Array:
        """Returns the sum over the devices that have different tokens."""
        return lax.psum(array, self.token_axes) if self.token_axes else array

    def max(self, array: Array) -> Array:
        """Returns the maximum over the devices that have different tokens."""
        return lax.pmax(array, self.token_axes) if self.token_axes else array

    def sum_of_shared(self, array: Array, shared: Array) -> Array:
        """Returns the sum of an array's gradient over the devices that share this array."""
        axes = tuple(axis for axis in self.token_axes if axis not in varying(shared))
        return lax.psum(array, axes) if axes else array

    def sum_of_bias(self, array: Array, bias: Array) -> Array:
        """Returns the sum of the bias's gradient over the devices that share it. If the bias was gathered, only for the
        classes of this device."""
        if self.gather == "head":
            array = lax.psum_scatter(array, self.gather_axes, tiled=True)
        return self.sum_of_shared(array, bias)


ONE_DEVICE = Devices()


REDUCE_DTYPES = ("float32", "bfloat16")
GATHERS = ("tokens", "head")


def is_divided(array: Any) -> bool:
    """Returns whether the type of an array says that devices of explicit axes of a mesh hold parts of it."""
    return isinstance(array, Array) and any(part is not None for part in jax.typeof(array).sharding.spec)


def divides_explicit_axes(function: Callable[..., Any]) -> Any:
    """Makes a public function run within `jax.shard_map` where the types of its arrays say how they are divided:
    `sharded.of_types`. It has `usual_promotion`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    @usual_promotion
    def call(*arguments: Any, **options: Any) -> Any:
        named = options.get("token_axis_names"), options.get("vocab_axis_name")
        if named != (None, None) or not any(map(is_divided, (*arguments, *options.values()))):
            return function(*arguments, **options)
        from jax_pallas import sharded

        return sharded.of_types(call, dict(signature.bind(*arguments, **options).arguments))

    return call


def devices_of(
    replicated: bool,
    token_axis_names: str | Sequence[str] | None,
    vocab_axis_name: str | Sequence[str] | None,
    reduce_dtype: DTypeLike,
    gather: str | None,
) -> Devices:
    """Returns how a call runs on several devices, from the arguments of a public function. `with_gather` completes it.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: an axis is not one of a `jax.shard_map` around the call, or JAX does not track which arrays are the
            same on its devices.
    """
    token_axes = axis_names("token_axis_names", token_axis_names)
    vocab_axes = axis_names("vocab_axis_name", vocab_axis_name)
    devices = Devices(check_flag("replicated", replicated), token_axes)
    for name in token_axes:
        check_axis("token_axis_names", name)
    try:
        dtype = None if reduce_dtype is None else jnp.dtype(reduce_dtype).name  # the dtype of None is float64
    except TypeError:  # no name of a dtype, or no dtype
        dtype = reduce_dtype
    dtype = check_choice("reduce_dtype", dtype, REDUCE_DTYPES)
    if gather not in (None, *GATHERS):
        raise ValueError(f'gather must be "tokens", "head" or None, got {gather!r}')
    if not vocab_axes:
        if dtype != "float32":
            raise ValueError(f"reduce_dtype must be float32 without vocab_axis_name, got {dtype}")
        if gather is not None:
            raise ValueError(f"gather must be None without vocab_axis_name, got {gather!r}")
        return devices
    for name in vocab_axes:
        check_axis("vocab_axis_name", name)
    parts = lax.axis_size(vocab_axes)
    return devices._replace(vocab_axes=vocab_axes, shards=parts, parts=parts, reduce_dtype=dtype, gather=gather)


def axis_names(argument: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if names is not None and not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"{argument} must be a name of an axis, names or None, got {given!r}")
    return tuple(dict.fromkeys(names or ()))


def with_gather(devices: Devices, input: Array, classes: int) -> Devices:
    """Returns devices with what they gather: `gather`, or tokens where all devices that gather have fewer of them than
    the head has classes.

    Args:
        input: (..., D) of a device.
        classes: rows of the head on all devices.

    Raises:
        ValueError: `gather` is given, and the devices of no axis of the vocabulary have different tokens; or they are
            to gather heads of which each has rows between those of others.
    """
    axes, gather = devices.vocab_axes, devices.gather
    if gather is None:
        gathers = tuple(name for name in axes if name in devices.token_axes)
    else:
        gathers = tuple(name for name in axes if name in devices.token_axes or name in varying(input))
        if not gathers:
            raise ValueError(
                f"gather must be None where the devices of vocab_axis_name have the same tokens, got {gather!r}: input "
                f"varies over none of its axes {axes}"
            )
    if not gathers:
        return devices
    number = lax.axis_size(gathers)
    if gather is None:
        tokens = math.prod(input.shape[:-1])
        few = not is_symbolic(tokens) and tokens * number < classes
        gather = "tokens" if few else "head"
    token_axes = tuple(dict.fromkeys((*devices.token_axes, *gathers)))
    devices = devices._replace(gather=gather, gather_axes=gathers, token_axes=token_axes)
    if gather == "tokens":
        return devices
    others = axes[: len(axes) - len(gathers)]
    if others + gathers != axes:
        raise ValueError(
            f"vocab_axis_name must end in the axes {gathers} whose devices have different tokens, to gather the head "
            f"over these, got {axes}"
        )
    return devices._replace(vocab_axes=others, shards=devices.parts // number)


def check_unsharded(named: dict[str, Any]) -> None:
    """Raises ValueError where the types of arrays say that devices hold parts of them. A plain call with such arrays
    runs `sharded.of_types` instead."""
    for name, array in named.items():
        if is_divided(array):
            raise ValueError(
                f"{name} must not be sharded over explicit axes of a mesh within a jax.shard_map of other axes, got "
                f"{jax.typeof(array).sharding.spec}: map these axes too"
            )


USUAL_SHARDS = 8  # devices of a host


def shards_of(vocab_axes: tuple[str, ...]) -> int:
    """Returns among how many devices axes divide the vocabulary, or USUAL_SHARDS where no `jax.shard_map` is around
    the call."""
    try:
        return lax.axis_size(vocab_axes)
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


def check_shards(devices: Devices, named: dict[str, Any], *, rows: bool = False) -> None:
    """Raises ValueError if the devices that divide the vocabulary share an array of the head, or do not share
    another. `rows`: all arrays have a number for each token, as those of OF_TOKENS have."""
    for name, array in named.items():
        if array is None:
            continue
        if name in OF_HEAD:
            missing = [axis for axis in (*devices.vocab_axes, *devices.gather_axes) if axis not in varying(array)]
            if missing:
                raise ValueError(
                    f"{name} must vary over the axis {missing[0]!r} of vocab_axis_name: each device passes its own "
                    "shard"
                )
            continue
        of_tokens = rows or name in OF_TOKENS
        for axis in devices.vocab_axes:
            if axis in varying(array) and not (of_tokens and axis in devices.gather_axes):
                raise ValueError(
                    f"{name} must not vary over the axis {axis!r} of vocab_axis_name, but be the same on all its "
                    "devices" + (". If the devices have different tokens, pass gather=" if of_tokens else "")
                )


OF_HEAD = ("linear_weight", "linear_bias", "grad_into")  # the arrays that each device has for its classes
OF_TOKENS = ("input", "target", "token_weight")


def aligned(
    devices: Devices, arrays: Sequence[Array], shared: Container[int], of_head: Container[int]
) -> tuple[Array, ...]:
    """Makes arrays vary over the same axes of the mesh. The devices of `token_axes` may share those at the places
    `shared`. Only those at the places `of_head` vary over the axes whose devices have the same tokens and different
    classes."""
    every = frozenset[Any]().union(*map(varying, arrays))

    def made(index: int, array: Array) -> Array:
        axes = every - frozenset(devices.token_axes) if index in shared else every
        axes = axes if index in of_head else axes - devices.shared_vocab_axes
        return vary_over(array, axes)

    return tuple(made(index, array) for index, array in enumerate(arrays))
