"""Measures host libraries with and without the fused loss: `python -m benchmarks.hosts --json FILE`.

The rows of a library and a config share a process (`benchmarks.hosts_process`), each with a newly built model. What
cannot be undone comes last. If a process ends in a row, another one takes the rows after it. Before a row is timed, its
loss and gradient are compared with the library's or, in transformers, with a float32 model's. In the other hosts, the
library as it is and ours are timed in turns. how-to-measure.md has the definitions.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.hosts_rows import COMPILED, CONFIGS, HOSTS, KEY, SIZES, VARIANTS, Request, Row, plan
from benchmarks.methods import installed
from benchmarks.train_process import answer_of

VERSIONS = (
    *("torch", "triton", "transformers", "liger-kernel", "trl"),
    *("jax", "flax", "google-tunix", "maxtext"),
)
POLL = 0.2  # seconds between two looks at what a process has measured
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    published = [name for name in CONFIGS if name != "smoke"]
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS), metavar="NAME")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=published, metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--parts", nargs="+", choices=("step", "loss"), default=["step", "loss"], metavar="NAME")
    parser.add_argument("--seq", nargs="+", type=int, choices=SIZES, default=list(SIZES), help="tokens of a sequence")
    parser.add_argument("--batch", type=int, help=f"sequences of a step; default: by --seq, {SIZES}")
    parser.add_argument("--seconds", type=float, default=2.0, help="for the timed steps of a row (default %(default)s)")
    parser.add_argument("--limit", type=float, default=120.0, help="maximum seconds of a row, on average (%(default)s)")
    parser.add_argument("--until", type=float, metavar="SECONDS", help="start no row after this many seconds")
    parser.add_argument(
        "--compile-jobs", type=int, default=0, metavar="N", help="first compile the compiled rows in N processes"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="print and record kernels too, and gaps in which the GPU does nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the rows into this file after each one")
    parser.add_argument("--commit", help="commit of the code, if git does not know it")
    return parser.parse_args(arguments)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (times are no results)"


def line(row: Mapping[str, Any]) -> str:
    """Returns what is printed of a row."""
    name = Row(**{key: row[key] for key in KEY}).name
    if row["status"] != "ok":
        return f"{name:52} {row['status']}: {row['note']}"
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
    ratio = f", ours {row['ratio']:.3f} x ({row['ratio_p20']:.3f} to {row['ratio_p80']:.3f})" if "ratio" in row else ""
    note = f"; {row['note']}" if row["note"] else ""
    speed = f"{row['tokens_per_s']:,.0f} tokens/s{memory}{ratio}"
    return f"{name:52} {speed}, the loss differs by {row['loss_error']:.1e}{note}"


class Run:
    """A run of the command: its options, and when it began."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()

    def left(self) -> float | None:
        """Returns the seconds in which rows may begin, None if there is no limit."""
        until = self.options.until
        return None if until is None else until - (time.monotonic() - self.began)

    def ask(self, rows: Sequence[Row], ahead: bool = False) -> Iterator[dict[str, Any]]:
        """Yields what a process measures of rows, each when it is there. They are fewer if no more may begin."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
            path, taken = Path(folder) / "rows", 0
            path.touch()
            asked = [asdict(row) for row in rows]
            request = Request(asked, str(path), self.options.seconds, self.left(), ahead, self.options.kernels)
            limit = self.options.limit * len(rows)
            arguments = json.dumps(asdict(request)), limit, {**os.environ, **ENVIRONMENT}
            process = pool.submit(answer_of, "benchmarks.hosts_process", *arguments)
            while True:
                ended = bool(wait([process], timeout=POLL).done)
                answers = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
                yield from answers[taken:]
                taken = len(answers)
                if ended:
                    break
            if process.result()["status"] == "failed":  # in the row after the last answer
                yield {"status": "failed", "note": process.result()["note"]}

    def measure(self, process: Sequence[Row], file: results.ResultFile) -> bool:
        """Measures rows and adds them to a file; returns whether one with our loss failed."""
        waiting, failed = list(process), False
        while waiting and ((left := self.left()) is None or left > 0):
            asked = len(waiting)
            for answer in self.ask([*waiting]):
                row = waiting.pop(0)
                found = {**asdict(row), "tokens_per_s": None, "peak_bytes": None, **answer}
                file.add(found)
                print(line(found), flush=True)
                if found.get("trace_note"):
                    print(f"  no trace: {found['trace_note']}", flush=True)
                if found.get("by_kernel"):
                    print(f"{results.kernels(found)}\n{results.gaps(found)}", flush=True)
                failed |= found["status"] == "failed" and row.variant.startswith("ours")
            if len(waiting) == asked:
                break
        for row in waiting:
            print(f"{row.name}: not begun after {self.options.until:g} s", flush=True)
        return failed

    def compile_ahead(self, processes: Sequence[Sequence[Row]]) -> None:
        """Compiles rows for PyTorch's cache on the disk, in a process each."""
        rows = [row for process in processes for row in process if row.variant.endswith(COMPILED)]
        with ThreadPoolExecutor(self.options.compile_jobs) as pool:
            for row, answers in zip(rows, pool.map(lambda row: [*self.ask([row], ahead=True)], rows), strict=True):
                notes = [answer["note"] or answer["status"] for answer in answers]
                print(f"{row.name}: compiled ahead, {', '.join(notes) or 'not begun'}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a row with our loss failed."""
    options = parse(arguments)
    if options.kernels and not torch.cuda.is_available():
        raise SystemExit("--kernels needs a GPU: a trace on a CPU has none of its kernels")
    run, commit = Run(options), options.commit or results.commit()
    versions = {name: found for name, found in installed(*VERSIONS).items() if found != "none"}  # hosts need not agree
    try:
        file = results.ResultFile(options.json, device_name(), versions, commit, key=KEY)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"{file.head['device']}, {file.head['versions']}, commit {commit}", flush=True)
    processes = []
    for host in options.hosts:
        for process in plan(host, options.configs, options.variants, options.seq, options.batch):
            processes.append([row for row in process if row.part in options.parts])
    if not any(processes):
        raise SystemExit("--hosts, --variants and --parts have no row in common")
    if options.compile_jobs:
        run.compile_ahead(processes)
    failed = [run.measure(process, file) for process in processes]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
