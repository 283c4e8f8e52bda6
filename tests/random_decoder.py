"""Small decoders with random parameters from NumPy, because compiling JAX's initialization takes seconds."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_models.model.config import ModelConfig
from flax_models.model.decoder import Decoder, decoder_shapes

SMALL = ModelConfig(
    vocab_size=97,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    max_seq_len=32,
)


def random_decoder(config: ModelConfig, seed: int = 0, spread: float = 1.0) -> Decoder:
    """Returns a decoder with normal matrices of variance spread**2 / features_in, and almost initial norms."""
    generator = np.random.default_rng(seed)
    graph, shapes = nnx.split(decoder_shapes(config))

    def values(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name, drawn = str(path), generator.normal(size=leaf.shape)
        if "scale" in name:
            drawn = 0.2 * drawn + (not config.norm_plus_one)
        elif "bias" in name:
            drawn = 0.2 * drawn
        else:
            features_in = leaf.shape[-2] if "kernel" in name else leaf.shape[-1]
            drawn = drawn * spread * features_in**-0.5
        return jnp.asarray(drawn.astype(leaf.dtype))

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(values, shapes))
