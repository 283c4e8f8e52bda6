"""Backends by name: NumPy arrays in, NumPy arrays out. The only module of parity that uses a framework.

Frameworks are imported when a backend runs, never at import. As a program (`python -m parity.backends`) it is the
process of one framework: it runs the cases on the named backends, writes the outputs of each as .npz, and says so in
one line of JSON each on standard output.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parity.arrays import make_arrays
from parity.cases import GRAD_INTO_START, Case, select
from parity.expected import GRADIENT_OF, dtype_of, outputs_of
from parity.token_losses import FORMS

Arrays = Mapping[str, np.ndarray]

FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}  # their names in tables, pictures and messages


class Outcome(NamedTuple):
    """The outputs of a backend for a case, and the implementation that ran."""

    implementation: str
    platform: str  # "cpu", "cuda", ...
    device: str  # its name
    outputs: dict[str, np.ndarray]  # float32, or integer


@dataclass(frozen=True)
class Backend:
    """A framework, and the implementation requested by name; None is the default.

    An implementation that some machines do not support is left out unless it is selected by name.
    """

    framework: str
    implementation: str | None
    runs_anywhere: bool = True


BACKENDS = {
    "torch-default": Backend("torch", None),
    "torch-triton": Backend("torch", "triton", runs_anywhere=False),
    "torch-triton_sm80": Backend("torch", "triton_sm80", runs_anywhere=False),
    "torch-chunked": Backend("torch", "chunked"),
    "jax-default": Backend("jax", None),
    "jax-mosaic": Backend("jax", "mosaic", runs_anywhere=False),
    "jax-pallas_triton": Backend("jax", "pallas_triton", runs_anywhere=False),
    "jax-chunked": Backend("jax", "chunked"),
}

# What a default must run where it is not "chunked": there, "chunked" means that a kernel was left out. In float32 XLA's
# matmuls are two to three times as fast as those of a Pallas kernel.
EXPECTED_DEFAULT = {
    ("torch", "cuda", "float32"): ("triton",),
    ("torch", "cuda", "float16"): ("triton",),
    ("torch", "cuda", "bfloat16"): ("triton",),
    ("jax", "gpu", "float16"): ("mosaic", "pallas_triton"),
    ("jax", "gpu", "bfloat16"): ("mosaic", "pallas_triton"),
}


def expected_default(framework: str, platform: str, dtype: str) -> tuple[str, ...]:
    """Returns the implementations that a framework's default may run on a platform for an input of a dtype."""
    return EXPECTED_DEFAULT.get((framework, platform, dtype), ("chunked",))


def installed(framework: str) -> bool:
    """Returns whether a framework can be imported, without importing it."""
    return importlib.util.find_spec(framework) is not None


def obstacle(name: str) -> str:
    """Returns why no case of a backend can run on this machine; empty if its implementation supports a small bfloat16
    call."""
    backend = BACKENDS[name]
    if backend.runs_anywhere:
        return ""
    choose = {"torch": _choose_torch, "jax": _choose_jax}[backend.framework]
    try:
        choose(backend.implementation)
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def run_case(name: str, case: Case, arrays: Arrays) -> Outcome:
    """Runs a case on a backend.

    Args:
        name: a key of `BACKENDS`.
        case: the description.
        arrays: `make_arrays(case)`.

    Returns:
        The outputs named by `outputs_of(case)`, and the implementation that ran.

    Raises:
        ValueError: no such backend.
        TypeError: an output has another dtype than the contract says.

    Example:
        >>> from parity.cases import cases
        >>> run_case("torch-chunked", cases()[0], make_arrays(cases()[0])).implementation  # doctest: +SKIP
        'chunked'
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    backend = BACKENDS[name]
    run = _RUNNERS[backend.framework](backend.implementation, case, arrays)
    outputs = {}
    for output in outputs_of(case):
        outputs[output], dtype = run.results[output]
        if output in ("n_valid", "argmax"):
            if not dtype.startswith("int"):
                raise TypeError(f"{output} must be an integer, got {dtype}")
        elif dtype != dtype_of(case, output):
            raise TypeError(f"{output} must be {dtype_of(case, output)}, got {dtype}")
    return Outcome(run.implementation, run.platform, run.device, outputs)


class _Run(NamedTuple):
    """What a framework's runner returns: each output as a NumPy array, with the name of the dtype it had."""

    implementation: str
    platform: str
    device: str
    results: dict[str, tuple[np.ndarray, str]]


