"""JAX's side of the benchmark: arrays, the float32 reference, the floor, compiled programs and their memory."""

import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks import data, jax_methods
from benchmarks.host import Later
from benchmarks.jax_host import host_figures, trace_without_graphs
from benchmarks.jax_programs import Compiled, compile_call, compile_in_processes, load, matmul_precision, title
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
    describe,
    floor_padding,
    floor_scale,
    row_figures,
)
from benchmarks.shapes import Mode, Objective, Shape
from benchmarks.timing import Energy, Pairs, Sensor, Timing, host_pairs, measure_energy, same
from benchmarks.trace import CALLS, by_kernel, trace_jax

REFERENCE_ROWS = 2048
BLOCK_SECONDS = 0.04  # what the host adds to a block, some 0.1 ms, is below half a percent of it
BALLAST_SLACK = 64 * 2**20
BALLAST_PART = 2**30


class Programs:
    """The compiled programs of a benchmark. All kinds of targets share them."""

    def __init__(self) -> None:
        self._compiled: dict[Program, Compiled] = {}
        self._ahead: dict[Program, Future[bytes | None]] = {}
        self._thread = ThreadPoolExecutor(1)  # compiles one batch after the other
        self._stopped = False

    def compile_ahead(self, programs: Sequence[Program], jobs: int, platform: str, *, beside: bool = False) -> None:
        """Compiles those programs that are not compiled yet in `jobs` processes, and prints a line about each.

        Args:
            programs: of a batch.
            jobs: processes.
            platform: of JAX: cuda or cpu.
            beside: return at once. `of` waits for its program.
        """
        once = list(dict.fromkeys(programs))
        once = [program for program in once if program not in self._compiled and program not in self._ahead]
        if not once:
            return
        batch = {program: Future[bytes | None]() for program in once}
        self._ahead |= batch
        done = self._thread.submit(self._compile, batch, jobs, platform)
        if beside:
            return
        try:
            done.result()
        except BaseException:  # also an interrupt: Python waits for the thread before it exits
            self.stop()
            raise

    def _compile(self, batch: Mapping[Program, Future[bytes | None]], jobs: int, platform: str) -> None:
        start = time.monotonic()
        try:
            if not self._stopped:
                print(f"compiling {len(batch)} programs in {jobs} processes", flush=True)
                for future, ahead in zip(batch.values(), compile_in_processes([*batch], jobs, platform), strict=True):
                    print(f"    {ahead.line}", flush=True)
                    future.set_result(ahead.data)
                    if self._stopped:
                        return
                print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
        except Exception as error:
            if self._stopped:  # which breaks the pool
                return
            print(f"not compiled, so each is compiled when its row comes: {describe(error)}", flush=True)
            raise
        finally:  # `of` must not wait for a program that does not come
            for future in batch.values():
                if not future.done():
                    future.set_result(None)

    def stop(self) -> None:
        """Ends the compilation, and the processes that compile.

        These are all child processes of multiprocessing: a benchmark of JAX starts no others.
        """
        self._stopped = True
        for process in multiprocessing.active_children():
            process.terminate()

    def of(self, program: Program, method: Method, arguments: tuple[Any, ...]) -> Compiled:
        """Returns the compiled program of a method: the one of an earlier row, one that was compiled ahead, or a new
        one for these arguments. A program that was compiled ahead and cannot be loaded is compiled again here."""
        if program in self._compiled:
            figures = {"lower_s": None, "compile_s": None, "compile_note": "compiled before"}
            return self._compiled[program]._replace(figures=figures)
        ahead, compiled = self._ahead.pop(program, None), None
        data = None if ahead is None else ahead.result()
        if data is not None:
            try:
                compiled = load(data, method, program.mode)
            except Exception as error:
                print(f"{title(program)}: not loaded, so it is compiled again: {describe(error)}", flush=True)
        if compiled is None:
            compiled = compile_call(method, program.mode, arguments)
        self._compiled[program] = compiled
        return compiled


