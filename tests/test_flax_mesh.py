"""Tests training on a mesh: the same curve on any number of devices, parameters and their state divided as the table
says, and what a program gathers.

Tests that need several devices run this file in a separate process with eight, because the number of CPU devices must
be set before JAX starts. A mesh may have fewer of them.
"""

import dataclasses
import io
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import SMALL, SMALL_GRPO, learned, start, write_texts
from host_devices import failures_in, failures_of, run_named
from jax.sharding import AbstractMesh, AxisType, Mesh
from random_decoder import random_decoder
from safetensors.numpy import load_file

from flax_models.data.batches import Batch
from flax_models.errors import RunError
from flax_models.hub import weights
from flax_models.hub.adapter_folder import read_adapter_config, save_adapter
from flax_models.model.decoder import Decoder, ModelConfig, decoder_shapes
from flax_models.model.lora import adapt, adapted_shapes
from flax_models.model.lora_config import LoraConfig
from flax_models.model.parameters import is_adapter, name_of
from flax_models.model.sharding import AXES, ROWS, TABLE, row_axes, spec_of
from flax_models.train.accounting import DeviceMemory, check_parameters, least_memory, step_memory
from flax_models.train.checkpoint import Checkpoints
from flax_models.train.config import RunConfig, TrainConfig
from flax_models.train.main import _initial_model
from flax_models.train.mesh import (
    check_sizes,
    check_vocabulary,
    context_of,
    loss_of_device,
    made_on,
    make_mesh,
    mesh_sizes,
    parameter_shards,
)
from flax_models.train.step import Trainer, TrainState

SHAPE = ModelConfig(280, 16, 2, 4, 2, 8, 24, 16)
UNTIED = dataclasses.replace(SHAPE, tie_embeddings=False, attention_bias=True, attention_out_bias=True)
MESHES = [
    *[(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)],
    *[(8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 1, 2), (1, 4, 2), (2, 2, 2)],
]
DEEP = dataclasses.replace(UNTIED, num_layers=3)
EXAMPLES = Path(__file__).parent.parent / "examples"
DEVICES, BATCH = 8, 8  # devices of the process, and rows of a batch
Values = dict[str, np.ndarray]  # of parameters, by name
BOUND = 1e-5  # of a loss in float32, relative to the largest


def mesh_of(data: int, fsdp: int, tensor: int) -> Mesh:
    devices = jax.devices()[: data * fsdp * tensor]
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def trainer_on(
    mesh: Mesh | None, config: ModelConfig = SHAPE, lora: LoraConfig | None = None, **options: Any
) -> Trainer:
    lora = LoraConfig() if lora is None else lora

    def make() -> Decoder:
        rngs = nnx.Rngs(0)
        model = Decoder(config, rngs=rngs)
        adapt(model, lora, rngs)
        return model

    values: dict[str, Any] = {"steps": 50, "batch_size": BATCH, "warmup_steps": 2, "learning_rate": 1e-2, **options}
    return Trainer(made_on(mesh, make), TrainConfig(**values), lora, mesh)


def batch_of(step: int, *, classes: int = SHAPE.vocab_size, packed: bool = False) -> Batch:
    generator = np.random.default_rng(step)
    tokens = (
        generator.integers(classes, size=(BATCH, 1)) + np.arange(17) * generator.integers(1, 4, size=(BATCH, 1))
    ) % classes
    targets = np.where(generator.random((BATCH, 16)) < 0.2, -100, tokens[:, 1:])  # not as many on every device
    lengths = np.array([[16, 0, 0], [9, 7, 0], [3, 8, 5], [1, 15, 0]] * 2, np.int32) if packed else None
    return Batch(tokens[:, :-1].astype(np.int32), targets.astype(np.int32), lengths)


def run(
    trainer: Trainer, steps: int, *, begin: TrainState | None = None, first: int = 0, packed: bool = False
) -> tuple[np.ndarray, TrainState]:
    """Returns the losses and gradient norms (steps, 2) of steps, and the state after them."""
    state = trainer.initial if begin is None else begin
    found: list[tuple[float, float]] = []
    classes = trainer.model(trainer.initial.params).config.vocab_size
    for step in range(first, first + steps):
        state, metrics = trainer.step(state, trainer.put(batch_of(step, classes=classes, packed=packed)))
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return np.array(found), state


