"""Which products attention runs by: XLA's plain ones, or cuDNN's fused kernels, which keep no (T, T) scores.

A name runs or is refused, before anything is traced into the step. Without one, cuDNN runs where it serves. What it
needs stands in two places, by what is known when: of the shape in `ModelConfig.cudnn_obstacle`, of the device and the
length here.

Source: jax/_src/cudnn/fused_attention_stablehlo.py, check_is_flash_attention and check_layout.
"""

from typing import Any, NamedTuple

import jax

from flax_models.model.config import AttentionImplementation, ModelConfig


class AttentionChoice(NamedTuple):
    """What attention's products run by, and why."""

    name: AttentionImplementation
    reason: str


def explain_attention(config: ModelConfig, length: int, device: Any = None, *, packed: bool = False) -> AttentionChoice:
    """Returns what attention over whole sequences runs by; calls with a cache take plain products whatever it is.

    Args:
        config: of the model; its attention_implementation is a name, or None for the best that serves.
        length: T, tokens of a sequence.
        device: of `jax.devices()`; None: the default one.
        packed: several sequences lie in a row.

    Returns:
        The name and the reason, for people.

    Raises:
        ValueError: the config names cudnn, which cannot serve this device, length or shape; names what it got.

    Example:
        >>> explain_attention(ModelConfig(attention_implementation="xla"), 128).reason
        'asked for by name'
    """
    device = _default_device() if device is None else device
    if config.attention_implementation == "xla":
        return AttentionChoice("xla", "asked for by name")
    obstacle = _device_obstacle(config.head_dim, device) or config.cudnn_obstacle()
    if obstacle is None and packed:
        obstacle = _packing_obstacle(config, device)
    if obstacle is None and length % 2:  # served without gradients, but a trace does not know whether it is for some
        obstacle = f"needs an even number of tokens in a sequence (max_seq_len in training), got {length}"
    if config.attention_implementation is None:
        if obstacle is not None:
            return AttentionChoice("xla", f"cudnn {obstacle}")
        return AttentionChoice("cudnn", f"its kernels serve compute capability {device.compute_capability}")
    if obstacle is not None:
        raise ValueError(f"attention_implementation cudnn {obstacle}")
    return AttentionChoice("cudnn", "asked for by name")


def _default_device() -> Any:
    device = jax.config.jax_default_device
    if isinstance(device, str):
        return jax.devices(device)[0]
    return jax.devices()[0] if device is None else device


def _device_obstacle(head_dim: int, device: Any) -> str | None:
    """Returns what cuDNN needs of a device and does not get, None if nothing."""
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return f"needs an NVIDIA GPU with cuDNN, got a {device.platform} device"
    capability = tuple(int(part) for part in device.compute_capability.split("."))
    if capability < (8, 0):  # before it no bfloat16, and no fused attention
        return f"needs compute capability 8.0 or later, got {device.compute_capability}"
    if capability < (9, 0) and head_dim > 128:
        return f"needs head_dim up to 128 on compute capability {device.compute_capability}, got {head_dim}"
    return None


def _packing_obstacle(config: ModelConfig, device: Any) -> str | None:
    """Returns what cuDNN needs for several sequences in a row beyond what it needs anyway, None if nothing."""
    if tuple(int(part) for part in device.compute_capability.split(".")) < (9, 0):
        return f"needs compute capability 9.0 or later for packed rows, got {device.compute_capability}"
    if any(config.windows()):
        return f"needs layers without a window for packed rows, got sliding_window {config.sliding_window}"
    return None
