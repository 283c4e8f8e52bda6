"""Patched models of transformers against unpatched ones: losses, gradients, what is refused, and how to get logits."""

import copy
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from host_checks import HOST_CHECKS, ZERO3_CHECKS
from host_models import VOCABULARY, adapter, difference, fused_options, inputs_of, make, patch, step, unpatch
from hosts_report import PAGE, TOLERANCE, page, row
from hub_models import import_transformers
from programs import Printed, python
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import remove_parametrizations

from core_triton.hosts.deferred import FusedHead, LogitsError

LLAMA, GEMMA2, GRANITE = "LlamaForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM"
# Heads with a bias, in a module of the model's head, tied or not, with a factor, a soft cap or a slice of the classes,
# losses by loss_function and by torch.nn.CrossEntropyLoss, and models with images, with text.
QUICK = (
    *(LLAMA, "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    *("GemmaForCausalLM", GEMMA2, "Gemma3ForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "Olmo2ForCausalLM"),
    *(GRANITE, "GraniteMoeForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "SmolLM3ForCausalLM"),
    *("GPT2LMHeadModel", "GPTNeoXForCausalLM", "GPTJForCausalLM", "OPTForCausalLM", "FalconForCausalLM"),
    *("BloomForCausalLM", "MambaForCausalLM", "BertLMHeadModel", "RobertaForCausalLM", "BartForCausalLM"),
    *(
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
        "XLMWithLMHeadModel",
        "InklingForCausalLM",
        "HyperCLOVAXForCausalLM",
    ),
)


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    transformers = import_transformers()
    post_init = transformers.PreTrainedModel.post_init
    yield
    assert transformers.PreTrainedModel.post_init is post_init
    assert not adapter()._classes


@pytest.fixture
def llama() -> Any:
    return make(LLAMA)


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", QUICK)
def test_loss_and_gradients_are_those_of_the_unpatched_model(name: str) -> None:
    model = make(name)
    inputs = inputs_of(name, model)
    expected = step(model, inputs)
    with patch(model, implementation="chunked"):
        found = step(model, inputs)
        assert difference(found, expected) <= TOLERANCE
        assert len(fused_options(model, inputs)) == 1


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (LLAMA, {}, {"logit_scale": 1.0, "softcap": None, "vocab_size": None}),
        (GEMMA2, {"final_logit_softcapping": 4.0}, {"logit_scale": 1.0, "softcap": 4.0}),
        ("RecurrentGemmaForCausalLM", {"logits_soft_cap": 4.0}, {"logit_scale": 1.0, "softcap": 4.0}),
        (GRANITE, {"logits_scaling": 8.0}, {"logit_scale": 0.125, "softcap": None}),
        ("CohereForCausalLM", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
        ("HyperCLOVAXForCausalLM", {"logits_scaling": 0.5}, {"logit_scale": 0.5}),
        ("InklingForCausalLM", {"unpadded_vocab_size": 59}, {"vocab_size": 59}),
    ],
)
def test_the_loss_gets_the_factor_the_soft_cap_and_the_classes(
    name: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = make(name, **fields)
    patch(model, memory_budget=2**20)
    (options,) = fused_options(model, inputs_of(name, model))
    assert options["memory_budget"] == 2**20
    assert {option: options[option] for option in expected} == expected


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 23},
        {"num_items_in_batch": torch.tensor(23)},
        {"ignore_index": 7},
        {"shift_labels": tokens().roll(-1, 1)},
        {"logits_to_keep": 4, "labels": tokens()[:, -4:]},
        {"logits_to_keep": torch.tensor([1, 2, 5]), "labels": tokens()[:, [1, 2, 5]]},
        {"return_dict": False},
    ],
    ids=lambda more: "-".join(more),
)
def test_arguments_of_the_loss_mean_the_same(llama: Any, more: dict[str, Any]) -> None:
    def run() -> Any:
        outputs = llama(**{"input_ids": tokens(), "labels": tokens(), **more})
        loss = outputs[0]
        loss.backward()
        gradient = llama.lm_head.weight.grad.clone()
        llama.zero_grad()
        return loss.detach(), gradient

    expected = run()
    with patch(llama):
        assert len(fused_options(llama, {"input_ids": tokens(), "labels": tokens()})) == 1
        torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-7)


