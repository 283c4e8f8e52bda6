"""Launches kernels of Pallas' Triton backend, and the loads and stores of their bodies.

JAX deprecates that backend. Calls that name "pallas_triton" have chosen it, so its warning is suppressed. Lowered for a
CPU, a kernel runs in Pallas' interpreter.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from jax_pallas.primitives import compiled


class _Launch(NamedTuple):
    """A kernel, which takes `options` and a Ref for each operand and result (None for None), and how it is launched."""

    kernel: Callable[..., None]
    options: Any
    grid: tuple[int, ...]
    operands: Any  # their tree
    results: tuple[jax.ShapeDtypeStruct | None, ...]
    aliases: tuple[tuple[int, int], ...]  # of flat operands and flat results
    params: plgpu.CompilerParams

    def __call__(self, *leaves: Array, interpret: bool) -> list[Array]:
        static_args = {"grid": self.grid, "input_output_aliases": dict(self.aliases), "compiler_params": self.params}
        kernel, name = partial(self.kernel, self.options), self.kernel.__name__
        results = jax.tree.map(lambda result: ShapedArray(result.shape, result.dtype), self.results)  # jax.shard_map
        call = pl.pallas_call(kernel, results, interpret=interpret, name=name, **static_args)
        return jax.tree.leaves(call(*self.operands.unflatten(leaves)))


def _lower(ctx: Any, *leaves: Any, launch: _Launch, interpret: bool) -> Any:
    with warnings.catch_warnings():  # a user who names this implementation has chosen its backend
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return mlir.lower_fun(partial(launch, interpret=interpret), multiple_results=True)(ctx, *leaves)


def _one_by_one(*leaves: Array, launch: _Launch) -> list[Array]:
    """Runs a kernel in a separate program, in a context in which nothing else is compiled."""
    platform = next(iter(leaves[0].devices())).platform
    with jax.disable_jit(False):
        return jax.jit(partial(launch, interpret=platform == "cpu"))(*leaves)


_launch_p = Primitive("pallas_triton_launch")
_launch_p.multiple_results = True


@_launch_p.def_abstract_eval
def _result_types(*_: Any, launch: _Launch) -> list[ShapedArray]:
    """Returns types as JAX's own operations give their results: of others, equal calls would be lowered again."""
    mesh = get_abstract_mesh()

    def typed(result: jax.ShapeDtypeStruct) -> ShapedArray:
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(result.shape)))
        return ShapedArray(result.shape, result.dtype, sharding=sharding)

    return [typed(result) for result in jax.tree.leaves(launch.results)]


_launch_p.def_impl(compiled(_launch_p, _one_by_one, "launch"))
mlir.register_lowering(_launch_p, partial(_lower, interpret=False), platform="cuda")
mlir.register_lowering(_launch_p, partial(_lower, interpret=True), platform="cpu")


def run(
    kernel: Callable[..., None], options: Any, operands: tuple[Any, ...], results: tuple[Any, ...],
    grid: tuple[int, ...], *, in_place: int = 0, warps: int = 8, stages: int = 3,
) -> Any:  # fmt: skip
    """Runs a kernel and returns its results, the first `in_place` of which take the places of the last operands."""
    leaves, tree = jax.tree.flatten(operands)
    results = jax.tree.map(lambda result: jax.ShapeDtypeStruct(result.shape, result.dtype), results)
    aliases = tuple((len(leaves) - in_place + i, i) for i in range(in_place))
    params = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    launch = _Launch(kernel, options, grid, tree, results, aliases, params)
    return jax.tree.unflatten(jax.tree.structure(results), _run(*leaves, launch=launch))


@partial(jax.jit, static_argnames="launch")  # equal launches are lowered once
def _run(*leaves: Array, launch: _Launch) -> list[Array]:
    return sequential_vmap(lambda *leaves: _launch_p.bind(*leaves, launch=launch))(*leaves)


def arange(start: Any, size: int) -> Array:
    return start + jnp.arange(size, dtype=jnp.int32)


def load(ref: Any, *index: Any, mask: Any = None) -> Array:
    """Returns ref[index], 0 outside the mask."""
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)


def raise_to(ref: Any, index: Any, values: Array) -> None:
    """Raises ref[index] to at least `values`, for any order of the programs."""
    plgpu.atomic_max(ref, (index,), values)


def store(ref: Any, *index: Any, values: Array, mask: Array) -> None:
    plgpu.store(ref.at[index], values.astype(ref.dtype), mask=mask)
