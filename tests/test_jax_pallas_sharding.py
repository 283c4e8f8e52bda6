"""Tests jax_pallas on a mesh of devices: inside jax.shard_map, each device computes the loss of its tokens.

Tests that need several devices run this file in a separate process, because the number of CPU devices must be set
before JAX starts.
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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_problem import ARGUMENTS, FUNCTIONS, gradients, problem, total

from jax_pallas.linear_ce import linear_cross_entropy, linear_log_probs, linear_token_loss

NAMES = (*ARGUMENTS, "target")
ROWS = {"input": P("data"), "linear_weight": P(), "linear_bias": P(), "target": P("data")}


def of_each_device(loss: Callable[..., Array], *, check_vma: bool, axis: AxisType = AxisType.Auto) -> Any:
    """Returns loss(arrays) over all rows and its gradients, with jax.shard_map. Each device computes its rows."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(axis,))

    def body(arrays: dict[str, Any]) -> Any:
        chosen = {name: arrays[name] for name in ARGUMENTS}
        value, found = jax.value_and_grad(lambda chosen: loss(arrays | chosen))(chosen)
        if not check_vma:  # with check_vma, JAX sums the gradients of replicated arrays
            head = {name: jax.lax.psum(found[name], "data") for name in ("linear_weight", "linear_bias")}
            found = found | head
        return jax.lax.psum(value, "data"), found

    out = (P(), {name: ROWS[name] for name in ARGUMENTS})
    sharded = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(ROWS,), out_specs=out, check_vma=check_vma))

    def run(arrays: dict[str, Any]) -> Any:
        with jax.set_mesh(mesh):
            return sharded({name: jax.device_put(arrays[name], NamedSharding(mesh, ROWS[name])) for name in ROWS})

    return run


def assert_close(got: Any, want: Any, bound: float = 1e-5) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(array.astype(jnp.float32), np.float64) for array in (mine, theirs))
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)


def of_all(loss: Callable[..., Array], arrays: dict[str, Any]) -> Any:
    chosen = {name: arrays[name] for name in ARGUMENTS}
    return jax.jit(jax.value_and_grad(lambda chosen: loss(arrays | chosen)))(chosen)


def summed(function: str, arrays: dict[str, Any], **options: Any) -> Array:
    """Returns a scalar whose sum over the devices is the loss."""
    if function == "mean":
        return linear_cross_entropy(**arrays, normalizer=48.0, **options)
    if function == "log_probs":
        found = linear_log_probs(**arrays, **options)
        return (found.log_prob * 2.0 + found.entropy - found.lse).sum()
    return linear_cross_entropy(**arrays, reduction=function, **options).sum()  # pyright: ignore[reportArgumentType]


def check_data_parallel(function: str, check_vma: bool, axis: AxisType) -> None:
    arrays = problem(48, 8, 50)

    def loss(arrays: dict[str, Any]) -> Array:
        return summed(function, arrays)

    assert_close(of_each_device(loss, check_vma=check_vma, axis=axis)(arrays), of_all(loss, arrays))


def check_no_device_holds_the_rows_of_another() -> None:
    arrays = problem(48, 8, 50)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    out = {name: ROWS[name] for name in ARGUMENTS}
    body = jax.shard_map(lambda arrays: gradients("sum", arrays), mesh=mesh, in_specs=(ROWS,), out_specs=out)
    placed = {name: jax.device_put(arrays[name], NamedSharding(mesh, ROWS[name])) for name in ROWS}
    program = jax.jit(body).lower(placed).compile().as_text()
    assert program is not None
    assert "all-reduce" in program
    assert "all-gather" not in program
    assert "f32[48,8]" not in program


def check_frozen_head() -> None:
    arrays = problem(48, 8, 50)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    def losses(x: Any, arrays: dict[str, Any]) -> Array:
        return linear_cross_entropy(**arrays | {"input": x}, reduction="none")

    def d_input(arrays: dict[str, Any]) -> Array:
        return jax.grad(lambda x: losses(x, arrays).sum())(arrays["input"])

    found = jax.jit(jax.shard_map(d_input, mesh=mesh, in_specs=(ROWS,), out_specs=P("data")))(arrays)
    assert_close(found, d_input(arrays))


