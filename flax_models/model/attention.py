"""Causal grouped-query attention: its projections, its cache, and its products.

Of what families differ in stand here: biases, norms of queries and keys, the scale and the cap of scores, windows. A
query at position p sees keys at positions s with p - window < s <= p, and where several sequences share a row, those
of its own alone.

The cache has one slot a position for every row, so a row needs no padding on its left: slots past a row's last token
hold what was never written or what padding left behind, no query's position reaches them, and the next token of the
row replaces the first of them.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flax_models.model.attention_choice import explain_attention
from flax_models.model.config import AttentionImplementation, ModelConfig
from flax_models.model.rope import rotate

EVERYTHING = 2**30  # a window that no position leaves


class Cache(NamedTuple):
    """Keys, after their rotation, and values of all layers: each (L, B, S, num_kv_heads, head_dim)."""

    key: jax.Array
    value: jax.Array


class CacheSlots(NamedTuple):
    """One layer's place in the cache."""

    cache: Cache
    layer: jax.Array  # () int32


class Sequences(NamedTuple):
    """Sequences that lie one after another in a row, M of them at most; padding is one too, so that they fill it."""

    lengths: jax.Array  # (B, M) int32, zeros after the last
    starts: jax.Array  # (B, M) int32, T after the last
    of: jax.Array  # (B, T) int32 in [0, M): each position's


def make_sequences(lengths: jax.Array, length: int) -> Sequences:
    """Returns the sequences of rows of `length` tokens, of their lengths (B, M), each row of which sums to it."""
    ends = jnp.cumsum(lengths, axis=1)
    of = jnp.sum(jnp.arange(length)[:, None] >= ends[:, None, :], axis=2)
    return Sequences(lengths, ends - lengths, of)


class AttentionContext(NamedTuple):
    """Positions of a call and what they see."""

    positions: jax.Array  # (B, T) or (T,) int32: in the row, or in the cache
    cos: jax.Array  # (B, T, 1, R/2) or (T, 1, R/2)
    sin: jax.Array
    sequences: Sequences | None = None  # None: a row is one


def make_linear(
    config: ModelConfig, features_in: int, features_out: int, rngs: nnx.Rngs, *, residual: bool = False, bias: bool
) -> nnx.Linear:
    """Returns a projection; `residual` shrinks those whose outputs are summed into the residual stream."""
    std = 1.0 / math.sqrt(features_in)
    if residual:
        std /= math.sqrt(2 * max(config.num_layers, 1))  # 2 * num_layers of them add up: keeps the sum of order 1
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
    """RMSNorm of the last axis: x / sqrt(mean(x**2) + eps) * scale, or * (1 + scale), in float32, rounded once.

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
        """Returns what the layer adds (B, T, D), and the cache with this call's keys and values in it.

        Args:
            x: (B, T, D).
            context: positions and their angles.
            window: () this layer's window where layers differ in it, None where the config says it all.
            slots: the cache, or None: the call is then the whole sequence.
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

        # Whole: no cache, and all layers see alike, without a cap.
        whole = slots is None and window is None and self.config.attention_softcap is None
        packed = context.sequences is not None
        by = explain_attention(self.config, x.shape[-2], packed=packed).name if whole else "xla"

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            if context.sequences is not None and by == "cudnn":
                return _attend_packed(self.config, query, key, value, context.sequences)
            if whole and not packed:
                return _attend_whole(self.config, query, key, value, by)
            return _attend_seen(self.config, query, key, value, context, window)

        if self.config.remat == "attention" and by == "xla":  # cudnn keeps no scores: nothing to compute again
            attend = jax.checkpoint(attend, prevent_cse=not self.config.scan_layers)
        mixed = attend(query, key, value)
        return self.out(mixed.reshape(*x.shape[:-1], -1)), cache


def _write(
    slots: CacheSlots, positions: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[Cache, jax.Array, jax.Array]:
    """Returns the cache with keys and values at their positions, and all of this layer's keys and values."""
    rows = jnp.arange(key.shape[0])[:, None]  # (B, 1) beside positions (B, T)

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
    """cuDNN's kernels over several sequences in a row, which jax.nn's function has no argument for.

    They skip what lies outside a sequence, and keep (B * M, num_heads, T) float32 sums for the backward pass.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    there = sequences.lengths > 0
    lengths = jnp.where(there, sequences.lengths, -1).astype(jnp.int32)
    starts = jnp.where(there, sequences.starts, -1).astype(jnp.int32)
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
    seen = (distance >= 0) & (distance < window)
    if context.sequences is not None:
        seen = seen & (context.sequences.of[:, :, None] == context.sequences.of[:, None, :])
    seen = jnp.broadcast_to(seen, (query.shape[0], *seen.shape[-2:]))[:, None]  # (B, 1, T, S)
    if config.attention_softcap is None:
        return jax.nn.dot_product_attention(
            query, key, value, mask=seen, scale=config.attention_scale(), implementation="xla"
        )
    return _capped_attention(query, key, value, seen, config.attention_scale(), config.attention_softcap)


def _capped_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array, scale: float, cap: float
) -> jax.Array:
    """softmax(cap * tanh(scale * q . k / cap)) @ v, scores in float32; jax.nn's function knows no cap."""
    rows, length, num_heads, head_dim = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, head_dim)  # (B, T, num_kv_heads, group, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = cap * jnp.tanh(scores * (scale / cap))
    scores = jnp.where(seen[:, :, None], scores, jnp.finfo(jnp.float32).min)  # every query sees itself
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(rows, length, num_heads, head_dim)
