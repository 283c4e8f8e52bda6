"""Runs plans A and B with scaled exponentials, and plans A and C with d_logits, with the Hopper kernels in Mosaic's
interpreter on the CPU.

The interpreter's calls have side effects, which JAX loops and the loss's operators do not allow. The tests therefore
run the plans directly, with Python loops over the chunks of rows and the vocabulary chunks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_problem import planned
from reductions import additions_in_l2  # noqa: F401

from jax_pallas import (
    chunked,
    float16,
    head_rows,
    hopper_common,
    hopper_gradients,
    hopper_logits,
    hopper_split_logits,
    recompute,
    scaled_exp,
)
from jax_pallas.elementwise import trace_token_loss
from jax_pallas.plan import Stage
from jax_pallas.problem import NO_GRADIENTS, Gradients, NeedsGrad, Problem, plan_of
from jax_pallas.row_math import Coefficients
from jax_pallas.slicing import Slice
from jax_pallas.tile_config import ScaledExpConfig, choose_tile
from jax_pallas.token_hook import TokenHook, TokenNeedsGrad
from linear_ce.chunking import ChunkConfig
from linear_ce.spec import LossSpec
from linear_ce.statistics import BY_ROW, LSE, MAX, OF_LOGITS

EVERYTHING = NeedsGrad(d_input=True, d_weight=True, d_bias=True)
OPTIONS = {"softcap": 3.0, "z_loss_weight": 0.1, "logit_scale": 0.7}
SMOOTHED = {"label_smoothing": 0.3, "z_loss_weight": 0.1, "logit_scale": 0.7}

# N, D, V, classes, vocab_axis, rows of a chunk, options. The cases include a number of tokens that is not a multiple of
# 8, a hidden size of one column of tiles, a single row, and a vocabulary that is not a multiple of a TMA tile.
CASES = [
    pytest.param(*case, id=str(case[:6]))
    for case in (
        (21, 64, 128, 120, 0, 16, {}),
        (40, 64, 320, 320, 0, 16, {}),
        (141, 64, 320, 310, 0, 64, {}),
        (141, 192, 330, 330, 0, 128, OPTIONS),
        (131, 128, 640, 600, 1, 64, {}),
        (5, 64, 50, 50, 0, 5, OPTIONS),
        (1, 64, 128, 128, 1, 1, {}),
        (77, 64, 50, 50, 0, 32, {}),
        (254, 64, 128, 120, 0, 128, OPTIONS),  # the last chunk uses the kernels of a whole one
    )
]


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the Hopper kernels in Pallas' interpreter, and waits for each kernel to end. Otherwise there is a deadlock:
    the caller's operation waits for the kernel, and the interpreter's operations wait for the caller's."""
    for module in (hopper_common, hopper_gradients):
        monkeypatch.setattr(module, "programs", lambda: 2)
    launchers = {
        hopper_logits: ("exponentials", "exponentials_of_part", "statistics", "d_logits"),
        hopper_split_logits: ("split_exponentials",),
        hopper_gradients: ("add_d_weight", "write_d_weight", "store_d_input"),
    }
    for module, names in launchers.items():
        for name in names:
            monkeypatch.setattr(module, name, waiting(partial(getattr(module, name), interpret=True)))


