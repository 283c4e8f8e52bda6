"""The losses of trl's trainers of which `core_triton.hosts.trl` computes the gradients in three matmuls.

In SFT trl computes the loss. In GRPO the loss and the metrics of `_compute_loss` are computed here, because trl reads
each metric on the host at once, and so waits for the device a dozen times in a step. Here they stay on the device until
the trainer logs.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core_triton import token_losses


class Objective(NamedTuple):
    """A loss whose gradient with respect to the log-probabilities is that of the trainer's loss, up to a factor.

    Args:
        token_loss: of `linear_token_loss`.
        per_token: (N,) each, its arguments besides the log-probabilities.
        token_weight: (N,) positive, a factor of each token, or None.
        checked: whether the gradient that the trainer computed is compared with this one, for which the backward pass
            waits for the device.
        rounding: () or a number. Where no derivative is larger, rounding may be a large part of all of them.
    """

    token_loss: Callable[..., Tensor]
    per_token: tuple[Tensor, ...] = ()
    token_weight: Tensor | None = None
    checked: bool = True
    rounding: Tensor | float = 0.0

    def derivative(self, log_prob: Tensor) -> Tensor:
        """Returns the derivative (N,) by log_prob (N,) of each token's loss times its weight."""
        with torch.enable_grad():
            log_prob = log_prob.detach().requires_grad_()
            losses = self.token_loss(log_prob, *self.per_token)
            weight = torch.ones_like(losses) if self.token_weight is None else self.token_weight
            return torch.autograd.grad(losses, log_prob, weight)[0]


def _nll(log_prob: Tensor) -> Tensor:
    return -log_prob


def _dft(log_prob: Tensor) -> Tensor:
    return -log_prob.exp().detach() * log_prob


def sft_objective(trainer: Any) -> Objective:
    """The loss of `SFTTrainer.compute_loss` (trl/trainer/sft_trainer.py): a sum over tokens divided by a number."""
    return Objective({"nll": _nll, "dft": _dft}[trainer.args.loss_type])


# The losses of GRPOTrainer that are means of losses of tokens
MEAN_OF_SEQUENCES = ("grpo", "sapo")  # of the means of its tokens
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # min(ratio * advantage, clip(ratio) * advantage)
MOST_WAITING = 1000  # steps whose metrics are on the device
# What `_compute_loss` passes on to `_get_per_token_logps_and_entropies`, of models with images
OF_IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def is_of_tokens(trainer: Any) -> bool:
    """Returns whether in `GRPOTrainer._compute_loss` (trl/trainer/grpo_trainer.py) the loss of a token depends on no
    other log-probability and on no entropy of the same pass."""
    return (
        trainer.importance_sampling_level == "token"
        and trainer.loss_type in (*CLIPPED, "sapo", "cispo")
        and trainer.off_policy_mask_threshold is None
        and trainer.top_entropy_quantile == 1.0
        and not trainer._entropy_bonus_enabled
    )


class Metrics:
    """What a trainer logs of its steps, on the device until it does so."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.waiting: list[tuple[str, list[str], Tensor]] = []

    def add(self, mode: str, values: Mapping[str, Tensor]) -> None:
        """Adds the numbers () of a step in "train" or "eval"."""
        if len(self.waiting) == MOST_WAITING:
            self.read()
        self.waiting.append((mode, list(values), torch.stack(list(values.values()))))

    def read(self) -> None:
        """Moves all numbers to `_metrics` of the trainer. Waits for the device."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        numbers = iter(torch.cat([values for _, _, values in waiting]).tolist())
        for mode, names, _ in waiting:
            for name in names:
                self.trainer._metrics[mode][name].append(next(numbers))


