"""What a call costs the host: the time until it returns, and the time of calls back to back.

A GPU works asynchronously, so a call has two times. `host_ms` is the time until it returns when the device has
nothing to do: the host waits for the device, then one call is timed and not waited for. `total_ms` is the time of one
call among many back to back, with one wait at the end. Where both are equal, the device waits for Python.

Traces come after the times of all rows, because a profiler that was once active makes later launches slower.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Later = Callable[[], dict[str, Any]]  # traces, and returns more figures of the row

MIN_SAMPLES, MAX_SAMPLES = 10, 1000
BLOCKS = 5

MEASURED = (  # the keys that every row of these modes has, None where they were not measured
    *("host_ms", "host_ms_p20", "host_ms_p80", "total_ms", "grad_host_ms", "grad_total_ms", "graph_ms", "graph_note"),
    *("device_ms", "kernels", "copies", "gap_ms", "main_kernel", "main_launches", "trace_note"),
    *("one_thread_host_ms", "one_thread_total_ms", "one_thread_chunk_ms"),
    *("one_thread_identity_ms", "one_thread_above_identity_ms"),
    *("busy_identity_ms", "above_busy_identity_ms"),
    *("one_thread_busy_identity_ms", "one_thread_above_busy_identity_ms"),
    *("chunk_ms", "chunk_runs", "identity_ms", "above_identity_ms", "lower_s", "compile_s", "compile_note"),
    *("peak_bytes", "workspace_bytes", "err_loss", "err_d_input", "err_d_weight", "mean_loss", "repeats"),
    *("version", "status", "note"),
)


def host_times(step: Callable[[], Any], wait: Callable[[], None], seconds: float) -> dict[str, float]:
    """Returns `host_ms` with its 20/80 percentiles: the time until a call returns when the device has nothing to do.

    Args:
        step: enqueues one call.
        wait: blocks until the last one is done.
        seconds: for all of it; at least MIN_SAMPLES calls are timed.
    """
    return host_figures(host_samples(step, wait, seconds))


def host_samples(step: Callable[[], Any], wait: Callable[[], None], seconds: float) -> list[float]:
    """Returns the ms until a call returned, of each call. The arguments are those of `host_times`."""
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or (time.perf_counter() < deadline and len(samples) < MAX_SAMPLES):
        wait()
        start = time.perf_counter()
        step()
        samples.append(1000 * (time.perf_counter() - start))
    wait()
    return samples


def host_figures(samples: Sequence[float]) -> dict[str, float]:
    """Returns the figures of `host_times` from samples in ms."""
    return {
        "host_ms": float(np.median(samples)),
        "host_ms_p20": float(np.percentile(samples, 20)),
        "host_ms_p80": float(np.percentile(samples, 80)),
    }


def total_time(step: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """Returns the ms of one call back to back: the median of BLOCKS blocks, each with one wait at its end.

    Args:
        step: enqueues one call.
        wait: blocks until the last one is done.
        seconds: for all blocks.
    """

    def block(calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        wait()
        return (time.perf_counter() - start) / calls

    calls = max(2, round(seconds / BLOCKS / max(block(2), 1e-9)))
    return 1000 * float(np.median([block(calls) for _ in range(BLOCKS)]))
