"""Tests optimizers: each layer is updated like a separate array in optax, and resumed runs repeat bit for bit."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax_runs import random_batch
from random_decoder import random_decoder

from flax_models.errors import RunError
from flax_models.model.decoder import ModelConfig, decoder_shapes
from flax_models.train.accounting import step_memory
from flax_models.train.arguments import parse
from flax_models.train.checkpoint import Checkpoints
from flax_models.train.config import Optimizer, TrainConfig
from flax_models.train.optimizers import averaged, gradient_norm, learning_rate_schedule, make_optimizer
from flax_models.train.step import Trainer

pytestmark = pytest.mark.usefixtures("compiled")

LAYERS = 2
SHAPES = {
    "embedding": (140, 136),
    "blocks.attention.query.kernel": (LAYERS, 136, 130),  # adafactor factors matrices with two axes of at least 128
    "blocks.feed_forward.down.kernel": (LAYERS, 20, 136),
    "blocks.attention_norm.scale": (LAYERS, 136),
    "final_norm.scale": (136,),
}
CONFIG = TrainConfig(
    steps=9, warmup_steps=0, learning_rate=0.02, weight_decay=0.3, beta1=0.8, beta2=0.95, clip_norm=0.5
)
SMALL = ModelConfig(280, 16, 2, 2, 1, 8, 24, 16)


def tree(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns named arrays as a tree with the model's structure."""
    nested: dict[str, Any] = {}
    for name, array in arrays.items():
        *owners, last = name.split(".")
        place = nested
        for owner in owners:
            place = place.setdefault(owner, {})
        place[last] = array
    return nested


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def apart(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays with a separate entry for each layer."""
    layers = {
        f"{name}/{i}": array[i] for name, array in arrays.items() if name.startswith("blocks") for i in range(LAYERS)
    }
    return {**{name: array for name, array in arrays.items() if not name.startswith("blocks")}, **layers}


def drawn(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {name: jnp.asarray(generator.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def theirs(optimizer: Optimizer, name: str, array: jax.Array, rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns optax's optimizer for one array of one layer."""
    config, decay = CONFIG, CONFIG.weight_decay if array.ndim > 1 else 0.0
    if optimizer == "muon" and array.ndim > 1 and name.startswith("blocks"):
        return optax.contrib.muon(rate, weight_decay=decay, consistent_rms=0.2)
    if optimizer == "schedule_free_adamw":
        peak = config.learning_rate
        return optax.contrib.schedule_free_adamw(peak, b1=config.beta1, b2=config.beta2, weight_decay=decay)
    if optimizer == "adafactor":
        decayed = optax.chain(optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate))
        scaled = optax.adafactor(rate, multiply_by_parameter_scale=False)

        def init(params):
            return scaled.init(params), decayed.init(params)

        def update(updates, state, params=None):
            step, first = scaled.update(updates, state[0], params)
            shrink, second = decayed.update(jax.tree.map(jnp.zeros_like, updates), state[1], params)
            return jax.tree.map(jnp.add, step, shrink), (first, second)

        return optax.GradientTransformation(init, update)
    return optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=decay)


@pytest.mark.parametrize("optimizer", ["muon", "schedule_free_adamw", "adafactor"])
def test_each_layer_is_updated_like_a_separate_array_in_optax(optimizer: Optimizer):
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    rate, ours = learning_rate_schedule(config), make_optimizer(config)
    first = apart(drawn(0))
    gradients = [drawn(seed) for seed in (1, 2)]
    expected: dict[str, Any] = dict(first)
    states: dict[str, Any] = {}
    made: dict[Any, Any] = {}
    clip = jax.jit(lambda gradient: optax.clip_by_global_norm(config.clip_norm).update(gradient, optax.EmptyState())[0])
    for gradient in map(apart, gradients):
        clipped: Any = clip(gradient)
        for name, array in expected.items():
            kind = (array.shape, name.startswith("blocks"))  # compiles once for all layers
            each = made.setdefault(kind, theirs(optimizer, name, array, rate))
            state = states.get(name, each.init(array))
            step, states[name] = made.setdefault((*kind, "update"), jax.jit(each.update))(clipped[name], state, array)
            expected[name] = array + step

    params: Any = tree(drawn(0))
    state, update = ours.init(params), jax.jit(ours.update)
    for gradient in gradients:
        step, state = update(tree(gradient), state, params)
        params = optax.apply_updates(params, step)
    got = apart(flat(params))
    assert set(got) == set(expected)
    for name in expected:
        moved = np.abs(np.asarray(expected[name] - first[name])).max()
        assert moved > 1e-3, name
        np.testing.assert_allclose(got[name], expected[name], atol=2e-5 * moved, rtol=0, err_msg=name)


