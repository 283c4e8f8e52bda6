r"""What a step costs: parameters, floating-point operations, memory, and the device's peak to hold them against.

Model FLOP utilisation (MFU) is the share of the device's peak that the model itself needs:

    flops a token = 6 * P + 12 * sum over layers of heads * head_dim * keys,    MFU = flops a token * tokens/s / peak

P counts the parameters that a token is multiplied by: the blocks' matrices, and the head once. Norms and biases are
left out, and so is the embedding, which is looked up; a tied one counts, as the head. Each such parameter makes one
multiplication and one addition forward, and twice that backward: for its own gradient, and for that of what it was
multiplied with. `keys` is how many positions a query sees on average: of T tokens, (T + 1) / 2, the causal half, and
less under a window; each is met by two products (scores and values) of 2 * head_dim flops, forward once and backward
twice. What is computed beyond that is not counted: masked scores, activations computed again (remat), logits computed
again by the loss, the optimiser. So MFU falls when they are added.

Frozen parameters have no gradient of their own, which leaves them 4 in place of 6. Where nothing before them trains
either, nothing goes back through them, and they have 2 (attention 4 in place of 12); all blocks count as one there.
Adapters (model/lora.py) are parameters more that train. What DoRA computes of the parameters alone, once a step, is
not counted.

Source: Chowdhery et al., "PaLM", 2022, appendix B; there attention counts in full, here its causal half.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_models.model.decoder import ModelConfig
from flax_models.train.step import Trainer

# Dense bf16 flops/s of one device with float32 sums, by the beginning of JAX's device_kind; the first that fits counts.
# NVIDIA's datasheets (half of the numbers given "with sparsity"), for GeForce its white paper, and Google Cloud's TPU
# pages.
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
# Part of a device, or another one that is called alike.
NOT_THE_SAME = ("MIG", "A100-SXM-64GB", "RTX 4090 D", "RTX 4090 Laptop", "TPU v4 lite")


def device_peak(kind: str) -> float | None:
    """Returns the dense bf16 peak in flops/s of a device by its `device_kind`, None where it is not known.

    Example:
        >>> device_peak("NVIDIA H200"), device_peak("NVIDIA A10G"), device_peak("cpu")
        (989000000000000.0, None, None)
    """
    if any(word in kind for word in NOT_THE_SAME):
        return None
    for name, peak in PEAK_BF16.items():
        # A name goes on with a space or a dash ("A100-SXM4-80GB"), or it is another device's ("A10G").
        if re.match(rf"{re.escape(name)}(?![A-Za-z0-9])", kind):
            return peak
    return None


def multiplied_parameters(config: ModelConfig) -> int:
    """Returns P: the parameters of matrices that every token is multiplied by, the head among them."""
    return _block_parameters(config) + config.vocab_size * config.hidden_size


def _block_parameters(config: ModelConfig) -> int:
    heads = 2 * config.num_heads + 2 * config.num_kv_heads  # query and output; key and value
    block = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return config.num_layers * block


def mean_keys(length: int | np.ndarray, window: int | None = None) -> float:
    """Returns how many positions a query sees on average, its own included.

    Args:
        length: tokens of every sequence, or of each: (n,) integers.
        window: most positions that a query sees, None for all earlier ones.

    Example:
        >>> mean_keys(4), mean_keys(4, window=2), mean_keys(np.array([4, 1]))
        (2.5, 1.75, 2.2)
    """
    lengths = np.atleast_1d(np.asarray(length, np.float64))
    seen = lengths if window is None else np.minimum(window, lengths)
    return float(np.sum(seen * (seen + 1) / 2 + (lengths - seen) * seen) / np.sum(lengths))


def flops_per_token(config: ModelConfig, length: int | np.ndarray, trained: Mapping[str, int] | None = None) -> float:
    """Returns the flops that a training step needs for one token, forward and backward.

    Args:
        config: of the model.
        length: tokens of every sequence, or of each: (n,) integers.
        trained: names and sizes of the parameters that train (`Trainer.trained`); None: all of them.
    """
    blocks, head = _block_parameters(config), config.vocab_size * config.hidden_size
    attention = config.num_heads * config.head_dim * sum(mean_keys(length, window) for window in config.windows())
    if trained is None:
        return 6.0 * (blocks + head) + 12.0 * attention
    in_blocks = [name for name in trained if name.startswith("blocks.")]
    adapters = sum(trained[name] for name in in_blocks if name.endswith((".lora_a", ".lora_b")))
    blocks += adapters
    own = adapters + sum(trained[name] for name in in_blocks if name.endswith(".kernel"))  # have gradients of their own
    own += trained.get("embedding" if config.tie_embeddings else "head", 0)
    through_blocks = bool(in_blocks) or "embedding" in trained
    through_head = through_blocks or "final_norm.scale" in trained
    backward = own + blocks * through_blocks + head * through_head
    return 2.0 * (blocks + head + backward) + 4.0 * attention * (3 if through_blocks else 1)


class Memory(NamedTuple):
    """Bytes on the device while a step runs, as XLA planned the compiled step."""

    parameters: int
    optimizer: int
    batch: int
    temporaries: int  # gradients, activations, the loss's workspace, and results that replace no argument

    @property
    def total(self) -> int:
        return sum(self)


def _bytes(tree: Any) -> int:
    return sum(np.size(leaf) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def step_memory(trainer: Trainer, compiled: jax.stages.Compiled) -> Memory | None:
    """Returns the memory of a training step, None where the backend does not tell.

    Args:
        trainer: whose `initial` state is counted.
        compiled: its step, from `Trainer.compile`.
    """
    plan: Any = compiled.memory_analysis()
    if plan is None:
        return None
    state = trainer.initial
    return Memory(
        parameters=_bytes(state.params),
        optimizer=_bytes(state.optimizer),
        batch=plan.argument_size_in_bytes - _bytes(state.params) - _bytes(state.optimizer),
        temporaries=plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes,
    )


class DeviceMemory(NamedTuple):
    """Memory that there is for a step."""

    size: int  # bytes
    whose: str  # for people
    limit: bool  # JAX can have no more; a computer may swap


def device_memory(device: Any) -> DeviceMemory | None:
    """Returns the memory of a device of `jax.devices()`, None where nobody tells."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return DeviceMemory(int(stats["bytes_limit"]), f"that JAX may use of {device.device_kind}", True)
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceMemory(size, "of this computer's memory", False)
    return None


def describe_bytes(size: float) -> str:
    """Returns a size in words, e.g. "3.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def describe_flops(flops_per_s: float) -> str:
    """Returns a rate in words, e.g. "12.3 GFLOP/s"."""
    for unit in ("", "K", "M", "G"):
        if flops_per_s < 1000:
            return f"{flops_per_s:.1f} {unit}FLOP/s"
        flops_per_s /= 1000
    return f"{flops_per_s:.1f} TFLOP/s"
