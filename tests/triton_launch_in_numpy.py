"""Runs kernels of Pallas' Triton backend in NumPy, so that XLA compiles no program for each of them.

For a CPU, Pallas lowers a kernel to operations of XLA. That and their compilation take 0.2 to 1 s for each kernel and
shape, and running them takes milliseconds. Here a kernel is traced by Pallas as usual, its operations become the lines
of a Python function, and the compiled program calls that function, once for each program of the grid.

What is checked besides: every index is inside its array, unless it is masked out. New arrays are NaN, or the smallest
integer, like those of Pallas' interpreter. test_jax_pallas_kernels.py compares the two.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback as callbacks
from jax.interpreters import mlir

from jax_pallas import triton_launch

Launch = Any
INTERPRETED = triton_launch._Launch.__call__


def is_scalar(value: Any) -> bool:
    return not isinstance(value, np.ndarray) or value.ndim == 0


def select(which: Any, *cases: Any) -> Any:
    if is_scalar(which):
        return cases[int(which)]
    return np.where(which, cases[1], cases[0])


def convert(value: Any, dtype: Any) -> Any:
    if jnp.issubdtype(dtype, np.integer) and jnp.issubdtype(value.dtype, np.floating):
        limits = np.iinfo(dtype)
        value = np.nan_to_num(np.asarray(value, np.float64), nan=0.0).clip(limits.min, limits.max)
    return value.astype(dtype)


def divide(left: Any, right: Any) -> Any:
    """Rounds quotients of integers towards zero, as XLA and GPUs do."""
    if not jnp.issubdtype(left.dtype, np.integer):
        return left / right
    return (left - np.fmod(left, right)) // right


def broadcast_in_dim(value: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    value = np.asarray(value)
    sizes = [1] * len(shape)
    for axis, size in zip(axes, value.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(value.reshape(sizes), shape)


def iota(shape: tuple[int, ...], axis: int, dtype: Any) -> np.ndarray:
    return broadcast_in_dim(np.arange(shape[axis], dtype=dtype), shape, (axis,))


def dot(left: np.ndarray, right: np.ndarray, contract: tuple[int, int], dtype: Any) -> np.ndarray:
    """Multiplies matrices in float64, so that the bits of a row do not depend on its place, as on a GPU."""
    left, right = (one.astype(np.float64) for one in (left, right))
    return ((left if contract[0] else left.T) @ (right.T if contract[1] else right)).astype(dtype)


def shift_right_logical(value: Any, places: Any) -> Any:
    value = np.asarray(value)
    unsigned = np.dtype(f"u{value.dtype.itemsize}")
    return (value.view(unsigned) >> np.asarray(places).astype(unsigned)).view(value.dtype)


def inside(ref: np.ndarray, index: Sequence[Any]) -> tuple[Any, ...]:
    """Returns an index, which NumPy checks for numbers that are too large only."""
    for one in index:
        assert isinstance(one, slice) or np.min(one) >= 0, "a kernel reads or writes before the beginning of an array"
    return tuple(index)


def load(ref: np.ndarray, index: Sequence[Any], mask: Any, other: Any, shape: tuple[int, ...]) -> Any:
    if mask is None:
        return ref[inside(ref, index)]
    if is_scalar(mask) and mask:
        return np.broadcast_to(ref[inside(ref, index)], shape)
    assert not any(isinstance(one, slice) for one in index), "a masked load of a slice"
    mask = np.broadcast_to(mask, shape)
    values = np.full(shape, uninitialized(ref.dtype) if other is None else other, ref.dtype)
    values[mask] = ref[inside_of_mask(ref, index, mask)] if mask.any() else 0
    return values


def store(ref: np.ndarray, index: Sequence[Any], mask: Any, values: Any) -> None:
    if mask is None or (is_scalar(mask) and mask):
        ref[inside(ref, index)] = values
        return
    assert not any(isinstance(one, slice) for one in index), "a masked store of a slice"
    shape = np.broadcast_shapes(np.shape(mask), np.shape(values))
    mask = np.broadcast_to(mask, shape)
    if mask.any():
        ref[inside_of_mask(ref, index, mask)] = np.broadcast_to(values, shape)[mask]


def inside_of_mask(ref: np.ndarray, index: Sequence[Any], mask: np.ndarray) -> tuple[Any, ...]:
    return inside(ref, [np.broadcast_to(one, mask.shape)[mask] for one in index])


def raise_to(ref: np.ndarray, index: Sequence[Any], mask: Any, values: Any) -> None:
    assert mask is None, "a masked atomic operation"
    np.maximum.at(ref, inside(ref, index), values)


def uninitialized(dtype: Any) -> Any:
    return np.nan if jnp.issubdtype(dtype, np.floating) else np.iinfo(dtype).min


UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "is_finite": np.isfinite,
    "log": np.log,
    "log1p": np.log1p,
    "multiple_of": lambda value: value,
    "neg": np.negative,
    "not": np.invert,
    "rsqrt": lambda value: np.reciprocal(np.sqrt(value)),
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "tanh": np.tanh,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "div": divide,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "or": np.bitwise_or,
    "pow": np.power,
    "rem": np.fmod,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": shift_right_logical,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
REDUCE: dict[str, Callable[..., Any]] = {
    "reduce_and": np.all,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_or": np.any,
    "reduce_sum": np.sum,
}


class Lines:
    """The lines of a Python function, which `jaxpr` becomes. Its values are NumPy's arrays and numbers."""

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid, self.lines, self.names = grid, list[str](), dict[Any, str]()
        self.constants: dict[str, Any] = {}
        self.count = 0

    def add(self, indent: int, line: str) -> None:
        self.lines.append("    " * indent + line)

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def name(self, atom: Any) -> str:
        if hasattr(atom, "val"):  # a literal
            return self.constant(np.asarray(atom.val).astype(atom.aval.dtype)[()])
        return self.names[atom]

    def body(self, jaxpr: Any, arguments: Sequence[str], indent: int) -> list[str]:
        """Adds the lines of a jaxpr whose arguments have these names, and returns the names of its results."""
        constants = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        outside, self.names = self.names, dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            self.names[variable] = self.constant(np.asarray(value)[()])
        for equation in jaxpr.eqns:
            self.equation(equation, indent)
        results = [self.name(one) for one in jaxpr.outvars]
        self.names = outside
        return results

    def assign(self, equation: Any, values: Sequence[str], indent: int) -> None:
        for variable, value in zip(equation.outvars, values, strict=True):
            self.names[variable] = value

    def equation(self, equation: Any, indent: int) -> None:
        kind, given, parameters = equation.primitive.name, [*map(self.name, equation.invars)], equation.params
        if kind == "scan":
            self.scan(equation, given, parameters, indent)
        elif kind == "while":
            self.loop(equation, given, parameters, indent)
        elif kind == "cond":
            self.branches(equation, given, parameters, indent)
        elif kind in ("jit", "pjit"):
            self.assign(equation, self.body(parameters["jaxpr"], given, indent), indent)
        elif kind in ("get", "swap", "masked_load", "masked_swap", "atomic_rmw"):
            self.access(equation, given, parameters, indent)
        else:
            result = self.new()
            self.add(indent, f"{result} = {self.value(kind, given, parameters, equation)}")
            self.assign(equation, [result], indent)

    def value(self, kind: str, given: list[str], parameters: Any, equation: Any) -> str:
        result = equation.outvars[0].aval
        if kind in UNARY or kind in BINARY:
            return f"{self.constant((UNARY | BINARY)[kind])}({', '.join(given)})"
        if kind in REDUCE:
            axes, dtype = tuple(parameters["axes"]), self.constant(result.dtype)
            return f"{self.constant(REDUCE[kind])}({given[0]}, axis={axes}).astype({dtype})"
        if kind == "select_n":
            return f"select({', '.join(given)})"
        if kind == "convert_element_type":
            return f"convert({given[0]}, {self.constant(np.dtype(result.dtype))})"
        if kind == "bitcast_convert_type":
            return f"asarray({given[0]}).view({self.constant(np.dtype(result.dtype))})[()]"
        if kind == "broadcast_in_dim":
            return f"broadcast_in_dim({given[0]}, {result.shape}, {tuple(parameters['broadcast_dimensions'])})"
        if kind == "broadcast_to":
            return f"broadcast_to({given[0]}, {result.shape})"
        if kind in ("reshape", "squeeze", "expand_dims"):
            return f"asarray({given[0]}).reshape({result.shape})[()]"
        if kind == "transpose":
            return f"{given[0]}.transpose({tuple(parameters['permutation'])})"
        if kind == "integer_pow":
            return f"{given[0]} ** {parameters['y']}"
        if kind == "iota":
            return f"iota({result.shape}, {parameters['dimension']}, {self.constant(np.dtype(result.dtype))})"
        if kind == "program_id":
            return f"program[{parameters['axis']}]"
        if kind == "num_programs":
            return self.constant(np.int32(self.grid[parameters["axis"]]))
        if kind == "dot_general":
            ((left,), (right,)), (of_left, _) = parameters["dimension_numbers"]
            assert not of_left
            return f"dot({given[0]}, {given[1]}, {(left, right)}, {self.constant(np.dtype(result.dtype))})"
        raise NotImplementedError(f"{kind} in a kernel: add it to {__name__}")

    def access(self, equation: Any, given: list[str], parameters: Any, indent: int) -> None:
        """Adds a load, a store, or an atomic maximum. No kernel uses what was there before a store."""
        kind, mask, other, values = equation.primitive.name, "None", "None", ""
        if kind in ("get", "swap"):
            ref, *rest = given
            if kind == "swap":
                values, *rest = rest
            transforms = jax.tree.unflatten(parameters["tree"], rest)
        else:
            ref, transforms, *rest = jax.tree.unflatten(parameters["args_tree"], given)
            if kind == "masked_load":
                mask, other = rest
            else:
                values, mask = rest
        (indexer,) = transforms
        index = "(" + "".join(f"{self.index(one)}, " for one in indexer.indices) + ")"
        result = equation.outvars[0]
        if kind in ("get", "masked_load"):
            name = self.new()
            self.add(indent, f"{name} = load({ref}, {index}, {mask}, {other}, {result.aval.shape})")
            self.assign(equation, [name], indent)
            return
        if kind == "atomic_rmw":
            assert parameters["atomic_type"].value == "max"
        function = "raise_to" if kind == "atomic_rmw" else "store"
        self.add(indent, f"{function}({ref}, {index}, {mask}, {values})")

    def index(self, one: Any) -> str:
        if hasattr(one, "stride"):
            return f"slice({one.start}, {one.start} + {one.size * one.stride}, {one.stride})"
        return self.constant(np.int32(one)) if isinstance(one, int) else str(one)

    def scan(self, equation: Any, given: list[str], parameters: Any, indent: int) -> None:
        if "ft_in" in parameters:
            constants, carried, others = (len(part) for part in parameters["ft_in"].unpack())
        else:  # JAX 0.11.1
            constants, carried = parameters["num_consts"], parameters["num_carry"]
            others = len(given) - constants - carried
        assert not others, "a scan of arrays"
        assert not parameters["reverse"]
        state = self.state(given[constants:], indent)
        self.add(indent, f"for _ in range({parameters['length']}):")
        self.next_state(state, self.body(parameters["jaxpr"], [*given[:constants], *state], indent + 1), indent + 1)
        self.assign(equation, state, indent)

    def loop(self, equation: Any, given: list[str], parameters: Any, indent: int) -> None:
        of_condition, of_body = parameters["cond_nconsts"], parameters["body_nconsts"]
        state = self.state(given[of_condition + of_body :], indent)
        self.add(indent, "while True:")
        arguments = [*given[:of_condition], *state]
        (condition,) = self.body(parameters["cond_jaxpr"], arguments, indent + 1)
        self.add(indent + 1, f"if not {condition}: break")
        arguments = [*given[of_condition : of_condition + of_body], *state]
        self.next_state(state, self.body(parameters["body_jaxpr"], arguments, indent + 1), indent + 1)
        self.assign(equation, state, indent)

    def state(self, values: Sequence[str], indent: int) -> list[str]:
        names = [self.new() for _ in values]
        self.next_state(names, values, indent)
        return names

    def next_state(self, names: Sequence[str], values: Sequence[str], indent: int) -> None:
        self.add(indent, f"{', '.join(names)} = {', '.join(values)}" if names else "pass")

    def branches(self, equation: Any, given: list[str], parameters: Any, indent: int) -> None:
        results = [self.new() for _ in equation.outvars]
        for number, branch in enumerate(parameters["branches"]):
            self.add(indent, f"{'elif' if number else 'if'} int({given[0]}) == {number}:")
            self.next_state(results, self.body(branch, given[1:], indent + 1), indent + 1)
        self.assign(equation, results, indent)


