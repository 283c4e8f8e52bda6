"""Tests `grad_into` of jax_pallas: the sum that a call returns, under JAX's transforms, and what is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import FUNCTIONS, gradients, problem, replaced, total, zeros

import jax_pallas
from jax_pallas import linear_cross_entropy, linear_log_probs, linear_token_loss, token_losses

Arrays = dict[str, Any]
OF_ROWS = FUNCTIONS[2:]  # their backward pass adds


def start(arrays: Arrays) -> Array:
    return jnp.asarray(np.random.default_rng(7).standard_normal(arrays["linear_weight"].shape), jnp.float32)


def plain(arrays: Arrays, names: tuple[str, ...] = ("linear_weight",), **options: Any) -> Any:
    """Returns the gradients by the named arguments without grad_into, of a float32 head."""
    rest = {name: array for name, array in arrays.items() if name not in names}
    chosen = {name: arrays[name] for name in names}
    chosen["linear_weight"] = arrays["linear_weight"].astype(jnp.float32)
    return jax.grad(lambda chosen: linear_cross_entropy(**chosen, **rest, **options))(chosen)


def differentiated(arrays: Arrays, into: Array, **options: Any) -> Any:
    """Returns the sum and the gradient of the input. With reduction "none" the losses are added and divided by the
    normalizer."""
    rest = {name: array for name, array in arrays.items() if name != "input"}
    if options.get("reduction") == "none":
        normalizer = options.pop("normalizer", 1)

        def scaled(x: Array, into: Array) -> Any:
            return linear_cross_entropy(input=x, **rest, grad_into=into, **options).sum() / normalizer

        return jax.grad(scaled, argnums=(1, 0))(arrays["input"], into)

    def loss(x: Array) -> Any:
        return linear_cross_entropy(input=x, **rest, grad_into=into, **options)

    (_, total), d_input = jax.value_and_grad(loss, has_aux=True)(arrays["input"])
    return total, d_input


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("budget", [None, 60_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_micro_batches_add_up_in_a_scan(dtype: str, budget: int | None, reduction: str) -> None:
    arrays = problem(140, v=90, dtype=dtype, bias=False)
    w, into = arrays["linear_weight"], start(arrays)

    @partial(jax.jit, donate_argnums=0)
    def run(into: Array, x: Array, y: Array) -> Any:
        def step(into: Array, batch: Any) -> Any:
            part = {"input": batch[0], "linear_weight": w, "target": batch[1]}
            return differentiated(part, into, normalizer=140, memory_budget=budget, reduction=reduction)

        return jax.lax.scan(step, into, (x.reshape(2, 70, 8), y.reshape(2, 70)))

    total, d_input = run(into.copy(), arrays["input"], arrays["target"])
    exact = {name: np.asarray(arrays[name].astype(jnp.float32), np.float64) for name in ("input", "linear_weight")}
    logits = exact["input"] @ exact["linear_weight"].T
    d_logits = np.exp(logits - logits.max(1, keepdims=True))
    d_logits /= d_logits.sum(1, keepdims=True)
    d_logits[np.arange(140), arrays["target"]] -= 1
    want = np.asarray(into, np.float64) + d_logits.T @ exact["input"] / 140
    rounding = {"float32": 3e-7, "float16": 3e-5, "bfloat16": 2e-4}[dtype]  # of d_logits, whose sum is small here
    assert np.linalg.norm(total - want) < rounding * np.linalg.norm(want)
    want = d_logits @ exact["linear_weight"] / 140
    d_input = np.asarray(d_input.reshape(140, 8), np.float64)
    assert np.linalg.norm(d_input - want) < 3e-3 * np.linalg.norm(want)


def test_tied_heads_share_one_sum() -> None:
    arrays, tokens = problem(bias=False), np.arange(12) % 5
    y = arrays["target"]

    def tied(w: Array, into: Array) -> Any:
        return linear_cross_entropy(w[tokens], w, y, grad_into=into)

    (_, total), d_embedding = jax.value_and_grad(tied, has_aux=True)(arrays["linear_weight"], jnp.zeros((50, 8)))
    want = jax.grad(lambda w: linear_cross_entropy(w[tokens], w, y))(arrays["linear_weight"])
    np.testing.assert_allclose(total + d_embedding, want, rtol=1e-5, atol=1e-6)
    assert jnp.all(d_embedding[5:] == 0)  # the head has no gradient there


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_with_and_without_differentiation_the_sum_is_the_same(vocab_axis: int) -> None:
    arrays = problem(vocab_axis=vocab_axis)
    options = {"vocab_axis": vocab_axis, "reduction": "sum", "vocab_size": 45, "softcap": 3.0}
    arrays["target"] %= 45
    into = start(arrays)
    want = plain(arrays, ("input", "linear_weight"), **options)
    total, d_input = differentiated(arrays, into, **options)
    np.testing.assert_allclose(total - into, want["linear_weight"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_input, want["input"], rtol=1e-6)
    assert jnp.array_equal(jnp.moveaxis(total, vocab_axis, 0)[45:], jnp.moveaxis(into, vocab_axis, 0)[45:])
    loss, again = linear_cross_entropy(**arrays, grad_into=into, **options)
    np.testing.assert_allclose(again, total, rtol=1e-6)
    np.testing.assert_allclose(loss, linear_cross_entropy(**arrays, **options), rtol=1e-6)


def test_statistics_and_token_losses_have_it() -> None:
    arrays = problem(bias=False)
    into = start(arrays)
    (loss, total), stats = jax.jit(jax_pallas.linear_cross_entropy_with_stats)(**arrays, grad_into=into)
    assert loss.shape == ()
    assert stats.lse.shape == (12,)
    np.testing.assert_allclose(total - into, plain(arrays)["linear_weight"], rtol=1e-5, atol=1e-6)
    fixed = arrays["target"], token_losses.weighted_nll(), jnp.linspace(-1, 2, 12)
    want = jax.grad(lambda w: linear_token_loss(arrays["input"], w, *fixed))(arrays["linear_weight"])

    def call(x: Array) -> Any:
        return linear_token_loss(x, arrays["linear_weight"], *fixed, grad_into=into)

    for _, total in (call(arrays["input"]), jax.value_and_grad(call, has_aux=True)(arrays["input"])[0]):
        np.testing.assert_allclose(total - into, want, rtol=1e-5, atol=1e-6)


def test_the_sum_has_no_gradient_and_the_head_gets_none() -> None:
    arrays = problem(bias=False)

    def both(w: Array, into: Array) -> Array:
        loss, total = linear_cross_entropy(arrays["input"], w, arrays["target"], grad_into=into)
        return loss + total.sum()

    found = jax.grad(both, argnums=(0, 1))(arrays["linear_weight"], start(arrays))
    assert not any(jnp.any(gradient) for gradient in found)


def test_checkpoint_vmap_and_an_empty_batch() -> None:
    arrays = problem(bias=False)
    into, want = start(arrays), plain(arrays)["linear_weight"]

    @jax.checkpoint
    def loss(x: Array) -> Any:
        return linear_cross_entropy(x, arrays["linear_weight"], arrays["target"], grad_into=into)

    (_, total), d_input = jax.value_and_grad(loss, has_aux=True)(arrays["input"])
    np.testing.assert_allclose(total - into, want, rtol=1e-5, atol=1e-6)
    x = jnp.stack([arrays["input"], 2.0 * arrays["input"]])
    (_, totals), d_inputs = jax.vmap(jax.value_and_grad(loss, has_aux=True))(x)
    np.testing.assert_allclose(totals[0], total, rtol=1e-6)
    np.testing.assert_allclose(d_inputs[0], d_input, rtol=1e-6)
    assert not jnp.allclose(totals[1], total)
    _, total = linear_cross_entropy(x[0, :0], arrays["linear_weight"], arrays["target"][:0], grad_into=into)
    assert jnp.array_equal(total, into)

    def of_no_rows(into: Array) -> Array:
        return linear_cross_entropy(x[0, :0], arrays["linear_weight"], arrays["target"][:0], grad_into=into)[1].sum()

    assert not jnp.any(jax.grad(of_no_rows)(into))  # the sum has no gradient here either


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_second_array(dtype: str, reduction: str) -> None:
    """The sum takes the place of a donated array, and no other array has its size."""
    arrays = problem(33, 64, 4000, dtype=dtype, bias=False)

    def step(into: Array, x: Array, w: Array, y: Array) -> Any:
        part = {"input": x, "linear_weight": w, "target": y}
        return differentiated(part, into, memory_budget=300_000, reduction=reduction)

    given = arrays["input"], arrays["linear_weight"], arrays["target"]
    compiled = jax.jit(step, donate_argnums=0).lower(start(arrays), *given).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 4 * 64 * 4000
    assert memory.temp_size_in_bytes < 2 * 64 * 4000 + (dtype == "bfloat16") * 4 * 64 * 4000  # XLA's float32 head


@pytest.mark.parametrize("function", OF_ROWS)
@pytest.mark.parametrize("frozen", [(), ("input",), ("linear_bias",)])
def test_the_gradient_of_the_array_is_the_new_sum(function: str, frozen: tuple[str, ...]) -> None:
    """For any upstream gradient. The other gradients are those without it, and the head has none."""
    arrays = problem()
    into = start(arrays)
    names = [name for name in ("input", "linear_weight", "linear_bias") if name not in frozen]
    want = gradients(function, arrays, (*names,))
    found = gradients(function, arrays | {"grad_into": into}, (*names, "grad_into"))
    np.testing.assert_allclose(found["grad_into"] - into, want["linear_weight"], rtol=1e-5, atol=1e-5)
    assert not jnp.any(found["linear_weight"])
    for name in {*names} - {"linear_weight"}:
        np.testing.assert_array_equal(found[name], want[name])


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_options_and_padding_and_rows_that_do_not_contribute(vocab_axis: int) -> None:
    arrays = problem(vocab_axis=vocab_axis)
    arrays["input"] = replaced(arrays["input"], 3, np.nan)
    arrays["target"] = replaced(arrays["target"], arrays["target"] >= 45, -100)
    arrays |= {"token_weight": replaced(jnp.linspace(-1, 2, 12), 3, 0.0), "weight": jnp.linspace(0.5, 2, 50)}
    options = {"vocab_axis": vocab_axis, "vocab_size": 45, "label_smoothing": 0.1, "z_loss_weight": 0.1, "softcap": 3.0}
    into, names = start(arrays), ("input", "linear_weight", "linear_bias")
    want = gradients("none", arrays, names, **options)
    found = gradients("none", arrays | {"grad_into": into}, (*names, "grad_into"), **options)
    np.testing.assert_allclose(found["grad_into"] - into, want["linear_weight"], rtol=1e-4, atol=1e-5)
    padding, before = (jnp.moveaxis(one, vocab_axis, 0)[45:] for one in (found["grad_into"], into))
    assert jnp.array_equal(padding, before)
    np.testing.assert_array_equal(found["input"], want["input"])
    arrays["target"] = replaced(arrays["target"], 4, 47)  # not a class
    found = gradients("none", arrays | {"grad_into": into}, ("grad_into",), **options)["grad_into"]
    assert jnp.isnan(jnp.moveaxis(found, vocab_axis, 0)[:45]).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_unreduced_token_losses_have_it(with_entropy: bool) -> None:
    arrays, factors = problem(bias=False), jnp.linspace(-1, 2, 12)
    into, named = start(arrays), token_losses.reinforce(entropy_weight=0.5 * with_entropy)

    def loss(x: Array, w: Array, advantage: Array, into: Array | None) -> Any:
        losses, stats = jax_pallas.linear_token_loss_with_stats(
            x, w, arrays["target"], named, advantage, reduction="none", grad_into=into, stats=("lse",)
        )
        return (losses * factors).sum(), stats.lse

    fixed = arrays["input"], arrays["linear_weight"], factors
    want, lse = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*fixed, None)
    (d_x, d_advantage, added), found = jax.grad(loss, argnums=(0, 2, 3), has_aux=True)(*fixed, into)
    np.testing.assert_array_equal(found, lse)
    for got, exact in zip((d_x, added - into, d_advantage), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", OF_ROWS)
def test_without_differentiation_the_call_evaluates(function: str) -> None:
    arrays = problem()
    found = total(function, arrays | {"grad_into": start(arrays)})
    assert found.shape == ()
    assert found == total(function, arrays)
    # These kernels are batch-invariant in a forward pass that adds to no array.
    shapes = [jax.ShapeDtypeStruct(size, "bfloat16") for size in ((12, 64), (64, 64))]
    given: Arrays = {"grad_into": jax.ShapeDtypeStruct((64, 64), "float32")}
    given |= dict(zip(("input", "linear_weight"), shapes, strict=True), target=jax.ShapeDtypeStruct((12,), "int32"))
    options: Any = {"implementation": "pallas_triton", "batch_invariant": True}
    assert jax.eval_shape(lambda given: total(function, given, **options), given).shape == ()


@pytest.mark.parametrize("function", OF_ROWS)
@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias"])
def test_an_array_that_is_not_differentiated_is_refused(function: str, name: str) -> None:
    """Its sum would be lost."""
    given = problem() | {"grad_into": jnp.zeros((50, 8))}
    with pytest.raises(ValueError, match="grad_into must be differentiated where input, linear_weight or linear_bias"):
        gradients(function, given, (name,))
    with pytest.raises(ValueError, match="grad_into must be differentiated where input"):
        jax.jit(lambda x: jax.grad(lambda x: total(function, given | {name: x}))(x))(given[name])


@pytest.mark.parametrize("function", OF_ROWS)
def test_an_empty_batch_keeps_the_sum(function: str) -> None:
    arrays = problem(0, bias=False)
    into = start(arrays)
    found = gradients(function, arrays | {"grad_into": into}, ("input", "grad_into"))
    assert jnp.array_equal(found["grad_into"], into)

    def loss(into: Array) -> Array:
        fixed = arrays["input"], arrays["linear_weight"], arrays["target"], token_losses.weighted_nll(), jnp.zeros(0)
        return linear_token_loss(*fixed, reduction="none", grad_into=into).sum()

    assert jnp.array_equal(jax.grad(loss)(into), into)


@pytest.mark.parametrize("function", OF_ROWS)
def test_checkpoint_and_vmap_of_rows(function: str) -> None:
    arrays = problem(bias=False)
    into, w, y = start(arrays), arrays["linear_weight"], arrays["target"]
    x = jnp.stack([arrays["input"], 2.0 * arrays["input"], -arrays["input"]])

    def loss(x: Array, into: Array | None, w: Array = w) -> Array:
        return total(function, {"input": x, "linear_weight": w, "target": y, "grad_into": into})

    @jax.jit  # one program
    def gradients(x: Array, into: Array, intos: Array) -> tuple[Any, ...]:
        return (
            jnp.stack([jax.grad(lambda w, one=one: loss(one, None, w))(w) for one in x]),
            jax.grad(loss)(x[0], None),
            jax.grad(jax.checkpoint(loss), argnums=(0, 1))(x[0], into),
            # The batch is rows of one call, which adds once.
            jax.grad(lambda into: jax.vmap(loss, in_axes=(0, None))(x, into).sum())(into),
            # A gradient of each element has a sum of its own.
            jax.vmap(jax.grad(loss, argnums=1), in_axes=(0, None))(x, into),
            jax.grad(lambda intos: jax.vmap(loss)(x, intos).sum())(intos),
        )

    intos = np.stack([into, 2 * into, 3 * into])
    each, d_x, found, all_rows, *sums = jax.tree.map(np.asarray, gradients(x, into, intos))
    np.testing.assert_allclose(found[1] - into, each[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[0], d_x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(all_rows - into, each.sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sums[0] - into, each, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums[1] - intos, each, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"grad_into must have a jax\.vmap axis where linear_weight, .* has one"):
        jax.vmap(loss, in_axes=(None, None, 0))(x[0], into, jnp.stack([w, w]))


def test_plans_of_rows() -> None:
    """The backward pass is plan A again where its kernels add in place. It is also that without the array."""
    shapes: Any = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16), jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
    into: Any = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    of_rows: Any = {"reduction": "none", "grad_into": into}
    plan = jax_pallas.explain(*shapes, device="h200", **of_rows).plan
    assert (plan.path, plan.d_weight_kernel, len(plan.matmuls)) == ("scaled_exp", True, 4)
    assert jax_pallas.explain(*shapes, device="h200", gradients=False, **of_rows).plan.matmuls == ("logits",)
    plan = jax_pallas.explain(*shapes, device="a100", **of_rows).plan
    assert (plan.path, plan.d_weight_kernel, len(plan.matmuls)) == ("recompute", False, 4)
    with pytest.raises(ValueError, match=r"batch_invariant=True needs .* for the gradient of input"):
        jax_pallas.explain(*shapes, device="a100", batch_invariant=True, **of_rows)
    evaluated = jax_pallas.explain(*shapes, device="a100", batch_invariant=True, gradients=False, **of_rows)
    assert evaluated.plan.path == "scaled_exp"
    assert jax_pallas.explain(*shapes, device="h200", batch_invariant=True, **of_rows).plan.path == "scaled_exp"
    with pytest.raises(ValueError, match="saved_budget must be 0 with grad_into"):
        jax_pallas.explain(*shapes, saved_budget=2**20, **of_rows)


def test_plans() -> None:
    """The sum needs no other float32 array. The kernels for Hopper add to it in tiles of 8 rows."""
    shapes: Any = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16), jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
    into: Any = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    options: Any = {"implementation": "chunked", "memory_budget": 2**20}
    assert jax_pallas.explain(*shapes, **options).plan.chunk_config.float32_sum
    assert not jax_pallas.explain(*shapes, **options, grad_into=into).plan.chunk_config.float32_sum
    plans = [jax_pallas.explain(*shapes, device="h200", grad_into=grad_into).plan for grad_into in (None, into)]
    assert [(plan.path, plan.d_weight_kernel) for plan in plans] == [("scaled_exp", True)] * 2
    # No chunk writes the sum first, because all of them add.
    starts = [
        jax_pallas.explain(*shapes, device="h200", grad_into=grad_into, memory_budget=2**20).plan.d_weight_starts
        for grad_into in (None, into)
    ]
    assert starts == [True, False]
    odd: Any = [jax.ShapeDtypeStruct((500 + 1, 64), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    plan = jax_pallas.explain(shapes[0], odd[0], device="h200", grad_into=odd[1]).plan
    assert (plan.path, plan.d_weight_kernel) == ("recompute", False)
    plan = jax_pallas.explain(*shapes, device="a100", grad_into=into).plan
    assert (plan.path, plan.d_weight_kernel) == ("recompute", False)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"grad_into": [1.0]}, TypeError, "grad_into must be an array or None, got list"),
        ({"grad_into": zeros((50, 8), jnp.bfloat16)}, TypeError, "grad_into must be float32, got bfloat16"),
        (
            {"grad_into": zeros((8, 50))},
            ValueError,
            r"grad_into must have shape \(50, 8\) \(linear_weight's shape\), got \(8, 50\)",
        ),
    ],
)
def test_a_bad_array_is_named(options: Arrays, kind: type[Exception], message: str) -> None:
    for call in (linear_cross_entropy, partial(linear_cross_entropy, reduction="none"), linear_log_probs):
        with pytest.raises(kind, match=message):
            call(**problem(), **options)
    arrays = problem()
    given: Arrays = {"implementation": "chunked", **options}
    with pytest.raises(kind, match=message):
        jax_pallas.explain(arrays["input"], arrays["linear_weight"], **given)
