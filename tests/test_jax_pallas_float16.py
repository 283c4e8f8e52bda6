"""Tests what plan A needs for the range of float16, without matmuls. test_jax_pallas_scaled_exp.py has these."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import planned
from test_jax_pallas_first_chunk import stored

from jax_pallas import float16, row_kernels
from jax_pallas.hopper_common import PIECE, PIECES
from jax_pallas.problem import NeedsGrad, Problem, plan_of
from jax_pallas.row_kernels import CallRows, Exponentials
from jax_pallas.slicing import Slice
from jax_pallas.smoothing import Smoothing
from jax_pallas.tile_config import CLASS_BLOCK
from linear_ce.spec import LossSpec


def test_a_class_block_has_two_numbers_of_shifts() -> None:
    assert (float16.OF_HOPPER.piece, PIECES) == (PIECE, 2 * row_kernels.IN_A_NUMBER)


@pytest.mark.parametrize(
    ("total", "shift"), [(0.0, 0), (1.0, 0), (2.0**15 - 1, 0), (2.0**15, 1), (2.0**47, 33), (np.inf, 63)]
)
def test_shifted_sums_are_below_2_to_the_15(total: float, shift: int) -> None:
    assert row_kernels.shift_of(jnp.float32(total)) == shift


@pytest.mark.parametrize(("axis", "count"), [(0, None), (1, None), (1, 300), (0, 40)])
def test_each_row_is_placed_by_an_estimate_of_its_own_lse(axis: int, count: int | None) -> None:
    """The lse of the rows is between 7 and 70, and of one row the target has all of it. With a count the other rows of
    the head are no classes."""
    n, d, v = 24, 64, 512
    random = np.random.default_rng(0)
    x, w = random.standard_normal((n, d)) * np.linspace(0.1, 3.0, n)[:, None], random.standard_normal((v, d))
    x, w, bias = x.astype(np.float16), w.astype(np.float16), random.standard_normal(v).astype(np.float16)
    target, row_weight = jnp.full(n, 3, jnp.int32), jnp.ones(n).at[2].set(0)
    arrays = jnp.asarray(x).at[2].set(jnp.nan), jnp.asarray(w if axis == 0 else w.T), jnp.asarray(bias)
    ours = Problem(*arrays, target, row_weight, None, LossSpec(logit_scale=0.5), v, vocab_axis=axis)
    ours = planned(ours, "loss_and_gradients", "pallas_triton", NeedsGrad(True, True, True))
    tile = plan_of(ours).tile
    assert tile is not None
    share, sample = v / tile.block_v, np.arange(0, v, v // tile.block_v)
    if count is not None:
        ours = replace(ours, class_count=jnp.int32(count))
        share, sample = count / tile.block_v, np.arange(tile.block_v) * count // tile.block_v
        w[count:], bias[count:] = np.nan, np.nan
        ours = replace(ours, linear_weight=jnp.asarray(w if axis == 0 else w.T), linear_bias=jnp.asarray(bias))
    sampled = 0.5 * (x.astype(np.float64) @ w[sample].T.astype(np.float64) + bias[sample].astype(np.float64))
    exponents = np.append(random.integers(-20, 5, n - 1), 200).astype(np.float32)
    rows = CallRows(*[jnp.zeros(n)] * 10)._replace(ref_exponent=jnp.asarray(exponents), row_weight=row_weight)
    if axis == 1:  # a part at a time, as rows that are gathered
        found = rows._replace(largest_x=jnp.zeros(n))
        for part in (Slice(8, n - 8, None), Slice(0, 8, None)):
            placed = jax.jit(lambda rows, x, part=part: float16.place(ours, rows, x, part))
            found = placed(found, part.of(ours.input))
    else:
        found = jax.jit(lambda rows, x: float16.place(ours, rows, x, Slice(0, n, None)))(rows, ours.input)
    top = sampled.max(1)
    others = np.exp(top) * (1 + share * (np.exp(sampled - top[:, None]).sum(1) - 1))
    wanted = np.floor(np.log2(np.exp2(exponents, dtype=np.float64) + others) + 0.5) - float16.PLACE
    wanted[2] = exponents[2]
    assert len({*wanted.tolist()}) > n // 2
    assert np.abs(found.ref_exponent - wanted).max() <= 1
    assert (found.ref_exponent == wanted).sum() >= n - 1  # one may be at the border of two exponents
    assert found.largest_x is not None
    np.testing.assert_array_equal(np.delete(found.largest_x, 2), np.abs(np.delete(x, 2, 0)).max(1).astype(np.float32))


@pytest.mark.parametrize(
    ("pieces", "piece"),
    [(float16.OF_HOPPER, 0), (float16.OF_TRITON, 0), (float16.OF_HOPPER, CLASS_BLOCK)],
    ids=["mosaic", "pallas_triton", "first chunk"],
)
@pytest.mark.parametrize("scales", [None, (64.0, 8.0)])
def test_fit(scales: Any, pieces: float16.Pieces, piece: int) -> None:
    """The third row does not contribute. A row that was computed again has no shift. The exponentials of a first chunk
    past the first `piece` classes are in the memory of d_weight, in two groups. The first row of the call is in another
    chunk."""
    n, d, blocks = 4, 24, 4 if piece else 2
    memory = jnp.full((300, 2 * CLASS_BLOCK + 16), 7, jnp.float16)

    def parts(e: np.ndarray) -> tuple[Array, Array | None]:
        return stored(jnp.asarray(e), memory, piece) if piece else (jnp.asarray(e), None)

    random = np.random.default_rng(0)
    in_a_block = pieces.block // pieces.piece
    shifts = random.integers(0, 5, (n, blocks * in_a_block)) * np.array([[1], [1], [1], [0]])
    packed: Any = shifts.T.astype(np.float32), None
    if in_a_block > 1:
        weights = 256.0 ** np.tile(np.arange(3), 2 * blocks)
        packed = (shifts * weights).reshape(n, blocks, 2, 3).sum(3).transpose(2, 1, 0)
    e = random.random((n, blocks * pieces.block)).astype(np.float16)
    x = random.standard_normal((n + 2, d)).astype(np.float16)
    rho, theta = np.array([1e-6, 2e-6, 0.0, 3e-9], np.float32), random.standard_normal(n).astype(np.float32)
    flag = jnp.array([1, 1], jnp.int32)
    zeros = jnp.zeros((blocks, n))
    for again in (False, True):
        rows = CallRows(*[jnp.zeros(n)] * 10)._replace(flag=flag * again, theta=jnp.array([7.0, *theta]))
        rows = rows._replace(largest_x=jnp.array([1e6, *np.abs(x[2:]).max(1).astype(np.float32)]))
        own, others = parts(e)
        found = Exponentials(None, zeros, None, zeros, zeros, shifts=packed[0], shifts_high=packed[1], others=others)
        place, as_scales = (
            jnp.array([1, 0, 2, n], jnp.int32),
            None if scales is None else tuple(map(jnp.float32, scales)),
        )
        got = float16.fit(rows, place, n, found, own, jnp.asarray(x), jnp.asarray(rho), scales_x=True, scales=as_scales)
        assert got.x is not None
        first, second = scales or (1.0, 1.0)
        most = np.zeros(n, int) if again else shifts.max(1) * (rho != 0)
        moved = np.repeat(np.where(most[:, None] > 0, shifts - most[:, None], 0), pieces.piece, 1)
        for part, wanted_part in zip((got.e, got.others), parts((e * 2.0**moved).astype(np.float16)), strict=True):
            assert (part is None) == (wanted_part is None)
            np.testing.assert_array_equal(part, wanted_part)
        np.testing.assert_array_equal(got.rho, rho * 2.0**most * np.float32(first))
        np.testing.assert_array_equal(got.rows.theta, [7.0, *theta * np.float32(first)])
        # The largest element is as large as is allowed, and the product with the power is rho x.
        largest = np.abs(np.asarray(got.x[2:], np.float32)).max()
        assert 2**14 <= largest <= 2**15
        wanted = np.where(rho[:, None] == 0, 0, x[2:] * (rho * 2.0**most)[:, None] * second)
        np.testing.assert_allclose(np.asarray(got.x[2:], np.float64) * float(got.power), wanted, rtol=1e-3, atol=1e-14)
        np.testing.assert_array_equal(got.x[:2], x[:2])


def test_times_rho() -> None:
    """Of saved rows. The row of NaN does not contribute, and an infinite factor has no part in the power."""
    x = np.random.default_rng(0).standard_normal((4, 24)).astype(np.float16)
    x[2], rho = np.nan, np.array([1e-9, -2e-6, 0.0, np.inf], np.float32)
    got, power = float16.times_rho(jnp.asarray(x), jnp.asarray(rho))
    assert 2**14 <= np.abs(np.asarray(got[:3], np.float32)).max() <= 2**15
    wanted = np.where(rho[:3, None] == 0, 0, x[:3] * rho[:3, None].astype(np.float64))
    np.testing.assert_allclose(np.asarray(got[:3], np.float64) * float(power), wanted, rtol=1e-3, atol=1e-14)
    assert np.isinf(got[3]).all()


def test_the_largest_factor_of_a_saved_row_is_between_a_half_and_1() -> None:
    """A row that does not contribute, one of NaN, and one whose target has all of the probability."""
    n = 6
    random = np.random.default_rng(0)
    row_weight = np.array([1e-3, 5.0, 0.0, 1.0, 1.0, 2.0], np.float32)
    class_weight, target = np.array([0.5, 4.0], np.float32), np.array([0, 1, 0, -1, 1, 0], np.int32)
    lse, rest = random.standard_normal(n), np.array([0.9, 1e-4, 0.5, 0.5, 0.0, 0.25])
    target_logit = np.where(target < 0, np.nan, lse + np.log1p(-rest))
    spec = LossSpec("none", z_loss_weight=0.1, logit_scale=0.5)
    upstream = 0.5 * row_weight * (class_weight[target] + 0.2 * lse)
    theta = np.where(target < 0, np.nan, upstream * (1 - rest) - 0.5 * row_weight * class_weight[target])
    empty = CallRows(*[jnp.zeros(n)] * 10)
    arrays = {"target": target, "row_weight": row_weight, "lse": lse, "target_logit": target_logit, "theta": theta}
    rows = empty._replace(
        **{name: jnp.asarray(one, np.float32 if one.dtype == float else one.dtype) for name, one in arrays.items()}
    )
    problem = Problem(
        jnp.zeros((n, 8)), jnp.zeros((2, 8)), None, rows.target, rows.row_weight, jnp.asarray(class_weight), spec, 2
    )
    found = np.asarray(float16.unit_scale(problem, rows, rows.target, Slice(0, n, None)))
    largest = np.maximum(np.abs(upstream) * np.maximum(rest, 2.0**-24), np.abs(theta)) / found
    assert ((largest >= 0.5) & (largest < 1))[[0, 1, 4, 5]].all()
    assert (found[[2, 3]] == 1).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_the_terms_of_label_smoothing_have_the_scales_of_the_gradients(axis: int) -> None:
    """Each gradient has its own scale, and d_weight with grad_into none. A row that does not contribute is NaN."""
    n, d, v, classes, scales = 6, 64, 328, 300, (jnp.float32(64.0), jnp.float32(8.0))
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(np.float16) for shape in ((n, d), (v, d)))
    x[2] = np.nan
    row_weight = np.array([1 / 3, 0.5, 0.0, -0.25, 1.0, 0.125], np.float32)
    class_weight = np.linspace(0.5, 2.0, classes, dtype=np.float32)
    spec = LossSpec("sum", label_smoothing=0.2, logit_scale=0.7, vocab_size=classes)
    head, target = jnp.asarray(w if axis == 0 else w.T), jnp.zeros(n, jnp.int32)
    arrays = jnp.asarray(x), head, None, target, jnp.asarray(row_weight), jnp.asarray(class_weight)
    ours = Problem(*arrays, spec, classes, vocab_axis=axis)
    ours = planned(ours, "loss_and_gradients", "mosaic", NeedsGrad(True, True, True))
    of_class, factor = class_weight.astype(np.float64) / classes, -0.2 * 0.7
    contributes = row_weight != 0
    row_sum = row_weight[contributes].astype(np.float64) @ x[contributes].astype(np.float64)
    wanted = np.pad(8 * factor * of_class[:, None] * row_sum, ((0, v - classes), (0, 0)))
    smoothing = Smoothing.of(ours, scales)
    assert smoothing is not None
    of_row, mean_row = smoothing.of_input(ours.row_weight)
    np.testing.assert_allclose(of_row, 64 * factor * row_weight, rtol=1e-6)
    np.testing.assert_allclose(mean_row, of_class @ w[:classes].astype(np.float64), rtol=1e-4, atol=1e-6)
    d_weight = smoothing.start_head(None)
    assert d_weight.dtype == jnp.float16
    np.testing.assert_allclose(jnp.moveaxis(d_weight, axis, 0), wanted, rtol=1e-3, atol=1e-6)
    same, d_bias = smoothing.add_to_head(d_weight, jnp.ones(classes))
    assert same is d_weight
    assert d_bias is not None
    np.testing.assert_allclose(d_bias, 1 + 8 * factor * of_class * row_weight.sum(), rtol=1e-6)
    into = jnp.ones(head.shape)
    smoothing = Smoothing.of(replace(ours, grad_into=into), scales)
    assert smoothing is not None
    np.testing.assert_allclose(jnp.moveaxis(smoothing.start_head(into), axis, 0), 1 + wanted / 8, rtol=1e-5)
