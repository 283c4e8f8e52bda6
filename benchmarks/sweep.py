"""Measures our loss at several chunk row counts: `python -m benchmarks.sweep --framework torch|jax --shapes NAME...`.

Every row count is measured like a method of `benchmarks.linear_ce`: its errors are checked first, and then it
alternates with the bare matmuls, or, with `--floor plan`, with the row count that the plan chooses.
`benchmarks.fit_chunk_cost` fits the estimate that chooses chunks to these rows.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from benchmarks import linear_ce, results
from benchmarks.chunk_rows import Choice, Division, considered, fewest_rows, first_chunk, preferring
from benchmarks.methods import Method, Program, describe
from benchmarks.shapes import GRID, GRID_MODES, MODES, Item, Mode, plan
from benchmarks.timing import Sensor, Timing
from linear_ce.chunking import MIN_ROWS
from linear_ce.spec import DEFAULT_MEMORY_BUDGET

METHODS = {"torch": "triton", "jax": "mosaic"}
# Training calls with all of their rows: fewer rows would be another shape for the estimate.
SWEPT = {
    name: mode
    for name, mode in MODES.items()
    if mode.d_input and mode.d_weight and mode.reduction == "mean" and not mode.ignored
}
# What `--floor` names, and the value of "floor" in a row that is relative to the choice of the plan.
MATMULS, PLAN = "matmuls", "plan"
DIVIDED = ("chunk_rows", "first_rows", "chunks", "d_input")  # what a row says of a choice
BESIDE = "measured while other programs were compiled"  # the note of a row
# The files of linear_ce in `code_hash`. Rows are measured at given row counts, whatever the estimate chooses.
CHOICES = tuple(name for name in results.CHOICES if name != "chunk_cost.py")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--framework", required=True, choices=tuple(METHODS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: only to try it out")
    parser.add_argument("--shapes", nargs="+", required=True, metavar="NAME", help=f"as linear_ce has them, or {GRID}")
    parser.add_argument("--modes", nargs="+", default=GRID_MODES, choices=tuple(SWEPT), metavar="NAME")
    parser.add_argument("--rows", nargs="+", type=int, metavar="ROWS", help="of a chunk; default: the most promising")
    parser.add_argument("--most", type=int, default=8, help="row counts of a shape and mode, from 2 (%(default)s)")
    parser.add_argument(
        "--floor",
        default=MATMULS,
        choices=(MATMULS, PLAN),
        help=f"what a row alternates with; {PLAN}, for JAX: the choice of the plan, which then has no row",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=linear_ce.DTYPES)
    parser.add_argument("--seconds", type=float, default=1.0, help="for the pairs of one row (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=Timing().min_pairs, help="at least (default %(default)s)")
    parser.add_argument("--warmup", type=float, default=linear_ce.GRID_WARMUP, help="seconds (default %(default)s)")
    linear_ce.add_run_options(parser)
    parser.add_argument("--beside", action="store_true", help="measure rows while --compile-jobs compiles later ones")
    options = parser.parse_args(arguments)
    linear_ce.check_run_options(parser, options)
    if options.beside and not options.compile_jobs:
        parser.error("--beside needs --compile-jobs")
    if options.floor == PLAN and options.framework != "jax":
        parser.error("--floor plan is for JAX: PyTorch makes the plan of a call when it runs, so two cannot alternate")
    if options.most < 2:
        parser.error(f"--most must be at least 2, for the plan's choice and the fewest chunks, got {options.most}")
    # What `linear_ce.measure` reads. The forward pass is not timed alone.
    options.grid, options.kernels = True, False
    options.timing = Timing(options.seconds, options.warmup, energy_seconds=0, min_pairs=options.pairs)
    options.trace = False
    options.code_hash = results.source_hash(options.framework, choices=CHOICES)
    return options


def arrays(framework: str, n: int, d: int, v: int, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """Returns input and weight without memory."""
    if framework == "torch":
        import torch

        return tuple(torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in ((n, d), (v, d)))  # pyright: ignore[reportReturnType]
    import jax

    return jax.ShapeDtypeStruct((n, d), dtype), jax.ShapeDtypeStruct((v, d), dtype)


def explain(framework: str, input: Any, weight: Any, budget: int, method: str, device: str | None = None) -> Any:
    """Returns the package's explanation of a training call."""
    if framework == "torch":
        import core_triton as package
    else:
        import jax_pallas as package
    return package.explain(input, weight, memory_budget=budget, implementation=method, device=device)


def budget_of(mode: Mode) -> int:
    return DEFAULT_MEMORY_BUDGET if mode.memory_budget is None else mode.memory_budget


