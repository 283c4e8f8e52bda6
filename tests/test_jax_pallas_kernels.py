"""Compares the "pallas_triton" kernels with NumPy in float64, in Pallas' interpreter, and compiles them for GPUs that
the machine does not have: the code fits each GPU and spills no registers. Run as a program, this file compiles them."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh
from jax_problem import replaced

from benchmarks.jax_ptx import COMPILER
from benchmarks.jax_ptx import environment as gpu_compiler
from jax_pallas import float16, kernels, row_kernels, target_grad, vocab_shard
from jax_pallas.launch import triton_limits
from jax_pallas.problem import Problem as CallProblem
from jax_pallas.row_kernels import CallRows
from linear_ce.spec import LossSpec
from linear_ce.statistics import BY_ROW, ENTROPY, MAX, OF_LOGITS, SHIFTS

HERE = Path(__file__).parent

DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}
FLOAT32 = 1e-5  # relative error of sums of a few hundred float32 terms
START, ROWS = 23, 150  # two blocks of rows; the second is partial
LOG2_E = np.log2(np.e)
SLOW = pytest.mark.slow


class Case(NamedTuple):
    """Options of a problem."""

    dtype: str = "bfloat16"
    vocab_axis: int = 0
    hidden: int = 48
    vocab: int = 331  # neither this nor `classes` is a multiple of a tile size
    classes: int = 310
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None

    @property
    def static_args(self) -> dict[str, Any]:
        """Returns the static arguments of every kernel, except the number of classes."""
        options = {"vocab_axis": self.vocab_axis, "logit_scale": self.scale, "softcap": self.softcap}
        return {"rows": ROWS, **options}


FULL = {"bias": True, "scale": 0.75, "softcap": 4.0}
CASES = [
    Case(),
    Case("bfloat16", 1, hidden=80, **FULL),
    Case("float16", 1, hidden=33),
    Case("float16", 0, vocab=512, classes=512, **FULL),
    Case("float32", 0, hidden=33, **FULL),
    Case("float32", 1, bias=True),
]


def cases(*every_day: int) -> list[Any]:
    """Returns CASES as parameters, slow except at the given indices. The interpreter compiles each separately."""
    return [pytest.param(case, marks=() if i in every_day else SLOW, id=str(case)) for i, case in enumerate(CASES)]


class Problem:
    """The arrays of a case, with NaN where kernels must not read, and its float64 logits."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        x = np.full((START + ROWS + 9, case.hidden), np.nan)
        x[START : START + ROWS] = rng.standard_normal((ROWS, case.hidden))
        w = np.full((case.vocab, case.hidden), np.nan)
        w[: case.classes] = rng.standard_normal((case.classes, case.hidden)) * 2 / case.hidden**0.5
        self.x, w_ = jnp.asarray(x, DTYPES[case.dtype]), jnp.asarray(w, DTYPES[case.dtype])
        self.w = w_ if case.vocab_axis == 0 else w_.T
        self.bias = jnp.asarray(rng.standard_normal(case.vocab), jnp.float32) if case.bias else None
        self.class_weight = jnp.asarray(rng.uniform(0.5, 2, case.vocab), jnp.float32)
        logits = wide(self.x)[START : START + ROWS] @ wide(w_)[: case.classes].T
        if self.bias is not None:
            logits += wide(self.bias)[: case.classes]
        logits *= case.scale
        self.slope = np.ones_like(logits)
        if case.softcap is not None:
            logits = case.softcap * np.tanh(logits / case.softcap)
            self.slope = 1 - (logits / case.softcap) ** 2
        self.logits = logits
        self.ref_exponent = np.ceil(logits.max(1) * LOG2_E).astype(np.float32) - rng.integers(0, 5, ROWS)
        self.rng = rng


def wide(array: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(array, jnp.float32), np.float64)


def assert_close(name: str, found: Any, expected: np.ndarray, tolerance: float) -> None:
    """Fails if the largest error is above `tolerance` times the largest magnitude."""
    error = np.abs(wide(found) - expected).max() / max(np.abs(expected).max(), 1e-30)
    assert error <= tolerance, f"{name}: error {error:.1e} is {error / tolerance:.0%} of its budget"