def waiting(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel whose caller continues only when the kernel is done."""
    return lambda *arrays, **options: jax.block_until_ready(kernel(*arrays, **options))


def over_chunks(body: Any, carry: Any, length: int, size: int, *, full: int, **_: bool) -> Any:
    carry, last = body(carry, Slice(full, length - full, None), first=True)
    found = []
    for start in range(0, full, size):
        carry, one = body(carry, Slice(jnp.int32(start), size, None), first=False)
        found.append(one)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found, last)


def problem(n: int, d: int, v: int, classes: int, vocab_axis: int, options: dict[str, Any]) -> Problem:
    random = np.random.default_rng(0)
    w = random.standard_normal((v, d)) * 0.3
    target = random.integers(0, classes, n)
    return Problem(
        input=jnp.asarray(random.standard_normal((n, d)), jnp.bfloat16),
        linear_weight=jnp.asarray(w if vocab_axis == 0 else w.T, jnp.bfloat16),
        target=jnp.asarray(target, jnp.int32),
        row_weight=jnp.where(jnp.arange(n) % 5 == 2, 0.0, 1 / n),
        linear_bias=jnp.asarray(random.standard_normal(v) * 0.1, jnp.bfloat16),
        class_weight=None,
        spec=LossSpec("sum", vocab_size=classes, **options),
        classes=classes,
        vocab_axis=vocab_axis,
    )


def in_float32(ours: Problem) -> Problem:
    floats = {name: getattr(ours, name).astype(jnp.float32) for name in ("input", "linear_weight", "linear_bias")}
    return Problem(**{**vars(ours), **floats})


def by_xla(
    exact: Problem, stage: Stage, needs_grad: NeedsGrad = NO_GRADIENTS
) -> tuple[chunked.Tiles, Problem, ChunkConfig]:
    """Returns the first arguments of a plan in `chunked`."""
    problem = planned(exact, stage, "chunked", needs_grad)
    return chunked.XLA_TILES, problem, plan_of(problem).chunk_config


def assert_close(found: Gradients, expected: Gradients, tolerance: float = 3e-3) -> None:
    for got, value in zip(found, expected, strict=True):
        assert got is not None
        assert value is not None
        assert jnp.linalg.norm(got.astype(jnp.float32) - value) <= tolerance * jnp.linalg.norm(value)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "v", "classes", "vocab_axis", "rows", "options"), CASES)
def test_scaled_exp(
    n: int,
    d: int,
    v: int,
    classes: int,
    vocab_axis: int,
    rows: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(scaled_exp, "over_chunks", over_chunks)
    ours = problem(n, d, v, classes, vocab_axis, options)
    planned_ours = planned(ours, "loss_and_gradients", "mosaic", EVERYTHING, statistics=MAX)
    last = (n - 1) % rows + 1
    last = rows if (rows - last) * 50 <= n else last  # like `choose_scaled_exp`
    plan = replace(plan_of(planned_ours), chunks=ScaledExpConfig(rows, last, v, 2**20, 0))
    assert plan.path == "scaled_exp"
    ours = replace(ours, plan=plan)
    loss, statistics, gradients = scaled_exp.scaled_exp(ours, EVERYTHING, statistics=MAX)
    evaluated, _, _ = scaled_exp.scaled_exp(ours, NO_GRADIENTS, statistics=0)

    exact = in_float32(ours)
    want, found, exact_gradients = chunked.loss_and_gradients(
        *by_xla(exact, "loss_and_gradients", EVERYTHING), EVERYTHING, None, MAX
    )
    pairs = ((loss, want), (evaluated, want), (statistics.lse, found.lse), (statistics.max, found.max))
    for got, value in pairs:
        np.testing.assert_allclose(got, value, rtol=2e-6, atol=1e-7)
    assert_close(gradients, exact_gradients)


# N, V, classes, vocab_axis, whether d_weight is added to, and whether the head is split in registers, or in copies of
# vocabulary chunks, of which two overlap if there are three.
SPLIT_HEADS = [
    (*case, in_place)
    for case in ((141, 640, 520, 0, False), (70, 576, 500, 1, True), (21, 200, 200, 0, True))
    for in_place in (True, False)
]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "v", "classes", "vocab_axis", "adds", "in_place"), SPLIT_HEADS)
def test_split_head(
    n: int, v: int, classes: int, vocab_axis: int, adds: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the same float32 head, which rounded to bfloat16 would be off by 2e-3."""
    interpret(monkeypatch)
    monkeypatch.setattr(scaled_exp, "over_chunks", over_chunks)
    monkeypatch.setattr(scaled_exp, "over_slices", over_slices)
    monkeypatch.setattr(head_rows, "over_slices", over_slices)
    statistics, rows = LSE | OF_LOGITS, 64
    options = {**OPTIONS, "head_precision": "float32"}
    ours = problem(n, 64, v, classes, vocab_axis, options)
    w = np.random.default_rng(1).standard_normal(ours.linear_weight.shape) * 0.3
    into = jnp.asarray(np.random.default_rng(2).standard_normal(w.shape), jnp.float32) if adds else None
    ours = replace(ours, linear_weight=jnp.asarray(w, jnp.float32), grad_into=into)
    plan = plan_of(planned(ours, "loss_and_gradients", "mosaic", EVERYTHING, statistics=statistics))
    assert plan.path == "scaled_exp"
    assert plan.splits_in_place
    if not in_place:
        plan = replace(plan, splits_in_place=False, tile=choose_tile(hopper=True), casts_head=True)
    config = ScaledExpConfig(rows, (n - 1) % rows + 1, min(384, classes), 2**20, 0)
    ours = replace(ours, plan=replace(plan, chunks=config))
    loss, found, gradients = scaled_exp.scaled_exp(ours, EVERYTHING, statistics=statistics)
    evaluated, _, _ = scaled_exp.scaled_exp(ours, NO_GRADIENTS, statistics=0)

    exact = replace(in_float32(ours), spec=replace(ours.spec, head_precision=None), grad_into=None)
    want, exact_found, exact_gradients = chunked.loss_and_gradients(
        *by_xla(exact, "loss_and_gradients", EVERYTHING), EVERYTHING, None, statistics
    )
    np.testing.assert_allclose((loss, evaluated), (want, want), rtol=2e-5, atol=1e-7)
    leaves = (jax.tree.leaves(stats._replace(nll=None)) for stats in (found, exact_found))
    for got, value in zip(*leaves, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=2e-5)
    assert gradients.d_weight is not None
    assert gradients.d_weight.dtype == jnp.float32
    if into is not None:
        gradients = gradients._replace(d_weight=gradients.d_weight - into)
    assert_close(gradients, exact_gradients)
    assert not jnp.any(jnp.moveaxis(jnp.asarray(gradients.d_weight), vocab_axis, 0)[classes:])  # padding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab_axis", "deviation", "options"),
    [(0, 0.3, OPTIONS), (1, 2.0, {}), (0, 8.0, {}), (0, 60.0, {}), (1, 0.3, SMOOTHED), (0, 8.0, SMOOTHED)],
)
def test_float16(vocab_axis: int, deviation: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks, whose gradients carry powers of two. With a large deviation rows are shifted or computed again."""
    n, rows = 60, 32
    interpret(monkeypatch)
    monkeypatch.setattr(scaled_exp, "over_chunks", over_chunks)
    ours = problem(n, 64, 640, 600, vocab_axis, options)
    names = ("input", "linear_weight", "linear_bias")
    ours = replace(ours, **{name: getattr(ours, name).astype(jnp.float16) for name in names})
    ours = replace(ours, linear_weight=ours.linear_weight * jnp.float16(deviation / 0.3 / 8))
    plan = plan_of(planned(ours, "loss_and_gradients", "mosaic", EVERYTHING))
    assert plan.path == "scaled_exp"
    assert plan.fits_float16
    ours = replace(ours, plan=replace(plan, chunks=ScaledExpConfig(rows, n - rows, 640, 2**20, 0)))
    fitted: list[float16.Fitted] = []
    fit = float16.fit
    monkeypatch.setattr(float16, "fit", lambda *a, **k: fitted.append(fit(*a, **k)) or fitted[-1])
    scales = jnp.float32(64.0), jnp.float32(8.0)
    loss, _, (d_input, *of_head) = scaled_exp.scaled_exp(ours, EVERYTHING, statistics=0, scales=scales)
    want, _, exact = chunked.loss_and_gradients(
        *by_xla(in_float32(ours), "loss_and_gradients", EVERYTHING), EVERYTHING, None, 0
    )
    np.testing.assert_allclose(loss, want, rtol=2e-6, atol=1e-7)
    assert d_input is not None
    found = [d_input.astype(jnp.float32) / 64, *(one.astype(jnp.float32) / 8 for one in of_head if one is not None)]
    assert_close(Gradients(*found), exact, 6e-4)
    assert len(fitted) == 2
    for one in fitted:
        assert jnp.isfinite(one.e.astype(jnp.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_axis", "dtype"), [(0, "bfloat16"), (1, "bfloat16"), (0, "float16")])
def test_grad_into(vocab_axis: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, the first of which adds too. The row weights are upstream gradients, so nothing else is scaled."""
    n, rows = 141, 64
    interpret(monkeypatch)
    monkeypatch.setattr(scaled_exp, "over_chunks", over_chunks)
    ours = problem(n, 64, 320, 310, vocab_axis, {"logit_scale": 0.7})
    names = ("input", "linear_weight", "linear_bias")
    ours = replace(ours, **{name: getattr(ours, name).astype(dtype) for name in names})
    into = jnp.asarray(np.random.default_rng(1).standard_normal(ours.linear_weight.shape), jnp.float32)
    plan = plan_of(planned(replace(ours, grad_into=into), "loss_and_gradients", "mosaic", EVERYTHING))
    assert plan.path == "scaled_exp"
    ours = replace(ours, plan=replace(plan, chunks=ScaledExpConfig(rows, (n - 1) % rows + 1, 320, 2**20, 0)))
    *_, found = scaled_exp.scaled_exp(replace(ours, grad_into=into), EVERYTHING, statistics=0)
    *_, exact = chunked.loss_and_gradients(
        *by_xla(in_float32(ours), "loss_and_gradients", EVERYTHING), EVERYTHING, None, 0
    )
    assert found.d_weight is not None
    assert found.d_weight.dtype == jnp.float32
    assert_close(found._replace(d_weight=found.d_weight - into), exact, 2e-3)
    assert not jnp.any(jnp.moveaxis(found.d_weight - into, vocab_axis, 0)[310:])  # padding


def clipped(log_prob: jax.Array, advantage: jax.Array) -> jax.Array:
    """Some tokens have no gradient. The function closes over FACTOR."""
    return jnp.maximum(-advantage * log_prob, -1.0) + jnp.where(advantage < 0, 0.0, FACTOR * jnp.square(log_prob))


FACTOR = jnp.float32(0.25)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_token_loss(vocab_axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, rows = 141, 64
    interpret(monkeypatch)
    monkeypatch.setattr(scaled_exp, "over_chunks", over_chunks)
    ours = problem(n, 64, 320, 310, vocab_axis, {"softcap": 3.0, "logit_scale": 0.7})
    plan = plan_of(planned(ours, "loss_and_gradients", "mosaic", EVERYTHING))
    ours = replace(ours, plan=replace(plan, chunks=ScaledExpConfig(rows, (n - 1) % rows + 1, 320, 2**20, 0)))
    function, values_of_closure = trace_token_loss(clipped, n, 1)
    random = np.random.default_rng(1)
    advantage = jnp.where(ours.row_weight == 0, jnp.nan, jnp.asarray(random.standard_normal(n), jnp.float32))
    needs_grad = TokenNeedsGrad(per_token=(True,), closure=(True,))
    token_loss = TokenHook(function, needs_grad, (advantage,), tuple(values_of_closure()))
    statistics = LSE | OF_LOGITS | BY_ROW
    found, log_prob, stats, gradients = scaled_exp.token_loss_and_gradients(ours, EVERYTHING, token_loss, statistics)
    assert log_prob is not None
    assert stats is not None

    exact = in_float32(ours)
    arguments = *by_xla(exact, "loss_and_gradients", EVERYTHING), EVERYTHING, None, token_loss, statistics
    want, want_stats, exact_gradients = chunked.token_loss_and_gradients(*arguments)
    pairs = zip(jax.tree.leaves((found, stats)), jax.tree.leaves((want, want_stats)), strict=True)
    for got, value in pairs:
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)
    assert (want.gradient_weight[ours.row_weight != 0] == 0).any()
    assert_close(gradients, exact_gradients)


def over_slices(body: Any, carry: Any, length: int, size: int) -> Any:
    """Like `slicing.over_slices`, but with a Python loop, for per-row results in order."""
    found = []
    for first in range(0, length, size):
        start, size = min(first, length - size), min(size, length)
        carry, one = body(carry, Slice(jnp.int32(start), size, start + jnp.arange(size) >= first))
        found.append(jax.tree.map(lambda array, new=first - start: array[new:], one))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


# The same fields, and the classes of a vocabulary chunk. The cases include rows that are not a multiple of 8, and
# overlapping chunks of rows and of the vocabulary.
RECOMPUTED = [
    pytest.param(*case, id=str(case[:7]))
    for case in (
        (141, 64, 330, 310, 0, 64, 192, OPTIONS),
        (77, 192, 520, 520, 0, 77, 256, {}),
        (50, 64, 640, 640, 1, 50, 256, {"label_smoothing": 0.1}),
        (50, 64, 640, 610, 1, 50, 256, {}),  # vocabulary chunks do not start at multiples of 64
        (21, 128, 200, 200, 0, 13, 200, {}),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "v", "classes", "vocab_axis", "rows", "vocab_chunk", "options"), RECOMPUTED)
def test_recomputed(
    n: int,
    d: int,
    v: int,
    classes: int,
    vocab_axis: int,
    rows: int,
    vocab_chunk: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = problem(n, d, v, classes, vocab_axis, options)
    exact = in_float32(ours)
    lse = chunked.row_statistics(*by_xla(exact, "statistics"), 0).lse
    random = np.random.default_rng(1)
    coefficients = Coefficients(*(jnp.asarray(random.standard_normal(n), jnp.float32) for _ in range(3)))
    want = chunked.loss_and_gradients(*by_xla(exact, "loss_and_gradients", EVERYTHING), EVERYTHING, None, 0)
    want_c = chunked.gradients(*by_xla(exact, "gradients", EVERYTHING), lse, coefficients, EVERYTHING)

    interpret(monkeypatch)
    monkeypatch.setattr(chunked, "over_slices", over_slices)
    ours = planned(ours, "gradients", "mosaic", EVERYTHING)
    config = ChunkConfig(rows, vocab_chunk, float32_sum=False)
    loss, _, gradients = chunked.loss_and_gradients(recompute.KERNEL_TILES, ours, config, EVERYTHING, None, 0)
    np.testing.assert_allclose(loss, want[0], rtol=2e-6, atol=1e-7)
    assert_close(gradients, want[2], 5e-3)  # d_bias sums rounded d_logits
    assert_close(chunked.gradients(recompute.KERNEL_TILES, ours, config, lse, coefficients, EVERYTHING), want_c, 5e-3)
