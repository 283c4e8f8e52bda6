"""Times of the rows of `benchmarks.hosts`: one step alone, or the steps of two rows in turns."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.hosts_rows import Row
from benchmarks.timing import Sensor, blocks_in_turns, ratio_figures
from benchmarks.trace import Work, of_row


class Prepared(NamedTuple):
    """A row that has been checked and warmed up.

    Args:
        row: the row.
        step: enqueues one of its steps.
        trace: returns what the device does in a step.
        figures: keys of the row that are known before its steps are timed.
    """

    row: Row
    step: Callable[[], None]
    trace: Callable[[], list[Work]]
    figures: dict[str, Any]


def time_steps(
    rows: Sequence[Prepared], wait: Callable[[], None], on_gpu: bool, seconds: float, kernels: bool
) -> list[dict[str, Any]]:
    """Returns the figures of rows, whose steps are timed in turns: tokens per second, times, the ratio of the second
    row to the first, and if asked for kernels and gaps of traces.

    Args:
        rows: one or two.
        wait: blocks until the last step is done.
        on_gpu: whether to read its clock and power.
        seconds: for the steps of a row.
        kernels: whether to trace.
    """
    timed = blocks_in_turns([each.step for each in rows], wait, seconds, Sensor(gpu=on_gpu))
    # Of the speeds: the times of the first relative to those of the second
    ratio = ratio_figures(*(blocks.times for blocks in timed)) if len(rows) == 2 else {}
    found = []
    for (row, _, _, known), blocks in zip(rows, timed, strict=True):
        figures = blocks.figures()
        tokens_per_s = 1000 * row.batch * row.seq / figures["step_ms"]
        found.append({"tokens_per_s": tokens_per_s, **known, **figures, **ratio})
    if kernels:  # after all times: the profiler slows later steps
        for one, each in zip(found, rows, strict=True):
            one |= of_row(each.trace)
    return found
