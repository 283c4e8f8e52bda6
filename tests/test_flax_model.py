"""Tests the decoder of flax_models: shapes, the head, causality, rotary positions, grouped queries and parameter
counts."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_decoder import SMALL, random_decoder

from flax_models.data.batches import Batch
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.model.lora import adapted_shapes
from flax_models.model.lora_config import LoraConfig
from flax_models.model.rope import RopeScaling, rotary_frequencies, rotary_tables, rotate
from flax_models.model.sampling import generate
from flax_models.train.config import TrainConfig
from flax_models.train.optimizers import make_optimizer
from flax_models.train.step import Trainer


def make(config: ModelConfig = SMALL) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(0))


def tokens_of(config: ModelConfig = SMALL, rows: int = 2, length: int = 12) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(config.vocab_size, size=(rows, length)), jnp.int32)


@nnx.jit
def hidden_states(model: Decoder, tokens: jax.Array) -> jax.Array:
    return model(tokens)


@nnx.jit
def materialized_loss(model: Decoder, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    logits = model(tokens) @ model.head_weight().T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gives_hidden_states_in_the_config_dtype_and_a_head_in_the_parameters_dtype(dtype):
    config = dataclasses.replace(SMALL, dtype=dtype)
    model = make(config)
    hidden = nnx.eval_shape(hidden_states, model, tokens_of())
    assert hidden.shape == (2, 12, SMALL.hidden_size)
    assert hidden.dtype == jnp.dtype(dtype)
    assert model.head_weight().shape == (SMALL.vocab_size, SMALL.hidden_size)
    assert model.head_weight().dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_are_finite(dtype):
    hidden = hidden_states(make(dataclasses.replace(SMALL, dtype=dtype)), tokens_of())
    assert bool(jnp.isfinite(hidden.astype(jnp.float32)).all())


@pytest.mark.parametrize("tie", [True, False])
def test_parameter_count_matches_the_parameters(tie):
    config = dataclasses.replace(SMALL, tie_embeddings=tie)
    leaves = jax.tree.leaves(nnx.state(make(config), nnx.Param))
    assert sum(leaf.size for leaf in leaves) == config.parameter_count()


def test_tied_head_is_the_embedding_and_learns_from_both_ends():
    model = make()
    assert model.head_weight() is model.embedding[...]
    graph, params = nnx.split(model)
    tokens = jnp.zeros((1, 4), jnp.int32)  # uses only the embedding of token 0
    targets = jnp.full((1, 4), 5)

    def loss(params):
        return materialized_loss(nnx.merge(graph, params), tokens, targets)

    gradient = jax.grad(loss)(params)["embedding"][...]
    assert bool((jnp.abs(gradient) > 0).any(axis=1).all()), "the head must give every row a gradient"


def test_untied_head_is_a_separate_parameter():
    model = make(dataclasses.replace(SMALL, tie_embeddings=False))
    assert not np.array_equal(model.head_weight(), model.embedding[...])


def test_first_loss_is_near_uniform():
    model = make(dataclasses.replace(SMALL, vocab_size=1000, hidden_size=64))
    tokens = tokens_of(model.config, rows=4)
    loss = float(materialized_loss(model, tokens, jnp.flip(tokens)))
    assert abs(loss - math.log(1000)) < 1.0


def test_later_tokens_do_not_change_earlier_hidden_states():
    model, tokens = make(), tokens_of()
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % SMALL.vocab_size)
    before, after = np.asarray(hidden_states(model, tokens)), np.asarray(hidden_states(model, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (np.abs(before[:, 7:] - after[:, 7:]).max(axis=-1) > 1e-6).all()


def test_attention_does_not_cross_sequences_of_a_batch():
    model, tokens = make(), tokens_of()
    alone = hidden_states(model, tokens[:1])
    np.testing.assert_allclose(hidden_states(model, tokens)[:1], alone, rtol=2e-5, atol=2e-6)


def rotated(x: np.ndarray, positions: np.ndarray) -> jax.Array:
    frequencies = rotary_frequencies(RopeScaling(), 10_000.0, x.shape[-1], seq_len=1)
    return rotate(jnp.asarray(x), *rotary_tables(frequencies, jnp.asarray(positions)))


def test_rotary_embedding_matches_complex_rotation():
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 8)).astype(np.float32)
    positions = np.array([0, 1, 5, 17, 400])
    frequencies = 10_000.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None] * frequencies)[None, :, None, :]
    expected = np.concatenate((turned.real, turned.imag), axis=-1)
    got = rotated(x, positions)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5)


def test_rotated_dot_products_depend_only_on_the_distance():
    query, key = np.random.default_rng(2).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def product(query_position: int, key_position: int) -> float:
        turned = (
            rotated(vector, np.array([position])) for vector, position in ((query, query_position), (key, key_position))
        )
        return float(jnp.vdot(*turned))

    assert product(9, 4) == pytest.approx(product(25, 20), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-2)


def test_grouped_queries_equal_full_attention_with_repeated_key_and_value_heads():
    grouped = make()
    full = random_decoder(dataclasses.replace(SMALL, num_kv_heads=SMALL.num_heads))
    state: Any = nnx.state(grouped, nnx.Param)
    repeats = SMALL.num_heads // SMALL.num_kv_heads
    for name in ("key", "value"):
        projection = state["blocks"]["attention"][name]
        kernel = projection["kernel"][...]  # (L, D, num_kv_heads * head_dim)
        heads = kernel.reshape(*kernel.shape[:2], SMALL.num_kv_heads, SMALL.head_dim)
        projection["kernel"] = nnx.Param(jnp.repeat(heads, repeats, axis=2).reshape(*kernel.shape[:2], -1))
    nnx.update(full, state)
    np.testing.assert_allclose(
        hidden_states(full, tokens_of()), hidden_states(grouped, tokens_of()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads must be a multiple of num_kv_heads 2, got 3"),
        ({"head_dim": 7}, "head_dim must be even and positive, got 7"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"num_layers": -1}, "num_layers must not be negative, got -1"),
        ({"logit_scale": 0.0}, "logit_scale must be positive and finite, got 0.0"),
        ({"rope_theta": float("inf")}, "rope_theta must be positive and finite, got inf"),
        ({"logit_softcap": float("nan")}, "logit_softcap must be positive and finite, got nan"),
        ({"attention_softcap": -1.0}, "attention_softcap must be positive and finite, got -1.0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be finite and not negative, got inf"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"partial_rotary_factor": 0.4}, r"partial_rotary_factor must be in \(0, 1\] and rotate an even .* got 0.4"),
        ({"window_pattern": ()}, "window_pattern must have at least one entry, got none"),
        (
            {"window_pattern": (True, False)},
            r"window_pattern has no effect without sliding_window, got \(True, False\)",
        ),
        (
            {"sliding_window": 4, "window_pattern": (False,)},
            r"sliding_window has no effect with window_pattern \(False,\), got 4",
        ),
        (
            {"query_scalar": 8, "attention_multiplier": 0.5},
            "query_scalar and attention_multiplier are mutually exclusive, got both",
        ),
        (
            {"rope": RopeScaling("longrope", 2.0, 8, rope_short_factor=(1.0,) * 4, rope_long_factor=(1.0,))},
            "rope_long_factor must have 4 entries, got 1",
        ),
    ],
)
def test_invalid_shape_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_factor": 0.5}, "rope_factor must be at least 1, got 0.5"),
        ({"rope_original_seq_len": 0}, "rope_original_seq_len must be at least 2 for rope_type llama3, got 0"),
        (
            {"rope_high_freq_factor": 1.0},
            "rope_high_freq_factor must be greater than rope_low_freq_factor 1.0, got 1.0",
        ),
        ({"rope_type": "yarn", "rope_beta_fast": 0.5}, "rope_beta_fast must be at least rope_beta_slow 1.0, got 0.5"),
    ],
)
def test_invalid_rope_scaling_raises(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**{"rope_type": "llama3", "rope_factor": 2.0, "rope_original_seq_len": 16, **fields})


def test_window_hides_earlier_positions():
    model, tokens = random_decoder(dataclasses.replace(SMALL, num_layers=1, sliding_window=3)), tokens_of()
    changed = tokens.at[:, 4].set((tokens[:, 4] + 1) % SMALL.vocab_size)
    difference = np.abs(np.asarray(hidden_states(model, tokens)) - np.asarray(hidden_states(model, changed))).max(-1)
    assert (difference[:, [4, 5, 6]] > 1e-6).all()
    np.testing.assert_array_equal(difference[:, [0, 1, 2, 3, 7, 8, 9, 10, 11]], 0.0)


def test_no_block_is_left_out_of_the_stack():
    """A block with zero output projections is the identity, so zeroing either layer of the stack changes the result."""
    model, tokens = make(), tokens_of()
    whole = np.asarray(hidden_states(model, tokens))
    state = nnx.state(model)
    for layer in range(SMALL.num_layers):
        silenced = nnx.to_pure_dict(state)
        for module, projection in (("attention", "out"), ("feed_forward", "down")):
            kernel = np.array(silenced["blocks"][module][projection]["kernel"])
            kernel[layer] = 0.0
            silenced["blocks"][module][projection]["kernel"] = jnp.asarray(kernel)
        changed = nnx.clone(model)
        nnx.update(changed, silenced)
        assert np.abs(np.asarray(hidden_states(changed, tokens)) - whole).max() > 1e-2
    kernels = np.asarray(model.blocks.attention.query.kernel[...])
    assert not np.array_equal(kernels[0], kernels[1]), "the layers must have different initial values"


def test_loops_and_recomputation_change_neither_results_nor_gradients():
    options = {"sliding_window": 4, "window_pattern": (True, False), "attention_softcap": 2.0, "post_norms": True}
    tokens = tokens_of()

    def value_and_gradients(**changes: Any) -> tuple[jax.Array, Any]:
        graph, params = nnx.split(random_decoder(dataclasses.replace(SMALL, **options, **changes)))

        def value(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            model: Decoder = nnx.merge(graph, params)
            hidden = model(tokens)
            return jnp.square(hidden - 1).mean(), hidden

        gradients, hidden = jax.jit(jax.grad(value, has_aux=True))(params)
        return hidden, nnx.to_pure_dict(gradients)

    expected, gradients = value_and_gradients()
    for changes in ({"remat": "attention"}, {"remat": "elementwise"}, {"remat": "full"}, {"scan_layers": False}):
        got, got_gradients = value_and_gradients(**changes)
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=str(changes))
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(np.asarray(theirs)).max()),
            got_gradients,
            gradients,
        )


@pytest.mark.parametrize("lora_rank", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_what_is_kept_for_the_backward_pass(lora_rank: int):
    """ "elementwise" saves the outputs of matmuls with weights. "full" saves only the input of a block."""
    kept, matmuls = {}, {}
    for remat in ("none", "elementwise", "full"):
        lora = LoraConfig(lora_rank=lora_rank)
        config = dataclasses.replace(SMALL, remat=remat, num_layers=3)
        trainer = Trainer(adapted_shapes(config, lora), TrainConfig(batch_size=4), lora)
        tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
        lowered = jax.jit(trainer._gradients).lower(trainer.initial.params, Batch(tokens, tokens, None))  # pyright: ignore[reportArgumentType]
        matmuls[remat] = lowered.as_text().count("dot_general")
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        kept[remat] = memory.temp_size_in_bytes
    assert kept["full"] < kept["elementwise"] < kept["none"]
    assert matmuls["none"] < matmuls["full"]


def test_logits_are_scaled_and_capped_as_the_config_says():
    model = random_decoder(dataclasses.replace(SMALL, logit_softcap=0.5, logit_scale=3.0))
    hidden = np.random.default_rng(0).normal(size=(2, SMALL.hidden_size)).astype(np.float32)
    expected = 0.5 * np.tanh(3.0 * (hidden @ np.asarray(model.head_weight()).T) / 0.5)
    np.testing.assert_allclose(model.logits(jnp.asarray(hidden)), expected, rtol=1e-5, atol=1e-6)


def test_weight_decay_applies_to_stacked_matrices_but_not_to_norms_and_biases():
    model = nnx.eval_shape(lambda: make(dataclasses.replace(SMALL, attention_bias=True)))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), nnx.state(model, nnx.Param))
    optimizer = make_optimizer(TrainConfig(warmup_steps=0, learning_rate=0.1, weight_decay=0.5))

    def update(params: Any) -> Any:
        return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

    for path, leaf in nnx.to_flat_state(jax.jit(update)(params)):
        decayed = path[-1] in ("kernel", "embedding")
        np.testing.assert_allclose(leaf[...], -0.05 if decayed else 0.0, rtol=1e-6, err_msg=str(path))


def greedy(model: Decoder, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        hidden = hidden_states(model, jnp.asarray([tokens[-model.config.max_seq_len :]]))[0, -1]
        tokens.append(int(jnp.argmax(model.head_weight() @ hidden)))
    return tokens[len(prompt) :]


def test_greedy_generation_reads_the_last_position_also_past_the_window():
    model = random_decoder(dataclasses.replace(SMALL, num_layers=1, max_seq_len=4))
    drawn = generate(model, [3, 8], length=6, key=jax.random.key(0), top_k=1)  # 2 + 6 exceeds max_seq_len 4
    assert drawn == greedy(model, [3, 8], 6)


def test_generation_repeats_with_its_key_and_ends_at_the_end_token():
    model = make()
    first, again, other = (
        generate(model, [1], length=8, key=jax.random.key(seed), temperature=5.0) for seed in (0, 0, 1)
    )
    assert first == again != other
    ended = generate(model, [1], length=8, key=jax.random.key(0), temperature=5.0, ends=[first[2]])
    assert ended == first[: first.index(first[2])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt must have at least one token, got none"),
        ({"length": -1}, "length must not be negative, got -1"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
    ],
)
def test_generation_names_a_bad_option(options, message):
    with pytest.raises(ValueError, match=message):
        generate(make(), **{"prompt": [1], "length": 1, "key": jax.random.key(0), **options})
