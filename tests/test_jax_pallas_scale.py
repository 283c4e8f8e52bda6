"""Tests the loss on several devices: token_axis_names, and which programs are refused because each device would compute
the whole loss.

The tests need several devices, so they run in a separate process: `host_devices.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_devices import DEVICES, failures_of, run_named
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_problem import gradients, problem, total
from sharded_cases import assert_within_budget, mesh_of, run_sharded

from jax_pallas.linear_ce import (
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    linear_log_probs,
    linear_token_loss,
)
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.cases import Case

SPLIT = {"input": P("data"), "linear_weight": P(), "linear_bias": P(), "target": P("data")}
REFUSAL = r"this call is compiled for 4 devices.* jax\.shard_map.* token_axis_names .* vocab_axis_name .* replicated="
SEVERAL: dict[str, Any] = {"memory_budget": 2**16}  # bytes, so that there are several chunks


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


ROWS: dict[str, Any] = {"lead": (256,), "hidden": 16, "vocab": 300, "has_bias": True, "ignored": "some"}
ROWS |= {"poison": ("ignored_rows",)}
GRPO: dict[str, Any] = {"function": "token_loss", "token_loss": "grpo-k2-entropy"}
TOKEN_CASES = (
    Case(name="mean", dtype="bfloat16", **ROWS, upstream="random"),
    Case(name="sum", dtype="float16", **ROWS, spec=LossSpec("sum", label_smoothing=0.1), token_weight="signed"),
    Case(name="none", dtype="bfloat16", head_dtype="float32", **ROWS, spec=LossSpec("none"), upstream="random"),
    Case(name="class weights", **ROWS, has_class_weight=True, vocab_axis=1, spec=LossSpec(z_loss_weight=0.01)),
    Case(name="normalizer", dtype="float16", **ROWS, normalizer=41.5, spec=LossSpec(softcap=5.0), loss_scale=1024.0),
    Case(name="sum in float32", dtype="bfloat16", **ROWS, grad_into=True),
    Case(name="sum in float32, none", dtype="bfloat16", **ROWS, grad_into=True, spec=LossSpec("none")),
    Case(name="token loss", dtype="float16", **ROWS, **GRPO, token_stats=True),
    Case(name="token loss, none", dtype="bfloat16", **ROWS, **GRPO, spec=LossSpec("none")),
    replace(Case(name="no token", dtype="float16", **ROWS), ignored="all"),
)


def check_tokens(case: Case) -> None:
    """The devices have different numbers of counted tokens, the first one none."""
    arrays = make_arrays(case)
    if case.ignored == "some":
        arrays["target"][:64] = case.spec.ignore_index
    assert_within_budget(case, arrays, run_sharded(case, arrays, mesh_of(data=DEVICES), "chunked"))


def check_two_axes() -> None:
    case = Case(name="two axes", dtype="bfloat16", **ROWS)
    assert_within_budget(case, make_arrays(case), run_sharded(case, make_arrays(case), mesh_of(data=2, host=2)))


def check_token_kernels() -> None:
    case = replace(Case(name="kernels", dtype="bfloat16", **ROWS), hidden=64, vocab=192)
    arrays = make_arrays(case)
    found = run_sharded(case, arrays, mesh_of(data=DEVICES), "pallas_triton", memory_budget=2**20)
    assert_within_budget(case, arrays, found)


def of_tokens(body: Callable[..., Any], out: Any, mesh: Mesh, *others: P) -> Any:
    """Returns body(x, w, y, b, *others) on devices that have different rows."""
    data = P(mesh.axis_names[0])
    return jax.shard_map(body, mesh=mesh, in_specs=(data, P(), data, P(), *others), out_specs=out)


def check_token_programs() -> None:
    """The gradient of the whole program, eager calls, scan, checkpoint, vmap and a head that each device has."""
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))
    mesh, head = mesh_of(data=DEVICES), (0, 1, 3)

    def loss(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Array:
        options.setdefault("memory_budget", 2**16)
        return linear_cross_entropy(x, w, y, linear_bias=b, **options)

    want = jax.value_and_grad(loss, head)(*given)
    own = partial(loss, token_axis_names="data")
    grads = (P(), (P("data"), P(), P()))
    assert_close(jax.jit(jax.value_and_grad(of_tokens(own, P(), mesh), head))(*given), want)
    assert_close(of_tokens(jax.value_and_grad(own, head), grads, mesh)(*given), want)
    rows = of_tokens(partial(own, reduction="none"), P("data"), mesh)
    assert_close(jax.jit(jax.grad(lambda *a: jax.jit(rows)(*a).mean(), head))(*given), want[1])
    assert_close(of_tokens(own, P(), mesh)(*given), want[0])
    assert_close(jax.jit(of_tokens(jax.value_and_grad(jax.checkpoint(own), head), grads, mesh))(*given), want)

    def in_scan(x: Array, w: Array, y: Array, b: Array) -> Any:
        def step(total: Any, batch: Any) -> tuple[Any, Any]:
            value, (d_x, *of_head) = jax.value_and_grad(own, head)(batch[0], w, batch[1], b)
            return jax.tree.map(jnp.add, total, (value, *of_head)), d_x

        start = jnp.zeros(()), jnp.zeros_like(w), jnp.zeros_like(b)
        (value, d_w, d_b), d_x = jax.lax.scan(step, start, (x.reshape(2, 24, 8), y.reshape(2, 24)))
        return jax.tree.map(lambda a: a / 2, (value, (d_x.reshape(48, 8), d_w, d_b)))

    assert_close(jax.jit(of_tokens(in_scan, grads, mesh))(*given), want)

    def in_vmap(x: Array, w: Array, y: Array, b: Array) -> Array:
        batched = jax.vmap(own, in_axes=(0, None, 0, None))
        return batched(x.reshape(2, 24, 8), w, y.reshape(2, 24), b).mean()

    assert_close(jax.jit(of_tokens(jax.value_and_grad(in_vmap, head), grads, mesh))(*given), want)

    def each_has_a_head(x: Array, w: Array, y: Array, b: Array) -> Any:
        w = jax.lax.pcast(w, ("data",), to="varying")
        d_w = jax.grad(own, 1)(x, w, y, b)
        return jax.lax.psum(d_w, "data")

    assert_close(jax.jit(of_tokens(each_has_a_head, P(), mesh))(*given), want[1][1])
    # An axis that the call does not name: each device of it has its own loss.
    two = mesh_of(data=2, host=2)
    half = P(("data", "host"))

    def of_host(x: Array, w: Array, y: Array, b: Array) -> Any:
        value, found = jax.value_and_grad(lambda *a: own(*a, reduction="sum"), head)(x, w, y, b)
        return jax.lax.psum(value, "host"), found

    body = jax.shard_map(of_host, mesh=two, in_specs=(half, P(), half, P()), out_specs=(P(), (half, P(), P())))
    assert_close(jax.jit(body)(*given), jax.value_and_grad(partial(loss, reduction="sum"), head)(*given))


def check_closure() -> None:
    """A learned factor of the token loss, which the devices share, and one that each device computes from its rows."""
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))
    mesh, factor = mesh_of(data=DEVICES), jnp.bfloat16(0.7)

    def loss(x: Array, w: Array, y: Array, b: Array, factor: Array, **options: Any) -> Array:
        def token_loss(log_prob: Array) -> Array:
            return jax.nn.softplus(-log_prob) * factor

        return linear_token_loss(x, w, y, token_loss, linear_bias=b, memory_budget=2**16, **options)

    own = partial(loss, token_axis_names="data")
    for options in ({}, {"reduction": "none"}):
        whole = jax.value_and_grad(lambda *a, o=options: loss(*a, **o).sum(), (0, 1, 4))
        none = bool(options)

        def of_device(*a: Array, o: Any = options, none: bool = none) -> Array:
            found = own(*a, **o).sum()
            return jax.lax.psum(found, "data") if none else found

        found = of_tokens(jax.value_and_grad(of_device, (0, 1, 4)), (P(), (P("data"), P(), P())), mesh, P())
        assert_close(jax.jit(found)(*given, factor), whole(*given, factor), 1e-2 if none else 1e-5)


def check_stats_of_all_tokens() -> None:
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))

    def stats(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Any:
        found = linear_cross_entropy_with_stats(x, w, y, linear_bias=b, z_loss_weight=0.1, ignore_index=3, **options)
        return found[1]

    mesh = mesh_of(data=DEVICES)
    data = P("data")
    own = of_tokens(partial(stats, token_axis_names="data"), type(stats(*given))(data, data, P(), P(), P()), mesh)
    assert_close(jax.jit(own)(*given), stats(*given))


def check_sums_are_float32() -> None:
    """The compiled program sums the gradient of a bfloat16 head in float32."""
    arrays = problem(192, 8, 300, dtype="bfloat16")
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))

    def loss(x: Array, w: Array, y: Array, b: Array) -> Array:
        return linear_cross_entropy(x, w, y, linear_bias=b, memory_budget=2**16, token_axis_names="data")

    body = of_tokens(jax.grad(loss, (1, 3)), (P(), P()), mesh_of(data=DEVICES))
    text = jax.jit(body).lower(*given).as_text()
    sums = [line for line in text.splitlines() if "stablehlo.all_reduce" in line]
    assert len(sums) == 3  # d_weight, d_bias and the number of tokens
    assert "tensor<300x8xbf16>) -> tensor<300x8xbf16>" not in text


def check_token_errors() -> None:
    arrays = problem(192, 8, 300)
    given = tuple(arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))
    mesh, data = mesh_of(data=DEVICES), P("data")

    def call(x: Array, w: Array, y: Array, b: Array, **options: Any) -> Array:
        options.setdefault("token_axis_names", "data")
        return linear_cross_entropy(x, w, y, linear_bias=b, **options)

    def raises(message: str, body: Callable[..., Any], error: Any = ValueError) -> None:
        with pytest.raises(error, match=message):
            body(*given)

    raises("token_axis_names must name axes of the mesh of a jax.shard_map around the call, got 'data'", call)
    raises("token_axis_names must name axes", jax.jit(call))
    body = partial(call, token_axis_names=("data", "hosts"))
    raises("got 'hosts', which is none", of_tokens(body, P(), mesh))
    unchecked = jax.shard_map(call, mesh=mesh, in_specs=(data, P(), data, P()), out_specs=P(), check_vma=False)
    raises("token_axis_names needs jax.shard_map with check_vma=True", unchecked)
    same = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P())
    raises("input must vary over the axis 'data' of token_axis_names", same)

    def own_count(x: Array, w: Array, y: Array, b: Array) -> Array:
        return call(x, w, y, b, normalizer=(y != 3).sum())

    raises("normalizer must not vary over the axis 'data' of token_axis_names", of_tokens(own_count, P(), mesh))
    saved = partial(call, reduction="none", saved_budget=2**20)
    raises("saved_budget must be 0 with token_axis_names", of_tokens(saved, data, mesh))
    raises("token_axis_names must be a name of an axis, names or None", partial(call, token_axis_names=3), TypeError)
    raises("replicated must be a bool", partial(call, replicated=1), TypeError)


CHECKS: dict[str, Callable[[], None]] = {
    **{f"refused, {function}": partial(check_refused, function) for function in ("mean", "none", "log_probs")},
    "refused, eager": check_eager_calls,
    "refused, other programs": check_other_programs,
    "not refused": check_not_refused,
    **{f"tokens, {case.name}": partial(check_tokens, case) for case in TOKEN_CASES},
    "tokens, two axes": check_two_axes,
    "tokens, kernels": check_token_kernels,
    "tokens, programs": check_token_programs,
    "tokens, closure": check_closure,
    "tokens, stats": check_stats_of_all_tokens,
    "tokens, float32": check_sums_are_float32,
    "tokens, errors": check_token_errors,
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
