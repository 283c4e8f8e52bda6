"""Compares jax_pallas under jit, grad by each argument, vmap and jax.checkpoint with materialized logits."""

import itertools
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import ARGUMENTS, FUNCTIONS, gradients, materialized, problem, replaced, total

from jax_pallas.linear_ce import linear_cross_entropy, linear_cross_entropy_with_stats, linear_log_probs
from jax_pallas.ops import RESIDUAL

SUBSETS = [names for k in (1, 2, 3) for names in itertools.combinations(ARGUMENTS, k)]

# The number of matmuls of a call with one chunk of rows and one vocabulary chunk, by whether input and linear_weight
# are differentiated.
MATMULS = {
    "mean": {(True, True): 3, (True, False): 2, (False, True): 2, (False, False): 1},
    "sum": {(True, True): 3, (True, False): 2, (False, True): 2, (False, False): 1},
    "none": {(True, True): 4, (True, False): 2, (False, True): 3, (False, False): 2},
    "log_probs": {(True, True): 4, (True, False): 3, (False, True): 3, (False, False): 2},
}


@partial(jax.jit, static_argnums=(0, 2))
def expected(function: str, arrays: dict[str, Any], vocab_axis: int = 0) -> Array:
    """Computes `total` from materialized logits. jax.grad differentiates it."""
    logits = materialized(arrays, vocab_axis)
    log_p = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_p, arrays["target"][:, None], 1)[:, 0]
    if function in ("mean", "sum"):
        return -log_prob.mean() if function == "mean" else -log_prob.sum()
    results = (-log_prob,)
    if function == "log_probs":
        results = (log_prob, -(jnp.exp(log_p) * log_p).sum(1), jax.nn.logsumexp(logits, 1))
    return jnp.stack([r * (jnp.arange(r.size) / 8 - k) for k, r in enumerate(results)]).sum()


def expected_gradients(function: str, arrays: dict[str, Any], names: tuple[str, ...], vocab_axis: int = 0) -> Any:
    found = all_gradients(function, arrays, vocab_axis)
    return {name: found[name] for name in names}


@partial(jax.jit, static_argnums=(0, 2))
def all_gradients(function: str, arrays: dict[str, Any], vocab_axis: int) -> dict[str, Array]:
    chosen = {name: arrays[name] for name in ARGUMENTS if name in arrays}
    return jax.grad(lambda chosen: expected(function, arrays | chosen, vocab_axis))(chosen)


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


