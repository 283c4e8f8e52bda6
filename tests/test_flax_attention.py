"""Tests the choice of the attention implementation: requirements of cuDNN, the default, and no fallback from a
named implementation."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_runs import SMALL, gpu, train

import flax_models.model.attention_choice as attention_choice
from flax_models.model.attention_choice import explain_attention
from flax_models.model.decoder import ModelConfig, decoder_shapes
from flax_models.train.config import CONFIGS

SHAPE = ModelConfig(97, 32, 2, 4, 2, 16, 48, 16, dtype="bfloat16")
CPU = jax.devices("cpu")[0]


@pytest.mark.parametrize(
    ("changes", "length", "device", "obstacle"),
    [
        ({"dtype": "float32"}, 16, gpu(), "needs dtype bfloat16 or float16, got float32"),
        ({"attention_softcap": 20.0}, 16, gpu(), "needs scores without attention_softcap, got 20.0"),
        (
            {"sliding_window": 4, "window_pattern": (True, False)},
            16,
            gpu(),
            "needs the same window in every layer, got window_pattern (True, False)",
        ),
        ({"head_dim": 12}, 16, gpu(), "needs head_dim to be a multiple of 8 up to 256, got 12"),
        ({"head_dim": 264}, 16, gpu(), "needs head_dim to be a multiple of 8 up to 256, got 264"),
        ({"head_dim": 256}, 16, gpu("8.9"), "needs head_dim up to 128 on compute capability 8.9, got 256"),
        ({}, 16, gpu("7.5"), "needs compute capability 8.0 or later, got 7.5"),
        ({}, 16, gpu(version="rocm 7"), "needs an NVIDIA GPU with cuDNN, got a gpu device"),
        ({}, 16, CPU, "needs an NVIDIA GPU with cuDNN, got a cpu device"),
        ({}, 131, gpu(), "needs an even number of tokens per sequence (max_seq_len in training), got 131"),
    ],
)
def test_unsupported_cudnn_raises_if_named_and_is_the_reason_for_xla_otherwise(changes, length, device, obstacle):
    config = dataclasses.replace(SHAPE, **changes)
    assert explain_attention(config, length, device) == ("xla", f"cudnn {obstacle}")
    with pytest.raises(ValueError, match=re.escape(f"attention_implementation cudnn {obstacle}")):
        explain_attention(dataclasses.replace(config, attention_implementation="cudnn"), length, device)


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
@pytest.mark.parametrize("changes", [{}, {"dtype": "float16"}, {"sliding_window": 4}, {"head_dim": 128}])
def test_cudnn_is_the_default_where_it_is_supported(changes, capability):
    config, device = dataclasses.replace(SHAPE, **changes), gpu(capability)
    assert explain_attention(config, 16, device) == ("cudnn", f"supported on compute capability {capability}")
    for name in ("xla", "cudnn"):
        named = dataclasses.replace(config, attention_implementation=name)
        assert explain_attention(named, 16, device) == (name, "requested")


@pytest.mark.parametrize("name", [name for name, run in CONFIGS.items() if run.model.dtype == "bfloat16"])
def test_published_models_train_with_cudnn_where_it_is_supported(name):
    config = CONFIGS[name].model
    chosen = explain_attention(config, config.max_seq_len, gpu()).name
    assert chosen == ("xla" if config.attention_softcap is not None else "cudnn")


@pytest.mark.parametrize("requested", [None, "cudnn", "xla"])
@pytest.mark.parametrize("remat", ["none", "attention", "elementwise", "full"])
def test_model_uses_the_reported_implementation(requested, remat, monkeypatch):
    """Traces the model for an absent GPU. Scores are rematerialized only if the implementation would store them."""
    ran = []

    def attend(query: jax.Array, *rest: Any, implementation: str, **options: Any) -> jax.Array:
        ran.append(implementation)
        return query

    monkeypatch.setattr(attention_choice, "_default_device", gpu)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    config = dataclasses.replace(SHAPE, remat=remat, attention_implementation=requested)
    graph, params = nnx.split(decoder_shapes(config))
    tokens = jax.ShapeDtypeStruct((3, 16), jnp.int32)
    traced = str(jax.make_jaxpr(lambda params, tokens: nnx.merge(graph, params)(tokens))(params, tokens))
    expected = explain_attention(config, 16).name
    assert set(ran) == {expected}
    assert ("remat" in traced or "checkpoint" in traced) == (
        remat in ("elementwise", "full") or (remat, expected) == ("attention", "xla")
    )


def test_named_implementation_never_falls_back():
    graph, params = nnx.split(decoder_shapes(dataclasses.replace(SHAPE, attention_implementation="cudnn")))
    with pytest.raises(ValueError, match="attention_implementation cudnn needs an NVIDIA GPU with cuDNN, got a cpu"):
        jax.eval_shape(lambda params: nnx.merge(graph, params)(jnp.zeros((1, 16), jnp.int32)), params)
    with pytest.raises(ValueError, match="attention_implementation cudnn needs dtype bfloat16 or float16, got float32"):
        ModelConfig(attention_implementation="cudnn")


def test_trainer_raises_before_it_reads_anything(tmp_path, capsys):
    requested = ["--attention-implementation", "cudnn"]
    assert train(tmp_path, "--data", str(tmp_path / "absent"), *SMALL, *requested, "--dtype", "bfloat16") == 1
    assert capsys.readouterr().err == (
        "error: --attention-implementation cudnn needs an NVIDIA GPU with cuDNN, got a cpu device\n"
    )
    with pytest.raises(SystemExit):
        train(tmp_path, *SMALL, *requested)
    assert "cudnn needs dtype bfloat16 or float16, got float32" in re.sub(r"[\s│]+", " ", capsys.readouterr().err)
