"""The output processor of core_triton in Megatron-core's GPTModel against Megatron's own loss: losses, gradients,
trainings, and what is refused. Without Megatron-core, modules with its interface are used (`torch_host_stand_ins.py`).
"""

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from parallel_host_checks import gpt_inputs, gpt_model, megatron_modules, tokens_and_labels, train_megatron
from torch import distributed as dist
from torch_host_stand_ins import importable, is_installed, megatron

from core_triton.hosts import megatron as adapter
from core_triton.hosts.megatron import output_processor

INSTALLED = pytest.mark.skipif(
    not is_installed("megatron"), reason="Megatron-core is not installed: the stand-in has its interface"
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    store: Any = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["stand-in", pytest.param("installed", marks=INSTALLED)])
def host(request: pytest.FixtureRequest) -> Iterator[None]:
    installed = request.param == "installed"
    with megatron_modules(installed=installed):
        from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

        parallel_state.initialize_model_parallel(1)
        yield
        if installed:
            parallel_state.destroy_model_parallel()


@pytest.fixture
def stand_in() -> Iterator[None]:
    with megatron_modules(installed=False):
        yield


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({}, {}),
        ({"tied": True}, {"fusion": True}),
        ({"mup": True}, {"fusion": True, "masked": False}),
        ({}, {"options": {"saved_budget": 2**20, "memory_budget": 2**20}}),
    ],
)
def test_twenty_steps_have_the_curve_of_megatrons_loss(model: dict[str, Any], training: dict[str, Any]) -> None:
    expected = train_megatron(False, **model)
    found = train_megatron(True, **model, **training)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected[0][-1] < 0.95 * expected[0][0]  # it has learned something


@pytest.mark.usefixtures("host")
def test_losses_of_tokens_are_those_of_the_model() -> None:
    model = gpt_model()
    tokens, labels = tokens_and_labels()
    inputs, given = gpt_inputs(tokens), labels.clamp(min=0)
    expected = model(*inputs, labels=given)
    torch.testing.assert_close(model(*inputs, labels=given, output_processor=output_processor()), expected)
    mask = labels >= 0
    with torch.no_grad():  # of tokens that do not count the labels may be anything
        model.output_layer.gradient_accumulation_fusion = True
        found = model(*inputs, labels=labels.where(mask, 99), loss_mask=mask, output_processor=output_processor())
    torch.testing.assert_close(found, expected * mask)


@pytest.mark.usefixtures("stand_in")
def test_the_loss_is_computed_in_one_call_of_the_output_layer() -> None:
    """Hooks of DistributedDataParallel wait for the weight before the call."""
    model, seen = gpt_model(), list[Any]()
    model.output_layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model.output_layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    tokens, _ = tokens_and_labels()
    model(*gpt_inputs(tokens), labels=tokens, output_processor=output_processor())
    assert seen == [(12, 2, 32), (12, 2)]
    assert "forward" not in vars(model.output_layer)
    model.output_layer.register_forward_hook(lambda module, args, output: torch.zeros(()))
    with pytest.raises(ValueError, match="a forward hook of the output layer changes what it returns"):
        model(*gpt_inputs(tokens), labels=tokens, output_processor=output_processor())


@pytest.mark.usefixtures("stand_in")
def test_the_loss_gets_the_options_and_the_factor() -> None:
    model = gpt_model(mup=True)
    model.output_layer.bias = torch.zeros(64)
    tokens, _ = tokens_and_labels()
    options = {"implementation": "chunked", "memory_budget": 2**22, "reduce_dtype": torch.bfloat16}
    with mock.patch.object(adapter, "linear_cross_entropy", return_value=torch.ones(12, 2)) as called:
        model(*gpt_inputs(tokens), labels=tokens, output_processor=output_processor(**options))
        model.output_layer.skip_bias_add = True
        model(*gpt_inputs(tokens), labels=tokens, output_processor=output_processor(**options))
    expected = {"reduction": "none", "logit_scale": 0.5, **options}
    first, second = (call.kwargs for call in called.call_args_list)
    assert (first, second) == (expected | {"linear_bias": model.output_layer.bias}, expected | {"linear_bias": None})


