"""Recorded launches: a call with the layouts and options of an earlier call replays the launches of that call.

For each launch of a call Python creates views, packs arguments and looks up kernels, which takes 10 to 30 us. The first
call of a kind does this, and records its launches and its memory. Later calls allocate memory of the same sizes, and
replay.c inserts the new addresses and launches all kernels. A recording holds kernels, numbers and sizes, and no
tensors.

A call is recorded only if all it does is launch kernels. The recorder watches PyTorch's operators. An operator
that is neither an allocation nor a view ends the recording, and such calls are never replayed.
"""

import ctypes
import struct
import subprocess
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from core_triton import launch

MOST_PARAMETERS = 128  # of a kernel, in replay.c
ALIGNMENT = 512  # of each array in the workspace, as PyTorch's allocator gives it

_aten = torch.ops.aten
ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
VIEWS = {_aten.slice, _aten.select, _aten.view, _aten.t, _aten.transpose, _aten.alias, _aten.detach, _aten.as_strided}


class Place(NamedTuple):
    """An address of a recording: bytes from the start of one of its arrays."""

    array: int  # inputs first, then outputs, then the workspace
    offset: int


class _Output(NamedTuple):
    """A result's shape, strides and dtype."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class Recording(NamedTuple):
    """The launches of a call and the memory that they take."""

    program: bytes  # the launches, in the form that replay.c describes
    outputs: tuple[_Output | None, ...]  # None where the call returned None
    workspace: int  # bytes


class _Allocation:
    """An array that a recorded call allocates. The recorder does not keep it alive."""

    def __init__(self, tensor: Tensor, born: int) -> None:
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.start, self.end = _extent(tensor)
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.born, self.died = born, NEVER  # how many launches came before
        self.place: Place | None = None

    @property
    def bytes(self) -> int:
        return -(-(self.end - self.start) // ALIGNMENT) * ALIGNMENT


NEVER = 2**31


class _Address(NamedTuple):
    """An address while the call is recorded: in an input, given by its index, or in an array that it allocates."""

    array: "int | _Allocation"
    offset: int

    def place(self) -> Place:
        if isinstance(self.array, int):
            return Place(self.array, self.offset)
        assert self.array.place is not None
        return Place(self.array.place.array, self.array.place.offset + self.offset)


class _Descriptor(NamedTuple):
    """A TMA descriptor while the call is recorded."""

    address: _Address
    kind: launch.DescriptorKind
    shape: tuple[int, int]
    row_bytes: int  # between two rows


class _Launch(NamedTuple):
    """A launch while the call is recorded. A parameter that is an int is a word of 8 bytes, the number in the low
    bytes."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int  # bytes
    parameters: list[int | _Address | _Descriptor]


