"""Tests folders of weights without the transformers library: reading, errors and writing."""

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
from random_decoder import SMALL, random_decoder
from safetensors.numpy import load_file, save_file

from flax_models.errors import RunError
from flax_models.hub.config import read_config
from flax_models.hub.weights import check_weights, load, save
from flax_models.model.decoder import Decoder


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
    ].shape == (64, 24)

    assert {path.stat().st_mode for path in first.iterdir()} == {(first / "config.json").stat().st_mode}
    again = load(first)
    assert again.config == config
    same_parameters(again, model)
    save(again, second, max_shard_bytes=3000, like=first)
    for path in first.iterdir():
        if path.name != "README.md":
            assert (second / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (second / "README.md").exists()


def test_parameters_are_loaded_in_the_requested_dtype_and_written_in_theirs(saved, tmp_path):
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


def test_stored_tied_head_and_rotary_frequencies_are_ignored(saved, tmp_path):
    model, _ = saved

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    same_parameters(load(changed(saved, tmp_path, add)), model)


def changed(saved: tuple[Decoder, Path], place: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """Returns a copy of the saved folder with changed tensors."""
    tensors = load_file(saved[1] / "model.safetensors")
    change(tensors)
    (place / "config.json").write_bytes((saved[1] / "config.json").read_bytes())
    save_file(tensors, place / "model.safetensors")
    return place


NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"missing tensors: {NORM}"),
        (
            lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            r"unexpected tensors: model.layers.1.self_attn.q_proj.bias",
        ),
        (
            lambda tensors: tensors.update({NORM: np.ones(23, np.float32)}),
            NORM + r" must have shape \(24,\), got \(23,\)",
        ),
        (lambda tensors: tensors.update({NORM: np.ones(24, np.int8)}), f"{NORM} must be one of F32, F16, BF16, got I8"),
        (
            lambda tensors: tensors.update({"lm_head.weight": np.ones((97, 24), np.float32)}),
            "tie_word_embeddings is true, but lm_head.weight differs from the embedding",
        ),
        (lambda tensors: put(tensors, np.nan), DOWN + r" holds NaN or inf, first at \[7, 39\]"),
        (lambda tensors: put(tensors, -np.inf), DOWN + r" holds NaN or inf, first at \[7, 39\]"),
        (lambda tensors: put(tensors, np.inf, np.float16), DOWN + r" holds NaN or inf, first at \[7, 39\]"),
        (lambda tensors: put(tensors, np.nan, jnp.bfloat16), DOWN + r" holds NaN or inf, first at \[7, 39\]"),
    ],
)
def test_tensors_that_do_not_match_the_config_raise(saved, tmp_path, change, message):
    folder = changed(saved, tmp_path, change)
    with pytest.raises(RunError, match=message):
        check_weights(folder, read_config(folder))
    with pytest.raises(RunError, match=message):
        load(folder)


def put(tensors: dict[str, np.ndarray], value: float, dtype: Any = np.float32) -> None:
    tensors[DOWN] = tensors[DOWN].astype(dtype)
    tensors[DOWN][7, 39] = value


def test_whole_and_finite_weights_pass_the_check(saved):
    check_weights(saved[1], read_config(saved[1]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers must be at most 10,000, got 1000000000"),
        ("num_hidden_layers", 10_000, "num_hidden_layers is 10000, but there are tensors of 2 layers"),
        ("num_hidden_layers", 1, "unexpected tensors: model.layers.1.input_layernorm.weight"),
        ("vocab_size", 10**9, r"model.embed_tokens.weight must have shape \(1000000000, 24\), got \(97, 24\)"),
        ("intermediate_size", 10**9, r"must have shape \(1000000000, 24\), got \(40, 24\)"),
    ],
)
def test_config_of_a_huge_model_raises_before_allocation(saved, tmp_path, field, value, message):
    values = json.loads((saved[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, field: value}))
    (tmp_path / "model.safetensors").write_bytes((saved[1] / "model.safetensors").read_bytes())
    tracemalloc.start()
    try:
        with pytest.raises(RunError, match=message):
            load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_unreadable_folders_raise(saved, tmp_path):
    with pytest.raises(RunError, match=r"cannot read .*absent/config.json"):
        load(tmp_path / "absent")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RunError, match=r"config.json: it must hold a JSON object, got list"):
        load(tmp_path)
    (tmp_path / "config.json").write_bytes((saved[1] / "config.json").read_bytes())
    with pytest.raises(RunError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved[1] / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(
        RunError, match=r"cannot read .*: the file is truncated in model\.norm\.weight: it has .* of .* bytes"
    ):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved[1] / "model.safetensors").read_bytes()[:100])
    with pytest.raises(RunError, match="safetensors: the file is truncated in its header, after 100 bytes"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, message in [
        ("{}", "cannot read .*index.json: KeyError"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "a shard must be a file in the same folder"),
        ('{"weight_map": {"a": 3}}', "a shard must be a file in the same folder, got 3"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "cannot read .*absent.safetensors"),
    ]:
        index.write_text(text)
        with pytest.raises(RunError, match=message):
            load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved[1] / "model.safetensors").read_bytes())
    index.write_text('{"weight_map": {"model.norm.weight": "model.safetensors"}}')
    with pytest.raises(RunError, match=r"index.json and the shards differ in .* and \d+ more"):
        load(tmp_path)


