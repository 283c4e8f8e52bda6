"""The matmul of the Hopper kernels with a float32 head, which is the sum of two matrices of 16 bits: MATH.md (39).

The kernels read the head where it is. They are in `hopper_split_logits.py` and `hopper_gradients.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

PIECE = gl.constexpr(32)  # of the inner dimension of a step, two matrix instructions


@gluon.jit
def multiply_split(acc, w, other, TRANSPOSED: gl.constexpr):
    """Adds the matmul of a step to acc (m, n), and waits for it: w (m, k), or (k, m) if TRANSPOSED, times other (n, k).
    w is float32 and the sum of two matrices of the dtype of `other`: MATH.md (39), as `head_copy.copy_head_kernel`
    splits it.

    Both come from registers. w is split a piece at a time, while the matrix units multiply the pieces before. No matmul
    stays in flight at the end, because ptxas makes each matmul wait for the one before where the registers of an
    operand are in use in two iterations.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    operands = ()
    for i in gl.static_range(other.shape[1] // PIECE):
        if TRANSPOSED:
            exact = w.slice(i * PIECE, PIECE, 0).permute((1, 0)).load(layout)
        else:
            exact = w.slice(i * PIECE, PIECE, 1).load(layout)
        high = exact.to(other.dtype)
        low = (exact - high.to(gl.float32)).to(other.dtype)
        of_other = other.slice(i * PIECE, PIECE, 1).permute((1, 0))
        acc = warpgroup_mma(high, of_other, acc, is_async=True)
        acc = warpgroup_mma(low, of_other, acc, is_async=True)
        operands = operands + (high, low)
    return warpgroup_mma_wait(0, deps=(acc,) + operands)[0]
