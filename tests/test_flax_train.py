"""`python -m flax_models.train`, run whole on a few small texts: files, resumption, errors, the step itself."""

import contextlib
import dataclasses
import io
import json
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

import flax_models.train as program
from flax_models.batches import Batch, held_out_windows
from flax_models.checkpoint import Checkpoints
from flax_models.config import CONFIGS, RunConfig, TrainConfig, from_json, to_json
from flax_models.display import duration
from flax_models.errors import RunError
from flax_models.metrics import MetricsLog, read_rows
from flax_models.model import Decoder, ModelConfig
from flax_models.plot import running_mean
from flax_models.run_folder import new_folder
from flax_models.step import Trainer, TrainState, learning_rate_schedule, make_optimizer

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


def write_texts(folder: Path) -> None:
    generator = np.random.default_rng(0)
    folder.mkdir()
    for i in range(12):
        lines = (" ".join(generator.choice(WORDS, size=8)) for _ in range(20))
        (folder / f"{i}.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with texts in data/, the cache beside it, and runs/ to come."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_texts(tmp_path / "data")
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A place whose run `whole` is finished, made once, and what the run printed; tests read it or copy from it."""
    place = tmp_path_factory.mktemp("finished")
    write_texts(place / "data")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        assert start(place, "whole") == 0
    return place, out.getvalue()


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the finished run's place that a test may spoil; the run knows its texts by their old path."""
    shutil.copytree(finished[0] / "runs", tmp_path / "runs")
    return tmp_path


def train(place: Path, *options: str) -> int:
    return program.main(["--runs", str(place / "runs"), *options])


def start(place: Path, name: str, *options: str) -> int:
    return train(place, "--name", name, "--data", str(place / "data"), *SMALL, *options)


def learned(folder: Path) -> list[dict]:
    """The rows of a run without what the clock put there."""
    return [
        {name: value for name, value in row.items() if name not in ("seconds", "tokens_per_s")}
        for row in read_rows(folder)
    ]


def test_a_run_leaves_all_its_files_and_says_how_it_did(finished):
    place, out = finished
    folder = place / "runs" / "whole"
    assert {path.name for path in folder.iterdir() if not path.name.startswith("events.out")} == {
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "loss.png",
        "result.json",
        "checkpoints",
    }
    assert len(list(folder.glob("events.out.tfevents*"))) == 1
    assert sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) == [6, 8], "the last two are kept"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    rows = read_rows(folder)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [4, 8]
    train_rows = [row for row in rows if "loss" in row]
    assert set(train_rows[0]) == {"step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "seconds"}
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
    assert "\x1b" not in out, "no colours or bars where there is no terminal"


def interrupt_after(monkeypatch, steps: int) -> None:
    """Makes the run stop as by Ctrl-C once so many steps were taken."""
    step = Trainer.__init__

    def patched(self, *arguments, **options) -> None:
        step(self, *arguments, **options)
        inner, taken = self.step, 0

        def counted(state: TrainState, batch: Batch):
            nonlocal taken
            if taken == steps:
                raise KeyboardInterrupt
            taken += 1
            return inner(state, batch)

        self.step = counted

    monkeypatch.setattr(Trainer, "__init__", patched)


def test_resuming_gives_what_the_uninterrupted_run_gives_to_the_bit(finished, place, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_after(patch, steps=5)
        assert start(place, "broken") == 130
    assert "--resume continues" in capsys.readouterr().err
    assert train(place, "--name", "broken", "--resume") == 0
    assert "from step 3" in capsys.readouterr().out

    whole, broken = finished[0] / "runs" / "whole", place / "runs" / "broken"
    assert learned(whole) == learned(broken)
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, broken)]
    assert results[0]["held_out_loss"] == results[1]["held_out_loss"]

    like = small_trainer().initial
    states = [Checkpoints(folder / "checkpoints").restore(like) for folder in (whole, broken)]
    assert states[0][1] == states[1][1]
    jax.tree.map(np.testing.assert_array_equal, states[0][0], states[1][0])


