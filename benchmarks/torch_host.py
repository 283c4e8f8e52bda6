"""Host time in PyTorch: calls as a user writes them, CUDA graphs, further chunks, and calls inside torch.compile."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.host import Later, Timed, time_in_turns
from benchmarks.methods import Method, Prepared, describe
from benchmarks.shapes import Mode
from benchmarks.timing import Timing, keep_busy
from benchmarks.trace import CALLS, summary, trace_torch

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]
REPLAYS_MS = 20.0  # of a block of graph replays
CHUNK_SHARES = (2, 4, 8)  # divisors: a budget holds this part of the scaled exponentials of all rows, 2 N V bytes
CHUNK_SLACK = 2**24  # bytes of a budget for everything else
ONE_THREAD = "one_thread_"  # begins the names of figures of calls without autograd's thread
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
        graph = self._graph(steps)
        calls: dict[str, Callable[[], Any]] = {"": steps.step}
        if mode.backward:
            calls["grad_"] = steps.grad
            if graph.get("graph_ms"):
                calls["busy_identity_"] = Steps(bare_node(self._cycles(graph["graph_ms"])), arrays, mode).step
        figures = self._figures(self._times(calls, mode, with_total={"", "grad_"})) | graph
        if not self._traces:
            return figures | {"trace_note": self._why_no_trace}, None
        return figures, lambda: self._traced(steps.step)

    @property
    def _traces(self) -> bool:
        return self._gpu and self._trace

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def _times(
        self, calls: Mapping[str, Callable[[], Any]], mode: Mode, *, with_total: Collection[str] = ("",)
    ) -> dict[str, Timed]:
        """Returns the times of calls, which take turns.

        A call with a backward pass is also timed with that pass on the caller's thread, under its name with ONE_THREAD
        in front: PyTorch runs it on another thread for each GPU, and the host waits while that thread wakes up.
        """
        for call in calls.values():
            call()
        keep_busy(list(calls.values()), self._timing.warmup, lambda _: None, lambda _: None)
        self._wait()
        steps, totals = dict(calls), {*with_total}
        if mode.backward:
            steps |= {ONE_THREAD + name: one_thread(call) for name, call in calls.items() if name != "grad_"}
            totals |= {ONE_THREAD + name for name in with_total}
        return time_in_turns(steps, self._wait, self._timing.seconds, with_total=totals)

    def _figures(self, timed: Mapping[str, Timed]) -> dict[str, Any]:
        """Returns the figures of `host.MEASURED`: of the call named "", of `autograd.grad`, and of each identity with
        how far the call is above it, as in `busy_identity_ms` and `above_busy_identity_ms`."""
        figures: dict[str, Any] = timed[""].figures()
        if "grad_" in timed:
            grad = timed["grad_"].figures()
            figures |= {"grad_host_ms": grad["host_ms"], "grad_total_ms": grad["total_ms"]}
        if ONE_THREAD in timed:
            alone = timed[ONE_THREAD].figures()
            figures |= {ONE_THREAD + key: alone[key] for key in ("host_ms", "total_ms")}
        for name in timed:
            if name.endswith("identity_"):
                thread = ONE_THREAD if name.startswith(ONE_THREAD) else ""
                identity = name.removeprefix(thread)
                figures[f"{name}ms"] = timed[name].figures()["host_ms"]
                figures[f"{thread}above_{identity}ms"] = timed[thread].above(timed[name])
        return figures

    def _cycles(self, ms: float) -> int:
        """Returns for how many cycles of its clock the GPU has to sleep to be busy for so many milliseconds."""
        return round(ms * SLEEP_CYCLES / self._time_block(lambda: torch.cuda._sleep(SLEEP_CYCLES), 3))

    def _traced(self, step: Callable[[], Any]) -> dict[str, Any]:
        try:
            return summary(trace_torch(step), CALLS)
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
        runs: list[dict[str, Any]] = []
        steps: dict[str, Steps] = {}  # by number of the run
        for budget in (None, *(2 * n * v // share + rows for share in CHUNK_SHARES)):
            runs.append({"memory_budget": budget})
            one = Steps(method.build(replace(mode, memory_budget=budget)), arrays, mode)
            try:
                one.step()
            except ValueError as error:
                if budget is None:
                    raise
                runs[-1]["note"] = describe(error)
            else:
                steps[str(len(runs) - 1)] = one
        timed = self._times({name: one.step for name, one in steps.items()}, mode, with_total=steps)
        for name in steps:
            own = {"": timed[name]} | ({ONE_THREAD: timed[ONE_THREAD + name]} if mode.backward else {})
            runs[int(name)] |= self._figures(own)
        figures = {**{key: value for key, value in runs[0].items() if key != "memory_budget"}, "chunk_runs": runs}
        if not self._traces:
            return figures | {"trace_note": self._why_no_trace}, None
        return figures, lambda: self._traced_chunks(runs, steps, timed)

    def _traced_chunks(
        self, runs: list[dict[str, Any]], steps: Mapping[str, Steps], timed: Mapping[str, Timed]
    ) -> dict[str, Any]:
        """Returns the figures of the first run's trace and, from all traces, `chunk_ms`."""
        traces = {name: self._traced(one.step) for name, one in steps.items()}
        for index, run in enumerate(runs):
            traced = traces.get(str(index), {})
            run |= {"chunks": traced.get("main_launches"), "kernels": traced.get("kernels")}
        figures = {**traces["0"], "chunk_runs": runs}
        last = max(range(len(runs)), key=lambda index: runs[index]["chunks"] or 0)
        if runs[0]["chunks"] and runs[last]["chunks"] > runs[0]["chunks"]:
            for thread in ("", ONE_THREAD):
                longer = timed[f"{thread}{last}"].above(timed[f"{thread}0"])
                figures[thread + "chunk_ms"] = longer / (runs[last]["chunks"] - runs[0]["chunks"])
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
        calls = {
            name: Steps(torch.compile(function, fullgraph=True, dynamic=False), arrays, mode).step
            for name, function in functions.items()
        }
        return self._figures(self._times(calls, mode)) | graph


def one_thread(step: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a call whose backward pass runs on the caller's thread."""
    context = torch.autograd.set_multithreading_enabled

    def alone() -> Any:
        with context(False):
            return step()

    return alone


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
    the GPU sleeps for `cycles` of its clock. Its host time is PyTorch's own, with one launch."""
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
