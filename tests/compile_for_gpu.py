"""Compiles the JAX loss for a GPU that is not present. Prints the temporaries and launches, one JSON line per program.

test_jax_pallas_gpu_compile.py runs it in a subprocess as `python compile_for_gpu.py TARGET.pbtxt PROGRAMS`. PROGRAMS is
a JSON list of dicts with the keys mode ("train", "float32", "float32_scaled", "float16", "float16_smoothing", "none",
"saved", "saved_float16", "eval", "token_loss", "token_entropy", "token_stats", "grad_into", "none_into",
"log_probs_into" or "split_head"), n, d, v, vocab_axis and implementation.
"""

import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jax_pallas import (
    linear_cross_entropy,
    linear_log_probs,
    linear_token_loss,
    linear_token_loss_with_stats,
    token_losses,
)


def compiled(mesh: Any, mode: str, n: int, d: int, v: int, vocab_axis: int, implementation: str) -> Any:
    def shape(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def loss(x: jax.Array, w: jax.Array, y: jax.Array, reduction: Any = "mean") -> jax.Array:
        options: dict[str, Any] = {"vocab_axis": vocab_axis, "implementation": implementation}
        options["logit_scale"] = 0.5 if mode == "float32_scaled" else 1.0
        smoothing = 0.1 if mode == "float16_smoothing" else 0.0
        return linear_cross_entropy(x, w, y, reduction=reduction, label_smoothing=smoothing, **options)

    def token_loss(x: jax.Array, w: jax.Array, y: jax.Array, *per_token: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"vocab_axis": vocab_axis, "implementation": implementation}
        function = token_losses.ppo_clip(entropy_weight=0.01 * (mode == "token_entropy"))
        return linear_token_loss(x, w, y, function, *per_token, **options)

    def token_stats(x: jax.Array, w: jax.Array, y: jax.Array, *per_token: jax.Array) -> Any:
        options: dict[str, Any] = {"vocab_axis": vocab_axis, "implementation": implementation}
        return linear_token_loss_with_stats(x, w, y, token_losses.ppo_clip(), *per_token, **options)

    def none(x: jax.Array, w: jax.Array, y: jax.Array, d_loss: jax.Array) -> Any:
        losses, vjp = jax.vjp(lambda x, w: loss(x, w, y, "none"), x, w)
        return losses, vjp(d_loss)

    def grad_into(x: jax.Array, w: jax.Array, y: jax.Array, into: jax.Array) -> Any:
        options: dict[str, Any] = {"vocab_axis": vocab_axis, "implementation": implementation}
        loss = partial(linear_cross_entropy, linear_weight=w, target=y, grad_into=into, **options)
        return jax.value_and_grad(loss, has_aux=True)(x)

    def none_into(x: jax.Array, w: jax.Array, y: jax.Array, into: jax.Array, d_loss: jax.Array) -> Any:
        """Of two micro-batches in a scan."""
        options: dict[str, Any] = {"vocab_axis": vocab_axis, "implementation": implementation}

        def results(x: jax.Array, into: jax.Array, y: jax.Array) -> Any:
            if mode == "none_into":
                return linear_cross_entropy(x, w, y, reduction="none", grad_into=into, **options)
            found = linear_log_probs(x, w, y, grad_into=into, **options)
            return found.log_prob + found.entropy

        def step(into: jax.Array, batch: Any) -> Any:
            x, y, d_loss = batch
            losses, vjp = jax.vjp(partial(results, y=y), x, into)
            d_x, into = vjp(d_loss)
            return into, (losses, d_x)

        halves = jax.tree.map(lambda array: array.reshape(2, n // 2, *array.shape[1:]), (x, y, d_loss))
        return jax.lax.scan(step, into, halves)

    def split_head(x: jax.Array, w: jax.Array, y: jax.Array) -> Any:
        options: dict[str, Any] = {"vocab_axis": vocab_axis, "implementation": implementation}

        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return linear_cross_entropy(x, w, y, head_precision="float32", **options)

        return jax.value_and_grad(loss, argnums=(0, 1))(x, w)

    def saved(x: jax.Array, w: jax.Array, y: jax.Array, d_loss: jax.Array) -> Any:
        options: dict[str, Any] = {"vocab_axis": vocab_axis, "implementation": implementation}

        def log_prob(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = linear_log_probs(x, w, y, saved_budget=2**34, **options)
            return found.log_prob, found.entropy

        log_probs, vjp, entropy = jax.vjp(log_prob, x, w, has_aux=True)
        return log_probs, entropy, vjp(d_loss)

    head = (v, d) if vocab_axis == 0 else (d, v)
    donated: tuple[int, ...] = ()
    dtype = jnp.float32 if mode.startswith("float32") else jnp.float16 if "float16" in mode else jnp.bfloat16
    arguments = [shape((n, d), dtype), shape(head, dtype), shape((n,), jnp.int32)]
    function: Any = loss
    if mode in ("train", "float16", "float16_smoothing", "float32", "float32_scaled"):
        function = jax.value_and_grad(loss, argnums=(0, 1))
    elif mode in ("token_loss", "token_entropy"):
        function, arguments = (
            jax.value_and_grad(token_loss, argnums=(0, 1)),
            [*arguments, *[shape((n,), jnp.float32)] * 2],
        )
    elif mode == "token_stats":
        function = jax.value_and_grad(token_stats, argnums=(0, 1), has_aux=True)
        arguments += [shape((n,), jnp.float32)] * 2
    elif mode in ("none", "saved", "saved_float16"):
        function, arguments = none if mode == "none" else saved, [*arguments, shape((n,), jnp.float32)]
    elif mode == "grad_into":
        function, arguments, donated = grad_into, [*arguments, shape(head, jnp.float32)], (3,)
    elif mode in ("none_into", "log_probs_into"):
        function, donated = none_into, (3,)
        arguments += [shape(head, jnp.float32), shape((n,), jnp.float32)]
    elif mode == "split_head":
        function, arguments[1] = split_head, shape(head, jnp.float32)
    # Without a GPU XLA times no algorithms. On GPUs it chooses cuBLAS for float32.
    compiler_options = {"xla_gpu_enable_triton_gemm": False} if mode.startswith("float32") else None
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donated).lower(*arguments).compile(compiler_options)


# Instructions of a program that launch nothing.
NO_LAUNCH = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "while"}


def launches(program: str) -> int:
    """Returns how many kernels and copies a compiled program launches. Launches in a loop count once per iteration."""
    computations: dict[str, list[str]] = {}
    entry, body = "", []
    for line in program.splitlines():
        opening = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
        if opening:
            body = computations[opening[2]] = []
            entry = opening[2] if opening[1] else entry
        elif line.startswith("  "):
            body.append(re.sub(r"/\*.*?\*/", "", line))

    def count(name: str) -> int:
        total = 0
        for line in computations[name]:
            kind = re.match(r"\s+(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", line)
            assert kind is not None, line
            called = re.search(r"(?:body|to_apply)=%?([\w.-]+)", line)
            if kind[1] == "while" and called is not None:
                turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                assert turns is not None, f"the host waits for a loop to end: {line}"
                total += int(turns[1]) * count(called[1])
            elif kind[1] == "call" and called is not None:
                total += count(called[1])
            else:
                total += kind[1] not in NO_LAUNCH and not kind[1].endswith("-done") and "AllocateBuffer" not in line
        return total

    return count(entry)


def main() -> None:
    target, programs = Path(sys.argv[1]).read_text(), json.loads(sys.argv[2])
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    for program in programs:
        start = time.perf_counter()
        executable = compiled(mesh, **program)
        seconds = time.perf_counter() - start
        v, d = program["v"], program["d"]
        shapes = rf"{v},{d}|{d},{v}|{v},{2 * d}"  # the last: the memory of a float32 head
        moved = re.findall(rf"= \w+\[(?:{shapes})\]\S* (?:transpose|copy)\(.*", executable.as_text())
        temporaries = executable.memory_analysis().temp_size_in_bytes
        found = {"temporaries": temporaries, "moved": moved, "launches": launches(executable.as_text())}
        print(json.dumps({**program, **found, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
