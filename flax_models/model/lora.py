r"""Adapters of low rank on the projections of a decoder's blocks: LoRA, LoRA+ and DoRA.

A projection's kernel W (in, out) stays as it is, and two small matrices A (in, R) and B (R, out) train beside it:

    y = x W + s (x A) B + bias                      s = alpha / R                                         LoRA
    y = (m / n) * (x W + s (x A) B) + bias          n = lengths of the columns of W + s A B, m learned    DoRA

A begins uniform in +-1/sqrt(in), B at zero and m at the lengths of W's columns, so a run begins with the model that it
was given: to the bit with LoRA, to rounding with DoRA. Gradients take n as a constant.

Nothing else trains unless --unfreeze names it, and what does not train needs no float32 master: with a 16-bit dtype of
computation frozen kernels, biases, embedding and head are kept in that dtype. Whatever reads them rounds them to it
first, so the model's numbers are the same, and the copy that float32 would take is spared. Norms are read in float32
and stay in the dtype of the parameters, and so do adapters and what --unfreeze names.

The alternative, adapters in a tree of their own beside an untouched model, would have each place that calls a
projection take two trees. Here an adapted projection stands where the plain one stood, its kernel and bias under the
same names.

Source: Hu et al., "LoRA: Low-rank adaptation of large language models", section 4.1; Liu et al., "DoRA:
Weight-decomposed low-rank adaptation", sections 4.1 and 4.3. The draw of A and, unless --lora-alpha says otherwise,
s = 2 are the field's habit (Biderman et al., "LoRA learns less and forgets less", section 5, finds alpha = 2 R best).
"""

import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from flax_models.errors import RunError
from flax_models.model.config import ModelConfig
from flax_models.model.decoder import Decoder, decoder_shapes
from flax_models.model.lora_config import LoraConfig, Projection
from flax_models.model.parameters import is_adapter, is_named, name_of

MODULES: dict[Projection, str] = {  # of a block, that hold the projections
    "query": "attention",
    "key": "attention",
    "value": "attention",
    "out": "attention",
    "gate": "feed_forward",
    "up": "feed_forward",
    "down": "feed_forward",
}


