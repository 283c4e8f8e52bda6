"""Host time in PyTorch: calls as a user writes them, CUDA graphs, further chunks, and calls inside torch.compile."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.host import Later, host_times, total_time
from benchmarks.methods import Method, Prepared, describe
from benchmarks.shapes import Mode
from benchmarks.timing import Timing, keep_busy
from benchmarks.trace import trace_torch

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]
REPLAYS_MS = 20.0  # of a block of graph replays
CHUNK_SHARES = (2, 4, 8)  # divisors: a budget holds this part of the scaled exponentials of all rows, 2 N V bytes
CHUNK_SLACK = 2**24  # bytes of a budget for everything else
ONE_THREAD = "one_thread_"  # begins the names of figures of calls without autograd's thread


class Steps:
    """Calls of a loss with separate leaves.

    Args:
        loss_fn: (input, linear_weight, target) -> loss.
        arrays: input, linear_weight, target.
        mode: whether gradients are computed.
    """

    def __init__(self, loss_fn: LossFn, arrays: tuple[Tensor, Tensor, Tensor], mode: Mode) -> None:
        x, w, self._target = arrays
        self._loss_fn, self.mode = loss_fn, mode
        self._x = x.detach().requires_grad_(mode.d_input)
        self._w = w.detach().requires_grad_(mode.d_weight)

    def step(self) -> Tensor:
        """As a user writes it: the loss, then `backward` into `.grad`, which is None before."""
        if not self.mode.backward:
            with torch.no_grad():
                return self._loss_fn(self._x, self._w, self._target)
        self._x.grad = self._w.grad = None
        loss = self._loss_fn(self._x, self._w, self._target)
        loss.backward()
        return loss

    def grad(self) -> tuple[Tensor, ...]:
        """The same call with `torch.autograd.grad`, which stores nothing in the leaves."""
        return torch.autograd.grad(self._loss_fn(self._x, self._w, self._target), (self._x, self._w))


def capture(run: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function that replays one call of `run` captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay(_results: Any = results) -> None:  # the results live in the graph's memory as long as the graph
        graph.replay()

    return replay


class HostBench:
    """The host's time of calls on one device.

    Args:
        gpu: the device is a GPU.
        time_block: as `Bench.time_block`.
        timing: `seconds` is for each figure, `warmup` for each set of calls.
        trace: also count kernels and their time.
    """

    def __init__(
        self, gpu: bool, time_block: Callable[[Callable[[], Any], int], float], timing: Timing, *, trace: bool
    ) -> None:
        self._gpu, self._time_block, self._timing = gpu, time_block, timing
        self._trace = trace
        self._why_no_trace = "--no-trace was given" if gpu else "no GPU is measured"

    def figures(self, prepared: Prepared, method: Method, mode: Mode) -> tuple[dict[str, Any], Later | None]:
        """Returns the figures of one row of a host mode, and what traces its calls afterwards."""
        x, w, target = prepared.arguments
        arrays, loss_fn = (x, w, target), prepared.program
        assert loss_fn is not None
        if mode.measures == "host-chunks":
            return self._chunks(arrays, method, mode)
        if mode.measures == "host-compile":
            return self._compiled(loss_fn, arrays, mode), None
        steps = Steps(loss_fn, arrays, mode)
        figures = self._calls(steps)
        if mode.backward:
            raw = self._times(steps.grad)
            figures |= {"grad_host_ms": raw["host_ms"], "grad_total_ms": raw["total_ms"]}
        figures |= self._graph(Steps(loss_fn, arrays, mode))
        if not self._traces:
            return figures | {"trace_note": self._why_no_trace}, None
        return figures, lambda: self._traced(steps.step)

    @property
    def _traces(self) -> bool:
        return self._gpu and self._trace

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def _calls(self, steps: Steps) -> dict[str, Any]:
        """Returns the times of calls as a user writes them, and of calls whose backward pass stays on the caller's
        thread: PyTorch runs it on another one for each GPU, and the host waits while that thread wakes up."""
        times = self._times(steps.step)
        if steps.mode.backward:
            with torch.autograd.set_multithreading_enabled(False):
                one_thread = self._times(steps.step)
            times |= {ONE_THREAD + key: one_thread[key] for key in ("host_ms", "total_ms")}
        return times

    def _times(self, step: Callable[[], Any]) -> dict[str, Any]:
        step()
        keep_busy([step], self._timing.warmup, lambda _: None, lambda _: None)
        self._wait()
        seconds = self._timing.seconds
        return {**host_times(step, self._wait, seconds), "total_ms": total_time(step, self._wait, seconds)}

    def _traced(self, step: Callable[[], Any]) -> dict[str, Any]:
        try:
            return trace_torch(step)
        except Exception as error:  # a profiler may fail in any way, and the times are there already
            return {"trace_note": describe(error)}

    def _graph(self, steps: Steps) -> dict[str, Any]:
        if not self._gpu:
            return {"graph_note": "CUDA graphs need a GPU"}
        try:
            replay = capture(steps.step)
        except Exception as error:  # a method may do what a capture forbids
            torch.cuda.synchronize()
            return {"graph_note": describe(error)}
        once = self._time_block(replay, 3)
        calls = max(1, round(REPLAYS_MS / max(once, 1e-3)))
        times = sorted(self._time_block(replay, calls) for _ in range(9))
        return {"graph_ms": times[len(times) // 2]}

    def _chunks(
        self, arrays: tuple[Tensor, Tensor, Tensor], method: Method, mode: Mode
    ) -> tuple[dict[str, Any], Later | None]:
        """Host time at budgets that allow fewer rows at a time, and what each further chunk adds to it.

        The number of chunks is how often the kernel that takes the most time is launched, for which a trace is needed.
        """
        n, v = len(arrays[0]), len(arrays[1])
        rows = 2 * arrays[0].numel() + CHUNK_SLACK
        runs: list[tuple[dict[str, Any], Steps]] = []
        for budget in (None, *(2 * n * v // share + rows for share in CHUNK_SHARES)):
            steps = Steps(method.build(replace(mode, memory_budget=budget)), arrays, mode)
            try:
                runs.append(({"memory_budget": budget, **self._calls(steps)}, steps))
            except ValueError as error:
                if budget is None:
                    raise
                runs.append(({"memory_budget": budget, "note": describe(error)}, steps))
        figures = {key: value for key, value in runs[0][0].items() if key != "memory_budget"}
        figures["chunk_runs"] = [run for run, _ in runs]
        if not self._traces:
            return figures | {"trace_note": self._why_no_trace}, None
        return figures, lambda: self._traced_chunks(runs)

    def _traced_chunks(self, runs: Sequence[tuple[dict[str, Any], Steps]]) -> dict[str, Any]:
        """Returns the figures of the first run's trace and, from all traces, `chunk_ms`."""
        traces = [self._traced(steps.step) if "host_ms" in run else {} for run, steps in runs]
        for (run, _), traced in zip(runs, traces, strict=True):
            run |= {"chunks": traced.get("main_launches"), "kernels": traced.get("kernels")}
        timed = [run for run, _ in runs if run["chunks"]]
        figures = {**traces[0], "chunk_runs": [run for run, _ in runs]}
        if runs[0][0]["chunks"]:
            first, last = runs[0][0], max(timed, key=lambda run: run["chunks"])
            if last["chunks"] > first["chunks"]:
                for kind in ("", ONE_THREAD):
                    longer = last[kind + "host_ms"] - first[kind + "host_ms"]
                    figures[kind + "chunk_ms"] = longer / (last["chunks"] - first["chunks"])
        return figures

    def _compiled(self, loss_fn: LossFn, arrays: tuple[Tensor, Tensor, Tensor], mode: Mode) -> dict[str, Any]:
        """Host time inside torch.compile, and how far it is above that of an operator which computes nothing."""
        figures: dict[str, Any] = {}
        for name, function in (("identity", identity_operator()), ("ours", loss_fn)):
            torch._dynamo.reset()

            def call(x: Tensor, w: Tensor, y: Tensor, function: LossFn = function) -> Tensor:
                return function(x, w, y)

            steps = Steps(torch.compile(call, fullgraph=True, dynamic=False), arrays, mode)
            times = self._calls(steps)
            if name == "identity":
                figures |= {kind + "identity_ms": times[kind + "host_ms"] for kind in ("", ONE_THREAD)}
            else:
                figures |= times
        above = {kind: figures[kind + "host_ms"] - figures[kind + "identity_ms"] for kind in ("", ONE_THREAD)}
        return figures | {kind + "above_identity_ms": value for kind, value in above.items()}


_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def identity_operator() -> LossFn:
    """Returns an operator with the arguments and the gradients of a loss that computes nothing: its cost is the call's.

    Like the loss it allocates both gradients. It is registered through `torch.library.Library`, which adds no check of
    its results.
    """
    if not _libraries:
        library = torch.library.Library("linear_ce_benchmarks", "DEF")
        library.define("nothing(Tensor x, Tensor w, Tensor y) -> Tensor")
        library.define("nothing_backward(Tensor d_loss, Tensor x, Tensor w) -> (Tensor, Tensor)")

        def nothing(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return x.new_empty((), dtype=torch.float32)

        def nothing_backward(d_loss: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return torch.empty_like(x), torch.empty_like(w)

        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs[:2])

        def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, None]:
            return *torch.ops.linear_ce_benchmarks.nothing_backward(d_loss, *ctx.saved_tensors), None

        for name, function in (("nothing", nothing), ("nothing_backward", nothing_backward)):
            library.impl(name, function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"linear_ce_benchmarks::{name}", function, lib=library)
        torch.library.register_autograd(
            "linear_ce_benchmarks::nothing", backward, setup_context=setup_context, lib=library
        )
        _libraries.append(library)
    return torch.ops.linear_ce_benchmarks.nothing
