"""Temporaries of the compiled JAX loss are within memory_budget, in float32 on the CPU.

The CPU compiler makes float32 copies in 16-bit programs, so test_jax_pallas_gpu_compile.py checks those for a GPU.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from assertions import least_budget
from jax_problem import ARGUMENTS, FUNCTIONS, gradients, total

from jax_pallas import linear_token_loss, token_losses

SHAPES = ((1, 8, 50), (3, 64, 501), (257, 32, 300), (2000, 64, 1001))  # N, D, V


def shapes_of(n: int, d: int, v: int, vocab_axis: int = 0) -> dict[str, Any]:
    head = (v, d) if vocab_axis == 0 else (d, v)
    shapes = {"input": (n, d), "linear_weight": head, "linear_bias": (v,)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return arrays | {"target": jax.ShapeDtypeStruct((n,), jnp.int32)}


def program(function: str, arrays: dict[str, Any], budget: int | None, names: tuple[str, ...], **options: Any) -> Any:
    """Returns a lowered call that computes the gradients by the named arguments, or the value if there are none."""

    def call(arrays: dict[str, Any]) -> Any:
        if names:
            return gradients(function, arrays, names, memory_budget=budget, **options)
        return total(function, arrays, memory_budget=budget, **options)

    return jax.jit(call).lower(arrays)


def assert_within(function: str, arrays: dict[str, Any], budget: int, names: tuple[str, ...], **options: Any) -> None:
    compiled = program(function, arrays, budget, names, **options).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used <= budget, f"{used} bytes of temporaries are {used / budget:.0%} of the budget of {budget}"


def check_temporaries(function: str, shape: tuple[int, int, int], names: tuple[str, ...], factor: int) -> None:
    arrays = shapes_of(*shape)
    least = least_budget(lambda budget: program(function, arrays, budget, names))
    assert_within(function, arrays, factor * least, names)


EVERY = [
    pytest.mark.parametrize("names", [ARGUMENTS, ()], ids=["train", "evaluate"]),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
    pytest.mark.parametrize("function", ["mean", "none", "log_probs"]),
]


def over_all(test: Any) -> Any:
    """Parametrizes a test by function, shape, and whether gradients are computed."""
    for mark in EVERY:
        test = mark(test)
    return test


@over_all
def test_temporaries_within_budget(function: str, shape: tuple[int, int, int], names: tuple[str, ...]) -> None:
    check_temporaries(function, shape, names, 1)


@pytest.mark.slow
@over_all
def test_temporaries_within_a_larger_budget(function: str, shape: tuple[int, int, int], names: tuple[str, ...]) -> None:
    check_temporaries(function, shape, names, 5)


@pytest.mark.parametrize("function", ["mean", "none", "log_probs"])
def test_many_tokens_within_budget(function: str) -> None:
    arrays = shapes_of(65536, 4, 70)
    least = least_budget(lambda budget: program(function, arrays, budget, ARGUMENTS))
    assert_within(function, arrays, 2 * least, ARGUMENTS)


def test_a_loss_of_the_entropy_within_budget() -> None:
    arrays = shapes_of(257, 32, 300)

    def compiled(budget: int) -> Any:
        def loss(x: Any, w: Any) -> Any:
            function = token_losses.weighted_nll(entropy_weight=0.1)
            return linear_token_loss(x, w, arrays["target"], function, jnp.ones(257), memory_budget=budget)

        return jax.jit(jax.grad(loss, (0, 1))).lower(arrays["input"], arrays["linear_weight"]).compile()

    arrays["target"] = jnp.zeros(257, jnp.int32)
    least = least_budget(compiled)
    for budget in (least, 5 * least):
        assert compiled(budget).memory_analysis().temp_size_in_bytes <= budget


@pytest.mark.parametrize("function", ["mean", "none"])
@pytest.mark.parametrize("names", [("input",), ("linear_weight",)], ids="-".join)
def test_frozen_arguments_within_budget(function: str, names: tuple[str, ...]) -> None:
    arrays = shapes_of(300, 64, 1001, vocab_axis=1)
    budget = 2 * least_budget(lambda budget: program(function, arrays, budget, names, vocab_axis=1))
    assert_within(function, arrays, budget, names, vocab_axis=1)


def test_options_of_the_loss_within_budget() -> None:
    arrays = shapes_of(300, 32, 501)
    extra = {"weight": jnp.ones(501), "token_weight": jnp.ones(300), "normalizer": 5.0}
    options: dict[str, Any] = {**extra, "label_smoothing": 0.1, "z_loss_weight": 0.1, "softcap": 3.0}
    budget = least_budget(lambda budget: program("mean", arrays, budget, ARGUMENTS, **options))
    assert_within("mean", arrays, budget, ARGUMENTS, **options)


@pytest.mark.parametrize("n", [1, 1000, 65536])
@pytest.mark.parametrize("function", ["mean", "none"])
def test_default_budget_at_a_models_shape(n: int, function: str) -> None:
    arrays = shapes_of(n, 896, 151936)
    assert_within(function, arrays, 512 * 2**20, ARGUMENTS[:2])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_error_names_the_smallest_budget(function: str) -> None:
    arrays = shapes_of(40, 8, 120)
    least = least_budget(lambda budget: program(function, arrays, budget, ARGUMENTS))
    program(function, arrays, least, ARGUMENTS)  # neither pass raises
    with pytest.raises(ValueError, match=f"at least {least} bytes for 40 tokens and 120 classes, got {least - 1}"):
        program(function, arrays, least - 1, ARGUMENTS)
    assert least_budget(lambda budget: program(function, arrays, budget, ())) <= least


@pytest.mark.parametrize("function", ["mean", "none"])
def test_a_batch_by_vmap_within_budget(function: Any) -> None:
    arrays = shapes_of(8 * 100, 32, 501)
    arrays["input"] = jax.ShapeDtypeStruct((8, 100, 32), jnp.float32)
    arrays["target"] = jax.ShapeDtypeStruct((8, 100), jnp.int32)
    budget = 2**20

    def loss(head: dict[str, Any], rows: dict[str, Any]) -> jax.Array:
        return jax.vmap(lambda rows: total(function, head | rows, memory_budget=budget))(rows).mean()

    head = {name: arrays[name] for name in ("linear_weight", "linear_bias")}
    rows = {name: arrays[name] for name in ("input", "target")}
    compiled: Any = jax.jit(jax.grad(loss)).lower(head, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= budget
    assert not re.findall(r"\[8,501,32\]", compiled.as_text())
