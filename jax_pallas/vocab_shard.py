"""What the devices exchange that divide the vocabulary: each has the rows of the head of its own classes.

The devices of a mesh axis have the same tokens. Where they run scaled exponentials, `shard_rows.py` has what they
exchange. Otherwise each runs the two passes of `chunked.py` over its own classes, and they exchange twice in each chunk
of rows:

    after the first pass   the `Partial` statistics, some numbers for each row. Each device merges those of all devices
                           in the order of the axis, so all have the same bits.
    after the second pass  d_input is summed over the devices, in float32 unless the caller asks for less.

With scaled exponentials, rows are exchanged beside a matmul (`after_begin`).

d_weight and d_bias stay where they are. All shards have the same number of rows, so the last ones may have rows past
the classes. These are masked, because which they are is known only when the program runs.

`psum_p` and not `jax.lax.psum`: the program of an operator has no mesh (`primitives.py`), so its arrays do not have the
types by which JAX tracks what varies. `primitives.py` gives the results their types, and the other collectives theirs.
"""

from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu

from jax_pallas import row_math
from jax_pallas.devices import Devices
from jax_pallas.primitives import collective
from jax_pallas.row_math import Partial
from jax_pallas.triton_launch import load, run, store

HEAD_START = 10_000  # nanoseconds, of collectives before the next kernel: NCCL begins 3 us after its operands are there
WAIT = """{
    .reg .u64 begin, now;
    .reg .pred waits;
    mov.u64 begin, %globaltimer;
    again:
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.lt.u64 waits, now, DELAY;
    @waits bra again;
    mov.u32 $0, $1;
}"""


def first_class(devices: Devices, rows: int) -> Array | int:
    """Returns the class of the first row of a device's shard, which has `rows` rows."""
    return lax.axis_index(devices.vocab_axes) * rows if devices.vocab_axes else 0


def merged(devices: Devices, partial: Partial) -> Partial:
    """Returns the statistics of rows over all shards, given those over the classes of each: MATH.md (26)."""
    if not devices.vocab_axes:
        return partial
    present = {name: array for name, array in partial._asdict().items() if array is not None}
    floats = [name for name in present if name != "argmax"]
    gathered = dict(zip(floats, gather(devices, jnp.stack([present[name] for name in floats])), strict=True))
    if partial.argmax is not None:
        gathered["argmax"] = gather(devices, partial.argmax[None])[0]

    def of_shard(rank: int) -> Partial:
        return partial._replace(**{name: array[rank] for name, array in gathered.items()})

    return reduce(row_math.merge, map(of_shard, range(devices.shards)))


def sum_of_d_input(devices: Devices, d_input: Array, *, ordered: bool = False) -> Array:
    """Returns the sum over all shards of their parts of rows of d_input, (n, D) float32. ordered: in the order of the
    devices."""
    if not devices.vocab_axes:
        return d_input
    sums = ordered_sum if ordered else all_sum
    return sums(devices, d_input.astype(devices.reduce_dtype)).astype(jnp.float32)


def sent_by_sum(devices: int, size: float, *, of_own: bool) -> float:
    """Returns the bytes that each device sends for a sum of `size` bytes, or with `of_own` for that of its own rows."""
    return (1 if of_own else 2) * (devices - 1) / devices * size


def all_sum(devices: Devices, array: Array) -> Array:
    """Returns the sum of an array over the devices that divide the vocabulary."""
    return lax.psum_p.bind(array, axes=devices.vocab_axes, axis_index_groups=None)


def ordered_sum(devices: Devices, array: Array) -> Array:
    """Returns the sum of an array (n, D) over the devices that divide the vocabulary, in their order for each element.

    The order in which NCCL adds depends on the place of an element and on n. Here each device adds n / devices of the
    rows, and gives the sums to the others. It takes the memory of two more such arrays.
    """
    return _ordered_sum(array, devices.vocab_axes)


def gather(devices: Devices, numbers: Array) -> Array:
    """Returns numbers (m, n) of each device as (m, k, n), the same on all devices: a sum of zeros and one number."""
    rank = lax.axis_index(devices.vocab_axes)
    places = jnp.zeros((numbers.shape[0], devices.shards, numbers.shape[1]), numbers.dtype)
    return all_sum(devices, places.at[:, rank].set(numbers))


