"""What a call of jax_pallas launches on a GPU that is not present, for `benchmarks.same_launches`.

JAX lowers a call for a named GPU, and the program that results has each kernel as the bytecode of an MLIR module.
Neither is compiled here: the same versions of XLA and Mosaic make the same machine code of the same program.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.mlir import make_ir_context
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

from benchmarks.results import COMPARED_METHODS, short_hash
from benchmarks.same_launches import CODE, Step
from benchmarks.shapes import Mode, Shape
from jax_pallas.linear_ce import linear_cross_entropy

CONFIG = "mhlo.backend_config"
BYTECODE = ("module", "ir")  # of a kernel of Mosaic, of Triton
KERNEL_HASH = "kernel_hash"  # of the bytecode, which contains line numbers
DUMP = "mosaic_gpu.dump_basename"  # ends in a count of the kernels of the process


def steps_of(shape: Shape, mode: Mode, gpu: str) -> list[Step]:
    """Returns a step for each kernel of the forward and backward pass of a call, and at last one for the program.

    A step of a kernel is its name, its launch and a hash of its code. The program's text contains no kernel. Line
    numbers and comments are in neither.
    """

    def call(x: jax.Array, w: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        options: dict[str, Any] = {"memory_budget": mode.memory_budget, "implementation": COMPARED_METHODS["jax"]}
        loss, vjp = jax.vjp(lambda x, w: linear_cross_entropy(x, w, y, **options), x, w)
        return loss, *vjp(jnp.ones((), loss.dtype))

    x, w = (jax.ShapeDtypeStruct((rows, shape.d), jnp.bfloat16) for rows in (shape.n, shape.v))
    y = jax.ShapeDtypeStruct((shape.n,), jnp.int32)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(gpu, 1, "gpu"))):
        program: Any = jax.jit(call).trace(x, w, y).lower(lowering_platforms=("cuda",)).compiler_ir()
    steps = []
    with program.context:
        for operation in _operations(program.operation):
            if CONFIG not in operation.attributes:
                continue
            config = {one.name: one.attr for one in operation.attributes[CONFIG] if one.name != KERNEL_HASH}
            code = [config.pop(name) for name in BYTECODE if name in config]
            operation.attributes[CONFIG] = ir.DictAttr.get(config)
            if code:
                kernel = f"{operation.attributes['call_target_name'].value} {config.get('name', '')}"
                steps.append({"kernel": kernel, CODE: _hash_of_bytecode(code[0]), "with": str(config)})
    return [*steps, {"kernel": "the program", CODE: _hash_of_module(program)}]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _hash_of_bytecode(bytecode: Any) -> str:
    with make_ir_context() as context:
        triton_dialect.register_dialect(context)
        context.allow_unregistered_dialects = True  # Mosaic's, in their stable form
        return _hash_of_module(ir.Module.parse(ir.StringAttr(bytecode).value_bytes))


def _hash_of_module(module: Any) -> str:
    if DUMP in module.operation.attributes:
        del module.operation.attributes[DUMP]
    return short_hash(str(module.operation.get_asm(enable_debug_info=False)))