def test_resuming_a_finished_run_takes_no_step_and_reports_again_wherever_the_text_lies(copied):
    write_texts(copied / "moved")
    before = read_rows(copied / "runs" / "whole")
    (copied / "runs" / "whole" / "result.json").unlink()
    assert train(copied, "--resume", "--name", "whole", "--data", str(copied / "moved")) == 0
    assert read_rows(copied / "runs" / "whole") == before
    assert (copied / "runs" / "whole" / "result.json").exists()


def test_a_diverged_run_names_the_step_and_keeps_its_last_good_checkpoint(place, monkeypatch, capsys):
    original = Trainer.__init__

    def poisoned(self, *arguments, **options) -> None:
        original(self, *arguments, **options)
        inner = self.step

        def step(state: TrainState, batch: Batch):
            if int(state.step) == 4:
                state = state._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))
            return inner(state, batch)

        self.step = step

    monkeypatch.setattr(Trainer, "__init__", poisoned)
    assert start(place, "a") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: the loss is nan at step 5; the checkpoint of step 3 is kept")
    assert "Traceback" not in captured.out + captured.err
    folder = place / "runs" / "a"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["3"]
    assert read_rows(folder)[-1]["loss"] == "nan"
    assert (folder / "loss.png").exists()


def test_what_a_person_can_mend_is_one_line_and_leaves_nothing_behind(place, capsys):
    (place / "empty").mkdir()
    (place / "short.txt").write_text("a few words\n")
    data = str(place / "data")
    for options, message in [
        (["--data", str(place / "absent")], "--data: no such file or folder: .*absent"),
        (["--data", str(place / "empty")], "--data: no text found in .*empty"),
        (["--data", str(place / "short.txt")], "too little text to train on"),
        (["--data", data, "--vocab-size", "100"], "--vocab-size must be at least 257"),
        (["--resume"], "--resume: nothing to continue, .*runs holds no tiny run"),
        (["--resume", "--name", "b"], "--resume: nothing to continue, .*b holds no run"),
        (["--name", "a/b"], "--name must be the name of one folder, got 'a/b'"),
    ]:
        assert train(place, *options) == 1, options
        captured = capsys.readouterr()
        assert re.match(f"error: {message}", captured.err), captured.err
        assert captured.err.count("\n") == 1
        assert not (place / "runs").exists()


