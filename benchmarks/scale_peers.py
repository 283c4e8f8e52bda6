"""Other libraries' losses on several GPUs, for `benchmarks.scale_out`. They are imported only when measured.

With the form "vocabulary" each gets what core_triton gets: the same input (N, D) and targets on all ranks, and a rank's
V / k rows of the head. It returns the mean loss, d_input summed over the ranks, and d_weight of the rank's rows.

    loss-parallel           `F.linear` on DTensors, and PyTorch's `loss_parallel`, with float32 logits as in torchtitan
    loss-parallel-compiled  the same with a compiled loss, as torchtitan compiles it: the matmul is not part of it
    megatron                Megatron-Core's column-parallel linear layer and `vocab_parallel_cross_entropy`
    megatron-fused          the same layer and `fused_vocab_parallel_cross_entropy` (cross_entropy_fusion_impl "native")
    megatron-liger          the same layer and the loss that Liger's `apply_liger_kernel_to_megatron` puts there
    verl                    verl's fused kernels, which compute the entropy too. They leave the sum of d_input to their
                            caller, so it follows as one all-reduce
    liger-tp                `LigerFusedLinearScaledCrossEntropyTPFunction`. `path` of a row says which code Liger chose:
                            its kernels over NVSHMEM, which liger-cute-kernels has, or chunks of 512 tokens

With the form "head-gathered" FSDP2 gathers the head and scatters its gradient, in float32 as core_triton does:

    fsdp2-compiled          float32 logits under torch.compile
    fsdp2-liger             Liger's fused linear cross-entropy

Memory that NVSHMEM takes is not in `workspace_bytes`, but in `device_bytes`.
"""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.methods import UnavailableError, installed, load
from benchmarks.scale_out import Form
from benchmarks.shapes import Mode
from benchmarks.torch_methods import METHODS as ON_ONE_GPU

LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # (input, rows of the head or all of it, target) -> mean loss


@dataclass(frozen=True)
class Peer:
    """One way to compute the loss.

    Args:
        build: from a process group and the device of the arrays to the loss; raises `UnavailableError`.
        package: the distribution whose version goes into the row.
        install: what pip installs.
        form: how tokens and head are divided. With "head-gathered" the loss gets the whole head.
        needs_gpu: it does not run on CPUs.
        sums_input: its backward pass sums d_input over the ranks.
        context: a call runs in it.
        path: returns which of several implementations the library has chosen.
    """

    build: Callable[[Any, torch.device], LossFn]
    package: str
    install: str
    form: Form = "vocabulary"
    needs_gpu: bool = False
    sums_input: bool = True
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    path: Callable[[], str] | None = None

    def about(self) -> dict[str, str]:
        """Returns what a row says of the library."""
        return {"version": installed(self.package)[self.package]} | ({} if self.path is None else {"path": self.path()})


