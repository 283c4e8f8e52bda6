"""Compiles the loss for 8 H200s, without a GPU: what devices exchange, whether in the loop over chunks, and how much
memory each needs. A plain call for several devices is refused."""

import math
from typing import Any

import pytest
from test_jax_pallas_gpu_compile import GEMMA, LLAMA, QWEN, run_compiler

from linear_ce.spec import DEFAULT_MEMORY_BUDGET

DEVICES = 8
BYTES = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1}

pytestmark = pytest.mark.slow


def compile_form(form: str, n: int, shape: tuple[int, int], implementation: str | None = None) -> dict[str, Any]:
    """Returns the output of compile_for_gpus.py for one program of `n` tokens on all devices."""
    program = {"form": form, "n": n, "d": shape[0], "v": shape[1], "implementation": implementation}
    return run_compiler("compile_for_gpus.py", [program])[0]


def exchanged(found: dict[str, Any]) -> list[tuple[str, str, int, bool]]:
    """Returns kind, dtype, numbers of the largest array, and whether it is in a loop, of each collective."""
    largest = ((one, max(one["types"], key=lambda type_: math.prod(type_[1:]))) for one in found["collectives"])
    return [(one["kind"], dtype, math.prod(sizes), one["loop"]) for one, (dtype, *sizes) in largest]


def scalars_apart(found: dict[str, Any]) -> list[tuple[str, str, int, bool]]:
    """Returns `exchanged` without sums of single numbers: the loss and the number of tokens."""
    return [one for one in exchanged(found) if one[0] != "all-reduce" or one[2] > 1]


