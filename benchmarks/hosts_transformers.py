"""Rows of transformers in `benchmarks.hosts`: training steps of its models."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.hosts_process import MOST_ERRORS, MOST_TIMES, check_differences
from benchmarks.hosts_rows import COMPILED, CONFIGS, Row
from benchmarks.hosts_torch import (
    device_type,
    differences,
    from_nothing,
    loss_and_gradient,
    make_model,
    make_optimizer,
    prepared,
    time_on_device,
)
from benchmarks.methods import load
from benchmarks.timing import BATCHES

CHECKED = 512  # tokens of the sequence on which a variant is compared
# How much torch.compile keeps for the backward pass in tuned rows, between what it keeps by default (1) and nothing
# but the inputs of the compiled graph (0). It computes the cheapest of the rest again: elementwise operations.
KEPT = 0.9


def measure(row: Row, seconds: float | None, kernels: bool = False) -> dict[str, Any]:
    """Returns the figures of a row; without seconds, compiles the model of the row and returns none.

    Raises:
        UnavailableError: a library is not installed.
        ValueError: as `changed`.
    """
    with from_nothing(), kept_by_the_compiler(KEPT if row.variant.endswith("tuned") else 1.0):
        model = make_model(row.config)
        if row.variant.endswith("tuned"):
            tune(model, row.config)
        tokens = torch.randint(model.config.vocab_size, (BATCHES, row.batch, row.seq), device=device_type())
        errors = {} if seconds is None else changed(model, row)
        if seconds is None:
            install(model, row.variant)
        run = torch.compile(model, dynamic=False) if row.variant.endswith(COMPILED) else model
        if seconds is None:
            loss_of(run, tokens[0]).backward()
            return {}
        if run is not model:  # both differ from float32
            pairs = [loss_and_gradient(model, partial(loss_of, called, tokens[0])) for called in (run, model)]
            most = MOST_ERRORS[0], (1 + MOST_TIMES) * in_float32(row.config)[1]
            found = check_differences(row.variant, differences(*pairs), most, "the model in eager mode")
            errors |= {f"eager_{name}": error for name, error in found.items()}
        optimizer, steps = make_optimizer(model), 0

        def step() -> None:
            nonlocal steps
            loss_of(run, tokens[steps % BATCHES]).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1

        (found,) = time_on_device([prepared(row, step, errors)], seconds, kernels)
        return found


@contextmanager
def kept_by_the_compiler(share: float) -> Iterator[None]:
    """Sets PyTorch's `activation_memory_budget`: how much torch.compile keeps for the backward pass."""
    import torch._functorch.config

    with torch._functorch.config.patch(activation_memory_budget=share):
        yield


def tune(model: Any, config: str) -> None:
    """Makes attention causal without a mask, unless some layers have a sliding window.

    Before PyTorch 2.14, transformers gives compiled models a mask, with which PyTorch does not use its fastest kernel.
    It gives none to functions that are registered without a function for masks.
    """
    if "sliding_window" in CONFIGS[config]:
        return
    transformers = load("transformers")
    transformers.AttentionInterface.register(
        "causal_sdpa", load("transformers.integrations.sdpa_attention").sdpa_attention_forward
    )
    model.set_attn_implementation("causal_sdpa")


def install(model: Any, variant: str) -> None:
    """Patches a model for a variant."""
    if variant == "liger":
        patching = load("liger_kernel.transformers.monkey_patch")
        patching.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](model=model)
    elif variant.startswith("ours"):
        if variant == "ours+liger":
            load("liger_kernel.transformers")
        load("core_triton.hosts.transformers").patch(model, liger=variant == "ours+liger")


def changed(model: Any, row: Row) -> dict[str, float]:
    """Patches a model for a row's variant and returns by how much its loss and the gradient of its head differ from
    those of the same model in float32, without a patch.

    Args:
        model: of `make_model`, without a patch.
        row: its config and variant.

    Raises:
        ValueError: they differ by much more than those of the model in bfloat16, without a patch.
    """
    exact, own = in_float32(row.config)
    install(model, row.variant)
    found = loss_and_gradient(model, lambda: loss_of(model, tokens_of(model)))
    most = MOST_ERRORS[0], MOST_TIMES * own
    return check_differences(row.variant, differences(found, exact), most, "a float32 model")


@cache
def in_float32(config: str) -> tuple[tuple[Tensor, Tensor], float]:
    """Returns the loss of a model in float32 without a patch and the gradient of its head, on the CPU, and by how much
    the gradient in bfloat16 differs from it.

    The first row of a process calls it. Later, kernels of Liger may be in functions that all models of a type call.
    """
    model = make_model(config)
    own = loss_and_gradient(model, lambda: loss_of(model, tokens_of(model)))
    loss, gradient = loss_and_gradient(model.float(), lambda: loss_of(model, tokens_of(model)))
    return (loss.cpu(), gradient.cpu()), differences(own, (loss, gradient))[1]


def tokens_of(model: Any) -> Tensor:
    """Returns the tokens (1, CHECKED) on which models are compared."""
    return torch.arange(CHECKED, device=device_type())[None] * 7919 % model.config.vocab_size


def loss_of(run: Any, tokens: Tensor) -> Tensor:
    """Returns the loss of a model on tokens (batch, seq)."""
    return run(input_ids=tokens, labels=tokens, use_cache=False).loss
