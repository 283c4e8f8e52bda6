"""What the kernels in Triton's Gluon dialect share, for Hopper and for compute capability 8.x."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def active_rows(count_ptr, start, least, rows):
    """Returns how many of a chunk's `rows` rows are among the first `count` rows of the call, but at least `least`.

    The chunk begins at row `start` of the call. `count` is in device memory.
    """
    return gl.maximum(gl.minimum(gl.load(count_ptr) - start, rows), least)


@gluon.jit
def halves(t):
    pair = t.reshape([t.shape[0], 2, t.shape[1] // 2]).permute(0, 2, 1)
    return pair.split()


@gluon.jit
def quarters(tile, layout: gl.constexpr):
    """Returns the four quarters of a tile's columns, in the layout of a matmul of their width. No registers move. An
    epilogue that processes one quarter at a time needs fewer registers than one for the whole tile."""
    left, right = halves(tile)
    first, second = halves(left)
    third, fourth = halves(right)
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(second, layout, assert_trivial=True),
        gl.convert_layout(third, layout, assert_trivial=True),
        gl.convert_layout(fourth, layout, assert_trivial=True),
    )
