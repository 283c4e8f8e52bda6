"""Modules with the interfaces of trl and verl for tests where these are not installed: names, arguments and results, on
materialized logits. Each says which file of which version has its interface."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from core_triton import hosts

VOCABULARY, HIDDEN = 61, 16
ADAPTERS = ("trl", "verl")


@contextmanager
def installed(*modules: ModuleType) -> Iterator[None]:
    """Makes modules importable. Adapters of hosts that are imported within import these. Other modules that are
    imported within stay."""
    names = [module.__name__ for module in modules]
    hosts_of = {name.split(".")[0] for name in names}
    replaced = {name: one for name, one in sys.modules.items() if name.split(".")[0] in hosts_of}
    for name in replaced:
        del sys.modules[name]
    sys.modules.update(zip(names, modules, strict=True))
    _forget_adapters()
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(replaced)
        _forget_adapters()


def _forget_adapters() -> None:
    for name in ADAPTERS:
        sys.modules.pop(f"core_triton.hosts.{name}", None)
        if hasattr(hosts, name):
            delattr(hosts, name)


def trl_and_verl() -> AbstractContextManager[None]:
    """Makes all hosts of this file importable."""
    return installed(*trl(), *verl())


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


def statistics_of(logits: Tensor, targets: Tensor, outputs: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """The outputs of `ChunkedLogProbFunction` of trl 1.16.0 (`trl/kernels/chunked_logprob.py`) from logits (N, V)."""
    log_probs = logits.float().log_softmax(-1)
    found = {
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "log_sum_sq_probs": (2 * log_probs).logsumexp(-1).detach(),
        "mean_logits": logits.mean(-1).detach(),
        "is_top1": logits.argmax(-1) == targets,
    }
    return log_probs.gather(-1, targets[:, None])[:, 0], *(found[name] if name in outputs else None for name in found)


class ChunkedLogProbFunction:
    """`trl/kernels/chunked_logprob.py` of trl 1.16.0."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Tensor | None, ...]:
        logits = nn.functional.linear(hidden, weight, bias).float() * logit_scale
        if final_logit_softcapping is not None:
            logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
        return statistics_of(logits / temperature, targets, outputs)


class Model(nn.Module):
    """A model with a head, without attention."""

    def __init__(self, seed: int = 0, softcap: float | None = None, scale: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(softcap=softcap, scale=scale)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, HIDDEN)
            self.layer = nn.Linear(HIDDEN, HIDDEN)
            self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.hidden_states(input_ids))

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embed(input_ids))) + self.embed(input_ids)


