"""Counts the memory that PyTorch operators allocate and the matmuls that they run, and lists them, without a GPU."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core_triton import operators

MATMULS = ("matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")


class Meter(TorchDispatchMode):
    """While it is active, counts the live and peak bytes of storages that operators allocate, and matmuls, and collects
    the operators.

    It also counts what the project's operators allocate internally.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[weakref.ref, int] = {}
        self.peak = 0
        self.largest = 0  # bytes of the largest storage
        self.matmuls: list[str] = []
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake array is asked for its device, which most calls do
            return func(*args, **kwargs)
        inputs = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if func.namespace == "linear_ce":
            with self:
                return operators.IMPLEMENTATIONS[func._schema.name](*args, **kwargs)
        out = func(*args, **kwargs)
        if func.namespace == "aten":
            self.operators.add(func.overloadpacket)
        if func.overloadpacket.__name__ in MATMULS:
            self.matmuls.append(func.overloadpacket.__name__)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in inputs:
                self._add(storage)
        return out

    def _add(self, storage: Any) -> None:
        reference = weakref.ref(storage, lambda gone: self.live.pop(gone, None))
        if reference not in self.live:
            self.live[reference] = storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
            self.peak = max(self.peak, sum(self.live.values()))


def bytes_of(*tensors: Tensor | None) -> int:
    """Returns the total bytes of the tensors' storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)
