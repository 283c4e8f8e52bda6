"""Checks that a token loss is elementwise over tokens, and traces it for one token.

Plan A calls a token loss with one chunk of rows at a time, so a function that mixes tokens, for example by subtracting
a mean, would silently compute something else. `trace_token_loss` traces the function for all tokens and looks at each
primitive that a value of a token reaches. Then it traces the function for one token, and compares the two traces: a
function that uses the number of tokens has other equations or other numbers in the second trace. The chunks run the
trace for one token under `jax.vmap`, so the length of a chunk does not matter. The same checks are made of the
derivatives, which custom_jvp and custom_vjp may replace.

The function may close over arrays, traced or not. What it computes from these only is the same for all tokens. It is
computed once, outside of the chunks, and JAX differentiates it there. The trace for one token takes the values.
"""

import inspect
import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import get_abstract_mesh

from jax_pallas import token_losses
from jax_pallas.primitives import one_device
from jax_pallas.token_hook import TokenFunction
from jax_pallas.token_losses import Named

# The names of primitives that compute each number from the numbers at the same place.
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "convert_element_type", "copy", "cos", "cosh",
    "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igamma_grad_a", "igammac", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic",
    "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not", "one_minus_square",
    "optimization_barrier", "or", "polygamma", "population_count", "pow", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    "zeta",
))  # fmt: skip

# Primitives that JAX adds to a trace under a mesh. The trace is stored without them: an operator runs on one device.
MESH_PRIMITIVES = frozenset(("pvary", "pcast", "reshard", "sharding_constraint"))

# Elementwise where they do not change the shape.
SAME_SHAPE = frozenset(("broadcast_in_dim", "reshape", "squeeze"))

# Calls, and the name of the parameter that holds what they call.
CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

OF_TOKENS = "of tokens"  # the kind of a value that depends on a token; (n,)

UNIFORM = ""  # the kind of a value that is the same for all tokens. Any other kind says where differences come from.


@dataclass(frozen=True)
class TracedLoss:
    """A token loss that has been traced, with the values of its closure. `jax_pallas.sharded` passes it to the function
    that runs within `jax.shard_map`, where a function could not close over arrays that devices divide."""

    function: TokenFunction
    closure: Sequence[Array]

    def __call__(self, *arguments: Array) -> Array:
        raise AssertionError  # it is traced already


def trace_token_loss(
    token_loss: Callable[..., Array], tokens: int, per_token: int
) -> tuple[TokenFunction, Callable[[], Sequence[Array]]]:
    """Returns the trace of a token loss for one token, and a function that computes the values of its closure.

    Args:
        token_loss: from log_prob and the per-token arrays, (n,) float32 each, to the loss, (n,) float32.
        tokens: N; may be symbolic.
        per_token: the number of per-token arrays. The entropy is one of them.

    Raises:
        TypeError, ValueError: token_loss is not callable, is a function of `token_losses` that was not called, does not
            return an array (n,) float32, or is not elementwise.
        RuntimeError: token_loss or a derivative rule raised an exception, which is the cause of this one.
    """
    if isinstance(token_loss, TracedLoss):
        traced_loss = token_loss
        return traced_loss.function, lambda: traced_loss.closure
    if not callable(token_loss):
        raise TypeError(f"token_loss must be callable, got {type(token_loss).__name__}")
    name = "" if isinstance(token_loss, Named) else getattr(token_loss, "__name__", "")
    if name and getattr(token_losses, name, None) is token_loss:
        name = f"token_losses.{name}"
        raise TypeError(f"token_loss must be a loss, got {name}, which returns one: pass {name}()")
    length = tokens if not isinstance(tokens, int) else max(tokens, 2)  # the values of one token do not mix
    arguments = 1 + per_token
    of_all = _traced(token_loss, length, per_token)
    _check_elementwise(of_all.jaxpr, arguments, length)
    traced = _traced(token_loss, 1, per_token)
    _check_same_program(of_all, traced, length)
    constants, shared, of_tokens = _split(traced)
    program = of_tokens if get_abstract_mesh().empty else _without_mesh(of_tokens)
    key, texts = _key(token_loss), [str(program)]
    if _has_constants(program.jaxpr):
        key = object()  # the text does not have their values
    if any(f"{kind}_call" in texts[0] for kind in ("custom_jvp", "custom_vjp")):
        rules_of_all = _derivative(of_all, arguments, length)
        rules = _derivative(traced, arguments, 1)
        try:
            _check_elementwise(rules_of_all.jaxpr, arguments + 1, length)
            _check_same_program(rules_of_all, rules, length)
        except ValueError as error:
            raise ValueError(
                f"token_loss has a custom_jvp or custom_vjp rule that is not elementwise: {error}"
            ) from None
        texts.append(str(rules))
        if rules.consts:
            key = object()  # the text has no values of the arrays that a rule uses
    closure = tuple(jnp.asarray(value) if isinstance(value, np.ndarray) else value for value in constants)
    return TokenFunction(key, "\n".join(texts), program), partial(jaxpr_as_fun(shared), *closure)


