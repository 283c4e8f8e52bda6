r"""Cost of a training step: parameters, floating-point operations and memory, and the peak throughput of devices.

Model FLOP utilization (MFU) is the model's required flops per second divided by the device's peak:

    flops per token = 6 * P + 12 * sum over layers of (heads * head_dim * keys)
    MFU = flops per token * tokens/s / peak

P is the number of parameters in matmuls: the blocks' matrices and the head. Norms, biases and the embedding lookup are
not counted; a tied embedding counts once, as the head. Each of these parameters takes one multiplication and one
addition in the forward pass, and two of each in the backward pass: one for the gradient of the weight, one for the
gradient of the input. `keys` is the mean number of positions that a query attends to: (T + 1) / 2 for causal attention
over T tokens, less with a window. Each key takes two matmuls (scores and values) of 2 * head_dim flops, once in the
forward and twice in the backward pass. Other computation is not counted: masked scores, rematerialized activations,
logits that the loss recomputes, and the optimizer. More of it makes the MFU lower.

Frozen parameters have no weight gradient, so they count 4 instead of 6 flops. If nothing before them trains, there is
no input gradient either, and they count 2 (attention 4 instead of 12); for this, all blocks are treated as one unit.
Adapters (model/lora.py) count as trained parameters. The per-step computation of DoRA that involves only parameters is
not counted.

Source: Chowdhery et al., "PaLM", 2022, appendix B, which counts attention in full; here, only its causal half counts.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_models.errors import RunError
from flax_models.model.decoder import ModelConfig
from flax_models.model.lora_config import LoraConfig
from flax_models.train.step import Trainer

# Dense bf16 flops/s of one device with float32 accumulation, by prefix of JAX's device_kind; the first match is used.
# Sources: NVIDIA's datasheets (half of the numbers "with sparsity"), for GeForce the white paper, and Google Cloud's
# TPU pages.
PEAK_BF16 = {
    "NVIDIA GB200": 2500e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
# Device kinds that match a prefix above but are a part of the device, or another device.
EXCLUDED = ("MIG", "A100-SXM-64GB", "RTX 4090 D", "RTX 4090 Laptop", "TPU v4 lite")


def device_peak(kind: str) -> float | None:
    """Returns the dense bf16 peak in flops/s for a `device_kind`, None if it is unknown.

    Example:
        >>> device_peak("NVIDIA H200"), device_peak("NVIDIA A10G"), device_peak("cpu")
        (989000000000000.0, None, None)
    """
    if any(word in kind for word in EXCLUDED):
        return None
    for name, peak in PEAK_BF16.items():
        # A longer name must continue with a space or a dash ("A100-SXM4-80GB"); "A10G" is another device than "A10".
        if re.match(rf"{re.escape(name)}(?![A-Za-z0-9])", kind):
            return peak
    return None


def _block_parameters(config: ModelConfig) -> int:
    heads = 2 * config.num_heads + 2 * config.num_kv_heads  # query and output; key and value
    block = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return config.num_layers * block


def mean_keys(length: int | np.ndarray, window: int | None = None) -> float:
    """Returns the mean number of positions that a query attends to, including its own.

    Args:
        length: length of all sequences, or (n,) integers with the length of each.
        window: maximum number of positions that a query attends to; None: all earlier ones.

    Example:
        >>> mean_keys(4), mean_keys(4, window=2), mean_keys(np.array([4, 1]))
        (2.5, 1.75, 2.2)
    """
    lengths = np.atleast_1d(np.asarray(length, np.float64))
    visible = lengths if window is None else np.minimum(window, lengths)
    return float(np.sum(visible * (visible + 1) / 2 + (lengths - visible) * visible) / np.sum(lengths))


def flops_per_token(config: ModelConfig, length: int | np.ndarray, trained: Mapping[str, int] | None = None) -> float:
    """Returns the flops of a training step per token, forward and backward.

    Args:
        config: the model's config.
        length: length of all sequences, or (n,) integers with the length of each.
        trained: names and sizes of the parameters that train (`Trainer.trained`); None: all parameters.
    """
    blocks, head = _block_parameters(config), config.vocab_size * config.hidden_size
    attention = config.num_heads * config.head_dim * sum(mean_keys(length, window) for window in config.windows())
    if trained is None:
        return 6.0 * (blocks + head) + 12.0 * attention
    in_blocks = [name for name in trained if name.startswith("blocks.")]
    adapters = sum(trained[name] for name in in_blocks if name.endswith((".lora_a", ".lora_b")))
    blocks += adapters
    weight_gradients = adapters + sum(trained[name] for name in in_blocks if name.endswith(".kernel"))
    weight_gradients += trained.get("embedding" if config.tie_embeddings else "head", 0)
    through_blocks = _trains_layers(trained)
    through_head = through_blocks or "final_norm.scale" in trained
    backward = weight_gradients + blocks * through_blocks + head * through_head
    return 2.0 * (blocks + head + backward) + 4.0 * attention * (3 if through_blocks else 1)


def _trains_layers(trained: Iterable[str]) -> bool:
    """Whether gradients of parameters with these names go back through the layers."""
    return any(name == "embedding" or name.startswith("blocks.") for name in trained)


class Memory(NamedTuple):
    """Bytes of the memory of one device during a step, according to XLA's memory analysis of the compiled step."""

    parameters: int
    optimizer: int
    batch: int
    temporaries: int  # gradients, activations, the loss's workspace, and outputs that do not alias an argument

    @property
    def total(self) -> int:
        return sum(self)


