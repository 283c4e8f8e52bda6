r"""Low-rank adapters on the projections of a decoder's blocks: LoRA, LoRA+ and DoRA.

The kernel W (in, out) of a projection is frozen, and two small matrices A (in, R) and B (R, out) train:

    y = x W + s (x A) B + bias                      s = alpha / R                                       LoRA
    y = (m / n) * (x W + s (x A) B) + bias          n = norms of the columns of W + s A B, m trained    DoRA

A is initialized uniformly in +-1/sqrt(in), B to zero and m to the norms of W's columns, so that training starts from
the given model: exactly with LoRA, up to rounding with DoRA. The gradient treats n as a constant.

All other parameters are frozen unless --unfreeze names them. Frozen parameters need no float32 master copy: if the
computation has a 16-bit dtype, frozen kernels, biases, embedding and head are stored in that dtype. The computation
rounds them to that dtype in any case, so the results are the same and the memory of float32 copies is saved. Norms are
read in float32 and keep the dtype of the parameters, as do adapters and the parameters that --unfreeze names.

With the alternative, adapters in a separate tree, every call of a projection would take two trees. Here, the adapted
projection replaces the plain one, and its kernel and bias keep their names.

Source: Hu et al., "LoRA: Low-rank adaptation of large language models", section 4.1; Liu et al., "DoRA:
Weight-decomposed low-rank adaptation", sections 4.1 and 4.3. The initialization of A and the default s = 2 follow
common practice (Biderman et al., "LoRA learns less and forgets less", section 5, finds alpha = 2 R best).
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from flax_models.errors import RunError
from flax_models.model.config import ModelConfig
from flax_models.model.decoder import Decoder, decoder_shapes
from flax_models.model.lora_config import LoraConfig, Projection
from flax_models.model.parameters import is_adapter, is_named, name_of
from flax_models.model.sharding import created_like

MODULES: dict[Projection, str] = {  # the module of a block that holds each projection
    "query": "attention",
    "key": "attention",
    "value": "attention",
    "out": "attention",
    "gate": "feed_forward",
    "up": "feed_forward",
    "down": "feed_forward",
}


class AdaptedLinear(nnx.Module):
    """A projection with an adapter; the module's docstring has the equations.

    Args:
        linear: the projection of all layers, with kernel (L, in, out).
        name: of the projection. On a mesh it decides how the adapter is divided.
        lora: options of the adapter.
        rngs: random streams; only `params` is used.

    Attributes:
        kernel, bias: those of `linear`.
        lora_a: (L, in, R), in the dtype of the projection's parameters.
        lora_b: (L, R, out), in the same dtype.
        lora_magnitude: (L, out), in the same dtype; only with DoRA.
    """

    def __init__(self, linear: nnx.Linear, name: str, lora: LoraConfig, rngs: nnx.Rngs) -> None:
        def parameter(of: str, make: Callable[..., jax.Array], *arrays: jax.Array) -> nnx.Param[jax.Array]:
            return nnx.Param(created_like(f"{name}.{of}", make, *arrays, other=linear.kernel[...]))

        self.scale, self.dora = lora.scale, lora.dora
        self.dtype, self.use_bias = jnp.dtype(linear.dtype), linear.use_bias
        self.kernel = linear.kernel
        if linear.bias is not None:
            self.bias = linear.bias
        layers, features_in, features_out = linear.kernel.shape
        dtype, bound = jnp.dtype(linear.param_dtype), 1.0 / math.sqrt(features_in)
        shapes = (layers, features_in, lora.lora_rank), (layers, lora.lora_rank, features_out)
        draw = partial(jax.random.uniform, shape=shapes[0], dtype=dtype, minval=-bound, maxval=bound)
        self.lora_a = parameter("lora_a", draw, rngs.params())
        self.lora_b = parameter("lora_b", partial(jnp.zeros, shapes[1], dtype))
        if lora.dora:
            self.lora_magnitude = parameter("lora_magnitude", partial(_norms, self.dtype, dtype), linear.kernel[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the output (..., out) for x (..., in), in the dtype of the computation.

        Called inside the loop over layers, where the parameters are those of one layer.
        """
        x, kernel, a, b = (
            array.astype(self.dtype) for array in (x, self.kernel[...], self.lora_a[...], self.lora_b[...])
        )
        # The barrier makes XLA store the sum. Without it, XLA stores both terms for the backward pass and adds them
        # again at each use.
        y = jax.lax.optimization_barrier(x @ kernel + ((x @ a) * self.scale) @ b)
        if self.dora:
            added = jnp.matmul(a, b, preferred_element_type=jnp.float32)
            norms = jax.lax.stop_gradient(column_norms(kernel.astype(jnp.float32) + self.scale * added))
            y = _multiply(y, self.lora_magnitude[...].astype(jnp.float32) / norms)
        return y + self.bias[...].astype(self.dtype) if self.use_bias else y

    def merged(self) -> jax.Array:
        """Returns the float32 kernels (L, in, out) of plain projections that compute the same."""
        magnitude = self.lora_magnitude[...] if self.dora else None
        return _merged(self.kernel[...], self.lora_a[...], self.lora_b[...], magnitude, self.scale)


