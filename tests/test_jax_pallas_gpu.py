"""jax_pallas on an NVIDIA Hopper GPU: every case of the contract, every plan at the sizes that its kernels want,
repeatability, memory, and more logits than 32 bits count.

Runs with `pytest -m gpu`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_cases import judged_in_processes

from jax_pallas.linear_ce import linear_cross_entropy
from parity.cases import cases
from parity.spec import DEFAULT_MEMORY_BUDGET

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def judged_cases() -> dict[str, dict[str, Any]]:
    return judged_in_processes("jax-mosaic")


@pytest.mark.parametrize("name", [case.name for case in cases() if case.dtype != "float32"])
def test_case(name: str, judged_cases: dict[str, dict[str, Any]]) -> None:
    result = judged_cases[name]
    assert "failure" not in result, result["failure"]
    used = ", ".join(f"{output} {share:.0f}%" for output, share in result["used"].items())
    assert all(share <= 100 for share in result["used"].values()), f"{name} used of its budget: {used}"


def drawn(n: int, d: int, v: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (n, d), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (v, d)) * d**-0.5).astype(jnp.bfloat16)
    return x, w, jax.random.randint(keys[2], (n,), 0, v)


def loss_and_gradients(implementation: str = "mosaic", memory_budget: int | None = None) -> Any:
    def loss(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return linear_cross_entropy(x, w, y, implementation=implementation, memory_budget=memory_budget)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def assert_close(got: Any, want: Any, bound: float = 4e-3) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(array.astype(jnp.float32), np.float64) for array in (mine, theirs))
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


@pytest.mark.parametrize(("n", "d", "v"), [(1000, 64, 50257), (4096, 512, 32000), (20000, 64, 128256)])
def test_models_sizes(n: int, d: int, v: int) -> None:
    x, w, y = drawn(n, d, v)
    for budget in (None, 2**26):
        got = loss_and_gradients(memory_budget=budget)(x, w, y)
        exact = loss_and_gradients(implementation="chunked", memory_budget=2**31)
        assert_close(got, exact(x, w, y))


def test_an_executable_repeats_bit_for_bit_within_its_budget() -> None:
    arrays = drawn(3000, 320, 32000)
    call = loss_and_gradients().lower(*arrays).compile()
    assert call.memory_analysis().temp_size_in_bytes <= DEFAULT_MEMORY_BUDGET
    first, second = call(*arrays), call(*arrays)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (np.asarray(one) == np.asarray(other)).all()


def test_anchors_that_are_too_low_are_repaired() -> None:
    x, w, y = drawn(500, 128, 3000)
    x = x * 200  # targets far below the largest logits
    want = loss_and_gradients(implementation="chunked")(x.astype(jnp.float32), w.astype(jnp.float32), y)
    assert_close(loss_and_gradients()(x, w, y), want)