def assert_same(got: np.ndarray, want: np.ndarray, bound: float = BOUND) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * np.abs(want).max())


def same_curve(meshes: list[tuple[int, int, int]], steps: int, *, packed: bool = False, **options: Any) -> None:
    runs = []
    for sizes in meshes:
        trainer = trainer_on(mesh_of(*sizes), **options)
        runs.append((trainer, *run(trainer, steps, packed=packed)))
    assert_same_as_one_device(runs, packed=packed, **options)


def assert_same_as_one_device(
    runs: list[tuple[Trainer, np.ndarray, TrainState]], *, packed: bool = False, **options: Any
) -> None:
    """Asserts that runs on meshes, and the held-out losses after them, are those of a run on one device."""
    one, batch = trainer_on(None, **options), batch_of(99, classes=options.get("config", SHAPE).vocab_size)
    want, state = run(one, len(runs[0][1]), packed=packed)
    held_out = one.held_out_loss(one.evaluated(state), batch)
    for trainer, got, state in runs:
        assert_same(got, want)
        assert abs(trainer.held_out_loss(trainer.evaluated(state), batch) - held_out) < BOUND * held_out


class Placed(NamedTuple):
    """Where an array of a state is."""

    name: str
    size: int
    of_device: int  # of the size
    committed: bool


def placed_arrays(state: TrainState) -> list[Placed]:
    return [
        Placed(name_of(path), leaf.size, math.prod(leaf.sharding.shard_shape(leaf.shape)), leaf.committed)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    ]


class SmallRun(NamedTuple):
    """Three steps on eight devices."""

    trainer: Trainer
    initial: list[Placed]
    losses: np.ndarray
    state: TrainState


@cache
def small_run() -> SmallRun:
    """Returns the one run of the quick checks, whose step is compiled once."""
    trainer = trainer_on(mesh_of(2, 2, 2), DEEP)
    trainer.compile(BATCH, 16)
    initial = placed_arrays(trainer.initial)
    return SmallRun(trainer, initial, *run(trainer, 3))


def quick() -> None:
    trainer, _, losses, state = small_run()
    assert_same_as_one_device([(trainer, losses, state)], config=DEEP)


def places() -> None:
    """No device holds more than its part of a matrix or of the optimizer's state, from the first state on."""
    for arrays in (small_run().initial, placed_arrays(small_run().state)):
        number = 0
        for name, size, of_device, committed in arrays:
            if name.endswith((".kernel", "embedding", "head")):
                number += 1
                assert of_device * 4 == size, name
            elif name.endswith(("query.bias", "key.bias", "value.bias")):
                assert of_device * 2 == size, name
            assert committed, name
        assert number == 3 * 9  # parameters, and two averages of each


def kept() -> None:
    """Layers that are compiled separately keep their gathered matrices, without a policy of jax.checkpoint, and the
    estimate of the memory counts them."""
    mesh, gathered = mesh_of(2, 2, 2), []
    for scan, remat in ((True, "none"), (False, "none"), (False, "full")):
        config = dataclasses.replace(DEEP, scan_layers=scan, remat=remat)
        trainer = Trainer(decoder_shapes(config), TrainConfig(batch_size=BATCH), None, mesh)
        gathered.append(least_memory(trainer, config, 16).gathered)
        with trainer.context():
            program = jax.make_jaxpr(lambda params, trainer=trainer: trainer.model(params)(jnp.zeros((8, 16), int)))
            text = str(program(trainer.initial.params))
        assert ("prevent_cse" in text) == ((scan, remat) != (False, "none"))
    assert gathered[1] == DEEP.num_layers * gathered[0] == DEEP.num_layers * gathered[2]


def new_adapters() -> None:
    """Adapters of a divided model are created where the table says."""
    model = small_run().trainer.model(small_run().state.params)
    adapt(model, LoraConfig(lora_rank=2, lora_targets=("query", "down"), dora=True), nnx.Rngs(0))
    adapters = [one for one in nnx.to_flat_state(nnx.state(model, nnx.Param)) if is_adapter(name_of(one[0]))]
    assert len(adapters) == 6
    for path, leaf in adapters:
        assert leaf[...].sharding.spec == spec_of(name_of(path), stacked=True), path


