"""Tests the loss on several devices: which programs are refused because each device would compute the whole loss.

The tests need several devices, so they run in a separate process: `host_devices.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_devices import DEVICES, failures_of, run_named
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_problem import gradients, problem, total

from jax_pallas.linear_ce import linear_cross_entropy, linear_log_probs, linear_token_loss

SPLIT = {"input": P("data"), "linear_weight": P(), "linear_bias": P(), "target": P("data")}
REFUSAL = r"this call is compiled for 4 devices.* jax\.shard_map.* token_axis_names .* vocab_axis_name .* replicated="
SEVERAL: dict[str, Any] = {"memory_budget": 2**16}  # bytes, so that there are several chunks


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def placed(arrays: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    return {name: jax.device_put(arrays[name], NamedSharding(mesh, SPLIT[name])) for name in SPLIT}


def assert_close(got: Any, want: Any, bound: float = 1e-5) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(array.astype(jnp.float32), np.float64) for array in (mine, theirs))
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def refused(function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(ValueError, match=REFUSAL):
        function(*arguments)


def check_refused(function: str) -> None:
    arrays = placed(problem(48, 8, 300), mesh_of(data=DEVICES))
    refused(jax.jit(partial(total, function, **SEVERAL)), arrays)
    refused(jax.jit(partial(gradients, function, **SEVERAL)), arrays)
    refused(jax.jit(lambda arrays: gradients(function, arrays, **SEVERAL)).lower, arrays)
    got = jax.jit(partial(gradients, function, **SEVERAL, replicated=True))(arrays)
    assert_close(got, gradients(function, problem(48, 8, 300)))


def check_eager_calls() -> None:
    arrays = placed(problem(48, 8, 300), mesh_of(data=DEVICES))
    refused(partial(linear_cross_entropy, **arrays, **SEVERAL))
    refused(partial(linear_log_probs, **arrays, **SEVERAL))
    refused(partial(gradients, "mean", arrays, **SEVERAL))
    one_device = problem(48, 8, 300)
    want = linear_cross_entropy(**one_device, **SEVERAL)
    assert_close(linear_cross_entropy(**arrays, **SEVERAL, replicated=True), want)
    assert_close(linear_cross_entropy(**arrays), want)  # one chunk


def check_other_programs() -> None:
    """vmap, scan, checkpoint, export, saved rows and token losses."""
    mesh = mesh_of(data=DEVICES)
    arrays = placed(problem(48, 8, 300), mesh)
    x, w, y = (arrays[name] for name in ("input", "linear_weight", "target"))

    def loss(x: Array, w: Array, y: Array, **options: Any) -> Array:
        return linear_cross_entropy(x, w, y, **SEVERAL, **options)

    def in_scan(x: Array, w: Array, y: Array) -> Array:
        def step(total: Array, batch: Any) -> tuple[Array, None]:
            x, y = batch
            return total + loss(x, w, y), None

        return jax.lax.scan(step, jnp.zeros(()), (x.reshape(2, 24, 8), y.reshape(2, 24)))[0]

    def of_tokens(x: Array, w: Array, y: Array, **options: Any) -> Array:
        return linear_token_loss(x, w, y, lambda log_prob: -log_prob, **SEVERAL, **options)

    refused(jax.jit(jax.vmap(loss, in_axes=(0, None, 0))), x.reshape(2, 24, 8), w, y.reshape(2, 24))
    refused(jax.jit(in_scan), x, w, y)
    refused(jax.jit(jax.grad(jax.checkpoint(loss))), x, w, y)
    refused(jax.export.export(jax.jit(loss)), x, w, y)
    refused(jax.jit(of_tokens), x, w, y)
    refused(jax.jit(jax.grad(of_tokens, argnums=1)), x, w, y)
    saved = partial(loss, reduction="none", saved_budget=2**20)
    refused(jax.jit(jax.grad(lambda *arrays: saved(*arrays).sum())), x, w, y)
    refused(jax.jit(partial(loss, implementation="pallas_triton")), x, w, y)
    kernels = partial(linear_cross_entropy, implementation="pallas_triton")  # also in one chunk
    refused(jax.jit(kernels), x, w, y)
    few_classes = placed(problem(1000, 8, 20), mesh)  # several chunks of rows, of all classes each
    refused(jax.jit(lambda arrays: linear_cross_entropy(**arrays, memory_budget=2**17)), few_classes)
    # The other axis of the mesh is divided by the compiler.
    one_axis = partial(jax.shard_map, mesh=mesh_of(data=2, other=2), axis_names={"data"})
    data = P("data")
    body = one_axis(lambda x, w, y: jax.lax.psum(loss(x, w, y), "data"), in_specs=(data, P(), data), out_specs=P())
    with pytest.raises(ValueError, match="compiled for 2 devices"):
        jax.jit(body)(*problem_arrays())


def problem_arrays() -> tuple[Array, Array, Array]:
    arrays = problem(48, 8, 300)
    return arrays["input"], arrays["linear_weight"], arrays["target"]


def check_not_refused() -> None:
    """One device, one chunk, and shard_map."""
    x, w, y = problem_arrays()
    want = linear_cross_entropy(x, w, y)
    several = partial(linear_cross_entropy, **SEVERAL)
    assert_close(jax.jit(several)(x, w, y), want)
    assert_close(jax.jit(jax.vmap(several, in_axes=(0, None, 0)))(x[None], w, y[None]), want[None])
    one = mesh_of(data=1)
    body = jax.shard_map(several, mesh=one, in_specs=(P("data"), P(), P("data")), out_specs=P(), check_vma=False)
    assert_close(jax.jit(body)(x, w, y), want)
    arrays = placed(problem(48, 8, 300), mesh_of(data=DEVICES))
    x, w, y = (arrays[name] for name in ("input", "linear_weight", "target"))
    assert_close(jax.jit(linear_cross_entropy)(x, w, y), want)
    kept = jax.jit(linear_cross_entropy).lower(x, w, y).compile().as_text()
    assert kept is not None
    assert "all-gather" not in kept


CHECKS: dict[str, Callable[[], None]] = {
    **{f"refused, {function}": partial(check_refused, function) for function in ("mean", "none", "log_probs")},
    "refused, eager": check_eager_calls,
    "refused, other programs": check_other_programs,
    "not refused": check_not_refused,
}


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """The failures of the selected tests' CHECKS on several devices."""
    return failures_of(request)


SLOW = ("refused, log_probs",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CHECKS]
)
def test_on_several_devices(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


if __name__ == "__main__":
    run_named(CHECKS)