def check_replicated_under_explicit_axes(implementation: str, dtype: str) -> None:
    arrays = problem(40, 64, 128, dtype=dtype)
    want = gradients("mean", arrays, implementation="chunked")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, P()))
        got = jax.jit(lambda arrays: gradients("mean", arrays, implementation=implementation, replicated=True))(placed)
        assert all(jax.typeof(array).sharding.mesh.axis_names == ("data",) for array in got.values())
    assert_close(got, want, 2**-7 if dtype == "bfloat16" else 1e-5)


def check_plain_jit(function: str) -> None:
    arrays = problem(48, 8, 300)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    placed = {name: jax.device_put(arrays[name], NamedSharding(mesh, ROWS[name])) for name in ROWS}
    got = jax.jit(lambda arrays: gradients(function, arrays, memory_budget=2**16, replicated=True))(placed)
    assert_close(got, gradients(function, arrays))


def check_token_loss(reduction: Any, check_vma: bool, closes: str) -> None:
    """Closes over a learned scalar that is the same on all devices, or that each device computes from its rows. Or it
    takes the entropies."""
    arrays = problem(48, 8, 50)
    advantage, mesh = jnp.linspace(-1.0, 2.0, 48), jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def loss(arrays: dict[str, Any], advantage: Array, factor: Array) -> Array:
        rows = arrays["input"].mean() if closes == "rows" else 1.0

        def token_loss(log_prob: Array, *others: Array) -> Array:
            *entropy, advantage = others
            losses = jnp.where(advantage > 0, -advantage * log_prob * factor * rows, 0.1 * log_prob)
            return losses - 0.1 * factor * jnp.square(entropy[0]) if entropy else losses

        x, w, y, b = (arrays[name] for name in ("input", "linear_weight", "target", "linear_bias"))
        options: dict[str, Any] = {"normalizer": 48.0} if reduction == "mean" else {"reduction": reduction}
        options["with_entropy"] = closes == "entropy"
        return linear_token_loss(x, w, y, token_loss, advantage, linear_bias=b, **options).sum()

    def value(arrays: dict[str, Any], *others: Array) -> Any:
        chosen = {name: arrays[name] for name in ARGUMENTS}
        return jax.value_and_grad(lambda c, *others: loss(arrays | c, *others), argnums=(0, 1, 2))(chosen, *others)

    def body(arrays: dict[str, Any], *others: Array) -> Any:
        total, found = value(arrays, *others)
        if not check_vma:
            head = {name: jax.lax.psum(found[0][name], "data") for name in ("linear_weight", "linear_bias")}
            found = found[0] | head, found[1], jax.lax.psum(found[2], "data")
        return jax.lax.psum(total, "data"), found

    def on_each_part(arrays: dict[str, Any], advantage: Array, factor: Array) -> Any:
        """Returns what the devices compute, one after the other."""
        compiled = jax.jit(value)
        parts = []
        for start in range(0, 48, 48 // DEVICES):
            part = slice(start, start + 48 // DEVICES)
            of_part = {n: array[part] if n in ("input", "target") else array for n, array in arrays.items()}
            parts.append(compiled(of_part, advantage[part], factor))
        total, (found, d_advantage, d_factor) = jax.tree.map(lambda *values: list(values), *parts)
        summed_up = {name: sum(found[name]) for name in ("linear_weight", "linear_bias")}
        rows = {"input": jnp.concatenate(found["input"])}
        return sum(total), (rows | summed_up, jnp.concatenate(d_advantage), sum(d_factor))

    out = (P(), ({name: ROWS[name] for name in ARGUMENTS}, P("data"), P()))
    specs = (ROWS, P("data"), P())
    sharded = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma))
    given = arrays, advantage, jnp.float32(0.7)
    assert_close(sharded(*given), on_each_part(*given))


