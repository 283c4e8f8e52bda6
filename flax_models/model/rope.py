"""Rotary positions: the angles of every published scaling, and the rotation itself.

A head's features i and i + R/2, of the first R, turn by position * f_i. The frequencies f come from the config alone,
so they are NumPy constants of the compiled function. The plain ones are f_i = theta**(-2i/R); with a factor s and an
original length L, and r_i = L * f_i / (2 pi) turns within that length:

    linear    f_i / s
    llama3    f_i where r_i > high, f_i / s where r_i < low, in between the mixture that is linear in r_i
    yarn      f_i below the pair that turns beta_fast times, f_i / s above that of beta_slow, linear in i between
    longrope  f_i / short_i for sequences up to L, f_i / long_i for longer ones

yarn and longrope multiply cosine and sine by an attention factor.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions reach past the length that a model was first trained on."""

    rope_type: RopeType = "default"
    """Rule of the frequencies; default: theta**(-2i/R) as it is."""
    rope_factor: float = 1.0
    """How much longer sequences may get; unused by the default."""
    rope_original_seq_len: int = 0
    """Length before the scaling: llama3, yarn and longrope need it."""
    rope_low_freq_factor: float = 1.0
    """llama3: frequencies of fewer turns within the original length are divided by the factor."""
    rope_high_freq_factor: float = 4.0
    """llama3: frequencies of more turns stay as they are."""
    rope_beta_fast: float = 32.0
    """yarn: frequencies of more turns stay as they are."""
    rope_beta_slow: float = 1.0
    """yarn: frequencies of fewer turns are divided by the factor."""
    rope_truncate: bool = True
    """yarn: round the two bounds outwards to whole pairs."""
    rope_attention_factor: float | None = None
    """yarn, longrope: factor on cosine and sine; none: the rule of its paper."""
    rope_short_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency in sequences up to the original length."""
    rope_long_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency in longer sequences."""

    def __post_init__(self) -> None:
        if self.rope_type == "default":
            return
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if not self.rope_factor >= 1:
            raise ValueError(f"rope_factor must be at least 1, got {self.rope_factor}")
        if self.rope_type != "linear" and self.rope_original_seq_len < 2:
            raise ValueError(
                f"rope_original_seq_len must be at least 2 for rope_type {self.rope_type}, "
                f"got {self.rope_original_seq_len}"
            )
        if self.rope_type == "llama3" and not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor:
            raise ValueError(
                f"rope_high_freq_factor must be above rope_low_freq_factor {self.rope_low_freq_factor}, "
                f"got {self.rope_high_freq_factor}"
            )
        if self.rope_type == "yarn" and not 0 < self.rope_beta_slow <= self.rope_beta_fast:
            raise ValueError(
                f"rope_beta_fast must be at least rope_beta_slow {self.rope_beta_slow}, got {self.rope_beta_fast}"
            )

    def check(self, rotary_dim: int) -> None:
        """Raises ValueError if longrope's factors are not one for each pair of the rotated features."""
        if self.rope_type == "longrope":
            for name in ("rope_short_factor", "rope_long_factor"):
                if len(getattr(self, name)) != rotary_dim // 2:
                    raise ValueError(f"{name} must have {rotary_dim // 2} entries, got {len(getattr(self, name))}")

    def attention_factor(self) -> float:
        """Returns the factor on cosine and sine, 1 but for yarn and longrope."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.rope_attention_factor is not None:
            return self.rope_attention_factor
        if self.rope_factor <= 1:
            return 1.0
        if self.rope_type == "yarn":
            return 0.1 * math.log(self.rope_factor) + 1.0
        return math.sqrt(1 + math.log(self.rope_factor) / math.log(self.rope_original_seq_len))


def rotary_frequencies(scaling: RopeScaling, theta: float, rotary_dim: int, seq_len: int) -> np.ndarray:
    """Returns the angle per position of every pair.

    Args:
        scaling: the rule.
        theta: base of the wavelengths.
        rotary_dim: R, the features that turn.
        seq_len: longest sequence these positions belong to; longrope alone asks for it.

    Returns:
        (R/2,) float32.

    Example:
        >>> rotary_frequencies(RopeScaling(), 10_000.0, 4, seq_len=8).tolist()
        [1.0, 0.009999999776482582]

    Source: Su et al., "RoFormer", section 3.4; Chen et al., "Extending context window of large language models via
    positional interpolation" (linear); Peng et al., "YaRN"; Ding et al., "LongRoPE"; Llama 3.1's model code (llama3).
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    # Powers rounded once to float32, as published models were trained: an error here grows with the position.
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers
    if scaling.rope_type == "linear":
        return frequencies / np.float32(scaling.rope_factor)
    if scaling.rope_type == "llama3":
        return _llama3(scaling, frequencies)
    if scaling.rope_type == "yarn":
        return _yarn(scaling, theta, rotary_dim, powers)
    if scaling.rope_type == "longrope":
        longer = seq_len > scaling.rope_original_seq_len
        divisors = np.asarray(scaling.rope_long_factor if longer else scaling.rope_short_factor, np.float32)
        return np.float32(1) / (divisors * powers)
    return frequencies


def _llama3(scaling: RopeScaling, frequencies: np.ndarray) -> np.ndarray:
    low, high = scaling.rope_low_freq_factor, scaling.rope_high_freq_factor
    turns = scaling.rope_original_seq_len * frequencies.astype(np.float64) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequencies * (kept + (1 - kept) / scaling.rope_factor)).astype(np.float32)


def _yarn(scaling: RopeScaling, theta: float, rotary_dim: int, powers: np.ndarray) -> np.ndarray:
    def pair_that_turns(times: float) -> float:
        return rotary_dim * math.log(scaling.rope_original_seq_len / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.rope_beta_fast), pair_that_turns(scaling.rope_beta_slow)
    if scaling.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    divided = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    return ((1 - divided) / powers + divided / (scaling.rope_factor * powers.astype(np.float64))).astype(np.float32)


def rotary_tables(frequencies: np.ndarray, positions: jax.Array, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of positions' angles.

    Args:
        frequencies: (R/2,) float32.
        positions: (..., T) integers.
        factor: multiplies both.

    Returns:
        Two arrays (..., T, 1, R/2) float32; the 1 stands for heads.
    """
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies  # float32: bf16 would merge far positions
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs of features, so that dot products of queries and keys see only distances.

    (x_i, x_{i + R/2}) turns by its angle; features from R on stay as they are.

    Args:
        x: (..., T, heads, H) queries or keys, H >= R.
        cos: (..., T, 1, R/2).
        sin: the same.

    Returns:
        x's shape and dtype.

    Example:
        >>> cos, sin = rotary_tables(rotary_frequencies(RopeScaling(), 10_000.0, 8, 3), jnp.arange(3))
        >>> rotate(jnp.ones((1, 3, 2, 8)), cos, sin).shape
        (1, 3, 2, 8)

    Source: Su et al., "RoFormer", section 3.4; pairs are halves apart, as published weights expect.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
    return jnp.concatenate((turned, x[..., 2 * half :]), axis=-1) if x.shape[-1] > 2 * half else turned
