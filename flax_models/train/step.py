"""The training step and the held-out loss as compiled functions of pytrees."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_models.data.batches import IGNORED, Batch, padded
from flax_models.model.decoder import Decoder
from flax_models.model.lora_config import LoraConfig
from flax_models.model.parameters import has_gradient, is_adapter, name_of, names_that_train, parts_of
from flax_models.model.sharding import by_rows
from flax_models.train.config import TrainConfig
from flax_models.train.mesh import (
    batch_placement,
    check_mesh,
    context_of,
    loss_on,
    put_batch,
    state_placements,
    with_placements,
)
from flax_models.train.optimizers import (
    averaged,
    check_optimizer,
    gradient_norm,
    has_average,
    learning_rate_schedule,
    make_optimizer,
)
from flax_models.train.profile import TRACEABLE


class TrainState(NamedTuple):
    """The training state, which each step replaces."""

    params: nnx.State
    optimizer: optax.OptState  # None if it was not read
    step: jax.Array  # () int32: number of steps done


class StepMetrics(NamedTuple):
    """The metrics of a step, on the device until they are fetched."""

    loss: jax.Array  # () float32, the training loss, including z-loss and label smoothing
    grad_norm: jax.Array  # () float32, before clipping
    learning_rate: jax.Array  # () float32
    trained: jax.Array  # (P,) bool: whether each of `Trainer.parts` has a nonzero gradient


class Trainer:
    """The compiled functions of one model and one optimizer.

    With gradient accumulation (`accumulate` N), a batch is processed in N micro-batches. The loss of each is divided by
    the number of counted tokens in the whole batch. The sum of the gradients, in float32, is therefore the gradient of
    the mean over the whole batch, however the counted tokens are distributed. Each micro-batch is differentiated
    separately, so only one gradient of the head is in memory instead of N.

    Parameters are frozen if `config.freeze` names them; with adapters, all parameters except the adapters and those
    that `lora.unfreeze` names are frozen. No gradient of a frozen parameter is computed (the loss does not compute
    d_weight if the head is frozen), and the optimizer has no state for it.

    Args:
        model: structure and initial parameters. For a model from `decoder_shapes`, nothing is computed, and `initial`
            has only shapes and dtypes.
        config: options of the optimizer and of the loss.
        lora: options with which the model was adapted (`flax_models.model.lora.adapt`); None: it has no adapters.
        mesh: devices over which the state and the batches are divided, with the axes "data", "fsdp" and "tensor" of
            `AxisType.Auto`, as `flax_models.train.mesh.make_mesh` makes it; None: one device.

    Attributes:
        initial: the state before the first step; `del` it when it is no longer needed, to free its memory.
        parts: the parts of the trained parameters, in the order of `StepMetrics.trained`.
        trained: names and sizes of the parameters that train.
        step: (state, batch) -> (state, metrics), compiled by the first call or by `compile`; the state is donated. The
            batch has (B, T) int32 tokens and targets; IGNORED targets do not count.

    Raises:
        RunError: `config.freeze` or `lora.unfreeze` matches no parameter, nothing is left to train, or the optimizer
            does not support the parameters that train.
        ValueError: the model has adapters and `lora` has rank 0, or the model has none and `lora` has a rank, or
            `mesh` has other axes.
    """

    def __init__(
        self, model: Decoder, config: TrainConfig, lora: LoraConfig | None = None, mesh: Mesh | None = None
    ) -> None:
        if mesh is not None:
            check_mesh(mesh)
        self.mesh = mesh
        self._graph, params = nnx.split(model)
        lora = LoraConfig() if lora is None else lora
        self._optimizer = make_optimizer(config, lora.lora_plus_ratio)
        self._schedule = learning_rate_schedule(config)
        self._config = config
        names = [name_of(path) for path, _ in nnx.to_flat_state(params)]
        if any(map(is_adapter, names)) != (lora.lora_rank > 0):
            raise ValueError(
                f"lora must be the options with which the model was adapted, got lora_rank {lora.lora_rank}"
            )
        self._names = names_that_train(names, config.freeze, lora.unfreeze)
        check_optimizer(config, self.split(params)[0])
        self._averaged = jax.jit(partial(averaged, config))
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
        if mesh is None:
            self.initial = jax.eval_shape(self._init, params) if abstract else self._init(params)
            placements, everywhere = None, None
        else:
            shapes, everywhere = jax.eval_shape(self._init, params), NamedSharding(mesh, P())
            placements = state_placements(mesh, shapes)
            self.initial = with_placements(shapes, placements) if abstract else self._init_on(placements, params)
        trained = self.split(params)[0]
        self.parts = tuple(parts_of(trained))
        self.trained = {name_of(path): np.size(leaf) for path, leaf in nnx.to_flat_state(trained)}
        # keep_unused, because XLA's memory analysis does not count unused arguments otherwise.
        self._jitted = jax.jit(
            self._step,
            donate_argnums=0,
            keep_unused=True,
            out_shardings=None if mesh is None else (placements, everywhere),
        )
        self._compiled: jax.stages.Compiled | None = None
        self.step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]] = self._call_step
        self._loss_sum = jax.jit(self._negative_log_likelihood, out_shardings=everywhere)
        self._linear_cross_entropy = loss_on(mesh)

    def _init_on(self, placements: TrainState, params: nnx.State) -> TrainState:
        """Returns the state before the first step, each array created where it is placed."""
        params = jax.device_put(params, placements.params)
        optimizer = jax.jit(self._optimizer.init, out_shardings=placements.optimizer)(self.split(params)[0])
        return TrainState(params, optimizer, jax.device_put(np.zeros((), np.int32), placements.step))

    def context(self) -> AbstractContextManager[Any]:
        """Returns the context in which the model is divided over the mesh, if there is one."""
        return context_of(self.mesh)

    def _init(self, params: nnx.State) -> TrainState:
        return TrainState(params, self._optimizer.init(self.split(params)[0]), jnp.zeros((), jnp.int32))

    def split(self, params: nnx.State) -> tuple[nnx.State, nnx.State]:
        """Splits the parameters into trained and frozen ones."""
        trained, frozen = nnx.split_state(params, lambda path, _: name_of(path) in self._names, ...)
        return trained, frozen

    def evaluated(self, state: TrainState) -> nnx.State:
        """Returns the parameters for evaluation and export: the optimizer's average, if it has one, or the current
        parameters."""
        if not has_average(self._config):
            return state.params
        trained, frozen = self.split(state.params)
        return cast(nnx.State, nnx.merge_state(self._averaged(state.optimizer, trained), frozen))

    def evaluated_part(self, state: TrainState) -> TrainState:
        """Returns the part of a state that `evaluated` reads, with `optimizer` None if it does not read that."""
        return state if has_average(self._config) else state._replace(optimizer=None)

    def _hidden(self, params: nnx.State, batch: Batch) -> tuple[jax.Array, Decoder]:
        model = nnx.merge(self._graph, params)
        with jax.named_scope("model"):
            lengths = None if batch.lengths is None else jnp.asarray(batch.lengths)
            return model(jnp.asarray(batch.tokens), lengths), model  # (B, T, D)

    def head(self, model: Decoder) -> jax.Array:
        """Returns the weight (V, D) of the head, in the dtype in which the loss takes it."""
        head = model.head_weight()
        return head.astype(jnp.dtype(model.config.dtype)) if self._config.cast_head else head

    def _loss(self, params: nnx.State, batch: Batch, counted: jax.Array) -> jax.Array:
        """Returns the sum of a batch's losses divided by `counted`."""
        hidden, model = self._hidden(params, batch)
        with jax.named_scope("loss"):
            return self._linear_cross_entropy(
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
        """Returns the sum over a batch's counted tokens, without z-loss and label smoothing."""
        hidden, model = self._hidden(params, batch)
        return self._linear_cross_entropy(
            hidden,
            self.head(model),
            jnp.asarray(batch.targets),
            reduction="sum",
            ignore_index=IGNORED,
            **model.config.loss_options(),
        )

    def _gradients(self, params: nnx.State, batch: Batch) -> tuple[jax.Array, nnx.State]:
        """Returns the loss and its gradient with respect to the parameters that train."""
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
            lambda leaf: by_rows(jnp.asarray(leaf).reshape(self._config.accumulate, -1, leaf.shape[-1]), axis=1), batch
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
            trained = cast(nnx.State, optax.apply_updates(trained, updates))
        metrics = StepMetrics(loss, gradient_norm(gradients), self._schedule(state.step), has_gradient(gradients))
        return TrainState(nnx.merge_state(trained, frozen), optimizer, state.step + 1), metrics

    def held_out_loss(self, params: nnx.State, windows: Batch) -> float:
        """Returns the mean loss in nats per token, without z-loss and label smoothing; waits for the device."""
        batches = [self.put(batch) for batch in padded(windows, self._config.batch_size)]
        sums = []
        with self.context():
            for batch in batches:
                sums.append(self._loss_sum(params, batch))
                if self.mesh is not None:  # CPU devices that exchange for several programs at once can wait forever
                    jax.block_until_ready(sums[-1])
        return float(np.sum(jax.device_get(sums), dtype=np.float64) / windows.counted)

    def compile(
        self, rows: int, length: int, sequences: int | None = None, *, traceable: bool = False
    ) -> jax.stages.Compiled:
        """Compiles the step for batches of one shape, and returns it; the step is not executed.

        Only the first call compiles. Later calls return the same step, and `step` uses it, so batches must have this
        shape.

        Args:
            rows: B.
            length: T.
            sequences: M, number of columns of `Batch.lengths`; None: batches have no lengths.
            traceable: disable CUDA graphs, so that a trace names each operation. This takes more kernel launches.
        """
        if self._compiled is None:
            placed = None if self.mesh is None else batch_placement(self.mesh, rows)
            tokens: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=placed)
            lengths: Any = (
                None if sequences is None else jax.ShapeDtypeStruct((rows, sequences), jnp.int32, sharding=placed)
            )
            state = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=None if self.mesh is None else leaf.sharding
                ),
                self.initial,
            )
            with self.context():
                lowered = self._jitted.lower(state, Batch(tokens, tokens, lengths))
            self._compiled = lowered.compile(TRACEABLE if traceable else None)
        return self._compiled

    def _call_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        with self.context():
            return (self._jitted if self._compiled is None else self._compiled)(state, batch)

    def put(self, batch: Batch) -> Batch:
        """Puts a batch on the device, or its rows on those of the mesh."""
        return put_batch(self.mesh, batch)

    def model(self, params: nnx.State) -> Decoder:
        """Returns the model with these parameters."""
        return nnx.merge(self._graph, params)
