"""The fused loss in tunix: `trainer.with_loss_fn(loss_fn())` for supervised training, and `patch()` for its
reinforcement learning.

- `loss_fn` replaces the default loss of `PeftTrainer` (`_default_loss_fn` of `tunix/sft/peft_trainer.py`), which
  multiplies a one-hot array by log-probabilities of all classes.
- `patch` replaces `compute_chunked_logps` of `tunix/rl/common.py`, which computes the logits of some tokens at a time,
  and again in the backward pass. tunix calls it where `compute_logps_chunk_size` of the training configuration is not
  0, for the current, the old and the reference log-probabilities of GRPO, PPO and others.

The interfaces are those of google-tunix 0.1.7, which has no `compute_chunked_logps`, and of commit
c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3 of github.com/google/tunix (0.1.8).
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_pallas.hosts.heads import check_no_adapter, head_arguments, of_head, package_for
from jax_pallas.hosts.interface import Patch, check_interface, check_options

try:
    import tunix
except ImportError as error:
    raise ImportError("jax_pallas.hosts.tunix needs tunix: pip install google-tunix") from error
from flax import nnx
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.sft import peft_trainer, utils  # pyright: ignore[reportMissingImports]

__all__ = ["loss_fn", "patch", "unpatch"]

TESTED = "google-tunix 0.1.7 and 0.1.8 (commit c7d8950)"
DEFAULT_LOSS = ("model", "input_tokens", "input_mask", "positions", "attention_mask", "images")
CHUNKED_LOGPS = ("model", "hidden_states", "target_ids", "temperature", "chunk_size", "return_entropy")
# Models whose head is read from their attributes. Their final_logit_softcap, if they have one, is in their config.
MODELS = tuple(f"tunix.models.{name}.model" for name in ("gemma", "gemma3", "gemma4", "llama3", "qwen2", "qwen3"))

Head = Callable[[Any], Any]

_replaced: list[Callable[..., Any]] = []  # the function that `patch` replaced


def loss_fn(head: Head | None = None, **options: Any) -> Callable[..., Any]:
    """Returns a loss function for `PeftTrainer.with_loss_fn`: the mean negative log-likelihood of the next tokens in
    input_mask, as the default of tunix, without the logits.

    It takes the arguments of the default loss and returns what that returns: a number in tunix 0.1.7, and a
    `LossOutput` with the sum and the number of tokens in 0.1.8, from which tunix accumulates gradients.

    Args:
        head: (model) -> the output layer, an array (V, D), or another head of `jax_pallas.hosts.heads`. None reads it
            from a model of tunix (gemma, gemma3, gemma4, llama3, qwen2 or qwen3), and its softcap from its config.
        **options: of `jax_pallas.linear_cross_entropy` other than reduction, normalizer and token_weight. With mesh,
            batch_axis_names or fsdp_axis_name, those of `jax_pallas.sharded.linear_cross_entropy`.

    Raises:
        ImportError: tunix's default loss has other arguments.
        TypeError, ValueError: the value of an option.
        TypeError: on a call, the head is not one that the loss supports, for example with an adapter (LoRA); the model
            is not one of tunix and head is None; the model cannot return its hidden states.

    Example:
        >>> from jax_pallas.hosts.tunix import loss_fn
        >>> trainer = PeftTrainer(model, optimizer, config).with_loss_fn(loss_fn())
    """
    _check(peft_trainer._default_loss_fn, DEFAULT_LOSS)
    check_options(options, "reduction", "normalizer", "token_weight")

    def loss(
        model: Any,
        input_tokens: Array,
        input_mask: Array,
        positions: Array,
        attention_mask: Array,
        images: Array | None = None,
    ) -> Any:
        inputs = {} if images is None else {"images": images}
        hidden = _hidden_states(model, input_tokens, positions, None, attention_mask, **inputs)[:, :-1]
        target, mask = input_tokens[:, 1:], input_mask[:, 1:]
        arguments = _arguments(model, head, hidden, options)
        arguments |= {"target": target, "token_weight": mask.astype(jnp.float32)}
        package = package_for(arguments)
        if not hasattr(utils, "LossOutput"):
            return package.linear_cross_entropy(**arguments, normalizer=jnp.sum(arguments["token_weight"]) + 1e-8)
        total = package.linear_cross_entropy(**arguments, reduction="sum")
        metric = utils.WeightedMetric(total, jnp.sum(mask), eps=1e-8)
        return utils.LossOutput(primary_loss=metric, aux_metrics={})

    return loss


def compute_chunked_logps(
    model: Any,
    hidden_states: Array,
    target_ids: Array,
    temperature: float,
    chunk_size: int,
    return_entropy: bool,
    *,
    head: Head | None = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """`tunix.rl.common.compute_chunked_logps` without logits.

    Args:
        model: a model of tunix, or any with head.
        hidden_states: (B, T, D)
        target_ids: (B, T)
        temperature: divides the logits, after the softcap; 0 and 1 do not.
        chunk_size: is not used. memory_budget limits the memory.
        return_entropy: whether to return the entropy too.
        head: see `loss_fn`.
        **options: of `jax_pallas.linear_log_probs`, or of `jax_pallas.sharded.linear_log_probs`.

    Returns:
        (B, T) float32 log-probabilities, or the pair of them and the entropies, all differentiable.

    Raises:
        TypeError, ValueError: as `loss_fn` and `jax_pallas.linear_log_probs`.
    """
    arguments = _arguments(model, head, hidden_states, options)
    arguments["target"] = target_ids
    if temperature not in (0.0, 1.0):
        arguments["logit_scale"] = arguments.get("logit_scale", 1.0) / temperature
        if arguments.get("softcap") is not None:  # c / t * tanh(z / c) is the softcap c / t of z / t
            arguments["softcap"] = arguments["softcap"] / temperature
    found = package_for(arguments).linear_log_probs(**arguments)
    return (found.log_prob, found.entropy) if return_entropy else found.log_prob


def patch(head: Head | None = None, **options: Any) -> Patch:
    """Makes tunix compute its chunked log-probabilities with `compute_chunked_logps` of this module.

    Call it before the first step of a trainer, which keeps its compiled programs, and set `compute_logps_chunk_size` of
    the training configuration to any number but 0. Another call replaces the options.

    Args:
        head: see `loss_fn`.
        **options: of `jax_pallas.linear_log_probs`, or of `jax_pallas.sharded.linear_log_probs`. saved_budget saves one
            of four matmuls.

    Raises:
        ImportError: tunix has no `compute_chunked_logps`, or one with other arguments.
        TypeError, ValueError: the value of an option.

    Example:
        >>> from jax_pallas.hosts import tunix
        >>> tunix.patch()
    """
    host = getattr(common, "compute_chunked_logps", None) if not _replaced else _replaced[0]
    if host is None:
        raise ImportError(
            f"jax_pallas.hosts.tunix is tested with {TESTED}, got {_version()}, which has no compute_chunked_logps"
        )
    _check(host, CHUNKED_LOGPS)
    check_options(options)

    def compute_chunked(*arguments: Any, **named: Any) -> Any:
        return compute_chunked_logps(*arguments, **named, head=head, **options)

    if not _replaced:
        _replaced.append(host)
    _set(compute_chunked)
    return Patch(unpatch)


def unpatch() -> None:
    """Undoes `patch`, if it was called."""
    if _replaced:
        _set(_replaced.pop())


def _set(function: Callable[..., Any]) -> None:
    """Replaces the function of tunix, and the programs that were compiled with the one before."""
    common.compute_chunked_logps = function
    common.compute_per_token_logps.clear_cache()


def _hidden_states(model: Any, *arguments: Any, **inputs: Any) -> Array:
    """Returns the hidden states that the head of a model of tunix gets."""
    parameters = inspect.signature(model.__call__).parameters
    if "skip_lm_head" in parameters:
        return model(*arguments, **inputs, skip_lm_head=True)[0]
    if "output_hidden_states" not in parameters:
        raise TypeError(
            f"{type(model).__name__} must take skip_lm_head or output_hidden_states, got the arguments "
            f"{', '.join(parameters)}"
        )
    model(*arguments, **inputs, output_hidden_states=True)  # jax.jit removes the logits, which nothing uses
    intermediates: Any = nnx.pop(model, nnx.Intermediate)
    return intermediates["all_hidden_states"][-1]


def _arguments(model: Any, head: Head | None, hidden: Array, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a function of `jax_pallas`: what the model determines, and the options."""
    of_model: dict[str, Any] = {}
    found = head(model) if head is not None else None
    if type(model).__module__ in MODELS:
        of_model["softcap"] = getattr(model.config, "final_logit_softcap", None)
        found = _head(model) if head is None else found
    elif head is None:
        raise TypeError(
            f"head must be given with a model other than gemma, gemma3, gemma4, llama3, qwen2 and qwen3 of tunix, got "
            f"{type(model).__module__}.{type(model).__name__}"
        )
    layer = found if isinstance(found, nnx.Module) else None
    if layer is not None:
        check_no_adapter(layer)
    given = of_head(options)
    name = type(layer).__name__
    if type(layer).__module__.startswith("tunix.models.") and name in ("Embedder", "Einsum"):
        of_tunix: Any = layer
        found = {"embedding": of_tunix.input_embedding} if name == "Embedder" else {"kernel": of_tunix.w}
        config = getattr(layer, "config", None)  # of gemma4
        given["dtype"] = getattr(layer, "dtype", getattr(config, "dtype", None))
    return of_model | options | head_arguments(found, hidden, **given)


def _head(model: Any) -> Any:
    """Returns the output layer of a model of tunix, or the embedding that its logits are tied to."""
    head = getattr(model, "lm_head", None)
    return model.embedder if head is None else head


def _check(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    check_interface("jax_pallas.hosts.tunix", TESTED, _version(), function, names)


def _version() -> str:
    return f"google-tunix {getattr(tunix, '__version__', 'of no version')}"
