"""What a trace says about the device: kernels of a call, the time in which they run, and the gaps between them."""

import json
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.methods import describe

CALLS = 5  # traced back to back
GAPS = 12  # the longest, which a row keeps
COPIES = ("gpu_memcpy", "gpu_memset")  # categories of PyTorch's trace besides "kernel"


class Work(NamedTuple):
    """One kernel, or one copy or fill of memory, on the device."""

    name: str
    start: float  # microseconds
    duration: float
    kernel: bool


def summary(work: Sequence[Work], calls: int) -> dict[str, Any]:
    """Returns figures of one call.

    Args:
        work: of all traced calls, in any order.
        calls: how many were traced.

    Returns:
        kernels: launches.
        copies: copies and fills of memory.
        device_ms: time in which the device works; work that overlaps counts once.
        gap_ms: time from the first kernel to the end of the last one in which the device does nothing.
        main_kernel: the kernel that takes the most time.
        main_launches: how often it is launched.
    """
    gap = sum(gap.duration for gap in _gaps(work))
    ends = [each.start + each.duration for each in work]
    busy = max(ends) - min(each.start for each in work) - gap if work else 0.0
    kernels = by_kernel([each for each in work if each.kernel], calls)
    main = kernels[0] if kernels else {"name": None, "launches": None}
    return {
        "kernels": sum(kernel["launches"] for kernel in kernels),
        "copies": sum(not each.kernel for each in work) / calls,
        "device_ms": busy / 1000 / calls,
        "gap_ms": gap / 1000 / calls,
        "main_kernel": main["name"],
        "main_launches": main["launches"],
    }


def by_kernel(work: Sequence[Work], calls: int) -> list[dict[str, Any]]:
    """Returns "name", "launches" and "ms" of each kernel, copy and fill in one call, the longest first.

    Args:
        work: of all traced calls, in any order.
        calls: how many were traced.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for each in work:
        found[each.name].append(each.duration)
    rows = [
        {"name": name, "launches": len(times) / calls, "ms": sum(times) / 1000 / calls} for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def by_gap(work: Sequence[Work], calls: int) -> list[dict[str, Any]]:
    """Returns "after", "before", "times" and "ms" of the gaps of one call in which the device does nothing, by the work
    that ends before and begins after them, the longest first.

    Args:
        work: of all traced calls, in any order.
        calls: how many were traced.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for gap in _gaps(work):
        found[gap.after, gap.before].append(gap.duration)
    rows = [
        {"after": after, "before": before, "times": len(times) / calls, "ms": sum(times) / 1000 / calls}
        for (after, before), times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def of_row(trace: Callable[[], list[Work]]) -> dict[str, Any]:
    """Returns what a row records of a trace of CALLS calls: `by_kernel`, the first of `by_gap`, and "device_ms" and
    "gap_ms" of `summary`; or "trace_note" if the profiler fails, because the times of the row are there already."""
    try:
        work = trace()
    except Exception as error:
        return {"trace_note": describe(error)}
    figures = summary(work, CALLS)
    kept = {key: figures[key] for key in ("device_ms", "gap_ms")}
    return {"by_kernel": by_kernel(work, CALLS), "by_gap": by_gap(work, CALLS)[:GAPS], **kept}


class _Gap(NamedTuple):
    duration: float  # microseconds
    after: str
    before: str


def _gaps(work: Sequence[Work]) -> list[_Gap]:
    gaps: list[_Gap] = []
    last = None  # of the work so far, the one that ends last
    for each in sorted(work, key=lambda each: each.start):
        if last is not None and (gap := each.start - last.start - last.duration) > 0:
            gaps.append(_Gap(gap, last.name, each.name))
        if last is None or each.start + each.duration > last.start + last.duration:
            last = each
    return gaps


def torch_work(trace: dict[str, Any]) -> list[Work]:
    """Returns the device's work from the JSON that torch.profiler exports."""
    return [
        Work(event["name"], float(event["ts"]), float(event["dur"]), event["cat"] == "kernel")
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", *COPIES)
    ]


def jax_work(planes: Iterable[Any]) -> list[Work]:
    """Returns the device's work from the planes of `jax.profiler.ProfileData`.

    Only lines of streams count: other lines of a device repeat the same time by operation and by program.
    """
    return [
        Work(
            event.name, event.start_ns / 1000, event.duration_ns / 1000, not event.name.startswith(("Memcpy", "Memset"))
        )
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def trace_torch(run: Callable[[], Any]) -> list[Work]:
    """Traces CALLS calls of PyTorch back to back and returns what the device did.

    Raises:
        RuntimeError: the trace holds no kernel.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return _checked(torch_work(json.loads(path.read_text())))


def trace_jax(run: Callable[[], Any]) -> list[Work]:
    """The same for JAX; `run` must be compiled without CUDA graphs, which hide kernels from the trace."""
    import jax

    jax.block_until_ready(run())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call would be in it, and slow the calls down
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            result = None
            for _ in range(CALLS):
                result = run()
            jax.block_until_ready(result)
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise RuntimeError("the profiler wrote no trace")
        with warnings.catch_warnings():
            # The first use of the reader creates a type that Python warns about. With warnings as errors, that ends the
            # process.
            warnings.simplefilter("ignore", DeprecationWarning)
            planes = jax.profiler.ProfileData.from_file(str(files[-1])).planes
            planes = list(planes)
            seen = [f"{plane.name}: {', '.join(line.name for line in plane.lines)}" for plane in planes]
            return _checked(jax_work(planes), "; ".join(seen))


def _checked(work: list[Work], seen: str = "") -> list[Work]:
    if not any(each.kernel for each in work):
        raise RuntimeError(f"the trace holds no kernel {seen}".strip())
    return work
