"""Checks of host adapters on several processes, for torch_ranks.py. They import transformers when they run."""

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LEARNING_RATE = 0.1


def data(rank: int) -> dict[str, Tensor]:
    """Returns a rank's tokens and labels. Ranks have different numbers of labels that count."""
    torch.manual_seed(rank + 1)
    tokens = torch.randint(SIZES["vocab_size"], (2, 12))
    labels = tokens.clone()
    labels[0, : 3 * rank + 1] = -100
    return {"input_ids": tokens, "labels": labels}


def model_of(tied: bool) -> Any:
    from hub_models import import_transformers

    transformers = import_transformers()
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)).train()


def with_ddp(model: Any, ranks: int) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def with_fsdp2(model: Any, ranks: int, *, head: bool = True) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head:
        fully_shard(model.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_zero3(model: Any, ranks: int) -> Any:
    """Returns DeepSpeed's engine, in which parameters have shape (0,) outside of the calls of their modules."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()), LOCAL_SIZE=str(ranks))  # of this process
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints messages among the results
        import deepspeed  # pyright: ignore[reportMissingImports]

        # DeepSpeed would compile communication by shared memory, which takes a minute, and not use gloo.
        with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), LEARNING_RATE),
                config={
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_clipping": 0.0,
                    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                    "zero_allow_untested_optimizer": True,
                    "zero_force_ds_cpu_optimizer": False,
                },
                dist_init_required=False,
            )
    assert all(parameter.shape == (0,) for parameter in model.parameters())
    return engine


def backward(wrapped: Any, loss: Tensor) -> None:
    wrapped.backward(loss) if hasattr(wrapped, "backward") else loss.backward()


def whole_gradient(parameter: Any) -> Tensor:
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_grad  # pyright: ignore[reportMissingImports]

        return safe_get_full_grad(parameter)
    return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad


def check_hosts_transformers(rank: int, ranks: int, wrap: Callable[..., Any], *, tied: bool, first: bool) -> None:
    """Two steps of a patched and wrapped model have the losses and the gradients of a model without both, with the
    ranks' gradients averaged. The weight of the head is whole in its calls."""
    from core_triton.hosts.transformers import patch, unpatch

    plain, model = model_of(tied), model_of(tied)
    count = sum((data(other)["labels"][:, 1:] != -100).sum() for other in range(ranks))
    gathers: list[torch.Size] = []
    if first:
        patch(model)
    wrapped = wrap(model, ranks)
    if not first:
        patch(model)
    model.lm_head.register_forward_pre_hook(lambda head, _: gathers.append(head.weight.shape))
    optimizer = torch.optim.SGD(plain.parameters(), LEARNING_RATE)
    of_wrapped = wrapped if hasattr(wrapped, "step") else torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for _ in range(2):
        plain.zero_grad()
        wrapped.zero_grad()
        # As Trainer does: the number of labels of all ranks, and a loss of which the gradients' mean is that of all.
        loss = ranks * plain(**data(rank), num_items_in_batch=count).loss
        loss.backward()
        found = wrapped(**data(rank), num_items_in_batch=count).loss * ranks
        backward(wrapped, found)
        torch.testing.assert_close(found, loss)
        for (name, expected), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
            gradient = expected.grad
            assert gradient is not None
            dist.all_reduce(gradient)
            gradient /= ranks
            got = whole_gradient(parameter)
            torch.testing.assert_close(got, gradient, msg=lambda text, name=name: f"{name}: {text}")
        optimizer.step()
        of_wrapped.step()
    assert gathers == [(SIZES["vocab_size"], SIZES["hidden_size"])] * 2  # hooks of the head run once a step
    if first and wrapped is model:
        with pytest.raises(RuntimeError, match="was sharded after patch"):
            unpatch(model)
    else:
        unpatch(model)
        assert wrapped(**data(rank)).logits.shape == (2, 12, SIZES["vocab_size"])


HOST_CHECKS: dict[str, Callable[[int, int], None]] = {
    "hosts_transformers_ddp": partial(check_hosts_transformers, wrap=with_ddp, tied=False, first=True),
    "hosts_transformers_fsdp2": partial(check_hosts_transformers, wrap=with_fsdp2, tied=False, first=True),
    "hosts_transformers_fsdp2_patched_later": partial(
        check_hosts_transformers, wrap=with_fsdp2, tied=False, first=False
    ),
    "hosts_transformers_fsdp2_tied": partial(
        check_hosts_transformers, wrap=partial(with_fsdp2, head=False), tied=True, first=True
    ),
}
ZERO3_CHECKS: dict[str, Callable[[int, int], None]] = {
    f"hosts_transformers_zero3{name}": partial(check_hosts_transformers, wrap=with_zero3, **options)
    for name, options in {
        "": {"tied": False, "first": True},
        "_patched_later": {"tied": False, "first": False},
        "_tied": {"tied": True, "first": True},
    }.items()
}


def check_hosts_verl(rank: int, ranks: int) -> None:
    """The ranks' parts of the gradient of the hidden states add up to the gradient, as those of verl do. Each rank has
    the gradient of its rows of the head."""
    from trl_stand_ins import installed, verl

    torch.manual_seed(0)
    whole, hidden = torch.randn(31 * ranks, 16), torch.randn(2, 3, 16)
    labels = torch.tensor([[1, 5, 31 * ranks - 1], [0, 2, 31]])
    rows = slice(31 * rank, 31 * (rank + 1))
    found = []
    with installed(*verl()):
        from core_triton.hosts import verl as adapter

        for group, weight in ((None, whole), (dist.group.WORLD, whole[rows])):
            x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            log_probs, entropy = adapter.linear_cross_entropy(x, w, labels, 0.7, "none", group)
            (log_probs @ torch.linspace(-1, 1, 6) - 0.1 * entropy.sum()).backward()
            assert x.grad is not None
            assert w.grad is not None
            found.append([log_probs.detach(), entropy.detach(), x.grad, w.grad])
    expected, parts = found
    expected[3] = expected[3][rows]
    dist.all_reduce(parts[2])
    torch.testing.assert_close(parts, expected)


VERL_CHECKS: dict[str, Callable[[int, int], None]] = {"log-probabilities of verl": check_hosts_verl}
