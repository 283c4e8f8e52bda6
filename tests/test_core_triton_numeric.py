"""Compares core_triton with the float64 reference: the cases of the table (the quick suite runs a part of them), and
float16 sizes that could underflow."""

import pytest
from assertions import check, check_many_logits
from quick_cases import common_names, quick_parameters

from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import Case
from parity.expected import expected
from parity.tolerances import error

pytestmark = pytest.mark.usefixtures("torch_poisons_buffers")


@pytest.mark.parametrize("case", quick_parameters(common_names()))
def test_case(case: Case) -> None:
    check("torch-chunked", case)


@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
@pytest.mark.parametrize("token_weight", ["", "signed"])
def test_float16_mean_of_many_tokens_does_not_underflow(loss_scale: float, token_weight: str) -> None:
    case = Case(
        name=f"many-{loss_scale}",
        lead=(4096,),
        hidden=16,
        vocab=50,
        dtype="float16",
        token_weight="signed" if token_weight else "",
        loss_scale=loss_scale,
        has_bias=True,
    )
    arrays = make_arrays(case)
    outputs = run_case("torch-chunked", case, arrays).outputs
    for name in ("d_input", "d_weight", "d_bias"):
        # Without scaling, the smallest elements of d_input are subnormal in float16. No further precision may be lost.
        assert error(outputs[name], expected(case, arrays)[name].value) < 1e-3


def test_float16_head_gradient_does_not_overflow() -> None:
    # With an upstream gradient of 8, 3000 rows add up to more than half of float16's largest number.
    spec = LossSpec("sum", label_smoothing=0.1)
    case = Case(name="sum", lead=(3000,), hidden=4, vocab=3, dtype="float16", spec=spec, loss_scale=8.0)
    check("torch-chunked", case)


@pytest.mark.slow
def test_more_logits_than_32_bits_count() -> None:
    check_many_logits("torch-chunked")
