"""Batched text generation on the device with a key-value cache.

Prompts of different lengths are left-aligned in one array with a length for each row, so the model needs no padding
mask: see `attention.py`. One compiled loop samples tokens until every row has ended or has all of its tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_models.model.decoder import Cache, Decoder


@dataclass(frozen=True)
class Sampling:
    """How a token is sampled from softmax(logits / temperature), restricted to the largest logits."""

    temperature: float = 0.8
    """Sampling temperature; 0: always the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose total probability reaches p."""
    min_tokens: int = 0
    """Minimum number of new tokens for each row."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        for name in ("top_k", "min_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def draw(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """Samples one token for each row.

    Args:
        logits: (B, V) float32; tokens with -inf are never sampled.
        keys: (B,) keys of jax.random, one for each row.
        sampling: how the token is sampled.

    Returns:
        (B,) int32.

    Example:
        >>> draw(jnp.array([[0.0, 2.0, 1.0]]), jax.random.split(jax.random.key(0), 1), Sampling(temperature=0)).tolist()
        [1]

    Source: Fan et al., "Hierarchical neural story generation", section 5.1 (top k); Holtzman et al., "The curious case
    of neural text degeneration", section 3.1 (top p).
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    count = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    if count == logits.shape[-1] and sampling.top_p == 1:  # all tokens: no need to sort
        return jax.vmap(jax.random.categorical)(keys, logits / sampling.temperature).astype(jnp.int32)
    values, entries = jax.lax.top_k(logits, count)  # largest first
    values = values / sampling.temperature
    before = jnp.cumsum(jax.nn.softmax(values, axis=-1), axis=-1)
    before = jnp.pad(before[:, :-1], ((0, 0), (1, 0)))  # total probability of all larger logits: 0 for the largest
    kept = jnp.where(before < sampling.top_p, values, -jnp.inf)
    chosen = jax.vmap(jax.random.categorical)(keys, kept)
    return jnp.take_along_axis(entries, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)


def continue_prompts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    key: jax.Array,
    sampling: Sampling | None = None,
    ends: Sequence[int] = (),
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """Generates a continuation of every prompt.

    Args:
        model: the decoder.
        prompts: at least one prompt, each of at least one token.
        length: maximum number of new tokens for each prompt.
        key: key of jax.random; each row's key is derived from it and from the row's index.
        sampling: how tokens are sampled; None: the defaults.
        ends: tokens that end a text; they are not returned.
        vocab_size: number of tokens in the vocabulary; None: the model's vocab_size. The rows of the head past it are
            padding and are never sampled.
        use_cache: False recomputes the whole text for every token; tests compare the cache with it.

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: there is no prompt, a prompt is empty, a token is outside the vocabulary, a text would be longer
            than the model's max_seq_len, or vocab_size is out of range.

    Example:
        >>> from flax_models.model.decoder import ModelConfig
        >>> model = Decoder(ModelConfig(vocab_size=50, num_layers=1), rngs=nnx.Rngs(0))
        >>> [len(tokens) for tokens in continue_prompts(model, [[1], [2, 3]], length=5, key=jax.random.key(0))]
        [5, 5]
    """
    rows_of_head = model.config.vocab_size
    vocab_size = rows_of_head if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= rows_of_head:
        raise ValueError(f"vocab_size must be in [1, {rows_of_head}] (the rows of the head), got {vocab_size}")
    if not prompts:
        raise ValueError("prompts must have at least one prompt, got none")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{i}] must have at least one token, got none")
        if invalid := [token for token in prompt if not 0 <= token < vocab_size]:
            raise ValueError(f"prompts[{i}] must have tokens in [0, {vocab_size}), got {invalid[0]}")
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    width = max(map(len, prompts))
    if width + length > model.config.max_seq_len:
        raise ValueError(
            f"length must be at most {max(model.config.max_seq_len - width, 0)} (max_seq_len "
            f"{model.config.max_seq_len} minus the longest prompt's {width} tokens), got {length}"
        )
    if length == 0:
        return [[] for _ in prompts]
    tokens = np.zeros((len(prompts), width + length), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    graph, params = nnx.split(model)
    sampling = Sampling() if sampling is None else sampling
    texts, after = _continue(graph, params, tokens, lengths, key, width, sampling, tuple(ends), vocab_size, use_cache)
    texts, after = np.asarray(texts), np.asarray(after)
    return [texts[i, lengths[i] : after[i]].tolist() for i in range(len(prompts))]


class _Loop(NamedTuple):
    """State of the sampling loop."""

    step: jax.Array  # () int32
    tokens: jax.Array  # (B, S)
    lengths: jax.Array  # (B,)
    done: jax.Array  # (B,) bool
    last: jax.Array  # (B, D) hidden state of each row's last token
    cache: Cache | None


@jax.jit(static_argnames=("graph", "width", "sampling", "ends", "vocab_size", "use_cache"))
def _continue(
    graph: nnx.GraphDef,
    params: nnx.State,
    tokens: jax.Array,  # (B, S): prompts, with room for the new tokens
    lengths: jax.Array,  # (B,)
    key: jax.Array,
    width: int,  # length of the longest prompt
    sampling: Sampling,
    ends: tuple[int, ...],
    vocab_size: int,
    use_cache: bool,
) -> tuple[jax.Array, jax.Array]:
    model = nnx.merge(graph, params)
    count, capacity = tokens.shape
    rows = jnp.arange(count)
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    endings = jnp.asarray(ends, jnp.int32)
    min_tokens = min(sampling.min_tokens, capacity)  # any integer; the loop's counter is an int32

    def forward(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return model(tokens)[rows, lengths - 1]

    def step(state: _Loop) -> _Loop:
        logits = model.logits(state.last)[:, :vocab_size]  # (B, vocab_size)
        if ends and min_tokens:
            early = jnp.where(state.step < min_tokens, -jnp.inf, 0.0)
            logits = logits.at[:, endings].add(early)
        keys = jax.vmap(lambda row_key: jax.random.fold_in(row_key, state.step))(row_keys)
        new = draw(logits, keys, sampling)
        done = state.done | jnp.isin(new, endings)
        written = state.tokens.at[rows, jnp.where(done, capacity, state.lengths)].set(new, mode="drop")
        after, cache = state.lengths + ~done, state.cache
        if cache is None:
            last = forward(written, after)
        else:
            hidden, cache = model.extend(new[:, None], state.lengths[:, None], cache)
            last = hidden[:, 0]
        return _Loop(state.step + 1, written, after, done, last, cache)

    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
    if use_cache:
        positions = jnp.broadcast_to(jnp.arange(width), (count, width))
        hidden, cache = model.extend(tokens[:, :width], positions, model.make_cache(count, capacity))
        last = hidden[rows, lengths - 1]
    else:
        cache, last = None, forward(tokens, lengths)
    state = _Loop(jnp.zeros((), jnp.int32), tokens, lengths, jnp.zeros(count, bool), last, cache)
    state = jax.lax.while_loop(lambda state: (state.step < capacity - width) & ~state.done.all(), step, state)
    return state.tokens, state.lengths


@jax.jit(static_argnames=("graph", "top_k"))
def _next_token(
    graph: nnx.GraphDef,
    params: nnx.State,
    window: jax.Array,  # (1, T)
    last: jax.Array,  # () index of the last token in the window
    key: jax.Array,
    temperature: jax.Array,
    top_k: int,
) -> jax.Array:
    model = nnx.merge(graph, params)
    logits = model.logits(model(window)[0, last])  # (V,): of one position
    values, entries = jax.lax.top_k(logits, min(top_k, logits.shape[0]))
    return entries[jax.random.categorical(key, values / temperature)]


def generate(
    model: Decoder,
    prompt: Sequence[int],
    *,
    length: int,
    key: jax.Array,
    temperature: float = 0.8,
    top_k: int = 40,
    ends: Sequence[int] = (),
) -> list[int]:
    """Generates a continuation of one prompt, without a cache, over a sliding window of the model's max_seq_len.

    Each token is sampled from softmax(logits / temperature) over the top_k largest logits. If the text is longer than
    max_seq_len, the model reads its last max_seq_len tokens.

    Args:
        model: the decoder.
        prompt: at least one token.
        length: maximum number of new tokens.
        key: key of jax.random.
        temperature: > 0; small values favor the most likely tokens.
        top_k: >= 1; 1: always the most likely token.
        ends: tokens that end the text; they are not returned.

    Returns:
        The new tokens, without the prompt.

    Raises:
        ValueError: the prompt is empty, or an option is out of range.

    Example:
        >>> from flax_models.model.decoder import ModelConfig
        >>> model = Decoder(ModelConfig(vocab_size=50, num_layers=1), rngs=nnx.Rngs(0))
        >>> len(generate(model, [0], length=5, key=jax.random.key(0)))
        5

    Source: Fan et al., "Hierarchical neural story generation", section 5.1.
    """
    if not prompt:
        raise ValueError("prompt must have at least one token, got none")
    if length < 0:
        raise ValueError(f"length must not be negative, got {length}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    graph, params = nnx.split(model)
    width = model.config.max_seq_len
    tokens = list(prompt)
    for step_key in jax.random.split(key, length):
        visible = tokens[-width:]
        # Padding to one shape avoids recompilation; with causal attention, padding at the end has no effect.
        window = np.zeros((1, width), np.int32)
        window[0, : len(visible)] = visible
        last = jnp.asarray(len(visible) - 1)
        token = int(_next_token(graph, params, window, last, step_key, jnp.asarray(temperature), top_k))
        if token in ends:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
