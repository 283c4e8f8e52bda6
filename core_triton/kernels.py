"""Triton kernels: bodies and nothing else. Their launchers stand where they are called."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(gradient_ptr, factor_ptr, numel, BLOCK: tl.constexpr):
    """Multiplies a gradient by a scalar of the device in float32, rounded once; leaves early where that is exactly 1.

    One program owns BLOCK contiguous elements of gradient (numel,), reads and writes each once, and reads factor ().
    """
    factor = tl.load(factor_ptr)
    if factor != 1.0:  # true of NaN as well
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
        inside = offsets < numel
        gradient = tl.load(gradient_ptr + offsets, mask=inside).to(tl.float32)
        tl.store(gradient_ptr + offsets, (gradient * factor).to(gradient_ptr.dtype.element_ty), mask=inside)