@partial(jax.checkpoint, prevent_cse=False)  # saves y for the backward pass, not its float32 copy
def _multiply(y: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiplies y (..., out) by float32 factors (out,) and rounds once."""
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
        merged = kernel + scale * jnp.matmul(a, b, precision="highest")
        return merged if magnitude is None else merged * (magnitude / column_norms(merged))

    return jax.lax.map(layer, (kernel, a, b, magnitude))  # holds the temporaries of one layer at a time


def _norms(computed: jnp.dtype, stored: jnp.dtype, kernels: jax.Array) -> jax.Array:
    """Returns the column norms (L, out) of kernels (L, in, out) in the dtype of the computation, in that of storage."""
    return jax.lax.map(column_norms, kernels.astype(computed)).astype(stored)


def column_norms(kernel: jax.Array) -> jax.Array:
    """Returns the float32 norms (out,) of a kernel's columns; a column of zeros has the smallest normal number."""
    squares = jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=0)
    return jnp.maximum(jnp.sqrt(squares), jnp.finfo(jnp.float32).tiny)


def adapt(model: Decoder, lora: LoraConfig, rngs: nnx.Rngs) -> None:
    """Adds adapters to a model in place, and converts frozen parameters to the computation's dtype if it is smaller.

    Args:
        model: model with random or loaded parameters; unchanged if `lora.lora_rank` is 0. If it is divided over a mesh,
            so are the adapters.
        lora: options of the adapters.
        rngs: random streams; only `params` is used. It may be the object that initialized the model.

    Raises:
        RunError: the model has no blocks.
        ValueError: the model already has adapters.

    Example:
        >>> model = Decoder(ModelConfig(vocab_size=100, num_layers=2), rngs=nnx.Rngs(0))
        >>> adapt(model, LoraConfig(lora_rank=4, lora_targets=("query",)), nnx.Rngs(1))
        >>> model.blocks.attention.query.lora_a.shape, model(jnp.zeros((2, 16), jnp.int32)).shape
        ((2, 128, 4), (2, 16, 128))
    """
    if not lora.lora_rank:
        return
    if not model.config.num_layers:
        raise RunError("--lora-rank needs --num-layers of at least 1, got 0")
    if any(adapted_projections(model)):
        raise ValueError("model must not have adapters yet, got a model with adapters")
    for projection in lora.lora_targets:
        module = getattr(model.blocks, MODULES[projection])
        setattr(module, projection, AdaptedLinear(getattr(module, projection), projection, lora, rngs))
    dtype = jnp.dtype(model.config.dtype)
    for path, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Param) or path[-1] == "scale":
            continue
        trains = is_adapter(name_of(path)) or is_named(name_of(path), lora.unfreeze)
        # One parameter at a time, so that only one exists in both dtypes.
        if not trains and variable.dtype.itemsize > dtype.itemsize:
            variable.set_value(variable[...].astype(dtype))


def adapted_projections(model: Decoder) -> Iterator[tuple[Projection, AdaptedLinear]]:
    """Yields the names and modules of the projections that have an adapter."""
    for projection, module in MODULES.items():
        linear = getattr(getattr(model.blocks, module), projection)
        if isinstance(linear, AdaptedLinear):
            yield projection, linear


def adapted_shapes(config: ModelConfig, lora: LoraConfig) -> Decoder:
    """Returns what `decoder_shapes` returns, with adapters: structure, shapes and dtypes; nothing is initialized."""

    def build() -> Decoder:
        rngs = nnx.Rngs(0)
        model = Decoder(config, rngs=rngs)
        adapt(model, lora, rngs)
        return model

    return nnx.eval_shape(build)


def merge(model: Decoder) -> Decoder:
    """Merges the adapters into the kernels: returns a plain decoder with kernels W + s A B, or those of DoRA.

    Args:
        model: model with or without adapters; it is not modified.

    Returns:
        A decoder whose parameters have the config's param_dtype. The merged kernels are rounded once, to that dtype.

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
