"""Records which kernels a call would launch on a GPU, with their arguments, and compiles them. No GPU is needed.

The calls run on fake tensors, which have a shape and strides, but no memory, so they can have the shapes of real
models. Launches are recorded instead of run. Tests and `benchmarks.same_launches` use this module.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime.jit import JITFunction

from core_triton import chunked, launch, problem, scaled_exp

# Maximal bytes per block on A100, L40S, H200, B200 and RTX 5090.
SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 170}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.float64: "fp64",
}


class Launch(NamedTuple):
    """A launch: a kernel and what its compilation depends on."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]  # argument -> type
    constexprs: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]  # arguments that are multiples of 16
    options: tuple[tuple[str, Any], ...]  # num_warps, num_stages, maxnreg

    @property
    def name(self) -> str:
        """The kernel's module and name, and the switches that are on."""
        on = [name for name, value in self.constexprs if value is True]
        on += [f"{name}={value}" for name, value in self.constexprs if name == "STATISTICS" and value]
        switches = ",".join(on)
        module = self.kernel.__module__.removeprefix("core_triton.")
        blocks = [re.sub(r"tensordesc<(.*?\]).*", r"\1", kind) for _, kind in self.signature if "tensordesc" in kind]
        return f"{module}.{self.kernel.__name__}({', '.join(blocks)}; {switches})"


class Compiled(NamedTuple):
    """A compiled kernel and its resources."""

    ptx: str
    shared: int  # bytes
    registers: int  # per thread
    stack: int  # bytes per thread, where spilled registers go
    cubin: bytes


DEVICE: Any = torch._C.TensorBase.device  # the property of Tensor
GPU = torch.device("cuda", 0)
FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "scalar_tensor", "empty_strided", "empty_permuted")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Makes tensors of a GPU on PyTorch's device "meta", which has no memory, and makes `Tensor.device` name the GPU.

    To record a call, PyTorch's FakeTensorMode takes six times as long, 0.2 ms for each operation. Only FACTORIES make
    such tensors. Without a driver, other functions raise an error if they are asked for a tensor on a GPU.
    """

    # The first operation of this kind on "meta" loads torch.compile, with a table of PyTorch's functions. It must
    # not have those that replace them below.
    torch.where(torch.empty(1, dtype=torch.bool, device="meta"), torch.empty(1, device="meta"), 0.0)

    def device(tensor: Tensor) -> torch.device:
        found = DEVICE.__get__(tensor)
        return GPU if found.type == "meta" else found

    def on_meta(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*arguments: Any, device: Any = None, **options: Any) -> Tensor:
            on_gpu = device is not None and torch.device(device).type == "cuda"
            return factory(*arguments, device="meta" if on_gpu else device, **options)

        return make

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "device", property(device)))
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", property(lambda tensor: device(tensor) == GPU)))
        for name in FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, on_meta(getattr(torch, name))))
        yield


def no_matmul(*_: Any, first: bool) -> None:
    """Replaces a matmul that writes to existing memory. A mock would keep its arguments alive."""


@contextmanager
def fake_gpu(
    arch: int,
    name: str | None = None,
    watch: Callable[[Launch, tuple[int, ...], dict[str, Any]], None] | None = None,
    matmul: Callable[..., None] = no_matmul,
) -> Iterator[list[Launch]]:
    """Makes CUDA tensors fake, for a GPU of compute capability `arch`. Yields the list to which launches are added.

    Args:
        arch: 80, 90, ...
        name: the name of the GPU.
        watch: receives each launch with its grid and the values of its arguments.
        matmul: replaces `add_matmul`. torch.addmm with out_dtype has no fake implementation.
    """
    launches: list[Launch] = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(size > 0 for size in grid), f"{kernel.__name__} has the grid {grid}"
        launches.append(launch_of(kernel, arguments, options))
        if watch is not None:
            watch(launches[-1], grid, values_of(kernel, arguments, options))

    properties = SimpleNamespace(
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=MULTIPROCESSORS[arch],
        name=name or f"compute capability {arch}",
    )
    with (
        fake_tensors(),
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(launch, "_direct_version", False),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(scaled_exp, "add_matmul", matmul),
        mock.patch.object(chunked, "add_matmul", matmul),
        mock.patch.object(problem, "add_matmul", matmul),
        mock.patch.object(torch._C, "_cuda_getDevice", return_value=0, create=True),
        mock.patch.object(Tensor, "data_ptr", lambda tensor: tensor.storage_offset() * tensor.itemsize),
    ):
        launch.device_info.cache_clear()
        try:
            yield launches
        finally:
            launch.device_info.cache_clear()


def values_of(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each parameter of a kernel, in order."""
    values = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default}
    values |= {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
    return {name: values[name] for name in kernel.arg_names}


def launch_of(kernel: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Launch:
    """Returns a launch as Triton's launcher would specialize it for the arguments."""
    values = values_of(kernel, arguments, options)
    options = {name: value for name, value in options.items() if name not in values}
    signature, constexprs, divisible = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        number = isinstance(value, int) and not isinstance(value, bool)
        specialize = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (number and value == 1 and specialize):
            signature[name], constexprs[name] = "constexpr", value
            continue
        signature[name] = type_of(value)
        address = value.data_ptr() if isinstance(value, Tensor) else value
        aligns = specialize and not parameter.do_not_specialize_on_alignment
        if isinstance(address, int) and address % 16 == 0 and aligns:
            divisible.append(name)
    return Launch(
        kernel, tuple(signature.items()), tuple(constexprs.items()), tuple(divisible), tuple(sorted(options.items()))
    )


def type_of(value: Any) -> str:
    """Returns the type of an argument in Triton's notation."""
    if isinstance(value, Tensor):
        return f"*{DTYPES[value.dtype]}"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon descriptors have a layout
    return f"tensordesc<{DTYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"


@cache
def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compiles a recorded launch, at most once."""
    return compile_kernel(
        launch.kernel, dict(launch.signature), dict(launch.constexprs), arch, launch.divisible, **dict(launch.options)
    )


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    capability: int,
    divisible: tuple[str, ...] = (),
    **options: Any,
) -> Compiled:
    """Compiles a Triton or Gluon kernel for a GPU.

    Args:
        kernel: a function decorated with triton.jit or gluon.jit.
        signature: argument -> type, such as "*bf16", "i32", "tensordesc<bf16[128, 64]>" or "constexpr".
        constexprs: the values of the constexpr arguments.
        capability: of the GPU, 80, 90, ...
        divisible: arguments that are multiples of 16 or whose addresses are.
        options: num_warps, num_stages, arch, ...
    """
    source_type: Any = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_type
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    source = source_type(
        kernel,
        signature=dict(signature),
        constexprs={place[name]: value for name, value in constexprs.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = resources(compiled.asm["cubin"])
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared, registers, stack, compiled.asm["cubin"])


def resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers and the stack bytes of the only kernel in a cubin."""
    text = dump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def dump(cubin: bytes, what: str) -> str:
    """Returns the output of cuobjdump for a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def launches_of(arch: int, call: Callable[[], Any]) -> list[Launch]:
    """Returns the distinct launches of a call on fake tensors."""
    with fake_gpu(arch) as launches:
        call()
    return list(dict.fromkeys(launches))
