"""Operators of Triton's interpreter for the operands that kernels mostly have.

For each addition, the interpreter calls some fifteen functions that look for a common dtype and shape, which took half
of the time of interpreted kernels. Here one function calls NumPy if the dtypes of both operands are the same, or if one
is a Python number that the dtype has. All other operands go to the interpreter's functions. Results have the same bits.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import programs_at_once
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Handle, Tensor, Pointer = interpreter.TensorHandle, tl.core.tensor, tl.core.pointer_type
NUMPY: dict[Any, Any] = {
    tl.int1: np.bool_,
    tl.int8: np.int8,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.float16: np.float16,
    tl.bfloat16: np.uint16,
    tl.float32: np.float32,
}
SINGLE = {id(dtype): dtype for dtype in NUMPY}  # dtypes are compared by identity
INTEGERS = {id(tl.int32), id(tl.int64)}
NUMBERS = INTEGERS | {id(tl.float32), id(tl.float16)}
BITS = INTEGERS | {id(tl.int1)}
INT32 = range(-(2**31), 2**31)

_new = object.__new__
_types: dict[tuple[int, int], tuple[Any, Any]] = {}  # type and number of elements, by dtype and shape
_pointers: dict[Any, Any] = {}  # types of blocks of pointers, by what their type has and by shape
_shape_of: Callable[[tuple[int, ...]], tuple[Any, int, Any, Any]]
_sizes_of: Callable[[Any], tuple[int, ...]]
_scalar: Any  # the shape of scalars


def _tensor(data: np.ndarray, dtype: Any, shape: Any) -> Any:
    """Returns a tensor of one of the dtypes above."""
    key = id(dtype), id(shape)  # both exist until the end
    found = _types.get(key)
    if found is None:
        sizes = _sizes_of(shape)
        kind = tl.block_type(dtype, list(sizes)) if sizes else dtype
        found = _types[key] = kind, _shape_of(sizes)[3]
    return _of_type(data, dtype, found[0], shape, found[1])


def _of_type(data: np.ndarray, dtype: Any, kind: Any, shape: Any, numel: Any) -> Any:
    handle, tensor = _new(Handle), _new(Tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor.handle, tensor.dtype, tensor.type, tensor.shape, tensor.numel = handle, dtype, kind, shape, numel
    return tensor


def _common_shape(left: Any, right: Any) -> Any:
    if left is right or right is _scalar:
        return left
    return right if left is _scalar else _shape_of(np.broadcast_shapes(_sizes_of(left), _sizes_of(right)))[2]


def _operator(function: Any, slow: Any, dtypes: set[int], *, compares: bool = False, reverse: bool = False) -> Any:
    def call(self: Any, other: Any, **options: Any) -> Any:
        dtype = self.dtype
        if id(dtype) in dtypes:
            kind = type(other)
            if kind is Tensor:
                theirs = other.dtype
                if theirs is dtype or (id(dtype) in INTEGERS and id(theirs) in INTEGERS):
                    if theirs is not dtype:
                        dtype = tl.int64
                    left, right = self.handle.data, other.handle.data
                    data = function(right, left) if reverse else function(left, right)
                    shape = _common_shape(self.shape, other.shape)
                    return _tensor(data, tl.int1 if compares else dtype, shape)
            elif _fits(dtype, kind, other, compares):
                data = self.handle.data
                data = function(other, data) if reverse else function(data, other)
                return _tensor(data, tl.int1 if compares else dtype, self.shape)
        return slow(self, other, **options)

    return call


def _fits(dtype: Any, kind: type, number: Any, compares: bool) -> bool:
    """Returns whether an operation with a Python number is one in the dtype of the tensor."""
    if kind is int:
        return id(dtype) in NUMBERS and number in INT32 and not (compares and dtype is tl.float16)
    if kind is not float or (dtype is not tl.float32 and (compares or dtype is not tl.float16)):
        return False
    # A comparison takes other numbers as float64.
    return not compares or number == 0.0 or 2.0**-126 <= abs(number) <= (2 - 2.0**-23) * 2.0**127


def _pointer_sum(slow: Any) -> Any:
    """Returns tensor.__add__, which has one more case: pointers and offsets."""

    def call(self: Any, other: Any, **options: Any) -> Any:
        dtype = self.dtype
        if type(dtype) is not Pointer or type(other) is not Tensor or id(other.dtype) not in INTEGERS:
            return slow(self, other, **options)
        size = max(1, dtype.element_ty.primitive_bitwidth // 8)
        data = self.handle.data + size * other.handle.data.astype(np.uint64)
        mine = self.shape
        shape = _common_shape(mine, other.shape)
        if shape is mine:
            return _of_type(data, dtype, self.type, shape, self.numel)
        key = dtype.name, dtype.address_space, dtype.const, id(shape)
        kind = _pointers.get(key)
        if kind is None:
            kind = _pointers[key] = tl.block_type(dtype, list(_sizes_of(shape)))
        return _of_type(data, dtype, kind, shape, _shape_of(_sizes_of(shape))[3])

    return call


_filled: dict[Any, np.ndarray] = {}  # constant arrays, by dtype, value and shape


def _full(dtype: Any, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    key = dtype, value, shape
    found = _filled.get(key)
    if found is None:
        found = _filled[key] = np.full(shape, value, dtype)
        found.flags.writeable = False
    return found


def _of_mask(mask: Any, pointer: Any) -> Any:
    """Returns a mask of the pointers' shape, or None if the interpreter must find it."""
    if mask is None:
        return _full(np.bool_, True, pointer.handle.data.shape)
    if type(mask) is not Tensor or mask.dtype is not tl.int1:
        return None
    if mask.shape is not pointer.shape and mask.shape is not _scalar:
        return None
    data = mask.handle.data
    return data if data.shape == pointer.handle.data.shape else np.broadcast_to(data, _common(data, pointer))


