"""One training step and the held-out loss, as compiled functions over plain trees of arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_models.data.batches import IGNORED, Batch, padded
from flax_models.model.decoder import Decoder
from flax_models.model.lora_config import LoraConfig
from flax_models.model.parameters import has_gradient, is_adapter, name_of, names_that_train, parts_of
from flax_models.train.config import TrainConfig
from flax_models.train.optimizers import averaged, check_optimizer, learning_rate_schedule, make_optimizer
from flax_models.train.profile import TRACEABLE
from jax_pallas.linear_ce import linear_cross_entropy


class TrainState(NamedTuple):
    """What a step reads and replaces."""

    params: nnx.State
    optimizer: optax.OptState
    step: jax.Array  # () int32: steps taken


class StepMetrics(NamedTuple):
    """What a step reports; it stays on the device until someone asks."""

    loss: jax.Array  # () float32, what is minimised: z-loss and smoothing included
    grad_norm: jax.Array  # () float32, before clipping
    learning_rate: jax.Array  # () float32
    trained: jax.Array  # (P,) bool: parts of the model (`Trainer.parts`) with a gradient other than zero


class Trainer:
    """The compiled functions of one model and one optimiser.

    With `accumulate` N the rows of a batch go through the model in N micro-batches. Each one's loss is divided by the
    counted tokens of the whole batch, so that the sum of gradients, in float32, is the gradient of the whole batch's
    mean however the counted tokens lie. A micro-batch is differentiated where it is computed, which keeps one gradient
    of the head alive and not N.

    Frozen parameters (`config.freeze` names them; with adapters all others and what `lora.unfreeze` does not name) are
    read by the model and by nothing else: no gradient is asked for (the loss then leaves d_weight out, if the head is
    among them), and the optimiser has no state of them.

    Args:
        model: gives the structure and the initial parameters; with those of `decoder_shapes`, nothing is computed and
            `initial` says shapes alone.
        config: of the optimiser and the loss.
        lora: what the model was adapted with (`flax_models.model.lora.adapt`); None: it has no adapters.

    Attributes:
        initial: the state before the first step; `del` it once another is at hand, for it holds memory.
        parts: what trains, and what `StepMetrics.trained` tells of, in its order.
        trained: names and sizes of the parameters that train.
        step: (state, batch) -> (state, metrics), compiled by its first call, or before it by `compile`; the state is
            donated. Its batch has (B, T) int32 tokens and targets, of which IGNORED ones count for nothing.

    Raises:
        RunError: `config.freeze` or `lora.unfreeze` names what is not there, nothing is left to train, or the optimiser
            is not for what is left.
        ValueError: the model has adapters and `lora` says none, or the other way round.
    """

    def __init__(self, model: Decoder, config: TrainConfig, lora: LoraConfig | None = None) -> None:
        self._graph, params = nnx.split(model)
        lora = LoraConfig() if lora is None else lora
        self._optimizer = make_optimizer(config, lora.lora_plus_ratio)
        self._schedule = learning_rate_schedule(config)
        self._config = config
        names = [name_of(path) for path, _ in nnx.to_flat_state(params)]
        if any(map(is_adapter, names)) != (lora.lora_rank > 0):
            raise ValueError(f"lora must be what the model was adapted with, got lora_rank {lora.lora_rank}")
        self._names = names_that_train(names, config.freeze, lora.unfreeze)
        check_optimizer(config, self.split(params)[0])
        self._averaged = jax.jit(partial(averaged, config))
        drawn = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
        self.initial = self._begin(params) if drawn else jax.eval_shape(self._begin, params)
        trained = self.split(params)[0]
        self.parts = tuple(parts_of(trained))
        self.trained = {name_of(path): np.size(leaf) for path, leaf in nnx.to_flat_state(trained)}
        # Unused arguments are kept, or XLA's plan of the memory would leave them out.
        self._jitted = jax.jit(self._step, donate_argnums=0, keep_unused=True)
        self._compiled: jax.stages.Compiled | None = None
        self.step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]] = self._take
        self._loss_sum = jax.jit(self._negative_log_likelihood)

    def _begin(self, params: nnx.State) -> TrainState:
        return TrainState(params, self._optimizer.init(self.split(params)[0]), jnp.zeros((), jnp.int32))

    def split(self, params: nnx.State) -> tuple[nnx.State, nnx.State]:
        """Returns the parameters that train, and those that are frozen."""
        trained, frozen = nnx.split_state(params, lambda path, _: name_of(path) in self._names, ...)
        return trained, frozen

    def evaluated(self, state: TrainState) -> nnx.State:
        """Returns the parameters to judge, sample and export: the optimiser's average if it keeps one, else its own."""
        if self._config.optimizer != "schedule_free_adamw":
            return state.params
        trained, frozen = self.split(state.params)
        return cast(nnx.State, nnx.merge_state(self._averaged(state.optimizer, trained), frozen))

    def _hidden(self, params: nnx.State, batch: Batch) -> tuple[jax.Array, Decoder]:
        model = nnx.merge(self._graph, params)
        with jax.named_scope("model"):
            lengths = None if batch.lengths is None else jnp.asarray(batch.lengths)
            return model(jnp.asarray(batch.tokens), lengths), model  # (B, T, D)

    def head(self, model: Decoder) -> jax.Array:
        """Returns the (V, D) head as the loss takes it."""
        head = model.head_weight()
        return head.astype(jnp.dtype(model.config.dtype)) if self._config.cast_head else head

    def _loss(self, params: nnx.State, batch: Batch, counted: jax.Array) -> jax.Array:
        """Returns a batch's share of the mean over `counted` tokens."""
        hidden, model = self._hidden(params, batch)
        with jax.named_scope("loss"):
            return linear_cross_entropy(
                hidden,
                self.head(model),
                jnp.asarray(batch.targets),
                reduction="mean",
                normalizer=counted,
                ignore_index=IGNORED,
                label_smoothing=self._config.label_smoothing,
                z_loss_weight=self._config.z_loss_weight,
                **model.config.loss_options(),
            )

    def _negative_log_likelihood(self, params: nnx.State, batch: Batch) -> jax.Array:
        """Returns the sum over a batch's counted tokens, without what training adds to it."""
        hidden, model = self._hidden(params, batch)
        return linear_cross_entropy(
            hidden,
            self.head(model),
            jnp.asarray(batch.targets),
            reduction="sum",
            ignore_index=IGNORED,
            **model.config.loss_options(),
        )

    def _gradients(self, params: nnx.State, batch: Batch) -> tuple[jax.Array, nnx.State]:
        """Returns the loss, and its gradient by the parameters that train."""
        trained, frozen = self.split(params)

        @jax.value_and_grad
        def differentiated(trained: nnx.State, batch: Batch, counted: jax.Array) -> jax.Array:
            return self._loss(nnx.merge_state(trained, frozen), batch, counted)

        counted = jnp.sum(jnp.asarray(batch.targets) != IGNORED).astype(jnp.float32)
        if self._config.accumulate == 1:
            return differentiated(trained, batch, counted)
        rows = batch.tokens.shape[0]
        if rows % self._config.accumulate:
            raise ValueError(f"batch must have a multiple of {self._config.accumulate} rows (accumulate), got {rows}")
        micro_batches = jax.tree.map(
            lambda leaf: jnp.asarray(leaf).reshape(self._config.accumulate, -1, leaf.shape[-1]), batch
        )

        def add(carry: tuple[jax.Array, nnx.State], micro: Batch) -> tuple[tuple[jax.Array, nnx.State], None]:
            loss, gradients = differentiated(trained, micro, counted)
            sums = jax.tree.map(lambda total, leaf: total + leaf.astype(jnp.float32), carry[1], gradients)
            return (carry[0] + loss, sums), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
        (loss, sums), _ = jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), micro_batches)
        return loss, jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, trained)

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        loss, gradients = self._gradients(state.params, batch)
        trained, frozen = self.split(state.params)
        with jax.named_scope("optimizer"):
            updates, optimizer = self._optimizer.update(gradients, state.optimizer, trained)
            trained = cast(nnx.State, optax.apply_updates(trained, updates))  # optax keeps the tree, not its type
        norm = optax.tree.norm(gradients)
        metrics = StepMetrics(loss, norm, self._schedule(state.step), has_gradient(gradients))
        return TrainState(nnx.merge_state(trained, frozen), optimizer, state.step + 1), metrics

    def held_out_loss(self, params: nnx.State, windows: Batch) -> float:
        """Returns the mean loss over windows, nats a token, without z-loss and smoothing; waits for the device."""
        sums = [self._loss_sum(params, batch) for batch in jax.device_put(padded(windows, self._config.batch_size))]
        return float(np.sum(jax.device_get(sums), dtype=np.float64) / windows.counted)

    def compile(
        self, rows: int, length: int, sequences: int | None = None, *, traceable: bool = False
    ) -> jax.stages.Compiled:
        """Returns the compiled step for (rows, length) batches, with XLA's plan of its memory; nothing runs.

        It compiles once: later calls return the same, and `step` runs it, on batches of this shape alone.

        Args:
            rows: B.
            length: T.
            sequences: M, columns of the batches' `lengths`; None: they have none.
            traceable: so that a trace names each operation, with more launches.
        """
        if self._compiled is None:
            places: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32)
            lengths: Any = None if sequences is None else jax.ShapeDtypeStruct((rows, sequences), jnp.int32)
            state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.initial)
            lowered = self._jitted.lower(state, Batch(places, places, lengths))
            self._compiled = lowered.compile(TRACEABLE if traceable else None)
        return self._compiled

    def _take(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        return (self._jitted if self._compiled is None else self._compiled)(state, batch)

    def model(self, params: nnx.State) -> Decoder:
        """Returns the model with these parameters."""
        return nnx.merge(self._graph, params)
