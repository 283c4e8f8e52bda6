"""Tests the adapters of `jax_pallas.hosts`: the loss and its gradients are those of the logits of the host."""

import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jax_host_stand_ins as stand_ins
import numpy as np
import optax
import pytest
from flax import linen, nnx
from host_devices import failures_of, run_named
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_host_stand_ins import (
    MaxTextConfig,
    MaxTextLinenModel,
    MaxTextModel,
    OldTunixModel,
    TunixModel,
    host,
    installed,
)
from jax_hosts import losses_of_steps
from jax_problem import cast, integers, normal

import jax_pallas
from jax_pallas import linear_ce
from jax_pallas.hosts.heads import head_arguments, head_cross_entropy

D, V = 16, 40
X = normal(4, (2, 6, D))
TARGET = integers(1, (2, 6), 0, V)
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
    "nnx.Param": lambda: (nnx.Param(normal(2, (V, D))), lambda head, x: x @ head[...].T),
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
    method: Any = layer.attend if isinstance(layer, linen.Embed) else None
    first = jnp.zeros(1, int) if method else X
    variables = layer.init(jax.random.key(0), first)

    def found(variables: Any, x: Array) -> Array:
        return head_cross_entropy(variables["params"] if as_mapping else layer.bind(variables), x, TARGET)

    def expected(variables: Any, x: Array) -> Array:
        logits: Any = layer.apply(variables, x, method=method)
        return unfused(logits)

    same(found, expected, variables, X)


class Decoder(linen.Module):
    """A model whose logits are tied to a partitioned embedding, and that computes its loss."""

    def setup(self) -> None:
        init = linen.with_partitioning(linen.initializers.normal(), ("vocab", None))
        self.embed = linen.Embed(V, D, embedding_init=init)

    def __call__(self, tokens: Array, fused: bool) -> Array:
        x = jnp.tanh(self.embed(tokens))
        return head_cross_entropy(self.embed, x, TARGET) if fused else unfused(self.embed.attend(x))


def test_a_tied_embedding_within_a_module_of_linen_gets_both_gradients() -> None:
    model: Any = Decoder()
    variables = linen.unbox(model.init(jax.random.key(0), TARGET, fused=True))
    boxed = model.init(jax.random.key(0), TARGET, fused=True)
    CLOSE(model.apply(boxed, TARGET, fused=True), model.apply(boxed, TARGET, fused=False))
    fused, logits = (lambda variables, fused=fused: model.apply(variables, TARGET, fused) for fused in (True, False))
    same(fused, logits, variables)


@pytest.mark.parametrize("name", ["Linear", "Embedding"])
def test_a_head_of_equinox_has_the_loss_and_gradients_of_its_logits(name: str) -> None:
    weight = normal(2, (V, D))
    bias = normal(3, (V,)) if name == "Linear" else jnp.zeros(V)

    def found(weight: Array, bias: Array, x: Array) -> Array:
        return head_cross_entropy(equinox_layer(name, weight, bias if name == "Linear" else None), x, TARGET)

    def expected(weight: Array, bias: Array, x: Array) -> Array:
        layer = EqxModule(weight, bias if name == "Linear" else None)
        return unfused(jax.vmap(jax.vmap(layer))(x))

    same(found, expected, weight, bias, X)


