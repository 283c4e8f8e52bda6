"""Compiles training steps for 8 H200s, without a GPU: what devices exchange, in which dtype, and how much memory each
needs."""

import math
from typing import Any

import pytest
from test_jax_pallas_gpu_compile import run_compiler

HIDDEN, CLASSES, LENGTH = 1024, 32_768, 1024
MATRICES = 7  # of a layer

pytestmark = pytest.mark.slow


def step(sizes: tuple[int, int, int], rows: int, **changes: Any) -> dict[str, Any]:
    return run_compiler("compile_trainer_for_gpus.py", [{"sizes": sizes, "rows": rows, "changes": changes}])[0]


def arrays(found: dict[str, Any], kind: str) -> list[list[Any]]:
    """Returns [dtype, *sizes] of each array of at least a matrix's size in collectives of a kind."""
    types = (one for each in found["collectives"] if each["kind"] == kind for one in each["types"])
    return [one for one in types if math.prod(one[1:]) >= 2**17]


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)])
def test_layers_are_gathered_in_bfloat16_and_gradients_scattered(sizes: tuple[int, int, int]) -> None:
    """The matrices of a layer are gathered in the forward and the backward pass. Float32 is what the loss sums: the
    gradients of the head and of its input."""
    found = step(sizes, 16)
    in_loops = [each for each in found["collectives"] if each["loop"]]
    gathers = [each for each in in_loops if each["kind"] == "all-gather"]
    assert len(gathers) == 2  # one in each loop over layers
    for each in gathers:
        assert {one[0] for one in each["types"]} == {"bf16"}
        assert len(each["types"]) == 2 * MATRICES  # operands and results
    assert [each["kind"] for each in in_loops].count("reduce-scatter") == 1
    assert {one[0] for one in arrays(found, "all-gather")} == {"bf16"}
    tokens = 16 // sizes[0] * LENGTH // sizes[1]  # of a device
    summed = [one for kind in ("all-reduce", "reduce-scatter") for one in arrays(found, kind) if one[0] == "f32"]
    rows = {tokens, tokens * sizes[1], CLASSES // sizes[1] // sizes[2]}
    assert all(one[-1] == HIDDEN and one[1] in rows for one in summed if len(one) == 3), summed
    assert not any(HIDDEN in one for one in summed if len(one) > 3), summed  # gradients of several layers


def test_a_device_has_its_part_of_the_state() -> None:
    found = step((1, 8, 1), 16)
    state = 3 * 4 * found["parameters"] / 8  # float32 parameters and two averages
    assert state <= found["arguments"] <= 1.01 * state


def test_many_tokens_gather_the_embedding_and_the_head() -> None:
    """Rather than 65,536 tokens, once, and their gradients are summed in float32."""
    found = step((1, 8, 1), 64)
    gathered = arrays(found, "all-gather")
    assert ["bf16", CLASSES, HIDDEN] in gathered
    assert not any(64 * LENGTH in one or 64 in one for one in gathered)
    assert ["f32", CLASSES, HIDDEN] in arrays(found, "reduce-scatter")


def test_layers_that_are_compiled_separately_save_what_one_device_saves() -> None:
    """And the gathered matrices, but not all intermediate results as they are written, which is twice as much."""
    of_layers, of_divided = (
        step(sizes, 64, remat="attention", scan_layers=False, num_layers=4)["temporaries"]
        - step(sizes, 64, remat="attention", scan_layers=False, num_layers=2)["temporaries"]
        for sizes in ((8, 1, 1), (1, 8, 1))
    )
    gathered = 2 * 2 * (3 * HIDDEN * 4096 + 2 * HIDDEN * (8 + 4) * 128)  # in bfloat16, of two layers
    assert of_divided <= 1.05 * of_layers + gathered, (of_divided, of_layers, gathered)