NAMES = {"asarray": np.asarray, "broadcast_to": np.broadcast_to}
NAMES |= {one.__name__: one for one in (select, convert, broadcast_in_dim, iota, dot, load, store, raise_to)}


@cache
def function_of(launch: Launch, types: tuple[tuple[tuple[int, ...], Any], ...]) -> Callable[..., list[np.ndarray]]:
    """Returns what a launch does with operands of these shapes and dtypes, as a function of NumPy's arrays."""
    operands = [jax.ShapeDtypeStruct(*one) for one in types]
    traced = jax.make_jaxpr(partial(launch, interpret=True))(*operands)
    (call,) = [one for one in traced.eqns if one.primitive.name == "pallas_call"]
    kernel, lines = call.params["jaxpr"], Lines(launch.grid)
    names = [f"r{number}" for number in range(len(kernel.invars))]
    lines.add(0, f"def run(program, {', '.join(names)}):")
    lines.body(kernel, names, 1)
    lines.add(1, "return")
    found = {**NAMES, **lines.constants}
    exec(compile("\n".join(lines.lines), launch.kernel.__name__, "exec"), found)
    results = [(one.shape, np.dtype(one.dtype)) for one in jax.tree.leaves(launch.results)]
    of_result = {result: operand for operand, result in launch.aliases}
    program_ids = [np.array(one, np.int32) for one in product(*map(range, launch.grid))]

    def run(*arrays: Any) -> list[np.ndarray]:
        given = [*map(np.asarray, arrays)]
        made: list[np.ndarray] = []
        for number, (shape, dtype) in enumerate(results):
            if number in of_result:  # both have the same memory
                given[of_result[number]] = one = np.array(given[of_result[number]])
            else:
                one = np.full(shape, uninitialized(dtype), dtype)
            made.append(one)
        with np.errstate(all="ignore"):
            for program in program_ids:
                found["run"](program, *given, *made)
        return made

    return run


