"""One training step and the held-out loss, as compiled functions over plain trees of arrays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.tree_util import GetAttrKey

from flax_models.batches import IGNORED, Batch, padded
from flax_models.config import TrainConfig
from flax_models.errors import RunError
from flax_models.model import Decoder
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


class Part(NamedTuple):
    """Parameters that train or do not as one: one of the model's arrays, or one layer's share of it."""

    name: str
    size: int


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


def name_of(path: tuple[Any, ...]) -> str:
    """Returns a parameter's name, as "blocks.attention.query.kernel", of its path in an nnx.State or in its tree."""
    return ".".join(str(getattr(entry, "key", entry)) for entry in path if not isinstance(entry, GetAttrKey))


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a parameter keeps its value: a pattern is its name, or a run of the name's parts.

    Example:
        >>> is_frozen("blocks.attention.query.kernel", ["attention"]), is_frozen("final_norm.scale", ["norms"])
        (True, True)
    """
    parts = name.split(".")
    if "norms" in patterns and parts[-1] == "scale":  # of every norm, wherever it stands
        return True
    runs = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return not runs.isdisjoint(patterns)


def _check_frozen(names: Sequence[str], patterns: Sequence[str]) -> None:
    """Raises RunError for a pattern that no parameter fits, and where nothing is left to train."""
    for pattern in patterns:
        if not any(is_frozen(name, [pattern]) for name in names):
            raise RunError(f"--freeze: no parameter is named {pattern}; there are {', '.join(names)}")
    if all(is_frozen(name, patterns) for name in names):
        raise RunError(f"--freeze leaves nothing to train: got {' '.join(patterns)}")


def _stacked(path: tuple[Any, ...]) -> bool:
    """Returns whether a parameter holds all layers, stacked along its first axis."""
    return any(getattr(entry, "key", None) == "blocks" for entry in path)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW behind gradient clipping; weight decay touches matrices alone.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization".
    """

    def matrices(params: optax.Params) -> optax.Params:
        def is_matrix(path: tuple[Any, ...], leaf: jax.Array) -> bool:
            return leaf.ndim - _stacked(path) > 1  # norms and biases are vectors

        return jax.tree_util.tree_map_with_path(is_matrix, params)

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

    With `accumulate` N the rows of a batch go through the model in N micro-batches. Each one's loss is divided by the
    counted tokens of the whole batch, so that the sum of gradients, in float32, is the gradient of the whole batch's
    mean however the counted tokens lie. A micro-batch is differentiated where it is computed, which keeps one gradient
    of the head alive and not N.

    Parameters that `config.freeze` names are read by the model and by nothing else: no gradient is asked for (the loss
    then leaves d_weight out, if the head is among them), and the optimiser has no state of them.

    Args:
        model: gives the structure and the initial parameters; with those of `decoder_shapes`, nothing is computed and
            `initial` says shapes alone.
        config: of the optimiser and the loss.

    Attributes:
        initial: the state before the first step; `del` it once another is at hand, for it holds memory.
        parts: what trains, and what `StepMetrics.trained` tells of, in its order.
        trained: names and sizes of the parameters that train.
        step: (state, batch) -> (state, metrics), compiled by its first call, or before it by `compile`; the state is
            donated. Its batch has (B, T) int32 tokens and targets, of which IGNORED ones count for nothing.

    Raises:
        RunError: `config.freeze` names what is not there, or everything.
    """

    def __init__(self, model: Decoder, config: TrainConfig) -> None:
        self._graph, params = nnx.split(model)
        self._optimizer = make_optimizer(config)
        self._schedule = learning_rate_schedule(config)
        self._config = config
        _check_frozen([name_of(path) for path, _ in nnx.to_flat_state(params)], config.freeze)
        drawn = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
        self.initial = self._begin(params) if drawn else jax.eval_shape(self._begin, params)
        trained = self.split(params)[0]
        self.parts = tuple(_parts(trained))
        self.trained = {name_of(path): np.size(leaf) for path, leaf in nnx.to_flat_state(trained)}
        self._jitted = jax.jit(self._step, donate_argnums=0)
        self._compiled: jax.stages.Compiled | None = None
        self.step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]] = self._take
        self._loss_sum = jax.jit(self._negative_log_likelihood)

    def _begin(self, params: nnx.State) -> TrainState:
        return TrainState(params, self._optimizer.init(self.split(params)[0]), jnp.zeros((), jnp.int32))

    def split(self, params: nnx.State) -> tuple[nnx.State, nnx.State]:
        """Returns the parameters that train, and those that are frozen."""
        trained, frozen = nnx.split_state(
            params, lambda path, _: not is_frozen(name_of(path), self._config.freeze), ...
        )
        return trained, frozen

    def _hidden(self, params: nnx.State, batch: Batch) -> tuple[jax.Array, Decoder]:
        model = nnx.merge(self._graph, params)
        with jax.named_scope("model"):
            return model(jnp.asarray(batch.tokens)), model  # (B, T, D)

    def _loss(self, params: nnx.State, batch: Batch, counted: jax.Array) -> jax.Array:
        """Returns a batch's share of the mean over `counted` tokens."""
        hidden, model = self._hidden(params, batch)
        with jax.named_scope("loss"):
            return linear_cross_entropy(
                hidden,
                model.head_weight(),
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
            model.head_weight(),
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
        metrics = StepMetrics(loss, norm, self._schedule(state.step), _trained(gradients))
        return TrainState(nnx.merge_state(trained, frozen), optimizer, state.step + 1), metrics

    def held_out_loss(self, params: nnx.State, windows: Batch) -> float:
        """Returns the mean loss over windows, nats a token, without z-loss and smoothing; waits for the device."""
        sums = [self._loss_sum(params, batch) for batch in jax.device_put(padded(windows, self._config.batch_size))]
        return float(np.sum(jax.device_get(sums), dtype=np.float64) / windows.targets.size)

    def compile(self, rows: int, length: int) -> jax.stages.Compiled:
        """Returns the compiled step for (rows, length) batches, with XLA's plan of its memory; nothing runs.

        It compiles once: later calls return the same, and `step` runs it, on batches of this shape alone.
        """
        if self._compiled is None:
            places: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32)
            state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.initial)
            self._compiled = self._jitted.lower(state, Batch(places, places)).compile()
        return self._compiled

    def _take(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        return (self._jitted if self._compiled is None else self._compiled)(state, batch)

    def model(self, params: nnx.State) -> Decoder:
        """Returns the model with these parameters."""
        return nnx.merge(self._graph, params)


def _parts(params: nnx.State) -> Iterator[Part]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = name_of(path)
        if not _stacked(path):
            yield Part(name, leaf.size)
            continue
        for layer in range(leaf.shape[0]):
            yield Part(f"{name} of layer {layer}", leaf.size // leaf.shape[0])


def _trained(gradients: nnx.State) -> jax.Array:
    """Returns (P,) bool, in the order of `_parts`: which parts have a gradient other than zero (NaN is another)."""
    moved = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        shape = (leaf.shape[0], -1) if _stacked(path) else (1, -1)
        moved.append(jnp.any(leaf.reshape(shape) != 0, axis=1))
    return jnp.concatenate(moved)
