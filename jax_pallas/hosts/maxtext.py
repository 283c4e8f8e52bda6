"""The fused loss in MaxText: `patch()`, with `num_vocab_tiling` above 1 in the configuration.

With vocabulary tiling, `loss_fn` of `src/maxtext/trainers/pre_train/train.py` gets hidden states from the model and
calls `vocab_tiling_nnx_loss` or `vocab_tiling_linen_loss` of `src/maxtext/utils/vocabulary_tiling.py`, which compute
the logits of a tile of tokens at a time, and again in the backward pass. `patch` replaces both. The norm, the dropout,
the softcap, the scale of tied logits and the z-loss are those of `apply_output_head` of the model
(`src/maxtext/layers/nnx_decoders.py`, `src/maxtext/layers/decoders.py`) and of the configuration. The number of tiles
has no other effect.

The interfaces are those of the releases 0.2.4 and 0.2.5, and of commit e591f30cbbf217ed67ef71263ec0538239f9c3b8 of
github.com/AI-Hypercomputer/maxtext (0.2.4). 0.2.5 has no models of flax.linen, and no `vocab_tiling_linen_loss`. In
0.2.4, the gradient of the hidden states leaves out the factor by which the sum is multiplied afterwards, such as that
of a mean. Here and in 0.2.5 it has that factor.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_pallas import linear_ce, sharded
from jax_pallas.hosts.heads import check_no_adapter, head_arguments
from jax_pallas.hosts.interface import Patch, check_interface, check_options
from jax_pallas.problem import rounded

try:
    import maxtext
except ImportError as error:
    raise ImportError("jax_pallas.hosts.maxtext needs MaxText: install it from its repository") from error
from flax import linen
from maxtext.common.common_types import ShardMode  # pyright: ignore[reportMissingImports]
from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]
from maxtext.utils import vocabulary_tiling  # pyright: ignore[reportMissingImports]
from maxtext.utils.sharding import create_sharding  # pyright: ignore[reportMissingImports]

__all__ = ["patch", "unpatch"]

TESTED = "MaxText 0.2.4 (commit e591f30) and 0.2.5"
ARGUMENTS = {
    "vocab_tiling_nnx_loss": ("model", "hidden_states", "data", "config", "is_train"),
    "vocab_tiling_linen_loss": ("hidden_states", "data", "config", "model", "params", "is_train"),
}
SET = (
    "reduction",
    "token_weight",
    "normalizer",
    "z_loss_weight",
    "softcap",
    "logit_scale",
    "vocab_axis",
    "linear_bias",
)

_replaced: dict[str, Any] = {}  # the functions that `patch` replaced, by name


def vocab_tiling_nnx_loss(
    model: Any, hidden_states: Array, data: Any, config: Any, is_train: bool, **options: Any
) -> tuple[Array, Array]:
    """`maxtext.utils.vocabulary_tiling.vocab_tiling_nnx_loss` without logits.

    Args:
        model: of flax.nnx.
        hidden_states: (B, T, D), before the final norm.
        data: targets and targets_segmentation, (B, T) each. Tokens of segment 0 do not count.
        config: of MaxText.
        is_train: whether to apply dropout, if config enables it.
        **options: of `jax_pallas.linear_cross_entropy`: implementation, memory_budget, head_precision and others.

    Returns:
        The sum of the losses of all tokens, with the z-loss, and the sum of the z-loss, which has no gradient.

    Raises:
        TypeError: the output layer has an adapter.
        ValueError: config keeps parameters in the memory of the host, or those of the output layer in 8 bits.
    """
    sharding = None
    if config.shard_mode == ShardMode.EXPLICIT:
        sharding = create_sharding(model.mesh, ("activation_batch", "activation_length", "activation_embed"))
    hidden = model.decoder.decoder_norm(hidden_states, out_sharding=sharding)
    hidden = model.decoder.dropout(hidden, deterministic=_is_deterministic(config, is_train))
    layer = model.token_embedder if config.logits_via_embedding else model.decoder.logits_dense
    check_no_adapter(layer)
    if getattr(layer, "kernel_scale", None) is not None:
        raise ValueError(
            "weight_dtype of the output layer must have 16 or 32 bits with jax_pallas.hosts.maxtext, got "
            f"{layer.kernel.dtype} with a kernel_scale: add logits_dense to unquantized_modules"
        )
    head = layer.embedding if config.logits_via_embedding else layer.kernel
    return _loss(hidden, head, getattr(layer, "bias", None), data, config, model.mesh, options)


def vocab_tiling_linen_loss(
    hidden_states: Array, data: Any, config: Any, model: Any, params: Any, is_train: bool, **options: Any
) -> tuple[Array, Array]:
    """`maxtext.utils.vocabulary_tiling.vocab_tiling_linen_loss` of 0.2.4 without logits.

    The model computes the input of its output layer, and logits that nothing uses: `jax.jit` removes them.

    Args:
        model: of flax.linen.
        params: its variables.
        hidden_states: as all other arguments, see `vocab_tiling_nnx_loss`.

    Returns:
        As `vocab_tiling_nnx_loss`.

    Raises:
        TypeError: the decoder is not the one of flax.linen, which applies dropout before the output layer.
        ValueError: config keeps parameters in the memory of the host.
    """
    inputs: list[Array] = []

    def keep(method: Any, arguments: Any, keywords: Any, context: Any) -> Any:
        found = method(*arguments, **keywords)
        if isinstance(context.module, linen.Dropout) and context.method_name == "__call__":
            inputs.append(found)
        return found

    with linen.intercept_methods(keep):
        model.apply(
            {"params": params["params"]},
            hidden_states,
            deterministic=_is_deterministic(config, is_train),
            model_mode="train",
            method="logits_from_hidden_states_for_vocab_tiling",
        )
    if len(inputs) != 1:
        raise TypeError(f"the decoder of {type(model).__name__} must call one flax.linen.Dropout, got {len(inputs)}")
    of_model = params["params"]
    if config.logits_via_embedding:
        layer, name = of_model["token_embedder"], "embedding"
    else:
        layer, name = of_model["decoder"]["logits_dense"], "kernel"
    return _loss(inputs[0], layer[name], layer.get("bias"), data, config, model.mesh, options)


def _loss(
    hidden: Array, head: Any, bias: Any, data: Any, config: Any, mesh: Any, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Returns the sum of the losses and of the z-loss, from the input of the output layer.

    Args:
        head: (V, D) if config.logits_via_embedding, else (D, V), as a variable, in a box or as an array.
    """
    if config.parameter_memory_host_offload:
        raise ValueError("parameter_memory_host_offload must be False with jax_pallas.hosts.maxtext, got True")
    precision, dtype = options.get("head_precision"), None
    if config.logits_via_embedding:
        arguments = head_arguments({"embedding": head}, hidden, head_precision=precision)
        weight = arguments["linear_weight"]
        if precision != "float32":  # the model rounds the embedding to bfloat16, in any dtype
            arguments["linear_weight"] = rounded(weight, jnp.bfloat16).astype(hidden.dtype)
        if config.normalize_embedding_logits:
            arguments["logit_scale"] = hidden.shape[-1] ** -0.5
        arguments["softcap"] = config.final_logits_soft_cap or None
    else:
        dtype = jnp.float32 if config.logits_dot_in_fp32 else config.dtype
        layer = {"kernel": head} | ({} if bias is None else {"bias": bias})
        arguments = head_arguments(layer, hidden, head_precision=precision, dtype=dtype)
    weight = arguments["linear_weight"]
    arguments |= options
    arguments |= {"target": data["targets"], "token_weight": (data["targets_segmentation"] != 0).astype(jnp.float32)}
    arguments |= {"reduction": "sum", "z_loss_weight": config.z_loss_multiplier}
    if config.shard_mode == ShardMode.EXPLICIT or mesh.size == 1:  # the types of the arrays say how they are divided
        loss, stats = linear_ce.linear_cross_entropy_with_stats(**arguments)
    else:
        axes = _axes(config, mesh, weight.shape[arguments["vocab_axis"]])
        loss, stats = sharded.linear_cross_entropy_with_stats(**arguments, **axes)
    return loss, stats.z_loss


