"""Compares core_triton with the reference on random shapes, options, strides, budgets and vocabulary shards."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from assertions import assert_within_budget, least_budget
from drawn_cases import FEW_ELEMENTS, drawn_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import core_triton
from core_triton import chunked, row_math
from core_triton.problem import NeedsGrad, Problem
from linear_ce.chunking import ChunkConfig
from linear_ce.reference import reference_loss
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.backends import function_of, options_of, roots_of
from parity.cases import Case
from parity.expected import GRADIENT_OF, outputs_of
from parity.tolerances import error

pytestmark = pytest.mark.usefixtures("torch_poisons_buffers")


@st.composite
def layouts(draw: st.DrawFn) -> Any:
    """Draws a function that gives a tensor other strides, with the axes in another order in memory and with gaps."""
    seed, step = draw(st.integers(0, 5)), draw(st.integers(1, 3))

    def restrided(tensor: Tensor) -> Tensor:
        order = np.random.default_rng(seed).permutation(tensor.ndim).tolist()
        permuted = tensor.permute(order)
        memory = torch.full((*permuted.shape, step), torch.nan).to(tensor.dtype)
        memory[..., 0] = permuted
        return memory[..., 0].permute(np.argsort(order).tolist())

    return restrided


def run(case: Case, tensors: Mapping[str, Tensor], budget: int) -> dict[str, np.ndarray]:
    """Returns the outputs of a call and of its backward pass."""
    upstream = [tensor for name, tensor in tensors.items() if name.startswith("d_")]
    arguments: dict[str, Any] = {name: t for name, t in tensors.items() if not name.startswith("d_")}
    found = function_of(core_triton, case)(**arguments, **options_of(case, None) | {"memory_budget": budget})
    results = [found[name] for name in roots_of(case)]
    differentiated = {d: name for d, name in GRADIENT_OF.items() if name in arguments}
    leaves = [arguments[name] for name in differentiated.values()]
    gradients = torch.autograd.grad(results, leaves, upstream, materialize_grads=case.function == "token_loss")
    found |= dict(zip(differentiated, gradients, strict=True))
    return {name: found[name].detach().float().numpy() for name in outputs_of(case)}


EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.slow)])


@EXAMPLES
def test_any_call_is_within_its_error_budget(examples: int) -> None:
    drawn = given(case=drawn_cases(), input_layout=layouts(), weight_layout=layouts(), factor=st.floats(1.0, 20.0))
    settings(max_examples=examples)(drawn(check_call))()


def check_call(case: Case, input_layout: Any, weight_layout: Any, factor: float) -> None:
    arrays = make_arrays(case)
    head = getattr(torch, case.weight_dtype)
    dtypes = {"input": getattr(torch, case.dtype), "linear_weight": head, "linear_bias": head}
    dtypes |= dict.fromkeys(case.per_token, getattr(torch, case.per_token_dtype))
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    tensors |= {name: tensors[name].to(dtype) for name, dtype in dtypes.items() if name in tensors}
    tensors["input"] = input_layout(tensors["input"])
    tensors["linear_weight"] = weight_layout(tensors["linear_weight"])
    for name in GRADIENT_OF.values():
        if name in tensors:
            tensors[name].requires_grad_()
    least = least_budget(lambda budget: run(case, tensors, budget))
    outputs = run(case, tensors, int(factor * least))
    chunks = 1 + case.n / 16  # at most; without room for a float32 sum, d_weight is rounded after each chunk
    assert_within_budget(case, arrays, outputs, floor=chunks**0.5 * FEW_ELEMENTS[case.dtype])


def test_an_expanded_input_and_head() -> None:
    case = Case(name="expanded", lead=(4, 3), hidden=5, vocab=20)
    arrays = make_arrays(case)
    for name in ("input", "linear_weight"):
        arrays[name] = np.broadcast_to(arrays[name][:1], arrays[name].shape)
    x = torch.tensor(arrays["input"][:1]).expand(4, 3, 5).requires_grad_()
    w = torch.tensor(arrays["linear_weight"][:1]).expand(20, 5).requires_grad_()
    tensors = {"input": x, "linear_weight": w, "target": torch.tensor(arrays["target"]), "d_loss": torch.tensor(1.0)}
    assert_within_budget(case, arrays, run(case, tensors, 2**20))


SHARDS = {
    "n": st.integers(1, 20),
    "d": st.integers(1, 16),
    "sizes": st.lists(st.integers(1, 40), min_size=3, max_size=3),
    "padding": st.integers(0, 45),
    "chunk": st.integers(1, 20),
    "vocab_chunk": st.integers(1, 40),
    "options": st.sampled_from(
        ({}, {"softcap": 4.0, "z_loss_weight": 0.01}, {"label_smoothing": 0.2, "logit_scale": 0.5})
    ),
    "weighted": st.booleans(),
}


@EXAMPLES
def test_vocabulary_shards_give_the_whole_loss(examples: int) -> None:
    settings(max_examples=examples)(given(**SHARDS)(check_shards))()


def check_shards(
    n: int,
    d: int,
    sizes: list[int],
    padding: int,
    chunk: int,
    vocab_chunk: int,
    options: dict[str, Any],
    weighted: bool,
) -> None:
    vocab = sum(sizes)
    classes = max(vocab - padding, 1)  # the last shards can be only padding
    case = Case(
        name="shards",
        lead=(n,),
        hidden=d,
        vocab=vocab,
        spec=LossSpec("sum", vocab_size=classes, **options),
        has_bias=True,
        has_class_weight=weighted,
    )
    arrays = make_arrays(case)
    t = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    class_weight = t["weight"][:classes] if weighted else None
    row_weight = torch.ones(n)
    config = ChunkConfig(min(chunk, n), vocab_chunk, float32_sum=False)
    shards, offset = [], 0
    for size in sizes:
        shard = slice(offset, offset + size)
        w, b = t["linear_weight"][shard], t["linear_bias"][shard]
        shards.append(
            Problem(t["input"], w, b, t["target"], row_weight, class_weight, case.spec, classes, vocab_offset=offset)
        )
        offset += size

    want = reference_loss(**arrays, spec=case.spec)  # pyright: ignore[reportArgumentType]
    everything = slice(0, n)
    merged = chunked.chunk_statistics(shards[0], everything, vocab_chunk)
    for shard in shards[1:]:
        merged = row_math.merge(merged, chunked.chunk_statistics(shard, everything, vocab_chunk))
    statistics = row_math.finish(merged, t["target"], row_weight, classes)
    assert error(statistics.lse.numpy(), want.lse) < 2e-6
    target_logit = statistics.target_logit.numpy()
    # The terms of a target's logit can cancel. float32 rounds each of them at most d + 2 times.
    terms = np.abs(arrays["input"] * arrays["linear_weight"][arrays["target"]]).sum(1)
    terms = case.spec.logit_scale * (terms + np.abs(arrays["linear_bias"][arrays["target"]]))
    rounding = (d + 2) * 2.0**-24 * terms
    assert error(target_logit, want.target_logit) < 2e-6 or (np.abs(target_logit - want.target_logit) < rounding).all()
    loss = row_math.row_loss(case.spec, statistics, t["target"], row_weight, class_weight, classes)
    assert error(loss.sum().numpy(), want.loss) < 2e-6

    coefficients = row_math.loss_coefficients(case.spec, statistics.lse, t["target"], row_weight, class_weight, classes)
    needs_grad = NeedsGrad(d_input=True, d_weight=True, d_bias=True)
    parts = [
        chunked.gradients(chunked.TORCH_TILES, shard, config, statistics.lse, coefficients, needs_grad)
        for shard in shards
    ]
    d_input = sum(part.d_input.numpy() for part in parts if part.d_input is not None)
    d_weight = np.concatenate([part.d_weight.numpy() for part in parts if part.d_weight is not None])
    d_bias = np.concatenate([part.d_bias.numpy() for part in parts if part.d_bias is not None])
    assert want.d_bias is not None
    # With one class, alpha - tau contains only the term of the z-loss, with a rounding error relative to 1 in each row.
    floor = n * 2.0**-24
    for got, exact in ((d_input, want.d_input), (d_weight, want.d_weight), (d_bias, want.d_bias)):
        assert error(np.asarray(got), exact) < 1e-5 or np.abs(got - exact).max() < floor