class Recorder(TorchDispatchMode):
    """Records the launches of a call, made while it is active.

    Args:
        inputs: the call's arrays.
    """

    def __init__(self, inputs: tuple[Tensor | None, ...]) -> None:
        super().__init__()
        self.inputs = inputs
        self.extents = [(index, *_extent(tensor)) for index, tensor in enumerate(inputs) if tensor is not None]
        self.whole = not _overlap([extent for _, *extent in self.extents])
        self.allocations: list[_Allocation] = []
        self.living: list[_Allocation] = []
        self.launches: list[_Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in ALLOCATIONS:
            if self.whole and out.numel():
                self._bury()
                self.living.append(_Allocation(out, len(self.launches)))
                self.allocations.append(self.living[-1])
        elif func.overloadpacket not in VIEWS:
            self.whole = False
        return out

    def __enter__(self) -> "Recorder":
        launch.recorder.current = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        launch.recorder.current = None
        super().__exit__(*exception)

    def add(self, direct: launch.Direct, grid: tuple[int, int, int], values: list[Any]) -> None:
        """Records a launch. A value is a number, None, an address or `launch.Blocks`, as the kernel's types say."""
        if not self.whole:
            return
        self._bury()
        if 0 in grid:
            return
        warps, _, shared = direct.metadata
        try:
            parameters = self._parameters(direct, values)
        except LookupError:  # an address that is neither an input's nor allocated by the call
            self.whole = False
        else:
            self.launches.append(_Launch(direct.function, grid, 32 * warps, shared, parameters))
            self.whole = len(parameters) <= MOST_PARAMETERS

    def _bury(self) -> None:
        """Marks the arrays that have been freed. Later arrays may have their addresses."""
        for one in self.living:
            if one.storage.expired():
                one.died = len(self.launches)
        self.living = [one for one in self.living if one.died == NEVER]

    def _address(self, address: int) -> _Address:
        for index, start, end in self.extents:
            if start <= address < end:
                return _Address(index, address - start)
        for one in self.living:
            if one.start <= address < one.end:
                return _Address(one, address - one.start)
        raise LookupError

    def _parameters(self, direct: launch.Direct, values: list[Any]) -> list[int | _Address | _Descriptor]:
        """Returns what the compiled kernel takes, in the order of Triton's launcher."""
        found: list[int | _Address | _Descriptor] = []
        descriptors = iter(direct.descriptors)
        for kind, value in zip(direct.kinds, values, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("*"):
                found.append(self._address(value))
            elif launch.is_descriptor(kind):
                address, tma = self._address(value.base.data_ptr()), next(descriptors)
                if tma is None:  # the kernel takes the address and strides
                    found += [address, *value.shape, *value.strides, False]
                else:
                    found.append(_Descriptor(address, tma, tuple(value.shape), tma.itemsize * value.strides[0]))
                found += [*value.shape, *value.strides]
            else:
                found.append(_word(kind, value))
        return [*found, 0, 0]  # Triton's scratch memory, of which our kernels take none

    def recording(self, results: tuple[Tensor | None, ...]) -> Recording | None:
        """Returns what was recorded of a call that returned `results`, None if it did more than launch."""
        if not self.whole:
            return None
        self._bury()
        outputs: list[_Output | None] = []
        for result in results:
            outputs.append(None if result is None else _Output(result.shape, result.stride(), result.dtype))
            if result is None or not result.numel():
                continue
            found = next((one for one in self.living if one.start == result.data_ptr()), None)
            if found is None or (found.shape, found.strides) != (result.shape, result.stride()):
                return None
            found.place = Place(len(self.inputs) + len(outputs) - 1, 0)
        temporary = [one for one in self.allocations if one.place is None]
        workspace = _arrange(temporary, len(self.inputs) + len(outputs))
        return Recording(_program(self.launches), tuple(outputs), workspace)


def _arrange(arrays: list[_Allocation], workspace: int) -> int:
    """Assigns places in the workspace, whose index is given, to arrays, the largest first. Arrays that are alive at the
    same time do not overlap. Returns the size of the workspace in bytes."""
    placed: list[tuple[int, _Allocation]] = []
    for one in sorted(arrays, key=lambda one: -one.bytes):
        offset = 0
        for start, other in sorted(placed, key=lambda found: found[0]):
            if other.born < one.died and one.born < other.died:
                if offset + one.bytes <= start:
                    break
                offset = max(offset, start + other.bytes)
        placed.append((offset, one))
        one.place = Place(workspace, offset)
    return max((start + one.bytes for start, one in placed), default=0)


def _word(kind: str, value: Any) -> int:
    """Returns a number of a kernel's parameter as a word of 8 bytes, as the C launcher of Triton converts it."""
    if kind in ("fp32", "f32"):
        return int.from_bytes(bytes(ctypes.c_float(value)), "little")  # inf where the number is too large
    if kind[0] not in "iu" or not kind[1:].isdecimal():
        raise TypeError(f"replay.c passes integers and float32, and a kernel takes {kind}")
    return int(value) % 2**64


def _program(launches: list[_Launch]) -> bytes:
    """Returns launches in the form that replay.c reads. Equal constants, addresses and descriptors are stored once."""
    parameters = [one for launched in launches for one in launched.parameters]
    constants = dict.fromkeys(one for one in parameters if isinstance(one, int))
    addresses = dict.fromkeys(one.place() for one in parameters if isinstance(one, _Address))
    descriptors = dict.fromkeys(_described(one) for one in parameters if isinstance(one, _Descriptor))
    number = {key: index for index, key in enumerate([*constants, *addresses, *descriptors])}

    def number_of(one: int | _Address | _Descriptor) -> int:
        if isinstance(one, _Address):
            return number[one.place()]
        return number[_described(one) if isinstance(one, _Descriptor) else one]

    words = [len(constants), len(addresses), len(descriptors), len(launches), *constants]
    for words_of_one in (*addresses, *descriptors):
        words += words_of_one
    for function, grid, threads, shared, taken in launches:
        words += [function, *grid, threads, shared, len(taken), *map(number_of, taken)]
    return struct.pack(f"<{len(words)}Q", *words)


def _described(one: _Descriptor) -> tuple[int, ...]:
    """Returns the words of a TMA descriptor."""
    array, offset = one.address.place()
    swizzle, _, dtype, block = one.kind
    return (array, offset, dtype, swizzle, *one.shape, one.row_bytes, *block)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first address of a tensor's elements, and the end of the last."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _overlap(extents: Sequence[Sequence[int]]) -> bool:
    """Whether two of the arrays share memory. Then an address would not identify the array."""
    ordered = sorted(tuple(extent) for extent in extents if extent[0] < extent[1])
    return any(first[1] > second[0] for first, second in pairwise(ordered))


_recordings: dict[tuple[Any, ...], Recording | None] = {}  # None: the call did more than launch

_MISSING: Any = object()

MOST_RECORDINGS = 4096  # of some kilobytes each


def call(
    key: Any, device: torch.device, inputs: tuple[Tensor | None, ...], make: Callable[[], tuple[Tensor | None, ...]]
) -> tuple[Tensor | None, ...]:
    """Returns the results of `make`, which launches kernels on the inputs: recorded the first time, replayed later.

    Args:
        key: everything that the launches depend on besides the layouts of the inputs: options, and the function.
        device: where the inputs are, a CUDA device.
        inputs: all arrays that `make` reads or writes, except those that it allocates.
        make: runs the call.
    """
    with launch.on_device(device):
        if not launch.is_direct():
            return make()
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15 == 0) for t in inputs]
        key = (key, device.index, *layouts)
        recording = _recordings.get(key, _MISSING)  # one look: another thread may clear them
        if recording is not _MISSING:
            return make() if recording is None else replay(recording, inputs, device)
        if not _can_replay():
            return make()
        recorder = Recorder(inputs)
        if not recorder.whole:  # they share memory, which those of the next call may not
            return make()
        with recorder:
            results = make()
        if len(_recordings) >= MOST_RECORDINGS:
            _recordings.clear()
        _recordings[key] = recorder.recording(results)
        return results


