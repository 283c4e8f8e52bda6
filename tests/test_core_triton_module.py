"""Tests LinearCrossEntropy, a module with the head and its loss."""

import copy
import io
import pickle
from threading import Lock
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from core_triton import LinearCrossEntropy


@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_is_that_of_a_linear_layer(bias: bool) -> None:
    linear = nn.Linear(8, 50, bias=bias)
    head = LinearCrossEntropy(8, 50, bias=bias)
    assert head.state_dict().keys() == linear.state_dict().keys()
    head.load_state_dict(linear.state_dict())
    x, target = torch.randn(2, 6, 8), torch.randint(0, 50, (2, 6))
    want = F.cross_entropy(linear(x).reshape(12, 50), target.reshape(12))
    torch.testing.assert_close(head(x, target), want)
    linear.load_state_dict(head.state_dict())


def test_is_initialized_like_a_linear_layer() -> None:
    torch.manual_seed(0)
    head = LinearCrossEntropy(64, 5000, bias=True)
    assert head.bias is not None
    for parameter in (head.weight, head.bias):
        assert parameter.abs().max() <= 1 / 8
        assert abs(parameter.std().item() - 1 / 8 / 3**0.5) < 5e-3


def test_a_tied_head_takes_both_gradients() -> None:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(50, 8), LinearCrossEntropy(8, 50)
    assert isinstance(embedding.weight, nn.Parameter)
    head.weight = embedding.weight
    tokens, target = torch.randint(0, 50, (12,)), torch.randint(0, 50, (12,))
    head(embedding(tokens), target).backward()
    got = embedding.weight.grad
    embedding.weight.grad = None
    F.cross_entropy(F.linear(embedding(tokens), embedding.weight), target).backward()
    torch.testing.assert_close(got, embedding.weight.grad)


def test_repr_shows_what_was_changed() -> None:
    assert repr(LinearCrossEntropy(8, 50)) == "LinearCrossEntropy(8, 50, bias=False)"
    head = LinearCrossEntropy(8, 50, bias=True, softcap=30.0, reduction="sum")
    assert repr(head) == "LinearCrossEntropy(8, 50, bias=True, reduction='sum', softcap=30.0)"


def test_options_and_class_weights_reach_the_loss() -> None:
    torch.manual_seed(0)
    class_weight = torch.rand(50)
    head = LinearCrossEntropy(8, 50, weight=class_weight, label_smoothing=0.1, ignore_index=-1, reduction="none")
    x, target = torch.randn(12, 8), torch.randint(-1, 50, (12,))
    token_weight = torch.rand(12)
    want = token_weight * F.cross_entropy(
        F.linear(x, head.weight), target, class_weight, label_smoothing=0.1, ignore_index=-1, reduction="none"
    )
    torch.testing.assert_close(head(x, target, token_weight=token_weight), want)


