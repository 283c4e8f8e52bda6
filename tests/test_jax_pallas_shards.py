"""Tests kernels on vocabulary shards: partial results at an offset merge into the whole loss and its gradients."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax_problem import planned
from programs import Printed, python, run_checks

from jax_pallas import chunked, row_math
from jax_pallas.problem import NeedsGrad, Problem
from jax_pallas.recompute import KERNEL_TILES
from jax_pallas.slicing import Slice
from linear_ce.chunking import ChunkConfig
from linear_ce.reference import reference_loss
from linear_ce.spec import LossSpec
from parity.arrays import make_arrays
from parity.cases import Case
from parity.expected import expected
from parity.tolerances import error

OPTIONS: dict[str, Any] = {"lead": (40,), "hidden": 64, "has_bias": True, "has_class_weight": True}
EVERY = LossSpec("sum", label_smoothing=0.1, z_loss_weight=0.01, softcap=4.0, logit_scale=0.7, vocab_size=310)
BF16 = Case(name="every option", dtype="bfloat16", vocab=320, spec=EVERY, **OPTIONS)
TRANSPOSED = Case(name="transposed", dtype="float16", vocab=320, vocab_axis=1, spec=LossSpec("sum"), **OPTIONS)
FP32 = Case(name="fp32", vocab=330, spec=EVERY, **OPTIONS)

SIZES = (128, 64, 128)  # classes of the shards; the last one has the rest


def sharded(case: Case, arrays: dict[str, np.ndarray], implementation: str) -> dict[str, Array]:
    """Returns the results merged from shards, each computed from its classes of the head."""
    dtypes: dict[str, str] = dict.fromkeys(("input", "linear_weight", "linear_bias"), case.dtype)
    t = {name: jnp.asarray(array, dtypes.get(name)) for name, array in arrays.items()}
    classes, whole, row_weight = case.classes, Slice(0, case.n, None), jnp.ones(case.n)
    target, class_weight = t["target"], t["weight"][:classes].astype(jnp.float32)
    shards, offset = [], 0
    for size in (*SIZES[:-1], case.vocab - sum(SIZES[:-1])):
        w, b = (t[name][offset : offset + size] for name in ("linear_weight", "linear_bias"))
        w = w if case.vocab_axis == 0 else w.T
        arguments = (t["input"], w, b, target, row_weight, class_weight, case.spec, classes, offset, case.vocab_axis)
        shard = planned(Problem(*arguments), "gradients", implementation, NeedsGrad(True, True, True))
        assert shard.plan is not None
        # A float32 sum, to which no d_weight kernel adds.
        shards.append(replace(shard, plan=replace(shard.plan, d_weight_kernel=False)))
        offset += size
    vocab_chunks = [min(shard.local_classes, 128) for shard in shards]
    pairs = list(zip(shards, vocab_chunks, strict=True))
    partials = [
        chunked.chunk_statistics(shard, whole, vocab_chunk, tiles=KERNEL_TILES)[0] for shard, vocab_chunk in pairs
    ]
    found = row_math.finish(row_math.merge(row_math.merge(*partials[:2]), partials[2]), target, row_weight, classes)
    loss = row_math.row_loss(case.spec, found, target, row_weight, class_weight, classes).sum()
    coefficients = row_math.loss_coefficients(
        case.spec, found.lse, target, row_weight, row_weight, class_weight, classes
    )
    needs_grad = NeedsGrad(d_input=True, d_weight=True, d_bias=True)
    parts: list[Any] = []
    for shard, vocab_chunk in pairs:
        config = ChunkConfig(rows=case.n, vocab_chunk=vocab_chunk, float32_sum=True)
        parts.append(chunked.gradients(KERNEL_TILES, shard, config, found.lse, coefficients, needs_grad))
    return {
        "loss": loss,
        "lse": found.lse,
        "target_logit": found.target_logit,
        "d_input": jnp.stack([part.d_input.astype(jnp.float32) for part in parts]).sum(0),
        "d_weight": jnp.concatenate([part.d_weight for part in parts], case.vocab_axis),
        "d_bias": jnp.concatenate([part.d_bias for part in parts]),
    }


def check(case: Case, implementation: str) -> None:
    arrays = make_arrays(case)
    want = reference_loss(**arrays, spec=case.spec)  # pyright: ignore[reportArgumentType]
    budgets = expected(case, arrays)
    got = jax.jit(lambda: sharded(case, arrays, implementation))()
    for name in ("loss", "lse", "target_logit"):
        assert error(np.asarray(got[name], np.float64), getattr(want, name)) < 2e-6, name
    # Each shard rounds its part of d_input once.
    for name, parts in (("d_input", len(SIZES) ** 0.5), ("d_weight", 1.0), ("d_bias", 1.0)):
        value = np.asarray(got[name].astype(jnp.float32), np.float64)
        value = value.T if name == "d_weight" and case.vocab_axis == 1 else value
        assert error(value, budgets[name].value) < parts * budgets[name].budget, name


@pytest.mark.parametrize("case", [BF16, TRANSPOSED, FP32], ids=lambda case: case.name)
def test_shards_by_triton_kernels(case: Case) -> None:
    check(case, "pallas_triton")


ON_A_GPU = {case.name: partial(check, case, "mosaic") for case in (BF16, TRANSPOSED)}


@pytest.mark.gpu
@pytest.mark.programs(python(Path(__file__).name, *ON_A_GPU))
@pytest.mark.parametrize("name", ON_A_GPU)
def test_shards_on_a_gpu(name: str, printed: Printed) -> None:
    assert not printed[name]["failure"], printed[name]["failure"]


if __name__ == "__main__":
    run_checks(ON_A_GPU, sys.argv[1:])
