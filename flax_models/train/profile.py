"""Where the time of steps goes: on the host by a clock that always runs, on the device by a trace of some steps.

The clock splits the loop's time into what the host does. Steps are dispatched without waiting, so the device's own time
shows as "waiting for the device", or inside "dispatch" where a backend computes in the thread that calls it.

The trace is jax.profiler's, for TensorBoard or Perfetto. The table made from it sums the time of XLA's operations over
all threads and streams that run them, by the part of the step that each one's source says it belongs to; operations
that contain others (loops, calls) are left out, since theirs are counted.
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

SKIPPED = 2  # steps before the traced ones: a first one loads kernels, and the next may wait for it
TRACED = 5
PARTS = ("loss", "optimizer", "model")  # named scopes in flax_models.train.step
CONTAINERS = ("while", "conditional", "call")
TOP_OPERATIONS = 8
TRACEABLE = {"xla_gpu_enable_command_buffer": ""}  # to compile with: a CUDA graph's kernels are named after nothing


class Clock:
    """Adds up seconds by what they were spent on.

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
        """Counts the time within a `with` statement under a name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def table(self, steps: int, whole: float) -> list[str]:
        """Returns lines that share out `whole` seconds of `steps` steps, the rest as "other"."""
        rows = {name: seconds for name, seconds in self.seconds.items() if seconds > 1e-3 * whole}
        rows["other"] = max(whole - sum(rows.values()), 0.0)
        lines = [f"time of {steps:,} steps on the host: {whole:.2f} s"]
        for name, seconds in rows.items():
            each = 1e3 * seconds / max(steps, 1)
            lines.append(f"  {name:<24}{seconds:9.2f} s {seconds / max(whole, 1e-9):7.1%} {each:10.3f} ms a step")
        return lines


class Tracer:
    """Traces TRACED steps of a run, after SKIPPED ones.

    Args:
        folder: where the trace goes, None for none.
        first: the first step that the run takes.
        last: its last step.
    """

    def __init__(self, folder: Path | None, first: int, last: int) -> None:
        self.folder = folder
        self._first = first + SKIPPED
        self._last = min(self._first + TRACED - 1, last)
        self._running = False

    @property
    def steps(self) -> int:
        """Returns how many steps are traced, 0 if the run is too short."""
        return max(self._last - self._first + 1, 0)

    def before(self, step: int) -> None:
        """Starts the trace if this is the first step of it."""
        if self.folder is not None and step == self._first and self.steps:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call would be in it, and slow the steps down
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self._running = True

    def after(self, step: int, results: Any) -> None:
        """Ends the trace if this was the last step of it, once its results are there."""
        if self._running and step == self._last:
            jax.block_until_ready(results)
            self.stop()

    def stop(self) -> None:
        """Ends the trace if it still runs."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


class Operation(NamedTuple):
    """One event of the trace: an operation of a compiled program."""

    name: str
    nanoseconds: float


def operations(folder: Path) -> list[Operation]:
    """Returns the operations of the newest trace in a folder; of other programs than the step's too."""
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    found: list[Operation] = []
    if not traces:
        return found
    with warnings.catch_warnings():
        # The reader's first use makes a type that Python warns of; made an error, that ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(traces[-1])).planes:
            for line in plane.lines:
                for event in line.events:
                    name = next((value for key, value in event.stats if key == "hlo_op"), None)
                    if isinstance(name, str) and event.duration_ns and not event.name.startswith("end: "):
                        found.append(Operation(name, event.duration_ns))
    return found


def operation_parts(program: str) -> dict[str, str]:
    """Returns the part of the step that each operation of a compiled program's text belongs to."""
    parts = {}
    for name, source in re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', program, re.MULTILINE):
        words = re.split(r"[/()]", source)
        parts[name] = next((part for part in PARTS if part in words), "other")
    return parts


def _counted(found: Iterable[Operation], parts: dict[str, str]) -> Iterator[Operation]:
    return (operation for operation in found if operation.name in parts and not operation.name.startswith(CONTAINERS))


def part_times(found: Iterable[Operation], parts: dict[str, str]) -> dict[str, float]:
    """Returns the nanoseconds of operations by the part of the step that they belong to, of parts that have some."""
    times: dict[str, float] = defaultdict(float)
    for name, nanoseconds in _counted(found, parts):
        times[parts[name]] += nanoseconds
    return dict(times)


def device_table(found: Sequence[Operation], parts: dict[str, str], steps: int) -> list[str]:
    """Returns lines that share out the time of operations over the parts of a step, and over the longest ones."""
    by_part = part_times(found, parts)
    by_name: dict[str, float] = defaultdict(float)
    for name, nanoseconds in _counted(found, parts):
        by_name[f"{name} ({parts[name]})"] += nanoseconds
    whole = sum(by_part.values())
    if not whole:
        return ["no operation of the step was found in the trace"]
    lines = [f"time of {steps} traced steps on the device, all threads and streams: {whole / 1e6:.1f} ms"]
    for title, times in (("by part", by_part), ("longest operations", by_name)):
        lines.append(f"  {title}")
        for name, nanoseconds in sorted(times.items(), key=lambda item: -item[1])[:TOP_OPERATIONS]:
            lines.append(f"    {name:<50} {nanoseconds / whole:6.1%} {nanoseconds / 1e6 / steps:10.3f} ms a step")
    return lines
