"""The options of adapters, as the command line of training offers them."""

import dataclasses
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Projection = Literal["query", "key", "value", "out", "gate", "up", "down"]


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank, which train in the place of the model (`lora.py`)."""

    lora_rank: int = 0
    """Rank of an adapter on each of --lora-targets; everything else keeps its values. 0: no adapters."""
    lora_alpha: float | None = None
    """What an adapter gives is multiplied by lora_alpha / lora_rank; none: twice the rank, which makes it 2."""
    lora_targets: tuple[Projection, ...] = typing.get_args(Projection)
    """Projections of every block that have an adapter."""
    lora_plus_ratio: float = 1.0
    """Learning rate of an adapter's second matrix, B, over that of all else (LoRA+); 16 is recommended."""
    dora: bool = False
    """Learn the length of each column of the adapted weights by itself (DoRA)."""
    unfreeze: tuple[str, ...] = ()
    """Parts of the model that train beside the adapters, named as for --freeze."""
    adapter: Path | None = None
    """Folder of adapters, as the peft library writes them, that the run starts from; rank, alpha, targets and DoRA are
    the folder's."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ValueError(f"--lora-rank must not be negative, got {self.lora_rank}")
        if self.lora_rank == 0:
            for item in dataclasses.fields(self):
                if (value := getattr(self, item.name)) != item.default:
                    raise ValueError(f"--{item.name.replace('_', '-')} goes with --lora-rank, which is 0: got {value}")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            raise ValueError(f"--lora-alpha must be positive and finite, got {self.lora_alpha}")
        if not 0 < self.lora_plus_ratio < math.inf:
            raise ValueError(f"--lora-plus-ratio must be positive and finite, got {self.lora_plus_ratio}")
        if not self.lora_targets or len(set(self.lora_targets)) < len(self.lora_targets):
            raise ValueError(f"--lora-targets must name projections, each once, got {' '.join(self.lora_targets)!r}")

    @property
    def scale(self) -> float:
        """Factor on what an adapter gives; a run without adapters has none."""
        alpha = 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return alpha / self.lora_rank
