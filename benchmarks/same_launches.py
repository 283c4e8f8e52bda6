"""Proves that a package launches the same in two commits: `python -m benchmarks.same_launches OLD_COMMIT`.

A change of the code that launches kernels changes the `code_hash` of measured rows, even if the calls launch the same
machine code with the same arguments. This command records what calls of the grid do on an H100 and an H200, in the
checkout and in an older commit. It adds the two hashes to benchmarks/results/same-launches.json, with the calls that
are the same if others differ. `--resume` then keeps the rows of the older code that are of these calls.

A recorded call is the forward and backward pass of the mean loss without arrays, so no GPU is needed. Of core_triton
every call of the grid is compared: all launches in order, with their grids, arguments and PTX, and the library's
matmuls and other operators of PyTorch (`torch_launches.py`). Of jax_pallas, where a call takes seconds, only those that
have a row of the older code are compared: the program that JAX makes for the GPU, and the code of its kernels
(`jax_launches.py`). Kernels whose code differs before it is compiled are compiled and compared again (`jax_ptx.py`).
"""

import argparse
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.compare_child import check_origin
from benchmarks.shapes import GRID, plan

COMPILERS = {"torch": ("torch", "triton"), "jax": ("jax", "jaxlib")}  # what compiles the kernels
MOST_DIFFERENCES = 5  # that are printed
PROGRESS_SECONDS = 20
CODE = "code"  # of a kernel
CONSTEXPRS = "constexprs"  # what they change is in the code, so they only explain a difference

Step = dict[str, str]  # what is launched, then its grid, arguments, constexprs and options


def record(name: str, framework: str, calls: Sequence[str], modules: str) -> None:
    """Prints a line of JSON for each call: its name and its steps. The package must come from the working folder.

    Args:
        name: for the reader.
        framework: torch or jax.
        calls: their names.
        modules: the folder where kernels of JAX are kept that can be compiled later.
    """
    recorder = importlib.import_module(f"benchmarks.{framework}_launches")
    check_origin(Path.cwd())
    planned = {(shape.name, mode.name): (shape, mode) for shape, mode, _ in plan([GRID])}
    kept = {"modules": Path(modules)} if framework == "jax" else {}
    for call in progress(name, calls, "calls"):
        shape, mode, gpu = call.split(", ")
        print(json.dumps({"call": call, "steps": recorder.steps_of(*planned[shape, mode], gpu, **kept)}))


def progress(name: str, items: Sequence[str], what: str) -> Iterator[str]:
    """Yields items, and prints from time to time how many are done."""
    last = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        if time.monotonic() > last + PROGRESS_SECONDS or number == len(items):
            last = time.monotonic()
            print(f"{name}: {number} of {len(items)} {what}", file=sys.stderr, flush=True)


def bare(ptx: str) -> str:
    """Returns PTX without comments and without what only debuggers read."""
    code, *debug = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.MULTILINE)
    assert ".entry" not in "".join(debug)
    code = re.sub(r"//.*|^\s*\.(loc|file)\s.*|^\$L__(tmp|func_begin|func_end)\d+:", "", code, flags=re.MULTILINE)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


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
    """The differences of two recordings, the calls that have none, and the counts of these: calls, launches, distinct
    kernels."""

    differences: list[str]
    same: list[str]
    counts: dict[str, int]


def compare(old: Iterable[str], new: Iterable[str], compiled: Mapping[str, str] | None = None) -> Comparison:
    """Compares the lines of two recordings. `compiled` has the code that some code of kernels becomes."""
    differences, same, kernels, launches = [], [], set(), 0
    for before, after in _calls(old, new):
        for step in (*before["steps"], *after["steps"]):
            if CODE in step:
                step[CODE] = (compiled or {}).get(step[CODE], step[CODE])
        found = difference(before["steps"], after["steps"])
        if before["call"] != after["call"]:
            found = f"another call, {after['call']}"
        if found is not None:
            differences.append(f"{before['call']}: {found}")
            continue
        same.append(after["call"])
        launches += len(after["steps"])
        kernels |= {(step["kernel"], step[CODE]) for step in after["steps"] if CODE in step}
    return Comparison(differences, same, {"calls": len(same), "launches": launches, "kernels": len(kernels)})


def _calls(old: Iterable[str], new: Iterable[str]) -> Iterator[tuple[Any, Any]]:
    for before, after in zip_longest(old, new, fillvalue='{"call": "no call", "steps": []}'):
        yield json.loads(before), json.loads(after)


