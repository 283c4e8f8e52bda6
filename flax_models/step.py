"""One training step and the held-out loss, as compiled functions over plain trees of arrays."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_models.batches import IGNORED, Batch, padded
from flax_models.config import TrainConfig
from flax_models.model import Decoder
from jax_pallas.linear_ce import linear_cross_entropy


class TrainState(NamedTuple):
    """What a step reads and replaces."""

    params: nnx.State
    optimizer: optax.OptState
    step: jax.Array  # () int32: steps taken


class StepMetrics(NamedTuple):
    """What a step reports; scalars that stay on the device until someone asks."""

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array


def learning_rate_schedule(config: TrainConfig) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Returns the schedule: linear warm-up to the peak, then a cosine that ends at zero with the run.

    rate(s) = peak * (s + 1) / warmup                                    for s < warmup
    rate(s) = peak * (1 + cos(pi * (s - warmup) / (steps - warmup))) / 2 after it
    """
    warmup = min(config.warmup_steps, config.steps)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        # s + 1: the first step must move, and s = steps is never asked for.
        done = jnp.asarray(count, jnp.float32)
        rising = (done + 1) / max(warmup, 1)
        falling = 0.5 * (1.0 + jnp.cos(jnp.pi * (done - warmup) / max(config.steps - warmup, 1)))
        return config.learning_rate * jnp.where(done < warmup, rising, falling)

    return rate


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW behind gradient clipping; weight decay touches matrices alone.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization".
    """

    def matrices(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # norms are vectors

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=matrices,
        ),
    )


class Trainer:
    """The compiled functions of one model and one optimiser.

    Args:
        model: gives the structure and the initial parameters.
        config: of the optimiser.
    """

    def __init__(self, model: Decoder, config: TrainConfig) -> None:
        self._graph, params = nnx.split(model)
        self._optimizer = make_optimizer(config)
        self._schedule = learning_rate_schedule(config)
        self._batch_size = config.batch_size
        self.initial = TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))
        self.step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]] = jax.jit(self._step, donate_argnums=0)
        self._loss_sum = jax.jit(partial(self._loss, reduction="sum"))

    def _loss(self, params: nnx.State, batch: Batch, reduction: Literal["mean", "sum"] = "mean") -> jax.Array:
        model = nnx.merge(self._graph, params)
        hidden = model(jnp.asarray(batch.tokens))  # (B, T, D)
        return linear_cross_entropy(
            hidden, model.head_weight(), jnp.asarray(batch.targets), reduction=reduction, ignore_index=IGNORED
        )

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        loss, gradients = jax.value_and_grad(self._loss)(state.params, batch)
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        metrics = StepMetrics(loss, optax.tree.norm(gradients), self._schedule(state.step))
        params = cast(nnx.State, optax.apply_updates(state.params, updates))  # optax keeps the tree, not its type
        return TrainState(params, optimizer, state.step + 1), metrics

    def held_out_loss(self, params: nnx.State, windows: Batch) -> float:
        """Returns the mean loss over windows, nats a token."""
        sums = [self._loss_sum(params, batch) for batch in padded(windows, self._batch_size)]
        return float(np.sum(jax.device_get(sums), dtype=np.float64) / windows.targets.size)

    def model(self, params: nnx.State) -> Decoder:
        """Returns the model with these parameters."""
        return nnx.merge(self._graph, params)
