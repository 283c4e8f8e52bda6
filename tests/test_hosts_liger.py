"""`patch(model, liger=True)`: Liger's kernels beside the fused loss.

Without a GPU these kernels do not run. A stand-in for liger-kernel 0.8.5 has the interface of
liger_kernel/transformers/monkey_patch.py, and with the released package the modules of a model are compared.
"""

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata, util
from types import FunctionType, MethodType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from host_models import inputs_of, make, patch, step, unpatch
from hub_models import import_transformers

from core_triton.hosts.deferred import FusedHead

transformers = import_transformers()
LLAMA, GEMMA2 = "LlamaForCausalLM", "Gemma2ForCausalLM"
installed = pytest.mark.skipif(util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The calls of a stand-in for Liger, which replaces no module of a model."""
    found: list[dict[str, Any]] = []

    def apply_liger_kernel_to_llama(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: Any = None,
    ) -> None:
        losses = {"cross_entropy": cross_entropy, "fused_linear_cross_entropy": fused_linear_cross_entropy}
        found.append({"rope": rope, "rms_norm": rms_norm, "swiglu": swiglu, "model": model, **losses})

    modules = {name: ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers")}
    patching: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    patching.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_liger_kernel_to_llama}
    vars(modules["liger_kernel.transformers"])["monkey_patch"] = patching
    modules["liger_kernel.transformers.monkey_patch"] = patching
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with versions("0.8.5"):
        yield found


def versions(version: str | None) -> Any:
    """Returns a context in which liger-kernel has this version, or is a module without a distribution."""
    of = metadata.version

    def found(name: str) -> str:
        if name == "liger-kernel" and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if version is not None and name == "liger-kernel" else of(name)

    return mock.patch.object(metadata, "version", found)


def test_a_model_gets_the_kernels_without_the_losses(calls: list[dict[str, Any]]) -> None:
    model = make(LLAMA)
    with patch(model, liger=True, memory_budget=2**24):
        kernels = {"rope": True, "rms_norm": True, "swiglu": True}
        assert calls == [{**kernels, "model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]
        assert isinstance(model.lm_head, FusedHead)
    patch(model)
    assert len(calls) == 1


def test_what_is_refused_leaves_the_model_as_it_is(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, llama = make("GPT2LMHeadModel"), make(LLAMA)
    with pytest.raises(
        ValueError, match=r"^liger must be False for GPT2LMHeadModel: Liger has no kernels for models of type gpt2$"
    ):
        patch(model, liger=True)
    for of in (type(llama), None):
        with pytest.raises(ValueError, match=r"^liger must be False for (a class|all models), got True$"):
            patch(of, liger=True)
    for version in ("0.8.4", None):
        message = rf"was tested with liger-kernel 0\.8\.5, found {version or 'no version'}$"
        with versions(version), pytest.raises(RuntimeError, match=message):
            patch(llama, liger=True)
    patch(llama)
    with pytest.raises(RuntimeError, match=r"^LlamaForCausalLM is patched already$"):
        patch(llama, liger=True)
    unpatch(llama)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ImportError, match=r"^liger=True needs liger-kernel: pip install liger-kernel==0\.8\.5$"):
        patch(llama, liger=True)
    assert type(llama.lm_head) is torch.nn.Linear
    assert not calls


def test_an_error_of_liger_leaves_the_model_unpatched(calls: list[dict[str, Any]]) -> None:
    model = make(LLAMA)
    kernels = sys.modules["liger_kernel.transformers.monkey_patch"].MODEL_TYPE_TO_APPLY_LIGER_FN
    with (
        mock.patch.dict(kernels, llama=lambda model: model.no_such_module),
        pytest.raises(AttributeError, match="no_such_module"),
    ):
        patch(model, liger=True)
    assert type(model.lm_head) is torch.nn.Linear
    patch(model, liger=True)
    assert len(calls) == 1


@pytest.mark.parametrize("of_class", [False, True])
@pytest.mark.parametrize("package", ["liger_kernel", "trl"])
def test_a_forward_method_of_another_loss_is_refused(package: str, of_class: bool) -> None:
    """`use_liger_kernel=True` of Trainer and trainers of trl set one. Others may too, as accelerate does."""
    model = make(LLAMA)

    def of_other(self: Any) -> str:
        return f"loss of {type(self).__name__}"

    if package == "trl":  # which copies the __module__ of the method before
        of_other = FunctionType(of_other.__code__, {**globals(), "__name__": "trl.trainer.utils"})
        of_other.__module__ = type(model).__module__
    else:
        of_other.__module__ = "liger_kernel.transformers.model.llama"
    before = dict(vars(type(model)))
    with patch(type(model) if of_class else model):
        with pytest.raises(
            RuntimeError, match=rf"^{package} would replace the forward method of this LlamaForCausalLM"
        ):
            model.forward = MethodType(of_other, model)
        assert "forward" not in vars(model)
        model.forward = model.forward
    assert dict(vars(type(model))) == before
    model.forward = MethodType(of_other, model)
    assert model() == "loss of LlamaForCausalLM"


@installed
def test_liger_of_trainer_is_refused_with_its_loss() -> None:
    transform = importlib.import_module("liger_kernel.transformers")
    model = make(LLAMA)
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        with patch(model):
            with pytest.raises(RuntimeError, match="liger_kernel would replace the forward method"):
                transform._apply_liger_kernel_to_instance(model=model)
            transform._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
    finally:
        vars(module).update(before)


@installed
@pytest.mark.parametrize("name", [LLAMA, GEMMA2])
def test_modules_of_a_model_are_those_of_liger(name: str) -> None:
    expected, model = make(name), make(name)
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        patch(model, liger=True)
        changed = {
            place
            for (place, one), other in zip(model.named_modules(), expected.modules(), strict=True)
            if "forward" in vars(one) and "forward" not in vars(other)
        }
        assert {"model.norm", "model.layers.0.mlp", "model.layers.0.input_layernorm"} <= changed
        assert not {"", "lm_head"} & changed
        assert torch.nn.functional.cross_entropy.__module__ == "torch.nn.functional"
        assert vars(module)["apply_rotary_pos_emb"].__module__.startswith("liger_kernel")
    finally:
        vars(module).update(before)


@installed
@pytest.mark.gpu
@pytest.mark.parametrize("name", [LLAMA, GEMMA2])
def test_kernels_of_liger_on_a_gpu(name: str) -> None:
    model = make(name, tie_word_embeddings=False).to("cuda", torch.bfloat16)
    inputs = {key: value.cuda() for key, value in inputs_of(name, model).items()}
    expected = step(model.float(), inputs)
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        patch(model.bfloat16(), implementation="triton", liger=True)
        found = step(model, inputs)
    finally:
        vars(module).update(before)
    torch.testing.assert_close(found.loss.float(), expected.loss, rtol=2e-2, atol=0)
    gradients = (one.gradients["lm_head.weight"].float() for one in (found, expected))
    torch.testing.assert_close(*gradients, rtol=0.1, atol=5e-3)
