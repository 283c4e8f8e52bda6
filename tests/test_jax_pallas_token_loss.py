"""Compares `linear_token_loss` with NumPy in float64: the named losses and others, options, gradients of every
argument, rows that do not contribute, JAX's transformations, and what is refused.
"""

import gc
import math
import pickle
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import cast, problem, replaced

from jax_pallas import (
    TokenStats,
    check_token_loss,
    elementwise,
    explain,
    linear_log_probs,
    linear_token_loss,
    linear_token_loss_with_stats,
    token_losses,
)
from linear_ce.reference import EXACT, Arithmetic, reference_log_probs, unfused
from linear_ce.spec import LossSpec
from linear_ce.statistics import TOKEN_STATS
from parity.token_losses import FORMS, Form, Values
from parity.tolerances import budget, error

NAMES = ("input", "linear_weight", "linear_bias")


def focal(log_prob: np.ndarray, gamma: np.ndarray) -> Values:
    p = np.exp(log_prob)
    rest = 1 - p
    loss = -(rest**gamma) * log_prob
    return loss, (gamma * rest ** (gamma - 1) * p * log_prob - rest**gamma, np.log(rest) * loss)


def focal_of_jax(log_prob: Array, gamma: Array) -> Array:
    return -((-jnp.expm1(log_prob)) ** gamma) * log_prob


def focal_with_entropy(log_prob: np.ndarray, entropy: np.ndarray, gamma: np.ndarray) -> Values:
    (loss, (d_log_prob, d_gamma)), t, p = focal(log_prob, gamma), np.tanh(entropy / 4), np.exp(log_prob / 8)
    return loss - gamma * t * p, (d_log_prob - gamma * t * p / 8, gamma * (t**2 - 1) / 4 * p, d_gamma - t * p)


def focal_with_entropy_of_jax(log_prob: Array, entropy: Array, gamma: Array) -> Array:
    return focal_of_jax(log_prob, gamma) - gamma * jnp.tanh(entropy / 4) * jnp.exp(log_prob / 8)


# What a call passes, and what it is compared with.
LOSSES: dict[str, tuple[Callable[..., Array], Form]] = {
    **{name: (form.named(token_losses), form) for name, form in FORMS.items()},
    "focal": (focal_of_jax, Form(focal, ("gamma",), {})),
    "focal-entropy": (focal_with_entropy_of_jax, Form(focal_with_entropy, ("gamma",), {}, with_entropy=True)),
}

IGNORED, EXCLUDED = slice(5, None, 9), slice(3, None, 7)  # rows with target ignore_index, rows with token_weight 0


@dataclass
class Call:
    """The arrays and options of one call, with NaN in the rows that do not contribute."""

    loss: str
    n: int = 60
    v: int = 300
    dtype: str = "float32"
    vocab_axis: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    target: int | None = None  # the target of the last token

    def __post_init__(self) -> None:
        arrays = problem(self.n, 8, self.v, dtype=self.dtype, vocab_axis=self.vocab_axis)
        target = np.asarray(arrays["target"]) % self.options.get("vocab_size", self.v)
        target[IGNORED] = -100
        if self.target is not None:
            target[-1] = self.target
        weight = np.linspace(0.5, 2.0, self.n, dtype=np.float32)
        weight[EXCLUDED] = 0
        self.contributes = (target != -100) & (weight != 0)
        changed = {"input": replaced(arrays["input"], ~self.contributes, np.nan)}
        self.arrays = arrays | changed | {"target": jnp.asarray(target), "token_weight": jnp.asarray(weight)}
        # Near the log-probabilities, so that some ratios are clipped. Advantages have both signs, gamma is above 1.
        log_prob = np.where(self.contributes, self.reference().log_prob, 0.0)
        random = np.random.default_rng(1)
        first = random.uniform(1, 2, self.n) * (1 if "focal" in self.loss else random.choice([-1, 1], self.n))
        drawn = [first, *(log_prob + random.normal(0, 0.3, (2, self.n)))][: len(LOSSES[self.loss][1].per_token)]
        self.per_token = [jnp.asarray(np.where(self.contributes, values, np.nan), jnp.float32) for values in drawn]

    def reference(
        self,
        d_log_prob: np.ndarray | None = None,
        d_entropy: np.ndarray | None = None,
        arithmetic: Arithmetic = EXACT,
    ) -> Any:
        options = {name: value for name, value in self.options.items() if name not in ("reduction", "normalizer")}
        x, w, b = (np.asarray(self.arrays[name], np.float32) for name in NAMES)
        w, y = (w if self.vocab_axis == 0 else w.T), np.where(self.contributes, self.arrays["target"], -100)
        given = {"linear_bias": b, "spec": LossSpec(**options), "arithmetic": arithmetic}
        return reference_log_probs(x, w, y, d_log_prob=d_log_prob, d_entropy=d_entropy, **given)

    def expected(self, arithmetic: Arithmetic = EXACT) -> dict[str, np.ndarray]:
        """Returns the losses of the rows, the loss and all gradients."""
        real = arithmetic.real
        per_token = [np.where(self.contributes, values, 1).astype(real) for values in self.per_token]
        found, form = self.reference(arithmetic=arithmetic), LOSSES[self.loss][1]
        log_prob = np.where(self.contributes, found.log_prob, -1).astype(real)
        loss, slopes = form(log_prob, *[found.entropy] * form.with_entropy, *per_token)
        reduction = self.options.get("reduction", "mean")
        counted = (np.asarray(self.arrays["target"]) != -100).sum()
        denominator = self.options.get("normalizer", counted) if reduction == "mean" else 1
        weight = np.asarray(self.arrays["token_weight"], real) / real(denominator)
        # An upstream gradient for each row of "none": see `run`.
        upstream = weight * (np.arange(self.n) / 8 - 1).astype(real) if reduction == "none" else weight
        d_log_prob, *d_per_token = (np.where(self.contributes, upstream * slope, 0) for slope in slopes)
        d_entropy = d_per_token.pop(0) if form.with_entropy else None
        losses = np.where(self.contributes, weight * loss, 0)
        found = self.reference(d_log_prob, d_entropy, arithmetic)
        named = {"d_input": found.d_input, "d_weight": found.d_weight, "d_bias": found.d_bias}
        named["loss"] = losses if reduction == "none" else losses.sum()
        named["magnitude"] = np.abs(losses).sum()
        return named | {f"d_per_token{i}": value for i, value in enumerate(d_per_token)}

    def run(self, **options: Any) -> dict[str, np.ndarray]:
        function = LOSSES[self.loss][0]
        given: dict[str, Any] = {**self.options, **options, "vocab_axis": self.vocab_axis}
        given["with_entropy"] = LOSSES[self.loss][1].with_entropy and not isinstance(function, token_losses.Named)

        def value(chosen: list[Array], per_token: list[Array]) -> tuple[Array, Array]:
            x, w, b = chosen
            y, t = self.arrays["target"], self.arrays["token_weight"]
            loss = linear_token_loss(x, w, y, function, *per_token, linear_bias=b, token_weight=t, **given)
            if given.get("reduction") != "none":
                return loss, loss
            return (loss * (np.arange(self.n, dtype=np.float32) / 8 - 1)).sum(), loss

        chosen = [self.arrays[name] for name in NAMES]
        run = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))
        (_, loss), (found, d_per_token) = run(chosen, self.per_token)
        named = dict(zip(("d_input", "d_weight", "d_bias"), found, strict=True)) | {"loss": loss}
        named["d_weight"] = named["d_weight"] if self.vocab_axis == 0 else named["d_weight"].T
        assert all(gradient.dtype == values.dtype for gradient, values in zip(d_per_token, self.per_token, strict=True))
        named |= {f"d_per_token{i}": value for i, value in enumerate(d_per_token)}
        return {name: np.asarray(array, np.float32) for name, array in named.items()}

    def check(self, extra_roundings: float = 0.0, **options: Any) -> None:
        """Fails if an output exceeds its budget, with the percentage of it that each output used."""
        want, rough, got = self.expected(), self.expected(unfused(self.dtype)), self.run(**options)
        used = {}
        for name, array in got.items():
            condition = want["magnitude"] / abs(want["loss"]) if name == "loss" and array.ndim == 0 else 1.0
            most = budget(name, self.dtype, error(rough[name], want[name]), extra_roundings, float(condition))
            used[name] = 100 * error(array, want[name]) / most
        assert max(used.values()) <= 100, ", ".join(f"{name} {percent:.0f}%" for name, percent in used.items())