class JaxBench:
    """JAX on its first device of a platform."""

    framework = "jax"

    def __init__(self, device: str) -> None:
        jax.config.update("jax_platforms", device)
        self.gpu = device == "cuda"
        try:
            found = jax.devices()[0].device_kind
        except (AssertionError, RuntimeError) as error:  # which of the two depends on whether the plugin is installed
            raise RuntimeError(f"JAX finds no such device: {error}") from error
        self.device = found if self.gpu else "CPU (times are no results)"
        self._programs = Programs()

    @property
    def methods(self) -> dict[str, Method]:
        return jax_methods.METHODS

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("jax", "jaxlib", "numpy")}

    def problem(self, shape: Shape, dtype: str, targets: str) -> Problem:
        return JaxProblem(shape, dtype, targets, self._programs, self.time_pairs)

    def compile_ahead(self, programs: Sequence[Program], jobs: int, *, beside: bool = False) -> None:
        self._programs.compile_ahead(programs, jobs, "cuda" if self.gpu else "cpu", beside=beside)

    def stop_compiling(self) -> None:
        self._programs.stop()

    def time_pairs(self, calls: Sequence[Callable[[], Any]], timing: Timing, sensor: Sensor) -> Pairs:
        return host_pairs(calls, jax.block_until_ready, timing, sensor, BLOCK_SECONDS if self.gpu else 0.0)

    def time_block(self, run: Callable[[], Any], calls: int) -> float:
        lead = run()
        if self.gpu:
            last, rest = run(), calls - 1  # the device works on this one while the host enqueues the others
        else:
            last, rest = lead, calls  # on a CPU it might be done before the clock starts
        jax.block_until_ready(lead)
        start = time.perf_counter()
        for _ in range(rest):
            last = run()
        jax.block_until_ready(last)
        return 1000 * (time.perf_counter() - start) / calls

    def energy(self, run: Callable[[], Any], seconds: float, sensor: Sensor) -> Energy:
        return measure_energy(run, seconds, same, jax.block_until_ready, sensor)

    def digest(self, results: Sequence[Array]) -> str:
        return " ".join(f"{int(_digest(result)):08x}" for result in results)

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        raise UnavailableError("XLA builds the CUDA graphs of a program")

    def kernels(self, prepared: Prepared) -> list[dict[str, Any]]:
        if prepared.program is None:
            return by_kernel(trace_jax(prepared.run), CALLS)
        return by_kernel(trace_without_graphs(prepared.program, prepared.arguments), CALLS)

    def host_figures(
        self, prepared: Prepared, method: Method, mode: Mode, timing: Timing, *, trace: bool
    ) -> tuple[dict[str, Any], Later | None]:
        return host_figures(prepared, mode, timing, gpu=self.gpu, trace=trace)

    def release(self) -> None:
        if self.gpu:  # as in PyTorch
            gc.collect()
        jax.block_until_ready(jnp.zeros(()) + 1)


@partial(jax.jit, static_argnames=("shape", "dtype", "targets"))
def _draw(key: Array, cdf: Array, *, shape: Shape, dtype: str, targets: str) -> dict[str, Array]:
    keys = jax.random.split(key, 6)
    n, d, v = shape.n, shape.d, shape.v
    uniform = jax.random.uniform(keys[0], (n,))
    target = (uniform * v).astype(jnp.int32) if targets == "random" else jnp.searchsorted(cdf, uniform)
    only = data.one_class(v, targets)
    target = jnp.minimum(target, v - 1).astype(jnp.int32) if only is None else jnp.full(n, only, jnp.int32)
    weight = (jax.random.normal(keys[1], (v, d)) * d**-0.5).astype(dtype)
    lean = jax.random.uniform(keys[2], (n, 1))
    lean = data.lean_max(d, v, targets) * ((1 + lean) / 2 if targets == "sharp" else lean)
    x = data.input_deviation(targets) * jax.random.normal(keys[3], (n, d)) + lean * weight[target]
    if targets == "sharp":
        more = jax.random.split(jax.random.key(1))
        other = jnp.minimum(jnp.searchsorted(cdf, jax.random.uniform(more[0], (n,))), v - 1)
        x += jax.random.uniform(more[1], (n, 1)) * lean * weight[other]
    return {
        "input": x.astype(dtype),
        "weight": weight,
        "target": target,
        "upstream": jax.random.normal(keys[4], (n,)),
        "ignored": jax.random.uniform(keys[5], (n,)),
    }


@jax.jit
def _with_low_bits(weight: Array) -> Array:
    low = jax.random.uniform(jax.random.key(2), weight.shape) - 0.5
    return weight.astype(jnp.float32) * (1 + data.LOW_BITS * low)


