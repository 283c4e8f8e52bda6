"""Patched trainers of trl against unpatched ones: losses, gradients, statistics, and what is refused.

These are stand-ins of trl's trainers (`trl_stand_ins.py`). test_hosts_trl_release.py has those of the released package.
"""

import importlib
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from trl_stand_ins import VOCABULARY, Config, Model, calls_of, installed, named, trl

from core_triton import check_token_loss
from core_triton.hosts import trl_losses


@pytest.fixture
def adapter() -> Iterator[Any]:
    with installed(*trl()):
        adapter = importlib.import_module("core_triton.hosts.trl")
        functions = [vars(adapter.utils)[name] for name in ("_ChunkedLogProbFunction", "_use_triton")]
        yield adapter
        for cls in list(adapter._classes):
            adapter.unpatch(cls)
        for one in list(adapter._trainers):
            one.remove()
        adapter._replace_functions()
        assert [vars(adapter.utils)[name] for name in ("_ChunkedLogProbFunction", "_use_triton")] == functions


class Step(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, Any]


def step(trainer: Any, inputs: dict[str, Any]) -> Step:
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    (3 * loss).backward()  # as with a scaler of gradients
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.log({})
    return Step(loss.detach(), gradients, trainer.metrics)


def same(found: Step, expected: Step) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


THREE = [("linear_token_loss_with_stats", "sum")]
FOUR = [("linear_log_probs", None)]
WITH_STATISTICS = [("linear_token_loss_with_stats", "none")]


def randint(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(sum(shape)))


def uniform(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def sft_inputs() -> dict[str, Any]:
    tokens = randint(3, 9)
    labels = tokens.clone()
    labels[:, :3] = labels[1, 6:] = -100
    labels[2, 5] = 0
    return {"input_ids": tokens, "labels": labels}


def preference_inputs() -> dict[str, Any]:
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[:, :3] = mask[1, 6:] = 0
    return {"input_ids": randint(4, 9), "completion_mask": mask}


def log_probs_of(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """The log-probabilities of the tokens of completions, with their gradients."""
    tokens, mask = (
        torch.cat([inputs[f"{of}_{name}"] for of in ("prompt", "completion")], 1) for name in ("ids", "mask")
    )
    return trainer._get_per_token_logps_and_entropies(trainer.model, tokens, mask, 6, compute_entropy=True)[0]


def grpo_inputs(trainer: Any, *names: str) -> dict[str, Any]:
    """The inputs of `_compute_loss`, with these besides those that are always there."""
    prompt, completion = randint(4, 3), randint(4, 6)
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = mask[3, 2:] = 0
    inputs: dict[str, Any] = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 0.25, -2.0]),
        "num_items_in_batch": torch.tensor(40),
    }
    log_probs = log_probs_of(trainer, inputs).detach()
    more = {
        "old_per_token_logps": log_probs + torch.linspace(1, -1, 24).view(4, 6),
        "ref_per_token_logps": log_probs + uniform(2, 4, 6) - 0.5,
        "importance_sampling_ratio": uniform(3, 4, 6) * (uniform(4, 4, 6) > 0.2),
        "tool_mask": (uniform(5, 4, 6) > 0.3).long(),
    }
    return inputs | {name: more[name] for name in names}


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("count", [None, 23])
def test_sft_takes_three_matmuls(adapter: Any, loss_type: str, count: int | None) -> None:
    trainer = adapter.trl.SFTTrainer(Model(bias=True), args=Config(loss_type=loss_type))
    inputs = sft_inputs() | ({} if count is None else {"num_items_in_batch": count})
    expected = step(trainer, inputs)
    with adapter.patch(trainer, implementation="chunked") as patched, calls_of(adapter) as calls:
        assert patched is trainer
        same(step(trainer, inputs), expected)
        assert calls == THREE


@pytest.mark.parametrize(
    "model", [{"softcap": 3.0}, {"scale": 0.5}, {"softcap": 2.0, "scale": 3.0, "bias": True}], ids="-".join
)
@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_softcap_scale_and_temperature(adapter: Any, name: str, model: dict[str, Any]) -> None:
    trainer = getattr(adapter.trl, f"{name}Trainer")(Model(**model), args=Config(temperature=0.7))
    inputs = sft_inputs() if name == "SFT" else preference_inputs()
    expected = step(trainer, inputs)
    with adapter.patch(trainer):
        same(step(trainer, inputs), expected)


