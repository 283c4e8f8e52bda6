"""The run in JAX: flax_models' decoder and its learning rates, Optax's AdamW."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from parity.train.problem import IGNORED, Problem, Setup, is_decayed, parameter_shapes
from parity.train.run import KERNELS, Run

Array: TypeAlias = Any  # jax.Array; JAX is imported only inside functions


def train(problem: Problem, *, fused: bool) -> Run:
    """Trains, with `jax_pallas.linear_ce.linear_cross_entropy` or with the logits and Optax's own cross-entropy.

    Raises:
        ValueError: flax_models' decoder has other parameters than the problem.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from jax_pallas import linear_ce

    start = time.perf_counter()
    setup = problem.setup
    decoder_of = _decoder(problem)
    optimizer = _optimizer(setup)
    weights = {name: jnp.asarray(array) for name, array in problem.weights.items()}
    loss_of, ran = _unfused_cross_entropy, "cross_entropy"
    if fused:
        kernels = KERNELS.get(("jax", jax.default_backend()))
        loss_of = partial(linear_ce.linear_cross_entropy, implementation=kernels)
        like_hidden_states = weights["embedding"][problem.tokens[0]]
        ran = linear_ce.explain(like_hidden_states, decoder_of(weights).head_weight(), implementation=kernels).name

    def loss_at(weights: dict[str, Array], tokens: Array, target: Array) -> Array:
        model = decoder_of(weights)
        return loss_of(model(tokens), model.head_weight(), target)

    @jax.jit
    def take_step(weights: dict[str, Array], state: Any, tokens: Array, target: Array) -> tuple[Any, Any, Array]:
        loss, gradients = jax.value_and_grad(loss_at)(weights, tokens, target)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    losses = []
    with jax.default_matmul_precision("highest"):  # float32 matmuls, not TF32
        state = optimizer.init(weights)
        for tokens, target in zip(problem.tokens, problem.targets, strict=True):
            weights, state, loss = take_step(weights, state, tokens, target)
            losses.append(loss)
        values = [float(loss) for loss in losses]
    device = jax.devices()[0].device_kind
    return Run(values, ran, jax.default_backend(), device, time.perf_counter() - start)


def _optimizer(setup: Setup) -> Any:
    import optax

    from flax_models.train.config import TrainConfig
    from flax_models.train.optimizers import learning_rate_schedule

    schedule = learning_rate_schedule(
        TrainConfig(steps=setup.steps, learning_rate=setup.learning_rate, warmup_steps=setup.warmup_steps)
    )
    return optax.chain(
        optax.clip_by_global_norm(setup.clip_norm),
        optax.adamw(
            schedule,
            b1=setup.beta1,
            b2=setup.beta2,
            eps=setup.adam_eps,
            weight_decay=setup.weight_decay,
            mask={name: is_decayed(name) for name in parameter_shapes(setup)},
        ),
    )


def _unfused_cross_entropy(hidden: Array, head: Array, target: Array) -> Array:
    import jax.numpy as jnp
    import optax

    counted = target != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, jnp.where(counted, target, 0))
    return jnp.where(counted, losses, 0).sum() / counted.sum()


def _decoder(problem: Problem) -> Callable[[Mapping[str, Array]], Any]:
    """Returns what makes flax_models' Decoder from weights by name."""
    from flax import nnx

    from flax_models.model.decoder import Decoder

    config = _config(problem.setup)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))  # draws nothing
    slots = {".".join(map(str, path)): (path, slot) for path, slot in nnx.to_flat_state(params)}
    has = {name: tuple(slot.shape) for name, (_, slot) in slots.items()}
    needs = {name: array.shape for name, array in problem.weights.items()}
    if has != needs:
        odd = sorted(name for name in has.keys() | needs.keys() if has.get(name) != needs.get(name))
        raise ValueError(
            f"flax_models' decoder must have the problem's parameters, but they differ in {', '.join(odd)}"
        )

    def decoder(weights: Mapping[str, Array]) -> Decoder:
        filled = [(path, slot.replace(weights[name])) for name, (path, slot) in slots.items()]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    return decoder


def _config(setup: Setup) -> Any:
    from flax_models.model.decoder import ModelConfig

    return ModelConfig(
        vocab_size=setup.vocab_size,
        hidden_size=setup.hidden_size,
        num_layers=setup.num_layers,
        num_heads=setup.num_heads,
        num_kv_heads=setup.num_kv_heads,
        head_dim=setup.head_dim,
        intermediate_size=setup.intermediate_size,
        max_seq_len=setup.seq_len,
        rope_theta=setup.rope_theta,
        rms_norm_eps=setup.rms_norm_eps,
        tie_embeddings=setup.tie_embeddings,
    )