def call(name: str, x: Tensor, w: Tensor, target: Tensor, whole: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a method's call, which returns the loss, d_input (N, D) and d_weight (V / k, D).

    Args:
        name: of the method.
        x: (N, D), on all ranks of the default group the same, or each rank's own.
        w: (V / k, D), the rank's rows of the head.
        target: (N,), classes of the whole head.
        whole: (V, D), the head.

    Raises:
        UnavailableError: the method cannot run here.
    """
    peer, group = PEERS[name], dist.group.WORLD
    if peer.needs_gpu and x.device.type != "cuda":
        raise UnavailableError(f"{name} needs a GPU")
    ranks = dist.get_world_size()
    if len(whole) % ranks:
        raise UnavailableError(f"{name} needs a vocabulary in equal parts, got {len(whole)} classes on {ranks} ranks")
    torch._dynamo.reset()  # every shape compiles as if it were the first
    try:
        loss_fn = peer.build(group, x.device)
    except UnavailableError as error:
        raise UnavailableError(f"{error}; pip install {peer.install}") from error
    if peer.form == "head-gathered":
        return _fsdp2(loss_fn, x, target, whole)

    def run() -> tuple[Tensor, ...]:
        with peer.context():
            loss = loss_fn(x, w, target)
            d_input, d_weight = torch.autograd.grad(loss, (x, w))
        if not peer.sums_input:
            dist.all_reduce(d_input, group=group)
        return loss.detach(), d_input, d_weight

    return run


def _loss_parallel(compiled: bool) -> Callable[[Any, torch.device], LossFn]:
    def build(group: Any, device: torch.device) -> LossFn:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        def of_logits(logits: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(logits.float(), y)

        mesh = init_device_mesh(device.type, (dist.get_world_size(group),))
        loss_fn = torch.compile(of_logits, dynamic=False) if compiled else of_logits

        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            # The backward pass of the first DTensor sums d_input.
            inputs = DTensor.from_local(x, mesh, [Replicate()]), DTensor.from_local(w, mesh, [Shard(0)])
            return loss_fn(F.linear(*inputs), y)

        return loss

    return build


def _in_loss_parallel() -> AbstractContextManager[Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _megatron(loss_of: Callable[[], Callable[..., Tensor]]) -> Callable[[Any, torch.device], LossFn]:
    """With the options of Megatron's layer for a model without sequence parallelism and without APEX."""

    def build(group: Any, device: torch.device) -> LossFn:
        layers, of_logits = load("megatron.core.tensor_parallel"), loss_of()

        def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            # Megatron's arrays are (sequence, batch, ...).
            logits = layers.linear_with_grad_accumulation_and_async_allreduce(
                x[:, None],
                w,
                None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=True,
                sequence_parallel=False,
                tp_group=group,
            )
            return of_logits(logits, y[:, None], tp_group=group).mean()

        return loss

    return build


def _verl(group: Any, device: torch.device) -> LossFn:
    fused = _verl_kernels().linear_cross_entropy

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        log_prob, _ = fused(x, w, y, 1.0, "none", group)
        return (-log_prob).mean()  # the kernels want a contiguous gradient, which that of a mean is not

    return loss


def _verl_kernels() -> ModuleType:
    """Imports verl's kernels without verl itself, whose `__init__` imports ray, tensordict and transformers."""
    spec = importlib.util.find_spec("verl") if "verl" not in sys.modules else None
    if spec is not None and spec.submodule_search_locations:
        for name, folder in (("verl", ""), ("verl.utils", "/utils")):
            package = ModuleType(name)
            package.__path__ = [path + folder for path in spec.submodule_search_locations]
            sys.modules[name] = package
    return load("verl.utils.kernel.linear_cross_entropy")


def _liger_tp(group: Any, device: torch.device) -> LossFn:
    fused = load("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyTPFunction
    if _liger_is_native():
        _start_nvshmem()

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return fused.apply(x, w, y, group).mean()

    return loss


def _liger_is_native() -> bool:
    return load("liger_kernel.ops.cute.fused_linear_scaled_cross_entropy_tp").is_available()


@cache
def _start_nvshmem() -> None:
    nvshmem = load("liger_cute_kernels.nvshmem")
    nvshmem.init_from_pg()
    nvshmem.resolve_team(dist.group.WORLD)


def _liger_path() -> str:
    return "NVSHMEM" if _liger_is_native() else "chunks of 512 tokens"


def _on_one_gpu(name: str) -> Callable[[Any, torch.device], LossFn]:
    return lambda group, device: ON_ONE_GPU[name].build(Mode("train"))


class _Head(nn.Module):
    def __init__(self, weight: Tensor, loss_fn: LossFn) -> None:
        super().__init__()
        self.weight, self.loss_fn = nn.Parameter(weight), loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(x, self.weight, y)


def _fsdp2(loss_fn: LossFn, x: Tensor, target: Tensor, whole: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, head = init_device_mesh(x.device.type, (dist.get_world_size(),)), _Head(whole.clone(), loss_fn)
    fully_shard(head, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))

    def run() -> tuple[Tensor, ...]:
        loss = head(x, target)
        loss.backward()
        d_input, d_weight = x.grad, head.weight.grad
        assert d_input is not None
        assert d_weight is not None
        x.grad = head.weight.grad = None
        return loss.detach(), d_input, d_weight

    return run


_MEGATRON = ("megatron-core", "megatron-core==0.19.2")

PEERS = {
    "loss-parallel": Peer(_loss_parallel(compiled=False), "torch", "torch", context=_in_loss_parallel),
    "loss-parallel-compiled": Peer(_loss_parallel(compiled=True), "torch", "torch", context=_in_loss_parallel),
    "megatron": Peer(_megatron(lambda: load("megatron.core.tensor_parallel").vocab_parallel_cross_entropy), *_MEGATRON),
    "megatron-fused": Peer(
        _megatron(lambda: load("megatron.core.fusions.fused_cross_entropy").fused_vocab_parallel_cross_entropy),
        *_MEGATRON,
    ),
    "megatron-liger": Peer(
        _megatron(lambda: load("liger_kernel.megatron.cross_entropy").LigerMegatronCrossEntropy()),
        "liger-kernel",
        "megatron-core==0.19.2 liger-kernel==0.8.5",
        needs_gpu=True,
    ),
    "verl": Peer(_verl, "verl", "--no-deps verl==0.9.1", needs_gpu=True, sums_input=False),
    "liger-tp": Peer(_liger_tp, "liger-kernel", "liger-kernel==0.8.5", needs_gpu=True, path=_liger_path),
    "fsdp2-compiled": Peer(_on_one_gpu("torch.compile"), "torch", "torch", form="head-gathered"),
    "fsdp2-liger": Peer(
        _on_one_gpu("liger"), "liger-kernel", "liger-kernel==0.8.5", form="head-gathered", needs_gpu=True
    ),
}
