"""Fine-tune a language model on instructions, fully or with adapters (LoRA), in a custom training loop.

    python examples/finetune_instructions.py                  # a small model on generated instructions: one minute
    python examples/finetune_instructions.py --lora
    python examples/finetune_instructions.py --weights Llama-3.2-1B-Instruct --data alpaca.json --lora --out my-adapter

--weights is a Hugging Face folder. Its chat template formats the instructions, and only the tokens of answers count in
the loss. Instructions of different lengths are packed into rows, without attention between them. With --lora, the
folder's weights are frozen, including the head, and the loss does not compute the head's gradient.
--mesh divides the model and its batches over the devices of this host (docs/scale.md).

`python -m flax_models.train --weights ... --lora-rank 32` does the same with the features that a long run needs:
checkpoints, --resume, gradient accumulation, memory estimates, throughput and several hosts.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from flax_models.data.batches import Batch, padded
from flax_models.data.corpus import load_corpus
from flax_models.data.dialogue import Dialogue
from flax_models.data.examples import Example, fit_examples
from flax_models.data.packing import PackedSampler, pack_rows
from flax_models.data.tokenizer import cache_folder, load_or_train
from flax_models.data.vocabulary import Vocabulary, made_from_text, read_hub_vocabulary
from flax_models.errors import RunError
from flax_models.export import save_with_tokenizer
from flax_models.hub.adapter_folder import save_adapter
from flax_models.hub.config import read_config
from flax_models.hub.weights import check_new_folder, load
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.model.lora import adapt, merge
from flax_models.model.lora_config import LoraConfig
from flax_models.model.parameters import is_adapter, name_of
from flax_models.model.sampling import Sampling, continue_prompts
from flax_models.train.mesh import (
    check_sizes,
    check_vocabulary,
    context_of,
    loss_on,
    made_on,
    make_mesh,
    put_batch,
    state_placements,
)
from flax_models.train.step import TrainState

MODEL = ModelConfig(
    vocab_size=1024, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, max_seq_len=256
)
ROWS = 4  # rows per batch
SHOWN, ANSWER = 3, 40  # number of answers printed at the end, and the maximum number of tokens of each

# The task of the small model: name the kind of a thing. Some pairs of a word and a question are held out.
KINDS = {
    "animal": "cat horse sparrow whale beetle otter goat salmon",
    "plant": "oak fern rose moss willow tulip bamboo cactus",
    "tool": "hammer saw chisel spade drill wrench rake pliers",
    "colour": "red green violet ochre crimson azure beige teal",
    "metal": "iron copper zinc silver tin lead gold nickel",
}
WAYS = (
    "What kind of thing is {}?",
    "{}: which kind is it?",
    "Name the kind that {} belongs to.",
    "Tell me what {} is.",
    "Sort this word: {}",
    "Of which kind is {}?",
)


def make_instructions(path: Path) -> None:
    """Writes a small file of instructions, one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for kind, words in KINDS.items():
            for word in words.split():
                for way in WAYS:
                    answer = f"{word.capitalize()} is of the kind {kind}."
                    file.write(json.dumps({"instruction": way.format(word), "output": answer}) + "\n")


def read_examples(data: Path | None, weights: Path | None, length: int) -> tuple[Vocabulary, list[list[Example]]]:
    """Returns the vocabulary, and the examples to train on and to hold out."""
    with tempfile.TemporaryDirectory() as folder:
        if data is None:
            data = Path(folder) / "instructions.jsonl"
            make_instructions(data)
        corpus = load_corpus([data])
    if weights is not None:
        vocabulary = read_hub_vocabulary(weights)
    else:
        tokenizer, _ = load_or_train(corpus.train, MODEL.vocab_size, cache_folder())
        vocabulary = made_from_text(tokenizer)
    found = []
    for part, records in (("to train on", corpus.train), ("held out", corpus.held_out)):
        dialogues = [record for record in records if isinstance(record, Dialogue)]
        if not dialogues:
            raise RunError(f"--data: {data} must have instructions {part}, got none")
        fitted = fit_examples(vocabulary.encode_examples(dialogues), length)
        print(f"{part}: {len(fitted.examples):,} instructions; {fitted.describe()}")
        found.append(fitted.examples)
    return vocabulary, found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = argparse.ArgumentParser(description="Fine-tune a language model on instructions.")
    options.add_argument(
        "--data", type=Path, help="instructions as JSON lines or a JSON list (default: a small generated file)"
    )
    options.add_argument(
        "--weights", type=Path, help="Hugging Face folder to start from (default: a small model with random weights)"
    )
    options.add_argument("--lora", action="store_true", help="train adapters of rank 16 and freeze the weights")
    options.add_argument("--steps", type=int, default=150, help="number of optimizer steps (150)")
    options.add_argument(
        "--max-seq-len", type=int, default=None, help="tokens per row (default: the model's maximum, up to 1024)"
    )
    options.add_argument(
        "--out", type=Path, help="folder to save the model to, or, with --weights and --lora, the adapter"
    )
    options.add_argument("--mesh", help="sizes of a mesh of all devices, such as data=2,fsdp=2 (default: one device)")
    chosen = options.parse_args(arguments)
    if chosen.steps < 1:
        options.error(f"--steps must be at least 1, got {chosen.steps}")
    if chosen.out is not None:
        check_new_folder(chosen.out)
    longest = MODEL.max_seq_len if chosen.weights is None else read_config(chosen.weights).max_seq_len
    length = min(longest, 1024) if chosen.max_seq_len is None else chosen.max_seq_len
    if not 1 <= length <= longest:
        options.error(f"--max-seq-len must be between 1 and the model's {longest}, got {length}")

    mesh = None if chosen.mesh is None else make_mesh(chosen.mesh)
    with context_of(mesh):
        finetune(chosen, length, mesh)


