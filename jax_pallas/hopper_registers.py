"""Matmuls of Hopper kernels whose first operand is a float32 tile that is split in registers: MATH.md (39).

A warpgroup reads its tile from shared memory in the layout that wgmma takes of a first operand in registers, a few
columns of the inner dimension at a time. It rounds them (high), rounds what is left (low), and issues the two matmuls
of the piece. While the tensor cores multiply, it loads and splits the next piece. No matmul stays in flight at the end
of a step: registers of an operand that are in use in two iterations make the assembler wait for every matmul.

Pallas' `plgpu.wgmma` takes pieces of no fewer columns than a row of the second operand has in shared memory, 64. So
these functions are in Mosaic's own dialect, below Pallas. Pallas' interpreter does not run them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import batched
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jax_pallas.hopper_common import transforms

# The name of the module is also that of a function of the package.
wgmma_m64: Callable[..., Any] = import_module("jax.experimental.mosaic.gpu.wgmma").wgmma_m64

# An accumulator between matmuls. In the layout of its epilogue pairs of numbers would be in registers of 64 bits.
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT

K = 16  # columns of the inner dimension that an instruction takes, a piece

# Pieces that are split before their matmuls are issued. On an H200, two in place of one: d_input of Qwen2.5-0.5B takes
# 1.25 ms in place of 1.31, and of Gemma 2 2B 2.85 in place of 3.05. Exponentials take 1.45 in place of 1.47 and 2.64 in
# place of 2.94.
AT_ONCE = 2

TILE = 64  # rows and columns of a tile
SWIZZLE, ROWS = 128, 8  # of float32 in shared memory: parts of 8 rows of 128 bytes, 32 numbers
PART = SWIZZLE * ROWS  # bytes


def _inline(*arguments: Any, returns: Any = None) -> Any:
    """Returns a decorator of functions of Mosaic's dialect, which Pallas calls with arguments of these types."""
    inline = plgpu.inline_mgpu(arg_types=arguments, return_type=returns)
    return lambda function: inline(lambda _, *values: function(*values))


def _constant(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


class _Places:
    """Where a thread's numbers are in a float32 tile: bytes that depend on the thread, and bytes that do not.

    Element (r, c) of a tile in memory is in the part (r / 8, c / 32), in row r % 8 of it, in 16 bytes number
    (c % 32 / 4) xor (r % 8). As wgmma takes it, thread 4 g + t of warp w has rows 16 w + g + 8 h of the first operand
    and columns 16 p + 8 j + 2 t + i, where h, j and i are 0 and 1 and p is a piece.
    """

    def __init__(self, *, transposed: bool) -> None:
        self.transposed = transposed
        thread = utils.thread_idx()
        lane, warp = arith.remui(thread, _constant(32)), arith.remui(arith.divui(thread, _constant(32)), _constant(4))
        g, t = arith.divui(lane, _constant(4)), arith.remui(lane, _constant(4))
        two, four = _constant(2), _constant(4)
        if transposed:  # columns of the operand are rows in memory
            part, within = arith.divui(warp, two), arith.remui(warp, two)
            base = _total((part, PART), (t, 2 * SWIZZLE), (arith.remui(g, four), 4))
            number = arith.xori(_total((within, 4), (arith.divui(g, four), 1)), _total((t, 2)))
        else:
            base = _total((warp, 4 * PART), (g, SWIZZLE), (arith.remui(t, two), 8))
            number = arith.xori(arith.divui(t, two), g)
            # Of rows that are next to each other one begins with the other of two pieces, so that the 16 threads that
            # read at the same time read from all banks.
            self.is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.remui(g, two), _constant(0))
            number = arith.xori(number, _total((arith.remui(g, two), 4)))
        flips = [(i ^ 2 * h, i * SWIZZLE) for h in range(2) for i in range(2)]
        if not transposed:
            flips = [(4 * odd + 2 * j, 0) for odd in range(2) for j in range(2)]
        self.bytes = [
            arith.addi(base, _total((arith.xori(number, _constant(flip)), 16), after=after)) for flip, after in flips
        ]

    def of_pair(self, p: int, h: int, j: int) -> tuple[list[Any], int]:
        """Returns the places of two numbers i, or one where they are next to each other. Odd rows have those of
        piece p - 1 for an odd p, and of p + 1 for an even one, unless the tile is transposed."""
        if self.transposed:
            return self.bytes[2 * h : 2 * h + 2], (2 * p + j) * 2 * PART
        return [self.bytes[2 * (p % 2) + j]], h * 2 * PART + p // 2 * PART