def choices_of(make: Callable[[], Any], rows: Sequence[int] | None, most: int, *, floor: str = MATMULS) -> list[Choice]:
    """Returns what is measured of a shape and mode, from many rows to few.

    Args:
        make: makes the plan.
        rows: of equal chunks. Those that no plan has are printed. None: the choice of the plan, which may have a first
            chunk in the memory of d_weight, equal chunks of the rows of the fewest, and those with the least estimates.
        most: how many, without `rows`. At least 2.
        floor: of the rows. With PLAN the choice of the plan is always among them.
    """
    choices = considered(make)
    if not choices:
        return []
    found = []
    if rows is None or floor == PLAN:
        planned = first_chunk(make)
        if planned is not None:
            found, most = [planned], most - 1
        own = () if planned else (make().chunks.rows,)
        if rows is None:
            always = dict.fromkeys((*own, fewest_rows(make)))
            rest = [choice.rows for choice in choices if choice.rows not in always]
            rows = [*always, *rest[: most - len(always)]]
        else:
            rows = [*own, *rows]
    for wanted in sorted(set(rows), reverse=True):
        exact = [choice for choice in considered(make, wanted) if choice.rows == wanted]
        if not exact:
            print(f"{wanted} rows: no plan has chunks of so many; chunks are equal, in multiples of {MIN_ROWS} rows")
        found += exact[:1]
    return found


def preferred(choice: Choice) -> int | None:
    """Returns the rows that the plan must prefer. None: the choice is its own, with a first chunk."""
    return None if choice.division.first_rows else choice.rows


def of_d_input(choice: Choice) -> dict[str, Any] | None:
    """Returns how a choice divides d_input. The estimate chooses this too, not only the rows."""
    return None if choice.chunk.d_input is None else choice.chunk.d_input._asdict()


def beside_plan(
    rows: Sequence[tuple[Choice, dict[str, Any]]], planned: Division
) -> list[tuple[Choice, dict[str, Any]]]:
    """Returns the rows that are relative to the choice of the plan: all but its own, which "plan" describes."""
    own = next(row for choice, row in rows if choice.division == planned)
    more = {"floor": PLAN, "plan": {name: own[name] for name in DIVIDED}}
    return [(choice, row | more) for choice, row in rows if choice.division != planned]


