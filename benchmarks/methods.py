"""What the two frameworks' benchmarks have in common: methods, problems, and what is measured of a method."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from benchmarks.data import BETA, EPSILON_HIGH, EPSILON_LOW
from benchmarks.host import Later
from benchmarks.shapes import Mode, Shape
from benchmarks.timing import Energy, Pairs, Sensor, Timing

Kind = Literal["floor", "ours", "own-baseline", "peer"]

# Past these relative errors a method computes something else, and its time means nothing.
LOSS_BOUND = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
GRADIENT_BOUND = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 1e-1}

# The GEMMs of cuBLAS and XLA can be much slower where V is not a multiple of 8, because their fast kernels
# load 16 bytes at a time. A multiple of 128 also fills tiles of 128 classes.
FLOOR_V_MULTIPLE = 128
FLOOR_ROWS = 16384  # of a chunk: the two N x V buffers stay under 10 GB, so that the largest methods fit too
FLOOR_TRIAL = Timing(seconds=0.2, warmup=0.2, energy_seconds=0, min_pairs=5)

# A row's relative errors in the Frobenius norm, and the errors of single tokens and classes (`row_figures`).
ERRORS = ("err_loss", "err_d_input", "err_d_weight")
ROWS = {"d_input": "err_d_input_row", "d_weight": "err_d_weight_class"}
ROW_ERRORS = tuple(f"{key}_{figure}" for key in ROWS.values() for figure in ("median", "p95"))


class UnavailableError(Exception):
    """A method cannot run here, and why: not installed, not written yet, an option that it does not have."""


@dataclass(frozen=True)
class Method:
    """One way to compute the loss.

    Args:
        name: as in the results.
        kind: whose it is.
        build: from a mode to a function (input, linear_weight, target, *per_token) -> loss, where per_token are the
            arrays of the mode's objective; raises `UnavailableError`.
        package: the distribution whose version goes into the row.
        takes_budget: it has a memory_budget, and head_precision.
        vocab_axis: 1 where it wants linear_weight as (D, V).
        host: measured in the modes of host time and of CUDA graphs even if it is not named.
        grid: measured in the grid even if it is not named.
        only_named: measured only if it is named.
        ahead: `--compile-jobs` compiles its programs. They hold no matmul of XLA, whose algorithm XLA would choose on a
            GPU that is busy.
        rows: of a chunk, where a sweep makes its plans prefer so many.
        objectives: names of the objectives that it computes; in the modes of others it is left out.
    """

    name: str
    kind: Kind
    build: Callable[[Mode], Callable[..., Any]]
    package: str | None = None
    takes_budget: bool = False
    vocab_axis: int = 0
    host: bool = False
    grid: bool = False
    only_named: bool = False
    ahead: bool = False
    rows: int | None = None
    objectives: tuple[str, ...] = ("cross-entropy",)

    def applies(self, mode: Mode, *, named: bool = True) -> bool:
        """Returns whether the method is measured in a mode.

        Args:
            mode: the mode.
            named: the method was selected by name.
        """
        if mode.objective.name not in self.objectives or (mode.measures.startswith("host") and self.kind == "floor"):
            return False
        if mode.float32_head and not self.takes_budget:  # other libraries round the weight, or the matmuls are float32
            return False
        if mode.measures in ("host-chunks", "host-compile"):
            return self.takes_budget and (named or self.host)
        if mode.measures != "pairs" and not (named or self.host):
            return False
        return self.takes_budget or mode.memory_budget is None

    @property
    def in_package(self) -> bool:
        """Whether core_triton or jax_pallas computes the method: only their functions have a memory_budget."""
        return self.takes_budget and self.kind != "floor"

    def version(self) -> str | None:
        try:
            return None if self.package is None else version(self.package)
        except PackageNotFoundError:
            return None


@dataclass
class Prepared:
    """A method on a problem, ready to be timed.

    Args:
        run: enqueues one call.
        figures: keys of its row: errors, bytes.
        forward: enqueues only the forward pass of a call that needs gradients; None if it cannot be timed.
        program: PyTorch: the function that `Method.build` returned. JAX: the jitted call. None for the floor.
        arguments: of `program`.
    """

    run: Callable[[], Any]
    figures: dict[str, Any] = field(default_factory=dict)
    forward: Callable[[], Any] | None = None
    program: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()


class Floor(NamedTuple):
    """The bare matmuls of a mode.

    Args:
        run: enqueues them.
        padding: rows that were added to the weight, because the matmuls are faster with them.
    """

    run: Callable[[], Any]
    padding: int


class Problem(Protocol):
    """The arrays of one shape, and the float32 results that methods are compared with."""

    def floor(self, mode: Mode) -> Floor:
        """Returns the bare matmuls of a mode, with or without padding of V, whichever is faster."""
        ...

    def prepare(self, method: Method, mode: Mode) -> Prepared:
        """Compiles a method, runs it, and measures its errors and bytes, not its time."""
        ...

    def forget(self) -> None:
        """Frees what only checks and floors need."""
        ...


class Program(NamedTuple):
    """What a compiled program depends on. `method` is a name, `rows` those of the method."""

    shape: Shape
    dtype: str
    method: str
    mode: Mode
    rows: int | None = None


class Bench(Protocol):
    """A framework."""

    framework: str
    device: str

    @property
    def methods(self) -> Mapping[str, Method]: ...

    def versions(self) -> dict[str, str]: ...

    def problem(self, shape: Shape, dtype: str, targets: str) -> Problem: ...

    def compile_ahead(self, programs: Sequence[Program], jobs: int, *, beside: bool = False) -> None:
        """Compiles programs of methods that are `ahead`, in `jobs` processes. Problems then load them.

        With `beside` it returns at once, and a problem waits for a program that it needs.
        """
        ...

    def stop_compiling(self) -> None:
        """Ends what `compile_ahead` began, and its processes. Programs that are not compiled yet stay so."""
        ...

    def time_pairs(self, calls: Sequence[Callable[[], Any]], timing: Timing, sensor: Sensor) -> Pairs:
        """Times floor, method and, if there is a third call, the forward pass, in that order of `calls`."""
        ...

    def time_block(self, run: Callable[[], Any], calls: int) -> float:
        """Returns the ms of one of `calls` calls back to back, after one that is not counted."""
        ...

    def energy(self, run: Callable[[], Any], seconds: float, sensor: Sensor) -> Energy: ...

    def digest(self, results: Any) -> str:
        """Returns a text that two sequences of arrays share only if their bits are equal, with near certainty."""
        ...

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that replays one call from a CUDA graph; raises `UnavailableError` where none is made."""
        ...

    def kernels(self, prepared: Prepared) -> list[dict[str, Any]]:
        """Returns what one call launches: `trace.by_kernel`."""
        ...

    def host_figures(
        self, prepared: Prepared, method: Method, mode: Mode, timing: Timing, *, trace: bool
    ) -> tuple[dict[str, Any], Later | None]:
        """Returns what a call costs the host, and what gives the figures of a trace when all times are measured."""
        ...

    def release(self) -> None:
        """Gives memory back between methods; raises if the device no longer answers."""
        ...


