"""Tests `head_precision` of jax_pallas: errors against a true float32 head, plans, and JAX's transforms. The cases of
parity compare values with the float64 reference."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import FUNCTIONS, gradients, planned, problem, replaced, total, zeros

import jax_pallas
from jax_pallas import head_rows, hopper_gradients, kernels, scaled_exp
from jax_pallas.launch import DeviceInfo
from jax_pallas.plan import ExecutionPlan, MatrixLayout, PlanKey, make_plan
from jax_pallas.problem import NeedsGrad, Problem, halves, plan_of, rounded
from jax_pallas.slicing import Slice
from jax_pallas.tile_config import CAST_BYTES
from linear_ce.spec import DEFAULT_MEMORY_BUDGET, LossSpec

Arrays = dict[str, Any]


def float32_head(n: int = 12, d: int = 8, v: int = 50, vocab_axis: int = 0) -> Arrays:
    arrays = problem(n, d, v, bias=False, vocab_axis=vocab_axis)
    return arrays | {"input": arrays["input"].astype(jnp.bfloat16)}


def split_in_kernel(w: Array) -> Array:
    return jnp.concatenate(kernels.halves_of(w))


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("jit", [False, True])
def test_the_halves_have_sixteen_bits_of_a_weight(axis: int | None, jit: bool) -> None:
    """Compiled too: XLA removes conversions to bfloat16 and back, with which the second half would be 0. Without an
    axis the function is that of the kernels."""
    w = np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32) * 2.0 ** np.arange(-20, 20, dtype="f")
    w[0] = 1 + np.arange(1, 81, 2) * 2.0**-8  # half way between two numbers of bfloat16

    split = split_in_kernel if axis is None else partial(halves, dtype=jnp.bfloat16, axis=axis)
    assert ("bitcast" if axis is None else "reduce_precision") in str(jax.make_jaxpr(split)(w))
    both = (jax.jit(split) if jit else split)(jnp.asarray(w))
    high, low = np.split(np.asarray(both.astype(jnp.float32), np.float64), 2, axis or 0)
    assert np.array_equal(high, np.asarray(jnp.asarray(w, jnp.bfloat16).astype(jnp.float32), np.float64))
    assert np.all(abs(high + low - w) <= 2.0**-17 * abs(w))


@pytest.mark.parametrize("one", [kernels.rounded_in_kernel, partial(rounded, dtype=jnp.bfloat16)])
def test_numbers_that_are_not_finite_are_rounded_to_themselves(one: Any) -> None:
    """Of NaN, that of NVIDIA GPUs and of NumPy, and one whose first 16 bits are those of infinity."""
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000], np.uint32)
    w = bits.view(np.float32)
    assert np.array_equal(np.asarray(one(jnp.asarray(w)), np.float32), w, equal_nan=True)
    high, low = (np.asarray(half, np.float32) for half in kernels.halves_of(jnp.asarray(w)))
    assert np.all(np.isnan(high + low)[:4])


def test_errors_against_a_true_float32_head() -> None:
    """The figures of docs/options.md."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((512, 1024)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((4096, 1024)) * 2.0 / 32.0, jnp.float32)  # logits of a standard deviation of 2
    target = rng.integers(0, 4096, 512)
    logits = np.asarray(x.astype(jnp.float32), np.float64) @ np.asarray(w, np.float64).T
    probs = np.exp(logits - logits.max(1, keepdims=True))
    d_logits = probs / probs.sum(1, keepdims=True) - np.eye(4096)[target]
    exact = logits[np.arange(512), target], d_logits @ np.asarray(w, np.float64)

    def errors(precision: Any) -> list[float]:
        def loss(x: Array, w: Array) -> Any:  # XLA would compute halves of a constant
            options: Arrays = {"reduction": "sum", "head_precision": precision}
            return jax_pallas.linear_cross_entropy_with_stats(x, w, jnp.asarray(target), **options)

        (_, stats), d_input = jax.jit(jax.value_and_grad(loss, has_aux=True))(x, w)
        found = (np.asarray(a).astype(np.float64) for a in (stats.target_logit, d_input))
        return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, exact, strict=True)]

    assert errors("input") == pytest.approx([1.7e-3, 2.4e-3], rel=0.1)
    assert errors("float32") == pytest.approx([2.4e-6, 1.7e-3], rel=0.1)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_input_is_the_default(function: str) -> None:
    arrays, names = float32_head(), ("input", "linear_weight")
    plain, same, split = (gradients(function, arrays, names, head_precision=p) for p in (None, "input", "float32"))
    assert all(jnp.array_equal(plain[name], same[name]) for name in names)
    assert not jnp.array_equal(plain["linear_weight"], split["linear_weight"])
    assert split["linear_weight"].dtype == jnp.float32


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_transforms(vocab_axis: int) -> None:
    arrays = float32_head(vocab_axis=vocab_axis)
    options: Arrays = {"vocab_axis": vocab_axis, "head_precision": "float32"}

    def loss(x: Array, w: Array) -> Array:
        return total("mean", arrays | {"input": x, "linear_weight": w}, **options)

    given = arrays["input"], arrays["linear_weight"]
    want = jax.value_and_grad(loss, (0, 1))(*given)
    for transformed in (jax.jit(loss), jax.checkpoint(loss)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-2, atol=1e-4),
            jax.value_and_grad(transformed, (0, 1))(*given),
            want,
        )
    found = jax.vmap(loss, (0, None))(jnp.stack([given[0]] * 2), given[1])
    np.testing.assert_allclose(found, want[0], rtol=1e-5)


