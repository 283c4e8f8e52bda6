"""Proves that a package launches the same in two commits: `python -m benchmarks.same_launches OLD_COMMIT`.

A change of the code that launches kernels changes the `code_hash` of measured rows, even if the calls launch the same
machine code with the same arguments. This command records what calls of the grid do on an H100 and an H200, in the
checkout and in an older commit. If there is no difference, it adds the two hashes to
benchmarks/results/same-launches.json. `--resume` then keeps the rows of the older code.

A recorded call is the forward and backward pass of the mean loss without arrays, so no GPU is needed. Of core_triton
every call of the grid is compared: all launches in order, with their grids, arguments and PTX, and the library's
matmuls and other operators of PyTorch. Of jax_pallas, where a call takes seconds, only those that have a row of the
older code are compared: the program that JAX makes for the GPU, and the code of its kernels (`jax_launches.py`).
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks import results
from benchmarks.compare_child import check_origin
from benchmarks.launch_recorder import Launch, compile_launch, fake_gpu, type_of
from benchmarks.shapes import GRID, Mode, Shape, plan

CAPABILITY = 90  # of results.COMPARED_GPUS
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
VERSIONS = {"torch": ("torch", "triton"), "jax": ("jax", "jaxlib")}  # of what compiles the kernels
MOST_DIFFERENCES = 5  # that are printed
PROGRESS_SECONDS = 20
CODE = "code"  # of a kernel
CONSTEXPRS = "constexprs"  # what they change is in the code, so they only explain a difference

Step = dict[str, str]  # what is launched, then its grid, arguments, constexprs and options


class Steps(TorchDispatchMode):
    """While it is active, collects the steps of a call, those of kernels with their `Launch`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Step, Launch | None]] = []
        self._storages: dict[int, tuple[int, Any]] = {}  # kept alive, so that no later one has the same address

    def launched(self, launch: Launch, grid: tuple[int, ...], values: dict[str, Any]) -> None:
        """Adds a launch."""
        step = {"kernel": f"{launch.kernel.__module__}.{launch.kernel.__name__}", "grid": str(tuple(grid))}
        constexprs = dict(launch.constexprs)
        step |= {name: self._described(value) for name, value in values.items() if name not in constexprs}
        step |= {name: repr(value) for name, value in launch.options}
        self.found.append((step | {CONSTEXPRS: repr(constexprs)}, launch))

    def multiplied(self, *matrices: Tensor, first: bool) -> None:
        """Adds a matmul of the library."""
        names = ("total", "a", "b")
        operands = {name: self._described(matrix) for name, matrix in zip(names, matrices, strict=True)}
        self.found.append(({"kernel": "matmul", **operands, "first": str(first)}, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from core_triton import operators, ops, problem

        kwargs = kwargs or {}
        if func is torch.ops.linear_ce.scaled.default:  # autograd scales in place where no operator is needed
            factors, saved = ops.Factors(*args[:2]), problem.Gradients(*args[2:5])
            with self:
                ops.scale(saved, factors, saved, args[5])
            return [gradient for gradient in saved if gradient is not None]
        if func.namespace == "linear_ce":
            with self:
                return operators.IMPLEMENTATIONS[func._schema.name](*args, **kwargs)
        if func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in ALLOCATIONS:
            described = tree_map(self._described, (args, kwargs))
            self.found.append(({"kernel": str(func), "arguments": str(described)}, None))
        return func(*args, **kwargs)

    def _described(self, value: Any) -> str:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
            layout = f"{list(value.shape)}, strides {list(value.stride())}"
            return f"{value.dtype} {layout}, from {value.storage_offset()} of array {number}"
        if hasattr(value, "block_shape"):  # a tensor descriptor
            return f"{type_of(value)} {list(value.shape)}, strides {list(value.strides)}, {self._described(value.base)}"
        return f"{type_of(value)} {value!r}" if isinstance(value, int | float) else repr(value)


def steps_of(shape: Shape, mode: Mode, gpu: str) -> list[tuple[Step, Launch | None]]:
    """Returns the steps of the forward and backward pass of a call."""
    import core_triton

    steps = Steps()
    with fake_gpu(CAPABILITY, gpu, steps.launched, steps.multiplied), steps:
        x, w = (
            torch.empty(rows, shape.d, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for rows in (shape.n, shape.v)
        )
        y = torch.empty(shape.n, dtype=torch.int64, device="cuda")
        loss: Any = core_triton.linear_cross_entropy(x, w, y, memory_budget=mode.memory_budget, implementation="triton")
        with torch.no_grad():  # loss.backward() would need a GPU
            loss.grad_fn.apply(torch.empty((), device="cuda"))
    return steps.found


def bare(ptx: str) -> str:
    """Returns PTX without comments and without what only debuggers read."""
    code, *debug = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.MULTILINE)
    assert ".entry" not in "".join(debug)
    code = re.sub(r"//.*|^\s*\.(loc|file)\s.*|^\$L__(tmp|func_begin|func_end)\d+:", "", code, flags=re.MULTILINE)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


def code_of(launch: Launch) -> str:
    """Returns a hash of the PTX of a launch and of its shared memory, which PTX does not contain."""
    compiled = compile_launch(launch, CAPABILITY)
    return results.short_hash(bare(compiled.ptx), str(compiled.shared))


def coded_steps_of(shape: Shape, mode: Mode, gpu: str, codes: dict[Launch, str]) -> list[Step]:
    """Returns the steps of a call with the code of kernels. `codes` keeps those that are known."""
    steps = []
    for step, launch in steps_of(shape, mode, gpu):
        if launch is not None:
            codes[launch] = codes.get(launch) or code_of(launch)
            step[CODE] = codes[launch]
        steps.append(step)
    return steps


def record(name: str, framework: str, calls: Sequence[str]) -> None:
    """Prints a line of JSON for each call: its name and its steps. The package must come from the working folder."""
    check_origin(Path.cwd())
    if framework == "torch":
        record_steps: Callable[..., list[Step]] = partial(coded_steps_of, codes={})
    else:
        from benchmarks.jax_launches import steps_of as record_steps
    planned = {(shape.name, mode.name): (shape, mode) for shape, mode, _ in plan([GRID])}
    last = time.monotonic()
    for number, call in enumerate(calls, 1):
        shape, mode, gpu = call.split(", ")
        print(json.dumps({"call": call, "steps": record_steps(*planned[shape, mode], gpu)}))
        if time.monotonic() > last + PROGRESS_SECONDS or number == len(calls):
            last = time.monotonic()
            print(f"{name}: {number} of {len(calls)} calls", file=sys.stderr, flush=True)


def difference(old: Sequence[Step], new: Sequence[Step]) -> str | None:
    """Returns the first difference between the steps of a call, None if there is none."""
    for number, (before, after) in enumerate(zip(old, new, strict=False)):
        if _compared(before) == _compared(after):
            continue
        keys = [key for key in before | after if before.get(key) != after.get(key)]
        changes = [f"{key} {before.get(key, 'absent')} -> {after.get(key, 'absent')}" for key in keys]
        return f"launch {number}, {before['kernel']}: {'; '.join(changes) or 'the order of the arguments'}"
    return None if len(old) == len(new) else f"{len(old)} -> {len(new)} launches"


def _compared(step: Step) -> list[tuple[str, str]]:
    return [(key, value) for key, value in step.items() if key != CONSTEXPRS or CODE not in step]


class Comparison(NamedTuple):
    """The differences of two recordings, and the counts of the new one: calls, launches, distinct kernels."""

    differences: list[str]
    counts: dict[str, int]


def compare(old: Iterable[str], new: Iterable[str]) -> Comparison:
    """Compares the lines of two recordings."""
    differences, kernels, calls, launches = [], set(), 0, 0
    for lines in zip_longest(old, new, fillvalue='{"call": "no call", "steps": []}'):
        before, after = map(json.loads, lines)
        calls, launches = calls + 1, launches + len(after["steps"])
        kernels |= {(step["kernel"], step[CODE]) for step in after["steps"] if CODE in step}
        found = difference(before["steps"], after["steps"])
        if before["call"] != after["call"]:
            found = f"another call, {after['call']}"
        if found is not None:
            differences.append(f"{before['call']}: {found}")
    return Comparison(differences, {"calls": calls, "launches": launches, "kernels": len(kernels)})


def export(commit: str, folder: Path, *paths: str) -> None:
    """Writes files of a commit to a folder."""
    command = ["git", "archive", commit, *paths]
    archive = subprocess.run(command, cwd=results.ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def start(code: str, *path: Path, output: Any) -> subprocess.Popen[str]:
    """Starts Python code, with these folders as its path, in the first of them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.Popen([sys.executable, "-P", "-c", code], cwd=path[0], env=environment, stdout=output, text=True)


HASH = "from benchmarks.results import source_hash; from pathlib import Path; print(source_hash({!r}, Path.cwd()))"


def run(commit: str, framework: str, scratch: Path) -> int:
    """Compares a commit with the checkout, and writes the pair if they are the same; returns 1 if they are not."""
    code, benchmark = scratch / "code", scratch / "benchmark"
    export(commit, code, *results.KERNELS.values(), "linear_ce")  # both packages, because this module imports one
    export(commit, benchmark, "benchmarks/*.py")
    # The commit's own function computes its hash, as in the rows that were measured with it.
    old, _ = start(HASH.format(framework), code, benchmark, output=subprocess.PIPE).communicate()
    old, new = old.strip(), results.source_hash(framework)
    if not old:
        raise SystemExit(f"OLD_COMMIT {commit} has no code_hash")
    versions = {name: version(name) for name in VERSIONS[framework]}
    calls = [f"{shape.name}, {mode.name}, {gpu}" for gpu in results.COMPARED_GPUS for shape, mode, _ in plan([GRID])]
    if framework == "jax":
        calls = results.recorded_calls(framework, old, versions)
    unknown = [call for call in calls if new not in results.same_code(framework, old, versions, call)]
    if not unknown:
        known = f"{new} is the code_hash of both" if new == old else f"{old} and {new} are known to launch the same"
        print(f"nothing to compare: {known if calls else f'no row of {old} is in results/'}")
        return 0
    outputs = [scratch / "old.jsonl", scratch / "new.jsonl"]
    processes = []
    for name, folder, output in zip(("old", "new"), (code, results.ROOT), outputs, strict=True):
        with output.open("w") as file:
            record_it = f"from benchmarks.same_launches import record; record({name!r}, {framework!r}, {unknown!r})"
            processes.append(start(record_it, folder, results.ROOT, output=file))
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit("one of the commits could not be recorded")
    with outputs[0].open() as before, outputs[1].open() as after:
        differences, counts = compare(before, after)
    if differences:
        print(f"{len(differences)} of {counts['calls']} calls differ, among them:")
        print("\n".join(differences[:MOST_DIFFERENCES]))
        return 1
    pair = {"old": old, "new": new, "old_commit": commit, "new_commit": results.commit(), **counts}
    pair |= {"versions": versions, "date": results.now()} | ({"only": unknown} if framework == "jax" else {})
    add(pair, framework)
    print(f"{old} and {new} launch the same: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    return 0


def add(pair: dict[str, Any], framework: str) -> None:
    """Adds a pair to the file."""
    from parity.report import to_json

    pairs = json.loads(results.SAME_LAUNCHES.read_text()) if results.SAME_LAUNCHES.exists() else {}
    results.SAME_LAUNCHES.write_text(to_json({**pairs, framework: [*pairs.get(framework, []), pair]}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if the commits differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_launches", description=__doc__)
    parser.add_argument("commit", metavar="OLD_COMMIT", help="compared with the checkout")
    parser.add_argument("--framework", default="torch", choices=("torch", "jax"))
    options = parser.parse_args(arguments)
    try:
        commit = results.git("rev-parse", "--verify", f"{options.commit}^{{commit}}")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"OLD_COMMIT must be a commit, got {options.commit}") from error
    with tempfile.TemporaryDirectory() as scratch:
        return run(commit, options.framework, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
