"""The arguments of the public functions: their checks, and a call with leading axes made one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_pallas import launch, row_math
from jax_pallas.devices import Devices, check_shards, check_tokens, check_unsharded, with_gather
from jax_pallas.gathering import whole_head
from jax_pallas.launch import DeviceInfo
from jax_pallas.options import Options
from jax_pallas.primitives import varying
from jax_pallas.token_losses import Named
from linear_ce.spec import (
    ArrayInfo,
    LossSpec,
    check_arrays,
    check_batch_invariant,
    check_choice,
    check_memory_budget,
    check_normalizer,
    check_saved_budget,
)
from linear_ce.statistics import BY_ROW

IMPLEMENTATIONS = (*launch.NAMES, "chunked")
ARRAYS = ("input", "linear_weight", "target", "linear_bias", "weight", "token_weight", "grad_into")


class Implementation(NamedTuple):
    """Which implementation a call runs, and why."""

    name: str
    reason: str


def choose(
    input: Array,
    linear_weight: Any,
    vocab_axis: int,
    implementation: str | None,
    gpu: DeviceInfo | None,
) -> tuple[Implementation, DeviceInfo]:
    """Returns the implementation of a call and why it is that, and the device: `gpu`, or input's if None."""
    platform = launch.traced_platform(input) if gpu is None else gpu.type
    capability = launch.known_capability(platform) if gpu is None else divmod(gpu.capability, 10)
    symbolic = launch.symbolic_limits(input.shape)
    if implementation is not None:
        _check_implementation(implementation, input, linear_weight, vocab_axis)
        if (obstacle := launch.device_limits(implementation, platform, capability)) is not None:
            raise ValueError(f"implementation {implementation!r} cannot serve this call: {obstacle}")
        chosen = Implementation(implementation, "asked for by name")
    elif symbolic is not None:
        chosen = Implementation("chunked", symbolic)
    else:
        shape = _shape(input, linear_weight, vocab_axis)
        chosen = Implementation(*launch.choose(platform, capability, *shape))
    return chosen, launch.device_info(chosen.name, platform) if gpu is None else gpu


def _shape(input: Array, linear_weight: Any, vocab_axis: int) -> tuple[Any, int, int, int]:
    return input.dtype, input.shape[-1], linear_weight.shape[vocab_axis], vocab_axis


def _check_implementation(implementation: str, input: Array, linear_weight: Any, vocab_axis: int) -> None:
    """Raises ValueError if it is no implementation, or cannot serve these shapes and dtypes."""
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    obstacle = launch.limits(implementation, *_shape(input, linear_weight, vocab_axis))
    if implementation != "chunked":
        obstacle = launch.symbolic_limits(input.shape) or obstacle
    if obstacle is not None:
        raise ValueError(f"implementation {implementation!r} cannot serve this call: {obstacle}")


class Call(NamedTuple):
    """One call, checked and flattened."""

    options: Options
    arrays: tuple[Array, ...]
    row_weight: Array  # (N,) float32
    n_valid: Array  # ()
    leading: tuple[int, ...]  # target's shape
    grad_into: Array | None

    @property
    def tokens(self) -> int:
        return self.row_weight.shape[0]


