"""What the `config.json` of each family's files may say, and what it means where it says nothing.

Source: transformers' configuration_llama.py and its likes.
"""

from typing import Any

from flax_models.model.config import Family

# Kept as they are when a model is written again; none says what is computed.
NEUTRAL = frozenset(
    {
        "architectures",
        "auto_map",
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "cache_implementation",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "problem_type",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "tokenizer_class",
        "max_length",
        "max_sequence_length",
    }
)
# Known, and computed by no other value than these.
FIXED: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "mlp_bias": (False,),
    "attention_bias": (False,),  # where the family's own table has it not
    "use_mrope": (False,),
    "use_bidirectional_attention": (None, False),
    "add_cross_attention": (False,),
    "attention_dropout": (0, None),
    "resid_pdrop": (0,),
    "embd_pdrop": (0,),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
COMMON = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "hidden_act",
}
# Beyond those of all: what each family's files may say, and transformers' value where they say nothing.
FAMILIES: dict[Family, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None},
    "qwen3": {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    "gemma": {"attention_bias": False, "hidden_activation": None},
    "gemma2": {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "phi3": {"sliding_window": None, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
}
ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
DEFAULTS: dict[str, dict[str, Any]] = {  # of the common fields that files leave out; "": every family's
    "": {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False},
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128},
    "gemma": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma2": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
}
ROPE_FIELDS = {  # of rope_scaling, beside its type
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
