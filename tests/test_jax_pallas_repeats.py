"""Tests on a GPU that thousands of launches of a kernel give the same bits, where warpgroups take turns with memory."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from programs import Printed, python, run_checks

from jax_pallas.hopper_common import PIECE
from jax_pallas.hopper_gradients import add_d_weight
from jax_pallas.tile_config import padded

LAUNCHES = 3000


def check_old_tiles(rows: int, hidden: int, classes: int, *, starts: bool | None) -> None:
    """Adds the same matmul to the same old d_weight again and again. All of an old tile passes through shared memory.
    The piece of its tile that an element belongs to can be read off its value, so an error shows what was added."""
    piece = jnp.arange(classes) // PIECE
    old = jnp.broadcast_to((piece % 120).astype(jnp.bfloat16)[:, None], (classes, hidden)) + 0
    e = jnp.zeros((-(-rows // 64) * 64, padded(classes)), jnp.bfloat16).at[:rows, :classes].set(1)
    x = jnp.zeros((len(e), hidden), jnp.bfloat16).at[:rows:64].set(1)
    expected = old + jnp.bfloat16(-(-rows // 64))
    sizes = {"vocab": classes, "classes": classes, "vocab_axis": 0, "rows": rows, "starts": starts}

    @jax.jit
    def wrong(e: Array, x: Array, old: Array, expected: Array) -> Array:
        found = add_d_weight(e, x, 0, in_l2=0.0, old=old, **sizes)
        return (found != expected).sum()

    counts = np.array(jax.device_get([wrong(e, x, old, expected) for _ in range(LAUNCHES)]))
    assert not counts.any(), f"{(counts > 0).sum()} of {LAUNCHES} launches are wrong, in up to {counts.max()} elements"


CHECKS = {f"starts {starts}": partial(check_old_tiles, 464, 1152, 262144, starts=starts) for starts in (False, None)}


@pytest.mark.gpu
@pytest.mark.programs(python(Path(__file__).name, *CHECKS), seconds=60)
@pytest.mark.parametrize("name", CHECKS)
def test_old_tiles_are_read_before_the_next_ones_come(name: str, printed: Printed) -> None:
    assert not printed[name]["failure"], printed[name]["failure"]


if __name__ == "__main__":
    run_checks(CHECKS, sys.argv[1:])
