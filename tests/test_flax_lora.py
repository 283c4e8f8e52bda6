"""Tests adapters: the initial model equals the base model, trained parameters and cost match the report, and merging
is exact."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import before_step, learned, random_batch, start, train
from jax.interpreters import partial_eval
from matmul_flops import matmul_flops
from random_decoder import random_decoder

from flax_models import export
from flax_models.errors import RunError
from flax_models.hub.weights import save
from flax_models.model.decoder import Decoder, ModelConfig, decoder_shapes
from flax_models.model.lora import adapt, adapted_projections, adapted_shapes, merge
from flax_models.model.lora_config import LoraConfig
from flax_models.model.parameters import is_adapter, name_of
from flax_models.model.sampling import Sampling, continue_prompts
from flax_models.train.accounting import flops_per_token, mean_keys, step_memory
from flax_models.train.arguments import parse
from flax_models.train.config import TrainConfig, from_json, to_json
from flax_models.train.step import Trainer
from flax_models.train.trained import read_run

pytestmark = pytest.mark.usefixtures("compiled")

UNTIED = ModelConfig(280, 16, 2, 2, 1, 8, 24, 16, tie_embeddings=False)
BIASED = dataclasses.replace(UNTIED, attention_bias=True, attention_out_bias=True)
LORA = LoraConfig(lora_rank=3)
DORA = LoraConfig(lora_rank=3, dora=True)
FEW = LoraConfig(lora_rank=3, dora=True, lora_targets=("query", "down"))
UNFROZEN = LoraConfig(lora_rank=3, unfreeze=("head", "norms"), lora_targets=("up",))


def adapted(config: ModelConfig, lora: LoraConfig, *, moved: bool = False) -> Decoder:
    """Returns a random decoder with adapters. With `moved`, B and magnitudes differ from their initial values."""
    model = random_decoder(config)
    adapt(model, lora, nnx.Rngs(1))
    if moved:
        generator = np.random.default_rng(2)
        for _, linear in adapted_projections(model):
            shape = linear.lora_b.shape
            linear.lora_b[...] = jnp.asarray(generator.normal(size=shape) * 0.3, linear.lora_b.dtype)
            if lora.dora:
                linear.lora_magnitude[...] *= jnp.asarray(generator.uniform(0.5, 1.5, shape[::2]), jnp.float32)
    return model


def trainer_of(model: Decoder, lora: LoraConfig, **options: Any) -> Trainer:
    return Trainer(model, TrainConfig(steps=8, batch_size=2, warmup_steps=1, **options), lora)


def parameters(params: nnx.State) -> dict[str, np.ndarray]:
    return {name_of(path): np.array(leaf[...]) for path, leaf in nnx.to_flat_state(params)}


@nnx.jit
def hidden_states(model: Decoder, tokens: jax.Array) -> jax.Array:
    return model(tokens)


TOKENS = jnp.asarray(random_batch(2).tokens)


# Initial state


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_first_output_is_the_base_models_bit_for_bit(dtype):
    config = dataclasses.replace(BIASED, dtype=dtype)
    expected = hidden_states(random_decoder(config), TOKENS)
    np.testing.assert_array_equal(hidden_states(adapted(config, LORA), TOKENS), expected)


@pytest.mark.slow
def test_the_first_output_with_magnitudes_is_the_base_models_up_to_rounding():
    expected = hidden_states(random_decoder(BIASED), TOKENS)
    np.testing.assert_allclose(hidden_states(adapted(BIASED, DORA), TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_adapters_are_initialized_as_in_peft_and_differ():
    assert [name for name, _ in adapted_projections(adapted(UNTIED, LORA))] == list(LORA.lora_targets)
    model = adapted(dataclasses.replace(UNTIED, hidden_size=256), LoraConfig(8, lora_targets=("query", "key")))
    drawn = {name: np.asarray(linear.lora_a[...]) for name, linear in adapted_projections(model)}
    for a in (drawn["query"], drawn["key"]):  # Kaiming uniform with a = sqrt(5) has the bound 1 / sqrt(in)
        assert a.shape == (2, 256, 8)
        assert 0.95 / 16 < np.abs(a).max() < 1 / 16
        assert abs(a.mean()) < 0.003
        assert not np.array_equal(a[0], a[1])
    assert not np.array_equal(drawn["query"], drawn["key"])


@pytest.mark.parametrize("differentiated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_frozen_parameters_are_stored_in_the_computation_dtype_and_give_the_same_bits(differentiated):
    """Compares the loss or its gradients with those of a model that has float32 copies of all frozen parameters."""
    config = dataclasses.replace(BIASED, dtype="bfloat16")
    lora = dataclasses.replace(FEW, unfreeze=("attention.query.kernel",))
    trainer = trainer_of(adapted(config, lora, moved=True), lora)
    narrow = trainer.initial.params
    for name, array in parameters(narrow).items():
        wide = name.endswith(("scale", "attention.query.kernel")) or is_adapter(name)
        assert array.dtype == (jnp.float32 if wide else jnp.bfloat16), name
    shapes = nnx.state(adapted_shapes(config, lora), nnx.Param)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), narrow)
    assert jax.tree.leaves_with_path(shapes) == jax.tree.leaves_with_path(like)

    masters = nnx.to_flat_state(nnx.state(random_decoder(config), nnx.Param))
    originals = {path: leaf[...] for path, leaf in masters if path[-2:] != ("query", "kernel")}
    wide = nnx.map_state(lambda path, leaf: leaf.replace(originals.get(path, leaf[...])), narrow)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(wide)} == {"float32"}
    compute = jax.jit(trainer._gradients if differentiated else trainer._negative_log_likelihood)
    jax.tree.map(np.testing.assert_array_equal, compute(narrow, random_batch(2)), compute(wide, random_batch(2)))


# What trains


@pytest.mark.parametrize("lora", [FEW, pytest.param(UNFROZEN, marks=pytest.mark.slow)])
def test_only_adapters_and_unfrozen_parameters_change(lora):
    trainer = trainer_of(adapted(UNTIED, lora, moved=True), lora)
    before = parameters(trainer.initial.params)
    expected = {name for name in before if "lora" in name}
    if lora.unfreeze:
        expected |= {name for name in before if name == "head" or name.endswith("scale")}
    assert len(expected) == (2 + 1 + 3 if lora.unfreeze else 2 * 3)
    assert set(trainer.trained) == expected
    assert {part.first_step for part in trainer.parts if "lora_a" in part.name} == {2}
    assert {part.first_step for part in trainer.parts if "lora_a" not in part.name} == {1}
    program = trainer.compile(2, 16).as_text() or ""
    assert "f32[32,280]{1,0} dot(" in program, "logits"
    assert ("f32[280,16]{1,0} dot(" in program) == bool(lora.unfreeze), "d_weight of the head"
    averages = jax.tree.leaves(trainer.initial.optimizer)
    assert sum(leaf.size for leaf in averages) == 2 * sum(before[name].size for name in expected) + 2
    state, metrics = trainer.step(trainer.initial, random_batch(2))
    after = parameters(state.params)
    assert {name for name in before if not np.array_equal(before[name], after[name])} == expected
    assert bool(metrics.trained.all())


def halves() -> tuple[Trainer, Trainer]:
    """Returns two trainers of a bfloat16 model: one for all parameters, and one for adapters on two projections."""
    half = dataclasses.replace(UNTIED, dtype="bfloat16", tie_embeddings=True)
    lora = LoraConfig(lora_rank=3, lora_targets=("query", "value"))
    return trainer_of(decoder_shapes(half), LoraConfig()), trainer_of(adapted_shapes(half, lora), lora)


def size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_state_has_two_bytes_per_frozen_and_twelve_per_trained_parameter():
    full, low = halves()
    count, adapters = (sum(part.size for part in each.parts) for each in (full, low))
    norms = 5 * 16
    assert size(full.initial.params) == 4 * count
    assert size(low.initial.params) == 2 * (count - norms) + 4 * (norms + adapters)
    assert (size(full.initial.optimizer), size(low.initial.optimizer)) == (8 * count + 8, 8 * adapters + 8)


@pytest.mark.slow
def test_step_stores_no_gradient_of_frozen_parameters():
    whole, part = (step_memory(each, each.compile(2, 16)) for each in halves())
    assert whole is not None
    assert part is not None
    assert whole.temporaries - part.temporaries > whole.parameters / 2


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (UNTIED, LORA),
        (UNTIED, LoraConfig(lora_rank=2, lora_targets=("value", "down"), unfreeze=("head", "attention.query"))),
        (dataclasses.replace(UNTIED, tie_embeddings=True), LoraConfig(lora_rank=5, unfreeze=("embedding",))),
    ],
)
def test_flops_are_the_matmuls_of_the_differentiated_model(config, lora):
    """The traced program also computes masked scores. All other matmuls must be counted exactly."""
    trainer = trainer_of(adapted_shapes(config, lora), lora)
    params = trainer.initial.params
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def loss(trained: nnx.State, frozen: nnx.State, tokens: jax.Array) -> jax.Array:
        model = trainer.model(nnx.merge_state(trained, frozen))
        return jnp.sum((model(tokens) @ model.head_weight().T) ** 2)

    traced = jax.make_jaxpr(jax.grad(loss))(*trainer.split(params), tokens).jaxpr
    needed, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    masked = 12 * config.num_layers * config.num_heads * config.head_dim * (16 - mean_keys(16))
    reported = flops_per_token(config, 16, trainer.trained)
    assert matmul_flops(needed) == pytest.approx(2 * 16 * (reported + masked), rel=0)


def test_invalid_adapters_raise():
    for options, message in [
        ({"lora_alpha": 3.0}, "--lora-alpha requires --lora-rank of at least 1, got --lora-alpha 3.0"),
        ({"dora": True}, "--dora requires --lora-rank"),
        ({"unfreeze": ("head",)}, "--unfreeze requires --lora-rank"),
        ({"lora_rank": -1}, "--lora-rank must not be negative, got -1"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, "--lora-alpha must be positive and finite, got 0.0"),
        ({"lora_rank": 2, "lora_plus_ratio": -1.0}, "--lora-plus-ratio must be positive and finite, got -1.0"),
        ({"lora_rank": 2, "lora_targets": ()}, "--lora-targets must name at least one projection, each once, got ''"),
        ({"lora_rank": 2, "lora_targets": ("up", "up")}, "--lora-targets must name .* got 'up up'"),
    ]:
        with pytest.raises(ValueError, match=message):
            LoraConfig(**options)
    unknown = dataclasses.replace(LORA, unfreeze=("heads",))
    with pytest.raises(
        RunError, match=r"--unfreeze: no parameter matches heads; the parameters are blocks\.attention\."
    ):
        trainer_of(adapted_shapes(UNTIED, unknown), unknown)
    with pytest.raises(
        RunError, match="--freeze cannot be used with adapters, which freeze all other parameters: got head"
    ):
        trainer_of(adapted_shapes(UNTIED, LORA), LORA, freeze=("head",))
    with pytest.raises(RunError, match="--lora-rank needs --num-layers of at least 1, got 0"):
        adapted_shapes(dataclasses.replace(UNTIED, num_layers=0), LORA)
    model = adapted(UNTIED, LORA)
    with pytest.raises(ValueError, match="lora must be the options with which the model was adapted, got lora_rank 0"):
        trainer_of(model, LoraConfig())
    with pytest.raises(ValueError, match="model must not have adapters yet"):
        adapt(model, LORA, nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"model must not have adapters .*, got blocks\.attention\.key\.lora_a"):
        save(model, Path("nowhere"))


def test_options_are_parsed_and_stored():
    config, _ = parse(["--lora-rank=4", "--lora-targets", "query", "value", "--dora", "--unfreeze", "norms", "head"])
    assert config.lora == LoraConfig(4, None, ("query", "value"), 1.0, True, ("norms", "head"))
    assert config.lora.scale == 2.0
    assert LoraConfig(lora_rank=8, lora_alpha=4).scale == 0.5
    assert from_json(to_json(config)) == config
    with pytest.raises(
        RunError, match=r"config.json was written by another version, which differs in these fields: lora"
    ):
        from_json({name: value for name, value in to_json(config).items() if name != "lora"})
    with pytest.raises(SystemExit):
        parse(["--lora-rank=4", "--lora-targets", "queries"])


# Merged models


@pytest.mark.parametrize("lora", [FEW, pytest.param(LORA, marks=pytest.mark.slow)])
def test_a_merged_model_gives_the_results_of_the_adapters(lora):
    model = adapted(BIASED, lora, moved=True)
    plain = merge(model)
    assert not any(adapted_projections(plain))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(plain, nnx.Param))} == {"float32"}
    expected = hidden_states(model, TOKENS)
    base = random_decoder(model.config)
    assert np.abs(hidden_states(base, TOKENS) - expected).max() > 0.1
    np.testing.assert_allclose(hidden_states(plain, TOKENS), expected, atol=2e-5, rtol=1e-4)
    for name, linear in adapted_projections(model):
        a, b = (np.asarray(array[...], np.float64) for array in (linear.lora_a, linear.lora_b))
        whole = np.asarray(linear.kernel[...], np.float64) + 2.0 * a @ b
        if lora.dora:
            whole *= (np.asarray(linear.lora_magnitude[...]) / np.linalg.norm(whole, axis=1))[:, None]
        module = plain.blocks.attention if hasattr(plain.blocks.attention, name) else plain.blocks.feed_forward
        np.testing.assert_allclose(getattr(module, name).kernel[...], whole, atol=1e-6)


def test_a_cache_does_not_change_generated_tokens():
    model = adapted(UNTIED, FEW, moved=True)
    drawn = [
        continue_prompts(
            model,
            [[5, 6], [7, 8, 9]],
            length=8,
            key=jax.random.key(0),
            sampling=Sampling(temperature=0),
            use_cache=cached,
        )
        for cached in (True, False)
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.slow
def test_gradients_are_the_same_however_the_blocks_are_compiled():
    results, lora = [], FEW
    for options in ({}, {"remat": "full", "scan_layers": False}):
        trainer = trainer_of(adapted(dataclasses.replace(UNTIED, **options), lora, moved=True), lora)
        results.append(jax.jit(trainer._gradients)(trainer.initial.params, random_batch(2))[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-7), *results)


def test_a_column_of_zeros_does_not_divide_by_zero():
    model = random_decoder(UNTIED)
    model.blocks.attention.query.kernel[...] = model.blocks.attention.query.kernel[...].at[:, :, 3].set(0.0)
    adapt(model, FEW, nnx.Rngs(1))
    graph, params = nnx.split(model.blocks.attention.query)

    def loss(params: nnx.State) -> jax.Array:
        layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[1], params))
        return jnp.sum(layer(jnp.ones((4, 16))) ** 2)

    gradients = parameters(jax.jit(jax.grad(loss))(params))
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    assert np.any(gradients["lora_magnitude"])


# Runs


def test_a_run_reports_what_trains_resumes_bit_for_bit_and_evaluates_its_average(place, monkeypatch, capsys):
    def stop(state):
        raise KeyboardInterrupt

    options = ["--lora-rank=2", "--lora-targets", "query", "up", "--unfreeze=norms", "--lora-plus-ratio=4"]
    # The first fetch, after two steps, has only the metrics of step 1, where the gradient of A is zero.
    options += ["--optimizer=schedule_free_adamw", "--log-every=2", "--sample-tokens=0"]
    assert start(place, "whole", *options) == 0
    found = re.search(r"^model +([\d,]+) parameters, ([\d.]+)% trainable", capsys.readouterr().out, re.MULTILINE)
    assert found
    run = read_run(place / "runs" / "whole")
    adapters = sum(
        2 * (linear.kernel.shape[1] + linear.kernel.shape[2]) for _, linear in adapted_projections(run.model)
    )
    count = run.model.config.parameter_count() + adapters
    assert (int(found[1].replace(",", "")), float(found[2])) == (
        count,
        pytest.approx(100 * (adapters + 3 * 16) / count, abs=0.1),
    )
    with monkeypatch.context() as patch:
        before_step(patch, 5, stop)
        assert start(place, "broken", *options) == 130
    assert train(place, "--name", "broken", "--resume") == 0
    assert learned(place / "runs" / "broken") == learned(place / "runs" / "whole")
    losses = [row["held_out_loss"] for row in learned(place / "runs" / "whole") if "held_out_loss" in row]
    result = json.loads((place / "runs" / "whole" / "result.json").read_text())
    assert losses[-1] == result["held_out_loss"] < losses[0]

    capsys.readouterr()
    assert export.main(["--run", str(place / "runs" / "whole"), "--out", str(place / "out"), "--adapter"]) == 1
    assert re.match(r"error: --adapter: .*whole also trained norms \(--unfreeze\)", capsys.readouterr().err)
    assert export.main(["--run", str(place / "runs" / "whole"), "--out", str(place / "out")]) == 0
    assert (place / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_adapter_whose_b_stays_zero_ends_the_run(place, capsys):
    assert start(place, "a", "--lora-rank=2", "--learning-rate=1e-60") == 1
    message = r"error: no throughput to report: only \d+ of [\d,]+ parameters train; the gradient is always zero for "
    assert re.match(rf"{message}blocks.attention.key.lora_a of layer 0 and 6 more", capsys.readouterr().err)
