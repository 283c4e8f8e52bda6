"""Measures training steps of flax_models and of other trainers: `python -m benchmarks.train`.

Rows of `benchmarks.train_rows` run one after the other. Each runs in its own process and is merged into the file of
results when it ends. The processes share a JAX compilation cache: the folder JAX_COMPILATION_CACHE_DIR, or a temporary
one if the variable is not set. Fused and unfused losses and gradients are compared before either is timed.
how-to-measure.md has the definitions.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.methods import LOSS_BOUND, installed
from benchmarks.train_process import Request, ask
from benchmarks.train_rows import GROUPS, Row, select

CACHE = "JAX_COMPILATION_CACHE_DIR"  # JAX reads this variable
FRAMEWORKS = ("jax", "jaxlib", "torch")  # results of other versions are dropped
FINE = 8  # a search ends once the interval is less than an eighth of the batch: an attempt takes a minute
# The keys that every row has, None where they were not measured.
MEASURED = ("tokens_per_s", "mfu", "step_ms", "peak_bytes", "split", "note")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    groups = ", ".join(GROUPS)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help=f"of {groups}, or of rows, with *; default: all")
    parser.add_argument("--list", action="store_true", help="print the rows' names, and measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the rows into this file after each one")
    parser.add_argument("--commit", help="commit of the code, if git does not know it")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the timed steps of a row (default %(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, help="maximum seconds of a process (default %(default)s)")
    parser.add_argument("--until", type=float, metavar="SECONDS", help="start no row after this many seconds")
    parser.add_argument("--first", type=int, default=16, help="first batch of a search of the largest (%(default)s)")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="pretend that JAX has no more than this")
    parser.add_argument("--weights", action="store_true", help="checks: have transformers compute the loss too")
    parser.add_argument("--split", action="store_true", help="divide steps' times over their parts")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="merge these into --json, measure nothing"
    )
    parser.add_argument("--plot", action="store_true", help="make the pictures of --json, and measure nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a row of ours failed."""
    options, began = parse(arguments), time.monotonic()
    if options.first < 1:
        raise SystemExit(f"--first must be at least 1, got {options.first}")
    try:
        rows = select(options.rows)
    except ValueError as error:
        raise SystemExit(f"--{error}") from error
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    if options.merge:
        if options.json is None:
            raise SystemExit("--merge goes with --json, the file to merge into")
        try:
            merged = results.merge(options.json, options.merge, key=("name",))
        except (OSError, ValueError) as error:
            raise SystemExit(f"--merge: {error}") from error
        print(heading(), *map(line, merged), sep="\n")
        return 0
    if options.plot:
        from benchmarks.train_plot import draw_all

        draw_all(options.json)
        return 0
    probed = ask(Request(in_torch=all(row.in_torch for row in rows)), options.limit)
    if probed["status"] != "ok":
        raise SystemExit(f"no device: {probed['note']}")
    commit = options.commit or results.commit("flax_models")
    try:
        file = results.ResultFile(options.json, probed["device"], installed(*FRAMEWORKS), commit, key=("name",))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"{probed['device']}, {file.head['versions']}, commit {commit}\n{heading()}", flush=True)
    ended: list[bool] = []
    ordered = with_checks(rows, file)
    checks = [row for row in ordered if row.kind == "check"]
    with compilation_cache():
        for row in (*checks, *(row for row in ordered if row not in checks)):
            if options.until is not None and time.monotonic() - began > options.until:
                print(f"{row.name:{WIDTHS[0]}} not begun after {options.until:g} s", flush=True)
                continue
            found = {**asdict(row), "name": row.name, **dict.fromkeys(MEASURED), **measure(row, file, options)}
            file.add(found)
            print(line(found), flush=True)
            ended.append(found["status"] != "failed" or row.in_torch)
    return 0 if all(ended) else 1


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Names a folder in which the rows' processes find what others have compiled, unless the environment names one."""
    if CACHE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            del os.environ[CACHE]


def with_checks(rows: Sequence[Row], file: results.ResultFile) -> list[Row]:
    """Returns the rows, each after the check that it needs, where the file has none that passed on this commit."""
    ordered: list[Row] = []
    for row in rows:
        check = row.check()
        needed = not row.in_torch and row.kind != "check" and (_recorded(check, file) or {}).get("status") != "ok"
        ordered += [check, row] if needed and check not in ordered else [row]
    return list(dict.fromkeys(ordered))


def _recorded(check: Row, file: results.ResultFile) -> dict[str, Any] | None:
    """Returns what the file has of a check on the commit that is measured."""
    found = [row for row in file.rows if row["name"] == check.name and row["commit"] == file.head["commit"]]
    return found[0] if found else None


