"""Causal grouped-query attention: projections, key-value cache, and scores.

This module implements these differences between model families: biases, norms of queries and keys, the scale and the
softcap of scores, and sliding windows. A query at position p attends to keys at positions s with p - window < s <= p.
If several sequences share a row, a query attends only to keys of its own sequence.

The cache has one slot per position for every row, so rows need no padding on the left. Slots after a row's last token
are unwritten or hold keys and values of padding. No query attends to them, because their positions are later than the
query's. The row's next token overwrites the first of them.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flax_models.model.attention_choice import explain_attention
from flax_models.model.config import AttentionImplementation, ModelConfig
from flax_models.model.rope import rotate
from flax_models.model.sharding import by_heads

EVERYTHING = 2**30  # a window larger than any position: attention to all earlier positions


class Cache(NamedTuple):
    """Rotated keys, and values, of all layers: each (L, B, S, num_kv_heads, head_dim)."""

    key: jax.Array
    value: jax.Array


class CacheSlots(NamedTuple):
    """The cache, and the index of the layer that reads and writes it."""

    cache: Cache
    layer: jax.Array  # () int32


class Sequences(NamedTuple):
    """The sequences packed into each row, at most M; padding counts as a sequence, so that the sequences fill a row."""

    lengths: jax.Array  # (B, M) int32, zeros after the last sequence
    starts: jax.Array  # (B, M) int32, T after the last sequence
    of: jax.Array  # (B, T) int32 in [0, M): the sequence of each position


def make_sequences(lengths: jax.Array, length: int) -> Sequences:
    """Returns the sequences of rows of `length` tokens.

    Args:
        lengths: (B, M) sequence lengths; each row sums to `length`.
        length: T, tokens per row.
    """
    ends = jnp.cumsum(lengths, axis=1)
    of = jnp.sum(jnp.arange(length)[:, None] >= ends[:, None, :], axis=2)
    return Sequences(lengths, ends - lengths, of)


class AttentionContext(NamedTuple):
    """What all attention layers of one forward pass share: positions, rotary tables and sequences."""

    positions: jax.Array  # (B, T) or (T,) int32: in the row or in the cache
    cos: jax.Array  # (B, T, 1, R/2) or (T, 1, R/2)
    sin: jax.Array
    sequences: Sequences | None = None  # None: each row is one sequence


def make_linear(
    config: ModelConfig, features_in: int, features_out: int, rngs: nnx.Rngs, *, residual: bool = False, bias: bool
) -> nnx.Linear:
    """Returns a projection; `residual` scales down the initial weights of one that adds to the residual stream."""
    std = 1.0 / math.sqrt(features_in)
    if residual:
        std /= math.sqrt(2 * max(config.num_layers, 1))  # keeps the sum of 2 * num_layers outputs of order 1
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=bias,
        kernel_init=nnx.initializers.normal(std),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Norm(nnx.Module):
    """RMSNorm over the last axis: x / sqrt(mean(x**2) + eps) * scale, or * (1 + scale), in float32, rounded once.

    Source: Zhang and Sennrich, "Root mean square layer normalization".
    """

    def __init__(self, config: ModelConfig, features: int) -> None:
        self.eps, self.plus_one = config.rms_norm_eps, config.norm_plus_one
        start = jnp.zeros if config.norm_plus_one else jnp.ones
        self.scale = nnx.Param(start((features,), jnp.dtype(config.param_dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * (1.0 + scale if self.plus_one else scale)).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions (Ainslie et al., "GQA")."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        width, query_width = config.hidden_size, config.num_heads * config.head_dim
        key_width = config.num_kv_heads * config.head_dim
        self.query = make_linear(config, width, query_width, rngs, bias=config.attention_bias)
        self.key = make_linear(config, width, key_width, rngs, bias=config.attention_bias)
        self.value = make_linear(config, width, key_width, rngs, bias=config.attention_bias)
        self.out = make_linear(config, query_width, width, rngs, residual=True, bias=config.attention_out_bias)
        if config.query_key_norm:
            self.query_norm, self.key_norm = Norm(config, config.head_dim), Norm(config, config.head_dim)
        if config.joint_query_key_norm:
            self.query_norm, self.key_norm = Norm(config, query_width), Norm(config, key_width)

    def __call__(
        self, x: jax.Array, context: AttentionContext, window: jax.Array | None, slots: CacheSlots | None
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the output (B, T, D), and the cache updated with the keys and values of this call.

        Args:
            x: (B, T, D).
            context: positions and rotary tables.
            window: () this layer's window if layers have different windows; None: all layers use the config's.
            slots: the cache; None: x is the whole sequence.
        """

        def heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(*projected.shape[:-1], -1, self.config.head_dim)  # (B, T, heads, head_dim)

        query, key, value = self.query(x), self.key(x), heads(self.value(x))
        if self.config.joint_query_key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = heads(query), heads(key)
        if self.config.query_key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, context.cos, context.sin), rotate(key, context.cos, context.sin)
        cache = None
        if slots is not None:
            cache, key, value = _write(slots, context.positions, key, value)

        # jax.nn.dot_product_attention needs no mask without a cache or a softcap, if all layers have the same window.
        unmasked = slots is None and window is None and self.config.attention_softcap is None
        packed = context.sequences is not None
        implementation = explain_attention(self.config, x.shape[-2], packed=packed).name if unmasked else "xla"

        def attend(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            sequences: Sequences | None,
            shared: tuple[jax.Array, jax.Array | None],
        ) -> jax.Array:
            if sequences is not None and implementation == "cudnn":
                return _attend_packed(self.config, query, key, value, sequences)
            if unmasked and not packed:
                return _attend_whole(self.config, query, key, value, implementation)
            positions, window = shared
            seen = context._replace(positions=positions, sequences=sequences)
            return _attend_seen(self.config, query, key, value, seen, window)

        if self.config.remat == "attention" and implementation == "xla":  # cuDNN stores no scores to rematerialize
            attend = jax.checkpoint(attend, prevent_cse=not self.config.scan_layers)
        shared = context.positions, window
        if slots is None:
            mixed = by_heads(attend, query, key, value, rows=context.sequences, shared=shared)
        else:
            mixed = attend(query, key, value, context.sequences, shared)
        return self.out(mixed.reshape(*x.shape[:-1], -1)), cache


