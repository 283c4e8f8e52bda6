"""Measures the loss and other implementations of it: `python -m benchmarks.linear_ce --framework torch|jax`.

Every method is first compared with float32 computed in chunks. If its errors are too large, it is reported and not
timed. Then it alternates with the floor, the bare matmuls of its mode. how-to-measure.md has the definitions.
"""

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import host as host_modes
from benchmarks import results
from benchmarks.methods import (
    ERRORS,
    ROW_ERRORS,
    Bench,
    Floor,
    Method,
    Problem,
    Program,
    UnavailableError,
    check_errors,
    describe,
)
from benchmarks.shapes import ALL_MODES, GRID, SHAPES, TARGETS, Item, Mode, Shape, plan
from benchmarks.timing import Sensor, Timing

GRID_WARMUP = 2.0  # seconds: the grid has hundreds of rows
BATCH = 4  # programs that a process of --compile-jobs compiles before more rows are measured
DTYPES = ("bfloat16", "float16", "float32")


def parse(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = "python -m benchmarks.linear_ce",
    description: str | None = __doc__,
    framework: str | None = None,
) -> argparse.Namespace:
    """Returns the options of a command.

    Args:
        arguments: of the command; None: those of the process.
        prog: the command.
        description: what it does.
        framework: the default of --framework; None: there is none.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--framework", required=framework is None, default=framework, choices=("torch", "jax"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: only to try it out")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help=f"of {', '.join(SHAPES)}, or N-D-V; or {GRID}")
    parser.add_argument("--modes", nargs="+", metavar="NAME", help=f"of {', '.join(ALL_MODES)}")
    parser.add_argument("--targets", nargs="+", metavar="KIND", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: all; an unknown name lists them")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    usual = Timing()
    parser.add_argument(
        "--seconds", type=float, default=usual.seconds, help="seconds for the pairs of one row (default %(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=usual.min_pairs, help="minimum number of pairs, even if slow (%(default)s)"
    )
    parser.add_argument(
        "--warmup",
        type=float,
        help=f"seconds before the first pair of a row ({usual.warmup:g}; {GRID_WARMUP:g} in the grid; 0 on a CPU)",
    )
    parser.add_argument(
        "--energy-seconds",
        type=float,
        help="seconds of the block of calls whose energy is measured; 0: none "
        f"({usual.energy_seconds:g}; 0 in the grid)",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="print and record kernels too; not in host and graph modes"
    )
    parser.add_argument("--no-trace", dest="trace", action="store_false", help="host modes: do not count kernels")
    add_run_options(parser)
    options = parser.parse_args(arguments)
    check_run_options(parser, options)
    options.grid = options.shapes == [GRID]
    warmup = 0.0 if options.device == "cpu" else GRID_WARMUP if options.grid else usual.warmup
    warmup = warmup if options.warmup is None else options.warmup
    energy = 0.0 if options.grid else usual.energy_seconds
    energy = energy if options.energy_seconds is None else options.energy_seconds
    options.timing = Timing(options.seconds, warmup, energy, options.pairs)
    return options


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a command that measures rows one after the other: where they go, and when it stops."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the rows into this file after each one")
    parser.add_argument("--resume", action="store_true", help="skip rows of the file that are of the same code")
    parser.add_argument(
        "--until", type=float, metavar="SECONDS", default=math.inf, help="start no row after this many seconds"
    )
    parser.add_argument("--commit", help="commit of the code, if git does not know it")
    parser.add_argument(
        "--compile-jobs",
        type=int,
        default=0,
        metavar="N",
        help=f"JAX: compile the programs of jax_pallas in N processes, those of the next {BATCH} N rows at a time",
    )


def check_run_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the command if the options of `add_run_options` do not fit together."""
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    if options.compile_jobs < 0:
        parser.error(f"--compile-jobs must not be negative, got {options.compile_jobs}")
    if options.compile_jobs and options.framework != "jax":
        parser.error("--compile-jobs is for JAX: one compiled kernel of PyTorch serves many shapes")


def open_bench(framework: str, device: str, *, shares_gpu: bool = False) -> Bench:
    """Returns the framework's side of the benchmark; raises RuntimeError if the device is missing.

    Args:
        framework: torch or jax.
        device: cuda or cpu.
        shares_gpu: other processes need some of the GPU's memory, so JAX does not take it in advance.
    """
    if framework == "torch":
        from benchmarks.torch_bench import TorchBench

        return TorchBench(device)
    # Methods that need most of the memory must not fail because of JAX's default share of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
    if shares_gpu:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from benchmarks.jax_bench import JaxBench

    return JaxBench(device)