def check_shards(sums: list[tuple[str, str, int, bool]], hidden: int, vocab: int) -> list[int]:
    """Checks the sums of chunks over devices that divide the vocabulary: some numbers for each row, and d_input.
    Returns the rows of the chunks."""
    assert {(kind, dtype) for kind, dtype, *_ in sums} == {("all-reduce", "f32")}
    sizes = sorted(size for _, _, size, _ in sums)
    numbers, d_input = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    rows = [size // hidden for size in d_input]
    assert numbers == [4 * DEVICES * of_chunk for of_chunk in rows]
    assert all(size < of_chunk * vocab // DEVICES for size, of_chunk in zip(numbers, rows, strict=True))
    return rows


@pytest.mark.parametrize("shape", [LLAMA, QWEN, GEMMA])
def test_a_divided_vocabulary(shape: tuple[int, int]) -> None:
    """The devices exchange the logits of the targets once, and some numbers for each row and d_input in each chunk. No
    device sees the head or the logits of others."""
    found = compile_form("vocabulary", 8192, shape)
    sums = scalars_apart(found)
    sums.remove(("all-reduce", "f32", 8192, False))
    assert not any(loop for *_, loop in sums)  # of few chunks, which are unrolled
    assert sum(check_shards(sums, *shape)) == 8192
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET


def test_a_divided_vocabulary_without_kernels() -> None:
    found = compile_form("vocabulary", 8192, LLAMA, "chunked")
    sums = scalars_apart(found)
    assert all(loop for *_, loop in sums)
    assert len(check_shards(sums, *LLAMA)) == 1
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET


@pytest.mark.parametrize("implementation", [None, "chunked"])
def test_different_tokens(implementation: str | None) -> None:
    """d_weight is summed once, in float32."""
    hidden, vocab = LLAMA
    found = compile_form("batch", 65536, LLAMA, implementation)
    assert scalars_apart(found) == [("all-reduce", "f32", hidden * vocab, False)]
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET + 4 * hidden * vocab


@pytest.mark.parametrize("implementation", [None, "chunked"])
def test_fsdp_gathers_the_head_once(implementation: str | None) -> None:
    hidden, vocab = LLAMA
    found = compile_form("fsdp, head", 65536, LLAMA, implementation)
    gathered, *sums = sorted(scalars_apart(found))
    assert gathered == ("all-gather", "bf16", hidden * vocab, False)
    assert {(kind, dtype, loop) for kind, dtype, _, loop in sums} == {("reduce-scatter", "f32", False)}
    # The kernels send parts, which have whole tiles of classes.
    assert len(sums) == 1 if implementation else len(sums) > 2
    assert 1 <= sum(size for _, _, size, _ in sums) / (hidden * vocab) < 1.01
    # The gathered head, its gradient, and the part of the gradient that stays.
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET + (6 + 4 / DEVICES) * hidden * vocab


def test_fsdp_of_a_head_on_d() -> None:
    """The head is divided on V first: an all-to-all of its parts, forth in its dtype and perhaps back."""
    hidden, vocab = LLAMA
    found = scalars_apart(compile_form("fsdp on D", 65536, LLAMA))
    assert {one[:3] for one in found if one[0] != "reduce-scatter"} == {
        ("all-to-all", "bf16", hidden * vocab // DEVICES),
        ("all-gather", "bf16", hidden * vocab),
    }
    assert {one[1] for one in found if one[0] == "reduce-scatter"} == {"f32"}
    assert not any(loop for *_, loop in found)


def test_fsdp_gathers_the_tokens() -> None:
    """Chunk by chunk, in a loop, and in another for the targets: no device has the rows of the input or of d_input of
    all tokens."""
    hidden, tokens = LLAMA[0], 65536
    found = compile_form("fsdp, tokens", tokens, LLAMA)
    exchanges = scalars_apart(found)
    [(first, _), (rows, _)] = scattered = sorted(
        (size // hidden, loop) for kind, _, size, loop in exchanges if kind == "reduce-scatter"
    )
    assert scattered == [(first, False), (rows, True)]
    assert 8 * rows < tokens == first + tokens // rows * rows
    of_rows = sorted(one for one in exchanges if one[2] % hidden == 0 and one[2] != tokens)
    [of_targets] = [one for one in of_rows if one[3] and one[2] > rows * hidden]
    assert of_targets[0] == "all-gather"
    assert 2 * of_targets[2] < tokens * hidden
    of_rows.remove(of_targets)
    assert of_rows == [
        ("all-gather", "bf16", first * hidden, False),
        ("all-gather", "bf16", rows * hidden, False),
        ("all-gather", "bf16", rows * hidden, True),
        ("reduce-scatter", "f32", first * hidden, False),
        ("reduce-scatter", "f32", rows * hidden, True),
    ]
    assert all(size <= 5 * DEVICES * rows for _, _, size, _ in exchanges if size % hidden)
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET


def test_fsdp_gathers_all_tokens_without_kernels() -> None:
    """Besides the sums of a divided vocabulary."""
    (hidden, vocab), tokens = LLAMA, 65536
    found = compile_form("fsdp, tokens", tokens, LLAMA, "chunked")
    exchanges = scalars_apart(found)
    gathers = {(dtype, size) for kind, dtype, size, _ in exchanges if kind == "all-gather"}
    assert ("bf16", tokens * hidden) in gathers
    assert gathers <= {("bf16", tokens * hidden), ("s32", tokens), ("f32", tokens)}
    sums = [one for one in exchanges if one[0] != "all-gather"]
    assert any(loop for *_, loop in sums)
    check_shards(sums, *LLAMA)
    # The tokens of all and their gradients, and the sum of d_weight in float32.
    more = 2 * 2 * tokens * hidden + 4 * hidden * vocab / DEVICES
    assert found["temporaries"] <= DEFAULT_MEMORY_BUDGET + more


@pytest.mark.parametrize("implementation", [None, "chunked"])
@pytest.mark.parametrize("form", ["plain, replicated head", "plain, head on V", "plain, head on D"])
def test_a_plain_call_is_refused(form: str, implementation: str | None) -> None:
    """XLA would gather all tokens, the head twice, or the head or the sums of all logits in the loop over chunks, and
    each device would compute the whole loss."""
    found = compile_form(form, 65536, LLAMA, implementation)
    assert "this call is compiled for 8 devices" in found["error"]
    assert "jax_pallas.sharded" in found["error"]