def _lower(context: Any, *leaves: Any, launch: Launch) -> Any:
    module, of_launch = context.module_context, triton_launch._Launch.__call__
    axes: Any = module.axis_context
    manual = getattr(axes, "manual_axes", None)
    divided = axes.num_devices > 1 if manual is None else manual != frozenset(axes.mesh.axis_names)
    if len(module.platforms) > 1 or divided or of_launch is not INTERPRETED:
        return triton_launch._lower(context, *leaves, launch=launch, interpret=True)
    function = function_of(launch, tuple((one.shape, np.dtype(one.dtype)) for one in context.avals_in))
    sharding = callbacks._callback_op_sharding(axes, None, context.avals_out)
    return callbacks.emit_python_callback(
        context, function, None, list(leaves), context.avals_in, context.avals_out, has_side_effect=False,
        returns_token=False, sharding=sharding,
    )[0]  # fmt: skip


@contextmanager
def kernels_in_numpy() -> Iterator[None]:
    """Lowers kernels for a CPU to calls of NumPy. Pallas' interpreter runs them in programs of several platforms, and
    where XLA divides a program among devices."""
    mlir.register_lowering(triton_launch._launch_p, _lower, platform="cpu")
    try:
        yield
    finally:
        interpreted = partial(triton_launch._lower, interpret=True)
        mlir.register_lowering(triton_launch._launch_p, interpreted, platform="cpu")
