"""Tests batch_invariant of jax_pallas without a GPU: a row has the same bits among any rows, and what decides them does
not depend on the number of rows.

test_core_triton_batch_invariant.py tests the same of core_triton, and test_jax_pallas_gpu_batch_invariant.py on a GPU.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax_problem import planned
from test_jax_pallas_scaled_exp import interpret, over_chunks

import jax_pallas
from jax_pallas import head_rows, plan, scaled_exp, tile_config, token_losses
from jax_pallas.linear_ce import (
    explain,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    linear_log_probs,
    linear_token_loss,
    linear_token_loss_with_stats,
)
from jax_pallas.problem import NeedsGrad, Problem, float32_matmul
from linear_ce.spec import LossSpec
from linear_ce.statistics import BY_ROW

GPUS = ("h100", "h200")
TOKENS = (1, 2, 15, 16, 17, 127, 128, 129, 1000, 4999, 8192, 100_003)
BUDGETS = (2**26, 2**29, 2**33)
SLOW = pytest.mark.slow


def shapes(n: int, d: int, v: int, dtype: Any = jnp.bfloat16, head: Any = jnp.bfloat16) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((n, d), dtype), jax.ShapeDtypeStruct((v, d), head)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"gradients": False}], ids=["sum", "none", "forward"])
def test_the_order_of_sums_depends_on_neither_the_rows_nor_the_budget(gpu: str, options: dict[str, Any]) -> None:
    for d, v in ((64, 1001), (896, 151_936)):
        budgets = (*BUDGETS, 40 * 10**6 if d == 896 else 400_000)  # chunks of few rows
        found = set()
        for n, budget in ((n, budget) for n in TOKENS for budget in budgets if budget > 500 * n):
            made = explain(*shapes(n, d, v), batch_invariant=True, memory_budget=budget, device=gpu, **options).plan
            sizes = made.chunks.rows, d, v, None, 132
            schedule = tile_config.choose_schedule(*sizes, batch_invariant=True)
            found.add((made.path, made.hopper, made.tile, made.d_input_kernel, schedule.tile_rows))
            assert schedule.partial_tiles == 0
        assert found == {("scaled_exp", True, tile_config.choose_tile(hopper=True), True, 128)}


def test_a_program_for_a_gpu_splits_no_sum_of_d_input() -> None:
    def loss(x: Array, w: Array, target: Array) -> Array:
        return linear_cross_entropy(x, w, target, reduction="sum", batch_invariant=True)

    device = AbstractDevice("NVIDIA H100 80GB HBM3", 1, "gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        arrays = *shapes(300, 896, 8192), jax.ShapeDtypeStruct((300,), jnp.int32)
        text = jax.jit(jax.grad(loss)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "d_input" in text
    assert "d_input_sum" not in text


N, D, V = 40, 16, 320
FAR = [5, 38]
FEW_ROWS = 28_000  # bytes, which hold fewer rows


def drawn() -> tuple[Array, Array, Array, Array]:
    """Returns input, head, target and upstream gradients. The logits of the rows `FAR` are so far above their target's
    that they are repaired."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((N, D)), rng.standard_normal((V, D))
    x[FAR] *= 40
    target, upstream = rng.integers(0, V, N), rng.standard_normal(N)
    return (
        jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(target, jnp.int32),
        jnp.asarray(upstream, jnp.float32),
    )  # fmt: skip


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel of this machine computes d_input, so here each row is multiplied by itself."""

    def row_by_row(e: Array, w: Array, contract: tuple[int, int]) -> Array:
        return lax.map(lambda row: float32_matmul(row[None], w, contract)[0], e)

    monkeypatch.setattr(plan, "why_variant", lambda *_: None)
    monkeypatch.setattr(head_rows, "float32_matmul", row_by_row)
    yield
    plan.make_plan.cache_clear()  # of calls that were not checked


def results(function: str, rows: Sequence[int], budget: int | None = None, kept: Any = None) -> tuple[np.ndarray, ...]:
    """Returns log-probabilities, lse and d_input of these rows."""
    x, w, target, upstream = (array if i == 1 else array[np.asarray(rows)] for i, array in enumerate(drawn()))
    target = target if kept is None else jnp.where(kept[np.asarray(rows)], target, -100)
    options: dict[str, Any] = {"memory_budget": budget, "implementation": "pallas_triton", "batch_invariant": True}

    def call(x: Array, w: Array) -> Any:
        if function == "token_loss":
            loss, stats = linear_token_loss_with_stats(
                x,
                w,
                target,
                token_losses.weighted_nll(),
                upstream,
                stats=("log_prob", "lse"),
                reduction="sum",
                **options,
            )
            return loss, (stats.log_prob, stats.lse)
        if function == "log_probs":
            found = linear_log_probs(x, w, target, softcap=200.0, **options)
            return (found.log_prob * upstream).sum(), (found.log_prob, found.lse)
        losses, of_call = linear_cross_entropy_with_stats(x, w, target, reduction="none", **options)
        return (losses * upstream).sum(), (losses, of_call.lse)

    (_, of_rows), d_input = jax.value_and_grad(call, has_aux=True)(x, w)
    return *(np.asarray(one) for one in of_rows), np.asarray(d_input)


@SLOW  # test_jax_pallas_shard_rows.py tests a token loss of two devices in the quick suite
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("function", "budget"),
    [
        ("token_loss", FEW_ROWS),  # one program
        *((name, None) for name in ("token_loss", "log_probs", "none")),
    ],
)
def test_a_row_has_the_same_bits_among_any_rows(function: str, budget: int | None) -> None:
    everything, half = [*range(N)], jnp.asarray(np.random.default_rng(1).random(N) < 0.5)
    budgeted = {"memory_budget": FEW_ROWS, "implementation": "pallas_triton", "batch_invariant": True}
    assert explain(*drawn()[:2], **budgeted).plan.chunks.rows < N
    want = results(function, everything, budget)
    for name, rows, options in (
        # As many rows as before, which need no other programs. Those of chunks have fewer rows.
        (
            "a repaired row and some others, in another order",
            [38, *range(37, 5, -1), *range(5), 0, 1],
            {"budget": budget},
        ),
        ("in other chunks, half of them ignored", everything, {"budget": FEW_ROWS, "kept": half}),
    ):
        counted = np.asarray(half)[rows] if "kept" in options else np.ones(len(rows), bool)
        for i, (found, expected) in enumerate(zip(results(function, rows, **options), want, strict=True)):
            assert np.array_equal(found[counted], expected[rows][counted]), f"{name}: {i}"


@SLOW
def test_the_hopper_kernels_give_a_row_the_same_bits_among_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(scaled_exp, "over_chunks", over_chunks)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((150, 64)) * 0.3, rng.standard_normal((400, 64))
    x[[5, 140]] *= 60
    target, needs_grad = rng.integers(0, 400, 150), NeedsGrad(True, True, False)

    def outputs(rows: list[int]) -> list[np.ndarray]:
        ours = Problem(
            input=jnp.asarray(x[rows], jnp.bfloat16),
            linear_weight=jnp.asarray(w, jnp.bfloat16),
            target=jnp.asarray(target[rows], jnp.int32),
            row_weight=jnp.ones(len(rows)),
            linear_bias=None,
            class_weight=None,
            spec=LossSpec("sum"),
            classes=400,
            vocab_axis=0,
        )
        ours = planned(ours, "loss_and_gradients", "mosaic", needs_grad, batch_invariant=True)
        loss, found, gradients = scaled_exp.scaled_exp(ours, needs_grad, statistics=BY_ROW)
        assert gradients.d_input is not None
        return [np.asarray(one) for one in (loss, found.lse, gradients.d_input)]

    want = outputs([*range(150)])
    for rows in ([140], [*range(30, 20, -1)]):
        for found, expected in zip(outputs(rows), want, strict=True):
            assert np.array_equal(found, expected[rows])


def test_explain_says_what_it_costs() -> None:
    text = str(explain(*shapes(300, 896, 151_936), batch_invariant=True, device="h100"))
    assert "batch-invariant: a token's results do not depend on the other tokens" in text
    assert "d_input has whole tiles of 128 rows" in text
    assert "batch-invariant" not in str(explain(*shapes(300, 896, 151_936), device="h100"))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_invariant": 1}, TypeError, r"batch_invariant must be a bool, got int"),
    ({"implementation": "chunked"}, ValueError, r"needs the kernels, got implementation 'chunked'"),
    ({"label_smoothing": 0.1}, ValueError, r"needs label_smoothing 0, got 0\.1"),
    ({"saved_budget": 2**20, "reduction": "none"}, ValueError, r"needs saved_budget 0, got 1048576"),
    ({"dtypes": (jnp.float16, jnp.float16)}, ValueError, r"needs a bfloat16 input, got float16"),
    ({"dtypes": (jnp.bfloat16, jnp.float32)}, ValueError, r"needs a bfloat16 linear_weight, got float32"),
    (
        {"dtypes": (jnp.bfloat16, jnp.float32), "head_precision": "float32"},
        ValueError,
        r"^batch_invariant=True needs a bfloat16 linear_weight, got float32$",
    ),
    ({"device": "a100"}, ValueError, r"needs implementation 'mosaic' for the gradient of input, got 'pallas_triton'"),
    ({"d": 72}, ValueError, r"cannot run here, because the Hopper kernels of gradients need a hidden size .* got 72"),
    (
        {"device": "a100", "gradients": False},
        ValueError,
        r"needs 'pallas_triton' classes in multiples of 64, got 100 in 100 rows",
    ),
    ({"with_entropy": True}, ValueError, r"has no gradient of the entropy \(with_entropy, or an entropy_weight\): its"),
    (
        {"with_entropy": True, "reduction": "none"},
        ValueError,
        r"has no gradient of the entropy \(with_entropy",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_cannot_hold_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"batch_invariant": True, "device": "h100", **options}
    d, dtypes = options.pop("d", 64), options.pop("dtypes", (jnp.bfloat16, jnp.bfloat16))
    with pytest.raises(error, match=message):
        explain(*shapes(6, d, 100, *dtypes), **options)


def test_a_call_without_kernels_is_refused() -> None:
    x, w, y = jnp.zeros((6, 16), jnp.bfloat16), jnp.zeros((100, 16), jnp.bfloat16), jnp.arange(6)
    options: dict[str, Any] = {"batch_invariant": True}
    message = r"batch_invariant=True needs the kernels, got implementation 'chunked' \(no kernel for cpu devices\)"
    for call in (
        lambda: linear_cross_entropy(x, w, y, **options),
        lambda: jax.grad(lambda x: linear_cross_entropy(x, w, y, **options))(x),
        lambda: jax.jit(partial(linear_cross_entropy, **options))(x, w, y),
        lambda: linear_cross_entropy_with_stats(x, w, y, **options),
        lambda: linear_log_probs(x, w, y, **options),
        lambda: linear_token_loss(x, w, y, lambda log_prob: -log_prob, **options),
        lambda: jax_pallas.linear_token_loss_with_stats(x, w, y, lambda log_prob: -log_prob, **options),
        lambda: explain(x, w, **options),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=message.replace("no kernel for cpu devices", "asked for by name")):
        linear_cross_entropy(x, w, y, implementation="chunked", **options)


def test_a_gradient_of_the_entropy_is_refused() -> None:
    x, w, y = jnp.zeros((6, 16), jnp.bfloat16), jnp.zeros((128, 16), jnp.bfloat16), jnp.arange(6)

    def entropy(w: Array) -> Array:
        return linear_log_probs(x, w, y, implementation="pallas_triton", batch_invariant=True).entropy.sum()

    with pytest.raises(ValueError, match="no gradients of entropy and lse"):
        jax.eval_shape(jax.grad(entropy), w)  # tracing refuses

    def with_entropy(w: Array, reduction: Any) -> Array:
        options: dict[str, Any] = {"implementation": "pallas_triton", "batch_invariant": True, "reduction": reduction}
        return linear_token_loss(x, w, y, token_losses.reinforce(entropy_weight=0.1), jnp.ones(6), **options).sum()

    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match="has no gradient of the entropy"):
            jax.eval_shape(jax.grad(partial(with_entropy, reduction=reduction)), w)
