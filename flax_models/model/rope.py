"""Rotary position embedding: frequencies of the published scaling methods, and the rotation.

Features i and i + R/2 of a head, within its first R features, are rotated by the angle position * f_i. The frequencies
f depend only on the config, so they are NumPy constants of the compiled function. Unscaled frequencies are
f_i = theta**(-2i/R). With a factor s, an original length L, and r_i = L * f_i / (2 pi) rotations within that length:

    linear    f_i / s
    llama3    f_i if r_i > high, f_i / s if r_i < low, and an interpolation linear in r_i in between
    yarn      f_i before the pair with beta_fast rotations, f_i / s after the pair with beta_slow rotations, and an
              interpolation linear in i in between
    longrope  f_i / short_i for sequences up to length L, f_i / long_i for longer ones

yarn and longrope also multiply cosine and sine by an attention factor.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
USED: dict[RopeType, set[str]] = {  # the fields of `RopeScaling` that each method uses
    "default": set(),
    "linear": {"rope_factor"},
    "llama3": {"rope_factor", "rope_original_seq_len", "rope_low_freq_factor", "rope_high_freq_factor"},
    "yarn": {
        *("rope_factor", "rope_original_seq_len", "rope_beta_fast", "rope_beta_slow", "rope_truncate"),
        "rope_attention_factor",
    },
    "longrope": {
        *("rope_factor", "rope_original_seq_len", "rope_attention_factor", "rope_short_factor", "rope_long_factor"),
    },
}


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary embedding is scaled to sequences longer than the original training length."""

    rope_type: RopeType = "default"
    """Scaling method; default: no scaling, theta**(-2i/R)."""
    rope_factor: float = 1.0
    """Factor by which sequences may be longer than the original length; for all methods but default."""
    rope_original_seq_len: int = 0
    """Original training length; required by llama3, yarn and longrope."""
    rope_low_freq_factor: float = 1.0
    """llama3: frequencies with fewer rotations than this within the original length are divided by the factor."""
    rope_high_freq_factor: float = 4.0
    """llama3: frequencies with more rotations than this are unchanged."""
    rope_beta_fast: float = 32.0
    """yarn: frequencies with more rotations than this are unchanged."""
    rope_beta_slow: float = 1.0
    """yarn: frequencies with fewer rotations than this are divided by the factor."""
    rope_truncate: bool = True
    """yarn: whether to round the two bounds outwards to whole pairs."""
    rope_attention_factor: float | None = None
    """yarn, longrope: factor on cosine and sine; None: the formula of the method's paper."""
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
                f"rope_high_freq_factor must be greater than rope_low_freq_factor {self.rope_low_freq_factor}, "
                f"got {self.rope_high_freq_factor}"
            )
        if self.rope_type == "yarn" and not 0 < self.rope_beta_slow <= self.rope_beta_fast:
            raise ValueError(
                f"rope_beta_fast must be at least rope_beta_slow {self.rope_beta_slow}, got {self.rope_beta_fast}"
            )

    def check(self, rotary_dim: int) -> None:
        """Raises ValueError if longrope does not have one factor for each pair of rotated features."""
        if self.rope_type == "longrope":
            for name in ("rope_short_factor", "rope_long_factor"):
                if len(getattr(self, name)) != rotary_dim // 2:
                    raise ValueError(f"{name} must have {rotary_dim // 2} entries, got {len(getattr(self, name))}")

    def attention_factor(self) -> float:
        """Returns the factor on cosine and sine: 1 except for yarn and longrope."""
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
    """Returns the frequency of every pair of features: the angle per position.

    Args:
        scaling: the scaling method.
        theta: base of the wavelengths.
        rotary_dim: R, the number of rotated features.
        seq_len: length of the longest sequence; used only by longrope.

    Returns:
        (R/2,) float32.

    Example:
        >>> rotary_frequencies(RopeScaling(), 10_000.0, 4, seq_len=8).tolist()
        [1.0, 0.009999999776482582]

    Source: Su et al., "RoFormer", section 3.4; Chen et al., "Extending context window of large language models via
    positional interpolation" (linear); Peng et al., "YaRN"; Ding et al., "LongRoPE"; Llama 3.1's model code (llama3).
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    # Rounded once to float32, as in the training of published models: an error here grows with the position.
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
    rotations = scaling.rope_original_seq_len * frequencies.astype(np.float64) / (2 * math.pi)
    unscaled = np.clip((rotations - low) / (high - low), 0.0, 1.0)  # weight of the unscaled frequency
    return (frequencies * (unscaled + (1 - unscaled) / scaling.rope_factor)).astype(np.float32)


def _yarn(scaling: RopeScaling, theta: float, rotary_dim: int, powers: np.ndarray) -> np.ndarray:
    def pair_with(rotations: float) -> float:
        return rotary_dim * math.log(scaling.rope_original_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.rope_beta_fast), pair_with(scaling.rope_beta_slow)
    if scaling.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    scaled = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)  # weight of the scaled frequency
    return ((1 - scaled) / powers + scaled / (scaling.rope_factor * powers.astype(np.float64))).astype(np.float32)


def rotary_tables(frequencies: np.ndarray, positions: jax.Array, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and sine tables of positions.

    Args:
        frequencies: (R/2,) float32.
        positions: (..., T) integers.
        factor: multiplies both tables.

    Returns:
        Two arrays (..., T, 1, R/2) float32; the axis of size 1 broadcasts over heads.
    """
    # float32, because bfloat16 cannot distinguish large neighboring positions.
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs of features, so that dot products of queries and keys depend only on relative positions.

    Each pair (x_i, x_{i + R/2}) is rotated by its angle; features from R on are unchanged.

    Args:
        x: (..., T, heads, H) queries or keys, H >= R.
        cos: (..., T, 1, R/2).
        sin: (..., T, 1, R/2).

    Returns:
        An array with the shape and dtype of x.

    Example:
        >>> cos, sin = rotary_tables(rotary_frequencies(RopeScaling(), 10_000.0, 8, 3), jnp.arange(3))
        >>> rotate(jnp.ones((1, 3, 2, 8)), cos, sin).shape
        (1, 3, 2, 8)

    Source: Su et al., "RoFormer", section 3.4; feature i is paired with i + R/2, as published weights expect.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)
    return jnp.concatenate((rotated, x[..., 2 * half :]), axis=-1) if x.shape[-1] > 2 * half else rotated
