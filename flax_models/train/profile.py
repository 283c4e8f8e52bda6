"""Profiling: host time with a clock that always runs, device time with a trace of some steps.

The clock splits the time of the training loop by what the host does. Steps are dispatched asynchronously, so the time
of the device appears as "waiting for the device", or in "dispatch" if the backend computes in the calling thread.

The trace is written by jax.profiler, for TensorBoard or Perfetto. A table sums the time of XLA operations over all
threads and streams, grouped by the named scope of the step that an operation belongs to. Operations that contain others
(loops, calls) are not counted, because the operations inside them are.
"""

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

SKIPPED = 2  # steps before the traced ones: the first step loads kernels, and the next may wait for it
TRACED = 5
PARTS = ("loss", "optimizer", "model")  # named scopes in flax_models.train.step
CONTAINERS = ("while", "conditional", "call")
TOP_OPERATIONS = 8
TRACEABLE = {"xla_gpu_enable_command_buffer": ""}  # compiler options: kernels in a CUDA graph have no names in a trace


class Clock:
    """Sums the time of named parts of the training loop.

    Example:
        >>> clock = Clock()
        >>> with clock.part("data"):
        ...     pass
        >>> list(clock.seconds)
        ['data']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time of a `with` statement to the part of this name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def table(self, steps: int, total: float) -> list[str]:
        """Returns the lines of a table of the parts of `total` seconds for `steps` steps, with the rest as "other"."""
        rows = {name: seconds for name, seconds in self.seconds.items() if seconds > 1e-3 * total}
        rows["other"] = max(total - sum(rows.values()), 0.0)
        lines = [f"host time of {steps:,} steps: {total:.2f} s"]
        for name, seconds in rows.items():
            per_step = 1e3 * seconds / max(steps, 1)
            lines.append(f"  {name:<24}{seconds:9.2f} s {seconds / max(total, 1e-9):7.1%} {per_step:10.3f} ms/step")
        return lines


class Tracer:
    """Traces TRACED steps of a run, after the first SKIPPED ones.

    Args:
        folder: folder of the trace; None: no trace.
        first: first step of the run.
        last: last step of the run.
    """

    def __init__(self, folder: Path | None, first: int, last: int) -> None:
        self.folder = folder
        self._first = first + SKIPPED
        self._last = min(self._first + TRACED - 1, last)
        self._running = False

    @property
    def steps(self) -> int:
        """Number of traced steps; 0 if the run is too short."""
        return max(self._last - self._first + 1, 0)

    def before(self, step: int) -> None:
        """Starts the trace if `step` is the first traced step."""
        if self.folder is not None and step == self._first and self.steps:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing Python calls would slow the steps down
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self._running = True

    def after(self, step: int, results: Any) -> None:
        """Stops the trace if `step` is the last traced step, after waiting for its results."""
        if self._running and step == self._last:
            jax.block_until_ready(results)
            self.stop()

    def stop(self) -> None:
        """Stops the trace if it is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


class Operation(NamedTuple):
    """One event of the trace: an operation of a compiled program."""

    name: str
    nanoseconds: float


def operations(folder: Path) -> list[Operation]:
    """Returns the operations in the newest trace of a folder, including those of other programs than the step."""
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    found: list[Operation] = []
    if not traces:
        return found
    with warnings.catch_warnings():
        # The reader triggers a DeprecationWarning at its first use. If warnings are errors, that aborts the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(traces[-1])).planes:
            for line in plane.lines:
                for event in line.events:
                    name = next((value for key, value in event.stats if key == "hlo_op"), None)
                    if isinstance(name, str) and event.duration_ns and not event.name.startswith("end: "):
                        found.append(Operation(name, event.duration_ns))
    return found


def operation_parts(program: str) -> dict[str, str]:
    """Returns the part of the step for each operation in the text of a compiled program."""
    parts = {}
    for name, source in re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', program, re.MULTILINE):
        scopes = re.split(r"[/()]", source)
        parts[name] = next((part for part in PARTS if part in scopes), "other")
    return parts


def _counted(found: Iterable[Operation], parts: dict[str, str]) -> Iterator[Operation]:
    return (operation for operation in found if operation.name in parts and not operation.name.startswith(CONTAINERS))


def part_times(found: Iterable[Operation], parts: dict[str, str]) -> dict[str, float]:
    """Returns the nanoseconds of operations by part of the step."""
    times: dict[str, float] = defaultdict(float)
    for name, nanoseconds in _counted(found, parts):
        times[parts[name]] += nanoseconds
    return dict(times)


def device_table(found: Sequence[Operation], parts: dict[str, str], steps: int) -> list[str]:
    """Returns the lines of a table of operation times, by part of the step and for the longest operations."""
    by_part = part_times(found, parts)
    by_name: dict[str, float] = defaultdict(float)
    for name, nanoseconds in _counted(found, parts):
        by_name[f"{name} ({parts[name]})"] += nanoseconds
    total = sum(by_part.values())
    if not total:
        return ["the trace has no operation of the step"]
    lines = [f"device time of {steps} traced steps, over all threads and streams: {total / 1e6:.1f} ms"]
    for title, times in (("by part", by_part), ("longest operations", by_name)):
        lines.append(f"  {title}")
        for name, nanoseconds in sorted(times.items(), key=lambda item: -item[1])[:TOP_OPERATIONS]:
            lines.append(f"    {name:<50} {nanoseconds / total:6.1%} {nanoseconds / 1e6 / steps:10.3f} ms/step")
    return lines
