"""Tests the adapters of `jax_pallas.hosts`: the loss and its gradients are those of the logits of the host."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from host_devices import failures_of, run_named
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_pallas
from jax_pallas.hosts.heads import head_arguments, head_cross_entropy

D, V = 16, 40
X = jax.random.normal(jax.random.key(0), (2, 6, D))
TARGET = jax.random.randint(jax.random.key(1), (2, 6), 0, V)
CLOSE = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


def unfused(logits: Array, target: Array = TARGET) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), target).mean()


def same(found: Callable[..., Any], expected: Callable[..., Any], *arguments: Any) -> None:
    """Checks that two functions have the same results and gradients by all arguments."""
    numbers = tuple(range(len(arguments)))
    results = [jax.jit(jax.value_and_grad(f, numbers))(*arguments) for f in (found, expected)]
    jax.tree.map(CLOSE, *results)


class EqxModule:
    """A layer of equinox, as in equinox 0.13.8: the attributes of `equinox/nn/_linear.py` and `_embedding.py`."""

    def __init__(self, weight: Array, bias: Array | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Array) -> Array:
        return self.weight @ x if self.bias is None else self.weight @ x + self.bias


def equinox_layer(name: str, weight: Array, bias: Array | None = None) -> Any:
    module = {"Linear": "equinox.nn._linear", "Embedding": "equinox.nn._embedding"}[name]
    return type(name, (EqxModule,), {"__module__": module, "__call__": EqxModule.__call__})(weight, bias)


HEADS: dict[str, Callable[[], tuple[Any, Callable[[Any, Array], Array]]]] = {
    "nnx.Linear": lambda: (nnx.Linear(D, V, rngs=nnx.Rngs(0)), lambda head, x: head(x)),
    "nnx.Linear without bias": lambda: (
        nnx.Linear(D, V, use_bias=False, rngs=nnx.Rngs(0)),
        lambda head, x: head(x),
    ),
    "nnx.Embed": lambda: (nnx.Embed(V, D, rngs=nnx.Rngs(0)), lambda head, x: head.attend(x)),
    "nnx.Param": lambda: (nnx.Param(jax.random.normal(jax.random.key(2), (V, D))), lambda head, x: x @ head[...].T),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_nnx_has_the_loss_and_gradients_of_its_logits(name: str) -> None:
    head, logits = HEADS[name]()
    graph, state = nnx.split(head)

    def found(state: Any, x: Array) -> Array:
        return head_cross_entropy(nnx.merge(graph, state), x, TARGET)

    def expected(state: Any, x: Array) -> Array:
        return unfused(logits(nnx.merge(graph, state), x))

    same(found, expected, state, X)


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize("layer", [linen.Dense(V), linen.Dense(V, use_bias=False), linen.Embed(V, D)])
def test_a_head_of_linen_has_the_loss_and_gradients_of_its_logits(layer: Any, as_mapping: bool) -> None:
    method = layer.attend if isinstance(layer, linen.Embed) else None
    first = jnp.zeros(1, int) if method else X
    variables = layer.init(jax.random.key(0), first)

    def found(variables: Any, x: Array) -> Array:
        return head_cross_entropy(variables["params"] if as_mapping else layer.bind(variables), x, TARGET)

    same(found, lambda variables, x: unfused(layer.apply(variables, x, method=method)), variables, X)


class Decoder(linen.Module):
    """A model whose logits are tied to a partitioned embedding, and that computes its loss."""

    def setup(self) -> None:
        init = linen.with_partitioning(linen.initializers.normal(), ("vocab", None))
        self.embed = linen.Embed(V, D, embedding_init=init)

    def __call__(self, tokens: Array, fused: bool) -> Array:
        x = jnp.tanh(self.embed(tokens))
        return head_cross_entropy(self.embed, x, TARGET) if fused else unfused(self.embed.attend(x))


def test_a_tied_embedding_within_a_module_of_linen_gets_both_gradients() -> None:
    model = Decoder()
    variables = linen.unbox(model.init(jax.random.key(0), TARGET, fused=True))
    boxed = model.init(jax.random.key(0), TARGET, fused=True)
    CLOSE(model.apply(boxed, TARGET, fused=True), model.apply(boxed, TARGET, fused=False))
    fused, logits = (lambda variables, fused=fused: model.apply(variables, TARGET, fused) for fused in (True, False))
    same(fused, logits, variables)


@pytest.mark.parametrize("name", ["Linear", "Embedding"])
def test_a_head_of_equinox_has_the_loss_and_gradients_of_its_logits(name: str) -> None:
    weight = jax.random.normal(jax.random.key(2), (V, D))
    bias = jax.random.normal(jax.random.key(3), (V,)) if name == "Linear" else jnp.zeros(V)

    def found(weight: Array, bias: Array, x: Array) -> Array:
        return head_cross_entropy(equinox_layer(name, weight, bias if name == "Linear" else None), x, TARGET)

    def expected(weight: Array, bias: Array, x: Array) -> Array:
        layer = EqxModule(weight, bias if name == "Linear" else None)
        return unfused(jax.vmap(jax.vmap(layer))(x))

    same(found, expected, weight, bias, X)


def test_a_layer_with_a_dtype_computes_in_it() -> None:
    layer = nnx.Linear(D, V, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    found = head_arguments(layer, X)
    assert {found[name].dtype for name in ("input", "linear_weight", "linear_bias")} == {jnp.dtype(jnp.bfloat16)}
    CLOSE(head_cross_entropy(layer, X, TARGET), unfused(layer(X)), rtol=4e-3)
    # A head of float32 keeps its bits if the call takes it as it is.
    assert head_arguments(layer, X, head_precision="float32")["linear_weight"].dtype == jnp.float32


def test_options_reach_the_loss_and_arrays_have_a_vocab_axis() -> None:
    kernel = jax.random.normal(jax.random.key(2), (D, V))
    bias = jax.random.normal(jax.random.key(3), (V,))
    options: dict[str, Any] = {"softcap": 5.0, "reduction": "sum", "z_loss_weight": 0.1}
    found = head_cross_entropy(kernel, X, TARGET, vocab_axis=1, linear_bias=bias, **options)
    head = {"kernel": kernel, "bias": bias}
    CLOSE(found, head_cross_entropy(head, X, TARGET, **options))
    CLOSE(found, jax_pallas.linear_cross_entropy(X, kernel.T, TARGET, linear_bias=bias, **options))
    log_probs = jax_pallas.linear_log_probs(target=TARGET, **head_arguments(head, X))
    CLOSE(log_probs.log_prob, -optax.softmax_cross_entropy_with_integer_labels(X @ kernel + bias, TARGET))


class Scaled(nnx.Linear):
    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        return 2 * super().__call__(inputs, out_sharding)


def with_adapter() -> nnx.Linear:
    layer = nnx.Linear(D, V, rngs=nnx.Rngs(0))
    layer.kernel_lora_a = nnx.Param(jnp.zeros((D, 2)))  # as qwix 0.1.8 adds it
    return layer


@pytest.mark.parametrize(
    ("head", "options", "error", "message"),
    [
        (lambda: nnx.LayerNorm(D, rngs=nnx.Rngs(0)), {}, TypeError, "got flax.nnx.nn.normalization.LayerNorm"),
        (lambda: "lm_head", {}, TypeError, "head must be a flax.nnx.Linear or Embed, .* got builtins.str"),
        (lambda: nnx.LoRALinear(D, V, lora_rank=2, rngs=nnx.Rngs(0)), {}, TypeError, "LoRALinear overrides __call__"),
        (lambda: Scaled(D, V, rngs=nnx.Rngs(0)), {}, TypeError, "Scaled overrides __call__ of Linear: pass"),
        (with_adapter, {}, TypeError, r"kernel and, optionally, bias, got \['bias', 'kernel', 'kernel_lora_a'\]"),
        (
            lambda: nnx.Linear(D, V, dot_general=jnp.dot, rngs=nnx.Rngs(0)),
            {},
            TypeError,
            "has a dot_general, which the loss does not call",
        ),
        (lambda: linen.Dense(V), {}, ValueError, "is not bound to its parameters"),
        (lambda: linen.Dense(V).bind({}), {}, ValueError, "has no parameters yet"),
        (
            lambda: linen.Dense(V).bind({"params": {"kernel": X[0].T}, "quantized": {"a": X}}),
            {},
            TypeError,
            r"the collections \['params', 'quantized'\]",
        ),
        (lambda: {"kernel": X, "lora_a": X}, {}, TypeError, r"a mapping, must have .* got \['kernel', 'lora_a'\]"),
        (
            lambda: {"kernel": "quantized"},
            {},
            TypeError,
            "kernel of the head, a mapping, must be an array, got builtins",
        ),
        (
            lambda: {"kernel": X[0].T},
            {"vocab_axis": 1},
            ValueError,
            "vocab_axis must be None with the head builtins.dict",
        ),
        (lambda: {"kernel": X[0].T}, {"linear_bias": X}, ValueError, "linear_bias must be None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_heads_are_refused(head: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        head_cross_entropy(head(), X, TARGET, **options)


def check_sharded_head(kind: AxisType) -> None:
    """Two devices divide the tokens, and two the vocabulary."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    kernel = jax.random.normal(jax.random.key(2), (D, V))
    bias = jax.random.normal(jax.random.key(3), (V,))
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in ((kernel, P(None, "model")), (bias, P("model")), (X, P("data")), (TARGET, P("data")))
    ]
    axes: dict[str, Any] = {}
    if kind == AxisType.Auto:
        axes = {"mesh": mesh, "batch_axis_names": "data", "vocab_axis_name": "model"}

    def found(kernel: Array, bias: Array, x: Array, target: Array) -> Array:
        return head_cross_entropy({"kernel": kernel, "bias": bias}, x, target, **axes)

    with jax.set_mesh(mesh):
        result = jax.jit(jax.value_and_grad(found, (0, 1, 2)))(*placed)
    expected = jax.value_and_grad(lambda kernel, bias, x: unfused(x @ kernel + bias), (0, 1, 2))(kernel, bias, X)
    jax.tree.map(CLOSE, result, expected)


CHECKS: dict[str, Callable[[], None]] = {
    "explicit sharding": partial(check_sharded_head, AxisType.Explicit),
    "automatic sharding": partial(check_sharded_head, AxisType.Auto),
}


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """The failures of the selected tests' CHECKS on several devices."""
    return failures_of(request)


@pytest.mark.parametrize("name", CHECKS)
def test_on_several_devices(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


if __name__ == "__main__":
    run_named(CHECKS)
