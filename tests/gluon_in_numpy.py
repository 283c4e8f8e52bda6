"""Runs kernels in Triton's Gluon dialect for compute capability 8.x in NumPy. Triton's interpreter does not run Gluon.

A kernel's functions run as Python functions, one program after the other, with `Language` in place of Gluon's and
Triton's languages. Layouts have no effect. What is checked besides the results:

- An int32 does not overflow.
- Elements are read and written inside of an array. An element is written at most once in a launch, or again by a
  thread that has read it since. A flag may be set several times.
- Shared memory is NaN until it is written. An asynchronous copy writes either at once or as late as its wait allows.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from core_triton.launch import At, Blocks

RANGES = {"i1": (0, 1), "i8": (-128, 127), "i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}
WIDER = ["i1", "i8", "i32", "i64", "f16", "bf16", "f32"]  # the dtype of a result is the later of two
DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Dtype(str):
    """The name of a dtype, "bf16" for example."""

    @property
    def primitive_bitwidth(self) -> int:
        return int(self.lstrip("bif"))


def rounded(data: Any, dtype: str) -> np.ndarray:
    """Returns numbers as those of a dtype. Integers are int64 and floats float32 in NumPy."""
    if dtype in RANGES:
        found = np.asarray(data).astype(np.int64)
        assert np.all((found >= RANGES[dtype][0]) & (found <= RANGES[dtype][1])), f"an {dtype} overflows"
        return found
    found = np.asarray(data).astype(np.float32)
    if dtype == "f16":
        found = found.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        found = torch.from_numpy(np.atleast_1d(found)).bfloat16().float().numpy().reshape(found.shape)
    return found


class Value:
    """A tensor or a number of a kernel."""

    __array_ufunc__ = None  # NumPy leaves operators to this class
    type = SimpleNamespace(layout=None)

    def __init__(self, data: Any, dtype: str) -> None:
        self.data, self.dtype = rounded(data, dtype), dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def to(self, dtype: str) -> "Value":
        return Value(self.data, dtype)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __getitem__(self, index: Any) -> "Value":
        return Value(self.data[index], self.dtype)

    def __neg__(self) -> "Value":
        return Value(-self.data, self.dtype)

    def __invert__(self) -> "Value":
        assert self.dtype == "i1"
        return Value(1 - self.data, self.dtype)

    def reshape(self, shape: Sequence[int]) -> "Value":
        return Value(self.data.reshape(shape), self.dtype)

    def permute(self, *order: Any) -> "Value":
        return Value(self.data.transpose(*order), self.dtype)

    def split(self) -> tuple["Value", "Value"]:
        return Value(self.data[..., 0], self.dtype), Value(self.data[..., 1], self.dtype)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def combined(function: Callable[..., Any], *values: Any, dtype: str | None = None) -> Any:
    """Applies a NumPy function to values. A Python number takes the dtype of the others."""
    if all(map(is_number, values)):
        return function(*values).item()
    kinds = [value.dtype for value in values if isinstance(value, Value)]
    found = function(*(value.data if isinstance(value, Value) else value for value in values))
    return Value(found, dtype or max(kinds, key=WIDER.index))


def install_operators() -> None:
    arithmetic = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod}
    for name, function in (arithmetic | {"and": np.bitwise_and, "rshift": np.right_shift}).items():
        setattr(
            Value,
            f"__{name}__",
            lambda a, b, f=function: NotImplemented if isinstance(b, Pointer) else combined(f, a, b),
        )
        setattr(Value, f"__r{name}__", lambda a, b, f=function: combined(f, b, a))
    compared = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    compared |= {"eq": np.equal, "ne": np.not_equal}
    for name, function in compared.items():
        setattr(Value, f"__{name}__", lambda a, b, f=function: combined(f, a, b, dtype="i1"))


class Memory:
    """An array in device memory: all of a tensor's storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        wide = self.whole.float() if tensor.is_floating_point() else self.whole.long()
        self.dtype, self.data = Dtype(DTYPES[tensor.dtype]), wide.numpy().copy()
        self.written = np.zeros(len(self.data), bool)
        self.writer = np.zeros(len(self.data), np.int64)  # which thread has written it


