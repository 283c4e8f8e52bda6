"""A small problem in float64 for tests of the equations."""

from typing import Any

import numpy as np

N, D, V = 7, 5, 11


def problem(seed: int = 0, **overrides: Any) -> dict[str, Any]:
    """Returns a small problem in float64. `overrides` replace arrays."""
    rng = np.random.default_rng(seed)
    made = {
        "input": rng.standard_normal((N, D)),
        "linear_weight": rng.standard_normal((V, D)),
        "target": rng.integers(0, V - 2, N),
        "linear_bias": rng.standard_normal(V),
    }
    return made | overrides
