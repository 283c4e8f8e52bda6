"""Runs interpreted kernels in NumPy, so that XLA compiles no programs for them.

For a CPU, Pallas lowers a kernel of its Triton backend to operations of XLA. Its interpreter of Mosaic kernels makes
several programs of a kernel, which call the interpreter for each access to memory. To lower and compile all that takes
0.2 to 2 s for each kernel and shape, and running it takes milliseconds. Here Pallas traces a kernel as usual, the
traced operations become the lines of a Python function, and the compiled program calls that function.

In kernels of the Triton backend, every index must be inside its array, unless it is masked out. New arrays are NaN, or
the smallest integer, like those of Pallas' interpreter. test_jax_pallas_in_numpy.py compares the results.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback as callbacks
from jax._src.interpreters import mlir as registry
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as mosaic
from jax.interpreters import mlir

from jax_pallas import triton_launch

Launch = Any
INTERPRETED = triton_launch._Launch.__call__


def is_scalar(value: Any) -> bool:
    return not isinstance(value, np.ndarray) or value.ndim == 0


def select(which: Any, *cases: Any) -> Any:
    if is_scalar(which):
        return cases[int(which)]
    assert len(cases) == 2
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
    """Multiplies matrices in float64, so that the bits of a row do not depend on its place, as on a GPU.

    So sums of products are rounded once. Tests of the errors of such sums use Pallas' own interpreter (conftest.py).
    """
    left, right = (one.astype(np.float64) for one in (left, right))
    return ((left if contract[0] else left.T) @ (right.T if contract[1] else right)).astype(dtype)


def shift_right_logical(value: Any, places: Any) -> Any:
    value = np.asarray(value)
    unsigned = np.dtype(f"u{value.dtype.itemsize}")
    return (value.view(unsigned) >> np.asarray(places).astype(unsigned)).view(value.dtype)


def inside(index: Sequence[Any]) -> tuple[Any, ...]:
    """Returns an index, of which NumPy checks only that its numbers are not too large."""
    assert all(np.min(one) >= 0 for one in index), "a kernel reads or writes before the beginning of an array"
    return tuple(index)


def load(ref: np.ndarray, index: Sequence[Any], mask: Any, other: Any, shape: tuple[int, ...]) -> Any:
    if mask is None:
        return ref[inside(index)]
    if is_scalar(mask) and mask:
        return np.broadcast_to(ref[inside(index)], shape)
    mask = np.broadcast_to(mask, shape)
    values = np.full(shape, uninitialized(ref.dtype) if other is None else other, ref.dtype)
    values[mask] = ref[inside_of_mask(index, mask)] if mask.any() else 0
    return values


def store(ref: np.ndarray, index: Sequence[Any], mask: Any, values: Any) -> None:
    if mask is None or (is_scalar(mask) and mask):
        ref[inside(index)] = values
        return
    shape = np.broadcast_shapes(np.shape(mask), np.shape(values))
    mask = np.broadcast_to(mask, shape)
    if mask.any():
        ref[inside_of_mask(index, mask)] = np.broadcast_to(values, shape)[mask]


def inside_of_mask(index: Sequence[Any], mask: np.ndarray) -> tuple[Any, ...]:
    return inside([np.broadcast_to(one, mask.shape)[mask] for one in index])


def dynamic_slice(array: np.ndarray, sizes: tuple[int, ...], *starts: Any) -> np.ndarray:
    places = (
        min(max(int(start), 0), whole - size) for start, size, whole in zip(starts, sizes, array.shape, strict=True)
    )
    return array[tuple(slice(place, place + size) for place, size in zip(places, sizes, strict=True))]


def call_back(function: Callable[..., Any], types: Sequence[Any], *arguments: Any) -> list[Any]:
    """Calls the interpreter of Mosaic kernels, which keeps and changes arrays that it gets and returns."""
    converted = (np.array(argument) if np.ndim(argument) else argument.item() for argument in arguments)
    results = [np.array(one, of.dtype) for one, of in zip(function(*converted), types, strict=True)]
    assert all(one.shape == of.shape for one, of in zip(results, types, strict=True))
    return [one[()] for one in results]


def raise_to(ref: np.ndarray, index: Sequence[Any], mask: Any, values: Any) -> None:
    assert mask is None, "a masked atomic operation"
    np.maximum.at(ref, inside(index), values)


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
    "copy": lambda value: value,
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

    def body(
        self, jaxpr: Any, arguments: Sequence[str], indent: int, constants: Sequence[str] | None = None
    ) -> list[str]:
        """Adds the lines of a jaxpr whose arguments have these names, and returns the names of its results."""
        if constants is None:
            constants = [self.constant(np.asarray(value)[()]) for value in getattr(jaxpr, "consts", ())]
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        outside, self.names = self.names, dict(zip(jaxpr.invars, arguments, strict=True))
        self.names |= zip(jaxpr.constvars, constants, strict=True)
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
        elif kind == "optimization_barrier":
            self.assign(equation, given, indent)
        elif kind == "io_callback":
            results = [self.new() for _ in equation.outvars]
            function, types = self.constant(parameters["callback"]), self.constant(parameters["result_avals"])
            left = f"[{', '.join(results)}] = " if results else ""
            self.add(indent, f"{left}call_back({', '.join([function, types, *given])})")
            self.assign(equation, results, indent)
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
            dtype = self.constant(np.dtype(result.dtype))
            return f"ascontiguousarray({given[0]}).view({dtype}).reshape({result.shape})[()]"
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
        if kind == "clamp":
            return f"minimum(maximum({given[1]}, {given[0]}), {given[2]})"
        if kind == "dynamic_slice":
            return f"dynamic_slice({given[0]}, {tuple(parameters['slice_sizes'])}, {', '.join(given[1:])})"
        if kind == "slice":
            bounds = zip(parameters["start_indices"], parameters["limit_indices"], strict=True)
            steps = parameters["strides"] or (1,) * len(parameters["start_indices"])
            index = ", ".join(f"{a}:{b}:{step}" for (a, b), step in zip(bounds, steps, strict=True))
            return f"{given[0]}[{index}]"
        if kind == "concatenate":
            return f"concatenate([{', '.join(given)}], {parameters['dimension']})"
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
        if kind.startswith("elementwise_inline_asm") and parameters["asm"].startswith("mov.b32 $0, $1;"):
            return given[0]
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
        assert not hasattr(one, "stride"), "a kernel loads or stores a slice: add it, with a check of its bounds"
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


NUMPY = (np.asarray, np.ascontiguousarray, np.broadcast_to, np.concatenate, np.minimum, np.maximum)
OWN = (select, convert, broadcast_in_dim, iota, dot, dynamic_slice, load, store, raise_to, call_back)
NAMES = {one.__name__: one for one in (*NUMPY, *OWN)}


def function_of_jaxpr(jaxpr: Any, constants: int, grid: tuple[int, ...] = ()) -> Callable[..., list[Any]]:
    """Returns a function of the ids of a program, of the values of a jaxpr's first `constants` constants, and of its
    arguments: NumPy's arrays and numbers."""
    lines = Lines(grid)
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    names = [f"r{number}" for number in range(constants + len(inner.invars))]
    lines.add(0, f"def run({', '.join(['program', *names])}):")
    results = lines.body(jaxpr, names[constants:], 1, names[:constants] or None)
    lines.add(1, f"return [{', '.join(results)}]")
    found: dict[str, Any] = {**NAMES, **lines.constants}
    exec(compile("\n".join(lines.lines), "kernel", "exec"), found)
    return found["run"]


