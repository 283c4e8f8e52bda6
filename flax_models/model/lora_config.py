"""The options of adapters, which are also options of the training command line."""

import dataclasses
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flax_models.model.config import MOST, ModelConfig

Projection = Literal["query", "key", "value", "out", "gate", "up", "down"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, which train while the rest of the model is frozen (`lora.py`)."""

    lora_rank: int = 0
    """Rank of the adapter on each projection in --lora-targets; all other parameters are frozen. 0: no adapters."""
    lora_alpha: float | None = None
    """The output of an adapter is multiplied by lora_alpha / lora_rank; None: 2 * lora_rank."""
    lora_targets: tuple[Projection, ...] = typing.get_args(Projection)
    """Projections of every block that have an adapter."""
    lora_plus_ratio: float = 1.0
    """Ratio of the learning rate of an adapter's second matrix, B, to that of all other parameters (LoRA+); 16 is
    recommended."""
    dora: bool = False
    """Train the norm of each column of the adapted weights separately (DoRA)."""
    unfreeze: tuple[str, ...] = ()
    """Parameters that train in addition to the adapters, named as for --freeze."""
    adapter: Path | None = None
    """Folder of adapters, in the format of the peft library, that the run starts from. Rank, alpha, targets and DoRA
    come from the folder."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ValueError(f"--lora-rank must not be negative, got {self.lora_rank}")
        if self.lora_rank > MOST:
            raise ValueError(f"--lora-rank must be at most {MOST:,}, got {self.lora_rank}")
        if self.lora_rank == 0:
            for item in dataclasses.fields(self):
                if (value := getattr(self, item.name)) != item.default:
                    name = item.name.replace("_", "-")
                    raise ValueError(f"--{name} requires --lora-rank of at least 1, got --{name} {value}")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            raise ValueError(f"--lora-alpha must be positive and finite, got {self.lora_alpha}")
        if not 0 < self.lora_plus_ratio < math.inf:
            raise ValueError(f"--lora-plus-ratio must be positive and finite, got {self.lora_plus_ratio}")
        if not self.lora_targets or len(set(self.lora_targets)) < len(self.lora_targets):
            raise ValueError(
                f"--lora-targets must name at least one projection, each once, got {' '.join(self.lora_targets)!r}"
            )

    @property
    def scale(self) -> float:
        """Factor on the output of an adapter; undefined if lora_rank is 0."""
        alpha = 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return alpha / self.lora_rank

    def parameter_count(self, config: ModelConfig) -> int:
        """Returns the number of parameters of the adapters on a model with this config."""
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        features = {  # in, out
            "query": (config.hidden_size, query),
            "key": (config.hidden_size, key),
            "value": (config.hidden_size, key),
            "out": (query, config.hidden_size),
            "gate": (config.hidden_size, config.intermediate_size),
            "up": (config.hidden_size, config.intermediate_size),
            "down": (config.intermediate_size, config.hidden_size),
        }
        adapted = [features[projection] for projection in self.lora_targets] if self.lora_rank else []
        layer = sum(self.lora_rank * (inputs + outputs) + self.dora * outputs for inputs, outputs in adapted)
        return config.num_layers * layer
