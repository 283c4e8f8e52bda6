"""Losses that need no network, to hold a held-out loss against.

With counts c over the train stream, n tokens and V entries:

    uniform   log V
    unigram   p(b)     = (c(b) + 1) / (n + V)
    bigram    p(b | a) = m_2 c(a, b) / c(a) + m_1 p(b) + m_0 / V,   m_2 + m_1 + m_0 = 1

The bigram's mixture m is fitted by expectation-maximisation on the last tenth of the train stream, with counts of the
rest, and then used with counts of the whole. A network that does not pass the unigram has learned how often tokens
occur and no more; one that does not pass the bigram makes no use of anything but the last token.
"""

from typing import NamedTuple

import numpy as np

FITTING_ROUNDS = 30  # the mixture settles to three digits within about 15


class Baselines(NamedTuple):
    """Held-out losses in nats a token."""

    uniform: float
    unigram: float
    bigram: float


class BigramCounts:
    """Counts of tokens and of pairs in a stream, and the mixture's three terms that follow from them."""

    def __init__(self, stream: np.ndarray, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.unigram = (np.bincount(stream, minlength=vocab_size) + 1.0) / (len(stream) + vocab_size)
        self.context = np.bincount(stream[:-1], minlength=vocab_size)
        self.pairs, self.pair_counts = np.unique(self._keys(stream[:-1], stream[1:]), return_counts=True)

    def _keys(self, context: np.ndarray, token: np.ndarray) -> np.ndarray:
        return context.astype(np.int64) * self.vocab_size + token

    def probabilities(self, context: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Returns (3, n): the bigram, unigram and uniform probability of each token after its context."""
        counts = np.zeros(len(token))
        if len(self.pairs):
            keys = self._keys(context, token)
            places = np.minimum(np.searchsorted(self.pairs, keys), len(self.pairs) - 1)
            counts = np.where(self.pairs[places] == keys, self.pair_counts[places], 0)
        bigram = counts / np.maximum(self.context[context], 1)
        return np.stack((bigram, self.unigram[token], np.full(len(token), 1.0 / self.vocab_size)))


def fit_mixture(probabilities: np.ndarray) -> np.ndarray:
    """Returns the (3,) mixture that makes the columns of (3, n) probabilities likeliest."""
    mixture = np.full(len(probabilities), 1.0 / len(probabilities))
    for _ in range(FITTING_ROUNDS):
        shares = mixture[:, None] * probabilities
        mixture = (shares / shares.sum(axis=0)).mean(axis=1)
    return mixture


def baselines(stream: np.ndarray, context: np.ndarray, token: np.ndarray, vocab_size: int) -> Baselines:
    """Returns the three baselines' losses on pairs of a context token and the token that follows it.

    Args:
        stream: (n,) integer tokens to count.
        context: (m,) held-out tokens.
        token: (m,) the token after each.
        vocab_size: V.

    Returns:
        Nats a token, of each baseline.

    Raises:
        ValueError: the stream has fewer than two tokens, or there is nothing to judge by.

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