def nnx_model() -> tuple[Any, Callable[[Any], tuple[Any, Array]]]:
    """Returns the parameters of a model of flax.nnx, and a function of them: the head and its input."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed, self.layer = nnx.Embed(V, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
            self.head = nnx.Linear(D, V, rngs=rngs)

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def apply(state: Any) -> tuple[Any, Array]:
        model = nnx.merge(graph, state)
        return model.head, jnp.tanh(model.layer(model.embed(TARGET)))

    return state, apply


def linen_model() -> tuple[Any, Callable[[Any], tuple[Any, Array]]]:
    """As `nnx_model`, with logits that are tied to the embedding."""
    embed, layer = linen.Embed(V, D), linen.Dense(D)
    variables = {"embed": embed.init(jax.random.key(0), TARGET), "layer": layer.init(jax.random.key(1), X)}

    def apply(variables: Any) -> tuple[Any, Array]:
        bound: Any = embed.bind(variables["embed"])
        hidden: Any = layer.apply(variables["layer"], bound(TARGET))
        return bound, jnp.tanh(hidden)

    return variables, apply


def equinox_model() -> tuple[Any, Callable[[Any], tuple[Any, Array]]]:
    """As `nnx_model`, of the installed equinox."""
    equinox = pytest.importorskip("equinox", reason="equinox is not installed (`make test-hosts` installs it)")
    keys = jax.random.split(jax.random.key(0), 3)
    embed, layer = equinox.nn.Embedding(V, D, key=keys[0]), equinox.nn.Linear(D, D, key=keys[1])
    head = equinox.nn.Linear(D, V, key=keys[2])

    def apply(layers: Any) -> tuple[Any, Array]:
        embed, layer, head = layers
        return head, jnp.tanh(jax.vmap(jax.vmap(layer))(jax.vmap(jax.vmap(embed))(TARGET)))

    return (embed, layer, head), apply


LOGITS: dict[str, Callable[..., Array]] = {
    "nnx": lambda head, x: head(x),
    "linen": lambda head, x: head.attend(x),
    "equinox": lambda head, x: jax.vmap(jax.vmap(head))(x),
}


@pytest.mark.parametrize(("name", "model"), [("nnx", nnx_model), ("linen", linen_model), ("equinox", equinox_model)])
def test_20_steps_have_the_losses_of_the_logits(name: str, model: Callable[[], Any]) -> None:
    parameters, apply = model()

    def fused(parameters: Any) -> Array:
        head, x = apply(parameters)
        return head_cross_entropy(head, x, TARGET)

    def of_logits(parameters: Any) -> Array:
        return unfused(LOGITS[name](*apply(parameters)))

    found, expected = (losses_of_steps(loss, parameters) for loss in (fused, of_logits))
    assert expected[-1] < 0.9 * expected[0]
    CLOSE(found, expected)


@pytest.mark.parametrize("name", ["Linear", "Embedding"])
def test_the_layers_of_the_installed_equinox(name: str) -> None:
    equinox = pytest.importorskip("equinox", reason="equinox is not installed (`make test-hosts` installs it)")
    sizes = (D, V) if name == "Linear" else (V, D)
    layer = getattr(equinox.nn, name)(*sizes, key=jax.random.key(2))
    parts = layer.weight, layer.bias if name == "Linear" else None
    same(
        lambda layer, x: head_cross_entropy(layer, x, TARGET),
        lambda layer, x: unfused(x @ layer.weight.T + (layer.bias if name == "Linear" else 0)),
        layer,
        X,
    )
    of_tests = head_arguments(equinox_layer(name, *parts), X)
    assert all(found is of_tests[key] for key, found in head_arguments(layer, X).items())


def test_a_layer_with_a_dtype_computes_in_it() -> None:
    layer = nnx.Linear(D, V, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    found = head_arguments(layer, X)
    assert {found[name].dtype for name in ("input", "linear_weight", "linear_bias")} == {jnp.dtype(jnp.bfloat16)}
    CLOSE(head_cross_entropy(layer, X, TARGET), unfused(layer(X)), rtol=4e-3)
    # A head of float32 keeps its bits if the call takes it as it is.
    assert head_arguments(layer, X, head_precision="float32")["linear_weight"].dtype == jnp.float32


def test_options_reach_the_loss_and_arrays_have_a_vocab_axis() -> None:
    kernel = normal(2, (D, V))
    bias = normal(3, (V,))
    options: dict[str, Any] = {"softcap": 5.0, "reduction": "sum", "z_loss_weight": 0.1}
    found = head_cross_entropy(kernel, X, TARGET, vocab_axis=1, linear_bias=bias, **options)
    variables = {"linear_bias": nnx.Param(bias), **options}
    CLOSE(found, head_cross_entropy(nnx.Param(kernel), X, TARGET, vocab_axis=1, **variables))
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
    vars_of: Any = layer
    vars_of.kernel_lora_a = nnx.Param(jnp.zeros((D, 2)))  # as qwix 0.1.8 adds it
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
        (
            lambda: linen.Dense(V, promote_dtype=lambda *arrays, **_: list(arrays)).bind(
                {"params": {"kernel": X[0].T}}
            ),
            {},
            TypeError,
            "has a promote_dtype, which the loss does not call",
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
        (lambda: {"params": {"kernel": X[0].T}}, {}, TypeError, r"got variables: .* layer in variables\['params'\]"),
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
        (lambda: X, {"linear_weight": X}, TypeError, "linear_weight must be absent, because head has the weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_heads_are_refused(head: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        head_cross_entropy(head(), X, TARGET, **options)


def test_an_input_that_is_no_array_is_refused() -> None:
    values: Any = [1.0]
    with pytest.raises(TypeError, match=r"^input must be an array, got list$"):
        head_cross_entropy(nnx.Linear(D, V, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), values, TARGET)


TOKENS = integers(4, (3, 7), 0, V)
MASK = cast(np.arange(7) > np.arange(3)[:, None], bool)


def loss_of(output: Any) -> Array:
    """Returns the number that tunix differentiates and reports."""
    return output.primary_loss.compute() if hasattr(output, "primary_loss") else output


@pytest.mark.filterwarnings("ignore:Using 'Module.sow..' outside:DeprecationWarning")  # as models of tunix 0.1.7 do
@pytest.mark.parametrize(("version", "model"), [("0.1.7", OldTunixModel), ("0.1.8", TunixModel)])
@pytest.mark.parametrize(("tied", "softcap"), [(True, 5.0), (False, None)])
def test_loss_fn_of_tunix_has_the_results_of_its_default(
    version: str, model: type[TunixModel], tied: bool, softcap: float | None
) -> None:
    with installed(*stand_ins.tunix(version)):
        from jax_pallas.hosts.tunix import loss_fn

        default = host("tunix.sft.peft_trainer")._default_loss_fn
        graph, state = nnx.split(model(V, D, tied, softcap))

        def differentiated(loss: Callable[..., Any]) -> Callable[..., Any]:
            return lambda state: loss_of(loss(nnx.merge(graph, state), TOKENS, MASK, None, None))

        same(differentiated(loss_fn()), differentiated(default), state)
        found, expected = (loss(nnx.merge(graph, state), TOKENS, MASK, None, None) for loss in (loss_fn(), default))
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(CLOSE, found, expected)


def differentiated_log_probs(common: Any, graph: Any, state: Any, temperature: float) -> Any:
    def of_all(state: Any) -> Array:
        log_prob, entropy = common.compute_per_token_logps(graph, state, TOKENS, temperature, True)
        return jnp.sum(jnp.sin(log_prob) + entropy**2)

    return jax.value_and_grad(of_all)(state)


@pytest.mark.parametrize(("tied", "softcap", "temperature"), [(True, 5.0, 0.7), (False, None, 1.0)])
def test_patch_of_tunix_computes_its_chunked_log_probabilities(
    tied: bool, softcap: float | None, temperature: float
) -> None:
    with installed(*stand_ins.tunix()):
        from jax_pallas.hosts.tunix import patch, unpatch

        common = host("tunix.rl.common")
        graph, state = nnx.split(TunixModel(V, D, tied, softcap))
        arguments = common, graph, state, temperature
        original = common.compute_chunked_logps
        expected = differentiated_log_probs(*arguments)
        with patch(saved_budget=2**20), mock.patch.object(TunixModel, "compute_final_logits", None):
            jax.tree.map(CLOSE, differentiated_log_probs(*arguments), expected)
        assert common.compute_chunked_logps is original
        patch(vocab_size=0)
        with pytest.raises(ValueError, match="vocab_size"):
            differentiated_log_probs(*arguments)
        with pytest.raises(ValueError, match=r"implementation must be one of .*'chunked', got 'cuda'"):
            patch(implementation="cuda")
        patch()  # replaces the options
        log_prob = common.compute_per_token_logps(graph, state, TOKENS, temperature, False)
        unpatch()
        unpatch()
        assert common.compute_chunked_logps is original
        CLOSE(log_prob, common.compute_per_token_logps(graph, state, TOKENS, temperature, False))


def test_a_model_of_tunix_computes_in_its_dtype() -> None:
    with installed(*stand_ins.tunix()):
        from jax_pallas.hosts.tunix import compute_chunked_logps

        for tied in (False, True):
            model = TunixModel(V, D, tied, dtype=jnp.bfloat16)
            arguments = model, X, TARGET, 1.0, 2, False
            found = compute_chunked_logps(*arguments)
            exact = stand_ins.target_log_probs(
                jnp.matmul(X.astype(jnp.bfloat16), _weight(model), preferred_element_type=jnp.float32), TARGET
            )
            CLOSE(found, exact, atol=1e-5)


def _weight(model: TunixModel) -> Array:
    weight = model.lm_head.w[...] if hasattr(model, "lm_head") else model.embedder.input_embedding[...].T
    return weight.astype(jnp.bfloat16)


def test_other_models_of_tunix_need_a_head_and_adapters_are_refused() -> None:
    with installed(*stand_ins.tunix()):
        from jax_pallas.hosts.tunix import loss_fn

        class Other(TunixModel):
            pass

        def call(model: Any, **options: Any) -> Any:
            return loss_fn(**options)(model, TOKENS, MASK, None, None)

        other = Other(V, D, tied=False)
        with pytest.raises(TypeError, match=r"head must be given with a model other than .* got test_hosts_jax\.Other"):
            call(other)
        CLOSE(loss_of(call(other, head=lambda model: model.lm_head)), loss_of(call(TunixModel(V, D, tied=False))))
        weight = other.lm_head.w
        found = call(other, head=lambda model: weight, vocab_axis=1)
        CLOSE(loss_of(found), loss_of(call(TunixModel(V, D, tied=False))))
        adapted: Any = TunixModel(V, D, tied=False)
        adapted.lm_head.w_lora_a = nnx.LoRAParam(jnp.zeros((D, 2)))
        with pytest.raises(TypeError, match=r"the head tunix.models.qwen3.model.Einsum has an adapter, w_lora_a"):
            call(adapted)
        with pytest.raises(TypeError, match="reduction is set by the adapter, got reduction='sum'"):
            loss_fn(reduction="sum")

        class Opaque(TunixModel):
            def __call__(self, tokens: Array, positions: Any, cache: Any, attention_mask: Any) -> Any:
                raise AssertionError

        with pytest.raises(
            TypeError, match="Opaque must take skip_lm_head or output_hidden_states, got the arguments tok"
        ):
            call(Opaque(V, D, tied=False), head=lambda model: model.lm_head)


def test_another_interface_of_tunix_is_an_error_that_names_the_tested_versions() -> None:
    tested = (
        r"jax_pallas.hosts.tunix is tested with google-tunix 0\.1\.7 and 0\.1\.8 \(commit c7d8950\), got google-tunix "
    )
    with installed(*stand_ins.tunix("0.1.7")):
        from jax_pallas.hosts.tunix import patch

        with pytest.raises(ImportError, match=tested + r"0\.1\.7, which has no compute_chunked_logps"):
            patch()
    with installed(*stand_ins.tunix("9.9")):
        from jax_pallas.hosts.tunix import loss_fn, patch

        host("tunix.sft.peft_trainer")._default_loss_fn = other_interface
        with pytest.raises(
            ImportError, match=tested + r"9\.9, whose other_interface has the arguments model, batch in"
        ):
            loss_fn()
        host("tunix.rl.common").compute_chunked_logps = other_interface
        with pytest.raises(
            ImportError, match=tested + r"9\.9, whose other_interface has the arguments model, batch in"
        ):
            patch()


def other_interface(model: Any, batch: Any) -> Any:
    raise AssertionError


def levanter_loss(x: Array, w: Array, **options: Any) -> Any:
    function = host(stand_ins.LEVANTER_API).fused_cross_entropy_loss_and_logsumexp_penalty
    weight = (jnp.arange(x.shape[0]) % 3).astype(jnp.float32)
    return function(x, TARGET.reshape(-1)[: x.shape[0]], w, weight=weight, logit_soft_cap=5.0, **options)


def test_the_registry_of_levanter_gets_an_implementation_with_the_same_results() -> None:
    x, w = X.reshape(-1, D), normal(2, (D, V))
    with installed(*stand_ins.levanter()):
        from jax_pallas.hosts import levanter

        api = host(stand_ins.LEVANTER_API)
        choice = api._default_implementations

        def total(x: Array, w: Array, implementation: Any = None) -> Array:
            return levanter_loss(x, w, logsumexp_weight=0.1, implementation=implementation)

        reference = partial(total, implementation=["reference"])
        same(partial(total, implementation=[levanter.linear_softmax_cross_entropy_loss]), reference, x, w)
        levanter.register("ours", default=False, vocab_size=0)
        assert api._default_implementations is choice
        levanter.register(saved_budget=2**20)
        assert set(api.IMPLEMENTATIONS) == {"reference", "linear_ce"}
        with mock.patch.dict(api.IMPLEMENTATIONS, {"reference": None}):
            found = jax.value_and_grad(total, (0, 1))(x, w)
        jax.tree.map(CLOSE, found, jax.value_and_grad(reference, (0, 1))(x, w))
        found, expected = (
            levanter_loss(x, w, implementation=[name], reduction=None, return_argmax=True)
            for name in ("linear_ce", "reference")
        )
        jax.tree.map(CLOSE, found, expected)
        levanter.unregister()
        levanter.unregister()
        assert api._default_implementations is choice
        assert set(api.IMPLEMENTATIONS) == {"reference"}


def test_the_registry_of_levanter_keeps_its_names_and_its_interface_is_checked() -> None:
    with installed(*stand_ins.levanter()):
        from jax_pallas.hosts import levanter

        with pytest.raises(ValueError, match=r"one of levanter's implementations, \['reference'\], got 'reference'"):
            levanter.register("reference")
        with pytest.raises(ValueError, match=r"saved_budget must not be negative \(bytes\), got -1"):
            levanter.register(saved_budget=-1)
        with pytest.raises(ValueError, match="dtype must be at most float32, got float64"):
            levanter.linear_softmax_cross_entropy_loss(X[0], TARGET[0], X[0].T, dtype=np.float64)
        host(stand_ins.LEVANTER_API).fused_cross_entropy_loss_and_logsumexp_penalty = other_interface
        tested = "marin-levanter 0.2.20.dev202606180959 and 0.2.227.dev40316220070, and commit 01666fd of "
        tested += "marin, got levanter of no version, whose"
        tested = f"jax_pallas.hosts.levanter is tested with {tested} other_interface has"
        not_installed = mock.patch.object(levanter, "version", side_effect=PackageNotFoundError)
        with not_installed, pytest.raises(ImportError, match=tested):
            levanter.register()


def check_levanter_on_devices() -> None:
    """levanter calls its implementation within a `jax.shard_map` that does not track what is the same on devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, w = X.reshape(-1, D), normal(2, (D, V))
    weight = jnp.arange(len(x)) % 3 + 1.0
    target = TARGET.reshape(-1)
    with installed(*stand_ins.levanter()):
        from jax_pallas.hosts.levanter import linear_softmax_cross_entropy_loss

        def losses(implementation: Any, x: Array, w: Array, target: Array) -> Array:
            function = host(stand_ins.LEVANTER_API).fused_cross_entropy_loss_and_logsumexp_penalty
            return function(x, target, w, reduction=None, logsumexp_weight=0.1, implementation=implementation)

        def total(x: Array, w: Array) -> Array:
            specs = P("data"), P(), P("data")
            call = partial(losses, [linear_softmax_cross_entropy_loss])
            mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
            return jnp.sum(mapped(x, w, target) * weight)

        found = jax.jit(jax.value_and_grad(total, (0, 1)))(x, w)
        expected = jax.value_and_grad(lambda x, w: jnp.sum(losses(["reference"], x, w, target) * weight), (0, 1))(x, w)
        jax.tree.map(CLOSE, found, expected)


