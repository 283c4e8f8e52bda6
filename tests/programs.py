"""Runs programs in parallel and lets tests wait for their output. The programs mostly compile.

A test names its programs in a mark, `pytest.mark.programs(python("file.py", ...), seconds=...)` or through `each`, and
uses the fixture `printed`. The programs of all selected tests start before the first test, the longest first, as many
at a time as there are cores. Tests without programs run in the meantime. Under pytest-xdist, a program starts when the
first test of a worker requests it. With --durations, pytest prints how long each program took. A program prints JSON
objects with a "name", one per line. Other lines, for example from tools, are ignored.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from os import environ, pathsep, sched_getaffinity
from pathlib import Path
from subprocess import PIPE, Popen
from time import monotonic
from typing import Any

import pytest

HERE = Path(__file__).parent
PATHS = pathsep.join([str(HERE.parent), environ.get("PYTHONPATH", "")]).rstrip(pathsep)
# Each program uses one thread, because the programs share the cores. They also share the GPU's memory, most of which
# JAX would preallocate. XLA's autotuning would compile each matmul in dozens of ways, and time them while other
# programs run. In OpenBLAS's matmuls for Haswell and Zen the bits of a row depend on its place, as on no GPU.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Sandybridge",
    "XLA_FLAGS": f"{environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip(),
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "PYTHONPATH": PATHS,
}

LONG = 120.0  # default seconds of a program while others run, so that programs of unknown duration start early

APART = "LINEAR_CE_APART"  # set in a program that runs tests with the mark `apart`

Command = tuple[str, ...]
Printed = dict[str, dict[str, Any]]  # by name


def python(file: str, *arguments: str) -> Command:
    """Returns the command that runs a file in this folder."""
    return (sys.executable, str(HERE / file), *arguments)


def each(commands: Mapping[str, Command], seconds: float = LONG) -> list[Any]:
    """Returns names as test parameters, each with the program that prints its result.

    Args:
        seconds: about how long one program takes while others run.
    """
    marks = ((name, pytest.mark.programs(command, seconds=seconds)) for name, command in commands.items())
    return [pytest.param(name, marks=mark) for name, mark in marks]


class Programs:
    """Runs commands in parallel."""

    def __init__(self) -> None:
        self.times: dict[Command, tuple[float, float]] = {}  # start and end, in seconds since creation
        self._began = monotonic()
        self._pool = ThreadPoolExecutor(len(sched_getaffinity(0)))
        self._running: set[Popen[str]] = set()
        self._outcomes: dict[Command, Future[Printed]] = {}

    def start(self, commands: Iterable[Command]) -> None:
        """Starts commands in order, except those that have already started."""
        for command in commands:
            if command not in self._outcomes:
                self._outcomes[command] = self._pool.submit(self._run, command)

    def _run(self, command: Command) -> Printed:
        start = monotonic() - self._began
        with Popen(command, env={**environ, **VARIABLES}, stdout=PIPE, stderr=PIPE, text=True) as process:
            self._running.add(process)
            out, err = process.communicate()
            self._running.discard(process)
        self.times[command] = start, monotonic() - self._began
        assert process.returncode == 0, f"{command[1:3]} ended with {process.returncode}\n{out[-3000:]}\n{err[-3000:]}"
        results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return {result["name"]: result for result in results}

    def printed(self, commands: Iterable[Command]) -> Printed:
        """Waits for commands to end and returns their output. Raises AssertionError if one failed."""
        commands = list(commands)
        self.start(commands)
        return {name: result for command in commands for name, result in self._outcomes[command].result().items()}

    def wait(self) -> None:
        """Waits for all commands to end."""
        wait(self._outcomes.values())

    def stop(self) -> None:
        """Terminates the running commands and starts no others."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._running.copy():
            process.terminate()
        self._pool.shutdown()


def run_checks(checks: Mapping[str, Callable[[], None]], names: Iterable[str]) -> None:
    """Runs checks by name. For each, prints why it failed, or an empty "failure"."""
    for name in names:
        failure = ""
        try:
            checks[name]()
        except Exception:  # a failing check must not hide the others
            failure = traceback.format_exc()[-3000:]
        print(json.dumps({"name": name, "failure": failure}), flush=True)
