"""What depends on the device of a call: whether the kernels run there, and the settings of the library's matmuls."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from core_triton.plan import ExecutionPlan


@cache
def triton_obstacle(device: torch.device) -> str | None:
    """Returns why the Triton kernels do not run on a device, or None."""
    if device.type != "cuda":
        return f"no kernel for {device.type} devices"
    if find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the kernels need compute capability 8.0, the device has {major}.{minor}"
    return None


def library_settings(plan: ExecutionPlan, input: Tensor) -> AbstractContextManager[None]:
    """Returns a context in which PyTorch's matmuls use the dtypes of their operands and accumulate in float32.

    It disables autocast. It also disables reduced-precision reductions: by default PyTorch lets cuBLAS add the parts of
    a split GEMM in 16 bits. The input's GPU is current, so that kernels between the matmuls are launched there.
    """
    if not plan.uses_library:
        return nullcontext()
    if plan.path == "chunked":
        return _exact_matmuls(input, nullcontext())
    from core_triton.launch import on_device  # Triton is not on every machine that has PyTorch

    return _exact_matmuls(input, on_device(input.device))


@contextmanager
def _exact_matmuls(input: Tensor, current_device: AbstractContextManager[None]) -> Iterator[None]:
    switches = torch.backends.cuda.matmul
    before = switches.allow_bf16_reduced_precision_reduction, switches.allow_fp16_reduced_precision_reduction
    kind = "cpu" if input.device.type == "meta" else input.device.type  # autocast does not support the meta device
    try:
        switches.allow_bf16_reduced_precision_reduction = switches.allow_fp16_reduced_precision_reduction = False
        with torch.autocast(kind, enabled=False), current_device:
            yield
    finally:
        switches.allow_bf16_reduced_precision_reduction, switches.allow_fp16_reduced_precision_reduction = before
