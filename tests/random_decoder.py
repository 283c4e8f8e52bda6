"""Decoders with random parameters made by NumPy: JAX's own initialisation compiles for seconds."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_models.model import Decoder
from flax_models.model_config import ModelConfig


def random_decoder(config: ModelConfig, seed: int = 0, spread: float = 1.0) -> Decoder:
    """Returns a decoder whose matrices are normal with variance spread**2 / features_in, norms near their start."""
    generator = np.random.default_rng(seed)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

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
