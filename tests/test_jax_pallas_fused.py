"""jax_pallas.fused through its public functions: what chunks, options and gradients make of the kernels, which run in
Pallas' interpreter, and where a call goes."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from jax_problem import problem
from judged import check

from jax_pallas import launch
from jax_pallas.fused_tiles import choose_anchored, choose_recomputed
from jax_pallas.linear_ce import IMPLEMENTATIONS, explain, linear_cross_entropy
from parity.cases import Case, cases
from parity.spec import LossSpec

BF16: dict[str, Any] = {"dtype": "bfloat16"}
SHARED: dict[str, Any] = {"lead": (150,), "hidden": 64, "vocab": 320, "has_bias": True}
EVERY_DAY = [
    Case(name="exponentials", **SHARED, **BF16),
    Case(name="exponentials-chunks", tight_memory=True, ignored="some", poison=("ignored_rows",), **SHARED, **BF16),
    Case(name="exponentials-cap-dv", spec=LossSpec(softcap=3.0, logit_scale=0.7), vocab_axis=1, **SHARED, **BF16),
    Case(name="recomputed-smoothing", spec=LossSpec(label_smoothing=0.1), **SHARED, **BF16),
    Case(name="recomputed-fp16", dtype="float16", **SHARED),
    Case(name="none", spec=LossSpec("none"), **SHARED, **BF16),
]


@pytest.mark.parametrize("case", EVERY_DAY, ids=lambda case: case.name)
def test_every_plan_by_triton_kernels(case: Case) -> None:
    check("jax-pallas_triton", case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    check("jax-pallas_triton", case)


def grown(tokens: int, budget: int, **changes: Any) -> Any:
    numbers: dict[str, Any] = {
        "hidden": 4096,
        "classes": 128256,
        "itemsize": 2,
        "statistics": False,
        "scratch": lambda rows, most: 0,
    }
    return choose_anchored(**numbers | {"stores": True, "holds": True, "tokens": tokens, "budget": budget} | changes)


def test_chunks_of_exponentials_fill_the_budget_and_no_more() -> None:
    default = grown(8192, 2**29)
    assert default.rows == 2048
    assert default.bytes <= 2**29
    assert grown(8192, 2**31).rows == 8192
    assert grown(8192, 2**29, holds=False).rows < 2048
    assert grown(65536, 2**29).rows == 2048
    assert grown(8192, 2**29, stores=False, holds=False).bytes <= 2**26
    assert grown(8192, 2**29, scratch=lambda rows, most: most).rows < 2048


def test_a_budget_too_small_for_exponentials_names_the_least() -> None:
    with pytest.raises(ValueError, match="at least"):
        grown(8192, 2**20)
    least = grown(16, 2**30).bytes
    assert grown(16, least).rows == 16
    with pytest.raises(ValueError, match=f"at least {least} bytes for 16 tokens and 128256 classes, got {least - 1}"):
        grown(16, least - 1)


def test_slabs_of_recomputed_logits_fit() -> None:
    numbers: dict[str, Any] = {
        "hidden": 4096,
        "classes": 128256,
        "itemsize": 2,
        "statistics": 2,
        "float16": False,
        "converts": False,
    }
    for tokens in (1, 100, 8192, 65536):
        config = choose_recomputed(**numbers, tokens=tokens, d_input=True, d_weight=True, budget=2**29)
        assert 0 < config.rows <= tokens
        assert config.slab % 64 == 0
        assert config.first_slab == 128256


def test_kernels_are_asked_for_by_name() -> None:
    arrays = problem(dtype=jnp.bfloat16)
    assert explain(arrays["input"], arrays["linear_weight"]).name == "chunked"
    assert explain(arrays["input"], arrays["linear_weight"], implementation="pallas_triton").name == "pallas_triton"


def test_a_named_implementation_that_cannot_serve_says_why() -> None:
    arrays = problem(dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"implementation .mosaic. cannot serve this call: .*float32"):
        linear_cross_entropy(**arrays, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation must be one of"):
        linear_cross_entropy(**arrays, implementation="cuda")
    assert set(launch.NAMES) < set(IMPLEMENTATIONS)


def test_cases_reach_both_ways_of_plan_a() -> None:
    spread = [replace(case, hidden=64) for case in cases() if case.dtype == "bfloat16"]
    assert any(case.spec.label_smoothing for case in spread)
    assert any(not case.spec.label_smoothing for case in spread)