def prepare(
    spec: LossSpec,
    arrays: tuple[Any, ...],
    vocab_axis: int,
    memory_budget: int | None,
    implementation: str | None,
    batch_invariant: bool,
    saved_budget: int,
    devices: Devices,
    *,
    statistics: int,
) -> Call:
    """Checks every argument, flattens the leading axes, and folds what weighs a row into one vector.

    The arrays are those of ARRAYS and a normalizer.
    """
    *present, normalizer = arrays
    named: dict[str, Any] = dict(zip(ARRAYS, present, strict=True))
    into, precision = named["grad_into"] is not None, spec.head_precision
    saved_budget = check_saved_budget(saved_budget, spec.reduction, grad_into=into, head_precision=precision)
    check_are_arrays(named)
    normalizer = as_number(normalizer)
    number = isinstance(normalizer, (int, float)) and not isinstance(normalizer, bool)
    if not (normalizer is None or number or isinstance(normalizer, (Array, np.ndarray))):
        raise TypeError(f"normalizer must be a number, a scalar array or None, got {type(normalizer).__name__}")
    named["normalizer"] = jnp.float32(check_normalizer(cast(float, normalizer))) if number else normalizer
    infos = {name: ArrayInfo(tuple(a.shape), str(a.dtype)) for name, a in named.items() if a is not None}
    _check_arrays(spec, vocab_axis, devices, infos)
    named["target"], ignore_index = signed_target(named["target"], spec.ignore_index)
    spec = replace(spec, ignore_index=ignore_index)
    named = {name: jnp.asarray(array) if isinstance(array, np.ndarray) else array for name, array in named.items()}
    check_unsharded(named)
    _check_varying(spec, **named)
    rows = devices.parts * named["linear_weight"].shape[vocab_axis]
    devices = with_gather(devices, named["input"], rows)
    check_tokens(devices, named)
    check_shards(devices, named)
    for name in ("weight", "token_weight", "normalizer"):
        if named[name] is not None:
            named[name] = _undifferentiated(name, named[name])
    head = whole_head(devices, named["linear_weight"], vocab_axis)
    launch.check_sizes(named["input"].shape, head.shape)
    reason: str | None = "asked for by name"
    if implementation is not None:
        _check_implementation(implementation, named["input"], head, vocab_axis)
    else:
        reason = launch.symbolic_limits(named["input"].shape)
        implementation = None if reason is None else "chunked"
    check_batch_invariant(
        batch_invariant,
        label_smoothing=spec.label_smoothing,
        saved_budget=saved_budget,
        implementation=implementation,
        reason=reason,
    )
    saved_as = None
    if saved_budget:  # a trace has the shapes of what is saved, so it must know which implementation saves it
        saved_as = implementation or choose(named["input"], head, vocab_axis, None, None)[0].name
    classes = spec.classes(rows)
    flat_target = named["target"].reshape(-1)
    class_weight = None if named["weight"] is None else named["weight"][:classes].astype(jnp.float32)
    if class_weight is not None and devices.vocab_axes:  # each device reads those of its rows
        class_weight = jnp.pad(class_weight, (0, rows - classes))
    flat_token_weight = None if named["token_weight"] is None else named["token_weight"].reshape(-1)
    row_weight, n_valid = row_math.row_weights(
        spec, flat_target, class_weight, flat_token_weight, named["normalizer"], classes, devices
    )
    options = Options(
        spec=spec,
        classes=classes,
        vocab_axis=vocab_axis,
        memory_budget=check_memory_budget(memory_budget),
        implementation=implementation,
        has_bias=named["linear_bias"] is not None,
        has_class_weight=class_weight is not None,
        statistics=statistics | BY_ROW if batch_invariant else statistics,
        saved_budget=saved_budget,
        saved_as=saved_as,
        has_grad_into=named["grad_into"] is not None,
        batch_invariant=batch_invariant,
        devices=devices,
    )
    flat_arrays = options.arrays(
        input=named["input"].reshape(-1, named["input"].shape[-1]),
        linear_weight=named["linear_weight"],
        target=flat_target,
        row_weight=row_weight,
        linear_bias=named["linear_bias"],
        class_weight=class_weight,
        grad_into=named["grad_into"],
    )
    return Call(options, flat_arrays, row_weight, n_valid, tuple(named["target"].shape), named["grad_into"])


# Attributes of layers whose parameter may be a head, and how a call takes it.
LAYERS = {
    "kernel": "pass jnp.asarray(linear_weight.kernel) with vocab_axis=1, and a bias as linear_bias",
    "embedding": "pass jnp.asarray(linear_weight.embedding)",
}


def check_are_arrays(named: dict[str, Any], *kinds: type) -> None:
    """Raises TypeError if one of ARRAYS is not an array, or of another of `kinds`."""
    for name, array in named.items():
        optional = name not in ("input", "linear_weight", "target")
        if not (isinstance(array, (Array, np.ndarray, *kinds)) or (array is None and optional)):
            remedies = [f"pass jnp.asarray({name})"] if hasattr(array, "__jax_array__") else []  # an nnx.Param
            if name == "linear_weight":
                remedies += [remedy for attribute, remedy in LAYERS.items() if hasattr(array, attribute)]
            raise TypeError(
                f"{name} must be an array{' or None' if optional else ''}, got {type(array).__name__}"
                + "".join(f": {remedy}" for remedy in remedies[:1])
            )


def as_number(normalizer: Any) -> Any:
    """Returns a normalizer, and one of NumPy as a Python number, because its value can be checked: it is in the memory
    of the host."""
    on_host = isinstance(normalizer, (np.ndarray, np.number)) and not normalizer.shape
    return normalizer.item() if on_host else normalizer