def test_explain_names_the_matmuls() -> None:
    x, w = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((128256, 4096), jnp.float32)
    arrays: Any = x, w
    explained = str(jax_pallas.explain(*arrays, head_precision="float32", implementation="chunked"))
    again = "logits high again, logits low again, "
    assert f"matmuls: logits high, logits low, {again}d_input high, d_input low, d_weight by XLA" in explained
    explained = str(jax_pallas.explain(*arrays, head_precision="float32", device="h200"))
    assert "path: scaled_exp: the gradients are matmuls of stored exponentials" in explained
    assert "matmuls: logits high, logits low, d_input high, d_input low, d_weight by our kernels" in explained
    assert "chunks: 1 of 8192 rows, whose exponentials are in the memory of d_weight until" in explained
    explained = str(jax_pallas.explain(*arrays, head_precision="float32", device="a100"))
    assert "path: scaled_exp" in explained
    of_entropy = jax_pallas.explain(*arrays, head_precision="float32", device="h200", with_entropy=True).plan.matmuls
    of_losses = "logits high of the losses", "logits low of the losses"
    assert of_entropy == (*of_losses, "logits high", "logits low", "d_input high", "d_input low", "d_weight")
    # TMA adds to float32 rows in tiles of 8.
    arrays = x, jax.ShapeDtypeStruct((128257, 4096), jnp.float32)
    assert "path: recompute" in str(jax_pallas.explain(*arrays, head_precision="float32", device="h200"))


def plan(n: int, d: int, v: int, implementation: str, budget: int, shards: int = 0) -> ExecutionPlan:
    key = {"stage": "loss_and_gradients", "vocab_axis": 0, "classes": v, "label_smoothing": 0.0, "statistics": 0}
    flags = dict.fromkeys(("softcap", "entropy", "d_bias"), False) | dict.fromkeys(("d_input", "d_weight"), True)
    layouts = {"input": MatrixLayout((n, d), 2, "bfloat16"), "linear_weight": MatrixLayout((v, d), 4, "float32")}
    device = DeviceInfo("cuda", 90, 132, "h200") if implementation == "mosaic" else DeviceInfo("cuda", 80, 108, "a100")
    options: Arrays = {**key, **flags, **layouts, "memory_budget": budget, "implementation": implementation}
    return make_plan(PlanKey(**options, device=device, splits_head=True, shards=shards))


