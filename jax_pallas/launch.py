"""Which implementation a call runs, and the device properties that a plan depends on.

A call that names no implementation is traced without a device. `resolve` chooses when the program is lowered, for each
platform if it is lowered for several.
"""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import Array

from jax_pallas.slicing import is_symbolic
from linear_ce.gpus import known_gpu

NAMES = ("mosaic", "pallas_triton")  # the faster first


class Lowering(NamedTuple):
    """What a call is lowered for."""

    platform: str
    devices: int  # among which XLA divides what is lowered; 1 in `jax.shard_map`


Capability = tuple[int, int]  # compute capability of an NVIDIA GPU, (9, 0) for Hopper


class DeviceInfo(NamedTuple):
    """The properties of a device that a plan depends on."""

    type: str  # "cuda", "cpu", ...
    capability: int  # 80, 90, ...; 0 if unknown
    multiprocessors: int
    gpu: str  # the name in `linear_ce.gpus.GPUS` whose speed stands for the device's: `known_gpu`


def hopper_limits(x_dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns why these kernels cannot run a call, a sentence, or None if they can."""
    if jnp.dtype(x_dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the Hopper kernels multiply bfloat16 or float16, not {jnp.dtype(x_dtype).name}"
    if not 0 < hidden < 2**30 or not 0 < vocab < 2**30:  # indices are int32 and run a tile past the end
        return f"the Hopper kernels need sizes from 1 to 2**30 - 1, got a hidden size of {hidden} and {vocab} classes"
    if hidden % 8:  # TMA requires rows that start at multiples of 16 bytes
        return f"the Hopper kernels need a hidden size that is a multiple of 8, got {hidden}"
    if vocab_axis not in (0, 1):
        return f"the Hopper kernels need vocab_axis 0 or 1, got {vocab_axis}"
    if vocab_axis == 1 and vocab % 64:
        return f"with vocab_axis 1 the Hopper kernels need a multiple of 64 classes, got {vocab}"
    return None


def hopper_gradient_limits(dtype: Any, hidden: int, vocab: int) -> str | None:
    """Returns why these kernels cannot run a call that those of the logits can run, a sentence, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the Hopper kernels of gradients multiply bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if not 0 < hidden < 2**25 or not 0 < vocab < 2**25:  # d_input multiplies steps by programs and tiles, in int32
        return f"the Hopper kernels of gradients need sizes from 1 to 2**25 - 1, got {hidden} hidden, {vocab} classes"
    if hidden % 64:
        return f"the Hopper kernels of gradients need a hidden size that is a multiple of 64, got {hidden}"
    return None


def triton_limits(dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns why these kernels cannot run a call, a sentence, or None if they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"pallas_triton multiplies bfloat16, float16 or float32, not {jnp.dtype(dtype).name}"
    if not 0 < hidden < 2**30 or not 0 < vocab < 2**30:  # indices are int32 and run a tile past the end
        return f"pallas_triton needs sizes from 1 to 2**30 - 1, got a hidden size of {hidden} and {vocab} classes"
    return None if vocab_axis in (0, 1) else f"pallas_triton needs vocab_axis 0 or 1, got {vocab_axis}"


def limits(implementation: str, dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns why an implementation cannot run with arrays of these shapes and dtypes, or None."""
    of_kernels = {"mosaic": hopper_limits, "pallas_triton": triton_limits}
    return of_kernels[implementation](dtype, hidden, vocab, vocab_axis) if implementation in of_kernels else None


def check_sizes(input_shape: tuple[Any, ...], weight_shape: tuple[Any, ...]) -> None:
    """Raises ValueError if the hidden size or the vocabulary is symbolic. Only the number of tokens may be."""
    for name, shape, sizes in (("input", input_shape, input_shape[-1:]), ("linear_weight", weight_shape, weight_shape)):
        if any(map(is_symbolic, sizes)):
            raise ValueError(f"{name} must have a known hidden size and vocabulary, got {shape}")


def symbolic_limits(input_shape: tuple[Any, ...]) -> str | None:
    """Returns why the kernels cannot run with a symbolic number of tokens, or None if it is not symbolic."""
    if not any(map(is_symbolic, input_shape[:-1])):
        return None
    return f"input has a symbolic number of tokens, {input_shape}, which only 'chunked' takes"


def device_limits(implementation: str, platform: str, capability: Capability | None) -> str | None:
    """Returns why an implementation cannot run on a device, or None. A capability of None (unknown) is accepted."""
    if implementation == "mosaic":
        if platform != "cuda":
            return f"the Hopper kernels need an NVIDIA GPU, not a {platform} device"
        if capability is not None and capability[0] != 9:
            return f"the Hopper kernels need compute capability 9.0, the device has {_version(capability)}"
    if implementation == "pallas_triton":
        if platform not in ("cuda", "cpu"):  # on a CPU in Pallas' interpreter
            return f"pallas_triton needs an NVIDIA GPU, not a {platform} device"
        if platform == "cuda" and capability is not None and capability < (8, 0):
            return f"pallas_triton needs compute capability 8.0, the device has {_version(capability)}"
    return None


def check_devices(implementation: str, devices: int) -> None:
    """Raises ValueError where XLA would divide the loops over chunks, or the kernels, among several devices."""
    if devices == 1:
        return
    what = "'chunked' in several chunks" if implementation == "chunked" else f"the kernels of {implementation!r}"
    raise ValueError(
        f"this call is compiled for {devices} devices, and XLA cannot divide {what} among them: each device would "
        "gather all arrays and compute the whole loss. Call the function of this name in jax_pallas.sharded, or this "
        "one within jax.shard_map, with token_axis_names if the devices have different tokens and with "
        "vocab_axis_name if they have different classes of linear_weight. Or pass replicated=True to compute the whole "
        "loss on every device"
    )


def choose(
    platform: str, capability: Capability | None, dtype: Any, hidden: int, vocab: int, vocab_axis: int
) -> tuple[str, str]:
    """Returns the implementation of a call that names none, and the reason.

    Training on an H200, in multiples of XLA's three GEMMs: "mosaic" 1.00 to 1.03, "chunked" 1.8 to 2.7.

    Args:
        platform: that a program is lowered for, "cuda" for an NVIDIA GPU.
        capability: of its GPU, None if unknown.
        dtype, hidden, vocab, vocab_axis: of input and linear_weight.
    """
    if platform != "cuda":
        return "chunked", f"no kernel for {platform} devices"
    if capability is None:
        return "chunked", "the GPU's compute capability is not known where this is lowered: name an implementation"
    if jnp.dtype(dtype) == jnp.float32:
        return "chunked", "it has the fastest float32 matmuls"  # on an H200, at least twice as fast as the kernels'
    reason = f"its kernels serve compute capability {_version(capability)}"
    for name in NAMES:
        obstacle = device_limits(name, platform, capability) or limits(name, dtype, hidden, vocab, vocab_axis)
        if obstacle is None:
            return name, reason
        reason = obstacle
    return "chunked", reason


def resolve(
    implementation: str | None, platform: str | None, dtype: Any, hidden: int, vocab: int, vocab_axis: int
) -> str:
    """Returns the implementation that a call runs: the named one, or that of `choose`.

    Args:
        implementation: as given to the call.
        platform: that a program is lowered for, or None: the call is being traced, most likely for the default device.

    Raises:
        ValueError: the implementation has a name, and cannot run on the device that is lowered for.
    """
    if implementation is None:
        found = traced_platform() if platform is None else platform
        return choose(found, known_capability(found), dtype, hidden, vocab, vocab_axis)[0]
    obstacle = None if platform is None else device_limits(implementation, platform, known_capability(platform))
    if obstacle is not None:
        raise ValueError(f"implementation {implementation!r} cannot serve this call: {obstacle}")
    return implementation


def traced_platform(array: Any = None) -> str:
    """Returns the platform of an array, or of what a trace is most likely for: the mesh's, or the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
    if isinstance(array, Array) and not isinstance(array, jax.core.Tracer):
        device = next(iter(array.devices()))
    elif device is None:
        device = jax.local_devices()[0]
    platform = device if isinstance(device, str) else device.platform
    return "cuda" if platform == "gpu" else platform


def known_capability(platform: str) -> Capability | None:
    """Returns the compute capability of the mesh's GPU, or of the default one; None where there is none to ask."""
    if platform != "cuda":
        return None
    from jax.experimental.pallas import triton  # what the kernels' own lowering asks

    try:
        major, minor = divmod(triton.get_gpu_info().compute_capability, 10)
    except ValueError:
        return None
    return major, minor


def device_info(implementation: str, platform: str) -> DeviceInfo:
    """Returns the properties of the device that an implementation's kernels are lowered for."""
    major, minor = known_capability(platform) or (0, 0)
    multiprocessors = 0
    if implementation == "mosaic":
        from jax_pallas.hopper_common import programs

        multiprocessors = programs()
    capability = 10 * major + minor
    lowered_for = capability or (90 if implementation == "mosaic" else 0)
    return DeviceInfo(platform, capability, multiprocessors, known_gpu(_device_kind(platform), lowered_for))


def _device_kind(platform: str) -> str:
    """Returns the name of the mesh's GPU, or of the default one; "" where there is none to ask."""
    if platform != "cuda":
        return ""
    device = jax.sharding.get_abstract_mesh().abstract_device
    try:
        return jax.local_devices(backend="gpu")[0].device_kind if device is None else device.device_kind
    except RuntimeError:
        return ""


def _version(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