class GrpoLoss:
    """One call of `GRPOTrainer._compute_loss` (trl/trainer/grpo_trainer.py), if `is_of_tokens`.

    Args:
        trainer: a GRPOTrainer.
        inputs: of `_compute_loss`, with arrays (B, T) of the tokens of completions.
        metrics: get what trl adds to `_metrics`.
        checked: of `Objective`.
    """

    def __init__(self, trainer: Any, inputs: dict[str, Any], metrics: Metrics, *, checked: bool) -> None:
        self.trainer, self.inputs, self.metrics, self.checked = trainer, inputs, metrics, checked
        self.completion_mask: Tensor = inputs["completion_mask"]  # of the rows that the head gets
        with_mask = "tool_mask" in inputs
        self.mask = self.completion_mask * inputs["tool_mask"] if with_mask else self.completion_mask
        advantages = inputs["advantages"]
        self.advantages: Tensor = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        self.factors = self.advantages  # of the ratios in the loss
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:  # a factor that is not negative
            self.factors = self.advantages * inputs["importance_sampling_ratio"]
        self.old: Tensor | None = inputs.get("old_per_token_logps")
        self.ref: Tensor | None = inputs["ref_per_token_logps"] if trainer.beta != 0.0 else None
        args = trainer.args
        self.policy = PolicyLoss(
            loss_type=trainer.loss_type,
            epsilon_low=trainer.epsilon_low,
            epsilon_high=trainer.epsilon_high,
            beta=trainer.beta,
            delta=args.delta,
            temperatures=(args.sapo_temperature_pos, args.sapo_temperature_neg),
            weighted_kl=args.use_bias_correction_kl,
            given=(self.old is not None, self.ref is not None, with_mask),
        )
        # What `objective` needs. While the model calls its head, the device waits for the host, so it is made before.
        arrays = [self.factors, *(one for one in (self.old, self.ref) if one is not None)]
        arrays += [self.mask] if with_mask else []
        # The derivative of the KL divergence is beta * (1 - ratio), which is rounding if all ratios are about 1.
        self.rounding = 0.01 * trainer.beta
        if trainer.loss_type in MEAN_OF_SEQUENCES:
            of_sequences = 1.0 / self.mask.sum(-1, keepdim=True).clamp(min=1.0)
            self.rounding = self.rounding * of_sequences.amax()
            arrays.append(of_sequences)
        shape = self.completion_mask.shape
        self.arrays = torch.stack([one.float().expand(shape).flatten() for one in arrays])
        on_gpu = self.completion_mask.is_cuda
        self.count = self.completion_mask.count_nonzero().to("cpu", non_blocking=on_gpu)
        self.counted = torch.cuda.current_stream(self.completion_mask.device).record_event() if on_gpu else None

    def objective(self, tokens: int) -> Objective:
        """Returns the objective of the head.

        On a GPU, it waits until the tokens of the loss are counted. trl waits longer before it calls the head, because
        it picks these tokens.

        Args:
            tokens: the number of tokens of the head.

        Raises:
            RuntimeError: the loss has another number of tokens.
        """
        if self.counted is not None:
            self.counted.synchronize()
        if tokens != int(self.count):
            raise RuntimeError(
                f"the head of {type(self.trainer).__name__} got {tokens} tokens, but its loss has {int(self.count)}"
            )
        places = torch.nonzero_static(self.completion_mask.flatten(), size=tokens).squeeze(1)
        per_token = list(self.arrays[:, places].unbind())
        weight = per_token.pop() if self.trainer.loss_type in MEAN_OF_SEQUENCES else None
        token_loss = self.policy.named() or self.policy
        return Objective(token_loss, tuple(per_token), weight, self.checked, self.rounding)

    def compute(self, model: Any) -> Tensor:
        """Returns the loss () of a model, which calls the head once, and adds the metrics."""
        trainer, inputs = self.trainer, self.inputs
        log_probs, entropies, aux_loss = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], self.completion_mask], dim=1),
            self.completion_mask.size(1),
            compute_entropy=True,
            compute_aux_loss=trainer.aux_loss_enabled,
            **{name: inputs.get(name) for name in OF_IMAGES},
        )
        mode = "train" if trainer.model.training else "eval"
        steps = trainer.current_gradient_accumulation_steps if mode == "train" else 1.0
        terms = self.policy.terms(log_probs, self.factors, self.old, self.ref)
        loss = self._mean(terms.loss * self.mask, mode, steps)
        of_experts = {}
        if trainer.aux_loss_enabled:
            loss = loss + trainer.router_aux_loss_coef * aux_loss / steps
            of_experts["aux_loss"] = trainer.accelerator.gather_for_metrics(aux_loss.detach()).mean()
        with torch.no_grad():
            self.metrics.add(mode, of_experts | self._of_tokens(terms, entropies))
        return loss

    def _mean(self, losses: Tensor, mode: str, steps: float) -> Tensor:
        """Returns the loss () of losses (B, T) of tokens."""
        trainer, loss_type = self.trainer, self.trainer.loss_type
        if loss_type in ("cispo", "dapo"):
            normalizer = self.inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
            if mode == "train":
                normalizer = normalizer * steps / trainer.args.steps_per_generation
            return losses.sum() / normalizer
        if loss_type in MEAN_OF_SEQUENCES:
            return (losses.sum(-1) / self.mask.sum(-1).clamp(min=1.0)).mean() / steps
        if loss_type == "bnpo":
            return losses.sum() / self.mask.sum().clamp(min=1.0) / steps
        if loss_type == "dr_grpo":
            return losses.sum() / (losses.size(0) * trainer.max_completion_length) / steps
        return losses.sum(-1).mean() / steps  # luspo

    def _of_tokens(self, terms: "Terms", entropies: Tensor) -> dict[str, Tensor]:
        """Returns the metrics () that are computed from numbers (B, T) of tokens, those of all processes."""
        trainer, mask, ratio = self.trainer, self.mask, terms.ratio
        values = {"entropy": entropies} if terms.kl is None else {"kl": terms.kl, "entropy": entropies}
        clipped = trainer.loss_type in CLIPPED
        if clipped:
            low = (ratio < 1 - trainer.epsilon_low) & (self.advantages < 0)
            high = (ratio > 1 + trainer.epsilon_high) & (self.advantages > 0)
            values |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
        elif trainer.loss_type == "cispo":
            values["cispo_clip_ratio"] = (ratio > trainer.epsilon_high) & (self.advantages > 0)
        of_sequences = (torch.stack([one.float() for one in values.values()]) * mask).sum(-1)  # (metrics, B)
        lengths = mask.sum(-1)
        totals = trainer.accelerator.reduce(torch.cat([of_sequences.sum(1), lengths.sum()[None]]), reduction="sum")
        found = dict(zip(values, totals[:-1] / totals[-1].clamp(min=1.0), strict=True))
        if clipped:
            shares = trainer.accelerator.gather((of_sequences[-3:-1] / lengths).T.contiguous())  # (B, 2), low and high
            # NaN of sequences without tokens, and infinities if there are no others
            least = shares[:, 0].nan_to_num(nan=torch.inf).amin()
            largest = shares[:, 1].nan_to_num(nan=-torch.inf).amax()
            found["clip_ratio/low_min"] = least.masked_fill(least.isinf(), torch.nan)
            found["clip_ratio/high_max"] = largest.masked_fill(largest.isinf(), torch.nan)
        return found


