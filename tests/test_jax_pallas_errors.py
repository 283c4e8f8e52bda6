"""Every invalid input of the contract raises an error that names the argument and the value it got."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_problem import ones, problem, zeros

from jax_pallas.linear_ce import (
    check_targets,
    explain,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    linear_log_probs,
)

Bad = dict[str, tuple[dict[str, Any], type[Exception], str]]

BAD_ARRAYS: Bad = {
    "input list": ({"input": [[0.0] * 8] * 12}, TypeError, "input must be an array, got list"),
    "weight none": ({"linear_weight": None}, TypeError, "linear_weight must be an array, got NoneType"),
    "target list": ({"target": [0] * 12}, TypeError, "target must be an array, got list"),
    "bias list": ({"linear_bias": [0.0] * 50}, TypeError, "linear_bias must be an array or None, got list"),
    "input float64": ({"input": np.zeros((12, 8))}, TypeError, "input must be .* got float64"),
    "input integer": ({"input": zeros((12, 8), jnp.int32)}, TypeError, "input must be .* got int32"),
    "input scalar": ({"input": zeros(())}, ValueError, r"input must have shape \(\.\.\., D\), got \(\)"),
    "weight one axis": (
        {"linear_weight": zeros(50)},
        ValueError,
        r"linear_weight must have shape \(V, D\), got \(50,\)",
    ),
    "weight other D": (
        {"linear_weight": zeros((50, 9))},
        ValueError,
        r"linear_weight must have shape \(V, D\) with D = 8 as in input \(12, 8\), got \(50, 9\)$",
    ),
    "weight of the other axis": (
        {"vocab_axis": 1},
        ValueError,
        r"linear_weight must have shape \(D, V\) with D = 8 as in input \(12, 8\), got \(50, 8\)",
    ),
    "weight without rows": ({"linear_weight": zeros((0, 8))}, ValueError, r"linear_weight must .* got \(0, 8\)"),
    "weight bfloat16": (
        {"linear_weight": zeros((50, 8), jnp.bfloat16)},
        TypeError,
        "linear_weight must be float32, got bfloat16",
    ),
    "target float": ({"target": zeros(12)}, TypeError, "target must have an integer dtype, got float32"),
    "target bool": ({"target": zeros(12, bool)}, TypeError, "target must have an integer dtype, got bool"),
    "target shape": (
        {"target": zeros(11, int)},
        ValueError,
        r"target must have shape \(12,\) \(input without its last axis\), got \(11,\)",
    ),
    "bias shape": ({"linear_bias": zeros(49)}, ValueError, r"linear_bias must have shape \(50,\).* got \(49,\)"),
    "bias dtype": (
        {"linear_bias": zeros(50, jnp.float16)},
        TypeError,
        "linear_bias must be float32, got float16",
    ),
}

BAD_OPTIONS: Bad = {
    "vocab_axis two": ({"vocab_axis": 2}, ValueError, "vocab_axis must be 0 or 1, got 2"),
    "vocab_axis minus one": ({"vocab_axis": -1}, ValueError, "vocab_axis must be 0 or 1, got -1"),
    "vocab_axis array": ({"vocab_axis": jnp.int32(0)}, TypeError, "vocab_axis must be a Python int, got ArrayImpl"),
    "softcap zero": ({"softcap": 0.0}, ValueError, "softcap must be positive or None, got 0.0"),
    "softcap text": ({"softcap": "big"}, TypeError, "softcap must be a Python number, got str"),
    "scale infinite": ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite, got inf"),
    "scale array": ({"logit_scale": ones(())}, TypeError, "logit_scale must be a Python number, got ArrayImpl"),
    "vocab_size too large": (
        {"vocab_size": 51},
        ValueError,
        "vocab_size must not exceed linear_weight's 50 rows, got 51",
    ),
    "vocab_size zero": ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
    "vocab_size float": ({"vocab_size": 50.0}, TypeError, "vocab_size must be a Python int, got float"),
    "ignore_index float": ({"ignore_index": 0.5}, TypeError, "ignore_index must be a Python int, got float"),
    "ignore_index none": (
        {"ignore_index": None},
        TypeError,
        "ignore_index must be a Python int, got NoneType: to ignore no token, pass an int that is no target$",
    ),
    "reduce_dtype none": (
        {"reduce_dtype": None},
        ValueError,
        "reduce_dtype must be one of 'float32', 'bfloat16', got None$",
    ),
    "memory_budget zero": ({"memory_budget": 0}, ValueError, r"memory_budget must be positive \(bytes\), got 0"),
    "memory_budget float": ({"memory_budget": 1e9}, TypeError, "memory_budget must be a Python int, got float"),
    "memory_budget small": (
        {"memory_budget": 1000},
        ValueError,
        r"memory_budget must be at least \d+ bytes for 12 tokens and 50 classes, got 1000",
    ),
    "implementation": (
        {"implementation": "fastest"},
        ValueError,
        "implementation must be one of 'mosaic', 'pallas_triton', 'chunked', got 'fastest'",
    ),
}

BAD_LOSS: Bad = {
    "reduction": ({"reduction": "max"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'max'"),
    "smoothing large": ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must lie in \[0, 1\], got 1.5"),
    "smoothing NaN": ({"label_smoothing": float("nan")}, ValueError, "label_smoothing must be finite, got nan"),
    "z_loss_weight": ({"z_loss_weight": -1e-4}, ValueError, "z_loss_weight must not be negative, got -0.0001"),
    "class weight shape": ({"weight": ones(49)}, ValueError, r"weight must have shape \(50,\).* got \(49,\)"),
    "class weight dtype": ({"weight": ones(50, int)}, TypeError, "weight must be .* got int32"),
    "class weight list": ({"weight": [1.0] * 50}, TypeError, "weight must be an array or None, got list"),
    "token_weight shape": (
        {"token_weight": ones((12, 1))},
        ValueError,
        r"token_weight must have shape \(12,\) \(target's shape\), got \(12, 1\)",
    ),
    "token_weight dtype": ({"token_weight": ones(12, bool)}, TypeError, "token_weight must be .* got bool"),
    "normalizer negative": ({"normalizer": -1}, ValueError, "normalizer must be finite and not negative, got -1"),
    "normalizer nan": (
        {"normalizer": np.float32("nan")},
        ValueError,
        "normalizer must be finite .* got nan",
    ),
    "normalizer array": (
        {"normalizer": np.array(-3.0)},
        ValueError,
        "normalizer must be finite and not negative, got -3.0",
    ),
    "normalizer array nan": (
        {"normalizer": np.array(np.nan, np.float32)},
        ValueError,
        "normalizer must be finite .* nan",
    ),
    "normalizer array bool": ({"normalizer": np.array(True)}, TypeError, "normalizer must be a number, .* got bool"),
    "normalizer inf": ({"normalizer": float("inf")}, ValueError, "normalizer must be finite and not negative, got inf"),
    "normalizer text": ({"normalizer": "all"}, TypeError, "normalizer must be a number, a scalar array .* got str"),
    "normalizer bool": ({"normalizer": True}, TypeError, "normalizer must be a number, a scalar array .* got bool"),
    "normalizer shape": (
        {"normalizer": ones(1)},
        ValueError,
        r"normalizer must have shape \(\) \(a scalar\), got \(1,\)",
    ),
    "normalizer of a sum": (
        {"normalizer": 3.0, "reduction": "sum"},
        ValueError,
        "normalizer needs reduction \"mean\", got reduction 'sum'",
    ),
}


def bad_inputs(tables: list[Bad]) -> list[Any]:
    return [pytest.param(*row, id=name) for table in tables for name, row in table.items()]


@pytest.mark.parametrize(("change", "kind", "message"), bad_inputs([BAD_ARRAYS, BAD_OPTIONS, BAD_LOSS]))
def test_loss_refuses(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    for function in (linear_cross_entropy, linear_cross_entropy_with_stats):
        with pytest.raises(kind, match=message):
            function(**problem() | change)


@pytest.mark.parametrize(("change", "kind", "message"), bad_inputs([BAD_ARRAYS, BAD_OPTIONS]))
def test_log_probs_refuse(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        linear_log_probs(**problem() | change)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_head_of_another_16_bit_dtype_is_refused(dtype: str) -> None:
    other = "float16" if dtype == "bfloat16" else "bfloat16"
    arrays = problem(dtype=dtype)
    arrays["linear_weight"] = arrays["linear_weight"].astype(other)
    with pytest.raises(TypeError, match=rf"linear_weight must be {dtype} or float32, got {other} \(input is {dtype}\)"):
        linear_cross_entropy(**arrays)


def test_errors_are_raised_when_tracing_too() -> None:
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes"):
        jax.jit(lambda arrays: linear_cross_entropy(**arrays, memory_budget=1000))(problem())
    with pytest.raises(ValueError, match=r"target must have shape \(12,\)"):
        jax.eval_shape(lambda arrays: linear_cross_entropy(**arrays), problem() | {"target": zeros(11, int)})


@pytest.mark.parametrize("name", ["weight", "token_weight", "normalizer"])
def test_non_differentiable_arguments_raise(name: str) -> None:
    value = {"weight": ones(50), "token_weight": ones(12), "normalizer": ones(())}[name]
    with pytest.raises(ValueError, match=rf"{name} is not differentiated .* pass jax.lax.stop_gradient\({name}\)"):
        jax.grad(lambda value: linear_cross_entropy(**problem(), **{name: value}))(value)
    arrays = problem()
    both = {"x": arrays.pop("input"), "value": value}

    def loss(both: dict[str, Any]) -> jax.Array:
        return linear_cross_entropy(both["x"], **arrays, **{name: jax.lax.stop_gradient(both["value"])})

    assert (jax.grad(loss)(both)["value"] == 0).all()


def test_second_derivative_is_refused() -> None:
    arrays = problem()
    x = arrays.pop("input")
    with pytest.raises(Exception, match=r"[Ff]orward-mode|jvp|[Dd]ifferentiation|second derivative"):
        jax.hessian(lambda x: linear_cross_entropy(x, **arrays))(x)
    with pytest.raises(Exception, match=r"[Ff]orward-mode|jvp|[Dd]ifferentiation|second derivative"):
        jax.grad(lambda x: jax.grad(lambda x: linear_cross_entropy(x, **arrays))(x).sum())(x)


def test_check_targets_names_the_first_bad_positions() -> None:
    check_targets(jnp.array([[0, 9], [-100, 3]]), 10)
    check_targets(jnp.array([0, -1]), 10, ignore_index=-1)
    check_targets(zeros(0, int), 10)
    with pytest.raises(ValueError, match=r"target must lie in \[0, 10\) or be ignore_index -100, got 2 others") as bad:
        check_targets(jnp.array([[0, 10], [-1, 3]]), 10)
    assert "target[0, 1] = 10, target[1, 0] = -1" in str(bad.value)
    with pytest.raises(ValueError, match=r"got 1 others: target = 10$"):
        check_targets(jnp.array(10), 10)
    with pytest.raises(ValueError, match="got 1000 others") as bad:
        check_targets(jnp.full((1000,), 7), 7)
    assert len(str(bad.value)) < 300
    with pytest.raises(TypeError, match="target must be a concrete array, got a tracer"):
        jax.jit(lambda target: check_targets(target, 10))(zeros(3, int))


@pytest.mark.parametrize(
    ("target", "message"),
    [(zeros(3), "have an integer dtype, got float32"), ([0, 1], "be an array, got list")],
    ids=["float32", "list"],
)
def test_check_targets_takes_arrays_of_integers(target: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"target must {message}"):
        check_targets(target, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size must be a Python int, got NoneType"),
        ({"vocab_size": 2.5}, "vocab_size must be a Python int, got float"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"vocab_size": (10, 8)}, "vocab_size must be a Python int, got tuple"),
        ({"ignore_index": None}, "ignore_index must be a Python int, got NoneType"),
    ],
)
def test_check_targets_names_a_wrong_option(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"vocab_size": 10} | change
    with pytest.raises((TypeError, ValueError), match=message):
        check_targets(jnp.array([0]), **options)


def test_explain_names_a_wrong_option() -> None:
    with pytest.raises(TypeError, match="gradients must be a bool, got str"):
        explain(jnp.ones((4, 8)), jnp.ones((16, 8)), gradients="yes")  # pyright: ignore[reportArgumentType]


def test_a_parameter_of_flax_in_place_of_its_array_is_named() -> None:
    arrays = problem()
    loss, param = linear_cross_entropy(**arrays), nnx.Param(arrays["linear_weight"])
    with pytest.raises(TypeError, match=r"got Param: pass jnp.asarray\(linear_weight\)$"):
        linear_cross_entropy(**{**arrays, "linear_weight": param})
    with pytest.raises(TypeError, match=r"got Param: pass jnp.asarray\(linear_weight\)$"):
        explain(arrays["input"], param)  # pyright: ignore[reportArgumentType]
    assert linear_cross_entropy(**{**arrays, "linear_weight": jnp.asarray(param)}) == loss


def test_a_layer_of_flax_in_place_of_its_array_is_named() -> None:
    """The message says how a call takes the parameter of the layer."""
    arrays = problem()
    x, target, rngs = arrays["input"], arrays["target"], nnx.Rngs(0)
    hidden, classes = x.shape[-1], arrays["linear_weight"].shape[0]
    linear: Any = nnx.Linear(hidden, classes, rngs=rngs)
    embed: Any = nnx.Embed(classes, hidden, rngs=rngs)
    for layer, message in (
        (linear, r"Linear: pass jnp.asarray\(linear_weight.kernel\) with vocab_axis=1, and a bias as linear_bias"),
        (embed, r"Embed: pass jnp.asarray\(linear_weight.embedding\)"),
    ):
        with pytest.raises(TypeError, match=f"linear_weight must be an array, got {message}$"):
            linear_cross_entropy(x, layer, target)
        with pytest.raises(TypeError, match=f"linear_weight must be an array, got {message}$"):
            explain(x, layer)
    with pytest.raises(TypeError, match=r"input must be an array, got Linear$"):
        linear_cross_entropy(linear, arrays["linear_weight"], target)
    assert linear_cross_entropy(x, jnp.asarray(linear.kernel), target, vocab_axis=1).shape == ()
    assert linear_cross_entropy(x, jnp.asarray(embed.embedding), target).shape == ()


@pytest.mark.parametrize("name", ["input", "linear_weight"])
def test_explain_takes_arrays(name: str) -> None:
    arrays: dict[str, Any] = {"input": ones((4, 8)), "linear_weight": ones((16, 8))} | {name: [1.0]}
    with pytest.raises(TypeError, match=f"{name} must be an array, got list"):
        explain(**arrays)


def test_explain_says_why() -> None:
    arrays = problem()
    name, reason = explain(arrays["input"], arrays["linear_weight"])
    assert name == "chunked"
    assert reason == "no kernel for cpu devices"
    assert explain(arrays["input"], arrays["linear_weight"], implementation="chunked").name == "chunked"
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'cuda'"):
        explain(arrays["input"], arrays["linear_weight"], implementation="cuda")