def restored() -> None:
    """A checkpoint of one mesh is read to the devices of another, and to one device."""
    saved, shapes = small_run().state, decoder_shapes(DEEP)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", writes=True)
        checkpoints.save(3, saved, {})
        for mesh in (mesh_of(1, 1, 2), None):
            like = Trainer(shapes, TrainConfig(batch_size=BATCH), None, mesh).initial
            state, _ = checkpoints.restore(like)
            for found, want, wanted in zip(*map(jax.tree.leaves, (state, saved, like)), strict=True):
                np.testing.assert_array_equal(found, want)
                assert found.sharding == (wanted.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        checkpoints.close()


def other_mesh() -> None:
    """A checkpoint of 8 devices continues on 4, on 2, on 1 and on 8 again, with the same curve."""
    want, _ = run(trainer_on(None), 10)
    with tempfile.TemporaryDirectory() as folder:
        state, got = None, []
        for step, sizes in ((0, (2, 2, 2)), (2, (2, 2, 1)), (4, (1, 1, 2)), (6, None), (8, (1, 4, 2))):
            mesh = None if sizes is None else mesh_of(*sizes)
            checkpoints = Checkpoints(Path(folder) / "checkpoints", writes=True)
            if step:
                trainer = Trainer(decoder_shapes(SHAPE), trainer_on(None)._config, None, mesh)
                state, _ = checkpoints.restore(trainer.initial)
                for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(trainer.initial), strict=True):
                    assert mesh is None or leaf.sharding == like.sharding
            else:
                trainer = trainer_on(mesh)
            losses, state = run(trainer, 2, begin=state, first=step)
            got.append(losses)
            checkpoints.save(step + 2, state, {})
            checkpoints.close()
    assert_same(np.concatenate(got), want)


def repeats() -> None:
    """On one mesh, two runs are equal bit for bit, and so is one that continues from a checkpoint."""
    mesh = mesh_of(2, 2, 2)
    want, _ = run(trainer_on(mesh), 4)
    again, _ = run(trainer_on(mesh), 4)
    np.testing.assert_array_equal(again, want)
    _, state = run(trainer_on(mesh), 2)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints", writes=True)
        checkpoints.save(2, state, {})
        trainer = Trainer(decoder_shapes(SHAPE), trainer_on(mesh)._config, None, mesh)
        state, _ = checkpoints.restore(trainer.initial)
        checkpoints.close()
    rest, _ = run(trainer, 2, begin=state, first=2)
    np.testing.assert_array_equal(rest, want[2:])


def weights_by_shard() -> None:
    """Each device gets its part of each tensor of a folder, and no more of it is read at once."""
    config = dataclasses.replace(SHAPE, family="phi3", tie_embeddings=False)
    model = random_decoder(config)
    read: list[int] = []
    block = weights._Files.block

    def recorded(self: Any, *arguments: Any) -> np.ndarray:
        found = block(self, *arguments)
        read.append(found.size)
        return found

    with tempfile.TemporaryDirectory() as folder:
        weights.save(model, Path(folder) / "model")
        with mock.patch.object(weights._Files, "block", recorded):
            loaded = weights.load(Path(folder) / "model", mesh=mesh_of(1, 2, 2))
            assert max(read) == 280 * 16 // 4
            once = sum(read)
            read.clear()
            weights.load(Path(folder) / "model", mesh=mesh_of(2, 2, 1))  # two devices have the same block
            assert sum(read) == once
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(each, nnx.Param))) for each in (loaded, model))
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf[...], theirs[path][...])
        assert leaf[...].sharding.spec == spec_of(name_of(path), stacked=path[0] == "blocks")


def fine_tuning() -> None:
    """A model of a folder with adapters, of another folder or new ones, trains as on one device."""
    model = random_decoder(UNTIED)
    with tempfile.TemporaryDirectory() as place:
        folder, adapters = Path(place) / "model", Path(place) / "adapters"
        weights.save(model, folder)
        adapt(model, ADAPTERS["dora"], nnx.Rngs(3))
        query: Any = model.blocks.attention.query
        query.lora_b[...] += 0.1
        save_adapter(model, adapters, base=folder)
        for lora in (ADAPTERS["dora"], read_adapter_config(adapters)):
            config = RunConfig(config=None, weights=folder, lora=lora)
            curves = []
            for mesh in (None, mesh_of(1, 2, 2), mesh_of(2, 2, 2)):
                loaded = _initial_model(config, UNTIED, mesh)
                for path, leaf in nnx.to_flat_state(nnx.state(loaded, nnx.Param)) if mesh else ():
                    assert leaf[...].sharding.spec == spec_of(name_of(path), stacked=path[0] == "blocks"), path
                trainer = Trainer(loaded, TrainConfig(batch_size=BATCH, warmup_steps=2), lora, mesh)
                curves.append(run(trainer, 3)[0])
            for curve in curves[1:]:
                assert_same(curve, curves[0])


