"""Tests flax_models on an NVIDIA GPU: runs that resume bit for bit, cuDNN attention, training and generation with a
published shape, and training in both frameworks.

Run with `pytest -m gpu`. As a program, this file executes the given runs or checks. The tests start several such
programs in parallel.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import before_step, learned
from programs import Command, Printed, each, python, run_checks
from random_decoder import random_decoder

import flax_models.train.main as program
from flax_models import export, generate
from flax_models.data.batches import Batch
from flax_models.model.attention_choice import explain_attention
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.train.accounting import step_memory
from flax_models.train.checkpoint import Checkpoints
from flax_models.train.config import CONFIGS, TrainConfig
from flax_models.train.profile import PARTS
from flax_models.train.step import Trainer
from flax_models.train.trained import read_run
from parity.backends import expected_default
from parity.train.run import KERNELS

pytestmark = pytest.mark.gpu

FILE = Path(__file__).name
ROOT = Path(__file__).parents[1]
FUSED = expected_default("jax", "gpu", "bfloat16")  # the default loss implementation in bfloat16


@contextlib.contextmanager
def texts() -> Iterator[Path]:
    """Yields a folder with part of the standard library in data/, and a cache."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        place = Path(folder)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        (place / "data").mkdir()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
            (place / "data" / path.name).write_bytes(path.read_bytes())
        yield place


