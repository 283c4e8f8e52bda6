"""Tests the Mosaic kernels of jax_pallas on an NVIDIA Hopper GPU: cases of the contract, accuracy compared with
float32, JAX's transformations, and training.

Run with `pytest -m gpu`. As a program, this file runs the checks that its arguments name. The tests run several such
programs in parallel. `python -m parity` runs every case of the contract. This file runs a part of them.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import batched
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, export
from markov_data import markov_tokens
from programs import Command, Printed, each, python, run_checks
from run_cases import assert_passed, commands

from jax_pallas import (
    launch,
    linear_log_probs,
    linear_token_loss,
    linear_token_loss_with_stats,
    token_losses,
)
from jax_pallas.hopper_gradients import add_d_weight
from jax_pallas.linear_ce import explain, linear_cross_entropy
from jax_pallas.ops import RESIDUAL
from jax_pallas.tile_config import padded
from linear_ce.reference import reference_log_probs
from linear_ce.spec import DEFAULT_MEMORY_BUDGET
from parity.cases import Case, cases
from parity.token_losses import FORMS

pytestmark = pytest.mark.gpu

IMPLEMENTATION = "mosaic"
KERNEL = "mosaic_gpu_v2"  # the name of a kernel in a lowered program
ROUNDING = 4e-3  # relative error of bfloat16 gradients


# Cases of the contract.

# The cases that run by default: without options, with all options, some others, and the edge cases. They use one
# dtype, except where both dtypes use the kernels of every matmul.
EVERY_DAY = ("16-n123", "strided-n123", "edge-hidden64")
SHARES = 12  # processes that share the cases


def limits(case: Case) -> str | None:
    return launch.limits(IMPLEMENTATION, case.dtype, case.hidden, case.vocab, case.vocab_axis)


def often(case: Case) -> bool:
    edge = case.name.startswith("edge-") and (case.dtype == "bfloat16" or case.saved_budget > 0)
    return case.dtype != "float32" and (edge or any(text in case.name for text in EVERY_DAY))


OFTEN = [case for case in cases() if often(case)]
BY_NAME = {case.name: case for case in OFTEN}


COMMANDS = commands(f"jax-{IMPLEMENTATION}", (OFTEN[i::SHARES] for i in range(SHARES)))


@pytest.mark.parametrize("name", each(COMMANDS, seconds=80))
def test_case(name: str, printed: Printed) -> None:
    refusal = limits(BY_NAME[name])
    if refusal is None:
        assert_passed(printed[name], (IMPLEMENTATION, "gpu"))
    else:
        assert refusal in printed[name]["failure"]


def test_default_cases_cover_the_contract() -> None:
    served = [case for case in OFTEN if limits(case) is None]
    assert {case.dtype for case in served} == {"bfloat16", "float16"}
    assert {case.vocab_axis for case in OFTEN} == {0, 1}
    assert {case.function for case in served} == {"loss", "log_probs", "token_loss"}
    assert {case.spec.reduction for case in served} == {"mean", "sum", "none"}


# Checks, which run in separate processes.

CHECKS: dict[str, Callable[[], None]] = {}


def checked(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@partial(jax.jit, static_argnums=(0, 1, 2, 3))  # compiles one program, not one per operation
def drawn(n: int, d: int, v: int, vocab_axis: int = 0) -> tuple[Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (n, d), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (v, d)) * d**-0.5).astype(jnp.bfloat16)
    return x, w if vocab_axis == 0 else w.T, jax.random.randint(keys[2], (n,), 0, v)


def loss(x: Array, w: Array, y: Array, implementation: str = IMPLEMENTATION, **options: Any) -> Array:
    return linear_cross_entropy(x, w, y, implementation=implementation, **options)


def loss_and_gradients(**options: Any) -> Any:
    return jax.jit(jax.value_and_grad(partial(loss, **options), argnums=(0, 1)))


def exact(x: Array, w: Array, y: Array, **options: Any) -> Any:
    """Returns the loss and gradients of "chunked" in float32."""
    arrays = x.astype(jnp.float32), w.astype(jnp.float32), y
    return loss_and_gradients(implementation="chunked", memory_budget=2**31, **options)(*arrays)


def assert_close(got: Any, want: Any, bound: float = ROUNDING) -> None:
    """Fails if the norm of a difference exceeds `bound` times the norm of `want`."""
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(array).astype(np.float64) for array in (mine, theirs))
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error <= bound, f"error {error:.3g} of {bound:.3g} in {a.shape}"


def assert_same(got: Any, want: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (np.asarray(mine) == np.asarray(theirs)).all(), f"differs in {mine.shape}"


def kernels_in(function: Any, *arrays: Any) -> int:
    return jax.jit(function).lower(*arrays).as_text().count(f"@{KERNEL}(")


# n, D, V, vocab_axis: a hidden size of one block of 64, sizes near multiples of 8, models, and 2**31 logits and more.
SHAPES = [
    *((n, 64, v, 0) for n in (999, 1000, 1001) for v in (320, 50257, 50264)),
    *((n, 64, 128, 1) for n in (999, 1000, 1001)),
    (4096, 512, 32000, 0),
    (4096, 512, 32000, 1),
    (2100, 896, 151936, 0),
    (20000, 64, 128256, 0),
]


def check_shape(n: int, d: int, v: int, vocab_axis: int) -> None:
    arrays, options = drawn(n, d, v, vocab_axis), {"vocab_axis": vocab_axis}
    want = exact(*arrays, **options)
    for budget in (None, 2**26) if d * v > 2**23 else (None,):
        value, gradients = loss_and_gradients(memory_budget=budget, **options)(*arrays)
        assert_close(value, want[0], 1e-4)
        assert_close(gradients, want[1])
        last, expected = ([np.asarray(gradient)[-8:] for gradient in found] for found in (gradients, want[1]))
        assert_close(last, expected, 2 * ROUNDING)


CHECKS |= {" ".join(map(str, shape)): partial(check_shape, *shape) for shape in SHAPES}


def check_d_weight(rows: int, vocab_axis: int, in_l2: float) -> None:
    keys, vocab = jax.random.split(jax.random.key(rows), 3), 1008
    e = jnp.pad(jax.random.uniform(keys[0], (rows, vocab), jnp.bfloat16), ((0, 0), (0, padded(vocab) - vocab)))
    x, old = (jax.random.normal(key, (n, 192), jnp.bfloat16) for key, n in zip(keys[1:], (rows, vocab), strict=True))
    sums = np.asarray(e[:, :vocab], np.float64).T @ np.asarray(x, np.float64)

    def head(array: Array) -> Array:
        return array if vocab_axis == 0 else array.T

    def added(array: Array, **options: Any) -> Array:
        shared = {"vocab": vocab, "classes": vocab, "vocab_axis": vocab_axis, "in_l2": in_l2}
        return head(add_d_weight(e, x, 0, **shared, old=head(array), **options))

    assert_close(added(old), sums + np.asarray(old, np.float64))
    started = added(old, starts=True)
    assert_same(added(jnp.full_like(old, jnp.nan), starts=True), started)
    assert_close(added(started, starts=False), 2 * sums)


CHECKS |= {
    f"d_weight {rows} {axis} {in_l2}": partial(check_d_weight, rows, axis, in_l2)
    for rows, axis, in_l2 in ((304, 0, 0.5), (304, 1, 0.5), (704, 0, 1), (1104, 1, 0))
}


@checked
def repeats_bit_for_bit_within_its_budget() -> None:
    arrays = drawn(3000, 320, 32000)
    call = loss_and_gradients().lower(*arrays).compile()
    assert call.memory_analysis().temp_size_in_bytes <= DEFAULT_MEMORY_BUDGET
    assert_same(call(*arrays), call(*arrays))


@checked
def reference_exponents_that_are_too_low_are_repaired() -> None:
    x, w, y = drawn(500, 128, 3000)
    x = x * 200  # targets are far below the largest logits
    assert_close(loss_and_gradients()(x, w, y), exact(x, w, y))


def scaled(x: Array, w: Array, y: Array, **options: Any) -> Array:
    """Returns a multiple of the loss, as in training with float16: float16 rounds d_input of a mean of 2,000 tokens by
    6e-4."""
    return 1024 * loss(x, w, y, **options)


@checked
def label_smoothing_of_float16() -> None:
    """One chunk, and several. With a factor rows are shifted, or computed again."""
    for vocab_axis, factor in ((0, 1), (1, 1), (0, 8), (0, 40)):
        x, w, y = drawn(2000, 256, 5056, vocab_axis)
        x, w, y = x.astype(jnp.float16) * factor, w.astype(jnp.float16), jnp.where(jnp.arange(2000) % 7 == 3, -100, y)
        shared: dict[str, Any] = {"label_smoothing": 0.2, "vocab_axis": vocab_axis}
        float32 = partial(scaled, **shared, implementation="chunked", memory_budget=2**31)
        want = jax.jit(jax.value_and_grad(float32, (0, 1)))(x.astype(jnp.float32), w.astype(jnp.float32), y)
        for budget in (None, 2**24):
            options = {**shared, "memory_budget": budget}
            assert "path: scaled_exp" in str(explain(x, w, implementation=IMPLEMENTATION, **options))
            function = jax.jit(jax.value_and_grad(partial(scaled, **options), (0, 1)))
            value, gradients = function(x, w, y)
            assert_close(value, want[0], 1e-5)
            assert_close(gradients, want[1], 6e-4)
            assert_same(function(x, w, y), (value, gradients))


@checked
def a_first_chunk_in_the_memory_of_d_weight() -> None:
    """All rows, and most of them and another chunk. With a factor they are repaired."""
    for n, d, mebibytes, factor in ((700, 768, 16, 1), (1000, 1024, 24, 1), (700, 768, 16, 200)):
        x, w, y = drawn(n, d, 50264)
        x, y = x * factor, jnp.where(jnp.arange(n) % 7 == 3, -100, y)
        options: dict[str, Any] = {"memory_budget": mebibytes * 2**20}
        assert "in the memory of d_weight" in str(explain(x, w, implementation=IMPLEMENTATION, **options))
        call = loss_and_gradients(**options).lower(x, w, y).compile()
        assert call.memory_analysis().temp_size_in_bytes <= options["memory_budget"]
        found = call(x, w, y)
        assert_close(found, exact(x, w, y))
        assert_same(call(x, w, y), found)


@checked
def a_first_chunk_of_float16_in_the_memory_of_d_weight() -> None:
    """All rows, and most of them and other chunks. With a factor rows are shifted, or computed again."""
    for n, d, mebibytes, factor in ((700, 768, 20, 1), (1000, 768, 24, 1), (1000, 768, 24, 8), (700, 768, 20, 40)):
        x, w, y = drawn(n, d, 50264)
        x, w, y = x.astype(jnp.float16) * factor, w.astype(jnp.float16), jnp.where(jnp.arange(n) % 7 == 3, -100, y)
        options: dict[str, Any] = {"memory_budget": mebibytes * 2**20}
        assert "in the memory of d_weight" in str(explain(x, w, implementation=IMPLEMENTATION, **options))
        float32 = partial(scaled, implementation="chunked", memory_budget=2**31)
        want = jax.jit(jax.value_and_grad(float32, (0, 1)))(x.astype(jnp.float32), w.astype(jnp.float32), y)
        call: Any = jax.jit(jax.value_and_grad(partial(scaled, **options), (0, 1))).lower(x, w, y).compile()
        assert call.memory_analysis().temp_size_in_bytes <= options["memory_budget"]
        value, gradients = call(x, w, y)
        assert_close(value, want[0], 1e-5)
        assert_close(gradients, want[1], 6e-4)
        assert_same(call(x, w, y), (value, gradients))


@checked
def a_first_chunk_in_the_memory_of_a_float32_d_weight() -> None:
    """All rows, and most of them and another chunk. With a factor they are repaired."""
    for n, d, mebibytes, factor in ((1400, 768, 32, 1), (1400, 512, 24, 1), (1400, 768, 32, 200)):
        x, w, y = drawn(n, d, 50264)
        x, w, y = x * factor, w.astype(jnp.float32) * (1 + 2.0**-10), jnp.where(jnp.arange(n) % 7 == 3, -100, y)
        options: dict[str, Any] = {"memory_budget": mebibytes * 2**20, "head_precision": "float32"}
        assert "in the memory of d_weight" in str(explain(x, w, implementation=IMPLEMENTATION, **options))
        call = loss_and_gradients(**options).lower(x, w, y).compile()
        assert call.memory_analysis().temp_size_in_bytes <= options["memory_budget"]
        want, (value, gradients) = exact(x, w, y), call(x, w, y)
        assert_close(value, want[0], 1e-5)
        assert_close(gradients, want[1])
        assert gradients[1].dtype == jnp.float32
        assert_same(call(x, w, y), (value, gradients))


@checked
def a_split_head_is_near_a_float32_head() -> None:
    for vocab_axis, v, factor in ((0, 5008, 1), (1, 5056, 1), (0, 5008, 100)):  # the last is repaired
        x, w, y = drawn(3000, 1024, v, vocab_axis)
        x, w = x * factor, w.astype(jnp.float32) * (1 + 2.0**-10)  # more bits than bfloat16 has
        want = exact(x, w, y, vocab_axis=vocab_axis)
        for budget in (None, 2**25):  # 2**25 holds several vocabulary chunks
            options = {"head_precision": "float32", "vocab_axis": vocab_axis, "memory_budget": budget}
            assert "path: scaled_exp" in str(explain(x, w, implementation=IMPLEMENTATION, **options))
            value, gradients = loss_and_gradients(**options)(x, w, y)
            assert_close(value, want[0], 1e-5)  # 1e-3 with a head rounded to bfloat16
            assert_close(gradients, want[1])
            assert gradients[1].dtype == jnp.float32
            assert_same(loss_and_gradients(**options)(x, w, y), (value, gradients))


@checked
def statistics_of_a_split_head_are_those_of_a_float32_head() -> None:
    """The kernel joins numbers over the threads and warps that have the classes of a row."""
    names = "log_prob", "lse", "entropy", "mean_logit", "sum_squared_probs", "argmax"

    def call(x: Array, w: Array, y: Array, *arrays: Array, **options: Any) -> Any:
        bias, advantage = arrays
        options |= {"linear_bias": bias, "stats": names}
        return linear_token_loss_with_stats(x, w, y, token_losses.reinforce(), advantage, **options)

    for vocab_axis, v, softcap in ((0, 5008, None), (1, 5056, 5.0)):
        x, w, y = drawn(1400, 256, v, vocab_axis)
        w = w.astype(jnp.float32) * (1 + 2.0**-10)
        arrays = y, *(jax.random.normal(jax.random.key(seed), (size,)) for seed, size in ((1, v), (2, 1400)))

        def stats_of(x: Array, options: Any, w: Array = w, arrays: Any = arrays) -> Any:
            function = partial(call, **options)
            return jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(x, w, *arrays)

        shared: dict[str, Any] = {"vocab_axis": vocab_axis, "softcap": softcap}
        split = {**shared, "implementation": IMPLEMENTATION, "head_precision": "float32"}
        (value, found), gradients = stats_of(x, split)
        (exact_value, want), exact_gradients = stats_of(x.astype(jnp.float32), {**shared, "implementation": "chunked"})
        assert_close(value, exact_value, 1e-4)
        for name in names[:-1]:
            assert_close(getattr(found, name), getattr(want, name), 1e-4)
        assert (found.argmax == want.argmax).mean() > 0.999  # but for logits that are closer than float32 rounds
        assert_close(gradients, exact_gradients)
        assert_same(stats_of(x, split), ((value, found), gradients))


def check_float16(implementation: str, deviation: float, vocab_axis: int, budget: int) -> None:
    """Over chunks and class blocks. With a larger deviation of the logits rows are shifted, or computed again."""
    x, w, y = drawn(2000, 256, 5056, vocab_axis)
    x, w = (x * deviation).astype(jnp.float16), w.astype(jnp.float16)
    plan = explain(x, w, implementation=implementation, vocab_axis=vocab_axis, memory_budget=budget).plan
    assert plan.fits_float16
    assert plan.matmuls == ("logits", "d_input", "d_weight")

    def scaled(x: Array, w: Array, name: str, memory_budget: int) -> Array:
        return 1024 * loss(x, w, y, name, vocab_axis=vocab_axis, memory_budget=memory_budget)

    function = jax.jit(jax.value_and_grad(scaled, (0, 1)), static_argnums=(2, 3))
    value, gradients = function(x, w, implementation, budget)
    want = function(x.astype(jnp.float32), w.astype(jnp.float32), "chunked", 2**31)
    assert_close(value, want[0], 1e-5)
    assert_close(gradients, want[1], 6e-4)
    assert_same(function(x, w, implementation, budget), (value, gradients))
    memory = function.lower(x, w, implementation, budget).compile().memory_analysis()
    assert memory is not None
    if implementation == "mosaic":  # XLA's matmuls split the rows of so small a d_weight: docs/options.md
        assert memory.temp_size_in_bytes <= budget


CHECKS |= {
    f"float16 {' '.join(map(str, options))}": partial(check_float16, *options)
    for name, deviation in itertools.product(launch.NAMES, (1.0, 8.0, 40.0))
    for options in ((name, deviation, 0, 2**25), (name, deviation, 1, 2**25), (name, deviation, 0, 2**29))
}


def check_saved_float16(implementation: str, deviation: float, vocab_axis: int) -> None:
    """Over chunks, under upstream gradients from 1e-6 to 1e3: the gradient of each row, and of the head."""
    (x, w, y), d = drawn(2000, 256, 5056, vocab_axis), 256
    x, w, y = (x * deviation).astype(jnp.float16), w.astype(jnp.float16), y.at[::7].set(-100)
    upstream = 10.0 ** np.random.default_rng(0).permutation(np.linspace(-6.0, 3.0, 2000)) * (
        1 - 2 * (np.arange(2000) % 2)
    )

    def pull_back(x: Array, w: Array, upstream: Array, **options: Any) -> tuple[Array, Array]:
        return jax.vjp(lambda x, w: linear_log_probs(x, w, y, vocab_axis=vocab_axis, **options).log_prob, x, w)[1](
            upstream
        )

    call = jax.jit(partial(pull_back, implementation=implementation, saved_budget=2**34, memory_budget=2**25))
    exact = jax.jit(partial(pull_back, implementation="chunked", memory_budget=2**31))
    found, want = call(x, w, upstream), exact(x.astype(jnp.float32), w.astype(jnp.float32), upstream)
    got, wanted = (np.asarray(one[0]).astype(np.float64) for one in (found, want))
    assert (np.linalg.norm(got - wanted, axis=1) <= 1e-3 * np.linalg.norm(wanted, axis=1) + 2.0**-25 * d**0.5).all()
    assert_close(found, want, 1e-3)
    assert_same(call(x, w, upstream), found)


CHECKS |= {
    f"saved float16 {' '.join(map(str, options))}": partial(check_saved_float16, *options)
    for options in itertools.product(launch.NAMES, (1.0, 4.0), (0, 1))
}


@checked
def float16_token_loss_by_pallas_triton_in_three_chunks() -> None:
    x, w, y = drawn(900, 128, 1024)
    x, w, y = x.astype(jnp.float16), w.astype(jnp.float16), y.at[::7].set(-100)
    factor = jnp.linspace(-1.0, 1.0, 900)
    shared: dict[str, Any] = {"memory_budget": 2**20, "implementation": "pallas_triton"}
    plan = explain(x, w, **shared).plan
    assert plan.fits_float16
    assert -(-900 // plan.chunks.rows) >= 3

    def mean(x: Array, w: Array, **options: Any) -> Array:
        return 1024 * linear_token_loss(x, w, y, token_losses.weighted_nll(), factor, **options)

    value, found = jax.jit(jax.value_and_grad(partial(mean, **shared), (0, 1)))(x, w)
    exact = jax.jit(jax.value_and_grad(partial(mean, implementation="chunked"), (0, 1)))
    wanted, want = exact(x.astype(jnp.float32), w.astype(jnp.float32))
    assert_close(value, wanted, 1e-4)
    assert_close(found, want, 6e-4)


@checked
def exported_and_read_back() -> None:
    arrays = drawn(300, 128, 1000)
    trusted = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]  # as jax.export's documentation says
    exported = export.export(loss_and_gradients(), platforms=("cuda",), disabled_checks=trusted)(*arrays)
    data = exported.serialize()
    assert_same(export.deserialize(data).call(*arrays), loss_and_gradients()(*arrays))


@checked
def donated_input() -> None:
    x, w, y = drawn(1000, 128, 5000)
    want = loss_and_gradients()(x, w, y)
    donating = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), donate_argnums=0)
    given = x + 0
    assert_same(donating(given, w, y), want)
    assert given.is_deleted()


@checked
def batched_by_vmap() -> None:
    x, w, y = drawn(600, 128, 1000)

    def batched(x: Array, w: Array) -> Array:
        return jax.vmap(lambda x, y: loss(x, w, y))(x.reshape(2, -1, x.shape[1]), y.reshape(2, -1)).mean()

    assert_close(jax.jit(jax.value_and_grad(batched, argnums=(0, 1)))(x, w), exact(x, w, y), 2 * ROUNDING)


@checked
def checkpointed() -> None:
    x, w, y = drawn(300, 128, 1000)
    saving = jax.checkpoint_policies.save_only_these_names(RESIDUAL)
    body = jax.value_and_grad(jax.checkpoint(loss, policy=saving), argnums=(0, 1))
    assert_close(jax.jit(body)(x, w, y), exact(x, w, y))
    plain = kernels_in(loss_and_gradients(), x, w, y)
    assert 0 < kernels_in(body, x, w, y) <= plain, "saved values are computed again"


@checked  # plans C and B
def gradients_of_rows_and_losses_alone() -> None:
    x, w, y = drawn(1001, 192, 5003)
    scale = jnp.linspace(-1.0, 1.0, len(x))

    def total(x: Array, w: Array, **options: Any) -> Array:
        return (loss(x, w, y, reduction="none", **options) * scale).sum()

    want = jax.jit(jax.grad(partial(total, implementation="chunked"), argnums=(0, 1)))(
        x.astype(jnp.float32), w.astype(jnp.float32)
    )
    assert_close(jax.jit(jax.grad(total, argnums=(0, 1)))(x, w), want)
    assert_close(jax.jit(loss)(x, w, y), exact(x, w, y)[0], 1e-4)


@checked
def the_backward_pass_adds_to_a_donated_array() -> None:
    """By a kernel, and where V is no multiple of 8 by XLA."""
    for v, dtype in ((5000, jnp.bfloat16), (5000, jnp.float16), (5003, jnp.bfloat16)):
        x, w, y = drawn(1001, 192, v)
        x, w = x.astype(dtype), w.astype(dtype)
        scale = jnp.linspace(-1.0, 1.0, len(x))
        into = jax.random.normal(jax.random.key(1), w.shape)

        def value(x: Array, w: Array, into: Array | None, y: Array = y, scale: Array = scale, **options: Any) -> Array:
            return (loss(x, w, y, reduction="none", grad_into=into, **options) * scale).sum()

        exact_arrays = x.astype(jnp.float32), w.astype(jnp.float32)
        want = jax.jit(jax.grad(partial(value, implementation="chunked"), argnums=(0, 1)))(*exact_arrays, None)
        adding = jax.jit(jax.grad(value, argnums=(0, 2)), donate_argnums=2)
        memory = adding.lower(x, w, into).compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == into.nbytes
        d_x, added = adding(x, w, into + 0.0)
        assert_close((d_x, added - into), want)


@checked
def token_loss_in_three_chunks() -> None:
    check_token_loss("ppo_clip", "scaled_exp", 2**20)


@checked
def token_loss_of_the_entropy_in_three_chunks() -> None:
    check_token_loss("grpo-k2-entropy", "recompute", 2**19)


def check_token_loss(name: str, path: str, budget: int) -> None:
    x, w, y = drawn(900, 128, 1000)
    y = y.at[::7].set(-100)
    counted = np.asarray(y != -100)
    exact_x, exact_w = (np.asarray(array.astype(jnp.float32)) for array in (x, w))
    of_rows, form = reference_log_probs(exact_x, exact_w, np.asarray(y)), FORMS[name]
    log_prob, random = of_rows.log_prob, np.random.default_rng(0)
    drawn_values = random.choice([-1.0, 0.5], 900), *(log_prob + random.normal(0, 0.3, (2, 900)))
    values = drawn_values[: len(form.per_token)]
    losses, slopes = form(log_prob, *[of_rows.entropy] * form.with_entropy, *values)
    d_log_prob, *d_per_token = (np.where(counted, slope, 0) / counted.sum() for slope in slopes)
    d_entropy = d_per_token.pop(0) if form.with_entropy else None
    want = reference_log_probs(exact_x, exact_w, np.asarray(y), d_log_prob=d_log_prob, d_entropy=d_entropy)

    def mean(x: Array, w: Array, *per_token: Array) -> Array:
        return linear_token_loss(x, w, y, token_loss, *per_token, **options)

    token_loss = form.named(token_losses)
    options: dict[str, Any] = {"implementation": IMPLEMENTATION, "memory_budget": budget}
    plan = explain(x, w, with_entropy=form.with_entropy, **options).plan
    assert plan.path == path
    assert -(-900 // plan.chunks.rows) >= 3
    per_token = [jnp.asarray(np.where(counted, one, np.nan), jnp.float32) for one in values]
    arguments = tuple(range(2 + len(per_token)))
    value, found = jax.jit(jax.value_and_grad(mean, argnums=arguments))(x, w, *per_token)
    assert_close(value, losses[counted].mean(), 1e-4)
    assert_close(found[:2], (want.d_input, want.d_weight))
    assert_close(found[2:], d_per_token, 1e-4)
    assert_close(jax.jit(mean)(x, w, *per_token), losses[counted].mean(), 1e-4)


# Training.


def curve(loss: Callable[..., Array], steps: int = 300) -> tuple[np.ndarray, str]:
    """Trains a bfloat16 model with a loss. Returns the mean losses of every 50 steps, and the compiled step."""
    from flax import nnx

    from flax_models.data.batches import Batch
    from flax_models.model.decoder import Decoder, ModelConfig
    from flax_models.train import step
    from flax_models.train.config import TrainConfig

    shape: dict[str, Any] = {"vocab_size": 503, "hidden_size": 128, "num_layers": 1, "max_seq_len": 32}
    config = ModelConfig(**shape, dtype="bfloat16", param_dtype="bfloat16")
    settings = TrainConfig(steps=steps, batch_size=32, learning_rate=2e-3, warmup_steps=20)
    trainer = step.Trainer(Decoder(config, rngs=nnx.Rngs(0)), settings)
    batches = [Batch(tokens[:, :-1], tokens[:, 1:]) for tokens in markov_tokens(steps, 32, 32, 503)]
    with pytest.MonkeyPatch.context() as patch:  # the step is traced here, once
        patch.setattr(trainer, "_linear_cross_entropy", loss)
        program = trainer.compile(32, 32).as_text() or ""
    state, losses = trainer.initial, []
    for batch in batches:
        state, metrics = trainer.step(state, batch)
        losses.append(metrics.loss)
    return np.asarray(jax.device_get(losses), np.float64).reshape(-1, 50).mean(1), program


def fused(hidden: Array, head: Array, target: Array, **options: Any) -> Array:
    assert explain(hidden, head, implementation=IMPLEMENTATION).name == IMPLEMENTATION
    return linear_cross_entropy(hidden, head, target, implementation=IMPLEMENTATION, **options)


def unfused(hidden: Array, head: Array, target: Array, *, reduction: str, **_: Any) -> Array:
    assert reduction == "mean"
    log_probs = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32))
    return -jnp.take_along_axis(log_probs, target[..., None], -1).mean()


@checked
def a_model_trains_as_with_the_unfused_loss() -> None:
    (ours, program), (theirs, other) = (curve(loss) for loss in (fused, unfused))
    assert KERNEL in program
    assert KERNEL not in other
    assert theirs[-1] < 0.5 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=0.01)


BY_ITSELF = [" ".join(map(str, shape)) for shape in SHAPES if shape[1] > 64 or shape[0] > 2**14]
TOGETHER = [name for name in CHECKS if name not in BY_ITSELF]  # each takes less than a minute, most of it to start


def programs_of(shares: Iterable[Sequence[str]]) -> dict[str, Command]:
    return {name: python(Path(__file__).name, *share) for share in shares for name in share}


LARGE = each(programs_of([name] for name in BY_ITSELF), seconds=100)


@pytest.mark.parametrize("name", [*LARGE, *each(programs_of(batched(TOGETHER, 3)), seconds=70)])
def test_check(name: str, printed: Printed) -> None:
    if name == exported_and_read_back.__name__:
        pytest.importorskip("flatbuffers", reason="jax.export serializes by it")
    assert not printed[name]["failure"], printed[name]["failure"]


if __name__ == "__main__":
    run_checks(CHECKS, sys.argv[1:])
