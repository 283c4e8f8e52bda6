"""The gradient of a head that devices gathered for a call: each device gets the sum of its own rows.

A device sends its gradient in parts. Part j has piece j of each device's rows, (devices * n, D) in float32, and is
summed over the devices while the next one is written. The chunks of rows add to arrays of the parts from the first
chunk on: so a part is sent from where it is added up, and is never copied. `d_weight_parts.py` has the chunks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_pallas import vocab_shard
from jax_pallas.devices import Devices
from jax_pallas.tile_config import CLASS_BLOCK, D_BLOCK, STEP, cdiv

# The last part is sent while nothing is multiplied. The sum of d_weight of Llama-3 8B over two H200s takes 3.2 ms.
PARTS = 8

# A part more is a launch more in each chunk, which takes 5 to 8 us: so long calls have fewer parts.
MOST_LAUNCHES, LEAST_PARTS = 40, 2


class HeadScatter(NamedTuple):
    """How the gradient of one gathered head is sent.

    A device's pieces begin with some classes of the device before, so that the exponentials of the first one begin at a
    multiple of 64: `hopper_gradients.OfShards`. They end with classes of the next one, or past the last, so that they
    have whole tiles.
    """

    axes: tuple[str, ...]  # whose devices have shards of the head
    devices: int
    shard_rows: int
    sizes: tuple[int, ...]  # rows of each device that a part has; all but the last have the same

    @staticmethod
    def of(devices: Devices, vocab: int, hidden: int, *, chunks: int, programs: int) -> "HeadScatter":
        """Returns how the gradient of a gathered head of `vocab` rows is sent.

        Args:
            chunks: of rows.
            programs: of a matmul. The tiles of a part fill whole waves of them, as far as they can.
        """
        count = lax.axis_size(devices.gather_axes)
        shard_rows = vocab // count
        most = max(device * shard_rows % STEP for device in range(count))
        blocks, tiles = cdiv(shard_rows + most, CLASS_BLOCK), count * cdiv(hidden, D_BLOCK)
        least = cdiv(blocks, max(LEAST_PARTS, min(PARTS, MOST_LAUNCHES // chunks)))

        def of_step(step: int) -> list[int]:
            return [min(step, blocks - first) for first in range(0, blocks, step)]

        def waves(step: int) -> int:
            return sum(cdiv(size * tiles, programs) for size in of_step(step))

        step = min(range(least, least + least // 8 + 1), key=waves)
        return HeadScatter(devices.gather_axes, count, shard_rows, tuple(CLASS_BLOCK * size for size in of_step(step)))

    @property
    def starts(self) -> tuple[int, ...]:
        """The rows of each device before those of a part."""
        return tuple(part * self.sizes[0] for part in range(len(self.sizes)))

    def first_class(self, device: Any) -> Any:
        """Returns the class that a device's first piece begins with."""
        return device * self.shard_rows // STEP * STEP

    def classes(self, part: int) -> Array:
        """Returns the class of each row of a part, (devices * n,) int32."""
        rows = jnp.arange(self.starts[part], self.starts[part] + self.sizes[part], dtype=jnp.int32)
        return (self.first_class(jnp.arange(self.devices, dtype=jnp.int32))[:, None] + rows).reshape(-1)

    def places(self, target: Array) -> Array:
        """Returns the places of classes (N,) int32 in the rows of all parts, one after the other. Negative ones stay
        negative."""
        device = target // self.shard_rows
        row = target - self.first_class(device)
        part = row // self.sizes[0]
        size = jnp.where(part == len(self.sizes) - 1, self.sizes[-1], self.sizes[0])
        start = part * self.sizes[0]
        return jnp.where(target < 0, target, self.devices * start + device * size + row - start)

    def send(self, sums: Array) -> Array:
        """Returns this device's rows of the sum of a part, (n, D)."""
        return vocab_shard.own_part_of_sum(sums, self.axes, 0)

    def own_rows(self, parts: Sequence[Array]) -> Array:
        """Returns the rows of this device, (shard_rows, D), of what `send` returned of each part."""
        rows, device = jnp.concatenate(parts), lax.axis_index(self.axes)
        if self.shard_rows % STEP == 0:
            return rows[: self.shard_rows]
        return lax.dynamic_slice_in_dim(rows, device * self.shard_rows % STEP, self.shard_rows)
