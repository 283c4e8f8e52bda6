"""JAX's side of `benchmarks.scale_out`: one process for all GPUs, and `jax_pallas.sharded` over a mesh of one axis."""

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_pallas
from benchmarks.jax_bench import JaxBench
from benchmarks.methods import describe
from benchmarks.scale_out import BUDGET, FORMS, Form, Work, in_turns, on_each, row_of
from benchmarks.shapes import Mode
from benchmarks.trace import CALLS, by_kernel, trace_jax
from jax_pallas import sharded

AXIS = "gpus"
METHODS = {"jax_pallas": FORMS}
AXES: dict[Form, dict[str, Any]] = {
    "vocabulary": {"vocab_axis_name": AXIS},
    "tokens": {"fsdp_axis_name": AXIS, "gather": "tokens"},
    "head-gathered": {"fsdp_axis_name": AXIS, "gather": "head"},
}


def measure(works: Sequence[Work], device: str, add: Callable[[dict[str, Any]], None]) -> None:
    """Measures each of `works`, which have the same number of GPUs, and calls `add` with what was measured."""
    gpus = works[0].gpus
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast needs what not every container has
    if device == "cpu":
        jax.config.update("jax_num_cpu_devices", gpus)
    bench = JaxBench(device)
    if len(jax.devices()) < gpus:
        raise RuntimeError(f"--gpus must be at most the number of GPUs, {len(jax.devices())}, got {gpus}")
    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    add({"device": f"{gpus} x {bench.device}" if bench.gpu else bench.device, "versions": versions})
    for work in works:
        try:
            add(row_of(work, "jax", _measured(work, bench)))
        except Exception as error:
            traceback.print_exc()
            add(work.of_row("jax") | {"status": "failed", "note": describe(error)})
        bench.release()


def _measured(work: Work, bench: JaxBench) -> dict[str, Any]:
    problem: Any = bench.problem(replace(work.shape, n=work.all_tokens), "bfloat16", "peaked")
    mesh = jax.make_mesh((work.gpus,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[: work.gpus])
    x, w, target = problem.input, problem.weight, problem.target
    tokens = P() if work.form == "vocabulary" else P(AXIS)
    placed = tuple(NamedSharding(mesh, spec) for spec in (tokens, P(AXIS), tokens))
    arrays = jax.device_put((x, w, target), placed)
    n = work.shape.n
    whole = x[:n], w, target[:n]

    def of_all(x: Array, w: Array, target: Array) -> Array:
        return sharded.linear_cross_entropy(x, w, target, mesh=mesh, memory_budget=BUDGET, **AXES[work.form])

    def of_one(x: Array, w: Array, target: Array) -> Array:
        return jax_pallas.linear_cross_entropy(x, w, target, memory_budget=BUDGET)

    gradients = jax.value_and_grad(of_all, argnums=(0, 1))
    results = NamedSharding(mesh, P()), placed[:2]
    several = jax.jit(gradients, out_shardings=results).lower(*arrays).compile()
    single = jax.jit(jax.value_and_grad(of_one, argnums=(0, 1))).lower(*whole).compile()
    analysis = several.memory_analysis()
    assert analysis is not None
    found = {
        "workspace_bytes": analysis.temp_size_in_bytes,
        "device_bytes": None,
        "nccl_max_ctas": os.environ.get("NCCL_MAX_CTAS"),
        **_errors(problem, several(*arrays)[1], single(*whole)[1] if work.form == "vocabulary" else None),
    }
    problem.forget()
    if work.kernels and bench.gpu:
        found["by_kernel"] = by_kernel(trace_jax(lambda: several(*arrays)), CALLS * work.gpus)  # of a GPU

    def timed(run: Callable[[], Any]) -> Callable[[int], float]:
        def block(calls: int) -> float:
            jax.block_until_ready(run())
            start, results = time.perf_counter(), None
            for _ in range(calls):
                results = run()
                if not bench.gpu:  # XLA's threads for CPU devices would wait for each other's calls
                    jax.block_until_ready(results)
            jax.block_until_ready(results)
            return 1000 * (time.perf_counter() - start) / calls

        return block

    blocks = timed(partial(several, *arrays)), timed(partial(single, *whole))
    counts = []
    for block in blocks:
        block(max(1, round(1000 * work.warmup / block(2))))
        counts.append(max(1, round(1000 * work.seconds / block(2))))
    found |= in_turns(work, *blocks, (counts[0], counts[1]))
    if not work.every_gpu:
        return found
    alone = [blocks[1]]
    for device in jax.devices()[1 : work.gpus]:
        there = jax.device_put(whole, device)
        compiled = jax.jit(jax.value_and_grad(of_one, argnums=(0, 1))).lower(*there).compile()
        alone.append(timed(partial(compiled, *there)))
    return found | on_each(work, alone, counts[1])


def _errors(problem: Any, of_all: tuple[Array, Array], of_one: tuple[Array, Array] | None) -> dict[str, float]:
    """Returns the errors of d_input and d_weight, of all GPUs and of one. None: the one has other tokens."""
    _, *exact = problem.reference(Mode("train"))
    found = {}
    for place, name in enumerate(("d_input", "d_weight")):
        gathered = jnp.asarray(np.asarray(of_all[place]))
        found[f"err_{name}"] = float(_error(gathered, exact[place]))
        found[f"one_gpu_err_{name}"] = float("nan") if of_one is None else float(_error(of_one[place], exact[place]))
    return found


@jax.jit
def _error(gradient: Array, exact: Array) -> Array:
    return jnp.linalg.norm((gradient.astype(jnp.float32) - exact).ravel()) / jnp.linalg.norm(exact.ravel())