def check_token_loss_of_rows_with_derivatives_of_its_own() -> None:
    arrays = problem(48, 8, 50, bias=False)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    only_its_rule_has_a_constant = jax.custom_jvp(jnp.sin)
    only_its_rule_has_a_constant.defjvp(lambda values, tangents: (jnp.sin(values[0]), (values[0] + 1.0) * tangents[0]))
    for function in (jax.nn.softplus, only_its_rule_has_a_constant):

        def loss(x: Array, y: Array, function: Any = function) -> Array:
            mean = x.mean()
            found = linear_token_loss(x, arrays["linear_weight"], y, lambda log_prob: function(log_prob * mean))
            return jax.lax.psum(found, "data")

        with pytest.raises(ValueError, match="token_loss closes over an array that varies over mesh axes"):
            jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P())(
                arrays["input"], arrays["target"]
            )


def check_token_loss_under_explicit_axes() -> None:
    arrays = problem(40, 64, 128, bias=False)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Explicit,))

    def value(arrays: dict[str, Any], factor: Array) -> Any:
        def token_loss(log_prob: Array) -> Array:
            return jnp.where(log_prob < -3.0, factor * log_prob, jax.nn.softplus(log_prob))

        def loss(x: Array, factor: Array) -> Array:
            return linear_token_loss(x, arrays["linear_weight"], arrays["target"], token_loss)

        return jax.value_and_grad(loss, argnums=(0, 1))(arrays["input"], factor)

    want = value(arrays, jnp.float32(0.7))
    with jax.set_mesh(mesh):
        placed = jax.device_put((arrays, jnp.float32(0.7)), NamedSharding(mesh, P()))
        assert_close(jax.jit(value)(*placed), want)


def check_sums_of_each_device() -> None:
    """A grad_into of each device gets the gradient of its rows. One of all devices is refused, and so is one of each if
    all devices have the same rows."""
    arrays = problem(48, 8, 50)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    into = jnp.asarray(np.random.default_rng(7).standard_normal((DEVICES, 50, 8)), jnp.float32)

    def of_device(arrays: dict[str, Any], into: Array) -> Array:
        return jax.grad(lambda into: total("none", arrays | {"grad_into": into}))(into.reshape(50, 8))[None]

    def run(into: Array, spec: P, of_rows: Any = ROWS) -> Array:
        specs = {"in_specs": (of_rows, spec), "out_specs": P("data")}
        return jax.jit(jax.shard_map(of_device, mesh=mesh, **specs))(arrays, into)

    rows = len(arrays["input"]) // DEVICES
    found = run(into, P("data"))
    for device in range(DEVICES):
        part = slice(device * rows, (device + 1) * rows)
        own = arrays | {name: arrays[name][part] for name in ("input", "target")}
        assert_close(found[device], of_device(own, into[device])[0])
    with pytest.raises(ValueError, match=r"grad_into must vary over the axes \('data',\) of the mesh"):
        run(into[0], P())
    with pytest.raises(ValueError, match=r"grad_into must not vary over the axes \('data',\) of the mesh"):
        run(into, P("data"), P())


def check_kernels() -> None:
    arrays = problem(160, 64, 128, dtype="bfloat16")

    def loss(arrays: dict[str, Any], implementation: str = "pallas_triton") -> Array:
        return linear_cross_entropy(**arrays, normalizer=160, implementation=implementation)

    found = of_each_device(loss, check_vma=False)(arrays)
    assert_close(found, of_all(lambda arrays: loss(arrays, "chunked"), arrays), 2**-7)


