"""`python -m parity`: runs the cases on every backend of this machine and prints what share of its budget each uses.

Each framework runs in separate processes (`parity.backends`); outputs come back as .npz files. A framework whose
default runs `chunked` gives one backend, not two. Exits with status 1 if a budget is exceeded, a case fails to run, or
a default ran another implementation than it should on this machine. `python -m parity train` compares training runs
instead.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linear_ce.children import started_without_interrupts
from parity import report
from parity.arrays import make_arrays
from parity.backends import BACKENDS, FRAMEWORKS, expected_default, installed
from parity.cases import Case, select
from parity.expected import Expected, compare, compare_pair, expected
from parity.train import command as training


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return training.main(arguments[1:]) if arguments[:1] == ["train"] else _run(_parse(arguments))
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace) -> int:
    """Compares, prints the rows as they come, and returns the exit status."""
    names = _available(options.backend)
    wrong = _obstacle(options) if names else "nothing to run: neither PyTorch nor JAX is installed"
    if wrong:
        print(wrong, file=sys.stderr)
        return 1
    start = time.perf_counter()
    rows: list[report.Row] = []
    pairs: list[report.Row] = []
    print("Errors against float64, as percentages of their budgets (100% is the limit)\n", flush=True)
    print(report.header())
    for single, paired in _compare(names, options):
        rows += single
        pairs += paired
        for row in single:
            print(report.line(row), flush=True)
    if pairs:
        print("\nPyTorch against JAX, as percentages of twice the budget\n")
        print("\n".join([report.header(), *map(report.line, pairs)]))
    failures = [failure for row in (*rows, *pairs) for failure in row.failures]
    print("\nWorst of each dtype\n")
    print("\n".join(report.summary((*rows, *pairs))))
    print(f"\n{len(rows)} rows in {time.perf_counter() - start:.0f} s")
    for failure in failures:
        print(f"FAIL {failure}")
    if not failures:
        print("all within budget")
    if options.json:
        document = {
            "commit": options.commit,
            "devices": sorted({row.device for row in rows if row.device}),
            "backends": [report.as_json(row) for row in rows],
            "pairs": [report.as_json(row) for row in pairs],
        }
        report.write(options.json, document, ("torch", "triton", "jax", "jaxlib", "numpy"))
    return 1 if failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parity",
        description="Runs every case on every backend of this machine and compares with the float64 reference.",
        epilog="python -m parity train --help: the comparison of whole training runs.",
    )
    parser.add_argument(
        "--backend", action="append", choices=BACKENDS, metavar="NAME", help="one of %(choices)s; may repeat"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="run cases whose name contains this text")
    parser.add_argument("--exhaustive", action="store_true", help="all combinations of the options: takes hours in JAX")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes of each framework")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all errors and budgets there")
    parser.add_argument("--commit", metavar="NAME", help="commit of the code, for that file")
    return parser.parse_args(arguments)


def _obstacle(options: argparse.Namespace) -> str:
    """Returns why the run cannot start, naming the option; empty if it can."""
    if options.jobs < 1:
        return f"--jobs must be at least 1, got {options.jobs}"
    if not any(True for _ in select(options.only, options.exhaustive)):
        return f"--only must be part of a case's name, got {options.only!r}"
    if options.commit is not None and options.json is None:
        return f"--commit goes into the file of --json, which is not given; got {options.commit!r}"
    return report.file_obstacle("--json", options.json)


def _available(selected: Sequence[str] | None) -> list[str]:
    """Returns the backends to run. Prints which framework is missing, and raises if one was selected by name."""
    names = []
    for name, backend in BACKENDS.items():
        if name not in selected if selected else not backend.runs_anywhere:
            continue
        if installed(backend.framework):
            names.append(name)
        elif selected:
            raise SystemExit(f"--backend {name} needs {FRAMEWORKS[backend.framework]}, which is not installed")
    for framework, title in FRAMEWORKS.items():
        if not selected and not installed(framework):
            print(f"{title} is not installed: its backends are left out")
    return names


def _compare(names: list[str], options: argparse.Namespace) -> Iterator[tuple[list[report.Row], list[report.Row]]]:
    """Yields, case by case, the rows of the backends and those of the pairs PyTorch - JAX."""
    with tempfile.TemporaryDirectory() as folder:
        by_framework = {
            framework: [name for name in names if BACKENDS[name].framework == framework] for framework in FRAMEWORKS
        }
        with started_without_interrupts():
            crews = [
                [_Worker(mine, Path(folder), job, options) for mine in by_framework.values() if mine]
                for job in range(options.jobs)
            ]
        try:
            for case, workers in zip(select(options.only, options.exhaustive), itertools.cycle(crews), strict=False):
                want = expected(case, make_arrays(case))
                outcomes = {name: worker.outcome(case, name) for worker in workers for name in worker.names}
                outcomes = {name: outcome for name, outcome in outcomes.items() if "same_as" not in outcome}
                single = [_row(case, name, want, outcome) for name, outcome in outcomes.items()]
                yield single, _pairs(case, want, outcomes)
        finally:
            for worker in itertools.chain.from_iterable(crews):
                worker.stop()


class _Worker:
    """A process of one framework, which runs the cases `job`, `job` + jobs, ..."""

    def __init__(self, names: list[str], folder: Path, job: int, options: argparse.Namespace) -> None:
        self.names, self._folder = names, folder
        command = [sys.executable, "-m", "parity.backends", *names, "--folder", str(folder), "--only", options.only]
        command += ["--first", str(job), "--step", str(options.jobs), *["--exhaustive"] * options.exhaustive]
        # If the default is chunked, chunked by name is the same code. It runs twice only if it was selected.
        command += ["--distinct"] * (options.backend is None)
        # Both frameworks may share one GPU: JAX must not take its memory ahead of need.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def outcome(self, case: Case, name: str) -> dict[str, Any]:
        """Returns the next outcome, with the outputs as arrays; it must be of this case and backend."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise SystemExit(f"the process of {name} ended with status {self._process.wait()} before {case.name}")
        outcome = json.loads(text)
        if "obstacle" in outcome:
            raise SystemExit(f"--backend {outcome['backend']}: {outcome['obstacle']}")
        if (outcome["case"], outcome["backend"]) != (case.name, name):
            raise SystemExit(f"expected {name} on {case.name}, got {outcome['backend']} on {outcome['case']}")
        if "outputs" in outcome:
            path = self._folder / outcome["outputs"]
            with np.load(path) as file:
                outcome["outputs"] = dict(file)
            path.unlink()
        return outcome

    def stop(self) -> None:
        """Ends the process if it is still running."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait()


def _row(case: Case, name: str, want: dict[str, Expected], outcome: dict[str, Any]) -> report.Row:
    if "failure" in outcome:
        return report.Row(case, name, "-", {}, outcome["failure"])
    ran, failure = outcome["implementation"], ""
    backend = BACKENDS[name]
    should = expected_default(backend.framework, outcome["platform"], case.dtype)
    if backend.implementation is None and ran not in should:
        failure = f"the default ran {ran!r} on {outcome['platform']}, where {' or '.join(map(repr, should))} should run"
    elif backend.implementation not in (None, ran):
        failure = f"{ran!r} ran, where {backend.implementation!r} was requested"
    try:
        comparisons = compare(case, want, outcome["outputs"])
    except ValueError as wrong:
        return report.Row(case, name, ran, {}, str(wrong))
    return report.Row(case, name, ran, comparisons, failure, outcome.get("device", ""))


def _pairs(case: Case, want: dict[str, Expected], outcomes: dict[str, dict[str, Any]]) -> list[report.Row]:
    """Returns the rows of PyTorch against JAX, for each implementation that both ran."""
    rows = []
    for kind in dict.fromkeys(name.split("-", 1)[1] for name in outcomes):
        left, right = outcomes.get(f"torch-{kind}"), outcomes.get(f"jax-{kind}")
        if left and right and "outputs" in left and "outputs" in right:
            ran = "/".join(dict.fromkeys((left["implementation"], right["implementation"])))
            rows.append(report.Row(case, f"pair-{kind}", ran, compare_pair(want, left["outputs"], right["outputs"])))
    return rows


if __name__ == "__main__":
    sys.exit(main())
