"""Tests training on a mesh of two NVIDIA GPUs, or of one if there are no more: the losses are those of one GPU, with
cuDNN attention and the kernels of the loss. Run with `pytest -m gpu`.

As a program, this file runs the checks that its arguments name.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from programs import Printed, each, python, run_checks
from test_flax_mesh import mesh_of

from flax_models.data.batches import Batch
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.train.config import TrainConfig
from flax_models.train.mesh import made_on
from flax_models.train.step import Trainer

pytestmark = pytest.mark.gpu

GPUS = 2  # at most
SHAPE = ModelConfig(4096, 256, 2, 4, 2, 64, 512, 256, dtype="bfloat16", remat="attention", scan_layers=False)
STEPS = 5
BOUND = 1e-3  # of a loss: its rounding in bfloat16 is that of other sums on each mesh


def losses(sizes: tuple[int, int, int] | None, *, packed: bool, rows: int) -> np.ndarray:
    """Returns the losses of some steps on a mesh, or on one GPU."""

    def make() -> Decoder:
        return Decoder(SHAPE, rngs=nnx.Rngs(0))

    mesh = None if sizes is None else mesh_of(*sizes)
    model = made_on(mesh, make)
    trainer = Trainer(model, TrainConfig(batch_size=rows, learning_rate=1e-3, warmup_steps=1), None, mesh)
    state, found, generator = trainer.initial, [], np.random.default_rng(0)
    for _ in range(STEPS):
        start = generator.integers(SHAPE.vocab_size, size=(rows, 1))
        tokens = ((start + np.arange(257) * generator.integers(1, 4, size=(rows, 1))) % SHAPE.vocab_size).astype(
            np.int32
        )
        lengths = np.tile(np.array([[100, 156, 0]], np.int32), (rows, 1)) if packed else None
        state, metrics = trainer.step(state, trainer.put(Batch(tokens[:, :-1], tokens[:, 1:], lengths)))
        found.append(float(metrics.loss))
    return np.array(found)


def check(axis: str, *, packed: bool = False, rows: int = 8) -> None:
    gpus = min(GPUS, jax.device_count())
    data, fsdp, tensor = (gpus if axis == name else 1 for name in ("data", "fsdp", "tensor"))
    want = losses(None, packed=packed, rows=rows)
    got = losses((data, fsdp, tensor), packed=packed, rows=rows)
    assert want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=BOUND)


CHECKS: dict[str, Any] = {axis: partial(check, axis) for axis in ("data", "fsdp", "tensor")}
CHECKS |= {f"{axis}, packed": partial(check, axis, packed=True) for axis in ("data", "tensor")}
CHECKS["fsdp, gathered head"] = partial(check, "fsdp", rows=32)
COMMANDS = {name: python(Path(__file__).name, name) for name in CHECKS}


@pytest.mark.parametrize("name", each(COMMANDS, seconds=120))
def test_a_mesh_of_gpus_trains_as_one_gpu(name: str, printed: Printed) -> None:
    assert not printed[name]["failure"], printed[name]["failure"]


if __name__ == "__main__":
    run_checks(CHECKS, sys.argv[1:])
