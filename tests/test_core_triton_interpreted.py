"""The Triton kernels in Triton's interpreter, against the float64 reference: no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from linear_ce.spec import FLOAT_DTYPES
from parity.cases import cases

HERE = Path(__file__).parent
SHARES = 2  # of the table of cases, for the workers of a test run to share


def interpret(*arguments: str) -> list[dict[str, Any]]:
    """Runs a program of interpret_loss.py; returns its results, one of each call."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(HERE / "interpret_loss.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_within_budget(results: list[dict[str, Any]]) -> None:
    """Fails with the percentage of its budget that each output used, for every call that used more than all of one."""
    over = []
    for result in results:
        used = ", ".join(f"{name} {share:.0f}%" for name, share in result["used"].items())
        if not all(share <= 100 for share in result["used"].values()):
            over.append(f"{result['name']} used of its budget: {used}")
    assert not over, "\n".join([f"{len(over)} of {len(results)} calls are over a budget", *over])


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_case_is_within_its_error_budget(dtype: str, share: int) -> None:
    results = interpret("table", dtype, str(share), str(SHARES))
    names = [case.name for case in cases() if case.dtype == dtype]
    assert [result["name"] for result in results] == names[share::SHARES]
    assert_within_budget(results)


def test_anchors_that_are_too_low_are_repaired() -> None:
    results = interpret("repair")
    assert_within_budget(results)
    *everywhere, in_one_block = (result["far"] for result in results)
    assert all(len(far) > 10 for far in everywhere)
    assert in_one_block == [140]


@pytest.mark.parametrize(
    ("dtype", "functions"),
    [
        ("bfloat16", ("mean",)),
        pytest.param("bfloat16", ("none", "log_probs"), marks=pytest.mark.slow),
        ("float16", ("mean",)),
    ],
    ids=["bf16", "bf16-more", "fp16"],
)
def test_nothing_is_written_outside_and_everything_inside(dtype: str, functions: tuple[str, ...]) -> None:
    assert all(result["buffers"] > 5 for result in interpret("writes", dtype, *functions))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_of_the_vocabulary_make_the_whole(dtype: str) -> None:
    assert_within_budget(interpret("shards", dtype))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_inputs_layout_changes_nothing(dtype: str) -> None:
    assert_within_budget(interpret("layouts", dtype))