class AdaptedLinear(nnx.Module):
    """A projection with an adapter beside its kernel; see the module's docstring for what it computes.

    Args:
        linear: the projection of all layers, its kernel (L, in, out).
        lora: of the adapter.
        rngs: random streams; `params` is used.

    Attributes:
        kernel, bias: those of `linear`.
        lora_a: (L, in, R), in the dtype of the projection's parameters, as the next two.
        lora_b: (L, R, out).
        lora_magnitude: (L, out), with DoRA alone.
    """

    def __init__(self, linear: nnx.Linear, lora: LoraConfig, rngs: nnx.Rngs) -> None:
        self.scale, self.dora = lora.scale, lora.dora
        self.dtype, self.use_bias = jnp.dtype(linear.dtype), linear.use_bias
        self.kernel = linear.kernel
        if linear.bias is not None:
            self.bias = linear.bias
        layers, features_in, features_out = linear.kernel.shape
        dtype, bound = jnp.dtype(linear.param_dtype), 1.0 / math.sqrt(features_in)
        shape = (layers, features_in, lora.lora_rank)
        self.lora_a = nnx.Param(jax.random.uniform(rngs.params(), shape, dtype, -bound, bound))
        self.lora_b = nnx.Param(jnp.zeros((layers, lora.lora_rank, features_out), dtype))
        if lora.dora:
            lengths = jax.lax.map(_lengths, linear.kernel[...].astype(self.dtype))
            self.lora_magnitude = nnx.Param(lengths.astype(dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns (..., out), in the computation's dtype, of x (..., in), by the parameters of one layer."""
        x, kernel, a, b = (
            array.astype(self.dtype) for array in (x, self.kernel[...], self.lora_a[...], self.lora_b[...])
        )
        # The sum itself, or XLA keeps both of its terms for the backward pass and adds them again wherever it is read.
        y = jax.lax.optimization_barrier(x @ kernel + ((x @ a) * self.scale) @ b)
        if self.dora:
            added = jnp.matmul(a, b, preferred_element_type=jnp.float32)
            lengths = jax.lax.stop_gradient(_lengths(kernel.astype(jnp.float32) + self.scale * added))
            y = _times(y, self.lora_magnitude[...].astype(jnp.float32) / lengths)
        return y + self.bias[...].astype(self.dtype) if self.use_bias else y

    def merged(self) -> jax.Array:
        """Returns the kernels (L, in, out), float32, that alone do what kernels and adapters do together."""
        magnitude = self.lora_magnitude[...] if self.dora else None
        return _merged(self.kernel[...], self.lora_a[...], self.lora_b[...], magnitude, self.scale)


@partial(jax.checkpoint, prevent_cse=False)  # the backward pass is left y, and no float32 copy of it
def _times(y: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns y (..., out) times float32 factors (out,), rounded once."""
    return (y.astype(jnp.float32) * factors).astype(y.dtype)


@partial(jax.jit, static_argnames="scale")
def _merged(
    kernel: jax.Array,  # (L, in, out)
    a: jax.Array,  # (L, in, R)
    b: jax.Array,  # (L, R, out)
    magnitude: jax.Array | None,  # (L, out)
    scale: float,
) -> jax.Array:
    def layer(arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        kernel, a, b, magnitude = jax.tree.map(lambda array: array.astype(jnp.float32), arrays)
        whole = kernel + scale * jnp.matmul(a, b, precision="highest")
        return whole if magnitude is None else whole * (magnitude / _lengths(whole))

    return jax.lax.map(layer, (kernel, a, b, magnitude))  # one layer's temporaries at a time


def _lengths(kernel: jax.Array) -> jax.Array:
    """Returns the lengths (out,), float32, of a kernel's columns; a column of zeros has one that can be divided by."""
    squares = jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=0)
    return jnp.maximum(jnp.sqrt(squares), jnp.finfo(jnp.float32).tiny)


def adapt(model: Decoder, lora: LoraConfig, rngs: nnx.Rngs) -> None:
    """Puts adapters into a model, in place, and keeps what will not train in the computation's dtype if it is smaller.

    Args:
        model: with random or loaded parameters; nothing happens to it if `lora.lora_rank` is 0.
        lora: which projections, and how.
        rngs: random streams; `params` is used, and if the model was drawn from the same, what is drawn is new.

    Raises:
        RunError: the model has no blocks.
        ValueError: it has adapters already.

    Example:
        >>> model = Decoder(ModelConfig(vocab_size=100, num_layers=2), rngs=nnx.Rngs(0))
        >>> adapt(model, LoraConfig(lora_rank=4, lora_targets=("query",)), nnx.Rngs(1))
        >>> model.blocks.attention.query.lora_a.shape, model(jnp.zeros((2, 16), jnp.int32)).shape
        ((2, 128, 4), (2, 16, 128))
    """
    if not lora.lora_rank:
        return
    if not model.config.num_layers:
        raise RunError("--lora-rank adapts the projections of blocks, and --num-layers is 0")
    if any(adapted_projections(model)):
        raise ValueError("model must have no adapters yet, got one that has")
    for projection in lora.lora_targets:
        module = getattr(model.blocks, MODULES[projection])
        setattr(module, projection, AdaptedLinear(getattr(module, projection), lora, rngs))
    dtype = jnp.dtype(model.config.dtype)
    for path, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Param) or path[-1] == "scale":
            continue
        trains = is_adapter(name_of(path)) or is_named(name_of(path), lora.unfreeze)
        if not trains and variable.dtype.itemsize > dtype.itemsize:  # one by one: beside the model, memory for one
            variable.set_value(variable[...].astype(dtype))


def adapted_projections(model: Decoder) -> Iterator[tuple[Projection, AdaptedLinear]]:
    """Yields the projections that have an adapter, and their names."""
    for projection, module in MODULES.items():
        linear = getattr(getattr(model.blocks, module), projection)
        if isinstance(linear, AdaptedLinear):
            yield projection, linear


def adapted_shapes(config: ModelConfig, lora: LoraConfig) -> Decoder:
    """Returns what `decoder_shapes` does, with the adapters of a run: structure, shapes and dtypes, nothing drawn."""

    def build() -> Decoder:
        rngs = nnx.Rngs(0)
        model = Decoder(config, rngs=rngs)
        adapt(model, lora, rngs)
        return model

    return nnx.eval_shape(build)


def merge(model: Decoder) -> Decoder:
    """Returns a plain decoder that does what a model with adapters does: its kernels are W + s A B, or DoRA's.

    Args:
        model: with adapters or without; it stays as it is.

    Returns:
        A decoder whose parameters have the config's param_dtype. To that dtype its kernels are rounded once.

    Example:
        >>> model = Decoder(ModelConfig(vocab_size=100, num_layers=1), rngs=nnx.Rngs(0))
        >>> adapt(model, LoraConfig(lora_rank=4), nnx.Rngs(1))
        >>> type(merge(model).blocks.attention.query).__name__
        'Linear'
    """
    dtype = jnp.dtype(model.config.param_dtype)
    arrays = {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for projection, linear in adapted_projections(model):
        arrays["blocks", MODULES[projection], projection, "kernel"] = linear.merged()
    graph, shapes = nnx.split(decoder_shapes(model.config))
    params = nnx.map_state(lambda path, variable: variable.replace(arrays.pop(path).astype(dtype)), shapes)
    return nnx.merge(graph, params)