def trl(version: str = "1.16.0") -> list[ModuleType]:
    """trl 1.16.0: `trl/trainer/utils.py` and the trainers' files."""
    utils = module(
        "trl.trainer.utils",
        _ChunkedLogProbFunction=ChunkedLogProbFunction,
        _use_triton=lambda device: device.type == "cuda",
    )

    def add_fused_lm_head(model: Any, temperature: float = 1.0, outputs: tuple[str, ...] = ("log_probs",)) -> None:
        original = model.forward

        def forward(
            self: Any, input_ids: Tensor, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any
        ) -> Any:
            if not fused_lm_head:
                return original(input_ids)
            hidden, labels = self.hidden_states(input_ids)[:, :-1], labels[:, 1:]
            mask, weight = labels != -100, self.lm_head.weight
            compact = vars(utils)["_use_triton"](hidden.device)
            found = vars(utils)["_ChunkedLogProbFunction"].apply(
                hidden[mask] if compact else hidden.reshape(-1, hidden.shape[-1]),
                weight,
                self.lm_head.bias,
                labels[mask] if compact else labels.clamp(min=0).reshape(-1),
                temperature,
                32768,
                self.config.softcap,
                self.config.scale,
                outputs,
            )
            if compact:
                found = [None if one is None else one.new_zeros(mask.shape).masked_scatter(mask, one) for one in found]
            else:
                found = [None if one is None else one.view(mask.shape).masked_fill(~mask, 0) for one in found]
            names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
            return SimpleNamespace(**dict(zip(names, found, strict=True)), label_mask=mask)

        model.forward = MethodType(forward, model)

    class Trainer:
        outputs: tuple[str, ...] = ("log_probs", "entropy")
        temperature = 1.0
        loss_type: str
        _entropy_bonus_enabled: bool
        epsilon_low: float
        epsilon_high: float

        def __init__(self, model: Any, args: Any = None, ref_model: Any = None, **kwargs: Any) -> None:
            self.model, self.ref_model = Model() if isinstance(model, str) else model, ref_model
            self.args = args or Config()
            self.compute_loss_func = kwargs.get("compute_loss_func")
            self.metrics: dict[str, Any] = {}
            for name in ("temperature", "loss_type", "epsilon_low", "epsilon_high", "beta", *GRPO_ATTRIBUTES):
                if hasattr(self.args, name):
                    setattr(self, name, getattr(self.args, name))
            add_fused_lm_head(self.model, self.temperature, self.outputs)
            if ref_model is not None:
                add_fused_lm_head(ref_model, self.temperature)

        def compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return self._compute_loss(model, inputs)

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            raise NotImplementedError

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self.metrics = logs | self.metrics

        def train(self) -> None:
            tokens, ones = torch.arange(8).view(2, 4), torch.ones(2, 4, dtype=torch.long)
            prompts: dict[str, Tensor] = {"prompt_ids": tokens, "completion_ids": tokens, "completion_mask": ones}
            of_sft = {"input_ids": tokens, "labels": tokens}
            prompts |= {"prompt_mask": ones, "num_items_in_batch": torch.tensor(8)}
            of_grpo = {**prompts, "advantages": torch.ones(2)}
            for _ in range(self.args.max_steps):
                self.compute_loss(self.model, of_sft if isinstance(self, SFTTrainer) else of_grpo).backward()

    class SFTTrainer(Trainer):
        """`trl/trainer/sft_trainer.py`."""

        outputs = ("log_probs", "entropy", "is_top1")

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs, fused_lm_head=True)
            losses = -outputs.log_probs
            if self.args.loss_type == "dft":
                losses = losses * outputs.log_probs.exp().detach()
            count = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
            self.metrics = {"entropy": outputs.entropy.detach(), "is_top1": outputs.is_top1}
            return losses.sum() / torch.as_tensor(count).clamp(min=1)

    class GRPOTrainer(Trainer):
        """`trl/trainer/grpo_trainer.py`."""

        accelerator = SimpleNamespace(
            num_processes=2,  # which have the same numbers
            reduce=lambda tensor, reduction: 2 * tensor,
            gather=lambda tensor: torch.cat([tensor, tensor]),
            gather_for_metrics=lambda tensor: torch.stack([tensor, tensor]),
        )
        current_gradient_accumulation_steps = 3
        max_completion_length = 7
        router_aux_loss_coef = 0.2

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.aux_loss_enabled = self.args.aux_loss
            self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}

        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            batch_size: int | None = None,
            compute_entropy: bool = False,
            compute_aux_loss: bool = False,
            **of_images: Any,
        ) -> tuple[Tensor, Tensor, Tensor | None]:
            assert batch_size is None
            assert compute_entropy
            assert all(one is None for one in of_images.values())
            labels = input_ids.masked_fill(attention_mask == 0, -100)
            labels[:, :-logits_to_keep] = -100
            outputs = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
            kept = slice(-logits_to_keep, None)
            self.of_tokens = {"log_probs": outputs.log_probs.detach(), "entropies": outputs.entropy.detach()}
            aux_loss = model.layer.weight.square().mean() if compute_aux_loss else None
            return outputs.log_probs[:, kept], outputs.entropy[:, kept], aux_loss

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            length = inputs["completion_ids"].shape[1]
            log_probs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
                model, tokens, attention_mask, length, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
            )
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            old = inputs.get("old_per_token_logps")
            losses, ratio, kl = grpo_losses(self, log_probs, log_probs.detach() if old is None else old, mask, inputs)
            mode = "train" if self.model.training else "eval"
            metrics, steps = self._metrics[mode], self.current_gradient_accumulation_steps if mode == "train" else 1
            if self._entropy_bonus_enabled:
                losses = losses - 0.01 * entropies
            losses = losses * mask
            if self.loss_type in ("grpo", "sapo"):
                loss = (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean() / steps
            elif self.loss_type in ("cispo", "dapo", "vespo"):
                normalizer = inputs["num_items_in_batch"] / self.accelerator.num_processes
                loss = losses.sum() / (normalizer * steps / self.args.steps_per_generation if steps > 1 else normalizer)
            elif self.loss_type == "dr_grpo":
                loss = losses.sum() / (len(losses) * self.max_completion_length) / steps
            elif self.loss_type == "luspo":
                loss = losses.sum(-1).mean() / steps
            else:
                loss = losses.sum() / mask.sum().clamp(min=1) / steps
            if aux_loss is not None:
                loss = loss + self.router_aux_loss_coef * aux_loss / steps
                metrics["aux_loss"].append(aux_loss.item())
            self._add_metrics(metrics, mask, inputs["advantages"], ratio, kl, entropies)
            return loss

        def _add_metrics(
            self, metrics: Any, mask: Tensor, advantages: Tensor, ratio: Tensor, kl: Any, entropies: Tensor
        ) -> None:
            def mean(one: Tensor) -> float:
                return ((one * mask).sum() / mask.sum().clamp(min=1)).item()

            advantages = advantages[:, None] if advantages.ndim == 1 else advantages
            if kl is not None:
                metrics["kl"].append(mean(kl))
            metrics["entropy"].append(mean(entropies))
            if self.loss_type == "cispo":
                metrics["cispo_clip_ratio"].append(mean((ratio > self.epsilon_high) & (advantages > 0)))
            elif self.loss_type not in ("sapo", "vespo"):
                low, high = (
                    (ratio < 1 - self.epsilon_low) & (advantages < 0),
                    (ratio > 1 + self.epsilon_high) & (advantages > 0),
                )
                for name, one in (("low", low), ("high", high), ("region", low | high)):
                    metrics[f"clip_ratio/{name}_mean"].append(mean(one))
                shares = [((one * mask).sum(-1) / mask.sum(-1)).tolist() for one in (low, high)]
                of_low, of_high = ([one for one in rows if one == one] or [torch.nan] for rows in shares)
                metrics["clip_ratio/low_min"].append(min(of_low))
                metrics["clip_ratio/high_max"].append(max(of_high))

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            mode = "train" if self.model.training else "eval"
            means = {name: sum(values) / len(values) for name, values in self._metrics[mode].items()}
            self.metrics = logs | means | self.of_tokens  # the last ones of the model, to compare them
            self._metrics[mode].clear()

    class SequenceTrainer(Trainer):
        """The call of DPO, KTO and RLOO: a loss of the sums of log-probabilities."""

        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Tensor:
            labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
            outputs = model(input_ids=inputs["input_ids"], labels=labels, fused_lm_head=True)
            self.metrics = {name: value.detach() for name, value in vars(outputs).items() if value is not None}
            sums = outputs.log_probs.sum(1)
            if self.ref_model is not None:
                with torch.no_grad():
                    reference = self.ref_model(inputs["input_ids"], labels=labels, fused_lm_head=True)
                sums = sums - reference.log_probs.sum(1)
            return -nn.functional.logsigmoid(0.1 * sums).mean()

    made = {"SFTTrainer": SFTTrainer, "GRPOTrainer": GRPOTrainer}
    outputs = {
        "DPOTrainer": ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs"),
        "KTOTrainer": ("log_probs", "entropy", "mean_logits"),
        "RLOOTrainer": ("log_probs", "entropy"),
    }
    for name, computed in outputs.items():
        made[name] = type(name, (SequenceTrainer,), {"outputs": computed})
    configs: dict[str, Any] = {name.replace("Trainer", "Config"): Config for name in made}
    configs["GRPOConfig"] = lambda **options: Config(**({"loss_type": "dapo"} | options))
    package = module("trl", __path__=[], __version__=version, **made, **configs)
    trainer = module("trl.trainer", __path__=[], utils=utils)
    vars(package)["trainer"] = trainer
    return [package, trainer, utils]


GRPO_ATTRIBUTES = (
    *("importance_sampling_level", "off_policy_mask_threshold", "top_entropy_quantile", "_entropy_bonus_enabled"),
    *("use_vllm", "vllm_importance_sampling_correction"),
)


class Config(SimpleNamespace):
    """The options of trainers that the adapter reads, with trl's defaults but those of `loss_type` and `beta`."""

    def __init__(self, **options: Any) -> None:
        defaults = {
            "torch_compile": False,
            "label_smoothing_factor": 0.0,
            "loss_type": "nll",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "delta": None,
            "use_bias_correction_kl": True,
            "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05,
            "importance_sampling_level": "token",
            "off_policy_mask_threshold": None,
            "top_entropy_quantile": 1.0,
            "_entropy_bonus_enabled": False,
            "use_vllm": False,
            "vllm_importance_sampling_correction": True,
            "max_steps": 0,
            "steps_per_generation": 2,
            "aux_loss": False,
        }
        super().__init__(**(defaults | options))


def grpo_losses(
    trainer: Any, log_probs: Tensor, old: Tensor, mask: Tensor, inputs: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The losses of tokens in `GRPOTrainer._compute_loss` of trl 1.16.0, their ratios and KL divergences."""
    advantages = inputs["advantages"]
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    logs = log_probs - old
    if trainer.importance_sampling_level == "sequence":
        logs = ((logs * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    unbounded, kl = logs.exp(), None
    ratio = unbounded
    if trainer.loss_type == "cispo":
        losses = -ratio.clamp(max=trainer.epsilon_high).detach() * advantages * log_probs
    elif trainer.loss_type == "sapo":
        positive, negative = trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg
        temperatures = torch.where(advantages > 0, positive, negative)
        losses = -torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures * advantages
    else:
        clipped = ratio.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
        ratio = ratio if trainer.args.delta is None else ratio.clamp(max=trainer.args.delta)
        losses = -torch.min(ratio * advantages, clipped * advantages)
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        losses = losses * inputs["importance_sampling_ratio"]
    if trainer.beta:
        difference = inputs["ref_per_token_logps"] - log_probs
        kl = torch.exp(difference) - difference - 1
        kl = kl * unbounded if trainer.args.use_bias_correction_kl else kl
        losses = losses + trainer.beta * kl
    return losses, ratio, kl


@contextmanager
def calls_of(adapter: Any) -> Iterator[list[tuple[str, Any]]]:
    """Which functions of core_triton the head calls with gradients: their names and reductions."""
    calls: list[tuple[str, Any]] = []

    def recorded(name: str) -> Any:
        function = getattr(adapter, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                calls.append((name, options.get("reduction")))
            return function(*arguments, **options)

        return mock.patch.object(adapter, name, call)

    with recorded("linear_log_probs"), recorded("linear_token_loss_with_stats"):
        yield calls


def named(options: dict[str, Any], names: tuple[str, ...]) -> str:
    return "-".join([*(str(value) for value in options.values()), *(name.split("_")[0] for name in names)])


def verl(version: str = "0.9.1") -> list[ModuleType]:
    """verl 0.9.1: `verl/utils/kernel/linear_cross_entropy.py`, and the import of its function in
    `verl/models/mcore/model_forward_fused.py`."""

    def linear_cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: Any = None,
    ) -> tuple[Tensor | None, ...]:
        logits = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), weight) / temperature
        return statistics_of(logits, labels.reshape(-1), ("entropy",))[:2]

    kernel = module("verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=linear_cross_entropy)
    names = ("verl", "verl.utils", "verl.utils.kernel", "verl.models", "verl.models.mcore")
    packages = {name: module(name, __path__=[]) for name in names}
    vars(packages["verl"])["__version__"] = version
    vars(packages["verl.utils.kernel"])["linear_cross_entropy"] = kernel
    fused = module("verl.models.mcore.model_forward_fused", linear_cross_entropy=linear_cross_entropy)
    return [*packages.values(), kernel, fused]
