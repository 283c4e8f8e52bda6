"""Recorded launches: a call that was made before with the same layouts and options is launched again from a list.

Between the public function and the GPU, Python makes views, packs arguments and looks kernels up, 10 to 30 us for each
of a call's launches. The first call of a kind does so, and records what it launched and which memory it took. Later
calls take memory of the same sizes, put the new addresses in, and launch. A recording holds kernels, numbers and
sizes, and no tensor.

A call is recorded only if launches are all that it did: the recorder watches PyTorch's operators, and one that is
neither an allocation nor a view ends the recording, so such a call always takes the long way.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core_triton import launch

ALIGNMENT = 512  # of each array in the workspace, as PyTorch's allocator gives it

_aten = torch.ops.aten
ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
VIEWS = {_aten.slice, _aten.select, _aten.view, _aten.t, _aten.transpose, _aten.alias, _aten.detach, _aten.as_strided}


class Place(NamedTuple):
    """An address of a recording: bytes from the start of one of its arrays."""

    array: int  # inputs first, then outputs, then the workspace
    offset: int


class _Launch(NamedTuple):
    """One launch of a recording."""

    run: Callable[..., None]  # Triton's C launcher
    head: tuple[int, int, int]  # the grid
    function: Any
    options: tuple[Any, ...]  # what the C launcher takes between the function and the arguments
    arguments: list[Any]  # in the C launcher's form, without addresses
    pointers: tuple[tuple[int, Place], ...]  # position in `arguments`
    descriptors: tuple[tuple[int, Place, tuple[Any, ...]], ...]  # position, address, the rest of what makes one


class _Output(NamedTuple):
    """A result's shape, strides and dtype, and which result it is."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class Recording(NamedTuple):
    """The launches of a call and the memory that they take."""

    launches: tuple[_Launch, ...]
    outputs: tuple[_Output | None, ...]  # None where the call returned None
    workspace: int  # bytes


