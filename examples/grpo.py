"""Teach a small model to add by reinforcement learning (GRPO), with the fused loss or with an unfused one.

    python examples/grpo.py                                                          # one run
    python examples/grpo.py --loss fused unfused --seed 0 1 2 3 4 --json grpo.jsonl  # adds a line for each run
    python examples/grpo.py --json grpo.jsonl --plot grpo.png                        # draws and compares these runs
    python examples/grpo.py --mesh data=2,fsdp=2                                     # one run on four devices

A run takes one to two minutes on two CPU cores. The model learns the form of an answer from a few supervised batches,
such as "12+7=" and "19". It then samples several answers to each problem. The reward of an answer is 1 if it is exactly
right, else 0. Its advantage is its reward relative to those of the other answers to the same problem.

Both losses are the same function of the parameters. The fused one never stores the (tokens, vocabulary) logits. The
unfused one computes them with plain JAX. Runs of one seed start from the same parameters and draw with the same random
numbers, so they sample the same answers until rounding changes one of them.

--mesh divides the model, the sampled answers and the batches over the devices of this host (docs/scale.md). The axes
fsdp and tensor divide the rows of the embedding, which is also the head. There are 13 tokens, so the embedding gets
further rows. They are padding: the losses take the true number of tokens as vocab_size, and no such row is sampled.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from flax_models.data.batches import IGNORED, Batch
from flax_models.errors import RunError
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.model.sampling import Sampling, continue_prompts
from flax_models.train.mesh import (
    check_sizes,
    context_of,
    loss_on,
    made_on,
    make_mesh,
    parameter_shards,
    put_batch,
    state_placements,
)
from flax_models.train.plot import running_mean
from flax_models.train.step import TrainState
from jax_pallas import token_losses

ALPHABET = "0123456789+=\n"  # a token is a character; the line break ends an answer
VOCAB_SIZE = len(ALPHABET)
END = ALPHABET.index("\n")
NUMBERS = 20  # numbers from 0 to 19: 400 problems
ANSWER = 4  # tokens of the longest answer that is sampled
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=192,
    max_seq_len=len("19+19=") + ANSWER,
)
SUPERVISED_STEPS, SUPERVISED_ROWS, SUPERVISED_LEARNING_RATE = 40, 256, 3e-3
PROBLEMS, SAMPLES = 32, 16  # of a batch, and of a problem
UPDATES_PER_BATCH = 2  # in the second update the policy differs from the one that sampled, so the ratio matters
LEARNING_RATE = 1e-3
EPSILON_LOW, EPSILON_HIGH, BETA = 0.2, 0.28, 0.01
# Small enough that the fused loss takes these tokens in 30 chunks, as it would with a large vocabulary.
MEMORY_BUDGET = 2**19
LAST = 20  # batches whose mean is the final reward


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def draw_problems(rng: np.random.Generator, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the tokens of random problems, and of their right answers with the end token."""
    pairs = rng.integers(0, NUMBERS, (count, 2)).tolist()
    return [encode(f"{a}+{b}=") for a, b in pairs], [encode(f"{a + b}\n") for a, b in pairs]


