"""The adapters of torchtitan and of Megatron on two ranks, which divide the head or the parameters.

One program runs the quick checks of both. Without these packages, modules with their interfaces are used:
`torch_host_stand_ins.py`.
"""

import pytest
from programs import Command, Printed, python


def ranks(*names: str) -> Command:
    return python("torch_ranks.py", "2", "chunked", *(f"check:{name}" for name in names))


QUICK = ("titan_dtensor", "titan_spmd_types", "megatron_sequence_parallel")
MORE = ("megatron", "titan_fsdp2", "titan_fsdp2_tied")


def check(name: str, printed: Printed) -> None:
    result = printed[f"check:{name}"]
    assert not result["failure"], result["failure"]


@pytest.mark.programs(ranks(*QUICK), seconds=6)
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(name: str, printed: Printed) -> None:
    check(name, printed)


@pytest.mark.slow
@pytest.mark.programs(ranks(*MORE), seconds=10)
@pytest.mark.parametrize("name", MORE)
def test_more_checks_of_two_ranks(name: str, printed: Printed) -> None:
    check(name, printed)