MAXTEXT = {
    "dense": {"z_loss_multiplier": 0.1},
    "tied": {"logits_via_embedding": True, "final_logits_soft_cap": 3.0, "enable_dropout": True},
    "tied, not scaled": {"logits_via_embedding": True, "normalize_embedding_logits": False},
}
DATA = {"targets": TARGET, "targets_segmentation": cast(np.arange(6) % 3 * np.ones((2, 1)), np.int32)}
ONE_DEVICE = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def maxtext_losses(name: str, *arguments: Any) -> Array:
    """Returns the two results of a function of MaxText's training module."""
    return jnp.stack(getattr(host("maxtext.trainers.pre_train.train"), name)(*arguments))


def maxtext_model(config: Any, mesh: Any = ONE_DEVICE) -> tuple[Any, Any]:
    return nnx.split(MaxTextModel(V, D, config, mesh))


@pytest.mark.parametrize("name", MAXTEXT)
@pytest.mark.parametrize("is_train", [False, True])
def test_patch_of_maxtext_gives_the_loss_of_vocabulary_tiling_in_nnx(name: str, is_train: bool) -> None:
    with installed(*stand_ins.maxtext()):
        from jax_pallas.hosts.maxtext import patch

        config = MaxTextConfig(**MAXTEXT[name])
        graph, state = maxtext_model(config)

        def losses(state: Any, x: Array) -> Array:
            return maxtext_losses(
                "vocab_tiling_nnx_loss", nnx.merge(graph, state, copy=True), x, DATA, config, is_train
            )

        def run() -> Any:
            # Only the first result is differentiated: MaxText reports the second one.
            return losses(state, X), jax.grad(lambda state, x: losses(state, x)[0], (0, 1), allow_int=True)(state, X)

        expected = run()
        with patch(), mock.patch.object(MaxTextModel, "logits_from_hidden_states_for_vocab_tiling", None):
            jax.tree.map(close_unless_key, run(), expected)
        jax.tree.map(close_unless_key, run(), expected)


