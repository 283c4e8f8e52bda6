"""A decoder-only transformer that ends in hidden states.

The model stops before the vocabulary: `model(tokens)` gives hidden states (B, T, D) and `model.head_weight()` the
head's (V, D) rows, and the loss takes the two. The usual alternative, a model that returns logits, would write B*T*V
numbers that training needs only as one scalar.

Each block reads x and adds to it, with h = RMSNorm(x):

    x <- x + Attention(h) @ W_o         softmax(q . k / sqrt(head_dim)) over earlier positions; q, k rotated
    x <- x + (silu(h @ W_gate) * (h @ W_up)) @ W_down

One class serves every published family: what they change in these lines is a field of `ModelConfig`. The blocks'
parameters are stacked along a first axis of num_layers, and one compiled block runs over them.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_models.model.attention import (
    EVERYTHING,
    Attention,
    AttentionContext,
    Cache,
    CacheSlots,
    Norm,
    Sequences,
    make_linear,
    make_sequences,
)
from flax_models.model.config import Dtype, ModelConfig
from flax_models.model.rope import rotary_frequencies, rotary_tables

__all__ = ["Block", "Cache", "Decoder", "Dtype", "FeedForward", "ModelConfig", "decoder_shapes"]


class FeedForward(nnx.Module):
    """Gated feed-forward layer (Shazeer, "GLU Variants Improve Transformer": SwiGLU, GEGLU)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.activation = config.activation
        self.gate = make_linear(config, config.hidden_size, config.intermediate_size, rngs, bias=False)
        self.up = make_linear(config, config.hidden_size, config.intermediate_size, rngs, bias=False)
        self.down = make_linear(config, config.intermediate_size, config.hidden_size, rngs, residual=True, bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        activate = jax.nn.silu if self.activation == "silu" else partial(jax.nn.gelu, approximate=True)
        return self.down(activate(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and feed-forward layer, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.pre_norms, self.post_norms = config.pre_norms, config.post_norms
        self.residual_multiplier = config.residual_multiplier
        self.attention = Attention(config, rngs)
        self.feed_forward = FeedForward(config, rngs)
        if config.pre_norms:
            self.attention_norm = Norm(config, config.hidden_size)
            self.feed_forward_norm = Norm(config, config.hidden_size)
        if config.post_norms:
            self.attention_post_norm = Norm(config, config.hidden_size)
            self.feed_forward_post_norm = Norm(config, config.hidden_size)

    def __call__(
        self, x: jax.Array, context: AttentionContext, window: jax.Array | None = None, slots: CacheSlots | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """Returns x (B, T, D) after the block, and the cache if `slots` has one."""
        added, cache = self.attention(self.attention_norm(x) if self.pre_norms else x, context, window, slots)
        x = self._add(x, self.attention_post_norm(added) if self.post_norms else added)
        added = self.feed_forward(self.feed_forward_norm(x) if self.pre_norms else x)
        return self._add(x, self.feed_forward_post_norm(added) if self.post_norms else added), cache

    def _add(self, x: jax.Array, added: jax.Array) -> jax.Array:
        if self.residual_multiplier == 1.0:
            return x + added
        return x + added * jnp.asarray(self.residual_multiplier, added.dtype)


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

    Source: Touvron et al., "LLaMA", section 2.2; Gemma Team, "Gemma 2", section 2; the Qwen2 and Qwen3 reports.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        # 1/sqrt(D) makes the first logits of a tied head, products of a row with a normalised vector, of order 1.
        initializer = nnx.initializers.normal(1.0 / math.sqrt(config.hidden_size))
        shape, dtype = (config.vocab_size, config.hidden_size), jnp.dtype(config.param_dtype)
        self.embedding = nnx.Param(initializer(rngs.params(), shape, dtype))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.blocks = stacked(rngs)
        self.final_norm = Norm(config, config.hidden_size)
        if not config.tie_embeddings:
            self.head = nnx.Param(initializer(rngs.params(), shape, dtype))

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Returns the hidden states (B, T, D), in the config's dtype, of whole sequences.

        Args:
            tokens: (B, T) integers in [0, V); larger ones give NaN.
            lengths: (B, M) integers: of the sequences that lie one after another in a row, each with positions from 0
                and none seeing another; zeros after the last. Each row must sum to T: padding is a sequence. None:
                each row is one sequence.

        Raises:
            ValueError: lengths have not one row for each of the tokens.
        """
        if lengths is not None and (lengths.ndim != 2 or lengths.shape[0] != tokens.shape[0]):
            raise ValueError(f"lengths must have shape ({tokens.shape[0]}, M) (tokens' rows), got {lengths.shape}")
        sequences = None
        if lengths is not None and lengths.shape[1] > 1:
            sequences = make_sequences(lengths, tokens.shape[-1])
        positions = jnp.arange(tokens.shape[-1])
        return self._hidden(tokens, positions, tokens.shape[-1], None, sequences)[0]

    def extend(self, tokens: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns hidden states of further tokens, and the cache with their keys and values.

        Rows may stand at different positions; a row's earlier tokens must be in the cache. Tokens that pad a row at its
        end do no harm: see `flax_models.model.attention`.

        Args:
            tokens: (B, T) integers.
            positions: (B, T) of each token in its row; those that the cache has no slot for are not written.
            cache: from `make_cache`, or from an earlier call.

        Returns:
            (hidden states (B, T, D), cache).

        Raises:
            ValueError: positions have not the tokens' shape, or the cache is of other rows.
        """
        if positions.shape != tokens.shape:
            raise ValueError(f"positions must have shape {tokens.shape} (tokens' shape), got {positions.shape}")
        if cache.key.shape[1] != tokens.shape[0]:
            raise ValueError(f"cache must have {tokens.shape[0]} rows (tokens' first axis), got {cache.key.shape[1]}")
        hidden, cache_after = self._hidden(tokens, positions, cache.key.shape[2], cache)
        assert cache_after is not None
        return hidden, cache_after

    def make_cache(self, rows: int, length: int) -> Cache:
        """Returns an empty cache for `rows` sequences of at most `length` tokens.

        With longrope, the length also says which frequencies hold: keys in the cache cannot change theirs later.
        """
        config = self.config
        shape = (config.num_layers, rows, length, config.num_kv_heads, config.head_dim)
        return Cache(jnp.zeros(shape, jnp.dtype(config.dtype)), jnp.zeros(shape, jnp.dtype(config.dtype)))

    def _hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        seq_len: int,
        cache: Cache | None,
        sequences: Sequences | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        config = self.config
        x = jnp.take(self.embedding[...], tokens, axis=0).astype(jnp.dtype(config.dtype))
        if config.embedding_scale:
            x = x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype)
        if config.embedding_multiplier != 1.0:
            x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
        frequencies = rotary_frequencies(config.rope, config.rope_theta, config.rotary_dim, seq_len)
        turns = positions
        if sequences is not None:
            turns = positions - jnp.take_along_axis(sequences.starts, sequences.of, axis=1)
        tables = rotary_tables(frequencies, turns, config.rope.attention_factor())
        context = AttentionContext(positions, *tables, sequences)
        if config.num_layers:
            x, cache = self._run_blocks(x, context, cache)
        return self.final_norm(x), cache

    def _run_blocks(
        self, x: jax.Array, context: AttentionContext, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        config = self.config
        graph, params = nnx.split(self.blocks)
        windows = config.windows()
        varying = jnp.asarray([window or EVERYTHING for window in windows]) if len(set(windows)) > 1 else None
        rotates = None if all(config.rotates()) else jnp.asarray(config.rotates())
        layers = jnp.arange(config.num_layers)

        def step(
            carry: tuple[jax.Array, Cache | None],
            layer: tuple[nnx.State, jax.Array | None, jax.Array | None, jax.Array],
        ) -> tuple[tuple[jax.Array, Cache | None], None]:
            (x, cache), (params, window, rotated, index) = carry, layer
            slots = None if cache is None else CacheSlots(cache, index)
            seen = context
            if rotated is not None:
                seen = context._replace(
                    cos=jnp.where(rotated, context.cos, 1.0), sin=jnp.where(rotated, context.sin, 0.0)
                )
            return nnx.merge(graph, params)(x, seen, window, slots), None

        if config.remat in ("elementwise", "full"):
            policy = _is_product if config.remat == "elementwise" else None
            step = jax.checkpoint(step, prevent_cse=not config.scan_layers, policy=policy)
        unroll = 1 if config.scan_layers else config.num_layers
        return jax.lax.scan(step, (x, cache), (params, varying, rotates, layers), unroll=unroll)[0]

    def head_weight(self) -> jax.Array:
        """Returns the head's rows (V, D), the parameter itself, in the dtype in which it is kept."""
        return self.embedding[...] if self.config.tie_embeddings else self.head[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits (..., V), float32, of hidden states (..., D): for the few positions that are drawn from.

        Training never calls this: the loss takes `head_weight()`.
        """
        config, head = self.config, self.head_weight()
        logits = jnp.matmul(hidden, head.astype(hidden.dtype).T, preferred_element_type=jnp.float32)
        logits = config.logit_scale * logits
        return (
            logits if config.logit_softcap is None else config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        )


def _is_product(primitive: Any, *avals: Any, **parameters: Any) -> bool:
    """A policy of jax.checkpoint: keeps products with weights, adapters' added, and what cuDNN's attention gives."""
    if str(primitive) == "optimization_barrier" or str(primitive).startswith("dot_product_attention_fwd"):
        return True
    return jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims(primitive, *avals, **parameters)


def decoder_shapes(config: ModelConfig) -> Decoder:
    """Returns a decoder whose parameters are `jax.ShapeDtypeStruct`: its structure, with nothing drawn."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