def test_invalid_options_and_folders_that_are_not_empty_raise(saved, tmp_path):
    model, folder = saved
    with pytest.raises(ValueError, match=r"changes must be among dtype, .* and max_seq_len, got hidden_size"):
        load(folder, hidden_size=3)
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .* or None, got 'int8'"):
        save(model, tmp_path / "out", dtype="int8")
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, got 0"):
        save(model, tmp_path / "out", max_shard_bytes=0)
    with pytest.raises(ValueError, match="fields must not change the computation, got hidden_act"):
        save(model, tmp_path / "out", fields={"hidden_act": "relu"})
    with pytest.raises(RunError, match=r"cannot read .*absent/config.json"):
        save(model, tmp_path / "out", like=tmp_path / "absent")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="already exists and is not an empty folder"):
        save(model, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="already exists and is not an empty folder"):
        save(model, tmp_path / "file")
    with pytest.raises(RunError, match=r"cannot write .*file/out"):
        save(model, tmp_path / "file" / "out")


def test_values_too_large_for_float16_raise_before_anything_is_written(tmp_path):
    model = random_decoder(SMALL)
    scale = model.final_norm.scale
    # float16 rounds values below 65520 to at most 65504, its largest number.
    for large, size in [(-7e4, r"7e\+04"), (65520.0, r"6\.55e\+04")]:
        scale.set_value(scale[...].at[:2].set(jnp.array([jnp.nan, large])))
        with pytest.raises(RunError, match=rf"float16 cannot hold the values of model\.norm\.weight, up to {size}; "):
            save(model, tmp_path / "out", dtype="float16", max_shard_bytes=3000)
        assert not (tmp_path / "out").exists()
    save(model, tmp_path / "out", dtype="bfloat16")
    scale.set_value(scale[...].at[:3].set(jnp.array([jnp.nan, -65519.0, jnp.inf])))
    save(model, tmp_path / "sixteen", dtype="float16")
    written = load_file(tmp_path / "sixteen" / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(written[:3], np.array([np.nan, -65504, np.inf], np.float16))
    scale.set_value(scale[...].at[:3].set(jnp.array([3.4e38, 0, 1])))
    with pytest.raises(RunError, match=r"bfloat16 cannot hold the values of model\.norm\.weight, up to 3\.4e\+38; "):
        save(model, tmp_path / "large", dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_too_large_for_the_parameters_raise(dtype, tmp_path):
    model, folder = random_decoder(SMALL), tmp_path / "model"
    kernel = model.blocks.feed_forward.down.kernel
    kernel.set_value(kernel[...].at[1, 2, 3].set(-1e5))
    save(model, folder, dtype=dtype)
    with pytest.raises(
        RunError, match=rf"float16 cannot hold the values of {DOWN} of {folder}, up to (1|9\.98)e\+0[45]; use another"
    ):
        load(folder, param_dtype="float16")
    load(folder, param_dtype="bfloat16")


def test_loading_holds_at_most_one_stacked_parameter_beside_the_model(tmp_path):
    config = dataclasses.replace(SMALL, hidden_size=128, intermediate_size=512, num_layers=6, max_seq_len=8)
    save(random_decoder(config), tmp_path / "model")
    load(tmp_path / "model")  # compiles and imports everything before memory is measured
    model, largest = 4 * config.parameter_count(), 4 * 6 * 128 * 512
    tracemalloc.start()
    load(tmp_path / "model")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= model + largest + 2**20, f"{peak:,} bytes for a model of {model:,}"
