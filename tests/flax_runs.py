"""Small runs of `python -m flax_models.train` for the tests: options, texts and results."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import flax_models.train.main as program
from flax_models.data.batches import Batch
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.train.config import TrainConfig
from flax_models.train.metrics import CLOCKED, read_rows
from flax_models.train.step import Trainer, TrainState

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "mix", "ink"]
SMALL = [
    f"--{name}={value}"
    for name, value in {
        "vocab-size": 280,
        "hidden-size": 16,
        "num-layers": 1,
        "num-heads": 2,
        "num-kv-heads": 1,
        "head-dim": 8,
        "intermediate-size": 24,
        "max-seq-len": 16,
        "steps": 8,
        "batch-size": 2,
        "warmup-steps": 2,
        "learning-rate": 1e-2,
        "eval-every": 4,
        "checkpoint-every": 3,
        "log-every": 3,
        "held-out-windows": 5,
        "sample-tokens": 4,
    }.items()
]
# What makes a run of examples/grpo.py small: sums of numbers below 4 and a model of one layer.
SMALL_GRPO: dict[str, Any] = {
    "MODEL": ModelConfig(13, 16, 1, 2, 1, 8, 24, 10),
    "NUMBERS": 4,
    "SUPERVISED_STEPS": 40,
    "SUPERVISED_ROWS": 64,
    "PROBLEMS": 8,
    "SAMPLES": 4,
    "MEMORY_BUDGET": 2**16,  # 4 chunks
    "LEARNING_RATE": 1e-2,  # large enough that ratios are clipped within the first updates
}

CACHE_OPTIONS = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


@contextmanager
def compilation_cache(folder: Path) -> Iterator[None]:
    """Keeps compiled programs in a folder, so that runs of the same shape take two seconds instead of ten."""
    with ExitStack() as stack:
        for name, value in {"jax_compilation_cache_dir": str(folder), **CACHE_OPTIONS}.items():
            stack.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, value)
        yield


def gpu(capability: str = "9.0", version: str = "PJRT C API\ncuda 13000") -> Any:
    """Returns a fake GPU, for choices that are made before anything runs."""
    client = SimpleNamespace(platform_version=version)
    return SimpleNamespace(platform="gpu", compute_capability=capability, client=client)


def write_texts(folder: Path) -> None:
    generator = np.random.default_rng(0)
    folder.mkdir()
    for i in range(12):
        lines = (" ".join(generator.choice(WORDS, size=8)) for _ in range(20))
        (folder / f"{i}.txt").write_text("\n".join(lines) + "\n")


def train(place: Path, *options: str) -> int:
    return program.main(["--runs", str(place / "runs"), *options])


def start(place: Path, name: str, *options: str) -> int:
    return train(place, "--name", name, "--data", str(place / "data"), *SMALL, *options)


def learned(folder: Path) -> list[dict]:
    """Returns the rows of a run without times and rates."""
    return [{name: value for name, value in row.items() if name not in CLOCKED} for row in read_rows(folder)]


def run_alone(options: list[str], compiled: str, cache: str, out: Path, err: Path) -> None:
    """Runs the command in a separate process, with stdout and stderr in files."""
    os.environ["XDG_CACHE_HOME"] = cache
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    with compilation_cache(Path(compiled)):
        sys.exit(program.main(options))


def small_trainer(**changes) -> Trainer:
    config = ModelConfig(280, 16, 1, 2, 1, 8, 24, 16)
    options: dict[str, Any] = {"steps": 8, "batch_size": 2, "warmup_steps": 2, **changes}
    return Trainer(Decoder(config, rngs=nnx.Rngs(0)), TrainConfig(**options))


def random_batch(rows: int, length: int = 16) -> Batch:
    tokens = np.random.default_rng(3).integers(280, size=(rows, length + 1)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[TrainState], TrainState | None]) -> None:
    """Makes runs call `act` with the state before a step. If it returns a state, that state replaces the old one."""
    original = Trainer.__init__

    def patched(self: Trainer, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        inner = self.step

        def acting(state: TrainState, batch: Batch):
            if int(state.step) == step - 1:
                replaced = act(state)
                state = state if replaced is None else replaced
            return inner(state, batch)

        self.step = acting

    monkeypatch.setattr(Trainer, "__init__", patched)
