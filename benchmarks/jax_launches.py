"""What a call of jax_pallas launches on a GPU that is not present, for `benchmarks.same_launches`.

JAX lowers a call for a named GPU, and the program that results has each kernel as the bytecode of an MLIR module.
Neither is compiled here: the same versions of XLA and Mosaic make the same machine code of the same program.
`jax_ptx.py` compiles kernels of Mosaic whose modules are not the same.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.mlir import make_ir_context
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager
from jaxlib.triton import dialect as triton_dialect

from benchmarks import jax_ptx
from benchmarks.results import COMPARED_METHODS, short_hash
from benchmarks.same_launches import CODE, Step
from benchmarks.shapes import Mode, Shape
from jax_pallas.linear_ce import linear_cross_entropy

CONFIG = "mhlo.backend_config"
MOSAIC, TRITON = "module", "ir"  # the bytecode of a kernel
CANONICAL = "canonicalize"  # what XLA itself does to the code of Triton before anything else
KERNEL_HASH = "kernel_hash"  # of the bytecode, which contains line numbers


def steps_of(shape: Shape, mode: Mode, gpu: str, modules: Path | None = None) -> list[Step]:
    """Returns the steps of the forward and backward pass of a call: `steps_in`."""

    def call(x: jax.Array, w: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        options: dict[str, Any] = {"memory_budget": mode.memory_budget, "implementation": COMPARED_METHODS["jax"]}
        loss, vjp = jax.vjp(lambda x, w: linear_cross_entropy(x, w, y, **options), x, w)
        return loss, *vjp(jnp.ones((), loss.dtype))

    x, w = (jax.ShapeDtypeStruct((rows, shape.d), jnp.bfloat16) for rows in (shape.n, shape.v))
    y = jax.ShapeDtypeStruct((shape.n,), jnp.int32)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(gpu, 1, "gpu"))):
        program: Any = jax.jit(call).trace(x, w, y).lower(lowering_platforms=("cuda",)).compiler_ir()
    return steps_in(program, modules)


def steps_in(program: Any, modules: Path | None = None) -> list[Step]:
    """Returns a step for each kernel of a lowered program, and at last one for the program.

    A step of a kernel is its name, its launch and a hash of its code. The program's text contains no kernel. Line
    numbers and comments are in neither. If there is a folder `modules`, kernels of Mosaic are kept there for
    `jax_ptx.compile_all`.
    """
    steps = []
    with program.context:
        for operation in _operations(program.operation):
            if CONFIG not in operation.attributes:
                continue
            whole = {one.name: one.attr for one in operation.attributes[CONFIG]}
            config = {name: one for name, one in whole.items() if name not in (KERNEL_HASH, MOSAIC, TRITON)}
            code = _hash_of_kernel(whole)
            if code is not None and modules is not None and MOSAIC in whole:
                jax_ptx.keep(operation, modules / code)
            operation.attributes[CONFIG] = ir.DictAttr.get(config)
            if code is not None:
                kernel = f"{operation.attributes['call_target_name'].value} {config.get('name', '')}"
                steps.append({"kernel": kernel, CODE: code, "with": str(config)})
    return [*steps, {"kernel": "the program", CODE: short_hash(jax_ptx.bare_text(program))}]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _hash_of_kernel(config: dict[str, Any]) -> str | None:
    """Returns a hash of a kernel's code; None if there is no kernel."""
    if MOSAIC in config:
        return _hash_of_bytecode(config[MOSAIC], "")
    return _hash_of_bytecode(config[TRITON], CANONICAL) if TRITON in config else None


def _hash_of_bytecode(bytecode: Any, passes: str) -> str:
    with make_ir_context() as context:
        triton_dialect.register_dialect(context)
        context.allow_unregistered_dialects = True  # Mosaic's, in their stable form
        module = ir.Module.parse(ir.StringAttr(bytecode).value_bytes)
        PassManager.parse(f"builtin.module({passes})", context).run(module.operation)
        return short_hash(jax_ptx.bare_text(module))
