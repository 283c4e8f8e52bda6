"""The shape of the decoder, and all options in which the published model families differ."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from flax_models.model.rope import RopeScaling

Dtype = Literal["float32", "bfloat16", "float16"]
Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "smollm3",
    "internlm3",
    "olmo2",
    "granite",
]
Activation = Literal["silu", "gelu_tanh"]
Remat = Literal["none", "attention", "elementwise", "full"]
AttentionImplementation = Literal["xla", "cudnn"]

MOST = 2**31 - 1  # of a size: arrays of int32 hold positions, tokens and steps
MOST_LAYERS = 10_000  # far more than any model has; checked before anything is allocated per layer

# Fields that the computation multiplies or divides by.
FACTORS = (
    *("rope_theta", "logit_scale", "embedding_multiplier", "residual_multiplier"),
    *("attention_softcap", "logit_softcap", "attention_multiplier"),
)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder."""

    vocab_size: int = 16_384
    """Entries of the vocabulary: rows of the embedding and of the head."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 2
    """Query heads of a block."""
    num_kv_heads: int = 1
    """Key and value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int = 64
    """Width of one head; even, because the rotary embedding rotates pairs of features."""
    intermediate_size: int = 384
    """Width inside the feed-forward layer."""
    max_seq_len: int = 128
    """Longest sequence the model is trained on, in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square before its root."""
    tie_embeddings: bool = True
    """Whether the embedding and the head share one weight."""
    dtype: Dtype = "float32"
    """Dtype of the computation."""
    param_dtype: Dtype = "float32"
    """Dtype of the parameters and of the optimizer's averages. In 16 bits, an update that is smaller than the rounding
    of its parameter is lost, and averages with a decay rate near 1 are too small: of gradients of 1, bfloat16 averages
    are 0.50 with --beta2 0.997 and 0.96 with 0.95."""
    family: Family = "llama"
    """The model_type of Hugging Face in whose format the weights are saved; the fields below define the computation."""
    rope: RopeScaling = field(default_factory=RopeScaling)
    partial_rotary_factor: float = 1.0
    """Fraction of a head's features that are rotated (Phi-3)."""
    activation: Activation = "silu"
    """Activation of the feed-forward layer's gate; gelu_tanh: GELU with the tanh approximation (Gemma)."""
    norm_plus_one: bool = False
    """Norms multiply by 1 + scale, and scales are initialized to 0 (Gemma)."""
    pre_norms: bool = True
    """Whether to apply a norm to the input of the attention and of the feed-forward layer (all but OLMo 2)."""
    post_norms: bool = False
    """Apply a norm to the output of the attention and of the feed-forward layer before the residual addition (Gemma 2,
    OLMo 2)."""
    embedding_scale: bool = False
    """Multiply embeddings by sqrt(hidden_size), rounded to the dtype of the computation (Gemma)."""
    embedding_multiplier: float = 1.0
    """Factor on the embeddings (Granite)."""
    residual_multiplier: float = 1.0
    """Factor on the outputs of the attention and of the feed-forward layer before the residual addition (Granite)."""
    attention_bias: bool = False
    """Biases of the query, key and value projections (Qwen 2)."""
    attention_out_bias: bool = False
    """Bias of the attention's output projection."""
    query_key_norm: bool = False
    """Apply a norm to the queries and keys of each head separately, before the rotation (Qwen 3)."""
    joint_query_key_norm: bool = False
    """Apply one norm to the queries of all heads, and one to the keys of all heads, before the rotation (OLMo 2)."""
    query_scalar: int | None = None
    """Attention scores are divided by sqrt(query_scalar); None: by sqrt(head_dim) (Gemma 2)."""
    attention_multiplier: float | None = None
    """Factor on the attention scores; not together with query_scalar (Granite)."""
    rotary_pattern: tuple[bool, ...] = (True,)
    """Which layers rotate queries and keys; the pattern repeats over the layers (SmolLM 3: True True True False)."""
    attention_softcap: float | None = None
    """Attention scores s become cap * tanh(s / cap) (Gemma 2)."""
    sliding_window: int | None = None
    """Maximum number of positions that a layer with a window attends to, including its own; None: all earlier ones."""
    window_pattern: tuple[bool, ...] = (True,)
    """Which layers have the window of sliding_window; the pattern repeats over the layers (Gemma 2: True False)."""
    logit_softcap: float | None = None
    """Logits z become cap * tanh(z / cap), in the loss (Gemma 2)."""
    logit_scale: float = 1.0
    """Factor on the logits, in the loss."""
    scan_layers: bool = True
    """Whether to compile one block and loop over the layers, instead of compiling each layer separately."""
    remat: Remat = "none"
    """What the backward pass recomputes. none: nothing. attention: the scores of XLA attention. elementwise: the scores
    and all elementwise operations (norms, rotations, activations), so that only the outputs of matmuls with weights and
    of cuDNN attention are stored. full: each whole block."""
    attention_implementation: AttentionImplementation | None = None
    """Attention implementation; None: cudnn where it is supported, else xla. cudnn requires an NVIDIA GPU, a 16-bit
    dtype, an even number of tokens, head_dim a multiple of 8 up to 256, no softcap, and the same window in every
    layer."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value > MOST:
                raise ValueError(f"{name} must be at most {MOST:,}, got {value}")
        for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_layers < 0:
            raise ValueError(f"num_layers must not be negative, got {self.num_layers}")
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"num_layers must be at most {MOST_LAYERS:,}, got {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even and positive, got {self.head_dim}")
        for name in FACTORS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("query_scalar", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.rms_norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps must be finite and not negative, got {self.rms_norm_eps}")
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor must be in (0, 1] and rotate an even number of features, got "
                f"{self.partial_rotary_factor} of head_dim {self.head_dim}"
            )
        for name in ("window_pattern", "rotary_pattern"):
            if not getattr(self, name):
                raise ValueError(f"{name} must have at least one entry, got none")
        if self.sliding_window is None and self.window_pattern != (True,):
            raise ValueError(f"window_pattern has no effect without sliding_window, got {self.window_pattern}")
        if self.sliding_window is not None and not any(self.window_pattern):
            raise ValueError(
                f"sliding_window has no effect with window_pattern {self.window_pattern}, got {self.sliding_window}"
            )
        if self.query_scalar is not None and self.attention_multiplier is not None:
            raise ValueError("query_scalar and attention_multiplier are mutually exclusive, got both")
        if self.query_key_norm and self.joint_query_key_norm:
            raise ValueError("query_key_norm and joint_query_key_norm are mutually exclusive, got both")
        self.rope.check(self.rotary_dim)
        if self.attention_implementation == "cudnn" and (obstacle := self.cudnn_obstacle()):
            raise ValueError(f"attention_implementation cudnn {obstacle}")

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def windows(self) -> tuple[int | None, ...]:
        """Returns each layer's window, None if the layer attends to all earlier positions."""
        pattern = self.window_pattern
        return tuple(self.sliding_window if pattern[i % len(pattern)] else None for i in range(self.num_layers))

    def rotates(self) -> tuple[bool, ...]:
        """Returns whether each layer rotates its queries and keys."""
        pattern = self.rotary_pattern
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    def attention_scale(self) -> float:
        """Returns the factor on attention scores."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        return 1.0 / math.sqrt(self.query_scalar or self.head_dim)

    def cudnn_obstacle(self) -> str | None:
        """Returns the requirement of cuDNN attention that this config does not meet, or None.

        `flax_models.model.attention_choice.explain_attention` also checks the device and the sequence length.
        """
        if self.dtype == "float32":
            return "needs dtype bfloat16 or float16, got float32"
        if self.attention_softcap is not None:
            return f"needs scores without attention_softcap, got {self.attention_softcap}"
        if len(set(self.windows())) > 1:
            return f"needs the same window in every layer, got window_pattern {self.window_pattern}"
        if self.head_dim % 8 or self.head_dim > 256:
            return f"needs head_dim to be a multiple of 8 up to 256, got {self.head_dim}"
        return None

    def loss_options(self) -> dict[str, Any]:
        """Returns the keyword arguments of `linear_cross_entropy` for this model's hidden states and head."""
        return {"softcap": self.logit_softcap, "logit_scale": self.logit_scale}

    def parameter_count(self) -> int:
        """Returns the number of parameters; a tied head is counted once."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (query + key)
        attention += (query + 2 * key) * self.attention_bias + self.hidden_size * self.attention_out_bias
        attention += 2 * self.head_dim * self.query_key_norm + (query + key) * self.joint_query_key_norm
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        block = attention + feed_forward + 2 * (self.pre_norms + self.post_norms) * self.hidden_size
        tables = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return tables + self.num_layers * block + self.hidden_size
