"""Text from a trained model, one token after another."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_models.model import Decoder


@jax.jit(static_argnames=("graph", "top_k"))
def _next_token(
    graph: nnx.GraphDef,
    params: nnx.State,
    window: jax.Array,  # (1, T)
    last: jax.Array,  # () place of the last token in the window
    key: jax.Array,
    temperature: jax.Array,
    top_k: int,
) -> jax.Array:
    model = nnx.merge(graph, params)
    hidden = model(window)[0, last]  # (D,): the one place where logits are wanted, and only those of one position
    logits = model.head_weight().astype(hidden.dtype) @ hidden
    values, entries = jax.lax.top_k(logits.astype(jnp.float32), min(top_k, logits.shape[0]))
    return entries[jax.random.categorical(key, values / temperature)]


def generate(
    model: Decoder,
    prompt: Sequence[int],
    *,
    length: int,
    key: jax.Array,
    temperature: float = 0.8,
    top_k: int = 40,
    end: int | None = None,
) -> list[int]:
    """Draws a continuation of a prompt, each token from softmax(logits / temperature) over the top_k largest logits.

    The window is the model's max_seq_len: of a longer text the model sees its end.

    Args:
        model: the decoder.
        prompt: at least one token.
        length: most tokens to draw.
        key: of jax.random.
        temperature: > 0; small values keep to the likeliest tokens.
        top_k: >= 1; 1 takes the likeliest token every time.
        end: token that ends the text; it is not returned.

    Returns:
        The tokens drawn, without the prompt.

    Raises:
        ValueError: an empty prompt, or an option outside its range.

    Example:
        >>> from flax_models.model import ModelConfig
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
        seen = tokens[-width:]
        window = np.zeros(
            (1, width), np.int32
        )  # one shape for every length: causal attention never looks at the padding
        window[0, : len(seen)] = seen
        last = jnp.asarray(len(seen) - 1)
        token = int(_next_token(graph, params, window, last, step_key, jnp.asarray(temperature), top_k))
        if token == end:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
