"""PyTorch's side of the benchmark: arrays, the float32 reference, the floor, memory and CUDA-event times."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import data, torch_methods
from benchmarks.host import Later
from benchmarks.methods import (
    ERRORS,
    FLOOR_ROWS,
    ROW_ERRORS,
    Floor,
    Method,
    Prepared,
    Problem,
    Program,
    UnavailableError,
    floor_padding,
    floor_scale,
    row_figures,
)
from benchmarks.shapes import Mode, Objective, Shape
from benchmarks.timing import (
    Energy,
    Pairs,
    Sensor,
    Timing,
    host_pairs,
    keep_busy,
    measure_energy,
    pair_count,
    pair_order,
    same,
)
from benchmarks.torch_host import HostBench, capture
from benchmarks.trace import CALLS, by_kernel, trace_torch

INTERVAL_MS = 1.0  # least time between two events: their own resolution and the gap around them are microseconds
REFERENCE_LOGITS = 2**28  # elements of a chunk of the reference: 1 GiB


@dataclass(frozen=True)
class Reference:
    """The objective of each token, losses (N,), and gradients, in float32; a gradient is None if it was not
    requested."""

    losses: Tensor
    d_input: Tensor | None
    d_weight: Tensor | None


class TorchBench:
    """PyTorch on one device."""

    framework = "torch"

    def __init__(self, device: str) -> None:
        self.gpu = device == "cuda"
        if self.gpu and not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
        self.device = torch.cuda.get_device_name() if self.gpu else "CPU (times are no results)"
        self._device = torch.device(device)
        torch.set_float32_matmul_precision("highest")

    @property
    def methods(self) -> dict[str, Method]:
        return torch_methods.METHODS

    def versions(self) -> dict[str, str]:
        versions = {"torch": torch.__version__, "numpy": np.__version__}
        if self.gpu:
            import triton

            versions |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
        return versions

    def problem(self, shape: Shape, dtype: str, targets: str) -> Problem:
        return TorchProblem(shape, dtype, targets, self._device, self.time_pairs)

    def compile_ahead(self, programs: Sequence[Program], jobs: int, *, beside: bool = False) -> None:
        raise UnavailableError("--compile-jobs is for JAX: one compiled kernel of PyTorch serves many shapes")

    def stop_compiling(self) -> None:
        pass

    def time_pairs(self, calls: Sequence[Callable[[], Any]], timing: Timing, sensor: Sensor) -> Pairs:
        if not self.gpu:
            return host_pairs(calls, lambda _: None, timing, sensor, block_seconds=0.0)
        return _event_pairs(self, calls, timing, sensor)

    def time_block(self, run: Callable[[], Any], calls: int) -> float:
        run()  # the device works on this one while the host enqueues the next
        if not self.gpu:
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return 1000 * (time.perf_counter() - start) / calls
        start = _event()
        for _ in range(calls):
            run()
        end = _event()
        end.synchronize()
        return start.elapsed_time(end) / calls

    def energy(self, run: Callable[[], Any], seconds: float, sensor: Sensor) -> Energy:
        if not self.gpu:
            return measure_energy(run, seconds, same, same, sensor)
        return measure_energy(run, seconds, lambda _: _event(), torch.cuda.Event.synchronize, sensor)

    def digest(self, results: Sequence[Tensor]) -> str:
        return f"{sum(31**index * _digest(result) for index, result in enumerate(results)) % 2**64:016x}"

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        if not self.gpu:
            raise UnavailableError("CUDA graphs need a GPU")
        return capture(run)

    def kernels(self, prepared: Prepared) -> list[dict[str, Any]]:
        return by_kernel(trace_torch(prepared.run), CALLS)

    def host_figures(
        self, prepared: Prepared, method: Method, mode: Mode, timing: Timing, *, trace: bool
    ) -> tuple[dict[str, Any], Later | None]:
        return HostBench(self.gpu, self.time_block, timing, trace=trace).figures(prepared, method, mode)

    def release(self) -> None:
        if self.gpu:  # a collection takes 0.2 s, and a CPU's memory is not what is measured
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _event_pairs(bench: TorchBench, calls: Sequence[Callable[[], Any]], timing: Timing, sensor: Sensor) -> Pairs:
    """Enqueues all pairs with events between them; the host waits only at the end."""
    repeats = [1] * len(calls)  # so many calls between two events

    def pair(number: int) -> dict[int, tuple[torch.cuda.Event, torch.cuda.Event]]:
        intervals, before = {}, _event()
        for index in pair_order(len(calls), number):
            for _ in range(repeats[index]):
                calls[index]()
            intervals[index] = before, _event()
            before = intervals[index][1]
        return intervals

    def times(intervals: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        return [intervals[index][0].elapsed_time(intervals[index][1]) / repeats[index] for index in range(len(calls))]

    pair(0)
    trial = pair(0)
    torch.cuda.synchronize()
    repeats = [max(1, math.ceil(INTERVAL_MS / each)) for each in times(trial)]
    keep_busy([lambda: pair(0)], timing.warmup, lambda _: _event(), torch.cuda.Event.synchronize)
    trial = pair(0)
    torch.cuda.synchronize()
    pair_seconds = sum(count * each for count, each in zip(repeats, times(trial), strict=True)) / 1000
    pairs = [pair(number) for number in range(pair_count(timing.seconds, pair_seconds, timing.min_pairs))]
    readings = sensor.watch(_event().query)
    torch.cuda.synchronize()
    floor, method, *forward = zip(*(times(intervals) for intervals in pairs), strict=True)
    energy = bench.energy(calls[1], timing.energy_seconds, sensor)
    return Pairs(floor, method, readings, forward[0] if forward else (), energy)


DIGEST_PIECE = 2**24  # elements whose digest is computed at a time: 128 MiB of int64


def _digest(result: Tensor) -> int:
    """Returns a number that differs, with near certainty, between tensors whose bits differ."""
    bits = result.detach().contiguous().view(torch.int16 if result.element_size() == 2 else torch.int32).flatten()
    factors = 2 * torch.arange(min(len(bits), DIGEST_PIECE), device=bits.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(DIGEST_PIECE):
        total = 31 * total + (piece.long() * factors[: len(piece)]).sum()  # wraps around 2**64
    return int(total)


def _event() -> torch.cuda.Event:
    """Returns an event that is enqueued now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TorchProblem:
    """Arrays of one shape on the device; references and floors are computed when first needed.

    Args:
        shape: N, D, V.
        dtype: of input and weight.
        targets: the distribution.
        device: of all arrays.
        time_pairs: as in `Bench`; compares the floors with and without padding.

    Raises:
        ValueError: the arrays drawn do not have the loss of their distribution.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        targets: str,
        device: torch.device,
        time_pairs: Callable[[Sequence[Callable[[], Any]], Timing, Sensor], Pairs],
    ) -> None:
        self.shape, self.dtype_name, self.device, self._time_pairs = shape, dtype, device, time_pairs
        self.dtype = getattr(torch, dtype)
        generator = self._generator(0)
        normal = partial(torch.randn, generator=generator, device=device)
        uniform = torch.rand(shape.n, generator=generator, device=device, dtype=torch.float64)
        cdf = torch.from_numpy(data.zipf_cdf(shape.v)).to(device)
        target = (uniform * shape.v).long() if targets == "random" else torch.searchsorted(cdf, uniform)
        only = data.one_class(shape.v, targets)
        self.target = target.clamp_(max=shape.v - 1) if only is None else torch.full_like(target, only)
        self.weight = (normal(shape.v, shape.d) * shape.d**-0.5).to(self.dtype)
        largest = data.lean_max(shape.d, shape.v, targets)
        lean = torch.rand(shape.n, 1, generator=generator, device=device)
        lean = largest * ((1 + lean) / 2 if targets == "sharp" else lean)
        x = data.input_deviation(targets) * normal(shape.n, shape.d) + lean * self.weight[self.target]
        if targets == "sharp":
            more = self._generator(1)
            other = torch.searchsorted(cdf, torch.rand(shape.n, generator=more, device=device, dtype=torch.float64))
            share = torch.rand(shape.n, 1, generator=more, device=device)
            x += share * lean * self.weight[other.clamp_(max=shape.v - 1)]
        self.input = x.to(self.dtype)
        del x
        self.upstream = normal(shape.n)
        self.ignored = torch.rand(shape.n, generator=generator, device=device)
        self._per_token: dict[Objective, tuple[Tensor, ...]] = {}
        self._float32_head: Tensor | None = None
        self._references: dict[Any, Reference] = {}
        self._floors: dict[int, dict[str, Tensor]] = {}
        self._paddings: dict[tuple[bool, bool], int] = {}
        sample = slice(0, 1024)
        logits = self.input[sample].float() @ self.weight.float().T
        loss = torch.nn.functional.cross_entropy(logits, self.target[sample])
        data.check_loss(float(loss), len(logits), shape.d, shape.v, targets)

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def forget(self) -> None:
        """Frees what only checks and floors need."""
        self._references.clear()
        self._floors.clear()

    def head(self, mode: Mode) -> Tensor:
        """Returns the mode's weight (V, D): with float32_head, one that rounds to `weight` and has bits below it."""
        if not mode.float32_head:
            return self.weight
        if self._float32_head is not None:
            return self._float32_head
        low = torch.rand(self.weight.shape, generator=self._generator(2), device=self.device) - 0.5
        self._float32_head = head = self.weight * (1 + data.LOW_BITS * low)
        return head

    def targets(self, mode: Mode) -> Tensor:
        """Returns the targets (N,) int64, the mode's share of them ignored."""
        return torch.where(self.ignored < mode.ignored, -100, self.target) if mode.ignored else self.target

    def per_token(self, objective: Objective) -> tuple[Tensor, ...]:
        """Returns the arrays (N,) float32 that an objective takes besides the logits and the targets."""
        if not objective.per_token:
            return ()
        if objective not in self._per_token:
            log_probs = Mode("log-probs", "none", replace(objective, name="log-probs"), d_input=False, d_weight=False)
            drawn = data.per_token(self.reference(log_probs).losses.cpu().numpy())
            self._per_token[objective] = tuple(torch.from_numpy(array).to(self.device) for array in drawn)
        return self._per_token[objective]

    def reference(self, mode: Mode) -> Reference:
        """Returns losses and gradients computed in float32, a chunk of logits at a time."""
        objective, per_token = mode.objective, self.per_token(mode.objective)
        for backward in (True, mode.backward):
            key = (mode.reduction, mode.ignored, mode.float32_head, objective, backward)
            if key in self._references:
                return self._references[key]
        self._references.clear()  # two float32 d_weight at a time are one too many
        target = self.targets(mode)
        valid = target != -100
        row_weight = self.upstream if mode.reduction == "none" else valid / valid.sum()
        weight = self.head(mode).float()
        d_input = torch.empty(self.input.shape, dtype=torch.float32, device=self.device) if mode.backward else None
        d_weight = torch.zeros_like(weight) if mode.backward else None
        losses = []
        for rows in torch.arange(self.shape.n, device=self.device).split(max(1, REFERENCE_LOGITS // self.shape.v)):
            chunk = slice(int(rows[0]), int(rows[-1]) + 1)
            x, y = self.input[chunk].float(), target[chunk].clamp(min=0)[:, None]
            logits = (x @ weight.T).div_(objective.temperature)
            lse, smoothing = logits.logsumexp(1, keepdim=True), objective.label_smoothing
            value, slope = _of_log_prob((logits.gather(1, y) - lse)[:, 0], objective, *(a[chunk] for a in per_token))
            if smoothing:
                value = (1 - smoothing) * value + smoothing * (lse[:, 0] - logits.mean(1))
            losses.append(torch.where(valid[chunk], value, 0.0))
            if d_input is not None and d_weight is not None:
                # The derivative of minus the (smoothed) log-probability, and then that of the objective.
                d_logits = logits.sub_(lse).exp_().sub_(smoothing / self.shape.v)
                d_logits.scatter_add_(1, y, torch.full_like(lse, smoothing - 1))
                d_logits *= torch.where(valid[chunk], -slope * row_weight[chunk] / objective.temperature, 0.0)[:, None]
                d_input[chunk] = d_logits @ weight
                d_weight.addmm_(d_logits.T, x)
            del logits
        reference = Reference(torch.cat(losses), d_input, d_weight)
        self._references[mode.reduction, mode.ignored, mode.float32_head, objective, mode.backward] = reference
        return reference

    def floor(self, mode: Mode) -> Floor:
        """Returns the bare matmuls of a mode, with or without padding of V, whichever is faster."""
        needed = mode.d_input, mode.d_weight
        if needed not in self._paddings:
            self._paddings[needed] = floor_padding(self.shape.v, partial(self._matmuls, mode), self._time_pairs)
        padding = self._paddings[needed]
        return Floor(self._matmuls(mode, padding), padding)

    def _matmuls(self, mode: Mode, padding: int) -> Callable[[], Any]:
        """Returns the bare matmuls, on the d_logits of the loss (`floor_scale`), `FLOOR_ROWS` rows at a time.

        Later rows overwrite d_weight instead of adding to it: the floor moves no byte that the matmuls do not need.
        """
        if padding not in self._floors:
            rows, v = min(self.shape.n, FLOOR_ROWS), self.shape.v + padding
            d_logits = torch.zeros(rows, v, dtype=self.dtype, device=self.device)
            scale = floor_scale(self.dtype_name, self.shape.n)
            for index in torch.arange(rows, device=self.device).split(max(1, REFERENCE_LOGITS // self.shape.v)):
                p = torch.softmax((self.input[index] @ self.weight.T).float(), 1)
                p.scatter_add_(1, self.target[index][:, None], p.new_full((len(index), 1), -1.0))
                d_logits[index, : self.shape.v] = p.mul_(scale).to(self.dtype)
            weight = torch.nn.functional.pad(self.weight, (0, 0, 0, padding)) if padding else self.weight
            buffers = {
                "weight": weight,
                "d_logits": d_logits,
                "logits": torch.empty_like(d_logits),
                "d_input": torch.empty_like(self.input[:rows]),
                "d_weight": torch.empty_like(weight),
            }
            self._floors = {padding: buffers}  # those of another padding go
        buffers, chunks = self._floors[padding], self.input.split(FLOOR_ROWS)
        weight = buffers["weight"]

        def run() -> None:
            for x in chunks:
                n = len(x)
                torch.mm(x, weight.T, out=buffers["logits"][:n])
                if mode.d_input:
                    torch.mm(buffers["d_logits"][:n], weight, out=buffers["d_input"][:n])
                if mode.d_weight:
                    torch.mm(buffers["d_logits"][:n].T, x, out=buffers["d_weight"])

        return run

    def prepare(self, method: Method, mode: Mode) -> Prepared:
        if method.kind == "floor":
            return Prepared(self.floor(mode).run)
        loss_fn, target, per_token = method.build(mode), self.targets(mode), self.per_token(mode.objective)
        x = self.input.detach().requires_grad_(mode.d_input)
        w = self.head(mode).detach().requires_grad_(mode.d_weight)
        differentiated = [tensor for tensor in (x, w) if tensor.requires_grad]
        upstream = self.upstream if mode.reduction == "none" else None

        def forward() -> Tensor:
            with torch.set_grad_enabled(mode.backward):
                return loss_fn(x, w, target, *per_token)

        def run() -> tuple[Tensor, ...]:
            loss = forward()
            if not differentiated:
                return (loss,)
            d_loss = None if upstream is None else upstream.to(loss.dtype)
            return loss.detach(), *torch.autograd.grad(loss, differentiated, d_loss)

        run()  # compiles, and leaves library workspaces behind, which are no method's own
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        results = run()
        gradients = sum(gradient.nbytes for gradient in results[1:])
        figures: dict[str, Any] = {"peak_bytes": None, "workspace_bytes": None}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            figures = {"peak_bytes": peak, "workspace_bytes": max(peak - gradients, 0)}
        figures["repeats"] = all(torch.equal(a, b) for a, b in zip(results, run(), strict=True))
        figures |= self._errors(results, mode)
        arguments = (self.input, self.head(mode), target, *per_token)
        return Prepared(run, figures, forward if mode.backward else None, loss_fn, arguments)

    def _errors(self, results: tuple[Tensor, ...], mode: Mode) -> dict[str, float | None]:
        reference = self.reference(mode)
        losses = scale = reference.losses
        expected = losses
        if mode.reduction != "none":  # the losses of tokens may have both signs, so their mean is not the scale
            expected, scale = (sums / (self.targets(mode) != -100).sum() for sums in (losses.sum(), losses.abs().sum()))
        errors: dict[str, float | None] = dict.fromkeys((*ERRORS, *ROW_ERRORS))
        errors |= {"mean_loss": float(losses.mean()), "err_loss": _error(results[0], expected, scale)}
        gradients = list(results[1:])
        for name, needed in (("d_input", mode.d_input), ("d_weight", mode.d_weight)):
            if needed:
                gradient, exact = gradients.pop(0), getattr(reference, name)
                errors[f"err_{name}"] = _error(gradient, exact)
                errors |= row_figures(name, _row_errors(gradient, exact))
        return errors


def _of_log_prob(log_prob: Tensor, objective: Objective, *per_token: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the objective (n,) of each token, without smoothing, and its derivative with respect to log_prob."""
    with torch.enable_grad():
        leaf = log_prob.detach().requires_grad_()
        value = torch_methods.grpo(leaf, *per_token) if objective.name == "token-loss" else leaf
        value = -value if objective.name == "cross-entropy" else value
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def _error(result: Tensor, expected: Tensor | None, scale: Tensor | None = None) -> float:
    """Returns the error relative to `scale`, by default to what is expected, in the Frobenius norm."""
    assert expected is not None
    if result.shape != expected.shape:
        raise ValueError(f"result must have shape {tuple(expected.shape)}, got {tuple(result.shape)}")
    error = torch.linalg.vector_norm(result.float() - expected)
    return float(error / torch.linalg.vector_norm(expected if scale is None else scale))


def _row_errors(result: Tensor, expected: Tensor) -> np.ndarray:
    """Returns the relative error of each row whose expected norm is not zero."""
    norms = torch.linalg.vector_norm(expected, dim=1)
    errors = torch.linalg.vector_norm(result.float() - expected, dim=1) / norms
    return errors[norms > 0].cpu().numpy()
