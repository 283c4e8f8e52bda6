"""Host time in PyTorch: calls as a user writes them, CUDA graphs, further chunks, and calls inside torch.compile."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.host import Later, host_figures, host_samples, total_time
from benchmarks.methods import Method, Prepared, describe
from benchmarks.shapes import Mode
from benchmarks.timing import Timing, keep_busy
from benchmarks.trace import trace_torch

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]
REPLAYS_MS = 20.0  # of a block of graph replays
CHUNK_SHARES = (2, 4, 8)  # divisors: a budget holds this part of the scaled exponentials of all rows, 2 N V bytes
CHUNK_SLACK = 2**24  # bytes of a budget for everything else
ONE_THREAD = "one_thread_"  # begins the names of figures of calls without autograd's thread
ROUNDS = 5  # in which calls are timed in turns: a machine's host is up to twice as fast at one moment as at another
SLEEP_CYCLES = 10_000_000  # of the GPU's clock, to learn how long one takes


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
        graph = self._graph(Steps(loss_fn, arrays, mode))
        calls = {"": steps}
        if mode.backward and graph.get("graph_ms"):
            bare = bare_node(self._cycles(graph["graph_ms"]))
            calls["busy_identity_"] = Steps(bare, arrays, mode)
        figures = self._calls(calls) | graph
        if mode.backward:
            raw = self._times({"": steps.grad})[""]
            figures |= {"grad_host_ms": raw["host_ms"], "grad_total_ms": raw["total_ms"]}
        if not self._traces:
            return figures | {"trace_note": self._why_no_trace}, None
        return figures, lambda: self._traced(steps.step)

    @property
    def _traces(self) -> bool:
        return self._gpu and self._trace

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def _calls(self, calls: Mapping[str, Steps]) -> dict[str, Any]:
        """Returns the times of calls as a user writes them, and of calls whose backward pass stays on the caller's
        thread: PyTorch runs it on another one for each GPU, and the host waits while that thread wakes up.

        The figures of the calls named "" have the names of `host.MEASURED`. The others have a `host_ms` with the name
        in front of `ms`, and the difference from it.
        """
        figures: dict[str, Any] = {}
        backward = any(steps.mode.backward for steps in calls.values())
        timed = self._times({name: steps.step for name, steps in calls.items()}, one_thread=backward)
        for thread in ("", ONE_THREAD) if backward else ("",):
            own = timed[thread]
            figures |= {thread + key: own[key] for key in (("host_ms", "total_ms") if thread else own)}
            for name in filter(None, calls):
                figures[f"{thread}{name}ms"] = timed[thread + name]["host_ms"]
                figures[f"{thread}above_{name}ms"] = own["host_ms"] - timed[thread + name]["host_ms"]
        return figures

    def _times(self, steps: Mapping[str, Callable[[], Any]], *, one_thread: bool = False) -> dict[str, dict[str, Any]]:
        """Returns the times of each step, which take turns. With `one_thread` each is also timed without the thread of
        autograd, under its name with ONE_THREAD in front."""
        seconds = self._timing.seconds / ROUNDS
        samples: dict[str, list[float]] = {}
        totals: dict[str, list[float]] = {}
        for step in steps.values():
            step()
        keep_busy(list(steps.values()), self._timing.warmup, lambda _: None, lambda _: None)
        self._wait()
        for _ in range(ROUNDS):
            for thread in ("", ONE_THREAD) if one_thread else ("",):
                with torch.autograd.set_multithreading_enabled(False) if thread else nullcontext():
                    for name, step in steps.items():
                        samples.setdefault(thread + name, []).extend(host_samples(step, self._wait, seconds))
                        totals.setdefault(thread + name, []).append(total_time(step, self._wait, seconds))
        return {name: {**host_figures(samples[name]), "total_ms": float(np.median(totals[name]))} for name in samples}

    def _cycles(self, ms: float) -> int:
        """Returns for how many cycles of its clock the GPU has to sleep to be busy for so many milliseconds."""
        return round(ms * SLEEP_CYCLES / self._time_block(lambda: torch.cuda._sleep(SLEEP_CYCLES), 3))

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
                runs.append(({"memory_budget": budget, **self._calls({"": steps})}, steps))
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
        """Host time inside torch.compile, and how far it is above that of an operator which computes nothing, with the
        GPU idle and with the GPU as busy as the loss makes it."""
        torch._dynamo.reset()
        identity = identity_operator()
        graph = self._graph(Steps(loss_fn, arrays, mode))
        cycles = self._cycles(graph["graph_ms"]) if graph.get("graph_ms") else 0

        # Each has its own code, so that a call checks the guards of one compiled function only.
        def call_loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return loss_fn(x, w, y)

        def call_identity(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return identity(x, w, y, 0)

        def call_busy_identity(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            return identity(x, w, y, cycles)

        functions = {"": call_loss, "identity_": call_identity}
        if cycles:
            functions["busy_identity_"] = call_busy_identity
        return self._calls(
            {
                name: Steps(torch.compile(function, fullgraph=True, dynamic=False), arrays, mode)
                for name, function in functions.items()
            }
        )


class _BareNode(torch.autograd.Function):
    """A node of autograd with the arguments and the gradients of a loss, that computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor, cycles: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        torch.cuda._sleep(cycles)
        ctx.save_for_backward(x, w)
        return x.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *(torch.empty_like(saved) for saved in ctx.saved_tensors), None, None


def bare_node(cycles: int) -> LossFn:
    """Returns a function with the arguments and gradients of a loss: one node of autograd, which computes nothing while
    the GPU sleeps for `cycles` of its clock. Its host time is PyTorch's own."""
    return lambda x, w, y: _BareNode.apply(x, w, y, cycles)  # pyright: ignore[reportReturnType]


_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def identity_operator() -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """Returns an operator with the arguments and the gradients of a loss that computes nothing: its cost is the call's.

    Its last argument is for how many cycles of its clock the GPU sleeps in the forward pass. Like the loss it allocates
    both gradients. It is registered through `torch.library.Library`, which adds no check of its results.
    """
    if not _libraries:
        library = torch.library.Library("linear_ce_benchmarks", "DEF")
        library.define("nothing(Tensor x, Tensor w, Tensor y, int cycles) -> Tensor")
        library.define("nothing_backward(Tensor d_loss, Tensor x, Tensor w) -> (Tensor, Tensor)")

        def fake(x: Tensor, w: Tensor, y: Tensor, cycles: int) -> Tensor:
            return x.new_empty((), dtype=torch.float32)

        def nothing(x: Tensor, w: Tensor, y: Tensor, cycles: int) -> Tensor:
            if cycles:
                torch.cuda._sleep(cycles)
            return fake(x, w, y, cycles)

        def nothing_backward(d_loss: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return torch.empty_like(x), torch.empty_like(w)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs[:2])

        def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
            return *torch.ops.linear_ce_benchmarks.nothing_backward(d_loss, *ctx.saved_tensors), None, None

        operators = ("nothing", nothing, fake), ("nothing_backward", nothing_backward, nothing_backward)
        for name, function, shapes in operators:
            library.impl(name, function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"linear_ce_benchmarks::{name}", shapes, lib=library)
        torch.library.register_autograd(
            "linear_ce_benchmarks::nothing", backward, setup_context=setup_context, lib=library
        )
        _libraries.append(library)
    return torch.ops.linear_ce_benchmarks.nothing
