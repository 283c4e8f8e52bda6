"""Runs kernels in Triton's Gluon dialect for Hopper in NumPy, as `gluon_in_numpy` does those for 8.x.

The loading warp and the warpgroups of a program are threads that take turns. What is checked besides:

- A program does not deadlock, and no copy or matmul is in flight when a warpgroup ends.
- Copies of TMA and matmuls are done either at once or as late as a wait allows, so an operand that is overwritten too
  early, or read before it is there, changes the result.
- What TMA stores from shared memory was written before a fence.
"""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import gluon_in_numpy
import numpy as np
from gluon_in_numpy import Language, Memory, Shared, Value, rounded

from core_triton.launch import Blocks


class Descriptor:
    """A tensor descriptor."""

    layout = None

    def __init__(self, blocks: Blocks, memory: Memory) -> None:
        self.memory, self.dtype, self.offset = memory, memory.dtype, blocks.base.storage_offset()
        self.shape, self.strides, self.itemsize = blocks.shape, blocks.strides, blocks.base.itemsize
        assert self.strides[1] == 1
        assert self.strides[0] * self.itemsize % 16 == 0
        assert self.offset * self.itemsize % 16 == 0
        self.block_type = SimpleNamespace(shape=list(blocks.block))

    def places(self, corner: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the offsets of a block's elements, 0 outside of the matrix, and which elements are inside."""
        assert int(corner[1]) * self.itemsize % 16 == 0  # a GPU calls such a copy an illegal instruction
        row, column = (int(first) + np.arange(size) for first, size in zip(corner, self.block_type.shape, strict=True))
        inside = ((row >= 0) & (row < self.shape[0]))[:, None] & ((column >= 0) & (column < self.shape[1]))[None, :]
        offsets = self.offset + row[:, None] * self.strides[0] + column[None, :]
        return np.where(inside, offsets, 0), inside


class Barrier:
    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []  # in flight

    def advance(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase ^ 1, self.count


class Thread(threading.local):
    """The state of a warpgroup, or of the loading warp."""

    def __init__(self) -> None:
        self.matmuls: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []
        self.unfenced: list[np.ndarray] = []


class HopperShared(Shared):
    def __init__(self, data: np.ndarray, dtype: str, thread: Thread) -> None:
        super().__init__(data, dtype)
        self.thread = thread

    def _part(self, data: np.ndarray) -> "HopperShared":
        return HopperShared(data, self.dtype, self.thread)

    def reinterpret(self, dtype: str, shape: Sequence[int], layout: Any) -> "HopperShared":
        assert dtype == self.dtype
        return self._part(self.data.reshape(shape))

    def store(self, value: Value) -> None:
        assert value.data.shape == self.data.shape
        self.data[...] = rounded(value.data, self.dtype)
        self.thread.unfenced.append(self.data)


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, stage: Any) -> Barrier:
        return self.barriers[int(stage)]


class HopperLanguage(Language):
    """One program. It is also the modules `mbarrier` and `tma`."""

    def __init__(self, program: int, programs: Sequence[int], *, late: bool) -> None:
        super().__init__(program, programs)
        self.late, self.thread, self.turn = late, Thread(), threading.Condition()
        self.failed: list[BaseException] = []
        self.running = self.waiting = 0  # threads; those that wait are still to look at what changed last
        self.names = {
            **Language.names,
            "mbarrier": self,
            "tma": self,
            "tma_load": self.tma_load,
            "tma_store": self.tma_store,
            "thread_barrier": self.thread_barrier,
            "reinterpret": HopperShared.reinterpret,
            "warpgroup_mma": self.warpgroup_mma,
            "warpgroup_mma_wait": self.warpgroup_mma_wait,
            "fence_async_shared": self.thread_fence,
            "minus_infinity_outside": lambda value, inside: self.where(inside > 0, value, -np.inf),
            "rounded_here": lambda value, dtype: value.to(dtype),
            "async_add_shared_to_global": self.async_add_shared_to_global,
        }

    NVMMADistributedLayout = MBarrierLayout = Language.BlockedLayout

    def allocate_shared_memory(self, dtype: str, shape: Sequence[int], layout: Any) -> Any:
        if dtype == self.int64:
            return Barriers(shape[0])
        return HopperShared(super().allocate_shared_memory(dtype, shape, layout).data, dtype, self.thread)

    def _wake(self) -> None:
        self.waiting = 0
        self.turn.notify_all()

    def thread_barrier(self) -> None:
        pass

    def thread_fence(self) -> None:
        self.thread.unfenced.clear()

    def warp_specialize(self, partitions: Sequence[tuple[Any, Any]], warps: Any, registers: Any) -> None:
        def run(function: Any, arguments: Any) -> None:
            with self.turn:
                try:
                    function(*arguments)
                    self.store_wait(0)
                    assert not self.thread.matmuls, "matmuls are in flight when a warpgroup ends"
                except BaseException as error:  # raised again below
                    self.failed.append(error)
                self.running -= 1
                self._wake()

        threads = [threading.Thread(target=run, args=one) for one in partitions]
        self.running = len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]

    # mbarrier

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.bytes += size
        self.arrive(barrier, count=1)

    def arrive(self, barrier: Barrier, count: int, pred: Any = True) -> None:
        if pred:
            barrier.left -= count
            assert barrier.left >= 0
            barrier.advance()
            self._wake()

    def wait(self, barrier: Barrier, phase: int) -> None:
        """Waits until the phase of this parity is over."""
        for copy in barrier.copies:
            copy()
        barrier.copies.clear()
        while barrier.phase == phase and not self.failed:
            self.waiting += 1
            assert self.waiting < self.running, "a deadlock"
            self.turn.wait()
            for copy in barrier.copies:
                copy()
            barrier.copies.clear()
        assert not self.failed, "another warpgroup failed"

    # tma

    def tma_load(self, descriptor: Descriptor, corner: Sequence[Any], barrier: Barrier, buffer: HopperShared) -> None:
        offsets, inside = descriptor.places(corner)
        assert offsets.shape == buffer.data.shape

        def copy() -> None:
            buffer.data[...] = np.where(inside, descriptor.memory.data[offsets], 0.0)
            barrier.bytes -= offsets.size * (4 if descriptor.dtype == "f32" else 2)
            barrier.advance()
            self._wake()

        if self.late:
            barrier.copies.append(copy)
            self._wake()
        else:
            copy()

    def _store(self, descriptor: Descriptor, corner: Sequence[Any], buffer: HopperShared, *, adds: bool) -> None:
        assert not any(np.shares_memory(buffer.data, written) for written in self.thread.unfenced), "not fenced"
        assert min(int(place) for place in corner) >= 0, f"an H100 stores nothing at {corner}: illegal instruction"
        offsets, inside = descriptor.places(corner)
        memory, places = descriptor.memory, offsets[inside]

        def store() -> None:
            assert not memory.written[places].any(), "an element is written twice"
            memory.written[places] = True
            total = buffer.data[inside] + (memory.data[places] if adds else 0.0)
            memory.data[places] = rounded(total, memory.dtype)

        self.thread.stores.append(store)
        if not self.late:
            self.store_wait(0)

    def tma_store(self, *arguments: Any) -> None:
        self._store(*arguments, adds=False)

    def async_add_shared_to_global(self, *arguments: Any) -> None:
        self._store(*arguments, adds=True)

    def store_wait(self, pending: int) -> None:
        while len(self.thread.stores) > pending:
            self.thread.stores.pop(0)()

    # wgmma

    def warpgroup_mma(self, a: Any, b: Shared, acc: Value, *, use_acc: bool = True, is_async: bool) -> Value:
        assert is_async
        assert a.dtype == b.dtype

        def multiply() -> None:
            acc.data[...] = a.data @ b.data + (acc.data if use_acc else 0.0)

        self.thread.matmuls.append(multiply)
        if not self.late:
            self.warpgroup_mma_wait(0, deps=[acc])
        return acc

    def warpgroup_mma_wait(self, pending: int, deps: Sequence[Any]) -> Any:
        while len(self.thread.matmuls) > pending:
            self.thread.matmuls.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)


def run(modules: Sequence[Any], kernel: Any, grid: Sequence[int], *arguments: Any, late: bool, **options: Any) -> None:
    """Runs a launch as `gluon_in_numpy.run` does. A kernel that is not for Hopper runs too."""

    def language(program: int, programs: Sequence[int]) -> Language:
        return HopperLanguage(program, programs, late=late)

    gluon_in_numpy.run(
        modules, kernel, grid, *arguments, late=late, language=language, descriptor=Descriptor, **options
    )