def _check_arrays(spec: LossSpec, vocab_axis: int, devices: Devices, infos: dict[str, Any]) -> None:
    """Checks shapes and dtypes. Where devices divide the vocabulary, weight and vocab_size are those of all shards."""
    if not devices.vocab_axes:
        check_arrays(spec=spec, vocab_axis=vocab_axis, **infos)
        return
    of_shard = {name: info for name, info in infos.items() if name != "weight"}
    check_arrays(spec=replace(spec, vocab_size=None), vocab_axis=vocab_axis, **of_shard)
    shape = list(infos["linear_weight"].shape)
    shape[vocab_axis] *= devices.parts
    whole = {name: infos[name] for name in ("input", "target", "weight") if name in infos}
    whole["linear_weight"] = infos["linear_weight"]._replace(shape=tuple(shape))
    check_arrays(spec=spec, vocab_axis=vocab_axis, **whole)


def _check_varying(spec: LossSpec, grad_into: Array | None, **others: Array | None) -> None:
    """Raises where the devices of a mesh have one grad_into, and each has a gradient of the head, or the reverse."""
    if grad_into is None:
        return
    axes = frozenset[Any]().union(*(varying(one) for one in others.values() if one is not None))
    missing, more = axes - varying(grad_into), varying(grad_into) - axes
    if missing and spec.reduction == "none":
        raise ValueError(
            f"grad_into must vary over the axes {tuple(sorted(missing))} of the mesh, over which another argument "
            "varies: pass each device an array of its own, because JAX sums the gradients of an array that all devices "
            "share"
        )
    if more:
        raise ValueError(
            f"grad_into must not vary over the axes {tuple(sorted(more))} of the mesh, over which no other argument "
            "varies: JAX would sum the equal gradients of input that the devices of these axes compute"
        )


def signed_target(target: Array | np.ndarray, ignore_index: int) -> tuple[Array, int]:
    """Returns `target` in int32 or int64, and the ignore_index of the result.

    A value that does not fit int32 is not a class. Of a dtype with such values, targets above int32's maximum become
    that maximum, negative targets become -1, and ignored targets become -2, which is then the ignore_index.
    """
    held, int32 = jnp.iinfo(target.dtype), jnp.iinfo(jnp.int32)
    if not (_fits(ignore_index, held) or _fits(ignore_index, int32)):  # the default, -100, fits no unsigned dtype
        raise ValueError(f"ignore_index must fit {target.dtype}, which targets have, got {ignore_index}")
    host = isinstance(target, np.ndarray)
    wrapped = host and target.dtype == np.int64 and not jax.config.read("jax_enable_x64")  # by JAX
    if target.dtype in (jnp.uint32, jnp.uint64) or wrapped:
        xp: Any = np if host else jnp
        ignored = target == target.dtype.type(ignore_index) if _fits(ignore_index, held) else False
        signed = xp.clip(target, max(held.min, -1), int32.max).astype(np.int32)
        return jnp.asarray(xp.where(ignored, np.int32(-2), signed)), -2
    target = jnp.asarray(target)
    return target if target.dtype == jnp.int64 else target.astype(jnp.int32), ignore_index


def _fits(number: int, limits: Any) -> bool:
    return limits.min <= number <= limits.max


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _undifferentiated(name: str, array: Array) -> Array:
    """Returns `array`; refuses to be differentiated, where a gradient of zeros would be silently wrong."""
    return array


@_undifferentiated.defjvp
def _(name: str, primals: Any, tangents: Any) -> Any:
    raise ValueError(f"{name} is not differentiated and must not depend on what is; pass jax.lax.stop_gradient({name})")


def check_per_token(
    token_loss: Callable[..., Array], per_token: Sequence[Any], leading: tuple[int, ...], whose: str
) -> None:
    """Checks the per-token arrays of a token loss. `leading` is `whose` shape."""
    if isinstance(token_loss, Named) and len(per_token) != len(token_loss.per_token):
        names = ", ".join(token_loss.per_token)
        raise ValueError(f"per_token of token_losses.{token_loss.name} must be {names}, got {len(per_token)} arrays")
    for index, values in enumerate(per_token):
        name = f"per_token[{index}]"
        if not isinstance(values, (Array, np.ndarray)):
            raise TypeError(f"{name} must be an array, got {type(values).__name__}")
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise TypeError(f"{name} must have a floating-point dtype, got {values.dtype}")
        if values.shape != leading:
            raise ValueError(f"{name} must have shape {leading} ({whose} shape), got {values.shape}")
