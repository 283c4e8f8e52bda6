"""The fields that the `config.json` of each family may have, and the defaults of absent fields.

Source: transformers' configuration_llama.py and the configuration files of the other families.
"""

from typing import Any

from flax_models.model.config import Family

# Copied when a model is saved. These fields do not change what the model computes.
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
        "unk_token_id",
        "sep_token_id",
        "pretraining_tp",  # splits matmuls as in pretraining, in old versions of transformers: affects rounding only
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
# Ignored, with a note. Exporters and fine-tuning tools write these fields; they do not change what the model computes.
INERT = frozenset(
    {
        "is_llama_config",  # SmolLM 2
        "transformers.js_config",  # SmolLM 2
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "_flash_attn_2_enabled",
        "_model_name_or_path",
        "model_name",
        "unsloth_fixed",
        "unsloth_version",
        "unsloth_tiled_mlp",
        "torchscript",
        "use_bfloat16",
        "finetuning_task",
        "task_specific_params",
        "tie_encoder_decoder",
        "decoder_start_token_id",
        "prefix",
        "tf_legacy_loss",
        # Generation defaults, which older files contain.
        *("bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "diversity_penalty", "do_sample"),
        *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "min_length", "no_repeat_ngram_size"),
        *("num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values"),
        *("repetition_penalty", "return_dict_in_generate", "temperature", "top_k", "top_p", "typical_p"),
    }
)
# Rates of dropout and of noise in training. The decoder has neither; a nonzero rate is reported in a note.
DROPOUT = frozenset(
    {"attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout", "neftune_noise_alpha"}
)
# Fields with the only values that the decoder supports.
FIXED: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "attention_bias": (False,),  # for families whose table below does not have it
    "use_mrope": (False,),
    "use_bidirectional_attention": (None, False),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "bias": (False,),
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
# Fields that a family has in addition to COMMON, with transformers' defaults.
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
    "smollm3": {
        "attention_bias": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": None,  # in published files, but transformers does not read it
        "layer_types": None,
    },
    "internlm3": {"qkv_bias": False},
    "olmo2": {"attention_bias": False},
    "granite": {
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
}
ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
}
DEFAULTS: dict[str, dict[str, Any]] = {  # defaults of COMMON fields; "": those of every family
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
    "smollm3": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
    "internlm3": {"max_position_embeddings": 32_768},
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "granite": {"max_position_embeddings": 2048},
}
# The types of the fields. A field in a set named *_OR_NULL may be null.
COUNTS = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "no_rope_layer_interval"),
}
COUNTS_OR_NULL = {
    *("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "query_pre_attn_scalar"),
    "original_max_position_embeddings",
}
NUMBERS = {
    *("rms_norm_eps", "rope_theta", "embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    "logits_scaling",
}
NUMBERS_OR_NULL = {"attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor"}
SWITCHES = {"tie_word_embeddings", "use_sliding_window", "qkv_bias"}
ROPE_FIELDS = {  # fields of rope_scaling for each rope_type
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
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