def exponentials(
    problem: "Problem", ref_exponent: Any, start: Any, *, bias: Any = None, target: Any = None, **options: Any
) -> Any:
    """Returns e, the sums and largest logits of all blocks together, the targets' values, and the sums for the entropy
    of all blocks together, each None if not computed."""
    target = jnp.full(ROWS, -1, jnp.int32) if target is None else target
    found = kernels.exponentials(problem.x, problem.w, bias, jnp.asarray(ref_exponent), target, start, **options)
    top = None if found.tops is None else found.tops.max(0)
    exp_log = None if found.exp_logs is None else found.exp_logs.sum(0)
    return found.e, found.sums.sum(0), top, found.target_exp[0], found.target_logit[0], exp_log


@pytest.mark.parametrize("case", cases(1, 4))
def test_exponentials(case: Case) -> None:
    problem = Problem(case)

    @jax.jit
    def run(start: jax.Array) -> Any:
        options = {**case.static_args, "classes": case.classes, "stores": True, "statistics": MAX | ENTROPY}
        return exponentials(problem, problem.ref_exponent, start, bias=problem.bias, target=target, **options)

    target = jnp.asarray(problem.rng.integers(-1, case.classes, ROWS), jnp.int32)
    e, sums, tops, target_exp, target_logit, exp_log = run(jnp.int32(START))
    expected = np.exp2(problem.logits * LOG2_E - problem.ref_exponent[:, None])
    assert e.shape == (ROWS, -(-case.classes // 64) * 64)
    assert e.dtype == jnp.bfloat16
    assert not wide(e)[:, case.classes :].any(), "e is not 0 past the last class"
    assert_close("sums", sums, expected.sum(1), FLOAT32)
    assert_close("tops", tops, problem.logits.max(1), FLOAT32)
    exponents = problem.logits - problem.ref_exponent[:, None] / LOG2_E
    assert_close("exp_log", exp_log, (expected * exponents).sum(1), FLOAT32)
    at = np.flatnonzero(target >= 0), np.asarray(target)[target >= 0]
    assert_close("target_exp", target_exp[at[0]], expected[at], FLOAT32)
    assert_close("target_logit", target_logit[at[0]], problem.logits[at], FLOAT32)
    assert_close("e", e[:, : case.classes], expected * problem.slope, 2.0**-8)
    error = np.abs(wide(e)[:, : case.classes] - expected * problem.slope)
    assert (error <= 2.0**-8 * expected + 1e-5).all(), "an element of e is not rounded exactly once"


@pytest.mark.parametrize("case", [pytest.param(CASES[2], marks=SLOW), Case("float16", **FULL)], ids=str)
def test_exponentials_of_float16_are_shifted(case: Case) -> None:
    """The sums, of which there is one for each class block, are from 2**3 to 2**63. One shift serves a class block."""
    problem = Problem(case)
    low = problem.ref_exponent - np.linspace(0, 55, ROWS).astype(np.float32).round()
    options = {**case.static_args, "classes": case.classes, "stores": True, "statistics": SHIFTS}
    target = jnp.full(ROWS, -1, jnp.int32)
    found = kernels.exponentials(problem.x, problem.w, problem.bias, jnp.asarray(low), target, START, **options)
    assert found.e is not None
    assert found.shifts is not None
    assert found.shifts_high is None
    assert found.e.dtype == jnp.float16
    expected = np.exp2(problem.logits * LOG2_E - low[:, None])
    sums, shifts = wide(found.sums), wide(found.shifts)
    assert_close("sums", sums.sum(0), expected.sum(1), FLOAT32)
    assert shifts.min() == 0
    assert shifts.max() > 30
    np.testing.assert_array_equal(shifts, np.clip(np.floor(np.log2(sums)) - 14, 0, 63))
    of_class = np.repeat(shifts.T, float16.OF_TRITON.block, 1)[:, : case.classes]
    e = wide(found.e)[:, : case.classes] * 2.0**of_class
    assert (np.abs(e - expected * problem.slope) <= (2.0**-10 + FLOAT32) * expected + 2.0 ** (of_class - 24)).all()
    assert not wide(found.e)[:, case.classes :].any()


@SLOW
def test_sums_without_stored_exponentials() -> None:
    case = CASES[0]
    problem = Problem(case)
    options = {**case.static_args, "classes": case.classes, "stores": False, "statistics": 0}
    e, sums, tops, *_ = exponentials(problem, problem.ref_exponent, START, **options)
    assert e is None
    assert tops is None
    assert_close("sums", sums, np.exp2(problem.logits * LOG2_E - problem.ref_exponent[:, None]).sum(1), FLOAT32)


def called(tokens: int, target: Any, flag: Any) -> CallRows:
    """Returns the rows of a call, with NaN in the fields that no kernel may use."""
    nan = jnp.full(tokens, jnp.nan)
    top = jnp.full(tokens, -jnp.inf)
    return CallRows(target, jnp.ones(tokens), nan, top, jnp.asarray(flag, jnp.int32), nan, nan, nan, None, None)


def with_e(e: Any) -> row_kernels.Exponentials:
    """Returns what `kernels.repair` reads and writes of the exponentials."""
    others: Any = None
    return row_kernels.Exponentials(e, others, None, others, others)


@pytest.mark.parametrize("stores", [True, pytest.param(False, marks=SLOW)])
def test_repair_recomputes_only_the_flagged_blocks(stores: bool) -> None:
    case = Case(softcap=4.0)
    problem = Problem(case)
    first_row, first_flag = 256, 3
    target = replaced(jnp.full(512, -1, jnp.int32), np.s_[first_row : first_row + ROWS : 2], 7)
    of_rows: Any = None
    spec = LossSpec("sum", softcap=4.0)
    ours = CallProblem(problem.x, problem.w, None, of_rows, of_rows, None, spec, case.classes)

    @jax.jit
    def run(flag: jax.Array, total: jax.Array | None = None) -> Any:
        sevens = jnp.full((ROWS, 320), 7, jnp.bfloat16) if stores else None
        place = jnp.asarray([first_row, first_flag, START, ROWS], jnp.int32)
        statistics = OF_LOGITS if total is None else OF_LOGITS | BY_ROW
        of_call = called(512, target, flag)
        rows, found, repaired = kernels.repair(ours, problem.x, of_call, place, ROWS, with_e(sevens), total, statistics)
        return rows, found.e, repaired

    rows, e, repaired = run(jnp.asarray([0, 0, 0, 1, 0, 1], jnp.int32))
    ref_exponent = np.floor(problem.logits.max(1) * LOG2_E)
    expected = np.exp2(problem.logits * LOG2_E - ref_exponent[:, None])
    assert_close("top", rows.top[first_row + 128 : first_row + ROWS], problem.logits.max(1)[128:], FLOAT32)
    assert np.isneginf(np.delete(np.asarray(rows.top), np.arange(first_row + 128, first_row + ROWS))).all()
    assert_close("sums", repaired.sums.sum(0)[128:], expected.sum(1)[128:], FLOAT32)
    exp_log = (expected * (problem.logits - ref_exponent[:, None] / LOG2_E)).sum(1)
    assert_close("exp_logs", repaired.exp_logs.sum(0)[128:], exp_log[128:], FLOAT32)
    assert_close("squares", repaired.squares.sum(0)[128:], (expected**2).sum(1)[128:], FLOAT32)
    assert_close("target_exp", repaired.target_exp[0, 128::2], expected[128::2, 7], FLOAT32)
    assert_close("target_logit", repaired.target_logit[0, 128::2], problem.logits[128::2, 7], FLOAT32)
    if stores:
        assert (e[:128] == 7).all()
        assert_close("e", e[128:, : case.classes], (expected * problem.slope)[128:], 2.0**-8)
        _, e, _ = run(jnp.asarray([1, 1, 1, 0, 1, 1], jnp.int32))
        assert (e == 7).all(), "the chunk's first flag must hold for all of its blocks"
        lost = np.isin(np.arange(ROWS), (130, 135, 140))
        total = jnp.where(lost, jnp.asarray([2.0**50, 2.0**-50, jnp.nan])[jnp.arange(ROWS) // 5 % 3], 1.0)
        _, by_row, repaired = run(jnp.asarray([0, 0, 0, 1, 0, 1], jnp.int32), total)
        assert (by_row[~lost] == 7).all(), "the row of a block that is not repaired does not keep its exponentials"
        assert_close("e", by_row[lost, : case.classes], (expected * problem.slope)[lost], 2.0**-8)
        assert repaired.sums.shape[1] % 128 == 0, "the alignment of sums depends on the number of rows"


@pytest.mark.parametrize("segment", [target_grad.SEGMENT, 256])
def test_sort_by_target(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_grad, "SEGMENT", segment)
    rng, count, classes = np.random.default_rng(0), 1000, 40
    target = rng.integers(-1, classes, count + 24).astype(np.int32)
    target[300:700] = 3
    weight = (rng.uniform(size=count + 24) < 0.8).astype(np.float32)
    theta = rng.standard_normal(count + 24).astype(np.float32)
    arrays = jnp.asarray(target), jnp.asarray(weight), jnp.asarray(theta)
    found = target_grad.sort_by_target(*arrays, count, classes)
    key = np.where((target >= 0) & (weight != 0), target, classes)[:count]
    order = np.argsort(key, kind="stable")
    for got, expected in zip(found, (key[order], order, theta[order]), strict=True):
        assert (np.asarray(got) == expected).all()


def test_non_finite_values_stay_in_their_row() -> None:
    case = Case("float32")
    problem = Problem(case)
    x = replaced(replaced(problem.x, START + 3, np.nan), (START + 140, 5), np.inf)
    bias = replaced(jnp.zeros(case.vocab), np.s_[:300], -np.inf)
    static_args = {**case.static_args, "classes": case.classes}
    ref_exponent = jnp.zeros(ROWS)
    problem.x = x
    e, sums, *_ = exponentials(problem, ref_exponent, START, bias=bias, stores=True, statistics=0, **static_args)
    bad = np.isin(np.arange(ROWS), (3, 140))
    expected = np.exp(problem.logits) * (np.arange(case.classes) >= 300)
    assert_close("sums", np.asarray(sums)[~bad], expected.sum(1)[~bad], FLOAT32)
    assert not np.isfinite(np.asarray(sums)[bad]).any()
    assert not wide(e)[~bad, :300].any()
    assert not wide(e)[:, case.classes :].any()
    found = kernels.statistics(x, problem.w, bias, None, START, 0, 0, weighted=False, statistics=ENTROPY, **static_args)
    assert_close("max", np.asarray(found[0])[~bad], problem.logits[:, 300:].max(1)[~bad], FLOAT32)
    assert np.isfinite(np.asarray(found[3])[~bad]).all(), "a class with probability 0 must add nothing to the entropy"
    assert not np.isfinite(np.asarray(found[1])[bad]).any()


@pytest.mark.parametrize("case", cases(1, 4))
@pytest.mark.parametrize("class_weights", [True, pytest.param(False, marks=SLOW)])
def test_statistics(case: Case, class_weights: bool) -> None:
    problem = Problem(case)
    width = 270

    @jax.jit
    def run(start: jax.Array, first: jax.Array, skip: jax.Array) -> Any:
        options = {**case.static_args, "classes": width, "weighted": True, "statistics": OF_LOGITS}
        weights = problem.class_weight if class_weights else None
        return kernels.statistics(problem.x, problem.w, problem.bias, weights, start, first, skip, **options)

    for first, skip in ((0, 0), (37, 11), (case.classes - width, width)):
        found = run(jnp.int32(START), jnp.int32(first), jnp.int32(skip))
        vocab_chunk = slice(first + skip, first + width)
        logits = problem.logits[:, vocab_chunk]
        if skip == width:
            assert np.isneginf(np.asarray(found[0])).all()
            assert not np.stack(found[1:4]).any(), "without classes the sums must be 0"
            continue
        top = logits.max(1, keepdims=True)
        weights = wide(problem.class_weight)[vocab_chunk] if class_weights else np.ones(logits.shape[1])
        terms = np.exp(logits - top)
        assert_close("max", found[0], top[:, 0], FLOAT32)
        assert_close("sum_exp", found[1], terms.sum(1), FLOAT32)
        assert_close("weighted_sum", found[2], (logits * weights).sum(1), FLOAT32)
        assert_close("sum_exp_log", found[3], (terms * (logits - top)).sum(1), FLOAT32)
        assert np.array_equal(found[6], skip + logits.argmax(1))
        assert_close("sum_squared", found[7], (terms**2).sum(1), FLOAT32)


@pytest.mark.parametrize(
    ("form", "case"),
    [
        pytest.param(form, *case.values, marks=case.marks)
        for form, every_day in {"loss": 1, "smoothed": 2, "log_probs": 4}.items()
        for case in cases(every_day)
    ],
)
def test_d_logits(case: Case, form: str) -> None:
    problem, width = Problem(case), 270
    rng, logits = problem.rng, problem.logits
    alpha, tau, beta, sigma = (rng.standard_normal(ROWS).astype(np.float32) for _ in range(4))
    target = rng.integers(0, case.classes, ROWS).astype(np.int32)
    contributes = rng.uniform(size=ROWS) < 0.8
    lse = np.log(np.exp(logits).sum(1))
    has_beta, has_sigma = form == "log_probs", form == "smoothed"

    @jax.jit
    def run(x: jax.Array, start: jax.Array, first: jax.Array, skip: jax.Array) -> jax.Array:
        weights = problem.class_weight if case.bias else None
        of_rows = (jnp.asarray(a, jnp.float32) for a in (lse, alpha, tau))
        optional = (jnp.asarray(beta) if has_beta else None, jnp.asarray(sigma) if has_sigma else None)
        rest = (jnp.asarray(contributes), start, first, skip)
        arrays: tuple[Any, ...] = (x, problem.w, problem.bias, weights, jnp.asarray(target), *of_rows, *optional, *rest)
        return kernels.d_logits(*arrays, classes=width, **case.static_args)

    log_prob = logits - lse[:, None]
    expected = np.exp(log_prob) * (alpha[:, None] + (beta[:, None] * log_prob if has_beta else 0.0))
    if has_sigma:
        expected -= sigma[:, None] * (wide(problem.class_weight)[: case.classes] if case.bias else 1.0)
    expected -= tau[:, None] * (np.arange(case.classes) == target[:, None])
    expected *= problem.slope * contributes[:, None]
    unread = np.flatnonzero(~contributes)[0]
    x = replaced(problem.x, START + unread, np.nan)
    for first, skip in ((0, 0), (37, 11)):
        found = run(x, jnp.int32(START), jnp.int32(first), jnp.int32(skip))
        assert found.dtype == DTYPES[case.dtype]
        vocab_chunk = np.zeros((ROWS, 320))
        vocab_chunk[:, skip:width] = expected[:, first + skip : first + width]
        assert not wide(found)[vocab_chunk == 0].any(), "skipped, masked and padding elements must be 0"
        assert_close("d_logits", found, vocab_chunk, EPSILON[case.dtype] + FLOAT32)


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", *(pytest.param(dtype, marks=SLOW) for dtype in ("float16", "float32"))])
def test_add_target_rows(dtype: str, vocab_axis: int) -> None:
    rng, classes, hidden, rows = np.random.default_rng(0), 40, 70, 50
    x = rng.standard_normal((rows, hidden))
    x[7] = np.nan
    runs = [np.full(3, -1), np.full(90, 2), np.full(32, 3), np.full(31, 4), np.full(3, 6), np.arange(7, 40), [40, 99]]
    target = np.concatenate(runs).astype(np.int32)
    row = rng.integers(0, rows, target.size).astype(np.int32)
    theta = np.where(row == 7, 0.0, rng.standard_normal(target.size)).astype(np.float32)
    before = jnp.asarray(rng.standard_normal((classes, hidden)), DTYPES[dtype])
    x = jnp.asarray(x, DTYPES[dtype])
    arrays = (before if vocab_axis == 0 else before.T, x, jnp.asarray(target), jnp.asarray(row), jnp.asarray(theta))
    found = target_grad.add_targets(*arrays, classes=40, vocab_axis=vocab_axis)
    expected = wide(before)
    for y, i, t in zip(target, row, theta, strict=True):
        if 0 <= y < classes and t:
            expected[y] += t * wide(x[i])
    assert found.dtype == DTYPES[dtype]
    assert_close("d_weight", found if vocab_axis == 0 else found.T, expected, EPSILON[dtype] + 1e-6)
    assert (np.asarray(found if vocab_axis == 0 else found.T)[[0, 1, 5]] == np.asarray(before)[[0, 1, 5]]).all()


def test_vmap_runs_elements_one_after_the_other() -> None:
    case = Case("float32")
    problem = Problem(case)
    options = {**case.static_args, "classes": case.classes, "stores": False, "statistics": 0}

    def run(ref_exponent: jax.Array) -> jax.Array:
        return exponentials(problem, ref_exponent, START, **options)[1]

    ref_exponents = jnp.asarray(problem.ref_exponent) + jnp.arange(2.0)[:, None]
    sums = jax.vmap(run)(ref_exponents)
    assert_close("sums", sums[1] * 2, wide(sums[0]), 1e-7)
    assert_close("sums", sums[0], np.exp2(problem.logits * LOG2_E - problem.ref_exponent[:, None]).sum(1), FLOAT32)


def test_limits() -> None:
    assert triton_limits(jnp.bfloat16, 33, 50257, 1) is None
    assert "float64" in str(triton_limits(jnp.float64, 64, 1000, 0))
    assert "0 classes" in str(triton_limits(jnp.float32, 64, 0, 0))
    assert "vocab_axis" in str(triton_limits(jnp.float32, 64, 1000, 2))


SHAPES = {
    "llama": (2048, 4096, 128256),
    "qwen": (1664, 896, 151936),
    "gemma": (1024, 2304, 256000),
    "gpt2": (1000, 768, 50257),
    "small": (1000, 960, 5000),
}
ROW_FUNCTIONS = ("pick", "join_blocks", "finish_rows", "sort_by_target", "add_target_rows")
OTHER_TARGETS = ("h200", "rtx4090", "rtxpro6000")
FUNCTIONS = ("exponentials", "sums", "repair", "statistics", "d_logits", *ROW_FUNCTIONS)
NO_SPILLS = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"


def compile_all(target: str, programs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not COMPILER.is_dir():
        pytest.fail(f"{COMPILER} is missing: run `make test`, which installs it")
    environment = {
        **os.environ,
        **gpu_compiler(),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(COMPILER)]),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {NO_SPILLS}",
    }
    command = [sys.executable, __file__, str(HERE / f"targets/{target}.pbtxt"), json.dumps(programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(results: list[dict[str, Any]]) -> None:
    """Fails if a program has other temporaries than each tile's sums over classes, for example a copy of the head."""
    for result in results:
        n, _, v = SHAPES[result["shape"]]
        blocks = -(-v // 128)
        assert result["temporaries"] <= 4 * 4 * n * blocks + 2**20, f"{result}: temporaries exceed the tiles' sums"


@pytest.mark.parametrize("target", ["a100", *(pytest.param(name, marks=SLOW) for name in OTHER_TARGETS)])
def test_kernels_compile_and_fit(target: str) -> None:
    check(compile_all(target, [{"shape": "llama", "dtype": "bfloat16", "functions": FUNCTIONS}]))


@SLOW
@pytest.mark.parametrize("target", ["a100", "rtx4090", "rtxpro6000"])
def test_kernels_with_options_compile_and_fit(target: str) -> None:
    capped = {"shape": "gemma", "dtype": "bfloat16", "vocab_axis": 1, "options": True, "softcap": 30.0}
    exact = {"shape": "small", "dtype": "float32", "functions": ["exponentials"]}
    check(compile_all(target, [{**capped, "functions": ["repair", "repair_by_row", "finish_rows", "d_logits"]}, exact]))


# With 393 class blocks and the largest logits, ptxas spills a few registers of this short kernel for sm_120.
SPILLS = {("rtxpro6000", "gpt2"): ("join_blocks",)}


@SLOW
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["a100", *OTHER_TARGETS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_more_shapes_compile_and_fit(target: str, dtype: str) -> None:
    every = [
        {"shape": shape, "dtype": dtype, "vocab_axis": axis, "options": options, "softcap": softcap}
        for shape in SHAPES
        for axis, options, softcap in (
            (0, False, None),
            (0, True, None),
            (1, False, None),
            (0, False, 30.0),
            (1, True, 30.0),
        )
    ]

    def functions(shape: str) -> list[str]:
        return [name for name in (*FUNCTIONS, "repair_by_row") if name not in SPILLS.get((target, shape), ())]

    check(compile_all(target, [{**program, "functions": functions(program["shape"])} for program in every]))


def compile_one(
    mesh: Any, function: str, shape: str, dtype: str, vocab_axis: int = 0, options: bool = False, softcap: Any = None
) -> Any:
    """Compiles a function. `options` adds a bias, class weights and statistics."""
    n, d, v = SHAPES[shape]

    def array(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    x = array(8192, d, dtype=DTYPES[dtype])
    w = array(*((v, d) if vocab_axis == 0 else (d, v)), dtype=DTYPES[dtype])
    scalar, index, row = array(dtype=jnp.int32), array(n, dtype=jnp.int32), array(n)
    classes, maybe = (array(v), row) if options else (None, None)
    static_args = {"rows": n, "vocab_axis": vocab_axis, "logit_scale": 1.0, "softcap": softcap}
    vocab_chunk = {**static_args, "classes": min(v, 8192)}
    shifts = SHIFTS * (dtype == "float16" and function == "exponentials")
    stores = {**static_args, "classes": v, "stores": function != "sums", "statistics": 31 * options | shifts}
    e_dtype = jnp.float16 if dtype == "float16" else jnp.bfloat16
    e, size = array(n, -(-v // 64) * 64, dtype=e_dtype), 8192 + 2048
    of_call, targets = array(size), array(size, dtype=jnp.int32)
    flags = array(4 * (1 + -(-n // 128)), dtype=jnp.int32)
    rows = row_kernels.CallRows(
        targets, of_call, of_call, of_call, flags, of_call, of_call, of_call, of_call if options else None, of_call
    )
    place, blocks = array(4, dtype=jnp.int32), array(-(-v // 128), n)
    tops = blocks if options else None
    found = row_kernels.Exponentials(None, blocks, tops, array(1, n), array(1, n))
    joined, repaired = row_kernels.Joined(row, maybe), row_kernels.Repaired(blocks, array(1, n), array(1, n))

    def call_problem(x: Any, w: Any, bias: Any, class_weight: Any = None) -> CallProblem:
        of_rows: Any = None
        spec = LossSpec("sum", softcap=softcap)
        return CallProblem(x, w, bias, of_rows, of_rows, class_weight, spec, v, vocab_axis=vocab_axis)

    def repair(x: Any, w: Any, bias: Any, rows: Any, place: Any, e: Any, total: Any) -> Any:
        ours = call_problem(x, w, bias)
        statistics = BY_ROW if function == "repair_by_row" else OF_LOGITS * options
        return kernels.repair(ours, x, rows, place, n, with_e(e), total, statistics)

    def exponentials(*arrays: Any) -> Any:
        return kernels.exponentials(*arrays, **stores)

    def pick(x: Any, w: Any, bias: Any, target: Any, row_weight: Any) -> Any:
        ours = call_problem(x, w, bias)
        flags = 4 * row_kernels.chunk_flags(n)
        return row_kernels.pick(ours, target, row_weight, flags=flags, holds=True, largest=options, gradients=True)

    def join_blocks(rows: Any, place: Any, sums: Any, tops: Any) -> Any:
        return row_kernels.join_blocks(rows, place, n, sums, tops)

    def finish_rows(*arrays: Any) -> Any:
        x, w, rows, place, e, found, joined, repaired, class_weight = arrays
        ours = call_problem(x, w, None, class_weight)
        numbers = row_kernels.ChunkNumbers(ours, found._replace(e=e), None, joined, repaired, 128)
        return row_kernels.finish_rows(numbers, rows, place, n, x, by_row=options)

    def sort_by_target(target: Any, row_weight: Any, theta: Any) -> Any:
        return target_grad.sort_by_target(target, row_weight, theta, 9000, v)

    def statistics(*arrays: Any) -> Any:
        *arrays_, target = arrays
        return kernels.statistics(
            *arrays_, target=target, weighted=options, statistics=OF_LOGITS * options, **vocab_chunk
        )

    def d_logits(*arrays: Any) -> Any:
        return kernels.d_logits(*arrays, **vocab_chunk)

    def add_target_rows(*arrays: Any) -> Any:
        return target_grad.add_targets(*arrays, classes=v, vocab_axis=vocab_axis)

    of_rows = (index, row, row, row, maybe, maybe, array(n, dtype=jnp.bool_))
    calls: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
        "exponentials": (exponentials, (x, w, classes, row, index, scalar), ()),
        "sums": (exponentials, (x, w, classes, row, index, scalar), ()),
        "repair": (repair, (x, w, classes, rows, place, e, None), (3, 5)),
        "repair_by_row": (repair, (x, w, classes, rows, place, e, row), (3, 5)),
        "pick": (pick, (x, w, classes, targets, of_call), ()),
        "join_blocks": (join_blocks, (rows, place, blocks, tops), (0,)),
        "finish_rows": (finish_rows, (x, w, rows, place, e, found, joined, repaired, classes), (0, 2, 4)),
        "sort_by_target": (sort_by_target, (targets, of_call, of_call), ()),
        "statistics": (statistics, (x, w, classes, classes, scalar, scalar, scalar, index), ()),
        "d_logits": (d_logits, (x, w, classes, classes, *of_rows, scalar, scalar, scalar), ()),
        "add_target_rows": (add_target_rows, (w, x, index, index, row), (0,)),
    }
    call, arrays, donated = calls[function]
    with jax.set_mesh(mesh):
        return jax.jit(call, donate_argnums=donated).lower(*arrays).compile()


def main() -> None:
    warnings.simplefilter("error")  # the backend's deprecation warning does not reach the caller
    target, programs = Path(sys.argv[1]).read_text(), json.loads(sys.argv[2])
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    for program in programs:
        options = {key: value for key, value in program.items() if key != "functions"}
        for function in program["functions"]:
            executable = compile_one(mesh, function, **options)
            temporaries = executable.memory_analysis().temp_size_in_bytes
            print(json.dumps({**options, "function": function, "temporaries": temporaries}), flush=True)


if __name__ == "__main__":
    main()


def test_a_collective_begins_first() -> None:
    """On a GPU an operand of a matmul waits in a kernel, in place. On a CPU it does not."""
    call, e = jax.jit(vocab_shard.after_begin), jnp.ones((4, 8), jnp.bfloat16)
    np.testing.assert_array_equal(call(e), e)
    device = AbstractDevice("NVIDIA H100 80GB HBM3", 1, "gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = call.trace(e).lower(lowering_platforms=("cuda",)).as_text()
    assert "let_begin_kernel" in text
    assert "output_operand_alias<output_tuple_indices = [0], operand_index = 1, operand_tuple_indices = []>" in text
