"""The tiles of float32 matmuls on tensor cores: what the `float32_matmuls.py` of both packages have in common."""

# The registers of 8 warps hold a tile of 128 rows and columns without spills. With up to three waves, programs that
# share tiles keep nearly all of the GPU busy. The kernels were measured on GPUs of compute capability 9.0 only.
BLOCK = 128
WAVES = 3
CAPABILITY = 90

BLOCK_K = 64  # inner numbers of a step; three steps of two operands fit the shared memory. 32: about a tenth slower
GROUP = 8  # row blocks that are computed with a column block before the next one, so that they find it in the L2 cache
LEAST_INNER = 1024  # inner numbers of a program that shares a tile, so that its sums take little of the time


def tiles_of(rows: int, columns: int) -> int:
    """Returns the number of tiles of a matrix, the cut ones included."""
    return -(-rows // BLOCK) * -(-columns // BLOCK)


def parts_of(rows: int, columns: int, inner: int, programs: int, waves: int) -> int:
    """Returns how many programs share the inner dimension of a tile. 0: too few programs would run at a time.

    The number is the one with the least time for a tile if all programs take equally long. Where fewer than half of the
    programs that the GPU can run would have a long inner dimension, a library's GEMM is faster.

    Args:
        rows, columns, inner: sizes, of which none is 0.
        programs: number of programs that the GPU runs at a time, a wave.
        waves: number of waves in which programs share tiles, at most. Their sums take memory.
    """
    tiles = tiles_of(rows, columns)
    most = max(1, min(waves * programs // tiles, inner // LEAST_INNER))
    parts = min(range(1, most + 1), key=lambda parts: -(-tiles * parts // programs) / parts)
    return 0 if inner >= 2 * LEAST_INNER and 2 * tiles * parts < programs else parts
