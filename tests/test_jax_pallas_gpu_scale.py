"""Tests vocabulary shards of jax_pallas, and heads that are gathered, by the Mosaic kernels on NVIDIA Hopper GPUs, two
if there are so many: cases of `test_jax_pallas_shard_rows.py` and `jax_head_checks.py`, with more rows and classes. Run
with `pytest -m gpu`.

As a program, this file runs the cases that its arguments name.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from jax_head_checks import CASES as HEAD_CASES
from programs import Printed, each, python, run_checks
from sharded_cases import assert_within_budget, mesh_of, run_sharded
from test_jax_pallas_shard_rows import CASES, TOKEN_CASES

from parity.arrays import make_arrays
from parity.cases import Case

pytestmark = pytest.mark.gpu

GPUS = 2  # at most
BUDGET = 5 * 2**18  # bytes, for three chunks of rows or more


def of_gpu(case: Case, rows: int) -> Case:
    """Returns a case with so many rows, 8 times the classes, and a hidden size of 64."""
    vocab_size = case.spec.vocab_size
    spec = replace(case.spec, vocab_size=vocab_size and 8 * vocab_size - 1)
    case = replace(case, lead=(rows,), hidden=64, vocab=8 * case.vocab, spec=spec)
    if case.name.endswith("part"):  # 512 rows are saved
        row = 32 + 2 * (case.hidden + case.vocab // min(GPUS, jax.device_count()))
        case = replace(case, saved_budget=4096 + 512 * row)
    return case


def check(case: Case, axis: str = "vocab", rows: int = 8 * 96 - 5, **options: Any) -> None:
    gpus = min(GPUS, jax.device_count())
    case = of_gpu(case, rows)
    options |= {"vocab_axis_name": axis, "memory_budget": BUDGET}
    arrays = make_arrays(case)
    found = run_sharded(case, arrays, mesh_of(**{axis: gpus}), "mosaic", **options)
    assert_within_budget(case, arrays, found)


OF_OTHERS = ("float16, ", "smoothing", "saved", "split head", "rounded head")  # of these, fewer cases
ON_GPUS = ("float16, padded", "float16, token loss", "float16, far logits", "smoothing", "smoothing, padded")
ON_GPUS += ("saved", "saved, padded", "saved, part", "float16, saved")
FLOAT32_HEADS = ("split head, token loss", "split head, padded", "rounded head, padded")
ON_GPUS += (*FLOAT32_HEADS, "split head, padded, softcap", "split head, smoothing")
CHECKS = {
    case.name: partial(check, case) for case in CASES if case.name in ON_GPUS or not case.name.startswith(OF_OTHERS)
}
# Tokens that are gathered, in four chunks or more.
OF_TOKENS = ("padded", "token loss", "smoothing", *ON_GPUS[:3], "float16, padded, none", *FLOAT32_HEADS)
CHECKS |= {
    f"tokens, {case.name}": partial(check, case, "fsdp", 8 * 114, gather="tokens")
    for case in TOKEN_CASES
    if case.name in OF_TOKENS
}
# With rows that are computed again in a block of others.
of_far_logits = next(case for case in CASES if case.name == "far logits")
CHECKS |= {
    "invariant": partial(check, of_far_logits, batch_invariant=True),
    "tokens, invariant": partial(check, of_far_logits, "fsdp", 8 * 114, gather="tokens", batch_invariant=True),
}
# Heads that are gathered, whose gradient is sent in parts.
CHECKS |= {
    f"head, {case.name}": partial(check, case, "fsdp", 8 * 116, gather="head")
    for case in HEAD_CASES
    if case.name not in ("frozen input", "no token")
}
COMMANDS = {name: python(Path(__file__).name, name) for name in CHECKS}


@pytest.mark.parametrize("name", each(COMMANDS, seconds=80))
def test_shards_by_the_kernels_on_gpus(name: str, printed: Printed) -> None:
    assert not printed[name]["failure"], printed[name]["failure"]


if __name__ == "__main__":
    run_checks(CHECKS, sys.argv[1:])