def _write(
    slots: CacheSlots, positions: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[Cache, jax.Array, jax.Array]:
    """Returns the cache with keys and values written at their positions, and this layer's cached keys and values."""
    rows = jnp.arange(key.shape[0])[:, None]  # (B, 1), broadcasts with positions (B, T)

    def put(all_layers: jax.Array, new: jax.Array) -> jax.Array:
        return all_layers.at[slots.layer, rows, positions].set(new.astype(all_layers.dtype), mode="drop")

    cache = Cache(put(slots.cache.key, key), put(slots.cache.value, value))
    return cache, cache.key[slots.layer], cache.value[slots.layer]


def _attend_whole(
    config: ModelConfig,
    query: jax.Array,  # (B, T, num_heads, H)
    key: jax.Array,  # (B, T, num_kv_heads, H)
    value: jax.Array,
    implementation: AttentionImplementation,
) -> jax.Array:
    window = config.windows()[0]
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=config.attention_scale(),
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def _attend_packed(
    config: ModelConfig,
    query: jax.Array,  # (B, T, num_heads, H)
    key: jax.Array,  # (B, T, num_kv_heads, H)
    value: jax.Array,
    sequences: Sequences,
) -> jax.Array:
    """Calls cuDNN's kernels for packed rows, for which jax.nn.dot_product_attention has no argument.

    The kernels skip keys of other sequences, and save (B * M, num_heads, T) float32 softmax sums for the backward pass.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    used = sequences.lengths > 0
    lengths = jnp.where(used, sequences.lengths, -1).astype(jnp.int32)
    starts = jnp.where(used, sequences.starts, -1).astype(jnp.int32)
    starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    attend: Any = cudnn.dot_product_attention
    return attend(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=config.attention_scale(),
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )


def _attend_seen(
    config: ModelConfig,
    query: jax.Array,  # (B, T, num_heads, H)
    key: jax.Array,  # (B, S, num_kv_heads, H)
    value: jax.Array,
    context: AttentionContext,
    window: jax.Array | None,
) -> jax.Array:
    if window is None:
        window = jnp.asarray(config.windows()[0] or EVERYTHING)
    distance = context.positions[..., :, None] - jnp.arange(key.shape[1])  # (B, T, S) or (T, S)
    mask = (distance >= 0) & (distance < window)
    if context.sequences is not None:
        mask = mask & (context.sequences.of[:, :, None] == context.sequences.of[:, None, :])
    mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[-2:]))[:, None]  # (B, 1, T, S)
    if config.attention_softcap is None:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=config.attention_scale(), implementation="xla"
        )
    return _softcap_attention(query, key, value, mask, config.attention_scale(), config.attention_softcap)


def _softcap_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, scale: float, cap: float
) -> jax.Array:
    """Computes softmax(cap * tanh(scale * q . k / cap)) @ v with float32 scores.

    jax.nn.dot_product_attention has no softcap.
    """
    rows, length, num_heads, head_dim = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, head_dim)  # (B, T, num_kv_heads, group, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = cap * jnp.tanh(scores * (scale / cap))
    # A finite minimum is enough: every query attends at least to its own position.
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(rows, length, num_heads, head_dim)