def _total(*terms: tuple[Any, int], after: int = 0) -> Any:
    """Returns the sum of numbers times factors."""
    found = _constant(after)
    for number, factor in terms:
        found = arith.addi(found, arith.muli(number, _constant(factor)))
    return found


def _load(tile: Any, place: list[Any], fixed: int) -> list[Any]:
    """Returns two float32 of a tile."""
    f32, i8 = ir.F32Type.get(), ir.IntegerType.get_signless(8)
    kind = ir.VectorType.get((2,), f32) if len(place) == 1 else f32
    found = []
    for at in place:
        ptr = utils.getelementptr(tile, [at], i8)
        found.append(llvm.load(kind, utils.getelementptr(ptr, [fixed], i8)))
    if len(found) == 1:
        return [llvm.extractelement(found[0], _constant(i)) for i in range(2)]
    return found


def _rounded(first: Any, second: Any) -> Any:
    """Returns two float32 as two bfloat16 in a register. Mosaic's conversion becomes two slow instructions where the
    rounded numbers are converted back."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [second, first], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")


def _halves(first: Any, second: Any) -> tuple[Any, Any]:
    """Returns two float32 rounded, and what is left rounded."""
    high = _rounded(first, second)
    of_high = arith.shli(high, _constant(16)), arith.andi(high, _constant(-(2**16)))
    left = (arith.subf(one, arith.bitcast(one.type, bits)) for one, bits in zip((first, second), of_high, strict=True))
    return high, _rounded(*left)


def _as_operand(registers: Sequence[Any]) -> Any:
    """Returns registers of two bfloat16 as a first operand, (TILE, K)."""
    layout, kind = fragmented_array.WGMMA_LAYOUT, ir.VectorType.get((2,), ir.BF16Type.get())
    found = np.empty(layout.registers_shape((TILE, K)), dtype=object)
    found.reshape(-1)[:] = [utils.bitcast(one, kind) for one in registers]
    return mgpu.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)


def _pieces(tile: Any, places: _Places) -> Iterator[list[list[Any]]]:
    """Returns the numbers that a thread has of each piece of a tile, two at a time. They are loaded when they are
    needed."""

    def load(p: int) -> list[list[Any]]:
        return [_load(tile, *places.of_pair(p, h, j)) for j in range(2) for h in range(2)]

    if places.transposed:
        yield from map(load, range(TILE // K))
        return
    for p in range(0, TILE // K, 2):
        pairs = list(zip(load(p), load(p + 1), strict=True))
        for if_odd in (1, 0):  # which of the two loads has this piece in odd rows
            yield [
                [arith.select(places.is_odd, (x, y)[if_odd], (x, y)[1 - if_odd]) for x, y in zip(*pair, strict=True)]
                for pair in pairs
            ]


def _add_split(acc: Any, w: Any, b: Any, *, transposed: bool) -> Any:
    """Does what `add_split` does, on values of Mosaic."""
    n, bf16 = acc.shape[1], ir.BF16Type.get()
    b = mgpu.memref_transpose(b, (1, 0, 3, 2))
    (of_b, strides), _, fastest = mma_utils.create_descriptor(
        b, swizzle=SWIZZLE, large_tile=(TILE, TILE), group_size=(TILE, n), logical_k_major=True
    )
    stride = strides[1][0]  # bytes of b from a piece to the next
    registers = acc.registers.copy()
    options = {"n": n, "swizzle": 2 * K, "a_element_type": bf16, "b_element_type": bf16}
    pieces = enumerate(_pieces(utils.memref_ptr(w), _Places(transposed=transposed)))
    for some in batched(pieces, AT_ONCE):
        halves = [(p, half) for p, pairs in some for half in zip(*(_halves(*pair) for pair in pairs), strict=True)]
        operands = fragmented_array.optimization_barrier(*(_as_operand(half) for _, half in halves))
        nvvm.wgmma_fence_aligned()
        for (p, _), half in zip(halves, operands, strict=True):
            offset = utils.c(mma_utils.encode_addr(p * stride), ir.IntegerType.get_signless(64))
            piece = llvm.add(of_b, offset, overflow_flags=llvm.IntegerOverflowFlags.none)
            registers = wgmma_m64(
                registers, half, piece, None, fastest != mma_utils.Dim.K, None, b_k_stride=stride, **options
            )
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
    return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)


def add_split(acc: Array, w: Any, b: Any, *, transposed: bool, interpret: bool) -> Array:
    """Returns acc + w @ b^T, where w is the sum of two matrices of b's dtype. The matmuls are still in flight.

    Args:
        acc: (TILE, n) float32 in the layout `ACCUMULATOR`.
        w: (TILE, TILE) float32 in shared memory, or if `transposed` its transpose.
        b: (n, TILE) in shared memory.
        interpret: of the kernel.
    """
    if interpret:
        whole = w[...].T if transposed else w[...]
        high = whole.astype(b.dtype)
        for part in (high, whole - high.astype(jnp.float32)):
            acc = acc + jnp.dot(part.astype(b.dtype), b[...].T, preferred_element_type=jnp.float32)
        return acc

    arguments = ACCUMULATOR, plgpu.RefType(transforms(TILE, 4)), plgpu.RefType(transforms(TILE))
    inline = _inline(*arguments, returns=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=ACCUMULATOR))
    return inline(partial(_add_split, transposed=transposed))(acc, w, b)


# Sums over the rows of accumulators. A row of an accumulator is in 4 threads, and a column in 32: 8 of each warp.


def _joined(a: list[Any], b: list[Any], kind: str) -> list[Any]:
    """Returns the sum or the maximum of two numbers; of "first", the number that is larger and what belongs to it, of
    equals the lower of the latter."""
    if kind == "sum":
        return [arith.addf(a[0], b[0])]
    top = arith.maximumf(a[0], b[0])
    if kind == "max":
        return [top]
    larger, equal = (arith.cmpf(which, b[0], a[0]) for which in (arith.CmpFPredicate.OGT, arith.CmpFPredicate.OEQ))
    return [top, arith.select(larger, b[1], arith.select(equal, arith.minimumf(a[1], b[1]), a[1]))]


def _number_of_thread() -> Any:
    return arith.remui(utils.thread_idx(), _constant(128))


def _put_columns(numbers: list[list[Any]], kind: str, scratch: Any, slot: int) -> None:
    """Joins the columns of arrays (TILE, TILE) over the rows of each warp, and writes them to slots of scratch
    (slots, 4, TILE).

    numbers: of each column of a thread, 2 k + i for column 8 k + 2 t + i. Threads that have the same columns exchange
    the half of them that is the other's, three times. Thread l of a warp ends with columns 2 l and 2 l + 1.
    """
    thread = _number_of_thread()
    lane = arith.remui(thread, _constant(32))
    for bit in (16, 8, 4):
        is_upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, _constant(bit)), _constant(0))
        half = len(numbers) // 2
        joined = []
        for lower, upper in zip(numbers[:half], numbers[half:], strict=True):
            own = [arith.select(is_upper, y, x) for x, y in zip(lower, upper, strict=True)]
            given = [arith.select(is_upper, x, y) for x, y in zip(lower, upper, strict=True)]
            joined.append(_joined(own, [utils.shfl_bfly(one, bit) for one in given], kind))
        numbers = joined
    f32 = ir.F32Type.get()
    place = arith.addi(arith.muli(arith.divui(thread, _constant(32)), _constant(TILE)), arith.muli(lane, _constant(2)))
    for i in range(len(numbers[0])):
        pair = utils.vector_concat([vector.broadcast(ir.VectorType.get((1,), f32), one[i]) for one in numbers])
        ptr = utils.getelementptr(utils.memref_ptr(scratch), [place], f32)
        llvm.store(pair, utils.getelementptr(ptr, [(slot + i) * 4 * TILE], f32))


def _in_columns(arrays: list[Any], kind: str) -> list[list[Any]]:
    """Returns the numbers of each column of a thread, joined over the rows that the thread has."""
    found = []
    for k in range(TILE // 8):
        for i in range(2):
            first, second = (
                [llvm.extractelement(array.registers.reshape(-1)[2 * k + h], _constant(i)) for array in arrays]
                for h in range(2)
            )
            found.append(_joined(first, second, kind))
    return found


def put_columns(kind: str, arrays: tuple[Array, ...], scratch: Any, slot: int) -> None:
    """Joins arrays (TILE, TILE) over the rows of each warp, and writes them to slots of scratch (slots, 4, TILE).

    Args:
        kind: "sum", "max" or "first" of `_joined`, which has two arrays.
        slot: the first of as many slots as there are arrays.
    """

    @_inline(*[plgpu.Layout.WGMMA] * len(arrays), plgpu.RefType())
    def put(*arguments: Any) -> None:
        *values, scratch = arguments
        _put_columns(_in_columns(values, kind), kind, scratch, slot)

    put(*arrays, scratch)


def store_columns(kinds: list[str], scratch: Any, refs: list[Any]) -> None:
    """Joins what `put_columns` wrote over the warps, in order, and writes it to refs (TILE,) in global memory, one for
    each slot."""

    @_inline(*[plgpu.RefType()] * (1 + len(refs)))
    def store(scratch: Any, *refs: Any) -> None:
        thread, f32 = _number_of_thread(), ir.F32Type.get()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, _constant(TILE))):
            base, slot = utils.getelementptr(utils.memref_ptr(scratch), [thread], f32), 0
            for kind in kinds:
                count = 1 + (kind == "first")
                found: Any = None
                for warp in range(4):
                    places = [((slot + i) * 4 + warp) * TILE for i in range(count)]
                    own = [llvm.load(f32, utils.getelementptr(base, [place], f32)) for place in places]
                    found = own if found is None else _joined(found, own, kind)
                for i, value in enumerate(found):
                    llvm.store(value, utils.getelementptr(utils.memref_ptr(refs[slot + i]), [thread], f32))
                slot += count

    store(scratch, *refs)


def load_columns(scratch: Any) -> Array:
    """Returns the sums (TILE,) that `put_columns` wrote to the first slot, in the layout of columns."""
    layout = plgpu.Layout.WGMMA.reduce(0)

    @_inline(plgpu.RefType(), returns=plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=layout))
    def load(scratch: Any) -> Any:
        f32 = ir.F32Type.get()
        t = arith.remui(utils.thread_idx(), _constant(4))
        base = utils.getelementptr(utils.memref_ptr(scratch), [arith.muli(t, _constant(2))], f32)
        kind, found = ir.VectorType.get((2,), f32), []
        for k in range(TILE // 8):
            of_warps = [llvm.load(kind, utils.getelementptr(base, [warp * TILE + 8 * k], f32)) for warp in range(4)]
            total = of_warps[0]
            for one in of_warps[1:]:
                total = arith.addf(total, one)
            found.append(total)
        of_layout = layout.to_mgpu()
        registers = np.empty(of_layout.registers_shape((TILE,)), dtype=object)
        registers.reshape(-1)[:] = found
        return mgpu.FragmentedArray(_registers=registers, _layout=of_layout, _is_signed=None)

    return load(scratch)
