"""Compares the Hopper gradient kernels with float64 in Pallas' interpreter on the CPU, and tests how they divide their
work."""

import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import replaced
from reductions import additions_in_l2  # noqa: F401

from jax_pallas import hopper_common, hopper_gradients, input_grad, recompute, scaled_exp
from jax_pallas.hopper_common import BLOCK_V, MULTIPROCESSORS
from jax_pallas.hopper_gradients import OfShards, add_d_weight, store_d_input
from jax_pallas.hopper_input_sums import d_input_sums
from jax_pallas.launch import hopper_gradient_limits
from jax_pallas.problem import halves
from jax_pallas.slicing import Slice
from jax_pallas.tile_config import (
    D_BLOCK,
    STEP,
    SplitKSchedule,
    cdiv,
    choose_schedule,
    d_input_scratch,
    padded,
    schedule_of,
)
from linear_ce import collectives

ROUNDED = 2.0**-8 + 2e-6  # one rounding to bfloat16, and float32 sums in another order


def use_programs(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    for module in (hopper_gradients, hopper_common):
        monkeypatch.setattr(module, "programs", lambda: many)


def float64(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def close(found: Any, expected: np.ndarray, tolerance: float = ROUNDED) -> None:
    """Compares elementwise, relative to the largest expected value."""
    assert found.shape == expected.shape
    error = np.abs(float64(found) - expected).max() / max(np.abs(expected).max(), 1e-30)
    assert error <= tolerance, f"error is {error / tolerance:.0%} of its budget"


def close_sums(found: Array, expected: np.ndarray, in_l2: float, chunks: int = 1) -> None:
    """Compares sums of chunks, of which so large a share of each tile was added in L2: these were rounded once more."""
    values = float64(found)
    once = np.arange(len(expected)) % BLOCK_V < (1 - in_l2) * BLOCK_V
    for part, roundings in (once, chunks), (~once, chunks + 1):
        if part.any():
            close(values[part], expected[part], roundings * ROUNDED)


class Sizes(NamedTuple):
    """Sizes of a call: `rows` of the tokens, from `start`, and `classes` of the vocabulary."""

    rows: int
    tokens: int
    start: int
    hidden: int
    classes: int
    vocab: int
    vocab_axis: int = 0

    def bfloat16(self, *shape: int, seed: int = 0) -> Array:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)

    def e(self) -> Array:
        """Returns random (rows rounded up to 8, padded classes) in place of exponentials, with zeros in the padding."""
        e = np.asarray(self.bfloat16(self.rows, self.classes, seed=1))
        return jnp.asarray(np.pad(e, ((0, -self.rows % 8), (0, padded(self.classes) - self.classes))))

    def head(self, array: Array) -> Array:
        """Converts between (V, D) and the layout of `vocab_axis`."""
        return array if self.vocab_axis == 0 else array.T


SLOW = pytest.mark.slow


# d_weight.

# Each program has two tiles or more. There are fewer steps than parts, or more with a partial last step.
HEADS = {
    "few steps": Sizes(150, 170, 3, 192, 523, 600),
    "many steps": Sizes(333, 340, 0, 64, 523, 800),
    "transposed": Sizes(333, 700, 40, 192, 571, 640, 1),
    "whole": Sizes(320, 320, 0, 128, 512, 512),
    "transposed, few steps": Sizes(20, 20, 0, 64, 64, 64, 1),
    "one": Sizes(1, 1, 0, 64, 1, 8),
}


# None: d_weight is written. Otherwise the share of each tile that is added in L2.
@pytest.mark.parametrize(
    ("name", "in_l2"),
    [
        pytest.param(name, in_l2, marks=() if (name, in_l2) in every_day else SLOW)
        for every_day in [{("few steps", 0.5), ("few steps", 0), ("many steps", None), ("transposed", 1)}]
        for name in HEADS
        for in_l2 in (None, 0, 0.5, 1)
    ],
)
def test_d_weight(name: str, in_l2: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    use_programs(monkeypatch, 2)
    sizes = HEADS[name]
    e, x = sizes.e(), sizes.bfloat16(sizes.tokens, sizes.hidden)
    read = np.arange(sizes.tokens) - sizes.start  # the kernel reads whole steps of x
    x = jnp.where(((read >= 0) & (read < cdiv(sizes.rows, STEP) * STEP))[:, None], x, jnp.nan)
    old = None if in_l2 is None else sizes.bfloat16(sizes.vocab, sizes.hidden, seed=2)
    found = add_d_weight(
        e,
        x,
        jnp.int32(sizes.start),
        vocab=sizes.vocab,
        classes=sizes.classes,
        vocab_axis=sizes.vocab_axis,
        in_l2=in_l2 or 0,
        old=None if old is None else sizes.head(old),
        interpret=True,
    )
    assert found.dtype == jnp.bfloat16
    found = sizes.head(found)
    expected = float64(e)[: sizes.rows].T @ float64(x)[sizes.start : sizes.start + sizes.rows]
    expected = expected[: sizes.classes] + (0.0 if old is None else float64(old)[: sizes.classes])
    close_sums(found[: sizes.classes], expected, in_l2 or 0)
    after = jnp.zeros_like(found) if old is None else old
    assert (found[sizes.classes :] == after[sizes.classes :]).all()


@pytest.mark.parametrize("latency", [2e3, pytest.param(4e3, marks=SLOW), 20e3])
def test_programs_that_begin_late_leave_tiles_to_others(latency: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve tiles the last two of four programs compute two, one or none."""
    use_programs(monkeypatch, 4)
    monkeypatch.setattr(collectives, "LATENCY_NS", latency)
    sizes = Sizes(70, 70, 0, 192, 1000, 1000)
    e, x, old = sizes.e(), sizes.bfloat16(sizes.tokens, sizes.hidden), sizes.bfloat16(sizes.vocab, sizes.hidden, seed=2)
    options: dict[str, Any] = {"vocab": sizes.vocab, "classes": sizes.classes, "vocab_axis": 0, "interpret": True}

    def added(sent: float) -> Array:
        return add_d_weight(e, x, sizes.start, **options, in_l2=0.5, old=old, sent=sent)

    assert (added(1.0) == added(0.0)).all()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("many steps", "transposed") else SLOW) for name in HEADS]
)
def test_d_weight_that_is_added_to_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_programs(monkeypatch, 2)
    sizes = HEADS[name]
    e, x = sizes.e(), sizes.bfloat16(sizes.tokens, sizes.hidden)
    old = jnp.asarray(np.random.default_rng(2).standard_normal((sizes.vocab, sizes.hidden)), jnp.float32)
    found = add_d_weight(
        e,
        x,
        jnp.int32(sizes.start),
        vocab=sizes.vocab,
        classes=sizes.classes,
        vocab_axis=sizes.vocab_axis,
        in_l2=0.5,
        old=sizes.head(old),
        float32=True,
        interpret=True,
    )
    assert found.dtype == jnp.float32
    found = sizes.head(found)
    expected = float64(e)[: sizes.rows].T @ float64(x)[sizes.start : sizes.start + sizes.rows]
    close(found[: sizes.classes], expected[: sizes.classes] + float64(old)[: sizes.classes], 2e-6)
    assert (found[sizes.classes :] == old[sizes.classes :]).all()


@pytest.mark.parametrize(
    ("vocab_axis", "dtype"),
    [(0, jnp.bfloat16), pytest.param(1, jnp.bfloat16, marks=SLOW), (0, jnp.float32)],
)
def test_d_weight_that_one_kernel_starts_and_adds_to(
    vocab_axis: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_programs(monkeypatch, 2)
    sizes = Sizes(192, 292, 0, 192, 523, 576, vocab_axis)
    x, found = sizes.bfloat16(sizes.tokens, sizes.hidden), jnp.full((sizes.vocab, sizes.hidden), jnp.nan, dtype)
    found, expected = sizes.head(found), np.zeros((sizes.classes, sizes.hidden))
    for start, rows in (192, 100), (0, 192):
        e = replaced(sizes.e(), np.s_[rows:], 0)
        shared = {
            "vocab": sizes.vocab,
            "classes": sizes.classes,
            "vocab_axis": vocab_axis,
            "in_l2": 0.5,
            "float32": dtype == jnp.float32,
            "interpret": True,
        }
        found = add_d_weight(e, x, jnp.int32(start), **shared, rows=rows, old=found, starts=rows < 192)
        expected += float64(e)[:rows, : sizes.classes].T @ float64(x)[start : start + rows]
    found = sizes.head(found)
    assert found.dtype == dtype
    if dtype == jnp.float32:
        close(found[: sizes.classes], expected, 2e-6)
    else:
        close_sums(found[: sizes.classes], expected, 0.5, chunks=2)
    assert (found[sizes.classes :] == 0).all()


def test_float32_d_weight_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    use_programs(monkeypatch, 2)
    sizes = HEADS["few steps"]
    e, x = sizes.e(), sizes.bfloat16(sizes.tokens, sizes.hidden)
    shared: dict[str, Any] = {"vocab": sizes.vocab, "classes": sizes.classes, "vocab_axis": 0, "in_l2": 0.5}
    found = add_d_weight(e, x, jnp.int32(sizes.start), **shared, float32=True, interpret=True)
    assert found.dtype == jnp.float32
    expected = float64(e)[: sizes.rows].T @ float64(x)[sizes.start : sizes.start + sizes.rows]
    close(found[: sizes.classes], expected[: sizes.classes], 2e-6)
    assert (found[sizes.classes :] == 0).all()


def test_part_of_d_weight_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has the last classes of three shards of 203. The second begins at class 192 and the third at 384, the
    multiples of 64 before it. Of the last tiles of a shard, some rows have classes of the next one, or past the last.
    """
    use_programs(monkeypatch, 2)
    sizes, of_shards, first = Sizes(150, 170, 3, 64, 609, 609), OfShards(203, BLOCK_V), 128
    e, x = sizes.e(), sizes.bfloat16(sizes.tokens, sizes.hidden)
    shared: dict[str, Any] = {"vocab": 3 * BLOCK_V, "classes": sizes.classes, "vocab_axis": 0, "in_l2": 0.5}
    shared |= {"first_class": jnp.int32(first), "float32": True, "of_shards": of_shards, "interpret": True}
    found = add_d_weight(e, x, sizes.start, **shared, rows=sizes.rows)
    sums = float64(e)[: sizes.rows, : sizes.classes].T @ float64(x)[sizes.start : sizes.start + sizes.rows]
    sums = np.pad(sums, ((0, BLOCK_V), (0, 0)))
    expected = np.concatenate([sums[start + first :][:BLOCK_V] for start in (0, 192, 384)])
    close(found, expected, 2e-6)
    close(add_d_weight(e, x, sizes.start, **shared, rows=sizes.rows, old=found), 2 * expected, 2e-6)


# The vocabulary chunk's last tile extends past the end of the chunk, and past the end of the head.
@pytest.mark.parametrize(
    ("first", "vocab_axis"), [(37, 0), (128, 1), *(pytest.param(*more, marks=SLOW) for more in [(0, 0), (171, 0)])]
)
def test_d_weight_of_a_vocab_chunk(first: int, vocab_axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_programs(monkeypatch, 2)
    sizes = Sizes(100, 100, 0, 192, 205, 384, vocab_axis)
    e, x, old = sizes.e(), sizes.bfloat16(sizes.tokens, sizes.hidden), sizes.bfloat16(384, sizes.hidden, seed=2)
    seen = 11  # the previous vocabulary chunk has these classes
    e = replaced(e, np.s_[:, :seen], 0)
    more = np.full((88, e.shape[1]), np.nan, e.dtype)
    more[:24] = 0  # zeros up to a multiple of 64 rows
    found = add_d_weight(
        jnp.concatenate([e, more]),
        x,
        0,
        vocab=sizes.vocab,
        classes=sizes.classes,
        vocab_axis=vocab_axis,
        in_l2=0.5,
        rows=sizes.rows,
        old=sizes.head(old),
        first_class=jnp.int32(first),
        interpret=True,
    )
    found, own = sizes.head(found), slice(first, first + sizes.classes)
    sums = float64(e)[: sizes.rows, : sizes.classes].T @ float64(x)
    close_sums(found[own], sums + float64(old)[own], 0.5)
    others = np.setdiff1d(np.arange(sizes.vocab), np.arange(first + seen, first + sizes.classes))
    assert (np.asarray(found)[others] == np.asarray(old)[others]).all()


def test_both_plans_add_the_share_of_the_gpu_in_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(hopper_gradients, "add_d_weight", lambda *_, in_l2, **__: shares.append(in_l2))
    for gpu, rows in ("h200", 384), ("h200", 768), ("h100", 384), ("h100", 768), ("h200", 2048):
        plan = SimpleNamespace(d_weight_kernel=True, d_weight_starts=False, gpu=gpu)
        w = jnp.zeros((128, 64), jnp.bfloat16)
        problem: Any = SimpleNamespace(plan=plan, vocab_axis=0, linear_weight=w, classes=128)
        e, x = jnp.zeros((rows, 128), jnp.bfloat16), jnp.zeros((rows, 64), jnp.bfloat16)
        scaled_exp._add_d_weight(problem, Slice(0, rows, None), e, x, 0, w, first=False)
        recompute._add_d_weight(problem, e, x, Slice(0, 128, None), None, w)
    assert shares == [0.5, 0.5, 1, 1, 0, 0, 1, 1, 0, 0]


# d_input.

SMALL = Sizes(150, 170, 13, 192, 571, 600)


class Way(NamedTuple):
    """The sizes of a call, and the schedule by which a number of programs divides it."""

    sizes: Sizes
    programs: int
    schedule: SplitKSchedule


WAYS = {
    # Each program takes two tiles. The last tile of each axis is partial.
    "whole": Way(SMALL, 2, SplitKSchedule(128, 2, 0, 0, 9, 9, 0)),
    # Each program takes one whole tile and a third of the fourth tile.
    "split": Way(SMALL, 3, SplitKSchedule(128, 1, 1, 3, 9, 9, 0)),
    # Two programs share the first part of each of four tiles. Three compute a tail each, and a third of the last tail.
    "tails": Way(SMALL._replace(vocab_axis=1, vocab=640), 11, SplitKSchedule(128, 0, 4, 2, 6, 9, 3)),
    # Narrow tiles. One program takes the first part of each, another the rest.
    "narrow": Way(Sizes(130, 130, 0, 64, 320, 320), 3, SplitKSchedule(136, 0, 1, 1, 3, 5, 1)),
    "wide": Way(Sizes(600, 603, 3, 128, 130, 131), 2, SplitKSchedule(248, 1, 1, 2, 3, 3, 0)),
    "one step": Way(Sizes(1, 1, 0, 64, 1, 8), 132, SplitKSchedule(128, 0, 1, 1, 1, 1, 0)),
    "transposed, split": Way(Sizes(100, 100, 0, 192, 600, 640, 1), 5, SplitKSchedule(128, 0, 2, 2, 10, 10, 0)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("whole", "split", "tails") else SLOW) for name in WAYS]
)
def test_d_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, many, schedule = WAYS[name]
    use_programs(monkeypatch, many)
    tiles = cdiv(sizes.rows, schedule.tile_rows) * cdiv(sizes.hidden, D_BLOCK)
    assert tiles == schedule.full_waves * many + schedule.split_tiles
    rng = np.random.default_rng(3)
    rho, theta = (rng.standard_normal(sizes.rows).astype(np.float32) for _ in range(2))
    rho[::5], theta[::7] = 0, 0
    factor, mean_row = (rng.standard_normal(size).astype(np.float32) for size in (sizes.rows, sizes.hidden))
    smooth = (jnp.asarray(factor), jnp.asarray(mean_row)) if name in ("split", "tails", "transposed, split") else None
    w, held, e = sizes.bfloat16(sizes.vocab, sizes.hidden), sizes.bfloat16(sizes.tokens, sizes.hidden), sizes.e()
    own = np.arange(sizes.start, sizes.start + sizes.rows)
    expected = np.where(rho == 0, 0, rho)[:, None] * (
        float64(e)[: sizes.rows, : sizes.classes] @ float64(w)[: sizes.classes]
    )
    expected += theta[:, None] * float64(held)[own]
    expected += 0 if smooth is None else factor[:, None].astype(np.float64) * mean_row
    w = replaced(w, np.s_[sizes.classes :], np.nan)
    e = replaced(e, np.s_[: sizes.rows : 5], np.nan)
    held = replaced(held, own[::7], np.nan)
    found = store_d_input(
        e,
        sizes.head(w),
        held,
        jnp.asarray(rho),
        jnp.asarray(theta),
        jnp.int32(sizes.start),
        classes=sizes.classes,
        vocab_axis=sizes.vocab_axis,
        smooth=smooth,
        interpret=True,
        schedule=schedule,
    )
    assert found.dtype == jnp.bfloat16
    close(found[own], expected)
    others = np.setdiff1d(np.arange(sizes.tokens), own)
    assert (np.asarray(found)[others] == np.asarray(held)[others]).all()
    assert smooth is not None or not float64(found)[own][(rho == 0) & (theta == 0)].any()


def sums_of(sizes: Any, schedule: Any, e: Any, w: Any, *, counted: bool, **options: Any) -> Any:
    """Returns `d_input_sums` of e and w. counted: the device knows how many of the rows of w are classes."""
    options |= {"classes": sizes.classes, "vocab_axis": sizes.vocab_axis, "schedule": schedule}
    count = None
    if counted:
        count, options["classes"] = jnp.int32(sizes.classes), sizes.vocab
        e = jnp.pad(e, ((0, 0), (0, padded(sizes.vocab) - e.shape[1])))
        if cdiv(sizes.vocab, STEP) != schedule.iters_per_tile:
            del options["schedule"]
    return d_input_sums(e, sizes.head(w), count, rows=sizes.rows, **options, interpret=True)


@pytest.mark.parametrize("counted", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "split" else SLOW) for name in WAYS])
def test_d_input_sums(name: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, many, schedule = WAYS[name]
    use_programs(monkeypatch, many)
    w, e = sizes.bfloat16(sizes.vocab, sizes.hidden), sizes.e()
    expected = float64(e)[: sizes.rows, : sizes.classes] @ float64(w)[: sizes.classes]
    w = replaced(w, np.s_[sizes.classes :], np.nan)
    found = sums_of(sizes, schedule, e, w, counted=counted)
    assert found.dtype == jnp.float32
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


# Each of these takes other branches of the loader, of the last step's classes and of the fix-up.
SPLIT_WAYS = {
    "split": WAYS["split"],
    "tails": WAYS["tails"],
    "whole": WAYS["whole"],
    "wide": Way(Sizes(600, 603, 3, 128, 130, 136), 2, SplitKSchedule(248, 1, 1, 2, 3, 3, 0)),
    "transposed, one step": Way(Sizes(9, 9, 0, 64, 40, 64, 1), 132, SplitKSchedule(128, 0, 1, 1, 1, 1, 0)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("split", "tails") else SLOW) for name in SPLIT_WAYS]
)
def test_d_input_of_a_float32_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, many, schedule = SPLIT_WAYS[name]
    use_programs(monkeypatch, many)
    rng = np.random.default_rng(3)
    rho, theta = (rng.standard_normal(sizes.rows).astype(np.float32) for _ in range(2))
    rho[::5], theta[::7] = 0, 0
    # The halves' sums cancel: without its low half a row would be wrong by all of it.
    w = jnp.asarray(rng.standard_normal((sizes.vocab, sizes.hidden)), jnp.float32)
    e = replaced(sizes.e(), np.s_[:, : sizes.classes], 1)
    rounded = w[: sizes.classes].astype(jnp.bfloat16).astype(jnp.float32)
    w = w.at[: sizes.classes].add(-rounded.mean(0))
    pair = halves(jnp.asarray(rng.standard_normal((sizes.rows, sizes.hidden)), jnp.float32), jnp.bfloat16, 0)
    high, low = pair[: sizes.rows], pair[sizes.rows :]
    own = np.arange(sizes.start, sizes.start + sizes.rows)
    held = replaced(jnp.full((sizes.tokens, sizes.hidden), 7, jnp.bfloat16), own, high)
    both = float64(halves(w[: sizes.classes], jnp.bfloat16, 0)).reshape(2, sizes.classes, -1).sum(0)
    expected = np.where(rho == 0, 0, rho)[:, None] * (float64(e)[: sizes.rows, : sizes.classes] @ both)
    expected += theta[:, None] * (float64(high) + float64(low))
    found = store_d_input(
        replaced(e, np.s_[: sizes.rows : 5], np.nan),
        sizes.head(replaced(w, np.s_[sizes.classes :], np.nan)),
        replaced(held, own[::7], np.nan),
        jnp.asarray(rho),
        jnp.asarray(theta),
        jnp.int32(sizes.start),
        classes=sizes.classes,
        vocab_axis=sizes.vocab_axis,
        low=low,
        interpret=True,
        schedule=schedule,
    )
    assert found.dtype == jnp.bfloat16
    only_matmul = theta == 0
    close(found[own], expected)
    close(found[own[only_matmul]], expected[only_matmul])
    others = np.setdiff1d(np.arange(sizes.tokens), own)
    assert (np.asarray(found)[others] == np.asarray(held)[others]).all()
    assert not float64(found)[own][(rho == 0) & (theta == 0)].any()


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("counted", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "split" else SLOW) for name in SPLIT_WAYS])
def test_d_input_sums_of_a_float32_head(
    name: str, counted: bool, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is split, or rounded."""
    sizes, many, schedule = SPLIT_WAYS[name]
    use_programs(monkeypatch, many)
    w = jnp.asarray(np.random.default_rng(3).standard_normal((sizes.vocab, sizes.hidden)), jnp.float32)
    e, of_classes = sizes.e(), w[: sizes.classes]
    parts = float64(halves(of_classes, jnp.bfloat16, 0)).reshape(2, sizes.classes, -1)
    expected = float64(e)[: sizes.rows, : sizes.classes] @ parts[: 2 - rounds].sum(0)
    w = replaced(w, np.s_[sizes.classes :], np.nan)
    found = sums_of(sizes, schedule, e, w, counted=counted, rounds=rounds)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


# The sums are stored 8, 16, 32 or 64 rows at a time, and 32 of a float32 head at most.
@pytest.mark.parametrize("tile_rows", [248, 240, 224, 192])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_d_input_sums_of_any_tile_lower(dtype: Any, tile_rows: int) -> None:
    """From JAX 0.12 on, Mosaic refuses some stores to device memory. Neither JAX 0.11 nor the interpreter does."""
    rows, classes = 2 * tile_rows, 2 * STEP
    arrays = jax.ShapeDtypeStruct((rows, classes), jnp.bfloat16), jax.ShapeDtypeStruct((classes, 128), dtype)
    schedule = SplitKSchedule(tile_rows, 0, 2, 2, 2, 2, 0)
    sums = partial(d_input_sums, rows=rows, classes=classes, vocab_axis=0, schedule=schedule)
    program = jax.jit(sums).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("@mosaic_gpu_v2(") == 2


# How programs divide d_input's tiles.


def truncated(a: Any, b: Any) -> Any:
    return np.sign(a) * (np.abs(a) // b)  # lax.div for a positive b


@pytest.fixture
def every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `work_unit_of` and `num_work_units` compute in NumPy for all programs of a GPU at once."""
    use_programs(monkeypatch, MULTIPROCESSORS)
    numbers = {"axis_index": lambda _: np.arange(MULTIPROCESSORS), "div": truncated, "rem": np.fmod}
    monkeypatch.setattr(input_grad, "lax", SimpleNamespace(**numbers))
    monkeypatch.setattr(input_grad, "jnp", np)


def taken(schedule: SplitKSchedule, tiles: int) -> dict[int, list[tuple[int, int, int]]]:
    """Returns (first iteration, end, slot) of each tile's work units. Fails if one is empty or if two share a slot."""
    of_tile: dict[int, list[tuple[int, int, int]]] = {tile: [] for tile in range(tiles)}
    units = np.broadcast_to(hopper_gradients.num_work_units(schedule), MULTIPROCESSORS)
    slots = []
    for index in range(units.max(initial=0)):
        found = hopper_gradients.work_unit_of(index, schedule)
        parts = np.stack([np.broadcast_to(part, MULTIPROCESSORS) for part in found], 1)[index < units]
        for tile, first, length, slot in parts.tolist():
            assert length > 0
            assert 0 <= first <= first + length <= schedule.iters_per_tile
            assert slot < schedule.partial_tiles
            assert slot >= 0 or length == schedule.iters_per_tile, "a partial tile has no slot"
            of_tile[tile].append((first, first + length, slot))
            slots += [slot] if slot >= 0 else []
    assert len(set(slots)) == len(slots)
    return of_tile


def summed(schedule: SplitKSchedule, index: int) -> list[int]:
    """Returns the slots that `d_input_sum_kernel` adds up for the index-th split tile."""
    slots = [index + k * schedule.split_tiles for k in range(schedule.split_factor)]
    if schedule.tail_programs:
        first = schedule.split_factor * schedule.split_tiles + index
        split = index >= schedule.split_tiles - schedule.last_tails
        slots += [first + k * schedule.last_tails for k in range(schedule.tail_factor if split else 1)]
    return slots


def drawn_sizes() -> Iterator[tuple[int, int, int, int | None]]:
    """Yields rows, hidden, classes and the largest scratch size."""
    drawn = random.Random(0)
    for rows, hidden, classes in ((1000, 64, 50257), (2048, 4096, 128256), (1664, 896, 151936), (1, 64, 1)):
        yield rows, hidden, classes, None
    for _ in range(300):
        rows = drawn.choice([8, 64, 1000, 2048, drawn.randint(1, 9000)])
        classes = drawn.choice([320, 50257, 128256, drawn.randint(1, 60000)])
        for most in (None, drawn.randint(0, 10**8)):
            yield rows, 64 * drawn.randint(1, 70), classes, most


@pytest.mark.usefixtures("every_program")
def test_schedules_cover_each_iteration_once() -> None:
    for rows, hidden, classes, most in drawn_sizes():
        chosen = choose_schedule(rows, hidden, classes, most, MULTIPROCESSORS)
        assert most is None or chosen.bytes <= most
        for schedule in {chosen, schedule_of(rows, hidden, classes, 128, True, MULTIPROCESSORS)}:
            whole = schedule.full_waves * MULTIPROCESSORS
            for tile, parts in taken(schedule, cdiv(rows, schedule.tile_rows) * cdiv(hidden, D_BLOCK)).items():
                edges = [
                    0,
                    *(edge for first, end, _ in sorted(parts) for edge in (first, end)),
                    schedule.iters_per_tile,
                ]
                assert edges[::2] == edges[1::2], f"{schedule}: tile {tile} takes {sorted(parts)}"
                slots = [slot for _, _, slot in parts if slot >= 0]
                if tile < whole or not schedule.partial_tiles:
                    assert not slots
                else:
                    assert sorted(slots) == sorted(summed(schedule, tile - whole)), f"{schedule}: tile {tile}"


def test_scratch_is_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []

    def run_kernel(_: Any, name: str, __: Any, results: Any, *___: Any, **____: Any) -> Any:
        allocated.extend(result.size * result.dtype.itemsize for result in results)
        return [jnp.zeros(result.shape, result.dtype) for result in results]

    use_programs(monkeypatch, MULTIPROCESSORS)
    monkeypatch.setattr(hopper_gradients, "run_kernel", run_kernel)
    for rows, hidden, classes, most in [
        (1000, 64, 50257, None),
        (2048, 4096, 128256, None),
        (1664, 896, 151936, 10**7),
    ]:
        shapes = [(rows, padded(classes)), (classes, hidden), (rows, hidden)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        factor = jax.ShapeDtypeStruct((rows,), jnp.float32)
        call = partial(store_d_input, classes=classes, vocab_axis=0, most=most)
        jax.eval_shape(lambda *arrays, call=call: call(*arrays, 0), *arrays, factor, factor)
        assert sum(allocated) == d_input_scratch(rows, hidden, classes, most, MULTIPROCESSORS)
        allocated.clear()


def test_limits() -> None:
    assert hopper_gradient_limits(jnp.bfloat16, 192, 50257) is None
    assert hopper_gradient_limits(jnp.float16, 192, 50257) is None
    assert "float32" in (hopper_gradient_limits(jnp.float32, 192, 50257) or "")
    assert "72" in (hopper_gradient_limits(jnp.bfloat16, 72, 50257) or "")
    assert "33554432" in (hopper_gradient_limits(jnp.bfloat16, 64, 2**25) or "")
    zeros = jnp.zeros((8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="e must have 128 columns for 65 classes, got 64"):
        add_d_weight(zeros, zeros, 0, vocab=65, classes=65, vocab_axis=0, in_l2=0)