def test_a_wrong_option_is_named(place, capsys):
    for options, message in [
        (["--learning-rte", "1"], "--learning-rte"),
        (["--config", "huge"], "huge"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--beta2", "1"], r"--beta2 must lie in [0, 1), got 1"),
        (["--num-heads", "5", "--num-kv-heads", "2"], "num_heads must be a multiple of num_kv_heads 2, got 5"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            train(place, *options)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_help_lists_every_option_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for cls in (RunConfig, TrainConfig, ModelConfig):
        for field in dataclasses.fields(cls):
            if not dataclasses.is_dataclass(field.type):
                assert field.name.replace("_", "-") in out
    assert "Text files or folders to train on" in out


def test_a_taken_name_and_a_changed_option_or_text_are_refused(copied, capsys):
    assert start(copied, "whole") == 1
    assert re.match(r"error: .*whole exists already: --resume continues it", capsys.readouterr().err)
    resume = ["--name", "whole", "--resume"]
    assert train(copied, *resume, "--learning-rate", "0.5") == 1
    assert re.search(r"--learning-rate is 0.01 in .*config.json, got 0.5", capsys.readouterr().err)

    record = copied / "runs" / "whole" / "config.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "corpus_sha256": "0" * 64}))
    assert train(copied, *resume) == 1
    assert "the text has changed" in capsys.readouterr().err
    record.write_text("{")
    assert train(copied, *resume) == 1
    assert re.match("error: cannot read .*config.json", capsys.readouterr().err)


def test_a_run_without_a_checkpoint_or_with_a_broken_one_cannot_be_resumed(copied, capsys):
    checkpoints = copied / "runs" / "whole" / "checkpoints"
    for path in (checkpoints / "8" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert train(copied, "--name", "whole", "--resume") == 1
    err = capsys.readouterr().err
    assert re.match(r"error: cannot read the checkpoint .*8: .", err)
    assert err.count("\n") == 1
    shutil.rmtree(checkpoints)
    assert train(copied, "--name", "whole", "--resume") == 1
    assert "checkpoints holds no checkpoint" in capsys.readouterr().err


def test_unnamed_runs_are_numbered_and_the_latest_is_continued(copied):
    runs = copied / "runs"
    assert new_folder(RunConfig(runs=runs)) == runs / "tiny"
    (runs / "whole").rename(runs / "tiny")
    assert new_folder(RunConfig(runs=runs)) == runs / "tiny-2"
    shutil.copytree(runs / "tiny", runs / "tiny-2")
    shutil.copytree(runs / "tiny", runs / "tiny-other")  # a name of someone's own
    for age, name in enumerate(("tiny-2", "tiny", "tiny-other")):
        os.utime(runs / name / "config.json", (1000 + age, 1000 + age))
    config, folder = program.parse(["--runs", str(runs), "--resume"])
    assert folder == runs / "tiny"
    assert (config.train.steps, config.resume) == (8, True)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_named_configs_are_chosen_and_options_override_them(name):
    assert program.parse(["--config", name]) == (CONFIGS[name], None)
    config, _ = program.parse(["--steps", "7", f"--config={name}"])
    assert config == dataclasses.replace(CONFIGS[name], train=dataclasses.replace(CONFIGS[name].train, steps=7))


def test_options_survive_json_and_other_versions_are_refused():
    config = dataclasses.replace(CONFIGS["micro"], data=(Path("a"), Path("b")), name="x", prompt="é")
    values = json.loads(json.dumps(to_json(config)))
    assert from_json(values) == config
    with pytest.raises(RunError, match="differ in flavour"):
        from_json({**values, "flavour": 1})


# The step


def small_trainer(**changes) -> Trainer:
    config = ModelConfig(280, 16, 1, 2, 1, 8, 24, 16)
    return Trainer(Decoder(config, rngs=nnx.Rngs(0)), TrainConfig(steps=8, batch_size=2, warmup_steps=2, **changes))


def random_batch(rows: int, length: int = 16) -> Batch:
    tokens = np.random.default_rng(3).integers(280, size=(rows, length + 1)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def test_training_computes_no_logits_of_the_whole_vocabulary_outside_the_loss():
    """The head and the loss meet only inside linear_cross_entropy: no array of the step has B, T and V at once."""
    trainer = small_trainer()
    text = str(jax.make_jaxpr(trainer.step)(trainer.initial, random_batch(2)))
    assert "2,16,16]" in text
    assert "2,16,280]" not in text


def test_head_is_never_transposed_into_a_copy():
    trainer = small_trainer()
    compiled = trainer.step.lower(trainer.initial, random_batch(2)).compile().as_text()  # type: ignore[attr-defined]
    assert "f32[280,16]" in compiled
    assert not re.search(r"f32\[16,280\]\S* (transpose|copy)\(", compiled)


def test_held_out_loss_is_the_mean_over_tokens_whatever_the_batches():
    trainer = small_trainer()
    windows = random_batch(5)  # batches of 2: the last one is half padding
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


def test_weight_decay_leaves_norms_alone():
    optimizer = make_optimizer(TrainConfig(warmup_steps=0, learning_rate=0.1, weight_decay=0.5))
    params = {"norm": jnp.ones(4), "matrix": jnp.ones((4, 4))}
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates: Any = optimizer.update(gradients, optimizer.init(params), params)[0]
    np.testing.assert_array_equal(updates["norm"], 0.0)
    np.testing.assert_allclose(updates["matrix"], -0.05, rtol=1e-6)


def test_metrics_after_the_checkpoint_are_dropped_and_a_cut_line_is_passed_over(tmp_path):
    log = MetricsLog(tmp_path, after=0)
    for step in range(1, 5):
        log.write(step, loss=float(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3, 4]
    log = MetricsLog(tmp_path, after=2)
    log.write(3, loss=float("inf"))
    log.close()
    assert read_rows(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": "inf"}]


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
        "import sys, flax_models.model, flax_models.step\n"
        "print([name for name in ('torch', 'tyro', 'tensorboardX', 'orbax', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
