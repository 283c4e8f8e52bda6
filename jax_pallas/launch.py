"""The kernels of each implementation under one set of names, and which of them a call runs.

A call without a name is traced for no device in particular: `resolve` chooses where the program is lowered, for each
platform of a program that is lowered for several.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import Array

from jax_pallas.pieces import is_symbolic
from jax_pallas.tile_config import TileConfig

NAMES = ("mosaic", "pallas_triton")  # the faster first

Capability = tuple[int, int]  # compute capability of an NVIDIA GPU, (9, 0) for Hopper


class DeviceInfo(NamedTuple):
    """What a plan needs to know of a device."""

    type: str  # "cuda", "cpu", ...
    capability: int  # 80, 90, ...; 0 where it is not known
    multiprocessors: int


class Kernels(NamedTuple):
    """What an implementation has; None where XLA's own product does the work.

    Args:
        limits: (dtype, hidden, vocab, vocab_axis) -> what keeps the kernels from such a call, or None.
        gradient_limits: (dtype, hidden, vocab) -> the same of `d_weight` and `d_input`.
        tile: (dtype) -> the tile of logits.
        exponentials: e (n, padded(K)), their sums, the largest logits and the targets' summands and logits of a chunk.
        statistics: of a chunk's rows over a stretch of the vocabulary.
        d_logits: of the same.
        add_target_rows: adds the targets' terms to d_weight.
        d_weight: e^T x, added to what is there.
        d_input: rho (e w) + theta w_target.
        d_input_scratch: (rows, hidden, classes, most, programs) -> bytes that d_input takes besides its result, `most`
            at most.
    """

    limits: Callable[..., str | None]
    gradient_limits: Callable[..., str | None] | None
    tile: Callable[[Any], TileConfig]
    exponentials: Callable[..., tuple[Array | None, ...]]
    statistics: Callable[..., tuple[Any, ...]]
    d_logits: Callable[..., Array]
    add_target_rows: Callable[..., Array]
    d_weight: Callable[..., Array] | None
    d_input: Callable[..., Array] | None
    d_input_scratch: Callable[..., int] | None


def load(implementation: str) -> Kernels:
    """Returns the kernels of an implementation; nothing of its backend is imported before."""
    if implementation == "mosaic":
        from jax_pallas import hopper, hopper_d_input, hopper_gradients, hopper_logits, target_kernels

        return Kernels(
            limits=hopper_logits.limits,
            gradient_limits=hopper_gradients.limits,
            tile=lambda dtype: TileConfig(hopper.BLOCK_N, hopper.BLOCK_V),
            exponentials=hopper_logits.exponentials,
            statistics=hopper_logits.statistics,
            d_logits=hopper_logits.d_logits,
            add_target_rows=target_kernels.add_targets,
            d_weight=hopper_gradients.add_d_weight,
            d_input=hopper_d_input.store_d_input,
            d_input_scratch=hopper_d_input.d_input_scratch,
        )
    from jax_pallas import kernels

    return Kernels(
        limits=kernels.limits,
        gradient_limits=None,
        tile=lambda dtype: TileConfig(kernels.BLOCK_N, kernels.tile_of(dtype, sloped=False).block_v),
        exponentials=kernels.exponentials,
        statistics=kernels.statistics,
        d_logits=kernels.d_logits,
        add_target_rows=kernels.add_targets,
        d_weight=None,
        d_input=None,
        d_input_scratch=None,
    )


def limits(implementation: str, dtype: Any, hidden: int, vocab: int, vocab_axis: int) -> str | None:
    """Returns what keeps an implementation from arrays of these shapes and dtypes, or None."""
    return load(implementation).limits(dtype, hidden, vocab, vocab_axis) if implementation in NAMES else None


def check_sizes(input_shape: tuple[Any, ...], weight_shape: tuple[Any, ...]) -> None:
    """Raises ValueError where a hidden size or a vocabulary is symbolic: only numbers of tokens may be."""
    for name, shape, sizes in (("input", input_shape, input_shape[-1:]), ("linear_weight", weight_shape, weight_shape)):
        if any(map(is_symbolic, sizes)):
            raise ValueError(f"{name} must have a known hidden size and vocabulary, got {shape}")


def symbolic_limits(input_shape: tuple[Any, ...]) -> str | None:
    """Returns what keeps the kernels from an input whose number of tokens is known only when it is called, or None."""
    if not any(map(is_symbolic, input_shape[:-1])):
        return None
    return f"input has a symbolic number of tokens, {input_shape}, which only 'chunked' takes"


def device_limits(implementation: str, platform: str, capability: Capability | None) -> str | None:
    """Returns what keeps an implementation from a device, or None; a capability of None, not known, does not."""
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


def choose(
    platform: str, capability: Capability | None, dtype: Any, hidden: int, vocab: int, vocab_axis: int
) -> tuple[str, str]:
    """Returns the implementation that a call takes without a name, and why it is that.

    Training on an H200, in multiples of XLA's three products: "mosaic" 1.00 to 1.03, "chunked" 1.8 to 2.7.

    Args:
        platform: that a program is lowered for, "cuda" for an NVIDIA GPU.
        capability: of its GPU, None where it is not known.
        dtype, hidden, vocab, vocab_axis: of input and linear_weight.
    """
    if platform != "cuda":
        return "chunked", f"no kernel for {platform} devices"
    if capability is None:
        return "chunked", "the GPU's compute capability is not known where this is lowered: name an implementation"
    if jnp.dtype(dtype) == jnp.float32:
        return "chunked", "XLA's products of float32 are faster than the kernels'"  # 2 to 3.4 times, on an H200
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
    """Returns the implementation that a call runs, which `choose` finds where it has no name.

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
    """Returns what a plan needs to know of the device that an implementation's kernels are lowered for."""
    major, minor = known_capability(platform) or (0, 0)
    multiprocessors = 0
    if implementation == "mosaic":
        from jax_pallas.hopper import programs

        multiprocessors = programs()
    return DeviceInfo(platform, 10 * major + minor, multiprocessors)


def _version(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