def unequal_codes(old: Iterable[str], new: Iterable[str], kept: Collection[str]) -> list[str]:
    """Returns the codes, among those of `kept` kernels, that are all that differs in some calls of two recordings."""
    found = set()
    for before, after in _calls(old, new):
        pairs = [*zip(before["steps"], after["steps"], strict=False)]
        codes = {step.get(CODE) for pair in pairs if pair[0].get(CODE) != pair[1].get(CODE) for step in pair}
        without = ([step | {CODE: ""} for step in steps] for steps in (before["steps"], after["steps"]))
        if codes <= set(kept) and difference(*without) is None:
            found |= codes
    return sorted(found)


def compiled_codes(modules: Path, codes: Sequence[str]) -> dict[str, str]:
    """Compiles kernels of JAX in another process. Returns the code that each becomes; none without a compiler."""
    from benchmarks import jax_ptx

    files = [modules / code for code in codes]
    if not jax_ptx.COMPILER.is_dir():
        print(f"{jax_ptx.COMPILER} is missing, so no kernel is compiled: run `make test`, which installs it")
        return {}
    compile_them = f"from benchmarks.jax_ptx import compile_all; compile_all({[*map(str, files)]!r})"
    more = jax_ptx.environment()
    process = start(compile_them, results.ROOT, jax_ptx.COMPILER, output=subprocess.PIPE, more=more)
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit("a kernel could not be compiled")
    return {file.name: code for file, code in zip(files, jax_ptx.codes_of(files, printed), strict=True)}


def export(commit: str, folder: Path, *paths: str) -> None:
    """Writes files of a commit to a folder."""
    command = ["git", "archive", commit, *paths]
    archive = subprocess.run(command, cwd=results.ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def start(code: str, *path: Path, output: Any, more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Starts Python code, with these folders as its path, in the first of them, with more variables."""
    environment = {**os.environ, **(more or {}), "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.Popen([sys.executable, "-P", "-c", code], cwd=path[0], env=environment, stdout=output, text=True)


HASH = "from benchmarks.results import source_hash; from pathlib import Path; print(source_hash({!r}, Path.cwd()))"


def versions_of(framework: str) -> dict[str, str]:
    """Returns the versions of what compiles a framework's kernels, as the files of results have them."""
    return {name: importlib.import_module(name).__version__ for name in COMPILERS[framework]}


def run(commit: str, framework: str, scratch: Path) -> int:
    """Compares a commit with the checkout, and writes the pair, of the calls that are the same; returns 1 if some calls
    differ."""
    code, benchmark = scratch / "code", scratch / "benchmark"
    export(commit, code, results.KERNELS[framework], "linear_ce")
    export(commit, benchmark, "benchmarks/*.py")
    # The commit's own function computes its hash, as in the rows that were measured with it.
    old, _ = start(HASH.format(framework), code, benchmark, output=subprocess.PIPE).communicate()
    old, new = old.strip(), results.source_hash(framework)
    if not old:
        raise SystemExit(f"OLD_COMMIT {commit} has no code_hash")
    versions = versions_of(framework)
    calls = [f"{shape.name}, {mode.name}, {gpu}" for gpu in results.COMPARED_GPUS for shape, mode, _ in plan([GRID])]
    if framework == "jax":
        calls = results.recorded_calls(framework, old, versions)
    unknown = [call for call in calls if new not in results.same_code(framework, old, versions, call)]
    if not unknown:
        known = f"{new} is the code_hash of both" if new == old else f"{old} and {new} are known to launch the same"
        print(f"nothing to compare: {known if calls else f'no row of {old} is in results/'}")
        return 0
    outputs = [scratch / "old.jsonl", scratch / "new.jsonl"]
    modules, processes = scratch / "modules", []
    modules.mkdir()
    for name, folder, output in zip(("old", "new"), (code, results.ROOT), outputs, strict=True):
        with output.open("w") as file:
            arguments = name, framework, unknown, str(modules)
            record_it = f"from benchmarks.same_launches import record; record(*{arguments!r})"
            processes.append(start(record_it, folder, results.ROOT, output=file))
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit("one of the commits could not be recorded")
    before, after = (output.read_text().splitlines() for output in outputs)
    unequal = unequal_codes(before, after, {file.name for file in modules.iterdir()})
    compiled = compiled_codes(modules, unequal) if unequal else {}
    differences, same, counts = compare(before, after, compiled)
    if differences:
        print(f"{len(differences)} of {len(differences) + len(same)} calls differ, among them:")
        print("\n".join(differences[:MOST_DIFFERENCES]))
    if not same:
        return 1
    pair = {"old": old, "new": new, "old_commit": commit, "new_commit": results.commit(), **counts}
    only = {"only": same} if framework == "jax" or differences else {}
    add(pair | {"versions": versions, "date": results.now()} | only, framework)
    print(f"{old} and {new} launch the same: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    return int(bool(differences))


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
