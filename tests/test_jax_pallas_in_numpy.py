"""Compares what kernels compute in NumPy (`kernels_in_numpy.py`), as most tests run them, with Pallas' interpreters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import kernels_in_numpy
import numpy as np
import pytest
from jax_problem import problem
from test_jax_pallas_hopper_gradients import Sizes, add_d_weight, use_programs

from jax_pallas.linear_ce import linear_cross_entropy

SLOW = pytest.mark.slow
RUN_JAXPR = kernels_in_numpy.thread_map._run_jaxpr  # before the fixture of the module replaces it
CALLS: dict[str, dict[str, Any]] = {
    "exponentials": {"dtype": "bfloat16", "reduction": "none", "z_loss_weight": 0.01},
    "shifted": {"dtype": "float16", "label_smoothing": 0.1, "std": 20.0},
    "capped": {"dtype": "bfloat16", "softcap": 5.0, "vocab_axis": 1, "logit_scale": 0.7},
    "saved": {"dtype": "float16", "reduction": "none", "saved_budget": 2**24},
    "float32": {"dtype": "float32", "reduction": "none"},
}


def recorded(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Returns the launches of a call with their operands and results."""
    found, function_of = list[tuple[Any, ...]](), kernels_in_numpy.function_of

    def recording(launch: Any, types: Any) -> Callable[..., Any]:
        run = function_of(launch, types)

        def of_arrays(*arrays: Any) -> Any:
            given = [np.array(one) for one in arrays]
            results = run(*arrays)
            found.append((launch, given, [np.array(one) for one in results]))
            return results

        return of_arrays

    monkeypatch.setattr(kernels_in_numpy, "function_of", recording)
    jax.block_until_ready(jax.jit(call)())
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("float32", "exponentials") else SLOW) for name in CALLS]
)
def test_results_are_those_of_the_interpreter_of_pallas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(CALLS[name])
    std, axis = options.pop("std", 1.0), options.get("vocab_axis", 0)
    arrays = problem(80, 48, 320, dtype=options.pop("dtype"))
    x, w, y = arrays["input"], arrays["linear_weight"] * std, arrays["target"].at[3].set(-100)
    loss = partial(linear_cross_entropy, target=y, implementation="pallas_triton", **options)

    def call() -> Any:
        losses, pull_back = jax.vjp(lambda x, w: loss(x, w.T if axis else w), x, w)
        return losses, pull_back(jnp.ones_like(losses))

    launches = recorded(call, monkeypatch)
    assert len(launches) >= 5
    for launch, operands, results in launches:
        want = jax.jit(partial(launch, interpret=True))(*operands)
        for found, one in zip(results, want, strict=True):
            one = np.asarray(one)
            assert found.dtype == one.dtype
            if jnp.issubdtype(one.dtype, np.integer):
                np.testing.assert_array_equal(found, one, err_msg=launch.kernel.__name__)
                continue
            tolerance = 1e-5 if one.dtype == np.float32 else 2**-7 if one.dtype == jnp.bfloat16 else 2**-10
            tolerance = max(tolerance, 1e-3 if std > 1 else 0.0)  # a logit of 100 is rounded to a multiple of 2**-17
            found, one = (array.astype(np.float32) for array in (found, one))
            np.testing.assert_allclose(found, one, rtol=tolerance, atol=1e-6, err_msg=launch.kernel.__name__)


@SLOW
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_mosaic_kernels_have_the_results_of_their_compiled_interpreter(
    vocab_axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_programs(monkeypatch, 2)
    sizes = Sizes(150, 170, 3, 192, 512, 576, vocab_axis)
    old = sizes.head(sizes.bfloat16(sizes.vocab, sizes.hidden, seed=2))
    e, x = sizes.e(), sizes.bfloat16(sizes.tokens, sizes.hidden)

    def d_weight() -> np.ndarray:
        jax.clear_caches()
        options: dict[str, Any] = {"vocab": sizes.vocab, "classes": sizes.classes, "vocab_axis": vocab_axis}
        found = add_d_weight(e, x, jnp.int32(sizes.start), in_l2=0, old=old, interpret=True, **options)
        return np.asarray(found, np.float32)

    found = d_weight()
    monkeypatch.setattr(kernels_in_numpy.thread_map, "_run_jaxpr", RUN_JAXPR)
    monkeypatch.setattr(kernels_in_numpy.mosaic, "interpret_pallas_call", kernels_in_numpy.interpret_mosaic)
    np.testing.assert_allclose(found, d_weight(), rtol=2**-7, atol=1e-5)