class Pointer:
    def __init__(self, memory: Memory, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + (more if isinstance(more, Value) else Value(more, "i64")))

    def to(self, dtype: str) -> "Pointer":
        assert dtype == "i64"
        return self

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offsets, 0 where the mask is false, and the mask."""
        offsets = self.offset.data
        inside = np.broadcast_to(True if mask is None else mask.data.astype(bool), offsets.shape)
        offsets = np.where(inside, offsets, 0)
        assert np.all((offsets >= 0) & (offsets < len(self.memory.data))), "an element outside of an array"
        return offsets, inside


class Shared:
    """A buffer in shared memory, or a part of it."""

    def __init__(self, data: np.ndarray, dtype: str) -> None:
        self.data, self.dtype = data, dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def _part(self, data: np.ndarray) -> "Shared":
        return Shared(data, self.dtype)

    def index(self, stage: Any) -> "Shared":
        assert 0 <= int(stage) < len(self.data)
        return self._part(self.data[int(stage)])

    def slice(self, start: int, length: int, axis: int) -> "Shared":
        assert start + length <= self.data.shape[axis]
        return self._part(self.data[start : start + length] if axis == 0 else self.data[:, start : start + length])

    def permute(self, order: Sequence[int]) -> "Shared":
        return self._part(self.data.transpose(order))

    def load(self, layout: Any) -> Value:
        return Value(self.data.copy(), self.dtype)


class AsyncCopy:
    """The module `async_copy`, and `copy_to_shared`. With `late`, a copy is done when a wait demands it, otherwise at
    once."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self.groups: list[list[Callable[[], None]]] = []
        self.open: list[Callable[[], None]] = []

    def copy_to_shared(self, buffer: Shared, pointers: Pointer, mask: Value) -> None:
        offsets, inside = pointers.places(mask)
        assert offsets.shape == buffer.data.shape
        self._assert_wide(offsets, inside)
        values = np.where(inside, pointers.memory.data[offsets], 0.0)

        def copy() -> None:
            buffer.data[...] = values

        self.open.append(copy)
        if not self.late:
            copy()

    def _assert_wide(self, offsets: np.ndarray, inside: np.ndarray) -> None:
        """Fails unless each eight elements are contiguous, aligned, and all of them inside or none."""
        units, masks = offsets.reshape(len(offsets), -1, 8), inside.reshape(len(offsets), -1, 8)
        assert np.all(masks == masks[..., :1])
        wide = (units[..., 0] % 8 == 0) & np.all(units == units[..., :1] + np.arange(8), axis=-1)
        assert np.all(wide | ~masks[..., 0])

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, pending: int) -> None:
        while len(self.groups) > pending:
            for copy in self.groups.pop(0):
                if self.late:
                    copy()


