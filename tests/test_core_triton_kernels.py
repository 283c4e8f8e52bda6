"""The Triton kernels: in the interpreter, compiled for GPUs that are not there, and (mark gpu) on one that is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import core_triton

HERE = Path(__file__).parent
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}  # bytes a block may have on A100, H200 and B200


def test_scale_kernel_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "interpret_scale.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")  # Triton 3.9 announces 3.10
@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_scale_kernel_compiles(arch: int, dtype: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    from core_triton.kernels import scale_kernel

    signature = {"gradient_ptr": f"*{dtype}", "factor_ptr": "*fp32", "numel": "i64", "BLOCK": "constexpr"}
    source = ASTSource(
        scale_kernel, signature=signature, constexprs={"BLOCK": 4096}, attrs={(0,): [["tt.divisibility", 16]]}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8})
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    assert "ld.global" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 65536.0])
def test_no_wait_and_a_second_backward_on_a_gpu(dtype: torch.dtype, factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((300, 64), (1001, 64)))
    y = torch.randint(0, 1001, (300,), generator=generator)
    upstream = torch.tensor(factor)

    def gradients(device: str, backwards: int) -> list[torch.Tensor]:
        arrays = [a.to(device).requires_grad_() for a in (x, w)]
        target, d_loss = y.to(device), upstream.to(device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # nothing may wait for the device
        try:
            loss = core_triton.linear_cross_entropy(arrays[0], arrays[1], target)
            for left in reversed(range(backwards)):
                found = torch.autograd.grad(loss, arrays, d_loss, retain_graph=left > 0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return [a.cpu() for a in found]

    for once, twice, reference in zip(gradients("cuda", 1), gradients("cuda", 2), gradients("cpu", 1), strict=True):
        assert torch.equal(once, twice)
        bound = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
        assert (once.double() - reference.double()).norm() <= bound * reference.double().norm()
