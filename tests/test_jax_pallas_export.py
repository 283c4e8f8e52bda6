"""Lowers jax_pallas for devices that the machine does not have: jax.export for a CPU and a GPU, and the kernels in
each program.

Lowering Mosaic and Triton kernels needs no driver. None of them runs here.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax_problem import FUNCTIONS, gradients, problem

from jax_pallas.linear_ce import (
    explain,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    linear_log_probs,
    linear_token_loss_with_stats,
)

TRITON = "__gpu$xla.gpu.triton"
KERNELS = {"mosaic": {"mosaic_gpu_v2", TRITON}, "pallas_triton": {TRITON}, "chunked": set()}
GPUS = {
    "NVIDIA H200": "mosaic",
    "NVIDIA A100-SXM4-80GB": "pallas_triton",
    "NVIDIA B200": "pallas_triton",
    "Tesla T4": "chunked",
}


@contextlib.contextmanager
def traced_for(kind: str) -> Iterator[None]:
    """Makes tracing and lowering use the properties of a GPU that is not present."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "gpu"))):
        yield


def gradients_of(function: str = "mean", implementation: str | None = None) -> Any:
    return jax.jit(lambda arrays: gradients(function, arrays, implementation=implementation))


def exported(function: Any, arrays: dict[str, Any], *platforms: str) -> export.Exported:
    unstable = [export.DisabledSafetyCheck.custom_call(TRITON)]
    return export.export(function, platforms=platforms, disabled_checks=unstable)(arrays)


@cache
def exported_for(kind: str, function: str, *platforms: str) -> export.Exported:
    """Returns the program of the gradients of `bfloat16_problem`, traced for a GPU that is not present."""
    with traced_for(kind):
        return exported(gradients_of(function), bfloat16_problem(), *platforms)


def bfloat16_problem() -> dict[str, Any]:
    return problem(40, 64, 128, dtype="bfloat16")


def kernels_in(program: str) -> Counter[str]:
    return Counter(name for name in re.findall(r"stablehlo.custom_call @([^\s(]+)\(", program))


def assert_close(got: Any, want: Any) -> None:
    def close(a: Array, b: Array) -> None:
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2e-2, atol=1e-4)

    jax.tree.map(close, got, want)


@pytest.mark.parametrize("function", ["mean", "log_probs"])
def test_one_program_for_a_cpu_and_a_gpu(function: str) -> None:
    arrays, kind = bfloat16_problem(), "NVIDIA A100-SXM4-80GB"
    for_gpu = kernels_in(exported_for(kind, function, "cuda").mlir_module())
    both = exported_for(kind, function, "cpu", "cuda")
    assert kernels_in(both.mlir_module()) == for_gpu
    assert set(for_gpu) == KERNELS["pallas_triton"]
    assert_close(both.call(arrays), gradients_of(function, "chunked")(arrays))  # on the CPU it runs without kernels


def test_what_is_saved_belongs_to_the_platform_that_a_call_is_traced_for() -> None:
    arrays = problem(40, 64, 128, dtype="bfloat16", bias=False)
    message = "saved_budget must be 0 where a call is traced for 'pallas_triton' and lowered for a cpu device"

    def saving(implementation: str | None = None) -> Any:
        options: dict[str, Any] = {"reduction": "none", "saved_budget": 2**24, "implementation": implementation}
        names = ("input", "linear_weight")

        def loss(d: dict[str, Array]) -> Array:
            return linear_cross_entropy(**arrays | d, **options).sum()

        return jax.jit(lambda arrays: jax.grad(loss)({name: arrays[name] for name in names}))

    with traced_for("NVIDIA A100-SXM4-80GB"):
        kernels = kernels_in(exported(saving(), arrays, "cuda").mlir_module())
        with pytest.raises(ValueError, match=message):
            exported(saving(), arrays, "cpu", "cuda")
        exported(saving("chunked"), arrays, "cpu", "cuda")
    assert kernels[TRITON]
    assert_close(saving()(arrays), saving("chunked")(arrays))  # not the arrays that the exported program saves


@pytest.mark.parametrize("kind", GPUS)
def test_a_gpu_gets_its_kernels(kind: str) -> None:
    arrays = bfloat16_problem()
    with traced_for(kind):
        assert explain(jax.ShapeDtypeStruct((40, 64), jnp.bfloat16), arrays["linear_weight"]).name == GPUS[kind]  # pyright: ignore[reportArgumentType]
    assert set(kernels_in(exported_for(kind, "mean", "cpu", "cuda").mlir_module())) == KERNELS[GPUS[kind]]
    assert not kernels_in(exported_for(kind, "mean", "cpu").mlir_module())


def test_no_kernel_without_a_gpu() -> None:
    arrays = bfloat16_problem()
    assert not kernels_in(exported(gradients_of(), arrays, "cpu", "cuda").mlir_module())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_program_for_one_platform_has_no_branch_for_another(function: str) -> None:
    arrays = problem()
    program = gradients_of(function).lower(arrays).as_text()
    assert "stablehlo.case" not in program
    assert not kernels_in(program)
    assert program == gradients_of(function, "chunked").lower(arrays).as_text()


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_named_implementation_is_lowered_for_a_gpu(implementation: str) -> None:
    arrays = bfloat16_problem()
    function = jax.jit(lambda arrays: linear_cross_entropy(**arrays, implementation=implementation))
    with traced_for("NVIDIA H200"):
        if implementation != "chunked":
            with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
                export.export(function, platforms=["cuda"])(arrays)
            program = exported(function, arrays, "cuda")
        else:
            program = export.export(function, platforms=["cuda"])(arrays)
    assert set(kernels_in(program.mlir_module())) == KERNELS[implementation]


def test_shapes_of_a_named_implementation_need_no_gpu() -> None:
    arrays = bfloat16_problem()
    shapes = jax.eval_shape(gradients_of(implementation="mosaic"), arrays)
    assert shapes["linear_weight"].shape == arrays["linear_weight"].shape
    with pytest.raises(ValueError, match="the Hopper kernels need an NVIDIA GPU"):
        gradients_of(implementation="mosaic").lower(arrays)


def test_an_exported_loss_is_differentiable_after_serialization() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serializes by it")
    arrays = problem()
    x, w, rest = arrays.pop("input"), arrays.pop("linear_weight"), arrays

    @jax.jit
    def loss(x: Array, w: Array) -> Array:
        return linear_cross_entropy(x, w, **rest)

    written = export.export(loss, platforms=["cpu", "cuda"])(x, w).serialize(vjp_order=1)
    again = export.deserialize(written)
    got = jax.value_and_grad(again.call, argnums=(0, 1))(x, w)
    assert_close(got, jax.value_and_grad(loss, argnums=(0, 1))(x, w))


RESULTS: dict[str, Any] = {
    "LogProbs": linear_log_probs,
    "LossStats": linear_cross_entropy_with_stats,
    "TokenStats": partial(linear_token_loss_with_stats, token_loss=jnp.negative, stats=("lse", "argmax")),
}


@pytest.mark.parametrize("name", RESULTS)
def test_named_results_are_serialized(name: str) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serializes by it")
    arrays, function = problem(), jax.jit(lambda arrays: RESULTS[name](**arrays))
    want = function(arrays)
    got = export.deserialize(export.export(function)(arrays).serialize()).call(arrays)
    results = got if name == "LogProbs" else got[1]
    assert type(results).__name__ == name
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_close(got, want)
