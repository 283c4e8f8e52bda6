"""What is trained, in NumPy: the shape of the decoder, its first weights, every batch, the options of the optimizer.

The decoder is flax_models' default one. With h = rms(x) * scale, rms(x) = x / sqrt(mean(x**2) + eps), each block does

    x <- x + softmax(q . k / sqrt(head_dim)) v @ W_o     q, k, v = h @ W_q, h @ W_k, h @ W_v; q and k rotated, causal
    x <- x + (silu(h @ W_gate) * (h @ W_up)) @ W_down

and a step of the optimizer, on the gradient g of all parameters, does

    g <- g * min(1, clip_norm / norm(g))
    m <- beta1 * m + (1 - beta1) * g,   v <- beta2 * v + (1 - beta2) * g**2
    p <- p - rate(s) * (m / (1 - beta1**(s + 1)) / (sqrt(v / (1 - beta2**(s + 1))) + eps) + weight_decay * p)

with weight_decay on matrices only. This is the AdamW of both frameworks: eps outside the root and after the bias
correction, the decay from p before the step.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

IGNORED = -100
# Shares of a token's four successors in the source: it leaves at most 1.1 nats a token to chance.
SUCCESSOR_SHARES = (0.55, 0.25, 0.15, 0.05)


@dataclass(frozen=True)
class Setup:
    """Every number of the run; two equal ones give the same weights and batches."""

    steps: int = 50
    seed: int = 0
    tie_embeddings: bool = False
    vocab_size: int = 1000
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 160
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    batch_size: int = 16
    seq_len: int = 32
    learning_rate: float = 5e-3
    warmup_steps: int = 5
    beta1: float = 0.9
    beta2: float = 0.95
    # Llama 2's. Adam takes a full step along any gradient well above eps, so with 1e-8 entries that are zero but for
    # rounding go their own way in each framework: over 50 steps and eight seeds the four losses then part by 4e-7 to
    # 7e-6, with 1e-5 by 4e-7 to 5e-7, which is little more than the rounding of one loss.
    adam_eps: float = 1e-5
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError(f"steps must be at least 2, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


class Problem(NamedTuple):
    """A setup and what follows from it."""

    setup: Setup
    weights: dict[str, np.ndarray]  # float32, by the names of `parameter_shapes`
    tokens: np.ndarray  # (steps, B, T) int32
    targets: np.ndarray  # (steps, B, T) int32: the token that follows, or IGNORED


def parameter_shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Returns the decoder's parameters: the one mapping between the frameworks.

    A name is the parameter's path in flax_models' Decoder, its parts joined by dots. Blocks are stacked along a first
    axis; a kernel is (features in, features out), so a projection is x @ kernel in both frameworks.
    """
    layers, width = setup.num_layers, setup.hidden_size
    query, key = setup.num_heads * setup.head_dim, setup.num_kv_heads * setup.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (setup.vocab_size, width),
        "blocks.attention_norm.scale": (layers, width),
        "blocks.attention.query.kernel": (layers, width, query),
        "blocks.attention.key.kernel": (layers, width, key),
        "blocks.attention.value.kernel": (layers, width, key),
        "blocks.attention.out.kernel": (layers, query, width),
        "blocks.feed_forward_norm.scale": (layers, width),
        "blocks.feed_forward.gate.kernel": (layers, width, setup.intermediate_size),
        "blocks.feed_forward.up.kernel": (layers, width, setup.intermediate_size),
        "blocks.feed_forward.down.kernel": (layers, setup.intermediate_size, width),
        "final_norm.scale": (width,),
    }
    return shapes if setup.tie_embeddings else shapes | {"head": (setup.vocab_size, width)}


def is_decayed(name: str) -> bool:
    """Returns whether weight decay touches a parameter: matrices, not the norms' scales."""
    return not name.endswith(".scale")


def learning_rate(setup: Setup, step: int) -> float:
    """Returns the rate of a step, counted from 0: linear warm-up to the peak, then a cosine down to zero."""
    warmup = min(setup.warmup_steps, setup.steps)
    if step < warmup:
        return setup.learning_rate * (step + 1) / warmup
    return setup.learning_rate * (1 + math.cos(math.pi * (step - warmup) / (setup.steps - warmup))) / 2


def make_problem(setup: Setup) -> Problem:
    """Returns the first weights and all batches of a setup.

    Tokens come from a Markov chain over the vocabulary: each token has four successors, common ones for many tokens, so
    that there is something to learn at once (which tokens are common) and something to learn later (who follows whom).
    One target in eight is ignored.
    """
    rng = np.random.default_rng(setup.seed)
    weights = {name: _first_weight(name, shape, rng, setup) for name, shape in parameter_shapes(setup).items()}
    rarity = np.arange(1, setup.vocab_size + 1)
    common = (1 / rarity) / np.sum(1 / rarity)
    successors = rng.choice(setup.vocab_size, (setup.vocab_size, len(SUCCESSOR_SHARES)), p=common)
    stream = np.empty((setup.seq_len + 1, setup.steps, setup.batch_size), np.int32)
    stream[0] = rng.choice(setup.vocab_size, stream.shape[1:], p=common)
    for position in range(setup.seq_len):
        drawn = rng.choice(len(SUCCESSOR_SHARES), stream.shape[1:], p=SUCCESSOR_SHARES)
        stream[position + 1] = successors[stream[position], drawn]
    rows = np.ascontiguousarray(np.moveaxis(stream, 0, -1))  # (steps, B, T + 1)
    ignored = rng.random((setup.steps, setup.batch_size, setup.seq_len)) < 1 / 8
    targets = np.where(ignored, IGNORED, rows[..., 1:]).astype(np.int32)
    return Problem(setup, weights, rows[..., :-1].copy(), targets)


def _first_weight(name: str, shape: tuple[int, ...], rng: np.random.Generator, setup: Setup) -> np.ndarray:
    drawn = rng.standard_normal(shape, np.float32)
    if name.endswith(".scale"):
        return 1 + np.float32(0.1) * drawn  # not 1 everywhere: a scale left out would not be seen
    if not name.endswith(".kernel"):
        return drawn / np.float32(math.sqrt(setup.hidden_size))
    into_residual = name.endswith(("out.kernel", "down.kernel"))  # 2 * num_layers of them add up
    return drawn / np.float32(math.sqrt(shape[-2] * (2 * setup.num_layers if into_residual else 1)))


def save(problem: Problem, path: Path) -> None:
    """Writes a problem as .npz."""
    arrays = {f"weights/{name}": array for name, array in problem.weights.items()}
    arrays |= {f"setup/{name}": np.asarray(value) for name, value in asdict(problem.setup).items()}
    np.savez(path, tokens=problem.tokens, targets=problem.targets, **arrays)  # pyright: ignore[reportArgumentType]


def load(path: Path) -> Problem:
    """Reads what `save` wrote."""
    with np.load(path) as file:
        arrays = dict(file)

    def under(folder: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(folder): array for name, array in arrays.items() if name.startswith(folder)}

    setup = Setup(**{name: array.item() for name, array in under("setup/").items()})
    return Problem(setup, under("weights/"), arrays["tokens"], arrays["targets"])
