"""The loss of core_triton in torchtitan against torchtitan's own: losses, gradients, trainings, and what is refused.
Without torchtitan, modules with its interface are used (`torch_host_stand_ins.py`)."""

import pickle
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from parallel_host_checks import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    VOCABULARY,
    Decoder,
    titan_loss,
    tokens_and_labels,
    torchtitan_modules,
    train_titan,
)
from torch_host_stand_ins import importable, is_installed, torchtitan

from core_triton.hosts import torchtitan as adapter

INSTALLED = pytest.mark.skipif(
    not is_installed("torchtitan"), reason="torchtitan is not installed: the stand-in has its interface"
)


@pytest.fixture(params=["stand-in", pytest.param("installed", marks=INSTALLED)])
def host(request: pytest.FixtureRequest) -> Iterator[None]:
    with torchtitan_modules(installed=request.param == "installed"):
        yield


@pytest.fixture
def stand_in() -> Iterator[None]:
    with torchtitan_modules(installed=False):
        yield


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("tied", [False, True])
def test_twenty_steps_have_the_curve_of_torchtitans_loss(tied: bool) -> None:
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        results.append(train_titan(fused, Decoder(tied)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    losses = results[0][0]
    assert losses[-1] < losses[0] / 2  # it has learned something


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("counted", [False, True])
def test_loss_and_gradients_are_those_of_the_chunked_loss(counted: bool) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY)
    labels, count = tokens_and_labels()[1], torch.tensor(17) if counted else None
    own = ChunkedLossWrapper.Config(num_chunks=4).build(compile_config=None)
    own.set_lm_head(head)
    results = []
    for loss_fn in (own, titan_loss(head, implementation="chunked")):
        head.zero_grad()
        hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(1), requires_grad=True)
        loss, metrics = loss_fn(hidden, labels, count, positions=None)
        loss.backward()
        with torch.no_grad():
            evaluated, _ = loss_fn(hidden.detach(), labels)
        assert metrics == {}
        assert head.weight.grad is not None
        results.append((loss.detach(), evaluated, hidden.grad, head.weight.grad.clone()))
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("stand_in")
def test_the_loss_is_computed_in_one_call_of_the_output_layer() -> None:
    """Hooks of FSDP2 gather the weight before the call and free it after."""
    head = torch.nn.Linear(HIDDEN, VOCABULARY)
    own: Any = head.forward
    head.forward = own  # as a config's sharding does
    seen: list[Any] = []
    head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    head.register_forward_hook(lambda module, args, output: seen.append(output))
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN)
    loss, _ = titan_loss(head)(hidden, tokens_and_labels()[1])
    assert seen == [hidden.shape, loss]
    assert vars(head)["forward"] is own
    del head.forward
    titan_loss(head)(hidden, tokens_and_labels()[1])
    assert "forward" not in vars(head)
    head.register_forward_hook(lambda module, args, output: torch.zeros(()))
    with pytest.raises(ValueError, match="a forward hook of the output layer changes what it returns"):
        titan_loss(head)(hidden, tokens_and_labels()[1])
    assert "forward" not in vars(head)


@pytest.mark.usefixtures("stand_in")
def test_the_loss_gets_the_options_and_those_of_the_output_layer() -> None:
    soft_capped = type("SoftCappedLinear", (torch.nn.Linear,), {"forward": lambda self, input: input})
    soft_capped.__module__ = "torchtitan.models.muse_glimmer.model"
    head: Any = soft_capped(HIDDEN, VOCABULARY)
    head.output_multiplier, head.output_soft_cap_temp = 0.5, 30.0
    options = {"implementation": "chunked", "memory_budget": 2**22, "head_precision": None, "batch_invariant": False}
    loss_fn = titan_loss(head, **options)
    with mock.patch.object(adapter, "linear_cross_entropy", return_value=torch.ones(())) as called:
        loss_fn(torch.randn(BATCH, SEQUENCE, HIDDEN), tokens_and_labels()[1], torch.tensor(3))
    assert called.call_args.kwargs == {
        "linear_bias": head.bias,
        "reduction": "mean",
        "normalizer": torch.tensor(3),
        "ignore_index": -100,
        "logit_scale": 0.5,
        "softcap": 30.0,
        **options,
    }