GATHER = re.compile(r"= \w+\[([\d,]*)\]\S* all-gather\(.*op_name=\"([^\"]*)\"")


def assert_gathers_by_layer(trainer: Trainer, config: ModelConfig) -> None:
    """A device gathers the matrices of one layer at a time, never a stack of them, and again for the backward pass, but
    where each layer is compiled separately and its matmuls are not repeated."""
    assert trainer.mesh is not None
    tokens, _, _ = loss_of_device(trainer.mesh, BATCH * 16, config.vocab_size)
    compiled = trainer.compile(BATCH, 16)
    planned, least = step_memory(trainer, compiled), least_memory(trainer, config, tokens)
    assert planned is not None
    assert (planned.parameters, planned.optimizer) == (least.parameters, least.optimizer)
    assert least.total < planned.total
    text = compiled.as_text() or ""
    gathers = [
        (tuple(map(int, sizes.split(","))), name) for sizes, name in GATHER.findall(text) if "shard_map" not in name
    ]
    layers = 1 if config.scan_layers else config.num_layers
    again = config.scan_layers or config.remat in ("elementwise", "full")
    for part, times in {"/jvp(model)/": 1, "/transpose(jvp(model))/": again}.items():
        assert sum(part in name for _, name in gathers) == 7 * layers * times, (part, gathers)
    assert all(len(sizes) == 2 for sizes, _ in gathers), gathers
    assert len(gathers) == 7 * layers * (1 + again)


def program() -> None:
    assert_gathers_by_layer(small_run().trainer, DEEP)


def programs(*several: dict[str, Any]) -> None:
    for sizes in ((1, 4, 1), (2, 2, 2)):
        for changes in several:
            config = dataclasses.replace(SHAPE, num_layers=3, **changes)
            assert_gathers_by_layer(trainer_on(mesh_of(*sizes), config), config)


def held_out() -> None:
    """The loss of 64 batches, each a program that exchanges numbers."""
    windows = [batch_of(seed) for seed in range(64)]
    tokens, targets = (np.concatenate([getattr(one, name) for one in windows]) for name in ("tokens", "targets"))
    trainers = [trainer_on(mesh) for mesh in (None, mesh_of(2, 2, 1))]
    want, found = (one.held_out_loss(one.initial.params, Batch(tokens, targets, None)) for one in trainers)
    assert abs(found - want) <= BOUND * want


def frozen_layers() -> None:
    """Where only the head trains, no input of a layer is kept for a backward pass."""
    for sizes in ((4, 1, 1), (1, 4, 1)):
        frozen = TrainConfig(batch_size=BATCH, freeze=("blocks", "embedding"), weight_decay=0.0)
        trainer = Trainer(decoder_shapes(UNTIED), frozen, None, mesh_of(*sizes))
        least = least_memory(trainer, UNTIED, 16)
        assert least.layer_inputs == 0
        assert (least.gathered == 0) == (sizes[1] == 1)


OPTIMIZERS = ("muon", "schedule_free_adamw", "adafactor")
ADAPTERS = {
    "lora": LoraConfig(lora_rank=3),
    "dora": LoraConfig(lora_rank=3, dora=True, lora_targets=("query", "out", "down"), unfreeze=("head", "norms")),
}
CHANGES: dict[str, dict[str, Any]] = {
    "few classes": {"config": dataclasses.replace(SHAPE, vocab_size=20)},  # gathers the embedding and the head
    "untied": {"config": UNTIED},
    "packed": {"packed": True},
    "accumulate": {"accumulate": 2},
    "freeze": {"freeze": ("embedding", "attention")},
    "loss options": {"z_loss_weight": 1e-3, "label_smoothing": 0.1},
    "windows": {"config": dataclasses.replace(SHAPE, sliding_window=5, window_pattern=(True, False))},
    "softcap": {"config": dataclasses.replace(SHAPE, attention_softcap=2.0, logit_softcap=3.0)},
    "norms": {"config": dataclasses.replace(SHAPE, joint_query_key_norm=True, post_norms=True)},
    **{f"optimizer {name}": {"optimizer": name} for name in OPTIMIZERS},
    **{name: {"lora": lora, "config": UNTIED} for name, lora in ADAPTERS.items()},
    **{
        f"remat {remat}, scan {scan}": {"config": dataclasses.replace(SHAPE, remat=remat, scan_layers=scan)}
        for remat in ("none", "attention", "elementwise", "full")
        for scan in (True, False)
    },
}