def _key(token_loss: Callable[..., Array]) -> Hashable:
    """Returns what stands for a function in JAX's caches. A weak reference keeps no array alive that the function, or
    the object of a method, holds. Named losses hold none, and equal ones are compiled once."""
    if isinstance(token_loss, Named):
        return token_loss
    try:
        try:
            key = weakref.WeakMethod(token_loss) if inspect.ismethod(token_loss) else weakref.ref(token_loss)
        except TypeError:  # for example a tuple
            key = token_loss
        hash(key)
    except TypeError:
        return object()  # not hashable: equal to no other
    return key


def _traced(token_loss: Callable[..., Array], length: int, per_token: int) -> ClosedJaxpr:
    """Returns the trace of a token loss for `length` tokens, whose result is checked."""

    def checked(*arguments: Array) -> Array:
        try:
            loss = token_loss(*arguments)
        except Exception as error:
            raise RuntimeError(
                f"token_loss raised {type(error).__name__} for arguments ({length},) float32: {error}"
            ) from error
        wanted = "token_loss must return the loss of each token, (n,) float32 for any n"
        if not isinstance(loss, (Array, np.ndarray)):
            raise TypeError(f"{wanted}, got {type(loss).__name__} for n = {length}")
        if loss.shape != (length,):
            raise ValueError(f"{wanted}, got shape {loss.shape} for n = {length}")
        if loss.dtype != jnp.float32:
            raise TypeError(f"{wanted}, got {loss.dtype} for n = {length}")
        return jnp.asarray(loss)

    return jax.make_jaxpr(checked)(*[jax.ShapeDtypeStruct((length,), jnp.float32)] * (1 + per_token))


def _derivative(traced: ClosedJaxpr, arguments: int, length: int) -> ClosedJaxpr:
    """Returns a trace of the derivatives with respect to the arguments, for `length` tokens."""
    program = _program(traced)
    types: list[Any] = [var.aval for var in program.jaxpr.invars[:-arguments]]
    closure = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
    of_tokens = [jax.ShapeDtypeStruct((length,), jnp.float32)] * (arguments + 1)

    def derivative(closure: Sequence[Array], values: Sequence[Array]) -> tuple[Array, ...]:
        *values, d_loss = values
        _, pull_back = jax.vjp(lambda *values: jaxpr_as_fun(program)(*closure, *values)[0], *values)
        return pull_back(d_loss)

    try:
        with one_device():
            return jax.make_jaxpr(derivative)(closure, of_tokens)
    except Exception as error:
        if "{V:" in str(traced.jaxpr):  # the type of a varying array, for which JAX traces a rule
            raise _varies() from error
        raise RuntimeError(
            f"the derivative of token_loss raised {type(error).__name__} for arguments ({length},) float32: {error}"
        ) from error


