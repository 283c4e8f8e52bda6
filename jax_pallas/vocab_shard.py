"""What the devices exchange that divide the vocabulary: each has the rows of the head of its own classes.

The devices of a mesh axis have the same tokens. Where they run scaled exponentials, `shard_rows.py` has what they
exchange. Otherwise each runs the two passes of `chunked.py` over its own classes, and they exchange twice in each chunk
of rows:

    after the first pass   the `Partial` statistics, some numbers for each row. Each device merges those of all devices
                           in the order of the axis, so all have the same bits.
    after the second pass  d_input is summed over the devices, in float32 unless the caller asks for less.

d_weight and d_bias stay where they are. All shards have the same number of rows, so the last ones may have rows past
the classes. These are masked, because which they are is known only when the program runs.

`psum_p` and not `jax.lax.psum`: the program of an operator has no mesh (`primitives.py`), so its arrays do not have the
types by which JAX tracks what varies. `primitives.py` gives the results their types, and the other collectives theirs.
"""

from functools import reduce

import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import row_math
from jax_pallas.devices import Devices
from jax_pallas.primitives import collective
from jax_pallas.row_math import Partial


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


def sum_of_d_input(devices: Devices, d_input: Array) -> Array:
    """Returns the sum over all shards of their parts of rows of d_input, (n, D) float32."""
    if not devices.vocab_axes:
        return d_input
    return all_sum(devices, d_input.astype(devices.reduce_dtype)).astype(jnp.float32)


def all_sum(devices: Devices, array: Array) -> Array:
    """Returns the sum of an array over the devices that divide the vocabulary."""
    return lax.psum_p.bind(array, axes=devices.vocab_axes, axis_index_groups=None)


def gather(devices: Devices, numbers: Array) -> Array:
    """Returns numbers (m, n) of each device as (m, k, n), the same on all devices: a sum of zeros and one number."""
    rank = lax.axis_index(devices.vocab_axes)
    places = jnp.zeros((numbers.shape[0], devices.shards, numbers.shape[1]), numbers.dtype)
    return all_sum(devices, places.at[:, rank].set(numbers))


def own_sum_of_d_input(devices: Devices, d_input: Array) -> Array:
    """Returns this device's rows of the sum over all shards of their parts of d_input, (n, D) float32, of the devices
    that divide the rows of the input, as many of each, one after the other."""
    own = _own_rows_of_sum(d_input.astype(devices.reduce_dtype), devices.gather_axes)
    if devices.shared_vocab_axes:
        axes = tuple(axis for axis in devices.vocab_axes if axis in devices.shared_vocab_axes)
        own = lax.psum_p.bind(own, axes=axes, axis_index_groups=None)
    return own.astype(jnp.float32)


def rows_of_all(devices: Devices, rows: Array) -> Array:
    """Returns rows (m, D) of each device that divides the rows of the input, one after the other."""
    return _rows_of_all(rows, devices.gather_axes)


_own_rows_of_sum = collective(
    "linear_ce_own_rows_of_sum",
    lambda rows, axes: lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True),
    lambda shape, devices: (shape[0] // devices, *shape[1:]),
)
_rows_of_all = collective(
    "linear_ce_rows_of_all",
    lambda rows, axes: lax.all_gather(rows, axes, tiled=True),
    lambda shape, devices: (shape[0] * devices, *shape[1:]),
)
