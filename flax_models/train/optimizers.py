"""The optimizers of a run by name, and the learning-rate schedule.

All optimizers are from optax, applied after clipping by the global norm of the gradient. Weight decay is decoupled
(rate * decay * parameter) and applies only to matrices. The blocks' parameters are stacked along a first axis of
layers; optimizers treat each layer as a separate array.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from flax_models.errors import RunError
from flax_models.model.parameters import is_stacked, name_of
from flax_models.train.config import TrainConfig

MUON_MOMENTUM = 0.95  # as in Jordan et al. and in Liu et al.
MUON_RMS = 0.2  # root mean square of an update divided by the learning rate; 0.2 to 0.4 for AdamW (Liu et al.)


def learning_rate_schedule(config: TrainConfig) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Returns the schedule: linear warm-up to the peak, then cosine decay to zero at the end of the run.

    rate(s) = peak * (s + 1) / warmup                                    for s < warmup
    rate(s) = peak * (1 + cos(pi * (s - warmup) / (steps - warmup))) / 2 for s >= warmup
    rate(s) = peak                                                       for s >= warmup, with schedule_free_adamw
    """
    warmup = min(config.warmup_steps, config.steps)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        # s + 1, so that the rate of the first step is not zero. The last step is s = steps - 1.
        done = jnp.asarray(count, jnp.float32)
        rising = (done + 1) / max(warmup, 1)
        if config.optimizer == "schedule_free_adamw":
            return config.learning_rate * jnp.minimum(rising, 1.0)
        falling = 0.5 * (1.0 + jnp.cos(jnp.pi * (done - warmup) / max(config.steps - warmup, 1)))
        return config.learning_rate * jnp.where(done < warmup, rising, falling)

    return rate


def _is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    return leaf.ndim - is_stacked(path) > 1  # norms and biases are vectors


def _is_matrix_of_blocks(path: tuple[Any, ...], leaf: Any) -> bool:
    return is_stacked(path) and _is_matrix(path, leaf)


def _matrices(params: optax.Params) -> optax.Params:
    return jax.tree_util.tree_map_with_path(_is_matrix, params)


def make_optimizer(config: TrainConfig, b_ratio: float = 1.0) -> optax.GradientTransformation:
    """Returns the optimizer named by `config.optimizer`, after gradient clipping.

    adamw: beta1 and beta2 are the decay rates of the averages of gradients and of squared gradients.

    muon: Nesterov momentum of 0.95. Each matrix of the blocks with momentum M is updated by
    0.2 * sqrt(max(in, out)) * O, where five Newton-Schulz iterations compute O, which is M with singular values close
    to 1. With this scale, updates are as large as those of AdamW, so both use the same learning rate and weight decay.
    Embedding, head, norms and biases use adamw.

    schedule_free_adamw: AdamW without a first moment updates z with the gradients at y = (1 - beta1) * z + beta1 * x,
    where x is the average of z weighted by squared learning rates. The training state holds y. `averaged` returns x,
    which is used for evaluation.

    adafactor: for squared gradients, a matrix of at least 128 x 128 keeps averages over rows and columns, and every
    other array keeps an average per element. The decay rate at step t is 1 - t**-0.8. There is no momentum; beta1 and
    beta2 are not used. In each layer, an update is scaled down to a root mean square of at most 1 and multiplied by the
    learning rate. It is not multiplied by the scale of the parameter, because an adapter's B, which is initialized to
    zero, would remain zero.

    Args:
        config: name and options of the optimizer.
        b_ratio: ratio of the learning rate of the adapters' B to that of all other parameters.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization"; Jordan et al., "Muon: an optimizer for
    hidden layers in neural networks"; Liu et al., "Muon is scalable for LLM training", section 2.2; Defazio et al.,
    "The road less scheduled", section 2; Shazeer and Stern, "Adafactor", algorithm 4; Hayou et al., "LoRA+", section 4.
    """
    rate = learning_rate_schedule(config)
    adamw = optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=_matrices)
    faster = [] if b_ratio == 1 else [_faster_b(b_ratio)]
    if config.optimizer == "adamw":
        chosen = [adamw, *faster]
    elif config.optimizer == "muon":
        chosen = [_partition(_is_matrix_of_blocks, _muon(config, rate), adamw), *faster]
    elif config.optimizer == "schedule_free_adamw":
        chosen = [_schedule_free(config, rate, faster)]
    else:
        adafactor = _adafactor(config, rate)
        chosen = [_partition(lambda path, leaf: is_stacked(path), _layer_by_layer(adafactor), adafactor), *faster]
    return optax.chain(_clip(config.clip_norm), *chosen)