class Recorder(TorchDispatchMode):
    """Records the launches of a call, made while it is active.

    Args:
        inputs: the call's arrays.
    """

    def __init__(self, inputs: tuple[Tensor | None, ...]) -> None:
        super().__init__()
        self.inputs = inputs
        self.allocations: list[Tensor] = []  # kept until the end: no two have an address in common
        self.launches: list[tuple[Any, ...]] = []
        self.whole = not _overlap([_extent(tensor) for tensor in inputs if tensor is not None])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.whole and func.overloadpacket in ALLOCATIONS:
            self.allocations.append(out)
        elif func.overloadpacket not in VIEWS:
            self.whole = False
            self.allocations.clear()
        return out

    def __enter__(self) -> "Recorder":
        launch.recorder.current = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        launch.recorder.current = None
        super().__exit__(*exception)

    def recording(self, results: tuple[Tensor | None, ...]) -> Recording | None:
        """Returns what was recorded of a call that returned `results`, None if it did more than launch."""
        if not self.whole:
            return None
        places: list[tuple[int, int, Place]] = []  # first address, end, place
        for index, tensor in enumerate(self.inputs):
            if tensor is not None:
                start, end = _extent(tensor)
                places.append((start, end, Place(index, 0)))
        allocated = {tensor.data_ptr(): tensor for tensor in self.allocations if tensor.numel()}
        outputs: list[_Output | None] = []
        for result in results:
            if result is None or not result.numel():
                outputs.append(None if result is None else _Output(result.shape, result.stride(), result.dtype))
                continue
            found = allocated.pop(result.data_ptr(), None)
            if found is None or found.shape != result.shape or found.stride() != result.stride():
                return None
            start, end = _extent(found)
            places.append((start, end, Place(len(self.inputs) + len(outputs), 0)))
            outputs.append(_Output(result.shape, result.stride(), result.dtype))
        workspace, last = 0, len(self.inputs) + len(results)
        for tensor in allocated.values():
            start, end = _extent(tensor)
            places.append((start, end, Place(last, workspace)))
            workspace += -(-(end - start) // ALIGNMENT) * ALIGNMENT

        def place(address: int) -> Place:
            for start, end, found in places:
                if start <= address < end:
                    return Place(found.array, found.offset + address - start)
            raise LookupError

        try:
            launches = tuple(_recorded(place, *made) for made in self.launches)
        except LookupError:  # an address that is neither an input's nor allocated meanwhile
            return None
        return Recording(launches, tuple(outputs), workspace)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first address of a tensor's elements, and the end of the last."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _overlap(extents: list[tuple[int, int]]) -> bool:
    """Whether two of the arrays share memory: then an address does not tell which it belongs to."""
    ordered = sorted(extent for extent in extents if extent[0] < extent[1])
    return any(first[1] > second[0] for first, second in pairwise(ordered))


def _recorded(place: Callable[[int], Place], direct: launch.Direct, grid: Any, kinds: Any, values: Any) -> _Launch:
    """Returns a launch in the form that is replayed. `kinds` says which values are addresses."""
    arguments: list[Any] = []
    pointers: list[tuple[int, Place]] = []
    descriptors: list[tuple[int, Place, tuple[Any, ...]]] = []
    metadata = iter(direct.descriptors)
    for is_pointer, value in zip(kinds, values, strict=True):
        if is_pointer:
            pointers.append((len(arguments), place(value)))
            arguments.append(None)
        elif type(value) is launch.Blocks:
            shape, strides = list(value.shape), list(value.strides)
            where, known = place(value.base.data_ptr()), next(metadata)
            if known is None:  # no TMA: the kernel takes the address and strides
                pointers.append((len(arguments), where))
                arguments += [None, *shape, *strides, False]
            else:
                descriptors.append((len(arguments), where, (*known, shape, strides, 0)))
                arguments.append(None)
            arguments += [*shape, *strides]
        else:
            arguments.append(value)
    arguments += direct.tail
    return _Launch(direct.raw, grid, direct.function, direct.options, arguments, tuple(pointers), tuple(descriptors))


_recordings: dict[tuple[Any, ...], Recording | None] = {}  # None: the call did more than launch

MOST_RECORDINGS = 4096  # of some kilobytes each


def call(
    key: tuple[Any, ...], inputs: tuple[Tensor | None, ...], make: Callable[[], tuple[Tensor | None, ...]]
) -> tuple[Tensor | None, ...]:
    """Returns the results of `make`, which launches kernels on the inputs: recorded the first time, replayed later.

    Args:
        key: all that the launches depend on besides the inputs' layouts: options, and which function it is.
        inputs: all arrays that `make` reads or writes, but for those that it allocates; on one CUDA device.
        make: makes the call.
    """
    device = next(tensor.device for tensor in inputs if tensor is not None)
    with launch.on_device(device):
        if not launch.is_direct():
            return make()
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15 == 0) for t in inputs]
        key = (key, device, *layouts)
        if key in _recordings:
            recording = _recordings[key]
            return make() if recording is None else replay(recording, inputs, device)
        with Recorder(inputs) as recorder:
            results = make()
        if len(_recordings) >= MOST_RECORDINGS:
            _recordings.clear()
        _recordings[key] = recorder.recording(results)
        return results


def replay(recording: Recording, inputs: tuple[Tensor | None, ...], device: torch.device) -> tuple[Tensor | None, ...]:
    """Makes a recorded call on other arrays of the same layouts, on the current stream; returns its results."""
    results: list[Tensor | None] = []
    for output in recording.outputs:
        if output is None:
            results.append(None)
        else:
            results.append(torch.empty_strided(output.shape, output.strides, dtype=output.dtype, device=device))
    workspace = torch.empty(recording.workspace, dtype=torch.uint8, device=device)
    bases = [0 if tensor is None else tensor.data_ptr() for tensor in (*inputs, *results, workspace)]
    stream, descriptor = torch._C._cuda_getCurrentRawStream(device.index), launch.make_descriptor()
    for run, (x, y, z), function, options, template, pointers, descriptors in recording.launches:
        arguments = template.copy()
        for position, (array, offset) in pointers:
            arguments[position] = bases[array] + offset
        for position, (array, offset), rest in descriptors:
            arguments[position] = descriptor(bases[array] + offset, *rest)
        run(x, y, z, stream, function, *options, *arguments)
    return tuple(results)
