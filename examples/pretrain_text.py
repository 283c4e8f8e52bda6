"""Train a small language model on text from random weights, in a custom training loop.

    python examples/pretrain_text.py                            # the source code of the Python standard library
    python examples/pretrain_text.py --data my-texts/ --prompt "Once upon a time" --out my-model

This takes about two minutes on two CPU cores. A tokenizer is trained on the text, and the batches are windows of the
token stream. The model returns hidden states, and the loss takes them and the head's weight. The (tokens, vocabulary)
logits of a step are never stored.

`python -m flax_models.train` does the same with the features that a long run needs: checkpoints, --resume, gradient
accumulation, memory estimates, throughput, and published models to start from (--weights).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from flax_models.data.batches import BatchSampler, held_out_windows
from flax_models.data.corpus import load_corpus
from flax_models.data.tokenizer import cache_folder, load_or_train
from flax_models.data.vocabulary import made_from_text
from flax_models.errors import RunError
from flax_models.export import save_with_tokenizer
from flax_models.generate import Source, continue_texts
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.model.sampling import Sampling
from jax_pallas import linear_cross_entropy

MODEL = ModelConfig(
    vocab_size=8192, hidden_size=128, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=64, max_seq_len=128
)
SEQUENCES = 4  # sequences per batch, each of max_seq_len tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = argparse.ArgumentParser(description="Train a small language model on text.")
    options.add_argument(
        "--data",
        type=Path,
        nargs="*",
        default=[],
        help="text files or folders (default: the source code of the Python standard library)",
    )
    options.add_argument("--steps", type=int, default=1000, help="number of optimizer steps (1000)")
    options.add_argument("--prompt", default="def ", help="prompt of the generated sample")
    options.add_argument("--out", type=Path, help="folder to save the model to, in the format of transformers")
    chosen = options.parse_args(arguments)
    if chosen.steps < 1:
        options.error(f"--steps must be at least 1, got {chosen.steps}")

    # Tokenize the text. Some of the documents are held out.
    corpus = load_corpus(chosen.data)
    tokenizer, _ = load_or_train(corpus.train, MODEL.vocab_size, cache_folder())
    vocabulary = made_from_text(tokenizer)
    stream, held_out = vocabulary.encode(corpus.train), vocabulary.encode(corpus.held_out)
    batches = BatchSampler(stream, SEQUENCES, MODEL.max_seq_len, seed=0)
    evaluation = held_out_windows(held_out, MODEL.max_seq_len, most=64)
    print(f"{corpus.source}: {len(stream):,} tokens to train on, {len(held_out):,} held out")

    # nnx.split returns a static graph and a pytree of arrays, for jax.jit and jax.grad.
    config = vocabulary.fit(MODEL)
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    print(f"{config.parameter_count():,} parameters on {jax.devices()[0].device_kind}")
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(100, chosen.steps // 2), chosen.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1))

    def loss_of(params: nnx.State, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        # (B, T, D) hidden states and the (V, D) head. Targets of -100 would be ignored.
        return linear_cross_entropy(model(tokens), model.head_weight(), targets)

    @jax.jit
    def step(params: nnx.State, state: optax.OptState, tokens: jax.Array, targets: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses, began = optimizer.init(params), [], time.monotonic()
    for number in range(1, chosen.steps + 1):
        tokens, targets, _ = batches.next()  # no lengths: every row is one sequence
        params, state, loss = step(params, state, tokens, targets)
        losses.append(loss)  # stays on the device: reading it here would make the host wait for the step
        if number % 100 == 0 or number == chosen.steps:
            mean = np.mean(jax.device_get(losses))
            print(f"step {number:>5}/{chosen.steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s", flush=True)
            losses.clear()
    mean = float(jax.jit(loss_of)(params, evaluation.tokens, evaluation.targets))
    print(f"held-out loss {mean:.3f} nats per token; a uniform distribution has {np.log(config.vocab_size):.3f}")

    model = nnx.merge(graph, params)
    sampling = Sampling(temperature=0.8, top_k=40)
    (text,) = continue_texts(Source(model, vocabulary), [chosen.prompt], length=None, seed=0, sampling=sampling)
    print(f"\nsample:\n{chosen.prompt}{text}\n")
    if chosen.out is not None:
        save_with_tokenizer(model, vocabulary, chosen.out)
        print(
            f"saved the model to {chosen.out}; "
            f"use it with: python -m flax_models.generate --weights {chosen.out} --prompt ..."
        )
    print("To train a useful model, start from a published one, on a GPU:")
    print("    python -m flax_models.train --weights FOLDER --data TEXTS")
    print("With random weights, --config llama3.2-1b and others select published shapes (docs/training.md).")


if __name__ == "__main__":
    try:
        main()
    except RunError as error:  # an error that the user can fix
        sys.exit(f"error: {error}")