class Language:
    """What the kernels use of `triton.experimental.gluon.language` and `triton.language`."""

    int32, int64, float32 = "i32", "i64", "f32"
    static_range = range
    # What else a kernel's module imports, or defines in assembly.
    names: Mapping[str, Any] = {"reciprocal": lambda value: Value(1 / value.data, "f32")}

    def __init__(self, program: int, programs: Sequence[int]) -> None:
        self.program, self.programs = program, programs

    def program_id(self, axis: int) -> Value:
        """Returns the program's number. The first axis is counted fastest."""
        return Value(self.program // int(np.prod(self.programs[:axis])) % self.programs[axis], "i32")

    def num_programs(self, axis: int) -> Value:
        return Value(self.programs[axis], "i32")

    def range(self, start: Any, end: Any, disable_licm: bool) -> Any:
        return range(start, end)

    def arange(self, start: int, end: int, layout: Any = None) -> Value:
        return Value(np.arange(start, end), "i32")

    def zeros(self, shape: Sequence[int], dtype: str, layout: Any = None) -> Value:
        return Value(np.zeros(shape), dtype)

    def zeros_like(self, value: Value) -> Value:
        return self.zeros(value.shape, value.dtype)

    def sum(self, value: Value, axis: int) -> Value:
        return Value(value.data.sum(axis), value.dtype)

    def max(self, value: Value, axis: int) -> Value:
        return Value(value.data.max(axis), value.dtype)

    def min(self, value: Value, axis: int) -> Value:
        return Value(value.data.min(axis), value.dtype)

    def abs(self, value: Value) -> Value:
        return Value(np.abs(value.data), value.dtype)

    def expand_dims(self, value: Value, axis: int) -> Value:
        return Value(np.expand_dims(value.data, axis), value.dtype)

    def convert_layout(self, value: Value, layout: Any, assert_trivial: bool = False) -> Value:
        return value

    def trans(self, value: Value) -> Value:
        return value.permute(1, 0)

    def minimum(self, a: Any, b: Any) -> Any:
        return combined(np.minimum, a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return combined(np.maximum, a, b)

    def exp2(self, value: Value) -> Value:
        return Value(np.exp2(value.data), "f32")

    def log2(self, value: Value) -> Value:
        return Value(np.log2(value.data), "f32")

    def floor(self, value: Value) -> Value:
        return Value(np.floor(value.data), value.dtype)

    def cdiv(self, a: Any, b: Any) -> Any:
        return (a + (b - 1)) // b

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        if isinstance(condition, bool):
            return yes if condition else no
        if isinstance(yes, Pointer):  # and one condition
            return yes if condition else no
        if is_number(yes) and is_number(no):
            return Value(np.where(condition.data, yes, no), "i32")
        return combined(lambda yes, no: np.where(condition.data, yes, no), yes, no)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
        offsets, inside = pointer.places(mask)
        memory, places = pointer.memory, offsets[inside]
        written = places[memory.written[places]]
        assert (memory.writer[written] == threading.get_ident()).all(), "an element is read that another thread writes"
        memory.written[written] = False  # what was read may be written again, as a sum that is added to
        values = memory.data[offsets]
        return Value(values if mask is None else np.where(inside, values, other), pointer.memory.dtype)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        offsets, inside = pointer.places(mask)
        places, memory = offsets[inside], pointer.memory
        values = value.data if isinstance(value, Value) else value
        values = rounded(np.broadcast_to(values, offsets.shape)[inside], memory.dtype)
        if memory.dtype == "i32":  # a flag, which several rows may set
            assert np.all(values == 1), "not a flag"
        else:
            assert not memory.written[places].any(), "an element is written twice"
            assert len(np.unique(places)) == len(places), "an element is written twice"
        memory.written[places], memory.writer[places] = True, threading.get_ident()
        memory.data[places] = values

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Sequence[Pointer], dtype: str, is_pure: bool, pack: int
    ) -> None:
        assert asm.startswith("prefetch")  # which changes nothing
        assert not is_pure
        args[0].places(None)

    def allocate_shared_memory(self, dtype: str, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(np.full(shape, np.nan, np.float32), dtype)

    def _no_layout(self, *arguments: Any) -> None:
        return None

    BlockedLayout = SliceLayout = SwizzledSharedLayout = DotOperandLayout = _no_layout


def mma_v2(a: Value, b: Value, acc: Value) -> Value:
    return Value(acc.data + a.data @ b.data, "f32")


@contextmanager
def in_python(modules: Sequence[ModuleType], language: Language, copies: AsyncCopy) -> Iterator[None]:
    """Lets the kernels of these modules run as Python functions."""
    compiled = JITFunction | InterpretedFunction
    replaced = {"gl": language, "tl": language, "async_copy": copies, "mma_v2": mma_v2}
    replaced |= {"copy_to_shared": copies.copy_to_shared, **language.names}
    with ExitStack() as stack:
        for module in modules:
            of_module = {name: value.fn for name, value in vars(module).items() if isinstance(value, compiled)}
            of_module |= {name: value for name, value in replaced.items() if hasattr(module, name)}
            of_module |= {
                name: value.value for name, value in vars(module).items() if type(value).__name__ == "constexpr"
            }
            stack.enter_context(mock.patch.multiple(module, **of_module))
        yield


def run(
    modules: Sequence[ModuleType],
    kernel: Any,
    grid: Sequence[int],
    *arguments: Any,
    late: bool,
    language: Callable[[int, Sequence[int]], Language] = Language,
    descriptor: Callable[[Blocks, Memory], Any] | None = None,
    **options: Any,
) -> None:
    """Runs a launch (`core_triton.launch.launch`) and writes its results to the tensors among the arguments.

    Args:
        modules: that the kernel's functions are in.
        kernel, grid, arguments, options: those of `launch`.
        late: asynchronous copies are done as late as their waits allow.
        language: makes the language of a program, given its number and the grid.
        descriptor: makes the argument of a kernel for `Blocks`.
    """
    memories: dict[int, Memory] = {}

    def value_of(argument: Any) -> Any:
        if argument is None or isinstance(argument, float):
            return argument
        if isinstance(argument, int):
            return Value(argument, "i32" if abs(argument) < 2**31 else "i64")
        if isinstance(argument, Blocks):
            assert descriptor is not None
            return descriptor(argument, memory_of(argument.base))
        tensor, start = argument if isinstance(argument, At) else (argument, 0)
        memory = memory_of(tensor)
        return Pointer(memory, Value(tensor.storage_offset() + start * (tensor.stride(0) if start else 0), "i64"))

    def memory_of(tensor: Tensor) -> Memory:
        return memories.setdefault(tensor.untyped_storage().data_ptr(), Memory(tensor))

    values = [value_of(argument) for argument in arguments]
    constexprs = {name: value for name, value in options.items() if name in kernel.arg_names}
    for program in range(int(np.prod(grid))):
        copies = AsyncCopy(late=late)
        with in_python(modules, language(program, grid), copies):
            kernel.fn(*values, **constexprs)
        assert not copies.groups, "copies are in flight when a program ends"
    for memory in memories.values():
        if memory.written.any():
            written = torch.from_numpy(memory.written)
            memory.whole[written] = torch.from_numpy(memory.data).to(memory.whole.dtype)[written]


install_operators()
