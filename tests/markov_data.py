"""Samples of a Markov chain: tokens that a model can learn."""

import numpy as np


def markov_tokens(steps: int, batch: int, length: int, v: int) -> np.ndarray:
    """Returns (steps, batch, length + 1) int32: samples of a Markov chain with v states.

    Each state has four successors with probabilities 0.6, 0.2, 0.1 and 0.1.
    """
    rng = np.random.default_rng(0)
    successors = rng.integers(0, v, (v, 4))
    states = [rng.integers(0, v, (steps, batch))]
    for _ in range(length):
        states.append(successors[states[-1], rng.choice(4, (steps, batch), p=[0.6, 0.2, 0.1, 0.1])])
    return np.stack(states, 2).astype(np.int32)
