"""The names of a decoder's parameters, and which of them train."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import GetAttrKey

from flax_models.errors import RunError

ADAPTERS = ("lora_a", "lora_b", "lora_magnitude")  # parameters that flax_models.model.lora adds to a projection


class Part(NamedTuple):
    """The unit in which gradients are checked: one array of the model, or one layer's part of a stacked array."""

    name: str
    size: int
    first_step: int = 1
    """First step of a run in which its gradient must be nonzero."""


def name_of(path: tuple[Any, ...]) -> str:
    """Returns the name, such as "blocks.attention.query.kernel", of a parameter's path in an nnx.State or its tree."""
    return ".".join(str(getattr(entry, "key", entry)) for entry in path if not isinstance(entry, GetAttrKey))


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Returns whether a parameter holds all layers, stacked along its first axis."""
    return any(getattr(entry, "key", None) == "blocks" for entry in path)


def is_adapter(name: str) -> bool:
    """Returns whether `flax_models.model.lora.adapt` added the parameter."""
    return name.split(".")[-1] in ADAPTERS


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern matches a parameter's name.

    A pattern matches if it is one or more consecutive dot-separated components of the name. "norms" matches the scale
    of every norm.

    Example:
        >>> is_named("blocks.attention.query.kernel", ["attention"]), is_named("final_norm.scale", ["norms"])
        (True, True)
    """
    parts = name.split(".")
    if "norms" in patterns and parts[-1] == "scale":
        return True
    runs = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return not runs.isdisjoint(patterns)


def names_that_train(names: Sequence[str], freeze: Sequence[str], unfreeze: Sequence[str]) -> frozenset[str]:
    """Returns the names of the parameters that train.

    Without adapters, all parameters train except those that `freeze` matches. With adapters, only the adapters and the
    parameters that `unfreeze` matches train.

    Args:
        names: names of all parameters.
        freeze: patterns of `is_named`.
        unfreeze: patterns of `is_named`.

    Raises:
        RunError: a pattern matches no parameter, nothing is left to train, or `freeze` is used with adapters.
    """
    adapted = any(is_adapter(name) for name in names)
    if adapted and freeze:
        raise RunError(
            f"--freeze cannot be used with adapters, which freeze all other parameters: got {' '.join(freeze)}"
        )
    for option, patterns in (("--freeze", freeze), ("--unfreeze", unfreeze)):
        for pattern in patterns:
            if not any(is_named(name, [pattern]) for name in names):
                raise RunError(f"{option}: no parameter matches {pattern}; the parameters are {', '.join(names)}")
    if adapted:
        return frozenset(name for name in names if is_adapter(name) or is_named(name, unfreeze))
    left = frozenset(name for name in names if not is_named(name, freeze))
    if not left:
        raise RunError(f"--freeze leaves nothing to train: got {' '.join(freeze)}")
    return left


def parts_of(params: nnx.State) -> Iterator[Part]:
    """Yields the parts of the parameters: each array outside the blocks, and each layer's part of a stacked array."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = name_of(path)
        if not is_stacked(path):
            yield Part(name, leaf.size)
            continue
        # The gradient of A is zero in the first step, because B is initialized to zero.
        first_step = 2 if name.endswith(".lora_a") else 1
        for layer in range(leaf.shape[0]):
            yield Part(f"{name} of layer {layer}", leaf.size // leaf.shape[0], first_step)


def has_gradient(gradients: nnx.State) -> jax.Array:
    """Returns (P,) bool, in the order of `parts_of`: which parts have a nonzero gradient; NaN counts as nonzero."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        # Without a reshape, which would gather an array whose axes are divided over a mesh.
        found.append(jnp.any(leaf != 0, axis=tuple(range(is_stacked(path), leaf.ndim))).reshape(-1))
    return jnp.concatenate(found)
