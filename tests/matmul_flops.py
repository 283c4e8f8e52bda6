"""Counts the flops of the matmuls in a traced program."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr


def matmul_flops(jaxpr: Jaxpr) -> float:
    """Returns two flops per multiplication of each matmul in a traced program. Loops count once per iteration."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            avals: list[Any] = [equation.invars[0].aval, equation.outvars[0].aval]
            left, out = (aval.shape for aval in avals)
            total += 2.0 * np.prod(out) * np.prod([left[axis] for axis in contracted])
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda value: isinstance(value, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                total += times * matmul_flops(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
    return total
