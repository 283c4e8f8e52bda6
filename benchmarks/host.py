"""What a call costs the host: the time until it returns, and the time of calls back to back.

A GPU works asynchronously, so a call has two times. `host_ms` is the time until it returns when the device has
nothing to do: the host waits for the device, then one call is timed and not waited for. `total_ms` is the time of one
call among many back to back, with one wait at the end. Where both are equal, the device waits for Python.

Traces come after the times of all rows, because a profiler that was once active makes later launches slower.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

Later = Callable[[], dict[str, Any]]  # traces, and returns more figures of the row

MIN_SAMPLES, MAX_SAMPLES = 10, 2000
ROUNDS = 5  # in which calls take turns: a machine's host is up to twice as fast at one moment as at another

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


class Timed(NamedTuple):
    """The host times of one call, by round. A round that is twice as slow has half as many samples, so the median of
    all samples would be that of the fast rounds: the figures are medians over rounds."""

    samples: list[list[float]]  # ms of each call
    totals: list[float]  # ms of a call back to back

    def figures(self) -> dict[str, float]:
        """Returns `host_ms` with its 20/80 percentiles, and `total_ms` if it was measured."""
        every = np.concatenate(self.samples)
        figures = {
            "host_ms": float(np.median(self.medians())),
            "host_ms_p20": float(np.percentile(every, 20)),
            "host_ms_p80": float(np.percentile(every, 80)),
        }
        return figures | ({"total_ms": float(np.median(self.totals))} if self.totals else {})

    def medians(self) -> list[float]:
        return [float(np.median(samples)) for samples in self.samples]

    def above(self, other: "Timed") -> float:
        """Returns how much longer a call takes than another: the median of the differences within a round."""
        return float(np.median(np.subtract(self.medians(), other.medians())))


def time_in_turns(
    steps: Mapping[str, Callable[[], Any]], wait: Callable[[], None], seconds: float, *, with_total: Collection[str]
) -> dict[str, Timed]:
    """Times calls until they return when the device has nothing to do. The calls take turns in ROUNDS rounds.

    Args:
        steps: each enqueues one call.
        wait: blocks until the last one is done.
        seconds: for each figure of each call; at least MIN_SAMPLES calls are timed.
        with_total: the steps that are also timed back to back.
    """
    timed = {name: Timed([], []) for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            timed[name].samples.append(_samples(step, wait, seconds / ROUNDS))
            if name in with_total:
                timed[name].totals.append(_total(step, wait, seconds / ROUNDS))
    return timed


def _samples(step: Callable[[], Any], wait: Callable[[], None], seconds: float) -> list[float]:
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    least, most = MIN_SAMPLES // ROUNDS, MAX_SAMPLES // ROUNDS
    while len(samples) < least or (time.perf_counter() < deadline and len(samples) < most):
        wait()
        start = time.perf_counter()
        step()
        samples.append(1000 * (time.perf_counter() - start))
    wait()
    return samples


def _total(step: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """Returns the ms of one call back to back, of a block of calls with one wait at its end."""

    def block(calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        wait()
        return (time.perf_counter() - start) / calls

    return 1000 * block(max(2, round(seconds / max(block(2), 1e-9))))
