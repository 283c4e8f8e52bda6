"""Runs the programs of a launch at once in Triton's interpreter, for kernels with many programs of few numbers.

The interpreter runs one program after another, which took half of the time of interpreted losses. Here the arrays of
all programs have a common first axis, so that NumPy computes for all of them at once. The kernel's source is the same,
and the results have the same bits. Where a condition or a loop differs between programs, what they have written is
restored, and each group of programs with the same outcome begins again.

An array of several programs has three axes: the programs, and two for the axes of the value, which are aligned on the
right. All other arrays have at most two, so NumPy's rules of broadcasting fit both.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.runtime import interpreter

# Kernels without matmuls whose programs neither wait for each other nor use what others write.
KERNELS = {
    *(f"float16.{name}_kernel" for name in ("place", "measure", "align", "align_of_pieces")),
    *(f"row_kernels.{name}_kernel" for name in ("pick", "finish_rows", "d_input", "smooth_d_input", "finish_call")),
    *("row_kernels.finish_rows_of_shard_kernel", "row_kernels.class_sums_kernel", "saved_kernels.pick_rows_kernel"),
    *(f"shard_rows.{name}_kernel" for name in ("own_numbers", "merge_shards", "put_rows")),
    *(f"row_statistics.{name}_kernel" for name in ("keep_rows", "finish_statistics", "merge")),
    *("stored_logits.statistics_kernel", "stored_logits.d_logits_kernel"),
    *("smoothing.add_outer_kernel", "target_grad.target_rows_kernel"),
}

Handle: Any = interpreter.TensorHandle
AXES = 3


class Differs(BaseException):
    """A condition that differs between programs. It passes through the interpreter, which catches every Exception."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class Running:
    """The programs that run at once, by their place on the first axis of the grid, or None, and what they have
    overwritten."""

    programs: np.ndarray | None = None
    overwritten: ClassVar[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []


def is_of_several(data: np.ndarray) -> bool:
    return data.ndim == AXES and Running.programs is not None


def any_of_several(*handles: Any) -> bool:
    return Running.programs is not None and any(one.data.ndim == AXES for one in handles if one is not None)


def broadcast(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(one) for one in np.broadcast_arrays(*arrays)]


def store(pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
    """Stores values, and keeps what was there."""
    pointers, values, mask = broadcast(pointers, values, mask)
    keep(pointers, mask, values.dtype)
    memory.store(pointers, values, mask)


def keep(pointers: np.ndarray, mask: np.ndarray, dtype: np.dtype[Any]) -> None:
    before = memory.load(pointers, mask, np.zeros(pointers.shape, dtype), dtype)
    Running.overwritten.append((pointers, before, mask))


def of_all(self: Any) -> Any:
    """Returns the number that a value is in all programs, as Python needs it."""
    data = self.handle.data
    if is_of_several(data):
        values = data.reshape(data.shape[0], -1)[:, 0] if data.size == data.shape[0] else None
        assert values is not None, "only a number can be a condition"
        if len(values) > 1 and (values != values[0]).any():
            raise Differs(values)
        data = values[:1]
    return data


def run_at_once(kernel: Callable[..., None], arguments: dict[str, Any], grid: tuple[int, int, int]) -> None:
    builder: Any = interpreter.interpreter_builder
    for y, z in np.ndindex(*grid[1:]):
        groups = [np.arange(grid[0], dtype=np.int32)]
        while groups:
            programs = groups.pop()
            builder.set_grid_idx(int(programs[0]), y, z)
            Running.programs, Running.overwritten = (None if len(programs) == 1 else programs), []
            try:
                kernel(**arguments)
            except Differs as differs:
                for overwritten in reversed(Running.overwritten):
                    memory.store(*overwritten)
                groups += [programs[differs.values == value] for value in np.unique(differs.values)]
            finally:
                Running.programs = None


@functools.cache
def parameters(kernel: Any) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of a kernel's parameters, and the defaults that some have."""
    found = inspect.signature(kernel).parameters
    return [*found], {name: one.default for name, one in found.items() if one.default is not inspect.Parameter.empty}


def grid_call(slow: Any) -> Any:
    """Returns what launches a kernel. The interpreter inspects its signature each time, and copies all arguments to the
    host and back, also if they are there."""

    def call(self: Any, *given: Any, **options: Any) -> None:
        names, defaults = parameters(self.fn)
        named = defaults | dict(zip(names, given, strict=False)) | {k: v for k, v in options.items() if k in names}
        on_host = all(one.device.type == "cpu" for one in named.values() if hasattr(one, "data_ptr"))
        if self.pre_run_hooks or callable(self.grid) or not on_host or len(named) < len(names):
            slow(self, *given, **options)
            return
        constants = set(self.constexprs)
        arguments = {k: v if k in constants else interpreter._implicit_cvt(v) for k, v in named.items()}
        grid: Any = (*self.grid, 1, 1)[:3]
        builder: Any = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        try:
            if grid[0] > 1 and f"{self.fn.__module__}.{self.fn.__name__}".removeprefix("core_triton.") in KERNELS:
                run_at_once(self.fn, arguments, grid)
                return
            for place in np.ndindex(*grid):
                builder.set_grid_idx(*place)
                self.fn(**arguments)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    return call


def _program_id(slow: Any) -> Any:
    def call(self: Any, axis: int) -> Any:
        if axis or Running.programs is None:
            return slow(self, axis)
        return Handle(Running.programs.reshape(-1, 1, 1), tl.int32)

    return call


def _same(slow: Any, place: int) -> Any:
    """Returns a function that leaves a value as it is if NumPy will broadcast it."""

    def call(self: Any, *arguments: Any) -> Any:
        value = arguments[place]
        if any_of_several(value):
            return Handle(value.data, value.dtype.scalar)
        return slow(self, *arguments)

    return call


def _expand_dims(slow: Any) -> Any:
    def call(self: Any, value: Any, axis: int) -> Any:
        if any_of_several(value):
            return Handle(value.data if axis == 0 else value.data.swapaxes(1, 2), value.dtype.scalar)
        return slow(self, value, axis)

    return call


def expanded(data: np.ndarray, places: tuple[Any, ...]) -> np.ndarray:
    """Returns a vector as a row, (None, :), or as a column, (:, None)."""
    assert len(places) == 2, places
    return data if places[0] is None else data.swapaxes(1, 2)


def _masked_load(slow: Any) -> Any:
    def call(self: Any, pointers: Any, mask: Any, other: Any, *options: Any, **named: Any) -> Any:
        if any_of_several(pointers, mask, other):
            given = [one for one in (pointers, mask, other) if one is not None]
            found = broadcast(*(one.data for one in given))
            pointers, mask, *others = (Handle(data, one.dtype) for data, one in zip(found, given, strict=True))
            other = others[0] if others else None
        return slow(self, pointers, mask, other, *options, **named)

    return call


def _masked_store(slow: Any) -> Any:
    def call(self: Any, pointers: Any, value: Any, mask: Any, *options: Any, **named: Any) -> None:
        if Running.programs is None:
            slow(self, pointers, value, mask, *options, **named)
        else:
            store(pointers.data, value.data, mask.data)

    return call


def _atomic(slow: Any) -> Any:
    def call(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *options: Any, **named: Any) -> Any:
        if Running.programs is not None:
            given = (pointers, value, mask)
            found = broadcast(*(one.data for one in given))
            pointers, value, mask = (Handle(data, one.dtype) for data, one in zip(found, given, strict=True))
            keep(pointers.data, mask.data, value.data.dtype)
        return slow(self, operation, pointers, value, mask, *options, **named)

    return call


REDUCTIONS: dict[Any, Any] = {
    tl.standard._sum_combine: np.sum,
    tl.standard._elementwise_max: np.nanmax,
    tl.standard._elementwise_min: np.nanmin,
}


def _reduce(slow: Any, sizes_of: Callable[[Any], tuple[int, ...]], tensor_of: Any) -> Any:
    """Returns the reduction along one axis."""

    def call(self: Any, values: Any) -> Any:
        value = values[0]
        data = value.handle.data
        if not is_of_several(data):
            return slow(self, values)
        sizes = sizes_of(value.shape)
        data = np.ascontiguousarray(np.broadcast_to(data, (len(data), *(1,) * (2 - len(sizes)), *sizes)))
        axis = self.axis % len(sizes)
        found = REDUCTIONS[self.combine_fn](data, axis=axis - len(sizes), keepdims=True)
        assert not self.keep_dims, "no kernel keeps the axis"
        if len(sizes) == 2 and axis == 1:
            found = found.swapaxes(1, 2)
        return [tensor_of(found.astype(data.dtype), value.dtype, sizes[:axis] + sizes[axis + 1 :])]

    return call


def install(sizes_of: Callable[[Any], tuple[int, ...]], tensor_of: Callable[..., Any]) -> None:
    """Replaces functions of the interpreter until the process ends, after `quick_interpreter`.

    Args:
        sizes_of: returns the sizes of the shape of a tensor.
        tensor_of: makes a tensor of an array, a dtype and sizes.
    """
    builder: Any = interpreter.InterpreterBuilder
    builder.create_get_program_id = _program_id(builder.create_get_program_id)
    builder.create_splat = _same(builder.create_splat, 1)
    builder.create_broadcast = _same(builder.create_broadcast, 0)
    builder.create_expand_dims = _expand_dims(builder.create_expand_dims)
    builder.create_masked_load = _masked_load(builder.create_masked_load)
    builder.create_masked_store = _masked_store(builder.create_masked_store)
    builder.create_atomic_rmw = _atomic(builder.create_atomic_rmw)
    reduce: Any = interpreter.ReduceOps
    reduce.apply_impl = _reduce(reduce.apply_impl, sizes_of, tensor_of)
    executor: Any = interpreter.GridExecutor
    executor.__call__ = grid_call(executor.__call__)
    tensor: Any = tl.core.tensor
    index, truth = tensor.__index__, tensor.__bool__
    tensor.__index__ = lambda self: int(of_all(self)[0]) if self.handle.data.ndim == AXES else index(self)
    tensor.__bool__ = lambda self: bool(of_all(self)[0]) if self.handle.data.ndim == AXES else truth(self)