def finetune(chosen: argparse.Namespace, length: int, mesh: Mesh | None) -> None:
    """Trains, evaluates and saves the model, with the options of the command and rows of `length` tokens."""
    vocabulary, (train, held_out) = read_examples(chosen.data, chosen.weights, length)
    batches, evaluation = PackedSampler(train, ROWS, length, seed=0), pack_rows(held_out, length, most=64)

    config = vocabulary.fit(MODEL) if chosen.weights is None else read_config(chosen.weights)
    if mesh is not None:
        check_sizes(mesh, config, ROWS, "ROWS")
        check_vocabulary(mesh, config, "of the tokenizer" if chosen.weights is None else "of --weights")
    if chosen.weights is None:
        model = made_on(mesh, lambda: Decoder(config, rngs=nnx.Rngs(0)))
    else:  # compute in bfloat16; keep the parameters that train in float32
        dtypes = {"dtype": "bfloat16", "param_dtype": "float32"}
        model = load(chosen.weights, mesh=mesh, **dtypes, remat="attention", scan_layers=False)
    # A model with random weights also needs a trained embedding.
    lora = LoraConfig(lora_rank=16, unfreeze=("embedding",) if chosen.weights is None else ())
    if chosen.lora:
        adapt(model, lora, nnx.Rngs(1))

    def trains(path: tuple[Any, ...], _: Any) -> bool:
        name = name_of(path)
        return not chosen.lora or is_adapter(name) or name in lora.unfreeze

    graph, trained, frozen = nnx.split(model, trains, ...)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(part)) for part in (trained, frozen)]
    print(f"{sum(sizes):,} parameters, {sizes[0]:,} of them trainable, on {jax.devices()[0].device_kind}")
    peak = 3e-3 if chosen.weights is None else (2e-4 if chosen.lora else 2e-5)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(30, chosen.steps // 2), chosen.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99))

    def loss_of(trained: nnx.State, frozen: nnx.State, batch: Batch, reduction: str = "mean") -> jax.Array:
        model = nnx.merge(graph, trained, frozen)
        # Positions with target -100 do not count in the loss: the tokens before an answer, and padding.
        hidden = model(batch.tokens, batch.lengths)
        head = model.head_weight().astype(hidden.dtype)  # in the dtype of the other matmuls: saves one matmul
        return loss_on(mesh)(hidden, head, batch.targets, reduction=reduction, **model.config.loss_options())

    def begin(trained: nnx.State) -> TrainState:
        return TrainState(trained, optimizer.init(trained), jnp.zeros((), jnp.int32))

    def step(state: TrainState, frozen: nnx.State, batch: Batch) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, frozen, batch)
        updates, of_optimizer = optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, updates), of_optimizer, state.step + 1), loss

    # On a mesh, the optimizer's state is divided as the parameters are.
    placements = state_placements(mesh, jax.eval_shape(begin, trained))
    state = jax.jit(begin, out_shardings=placements)(trained)
    del model, trained  # frees their device memory
    compiled_step = jax.jit(step, donate_argnums=0, out_shardings=(placements, None))
    losses, began = [], time.monotonic()
    for number in range(1, chosen.steps + 1):
        state, loss = compiled_step(state, frozen, put_batch(mesh, batches.next()))
        losses.append(loss)  # stays on the device: reading it here would make the host wait for the step
        if number % 50 == 0 or number == chosen.steps:
            mean = np.mean(jax.device_get(losses))
            print(f"step {number:>5}/{chosen.steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s", flush=True)
            losses.clear()
    batches.close()
    total = jax.jit(partial(loss_of, reduction="sum"))
    windows = [put_batch(mesh, batch) for batch in padded(evaluation, ROWS)]
    mean = sum(float(total(state.params, frozen, batch)) for batch in windows) / evaluation.counted
    print(f"held-out loss {mean:.3f} nats per token\n")

    model = nnx.merge(graph, state.params, frozen)
    plain = merge(model) if chosen.lora else model
    if chosen.out is not None and chosen.weights is not None and chosen.lora:
        save_adapter(model, chosen.out, base=chosen.weights)
        print(
            f"saved the adapter to {chosen.out}; "
            f"use it with peft.PeftModel.from_pretrained(model of {chosen.weights}, ...)"
        )
    elif chosen.out is not None:
        save_with_tokenizer(plain, vocabulary, chosen.out)
        print(
            f"saved the model to {chosen.out}; "
            f"use it with: python -m flax_models.generate --chat --weights {chosen.out} --prompt ..."
        )
    prompts = [example.tokens[: int(np.argmax(example.counted))].tolist() for example in held_out]
    prompts = [prompt for prompt in prompts if 0 < len(prompt) <= config.max_seq_len - ANSWER][:SHOWN]
    if prompts:
        show_answers(plain, vocabulary, prompts)


def show_answers(model: Decoder, vocabulary: Vocabulary, prompts: list[list[int]]) -> None:
    """Prints prompts with the model's answers."""
    ends = (*vocabulary.ends, *vocabulary.format.ends)
    answers = continue_prompts(
        model, prompts, length=ANSWER, key=jax.random.key(0), sampling=Sampling(temperature=0), ends=ends
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{vocabulary.tokenizer.decode(prompt)}{vocabulary.tokenizer.decode(answer)}\n")


if __name__ == "__main__":
    try:
        main()
    except RunError as error:  # an error that the user can fix
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
