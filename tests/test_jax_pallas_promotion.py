"""The loss under the strict settings of JAX, `jax_numpy_dtype_promotion` and `jax_numpy_rank_promotion`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

import jax_pallas
from jax_pallas import sharded, token_losses

N, D, V = 24, 16, 96


@contextmanager
def strictly() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def arrays_of(dtype: str) -> tuple[Array, ...]:
    """Returns input, weight, bias and targets."""
    rng = np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.standard_normal(size), dtype) for size in ((N, D), (V, D), (V,)))
    return x, w, b, jnp.asarray(rng.integers(0, V, N).astype(np.int32)).at[3].set(-100)


ONES = jnp.ones(N, jnp.float32)
OPTIONS: dict[str, Any] = {
    "label_smoothing": 0.1,
    "z_loss_weight": 0.01,
    "logit_scale": 0.7,
    "weight": jnp.linspace(0.5, 1.5, V),
    "token_weight": jnp.linspace(0.0, 1.0, N),
    "normalizer": 7.0,
}
GRPO = token_losses.grpo(beta=0.1, entropy_weight=0.1)


def of_log_probs(x: Array, w: Array, b: Array, y: Array) -> Array:
    found = jax_pallas.linear_log_probs(x, w, y, linear_bias=b)
    return found.log_prob.sum() + found.entropy.sum() + found.lse.sum()


def nll(log_prob: Array, weight: Array) -> Array:
    return -weight * log_prob


Call = Callable[[Array, Array, Array, Array], Array]  # from input, weight, bias and targets to a scalar
CALLS: dict[str, Call] = {
    "options": lambda x, w, b, y: jax_pallas.linear_cross_entropy(x, w, y, linear_bias=b, **OPTIONS),
    "softcap": lambda x, w, b, y: jax_pallas.linear_cross_entropy(x, w, y, linear_bias=b, softcap=5.0, reduction="sum"),
    "none": lambda x, w, b, y: jax_pallas.linear_cross_entropy(x, w, y, linear_bias=b, reduction="none").sum(),
    "saved": lambda x, w, b, y: jax_pallas.linear_cross_entropy(
        x, w, y, linear_bias=b, reduction="none", saved_budget=2**20
    ).sum(),
    "statistics": lambda x, w, b, y: jax_pallas.linear_cross_entropy_with_stats(x, w, y, linear_bias=b)[0],
    "log_probs": of_log_probs,
    "token_loss": lambda x, w, b, y: jax_pallas.linear_token_loss(x, w, y, GRPO, ONES, -ONES, -ONES, linear_bias=b),
    "token_losses": lambda x, w, b, y: jax_pallas.linear_token_loss_with_stats(
        x, w, y, nll, ONES, linear_bias=b, reduction="none"
    )[0].sum(),
    "several_chunks": lambda x, w, b, y: jax_pallas.linear_cross_entropy(x, w, y, linear_bias=b, memory_budget=36_000),
}


def gradients(call: Call, arrays: tuple[Array, ...]) -> Any:
    return jax.value_and_grad(call, argnums=(0, 1, 2))(*arrays)


def same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


OTHER_DTYPES = ("options", "float32"), ("options", "float16"), ("saved", "float16"), ("token_loss", "float16")


def same_program(function: Callable[..., Any], *arrays: Array) -> None:
    """Asserts that a function is traced under the strict settings, to the program that it has by default. The programs
    are not compiled, which takes most of the time."""
    with strictly():
        found = jax.jit(function).lower(*arrays).as_text()
    assert found == jax.jit(function).lower(*arrays).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_an_eager_call_returns_what_it_returns_by_default(dtype: str) -> None:
    arrays = arrays_of(dtype)
    with strictly():
        found = gradients(CALLS["options"], arrays)
    same(found, gradients(CALLS["options"], arrays))


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in CALLS), *OTHER_DTYPES])
def test_calls_have_the_programs_that_they_have_by_default(name: str, dtype: str) -> None:
    same_program(lambda *arrays: gradients(CALLS[name], arrays), *arrays_of(dtype))


def test_transformed_calls() -> None:
    x, w, b, y = arrays_of("bfloat16")
    several = jnp.stack([x, -x]), w, b, jnp.stack([y, y])

    def of_each(*arrays: Array) -> Any:
        return jax.vmap(lambda x, y: CALLS["options"](x, arrays[1], arrays[2], y))(arrays[0], arrays[3]).sum()

    for call in (jax.jit(of_each), jax.checkpoint(of_each)):  # pyright: ignore[reportPrivateImportUsage]
        same_program(lambda *arrays, call=call: gradients(call, arrays), *several)


@pytest.mark.parametrize("name", ["saved", "token_losses"])
def test_compiled_calls_of_a_batch(name: str) -> None:
    x, w, b, y = arrays_of("bfloat16")

    def gradient(x: Array, y: Array) -> Array:
        return jax.grad(CALLS[name])(x, w, b, y)

    same_program(jax.vmap(jax.jit(gradient)), jnp.stack([x, -x]), jnp.stack([y, y]))


def test_a_sum_is_added_to_grad_into() -> None:
    x, w, _, y = arrays_of("bfloat16")

    def call(x: Array, w: Array) -> Any:
        loss, total = jax_pallas.linear_cross_entropy(x, w, y, grad_into=jnp.ones((V, D), jnp.float32))
        return loss, total

    same_program(jax.value_and_grad(call, has_aux=True), x, w)


@pytest.mark.parametrize("axes", [{"batch_axis_names": "data"}, {"vocab_axis_name": "data"}], ids=["tokens", "classes"])
def test_a_mesh(axes: dict[str, Any]) -> None:
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))

    def call(x: Array, w: Array, b: Array, y: Array) -> Array:
        return sharded.linear_cross_entropy(x, w, y, linear_bias=b, mesh=mesh, **axes)

    same_program(lambda *arrays: gradients(jax.jit(call), arrays), *arrays_of("bfloat16"))


def test_checks_and_plans() -> None:
    x, w, _, y = arrays_of("bfloat16")
    with strictly():
        jax_pallas.check_targets(y, V)
        jax_pallas.check_token_loss(GRPO, ONES, -ONES, -ONES, with_entropy=True)
        jax_pallas.check_token_loss(lambda log_prob, advantage: log_prob * (advantage > 0), ONES)  # float32 * bool
        assert "implementation: chunked" in str(jax_pallas.explain(x, w))
        with pytest.raises(ValueError, match=r"got 1 others: target\[0\] = 96"):
            jax_pallas.check_targets(y.at[0].set(V), V)


@pytest.mark.parametrize("name", ["options", "token_loss"])
def test_programs_with_kernels(name: str) -> None:
    """They are lowered for a GPU, which traces their kernels."""
    device = AbstractDevice("NVIDIA H100 80GB HBM3", 1, "gpu")
    sizes = ((128, 64), "bfloat16"), ((512, 64), "bfloat16"), ((512,), "bfloat16"), ((128,), "int32")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), strictly():
        arrays = [jax.ShapeDtypeStruct(*size) for size in sizes]
        text = jax.jit(jax.grad(of_shapes(name))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def of_shapes(name: str) -> Call:
    """Returns a call of any sizes."""

    def call(x: Array, w: Array, b: Array, y: Array) -> Array:
        tokens = jnp.ones(len(x), jnp.float32)
        if name == "token_loss":
            return jax_pallas.linear_token_loss(x, w, y, GRPO, tokens, -tokens, -tokens, linear_bias=b)
        if name == "options":
            options = OPTIONS | {"weight": jnp.ones(len(w)), "token_weight": tokens}
            return jax_pallas.linear_cross_entropy(x, w, y, linear_bias=b, **options)
        return CALLS[name](x, w, b, y)

    return call