def floor_padding(
    v: int,
    matmuls: Callable[[int], Callable[[], Any]],
    time_pairs: Callable[[Sequence[Callable[[], Any]], Timing, Sensor], Pairs],
) -> int:
    """Returns the rows of padding with which the bare matmuls are faster: none, or those to the next multiple.

    Args:
        v: rows of the weight.
        matmuls: from rows of padding to what enqueues the matmuls.
        time_pairs: as in `Bench`.
    """
    padding = -v % FLOOR_V_MULTIPLE
    if not padding:
        return 0
    pairs = time_pairs([matmuls(0), matmuls(padding)], FLOOR_TRIAL, Sensor(gpu=False))
    return padding if pairs.figures()["ratio"] < 1 else 0


def floor_scale(dtype: str, tokens: int) -> float:
    """Returns what multiplies p - onehot in d_logits of the floor: 1 / tokens, as in the mean loss, or 1 in float16.

    In float16, 96 to 99.9% of the d_logits of the mean loss are 0. The GPU draws less power for zeros, so its clock is
    higher, and the matmuls take 5 to 7% less time than with numbers that do not underflow.
    """
    return 1.0 if dtype == "float16" else 1 / tokens


def by_name(methods: Sequence[Method]) -> dict[str, Method]:
    return {method.name: method for method in methods}