@cache
def function_of(launch: Launch, types: tuple[tuple[tuple[int, ...], Any], ...]) -> Callable[..., list[np.ndarray]]:
    """Returns what a launch does with operands of these shapes and dtypes, as a function of NumPy's arrays."""
    operands = [jax.ShapeDtypeStruct(*one) for one in types]
    traced = jax.make_jaxpr(partial(launch, interpret=True))(*operands)
    (call,) = [one for one in traced.eqns if one.primitive.name == "pallas_call"]
    kernel = function_of_jaxpr(call.params["jaxpr"], 0, launch.grid)
    results = [(one.shape, np.dtype(one.dtype)) for one in jax.tree.leaves(launch.results)]
    of_result = {result: operand for operand, result in launch.aliases}
    program_ids = [np.array(one, np.int32) for one in product(*map(range, launch.grid))]

    def run(*arrays: Any) -> list[np.ndarray]:
        given = [np.asarray(one).view() for one in arrays]
        for one in given:
            one.setflags(write=False)
        made: list[np.ndarray] = []
        for number, (shape, dtype) in enumerate(results):
            if number in of_result:  # both have the same memory
                given[of_result[number]] = one = np.array(given[of_result[number]])
            else:
                one = np.full(shape, uninitialized(dtype), dtype)
            made.append(one)
        with np.errstate(all="ignore"):
            for program in program_ids:
                kernel(program, *given, *made)
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


def of_type(value: Any, aval: Any) -> Any:
    """Returns a number or an array, which a callback may have got as a number of Python, in its dtype."""
    return np.asarray(value, aval.dtype if isinstance(value, int | float) else None)[()]


of_thread = lru_cache(maxsize=64)(function_of_jaxpr)
interpret_mosaic, one_at_a_time = mosaic.interpret_pallas_call, threading.Lock()


def _run_thread(jaxpr: Any, constants: Sequence[Any], *arguments: Any) -> None:
    """Runs a thread of a Mosaic kernel."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    variables = (*inner.constvars, *inner.invars)
    values = [of_type(one, of.aval) for one, of in zip((*constants, *arguments), variables, strict=True)]
    try:
        with np.errstate(all="ignore"):
            of_thread(jaxpr, len(constants))(None, *values)
    except Exception as error:
        gpu_callbacks.fail(error, thread_map.NESTED_TOKEN_VALUE)  # the other threads would wait for this one
        raise


def _interpret_mosaic(*operands: Any, **options: Any) -> Any:
    """Interprets a Mosaic kernel. On several devices, which wait for each other, XLA runs the interpreter."""
    if jaxpr_interpret.DeviceInfo().num_devices > 1:
        return interpret_mosaic(*operands, **options)
    given = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in operands]
    jaxpr, shapes = jax.make_jaxpr(partial(interpret_mosaic, **options), return_shape=True)(*given)
    function = function_of_jaxpr(jaxpr, 0)

    def run(*arrays: Any) -> list[Any]:
        with one_at_a_time, np.errstate(all="ignore"):
            return function(None, *map(of_type, arrays, given))

    return callbacks.io_callback(run, shapes, *operands)


@contextmanager
def kernels_in_numpy() -> Iterator[None]:
    """Runs kernels on a CPU in NumPy. Pallas' interpreter runs them in programs of several platforms, and where XLA
    divides a program among devices.

    JAX keeps compiled programs, so call `jax.clear_caches` before and after programs that must not be in NumPy.
    """
    rules = registry._platform_specific_lowerings["cpu"]
    before = rules[triton_launch._launch_p]
    mlir.register_lowering(triton_launch._launch_p, _lower, platform="cpu")
    try:
        with (
            mock.patch.object(thread_map, "_run_jaxpr", _run_thread),
            mock.patch.object(mosaic, "interpret_pallas_call", _interpret_mosaic),
        ):
            yield
    finally:
        rules[triton_launch._launch_p] = before
        function_of.cache_clear()
