"""Tests the rows that jax_pallas saves for the backward pass: gradients, matmuls, memory, errors, transformations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import ARGUMENTS, problem, replaced

import jax_pallas
from jax_pallas.ops import RESIDUAL
from linear_ce.chunking import SAVED_FIXED_BYTES, SAVED_ROW_BYTES
from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import Case, cases
from parity.expected import compare, expected

FUNCTIONS = ("none", "log_probs")
ALL = 2**24  # bytes: more than the rows of these problems


def results(function: str, arrays: dict[str, Any], **options: Any) -> Array:
    """Returns the losses, or minus the log-probabilities, of all rows."""
    if function == "log_probs":
        return -jax_pallas.linear_log_probs(**arrays, **options).log_prob
    return jax_pallas.linear_cross_entropy(**arrays, reduction="none", **options)


def gradients(
    function: str,
    arrays: dict[str, Any],
    names: tuple[str, ...] = ARGUMENTS,
    upstream: Array | None = None,
    transform: Any = jax.jit,
    **options: Any,
) -> dict[str, Array]:
    chosen = {name: arrays[name] for name in names if name in arrays}
    losses, pull_back = jax.vjp(transform(lambda d: results(function, arrays | d, **options)), chosen)
    return pull_back(jnp.asarray(np.linspace(-1, 2, losses.size), jnp.float32) if upstream is None else upstream)[0]


def budget_of(rows: int, arrays: dict[str, Any]) -> int:
    """Returns the bytes that so many rows take."""
    x, w = arrays["input"], arrays["linear_weight"]
    per_row = SAVED_ROW_BYTES + x.dtype.itemsize * (x.shape[1] + -(-len(w) // 64) * 64)
    return SAVED_FIXED_BYTES + -(-rows // 8) * 8 * per_row


def assert_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    for name, one in want.items():
        one = np.asarray(one, np.float32)
        assert np.linalg.norm(np.asarray(got[name], np.float32) - one) <= tolerance * np.linalg.norm(one), name


NAMES = (
    "none-fp32-smoothing-zloss-scale-mask-ignored-tight-upstream-n4x63",
    "log_probs-fp32-padded-bias-axis1-tight-n50",
    "edge-target_range-none-fp32",
    "edge-nan_masked-none-fp32",
    "edge-log_probs-logits80-fp16",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i in (1, 3) else ()) for i, name in enumerate(NAMES)]
)
def test_cases_are_within_their_budgets(name: str) -> None:
    case = next(case for case in cases() if case.name == name)
    case = replace(case, saved_budget=ALL, unused=("entropy", "lse") if case.function == "log_probs" else ())
    arrays = make_arrays(case)
    found = compare(case, expected(case, arrays), run_case("jax-chunked", case, arrays).outputs)
    assert not {name: one.percent for name, one in found.items() if not one.percent <= 100}


EDGES = [case for case in cases() if "saved" in case.name]


# Rows that do not count are among those of a quick call in bfloat16. test_jax_pallas_shard_rows.py saves rows of
# float16 by the kernels.
@pytest.mark.slow
@pytest.mark.parametrize("case", EDGES, ids=lambda case: case.name)
def test_the_kernels_are_within_the_budgets_of_cases(case: Case) -> None:
    arrays = make_arrays(case)
    found = compare(case, expected(case, arrays), run_case("jax-pallas_triton", case, arrays).outputs)
    assert not {name: one.percent for name, one in found.items() if not one.percent <= 100}


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        ("none", "float32"),
        ("log_probs", "float16"),
        *(pytest.param("none", dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16")),
        *(pytest.param("log_probs", dtype, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
    ],
)
def test_a_part_of_the_rows_is_saved(function: str, dtype: Any) -> None:
    arrays = problem(700, 8, 301, dtype=dtype)
    arrays["target"] = replaced(np.asarray(arrays["target"]) % 290, np.s_[::7], -100)
    # Several chunks of rows and of the vocabulary.
    options: dict[str, Any] = {"softcap": 4.0, "logit_scale": 0.5, "vocab_size": 290, "memory_budget": 80_000}
    budget = budget_of(600, arrays)
    want, got = (gradients(function, arrays, **options, saved_budget=saved) for saved in (0, budget))
    assert_close(got, want, {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}[dtype])


# By whether input and linear_weight are differentiated.
MATMULS = {(True, True): 3, (True, False): 2, (False, True): 2}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("names", [ARGUMENTS[:2], ("input",), ("linear_weight",)], ids="-".join)
def test_saved_rows_take_three_matmuls(function: str, names: tuple[str, ...]) -> None:
    arrays = problem()

    def call(arrays: dict[str, Any]) -> Any:
        return gradients(function, arrays, names, transform=lambda function: function, saved_budget=ALL)

    program = jax.jit(call).lower(arrays)
    count = program.as_text().count("stablehlo.dot_general")
    assert count == MATMULS["input" in names, "linear_weight" in names]
    assert_close(program.compile()(arrays), gradients(function, arrays, names))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_is_saved_without_gradients(function: str) -> None:
    text = jax.jit(lambda arrays: results(function, arrays, saved_budget=ALL)).lower(problem()).as_text()
    assert text.count("stablehlo.dot_general") == 1


@pytest.mark.parametrize("n", [257, 700])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_is_within_both_budgets(function: str, n: int) -> None:
    arrays = problem(n, 64, 500, bias=False)
    saved_budget, memory_budget = budget_of(min(n, 600), arrays), 2**21
    others = {name: arrays[name] for name in ("target",)}

    def loss(x: Array, w: Array) -> Array:
        options = {"saved_budget": saved_budget, "memory_budget": memory_budget}
        return results(function, {"input": x, "linear_weight": w, **others}, **options)

    def forward(x: Array, w: Array) -> Any:
        losses, pull_back = jax.vjp(loss, x, w)
        return losses, pull_back

    operands = arrays["input"], arrays["linear_weight"]
    run: Any = jax.jit(forward).lower(*operands).compile()
    losses, pull_back = run(*operands)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull_back)) - sum(one.nbytes for one in operands)
    assert 0.8 * saved_budget < kept <= saved_budget + 6 * 4 * n  # the results, and the row weights
    # The results of the forward pass, which are kept, are no temporaries.
    backward: Any = jax.jit(lambda pull_back, upstream: pull_back(upstream)).lower(pull_back, losses).compile()
    for program in (run, backward):
        assert program.memory_analysis().temp_size_in_bytes <= memory_budget


@pytest.mark.parametrize(
    ("function", "implementation"),
    [
        ("none", "chunked"),
        pytest.param("log_probs", "chunked", marks=pytest.mark.slow),
        pytest.param("none", "pallas_triton", marks=pytest.mark.slow),
        ("log_probs", "pallas_triton"),
    ],
)
def test_rows_that_do_not_count_change_nothing(function: str, implementation: str) -> None:
    """An ignored row under an upstream gradient of NaN, and a row of NaN and one without a class under one of 0. The
    others have the entropies and the gradients of a call in float32 that saves nothing."""
    dtype: Any = "float32" if implementation == "chunked" else {"none": "float16", "log_probs": "bfloat16"}[function]
    arrays, upstream = problem(13, 16, 128, dtype=dtype), np.linspace(0.5, 2.0, 13, dtype=np.float32)
    options: dict[str, Any] = {"saved_budget": ALL, "implementation": implementation}

    def outputs(arrays: dict[str, Any], upstream: Any, **options: Any) -> tuple[dict[str, Array], Any]:
        def losses(chosen: dict[str, Any]) -> tuple[Array, Any]:
            if function == "none":
                return results(function, arrays | chosen, **options), None
            found = jax_pallas.linear_log_probs(**arrays | chosen, **options)
            return -found.log_prob, found.entropy

        _, pull_back, entropy = jax.vjp(losses, {name: arrays[name] for name in ARGUMENTS}, has_aux=True)
        return pull_back(upstream)[0], entropy

    kept = [row for row in range(13) if row not in (1, 4, 7)]
    ignored = arrays | {"target": replaced(arrays["target"], [1, 4, 7], -100)}
    run = jax.jit(partial(outputs, **options)).lower(ignored, upstream).compile()  # once for three calls
    want, entropy = run(ignored, upstream)
    arrays["input"] = replaced(arrays["input"], [1, 4], np.nan)
    arrays["target"] = replaced(arrays["target"], [1, 7], [-100, 199])
    got, _ = run(arrays, replaced(upstream, [1, 4, 7], [np.nan, 0, 0]))
    assert_close(got, want, 1e-5 if implementation == "chunked" else 4e-3)
    d_input = np.asarray(got["input"])
    assert not d_input[[1, 4, 7]].any()
    assert d_input[kept].any()
    counted, _ = run(arrays, replaced(upstream, [1, 4, 7], [np.nan, 1, 0]))
    assert jnp.isnan(counted["linear_weight"]).all()
    in_float32 = {name: np.asarray(ignored[name], np.float32) for name in ARGUMENTS}
    unsaved, of_unsaved = jax.jit(outputs)(ignored | in_float32, upstream)
    assert_close(want, unsaved, 1e-5 if implementation == "chunked" else 4e-3)
    if entropy is not None:
        np.testing.assert_allclose(entropy, of_unsaved, rtol=1e-5)


def test_a_gradient_of_the_entropy_uses_the_other_backward_pass() -> None:
    arrays = problem()

    def value(arrays: dict[str, Any], saved_budget: int) -> Array:
        found = jax_pallas.linear_log_probs(**arrays, saved_budget=saved_budget)
        return (found.log_prob + 0.1 * found.entropy).sum()

    names = {name: arrays[name] for name in ARGUMENTS}
    got, want = (jax.grad(lambda d, saved=saved: value(arrays | d, saved))(names) for saved in (ALL, 0))
    assert_close(got, want)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_checkpoint(function: str) -> None:
    arrays = problem()
    got = gradients(function, arrays, transform=jax.checkpoint, saved_budget=ALL)
    assert_close(got, gradients(function, arrays))


def test_a_policy_keeps_what_is_saved() -> None:
    """Under it, jax.checkpoint does not run the forward pass again."""
    arrays, policy = problem(bias=False), jax.checkpoint_policies.save_only_these_names(RESIDUAL)

    def call(arrays: dict[str, Any]) -> Any:
        def transform(function: Any) -> Any:
            return jax.checkpoint(function, policy=policy)

        return gradients("none", arrays, transform=transform, saved_budget=ALL)

    assert jax.jit(call).lower(arrays).as_text().count("stablehlo.dot_general") == 3


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("axis", ["rows", "head"])
def test_vmap(function: str, axis: str) -> None:
    arrays, batch = problem(36, 8, 50, bias=False), 3
    rows = {name: arrays[name].reshape(batch, 12, *arrays[name].shape[1:]) for name in ("input", "target")}
    head = arrays["linear_weight"]

    def grads(x: Array, y: Array, w: Array) -> Any:
        return gradients(
            function, {"input": x, "target": y, "linear_weight": w}, transform=lambda f: f, saved_budget=ALL
        )

    heads = jnp.stack([head, 2 * head, head / 2])
    w, in_axis = (head, None) if axis == "rows" else (heads, 0)
    alone = jax.jit(lambda arrays: gradients(function, arrays, transform=lambda function: function))
    got = jax.vmap(grads, (0, 0, in_axis))(rows["input"], rows["target"], w)
    for i in range(batch):
        of_i = {
            "input": rows["input"][i],
            "target": rows["target"][i],
            "linear_weight": head if axis == "rows" else heads[i],
        }
        assert_close(jax.tree.map(lambda one, i=i: one[i], got), alone(of_i))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_batch_of_losses_saves_as_many_rows_of_each_element(function: str) -> None:
    """The batch is one call then."""
    arrays = problem(1800, 4, 64, bias=False)
    part = {name: arrays[name][:600] for name in ("input", "target")} | {"linear_weight": arrays["linear_weight"]}

    def value(w: Array, x: Array, y: Array) -> Array:
        rows = {"input": x, "target": y, "linear_weight": w}
        return results(function, rows, saved_budget=budget_of(600, part)).sum()

    def summed(w: Array) -> Array:
        parts = (arrays[name].reshape(3, 600, *arrays[name].shape[1:]) for name in ("input", "target"))
        return jax.vmap(value, (None, 0, 0))(w, *parts).sum()

    text = jax.jit(jax.grad(summed)).lower(arrays["linear_weight"]).as_text()
    assert text.count("stablehlo.dot_general") == 2  # and three if the budget held a part of the rows


@pytest.mark.parametrize("names", [ARGUMENTS[:2], pytest.param(("input",), marks=pytest.mark.slow)], ids="-".join)
def test_upstream_gradients_of_very_different_sizes(names: tuple[str, ...]) -> None:
    """Rows of float16 with upstream gradients from 1e-6 to 1e3, whose targets have up to 1 - 1e-7 of the probability,
    in several chunks: the gradients are exact, and that of each row is that of a call that saves nothing."""
    n, d, v = 140, 64, 64
    arrays, row = problem(n, d, v, dtype="float16", bias=False), np.arange(n)
    x, w = (np.asarray(arrays[name], np.float32) for name in ARGUMENTS[:2])
    of_target, x = w[arrays["target"]], 0.2 * x
    more = (8 + row % 4 * 6 - (of_target * x).sum(1)) / np.square(of_target).sum(1)
    arrays["input"] = jnp.asarray(x + more[:, None] * of_target, "float16")
    upstream = jnp.asarray(10.0 ** np.random.default_rng(0).permutation(np.linspace(-6, 3, n)) * (1 - 2 * (row % 2)))
    options: dict[str, Any] = {"saved_budget": ALL, "memory_budget": 100_000, "implementation": "pallas_triton"}
    made = jax_pallas.explain(arrays["input"], arrays["linear_weight"], reduction="none", **options)
    assert made.plan.scaled_exp_config.rows < n
    got = gradients("log_probs", arrays, names, upstream, **options)
    exact = arrays | {name: arrays[name].astype("float32") for name in ARGUMENTS[:2]}
    assert_close(got, gradients("log_probs", exact, names, upstream), 1e-3)
    if len(names) > 1:  # one more program takes seconds
        return
    unsaved = gradients("log_probs", arrays, names, upstream, implementation="pallas_triton")["input"]
    mine, theirs = (np.asarray(one, np.float32) for one in (got["input"], unsaved))
    limit = 1e-3 * np.linalg.norm(theirs, axis=1) + 2.0**-25 * d**0.5
    assert (np.linalg.norm(mine - theirs, axis=1) <= limit).all()


LEAST: list[tuple[str, str, tuple[int, int, int], dict[str, Any]]] = [
    ("none", "float16", (20, 64, 300), {}),
    ("none", "float32", (20, 64, 300), {"saved_budget": ALL}),
    ("log_probs", "bfloat16", (1000, 128, 1024), {"softcap": 3.0, "saved_budget": 2**21}),
    ("log_probs", "float32", (20, 64, 300), {"saved_budget": ALL}),
    ("log_probs", "bfloat16", (20, 64, 300), {"implementation": "mosaic"}),
    ("none", "bfloat16", (20, 64, 300), {"implementation": "mosaic"}),
    ("none", "float16", (1000, 128, 1024), {"implementation": "pallas_triton", "saved_budget": 2**21}),
]


@pytest.mark.parametrize(("function", "dtype", "sizes", "options"), LEAST)
def test_the_smallest_budget_is_that_of_all_passes(
    function: str, dtype: str, sizes: tuple[int, int, int], options: dict[str, Any]
) -> None:
    n, d, v = sizes
    x, w = shapes_of(n, d, v, dtype)

    def traced(memory_budget: int) -> None:
        def loss(x: Array, w: Array) -> Array:
            rows = {"input": x, "linear_weight": w, "target": jnp.zeros(n, jnp.int32)}
            if function == "log_probs":
                found = jax_pallas.linear_log_probs(**rows, memory_budget=memory_budget, **options)
                return (found.log_prob + found.entropy).sum()
            return results(function, rows, memory_budget=memory_budget, **options).sum()

        jax.eval_shape(jax.grad(loss, (0, 1)), x, w)

    def explained(memory_budget: int) -> None:
        device = "h200" if options.get("implementation") == "mosaic" else None  # a CPU cannot run it
        jax_pallas.explain(x, w, reduction="none", memory_budget=memory_budget, device=device, **options)

    def least(call: Callable[[int], None]) -> int:
        with pytest.raises(ValueError, match="memory_budget must be at least") as refused:
            call(1)
        return int(str(refused.value).split()[5])

    smallest = least(traced)
    traced(smallest)
    assert function == "log_probs" or smallest == least(explained)


def test_scan() -> None:
    arrays = problem(36, 8, 50, bias=False)
    parts = tuple(arrays[name].reshape(3, 12, *arrays[name].shape[1:]) for name in ("input", "target"))

    def value(w: Array, saved_budget: int) -> Array:
        def step(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            of_part = {"input": part[0], "target": part[1], "linear_weight": w}
            losses = results("log_probs", of_part, saved_budget=saved_budget)
            return total + (losses * jnp.linspace(-1.0, 2.0, 12)).sum(), None

        return jax.lax.scan(step, jnp.float32(0), parts)[0]

    got, want = (jax.grad(value)(arrays["linear_weight"], saved_budget) for saved_budget in (ALL, 0))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_bad_saved_budgets_are_named() -> None:
    arrays = problem()
    for value, kind, message in (
        (-1, ValueError, r"saved_budget must not be negative \(bytes\), got -1"),
        (1.5, TypeError, "saved_budget must be a Python int, got float"),
    ):
        for function in FUNCTIONS:
            with pytest.raises(kind, match=message):
                results(function, arrays, saved_budget=value)
    with pytest.raises(ValueError, match="saved_budget needs reduction \"none\", got reduction 'mean'"):
        jax_pallas.linear_cross_entropy(**arrays, saved_budget=1)
    into: dict[str, Any] = {"grad_into": jnp.zeros((50, 8))}
    split: dict[str, Any] = {"head_precision": "float32"}
    with pytest.raises(ValueError, match=r"saved_budget must be 0 with grad_into: .*, got 1"):
        jax_pallas.linear_cross_entropy_with_stats(**arrays, saved_budget=1, **into)
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match=r'saved_budget must be 0 with head_precision "float32": .*, got 1'):
            results(function, arrays, saved_budget=1, **split)
    for options in (into, split):
        with pytest.raises(ValueError, match="saved_budget must be 0 with"):
            jax_pallas.explain(arrays["input"].astype("bfloat16"), arrays["linear_weight"], saved_budget=1, **options)
    (n,) = jax.export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((n, 8), "float32"), jax.ShapeDtypeStruct((n,), "int32")

    def symbolic(x: Array, y: Array) -> Any:
        return gradients("none", {**arrays, "input": x, "target": y}, upstream=y * 1.0, saved_budget=ALL)

    with pytest.raises(ValueError, match="saved_budget must be 0 where the number of tokens is symbolic"):
        jax.export.export(jax.jit(symbolic))(*shapes)


def shapes_of(n: int, d: int, v: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((n, d), dtype), jax.ShapeDtypeStruct((v, d), dtype)


@pytest.mark.parametrize("options", [{}, {"saved_budget": 2**30}])
def test_explain_says_what_is_saved(options: dict[str, int]) -> None:
    x, w = shapes_of(16384, 2048, 128256, "bfloat16")
    given: dict[str, Any] = {"saved_budget": 2**35, **options}
    explained = jax_pallas.explain(x, w, reduction="none", device="h100", **given)
    lines = dict(line.split(": ", 1) for line in str(explained).splitlines())
    line = lines["saved"]
    assert ("log-probabilities take 4.25 if" if options else "log-probabilities take 5 if") in line
    assert ("other rows" in lines) == bool(options)
    assert ("3.75 matmuls" if options else "3 matmuls") in line
    assert explained.plan.saved is not None
    assert explained.plan.saved.bytes <= given["saved_budget"]


@pytest.mark.parametrize(("dtype", "smoothing"), [("float32", 0.0), ("float16", 0.1), ("bfloat16", 0.1)])
def test_kernels_without_such_exponentials_refuse_the_budget(dtype: str, smoothing: float) -> None:
    x, w = shapes_of(8, 64, 1024, dtype)
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing, "saved_budget": ALL}
    message = f"saved_budget must be 0 with {f'label_smoothing {smoothing}' if smoothing else f'a {dtype} input'}, of"
    with pytest.raises(ValueError, match=f"{message} .*: use implementation='chunked'"):
        jax_pallas.explain(x, w, implementation="pallas_triton", **options)
    arrays = problem(8, 64, 1024, dtype=dtype, bias=False)
    with pytest.raises(ValueError, match=message):  # an error even where no row would be saved
        gradients("none", arrays, implementation="pallas_triton", label_smoothing=smoothing, saved_budget=1)
    assert jax_pallas.explain(x, w, implementation="chunked", **options).plan.saved


@pytest.mark.parametrize(
    ("hidden", "classes", "head", "device", "message"),
    [
        (64, 1000, "bfloat16", "a100", "with 1000 classes in 1000 rows, because these kernels save rows of a multiple"),
        (64, 1024, "float32", "a100", "with a float32 linear_weight, under which the kernels save nothing"),
        (72, 1024, "float16", "h100", "here, because the Hopper kernels of gradients need a hidden size that is a"),
        (72, 1024, "bfloat16", "h100", "here, because the Hopper kernels of gradients need a hidden size that is a"),
    ],
)
def test_the_reason_for_which_kernels_save_nothing(
    hidden: int, classes: int, head: str, device: str, message: str
) -> None:
    dtype = "float16" if head == "float16" else "bfloat16"
    arrays = shapes_of(8, hidden, 1, dtype)[0], shapes_of(8, hidden, classes, head)[1]
    with pytest.raises(ValueError, match=f"saved_budget must be 0 {message}.*: use implementation='chunked'"):
        jax_pallas.explain(*arrays, reduction="none", saved_budget=1, device=device)
