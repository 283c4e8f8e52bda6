"""Edge cases of jax_pallas."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_problem import ARGUMENTS, FUNCTIONS, gradients, materialized, problem, replaced, total

from jax_pallas.linear_ce import linear_cross_entropy, linear_cross_entropy_with_stats, linear_log_probs

DTYPES = ("float32", "bfloat16", "float16")


def assert_zero_gradients(arrays: dict[str, Any], found: dict[str, Any]) -> None:
    for name, gradient in found.items():
        assert gradient.shape == arrays[name].shape
        assert gradient.dtype == arrays[name].dtype
        assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_empty_batch(function: str, dtype: str, shape: tuple[int, ...]) -> None:
    arrays = problem(0, dtype=dtype)
    arrays |= {"input": jnp.zeros((*shape, 8), dtype), "target": jnp.zeros(shape, int)}
    assert total(function, arrays) == 0
    assert_zero_gradients(arrays, gradients(function, arrays))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("held", [0.0, float("nan"), float("inf")])
def test_all_targets_ignored(function: str, held: float) -> None:
    arrays = problem()
    arrays |= {"input": jnp.full((12, 8), held), "target": jnp.full(12, -100)}
    assert total(function, arrays) == 0
    assert_zero_gradients(arrays, gradients(function, arrays))


@pytest.mark.parametrize("options", [{"normalizer": 0}, {"weight": jnp.zeros(50)}, {"token_weight": jnp.zeros(12)}])
def test_zero_denominator_or_weights(options: dict[str, Any]) -> None:
    arrays = problem()
    loss, stats = linear_cross_entropy_with_stats(**arrays, **options)
    assert loss == 0
    assert stats.n_valid == 12
    assert stats.accuracy == 0
    assert_zero_gradients(arrays, gradients("mean", arrays, **options))


@pytest.mark.parametrize("function", ["none", "log_probs"])
@pytest.mark.parametrize("names", [ARGUMENTS, ("input",)], ids="-".join)
def test_no_upstream_gradient_reaches_an_ignored_row(function: str, names: tuple[str, ...]) -> None:
    arrays = problem()
    arrays["target"] = replaced(arrays["target"], np.s_[::2], -100)
    factor = replaced(jnp.ones(12), np.s_[::2], np.nan)

    def value(chosen: dict[str, Any]) -> jax.Array:
        if function == "none":
            return (factor * linear_cross_entropy(**arrays | chosen, reduction="none")).sum()
        return sum(((factor * result).sum() for result in linear_log_probs(**arrays | chosen)), start=jnp.zeros(()))

    d_input = jax.grad(value)({name: arrays[name] for name in names})["input"]
    d_input = np.asarray(d_input)
    assert (d_input[::2] == 0).all()
    assert (d_input[1::2] != 0).all()


@pytest.mark.parametrize("target", [50, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("budget", [None, 2**15])
def test_out_of_range_target(target: int, budget: int | None) -> None:
    arrays = problem()
    arrays["target"] = replaced(arrays["target"], 3, target)
    others = np.arange(12) != 3
    loss = linear_cross_entropy(**arrays, reduction="none", memory_budget=budget)
    assert np.isnan(loss).tolist() == (~others).tolist()
    for function in ("none", "mean"):  # without class weights, the mean's denominator is a count
        found = gradients(function, arrays, memory_budget=budget)
        assert np.isnan(found["input"][3]).all()
        assert np.isfinite(found["input"][others]).all()
        assert np.isnan(found["linear_weight"]).all()
        assert np.isnan(found["linear_bias"]).all()
    assert np.isnan(linear_cross_entropy(**arrays, memory_budget=budget))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("n", [0, 12])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_results_stay_float32_where_jax_has_64_bits(function: str, n: int, dtype: str) -> None:
    arrays = problem(n, dtype=dtype)
    want = gradients(function, arrays, memory_budget=2**15)
    with jax.enable_x64(True):
        arrays["target"] = arrays["target"].astype("int64")
        assert linear_cross_entropy(**arrays).dtype == jnp.float32
        got = gradients(function, arrays, memory_budget=2**15)
    for name, gradient in got.items():
        assert gradient.dtype == dtype
        tolerance = 1e-5 if dtype == "float32" else 5e-3
        np.testing.assert_allclose(gradient, want[name], rtol=tolerance, atol=tolerance)


def test_targets_beyond_32_bits_are_not_classes() -> None:
    arrays = problem()
    with jax.enable_x64(True):
        arrays["target"] = np.array([3, 2**32 + 3, -(2**32), *[0] * 9])
        loss = linear_cross_entropy(**arrays, reduction="none")
        ignoring = linear_cross_entropy(**arrays, reduction="none", ignore_index=2**32 + 3)
    assert np.isnan(loss).tolist() == [False, True, True, *[False] * 9]
    assert ignoring[1] == 0
    assert np.isnan(ignoring).tolist() == [False, False, True, *[False] * 9]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int16"])
def test_targets_of_any_integer_dtype(dtype: str) -> None:
    arrays = problem()
    want = -jnp.take_along_axis(jax.nn.log_softmax(materialized(arrays)), arrays["target"][:, None], 1)[:, 0]
    values = replaced(arrays["target"].astype(dtype), 0, np.iinfo(dtype).max)  # not a class, whether signed or unsigned
    loss = linear_cross_entropy(**arrays | {"target": values}, reduction="none")
    assert np.isnan(loss[0])
    np.testing.assert_allclose(loss[1:], want[1:], rtol=1e-5)


@pytest.mark.parametrize("held", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["bias", "target's bias", "input"])
def test_non_finite_values_propagate_as_in_cross_entropy(held: float, where: str) -> None:
    arrays = problem()
    arrays["target"] = jnp.arange(12)
    if where == "input":
        arrays["input"] = replaced(arrays["input"], (3, 2), held)
    else:
        arrays["linear_bias"] = replaced(arrays["linear_bias"], 40 if where == "bias" else 5, held)
    torch = pytest.importorskip("torch")
    x, w, b, y = (torch.tensor(np.asarray(array)) for array in arrays.values())
    x.requires_grad_()
    want = torch.nn.functional.cross_entropy(x @ w.T + b, y.long(), reduction="none")
    want.sum().backward()
    got, pull_back = jax.vjp(lambda x: linear_cross_entropy(**arrays | {"input": x}, reduction="none"), arrays["input"])
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(pull_back(jnp.ones(12))[0], x.grad.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalizer", [-1.0, float("nan"), float("inf")])
def test_an_invalid_normalizer_array_makes_the_loss_nan(normalizer: float) -> None:
    arrays = problem()

    def loss(changed: dict[str, Any]) -> jax.Array:
        return linear_cross_entropy(**{**arrays, **changed}, normalizer=jnp.float32(normalizer))

    floats = {name: array for name, array in arrays.items() if name != "target"}
    value, found = jax.value_and_grad(loss)(floats)
    assert jnp.isnan(value)
    assert all(jnp.isnan(gradient).any() for gradient in found.values())
    assert loss({"target": jnp.full(12, -100)}) == 0


@pytest.mark.parametrize("normalizer", [7, 7.0, np.float64(7), np.int64(7), jnp.int32(7), jnp.float32(7)])
def test_normalizer_of_any_type(normalizer: Any) -> None:
    arrays = problem()
    log_p = jax.nn.log_softmax(materialized(arrays))
    want = -jnp.take_along_axis(log_p, arrays["target"][:, None], 1).sum() / 7
    np.testing.assert_allclose(linear_cross_entropy(**arrays, normalizer=normalizer), want, rtol=1e-5)


def test_statistics_of_a_loss() -> None:
    arrays = problem(30)
    logits = np.asarray(materialized(arrays), np.float64)
    target, token_weight = np.array(arrays["target"]), np.ones(30, np.float32)
    target[::7], target[2], token_weight[1::7] = -100, logits[2].argmax(), 0
    arrays["target"] = jnp.asarray(target)
    call = jax.jit(partial(linear_cross_entropy_with_stats, z_loss_weight=0.1))
    _, stats = call(**arrays, token_weight=token_weight)
    contributes = (target != -100) & (token_weight != 0)
    lse = np.where(contributes, np.log(np.exp(logits).sum(1)), 0.0)
    np.testing.assert_allclose(stats.lse, lse, rtol=1e-5)
    picked = logits[np.arange(30), target.clip(0)]
    np.testing.assert_allclose(stats.target_logit, np.where(contributes, picked, 0.0), rtol=1e-5)
    n_valid = (target != -100).sum()
    np.testing.assert_allclose(stats.z_loss, 0.1 * (lse**2).sum() / n_valid, rtol=1e-5)
    hits = contributes & (logits.argmax(1) == target)
    np.testing.assert_allclose(stats.accuracy, hits.sum() / contributes.sum())
    assert stats.n_valid == n_valid


def test_ties_count_as_correct() -> None:
    call = jax.jit(linear_cross_entropy_with_stats)
    _, stats = call(jnp.ones((4, 3)), jnp.ones((6, 3)), jnp.array([0, 5, 2, -100]))
    assert stats.accuracy == 1


def test_float32_matmuls_obey_jax_default_matmul_precision() -> None:
    arrays = problem()

    def precisions() -> set[str]:
        text = jax.jit(lambda arrays: gradients("mean", arrays)).lower(arrays).as_text()
        return {line.split("precision = [")[1].split("]")[0] for line in text.splitlines() if "precision = [" in line}

    assert precisions() == {"HIGHEST, HIGHEST"}
    with jax.default_matmul_precision("tensorfloat32"):
        assert precisions() != {"HIGHEST, HIGHEST"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("names", [("input", "linear_weight", "linear_bias"), ("input",), ("linear_weight",)], ids=str)
@pytest.mark.parametrize("results", [("loss",), ("log_prob",), ("log_prob", "entropy", "lse")], ids=str)
def test_a_row_of_nan_whose_upstream_gradient_is_0_changes_no_gradient(
    results: tuple[str, ...], names: tuple[str, ...], dtype: Any
) -> None:
    arrays = problem(dtype=dtype)
    factor = replaced(np.arange(12, dtype=np.float32) - 2, 1, 0.0)  # 0 in rows 1 and 2

    def value(chosen: dict[str, Any], others: dict[str, Any]) -> Any:
        given = {**others, **chosen}
        if results == ("loss",):
            return (linear_cross_entropy(**given, reduction="none") * factor).sum()
        found = linear_log_probs(**given)
        return jnp.stack([(getattr(found, name) * factor).sum() for name in results]).sum()

    gradients = []
    for bad in (False, True):
        given = dict(arrays)
        if bad:
            given["input"] = replaced(given["input"], 2, np.nan)
            given["target"] = replaced(given["target"], 1, 999)
        chosen = {name: given.pop(name) for name in names}
        gradients.append(jax.grad(value)(chosen, given))
    exact, found = (jax.tree.map(lambda array: np.asarray(array, np.float32), one) for one in gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), exact, found)


def test_results_are_float32_with_x64() -> None:
    arrays = problem()
    with jax.enable_x64(True):
        loss, stats = linear_cross_entropy_with_stats(**arrays, z_loss_weight=0.1)
    assert {one.dtype for one in (loss, *stats[:-1])} == {jnp.dtype("float32")}