def options_of(case: Case, implementation: str | None) -> dict[str, Any]:
    """Returns the keyword arguments that are not arrays, by their public names."""
    spec = case.spec
    options: dict[str, Any] = {
        "softcap": spec.softcap,
        "logit_scale": spec.logit_scale,
        "vocab_size": spec.vocab_size,
        "ignore_index": spec.ignore_index,
        "memory_budget": case.memory_budget,
        "implementation": implementation,
    }
    if case.saved_budget:
        options["saved_budget"] = case.saved_budget
    if case.function != "log_probs":
        options["reduction"] = spec.reduction
    if spec.splits_head:
        options["head_precision"] = "float32"
    if case.function == "loss":
        options |= {"label_smoothing": spec.label_smoothing, "z_loss_weight": spec.z_loss_weight}
    return options


def dtype_names(case: Case, arrays: Arrays) -> dict[str, str]:
    """Returns the dtype that each array is cast to."""
    names = {
        "input": case.dtype,
        "linear_weight": case.weight_dtype,
        "linear_bias": case.weight_dtype,
        "weight": case.dtype,
        "target": case.target_dtype,
        **dict.fromkeys(case.per_token, case.per_token_dtype),
    }
    return {name: names.get(name, "float32") for name in arrays}


def function_of(package: Any, case: Case) -> Callable[..., dict[str, Any]]:
    """Returns the public function of a case. It takes all arguments by name, and returns the forward outputs by
    name."""

    def named_loss(found: Any) -> dict[str, Any]:
        if not isinstance(found, tuple):
            return {"loss": found}
        return {"loss": found[0], "d_weight": found[1] - GRAD_INTO_START}  # of JAX with grad_into, "mean" or "sum"

    def loss(**arguments: Any) -> dict[str, Any]:
        if not case.with_stats:
            return named_loss(package.linear_cross_entropy(**arguments))
        found, stats = package.linear_cross_entropy_with_stats(**arguments)
        return {**named_loss(found), **stats._asdict()}

    def log_probs(**arguments: Any) -> dict[str, Any]:
        return package.linear_log_probs(**arguments)._asdict()

    def token_loss(**arguments: Any) -> dict[str, Any]:
        first = [arguments.pop(name) for name in ("input", "linear_weight", "target")]
        per_token = [arguments.pop(name) for name in case.per_token]
        named = FORMS[case.token_loss].named(package.token_losses)
        if not case.token_stats:
            return named_loss(package.linear_token_loss(*first, named, *per_token, **arguments))
        found, stats = package.linear_token_loss_with_stats(*first, named, *per_token, **arguments)
        return {**named_loss(found), **stats._asdict()}

    return {"loss": loss, "log_probs": log_probs, "token_loss": token_loss}[case.function]


def roots_of(case: Case) -> list[str]:
    """Returns the names of the outputs that have an upstream gradient."""
    names = ("log_prob", "entropy", "lse") if case.function == "log_probs" else ("loss",)
    return [name for name in names if name not in case.unused]


def _choose_torch(implementation: str | None) -> None:
    import torch

    import core_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = (torch.empty(rows, 64, dtype=torch.bfloat16, device=device) for rows in (64, 128))
    core_triton.explain(x, w, implementation=implementation)