def _axes(config: Any, mesh: Any, vocab: int) -> dict[str, Any]:
    """Returns the axes of a mesh that divide tokens and classes by the rules of MaxText, as arguments of
    `jax_pallas.sharded`. A head whose classes they do not divide is gathered."""
    rows = create_sharding(mesh, ("activation_embed_and_logits_batch", "activation_length")).spec
    of_vocab, of_hidden = (_names(part) for part in create_sharding(mesh, ("vocab", "embed_vocab")).spec)
    tokens = [name for part in rows for name in _names(part)]
    classes = tuple(name for name in of_vocab if name not in tokens)
    fsdp = tuple(name for name in (*of_vocab, *of_hidden) if name in tokens)
    if vocab % math.prod(mesh.shape[name] for name in (*classes, *fsdp)):
        classes = fsdp = ()
    return {"mesh": mesh, "batch_axis_names": rows, "vocab_axis_name": classes, "fsdp_axis_name": fsdp}


def _names(part: Any) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())


def _is_deterministic(config: Any, is_train: bool) -> bool:
    return not config.enable_dropout if is_train else True


def patch(**options: Any) -> Patch:
    """Makes MaxText's pre-training compute the loss of vocabulary tiling with the functions of this module.

    Call it before training, in the program that calls `maxtext.trainers.pre_train.train.main`. A program that runs
    `python -m maxtext.trainers.pre_train.train` has another copy of that module. Another call replaces the options.

    Args:
        **options: of `vocab_tiling_nnx_loss`.

    Raises:
        ImportError: MaxText does not have these functions, or they have other arguments.
        TypeError: an option is one that MaxText's configuration determines, or its type is wrong.
        ValueError: the value of an option.

    Example:
        >>> from absl import app
        >>> from maxtext.trainers.pre_train import train
        >>> from jax_pallas.hosts import maxtext
        >>> maxtext.patch()
        >>> app.run(train.main)
    """
    check_options(options, *SET)
    unpatch()
    ours = {"vocab_tiling_nnx_loss": vocab_tiling_nnx_loss, "vocab_tiling_linen_loss": vocab_tiling_linen_loss}
    version = getattr(maxtext, "__version__", "of no version")
    if not hasattr(train, "vocab_tiling_linen_loss"):  # as in 0.2.5
        del ours["vocab_tiling_linen_loss"]
    for name in ours:
        host = getattr(vocabulary_tiling, name, None)
        if host is None:
            raise ImportError(
                f"jax_pallas.hosts.maxtext is tested with {TESTED}, got MaxText {version}, which has no {name}"
            )
        check_interface("jax_pallas.hosts.maxtext", TESTED, f"MaxText {version}", host, ARGUMENTS[name])
    for name, function in ours.items():
        _replaced[name] = getattr(vocabulary_tiling, name)
        _set(name, _with_options(function, options))
    return Patch(unpatch)


def unpatch() -> None:
    """Undoes `patch`, if it was called."""
    for name in [*_replaced]:
        _set(name, _replaced.pop(name))


def _with_options(function: Any, options: dict[str, Any]) -> Any:
    def loss(*arguments: Any, **named: Any) -> tuple[Array, Array]:
        return function(*arguments, **named, **options)

    return loss


def _set(name: str, function: Any) -> None:
    setattr(vocabulary_tiling, name, function)
    setattr(train, name, function)  # imported by name