def load(module: str) -> ModuleType:
    """Imports what a method needs; raises `UnavailableError` with the reason."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(f"cannot import {module}: {error}") from error


def our_loss(package: str, implementation: str, mode: Mode) -> Callable[..., Any]:
    """Returns a mode's function (input, linear_weight, target, *per_token) -> loss of core_triton or jax_pallas."""
    # Not by `load`: if our package cannot be imported, the method has failed.
    ours, objective = importlib.import_module(f"{package}.linear_ce"), mode.objective
    if implementation not in importlib.import_module(f"{package}.arguments").IMPLEMENTATIONS:
        raise UnavailableError(f"{package} has no implementation {implementation!r} yet")
    token_loss = importlib.import_module(f"{package}.token_losses").grpo(EPSILON_LOW, EPSILON_HIGH, BETA, kl="k3")
    options: dict[str, Any] = {
        "logit_scale": objective.logit_scale,
        "head_precision": "float32" if mode.float32_head else None,
        "memory_budget": mode.memory_budget,
        "implementation": implementation,
    }

    def loss(x: Any, w: Any, y: Any, *per_token: Any) -> Any:
        if objective.name == "token-loss":
            return ours.linear_token_loss(x, w, y, token_loss, *per_token, **options)
        if objective.name == "log-probs":
            return ours.linear_log_probs(x, w, y, saved_budget=mode.saved_budget, **options).log_prob
        smoothing = objective.label_smoothing
        return ours.linear_cross_entropy(x, w, y, reduction=mode.reduction, label_smoothing=smoothing, **options)

    return loss


def row_figures(gradient: str, errors: np.ndarray) -> dict[str, float]:
    """Returns the median and the 95th percentile of the errors of a gradient's rows, as keys of a row of results.

    `parity.tolerances.row_errors` has the definition. Here the float32 reference takes the place of the float64 one.

    Args:
        gradient: d_input, whose rows are tokens, or d_weight, whose rows are classes.
        errors: (rows,) relative errors of the rows whose reference is not zero.
    """
    key = ROWS[gradient]
    if not len(errors):
        return {f"{key}_median": 0.0, f"{key}_p95": 0.0}
    return {f"{key}_median": float(np.median(errors)), f"{key}_p95": float(np.percentile(errors, 95))}


def check_errors(errors: Mapping[str, float | None], dtype: str) -> str | None:
    """Returns what is wrong with a method's errors, or None.

    Args:
        errors: err_loss, err_d_input and err_d_weight; None where the mode asks for no such gradient.
        dtype: of the input.
    """
    for name, error in errors.items():
        bound = (LOSS_BOUND if name == "err_loss" else GRADIENT_BOUND)[dtype]
        if error is not None and not (math.isfinite(error) and error <= bound):
            return f"not timed: {name} is {error:.2g}, above the sanity bound {bound:g}"
    return None


def installed(*names: str) -> dict[str, str]:
    """Returns the versions of distributions, "none" for one that is not there."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def describe(error: BaseException) -> str:
    """Returns an error's type and the first line of its message."""
    words = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {words[0]}"[:200]


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error, or one that it came from, says that memory ran out."""
    found: BaseException | None = error
    while found is not None:
        text = str(found).lower()
        if isinstance(found, MemoryError) or "resource_exhausted" in text or "out of memory" in text:
            return True
        found = found.__cause__ or found.__context__
    return False
