"""core_triton against the float64 reference: every case of the table."""

import pytest
from judged import check

from parity.cases import Case, cases


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    check("torch-chunked", case)
