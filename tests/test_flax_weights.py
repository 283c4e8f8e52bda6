"""Folders of weights without the transformers library: published config files, what is refused, what is written."""

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from flax_models.errors import RunError
from flax_models.families import PUBLISHED, published
from flax_models.hub_config import config_of, values_of
from flax_models.model import Decoder, ModelConfig
from flax_models.rope import RopeScaling
from flax_models.weights import load, save
from tests.random_decoder import random_decoder

SMALL = ModelConfig(
    vocab_size=31,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    max_seq_len=32,
)

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "use_cache": True}
# The files of the models' pages: old ways of writing, fields that say nothing, fields left out.
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


def test_longrope_is_read_in_its_old_ways_of_writing():
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
    assert config.rope.rope_original_seq_len == SMALL.max_seq_len, "transformers' value where the file has none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_scale": 0.1}, r"fields that this decoder does not know for model_type llama: logit_scale \(0.1\)"),
        ({"logits_scaling": 8.0, "residual_multiplier": 0.2}, r"logits_scaling \(8.0\), residual_multiplier \(0.2\)"),
        ({"attn_logit_softcapping": 50.0}, r"does not know .* attn_logit_softcapping \(50.0\)"),
        ({"final_logit_softcapping": 30.0}, r"does not know .* final_logit_softcapping"),
        ({"sliding_window": 128}, r"does not know .* sliding_window \(128\)"),
        ({"attention_chunk_size": 128}, r"does not know .* attention_chunk_size"),
        ({"quantization_config": {"bits": 4}}, r"does not know .* quantization_config"),
        ({"model_type": "cohere"}, "model_type must be one of llama, mistral, .* got 'cohere'"),
        ({"model_type": None}, "model_type must be one of llama, mistral, .* got None"),
        ({"hidden_act": "relu2"}, "hidden_act must be one of silu, .* got 'relu2'"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, .* got 'gelu'"),  # the exact one, not tanh's
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0, got 0.1"),
        ({"pretraining_tp": 2}, "pretraining_tp must be 1, got 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_scaling": None},
            "partial_rotary_factor must be 1.0 for model_type llama, got 0.5",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type must be one of default, .* 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling's factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 1}}, "for rope_type linear, got 'alpha'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling's .*_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_factor must be at least 1, got 0.5"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": "wide"}, "x: .*str"),
    ],
)
def test_a_config_that_asks_for_other_mathematics_is_refused(change, message):
    with pytest.raises(RunError, match=message):
        config_of({**values_of(SMALL), **change}, "x")


def test_windows_that_are_not_known_are_refused_and_missing_fields_named():
    qwen = values_of(dataclasses.replace(SMALL, family="qwen2", attention_bias=True))
    with pytest.raises(RunError, match="layer_types must be sliding_attention or full_attention for 2 layers"):
        config_of({**qwen, "layer_types": ["chunked_attention", "full_attention"]}, "x")
    with pytest.raises(RunError, match="x: num_hidden_layers is missing"):
        config_of({name: value for name, value in qwen.items() if name != "num_hidden_layers"}, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_scale": 2.0}, "the files of family llama cannot say logit_scale 2.0"),
        ({"logit_softcap": 30.0, "norm_plus_one": True}, "cannot say norm_plus_one True, logit_softcap 30.0"),
        ({"family": "qwen2"}, "the files of family qwen2 cannot say attention_bias False"),
        ({"sliding_window": 4}, r"cannot say sliding_window \(4, 4\)"),
        ({"family": "mistral", "sliding_window": 4, "window_pattern": (True, False)}, "cannot say sliding_window"),
    ],
)
def test_what_a_familys_files_cannot_say_is_not_written(changes, message, tmp_path):
    model = random_decoder(dataclasses.replace(SMALL, **changes))
    with pytest.raises(RunError, match=message):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Folders


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Decoder, Path]:
    model = random_decoder(SMALL)
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(model, folder)
    return model, folder


def same_parameters(ours: Decoder, theirs: Decoder) -> None:
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours, nnx.Param), nnx.state(theirs, nnx.Param))


