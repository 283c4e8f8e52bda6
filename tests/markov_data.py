"""Tokens that a model can learn: random walks on a graph, a Markov chain."""

import numpy as np


def markov_tokens(steps: int, batch: int, length: int, v: int) -> np.ndarray:
    """Returns (steps, batch, length + 1) int32: random walks over v nodes, each with four successors
    of probabilities 0.6, 0.2, 0.1 and 0.1."""
    rng = np.random.default_rng(0)
    ways = rng.integers(0, v, (v, 4))
    nodes = [rng.integers(0, v, (steps, batch))]
    for _ in range(length):
        nodes.append(ways[nodes[-1], rng.choice(4, (steps, batch), p=[0.6, 0.2, 0.1, 0.1])])
    return np.stack(nodes, 2).astype(np.int32)