def close_unless_key(found: Any, expected: Any) -> None:
    """Compares two arrays, other than those of random numbers and their gradients."""
    if jnp.issubdtype(found.dtype, jnp.floating):
        CLOSE(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MAXTEXT)
def test_patch_of_maxtext_gives_the_loss_of_vocabulary_tiling_in_linen(name: str) -> None:
    with installed(*stand_ins.maxtext("0.2.4")):
        from jax_pallas.hosts.maxtext import patch, unpatch

        config = MaxTextConfig(**MAXTEXT[name] | {"enable_dropout": False})
        model: Any = MaxTextLinenModel(config, ONE_DEVICE, V, D)
        method = "logits_from_hidden_states_for_vocab_tiling"
        variables = model.init(jax.random.key(0), X, True, "train", method=method)

        def losses(variables: Any, x: Array) -> Array:
            return maxtext_losses("vocab_tiling_linen_loss", x, DATA, config, model, variables, True)

        def run() -> Any:
            return losses(variables, X), jax.grad(lambda variables, x: losses(variables, x)[0], (0, 1))(variables, X)

        expected = run()
        patch(memory_budget=1)
        with pytest.raises(ValueError, match="memory_budget"):
            run()
        patch()
        jax.tree.map(close_unless_key, run(), expected)
        unpatch()
        unpatch()
        jax.tree.map(close_unless_key, run(), expected)