def device_bytes(tree: Any) -> int:
    """Returns the bytes of arrays, or of their shapes, that are on one device: of a mesh, the first."""

    def size(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * jnp.dtype(leaf.dtype).itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def step_memory(trainer: Trainer, compiled: jax.stages.Compiled) -> Memory | None:
    """Returns the memory of a training step, None if the backend does not report it.

    Args:
        trainer: the trainer, with its `initial` state.
        compiled: its compiled step, from `Trainer.compile`.
    """
    plan: Any = compiled.memory_analysis()
    if plan is None:
        return None
    state = trainer.initial
    return Memory(
        parameters=device_bytes(state.params),
        optimizer=device_bytes(state.optimizer),
        batch=plan.argument_size_in_bytes - device_bytes(state.params) - device_bytes(state.optimizer),
        temporaries=plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes,
    )


class LeastMemory(NamedTuple):
    """Bytes of the memory of one device that a step needs in any case, by arithmetic."""

    parameters: int
    optimizer: int
    gradients: int
    gathered: int  # of the layers whose matrices are gathered or cast at the same time
    layer_inputs: int  # of all layers, which a backward pass through them needs with any remat

    @property
    def total(self) -> int:
        return sum(self)


def least_memory(trainer: Trainer, config: ModelConfig, tokens: int) -> LeastMemory:
    """Returns the least memory of a training step on a mesh, before it is compiled.

    Args:
        trainer: the trainer on a mesh, with its `initial` state.
        config: the model's config.
        tokens: tokens of a micro-batch on one device.
    """
    state, itemsize = trainer.initial, jnp.dtype(config.dtype).itemsize
    trained, _ = trainer.split(state.params)
    assert trainer.mesh is not None
    sizes = trainer.mesh.shape
    copied = sizes["fsdp"] > 1 or config.param_dtype != config.dtype
    trains = _trains_layers(trainer.trained)
    again = config.scan_layers or config.remat in ("elementwise", "full")  # the backward pass gathers them again
    kept = trains and sizes["fsdp"] > 1 and not again
    whole = _block_parameters(config) // (1 if kept else max(config.num_layers, 1)) // sizes["tensor"] * itemsize
    inputs = config.num_layers * tokens * config.hidden_size * itemsize
    return LeastMemory(
        parameters=device_bytes(state.params),
        optimizer=device_bytes(state.optimizer),
        gradients=device_bytes(trained),
        gathered=whole * copied,
        layer_inputs=inputs * trains,
    )


class DeviceMemory(NamedTuple):
    """The memory that is available for a step."""

    size: int  # bytes
    whose: str  # human-readable description
    limit: bool  # a hard limit; False for host memory, which can swap


def device_memory(device: Any) -> DeviceMemory | None:
    """Returns the memory of a device of `jax.devices()`, None if it is unknown."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return DeviceMemory(int(stats["bytes_limit"]), f"that JAX may use of {device.device_kind}", True)
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceMemory(size, "of host memory", False)
    return None


MOST_PARAMETERS = 10**13  # more than any model has; the limit on devices whose memory is unknown
SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")


def check_parameters(config: ModelConfig, lora: LoraConfig, memory: DeviceMemory | None, *, shards: int = 1) -> None:
    """Checks by arithmetic, before anything is allocated, that a model's parameters can be in memory.

    Args:
        config: the model's config.
        lora: options of its adapters.
        memory: the memory of the device, from `device_memory`; None: unknown.
        shards: number of devices among which the parameters are divided.

    Raises:
        RunError: the parameters need more than the memory, or there are more than MOST_PARAMETERS. The message has the
            sizes of the model as options.
    """
    count = config.parameter_count() + lora.parameter_count(config)
    size = count * jnp.dtype(config.param_dtype).itemsize // shards
    if count <= MOST_PARAMETERS and (memory is None or size <= memory.size):
        return
    sizes = {name: getattr(config, name) for name in SIZES} | ({"lora_rank": lora.lora_rank} if lora.lora_rank else {})
    shown = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in sizes.items())
    limit = "the memory" if memory is None else f"the {describe_bytes(memory.size)} {memory.whose}"
    raise RunError(
        f"the model is too large: its {count:,} parameters need {describe_bytes(size)}"
        f"{'' if shards == 1 else ' on each device'}, more than {limit}, got {shown}"
    )


def describe_bytes(size: float) -> str:
    """Formats a size, e.g. "3.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def describe_flops(flops_per_s: float) -> str:
    """Formats a rate, e.g. "12.3 GFLOP/s"."""
    for unit in ("", "K", "M", "G"):
        if flops_per_s < 1000:
            return f"{flops_per_s:.1f} {unit}FLOP/s"
        flops_per_s /= 1000
    return f"{flops_per_s:.1f} TFLOP/s"
