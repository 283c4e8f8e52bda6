"""Settings that make tests compile and interpret JAX programs faster, and skip what JAX 0.11.1 cannot interpret."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback as callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Compiles with few optimizations, because the tests' programs run for milliseconds and compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextmanager
def quick_callbacks() -> Iterator[None]:
    """Passes NumPy arrays and Python numbers to the callbacks of Mosaic's interpreter.

    JAX would convert all arguments to JAX arrays, and the interpreter would convert them back. That takes two thirds of
    the time.
    """

    def call(*arguments: Any, callback: Any, **_: Any) -> Any:
        converted = (np.array(argument) if np.ndim(argument) else argument.item() for argument in arguments)
        return jax.tree.map(np.asarray, callback(*converted))

    with mock.patch.object(callbacks, "io_callback_impl", call):
        yield


@contextmanager
def no_interpreter_before_jax_0_11_2() -> Iterator[None]:
    """Skips a test that interprets a Mosaic kernel, if JAX is 0.11.1: its interpreter does not support `plgpu.load` and
    `plgpu.layout_cast`, which its compiler supports."""

    def skip() -> NoReturn:
        pytest.skip("the interpreter of Mosaic kernels in JAX 0.11.1 does not support plgpu.load and plgpu.layout_cast")

    if jax.__version_info__ >= (0, 11, 2):
        yield
        return
    with mock.patch.object(plgpu, "InterpretGPUParams", skip):
        yield


@contextmanager
def kernels_of_zeros() -> Iterator[None]:
    """Lowers kernels of Pallas' Triton backend to zeros, for tests that only read a program. To lower what their
    interpreter does takes most of the time of such a test."""

    def zeros(launch: Any, *_: Any, interpret: bool) -> list[Any]:
        return [jnp.zeros(result.shape, result.dtype) for result in jax.tree.leaves(launch.results)]

    with mock.patch("jax_pallas.triton_launch._Launch.__call__", zeros):
        yield