@pytest.mark.parametrize(("implementation", "shards"), [("mosaic", 0), ("mosaic", 2), ("pallas_triton", 0)])
def test_vocabulary_chunks_are_whole_tiles_and_fit_any_budget(implementation: str, shards: int) -> None:
    """So the sums over class blocks, and with them the log-probabilities, have the same bits for any budget. The Hopper
    kernel copies no vocabulary chunk, unless the head is a shard."""
    with pytest.raises(ValueError, match="memory_budget must be at least") as refused:
        plan(8192, 4096, 128256, implementation, 2**20, shards)
    least = int(re.findall(r"least (\d+) bytes", str(refused.value))[0])
    in_place = implementation == "mosaic" and not shards
    for budget in (least, 2**26, 2**28, DEFAULT_MEMORY_BUDGET, 2**32):
        found = plan(8192, 4096, 128256, implementation, budget, shards)
        assert found.path == "scaled_exp"
        assert found.tile is not None
        assert found.splits_in_place == in_place
        assert ("weight: read where it is" in str(found)) == in_place
        config = found.scaled_exp_config
        assert config.bytes <= budget
        if in_place:
            assert config.head_rows == 128256
            continue
        assert config.head_rows % found.tile.block_v == 0
        assert 2 * 2 * 4096 * config.head_rows <= max(CAST_BYTES, 2 * 2 * 4096 * found.tile.block_v)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        plan(8192, 4096, 128256, implementation, least - 1, shards)


def test_which_float32_heads_are_split_in_place() -> None:
    """TMA copies a float32 head in tiles of 8 rows and 32 columns."""

    def explained(*head: int, vocab_axis: int = 0, **options: Any) -> ExecutionPlan:
        arrays: Any = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16), jax.ShapeDtypeStruct(head, jnp.float32)
        return jax_pallas.explain(*arrays, device="h200", vocab_axis=vocab_axis, **options).plan

    split: Arrays = {"head_precision": "float32"}
    assert explained(1000, 128, **split).splits_in_place
    assert explained(1000, 128, **split).class_block == 64
    assert explained(128, 1024, vocab_axis=1, **split).splits_in_place
    assert not explained(1000, 128).splits_in_place
    losses = explained(1001, 128, **split, gradients=False)
    assert losses.path == "scaled_exp"
    assert losses.casts_head
    assert not losses.splits_in_place


def test_kernels_store_the_exponentials_of_a_split_head() -> None:
    """Three chunks of rows."""
    arrays, names = float32_head(150, 32, 320), ("input", "linear_weight")
    options: Arrays = {"head_precision": "float32", "memory_budget": 100_000}
    explained = str(jax_pallas.explain(*(arrays[name] for name in names), implementation="pallas_triton", **options))
    assert "path: scaled_exp" in explained
    assert "chunks: 3 of" in explained

    def loss(of: Arrays, implementation: str) -> Array:
        return total("mean", arrays | of, implementation=implementation, **options)

    given = {name: arrays[name] for name in names}
    found, want = (jax.value_and_grad(loss)(given, one) for one in ("pallas_triton", "chunked"))
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6)  # of one half it would be off by 1e-3
    for name in names:
        got, value = (np.asarray(one[1][name].astype(jnp.float32), np.float64) for one in (found, want))
        assert np.linalg.norm(got - value) <= 4e-3 * np.linalg.norm(value), name


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_d_input_takes_both_halves_and_float32_rows_of_targets(vocab_axis: int) -> None:
    """The three vocabulary chunks overlap."""
    arrays, rows = float32_head(150, 32, 320, vocab_axis), jnp.ones(150)
    spec = LossSpec("sum", head_precision="float32")
    ours = Problem(**arrays, linear_bias=None, row_weight=rows, class_weight=None, spec=spec, classes=320)
    ours = replace(ours, vocab_axis=vocab_axis)
    needs_grad = NeedsGrad(d_input=True, d_weight=True, d_bias=False)
    ours = planned(ours, "loss_and_gradients", "pallas_triton", needs_grad, budget=100_000)
    assert plan_of(ours).scaled_exp_config.head_rows == 128
    e, w = jnp.asarray(np.random.default_rng(1).uniform(size=(150, 320)), jnp.bfloat16), arrays["linear_weight"]
    w = w if vocab_axis == 0 else w.T
    found = jax.jit(lambda e: head_rows.times_head(ours, e, 150))(e)
    np.testing.assert_allclose(found, np.asarray(e, np.float64) @ np.asarray(w, np.float64), rtol=1e-5, atol=1e-3)
    assert np.array_equal(head_rows.target_rows(ours, arrays["target"]), w[arrays["target"]])


