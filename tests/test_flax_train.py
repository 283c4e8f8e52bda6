"""Tests `python -m flax_models.train` on a few small texts: files, options, errors, and the training step."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import random_batch, small_trainer, start, train, write_texts
from jax._src.array import ArrayImpl

import flax_models.train.main as program
import jax_pallas
from flax_models.data.batches import IGNORED, Batch, DocumentIndex, held_out_windows
from flax_models.display import duration
from flax_models.errors import RunError
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.model.lora_config import LoraConfig
from flax_models.train.config import CONFIGS, RunConfig, TrainConfig, from_json, to_json
from flax_models.train.metrics import CLOCKED, read_rows
from flax_models.train.optimizers import learning_rate_schedule, make_optimizer
from flax_models.train.plot import running_mean
from flax_models.train.run_folder import new_folder
from flax_models.train.step import Trainer
from jax_pallas.linear_ce import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A folder with the finished run `whole`, and the run's output. Tests read or copy the folder."""
    place = tmp_path_factory.mktemp("finished")
    write_texts(place / "data")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        assert start(place, "whole") == 0
    return place, out.getvalue()


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of that folder that a test may change. The run still uses the original path of the texts."""
    shutil.copytree(finished[0] / "runs", tmp_path / "runs")
    return tmp_path


def test_run_writes_all_files_and_reports_its_results(finished):
    place, out = finished
    folder = place / "runs" / "whole"
    assert {path.name for path in folder.iterdir() if not path.name.startswith("events.out")} == {
        "config.json",
        "tokenizer.json",
        "lock",
        "metrics.jsonl",
        "loss.png",
        "result.json",
        "checkpoints",
    }
    assert len(list(folder.glob("events.out.tfevents*"))) == 1
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [6, 8], (
        "the run must keep the last two checkpoints"
    )
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    rows = read_rows(folder)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8]
    train_rows = [row for row in rows if "loss" in row]
    assert set(train_rows[0]) == {"step", "loss", "grad_norm", "learning_rate"} | CLOCKED - {"mfu"}
    assert train_rows[-1]["loss"] < train_rows[0]["loss"]

    config = json.loads((folder / "config.json").read_text())
    assert re.fullmatch("[0-9a-f]{64}", config["corpus_sha256"])
    assert config["train"]["steps"] == 8

    result = json.loads((folder / "result.json").read_text())
    for name in ("uniform", "unigram", "bigram"):
        assert re.search(rf"{name} +{result[name]:.3f}", out)
    assert f"{result['held_out_loss']:.3f}" in out
    assert config["corpus_sha256"][:16] in out
    assert "sample:" in out
    assert "\x1b" not in out, "without a terminal, there must be no colors or progress bars"


def test_user_errors_are_one_line_and_leave_no_files(place, capsys):
    (place / "empty").mkdir()
    (place / "short.txt").write_text("a few words\n")
    (place / "wide.txt").write_text("a few words\n", encoding="utf-16-le")
    data = str(place / "data")
    for options, message in [
        (["--data", str(place / "absent")], "--data: no such file or folder: .*absent"),
        (["--data", str(place / "empty")], "--data: no text found in .*empty"),
        (["--data", str(place / "short.txt")], "too little text to train on"),
        (
            ["--data", data, str(place / "wide.txt"), "--vocab-size", "100"],
            "--data: .*wide.txt is not text: it has a null character",
        ),
        (["--resume"], "--resume: nothing to continue, .*runs has no run tiny"),
        (["--resume", "--name", "b"], "--resume: nothing to continue, .*b is not a run"),
        (
            ["--hidden-size", "1000000000"],
            "the model is too large: its .* parameters need .* GiB, more than .* got .*--hidden-size 1000000000, ",
        ),
        (
            ["--config", "micro", "--lora-rank", "2000000000", "--lora-targets", "query", "value"],
            "the model is too large: its 896,000,139,584 parameters need .* got .*--lora-rank 2000000000$",
        ),
    ]:
        assert train(place, *options) == 1, options
        captured = capsys.readouterr()
        assert re.match(f"error: {message}", captured.err), captured.err
        assert captured.err.count("\n") == 1
        assert not (place / "runs").exists()


def test_options_that_are_wrong_together_are_a_wrong_command_line(place, capsys):
    for options, message in [
        (["--data", str(place / "data"), "--vocab-size", "100"], "--vocab-size must be at least 257"),
        (["--name", "a/b"], "--name must be a folder name without a path, got 'a/b'"),
        (["--name", "a/b", "--resume"], "--name must be a folder name without a path, got 'a/b'"),
        (["--rope-factor", "2", "--name", "a/b"], "--rope-factor has no effect with --rope-type default, got 2.0"),
        (
            ["--batch-tokens", "256", "--batch-size", "3", "--name", "a/b"],
            "--batch-size has no effect with --batch-tokens, got 3",
        ),
        (["--batch-tokens", "20"], "--batch-tokens must be at least --max-seq-len 128, got 20"),
        (["--mesh", "data=1", "--coordinator", "a:1"], "--coordinator requires --process-count and --process-id too"),
        (
            ["--mesh", "data=1", "--coordinator", "a", "--process-count", "2", "--process-id", "0"],
            "--coordinator must be HOST:PORT, got 'a'",
        ),
        (
            ["--mesh", "data=1", "--coordinator", "a:1", "--process-count", "2", "--process-id", "2"],
            r"--process-id must be in \[0, --process-count\), got 2 of 2",
        ),
    ]:
        assert train(place, *options) == 2, options
        captured = capsys.readouterr()
        assert re.match(f"error: {message}", captured.err), captured.err
        assert captured.err.count("\n") == 1
        assert not (place / "runs").exists()


HUGE = "99999999999999999999"  # does not fit into 64 bits
SIZES = (
    "--steps",
    "--batch-tokens",
    "--vocab-size",
    "--hidden-size",
    "--num-layers",
    "--sliding-window",
    "--lora-rank",
)


def test_a_wrong_option_is_named(place, capsys):
    for options, message in [
        (["--learning-rte", "1"], "Unrecognized options: --learning-rte, 1; did you mean --learning-rate?"),
        (["--config", "huge"], "argument --config: invalid choice: 'huge'"),
        (["--steps", "many"], "--steps must be an integer, got 'many'"),
        (["--learning-rate", "1,5"], "--learning-rate must be a number, got '1,5'"),
        (["--steps"], "Missing value for argument '--steps'. Expected 1 values"),
        (["--optimizer", "sgd"], "invalid choice 'sgd' for argument '--optimizer'. Expected one of ('adamw', 'muon', "),
        (["stray"], "Unrecognized options: stray"),
        (["--learning-rate", "inf"], "--learning-rate must be positive and finite, got inf"),
        (["--learning-rate", "nan"], "--learning-rate must be positive and finite, got nan"),
        (["--clip-norm", "nan"], "--clip-norm must be positive, got nan"),
        (["--weight-decay", "inf"], "--weight-decay must be finite and not negative, got inf"),
        (["--z-loss-weight", "nan"], "--z-loss-weight must be finite and not negative, got nan"),
        (["--lora-rank", "2", "--lora-alpha", "inf"], "--lora-alpha must be positive and finite, got inf"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--accumulate", "3", "--batch-size", "4"], "--accumulate must divide --batch-size 4, got 3"),
        (["--label-smoothing", "2"], "--label-smoothing must be in [0, 1], got 2"),
        (["--beta2", "1"], r"--beta2 must be in [0, 1), got 1"),
        (["--num-heads", "5", "--num-kv-heads", "2"], "--num-heads must be a multiple of num_kv_heads 2, got 5"),
        (["--sample-tokens", "-1"], "--sample-tokens must be in [0, 1,000,000], got -1"),
        (["--sample-tokens", HUGE], f"--sample-tokens must be in [0, 1,000,000], got {HUGE}"),
        (["--seed", "-1"], "--seed must be in [0, 4,294,967,296), got -1"),
        (["--seed", HUGE], f"--seed must be in [0, 4,294,967,296), got {HUGE}"),
        (["--num-layers", "0"], "--num-layers must be at least 1, got 0"),
        (["--max-seq-len", "1"], "--max-seq-len must be at least 2, got 1: attention over one token has no gradient"),
        (["--max-seq-len", "0"], "--max-seq-len must be at least 1, got 0"),
        (
            ["--lora-rank", "2", "--freeze", "embed", "norms"],
            "--freeze cannot be used with --lora-rank, whose adapters freeze all other parameters, got embed norms",
        ),
        (["--num-layers", "1000000000"], "--num-layers must be at most 10,000, got 1000000000"),
        (["--batch-tokens", "0"], "--batch-tokens must be at least 1, got 0"),
        (["--process-count", "2", "--process-id", "0", "--name=a/b"], "--process-count requires --mesh, got only 2"),
        (["--process-id", "0", "--name=a/b"], "--process-id requires --mesh, got only 0"),
        (["--batch-tokens", "many"], "--batch-tokens must be an integer or None, got 'many'"),
        (["--lora-alpha", "many"], "--lora-alpha must be a number or None, got 'many'"),
        *(([option, HUGE], f"{option} must be at most 2,147,483,647, got {HUGE}") for option in SIZES),
    ]:
        with pytest.raises(SystemExit) as stopped:
            train(place, *options)
        assert stopped.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {message}"), err
        assert err.count("\n") == 1


def test_an_infinite_clip_norm_clips_nothing():
    gradient = jnp.array([3e4, -4e4])
    rate, clip_norm = 0.5, TrainConfig(clip_norm=math.inf).clip_norm
    infinite, wide = (
        make_optimizer(TrainConfig(clip_norm=norm, learning_rate=rate, beta1=0.0)) for norm in (clip_norm, 1e9)
    )
    updates = [one.update(gradient, one.init(gradient), gradient)[0] for one in (infinite, wide)]
    assert np.isfinite(np.asarray(updates[0])).all()
    np.testing.assert_array_equal(np.asarray(updates[0]), np.asarray(updates[1]))


def test_help_lists_every_option_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for cls in (RunConfig, TrainConfig, LoraConfig, ModelConfig):
        for field in dataclasses.fields(cls):
            if not dataclasses.is_dataclass(field.type):
                assert field.name.replace("_", "-") in out
    assert "Texts or dialogues: text files, JSON lines" in out


def test_a_folder_for_runs_that_cannot_be_written_is_an_error_at_once(place, capsys, monkeypatch):
    runs = place / "data" / "file" / "runs"
    runs.parent.touch()
    assert program.main(["--config", "micro", "--data", str(place / "absent"), "--runs", str(runs)]) == 1
    message = f"error: cannot write {runs}: {runs.parent} is not a folder to which you may write\n"
    assert capsys.readouterr().err == message


def test_used_name_and_changed_option_or_text_are_errors(copied, capsys):
    assert start(copied, "whole") == 1
    assert re.match(r"error: .*whole already exists; use --resume to continue it", capsys.readouterr().err)
    resume = ["--name", "whole", "--resume"]
    assert train(copied, *resume, "--learning-rate", "0.5") == 1
    assert re.search(r"--learning-rate must be 0.01, as in .*config.json, got 0.5", capsys.readouterr().err)

    record = copied / "runs" / "whole" / "config.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "corpus_sha256": "0" * 64}))
    assert train(copied, *resume) == 1
    assert "the text has changed" in capsys.readouterr().err
    for broken in ("{", "[]", json.dumps({**values, "train": {**values["train"], "steps": 0}})):
        record.write_text(broken)
        assert train(copied, *resume) == 1
        assert re.match("error: cannot read .*config.json", capsys.readouterr().err)


def test_unnamed_runs_are_numbered_and_the_latest_is_continued(copied):
    runs = copied / "runs"
    assert new_folder(RunConfig(runs=runs)) == runs / "tiny"
    (runs / "whole").rename(runs / "tiny")
    assert new_folder(RunConfig(runs=runs)) == runs / "tiny-2"
    shutil.copytree(runs / "tiny", runs / "tiny-2")
    shutil.copytree(runs / "tiny", runs / "tiny-other")  # a name that a user chose
    for age, name in enumerate(("tiny-2", "tiny", "tiny-other")):
        os.utime(runs / name / "config.json", (1000 + age, 1000 + age))
    config, folder = program.parse(["--runs", str(runs), "--resume"])
    assert folder == runs / "tiny"
    assert (config.train.steps, config.resume) == (8, True)


def test_a_scaling_of_a_named_config_can_be_replaced():
    for kind in ("default", "linear"):
        config, _ = program.parse(["--config=llama3.2-1b", f"--rope-type={kind}"])
        assert config.model.rope.rope_type == kind


@pytest.mark.parametrize("name", list(CONFIGS))
def test_named_configs_are_chosen_and_options_override_them(name):
    assert program.parse(["--config", name]) == (CONFIGS[name], None)
    config, _ = program.parse(["--steps", "7", f"--config={name}"])
    assert config == dataclasses.replace(CONFIGS[name], train=dataclasses.replace(CONFIGS[name].train, steps=7))


def test_options_survive_json_and_other_versions_raise():
    config = dataclasses.replace(CONFIGS["micro"], data=(Path("a"), Path("b")), name="x", prompt="é")
    values = json.loads(json.dumps(to_json(config)))
    assert from_json(values) == config
    with pytest.raises(RunError, match="differs in these fields: flavour"):
        from_json({**values, "flavour": 1})


def test_start_reports_what_trains_and_each_line_reports_progress(finished):
    out = finished[1]
    for pattern in (
        r"^model +[\d,]+ parameters, 100% trainable, on cpu$",
        r"^attention +xla: cudnn needs an NVIDIA GPU with cuDNN, got a cpu device$",
        r"^compiled +the step in \d+:\d\d$",
        r"^memory +\d+ KiB per step: parameters \d+ KiB, optimizer \d+ KiB, batch \d+ bytes, temporaries \d+ KiB$",
        r"^ +of the .* GiB of host memory$",
        r"^loss +jax_pallas, chunked: no kernel for cpu devices$",
        r"^throughput +in FLOP/s, not MFU: the peak of cpu is unknown$",
        r"^training +8 steps of 2 x 16 = 32 tokens",
        r"^step +8/8  loss [\d.]+  grad [\d.]+  [\d,]+ tokens/s  [\d.]+ .?FLOP/s",
    ):
        assert re.search(pattern, out, re.MULTILINE), pattern


def test_a_known_peak_gives_the_utilization(place, monkeypatch, capsys):
    monkeypatch.setattr(program, "device_peak", lambda kind: 1e12)
    assert start(place, "a") == 0
    assert re.search(r"tokens/s  [\d.]+% MFU", capsys.readouterr().out)
    row = read_rows(place / "runs" / "a")[5]
    assert row["mfu"] == pytest.approx(row["flops_per_s"] / 1e12, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "frozen", "message"),
    [
        ([], ("hidden", "weight"), "the gradients of steps 1 to 3 are exactly zero"),
        (
            ["--no-tie-embeddings"],
            ("weight",),
            r"only ([\d,]+) of ([\d,]+) parameters train; the gradient is always zero for head$",
        ),
    ],
)
def test_no_throughput_is_reported_for_a_model_that_does_not_learn(
    place, monkeypatch, capsys, options, frozen, message
):
    def stopped(hidden, weight, *arguments, **keywords):
        hidden = jax.lax.stop_gradient(hidden) if "hidden" in frozen else hidden
        weight = jax.lax.stop_gradient(weight) if "weight" in frozen else weight
        return linear_cross_entropy(hidden, weight, *arguments, **keywords)

    monkeypatch.setattr(jax_pallas, "linear_cross_entropy", stopped)
    assert start(place, "a", *options) == 1
    captured = capsys.readouterr()
    found = re.search(f"^error: no throughput to report: {message}", captured.err, re.MULTILINE)
    assert found, captured.err
    assert "tokens/s" not in captured.out
    if found.groups():
        trained, total = (int(text.replace(",", "")) for text in found.groups())
        assert total - trained == 280 * 16


def test_nothing_in_a_step_waits_for_the_device(place, monkeypatch):
    """Between fetches, nothing reads an array, and there is no implicit transfer to or from the device."""
    reads: list[int] = []
    current = 0
    value = ArrayImpl._value

    def read(self):
        reads.append(current)
        return value.fget(self)

    def note(state):
        nonlocal current
        current += 1

    inner = program.train

    def guarded(*arguments):
        nonlocal current
        monkeypatch.setattr(ArrayImpl, "_value", property(read))
        with jax.transfer_guard("disallow"):
            result = inner(*arguments)
        monkeypatch.setattr(ArrayImpl, "_value", value)
        return result

    original = Trainer.__init__

    def patched(self, *arguments, **options) -> None:
        original(self, *arguments, **options)
        step = self.step

        def counted(state, batch):
            note(state)
            return step(state, batch)

        self.step = counted

    monkeypatch.setattr(Trainer, "__init__", patched)
    monkeypatch.setattr(program, "train", guarded)
    assert (
        start(place, "a", "--eval-every", "0", "--checkpoint-every", "7", "--log-every", "5", "--accumulate", "2") == 0
    )
    # 0: the initial step number; 5: the log of steps 1 to 4; 7: the checkpoint; 8: the end.
    assert set(reads) == {0, 5, 7, 8}


def test_document_index_names_the_documents_of_windows():
    stream = np.array([5, 6, 0, 7, 8, 9, 0, 4, 4, 0])
    places = DocumentIndex(stream, end=0, names=["a", "b", "c"])
    assert places.describe(np.array([0, 2, 3]), 2) == (
        "tokens 0 to 1 (a, from its token 0), tokens 2 to 3 (a, from its token 2), tokens 3 to 4 (b, from its token 0)"
    )
    assert places.describe(np.arange(7), 1).endswith("(b, from its token 0), and 3 more windows")


# The step


HALF = ModelConfig(280, 16, 1, 2, 1, 8, 24, 16, tie_embeddings=False, dtype="bfloat16")


def test_training_computes_no_logits_of_the_whole_vocabulary_outside_the_loss():
    """Logits are computed only inside linear_cross_entropy, so no array of the step has the axes B, T and V."""
    trainer = small_trainer()
    text = str(jax.make_jaxpr(trainer.step)(trainer.initial, random_batch(2)))
    assert "2,16,16]" in text
    assert "2,16,280]" not in text


def test_head_is_never_transposed_into_a_copy():
    trainer = small_trainer()
    compiled = trainer.compile(2, 16).as_text() or ""
    assert "f32[280,16]" in compiled
    assert not re.search(r"f32\[16,280\]\S* (transpose|copy)\(", compiled)


def test_a_cast_head_reaches_the_loss_and_has_a_float32_gradient(monkeypatch):
    taken = []

    def loss(hidden: jax.Array, head: jax.Array, *rest: Any, **options: Any) -> jax.Array:
        taken.append(head.dtype)
        return linear_cross_entropy(hidden, head, *rest, **options)

    monkeypatch.setattr(jax_pallas, "linear_cross_entropy", loss)
    trainer = Trainer(Decoder(HALF, rngs=nnx.Rngs(0)), TrainConfig(steps=8, cast_head=True))
    _, gradients = jax.eval_shape(trainer._gradients, trainer.initial.params, random_batch(2))
    assert taken == [jnp.bfloat16]
    assert gradients["head"].dtype == jnp.float32


def test_a_cast_head_gives_the_same_loss_and_a_rounded_gradient(monkeypatch):
    taken = []

    def loss(hidden: jax.Array, head: jax.Array, *rest: Any, **options: Any) -> jax.Array:
        taken.append(head.dtype)
        return linear_cross_entropy(hidden, head, *rest, **options)

    monkeypatch.setattr(jax_pallas, "linear_cross_entropy", loss)
    found = []
    for cast in (False, True):
        trainer = Trainer(Decoder(HALF, rngs=nnx.Rngs(0)), TrainConfig(steps=8, cast_head=cast))
        value, gradients = jax.jit(trainer._gradients)(trainer.initial.params, random_batch(2))
        found.append((value, gradients["head"][...]))
    (value, exact), (other, rounded) = found
    assert taken == [jnp.float32, jnp.bfloat16]
    assert rounded.dtype == exact.dtype == jnp.float32
    assert value == other  # the head's matmuls have the same bfloat16 operands
    assert 0 < jnp.linalg.norm(rounded - exact) < 2**-8 * jnp.linalg.norm(exact)


def unevenly_ignored(rows: int) -> Batch:
    """Returns a batch with one counted token in the first row, none in the second, and most in the others."""
    batch = random_batch(rows)
    targets = np.where(np.random.default_rng(5).random(batch.targets.shape) < 0.1, IGNORED, batch.targets)
    targets[0, 1:] = IGNORED
    targets[1] = IGNORED
    return Batch(batch.tokens, targets.astype(np.int32))


def test_micro_batches_make_the_gradients_of_the_whole_batch():
    batch = unevenly_ignored(4)
    results = []
    for accumulate in (1, 2, 4):
        trainer = small_trainer(batch_size=4, accumulate=accumulate, z_loss_weight=1e-2, label_smoothing=0.1)
        results.append(jax.jit(trainer._gradients)(trainer.initial.params, batch))
    (loss, gradients), *others = results
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))
    for other_loss, other_gradients in others:
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * largest), other_gradients, gradients
        )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_loss_of_a_step_is_that_of_materialized_logits_over_counted_tokens(accumulate):
    trainer, batch = small_trainer(batch_size=4, accumulate=accumulate, z_loss_weight=0.01), unevenly_ignored(4)
    model = trainer.model(trainer.initial.params)
    logits = np.asarray(model(jnp.asarray(batch.tokens)) @ model.head_weight().T, np.float64)
    lse = np.log(np.exp(logits).sum(axis=-1))
    counted = batch.targets != IGNORED
    target_logits = np.take_along_axis(logits, np.where(counted, batch.targets, 0)[..., None], axis=-1)[..., 0]
    expected = np.where(counted, lse - target_logits + 0.01 * lse**2, 0.0).sum() / counted.sum()
    assert float(trainer.step(trainer.initial, batch)[1].loss) == pytest.approx(expected, rel=1e-5)


def test_one_gradient_of_the_head_is_in_memory_for_any_number_of_micro_batches():
    trainer = small_trainer(batch_size=4, accumulate=4)
    text = str(jax.make_jaxpr(trainer.step)(trainer.initial, random_batch(4)))
    assert "f32[280,16]" in text
    assert "[4,280,16]" not in text


def test_parts_are_all_parameters_once():
    trainer = small_trainer()
    assert sum(part.size for part in trainer.parts) == sum(
        leaf.size for leaf in jax.tree.leaves(trainer.initial.params)
    )
    assert len({part.name for part in trainer.parts}) == len(trainer.parts)
    _, report = jax.eval_shape(trainer.step, trainer.initial, random_batch(2))
    assert report.trained.shape == (len(trainer.parts),)


def test_held_out_loss_is_the_mean_over_tokens_for_any_batch_size():
    trainer = small_trainer()
    windows = random_batch(5)  # with batches of 2, half of the last batch is padding
    model = trainer.model(trainer.initial.params)
    logits = np.asarray(model(jnp.asarray(windows.tokens)) @ model.head_weight().T, np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_probs, windows.targets[..., None], axis=-1).mean()
    assert trainer.held_out_loss(trainer.initial.params, windows) == pytest.approx(expected, rel=1e-5)


def test_schedule_rises_to_the_peak_and_ends_at_zero():
    rate = learning_rate_schedule(TrainConfig(steps=100, warmup_steps=10, learning_rate=2.0))
    got = np.array([rate(step) for step in (0, 4, 9, 10, 55, 99)])
    np.testing.assert_allclose(got[:5], [0.2, 1.0, 2.0, 2.0, 1.0], rtol=1e-5)
    assert 0 < got[5] < 0.001
    without = learning_rate_schedule(TrainConfig(steps=100, warmup_steps=0, learning_rate=2.0))
    assert float(without(0)) == 2.0


def test_weight_decay_skips_norms():
    optimizer = make_optimizer(TrainConfig(warmup_steps=0, learning_rate=0.1, weight_decay=0.5))
    params = {"norm": jnp.ones(4), "matrix": jnp.ones((4, 4))}
    gradients = jax.tree.map(jnp.zeros_like, params)
    state = jax.jit(optimizer.init)(params)
    updates: Any = jax.jit(optimizer.update)(gradients, state, params)[0]
    np.testing.assert_array_equal(updates["norm"], 0.0)
    np.testing.assert_allclose(updates["matrix"], -0.05, rtol=1e-6)


def test_running_mean_looks_back_a_fortieth_of_the_run():
    np.testing.assert_allclose(running_mean(np.array([5.0, 4.0, 3.0])), [5.0, 4.0, 3.0])
    means = running_mean(np.arange(160.0))
    np.testing.assert_allclose(means[:5], [0.0, 0.5, 1.0, 1.5, 2.5])
    assert means[-1] == pytest.approx((156 + 157 + 158 + 159) / 4)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3725, "1:02:05")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_model_needs_neither_the_command_lines_libraries_nor_torch():
    held = held_out_windows(np.arange(40, dtype=np.int32), 8, 2)
    assert held.tokens.shape == (2, 8)
    code = (
        "import sys, flax_models.model.decoder, flax_models.train.step\n"
        "print([name for name in ('torch', 'tyro', 'tensorboardX', 'orbax', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
