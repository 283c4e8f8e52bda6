"""Baselines for the held-out loss: uniform, unigram and bigram models.

With counts c over the training stream, n tokens and V entries:

    uniform   log V
    unigram   p(b)     = (c(b) + 1) / (n + V)
    bigram    p(b | a) = m_2 c(a, b) / c(a) + m_1 p(b) + m_0 / V,   m_2 + m_1 + m_0 = 1

The mixture weights m of the bigram model are fitted by expectation-maximization on the last tenth of the training
stream, with counts of the rest, and are then used with counts of the whole stream. A network that is not better than
the unigram model has learned at most the frequencies of tokens. One that is not better than the bigram model makes no
use of tokens before the last one.
"""

from typing import NamedTuple

import numpy as np

FITTING_ROUNDS = 30  # the mixture converges to three digits in about 15 rounds


class Baselines(NamedTuple):
    """Held-out losses in nats per token."""

    uniform: float
    unigram: float
    bigram: float


class BigramCounts:
    """Counts of tokens and of pairs in a stream, and the three terms of the mixture."""

    def __init__(self, stream: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.unigram = (np.bincount(stream, minlength=vocab_size) + 1.0) / (len(stream) + vocab_size)
        self.context = np.bincount(stream[:-1], minlength=vocab_size)
        self.pairs, self.pair_counts = np.unique(self._keys(stream[:-1], stream[1:]), return_counts=True)

    def _keys(self, context: np.ndarray, token: np.ndarray) -> np.ndarray:
        return context.astype(np.int64) * self.vocab_size + token

    def probabilities(self, context: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Returns (3, n): the bigram, unigram and uniform probability of each token given its context."""
        counts = np.zeros(len(token))
        if len(self.pairs):
            keys = self._keys(context, token)
            indices = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
            counts = np.where(self.pairs[indices] == keys, self.pair_counts[indices], 0)
        bigram = counts / np.maximum(self.context[context], 1)
        return np.stack((bigram, self.unigram[token], np.full(len(token), 1.0 / self.vocab_size)))


def fit_mixture(probabilities: np.ndarray) -> np.ndarray:
    """Returns the maximum-likelihood mixture weights (3,) for probabilities (3, n)."""
    mixture = np.full(len(probabilities), 1.0 / len(probabilities))
    for _ in range(FITTING_ROUNDS):
        shares = mixture[:, None] * probabilities
        mixture = (shares / shares.sum(axis=0)).mean(axis=1)
    return mixture


def baselines(stream: np.ndarray, context: np.ndarray, token: np.ndarray, vocab_size: int) -> Baselines:
    """Returns the losses of the three baselines on pairs of a token and the next token.

    Args:
        stream: (n,) integers, training tokens to count.
        context: (m,) held-out tokens.
        token: (m,) next token of each.
        vocab_size: V.

    Returns:
        The loss of each baseline in nats per token.

    Raises:
        ValueError: the stream has fewer than two tokens, or there are no held-out tokens.

    Example:
        >>> stream = np.array([0, 1] * 50)
        >>> round(baselines(stream, np.array([0]), np.array([1]), vocab_size=4).uniform, 3)
        1.386

    Source: Jelinek and Mercer, "Interpolated estimation of Markov source parameters from sparse data" (1980).
    """
    if len(stream) < 2:
        raise ValueError(f"stream must have at least two tokens, got {len(stream)}")
    if len(token) == 0:
        raise ValueError("token must have at least one entry, got none")
    kept = max(1, len(stream) - max(1, len(stream) // 10))
    fitting = BigramCounts(stream[:kept], vocab_size)
    mixture = fit_mixture(fitting.probabilities(stream[kept - 1 : -1], stream[kept:]))
    probabilities = BigramCounts(stream, vocab_size).probabilities(context, token)
    return Baselines(
        uniform=float(np.log(vocab_size)),
        unigram=float(-np.log(probabilities[1]).mean()),
        bigram=float(-np.log(mixture @ probabilities).mean()),
    )