CHUNKED = {"memory_budget": 2**15, "implementation": "chunked"}  # at least three chunks of 60 rows

OPTIONS: dict[str, Any] = {"softcap": 3.0, "logit_scale": 0.7, "vocab_size": 290}


@pytest.mark.parametrize(
    "loss", ["focal", "focal-entropy", "reinforce"]
)  # the other named losses are cases of parity/cases.py
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses(loss: str, reduction: str) -> None:
    Call(loss, options={"reduction": reduction}).check()


@pytest.mark.parametrize(
    ("loss", "dtype", "vocab_axis", "options"),
    [
        ("grpo-k3", "float32", 0, OPTIONS),
        ("grpo-k3", "float32", 1, OPTIONS | {"reduction": "sum"}),
        ("grpo-k3", "float32", 1, OPTIONS | {"reduction": "none"}),
        ("grpo-k3", "bfloat16", 0, {"normalizer": 7.0}),
        ("grpo-k3", "float16", 0, {"normalizer": 7.0}),
        ("focal-entropy", "float32", 1, OPTIONS | {"reduction": "sum"}),
        pytest.param("focal-entropy", "bfloat16", 0, OPTIONS | {"reduction": "none"}, marks=pytest.mark.slow),
        ("focal-entropy", "float16", 0, {"normalizer": 7.0}),
    ],
    ids=str,
)
def test_options_in_chunks(loss: str, dtype: str, vocab_axis: int, options: dict[str, Any]) -> None:
    given = CHUNKED | ({"memory_budget": 40_000} if loss == "focal-entropy" else {})  # which takes more
    Call(loss, dtype=dtype, vocab_axis=vocab_axis, options=options).check(3.0, **given)


@pytest.mark.parametrize(
    ("dtype", "options", "vocab_axis"),
    [
        ("bfloat16", OPTIONS, 0),
        pytest.param("bfloat16", {"reduction": "none"}, 1, marks=pytest.mark.slow),
        ("float16", {}, 0),
        pytest.param("float32", OPTIONS, 1, marks=pytest.mark.slow),
    ],
)
def test_kernels_of_a_loss_of_the_entropy(dtype: str, options: dict[str, Any], vocab_axis: int) -> None:
    call = Call("focal-entropy", n=100, dtype=dtype, vocab_axis=vocab_axis, options=options)
    given: dict[str, Any] = {"implementation": "pallas_triton", "memory_budget": 40_000}
    of_call = {"vocab_axis": vocab_axis, "reduction": options.get("reduction", "mean"), "with_entropy": True}
    plan = explain(call.arrays["input"], call.arrays["linear_weight"], **of_call, **given).plan
    assert (plan.path, plan.matmuls[0]) == ("recompute", "logits of the losses")
    assert plan.chunks.rows < 50
    call.check(3.0, **given)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_kernels_in_chunks(vocab_axis: int) -> None:
    """Runs the kernels of scaled exponentials in Pallas' interpreter."""
    call = Call("grpo-k3", n=150, v=128, dtype="bfloat16", vocab_axis=vocab_axis)
    options: dict[str, Any] = {"implementation": "pallas_triton", "memory_budget": 2**15}
    plan = explain(call.arrays["input"], call.arrays["linear_weight"], vocab_axis=vocab_axis, **options).plan
    assert (plan.path, plan.chunks.rows) == ("scaled_exp", 64)
    call.check(3.0, **options)


# Small calls, whose results are computed from materialized logits.


def simple(n: int = 12) -> dict[str, Any]:
    advantage = jnp.asarray(np.linspace(-1, 2, n), jnp.float32)
    return problem(n, bias=False) | {"token_loss": scaled, "per_token": (advantage,)}


def scaled(log_prob: Array, advantage: Array) -> Array:
    return -advantage * log_prob + 0.1 * jnp.square(log_prob)


def scaled_with_entropy(log_prob: Array, entropy: Array, advantage: Array) -> Array:
    return scaled(log_prob, advantage) - advantage * jnp.square(entropy) * jnp.exp(log_prob / 4)


def loss_of(arrays: dict[str, Any], **options: Any) -> Array:
    rest = {name: array for name, array in arrays.items() if name not in POSITIONAL}
    return linear_token_loss(*(arrays[name] for name in POSITIONAL[:-1]), *arrays["per_token"], **rest, **options)


POSITIONAL = ("input", "linear_weight", "target", "token_loss", "per_token")


def unfused_loss(arrays: dict[str, Any], reduction: str = "mean", with_entropy: bool = False) -> Array:
    """Returns the loss from materialized logits. jax.grad differentiates it."""
    target, log_p = arrays["target"], jax.nn.log_softmax(arrays["input"] @ arrays["linear_weight"].T)
    valid = target != -100
    log_prob = jnp.take_along_axis(log_p, jnp.where(valid, target, 0)[..., None], -1)[..., 0]
    entropy = [-(jnp.exp(log_p) * log_p).sum(-1)] * with_entropy
    losses = jnp.where(valid, arrays["token_loss"](log_prob, *entropy, *arrays["per_token"]), 0.0)
    return losses if reduction == "none" else losses.sum() / jnp.maximum(valid.sum(), 1)


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), got, want)


