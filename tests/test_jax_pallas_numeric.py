"""Compares jax_pallas with the float64 reference: the cases of the table (the quick suite runs a part, because each
case compiles a program), and float16 sizes that could underflow."""

import math
from dataclasses import replace
from typing import Any

import pytest
from assertions import check, check_many_logits
from quick_cases import quick_names, quick_parameters

from jax_pallas import plan
from jax_pallas.launch import DeviceInfo
from linear_ce import float32_tiles
from linear_ce.chunking import ChunkConfig
from linear_ce.gpus import gpu_named
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import Case, cases
from parity.expected import expected
from parity.tolerances import error

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("case", quick_parameters(quick_names("jax-chunked")))
def test_case(case: Case) -> None:
    check("jax-chunked", case)


# A call with padding in the head does not store its logits, and neither does one without several tokens.
FLOAT32 = [
    case
    for case in cases()
    if case.dtype == "float32" and not case.head_dtype and case.spec.vocab_size in (None, case.vocab)
    if math.prod(case.lead) > 1
]
QUICK_FLOAT32 = frozenset(case.name for case in FLOAT32 if case.name in quick_names("jax-chunked"))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", [each for each in quick_parameters(QUICK_FLOAT32) if each.values[0] in FLOAT32])
def test_stored_logits_of_all_classes(case: Case, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, what float32 calls run on a GPU: chunks of all classes, here three of them."""

    def in_three_chunks(*, tokens: int, classes: int, stores: bool, **_: Any) -> ChunkConfig:
        return ChunkConfig(-(-max(tokens, 1) // 3), classes, float32_sum=False, keeps_logits=stores)

    def in_tiles(**options: Any) -> ChunkConfig:
        """A call in one tile would not be stored."""
        return replace(tiles(**options), rows=-(-max(options["tokens"], 1) // 3))

    def of_gpu(key: Any) -> Any:
        planned.append(key)
        gpu = "a100" if capability == 80 else "h200"
        return chosen(key._replace(device=DeviceInfo("cuda", capability, gpu_named(gpu).multiprocessors, gpu)))

    planned: list[Any] = []
    tiles, chosen = plan.choose_chunked, plan._stored_plan
    monkeypatch.setattr(plan, "choose_chunked", in_tiles)
    monkeypatch.setattr(plan, "choose_stored", in_three_chunks)
    monkeypatch.setattr(plan, "_stored_plan", of_gpu)
    monkeypatch.setattr(float32_tiles, "BLOCK", 32)
    plan.make_plan.cache_clear()
    try:
        check("jax-chunked", case)
        assert planned
    finally:
        plan.make_plan.cache_clear()


@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_float16_mean_of_many_tokens_does_not_underflow(loss_scale: float) -> None:
    case = Case(
        name=f"many-{loss_scale}",
        lead=(4096,),
        hidden=16,
        vocab=50,
        dtype="float16",
        token_weight="signed",
        loss_scale=loss_scale,
        has_bias=True,
    )
    arrays = make_arrays(case)
    outputs = run_case("jax-chunked", case, arrays).outputs
    for name in ("d_input", "d_weight", "d_bias"):
        # Without scaling, the smallest elements of d_input are subnormal in float16. No further precision may be lost.
        assert error(outputs[name], expected(case, arrays)[name].value) < 1e-3


def test_float16_head_gradient_does_not_overflow() -> None:
    # With an upstream gradient of 8, 3000 rows add up to more than half of float16's largest number.
    spec = LossSpec("sum", label_smoothing=0.1)
    check("jax-chunked", Case(name="sum", lead=(3000,), hidden=4, vocab=3, dtype="float16", spec=spec, loss_scale=8.0))


@pytest.mark.slow
def test_more_logits_than_32_bits_count() -> None:
    check_many_logits("jax-chunked")