def own_sum_of_d_input(devices: Devices, d_input: Array, *, ordered: bool = False) -> Array:
    """Returns this device's rows of the sum over all shards of their parts of d_input, (n, D) float32, of the devices
    that divide the rows of the input, as many of each, one after the other. ordered: in the order of the devices."""
    of_own = _own_rows_of_ordered_sum if ordered else _own_rows_of_sum
    own = of_own(d_input.astype(devices.reduce_dtype), devices.gather_axes)
    if devices.shared_vocab_axes:
        axes = tuple(axis for axis in devices.vocab_axes if axis in devices.shared_vocab_axes)
        own = _ordered_sum(own, axes) if ordered else lax.psum_p.bind(own, axes=axes, axis_index_groups=None)
    return own.astype(jnp.float32)


def own_part_of_sum(array: Array, axes: tuple[str, ...], axis: int) -> Array:
    """Returns this device's rows, or its columns where `axis` is 1, of the sum of an array over the devices of axes of
    the mesh."""
    return (_own_rows_of_sum, _own_columns_of_sum)[axis](array, axes)


def rows_of_all(devices: Devices, rows: Array) -> Array:
    """Returns rows (m, D) of each device that divides the rows of the input, one after the other."""
    return _rows_of_all(rows, devices.gather_axes)


def let_begin_kernel(delay: int, number_ref: Any, _operand_ref: Any, _result_ref: Any, done_ref: Any) -> None:
    """Runs for so many nanoseconds, and copies one number. One program does nothing else."""
    at = jnp.arange(1, dtype=jnp.int32)
    number = load(number_ref, at)
    kind = jax.ShapeDtypeStruct(number.shape, number.dtype)
    options: dict[str, Any] = {"constraints": "=r,r", "pack": 1, "result_shape_dtypes": [kind]}
    [done] = plgpu.elementwise_inline_asm(WAIT.replace("DELAY", str(delay)), args=[number], **options)
    store(done_ref, at, values=done, mask=at == 0)


def after_begin(operand: Array) -> Array:
    """Returns an operand of a matmul, which then does not begin before a collective that starts when the operand is
    there. On a CPU it does nothing.

    A matmul has a program on each multiprocessor until it ends. If it began before the collective on one GPU and after
    it on another, the collective would wait on the one for the whole matmul, and hold multiprocessors on the other.
    Two H200s, Llama-3 8B: the sum of d_input took 0.2 ms or 2.1, and d_weight 1.8 or 3.4.
    """

    def wait(operand: Array) -> Array:
        number = jnp.zeros(1, jnp.int32)
        results = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (operand, number))
        operands = number, operand
        return run(let_begin_kernel, HEAD_START, operands, results, (1,), in_place=1, warps=1, stages=1)[0]

    return lax.platform_dependent(operand, cuda=wait, default=lambda operand: operand)


def _add_own_rows(rows: Array, axes: tuple[str, ...]) -> Array:
    parts = lax.all_to_all(rows, axes, 0, 0, tiled=True)
    return reduce(add, parts.reshape(lax.axis_size(axes), -1, rows.shape[1]))


def _add_rows(rows: Array, axes: tuple[str, ...]) -> Array:
    missing = -len(rows) % lax.axis_size(axes)
    own = _add_own_rows(jnp.pad(rows, ((0, missing), (0, 0))), axes)
    return lax.all_gather(own, axes, tiled=True)[: len(rows)]


_ordered_sum = collective("linear_ce_ordered_sum", _add_rows, lambda shape, _: shape)
_own_rows_of_ordered_sum = collective(
    "linear_ce_own_rows_of_ordered_sum", _add_own_rows, lambda shape, devices: (shape[0] // devices, *shape[1:])
)
_own_rows_of_sum = collective(
    "linear_ce_own_rows_of_sum",
    lambda rows, axes: lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True),
    lambda shape, devices: (shape[0] // devices, *shape[1:]),
)
_own_columns_of_sum = collective(
    "linear_ce_own_columns_of_sum",
    lambda array, axes: lax.psum_scatter(array, axes, scatter_dimension=1, tiled=True),
    lambda shape, devices: (shape[0], shape[1] // devices),
)
_rows_of_all = collective(
    "linear_ce_rows_of_all",
    lambda rows, axes: lax.all_gather(rows, axes, tiled=True),
    lambda shape, devices: (shape[0] * devices, *shape[1:]),
)