# XLA times the algorithms of a matmul, which takes seconds. That does not pay for programs that run only a few times.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@partial(jax.jit, static_argnames=("objective", "backward"), compiler_options=UNTUNED)
def _reference(
    x: Array, w: Array, y: Array, row_weight: Array, *per_token: Array, objective: Objective, backward: bool
) -> tuple[Array, ...]:
    """Losses (N,), and d_input and d_weight in float32, from float32 matmuls, a chunk of rows at a time."""
    dot = partial(jnp.dot, precision=lax.Precision.HIGHEST)
    rows, smoothing = math.gcd(len(x), REFERENCE_ROWS), objective.label_smoothing
    w = w.astype(jnp.float32)

    def chunk(d_weight: Array | None, part: tuple[Array, ...]) -> tuple[Array | None, tuple[Array, ...]]:
        x, y, row_weight, *per_token = part
        x = x.astype(jnp.float32)
        logits = dot(x, w.T)
        losses = jax_methods.values(logits, y, objective, *per_token)
        if d_weight is None:
            return None, (losses,)
        p = jax.nn.softmax(jax_methods.scaled(logits, objective), axis=1) - smoothing / len(w)
        d_logits = p.at[jnp.arange(rows), jnp.maximum(y, 0)].add(smoothing - 1)
        d_logits *= jax_methods.row_factors(logits, y, row_weight, objective, *per_token)[:, None]
        return d_weight + dot(d_logits.T, x), (losses, dot(d_logits, w))

    parts = jax.tree.map(lambda array: array.reshape(-1, rows, *array.shape[1:]), (x, y, row_weight, *per_token))
    d_weight, results = lax.scan(chunk, jnp.zeros_like(w) if backward else None, parts)
    losses, *d_input = (result.reshape(len(x), *result.shape[2:]) for result in results)
    return (losses, *d_input) if d_weight is None else (losses, *d_input, d_weight)


@partial(jax.jit, compiler_options=UNTUNED)
def _d_logits(x: Array, w: Array, y: Array, scale: float) -> Array:
    """(p - onehot) * scale in the input's dtype, for the floor."""
    rows = math.gcd(len(x), REFERENCE_ROWS)

    def chunk(part: tuple[Array, Array]) -> Array:
        x, y = part
        p = jax.nn.softmax(jnp.dot(x, w.T, preferred_element_type=jnp.float32), axis=1)
        return (p.at[jnp.arange(rows), y].add(-1.0) * scale).astype(w.dtype)

    parts = jax.tree.map(lambda array: array.reshape(-1, rows, *array.shape[1:]), (x, y))
    return lax.map(chunk, parts).reshape(len(x), -1)


@partial(jax.jit, static_argnames=("d_input", "d_weight"))
def _matmuls(x: Array, w: Array, d_logits: Array, *, d_input: bool, d_weight: bool) -> list[Array]:
    with matmul_precision(x.dtype):
        matmuls = [jnp.dot(x, w.T)]
        if d_input:
            matmuls.append(jnp.dot(d_logits, w))
        if d_weight:
            matmuls.append(jnp.dot(d_logits.T, x))
    return matmuls


@jax.jit
def _digest(result: Array) -> Array:
    """A number that differs, with near certainty, between arrays whose bits differ."""
    bits = lax.bitcast_convert_type(result, jnp.uint16 if result.dtype.itemsize == 2 else jnp.uint32).ravel()
    at = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    mixed = (bits.astype(jnp.uint32) ^ at) * jnp.uint32(0x85EBCA6B)  # each bit must reach the others before the sum
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


@jax.jit
def _error(result: Array, expected: Array, scale: Array) -> Array:
    """The error relative to `scale` in the Frobenius norm."""
    return jnp.linalg.norm((result.astype(jnp.float32) - expected).ravel()) / jnp.linalg.norm(scale.ravel())


@jax.jit
def _row_errors(result: Array, expected: Array) -> tuple[Array, Array]:
    """The relative error of each row, and the norm that it is relative to."""
    norms = jnp.linalg.norm(expected, axis=1)
    return jnp.linalg.norm(result.astype(jnp.float32) - expected, axis=1) / norms, norms


