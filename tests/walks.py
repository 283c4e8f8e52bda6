"""Tokens that a model can learn: walks on a random graph."""

import numpy as np


def walks(steps: int, batch: int, length: int, v: int) -> np.ndarray:
    """Returns (steps, batch, length + 1) int32: from each of v nodes four ways lead on, the first the most trodden."""
    rng = np.random.default_rng(0)
    ways = rng.integers(0, v, (v, 4))
    nodes = [rng.integers(0, v, (steps, batch))]
    for _ in range(length):
        nodes.append(ways[nodes[-1], rng.choice(4, (steps, batch), p=[0.6, 0.2, 0.1, 0.1])])
    return np.stack(nodes, 2).astype(np.int32)
