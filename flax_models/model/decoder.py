"""A decoder-only transformer that returns hidden states.

The model does not compute logits: `model(tokens)` returns hidden states (B, T, D), `model.head_weight()` returns the
head's weight (V, D), and the loss takes both. A model that returns logits, the usual alternative, writes B*T*V numbers,
of which training needs only one scalar.

Each block updates the residual stream x, with h = RMSNorm(x):

    x <- x + Attention(h) @ W_o         softmax(q . k / sqrt(head_dim)) over earlier positions; q, k rotated
    x <- x + (silu(h @ W_gate) * (h @ W_up)) @ W_down

One class implements all published families: each of their differences is a field of `ModelConfig`. The blocks'
parameters are stacked along a first axis of size num_layers, and one compiled block loops over them.
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
from flax_models.model.sharding import by_rows, gathered, gathers, look_up, saves_all_but_gathered

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
    """Attention and feed-forward layer, each with its norms, added to the residual stream."""

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
        """Returns the updated x (B, T, D), and the updated cache, None without `slots`."""
        added, cache = self.attention(self.attention_norm(x) if self.pre_norms else x, context, window, slots)
        x = self._add(x, self.attention_post_norm(added) if self.post_norms else added)
        added = self.feed_forward(self.feed_forward_norm(x) if self.pre_norms else x)
        return self._add(x, self.feed_forward_post_norm(added) if self.post_norms else added), cache

    def _add(self, x: jax.Array, added: jax.Array) -> jax.Array:
        if self.residual_multiplier == 1.0:
            return x + added
        return x + added * jnp.asarray(self.residual_multiplier, added.dtype)


class Decoder(nnx.Module):
    """Decoder-only transformer that returns hidden states; the loss takes them and the head's weight.

    Args:
        config: shape and options of the model.
        rngs: random streams for initialization; only `params` is used.

    Example:
        >>> model = Decoder(ModelConfig(vocab_size=100, num_layers=1), rngs=nnx.Rngs(0))
        >>> hidden = model(jnp.zeros((2, 16), jnp.int32))
        >>> hidden.shape, model.head_weight().shape
        ((2, 16, 128), (100, 128))

    Source: Touvron et al., "LLaMA", section 2.2; Gemma Team, "Gemma 2", section 2; the Qwen2 and Qwen3 reports.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        # A standard deviation of 1/sqrt(D) makes the initial logits of order 1: normalized hidden states have length
        # sqrt(D).
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
        """Returns the hidden states (B, T, D) of whole sequences, in the config's dtype.

        Args:
            tokens: (B, T) integers in [0, V); larger values give NaN.
            lengths: (B, M) integers, the lengths of the sequences packed into each row, zeros after the last one.
                Positions restart at 0 in each sequence, and attention does not cross sequences. Each row must sum to
                T: padding counts as a sequence. None: each row is one sequence.

        Raises:
            ValueError: lengths does not have shape (B, M).
        """
        if lengths is not None and (lengths.ndim != 2 or lengths.shape[0] != tokens.shape[0]):
            raise ValueError(f"lengths must have shape ({tokens.shape[0]}, M) (tokens' rows), got {lengths.shape}")
        sequences = None
        if lengths is not None and lengths.shape[1] > 1:
            sequences = make_sequences(lengths, tokens.shape[-1])
        positions = jnp.arange(tokens.shape[-1])
        return self._hidden(tokens, positions, tokens.shape[-1], None, sequences)[0]

    def extend(self, tokens: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns the hidden states of further tokens, and the cache with their keys and values.

        Rows may be at different positions. The cache must hold a row's earlier tokens. Padding tokens at the end of a
        row do not affect the result: see `flax_models.model.attention`.

        Args:
            tokens: (B, T) integers.
            positions: (B, T) position of each token in its row; tokens beyond the end of the cache are not written.
            cache: returned by `make_cache` or by an earlier call.

        Returns:
            (hidden states (B, T, D), cache).

        Raises:
            ValueError: positions do not have the shape of tokens, or the cache has another number of rows.
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

        With longrope, `length` also selects the rotary frequencies, because the keys in the cache are already rotated.
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
        x = look_up(self.embedding[...], tokens, jnp.dtype(config.dtype))
        if config.embedding_scale:
            x = x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype)
        if config.embedding_multiplier != 1.0:
            x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
        frequencies = rotary_frequencies(config.rope, config.rope_theta, config.rotary_dim, seq_len)
        rope_positions = positions
        if sequences is not None:
            rope_positions = positions - jnp.take_along_axis(sequences.starts, sequences.of, axis=1)
        tables = rotary_tables(frequencies, rope_positions, config.rope.attention_factor())
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
            layer_context = context
            if rotated is not None:  # cosine 1 and sine 0: no rotation
                layer_context = context._replace(
                    cos=jnp.where(rotated, context.cos, 1.0), sin=jnp.where(rotated, context.sin, 0.0)
                )
            params = gathered(params, jnp.dtype(config.dtype))
            return nnx.merge(graph, params)(by_rows(x), layer_context, window, slots), None

        if config.remat in ("elementwise", "full"):
            policy = _saves_matmuls if config.remat == "elementwise" else None
            step = jax.checkpoint(step, prevent_cse=not config.scan_layers, policy=policy)
        elif gathers() and config.scan_layers:
            step = jax.checkpoint(step, prevent_cse=False, policy=saves_all_but_gathered)
        unroll = 1 if config.scan_layers else config.num_layers
        return jax.lax.scan(step, (x, cache), (params, varying, rotates, layers), unroll=unroll)[0]

    def head_weight(self) -> jax.Array:
        """Returns the head's weight (V, D), in the dtype of the parameters."""
        return self.embedding[...] if self.config.tie_embeddings else self.head[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the float32 logits (..., V) of hidden states (..., D), for the few positions that are sampled from.

        Training does not call this: the loss takes `head_weight()`.
        """
        config, head = self.config, self.head_weight()
        logits = jnp.matmul(hidden, head.astype(hidden.dtype).T, preferred_element_type=jnp.float32)
        logits = config.logit_scale * logits
        return (
            logits if config.logit_softcap is None else config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        )


def _saves_matmuls(primitive: Any, *avals: Any, **parameters: Any) -> bool:
    """Policy of jax.checkpoint that saves the outputs of matmuls with weights, of adapters and of cuDNN attention."""
    if str(primitive) == "optimization_barrier" or str(primitive).startswith("dot_product_attention_fwd"):
        return True
    return jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims(primitive, *avals, **parameters)


def decoder_shapes(config: ModelConfig) -> Decoder:
    """Returns a decoder whose parameters are `jax.ShapeDtypeStruct`; nothing is initialized."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
