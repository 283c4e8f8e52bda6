"""The names of a decoder's parameters: which of them train, and the parts in which that is told."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import GetAttrKey

from flax_models.errors import RunError

ADAPTERS = ("lora_a", "lora_b", "lora_magnitude")  # parameters that flax_models.model.lora puts beside a kernel


class Part(NamedTuple):
    """Parameters that train or do not as one: one of the model's arrays, or one layer's share of it."""

    name: str
    size: int
    due: int = 1
    """First step of a run in which it must have a gradient."""


def name_of(path: tuple[Any, ...]) -> str:
    """Returns a parameter's name, as "blocks.attention.query.kernel", of its path in an nnx.State or in its tree."""
    return ".".join(str(getattr(entry, "key", entry)) for entry in path if not isinstance(entry, GetAttrKey))


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Returns whether a parameter holds all layers, stacked along its first axis."""
    return any(getattr(entry, "key", None) == "blocks" for entry in path)


def is_adapter(name: str) -> bool:
    """Returns whether a parameter is one that `flax_models.model.lora.adapt` adds."""
    return name.split(".")[-1] in ADAPTERS


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern means a parameter: it is the parameter's name, or a run of the name's parts.

    Example:
        >>> is_named("blocks.attention.query.kernel", ["attention"]), is_named("final_norm.scale", ["norms"])
        (True, True)
    """
    parts = name.split(".")
    if "norms" in patterns and parts[-1] == "scale":  # of every norm, wherever it stands
        return True
    runs = {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    return not runs.isdisjoint(patterns)


def names_that_train(names: Sequence[str], freeze: Sequence[str], unfreeze: Sequence[str]) -> frozenset[str]:
    """Returns the names of the parameters that train.

    Without adapters all do but what `freeze` names, with adapters none but those and what `unfreeze` names.

    Args:
        names: of all parameters.
        freeze: patterns of `is_named`.
        unfreeze: patterns of `is_named`.

    Raises:
        RunError: no parameter is what a pattern says, nothing is left to train, or adapters are to be frozen.
    """
    adapted = any(is_adapter(name) for name in names)
    if adapted and freeze:
        raise RunError(f"--freeze is for a run without adapters, which freeze all else: got {' '.join(freeze)}")
    for option, patterns in (("--freeze", freeze), ("--unfreeze", unfreeze)):
        for pattern in patterns:
            if not any(is_named(name, [pattern]) for name in names):
                raise RunError(f"{option}: no parameter is named {pattern}; there are {', '.join(names)}")
    if adapted:
        return frozenset(name for name in names if is_adapter(name) or is_named(name, unfreeze))
    left = frozenset(name for name in names if not is_named(name, freeze))
    if not left:
        raise RunError(f"--freeze leaves nothing to train: got {' '.join(freeze)}")
    return left


def parts_of(params: nnx.State) -> Iterator[Part]:
    """Yields what is told of by itself: arrays outside the blocks, and each layer's share of those in them."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = name_of(path)
        if not is_stacked(path):
            yield Part(name, leaf.size)
            continue
        # A's gradient passes through B, which a run begins with at zero.
        due = 2 if name.endswith(".lora_a") else 1
        for layer in range(leaf.shape[0]):
            yield Part(f"{name} of layer {layer}", leaf.size // leaf.shape[0], due)


def moved(gradients: nnx.State) -> jax.Array:
    """Returns (P,) bool, in the order of `parts_of`: which parts have a gradient other than zero (NaN is another)."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        shape = (leaf.shape[0], -1) if is_stacked(path) else (1, -1)
        found.append(jnp.any(leaf.reshape(shape) != 0, axis=1))
    return jnp.concatenate(found)
