"""Compares jax_pallas with the float64 reference on random shapes, options, budgets and vocabulary shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_within_budget
from drawn_cases import FEW_ELEMENTS, drawn_cases
from hypothesis import given, settings

from jax_pallas import chunked, row_math
from jax_pallas.problem import NeedsGrad, Problem
from jax_pallas.slicing import Slice
from linear_ce.chunking import ChunkConfig
from linear_ce.reference import reference_loss
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.backends import run_case
from parity.cases import Case
from parity.tolerances import error


def check_call(case: Case) -> None:
    arrays = make_arrays(case)
    chunks = 1 + case.n / 16
    outputs = run_case("jax-chunked", case, arrays).outputs
    assert_within_budget(case, arrays, outputs, floor=chunks**0.5 * FEW_ELEMENTS[case.dtype])


@pytest.mark.parametrize("examples", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_any_call_is_within_its_error_budget(examples: int) -> None:
    settings(max_examples=examples)(given(case=drawn_cases())(check_call))()  # each example compiles


PLAIN: dict[str, Any] = {}
CAPPED: dict[str, Any] = {"softcap": 4.0, "z_loss_weight": 0.01}
SMOOTHED: dict[str, Any] = {"label_smoothing": 0.2, "logit_scale": 2.0}


@pytest.mark.parametrize(
    ("n", "sizes", "padding", "chunk", "vocab_chunk", "options", "weighted", "vocab_axis"),
    [
        (20, (5, 17, 40), 3, 6, 8, CAPPED, False, 0),
        (7, (30, 1, 12), 0, 7, 40, SMOOTHED, True, 1),
        (7, (8, 9, 10), 12, 1, 3, PLAIN, False, 1),  # the last shard is all padding
        (1, (8, 9, 10), 26, 1, 8, SMOOTHED, False, 0),  # only one class remains
    ],
)
def test_vocabulary_shards_give_the_whole_loss(
    n: int,
    sizes: tuple[int, ...],
    padding: int,
    chunk: int,
    vocab_chunk: int,
    options: dict[str, Any],
    weighted: bool,
    vocab_axis: int,
) -> None:
    vocab = sum(sizes)
    classes = vocab - padding
    spec = LossSpec("sum", vocab_size=classes, **options)
    case = Case(name="shards", lead=(n,), hidden=9, vocab=vocab, spec=spec, has_bias=True, has_class_weight=weighted)
    arrays = make_arrays(case)

    @jax.jit
    def sharded(arrays: dict[str, Any]) -> tuple[Any, ...]:
        x, y, row_weight = arrays["input"], arrays["target"], jnp.ones(n)
        class_weight = arrays["weight"][:classes] if weighted else None
        shards, offset = [], 0
        for size in sizes:
            w, b = (arrays[name][offset : offset + size] for name in ("linear_weight", "linear_bias"))
            w = w if vocab_axis == 0 else w.T
            shards.append(Problem(x, w, b, y, row_weight, class_weight, spec, classes, offset, vocab_axis))
            offset += size
        vocab_chunks = [max(min(vocab_chunk, shard.local_classes), 1) for shard in shards]
        pairs = list(zip(shards, vocab_chunks, strict=True))
        partials = [chunked.chunk_statistics(shard, Slice(0, n, None), size)[0] for shard, size in pairs]
        statistics = row_math.finish(row_math.merge(row_math.merge(*partials[:2]), partials[2]), y, row_weight, classes)
        loss = row_math.row_loss(spec, statistics, y, row_weight, class_weight, classes).sum()
        coefficients = row_math.loss_coefficients(
            spec, statistics.lse, y, row_weight, row_weight, class_weight, classes
        )
        needs_grad = NeedsGrad(d_input=True, d_weight=True, d_bias=True)
        parts: list[Any] = []
        for shard, size in pairs:
            config = ChunkConfig(min(chunk, n), size, float32_sum=False)
            parts.append(chunked.gradients(chunked.XLA_TILES, shard, config, statistics.lse, coefficients, needs_grad))
        d_weight = jnp.concatenate([part.d_weight if vocab_axis == 0 else part.d_weight.T for part in parts])
        d_bias = jnp.concatenate([part.d_bias for part in parts])
        return loss, statistics.lse, statistics.target_logit, sum(part.d_input for part in parts), d_weight, d_bias

    want = reference_loss(**arrays, spec=spec)  # pyright: ignore[reportArgumentType]
    names = ("loss", "lse", "target_logit", "d_input", "d_weight", "d_bias")
    got = sharded({name: jnp.asarray(array) for name, array in arrays.items()})
    for name, value in zip(names, got, strict=True):
        exact = np.asarray(getattr(want, name))
        assert error(np.asarray(value), exact) < 2e-5 or np.abs(exact).max() < 1e-6, name