def gradients(
    loss: Callable[..., Array], arrays: dict[str, Any], names: tuple[str, ...], transform: Any = jax.jit
) -> Any:
    chosen = {name: arrays[name] for name in names}
    return transform(jax.value_and_grad(lambda chosen: loss(arrays | chosen)))(chosen)


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


ARGUMENTS = ("input", "linear_weight", "per_token")

# Matmuls of a call with one chunk, by what is differentiated, for a scalar reduction and for "none".
MATMULS = {
    (): (1, 1),
    ("per_token",): (1, 1),
    ("input",): (2, 2),
    ("linear_weight",): (2, 3),
    ("input", "per_token"): (2, 2),
    ARGUMENTS: (3, 4),
}


@pytest.mark.parametrize("names", MATMULS, ids="-".join)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_that_are_not_needed_are_not_computed(names: tuple[str, ...], reduction: Any) -> None:
    arrays = simple()
    tokens = jnp.arange(12.0)

    def value(loss: Callable[..., Array], arrays: dict[str, Any]) -> Any:
        return gradients(lambda arrays: (loss(arrays, reduction=reduction) * tokens).sum(), arrays, names)

    assert_matmuls(value, arrays, MATMULS[names][reduction == "none"])


def assert_matmuls(value: Callable[..., Any], arrays: dict[str, Any], count: int) -> None:
    """Asserts that a value of the loss is that of materialized logits, and how many matmuls its program has."""
    traced = {name: arrays[name] for name in POSITIONAL if name != "token_loss"}
    program = jax.jit(lambda traced: value(loss_of, arrays | traced)).lower(traced)
    assert program.as_text().count("stablehlo.dot_general") == count
    assert_close(program.compile()(traced), value(unfused_loss, arrays))


@pytest.mark.parametrize(
    ("names", "reduction", "count"),
    [
        (ARGUMENTS, "mean", 3),
        (ARGUMENTS, "none", 4),
        (("linear_weight",), "mean", 2),
        (("input",), "none", 3),
        (("per_token",), "mean", 1),
    ],
)
def test_matmuls_of_a_loss_of_the_entropy(names: tuple[str, ...], reduction: Any, count: int) -> None:
    arrays = simple() | {"token_loss": scaled_with_entropy}
    tokens, options = jnp.arange(12.0), {"reduction": reduction, "with_entropy": True}

    def value(loss: Callable[..., Array], arrays: dict[str, Any]) -> Any:
        return gradients(lambda arrays: (loss(arrays, **options) * tokens).sum(), arrays, names)

    assert_matmuls(value, arrays, count)


def test_leading_axes() -> None:
    arrays = simple()
    shaped = {name: arrays[name].reshape(3, 4, *arrays[name].shape[1:]) for name in ("input", "target")}
    shaped = arrays | shaped | {"per_token": (arrays["per_token"][0].reshape(3, 4),)}
    got, want = (loss_of(given, reduction="none") for given in (shaped, arrays))
    assert got.shape == (3, 4)
    np.testing.assert_array_equal(got.reshape(-1), want)
    assert_close(gradients(loss_of, shaped, ARGUMENTS), gradients(unfused_loss, shaped, ARGUMENTS))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradients_of_per_token_arrays_have_their_dtypes(dtype: str, reduction: Any) -> None:
    arrays = simple()
    arrays["per_token"] = (arrays["per_token"][0].astype(dtype),)
    found = jax.grad(lambda a: loss_of(arrays | {"per_token": (a,)}, reduction=reduction).sum())(arrays["per_token"][0])
    exact = {**arrays, "per_token": (arrays["per_token"][0].astype(jnp.float32),)}
    want = jax.grad(lambda a: unfused_loss(exact | {"per_token": (a,)}, "none").sum())(exact["per_token"][0])
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(jnp.float32), want, rtol=2**-7)


def no_tokens(arrays: dict[str, Any]) -> dict[str, Any]:
    return arrays | {"input": arrays["input"][:0], "target": arrays["target"][:0], "per_token": (jnp.zeros(0),)}


NOT_COUNTED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no tokens": no_tokens,
    "all ignored": lambda arrays: arrays | {"target": jnp.full(12, -100)},
    "weights of 0": lambda arrays: arrays | {"token_weight": jnp.zeros(12)},
    "normalizer of 0": lambda arrays: arrays | {"normalizer": 0.0},
}


@pytest.mark.parametrize("case", NOT_COUNTED)
def test_no_counted_token(case: str) -> None:
    arrays = NOT_COUNTED[case](simple() | {"token_loss": lambda log_prob, a: log_prob / a - 1.0})
    arrays["per_token"] = (arrays["per_token"][0] * jnp.nan,)
    value, found = gradients(loss_of, arrays, ARGUMENTS)
    assert value == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(found))
    if case == "no tokens":
        assert loss_of(arrays, reduction="none").shape == (0,)


def excluded_rows() -> dict[str, Any]:
    """Returns a problem in which every third target is ignored and its per-token value is NaN."""
    a = replaced(np.linspace(1, 2, 12, dtype=np.float32), np.s_[::3], np.nan)
    return simple() | {"target": replaced(simple()["target"], np.s_[::3], -100), "per_token": (a,)}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_that_do_not_contribute_are_in_no_sum(reduction: Any) -> None:
    """The derivative of the loss is infinite for arguments of 0, which stand for the values of excluded rows."""
    arrays = excluded_rows()

    def value(factor: Array, a: Array) -> Array:
        def token_loss(log_prob: Array, a: Array) -> Array:
            return log_prob * jnp.sqrt(a * factor)

        return loss_of(arrays | {"token_loss": token_loss, "per_token": (a,)}, reduction=reduction).sum()

    loss, (d_factor, d_a) = jax.value_and_grad(value, argnums=(0, 1))(jnp.float32(2.0), arrays["per_token"][0])
    np.testing.assert_allclose(d_factor, loss / 4, rtol=1e-5)
    assert not d_a[::3].any()
    assert jnp.isfinite(d_a).all()


