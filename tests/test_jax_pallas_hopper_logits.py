"""Compares the Hopper kernels that compute tiles of logits with float64, in Pallas' interpreter on the CPU."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import replaced

from jax_pallas import hopper_common, hopper_logits
from jax_pallas.hopper_split_logits import split_exponentials
from jax_pallas.launch import hopper_limits
from jax_pallas.problem import halves
from jax_pallas.row_math import first_of_largest
from jax_pallas.tile_config import HALF, SPLIT_CLASS_BLOCK, cdiv, padded
from linear_ce.statistics import ENTROPY, OF_LOGITS

FLOAT32 = 2e-6  # relative to the largest value, for sums of a few hundred float32 terms in another order
ROUNDED = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each program several tiles, so that it stores each tile during the matmuls of the next."""
    monkeypatch.setattr(hopper_common, "programs", lambda: 3)


# The interpreter multiplies with NumPy.
NAN = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")


@dataclass(frozen=True)
class Call:
    """A call of a kernel on random arrays.

    Args:
        tokens, hidden, vocab: N, D, V.
        rows, start: the chunk of rows.
        classes, first_class, skip: the vocabulary chunk.
    """

    tokens: int = 130
    hidden: int = 64
    vocab: int = 320
    rows: int = 130
    start: int = 0
    classes: int = 320
    first_class: int = 0
    skip: int = 0
    vocab_axis: int = 0
    bias: bool = False
    class_weight: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None
    dtype: Any = jnp.bfloat16

    @property
    def options(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "classes": self.classes,
            "vocab_axis": self.vocab_axis,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
            "interpret": True,
        }

    def drawn(self) -> dict[str, Array]:
        random = np.random.default_rng(0)
        w = random.normal(size=(self.vocab, self.hidden)) * 2 / self.hidden**0.5
        drawn = {
            "x": jnp.array(random.normal(size=(self.tokens, self.hidden)), self.dtype),
            "w": jnp.array(w.T if self.vocab_axis else w, self.dtype),
            "bias": jnp.array(random.normal(size=self.vocab), jnp.float32),
            "class_weight": jnp.array(random.uniform(size=self.vocab), jnp.float32),
            "ref_exponent": jnp.array(random.integers(-3, 3, self.rows), jnp.float32),
            "target": jnp.array(random.integers(-2, self.vocab, self.rows), jnp.int32),
            "contributes": jnp.array(random.uniform(size=self.rows) < 0.8),
        }
        for name in ("alpha", "tau", "beta", "sigma"):
            drawn[name] = jnp.array(random.normal(size=self.rows), jnp.float32)
        return drawn

    def logits(self, drawn: dict[str, Array]) -> np.ndarray:
        """Returns (rows, classes) float64 logits of the vocabulary chunk."""
        x = float64(drawn["x"])[self.start : self.start + self.rows]
        w = float64(drawn["w"].T if self.vocab_axis else drawn["w"])
        raw = x @ w.T
        if self.bias:
            raw = raw + float64(drawn["bias"])
        raw = raw[:, self.first_class : self.first_class + self.classes] * self.logit_scale
        return raw if self.softcap is None else self.softcap * np.tanh(raw / self.softcap)

    def slope(self, logits: np.ndarray) -> np.ndarray:
        return np.ones_like(logits) if self.softcap is None else 1 - (logits / self.softcap) ** 2


# Rows and classes that are not multiples of a block, and a hidden size of 72, which is not a multiple of a step. The
# other cases change one axis at a time.
ODD = Call(141, 72, 301, rows=130, start=9, classes=299)
CALLS = {
    "plain": Call(),
    "odd": ODD,
    "options": replace(ODD, bias=True, logit_scale=0.5, softcap=3.0, class_weight=True),
    "transposed": Call(vocab_axis=1, bias=True),
    "float16": Call(dtype=jnp.float16, softcap=3.0),
    "part": Call(300, rows=133, start=37, classes=199, class_weight=True),
    "one": Call(1, 8, 1, 1, 0, 1),
    "few": Call(5, 16, 50, 5, 0, 50, bias=True, class_weight=True),
}
# Longer than the ring buffer, so that stages are reused.
CALLS["deep"] = Call(hidden=328, classes=300, bias=True)
VOCAB_CHUNKS = {
    "vocab_chunk": Call(300, 64, 700, 70, 37, 290, 301, 17, bias=True, class_weight=True),
    "transposed vocab_chunk": Call(
        300, 64, 640, 70, 37, 300, 256, 270, vocab_axis=1, class_weight=True, dtype=jnp.float16
    ),
}