def _check_elementwise(jaxpr: Jaxpr, arguments: int, length: int) -> None:
    """Raises ValueError if a result of a jaxpr, whose last arguments are (length,), is not elementwise."""
    for result in _kinds(jaxpr, [OF_TOKENS] * arguments, length):
        if result not in (OF_TOKENS, UNIFORM):
            raise _differs(result)


def _kinds(jaxpr: Jaxpr, arguments: Sequence[str], length: int) -> list[str]:
    """Returns the kinds of a jaxpr's results, given those of its arguments: OF_TOKENS, UNIFORM or a source.

    The arguments are its last variables. Those before them are its constants.
    """
    variables = [*jaxpr.constvars, *jaxpr.invars]
    constants = variables[: len(variables) - len(arguments)]
    kinds: dict[Any, str] = dict(zip(variables, [*map(_kind_of_constant, constants), *arguments], strict=True))

    def kind(atom: Any) -> str:
        return UNIFORM if isinstance(atom, Literal) else kinds[atom]

    for equation in _needed(jaxpr):
        found = _kinds_of_equation(equation, [kind(atom) for atom in equation.invars], length)
        kinds.update(zip(equation.outvars, found, strict=True))
    return [kind(atom) for atom in jaxpr.outvars]


def _kinds_of_equation(equation: Any, arguments: list[str], length: int) -> list[str]:
    """Returns the kinds of an equation's results. Raises ValueError if it mixes tokens."""
    name, results = equation.primitive.name, equation.outvars
    if name in CALLS:
        return _kinds(_opened(equation.params[CALLS[name]]), arguments, length)
    of_tokens = OF_TOKENS in arguments
    if name == "cond" and arguments[0] == UNIFORM:
        branches = [_kinds(_opened(branch), arguments[1:], length) for branch in equation.params["branches"]]
        return [max(kinds, key=_rank) for kinds in zip(*branches, strict=True)]
    others = [kind for kind in arguments if kind not in (OF_TOKENS, UNIFORM)]
    elementwise = name in ELEMENTWISE or name in MESH_PRIMITIVES
    if not of_tokens:
        keeps = not others and (elementwise or name in SAME_SHAPE)
        source = others[0] if others else f"{name} makes"
        return [UNIFORM if keeps or var.aval.size == 1 else source for var in results]
    if not elementwise and not (name in SAME_SHAPE and results[0].aval.shape == (length,)):
        raise ValueError(
            f"token_loss must be elementwise over tokens, got the operation {name}. token_loss is called with some of "
            "the tokens at a time. Only elementwise operations on (n,) arrays are recognized: for example, use "
            "jnp.where instead of jnp.select. Compute what needs several tokens before the call, and pass it in "
            "per_token"
        )
    if others:
        raise _differs(others[0])
    if any(var.aval.shape != (length,) for var in results):
        raise ValueError(
            f"token_loss must be elementwise over tokens, got the operation {name}, whose result has shape "
            f"{results[0].aval.shape} for {length} tokens"
        )
    return [OF_TOKENS] * len(results)


def _rank(kind: str) -> int:
    """Returns which kind a value has that is one of several: a larger number."""
    return (UNIFORM, OF_TOKENS).index(kind) if kind in (UNIFORM, OF_TOKENS) else 2


def _kind_of_constant(var: Any) -> str:
    return UNIFORM if var.aval.size == 1 else f"of shape {var.aval.shape} that it closes over"


def _differs(source: str) -> ValueError:
    kind = source if source.startswith("of shape") else f"that {source}"
    return ValueError(
        f"token_loss must not combine tokens with an array {kind}. token_loss is called with some of the tokens "
        "at a time. Pass an array with a number for each token in per_token"
    )


