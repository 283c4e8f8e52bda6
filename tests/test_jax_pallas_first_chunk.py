"""Runs a first chunk whose exponentials are in the memory of d_weight, with the Hopper kernels in Mosaic's interpreter
on the CPU, and tests where they are."""

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import planned, replaced
from reductions import additions_in_l2  # noqa: F401
from test_jax_pallas_hopper_gradients import ROUNDED, close, float64, use_programs
from test_jax_pallas_scaled_exp import OPTIONS, by_xla, in_float32, interpret, over_chunks, over_slices, problem

from jax_pallas import chunked, head_rows, hopper_common, hopper_logits, hopper_split_logits, scaled_exp
from jax_pallas.first_chunk import FirstChunk, float32_of, memory_of
from jax_pallas.hopper_gradients import store_d_input, write_d_weight
from jax_pallas.plan import ExecutionPlan
from jax_pallas.problem import NeedsGrad, halves, plan_of
from jax_pallas.tile_config import (
    CLASS_BLOCK,
    FIRST_CHUNK_PIECE,
    HALF,
    ROW_BLOCK,
    SPLIT_CLASS_BLOCK,
    ScaledExpConfig,
    cdiv,
    first_chunk_pieces,
    first_chunk_room,
    schedule_of,
)

N, D, V, CLASSES, PIECE = 150, 384, 1000, 780, 384  # rows of two row blocks, and three pieces of d_weight


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("hidden", [192, 320, 896, 2304, 4096])
def test_no_exponential_is_replaced_before_it_was_read(hidden: int, itemsize: int) -> None:
    room, columns = first_chunk_room(hidden, itemsize), hidden * itemsize // 2
    for rows, classes, blocks in product((1, room // 2, room), (room * 6, 50257, 151936), (0, 1, 7)):
        least = FIRST_CHUNK_PIECE * cdiv(rows, ROW_BLOCK) * ROW_BLOCK
        piece = (cdiv(least, CLASS_BLOCK) + blocks) * CLASS_BLOCK
        if itemsize == 4:  # a piece may be as narrow as leaves any classes to write
            piece = next(p for p in range(CLASS_BLOCK, classes, CLASS_BLOCK) if pieces_of(p, rows, columns, classes))
            piece += blocks * CLASS_BLOCK
        if piece >= classes:
            continue
        first, written = FirstChunk.of(piece, rows, columns), classes
        assert max(first.rows if itemsize == 2 else 0, CLASS_BLOCK) <= first.group <= columns
        starts = np.arange(piece, classes, CLASS_BLOCK)
        number, column = np.divmod(starts - piece, first.group)
        assert (column + CLASS_BLOCK <= first.group).all()
        assert (number.max() + 1) * first.rows <= classes
        for start, end in first.pieces(classes):
            assert end == written
            assert start % CLASS_BLOCK == 0
            needed = starts < end  # those of classes past the piece were read
            assert ((number[needed] + 1) * first.rows <= start).all()
            written = start
        assert written == 0
        if itemsize == 2:
            assert len(first.pieces(classes)) <= 2 + classes // (piece - first.rows - CLASS_BLOCK)


def pieces_of(piece: int, rows: int, columns: int, classes: int) -> list[tuple[int, int]] | None:
    return first_chunk_pieces(*FirstChunk.of(piece, rows, columns), classes)


def test_a_piece_that_is_too_narrow_has_no_pieces_of_d_weight() -> None:
    assert pieces_of(8192, 8192, 8192, 128256) is None
    assert pieces_of(17856, 8192, 8192, 128256) is not None


def test_the_memory_of_a_float32_d_weight_is_seen_as_pairs() -> None:
    numbers = jnp.asarray(np.random.default_rng(0).standard_normal((6, 10)), jnp.float32)
    memory = memory_of(numbers, jnp.bfloat16)
    assert memory.shape == (6, 20)
    assert np.asarray(memory).tobytes() == np.asarray(numbers).tobytes()
    assert (float32_of(memory) == numbers).all()
    assert memory_of(memory, jnp.bfloat16) is memory


def stored(e: Array, d_weight: Array, piece: int) -> tuple[Array, Array]:
    """Returns exponentials (n, K) as a first chunk has them: those in the workspace, and d_weight with the others, as
    `memory_of` it."""
    n, classes = e.shape
    d_weight = memory_of(d_weight, e.dtype)
    first = FirstChunk.of(piece, n, d_weight.shape[1])
    end = cdiv(classes, CLASS_BLOCK) * CLASS_BLOCK
    padded = np.pad(np.asarray(e, np.float32), ((0, first.rows - n), (0, end - classes)))
    memory = np.array(d_weight, np.float32)
    for column in range(piece, end):
        row, within = (int(place) for place in first.place(jnp.int32(column)))
        memory[row : row + first.rows, within] = padded[:, column]
    return e[:, :piece], jnp.asarray(memory, e.dtype)


def drawn(*shape: int, seed: int, dtype: Any = jnp.bfloat16) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("splits_head", [None, "in a copy", "in place"])
def test_exponentials(splits_head: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program has one tile. Before it, it stores zeros nowhere."""
    monkeypatch.setattr(hopper_common, "programs", lambda: 100)
    x, w = drawn(N, 64, seed=0), drawn(CLASSES, 64, seed=1) * 0.25
    memory = jnp.full((V, D), 7, jnp.bfloat16)
    target = CLASSES - 1 - jnp.arange(N, dtype=jnp.int32) % 12  # in the last class block, which padding follows
    options: dict[str, Any] = {"vocab_axis": 0, "logit_scale": 1.0, "softcap": None, "stores": True, "statistics": 0}
    block = SPLIT_CLASS_BLOCK if splits_head == "in place" else CLASS_BLOCK
    places = jax.jit(hopper_logits.chunk_places, static_argnums=(1, 2, 3, 4))(target, CLASSES, N, 1, block)[0]
    shared: dict[str, Any] = {**options, "rows": N, "classes": CLASSES, "interpret": True}
    values = None, jnp.zeros(N), target, places, 0
    if splits_head:
        w = w + drawn(CLASSES, 64, seed=2).astype(jnp.float32) * 2.0**-8
    if splits_head == "in place":
        found = hopper_split_logits.split_exponentials(x, w, *values, memory, **shared, piece=PIECE)
    elif splits_head:
        options = {name: shared[name] for name in ("rows", "classes", "stores", "statistics")}
        nothing = hopper_logits.nothing_yet(others=memory, piece=PIECE, **options)
        part = hopper_logits.HeadPart(jnp.int32(0), jnp.int32(0), nothing)
        of_part = {**shared, "piece": PIECE, "blocks": cdiv(CLASSES, hopper_common.BLOCK_V)}
        by_name = hopper_logits.exponentials_of_part(x, halves(w, x.dtype, 1), *values, part, None, **of_part)
        found = hopper_logits.to_exponentials(by_name)
    else:
        found = hopper_logits.exponentials(x, w, *values, memory, **shared, piece=PIECE)
    exponentials = jnp.asarray(np.exp(float64(x) @ float64(w).T), jnp.bfloat16)
    first, others = stored(exponentials, memory, PIECE)
    assert found.e is not None
    close(found.e[:N], float64(first), 2 * ROUNDED)
    assert found.others is not None
    close(found.others, float64(others), 2 * ROUNDED)
    assert ((np.asarray(found.others) == 7) == (np.asarray(others) == 7)).all()
    row, classes = np.arange(N), np.asarray(target)
    place = np.asarray(places)[row // HALF, classes // block]
    close(found.target_logit[place, row], (float64(x) @ float64(w).T)[row, classes], 1e-5)


@pytest.mark.parametrize(("dtype", "hidden"), [(jnp.bfloat16, D), (jnp.float32, 192), (jnp.float16, D)])
def test_d_weight(dtype: Any, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 d_weight of half as many columns has as much memory. That of float16 is multiplied by a number."""
    use_programs(monkeypatch, 2)
    of_input, power = (jnp.float16, 2.0**-3) if dtype == jnp.float16 else (jnp.bfloat16, None)
    e = drawn(N, CLASSES, seed=0, dtype=of_input)
    x = replaced(drawn(N + 20, hidden, seed=1, dtype=of_input), np.s_[:7], np.nan)
    parts = stored(e, jnp.full((V, hidden), jnp.nan, dtype), PIECE)
    options: dict[str, Any] = {} if power is None else {"power": jnp.float32(power)}
    found = write_d_weight(parts[0], x, 7, parts[1], classes=CLASSES, rows=N, interpret=True, **options)
    if dtype == jnp.float32:
        found = float32_of(found)
    rounded = {jnp.bfloat16: (), jnp.float32: (1e-6,), jnp.float16: (ROUNDED / 8,)}[dtype]
    close(found[:CLASSES], (power or 1.0) * (float64(e).T @ float64(x)[7 : 7 + N]), *rounded)
    assert not found[CLASSES:].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_d_input(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_programs(monkeypatch, 4)
    hidden = D if dtype == jnp.bfloat16 else 192
    e, w, held = drawn(N, CLASSES, seed=0), drawn(V, hidden, seed=1).astype(dtype), drawn(N + 30, hidden, seed=2)
    if dtype == jnp.float32:
        w = w + drawn(V, hidden, seed=4).astype(dtype) * 2.0**-9
    low = drawn(N, hidden, seed=5) * 2.0**-9 if dtype == jnp.float32 else None
    parts = stored(e, jnp.full((V, hidden), jnp.nan, dtype), PIECE)
    rho, theta = np.random.default_rng(3).standard_normal((2, N)).astype(np.float32)
    of_targets = float64(held)[20 : 20 + N] + (0 if low is None else float64(low))
    expected = rho[:, None] * (float64(e) @ float64(w)[:CLASSES]) + theta[:, None] * of_targets
    found = store_d_input(
        parts[0],
        replaced(w, np.s_[CLASSES:], np.nan),
        held,
        jnp.asarray(rho),
        jnp.asarray(theta),
        jnp.int32(20),
        classes=CLASSES,
        vocab_axis=0,
        low=low,
        others=parts[1],
        interpret=True,
        schedule=schedule_of(N, hidden, CLASSES, 128, True, 4),
    )
    close(found[20 : 20 + N], expected)
    others = np.setdiff1d(np.arange(N + 30), np.arange(20, 20 + N))
    assert (np.asarray(found)[others] == np.asarray(held)[others]).all()


# Rows of the call, rows of the other chunks, the logits' scale, whether d_input is computed, options. With a large
# scale rows are computed again, and with a smaller one those of float16 are shifted.
FLOAT32 = {"head_precision": "float32"}
FLOAT16 = {"dtype": jnp.float16}
CALLS = [
    pytest.param(70, 40, 20.0, True, {}, id="all rows", marks=pytest.mark.slow),
    pytest.param(170, 50, 1.0, True, OPTIONS, id="two chunks", marks=pytest.mark.slow),
    pytest.param(125, 40, 1.0, False, {"label_smoothing": 0.1}, id="frozen input", marks=pytest.mark.slow),
    pytest.param(70, 40, 20.0, True, FLOAT32, id="float32 head"),
    pytest.param(
        170, 50, 20.0, True, {"z_loss_weight": 0.1, **FLOAT32}, id="float32 head, two chunks", marks=pytest.mark.slow
    ),
    pytest.param(125, 40, 1.0, False, {**OPTIONS, **FLOAT32}, id="float32 head, frozen input", marks=pytest.mark.slow),
    pytest.param(70, 40, 5.0, True, FLOAT16, id="float16", marks=pytest.mark.slow),
    pytest.param(170, 40, 5.0, True, {"z_loss_weight": 0.1, **FLOAT16}, id="float16, 3 chunks", marks=pytest.mark.slow),
    pytest.param(125, 40, 40.0, False, FLOAT16, id="float16, frozen input", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("n", "rows", "scale", "d_input", "options"), CALLS)
def test_scaled_exp(
    n: int, rows: int, scale: float, d_input: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 head has half of the columns, and as much memory in a row of d_weight. The gradients of float16 carry
    powers of two."""
    interpret(monkeypatch)
    monkeypatch.setattr(scaled_exp, "over_chunks", over_chunks)
    monkeypatch.setattr(scaled_exp, "over_slices", over_slices)
    monkeypatch.setattr(head_rows, "over_slices", over_slices)
    needs_grad, splits_head = NeedsGrad(d_input, True, True), "head_precision" in options
    d, piece, dtype = 128 if splits_head else 256, 192, options.get("dtype", jnp.bfloat16)
    spec = {name: value for name, value in options.items() if name != "dtype"}
    ours = problem(n, d, V, CLASSES, 0, {**spec, "logit_scale": scale})
    assert ours.linear_bias is not None
    ours = replace(ours, input=ours.input.astype(dtype), linear_bias=ours.linear_bias.astype(dtype))
    w = (ours.linear_weight * 0.5).astype(dtype)
    if splits_head:
        w = w + jnp.asarray(np.random.default_rng(1).standard_normal(w.shape), jnp.float32) * 2.0**-9
    ours = replace(ours, linear_weight=w)
    plan: ExecutionPlan = plan_of(planned(ours, "loss_and_gradients", "mosaic", needs_grad))
    first_rows = n - max(0, cdiv(n - 128, rows)) * rows
    config = ScaledExpConfig(rows, first_rows, 384 if splits_head else V, 2**20, 0, first_rows, piece)
    ours = replace(ours, plan=replace(plan, chunks=config, d_weight_starts=False))
    scales = (jnp.float32(64.0), jnp.float32(8.0)) if dtype == jnp.float16 else None
    # Outside of a program JAX would compile each operation between the kernels.
    loss, _, gradients = jax.jit(lambda: scaled_exp.scaled_exp(ours, needs_grad, statistics=0, scales=scales))()
    of_input, of_head = scales or (1.0, 1.0)
    exact_problem = in_float32(ours)
    exact_problem = replace(exact_problem, spec=replace(ours.spec, head_precision=None))
    stage = by_xla(exact_problem, "loss_and_gradients", needs_grad)
    want, _, exact = jax.jit(lambda: chunked.loss_and_gradients(*stage, needs_grad, None, 0))()
    np.testing.assert_allclose(loss, want, rtol=2e-5, atol=1e-7)
    tolerance = 4e-3 if dtype == jnp.bfloat16 else 6e-4
    for got, value, factor in zip(gradients, exact, (of_input, of_head, of_head), strict=True):
        if value is not None:
            assert got is not None
            found, wanted = np.asarray(got, np.float32) / factor, np.asarray(value)
            assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)
    assert gradients.d_weight is not None
    assert gradients.d_weight.dtype == w.dtype
    assert not np.asarray(gradients.d_weight)[CLASSES:].any()
