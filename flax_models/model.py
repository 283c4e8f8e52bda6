"""A decoder-only transformer that ends in hidden states.

The model stops before the vocabulary: `model(tokens)` gives hidden states (B, T, D) and `model.head_weight()` the
head's (V, D) rows, and the loss takes the two. The usual alternative, a model that returns logits, would write B*T*V
numbers that training needs only as one scalar.

Each block reads x and adds to it, with h = RMSNorm(x) = x / sqrt(mean(x**2) + eps) * scale:

    x <- x + Attention(h) @ W_o         softmax(q . k / sqrt(head_dim)) over earlier positions; q, k rotated
    x <- x + (silu(h @ W_gate) * (h @ W_up)) @ W_down
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder."""

    vocab_size: int = 16_384
    """Entries of the vocabulary: rows of the embedding and of the head."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 2
    """Query heads of a block."""
    num_kv_heads: int = 1
    """Key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int = 64
    """Width of one head; even, since rotary embedding turns pairs."""
    intermediate_size: int = 384
    """Width inside the feed-forward layer."""
    max_seq_len: int = 128
    """Longest sequence the model is trained on, in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square before its root."""
    tie_embeddings: bool = True
    """Use the embedding's rows as the head's."""
    dtype: Dtype = "float32"
    """Dtype of the computation."""
    param_dtype: Dtype = "float32"
    """Dtype in which parameters are kept."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_layers < 0:
            raise ValueError(f"num_layers must not be negative, got {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even and positive, got {self.head_dim}")

    def parameter_count(self) -> int:
        """Returns the number of parameters, a tied head counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        block = attention + feed_forward + 2 * self.hidden_size
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return tables + self.num_layers * block + self.hidden_size


def rotary_embedding(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates pairs of features by angles that grow with position, so that dot products see only distances.

    (x_i, x_{i + H/2}) turns by positions * theta**(-2i/H).

    Args:
        x: (B, T, heads, H) queries or keys, H even.
        positions: (T,) integers.
        theta: base of the wavelengths.

    Returns:
        (B, T, heads, H), x's dtype.

    Example:
        >>> rotary_embedding(jnp.ones((1, 3, 2, 8)), jnp.arange(3), 10_000.0).shape
        (1, 3, 2, 8)

    Source: Su et al., "RoFormer", section 3.4; pairs are halves apart, as Llama's published weights expect.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None] * frequency  # (T, H/2), float32: bf16 would merge far positions
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)


def _linear(config: ModelConfig, features_in: int, features_out: int, rngs: nnx.Rngs, *, residual: bool) -> nnx.Linear:
    """A projection without bias; `residual` shrinks those whose outputs are summed into the residual stream."""
    std = 1.0 / math.sqrt(features_in)
    if residual:
        std /= math.sqrt(2 * config.num_layers)  # 2 * num_layers of them are added up: keeps the sum of order 1
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=False,
        kernel_init=nnx.initializers.normal(std),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden_size,
        epsilon=config.rms_norm_eps,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = _linear(config, config.hidden_size, query_width, rngs, residual=False)
        self.key = _linear(config, config.hidden_size, key_width, rngs, residual=False)
        self.value = _linear(config, config.hidden_size, key_width, rngs, residual=False)
        self.out = _linear(config, query_width, config.hidden_size, rngs, residual=True)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        def heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(*projected.shape[:-1], -1, self.head_dim)  # (B, T, heads, head_dim)

        query = rotary_embedding(heads(self.query(x)), positions, self.theta)
        key = rotary_embedding(heads(self.key(x)), positions, self.theta)
        mixed = jax.nn.dot_product_attention(query, key, heads(self.value(x)), is_causal=True)
        return self.out(mixed.reshape(*x.shape[:-1], -1))


class FeedForward(nnx.Module):
    """Gated feed-forward layer (Shazeer, "GLU Variants Improve Transformer": SwiGLU)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.gate = _linear(config, config.hidden_size, config.intermediate_size, rngs, residual=False)
        self.up = _linear(config, config.hidden_size, config.intermediate_size, rngs, residual=False)
        self.down = _linear(config, config.intermediate_size, config.hidden_size, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and feed-forward layer, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = _norm(config, rngs)
        self.feed_forward = FeedForward(config, rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nnx.Module):
    """Decoder-only transformer that gives hidden states; the head is a weight for the loss to take.

    Args:
        config: its shape.
        rngs: random streams for initialisation; `params` is used.

    Example:
        >>> model = Decoder(ModelConfig(vocab_size=100, num_layers=1), rngs=nnx.Rngs(0))
        >>> hidden = model(jnp.zeros((2, 16), jnp.int32))
        >>> hidden.shape, model.head_weight().shape
        ((2, 16, 128), (100, 128))

    Source: Touvron et al., "LLaMA", section 2.2; grouped queries: Ainslie et al., "GQA".
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        # 1/sqrt(D) makes the first logits of a tied head, products of a row with a normalised vector, of order 1.
        initializer = nnx.initializers.normal(1.0 / math.sqrt(config.hidden_size))
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=initializer,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.final_norm = _norm(config, rngs)
        if not config.tie_embeddings:
            shape = (config.vocab_size, config.hidden_size)
            self.head = nnx.Param(initializer(rngs.params(), shape, jnp.dtype(config.param_dtype)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the hidden states (B, T, D), in the config's dtype, of tokens (B, T)."""
        x = self.embedding(tokens)
        positions = jnp.arange(tokens.shape[-1])
        for block in self.blocks:
            x = block(x, positions)
        return self.final_norm(x)

    def head_weight(self) -> jax.Array:
        """Returns the head's rows (V, D), the parameter itself, in the dtype in which it is kept."""
        return self.embedding.embedding[...] if self.config.tie_embeddings else self.head[...]