def with_plans(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows, and one with the ratio 1 for each choice of a plan that rows are relative to."""
    plans: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("floor") == PLAN and row["status"] == "ok":
            call = [row[name] for name in ("shape", "dtype", "targets", "mode", "method", "code_hash", "plan")]
            plans[str(call)] = {**row, **row["plan"], "ms": row["floor_ms"], "ratio": 1.0}
    return [*rows, *plans.values()]


def summary(rows: Sequence[dict[str, Any]], planned: Division) -> str:
    """Returns how far the choice of the plan, `planned`, is from the best of the rows measured."""
    timed = [row for row in rows if row["status"] == "ok"]
    chosen = next((row for row in timed if Division.of_row(row) == planned), None)
    if chosen is None:
        return f"the choice of the plan, {planned}, was not measured"
    best = min(timed, key=lambda row: row["ratio"])
    slower = 100 * (chosen["ratio"] / best["ratio"] - 1)
    return f"the plan chooses {planned}, {slower:.1f}% slower than the best, {Division.of_row(best)}"


def rows_of(
    item: Item, method: Method, choices: Sequence[Choice], options: argparse.Namespace, planned: Division
) -> list[tuple[Choice, dict[str, Any]]]:
    """Returns the choices of a shape and mode, each with the row that it will have, without what is measured. The
    plan chooses `planned`."""
    common = linear_ce.row_of(item, method, options) | {
        "code_hash": options.code_hash,
        "budget": budget_of(item[1]),
    }
    found = []
    for choice in choices:
        row = {
            **common,
            "chunk_rows": choice.rows,
            "first_rows": choice.division.first_rows or None,
            "chunks": choice.chunks,
            "d_input": of_d_input(choice),
            "estimated_ms": choice.ms(),
        }
        found.append((choice, row))
    return beside_plan(found, planned) if options.floor == PLAN else found


def programs_of(item: Item, method: Method, options: argparse.Namespace, file: results.ResultFile) -> list[Program]:
    """Returns the programs of JAX for the rows of a shape and mode that will be measured, first that of the plan if
    they are relative to it."""
    shape, mode, _ = item
    x, w = arrays(options.framework, shape.n, shape.d, shape.v, options.dtype)

    def make() -> Any:
        return explain(options.framework, x, w, budget_of(mode), method.name).plan

    choices = choices_of(make, options.rows, options.most, floor=options.floor)
    if not choices:
        return []
    planned = Division.of_plan(make())
    measured = [
        choice for choice, row in rows_of(item, method, choices, options, planned) if not held(row, options, file)
    ]
    if measured and options.floor == PLAN:
        measured = [choice for choice in choices if choice.division == planned] + measured
    return [Program(shape, options.dtype, method.name, mode, preferred(choice)) for choice in measured]


def held(row: dict[str, Any], options: argparse.Namespace, file: results.ResultFile) -> bool:
    """Returns whether --resume finds a row in the file."""
    return options.resume and file.holds(row, "d_input", "plan")


def sweep(
    bench: Any,
    method: Method,
    item: Item,
    options: argparse.Namespace,
    file: results.ResultFile,
    problem: Any,
    deadline: float,
) -> tuple[int, int]:
    """Measures one shape in one mode. Returns how many rows failed, and how many were not started in time."""
    shape, mode, targets = item

    def make() -> Any:
        return explain(options.framework, problem.input, problem.weight, budget_of(mode), method.name).plan

    print(f"\n{linear_ce.title(shape, mode, targets, options.dtype)}", flush=True)
    choices = choices_of(make, options.rows, options.most, floor=options.floor)
    if not choices:
        print(f"nothing to sweep: the path {make().path} of {method.name} does not choose chunk rows by cost")
        return 0, 0
    planned = Division.of_plan(make())
    rows = rows_of(item, method, choices, options, planned)
    if not rows:
        print(f"nothing to compare: the plan considers only {planned}")
        return 0, 0
    print(results.heading(), flush=True)
    failed, left, floor = 0, 0, None

    @contextmanager
    def preferring_choice(choice: Choice) -> Iterator[Method]:
        own = replace(method, rows=preferred(choice))
        # JAX has the plan in its program, which `compile_call` makes with the same rows.
        with nullcontext() if own.rows is None else preferring(own.rows, traces=False):
            if Division.of_plan(make()) != choice.division:
                raise AssertionError(f"the plan must have {choice.division}, not {Division.of_plan(make())}")
            yield own

    for choice, row in rows:
        if held(row, options, file):
            continue
        if time.monotonic() > deadline:
            left += 1
            continue
        if options.floor == PLAN and floor is None:
            with preferring_choice(next(choice for choice in choices if choice.division == planned)) as own:
                try:
                    prepared = problem.prepare(own, mode)
                    floor, wrong = prepared.run, linear_ce.wrong_errors(prepared.figures, options.dtype)
                except Exception as error:  # other shapes and modes are still measured, as in `measure_safely`
                    traceback.print_exc()
                    wrong = describe(error)
            if wrong is not None:
                print(f"{planned}, the choice of the plan: {wrong}", flush=True)
                return len(rows), 0
        row |= dict.fromkeys(linear_ce.MEASURED)
        with preferring_choice(choice) as own:
            row |= linear_ce.measure_safely(bench, problem, own, mode, options, floor)
        row.pop("later", None)
        if options.beside and row["status"] == "ok":
            row["note"] = BESIDE
        file.add(row)
        print(results.line({**row, "method": f"{choice.division} x {choice.chunks}"}), flush=True)
        failed += row["status"] == "failed"
        bench.release()
    same = ("shape", "dtype", "targets", "mode", "method", "code_hash", "floor", "plan")
    swept = [row for row in file.rows if row.get("chunk_rows") and results.same_measurement(row, rows[0][1], same)]
    if swept:
        print(summary(with_plans(swept), planned), flush=True)
    return failed, left


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a row count failed."""
    options = parse(arguments)
    deadline = time.monotonic() + options.until
    try:
        items = plan(options.shapes, options.modes)
    except ValueError as error:
        raise SystemExit(f"--{error}") from error
    try:
        bench = linear_ce.open_bench(options.framework, options.device, shares_gpu=options.compile_jobs > 0)
    except RuntimeError as error:
        raise SystemExit(f"--device {options.device}: {error}") from error
    method = bench.methods["chunked" if options.device == "cpu" else METHODS[options.framework]]
    options.sensor = Sensor(gpu=options.device == "cuda")
    try:
        file = results.ResultFile(options.json, bench.device, bench.versions(), options.commit or results.commit())
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"{bench.device}, {bench.versions()}, commit {file.head['commit']}")
    failed, left, unopened = 0, 0, 0
    # All modes of a shape together: its arrays are drawn once.
    order = {shape: index for index, (shape, _, _) in reversed([*enumerate(items)])}
    items.sort(key=lambda item: order[item[0]])
    programs = (programs_of(item, method, options, file) for item in items)
    ahead = linear_ce.CompileAhead(bench, options.compile_jobs, programs, beside=options.beside)
    problem, made_for = None, None
    try:
        for index, item in enumerate(items):
            if time.monotonic() > deadline:
                unopened += 1
                continue
            ahead.before(index)
            if made_for != item[0]:
                problem = None  # the old arrays go before the new ones come
                bench.release()
                problem, made_for = bench.problem(item[0], options.dtype, item[2]), item[0]
            more_failed, more_left = sweep(bench, method, item, options, file, problem, deadline)
            failed, left = failed + more_failed, left + more_left
    finally:
        bench.stop_compiling()
    if left or unopened:
        print(
            f"\n{left} rows of the last shapes and {unopened} shapes and modes were not started before "
            f"--until {options.until:g} seconds"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
