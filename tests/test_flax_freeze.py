"""Tests `--freeze`: frozen parameters keep their values and cost nothing, and the run reports them."""

import dataclasses
import re
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

import jax_pallas
from flax_models.errors import RunError
from flax_models.model.decoder import Decoder, ModelConfig, decoder_shapes
from flax_models.model.parameters import is_named, name_of
from flax_models.train.accounting import flops_per_token, mean_keys
from flax_models.train.config import TrainConfig
from flax_models.train.step import Trainer
from flax_models.train.trained import read_run
from jax_pallas.linear_ce import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("compiled")

UNTIED = ModelConfig(280, 16, 2, 2, 1, 8, 24, 16, tie_embeddings=False)
TIED = dataclasses.replace(UNTIED, tie_embeddings=True)


def trainer_of(config: ModelConfig, *freeze: str, **options) -> Trainer:
    return Trainer(random_decoder(config), TrainConfig(steps=8, batch_size=2, warmup_steps=1, freeze=freeze, **options))


def parameters(params: nnx.State) -> dict[str, np.ndarray]:
    return {name_of(path): np.array(leaf[...]) for path, leaf in nnx.to_flat_state(params)}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_frozen_parameters_keep_their_bits_and_all_others_move(accumulate):
    trainer = trainer_of(UNTIED, "head", "norms", "attention.value", accumulate=accumulate)
    before = parameters(trainer.initial.params)
    state, metrics = trainer.step(trainer.initial, random_batch(2))
    after = parameters(state.params)
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    norms = {"blocks.attention_norm.scale", "blocks.feed_forward_norm.scale", "final_norm.scale"}
    assert kept == {"head", "blocks.attention.value.kernel", *norms}
    assert set(trainer.trained) == set(before) - kept
    assert metrics.trained.shape == (len(trainer.parts),)
    assert sum(part.size for part in trainer.parts) == sum(before[name].size for name in set(before) - kept)
    _, second = trainer.step(state, random_batch(2))
    assert bool(second.trained.all())


def test_a_frozen_head_saves_its_matmul_and_memory_and_changes_no_other_gradient():
    batch, head = random_batch(2), 280 * 16
    whole, part = trainer_of(UNTIED), trainer_of(UNTIED, "head")
    compiled: list[Any] = [
        jax.jit(each._gradients).lower(each.initial.params, batch).compile() for each in (whole, part)
    ]
    flops = [program.cost_analysis()["flops"] for program in compiled]
    assert flops[0] - flops[1] == 2 * 32 * head, "the difference must be d_weight: tokens, rows and width"

    (loss, gradients), (frozen_loss, some) = (program(whole.initial.params, batch) for program in compiled)
    assert frozen_loss == loss
    expected, got = parameters(gradients), parameters(some)
    assert set(got) == set(expected) - {"head"}
    for name, gradient in got.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-8, err_msg=name)

    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(each.initial.optimizer)) for each in (whole, part)]
    assert sizes[0] - sizes[1] == 8 * head


@pytest.mark.parametrize(
    ("config", "freeze"),
    [
        (UNTIED, ("norms",)),
        (UNTIED, ("head",)),
        (UNTIED, ("embedding", "feed_forward")),
        (UNTIED, ("blocks", "embedding")),
        (UNTIED, ("blocks", "embedding", "norms")),
        (UNTIED, ("blocks", "head", "norms")),
        (TIED, ("embedding",)),
        (TIED, ("blocks",)),
    ],
)
def test_flops_are_the_matmuls_of_the_differentiated_model(config, freeze):
    """The traced program also computes masked scores. All other matmuls must be counted exactly."""
    trainer = Trainer(decoder_shapes(config), TrainConfig(freeze=freeze))
    params = trainer.initial.params
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def loss(trained: nnx.State, frozen: nnx.State, tokens: jax.Array) -> jax.Array:
        model = trainer.model(nnx.merge_state(trained, frozen))
        return jnp.sum((model(tokens) @ model.head_weight().T) ** 2)

    traced = jax.make_jaxpr(jax.grad(loss))(*trainer.split(params), tokens).jaxpr
    needed, _ = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    masked = 16 - mean_keys(16)
    back = {name.split(".")[0] for name in trainer.trained} & {"blocks", "embedding"}
    attention = (12 if back else 4) * config.num_layers * config.num_heads * config.head_dim * masked
    reported = flops_per_token(config, 16, trainer.trained)
    assert matmul_flops(needed) == pytest.approx(2 * 16 * (reported + attention), rel=0)


def test_unknown_names_and_freezing_everything_raise():
    with pytest.raises(
        RunError, match=r"--freeze: no parameter matches head; the parameters are blocks\.attention\.key\.kernel, "
    ):
        trainer_of(TIED, "head")
    with pytest.raises(RunError, match="--freeze leaves nothing to train: got blocks embedding norms"):
        trainer_of(TIED, "blocks", "embedding", "norms")
    assert not is_named("blocks.attention_norm.scale", ["attention"])
    assert is_named("blocks.attention.query.kernel", ["attention.query"])


def test_a_run_reports_what_trains_and_resumes_with_it(place, monkeypatch, capsys):
    def stop(state):
        raise KeyboardInterrupt

    options = ["--no-tie-embeddings", "--sample-tokens=0", "--freeze", "head", "norms"]
    with monkeypatch.context() as patch:
        before_step(patch, 5, stop)
        assert start(place, "broken", *options) == 130
    found = re.search(r"^model +([\d,]+) parameters, ([\d.]+)% trainable", capsys.readouterr().out, re.MULTILINE)
    assert found
    frozen, count = 280 * 16 + 3 * 16, int(found[1].replace(",", ""))
    assert float(found[2]) == pytest.approx(100 * (1 - frozen / count), abs=0.1)
    assert train(place, "--name", "broken", "--resume") == 0
    assert start(place, "whole", *options) == 0
    assert learned(place / "runs" / "broken") == learned(place / "runs" / "whole")
    model = read_run(place / "runs" / "whole").model
    np.testing.assert_array_equal(model.final_norm.scale[...], 1.0)
    np.testing.assert_array_equal(model.head_weight(), Decoder(model.config, rngs=nnx.Rngs(0)).head_weight())


def test_run_ends_if_fewer_parameters_train_than_requested(place, monkeypatch, capsys):
    def stopped(hidden, weight, *arguments, **keywords):
        return linear_cross_entropy(jax.lax.stop_gradient(hidden), weight, *arguments, **keywords)

    monkeypatch.setattr(jax_pallas, "linear_cross_entropy", stopped)
    assert start(place, "a", "--no-tie-embeddings", "--freeze", "embedding", "norms") == 1
    found = re.search(
        r"error: no throughput to report: only 4,480 of ([\d,]+) parameters train", capsys.readouterr().err
    )
    assert found
    assert 4480 < int(found[1].replace(",", "")) < 2 * 4480, "the head and the block's matrices must count"
