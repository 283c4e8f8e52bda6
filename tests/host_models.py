"""Small random models of every causal language model class of transformers, and what patching changes in them."""

import re
from typing import Any, NamedTuple

from hub_models import import_transformers

VOCABULARY, LENGTH, LARGEST = 61, 9, 20_000_000

# Values of config fields by name, where a config has the field.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY - 4,
    # What is applied to logits
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logit_softcap"), 3.0),
    **dict.fromkeys(("logits_scaling", "logit_scale", "lm_head_multiplier"), 0.5),
    # Sizes
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "d_embed", "emb_dim"), 32),
    "hidden_size_global": 32,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dim_ff", "moe_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16
    ),
    **dict.fromkeys(("hidden_size_per_layer_input", "mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCABULARY),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
}
DROPOUT = re.compile(r"dropout|pdrop|drop_rate|layerdrop|resid_drop")
# More fields for a model type. Names of more model types share the fields of the first.
MULTI_HEAD = {"num_key_value_heads": 4}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), MULTI_HEAD),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), MULTI_HEAD),
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1], "z_loss_coefficient": 0.0},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "xlstm": {"num_heads": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "kimi_linear": {"num_experts_per_token": 2},
    "dots3_note": {"num_key_value_heads": 4, "per_layer_config": {}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
}


def small_values(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns small values for the fields of a config, and for those of the configs that are parts of it."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name.endswith("_config"):
            values[name] = small_values(value) | {
                key: value[key] for key in ("model_type",) if isinstance(value.get(key), str)
            }
        elif name in SMALL:
            values[name] = SMALL[name]
        elif DROPOUT.search(name) and isinstance(value, int | float) and not isinstance(value, bool):
            values[name] = type(value)(0)
    return values


def small_config(config_class: Any, model_type: str | None) -> Any:
    """Returns a config of a class with small values and without dropout."""
    config = config_class(**{**small_values(config_class().to_dict()), **FIELDS.get(model_type or "", {})})
    config.use_cache = False
    return config


def architectures() -> dict[str, str]:
    """Returns the model type of each class of transformers' mapping of causal language models."""
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            found.setdefault(name, model_type)
    return dict(sorted(found.items()))


def make(name: str, **fields: Any) -> Any:
    """Returns a small random model of a class, in training mode."""
    import torch

    transformers = import_transformers()
    model_class = getattr(transformers, name)
    config = small_config(model_class.config_class, architectures().get(name, model_class.config_class.model_type))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{name} with the small config has {size} parameters")
    for field, value in fields.items():
        setattr(config, field, value)
    torch.manual_seed(len(name))
    return model_class._from_config(config, attn_implementation="eager").float().train()


def inputs_of(name: str, model: Any) -> dict[str, Any]:
    """Returns the arguments of a training step: tokens and labels, three of them ignored."""
    import torch

    torch.manual_seed(1)
    tokens = torch.randint(3, VOCABULARY - 4, (2, LENGTH))
    labels = tokens.clone()
    labels[0, 2:5] = -100
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    if name == "GitForCausalLM":
        size = model.config.vision_config.image_size
        inputs["pixel_values"] = torch.randn(2, 3, size, size)
    if name in ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"):
        books = model.config.num_codebooks
        inputs = {"input_ids": tokens.repeat(books, 1), "labels": labels[..., None].repeat(1, 1, books)}
    return inputs


def adapter() -> Any:
    """Imports the adapter, and with it transformers, which takes seconds."""
    import_transformers()
    from core_triton.hosts import transformers

    return transformers


def patch(*args: Any, **options: Any) -> Any:
    return adapter().patch(*args, **options)


def unpatch(*args: Any) -> None:
    adapter().unpatch(*args)


class Step(NamedTuple):
    """A training step: its loss, and the gradients by the parameter's name."""

    loss: Any
    gradients: dict[str, Any]


def step(model: Any, inputs: dict[str, Any]) -> Step:
    import torch

    torch.manual_seed(2)  # some routers and attentions draw random numbers
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Step(loss.detach(), gradients)


def difference(found: Step, expected: Step) -> float:
    """Returns the largest relative difference of the loss and the gradients. Each gradient's is relative to its largest
    element, or to a hundredth of the model's largest."""
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(gradient.abs().max() for gradient in expected.gradients.values())
    differences = [(found.loss - expected.loss).abs() / expected.loss.abs()]
    for name, gradient in expected.gradients.items():
        scale = gradient.abs().max() + 0.01 * largest
        differences.append((found.gradients[name] - gradient).abs().max() / scale)
    return float(max(differences))


def fused_options(model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the options of each call of `linear_cross_entropy` in a step of a patched model."""
    from unittest import mock

    from core_triton.hosts import deferred

    with mock.patch.object(deferred, "linear_cross_entropy", wraps=deferred.linear_cross_entropy) as called:
        step(model, inputs)
    return [dict(call.kwargs) for call in called.call_args_list]
