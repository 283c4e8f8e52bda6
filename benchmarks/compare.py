"""Compares two checkouts on one GPU: `python -m benchmarks.compare OLD NEW --framework torch|jax --shapes NAME ...`.

Each checkout gets its own process, which imports the package from that folder and everything else from the
benchmark that runs this command. So both are drawn the same arrays, checked by the same reference and timed by the same
code, and only the public function `linear_cross_entropy` of a checkout is called. A folder may be a git worktree, a
clone or a plain copy.

For each shape and mode both are first compared with float32 on several distributions. Then they run in short blocks of
calls, one process after the other, every second pair in the opposite order. Two runs one after the other would compare
two temperatures of the GPU, not two checkouts.

Where a process has its arrays in memory changes times by a percent and stays while it runs. `--processes` starts both
several times, and the row has the pairs of all.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import results
from benchmarks.compare_child import PACKAGES
from benchmarks.linear_ce import DTYPES
from benchmarks.methods import ERRORS, ROW_ERRORS, check_errors
from benchmarks.shapes import MODES, TARGETS, Mode, Shape, plan
from benchmarks.timing import MIN_PAIRS, pair_count, pair_order

CHILD = Path(__file__).parent / "compare_child.py"
KEY = ("shape", "dtype", "targets", "mode", "old", "new")
NAMES = ("old", "new")


class ChildError(Exception):
    """A process could not answer a request; the message says why."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("folders", nargs=2, type=Path, metavar="FOLDER", help="the old checkout, then the new one")
    parser.add_argument("--framework", required=True, choices=("torch", "jax"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: only to try it out")
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME", help="names of shapes.py, or N-D-V such as 512-1024-32000"
    )
    parser.add_argument("--modes", nargs="+", metavar="NAME", help=f"of {', '.join(MODES)} (train)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--implementation", help="of both checkouts; by default the one that each chooses")
    parser.add_argument(
        "--checks",
        nargs="+",
        metavar="KIND",
        default=("random", "sharp", "peaked"),
        help=f"distributions to check, of {', '.join(TARGETS)} (all); the last one is timed",
    )
    parser.add_argument("--labels", nargs=2, metavar="NAME", help="of the two, by default commits or hashes")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="for a process's pairs of one row (default %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, help="minimum number of pairs (%(default)s)")
    parser.add_argument(
        "--processes", type=int, default=1, help="how many times both are started, with --pairs each (%(default)s)"
    )
    parser.add_argument("--block", type=float, default=0.2, help="seconds of one block of calls (%(default)s)")
    parser.add_argument("--warmup", type=float, help="seconds before the first pair of a row (5; 0 on a CPU)")
    parser.add_argument("--energy-seconds", type=float, default=2.0, help="of each energy block; 0: none (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="merge the rows into this file after each one")
    options = parser.parse_args(arguments)
    if options.warmup is None:
        options.warmup = 5.0 if options.device == "cuda" else 0.0
    unknown = [name for name in options.modes or () if name not in MODES]
    if unknown:
        raise SystemExit(f"--modes must be among {', '.join(MODES)}, got {', '.join(unknown)}")
    unknown = [kind for kind in options.checks if kind not in TARGETS]
    if unknown:
        raise SystemExit(f"--checks must be among {', '.join(TARGETS)}, got {', '.join(unknown)}")
    return options


class Child:
    """A process that imports the package of one checkout.

    Args:
        folder: the checkout.
        framework: torch or jax.
        device: cuda or cpu.

    Raises:
        ChildError: it does not start, for example because the folder holds no such package.
    """

    def __init__(self, folder: Path, framework: str, device: str) -> None:
        self.folder = folder.resolve()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, `close` closes it
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        # Both processes hold their arrays at the same time.
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.43")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), framework, device],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.about = self.answer()
        except BaseException:
            self.close()
            raise

    def send(self, do: str, **arguments: Any) -> None:
        """Asks for something without waiting for the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why it ended
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Returns the answer to the oldest question; raises ChildError with what went wrong."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise ChildError(f"the process of {self.folder} ended with status {status}: {self._last_lines()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the end of its loop
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _last_lines(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().splitlines()[-results.LAST_LINES :])


@contextlib.contextmanager
def children(folders: Sequence[Path], framework: str, device: str) -> Iterator[list[Child]]:
    """Starts a process for each folder and ends them afterwards."""
    started: list[Child] = []
    try:
        for folder in folders:
            started.append(Child(folder, framework, device))
        yield started
    finally:
        for child in started:
            child.close()


def label(folder: Path) -> str:
    """Returns the commit of a checkout or, where git cannot tell, a hash of the code that is compared."""
    if (folder / ".git").exists():
        commit = results.commit(root=folder)
        if commit != "unknown":
            return commit
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"code-{digest.hexdigest()[:12]}"


def both(pair: Sequence[Child], do: str, *, together: bool = True, **arguments: Any) -> list[dict[str, Any]]:
    """Asks both; only for what is not timed.

    Args:
        pair: the processes.
        do: the request.
        together: at the same time, not one after the other.
        arguments: of the question.

    Raises:
        ChildError: one of them could not do it.
    """
    if together:
        for child in pair:
            child.send(do, **arguments)
    answers: list[dict[str, Any]] = []
    failures = []
    for name, child in zip(NAMES, pair, strict=True):
        try:
            answers.append(child.answer() if together else child.ask(do, **arguments))
        except ChildError as error:  # the other one's answer must be read too, or it would answer the next question
            failures.append(f"{name}: {error}")
    if failures:
        raise ChildError("; ".join(failures))
    return answers


def check(pair: Sequence[Child], shape: Shape, mode: Mode, options: argparse.Namespace) -> dict[str, Any]:
    """Compiles both, compares each with float32 on every distribution, and returns their errors.

    Raises:
        ChildError: one of them fails or is wrong.
    """
    figures: dict[str, Any] = {"same_bits": {}, "errors": {}}
    for targets in options.checks:
        problem = {"shape": [shape.name, shape.n, shape.d, shape.v], "dtype": options.dtype, "targets": targets}
        together = options.framework == "torch"  # XLA autotunes matmuls, which needs an idle device
        found = both(
            pair, "prepare", together=together, **problem, mode=mode.name, implementation=options.implementation
        )
        for name, answer in zip(NAMES, found, strict=True):
            errors = {key: answer["figures"].get(key) for key in (*ERRORS, *ROW_ERRORS)}
            wrong = check_errors({key: errors[key] for key in ERRORS}, options.dtype)
            if wrong is not None:
                raise ChildError(f"{name}, {targets}: {wrong}")
            figures["errors"].setdefault(targets, {})[name] = errors
            figures |= {f"{name}_{key}": answer["figures"][key] for key in ("peak_bytes", "workspace_bytes")}
        figures["same_bits"][targets] = found[0]["digest"] == found[1]["digest"]
    return figures


class Times(NamedTuple):
    """What was measured of a row in two processes, the old checkout's first."""

    ms: tuple[list[float], list[float]]
    joules: list[float | None]
    note: str | None  # why joules are missing


def compare(pair: Sequence[Child], options: argparse.Namespace) -> Times:
    """Times what both have prepared in short blocks, one process after the other."""
    calls = []
    for child in pair:
        once = child.ask("block", calls=1)["ms"]
        calls.append(max(1, round(1000 * options.block / max(once, 1e-6))) if options.block else 1)

    def block(index: int) -> float:
        return pair[index].ask("block", calls=calls[index])["ms"]

    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < options.warmup:
        for index in range(2):
            block(index)
        rounds += 1
    start = time.perf_counter()
    for index in range(2):
        block(index)
    count = pair_count(options.seconds, time.perf_counter() - start, options.pairs)
    times: tuple[list[float], list[float]] = [], []
    for number in range(count):
        for index in pair_order(2, number):
            times[index].append(block(index))
    energy = [child.ask("energy", seconds=options.energy_seconds) for child in pair]
    notes = [one["note"] for one in energy if one["note"]]
    return Times(times, [one["joules"] for one in energy], notes[0] if notes else None)


def summary(processes: Sequence[Times]) -> dict[str, Any]:
    """Returns a row's figures of all pairs, and the ratio of each pair of processes."""
    ratios = [np.asarray(times.ms[1]) / np.asarray(times.ms[0]) for times in processes]
    notes = [times.note for times in processes if times.note]
    figures: dict[str, Any] = {"pairs": sum(map(len, ratios)), "joules_note": notes[0] if notes else None}
    for index, name in enumerate(NAMES):
        figures |= _spread(f"{name}_ms", [ms for times in processes for ms in times.ms[index]])
        joules = [one for times in processes if (one := times.joules[index]) is not None]
        figures[f"{name}_joules"] = float(np.mean(joules)) if joules else None
    figures |= _spread("ratio", np.concatenate(ratios))
    return figures | {"process_ratios": [float(np.median(each)) for each in ratios]}


def _spread(name: str, values: Any) -> dict[str, float]:
    return {
        name: float(np.median(values)),
        f"{name}_p20": float(np.percentile(values, 20)),
        f"{name}_p80": float(np.percentile(values, 80)),
    }


HEADING = (
    f"{'shape':20} {'mode':13} {'old ms':>9} {'new ms':>9} {'new/old':>8} {'p20-p80':>13} {'pairs':>5} "
    f"{'old J':>7} {'new J':>7}  same bits"
)


def line(row: dict[str, Any]) -> str:
    """Returns a row of the printed table."""
    first = f"{row['shape']:20} {row['mode']:13}"
    if row["status"] != "ok":
        return f"{first} {row['status']}: {row['note']}"
    joules = [f"{'-' if row[key] is None else format(row[key], '.2f'):>7}" for key in ("old_joules", "new_joules")]
    bits = ", ".join(f"{targets} {'yes' if equal else 'no'}" for targets, equal in row["same_bits"].items())
    spread = f"{row['ratio_p20']:.3f}-{row['ratio_p80']:.3f}"
    return (
        f"{first} {row['old_ms']:9.3f} {row['new_ms']:9.3f} {row['ratio']:8.4f} {spread:>13} {row['pairs']:5} "
        f"{joules[0]} {joules[1]}  {bits}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a checkout failed or was wrong."""
    options = parse(arguments)
    try:
        items = plan(options.shapes or ["llama3-8b", "qwen2.5-0.5b", "gemma2-2b"], options.modes, [options.checks[-1]])
    except ValueError as error:
        raise SystemExit(f"--{error}") from error
    for folder in options.folders:
        if not folder.is_dir():
            raise SystemExit(f"FOLDER must be a checkout, got {folder}, which is no folder")
    old, new = options.labels or [label(folder) for folder in options.folders]
    failed: set[tuple[Shape, Mode, str]] = set()
    times: dict[tuple[Shape, Mode, str], list[Times]] = {}
    try:
        for number in range(options.processes):
            with children(options.folders, options.framework, options.device) as pair:
                about = pair[1].about
                file = results.ResultFile(options.json, about["device"], about["versions"], new, KEY)
                if number == 0:
                    print(f"{about['device']}, {about['versions']}\nold {old}, new {new}\n{HEADING}", flush=True)
                    if about["no_energy"] is not None:
                        print(f"no energy: {about['no_energy']}")
                for item in items:
                    if item in failed:
                        continue
                    shape, mode, targets = item
                    row: dict[str, Any] = {
                        **shape.of_row(),
                        "dtype": options.dtype,
                        "targets": targets,
                        "mode": mode.name,
                        "framework": options.framework,
                        "old": old,
                        "new": new,
                    }
                    try:
                        row |= check(pair, shape, mode, options)
                        times.setdefault(item, []).append(compare(pair, options))
                        row |= {**summary(times[item]), "status": "ok", "note": None}
                    except ChildError as error:
                        row |= {"status": "failed", "note": str(error)}
                        failed.add(item)
                    file.add(row)
                    print(line(row), flush=True)
                    both(pair, "release")
    except ChildError as error:
        raise SystemExit(str(error)) from error
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
