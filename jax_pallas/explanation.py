"""What `explain` returns: which implementation a call runs, why, and the plan of the call."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_pallas import launch, ops, saved_ops
from jax_pallas.arguments import Implementation, check_are_arrays, choose
from jax_pallas.devices import ONE_DEVICE, axis_names, shards_of
from jax_pallas.launch import DeviceInfo
from jax_pallas.plan import ExecutionPlan, Stage
from jax_pallas.problem import NO_GRADIENTS, NeedsGrad, Problem
from linear_ce.chunking import plan_passes
from linear_ce.gpus import gpu_named
from linear_ce.spec import (
    ArrayInfo,
    LossSpec,
    check_arrays,
    check_batch_invariant,
    check_flag,
    check_memory_budget,
    check_saved_budget,
)
from linear_ce.statistics import ENTROPY


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
    input: Array,
    linear_weight: Array,
    spec: LossSpec,
    vocab_axis: int,
    implementation: str | None,
    *,
    gradients: bool,
    memory_budget: int | None,
    saved_budget: int,
    grad_into: Array | None,
    with_entropy: bool,
    batch_invariant: bool,
    device: str | None,
    vocab_axis_name: str | Sequence[str] | None,
) -> Explanation:
    """Returns the implementation and the plan of a call: the arguments are those of `linear_ce.explain`."""
    reduction = spec.reduction
    arrays = {"input": input, "linear_weight": linear_weight, "grad_into": grad_into}
    check_are_arrays(arrays, jax.ShapeDtypeStruct)
    rows: Any = jax.ShapeDtypeStruct(input.shape[:-1], jnp.int32)  # target
    named = {**arrays, "target": rows}
    infos: dict[str, Any] = {
        name: ArrayInfo(tuple(a.shape), str(a.dtype)) for name, a in named.items() if a is not None
    }
    check_arrays(spec=spec, vocab_axis=vocab_axis, **infos)
    launch.check_sizes(input.shape, linear_weight.shape)
    gpu = None
    if device is not None:
        capability, multiprocessors, *_ = gpu_named(device)
        gpu = DeviceInfo("cuda", capability, multiprocessors, device)
    chosen, info = choose(input, linear_weight, vocab_axis, implementation, gpu)
    tokens = math.prod(input.shape[:-1])
    flat: Any = jax.ShapeDtypeStruct((tokens, input.shape[-1]), input.dtype)
    classes = spec.classes(linear_weight.shape[vocab_axis])
    devices = ONE_DEVICE
    if vocab_axis_name is not None:
        names = axis_names("vocab_axis_name", vocab_axis_name)
        shards = shards_of(names)
        devices = devices._replace(vocab_axes=names, shards=shards, parts=shards)
        classes *= devices.shards
    shared: dict[str, Any] = {"spec": spec, "classes": classes, "vocab_axis": vocab_axis, "devices": devices}
    per_token: Any = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    problem = Problem(flat, linear_weight, None, per_token, per_token, None, **shared)
    check_flag("gradients", gradients)
    check_flag("with_entropy", with_entropy)
    into = grad_into is not None
    # With a scalar reduction the sum of grad_into is a result of the call: its matmul also runs without gradients.
    needs_grad = NeedsGrad(gradients, gradients or (into and reduction != "none"), False)
    without_gradients: Stage = "statistics" if batch_invariant or with_entropy else "losses"
    stage = without_gradients
    if any(needs_grad):
        stage = "row_gradients" if reduction == "none" else "loss_and_gradients"
        if with_entropy and reduction != "none":
            stage = "entropy_loss_and_gradients"
    budget = check_memory_budget(memory_budget)
    given = {"grad_into": into, "head_precision": spec.head_precision, "with_entropy": with_entropy}
    saved_budget = check_saved_budget(saved_budget, reduction, **given)
    check_batch_invariant(
        batch_invariant,
        label_smoothing=spec.label_smoothing,
        saved_budget=saved_budget,
        implementation=chosen.name,
        reason=chosen.reason,
    )
    if saved_budget and gradients:
        plan = saved_ops.explained_plan(problem, budget, saved_budget, chosen.name, needs_grad, info)
        return Explanation(*chosen, plan)

    def planned(stage: Stage, needs_grad: NeedsGrad) -> Callable[[], ExecutionPlan]:
        asked: dict[str, Any] = {"statistics": ENTROPY * with_entropy, "batch_invariant": batch_invariant}
        added = replace(problem, grad_into=grad_into if any(needs_grad) else None)
        return partial(ops.plan_for, added, stage, budget, chosen.name, needs_grad, info, **asked)

    passes = [planned(stage, needs_grad)]
    if stage == "row_gradients":  # the losses run in the forward pass
        passes.append(planned(without_gradients, NO_GRADIENTS))
    plan = plan_passes(*passes)
    plan.check_named(implementation)
    if plan.why_chunked is not None:
        chosen = Implementation(plan.implementation, plan.why_chunked)
    return Explanation(*chosen, plan if reduction == "none" else plan.with_logits_again())