def matmuls_in(function: Any, *arguments: Any) -> int:
    """Returns the number of matmuls in the lowered program."""
    return jax.jit(function).lower(*arguments).as_text().count("stablehlo.dot_general")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_gradient_of_each_single_argument(function: str, names: tuple[str, ...]) -> None:
    arrays = problem()
    assert_close(gradients(function, arrays, names), expected_gradients(function, arrays, names))
    count = MATMULS[function]["input" in names, "linear_weight" in names]
    # Scaling the rows by an upstream gradient avoids the second logits matmul only if the whole head is frozen.
    count += function == "none" and names == ("input", "linear_bias")
    assert matmuls_in(lambda arrays: gradients(function, arrays, names), arrays) == count


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_a_gradient_there_is_one_matmul(function: str) -> None:
    arrays = problem()
    assert matmuls_in(lambda arrays: total(function, arrays), arrays) == 1
    np.testing.assert_allclose(total(function, arrays), expected(function, arrays), rtol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("budget", [None, 2**16])
def test_jit(function: str, budget: int | None) -> None:
    arrays = problem(60, 8, 300)
    got = jax.jit(lambda arrays: gradients(function, arrays, memory_budget=budget))(arrays)
    assert_close(got, expected_gradients(function, arrays, ARGUMENTS))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_head_is_transposed(function: str, dtype: str) -> None:
    for vocab_axis in (0, 1):
        arrays = problem(dtype=dtype, vocab_axis=vocab_axis)
        text = jax.jit(lambda arrays, axis=vocab_axis: gradients(function, arrays, vocab_axis=axis)).lower(arrays)
        moved = re.findall(r"stablehlo.transpose.*tensor<(?:50x8|8x50)x.*", text.as_text())
        assert not moved


@pytest.mark.parametrize("function", FUNCTIONS)
def test_second_axis_as_vocabulary(function: str) -> None:
    arrays = problem(vocab_axis=1)
    got = gradients(function, arrays, vocab_axis=1)
    assert got["linear_weight"].shape == (8, 50)
    assert_close(got, expected_gradients(function, arrays, ARGUMENTS, vocab_axis=1))


BATCH = 5


def batched_problem() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays of one shared head, input (B, N, D) and target (B, N)."""
    shared = problem(12 * BATCH)
    rows = {"input": shared.pop("input").reshape(BATCH, 12, 8), "target": shared.pop("target").reshape(BATCH, 12)}
    rows["target"] = replaced(rows["target"], np.s_[1, 3:], -100)
    return shared, rows


def of_each(function: Any, shared: dict[str, Any], rows: dict[str, Any]) -> Array:
    """Computes the function of each batch element from materialized logits."""

    def one(x: Array, y: Array) -> Array:
        valid = y != -100
        log_p = jax.nn.log_softmax(materialized({**shared, "input": x}))
        losses = -jnp.where(valid, jnp.take_along_axis(log_p, jnp.where(valid, y, 0)[:, None], 1)[:, 0], 0.0)
        if function == "entropy":
            return jnp.where(valid, -(jnp.exp(log_p) * log_p).sum(1), 0.0)
        return {"mean": losses.sum() / valid.sum(), "sum": losses.sum(), "none": losses}[function]

    return jnp.stack([one(x, y) for x, y in zip(rows["input"], rows["target"], strict=True)])


def of_batch(function: Any, shared: dict[str, Any], rows: dict[str, Any], **axes: Any) -> Array:
    """Computes the function of each batch element by jax.vmap of the loss."""

    def one(rows: dict[str, Any]) -> Array:
        if function == "entropy":
            return linear_log_probs(**shared, **rows).entropy
        return linear_cross_entropy(**shared, **rows, reduction=function)

    return jax.vmap(one, **axes)(rows)


@pytest.mark.parametrize("function", ["mean", "sum", "none", "entropy"])
def test_vmap_over_tokens(function: str) -> None:
    shared, rows = batched_problem()
    want = of_each(function, shared, rows)
    np.testing.assert_allclose(of_batch(function, shared, rows), want, rtol=1e-5, atol=1e-6)

    def value(of: Any) -> Any:
        def weighted(shared: dict[str, Any], x: Array) -> Array:
            results = of(function, shared, {**rows, "input": x})
            return (results.T * jnp.arange(1.0, BATCH + 1)).sum()  # a different upstream gradient for each

        return jax.grad(weighted, argnums=(0, 1))(shared, rows["input"])

    assert_close(value(of_batch), value(of_each))


def test_vmap_over_another_axis_and_over_two() -> None:
    shared, rows = batched_problem()
    moved = {name: jnp.moveaxis(array, 0, 1) for name, array in rows.items()}
    want = of_each("mean", shared, rows)
    np.testing.assert_allclose(of_batch("mean", shared, moved, in_axes=1), want, rtol=1e-5)
    twice = {name: jnp.stack([array, array[::-1]]) for name, array in rows.items()}
    got = jax.vmap(lambda rows: of_batch("mean", shared, rows))(twice)
    np.testing.assert_allclose(got, jnp.stack([want, want[::-1]]), rtol=1e-5)


def test_vmap_over_the_head() -> None:
    arrays = problem()
    heads = jnp.stack([arrays["linear_weight"], -arrays["linear_weight"]])

    def loss(w: Any) -> Array:
        return linear_cross_entropy(**arrays | {"linear_weight": w})

    of_each_head = jax.jit(jax.vmap(jax.grad(loss)))
    for head, got in zip(heads, of_each_head(heads), strict=True):
        want = expected_gradients("mean", arrays | {"linear_weight": head}, ("linear_weight",))["linear_weight"]
        assert_close(got, want)
    assert "tensor<2x12x50xf32>" not in of_each_head.lower(heads).as_text()  # the budget holds the logits of one head


def test_vmap_over_targets_only() -> None:
    shared, rows = batched_problem()
    x = rows["input"][0]
    got = jax.vmap(lambda y: linear_cross_entropy(x, target=y, **shared))(rows["target"])
    same = {"input": jnp.broadcast_to(x, (BATCH, *x.shape)), "target": rows["target"]}
    np.testing.assert_allclose(got, of_each("mean", shared, same), rtol=1e-5)


@pytest.mark.parametrize("function", ["mean", "sum", "none", "entropy"])
def test_vmap_keeps_no_head_gradient_for_each_element(function: str) -> None:
    shared, rows = batched_problem()

    def value(shared: dict[str, Any], rows: dict[str, Any]) -> Array:
        return of_batch(function, shared, rows).sum()

    program = jax.jit(jax.grad(value)).lower(shared, rows)
    assert not re.findall(rf"{BATCH}x50x8x|50x{BATCH}x8x|{BATCH}x8x50x", program.as_text())
    assert not re.findall(rf"\[{BATCH},50,8\]|\[50,{BATCH},8\]", str(program.compile().as_text()))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("saved", [False, True])
def test_checkpoint(function: str, saved: bool) -> None:
    arrays = problem()
    policy = jax.checkpoint_policies.save_only_these_names(RESIDUAL) if saved else None

    def value(chosen: dict[str, Any]) -> Array:
        body = jax.checkpoint(lambda chosen: total(function, arrays | chosen), policy=policy)
        return 2.0 * body(chosen)

    chosen = {name: arrays[name] for name in ARGUMENTS}
    loss, got = jax.value_and_grad(value)(chosen)
    np.testing.assert_allclose(loss, 2.0 * expected(function, arrays), rtol=1e-5)
    want = expected_gradients(function, arrays, ARGUMENTS)
    assert_close(got, jax.tree.map(lambda gradient: 2.0 * gradient, want))
    # Values that the forward pass saves under a name are not computed again. Without them, another pass is needed.
    count = matmuls_in(jax.value_and_grad(value), chosen)
    assert count == MATMULS[function][True, True] if saved else count > MATMULS[function][True, True]


MICRO_BATCHES = 4


def in_micro_batches(loss: Any, arrays: dict[str, Any], shared: dict[str, Any]) -> Array:
    """Sums the losses of micro-batches in a scan."""
    rows = {name: arrays[name].reshape(MICRO_BATCHES, -1, *arrays[name].shape[1:]) for name in ("input", "target")}

    def body(sum_: Array, rows: dict[str, Any]) -> tuple[Array, None]:
        return sum_ + loss(shared, rows), None

    return jax.lax.scan(body, jnp.zeros(()), rows)[0]


@pytest.mark.parametrize("function", ["mean", "none"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_scan_over_micro_batches(function: str, checkpointed: bool) -> None:
    arrays = problem(12 * MICRO_BATCHES)
    shared = {name: arrays[name] for name in ("linear_weight", "linear_bias")}

    def loss(shared: dict[str, Any], rows: dict[str, Any]) -> Array:
        return total(function, {**shared, **rows})

    def expected_loss(shared: dict[str, Any], rows: dict[str, Any]) -> Array:
        return expected(function, {**shared, **rows})

    body = jax.checkpoint(loss) if checkpointed else loss
    summed = jax.jit(jax.value_and_grad(lambda shared: in_micro_batches(body, arrays, shared)))
    assert_close(summed(shared), jax.value_and_grad(lambda s: in_micro_batches(expected_loss, arrays, s))(shared))
    # Saving the forward pass's gradients keeps one head gradient per micro-batch.
    heads = "tensor<4x50x8xf32>" in summed.lower(shared).as_text()
    assert heads == (function == "mean" and not checkpointed)


def test_gradients_within_a_scan_keep_one_head() -> None:
    arrays = problem(12 * MICRO_BATCHES)
    w = arrays.pop("linear_weight")
    rows = {name: arrays[name].reshape(MICRO_BATCHES, 12, *arrays[name].shape[1:]) for name in ("input", "target")}

    def body(carry: Any, rows: dict[str, Any]) -> tuple[Any, None]:
        def loss(w: Array) -> Array:
            bias, counted = arrays["linear_bias"], 12 * MICRO_BATCHES
            return linear_cross_entropy(rows["input"], w, rows["target"], linear_bias=bias, normalizer=counted)

        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(w)), None

    run = jax.jit(lambda w: jax.lax.scan(body, (jnp.zeros(()), jnp.zeros_like(w)), rows)[0])
    everything = arrays | {"linear_weight": w}
    want = expected_gradients("mean", everything, ("linear_weight",))["linear_weight"]
    assert_close(run(w), (expected("mean", everything), want))
    assert "tensor<4x50x8xf32>" not in run.lower(w).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_donated_arrays_become_their_gradients(dtype: str) -> None:
    arrays = problem(dtype=dtype)
    target = arrays["target"]

    def loss(x: Array, w: Array) -> Array:
        return linear_cross_entropy(x, w, target)

    step = jax.value_and_grad(loss, argnums=(0, 1))
    want = jax.jit(step)(arrays["input"], arrays["linear_weight"])
    donated = arrays["input"], arrays["linear_weight"]
    got = jax.jit(step, donate_argnums=(0, 1))(*donated)  # an unused donation warns, which fails the test
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(array.is_deleted() for array in donated)


def test_compiled_ahead_of_time() -> None:
    arrays = problem()
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    run = jax.jit(lambda arrays: gradients("mean", arrays)).lower(shapes).compile()
    assert_close(run(arrays), expected_gradients("mean", arrays, ARGUMENTS))


def by_transformations(arrays: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the gradients by input and linear_weight of the same loss under jit and three other transformations."""
    x, w, y = (arrays[name] for name in ("input", "linear_weight", "target"))

    def loss(x: Array, w: Array, y: Array = y) -> Array:
        return linear_cross_entropy(x, w, y, **options)

    def batched(x: Array, w: Array) -> Array:
        return jax.vmap(lambda x, y: loss(x, w, y))(x.reshape(2, -1, x.shape[1]), y.reshape(2, -1)).mean()

    def scanned(x: Array, w: Array) -> Array:
        rows = x.reshape(2, -1, x.shape[1]), y.reshape(2, -1)
        return jax.lax.scan(lambda sum_, rows: (sum_ + loss(rows[0], w, rows[1]), None), jnp.zeros(()), rows)[0] / 2

    saving = jax.checkpoint_policies.save_only_these_names(RESIDUAL)
    functions = {"vmap": batched, "checkpoint": jax.checkpoint(loss, policy=saving), "scan": scanned}
    return {name: jax.jit(jax.grad(f, argnums=(0, 1)))(x, w) for name, f in functions.items()}


@pytest.mark.slow
def test_kernels_under_transformations() -> None:
    arrays = problem(40, 64, 128, dtype="bfloat16", bias=False)
    exact = {name: array.astype(jnp.float32) if name != "target" else array for name, array in arrays.items()}
    want = expected_gradients("mean", exact, ("input", "linear_weight"))
    for name, found in by_transformations(arrays, implementation="pallas_triton").items():
        for gradient, reference in zip(found, want.values(), strict=True):
            error = jnp.linalg.norm(gradient.astype(jnp.float32) - reference) / jnp.linalg.norm(reference)
            assert error < 2**-7, f"{name}: {error:.2g}"


def test_statistics_carry_no_gradient() -> None:
    arrays = problem()
    x = arrays.pop("input")

    def statistic(x: Array, name: str) -> Array:
        _, stats = linear_cross_entropy_with_stats(x, **arrays, z_loss_weight=0.1)
        return getattr(stats, name).astype(jnp.float32).sum()

    for name in ("lse", "target_logit", "z_loss", "accuracy"):
        assert (jax.grad(statistic)(x, name) == 0).all()


def test_loss_and_gradient_share_one_pass() -> None:
    arrays = problem()

    def loss(x: Any, w: Any) -> tuple[Array, Any]:
        return linear_cross_entropy_with_stats(**arrays | {"input": x, "linear_weight": w})

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    assert matmuls_in(both, arrays["input"], arrays["linear_weight"]) == 3


def test_numpy_arrays_are_taken() -> None:
    arrays = problem()
    numpy: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    got = linear_cross_entropy(**numpy)
    np.testing.assert_allclose(got, expected("mean", arrays), rtol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_bitwise_repeatable(function: str) -> None:
    arrays = problem(60, 8, 200, dtype="bfloat16")
    run = jax.jit(lambda arrays: gradients(function, arrays, memory_budget=2**16))
    jax.tree.map(np.testing.assert_array_equal, run(arrays), run(arrays))


@pytest.mark.parametrize("results", [("log_prob",), ("entropy",), ("lse",), ("log_prob", "entropy")])
def test_log_probabilities_alone_take_the_gradients_of_losses_of_rows(results: tuple[str, ...]) -> None:
    arrays = problem()

    def loss(x: Array) -> Array:
        found = linear_log_probs(x, arrays["linear_weight"], arrays["target"])
        return jnp.stack([getattr(found, name).sum() for name in results]).sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(arrays["input"]))
    assert ("linear_ce_row_gradients" in program) == (results == ("log_prob",))
    assert ("linear_ce_gradients" in program) == (results != ("log_prob",))