class CompileAhead:
    """Compiles the programs of --compile-jobs in batches, so that a short run compiles few that it does not measure.

    Args:
        bench: the framework's side.
        jobs: processes; 0: nothing is compiled ahead.
        programs: of each item of the plan, in the order of measurement.
        beside: rows are measured meanwhile: of each batch from its first program on, while the next one is compiled.
    """

    def __init__(self, bench: Bench, jobs: int, programs: Iterable[Iterable[Program]], *, beside: bool = False) -> None:
        self._bench, self._jobs, self._beside = bench, jobs, beside
        listed = enumerate(map(list, programs if jobs else ()))  # an item is only planned when its batch begins
        self._waiting = ((index, of_item) for index, of_item in listed if of_item)
        self._next = next(self._waiting, None)
        self._newest = -1  # the first item of the newest batch

    def before(self, item: int) -> None:
        """Compiles the programs of the item that is measured next, with those of later ones, unless it was done."""
        self._compile(item)
        if self._beside and self._newest <= item and self._next:
            self._compile(self._next[0])

    def _compile(self, item: int) -> None:
        batch: list[Program] = []
        while self._next and (self._next[0] <= item or 0 < len(batch) < BATCH * self._jobs):
            batch += self._next[1]
            self._next = next(self._waiting, None)
        if batch:
            self._newest = item
            self._bench.compile_ahead(batch, self._jobs, beside=self._beside)


