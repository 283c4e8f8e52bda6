"""Selects the attention implementation: XLA, or cuDNN's fused kernels, which do not store the (T, T) scores.

An implementation that the config names is used, or tracing raises an error. If the config names none, cuDNN is used
wherever it is supported. `ModelConfig.cudnn_obstacle` checks what the config determines; this module checks the device
and the sequence length.

Source: jax/_src/cudnn/fused_attention_stablehlo.py, check_is_flash_attention and check_layout.
"""

from typing import Any, NamedTuple

import jax

from flax_models.model.config import AttentionImplementation, ModelConfig


class AttentionChoice(NamedTuple):
    """The attention implementation, and the reason for it."""

    name: AttentionImplementation
    reason: str


def explain_attention(config: ModelConfig, length: int, device: Any = None, *, packed: bool = False) -> AttentionChoice:
    """Returns the implementation of attention over whole sequences. Calls with a cache always use XLA.

    Args:
        config: model config; attention_implementation is a name, or None for the fastest supported one.
        length: T, tokens per sequence.
        device: one of `jax.devices()`; None: the default device.
        packed: a row holds several sequences.

    Returns:
        The name and a human-readable reason.

    Raises:
        ValueError: the config names cudnn, which does not support this device, length or shape.

    Example:
        >>> explain_attention(ModelConfig(attention_implementation="xla"), 128).reason
        'requested'
    """
    device = _default_device() if device is None else device
    if config.attention_implementation == "xla":
        return AttentionChoice("xla", "requested")
    obstacle = _device_obstacle(config.head_dim, device) or config.cudnn_obstacle()
    if obstacle is None and packed:
        obstacle = _packing_obstacle(config, device)
    # cuDNN supports odd lengths without gradients, but tracing does not know whether gradients will be needed.
    if obstacle is None and length % 2:
        obstacle = f"needs an even number of tokens per sequence (max_seq_len in training), got {length}"
    if config.attention_implementation is None:
        if obstacle is not None:
            return AttentionChoice("xla", f"cudnn {obstacle}")
        return AttentionChoice("cudnn", f"supported on compute capability {device.compute_capability}")
    if obstacle is not None:
        raise ValueError(f"attention_implementation cudnn {obstacle}")
    return AttentionChoice("cudnn", "requested")


def _default_device() -> Any:
    device = jax.config.jax_default_device
    if isinstance(device, str):
        return jax.devices(device)[0]
    return jax.devices()[0] if device is None else device


def _device_obstacle(head_dim: int, device: Any) -> str | None:
    """Returns the requirement of cuDNN that the device does not meet, or None."""
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return f"needs an NVIDIA GPU with cuDNN, got a {device.platform} device"
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    if capability < (8, 0):  # older GPUs have neither bfloat16 nor fused attention
        return f"needs compute capability 8.0 or later, got {device.compute_capability}"
    if capability < (9, 0) and head_dim > 128:
        return f"needs head_dim up to 128 on compute capability {device.compute_capability}, got {head_dim}"
    return None


def _packing_obstacle(config: ModelConfig, device: Any) -> str | None:
    """Returns the additional requirement of cuDNN for packed rows that is not met, or None."""
    if tuple(int(part) for part in device.compute_capability.split(".")) < (9, 0):
        return f"needs compute capability 9.0 or later for packed rows, got {device.compute_capability}"
    if any(config.windows()):
        return f"needs layers without a window for packed rows, got sliding_window {config.sliding_window}"
    return None