def _common(data: np.ndarray, other: Any) -> tuple[int, ...]:
    """Returns the shape of arrays that may be of several programs: `programs_at_once`."""
    return np.broadcast_shapes(data.shape, other.handle.data.shape)


_options_seen: set[Any] = set()  # the interpreter checks options the first time


def _load(slow: Any) -> Any:
    def call(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        seen = tuple(options.items())
        if seen in _options_seen and type(pointer) is Tensor and type(pointer.dtype) is Pointer:
            element, inside = pointer.dtype.element_ty, _of_mask(mask, pointer)
            # The bits of a zero are 0 in each dtype, except for -0.0.
            zero = other is None or (mask is not None and type(other) in (int, float) and str(other) in ("0", "0.0"))
            if inside is not None and zero and element is not tl.int1 and id(element) in SINGLE:
                data, dtype = pointer.handle.data, NUMPY[element]
                if data.shape != inside.shape:
                    data = np.broadcast_to(data, inside.shape)
                found = memory.load(data, inside, _full(dtype, 0, data.shape), np.dtype(dtype))
                return _tensor(found, element, pointer.shape)
        found = slow(pointer, mask, other, **options)
        _options_seen.add(seen)
        return found

    return call


def _store(slow: Any) -> Any:
    def call(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        seen = "store", *options.items()
        if seen in _options_seen and type(pointer) is Tensor and type(pointer.dtype) is Pointer:
            element, inside = pointer.dtype.element_ty, _of_mask(mask, pointer)
            if id(element) in SINGLE and element is not tl.int1 and inside is not None and not pointer.dtype.const:
                if type(value) is Tensor and value.dtype is not element:
                    value = interpreter.interpreter_semantic.cast(value, element)
                if type(value) is Tensor and (value.shape is pointer.shape or value.shape is _scalar):
                    data, values = pointer.handle.data, value.handle.data
                    if programs_at_once.Running.programs is not None:
                        programs_at_once.store(data, values, inside)
                        return None
                    values = values if values.shape == data.shape else np.broadcast_to(values, data.shape)
                    memory.store(data, values, inside)
                    return None
        found = slow(pointer, value, mask, **options)
        _options_seen.add(seen)
        return found

    return call


def _cast(slow: Any) -> Any:
    """Returns the cast between dtypes above that takes one step. That to int1 is a comparison."""
    halves = id(tl.float16), id(tl.bfloat16)

    def cast(self: Any, value: Any, to: Any, rounding: Any = None) -> Any:
        dtype = value.dtype
        if dtype is to:
            return value
        one_step = id(dtype) not in halves or to is tl.float32
        if rounding is None and one_step and to is not tl.int1 and id(dtype) in SINGLE and id(to) in SINGLE:
            handle = value.handle
            if handle.dtype is not dtype:
                return slow(self, value, to, rounding)
            return _tensor(self.builder.cast_impl(handle, to).data, to, value.shape)
        return slow(self, value, to, rounding)

    return cast


def _to(slow: Any) -> Any:
    cast = TritonSemantic.cast

    def call(self: Any, dtype: Any, *arguments: Any, **options: Any) -> Any:
        if arguments or options or id(dtype) not in SINGLE or id(self.dtype) not in SINGLE:
            return slow(self, dtype, *arguments, **options)
        return cast(interpreter.interpreter_semantic, self, dtype)

    return call


def _where(slow: Any) -> Any:
    def call(condition: Any, x: Any, y: Any) -> Any:
        tensors = [one for one in (x, y) if type(one) is Tensor]
        if type(condition) is not Tensor or condition.dtype is not tl.int1 or not tensors:
            return slow(condition, x, y)
        dtype, choices = tensors[0].dtype, []
        for one in (x, y):
            if type(one) is Tensor and one.dtype is dtype and id(dtype) in SINGLE:
                choices.append(one.handle.data)
            elif _fits(dtype, type(one), one, False):
                choices.append(NUMPY[dtype](one))
            else:
                return slow(condition, x, y)
        shapes = (one.shape for one in (condition, *tensors))
        return _tensor(np.where(condition.handle.data, *choices), dtype, reduce(_common_shape, shapes))

    return call


def _getitem(slow: Any) -> Any:
    whole = slice(None)

    def call(self: Any, places: Any) -> Any:
        block = self.shape is not _scalar and id(self.dtype) in SINGLE
        if block and type(places) is tuple and all(place is None or place == whole for place in places):
            data, several = self.handle.data, programs_at_once.is_of_several(self.handle.data)
            data = programs_at_once.expanded(data, places) if several else data[places]
            sizes = iter(_sizes_of(self.shape))
            return _tensor(data, self.dtype, _shape_of(tuple(1 if one is None else next(sizes) for one in places))[2])
        return slow(self, places)

    return call


def _to_tensor(slow: Any) -> Any:
    """Returns what the interpreter calls for each value that a kernel assigns."""

    def call(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is Tensor else slow(self, value, check_type)

    return call


def install(
    shape_of: Callable[[tuple[int, ...]], tuple[Any, int, Any, Any]], sizes_of: Callable[[Any], tuple[int, ...]]
) -> None:
    """Replaces the operators until the process ends, after the interpreter has replaced Triton's language.

    Args:
        shape_of: returns the shape of a type and its number of elements, and those of a tensor, the same objects for
            the same sizes.
        sizes_of: returns the sizes of such a shape.
    """
    global _shape_of, _sizes_of, _scalar
    _shape_of, _sizes_of, _scalar = shape_of, sizes_of, shape_of(())[2]
    for name, function in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        for form, reverse in ((f"__{name}__", False), (f"__r{name}__", True)):
            setattr(Tensor, form, _operator(function, getattr(Tensor, form), NUMBERS, reverse=reverse))
    Tensor.__add__ = _pointer_sum(Tensor.__add__)
    for name, reverse in (("__truediv__", False), ("__rtruediv__", True)):
        slow = getattr(Tensor, name)
        setattr(Tensor, name, _operator(np.divide, slow, {id(tl.float32)}, reverse=reverse))
    compared = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for name, function in (compared | {"eq": np.equal, "ne": np.not_equal}).items():
        form = f"__{name}__"
        setattr(Tensor, form, _operator(function, getattr(Tensor, form), NUMBERS, compares=True))
    for name, function in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
        form = f"__{name}__"
        setattr(Tensor, form, _operator(function, getattr(Tensor, form), BITS))
    TritonSemantic.cast = _cast(TritonSemantic.cast)
    TritonSemantic.to_tensor = _to_tensor(TritonSemantic.to_tensor)
    Tensor.to, Tensor.__getitem__ = _to(Tensor.to), _getitem(Tensor.__getitem__)
    tl.load, tl.store, tl.where = _load(tl.load), _store(tl.store), _where(tl.where)
    programs_at_once.install(sizes_of, lambda data, dtype, sizes: _tensor(data, dtype, _shape_of(sizes)[2]))
