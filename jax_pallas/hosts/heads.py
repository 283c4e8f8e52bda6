"""The loss of an output layer of flax.nnx, flax.linen or equinox: `head_cross_entropy(head, input, target)`.

`head_arguments` finds the weight and the bias of a layer, and which axis of the weight is the vocabulary. No library is
imported: a layer is recognized by its class, so it needs no installation that the caller does not have.

    | head | linear_weight | vocab_axis | bias |
    |---|---|---|---|
    | `flax.nnx.Linear` | `kernel` (D, V) | 1 | `bias` |
    | `flax.nnx.Embed` | `embedding` (V, D) | 0 | none |
    | `flax.linen.Dense`, bound to its variables | `kernel` (D, V) | 1 | `bias` |
    | `flax.linen.Embed`, bound to its variables | `embedding` (V, D) | 0 | none |
    | the parameters of such a layer of flax.linen, a mapping | `kernel` or `embedding` | 1 or 0 | `bias` |
    | `equinox.nn.Linear` | `weight` (V, D) | 0 | `bias` |
    | `equinox.nn.Embedding` | `weight` (V, D) | 0 | none |
    | an array, or a variable of flax.nnx | itself | the argument | the argument |

Read in flax 0.12.10 (`flax/nnx/nn/linear.py`, `flax/linen/linear.py`) and equinox 0.13.8 (`equinox/nn/_linear.py`,
`equinox/nn/_embedding.py`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jax_pallas import linear_ce, sharded

__all__ = ["head_arguments", "head_cross_entropy"]

# Options of `jax_pallas.sharded` only.
OF_MESH = ("mesh", "batch_axis_names", "fsdp_axis_name")


class Layer(NamedTuple):
    """Where a layer keeps its parameters, and the method that applies them."""

    weight: str
    vocab_axis: int
    bias: str | None
    method: str


_DENSE = Layer("kernel", 1, "bias", "__call__")
_EMBED = Layer("embedding", 0, None, "attend")
LAYERS = {  # by the first and the last part of the name of the class, and by the package of flax
    ("flax.nnx", "Linear"): _DENSE,
    ("flax.nnx", "Embed"): _EMBED,
    ("flax.linen", "Dense"): _DENSE,
    ("flax.linen", "Embed"): _EMBED,
    ("equinox.nn", "Linear"): Layer("weight", 0, "bias", "__call__"),
    ("equinox.nn", "Embedding"): Layer("weight", 0, None, "__call__"),
}
PROMOTE_DTYPE = ("flax.nnx.nn.dtypes", "flax.linen.dtypes")  # where the default promote_dtype of layers of flax is
EXPECTED = (
    "head must be a flax.nnx.Linear or Embed, a bound flax.linen.Dense or Embed or its parameters, an "
    "equinox.nn.Linear or Embedding, or an array"
)
PASS_AN_ARRAY = "pass the weight that it multiplies by, as an array with vocab_axis and linear_bias"


def head_cross_entropy(head: Any, input: Array, target: Array, **options: Any) -> Any:
    """`jax_pallas.linear_cross_entropy` of the logits of an output layer, without computing the logits.

    It is the loss of `optax.softmax_cross_entropy_with_integer_labels(head(input), target).mean()`, and so are its
    gradients with respect to the parameters of the head.

    Args:
        head: the output layer, or the embedding that the logits are tied to: see the table of `jax_pallas.hosts.heads`.
        input: (..., D) hidden states, as the layer gets them.
        target: (...,) class indices. The caller shifts them.
        **options: of `jax_pallas.linear_cross_entropy`. With mesh, batch_axis_names or fsdp_axis_name, those of
            `jax_pallas.sharded.linear_cross_entropy`, which computes the loss then. vocab_axis and linear_bias only
            with an array.

    Returns:
        As `jax_pallas.linear_cross_entropy`.

    Raises:
        TypeError, ValueError: as `head_arguments` and `jax_pallas.linear_cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_pallas.hosts.heads import head_cross_entropy
        >>> head = nnx.Linear(16, 100, rngs=nnx.Rngs(0))
        >>> loss = lambda head: head_cross_entropy(head, jnp.ones((2, 6, 16)), jnp.zeros((2, 6), int))
        >>> nnx.grad(loss)(head).kernel.shape
        (16, 100)
    """
    if "linear_weight" in options:
        raise TypeError("linear_weight must be absent, because head has the weight")
    arguments = options | {"target": target} | head_arguments(head, input, **of_head(options))
    return package_for(arguments).linear_cross_entropy(**arguments)


def head_arguments(
    head: Any,
    input: Array,
    *,
    vocab_axis: int | None = None,
    linear_bias: Array | None = None,
    head_precision: str | None = None,
    dtype: DTypeLike | None = None,
) -> dict[str, Any]:
    """Returns the arguments of the functions of `jax_pallas` that an output layer determines.

    A layer of flax with a dtype computes in it, so input, weight and bias are cast to it, as in the layer. Otherwise a
    float32 head under a 16-bit input is rounded to input's dtype, as by `jax_pallas.linear_cross_entropy`, where the
    layer would multiply in float32.

    Args:
        head: see `head_cross_entropy`.
        input: (..., D) hidden states.
        vocab_axis: which axis of an array is the vocabulary; None is 0. Not with a layer, which determines it.
        linear_bias: (V,) array or variable of flax.nnx, with an array only.
        head_precision: of `jax_pallas.linear_cross_entropy`. With "float32" the weight is not cast.
        dtype: in which the layer computes; None is the dtype of a layer of flax, if it has one.

    Returns:
        input, linear_weight, linear_bias, vocab_axis and head_precision.

    Raises:
        TypeError: input is not an array; head is not one of the layers, has other parameters too, such as those of an
            adapter, or computes something else than they do.
        ValueError: vocab_axis or linear_bias is given with a layer, or a layer of flax.linen has no parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import jax_pallas
        >>> from jax_pallas.hosts.heads import head_arguments
        >>> embed, x = nnx.Embed(100, 16, rngs=nnx.Rngs(0)), jnp.ones((2, 6, 16))
        >>> jax_pallas.linear_log_probs(target=jnp.zeros((2, 6), int), **head_arguments(embed, x)).entropy.shape
        (2, 6)
    """
    if not _is_array(input):
        raise TypeError(f"input must be an array, got {type(input).__name__}")
    array, linear_bias = _value(head), _value(linear_bias)
    if not _is_array(array):
        for name, value in (("vocab_axis", vocab_axis), ("linear_bias", linear_bias)):
            if value is not None:
                raise ValueError(f"{name} must be None with the head {_named(head)}, which determines it")
        array, linear_bias, vocab_axis, of_layer = _parameters(head)
        dtype = of_layer if dtype is None else dtype
    if dtype is not None:
        input = lax.convert_element_type(input, dtype)
        if head_precision != "float32":
            array = lax.convert_element_type(array, dtype)
        linear_bias = None if linear_bias is None else lax.convert_element_type(linear_bias, dtype)
    found = {"input": input, "linear_weight": array, "linear_bias": linear_bias, "vocab_axis": vocab_axis or 0}
    return found | {"head_precision": head_precision}


def of_head(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a loss that `head_arguments` takes."""
    return {name: options[name] for name in ("vocab_axis", "linear_bias", "head_precision") if name in options}


def package_for(options: Mapping[str, Any]) -> Any:
    """Returns the module whose functions take these options: `jax_pallas.sharded` if one names a mesh or its axes."""
    return sharded if any(name in options for name in OF_MESH) else linear_ce


def check_no_adapter(layer: Any) -> None:
    """Checks that a module of flax.nnx has no adapter, which a loss of its other parameters would not apply.

    Raises:
        TypeError: it has.
    """
    names = [name for name, value in vars(layer).items() if _is_variable(value, "LoRAParam")]
    if names:
        raise TypeError(
            f"the head {_named(layer)} has an adapter, {', '.join(names)}, which the loss does not apply: leave the "
            "head out of the modules that get one"
        )


def _parameters(head: Any) -> tuple[Any, Any, int, Any]:
    """Returns the weight, the bias, the vocab_axis and the dtype of a layer."""
    if isinstance(head, Mapping):
        layer = _EMBED if "embedding" in head else _DENSE
        return *_arrays(head, layer, "a mapping"), layer.vocab_axis, None
    base = next((cls for cls in type(head).__mro__ if _key(cls) in LAYERS), None)
    if base is None:
        raise TypeError(f"{EXPECTED}, got {_named(head)}")
    layer = LAYERS[_key(base)]
    if getattr(type(head), layer.method) is not getattr(base, layer.method):
        raise TypeError(f"the head {_named(head)} overrides {layer.method} of {base.__name__}: {PASS_AN_ARRAY}")
    if getattr(head, "dot_general", None) not in (None, lax.dot_general) or getattr(head, "dot_general_cls", None):
        raise TypeError(f"the head {_named(head)} has a dot_general, which the loss does not call: {PASS_AN_ARRAY}")
    promote = getattr(head, "promote_dtype", None)
    if promote is not None and getattr(promote, "__module__", None) not in PROMOTE_DTYPE:
        raise TypeError(f"the head {_named(head)} has a promote_dtype, which the loss does not call: {PASS_AN_ARRAY}")
    if _key(base)[0] == "flax.linen":
        if head.scope is None:
            raise ValueError(
                f"the head {_named(head)} is not bound to its parameters: pass them, such as "
                "variables['params']['head'], or a layer of module.bind(variables)"
            )
        parameters = head.variables.get("params", {})
        if layer.weight not in parameters:
            raise ValueError(f"the head {_named(head)} has no parameters yet: call it once while the model initializes")
        if set(head.variables) - {"params"}:
            raise TypeError(
                f"the head {_named(head)} has the collections {sorted(head.variables)}, and must have 'params' only: "
                f"{PASS_AN_ARRAY}"
            )
    elif _key(base)[0] == "flax.nnx":
        parameters = {name: value for name, value in vars(head).items() if _is_variable(value)}
    else:
        parameters = {name: value for name, value in vars(head).items() if _is_array(value)}
    return *_arrays(parameters, layer, _named(head)), layer.vocab_axis, getattr(head, "dtype", None)


def _arrays(parameters: Mapping[str, Any], layer: Layer, name: str) -> tuple[Any, Any]:
    """Returns the weight and the bias of a layer.

    Raises:
        TypeError: it has other parameters.
    """
    present = {key for key, value in parameters.items() if value is not None}
    if isinstance(parameters.get("params"), Mapping):
        raise TypeError(
            f"the head, {name}, must be the parameters of one layer of flax.linen, got variables: pass those of the "
            "layer in variables['params']"
        )
    if layer.weight not in present or present - {layer.weight, layer.bias}:
        expected = layer.weight if layer.bias is None else f"{layer.weight} and, optionally, {layer.bias}"
        raise TypeError(
            f"the head, {name}, must have the parameters {expected}, got {sorted(present)}: {PASS_AN_ARRAY}"
        )
    values = {key: _value(parameters[key]) for key in present}
    for key, value in values.items():
        if not _is_array(value):
            raise TypeError(f"{key} of the head, {name}, must be an array, got {_named(value)}: {PASS_AN_ARRAY}")
    return values[layer.weight], None if layer.bias is None else values.get(layer.bias)


def _key(cls: type) -> tuple[str, str]:
    """Returns the package and the name of a class, as in LAYERS."""
    return ".".join(cls.__module__.split(".")[:2]), cls.__name__


def _named(head: Any) -> str:
    cls = type(head)
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_variable(value: Any, name: str = "Variable") -> bool:
    """Whether a value is a variable of flax.nnx, of the class with a name."""
    return any(_key(cls) == ("flax.nnx", name) for cls in type(value).__mro__)


def _value(value: Any) -> Any:
    """Returns the value of a variable of flax.nnx, or of a parameter in a box of flax.linen that has its sharding."""
    if _is_variable(value):
        return value.get_value()
    return value.unbox() if hasattr(value, "unbox") else value


def _is_array(value: Any) -> bool:
    return isinstance(value, (Array, np.ndarray))
