"""Train a small language model on text, from nothing, in a training loop of one's own.

    python examples/pretrain_text.py                                   # the Python standard library's sources
    python examples/pretrain_text.py --data my-texts/ --prompt "Once upon a time" --out my-model

It takes about two minutes on two CPU cores. The text becomes a tokenizer and a stream of tokens, windows of which are
the batches. The model ends in hidden states; the loss takes them and the head's weight, and the logits of a step, one
number for each token and each entry of the vocabulary, exist nowhere.

`python -m flax_models.train` is this loop with what a long run needs besides: checkpoints, --resume, gradient
accumulation, the memory of a step, throughput, and published models to start from (--weights).
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
from jax_pallas.linear_ce import linear_cross_entropy

MODEL = ModelConfig(
    vocab_size=8192, hidden_size=128, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=64, max_seq_len=128
)
SEQUENCES = 4  # of a batch, each of max_seq_len tokens


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="Train a small language model on text.")
    options.add_argument("--data", type=Path, nargs="*", default=[], help="text files or folders")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--prompt", default="def ", help="what the sample at the end continues")
    options.add_argument(
        "--out", type=Path, help="folder to save the model to, as Hugging Face's transformers loads it"
    )
    chosen = options.parse_args(arguments)
    if chosen.steps < 1:
        options.error(f"--steps must be at least 1, got {chosen.steps}")

    # Text -> tokens. Part of the text is held out: no document of it is trained on.
    corpus = load_corpus(chosen.data)
    tokenizer, _ = load_or_train(corpus.train, MODEL.vocab_size, cache_folder())
    vocabulary = made_from_text(tokenizer)
    stream, held_out = vocabulary.encode(corpus.train), vocabulary.encode(corpus.held_out)
    batches = BatchSampler(stream, SEQUENCES, MODEL.max_seq_len, seed=0)
    judged_by = held_out_windows(held_out, MODEL.max_seq_len, most=64)
    print(f"{corpus.source}: {len(stream):,} tokens to train on, {len(held_out):,} held out")

    # nnx.split gives the model as a static graph and a tree of arrays, which jax.jit and jax.grad take.
    config = vocabulary.fit(MODEL)
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    print(f"{config.parameter_count():,} parameters on {jax.devices()[0].device_kind}")
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(100, chosen.steps // 2), chosen.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1))

    def loss_of(params: nnx.State, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        # (B, T, D) hidden states and the (V, D) head. Targets of -100 would count for nothing.
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
        losses.append(loss)  # still on the device: reading each one would make the host wait for it
        if number % 100 == 0 or number == chosen.steps:
            mean = np.mean(jax.device_get(losses))
            print(f"step {number:>5}/{chosen.steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s", flush=True)
            losses.clear()
    mean = float(jax.jit(loss_of)(params, judged_by.tokens, judged_by.targets))
    print(f"held-out loss {mean:.3f} nats a token; guessing would be {np.log(config.vocab_size):.3f}")

    model = nnx.merge(graph, params)
    sampling = Sampling(temperature=0.8, top_k=40)
    (drawn,) = continue_texts(Source(model, vocabulary), [chosen.prompt], length=None, seed=0, sampling=sampling)
    print(f"\nsample:\n{chosen.prompt}{drawn}\n")
    if chosen.out is not None:
        save_with_tokenizer(model, vocabulary, chosen.out)
        print(f"{chosen.out} holds the model: python -m flax_models.generate --weights {chosen.out} --prompt ...")
    print("For a model that is of use, start from one: python -m flax_models.train --weights FOLDER --data TEXTS")
    print("(README.md, Training), on a GPU. From nothing, --config llama3.2-1b and so on give published shapes.")


if __name__ == "__main__":
    try:
        main()
    except RunError as error:  # what a person can mend: no text, a folder that is taken
        sys.exit(f"error: {error}")
