"""The contract of the loss, which both frameworks implement: options and argument checks, the float64 reference, the
equations (`MATH.md`) and the chunk arithmetic. Imports NumPy only.

The loss itself is in `core_triton` (PyTorch) and `jax_pallas` (JAX).
"""

__version__ = "0.1.0"  # of linear-ce and of all its packages; pyproject.toml reads it

_LOSSES = (
    "linear_cross_entropy",
    "linear_cross_entropy_with_stats",
    "linear_log_probs",
    "linear_token_loss",
    "linear_token_loss_with_stats",
    "LinearCrossEntropy",
)


def __getattr__(name: str) -> object:
    if name in _LOSSES:
        raise ImportError(
            f"linear_ce has no {name}: use `from core_triton import {name}` with PyTorch "
            '(pip install "linear-ce[torch]")'
            + (f' or `from jax_pallas import {name}` with JAX (pip install "linear-ce[jax]")' if name[0] == "l" else "")
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