@pytest.mark.parametrize(
    ("implementation", "dtype", "bad"),
    [
        ("chunked", "float32", "target"),
        ("chunked", "float32", "input"),
        ("pallas_triton", "bfloat16", "input"),
        pytest.param("pallas_triton", "bfloat16", "target", marks=pytest.mark.slow),
    ],
)
def test_a_log_prob_that_is_nan_makes_the_row_nan(implementation: str, dtype: str, bad: str) -> None:
    """The target is not a class, or the input is NaN. The token loss does not propagate NaN."""
    arrays = simple() | problem(12, 8, 128, dtype=dtype, bias=False)
    arrays[bad] = replaced(arrays[bad], 4, 128 if bad == "target" else np.nan)
    arrays["token_loss"] = lambda log_prob, a: jnp.where(jnp.isnan(log_prob), 0.0, a * log_prob)
    options: dict[str, Any] = {"implementation": implementation}
    losses = loss_of(arrays, reduction="none", **options)
    assert jnp.isnan(losses).tolist() == [i == 4 for i in range(12)]
    # The gradients of each reduction take seconds to compile with kernels. The slow case has both.
    for reduction in ("mean",) if implementation == "pallas_triton" and bad == "input" else ("mean", "none"):
        options["reduction"] = reduction
        value, found = gradients(lambda arrays: loss_of(arrays, **options).sum(), arrays, ARGUMENTS[:2])
        assert jnp.isnan(value)
        assert jnp.isnan(found["linear_weight"]).all()
        assert jnp.isnan(found["input"]).any(1).tolist() == [i == 4 for i in range(12)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_log_prob_of_confident_tokens_is_0(dtype: str, reduction: Any) -> None:
    x, w = (jnp.asarray(16 * np.eye(rows, 8), dtype) for rows in (8, 50))
    arrays: dict[str, Any] = {"input": x, "linear_weight": w, "target": jnp.asarray(np.arange(8))}

    def token_loss(log_prob: Array) -> Array:
        return jnp.where((log_prob == 0) & ~jnp.signbit(log_prob), 1.0, 100.0)

    arrays |= {"token_loss": token_loss, "per_token": ()}
    assert loss_of(arrays, reduction=reduction).sum() == 8
    value, _ = gradients(lambda arrays: loss_of(arrays, reduction=reduction).sum(), arrays, ARGUMENTS[:2])
    assert value == 8


def test_closures() -> None:
    """Closes over a scalar that is differentiated, a traced one, a vector that is averaged, and a constant."""
    arrays = simple()
    table, constant = jnp.linspace(0.0, 1.0, 5), np.float32(0.25)

    def value(loss: Callable[..., Array], factor: Array, other: Array, table: Array) -> Array:
        def token_loss(log_prob: Array, a: Array) -> Array:
            trust = jnp.where(other[0] > 0, factor, -factor)
            return constant * a * log_prob * trust + table.mean() * jax.nn.softplus(log_prob) + int(True)

        return loss(arrays | {"token_loss": token_loss})

    given = jnp.float32(0.7), jnp.ones(1), table
    for reduction in ("mean", "none"):
        run = jax.jit(jax.value_and_grad(partial(value, lambda a, r=reduction: loss_of(a, reduction=r).mean()), (0, 2)))  # pyright: ignore[reportArgumentType]
        want = jax.value_and_grad(partial(value, unfused_loss), argnums=(0, 2))(*given)
        assert_close(run(*given), want)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_named_losses_as_arguments(transform: Callable[..., Any]) -> None:
    arrays: dict[str, Any] = simple() | {"token_loss": token_losses.weighted_nll()}
    given = [arrays[name] for name in POSITIONAL[:-1]]
    found = jax.grad(transform(linear_token_loss))(*given, *arrays["per_token"])
    assert_close(found, gradients(unfused_loss, arrays, ("input",))[1]["input"])


def test_gradients_of_large_closures_take_no_memory_for_each_token() -> None:
    arrays, table = simple(), jnp.linspace(0.5, 1.0, 100_000)

    def value(loss: Callable[..., Array], table: Array, x: Array) -> Array:
        def token_loss(p: Array, a: Array) -> Array:
            return p * table[3] + jax.jit(lambda p, table: a * p * table.mean())(p, table)

        return loss(arrays | {"token_loss": token_loss, "input": x})

    run = jax.jit(jax.grad(partial(value, loss_of))).lower(table, arrays["input"]).compile()
    analysis: Any = run.memory_analysis()
    assert analysis.temp_size_in_bytes < 3 * table.nbytes  # for 12 tokens
    assert_close(run(table, arrays["input"]), jax.grad(partial(value, unfused_loss))(table, arrays["input"]))


def test_large_closures_in_calls_are_not_differentiated() -> None:
    arrays, table = simple(), jnp.ones(100)

    def value(table: Array) -> Array:
        return loss_of(arrays | {"token_loss": jax.checkpoint(lambda p, a: p * table[3] * a)})

    value(table)
    with pytest.raises(ValueError, match=r"an array of shape \(100,\) in jax.checkpoint.*Compute the number"):
        jax.grad(value)(table)


def test_named_losses_are_equal_and_hashable() -> None:
    assert token_losses.grpo(0.2, 0.3) == token_losses.grpo(0.2, 0.3)
    assert pickle.loads(pickle.dumps(token_losses.grpo())) == token_losses.grpo()
    assert token_losses.ppo_clip() == token_losses.ppo_clip(0.2, 0.2)
    assert token_losses.cispo() == token_losses.cispo(1.0, 0.28)
    assert token_losses.grpo() == token_losses.grpo(0.2, 0.2, 0.0, "k3")
    assert token_losses.grpo() != token_losses.grpo(entropy_weight=0.1)
    assert len({token_losses.grpo(), token_losses.grpo(), token_losses.grpo(beta=0.1), token_losses.ppo_clip()}) == 3
    with pytest.raises(ValueError, match=r"kl must be one of 'k1', 'k2', 'k3', got 'k4'"):
        token_losses.reinforce(0.1, "k4")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (0.0, 0.2), (0.2, 0.0)])