class Terms(NamedTuple):
    """What the loss of a token consists of: arrays of one shape."""

    loss: Tensor
    ratio: Tensor  # of probabilities, which is compared with its bounds
    kl: Tensor | None


class PolicyLoss(NamedTuple):
    """The loss of a token in GRPOTrainer: called with log_prob, advantage, and those of old_log_prob, ref_log_prob and
    mask that are given, (N,) float32 each."""

    loss_type: str
    epsilon_low: float
    epsilon_high: float
    beta: float
    delta: float | None
    temperatures: tuple[float, float]  # of sapo, for positive and other advantages
    weighted_kl: bool  # whether the ratio multiplies the KL divergence
    given: tuple[bool, bool, bool]  # old_log_prob, ref_log_prob, mask

    def named(self) -> token_losses.Named | None:
        """Returns a loss of `token_losses`, which is one kernel, with the same derivative, if there is one."""
        with_old, _, with_mask = self.given
        plain = not with_mask and not (self.weighted_kl and self.beta) and min(self.epsilon_low, self.epsilon_high) >= 0
        if plain and self.loss_type in CLIPPED and self.delta is None:
            if with_old:
                return token_losses.grpo(self.epsilon_low, self.epsilon_high, self.beta)
            return token_losses.reinforce(self.beta)  # the ratio is 1
        if plain and self.loss_type == "cispo" and self.epsilon_high >= 1:
            if not with_old:
                return token_losses.reinforce(self.beta)
            if not self.beta:
                return token_losses.cispo(1.0, self.epsilon_high - 1)
        return None

    def __call__(self, log_prob: Tensor, advantage: Tensor, *others: Tensor) -> Tensor:
        rest = list(others)
        with_old, with_ref, with_mask = self.given
        old, ref = rest.pop(0) if with_old else None, rest.pop(0) if with_ref else None
        loss = self.terms(log_prob, advantage, old, ref).loss
        return loss * rest.pop(0) if with_mask else loss

    def terms(self, log_prob: Tensor, advantage: Tensor, old: Tensor | None, ref: Tensor | None) -> Terms:
        """Returns the loss of tokens without the mask, and what it is computed from."""
        unbounded = ratio = torch.exp(log_prob - (log_prob.detach() if old is None else old))
        if self.loss_type == "cispo":
            loss = -ratio.clamp(max=self.epsilon_high).detach() * advantage * log_prob
        elif self.loss_type == "sapo":
            positive, other = self.temperatures
            temperature = torch.where(advantage > 0, positive, other)
            loss = -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
        else:
            clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            ratio = ratio if self.delta is None else ratio.clamp(max=self.delta)
            loss = -torch.minimum(ratio * advantage, clipped * advantage)
        kl = None
        if ref is not None:
            difference = ref - log_prob
            kl = torch.expm1(difference) - difference
            kl = kl * unbounded if self.weighted_kl else kl
            loss = loss + self.beta * kl
        return Terms(loss, ratio, kl)