def test_a_folder_laid_out_as_on_the_hub_makes_the_round_trip(tmp_path):
    config = dataclasses.replace(SMALL, family="phi3", tie_embeddings=False)
    model = random_decoder(config)
    first, second = tmp_path / "first", tmp_path / "second"
    save(model, first, max_shard_bytes=3000, fields={"eos_token_id": [7, 8], "pad_token_id": 7})
    companions = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"a": 1}',
        "special_tokens_map.json": "{}",
        "tokenizer.model": "\x01\x02",
        "generation_config.json": '{"eos_token_id": [7, 8]}',
    }
    for name, text in companions.items():
        (first / name).write_text(text)
    (first / "README.md").write_text("of the first model")
    index = json.loads((first / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == 4 * config.parameter_count()
    for file in files:
        tensors = load_file(first / file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 3000
    assert load_file(first / index["weight_map"]["model.layers.1.self_attn.qkv_proj.weight"])[
        "model.layers.1.self_attn.qkv_proj.weight"
    ].shape == (64, 16)

    again = load(first)
    assert again.config == config
    same_parameters(again, model)
    save(again, second, max_shard_bytes=3000, like=first)
    for path in first.iterdir():
        if path.name != "README.md":
            assert (second / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (second / "README.md").exists()


def test_parameters_are_loaded_in_the_dtype_asked_for_and_written_in_theirs(saved, tmp_path):
    model, folder = saved
    half = load(folder, param_dtype="bfloat16", dtype="bfloat16", remat="full", max_seq_len=16)
    assert (half.config.remat, half.config.max_seq_len) == ("full", 16)
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(half, nnx.Param)), jax.tree.leaves(nnx.state(model, nnx.Param)), strict=True
    ):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours, theirs.astype(jnp.bfloat16))
    save(half, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    same_parameters(load(tmp_path / "half", param_dtype="bfloat16", dtype="bfloat16"), half)
    save(model, tmp_path / "sixteen", dtype="float16")
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "sixteen" / "model.safetensors").values()} == {
        "float16"
    }


def test_a_tied_head_that_is_written_out_and_stored_frequencies_are_passed_over(saved, tmp_path):
    model, _ = saved

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    same_parameters(load(changed(saved, tmp_path, add)), model)


def changed(saved: tuple[Decoder, Path], place: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """Returns a copy of the saved folder whose tensors were changed."""
    tensors = load_file(saved[1] / "model.safetensors")
    change(tensors)
    (place / "config.json").write_bytes((saved[1] / "config.json").read_bytes())
    save_file(tensors, place / "model.safetensors")
    return place


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"tensors are missing: {NORM}"),
        (
            lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            r"tensors that the config has no place for: model.layers.1.self_attn.q_proj.bias",
        ),
        (
            lambda tensors: tensors.update({NORM: np.ones(15, np.float32)}),
            NORM + r" must have shape \(16,\), got \(15,\)",
        ),
        (lambda tensors: tensors.update({NORM: np.ones(16, np.int8)}), f"{NORM} must be one of F32, F16, BF16, got I8"),
        (
            lambda tensors: tensors.update({"lm_head.weight": np.ones((31, 16), np.float32)}),
            "lm_head.weight is not the embedding, but tie_word_embeddings is true",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(saved, tmp_path, change, message):
    with pytest.raises(RunError, match=message):
        load(changed(saved, tmp_path, change))


def test_folders_that_cannot_be_read_are_named(saved, tmp_path):
    with pytest.raises(RunError, match=r"cannot read .*absent/config.json"):
        load(tmp_path / "absent")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RunError, match=r"config.json: it must hold an object, got list"):
        load(tmp_path)
    (tmp_path / "config.json").write_bytes((saved[1] / "config.json").read_bytes())
    with pytest.raises(RunError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved[1] / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(RunError, match=r"cannot read .*model.safetensors: "):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, message in [
        ("{}", "cannot read .*index.json: KeyError"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "a shard must be a file of the same folder"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "cannot read .*absent.safetensors"),
    ]:
        index.write_text(text)
        with pytest.raises(RunError, match=message):
            load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved[1] / "model.safetensors").read_bytes())
    index.write_text('{"weight_map": {"model.norm.weight": "model.safetensors"}}')
    with pytest.raises(RunError, match=r"index.json and the shards differ in .* and \d+ more"):
        load(tmp_path)


def test_bad_options_and_folders_that_are_taken_are_refused(saved, tmp_path):
    model, folder = saved
    with pytest.raises(ValueError, match=r"changes may name dtype, .* and max_seq_len, got hidden_size"):
        load(folder, hidden_size=3)
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .* or None, got 'int8'"):
        save(model, tmp_path / "out", dtype="int8")
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, got 0"):
        save(model, tmp_path / "out", max_shard_bytes=0)
    with pytest.raises(ValueError, match="fields must say nothing of the computation, got hidden_act"):
        save(model, tmp_path / "out", fields={"hidden_act": "relu"})
    with pytest.raises(RunError, match=r"cannot read .*absent/config.json"):
        save(model, tmp_path / "out", like=tmp_path / "absent")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="exists already and is not an empty folder"):
        save(model, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="exists already and is not an empty folder"):
        save(model, tmp_path / "file")
    with pytest.raises(RunError, match=r"cannot write .*file/out"):
        save(model, tmp_path / "file" / "out")


def test_loading_holds_one_stacked_parameter_beside_the_model_at_most(tmp_path):
    config = dataclasses.replace(SMALL, hidden_size=128, intermediate_size=512, num_layers=6, max_seq_len=8)
    save(random_decoder(config), tmp_path / "model")
    load(tmp_path / "model")  # what is compiled and imported on the way is not the model's
    model, largest = 4 * config.parameter_count(), 4 * 6 * 128 * 512
    tracemalloc.start()
    load(tmp_path / "model")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= model + largest + 2**20, f"{peak:,} bytes for a model of {model:,}"
