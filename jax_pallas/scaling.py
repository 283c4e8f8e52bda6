"""The gradients that plan A computed before it knew the upstream gradient: they are multiplied by it, and where devices
have different tokens, summed over the devices before.

Gradients of float16 carry powers of two, the scales of input and head (`row_math.saved_scales`).
"""

from typing import Any

from jax import Array

from jax_pallas import row_math
from jax_pallas.gathering import are_complete
from jax_pallas.options import Arrays, Options
from jax_pallas.primitives import usual_promotion
from jax_pallas.problem import Gradients


def summed_over_devices(options: Options, gradients: Gradients, scales: Any, arrays: Arrays) -> tuple[Gradients, Any]:
    """Returns gradients whose parts of linear_weight and linear_bias are sums over the devices that have different
    tokens, rounded to their dtypes afterwards, and the powers of two that all gradients carry.

    The gradients of each device are those of `make_problem`: float32, and that of linear_weight carries no power. If
    the head was gathered, that of linear_weight is a sum over the devices that gathered it, with the rows of this one.
    """
    devices, named = options.devices, options.named(arrays)
    if not devices.sums_in_float32 or are_complete(devices, named["input"]):
        return gradients, scales
    head_scale = None
    if scales is not None:
        head_scale = row_math.saved_scales(named["row_weight"], devices)[1]

    def summed(gradient: Array | None, name: str, scale: Array | None) -> Array | None:
        if gradient is None or (name == "linear_weight" and options.has_grad_into):
            return gradient
        sums = devices.sum_of_shared if name == "linear_weight" else devices.sum_of_bias
        total = sums(gradient if scale is None else gradient / scale, named[name])
        return (total if head_scale is None else total * head_scale).astype(named[name].dtype)

    d_weight = summed(gradients.d_weight, "linear_weight", None)
    d_bias = summed(gradients.d_bias, "linear_bias", None if scales is None else scales[1])
    return Gradients(gradients.d_input, d_weight, d_bias), None if scales is None else (scales[0], head_scale)


@usual_promotion  # for the backward rules, which JAX runs in the context of the caller
def scaled(gradients: Gradients, factor: Array, scales: Any) -> Gradients:
    """Returns gradients times what came from upstream, rounded once."""

    def one(gradient: Array | None, scale: Any) -> Array | None:
        if gradient is None:
            return None
        return (gradient * (factor if scale is None else factor / scale)).astype(gradient.dtype)

    input_scale, head_scale = (None, None) if scales is None else scales
    return Gradients(
        one(gradients.d_input, input_scale),
        one(gradients.d_weight, head_scale),
        one(gradients.d_bias, head_scale),
    )