def replay(recording: Recording, inputs: tuple[Tensor | None, ...], device: torch.device) -> tuple[Tensor | None, ...]:
    """Replays a recorded call on other arrays of the same layouts, on the current stream. Returns its results."""
    program, outputs, bytes_ = recording
    results = [
        None if output is None else torch.empty_strided(output[0], output[1], dtype=output[2], device=device)
        for output in outputs
    ]
    bases = [0 if tensor is None else tensor.data_ptr() for tensor in (*inputs, *results)]
    if bytes_:
        workspace = torch.empty(bytes_, dtype=torch.uint8, device=device)
        bases.append(workspace.data_ptr())
    _native().run(program, bases, device.index, torch._C._cuda_getCurrentRawStream(device.index))
    return tuple(results)


@cache
def _can_replay() -> bool:
    """Whether replay.c can be compiled on this machine. If not, this warns once, and calls launch their kernels one by
    one."""
    try:
        _native()
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"core_triton/replay.c could not be compiled, so calls take more host time: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@cache
def _native(driver: str = "libcuda.so.1") -> Any:
    """Returns the module of replay.c, compiled by the C compiler that also compiles Triton's launchers."""
    from triton.runtime.build import compile_module_from_src  # not in every version of Triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).with_suffix(".c").read_text()
    module = compile_module_from_src(source, "linear_ce_replay", include_dirs=[str(include)])
    module.load(driver)
    return module