def gradient_norm(gradients: optax.Updates) -> jax.Array:
    """Returns the norm of a gradient in float32.

    `optax.tree.norm` adds up in the dtype of the arrays: in float16 a norm above 255 is inf, and a sum in bfloat16
    stops growing.
    """
    return optax.tree.norm(optax.tree.cast(gradients, jnp.float32))


def _clip(most: float) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm`, computed in float32."""
    inner = optax.clip_by_global_norm(most)

    def clip(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        clipped, _ = inner.update(optax.tree.cast(updates, jnp.float32), optax.EmptyState(), params)
        return optax.tree.cast_like(clipped, updates)

    return optax.stateless(clip)


def _partition(
    chooses: Callable[[tuple[Any, ...], Any], bool],
    chosen: optax.GradientTransformation,
    other: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns a transformation that applies `chosen` to the arrays that `chooses` selects, and `other` to the rest."""

    def labels(params: optax.Params) -> optax.Params:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: "chosen" if chooses(path, leaf) else "other", params)

    return optax.partition({"chosen": chosen, "other": other}, labels)


def _faster_b(ratio: float) -> optax.GradientTransformation:
    """Returns a transformation that multiplies the updates of the adapters' B, including their weight decay."""

    def scale(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf * ratio if name_of(path).endswith(".lora_b") else leaf, updates
        )

    return optax.stateless(scale)


def _muon(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns Muon for stacked matrices (L, in, out)."""

    def axes(updates: optax.Updates) -> optax.Updates:
        return jax.tree.map(lambda leaf: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    def scale(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        return jax.tree.map(lambda leaf: leaf * (MUON_RMS * math.sqrt(max(leaf.shape[-2:]))), updates)

    return optax.chain(
        optax.contrib.scale_by_muon(beta=MUON_MOMENTUM, weight_dimension_numbers=axes),
        optax.stateless(scale),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def _schedule_free(
    config: TrainConfig, rate: optax.Schedule, after: list[optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Returns schedule-free AdamW; the transformations `after` are applied to the updates of z."""
    base = optax.chain(
        optax.scale_by_rms(config.beta2, eps=1e-8, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(config.weight_decay, _matrices),
        optax.scale_by_learning_rate(rate),
        *after,
    )
    # optax calls the schedule with a count that starts at 1. With count - 1, the weight of a step in the average uses
    # the learning rate of that step.
    return optax.contrib.schedule_free(base, lambda count: rate(count - 1), b1=config.beta1)


def _adafactor(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns Adafactor for arrays that are not stacked over layers."""

    def matrices(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.adafactor(
        rate,
        multiply_by_parameter_scale=False,
        weight_decay_rate=lambda count: rate(count) * config.weight_decay,  # optax adds it after the learning rate
        weight_decay_mask=matrices,
    )


def _layer_by_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transformation that applies `inner` to each layer of stacked arrays separately."""

    def init(params: optax.Params) -> optax.OptState:
        return jax.vmap(inner.init)(params) if jax.tree.leaves(params) else inner.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        some = bool(jax.tree.leaves(updates))
        return (jax.vmap(inner.update) if some else inner.update)(updates, state, params)

    return optax.GradientTransformation(init, update)


def has_average(config: TrainConfig) -> bool:
    """Returns whether the optimizer has an average of the parameters, which is evaluated in place of them."""
    return config.optimizer == "schedule_free_adamw"


def averaged(config: TrainConfig, state: optax.OptState, trained: nnx.State) -> nnx.State:
    """Returns the parameters for evaluation: x of schedule_free_adamw; `trained` for the other optimizers.

    Args:
        config: config given to `make_optimizer`.
        state: state of the optimizer.
        trained: the current trained parameters.
    """
    if not has_average(config):
        return trained
    return cast(nnx.State, optax.contrib.schedule_free_eval_params(cast(Any, state)[-1], trained))


def check_optimizer(config: TrainConfig, trained: nnx.State) -> None:
    """Raises RunError if the optimizer does not support the parameters that train."""
    leaves = jax.tree_util.tree_flatten_with_path(trained)[0]
    if config.optimizer == "muon" and not any(_is_matrix_of_blocks(path, leaf) for path, leaf in leaves):
        raise RunError("--optimizer muon needs a matrix of the blocks that trains, got none")
    if config.optimizer == "schedule_free_adamw":
        for path, leaf in leaves:
            if leaf.dtype != jnp.float32:  # in 16 bits, the sum of squared learning rates would stop growing
                raise RunError(
                    f"--optimizer schedule_free_adamw needs float32 parameters, got {name_of(path)} in {leaf.dtype}"
                )
