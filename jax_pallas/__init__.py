"""Fused linear + cross-entropy for JAX: `loss(x @ W.T + b, target)` and its gradients without the N x V logits."""

import importlib.util

if importlib.util.find_spec("jax") is None:
    raise ImportError('jax_pallas needs JAX: pip install "linear-ce[jax]", or "linear-ce[jax,cuda]" with a GPU')

from jax_pallas import sharded, token_losses
from jax_pallas.arguments import Implementation
from jax_pallas.linear_ce import (
    LogProbs,
    LossStats,
    TokenStats,
    check_targets,
    check_token_loss,
    explain,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    linear_log_probs,
    linear_token_loss,
    linear_token_loss_with_stats,
)
from linear_ce import __version__ as __version__

__all__ = [
    "Implementation",
    "LogProbs",
    "LossStats",
    "TokenStats",
    "check_targets",
    "check_token_loss",
    "explain",
    "linear_cross_entropy",
    "linear_cross_entropy_with_stats",
    "linear_log_probs",
    "linear_token_loss",
    "linear_token_loss_with_stats",
    "sharded",
    "token_losses",
]
