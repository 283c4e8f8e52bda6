"""Runs a case of `parity` on a mesh of several devices, within `jax.shard_map`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_pallas
from parity.backends import function_of, options_of, roots_of
from parity.cases import GRAD_INTO_START, Case
from parity.expected import GRADIENT_OF, compare, expected, outputs_of


def mesh_of(kind: AxisType = AxisType.Auto, /, **axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def small_budget(case: Case, mesh: Mesh, gather: str | None = None) -> int:
    """Returns a memory budget with which each device has at least three chunks of rows, and two of the vocabulary."""
    vocab = mesh.shape.get("vocab", 1) * (mesh.shape.get("fsdp", 1) if gather == "tokens" else 1)
    w = (case.vocab // vocab, case.hidden)
    x: Any = jax.ShapeDtypeStruct((case.n * vocab // mesh.size, case.hidden), case.dtype)
    head: Any = jax.ShapeDtypeStruct(w if case.vocab_axis == 0 else w[::-1], case.weight_dtype)
    options: dict[str, Any] = {"vocab_axis": case.vocab_axis, "implementation": "chunked"}
    options |= {"softcap": case.spec.softcap, "head_precision": case.spec.head_precision, "with_entropy": True}
    try:
        jax_pallas.explain(x, head, **options, memory_budget=1)
    except ValueError as error:
        budget = int(str(error).split("at least ")[1].split()[0])
    else:
        raise AssertionError
    chunks = jax_pallas.explain(x, head, **options, memory_budget=budget).plan.chunk_config
    assert x.shape[0] > 2 * chunks.rows
    assert w[0] > chunks.vocab_chunk
    return budget


def operands_of(case: Case, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns NumPy arrays, because JAX would compile programs that cast its own arrays and divide them, for each
    shape."""
    dtypes: dict[str, str] = {"input": case.dtype, "linear_weight": case.weight_dtype, "linear_bias": case.weight_dtype}
    dtypes |= {"weight": case.dtype, "target": "int32"} | dict.fromkeys(case.per_token, case.per_token_dtype)
    operands = {name: value.astype(jnp.dtype(dtypes.get(name, "float32"))) for name, value in arrays.items()}
    if case.vocab_axis == 1:
        operands["linear_weight"] = operands["linear_weight"].T
    return operands


def is_scalar(case: Case) -> bool:
    return case.function != "log_probs" and case.spec.reduction != "none"