def options(**values: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def train(place: Path, *arguments: str) -> tuple[int, str]:
    """Runs the trainer. Returns its exit status and output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = program.main(["--runs", str(place / "runs"), "--name", "run", *arguments])
    return status, out.getvalue()


# Resuming

SMALL = options(
    vocab_size=1024,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    max_seq_len=128,
    dtype="bfloat16",
    steps=12,
    batch_size=8,
    accumulate=2,
    warmup_steps=2,
    checkpoint_every=5,
    eval_every=6,
    log_every=3,
    held_out_windows=16,
    sample_tokens=2,
)
ATTENTIONS = ("xla", "cudnn")
COURSES = ("whole", "broken")


def interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def run_and_print(attention: str, course: str) -> None:
    """Trains and prints the results. A "broken" run is interrupted and resumes from its last checkpoint."""
    with texts() as place:
        arguments = [*SMALL, *options(attention_implementation=attention, data=place / "data")]
        if course == "broken":
            with pytest.MonkeyPatch.context() as patch:
                before_step(patch, 9, interrupt)
                assert train(place, *arguments)[0] == 130
            arguments = ["--resume"]
        status, output = train(place, *arguments)
        assert status == 0
        assert ("from step 5" in output) == (course == "broken"), output
        folder = place / "runs" / "run"
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(nnx.state(read_run(folder).model)):
            digest.update(np.asarray(leaf).tobytes())
        print(json.dumps({"name": course, "rows": learned(folder), "parameters": digest.hexdigest()}))


def both_courses(attention: str) -> tuple[Command, ...]:
    """Returns the commands of the uninterrupted and the resumed run, each in its own process."""
    deterministic = "XLA_FLAGS=--xla_gpu_deterministic_ops=true"  # no atomics, and no autotuning
    return tuple(("env", deterministic, *python(FILE, attention, course)) for course in COURSES)


@pytest.mark.parametrize(
    "attention", [pytest.param(name, marks=pytest.mark.programs(*both_courses(name))) for name in ATTENTIONS]
)
def test_resumed_run_equals_the_uninterrupted_run_bit_for_bit(attention: str, printed: Printed) -> None:
    whole, broken = (printed[course] for course in COURSES)
    assert len({row["step"] for row in whole["rows"]}) == 12
    assert whole["rows"] == broken["rows"]
    assert whole["parameters"] == broken["parameters"]


# Checks, each in a separate process

CHECKS: dict[str, Callable[[], None]] = {}


def checked(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def hidden_states_and_gradients(
    config: ModelConfig, tokens: np.ndarray, lengths: np.ndarray | None, implementation: str
) -> list[np.ndarray]:
    """Returns the hidden states, and the gradients of the attention kernels for a random upstream gradient."""
    model = random_decoder(dataclasses.replace(config, attention_implementation=implementation))
    graph, params = nnx.split(model)
    upstream = jax.random.normal(jax.random.key(1), (*tokens.shape, config.hidden_size))

    def total(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        rows = None if lengths is None else jnp.asarray(lengths)
        hidden = nnx.merge(graph, params)(jnp.asarray(tokens), rows).astype(jnp.float32)
        return jnp.vdot(hidden, upstream), hidden

    lowered = jax.jit(jax.grad(total, has_aux=True)).lower(params)
    assert ("__cudnn$fmha" in lowered.as_text()) == (implementation == "cudnn")
    gradients, hidden = lowered.compile()(params)
    kernels = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradients) if "attention" in str(path)]
    return [np.asarray(array, np.float64) for array in (hidden, *kernels)]


def errors_of(
    implementations: tuple[str, ...], length: int, lengths: np.ndarray | None = None, **changes: Any
) -> Iterator[tuple[float, ...]]:
    """Yields the bfloat16 errors of the hidden states and of each gradient, relative to XLA attention in float32."""
    config = ModelConfig(**{"vocab_size": 97, "hidden_size": 128, "num_layers": 2, "num_heads": 4, **changes})
    tokens = np.random.default_rng(0).integers(97, size=(3, length))
    with jax.default_matmul_precision("highest"):
        exact = hidden_states_and_gradients(config, tokens, lengths, "xla")
    config = dataclasses.replace(config, dtype="bfloat16")
    found = (hidden_states_and_gradients(config, tokens, lengths, name) for name in implementations)
    for want, *got in zip(exact, *found, strict=True):
        yield tuple(float(np.linalg.norm(array - want) / np.linalg.norm(want)) for array in got)


# Rows of 256 tokens: four sequences, one sequence, and many sequences, one of them with a single token.
PACKED = np.array([[100, 28, 65, 63, 0, 0], [256, 0, 0, 0, 0, 0], [1, 40, 3, 130, 80, 2]], np.int32)
FAMILIES: dict[str, dict[str, Any]] = {
    "a key head for each query head": {"length": 128, "num_kv_heads": 4, "head_dim": 64},
    "a key head for two query heads": {"length": 128, "num_kv_heads": 2, "head_dim": 128},
    "one key head, as Gemma": {"length": 128, "num_kv_heads": 1, "head_dim": 256},
    "a head of 96, as Phi-3": {"length": 128, "num_kv_heads": 4, "head_dim": 96},
    "a window, as Mistral": {"length": 192, "num_kv_heads": 2, "head_dim": 64, "sliding_window": 40},
    "a length of no block": {"length": 130, "num_kv_heads": 2, "head_dim": 64},
    "packed": {"length": 256, "num_kv_heads": 2, "head_dim": 64, "lengths": PACKED},
    "packed, a head of 128": {"length": 256, "num_kv_heads": 4, "head_dim": 128, "lengths": PACKED},
}


def attends_as_plain_products_do(shape: dict[str, Any]) -> None:
    for plain, ours in errors_of(ATTENTIONS, **shape):
        assert ours <= 1.25 * plain + 1e-3, f"error {ours:.2g} instead of {plain:.2g}"


CHECKS |= {f"cudnn, {name}": partial(attends_as_plain_products_do, shape) for name, shape in FAMILIES.items()}


@checked
def packed_sequences_do_not_see_each_other() -> None:
    """Replacing one sequence does not change any bit of the others' hidden states."""
    shape: dict[str, Any] = {"vocab_size": 97, "hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = random_decoder(ModelConfig(**shape, dtype="bfloat16", attention_implementation="cudnn"))
    tokens = np.random.default_rng(0).integers(97, size=(3, 256))
    hidden = nnx.jit(lambda model, tokens: model(tokens, jnp.asarray(PACKED)))
    before, ends = np.asarray(hidden(model, tokens), np.float32), np.cumsum(PACKED, axis=1)
    for row, number in ((0, 0), (0, 2), (1, 0), (2, 3), (2, 5)):
        own = slice(ends[row, number] - PACKED[row, number], ends[row, number])
        other = tokens.copy()
        other[row, own] = (other[row, own] + 31) % 97
        moved = (np.asarray(hidden(model, other), np.float32) != before).any(axis=-1)
        assert moved[row, own].all()
        moved[row, own] = False
        assert not moved.any()


@checked
def adapters_learn_dialogues_by_kernels() -> None:
    pytest.importorskip("grain")
    shape = options(vocab_size=2048, num_layers=2, max_seq_len=256)  # the other options are unchanged
    steps = options(steps=30, batch_size=4, warmup_steps=5, log_every=10, eval_every=0, learning_rate=2e-3)
    adapters = [*options(lora_rank=8, lora_plus_ratio=16), "--dora", "--unfreeze", "embedding"]
    with texts() as place:
        data = place / "instructions.jsonl"
        with data.open("w") as file:
            for i in range(400):
                word = "ab"[i % 2] * (1 + i % 7)
                file.write(json.dumps({"instruction": f"Say {word} twice.", "output": f"{word} {word}"}) + "\n")
        with nothing_waits():
            given = options(data=data, sample_tokens=2)
            status, output = train(place, "--config", "qwen2.5-0.5b", *shape, *steps, *adapters, *given)
        assert status == 0
        for pattern in (
            r"^packing +best fit, at most \d+ examples per row: [\d.]+% padding$",
            r"^attention +cudnn: supported on compute capability ",
            rf"^loss +jax_pallas, ({'|'.join(FUSED)}): ",
        ):
            assert re.search(pattern, output, re.MULTILINE), f"{pattern} is not in\n{output}"
        losses = [row["loss"] for row in learned(place / "runs" / "run") if "loss" in row]
        assert losses[-1] < 0.5 * losses[0]


@checked
def what_cudnn_cannot_attend_is_refused_and_runs_by_plain_products() -> None:
    gemma2 = {"sliding_window": 40, "window_pattern": (True, False), "attention_softcap": 20.0}
    with pytest.raises(
        ValueError, match="attention_implementation cudnn needs scores without attention_softcap, got 20"
    ):
        ModelConfig(dtype="bfloat16", attention_implementation="cudnn", **gemma2)
    for (error,) in errors_of(("xla",), length=128, num_kv_heads=2, head_dim=64, **gemma2):
        assert error < 5e-2  # 2.8e-2 on a CPU
    config = ModelConfig(num_layers=1, dtype="bfloat16", max_seq_len=131)
    named = dataclasses.replace(config, attention_implementation="cudnn")
    tokens = jnp.zeros((1, 131), jnp.int32)
    with pytest.raises(ValueError, match=r"attention_implementation cudnn needs an even number of tokens .* got 131"):
        Decoder(named, rngs=nnx.Rngs(0))(tokens)
    assert explain_attention(config, 131).name == "xla"
    assert jnp.isfinite(Decoder(config, rngs=nnx.Rngs(0))(tokens)).all()


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Forbids implicit transfers between host and device in the training loop."""
    loop, save = program.train, Checkpoints.save

    def guarded(*arguments: Any) -> Any:
        with jax.transfer_guard("disallow"):
            return loop(*arguments)

    def let_through(*arguments: Any) -> Any:
        with jax.transfer_guard("allow"):
            return save(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "train", guarded)
        patch.setattr(Checkpoints, "save", let_through)
        yield


@checked
def a_published_shape_trains_and_its_weights_continue_texts() -> None:
    shape = options(vocab_size=2048, num_layers=2, max_seq_len=1024)  # the other options are unchanged
    steps = options(steps=8, batch_size=4, warmup_steps=2, log_every=2, eval_every=0, held_out_windows=4)
    with texts() as place:
        data = options(data=place / "data", sample_tokens=2)
        with nothing_waits():
            status, output = train(place, "--config", "qwen2.5-0.5b", *shape, *steps, *data, "--profile")
        assert status == 0
        for pattern in (
            r"^model +[\d,]+ parameters, 100% trainable, on NVIDIA",
            r"^attention +cudnn: supported on compute capability ",
            r"^repeats +up to rounding; for bit-for-bit repeats, set XLA_FLAGS=--xla_gpu_deterministic_ops=true$",
            r"^memory +[\d.]+ [MG]iB per step: parameters .*, optimizer .*, batch .*, temporaries ",
            r"^ +of the [\d.]+ GiB that JAX may use of NVIDIA",
            rf"^loss +jax_pallas, ({'|'.join(FUSED)}): ",
            r"^step +8/8  loss [\d.]+  grad [\d.]+  [\d,]+ tokens/s  [\d.]+(% MFU| .?FLOP/s)",
            *(rf"^    {part} +[\d.]+% +[\d.]+ ms/step$" for part in PARTS),
        ):
            assert re.search(pattern, output, re.MULTILINE), f"{pattern} is not in\n{output}"
        traced = re.search(r"device time of 5 traced steps, over all threads and streams: ([\d.]+) ms", output)
        assert traced is not None, output
        assert float(traced[1]) > 5 * 0.8, "matmuls must take longer: operations without a name are missing"
        run, weights = str(place / "runs" / "run"), str(place / "weights")
        assert export.main(["--run", run, "--out", weights]) == 0
        for source in (["--run", run], ["--weights", weights, "--dtype", "bfloat16"]):
            prompts = ["--prompt", "import ", "--prompt", "def main("]
            drawn = []
            for _ in range(2):
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    assert generate.main([*source, *prompts, "--length", "24", "--min-tokens", "4"]) == 0
                drawn.append(out.getvalue())
            assert drawn[0] == drawn[1]
            assert re.fullmatch(r"import .+\n---\ndef main\(.+\n---\n", drawn[0], re.DOTALL), drawn[0]


@checked
def a_step_of_a_published_model_takes_the_memory_that_is_said() -> None:
    shape = CONFIGS["qwen2.5-0.5b"].model
    config = dataclasses.replace(shape, max_seq_len=1024, scan_layers=True)  # takes a third of the time to compile
    settings = TrainConfig(steps=8, batch_size=8, learning_rate=3e-4, warmup_steps=2)
    trainer = Trainer(Decoder(config, rngs=nnx.Rngs(0)), settings)
    compiled = trainer.compile(8, 1024)
    memory = step_memory(trainer, compiled)
    assert memory is not None
    program = compiled.as_text() or ""
    assert "__cudnn$fmha" in program
    assert "mosaic_gpu_v2" in program or "mosaic" not in FUSED
    state = jax.device_put(trainer.initial, jax.devices()[0])
    del trainer.initial
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(8, 1025)).astype(np.int32)
    batch = jax.device_put(Batch(tokens[:, :-1], tokens[:, 1:]))
    losses = []
    with jax.transfer_guard("disallow"):
        for _ in range(6):
            state, metrics = trainer.step(state, batch)
            losses.append(metrics.loss)
    losses = jax.device_get(losses)
    assert abs(losses[0] - math.log(config.vocab_size)) < 1.5
    assert losses[-1] < losses[0] - 0.1  # one batch, repeated
    statistics = jax.devices()[0].memory_stats()
    assert statistics is not None
    took = statistics["peak_bytes_in_use"]
    planned = memory.total  # initialization and fragmentation add a little
    assert 0.7 < planned / took < 1.05, f"{planned / 2**30:.1f} GiB planned, {took / 2**30:.1f} GiB used"


@checked
def both_frameworks_train_alike_by_their_kernels() -> None:
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "train.json"
        command = [sys.executable, "-m", "parity", "train", "--json", str(document)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        curves = json.loads(document.read_text())["curves"]
    for (framework, platform), implementation in KERNELS.items():
        curve = curves[f"{framework}-fused"]
        assert (curve["implementation"], curve["platform"]) == (implementation, platform)
        assert f"{framework} by {implementation} on {curve['device']}" in done.stdout.splitlines()[-1]


ATTENDING = [name for name in CHECKS if name.startswith("cudnn")]  # a few seconds each, in three processes
COMMANDS = {name: python(FILE, name) for name in CHECKS}
COMMANDS |= {name: python(FILE, *ATTENDING[i % 3 :: 3]) for i, name in enumerate(ATTENDING)}


@pytest.mark.parametrize("name", each(COMMANDS))
def test_check(name: str, printed: Printed) -> None:
    assert not printed[name]["failure"], printed[name]["failure"]


if __name__ == "__main__":
    if sys.argv[1] in ATTENTIONS:
        run_and_print(*sys.argv[1:])
    else:
        run_checks(CHECKS, sys.argv[1:])
