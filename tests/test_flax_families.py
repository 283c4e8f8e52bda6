"""Compares every family with the transformers library: hidden states, losses, and folders that either one writes."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hub_models import (
    CASES,
    SIZES,
    import_transformers,
    load_transformers,
    make,
    their_hidden_states,
    their_loss,
    tokens,
    write_folder,
)
from random_decoder import random_decoder

from flax_models import export
from flax_models.data.dialogue import Document
from flax_models.data.tokenizer import load_or_train, write
from flax_models.errors import RunError
from flax_models.hub.config import config_of
from flax_models.hub.fields import FAMILIES
from flax_models.hub.weights import load, save
from flax_models.model.decoder import Decoder
from flax_models.model.families import PUBLISHED, published
from flax_models.train.checkpoint import Checkpoints
from flax_models.train.config import CONFIGS, TrainConfig, from_json, to_json
from flax_models.train.step import Trainer
from jax_pallas.linear_ce import linear_cross_entropy

# Fields of transformers' config classes that a folder may have with any value, because they do not change what the
# decoder computes. Dropout is reported in a note.
WITHOUT_EFFECT = {
    *("use_cache", "initializer_range", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop"),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
# Fields in addition to SIZES with which all other fields of a family have an effect.
IN_EFFECT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": WINDOW,
    "qwen3": WINDOW,
    "gemma": {},
    "gemma2": {},
    "phi3": {**CASES["phi3-long"][1], "sliding_window": 9},
    "smollm3": {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2},
    "olmo2": {},
    "granite": {},
}
# For two float32 computations of three layers with different orders of summation.
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[Any, Path]]:
    """The transformers model of each case, and the folder that it was saved to."""
    made = {}
    for name in CASES:
        model, folder = make(name), tmp_path_factory.mktemp("hub") / name
        write_folder(model, folder)
        assert len(list(folder.glob("*.safetensors"))) > 1, "the weights must be sharded"
        made[name] = model, folder
    return made


def other(value: Any) -> Any:
    """Returns another value for a field of config.json."""
    if isinstance(value, list):
        return [other(value[0]), *value[1:]]
    if isinstance(value, dict):
        return {**value, "rope_theta": 7.0}
    if isinstance(value, str):
        return {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}.get(value, "relu")
    if isinstance(value, bool):
        return not value
    return 2 * value if value else 1


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_field_of_transformers_changes_the_model_or_is_refused(family):
    """A field that is read but not used would silently give another model."""
    if family not in IN_EFFECT:
        assert family == "internlm3", "transformers does not include it"
        return
    transformers = import_transformers()
    values = {**SIZES, **IN_EFFECT[family], "model_type": family}
    model = config_of(values, family)
    known = transformers.AutoConfig.for_model(family, **SIZES, **IN_EFFECT[family]).to_dict()
    fields = set(known) - set(transformers.PreTrainedConfig().to_dict())
    assert len(fields) > 15
    without_effect = set()
    for name in fields:
        with contextlib.suppress(RunError):
            if config_of({**values, name: other(values.get(name, known[name]))}, family) == model:
                without_effect.add(name)
    assert without_effect == fields & WITHOUT_EFFECT


@nnx.jit
def hidden_states(model: Decoder, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def loss(model: Decoder, tokens: np.ndarray) -> float:
    hidden = hidden_states(model, jnp.asarray(tokens))
    targets = jnp.asarray(tokens)[:, 1:]
    return float(linear_cross_entropy(hidden[:, :-1], model.head_weight(), targets, **model.config.loss_options()))


def distance(ours: Any, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(ours) - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("name", list(CASES))
def test_hidden_states_and_loss_are_those_of_transformers(folders, name):
    theirs, folder = folders[name]
    ours = load(folder)
    for length in (12, 40) if name == "phi3-long" else (40,):  # shorter and longer than the original length of 16
        ids = tokens(length=length)
        error = distance(hidden_states(ours, jnp.asarray(ids)), their_hidden_states(theirs, ids))
        assert error <= TOLERANCE, f"{length} tokens: relative error {error:.1e}, {error / TOLERANCE:.0%} of the budget"
    assert loss(ours, tokens()) == pytest.approx(their_loss(theirs, tokens()), rel=1e-5)


@pytest.mark.parametrize("name", list(CASES))
def test_saved_model_is_the_same_in_transformers(folders, name, tmp_path):
    theirs, folder = folders[name]
    save(load(folder), tmp_path / "out", max_shard_bytes=30_000, like=folder)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = load_transformers(tmp_path / "out")
    assert type(again) is type(theirs)
    assert again.config.eos_token_id == theirs.config.eos_token_id
    ids = tokens()
    np.testing.assert_array_equal(their_hidden_states(again, ids), their_hidden_states(theirs, ids))
    assert their_loss(again, ids) == their_loss(theirs, ids)


PARAMETERS = {  # from the model pages
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_248_023_552,
    "gemma-2b": 2_506_172_416,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "phi3-mini": 3_821_079_552,
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_models_have_their_published_number_of_parameters(name):
    config = published(name)
    assert config.parameter_count() == PARAMETERS[name]
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == PARAMETERS[name]


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_shapes_can_be_trained_and_their_options_survive_json(name):
    config = next(config for config in CONFIGS.values() if config.config == name)
    assert config.model.parameter_count() == PARAMETERS[name]
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_unknown_name_raises_with_the_valid_names():
    with pytest.raises(ValueError, match=r"name must be one of llama2-7b, .* got 'llama9'"):
        published("llama9")


def test_bfloat16_computation_over_float32_parameters_stays_near(folders):
    theirs, folder = folders["gemma2"]
    model = load(folder, dtype="bfloat16")
    assert model.head_weight().dtype == jnp.float32
    hidden = hidden_states(model, jnp.asarray(tokens()))
    assert hidden.dtype == jnp.bfloat16
    assert distance(hidden.astype(jnp.float32), their_hidden_states(theirs, tokens())) < 0.03
    assert loss(model, tokens()) == pytest.approx(their_loss(theirs, tokens()), rel=0.02)
    assert dataclasses.replace(model.config, dtype="float32") == load(folder).config


def test_an_exported_run_is_the_same_model_in_transformers(tmp_path, capsys):
    text = "def export(run, out):\n    return save(read(run), out)\n"
    tokenizer, _ = load_or_train([Document("a", text * 20)], 300, tmp_path / "cache")
    config = dataclasses.replace(CONFIGS["micro"], train=TrainConfig(steps=1, batch_size=1))
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({**to_json(config), "corpus_sha256": "0" * 64}))
    write(tokenizer, run / "tokenizer.json")
    model = random_decoder(dataclasses.replace(config.model, vocab_size=tokenizer.get_vocab_size()))
    assert export.main(["--run", str(run), "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"error: {run} has no checkpoint yet\n"
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(1, Trainer(model, config.train).initial._replace(step=jnp.int32(1)), {})
    checkpoints.close()

    assert export.main(["--run", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out} holds step 1 of {run}\n"
    theirs = load_transformers(out)
    ids = np.array([[0, *tokenizer.encode(text).ids]])
    assert distance(hidden_states(model, jnp.asarray(ids)), their_hidden_states(theirs, ids)) <= TOLERANCE
    assert loss(model, ids) == pytest.approx(their_loss(theirs, ids), rel=1e-5)

    their_tokenizer = import_transformers().AutoTokenizer.from_pretrained(out)
    assert their_tokenizer(text)["input_ids"] == ids[0].tolist()
    assert their_tokenizer.eos_token_id == theirs.generation_config.eos_token_id == theirs.config.eos_token_id == 0
    assert export.main(["--run", str(run), "--out", str(out)]) == 1
    assert "already exists and is not an empty folder" in capsys.readouterr().err
