"""Measures the loss on several GPUs of one host against the same loss on one of them: `python -m benchmarks.scale_out`.

Forms:

    vocabulary      the GPUs have the same N tokens, and each has V / k rows of the head
    tokens          each GPU has N tokens of its own, and V / k rows of the head: the tokens are gathered
    head-gathered   the same tokens and rows, but the head is gathered, as FSDP does

A row has the milliseconds of forward and backward of the slowest GPU, and those of one GPU with the whole head and N
tokens, measured in turns with it. `efficiency` is the rate of a GPU relative to that of the one GPU: `one_gpu_ms /
(k * ms)` for "vocabulary", and `one_gpu_ms / ms` for the others, whose GPUs have k N tokens. `workspace_bytes` is the
peak of the framework's allocator above what the call got and returned, on the GPU with the highest. NCCL's own buffers
are not in it; `device_bytes` is what the GPU has in use beyond the allocator. Errors are relative to float32 logits, in
the Frobenius norm, those of one GPU beside them.

The one GPU is the first. GPUs of one host differ in how fast they run at their power limit, and the slowest one
determines `ms`. `--every-gpu` therefore measures the call of the one GPU on each GPU, one after the other:
`one_gpu_ms_of_each`. Each GPU is idle between these blocks, so its clock may be higher than in `one_gpu_ms`: compare
them with each other.

`--methods` measures other libraries too, each with the form that it has (benchmarks/scale_peers.py lists them). Rows of
other libraries have `method`, and ours do not. The one GPU runs core_triton in their rows too, so that `speedup`
compares methods whose rows were measured at different times. A library that is not installed is skipped, and a line
says how to install it.

With --device cpu it checks itself in a few seconds: the times are no results.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.methods import check_errors
from benchmarks.results import ResultFile, commit, kernels
from benchmarks.shapes import SHAPES, Shape

Form = Literal["vocabulary", "tokens", "head-gathered"]
FORMS: tuple[Form, ...] = ("vocabulary", "tokens", "head-gathered")
KEY = ("framework", "form", "shape", "n", "gpus", "method")
BUDGET = 512 * 2**20


@dataclass(frozen=True)
class Work:
    """What one row measures.

    Args:
        form: one of `FORMS`.
        shape: D, V, and N: of each GPU, or of all with "vocabulary".
        gpus: k.
        rounds: of one block of calls on all GPUs and one on one GPU, in alternating order.
        seconds: of a block, about.
        warmup: seconds before the first round.
        kernels: trace a call, and print the time of each kernel.
        every_gpu: measure the call of the one GPU on each GPU.
        method: of another library, one of `scale_peers.PEERS`; None is core_triton or jax_pallas.
    """

    form: Form
    shape: Shape
    gpus: int
    rounds: int
    seconds: float
    warmup: float
    kernels: bool = False
    every_gpu: bool = False
    method: str | None = None

    @property
    def all_tokens(self) -> int:
        return self.shape.n if self.form == "vocabulary" else self.gpus * self.shape.n

    def of_row(self, framework: str) -> dict[str, Any]:
        """Returns how a row of results names what it measured."""
        method = {} if self.method is None else {"method": self.method}
        return {"framework": framework, "form": self.form, **method, **self.shape.of_row(), "gpus": self.gpus}


def row_of(work: Work, framework: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a measurement. `found` has the milliseconds of the blocks, and what else was measured."""
    wrong = check_errors({name: found.get(name) for name in ("err_d_input", "err_d_weight")}, "bfloat16")
    if wrong is not None:
        return work.of_row(framework) | {"status": "failed", "note": wrong}
    blocks, one_gpu, each = found.pop("blocks"), found.pop("one_gpu_blocks"), found.pop("blocks_of_each", [])
    ms, one_gpu_ms = statistics.median(blocks), statistics.median(one_gpu)
    ratios = [single / several for several, single in zip(blocks, one_gpu, strict=True)]
    share = work.gpus if work.form == "vocabulary" else 1
    return {
        **work.of_row(framework),
        "status": "ok",
        "ms": ms,
        "one_gpu_ms": one_gpu_ms,
        "speedup": statistics.median(ratios),
        "efficiency": statistics.median(ratios) / share,
        "efficiency_range": [min(ratios) / share, max(ratios) / share],
        "rounds": work.rounds,
        **({"one_gpu_ms_of_each": [statistics.median(one) for one in each]} if each else {}),
        **found,
    }


