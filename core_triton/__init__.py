"""Fused linear + cross-entropy for PyTorch: `loss(x @ W.T + b, target)` and its gradients without the N x V logits."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError('core_triton needs PyTorch: pip install "linear-ce[torch]"')

from core_triton import operators as operators  # registers them
from core_triton import token_losses
from core_triton.arguments import Implementation
from core_triton.linear_ce import (
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
from core_triton.module import LinearCrossEntropy
from core_triton.ranges import RangeReport, range_report
from linear_ce import __version__ as __version__

__all__ = [
    "Implementation",
    "LinearCrossEntropy",
    "LogProbs",
    "LossStats",
    "RangeReport",
    "TokenStats",
    "check_targets",
    "check_token_loss",
    "explain",
    "linear_cross_entropy",
    "linear_cross_entropy_with_stats",
    "linear_log_probs",
    "linear_token_loss",
    "linear_token_loss_with_stats",
    "range_report",
    "token_losses",
]