def test_maxtext_in_16_bits_casts_as_its_output_layer() -> None:
    with installed(*stand_ins.maxtext()):
        from jax_pallas.hosts.maxtext import vocab_tiling_nnx_loss

        for tied, in_fp32, expected in ((False, True, jnp.float32), (False, False, jnp.bfloat16), (True, False, None)):
            config = MaxTextConfig(dtype=jnp.bfloat16, logits_via_embedding=tied, logits_dot_in_fp32=in_fp32)
            model = MaxTextModel(V, D, config, ONE_DEVICE)
            expected = jnp.float32 if expected is None else expected
            name = "linear_cross_entropy_with_stats"
            with mock.patch.object(linear_ce, name, side_effect=Called) as call, pytest.raises(Called):
                vocab_tiling_nnx_loss(model, X, DATA, config, True)
            arguments = call.call_args.kwargs
            assert (arguments["input"].dtype, arguments["linear_weight"].dtype) == (expected, expected)
            if tied:  # rounded to 16 bits, in any dtype
                rounded = arguments["linear_weight"].astype(jnp.bfloat16)
                assert jnp.array_equal(rounded, arguments["linear_weight"])


class Called(Exception):
    pass


def test_what_the_adapter_of_maxtext_refuses() -> None:
    with installed(*stand_ins.maxtext()):
        from jax_pallas.hosts.maxtext import patch, vocab_tiling_linen_loss, vocab_tiling_nnx_loss

        config = MaxTextConfig(parameter_memory_host_offload=True)
        model: Any = MaxTextModel(V, D, config, ONE_DEVICE)
        with pytest.raises(ValueError, match="parameter_memory_host_offload must be False"):
            vocab_tiling_nnx_loss(model, X, DATA, config, True)
        model.decoder.logits_dense.kernel_lora_a = nnx.LoRAParam(jnp.zeros((D, 2)))
        with pytest.raises(TypeError, match="has an adapter, kernel_lora_a"):
            vocab_tiling_nnx_loss(model, X, DATA, config, True)
        model = MaxTextModel(V, D, MaxTextConfig(), ONE_DEVICE)
        model.decoder.logits_dense.kernel_scale = nnx.data(nnx.Param(jnp.ones(())))  # with a weight_dtype of 8 bits
        with pytest.raises(ValueError, match=r"must have 16 or 32 bits .* got float32 with a kernel_scale"):
            vocab_tiling_nnx_loss(model, X, DATA, model.config, True)
        with pytest.raises(TypeError, match=r"softcap is set by the adapter, got softcap=3.0"):
            patch(softcap=3.0)
        with pytest.raises(TypeError, match="memory_budget must be a Python int, got str"):
            patch(memory_budget="512MiB")
        linen_model: Any = MaxTextLinenModel(MaxTextConfig(), ONE_DEVICE, V, D)
        with (
            mock.patch.object(MaxTextLinenModel, "apply"),
            pytest.raises(TypeError, match=r"the decoder of MaxTextLinenModel must call one flax.linen.Dropout, got 0"),
        ):
            vocab_tiling_linen_loss(X, DATA, linen_model.config, linen_model, {"params": {}}, True)