def test_the_average_of_schedule_free_adamw_is_the_papers():
    """Defazio et al., "The road less scheduled", equations 3 to 5, with Adam's second moment and warm-up."""
    config = dataclasses.replace(CONFIG, optimizer="schedule_free_adamw", warmup_steps=3, clip_norm=1e9)
    generator = np.random.default_rng(0)
    start, gradients = generator.normal(size=(5, 4)), generator.normal(size=(6, 5, 4))
    x, z, squares, weights = start, start, np.zeros((5, 4)), 0.0
    for step, gradient in enumerate(gradients, start=1):
        rate = config.learning_rate * min(step / 3, 1.0)
        y = (1 - config.beta1) * z + config.beta1 * x
        squares = config.beta2 * squares + (1 - config.beta2) * gradient**2
        z = z - rate * (gradient / (np.sqrt(squares / (1 - config.beta2**step)) + 1e-8) + config.weight_decay * y)
        weights += rate**2
        x = x + rate**2 / weights * (z - x)

    optimizer = make_optimizer(config)
    params: Any = {"embedding": jnp.asarray(start, jnp.float32)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        step, state = update({"embedding": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = optax.apply_updates(params, step)
    average: Any = averaged(config, state, params)
    np.testing.assert_allclose(average["embedding"], x, atol=2e-6)
    np.testing.assert_allclose(params["embedding"], (1 - config.beta1) * z + config.beta1 * x, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free_adamw"])
def test_lora_plus_scales_only_the_updates_of_b(optimizer: Optimizer):
    config, names = dataclasses.replace(CONFIG, optimizer=optimizer), ("lora_a", "lora_b")
    generator = np.random.default_rng(0)
    a, *gradients = (jnp.asarray(generator.normal(size=(2, 3, 3)), jnp.float32) for _ in range(3))
    params, gradient = (
        tree({f"blocks.attention.query.{name}": array for name, array in zip(names, arrays, strict=True)})
        for arrays in ((a, jnp.zeros_like(a)), gradients)
    )
    steps = []
    for ratio in (1.0, 16.0):
        made = make_optimizer(config, ratio)
        step: Any = jax.jit(made.update)(gradient, made.init(params), params)[0]
        steps.append(flat(step))
    for name, step in steps[0].items():
        factor = 16.0 if name.endswith("lora_b") else 1.0
        np.testing.assert_allclose(steps[1][name], factor * step, rtol=1e-5, atol=1e-9, err_msg=name)
        assert np.any(step), name


def config_of(optimizer: Optimizer, **options: Any) -> TrainConfig:
    return TrainConfig(steps=8, batch_size=2, warmup_steps=2, learning_rate=0.01, optimizer=optimizer, **options)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "schedule_free_adamw", "adafactor"])
def test_run_trains_reports_memory_and_resumes_bit_for_bit(optimizer: Optimizer, tmp_path):
    trainer, batch = Trainer(random_decoder(SMALL), config_of(optimizer)), random_batch(2)
    compiled = trainer.compile(2, 16)
    memory = step_memory(trainer, compiled)
    assert memory is not None
    count = sum(part.size for part in trainer.parts)
    assert memory.parameters == 4 * count
    matrices = sum(part.size for part in trainer.parts if "kernel" in part.name)
    averages = {"muon": 2 * count - matrices, "schedule_free_adamw": 2 * count, "adafactor": count}[optimizer]
    assert 4 * averages <= memory.optimizer < 4 * averages + 500
    assert memory.batch == 2 * 4 * 2 * 16 + 4, "tokens, targets and the step number"

    checkpoints = Checkpoints(tmp_path, writes=True)
    state, losses = trainer.initial, []
    for step in range(1, 9):
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics.loss))
        if step == 4:
            checkpoints.save(4, state, {})
    assert losses[-1] < losses[0] - 0.1
    restored, _ = checkpoints.restore(Trainer(decoder_shapes(SMALL), config_of(optimizer)).initial)
    checkpoints.close()
    for _ in range(4):
        restored, _ = trainer.step(restored, batch)
    jax.tree.map(np.testing.assert_array_equal, state, restored)

    learned = trainer.evaluated(state)
    if optimizer != "schedule_free_adamw":
        assert learned is state.params
        return
    optimizer_state: Any = state.optimizer
    z, y = optimizer_state[-1].z, trainer.split(state.params)[0]
    jax.tree.map(lambda x, y, z: np.testing.assert_allclose(0.9 * x + 0.1 * z, y, rtol=1e-5, atol=1e-6), learned, y, z)
    assert trainer.held_out_loss(learned, batch) != trainer.held_out_loss(state.params, batch)


