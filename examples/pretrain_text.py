"""Train a small language model on text from random weights, in a custom training loop.

    python examples/pretrain_text.py                            # the source code of the Python standard library
    python examples/pretrain_text.py --data my-texts/ --prompt "Once upon a time" --out my-model
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/pretrain_text.py --mesh data=2,fsdp=2

This takes about two minutes on two CPU cores. A tokenizer is trained on the text, and the batches are windows of the
token stream. The model returns hidden states, and the loss takes them and the head's weight. The (tokens, vocabulary)
logits of a step are never stored. --mesh divides the model and its batches over the devices of this host
(docs/scale.md).

`python -m flax_models.train` does the same with the features that a long run needs: checkpoints, --resume, gradient
accumulation, memory estimates, throughput, several hosts, and published models to start from (--weights).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from flax_models.data.batches import Batch, BatchSampler, held_out_windows, padded
from flax_models.data.corpus import load_corpus
from flax_models.data.tokenizer import cache_folder, load_or_train
from flax_models.data.vocabulary import made_from_text
from flax_models.errors import RunError
from flax_models.export import save_with_tokenizer
from flax_models.generate import Source, continue_texts
from flax_models.hub.weights import check_new_folder
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.model.sampling import Sampling
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
    options.add_argument("--mesh", help="sizes of a mesh of all devices, such as data=2,fsdp=2 (default: one device)")
    chosen = options.parse_args(arguments)
    if chosen.steps < 1:
        options.error(f"--steps must be at least 1, got {chosen.steps}")
    if chosen.out is not None:
        check_new_folder(chosen.out)
    mesh = None if chosen.mesh is None else make_mesh(chosen.mesh)
    with context_of(mesh):
        train(chosen, mesh)


def train(chosen: argparse.Namespace, mesh: Mesh | None) -> None:
    """Trains, evaluates, samples and saves the model, with the options of the command."""
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
    if mesh is not None:
        check_sizes(mesh, config, SEQUENCES, "SEQUENCES")
        check_vocabulary(mesh, config, "of the tokenizer")
    graph, params = nnx.split(made_on(mesh, lambda: Decoder(config, rngs=nnx.Rngs(0))))
    print(f"{config.parameter_count():,} parameters on {jax.devices()[0].device_kind}")
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(100, chosen.steps // 2), chosen.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1))

    def loss_of(params: nnx.State, batch: Batch, reduction: str = "mean") -> jax.Array:
        model = nnx.merge(graph, params)
        # (B, T, D) hidden states and the (V, D) head. Targets of -100 are ignored.
        return loss_on(mesh)(model(batch.tokens), model.head_weight(), batch.targets, reduction=reduction)

    def begin(params: nnx.State) -> TrainState:
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, batch)
        updates, of_optimizer = optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, updates), of_optimizer, state.step + 1), loss

    # On a mesh, the optimizer's state is divided as the parameters are.
    placements = state_placements(mesh, jax.eval_shape(begin, params))
    state = jax.jit(begin, out_shardings=placements)(params)
    del params  # frees its device memory
    compiled_step = jax.jit(step, donate_argnums=0, out_shardings=(placements, None))
    losses, began = [], time.monotonic()
    for number in range(1, chosen.steps + 1):
        state, loss = compiled_step(state, put_batch(mesh, batches.next()))
        losses.append(loss)  # stays on the device: reading it here would make the host wait for the step
        if number % 100 == 0 or number == chosen.steps:
            mean = np.mean(jax.device_get(losses))
            print(f"step {number:>5}/{chosen.steps}  loss {mean:.3f}  {time.monotonic() - began:.0f} s", flush=True)
            losses.clear()
    total = jax.jit(partial(loss_of, reduction="sum"))
    windows = [put_batch(mesh, batch) for batch in padded(evaluation, SEQUENCES)]
    mean = sum(float(total(state.params, batch)) for batch in windows) / evaluation.counted
    print(f"held-out loss {mean:.3f} nats per token; a uniform distribution has {np.log(config.vocab_size):.3f}")

    model = nnx.merge(graph, state.params)
    if chosen.out is not None:
        save_with_tokenizer(model, vocabulary, chosen.out)
        print(
            f"saved the model to {chosen.out}; "
            f"use it with: python -m flax_models.generate --weights {chosen.out} --prompt ..."
        )
    sampling = Sampling(temperature=0.8, top_k=40)
    (text,) = continue_texts(Source(model, vocabulary), [chosen.prompt], length=None, seed=0, sampling=sampling)
    print(f"\nsample:\n{chosen.prompt}{text}\n")
    print("To train a useful model, start from a published one, on a GPU:")
    print("    python -m flax_models.train --weights FOLDER --data TEXTS")
    print("With random weights, --config llama3.2-1b and others select published shapes (docs/training.md).")


if __name__ == "__main__":
    try:
        main()
    except RunError as error:  # an error that the user can fix
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