def cases(names: Iterable[str], every_day: Collection[str]) -> list[Any]:
    """Returns parameters, marked slow unless the quick suite runs them. Each is compiled separately."""
    return [pytest.param(name, marks=() if name in every_day else pytest.mark.slow) for name in names]


def float64(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def close(found: Any, expected: np.ndarray, tolerance: float) -> None:
    """Compares elementwise, relative to the largest expected value."""
    found_ = float64(found)
    assert found_.shape == expected.shape
    error = np.abs(found_ - expected).max() / max(np.abs(expected).max(), 1e-30)
    assert error <= tolerance, f"error is {error / tolerance:.0%} of its budget"


def run_exponentials(
    call: Call, drawn: dict[str, Array], target: Array | None = None, launcher: Any = None, **options: Any
) -> Any:
    """Returns e, the sums, largest logits and target values of all blocks together, and the other statistics."""
    options = {"stores": True, "statistics": OF_LOGITS, **options}
    bias = drawn["bias"] if call.bias else None
    target = jnp.full(call.rows, -1, jnp.int32) if target is None else target
    block = SPLIT_CLASS_BLOCK if launcher is split_exponentials else hopper_common.BLOCK_V
    chunk_places = jax.jit(hopper_logits.chunk_places, static_argnums=(1, 2, 3, 4))
    places = chunk_places(target, call.classes, call.rows, 1, block)[0]
    found = (launcher or hopper_logits.exponentials)(
        drawn["x"],
        drawn["w"],
        bias,
        drawn["ref_exponent"],
        target,
        places,
        jnp.int32(call.start),
        **call.options,
        **options,
    )
    found = jax.tree.map(np.asarray, found)
    row, target_ = np.arange(call.rows), np.asarray(target)
    place = np.asarray(places)[row // HALF, target_.clip(0) // block].clip(0)
    of_target = (np.where(target_ >= 0, value[place, row], 0.0) for value in (found.target_exp, found.target_logit))
    top = None if found.tops is None else found.tops.max(0)[: call.rows]
    sums = {name: getattr(found, name) for name in ("exp_logs", "logit_sums", "squares")}
    others = {name: value.sum(0)[: call.rows] for name, value in sums.items() if value is not None}
    if found.tops is not None and found.columns is not None and top is not None:
        tops, columns = found.tops[:, : call.rows], found.columns[:, : call.rows]
        others["argmax"] = jax.jit(first_of_largest, static_argnums=3)(tops, columns, top, block)
    return found.e, found.sums.sum(0)[: call.rows], top, *of_target, others


def check_targets(
    target: Array, found: tuple[Array | None, Array | None], exponentials: np.ndarray, logits: np.ndarray
) -> None:
    """Compares what each row's target adds to the sums, and its logit. Both are 0 if the target is not a class."""
    for array, of_all in zip(found, (exponentials, logits), strict=True):
        assert array is not None
        at_target = of_all[np.arange(len(target)), np.maximum(target, 0)]
        close(array, np.where(np.asarray(target) >= 0, at_target, 0.0), FLOAT32)


def in_parts(
    x: Array, w: Array, *values: Any, classes: int, vocab_axis: int, count: Array | None = None, **options: Any
) -> Any:
    """Returns the results of `hopper_logits.exponentials` for a float32 head, which is split, in parts of two class
    blocks. The first part is computed last, and class block 1 twice."""
    blocks, size = cdiv(classes, hopper_common.BLOCK_V), 2 * hopper_common.BLOCK_V
    kinds = {name: options[name] for name in ("rows", "stores", "statistics")}
    found = hopper_logits.nothing_yet(classes=classes, **kinds)
    for first_block in (blocks - 2, 0):
        first = first_block * hopper_common.BLOCK_V
        start = min(first, w.shape[vocab_axis] - size)
        both = halves(jax.lax.slice_in_dim(w, start, start + size, axis=vocab_axis), x.dtype, 1 - vocab_axis)
        part = hopper_logits.HeadPart(jnp.int32(first_block), jnp.int32(first - start), found)
        options |= {"classes": classes, "vocab_axis": vocab_axis, "blocks": 2}
        found = jax.block_until_ready(hopper_logits.exponentials_of_part(x, both, *values, part, count, **options))
    return hopper_logits.to_exponentials(found)


SPLIT_HEADS = {
    "split": Call(90, 64, 500, rows=70, start=9, classes=490, bias=True, softcap=3.0),
    "transposed split": Call(70, 128, 512, rows=70, classes=500, vocab_axis=1),
}


def counted_parts(x: Array, w: Array, *values: Any, classes: int, vocab_axis: int, **options: Any) -> Any:
    """Returns the results of `in_parts` where only the device knows how many classes there are."""
    options |= {"classes": w.shape[vocab_axis], "vocab_axis": vocab_axis}
    return in_parts(x, w, *values, count=jnp.int32(classes), **options)


def counted(x: Array, w: Array, *values: Any, classes: int, vocab_axis: int, **options: Any) -> Any:
    """Returns the results of `hopper_logits.exponentials` where only the device knows how many classes there are."""
    options |= {"classes": w.shape[vocab_axis], "vocab_axis": vocab_axis}
    return hopper_logits.exponentials(x, w, *values, None, jnp.int32(classes), **options)


COUNTED = {"counted": Call(rows=70, start=9, classes=310, bias=True, softcap=3.0)}
COUNTED_SPLIT = {"counted split": Call(90, 64, 448, rows=70, classes=400, bias=True)}
LAUNCHERS = dict.fromkeys(SPLIT_HEADS, in_parts) | dict.fromkeys(COUNTED, counted)
LAUNCHERS |= dict.fromkeys(COUNTED_SPLIT, counted_parts)
# More than a tile of rows; more than a tile of classes, whose last tile has one class block or two.
IN_PLACE = {
    "in place": Call(360, 128, 504, rows=340, start=9, classes=310, bias=True, softcap=3.0),
    "transposed in place": Call(70, 64, 256, rows=70, classes=250, vocab_axis=1),
}
LAUNCHERS |= dict.fromkeys(IN_PLACE, split_exponentials)


@pytest.mark.parametrize(
    "name", cases([*CALLS, *LAUNCHERS], ("options", "split", "counted", "counted split", *IN_PLACE))
)
def test_exponentials(name: str) -> None:
    call = {**CALLS, **SPLIT_HEADS, **COUNTED, **COUNTED_SPLIT, **IN_PLACE}[name]
    drawn = call.drawn()
    if name in {**SPLIT_HEADS, **COUNTED_SPLIT, **IN_PLACE}:  # more bits than bfloat16 has
        drawn["w"] = drawn["w"].astype(jnp.float32) * (1 + 2.0**-10)
    padding = (slice(None), slice(call.classes, None)) if call.vocab_axis else slice(call.classes, None)
    drawn["w"] = replaced(drawn["w"], padding, np.nan)
    target = replaced(drawn["target"], drawn["target"] >= call.classes, -1)
    e, sums, tops, *of_target, others = run_exponentials(call, drawn, target=target, launcher=LAUNCHERS.get(name))
    assert e is not None
    assert tops is not None
    logits = call.logits(drawn)
    exponentials = np.exp2(logits * np.log2(np.e) - float64(drawn["ref_exponent"])[:, None])
    close(sums, exponentials.sum(1), FLOAT32)
    close(tops, logits.max(1), FLOAT32)
    check_targets(target, (of_target[0], of_target[1]), exponentials, logits)
    reference = float64(drawn["ref_exponent"])[:, None] * np.log(2)
    close(others["exp_logs"], (exponentials * (logits - reference)).sum(1), 1e-5)
    close(others["logit_sums"], logits.sum(1), 1e-5)
    close(others["squares"], (exponentials**2).sum(1), 1e-5)
    assert np.array_equal(others["argmax"], logits.argmax(1))
    assert e.shape == (cdiv(call.rows, 8) * 8, padded(call.classes))
    assert e.dtype == drawn["x"].dtype
    close(e[: call.rows, : call.classes], exponentials * call.slope(logits), float(jnp.finfo(e.dtype).eps) / 2)
    assert not e[:, call.classes :].any()
    assert not e[call.rows :].any()


@pytest.mark.parametrize("statistics", [0, ENTROPY])
@pytest.mark.parametrize("name", cases(("odd", "deep"), ("deep",)))
def test_sums_without_stored_exponentials(name: str, statistics: int) -> None:
    """Rows of the head past the last class are NaN."""
    call = CALLS[name]
    drawn = call.drawn()
    drawn["w"] = replaced(drawn["w"], slice(call.classes, None), np.nan)
    e, sums, tops, *_, others = run_exponentials(call, drawn, stores=False, statistics=statistics)
    assert e is None
    assert tops is None
    exponents = call.logits(drawn) * np.log2(np.e) - float64(drawn["ref_exponent"])[:, None]
    close(sums, np.exp2(exponents).sum(1), FLOAT32)
    assert [*others] == ["exp_logs"] * (statistics == ENTROPY)
    for found in others.values():
        close(found, (np.exp2(exponents) * exponents).sum(1) * np.log(2), 1e-5)


@NAN
def test_masked_classes_and_rows_of_nan() -> None:
    call = replace(CALLS["plain"], bias=True)
    drawn = call.drawn()
    drawn["bias"] = replaced(drawn["bias"], np.s_[::3], -np.inf)
    drawn["x"] = replaced(replaced(drawn["x"], 3, np.nan), (7, 0), np.inf)
    e, sums, *_ = run_exponentials(call, drawn)
    assert e is not None
    others = np.delete(np.arange(call.rows), [3, 7])
    with np.errstate(invalid="ignore"):
        exponentials = np.exp2(call.logits(drawn) * np.log2(np.e) - float64(drawn["ref_exponent"])[:, None])
    close(sums[others], exponentials.sum(1)[others], FLOAT32)
    assert not e[others, ::3].any()
    assert np.isnan(sums[3])
    assert not np.isfinite(sums[7])


def run_statistics(
    call: Call, drawn: dict[str, Array], *, weighted: bool, statistics: int, **options: Any
) -> tuple[Array | None, ...]:
    return hopper_logits.statistics(
        drawn["x"],
        drawn["w"],
        drawn["bias"] if call.bias else None,
        drawn["class_weight"] if call.class_weight else None,
        jnp.int32(call.start),
        jnp.int32(call.first_class),
        jnp.int32(call.skip) if call.first_class else 0,
        weighted=weighted,
        statistics=statistics,
        **call.options,
        **options,
    )


@pytest.mark.parametrize("name", cases([*CALLS, *VOCAB_CHUNKS], ("options", "vocab_chunk")))
def test_statistics(name: str) -> None:
    call = {**CALLS, **VOCAB_CHUNKS}[name]
    drawn = call.drawn()
    target = None if call.first_class else jnp.where(drawn["target"] < call.classes, drawn["target"], -1)
    found = run_statistics(call, drawn, weighted=True, statistics=OF_LOGITS, target=target)
    top, sum_exp, weighted_sum, sum_exp_log, *of_target, argmax, sum_squared = found
    assert top is not None
    assert argmax is not None
    assert sum_squared is not None
    assert sum_exp is not None
    assert weighted_sum is not None
    assert sum_exp_log is not None
    logits = call.logits(drawn)[:, call.skip :]
    close(top, logits.max(1), FLOAT32)
    shifted = logits - logits.max(1, keepdims=True)
    assert np.array_equal(argmax - call.skip, logits.argmax(1))
    close(sum_squared, np.exp(2 * shifted).sum(1), 1e-5)
    if target is not None:
        check_targets(target, (of_target[0], of_target[1]), np.exp(shifted), logits)
    close(sum_exp, np.exp(shifted).sum(1), FLOAT32)
    close(sum_exp_log, (np.exp(shifted) * shifted).sum(1), 1e-5 if shifted.any() else 1.0)
    weight = float64(drawn["class_weight"])[call.first_class :][: call.classes][call.skip :]
    close(weighted_sum, (logits * (weight if call.class_weight else 1.0)).sum(1), 1e-5)


@NAN
def test_statistics_of_masked_classes() -> None:
    call = replace(CALLS["plain"], bias=True, classes=300)
    drawn = call.drawn()
    drawn["bias"] = replaced(drawn["bias"], np.s_[:256], -np.inf)  # the whole first block
    drawn["x"] = replaced(drawn["x"], 3, np.nan)
    top, sum_exp, weighted_sum, sum_exp_log, *_ = run_statistics(call, drawn, weighted=False, statistics=ENTROPY)
    assert weighted_sum is None
    assert top is not None
    assert sum_exp is not None
    assert sum_exp_log is not None
    rows = np.delete(np.arange(call.rows), 3)
    logits = call.logits(drawn)[rows, 256:]
    shifted = logits - logits.max(1, keepdims=True)
    close(top[rows], logits.max(1), FLOAT32)
    close(sum_exp[rows], np.exp(shifted).sum(1), FLOAT32)
    close(sum_exp_log[rows], (np.exp(shifted) * shifted).sum(1), 1e-5)
    assert jnp.isnan(sum_exp[3])


def check_d_logits(call: Call, drawn: dict[str, Array], *, beta: bool, sigma: bool) -> None:
    logits = call.logits(drawn)
    lse = np.log(np.exp(logits).sum(1)) + 1.0
    own, unread = np.arange(call.start, call.start + call.rows), ~np.asarray(drawn["contributes"])
    found = hopper_logits.d_logits(
        replaced(drawn["x"], own[unread], np.nan),
        drawn["w"],
        drawn["bias"] if call.bias else None,
        drawn["class_weight"] if call.class_weight else None,
        drawn["target"],
        jnp.array(lse, jnp.float32),
        drawn["alpha"],
        drawn["tau"],
        drawn["beta"] if beta else None,
        drawn["sigma"] if sigma else None,
        drawn["contributes"],
        jnp.int32(call.start),
        jnp.int32(call.first_class),
        jnp.int32(call.skip) if call.first_class else 0,
        **call.options,
    )
    row = {key: float64(drawn[key])[:, None] for key in ("alpha", "tau", "beta", "sigma")}
    log_prob = logits - lse[:, None]
    factor = row["alpha"] + (row["beta"] * log_prob if beta else 0.0)
    columns = np.arange(call.first_class, call.first_class + call.classes)
    expected = np.exp(log_prob) * factor
    if sigma:
        expected -= row["sigma"] * (float64(drawn["class_weight"])[columns] if call.class_weight else 1.0)
    expected -= (np.asarray(drawn["target"])[:, None] == columns) * row["tau"]
    expected *= call.slope(logits)
    expected = np.where(
        np.asarray(drawn["contributes"])[:, None] & (columns >= call.first_class + call.skip), expected, 0
    )
    assert found.shape == (cdiv(call.rows, 8) * 8, padded(call.classes))
    assert found.dtype == call.dtype
    close(found[: call.rows, : call.classes], expected, ROUNDED[call.dtype])
    assert not found[call.rows :].any()
    assert not found[:, call.classes :].any()


EVERY_DAY = {("options", True), ("vocab_chunk", True), ("transposed vocab_chunk", False)}
D_LOGITS = [
    pytest.param(name, full, marks=() if (name, full) in EVERY_DAY else pytest.mark.slow)
    for name in [*CALLS, *VOCAB_CHUNKS]
    for full in (False, True)
]


@NAN
@pytest.mark.parametrize(("name", "full"), D_LOGITS)
def test_d_logits(name: str, full: bool) -> None:
    call = {**CALLS, **VOCAB_CHUNKS}[name]
    check_d_logits(call, call.drawn(), beta=full, sigma=full)


@NAN
def test_rows_that_do_not_contribute_may_hold_nan() -> None:
    call = CALLS["plain"]
    drawn = call.drawn()
    contributes, w = drawn["contributes"], drawn["w"]

    @jax.jit
    def run(x: Array) -> Array:
        rows = (drawn["target"], drawn["ref_exponent"], drawn["alpha"], drawn["tau"], None, None, contributes)
        return hopper_logits.d_logits(x, w, None, None, *rows, 0, 0, 0, **call.options)

    one, other = (run(jnp.where(contributes[:, None], drawn["x"], value)) for value in (jnp.nan, 0))
    assert jnp.array_equal(one, other)


def test_limits() -> None:
    assert hopper_limits(jnp.bfloat16, 4096, 50257, 0) is None
    assert hopper_limits(jnp.float16, 72, 6400, 1) is None
    assert "float32" in (hopper_limits(jnp.float32, 4096, 50257, 0) or "")
    assert "60" in (hopper_limits(jnp.bfloat16, 60, 50257, 0) or "")
    assert "50257" in (hopper_limits(jnp.bfloat16, 64, 50257, 1) or "")