def _check_same_program(of_all: ClosedJaxpr, of_one: ClosedJaxpr, length: int) -> None:
    """Raises ValueError if the traces for `length` tokens and for one do not compute the same from each token."""
    if (
        len(of_all.consts) != len(of_one.consts)
        or not all(map(_same_constant, of_all.consts, of_one.consts))
        or _steps_of(of_all.jaxpr) != _steps_of(of_one.jaxpr)
    ):
        raise ValueError(
            f"token_loss must not depend on the number of tokens, but its traces for {length} tokens and for 1 token "
            "differ. token_loss is called with some of the tokens at a time. Close over a number such as target.size "
            "instead"
        )


def _steps_of(jaxpr: Jaxpr) -> tuple[list[Any], list[Any]]:
    """Returns what a trace computes, without the number of tokens: its steps, and the names of its results there."""
    steps: list[Any] = []
    return steps, _steps(jaxpr, range(len(jaxpr.constvars) + len(jaxpr.invars)), steps)


def _same_constant(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, jax.core.Tracer) or isinstance(second, jax.core.Tracer):
        return False
    first, second = np.asarray(first), np.asarray(second)
    return (first.shape, first.dtype, first.tobytes()) == (second.shape, second.dtype, second.tobytes())


def _steps(jaxpr: Jaxpr, arguments: Sequence[Any], steps: list[Any]) -> list[Any]:
    """Appends what a jaxpr computes to `steps`, and returns the names of its results there, given those of its
    arguments. What only broadcasts or reshapes has no step: a value (1,) meets one token without that."""
    variables = [*jaxpr.constvars, *jaxpr.invars]
    constants = [("constant", len(steps), index) for index in range(len(variables) - len(arguments))]
    names: dict[Any, Any] = dict(zip(variables, [*constants, *arguments], strict=True))

    def name_of(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return names[atom]
        value = np.asarray(atom.val)
        return str(value.dtype), value.tobytes()

    for equation in _needed(jaxpr):
        name, parameters = equation.primitive.name, equation.params
        operands = [name_of(atom) for atom in equation.invars]
        results: Sequence[Any] = [(len(steps), index) for index in range(len(equation.outvars))]
        if name in SAME_SHAPE or name in MESH_PRIMITIVES:
            results = operands[: len(results)]
        elif name in CALLS:
            results = _steps(_opened(parameters[CALLS[name]]), operands, steps)
        elif name == "cond":
            steps.append((name, operands))
            steps.append([_steps(_opened(branch), operands[1:], steps) for branch in parameters["branches"]])
        else:
            # The text of the parameters, without addresses of functions.
            steps.append((name, operands, re.sub("0x[0-9a-f]+", "", str(parameters))))
            if name not in ELEMENTWISE:
                steps.append([atom.aval.shape for atom in equation.invars])
        names.update(zip(equation.outvars, results, strict=True))
    return [name_of(atom) for atom in jaxpr.outvars]


def _needed(jaxpr: Jaxpr) -> list[Any]:
    """Returns the equations that the results of a jaxpr need, and those that have effects."""
    used, found = {var for var in jaxpr.outvars if not isinstance(var, Literal)}, []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(equation.outvars):
            found.append(equation)
            used.update(var for var in equation.invars if not isinstance(var, Literal))
    return found[::-1]


def _opened(jaxpr: Any) -> Jaxpr:
    """Returns a jaxpr whose constants, if any, are variables."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _program(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a trace whose constants are its first arguments, without what a mesh added to it."""
    return _open(traced) if get_abstract_mesh().empty else _without_mesh(traced)


def _open(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a trace whose constants are its first arguments, so that it does not hold the arrays of a closure."""
    jaxpr = traced.jaxpr
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), [])


def _split(traced: ClosedJaxpr) -> tuple[list[Any], ClosedJaxpr, ClosedJaxpr]:
    """Splits a trace into what depends on its constants only and the rest.

    Returns:
        The constants, also those of functions that it calls with `jax.jit`; from these to the values that tokens meet;
        and from these values and the arguments to the results. The values are mostly single numbers. They are computed
        and differentiated outside, once, and not for each token.
    """
    jaxpr, equations = traced.jaxpr, []
    constants = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    results = _inlined(jaxpr, [*jaxpr.constvars, *jaxpr.invars], equations, constants)
    of_constants, of_tokens = set(constants), set(jaxpr.invars)
    shared, rest = [], []
    for equation in equations:
        operands = {atom for atom in equation.invars if not isinstance(atom, Literal)}
        if not of_tokens.isdisjoint(operands):
            of_tokens.update(equation.outvars)
            rest.append(equation)
            continue
        shared.append(equation)
        if of_constants.isdisjoint(operands):  # for example an index: in both
            rest.append(equation)
        else:
            of_constants.update(equation.outvars)
    atoms = [*(atom for equation in rest for atom in equation.invars), *results]
    met = list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal) and atom in of_constants))

    def closed(inputs: list[Any], equations: list[Any], outputs: list[Any]) -> ClosedJaxpr:
        found = jaxpr.replace(constvars=[], invars=inputs, eqns=equations, outvars=outputs)
        return ClosedJaxpr(found.replace(eqns=_needed(found)), [])

    return [*constants.values()], closed([*constants], shared, met), closed([*met, *jaxpr.invars], rest, results)


def _inlined(jaxpr: Jaxpr, arguments: Sequence[Any], equations: list[Any], constants: dict[Any, Any]) -> list[Any]:
    """Appends the equations of a jaxpr, and of what it calls with `jax.jit`, to `equations`, and variables with the
    constants of these calls to `constants`; returns the results."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

    def value(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [value(atom) for atom in equation.invars]
        called: Any = equation.params.get("jaxpr")
        if equation.primitive.name == "jit":
            own = {Var(var.aval): value for var, value in zip(called.jaxpr.constvars, called.consts, strict=True)}
            constants |= own
            results = _inlined(called.jaxpr, [*own, *operands], equations, constants)
        else:
            results = [Var(var.aval) for var in equation.outvars]  # new ones: a jaxpr may be called twice
            equations.append(equation.replace(invars=operands, outvars=results))
        values.update(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _has_constants(jaxpr: Jaxpr) -> bool:
    """Returns whether something that a jaxpr calls has constants."""
    called = [one for equation in jaxpr.eqns for one in jax.tree.leaves([*equation.params.values()])]
    return any(
        (isinstance(one, ClosedJaxpr) and bool(one.consts)) or _has_constants(_opened(one))
        for one in called
        if isinstance(one, (ClosedJaxpr, Jaxpr))
    )


def _without_mesh(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Returns `_open` of a trace without what the mesh of the trace added to it."""

    def evaluated(jaxpr: Jaxpr, arguments: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            operands, name = [value(atom) for atom in equation.invars], equation.primitive.name
            if name in MESH_PRIMITIVES:
                found = operands
            elif name == "jit":
                called = equation.params["jaxpr"]
                found = evaluated(called.jaxpr, [*called.consts, *operands])
            else:
                _refuse_mesh(equation)
                # jax.core.eval_jaxpr would do this in the context that the equation was traced in, which has the mesh.
                found = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
                found = found if equation.primitive.multiple_results else [found]
            values.update(zip(equation.outvars, found, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    types: list[Any] = [var.aval for var in (*traced.jaxpr.constvars, *traced.jaxpr.invars)]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
    with one_device():
        return jax.make_jaxpr(lambda *arguments: evaluated(traced.jaxpr, arguments))(*shapes)


def _refuse_mesh(equation: Any) -> None:
    """Raises ValueError if an equation calls something that has a primitive of a mesh in it."""
    text = str(equation)
    if any(f"= {name}[" in text or f"= {name} " in text for name in MESH_PRIMITIVES):
        raise _varies()


def _varies() -> ValueError:
    return ValueError(
        "token_loss closes over an array that varies over mesh axes, and uses it in a function with derivatives of its "
        "own or in a branch: broadcast it to target's shape and pass it in per_token"
    )
