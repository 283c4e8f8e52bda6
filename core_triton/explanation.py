"""What `explain` returns: which implementation a call runs, why, and the plan of the call."""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from core_triton import gathered_tokens, ops, saved_ops
from core_triton.arguments import Groups, Implementation, check_are_tensors, choose, decide, of_vocab_group
from core_triton.grad_into import check_grad_into
from core_triton.plan import DeviceInfo, ExecutionPlan, Stage
from core_triton.problem import NeedsGrad, Problem
from core_triton.vocab_shard import VocabShard
from linear_ce.gpus import gpu_named
from linear_ce.spec import LossSpec, check_flag, check_saved_budget


class Explanation(Implementation):
    """What `explain` returns: an `Implementation` with the plan of the call. `str` describes both in a few lines."""

    plan: ExecutionPlan

    def __new__(cls, name: str, reason: str, plan: ExecutionPlan) -> "Explanation":
        self = super().__new__(cls, name, reason)
        self.plan = plan
        return self

    def __str__(self) -> str:
        return f"implementation: {self.name}, {self.reason}\n{self.plan}"


def explained(
    input: Tensor,
    linear_weight: Tensor,
    spec: LossSpec,
    implementation: str | None,
    *,
    gradients: bool,
    memory_budget: int | None,
    saved_budget: int,
    grad_into: Tensor | None,
    with_entropy: bool,
    batch_invariant: bool,
    device: str | None,
    vocab_group: "dist.ProcessGroup | None",
    sequence_parallel: bool,
) -> Explanation:
    """Returns the implementation and the plan of a call: the arguments are those of `linear_ce.explain`."""
    gpu = None
    if device is not None:
        capability, multiprocessors, *_ = gpu_named(device)
        gpu = DeviceInfo("cuda", capability, multiprocessors, device)
    if torch.compiler.is_compiling():
        return choose(input.device, implementation, gpu)  # pyright: ignore[reportReturnType]
    check_are_tensors({"input": input, "linear_weight": linear_weight, "grad_into": grad_into})
    rows = torch.empty(input.shape[:-1], device="meta")  # a target, and anything else of rows
    check_grad_into(grad_into, input, linear_weight, explains=True)
    check_flag("gradients", gradients)
    check_flag("with_entropy", with_entropy)
    check_flag("sequence_parallel", sequence_parallel)
    named = {"input": input, "linear_weight": linear_weight, "target": rows.long(), "grad_into": grad_into}
    infos = tuple((name, tensor.shape, tensor.dtype) for name, tensor in named.items() if tensor is not None)
    how = memory_budget, implementation, batch_invariant, saved_budget
    group, rank, ranks, reduce_dtype = of_vocab_group(Groups(vocab_group))
    found = decide(spec, input.device, infos, *how, rank, ranks, gpu)
    classes, budget, saved_budget, name, offset, shard_rows = found
    tokens = rows.numel() if sequence_parallel else 0
    if tokens:
        if not ranks:
            raise ValueError("vocab_group must be a process group with sequence_parallel=True, got None")
        rows = rows.new_empty(ranks * tokens)
    shard = VocabShard(group, ranks, offset, shard_rows, reduce_dtype, tokens) if ranks else None
    flat = input.reshape(-1, input.shape[-1])
    of_shard: dict[str, Any] = {"vocab_offset": offset, "shard": shard, "grad_into": grad_into}
    problem = Problem(flat, linear_weight, None, rows.long(), rows, None, spec, classes, **of_shard)
    needs_grad = NeedsGrad(gradients, gradients, False)
    given = {"grad_into": grad_into is not None, "head_precision": spec.head_precision, "with_entropy": with_entropy}
    check_saved_budget(saved_budget, spec.reduction, **given)
    asked: dict[str, Any] = {"entropy": with_entropy, "batch_invariant": batch_invariant}
    on = gpu or ops.device_of(input.device, name)
    if gradients and spec.reduction == "none":
        plan = gathered_tokens.explained(
            problem, lambda one: saved_ops.explained_plan(one, budget, saved_budget, name, needs_grad, on, **asked)
        )
    else:
        stage: Stage = "statistics" if batch_invariant else "losses"
        if gradients:
            stage = "entropy_loss_and_gradients" if with_entropy else "loss_and_gradients"
        plan = gathered_tokens.explained(
            problem, lambda one: ops.plan_for(one, stage, budget, name, needs_grad, device=on, **asked)
        )
        plan = plan.with_logits_again()
    return Explanation(*choose(input.device, implementation, gpu), plan)