def in_turns(
    work: Work, several: Callable[[int], float], single: Callable[[int], float], calls: tuple[int, int]
) -> dict[str, list[float]]:
    """Returns the milliseconds of a call in each round. `several` and `single` run a number of calls, and return the
    milliseconds of one."""
    found: dict[str, list[float]] = {"blocks": [], "one_gpu_blocks": []}
    turns = [("blocks", several, calls[0]), ("one_gpu_blocks", single, calls[1])]
    for number in range(work.rounds):
        for name, run, count in turns if number % 2 == 0 else reversed(turns):
            found[name].append(run(count))
    return found


def on_each(work: Work, runs: Sequence[Callable[[int], float]], calls: int) -> dict[str, list[list[float]]]:
    """Returns the milliseconds of a call on each GPU alone, in each round. `runs` are as `single` of `in_turns`."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(work.rounds):
        for times, run in zip(found, runs, strict=True):
            times.append(run(calls))
    return {"blocks_of_each": found}


def line(row: dict[str, Any]) -> str:
    """Returns what is printed of a row."""
    name = f"{row.get('method', row['framework'])} {row['form']} {row['shape']}"
    if row["status"] != "ok":
        return f"{name}: {row['status']}: {row['note']}"
    errors = " ".join(f"{row[name]:.2e}" for name in ("err_d_input", "err_d_weight"))
    of_one = " ".join(f"{row[name]:.2e}" for name in ("one_gpu_err_d_input", "one_gpu_err_d_weight"))
    low, high = row["efficiency_range"]
    each = "".join(f", {ms:.3f}" for ms in row.get("one_gpu_ms_of_each", []))
    each = each and f", each GPU alone {each[2:]} ms"
    return (
        f"{name} N {row['n']} on {row['gpus']}: {row['ms']:.3f} ms, one GPU "
        f"{row['one_gpu_ms']:.3f} ms, {row['speedup']:.3f} x, efficiency {row['efficiency']:.3f} ({low:.3f}-{high:.3f})"
        f", {row['workspace_bytes'] / 2**20:,.0f} MiB, errors {errors} ({of_one}){each}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale_out", description=__doc__, formatter_class=raw)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="k")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: core_triton or jax_pallas")
    parser.add_argument("--shapes", nargs="+", default=["llama3-8b"], help="names of benchmarks/shapes.py")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block of calls")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds, of each row")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel on the first GPU")
    parser.add_argument("--every-gpu", action="store_true", help="measure the call of the one GPU on each GPU too")
    parser.add_argument("--json", type=Path, help="file of rows, added to")
    parser.add_argument("--commit", default=None, help="commit of the code, if git does not know it")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.shapes if name not in SHAPES]
    if unknown:
        parser.error(f"--shapes must be names of benchmarks/shapes.py, got {', '.join(unknown)}")
    if options.gpus < 1:
        parser.error(f"--gpus must be at least 1, got {options.gpus}")
    uneven = [name for name in options.shapes if SHAPES[name].v % options.gpus]
    if uneven:
        parser.error(f"--shapes must have classes that {options.gpus} GPUs can divide equally, got {', '.join(uneven)}")
    if options.framework == "torch":
        from benchmarks import scale_torch as scale
    else:
        from benchmarks import scale_jax as scale
    ours = next(iter(scale.METHODS))
    methods = options.methods or [ours]
    unknown = [name for name in methods if name not in scale.METHODS]
    if unknown:
        parser.error(f"--methods must be among {', '.join(scale.METHODS)}, got {', '.join(unknown)}")
    times = options.rounds, options.seconds, options.warmup
    flags = options.kernels, options.every_gpu
    works = [
        Work(form, SHAPES[name], options.gpus, *times, *flags, None if method == ours else method)
        for name in options.shapes
        for form in options.forms
        for method in methods
        if form in scale.METHODS[method]
    ]
    if not works:
        parser.error(f"--forms must contain one that --methods {' '.join(methods)} have, got {' '.join(options.forms)}")
    results: list[ResultFile] = []

    def add(message: dict[str, Any]) -> None:
        if "device" in message:
            print(json.dumps(message), flush=True)
            head = message["device"], message["versions"], options.commit or commit()
            results.append(ResultFile(options.json, *head, key=KEY))
            return
        results[0].add(message)
        print(line(message), flush=True)
        if options.kernels and message["status"] == "ok":
            print(kernels(message), flush=True)

    scale.measure(works, options.device, add)
    if any(row["status"] != "ok" and "method" not in row for row in results[0].rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
