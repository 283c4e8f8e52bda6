"""What the kernels in Triton's Gluon dialect share, for Hopper and for compute capability 8.x."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from core_triton.kernels import NO_PROBABILITY


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


@gluon.jit
def add_exp_log(sum_exp_log, total, top, logits, exponentials):
    """Adds a quarter to the sums of exponentials times logits, less the largest logit so far: (26), but for a power of
    two. total and top are those of the quarters before. Returns the sums and the largest logits."""
    higher = gl.maximum(top, gl.max(logits, 1))
    moved = gl.where(top == float("-inf"), 0.0, top - higher)
    shifted = gl.maximum(logits - gl.expand_dims(higher, 1), NO_PROBABILITY)  # finite: times an exponential of 0
    return sum_exp_log + moved * total + gl.sum(exponentials * shifted, 1), higher