def test_the_rate_of_schedule_free_adamw_stays_at_its_peak():
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=2.0, optimizer="schedule_free_adamw")
    rate = learning_rate_schedule(config)
    assert [float(rate(step)) for step in (0, 4, 9, 10, 99)] == pytest.approx([0.2, 1.0, 2.0, 2.0, 2.0])


def test_optimizer_raises_for_unsupported_parameters_and_options():
    with pytest.raises(RunError, match=r"--beta1 has no effect with --optimizer adafactor, got 0.5"):
        parse(["--optimizer", "adafactor", "--beta1", "0.5"])
    config, _ = parse(["--config", "llama3.2-1b", "--optimizer", "adafactor"])
    assert config.train.beta2 == 0.95, "options of other optimizers must not matter"
    with pytest.raises(ValueError, match="--beta1 must be positive with --optimizer schedule_free_adamw, got 0"):
        TrainConfig(optimizer="schedule_free_adamw", beta1=0.0)
    with pytest.raises(RunError, match="--optimizer muon needs a matrix of the blocks that trains, got none"):
        Trainer(decoder_shapes(SMALL), config_of("muon", freeze=("blocks",)))
    half = dataclasses.replace(SMALL, param_dtype="bfloat16")
    with pytest.raises(RunError, match=r"needs float32 parameters, got blocks\.attention\.key\.kernel in bfloat16"):
        Trainer(decoder_shapes(half), TrainConfig(optimizer="schedule_free_adamw"))


@pytest.mark.slow
def test_muons_updates_are_as_large_as_adamws():
    """Liu et al., "Muon is scalable", equation 4: the root mean square is 0.2 for every shape."""
    config = TrainConfig(warmup_steps=0, learning_rate=1.0, weight_decay=0.0, optimizer="muon", clip_norm=1e9)
    optimizer = make_optimizer(config)
    params = tree(drawn(0))
    step: Any = jax.jit(optimizer.update)(tree(drawn(1)), optimizer.init(params), params)[0]
    for name, array in flat(step).items():
        size = math.sqrt(float(jnp.mean(array**2)))
        if name.startswith("blocks") and not name.endswith("scale"):
            assert size == pytest.approx(0.2, rel=0.3), name
        else:
            assert size == pytest.approx(1.0, rel=0.01), f"adamw must update {name}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_gradients_are_clipped_by_their_float32_norm(dtype):
    # The square of the norm is outside float16. The first array's is so large that bfloat16 would not add the others'.
    gradient = {"first": jnp.full(8, 256.0, dtype), **{f"other {i}": jnp.full(8, 16.0, dtype) for i in range(12)}}
    norm = 16 * math.sqrt(8 * (16**2 + 12))
    np.testing.assert_allclose(gradient_norm(gradient), norm, rtol=1e-6)
    optimizer = make_optimizer(dataclasses.replace(CONFIG, clip_norm=1.0))
    update = jax.jit(lambda gradient: optimizer.update(gradient, optimizer.init(gradient), gradient))
    _, state = update(gradient)
    average = optax.tree.get(state, "mu")["other 0"]
    np.testing.assert_allclose(np.asarray(average, np.float32), (1 - CONFIG.beta1) * 16 / norm, rtol=1e-2)


def test_the_norm_of_a_step_is_float32_for_parameters_of_16_bits():
    trainer = Trainer(random_decoder(dataclasses.replace(SMALL, param_dtype="bfloat16")), TrainConfig(batch_size=2))
    _, metrics = trainer.step(trainer.initial, random_batch(2))
    assert metrics.grad_norm.dtype == jnp.float32