def measure(
    bench: Bench,
    problem: Problem,
    method: Method,
    mode: Mode,
    options: argparse.Namespace,
    floor: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Returns the figures of one method: errors and bytes, then, if they are sane, times.

    A host mode adds "later", which gives the figures of a trace, or None.

    Args:
        bench: the framework's side.
        problem: the arrays.
        method: what is measured.
        mode: how it is called.
        options: of the command.
        floor: what the method alternates with, in place of the bare matmuls.
    """
    try:
        prepared = problem.prepare(method, mode)
    except UnavailableError as error:
        return {"status": "skipped", "note": str(error)}
    figures = {"version": method.version(), **prepared.figures}
    wrong = wrong_errors(figures, options.dtype)
    if wrong is not None:
        return {**figures, "status": "failed", "note": wrong}
    if mode.measures.startswith("host"):
        problem.forget()
        bench.release()
        times, later = bench.host_figures(prepared, method, mode, options.timing, trace=options.trace)
        return {**figures, **times, "later": later, "status": "ok"}
    if mode.measures == "graph":
        matmuls = problem.floor(mode)
        try:
            calls = [bench.captured(matmuls.run), bench.captured(prepared.run)]
        except UnavailableError as error:
            return {**figures, "status": "skipped", "note": str(error)}
        figures |= bench.time_pairs(calls, options.timing, options.sensor).figures()
        return {**figures, "floor_padding": matmuls.padding, "status": "ok"}
    matmuls = problem.floor(mode) if floor is None else Floor(floor, padding=0)
    calls = [matmuls.run, prepared.run]
    if prepared.forward and not options.grid:
        calls.append(prepared.forward)
    figures |= bench.time_pairs(calls, options.timing, options.sensor).figures()
    if options.kernels:
        figures["by_kernel"] = bench.kernels(prepared)
    return {**figures, "floor_padding": matmuls.padding, "status": "ok"}


def wrong_errors(figures: Mapping[str, Any], dtype: str) -> str | None:
    """Returns what is wrong with the errors among the figures of a method, or None."""
    return check_errors({key: figures[key] for key in ERRORS if key in figures}, dtype)


def measure_safely(
    bench: Bench,
    problem: Problem,
    method: Method,
    mode: Mode,
    options: argparse.Namespace,
    floor: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """As `measure`, with a failure of the method as its result. A failure of our method also prints its traceback."""
    try:
        return measure(bench, problem, method, mode, options, floor)
    except Exception as error:  # another library may fail in any way, and the others are still measured
        if method.kind != "peer":
            traceback.print_exc()
        return {"status": "failed", "note": describe(error)}


def code_hash(method: Method, sources: str, versions: Mapping[str, str]) -> str:
    """Returns a hash of what computes a method: the sources of our package, or the versions of other libraries."""
    return sources if method.in_package else results.short_hash(str(method.version()), str(sorted(versions.items())))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a method of ours failed."""
    return run(parse(arguments))


def row_of(item: Item, method: Method, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the start of a row: what is measured, and by which method."""
    shape, mode, targets = item
    return {
        **shape.of_row(),
        "dtype": options.dtype,
        "targets": targets,
        "mode": mode.name,
        "method": method.name,
        "kind": method.kind,
        "framework": options.framework,
    }


def run(options: argparse.Namespace, *, floor: str | None = None, floor_code: str = "") -> int:
    """Measures what the options of `parse` select; returns 1 if a method of ours failed.

    Args:
        options: those of `parse`.
        floor: what computes the matmuls in place of the framework; the rows say so. None: the framework does.
        floor_code: hash of the code that puts `floor` in its place.
    """
    deadline = time.monotonic() + options.until
    try:
        items = plan(options.shapes, options.modes, options.targets)
    except ValueError as error:
        raise SystemExit(f"--{error}") from error
    try:
        bench = open_bench(options.framework, options.device, shares_gpu=options.compile_jobs > 0)
    except RuntimeError as error:
        raise SystemExit(f"--device {options.device}: {error}") from error
    unknown = [name for name in options.methods or () if name not in bench.methods]
    if unknown:
        raise SystemExit(f"--methods must be among {', '.join(bench.methods)}, got {', '.join(unknown)}")
    methods = [
        method
        for name, method in bench.methods.items()
        if (name in options.methods if options.methods else method.grid if options.grid else not method.only_named)
    ]
    options.sensor = Sensor(gpu=options.device == "cuda")
    try:
        file = results.ResultFile(options.json, bench.device, bench.versions(), options.commit or results.commit())
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"{bench.device}, {bench.versions()}, commit {file.head['commit']}")
    if options.device == "cpu":
        print("On a CPU: this only tries the benchmark out. Its times say nothing about the methods.")
    else:
        for what, why in (("SM clock and power", options.sensor.why_not), ("energy", options.sensor.why_no_energy)):
            if why is not None:
                print(f"no {what}: {why}")

    failed, left = 0, 0
    traces: list[tuple[dict[str, Any], host_modes.Later]] = []
    sources = results.source_hash(options.framework)

    def hash_of(method: Method, mode: Mode) -> str:
        of_mode = (
            sources if mode.objective.name != "token-loss" else results.token_loss_hash(options.framework, sources)
        )
        usual = code_hash(method, of_mode, bench.versions())
        return usual if floor is None else results.short_hash(usual, floor_code)

    def rows_of(shape: Shape, mode: Mode, targets: str) -> list[dict[str, Any]]:
        rows = [
            row_of((shape, mode, targets), method, options)
            | {"code_hash": hash_of(method, mode)}
            | ({} if floor is None else {"floor": floor})
            for method in methods
            if method.applies(mode, named=options.methods is not None)
        ]
        return [row for row in rows if not (options.resume and file.holds(row))]

    work = [(*item, rows_of(*item)) for item in items]
    ahead = CompileAhead(
        bench,
        options.compile_jobs,
        (
            [Program(shape, options.dtype, row["method"], mode) for row in rows if bench.methods[row["method"]].ahead]
            for shape, mode, _, rows in work
        ),
    )
    problem, made_for = None, None
    for index, (shape, mode, targets, rows) in enumerate(work):
        host = mode.measures.startswith("host")
        if not rows or time.monotonic() > deadline:
            left += len(rows)
            continue
        ahead.before(index)
        print(f"\n{title(shape, mode, targets, options.dtype)}\n{results.heading(host=host)}", flush=True)
        if made_for != (shape, targets):
            problem = None  # the old arrays go before the new ones come
            bench.release()
            problem, made_for = bench.problem(shape, options.dtype, targets), (shape, targets)
        assert problem is not None
        for row in rows:
            if time.monotonic() > deadline:
                left += 1
                continue
            method = bench.methods[row["method"]]
            row |= dict.fromkeys(host_modes.MEASURED if host else MEASURED)
            row |= measure_safely(bench, problem, method, mode, options)
            later = row.pop("later", None)
            if later is not None:
                traces.append((row, later))
            file.add(row)
            print(results.line(row), flush=True)
            if row.get("by_kernel"):
                print(results.kernels(row), flush=True)
            failed += row["status"] == "failed" and method.kind != "peer"
            bench.release()
    if traces:
        print(f"\ntraced after all times\n{results.heading(host=True)}", flush=True)
    for row, later in traces:
        row |= later()
        file.add(row)
        print(f"{row['shape']}, {row['mode']}:\n{results.line(row)}", flush=True)
    if left:
        print(f"\n{left} rows were not started before --until {options.until:g} seconds")
    return 1 if failed else 0


# The keys that every row has, None where they were not measured.
MEASURED = (
    *("ms", "ms_p20", "ms_p80", "floor_ms", "ratio", "ratio_p20", "ratio_p80", "pairs", "forward_ms", "floor_padding"),
    *("peak_bytes", "workspace_bytes", *ERRORS, *ROW_ERRORS, "mean_loss", "repeats"),
    *("lower_s", "compile_s", "joules", "joules_note", "sm_mhz", "power_w", "version", "status", "note"),
)


def title(shape: Shape, mode: Mode, targets: str, dtype: str) -> str:
    return f"{shape.name}: N {shape.n}, D {shape.d}, V {shape.v}, {dtype}, {targets} targets, {mode.name}"


if __name__ == "__main__":
    sys.exit(main())