def outputs_of_call(case: Case, package: Any, operands: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Returns the outputs of a case by name, with its gradients. With grad_into, d_weight is the new sum, less
    GRAD_INTO_START for a scalar loss."""
    operands = dict(operands)
    upstream = [operands.pop(f"d_{name}") for name in roots_of(case)]
    names = {d: name for d, name in GRADIENT_OF.items() if name in operands and name not in case.frozen}
    if case.grad_into:
        del names["d_weight"]
        if not is_scalar(case):
            names["d_weight"] = "grad_into"
    others = {name: value for name, value in operands.items() if name not in names.values()}
    others = {name: value for name, value in others.items() if not name.startswith("d_")}

    def call(differentiated: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        outputs = function_of(package, case)(**differentiated, **others, **keywords)
        return [outputs[name] for name in roots_of(case)], outputs

    _, pull_back, outputs = jax.vjp(call, {name: operands[name] for name in names.values()}, has_aux=True)
    gradients = pull_back(upstream)[0]
    outputs |= {d: gradients[name] for d, name in names.items()}
    return {name: outputs[name] for name in outputs_of(case)}


def exported(case: Case, found: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    def one(name: str) -> np.ndarray:
        floating, array = jnp.issubdtype(found[name].dtype, jnp.floating), np.asarray(found[name])
        array = array.T if name == "d_weight" and case.vocab_axis == 1 else array
        return array.astype(np.float32) if floating else array

    return {name: one(name) for name in found}


def head_spec(case: Case, names: tuple[str, ...] | None) -> P:
    return P(names) if case.vocab_axis == 0 else P(None, names)


def small_head(case: Case) -> dict[str, Any]:
    """Returns D and V of a case on several devices. Saved rows are rounded twice, which takes 102% of the budget with
    D 16, on one device too. So their cases keep their sizes."""
    return {"hidden": case.hidden, "vocab": case.vocab} if case.saved_budget else {"hidden": 16, "vocab": 320}


def run_sharded(
    case: Case, arrays: Mapping[str, np.ndarray], mesh: Mesh, implementation: str | None = None, **options: Any
) -> dict[str, np.ndarray]:
    """Returns the outputs of a case, in small chunks. The axis "vocab" of the mesh divides the vocabulary, if it has
    one, and the other axes divide the tokens. The axis "fsdp" divides both. Arrays that are not divided are the same
    on all devices, which `out_specs` checks."""
    rows = P(tuple(name for name in mesh.axis_names if name != "vocab") or None)
    vocab = tuple(name for name in ("vocab", "fsdp") if name in mesh.axis_names) or None
    head, scalar = head_spec(case, vocab), is_scalar(case)
    specs = {"linear_weight": head, "linear_bias": P(vocab), "weight": P(), "normalizer": P()}
    if "memory_budget" not in options:
        options["memory_budget"] = small_budget(case, mesh, options.get("gather"))
    if rows[0]:
        options["token_axis_names"] = rows[0]
    operands = operands_of(case, arrays)
    spec_of = {name: P() if scalar and name == "d_loss" else specs.get(name, rows) for name in operands}
    axes = ()
    if case.grad_into:
        axes = tuple(name for name in mesh.axis_names if name not in ("vocab", "fsdp"))
        devices = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
        # An array for each device of the tokens, which starts at a part of the whole.
        whole = (devices, *operands["linear_weight"].shape)
        operands["grad_into"] = np.full(whole, GRAD_INTO_START / devices, np.float32)
        spec_of["grad_into"] = P(axes or None, *head)
    keywords = options_of(case, implementation) | {"vocab_axis": case.vocab_axis} | options

    def body(operands: dict[str, Any]) -> dict[str, Any]:
        operands = dict(operands)
        if case.grad_into:
            operands["grad_into"] = operands["grad_into"][0]
        outputs = outputs_of_call(case, jax_pallas, operands, keywords)
        if case.grad_into:
            total = outputs["d_weight"] + (GRAD_INTO_START if scalar else 0.0)  # `function_of` subtracts it
            outputs["d_weight"] = (jax.lax.psum(total, axes) if axes else total) - GRAD_INTO_START
        return outputs

    whole_results = {"accuracy", "n_valid", *(("loss", "z_loss") if scalar else ())}
    out = {name: P() if name in whole_results else rows for name in outputs_of(case)}
    out |= {"d_weight": head, "d_bias": P(vocab)}
    out = {name: out[name] for name in outputs_of(case)}
    return exported(case, jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec_of,), out_specs=out))(operands))


def run_global(
    case: Case,
    arrays: Mapping[str, np.ndarray],
    mesh: Mesh,
    *,
    package: Any,
    rows: P,
    head: P,
    gather: str | None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Returns the outputs of a case on arrays of global shape, in small chunks.

    Args:
        package: the module whose functions run.
        rows: how the axes of tokens are divided.
        head: how the axes of linear_weight are divided, of classes and of D.
    """
    operands = operands_of(case, arrays)
    if case.grad_into:
        operands["grad_into"] = np.full(operands["linear_weight"].shape, GRAD_INTO_START, np.float32)
    of_head = P(*head[::-1]) if case.vocab_axis else head
    specs = {
        "linear_weight": of_head,
        "grad_into": of_head,
        "linear_bias": P(head[0]),
        "weight": P(),
        "normalizer": P(),
    }
    placed = {
        name: jax.device_put(value, NamedSharding(mesh, specs.get(name, P() if value.ndim == 0 else rows)))
        for name, value in operands.items()
    }
    if "memory_budget" not in options:
        options["memory_budget"] = small_budget(case, mesh, gather)
    keywords = options_of(case, "chunked") | {"vocab_axis": case.vocab_axis, "gather": gather} | options
    with jax.set_mesh(mesh):
        found = exported(case, jax.jit(lambda operands: outputs_of_call(case, package, operands, keywords))(placed))
    if case.grad_into and not is_scalar(case):
        found["d_weight"] = found["d_weight"] - GRAD_INTO_START
    return found


def assert_within_budget(case: Case, arrays: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
    """Fails if an error exceeds the budget of the case on one device."""
    comparisons = compare(case, expected(case, arrays), outputs)
    used = ", ".join(f"{name} {comparison.percent:.0f}%" for name, comparison in comparisons.items())
    assert all(comparison.percent <= 100 for comparison in comparisons.values()), f"{case.name} used: {used}"