class JaxProblem:
    """Arrays of one shape on the device; references and floors are computed when first needed.

    Args:
        shape: N, D, V.
        dtype: of input and weight.
        targets: the distribution.
        programs: the compiled calls.
        time_pairs: as in `Bench`; compares the floors with and without padding.

    Raises:
        ValueError: the arrays drawn do not have the loss of their distribution.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        targets: str,
        programs: Programs,
        time_pairs: Callable[[Sequence[Callable[[], Any]], Timing, Sensor], Pairs],
    ) -> None:
        self.shape, self._dtype, self._programs, self._time_pairs = shape, dtype, programs, time_pairs
        cdf = jnp.asarray(data.zipf_cdf(shape.v), jnp.float32)
        arrays = _draw(jax.random.key(0), cdf, shape=shape, dtype=dtype, targets=targets)
        self.input, self.weight, self.target = arrays["input"], arrays["weight"], arrays["target"]
        self.upstream, self.ignored = arrays["upstream"], arrays["ignored"]
        self._weight_t: Array | None = None
        self._per_token: dict[Objective, tuple[Array, ...]] = {}
        self._float32_head: Array | None = None
        self._references: dict[Any, tuple[Array, ...]] = {}
        self._floor_arrays: dict[int, tuple[Array, ...]] = {}
        self._floors: dict[tuple[bool, bool, int], Any] = {}
        self._paddings: dict[tuple[bool, bool], int] = {}
        sample = min(shape.n, 1024)
        few = self.input[:sample], self.weight, self.target[:sample], jnp.ones(sample)
        losses, *_ = _reference(*few, objective=Objective(), backward=False)
        data.check_loss(float(losses.mean()), sample, shape.d, shape.v, targets)

    def forget(self) -> None:
        """Frees what only checks and floors need."""
        self._references.clear()
        self._floors.clear()
        self._floor_arrays.clear()

    def head(self, mode: Mode) -> Array:
        """Returns the mode's weight (V, D): with float32_head, one that rounds to `weight` and has bits below it."""
        if not mode.float32_head:
            return self.weight
        if self._float32_head is not None:
            return self._float32_head
        self._float32_head = head = _with_low_bits(self.weight)
        return head

    def targets(self, mode: Mode) -> Array:
        """Returns the targets (N,) int32, the mode's share of them ignored."""
        return jnp.where(self.ignored < mode.ignored, -100, self.target)

    def per_token(self, objective: Objective) -> tuple[Array, ...]:
        """Returns the arrays (N,) float32 that an objective takes besides the logits and the targets."""
        if not objective.per_token:
            return ()
        if objective not in self._per_token:
            log_probs = Mode("log-probs", "none", replace(objective, name="log-probs"), d_input=False, d_weight=False)
            drawn = data.per_token(np.asarray(self.reference(log_probs)[0]))
            self._per_token[objective] = tuple(jnp.asarray(array) for array in drawn)
        return self._per_token[objective]

    def reference(self, mode: Mode) -> tuple[Array, ...]:
        """Returns losses, and d_input and d_weight where the mode has a backward pass, in float32."""
        per_token = self.per_token(mode.objective)
        for backward in (True, mode.backward):
            key = (mode.reduction, mode.ignored, mode.float32_head, mode.objective, backward)
            if key in self._references:
                return self._references[key]
        self._references.clear()
        target = self.targets(mode)
        valid = target != -100
        row_weight = jnp.where(valid, self.upstream if mode.reduction == "none" else 1 / valid.sum(), 0.0)
        arrays = self.input, self.head(mode), target, row_weight, *per_token
        reference = _reference(*arrays, objective=mode.objective, backward=mode.backward)
        self._references[mode.reduction, mode.ignored, mode.float32_head, mode.objective, mode.backward] = reference
        return reference

    def floor(self, mode: Mode) -> Floor:
        """Returns the bare matmuls of a mode, with or without padding of V, whichever is faster."""
        needed = mode.d_input, mode.d_weight
        if needed not in self._paddings:
            self._paddings[needed] = floor_padding(self.shape.v, partial(self._matmuls, mode), self._time_pairs)
        padding = self._paddings[needed]
        return Floor(self._matmuls(mode, padding), padding)

    def _matmuls(self, mode: Mode, padding: int) -> Callable[[], Any]:
        """Returns the bare matmuls, on the d_logits of the loss (`floor_scale`), `FLOOR_ROWS` rows at a time."""
        rows = math.gcd(self.shape.n, FLOOR_ROWS)
        if padding not in self._floor_arrays:
            x, weight = self.input[:rows], self.weight
            scale = floor_scale(self.input.dtype.name, self.shape.n)
            d_logits = _d_logits(x, weight, self.target[:rows], scale)
            if padding:
                weight, d_logits = jnp.pad(weight, ((0, padding), (0, 0))), jnp.pad(d_logits, ((0, 0), (0, padding)))
            self._floor_arrays = {padding: (x, weight, d_logits)}  # those of another padding go
        arguments = self._floor_arrays[padding]
        key = (mode.d_input, mode.d_weight, padding)
        if key not in self._floors:  # the same for every method: XLA autotunes its matmuls
            lowered = _matmuls.lower(*arguments, d_input=mode.d_input, d_weight=mode.d_weight)
            self._floors[key] = lowered.compile()
        compiled = self._floors[key]

        def run() -> Any:
            result = None
            for _ in range(self.shape.n // rows):
                result = compiled(*arguments)
            return result

        return run

    def prepare(self, method: Method, mode: Mode) -> Prepared:
        if method.kind == "floor":
            return Prepared(self.floor(mode).run)
        program = Program(self.shape, self._dtype, method.name, mode, method.rows)
        if method.vocab_axis == 1 and self._weight_t is None:
            self._weight_t = jnp.array(self.weight.T)
        weight = self._weight_t if method.vocab_axis == 1 else self.head(mode)
        upstream = self.upstream if mode.reduction == "none" else None
        arguments = (self.input, weight, self.targets(mode), upstream, *self.per_token(mode.objective))
        call, compiled, figures = self._programs.of(program, method, arguments)
        analysis = compiled.memory_analysis()
        assert analysis is not None
        outputs, temporaries = analysis.output_size_in_bytes, analysis.temp_size_in_bytes

        def run() -> tuple[Array, ...]:
            return compiled(*arguments)

        results, measured = _measured_peak(run, outputs + temporaries)
        figures |= {
            "peak_bytes": outputs + temporaries if measured is None else measured,
            "peak_source": "memory_analysis" if measured is None else "measured",
            "workspace_bytes": temporaries,
            "repeats": all(bool(jnp.array_equal(a, b)) for a, b in zip(results, run(), strict=True)),
        }
        return Prepared(run, figures | self._errors(results, method, mode), program=call, arguments=arguments)

    def _errors(self, results: tuple[Array, ...], method: Method, mode: Mode) -> dict[str, float | None]:
        losses, *expected = self.reference(mode)
        loss = scale = losses
        if mode.reduction != "none":  # as in PyTorch
            loss, scale = (sums / (self.targets(mode) != -100).sum() for sums in (losses.sum(), jnp.abs(losses).sum()))
        gradients = list(results[1:])
        errors: dict[str, float | None] = dict.fromkeys((*ERRORS, *ROW_ERRORS))
        errors |= {"mean_loss": float(losses.mean()), "err_loss": float(_error(results[0], loss, scale))}
        for name, needed, exact in zip(("d_input", "d_weight"), (mode.d_input, mode.d_weight), expected, strict=False):
            if needed:
                gradient = gradients.pop(0)
                gradient = gradient.T if name == "d_weight" and method.vocab_axis == 1 else gradient
                errors[f"err_{name}"] = float(_error(gradient, exact, exact))
                of_rows, norms = map(np.asarray, _row_errors(gradient, exact))
                errors |= row_figures(name, of_rows[norms > 0])
        return errors


def _measured_peak(run: Callable[[], tuple[Array, ...]], predicted: int) -> tuple[tuple[Array, ...], int | None]:
    """Runs once and returns the result with the bytes by which the device's memory peaked above what was in use.

    The device reports the highest peak since the process began, so a small program under a large one's peak would not
    show. Unused arrays first fill the memory to where `predicted` bytes reach above that peak. Each has at most
    `BALLAST_PART` bytes, which gaps between the arrays in use still have room for.

    Returns:
        The result, and the bytes; None where the device counts none, or where the peak did not move.
    """
    device = jax.devices()[0]
    stats = device.memory_stats()
    if not stats:
        return jax.block_until_ready(run()), None
    missing = stats["peak_bytes_in_use"] - stats["bytes_in_use"] - predicted + BALLAST_SLACK
    parts = [min(BALLAST_PART, missing - start) for start in range(0, missing, BALLAST_PART)]
    ballast = jax.block_until_ready([jnp.zeros(part, jnp.uint8) for part in parts])
    before = device.memory_stats()
    results = jax.block_until_ready(run())
    after = device.memory_stats()
    for array in ballast:
        array.delete()
    moved = after["peak_bytes_in_use"] > before["peak_bytes_in_use"]
    return results, after["peak_bytes_in_use"] - before["bytes_in_use"] if moved else None