def make_batch(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Batch:
    """Returns problems with answers. A target is the next token where it belongs to the answer, else IGNORED."""
    tokens = np.full((len(prompts), MODEL.max_seq_len), END, np.int32)
    targets = np.full_like(tokens, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[row, : len(prompt) + len(answer)] = prompt + answer
        targets[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = answer
    return Batch(tokens, targets)


# The two losses. Log-probabilities, advantages and targets are (B, T), hidden is (B, T, D), head is (V, D) with rows of
# padding from VOCAB_SIZE on. On a mesh, XLA divides the unfused loss.

GRPO = token_losses.grpo(EPSILON_LOW, EPSILON_HIGH, BETA, kl="k3")


def fused_log_prob(mesh: Mesh | None, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    return loss_on(mesh, "linear_log_probs")(hidden, head, targets, vocab_size=VOCAB_SIZE).log_prob


def fused_loss(
    mesh: Mesh | None, hidden: jax.Array, head: jax.Array, targets: jax.Array, *per_token: jax.Array
) -> jax.Array:
    options = {"vocab_size": VOCAB_SIZE, "memory_budget": MEMORY_BUDGET}
    return loss_on(mesh, "linear_token_loss")(hidden, head, targets, GRPO, *per_token, **options)


def unfused_log_prob(_: Mesh | None, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(hidden @ head[:VOCAB_SIZE].T)  # (B, T, VOCAB_SIZE)
    return jnp.take_along_axis(log_probs, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]


def unfused_loss(
    mesh: Mesh | None, hidden: jax.Array, head: jax.Array, targets: jax.Array, *per_token: jax.Array
) -> jax.Array:
    advantage, old, reference = per_token
    log_prob = unfused_log_prob(mesh, hidden, head, targets)
    ratio = jnp.exp(log_prob - old)
    clipped = jnp.clip(ratio, 1 - EPSILON_LOW, 1 + EPSILON_HIGH)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage)
    kl = jnp.exp(reference - log_prob) - 1 - (reference - log_prob)
    return jnp.mean(policy_loss + BETA * kl, where=targets != IGNORED)


def supervised_loss(mesh: Mesh | None, hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    return loss_on(mesh)(hidden, head, targets, vocab_size=VOCAB_SIZE)


Function = Callable[..., jax.Array]
LOSSES: dict[str, tuple[Function, Function]] = {
    "fused": (fused_log_prob, fused_loss),
    "unfused": (unfused_log_prob, unfused_loss),
}


def of_parameters(graph: nnx.GraphDef, mesh: Mesh | None, function: Function) -> Function:
    """Returns a function of hidden states, head and targets as a function of the parameters and a batch."""

    def call(params: nnx.State, batch: Batch, *per_token: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return function(mesh, model(batch.tokens), model.head_weight(), batch.targets, *per_token)

    return call


def make_step(
    loss_of: Function, params: nnx.State, learning_rate: float, mesh: Mesh | None
) -> tuple[TrainState, Callable[..., TrainState]]:
    """Returns the state before the first step, and the step."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))

    def begin(params: nnx.State) -> TrainState:
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def step(state: TrainState, batch: Batch, *per_token: jax.Array) -> TrainState:
        gradients = jax.grad(loss_of)(state.params, batch, *per_token)
        updates, of_optimizer = optimizer.update(gradients, state.optimizer, state.params)
        return TrainState(optax.apply_updates(state.params, updates), of_optimizer, state.step + 1)

    # On a mesh, the optimizer's state is divided as the parameters are.
    placements = state_placements(mesh, jax.eval_shape(begin, params))
    return jax.jit(begin, out_shardings=placements)(params), jax.jit(step, out_shardings=placements)


def config_on(mesh: Mesh | None) -> ModelConfig:
    """Returns MODEL, with as many rows of padding as the mesh needs; raises RunError if it does not divide the rest."""
    shards = parameter_shards(mesh)
    config = dataclasses.replace(MODEL, vocab_size=math.ceil(VOCAB_SIZE / shards) * shards)
    if mesh is not None:
        check_sizes(mesh, config, SUPERVISED_ROWS, "SUPERVISED_ROWS")
        check_sizes(mesh, config, PROBLEMS * SAMPLES, "PROBLEMS times SAMPLES")
    return config


def supervised_start(seed: int, mesh: Mesh | None = None) -> Decoder:
    """Returns a model that answers some problems. Without any right sample, all advantages would be 0."""
    rng, config = np.random.default_rng((seed, 0)), config_on(mesh)
    graph, params = nnx.split(made_on(mesh, lambda: Decoder(config, rngs=nnx.Rngs(seed))))
    loss_of = of_parameters(graph, mesh, supervised_loss)
    state, step = make_step(loss_of, params, SUPERVISED_LEARNING_RATE, mesh)
    for _ in range(SUPERVISED_STEPS):
        state = step(state, put_batch(mesh, make_batch(*draw_problems(rng, SUPERVISED_ROWS))))
    return nnx.merge(graph, state.params)


def train(
    loss: str, model: Decoder, seed: int, updates: int, mesh: Mesh | None = None
) -> tuple[list[float], nnx.State]:
    """Returns the mean reward of each batch, and the parameters after the last update."""
    rng, key = np.random.default_rng((seed, 1)), jax.random.key(seed)
    graph, reference = nnx.split(model)
    log_prob_of, loss_of = (of_parameters(graph, mesh, function) for function in LOSSES[loss])
    (state, step), log_prob = make_step(loss_of, reference, LEARNING_RATE, mesh), jax.jit(log_prob_of)
    rewards, began = [], time.monotonic()
    for number in range(1, updates + 1):
        if (number - 1) % UPDATES_PER_BATCH == 0:
            problems, right = draw_problems(rng, PROBLEMS)
            prompts, right = ([text for text in texts for _ in range(SAMPLES)] for texts in (problems, right))
            answers = continue_prompts(
                nnx.merge(graph, state.params),
                prompts,
                length=ANSWER,
                key=jax.random.fold_in(key, number),
                sampling=Sampling(temperature=1.0),
                ends=(END,),
                vocab_size=VOCAB_SIZE,
            )
            # The end token is not returned. An answer that is shorter than the limit had one.
            answers = [[*answer, END] if len(answer) < ANSWER else answer for answer in answers]
            reward = np.array([a == b for a, b in zip(answers, right, strict=True)], np.float32)
            rewards.append(float(reward.mean()))
            group = reward.reshape(PROBLEMS, SAMPLES)
            advantage = (group - group.mean(1, keepdims=True)) / (group.std(1, keepdims=True) + 1e-4)
            batch = make_batch(prompts, answers)
            advantage = np.broadcast_to(advantage.reshape(-1, 1), batch.targets.shape)
            batch, advantage = put_batch(mesh, (batch, advantage))
            old, start = log_prob(state.params, batch), log_prob(reference, batch)
        state = step(state, batch, advantage, old, start)
        if number % 50 == 0 or number == updates:
            mean, seconds = np.mean(rewards[-LAST:]), time.monotonic() - began
            print(f"{loss}, seed {seed}  update {number:>4}/{updates}  reward {mean:.3f}  {seconds:.0f} s", flush=True)
    return rewards, state.params


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of --json; raises RunError if one is not of this program."""
    rows = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({name: row[name] for name in ("loss", "updates", "rewards", "device")})
        except (ValueError, KeyError, TypeError):
            raise RunError(f"--json: line {number} of {path} is not a run of this program") from None
    return rows


def final_rewards(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns the mean reward of the last batches of every run, under its loss."""
    return {loss: [float(np.mean(r["rewards"][-LAST:])) for r in rows if r["loss"] == loss] for loss in LOSSES}


def compare(fused: Sequence[float], unfused: Sequence[float]) -> tuple[float, float]:
    """Returns the difference of the mean final rewards, and its standard error over the seeds."""
    variance = sum(np.var(final, ddof=1) / len(final) for final in (fused, unfused))
    return float(np.mean(fused) - np.mean(unfused)), float(np.sqrt(variance))


def plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws the running means of the rewards: for each loss the mean over the seeds, and a band of all seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, which has global state and may need a display
    axes = figure.add_subplot()
    for loss, color, style in (("fused", "#c2410c", "-"), ("unfused", "#1e3a8a", (0, (4, 3)))):
        rewards = np.array([running_mean(np.array(row["rewards"])) for row in rows if row["loss"] == loss])
        if not len(rewards):
            continue
        updates = 1 + UPDATES_PER_BATCH * np.arange(rewards.shape[1])
        axes.fill_between(updates, rewards.min(0), rewards.max(0), color=color, alpha=0.18, linewidth=0)
        label = f"{loss}: mean and range of {len(rewards)} seeds"
        axes.plot(updates, rewards.mean(0), color=color, linestyle=style, linewidth=1.8, label=label)
    axes.set(xlabel="update", ylabel="mean reward of a batch", ylim=(0, 1))
    axes.grid(axis="y", color="#e2e8f0")
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.suptitle(f"GRPO on sums of two numbers below {NUMBERS}, {rows[0]['device']}", x=0.02, ha="left")
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = argparse.ArgumentParser(description="Teach a small model to add by GRPO.")
    options.add_argument("--loss", nargs="+", choices=LOSSES, default=["fused"], help="losses, a run of each (fused)")
    options.add_argument("--seed", nargs="+", type=int, default=[0], help="seeds, a run of each (0)")
    options.add_argument("--updates", type=int, default=300, help="optimizer steps after the supervised start (300)")
    options.add_argument("--json", type=Path, help="file to which each run adds a line of JSON")
    options.add_argument("--plot", type=Path, help="draw the runs of --json to this PNG file, instead of training")
    options.add_argument("--mesh", help="sizes of a mesh of all devices, such as data=2,fsdp=2 (default: one device)")
    chosen = options.parse_args(arguments)
    if chosen.updates < 1:
        options.error(f"--updates must be at least 1, got {chosen.updates}")
    for option, path in (("--json", chosen.json), ("--plot", chosen.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            options.error(f"{option} must be a file in a folder that exists, got {path}")
    if chosen.plot is not None:
        if chosen.json is None or not chosen.json.is_file():
            options.error(f"--plot needs --json with a file of runs, got {chosen.json}")
        rows = read_runs(chosen.json)
        if len({row["updates"] for row in rows}) != 1:
            options.error(f"--plot needs runs with the same number of updates in {chosen.json}")
        plot(chosen.plot, rows)
        found = final_rewards(rows)
        for loss, final in found.items():
            if not final:
                continue
            print(f"{loss}: final reward of each seed {' '.join(f'{reward:.3f}' for reward in final)}")
        if all(len(final) > 1 for final in found.values()):
            difference, error = compare(**found)
            print(f"difference {difference:+.4f}, standard error {error:.4f}")
        return
    mesh = None if chosen.mesh is None else make_mesh(chosen.mesh)
    with context_of(mesh):
        run(chosen, mesh)


def run(chosen: argparse.Namespace, mesh: Mesh | None) -> None:
    """Trains with each seed and loss that the options of the command select."""
    for seed in chosen.seed:
        model = supervised_start(seed, mesh)
        for loss in chosen.loss:
            began = time.monotonic()
            rewards, _ = train(loss, model, seed, chosen.updates, mesh)
            row = {"loss": loss, "seed": seed, "updates": chosen.updates, "seconds": round(time.monotonic() - began)}
            row |= {"device": jax.devices()[0].device_kind, "mesh": chosen.mesh, "jax": jax.__version__}
            if chosen.json is not None:
                with chosen.json.open("a") as file:
                    file.write(json.dumps({**row, "rewards": rewards}) + "\n")


if __name__ == "__main__":
    try:
        main()
    except RunError as error:  # an error that the user can fix
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
