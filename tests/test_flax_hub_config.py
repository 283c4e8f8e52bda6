"""Tests reading and writing `config.json`: published files, rejected fields, and configs that a family cannot
express."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from random_decoder import SMALL, random_decoder

from flax_models.errors import RunError
from flax_models.hub.config import config_note, config_of, read_config, values_of
from flax_models.hub.weights import load, save
from flax_models.model.families import PUBLISHED, published
from flax_models.model.rope import RopeScaling

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "use_cache": True}
# Published files, with old formats, irrelevant fields and absent fields.
HUB: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        **LLAMA,
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "vocab_size": 32000,
    },
    "llama3.2-1b": {
        **LLAMA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "vocab_size": 128256,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32768,
    },
    "gemma-2b": {
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_activation": None,
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 256000,
    },
    "gemma2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 256000,
    },
    "phi3-mini": {
        "_name_or_path": "Phi-3-mini-4k-instruct",
        "architectures": ["Phi3ForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "attention_bias": False,
        "vocab_size": 32064,
    },
}


@pytest.mark.parametrize("name", list(HUB))
def test_the_hubs_config_is_the_published_one(name):
    read = config_of(HUB[name], name)
    assert read.windows() == published(name).windows()
    assert dataclasses.replace(read, query_scalar=None) == dataclasses.replace(published(name), query_scalar=None)
    assert (read.query_scalar or read.head_dim) == (published(name).query_scalar or published(name).head_dim)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_configs_survive_being_written(name):
    config = published(name)
    assert config_of(json.loads(json.dumps(values_of(config))), name) == config


@pytest.mark.parametrize(
    "rope",
    [
        RopeScaling("linear", 2.0),
        RopeScaling("yarn", 4.0, 64, rope_beta_fast=16.0, rope_truncate=False, rope_attention_factor=1.25),
        RopeScaling("llama3", 8.0, 64, 1.5, 5.0),
    ],
)
def test_scalings_survive_being_written(rope):
    config = dataclasses.replace(SMALL, rope=rope)
    assert config_of(json.loads(json.dumps(values_of(config))), "x") == config


def test_longrope_is_read_in_old_formats():
    factors = {"short_factor": [1.0, 1.1], "long_factor": [1.5, 2.0]}
    values = {**values_of(dataclasses.replace(SMALL, family="phi3", head_dim=4)), "max_position_embeddings": 128}
    values |= {"rope_scaling": {"type": "su", **factors}, "original_max_position_embeddings": 32}
    config = config_of(values, "x")
    expected = RopeScaling("longrope", 4.0, 32, rope_short_factor=(1.0, 1.1), rope_long_factor=(1.5, 2.0))
    assert config.rope == expected
    assert config.rope.attention_factor() == pytest.approx(np.sqrt(1 + np.log(4) / np.log(32)))
    assert config_of(values_of(config), "x") == config


def test_yarns_two_scales_become_its_attention_factor():
    scaling = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    config = config_of({**values_of(SMALL), "rope_scaling": scaling}, "x")
    assert config.rope.attention_factor() == pytest.approx((0.1 * np.log(40) + 1) / (0.05 * np.log(40) + 1))
    assert config.rope.rope_original_seq_len == SMALL.max_seq_len, "transformers' default if the file has no value"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_scale": 0.1}, r"unknown fields for model_type llama: logit_scale \(0.1\)"),
        ({"logits_scaling": 8.0, "residual_multiplier": 0.2}, r"logits_scaling \(8.0\), residual_multiplier \(0.2\)"),
        ({"attn_logit_softcapping": 50.0}, r"unknown fields .* attn_logit_softcapping \(50.0\)"),
        ({"final_logit_softcapping": 30.0}, r"unknown fields .* final_logit_softcapping"),
        ({"sliding_window": 128}, r"unknown fields .* sliding_window \(128\)"),
        ({"attention_chunk_size": 128}, r"unknown fields .* attention_chunk_size"),
        ({"quantization_config": {"bits": 4}}, r"unknown fields .* quantization_config"),
        ({"model_type": "cohere"}, "model_type must be one of llama, mistral, .* got 'cohere'"),
        ({"model_type": None}, "model_type must be one of llama, mistral, .* got None"),
        ({"hidden_act": "relu2"}, "hidden_act must be one of silu, .* got 'relu2'"),
        (
            {"hidden_act": "gelu"},
            "hidden_act must be one of silu, .* got 'gelu'",
        ),  # exact GELU, not the tanh approximation
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"rope_interleaved": True}, "rope_interleaved must be False, got True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_scaling": None},
            "partial_rotary_factor must be 1.0 for model_type llama, got 0.5",
        ),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope_type must be one of default, .* 'ntk'"),
        (
            {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
            r"rope_type must be one of default, .* \['linear'\]",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}},
            "rope_type must be other than dynamic if .*, got 'dynamic'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling's factor is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 1}},
            "only fields of rope_type linear, got 'alpha'",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling's .*_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_factor must be at least 1, got 0.5"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": "64"}, "^x: hidden_size must be an integer, got '64'$"),
        ({"hidden_size": None}, "hidden_size must be an integer, got None"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        (
            {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": None},
            "rope_theta must be 5.0, as in rope_parameters",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 3.0}},
            "rope_scaling must be absent or equal to rope_parameters, got {'type': 'linear', 'factor': 2.0}",
        ),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number, got '1e-6'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number, got nan"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false, got 'true'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10,000, got 1000000000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 0, got -1"),
        ({"hidden_size": 10**20}, "hidden_size must be at most 2,147,483,647, got 1000"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number, got 1000"),
        ({"max_position_embeddings": 0}, "^x: max_position_embeddings must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "^x: num_attention_heads must be a multiple of num_key_value_heads 3, got 4"),
        ({"hidden_act": []}, r"hidden_act must be one of silu, .* got \[\]"),
        ({"rope_parameters": 1, "rope_scaling": None}, "^x: rope_parameters must be an object, got 1"),
        *(
            (
                {"rope_scaling": {"rope_type": kind, "factor": 2.0, name: value}},
                f"^x: rope_scaling's {name} must be {needed}",
            )
            for kind, name, value, needed in (
                ("linear", "factor", "a", "a finite number, got 'a'"),
                ("linear", "rope_theta", None, "a finite number, got None"),
                ("llama3", "low_freq_factor", [], r"a finite number, got \[\]"),
                ("llama3", "original_max_position_embeddings", 0.5, "an integer, got 0.5"),
                ("yarn", "mscale", "a", "a finite number, got 'a'"),
                ("yarn", "truncate", 1, "true or false, got 1"),
                ("longrope", "short_factor", ["a"], r"a list of finite numbers, got \['a'\]"),
            )
        ),
        ({"model_type": ["llama"]}, r"model_type must be one of llama, .* got \['llama'\]"),
    ],
)
def test_unsupported_config_raises(change, message):
    with pytest.raises(RunError, match=message):
        config_of({**values_of(SMALL), **change}, "x")


def test_irrelevant_fields_are_ignored_and_reported():
    values = {
        **values_of(SMALL),
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "_attn_implementation_autoset": True,
        "unsloth_fixed": True,
        "unsloth_version": "2025.3.19",
        "_model_name_or_path": "meta-llama/Llama-3.1-8B",
        "unk_token_id": 0,
        "pretraining_tp": 2,
        "attention_dropout": 0.1,
    }
    assert config_of(values, "x") == SMALL


def test_ignored_fields_are_noted_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values_of(SMALL)))
    assert config_note(tmp_path) is None
    values = {
        **values_of(SMALL),
        "unsloth_fixed": True,
        "is_llama_config": True,
        "attention_dropout": 0.1,
        "neftune_noise_alpha": 5,
        "new_scale": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        RunError, match=r"unknown fields .* new_scale \(2\); .* ignore them with --ignore-config-fields new_scale"
    ):
        read_config(tmp_path)
    assert read_config(tmp_path, ["new_scale"]) == SMALL
    assert config_note(tmp_path, ["new_scale"]) == (
        "config.json: ignored because they do not affect the model: is_llama_config, unsloth_fixed; "
        "not applied in training: attention_dropout 0.1, neftune_noise_alpha 5; ignored on request: new_scale"
    )
    with pytest.raises(RunError, match="--ignore-config-fields: model_type llama needs rope_theta"):
        read_config(tmp_path, ["rope_theta"])
    with pytest.raises(RunError, match=r"--ignore-config-fields must be fields of .*config\.json, got old_scale"):
        read_config(tmp_path, ["new_scale", "old_scale"])


def test_unknown_windows_and_missing_fields_raise():
    qwen = values_of(dataclasses.replace(SMALL, family="qwen2", attention_bias=True))
    with pytest.raises(RunError, match="layer_types must be sliding_attention or full_attention for 2 layers"):
        config_of({**qwen, "layer_types": ["chunked_attention", "full_attention"]}, "x")
    windows = {**qwen, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    assert config_of({**windows, "use_sliding_window": True}, "x").windows() == (4, None)
    message = "sliding_window must be used, because layers have sliding_attention, got None"
    for unused in ({"use_sliding_window": False}, {"use_sliding_window": True, "sliding_window": None}):
        with pytest.raises(RunError, match=message):
            config_of({**windows, **unused}, "x")
    with pytest.raises(RunError, match="max_window_layers must be an integer, got None"):
        config_of({**windows, "use_sliding_window": True, "layer_types": None, "max_window_layers": None}, "x")
    with pytest.raises(RunError, match=r"partial_rotary_factor must be in .*, got 0\.0"):
        config_of({**values_of(dataclasses.replace(SMALL, family="phi3")), "partial_rotary_factor": 0.0}, "x")
    with pytest.raises(RunError, match="x: num_hidden_layers is missing"):
        config_of({name: value for name, value in qwen.items() if name != "num_hidden_layers"}, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_scale": 2.0}, "a config.json of family llama cannot express logit_scale 2.0"),
        ({"logit_softcap": 30.0, "norm_plus_one": True}, "cannot express norm_plus_one True, logit_softcap 30.0"),
        ({"family": "qwen2"}, "a config.json of family qwen2 cannot express attention_bias False"),
        ({"sliding_window": 4}, r"cannot express sliding_window \(4, 4\)"),
        ({"family": "mistral", "sliding_window": 4, "window_pattern": (True, False)}, "cannot express sliding_window"),
    ],
)
def test_config_that_a_family_cannot_express_raises(changes, message, tmp_path):
    model = random_decoder(dataclasses.replace(SMALL, **changes))
    with pytest.raises(RunError, match=message):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# config.json files of published models and of re-uploads by fine-tuning tools, without the sizes.
LAID_OUT: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **LLAMA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.041666666666666664,
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 128012,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "pad_token_id": 128004,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
    },
    "Llama-3.1-8B, merged": {
        **HUB["llama3.2-1b"],
        "_attn_implementation_autoset": True,
        "_name_or_path": "meta-llama/Llama-3.1-8B",
        "rope_scaling": {**HUB["llama3.2-1b"]["rope_scaling"], "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B, unsloth": {
        **HUB["llama3.2-1b"],
        "eos_token_id": [128001, 128008, 128009],
        "pad_token_id": 128004,
        "unk_token_id": 0,
        "unsloth_fixed": True,
        "unsloth_version": "2025.3.19",
    },
    "Qwen2.5-7B-Instruct, merged": {
        **HUB["qwen2.5-0.5b"],
        "_attn_implementation_autoset": True,
        "_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "max_window_layers": 28,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **HUB["qwen2.5-0.5b"],
        "bos_token_id": 151646,
        "eos_token_id": 151643,
        "max_window_layers": 21,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
    },
    "Qwen3-1.7B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_window_layers": 28,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    },
    "Yi-1.5-6B": {
        **LLAMA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "internlm3-8b-instruct": {
        "architectures": ["InternLM3ForCausalLM"],
        "model_type": "internlm3",
        "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"},
        "bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "pad_token_id": 2,
        "qkv_bias": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
        "rope_theta": 50000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
    "OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
    },
    "granite-3.1-2b-base": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "attention_dropout": 0.1,
        "attention_multiplier": 0.015625,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "logits_scaling": 8.0,
        "mlp_bias": False,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
}


@pytest.mark.parametrize("name", list(LAID_OUT))
def test_a_folder_laid_out_as_published_loads(name, tmp_path):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    values = {**LAID_OUT[name], **sizes}
    model = random_decoder(config_of(values, name))
    save(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    again = load(tmp_path)
    assert again.config == model.config
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(again, nnx.Param)), jax.tree.leaves(nnx.state(model, nnx.Param)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