CHECKS: dict[str, Callable[[], None]] = {
    **{f"{f}, checked": partial(check_data_parallel, f, True, AxisType.Auto) for f in FUNCTIONS},
    **{f"{f}, unchecked": partial(check_data_parallel, f, False, AxisType.Explicit) for f in ("mean", "log_probs")},
    **{f"{f}, plain jit": partial(check_plain_jit, f) for f in ("mean", "none")},
    "rows": check_no_device_holds_the_rows_of_another,
    "frozen head": check_frozen_head,
    "grad_into": check_sums_of_each_device,
    "replicated": partial(check_replicated_under_explicit_axes, "chunked", "float32"),
    "replicated, kernels": partial(check_replicated_under_explicit_axes, "pallas_triton", "bfloat16"),
    "kernels": check_kernels,
    "token loss": partial(check_token_loss, "mean", True, "factor"),
    "token loss, none": partial(check_token_loss, "none", True, "factor"),
    "token loss, rows": partial(check_token_loss, "mean", True, "rows"),
    "token loss, entropy": partial(check_token_loss, "mean", True, "entropy"),
    "token loss, none, entropy": partial(check_token_loss, "none", True, "entropy"),
    "token loss, unchecked": partial(check_token_loss, "mean", False, "factor"),
    "token loss, refused": check_token_loss_of_rows_with_derivatives_of_its_own,
    "token loss, explicit axes": check_token_loss_under_explicit_axes,
}


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    """The failures of the selected tests' CHECKS on several devices."""
    return failures_of(request)


SLOW = (
    "sum, checked",
    "none, checked",
    "log_probs, checked",
    "token loss, none, entropy",
    "mean, unchecked",
    "mean, plain jit",
    "replicated, kernels",
    # Calls on arrays that are divided run the kernels: test_jax_pallas_sharded.py.
    "kernels",
    "token loss, none",
    # A loss of the entropies closes over the same scalar.
    "token loss",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CHECKS]
)
def test_on_several_devices(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


SHARDED = [
    *((name, P("data")) for name in (*NAMES, "weight", "token_weight")),
    *((name, P(None, "data")) for name in ("input", "linear_weight")),
]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(name, spec, marks=pytest.mark.slow if name in ("linear_bias", "target", "weight") else ())
        for name, spec in SHARDED
    ],
)
def test_the_types_say_how_arrays_are_divided(name: str, spec: P) -> None:
    """On a mesh of one device; test_jax_pallas_sharded.py has more."""
    arrays = problem() | {"weight": jnp.ones(50), "token_weight": jnp.ones(12)}
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    want = linear_cross_entropy(**arrays)
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, P()))
        placed[name] = jax.device_put(arrays[name], NamedSharding(mesh, spec))
        for function in (linear_cross_entropy, jax.jit(linear_cross_entropy)):
            assert_close(function(**placed), want)


def test_arrays_of_other_explicit_axes_are_refused() -> None:
    arrays = problem()
    mesh = jax.make_mesh((1, 1), ("data", "other"), axis_types=(AxisType.Explicit,) * 2)

    def loss(arrays: dict[str, Any]) -> Array:
        return linear_cross_entropy(**arrays, token_axis_names="data")

    body = jax.shard_map(loss, mesh=mesh, in_specs=(ROWS,), out_specs=P(), axis_names={"data"})
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(arrays[name], NamedSharding(mesh, ROWS[name])) for name in ROWS}
        assert jnp.isfinite(jax.jit(body)(placed))
        placed["linear_weight"] = jax.device_put(arrays["linear_weight"], NamedSharding(mesh, P("other")))
        message = r"linear_weight must not be sharded over explicit axes .* got .*'other'.* map these axes too"
        with pytest.raises(ValueError, match=message):
            jax.jit(body)(placed)


def test_arrays_of_two_explicit_meshes_are_refused() -> None:
    arrays = problem()
    for name, axis in (("input", "data"), ("linear_weight", "other")):
        mesh = jax.make_mesh((1,), (axis,), axis_types=(AxisType.Explicit,))
        arrays[name] = jax.device_put(arrays[name], NamedSharding(mesh, P(axis)))
    with pytest.raises(ValueError, match=r"linear_weight must be on the mesh of input, .*'data'.* got .*'other'"):
        linear_cross_entropy(**arrays)


if __name__ == "__main__":
    run_named(CHECKS)
