"""Published models by name: the sizes and options of their config.json files, without weights.

Source: the config.json of each model on huggingface.co. `ModelConfig.parameter_count` equals the number of parameters
on each model's page exactly.
"""

import dataclasses

from flax_models.model.config import ModelConfig
from flax_models.model.rope import RopeScaling

_LLAMA2_7B = ModelConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11_008,
    max_seq_len=4096,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
)
_LLAMA3_8B = dataclasses.replace(
    _LLAMA2_7B,
    vocab_size=128_256,
    num_kv_heads=8,
    intermediate_size=14_336,
    max_seq_len=8192,
    rope_theta=500_000.0,
)
_LLAMA32_1B = dataclasses.replace(
    _LLAMA3_8B,
    hidden_size=2048,
    num_layers=16,
    head_dim=64,
    intermediate_size=8192,
    max_seq_len=131_072,
    tie_embeddings=True,
    rope=RopeScaling("llama3", 32.0, 8192),
)
_QWEN25_05B = ModelConfig(
    family="qwen2",
    vocab_size=151_936,
    hidden_size=896,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=4864,
    max_seq_len=32_768,
    rope_theta=1_000_000.0,
    attention_bias=True,
)
_QWEN3_06B = ModelConfig(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    max_seq_len=40_960,
    rope_theta=1_000_000.0,
    query_key_norm=True,
)
_GEMMA_2B = ModelConfig(
    family="gemma",
    vocab_size=256_000,
    hidden_size=2048,
    num_layers=18,
    num_heads=8,
    num_kv_heads=1,
    head_dim=256,
    intermediate_size=16_384,
    max_seq_len=8192,
    activation="gelu_tanh",
    norm_plus_one=True,
    embedding_scale=True,
)
_GEMMA2_2B = dataclasses.replace(
    _GEMMA_2B,
    family="gemma2",
    hidden_size=2304,
    num_layers=26,
    num_kv_heads=4,
    intermediate_size=9216,
    post_norms=True,
    query_scalar=256,
    attention_softcap=50.0,
    logit_softcap=30.0,
    sliding_window=4096,
    window_pattern=(True, False),
)

PUBLISHED: dict[str, ModelConfig] = {
    "llama2-7b": _LLAMA2_7B,
    "llama3-8b": _LLAMA3_8B,
    "llama3.2-1b": _LLAMA32_1B,
    "llama3.2-3b": dataclasses.replace(_LLAMA32_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128),
    "qwen2.5-0.5b": _QWEN25_05B,
    "qwen2.5-1.5b": dataclasses.replace(
        _QWEN25_05B,
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        head_dim=128,
        intermediate_size=8960,
        max_seq_len=131_072,
    ),
    "qwen2.5-7b": dataclasses.replace(
        _QWEN25_05B,
        vocab_size=152_064,
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=18_944,
        max_seq_len=131_072,
        tie_embeddings=False,
    ),
    "qwen3-0.6b": _QWEN3_06B,
    "qwen3-8b": dataclasses.replace(
        _QWEN3_06B, hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12_288, tie_embeddings=False
    ),
    "mistral-7b": dataclasses.replace(  # v0.3, which has no sliding window
        _LLAMA3_8B, family="mistral", vocab_size=32_768, max_seq_len=32_768, rope_theta=1_000_000.0
    ),
    "gemma-2b": _GEMMA_2B,
    "gemma2-2b": _GEMMA2_2B,
    "gemma2-9b": dataclasses.replace(
        _GEMMA2_2B, hidden_size=3584, num_layers=42, num_heads=16, num_kv_heads=8, intermediate_size=14_336
    ),
    "phi3-mini": ModelConfig(  # the model with a context of 4k tokens
        family="phi3",
        vocab_size=32_064,
        hidden_size=3072,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=96,
        intermediate_size=8192,
        max_seq_len=4096,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        sliding_window=2047,
    ),
}


def published(name: str) -> ModelConfig:
    """Returns the config of a published model.

    Args:
        name: a key of `PUBLISHED`.

    Raises:
        ValueError: no model has that name.

    Example:
        >>> published("llama3-8b").parameter_count()
        8030261248
    """
    if name not in PUBLISHED:
        raise ValueError(f"name must be one of {', '.join(PUBLISHED)}, got {name!r}")
    return PUBLISHED[name]
