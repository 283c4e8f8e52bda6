"""The optimisers of a run, by name, and their learning rates.

All are optax's, behind clipping by the gradient's global norm. Weight decay is decoupled (rate * decay * parameter) and
touches matrices alone. The blocks' parameters are stacked along a first axis of layers; what an optimiser does to a
matrix, it does to each layer's by itself, as if the layers were so many arrays.
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

MUON_MOMENTUM = 0.95  # of Jordan's runs and of Liu et al.
MUON_RMS = 0.2  # root mean square of an update over the learning rate: AdamW's lies between 0.2 and 0.4 (Liu et al.)


def learning_rate_schedule(config: TrainConfig) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Returns the schedule: linear warm-up to the peak, then a cosine that ends at zero with the run.

    rate(s) = peak * (s + 1) / warmup                                    for s < warmup
    rate(s) = peak * (1 + cos(pi * (s - warmup) / (steps - warmup))) / 2 after it
    rate(s) = peak                                                       after it, with schedule_free_adamw
    """
    warmup = min(config.warmup_steps, config.steps)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        # s + 1: the first step must move, and s = steps is never asked for.
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
    """Returns the optimiser that `config.optimizer` names, behind gradient clipping.

    adamw: beta1 and beta2 average gradients and their squares.

    muon: momentum of 0.95 (Nesterov's), of which each matrix M of the blocks moves by 0.2 * sqrt(max(in, out)) * O, O
    being M with its singular values brought near 1 by five Newton-Schulz steps. So scaled, an update is as large as
    AdamW's, and one learning rate and one weight decay serve both. Embedding, head, norms and biases go by adamw.

    schedule_free_adamw: AdamW without a first moment moves z, by gradients at y = (1 - beta1) * z + beta1 * x, where x
    is the average of z, weighted by squared learning rates. Steps hold y; `averaged` gives x, which is to be judged.

    adafactor: of its squared gradients a matrix of at least 128 x 128 keeps averages by row and by column, every other
    array averages of each; at step t a share 1 - t**-0.8 of them is what they were. No momentum, so no use of beta1 and
    beta2. An update is scaled down to a root mean square of 1 at most, in each layer, and multiplied by the learning
    rate: not by the parameter's own size, which would hold an adapter's B at the zero where it starts.

    Args:
        config: names it, and gives its numbers.
        b_ratio: learning rate of the adapters' B over that of everything else.

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
        chosen = [_two(_is_matrix_of_blocks, _muon(config, rate), adamw), *faster]
    elif config.optimizer == "schedule_free_adamw":
        chosen = [_schedule_free(config, rate, faster)]
    else:
        adafactor = _adafactor(config, rate)
        chosen = [_two(lambda path, leaf: is_stacked(path), _layer_by_layer(adafactor), adafactor), *faster]
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), *chosen)


def _two(
    chooses: Callable[[tuple[Any, ...], Any], bool],
    chosen: optax.GradientTransformation,
    other: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns what treats some arrays, chosen by path and array, in one way and all others in another."""

    def labels(params: optax.Params) -> optax.Params:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: "chosen" if chooses(path, leaf) else "other", params)

    return optax.partition({"chosen": chosen, "other": other}, labels)


def _faster_b(ratio: float) -> optax.GradientTransformation:
    """Returns what multiplies the updates of the adapters' B, their weight decay with them."""

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
    """Returns schedule-free AdamW; `after` is done to the updates of z."""
    base = optax.chain(
        optax.scale_by_rms(config.beta2, eps=1e-8, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(config.weight_decay, _matrices),
        optax.scale_by_learning_rate(rate),
        *after,
    )
    # Its count of steps begins at 1: a step's weight in the average is of the rate that the step itself had.
    return optax.contrib.schedule_free(base, lambda count: rate(count - 1), b1=config.beta1)


def _adafactor(config: TrainConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns Adafactor for arrays of one layer, or of none."""

    def matrices(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.adafactor(
        rate,
        multiply_by_parameter_scale=False,
        weight_decay_rate=lambda count: rate(count) * config.weight_decay,  # added where the rate is already in
        weight_decay_mask=matrices,
    )


def _layer_by_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns what does to each layer of stacked arrays, by itself, what `inner` does to arrays."""

    def init(params: optax.Params) -> optax.OptState:
        return jax.vmap(inner.init)(params) if jax.tree.leaves(params) else inner.init(params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        some = bool(jax.tree.leaves(updates))
        return (jax.vmap(inner.update) if some else inner.update)(updates, state, params)

    return optax.GradientTransformation(init, update)


def averaged(config: TrainConfig, state: optax.OptState, trained: nnx.State) -> nnx.State:
    """Returns the parameters that a model is judged by: x of schedule_free_adamw, else those given.

    Args:
        config: of `make_optimizer`.
        state: the optimiser's.
        trained: the parameters that the optimiser has reached.
    """
    if config.optimizer != "schedule_free_adamw":
        return trained
    return cast(nnx.State, optax.contrib.schedule_free_eval_params(cast(Any, state)[-1], trained))


def check_optimizer(config: TrainConfig, trained: nnx.State) -> None:
    """Raises RunError if the optimiser cannot do what its name says for the parameters that train."""
    leaves = jax.tree_util.tree_flatten_with_path(trained)[0]
    if config.optimizer == "muon" and not any(_is_matrix_of_blocks(path, leaf) for path, leaf in leaves):
        raise RunError("--optimizer muon is for matrices of the blocks, and none of them trains")
    if config.optimizer == "schedule_free_adamw":
        for path, leaf in leaves:
            if leaf.dtype != jnp.float32:  # sums of squared rates would stop growing
                raise RunError(
                    f"--optimizer schedule_free_adamw averages float32 parameters, got {name_of(path)} in {leaf.dtype}"
                )