def test_rows_of_targets_of_a_rounded_head_are_rounded() -> None:
    """As those that the logits are computed with, of shards. XLA may remove a conversion to bfloat16 and back."""
    arrays = float32_head()
    ours = Problem(**arrays, linear_bias=None, row_weight=jnp.ones(12), class_weight=None, spec=LossSpec(), classes=50)
    rows = jax.jit(lambda target: head_rows.target_rows(ours, target).astype(jnp.float32))
    found = rows(arrays["target"])
    assert "reduce_precision" in str(jax.make_jaxpr(rows)(arrays["target"]))
    want = arrays["linear_weight"].astype(jnp.bfloat16)[arrays["target"]]
    assert np.array_equal(found, want.astype(jnp.float32))


@pytest.mark.parametrize("vocab_axis", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_hopper_kernel_adds_both_halves_of_the_rows_of_targets(
    vocab_axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the softmax is at the target, the terms cancel: rows of targets in bfloat16 would be wrong by 2**-9."""
    monkeypatch.setattr(hopper_gradients, "programs", lambda: 2)
    monkeypatch.setattr(hopper_gradients, "store_d_input", partial(hopper_gradients.store_d_input, interpret=True))
    arrays, rows = float32_head(40, 64, 128, vocab_axis), jnp.ones(40)
    spec = LossSpec("sum", head_precision="float32")
    ours = Problem(**arrays, linear_bias=None, row_weight=rows, class_weight=None, spec=spec, classes=128)
    needs_grad = NeedsGrad(d_input=True, d_weight=False, d_bias=False)
    ours = planned(replace(ours, vocab_axis=vocab_axis), "loss_and_gradients", "mosaic", needs_grad)
    assert plan_of(ours).d_input_kernel
    target, ones = arrays["target"], jnp.ones(40)
    e = replaced(jnp.zeros((40, 128), jnp.bfloat16), (np.arange(40), target), 1)
    of_call: Any = SimpleNamespace(target=target, theta=-(1 + 2.0**-10) * ones)
    chunk = Slice(0, 40, None)
    found = scaled_exp._store_d_input(ours, of_call, chunk, e, jnp.full((40, 64), jnp.nan, jnp.bfloat16), ones)
    w = arrays["linear_weight"] if vocab_axis == 0 else arrays["linear_weight"].T
    want = -(2.0**-10) * np.asarray(w, np.float64)[target]
    assert np.abs(np.asarray(found, np.float64) - want).max() <= 0.02 * np.abs(want).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": zeros((12, 8))}, "got a float32 linear_weight and a float32 input"),
        ({"linear_weight": zeros((50, 8), jnp.bfloat16)}, "got a bfloat16 linear_weight and a bfloat16 input"),
        ({"head_precision": "double"}, "head_precision must be one of 'input', 'float32', got 'double'"),
    ],
)
def test_what_it_does_not_serve_is_refused(changes: Arrays, message: str) -> None:
    call: Arrays = float32_head() | {"head_precision": "float32"} | changes
    with pytest.raises(ValueError, match=message):
        jax_pallas.linear_cross_entropy(**call)