def command() -> None:
    """The command trains on a mesh, stops, and continues on another one, as on one device."""
    options = ["--num-kv-heads=2", "--batch-size=8", "--sample-tokens=2"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_texts(place / "data")
        assert start(place, "one", *options) == 0
        assert start(place, "mesh", *options, "--mesh=data=2,fsdp=2,tensor=2") == 0
        assert start(place, "both", *options, "--mesh=data=8", "--steps=4") == 0
        assert start(place, "both", *options, "--mesh=fsdp=4,tensor=2", "--resume") == 0
        one, mesh, both = (learned(place / "runs" / name) for name in ("one", "mesh", "both"))
    for row, other in zip(one, mesh, strict=True):
        assert row.keys() == other.keys()
        assert all(abs(row[name] - other[name]) < 1e-4 for name in row), (row, other)
    assert [row["step"] for row in both] == [row["step"] for row in one]


def pretraining_example() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder) / "data")
        options = ["--data", f"{folder}/data", "--steps=20", "--out", f"{folder}/out"]
        same_example("pretrain_text", {"MODEL": SHAPE}, options)


def fine_tuning_example() -> None:
    changes = {"MODEL": ModelConfig(280, 32, 1, 2, 2, 16, 48, 128), "KINDS": {"tool": "saw rake"}}
    with tempfile.TemporaryDirectory() as folder:
        for options in (
            ["--steps=30", "--out", f"{folder}/full"],
            ["--steps=5", "--lora"],
            ["--steps=5", "--lora", "--weights", f"{folder}/full", "--out", f"{folder}/adapter"],
        ):
            same_example("finetune_instructions", changes, options)


def same_example(name: str, changes: dict[str, Any], options: list[str]) -> None:
    """An example prints the same held-out loss on a mesh as on one device, and writes the same tensors."""
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    example.__globals__.update(changes)
    printed, written = [], []
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        for mesh in ([], ["--mesh=fsdp=4,tensor=2"], ["--mesh=data=2,fsdp=2,tensor=2"]):
            if "--out" in options:
                shutil.rmtree(options[-1], ignore_errors=True)
            with redirect_stdout(io.StringIO()) as out:
                example([*options, *mesh])
            printed.append(float(out.getvalue().split("held-out loss ")[1].split()[0]))
            if "--out" in options:
                (file,) = Path(options[-1]).glob("*.safetensors")
                written.append(load_file(file))
    np.testing.assert_allclose(printed, printed[0], rtol=0, atol=0.002, err_msg=str(options))
    for tensors in written:
        for tensor, values in tensors.items():
            np.testing.assert_allclose(values, written[0][tensor], rtol=0, atol=1e-3, err_msg=tensor)


def grpo_example(loss: str) -> None:
    """The first updates of GRPO are those of one device: the same rewards, and parameters that differ by rounding only.
    Later ones may differ more, because rounding may change a sampled answer."""
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "grpo.py")))
    config = dataclasses.replace(SMALL_GRPO["MODEL"], num_kv_heads=2)
    example.train.__globals__.update({**SMALL_GRPO, "MODEL": config})

    def run_on(sizes: tuple[int, int, int] | None) -> tuple[list[float], Values, Values]:
        """Returns the rewards, and the parameters before and after the updates, without padding."""
        mesh = None if sizes is None else mesh_of(*sizes)
        with context_of(mesh):
            model = example.supervised_start(0, mesh)
            before = nnx.state(model)
            rewards, after = example.train(loss, model, 0, 6, mesh)
        assert mesh is None or after["embedding"][...].sharding.spec == spec_of("embedding", stacked=False)
        padding = before["embedding"][...][13:]
        assert len(padding) == -13 % parameter_shards(mesh)
        np.testing.assert_array_equal(after["embedding"][...][13:], padding)  # which has no gradient
        return rewards, without_padding(before), without_padding(after)

    want, before, after = run_on(None)
    assert 0 < min(want) <= max(want) < 1, "without both rewards there is no advantage"
    moved = distance(after, before)
    for sizes in ((1, 4, 2), (2, 2, 2), (8, 1, 1)):
        rewards, started, ended = run_on(sizes)
        assert rewards == want, sizes
        assert distance(started, before) < 1e-6 * moved
        assert distance(ended, after) < 2e-5 * moved  # the bound of the two losses in test_examples.py


