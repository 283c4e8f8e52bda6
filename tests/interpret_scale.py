"""Runs the scaling kernel in Triton's interpreter: in its own process, for Triton chooses when it is imported."""

from typing import Any

import torch

from core_triton import row_kernels


def main() -> None:
    scale_kernel: Any = row_kernels.scale_kernel
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (1.0, 1 / 3, 65536.0 / 4096, float("nan")):
            before = torch.randn(1001, generator=generator).to(dtype)
            buffer = torch.cat([before, torch.full((23,), 7.0, dtype=dtype)])
            factor = torch.tensor(value)
            scale_kernel[(4,)](buffer, factor, 1001, BLOCK=256)
            expected = before if value == 1.0 else (before.float() * factor).to(dtype)
            rtol = 2**-7 if dtype == torch.bfloat16 and value != 1.0 else 0  # the interpreter truncates to bfloat16
            torch.testing.assert_close(buffer[:1001], expected, rtol=rtol, atol=0, equal_nan=True)
            assert (buffer[1001:] == 7.0).all(), "written past the end"


if __name__ == "__main__":
    main()