@pytest.mark.usefixtures("stand_in")
def test_a_gradient_in_main_grad_is_for_the_hooks_of_the_weight() -> None:
    model = gpt_model()
    layer: Any = model.output_layer
    weight: Any = layer.weight
    layer.gradient_accumulation_fusion = True
    tokens, _ = tokens_and_labels()

    def step() -> None:
        model(*gpt_inputs(tokens), labels=tokens, output_processor=output_processor()).sum().backward()

    weight.main_grad = torch.zeros(weight.shape)
    step()
    assert weight.grad is None
    layer.gradient_accumulation_fusion = False
    step()
    torch.testing.assert_close(weight.main_grad, weight.grad)
    vars(weight)["grad_added_to_main_grad"] = False
    layer.gradient_accumulation_fusion = True
    for zeros in (False, True):  # hooks of DistributedDataParallel need a gradient, and read it if there is this flag
        weight.zero_out_wgrad = zeros
        model.zero_grad()
        step()
        unused: Any = weight.grad
        assert weight.grad_added_to_main_grad
        assert unused.shape == weight.shape
        assert not (zeros and unused.any())
    weight.requires_grad_(False)
    before = weight.main_grad.clone()
    step()
    assert torch.equal(weight.main_grad, before)


@pytest.mark.usefixtures("stand_in")
def test_what_is_refused() -> None:
    model = gpt_model()
    layer: Any = model.output_layer
    weight = layer.weight
    tokens, _ = tokens_and_labels()
    processor = output_processor()

    def run(labels: Any = tokens) -> Any:
        return model(*gpt_inputs(tokens), labels=labels, output_processor=processor)

    with pytest.raises(TypeError, match=r"options must be among implementation, .*, got softcap"):
        output_processor(softcap=3.0)
    with pytest.raises(TypeError, match="memory_budget must be a Python int, got str"):
        output_processor(memory_budget="512MiB")
    with pytest.raises(ValueError, match=r"reduce_dtype must be torch.float32 or torch.bfloat16, got torch.float16"):
        output_processor(reduce_dtype=torch.float16)
    with pytest.raises(ValueError, match="labels must be given with this output_processor"):
        run(None)
    for owner, name, value in (
        (model.config, "defer_embedding_wgrad_compute", True),
        (layer, "disable_grad_reduce", True),
        (layer, "is_expert", True),
        (layer, "gtp_remat_size", 2),
    ):
        with mock.patch.object(owner, name, value), pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            run()
    layer.gradient_accumulation_fusion = True
    with pytest.raises(ValueError, match=r"gradient_accumulation_fusion needs a float32 main_grad .*got no main_grad"):
        run()
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"grad_reduce_in_fp32=True, got one of torch\.bfloat16"):
        run()
    weight.__fsdp_param__ = True
    with pytest.raises(ValueError, match="use_megatron_fsdp must be False for this output_processor"):
        run()
    layer.__class__ = type("TELMHeadColumnParallelLinear", (type(layer),), {"forward": lambda self, x: x})
    with pytest.raises(ValueError, match="must be a ColumnParallelLinear, got TELMHeadColumnParallelLinear"):
        run()


def test_another_version_and_no_megatron() -> None:
    message = r"^core_triton\.hosts\.megatron was tested with megatron-core 0\.19\.2, found 0\.20\.0$"
    with importable(*megatron("0.20.0")), pytest.raises(RuntimeError, match=message):
        output_processor()
    missing = mock.patch.dict(sys.modules, {"megatron.core": None})
    with missing, pytest.raises(ImportError, match=r"needs megatron-core: pip install megatron-core==0\.19\.2"):
        output_processor()