def without_padding(params: nnx.State) -> Values:
    """Returns the parameters by name, of the embedding the rows of the 13 tokens of examples/grpo.py."""
    found = {name_of(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    return {**found, "embedding": found["embedding"][:13]}


def distance(one: Values, other: Values) -> float:
    assert one.keys() == other.keys()
    return math.sqrt(sum(float(np.sum((one[name] - other[name]) ** 2)) for name in one))


CHECKS: dict[str, Callable[[], None]] = {
    "places": places,
    "other mesh": other_mesh,
    "weights": weights_by_shard,
    "restored": restored,
    "repeats": repeats,
    "held-out": held_out,
    "frozen layers": frozen_layers,
    "fine-tuning": fine_tuning,
    "program": program,
    "kept": kept,
    "new adapters": new_adapters,
    "programs": partial(
        programs,
        {},
        {"remat": "full"},
        {"remat": "elementwise"},
        {"remat": "attention", "scan_layers": False},
        {"remat": "full", "scan_layers": False},
    ),
    "command": command,
    "example of pretraining": pretraining_example,
    "example of fine-tuning": fine_tuning_example,
    **{f"example of GRPO, {loss}": partial(grpo_example, loss) for loss in ("fused", "unfused")},
    "quick": quick,
    **{f"50 steps {sizes}": partial(same_curve, [sizes], 50) for sizes in MESHES},
    **{name: partial(same_curve, [(1, 2, 2), (2, 1, 2), (2, 2, 2)], 5, **changes) for name, changes in CHANGES.items()},
}
QUICK = ("kept", "new adapters", "places", "weights", "quick", "restored", "program", "frozen layers")


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    return failures_of(request, devices=DEVICES)


@pytest.mark.parametrize("name", QUICK)
def test_on_a_mesh(failures: dict[str, str], name: str) -> None:
    assert name not in failures, failures[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in QUICK])
def test_alone_on_a_mesh(name: str) -> None:
    """Each runs in another process, so that no test takes minutes and several workers divide them."""
    found = failures_in(Path(__file__), [name], DEVICES)
    assert not found, found[name]


@pytest.mark.parametrize(
    "text",
    ["", "data", "data=", "data=0", "data=-1", "data=2.0", "rows=2", "data=2,data=2", "data=2;fsdp=2", "data=\u00b2"],
)
def test_a_wrong_mesh_is_one_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"--mesh must give each of the axes data, fsdp, tensor .* got "):
        mesh_sizes(text)


def test_a_mesh_has_all_devices() -> None:
    with pytest.raises(RunError, match=r"--mesh must multiply to 1, the number of cpu devices, got 'data=2,fsdp=3' "):
        make_mesh("data=2,fsdp=3")
    with pytest.raises(RunError, match=r"--mesh must give each of the axes .* got 'data=0'"):
        make_mesh("data=0")
    assert dict(make_mesh("tensor=1").shape) == {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("sizes", "changes", "rows", "message"),
    [
        ((2, 3, 1), {"hidden_size": 18}, 4, r"rows of a batch \(--batch-size\) must be a multiple of 6 .* got 4"),
        ((1, 3, 1), {}, 6, "the model's hidden_size must be a multiple of 3 .*fsdp 3.* got 16"),
        ((1, 1, 3), {}, 4, "the model's num_heads must be a multiple of 3 .*tensor 3.* got 4"),
        ((1, 1, 4), {}, 4, "the model's num_kv_heads must be a multiple of 4 .* got 2"),
        ((1, 1, 2), {"intermediate_size": 25}, 4, "the model's intermediate_size must be a multiple of 2 .* got 25"),
        ((1, 2, 2), {"vocab_size": 282}, 4, r"size \(--vocab-size\) must be a multiple of 4 .* got 282"),
    ],
)
def test_what_a_mesh_does_not_divide_is_one_error(
    sizes: tuple[int, int, int], changes: dict[str, int], rows: int, message: str
) -> None:
    mesh: Any = AbstractMesh(sizes, AXES)
    config = dataclasses.replace(SHAPE, **changes)

    def check() -> None:
        check_sizes(mesh, config, rows, "--batch-size")
        check_vocabulary(mesh, config, "--vocab-size")

    with pytest.raises(RunError, match=message):
        check()