@pytest.mark.parametrize("version", ["0.2.4", "0.2.5"])
def test_another_interface_of_maxtext_is_refused(version: str) -> None:
    with installed(*stand_ins.maxtext(version)):
        from jax_pallas.hosts.maxtext import patch

        names = {"0.2.4": ("vocab_tiling_nnx_loss", "vocab_tiling_linen_loss"), "0.2.5": ("vocab_tiling_nnx_loss",)}
        tiling, train = host("maxtext.utils.vocabulary_tiling"), host("maxtext.trainers.pre_train.train")
        original = {**vars(train)}
        for name in names[version]:
            with patch():
                assert getattr(train, name) is not original[name]
            tested = r"tested with MaxText 0\.2\.4 \(commit e591f30\) and 0\.2\.5, got MaxText " + re.escape(version)
            for other, reason in (
                (other_interface, "whose other_interface has the arguments model, batch in place"),
                (None, f"which has no {name}"),
            ):
                with mock.patch.object(tiling, name, other), pytest.raises(ImportError, match=f"{tested}, {reason}"):
                    patch()
        assert vars(train) == original


def check_maxtext_on_devices(kind: AxisType, vocab: int = V) -> None:
    """Two devices divide the tokens and the hidden size of the head, and two the vocabulary, by MaxText's rules."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(kind, kind))
    mode = stand_ins.ShardMode.EXPLICIT if kind == AxisType.Explicit else stand_ins.ShardMode.AUTO
    with installed(*stand_ins.maxtext()):
        from jax_pallas.hosts.maxtext import vocab_tiling_nnx_loss

        config = MaxTextConfig(shard_mode=mode, z_loss_multiplier=0.1)
        graph, state = nnx.split(MaxTextModel(vocab, D, config, mesh))

        def loss(function: Callable[..., Any], state: Any, x: Array, data: Any) -> Array:
            return function(nnx.merge(graph, state, copy=True), x, data, config, True)[0]

        logits = host("maxtext.utils.vocabulary_tiling").vocab_tiling_nnx_loss
        expected = jax.grad(partial(loss, logits), (0, 1), allow_int=True)(state, X, DATA)

        def place(path: Any, array: Array) -> Array:
            spec = P("fsdp", "tensor") if "kernel" in jax.tree_util.keystr(path) and vocab % 2 == 0 else P()
            return jax.device_put(array, NamedSharding(mesh, spec))

        placed = jax.tree_util.tree_map_with_path(place, state)
        x, data = jax.device_put((X, DATA), NamedSharding(mesh, P("fsdp")))
        with jax.set_mesh(mesh):
            grad = jax.jit(jax.grad(partial(loss, vocab_tiling_nnx_loss), (0, 1), allow_int=True))
            jax.tree.map(close_unless_key, grad(placed, x, data), expected)


def check_sharded_head(kind: AxisType) -> None:
    """Two devices divide the tokens, and two the vocabulary."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    kernel = normal(2, (D, V))
    bias = normal(3, (V,))
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
    "levanter": check_levanter_on_devices,
    "MaxText, explicit sharding": partial(check_maxtext_on_devices, AxisType.Explicit),
    "MaxText, automatic sharding": partial(check_maxtext_on_devices, AxisType.Auto),
    "MaxText, classes that are not divided": partial(check_maxtext_on_devices, AxisType.Auto, V + 1),
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
