"""Compiles the JAX loss for 8 GPUs that are not present. Prints the temporaries of a device and the collectives, one
JSON line per program.

test_jax_pallas_gpus_compile.py runs it in a subprocess as `python compile_for_gpus.py TARGET.pbtxt PROGRAMS`. PROGRAMS
is a JSON list of dicts with the keys form (one of FORMS), n (tokens of all devices), d, v and implementation.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_pallas
from jax_pallas import sharded

DEVICES = 8

# The axes that a call names, and how the axes of tokens and the head are divided. None: a plain call.
FORMS: dict[str, tuple[dict[str, Any] | None, P, P]] = {
    "batch": ({"batch_axis_names": "x"}, P("x"), P()),
    "vocabulary": ({"vocab_axis_name": "x"}, P(), P("x")),
    "fsdp, tokens": ({"fsdp_axis_name": "x", "gather": "tokens"}, P("x"), P("x")),
    "fsdp, head": ({"fsdp_axis_name": "x", "gather": "head"}, P("x"), P("x")),
    "fsdp on D": ({"fsdp_axis_name": "x", "gather": "head"}, P("x"), P(None, "x")),
    "plain, replicated head": (None, P("x"), P()),
    "plain, head on V": (None, P("x"), P("x")),
    "plain, head on D": (None, P("x"), P(None, "x")),
}


def compiled(mesh: Any, form: str, n: int, d: int, v: int, implementation: str | None) -> Any:
    axes, rows, head = FORMS[form]

    def shape(dims: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    def loss(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        if axes is None:
            return jax_pallas.linear_cross_entropy(x, w, y, implementation=implementation)
        return sharded.linear_cross_entropy(x, w, y, **axes, implementation=implementation)

    arguments = shape((n, d), jnp.bfloat16, rows), shape((v, d), jnp.bfloat16, head), shape((n,), jnp.int32, rows)
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()


COLLECTIVE = re.compile(
    r"= (?P<types>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


def collectives(program: str) -> list[dict[str, Any]]:
    """Returns the kind of each collective of a compiled program, the types of its results with those of its operands,
    and whether it is in a loop."""
    computations: dict[str, list[str]] = {}
    body: list[str] = []
    for line in program.splitlines():
        opening = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if opening:
            body = computations[opening[1]] = []
        elif line.startswith("  "):
            body.append(re.sub(r"/\*.*?\*/", "", line))
    loops = {
        name for lines in computations.values() for line in lines for name in re.findall(r"body=%?([\w.-]+)", line)
    }
    called = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.-]+)")
    inside, waiting = set(loops), list(loops)
    while waiting:
        for line in computations.get(waiting.pop(), []):
            new = {*called.findall(line)} - inside
            inside |= new
            waiting += new
    found: list[dict[str, Any]] = []
    for name, lines in computations.items():
        for line in lines:
            match = COLLECTIVE.search(line)
            if match:
                types = re.findall(r"(\w+)\[([\d,]*)\]", match["types"])
                shapes = [[dtype, *map(int, filter(None, dims.split(",")))] for dtype, dims in types]
                found.append({"kind": match["kind"], "types": shapes, "loop": name in inside})
    return found


def main() -> None:
    target, programs = Path(sys.argv[1]).read_text(), json.loads(sys.argv[2])
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{DEVICES}")
    mesh = topologies.make_mesh(topology, (DEVICES,), ("x",))
    for program in programs:
        start, result = time.perf_counter(), dict[str, Any](program)
        try:
            executable = compiled(mesh, **program)
        except ValueError as error:
            result["error"] = str(error)
        else:
            result["temporaries"] = executable.memory_analysis().temp_size_in_bytes
            result["collectives"] = collectives(executable.as_text())
        print(json.dumps({**result, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
