"""Checks of a gathered head whose gradient is sent while the last chunk is computed. `torch_ranks.py` runs them with
the kernels, on all of its ranks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from dtensor_checks import ON_GPUS, mesh_of
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import core_triton
from core_triton.head_scatter import HeadScatter

# On CPUs the number of classes is no multiple of the ranks. Kernels of GPUs need a multiple of 8 on each rank. The
# budgets hold a third of a rank's tokens, or less.
TOKENS, HIDDEN, CLASSES, BUDGET = (4096, 512, 20016, 30_000_000) if ON_GPUS else (88, 32, 299, 90_000)
DEVICE, PARTS = ("cuda", 14) if ON_GPUS else ("cpu", 13)

DIFFERENTIATED = ("input", "linear_weight", "linear_bias")


def drawn() -> dict[str, Tensor]:
    """Returns the arrays of a call. A fourth of the tokens are ignored, and NaN. Some classes have many targets."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, target = normal(TOKENS, HIDDEN), torch.randint(CLASSES, (TOKENS,), generator=generator)
    target[::4], target[1 : TOKENS // 2 : 3] = -100, CLASSES // 2
    x[target == -100] = torch.nan
    w, b = normal(CLASSES, HIDDEN) * 0.7 / HIDDEN**0.5, normal(CLASSES)
    arrays = {"input": x.bfloat16(), "linear_weight": w.bfloat16(), "linear_bias": b, "target": target}
    return {name: one.to(DEVICE) for name, one in arrays.items()}


def exact_gradients(arrays: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Returns the gradients of the mean loss, float64."""
    x, w, b, target = (one.double() if one.is_floating_point() else one for one in arrays.values())
    leaves = {"input": x.nan_to_num(), "linear_weight": w, "linear_bias": b}
    logits = torch.nn.functional.linear(*(one.requires_grad_() for one in leaves.values()))
    loss = torch.nn.functional.cross_entropy(logits, target, **options)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@contextmanager
def counted_parts() -> Iterator[list[int]]:
    """Collects in how many parts the gradients of heads are sent while a chunk is computed."""
    found, send = list[int](), HeadScatter.send_parts

    def counted(self: Any, write: Any, memory: Tensor | None = None) -> Tensor:
        if memory is not None:
            found.append(len(self.parts()))
        return send(self, write, memory)

    with mock.patch.object(HeadScatter, "send_parts", counted):
        yield found


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def check_gradients(
    given: dict[str, Any],
    exact: dict[str, Tensor],
    *,
    parts: int = PARTS,
    factor: float = 1.0,
    one_chunk: bool = False,
    **options: Any,
) -> None:
    """Asserts that a rank's call sends the gradient of the head in `parts` parts, or with 0 when it is complete, and
    that its sum has the error of rounding it once. Other sums in bfloat16 than those of the first chunks would add half
    of that. `factor`: of the gradient of a rank's input. `one_chunk`: then nothing is allocated for other sums."""
    leaves = {name: given[name].requires_grad_() for name in DIFFERENTIATED if given[name].dtype.is_floating_point}
    options = {"memory_budget": BUDGET, "implementation": "triton"} | options
    with counted_parts() as sent, mock.patch.object(torch, "empty_like", wraps=torch.empty_like) as made:
        loss = core_triton.linear_cross_entropy(**given, **options)
        found = torch.autograd.grad(loss, list(leaves.values()))
    whole = [one.full_tensor() if isinstance(one, DTensor) else one / factor for one in found]
    assert sent == [parts] * (parts > 0), sent
    if one_chunk:
        assert not [call for call in made.call_args_list if call.args[0].shape == exact["linear_weight"].shape]
    for name, one in zip(leaves, whole, strict=True):
        assert one.dtype == given[name].dtype
        if one.numel():
            found_error, rounded = error(one, exact[name]), error(exact[name].bfloat16(), exact[name])
            # Exponentials in 16 bits are the only error of float32.
            of_head = 1.1 * rounded if one.dtype == torch.bfloat16 else 5e-4
            most = 1.5 * rounded if name == "input" else of_head
            assert found_error < most, (name, found_error, rounded)


def on_mesh(arrays: dict[str, Tensor], mesh: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns the arrays, some of them as DTensors that the ranks of the last dimension of a mesh have shards of."""
    places = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return {name: distribute_tensor(one, mesh, places) if name in names else one for name, one in arrays.items()}


def check_sent_head(rank: int, ranks: int) -> None:
    arrays, mesh = drawn(), mesh_of(ranks, DEVICE)
    given = on_mesh(arrays, mesh, arrays)
    check_gradients(given, exact_gradients(arrays), gather="head")
    given = {name: one.detach().float() if one.is_floating_point() else one for name, one in given.items()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):  # one chunk, whose parts are not rounded before they are added
        check_gradients(given, exact_gradients(arrays), gather="head", memory_budget=2**29, one_chunk=True)


def check_sent_head_by_the_default(rank: int, ranks: int) -> None:
    """Without a memory_budget, under an upstream gradient, which the backward pass multiplies in pieces."""
    arrays, mesh = drawn(), mesh_of(ranks, DEVICE)
    given = on_mesh(arrays, mesh, arrays)
    head = given["linear_weight"].requires_grad_()
    options: dict[str, Any] = {"memory_budget": None, "implementation": "triton", "gather": "head"}
    loss = 2 * core_triton.linear_cross_entropy(**given, **options)
    [found] = torch.autograd.grad(loss, [head], retain_graph=True)
    exact = 2 * exact_gradients(arrays)["linear_weight"]
    assert isinstance(found, DTensor)
    assert error(found.full_tensor(), exact) < 1.1 * error(exact.bfloat16(), exact)
    with pytest.raises(RuntimeError, match="have no second derivative"):
        torch.autograd.grad(loss, [head], create_graph=True)


def check_sent_head_of_fsdp2(rank: int, ranks: int) -> None:
    """The ranks have different numbers of tokens, and average gradients."""
    arrays, own = drawn(), (slice(0, TOKENS // 10), slice(TOKENS // 10, TOKENS))[rank]
    weight = torch.linspace(0.5, 1.5, CLASSES, device=DEVICE)
    exact = exact_gradients(arrays, label_smoothing=0.1, weight=weight.double())
    given = on_mesh(arrays, mesh_of(ranks, DEVICE), ("linear_weight", "linear_bias"))
    given |= {"input": arrays["input"][own].clone(), "target": arrays["target"][own]}
    exact["input"] = exact["input"][own]
    options = {"label_smoothing": 0.1, "weight": weight, "token_group": dist.group.WORLD}
    check_gradients(given, exact, factor=ranks, **options)


def check_sent_head_of_padding(rank: int, ranks: int) -> None:
    """The last classes are padding, and those of the last rank begin with it. A rank without tokens sends zeros."""
    arrays, classes = drawn(), CLASSES // 2
    arrays["target"] = torch.where(arrays["target"] < 0, -100, arrays["target"] % classes)
    valid = {**arrays, **{name: arrays[name][:classes] for name in ("linear_weight", "linear_bias")}}
    exact = exact_gradients(valid)
    for name in ("linear_weight", "linear_bias"):
        exact[name] = torch.cat([exact[name], exact[name].new_zeros(CLASSES - classes, *exact[name].shape[1:])])
    given = on_mesh(arrays, mesh_of(ranks, DEVICE), ("linear_weight", "linear_bias"))
    own = slice(0, TOKENS * rank)
    given |= {"input": arrays["input"][own].clone(), "target": arrays["target"][own]}
    exact["input"] = exact["input"][own]
    options = {"vocab_size": classes, "token_group": dist.group.WORLD}
    check_gradients(given, exact, parts=PARTS * rank, factor=ranks, **options)


def check_sent_head_in_float32(rank: int, ranks: int) -> None:
    """The kernels compute with two matrices in 16 bits in place of it. The ranks of one dimension have copies of it."""
    arrays, mesh = drawn(), init_device_mesh(DEVICE, (ranks, 1), mesh_dim_names=("data", "tensor"))
    arrays["linear_weight"] = arrays["linear_weight"].float() * 1.001
    given = on_mesh(arrays, mesh, ("linear_weight", "linear_bias"))
    own = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    exact = exact_gradients(arrays)
    exact["input"] = exact["input"][own]
    given |= {"input": arrays["input"][own].clone(), "target": arrays["target"][own]}
    options = {"head_precision": "float32", "token_group": dist.group.WORLD}
    check_gradients(given, exact, parts=16 if ON_GPUS else 15, factor=ranks, **options)


HEAD_CHECKS: dict[str, Callable[[int, int], None]] = {
    "sent_head": check_sent_head,
    "sent_head_by_the_default": check_sent_head_by_the_default,
    "sent_head_of_fsdp2": check_sent_head_of_fsdp2,
    "sent_head_of_padding": check_sent_head_of_padding,
    "sent_head_in_float32": check_sent_head_in_float32,
}
