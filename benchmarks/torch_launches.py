"""What a call of core_triton launches on a GPU that is not present, for `benchmarks.same_launches`.

The call runs on fake tensors. `launch_recorder.py` records the launches of kernels, and `Steps` all other operators.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks import results
from benchmarks.launch_recorder import Launch, compile_launch, fake_gpu, type_of
from benchmarks.same_launches import CODE, CONSTEXPRS, Step, bare
from benchmarks.shapes import Mode, Shape

CAPABILITY = 90  # of results.COMPARED_GPUS
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class Steps(TorchDispatchMode):
    """While it is active, collects the steps of a call, those of kernels with their `Launch`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Step, Launch | None]] = []
        self._storages: dict[int, tuple[int, Any]] = {}  # kept alive, so that no later one has the same address

    def launched(self, launch: Launch, grid: tuple[int, ...], values: dict[str, Any]) -> None:
        """Adds a launch."""
        step = {"kernel": f"{launch.kernel.__module__}.{launch.kernel.__name__}", "grid": str(tuple(grid))}
        constexprs = dict(launch.constexprs)
        step |= {name: self._described(value) for name, value in values.items() if name not in constexprs}
        step |= {name: repr(value) for name, value in launch.options}
        self.found.append((step | {CONSTEXPRS: repr(constexprs)}, launch))

    def multiplied(self, *matrices: Tensor, first: bool) -> None:
        """Adds a matmul of the library."""
        names = ("total", "a", "b")
        operands = {name: self._described(matrix) for name, matrix in zip(names, matrices, strict=True)}
        self.found.append(({"kernel": "matmul", **operands, "first": str(first)}, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from core_triton import operators, problem

        kwargs = kwargs or {}
        if func is torch.ops.linear_ce.scaled.default:  # autograd scales in place where no operator is needed
            factors, saved = operators.Factors(*args[:2]), problem.Gradients(*args[2:5])
            with self:
                operators.scale(saved, factors, saved, args[5])
            return [gradient for gradient in saved if gradient is not None]
        if func.namespace == "linear_ce":
            with self:
                return operators.IMPLEMENTATIONS[func._schema.name](*args, **kwargs)
        if func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in ALLOCATIONS:
            described = tree_map(self._described, (args, kwargs))
            self.found.append(({"kernel": str(func), "arguments": str(described)}, None))
        return func(*args, **kwargs)

    def _described(self, value: Any) -> str:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
            layout = f"{list(value.shape)}, strides {list(value.stride())}"
            return f"{value.dtype} {layout}, from {value.storage_offset()} of array {number}"
        if hasattr(value, "block_shape"):  # a tensor descriptor
            return f"{type_of(value)} {list(value.shape)}, strides {list(value.strides)}, {self._described(value.base)}"
        return f"{type_of(value)} {value!r}" if isinstance(value, int | float) else repr(value)


def steps_and_launches(shape: Shape, mode: Mode, gpu: str) -> list[tuple[Step, Launch | None]]:
    """Returns the steps of the forward and backward pass of a call, those of kernels with their launches."""
    import core_triton

    steps = Steps()
    with fake_gpu(CAPABILITY, gpu, steps.launched, steps.multiplied), steps:
        x, w = (
            torch.empty(rows, shape.d, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for rows in (shape.n, shape.v)
        )
        y = torch.empty(shape.n, dtype=torch.int64, device="cuda")
        loss: Any = core_triton.linear_cross_entropy(x, w, y, memory_budget=mode.memory_budget, implementation="triton")
        with torch.no_grad():  # loss.backward() would need a GPU
            loss.grad_fn.apply(torch.empty((), device="cuda"))
    return steps.found


@cache
def code_of(launch: Launch) -> str:
    """Returns a hash of the PTX of a launch and of its shared memory, which PTX does not contain."""
    compiled = compile_launch(launch, CAPABILITY)
    return results.short_hash(bare(compiled.ptx), str(compiled.shared))


def steps_of(shape: Shape, mode: Mode, gpu: str) -> list[Step]:
    """Returns the steps of the forward and backward pass of a call, with the code of kernels."""
    found = steps_and_launches(shape, mode, gpu)
    return [step if launch is None else step | {CODE: code_of(launch)} for step, launch in found]
