"""The compiled programs of JAX's methods: one at a time, or many in several processes before they are needed.

XLA compiles a call in 5 to 15 seconds, most of it on one core. `compile_in_processes` compiles as many as there are
processes, and `load` takes what they send (`jax.experimental.serialize_executable`).
"""

import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import serialize_executable

from benchmarks import jax_methods
from benchmarks.chunk_rows import preferring
from benchmarks.methods import Method, Program, describe
from benchmarks.shapes import Mode

# XLA chooses the algorithms of its matmuls by timing them, which fails where processes share the GPU. A program with
# such a matmul is not kept.
WORKER_FLAGS = "--xla_gpu_autotune_level=0"
XLA_MATMULS = "__cublas", "gemm_fusion"  # in the text of a program: of a library, and of XLA's own compiler


class Compiled(NamedTuple):
    """A program, and how long it took to make it.

    Args:
        call: the jitted call.
        program: the compiled call.
        figures: "lower_s", "compile_s" and "compile_note" of a row.
    """

    call: Any
    program: Any
    figures: dict[str, Any]


def matmul_precision(dtype: Any) -> AbstractContextManager[Any]:
    """Returns a context in which matmuls of float32 arrays are in float32: by default they are in TF32 on a GPU."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()


def jitted_call(method: Method, mode: Mode) -> Any:
    """Returns a jitted function (input, weight, target, upstream, *per_token) -> loss and the gradients of a mode.

    `upstream` is the upstream gradient (N,) of `reduction="none"`, or None. `per_token` are the arrays of the mode's
    objective. Matmuls of float32 arrays are in float32, not in TF32, in every method.

    Raises:
        UnavailableError: the method has no such mode.
    """
    loss_fn = method.build(mode)
    argnums = tuple(index for index, needed in enumerate((mode.d_input, mode.d_weight)) if needed)

    def call(x: Array, w: Array, y: Array, upstream: Array | None, *per_token: Array) -> tuple[Array, ...]:
        with matmul_precision(x.dtype):
            return loss_and_gradients(x, w, y, upstream, *per_token)

    def loss_and_gradients(
        x: Array, w: Array, y: Array, upstream: Array | None, *per_token: Array
    ) -> tuple[Array, ...]:
        if not argnums:
            return (loss_fn(x, w, y, *per_token),)
        arguments = [x, w]

        def loss_of(*differentiated: Array) -> Array:
            for index, array in zip(argnums, differentiated, strict=True):
                arguments[index] = array
            return loss_fn(*arguments, y, *per_token)

        loss, vjp = jax.vjp(loss_of, *(arguments[index] for index in argnums))
        d_loss = jnp.ones((), loss.dtype) if upstream is None else upstream.astype(loss.dtype)
        return loss, *vjp(d_loss)

    return jax.jit(call)


def compile_call(method: Method, mode: Mode, arguments: tuple[Any, ...]) -> Compiled:
    """Compiles a method, with its `rows` if it has some, for arguments: arrays, or `jax.ShapeDtypeStruct`."""
    with nullcontext() if method.rows is None else preferring(method.rows):
        call, start = jitted_call(method, mode), time.perf_counter()
        lowered, lowered_at = call.lower(*arguments), time.perf_counter()
    program = lowered.compile()
    figures = {
        "lower_s": lowered_at - start,
        "compile_s": time.perf_counter() - lowered_at,
        "compile_note": None if jax.config.jax_compilation_cache_dir is None else "with a cache on disk",
    }
    return Compiled(call, program, figures)


class Ahead(NamedTuple):
    """What a process says about one program.

    Args:
        line: for the reader.
        data: the compiled program, for `load`; None if it was not compiled or must not be used.
    """

    line: str
    data: bytes | None


def load(data: bytes, method: Method, mode: Mode) -> Compiled:
    """Returns a program that `compile_in_processes` compiled."""
    # Sets MOSAIC_GPU_RUNTIME_LIB_PATH, without which a program with kernels of Mosaic GPU cannot be loaded.
    from jax.experimental.mosaic import gpu  # noqa: F401

    serialized, figures = pickle.loads(data)
    return Compiled(jitted_call(method, mode), serialize_executable.deserialize_and_load(*serialized), figures)


def compile_in_processes(programs: Sequence[Program], jobs: int, platform: str) -> Iterator[Ahead]:
    """Compiles programs in `jobs` processes. Yields one after the other, in order.

    Args:
        programs: each once.
        jobs: processes.
        platform: of JAX: cuda or cpu.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {WORKER_FLAGS}"
    context = multiprocessing.get_context("spawn")
    with (
        _environment(XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false"),
        ProcessPoolExecutor(jobs, context, initializer=use_platform, initargs=(platform,)) as pool,
    ):
        yield from pool.map(compile_ahead, programs)


def use_platform(platform: str) -> None:
    """Makes JAX use a platform, before it opens a device."""
    jax.config.update("jax_platforms", platform)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets variables for processes that start inside the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def title(program: Program) -> str:
    """Returns how a printed line names a program."""
    rows = "" if program.rows is None else f", {program.rows} rows"
    return f"{program.shape.name}, {program.mode.name}, {program.method}{rows}"


def compile_ahead(program: Program) -> Ahead:
    """Compiles one program, without arrays."""
    shape, mode = program.shape, program.mode
    method = replace(jax_methods.METHODS[program.method], rows=program.rows)
    weight = (shape.d, shape.v) if method.vocab_axis == 1 else (shape.v, shape.d)
    arguments = (
        jax.ShapeDtypeStruct((shape.n, shape.d), program.dtype),
        jax.ShapeDtypeStruct(weight, jnp.float32 if mode.float32_head else program.dtype),
        jax.ShapeDtypeStruct((shape.n,), jnp.int32),
        jax.ShapeDtypeStruct((shape.n,), jnp.float32) if mode.reduction == "none" else None,
        *(jax.ShapeDtypeStruct((shape.n,), jnp.float32) for _ in mode.objective.per_token),
    )
    try:
        compiled = compile_call(method, mode, arguments)
    except Exception as error:  # its row will say the same
        return Ahead(f"{title(program)}: not compiled: {describe(error)}", None)
    text = compiled.program.as_text()
    if any(matmul in text for matmul in XLA_MATMULS):
        return Ahead(f"{title(program)}: not kept: it has a matmul of XLA, which must be chosen on an idle GPU", None)
    figures = compiled.figures | {"compile_note": "beside other programs"}
    data = pickle.dumps((serialize_executable.serialize(compiled.program), figures))
    seconds = figures["lower_s"] + figures["compile_s"]
    return Ahead(f"{title(program)}: {seconds:.1f} s, {len(data) / 2**20:.2f} MiB", data)
