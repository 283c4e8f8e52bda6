"""Rows of trl in `benchmarks.hosts`: `compute_loss` of its trainers on prepared batches, without generation.

The part "step" is `compute_loss`, the backward pass and the optimizer. The part "loss" is `_compute_loss` of
`GRPOTrainer` and the backward pass with a model whose layers are replaced by fixed hidden states: the head and the
loss, with the gradients of hidden states and head. trl 1.16 refuses Liger's loss in these trainers, so no row has it.

Both variants are timed in turns, because the host's part of their time changes from minute to minute. A patch changes
one trainer, so a trainer as it is can live beside it.
"""

import tempfile
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import data
from benchmarks.hosts_process import check_differences
from benchmarks.hosts_rows import Row
from benchmarks.hosts_torch import (
    Prepared,
    allocated,
    device_type,
    differences,
    from_nothing,
    loss_and_gradient,
    make_model,
    make_optimizer,
    prepared,
    time_on_device,
)
from benchmarks.methods import load
from benchmarks.timing import BATCHES

PROMPT_SHARE = 4  # a sequence is a prompt of a quarter of its tokens, and a completion
CHECKED = 2, 512  # most sequences and tokens of the batch on which a variant is compared
WORDS = 8  # of the tokenizer, which no batch uses
LOGGING_STEPS = 10  # steps after which a trainer logs its metrics, trl's default


def measure_in_turns(rows: Sequence[Row], seconds: float, kernels: bool) -> list[dict[str, Any]]:
    """Returns the figures of rows that differ in the variant only, whose steps are timed in turns.

    Raises:
        UnavailableError: a library is not installed.
        ValueError: the loss or the gradient of the head differs from trl's by more than rounding.
    """
    with from_nothing(), tempfile.TemporaryDirectory() as folder:
        before = allocated()
        return time_on_device([prepare(row, folder, allocated() - before) for row in rows], seconds, kernels)


def prepare(row: Row, folder: str, others: int) -> Prepared:
    """Makes, checks and warms up the trainer of a row.

    Args:
        row: the row.
        folder: for what the trainer writes.
        others: bytes on the GPU that trainers of other variants hold.
    """
    trainer = make_trainer(row, folder)
    batches = [make_batch(row, trainer, row.batch, row.seq, seed) for seed in range(BATCHES)]
    errors = changed(trainer, row)
    optimizer = make_optimizer(trainer.model) if row.part == "step" else None
    steps = 0

    def step() -> None:
        nonlocal steps
        loss_of(row, trainer, batches[steps % BATCHES]).backward()
        if optimizer is not None:
            optimizer.step()
        trainer.model.zero_grad()
        steps += 1
        if steps % LOGGING_STEPS == 0:
            trainer.log({})

    return prepared(row, step, errors, others)


def changed(trainer: Any, row: Row) -> dict[str, float]:
    """Patches a trainer for a row's variant and returns by how much its loss and the gradient of its head differ from
    before.

    Raises:
        ValueError: they differ by more than rounding.
    """
    sequences, tokens = (min(pair) for pair in zip(CHECKED, (row.batch, row.seq), strict=True))
    batch = make_batch(row, trainer, sequences, tokens, BATCHES)
    expected = loss_and_gradient(trainer.model, lambda: loss_of(row, trainer, batch))
    if row.variant == "ours":
        load("core_triton.hosts.trl").patch(trainer)
    found = loss_and_gradient(trainer.model, lambda: loss_of(row, trainer, batch))
    return check_differences(row.variant, differences(found, expected))


def loss_of(row: Row, trainer: Any, batch: dict[str, Any]) -> Tensor:
    """Returns the loss that a trainer computes of a prepared batch."""
    return (trainer.compute_loss if row.part == "step" else trainer._compute_loss)(trainer.model, dict(batch))


