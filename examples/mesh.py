"""Trains a small model on several devices in JAX: tokens over one axis of a mesh, the vocabulary over another.

    python examples/mesh.py --tensor 2

This runs on all GPUs, or on four CPU devices. The devices are a grid of data x tensor. Devices of one row (tensor) have
the same tokens and each a part of the head's vocabulary. Devices of one column (data) have other tokens. The body is on
all devices, and `jax.jit` divides its work by the tokens. `jax_pallas.sharded` divides the loss, and returns that of
all tokens, however many count on each device.
"""

import argparse
import os

if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # of CPUs; GPUs are as many as there are
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_pallas import sharded

VOCABULARY, HIDDEN, LENGTH, BATCH = 512, 64, 32, 16


def tokens_of(step: int) -> Array:
    """Returns the tokens (BATCH, LENGTH + 1) of a step: each is the one before plus a step of its sequence."""
    start = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, VOCABULARY)
    stride = jnp.tile(jnp.array([1, 2, 3, 5]), BATCH // 4)
    return (start + stride[:, None] * jnp.arange(LENGTH + 1)) % VOCABULARY


def hidden_states(body: dict[str, Array], tokens: Array) -> Array:
    """Returns the states (BATCH, LENGTH, HIDDEN) of tokens (BATCH, LENGTH)."""
    return jax.nn.gelu(body["embedding"][tokens] @ body["up"]) @ body["down"]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Train a small model on a mesh of devices.")
    parser.add_argument("--tensor", type=int, default=2, help="devices that share a vocabulary (2)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (60)")
    options = parser.parse_args(arguments)
    if options.tensor < 1 or jax.device_count() % options.tensor or VOCABULARY % options.tensor:
        parser.error(
            f"--tensor must divide the {jax.device_count()} devices and the vocabulary of {VOCABULARY}, "
            f"got {options.tensor}"
        )

    grid = (jax.device_count() // options.tensor, options.tensor)
    mesh = jax.make_mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    everywhere, by_batch, by_class = (NamedSharding(mesh, spec) for spec in (P(), P("data"), P("tensor")))
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"embedding": (VOCABULARY, HIDDEN), "up": (HIDDEN, 4 * HIDDEN), "down": (4 * HIDDEN, HIDDEN)}
    body = {
        name: jax.random.normal(key, size) / size[0] ** 0.5
        for key, (name, size) in zip(keys[:3], sizes.items(), strict=True)
    }
    head = jax.random.uniform(keys[3], (VOCABULARY, HIDDEN), minval=-1, maxval=1) / HIDDEN**0.5
    parameters = {"body": jax.device_put(body, everywhere), "head": jax.device_put(head, by_class)}
    optimizer = optax.adamw(1e-2)
    state = jax.jit(optimizer.init)(parameters)

    @jax.jit
    def train(parameters, state, tokens):
        targets = tokens[:, 1:].at[: BATCH // 2, :4].set(-100)  # not the same number of tokens on every device

        def loss(parameters):
            states = hidden_states(parameters["body"], tokens[:, :-1])
            axes = {"mesh": mesh, "batch_axis_names": "data", "vocab_axis_name": "tensor"}
            return sharded.linear_cross_entropy(states, parameters["head"], targets, **axes)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    for step in range(options.steps + 1):
        tokens = jax.device_put(tokens_of(step), by_batch)
        parameters, state, value = train(parameters, state, tokens)
        if step % 20 == 0:
            print(f"step {step:3d}  loss {float(value):.3f}")


if __name__ == "__main__":
    main()