@pytest.mark.parametrize("name", ["DPO", "KTO", "RLOO"])
def test_losses_of_sequences_have_all_statistics(adapter: Any, name: str) -> None:
    trainer = getattr(adapter.trl, f"{name}Trainer")(Model(), ref_model=Model(1))
    expected = step(trainer, preference_inputs())
    with adapter.patch(trainer), calls_of(adapter) as calls:
        same(step(trainer, preference_inputs()), expected)
        assert calls == (FOUR if name == "RLOO" else WITH_STATISTICS)


def test_is_top1_is_that_of_the_first_of_equal_logits(adapter: Any) -> None:
    trainer, inputs = adapter.trl.SFTTrainer(Model()), sft_inputs()
    trainer.model.lm_head.weight.data[:] = trainer.model.lm_head.weight.data[0].clone()
    expected = step(trainer, inputs)
    assert 0 < expected.metrics["is_top1"].sum() < (inputs["labels"] != -100).sum()
    with adapter.patch(trainer):
        same(step(trainer, inputs), expected)


OLD, REF, RATIO, TOOLS = "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio", "tool_mask"
TOKEN_LOSSES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"loss_type": "grpo"}, (OLD,)),
    ({"loss_type": "grpo"}, ()),
    ({"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": False}, (OLD, REF)),
    ({"loss_type": "dr_grpo", "beta": 0.3}, (OLD, REF)),
    ({"loss_type": "dapo", "beta": 0.3}, (REF,)),
    ({"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False}, (REF,)),
    ({"loss_type": "dapo", "delta": 1.3, "epsilon_high": 0.2}, (OLD,)),
    ({"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.3, "use_vllm": True}, (OLD, RATIO)),
    ({"loss_type": "luspo", "beta": 0.3}, (OLD, REF, TOOLS)),
    ({"loss_type": "grpo"}, (OLD, TOOLS)),
    ({"loss_type": "sapo", "sapo_temperature_neg": 1.5}, (OLD,)),
    ({"loss_type": "sapo", "use_vllm": True}, (OLD, RATIO)),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, (OLD,)),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, ()),
    ({"loss_type": "cispo", "epsilon_high": 0.9, "beta": 0.3}, (OLD, REF)),
    ({"loss_type": "cispo", "epsilon_high": 0.9}, (OLD,)),
    ({"loss_type": "cispo", "epsilon_high": 0.9, "beta": 0.3, "use_bias_correction_kl": False}, (REF,)),
]


@pytest.mark.parametrize(("options", "names"), TOKEN_LOSSES, ids=[named(*one) for one in TOKEN_LOSSES])
def test_grpo_takes_three_matmuls(adapter: Any, options: dict[str, Any], names: tuple[str, ...]) -> None:
    trainer = adapter.trl.GRPOTrainer(Model(), args=Config(temperature=0.9, **options))
    inputs = grpo_inputs(trainer, *names)
    expected = step(trainer, inputs)
    with adapter.patch(trainer), calls_of(adapter) as calls:
        same(step(trainer, inputs), expected)
        assert calls == THREE


@pytest.mark.parametrize(
    "options",
    [
        {"importance_sampling_level": "sequence"},
        {"loss_type": "vespo"},
        {"off_policy_mask_threshold": 0.5},
        {"top_entropy_quantile": 0.8},
        {"_entropy_bonus_enabled": True},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("saved_budget", [0, 2**20])
def test_grpo_with_what_is_known_only_after_the_pass(adapter: Any, options: dict[str, Any], saved_budget: int) -> None:
    trainer = adapter.trl.GRPOTrainer(Model(), args=Config(**{"loss_type": "dapo", **options}))
    inputs = grpo_inputs(trainer, OLD)
    expected = step(trainer, inputs)
    with adapter.patch(trainer, saved_budget=saved_budget):
        with mock.patch.object(adapter, "linear_log_probs", wraps=adapter.linear_log_probs) as called:
            same(step(trainer, inputs), expected)
        assert called.call_args.kwargs["saved_budget"] == saved_budget


def test_named_losses_are_those_of_policy_loss(adapter: Any) -> None:
    log_prob, advantage, old, ref = (uniform(seed, 64) for seed in range(4))
    found: set[str] = set()
    for loss_type in ("dapo", "sapo", "cispo"):
        for given in ((True, True), (True, False), (False, True), (False, False)):
            beta, weighted_kl = 0.3 * given[1], not given[1]
            loss = trl_losses.PolicyLoss(
                loss_type=loss_type,
                epsilon_low=0.1,
                epsilon_high=1.1,
                beta=beta,
                delta=None,
                temperatures=(1.0, 1.5),
                weighted_kl=weighted_kl,
                given=(*given, False),
            )
            per_token = [advantage - 0.5, *(one for one, there in zip((old, ref), given, strict=True) if there)]
            check_token_loss(loss, *per_token)
            name = loss.named()
            assert (name is None) == (loss_type == "sapo" or (loss_type == "cispo" and given == (True, True)))
            if name is not None:
                found.add(name.name)
                gradients = [trl_losses.Objective(one, tuple(per_token)).derivative(log_prob) for one in (loss, name)]
                torch.testing.assert_close(*gradients)
    assert found == {"grpo", "reinforce", "cispo"}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_gradient_of_rounding_errors_is_no_other_loss(adapter: Any, loss_type: str, weighted: bool) -> None:
    """All answers have the same reward, and the reference model is that of the first step."""
    options = {"loss_type": loss_type, "beta": 0.3, "use_bias_correction_kl": weighted}

    class Grpo(adapter.trl.GRPOTrainer):  # whose gradients are compared
        def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
            return super()._get_per_token_logps_and_entropies(*arguments, **options)

    trainer = Grpo(Model(), args=Config(**options))
    inputs = grpo_inputs(trainer, REF)
    inputs["advantages"] = torch.zeros(4)
    inputs[REF] = log_probs_of(trainer, inputs).detach() + 1e-6 * (uniform(6, 4, 6) - 0.5)
    expected = step(trainer, inputs)
    with adapter.patch(trainer), calls_of(adapter) as calls:
        same(step(trainer, inputs), expected)
        assert calls == THREE


def test_gradients_of_another_loss_are_refused(adapter: Any) -> None:
    trainer, inputs = adapter.trl.SFTTrainer(Model()), sft_inputs()
    message = "the gradient of the loss of SFTTrainer by the log-probabilities is not the one that"
    with adapter.patch(trainer):
        outputs = trainer.model(**inputs, fused_lm_head=True)
        with pytest.raises(RuntimeError, match=message):
            outputs.log_probs.square().sum().backward()
        outputs = trainer.model(**inputs, fused_lm_head=True)
        (outputs.log_probs * torch.nan).sum().backward()
        assert trainer.model.lm_head.weight.grad.isnan().any()


def test_trainers_that_compute_another_loss(adapter: Any) -> None:
    class Sft(adapter.trl.SFTTrainer):
        def compute_loss(self, *arguments: Any, **options: Any) -> Tensor:
            return self.model(**arguments[1], fused_lm_head=True).log_probs.square().sum()

    class Grpo(adapter.trl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return log_probs_of(self, inputs).square().sum()

    for cls in (Sft, Grpo):
        trainer = cls(Model(), args=Config(loss_type="nll" if cls is Sft else "dapo"))
        inputs = sft_inputs() if cls is Sft else grpo_inputs(trainer)
        expected = step(trainer, inputs)
        with adapter.patch(trainer), calls_of(adapter) as calls:
            same(step(trainer, inputs), expected)
            assert calls == (WITH_STATISTICS if cls is Sft else FOUR)


def test_a_gradient_of_entropies_is_not_lost(adapter: Any) -> None:
    """In trl entropies have a gradient. Beside three matmuls, and beside other statistics, they have none here."""

    class Sft(adapter.trl.SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Tensor:
            outputs = model(**inputs, fused_lm_head=True)
            return -outputs.log_probs.mean() - 0.1 * outputs.entropy.mean()

    class Grpo(adapter.trl.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return super().compute_loss(model, inputs) - 0.1 * self.entropies.sum()

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*arguments, **options)
            self.entropies = found[1]
            return found

    for cls, loss_type in ((Sft, "nll"), (Grpo, "dapo"), (Grpo, "vespo")):
        trainer = cls(Model(), args=Config(loss_type=loss_type))
        inputs = sft_inputs() if cls is Sft else grpo_inputs(trainer)
        expected = step(trainer, inputs)
        with adapter.patch(trainer):
            if loss_type == "vespo":  # takes four matmuls
                same(step(trainer, inputs), expected)
                continue
            with pytest.raises(
                RuntimeError, match=f"the loss of {cls.__name__} has a gradient with respect to the entropies, which"
            ):
                step(trainer, inputs)


def test_a_method_that_a_trainer_has_as_an_attribute_stays(adapter: Any) -> None:
    sft, grpo = adapter.trl.SFTTrainer(Model()), adapter.trl.GRPOTrainer(Model(), args=Config(loss_type="dapo"))

    def of_sft(model: Any, inputs: Any) -> Tensor:
        return model(**inputs, fused_lm_head=True).log_probs.square().sum()

    def of_grpo(model: Any, inputs: Any) -> Tensor:
        return log_probs_of(grpo, inputs).square().sum()

    def log(logs: dict[str, float]) -> None:
        logged.append(logs)

    logged: list[dict[str, float]] = []
    trainer, inputs = adapter.trl.GRPOTrainer(Model(), args=Config(loss_type="dapo")), grpo_inputs(grpo)
    trainer.log = log
    with adapter.patch(trainer):
        trainer.compute_loss(trainer.model, inputs)
        trainer.log({"loss": 2.0})
        of_adapter = trainer._compute_loss
    assert logged == [{"loss": 2.0}]
    of_adapter(trainer.model, inputs)  # what wrapped it calls it after the end of the patch
    assert len(trainer._metrics["train"]["entropy"]) == 2
    trainer._metrics["train"]["entropy"].pop()
    assert len(trainer._metrics["train"]["entropy"]) == 1
    assert trainer.log is log

    for trainer, name, method in ((sft, "compute_loss", of_sft), (grpo, "_compute_loss", of_grpo)):
        setattr(trainer, name, method)
        inputs = sft_inputs() if trainer is sft else grpo_inputs(trainer)
        expected = step(trainer, inputs)
        with adapter.patch(trainer):
            same(step(trainer, inputs), expected)
        assert vars(trainer)[name] is method
        delattr(trainer, name)
        adapter.patch(trainer)
        setattr(trainer, name, method)  # after the patch
        adapter.unpatch(trainer)
        assert vars(trainer)[name] is method


def test_a_batch_without_tokens_that_count(adapter: Any) -> None:
    trainer, inputs = adapter.trl.SFTTrainer(Model()), sft_inputs()
    inputs["labels"][:] = -100
    with adapter.patch(trainer):
        found = step(trainer, inputs)
    assert found.loss == 0
    assert all((gradient == 0).all() for gradient in found.gradients.values())
    assert "lm_head.weight" in found.gradients


def test_evaluation_and_frozen_models_take_no_gradients(adapter: Any) -> None:
    trainer, inputs = adapter.trl.SFTTrainer(Model()), sft_inputs()
    expected = trainer.compute_loss(trainer.model, inputs)
    with adapter.patch(trainer), calls_of(adapter) as calls:
        with torch.no_grad():
            torch.testing.assert_close(trainer.compute_loss(trainer.model, inputs), expected)
        assert not calls
        trainer.model.requires_grad_(False)
        assert not trainer.compute_loss(trainer.model, inputs).requires_grad


def test_a_head_of_another_dtype(adapter: Any) -> None:
    """With `cast_lm_head_to_fp32` the hidden states are float32."""
    trainer = adapter.trl.SFTTrainer(Model())
    with adapter.patch(trainer):
        hidden, weight = uniform(0, 5, 16), uniform(1, VOCABULARY, 16)
        arguments = randint(5), 1.0, 32768, None, 1.0, ("log_probs",)
        for dtype in (torch.bfloat16, torch.float16):
            found = trainer._core_triton.head(hidden, weight.to(dtype), weight[:, 0].to(dtype), *arguments)
            cast = weight.to(dtype).float()
            expected = trainer._core_triton.head(hidden, cast, cast[:, 0], *arguments)
            assert torch.equal(found[0], expected[0])
        with torch.autocast("cpu", torch.bfloat16):
            found = trainer._core_triton.head(hidden, weight.bfloat16(), None, *arguments)
        expected = trainer._core_triton.head(hidden.bfloat16(), weight.bfloat16(), None, *arguments)
        assert torch.equal(found[0], expected[0])


def test_other_models_and_other_calls_are_unchanged(adapter: Any) -> None:
    patched, other = (adapter.trl.SFTTrainer(Model()) for _ in range(2))
    inputs = sft_inputs()
    with adapter.patch(patched), mock.patch.object(adapter._Installed, "head", side_effect=AssertionError):
        step(other, inputs)
        assert patched.model(inputs["input_ids"]).shape == (3, 9, VOCABULARY)
        with pytest.raises(AssertionError):
            step(patched, inputs)
        step(other, inputs)  # after an error in the model


def test_threads_can_call_the_same_model(adapter: Any) -> None:
    trainer, inputs = adapter.trl.SFTTrainer(Model()), sft_inputs()
    expected = trainer.compute_loss(trainer.model, inputs)
    both = threading.Barrier(2, timeout=60)

    def wait(*_: Any) -> None:
        both.wait()

    trainer.model.layer.register_forward_hook(wait)
    with adapter.patch(trainer), ThreadPoolExecutor(2) as pool, calls_of(adapter) as calls:
        for found in pool.map(lambda _: trainer.compute_loss(trainer.model, inputs), range(2)):
            torch.testing.assert_close(found, expected)
        assert calls == 2 * THREE


def test_patch_of_a_class(adapter: Any) -> None:
    cls, inputs = adapter.trl.SFTTrainer, sft_inputs()

    class Mine(cls):
        pass

    before, init = cls(Model()), cls.__init__
    with adapter.patch(cls, memory_budget=2**20):
        assert inspect.signature(cls) == inspect.signature(init.__get__(before))
        trainers = [cls(Model()), Mine(Model())]
        for trainer in trainers:
            with calls_of(adapter) as calls:
                step(trainer, inputs)
            assert calls == THREE
            assert trainer._core_triton.options == {"memory_budget": 2**20}
        assert not hasattr(before, "_core_triton")
        with pytest.raises(RuntimeError, match="SFTTrainer is patched already"):
            adapter.patch(cls)
        with pytest.raises(RuntimeError, match="this SFTTrainer is patched already"):
            adapter.patch(trainers[0])
        adapter.unpatch(trainers[0])
        with adapter.patch(Mine):
            assert hasattr(Mine(Model()), "_core_triton")
    assert cls.__init__ is init
    assert "__init__" not in vars(Mine)
    for trainer in (*trainers, cls(Model())):
        assert not hasattr(trainer, "_core_triton")
        with calls_of(adapter) as calls:
            step(trainer, inputs)
        assert not calls


def test_patch_without_an_argument(adapter: Any) -> None:
    classes = [getattr(adapter.trl, name) for name in adapter.TRAINERS]
    with pytest.raises(ValueError, match=r"saved_budget must be 0 for SFTTrainer, got 8: only GRPOTrainer and RLOO"):
        adapter.patch(saved_budget=8)
    assert not adapter._classes
    with adapter.patch(classes[0]), adapter.patch():
        assert all(hasattr(cls(Model()), "_core_triton") for cls in classes)
        with pytest.raises(RuntimeError, match=r"patch\(\) was called already"):
            adapter.patch()
        adapter.unpatch()
        assert [hasattr(cls(Model()), "_core_triton") for cls in classes] == [True, False, False, False, False]
        adapter.patch()
    with pytest.raises(RuntimeError, match=r"unpatch\(\) needs patch\(\) before it"):
        adapter.unpatch()


def test_unpatch_leaves_no_hook(adapter: Any) -> None:
    trainer = adapter.trl.GRPOTrainer(Model(), args=Config(loss_type="dapo"), ref_model=Model(1))
    attributes = set(vars(trainer))
    for _ in range(2):
        adapter.patch(trainer)
        adapter.unpatch(trainer)
    assert set(vars(trainer)) == attributes
    for model in (trainer.model, trainer.ref_model):
        assert not model._forward_pre_hooks
        assert not model._forward_hooks
    with pytest.raises(RuntimeError, match="this GRPOTrainer is not patched"):
        adapter.unpatch(trainer)
    with pytest.raises(RuntimeError, match="GRPOTrainer is not patched"):
        adapter.unpatch(type(trainer))


def test_what_is_refused(adapter: Any) -> None:
    make = adapter.trl.SFTTrainer
    with pytest.raises(TypeError, match=r"options must be among implementation, .*, got softcap"):
        adapter.patch(make(Model()), softcap=3.0)
    with pytest.raises(ValueError, match=r"implementation must be one of 'triton', .*, got 'cuda'"):
        adapter.patch(make(Model()), implementation="cuda")
    for wrong in (Model(), int):
        with pytest.raises(TypeError, match=r"trainer_or_class must be one of SFTTrainer, .* or a class of these, got"):
            adapter.patch(wrong)
    for name in ("DPO", "KTO"):
        with pytest.raises(ValueError, match=f"saved_budget must be 0 for {name}Trainer, got 8: only GRPOTrainer"):
            adapter.patch(getattr(adapter.trl, f"{name}Trainer")(Model()), saved_budget=8)
    with pytest.raises(ValueError, match="SFTTrainer cannot be patched with torch_compile, got torch_compile=True"):
        adapter.patch(make(Model(), args=Config(torch_compile=True)))
    with pytest.raises(ValueError, match=r"with label_smoothing_factor, got label_smoothing_factor=0\.1"):
        adapter.patch(make(Model(), args=Config(label_smoothing_factor=0.1)))
    with pytest.raises(ValueError, match="SFTTrainer cannot be patched with compute_loss_func, got compute_loss_func="):
        adapter.patch(make(Model(), compute_loss_func=print))
    trainer = make(Model())
    adapter.patch(trainer)
    trainer.model.lm_head.weight.ds_id = 0
    with pytest.raises(ValueError, match=r"DeepSpeed ZeRO-3 is not supported by core_triton\.hosts\.trl: SFTT"):
        step(trainer, sft_inputs())


def test_the_head_of_another_number_of_tokens_is_refused(adapter: Any) -> None:
    class Halves(adapter.trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Tensor, attention_mask: Tensor, *arguments: Any, **options: Any
        ) -> Any:
            halves = zip(input_ids.chunk(2), attention_mask.chunk(2), strict=True)
            method = super()._get_per_token_logps_and_entropies
            found = [method(model, *half, *arguments, **options) for half in halves]
            return [None if one[0] is None else torch.cat(one) for one in zip(*found, strict=True)]

    trainer = Halves(Model(), args=Config(loss_type="dapo"))
    inputs = grpo_inputs(trainer)
    expected = step(trainer, inputs)
    message = "^the head of Halves got 10 tokens, but its loss has 18$"
    with adapter.patch(trainer), pytest.raises(RuntimeError, match=message):
        step(trainer, inputs)
    same(step(trainer, inputs), expected)


def test_metrics_of_grpo_wait_until_they_are_logged(adapter: Any) -> None:
    trainer = adapter.trl.GRPOTrainer(Model(), args=Config(loss_type="dapo", beta=0.3))
    inputs = grpo_inputs(trainer, OLD, REF)
    trainer._metrics["train"]["reward"].append(0.5)
    expected = []
    for patched in (False, True):
        with adapter.patch(trainer) if patched else nullcontext(), mock.patch.object(trl_losses, "MOST_WAITING", 2):
            for _ in range(2):
                trainer.compute_loss(trainer.model, inputs)
            lengths = {name: len(values) for name, values in trainer._metrics["train"].items()}
            assert lengths.pop("reward", 1) == 1
            assert lengths == ({} if patched else dict.fromkeys(lengths, 2))
            trainer.compute_loss(trainer.model, inputs)  # one more than may wait
            assert len(trainer._metrics["train"]["kl"]) == (2 if patched else 3)
        assert {len(values) for name, values in trainer._metrics["train"].items() if name != "reward"} == {3}
        expected.append({name: list(values) for name, values in trainer._metrics["train"].items() if name != "reward"})
        trainer.log({"loss": 1.0}, 0.0)
        assert trainer.metrics["loss"] == 1.0
        assert not trainer._metrics["train"]
    torch.testing.assert_close(*expected, rtol=2e-5, atol=2e-6)
    assert list(expected[0]) == list(expected[1])


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "grpo", "luspo"])
def test_grpo_with_experts_in_evaluation_and_without_tokens(adapter: Any, loss_type: str) -> None:
    trainer = adapter.trl.GRPOTrainer(Model(), args=Config(loss_type=loss_type, aux_loss=True, epsilon_high=0.3))
    inputs = grpo_inputs(trainer, OLD)
    few, none = ({**inputs, "completion_mask": inputs["completion_mask"].clone()} for _ in range(2))
    few["completion_mask"][1] = none["completion_mask"][:] = 0  # where mask_truncated_completions is on
    expected = [step(trainer, one) for one in (inputs, few, none)]
    trainer.model.eval()
    expected.append(step(trainer, inputs))
    with adapter.patch(trainer):
        trainer.model.train()
        found = [step(trainer, one) for one in (inputs, few, none)]
        trainer.model.eval()
        found.append(step(trainer, inputs))
    assert expected[0].loss != expected[3].loss
    assert expected[0].metrics["aux_loss"] > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6, equal_nan=True)


def test_log_probabilities_that_a_trainer_of_grpo_changes(adapter: Any) -> None:
    class Grpo(adapter.trl.GRPOTrainer):
        factors: Tensor

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
            log_probs, *others = super()._get_per_token_logps_and_entropies(*arguments, **options)
            return log_probs * self.factors, *others

    message = r"^the gradient of the loss of \w+ by the log-probabilities is not"
    trainer = Grpo(Model(), args=Config(loss_type="dapo"))
    trainer.factors = torch.ones(4, 6)
    inputs = grpo_inputs(trainer)
    expected = step(trainer, inputs)
    with adapter.patch(trainer):
        same(step(trainer, inputs), expected)
        trainer.factors = torch.linspace(0.5, 1, 24).view(4, 6)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                trainer.compute_loss(trainer.model, inputs).backward()

    def change(*arguments: Any) -> Any:
        outputs = arguments[-1]
        outputs.log_probs = outputs.log_probs * torch.linspace(0.5, 1, 8)
        return outputs

    trainer = adapter.trl.GRPOTrainer(Model(), args=Config(loss_type="dapo"))
    with adapter.patch(trainer):
        for _ in range(2):  # the first step, and the first one after a log
            trainer.compute_loss(trainer.model, inputs).backward()
            hook = trainer.model.register_forward_hook(change)
            trainer.log({})
            with pytest.raises(RuntimeError, match=message):
                trainer.compute_loss(trainer.model, inputs).backward()
            hook.remove()
            trainer.log({})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("options", [{"loss_type": "grpo"}, {"loss_type": "dapo", "delta": 1.5}, {"loss_type": "sapo"}])
def test_the_loss_of_grpo_waits_for_no_device(adapter: Any, options: dict[str, Any]) -> None:
    """The gradients of trl's choice of the tokens that count wait too, so the backward pass is not part of this."""
    trainer = adapter.trl.GRPOTrainer(Model(), args=Config(beta=0.1, **options))
    inputs = {name: one.cuda() for name, one in grpo_inputs(trainer, TOOLS, OLD, REF).items()}
    trainer.model.cuda()
    expected = step(trainer, inputs)
    with adapter.patch(trainer):
        trainer.compute_loss(trainer.model, inputs)  # compiles the kernels
        trainer.model.zero_grad()
        hooks = [
            register(lambda *_, mode=mode: torch.cuda.set_sync_debug_mode(mode))
            for register, mode in (
                (trainer.model.register_forward_pre_hook, "default"),  # trl chooses the tokens in the model
                (trainer.model.register_forward_hook, "error"),
            )
        ]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = trainer.compute_loss(trainer.model, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for hook in hooks:
                hook.remove()
        (3 * loss).backward()
        trainer.log({})  # the mean of two equal steps
    torch.testing.assert_close(loss.detach(), expected.loss, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(trainer.metrics, expected.metrics, rtol=1e-3, atol=1e-4)
    gradient = trainer.model.lm_head.weight.grad
    torch.testing.assert_close(gradient, expected.gradients["lm_head.weight"], rtol=1e-2, atol=1e-4)


def test_another_version_of_trl_is_refused(adapter: Any) -> None:
    with (
        mock.patch.object(adapter.trl, "__version__", "1.15.2"),
        pytest.raises(RuntimeError, match=r"^core_triton.hosts.trl was tested with trl 1\.16, found 1\.15\.2$"),
    ):
        adapter.patch()
