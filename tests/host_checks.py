"""Checks of host adapters on several processes, for torch_ranks.py. They import transformers when they run."""

from collections.abc import Callable
from functools import partial
from typing import Any

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


def check_hosts_transformers(rank: int, ranks: int, wrap: Callable[..., Any], *, tied: bool, first: bool) -> None:
    """Two steps of a patched and wrapped model have the losses and the gradients of a model without both, with the
    ranks' gradients averaged."""
    from core_triton.hosts.transformers import patch, unpatch

    plain, model = model_of(tied), model_of(tied)
    count = sum((data(other)["labels"][:, 1:] != -100).sum() for other in range(ranks))
    gathers: list[str] = []
    if first:
        patch(model)
    wrapped = wrap(model, ranks)
    if not first:
        patch(model)
    model.lm_head.register_forward_pre_hook(lambda *_: gathers.append("head"))
    for _ in range(2):
        plain.zero_grad()
        wrapped.zero_grad()
        # As Trainer does: the number of labels of all ranks, and a loss of which the gradients' mean is that of all.
        loss = ranks * plain(**data(rank), num_items_in_batch=count).loss
        loss.backward()
        found = wrapped(**data(rank), num_items_in_batch=count).loss * ranks
        found.backward()
        torch.testing.assert_close(found, loss)
        for (name, expected), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
            gradient = expected.grad
            assert gradient is not None
            dist.all_reduce(gradient)
            got: Any = parameter.grad
            whole = got.full_tensor() if hasattr(got, "full_tensor") else got
            torch.testing.assert_close(whole, gradient / ranks, msg=lambda text, name=name: f"{name}: {text}")
    assert gathers == ["head"] * 2  # hooks of the head run once a step
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
