"""Launches Triton kernels with little host time.

Triton's launcher takes 15 to 60 us of host time: at every launch it builds dictionaries, specializes each argument and
checks globals. `launch` caches the compiled kernel of each specialization and launches it again with plain numbers as
pointers. The cache holds code and no tensors. Triton's launcher runs the first launch of a specialization. It also runs
every launch in the interpreter, under a profiler's hooks, and with a version of Triton that was not tested
(`DIRECT_VERSIONS`).
"""

import threading
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from linear_ce.gpus import known_gpu

DIRECT_VERSIONS = ("3.6.",)

GLUON_DTYPES = {torch.bfloat16: gluon.bfloat16, torch.float16: gluon.float16, torch.float32: gluon.float32}

_knobs: Any = knobs.runtime


class At(NamedTuple):
    """The elements of a contiguous tensor from row `start` on, as an argument, without creating a view."""

    tensor: Tensor
    start: int


class Blocks:
    """A matrix that a kernel reads or writes in blocks through a tensor descriptor (TMA if the GPU has it)."""

    __slots__ = ("base", "block", "gluon", "shape", "strides")
    padding = "zero"

    def __init__(self, matrix: Tensor, block: tuple[int, int], *, gluon: bool = False) -> None:
        self.base = matrix
        self.shape = matrix.shape
        self.strides = matrix.stride()
        self.block = block
        self.gluon = gluon

    def descriptor(self) -> Any:
        """Returns Triton's own descriptor, which checks alignment and strides."""
        if not self.gluon:
            return TensorDescriptor.from_tensor(self.base, list(self.block))
        layout: Any = gluon.NVMMASharedLayout.get_default_for(list(self.block), GLUON_DTYPES[self.base.dtype])
        return GluonDescriptor.from_tensor(self.base, list(self.block), layout)


class Direct(NamedTuple):
    """A compiled kernel, with what Triton's launcher and `replay.c` need to launch it."""

    run: Any  # Triton's launcher
    function: int  # the CUfunction
    metadata: tuple[int, int, int]  # warps, CTAs of a cluster, bytes of shared memory
    tail: tuple[None, ...]  # in place of the constexprs
    kinds: tuple[str, ...]  # the type of each argument, "constexpr" for those that are compiled into the kernel
    descriptors: tuple["DescriptorKind | None", ...]  # one for each `Blocks` argument; None if the GPU has no TMA


class DescriptorKind(NamedTuple):
    """The part of a TMA descriptor that is fixed when a kernel is compiled, in the numbers of the CUDA driver."""

    swizzle: int
    itemsize: int
    dtype: int
    block: tuple[int, int]


_compiled: dict[tuple[Any, ...], Direct] = {}


class _Current(threading.local):
    """What records the launches of this thread: a `replay.Recorder`, or None."""

    current: Any = None


recorder = _Current()

_direct_version = triton.__version__.startswith(DIRECT_VERSIONS) and not _knobs.interpret  # which imports decide


def is_direct() -> bool:
    """Whether kernels are launched without Triton's own launcher."""
    return _direct_version and not (_knobs.launch_enter_hook.calls or _knobs.launch_exit_hook.calls)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constexprs: Any) -> None:
    """Launches a kernel on the current device and stream.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function whose constexprs come last.
        grid: up to three numbers of programs.
        arguments: a Tensor, `At`, `Blocks`, number or None for each parameter that is not a constexpr, in order. A
            kernel receives the address of a Tensor and not its strides, so the Tensor must be contiguous, or its
            strides must be arguments too.
        constexprs: by name, in order, then num_warps, num_stages and other options of the compiler.
    """
    if not is_direct():
        kernel[grid](*map(_for_triton, arguments), **constexprs)
        if recorder.current is not None:
            recorder.current.whole = False
        return
    device = torch._C._cuda_getDevice()
    key: list[Any] = [id(kernel), device, *constexprs.values()]
    values: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            values.append(argument)
            # Triton specializes on these: 1 becomes a constant, and multiples of 16 are marked as divisible.
            key.append((argument == 1, argument & 15 == 0, -(2**31) <= argument < 2**31))
        elif kind is float or argument is None:
            values.append(argument)
            key.append(kind)
        elif kind is Blocks:
            values.append(argument)
            key.append((argument.base.dtype, argument.block, argument.gluon))
        else:
            if kind is At:
                tensor = argument.tensor
                pointer = tensor.data_ptr() + argument.start * tensor.stride(0) * tensor.itemsize
            else:
                tensor = argument
                pointer = tensor.data_ptr()
            values.append(pointer)
            key.append((tensor.dtype, pointer & 15 == 0))
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    direct = _compiled.get(tuple(key))
    if direct is None:
        compiled = kernel[grid](*map(_for_triton, arguments), **constexprs)
        direct = _compiled[tuple(key)] = _direct(compiled, len(kernel.arg_names) - len(arguments))
    else:
        stream = torch._C._cuda_getCurrentRawStream(device)
        direct.run(x, y, z, stream, direct.function, direct.metadata, None, None, None, *values, *direct.tail)
    if recorder.current is not None:
        recorder.current.add(direct, (x, y, z), values)


def _direct(compiled: CompiledKernel, constexprs: int) -> Direct:
    """Returns a compiled kernel in the form of Triton 3.6's launcher."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST  # not in every version of Triton

    launcher: Any = compiled.run
    metadata: Any = compiled.metadata
    function: Any = compiled.function  # set when `run` is first read
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise RuntimeError(f"{compiled.name} takes scratch memory of Triton's, which direct launches do not give")
    if metadata.num_ctas != 1 or launcher.launch_cooperative_grid or launcher.launch_pdl:
        raise RuntimeError(f"{compiled.name} needs launch attributes, which direct launches do not give")
    kinds = tuple(map(str, compiled.src.signature.values()))
    descriptors = getattr(metadata, "tensordesc_meta", None) or [None] * sum(map(is_descriptor, kinds))
    return Direct(
        launcher,
        function,
        compiled.packed_metadata,
        (None,) * constexprs,
        kinds[: len(kinds) - constexprs],
        tuple(
            None
            if one is None
            else DescriptorKind(
                one["swizzle"], one["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[one["elem_type"]], tuple(one["block_size"])
            )
            for one in descriptors
        ),
    )


def is_descriptor(kind: str) -> bool:
    """Whether an argument of this type is a tensor descriptor."""
    return kind.startswith("tensordesc")


def _for_triton(argument: Any) -> Any:
    """Returns an argument in the form that Triton's own launcher takes."""
    if type(argument) is At:
        return argument.tensor[argument.start :]
    return argument.descriptor() if type(argument) is Blocks else argument


_nothing = nullcontext()


def on_device(device: torch.device) -> Any:
    """Returns a context in which `device` is current, so that launches go to it."""
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return _nothing
    return torch.cuda.device(device)


def cdiv(a: int, b: int) -> int:
    """Returns a / b rounded up."""
    return -(-a // b)


def column_block(columns: int) -> int:
    """Returns the columns of a program that owns part of a row: up to eight elements a thread of four warps."""
    return min(1024, max(16, 1 << (columns - 1).bit_length()))


@cache
def device_info(device: torch.device) -> tuple[int, int, str]:
    """Returns compute capability (80, 90, ...), number of multiprocessors, and the name of `known_gpu`; in the
    interpreter, a Hopper's."""
    if device.type != "cuda":
        return 90, 2, "h100"
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return capability, properties.multi_processor_count, known_gpu(properties.name, capability)