@pytest.mark.parametrize(
    ("axes", "kind", "got"),
    [
        (("fsdp", "data", "tensor"), AxisType.Auto, "fsdp (AxisType.Auto), data "),
        (("data", "model"), AxisType.Auto, "data (AxisType.Auto), model (AxisType.Auto)"),
        (AXES, AxisType.Explicit, "data (AxisType.Explicit), "),
    ],
)
def test_a_trainer_takes_no_other_mesh(axes: tuple[str, ...], kind: AxisType, got: str) -> None:
    mesh = jax.make_mesh((1,) * len(axes), axes, axis_types=(kind,) * len(axes))
    message = "mesh must have the axes data, fsdp, tensor, in this order, with AxisType.Auto, got "
    with pytest.raises(ValueError, match=re.escape(message + got)):
        Trainer(decoder_shapes(SHAPE), TrainConfig(), mesh=mesh)


def test_parameters_must_fit_on_each_device() -> None:
    memory = DeviceMemory(4 * SHAPE.parameter_count() // 2, "of a device", True)
    check_parameters(SHAPE, LoraConfig(), memory, shards=2)
    with pytest.raises(RunError, match=r"on each device, more than the .* of a device"):
        check_parameters(SHAPE, LoraConfig(), memory._replace(size=memory.size // 2), shards=3)


def test_the_table_names_every_matrix() -> None:
    lora = LoraConfig(lora_rank=2, dora=True)
    found = set()
    for config in (UNTIED, dataclasses.replace(UNTIED, joint_query_key_norm=True, post_norms=True)):
        for path, leaf in nnx.to_flat_state(nnx.state(adapted_shapes(config, lora), nnx.Param)):
            name = name_of(path)
            spec = spec_of(name, stacked=path[0] == "blocks")
            if spec:
                assert len(spec) == len(leaf.shape), name
                found.add(name if name in TABLE else ".".join(name.split(".")[-2:]))
            else:
                vector = name.endswith((".scale", "out.bias", "out.lora_magnitude", "down.lora_magnitude"))
                assert vector, name
    assert found | {"gate.bias", "up.bias"} == {*TABLE}  # which no family has


def test_one_row_is_on_all_devices() -> None:
    mesh: Any = AbstractMesh((2, 2, 1), AXES)
    assert row_axes(mesh, 8) == ROWS
    assert row_axes(mesh, 1) is None


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_devices(tmp_path: Path) -> None:
    """8 -> 4 -> 2 -> 1 -> 8 devices, each from the checkpoint of step 6: the same steps 7 and 8."""
    write_texts(tmp_path / "data")
    places = ["--data", str(tmp_path / "data"), "--runs", str(tmp_path / "runs"), "--name", "run"]
    options = [*places, *SMALL, "--num-kv-heads=2", "--batch-size=4", "--sample-tokens=2"]
    rows = []
    for devices, mesh in (
        *[(8, "data=2,fsdp=2,tensor=2"), (4, "data=2,fsdp=2"), (2, "tensor=2"), (1, "data=1")],
        (8, "fsdp=4,tensor=2"),
    ):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "XLA_FLAGS": flags, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "flax_models.train", *options, "--mesh", mesh, *["--resume"] * bool(rows)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"of {devices} devices" in done.stdout
        assert not rows or "from step 6" in done.stdout
        rows.append(learned(tmp_path / "runs" / "run"))
        shutil.rmtree(tmp_path / "runs" / "run" / "checkpoints" / "8")
    for other in rows[1:]:
        assert [row["step"] for row in other] == [row["step"] for row in rows[0]]
        for row, same in zip(other, rows[0], strict=True):
            assert row.keys() == same.keys()
            assert all(math.isclose(row[name], same[name], rel_tol=BOUND) for name in row), (row, same)


if __name__ == "__main__":
    run_named(CHECKS, devices=DEVICES)