def make_trainer(row: Row, folder: str) -> Any:
    """Returns a trainer of trl with a random model of a row's config.

    Args:
        row: its trainer, config and part.
        folder: for what it writes.
    """
    trl, datasets = load("trl"), load("datasets")
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": row.batch,
        "bf16": False,  # the weights are bfloat16
        "gradient_checkpointing": False,
        "use_cpu": device_type() == "cpu",
        "report_to": [],
        "disable_tqdm": True,
    }
    example = {"prompt": "w1"}
    kwargs: dict[str, Any] = {}
    if row.trainer == "GRPO":
        clip = {"epsilon": data.EPSILON_LOW, "epsilon_high": data.EPSILON_HIGH}
        options |= {"num_generations": 2, "max_completion_length": row.seq, **clip}
        kwargs["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    elif row.trainer == "DPO":
        example |= {"chosen": "w2", "rejected": "w3"}
        kwargs["ref_model"] = make_model(row.config)
    else:
        example["completion"] = "w2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = getattr(trl, f"{row.trainer}Trainer")(
            make_model(row.config, **({"num_hidden_layers": 1} if row.part == "loss" else {})),
            args=getattr(trl, f"{row.trainer}Config")(**options),
            train_dataset=datasets.Dataset.from_list([example] * row.batch),
            processing_class=make_tokenizer(),
            **kwargs,
        )
    trainer.current_gradient_accumulation_steps = 1  # `train` sets it
    trainer.remove_callback(load("transformers").PrinterCallback)  # prints what is logged
    trainer.model.train()
    if row.part == "loss":
        fix_hidden_states(trainer.model)
    return trainer


def fix_hidden_states(model: Any) -> None:
    """Makes a model call its head with random hidden states, the same in each call, which get a gradient."""
    states: dict[torch.Size, Tensor] = {}

    def forward(input_ids: Tensor, **_: Any) -> Any:
        if input_ids.shape not in states:
            generator = torch.Generator(input_ids.device).manual_seed(0)
            shape = *input_ids.shape, model.config.hidden_size
            made = torch.randn(shape, generator=generator, device=input_ids.device, dtype=torch.bfloat16)
            states[input_ids.shape] = made.requires_grad_()
        states[input_ids.shape].grad = None
        return SimpleNamespace(last_hidden_state=states[input_ids.shape])

    model.base_model.forward = forward


def make_tokenizer() -> Any:
    """Returns a tokenizer of a few words. Trainers need one, but batches are prepared without it."""
    transformers, tokenizers = load("transformers"), load("tokenizers")
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_batch(row: Row, trainer: Any, sequences: int, tokens: int, seed: int) -> dict[str, Any]:
    """Returns what a trainer's `compute_loss` gets, with random tokens and no padding.

    Args:
        row: its trainer.
        trainer: without a patch. GRPO's old log-probabilities are drawn around those of its model.
        sequences: of the batch. In DPO the first half is the chosen ones.
        tokens: of a sequence.
        seed: of what is drawn.
    """
    model, device = trainer.model, device_type()
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(model.config.vocab_size, (sequences, tokens), generator=generator, device=device)
    ones, prompt = torch.ones_like(drawn), tokens // PROMPT_SHARE
    labels = drawn.clone()
    labels[:, :prompt] = -100
    if row.trainer == "SFT":
        return {"input_ids": drawn, "attention_mask": ones, "labels": drawn}
    if row.trainer == "DPO":
        return {"input_ids": drawn, "attention_mask": ones, "completion_mask": (labels != -100).long()}
    with torch.no_grad():
        outputs = model(input_ids=drawn, attention_mask=ones, labels=labels, fused_lm_head=True)
    log_probs = outputs.log_probs[:, prompt - 1 :].float()
    old = data.per_token(log_probs.flatten().cpu().numpy()).old_log_prob
    advantages = np.random.default_rng(seed).standard_normal(sequences).astype(np.float32)
    return {
        "prompt_ids": drawn[:, :prompt],
        "prompt_mask": ones[:, :prompt],
        "completion_ids": drawn[:, prompt:],
        "completion_mask": ones[:, prompt:],
        "advantages": torch.as_tensor(advantages, device=device),
        "old_per_token_logps": torch.as_tensor(old, device=device).view_as(log_probs),
        "num_items_in_batch": torch.tensor(log_probs.numel(), device=device),
    }