@pytest.mark.parametrize(
    ("weight", "kind", "message"),
    [
        ([1.0] * 50, TypeError, "weight must be a Tensor or None, got list"),
        (torch.ones(49), ValueError, r"weight must have shape \(50,\) .*, got \(49,\)"),
        (torch.ones(50, dtype=torch.long), TypeError, "weight must be float16 or bfloat16 or float32, got int64"),
        (nn.Parameter(torch.ones(50)), ValueError, r"weight is not differentiated .* pass weight\.detach\(\)"),
    ],
)
def test_class_weights_are_checked_when_the_module_is_made(weight: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        LinearCrossEntropy(8, 50, weight=weight)
    group: Any = Lock()  # a group, whose classes are not those of the shard
    assert LinearCrossEntropy(8, 25, weight=torch.ones(50), vocab_group=group).class_weight is not None


def test_normalizer_is_the_denominator() -> None:
    head = LinearCrossEntropy(8, 50)
    x, target = torch.randn(12, 8), torch.randint(0, 50, (12,))
    want = F.cross_entropy(F.linear(x, head.weight), target, reduction="sum") / 48
    torch.testing.assert_close(head(x, target, normalizer=torch.tensor(48)), want)


def test_dtype_device_and_copies() -> None:
    assert LinearCrossEntropy(8, 50, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert LinearCrossEntropy(8, 50, device="meta").weight.is_meta
    head = LinearCrossEntropy(8, 50, bias=True, weight=torch.rand(50))
    x, target = torch.randn(12, 8), torch.randint(0, 50, (12,))
    stored = io.BytesIO()
    torch.save(head.state_dict(), stored)
    stored.seek(0)
    other = LinearCrossEntropy(8, 50, bias=True, weight=torch.zeros(50))
    other.load_state_dict(torch.load(stored))
    for twin in (copy.deepcopy(head), other):
        torch.testing.assert_close(twin(x, target), head(x, target), rtol=0, atol=0)


class WithoutCache(LinearCrossEntropy):
    """A subclass whose state leaves out what cannot be copied."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}


def test_a_copy_has_the_state_of_a_subclass() -> None:
    head: Any = WithoutCache(8, 50)
    head.cache = Lock()
    copied = copy.deepcopy(head)
    assert not hasattr(copied, "cache")
    assert torch.equal(copied.weight, head.weight)


def test_a_copy_shares_the_process_groups() -> None:
    """As copies for averaged weights do. Process groups cannot be copied, and no lock can."""
    group = Lock()
    head: Any = LinearCrossEntropy(8, 50, bias=True, token_group=cast("Any", group))
    tied = nn.Sequential(nn.Embedding(50, 8), head)
    tied[0].weight = head.weight
    embedding, twin = cast("Any", copy.deepcopy(tied))
    assert twin.token_group is group
    assert twin.weight is embedding.weight
    assert twin.weight is not head.weight
    assert torch.equal(twin.bias, head.bias)


def test_a_parametrized_head_is_copied() -> None:
    """`parametrize` makes a subclass whose `__getstate__` raises, because such a module cannot be pickled."""
    torch.manual_seed(0)
    head: Any = weight_norm(WithoutCache(8, 50, bias=True))
    head.cache = Lock()
    x, target = torch.randn(12, 8), torch.randint(0, 50, (12,))
    want = head(x, target)
    copied = copy.deepcopy(head)
    assert type(copied) is type(head)
    assert not hasattr(copied, "cache")
    torch.testing.assert_close(copied(x, target), want, rtol=0, atol=0)
    own, others = dict(head.named_parameters()), dict(copied.named_parameters())
    assert own.keys() == others.keys()
    assert len(own) == 3
    for name, parameter in others.items():
        assert parameter is not own[name]
        with torch.no_grad():
            parameter.mul_(2)
    torch.testing.assert_close(head(x, target), want, rtol=0, atol=0)
    copied(x, target).backward()
    assert all(parameter.grad is not None for parameter in others.values())
    assert all(parameter.grad is None for parameter in own.values())
    head.token_group = Lock()
    assert copy.deepcopy(head).token_group is head.token_group
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(head)


@pytest.mark.parametrize("parametrized", [False, True])
def test_averaged_weights_of_a_head(parametrized: bool) -> None:
    torch.manual_seed(0)
    head: Any = LinearCrossEntropy(8, 50)
    head = weight_norm(head) if parametrized else head
    averaged = AveragedModel(head)
    x, target = torch.randn(12, 8), torch.randint(0, 50, (12,))
    states = []
    for factor in (1, 3):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(factor)
        averaged.update_parameters(head)
        states.append([parameter.clone() for parameter in head.parameters()])
    for got, *each in zip(averaged.module.parameters(), *states, strict=True):
        torch.testing.assert_close(got, sum(each) / 2)
    mean = copy.deepcopy(head)
    with torch.no_grad():
        for parameter, *each in zip(mean.parameters(), *states, strict=True):
            parameter.copy_(sum(each) / 2)
    torch.testing.assert_close(averaged(x, target), mean(x, target))


def test_a_head_is_pickled_with_its_options() -> None:
    head = LinearCrossEntropy(8, 50, softcap=30.0)
    again = pickle.loads(pickle.dumps(head))
    x, target = torch.randn(12, 8), torch.randint(0, 50, (12,))
    torch.testing.assert_close(again(x, target), head(x, target), rtol=0, atol=0)


def test_the_options_of_a_head_can_be_changed() -> None:
    head = LinearCrossEntropy(8, 50, label_smoothing=0.1, softcap=5.0)
    x, target = torch.randn(12, 8), torch.randint(0, 50, (12,))
    head.label_smoothing, head.softcap, head.reduction, head.ignore_index = 0.0, None, "none", 7
    torch.testing.assert_close(
        head(x, target), F.cross_entropy(x @ head.weight.T, target, reduction="none", ignore_index=7)
    )
    assert repr(head) == "LinearCrossEntropy(8, 50, bias=False, reduction='none', ignore_index=7)"
    head.label_smoothing = 2.0
    with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\], got 2.0"):
        head(x, target)