def _run_torch(implementation: str | None, case: Case, arrays: Arrays) -> _Run:
    import torch

    import core_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = dtype_names(case, arrays)
    tensors = {
        name: torch.tensor(value, dtype=getattr(torch, dtypes[name]), device=device) for name, value in arrays.items()
    }
    if case.strided:
        tensors["input"] = torch.stack([tensors["input"]] * 2, dim=-1)[..., 0]
    outputs = torch_outputs(case, tensors, options_of(case, implementation))
    ran = core_triton.explain(tensors["input"], tensors["linear_weight"], implementation=implementation)

    def export(tensor: Any) -> tuple[np.ndarray, str]:
        values = tensor.detach().cpu()
        values = values.float() if values.is_floating_point() else values
        return values.numpy(), str(tensor.dtype).removeprefix("torch.")

    name_of_device = torch.cuda.get_device_name() if device == "cuda" else device
    return _Run(ran.name, device, name_of_device, {name: export(tensor) for name, tensor in outputs.items()})


def torch_outputs(case: Case, tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the outputs of a case by name, with its gradients, as tensors.

    Args:
        case: the description.
        tensors: the arrays of the case by name. Changed: the upstream gradients are taken out, what is differentiated
            requires grad, and a transposed head replaces the head where the case says so.
        options: the other keyword arguments.
    """
    import torch

    import core_triton

    if case.vocab_axis == 1:
        tensors["linear_weight"] = tensors["linear_weight"].t().contiguous().t()
    cotangents = {name: tensors.pop(name) for name in [*tensors] if name.startswith("d_")}
    argument_of = {d: name for d, name in GRADIENT_OF.items() if name in tensors and name not in case.frozen}
    for name in argument_of.values():
        tensors[name].requires_grad_()
    if case.grad_into:
        device = tensors["input"].device
        options["grad_into"] = torch.full(tensors["linear_weight"].shape, GRAD_INTO_START, device=device)
    outputs = function_of(core_triton, case)(**tensors, **options)
    if argument_of:
        leaves = [tensors[name] for name in argument_of.values()]
        # A token loss may be constant in an array. Autograd then gives no gradient of it.
        zeros = case.function == "token_loss"
        roots = [outputs[name] for name in roots_of(case)]
        upstream = [cotangents[f"d_{name}"] for name in roots_of(case)]
        # torch 2.15 does not reshape an empty DTensor, even to the shape that it has.
        upstream = [
            one if one.shape == root.shape else one.reshape(root.shape)
            for one, root in zip(upstream, roots, strict=True)
        ]
        # With grad_into autograd gives no gradient of the head: it is replaced below.
        unused = zeros or case.grad_into
        gradients = torch.autograd.grad(roots, leaves, upstream, allow_unused=unused, materialize_grads=zeros)
        outputs |= dict(zip(argument_of, gradients, strict=True))
    if case.grad_into:
        outputs["d_weight"] = options["grad_into"] - GRAD_INTO_START
    return outputs


def _choose_jax(implementation: str | None) -> None:
    import jax
    import jax.numpy as jnp

    import jax_pallas

    x, w = (jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16) for rows in (64, 128))
    loss = functools.partial(jax_pallas.linear_cross_entropy, implementation=implementation)
    jax.jit(loss).lower(x, w, jax.ShapeDtypeStruct((64,), jnp.int32))  # the device is known when a call is lowered


def _run_jax(implementation: str | None, case: Case, arrays: Arrays) -> _Run:
    import jax
    import jax.numpy as jnp

    import jax_pallas

    dtypes = dtype_names(case, arrays)
    # Without the x64 switch JAX has no int64; every value of a case fits int32.
    dtypes = {name: "int32" if dtype == "int64" else dtype for name, dtype in dtypes.items()}
    # NumPy casts and transposes, because JAX would compile a program for each shape.
    values = {name: value.astype(jnp.dtype(dtypes[name])) for name, value in arrays.items()}
    if case.vocab_axis == 1:
        values["linear_weight"] = values["linear_weight"].T
    operands = {name: jax.device_put(value) for name, value in values.items()}
    cotangents = {name: operands.pop(name) for name in arrays if name.startswith("d_")}
    upstream = [cotangents[f"d_{name}"] for name in roots_of(case)]
    argument_of = {d: name for d, name in GRADIENT_OF.items() if name in operands and name not in case.frozen}
    function = function_of(jax_pallas, case)
    options = options_of(case, implementation) | {"vocab_axis": case.vocab_axis}
    if case.grad_into:
        operands["grad_into"] = jnp.full(operands["linear_weight"].shape, GRAD_INTO_START)
        del argument_of["d_weight"]
        if roots_of(case) != ["loss"] or case.spec.reduction == "none":
            argument_of["d_weight"] = "grad_into"

    def call(differentiated: dict[str, Any], others: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        outputs = function(**differentiated, **others, **options)
        return [outputs[name] for name in roots_of(case)], outputs

    @jax.jit
    def run(differentiated: dict[str, Any], others: dict[str, Any], upstream: list[Any]) -> dict[str, Any]:
        if not argument_of:
            return call({}, others)[1]
        _, pull_back, outputs = jax.vjp(lambda d: call(d, others), differentiated, has_aux=True)
        gradients = pull_back(upstream)[0]
        outputs |= {d: gradients[name] for d, name in argument_of.items()}
        if "grad_into" in gradients:
            outputs["d_weight"] -= GRAD_INTO_START
        return outputs

    differentiated = {name: operands[name] for name in argument_of.values()}
    others = {name: value for name, value in operands.items() if name not in differentiated}
    outputs = run(differentiated, others, upstream)
    ran = jax_pallas.explain(
        operands["input"], operands["linear_weight"], vocab_axis=case.vocab_axis, implementation=implementation
    )

    def export(name: str, array: Any) -> tuple[np.ndarray, str]:
        values = np.asarray(array).T if name == "d_weight" and case.vocab_axis == 1 else np.asarray(array)
        floating = jnp.issubdtype(values.dtype, jnp.floating)
        return values.astype(np.float32) if floating else values, str(array.dtype)

    device = jax.devices()[0].device_kind
    return _Run(ran.name, jax.default_backend(), device, {name: export(name, array) for name, array in outputs.items()})


_RUNNERS: dict[str, Callable[[str | None, Case, Arrays], _Run]] = {"torch": _run_torch, "jax": _run_jax}


def main(arguments: list[str] | None = None) -> None:
    """Runs cases on the backends of one framework; one line of JSON for each outcome.

    If the machine does not support one of them, there is only one line, which says why.
    """
    parser = argparse.ArgumentParser(prog="python -m parity.backends", description=main.__doc__)
    parser.add_argument("backends", nargs="+", choices=BACKENDS, metavar="BACKEND")
    parser.add_argument("--folder", type=Path, required=True, help="where the .npz files go")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--exhaustive", action="store_true", help="all combinations of the options")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--step", type=int, default=1, help="every so many from there")
    parser.add_argument("--distinct", action="store_true", help="run an implementation once, under the first name")
    options = parser.parse_args(arguments)
    for name in options.backends:
        if reason := obstacle(name):
            print(json.dumps({"backend": name, "obstacle": reason}), flush=True)
            return
    shared = enumerate(select(options.only, options.exhaustive))
    for index, case in itertools.islice(shared, options.first, None, options.step):
        arrays = make_arrays(case)
        ran: dict[str, str] = {}  # implementation -> backend
        for name in options.backends:
            line: dict[str, Any] = {"case": case.name, "backend": name}
            same = ran.get(BACKENDS[name].implementation or "")
            if options.distinct and same:
                print(json.dumps(line | {"same_as": same}), flush=True)
                continue
            try:
                outcome = run_case(name, case, arrays)
            except Exception as failure:  # one failing case must not hide the others: it is a row of the table
                traceback.print_exc(file=sys.stderr)
                line["failure"] = f"{type(failure).__name__}: {failure}".splitlines()[0]
            else:
                ran[outcome.implementation] = name
                path = options.folder / f"{name}-{index}.npz"
                np.savez(path, **outcome.outputs)  # pyright: ignore[reportArgumentType]
                line |= {
                    "implementation": outcome.implementation,
                    "platform": outcome.platform,
                    "device": outcome.device,
                    "outputs": path.name,
                }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