def test_labels_may_be_a_positional_argument(llama: Any) -> None:
    place = list(inspect.signature(llama.forward).parameters).index("labels")
    patch(llama)
    outputs = llama(tokens(), *[None] * (place - 1), tokens())
    with pytest.raises(LogitsError):
        outputs.logits.sum()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_and_a_frozen_head(tied: bool) -> None:
    model = make(LLAMA, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    inputs = inputs_of(LLAMA, model)
    for frozen in (False, True):
        model.lm_head.weight.requires_grad_(not frozen)
        expected = step(model, inputs)
        with patch(model):
            assert difference(step(model, inputs), expected) <= TOLERANCE


def test_a_vocabulary_that_is_resized_after_the_patch(llama: Any) -> None:
    patch(llama)
    llama.resize_token_embeddings(VOCABULARY + 10, mean_resizing=False)
    inputs = {"input_ids": tokens(), "labels": tokens()}
    found = step(llama, inputs)
    assert llama.lm_head.out_features == VOCABULARY + 10
    unpatch(llama)
    assert difference(found, step(llama, inputs)) <= TOLERANCE
    assert type(llama.lm_head) is torch.nn.Linear


def test_gradient_checkpointing(llama: Any) -> None:
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected = step(llama, inputs)
    with patch(llama):
        if hasattr(llama, "activation_checkpointing_enable"):
            llama.activation_checkpointing_enable()
        else:  # transformers 5.22 and before
            llama.gradient_checkpointing_enable()
        assert difference(step(llama, inputs), expected) <= TOLERANCE


def test_autocast(llama: Any) -> None:
    inputs = {"input_ids": tokens(), "labels": tokens()}
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(llama, inputs)
        with patch(llama):
            found = step(llama, inputs)
    torch.testing.assert_close(found.loss, expected.loss, rtol=2e-3, atol=0)
    gradients = (one.gradients["lm_head.weight"] for one in (found, expected))
    torch.testing.assert_close(*gradients, rtol=0.02, atol=1e-3)


def test_the_loss_is_computed_in_one_call_of_the_head(llama: Any) -> None:
    """Hooks of FSDP2 and ZeRO-3 gather the weight before the call of the head and free it after."""
    patch(llama)
    seen: list[Any] = []
    llama.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    llama.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    loss = llama(input_ids=tokens(), labels=tokens()).loss
    assert seen == [(18, 32), loss]
    assert seen[1].ndim == 0


HOOKS: dict[str, tuple[Any, bool]] = {  # and whether they change what the head returns
    "nothing": (lambda module, args, output: None, False),
    "copy": (lambda module, args, output: output.clone(), False),
    "dtype": (lambda module, args, output: output.double(), False),
    "factor": (lambda module, args, output: 2 * output, True),
    "in place": (lambda module, args, output: output.mul_(2) and None, True),
    "tuple": (lambda module, args, output: (output,), True),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_forward_hook_of_the_head_may_not_change_the_loss(llama: Any, name: str) -> None:
    """Without the patch it changes the logits."""
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected = step(llama, inputs)
    hook, changes = HOOKS[name]
    llama.lm_head.register_forward_hook(hook)
    patch(llama)
    if changes:
        with pytest.raises(ValueError, match=r"a forward hook of the head of Llama.*not the logits: <lambda>\."):
            step(llama, inputs)
    else:
        assert difference(step(llama, inputs), expected) <= TOLERANCE
        assert llama(input_ids=tokens(), labels=tokens() + VOCABULARY).loss.isnan()
        with torch.inference_mode():
            torch.testing.assert_close(llama(**inputs).loss, expected.loss, check_dtype=False)


USES: dict[str, Any] = {
    "shape": lambda logits: logits.shape,
    "argmax": lambda logits: logits.argmax(-1),
    "argmax function": torch.argmax,
    "slice": lambda logits: logits[:, -1],
    "sum": lambda logits: logits + 1,
    "factor": lambda logits: 2 * logits,
    "comparison": lambda logits: logits != 0,
    "float": lambda logits: logits.float(),
    "cross_entropy": lambda logits: torch.nn.functional.cross_entropy(logits, tokens()),
    "len": len,
    "list": list,
    "tolist": lambda logits: logits.tolist(),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_the_logits_says_how_to_get_them(llama: Any, use: str) -> None:
    with patch(llama):
        outputs = llama(input_ids=tokens(), labels=tokens())
        with pytest.raises(LogitsError, match=r"of the logits of LlamaForCausalLM.*model\.eval\(\).*unpatch"):
            USES[use](outputs.logits)
        assert not hasattr(outputs.logits, "dtype")
        assert "not computed" in repr(outputs)


def test_code_that_needs_logits_gets_them(llama: Any) -> None:
    inputs = {"input_ids": tokens(), "labels": tokens()}
    torch.manual_seed(0)
    generated = llama.eval().generate(tokens(), max_new_tokens=4, do_sample=False, pad_token_id=0)
    evaluated, trained = llama(**inputs), llama.train()(input_ids=tokens()).logits
    with patch(llama):
        torch.testing.assert_close(llama(input_ids=tokens()).logits, trained, rtol=0, atol=0)
        step(llama, inputs)
        found = llama.eval()(**inputs)
        torch.testing.assert_close((found.loss, found.logits), (evaluated.loss, evaluated.logits), rtol=0, atol=0)
        assert torch.equal(llama.generate(tokens(), max_new_tokens=4, do_sample=False, pad_token_id=0), generated)


def attributes(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    return [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]


def test_unpatch_restores_the_model(llama: Any) -> None:
    inputs = {"input_ids": tokens(), "labels": tokens()}
    before, expected = attributes(llama), step(llama, inputs)
    signature = inspect.signature(llama.forward)
    with patch(llama) as model:
        assert model is llama
        assert inspect.signature(llama.forward) == signature  # Trainer reads it
        assert type(llama).__name__ == LLAMA
        step(llama, inputs)
    assert attributes(llama) == before
    assert torch.equal(step(llama, inputs).loss, expected.loss)
    assert llama(**inputs).logits.shape == (2, 9, VOCABULARY)


def test_copies_and_saved_models(llama: Any, tmp_path: Path) -> None:
    inputs = {"input_ids": tokens(), "labels": tokens()}
    patch(llama)
    expected = step(llama, inputs)
    assert difference(step(copy.deepcopy(llama), inputs), expected) == 0
    torch.save(llama, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(loaded) is type(llama)
    adapter()._model_classes.clear()  # as in another process
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert difference(step(loaded, inputs), expected) == 0
    assert len(fused_options(loaded, inputs)) == 1
    unpatch(loaded)
    assert type(loaded) is type(make(LLAMA))
    assert type(loaded.lm_head) is torch.nn.Linear
    llama.save_pretrained(tmp_path)
    loaded = type(llama).from_pretrained(tmp_path)
    assert loaded.config.architectures == [LLAMA]
    unpatch(llama)
    loaded = type(llama).from_pretrained(tmp_path).train()
    assert difference(step(loaded, inputs), expected) <= TOLERANCE


def test_a_patched_class_patches_its_models(llama: Any) -> None:
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected, before = step(llama, inputs), attributes(llama)
    forward = type(llama).forward
    with patch(type(llama)):
        for model in (llama, make(LLAMA)):
            assert difference(step(model, inputs), expected) <= TOLERANCE
            assert isinstance(model.lm_head, FusedHead)
        with pytest.raises(RuntimeError, match="LlamaForCausalLM is patched already"):
            patch(llama)
    assert type(llama).forward is forward
    assert attributes(llama) == before
    with patch(llama), patch(type(model)):  # undoing the one leaves the other
        step(llama, inputs)
        unpatch(type(model))
        assert isinstance(llama.lm_head, FusedHead)
        patch(type(model))


@pytest.mark.parametrize("of_class", [False, True])
def test_a_forward_method_that_is_kept_after_unpatch_is_that_of_the_model(llama: Any, of_class: bool) -> None:
    with patch(type(llama) if of_class else llama):
        kept = llama.forward
    assert kept(input_ids=tokens(), labels=tokens()).logits.shape == (2, 9, VOCABULARY)


def test_accelerate_unwraps_a_patched_model(llama: Any) -> None:
    """Its autocast replaces the forward method of the model. Without it the model is still patched."""
    operations = pytest.importorskip("accelerate.utils.operations")
    unwrap = pytest.importorskip("accelerate.utils").extract_model_from_parallel
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected = step(llama, inputs)
    with patch(llama):
        llama._original_forward = llama.forward  # as Accelerator.prepare with mixed precision
        autocast = torch.autocast("cpu", torch.bfloat16)(llama.forward.__func__)
        llama.forward = MethodType(operations.convert_outputs_to_fp32(autocast), llama)
        assert len(fused_options(llama, inputs)) == 1
        unwrapped = unwrap(llama, keep_fp32_wrapper=False)
        assert len(fused_options(unwrapped, inputs)) == 1
        assert difference(step(unwrapped, inputs), expected) <= TOLERANCE
    assert unwrapped(**inputs).logits.shape == (2, 9, VOCABULARY)


@pytest.mark.parametrize("of_copy", [False, True])
def test_unpatch_leaves_copies_patched(llama: Any, of_copy: bool) -> None:
    patch(llama)
    models = [llama, copy.deepcopy(llama)]
    unpatch(models[of_copy])
    unpatched, patched = models[of_copy], models[not of_copy]
    assert unpatched(input_ids=tokens(), labels=tokens()).logits.shape == (2, 9, VOCABULARY)
    with pytest.raises(LogitsError):
        _ = patched(input_ids=tokens(), labels=tokens()).logits.shape
    unpatch(patched)
    assert attributes(patched) == attributes(unpatched)


def test_patch_without_a_model_patches_all_classes() -> None:
    transformers = import_transformers()
    before = transformers.LlamaForCausalLM.forward
    with patch():
        assert transformers.LlamaForCausalLM.forward is not before
        _ = transformers.Gemma4AssistantForCausalLM  # its forward method has no labels
        assert make("Gemma4ForCausalLM").lm_head.__class__ is torch.nn.Linear  # before its first step
        for name in (LLAMA, "ArceeForCausalLM"):
            model = make(name)
            with pytest.raises(LogitsError):
                _ = model(**inputs_of(name, model)).logits.shape
        with pytest.raises(RuntimeError, match=r"patch\(\) was called already"):
            patch()
    assert transformers.LlamaForCausalLM.forward is before
    with pytest.raises(RuntimeError, match=r"unpatch\(\) needs patch\(\)"):
        unpatch()


def test_a_subclass_with_another_forward_method_is_patched_too() -> None:
    transformers = import_transformers()

    class LlamaForCausalLM(transformers.LlamaForCausalLM):  # the name is in the mapping
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            return super().forward(input_ids=input_ids, labels=labels)

    with patch():
        model = LlamaForCausalLM(make(LLAMA).config)
        found = step(model, {"input_ids": tokens(), "labels": tokens()})
        assert hasattr(LlamaForCausalLM.forward, "installed")
    assert not hasattr(LlamaForCausalLM.forward, "installed")
    assert difference(found, step(model, {"input_ids": tokens(), "labels": tokens()})) <= TOLERANCE


WRONG_OPTIONS = (
    ("implementation", "cuda", ValueError, "implementation must be one of 'triton', .*, got 'cuda'"),
    ("memory_budget", -1, ValueError, r"memory_budget must be positive \(bytes\), got -1"),
    ("memory_budget", "512MiB", TypeError, "memory_budget must be a Python int, got str"),
    ("head_precision", "bfloat16", ValueError, "head_precision must be one of 'input', 'float32', got 'bfloat16'"),
    ("batch_invariant", 1, TypeError, "batch_invariant must be a bool, got int"),
)


def test_what_is_refused_before_a_step(llama: Any) -> None:
    with pytest.raises(TypeError, match=r"options must be among implementation, memory_budget.*, got softcap"):
        patch(llama, softcap=3.0)
    for name, value, error, message in WRONG_OPTIONS:
        with pytest.raises(error, match=message):
            patch(llama, **{name: value})
    for wrong in (torch.nn.Linear(2, 2), int, "llama"):
        with pytest.raises(TypeError, match="model_or_class must be a model of transformers"):
            patch(wrong)
    with pytest.raises(RuntimeError, match="this LlamaForCausalLM is not patched"):
        unpatch(llama)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM is not patched"):
        unpatch(type(llama))
    with pytest.raises(ValueError, match="LlamaModel is not supported: its forward method has no argument labels"):
        patch(llama.model)
    with pytest.raises(ValueError, match=r"MusicgenForCausalLM is not supported: its head must be a torch\.nn\.Linear"):
        patch(make("MusicgenForCausalLM"))
    with pytest.raises(ValueError, match=r"BertForSequenceClassification is not a causal language model: its get_out"):
        patch(make("BertForSequenceClassification"))
    with mock.patch.object(llama, "_tp_size", 2), pytest.raises(ValueError, match="tensor parallelism"):
        patch(llama)
    patch(llama)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM is patched already"):
        patch(llama)
    unpatch(llama)
    vars(llama.lm_head)["forward"] = llama.lm_head.forward  # as accelerate's hooks do
    with pytest.raises(ValueError, match="the forward method of its head was replaced, as by device_map"):
        patch(llama)
    llama.forward = llama.forward
    with pytest.raises(ValueError, match="the forward method of this LlamaForCausalLM was replaced"):
        patch(llama)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_labels_of_another_dtype_are_refused(llama: Any, dtype: torch.dtype) -> None:
    patch(llama)
    with pytest.raises(TypeError, match=f"labels of LlamaForCausalLM must have an integer dtype, got {str(dtype)[6:]}"):
        llama(input_ids=tokens(), labels=tokens().to(dtype))


def test_what_is_refused_in_a_step(llama: Any) -> None:
    model = make("ProphetNetForCausalLM")
    patch(model)
    with pytest.raises(LogitsError, match="ProphetNetForCausalLM is not supported by core_triton: it uses transpose"):
        step(model, inputs_of("ProphetNetForCausalLM", model))
    model = make("BambaForCausalLM")
    model.z_loss_coefficient = 0.1
    patch(model)
    with pytest.raises(LogitsError, match="BambaForCausalLM is not supported by core_triton: it uses logsumexp"):
        step(model, inputs_of("BambaForCausalLM", model))
    patch(llama)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has 8 rows of logits and 18 labels.*logits_to_keep"):
        llama(input_ids=tokens(), labels=tokens(), logits_to_keep=4)
    with (
        mock.patch("core_triton.hosts.deferred.is_dtensor", return_value=True),
        pytest.raises(ValueError, match="tensor parallelism of the head is not supported"),
    ):
        llama(input_ids=tokens(), labels=tokens())
    llama.config.vocab_size = 59
    with pytest.raises(ValueError, match="LlamaForCausalLM has 61 classes in its head, but its loss has vocab_size 59"):
        llama(input_ids=tokens(), labels=tokens())
    llama.config.vocab_size = VOCABULARY
    loss_function = llama.loss_function
    llama.loss_function = lambda logits, **_: logits if isinstance(logits, torch.Tensor) else None
    with pytest.raises(ValueError, match=r"computed its loss without torch\.nn\.functional\.cross_entropy of its log"):
        llama(input_ids=tokens(), labels=tokens())
    llama.loss_function = loss_function
    head = llama.lm_head
    with (
        mock.patch.object(FusedHead, "__call__", lambda self, input: torch.nn.functional.linear(input, self.weight)),
        pytest.raises(ValueError, match="computed its loss without a call of the module"),
    ):
        llama(input_ids=tokens(), labels=tokens())
    assert head.forward_call is None  # after an error, too
    assert llama(input_ids=tokens()).logits.shape == (2, 9, VOCABULARY)


def test_a_label_outside_of_the_vocabulary_makes_the_loss_nan(llama: Any) -> None:
    patch(llama)
    assert llama(input_ids=tokens(), labels=tokens() + VOCABULARY).loss.isnan()


def test_a_call_with_labels_during_another_is_refused(llama: Any) -> None:
    """Such as that of another thread, whose head would return logits when the first call has ended."""
    loss_function = llama.loss_function
    llama.loss_function = lambda **_: llama(input_ids=tokens(), labels=tokens()).loss
    patch(llama)
    with pytest.raises(RuntimeError, match="called with labels before another such call has ended"):
        llama(input_ids=tokens(), labels=tokens())
    llama.loss_function = loss_function
    assert llama(input_ids=tokens(), labels=tokens()).loss > 0


OPERATIONS: dict[str, Any] = {
    "a factor of type Tensor": lambda logits: logits * torch.ones(VOCABULARY),
    "+": lambda logits: logits + torch.ones(VOCABULARY),
    "comparison": lambda logits: logits == 0,
    "masked_fill": lambda logits: logits.masked_fill(torch.ones(VOCABULARY) > 0, 0),
    "softmax": lambda logits: torch.softmax(logits, -1),
    "assignment to a slice": lambda logits: logits.__setitem__(0, 0),
    "a second tanh": lambda logits: logits.tanh().tanh(),
    "the factor -2 after tanh": lambda logits: torch.tanh(logits) * -2,
    "an index of its classes": lambda logits: logits[..., 3],
    "the classes 3:61:1": lambda logits: logits[..., 3:],
    "to(torch.int64)": lambda logits: logits.to(torch.int64),
    "log_softmax": lambda logits: torch.nn.functional.log_softmax(logits, -1),
    "view(-1,)": lambda logits: logits.view(-1),
    "view(3, -1)": lambda logits: logits.view([3, -1]),
    "view(torch.int32,)": lambda logits: logits.view(torch.int32),
    "cross_entropy of 3 dimensions": lambda logits: torch.nn.functional.cross_entropy(logits, tokens()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_the_logits_that_is_not_supported_is_named(llama: Any, name: str) -> None:
    llama.loss_function = lambda logits, labels, **_: OPERATIONS[name](logits)
    patch(llama)
    message = f"LlamaForCausalLM is not supported by core_triton: it uses {name}"
    with pytest.raises(LogitsError, match=re.escape(message)):
        llama(input_ids=tokens(), labels=tokens())


def test_a_custom_loss_function_of_supported_operations(llama: Any) -> None:
    class_weights = torch.linspace(0.5, 2, VOCABULARY)

    def loss(logits: Any, labels: Any, **_: Any) -> Any:
        logits = 0.5 * torch.tanh(logits / 2.0).mul(3.0).div(0.5).to(torch.float32)
        kept = logits.reshape(18, -1).view(2, 9, VOCABULARY)[:, :-1][labels[:, 1:] % 2 == 0]
        return torch.nn.functional.cross_entropy(
            kept, labels[:, 1:][labels[:, 1:] % 2 == 0], class_weights, label_smoothing=0.1
        )

    llama.loss_function = loss
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected = step(llama, inputs)
    with patch(llama):
        assert difference(step(llama, inputs), expected) <= TOLERANCE


def test_class_weights_of_the_classes_of_a_slice(llama: Any) -> None:
    class_weights = torch.linspace(0.5, 2, VOCABULARY - 2)

    def loss(logits: Any, labels: Any, **_: Any) -> Any:
        kept = logits[..., : VOCABULARY - 2].reshape(18, -1)
        return torch.nn.functional.cross_entropy(kept, labels.flatten() % (VOCABULARY - 2), class_weights)

    llama.loss_function = loss
    inputs = {"input_ids": tokens(), "labels": tokens()}
    expected = step(llama, inputs)
    with patch(llama):
        assert difference(step(llama, inputs), expected) <= TOLERANCE


def test_another_version_of_transformers_is_refused(llama: Any) -> None:
    with (
        mock.patch.object(adapter().transformers, "__version__", "5.2.0"),
        pytest.raises(
            RuntimeError,
            match=r"^core_triton.hosts.transformers was tested with transformers 5\.20, .*, 5\.24, found 5\.2\.0$",
        ),
    ):
        patch(llama)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft uses it
def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    inputs = {"input_ids": tokens(), "labels": tokens()}
    for targets, more in (({"q_proj"}, {}), ({"q_proj"}, {"modules_to_save": ["lm_head"]})):
        for first in (True, False):
            torch.manual_seed(3)
            config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **more)
            base = make(LLAMA)
            if first:
                patch(base)
            model = peft.get_peft_model(base, config)
            if not first:
                patch(model)
            found = step(model, inputs)
            assert len(fused_options(model, inputs)) == 1
            unpatch(model)
            assert difference(found, step(model, inputs)) <= TOLERANCE
            assert not any(isinstance(module, FusedHead) for module in model.modules())
    model = peft.get_peft_model(make(LLAMA), peft.LoraConfig(r=4, target_modules={"lm_head"}))
    with pytest.raises(ValueError, match=r"its head has an adapter of peft \(Linear\).*modules_to_save"):
        patch(model)
    config = peft.LoraConfig(r=4, target_modules={"q_proj"}, trainable_token_indices={"embed_tokens": [3]})
    model = peft.get_peft_model(make(LLAMA, tie_word_embeddings=True), config)
    with pytest.raises(ValueError, match=r"trainable_token_indices of peft change its head.*modules_to_save"):
        patch(model)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("of_class", [True, False])
def test_a_parametrized_head(llama: Any, first: bool, of_class: bool) -> None:
    inputs = {"input_ids": tokens(), "labels": tokens()}

    def parametrize(model: Any) -> None:
        torch.manual_seed(4)
        spectral_norm(model.lm_head)  # changes each time that it computes the weight

    plain = copy.deepcopy(llama)
    parametrize(plain)
    expected = step(plain, inputs)
    patched = type(llama) if of_class else llama
    if first:
        parametrize(llama)
    with patch(patched):
        if not first:
            step(llama, inputs)
            parametrize(llama)
        assert difference(step(llama, inputs), expected) <= TOLERANCE
    assert llama(**inputs).logits.shape == (2, 9, VOCABULARY)
    remove_parametrizations(llama.lm_head, "weight")
    with patch(patched):
        assert len(fused_options(llama, inputs)) == 1
    assert llama(**inputs).logits.shape == (2, 9, VOCABULARY)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft uses it
@pytest.mark.parametrize("first", [True, False])
def test_a_tied_head_that_peft_copies(first: bool) -> None:
    """in_features and out_features of peft's copy are in the other order."""
    peft = pytest.importorskip("peft")
    inputs = {"input_ids": tokens(), "labels": tokens()}
    base = make(LLAMA, tie_word_embeddings=True)
    if first:
        patch(base)
    config = peft.LoraConfig(target_modules={"q_proj"}, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    model = peft.get_peft_model(base, config)
    if not first:
        patch(model)
    found = step(model, inputs)
    unpatch(model)
    assert difference(found, step(model, inputs)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "classes"),
    [(LLAMA, VOCABULARY), (GEMMA2, VOCABULARY), (GRANITE, VOCABULARY), ("InklingForCausalLM", VOCABULARY - 4)],
)
def test_torch_compile_has_one_graph(name: str, classes: int) -> None:
    model = make(name)
    inputs = inputs_of(name, model) | {"use_cache": False}
    expected = step(model, inputs)
    patch(model)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(**inputs).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for parameter, gradient in expected.gradients.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-4, atol=1e-6)
    with pytest.raises(LogitsError, match="unpatch"):
        _ = compiled(**inputs).logits.shape
    model.eval()
    assert compiled(**inputs).logits.shape == (2, 9, classes)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"label_smoothing_factor": 0.1}, {"bf16": True}], ids=lambda more: "-".join(more))
def test_trainer_takes_the_same_steps(more: dict[str, Any], tmp_path: Path) -> None:
    transformers = import_transformers()
    examples = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCABULARY, (8, 9)).tolist()]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=20,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    results = []
    for patched in (False, True):
        model = make(LLAMA)
        if patched:
            patch(model)
        trainer = transformers.Trainer(model, arguments, train_dataset=examples, eval_dataset=examples)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert len(losses) == 20
        results.append((losses, trainer.evaluate()["eval_loss"], list(model.parameters())))
    tolerance = 1e-3 if "bf16" in more else 1e-5
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance / 10)
    unpatch(model)
    # accelerate's autocast keeps the patched forward method.
    assert model.train()(input_ids=tokens(), labels=tokens()).logits.shape == (2, 9, VOCABULARY)
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.gpu
@pytest.mark.parametrize("name", [LLAMA, GEMMA2, GRANITE])
def test_kernels_on_a_gpu(name: str) -> None:
    model = make(name, tie_word_embeddings=False).to("cuda", torch.bfloat16)
    inputs = {key: value.cuda() for key, value in inputs_of(name, model).items()}
    expected = step(model.float(), inputs)
    patch(model.bfloat16(), implementation="triton")
    found = step(model, inputs)
    torch.testing.assert_close(found.loss.float(), expected.loss, rtol=2e-2, atol=0)
    gradients = (one.gradients["lm_head.weight"].float() for one in (found, expected))
    torch.testing.assert_close(*gradients, rtol=0.1, atol=5e-3)


RANKS = python("torch_ranks.py", "2", "chunked", *(f"check:{name}" for name in HOST_CHECKS))


@pytest.mark.slow
@pytest.mark.programs(RANKS, seconds=30)
@pytest.mark.parametrize("name", HOST_CHECKS)
def test_two_ranks(name: str, printed: Printed) -> None:
    result = printed[f"check:{name}"]
    assert not result["failure"], result["failure"]


ZERO3_RANKS = python("torch_ranks.py", "2", "chunked", *(f"check:{name}" for name in ZERO3_CHECKS))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-hosts installs it")
@pytest.mark.programs(ZERO3_RANKS, seconds=30)
@pytest.mark.parametrize("name", ZERO3_CHECKS)
def test_two_ranks_of_deepspeed(name: str, printed: Printed) -> None:
    result = printed[f"check:{name}"]
    assert not result["failure"], result["failure"]


@pytest.mark.parametrize("name", [LLAMA, GEMMA2, "MusicgenForCausalLM", "ProphetNetForCausalLM"])
def test_lines_of_the_report(name: str) -> None:
    assert row(name) in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_the_report_is_that_of_the_installed_release() -> None:
    assert page() == PAGE.read_text(encoding="utf-8")