def test_a_ratio_at_a_bound_is_not_clipped(low: float, high: float) -> None:
    loss, zeros, advantage = token_losses.ppo_clip(low, high), jnp.zeros(2), jnp.array([1.0, -1.0])
    for given in (advantage, jnp.zeros(2)):
        found = jax.grad(lambda p, a: loss(p, a, zeros).sum(), (0, 1))(zeros, given)
        assert_close(found, (-given, -jnp.ones(2)))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: token_losses.ppo_clip(-0.1), ValueError, "epsilon_low must not be negative, got -0.1"),
        (lambda: token_losses.grpo(beta=True), TypeError, "beta must be a Python number, got bool"),
        (lambda: token_losses.cispo(entropy_weight=math.nan), ValueError, "entropy_weight must be finite, got nan"),
        (lambda: token_losses.cispo(epsilon_high=math.inf), ValueError, "epsilon_high must be finite"),
        (lambda: token_losses.reinforce(1e39), ValueError, r"beta must fit float32, got 1e\+39"),
    ],
)
def test_bad_parameters(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_check_token_loss() -> None:
    check_token_loss(token_losses.grpo(beta=0.1), *(jnp.ones((2, 6)) for _ in range(3)))
    check_token_loss(lambda log_prob: -log_prob)
    check_token_loss(lambda log_prob, entropy: -log_prob - entropy, with_entropy=True)
    check_token_loss(token_losses.weighted_nll(entropy_weight=-0.1), jnp.ones(12))
    with pytest.raises(ValueError, match="token_loss must be elementwise over tokens, got the operation reduce_sum"):
        check_token_loss(lambda log_prob, a: -(a - a.mean()) * log_prob, jnp.ones(12))
    shapes = "per_token[1] must have shape (3,) (per_token[0]'s shape), got (4,)"
    with pytest.raises(ValueError, match=re.escape(shapes)):
        check_token_loss(scaled, jnp.ones(3), jnp.ones(4))


@jax.jit
def with_an_array(log_prob: Array, advantage: Array) -> Array:
    return FACTORS["a"] * log_prob * advantage


FACTORS = {"a": cast([2.0], np.float32)}


@pytest.mark.parametrize("token_loss", [token_losses.weighted_nll(), with_an_array], ids=["named", "with_an_array"])
def test_calls_without_jit_compile_once(token_loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    for call in range(2):
        arrays = simple() | {"token_loss": token_loss}
        with jax.log_compiles():
            caplog.clear()
            gradients(loss_of, arrays, ARGUMENTS, eagerly)
        assert any("Compiling" in record.message for record in caplog.records) == (call == 0)


FACTOR: Any = 3.0


@pytest.mark.parametrize("kind", [float, jnp.float32])
def test_a_rule_that_changed_is_compiled_again(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = simple() | {"token_loss": lambda p, a: with_vjp(lambda d: FACTOR * d)(p)}
    found = []
    for factor in (3.0, 6.0):
        monkeypatch.setitem(globals(), "FACTOR", kind(factor))
        found.append(gradients(loss_of, arrays, ("input",), eagerly)[1]["input"])
    assert_close(found[1], 2 * found[0])


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: jax.checkpoint(jax.jit(function))], ids=["jit", "within"])
def test_an_array_of_a_jitted_function_that_changed_counts(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a trace does not have the values of these constants."""
    arrays, found = simple() | {"token_loss": lambda p, a: wrap(lambda p: p * FACTORS["a"])(p)}, []
    for factor in (1.0, 2.0):
        monkeypatch.setitem(FACTORS, "a", jnp.full(1, factor))
        found.append(gradients(loss_of, arrays, ("input",), eagerly)[1]["input"])
    assert_close(found[1], 2 * found[0])


class Policy:
    """An object whose method is a token loss."""

    factor = jnp.float32(2.0)

    def loss(self, log_prob: Array, a: Array) -> Array:
        return self.factor * log_prob * a


def test_no_cache_keeps_what_a_token_loss_holds() -> None:
    arrays, policies = simple(), [Policy()]
    kept = weakref.ref(policies[0])

    def value(x: Array) -> Array:
        return loss_of(arrays | {"input": x, "token_loss": policies[0].loss})

    jax.jit(jax.grad(value))(arrays["input"])
    value(arrays["input"])
    policies.clear()
    gc.collect()
    assert kept() is None


def test_nan_checks_find_nothing_in_excluded_rows() -> None:
    arrays = excluded_rows() | {"token_loss": lambda p, a: p * jnp.sqrt(a)}
    with jax.debug_nans(True):
        for reduction in ("mean", "none"):
            gradients(lambda a, r=reduction: loss_of(a, reduction=r).sum(), arrays, ("input", "linear_weight"))


# Statistics.


def stats_of(arrays: dict[str, Any], **options: Any) -> TokenStats:
    first = [arrays[name] for name in ("input", "linear_weight", "target", "token_loss")]
    return linear_token_loss_with_stats(*first, *arrays["per_token"], **options)[1]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", TOKEN_STATS)
def test_each_statistic_alone_is_as_among_all(name: str, reduction: Any) -> None:
    arrays = simple()
    alone, found = (stats_of(arrays, reduction=reduction, **one)._asdict() for one in ({"stats": [name]}, {}))
    np.testing.assert_allclose(alone.pop(name), found[name], rtol=1e-6)
    assert set(alone.values()) == {None}


def test_the_lowest_of_equal_logits_is_the_argmax() -> None:
    w = replaced(np.zeros((700, 2), np.float32), [3, 500, 699], 1.0)  # in several vocabulary chunks of a small budget
    arrays = jnp.ones((3, 2)), w, jnp.array([3, 500, 4]), jnp.negative
    for implementation, most in (("chunked", None), ("chunked", 30_000), ("pallas_triton", None)):
        options: dict[str, Any] = {"implementation": implementation, "memory_budget": most}
        stats = linear_token_loss_with_stats(*arrays, stats=("argmax", "is_top1"), **options)[1]
        assert stats.argmax is not None
        assert stats.is_top1 is not None
        assert stats.argmax.tolist() == [3, 3, 3]
        assert stats.is_top1.tolist() == [True, True, False]


def test_statistics_under_transformations() -> None:
    arrays = batched(simple())
    rows = [arrays[name] for name in ("input", "target", "per_token")]

    def one(rows: list[Any], w: Array) -> tuple[Array, TokenStats]:
        x, y, per_token = rows
        return linear_token_loss_with_stats(x, w, y, arrays["token_loss"], *per_token)

    def total(w: Array) -> tuple[Array, TokenStats]:
        losses, stats = jax.vmap(one, (0, None))(rows, w)
        return losses.sum(), stats

    (_, found), _ = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays["linear_weight"])
    for index in range(3):
        want = one(jax.tree.map(lambda array, index=index: array[index], rows), arrays["linear_weight"])[1]
        for a, b in zip(found, want, strict=True):
            assert a is not None
            assert b is not None
            np.testing.assert_allclose(a[index], b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"with_entropy": True}, {"with_entropy": True, "reduction": "none"}])
def test_statistics_have_no_gradient(options: dict[str, Any]) -> None:
    arrays = simple() | ({"token_loss": scaled_with_entropy} if options else {})

    def total(x: Array) -> Any:
        return sum(a.sum() for a in stats_of(arrays | {"input": x}, **options) if a is not None)

    assert not jax.grad(total)(arrays["input"]).any()
    if options:
        for one, other in zip(stats_of(arrays, **options), stats_of(simple()), strict=True):
            assert one is not None
            assert other is not None
            np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("splits_head", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_log_probs_are_those_of_linear_log_probs_bit_for_bit(splits_head: bool) -> None:
    """In Pallas' interpreter, in chunks, beside any rows, and with rows that are repaired. The loss and the gradients
    are those of materialized logits."""
    rng, n, v = np.random.default_rng(0), 256, 320
    x, far = rng.standard_normal((n, 32)), [7, 150]
    x[far] *= 40
    x, w = jnp.asarray(x, jnp.bfloat16), rng.standard_normal((v, 32)) / 4
    w = jnp.asarray(w, jnp.float32 if splits_head else jnp.bfloat16)
    y, a = jnp.asarray(rng.integers(0, v, n), jnp.int32), jnp.linspace(-1, 2, n)
    half = replaced(np.where(rng.uniform(size=n) < 0.5, y, -100), far, -100)  # no repair
    kernels: dict[str, Any] = {"implementation": "pallas_triton"}
    kernels |= {"head_precision": "float32"} if splits_head else {}
    want = jax.tree.map(np.asarray, linear_log_probs(x, w, y, **kernels))
    assert (want.log_prob[far] < -45).all()
    options: dict[str, Any] = kernels | {"memory_budget": 300_000 if splits_head else 2**17}
    plan = explain(x, w, **options).plan
    assert (plan.path, plan.chunks.rows, explain(x, w, **kernels).plan.chunks.rows) == ("scaled_exp", 128, n)

    def of_token_loss(x: Array, w: Array, a: Array, y: Array) -> tuple[Array, TokenStats]:
        return linear_token_loss_with_stats(x, w, y, scaled, a, stats=("log_prob", "lse"), **options)

    gradients_of = jax.value_and_grad(of_token_loss, (0, 1, 2), has_aux=True)
    for target in (y, half):
        (loss, found), grads = gradients_of(x, w, a, target)
        counts = np.asarray(target) >= 0
        assert np.array_equal(np.asarray(found.log_prob)[counts], want.log_prob[counts])
        assert np.array_equal(np.asarray(found.lse)[counts], want.lse[counts])
    exact: dict[str, Any] = {"input": x.astype(jnp.float32), "linear_weight": w.astype(jnp.float32), "per_token": (a,)}
    exact |= {"target": half, "token_loss": scaled}
    exact_loss, of_exact = gradients(unfused_loss, exact, ARGUMENTS)
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-6)  # of one half of the head it would be off by 1e-3
    for got, one in zip(grads, (of_exact["input"], of_exact["linear_weight"], *of_exact["per_token"]), strict=True):
        assert np.linalg.norm(np.asarray(got, np.float32) - one) <= 4e-3 * np.linalg.norm(one)


@pytest.mark.parametrize(
    ("stats", "error", "message"),
    [
        ("entropy", TypeError, "stats must be a tuple of names, got str"),
        (["entropy", "top1"], ValueError, "stats must be one of 'log_prob', .*, got 'top1'"),
    ],
)
def test_stats_that_do_not_exist(stats: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stats_of(simple(), stats=stats)


# Transformations.


def batched(arrays: dict[str, Any], size: int = 3) -> dict[str, Any]:
    """Returns the arrays with a batch axis, but for the head."""

    def split(array: Array) -> Array:
        return array.reshape(size, -1, *array.shape[1:])

    rows = {"input": split(arrays["input"]), "target": replaced(split(arrays["target"]), np.s_[1, 1:], -100)}
    return arrays | rows | {"per_token": tuple(map(split, arrays["per_token"]))}


def of_batch(loss: Callable[..., Array], arrays: dict[str, Any], factors: Array | None = None, **options: Any) -> Array:
    """Returns losses of batch elements by vmap, with a closure of its own for each if there are factors."""
    names = ("input", "target", "per_token")
    rows = [arrays[name] for name in names]

    def one(rows: list[Any], factor: Array) -> Array:
        given: dict[str, Any] = dict(zip(names, rows, strict=True))
        if factors is not None:
            given["token_loss"] = lambda *values: factor * arrays["token_loss"](*values)
        return loss(arrays | given, **options)

    return jax.vmap(one)(rows, jnp.ones(len(rows[0])) if factors is None else factors)


@pytest.mark.parametrize(("with_entropy", "closes"), [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap(reduction: Any, closes: bool, with_entropy: bool) -> None:
    arrays = batched(simple()) | ({"token_loss": scaled_with_entropy} if with_entropy else {})
    factors = jnp.array([1.0, -2.0, 0.5]) if closes else None

    def value(loss: Callable[..., Array], arrays: dict[str, Any]) -> Array:
        losses = of_batch(loss, arrays, factors, reduction=reduction, with_entropy=with_entropy)
        return (losses.T * jnp.arange(1.0, 4.0)).sum()  # another upstream gradient for each element

    got, want = (gradients(partial(value, loss), arrays, ARGUMENTS) for loss in (loss_of, unfused_loss))
    assert_close(got, want)


def test_vmap_over_the_head() -> None:
    arrays = simple()
    heads = jnp.stack([arrays["linear_weight"], -arrays["linear_weight"]])

    def value(loss: Callable[..., Array], w: Array) -> Array:
        return loss(arrays | {"linear_weight": w})

    got, want = (jax.jit(jax.vmap(jax.grad(partial(value, loss))))(heads) for loss in (loss_of, unfused_loss))
    assert_close(got, want)


@pytest.mark.parametrize(("reduction", "with_entropy"), [("mean", False), ("none", False), ("mean", True)])
def test_scan_and_checkpoint(reduction: Any, with_entropy: bool) -> None:
    arrays = batched(simple())

    def value(loss: Callable[..., Array], arrays: dict[str, Any], factor: Array) -> Array:
        @jax.checkpoint
        def one(arrays: dict[str, Any], factor: Array) -> Array:
            def token_loss(*values: Array) -> Array:
                return factor * (scaled_with_entropy if with_entropy else scaled)(*values)

            given = {**arrays, "token_loss": token_loss}
            return loss(given, reduction=reduction, with_entropy=with_entropy).mean()

        def body(total: Array, rows: dict[str, Any]) -> tuple[Array, None]:
            return total + one({"linear_weight": arrays["linear_weight"], **rows}, factor), None

        rows = {name: arrays[name] for name in ("input", "target", "per_token")}
        return jax.lax.scan(body, jnp.zeros(()), rows)[0]

    traced = {name: array for name, array in arrays.items() if name != "token_loss"}
    run = [jax.grad(partial(value, loss), argnums=(0, 1), allow_int=True) for loss in (loss_of, unfused_loss)]
    got, want = (jax.jit(function)(traced, jnp.float32(0.5)) for function in run)
    for name in ARGUMENTS:
        assert_close(got[0][name], want[0][name])
    assert_close(got[1], want[1])


@pytest.mark.parametrize("with_entropy", [False, True])
def test_symbolic_number_of_tokens(with_entropy: bool) -> None:
    arrays = simple()
    arrays["token_loss"] = scaled_with_entropy if with_entropy else scaled
    rows, head = jax.export.symbolic_shape("n")[0], arrays["linear_weight"]
    shapes = [jax.ShapeDtypeStruct((rows, 8), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)]

    def value(x: Array, y: Array, a: Array) -> Any:
        given = arrays | {"target": y, "per_token": (a,)}
        loss = partial(loss_of, with_entropy=with_entropy)
        return gradients(loss, given | {"input": x, "linear_weight": head}, ARGUMENTS)

    exported = jax.export.export(jax.jit(value))(*shapes, jax.ShapeDtypeStruct((rows,), jnp.float32))
    got = exported.call(arrays["input"], arrays["target"], *arrays["per_token"])
    assert_close(got, gradients(partial(unfused_loss, with_entropy=with_entropy), arrays, ARGUMENTS))


def test_second_derivatives_are_refused() -> None:
    arrays = simple()

    def slope(x: Array) -> Array:
        return jax.grad(lambda x: loss_of(arrays | {"input": x}))(x).sum()

    with pytest.raises(NotImplementedError, match="linear_log_probs and linear_token_loss have no second derivative"):
        jax.grad(slope)(arrays["input"])


# What is refused.

TWELVE = cast(range(12), np.float32)


def mixing(*names: str) -> str:
    return rf"token_loss must be elementwise over tokens, got the operation ({'|'.join(names)})\. token_loss is called"


MIXING: dict[str, tuple[Callable[..., Any], str]] = {
    "mean": (lambda p, a: (a - a.mean()) * p, mixing("reduce_sum")),
    "maximum": (lambda p, a: p - jax.lax.stop_gradient(p.max()), mixing("reduce_max")),
    "standard deviation": (lambda p, a: p * a.std(), mixing("reduce_sum")),
    "cumulative sum": (lambda p, a: jnp.cumsum(p), mixing("cumsum")),
    "sort": (lambda p, a: jnp.sort(p), mixing("sort")),
    "reversal": (lambda p, a: p[::-1] * a, mixing("rev")),
    "shift": (lambda p, a: p - jnp.roll(a, 1), mixing("slice")),
    "first": (lambda p, a: p - a[0], mixing("slice", "dynamic_slice", "squeeze")),
    "gather": (lambda p, a: p[jnp.argsort(a)], mixing("sort", "gather")),
    "concatenation": (lambda p, a: jnp.concatenate([p[:1], a[1:]]), mixing("slice")),
    "reshape": (lambda p, a: (p.reshape(-1, 1) * a.reshape(-1, 1)).reshape(-1), mixing("reshape", "broadcast_in_dim")),
    "matmul": (lambda p, a: p * (p @ a), mixing("dot_general")),
    "softmax in jit": (lambda p, a: jax.jit(jax.nn.softmax)(p), mixing("reduce_max")),
    "sum in checkpoint": (lambda p, a: jax.checkpoint(lambda a: a / a.sum())(a) * p, mixing("reduce_sum")),
    "loop": (lambda p, a: jax.lax.fori_loop(0, 3, lambda _, p: p * a, p), mixing("scan")),
    "branch": (lambda p, a: jax.lax.cond(TWELVE[0] > 0, jnp.cumsum, jnp.sin, p), mixing("cumsum")),
    "iota": (lambda p, a: p * jnp.arange(len(p)), "token_loss must not combine tokens with an array that iota makes"),
    "closure": (
        lambda p, a: p * TWELVE,
        r"token_loss must not combine tokens with an array of shape \(12,\) that it closes over.*per_token",
    ),
    "closure only": (lambda p, a: TWELVE, r"with an array of shape \(12,\) that it closes over"),
}


@pytest.mark.parametrize(
    ("name", "token_loss"),
    [
        ("stack|select_and_gather_add|concatenate", lambda p, a: jnp.select([p > a], [p], a)),
        ("stack|concatenate|broadcast_in_dim", lambda p, a: jnp.stack([p, a]).max(0)),
        ("scan|polynomial", lambda p, a: jnp.polyval(jnp.ones(3), p)),
    ],
)
def test_unrecognized_operations_are_named(name: str, token_loss: Callable[..., Array]) -> None:
    with pytest.raises(
        ValueError, match=rf"got the operation ({name})\. .*Only elementwise operations on \(n,\) arrays.*jnp.where"
    ):
        check_token_loss(token_loss, jnp.ones(12))


def with_jvp(rule: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns the identity with the derivative `rule`."""
    function = jax.custom_jvp(lambda z: z)
    function.defjvp(lambda primals, tangents: (primals[0], rule(tangents[0])))
    return function


def with_vjp(rule: Callable[[Array], Array]) -> Callable[[Array], Array]:
    function = jax.custom_vjp(lambda z: z)
    function.defvjp(lambda z: (z, None), lambda _, d: (rule(d),))
    return function


RULE = "token_loss has a custom_jvp or custom_vjp rule that is not elementwise: "

MIXING |= {
    "jvp": (lambda p, a: with_jvp(lambda t: t - t.mean())(p), RULE + mixing("reduce_sum")),
    "vjp": (lambda p, a: p * with_vjp(lambda t: t[::-1])(a), RULE + mixing("rev")),
    "vjp in checkpoint": (lambda p, a: jax.checkpoint(with_vjp(jnp.cumsum))(p) * a, RULE + mixing("cumsum")),
}

LENGTH: dict[str, Callable[..., Array]] = {
    "shape": lambda p, a: -p / p.shape[0],
    "len": lambda p, a: jax.jit(lambda p: p * len(p))(p),
    "power": lambda p, a: p**p.size,
    "branch": lambda p, a: p if len(p) > 1 else -p,
    "sum of ones": lambda p, a: p * jnp.ones_like(p).sum(),
    "array": lambda p, a: p * jnp.asarray(np.full(1, len(p), np.float32)),
    "branch of cond": lambda p, a: jax.lax.cond(TWELVE[0] > 0, lambda p: p / p.size, lambda p: p, p),
    "vjp": lambda p, a: with_vjp(lambda t: t / t.size)(p) * a,
}


@pytest.mark.parametrize("case", LENGTH)
def test_what_depends_on_the_number_of_tokens_is_refused(case: str) -> None:
    for n in (12, 2, 1):
        with pytest.raises(ValueError, match="token_loss must not depend on the number of tokens"):
            check_token_loss(LENGTH[case], jnp.ones(n))


def test_symbolic_number_of_tokens_is_not_used() -> None:
    rows: Any = jax.export.symbolic_shape("n")[0]
    for token_loss in ELEMENTWISE.values():
        elementwise.trace_token_loss(token_loss, rows, 1)
    with pytest.raises(ValueError, match="token_loss must not depend on the number of tokens"):
        elementwise.trace_token_loss(LENGTH["shape"], rows, 1)


@pytest.mark.parametrize("case", MIXING)
def test_what_mixes_tokens_is_refused(case: str) -> None:
    token_loss, message = MIXING[case]
    with pytest.raises(ValueError, match=message):
        loss_of(simple() | {"token_loss": token_loss})


@jax.custom_vjp
def doubled(a: Array) -> Array:
    """Returns 2 a, with a derivative of 3."""
    return 2 * a


doubled.defvjp(lambda a: (2 * a, None), lambda _, d: (3 * d,))


@jax.custom_vjp
def times(p: Array, factor: Array) -> Array:
    return p * factor


times.defvjp(lambda p, factor: (p * factor, (p, factor)), lambda saved, d: (d * saved[1], (d * saved[0]).sum()))

NLL = token_losses.weighted_nll()
ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "functions": lambda p, a: jnp.exp(p) * jnp.tanh(a) + jax.nn.softplus(p) + jax.nn.relu(a) + p**3 + jnp.abs(a) ** 0.5,
    "selection": lambda p, a: jnp.where(p > a, jnp.clip(p, -2.0, a), jnp.maximum(p, 0.5)) + jnp.sign(a),
    "casts": lambda p, a: jax.lax.stop_gradient(a).astype(jnp.bfloat16).astype(jnp.float32) * p + (a > 0),
    "calls": lambda p, a: jax.jit(jnp.sin)(p) + jax.checkpoint(jnp.cos)(a),
    "derivatives of its own": lambda p, a: doubled(p) * jax.nn.relu(a),
    "sum in a derivative of the closure": lambda p, a: times(p, TWELVE[3]) * a,
    "sum that is not used": lambda p, a: jax.grad(lambda p: (p**2 * a).sum())(p),
    "branch": lambda p, a: jax.lax.cond(TWELVE[1] > 0, lambda p: p * a, jnp.sin, p),
    "closure": lambda p, a: p * TWELVE.mean() + a * TWELVE[:1] + jnp.full_like(p, TWELVE[3]),
    "no tokens": lambda p, a: jnp.full_like(p, 2.0),
    # functools.wraps gives it the module of the named losses
    "wrapped": wraps(NLL)(lambda p, a: 2.0 * NLL(p, a)),  # pyright: ignore[reportArgumentType, reportCallIssue]
}


@pytest.mark.parametrize("case", ELEMENTWISE)
def test_what_is_elementwise_runs(case: str) -> None:
    arrays = simple() | {"token_loss": ELEMENTWISE[case]}
    got, want = (gradients(loss, arrays, ("input", "per_token")) for loss in (loss_of, unfused_loss))
    assert_close(got, want)


RETURNS = r"token_loss must return the loss of each token, \(n,\) float32 for any n, got "

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not callable": ({"token_loss": 3}, TypeError, "token_loss must be callable, got int"),
    "not called": (
        {"token_loss": token_losses.ppo_clip},
        TypeError,
        r"token_loss must be a loss, got token_losses.ppo_clip, which returns one: pass token_losses.ppo_clip\(\)$",
    ),
    "a number": ({"token_loss": lambda p, a: 1.0}, TypeError, f"{RETURNS}float for n = 12"),
    "a scalar": ({"token_loss": lambda p, a: jnp.float32(1)}, ValueError, rf"{RETURNS}shape \(\) for n = 12"),
    "another shape": ({"token_loss": lambda p, a: p[None]}, ValueError, rf"{RETURNS}shape \(1, 12\) for n = 12"),
    "all tokens": ({"token_loss": lambda p, a: jnp.zeros(12)}, ValueError, rf"{RETURNS}shape \(12,\) for n = 1"),
    "another dtype": ({"token_loss": lambda p, a: p.astype(jnp.float16)}, TypeError, f"{RETURNS}float16 for n = 12"),
    "other arguments": ({"token_loss": lambda p: p}, RuntimeError, "token_loss raised TypeError for arguments"),
    "per-token list": ({"per_token": ([0.0] * 12,)}, TypeError, r"per_token\[0\] must be an array, got list"),
    "per-token shape": (
        {"per_token": (TWELVE, TWELVE[:3])},
        ValueError,
        r"per_token\[1\] must have shape \(12,\) \(target's shape\), got \(3,\)",
    ),
    "per-token dtype": (
        {"per_token": (cast(range(12), np.int32),)},
        TypeError,
        r"per_token\[0\] must have a floating-point dtype, got int32",
    ),
    "without a reference": (
        {"token_loss": token_losses.reinforce(0.1)},
        ValueError,
        "per_token of token_losses.reinforce must be advantage, ref_log_prob, got 1 arrays",
    ),
    "mean entropy": (
        {"token_loss": lambda p, h, a: p - (h - h.mean()), "with_entropy": True},
        ValueError,
        mixing("reduce_sum"),
    ),
    "no entropy": ({"token_loss": lambda p, h, a: p - h}, RuntimeError, "token_loss raised TypeError for arguments"),
    "with_entropy": ({"with_entropy": 1}, TypeError, "with_entropy must be a bool, got int"),
    "with_entropy of a named loss": (
        {"token_loss": token_losses.weighted_nll(), "with_entropy": True},
        ValueError,
        "with_entropy must be False for token_losses.weighted_nll without entropy_weight, got True",
    ),
    "reduction": ({"reduction": "max"}, ValueError, "reduction must be one of"),
    "token weight": ({"token_weight": TWELVE[:3]}, ValueError, "token_weight must have shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named(case: str) -> None:
    changes, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        loss_of(simple() | changes)


def test_the_exception_of_a_token_loss_is_the_cause() -> None:
    def token_loss(log_prob: Array, a: Array) -> Array:
        raise KeyError("mine")

    with pytest.raises(RuntimeError, match=re.escape("token_loss raised KeyError")) as raised:
        loss_of(simple() | {"token_loss": token_loss})
    assert isinstance(raised.value.__cause__, KeyError)


def test_token_weights_are_not_differentiated() -> None:
    arrays = simple()
    with pytest.raises(ValueError, match="token_weight is not differentiated"):
        jax.grad(lambda t: loss_of(arrays | {"token_weight": t}))(jnp.ones(12))
