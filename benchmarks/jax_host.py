"""Host time in JAX: a jitted `value_and_grad` call, and what its trace says about kernels and gaps."""

from typing import Any

import jax

from benchmarks.host import Later, time_in_turns
from benchmarks.methods import Prepared, UnavailableError, describe
from benchmarks.shapes import Mode
from benchmarks.timing import Timing, keep_busy
from benchmarks.trace import CALLS, Work, summary, trace_jax

WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}  # a CUDA graph hides its kernels from the trace


def host_figures(
    prepared: Prepared, mode: Mode, timing: Timing, *, gpu: bool, trace: bool
) -> tuple[dict[str, Any], Later | None]:
    """Returns the figures of one row of a host mode, and what traces the call afterwards.

    Args:
        prepared: the method, which has been checked; its program is jitted.
        mode: "host" or "host-eval".
        timing: `seconds` is for each figure, `warmup` for the calls before them.
        gpu: the device is a GPU.
        trace: also compile without CUDA graphs and trace, which takes up to as long as the first compilation.

    Raises:
        UnavailableError: the mode is PyTorch's only.
    """
    if mode.measures != "host":
        raise UnavailableError(f"mode {mode.name} is PyTorch's only: a JAX call is one compiled program")
    function, arguments = prepared.program, prepared.arguments
    assert function is not None
    last: list[Any] = [None]

    def step() -> Any:
        result = function(*arguments)
        last[0] = result
        return result

    def wait() -> None:
        jax.block_until_ready(last[0])

    step()
    keep_busy([step], timing.warmup, lambda result: result, jax.block_until_ready)
    figures: dict[str, Any] = {
        **time_in_turns({"": step}, wait, timing.seconds, with_total={""})[""].figures(),
        "graph_note": "XLA builds the CUDA graphs of a program",
    }
    last[0] = None
    if not (gpu and trace):
        return figures | {"trace_note": "--no-trace was given" if gpu else "no GPU is measured"}, None
    return figures, lambda: _traced(function, arguments)


def trace_without_graphs(function: Any, arguments: tuple[Any, ...]) -> list[Work]:
    """Compiles a jitted function without CUDA graphs, traces it and returns what the device did."""
    compiled = function.lower(*arguments).compile(WITHOUT_GRAPHS)
    return trace_jax(lambda: compiled(*arguments))


def _traced(function: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return summary(trace_without_graphs(function, arguments), CALLS)
    except Exception as error:  # a profiler may fail in any way, and the times are there already
        return {"trace_note": describe(error)}