@pytest.mark.usefixtures("host")
def test_the_config_names_its_class() -> None:
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper  # pyright: ignore[reportMissingImports]

    loss = adapter.LinearCrossEntropyLoss  # pyright: ignore[reportAttributeAccessIssue]
    config = pickle.loads(pickle.dumps(loss.Config(memory_budget=2**20)))
    assert isinstance(config, BaseLoss.Config)
    made = config.build(compile_config=None)
    assert type(made) is loss
    assert isinstance(made, ChunkedLossWrapper)  # the trainer calls set_lm_head
    with pytest.raises(TypeError, match="softcap"):
        loss.Config(softcap=3.0)
    with pytest.raises(AttributeError, match="has no attribute 'Loss'"):
        _ = adapter.Loss  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("stand_in")
def test_what_is_refused() -> None:
    from torchtitan.distributed import utils  # pyright: ignore[reportMissingImports]

    hidden, labels = torch.randn(BATCH, SEQUENCE, HIDDEN), tokens_and_labels()[1]
    loss_class = adapter.LinearCrossEntropyLoss  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="set_lm_head must be called before the loss"):
        loss_class.Config().build()(hidden, labels)
    with pytest.raises(ValueError, match=r"memory_budget must be positive \(bytes\), got -1"):
        loss_class.Config(memory_budget=-1).build()
    quantized = type("Float8Linear", (torch.nn.Linear,), {"forward": lambda self, input: input})
    for head, name in ((quantized(HIDDEN, VOCABULARY), "Float8Linear"), (torch.nn.Identity(), "Identity")):
        with pytest.raises(ValueError, match=f"^lm_head must be a torch.nn.Linear or .*, got {name}$"):
            titan_loss(head)
    utils.set_spmd_backend("full_dtensor")
    with pytest.raises(
        ValueError, match=r"parallelism\.spmd_backend must be one of spmd_types, partial_dtensor, got full_dtensor"
    ):
        titan_loss(torch.nn.Linear(HIDDEN, VOCABULARY))(hidden, labels)


def test_another_version_and_no_torchtitan() -> None:
    message = r"^core_triton\.hosts\.torchtitan was tested with torchtitan 0\.3\.0, found 0\.4\.0$"
    with importable(*torchtitan("0.4.0")), pytest.raises(RuntimeError, match=message):
        _ = adapter.LinearCrossEntropyLoss  # pyright: ignore[reportAttributeAccessIssue]
    with importable(*torchtitan("0.3.0+cu130")):
        assert adapter.LinearCrossEntropyLoss  # pyright: ignore[reportAttributeAccessIssue]
    missing = mock.patch.dict(sys.modules, {"torchtitan": None})
    with importable(), missing, pytest.raises(ImportError, match=r"needs torchtitan: pip install torchtitan==0\.3\.0"):
        _ = adapter.LinearCrossEntropyLoss  # pyright: ignore[reportAttributeAccessIssue]


@INSTALLED
@pytest.mark.slow
def test_the_installed_llama_takes_the_same_steps() -> None:
    pytest.importorskip(
        "torchtitan.models.llama3", reason="this torchtitan needs a newer PyTorch", exc_type=ImportError
    )
    from torchtitan.models import llama3  # pyright: ignore[reportMissingImports]
    from torchtitan.models.common.attention import (  # pyright: ignore[reportMissingImports]
        ScaledDotProductAttention,
    )

    # The attention of its configs has no gradients on CPUs.
    attention = mock.patch.object(llama3, "get_attention_config", return_value=ScaledDotProductAttention.Config())
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        with attention:
            model = llama3.llama3_configs["debugmodel"](attn_backend="flex").build()
        model.init_states()
        results.append(train_titan(fused, model))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)
