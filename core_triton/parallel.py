"""The style of `torch.distributed.tensor.parallel.parallelize_module` for `LinearCrossEntropy`."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from core_triton.dtensors import OF_TOKENS
from core_triton.module import LinearCrossEntropy


class VocabParallel(ParallelStyle):
    """Divides the classes of a `LinearCrossEntropy` among the ranks of a mesh, as `ColwiseParallel` does for a
    `torch.nn.Linear`.

    To tie the head, divide the embedding first, with `RowwiseParallel`, and set `head.weight = embedding.weight`. A
    parameter that is already divided like this stays the same parameter.

    Args:
        input_layouts: of the plain tensors that the module gets as input, target and token_weight. Replicate(): all
            ranks have the same tokens. Shard(i): each has a part of the tokens of axis i, as after a layer with
            sequence parallelism, and the same number of them; then the tokens or the head are gathered.
        use_local_output: return a plain Tensor in place of a DTensor.

    Raises:
        TypeError: the module is not a `LinearCrossEntropy`.
        ValueError: input_layouts is neither Replicate() nor Shard(i) with an i of 0 or more.

    Example:
        >>> import torch, core_triton
        >>> from core_triton.parallel import VocabParallel
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        >>> head = parallelize_module(core_triton.LinearCrossEntropy(16, 100), mesh, VocabParallel())
        >>> head(torch.randn(6, 16), torch.arange(6)).backward()
        >>> head.weight.grad.placements
        (Shard(dim=0),)
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, *, input_layouts: Placement | None = None, use_local_output: bool = True) -> None:
        super().__init__()
        self.input_layouts = Replicate() if input_layouts is None else input_layouts
        if type(self.input_layouts) not in (Replicate, Shard) or getattr(self.input_layouts, "dim", 0) < 0:
            raise ValueError(
                f"input_layouts must be Replicate() or Shard(i) with an i of 0 or more, got {self.input_layouts}"
            )
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LinearCrossEntropy):
            raise TypeError(f"module must be a LinearCrossEntropy for VocabParallel, got {type(module).__name__}")
        layouts = partial(_with_layout, self.input_layouts, device_mesh)
        module.register_forward_pre_hook(layouts, with_kwargs=True)
        local = self.use_local_output
        return distribute_module(module, device_mesh, _divide, None, lambda _, loss, mesh: _output(loss, local))


def _divide(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor) and (parameter.device_mesh, parameter.placements) == (mesh, (Shard(0),)):
            continue  # it may be the weight of an embedding too
        divided = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _with_layout(
    layout: Placement, mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def made(value: Any) -> Any:
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        return DTensor.from_local(value, mesh, [layout], run_check=False) if plain else value

    return tuple(map(made, inputs)), {name: made(one) if name in OF_TOKENS else one for name, one in named.items()}


def _output(loss: Any, local: bool) -> Any:
    return loss.to_local() if local and isinstance(loss, DTensor) else loss
