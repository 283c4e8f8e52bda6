"""The floor of the benchmark, with and without padding of V."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import linear_ce
from benchmarks.methods import FLOOR_V_MULTIPLE, floor_padding
from benchmarks.shapes import MODES, SHAPES
from benchmarks.timing import Pairs


@pytest.mark.parametrize(("padded_ms", "expected"), [(0.5, 47), (1.5, 0)])
def test_the_floor_is_the_faster_of_both(padded_ms: float, expected: int) -> None:
    def time_pairs(calls: Sequence[Any], *_: Any) -> Pairs:
        assert [call() for call in calls] == [0, 47]
        return Pairs([1.0] * 5, [padded_ms] * 5, [])

    def matmuls(padding: int) -> Any:
        return lambda: padding

    assert floor_padding(50257, matmuls, time_pairs) == expected
    assert floor_padding(128256, matmuls, lambda *_: pytest.fail("there is nothing to compare")) == 0


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_padded_floor_runs_the_matmuls_of_the_padded_weight(framework: str) -> None:
    shape = SHAPES["smoke"]
    bench = linear_ce.open_bench(framework, "cpu")
    padding = -shape.v % FLOOR_V_MULTIPLE
    for faster, v in ((0, shape.v), (padding, shape.v + padding)):
        problem: Any = bench.problem(shape, "bfloat16", "peaked")
        problem._paddings[True, True] = faster
        floor = problem.floor(MODES["train"])
        assert floor.padding == faster
        matmuls = floor.run()
        if framework == "torch":
            matmuls = [problem._floors[faster][name] for name in ("logits", "d_input", "d_weight")]
        logits, d_input, d_weight = matmuls
        assert (logits.shape[1], *d_weight.shape) == (v, v, shape.d)
        assert d_input.shape[1] == shape.d
        assert float(abs(d_weight[shape.v :]).sum()) == float(abs(logits[:, shape.v :]).sum()) == 0
        assert float(abs(d_input).sum()) > 0
        problem.forget()
        assert problem.floor(MODES["train"]).padding == faster


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1 / SHAPES["smoke"].n), ("float16", 1.0)])
def test_d_logits_of_the_floor_do_not_underflow(framework: str, dtype: str, scale: float) -> None:
    """In float16, most d_logits of a mean are 0, and a matmul of zeros is faster."""
    problem: Any = linear_ce.open_bench(framework, "cpu").problem(SHAPES["smoke"], dtype, "random")
    problem._matmuls(MODES["train"], 0)
    d_logits = problem._floors[0]["d_logits"] if framework == "torch" else problem._floor_arrays[0][2]
    assert 0.5 * scale < float(abs(d_logits).max()) < 1.01 * scale
