"""Additions of TMA to device memory, which Mosaic's interpreter does not have."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import pytest


@pytest.fixture(autouse=True)
def additions_in_l2() -> Iterator[None]:
    """Adds `reduction_op="add"` of `plgpu.copy_smem_to_gmem` to Mosaic's interpreter, which has no reductions.

    Tests that import this fixture use it. The addition happens at once and not in the background, so a kernel that
    forgets to wait for it is not found.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory  # most tests do not interpret Mosaic

    usual: Any = gpu_callbacks.copy_smem_to_gmem

    def copy(*, reduction_op: Any, **arguments: Any) -> Any:
        if reduction_op != "add":
            return usual(reduction_op=reduction_op, **arguments)
        memory: Any = gpu_callbacks._get_shared_memory()
        thread = arguments["thread"]

        def place(name: str) -> tuple[Any, Any]:
            key = shared_memory.HostAllocationKey.from_array(arguments[f"{name}_allocation_key_as_array"])
            moves = gpu_callbacks._remove_noop_transforms(arguments[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, moves))

        (source, read), (target, written) = place("src"), place("dst")
        added = memory.get_buffer_content(source, read, thread)[0]
        shape = tuple(memory.buffer_shape_and_dtype(target).shape)
        if (inside := gpu_callbacks._clip_store_to_shape(written, added, shape)) is not None:
            written, added = inside
            old = memory.get_buffer_content(target, written, thread)[0]
            memory.store_buffer_content(target, written, old + added, thread)
        return arguments["token"]

    with mock.patch.object(gpu_callbacks, "copy_smem_to_gmem", copy):
        yield
