"""What the GPU compiler makes of the chunked loss, without a GPU: temporaries within the budget, no copied head."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parity.spec import DEFAULT_MEMORY_BUDGET

HERE = Path(__file__).parent
COMPILER = Path(sys.prefix) / "gpu-compiler"  # installed there by `make test`

LLAMA, QWEN, GEMMA = (4096, 128256), (896, 151936), (2304, 256000)
EVERY_DAY = [
    ("train", 8192, *LLAMA, 0),
    ("train", 8192, *LLAMA, 1),
    ("train", 8192, *QWEN, 0),
    ("none", 8192, *LLAMA, 0),
    ("eval", 8192, *LLAMA, 0),
]
MORE = [
    *(("train", n, *LLAMA, 0) for n in (1, 16, 1000, 65536)),
    *((mode, 8192, *shape, axis) for mode in ("train", "none", "eval") for shape in (QWEN, GEMMA) for axis in (0, 1)),
    *((mode, n, *LLAMA, 0) for mode in ("none", "eval") for n in (1, 1000, 65536)),
    ("train", 8192, 768, 50257, 0),
]


def compile_all(
    programs: list[tuple[str, int, int, int, int]], target: str = "h200", implementation: str = "chunked"
) -> list[dict[str, Any]]:
    if not COMPILER.is_dir():
        pytest.fail(f"{COMPILER} is missing: run `make test`, which installs it")
    keys = ("mode", "n", "d", "v", "vocab_axis", "implementation")
    asked = json.dumps([dict(zip(keys, (*program, implementation), strict=True)) for program in programs])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(COMPILER)]),
        "PATH": os.pathsep.join([str(COMPILER / "nvidia/cu13/bin"), os.environ["PATH"]]),  # ptxas
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_PLATFORMS": "",
    }
    command = [sys.executable, str(HERE / "compile_for_gpu.py"), str(HERE / f"targets/{target}.pbtxt"), asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        share = result["temporaries"] / DEFAULT_MEMORY_BUDGET
        assert share <= 1, f"{result}: temporaries are {share:.0%} of the budget"
        assert not result["moved"], f"the head is copied: {result}"


def test_temporaries_on_h200() -> None:
    check(compile_all(EVERY_DAY))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "a100"])
def test_temporaries_of_more_shapes(target: str) -> None:
    check(compile_all(MORE, target))