def measure(row: Row, file: results.ResultFile, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a row's figures, `status` and `note` among them; ours are not measured unless their check has passed."""
    if not row.in_torch and row.kind != "check":
        check = _recorded(row.check(), file)
        if check is None or check["status"] != "ok":
            status = "skipped" if check is not None and check["status"] == "skipped" else "failed"
            why = "has not run" if check is None else check["note"]
            return {"status": status, "note": f"not measured, for {row.check().name}: {why}"}

    def attempt(batch: int) -> dict[str, Any]:
        split = options.split and row.kind == "speed"
        request = Request(asdict(row), batch, row.in_torch, options.seconds, options.memory, options.weights, split)
        found = ask(request, options.limit)
        if found["status"] == "oom" and row.kind != "largest":  # the free memory may have been in pieces
            found = ask(replace(request, whole_device=True), options.limit)
        if found.get("device", file.head["device"]) != file.head["device"]:
            return {"status": "failed", "note": f"ran on {found['device']}"}
        return found

    if row.batch is None:
        return largest(attempt, options.first)
    found = attempt(row.batch)
    others = [other for other in file.rows if other["commit"] == file.head["commit"] and other["name"] != row.name]
    wrong = disagreement(row, found, others) if found["status"] == "ok" else None
    if found["status"] == "ok" and row.mesh is not None:
        found = {**found, "efficiency": efficiency(row, found, others)}
    # If first losses disagree, it is not known which of the two is wrong. The row then has no speed.
    return found if wrong is None else {"status": "failed", "note": wrong, "first_loss": found["first_loss"]}


def disagreement(row: Row, found: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns how the first loss differs from that of other rows of ours with the same model and batches, or None."""
    if row.in_torch or "first_loss" not in found:
        return None
    same = ("config", "mode", "seq", "batch", "data", "kind")
    for other in others:
        if other["status"] != "ok" or other["loss"] not in ("fused", "unfused") or "first_loss" not in other:
            continue
        if all(other[key] == getattr(row, key) for key in same):
            error = abs(found["first_loss"] / other["first_loss"] - 1)
            if not error <= LOSS_BOUND["bfloat16"]:
                return f"first loss {found['first_loss']:.6g} is not {other['name']}'s, {other['first_loss']:.6g}"
    return None


def efficiency(row: Row, found: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the tokens per second of a GPU of a mesh, relative to those of one GPU that trains as many rows alone;
    None if that was not measured."""
    assert row.batch is not None
    alone = asdict(replace(row, mesh=None, batch=row.batch // row.gpus))
    for other in others:
        if other["status"] == "ok" and all(other.get(key) == value for key, value in alone.items()):
            return found["tokens_per_s"] / (row.gpus * other["tokens_per_s"])
    return None


def largest(attempt: Callable[[int], Mapping[str, Any]], first: int) -> dict[str, Any]:
    """Returns the figures of the largest batch that fits, to a FINE-th of it.

    Args:
        attempt: measures a batch in a separate process; its figures may have an `estimate` of what fits.
        first: batch to begin with.

    Returns:
        The figures of the largest that ran, with `batch`, `tried`, and `too_large`, the smallest that did not run.
        If none ran, they are those of the last attempt. Any error other than running out of memory ends the search
        and is reported.
    """
    fits, too_large, trial = 0, None, first
    tried: list[int] = []
    best: dict[str, Any] = {}
    while True:
        found = dict(attempt(trial))
        tried.append(trial)
        if found["status"] == "ok":
            fits, best = trial, found
        elif found["status"] == "oom":
            too_large, best = trial, best or found
        elif fits:
            note = f"batch {trial} failed, not for memory: {found['note']}"
            return {**best, "batch": fits, "tried": tried, "too_large": trial, "note": note}
        else:
            return {**found, "batch": trial, "tried": tried}
        step = max(1, fits // FINE)
        if too_large is not None and too_large - fits <= step:
            return {**best, "batch": fits or None, "tried": tried, "too_large": too_large}
        trial = _next(fits, too_large, step, found.get("estimate"))


def _next(fits: int, too_large: int | None, step: int, estimate: int | None) -> int:
    if too_large is None:  # the estimate, at most 16 times as many rows, or else twice as many
        return max(fits + step, min(estimate, 16 * fits) if estimate else 2 * fits)
    if estimate and fits < estimate < too_large:
        return estimate
    return (fits + too_large) // 2


HEADINGS = ("row", "step ms", "p20-p80", "tokens/s", "MFU", "peak GiB", "parts, ms")
WIDTHS = (84, 9, 17, 9, 6, 8, 0)


def heading() -> str:
    return _line(HEADINGS)


def line(row: Mapping[str, Any]) -> str:
    """Returns a row of the printed table; one without a time shows why, or what else it measured."""
    if row["status"] != "ok":
        return f"{row['name']:{WIDTHS[0]}} {row['status']}: {row['note']}"
    if row["kind"] == "check":
        figures = ", ".join(f"{key} {value:.1e}" for key, value in row.items() if key.startswith("err_"))
        return f"{row['name']:{WIDTHS[0]}} {figures}"
    if row["kind"] == "converge":
        return f"{row['name']:{WIDTHS[0]}} loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}"
    split = ", ".join(f"{part} {ms:.1f}" for part, ms in (row["split"] or {}).items())
    if row.get("efficiency") is not None:
        split = ", ".join([f"{row['efficiency']:.1%} of {row['gpus']} GPUs", *[split] * bool(split)])
    found = f"batch {row['batch']}, {row['too_large']} is too large" if row["kind"] == "largest" else split
    return _line(
        (
            row["name"],
            f"{row['step_ms']:.2f}",
            f"{row['step_ms_p20']:.2f}-{row['step_ms_p80']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}",
            found + (f"; {row['note']}" if row["note"] else ""),
        )
    )


def _line(cells: Sequence[str]) -> str:
    first, *rest = (
        cell.ljust(width) if at in (0, len(WIDTHS) - 1) else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
    return " ".join([first, *rest]).rstrip()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or a row's process would live on
    sys.exit(main())
