"""A proxy for JAX on an A100: `python -m benchmarks.sm80_pallas --shapes NAME... [--json FILE]`, on a newer GPU.

XLA compiles the kernels of Pallas' Triton backend only to the instructions of the GPU that runs them. So this command
takes the Triton code of jax_pallas's exponentials kernel for an A100, and compiles it with Triton itself for sm_80's
instructions (mma.sync and cp.async), as `benchmarks.sm80` does with core_triton's kernels. It times the kernel at the
rows of a chunk beside cuBLAS's fastest kernel for sm_80 for the same matmul. The other two matmuls of a call on an A100
are XLA's own.
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import IRSource, make_backend

from benchmarks import results, sm80
from benchmarks.shapes import Shape, shape_named
from benchmarks.sm80 import Chooser
from benchmarks.timing import Sensor, Timing
from benchmarks.torch_bench import TorchBench

A100 = 80
CODE = (sm80.CODE, results.ROOT / "benchmarks" / "sm80_pallas.py")  # rows depend on these too
LIMIT = 1e-2  # of the relative error of the exponentials, which are rounded to bfloat16


class Lowered(NamedTuple):
    """A kernel of Pallas' Triton backend in Triton's own language (TTIR)."""

    code: str
    grid: tuple[int, ...]
    rows: int  # of a chunk
    class_block: int  # classes of a tile
    warps: int
    stages: int


def lower_exponentials(shape: Shape) -> Lowered:
    """Returns jax_pallas's exponentials kernel for a chunk of the call that an A100 would run. Needs no GPU.

    Raises:
        ValueError: the call would not store exponentials, because V is no multiple of 64.
    """
    with mock.patch.dict(os.environ, JAX_PLATFORMS="cpu"):  # JAX only lowers, and would take most of the GPU's memory
        return _lower_exponentials(shape)


def _lower_exponentials(shape: Shape) -> Lowered:
    import jax
    import jax.numpy as jnp
    from jax._src.pallas.triton import lowering

    from jax_pallas import kernels, triton_launch
    from jax_pallas.linear_ce import explain
    from jax_pallas.tile_config import triton_tile

    def array(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    x, w = array(shape.n, shape.d), array(shape.v, shape.d)
    arrays: Any = (x, w)
    plan = explain(*arrays, device="a100", implementation="pallas_triton").plan
    if plan.path != "scaled_exp":
        raise ValueError(f"V of {shape.name} must be a multiple of 64, got {shape.v}")
    rows = plan.scaled_exp_config.rows
    found: list[tuple[str, tuple[int, ...]]] = []
    lower: Any = lowering.lower_jaxpr_to_triton_module

    def record(*arguments: Any, **options: Any) -> Any:
        result = lower(*arguments, **options)
        found.append((result.module.operation.get_asm(), tuple(result.grid)))
        return result

    def chunk(x: Any, w: Any, ref_exponent: Any, target: Any) -> Any:
        return kernels.exponentials(
            x, w, None, ref_exponent, target, 0, rows=rows, classes=shape.v, vocab_axis=0, logit_scale=1.0,
            softcap=None, stores=True, statistics=0,
        )  # fmt: skip

    arguments = x, w, array(rows, dtype=jnp.float32), array(rows, dtype=jnp.int32)
    gpu = SimpleNamespace(compute_capability=A100, arch_name="8.0")
    with (
        warnings.catch_warnings(),
        mock.patch.object(lowering, "lower_jaxpr_to_triton_module", record),
        mock.patch("jax._src.pallas.triton.gpu_info.get_gpu_info", return_value=gpu),
    ):
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        jax.jit(chunk).trace(*arguments).lower(lowering_platforms=("cuda",))
    [(code, grid)] = found
    defaults = triton_launch.run.__kwdefaults__ or {}
    tile = triton_tile(x.dtype.itemsize, crowded=False)
    return Lowered(code, grid, rows, tile.block_v, tile.num_warps, defaults["stages"])


def compile_for(lowered: Lowered, capability: int) -> Any:
    """Compiles a kernel to the instructions of sm_80 for a GPU of compute capability 80, 90, ...

    `triton.compile` does not run the passes on TTIR if it gets a file. XLA and Triton's own compiler of functions run
    them. They turn `acc + dot(a, b, 0)` into `dot(a, b, acc)`. Otherwise a step adds its dot with 128 additional
    instructions, and registers spill.
    """
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": lowered.warps, "num_stages": lowered.stages, "arch": f"sm{A100}"}
    backend: Any = make_backend(target)
    context, parsed = ir.context(), backend.parse_options(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(lowered.code)
        module = IRSource(str(path), context, backend).make_ir(target, parsed, None, None, context)
        path.write_text(str(backend.make_ttir(module, {}, parsed, A100)))
        return triton.compile(str(path), target=target, options=options)


def exponentials(shape: Shape, lowered: Lowered, x: Tensor, w: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """Returns what runs the kernel on the first rows of x and returns e (rows, padded V) bfloat16.

    Raises:
        RuntimeError: its exponentials or their sums are wrong.
    """
    major, minor = torch.cuda.get_device_capability()
    kernel, rows, blocks = compile_for(lowered, 10 * major + minor), lowered.rows, -(-shape.v // lowered.class_block)

    def empty(*dims: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(dims, dtype=dtype, device="cuda")

    start = torch.zeros(1, dtype=torch.int32, device="cuda")
    places = target[:rows].int()
    ref_exponent = ((x[:rows] * w[target[:rows]]).float().sum(1) * 1.4426950408889634).round()
    e, sums, of_target = empty(rows, -(-shape.v // 64) * 64, dtype=torch.bfloat16), empty(blocks, rows), empty(2, rows)
    launch = kernel[(*lowered.grid, 1, 1)[:3]]

    def run() -> Tensor:
        launch(start, x, w, ref_exponent, places, e, sums, of_target[0], of_target[1])
        return e

    some = slice(0, 128)
    exact = torch.exp(x[some].float() @ w.float().T - (ref_exponent[some] * 0.6931471805599453)[:, None])
    for name, result, expected in (
        ("exponentials", run()[some, : shape.v].float(), exact),
        ("sums", sums[:, some].sum(0), exact.sum(1)),
    ):
        error = float(torch.linalg.vector_norm(result - expected) / torch.linalg.vector_norm(expected))
        if not error < LIMIT:
            raise RuntimeError(f"the {name} have a relative error of {error:.1e}")
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sm80_pallas", description=__doc__)
    parser.add_argument("--shapes", nargs="+", required=True, metavar="NAME", help="as of benchmarks.linear_ce")
    parser.add_argument("--seconds", type=float, default=Timing().seconds, help="for the pairs of a row (%(default)s)")
    parser.add_argument("--warmup", type=float, default=Timing().warmup, help="seconds before them (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the rows into this file after each one")
    parser.add_argument("--commit", help="commit of the code, if git does not know it")
    options = parser.parse_args(arguments)
    shapes = [shape_named(name) for name in options.shapes]
    if None in shapes:
        parser.error(f"--shapes must be names of benchmarks.linear_ce or N-D-V, got {' '.join(options.shapes)}")
    try:
        kernels = [(shape, lower_exponentials(shape)) for shape in filter(None, shapes)]
        bench = TorchBench("cuda")
        file = results.ResultFile(options.json, bench.device, bench.versions(), options.commit or results.commit())
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    code = results.short_hash(results.source_hash("jax"), results.file_hash(*CODE))
    timing, sensor = Timing(options.seconds, options.warmup, energy_seconds=0), Sensor(gpu=True)
    print(results.heading(host=False))
    for shape, lowered in kernels:
        problem: Any = bench.problem(shape, "bfloat16", "peaked")
        x, w, target = problem.input, problem.weight, problem.target
        run = exponentials(shape, lowered, x, w, target)
        chooser, logits = Chooser(), torch.empty(lowered.rows, shape.v, dtype=x.dtype, device="cuda")

        def floor(chooser: Chooser = chooser, logits: Tensor = logits, x: Tensor = x, w: Tensor = w) -> None:
            chooser.matmul(logits, x[: len(logits)], w.T)

        floor()
        row = {
            **shape.of_row(), "dtype": "bfloat16", "targets": "peaked", "mode": "logits", "kind": "ours",
            "method": "pallas_triton", "framework": "jax", "chunk_rows": lowered.rows, "floor": sm80.FLOOR,
            "code_hash": code, "status": "ok", "note": "exponentials kernel",
        }  # fmt: skip
        row |= bench.time_pairs([floor, run], timing, sensor).figures()
        file.add(row)
        print(f"{shape.name}, a chunk of {lowered.rows} rows\n{results.line(row)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
